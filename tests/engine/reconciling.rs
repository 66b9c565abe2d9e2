//! Effects in doubt: uncertain errors, and reconcilers.

use idem_runtime::Reconciliation;

use super::super::*;

const AFTER: Duration = Duration::from_secs(60);
const ASKS: Policy = POLICY.max_attempts(9);

impl World {
    /// Makes one call whose body counts its run and returns an error in doubt, and whose reconciler is `reconciler`.
    async fn call_doubtful(
        &self,
        policy: Policy,
        reconciler: impl Future<Output = Result<Reconciliation<u32>, Failure>>,
    ) -> (Result<u32, Failure>, Outcome) {
        let body = async {
            let number = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
            Err(Failure::Declined(number))
        };
        observe(self.operation(policy).uncertain_errors().reconcile(reconciler).run(body)).await
    }

    /// Makes one call whose body succeeds, and whose reconciler is `reconciler`.
    async fn call_asking(
        &self,
        policy: Policy,
        reconciler: impl Future<Output = Result<Reconciliation<u32>, Error>>,
    ) -> (Result<u32, Error>, Outcome) {
        observe(self.operation(policy).reconcile(reconciler).run(self.body())).await
    }

    /// Leaves an operation in doubt after one run.
    async fn doubt(&self) {
        let (result, outcome) = self.call_doubtful(ASKS, async { unreachable!("nothing is in doubt yet") }).await;
        assert!(matches!(result, Err(Failure::Declined(1))), "{result:?}");
        assert!(outcome.executed() && outcome.uncertain() && !outcome.recorded());
        assert!(matches!(outcome.disposition(), Disposition::Retry { .. }), "{outcome:?}");
        assert_eq!(self.state().await, State::Interrupted);
    }
}

async fn unknown<E>() -> Result<Reconciliation<u32>, E> {
    Ok(Reconciliation::Unknown { ask_again: AFTER })
}

#[tokio::test]
async fn an_uncertain_error_runs_no_second_body_and_needs_an_operator() {
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        let world = World::new();
        for delivery in 1..=3 {
            let body = async {
                let number = world.runs.fetch_add(1, Ordering::SeqCst) + 1;
                Err::<u32, _>(Failure::Declined(number))
            };
            let policy = POLICY.on_crash(on_crash);
            let judge = |_: &Failure| OnError::Uncertain;
            let operation = world.operation(policy).record_errors_if(judge);
            let (result, outcome) = observe(operation.run(body)).await;
            match delivery {
                1 => assert!(matches!(result, Err(Failure::Declined(1))), "{result:?}"),
                _ => assert!(
                    matches!(&result, Err(Failure::Idempotency(error)) if error.0.contains("in doubt")),
                    "{result:?}"
                ),
            }
            assert!(outcome.uncertain(), "delivery {delivery}");
            assert_eq!(outcome.disposition(), Disposition::DeadLetter);
        }
        assert_eq!((world.runs(), world.state().await), (1, State::Interrupted));
    }
}

#[tokio::test]
async fn a_reconciler_supplies_the_result_of_an_effect_that_has_happened() {
    let world = World::new();
    world.doubt().await;
    let (reserves, finishes) = (world.store.count(StoreCall::Reserve), world.store.count(StoreCall::Finish));
    let reconciler = async {
        assert_eq!(current()?.number(), 2);
        Ok(Reconciliation::Done(7))
    };
    let (result, outcome) = world.call_asking(ASKS, reconciler).await;
    assert_eq!(result.unwrap(), 7);
    assert!(outcome.reconciled() && outcome.recorded() && !outcome.executed() && !outcome.uncertain());
    assert_eq!((outcome.attempt(), outcome.disposition()), (Some(2), Disposition::Ack));
    let calls = (world.store.count(StoreCall::Reserve) - reserves, world.store.count(StoreCall::Finish) - finishes);
    assert_eq!((calls, world.store.count(StoreCall::Begin)), ((1, 1), 1), "two calls, and the mark of the first run");
    let (duplicate, outcome) = world.call_asking(ASKS, async { unreachable!("it is settled") }).await;
    assert_eq!((duplicate.unwrap(), outcome.replayed(), world.runs()), (7, true, 1));
}

