//! Judges whether a store that executes one operation at a time could have given all answers of a history.
//!
//! The search is that of Wing and Gong ("Testing and Verifying Concurrent Objects", 1993) with Lowe's memory of visited
//! configurations ("Testing for linearizability", 2017). The search picks an operation that may be the next one,
//! executes it on the sequential specification (`histories/reference.rs`), compares the answer, and continues. If no
//! order of the remaining operations fits, the search takes the operation back. Linearizability is local to a key, so
//! each key is searched alone.
//!
//! Time is part of the specification. An answer contains the reading of the store's clock, so an answered operation can
//! have happened only at that time. This rule is stricter than the usual one, which allows any time between invocation
//! and answer. The stricter rule is correct, because the clock of a simulation stands still while the store works. An
//! operation without an answer can have happened at any time after its invocation, or never. For such an operation the
//! search tries only the times at which the store executed some operation: no state changed at any other time. If the
//! store answered that an operation had no effect, the search leaves the operation out.
//!
//! Operations are tried in the order in which the store executed them, as far as this order is known. For a correct
//! history this order explains all answers, and the search never takes an operation back.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use idem_runtime::OnCrash;
use idem_runtime::record::StoredResult;
use idem_runtime::store::Finish;

use crate::history::{End, History, Op, OperationAnswer, OperationArgs};
use crate::reference::{Answer, Entry, Phase, Reference};

/// Largest number of configurations in a search. A correct history with known times needs one configuration for each
/// operation; without the times, some three million worlds needed 47 578 at most. In a history with outages many
/// operations have no answer, and a wrong history may remain undecided, which is a finding as well.
const LIMIT: usize = 1_000_000;
const LIMIT_WITH_TIMES: usize = 5_000;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    Linearizable,
    /// `explained`: number of operations in the longest order that fits. `stuck_at`: operation whose answer no longer
    /// order explains.
    NotLinearizable {
        explained: usize,
        stuck_at: String,
    },
    /// The search was given up.
    Undecided,
}

/// Judges whether the operations on `key` are linearizable.
pub(crate) fn check(history: &History, key: usize) -> Judgement {
    search(history, key, true)
}

/// Does the same as [`check`], without the times at which the store executed the operations.
pub(crate) fn check_from_outside(history: &History, key: usize) -> Judgement {
    search(history, key, false)
}

fn search(history: &History, key: usize, hints: bool) -> Judgement {
    let ops = history.ops.iter().filter(|op| op.key == key && !matches!(op.end, End::NothingDone(_))).collect();
    let ticks = history.ticks.iter().copied().collect();
    let mut search = Search { ops, ticks, hints, seen: HashSet::new(), best: 0, stuck_at: String::new() };
    let mut done = vec![false; search.ops.len()];
    match search.explain(&mut done, 0, 0, &Reference::default()) {
        Some(true) => Judgement::Linearizable,
        Some(false) => Judgement::NotLinearizable { explained: search.best, stuck_at: search.stuck_at },
        None => Judgement::Undecided,
    }
}

struct Search<'a> {
    /// Operations in the order of their invocation.
    ops: Vec<&'a Op>,
    ticks: Vec<u64>,
    /// True if the search tries the order in which the store executed the operations first.
    hints: bool,
    seen: HashSet<u64>,
    best: usize,
    stuck_at: String,
}

