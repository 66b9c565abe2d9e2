//! Steps whose effects are in doubt: crashes, uncertain errors and time limits inside of a step.

use std::pin::Pin;

use idem_runtime::policy::{Backoff, OnUndecodable, StepPolicy};
use idem_runtime::step::{StepBuilder, StepProblem};
use idem_runtime::{Reconciliation, StoreExt as _, Undecodable};

use super::super::*;
use super::steps::{Effects, lost, problem};

const PAUSE: Duration = Duration::from_secs(7);

fn wire() -> Result<StepBuilder, Error> {
    Ok(current()?.step("wire"))
}

impl World {
    /// Makes one call with this body, and moves the clock while the call waits.
    async fn call_of<T>(&self, body: impl Future<Output = Result<T, Error>>) -> Result<T, Error>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        self.moving(Box::pin(self.run(body)).as_mut(), Duration::from_millis(20)).await
    }

    /// Runs the body as a process that dies at the first await that does not end immediately.
    pub(super) async fn dies_in<T>(&self, body: impl Future<Output = Result<T, Error>>)
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let dead = FaultyStore::new(&self.store);
        let operation = Operation::new(&dead, Ok(Self::key("k")), POLICY);
        let mut call = Box::pin(operation.run(body));
        assert!(poll_once(call.as_mut()).await.is_pending());
        // Nothing renews or releases the lease of the dead process.
        std::mem::forget(call);
        for call in [StoreCall::Renew, StoreCall::Release] {
            dead.always(call, Fault::Hang);
        }
        self.clock.advance(LEASE * 2);
    }
}

/// Body of a step whose effect happens, and whose process then dies.
async fn effect_then_death(effects: &Effects, key: String) -> Result<u32, Error> {
    effects.happen(key);
    std::future::pending().await
}

#[tokio::test]
async fn under_fail_a_crash_inside_of_a_step_interrupts_the_operation() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async { wire()?.fail().run(async |step| effect_then_death(&effects, step.child_key()).await).await };
    world.dies_in(body).await;
    let body = async { wire()?.fail().run(async |step| Ok(effects.happen(step.child_key()))).await };
    let (ended, outcome) = observe(world.call_of(body)).await;
    assert!(matches!(problem(ended), StepProblem::Interrupted { attempt: 1, .. }));
    assert_eq!(outcome.disposition(), Disposition::DeadLetter);
    assert_eq!(world.state().await, State::Interrupted);
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn under_fail_the_beginning_is_confirmed_before_the_body() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let wired = wire()?.fail().run(async |step| {
            assert_eq!(world.store.count(StoreCall::Append), 1);
            Ok::<_, Error>(effects.happen(step.child_key()))
        });
        wired.await?;
        assert_eq!(world.store.count(StoreCall::Append), 2);
        Err::<u32, _>(Error::NoAttempt)
    };
    assert!(world.call_of(body).await.is_err());
    let body = async { wire()?.fail().run(async |step| Ok(effects.happen(step.child_key()))).await };
    assert_eq!(world.call_of(body).await.unwrap(), 1, "the journaled value is returned");
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn an_error_that_is_certain_lets_the_step_run_again() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async { wire()?.fail().run(async |_| Err::<u32, _>(Error::NoAttempt)).await };
    assert!(matches!(world.call_of(body).await, Err(Error::NoAttempt)));
    assert_eq!(world.store.count(StoreCall::Append), 2, "begun, undone");
    let body = async { wire()?.fail().run(async |step| Ok(effects.happen(step.child_key()))).await };
    assert_eq!(world.call_of(body).await.unwrap(), 1);
}

#[tokio::test]
async fn an_uncertain_error_of_a_step_under_fail_interrupts_the_operation() {
    let (world, effects) = (World::new(), Effects::default());
    for _ in 0..2 {
        let body = async {
            let wire = wire()?.irreversible().fail();
            wire.run(async |step| {
                effects.happen(step.child_key());
                Err::<u32, _>(Error::NoAttempt)
            })
            .await
        };
        assert!(world.call_of(body).await.is_err());
        assert_eq!(effects.count(), 1);
    }
    assert_eq!(world.state().await, State::Interrupted);
}

#[tokio::test]
async fn only_the_selected_errors_leave_the_effect_in_doubt() {
    let (world, effects) = (World::new(), Effects::default());
    for (error, runs) in [(Error::NoAttempt, 1), (lost(PAUSE), 2)] {
        let mut error = Some(error);
        let body = async {
            let wire = wire()?.irreversible().uncertain_errors_if(|error| matches!(error, Error::MessageLost { .. }));
            wire.fail()
                .run(async |step| {
                    effects.happen(step.child_key());
                    Err::<u32, _>(error.take().unwrap())
                })
                .await
        };
        assert!(world.call_of(body).await.is_err());
        assert_eq!(effects.count(), runs);
    }
    let body = async { wire()?.fail().run(async |step| Ok(effects.happen(step.child_key()))).await };
    assert!(matches!(world.call_of(body).await, Err(Error::Interrupted { .. })));
    assert_eq!(effects.count(), 2);
}

