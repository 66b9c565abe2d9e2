//! Sends the operations of many tasks in few statements.
//!
//! - A lone operation never waits: while no other operation of its kind is in flight, its caller sends it, as one plain
//!   statement.
//! - Otherwise operations gather. A *lane* (a spawned task) sends all gathered operations as one statement of many
//!   rows, with a single commit. A lane takes the operations that have gathered, and never waits for more.
//! - An operation whose caller is gone is not sent, unless the operation has to outlive its caller
//!   ([`Work::OUTLIVES`]). After the lane has sent an operation, its caller can't stop it.
//! - An operation that fails because another session's transaction holds its key is sent alone from then on, so that it
//!   blocks no other operation.
//! - An operation with a large result is sent alone, too, in parallel with other large results: within one statement,
//!   one process of the server would compress one result after the other. About half of the connections carry no large
//!   results.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

use super::client::Database;
use super::failure::OpFailure;
use super::sessions::unless_stuck;
use crate::clock::Instant;
use crate::store::StoreErrorKind;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Handle, Mutex, lock};

#[cfg(all(test, shuttle))]
mod interleavings;
pub(super) mod operations;

/// Largest number of operations in one batch.
const BATCH: usize = 128;
/// Size in bytes above which a batch takes no more operations.
const BATCH_BYTES: usize = 256 * 1024;
/// Number of operations on locked records that may be sent alone simultaneously. Such an operation may occupy a
/// connection while it waits for the lock.
const ALONE: usize = 2;
/// Size in bytes above which an operation is sent alone. The server compresses a result that does not fit into a page,
/// and the compression takes longer than all other work on the row.
const LARGE: usize = 8 * 1024;
/// Time for which the operations on a key are sent alone after the row of the key was locked.
const REMEMBERED: Duration = Duration::from_secs(10);

/// A kind of operation, and the ways to run one operation or many.
pub(super) trait Work: Send + Sync + Sized + 'static {
    type Operation: Send + Sync + 'static;
    type Answer: Send + 'static;

    /// Number of batches that may be in flight simultaneously.
    const LANES: usize;
    /// True if an operation is sent even if its caller is gone.
    const OUTLIVES: bool;

    fn database(&self) -> &Database;

    /// Returns the semaphore that allows only one batch in flight; `None` if several batches may be in flight. A batch
    /// holds a permit while it is in flight.
    fn turn(&self) -> Option<&Semaphore>;

    /// Returns the key of an operation.
    fn key(operation: &Self::Operation) -> &str;

    /// Returns the approximate number of bytes that the operation sends.
    fn bytes(operation: &Self::Operation) -> usize;

    fn one(&self, operation: &Self::Operation) -> impl Future<Output = Result<Self::Answer, OpFailure>> + Send;

    /// Returns an answer for each operation, in order, or one failure for all. The implementation may skip an operation
    /// that is no longer [wanted](QueuedOp::is_wanted) right before it is sent, and return any answer for that
    /// operation.
    fn many(&self, operations: &[QueuedOp<Self>]) -> impl Future<Output = Result<Vec<Self::Answer>, OpFailure>> + Send;
}

type Answer<W> = Result<<W as Work>::Answer, OpFailure>;

/// An operation that waits for its lane.
pub(super) struct QueuedOp<W: Work> {
    pub(super) operation: W::Operation,
    since: Instant,
    answer: oneshot::Sender<Answer<W>>,
}

impl<W: Work> QueuedOp<W> {
    /// Returns whether the operation still has to be sent: its caller waits, or it outlives its caller.
    pub(super) fn is_wanted(&self) -> bool {
        W::OUTLIVES || !self.answer.is_closed()
    }
}

/// The operations of one kind that gather, and the lanes that send them.
pub(super) struct Lanes<W: Work>(Arc<LanesInner<W>>);

struct LanesInner<W: Work> {
    work: W,
    runtime: Handle,
    /// True while a lone operation is in flight, driven by its caller.
    lone: AtomicBool,
    /// True if the latest batch had more than one operation: more operations will probably follow soon.
    is_busy: AtomicBool,
    /// Number of running lanes. Written under the lock of `queue`; read without that lock, as a hint.
    lanes: AtomicUsize,
    queue: Mutex<VecDeque<QueuedOp<W>>>,
    /// Permits for operations on locked records.
    alone: Semaphore,
    /// Permits for large operations. `None` if there are too few connections: large operations then gather like all
    /// other operations.
    large: Option<Semaphore>,
    /// Keys that were locked, and the time until which they count as locked.
    locked: Mutex<HashMap<String, Instant>>,
    /// True if `locked` contains keys, which is rare: most operations then need no lock to check.
    any_locked: AtomicBool,
}

