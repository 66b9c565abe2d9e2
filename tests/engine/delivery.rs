//! Outcome of a whole delivery: no failure is acknowledged, and every uncertain effect is reported.

use std::sync::Mutex;

use idem_runtime::policy::{Backoff, Doubt, Uncertain};

use super::super::*;

fn retries(outcome: &Outcome) -> Duration {
    match outcome.disposition() {
        Disposition::Retry { after } => {
            assert!(!after.is_zero(), "a hot loop: {outcome:?}");
            after
        }
        other => panic!("{other:?}: {outcome:?}"),
    }
}

#[tokio::test]
async fn a_delivery_that_fails_after_a_call_that_succeeded_is_not_acknowledged() {
    let world = World::new();
    for replayed in [false, true] {
        let (_, outcome) = observe(async {
            world.call_result(POLICY).await?;
            Err::<(), Error>(std::io::Error::other("the commit was refused").into_error())
        })
        .await;
        assert_eq!((outcome.executed(), outcome.replayed(), outcome.recorded()), (!replayed, replayed, true));
        retries(&outcome);
    }
    assert_eq!(world.runs(), 1);
}

trait IntoError {
    fn into_error(self) -> Error;
}

impl IntoError for std::io::Error {
    /// Converts to some `Error`, whose kind does not matter here.
    fn into_error(self) -> Error {
        Error::NoAttempt
    }
}

#[tokio::test]
async fn a_call_whose_error_is_swallowed_is_delivered_again_unless_the_error_is_recorded() {
    let world = World::new();
    let running = world.hang(POLICY).await;
    let (result, outcome) = observe(async {
        let _ = world.call_result(POLICY).await;
        Ok::<_, Error>(())
    })
    .await;
    assert!(result.is_ok());
    assert_eq!(outcome.refusal(), Some(Refusal::InProgress));
    retries(&outcome);
    drop(running);

    // A failed call leads to a retry of the delivery, even if a later call succeeds.
    let running = world.hang(POLICY).await;
    let other = Operation::new(&world.store, Ok(World::key("other")), POLICY);
    let (_, outcome) = observe(async {
        let _ = world.call_result(POLICY).await;
        other.run(world.body()).await
    })
    .await;
    assert!(outcome.recorded(), "the outcome of the last call");
    retries(&outcome);
    drop(running);

    let world = World::new();
    for _ in 0..2 {
        let failing = world.operation(POLICY).record_errors().run(async { Err::<u32, _>(Failure::Declined(1)) });
        let (_, outcome) = observe(async {
            let _ = failing.await;
            Ok::<_, Error>(())
        })
        .await;
        assert_eq!(outcome.disposition(), Disposition::Ack, "the consumer has dealt with a failure that is final");
    }
}

#[tokio::test]
async fn the_outcome_of_a_dropped_call_shows_the_phase_in_which_it_was_dropped() {
    // The call is dropped while its key is being reserved.
    let world = World::new();
    world.store.next(StoreCall::Reserve, Fault::Hang);
    let (_, outcome) = observe(cut_off(Box::pin(world.call_result(POLICY)))).await;
    assert!(outcome.observed() && outcome.cancelled() && !outcome.executed() && !outcome.uncertain(), "{outcome:?}");
    retries(&outcome);

    // The call is dropped while its body runs.
    let world = World::new();
    let hanging = world.operation(POLICY).run(std::future::pending::<Result<u32, Error>>());
    let (_, outcome) = observe(cut_off(Box::pin(hanging))).await;
    assert!(outcome.cancelled() && outcome.executed() && outcome.uncertain() && !outcome.recorded(), "{outcome:?}");
    assert_eq!((outcome.key().unwrap().text(), outcome.attempt()), ("k", Some(1)));
    retries(&outcome);
    assert_eq!(world.state().await, State::Released);

    // The call is dropped while its result is being recorded; the recording continues.
    let world = World::new();
    world.store.next(StoreCall::Finish, Fault::Slow(3));
    let (_, outcome) = observe(cut_off(Box::pin(world.call_result(POLICY)))).await;
    assert!(outcome.cancelled() && outcome.executed() && outcome.uncertain() && !outcome.recorded(), "{outcome:?}");
    retries(&outcome);
    world.store.context().flush().await;
    assert!(world.call(POLICY).await.1.replayed());
}

/// Polls `call` once and drops it, as a time-out does.
async fn cut_off(mut call: std::pin::Pin<Box<dyn Future<Output = Result<u32, Error>> + '_>>) -> Result<u32, Failure> {
    assert!(poll_once(call.as_mut()).await.is_pending());
    Err(Failure::Declined(0))
}

