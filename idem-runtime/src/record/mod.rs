//! Records: their content, the effect of requests on them, and their written form.

mod admission;
#[cfg(any(feature = "sqlite", feature = "mysql", feature = "postgres", feature = "dynamodb"))]
mod columns;
pub(crate) mod decision;
pub(crate) mod envelope;
pub mod format;
pub(crate) mod inspection;
pub(crate) mod journal;
pub(crate) mod journaled_step;
pub(crate) mod lease;
pub(crate) mod messages;
pub(crate) mod owner;
pub(crate) mod provenance;
pub(crate) mod request;
pub(crate) mod reservation;
pub(crate) mod revision;
pub(crate) mod standing;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

pub use self::admission::Admission;
#[cfg(any(feature = "sqlite", feature = "mysql", feature = "postgres", feature = "dynamodb"))]
pub(crate) use self::columns::{Parts, ReadExtent, signed_millis};
pub use self::decision::Ruling;
#[allow(unused_imports, reason = "unused without a store")]
pub(crate) use self::decision::{Action, Decision, DecisionAnswer};
#[allow(unused_imports, reason = "unused without a store")]
pub(crate) use self::inspection::Inspection;
pub(crate) use self::journal::{Journal, JournalError};
pub(crate) use self::lease::{Lease, LeaseMark};
pub(crate) use self::owner::{OwnerToken, Owners};
pub(crate) use self::provenance::Holder;
pub use self::provenance::{Provenance, Traceparent, TraceparentError};
#[allow(unused_imports, reason = "unused without a store")]
pub(crate) use self::request::{Finish, Release, ReserveRequest, Verdict};
pub(crate) use self::reservation::Reservation;
pub(crate) use self::revision::Revision;
use crate::codec::CodecName;
use crate::key::Fingerprint;
use crate::policy::OnCrash;

/// Record that a store holds for a key.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Record {
    /// Owner token of the attempt, or of the decision, that wrote the record last.
    pub owner: OwnerToken,
    /// Number of the latest attempt: the fencing token. The number strictly increases while the record is retained.
    pub attempt: u32,
    /// Number of attempts that count against `max_attempts`. An attempt whose body certainly did not begin does not
    /// count.
    pub attempts_used: u32,
    /// Fingerprint of the payload; `None` if the handler gives no fingerprint.
    pub fingerprint: Option<Fingerprint>,
    /// State of the operation.
    pub state: State,
    /// Information for people, such as the latest holder of the key. Only the limit
    /// [`max_reconciliations`](crate::Policy::max_reconciliations) and the check for a repeated decision depend on a
    /// provenance.
    pub provenance: Provenance,
    /// Results of the steps of an unfinished operation; `None` if no step has ended.
    pub journal: Option<Journal>,
}

/// State of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum State {
    /// An attempt is running, or crashed before it recorded an end.
    Pending {
        /// Time for which the attempt holds the key without a renewal.
        lease: Duration,
        /// Retention of the record after its lease has lapsed.
        ttl: Duration,
        /// Reaction to a crash of the attempt, after the lease has lapsed.
        on_crash: OnCrash,
        /// True if the record is marked as begun ([`Store::begin`](crate::Store::begin)). If the lease of an attempt
        /// lapses without the mark, the attempt does not count against `max_attempts`, and its `on_crash = fail` does
        /// not interrupt the key.
        begun: bool,
    },
    /// The latest attempt ended without a recorded result, and the next attempt may run. The record is kept so that
    /// attempts are counted and fencing tokens never repeat.
    Released,
    /// The effect of a body is in doubt: the body started and did not return under [`OnCrash::Fail`], or returned an
    /// [uncertain](crate::OnError::Uncertain) error. No body may run until a reconciler or an operator settles the
    /// doubt.
    Interrupted,
    /// The body succeeded. A completed record never changes within the retention, except by an operator's decision.
    Completed(StoredResult),
    /// The body returned an error, and duplicates get the recorded error. A failed record never changes within the
    /// retention, except by an operator's decision.
    Failed(StoredResult),
}

