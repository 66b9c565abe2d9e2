//! Effect of an operator's decision on a record. Every store calls the same pure function.

use std::time::Duration;

use super::messages::UnsentMessages;
use super::standing::Standing;
use super::{Finish, Inspection, Journal, Provenance, Record, Revision, State, StoredResult, Verdict};
use crate::key::Key;
use crate::policy::OnCrash;

/// An operator's decision about the record of a key; see [`Store::decide`](crate::Store::decide).
///
/// A decision names the record that the operator saw. The decision is refused once an attempt or another decision has
/// changed that record.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Decision {
    /// Key of the record.
    pub key: Key,
    /// Record that the operator saw.
    pub seen: Revision,
    /// Change of the record.
    pub action: Action,
    /// Name of the operator, for the record; empty if no name is given. The record keeps at most
    /// [`MAX_BY_BYTES`](super::Provenance::MAX_BY_BYTES) of the name.
    pub by: Box<str>,
    /// Reason of the decision, for the record; empty if no reason is given. The record keeps at most
    /// [`MAX_REASON_BYTES`](super::Provenance::MAX_REASON_BYTES) of the reason.
    pub reason: Box<str>,
}

/// Change of a record that an operator decides.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Action {
    /// Lets the next delivery run the body again: releases the record, and resets the number of attempts that count
    /// against `max_attempts` to zero. The action is refused if the operation has finished.
    Reopen,
    /// Lets the next delivery run the body again, like `Reopen`, and replaces the journal by this one (`None`: removes
    /// the journal). The action is refused as well if the journal has changed since the operator saw the record.
    ReopenWith(Option<Journal>),
    /// Discards the result of a finished operation, and lets the next delivery run the body again: releases the record,
    /// and resets the number of attempts that count against `max_attempts` to zero. The action is refused unless the
    /// operation has finished.
    Discard,
    /// Ends the operation with this result. A missing result is supplied, but a recorded result is never replaced.
    Resolve(Finish),
    /// Ends the operation with this result instead of the recorded result. No body runs in between. The action is
    /// refused unless the operation has finished.
    Replace(Finish),
    /// Ends the lease, even if it is live. The owner of the lease can't write any more. A broken lease has the
    /// consequences of a crash: under `on_crash = retry` the next delivery runs the body, and under `on_crash = fail`
    /// the key is interrupted if the body has begun.
    BreakLease,
    /// Removes the record and its result. The next delivery runs the body as the first delivery of the key.
    Forget,
    /// Marks messages of a finished operation as sent: of the messages in the record, only these are left (`None`: no
    /// message). The library makes this decision after it has sent messages. Unlike every other decision, it changes
    /// neither the owner token nor the provenance, and its repetition by another process changes nothing more. The
    /// action is refused unless the operation has finished.
    MarkSent(Option<UnsentMessages>),
    /// Sends the messages of a finished operation again that were set aside: the next delivery or a resender sends
    /// them. The action is refused unless the operation has finished.
    ResendMessages,
    /// Gives up the messages of a finished operation that are not marked as sent. The action is refused unless the
    /// operation has finished.
    DropMessages,
}

impl Action {
    /// Returns the name of the action in errors, logs and commands: `reopen`, `reopen_with`, `discard`, `resolve`,
    /// `replace`, `break_lease`, `forget`, `mark_sent`,
    /// `resend_messages` or `drop_messages`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Reopen => "reopen",
            Self::ReopenWith(_) => "reopen_with",
            Self::Discard => "discard",
            Self::Resolve(_) => "resolve",
            Self::Replace(_) => "replace",
            Self::BreakLease => "break_lease",
            Self::Forget => "forget",
            Self::MarkSent(_) => "mark_sent",
            Self::ResendMessages => "resend_messages",
            Self::DropMessages => "drop_messages",
        }
    }

    /// Returns the end of the operation that the action records; `None` for an action other than `Resolve` and
    /// `Replace`.
    pub const fn finish(&self) -> Option<&Finish> {
        match self {
            Self::Resolve(finish) | Self::Replace(finish) => Some(finish),
            _ => None,
        }
    }

    /// Returns the same action with `finish` as its end, for a wrapper that stores results in another form. An action
    /// without an end is returned unchanged.
    #[must_use]
    pub fn with_finish(&self, finish: Finish) -> Self {
        match self {
            Self::Resolve(_) => Self::Resolve(finish),
            Self::Replace(_) => Self::Replace(finish),
            other => other.clone(),
        }
    }
}

