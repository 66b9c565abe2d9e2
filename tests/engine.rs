//! The engine with a store that fails on command and a clock that tests drive.
#![allow(
    clippy::async_yields_async,
    clippy::unchecked_time_subtraction,
    clippy::unused_async,
    reason = "bodies need not wait, calls in progress are handed around, and the durations are constants"
)]

mod engine {
    mod aws;
    mod beginning;
    mod combinations;
    mod delivery;
    mod disposition;
    mod doubts;
    mod keeping;
    mod outbox;
    mod reconciling;
    mod steps;
    mod values;
    mod waiting;
}

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use idem_runtime::clock::{Clock as _, ManualClock};
use idem_runtime::codec::ResultProblem;
use idem_runtime::key::{KeyBuilder, KeyError, KeyProblem, Scope};
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::store::{Action, Decision, DecisionAnswer};
use idem_runtime::{
    Codec, CodecError, Disposition, Error, InProgress, Json, Key, MemoryStore, MissingKey, Mode, ModeSwitch, OnCrash,
    OnError, OnStoreError, Operation, Outcome, Policy, Refusal, Store, StoreErrorKind, current, observe,
};
use idem_tests::Reopen as _;
use idem_tests::polls::poll_once;
use idem_tests::{Fault, FaultyStore, StoreCall, settle, yields};
use serde::{Deserialize, Serialize};

const LEASE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(3600);
const POLICY: Policy = Policy::new(TTL);

#[derive(Debug, Serialize, Deserialize, PartialEq)]
enum Failure {
    Declined(u32),
    #[serde(skip)]
    Idempotency(ErrorText),
}

/// Text of an [`Error`]. Errors have no equality, so the tests compare their texts.
#[derive(Debug, PartialEq, Default)]
struct ErrorText(String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Idempotency(ErrorText(error.to_string()))
    }
}

struct World {
    clock: ManualClock,
    /// Store that `store` wraps.
    memory: MemoryStore,
    store: FaultyStore,
    runs: AtomicU32,
}

impl World {
    fn new() -> Self {
        let clock = ManualClock::new();
        let memory = MemoryStore::options().clock(clock.clone()).build();
        let store = FaultyStore::new(&memory);
        Self { clock, memory, store, runs: AtomicU32::new(0) }
    }

    fn key(name: &str) -> Key {
        Key::new("test", name).unwrap()
    }

    fn operation(&self, policy: Policy) -> Operation {
        Operation::new(&self.store, Ok(Self::key("k")), policy)
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }

    /// Body that counts its runs and returns the number of the run.
    async fn body(&self) -> Result<u32, Error> {
        Ok(self.runs.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// Makes one call with [`body`](Self::body).
    async fn call(&self, policy: Policy) -> (Result<u32, Error>, Outcome) {
        observe(self.operation(policy).run(self.body())).await
    }

    async fn call_failing(&self, policy: Policy) -> (Result<u32, Failure>, Outcome) {
        let body = async {
            let number = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
            Err(Failure::Declined(number))
        };
        observe(self.operation(policy).run(body)).await
    }

    /// Starts a call whose body never ends, and polls it up to its first `await`.
    async fn hang(&self, policy: Policy) -> std::pin::Pin<Box<dyn Future<Output = Result<u32, Error>> + '_>> {
        let operation = self.operation(policy);
        let mut call = Box::pin(operation.run(async {
            self.runs.fetch_add(1, Ordering::SeqCst);
            std::future::pending().await
        }));
        assert!(poll_once(call.as_mut()).await.is_pending());
        call
    }

    /// Leaves the record of a process that died in its body: pending, with a lease that nothing renews.
    async fn crash(&self, policy: Policy) {
        let dead = FaultyStore::new(&self.store);
        dead.always(StoreCall::Renew, Fault::Hang);
        let request = idem_runtime::store::ReserveRequest::new(Self::key("k"), dead.context().new_owner(), LEASE, TTL)
            .on_crash(if matches!(format!("{policy:?}"), text if text.contains("on_crash: Fail")) {
                OnCrash::Fail
            } else {
                OnCrash::Retry
            });
        let reserved = dead.reserve(&request).await;
        let Ok(idem_runtime::store::Reservation::Granted { lease, .. }) = reserved else { panic!("{reserved:?}") };
        assert_eq!(dead.begin(&lease).await.unwrap(), idem_runtime::store::Verdict::Applied);
    }

    async fn record(&self) -> Option<Record> {
        self.store.inspect(&Self::key("k")).await.unwrap().map(|it| it.record)
    }

    async fn state(&self) -> State {
        self.record().await.expect("a record").state
    }
}

#[tokio::test]
async fn a_duplicate_replays_the_first_result() {
    let world = World::new();
    let (first, outcome) = world.call(POLICY).await;
    assert_eq!(first.unwrap(), 1);
    assert!(outcome.executed() && outcome.recorded() && outcome.result_stored() && !outcome.replayed());
    assert_eq!((outcome.attempt(), outcome.disposition()), (Some(1), Disposition::Ack));
    for _ in 0..3 {
        let (duplicate, outcome) = world.call(POLICY).await;
        assert_eq!(duplicate.unwrap(), 1);
        assert!(outcome.replayed() && !outcome.executed());
        assert_eq!((outcome.attempt(), outcome.disposition()), (Some(1), Disposition::Ack));
        assert_eq!(outcome.key().unwrap().text(), "k");
    }
    assert_eq!(world.runs(), 1);
    assert_eq!(world.store.count(StoreCall::Reserve), 4, "a replay costs one store call");
    assert_eq!((world.store.count(StoreCall::Finish), world.store.count(StoreCall::Renew)), (1, 0));
}

#[tokio::test]
async fn the_retention_of_a_result_counts_from_its_completion() {
    let world = World::new();
    let (go, gate) = tokio::sync::oneshot::channel::<()>();
    let call = world.operation(POLICY).run(async {
        gate.await.ok();
        world.body().await
    });
    let finish = async {
        settle().await;
        world.clock.advance(LEASE / 2);
        settle().await;
        go.send(()).unwrap();
    };
    futures::join!(call, finish).0.unwrap();
    world.clock.advance(TTL - Duration::from_millis(1));
    assert!(world.call(POLICY).await.1.replayed());
    world.clock.advance(Duration::from_millis(1));
    assert!(world.call(POLICY).await.1.executed(), "the retention has ended");
}

#[tokio::test]
async fn duplicates_of_a_running_attempt_get_in_progress() {
    let world = World::new();
    let running = world.hang(POLICY).await;
    world.clock.advance(Duration::from_secs(5));
    let (duplicate, outcome) = world.call(POLICY).await;
    let Err(Error::InProgress { attempt: 1, retry_after, .. }) = duplicate else { panic!("{duplicate:?}") };
    assert_eq!(retry_after, LEASE - Duration::from_secs(5));
    assert_eq!(outcome.disposition(), Disposition::Retry { after: retry_after });
    assert_eq!((outcome.executed(), outcome.refusal()), (false, Some(Refusal::InProgress)));
    drop(running);
    assert!(world.call(POLICY).await.1.executed());
}

#[tokio::test]
async fn a_waiting_duplicate_is_woken_by_the_completion() {
    let world = World::new();
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(10)));
    let (go, gate) = tokio::sync::oneshot::channel::<()>();
    let first = world.operation(wait).run(async {
        gate.await.ok();
        world.body().await
    });
    let duplicates = futures::future::join_all((0..20).map(|_| world.call(wait)));
    let finish = async {
        settle().await;
        go.send(()).unwrap();
    };
    // The clock stands still, so a waiter that slept between reads of the record would never return.
    let (first, duplicates, ()) = futures::join!(first, duplicates, finish);
    assert_eq!(first.unwrap(), 1);
    for (result, outcome) in duplicates {
        assert_eq!(result.unwrap(), 1);
        assert!(outcome.waited() && outcome.replayed());
    }
}

