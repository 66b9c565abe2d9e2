//! State of a store handle in one process, apart from its queues and threads.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::file::Database;
use crate::clock::{Instant, wall_millis};
use crate::kit::waiting::WaiterTable;
use crate::sync::lock;

/// Time that a reservation waits before it takes over a lease that lapsed while the lock was held. The owner of the
/// lease tries to get the lock every half millisecond.
pub(super) const SPARED: Duration = Duration::from_millis(250);
/// Number of reservations after which a clean-up is due, so that not every lone call pays for a clean-up.
const CLEAN_UP_AFTER: u32 = 8;

/// A handle's file, its waiting duplicates and the times of its lock, in one process.
pub(in super::super) struct HandleState {
    pub(in super::super) database: Arc<Database>,
    pub(in super::super) waiting: WaiterTable,
    /// Number of waiting duplicates.
    waiters: AtomicUsize,
    /// True if the upkeep thread waits for the lock: the writer lets the upkeep thread go first.
    upkeep_waits: AtomicBool,
    /// True if the writer waits for the lock: after each transaction the upkeep thread leaves the lock to the writer.
    writer_waits: AtomicBool,
    /// Start of the time for which the lock was held, in milliseconds of the wall clock, and the time until which
    /// leases that lapsed meanwhile are not taken over. `None` if the lock was not held for long.
    locked: Mutex<Option<(i64, Instant)>>,
    /// Number of reservations since the last clean-up.
    reservations: AtomicU32,
}

impl HandleState {
    pub(super) fn new(database: Arc<Database>) -> Self {
        Self {
            database,
            waiting: WaiterTable::default(),
            waiters: AtomicUsize::new(0),
            upkeep_waits: AtomicBool::new(false),
            writer_waits: AtomicBool::new(false),
            locked: Mutex::default(),
            reservations: AtomicU32::new(0),
        }
    }

    /// Returns milliseconds since 1970 by the wall clock of this host.
    pub(super) fn wall_millis(&self) -> i64 {
        wall_millis(&*self.database.clock)
    }

    /// Counts a waiting duplicate until the returned guard is dropped.
    pub(in super::super) fn count_waiter(&self) -> WaiterGuard<'_> {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        WaiterGuard(&self.waiters)
    }

    /// Returns whether the upkeep thread waits for the lock, so that it must get the lock first.
    pub(super) fn upkeep_waits(&self) -> bool {
        self.upkeep_waits.load(Ordering::SeqCst)
    }

    /// Returns whether the writer waits for the lock.
    pub(super) fn writer_waits(&self) -> bool {
        self.writer_waits.load(Ordering::SeqCst)
    }

    /// Notes that the upkeep thread has the lock, so that the writer may ask for the lock again.
    pub(super) fn upkeep_has_lock(&self) {
        self.upkeep_waits.store(false, Ordering::SeqCst);
    }

    /// Notes that the lock was held from `since` (by the wall clock) until now, so that no lease could be renewed. For
    /// the time `spared`, leases that lapsed meanwhile are not taken over.
    pub(super) fn was_locked_since(&self, since: i64, spared: Duration) {
        *lock(&self.locked) = Some((since, self.database.clock.now().saturating_add(spared)));
    }

    /// Returns the time since which no lease could be renewed; `None` if every lapsed lease may be taken over at `now`.
    pub(super) fn locked_since(&self, now: Instant) -> Option<i64> {
        lock(&self.locked).filter(|(_, until)| now < *until).map(|(since, _)| since)
    }

    /// Counts `more` reservations. If a clean-up is due, returns the number of reservations since the last clean-up.
    pub(super) fn reserved(&self, more: u32) -> Option<u32> {
        let reservations = self.reservations.fetch_add(more, Ordering::Relaxed) + more;
        let is_due = more > 0 && reservations >= CLEAN_UP_AFTER;
        is_due.then(|| self.reservations.swap(0, Ordering::Relaxed))
    }

    /// Returns the number of waiting duplicates.
    pub(super) fn waiters(&self) -> usize {
        self.waiters.load(Ordering::SeqCst)
    }
}

/// Guard that counts a waiting duplicate.
pub(in super::super) struct WaiterGuard<'a>(&'a AtomicUsize);

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Guard that marks a thread as waiting for the lock.
pub(super) struct LockWaitMark<'a>(&'a AtomicBool);

impl<'a> LockWaitMark<'a> {
    pub(super) fn upkeep(state: &'a HandleState) -> Self {
        Self::noted(&state.upkeep_waits)
    }

    pub(super) fn writer(state: &'a HandleState) -> Self {
        Self::noted(&state.writer_waits)
    }

    fn noted(waits: &'a AtomicBool) -> Self {
        waits.store(true, Ordering::SeqCst);
        Self(waits)
    }
}

impl Drop for LockWaitMark<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