impl Decision {
    /// Makes the decision to apply `action` to the record of `key`. `seen` is the record that the operator saw, as an
    /// [`Inspection`](crate::store::Inspection) or its [`Revision`].
    pub fn new(key: &Key, seen: impl Into<Revision>, action: Action) -> Self {
        Self { key: key.clone(), seen: seen.into(), action, by: Box::default(), reason: Box::default() }
    }

    /// Sets the [name of the operator](Self::by).
    #[must_use]
    pub fn by(self, by: impl Into<Box<str>>) -> Self {
        Self { by: by.into(), ..self }
    }

    /// Sets the [reason](Self::reason) of the decision.
    #[must_use]
    pub fn reason(self, reason: impl Into<Box<str>>) -> Self {
        Self { reason: reason.into(), ..self }
    }

    /// Makes the decision to let the next delivery run the body again.
    pub fn reopen(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::Reopen)
    }

    /// Makes the decision to let the next delivery run the body again, with `journal` in place of the journal of the
    /// record (`None`: without a journal). An [`Operator`](crate::operator::Operator) makes such journals.
    pub fn reopen_with(key: &Key, seen: impl Into<Revision>, journal: Option<Journal>) -> Self {
        Self::new(key, seen, Action::ReopenWith(journal))
    }

    /// Makes the decision to discard the recorded result and let the next delivery run the body again.
    pub fn discard(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::Discard)
    }

    /// Makes the decision to end the operation with this result.
    pub fn resolve(key: &Key, seen: impl Into<Revision>, finish: Finish) -> Self {
        Self::new(key, seen, Action::Resolve(finish))
    }

    /// Makes the decision to end the operation with this result instead of the recorded result.
    pub fn replace(key: &Key, seen: impl Into<Revision>, finish: Finish) -> Self {
        Self::new(key, seen, Action::Replace(finish))
    }

    /// Makes the decision to end the lease.
    pub fn break_lease(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::BreakLease)
    }

    /// Makes the decision to mark all messages of a finished operation as sent, except for those in `left`.
    pub fn mark_sent(key: &Key, seen: impl Into<Revision>, left: Option<UnsentMessages>) -> Self {
        Self::new(key, seen, Action::MarkSent(left))
    }

    /// Makes the decision to send messages again that were set aside.
    pub fn resend_messages(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::ResendMessages)
    }

    /// Makes the decision to give up the messages that are not marked as sent.
    pub fn drop_messages(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::DropMessages)
    }

    /// Makes the decision to remove the record.
    pub fn forget(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::Forget)
    }

    /// Returns the result that the decision records, if it records one.
    pub fn result(&self) -> Option<&StoredResult> {
        self.action.finish().map(Finish::result)
    }

    /// Returns the number of bytes of the result or the journal that the decision stores.
    #[cfg(feature = "sqlite")]
    pub(crate) fn stored_bytes(&self) -> usize {
        match &self.action {
            Action::ReopenWith(Some(journal)) => journal.bytes().len(),
            _ => self.result().map_or(0, StoredResult::stored_bytes),
        }
    }

    /// Returns whether the decision may end a live lease. All other decisions are refused if the lease is live when the
    /// record is written. A decision to break a lease that the operator saw as lapsed is refused as well, if the lease
    /// is live.
    pub fn ends_live_lease(&self) -> bool {
        self.action == Action::BreakLease && self.seen.standing == Standing::Running
    }
}

/// Answer of a store to a [`Decision`].
#[must_use]
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DecisionAnswer {
    /// The decision took effect, in this call or in an earlier call.
    Applied,
    /// Refused: an attempt is running. The record is unchanged.
    #[non_exhaustive]
    LiveLease {
        /// Time until the lease lapses unless it is renewed; never zero.
        lapses_in: Duration,
    },
    /// Refused: the latest attempt has another number. The record is unchanged.
    #[non_exhaustive]
    OtherAttempt {
        /// Number of the latest attempt.
        latest: u32,
    },
    /// Refused: the latest attempt is the one that the operator saw, but its record has changed since then. This
    /// decision did not change the record.
    #[non_exhaustive]
    Changed {
        /// Current standing of the operation.
        standing: Standing,
        /// Name of the operator who decided meanwhile; `None` if no operator decided or gave a name.
        decided_by: Option<Box<str>>,
    },
    /// Refused: the operation has finished, and its recorded result may not be changed. The record is unchanged.
    Finished,
    /// Refused: the operation has not finished, so it has no result to discard or replace. The record is unchanged.
    Unfinished,
    /// There is no record to decide about. Nothing was written.
    NoRecord,
    /// Refused: the record can't be read, so the only possible decision is to forget it. The record is unchanged.
    Damaged,
}

