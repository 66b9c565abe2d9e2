//! Lanes: the few tasks that send the gathered operations of one connection, batch by batch.
//!
//! A lane takes the operations that have gathered, and never waits for more. Only the lane that took a batch sends and
//! answers it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::failure::ExchangeFailure;
use super::super::op::Op;
use super::op_batch::OpBatch;
use super::replies::{Replies, ReplyWaiter};
use super::sender::{BatchSender, STALLED};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Handle, Mutex, MutexGuard, lock};

/// Largest number of batches in flight. First runs keep the server busy with scripts, so the server should always find
/// another batch. Replays keep the client busy: more lanes would only make the batches smaller.
pub(super) const LANES: usize = 3;
const LANES_FOR_REPLAYS: usize = 2;

/// The operations that gather for one connection, and the lanes that send them.
pub(super) struct Lanes {
    pub(super) sender: BatchSender,
    pub(super) runtime: Handle,
    /// True while a lone command is in flight, driven by its caller.
    pub(super) lone: AtomicBool,
    /// Number of running lanes. Written under the lock of `queue`; read without that lock, as a hint.
    pub(super) running: AtomicUsize,
    pub(super) queue: Mutex<BatchQueue>,
}

#[derive(Default)]
pub(super) struct BatchQueue {
    /// Batches that no lane has taken, the oldest first. Operations gather in the last batch.
    pub(super) batches: VecDeque<OpBatch>,
    /// Empty batches whose buffers are reused.
    spare: Vec<OpBatch>,
}

/// The right of a caller to send its operation alone, outside of a batch.
pub(super) struct LoneTurn<'a>(&'a AtomicBool);

impl Drop for LoneTurn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Lanes {
    /// Makes lanes whose tasks run in the current runtime.
    pub(super) fn new(sender: BatchSender) -> Self {
        let (lone, running) = (AtomicBool::new(false), AtomicUsize::new(0));
        Self { sender, runtime: Handle::current(), lone, running, queue: Mutex::default() }
    }

    /// Returns the right to send an operation alone, if nothing else is in flight.
    pub(super) fn enter(&self) -> Option<LoneTurn<'_>> {
        let alone = self.running.load(Ordering::Relaxed) == 0 && !self.lone.swap(true, Ordering::Relaxed);
        alone.then(|| LoneTurn(&self.lone))
    }

    /// Adds an operation to the gathering batch, and makes sure that a lane will take it.
    pub(super) fn gather(self: &Arc<Self>, op: Op<'_>) -> ReplyWaiter {
        let mut queue = self.queue();
        if queue.batches.back().is_none_or(OpBatch::is_full) {
            let opened = self.sender.terms.clock.now();
            let batch = queue.spare.pop().map(|spare| OpBatch { opened, ..spare });
            queue.batches.push_back(batch.unwrap_or_else(|| OpBatch::new(opened)));
        }
        let reply = queue.batches.back_mut().expect("just pushed").add(op);
        let running = self.running.load(Ordering::Relaxed);
        let limit = match self.sender.terms.replicas {
            // `WAIT` blocks every later command on its connection.
            Some(_) => 1,
            None if self.sender.expectations.replays.are_expected() => LANES_FOR_REPLAYS,
            None => LANES,
        };
        if running < limit {
            self.running.store(running + 1, Ordering::Relaxed);
            drop(queue);
            self.runtime.spawn(Lane { lanes: Arc::clone(self), is_counted: true }.run());
        }
        reply
    }

    fn queue(&self) -> MutexGuard<'_, BatchQueue> {
        lock(&self.queue)
    }

    /// Returns the batch that a lane sends next. If no batch is left, also removes the lane from `running`. One lock
    /// covers both steps: an operation that gathered in between would be stranded.
    fn next(&self) -> Option<OpBatch> {
        let mut queue = self.queue();
        let next = queue.batches.pop_front();
        if next.is_none() {
            self.running.fetch_sub(1, Ordering::Relaxed);
        }
        next
    }

    /// Keeps the buffers of a sent batch for another batch, unless the buffers are unusually large.
    fn keep(&self, batch: OpBatch) {
        let Some(empty) = batch.emptied() else { return };
        let mut queue = self.queue();
        if queue.spare.len() < LANES {
            queue.spare.push(empty);
        }
    }
}

/// A task that sends batches until no more operations gather.
struct Lane {
    lanes: Arc<Lanes>,
    /// True while the lane is counted in [`Lanes::running`].
    is_counted: bool,
}

impl Lane {
    async fn run(mut self) {
        loop {
            let Lanes { sender, .. } = &*self.lanes;
            let Some(mut batch) = self.lanes.next() else {
                self.is_counted = false;
                return;
            };
            let operations = batch.len();
            let mut unanswered = LaneGuard(Some(Arc::clone(&batch.replies)));
            if sender.terms.clock.now().saturating_since(batch.opened) > sender.connection().patience() {
                // The server stalls. A batch that waited this long is not sent, so its callers can be told that nothing
                // was written. An operation thus takes two time-outs at most, unless the server keeps answering other
                // operations.
                batch.replies.refuse_rest(&ExchangeFailure::NotSent(STALLED.into()));
            } else {
                sender.send(&mut batch).await;
            }
            unanswered.0 = None;
            self.lanes.keep(batch);
            // The callers that were just woken run first, so that their next operations join the next batch.
            if operations > 1 {
                tokio::task::yield_now().await;
            }
        }
    }
}

impl Drop for Lane {
    /// A lane is still counted here only if it panicked or its runtime is gone. Removes the lane from `running`, and
    /// fails the waiting batches, because perhaps no other lane will take them.
    fn drop(&mut self) {
        if self.is_counted {
            let mut queue = self.lanes.queue();
            self.lanes.running.fetch_sub(1, Ordering::Relaxed);
            let waiting = std::mem::take(&mut queue.batches);
            drop(queue);
            for batch in waiting {
                let reason = "the runtime of the connection has shut down";
                batch.replies.refuse_rest(&ExchangeFailure::NotSent(reason.into()));
            }
        }
    }
}

/// Fails the unanswered operations of a lane if the lane's task is dropped or panics.
struct LaneGuard(Option<Arc<Replies>>);

impl Drop for LaneGuard {
    fn drop(&mut self) {
        if let Some(replies) = &self.0 {
            replies.refuse_rest(&ExchangeFailure::Lost);
        }
    }
}