#[tokio::test]
async fn a_body_runs_in_the_attempt_whose_reconciler_said_that_nothing_happened() {
    let world = World::new();
    world.doubt().await;
    let (result, outcome) = world.call_asking(ASKS, async { Ok(Reconciliation::NotDone) }).await;
    assert_eq!(result.unwrap(), 2);
    assert!(outcome.executed() && !outcome.reconciled());
    assert_eq!((outcome.attempt(), outcome.disposition()), (Some(2), Disposition::Ack));
    assert_eq!(world.record().await.unwrap().attempts_used, 2);
}

#[tokio::test]
async fn an_unknown_effect_stays_in_doubt_and_its_message_comes_again() {
    let world = World::new();
    world.doubt().await;
    for attempt in 2..=4 {
        let (result, outcome) = world.call_asking(ASKS, unknown()).await;
        let Err(Error::Interrupted { ask_again: Some(AFTER), attempt: in_doubt, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(in_doubt, attempt - 1);
        assert!(outcome.uncertain() && !outcome.executed());
        assert_eq!(outcome.disposition(), Disposition::Retry { after: AFTER });
        let record = world.record().await.unwrap();
        assert_eq!((record.state, record.attempt, record.attempts_used), (State::Interrupted, attempt, 1));
    }
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn an_error_of_the_reconciler_leaves_the_doubt() {
    let world = World::new();
    world.doubt().await;
    let (result, outcome) = world.call_doubtful(ASKS, async { Err(Failure::Declined(77)) }).await;
    assert!(matches!(result, Err(Failure::Declined(77))), "the caller gets the error of the reconciler: {result:?}");
    assert!(outcome.uncertain() && matches!(outcome.disposition(), Disposition::Retry { .. }), "{outcome:?}");
    assert_eq!((world.state().await, world.runs()), (State::Interrupted, 1));
}

#[tokio::test]
async fn a_reconciler_that_is_dropped_or_panics_leaves_the_doubt() {
    let world = World::new();
    world.doubt().await;
    let mut dropped = Box::pin(world.call_asking(ASKS, std::future::pending()));
    assert!(poll_once(dropped.as_mut()).await.is_pending());
    let (duplicate, _) = world.call_asking(ASKS, unknown()).await;
    assert!(matches!(duplicate, Err(Error::InProgress { attempt: 2, .. })), "{duplicate:?}");
    drop(dropped);
    settle().await;
    assert_eq!(world.state().await, State::Interrupted);
    let operation = world.operation(ASKS).reconcile(async { panic!("as the test wants") });
    let (panicked, outcome) = observe(operation.run(world.body())).catch_panics().await;
    assert!(matches!(panicked, Err(Error::Panicked { .. })), "{panicked:?}");
    assert!(outcome.uncertain());
    settle().await;
    let record = world.record().await.unwrap();
    assert_eq!((record.state, record.attempts_used, world.runs()), (State::Interrupted, 1, 1));
    assert_eq!(world.call_asking(ASKS, async { Ok(Reconciliation::Done(7)) }).await.0.unwrap(), 7);
}

#[tokio::test]
async fn a_crash_of_body_or_reconciler_asks_the_next_reconciler() {
    let world = World::new();
    world.crash(POLICY.on_crash(OnCrash::Fail)).await;
    world.clock.advance(LEASE);
    assert!(matches!(world.call(POLICY).await.0, Err(Error::Interrupted { ask_again: None, .. })));
    assert_eq!(world.call_asking(ASKS, async { Ok(Reconciliation::Done(7)) }).await.0.unwrap(), 7);
    assert_eq!(world.runs(), 0);
}

#[tokio::test]
async fn max_attempts_limits_bodies_and_not_questions() {
    let world = World::new();
    let once = POLICY.max_attempts(1);
    world.doubt().await;
    assert!(matches!(world.call_asking(once, unknown()).await.0, Err(Error::Interrupted { .. })));
    let (result, outcome) = world.call_asking(once, async { Ok(Reconciliation::NotDone) }).await;
    assert!(matches!(result, Err(Error::AttemptsExhausted { attempts: 1, .. })), "{result:?}");
    assert_eq!((outcome.disposition(), outcome.refusal()), (Disposition::DeadLetter, Some(Refusal::AttemptsExhausted)));
    assert!(!outcome.uncertain(), "nothing is in doubt any more");
    let record = world.record().await.unwrap();
    assert_eq!((record.state, record.attempts_used, world.runs()), (State::Released, 1, 1));
}

#[tokio::test]
async fn the_number_of_questions_is_limited_until_an_operator_decides() {
    let world = World::new();
    world.doubt().await;
    let twice = ASKS.max_reconciliations(2);
    for _ in 0..2 {
        let (result, _) = world.call_asking(twice, unknown()).await;
        assert!(matches!(result, Err(Error::Interrupted { ask_again: Some(_), .. })), "{result:?}");
    }
    let (result, outcome) = world.call_asking(twice, unknown()).await;
    assert!(matches!(result, Err(Error::Interrupted { ask_again: None, .. })), "{result:?}");
    assert_eq!(outcome.disposition(), Disposition::DeadLetter);
}

#[tokio::test]
async fn shadow_mode_asks_no_reconciler() {
    let world = World::new();
    world.doubt().await;
    let shadow = ASKS.mode(idem_runtime::Mode::Shadow);
    let (result, outcome) = world.call_asking(shadow, async { unreachable!("nothing depends on the answer") }).await;
    assert_eq!((result.unwrap(), outcome.bypassed()), (2, Some(Refusal::Interrupted)));
    assert_eq!(world.state().await, State::Interrupted);
}

/// The call is dropped after another attempt has taken over and left a doubt, which the clean-up of the call finds.
#[tokio::test]
async fn the_clean_up_of_a_dropped_call_leaves_the_doubt_of_a_later_attempt() {
    let world = World::new();
    world.store.next(StoreCall::Begin, Fault::Hang);
    let mut dropped = Box::pin(world.call_asking(ASKS, async { unreachable!("nothing is in doubt yet") }));
    assert!(poll_once(dropped.as_mut()).await.is_pending());
    world.clock.advance(LEASE);
    world.doubt().await;
    drop(dropped);
    settle().await;
    assert_eq!(world.state().await, State::Interrupted);
    assert!(matches!(world.call_asking(ASKS, unknown()).await.0, Err(Error::Interrupted { .. })));
    assert_eq!(world.runs(), 1);
}

/// The answers of the store are lost, and calls are dropped while they wait for an answer.
#[tokio::test]
async fn a_lost_reservation_in_doubt_leaves_the_doubt() {
    for fault in [Fault::After, Fault::Before(StoreErrorKind::Unavailable), Fault::Hang] {
        let world = World::new();
        world.doubt().await;
        world.store.always(StoreCall::Reserve, fault);
        let mut call = Box::pin(world.call_asking(ASKS, async { Ok(Reconciliation::NotDone) }));
        match fault {
            Fault::Hang => assert!(poll_once(call.as_mut()).await.is_pending()),
            _ => {
                let (result, _) = driving(&world.clock, call.as_mut()).await;
                assert!(matches!(result, Err(Error::Store { .. })), "{result:?}");
            }
        }
        drop(call);
        world.store.always(StoreCall::Reserve, Fault::None);
        for _ in 0..16 {
            settle().await;
            world.clock.advance(LEASE / 4);
        }
        let (duplicate, _) = world.call(POLICY).await;
        assert!(matches!(duplicate, Err(Error::Interrupted { .. })), "{fault:?}: {duplicate:?}");
        assert_eq!(world.runs(), 1, "{fault:?}");
    }
}
