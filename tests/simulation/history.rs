//! History of a world: the requests of processes to the store, and the answers.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::{Range, RangeBounds};
use std::time::Duration;

use idem_runtime::clock::Clock;
use idem_runtime::key::Fingerprint;
use idem_runtime::record::{Record, Ruling, State, StoredResult};
use idem_runtime::store::{
    Action, Decision, Finish, Inspection, Journal, Lease, OwnerToken, Release, Reservation, ReserveRequest, Revision,
    StepState, Verdict,
};
use idem_runtime::testing::SimulatedClock;
use idem_runtime::{Key, OnCrash, StoreErrorKind};
use idem_tests::decided;

use crate::reference::{Answer, Ask, Entry, NOBODY, Phase, Sight, Unsent};

/// Operation on one key. A renewal of several leases is several operations.
#[derive(Clone, Debug)]
pub(crate) enum OperationArgs {
    Reserve(Ask),
    /// The second field is the number of the attempt.
    Begin(Ask, u32),
    Renew(Ask, u32),
    /// The other fields are the number of the attempt and the size of the journal.
    Append(Ask, u32, usize),
    /// The other fields are the number of the attempt, its end without messages, and the messages.
    Finish(Ask, u32, Finish, Vec<Unsent>),
    Release(Ask, Release),
    Decide {
        sight: Sight,
        action: Action,
        by: String,
    },
    Inspect,
}

/// Answer to an operation.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum OperationAnswer {
    Reservation(Answer),
    Write(Verdict),
    Inspection(Option<Entry>),
}

/// End of an operation, as its caller sees it.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum End {
    /// The caller got no answer: the operation may take effect at any time after its invocation, or never.
    Unanswered,
    /// The caller got an error of this kind, which says that the operation had no effect.
    NothingDone(StoreErrorKind),
    /// The caller got this answer; `at` is the reading of the store's clock when the store executed the operation.
    Answered { said: OperationAnswer, at: u64 },
}

#[derive(Clone, Debug)]
pub(crate) struct Op {
    pub(crate) process: usize,
    pub(crate) key: usize,
    pub(crate) asked: OperationArgs,
    /// Number of the invocation in the order of all events; `responded` is the number of the answer's arrival.
    pub(crate) invoked: u64,
    pub(crate) responded: Option<u64>,
    pub(crate) invoked_at: u64,
    /// Event at which the store executed the operation, and the reading of the store's clock; `None` if the store has
    /// not executed the operation.
    pub(crate) landed: Option<(u64, u64)>,
    /// True if the store applied an operator's decision or a mark, whether or not the answer arrived.
    pub(crate) applied: bool,
    /// Number of the attempt that the store granted to a reservation, whether or not the answer arrived.
    pub(crate) granted: Option<u32>,
    /// True if the store granted the attempt to ask a reconciler about an effect in doubt.
    pub(crate) in_doubt: bool,
    pub(crate) end: End,
}

/// All operations of the store. Keys, owners and fingerprints are numbered in the order in which they appear, so that
/// two runs of a seed have the same text. Times are nanoseconds of the clock that all processes and the store share.
#[derive(Debug)]
pub(crate) struct History {
    clock: SimulatedClock,
    keys: Vec<Key>,
    owners: Vec<OwnerToken>,
    fingerprints: Vec<Fingerprint>,
    pub(crate) ops: Vec<Op>,
    events: u64,
    /// Times at which the store executed operations.
    pub(crate) ticks: BTreeSet<u64>,
    /// Other events for the transcript, each with the index of the preceding operation.
    notes: Vec<(usize, u64, String)>,
}

