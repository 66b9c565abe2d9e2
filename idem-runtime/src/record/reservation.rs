//! Answers of a store to a reservation.

use std::time::Duration;

use super::{Journal, Lease, Record};

/// Answer to a [`ReserveRequest`](super::request::ReserveRequest).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reservation {
    /// The request arrived late: its owner has already released the key. The record is unchanged. A further attempt
    /// needs a new owner token.
    Released {
        /// Number of the latest attempt.
        attempt: u32,
    },
    /// The key is reserved for this attempt: the body may run.
    #[non_exhaustive]
    Granted {
        /// Lease that the attempt presents with every later write.
        lease: Lease,
        /// True if this attempt took over an attempt whose lease had lapsed.
        takeover: bool,
        /// True if the effect of an earlier attempt is in doubt: the caller must settle the doubt before its body runs.
        /// Only a caller with a reconciler gets such a lease.
        in_doubt: bool,
        /// Results of the steps of earlier attempts; `None` if no step has ended.
        journal: Option<Journal>,
    },
    /// Another attempt holds the key: the duplicate waits or returns an error.
    #[non_exhaustive]
    InProgress {
        /// Number of the attempt that holds the key.
        attempt: u32,
        /// Time until the lease of that attempt lapses unless it is renewed; never zero.
        lapses_in: Duration,
    },
    /// The operation is completed or failed: the duplicate replays its result.
    #[non_exhaustive]
    Finished {
        /// Finished record. The store must return the trace in the record's provenance, but may leave out the other
        /// parts of the provenance, because [`inspect`](crate::Store::inspect) returns them.
        record: Record,
        /// Age of the record: the time since its attempt began. A store that does not know that time reports the time
        /// since the attempt ended. `None` if the store reports no age. No decision depends on the age.
        age: Option<Duration>,
    },
    /// The key was used before with another fingerprint.
    FingerprintMismatch {
        /// Number of the latest attempt.
        attempt: u32,
    },
    /// The effect of an earlier attempt is in doubt, and no further body may run until the doubt is settled.
    Interrupted {
        /// Number of the interrupted attempt.
        attempt: u32,
    },
    /// All attempts that `max_attempts` allows have begun, and no further attempt may run.
    AttemptsExhausted {
        /// Number of attempts that have begun.
        attempts: u32,
    },
}

impl Reservation {
    /// Makes an [`InProgress`](Self::InProgress).
    pub const fn in_progress(attempt: u32, lapses_in: Duration) -> Self {
        Self::InProgress { attempt, lapses_in }
    }

    /// Makes a [`Finished`](Self::Finished) without an age.
    pub const fn finished(record: Record) -> Self {
        Self::Finished { record, age: None }
    }

    /// Sets the age of a [`Finished`](Self::Finished); returns every other answer unchanged.
    #[must_use]
    pub fn aged(self, age: impl Into<Option<Duration>>) -> Self {
        match self {
            Self::Finished { record, .. } => Self::Finished { record, age: age.into() },
            other => other,
        }
    }
}
