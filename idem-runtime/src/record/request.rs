//! Requests to a store, and the answers of the store.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::{Holder, Lease, OwnerToken, Record, Revision, State, StoredResult, Traceparent, Trail};
use crate::key::{Fingerprint, Key};
use crate::policy::OnCrash;

/// Request of an attempt for a key.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ReserveRequest {
    /// Key to reserve.
    pub key: Key,
    /// Identity of the attempt.
    pub owner: OwnerToken,
    /// Time that the reservation is honoured without a renewal.
    pub lease: Duration,
    /// Retention of the record.
    pub ttl: Duration,
    /// Fingerprint of the payload.
    pub fingerprint: Option<Fingerprint>,
    /// Effect of a lapsed lease: a takeover, or none.
    pub on_crash: OnCrash,
    /// Largest number of attempts that may start.
    pub max_attempts: Option<NonZeroU32>,
    /// Holder of the request, and further information for the record.
    pub trail: Trail,
}

impl ReserveRequest {
    /// Makes a request without a holder, a fingerprint and a limit of attempts. It may take over a lapsed attempt.
    pub const fn new(key: Key, owner: OwnerToken, lease: Duration, ttl: Duration) -> Self {
        let (fingerprint, max_attempts, trail) = (None, None, Trail::NONE);
        Self { key, owner, lease, ttl, fingerprint, on_crash: OnCrash::Retry, max_attempts, trail }
    }

    /// Sets [`key`](Self::key).
    #[must_use]
    pub fn key(self, key: Key) -> Self {
        Self { key, ..self }
    }

    /// Sets [`owner`](Self::owner).
    #[must_use]
    pub fn owner(self, owner: OwnerToken) -> Self {
        Self { owner, ..self }
    }

    /// Sets [`lease`](Self::lease).
    #[must_use]
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// Sets [`ttl`](Self::ttl).
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// Sets [`fingerprint`](Self::fingerprint).
    #[must_use]
    pub fn fingerprint(self, fingerprint: impl Into<Option<Fingerprint>>) -> Self {
        Self { fingerprint: fingerprint.into(), ..self }
    }

    /// Sets [`on_crash`](Self::on_crash).
    #[must_use]
    pub fn on_crash(self, on_crash: OnCrash) -> Self {
        Self { on_crash, ..self }
    }

    /// Sets [`max_attempts`](Self::max_attempts).
    #[must_use]
    pub fn max_attempts(self, max_attempts: impl Into<Option<NonZeroU32>>) -> Self {
        Self { max_attempts: max_attempts.into(), ..self }
    }

    /// Sets the holder of the key, mostly [`Heartbeats::holder`](crate::store::Heartbeats::holder) of the store handle.
    #[must_use]
    pub fn holder(self, holder: Holder<'_>) -> Self {
        Self { trail: self.trail.with_holder(holder), ..self }
    }

    /// Sets the trace that the run is a part of.
    #[must_use]
    pub fn traceparent(self, traceparent: impl Into<Option<Traceparent>>) -> Self {
        Self { trail: self.trail.with_traceparent(traceparent.into()), ..self }
    }

    /// Returns the lease to release if the answer to this request never arrives.
    pub(crate) fn unanswered(&self) -> Lease {
        Record::first(self).lease(self)
    }
}

/// Answer to a [`ReserveRequest`].
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
        /// The record. Its trail holds at least the trace of the run. A store may leave out the rest of the trail,
        /// which [`inspect`](crate::Store::inspect) returns.
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

/// Answer to a compare-and-set.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The write took effect, in this call or in an earlier one with the same owner token.
    Applied,
    /// The record belongs to another attempt, or does not exist any more. This write changed nothing.
    Refused,
}

/// End of an attempt with a result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Finish {
    /// The body succeeded.
    Completed(StoredResult),
    /// The body returned an error to be replayed.
    Failed(StoredResult),
}

impl Finish {
    /// Returns the result, or the reason why there is none.
    pub fn result(&self) -> &StoredResult {
        match self {
            Self::Completed(payload) | Self::Failed(payload) => payload,
        }
    }

    /// Returns the state that the record gets.
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
    /// The body never started, so the attempt doesn't count against `max_attempts`.
    NotStarted,
    /// The body started and did not return, and may not run again.
    Interrupted,
}

impl Release {
    /// Returns the state that the record gets.
    pub fn state(self) -> State {
        match self {
            Self::Returned | Self::NotStarted => State::Released,
            Self::Interrupted => State::Interrupted,
        }
    }
}

/// Standing of an operation: the state of its record, and for a pending record whether its lease is live.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Standing {
    /// An attempt is running: its lease is live.
    Running,
    /// An attempt crashed without an answer, or can't reach the store: its lease has lapsed, and no other attempt has
    /// taken over.
    Lapsed,
    /// The latest attempt ended without a result, and the next attempt may run.
    Released,
    /// A body started and did not return. No attempt may run until an operator decides.
    Interrupted,
    /// The body succeeded.
    Completed,
    /// The body returned an error that is replayed.
    Failed,
    /// The record can't be read, so every delivery fails until an operator forgets the record.
    Damaged,
}

