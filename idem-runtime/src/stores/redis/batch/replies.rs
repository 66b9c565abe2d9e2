//! The answers of one batch. The lane that sends the batch sets the answers, and the callers take them from here.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::super::failure::ExchangeFailure;
use super::super::op::OpAnswer;
use crate::sync::{Mutex, lock};

/// The slots for the answers of one batch, which the lane and the callers share.
#[derive(Default)]
pub(super) struct Replies(Mutex<Vec<ReplySlot>>);

#[derive(Default)]
enum ReplySlot {
    #[default]
    Empty,
    Waiting(Waker),
    Done(OpAnswer),
    /// The caller is gone.
    Gone,
}

impl Replies {
    /// Opens a slot for one more operation.
    pub(super) fn open(&self) -> usize {
        let mut slots = lock(&self.0);
        slots.push(ReplySlot::Empty);
        slots.len() - 1
    }

    /// Sets answers. Wakes the callers after the lock is released.
    pub(super) fn deliver(&self, answers: impl Iterator<Item = (usize, OpAnswer)>) {
        let mut wakers = Vec::with_capacity(answers.size_hint().0);
        let mut slots = lock(&self.0);
        for (slot, answer) in answers {
            let slot = &mut slots[slot];
            if matches!(slot, ReplySlot::Gone) {
                continue;
            }
            if let ReplySlot::Waiting(waker) = std::mem::replace(slot, ReplySlot::Done(answer)) {
                wakers.push(waker);
            }
        }
        drop(slots);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Answers some operations with the same failure.
    pub(super) fn refuse(&self, slots: impl Iterator<Item = usize>, failure: &ExchangeFailure) {
        self.deliver(slots.map(|slot| (slot, Err(failure.clone()))));
    }

    /// Answers every operation that isn't answered yet with `failure`.
    pub(super) fn refuse_rest(&self, failure: &ExchangeFailure) {
        let open: Vec<usize> = {
            let slots = lock(&self.0);
            (0..slots.len()).filter(|&i| !matches!(slots[i], ReplySlot::Done(_) | ReplySlot::Gone)).collect()
        };
        self.refuse(open.into_iter(), failure);
    }

    /// Returns a predicate that tests whether the caller of a slot is gone. The predicate holds the lock of the slots.
    pub(super) fn gone(&self) -> impl Fn(usize) -> bool + '_ {
        let slots = lock(&self.0);
        move |slot| matches!(slots[slot], ReplySlot::Gone)
    }
}

/// Waits for one answer of a batch.
pub(in super::super) struct ReplyWaiter {
    replies: Arc<Replies>,
    slot: usize,
    /// True once the answer was taken.
    taken: bool,
}

impl ReplyWaiter {
    pub(super) fn new(replies: &Arc<Replies>, slot: usize) -> Self {
        Self { replies: Arc::clone(replies), slot, taken: false }
    }
}

impl Future for ReplyWaiter {
    type Output = OpAnswer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OpAnswer> {
        let this = &mut *self;
        let slot = &mut lock(&this.replies.0)[this.slot];
        match std::mem::replace(slot, ReplySlot::Gone) {
            ReplySlot::Done(answer) => {
                this.taken = true;
                Poll::Ready(answer)
            }
            ReplySlot::Waiting(waker) if waker.will_wake(cx.waker()) => {
                *slot = ReplySlot::Waiting(waker);
                Poll::Pending
            }
            _ => {
                *slot = ReplySlot::Waiting(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for ReplyWaiter {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        // Drops the answer, which may be large, outside the lock.
        let before = std::mem::replace(&mut lock(&self.replies.0)[self.slot], ReplySlot::Gone);
        drop(before);
    }
}