#[tokio::test]
async fn a_reconciler_decides_about_a_step_in_doubt() {
    for (answer, value, runs) in [(Reconciliation::Done(77), 77, 1), (Reconciliation::NotDone, 2, 2)] {
        let (world, effects) = (World::new(), Effects::default());
        let asked = AtomicU32::new(0);
        let body = async {
            let wire = wire()?.reconcile(async |_| unreachable!("nothing is in doubt"));
            wire.run(async |step| effect_then_death(&effects, step.child_key()).await).await
        };
        world.dies_in(body).await;
        let body = async {
            let key = current()?.child_key("wire");
            let wire = wire()?.reconcile(async |step| {
                assert_eq!(step.child_key(), key);
                asked.fetch_add(1, Ordering::SeqCst);
                Ok(answer.clone())
            });
            wire.run(async |step| Ok(effects.happen(step.child_key()))).await
        };
        assert_eq!(world.call_of(body).await.unwrap(), value);
        assert_eq!((effects.count(), asked.into_inner()), (runs, 1));
    }
}

#[tokio::test]
async fn a_reconciler_without_an_answer_is_asked_again() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        wire()?
            .reconcile(async |_| Ok(Reconciliation::NotDone))
            .uncertain_errors()
            .run(async |step| {
                effects.happen(step.child_key());
                Err::<u32, _>(Error::NoAttempt)
            })
            .await
    };
    assert!(world.call_of(body).await.is_err(), "an uncertain error");
    let body = async {
        let wire = wire()?.reconcile(async |_| Ok(Reconciliation::Unknown { ask_again: PAUSE }));
        wire.run(async |step| Ok(effects.happen(step.child_key()))).await
    };
    let (ended, outcome) = observe(world.call_of(body)).await;
    match problem(ended) {
        StepProblem::Unresolved { attempt: 1, ask_again, .. } => assert_eq!(ask_again, PAUSE),
        other => panic!("{other:?}"),
    }
    assert_eq!(outcome.disposition(), Disposition::Retry { after: PAUSE });
    let body = async {
        let wire = wire()?.reconcile(async |_| Err::<Reconciliation<u32>, _>(Error::NoAttempt));
        wire.run(async |step| Ok(effects.happen(step.child_key()))).await
    };
    assert!(matches!(world.call_of(body).await, Err(Error::NoAttempt)), "the error of the reconciler");
    let body = async {
        let wire = wire()?.reconcile(async |_| Ok(Reconciliation::Done(5)));
        wire.run(async |step| Ok(effects.happen(step.child_key()))).await
    };
    assert_eq!(world.call_of(body).await.unwrap(), 5);
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn a_step_in_doubt_is_never_recorded_as_the_end_of_its_operation() {
    let world = World::new();
    for delivery in 0..3 {
        let body = async {
            let wire =
                wire().map_err(Failure::from)?.reconcile(async |_| Ok(Reconciliation::Unknown { ask_again: PAUSE }));
            wire.uncertain_errors().run(async |_| Err::<u32, _>(Failure::Declined(1))).await
        };
        let ended = world.operation(POLICY).record_errors().run(body).await;
        assert_eq!(matches!(ended, Err(Failure::Declined(1))), delivery == 0, "{ended:?}");
        let record = world.memory.inspect(&World::key("k")).await.unwrap().unwrap().record;
        assert!(record.journal.is_some(), "{:?}", record.state);
    }
}

/// The error of another part of the handler must not end an operation whose step is in doubt: the journal would be
/// lost.
#[tokio::test]
async fn no_error_of_the_handler_ends_an_operation_with_a_step_in_doubt() {
    let (world, effects) = (World::new(), Effects::default());
    // A step that loses a race under `fail`.
    let body = async {
        let wire = wire().map_err(Failure::from)?.fail();
        let wire = wire.run(async |step| {
            effects.happen(step.child_key());
            std::future::pending::<Result<u32, Failure>>().await
        });
        let stock = async {
            yields(2).await;
            Err::<u32, _>(Failure::Declined(1))
        };
        futures::try_join!(wire, stock).map(|(wired, _)| wired)
    };
    let ended = world.operation(POLICY).record_errors().run(body).await;
    assert!(matches!(ended, Err(Failure::Declined(1))), "{ended:?}");
    assert_eq!(world.state().await, State::Interrupted);

    // A step that an earlier attempt left in doubt, and that this attempt does not reach.
    let (world, effects) = (World::new(), Effects::default());
    let body = async { wire()?.fail().run(async |step| effect_then_death(&effects, step.child_key()).await).await };
    world.dies_in(body).await;
    let body = async { Err::<u32, _>(Failure::Declined(2)) };
    world.operation(POLICY).record_errors().run(body).await.unwrap_err();
    assert!(world.memory.inspect(&World::key("k")).await.unwrap().unwrap().record.journal.is_some());
    assert_ne!(world.state().await.name(), "failed");
}