#[tokio::test]
async fn a_panic_ends_the_delivery_and_not_the_consumer() {
    for (policy, left) in [(POLICY, State::Released), (POLICY.on_crash(OnCrash::Fail), State::Interrupted)] {
        let world = World::new();
        let body = async {
            tokio::task::yield_now().await;
            panic!("on purpose");
        };
        let call = world.operation(policy).run(body);
        let (result, outcome): (Result<u32, Error>, _) = observe(call).catch_panics().await;
        let error = result.unwrap_err();
        assert!(matches!(&error, Error::Panicked { key: Some(key), attempt: Some(1), .. } if key.text() == "k"));
        assert!(error.is_uncertain() && error.to_string().contains("panicked in attempt 1"), "{error}");
        assert!(outcome.executed() && outcome.uncertain() && !outcome.recorded());
        retries(&outcome);
        assert_eq!(world.state().await, left);
    }
    // A panic outside of any call is caught, too.
    let (result, outcome) = observe(async { panic!("on purpose") }).catch_panics().await;
    let _: Result<(), Error> = result.map_err(|error| {
        assert!(matches!(error, Error::Panicked { key: None, attempt: None, .. }) && !error.is_uncertain());
        error
    });
    assert!(!outcome.observed() && !outcome.uncertain());
    retries(&outcome);
}

#[tokio::test]
async fn a_call_in_its_own_task_is_observed_in_that_task() {
    let store = MemoryStore::new();
    let call = move || {
        let operation = Operation::new(&store, Ok(World::key("k")), POLICY);
        operation.run(async { Ok::<_, Error>(1) })
    };
    let (joined, outcome) = observe(tokio::spawn(call())).await;
    assert_eq!(joined.unwrap().unwrap(), 1);
    assert!(!outcome.observed(), "an outcome without a call is not observed");
    retries(&outcome);
    let (result, outcome) = tokio::spawn(observe(call())).await.unwrap();
    assert_eq!((result.unwrap(), outcome.disposition()), (1, Disposition::Ack));
}

#[tokio::test]
async fn a_nested_observation_hides_no_call_from_the_outer_one() {
    let world = World::new();
    let (_, outcome) = observe(async {
        let (result, inner) = observe(world.call_result(POLICY)).await;
        assert_eq!(inner.disposition(), Disposition::Ack);
        result
    })
    .await;
    assert_eq!((outcome.executed(), outcome.disposition()), (true, Disposition::Ack));
}

#[tokio::test]
async fn the_pause_before_a_retry_grows_with_the_attempts() {
    let policy = POLICY.backoff(Backoff::new(Duration::from_secs(1), Duration::from_secs(8)));
    let world = World::new();
    for attempt in 1..=6 {
        let (_, outcome) = world.call_failing(policy).await;
        let most = Duration::from_secs(8).min(Duration::from_secs(1) * (1 << (attempt - 1)));
        let after = retries(&outcome);
        assert!((most / 2..=most).contains(&after), "attempt {attempt}: {after:?}");
    }
    for seed in 0..1_000 {
        assert!(!Backoff::new(Duration::ZERO, Duration::ZERO).after(u32::MAX, seed).is_zero());
    }
}

#[tokio::test]
async fn deliveries_become_rarer_during_a_long_outage() {
    let world = World::new();
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let mut deliveries = 0;
    while idem_runtime::clock::Clock::now(&world.clock).since_origin() < Duration::from_secs(600) {
        let (_, outcome) = driving(&world.clock, world.call(POLICY)).await;
        world.clock.advance(retries(&outcome));
        deliveries += 1;
    }
    assert!(deliveries <= 16, "a broker that delivers at most 20 times would dead-letter the message: {deliveries}");
    world.store.always(StoreCall::Reserve, Fault::None);
    world.call_failing(POLICY).await.0.unwrap_err();
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let (_, outcome) = driving(&world.clock, world.call(POLICY)).await;
    assert!(retries(&outcome) <= Duration::from_secs(1), "another outage");
}

#[tokio::test]
async fn a_message_is_retried_after_a_mistake_of_the_deployment() {
    let world = World::new();
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Misconfigured));
    let (result, outcome) = world.call(POLICY).await;
    assert!(result.unwrap_err().is_misconfigured() && outcome.misconfigured());
    retries(&outcome);
    let error = Error::from(Key::new("a/b", 1).unwrap_err());
    assert!(error.is_misconfigured() && matches!(error.disposition(), Disposition::Retry { .. }));
    // An invalid key in a message is no mistake of the deployment.
    let (result, outcome) = observe(Operation::new(&world.store, Key::new("test", ""), POLICY).run(world.body())).await;
    assert!(!result.unwrap_err().is_misconfigured() && !outcome.misconfigured());
    assert_eq!((outcome.disposition(), outcome.refusal()), (Disposition::DeadLetter, Some(Refusal::MissingKey)));
}

