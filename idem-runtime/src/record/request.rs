//! Requests to a store, and its answers.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::{Holder, Lease, OwnerToken, Record, Revision, State, StoredResult, Traceparent, Trail};
use crate::key::{Fingerprint, Key};
use crate::policy::OnCrash;

/// The request of an attempt for a key.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
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
    /// Who asks, and what else the record is to tell.
    pub trail: Trail,
}

impl ReserveRequest {
    /// A request of nobody in particular, without a fingerprint and a limit of attempts, which may take over a lapsed attempt.
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

    /// Says who holds the key from then on: mostly [`Heartbeats::holder`](crate::store::Heartbeats::holder) of the store handle.
    #[must_use]
    pub fn holder(self, holder: Holder<'_>) -> Self {
        Self { trail: self.trail.with_holder(holder), ..self }
    }

    /// Names the trace that the run is a part of.
    #[must_use]
    pub fn traceparent(self, traceparent: impl Into<Option<Traceparent>>) -> Self {
        Self { trail: self.trail.with_traceparent(traceparent.into()), ..self }
    }

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
    /// The key is reserved for this attempt: run the body.
    #[non_exhaustive]
    Granted {
        /// The lease, which the attempt presents with every later write.
        lease: Lease,
        /// Whether an attempt whose lease had lapsed was taken over.
        takeover: bool,
    },
    /// Another attempt holds the key: reject, or wait.
    #[non_exhaustive]
    InProgress {
        /// Its number.
        attempt: u32,
        /// The time until its lease lapses unless it is renewed; never zero.
        lapses_in: Duration,
    },
    /// Completed or failed: replay it.
    #[non_exhaustive]
    Finished {
        /// The record. Its trail tells the trace of the run; a store may leave out the rest, which
        /// [`inspect`](crate::Store::inspect) tells.
        record: Record,
        /// How old it is: the time since its attempt began, or since that ended where a store knows no more. `None` if the
        /// store does not tell. It decides nothing.
        age: Option<Duration>,
    },
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
    /// `max_attempts` attempts have started.
    AttemptsExhausted {
        /// Their number.
        attempts: u32,
    },
}

impl Reservation {
    /// [`Granted`](Self::Granted).
    pub const fn granted(lease: Lease, takeover: bool) -> Self {
        Self::Granted { lease, takeover }
    }

    /// [`InProgress`](Self::InProgress).
    pub const fn in_progress(attempt: u32, lapses_in: Duration) -> Self {
        Self::InProgress { attempt, lapses_in }
    }

    /// [`Finished`](Self::Finished), of no known age.
    pub const fn finished(record: Record) -> Self {
        Self::Finished { record, age: None }
    }

    /// Sets the age of a finished record; every other answer stays as it is.
    #[must_use]
    pub fn aged(self, age: impl Into<Option<Duration>>) -> Self {
        match self {
            Self::Finished { record, .. } => Self::Finished { record, age: age.into() },
            other => other,
        }
    }
}

/// The answer to a compare-and-set.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The write took effect, in this call or in an earlier one with the same owner token.
    Applied,
    /// The record belongs to another attempt, or is gone; nothing was changed.
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

/// Where an operation stands: the state of its record, and of a pending one whether its lease holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Standing {
    /// An attempt is running: its lease holds.
    Running,
    /// An attempt died without an answer, or can't reach the store: its lease has lapsed, and nobody has taken over.
    Lapsed,
    /// The latest attempt ended without a result; the next one may run.
    Released,
    /// A body started and did not return, and may not run again until an operator decides.
    Interrupted,
    /// The body succeeded.
    Completed,
    /// The body returned an error that is replayed.
    Failed,
    /// The record can't be read, so every delivery fails until an operator forgets it.
    Damaged,
}

impl Standing {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Running, Self::Lapsed, Self::Released, Self::Interrupted, Self::Completed, Self::Failed, Self::Damaged];

    /// The name in commands and lists: `running`, `lapsed`, `released`, `interrupted`, `completed`, `failed` or `damaged`. The
    /// first two are one state, `pending`, for everybody who does not know the time.
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

    /// The [name](State::name) of the state.
    #[cfg(feature = "postgres")]
    pub(crate) const fn state(self) -> &'static str {
        match self {
            Self::Running | Self::Lapsed => "pending",
            other => other.name(),
        }
    }

    /// Whether the effect may have happened and the record does not know.
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
    /// The record. One that [can't be read](Self::damage) is shown as interrupted, of attempt 0, without a trail.
    pub record: Record,
    /// Why the record can't be read; `None` if it can. Never holds bytes of the record.
    pub damage: Option<Box<str>>,
    /// When it is forgotten, unless it is written again; [`Duration::MAX`] if never, and if that can't be read.
    pub expires_in: Duration,
    /// When its lease lapses; zero if it has lapsed, `None` unless it is pending.
    pub lapses_in: Option<Duration>,
    /// How long ago the key was first seen, by the store's clock; `None` if the store does not tell. A record that was
    /// forgotten takes that with it.
    pub first_seen: Option<Duration>,
    /// How long ago the latest attempt began, by the store's clock; `None` if the store does not tell.
    pub began: Option<Duration>,
}

impl Inspection {
    /// A record, when it is forgotten, and when its lease lapses.
    pub const fn new(record: Record, expires_in: Duration, lapses_in: Option<Duration>) -> Self {
        Self { record, damage: None, expires_in, lapses_in, first_seen: None, began: None }
    }

    /// A record that can't be read, and why. `stored` is all that is stored of it, part by part in a fixed order: a digest
    /// of the parts takes the place of the owner token in the [revision](Self::revision).
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

    /// A damaged record of a list, which reads no results. A store looks at the record once more, as the revision is a digest of
    /// all that is stored.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn unexamined(why: &impl fmt::Display) -> Self {
        Self::damaged(why.to_string(), [""; 0])
    }

    /// This inspection, if the record can be read.
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

    /// Adds how long ago the key was first seen, and how long ago the latest attempt began.
    #[must_use]
    pub fn since(self, first_seen: Option<Duration>, began: Option<Duration>) -> Self {
        Self { first_seen, began, ..self }
    }

    /// The number of the latest attempt.
    pub const fn attempt(&self) -> u32 {
        self.record.attempt
    }

    /// Where the operation stands, with what has become of its lease.
    pub fn standing(&self) -> Standing {
        if self.damage.is_some() {
            return Standing::Damaged;
        }
        self.record.standing(self.lapses_in.unwrap_or(Duration::MAX))
    }

    /// The name of this record in decisions: they are refused once it has changed.
    pub fn revision(&self) -> Revision {
        Revision { owner: self.record.owner.tag(), attempt: self.record.attempt, standing: self.standing() }
    }

    /// Who holds the key, or held it last: the handle that made the latest attempt.
    pub fn holder(&self) -> Option<Holder<'_>> {
        self.record.trail.holder()
    }

    /// The trace of the latest attempt: of the run that made the result, if there is one.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.record.trail.traceparent()
    }

    /// The operator who decided about the record last.
    pub fn decided_by(&self) -> Option<&str> {
        self.record.trail.decided_by()
    }

    /// Why they decided so.
    pub fn decided_reason(&self) -> Option<&str> {
        self.record.trail.decided_reason()
    }
}