#[tokio::test]
async fn a_step_in_doubt_interrupts_its_operation_from_a_spawned_task_too() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async { wire()?.fail().run(async |step| effect_then_death(&effects, step.child_key()).await).await };
    world.dies_in(body).await;
    let body = async {
        let attempt = current().map_err(Failure::from)?;
        let task = tokio::spawn(async move { attempt.step("wire").fail().run(async |_| Ok::<_, Error>(1_u32)).await });
        task.await.unwrap().map_err(Failure::from)
    };
    world.operation(POLICY).record_errors().run(body).await.unwrap_err();
    assert_eq!(world.state().await, State::Interrupted);
}

#[tokio::test]
async fn a_body_after_a_reconciler_is_fenced_by_an_entry() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async { wire()?.fail().run(async |step| effect_then_death(&effects, step.child_key()).await).await };
    world.dies_in(body).await;
    world.store.always(StoreCall::Append, Fault::Before(StoreErrorKind::Unavailable));
    let body = async {
        let wire = wire()?.reconcile(async |_| Ok(Reconciliation::NotDone));
        wire.run(async |step| Ok(effects.happen(step.child_key()))).await
    };
    let ended = world.call_of(body).await;
    assert!(matches!(ended, Err(Error::Store { .. })), "{ended:?}");
    assert_eq!(effects.count(), 1, "the body did not run");
    world.store.always(StoreCall::Append, Fault::None);
    let body = async { wire()?.fail().run(async |step| Ok(effects.happen(step.child_key()))).await };
    assert!(matches!(problem(world.call_of(body).await), StepProblem::Interrupted { .. }), "still in doubt");
}

#[tokio::test]
async fn steps_that_fail_again_and_again_leave_room_for_the_others() {
    let world = World::new();
    let body = async {
        for _ in 0..600 {
            wire()?.fail().run(async |_| Err::<u32, _>(Error::NoAttempt)).await.unwrap_err();
        }
        current()?.step("other").run(async |_| Ok::<_, Error>(7_u32)).await
    };
    assert_eq!(world.call_of(body).await.unwrap(), 7);
}

#[tokio::test]
async fn a_step_that_is_not_polled_holds_up_no_other_step() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        world.store.next(StoreCall::Append, Fault::Slow(100));
        let mut charge = Box::pin(attempt.step("charge").run(async |_| Ok::<_, Error>(1_u32)));
        assert!(poll_once(charge.as_mut()).await.is_pending());
        // `charge` writes its entry, and is not polled while the next step runs.
        let progress = attempt.step("progress").run(async |_| Ok::<_, Error>(2_u32)).await?;
        Ok(progress + charge.await?)
    };
    assert_eq!(world.call_of(body).await.unwrap(), 3);
}

#[tokio::test]
async fn a_beginning_that_is_not_confirmed_runs_no_body() {
    for fault in [Fault::Before(StoreErrorKind::Unavailable), Fault::After] {
        let (world, effects) = (World::new(), Effects::default());
        let body = async {
            world.store.always(StoreCall::Append, fault);
            let refused = wire()?.fail().run(async |step| Ok(effects.happen(step.child_key()))).await;
            assert!(matches!(refused, Err(Error::Store { started: true, .. })), "{refused:?}");
            world.store.always(StoreCall::Append, Fault::None);
            current()?.step("other").run(async |_| Ok::<_, Error>(())).await?;
            Err::<u32, _>(Error::NoAttempt)
        };
        assert!(world.call_of(body).await.is_err());
        assert_eq!(effects.count(), 0);
        // The write of the other step has cancelled the beginning.
        let body = async { wire()?.fail().run(async |step| Ok(effects.happen(step.child_key()))).await };
        assert_eq!(world.call_of(body).await.unwrap(), 1, "{fault:?}");
    }
}

