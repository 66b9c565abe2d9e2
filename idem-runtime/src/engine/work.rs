//! Body and result of a call, without their types.

use std::task::{Context, Poll};

use super::ending::AttemptEnd;
use crate::codec::ResultProblem;
use crate::error::Error;
use crate::policy::OnUndecodable;
use crate::record::State;

/// Body and result of a call, type-erased so that the call loop is compiled once.
pub(crate) trait Work {
    /// Polls the body, keeps its result, and returns whether the result is `Ok`.
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<bool>;

    /// Returns the end of an attempt whose body has returned: with its result encoded, or without a result.
    fn record(&mut self, max_result_bytes: usize) -> AttemptEnd;

    /// Drops the body.
    fn drop_body(&mut self);

    /// Decodes the result of a finished record, keeps it as the result of the call, and returns whether it is `Ok`.
    fn replay(&mut self, state: &State, on_undecodable: OnUndecodable) -> Result<bool, ResultProblem>;

    /// Keeps `error` as the result of the call.
    fn refuse(&mut self, error: Error);
}