impl DecisionAnswer {
    /// Makes a [`LiveLease`](Self::LiveLease).
    pub const fn live_lease(lapses_in: Duration) -> Self {
        Self::LiveLease { lapses_in }
    }

    /// Makes an [`OtherAttempt`](Self::OtherAttempt).
    pub const fn other_attempt(latest: u32) -> Self {
        Self::OtherAttempt { latest }
    }

    /// Makes a [`Changed`](Self::Changed) without the name of an operator.
    pub const fn changed(standing: Standing) -> Self {
        Self::Changed { standing, decided_by: None }
    }
}

impl From<DecisionAnswer> for Verdict {
    fn from(decided: DecisionAnswer) -> Self {
        match decided {
            DecisionAnswer::Applied => Self::Applied,
            _ => Self::Refused,
        }
    }
}

/// Effect of a [`Decision`] on the record that it found; see [`Record::decide`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ruling {
    /// The record stays unchanged, and the operator gets this answer.
    Answer(DecisionAnswer),
    /// The store replaces the stored record by the record in this variant, but only if owner, attempt and state of the
    /// stored record are still the same. (A mark of sent messages changes none of the three: for a finished record the
    /// length of its stored result must be the same as well.) The lease must not have
    /// been renewed either, unless the decision [ends a live lease](Decision::ends_live_lease). For
    /// [`Action::ReopenWith`], the length of the journal must be the same, too; for another action, the store may keep
    /// a journal to which the attempt has appended meanwhile. The new record is never pending, and keeps the retention.
    Replace(Record),
    /// The store removes the record, under the same condition as for a replacement. The store removes a record that
    /// can't be read only if all stored bytes of the record are still the same.
    Remove,
}

impl Inspection {
    /// Decides the effect of `decision` on the record of this inspection. [`Record::decide`] decides for a record that
    /// can be read. An unreadable record is removed if the decision is to forget the record and names its
    /// [revision](Self::revision). Every other decision leaves an unreadable record unchanged.
    ///
    /// Before a store removes a damaged record, it compares all stored bytes of the record, instead of owner, attempt
    /// and state.
    pub fn decide(&self, decision: &Decision) -> Ruling {
        let standing = self.standing();
        match &decision.action {
            _ if standing != Standing::Damaged => self.record.decide(decision, self.lapses_in.unwrap_or_default()),
            _ if decision.seen != self.revision() => Ruling::Answer(DecisionAnswer::changed(standing)),
            Action::Forget => Ruling::Remove,
            // The lease of a damaged record can't be read, and the holder of the lease can't write: ending the lease
            // would mean forgetting the record.
            _ => Ruling::Answer(DecisionAnswer::Damaged),
        }
    }
}