/// Reason why an operation shares no statement with other operations.
#[derive(Clone, Copy)]
enum LoneReason {
    /// Another session recently locked the record of the operation.
    Locked,
    Large,
}

/// A lone operation, which its caller drives.
struct LoneOp<'a, W: Work> {
    shared: &'a Arc<LanesInner<W>>,
    /// `None` once the operation is answered.
    operation: Option<W::Operation>,
}

impl<W: Work> Drop for LoneOp<'_, W> {
    fn drop(&mut self) {
        self.shared.lone.store(false, Ordering::Relaxed);
        // The operation may have been sent already. An operation that runs twice has no further effect.
        if W::OUTLIVES
            && let Some(operation) = self.operation.take()
        {
            drop(LanesInner::gather(self.shared, operation));
        }
    }
}

impl<W: Work> Lanes<W> {
    /// Makes the lanes, which are tasks of the current runtime.
    pub(super) fn new(work: W) -> Self {
        let large = work.database().for_large();
        Self(Arc::new(LanesInner {
            work,
            runtime: Handle::current(),
            lone: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
            lanes: AtomicUsize::new(0),
            queue: Mutex::default(),
            alone: Semaphore::new(ALONE),
            large: (large > 0).then(|| Semaphore::new(large)),
            locked: Mutex::default(),
            any_locked: AtomicBool::new(false),
        }))
    }

    /// Runs `operation`. After the first poll, an operation with [`Work::OUTLIVES`] is sent even if the caller drops
    /// this future.
    pub(super) async fn call(&self, operation: W::Operation) -> Answer<W> {
        if self.0.enter() {
            let mut lone = LoneOp { shared: &self.0, operation: None };
            // Boxed: under load most operations gather, and would carry the size of this future.
            let answer = Box::pin(self.0.one(lone.operation.insert(operation))).await;
            lone.operation = None;
            return answer;
        }
        // A missing answer means that the runtime of the lane is gone: the operation may have taken effect.
        LanesInner::gather(&self.0, operation).await.unwrap_or_else(|_| Err(OpFailure::lost()))
    }
}

impl<W: Work> LanesInner<W> {
    /// Returns whether an operation may be sent alone, because nothing else is in flight. If it may, sets `lone`.
    fn enter(&self) -> bool {
        // A caller outside of any runtime has neither timers nor sockets, so a lane has to send its operation.
        self.lanes.load(Ordering::Relaxed) == 0
            && !self.is_busy.load(Ordering::Relaxed)
            && Handle::try_current().is_ok()
            && !self.lone.swap(true, Ordering::Relaxed)
    }

    /// Adds an operation to the queue, and makes sure that a lane will take it.
    fn gather(this: &Arc<Self>, operation: W::Operation) -> oneshot::Receiver<Answer<W>> {
        let (answer, receiver) = oneshot::channel();
        let since = this.work.database().clock().now();
        let alone = this.why_alone(&operation);
        let waiting = QueuedOp { operation, since, answer };
        if let Some(why) = alone {
            this.runtime.spawn(Arc::clone(this).ask_alone(waiting, why));
            return receiver;
        }
        let mut queue = lock(&this.queue);
        queue.push_back(waiting);
        let lanes = this.lanes.load(Ordering::Relaxed);
        if lanes < W::LANES {
            this.lanes.store(lanes + 1, Ordering::Relaxed);
            drop(queue);
            this.runtime.spawn(Lane { shared: Arc::clone(this), running: true }.run());
        }
        receiver
    }

    /// Returns the reason why an operation must share no statement with other operations, if there is a reason.
    fn why_alone(&self, operation: &W::Operation) -> Option<LoneReason> {
        if self.was_locked(W::key(operation)) {
            return Some(LoneReason::Locked);
        }
        (self.large.is_some() && W::bytes(operation) > LARGE).then_some(LoneReason::Large)
    }

    /// Returns whether another session had `key` locked recently.
    fn was_locked(&self, key: &str) -> bool {
        if !self.any_locked.load(Ordering::Relaxed) {
            return false;
        }
        let now = self.work.database().clock().now();
        let mut locked = lock(&self.locked);
        locked.retain(|_, until| *until > now);
        self.any_locked.store(!locked.is_empty(), Ordering::Relaxed);
        locked.contains_key(key)
    }

    async fn one(&self, operation: &W::Operation) -> Answer<W> {
        let answer = self.work.one(operation).await;
        if matches!(&answer, Err(failure) if failure.is_locked) {
            let until = self.work.database().clock().now().saturating_add(REMEMBERED);
            lock(&self.locked).insert(W::key(operation).to_owned(), until);
            self.any_locked.store(true, Ordering::Relaxed);
        }
        answer
    }

