//! Sends what many tasks want of the server in few statements.
//!
//! - A lone operation never waits: while no other of its kind is in flight its caller drives it, as one plain statement.
//! - Beyond that, operations gather, and a few *lanes* (spawned tasks) each send everything that has gathered as one
//!   statement of many rows: one commit for all. A lane takes what is there; it never waits for more.
//! - A batch belongs to its lane. A caller that goes away only leaves an answer that nobody reads.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};

use super::client::{Database, Failure};
use crate::StoreErrorKind;
use crate::clock::Instant;
use crate::sync::lock;

/// Operations in one batch.
const BATCH: usize = 128;
/// Bytes above which a batch takes no more.
const BATCH_BYTES: usize = 256 * 1024;

/// A kind of operation, and how one or many of them are done.
pub(super) trait Work: Send + Sync + 'static {
    type Operation: Send + Sync + 'static;
    type Answer: Send + 'static;

    /// How many batches are in flight at a time.
    const LANES: usize;

    fn database(&self) -> &Database;

    /// What a batch holds while it is in flight, if only one at a time is to be.
    fn turn(&self) -> Option<&Semaphore>;

    /// About how many bytes it sends.
    fn bytes(operation: &Self::Operation) -> usize;

    fn one(&self, operation: &Self::Operation) -> impl Future<Output = Result<Self::Answer, Failure>> + Send;

    /// An answer for each, in order; or what became of all of them.
    fn many(&self, operations: &[Self::Operation]) -> impl Future<Output = Result<Vec<Self::Answer>, Failure>> + Send;
}

type Answer<W> = Result<<W as Work>::Answer, Failure>;

/// An operation that waits for its lane.
struct Waiting<W: Work> {
    operation: W::Operation,
    since: Instant,
    answer: oneshot::Sender<Answer<W>>,
}

/// All operations of one kind.
pub(super) struct Lanes<W: Work>(Arc<Shared<W>>);

struct Shared<W: Work> {
    work: W,
    runtime: Handle,
    /// Whether a lone operation is in flight, driven by its caller.
    lone: AtomicBool,
    /// Whether the latest batch was more than one operation: then others are about to follow.
    is_busy: AtomicBool,
    /// Lanes running; written under `queue`, read without it as a hint.
    lanes: AtomicUsize,
    queue: Mutex<VecDeque<Waiting<W>>>,
}

struct Lone<'a>(&'a AtomicBool);

impl Drop for Lone<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl<W: Work> Lanes<W> {
    /// Lanes are tasks of the current runtime.
    pub(super) fn new(work: W) -> Self {
        Self(Arc::new(Shared {
            work,
            runtime: Handle::current(),
            lone: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
            lanes: AtomicUsize::new(0),
            queue: Mutex::default(),
        }))
    }

    /// Does `operation`. The first poll hands it over, whatever becomes of the caller.
    pub(super) async fn call(&self, operation: W::Operation) -> Answer<W> {
        if let Some(_lone) = self.0.enter() {
            return self.0.work.one(&operation).await;
        }
        // Nobody answered: the runtime of the lane is gone, and how far it got nobody knows.
        Shared::gather(&self.0, operation).await.unwrap_or_else(|_| Err(Failure::lost()))
    }
}

impl<W: Work> Shared<W> {
    /// The right to send an operation by itself, if nothing else is in flight.
    fn enter(&self) -> Option<Lone<'_>> {
        // A caller outside any runtime has neither timers nor sockets; a lane has.
        let alone = self.lanes.load(Ordering::Relaxed) == 0
            && !self.is_busy.load(Ordering::Relaxed)
            && Handle::try_current().is_ok()
            && !self.lone.swap(true, Ordering::Relaxed);
        alone.then(|| Lone(&self.lone))
    }

    /// Adds an operation to those that gather, and sees to it that a lane will take it.
    fn gather(this: &Arc<Self>, operation: W::Operation) -> oneshot::Receiver<Answer<W>> {
        let (answer, receiver) = oneshot::channel();
        let since = this.work.database().clock().now();
        let mut queue = lock(&this.queue);
        queue.push_back(Waiting { operation, since, answer });
        let lanes = this.lanes.load(Ordering::Relaxed);
        if lanes < W::LANES {
            this.lanes.store(lanes + 1, Ordering::Relaxed);
            drop(queue);
            this.runtime.spawn(Lane { shared: Arc::clone(this), running: true }.run());
        }
        receiver
    }

    /// What a lane sends next; nothing gives the lane's place back. Both under one lock, or an operation that gathers in
    /// between would be left there.
    fn next(&self) -> Vec<Waiting<W>> {
        let mut queue = lock(&self.queue);
        let mut bytes = 0;
        let fits = |waiting: &Waiting<W>| {
            let first = bytes == 0;
            bytes += W::bytes(&waiting.operation).max(1);
            first || bytes <= BATCH_BYTES
        };
        let count = queue.iter().take(BATCH).take_while({
            let mut fits = fits;
            move |waiting| fits(waiting)
        });
        let count = count.count();
        if count == 0 {
            self.lanes.fetch_sub(1, Ordering::Relaxed);
        }
        queue.drain(..count).collect()
    }

    async fn send(&self, batch: Vec<Waiting<W>>) {
        let database = self.work.database();
        let now = database.clock().now();
        let (mut operations, mut answers) = (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
        for Waiting { operation, since, answer } in batch {
            // The server stalls. What waited this long is not sent any more: no operation takes longer than two
            // timeouts, and its caller knows that it did not land.
            if now.saturating_since(since) > database.timeout() {
                answer.send(Err(Failure::not_sent("it did not answer what was sent before"))).ok();
            } else {
                operations.push(operation);
                answers.push(answer);
            }
        }
        if operations.is_empty() {
            return;
        }
        if operations.len() > 1 {
            let mut answer = self.work.many(&operations).await;
            if matches!(&answer, Err(failure) if failure.is_deadlock) {
                answer = self.work.many(&operations).await;
            }
            match answer {
                Ok(all) => {
                    for (answer, one) in answers.into_iter().zip(all) {
                        answer.send(Ok(one)).ok();
                    }
                    return;
                }
                // Nothing was written. Whichever is to blame must not fail the others.
                Err(failure) if failure.blames_one => {}
                Err(failure) => {
                    for answer in answers {
                        answer.send(Err(failure.clone())).ok();
                    }
                    return;
                }
            }
        }
        for (operation, answer) in operations.iter().zip(answers) {
            answer.send(self.work.one(operation).await).ok();
        }
    }
}

/// A task that sends batches until nothing gathers any more.
struct Lane<W: Work> {
    shared: Arc<Shared<W>>,
    running: bool,
}

impl<W: Work> Lane<W> {
    async fn run(mut self) {
        loop {
            let _turn = match self.shared.work.turn() {
                // It is never closed.
                Some(turn) => turn.acquire().await.ok(),
                None => None,
            };
            // Whoever was woken by the same answer runs first, so that what they ask is in one batch.
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
    /// Only a lane that panicked or whose runtime went away is still running here: it gives its place back and fails
    /// what waits for a lane, since no other may come. What it had in flight learns that its answer is lost.
    fn drop(&mut self) {
        if self.running {
            let mut queue = lock(&self.shared.queue);
            self.shared.lanes.fetch_sub(1, Ordering::Relaxed);
            let waiting = std::mem::take(&mut *queue);
            drop(queue);
            let failure = Failure::new(StoreErrorKind::Unavailable, "the runtime of the store has shut down");
            for waiting in waiting {
                waiting.answer.send(Err(failure.clone())).ok();
            }
        }
    }
}
