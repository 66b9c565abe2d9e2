//! The answer to a reservation.

use std::time::Duration;

use super::{Lease, Record};

/// Answer to a [`ReserveRequest`](super::request::ReserveRequest).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reservation {
    /// The owner of the request has already released the key: the request arrived late. The record is unchanged;
    /// another attempt needs another owner token.
    Released {
        /// Number of the latest attempt.
        attempt: u32,
    },
    /// The key is reserved for this attempt: run the body.
    #[non_exhaustive]
    Granted {
        /// Lease that the attempt presents with every later write.
        lease: Lease,
        /// True if this attempt took over an attempt whose lease had lapsed.
        takeover: bool,
    },
    /// Another attempt holds the key: reject, or wait.
    #[non_exhaustive]
    InProgress {
        /// Number of that attempt.
        attempt: u32,
        /// Time until its lease lapses unless it is renewed; never zero.
        lapses_in: Duration,
    },
    /// Completed or failed: replay it.
    #[non_exhaustive]
    Finished {
        /// The record. Its provenance holds at least the trace of the run. A store may leave out the rest of the
        /// provenance, which [`inspect`](crate::Store::inspect) returns.
        record: Record,
        /// Age of the record: the time since its attempt began, or since the attempt ended if the store has no other
        /// time. `None` if the store does not report an age. No decision depends on the age.
        age: Option<Duration>,
    },
    /// The same key with another fingerprint.
    FingerprintMismatch {
        /// Number of the latest attempt.
        attempt: u32,
    },
    /// A body started and did not return, and may not run again.
    Interrupted {
        /// Number of the interrupted attempt.
        attempt: u32,
    },
    /// `max_attempts` attempts have started.
    AttemptsExhausted {
        /// Number of these attempts.
        attempts: u32,
    },
}

impl Reservation {
    /// Makes [`Granted`](Self::Granted).
    pub const fn granted(lease: Lease, takeover: bool) -> Self {
        Self::Granted { lease, takeover }
    }

    /// Makes [`InProgress`](Self::InProgress).
    pub const fn in_progress(attempt: u32, lapses_in: Duration) -> Self {
        Self::InProgress { attempt, lapses_in }
    }

    /// Makes [`Finished`](Self::Finished), without an age.
    pub const fn finished(record: Record) -> Self {
        Self::Finished { record, age: None }
    }

    /// Sets the age of a finished record; every other answer stays unchanged.
    #[must_use]
    pub fn aged(self, age: impl Into<Option<Duration>>) -> Self {
        match self {
            Self::Finished { record, .. } => Self::Finished { record, age: age.into() },
            other => other,
        }
    }
}
