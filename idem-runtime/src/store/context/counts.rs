//! Counts of events that no record keeps: failures without a record, refusals in transactions, duplicates that find an
//! attempt running, and waits of duplicates whose messages have few deliveries left.

use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use super::tag_counts::TagCounts;
use crate::key::Key;
use crate::sync::SharedOnce;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// Counts of one store handle. All calls in transactions share one set of counts, because the store handle of such a
/// call ends with the call.
pub(crate) struct EventCounts {
    tables: Arc<CountTables>,
    /// Hash of the table's name, so that equal keys of two tables have different tags in [`OF_TRANSACTIONS`]. Zero for
    /// a handle that outlives its calls.
    place: u64,
}

struct CountTables {
    /// Consecutive failures of bodies that run without a record, by key.
    failures: TagCounts,
    /// Consecutive calls in transactions that the store refused, by key.
    refusals: TagCounts,
    /// Number of times that a duplicate found a running attempt, by key and attempt.
    meetings: TagCounts,
    /// Number of duplicates that wait only because their message has few deliveries left.
    last_waits: AtomicUsize,
}

/// The counts of all calls in transactions.
static OF_TRANSACTIONS: SharedOnce<Arc<CountTables>> = SharedOnce::new();

impl CountTables {
    fn new() -> Arc<Self> {
        let [failures, refusals, meetings] = [const { TagCounts::new() }; 3];
        Arc::new(Self { failures, refusals, meetings, last_waits: AtomicUsize::new(0) })
    }
}

impl EventCounts {
    /// Makes the counts of a store handle that outlives its calls.
    pub(super) fn of_handle() -> Self {
        Self { tables: CountTables::new(), place: 0 }
    }

    /// Makes the counts of a handle for one call in a transaction. `place` names the table or the schema of the
    /// records.
    pub(super) fn of_transaction(place: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(place.as_bytes());
        Self { tables: Arc::clone(OF_TRANSACTIONS.get_or_init(CountTables::new)), place: hasher.finish() }
    }

    /// Returns the counts of a forked child for the same records.
    pub(super) fn in_child(&self) -> Self {
        match self.place {
            0 => Self::of_handle(),
            place => Self { tables: Arc::clone(&self.tables), place },
        }
    }

    /// Returns the tag under which events of `key` are counted.
    fn tag(&self, key: &Key) -> u64 {
        key.seed() ^ self.place
    }

    /// Records the end of a body of `key` that ran without a record. Returns the number of consecutive failures of
    /// `key`; the number starts again if the table has forgotten the key.
    pub(crate) fn unrecorded_failures(&self, key: &Key, is_ok: bool) -> u32 {
        self.tables.failures.count_or_forget(self.tag(key), !is_ok)
    }

    /// Records whether the store refused a call of `key` in a transaction. Returns the number of consecutive refusals
    /// of `key`; the number starts again if the table has forgotten the key.
    pub(crate) fn refusals_in_transactions(&self, key: &Key, is_refused: bool) -> u32 {
        self.tables.refusals.count_or_forget(self.tag(key), is_refused)
    }

    /// Records that a duplicate found attempt number `attempt` of `key` running. Returns how often duplicates in this
    /// handle have found this attempt; the number starts again if the table has forgotten the attempt.
    pub(crate) fn meets(&self, key: &Key, attempt: u32) -> u32 {
        // Multiplying by an odd number spreads attempt numbers over all bits of the tag.
        self.tables.meetings.again(self.tag(key) ^ u64::from(attempt).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Lets a duplicate wait because its message has few deliveries left. Returns `None` if [`LastWait::MOST`]
    /// duplicates already wait for this reason.
    pub(crate) fn last_wait(&self) -> Option<LastWait> {
        let more = |waiting| (waiting < LastWait::MOST).then_some(waiting + 1);
        let waits = self.tables.last_waits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        waits.then(|| LastWait(Arc::clone(&self.tables)))
    }
}

/// A duplicate that waits only because its message has few deliveries left. A waiting duplicate occupies a slot of its
/// consumer for as long as an attempt may run, so the number of waits is limited.
pub(crate) struct LastWait(Arc<CountTables>);

impl LastWait {
    /// Largest number of [`LastWait`]s in one store handle at a time.
    pub(crate) const MOST: usize = 4;
}

impl Drop for LastWait {
    fn drop(&mut self) {
        self.0.last_waits.fetch_sub(1, Ordering::Relaxed);
    }
}