impl Standing {
    /// All standings.
    pub const ALL: [Self; 7] =
        [Self::Running, Self::Lapsed, Self::Released, Self::Interrupted, Self::Completed, Self::Failed, Self::Damaged];

    /// Returns the name in commands and lists: `running`, `lapsed`, `released`, `interrupted`, `completed`, `failed` or
    /// `damaged`. `running` and `lapsed` are one state, `pending`, which only the time separates.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Lapsed => "lapsed",
            Self::Released => "released",
            Self::Interrupted => "interrupted",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Damaged => "damaged",
        }
    }

    /// Returns the [name](State::name) of the state.
    #[cfg(feature = "postgres")]
    pub(crate) const fn state(self) -> &'static str {
        match self {
            Self::Running | Self::Lapsed => "pending",
            other => other.name(),
        }
    }

    /// Returns whether the effect may have happened without a trace in the record.
    pub const fn is_uncertain(self) -> bool {
        matches!(self, Self::Lapsed | Self::Interrupted | Self::Damaged)
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A record as an operator sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// The record. A record that [can't be read](Self::damage) is shown as interrupted, of attempt 0, without a trail.
    pub record: Record,
    /// Reason why the record can't be read; `None` if it can. Never contains bytes of the record.
    pub damage: Option<Box<str>>,
    /// Time until the record is forgotten, unless it is written again; [`Duration::MAX`] for never, and if that time
    /// can't be read.
    pub expires_in: Duration,
    /// Time until the lease lapses; zero if it has lapsed, `None` unless the record is pending.
    pub lapses_in: Option<Duration>,
    /// Time since the key was first seen, by the store's clock; `None` if the store does not report it. A record that
    /// is forgotten takes this time with it.
    pub first_seen: Option<Duration>,
    /// Time since the latest attempt began, by the store's clock; `None` if the store does not report it.
    pub began: Option<Duration>,
}

impl Inspection {
    /// Makes an inspection of a record, with the time until it is forgotten, and the time until its lease lapses.
    pub const fn new(record: Record, expires_in: Duration, lapses_in: Option<Duration>) -> Self {
        Self { record, damage: None, expires_in, lapses_in, first_seen: None, began: None }
    }

    /// Makes an inspection of a record that can't be read, with the reason. `stored`: all stored parts of the record,
    /// in a fixed order. A digest of the parts takes the place of the owner token in the [revision](Self::revision).
    pub fn damaged(why: impl Into<Box<str>>, stored: impl IntoIterator<Item: AsRef<[u8]>>) -> Self {
        let mut digest = Sha256::new();
        for part in stored {
            let part = part.as_ref();
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        let mut owner = [0; OwnerToken::BYTES];
        owner.copy_from_slice(&digest.finalize()[..OwnerToken::BYTES]);
        let record = Record { attempts_used: 0, ..Record::new(OwnerToken::from_bytes(owner), 0, State::Interrupted) };
        Self { damage: Some(why.into()), ..Self::new(record, Duration::MAX, None) }
    }

    /// Makes an inspection of a damaged record in a list, which reads no results. Its revision would be a digest of all
    /// stored bytes, so a store must read the record again before a decision.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn unexamined(why: &impl fmt::Display) -> Self {
        Self::damaged(why.to_string(), [""; 0])
    }

    /// Returns this inspection, if the record can be read.
    ///
    /// # Errors
    /// The reason why the record can't be read.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn readable(self) -> Result<Self, Box<str>> {
        match self.damage {
            Some(why) => Err(why),
            None => Ok(self),
        }
    }

    /// Sets the time since the key was first seen, and the time since the latest attempt began.
    #[must_use]
    pub fn since(self, first_seen: Option<Duration>, began: Option<Duration>) -> Self {
        Self { first_seen, began, ..self }
    }

    /// Number of the latest attempt.
    pub const fn attempt(&self) -> u32 {
        self.record.attempt
    }

    /// Returns the standing of the operation, which includes the state of its lease.
    pub fn standing(&self) -> Standing {
        if self.damage.is_some() {
            return Standing::Damaged;
        }
        self.record.standing(self.lapses_in.unwrap_or(Duration::MAX))
    }

    /// Returns the revision of this record, for decisions: a decision is refused once the record has changed.
    pub fn revision(&self) -> Revision {
        Revision { owner: self.record.owner.tag(), attempt: self.record.attempt, standing: self.standing() }
    }

    /// Returns the latest holder of the key: the store handle that made the latest attempt.
    pub fn holder(&self) -> Option<Holder<'_>> {
        self.record.trail.holder()
    }

    /// Returns the trace of the latest attempt: if there is a result, the trace of the run that made it.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.record.trail.traceparent()
    }

    /// Returns the operator who decided about the record last.
    pub fn decided_by(&self) -> Option<&str> {
        self.record.trail.decided_by()
    }

    /// Returns the reason of that decision.
    pub fn decided_reason(&self) -> Option<&str> {
        self.record.trail.decided_reason()
    }
}