/// Parts a state from the messages that are stored with its result.
pub(crate) fn parted(state: &State) -> (State, Vec<Unsent>) {
    let record = Record::new(OwnerToken::from_bytes([0; OwnerToken::BYTES]), 1, state.clone());
    let found = Inspection::new(record, Duration::ZERO, None);
    let Some(messages) = found.unsent_messages() else { return (state.clone(), Vec::new()) };
    let unsent = messages.messages().iter().map(|it| {
        let id = it.message().id().to_owned();
        Unsent { id, refusals: it.refusals(), set_aside: it.is_set_aside() }
    });
    (without_messages(found).state, unsent.collect())
}

/// Parts the end of an attempt from its messages.
pub(crate) fn parted_finish(finish: &Finish) -> (Finish, Vec<Unsent>) {
    let of = match finish {
        Finish::Completed(_) => State::Completed,
        Finish::Failed(_) => State::Failed,
    };
    match parted(&of(finish.result().clone())) {
        (State::Completed(result), unsent) => (Finish::Completed(result), unsent),
        (State::Failed(result), unsent) => (Finish::Failed(result), unsent),
        (other, _) => unreachable!("{other:?}"),
    }
}

/// Returns the record of `found` without its messages.
pub(crate) fn without_messages(found: Inspection) -> Record {
    match found.decide(&Decision::mark_sent(&Key::new("history", "any").expect("valid"), &found, None)) {
        Ruling::Replace(record) => record,
        _ => found.record,
    }
}