#[tokio::test]
async fn a_duplicate_waits_no_longer_than_its_policy_allows() {
    let world = World::new();
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(10)));
    let running = world.hang(wait).await;
    let waiting = world.call(wait);
    let time = async {
        for _ in 0..11 {
            settle().await;
            world.clock.advance(Duration::from_secs(1));
        }
    };
    let ((result, outcome), ()) = futures::join!(waiting, time);
    assert!(matches!(result, Err(Error::InProgress { .. })));
    assert!(outcome.waited() && !outcome.executed());
    // The waiter that gave up has not changed the record of the running attempt.
    assert!(matches!(world.state().await, State::Pending { .. }));
    drop(running);
}

#[tokio::test]
async fn when_the_running_attempt_fails_exactly_one_waiting_duplicate_runs() {
    let world = World::new();
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(10)));
    let (go, gate) = tokio::sync::oneshot::channel::<()>();
    let first = world.operation(wait).run(async {
        gate.await.ok();
        Err::<u32, _>(Failure::Declined(0))
    });
    let duplicates = futures::future::join_all((0..20).map(|_| world.call(wait)));
    let finish = async {
        settle().await;
        go.send(()).unwrap();
    };
    let (first, duplicates, ()) = futures::join!(first, duplicates, finish);
    assert_eq!(first, Err(Failure::Declined(0)));
    assert_eq!(duplicates.iter().filter(|(_, outcome)| outcome.executed()).count(), 1);
    assert!(duplicates.iter().all(|(result, _)| matches!(result, Ok(1))));
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn an_error_of_the_body_frees_the_key() {
    let world = World::new();
    let (failed, outcome) = world.call_failing(POLICY).await;
    assert_eq!(failed, Err(Failure::Declined(1)));
    assert!(outcome.executed() && !outcome.recorded());
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    let (retried, outcome) = world.call(POLICY).await;
    assert_eq!(retried.unwrap(), 2);
    assert_eq!(outcome.attempt(), Some(2), "fencing numbers don't repeat after a release");
    assert!(!outcome.took_over());
}

#[tokio::test]
async fn a_recorded_error_is_replayed() {
    let world = World::new();
    for attempt in 0..3 {
        let body = async {
            world.runs.fetch_add(1, Ordering::SeqCst);
            Err::<u32, _>(Failure::Declined(7))
        };
        let (result, outcome) = observe(world.operation(POLICY).record_errors().run(body)).await;
        assert_eq!(result, Err(Failure::Declined(7)));
        assert_eq!((outcome.executed(), outcome.replayed()), (attempt == 0, attempt > 0));
        assert!(outcome.recorded());
        assert_eq!(outcome.disposition(), Disposition::DeadLetter, "no delivery can succeed");
    }
    assert_eq!(world.runs(), 1);
    // A handler that can't read recorded errors gets an error, and its body does not run.
    let (result, outcome) = world.call(POLICY).await;
    assert!(
        matches!(result, Err(Error::ResultUnavailable { problem: ResultProblem::RecordedError, .. })),
        "{result:?}"
    );
    assert_eq!(outcome.disposition(), Disposition::DeadLetter, "an error is never acknowledged");
    assert!(outcome.recorded());
}

#[tokio::test]
async fn a_function_decides_which_errors_are_recorded() {
    let world = World::new();
    let decide = |error: &Failure| match error {
        Failure::Declined(code) if *code > 1 => OnError::Record,
        _ => OnError::Release,
    };
    for (code, executed) in [(1, true), (2, true), (3, false)] {
        let body = async { Err::<u32, _>(Failure::Declined(code)) };
        let (_, outcome) = observe(world.operation(POLICY).record_errors_if(decide).run(body)).await;
        assert_eq!(outcome.executed(), executed, "{code}");
    }
}

#[tokio::test]
async fn an_error_that_can_not_be_encoded_is_returned_and_frees_the_key() {
    let world = World::new();
    let body = async { Err::<u32, _>(Failure::Idempotency(ErrorText("unserializable".into()))) };
    let (result, outcome) = observe(world.operation(POLICY).record_errors().run(body)).await;
    assert_eq!(result, Err(Failure::Idempotency(ErrorText("unserializable".into()))));
    assert!(!outcome.recorded());
    assert_eq!(world.state().await, State::Released);
}

#[tokio::test]
async fn a_crash_blocks_the_key_for_one_lease_and_is_then_taken_over() {
    let world = World::new();
    world.crash(POLICY).await;
    world.clock.advance(LEASE - Duration::from_millis(1));
    assert!(matches!(world.call(POLICY).await.0, Err(Error::InProgress { .. })));
    world.clock.advance(Duration::from_millis(1));
    let (result, outcome) = world.call(POLICY).await;
    assert_eq!(result.unwrap(), 1);
    assert!(outcome.took_over());
    assert_eq!(outcome.attempt(), Some(2));
}

#[tokio::test]
async fn under_on_crash_fail_a_crash_needs_an_operator() {
    let world = World::new();
    let policy = POLICY.on_crash(OnCrash::Fail);
    world.crash(policy).await;
    world.clock.advance(LEASE);
    for policy in [policy, POLICY] {
        let (result, outcome) = world.call(policy).await;
        assert!(matches!(result, Err(Error::Interrupted { attempt: 1, .. })), "{result:?}");
        assert_eq!(outcome.disposition(), Disposition::DeadLetter);
    }
    assert_eq!(world.runs(), 0);
    assert_eq!(world.store.reopen(&World::key("k"), 1).await.unwrap(), idem_runtime::store::Verdict::Applied);
    assert_eq!(world.call(policy).await.1.attempt(), Some(2));
}

#[tokio::test]
async fn a_dropped_call_frees_its_key_immediately() {
    let world = World::new();
    drop(world.hang(POLICY).await);
    assert_eq!(world.state().await, State::Released);
    assert_eq!(world.call(POLICY).await.1.attempt(), Some(2));
}

