//! The duplicates of one store handle that wait for running attempts, by key.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::sync::{Mutex, lock};

#[cfg(all(test, shuttle))]
mod interleavings;

/// The waiters of each key.
#[derive(Default, Debug)]
pub(crate) struct WaiterTable(Mutex<HashMap<String, Waiters>>);

/// The waiters of one key, and their number.
#[derive(Default, Debug)]
struct Waiters {
    woken: Arc<Notify>,
    count: usize,
}

impl WaiterTable {
    /// Adds a waiter for `key`, until the returned waiter is dropped.
    pub(crate) fn join(&self, key: &str) -> Waiter<'_> {
        let mut waiting = lock(&self.0);
        let waiters = waiting.entry(key.to_owned()).or_default();
        waiters.count += 1;
        Waiter { waiting: self, key: key.to_owned(), woken: Arc::clone(&waiters.woken) }
    }

    /// Wakes all waiters of `key`.
    pub(crate) fn wake(&self, key: &str) {
        if let Some(waiters) = lock(&self.0).get(key) {
            waiters.woken.notify_waiters();
        }
    }

    /// Wakes the waiters of all keys, for the case that a wake-up was lost.
    #[cfg(any(feature = "redis", feature = "postgres", feature = "sqlite", feature = "nats"))]
    pub(crate) fn wake_all(&self) {
        lock(&self.0).values().for_each(|waiters| waiters.woken.notify_waiters());
    }
}

/// One waiting duplicate. The drop of the last waiter of a key removes the key from the table.
pub(crate) struct Waiter<'a> {
    waiting: &'a WaiterTable,
    key: String,
    woken: Arc<Notify>,
}

impl Waiter<'_> {
    /// Returns a future that is ready once the key is woken. The future notices only wake-ups that follow its first
    /// poll or its `enable`.
    pub(crate) fn woken(&self) -> Notified<'_> {
        self.woken.notified()
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut waiting = lock(&self.waiting.0);
        if let Some(waiters) = waiting.get_mut(&self.key) {
            waiters.count -= 1;
            if waiters.count == 0 {
                waiting.remove(&self.key);
            }
        }
    }
}
