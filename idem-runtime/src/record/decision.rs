//! What an operator decides about a record, and what becomes of it: one pure function, which every store calls.

use std::time::Duration;

use super::request::Standing;
use super::{Finish, Inspection, Record, Revision, State, StoredResult, Trail, Verdict};
use crate::key::Key;
use crate::policy::OnCrash;

/// What an operator decides about the record of a key; see [`Store::decide`](crate::Store::decide).
///
/// A decision names the record that the operator saw, and is refused once that record has changed: by an attempt, or by another
/// decision.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Decision {
    /// The key.
    pub key: Key,
    /// The record that the operator saw.
    pub seen: Revision,
    /// What is to become of the record.
    pub action: Action,
    /// Who decides, for the record; empty if nobody says. At most [`MAX_BY_BYTES`](super::Trail::MAX_BY_BYTES) are kept.
    pub by: Box<str>,
    /// Why, for the record; empty if nobody says. At most [`MAX_REASON_BYTES`](super::Trail::MAX_REASON_BYTES) are kept.
    pub reason: Box<str>,
}

/// What is to become of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Action {
    /// The next delivery runs again. The record is released, with no attempt counted against `max_attempts`. Refused if the
    /// operation has finished.
    Reopen,
    /// Gives up what a finished operation recorded, and lets the next delivery run again: the record is released, with no
    /// attempt counted against `max_attempts`. Refused unless the operation has finished.
    Discard,
    /// The operation has ended like this. A recorded result is never replaced, only a missing one is supplied.
    Resolve(Finish),
    /// The operation has ended like this, and not as recorded. No delivery runs in between. Refused unless the operation has
    /// finished.
    Replace(Finish),
    /// The lease ends now, live or not, and its owner can't write any more. What follows is what follows a crash: under
    /// `on_crash = retry` the next delivery runs, under `fail` the key is interrupted if the body has begun.
    BreakLease,
    /// The record is removed, result included. The next delivery runs as the first one.
    Forget,
}

impl Action {
    /// The name of the action in errors, logs and commands: `reopen`, `discard`, `resolve`, `replace`, `break_lease` or `forget`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Reopen => "reopen",
            Self::Discard => "discard",
            Self::Resolve(_) => "resolve",
            Self::Replace(_) => "replace",
            Self::BreakLease => "break_lease",
            Self::Forget => "forget",
        }
    }

    /// The end that the action records; `None` unless it resolves or replaces.
    pub const fn finish(&self) -> Option<&Finish> {
        match self {
            Self::Resolve(finish) | Self::Replace(finish) => Some(finish),
            _ => None,
        }
    }

    /// The same action with this end, for a wrapper that keeps results in another form. An action without an end stays as
    /// it is.
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
    /// The decision to do this with the record of `key`, which the operator saw like this: an
    /// [`Inspection`](crate::store::Inspection), or the [`Revision`] of one.
    pub fn new(key: &Key, seen: impl Into<Revision>, action: Action) -> Self {
        Self { key: key.clone(), seen: seen.into(), action, by: Box::default(), reason: Box::default() }
    }

    /// Sets [`by`](Self::by).
    #[must_use]
    pub fn by(self, by: impl Into<Box<str>>) -> Self {
        Self { by: by.into(), ..self }
    }

    /// Sets [`reason`](Self::reason).
    #[must_use]
    pub fn reason(self, reason: impl Into<Box<str>>) -> Self {
        Self { reason: reason.into(), ..self }
    }

    /// To let the next delivery run again.
    pub fn reopen(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::Reopen)
    }

    /// To give up the recorded result, and let the next delivery run again.
    pub fn discard(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::Discard)
    }

    /// To end the operation like this.
    pub fn resolve(key: &Key, seen: impl Into<Revision>, finish: Finish) -> Self {
        Self::new(key, seen, Action::Resolve(finish))
    }

    /// To end the operation like this instead of as recorded.
    pub fn replace(key: &Key, seen: impl Into<Revision>, finish: Finish) -> Self {
        Self::new(key, seen, Action::Replace(finish))
    }

    /// To end the lease.
    pub fn break_lease(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::BreakLease)
    }

    /// To remove the record.
    pub fn forget(key: &Key, seen: impl Into<Revision>) -> Self {
        Self::new(key, seen, Action::Forget)
    }

    /// The result that is to be recorded, if there is one.
    pub fn result(&self) -> Option<&StoredResult> {
        self.action.finish().map(Finish::result)
    }

    /// Whether the decision ends a lease that holds. Every other decision, and one about a lease that had lapsed, is refused
    /// if the lease holds when the record is written.
    pub fn ends_live_lease(&self) -> bool {
        self.action == Action::BreakLease && self.seen.standing == Standing::Running
    }
}