impl Search<'_> {
    /// Returns whether some order of the operations that are not `done` explains their answers, beginning with the
    /// state of `reference`; `None` if the search exceeds its limit. `reached`: event at which the store executed the
    /// previous operation.
    fn explain(&mut self, done: &mut [bool], depth: usize, reached: u64, reference: &Reference) -> Option<bool> {
        let open = |done: &[bool], n: usize| !done[n];
        // An operation must come after every operation that ended before it began.
        let first_end = (0..self.ops.len()).filter(|n| open(done, *n)).filter_map(|n| self.ops[n].responded).min();
        let Some(first_end) = first_end else { return Some(true) };
        // The search has visited this configuration before, and found no order that fits.
        if !self.seen.insert(digest(done, reference, self.ops[0].key)) {
            return Some(false);
        }
        if self.seen.len() > if self.hints { LIMIT_WITH_TIMES } else { LIMIT } {
            return None;
        }
        let answer = |op: &Op| match &op.end {
            End::Answered { at, .. } => Some(*at),
            _ => None,
        };
        // Time never goes back, so the answered operation with the earliest time is the next one with an answer.
        let next_at = (0..self.ops.len()).filter(|n| open(done, *n)).filter_map(|n| answer(self.ops[n])).min();
        let next_at = next_at.expect("a call that has ended was answered");
        if next_at < reference.now {
            return Some(false);
        }
        // Each candidate is tried as the next operation.
        for (n, at) in self.candidates(done, first_end, reached, reference.now, next_at) {
            let op = self.ops[n];
            let mut after = reference.clone();
            let expected = apply(&mut after, &op.asked, op.key, at);
            match &op.end {
                End::Answered { said, .. } if *said != expected => {
                    if depth >= self.best {
                        self.best = depth;
                        self.stuck_at = format!("{op:?}, expected {expected:?}");
                    }
                    continue;
                }
                End::Answered { .. } => {}
                _ => {
                    let mut unchanged = reference.clone();
                    unchanged.now = at;
                    // An unanswered operation without an effect is treated as if it had never happened.
                    if after.look(op.key) == unchanged.look(op.key) {
                        continue;
                    }
                }
            }
            done[n] = true;
            let reached = op.landed.map_or(reached, |(event, _)| event.max(reached));
            let explained = self.explain(done, depth + 1, reached, &after);
            done[n] = false;
            if explained != Some(false) {
                return explained;
            }
        }
        Some(false)
    }

    /// Operations that may happen next, with their times, the likeliest first. First come operations whose execution is
    /// known, in the order in which the store executed them; then operations answered at `next_at`; and last the
    /// operations without an answer, most of which never happened or can wait. An unanswered operation that the store
    /// executed before `reached` is also among the last, because it changed nothing at that time.
    fn candidates(&self, done: &[bool], first_end: u64, reached: u64, now: u64, next_at: u64) -> Vec<(usize, u64)> {
        let may_be_next = (0..self.ops.len()).filter(|n| !done[*n] && self.ops[*n].invoked < first_end);
        let mut found = Vec::new();
        for n in may_be_next {
            let op = self.ops[n];
            let landed = op.landed.filter(|_| self.hints);
            let unlikely = landed.map_or(u64::MAX, |(event, _)| event);
            if let End::Answered { at, .. } = &op.end {
                if *at == next_at {
                    found.push(((unlikely, false), n, *at));
                }
                continue;
            }
            let from = self.ticks.partition_point(|tick| *tick < op.invoked_at.max(now));
            let to = self.ticks.partition_point(|tick| *tick <= next_at);
            for at in self.ticks.get(from..to).unwrap_or_default() {
                let is_hint = landed.is_some_and(|(event, landed_at)| landed_at == *at && event > reached);
                found.push(((if is_hint { unlikely } else { u64::MAX }, true), n, *at));
            }
        }
        // The sort is stable, so operations without a known time stay in the order of invocation and time.
        found.sort_by_key(|(order, ..)| *order);
        found.into_iter().map(|(_, n, at)| (n, at)).collect()
    }
}

/// Executes `asked` at the time `at` on the reference, and returns the expected answer.
fn apply(reference: &mut Reference, asked: &OperationArgs, key: usize, at: u64) -> OperationAnswer {
    reference.now = at;
    match asked {
        OperationArgs::Reserve(ask) => OperationAnswer::Reservation(match reference.reserve(ask) {
            // A replay does not contain the end of the retention.
            Answer::Finished(entry) => Answer::Finished(Entry { forgotten_at: 0, ..entry }),
            answer => answer,
        }),
        OperationArgs::Begin(ask, attempt) => OperationAnswer::Write(reference.begin(key, ask.owner, *attempt)),
        OperationArgs::Renew(ask, attempt) => OperationAnswer::Write(reference.renew(key, ask.owner, *attempt)),
        OperationArgs::Append(ask, attempt, journal) => {
            OperationAnswer::Write(reference.append(key, ask.owner, *attempt, *journal))
        }
        OperationArgs::Finish(ask, attempt, finish, messages) => {
            OperationAnswer::Write(reference.finish(ask, *attempt, finish, messages))
        }
        OperationArgs::Release(ask, release) => OperationAnswer::Write(reference.release(ask, *release)),
        OperationArgs::Decide { sight, action, by } => OperationAnswer::Write(reference.decide(key, sight, action, by)),
        OperationArgs::Inspect => OperationAnswer::Inspection(reference.look(key).cloned().map(|mut entry| {
            if let Phase::Pending { lapses_at, .. } = &mut entry.phase {
                // An answer does not contain the time at which a lease lapsed in the past.
                *lapses_at = at.max(*lapses_at);
            }
            entry
        })),
    }
}

