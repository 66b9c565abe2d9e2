//! Futures that a test polls by hand, and drops.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// Polls `future` once.
pub async fn poll_once<F: Future + ?Sized>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// Polls `call` up to `polls` times, runs `before` before each poll, and then drops `call`. Returns whether `call`
/// ended. A test that counts `polls` up from 0 until `call` ends drops the call at each of its awaits.
pub async fn dropped_after<F: Future>(polls: u32, call: F, mut before: impl AsyncFnMut()) -> bool {
    let mut call = Box::pin(call);
    for _ in 0..polls {
        before().await;
        if poll_once(call.as_mut()).await.is_ready() {
            return true;
        }
    }
    false
}