impl Record {
    /// Decides the effect of `decision` on this record. `lapses_in` is the time until the lease of a pending record
    /// lapses; zero if the lease has lapsed. The function is pure: every store calls it, and applies the returned
    /// effect atomically.
    ///
    /// Every decision gives the record another owner token. So a store that compares owner, attempt and state applies
    /// only one of two decisions about the same record. For the same reason a late write of the attempt can't be
    /// mistaken for a repetition of the decision.
    ///
    /// If the same person repeats a decision, the repetition finds the record that the first decision made, and writes
    /// that record again. The repetition gets the same answer as the first decision.
    pub fn decide(&self, decision: &Decision, lapses_in: Duration) -> Ruling {
        let Decision { seen, action, by, reason, .. } = decision;
        let standing = self.standing(lapses_in);
        // The operator saw a damaged record, but this record can be read, so it has changed since then.
        if seen.standing == Standing::Damaged {
            return Ruling::Answer(DecisionAnswer::changed(standing));
        }
        if self.attempt != seen.attempt {
            return Ruling::Answer(DecisionAnswer::OtherAttempt { latest: self.attempt });
        }
        if self.is_made_by(decision) {
            return Ruling::Replace(self.clone());
        }
        if standing == Standing::Running && *action != Action::BreakLease {
            return Ruling::Answer(DecisionAnswer::LiveLease { lapses_in });
        }
        // A decision to break a live lease also applies if the lease has lapsed since the operator saw it.
        let is_seen = standing == seen.standing || (decision.ends_live_lease() && standing == Standing::Lapsed);
        if self.owner.tag() != seen.owner || !is_seen {
            let other = self.owner.tag() != seen.owner;
            let decided_by = self.provenance.decided_by().filter(|_| other).map(Box::from);
            return Ruling::Answer(DecisionAnswer::Changed { standing, decided_by });
        }
        // The attempt may have journaled steps after its lease had lapsed, or may have renewed the lease meanwhile. An
        // operator who changes the journal has to see these steps first.
        if matches!(action, Action::ReopenWith(_)) && self.journal_bytes() != seen.journal_bytes() {
            return Ruling::Answer(DecisionAnswer::changed(standing));
        }
        // From here on the state of the record decides whether the action is possible.
        let decided = |state| {
            let (owner, provenance) = (self.owner.succeeded(), self.provenance.with_decision(by, reason));
            let (attempt, attempts_used, fingerprint) = (self.attempt, self.attempts_used, self.fingerprint);
            let journal = self.journal_in(&state).cloned();
            Self { owner, attempt, attempts_used, fingerprint, state, provenance, journal }
        };
        // The messages of a finished operation do not depend on its result.
        let corrected = |finish: &Finish| match self.state.result().and_then(StoredResult::messages) {
            Some(Ok((_, messages))) => {
                Ruling::Replace(decided(finish.with_result(finish.result().with_messages(&messages)).state()))
            }
            Some(Err(_)) => Ruling::Answer(DecisionAnswer::Damaged),
            None => Ruling::Replace(decided(finish.state())),
        };
        let released = || Ruling::Replace(Self { attempts_used: 0, ..decided(State::Released) });
        match (action, &self.state) {
            (Action::Forget, _) => Ruling::Remove,
            (Action::Discard, State::Completed(_) | State::Failed(_)) => released(),
            (Action::Replace(finish), State::Completed(_) | State::Failed(_)) => corrected(finish),
            (
                Action::MarkSent(_) | Action::ResendMessages | Action::DropMessages,
                State::Completed(recorded) | State::Failed(recorded),
            ) => self.decide_messages(action, recorded, decided),
            (
                Action::Discard
                | Action::Replace(_)
                | Action::MarkSent(_)
                | Action::ResendMessages
                | Action::DropMessages,
                _,
            ) => Ruling::Answer(DecisionAnswer::Unfinished),
            (Action::Resolve(finish), State::Completed(recorded) | State::Failed(recorded)) => {
                // A missing result may be supplied: no duplicate can have got another result.
                let is_missing =
                    matches!(*recorded.without_messages(), StoredResult::TooLarge { .. } | StoredResult::Unencodable)
                        && matches!(finish.result(), StoredResult::Encoded { .. })
                        && matches!(finish, Finish::Completed(_)) == matches!(self.state, State::Completed(_));
                match (is_missing, self.state.is_end(finish)) {
                    (true, _) => corrected(finish),
                    // The journal beside the result stays.
                    (false, true) => Ruling::Replace(decided(self.state.clone())),
                    (false, false) => Ruling::Answer(DecisionAnswer::Finished),
                }
            }
            (_, State::Completed(_) | State::Failed(_)) => Ruling::Answer(DecisionAnswer::Finished),
            (Action::Resolve(finish), _) => Ruling::Replace(decided(finish.state())),
            (Action::Reopen, _) => released(),
            (Action::ReopenWith(journal), _) => {
                Ruling::Replace(Self { attempts_used: 0, journal: journal.clone(), ..decided(State::Released) })
            }
            (Action::BreakLease, State::Pending { on_crash: OnCrash::Fail, begun: true, .. } | State::Interrupted) => {
                Ruling::Replace(decided(State::Interrupted))
            }
            // Under `on_crash = fail` a body begins only after its record is marked as begun. Without this mark no body
            // began, so the attempt does not count.
            (Action::BreakLease, State::Pending { on_crash: OnCrash::Fail, .. }) => {
                let attempts_used = self.attempts_used.saturating_sub(1);
                Ruling::Replace(Self { attempts_used, ..decided(State::Released) })
            }
            (Action::BreakLease, _) => Ruling::Replace(decided(State::Released)),
        }
    }

