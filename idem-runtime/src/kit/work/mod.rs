//! Sends the operations of many tasks in few statements.
//!
//! - A lone operation never waits: while no other operation of its kind is in flight, its caller sends it, as one plain
//!   statement.
//! - While an operation is in flight, further operations gather. A [lane](crate::kit::lanes) sends all gathered
//!   operations as one statement of many rows, with a single commit.
//! - An operation whose caller is gone is not sent, unless the operation has to outlive its caller
//!   ([`Work::OUTLIVES`]). After the lane has sent an operation, its caller can't stop it.
//! - If an operation fails because another session's transaction holds its key, the operations on this key are sent
//!   alone for ten seconds, so that they block no other operation.
//! - An operation with a large result or journal is sent alone, too, in parallel with other large operations: within
//!   one statement, one process of the server would compress one value after the other. About half of the connections
//!   carry no large operations.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

pub(crate) use self::operations::{EndRow, JournalRow, LongestJournals, by_key, in_turns};
pub(crate) use self::turns::WriteTurns;
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::kit::lanes::{Lane, LaneOwner, Lanes, LoneTurn, gather};
use crate::kit::metered::SENT_IN_TIME;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Handle, Mutex, lock};

#[cfg(all(test, shuttle))]
mod interleavings;
mod operations;
mod turns;

/// Size in bytes above which a batch takes no more operations.
const BATCH_BYTES: usize = 256 * 1024;
/// Largest number of operations on locked records in flight, each in a statement without other operations. Such an
/// operation may occupy a connection while it waits for the lock.
const ALONE: usize = 2;
/// Size in bytes above which an operation is sent alone. The server compresses a value that does not fit into a page,
/// and the compression takes longer than all other work on the row.
const LARGE: usize = 8 * 1024;
/// Time for which the operations on a key are sent alone after the row of the key was locked.
const REMEMBERED: Duration = Duration::from_secs(10);

/// The connections over which a kind of operation is sent.
pub(crate) trait Link: Send + Sync {
    fn clock(&self) -> &Arc<dyn Clock>;

    /// Returns the time limit of a short exchange.
    fn timeout(&self) -> Duration;

    /// Returns the time of the latest exchange of bytes on any of the connections.
    fn moved(&self) -> Instant;

    /// Returns the permits for large operations, in addition to the connections of lone operations; `None` if large
    /// operations take no extra connection.
    fn large(&self) -> Option<&Semaphore>;
}

/// The failure of an operation. One failure may answer all operations of a batch.
pub(crate) trait WorkFailure: Clone + Send + 'static {
    /// Returns the failure of an operation that was not sent.
    fn not_sent(reason: &str) -> Self;

    /// Returns the failure of an operation whose answer got lost.
    fn lost() -> Self;

    /// True if an open transaction of another session holds a row or key that the operation needs. Nothing was written.
    fn is_locked(&self) -> bool;

    /// True if the same batch will probably succeed when it is sent again. Nothing was written.
    fn is_worth_repeating(&self) -> bool;

    /// True if a single operation may have caused the failure of its whole batch. Nothing was written.
    fn blames_one(&self) -> bool;
}

/// Runs `future`. Returns `None` when no byte has `moved` for `limit`. An exchange whose answer is still arriving is
/// thus not given up, even if the answer is long and the network slow.
pub(crate) async fn unless_stuck<F: Future>(
    clock: &dyn Clock,
    limit: Duration,
    moved: impl Fn() -> Instant,
    future: F,
) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    let mut now = clock.now();
    let mut until = now.saturating_add(limit);
    while until > now {
        if let Some(done) = race(future.as_mut(), clock.sleep(until.saturating_since(now))).await {
            return Some(done);
        }
        now = clock.now();
        until = moved().saturating_add(limit);
    }
    None
}

/// Effect of a statement that the server runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Effect {
    Reads,
    Writes,
    /// Writes a result or a journal of this many bytes.
    Records(usize),
}

impl Effect {
    /// Returns the longest time without any byte after which an exchange is given up, where `limit` is the time for a
    /// short exchange.
    pub(crate) fn limit(self, limit: Duration) -> Duration {
        match self {
            Self::Records(bytes) => {
                let times = u32::try_from(1 + bytes / SENT_IN_TIME).unwrap_or(u32::MAX);
                limit.saturating_mul(times)
            }
            _ => limit,
        }
    }
}

