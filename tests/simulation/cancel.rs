//! Drops a call at each of its awaits: a first run counts the polls, and then one run for each poll ends the call at
//! that poll. A call that its caller drops leaves its key free, interrupted or recorded immediately. After the death of
//! a process, the key of its call reaches one of these states within a lease.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::FutureExt;
use futures::future::try_join;
use idem_runtime::clock::Clock;
use idem_runtime::record::State;
use idem_runtime::store::{Reservation, ReserveRequest};
use idem_runtime::testing::Simulation;
use idem_runtime::{
    Error, InProgress, Key, MemoryStore, OnCrash, OnStoreError, Operation, Outcome, Policy, Store, StoreErrorKind,
    current, observe,
};
use idem_tests::{Fault, FaultyStore, StoreCall, yields};
use serde::{Deserialize, Serialize};

use crate::dice::Dice;
use crate::store::{DeliberateBreak, FaultRates, Line, Net};

const LEASE: Duration = Duration::from_secs(30);
const POLICY: Policy = Policy::new(Duration::from_secs(86_400));

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Failure {
    Declined,
    #[serde(skip)]
    Idempotency(CallerAnswer),
}

/// Answers to the caller, as far as the tests distinguish them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CallerAnswer {
    Interrupted,
    Exhausted,
    Other,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Idempotency(match error {
            Error::Interrupted { .. } => CallerAnswer::Interrupted,
            Error::AttemptsExhausted { .. } => CallerAnswer::Exhausted,
            _ => CallerAnswer::Other,
        })
    }
}

/// Course of the call under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scenario {
    First,
    Replay,
    WaitsForResult,
    WaitsForFailure,
    Takeover,
    ReserveFails,
    ReserveAnswerLost,
    AnsweredTooLate,
    FinishFails,
    FinishAnswerLost,
    ResultTooLarge,
    ErrorReleased,
    ReleaseFails,
    ErrorRecorded,
    Heartbeats,
    LeaseLost,
    Nested,
    Unprotected,
    /// Two tries of the mark fail, and the third one succeeds.
    MarkFails,
    MarkAnswerLost,
    /// The record is marked, but no try of the mark gets an answer.
    MarkUnanswered,
    /// The lease lapses before the mark reaches the store.
    MarkTooLate,
    /// The policy has `max_attempts = 1`.
    OnlyAttempt,
    /// The policy has `max_attempts = 2`, and an earlier attempt has failed.
    LastAttempt,
    /// The body has two steps, one after the other.
    Steps,
    /// The body has two steps, which it polls together.
    StepsJoined,
    AppendFails,
    AppendAnswerLost,
}

impl Scenario {
    /// Returns whether `max_attempts` allows no further attempt, so that a crash of the body exhausts the attempts.
    fn is_last(self) -> bool {
        matches!(
            self,
            S::MarkFails | S::MarkAnswerLost | S::MarkUnanswered | S::MarkTooLate | S::OnlyAttempt | S::LastAttempt
        )
    }

    fn has_steps(self) -> bool {
        matches!(self, S::Steps | S::StepsJoined | S::AppendFails | S::AppendAnswerLost)
    }
}

use Scenario as S;

const ALL: [Scenario; 28] = [
    S::First,
    S::Replay,
    S::WaitsForResult,
    S::WaitsForFailure,
    S::Takeover,
    S::ReserveFails,
    S::ReserveAnswerLost,
    S::AnsweredTooLate,
    S::FinishFails,
    S::FinishAnswerLost,
    S::ResultTooLarge,
    S::ErrorReleased,
    S::ReleaseFails,
    S::ErrorRecorded,
    S::Heartbeats,
    S::LeaseLost,
    S::Nested,
    S::Unprotected,
    S::MarkFails,
    S::MarkAnswerLost,
    S::MarkUnanswered,
    S::MarkTooLate,
    S::OnlyAttempt,
    S::LastAttempt,
    S::Steps,
    S::StepsJoined,
    S::AppendFails,
    S::AppendAnswerLost,
];

/// Early end of the call under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// The caller drops the call.
    Cancelled,
    /// The process dies, so that no late write follows.
    Crashed,
}

