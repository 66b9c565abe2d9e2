//! Combinators for futures.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

/// A future in a box, without its type.
pub(crate) type DynFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Boxes the future of a rare step and hides its type.
///
/// The type must be hidden: for each handler the compiler proves that its future is `Send`, and would go through the
/// futures of all rare steps of a call each time.
pub(crate) fn erased<'a, T>(future: impl Future<Output = T> + Send + 'a) -> DynFuture<'a, T> {
    Box::pin(future)
}

/// Returns the output of `future` if it is ready by its second poll, which follows the first poll immediately. Most
/// futures are ready by their second poll and need no timer: hyper, for example, reads the body of a request after the
/// first poll.
#[cfg(feature = "http")]
pub(crate) async fn soon<F: Future + Unpin>(mut future: F) -> Option<F::Output> {
    let mut is_polled = false;
    poll_fn(|cx| match Pin::new(&mut future).poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if is_polled => Poll::Ready(None),
        Poll::Pending => {
            is_polled = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// Returns the output of `future`, or `None` if `limit` is ready first.
pub(crate) async fn race<F: Future>(future: F, mut limit: impl Future<Output = ()> + Unpin) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Pin::new(&mut limit).poll(cx).map(|()| None),
    })
    .await
}

/// Runs all `futures` concurrently, and returns their outputs in order.
#[cfg(any(feature = "conformance", feature = "postgres", feature = "redis"))]
pub(crate) async fn all<F: Future + Unpin>(futures: &mut [F]) -> Vec<F::Output> {
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, output) in futures.iter_mut().zip(&mut outputs).filter(|(_, output)| output.is_none()) {
            if let Poll::Ready(ready) = Pin::new(future).poll(cx) {
                *output = Some(ready);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}