#[tokio::test]
async fn under_on_crash_fail_a_dropped_call_leaves_its_key_interrupted() {
    let world = World::new();
    let policy = POLICY.on_crash(OnCrash::Fail);
    drop(world.hang(policy).await);
    assert_eq!(world.state().await, State::Interrupted);
    assert!(matches!(world.call(policy).await.0, Err(Error::Interrupted { .. })));
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn a_panic_of_the_body_frees_the_key_immediately() {
    let world = std::sync::Arc::new(World::new());
    for (policy, state) in [(POLICY, State::Released), (POLICY.on_crash(OnCrash::Fail), State::Interrupted)] {
        let shared = std::sync::Arc::clone(&world);
        let panicked = tokio::spawn(async move {
            let operation = shared.operation(policy);
            operation.run(async { panic!("in the body") as Result<u32, Error> }).await
        });
        assert!(panicked.await.unwrap_err().is_panic());
        assert_eq!(world.state().await, state);
    }
    // Outside of the body, the thread has no current attempt.
    assert!(current().is_err());
}

#[tokio::test]
async fn max_attempts_limits_the_attempts_of_a_key() {
    let world = World::new();
    let policy = POLICY.max_attempts(2);
    for _ in 0..2 {
        assert!(world.call_failing(policy).await.1.executed());
    }
    let (result, outcome) = world.call(policy).await;
    assert!(matches!(result, Err(Error::AttemptsExhausted { attempts: 2, .. })), "{result:?}");
    assert_eq!(outcome.disposition(), Disposition::DeadLetter);
    assert_eq!(world.runs(), 2);
}

#[tokio::test]
async fn an_attempt_whose_body_never_started_does_not_count_towards_max_attempts() {
    let world = World::new();
    let policy = POLICY.max_attempts(1);
    for _ in 0..3 {
        world.store.next(StoreCall::Reserve, Fault::Slow(1));
        let mut call = Box::pin(world.call(policy));
        // The store has executed the reservation; the call is dropped before the answer arrives.
        for _ in 0..2 {
            assert!(poll_once(call.as_mut()).await.is_pending());
        }
        drop(call);
        assert_eq!(world.state().await, State::Released);
    }
    let (result, outcome) = world.call(policy).await;
    assert_eq!(result.unwrap(), 1);
    assert_eq!(outcome.attempt(), Some(4));
}

#[tokio::test]
async fn fingerprints_are_compared_in_every_state_of_the_record() {
    let world = World::new();
    let call = async |payload: &str| {
        let operation = world.operation(POLICY).fingerprint(payload);
        observe(operation.run(world.body())).await
    };
    let mismatch = async |state: &str| {
        let (result, outcome) = call("b").await;
        assert!(matches!(result, Err(Error::FingerprintMismatch { .. })), "{state}: {result:?}");
        assert_eq!(outcome.disposition(), Disposition::DeadLetter, "{state}");
    };
    let mut running =
        Box::pin(world.operation(POLICY).fingerprint("a").run(std::future::pending::<Result<u32, Error>>()));
    assert!(poll_once(running.as_mut()).await.is_pending());
    mismatch("pending").await;
    drop(running);
    mismatch("released").await;
    assert!(call("a").await.1.executed());
    mismatch("completed").await;
    assert!(call("a").await.1.replayed());
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn a_payload_that_can_not_be_fingerprinted_is_an_error_and_not_a_match() {
    struct Broken;
    impl Serialize for Broken {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom("broken payload"))
        }
    }
    let world = World::new();
    let operation = world.operation(POLICY).fingerprint(&Broken);
    let result = operation.run(world.body()).await;
    assert!(matches!(result, Err(Error::InvalidFingerprint { .. })), "{result:?}");
    assert_eq!((world.runs(), world.store.count(StoreCall::Reserve)), (0, 0));
}

#[tokio::test]
async fn a_missing_key_is_rejected_or_runs_without_a_store_call() {
    let world = World::new();
    let call = async |policy| {
        let operation = Operation::new(&world.store, Key::new("test", ""), policy);
        observe(operation.run(world.body())).await
    };
    let (result, outcome) = call(POLICY).await;
    assert!(matches!(&result, Err(Error::MissingKey { scope, .. }) if scope == "test"), "{result:?}");
    assert_eq!(outcome.disposition(), Disposition::DeadLetter);
    assert_eq!(world.runs(), 0);
    for n in 1..=2 {
        let (result, outcome) = call(POLICY.missing_key(MissingKey::Run)).await;
        assert_eq!(result.unwrap(), n);
        assert!(outcome.executed() && !outcome.recorded());
        assert_eq!(outcome.attempt(), None);
    }
    assert_eq!(world.store.count(StoreCall::Reserve), 0);
}

#[tokio::test]
async fn a_call_with_an_invalid_key_runs_no_body() {
    let world = World::new();
    let long = "x".repeat(Key::MAX_BYTES);
    for key in [Key::new("test", long.as_str()), Key::new("test", [0xff].as_slice()), Key::new("a/b", "k")] {
        let operation = Operation::new(&world.store, key, POLICY.missing_key(MissingKey::Run));
        let result = operation.run(world.body()).await;
        assert!(matches!(result, Err(Error::InvalidKey { .. })), "{result:?}");
    }
    assert_eq!(world.runs(), 0);
}

/// PostgreSQL can't store a NUL, and other stores can. The same keys must be valid in every store, so no key may hold a
/// NUL.
#[test]
fn no_key_holds_a_control_character() {
    static SCOPE: Scope = Scope::named("no_key_holds_a_control_character");
    let refused =
        |key: Result<Key, KeyError>| matches!(key, Err(error) if error.problem == KeyProblem::ControlCharacter);
    let controls: Vec<char> = ('\0'..='\u{ff}').filter(|c| c.is_control()).collect();
    assert_eq!(controls.len(), 65);
    for c in controls {
        let text = format!("a{c}b");
        assert!(refused(format!("test/{text}").parse()), "{text:?} in a key as errors show it");
        assert!(refused(format!("1/test/{text}").parse()), "{text:?} in a key as stores hold it");
        let mut literal = KeyBuilder::new(&SCOPE);
        literal.text(&text);
        assert!(refused(literal.build()), "{text:?} in a template");
        let mut shown = KeyBuilder::new(&SCOPE);
        shown.display_part(&text, None);
        let escaped = [Key::new("test", text.as_str()), Key::new("test", text.as_bytes()), shown.build()];
        for key in escaped {
            let key = key.unwrap();
            assert!(!key.as_str().contains(char::is_control), "{key:?}");
            assert_eq!(key.to_string().parse(), Ok(key));
        }
    }
}

