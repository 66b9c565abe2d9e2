//! The answer of a store, now or later.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::{Answers, StoreError};
use crate::record::Verdict;

/// The future of a store call: an answer that is there at once, or a boxed future.
///
/// A store in memory answers without an allocation; every other store writes `StoreFuture::new(async move { … })`.
#[must_use = "futures do nothing unless polled"]
pub struct StoreFuture<'a, T>(Reply<'a, T>);

enum Reply<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Later(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>),
}

// Nothing in it is pinned in place.
impl<T> Unpin for StoreFuture<'_, T> {}

impl<'a, T> StoreFuture<'a, T> {
    /// An answer that is there at once.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self(Reply::Ready(Some(answer)))
    }

    /// Takes the answer, if it was there at once and is no error; otherwise the future is as it was.
    pub(crate) fn at_once(&mut self) -> Option<T> {
        match &mut self.0 {
            Reply::Ready(answer) if matches!(answer, Some(Ok(_))) => answer.take()?.ok(),
            _ => None,
        }
    }

    /// The answer of `future`.
    pub fn new(future: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self(Reply::Later(Box::pin(future)))
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
        match &mut self.0 {
            Reply::Ready(answer) => Poll::Ready(answer.take().expect("polled after it was ready")),
            Reply::Later(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreFuture")
    }
}