#[tokio::test]
async fn a_time_limit_leaves_the_effect_in_doubt() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let slow = wire()?.timeout(PAUSE).run(async |step| effect_then_death(&effects, step.child_key()).await).await;
        assert!(matches!(problem(slow), StepProblem::TimedOut { timeout: PAUSE, .. }));
        wire()?.fail().timeout(PAUSE).run(async |step| effect_then_death(&effects, step.child_key()).await).await
    };
    assert!(matches!(problem(world.call_of(body).await), StepProblem::TimedOut { .. }));
    assert_eq!(effects.count(), 2, "without `fail` the step may run again");
    let body = async { wire()?.fail().run(async |step| Ok(effects.happen(step.child_key()))).await };
    assert!(matches!(world.call_of(body).await, Err(Error::Interrupted { .. })));
}

#[tokio::test]
async fn a_retried_step_runs_in_place_and_is_journaled_once() {
    let (world, effects) = (World::new(), Effects::default());
    let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(3));
    let runs = std::sync::Mutex::new(Vec::new());
    let body = async {
        let wire = wire()?.fail().timeout(PAUSE).retry(5, backoff);
        let wired = wire.run(async |step| {
            runs.lock().unwrap().push(world.clock.now());
            match effects.happen(step.child_key()) {
                5 => Ok(5),
                _ => Err(Error::NoAttempt),
            }
        });
        wired.await
    };
    assert_eq!(world.call_of(body).await.unwrap(), 5);
    assert_eq!(world.store.count(StoreCall::Append), 2);
    // Each pause is at least half of its length, and the clock moves by 20 ms.
    let runs = runs.into_inner().unwrap();
    let pauses: Vec<_> = runs.windows(2).map(|pair| pair[1].saturating_since(pair[0]).as_millis()).collect();
    for (pause, length) in pauses.iter().zip([1000, 2000, 3000, 3000]) {
        assert!((length / 2..=length + 20).contains(pause), "{pauses:?}");
    }
    assert_eq!(pauses.len(), 4);
}

#[tokio::test]
async fn tries_end_with_the_last_error_or_with_a_doubt() {
    let (world, effects) = (World::new(), Effects::default());
    let backoff = Backoff::new(PAUSE, PAUSE);
    let body = async {
        let first = current()?.step("first").retry(2, backoff).run(async |step| {
            effects.happen(step.child_key());
            Err::<u32, _>(Error::NoAttempt)
        });
        assert!(matches!(first.await, Err(Error::NoAttempt)));
        assert_eq!(effects.count(), 2);
        let wire = wire()?.irreversible().fail().retry(9, backoff);
        wire.run(async |step| {
            effects.happen(step.child_key());
            Err::<u32, _>(Error::NoAttempt)
        })
        .await
    };
    assert!(world.call_of(body).await.is_err());
    assert_eq!(effects.count(), 3, "an uncertain error is not tried again");
}

#[tokio::test]
async fn a_renamed_step_continues_under_its_new_name() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        current()?.step("pay").run(async |step| Ok::<_, Error>(effects.happen(step.child_key()))).await?;
        let refund = current()?.step("pay back").fail();
        refund.run(async |step| effect_then_death(&effects, step.child_key()).await).await
    };
    world.dies_in(body).await;
    let body = async {
        let attempt = current()?;
        let charge = attempt.step("charge").was("pay");
        let charged = charge.run(async |step| Ok::<_, Error>(effects.happen(step.child_key()))).await?;
        let twice = attempt.step("pay").run(async |step| Ok(effects.happen(step.child_key()))).await;
        assert!(matches!(problem(twice), StepProblem::UsedTwice));
        let refund = attempt.step("refund").was("pay back").reconcile(async |step| {
            assert_eq!(step.child_key(), step.attempt().child_key("pay back"));
            Ok(Reconciliation::NotDone)
        });
        let refunded = refund.run(async |step| {
            effects.happen(step.child_key());
            Err::<u32, _>(Error::NoAttempt)
        });
        assert!(refunded.await.is_err());
        Err::<u32, _>(lost(Duration::from_secs(charged.into())))
    };
    let ended = world.call_of(body).await;
    assert!(matches!(ended, Err(Error::MessageLost { retry_after, .. }) if retry_after.as_secs() == 1), "{ended:?}");
    let body = async {
        let refund = current()?.step("refund").was("pay back").fail();
        refund.run(async |step| Ok(effects.happen(step.child_key()))).await
    };
    assert_eq!(world.call_of(body).await.unwrap(), 4, "the certain error has ended the doubt under the old name");
    // A doubt under the old name ends with the step under its new name.
    let world = World::new();
    let body = async {
        current()?.step("pay").fail().run(async |step| effect_then_death(&effects, step.child_key()).await).await
    };
    world.dies_in(body).await;
    let body = async {
        let charge = current()?.step("charge").was("pay").reconcile(async |_| Ok(Reconciliation::Done(9_u32)));
        charge.run(async |_| Ok::<_, Error>(0)).await?;
        Err::<u32, _>(Error::NoAttempt)
    };
    assert!(world.call_of(body).await.is_err());
    let strict = async {
        current()?.set_step_policy(StepPolicy::new().strict());
        current()?.step("charge").fail().run(async |_| Ok::<_, Error>(0_u32)).await
    };
    assert_eq!(world.call_of(strict).await.unwrap(), 9);
    let keys = effects.0.lock().unwrap();
    assert_eq!(keys[1], keys[3]);
}