/// Facts about the body under test.
#[derive(Default)]
struct Facts {
    started: Cell<bool>,
    returned: RefCell<Option<Result<u32, Failure>>>,
    effects: Cell<u32>,
    inner_effects: Cell<u32>,
    /// Number of effects of each step.
    step_effects: [Cell<u32>; 2],
    /// Value that each step has returned first.
    step_values: [Cell<Option<u32>>; 2],
}

struct Stage {
    simulation: Simulation,
    scenario: Scenario,
    policy: Policy,
    /// Store of the process under test, with the faults of the scenario.
    line: Line,
    store: FaultyStore,
    /// Store of another process.
    other: MemoryStore,
    facts: Facts,
}

fn key() -> Key {
    Key::new("cancel", "k").unwrap()
}

impl Stage {
    fn new(scenario: Scenario, on_crash: OnCrash, slow: u32) -> Rc<Self> {
        let simulation = Simulation::new(1);
        simulation.limit_polls(100_000);
        let memory = MemoryStore::options().clock(simulation.clock()).build();
        let weather = FaultRates { faults: 0, late: false, calm: Duration::ZERO, lease: LEASE };
        let truth: Arc<dyn Store> = Arc::new(memory.peer());
        let net =
            Arc::new(Net::new(simulation.clock(), Dice::new(1), truth, weather, DeliberateBreak::None, (None, true)));
        let line = Line::new(0, Arc::new(memory.peer()), net, None);
        let store = FaultyStore::new(&line);
        let calls = [StoreCall::Reserve, StoreCall::Begin, StoreCall::Renew, StoreCall::Append];
        for call in calls.into_iter().chain([StoreCall::Finish, StoreCall::Release]) {
            store.always(call, Fault::Slow(slow));
        }
        let mut policy = POLICY.lease(LEASE).on_crash(on_crash);
        if scenario.is_last() {
            policy = policy.max_attempts(if scenario == S::LastAttempt { 2 } else { 1 });
        }
        match scenario {
            S::WaitsForResult | S::WaitsForFailure => policy = policy.in_progress(InProgress::Wait(2 * LEASE)),
            S::ReserveFails => store.next(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable)),
            S::ReserveAnswerLost => store.next(StoreCall::Reserve, Fault::After),
            S::AnsweredTooLate => store.next(StoreCall::Reserve, Fault::Slow(20)),
            S::FinishFails => {
                for _ in 0..2 {
                    store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
                }
            }
            S::FinishAnswerLost => store.next(StoreCall::Finish, Fault::After),
            S::MarkFails => {
                for _ in 0..2 {
                    store.next(StoreCall::Begin, Fault::Before(StoreErrorKind::Unavailable));
                }
            }
            S::MarkAnswerLost => store.next(StoreCall::Begin, Fault::After),
            S::MarkUnanswered => {
                for _ in 0..3 {
                    store.next(StoreCall::Begin, Fault::After);
                }
            }
            S::AppendFails => store.next(StoreCall::Append, Fault::Before(StoreErrorKind::Unavailable)),
            S::AppendAnswerLost => store.next(StoreCall::Append, Fault::After),
            S::MarkTooLate => store.next(StoreCall::Begin, Fault::Slow(20)),
            S::ResultTooLarge => store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::TooLarge)),
            S::ReleaseFails => store.next(StoreCall::Release, Fault::Before(StoreErrorKind::Unavailable)),
            S::LeaseLost => store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable)),
            S::Unprotected => {
                policy = policy.on_store_error(OnStoreError::Run);
                store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Misconfigured));
            }
            _ => {}
        }
        Rc::new(Self { simulation, scenario, policy, line, store, other: memory, facts: Facts::default() })
    }

    /// Runs a step of the body, which has one effect.
    async fn step(&self, number: usize) -> Result<(), Failure> {
        let facts = &self.facts;
        let effects = &facts.step_effects[number];
        let value = current()?
            .step(("part", number))
            .run(async |_| {
                yields(1).await;
                effects.set(effects.get() + 1);
                yields(1).await;
                Ok::<_, Failure>(effects.get())
            })
            .await?;
        let first = &facts.step_values[number];
        let known = first.get().unwrap_or(value);
        assert_eq!(known, value, "a step that has returned returns the same value in each attempt");
        first.set(Some(value));
        Ok(())
    }

    async fn body(self: Rc<Self>, store: Arc<dyn Store>) -> Result<u32, Failure> {
        let facts = &self.facts;
        facts.started.set(true);
        yields(1).await;
        if self.scenario == S::Nested {
            let inner = Operation::new(&store, Key::new("cancel", "inner"), self.policy);
            inner
                .run(async {
                    yields(1).await;
                    facts.inner_effects.set(facts.inner_effects.get() + 1);
                    yields(1).await;
                    Ok::<_, Failure>(1)
                })
                .await?;
        }
        match self.scenario {
            S::StepsJoined => drop(try_join(self.step(0), self.step(1)).await?),
            scenario if scenario.has_steps() => {
                self.step(0).await?;
                self.step(1).await?;
            }
            _ => {}
        }
        facts.effects.set(facts.effects.get() + 1);
        yields(1).await;
        match self.scenario {
            S::Heartbeats => self.simulation.clock().sleep(2 * LEASE).await,
            S::LeaseLost => self.simulation.clock().sleep(4 * LEASE).await,
            _ => {}
        }
        let result = match self.scenario {
            S::ErrorReleased | S::ReleaseFails | S::ErrorRecorded => Err(Failure::Declined),
            _ => Ok(7),
        };
        *facts.returned.borrow_mut() = Some(result.clone());
        result
    }

    /// Makes one call in the process of `store`.
    async fn call(self: Rc<Self>, store: &dyn Store) -> (Result<u32, Failure>, Outcome) {
        let operation = Operation::new(store, Ok(key()), self.policy);
        let body = Rc::clone(&self).body(store.handle());
        match self.scenario {
            S::ErrorRecorded => observe(operation.record_errors().run(body)).await,
            _ => observe(operation.run(body)).await,
        }
    }

    /// Makes one call in another process. The body of the call takes `time`, and returns `result`.
    async fn other(self: Rc<Self>, time: Duration, result: Result<u32, Failure>) -> Outcome {
        let operation = Operation::new(&self.other, Ok(key()), POLICY.lease(LEASE));
        let body = async {
            self.simulation.clock().sleep(time).await;
            result
        };
        observe(operation.run(body)).await.1
    }

    /// Prepares the record before the call under test, and the concurrent calls.
    async fn prepare(self: &Rc<Self>) -> Option<idem_runtime::testing::Task<Outcome>> {
        let clock = self.simulation.clock();
        let stage = Rc::clone(self);
        match self.scenario {
            S::Replay => {
                assert!(stage.other(Duration::ZERO, Ok(1)).await.executed());
            }
            S::WaitsForResult | S::WaitsForFailure => {
                let result = if self.scenario == S::WaitsForResult { Ok(1) } else { Err(Failure::Declined) };
                let other = self.simulation.spawn(stage.other(LEASE / 4, result));
                while self.state().is_none() {
                    yields(1).await;
                }
                return Some(other);
            }
            S::Takeover => {
                // A process died in its body and left this pending record, whose lease nothing renews.
                let dead = ReserveRequest::new(key(), self.other.context().new_owner(), LEASE, LEASE * 100);
                assert!(matches!(self.other.reserve(&dead).await, Ok(Reservation::Granted { .. })));
                clock.advance(LEASE);
            }
            S::LastAttempt => {
                assert!(stage.other(Duration::ZERO, Err(Failure::Declined)).await.executed());
            }
            S::AnsweredTooLate | S::MarkTooLate => {
                self.simulation.spawn(async move {
                    // Wait until the reservation has taken effect. The number of tries is limited, because the clock
                    // stands still.
                    for _ in 0..200 {
                        if stage.state().is_some() {
                            stage.simulation.clock().advance(LEASE);
                            break;
                        }
                        yields(1).await;
                    }
                });
            }
            S::LeaseLost => {
                return Some(self.simulation.spawn(async move {
                    clock.sleep(LEASE + Duration::from_secs(1)).await;
                    let outcome = Rc::clone(&stage).other(Duration::ZERO, Ok(2)).await;
                    // From now on renewals reach the store again, and the store refuses the next one.
                    stage.store.always(StoreCall::Renew, Fault::None);
                    outcome
                }));
            }
            _ => {}
        }
        None
    }

    fn state(&self) -> Option<State> {
        let key = key();
        let found = self.other.inspect(&key).now_or_never().expect("memory answers at once").expect("memory answers");
        found.map(|found| found.record.state)
    }

    /// Checks that the key is in the promised state after the call ended at poll `at`.
    async fn check(self: &Rc<Self>, at: u64, end: End, beside: Option<idem_runtime::testing::Task<Outcome>>) {
        let Facts { started, returned, effects, inner_effects, step_effects, step_values } = &self.facts;
        let (started, returned, before) = (started.get(), returned.borrow().clone(), effects.get());
        let step_returned = step_values.each_ref().map(|value| value.get().is_some());
        let steps_before = step_effects.each_ref().map(Cell::get);
        let context = format!("{:?}, {end:?} at poll {at}, {:?}, {:?}", self.scenario, self.policy, self.state());
        let clock = self.simulation.clock();
        // Wait for the late writes after a drop, or for the lapse of the lease after a crash.
        if let Some(beside) = beside {
            beside.await.unwrap();
        }
        if end == End::Crashed {
            clock.sleep(LEASE).await;
        } else {
            self.store.context().flush().await;
            assert_eq!(self.store.context().live(), 0, "{context}");
        }
        // Inspect the record, and make another call.
        let record = self.other.inspect(&key()).await.unwrap().map(|found| found.record);
        let began = clock.now();
        let (again, outcome) = Rc::clone(self).call(&self.other.peer()).await;
        let took = clock.now().saturating_since(began);
        let context = format!("{context}, then {record:?}, then {again:?}, {outcome:?} after {took:?}");
        let ran = outcome.executed();
        // The second call must not wait: it takes only the time of its body.
        let own = if ran { 4 * LEASE } else { Duration::ZERO };
        assert!(took <= own, "{context}");
        // A step that has returned its value before the end is not run again; every other step is.
        for number in 0..2 {
            let (had, has) = (steps_before[number], step_effects[number].get());
            let again = u32::from(ran && self.scenario.has_steps() && !step_returned[number]);
            let may_be_journaled = had == 1 && has == had;
            assert!(has == had + again || may_be_journaled, "step {number}: {had} effects, then {has}: {context}");
        }
        let fail = format!("{:?}", self.policy).contains("on_crash: Fail");
        let interrupted = again == Err(Failure::Idempotency(CallerAnswer::Interrupted));
        let exhausted = again == Err(Failure::Idempotency(CallerAnswer::Exhausted));
        // True if no other attempt may follow after a crash of this attempt's body.
        let final_crash = fail || self.scenario.is_last();
        let refused = if fail { interrupted } else { exhausted };
        let state = record.as_ref().map(|record| &record.state);
        let is_marked = matches!(state, Some(State::Pending { begun: true, .. }));
        let protected = self.scenario != S::Unprotected;
        // In these scenarios another attempt decides the result of the second call.
        match self.scenario {
            S::Replay | S::WaitsForResult => {
                assert!(!started && !ran && again == Ok(1), "{context}");
                return;
            }
            S::LeaseLost if !fail => {
                assert!(!ran && again == Ok(2) && before <= 1, "{context}");
                return;
            }
            // The call of the other process came before the body of the call under test began.
            S::LeaseLost if !started => {
                assert!(
                    !ran && if is_marked { end == End::Crashed && interrupted } else { again == Ok(2) },
                    "{context}"
                );
                return;
            }
            // No attempt may follow the attempt that died before this call.
            S::Takeover if fail => {
                assert!(!started && interrupted, "{context}");
                return;
            }
            _ => {}
        }
        // In the other scenarios the result depends on whether the dropped body had started or returned.
        match (returned, started) {
            (Some(_), _) if !protected => assert!(ran, "{context}"),
            (Some(result), _) if end == End::Cancelled && (result.is_ok() || self.scenario == S::ErrorRecorded) => {
                // The store refuses the result at first; a late write may record it at a second try.
                let kept = self.scenario != S::ResultTooLarge || again == result;
                let expected = if kept { result } else { Err(Failure::Idempotency(CallerAnswer::Other)) };
                assert!(!ran && again == expected && outcome.replayed() == kept && effects.get() == 1, "{context}");
            }
            // Before the process died, the result may have been recorded, or the key released, or neither.
            (Some(result), _) if end == End::Crashed => {
                let kept = again == result || self.scenario == S::ResultTooLarge;
                let may_run = !final_crash || result.is_err();
                assert!(if ran { may_run } else { kept || (final_crash && refused) }, "{context}");
            }
            (Some(_), _) => assert!(ran, "released: {context}"),
            (None, true) if final_crash && protected => {
                assert!(refused && !ran && effects.get() == before, "{context}");
            }
            // The process died between the mark and the first poll of the body, so the record says that the body began.
            (None, false) if is_marked => assert!(end == End::Crashed && final_crash && refused && !ran, "{context}"),
            (None, _) => assert!(ran, "{context}"),
        }
        if let (true, Some(before)) = (ran && protected, record) {
            assert!(outcome.attempt().is_some_and(|number| number > before.attempt), "{context}");
            if !started && end == End::Cancelled && self.scenario != S::WaitsForFailure && self.scenario != S::Takeover
            {
                let earlier = u32::from(self.scenario == S::LastAttempt);
                assert_eq!(before.attempts_used, earlier, "an attempt that never started is refunded: {context}");
            }
        }
        // The inner operation has its own key, and keeps its result even if the outer call is dropped.
        if self.scenario == S::Nested && end == End::Cancelled {
            assert!(
                inner_effects.get() <= 2 && (returned_once(self) || inner_effects.get() >= u32::from(ran)),
                "{context}"
            );
        }
    }
}