    /// Sends an operation alone once a permit is free, unless its caller is gone by then.
    async fn ask_alone(self: Arc<Self>, waiting: QueuedOp<W>, why: LoneReason) {
        let database = self.work.database();
        let (room, full) = match (why, &self.large) {
            (LoneReason::Large, Some(large)) => (large, "other large results are still on their way"),
            _ => (&self.alone, "others wait for records that another session has locked"),
        };
        let room = unless_stuck(&**database.clock(), database.timeout(), || database.moved(), room.acquire());
        let answer = match room.await {
            Some(Ok(_room)) if waiting.is_wanted() => self.one(&waiting.operation).await,
            Some(Ok(_)) => return,
            _ => Err(OpFailure::not_sent(full)),
        };
        waiting.answer.send(answer).ok();
    }

    /// Returns the batch that a lane sends next. If the batch is empty, also removes the lane from `lanes`. One lock
    /// covers both steps: an operation that gathered in between would be stranded.
    fn next(&self) -> Vec<QueuedOp<W>> {
        let mut queue = lock(&self.queue);
        let mut bytes = 0;
        let mut next = Vec::new();
        while next.len() < BATCH
            && let Some(waiting) = queue.pop_front()
        {
            if !waiting.is_wanted() {
                continue;
            }
            bytes += W::bytes(&waiting.operation);
            if bytes > BATCH_BYTES && !next.is_empty() {
                queue.push_front(waiting);
                break;
            }
            next.push(waiting);
        }
        if next.is_empty() {
            self.lanes.fetch_sub(1, Ordering::Relaxed);
        }
        next
    }

    async fn send(self: &Arc<Self>, batch: Vec<QueuedOp<W>>) {
        let database = self.work.database();
        let now = database.clock().now();
        let (mut late, mut batch): (Vec<_>, Vec<_>) = batch.into_iter().partition(|waiting| {
            // The server stalls. An operation that waited this long is not sent, so its caller can be told that nothing
            // was written.
            now.saturating_since(waiting.since.max(database.moved())) > database.timeout()
        });
        for waiting in late.drain(..) {
            waiting.answer.send(Err(OpFailure::not_sent("it did not answer what was sent before"))).ok();
        }
        if batch.len() > 1 {
            let mut answer = self.work.many(&batch).await;
            // Another session locked a row while the statement ran. A second statement skips that row from the start.
            if matches!(&answer, Err(failure) if failure.is_deadlock || failure.is_locked) {
                answer = self.work.many(&batch).await;
            }
            match answer {
                Ok(all) => {
                    for (waiting, one) in batch.into_iter().zip(all) {
                        waiting.answer.send(Ok(one)).ok();
                    }
                }
                // Nothing was written. Each operation is sent alone, so that the operation that caused the failure
                // neither fails nor delays the other operations.
                Err(failure) if failure.blames_one => {
                    for waiting in batch {
                        self.runtime.spawn(Arc::clone(self).ask_alone(waiting, LoneReason::Locked));
                    }
                }
                Err(failure) => {
                    for waiting in batch {
                        waiting.answer.send(Err(failure.clone())).ok();
                    }
                }
            }
        } else if let Some(waiting) = batch.pop() {
            waiting.answer.send(self.one(&waiting.operation).await).ok();
        }
    }
}

/// A task that sends batches until no more operations gather.
struct Lane<W: Work> {
    shared: Arc<LanesInner<W>>,
    running: bool,
}

impl<W: Work> Lane<W> {
    async fn run(mut self) {
        loop {
            let _turn = match self.shared.work.turn() {
                // The semaphore is never closed.
                Some(turn) => turn.acquire().await.ok(),
                None => None,
            };
            // The callers that the last answer has woken run first, so that their next operations join one batch.
            tokio::task::yield_now().await;
            let batch = self.shared.next();
            if batch.is_empty() {
                self.running = false;
                return;
            }
            self.shared.is_busy.store(batch.len() > 1, Ordering::Relaxed);
            self.shared.send(batch).await;
        }
    }
}

impl<W: Work> Drop for Lane<W> {
    /// `running` is still true only if the lane panicked or its runtime is gone. Removes the lane from `lanes`, and
    /// fails the waiting operations, because perhaps no other lane will take them. The callers of operations in flight
    /// get the error that the answer is lost.
    fn drop(&mut self) {
        if self.running {
            let mut queue = lock(&self.shared.queue);
            self.shared.lanes.fetch_sub(1, Ordering::Relaxed);
            let waiting = std::mem::take(&mut *queue);
            drop(queue);
            let failure = OpFailure::new(StoreErrorKind::Unavailable, "the runtime of the store has shut down");
            for waiting in waiting {
                waiting.answer.send(Err(failure.clone())).ok();
            }
        }
    }
}
