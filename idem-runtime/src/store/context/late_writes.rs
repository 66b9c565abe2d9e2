//! Writes that no call waits for: renewals, and the ends of attempts whose calls were dropped or whose leases lapsed.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;

use tokio::sync::Notify;

use crate::key::Key;
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use crate::sync::{PerProcess, SharedOrAnew};

/// Number of later changes after which [`LateWrites`] may forget the late end of an attempt.
const LATE_ENDS_KEPT: u32 = 4096;

/// Late writes of one store handle in one process.
#[derive(Default)]
pub(crate) struct LateWrites {
    /// Number of writes and renewals under way.
    under_way: AtomicUsize,
    flushed: PerProcess<Notify>,
    /// Attempts that are renewed or ended after the lapse of their lease, by key.
    ends: SharedOrAnew<HashMap<Key, LateEnd>>,
    /// Number of changes of `ends`.
    changes: AtomicU32,
}

/// Attempts of one key that were renewed or ended after the lapse of their lease, or are being ended.
struct LateEnd {
    /// Number of writes under way that end an attempt of this key.
    writes: usize,
    /// Value of [`LateWrites::changes`] after the latest change of this entry.
    changed: u32,
}

impl LateWrites {
    /// Waits until no write is under way.
    pub(super) async fn flush(&self) {
        loop {
            let mut flushed = pin!(self.flushed.here().notified());
            flushed.as_mut().enable();
            if self.under_way.load(Ordering::SeqCst) == 0 {
                return;
            }
            flushed.await;
        }
    }

    /// Makes [`flush`](LateWrites::flush) wait until the returned value is dropped.
    pub(crate) fn under_way(self: &Arc<Self>) -> FlushGuard {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        FlushGuard(Arc::clone(self))
    }

    /// Prepares [`flush`](LateWrites::flush) for writes of this process, which may be a forked child.
    pub(super) fn expect(&self) {
        self.flushed.here();
    }

    /// Registers that an attempt of `key` is being ended after the lapse of its lease, until the returned value
    /// is dropped.
    pub(super) fn ends_late(self: &Arc<Self>, key: &Key) -> LateEndGuard {
        self.change(key, |end| end.writes += 1);
        LateEndGuard { late_writes: Arc::clone(self), key: key.clone() }
    }

    /// Records that an attempt of `key` was renewed or ended after the lapse of its lease.
    pub(super) fn ended_late(&self, key: &Key) {
        self.change(key, |_| ());
    }

    /// Number of changes of `ends` so far; argument of a later call of [`is_ending`](LateWrites::is_ending).
    pub(crate) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Returns whether an attempt of `key` is being ended after the lapse of its lease, or was renewed or ended after
    /// that lapse and after [`changes`](LateWrites::changes) had returned `since`.
    pub(super) fn is_ending(&self, key: &Key, since: u32) -> bool {
        let is_later = |end: &LateEnd| end.changed != since && end.changed.wrapping_sub(since) < u32::MAX / 2;
        self.ends.lock().get(key).is_some_and(|end| end.writes > 0 || is_later(end))
    }

    fn change(&self, key: &Key, change: impl FnOnce(&mut LateEnd)) {
        let mut ends = self.ends.lock();
        let changed = self.changes.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        // Removes old entries only when the length is a power of two: an outage adds many entries, and a scan at each
        // change would be slow.
        if ends.len() >= 64 && ends.len().is_power_of_two() {
            ends.retain(|_, end| end.writes > 0 || changed.wrapping_sub(end.changed) < LATE_ENDS_KEPT);
        }
        let end = ends.entry(key.clone()).or_insert(LateEnd { writes: 0, changed });
        end.changed = changed;
        change(end);
    }
}

/// Work that [`LateWrites::flush`] waits for.
pub(crate) struct FlushGuard(Arc<LateWrites>);

impl Drop for FlushGuard {
    fn drop(&mut self) {
        if self.0.under_way.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.flushed.latest().expect("made with a value").notify_waiters();
        }
    }
}

/// Registration of an attempt that is being ended after the lapse of its lease; see [`LateWrites::ends_late`].
pub(crate) struct LateEndGuard {
    late_writes: Arc<LateWrites>,
    key: Key,
}

impl Drop for LateEndGuard {
    fn drop(&mut self) {
        self.late_writes.change(&self.key, |end| end.writes = end.writes.saturating_sub(1));
    }
}

#[cfg(all(test, shuttle))]
impl LateWrites {
    pub(super) fn is_flushed(&self) -> bool {
        self.under_way.load(Ordering::SeqCst) == 0
    }
}