#[tokio::test]
async fn an_unrecordable_result_is_never_retried_immediately() {
    let world = World::new();
    world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
    world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
    let (result, outcome) = driving(&world.clock, world.call(POLICY)).await;
    assert!(matches!(result, Err(Error::Unrecorded { .. })), "{result:?}");
    assert!(outcome.uncertain() && outcome.executed() && !outcome.recorded());
    retries(&outcome);
}

#[tokio::test]
async fn a_mismatch_shows_both_fingerprints_and_the_age_of_the_record() {
    let world = World::new();
    let call = |payload: &'static str| world.operation(POLICY).fingerprint(payload).run(world.body());
    call("a").await.unwrap();
    world.clock.advance(Duration::from_secs(90));
    let Err(Error::FingerprintMismatch { payloads, .. }) = call("b").await else { panic!("another payload") };
    assert_eq!(payloads.presented, Some(idem_runtime::key::Fingerprint::of("b").unwrap()));
    assert_eq!(payloads.recorded, Some(idem_runtime::key::Fingerprint::of("a").unwrap()));
    assert_eq!(payloads.age, Some(Duration::from_secs(90)));
    let text = call("b").await.unwrap_err().to_string();
    for part in [payloads.presented.unwrap().short().to_string(), payloads.recorded.unwrap().short().to_string()] {
        assert!(text.contains(&part) && text.contains("90s ago"), "{text}");
    }
}

static DOUBTS: Mutex<Vec<(String, u32, Doubt)>> = Mutex::new(Vec::new());

fn note(uncertain: Uncertain<'_>) {
    let Uncertain { key, attempt, cause, .. } = uncertain;
    DOUBTS.lock().unwrap().push((key.text().to_owned(), attempt, cause));
    panic!("a panic in a hook of the test");
}

/// Uncertain effects of `key` that the hook received since the last call of this function.
fn noted(key: &str) -> Vec<(u32, Doubt)> {
    let mut doubts = DOUBTS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let told = doubts.iter().filter(|(it, ..)| it == key).map(|(_, attempt, cause)| (*attempt, *cause)).collect();
    doubts.retain(|(it, ..)| it != key);
    told
}

#[tokio::test]
async fn each_uncertain_effect_is_reported_once() {
    let world = World::new();
    let policy = POLICY.on_uncertain(note);
    let operation = |policy| Operation::new(&world.store, Ok(World::key("doubted")), policy);
    let hanging = |policy| operation(policy).run(std::future::pending::<Result<u32, Error>>());

    let mut dropped = Box::pin(hanging(policy));
    assert!(poll_once(dropped.as_mut()).await.is_pending());
    drop(dropped);
    assert_eq!(noted("doubted"), [(1, Doubt::Cancelled)]);

    let panicking = operation(policy).run(async { panic!("on purpose") });
    let (_, outcome): (Result<u32, Error>, _) = observe(panicking).catch_panics().await;
    assert!(outcome.uncertain());
    assert_eq!(noted("doubted"), [(2, Doubt::Panicked)]);

    let slow = policy.timeout(LEASE * 2);
    assert!(matches!(driving(&world.clock, hanging(slow)).await, Err(Error::TimedOut { .. })));
    assert_eq!(noted("doubted"), [(3, Doubt::TimedOut)]);

    world.store.next(StoreCall::Finish, Fault::Slow(1));
    let mut late = Box::pin(operation(policy).run(async {
        world.clock.advance(LEASE * 2);
        Ok::<u32, Error>(4)
    }));
    assert!(poll_once(late.as_mut()).await.is_pending());
    // A caller under `fail` must not take over from a body that may have had its effect. A caller in the same process
    // gets `InProgress`, because that process is still writing the end of the attempt. A caller in another process gets
    // `Interrupted`.
    let at_most_once = policy.on_crash(OnCrash::Fail);
    assert!(matches!(hanging(at_most_once).await, Err(Error::InProgress { attempt: 4, .. })));
    let elsewhere = world.memory.peer();
    let successor = Operation::new(&elsewhere, Ok(World::key("doubted")), at_most_once);
    assert!(matches!(successor.run(world.body()).await, Err(Error::Interrupted { .. })));
    assert_eq!(noted("doubted"), [(4, Doubt::Interrupted)]);
    assert!(late.await.is_ok(), "no other attempt has taken over");

    // A call that is refused before its body, and a call that ends normally, have no uncertain effect.
    assert!(operation(policy).run(world.body()).await.is_ok(), "a replay");
    let mut replayed = Box::pin(hanging(policy));
    assert!(poll_once(replayed.as_mut()).await.is_ready());
    assert_eq!(noted("doubted"), []);
}
