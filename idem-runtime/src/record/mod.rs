//! What a store holds for a key, what a request does with it, and how it is written.

mod admission;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "dynamodb"))]
mod columns;
pub mod format;
mod lease;
mod request;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

pub use self::admission::Admission;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "dynamodb"))]
pub(crate) use self::columns::{Parts, signed_millis};
pub(crate) use self::lease::Owners;
pub use self::lease::{Lease, OwnerToken};
pub use self::request::{Finish, Inspection, Release, Reservation, ReserveRequest, Verdict};
use crate::codec::CodecName;
use crate::key::Fingerprint;
use crate::policy::OnCrash;

/// What a store holds for a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The attempt that wrote the record last.
    pub owner: OwnerToken,
    /// The number of the latest attempt: the fencing token. Strictly increases while the record is retained.
    pub attempt: u32,
    /// How many attempts count against `max_attempts`; those whose body is known not to have started don't.
    pub attempts_used: u32,
    /// The fingerprint of the payload, if the handler gives one.
    pub fingerprint: Option<Fingerprint>,
    /// Where the operation stands.
    pub state: State,
}

/// Where an operation stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// An attempt is running, or died without an answer.
    Pending {
        /// How long the record is honoured without a renewal.
        lease: Duration,
        /// How long it is remembered beyond its lease.
        ttl: Duration,
        /// What happens once the lease has lapsed.
        on_crash: OnCrash,
    },
    /// The latest attempt ended without a result to record; the next one may run. The record stays so that attempts
    /// are counted and fencing tokens never repeat.
    Released,
    /// A body started and did not return, under [`OnCrash::Fail`]; nobody runs until an operator decides.
    Interrupted,
    /// The body succeeded. Never changes within the retention.
    Completed(StoredResult),
    /// The body returned an error that is replayed. Never changes within the retention.
    Failed(StoredResult),
}

/// The recorded result of a finished operation, or why there is none.
#[derive(Clone, PartialEq, Eq)]
pub enum StoredResult {
    /// The encoded result.
    Encoded {
        /// The codec that wrote it.
        codec: CodecName,
        /// What it wrote.
        bytes: Bytes,
    },
    /// The encoded result was larger than the policy allows.
    TooLarge {
        /// Its size in bytes.
        size: u64,
    },
    /// The codec could not write the result.
    Unencodable,
    /// The result is recorded, but what is needed to read it is gone or was altered. Only wrappers that keep results in
    /// another form answer this; it is never written.
    Unreadable {
        /// What is wrong, without the result.
        reason: Arc<str>,
    },
}

impl StoredResult {
    /// How many bytes of result are stored.
    pub fn stored_bytes(&self) -> usize {
        match self {
            Self::Encoded { bytes, .. } => bytes.len(),
            _ => 0,
        }
    }
}

/// Shows the size of a result, never the result: payloads don't reach logs.
impl fmt::Debug for StoredResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Encoded { codec, bytes } => write!(f, "Encoded({} bytes of {codec:?})", bytes.len()),
            Self::TooLarge { size } => write!(f, "TooLarge({size} bytes)"),
            Self::Unencodable => f.write_str("Unencodable"),
            Self::Unreadable { reason } => write!(f, "Unreadable({reason})"),
        }
    }
}

impl Record {
    /// The record of a key's first attempt.
    pub fn first(request: &ReserveRequest) -> Self {
        Self::pending(request, 1, 1, request.fingerprint)
    }

    pub(super) fn pending(
        request: &ReserveRequest,
        attempt: u32,
        starts: u32,
        fingerprint: Option<Fingerprint>,
    ) -> Self {
        let state = State::Pending { lease: request.lease, ttl: request.ttl, on_crash: request.on_crash };
        Self { owner: request.owner, attempt, attempts_used: starts, fingerprint, state }
    }

    /// The lease that `request` holds on this pending record.
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
        }
    }

    /// The record after the attempt that holds `lease` wrote `state`.
    pub fn after(lease: &Lease, state: State) -> Self {
        Self {
            owner: lease.owner,
            attempt: lease.attempt,
            attempts_used: lease.attempts_used,
            fingerprint: lease.fingerprint,
            state,
        }
    }

    /// Whether this is the record of the attempt that holds `lease`: an attempt is its owner token and its number. A
    /// reservation that arrives again late may give its owner another attempt, which is not the one that is running.
    pub fn is_of(&self, lease: &Lease) -> bool {
        self.owner == lease.owner && self.attempt == lease.attempt
    }

    /// Whether an attempt is running, or died without an answer.
    pub fn is_pending(&self) -> bool {
        matches!(self.state, State::Pending { .. })
    }

    /// Whether the operation has finished: completed or failed.
    pub fn is_finished(&self) -> bool {
        self.state.result().is_some()
    }

    /// How long the record is remembered from a write at this moment; `ttl` unless it is pending.
    pub fn retention(&self, ttl: Duration) -> Duration {
        match self.state {
            State::Pending { lease, ttl, .. } => lease.saturating_add(ttl),
            _ => ttl,
        }
    }
}

impl State {
    /// The result of a finished operation; `None` unless it has finished.
    pub fn result(&self) -> Option<&StoredResult> {
        match self {
            Self::Completed(payload) | Self::Failed(payload) => Some(payload),
            _ => None,
        }
    }

    /// The letter that stands for the state wherever it is written.
    pub(crate) fn letter(&self) -> &'static str {
        match self {
            Self::Pending { .. } => "P",
            Self::Released => "R",
            Self::Interrupted => "I",
            Self::Completed(_) => "C",
            Self::Failed(_) => "F",
        }
    }
}