fn returned_once(stage: &Stage) -> bool {
    stage.facts.returned.borrow().is_some()
}

/// Plays `scenario`, ends the call at its poll `at`, and returns the number of polls that the call had.
fn play(scenario: Scenario, on_crash: OnCrash, slow: u32, at: u64, end: End) -> u64 {
    let stage = Stage::new(scenario, on_crash, slow);
    let polls = Cell::new(0);
    let ended = stage.simulation.try_run(async {
        let beside = stage.prepare().await;
        {
            let mut call = Box::pin(Rc::clone(&stage).call(&stage.store));
            poll_fn(|cx| {
                if polls.get() == at {
                    return Poll::Ready(());
                }
                polls.set(polls.get() + 1);
                match call.as_mut().poll(cx) {
                    Poll::Ready(_) => Poll::Ready(()),
                    Poll::Pending if polls.get() == at => Poll::Ready(()),
                    Poll::Pending => Poll::Pending,
                }
            })
            .await;
            if end == End::Crashed {
                stage.line.die();
            }
        }
        stage.check(at, end, beside).await;
    });
    if let Err(stuck) = ended {
        panic!("{scenario:?} {on_crash:?} {end:?} at poll {at}: {stuck}");
    }
    polls.get()
}

#[test]
fn a_call_can_be_dropped_at_each_of_its_awaits() {
    let mut awaits = 0;
    for scenario in ALL {
        for on_crash in [OnCrash::Retry, OnCrash::Fail] {
            for slow in [0, 2] {
                let polls = play(scenario, on_crash, slow, u64::MAX, End::Cancelled);
                assert!(polls > 1, "{scenario:?} has no await");
                for end in [End::Cancelled, End::Crashed] {
                    for at in 0..polls {
                        let polled = play(scenario, on_crash, slow, at, end);
                        assert_eq!(polled, at, "{scenario:?}: a run repeats up to where it is dropped");
                        awaits += 1;
                    }
                }
            }
        }
    }
    println!("{awaits} ways to drop a call");
    assert!(awaits > 1_000);
}