/// The answer to a [`Decision`].
#[must_use]
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Decided {
    /// The record is as decided, by this call or by an earlier one.
    Applied,
    /// Refused: an attempt is running. Nothing was changed.
    #[non_exhaustive]
    LiveLease {
        /// The time until its lease lapses unless it is renewed; never zero.
        lapses_in: Duration,
    },
    /// Refused: the latest attempt has another number. Nothing was changed.
    #[non_exhaustive]
    OtherAttempt {
        /// The number of the latest attempt.
        latest: u32,
    },
    /// Refused: the attempt is the one that the operator saw, and its record has changed since. Nothing was changed.
    #[non_exhaustive]
    Changed {
        /// Where the operation stands.
        standing: Standing,
        /// The person who decided meanwhile, if one did and gave a name.
        decided_by: Option<Box<str>>,
    },
    /// Refused: the operation has finished, and what is recorded stands. Nothing was changed.
    Finished,
    /// Refused: the operation has not finished, so no result can be discarded or replaced. Nothing was changed.
    Unfinished,
    /// There is no record. Nothing was changed.
    NoRecord,
    /// Refused: the record can't be read, so it can only be forgotten. Nothing was changed.
    Damaged,
}

impl Decided {
    /// [`LiveLease`](Self::LiveLease).
    pub const fn live_lease(lapses_in: Duration) -> Self {
        Self::LiveLease { lapses_in }
    }

    /// [`OtherAttempt`](Self::OtherAttempt).
    pub const fn other_attempt(latest: u32) -> Self {
        Self::OtherAttempt { latest }
    }

    /// [`Changed`](Self::Changed), by nobody who is known by name.
    pub const fn changed(standing: Standing) -> Self {
        Self::Changed { standing, decided_by: None }
    }
}

impl From<Decided> for Verdict {
    fn from(decided: Decided) -> Self {
        match decided {
            Decided::Applied => Self::Applied,
            _ => Self::Refused,
        }
    }
}

/// What a [`Decision`] does with the record that it found; see [`Record::decide`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ruling {
    /// The record stays as it is, and this is the answer.
    Answer(Decided),
    /// The record may be replaced by this one, if it is still the record that was found (owner, attempt and state) and its
    /// lease was not renewed, unless the decision [ends a live lease](Decision::ends_live_lease). It is never pending, and its
    /// retention stays as it was.
    Replace(Record),
    /// The record may be removed, under the same condition. One that can't be read: if all that is stored is as it was found.
    Remove,
}

impl Inspection {
    /// Decides what `decision` does with what was found: [`Record::decide`] for a record that can be read. One that can't be is
    /// removed by a decision to forget it that names its very [revision](Self::revision), and is left alone by every other one.
    ///
    /// To remove a damaged record, a store compares all that is stored of it, in place of owner, attempt and state.
    pub fn decide(&self, decision: &Decision) -> Ruling {
        let standing = self.standing();
        match &decision.action {
            _ if standing != Standing::Damaged => self.record.decide(decision, self.lapses_in.unwrap_or_default()),
            _ if decision.seen != self.revision() => Ruling::Answer(Decided::changed(standing)),
            Action::Forget => Ruling::Remove,
            // The lease can't be read and its holder can't write: ending it would be to forget the record.
            _ => Ruling::Answer(Decided::Damaged),
        }
    }
}

