//! Turns of the batches that write.

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::sync::atomic::{AtomicUsize, Ordering};

/// Number of operations in flight above which batches take turns no longer.
const MANY: usize = 16;
/// Number of batches over which the operations in flight are averaged.
const BATCHES: usize = 8;

/// Limits the number of batches that write over the connections of one runtime.
///
/// With few operations in flight, batches are sent one at a time: meanwhile the operations of all tasks gather for the
/// next batch, which saves commits. With many operations, a wait for more of them saves little, and the server would
/// idle while the tasks of the latest batch run.
#[derive(Debug)]
pub(crate) struct WriteTurns {
    permits: Semaphore,
    most: u32,
    /// Moving average of the number of operations in flight, times [`BATCHES`].
    recent: AtomicUsize,
}

impl WriteTurns {
    /// Allows `most` batches in flight at a time if there are many operations, and one if there are few.
    pub(crate) const fn new(most: u32) -> Self {
        Self { permits: Semaphore::const_new(most as usize), most, recent: AtomicUsize::new(0) }
    }

    /// Returns the number of batches that may be in flight at a time.
    fn batches(&self) -> u32 {
        if self.recent.load(Ordering::Relaxed) > MANY * BATCHES { self.most } else { 1 }
    }

    /// Waits until the next batch may be sent. A batch holds the permit while it is in flight.
    pub(super) async fn next(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.permits.acquire_many(self.most / self.batches()).await.ok()
    }

    /// Notes the number of operations of a batch. If two batches are noted at the same moment, one may be missing from
    /// the average.
    pub(super) fn note(&self, operations: usize) {
        let in_flight = operations.saturating_mul(self.batches() as usize);
        let recent = self.recent.load(Ordering::Relaxed);
        self.recent.store(recent - recent / BATCHES + in_flight, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn now<F: Future>(future: F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[test]
    fn two_batches_are_in_flight_only_with_many_operations() {
        let turns = WriteTurns::new(2);
        let is_free = || now(turns.next()).is_some();
        let first = now(turns.next());
        assert!(first.is_some() && !is_free(), "a second batch is in flight with few operations");
        drop(first);
        (0..BATCHES).for_each(|_| turns.note(2 * MANY));
        let both = [now(turns.next()), now(turns.next())];
        assert!(both.iter().all(Option::is_some) && !is_free(), "not exactly two batches are in flight");
        (0..4 * BATCHES).for_each(|_| turns.note(1));
        let [first, _second] = both;
        drop(first);
        assert!(!is_free(), "a batch is sent beside another one after the operations have become few");
    }
}