pub(crate) fn nanos(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn number<T: PartialEq + Clone>(known: &mut Vec<T>, value: &T) -> usize {
    known.iter().position(|it| it == value).unwrap_or_else(|| {
        known.push(value.clone());
        known.len() - 1
    })
}

impl History {
    pub(crate) fn new(clock: SimulatedClock) -> Self {
        Self {
            clock,
            keys: Vec::new(),
            owners: Vec::new(),
            fingerprints: Vec::new(),
            ops: Vec::new(),
            events: 0,
            ticks: BTreeSet::new(),
            notes: Vec::new(),
        }
    }

    pub(crate) fn now(&self) -> u64 {
        nanos(self.clock.now().since_origin())
    }

    /// Returns the next number in the order of all events.
    pub(crate) fn event(&mut self) -> u64 {
        self.events += 1;
        self.events
    }

    pub(crate) fn key(&mut self, key: &Key) -> usize {
        number(&mut self.keys, key)
    }

    pub(crate) fn keys(&self) -> usize {
        self.keys.len()
    }

    fn mark(&mut self, fingerprint: Option<Fingerprint>) -> Option<u8> {
        fingerprint.map(|it| u8::try_from(number(&mut self.fingerprints, &it)).expect("few fingerprints"))
    }

    pub(crate) fn note(&mut self, text: String) {
        let now = self.now();
        self.notes.push((self.ops.len(), now, text));
    }

    pub(crate) fn reserve(&mut self, request: &ReserveRequest) -> OperationArgs {
        OperationArgs::Reserve(Ask {
            key: self.key(&request.key),
            owner: number(&mut self.owners, &request.owner),
            lease: nanos(request.lease),
            ttl: nanos(request.ttl),
            fingerprint: self.mark(request.fingerprint),
            on_crash: request.on_crash,
            max_attempts: request.max_attempts.map(std::num::NonZero::get),
            max_reconciliations: request.max_reconciliations.map(std::num::NonZero::get),
        })
    }

    pub(crate) fn ask(&mut self, lease: &Lease) -> Ask {
        Ask {
            key: self.key(&lease.key),
            owner: number(&mut self.owners, &lease.owner),
            lease: nanos(lease.duration),
            ttl: nanos(lease.ttl),
            fingerprint: self.mark(lease.fingerprint),
            on_crash: lease.on_crash,
            max_attempts: None,
            max_reconciliations: None,
        }
    }

    /// Enters in the history that `process` requests an operation. Returns the index of the operation.
    pub(crate) fn invoke(&mut self, process: usize, key: &Key, asked: OperationArgs) -> usize {
        let key = self.key(key);
        let (invoked, invoked_at) = (self.event(), self.now());
        self.ops.push(Op {
            process,
            key,
            asked,
            invoked,
            responded: None,
            invoked_at,
            landed: None,
            applied: false,
            granted: None,
            in_doubt: false,
            end: End::Unanswered,
        });
        self.ops.len() - 1
    }

    pub(crate) fn respond(&mut self, op: usize, end: End) {
        let event = self.event();
        let op = &mut self.ops[op];
        op.responded = (end != End::Unanswered).then_some(event);
        op.end = end;
    }

    /// Enters in the history that an operation takes effect at this time.
    pub(crate) fn tick(&mut self) -> u64 {
        let now = self.now();
        self.ticks.insert(now);
        now
    }

    /// Enters in the history that the store executes these operations at this time.
    pub(crate) fn land(&mut self, ops: &[usize]) -> u64 {
        let (event, at) = (self.event(), self.tick());
        for op in ops {
            self.ops[*op].landed = Some((event, at));
        }
        at
    }

    /// Reports whether a decision that reopens `key` took effect at one of `events`.
    pub(crate) fn was_reopened(&self, key: usize, events: impl RangeBounds<u64>) -> bool {
        let landed = |op: &Op| op.landed.is_some_and(|(event, _)| events.contains(&event));
        let reopens = |op: &Op| match &op.asked {
            OperationArgs::Decide { action, .. } => action.finish().is_none() && !matches!(action, Action::MarkSent(_)),
            _ => false,
        };
        self.ops.iter().any(|op| op.key == key && reopens(op) && landed(op))
    }

    /// Reports whether an operator had the record of `key` forgotten, so that its attempts count from 1 again.
    pub(crate) fn was_forgotten(&self, key: usize) -> bool {
        self.ops.iter().any(|op| {
            op.key == key
                && op.landed.is_some()
                && matches!(&op.asked, OperationArgs::Decide { action: Action::Forget, .. })
        })
    }

    /// Events of the applied decisions after which a body of the step `step` of `key` may begin, although an earlier
    /// body may have had its effect.
    pub(crate) fn permits(&self, key: usize, step: &str) -> Vec<u64> {
        let has_ended = |journal: &Journal| {
            let steps = journal.steps().expect("a journal of this release");
            steps.iter().any(|it| it.name() == step && it.state() == StepState::Ended)
        };
        let permits = |op: &&Op| match &op.asked {
            OperationArgs::Decide { action: Action::ReopenWith(journal), .. } => {
                !journal.as_ref().is_some_and(has_ended)
            }
            OperationArgs::Decide { action: Action::Discard, .. } => true,
            _ => false,
        };
        let applied = self.ops.iter().filter(|op| op.key == key && op.applied).filter(permits);
        applied.filter_map(|op| op.landed).map(|(event, _)| event).collect()
    }

    /// Reports whether an operator broke a lease of `key`.
    pub(crate) fn was_broken_ever(&self, key: usize) -> bool {
        let breaks = |op: &Op| matches!(&op.asked, OperationArgs::Decide { action: Action::BreakLease, .. });
        self.ops.iter().any(|op| op.key == key && op.landed.is_some() && breaks(op))
    }

    /// Results that operators gave to attempts of `key`: event, number of the attempt, and result.
    pub(crate) fn resolved(&self, key: usize) -> Vec<(u64, u32, Finish)> {
        let resolved = self.ops.iter().filter(|op| op.key == key && op.applied);
        let given = resolved.filter_map(|op| match (&op.asked, op.landed) {
            (OperationArgs::Decide { sight, action, .. }, Some((event, _))) => {
                Some((event, sight.attempt, action.finish()?.clone()))
            }
            _ => None,
        });
        given.collect()
    }

    /// Reports whether an operator broke the lease of attempt `number` of `key` before the event `before`.
    pub(crate) fn was_broken(&self, key: usize, number: u32, before: u64) -> bool {
        let breaks = |op: &Op| match &op.asked {
            OperationArgs::Decide { sight, action, .. } => *action == Action::BreakLease && sight.attempt == number,
            _ => false,
        };
        let landed = |op: &Op| op.applied && op.landed.is_some_and(|(event, _)| event < before);
        self.ops.iter().any(|op| op.key == key && breaks(op) && landed(op))
    }

    pub(crate) fn reservation(&mut self, reservation: &Reservation) -> OperationAnswer {
        OperationAnswer::Reservation(match reservation {
            Reservation::Granted { lease, takeover, in_doubt, .. } => Answer::Reserved {
                attempt: lease.attempt,
                starts: lease.attempts_used,
                fingerprint: self.mark(lease.fingerprint),
                takeover: *takeover,
                in_doubt: *in_doubt,
            },
            Reservation::InProgress { attempt, lapses_in, .. } => {
                Answer::Pending { attempt: *attempt, lapses_in: nanos(*lapses_in) }
            }
            Reservation::Finished { record, .. } => Answer::Finished(self.entry(record, 0, 0)),
            Reservation::FingerprintMismatch { attempt } => Answer::Mismatch { attempt: *attempt },
            Reservation::Interrupted { attempt } => Answer::Interrupted { attempt: *attempt },
            Reservation::AttemptsExhausted { attempts } => Answer::Exhausted { attempts: *attempts },
            Reservation::Released { attempt } => Answer::Released { attempt: *attempt },
            other => panic!("an unknown answer: {other:?}"),
        })
    }

    pub(crate) fn inspection(&mut self, inspection: Option<&Inspection>) -> OperationAnswer {
        let now = self.now();
        OperationAnswer::Inspection(inspection.map(|found| {
            let lapses_at = now + found.lapses_in.map_or(0, nanos);
            self.entry(&found.record, lapses_at, now + nanos(found.expires_in))
        }))
    }

    fn entry(&mut self, record: &Record, lapses_at: u64, forgotten_at: u64) -> Entry {
        let (state, unsent) = parted(&record.state);
        let phase = match &state {
            State::Pending { lease, ttl, on_crash, begun } => {
                let [lease, ttl] = [lease, ttl].map(|time| nanos(*time));
                Phase::Pending { lease, ttl, on_crash: *on_crash, begun: *begun, lapses_at }
            }
            State::Released => Phase::Released,
            State::Interrupted => Phase::Interrupted,
            State::Completed(payload) => Phase::Finished(Finish::Completed(payload.clone())),
            State::Failed(payload) => Phase::Finished(Finish::Failed(payload.clone())),
            other => unreachable!("{other:?}"),
        };
        let (owner, decisions) = self.descent(|token| *token == record.owner);
        let by =
            if decisions > 0 { record.provenance.decided_by().unwrap_or_default().to_owned() } else { String::new() };
        Entry {
            owner,
            decisions,
            by,
            attempt: record.attempt,
            starts: record.attempts_used,
            fingerprint: self.mark(record.fingerprint),
            asked: record.provenance.reconciliations(),
            phase,
            forgotten_at,
            journal: record.journal.as_ref().map_or(0, |journal| journal.bytes().len()),
            unsent,
        }
    }

    /// Converts `seen`, the revision of a record that an operator has inspected, to the type that the reference uses.
    pub(crate) fn sight(&self, seen: &Revision) -> Sight {
        let text = seen.to_string();
        let tag = text.split('-').nth(2).expect("a mark");
        let (owner, decisions) = self.descent(|token| format!("{token:?}").trim_end_matches('…') == tag);
        let journal = usize::try_from(seen.journal_bytes()).expect("a small journal");
        Sight { owner, decisions, attempt: seen.attempt(), standing: seen.standing(), journal }
    }

    /// Returns an owner and a number of operators' decisions: this number of decisions turns the owner's token into a
    /// token for which `is_meant` is true.
    fn descent(&self, is_meant: impl Fn(&OwnerToken) -> bool) -> (usize, u32) {
        let owners = self.owners.iter().enumerate();
        let mut all =
            owners.flat_map(|(at, owner)| (0..32).map(move |decisions| (at, decisions, decided(*owner, decisions))));
        all.find(|(.., token)| is_meant(token)).map_or((NOBODY, 0), |(owner, decisions, _)| (owner, decisions))
    }

    /// Reports whether, during these events, attempt `attempt` of `key` sent a renewal and got the answer that its
    /// lease is lost.
    pub(crate) fn was_refused(&self, key: usize, attempt: u32, during: &Range<u64>) -> bool {
        let owner = self.owner_of(key, attempt);
        self.ops.iter().filter(|op| op.key == key).any(|op| {
            let refused = matches!(op.end, End::Answered { said: OperationAnswer::Write(Verdict::Refused), .. });
            let heard = op.invoked > during.start && op.responded.is_some_and(|heard| heard < during.end);
            let renews = match &op.asked {
                OperationArgs::Renew(ask, _) | OperationArgs::Append(ask, ..) => Some(ask.owner) == owner,
                _ => false,
            };
            refused && heard && renews
        })
    }

    /// Reports whether a finish or a release of attempt `attempt` of `key` was requested during these events.
    pub(crate) fn was_ended(&self, key: usize, attempt: u32, during: &Range<u64>) -> bool {
        let owner = self.owner_of(key, attempt);
        self.ops.iter().filter(|op| op.key == key && during.contains(&op.invoked)).any(|op| match &op.asked {
            OperationArgs::Finish(ask, ..) | OperationArgs::Release(ask, _) => Some(ask.owner) == owner,
            _ => false,
        })
    }

    /// Reports whether the end of this attempt was requested before.
    pub(crate) fn has_been_finished(&mut self, lease: &Lease) -> bool {
        let owner = self.ask(lease).owner;
        self.ops.iter().any(|op| matches!(&op.asked, OperationArgs::Finish(ask, ..) if ask.owner == owner))
    }

    /// Completions of `key` without their result that were requested before the store had refused the result often
    /// enough. The store has refused a result often enough if it said that the result is too large; or if it refused
    /// the result for half a lease, and after each of two renewals.
    pub(crate) fn left_out_early(&self, key: usize) -> impl Iterator<Item = &Op> {
        self.ops.iter().filter(move |op| op.key == key).filter(move |op| {
            let OperationArgs::Finish(ask, attempt, Finish::Completed(StoredResult::TooLarge { .. }), _) = &op.asked
            else {
                return false;
            };
            let tries = self.ops.iter().filter(|it| match &it.asked {
                OperationArgs::Finish(by, _, finish, _) => {
                    let is_earlier = by.owner == ask.owner && it.invoked < op.invoked;
                    is_earlier && matches!(finish.result(), StoredResult::Encoded { .. })
                }
                _ => false,
            });
            // The handler's own limit, or its codec, left out a result that was never sent.
            let Some(first) = tries.clone().next() else { return false };
            let is_too_large = tries.clone().any(|it| it.end == End::NothingDone(StoreErrorKind::TooLarge));
            let (mut refusals, mut counted) = (0, first.invoked_at);
            for it in tries {
                if let Some(renewed_at) = self.confirmed_before(key, *attempt, it.invoked).filter(|at| *at > counted) {
                    (refusals, counted) = (refusals + 1, renewed_at);
                }
            }
            let is_often_enough = refusals >= 2 && op.invoked_at - first.invoked_at >= ask.lease / 2;
            !is_too_large && !is_often_enough
        })
    }

    /// Process to which the store granted attempt `attempt` of `key`, and the `on_crash` of its reservation.
    pub(crate) fn holder(&self, key: usize, attempt: u32) -> Option<(usize, OnCrash)> {
        self.ops.iter().rev().filter(|op| op.key == key && op.granted == Some(attempt)).find_map(|op| match &op.asked {
            OperationArgs::Reserve(ask) => Some((op.process, ask.on_crash)),
            _ => None,
        })
    }

    /// Returns whether the store granted attempt `attempt` of `key` to ask a reconciler about an effect in doubt.
    pub(crate) fn is_in_doubt(&self, key: usize, attempt: u32) -> bool {
        // A repeated reservation may see the mark of its own body, so the first one counts.
        let granted = self.ops.iter().filter(|op| op.key == key && op.granted == Some(attempt));
        granted.min_by_key(|op| op.landed).is_some_and(|op| op.in_doubt)
    }

    /// Requests that marked attempt `attempt` of `key` as begun before the event `when`.
    fn marks(&self, key: usize, attempt: u32, when: u64) -> impl Iterator<Item = &Op> {
        self.ops.iter().filter(move |op| {
            let has_landed = op.applied && op.landed.is_some_and(|(event, _)| event < when);
            op.key == key && has_landed && matches!(op.asked, OperationArgs::Begin(_, it) if it == attempt)
        })
    }

    /// Reports whether the store marked attempt `attempt` of `key` as begun before the event `when`.
    pub(crate) fn is_marked(&self, key: usize, attempt: u32, when: u64) -> bool {
        self.marks(key, attempt, when).next().is_some()
    }

    /// Event and time at which the attempt after `attempt` of `key` was granted.
    pub(crate) fn taken_over_at(&self, key: usize, attempt: u32) -> Option<(u64, u64)> {
        self.ops.iter().filter(|op| op.key == key && op.granted == Some(attempt + 1)).filter_map(|op| op.landed).min()
    }

    /// Event and time of the latest answer `Interrupted` or `Exhausted` that `process` got for `key`. The answer came
    /// before the event `when`, and its reservation took effect at the time `since` or later. `None` if there is no
    /// such answer, for example because a waiting duplicate learned of the end without a reservation.
    pub(crate) fn refused_at(&self, process: usize, key: usize, since: u64, when: u64) -> Option<(u64, u64)> {
        let is_refusal = |op: &&Op| {
            let said = matches!(
                op.end,
                End::Answered {
                    said: OperationAnswer::Reservation(Answer::Interrupted { .. } | Answer::Exhausted { .. }),
                    ..
                }
            );
            let is_of_call =
                op.landed.is_some_and(|(_, at)| at >= since) && op.responded.is_some_and(|heard| heard < when);
            said && op.process == process && op.key == key && is_of_call
        };
        self.ops.iter().filter(is_refusal).max_by_key(|op| op.responded)?.landed
    }

    /// If the process of attempt `attempt` of `key` was in doubt about its mark at the event `when`, returns the
    /// process and the times of its mark and of its last request. In doubt means: the mark had taken effect, and the
    /// last request (a mark or a clean-up) had no answer.
    pub(crate) fn doubts_its_mark(&self, key: usize, attempt: u32, when: u64) -> Option<(usize, [u64; 2])> {
        let first = self.marks(key, attempt, when).next()?;
        let OperationArgs::Begin(mark, _) = &first.asked else { return None };
        let is_about_it = |op: &&Op| match &op.asked {
            OperationArgs::Reserve(ask) | OperationArgs::Begin(ask, _) | OperationArgs::Release(ask, _) => {
                ask.owner == mark.owner
            }
            _ => false,
        };
        let of_it = self.ops.iter().filter(|op| op.key == key && op.invoked < when).filter(is_about_it);
        let last = of_it.last()?;
        let was_heard = last.responded.is_some_and(|heard| heard < when);
        let has_answer = was_heard && matches!(last.end, End::Answered { .. });
        (!has_answer).then_some((last.process, [first.invoked_at, last.invoked_at]))
    }

    /// Time of the latest request that was confirmed and renewed the lease of attempt `attempt` of `key`.
    pub(crate) fn confirmed_at(&self, key: usize, attempt: u32) -> Option<u64> {
        self.confirmed_before(key, attempt, u64::MAX)
    }

    /// Time of the latest request that renewed the lease of attempt `attempt` of `key`, and was confirmed before the
    /// event `when`.
    fn confirmed_before(&self, key: usize, attempt: u32, when: u64) -> Option<u64> {
        let confirms = |op: &&Op| match (&op.asked, &op.end) {
            (
                OperationArgs::Begin(_, it) | OperationArgs::Renew(_, it) | OperationArgs::Append(_, it, _),
                End::Answered { said, .. },
            ) => *it == attempt && *said == OperationAnswer::Write(Verdict::Applied),
            (OperationArgs::Reserve(_), End::Answered { .. }) => op.granted == Some(attempt),
            _ => false,
        };
        let heard = |op: &&Op| op.responded.is_some_and(|heard| heard < when);
        self.ops.iter().filter(|op| op.key == key).filter(confirms).filter(heard).map(|op| op.invoked_at).max()
    }

    /// Time at which the first release of attempt `attempt` of `key` took effect.
    pub(crate) fn released_at(&self, key: usize, attempt: u32) -> Option<u64> {
        let owner =
            self.ops.iter().filter(|op| op.key == key && op.granted == Some(attempt)).find_map(|op| match &op.asked {
                OperationArgs::Reserve(ask) => Some(ask.owner),
                _ => None,
            });
        let ends = |op: &&Op| matches!(&op.asked, OperationArgs::Release(ask, _) if Some(ask.owner) == owner);
        self.ops.iter().filter(|op| op.key == key).filter(ends).filter_map(|op| op.landed).map(|(_, at)| at).min()
    }

    /// Number of the latest attempt of `key` that was granted.
    pub(crate) fn latest(&self, key: usize) -> u32 {
        self.ops.iter().filter(|op| op.key == key).filter_map(|op| op.granted).max().unwrap_or_default()
    }

    /// Key with the number `key`.
    pub(crate) fn key_of(&self, key: usize) -> Key {
        self.keys[key].clone()
    }

    /// Owner that got attempt `attempt` of `key` in an answer.
    fn owner_of(&self, key: usize, attempt: u32) -> Option<usize> {
        self.ops.iter().filter(|op| op.key == key).find_map(|op| match (&op.asked, &op.end) {
            (
                OperationArgs::Reserve(ask),
                End::Answered { said: OperationAnswer::Reservation(Answer::Reserved { attempt: it, .. }), .. },
            ) if *it == attempt => Some(ask.owner),
            _ => None,
        })
    }

    /// Text of the operations on `key` and of the notes between them; without `key`, text of all operations.
    pub(crate) fn transcript(&self, key: Option<usize>) -> String {
        let mut text = String::new();
        let mut notes = self.notes.iter().peekable();
        let millis = |nanos: u64| nanos / 1_000_000;
        for n in 0..=self.ops.len() {
            while let Some((_, at, note)) = notes.next_if(|(before, ..)| *before <= n) {
                writeln!(text, "  {:>8} ms        -- {note}", millis(*at)).unwrap();
            }
            let Some(op) = self.ops.get(n).filter(|op| key.is_none_or(|key| op.key == key)) else { continue };
            let Op { process, key, asked, invoked, responded, invoked_at, landed, end, .. } = op;
            let heard = responded.map_or_else(String::new, |event| format!("..{event}"));
            let end = match end {
                End::Unanswered => match landed {
                    Some((event, at)) => format!("? (done #{event} at {} ms)", millis(*at)),
                    None => "?".to_owned(),
                },
                End::NothingDone(kind) => format!("nothing done: {kind:?}"),
                End::Answered { said, at } => format!("{said:?} at {} ms", millis(*at)),
            };
            writeln!(
                text,
                "  {:>8} ms  #{invoked}{heard} process {process} key {key} {asked:?} -> {end}",
                millis(*invoked_at)
            )
            .unwrap();
        }
        text
    }
}
