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
/// - [`revoked`](OffsetTracker::revoked) forgets a partition, at a rebalance and before a `seek`. What was started before and is
///   settled later changes nothing: the commit is the new owner's.
/// - Offsets need not be contiguous: transactions and compaction leave gaps.
///
/// `P` is what names a partition, for example `(String, i32)`. The tracker is plain data: keep it in the loop that polls, and let
/// handlers hand their [`Started`] back to it.
///
/// ```
/// use idem_runtime::brokers::OffsetTracker;
///
/// let mut tracker = OffsetTracker::new();
/// let seventh = tracker.started(&"orders-0", 7);
/// let eighth = tracker.started(&"orders-0", 8);
/// assert_eq!(tracker.settled(eighth), None, "7 is still running");
/// assert_eq!(tracker.settled(seventh), Some(9), "the offset to read next");
/// ```
#[derive(Debug)]
pub struct OffsetTracker<P> {
    /// The present assignment of each partition.
    assigned: HashMap<P, u64>,
    assignments: HashMap<u64, Assignment>,
    /// How many assignments there have been.
    numbered: u64,
}

/// A partition from when it was assigned until it is revoked.
#[derive(Debug)]
struct Assignment {
    /// How often each offset has been started and not settled.
    open: BTreeMap<i64, u32>,
    /// The offset after the last one that was started.
    next: i64,
    /// The last offset that was told to be committed.
    committed: i64,
}

/// A message that has started; [`OffsetTracker::settled`] takes it.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "an offset that is never settled holds up the commits of its partition"]
pub struct Started {
    assignment: u64,
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
        Self { assigned: HashMap::new(), assignments: HashMap::new(), numbered: 0 }
    }

    /// The message has been settled: acknowledged, set aside, or handed to a retry topic. Returns the offset that may be
    /// committed now, which is the next one to read, if that has moved on.
    ///
    /// Nothing is returned for a partition that was revoked since: the message may be somebody else's by now.
    #[expect(clippy::needless_pass_by_value, reason = "nothing is settled twice")]
    pub fn settled(&mut self, started: Started) -> Option<i64> {
        let Started { assignment, offset } = started;
        let assignment = self.assignments.get_mut(&assignment)?;
        if let Some(count) = assignment.open.get_mut(&offset) {
            *count -= 1;
            if *count == 0 {
                assignment.open.remove(&offset);
            }
        }
        let position = assignment.open.first_key_value().map_or(assignment.next, |(offset, _)| *offset);
        let moved_on = position > assignment.committed;
        assignment.committed = assignment.committed.max(position);
        moved_on.then_some(position)
    }
}

impl<P: Clone + Eq + Hash> OffsetTracker<P> {
    /// A message of `partition` has been received. Its handler may run beside others.
    pub fn started(&mut self, partition: &P, offset: i64) -> Started {
        let number = match self.assigned.get(partition) {
            Some(number) => *number,
            None => {
                self.numbered += 1;
                self.assigned.insert(partition.clone(), self.numbered);
                self.numbered
            }
        };
        // Nothing before the first message is this consumer's to commit.
        let first = || Assignment { open: BTreeMap::new(), next: offset, committed: offset };
        let assignment = self.assignments.entry(number).or_insert_with(first);
        *assignment.open.entry(offset).or_default() += 1;
        assignment.next = assignment.next.max(offset.saturating_add(1));
        Started { assignment: number, offset }
    }

    /// How many messages of `partition` have started and are not settled: for a bound on what is handled at a time.
    pub fn in_flight(&self, partition: &P) -> usize {
        let assignment = self.assigned.get(partition).and_then(|number| self.assignments.get(number));
        assignment.map_or(0, |assignment| assignment.open.values().map(|count| *count as usize).sum())
    }

    /// The partition is no longer this consumer's, or is about to be read from another offset. Commit what
    /// [`settled`](OffsetTracker::settled) has returned before.
    pub fn revoked(&mut self, partition: &P) {
        if let Some(number) = self.assigned.remove(partition) {
            self.assignments.remove(&number);
        }
    }
}