#[tokio::test]
async fn a_step_that_loses_a_race_is_in_doubt_within_its_attempt() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let attempt = current()?;
        for name in ["plain", "wire"] {
            let step = attempt.step(name);
            let lost: Pin<Box<dyn Future<Output = Result<u32, Error>>>> = match name {
                "plain" => Box::pin(step.run(async |step| effect_then_death(&effects, step.child_key()).await)),
                _ => Box::pin(step.fail().run(async |step| effect_then_death(&effects, step.child_key()).await)),
            };
            futures::future::select(lost, Box::pin(yields(2))).await;
        }
        assert_eq!(effects.count(), 2);
        attempt.step("plain").run(async |step| Ok::<_, Error>(effects.happen(step.child_key()))).await?;
        attempt.step("wire").fail().run(async |step| Ok(effects.happen(step.child_key()))).await
    };
    assert!(matches!(problem(world.call_of(body).await), StepProblem::Interrupted { attempt: 1, .. }));
    assert_eq!(effects.count(), 3);
}

#[tokio::test]
async fn other_inputs_leave_a_step_in_doubt() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let wire = wire()?.fingerprint("10 EUR").reconcile(async |_| Ok(Reconciliation::NotDone));
        wire.run(async |step| effect_then_death(&effects, step.child_key()).await).await
    };
    world.dies_in(body).await;
    for (inputs, is_refused) in [("20 EUR", true), ("10 EUR", false)] {
        let body = async {
            let wire = wire()?.fingerprint(inputs).reconcile(async |_| Ok(Reconciliation::Done(1)));
            wire.run(async |step| Ok(effects.happen(step.child_key()))).await
        };
        match (is_refused, world.call_of(body).await) {
            (true, refused) => assert!(matches!(problem(refused), StepProblem::OtherInputs { attempt: 1, .. })),
            (false, ended) => assert_eq!(ended.unwrap(), 1),
        }
    }
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn a_journaled_value_of_an_older_type_is_migrated() {
    fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        let old: u32 = recorded.decode()?;
        Json::encode(&format!("charge {old}"))
    }
    let world = World::new();
    let body = async {
        current()?.step("charge").run(async |_| Ok::<_, Error>(7_u32)).await?;
        Err::<u32, _>(Error::NoAttempt)
    };
    assert!(world.call_of(body).await.is_err());
    let body = async {
        let charge = current()?.step("charge").on_undecodable(OnUndecodable::Migrate(migrate));
        charge.run(async |_| Ok::<_, Error>(String::new())).await
    };
    assert_eq!(world.call_of(body).await.unwrap(), "charge 7");
}

