//! Operations whose effect may have happened although no record shows it.

use crate::key::Key;

/// An operation whose effect may have happened although its record does not show it. The hook of
/// [`Policy::on_uncertain`](crate::Policy::on_uncertain) gets this value.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Uncertain<'a> {
    /// Key of the operation.
    pub key: &'a Key,
    /// Name of the store that holds the record of the operation.
    pub store: &'static str,
    /// Number of the attempt whose effect is uncertain.
    pub attempt: u32,
    /// Reason of the uncertainty.
    pub cause: Doubt,
}

/// Reason why it is unknown whether an effect has happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Doubt {
    /// Another attempt took over while the body ran, or the record of the operation is gone.
    LeaseLost,
    /// The body returned, and its result could not be recorded.
    Unrecorded,
    /// The body ran for longer than `timeout`, and was cancelled.
    TimedOut,
    /// The call was dropped while its body ran.
    Cancelled,
    /// The body panicked.
    Panicked,
    /// The effect of an earlier attempt is in doubt, so no further attempt runs its body.
    Interrupted,
    /// The body returned an error that is [uncertain](crate::OnError::Uncertain).
    Reported,
}
