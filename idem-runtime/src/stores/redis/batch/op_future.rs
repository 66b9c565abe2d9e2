//! Futures of operations, which their callers poll.

use std::pin::Pin;
use std::task::{Context, Poll};

use super::super::op::OpAnswer;
use super::replies::ReplyWaiter;

/// The future of an operation, whether it gathers in a batch or its caller drives it.
pub(in super::super) enum OpFuture<'a> {
    /// The operation is in a batch.
    Gathered(ReplyWaiter),
    /// The caller drives the operation. Boxed: under load most operations gather, and would carry the size of this
    /// future.
    Alone(Pin<Box<dyn Future<Output = OpAnswer> + Send + 'a>>),
}

impl<'a> OpFuture<'a> {
    pub(in super::super) fn alone(driven: impl Future<Output = OpAnswer> + Send + 'a) -> Self {
        Self::Alone(Box::pin(driven))
    }
}

impl Future for OpFuture<'_> {
    type Output = OpAnswer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OpAnswer> {
        match &mut *self {
            Self::Gathered(reply) => Pin::new(reply).poll(cx),
            Self::Alone(driven) => driven.as_mut().poll(cx),
        }
    }
}

/// Guards an operation that must be sent although its caller drives it. If the caller drops the operation before the
/// answer, the guard calls `hand_over`, which gives the operation to a lane. If the operation is sent twice, the second
/// copy changes nothing.
pub(super) struct DelegatedOp<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> DelegatedOp<F> {
    /// Makes a guard that calls `hand_over` at its drop, unless [`done`](Self::done) is called before.
    pub(super) fn new(hand_over: F) -> Self {
        Self(Some(hand_over))
    }

    /// Notes that the answer has arrived.
    pub(super) fn done(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for DelegatedOp<F> {
    fn drop(&mut self) {
        if let Some(hand_over) = self.0.take() {
            hand_over();
        }
    }
}