fn digest(done: &[bool], reference: &Reference, key: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    done.hash(&mut hasher);
    reference.now.hash(&mut hasher);
    if let Some(entry) = reference.look(key) {
        hash(entry, &mut hasher);
    }
    hasher.finish()
}

fn hash(entry: &Entry, hasher: &mut impl Hasher) {
    let Entry { owner, decisions, by, attempt, starts, fingerprint, asked, phase, forgotten_at, journal, unsent } =
        entry;
    (owner, decisions, by, attempt, starts, fingerprint, asked, forgotten_at, journal, unsent).hash(hasher);
    match phase {
        Phase::Pending { lease, ttl, on_crash, begun, lapses_at } => {
            (0, lease, ttl, *on_crash == OnCrash::Fail, begun, lapses_at).hash(hasher);
        }
        Phase::Released => 1.hash(hasher),
        Phase::Interrupted => 2.hash(hasher),
        Phase::Finished(finish) => {
            (3, matches!(finish, Finish::Completed(_))).hash(hasher);
            match finish.result() {
                StoredResult::Encoded { bytes, .. } => bytes.hash(hasher),
                StoredResult::TooLarge { size } => size.hash(hasher),
                _ => {}
            }
        }
    }
}

/// Tests of the search, on histories written by hand.
mod by_hand {
    use std::time::Duration;

    use idem_runtime::codec::CodecName;
    use idem_runtime::record::StoredResult;
    use idem_runtime::store::{Finish, Verdict};
    use idem_runtime::testing::{SimulatedClock, Simulation};
    use idem_runtime::{Key, OnCrash, StoreErrorKind};

    use super::{Judgement, check};
    use crate::history::{End, History, OperationAnswer, OperationArgs, nanos};
    use crate::reference::{Answer, Ask, Entry, Phase};

    const LEASE: u64 = nanos_of_seconds(30);
    const TTL: u64 = nanos_of_seconds(600);

    const fn nanos_of_seconds(seconds: u64) -> u64 {
        seconds * 1_000_000_000
    }

    /// Operations on one key, which a test enters one after the other or overlapping.
    struct Script {
        clock: SimulatedClock,
        history: History,
    }

    fn script(write: impl FnOnce(&mut Script)) -> Judgement {
        let simulation = Simulation::new(1);
        let mut script = Script { clock: simulation.clock(), history: History::new(simulation.clock()) };
        write(&mut script);
        check(&script.history, 0)
    }

    impl Script {
        fn pass(&self, seconds: u64) {
            self.clock.advance(Duration::from_secs(seconds));
        }

        fn ask(&mut self, asked: OperationArgs) -> usize {
            self.history.invoke(0, &Key::new("by-hand", "k").unwrap(), asked)
        }

        fn answer(&mut self, op: usize, said: OperationAnswer) {
            let at = self.history.tick();
            self.history.respond(op, End::Answered { said, at });
        }

        fn done(&mut self, asked: OperationArgs, said: OperationAnswer) {
            let op = self.ask(asked);
            self.answer(op, said);
        }
    }

    fn by(owner: usize) -> Ask {
        let on_crash = OnCrash::Retry;
        let (max_attempts, max_reconciliations) = (None, None);
        Ask { key: 0, owner, lease: LEASE, ttl: TTL, fingerprint: None, on_crash, max_attempts, max_reconciliations }
    }

    fn reserve(owner: usize) -> OperationArgs {
        OperationArgs::Reserve(by(owner))
    }

    fn reserved(attempt: u32, takeover: bool) -> OperationAnswer {
        let (starts, fingerprint, in_doubt) = (attempt, None, false);
        OperationAnswer::Reservation(Answer::Reserved { attempt, starts, fingerprint, takeover, in_doubt })
    }

    fn pending(attempt: u32, seconds: u64) -> OperationAnswer {
        OperationAnswer::Reservation(Answer::Pending { attempt, lapses_in: nanos(Duration::from_secs(seconds)) })
    }

    fn result(byte: u8) -> Finish {
        let codec = CodecName::new(b"hand").unwrap();
        Finish::Completed(StoredResult::Encoded { codec, bytes: vec![byte].into() })
    }