/// A kind of operation, and the ways to run one operation or many.
pub(crate) trait Work: Send + Sync + Sized + 'static {
    type Operation: Send + Sync + 'static;
    type Answer: Send + 'static;
    type Failure: WorkFailure;
    type Link: Link;

    /// Largest number of operations in one batch.
    const BATCH: usize;
    /// Number of batches that may be in flight simultaneously.
    const LANES: usize;
    /// True if an operation is sent even if its caller is gone.
    const OUTLIVES: bool;
    /// Size in bytes above which an operation is sent alone, even if large operations take no extra connection.
    const MOST_SHARED: usize = usize::MAX;

    /// Returns the connections over which the operations are sent.
    fn link(&self) -> &Self::Link;

    /// Returns the turns of the batches; `None` if batches need not take turns.
    fn turns(&self) -> Option<&WriteTurns>;

    /// Returns the key of an operation.
    fn key(operation: &Self::Operation) -> &str;

    /// Returns the approximate number of bytes that the operation sends.
    fn bytes(operation: &Self::Operation) -> usize;

    fn one(&self, operation: &Self::Operation) -> impl Future<Output = Result<Self::Answer, Self::Failure>> + Send;

    /// Returns an answer for each operation, in order, or one failure for all. The implementation may skip an operation
    /// that is no longer [wanted](QueuedOp::is_wanted) right before it is sent, and return any answer for that
    /// operation.
    fn many(
        &self,
        operations: &[QueuedOp<Self>],
    ) -> impl Future<Output = Result<Vec<Self::Answer>, Self::Failure>> + Send;
}

type Answer<W> = Result<<W as Work>::Answer, <W as Work>::Failure>;

/// An operation that waits for its lane.
pub(crate) struct QueuedOp<W: Work> {
    pub(crate) operation: W::Operation,
    since: Instant,
    answer: oneshot::Sender<Answer<W>>,
}

impl<W: Work> QueuedOp<W> {
    /// Returns whether the operation still has to be sent: its caller waits, or it outlives its caller.
    pub(crate) fn is_wanted(&self) -> bool {
        W::OUTLIVES || !self.answer.is_closed()
    }
}

/// The operations of one kind that gather, and the lanes that send them.
pub(crate) struct WorkLanes<W: Work>(Arc<WorkLanesInner<W>>);

struct WorkLanesInner<W: Work> {
    work: W,
    lanes: Lanes<VecDeque<QueuedOp<W>>>,
    /// True if the latest batch had more than one operation: more operations will probably follow soon.
    is_busy: AtomicBool,
    /// Permits for operations on locked records.
    alone: Semaphore,
    /// Keys whose rows were locked, and the time until which operations on these keys are sent alone.
    locked: Mutex<HashMap<String, Instant>>,
    /// True if `locked` may contain keys, which is rare. While false, an operation need not take the lock of `locked`.
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
    shared: &'a Arc<WorkLanesInner<W>>,
    /// `None` once the operation is answered.
    operation: Option<W::Operation>,
    _turn: LoneTurn<'a>,
}

impl<W: Work> Drop for LoneOp<'_, W> {
    fn drop(&mut self) {
        // The operation may have been sent already. In that case the second copy changes nothing.
        if W::OUTLIVES
            && let Some(operation) = self.operation.take()
        {
            drop(WorkLanesInner::gather(self.shared, operation));
        }
    }
}

impl<W: Work> WorkLanes<W> {
    /// Makes the lanes, which are tasks of the current runtime.
    pub(crate) fn new(work: W) -> Self {
        Self(Arc::new(WorkLanesInner {
            work,
            lanes: Lanes::new(),
            is_busy: AtomicBool::new(false),
            alone: Semaphore::new(ALONE),
            locked: Mutex::default(),
            any_locked: AtomicBool::new(false),
        }))
    }

    /// Runs `operation`. After the first poll, an operation with [`Work::OUTLIVES`] is sent even if the caller drops
    /// this future.
    pub(crate) async fn call(&self, operation: W::Operation) -> Answer<W> {
        if let Some(turn) = self.0.enter() {
            let mut lone = LoneOp { shared: &self.0, operation: None, _turn: turn };
            // Boxed: under load most operations gather, and would carry the size of this future.
            let answer = Box::pin(self.0.one(lone.operation.insert(operation))).await;
            lone.operation = None;
            return answer;
        }
        // A missing answer means that the runtime of the lane is gone: the operation may have taken effect.
        WorkLanesInner::gather(&self.0, operation).await.unwrap_or_else(|_| Err(W::Failure::lost()))
    }
}

