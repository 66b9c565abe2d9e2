//! A record as an operator sees it.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::messages::UnsentMessages;
use super::standing::Standing;
use super::{Holder, Journal, OwnerToken, Record, Revision, State, StoredResult, Traceparent};
use crate::policy::OnCrash;

/// A record as an operator sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// The record. A record that [can't be read](Self::damage) is represented by an interrupted record with attempt 0
    /// and no provenance.
    pub record: Record,
    /// Reason why the record can't be read; `None` if the record can be read. The reason never contains bytes of the
    /// record.
    pub damage: Option<Box<str>>,
    /// Time until the record expires, unless it is written again. [`Duration::MAX`] if the record never expires, or if
    /// that time can't be read.
    pub expires_in: Duration,
    /// Time until the lease lapses; zero if the lease has lapsed, `None` unless the record is pending.
    pub lapses_in: Option<Duration>,
    /// Time since the key was first seen, by the store's clock; `None` if the store does not report it. The time starts
    /// again after the record has expired or was forgotten.
    pub first_seen: Option<Duration>,
    /// Time since the latest attempt began, by the store's clock; `None` if the store does not report it.
    pub began: Option<Duration>,
    /// Journal that was stored with the result; see [`StepPolicy::keep`](crate::policy::StepPolicy::keep).
    pub(crate) kept: Option<Journal>,
    /// Messages that were stored with the result; `None` before they are parted from the result.
    pub(crate) unsent: Option<UnsentMessages>,
}

impl Inspection {
    /// Makes an inspection of a record. `expires_in` is the time until the record expires, `lapses_in` the time until
    /// its lease lapses.
    pub const fn new(record: Record, expires_in: Duration, lapses_in: Option<Duration>) -> Self {
        Self { record, damage: None, expires_in, lapses_in, first_seen: None, began: None, kept: None, unsent: None }
    }

    /// Makes an inspection of a record that can't be read, with the reason. `stored` holds all stored parts of the
    /// record, in a fixed order. In the [revision](Self::revision), a digest of these parts takes the place of the
    /// owner token.
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

    /// Makes an inspection of a damaged record for a list. A list reads no results. The revision of a damaged record is
    /// a digest of all stored bytes, so the store must read the record again before a decision.
    #[allow(dead_code, reason = "for stores")]
    pub(crate) fn unexamined(why: &impl fmt::Display) -> Self {
        Self::damaged(why.to_string(), [""; 0])
    }

    /// Returns this inspection if its record can be read.
    ///
    /// # Errors
    /// Reason why the record can't be read.
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

    /// Parts the result from the journal and the messages that are stored with it, so that all can be shown.
    pub(crate) fn with_result_alone(mut self) -> Self {
        self.unsent = self.unsent_messages();
        if let Some(stored) = self.record.state.result_mut()
            && let (Cow::Owned(result), kept) = stored.parts()
        {
            *stored = result;
            self.kept = kept;
        }
        self
    }

    /// Returns the messages of a finished operation that are not marked as sent; `None` if there are none, or if they
    /// can't be read. A list leaves them out.
    pub fn unsent_messages(&self) -> Option<UnsentMessages> {
        match self.record.state.result().and_then(StoredResult::messages) {
            Some(read) => read.ok().map(|(_, messages)| messages),
            None => self.unsent.clone(),
        }
    }

    /// Number of the latest attempt.
    pub const fn attempt(&self) -> u32 {
        self.record.attempt
    }

    /// Returns the standing of the operation: the state of the record, and of its lease.
    pub fn standing(&self) -> Standing {
        if self.damage.is_some() {
            return Standing::Damaged;
        }
        self.record.standing(self.lapses_in.unwrap_or(Duration::MAX))
    }

    /// Returns whether no body may run until an operator decides, or a reconciler settles the doubt: the operation was
    /// interrupted, or its lease has lapsed under `on_crash = fail` after the body had begun. Returns false for a
    /// damaged record, about which nothing is known.
    pub fn waits_for_decision(&self) -> bool {
        match (self.standing(), &self.record.state) {
            (Standing::Interrupted, _) => true,
            (Standing::Lapsed, State::Pending { on_crash, begun, .. }) => *on_crash == OnCrash::Fail && *begun,
            _ => false,
        }
    }

    /// Returns the revision of this record, for decisions: a decision is refused once the record has changed.
    pub fn revision(&self) -> Revision {
        let Record { owner, attempt, .. } = self.record;
        Revision { owner: owner.tag(), attempt, standing: self.standing(), journal: self.record.journal_bytes() }
    }

    /// Returns the latest holder of the key: the store handle that made the latest attempt.
    pub fn holder(&self) -> Option<Holder<'_>> {
        self.record.provenance.holder()
    }

    /// Returns the trace of the latest attempt. For a recorded result, this is the trace of the run that returned it.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.record.provenance.traceparent()
    }

    /// Returns the number of times that the [reconciler](crate::Reconciliation) of the handler was asked since the last
    /// decision of an operator. If the record is not finished, the answers so far have not settled the doubt, a
    /// question was cut off, or the latest attempt is asking.
    pub fn reconciliations(&self) -> u16 {
        self.record.provenance.reconciliations()
    }

    /// Returns the name of the operator who made the latest decision about the record.
    pub fn decided_by(&self) -> Option<&str> {
        self.record.provenance.decided_by()
    }

    /// Returns the reason of the latest decision about the record.
    pub fn decided_reason(&self) -> Option<&str> {
        self.record.provenance.decided_reason()
    }
}

impl From<&Inspection> for Revision {
    fn from(found: &Inspection) -> Self {
        found.revision()
    }
}