    fn finished(owner: usize, attempt: u32, byte: u8) -> OperationAnswer {
        let phase = Phase::Finished(result(byte));
        let (decisions, by, asked, starts, fingerprint, forgotten_at) = (0, String::new(), 0, attempt, None, 0);
        let (journal, unsent) = (0, Vec::new());
        let entry =
            Entry { owner, decisions, by, attempt, starts, fingerprint, asked, phase, forgotten_at, journal, unsent };
        OperationAnswer::Reservation(Answer::Finished(entry))
    }

    fn holds(verdict: &Judgement) -> bool {
        assert_ne!(*verdict, Judgement::Undecided);
        *verdict == Judgement::Linearizable
    }

    #[test]
    fn a_history_that_grants_one_key_twice_is_not_linearizable() {
        assert!(!holds(&script(|it| {
            it.done(reserve(1), reserved(1, false));
            it.done(reserve(2), reserved(1, false));
        })));
        assert!(holds(&script(|it| {
            it.done(reserve(1), reserved(1, false));
            it.done(reserve(2), pending(1, 30));
        })));
    }

    #[test]
    fn concurrent_operations_have_the_order_that_explains_them() {
        assert!(holds(&script(|it| {
            let [first, second] = [1, 2].map(|owner| it.ask(reserve(owner)));
            it.answer(first, pending(1, 30));
            it.answer(second, reserved(1, false));
        })));
        // Operations that do not overlap have only one order.
        assert!(!holds(&script(|it| {
            it.done(reserve(1), pending(1, 30));
            it.done(reserve(2), reserved(1, false));
        })));
    }

    #[test]
    fn an_unanswered_operation_lands_at_any_time_or_never() {
        for landed in [true, false] {
            assert!(holds(&script(|it| {
                it.ask(reserve(1));
                it.history.tick();
                it.pass(10);
                it.done(reserve(2), if landed { pending(1, 20) } else { reserved(1, false) });
            })));
        }
        // The operation must not happen before its invocation.
        assert!(!holds(&script(|it| {
            it.done(reserve(2), pending(1, 30));
            it.ask(reserve(1));
        })));
        // The operation must not happen twice.
        assert!(!holds(&script(|it| {
            it.ask(reserve(1));
            it.done(reserve(2), pending(1, 30));
            it.pass(30);
            it.done(reserve(3), reserved(2, true));
            it.pass(30);
            it.done(reserve(4), pending(3, 30));
        })));
        // The operation must not happen if the store answered that it had no effect.
        assert!(!holds(&script(|it| {
            let op = it.ask(reserve(1));
            it.history.respond(op, End::NothingDone(StoreErrorKind::Unavailable));
            it.done(reserve(2), pending(1, 30));
        })));
    }

    #[test]
    fn a_search_that_takes_too_long_is_undecided() {
        // Any of the unanswered reservations may have taken over at each tick, and no order explains the last answer.
        let verdict = script(|it| {
            for owner in 1..=20 {
                it.ask(reserve(owner));
            }
            for _ in 0..8 {
                it.history.tick();
                it.pass(40);
            }
            it.done(reserve(21), finished(21, 1, 7));
        });
        assert_eq!(verdict, Judgement::Undecided);
    }

    #[test]
    fn a_late_finish_is_accepted_until_a_takeover() {
        let finish = || OperationArgs::Finish(by(1), 1, result(7), Vec::new());
        assert!(holds(&script(|it| {
            it.done(reserve(1), reserved(1, false));
            it.ask(finish());
            it.pass(40);
            it.done(reserve(2), finished(1, 1, 7));
        })));
        assert!(!holds(&script(|it| {
            it.done(reserve(1), reserved(1, false));
            it.ask(finish());
            it.pass(40);
            it.done(reserve(2), reserved(2, true));
            it.done(reserve(3), finished(1, 1, 7));
        })));
        assert!(!holds(&script(|it| {
            it.done(reserve(1), reserved(1, false));
            it.done(finish(), OperationAnswer::Write(Verdict::Applied));
            it.done(reserve(2), finished(1, 1, 8));
        })));
    }

    #[test]
    fn a_lease_lapses_at_the_time_that_the_answer_says() {
        for (seconds, right) in [(29, true), (30, false), (1, false)] {
            let verdict = script(|it| {
                it.done(reserve(1), reserved(1, false));
                it.pass(1);
                it.done(reserve(2), pending(1, seconds));
            });
            assert_eq!(holds(&verdict), right, "{seconds} seconds");
        }
        assert!(!holds(&script(|it| {
            it.done(reserve(1), reserved(1, false));
            it.pass(29);
            it.done(reserve(2), reserved(2, true));
        })));
    }
}
