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

/// Returns the number of polls for the next round of a test that drops a call at each of its awaits; `None` if the test
/// is over. `polls` is the number of this round, and `is_over` is what [`dropped_after`] returned.
pub fn next_round(polls: u32, is_over: bool) -> Option<u32> {
    match (is_over, polls) {
        (false, _) => Some(polls + 1),
        // On a busy machine all answers may come within the first poll, so that no call was dropped.
        (true, 0 | 1) => Some(0),
        (true, _) => None,
    }
}
