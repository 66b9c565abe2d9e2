//! The lanes of one connection, which send the gathered operations batch by batch.
//!
//! Only the lane that took a batch sends and answers it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::failure::ExchangeFailure;
use super::super::op::Op;
use super::op_batch::OpBatch;
use super::replies::{Replies, ReplyWaiter};
use super::sender::{BatchSender, STALLED};
use crate::kit::lanes::{Lane, LaneOwner, Lanes, LoneTurn, gather};

/// Largest number of batches in flight. Scripts of first runs are work for the server: while the server runs one batch,
/// the next batch should already wait there. Replays are work for the client: more lanes would only make the batches
/// smaller.
pub(super) const LANES: usize = 3;
const LANES_FOR_REPLAYS: usize = 2;

/// The operations that gather for one connection, and the lanes that send them.
pub(super) struct ConnectionLanes {
    pub(super) sender: BatchSender,
    pub(super) lanes: Lanes<BatchQueue>,
}

#[derive(Default)]
pub(super) struct BatchQueue {
    /// Batches that no lane has taken, the oldest first. Operations gather in the last batch.
    pub(super) batches: VecDeque<OpBatch>,
    /// Empty batches whose buffers are reused.
    spare: Vec<OpBatch>,
}

impl ConnectionLanes {
    /// Makes lanes whose tasks run in the current runtime.
    pub(super) fn new(sender: BatchSender) -> Self {
        Self { sender, lanes: Lanes::new() }
    }

    /// Returns the right to send an operation alone, if nothing else is in flight.
    pub(super) fn enter(&self) -> Option<LoneTurn<'_>> {
        self.lanes.enter()
    }

    /// Adds an operation to the gathering batch, and makes sure that a lane will take it.
    pub(super) fn gather(self: &Arc<Self>, op: Op<'_>) -> ReplyWaiter {
        let limit = match self.sender.terms.replicas {
            // `WAIT` blocks every later command on its connection.
            Some(_) => 1,
            None if self.sender.expectations.replays.are_expected() => LANES_FOR_REPLAYS,
            None => LANES,
        };
        gather(self, limit, |queue| {
            if queue.batches.back().is_none_or(OpBatch::is_full) {
                let opened = self.sender.terms.clock.now();
                let batch = queue.spare.pop().map(|spare| OpBatch { opened, ..spare });
                queue.batches.push_back(batch.unwrap_or_else(|| OpBatch::new(opened)));
            }
            queue.batches.back_mut().expect("just pushed").add(op)
        })
    }

    /// Keeps the buffers of a sent batch for a later batch, unless these buffers grew unusually large.
    fn keep(&self, batch: OpBatch) {
        let Some(empty) = batch.emptied() else { return };
        self.lanes.with_queue(|queue| {
            if queue.spare.len() < LANES {
                queue.spare.push(empty);
            }
        });
    }
}

impl LaneOwner for ConnectionLanes {
    type Queue = BatchQueue;

    fn lanes(&self) -> &Lanes<BatchQueue> {
        &self.lanes
    }

    async fn run(mut lane: Lane<Self>) {
        while let Some(mut batch) = lane.next(|queue| queue.batches.pop_front()) {
            let sender = &lane.sender;
            let operations = batch.len();
            let mut unanswered = LaneGuard(Some(Arc::clone(&batch.replies)));
            if sender.terms.clock.now().saturating_since(batch.opened) > sender.connection().patience() {
                // The server stalls. A batch that waited this long is not sent, so its error can state that nothing was
                // written. An operation thus takes two time-outs at most, unless the server keeps answering other
                // operations.
                batch.replies.refuse_rest(&ExchangeFailure::NotSent(STALLED.into()));
            } else {
                sender.send(&mut batch).await;
            }
            unanswered.0 = None;
            lane.keep(batch);
            // The callers that were just woken run first, so that their next operations join the next batch.
            if operations > 1 {
                tokio::task::yield_now().await;
            }
        }
    }

    fn refuse(&self, queue: BatchQueue) {
        for batch in queue.batches {
            let reason = "the runtime of the connection has shut down";
            batch.replies.refuse_rest(&ExchangeFailure::NotSent(reason.into()));
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
