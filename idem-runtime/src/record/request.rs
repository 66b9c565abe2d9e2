//! What is asked of a store, and what it answers.

use std::num::NonZeroU32;
use std::time::Duration;

use super::{Lease, OwnerToken, Record, State, StoredResult};
use crate::key::{Fingerprint, Key};
use crate::policy::OnCrash;

/// What an attempt asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReserveRequest {
    /// The key to reserve.
    pub key: Key,
    /// The identity of the attempt.
    pub owner: OwnerToken,
    /// How long the reservation is honoured without a renewal.
    pub lease: Duration,
    /// How long the record is remembered.
    pub ttl: Duration,
    /// The fingerprint of the payload.
    pub fingerprint: Option<Fingerprint>,
    /// Whether a lapsed attempt may be taken over.
    pub on_crash: OnCrash,
    /// How many attempts may start.
    pub max_attempts: Option<NonZeroU32>,
}

impl ReserveRequest {
    /// The lease to release if the answer to this request never arrives.
    pub(crate) fn unanswered(&self) -> Lease {
        Record::first(self).lease(self)
    }
}

/// The answer to a [`ReserveRequest`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reservation {
    /// The owner of the request has released the key already: the request arrived late. Nothing was changed; another attempt
    /// needs another owner token.
    Released {
        /// The latest attempt.
        attempt: u32,
    },
    /// Pending and mine: run the body.
    Granted {
        /// What the attempt presents with every later write.
        lease: Lease,
        /// Whether an attempt whose lease had lapsed was taken over.
        takeover: bool,
    },
    /// Another attempt holds the key: reject, or wait.
    InProgress {
        /// Its number.
        attempt: u32,
        /// When its lease lapses unless it is renewed; never zero.
        lapses_in: Duration,
    },
    /// Completed or failed: replay it.
    Finished(Record),
    /// The same key with another fingerprint.
    FingerprintMismatch {
        /// The latest attempt.
        attempt: u32,
    },
    /// A body started and did not return, and may not run again.
    Interrupted {
        /// The attempt that was interrupted.
        attempt: u32,
    },
    /// As many attempts as are allowed have started.
    AttemptsExhausted {
        /// How many that were.
        attempts: u32,
    },
}

/// The answer to a compare-and-set.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The record is as asked for, by this call or by an earlier one with the same owner token.
    Applied,
    /// The record belongs to somebody else, or is gone; nothing was changed.
    Refused,
}

/// How an attempt ends with a result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Finish {
    /// The body succeeded.
    Completed(StoredResult),
    /// The body returned an error that is to be replayed.
    Failed(StoredResult),
}

impl Finish {
    /// The result, or why there is none.
    pub fn result(&self) -> &StoredResult {
        match self {
            Self::Completed(payload) | Self::Failed(payload) => payload,
        }
    }

    /// The state the record gets.
    pub fn state(&self) -> State {
        match self {
            Self::Completed(payload) => State::Completed(payload.clone()),
            Self::Failed(payload) => State::Failed(payload.clone()),
        }
    }
}

/// How an attempt ends without a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Release {
    /// The body returned, panicked or was cancelled; the next attempt may run.
    Returned,
    /// The body never started, so the attempt doesn't count against `max_attempts`.
    NotStarted,
    /// The body started and did not return, and may not run again.
    Interrupted,
}

impl Release {
    /// The state the record gets.
    pub fn state(self) -> State {
        match self {
            Self::Returned | Self::NotStarted => State::Released,
            Self::Interrupted => State::Interrupted,
        }
    }
}

/// A record as an operator sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inspection {
    /// The record.
    pub record: Record,
    /// When it is forgotten, unless it is written again.
    pub expires_in: Duration,
    /// When its lease lapses; zero if it has lapsed, `None` unless it is pending.
    pub lapses_in: Option<Duration>,
}