/// If any try of a reservation may have taken effect, the call's error says so, even if the last try certainly took no
/// effect.
#[tokio::test]
async fn an_error_promises_that_nothing_was_written_only_if_no_try_may_have_taken_effect() {
    let faults = [
        Fault::Before(StoreErrorKind::Unavailable),
        Fault::Before(StoreErrorKind::Unconfirmed),
        Fault::Before(StoreErrorKind::Full),
        Fault::After,
    ];
    for (first, second, third) in faults.iter().flat_map(|a| faults.iter().flat_map(move |b| faults.map(|c| (a, b, c))))
    {
        let tries = [*first, *second, third];
        let last = tries.iter().position(|it| *it == faults[2]).unwrap_or(2);
        let may = tries[..=last].iter().any(|it| *it == faults[1] || *it == faults[3]);
        let world = World::new();
        for fault in tries {
            world.store.next(StoreCall::Reserve, fault);
        }
        let (result, _) = driving(&world.clock, world.call(POLICY)).await;
        let error = result.unwrap_err();
        assert!(
            matches!(&error, Error::Store { may_be_reserved, .. } if *may_be_reserved == may),
            "{tries:?}: {error:?}"
        );
        let text = error.to_string();
        assert_eq!(text.contains("may be reserved"), may, "{tries:?}: {text}");
        assert_eq!(text.contains("nothing was written"), !may, "{tries:?}: {text}");
    }
}

/// The error of a lost lease names both causes, because the call can't distinguish a takeover from a removed record.
#[tokio::test]
async fn the_error_of_a_lost_lease_names_both_possible_causes() {
    for taken_over in [true, false] {
        let world = World::new();
        world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
        let mut call = Box::pin(world.operation(POLICY).run(std::future::pending::<Result<u32, Error>>()));
        assert!(poll_once(call.as_mut()).await.is_pending());
        settle().await;
        world.clock.advance(LEASE);
        settle().await;
        if taken_over {
            assert!(world.call(POLICY).await.1.executed());
        } else {
            let found = world.store.inspect(&World::key("k")).await.unwrap().expect("a record");
            let forget = Decision::new(&World::key("k"), &found, Action::Forget);
            assert_eq!(world.store.decide(&forget).await.unwrap(), DecisionAnswer::Applied);
        }
        world.store.always(StoreCall::Renew, Fault::None);
        let error = driving(&world.clock, call).await.unwrap_err();
        assert!(matches!(error, Error::LeaseLost { source: None, .. }), "{error:?}");
        assert!(error.to_string().contains("another attempt took over, or the record was removed"), "{error}");
    }
}

#[tokio::test]
async fn a_call_with_an_invalid_policy_runs_no_body() {
    let world = World::new();
    for policy in [POLICY.ttl(Duration::ZERO), POLICY.ttl(LEASE / 4), POLICY.lease(Duration::from_millis(99))] {
        let (result, outcome) = world.call(policy).await;
        assert!(matches!(result, Err(Error::InvalidPolicy { .. })), "{result:?}");
        assert!(matches!(outcome.disposition(), Disposition::Retry { .. }), "the policy is at fault, not the message");
        assert!(outcome.misconfigured());
    }
    assert_eq!((world.runs(), world.store.count(StoreCall::Reserve)), (0, 0));
}

#[tokio::test]
async fn a_store_that_fails_is_never_read_as_no_record() {
    for kind in [StoreErrorKind::Corrupt, StoreErrorKind::Misconfigured, StoreErrorKind::Full] {
        let world = World::new();
        world.store.always(StoreCall::Reserve, Fault::Before(kind));
        let (result, outcome) = world.call(POLICY).await;
        assert!(matches!(&result, Err(Error::Store { source, .. }) if source.kind() == kind), "{result:?}");
        assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
        assert_eq!(
            (world.runs(), world.store.count(StoreCall::Reserve)),
            (0, 1),
            "the engine does not retry this error"
        );

        let (result, outcome) = world.call(POLICY.on_store_error(OnStoreError::Run)).await;
        if kind == StoreErrorKind::Corrupt {
            assert_eq!(world.runs(), 0, "the record that can't be read may be that of a finished operation");
            continue;
        }
        assert_eq!(result.unwrap(), 1);
        assert!(outcome.executed() && !outcome.recorded());
        assert_eq!(outcome.bypassed(), Some(Refusal::Store));
    }
}

/// Advances the clock until `future` is ready.
async fn driving<F: Future>(clock: &ManualClock, future: F) -> F::Output {
    let mut future = pin!(future);
    for _ in 0..10_000 {
        if let Poll::Ready(output) = poll_once(future.as_mut()).await {
            return output;
        }
        settle().await;
        if let Some(next) = clock.next_wake() {
            clock.advance(next);
        }
    }
    panic!("hangs");
}

#[tokio::test]
async fn a_reservation_whose_answer_got_lost_is_recognised() {
    let world = World::new();
    world.store.next(StoreCall::Reserve, Fault::After);
    let (result, outcome) = driving(&world.clock, world.call(POLICY)).await;
    assert_eq!(result.unwrap(), 1);
    assert_eq!(outcome.attempt(), Some(1), "the outcome names the caller's own first attempt");
    assert_eq!(world.store.count(StoreCall::Reserve), 2);
}

/// Starts a call whose reservation takes effect, but whose answer arrives after the lease has lapsed.
async fn answered_too_late(world: &World) -> std::pin::Pin<Box<dyn Future<Output = Result<u32, Error>> + '_>> {
    world.store.next(StoreCall::Reserve, Fault::Slow(2));
    let mut call = Box::pin(world.operation(POLICY).run(world.body()));
    while world.record().await.is_none() {
        assert!(poll_once(call.as_mut()).await.is_pending());
    }
    world.clock.advance(LEASE);
    call
}

#[tokio::test]
async fn a_reservation_that_is_answered_after_its_lease_is_renewed_before_the_body_starts() {
    let world = World::new();
    let call = answered_too_late(&world).await;
    assert_eq!(call.await.unwrap(), 1);
    assert_eq!((world.store.count(StoreCall::Renew), world.runs()), (1, 1));
    assert_eq!(world.record().await.unwrap().attempt, 1);
}

