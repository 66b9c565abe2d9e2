//! Which offset of a partition may be committed while its messages are settled out of order.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Tells which offset of each partition may be committed while several of its messages are handled at a time.
///
/// A committed offset says that everything before it is done. If message 8 is settled while 7 still runs, and 9 is committed, a
/// crash loses 7. So a commit goes up to the first message that has started and is not settled.
///
/// - A message that is never settled, because its handler was dropped, holds the commit at its offset: it is delivered again
///   after a restart. What is settled behind it takes no memory.
/// - [`assigned`](OffsetTracker::assigned) begins a generation of a partition, and [`revoked`](OffsetTracker::revoked) ends it. A message
///   belongs to the generation in which it was started. What is settled after that generation commits nothing, also if the
///   partition has come back meanwhile: the commit is that of whoever had it in between.
/// - Offsets need not be contiguous: transactions and compaction leave gaps.
///
/// `P` is what names a partition, for example `(String, i32)`. The tracker is plain data: keep it in the loop that polls, and let
/// handlers hand their [`Started`] back to it.
///
/// ```
/// use idem_runtime::brokers::OffsetTracker;
///
/// let mut tracker = OffsetTracker::new();
/// tracker.assigned(&"orders-0");
/// let seventh = tracker.started(&"orders-0", 7).expect("assigned");
/// let eighth = tracker.started(&"orders-0", 8).expect("assigned");
/// assert_eq!(tracker.settled(eighth), None, "7 is still running");
/// assert_eq!(tracker.settled(seventh), Some(9), "the offset to read next");
/// ```
#[derive(Debug)]
pub struct OffsetTracker<P> {
    /// The present generation of each partition that is assigned.
    assigned: HashMap<P, u64>,
    generations: HashMap<u64, Generation>,
    /// How many generations there have been.
    numbered: u64,
}

/// A partition from when it is assigned until it is revoked or assigned again.
#[derive(Debug, Default)]
struct Generation {
    /// How often each offset has been started and not settled.
    open: BTreeMap<i64, u32>,
    /// The offset after the last one that was started.
    next: i64,
    /// The last offset that was told to be committed, or the first that was started; `None` before that.
    committed: Option<i64>,
}

/// A message that has started; [`OffsetTracker::settled`] takes it.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "an offset that is never settled holds up the commits of its partition"]
pub struct Started {
    generation: u64,
    offset: i64,
}

impl Started {
    /// The offset of the message.
    pub fn offset(&self) -> i64 {
        self.offset
    }
}

impl<P> Default for OffsetTracker<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P> OffsetTracker<P> {
    /// A tracker without partitions.
    pub fn new() -> Self {
        Self { assigned: HashMap::new(), generations: HashMap::new(), numbered: 0 }
    }

    /// The message has been settled: acknowledged, set aside, or handed to a retry topic. Returns the offset that may be
    /// committed now, which is the next one to read, if that has moved on.
    ///
    /// Nothing is returned if the partition was revoked or assigned again since: the message may be somebody else's by now.
    #[expect(clippy::needless_pass_by_value, reason = "nothing is settled twice")]
    pub fn settled(&mut self, started: Started) -> Option<i64> {
        let Started { generation, offset } = started;
        let generation = self.generations.get_mut(&generation)?;
        if let Some(count) = generation.open.get_mut(&offset) {
            *count -= 1;
            if *count == 0 {
                generation.open.remove(&offset);
            }
        }
        let position = generation.open.first_key_value().map_or(generation.next, |(offset, _)| *offset);
        let moved_on = Some(position) > generation.committed;
        generation.committed = generation.committed.max(Some(position));
        moved_on.then_some(position)
    }
}

impl<P: Clone + Eq + Hash> OffsetTracker<P> {
    /// The partition is this consumer's from now on, or is read from another offset: a new generation of it begins. For the callback of
    /// a rebalance, a manual assignment, and a `seek`. An earlier generation that nobody revoked, as where the group lost this
    /// consumer, ends.
    pub fn assigned(&mut self, partition: &P) {
        self.revoked(partition);
        self.numbered += 1;
        self.assigned.insert(partition.clone(), self.numbered);
        self.generations.insert(self.numbered, Generation::default());
    }

    /// A message of `partition` has been received. Its handler may run beside others. Call it before the consumer is polled again.
    ///
    /// `None` if the partition is not assigned: the message is another consumer's by now, so leave it.
    pub fn started(&mut self, partition: &P, offset: i64) -> Option<Started> {
        let number = *self.assigned.get(partition)?;
        let generation = self.generations.get_mut(&number)?;
        *generation.open.entry(offset).or_default() += 1;
        generation.next = generation.next.max(offset.saturating_add(1));
        // Nothing before the first message is this consumer's to commit.
        generation.committed.get_or_insert(offset);
        Some(Started { generation: number, offset })
    }

    /// How many messages of `partition` have started and are not settled: for a bound on what is handled at a time.
    pub fn in_flight(&self, partition: &P) -> usize {
        let generation = self.assigned.get(partition).and_then(|number| self.generations.get(number));
        generation.map_or(0, |generation| generation.open.values().map(|count| *count as usize).sum())
    }

    /// The partition is no longer this consumer's. Commit what [`settled`](OffsetTracker::settled) has returned before.
    pub fn revoked(&mut self, partition: &P) {
        if let Some(number) = self.assigned.remove(partition) {
            self.generations.remove(&number);
        }
    }
}
