//! Operations whose effect may have happened although no record shows it.

use crate::key::Key;

/// An operation whose effect may have happened although its record does not show it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Uncertain<'a> {
    /// The key of the operation.
    pub key: &'a Key,
    /// The store that holds its record.
    pub store: &'static str,
    /// The attempt that is in doubt.
    pub attempt: u32,
    /// The cause of the doubt.
    pub cause: Doubt,
}

/// Reason why it is unknown whether an effect has happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Doubt {
    /// Another attempt took over while the body ran, or its record is gone.
    LeaseLost,
    /// The body ran, and its result could not be recorded.
    Unrecorded,
    /// The body ran for longer than `timeout`, and was cancelled.
    TimedOut,
    /// The call was dropped while its body ran.
    Cancelled,
    /// The body panicked.
    Panicked,
    /// An earlier attempt started and did not return, and `on_crash = fail` allows no other.
    Interrupted,
}