#[tokio::test]
async fn a_reservation_that_is_answered_after_a_takeover_starts_no_body() {
    let world = World::new();
    let call = answered_too_late(&world).await;
    assert!(world.call(POLICY).await.1.took_over());
    let (result, outcome) = observe(call).await;
    assert_eq!(result.unwrap(), 1, "the call replays the result of the other attempt");
    assert!(outcome.replayed());
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn a_lapsed_reservation_that_can_not_be_renewed_starts_no_body_and_is_released() {
    for fault in [Fault::Before(StoreErrorKind::Unavailable), Fault::After, Fault::Hang] {
        let world = World::new();
        let mut call = answered_too_late(&world).await;
        world.store.next(StoreCall::Renew, fault);
        if fault == Fault::Hang {
            for _ in 0..4 {
                assert!(poll_once(call.as_mut()).await.is_pending());
            }
            drop(call);
        } else {
            assert!(matches!(call.await, Err(Error::Store { started: false, .. })), "{fault:?}");
        }
        world.store.context().flush().await;
        assert_eq!((world.state().await, world.runs()), (State::Released, 0), "{fault:?}");
        assert_eq!(world.record().await.unwrap().attempts_used, 0, "{fault:?}");
    }
}

/// A store that needs longer than a lease for each answer must not get ever more requests from the calls that it slows
/// down.
#[tokio::test]
async fn a_call_whose_store_answers_later_than_its_lease_gives_up() {
    let world = World::new();
    world.store.always(StoreCall::Renew, Fault::Slow(2));
    let mut call = answered_too_late(&world).await;
    let mut polls = 0..100;
    let error = loop {
        if let Poll::Ready(ended) = poll_once(call.as_mut()).await {
            break ended.unwrap_err();
        }
        assert!(polls.next().is_some(), "the call asks again and again");
        world.clock.advance(LEASE);
    };
    let Error::Store { started: false, may_be_reserved: true, source, .. } = &error else { panic!("{error:?}") };
    assert!(source.to_string().contains("later than the lease lasts"), "{source}");
    assert_eq!((world.store.count(StoreCall::Renew), world.runs()), (3, 0));
    world.store.always(StoreCall::Renew, Fault::None);
    world.store.context().flush().await;
    assert_eq!((world.state().await, world.record().await.unwrap().attempts_used), (State::Released, 0));
    assert!(world.call(POLICY).await.1.executed());
}

/// Starts a duplicate that gets no answer to its first reservation, and waits after its second reservation. Then the
/// first reservation takes effect.
async fn lands_late(world: &World) -> std::pin::Pin<Box<dyn Future<Output = Result<Duration, Error>>>> {
    let running = world.hang(POLICY).await;
    world.store.next(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unconfirmed));
    let policy = POLICY.in_progress(InProgress::Wait(2 * LEASE));
    let mut waiting =
        Box::pin(world.operation(policy).run(async { Ok::<_, Error>(current().expect("inside").lease_remaining()) }));
    assert!(poll_once(waiting.as_mut()).await.is_pending());
    world.clock.advance(Duration::from_secs(1));
    assert!(poll_once(waiting.as_mut()).await.is_pending(), "the duplicate has repeated its reservation, and waits");
    drop(running);
    let late = world.store.reserves()[1].clone();
    assert!(matches!(world.store.reserve(&late).await, Ok(idem_runtime::store::Reservation::Granted { .. })));
    waiting
}

#[tokio::test]
async fn a_lease_that_is_found_late_counts_from_its_reservation() {
    let world = World::new();
    let waiting = lands_late(&world).await;
    world.clock.advance(LEASE / 2);
    let believed = waiting.await.unwrap();
    assert!(believed <= LEASE / 2, "{believed:?}");
}

#[tokio::test]
async fn a_reservation_that_takes_effect_while_its_caller_waits_is_released_if_the_caller_is_dropped() {
    let world = World::new();
    drop(lands_late(&world).await);
    world.store.context().flush().await;
    assert_eq!(world.state().await, State::Released);
    assert!(world.call(POLICY.on_crash(OnCrash::Fail)).await.1.executed());
}

#[tokio::test]
async fn a_reservation_whose_caller_gave_up_is_released() {
    let world = World::new();
    world.store.always(StoreCall::Reserve, Fault::After);
    let (result, _) = driving(&world.clock, world.call(POLICY)).await;
    assert!(matches!(&result, Err(Error::Store { source, .. }) if source.may_have_landed()), "{result:?}");
    assert_eq!(world.runs(), 0);
    world.store.context().flush().await;
    assert_eq!(world.state().await, State::Released, "a released key is not held for a lease");
    assert_eq!(world.record().await.unwrap().attempts_used, 0);
}

#[tokio::test]
async fn a_completion_whose_answer_got_lost_is_recognised() {
    let world = World::new();
    world.store.next(StoreCall::Finish, Fault::After);
    let (result, outcome) = driving(&world.clock, world.call(POLICY)).await;
    assert_eq!(result.unwrap(), 1);
    assert!(outcome.recorded());
    assert_eq!(world.store.count(StoreCall::Finish), 2);
    assert!(world.call(POLICY).await.1.replayed());
}

#[tokio::test]
async fn recording_is_retried_while_the_lease_can_be_held() {
    let world = World::new();
    for _ in 0..5 {
        world.store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
    }
    let (result, _) = driving(&world.clock, world.call(POLICY)).await;
    assert_eq!(result.unwrap(), 1);
    assert_eq!(world.store.count(StoreCall::Finish), 6);
}

#[tokio::test]
async fn a_call_whose_result_is_not_recorded_returns_unrecorded() {
    let world = World::new();
    world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
    let (result, outcome) = driving(&world.clock, world.call(POLICY)).await;
    let Err(Error::Unrecorded { attempt: 1, source, .. }) = result else { panic!("{result:?}") };
    assert_eq!(source.kind(), StoreErrorKind::Unavailable);
    assert!(outcome.executed() && !outcome.recorded());
    // The key stays held until the lease lapses; then the next delivery runs.
    assert!(matches!(world.state().await, State::Pending { .. }));
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    world.clock.advance(LEASE);
    world.store.always(StoreCall::Finish, Fault::None);
    assert_eq!(world.call(POLICY).await.1.attempt(), Some(2));
}

#[tokio::test]
async fn a_release_that_fails_does_not_hide_the_bodys_own_error() {
    let world = World::new();
    world.store.next(StoreCall::Release, Fault::Before(StoreErrorKind::Unavailable));
    let (result, _) = world.call_failing(POLICY).await;
    assert_eq!(result, Err(Failure::Declined(1)));
    driving(&world.clock, world.store.context().flush()).await;
    assert_eq!(world.state().await, State::Released, "freed late");
}

#[tokio::test]
async fn an_operation_ends_even_if_its_result_can_not_be_stored() {
    struct Mute;
    impl Codec for Mute {
        const NAME: &'static str = "mute";
        fn encode<T: Serialize>(_: &T) -> Result<Vec<u8>, CodecError> {
            Err("can't".into())
        }
        fn decode<T: serde::de::DeserializeOwned>(_: &[u8]) -> Result<T, CodecError> {
            Err("can't".into())
        }
    }
    let world = World::new();
    let (result, outcome) = world.call(POLICY.max_result_bytes(0)).await;
    assert_eq!(result.unwrap(), 1, "the first caller gets its value");
    assert!(outcome.recorded() && !outcome.result_stored());
    assert_eq!(outcome.disposition(), Disposition::Ack);
    let (result, outcome) = world.call(POLICY).await;
    assert!(matches!(result, Err(Error::ResultUnavailable { problem: ResultProblem::TooLarge { size: 1, .. }, .. })));
    assert_eq!((outcome.disposition(), world.runs()), (Disposition::DeadLetter, 1));

    let world = World::new();
    let call = async || observe(world.operation(POLICY).codec::<Mute>().run(world.body())).await;
    assert_eq!(call().await.0.unwrap(), 1);
    let (result, _) = call().await;
    assert!(matches!(result, Err(Error::ResultUnavailable { problem: ResultProblem::Unencodable, .. })));
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn an_operation_whose_result_no_longer_decodes_never_runs_again() {
    struct Other;
    impl Codec for Other {
        const NAME: &'static str = "other";
        fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
            Json::encode(value)
        }
        fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
            Json::decode(bytes)
        }
    }
    let world = World::new();
    world.call(POLICY).await.0.unwrap();
    let body = async { Ok::<_, Error>(vec!["a list now".to_owned()]) };
    let result = world.operation(POLICY).run(body).await;
    assert!(matches!(result, Err(Error::ResultUnavailable { problem: ResultProblem::Undecodable { .. }, .. })));
    let result = world.operation(POLICY).codec::<Other>().run(world.body()).await;
    assert!(matches!(result, Err(Error::ResultUnavailable { problem: ResultProblem::OtherCodec { .. }, .. })));
    assert_eq!(world.runs(), 1);
    assert!(matches!(world.state().await, State::Completed(StoredResult::Encoded { .. })), "left alone");
}

