//! Tasks of handlers, and the count of requests in flight. A handler that has begun runs in its own task, so that it
//! outlives its client.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::hash::Hash;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::task::{JoinError, JoinHandle};
use tracing::instrument::WithSubscriber;
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Instrument, dispatcher};

use crate::key::Key;
use crate::sync::{Mutex, lock};

/// Future of a handler. [`IdempotencyLayer::carry`](super::IdempotencyLayer::carry) sets a function that wraps this
/// future.
pub type HandlerTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Function that wraps the task of a handler. The layer calls the function in the task of the request.
pub(super) type Carry = Arc<dyn Fn(HandlerTask) -> HandlerTask + Send + Sync>;

/// The requests in flight.
///
/// The limit applies to keys, not to requests, because at most one request of a key runs its handler. The other
/// requests of this key wait for that handler, or are about to be answered. So the duplicates of one key never use up
/// the limit for other keys. The number of duplicates has its own limit, of the same size.
pub(super) struct HandlerTasks {
    limit: u32,
    /// Limit of the requests of each caller, if one was set.
    caller_limit: Option<u32>,
    places: Mutex<Places>,
    /// Wakes `drain` when the last request leaves.
    is_empty: Notify,
    /// Moving average of the duration of handlers, in microseconds.
    usual: AtomicU64,
    /// True if the warning about an encoded response was logged.
    pub(super) warned: AtomicBool,
}

/// Numbers of requests by key and by caller. An entry whose number is 0 is removed.
#[derive(Default)]
struct Places {
    is_draining: bool,
    requests: usize,
    keys: HashMap<Key, u32>,
    callers: HashMap<Arc<str>, u32>,
}

impl Places {
    fn leave<T: Hash + Eq>(counts: &mut HashMap<T, u32>, counted: &T) {
        if let Some(count) = counts.get_mut(counted) {
            *count -= 1;
            if *count == 0 {
                counts.remove(counted);
            }
        }
    }
}

/// Reason why the layer does not admit a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoPlace {
    /// The limit of the layer is reached, or the layer is draining.
    Layer,
    /// The limit of the caller is reached.
    Caller,
}

/// Guard that counts a request as in flight. The guard is dropped when the request is over.
pub(super) struct Place {
    tasks: Arc<HandlerTasks>,
    key: Key,
    caller: Option<Arc<str>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = lock(&self.tasks.places);
        places.requests -= 1;
        Places::leave(&mut places.keys, &self.key);
        if let Some(caller) = &self.caller {
            Places::leave(&mut places.callers, caller);
        }
        let is_last = places.requests == 0;
        drop(places);
        if is_last {
            self.tasks.is_empty.notify_waiters();
        }
    }
}

impl HandlerTasks {
    pub(super) fn new(limit: u32, caller_limit: Option<u32>) -> Self {
        Self {
            limit,
            caller_limit,
            places: Mutex::new(Places::default()),
            is_empty: Notify::new(),
            usual: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        }
    }

    /// Returns a new, empty `HandlerTasks` with this limit, and with the caller limit of `self`.
    pub(super) fn with_limit(&self, limit: u32) -> Self {
        Self::new(limit, self.caller_limit)
    }

    /// Returns a new, empty `HandlerTasks` with this limit for each caller, and with the limit of `self`.
    pub(super) fn with_caller_limit(&self, caller_limit: u32) -> Self {
        Self::new(self.limit, Some(caller_limit))
    }

    /// Returns the limit of each caller (default: a quarter of the whole limit, at least 1).
    fn caller_limit(&self) -> u32 {
        self.caller_limit.unwrap_or((self.limit / 4).max(1))
    }

    /// Counts a request as in flight until the returned guard is dropped.
    pub(super) fn enter(self: &Arc<Self>, key: &Key, caller: Option<&Arc<str>>) -> Result<Place, NoPlace> {
        let mut places = lock(&self.places);
        let is_duplicate = places.keys.contains_key(key);
        let taken = if is_duplicate { places.requests - places.keys.len() } else { places.keys.len() };
        if places.is_draining || taken >= self.limit as usize {
            return Err(NoPlace::Layer);
        }
        if let Some(caller) = caller {
            if places.callers.get(caller).copied().unwrap_or(0) >= self.caller_limit() {
                return Err(NoPlace::Caller);
            }
            *places.callers.entry(Arc::clone(caller)).or_default() += 1;
        }
        *places.keys.entry(key.clone()).or_default() += 1;
        places.requests += 1;
        drop(places);
        Ok(Place { tasks: Arc::clone(self), key: key.clone(), caller: caller.cloned() })
    }

    /// Refuses all further requests, and waits for the requests in flight.
    pub(super) async fn drain(&self) {
        lock(&self.places).is_draining = true;
        loop {
            let mut left = pin!(self.is_empty.notified());
            // The notification is enabled before the requests are counted, so that the last request can't leave
            // unnoticed in between.
            left.as_mut().enable();
            if self.count() == 0 {
                return;
            }
            left.await;
        }
    }

    /// Returns the number of requests in flight.
    pub(super) fn count(&self) -> usize {
        lock(&self.places).requests
    }

    /// Adds the duration of a handler to the average.
    pub(super) fn took(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        // A concurrent update can get lost. This is harmless, because the average need not be exact.
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

/// Future that is ready when the handler may begin.
#[derive(Clone)]
pub(super) struct Gate(Arc<AtomicBool>);

impl Gate {
    /// Creates a gate that is pending at its first poll. [`detach`] then sees that the handler is about to begin, and
    /// moves the future into a task.
    pub(super) fn closed() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    /// Creates a gate that is ready at its first poll, so that the handler begins immediately.
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

/// Error for a handler that did not end: the runtime shut down first, or `carry` dropped the task of the handler.
pub(super) struct LostHandler;

/// Polls `run` in the caller's task until its handler begins, and in a spawned task from then on. Dropping this future
/// cancels a call whose handler has not begun, but not a handler that has begun. A panic of the handler continues in
/// this future.
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
    // Without a subscriber there is no span, and attaching a subscriber would make each event of the task more
    // expensive.
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
    fn the_usual_duration_approaches_the_durations_of_recent_handlers() {
        let (tasks, seconds) = (HandlerTasks::new(1, None), Duration::from_secs);
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
