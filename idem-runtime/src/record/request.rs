//! Requests to a store, and the answers of the store.

use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use super::{Holder, OwnerToken, Provenance, State, StoredResult, Traceparent};
use crate::key::{Fingerprint, Key};
use crate::policy::OnCrash;

/// Request of an attempt to reserve a key.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ReserveRequest {
    /// Key to reserve.
    pub key: Key,
    /// Identity of the attempt.
    pub owner: OwnerToken,
    /// Time for which the attempt holds the key without a renewal.
    pub lease: Duration,
    /// Retention of the record after its last write.
    pub ttl: Duration,
    /// Fingerprint of the payload; `None` if the handler gives no fingerprint.
    pub fingerprint: Option<Fingerprint>,
    /// Reaction to a crash of an attempt, after its lease has lapsed.
    pub on_crash: OnCrash,
    /// Largest number of attempts that may run; `None` if the number is unlimited.
    pub max_attempts: Option<NonZeroU32>,
    /// Largest number of questions to the reconciler about an interrupted operation; `None` if the caller has no
    /// reconciler.
    pub max_reconciliations: Option<NonZeroU16>,
    /// Information for people. The record of the attempt keeps this information.
    pub provenance: Provenance,
}

impl ReserveRequest {
    /// Makes a request without a holder, a fingerprint or a limit of attempts. The `on_crash` of the request is
    /// [`OnCrash::Retry`].
    pub const fn new(key: Key, owner: OwnerToken, lease: Duration, ttl: Duration) -> Self {
        Self {
            key,
            owner,
            lease,
            ttl,
            fingerprint: None,
            on_crash: OnCrash::Retry,
            max_attempts: None,
            max_reconciliations: None,
            provenance: Provenance::NONE,
        }
    }

    /// Sets the [key](Self::key).
    #[must_use]
    pub fn key(self, key: Key) -> Self {
        Self { key, ..self }
    }

    /// Sets the [owner token](Self::owner).
    #[must_use]
    pub fn owner(self, owner: OwnerToken) -> Self {
        Self { owner, ..self }
    }

    /// Sets the [lease](Self::lease).
    #[must_use]
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// Sets the [retention](Self::ttl).
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// Sets the [fingerprint](Self::fingerprint).
    #[must_use]
    pub fn fingerprint(self, fingerprint: impl Into<Option<Fingerprint>>) -> Self {
        Self { fingerprint: fingerprint.into(), ..self }
    }

    /// Sets the [reaction to a crash](Self::on_crash).
    #[must_use]
    pub fn on_crash(self, on_crash: OnCrash) -> Self {
        Self { on_crash, ..self }
    }

    /// Sets the [limit of attempts](Self::max_attempts).
    #[must_use]
    pub fn max_attempts(self, max_attempts: impl Into<Option<NonZeroU32>>) -> Self {
        Self { max_attempts: max_attempts.into(), ..self }
    }

    /// Sets the [limit of reconciliations](Self::max_reconciliations), for a caller that has a reconciler.
    #[must_use]
    pub fn max_reconciliations(self, max_reconciliations: impl Into<Option<NonZeroU16>>) -> Self {
        Self { max_reconciliations: max_reconciliations.into(), ..self }
    }

    /// Sets the holder of the key, usually [`StoreContext::holder`](crate::store::StoreContext::holder) of the store
    /// handle.
    #[must_use]
    pub fn holder(self, holder: Holder<'_>) -> Self {
        Self { provenance: self.provenance.with_holder(holder), ..self }
    }

    /// Sets the trace that the run is part of.
    #[must_use]
    pub fn traceparent(self, traceparent: impl Into<Option<Traceparent>>) -> Self {
        Self { provenance: self.provenance.with_traceparent(traceparent.into()), ..self }
    }
}

/// Answer of a store to a compare-and-set.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The write took effect, in this call or in an earlier call with the same owner token.
    Applied,
    /// Another attempt or a decision has replaced the record, or the record no longer exists. This write changed
    /// nothing.
    Refused,
}

/// End of an attempt with a result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Finish {
    /// The body succeeded.
    Completed(StoredResult),
    /// The body returned an error, which is recorded and replayed.
    Failed(StoredResult),
}

impl Finish {
    /// Returns the result, or the reason why no result is stored.
    pub fn result(&self) -> &StoredResult {
        match self {
            Self::Completed(payload) | Self::Failed(payload) => payload,
        }
    }

    /// Returns the same end with `result`.
    pub(crate) fn with_result(&self, result: StoredResult) -> Self {
        match self {
            Self::Completed(_) => Self::Completed(result),
            Self::Failed(_) => Self::Failed(result),
        }
    }

    /// Returns the state of the finished record.
    pub fn state(&self) -> State {
        match self {
            Self::Completed(payload) => State::Completed(payload.clone()),
            Self::Failed(payload) => State::Failed(payload.clone()),
        }
    }
}

/// End of an attempt without a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Release {
    /// The body returned, panicked or was cancelled; the next attempt may run.
    Returned,
    /// The body never started, so the attempt does not count against `max_attempts`.
    NotStarted,
    /// The effect of the body is in doubt, and no further attempt may run its body before the doubt is settled.
    Interrupted,
    /// The reconciler of an interrupted operation ended without an answer: the operation is interrupted again, and the
    /// attempt does not count against `max_attempts`.
    Unresolved,
}

impl Release {
    /// Returns the state of the released record.
    pub fn state(self) -> State {
        match self {
            Self::Returned | Self::NotStarted => State::Released,
            Self::Interrupted | Self::Unresolved => State::Interrupted,
        }
    }

    /// Returns whether the attempt counts against `max_attempts`.
    pub fn counts(self) -> bool {
        match self {
            Self::Returned | Self::Interrupted => true,
            Self::NotStarted | Self::Unresolved => false,
        }
    }
}