/// Recorded result of a finished operation, or the reason why no result is stored.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredResult {
    /// The encoded result.
    Encoded {
        /// Codec that wrote the result.
        codec: CodecName,
        /// Bytes that the codec wrote.
        bytes: Bytes,
    },
    /// The encoded result was larger than the policy or the store allows.
    TooLarge {
        /// Size of the result in bytes.
        size: u64,
    },
    /// The codec could not write the result, or an operator resolved the operation without a result.
    Unencodable,
    /// The result is recorded but can't be read, because a part of it is missing or was altered. Only wrappers that
    /// store results in another form return this variant. This variant is never written.
    Unreadable {
        /// Description of the damage, without the result.
        reason: Arc<str>,
    },
    /// The result is stored but was not read, because a list reads no results. This variant is never written.
    LeftOut {
        /// Codec that wrote the result.
        codec: CodecName,
        /// Size of the stored result in bytes, if the store reports it.
        size: Option<u64>,
    },
}

impl StoredResult {
    /// Returns the number of stored bytes of the result.
    pub fn stored_bytes(&self) -> usize {
        match self {
            Self::Encoded { bytes, .. } => bytes.len(),
            _ => 0,
        }
    }
}

/// Writes the size of a result, never the result: payloads must not reach logs.
impl fmt::Debug for StoredResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Encoded { codec, bytes } => write!(f, "Encoded({} bytes of {codec:?})", bytes.len()),
            Self::TooLarge { size } => write!(f, "TooLarge({size} bytes)"),
            Self::Unencodable => f.write_str("Unencodable"),
            Self::Unreadable { reason } => write!(f, "Unreadable({reason})"),
            Self::LeftOut { codec, size: Some(size) } => write!(f, "LeftOut({size} bytes of {codec:?})"),
            Self::LeftOut { codec, size: None } => write!(f, "LeftOut({codec:?})"),
        }
    }
}

impl Record {
    /// Makes the record of attempt number `attempt` with `state`. This attempt is the first that counts against
    /// `max_attempts`.
    pub const fn new(owner: OwnerToken, attempt: u32, state: State) -> Self {
        Self { owner, attempt, attempts_used: 1, fingerprint: None, state, provenance: Provenance::NONE, journal: None }
    }

    /// Makes the record of the first attempt of a key.
    pub fn first(request: &ReserveRequest) -> Self {
        Self::pending(request, 1, 1, request.fingerprint, false, request.provenance.clone())
    }

    pub(super) fn pending(
        request: &ReserveRequest,
        attempt: u32,
        starts: u32,
        fingerprint: Option<Fingerprint>,
        begun: bool,
        provenance: Provenance,
    ) -> Self {
        let state = State::Pending { lease: request.lease, ttl: request.ttl, on_crash: request.on_crash, begun };
        Self { owner: request.owner, attempt, attempts_used: starts, fingerprint, state, provenance, journal: None }
    }

    /// Returns the answer to `request` if the store has written this pending record for it. `takeover` is true if the
    /// record replaces the record of an attempt whose lease had lapsed.
    pub fn grant(&self, request: &ReserveRequest, takeover: bool) -> Reservation {
        // No body has begun for this request, so if the record is marked as begun, an earlier attempt set the mark.
        let in_doubt =
            request.max_reconciliations.is_some() && matches!(self.state, State::Pending { begun: true, .. });
        Reservation::Granted { lease: self.lease(request), takeover, in_doubt, journal: self.journal.clone() }
    }

    /// Returns the lease that this pending record grants to `request`.
    pub fn lease(&self, request: &ReserveRequest) -> Lease {
        Lease {
            key: request.key.clone(),
            owner: request.owner,
            attempt: self.attempt,
            attempts_used: self.attempts_used,
            duration: request.lease,
            ttl: request.ttl,
            on_crash: request.on_crash,
            fingerprint: self.fingerprint,
            provenance: self.provenance.clone(),
            mark: LeaseMark::default(),
        }
    }