impl Record {
    /// Decides what `decision` does with this record, whose lease (if it is pending) lapses in `lapses_in`; zero means
    /// that it has lapsed. Pure: every store calls this one function, and makes the decision atomic in its own way.
    ///
    /// Every decision gives the record another owner token. So a store that compares owner, attempt and state lets one of
    /// two decisions about the same record through, and no late write of the attempt is taken for a copy of the decision.
    ///
    /// A decision that the same person repeats finds the record that it made, and writes it again: it is confirmed like a first
    /// one.
    pub fn decide(&self, decision: &Decision, lapses_in: Duration) -> Ruling {
        let Decision { seen, action, by, reason, .. } = decision;
        let standing = self.standing(lapses_in);
        if seen.standing == Standing::Damaged {
            return Ruling::Answer(Decided::changed(standing));
        }
        if self.attempt != seen.attempt {
            return Ruling::Answer(Decided::OtherAttempt { latest: self.attempt });
        }
        if self.is_made_by(decision) {
            return Ruling::Replace(self.clone());
        }
        if standing == Standing::Running && *action != Action::BreakLease {
            return Ruling::Answer(Decided::LiveLease { lapses_in });
        }
        // A lease that has lapsed since the operator saw it hold is over, which is all that breaking it asks for.
        let is_seen = standing == seen.standing || (decision.ends_live_lease() && standing == Standing::Lapsed);
        if self.owner.tag() != seen.owner || !is_seen {
            let other = self.owner.tag() != seen.owner;
            let decided_by = self.trail.decided_by().filter(|_| other).map(Box::from);
            return Ruling::Answer(Decided::Changed { standing, decided_by });
        }
        let decided = |state| {
            let (owner, trail) = (self.owner.succeeded(), self.trail.with_decision(by, reason));
            let (attempt, attempts_used, fingerprint) = (self.attempt, self.attempts_used, self.fingerprint);
            Self { owner, attempt, attempts_used, fingerprint, state, trail }
        };
        let released = || Ruling::Replace(Self { attempts_used: 0, ..decided(State::Released) });
        match (action, &self.state) {
            (Action::Forget, _) => Ruling::Remove,
            (Action::Discard, State::Completed(_) | State::Failed(_)) => released(),
            (Action::Replace(finish), State::Completed(_) | State::Failed(_)) => {
                Ruling::Replace(decided(finish.state()))
            }
            (Action::Discard | Action::Replace(_), _) => Ruling::Answer(Decided::Unfinished),
            (Action::Resolve(finish), State::Completed(recorded) | State::Failed(recorded)) => {
                // No duplicate can have been given another result than the one that is missing.
                let is_missing = matches!(recorded, StoredResult::TooLarge { .. } | StoredResult::Unencodable)
                    && matches!(finish.result(), StoredResult::Encoded { .. })
                    && matches!(finish, Finish::Completed(_)) == matches!(self.state, State::Completed(_));
                match is_missing || self.state == finish.state() {
                    true => Ruling::Replace(decided(finish.state())),
                    false => Ruling::Answer(Decided::Finished),
                }
            }
            (_, State::Completed(_) | State::Failed(_)) => Ruling::Answer(Decided::Finished),
            (Action::Resolve(finish), _) => Ruling::Replace(decided(finish.state())),
            (Action::Reopen, _) => released(),
            (Action::BreakLease, State::Pending { on_crash: OnCrash::Fail, begun: true, .. } | State::Interrupted) => {
                Ruling::Replace(decided(State::Interrupted))
            }
            // Under `fail` a body begins with its mark only, so there was none to count.
            (Action::BreakLease, State::Pending { on_crash: OnCrash::Fail, .. }) => {
                let attempts_used = self.attempts_used.saturating_sub(1);
                Ruling::Replace(Self { attempts_used, ..decided(State::Released) })
            }
            (Action::BreakLease, _) => Ruling::Replace(decided(State::Released)),
        }
    }