    /// Decides the effect of an action on the messages that are stored with the result `recorded`.
    fn decide_messages(&self, action: &Action, recorded: &StoredResult, decided: impl Fn(State) -> Self) -> Ruling {
        let with = |result| self.state.with_result(result);
        match (action, recorded.messages()) {
            (Action::MarkSent(_), None) => Ruling::Replace(self.clone()),
            (Action::MarkSent(left), Some(Ok((result, messages)))) => {
                let result = match messages.without_sent(left.as_ref()) {
                    Some(left) => result.with_messages(&left),
                    None => result,
                };
                Ruling::Replace(Self { state: with(result), ..self.clone() })
            }
            (_, None) => Ruling::Replace(decided(self.state.clone())),
            (Action::DropMessages, Some(Ok((result, _)))) => Ruling::Replace(decided(with(result))),
            // The result stays if it can be read, although the messages can't.
            (Action::DropMessages, Some(Err(_))) => {
                let result = recorded.beside_messages().unwrap_or(StoredResult::Unencodable);
                Ruling::Replace(decided(with(result)))
            }
            (_, Some(Ok((result, messages)))) => {
                Ruling::Replace(decided(with(result.with_messages(&messages.to_resend()))))
            }
            (_, Some(Err(_))) => Ruling::Answer(DecisionAnswer::Damaged),
        }
    }

    /// Returns whether `decision` has been applied already: the record is in the state to which the action leads, and
    /// names the person of `decision` as the last to decide. The owner token of the record must be the successor of the
    /// token that the person saw.
    fn is_made_by(&self, decision: &Decision) -> bool {
        let is_its_end = match &decision.action {
            Action::Reopen | Action::Discard => self.state == State::Released && self.attempts_used == 0,
            Action::ReopenWith(journal) => {
                self.state == State::Released && self.attempts_used == 0 && self.journal == *journal
            }
            Action::Resolve(finish) | Action::Replace(finish) => self.state.is_end(finish),
            Action::BreakLease => matches!(self.state, State::Released | State::Interrupted),
            Action::ResendMessages => match self.state.result().map(StoredResult::messages) {
                Some(Some(Ok((_, messages)))) => messages == messages.to_resend(),
                Some(None) => true,
                _ => false,
            },
            Action::DropMessages => self.state.result().is_some_and(|result| !result.has_messages()),
            Action::Forget | Action::MarkSent(_) => false,
        };
        is_its_end
            && self.owner.preceded().tag() == decision.seen.owner
            // The record keeps a shortened name, so the name of the decision is shortened too.
            && Provenance::NONE.with_decision(&decision.by, "").decided_by() == self.provenance.decided_by()
    }