    /// Returns the record that the first reservation of a key wrote when it granted `lease`.
    #[cfg(feature = "redis")]
    pub(crate) fn reserved(lease: &Lease) -> Self {
        let Lease { duration, ttl, on_crash, .. } = *lease;
        Self::after(lease, State::Pending { lease: duration, ttl, on_crash, begun: false })
    }

    /// Returns the record after the attempt of `lease` has written `state`.
    pub fn after(lease: &Lease, state: State) -> Self {
        Self {
            owner: lease.owner,
            attempt: lease.attempt,
            attempts_used: lease.attempts_used,
            fingerprint: lease.fingerprint,
            state,
            provenance: lease.provenance.clone(),
            journal: None,
        }
    }

    /// Returns whether the attempt of `lease` wrote this record: owner token and attempt number are equal. The token
    /// alone is not enough: a late copy of a reservation may create a second attempt with the same owner token.
    pub fn is_of(&self, lease: &Lease) -> bool {
        self.owner == lease.owner && self.attempt == lease.attempt
    }

    /// Returns the journal that a record with `state` keeps: the result of a finished operation is enough.
    pub(crate) fn journal_in(&self, state: &State) -> Option<&Journal> {
        self.journal.as_ref().filter(|_| state.result().is_none())
    }

    /// Returns the size of the journal; zero if the record has no journal.
    pub(crate) fn journal_bytes(&self) -> u64 {
        self.journal.as_ref().map_or(0, |journal| journal.bytes().len() as u64)
    }

    /// Returns the record without its result and its journal, for a list.
    #[cfg(feature = "memory")]
    pub(crate) fn without_result(mut self) -> Self {
        self.journal = None;
        if let Some(result) = self.state.result_mut()
            && let StoredResult::Encoded { codec, bytes } = result
        {
            *result = StoredResult::LeftOut { codec: *codec, size: Some(bytes.len() as u64) };
        }
        self
    }

    /// Returns whether an attempt is running, or crashed before it recorded an end.
    pub fn is_pending(&self) -> bool {
        matches!(self.state, State::Pending { .. })
    }

    /// Returns whether the operation has finished: it is completed or failed.
    pub fn is_finished(&self) -> bool {
        self.state.result().is_some()
    }

    /// Returns the time after which the record would expire if it were written now. For a pending record, this is the
    /// sum of the lease and the retention in its state; for any other record, this is `ttl`.
    pub fn retention(&self, ttl: Duration) -> Duration {
        match self.state {
            State::Pending { lease, ttl, .. } => lease.saturating_add(ttl),
            _ => ttl,
        }
    }
}

impl State {
    /// Returns the result of a finished operation; `None` if the operation has not finished.
    pub fn result(&self) -> Option<&StoredResult> {
        match self {
            Self::Completed(payload) | Self::Failed(payload) => Some(payload),
            _ => None,
        }
    }

    pub(crate) fn result_mut(&mut self) -> Option<&mut StoredResult> {
        match self {
            Self::Completed(result) | Self::Failed(result) => Some(result),
            _ => None,
        }
    }

    /// Returns the same state of a finished operation with `result`.
    pub(crate) fn with_result(&self, result: StoredResult) -> Self {
        match self {
            Self::Completed(_) => Self::Completed(result),
            Self::Failed(_) => Self::Failed(result),
            other => other.clone(),
        }
    }

    /// Returns whether this is the state after `finish`, with or without a journal or messages beside the result.
    pub(crate) fn is_end(&self, finish: &Finish) -> bool {
        match (self, finish) {
            (Self::Completed(result), Finish::Completed(other)) | (Self::Failed(result), Finish::Failed(other)) => {
                *result.parts().0 == *other.parts().0
            }
            _ => false,
        }
    }

    /// Returns the name of the state in errors, rows, items and commands: `pending`, `released`, `interrupted`,
    /// `completed` or `failed`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Pending { .. } => "pending",
            Self::Released => "released",
            Self::Interrupted => "interrupted",
            Self::Completed(_) => "completed",
            Self::Failed(_) => "failed",
        }
    }
}
