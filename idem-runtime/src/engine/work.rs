//! A body and its result, without their types.

use std::pin::Pin;
use std::task::{Context, Poll};

use super::ending::AttemptEnd;
use crate::codec::ResultProblem;
use crate::error::Error;
use crate::policy::OnUndecodable;
use crate::record::State;

/// A body and its result, type-erased so that the call loop is compiled once.
pub(super) trait Work {
    /// Polls the body, keeps its result, and returns whether the result is `Ok`.
    fn poll_body(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<bool>;

    /// Returns the ending of an attempt whose body has returned: with its result encoded, or without a result.
    fn record(self: Pin<&mut Self>, max_result_bytes: usize) -> AttemptEnd;

    /// Drops the body.
    fn drop_body(self: Pin<&mut Self>);

    /// Keeps the result of a finished record, and returns whether it is `Ok`.
    fn replay(self: Pin<&mut Self>, state: &State, on_undecodable: OnUndecodable) -> Result<bool, ResultProblem>;

    /// Keeps `error` as the result.
    fn refuse(self: Pin<&mut Self>, error: Error);
}