#[tokio::test]
async fn a_journaled_value_of_another_type_is_refused_and_does_not_run_again() {
    fn fails(_: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        Err("no such charge".into())
    }
    fn migrates_wrongly(_: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        Json::encode(&[1, 2])
    }
    let (world, effects) = (World::new(), Effects::default());
    let first_version = async || {
        let charge =
            current()?.step("charge").run(async |step| Ok::<_, Error>(effects.happen(step.child_key()))).await?;
        Err::<u32, _>(lost(Duration::from_secs(charge.into())))
    };
    assert!(matches!(world.call_of(first_version()).await, Err(Error::MessageLost { .. })));
    let next_version = async |reaction| {
        let body = async {
            let charge = current()?.step("charge").on_undecodable(reaction);
            charge.run(async |_| -> Result<String, Error> { unreachable!("the step has ended") }).await
        };
        let (ended, outcome) = observe(world.call_of(body)).await;
        let error = ended.unwrap_err();
        assert!(error.is_misconfigured(), "{error}");
        assert!(matches!(outcome.disposition(), Disposition::Retry { .. }), "{outcome:?}");
        let text = error.to_string();
        match problem::<String>(Err(error)) {
            StepProblem::ValueUnavailable { attempt: 1, problem, .. } => (*problem, text),
            other => panic!("{other:?}"),
        }
    };
    for _ in 0..2 {
        let (problem, text) = next_version(OnUndecodable::Error).await;
        assert!(matches!(problem, ResultProblem::Undecodable { .. }), "{problem}");
        assert!(text.contains("`on_undecodable`"), "{text}");
    }
    let (problem, _) = next_version(OnUndecodable::Migrate(fails)).await;
    assert!(
        matches!(&problem, ResultProblem::MigrationFailed { source, .. } if source.to_string() == "no such charge")
    );
    let (problem, _) = next_version(OnUndecodable::Migrate(migrates_wrongly)).await;
    assert!(matches!(problem, ResultProblem::MigratedUndecodable { .. }), "{problem}");
    // A version that reads the value continues after the step.
    let ended = world.call_of(first_version()).await;
    assert!(matches!(ended, Err(Error::MessageLost { retry_after, .. }) if retry_after.as_secs() == 1), "{ended:?}");
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn a_journaled_step_that_is_not_reached_is_an_error_in_a_strict_attempt() {
    let world = World::new();
    let body = async {
        current()?.step("charge").run(async |_| Ok::<_, Error>(7_u32)).await?;
        Err::<u32, _>(Error::NoAttempt)
    };
    assert!(world.call_of(body).await.is_err());
    let strict = async {
        current()?.set_step_policy(StepPolicy::new().strict());
        Ok(1_u32)
    };
    let (refused, outcome) = observe(world.call_of(strict)).await;
    assert!(matches!(problem(refused), StepProblem::NotReached { attempt: 1, .. }));
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }), "{outcome:?}");
    let strict = async {
        current()?.set_step_policy(StepPolicy::new().strict());
        current()?.step("charge").run(async |_| Ok::<_, Error>(0_u32)).await?;
        Err::<u32, _>(Error::NoAttempt)
    };
    assert!(matches!(world.call_of(strict).await, Err(Error::NoAttempt)));
    assert_eq!(world.call_of(async { Ok::<_, Error>(2_u32) }).await.unwrap(), 2, "a warning by default");
}

#[tokio::test]
async fn each_step_is_counted_with_its_outcome() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let attempt = current()?;
        attempt.step("ran").run(async |_| Ok::<_, Error>(7_u32)).await?;
        assert!(attempt.step("failed").fail().run(async |_| Err::<u32, _>(Error::NoAttempt)).await.is_err());
        assert!(attempt.step("").run(async |_| Ok::<_, Error>(7_u32)).await.is_err());
        let lost = attempt.step("lost").run(async |step| effect_then_death(&effects, step.child_key()).await);
        futures::future::select(Box::pin(lost), Box::pin(yields(2))).await;
        let wire = attempt.step("wire").reconcile(async |_| Ok(Reconciliation::NotDone)).uncertain_errors();
        wire.run(async |_| Err::<u32, _>(Error::NoAttempt)).await
    };
    assert!(world.call_of(body).await.is_err());
    let body = async {
        let attempt = current()?;
        attempt.step("ran").run(async |_| Ok::<_, Error>(7_u32)).await?;
        let wire = attempt.step("wire").reconcile(async |_| Ok(Reconciliation::Done(1)));
        wire.run(async |_| Ok::<_, Error>(1_u32)).await?;
        world.store.always(StoreCall::Append, Fault::Before(StoreErrorKind::Unavailable));
        attempt.step("unconfirmed").run(async |_| Ok::<_, Error>(7_u32)).await
    };
    assert!(world.call_of(body).await.is_err());
    let metrics = world.store.metrics();
    for outcome in ["ran", "failed", "refused", "dropped", "in_doubt", "replayed", "reconciled", "unconfirmed"] {
        let labels = [("scope", "test"), ("outcome", outcome)];
        assert_eq!(metrics.count(&idem_runtime::metrics::STEPS, &labels), 1, "{outcome}");
    }
}

/// Delivers a message whose handler has this body. Returns its outcome.
async fn delivered(world: &World, body: impl Future<Output = Result<u32, Error>>) -> Outcome {
    observe(world.call_of(body)).await.1
}