    /// Whether this is the record that `decision` made, by the same person: it follows the record that they saw.
    fn is_made_by(&self, decision: &Decision) -> bool {
        let is_its_end = match &decision.action {
            Action::Reopen | Action::Discard => self.state == State::Released && self.attempts_used == 0,
            Action::Resolve(finish) | Action::Replace(finish) => self.state == finish.state(),
            Action::BreakLease => matches!(self.state, State::Released | State::Interrupted),
            Action::Forget => false,
        };
        is_its_end
            && self.owner.preceded().tag() == decision.seen.owner
            // As a record keeps the name.
            && Trail::NONE.with_decision(&decision.by, "").decided_by() == self.trail.decided_by()
    }

    /// Where the operation stands, if the lease of a pending record lapses in `lapses_in`.
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
        let others = [Action::Reopen, Action::Discard, Action::BreakLease, Action::Forget];
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
    fn a_decision_that_is_repeated_changes_nothing() {
        each(|record, decision, _, ruling| {
            if let Ruling::Replace(with) = ruling {
                let again = with.decide(decision, Duration::ZERO);
                assert_eq!(again, Ruling::Replace(with.clone()), "{record:?} {decision:?}");
                // Another person's is a decision of its own, about a record that is gone.
                let other = with.decide(&decision.clone().by("bob"), Duration::ZERO);
                let (standing, decided_by) = (with.standing(Duration::ZERO), Some("alice".into()));
                let expected = Ruling::Answer(Decided::Changed { standing, decided_by });
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
                    // A record of the same attempt in another state has been written since.
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
    fn a_damaged_record_is_only_forgotten_and_only_as_it_was_seen() {
        let key = Key::new("test", "k").unwrap();
        let damaged = |stored: &[&str]| Inspection::damaged("damaged", stored);
        let found = damaged(&["a", "b"]);
        assert_eq!((found.attempt(), found.standing(), found.revision().attempt()), (0, Standing::Damaged, 0));
        for action in actions() {
            let expected = match action {
                Action::Forget => Ruling::Remove,
                _ => Ruling::Answer(Decided::Damaged),
            };
            assert_eq!(found.decide(&Decision::new(&key, &found, action.clone())), expected, "{action:?}");
            let changed = |standing| Ruling::Answer(Decided::changed(standing));
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
    fn only_a_broken_lease_ends_a_live_one() {
        each(|record, decision, lapses_in, ruling| {
            let refused = ruling == Ruling::Answer(Decided::LiveLease { lapses_in });
            let live = record.is_pending() && !lapses_in.is_zero();
            assert_eq!(refused, live && decision.action != Action::BreakLease, "{record:?} {decision:?}");
            // A lease that was renewed since it was seen to have lapsed is not broken either.
            let lapsed = Decision { seen: seen(record, Duration::ZERO), ..decision.clone() };
            if live {
                assert!(matches!(record.decide(&lapsed, lapses_in), Ruling::Answer(_)), "{record:?} {lapsed:?}");
            }
        });
    }

    #[test]
    fn only_a_word_of_its_own_gives_up_what_is_recorded() {
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
    fn an_attempt_that_was_decided_about_can_not_write_any_more() {
        each(|record, decision, _, ruling| {
            let Ruling::Replace(with) = ruling else { return };
            let request = ReserveRequest::new(decision.key.clone(), record.owner, LIVE, LIVE);
            let lease = Lease::new(&request, record.attempt);
            assert!(!with.is_pending());
            assert_eq!(with.ended(&lease, true), Verdict::Refused, "{record:?} {decision:?}");
        });
    }

    #[test]
    fn another_attempt_is_refused_by_its_number() {
        each(|record, decision, lapses_in, _| {
            for attempt in [0, 2, 4] {
                let decision = Decision { seen: decision.seen.with_attempt(attempt), ..decision.clone() };
                let expected = Ruling::Answer(Decided::OtherAttempt { latest: 3 });
                assert_eq!(record.decide(&decision, lapses_in), expected);
            }
        });
    }
}