    /// Returns the standing of the operation. `lapses_in` is the time until the lease of a pending record lapses.
    pub(crate) fn standing(&self, lapses_in: Duration) -> Standing {
        match &self.state {
            State::Pending { .. } if lapses_in.is_zero() => Standing::Lapsed,
            State::Pending { .. } => Standing::Running,
            State::Released => Standing::Released,
            State::Interrupted => Standing::Interrupted,
            State::Completed(_) => Standing::Completed,
            State::Failed(_) => Standing::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::CodecName;
    use crate::record::{Lease, OwnerToken, ReserveRequest};
    use bytes::Bytes;

    const LIVE: Duration = Duration::from_secs(3);

    fn states() -> Vec<State> {
        let pending = |on_crash, begun| State::Pending { lease: LIVE, ttl: LIVE, on_crash, begun };
        vec![
            pending(OnCrash::Retry, false),
            pending(OnCrash::Fail, false),
            pending(OnCrash::Fail, true),
            State::Released,
            State::Interrupted,
            State::Completed(StoredResult::Unencodable),
            State::Completed(encoded("1")),
            State::Failed(StoredResult::TooLarge { size: 7 }),
            State::Failed(encoded("1")),
        ]
    }

    fn encoded(result: &'static str) -> StoredResult {
        StoredResult::Encoded { codec: CodecName::new(b"json").unwrap(), bytes: Bytes::from_static(result.as_bytes()) }
    }

    fn actions() -> Vec<Action> {
        let results = [StoredResult::Unencodable, encoded("1"), encoded("2")];
        let ends = |finish: fn(_) -> Finish| results.clone().into_iter().map(finish);
        let ends: Vec<_> = ends(Finish::Completed).chain(ends(Finish::Failed)).collect();
        let others = [
            Action::Reopen,
            Action::ReopenWith(None),
            Action::ReopenWith(Journal::new("steps")),
            Action::Discard,
            Action::BreakLease,
            Action::Forget,
            Action::ResendMessages,
            Action::DropMessages,
        ];
        let resolved = ends.iter().cloned().map(Action::Resolve);
        others.into_iter().chain(resolved).chain(ends.iter().cloned().map(Action::Replace)).collect()
    }

    fn record(state: State) -> Record {
        Record { attempts_used: 2, ..Record::new(OwnerToken::from_bytes([7; 16]), 3, state) }
    }

    fn seen(record: &Record, lapses_in: Duration) -> Revision {
        Inspection::new(record.clone(), LIVE, Some(lapses_in)).revision()
    }

    fn each(check: impl Fn(&Record, &Decision, Duration, Ruling)) {
        for state in states() {
            let record = record(state);
            for action in actions() {
                for lapses_in in [Duration::ZERO, LIVE] {
                    let seen = seen(&record, lapses_in);
                    let decision = Decision::new(&Key::new("test", "k").unwrap(), seen, action.clone()).by("alice");
                    check(&record, &decision, lapses_in, record.decide(&decision, lapses_in));
                }
            }
        }
    }

    #[test]
    fn a_repeated_decision_changes_nothing() {
        each(|record, decision, _, ruling| {
            if let Ruling::Replace(with) = ruling {
                let again = with.decide(decision, Duration::ZERO);
                assert_eq!(again, Ruling::Replace(with.clone()), "{record:?} {decision:?}");
                // The same decision by another person is a new decision, and the record has changed since that person
                // saw it.
                let other = with.decide(&decision.clone().by("bob"), Duration::ZERO);
                let (standing, decided_by) = (with.standing(Duration::ZERO), Some("alice".into()));
                let expected = Ruling::Answer(DecisionAnswer::Changed { standing, decided_by });
                assert_eq!(other, expected, "{record:?} {decision:?}");
            }
        });
    }

    #[test]
    fn a_decision_is_applied_only_to_the_record_that_was_seen() {
        each(|before, decision, _, ruling| {
            let Ruling::Replace(made) = ruling else { return };
            for action in actions() {
                for lapses_in in [Duration::ZERO, LIVE] {
                    let stale = Decision::new(&decision.key, seen(before, lapses_in), action.clone()).by("bob");
                    let told = made.decide(&stale, lapses_in);
                    assert!(matches!(told, Ruling::Answer(_)), "{stale:?} of {made:?}, once {before:?}");
                    // The decision is also refused after the same attempt has written another state.
                    for state in states() {
                        let other = record(state);
                        if other.state.name() != before.state.name() {
                            let told = other.decide(&stale, lapses_in);
                            assert!(matches!(told, Ruling::Answer(_)), "{stale:?} of {other:?}, once {before:?}");
                        }
                    }
                }
            }
        });
    }

    #[test]
    fn a_journal_is_replaced_only_if_the_operator_saw_all_of_it() {
        let key = Key::new("test", "k").unwrap();
        let journaled = |state, journal| Record { journal: Journal::new(journal), ..record(state) };
        let pending = State::Pending { lease: LIVE, ttl: LIVE, on_crash: OnCrash::Retry, begun: false };
        for state in [State::Released, State::Interrupted, pending] {
            let found = journaled(state.clone(), "two steps");
            for journal in [Journal::new("two steps, and the end of one"), Journal::new("one step"), None] {
                let decision = Decision::reopen_with(&key, seen(&found, Duration::ZERO), journal.clone()).by("alice");
                let ruling = found.decide(&decision, Duration::ZERO);
                let Ruling::Replace(with) = ruling else { panic!("{ruling:?} of {found:?}") };
                assert_eq!((with.journal.clone(), with.attempts_used, &with.state), (journal, 0, &State::Released));
                // The same person with the same revision, but another journal.
                let other = Decision::reopen_with(&key, decision.seen, Journal::new("other")).by("alice");
                assert!(matches!(with.decide(&other, Duration::ZERO), Ruling::Answer(_)), "{with:?}");
                // The attempt has journaled a step, or the operator saw no journal.
                for meanwhile in ["two steps and a third", "one"] {
                    let changed = journaled(state.clone(), meanwhile);
                    let expected = Ruling::Answer(DecisionAnswer::changed(changed.standing(Duration::ZERO)));
                    assert_eq!(changed.decide(&decision, Duration::ZERO), expected);
                    let reopened = changed.decide(&Decision::reopen(&key, decision.seen), Duration::ZERO);
                    assert!(matches!(reopened, Ruling::Replace(_)), "a plain `reopen` keeps the journal: {reopened:?}");
                }
            }
        }
    }

    #[test]
    fn a_damaged_record_is_forgotten_only_by_its_revision() {
        let key = Key::new("test", "k").unwrap();
        let damaged = |stored: &[&str]| Inspection::damaged("damaged", stored);
        let found = damaged(&["a", "b"]);
        assert_eq!((found.attempt(), found.standing(), found.revision().attempt()), (0, Standing::Damaged, 0));
        for action in actions() {
            let expected = match action {
                Action::Forget => Ruling::Remove,
                _ => Ruling::Answer(DecisionAnswer::Damaged),
            };
            assert_eq!(found.decide(&Decision::new(&key, &found, action.clone())), expected, "{action:?}");
            let changed = |standing| Ruling::Answer(DecisionAnswer::changed(standing));
            for other in [damaged(&["ab"]), damaged(&["a", "c"]), damaged(&["a"])] {
                let stale = Decision::new(&key, &other, action.clone());
                assert_eq!(found.decide(&stale), changed(Standing::Damaged), "{action:?}");
            }
            for state in states() {
                for lapses_in in [Duration::ZERO, LIVE] {
                    let read = Inspection::new(record(state.clone()), LIVE, Some(lapses_in));
                    let stale = Decision::new(&key, &read, action.clone());
                    assert_eq!(found.decide(&stale), changed(Standing::Damaged), "{action:?}");
                    let stale = Decision::new(&key, &found, action.clone());
                    assert_eq!(read.decide(&stale), changed(read.standing()), "{action:?} of {read:?}");
                }
            }
        }
    }

    #[test]
    fn only_a_decision_to_break_a_lease_ends_a_live_lease() {
        each(|record, decision, lapses_in, ruling| {
            let refused = ruling == Ruling::Answer(DecisionAnswer::LiveLease { lapses_in });
            let live = record.is_pending() && !lapses_in.is_zero();
            assert_eq!(refused, live && decision.action != Action::BreakLease, "{record:?} {decision:?}");
            // A decision to break a lapsed lease does not break the lease if it was renewed since then.
            let lapsed = Decision { seen: seen(record, Duration::ZERO), ..decision.clone() };
            if live {
                assert!(matches!(record.decide(&lapsed, lapses_in), Ruling::Answer(_)), "{record:?} {lapsed:?}");
            }
        });
    }

    #[test]
    fn only_discard_replace_and_forget_remove_a_recorded_result() {
        each(|record, decision, _, ruling| {
            let gives_up = matches!(decision.action, Action::Discard | Action::Replace(_) | Action::Forget);
            if let (Some(recorded), Ruling::Replace(with)) = (record.state.result(), &ruling)
                && !gives_up
            {
                let missing = !matches!(recorded, StoredResult::Encoded { .. });
                let kept = with.state == record.state || (missing && with.state.name() == record.state.name());
                assert!(kept, "{record:?} {decision:?} {with:?}");
            }
            if matches!(decision.action, Action::Discard | Action::Replace(_)) && !record.is_finished() {
                assert!(matches!(ruling, Ruling::Answer(_)), "{record:?} {decision:?}");
            }
        });
    }

    #[test]
    fn an_attempt_can_not_write_after_a_decision_about_it() {
        each(|record, decision, _, ruling| {
            let Ruling::Replace(with) = ruling else { return };
            let request = ReserveRequest::new(decision.key.clone(), record.owner, LIVE, LIVE);
            let lease = Lease::new(&request, record.attempt);
            assert!(!with.is_pending());
            assert_eq!(with.ended(&lease, true), Verdict::Refused, "{record:?} {decision:?}");
        });
    }

    #[test]
    fn a_decision_about_another_attempt_is_refused() {
        each(|record, decision, lapses_in, _| {
            for attempt in [0, 2, 4] {
                let decision = Decision { seen: decision.seen.with_attempt(attempt), ..decision.clone() };
                let expected = Ruling::Answer(DecisionAnswer::OtherAttempt { latest: 3 });
                assert_eq!(record.decide(&decision, lapses_in), expected);
            }
        });
    }
}