#[tokio::test]
async fn the_outcome_counts_the_steps_that_a_delivery_leaves_in_doubt() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let attempt = current()?;
        attempt.step("ran").run(async |_| Ok::<_, Error>(7_u32)).await?;
        assert!(attempt.step("certain").fail().run(async |_| Err::<u32, _>(Error::NoAttempt)).await.is_err());
        assert!(attempt.step("plain").run(async |_| Err::<u32, _>(Error::NoAttempt)).await.is_err());
        Ok(1)
    };
    let outcome = delivered(&world, body).await;
    assert_eq!((outcome.steps_in_doubt(), outcome.uncertain()), (0, false));

    let world = World::new();
    let body = async {
        let attempt = current()?;
        for name in ["dropped", "runs again"] {
            let lost = attempt.step(name).run(async |step| effect_then_death(&effects, step.child_key()).await);
            futures::future::select(Box::pin(lost), Box::pin(yields(2))).await;
        }
        attempt.step("runs again").run(async |_| Ok::<_, Error>(7_u32)).await?;
        let backoff = Backoff::new(PAUSE, PAUSE);
        let mut runs = 0;
        let slow = attempt.step("timed out").timeout(PAUSE).retry(2, backoff).run(|_| {
            runs += 1;
            let is_first = runs == 1;
            async move { if is_first { std::future::pending().await } else { Err::<u32, _>(Error::NoAttempt) } }
        });
        assert!(slow.await.is_err(), "the second run has no effect, and the first one may have");
        let wire = attempt.step("uncertain").reconcile(async |_| Ok(Reconciliation::NotDone)).uncertain_errors();
        assert!(wire.run(async |_| Err::<u32, _>(Error::NoAttempt)).await.is_err());
        let wire = attempt.step("settled").reconcile(async |_| Ok(Reconciliation::NotDone)).uncertain_errors();
        assert!(wire.run(async |_| Err::<u32, _>(Error::NoAttempt)).await.is_err());
        let wire = attempt.step("settled").reconcile(async |_| Ok(Reconciliation::NotDone));
        assert!(wire.run(async |_| Err::<u32, _>(Error::NoAttempt)).await.is_err());
        world.store.always(StoreCall::Append, Fault::Before(StoreErrorKind::Unavailable));
        assert!(attempt.step("unconfirmed").run(async |_| Ok::<_, Error>(7_u32)).await.is_err());
        Ok(1)
    };
    let outcome = delivered(&world, body).await;
    assert_eq!(
        (outcome.steps_in_doubt(), outcome.uncertain()),
        (4, true),
        "dropped, timed out, uncertain, unconfirmed"
    );
    assert!(outcome.recorded(), "{outcome:?}");
    assert_eq!(outcome.disposition(), Disposition::Ack);
}

/// The journal says that the body has begun, until it says that the effect did not happen.
#[tokio::test]
async fn a_certain_error_is_no_doubt_once_the_journal_says_so() {
    let world = World::new();
    let failing = async |_| Err::<u32, _>(Error::NoAttempt);
    let body = async { current()?.step("pay").fail().run(failing).await };
    let (_, outcome) = observe(world.call_of(body)).await;
    assert_eq!(outcome.steps_in_doubt(), 0, "{outcome:?}");
    // The step is dropped in the pause before its second try.
    let body = async {
        let backoff = Backoff::new(Duration::from_secs(60), Duration::from_secs(60));
        let step = current()?.step("pay").fail().retry(2, backoff).run(failing);
        futures::future::select(Box::pin(step), Box::pin(yields(8))).await;
        Err::<u32, _>(Error::NoAttempt)
    };
    let (_, outcome) = observe(world.call_of(body)).await;
    assert_eq!(outcome.steps_in_doubt(), 1, "{outcome:?}");
}

#[tokio::test]
async fn the_outcome_counts_the_steps_of_a_call_that_is_cut_off() {
    let effects = Effects::default();
    let step = |step: StepBuilder| step.run(async |step| effect_then_death(&effects, step.child_key()).await);
    // A time-out around the call. The time-out holds the call until it is dropped itself.
    let world = World::new();
    let (mut call, mut polls) = (Box::pin(world.run(async { step(wire()?).await })), 0);
    let time_out = poll_fn(move |cx| {
        polls += 1;
        assert!(call.as_mut().poll(cx).is_pending());
        cx.waker().wake_by_ref();
        if polls < 3 { Poll::Pending } else { Poll::Ready(Err::<u32, _>(Error::NoAttempt)) }
    });
    let (_, outcome) = observe(time_out).await;
    assert_eq!((outcome.steps_in_doubt(), outcome.cancelled()), (1, true), "{outcome:?}");
    // A time-out around a nested observation.
    let world = World::new();
    let nested = async {
        let nested = observe(world.run(async { step(wire()?).await }));
        futures::future::select(Box::pin(nested), Box::pin(yields(3))).await;
        Ok::<_, Error>(())
    };
    let (_, outcome) = observe(nested).await;
    assert_eq!(outcome.steps_in_doubt(), 1, "{outcome:?}");
    // A nested observation that ends.
    let world = World::new();
    let nested = async {
        let body = async { wire()?.run(async |_| Err::<u32, _>(Error::NoAttempt)).await };
        observe(world.run(body)).await.0?;
        Ok::<_, Error>(())
    };
    assert_eq!(observe(nested).await.1.steps_in_doubt(), 0);
    let world = World::new();
    let nested = async {
        let body = async {
            futures::future::select(Box::pin(step(wire()?)), Box::pin(yields(2))).await;
            Ok(1_u32)
        };
        observe(world.run(body)).await.0
    };
    let (_, outcome) = observe(nested).await;
    assert_eq!((outcome.steps_in_doubt(), outcome.recorded()), (1, true), "{outcome:?}");
    // A panic, and the `timeout` of the handler.
    let world = World::new();
    let body = async { wire()?.run(async |_| -> Result<u32, Error> { panic!("expected by the test") }).await };
    let (_, outcome) = observe(world.run(body)).catch_panics().await;
    assert_eq!((outcome.steps_in_doubt(), outcome.executed()), (1, true), "{outcome:?}");
    let world = World::new();
    let call =
        Operation::new(&world.store, Ok(World::key("k")), POLICY.timeout(LEASE)).run(async { step(wire()?).await });
    let (ended, outcome) = observe(world.moving(Box::pin(call).as_mut(), Duration::from_secs(1))).await;
    assert!(matches!(ended, Err(Error::TimedOut { .. })), "{ended:?}");
    assert_eq!(outcome.steps_in_doubt(), 1, "{outcome:?}");
}

