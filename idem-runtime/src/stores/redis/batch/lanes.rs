//! Lanes: the few tasks that send the gathered operations of one connection, batch by batch.
//!
//! A lane takes the operations that are there; it never waits for more. A batch belongs to its lane.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::failure::ExchangeFailure;
use super::super::op::Op;
use super::op_batch::OpBatch;
use super::replies::{Replies, ReplyWaiter};
use super::sender::{BatchSender, STALLED};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Handle, Mutex, MutexGuard, lock};

/// Largest number of batches in flight. First runs keep the server busy with scripts, so one batch should always be
/// ready for it. Replays keep the client busy, and more batches would only be smaller.
pub(super) const LANES: usize = 3;
const LANES_FOR_REPLAYS: usize = 2;

/// The operations that gather for one connection, and the lanes that send them.
pub(super) struct Lanes {
    pub(super) sender: BatchSender,
    pub(super) runtime: Handle,
    /// True while a lone command is in flight, driven by its caller.
    pub(super) lone: AtomicBool,
    /// Number of running lanes. Written under `queue`, read without it as a hint.
    pub(super) running: AtomicUsize,
    pub(super) queue: Mutex<BatchQueue>,
}

#[derive(Default)]
pub(super) struct BatchQueue {
    /// Operations gather in the last one.
    pub(super) batches: VecDeque<OpBatch>,
    /// Empty batches, for their buffers.
    spare: Vec<OpBatch>,
}

/// The right to send an operation alone.
pub(super) struct LoneTurn<'a>(&'a AtomicBool);

impl Drop for LoneTurn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Lanes {
    /// Makes lanes in the current runtime.
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

    /// Returns the batch that a lane sends next. `None` also ends the lane's entry in `running`. Both happen under one
    /// lock, or an operation that gathers in between would be stranded.
    fn next(&self) -> Option<OpBatch> {
        let mut queue = self.queue();
        let next = queue.batches.pop_front();
        if next.is_none() {
            self.running.fetch_sub(1, Ordering::Relaxed);
        }
        next
    }

    /// Keeps the buffers of a sent batch for another, unless they grew unusually large.
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
                // The server stalls. Operations that waited this long are not sent, and their callers know that nothing
                // was written. So no operation takes longer than two time-outs, unless the server keeps answering
                // others.
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
    /// Only a lane that panicked or whose runtime is gone is still counted here. The lane ends its entry in `running`
    /// and fails the waiting batches, because no other lane may come.
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

/// Fails the operations that a lane leaves unanswered if its task is dropped or panics.
struct LaneGuard(Option<Arc<Replies>>);

impl Drop for LaneGuard {
    fn drop(&mut self) {
        if let Some(replies) = &self.0 {
            replies.refuse_rest(&ExchangeFailure::Lost);
        }
    }
}
