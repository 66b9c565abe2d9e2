//! What an operator decides about a record, and what becomes of it: one pure function, which every store calls.

use std::time::Duration;

use super::{Finish, Record, State, StoredResult, Verdict};
use crate::key::Key;
use crate::policy::OnCrash;

/// What an operator decides about the record of a key; see [`Store::decide`](crate::Store::decide).
///
/// It names the latest attempt that the operator has seen, and so never acts on what has moved on.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Decision {
    /// The key.
    pub key: Key,
    /// The number of the attempt that the decision is about: the latest one.
    pub attempt: u32,
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
    /// The next delivery runs again. The record is released, with no attempt counted against `max_attempts`; a recorded
    /// result is given up.
    Reopen,
    /// The operation has ended like this. A result that an attempt recorded itself is never replaced, only a missing one
    /// is supplied.
    Resolve(Finish),
    /// The lease ends now, live or not, and its owner can't write any more. What follows is what follows a crash: under
    /// `on_crash = retry` the next delivery runs, under `fail` the key is interrupted.
    BreakLease,
    /// The record is removed, result included. The next delivery runs as the first one.
    Forget,
}

impl Action {
    /// What errors, logs and commands call the action: `reopen`, `resolve`, `break_lease` or `forget`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Reopen => "reopen",
            Self::Resolve(_) => "resolve",
            Self::BreakLease => "break_lease",
            Self::Forget => "forget",
        }
    }
}

impl Decision {
    /// The decision to do this with the record of `key`, whose latest attempt is `attempt`.
    pub fn new(key: &Key, attempt: u32, action: Action) -> Self {
        Self { key: key.clone(), attempt, action, by: Box::default(), reason: Box::default() }
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
    pub fn reopen(key: &Key, attempt: u32) -> Self {
        Self::new(key, attempt, Action::Reopen)
    }

    /// To end the operation like this.
    pub fn resolve(key: &Key, attempt: u32, finish: Finish) -> Self {
        Self::new(key, attempt, Action::Resolve(finish))
    }

    /// To end the lease.
    pub fn break_lease(key: &Key, attempt: u32) -> Self {
        Self::new(key, attempt, Action::BreakLease)
    }

    /// To remove the record.
    pub fn forget(key: &Key, attempt: u32) -> Self {
        Self::new(key, attempt, Action::Forget)
    }

    /// The result that is to be recorded, if there is one.
    pub fn result(&self) -> Option<&StoredResult> {
        match &self.action {
            Action::Resolve(finish) => Some(finish.result()),
            _ => None,
        }
    }
}

/// The answer to a [`Decision`].
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
    /// Refused: the attempt has finished meanwhile, and what it recorded stands. Nothing was changed.
    Finished,
    /// There is no record. Nothing was changed.
    NoRecord,
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
    /// The record may be replaced by this one, if it is still the record that was found and its lease was not renewed. It
    /// is never pending, and its retention stays as it was.
    Replace(Record),
    /// The record may be removed, under the same condition.
    Remove,
}

impl Record {
    /// Decides what `decision` does with this record, whose lease (if it is pending) lapses in `lapses_in`; zero means
    /// that it has lapsed. Pure: every store calls this one function, and makes the decision atomic in its own way.
    ///
    /// A decision that is repeated finds what it has made, and writes it again: so it is confirmed like a first one. The record
    /// then names who repeated it.
    pub fn decide(&self, decision: &Decision, lapses_in: Duration) -> Ruling {
        match self.ruling(decision, lapses_in) {
            Ruling::Replace(with) => {
                let trail = self.trail.with_decision(&decision.by, &decision.reason);
                Ruling::Replace(Self { trail, ..with })
            }
            ruling => ruling,
        }
    }

