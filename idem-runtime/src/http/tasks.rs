//! Tasks for handlers: a handler that has begun runs in a task of its own, so it outlives its client. All are counted.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::{JoinError, JoinHandle};
use tracing::instrument::WithSubscriber;
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Instrument, dispatcher};

/// The future of a handler, which [`IdempotencyLayer::carry`](super::IdempotencyLayer::carry) wraps.
pub type HandlerTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Wraps the task of a handler, in the task of its request.
pub(super) type Carry = Arc<dyn Fn(HandlerTask) -> HandlerTask + Send + Sync>;

/// The requests in flight.
pub(super) struct HandlerTasks {
    permits: Arc<Semaphore>,
    limit: u32,
    draining: AtomicBool,
    /// Moving average of the duration of handlers, in microseconds.
    usual: AtomicU64,
    /// True if the warning about an encoded response was logged.
    pub(super) warned: AtomicBool,
}

impl HandlerTasks {
    pub(super) fn new(limit: u32) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(usize::try_from(limit).unwrap_or(Semaphore::MAX_PERMITS))),
            limit,
            draining: AtomicBool::new(false),
            usual: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        }
    }

    /// Counts a request as in flight; `None` if the limit is reached, or the layer is draining.
    pub(super) fn enter(&self) -> Option<OwnedSemaphorePermit> {
        match self.draining.load(Ordering::SeqCst) {
            true => None,
            false => Arc::clone(&self.permits).try_acquire_owned().ok(),
        }
    }

    /// Refuses all further requests, and waits for those in flight.
    pub(super) async fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        // This fails only if the semaphore is closed, and no code closes it.
        drop(self.permits.acquire_many(self.limit).await);
    }

    /// Returns the number of requests in flight.
    pub(super) fn count(&self) -> usize {
        (self.limit as usize).saturating_sub(self.permits.available_permits())
    }

    /// Adds the duration of a handler to the average.
    pub(super) fn took(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        // Concurrent updates may lose one: the average need not be exact.
        let usual = match self.usual.load(Ordering::Relaxed) {
            0 => micros,
            usual => usual - usual / 8 + micros / 8,
        };
        self.usual.store(usual, Ordering::Relaxed);
    }

    /// Returns the usual duration of a handler.
    pub(super) fn usual(&self) -> Duration {
        Duration::from_micros(self.usual.load(Ordering::Relaxed))
    }
}

impl fmt::Debug for HandlerTasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tasks").field("limit", &self.limit).field("in_flight", &self.count()).finish_non_exhaustive()
    }
}

/// The point at which a handler begins.
#[derive(Clone)]
pub(super) struct Gate(Arc<AtomicBool>);

impl Gate {
    /// Creates a gate that stops the first poll: it notes that the gate is reached and yields, so that [`detach`] moves
    /// the rest into a task.
    pub(super) fn closed() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    /// Creates a gate that stops no poll.
    pub(super) fn open() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    pub(super) async fn pass(&self) {
        poll_fn(|_| match self.0.swap(true, Ordering::SeqCst) {
            true => Poll::Ready(()),
            // No wake-up is needed: `detach` checks the gate in this same poll, and its task polls again.
            false => Poll::Pending,
        })
        .await;
    }

    fn is_passed(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Error: the runtime ended before the handler did, or `carry` dropped its task.
pub(super) struct LostHandler;

/// Polls `run` here until its handler begins, and in a task from then on. Dropping this future cancels a call that is
/// only reserved or waits, but not a handler that has begun. A panic of the handler continues in this future.
pub(super) async fn detach<T: Send + 'static>(
    mut run: Pin<Box<dyn Future<Output = T> + Send>>,
    gate: &Gate,
    carry: Option<&Carry>,
) -> Result<T, LostHandler> {
    let ended = poll_fn(|cx| match run.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if gate.is_passed() => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    });
    if let Some(output) = ended.await {
        return Ok(output);
    }
    let Some(carry) = carry else { return joined(spawn(run).await) };
    let (send, receive) = oneshot::channel();
    let task: HandlerTask = Box::pin(async move {
        // The receiver is gone if the client hung up.
        let _ = send.send(run.await);
    });
    joined(spawn(carry(task)).await)?;
    receive.await.map_err(|_| LostHandler)
}

/// Spawns a task with the span and the subscriber of its caller.
fn spawn<F>(task: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    // Without a subscriber there is no span. Attaching one would make each event of the task more expensive.
    match dispatcher::get_default(Dispatch::is::<NoSubscriber>) {
        true => tokio::spawn(task),
        false => tokio::spawn(task.in_current_span().with_current_subscriber()),
    }
}

fn joined<T>(ended: Result<T, JoinError>) -> Result<T, LostHandler> {
    ended.map_err(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => LostHandler,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_time_follows_the_handlers() {
        let (tasks, seconds) = (HandlerTasks::new(1), Duration::from_secs);
        assert_eq!(tasks.usual(), Duration::ZERO);
        tasks.took(seconds(8));
        assert_eq!(tasks.usual(), seconds(8));
        tasks.took(seconds(16));
        assert_eq!(tasks.usual(), seconds(9));
        for _ in 0..100 {
            tasks.took(Duration::from_millis(100));
        }
        assert!(tasks.usual() < Duration::from_millis(200), "{:?}", tasks.usual());
    }
}
