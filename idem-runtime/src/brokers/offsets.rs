//! Offsets of a partition that may be committed while its messages are settled out of order.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Tracks, for each partition, the offset that may be committed while several messages are handled at a time.
///
/// A committed offset means that all messages before it are done. If message 8 is settled while message 7 still runs,
/// and offset 9 is committed, a crash loses message 7. So a commit goes up to the first message that has started and is
/// not settled.
///
/// - A message that is never settled, because its handler was dropped, holds the commit at its offset: the message is
///   delivered again after a restart. Settled messages behind this offset take no memory.
/// - [`assigned`](OffsetTracker::assigned) begins a generation of a partition, and [`revoked`](OffsetTracker::revoked)
///   ends it. The tracker notes for each message the generation in which the message started. A message that is settled
///   after the end of its generation commits nothing, even if the partition has been assigned to this consumer again:
///   another consumer may have read the partition in between, and committed its own offsets.
/// - Offsets need not be contiguous: transactions and compaction leave gaps.
///
/// `P` names a partition, for example `(String, i32)`. The tracker is plain data: keep it in the loop that polls the
/// consumer, and let handlers return their [`StartedMessage`] to that loop.
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
    /// Current generation of each assigned partition.
    assigned: HashMap<P, u64>,
    generations: HashMap<u64, Generation>,
    /// Number of the latest generation; 0 before the first.
    numbered: u64,
}

/// A partition between its assignment and its revocation or next assignment.
#[derive(Debug, Default)]
struct Generation {
    /// Number of unsettled messages for each started offset.
    open: BTreeMap<i64, u32>,
    /// The offset after the last started offset.
    next: i64,
    /// Last offset that was returned for a commit, or else the first started offset; `None` before the first message.
    committed: Option<i64>,
}

/// A message that has started, as the argument of [`OffsetTracker::settled`].
#[derive(PartialEq, Eq, Debug)]
#[must_use = "an offset that is never settled holds up the commits of its partition"]
pub struct StartedMessage {
    generation: u64,
    offset: i64,
}

impl StartedMessage {
    /// Returns the offset of the message.
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
    /// Creates a tracker without partitions.
    pub fn new() -> Self {
        Self { assigned: HashMap::new(), generations: HashMap::new(), numbered: 0 }
    }

    /// Settles a message that was acknowledged, set aside, or sent to a retry topic. Returns the offset that may be
    /// committed now (the next offset to read), if that offset has increased.
    ///
    /// Returns `None` if the partition was revoked or assigned again since the message started: another consumer may
    /// have received the message by now.
    #[expect(clippy::needless_pass_by_value, reason = "nothing is settled twice")]
    pub fn settled(&mut self, started: StartedMessage) -> Option<i64> {
        let StartedMessage { generation, offset } = started;
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
    /// Begins a new generation of the partition, because this consumer now reads the partition, or reads it from
    /// another offset. Call this in the callback of a rebalance, after a manual assignment, and after a `seek`. Ends an
    /// earlier generation that was not revoked, for example because the group considered this consumer lost.
    pub fn assigned(&mut self, partition: &P) {
        self.revoked(partition);
        self.numbered += 1;
        self.assigned.insert(partition.clone(), self.numbered);
        self.generations.insert(self.numbered, Generation::default());
    }

    /// Notes that a message of `partition` has been received. Handlers may run concurrently. Call this function before
    /// the consumer is polled again.
    ///
    /// Returns `None` if the partition is not assigned: another consumer receives the message, so don't handle it.
    pub fn started(&mut self, partition: &P, offset: i64) -> Option<StartedMessage> {
        let number = *self.assigned.get(partition)?;
        let generation = self.generations.get_mut(&number)?;
        *generation.open.entry(offset).or_default() += 1;
        generation.next = generation.next.max(offset.saturating_add(1));
        // This consumer must not commit offsets before its first message.
        generation.committed.get_or_insert(offset);
        Some(StartedMessage { generation: number, offset })
    }

    /// Returns the number of messages of `partition` that have started and are not settled. Use this number to limit
    /// the messages that are handled at a time.
    pub fn in_flight(&self, partition: &P) -> usize {
        let generation = self.assigned.get(partition).and_then(|number| self.generations.get(number));
        generation.map_or(0, |generation| generation.open.values().map(|count| *count as usize).sum())
    }

    /// Ends the generation of the partition, which this consumer no longer reads. Commit the last offset that
    /// [`settled`](OffsetTracker::settled) has returned.
    pub fn revoked(&mut self, partition: &P) {
        if let Some(number) = self.assigned.remove(partition) {
            self.generations.remove(&number);
        }
    }
}