    fn ruling(&self, decision: &Decision, lapses_in: Duration) -> Ruling {
        if self.attempt != decision.attempt {
            return Ruling::Answer(Decided::OtherAttempt { latest: self.attempt });
        }
        if self.is_pending() && !lapses_in.is_zero() && decision.action != Action::BreakLease {
            return Ruling::Answer(Decided::LiveLease { lapses_in });
        }
        // Another owner, so that a late finish of the attempt is not taken for a copy of this result.
        let resolved = |finish: &Finish| Self { owner: self.owner.succeeded(), ..self.with(finish.state()) };
        match &decision.action {
            Action::Reopen => Ruling::Replace(Self { attempts_used: 0, ..self.with(State::Released) }),
            Action::Resolve(finish) => match (&self.state, finish) {
                (State::Completed(recorded), Finish::Completed(result))
                | (State::Failed(recorded), Finish::Failed(result)) => match (recorded, result) {
                    _ if recorded == result => Ruling::Replace(self.clone()),
                    // Supplied: nobody can have been given another result.
                    (StoredResult::TooLarge { .. } | StoredResult::Unencodable, StoredResult::Encoded { .. }) => {
                        Ruling::Replace(resolved(finish))
                    }
                    _ => Ruling::Answer(Decided::Finished),
                },
                (State::Completed(_) | State::Failed(_), _) => Ruling::Answer(Decided::Finished),
                _ => Ruling::Replace(resolved(finish)),
            },
            Action::BreakLease => match &self.state {
                State::Pending { on_crash: OnCrash::Retry, .. } => Ruling::Replace(self.with(State::Released)),
                State::Pending { .. } => Ruling::Replace(self.with(State::Interrupted)),
                State::Released | State::Interrupted => Ruling::Replace(self.clone()),
                State::Completed(_) | State::Failed(_) => Ruling::Answer(Decided::Finished),
            },
            Action::Forget => Ruling::Remove,
        }
    }

    fn with(&self, state: State) -> Self {
        Self {
            owner: self.owner,
            attempt: self.attempt,
            attempts_used: self.attempts_used,
            fingerprint: self.fingerprint,
            state,
            trail: self.trail.clone(),
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
        let pending = |on_crash| State::Pending { lease: LIVE, ttl: LIVE, on_crash };
        vec![
            pending(OnCrash::Retry),
            pending(OnCrash::Fail),
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
        let resolve = |finish: fn(_) -> Finish| results.clone().into_iter().map(finish).map(Action::Resolve);
        let others = [Action::Reopen, Action::BreakLease, Action::Forget];
        others.into_iter().chain(resolve(Finish::Completed)).chain(resolve(Finish::Failed)).collect()
    }

    fn each(check: impl Fn(&Record, &Decision, Duration, Ruling)) {
        for state in states() {
            let record = Record { attempts_used: 2, ..Record::new(OwnerToken::from_bytes([7; 16]), 3, state) };
            for action in actions() {
                let decision = Decision::new(&Key::new("test", "k").unwrap(), 3, action);
                for lapses_in in [Duration::ZERO, LIVE] {
                    check(&record, &decision, lapses_in, record.decide(&decision, lapses_in));
                }
            }
        }
    }

    #[test]
    fn a_decision_that_is_repeated_changes_nothing() {
        each(|record, decision, _, ruling| {
            if let Ruling::Replace(with) = ruling {
                assert_eq!(
                    with.decide(decision, Duration::ZERO),
                    Ruling::Replace(with.clone()),
                    "{record:?} {decision:?}"
                );
            }
        });
    }

    #[test]
    fn only_a_broken_lease_ends_a_live_one() {
        each(|record, decision, lapses_in, ruling| {
            let refused = ruling == Ruling::Answer(Decided::LiveLease { lapses_in });
            let live = record.is_pending() && !lapses_in.is_zero();
            assert_eq!(refused, live && decision.action != Action::BreakLease, "{record:?} {decision:?}");
        });
    }

    #[test]
    fn a_recorded_result_is_never_replaced_by_another() {
        each(|record, decision, _, ruling| {
            if let (Some(recorded @ StoredResult::Encoded { .. }), Ruling::Replace(with)) =
                (record.state.result(), ruling)
                && let Some(result) = with.state.result()
            {
                assert_eq!(result, recorded, "{record:?} {decision:?}");
            }
        });
    }

    #[test]
    fn whoever_was_decided_about_can_not_write_any_more() {
        each(|record, decision, _, ruling| {
            let Ruling::Replace(with) = ruling else { return };
            let request = ReserveRequest::new(decision.key.clone(), record.owner, LIVE, LIVE);
            let lease = Lease::new(&request, record.attempt);
            assert!(!with.is_pending());
            if record.is_pending() {
                assert_eq!(with.ended(&lease, true), Verdict::Refused, "{record:?} {decision:?}");
            }
        });
    }

    #[test]
    fn another_attempt_is_refused_by_its_number() {
        each(|record, decision, lapses_in, _| {
            for attempt in [0, 2, 4] {
                let decision = Decision { attempt, ..decision.clone() };
                let expected = Ruling::Answer(Decided::OtherAttempt { latest: 3 });
                assert_eq!(record.decide(&decision, lapses_in), expected);
            }
        });
    }
}