#[tokio::test]
async fn the_outcome_counts_the_steps_that_an_earlier_attempt_has_left_in_doubt() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async { wire()?.fail().run(async |step| effect_then_death(&effects, step.child_key()).await).await };
    world.dies_in(body).await;
    let ask = |answer| async { wire()?.reconcile(async |_| Ok(answer)).run(async |_| Ok::<_, Error>(0)).await };
    let outcome = delivered(&world, ask(Reconciliation::Unknown { ask_again: PAUSE })).await;
    assert_eq!((outcome.steps_in_doubt(), outcome.uncertain()), (1, true));
    let outcome = delivered(&world, ask(Reconciliation::Done(7))).await;
    assert_eq!((outcome.steps_in_doubt(), outcome.uncertain()), (0, false));
}

#[tokio::test]
async fn a_step_inside_of_a_reconciler_is_refused() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async { wire()?.fail().run(async |step| effect_then_death(&effects, step.child_key()).await).await };
    world.dies_in(body).await;
    let body = async {
        let wire = wire()?.reconcile(async |step| {
            let inner = step.attempt().step("inner").run(async |_| Ok::<_, Error>(0_u32)).await;
            assert!(matches!(problem(inner), StepProblem::Nested));
            Ok(Reconciliation::Done(1))
        });
        wire.run(async |_| Ok::<_, Error>(0_u32)).await
    };
    assert_eq!(world.call_of(body).await.unwrap(), 1);
}

#[tokio::test]
async fn a_body_without_a_reservation_runs_a_step_with_all_its_options() {
    let (world, effects) = (World::new(), Effects::default());
    for _ in 0..2 {
        let body = async {
            let wire = wire()?.irreversible().fingerprint("10 EUR").timeout(PAUSE).fail();
            wire.run(async |step| Ok::<_, Error>(effects.happen(step.child_key()))).await
        };
        world.operation(POLICY.mode(Mode::Off)).run(body).await.unwrap();
    }
    assert_eq!((effects.count(), world.store.count(StoreCall::Append)), (2, 0));
}

#[tokio::test]
async fn a_handler_with_each_form_of_step_can_be_spawned() {
    async fn handler(store: MemoryStore, lines: Vec<String>) -> Result<usize, Error> {
        let operation = Operation::new(&store, Ok(World::key("spawned")), POLICY);
        let body = async {
            let attempt = current()?;
            let (mut total, backoff) = (0, Backoff::new(PAUSE, PAUSE));
            for line in &lines {
                let one = attempt.step(("line", line)).fingerprint(line).run(async |_| {
                    yields(1).await;
                    Ok::<_, Error>(line.len())
                });
                total += one.await?;
                let two = attempt.step(("retried", line)).retry(2, backoff).run(|_| async {
                    yields(1).await;
                    Ok::<_, Error>(line.len())
                });
                let three = attempt.step(("asked", line)).reconcile(async |_| {
                    yields(1).await;
                    Ok(Reconciliation::Done(line.len()))
                });
                let three = three.timeout(PAUSE).run(async |_| Ok::<_, Error>(line.len()));
                total += futures::try_join!(two, three).map(|(two, three)| two + three)?;
            }
            Ok(total)
        };
        operation.run(body).await
    }
    let lines = vec!["cup".to_owned(), "tea".to_owned()];
    assert_eq!(tokio::spawn(handler(MemoryStore::new(), lines)).await.unwrap().unwrap(), 18);
}
