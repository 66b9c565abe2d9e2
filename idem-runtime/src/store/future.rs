//! Future of a store call, with an immediate or a later result.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::watch::Watch;
use super::{Answers, Store, StoreError};
use crate::clock::Instant;
use crate::metrics::StoreOp;
use crate::record::Verdict;

/// Future of a store call: an immediate result, or a boxed future.
///
/// A store in memory answers without an allocation. The methods of every other store return `StoreFuture::new(async
/// move { … })`.
#[must_use = "futures do nothing unless polled"]
pub struct StoreFuture<'a, T> {
    reply: FutureState<'a, T>,
    watch: Option<Watch<'a>>,
}

enum FutureState<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Later(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>),
}

// The boxed future is pinned by its box, so the fields need no pinning.
impl<T> Unpin for StoreFuture<'_, T> {}

impl<'a, T> StoreFuture<'a, T> {
    /// Makes a future that is ready with `answer`.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self { reply: FutureState::Ready(Some(answer)), watch: None }
    }

    /// Measures the duration of the operation `op` of `store`, and counts its failure.
    pub(crate) fn watched<S: Store + ?Sized>(self, store: &'a S, op: StoreOp) -> Self {
        self.watched_since(store, op, None)
    }

    /// Measures like `watched`, for an operation that began at `began`; `None` if the operation begins now.
    pub(crate) fn watched_since<S: Store + ?Sized>(
        mut self,
        store: &'a S,
        op: StoreOp,
        began: Option<Instant>,
    ) -> Self {
        match &self.reply {
            FutureState::Ready(Some(Ok(_))) => store.context().answered_at_once(op),
            FutureState::Ready(Some(Err(error))) => store.context().operation_failed(op, error),
            FutureState::Ready(None) => {}
            FutureState::Later(_) => self.watch = Some(Watch::new(store, op, began)),
        }
        self
    }

    /// Takes the result of a call that succeeded immediately. Otherwise returns `None` and leaves the future unchanged.
    pub(crate) fn at_once(&mut self) -> Option<T> {
        match &mut self.reply {
            FutureState::Ready(answer) if matches!(answer, Some(Ok(_))) => answer.take()?.ok(),
            _ => None,
        }
    }

    /// Boxes `future`.
    pub fn new(future: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self { reply: FutureState::Later(Box::pin(future)), watch: None }
    }
}

impl<'a> StoreFuture<'a, ()> {
    /// Makes the future of [`Store::renew`](super::Store::renew) for a store that answers for all leases together, in
    /// their order.
    pub fn renewed(
        answer: &'a Answers<'a>,
        renewed: impl Future<Output = Result<Vec<Verdict>, StoreError>> + Send + 'a,
    ) -> Self {
        Self::new(async move {
            renewed.await?.into_iter().enumerate().for_each(|(at, write)| answer(at, write));
            Ok(())
        })
    }
}

impl<T> Future for StoreFuture<'_, T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { reply, watch } = &mut *self;
        match reply {
            FutureState::Ready(answer) => Poll::Ready(answer.take().expect("polled after it was ready")),
            FutureState::Later(future) => {
                let watch = watch.as_ref();
                let _entered = watch.and_then(Watch::span).map(tracing::Span::enter);
                let answer = ready!(future.as_mut().poll(cx));
                if let Some(watch) = watch {
                    watch.ended(&answer);
                }
                Poll::Ready(answer)
            }
        }
    }
}

impl<T> fmt::Debug for StoreFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreFuture")
    }
}
