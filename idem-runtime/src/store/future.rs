//! The answer of a store, now or later.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::watch::Watch;
use super::{Answers, Store, StoreError};
use crate::clock::Instant;
use crate::metrics::StoreOp;
use crate::record::Verdict;

/// The future of a store call: an answer that is there at once, or a boxed future.
///
/// A store in memory answers without an allocation; every other store writes `StoreFuture::new(async move { … })`.
#[must_use = "futures do nothing unless polled"]
pub struct StoreFuture<'a, T> {
    reply: Reply<'a, T>,
    watch: Option<Watch<'a>>,
}

enum Reply<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Later(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>),
}

// Nothing in it is pinned in place.
impl<T> Unpin for StoreFuture<'_, T> {}

impl<'a, T> StoreFuture<'a, T> {
    /// An answer that is there at once.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self { reply: Reply::Ready(Some(answer)), watch: None }
    }

    /// Takes the time of the operation `op` of `store`, and notes whether it fails.
    pub(crate) fn watched<S: Store + ?Sized>(self, store: &'a S, op: StoreOp) -> Self {
        self.watched_since(store, op, None)
    }

    /// The same of an operation that `began` then, if that is known.
    pub(crate) fn watched_since<S: Store + ?Sized>(
        mut self,
        store: &'a S,
        op: StoreOp,
        began: Option<Instant>,
    ) -> Self {
        match &self.reply {
            Reply::Ready(Some(Ok(_))) => store.heartbeats().answered_at_once(store.name(), op),
            Reply::Ready(Some(Err(error))) => store.heartbeats().operation_failed(store.name(), op, error),
            Reply::Ready(None) => {}
            Reply::Later(_) => self.watch = Some(Watch::new(store, op, began)),
        }
        self
    }

    /// Takes the answer, if it was there at once and is no error; otherwise the future is as it was.
    pub(crate) fn at_once(&mut self) -> Option<T> {
        match &mut self.reply {
            Reply::Ready(answer) if matches!(answer, Some(Ok(_))) => answer.take()?.ok(),
            _ => None,
        }
    }

    /// The answer of `future`.
    pub fn new(future: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self { reply: Reply::Later(Box::pin(future)), watch: None }
    }
}

impl<'a> StoreFuture<'a, ()> {
    /// For [`Store::renew`](super::Store::renew) of a store whose answers come together, in the order of the leases.
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
            Reply::Ready(answer) => Poll::Ready(answer.take().expect("polled after it was ready")),
            Reply::Later(future) => {
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
