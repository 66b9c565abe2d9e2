//! Turns of the calls in one transaction: calls that are not nested must not overlap, because savepoints form a stack.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Clock;
use crate::combine::race;
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::lock;

/// Longest time that a call waits for another call in its transaction.
const TURN_LIMIT: Duration = Duration::from_secs(30);

thread_local! {
    /// The call whose body is being polled on this thread.
    static INSIDE: RefCell<Option<Arc<CallNode>>> = const { RefCell::new(None) };
}

/// A call, and the enclosing call in whose body it is made.
pub(super) struct CallNode {
    id: u64,
    parent: Option<Arc<CallNode>>,
}

impl CallNode {
    pub(super) fn new() -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { id, parent: Self::polled() })
    }

    /// Returns the call whose body is being polled on this thread.
    pub(super) fn polled() -> Option<Arc<Self>> {
        INSIDE.with_borrow(Clone::clone)
    }

    /// Returns whether this call is `other`, or was made in the body of `other`.
    pub(super) fn is_or_is_inside(&self, other: &Self) -> bool {
        self.id == other.id || self.is_inside(other.id)
    }

    fn is_inside(&self, id: u64) -> bool {
        let mut parent = self.parent.as_deref();
        while let Some(node) = parent {
            if node.id == id {
                return true;
            }
            parent = node.parent.as_deref();
        }
        false
    }
}

/// Guard that marks a call as the call that this thread polls. Each call that begins during the life of the guard
/// becomes a child of the marked call.
pub(super) struct PolledCall(Option<Arc<CallNode>>);

impl PolledCall {
    pub(super) fn enter(node: &Arc<CallNode>) -> Self {
        Self(INSIDE.replace(Some(Arc::clone(node))))
    }
}

impl Drop for PolledCall {
    fn drop(&mut self) {
        INSIDE.set(self.0.take());
    }
}

/// Stack of the running calls in one transaction: each call is made in the body of the call below it.
#[derive(Default)]
pub(super) struct CallStack {
    stack: Mutex<Vec<u64>>,
    changed: Notify,
}

impl CallStack {
    /// Pushes a call if all running calls enclose it.
    fn try_push(&self, node: &CallNode) -> bool {
        let mut stack = lock(&self.stack);
        let is_free = stack.last().is_none_or(|last| node.is_inside(*last));
        if is_free {
            stack.push(node.id);
        }
        is_free
    }

    async fn push(&self, node: &CallNode) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.try_push(node) {
                return;
            }
            changed.await;
        }
    }
}

/// The right of a call to use its transaction.
pub(super) struct Turn<'a> {
    calls: &'a CallStack,
    id: u64,
}

impl<'a> Turn<'a> {
    /// Waits until all running calls in the transaction enclose this call.
    pub(super) async fn take(calls: &'a CallStack, node: &CallNode, clock: &dyn Clock) -> Result<Self, StoreError> {
        let mut pushed = pin!(calls.push(node));
        // Most calls don't have to wait, and then need no timer.
        let is_free = poll_fn(|cx| Poll::Ready(pushed.as_mut().poll(cx).is_ready())).await;
        if !is_free && race(pushed, clock.sleep(TURN_LIMIT)).await.is_none() {
            let message = format!(
                "another call in the same transaction has been running for {TURN_LIMIT:?}; it may be waiting for this \
                 one"
            );
            return Err(StoreError::new(StoreErrorKind::Aborted, message));
        }
        Ok(Self { calls, id: node.id })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.calls.stack).retain(|id| *id != self.id);
        self.calls.changed.notify_waiters();
    }
}