#[tokio::test]
async fn empty_and_zero_results_are_replayed() {
    async fn twice<T: Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug + Clone>(value: T) {
        let world = World::new();
        for replayed in [false, true] {
            let body = async { Ok::<_, Error>(value.clone()) };
            let (result, outcome) = observe(world.operation(POLICY).run(body)).await;
            assert_eq!(result.unwrap(), value);
            assert_eq!(outcome.replayed(), replayed);
        }
    }
    twice(()).await;
    twice(0).await;
    twice(false).await;
    twice(String::new()).await;
    twice(Vec::<u8>::new()).await;
    twice(None::<u8>).await;
}

#[tokio::test]
async fn heartbeats_keep_the_lease_of_a_slow_handler() {
    let world = World::new();
    let (go, gate) = tokio::sync::oneshot::channel::<()>();
    let call = world.operation(POLICY).run(async {
        gate.await.ok();
        world.body().await
    });
    let time = async {
        for _ in 0..50 {
            settle().await;
            world.clock.advance(Duration::from_secs(5));
            settle().await;
            assert!(matches!(world.call(POLICY).await.0, Err(Error::InProgress { .. })));
        }
        go.send(()).unwrap();
    };
    let (result, ()) = futures::join!(call, time);
    assert_eq!(result.unwrap(), 1);
    let beats = world.store.count(StoreCall::Renew);
    assert!((20..=35).contains(&beats), "250 s at a beat of 10 s: {beats}");
    assert_eq!(world.store.context().live(), 0);
}

#[tokio::test]
async fn one_store_call_renews_all_leases() {
    let world = World::new();
    let calls: Vec<_> = (0..1000)
        .map(|n| {
            let key = Ok(World::key(&format!("k{n}")));
            let operation = Operation::new(&world.store, key, POLICY);
            let mut call = Box::pin(operation.run(std::future::pending::<Result<(), Error>>()));
            assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            call
        })
        .collect();
    assert_eq!(world.store.context().live(), 1000);
    settle().await;
    world.clock.advance(LEASE / 3);
    settle().await;
    assert_eq!(world.store.count(StoreCall::Renew), 1);
    drop(calls);
    assert_eq!(world.store.context().live(), 0);
}

#[tokio::test]
async fn a_lease_is_registered_for_renewal_from_the_first_poll_of_its_handler_to_the_end() {
    let world = World::new();
    let seen = Cell::new(usize::MAX);
    world
        .operation(POLICY)
        .run(async {
            seen.set(world.store.context().live());
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
    assert_eq!((seen.get(), world.store.context().live()), (1, 0));
}

#[tokio::test]
async fn a_lost_lease_cancels_the_body_and_leaves_the_successor_alone() {
    struct Cancelled(Rc<Cell<bool>>);
    impl Drop for Cancelled {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    let world = World::new();
    // The first attempt can't renew its lease, because its process can't reach the store.
    world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
    let cancelled = Rc::new(Cell::new(false));
    let guard = Cancelled(Rc::clone(&cancelled));
    let first = observe(world.operation(POLICY).run(async move {
        let _guard = guard;
        assert_eq!(current().unwrap().number(), 1);
        std::future::pending::<Result<u32, Error>>().await
    }));
    let others = async {
        settle().await;
        world.clock.advance(LEASE);
        settle().await;
        assert!(!cancelled.get(), "a failing store does not mean that the lease is lost");
        let second = world.hang(POLICY).await;
        world.store.always(StoreCall::Renew, Fault::None);
        world.clock.advance(LEASE / 3);
        settle().await;
        second
    };
    let ((result, outcome), second) = futures::join!(first, others);
    assert!(matches!(result, Err(Error::LeaseLost { attempt: 1, .. })), "{result:?}");
    assert!(cancelled.get() && outcome.executed() && !outcome.recorded());
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    let record = world.record().await.unwrap();
    assert_eq!(record.attempt, 2);
    assert!(matches!(record.state, State::Pending { .. }));
    drop(second);
}

#[tokio::test]
async fn only_after_a_takeover_is_a_late_completion_refused() {
    let world = World::new();
    let stalled = async |taken_over: bool| {
        world.store.next(StoreCall::Finish, Fault::Slow(1));
        let mut call = Box::pin(world.operation(POLICY).run(async {
            // One poll takes longer than a lease, in a process whose other threads stand still.
            world.clock.advance(LEASE * 2);
            Ok::<_, Error>(99)
        }));
        assert!(poll_once(call.as_mut()).await.is_pending(), "recording");
        if taken_over {
            assert_eq!(world.call(POLICY).await.0.unwrap(), 1);
        }
        call.await
    };
    let result = stalled(true).await;
    assert!(matches!(result, Err(Error::LeaseLost { .. })), "{result:?}");
    assert_eq!(world.call(POLICY).await.0.unwrap(), 1, "the record keeps the result of the next attempt");

    world.clock.advance(TTL);
    assert_eq!(stalled(false).await.unwrap(), 99);
    assert_eq!(world.call(POLICY).await.0.unwrap(), 99);
}

#[tokio::test]
async fn a_dropped_caller_does_not_lose_a_result_that_is_being_recorded() {
    let world = World::new();
    world.store.next(StoreCall::Finish, Fault::Slow(1));
    let mut call = Box::pin(world.call(POLICY));
    assert!(poll_once(call.as_mut()).await.is_pending(), "recording");
    assert_eq!(world.runs(), 1);
    drop(call);
    world.store.context().flush().await;
    assert!(world.call(POLICY).await.1.replayed());
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn shadow_mode_always_runs_the_body_and_reports_duplicates() {
    let world = World::new();
    let shadow = POLICY.mode(Mode::Shadow);
    assert!(world.call(shadow).await.1.recorded(), "shadow mode records the result");
    let (result, outcome) = world.call(shadow).await;
    assert_eq!(result.unwrap(), 2, "runs again");
    assert!(outcome.executed() && !outcome.recorded());
    assert_eq!(outcome.bypassed(), Some(Refusal::Replay));
    assert_eq!(outcome.disposition(), Disposition::Ack);
    assert_eq!(world.call(POLICY).await.0.unwrap(), 1, "the record keeps the first result");

    let world = World::new();
    let running = world.hang(shadow.in_progress(InProgress::Wait(LEASE))).await;
    let (_, outcome) = world.call(shadow.in_progress(InProgress::Wait(LEASE))).await;
    assert!(outcome.executed() && !outcome.waited());
    assert_eq!(outcome.bypassed(), Some(Refusal::InProgress));
    drop(running);

    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Misconfigured));
    let (result, outcome) = world.call(shadow).await;
    assert!(result.is_ok());
    assert_eq!(outcome.bypassed(), Some(Refusal::Store));
    let operation = Operation::new(&world.store, Key::new("test", ""), shadow);
    let (_, outcome) = observe(operation.run(world.body())).await;
    assert_eq!(outcome.bypassed(), Some(Refusal::MissingKey));
}

#[tokio::test]
async fn in_shadow_mode_no_failure_of_the_library_reaches_the_caller() {
    let world = World::new();
    world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Misconfigured));
    let (result, outcome) = world.call(POLICY.mode(Mode::Shadow)).await;
    assert_eq!(result.unwrap(), 1);
    assert!(!outcome.recorded());
    assert_eq!(outcome.disposition(), Disposition::Ack);
}