impl<W: Work> WorkLanesInner<W> {
    /// Returns the right to send an operation alone, if nothing else is in flight.
    fn enter(&self) -> Option<LoneTurn<'_>> {
        // A caller outside of any runtime has neither timers nor sockets, so a lane has to send its operation.
        let may_be_alone = !self.is_busy.load(Ordering::Relaxed) && Handle::try_current().is_ok();
        may_be_alone.then(|| self.lanes.enter()).flatten()
    }

    /// Adds an operation to the queue, and makes sure that a lane will take it.
    fn gather(this: &Arc<Self>, operation: W::Operation) -> oneshot::Receiver<Answer<W>> {
        let (answer, receiver) = oneshot::channel();
        let since = this.work.link().clock().now();
        let alone = this.why_alone(&operation);
        let waiting = QueuedOp { operation, since, answer };
        if let Some(why) = alone {
            this.lanes.runtime().spawn(Arc::clone(this).ask_alone(waiting, why));
            return receiver;
        }
        gather(this, W::LANES, |queue| queue.push_back(waiting));
        receiver
    }

    /// Returns the reason why an operation must share no statement with other operations, if there is a reason.
    fn why_alone(&self, operation: &W::Operation) -> Option<LoneReason> {
        if self.was_locked(W::key(operation)) {
            return Some(LoneReason::Locked);
        }
        let most = if self.work.link().large().is_some() { LARGE.min(W::MOST_SHARED) } else { W::MOST_SHARED };
        (W::bytes(operation) > most).then_some(LoneReason::Large)
    }

    /// Returns whether another session has recently locked the row of `key`.
    fn was_locked(&self, key: &str) -> bool {
        if !self.any_locked.load(Ordering::Relaxed) {
            return false;
        }
        let now = self.work.link().clock().now();
        let mut locked = lock(&self.locked);
        locked.retain(|_, until| *until > now);
        self.any_locked.store(!locked.is_empty(), Ordering::Relaxed);
        locked.contains_key(key)
    }

    async fn one(&self, operation: &W::Operation) -> Answer<W> {
        let answer = self.work.one(operation).await;
        if matches!(&answer, Err(failure) if failure.is_locked()) {
            let until = self.work.link().clock().now().saturating_add(REMEMBERED);
            lock(&self.locked).insert(W::key(operation).to_owned(), until);
            self.any_locked.store(true, Ordering::Relaxed);
        }
        answer
    }

    /// Sends an operation alone once a permit is free, unless its caller is gone by then.
    async fn ask_alone(self: Arc<Self>, waiting: QueuedOp<W>, why: LoneReason) {
        let link = self.work.link();
        let large = "other large values are still on their way";
        let (room, full) = match (why, link.large()) {
            (LoneReason::Large, Some(room)) => (room, large),
            (LoneReason::Large, None) => (&self.alone, large),
            (LoneReason::Locked, _) => {
                (&self.alone, "other operations wait for records that another session has locked")
            }
        };
        let room = unless_stuck(&**link.clock(), link.timeout(), || link.moved(), room.acquire());
        let answer = match room.await {
            Some(Ok(_room)) if waiting.is_wanted() => self.one(&waiting.operation).await,
            Some(Ok(_)) => return,
            _ => Err(W::Failure::not_sent(full)),
        };
        waiting.answer.send(answer).ok();
    }

    async fn send(self: &Arc<Self>, batch: Vec<QueuedOp<W>>) {
        let link = self.work.link();
        let now = link.clock().now();
        let (mut late, mut batch): (Vec<_>, Vec<_>) = batch.into_iter().partition(|waiting| {
            // The server stalls. An operation that waited this long is not sent, so its error can state that nothing
            // was written.
            now.saturating_since(waiting.since.max(link.moved())) > link.timeout()
        });
        for waiting in late.drain(..) {
            waiting.answer.send(Err(W::Failure::not_sent("it did not answer earlier statements"))).ok();
        }
        if batch.len() > 1 {
            let mut answer = self.work.many(&batch).await;
            if matches!(&answer, Err(failure) if failure.is_worth_repeating()) {
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
                Err(failure) if failure.blames_one() => {
                    for waiting in batch {
                        self.lanes.runtime().spawn(Arc::clone(self).ask_alone(waiting, LoneReason::Locked));
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

/// Returns the operations of the next batch, if there are any whose callers still wait.
fn next_batch<W: Work>(queue: &mut VecDeque<QueuedOp<W>>) -> Option<Vec<QueuedOp<W>>> {
    let mut bytes = 0;
    let mut next = Vec::new();
    while next.len() < W::BATCH
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
    (!next.is_empty()).then_some(next)
}

impl<W: Work> LaneOwner for WorkLanesInner<W> {
    type Queue = VecDeque<QueuedOp<W>>;

    fn lanes(&self) -> &Lanes<Self::Queue> {
        &self.lanes
    }

    async fn run(mut lane: Lane<Self>) {
        loop {
            let owner = Arc::clone(lane.owner());
            let turns = owner.work.turns();
            let _turn = match turns {
                Some(turns) => turns.next().await,
                None => None,
            };
            // The callers that the last answer has woken run first, so that their next operations join one batch.
            tokio::task::yield_now().await;
            let Some(batch) = lane.next(next_batch) else { return };
            owner.is_busy.store(batch.len() > 1, Ordering::Relaxed);
            if let Some(turns) = turns {
                turns.note(batch.len());
            }
            owner.send(batch).await;
        }
    }

    fn refuse(&self, queue: Self::Queue) {
        let failure = W::Failure::not_sent("the runtime of the store has shut down");
        for waiting in queue {
            waiting.answer.send(Err(failure.clone())).ok();
        }
    }
}