#[tokio::test]
async fn a_switch_of_the_mode_applies_to_the_next_call() {
    static SWITCH: ModeSwitch = ModeSwitch::new(Mode::Off);
    let world = World::new();
    let policy = POLICY.mode_switch(&SWITCH);
    for n in 1..=2 {
        let (result, outcome) = world.call(policy).await;
        assert_eq!(result.unwrap(), n);
        assert_eq!(outcome.bypassed(), None);
    }
    assert_eq!(world.store.count(StoreCall::Reserve), 0, "in mode off a call makes no store call");
    SWITCH.set(Mode::Enforce);
    assert_eq!(world.call(policy).await.0.unwrap(), 3);
    assert!(world.call(policy).await.1.replayed());
}

#[tokio::test]
async fn the_current_attempt_is_known_to_the_body_only() {
    let world = World::new();
    assert!(current().is_err());
    let inside = async {
        tokio::task::yield_now().await;
        let attempt = current().expect("inside");
        assert_eq!((attempt.key().text(), attempt.number()), ("k", 1));
        assert!(attempt.lease_remaining() <= LEASE && !attempt.lease_remaining().is_zero());
        attempt.confirm_lease().await?;
        Ok::<_, Error>(attempt.child_key("charge"))
    };
    let mut call = Box::pin(world.operation(POLICY).run(inside));
    assert!(poll_once(call.as_mut()).await.is_pending());
    assert!(current().is_err(), "a thread has a current attempt only while it polls the body");
    let child = call.await.unwrap();
    assert!(current().is_err());
    assert_eq!(world.store.count(StoreCall::Renew), 1);

    // The next attempt of the same key gets the same child key, and another key gets a different one.
    let next = async |name: &str| {
        let operation = Operation::new(&world.store, Ok(World::key(name)), POLICY.ttl(TTL * 2));
        let body = async { Ok::<_, Error>(current().unwrap().child_key("charge")) };
        operation.run(body).await.unwrap()
    };
    world.clock.advance(TTL);
    assert_eq!(next("k").await, child);
    assert_ne!(next("other").await, child);
}

#[tokio::test]
async fn a_body_without_a_reservation_has_an_attempt_of_its_own() {
    let world = World::new();
    let child = |policy: Policy, name: &'static str| {
        let operation = Operation::new(&world.store, Key::new("test", name), policy);
        observe(operation.run(async move {
            let Ok(attempt) = current() else { return Ok(None) };
            attempt.confirm_lease().await?;
            assert_eq!(attempt.is_protected(), attempt.number() > 0);
            assert_eq!(attempt.lease_remaining().is_zero(), !attempt.is_protected());
            Ok::<_, Error>(Some((attempt.child_key("charge"), attempt.number())))
        }))
    };
    // The engine must not take the attempt of an enclosing handler for the attempt of the inner call.
    world
        .operation(POLICY)
        .run(async {
            let (off, outcome) = child(POLICY.mode(Mode::Off), "a").await;
            let (off, number) = off?.unwrap();
            assert_eq!((number, outcome.key().unwrap().text()), (0, "a"));
            let (on, outcome) = child(POLICY, "a").await;
            assert_eq!(on?.unwrap(), (off.clone(), 1), "the body gets the same child key in every mode");
            assert!(outcome.executed());
            let (shadow, outcome) = child(POLICY.mode(Mode::Shadow), "a").await;
            assert_eq!(shadow?.unwrap(), (off, 0));
            assert_eq!((outcome.bypassed(), outcome.refusal()), (Some(Refusal::Replay), None));
            assert_eq!(child(POLICY.missing_key(MissingKey::Run), "").await.0?, None, "no key, no attempt");
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
}

#[tokio::test]
async fn a_result_whose_encoding_panics_still_ends_the_operation() {
    #[derive(Deserialize)]
    struct Bomb;
    impl Serialize for Bomb {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            panic!("in Serialize")
        }
    }
    let world = std::sync::Arc::new(World::new());
    let shared = std::sync::Arc::clone(&world);
    let panicked = tokio::spawn(async move {
        let body = async { Ok::<_, Error>(Bomb) };
        shared.operation(POLICY).run(body).await.map(|_| ())
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(world.state().await, State::Completed(StoredResult::Unencodable));
    assert!(matches!(world.call(POLICY).await.0, Err(Error::ResultUnavailable { .. })));
}

#[tokio::test]
async fn a_result_too_large_for_the_store_still_ends_the_operation() {
    let world = World::new();
    world.store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::TooLarge));
    let (result, outcome) = world.call(POLICY).await;
    assert_eq!(result.unwrap(), 1);
    assert!(outcome.recorded() && !outcome.result_stored(), "{outcome:?}");
    assert_eq!(outcome.disposition(), Disposition::Ack);
    assert_eq!(world.state().await, State::Completed(StoredResult::TooLarge { size: 1 }));
    let (result, outcome) = world.call(POLICY).await;
    let unavailable =
        matches!(&result, Err(Error::ResultUnavailable { problem: ResultProblem::TooLarge { size: 1, .. }, .. }));
    assert!(unavailable, "{result:?}");
    assert_eq!((world.runs(), outcome.disposition()), (1, Disposition::DeadLetter));

    // If the call is dropped, its completion is recorded too, without the result, which is too large.
    let world = World::new();
    world.store.next(StoreCall::Finish, Fault::Slow(2));
    // Two faults: the drop tries the write once, and if that fails or is not answered immediately, a task tries again.
    world.store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::TooLarge));
    world.store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::TooLarge));
    let body = world.body();
    let mut call = Box::pin(world.operation(POLICY).run(body));
    assert!(poll_once(call.as_mut()).await.is_pending());
    drop(call);
    world.store.context().flush().await;
    assert_eq!(world.state().await, State::Completed(StoredResult::TooLarge { size: 1 }));
}

#[tokio::test]
async fn an_error_that_the_store_can_not_hold_frees_the_key() {
    let world = World::new();
    world.store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::TooLarge));
    let call = async || {
        let body = async { Err::<u32, _>(Failure::Declined(7)) };
        observe(world.operation(POLICY).record_errors().run(body)).await
    };
    let (result, outcome) = call().await;
    assert_eq!(result, Err(Failure::Declined(7)));
    assert!(!outcome.recorded(), "{outcome:?}");
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    assert_eq!(world.state().await, State::Released);
    assert!(call().await.1.recorded());
}

#[tokio::test]
async fn the_confirmation_of_a_lost_lease_returns_lease_lost() {
    let world = World::new();
    let result = world
        .operation(POLICY)
        .run(async {
            let attempt = current().unwrap();
            world.clock.advance(LEASE);
            assert_eq!(attempt.lease_remaining(), Duration::ZERO);
            assert!(world.call(POLICY).await.1.took_over());
            attempt.confirm_lease().await
        })
        .await;
    assert!(matches!(result, Err(Error::LeaseLost { attempt: 1, .. })), "{result:?}");
}

#[tokio::test]
async fn a_handler_may_call_another_handler() {
    let world = World::new();
    let inner = || {
        let operation = Operation::new(&world.store, Ok(World::key("inner")), POLICY);
        operation.run(async {
            assert_eq!(current().unwrap().key().text(), "inner");
            Ok::<_, Error>(1)
        })
    };
    let outer = async {
        let (a, outcome) = observe(inner()).await;
        assert!(outcome.executed());
        assert_eq!(current().unwrap().key().text(), "k");
        let (b, outcome) = observe(inner()).await;
        assert!(outcome.replayed());
        Ok::<_, Error>(a? + b?)
    };
    let (sum, outcome) = observe(world.operation(POLICY).run(outer)).await;
    assert_eq!(sum.unwrap(), 2);
    assert_eq!(outcome.key().unwrap().text(), "k", "the outcome shows the outer call, not the calls of its body");
    assert!(outcome.executed());
}

#[tokio::test]
async fn a_handler_that_calls_itself_with_its_own_key_gets_in_progress() {
    let world = World::new();
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(10)));
    let result = world
        .operation(wait)
        .run(async {
            let between = Operation::new(&world.store, Ok(World::key("between")), wait);
            between.run(world.call_result(wait)).await
        })
        .await;
    // The clock stands still: a call that waited for itself would hang.
    assert!(matches!(result, Err(Error::InProgress { .. })), "{result:?}");
}

#[tokio::test]
async fn a_handler_without_a_reservation_may_wait_for_its_own_key() {
    let world = World::new();
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(10)));
    let (go, gate) = tokio::sync::oneshot::channel::<()>();
    let other = world.operation(wait).run(async {
        gate.await.ok();
        world.body().await
    });
    // The outer handler runs in mode `Off` and holds no reservation, so the inner call may wait.
    let off = wait.mode(Mode::Off);
    let outer = world.operation(off).run(world.call_result(wait));
    let finish = async {
        settle().await;
        go.send(()).unwrap();
    };
    let (other, outer, ()) = futures::join!(other, outer, finish);
    assert_eq!((other.unwrap(), outer.unwrap()), (1, 1));
}

impl World {
    /// Like [`World::call`], but without `observe`: the test observes several calls together.
    async fn call_result(&self, policy: Policy) -> Result<u32, Error> {
        self.operation(policy).run(self.body()).await
    }
}

#[tokio::test]
async fn the_last_failed_call_of_a_delivery_decides_its_disposition() {
    let world = World::new();
    let (result, outcome) = observe(async {
        world.call_result(POLICY).await?;
        world.call_result(POLICY.lease(Duration::ZERO)).await?;
        world.call_result(POLICY).await
    })
    .await;
    assert!(matches!(result, Err(Error::InvalidPolicy { .. })));
    assert!(outcome.misconfigured(), "the outcome shows the failed call");
    let (_, outcome) = observe(async { Ok::<(), Error>(()) }).await;
    assert!(
        matches!(outcome.disposition(), Disposition::Retry { .. }),
        "a delivery without a call is not acknowledged"
    );
    assert!(!outcome.executed());
}

#[test]
fn heartbeats_move_to_a_living_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let world = World::new();
    let (first, second) = (runtime(), runtime());
    // The renewal task starts on the first runtime.
    first.block_on(async {
        drop(world.hang(POLICY).await);
        settle().await;
    });
    second.block_on(async {
        let mut call = world.hang(POLICY).await;
        // The first runtime ends while a call on the second runtime holds a lease.
        first.shutdown_background();
        for _ in 0..10 {
            assert!(poll_once(call.as_mut()).await.is_pending());
            settle().await;
            world.clock.advance(LEASE / 3);
            settle().await;
        }
        assert!(matches!(world.call(POLICY).await.0, Err(Error::InProgress { .. })));
    });
}

#[tokio::test]
async fn errors_name_the_key_the_store_and_whether_the_body_ran() {
    let world = World::new();
    let running = world.hang(POLICY).await;
    let error = world.call(POLICY).await.0.unwrap_err();
    let text = error.to_string();
    for part in ["test/k", "memory", "the body did not run"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(anyhow::Error::from(error).to_string(), text);
    let error = world.call(POLICY).await.0.unwrap_err();
    assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::ResourceBusy);
    let boxed: Box<dyn std::error::Error + Send + Sync> = world.call(POLICY).await.0.unwrap_err().into();
    assert_eq!(boxed.to_string(), text);
    drop(running);
}

#[test]
fn debug_output_shows_no_payload_and_no_token() {
    let payload = StoredResult::Encoded {
        codec: idem_runtime::codec::CodecName::of::<Json>(),
        bytes: br#"{"card":"4111"}"#.to_vec().into(),
    };
    assert!(!format!("{payload:?}").contains("4111"));
    let owner = idem_runtime::store::OwnerToken::from_bytes([0xab; 16]);
    assert_eq!(format!("{owner:?}"), "abababababababab…");
}

#[test]
fn the_future_of_a_call_does_not_double_with_each_call_around_it() {
    fn wrap<F: Future<Output = Result<u32, Error>>>(
        world: &World,
        body: F,
    ) -> impl Future<Output = Result<u32, Error>> {
        world.operation(POLICY).run(body)
    }
    let world = World::new();
    let plain = std::mem::size_of_val(&world.body());
    let (one, two, three) = {
        let one = wrap(&world, world.body());
        let two = wrap(&world, wrap(&world, world.body()));
        let three = wrap(&world, wrap(&world, wrap(&world, world.body())));
        (std::mem::size_of_val(&one), std::mem::size_of_val(&two), std::mem::size_of_val(&three))
    };
    let layer = one - plain;
    println!("a plain future of {plain} bytes; {layer} more for each protected call around it");
    assert!(layer <= 1072, "{layer}");
    assert!(two <= one + layer + 16 && three <= two + layer + 16, "{one} {two} {three}");
}
