//! Steps: what is journaled, what runs again, and what is refused.

use std::pin::Pin;
use std::sync::Mutex;

use idem_runtime::key::Fingerprint;
use idem_runtime::operator::Resolution;
use idem_runtime::policy::{Backoff, StepPolicy};
use idem_runtime::step::{Step, StepProblem};
use idem_runtime::store::{Journal, StepState};
use idem_runtime::{MessagePack, Postcard, StoreExt as _};

use super::super::*;

/// Effects in the outside world, by the child key that each call presented.
#[derive(Default)]
pub(super) struct Effects(pub(super) Mutex<Vec<String>>);

impl Effects {
    pub(super) fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Makes an effect, and returns the number of effects.
    pub(super) fn happen(&self, key: String) -> u32 {
        self.0.lock().unwrap().push(key);
        u32::try_from(self.count()).unwrap()
    }

    async fn charge(&self, key: String) -> Result<u32, Error> {
        Ok(self.happen(key))
    }
}

/// Returns the problem of a step, and panics for any other result.
pub(super) fn problem<T: std::fmt::Debug>(result: Result<T, Error>) -> StepProblem {
    match result {
        Err(Error::Step { problem, .. }) => problem,
        other => panic!("{other:?}"),
    }
}

/// Error of a body, with a number that the test reads back.
pub(super) fn lost(retry_after: Duration) -> Error {
    Error::MessageLost { key: None, attempt: None, retry_after }
}

impl World {
    /// Makes one call with this body.
    pub(super) async fn run<T>(&self, body: impl Future<Output = Result<T, Error>>) -> Result<T, Error>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        self.operation(POLICY).run(body).await
    }

    /// Polls `call` to its end, and moves the clock by `pause` between two polls.
    pub(super) async fn moving<F: Future>(&self, mut call: std::pin::Pin<&mut F>, pause: Duration) -> F::Output {
        loop {
            match poll_once(call.as_mut()).await {
                std::task::Poll::Ready(ended) => return ended,
                std::task::Poll::Pending => {
                    self.clock.advance(pause);
                    settle().await;
                }
            }
        }
    }

    /// Makes a world whose key has a lapsed attempt with this journal.
    async fn with_lapsed_journal(bytes: Vec<u8>) -> Self {
        let world = Self::new();
        let mut request =
            idem_runtime::store::ReserveRequest::new(Self::key("k"), world.memory.context().new_owner(), LEASE, TTL);
        request.lease = Duration::from_millis(1);
        let reserved = world.memory.reserve(&request).await;
        let Ok(idem_runtime::store::Reservation::Granted { lease, .. }) = reserved else { panic!("{reserved:?}") };
        let written = world.memory.append(&lease, &Journal::new(bytes).unwrap()).await.unwrap();
        assert_eq!(written, idem_runtime::store::Verdict::Applied);
        world.clock.advance(LEASE);
        world
    }

    async fn journal(&self) -> Option<Journal> {
        self.memory.inspect(&Self::key("k")).await.unwrap().and_then(|found| found.record.journal)
    }
}

#[tokio::test]
async fn an_attempt_continues_after_the_steps_of_the_attempt_before() {
    let (world, effects) = (World::new(), Effects::default());
    for delivery in 1..=3 {
        let body = async {
            let attempt = current()?;
            let charge = attempt.step("charge").run(async |step| effects.charge(step.child_key()).await).await?;
            for sku in ["a", "b"] {
                let reserve = attempt.step(("reserve", sku));
                reserve.run(async |step| effects.charge(step.child_key()).await).await?;
            }
            match delivery {
                3 => Ok(charge),
                _ => Err(Error::NoAttempt),
            }
        };
        let ended = world.run(body).await;
        assert_eq!(ended.is_ok(), delivery == 3, "{ended:?}");
        assert_eq!(effects.count(), 3, "delivery {delivery}: each step has run once");
        assert_eq!(world.journal().await.is_some(), delivery < 3, "the journal ends with the operation");
    }
    assert_eq!(world.store.count(StoreCall::Append), 3, "one write for each step that ran");
    assert_eq!(world.store.count(StoreCall::Reserve), 3, "the journal comes with the reservation");
    assert_eq!(world.run(async { Ok(0_u32) }).await.unwrap(), 1, "the recorded result is that of the first charge");
}

#[tokio::test]
async fn a_step_has_the_child_key_of_its_name() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let attempt = current()?;
        attempt.step("charge").run(async |step| effects.charge(step.child_key()).await).await?;
        attempt.step(("line", 7)).run(async |step| effects.charge(step.child_key()).await).await?;
        Ok((attempt.child_key("charge"), attempt.child_key("line[7]")))
    };
    let keys = world.run(body).await.unwrap();
    assert_eq!(*effects.0.lock().unwrap(), [keys.0, keys.1]);
}

#[tokio::test]
async fn a_crash_runs_only_the_steps_that_had_not_ended() {
    let (world, effects) = (World::new(), Effects::default());
    let dies = async {
        current()?.step("charge").run(async |step| effects.charge(step.child_key()).await).await?;
        std::future::pending::<Result<u32, Error>>().await
    };
    world.dies_in(dies).await;
    let body = async {
        let attempt = current()?;
        assert_eq!(attempt.number(), 2);
        let charge = attempt.step("charge").run(async |step| effects.charge(step.child_key()).await).await?;
        let ship = attempt.step("ship").run(async |step| effects.charge(step.child_key()).await).await?;
        Ok((charge, ship))
    };
    assert_eq!(world.run(body).await.unwrap(), (1, 2));
    assert_eq!(effects.count(), 2);
}

#[tokio::test]
async fn a_name_is_used_once_in_an_attempt() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let attempt = current()?;
        let step = || attempt.step("charge").run(async |step| effects.charge(step.child_key()).await);
        step().await?;
        assert!(matches!(problem(step().await), StepProblem::UsedTwice));
        // Two steps with one name run concurrently.
        let (first, second) = futures::join!(
            attempt.step("ship").run(async |_| {
                yields(3).await;
                Ok::<_, Error>(())
            }),
            attempt.step("ship").run(async |_| effects.charge("twice".to_owned()).await),
        );
        first?;
        assert!(matches!(problem(second), StepProblem::UsedTwice));
        Ok(0_u32)
    };
    world.run(body).await.unwrap();
    assert_eq!(effects.count(), 1, "a refused step does not run");
}

#[tokio::test]
async fn a_step_without_a_value_may_be_tried_again() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let attempt = current()?;
        let failed: Result<u32, _> = attempt.step("charge").run(async |_| Err::<_, Error>(Error::NoAttempt)).await;
        assert!(matches!(failed, Err(Error::NoAttempt)));
        {
            let mut dropped =
                Box::pin(attempt.step("charge").run(async |_| std::future::pending::<Result<u32, Error>>().await));
            assert!(poll_once(dropped.as_mut()).await.is_pending());
        }
        assert_eq!(world.journal().await, None, "neither an error nor a dropped step is journaled");
        attempt.step("charge").run(async |step| effects.charge(step.child_key()).await).await
    };
    assert_eq!(world.run(body).await.unwrap(), 1);
}

#[tokio::test]
async fn steps_that_end_together_share_a_write() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        world.store.next(StoreCall::Append, Fault::Slow(2));
        let step = |name| attempt.step(name).run(async |_| Ok::<_, Error>(1));
        let steps = [step("a"), step("b"), step("c"), step("d")];
        futures::future::try_join_all(steps).await?;
        Err::<u32, _>(Error::NoAttempt)
    };
    assert!(world.run(body).await.is_err());
    assert!(world.store.count(StoreCall::Append) <= 2, "{} writes", world.store.count(StoreCall::Append));
    let ran = AtomicU32::new(0);
    let body = async {
        let attempt = current()?;
        for name in ["d", "c", "b", "a"] {
            attempt.step(name).run(async |_| Ok::<_, Error>(ran.fetch_add(1, Ordering::SeqCst))).await?;
        }
        Ok(0_u32)
    };
    world.run(body).await.unwrap();
    assert_eq!(ran.into_inner(), 0, "all four are in the journal, in any order");
}

#[tokio::test]
async fn other_inputs_under_one_name_are_refused() {
    let world = World::new();
    let step = async |inputs: Option<u32>| -> Result<u32, Error> {
        let step = current()?.step("charge");
        let step = match inputs {
            Some(inputs) => step.fingerprint(&inputs),
            None => step,
        };
        step.run(async |_| Ok::<_, Error>(inputs.unwrap_or_default())).await
    };
    let fails = async |inputs| {
        let body = async {
            let value = step(inputs).await;
            match value {
                Ok(value) => Err::<u32, _>(lost(Duration::from_secs(value.into()))),
                Err(error) => Err(error),
            }
        };
        world.run(body).await.unwrap_err()
    };
    let value = |error: Error| match error {
        Error::MessageLost { retry_after, .. } => retry_after.as_secs(),
        other => panic!("{other}"),
    };
    assert_eq!(value(fails(Some(7)).await), 7);
    assert_eq!(value(fails(Some(7)).await), 7, "the same inputs");
    let other = fails(Some(8)).await;
    assert!(!other.is_misconfigured());
    let of = |inputs: u32| Fingerprint::of(&inputs).unwrap();
    let text = format!(
        "attempt 1 ran the step with other inputs (fingerprint {}, now {}), and the step did not run again",
        of(7).short(),
        of(8).short()
    );
    assert!(other.to_string().contains(&text), "{other}");
    match problem::<u32>(Err(other)) {
        StepProblem::OtherInputs { attempt: 1, recorded: Some(recorded), presented, .. } => {
            assert_eq!((*recorded, *presented), (of(7), of(8)));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(value(fails(None).await), 7, "a step without inputs takes the value");
}

#[tokio::test]
async fn inputs_of_a_step_that_was_journaled_without_inputs_are_refused() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        current()?.step("charge").run(async |step| effects.charge(step.child_key()).await).await?;
        Err::<u32, _>(lost(Duration::from_secs(1)))
    };
    assert!(matches!(world.run(body).await, Err(Error::MessageLost { .. })));
    let body = async {
        let charge = current()?.step("charge").fingerprint(&7);
        charge.run(async |_| Ok::<_, Error>(unreachable_value())).await
    };
    let refused = world.run(body).await.unwrap_err();
    let presented = Fingerprint::of(&7).unwrap();
    let text = format!("(fingerprint no inputs, now {})", presented.short());
    assert!(refused.to_string().contains(&text), "{refused}");
    match problem::<u32>(Err(refused)) {
        StepProblem::OtherInputs { attempt: 1, recorded: None, presented: found, .. } => assert_eq!(*found, presented),
        other => panic!("{other:?}"),
    }
}

/// A value of this type does not encode, and can't be hashed.
#[derive(Deserialize)]
struct Unwritable;

impl Serialize for Unwritable {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("not writable"))
    }
}

#[tokio::test]
async fn a_step_whose_inputs_cannot_be_hashed_does_not_run() {
    let world = World::new();
    let body = async {
        let charge = current()?.step("charge").fingerprint(&Unwritable);
        charge.run(async |_| Ok::<_, Error>(unreachable_value())).await
    };
    let refused = world.run(body).await.unwrap_err();
    assert!(!refused.is_misconfigured() && !refused.is_uncertain(), "{refused}");
    assert!(refused.to_string().contains("not writable"), "{refused}");
    assert!(std::error::Error::source(&refused).is_some());
    assert!(matches!(problem::<u32>(Err(refused)), StepProblem::InvalidInputs(_)));
    assert_eq!(world.store.count(StoreCall::Append), 0);
}

#[tokio::test]
async fn a_step_inside_of_a_step_is_refused_and_a_nested_call_has_its_own_steps() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        let outer = attempt.step("outer").run(async |step| {
            let inner = step.attempt().step("inner").run(async |_| Ok::<_, Error>(1)).await;
            assert!(matches!(problem(inner), StepProblem::Nested));
            let nested = Operation::new(&world.store, Ok(World::key("nested")), POLICY);
            nested.run(async { current()?.step("outer").run(async |_| Ok::<_, Error>(5)).await }).await
        });
        outer.await
    };
    assert_eq!(Box::pin(world.run(body)).await.unwrap(), 5);
}

#[tokio::test]
async fn names_are_checked_before_the_body_runs() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        let long = "x".repeat(300);
        for name in ["", " ", "idem:x", "a[b", long.as_str()] {
            let refused = attempt.step(name).run(async |_| Ok::<_, Error>(unreachable_value())).await;
            assert!(matches!(problem(refused), StepProblem::InvalidName), "{name:?}");
        }
        for name in ["", " ", "idem:x", "a[b", long.as_str()] {
            let renamed = || attempt.step("charge").was(name);
            for refused in [
                renamed().run(async |_| Ok::<_, Error>(unreachable_value())).await,
                renamed().fail().run(async |_| Ok::<_, Error>(unreachable_value())).await,
            ] {
                assert!(matches!(problem(refused), StepProblem::InvalidName), "formerly {name:?}");
            }
        }
        let refused = attempt.step(("a[b", "c")).run(async |_| Ok::<_, Error>(unreachable_value())).await;
        assert!(matches!(problem(refused), StepProblem::InvalidName));
        let refused = attempt.step("charge").was(("a[b", "c")).run(async |_| Ok::<_, Error>(unreachable_value())).await;
        assert!(matches!(problem(refused), StepProblem::InvalidName));
        assert_eq!(world.store.count(StoreCall::Append), 0);
        attempt.step(("a", "b[c]")).run(async |_| Ok::<_, Error>(1)).await
    };
    assert_eq!(world.run(body).await.unwrap(), 1);
}

fn unreachable_value() -> u32 {
    unreachable!("the step is refused")
}

#[tokio::test]
async fn a_value_that_is_too_large_is_journaled_without_it_and_never_runs_twice() {
    let (world, effects) = (World::new(), Effects::default());
    let call = async || {
        let body = async {
            let step = current()?.step("export");
            let text = step.run(async |step| {
                effects.charge(step.child_key()).await?;
                Ok::<_, Error>("x".repeat(300 * 1024))
            });
            let text = text.await?;
            assert_eq!(text.len(), 300 * 1024, "this attempt has the value");
            Err::<u32, _>(lost(Duration::from_secs(1)))
        };
        world.run(body).await
    };
    assert!(matches!(call().await, Err(Error::MessageLost { .. })));
    for _ in 0..2 {
        let refused = problem(call().await);
        assert!(matches!(refused, StepProblem::ValueUnavailable { attempt: 1, .. }), "{refused}");
    }
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn a_value_that_does_not_encode_is_journaled_as_ended_and_never_runs_twice() {
    let (world, effects) = (World::new(), Effects::default());
    let call = async || {
        let body = async {
            let step = current()?.step("export");
            let exported = step.run(async |step| effects.charge(step.child_key()).await.map(|_| Unwritable));
            let Unwritable = exported.await?;
            Err::<u32, _>(lost(Duration::from_secs(1)))
        };
        world.run(body).await
    };
    assert!(matches!(call().await, Err(Error::MessageLost { .. })), "this attempt has the value");
    let steps = world.journal().await.unwrap().steps().unwrap();
    assert_eq!((steps[0].name(), steps[0].state()), ("export", StepState::Ended));
    for _ in 0..2 {
        match problem(call().await) {
            StepProblem::ValueUnavailable { attempt: 1, problem, .. } => {
                assert!(matches!(*problem, ResultProblem::Unencodable), "{problem}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(effects.count(), 1);
}

/// The effect has happened, and no entry says so.
#[tokio::test]
async fn a_value_whose_encoding_panics_leaves_the_effect_in_doubt() {
    #[derive(Debug, Deserialize)]
    struct Bomb;
    impl Serialize for Bomb {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            panic!("expected by the test")
        }
    }
    for fails in [false, true] {
        let (world, effects) = (World::new(), Effects::default());
        let body = async {
            let step = current()?.step("export");
            let exports = async |step: Step| effects.charge(step.child_key()).await.map(|_| Bomb);
            let Bomb = if fails { step.fail().run(exports).await? } else { step.run(exports).await? };
            Ok(0_u32)
        };
        let (ended, outcome) = observe(world.run(body)).catch_panics().await;
        assert!(matches!(ended, Err(Error::Panicked { .. })), "{ended:?}");
        assert_eq!((outcome.steps_in_doubt(), outcome.uncertain()), (1, true), "{outcome:?}");
        settle().await;
        let body = async {
            let step = current()?.step("export");
            let exports = async |step: Step| effects.charge(step.child_key()).await;
            if fails { step.fail().run(exports).await } else { step.run(exports).await }
        };
        let again = world.run(body).await;
        match fails {
            true => assert!(matches!(problem(again), StepProblem::Interrupted { attempt: 1, .. })),
            false => assert_eq!(again.unwrap(), 2, "the body runs again"),
        }
        assert_eq!(effects.count(), if fails { 1 } else { 2 });
    }
}

#[tokio::test]
async fn a_journal_entry_survives_lost_answers() {
    for fault in [Fault::Before(StoreErrorKind::Unavailable), Fault::After] {
        let (world, effects) = (World::new(), Effects::default());
        for delivery in 1..=2 {
            let body = async {
                world.store.next(StoreCall::Append, fault);
                let value = current()?.step("charge").run(async |step| effects.charge(step.child_key()).await).await?;
                if delivery == 1 { Err(Error::NoAttempt) } else { Ok(value) }
            };
            let mut call = Box::pin(world.run(body));
            let ended = world.moving(call.as_mut(), Duration::from_millis(10)).await;
            assert_eq!(ended.is_ok(), delivery == 2, "{ended:?}");
        }
        assert_eq!(effects.count(), 1, "{fault:?}");
    }
}

#[tokio::test]
async fn an_entry_that_the_store_does_not_confirm_fails_the_attempt() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        world.store.always(StoreCall::Append, Fault::Before(StoreErrorKind::Unavailable));
        current()?.step("charge").run(async |step| effects.charge(step.child_key()).await).await
    };
    let mut call = Box::pin(observe(world.run(body)));
    let (ended, outcome) = world.moving(call.as_mut(), Duration::from_secs(1)).await;
    assert!(matches!(ended, Err(Error::Store { started: true, .. })), "{ended:?}");
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }), "{outcome:?}");
    drop(call);
    world.store.always(StoreCall::Append, Fault::None);
    let body = async { current()?.step("charge").run(async |step| effects.charge(step.child_key()).await).await };
    assert_eq!(world.run(body).await.unwrap(), 2, "the effect may happen twice, with one child key");
    let keys = effects.0.lock().unwrap();
    assert_eq!(keys[0], keys[1]);
}

#[tokio::test]
async fn an_attempt_that_was_taken_over_journals_nothing() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let attempt = current()?;
        let step = attempt.step("charge").run(async |step| {
            // Another process takes over while the body of this step runs.
            world.clock.advance(LEASE * 2);
            let request = idem_runtime::store::ReserveRequest::new(
                World::key("k"),
                world.memory.context().new_owner(),
                LEASE,
                TTL,
            );
            world.memory.reserve(&request).await.unwrap();
            effects.charge(step.child_key()).await
        });
        step.await
    };
    let ended = world.run(body).await;
    assert!(matches!(ended, Err(Error::LeaseLost { attempt: 1, .. })), "{ended:?}");
    assert_eq!(world.journal().await, None);
}

#[tokio::test]
async fn a_journal_that_cannot_be_read_runs_no_step() {
    for (bytes, is_misconfigured) in [(vec![9, 1, 2], true), (vec![1, 0, 200, b'x'], false)] {
        let world = World::with_lapsed_journal(bytes).await;
        let body = async {
            let attempt = current()?;
            let refused = attempt.step("charge").run(async |_| Ok::<_, Error>(unreachable_value())).await;
            let Err(error) = refused else { panic!("{refused:?}") };
            assert_eq!(error.is_misconfigured(), is_misconfigured, "{error}");
            assert!(matches!(problem::<u32>(Err(error)), StepProblem::UnreadableJournal(_)));
            Ok(0_u32)
        };
        world.run(body).await.unwrap();
    }
}

/// The unreadable journal may have a step in doubt, which the end of the operation would hide.
#[tokio::test]
async fn an_error_ends_no_operation_whose_journal_cannot_be_read() {
    let world = World::with_lapsed_journal(vec![9, 1, 2]).await;
    let body = async { Err::<u32, _>(Failure::Declined(1)) };
    world.operation(POLICY).record_errors().run(body).await.unwrap_err();
    assert_eq!(world.state().await, State::Released);
    assert_eq!(world.journal().await, Journal::new(vec![9, 1, 2]));
}

#[tokio::test]
async fn a_step_after_the_end_of_its_attempt_does_not_run() {
    let world = World::new();
    let kept = Mutex::new(None);
    let body = async {
        *kept.lock().unwrap() = Some(current()?);
        Ok(0_u32)
    };
    world.run(body).await.unwrap();
    let attempt = kept.into_inner().unwrap().unwrap();
    let refused = attempt.step("late").run(async |_| Ok::<_, Error>(unreachable_value())).await;
    assert!(matches!(problem(refused), StepProblem::AttemptEnded));
}

#[tokio::test]
async fn a_body_without_a_reservation_runs_its_steps_each_time() {
    let (world, effects) = (World::new(), Effects::default());
    for _ in 0..2 {
        let body = async { current()?.step("charge").run(async |step| effects.charge(step.child_key()).await).await };
        world.operation(POLICY.mode(Mode::Off)).run(body).await.unwrap();
    }
    assert_eq!((effects.count(), world.store.count(StoreCall::Append)), (2, 0));
}

#[tokio::test]
async fn a_handler_with_steps_that_borrow_can_be_spawned() {
    let (store, effects) = (MemoryStore::new(), std::sync::Arc::new(Effects::default()));
    let handler = async move {
        let body = async {
            let (attempt, lines) = (current()?, vec!["a".to_owned(), "b".to_owned()]);
            let mut lengths = Vec::new();
            for line in &lines {
                let step = attempt.step(("reserve", line)).fingerprint(line);
                let reserved = step.run(async |step| {
                    effects.charge(step.child_key()).await?;
                    lengths.push(line.len());
                    Ok::<_, Error>(line.len())
                });
                reserved.await?;
            }
            let (first, second) = futures::try_join!(
                attempt.step("first").run(async |_| Ok::<_, Error>(lines.len())),
                attempt.step("second").run(|step| async move { Ok::<_, Error>(step.name().len()) }),
            )?;
            Ok::<_, Error>((lengths, first, second))
        };
        Operation::new(&store, Ok(World::key("k")), POLICY).run(body).await
    };
    assert_eq!(tokio::spawn(handler).await.unwrap().unwrap(), (vec![1, 1], 2, 6));
}

#[tokio::test]
async fn shadow_mode_runs_each_step_on_each_delivery() {
    let (world, effects) = (World::new(), Effects::default());
    for _ in 0..2 {
        let body = async {
            let attempt = current()?;
            for _ in 0..2 {
                attempt.step("charge").run(async |step| effects.charge(step.child_key()).await).await?;
            }
            Err::<u32, _>(Error::NoAttempt)
        };
        world.operation(POLICY.mode(Mode::Shadow)).run(body).await.unwrap_err();
    }
    assert_eq!((effects.count(), world.store.count(StoreCall::Append)), (4, 0));
}

#[tokio::test]
async fn a_value_that_the_store_cannot_hold_is_journaled_without_it() {
    let (world, effects) = (World::new(), Effects::default());
    let call = async |name: &str| {
        let body = async {
            let step = current()?.step(name);
            step.run(async |step| effects.charge(step.child_key()).await).await?;
            Err::<u32, _>(lost(Duration::from_secs(1)))
        };
        world.run(body).await
    };
    world.store.next(StoreCall::Append, Fault::Before(StoreErrorKind::TooLarge));
    assert!(matches!(call("large").await, Err(Error::MessageLost { .. })), "this attempt has the value");
    assert!(matches!(problem(call("large").await), StepProblem::ValueUnavailable { attempt: 1, .. }));
    assert_eq!(effects.count(), 1, "the step does not run again");
    // Not even the entry fits: the attempt fails, and the step may run again.
    world.store.always(StoreCall::Append, Fault::Before(StoreErrorKind::TooLarge));
    assert!(matches!(call("other").await, Err(Error::Store { started: true, .. })));
}

#[tokio::test]
async fn an_entry_that_may_be_in_the_store_never_loses_its_value() {
    let (world, effects) = (World::new(), Effects::default());
    let body = async {
        let attempt = current()?;
        let step = |name| attempt.step(name).run(async |step| effects.charge(step.child_key()).await);
        // The first write lands, and its answer is lost. Then another step ends, and the journal of both is too large.
        world.store.next(StoreCall::Append, Fault::After);
        world.store.next(StoreCall::Append, Fault::Before(StoreErrorKind::TooLarge));
        let (first, second) = futures::join!(step("first"), step("second"));
        first?;
        second?;
        step("third").await?;
        Err::<u32, _>(lost(Duration::from_secs(1)))
    };
    let mut call = Box::pin(world.run(body));
    let ended = world.moving(call.as_mut(), Duration::from_millis(10)).await;
    assert!(matches!(ended, Err(Error::MessageLost { .. })), "{ended:?}");
    let body = async {
        let attempt = current()?;
        let step = |name| attempt.step(name).run(async |step| effects.charge(step.child_key()).await);
        let (first, third) = (step("first").await?, step("third").await?);
        assert!(matches!(problem(step("second").await), StepProblem::ValueUnavailable { .. }));
        Ok((first, third))
    };
    assert_eq!(world.run(body).await.unwrap(), (1, 3));
    assert_eq!(effects.count(), 3, "no step has run again");
}

#[tokio::test]
async fn a_step_that_another_deployment_can_run_ends_no_operation() {
    let world = World::new();
    let body = async {
        let attempt = current().unwrap();
        let refused = attempt.step("a[b").run(async |_| Ok::<_, Error>(unreachable_value())).await;
        refused.map_err(Failure::from)
    };
    let (ended, outcome) = observe(world.operation(POLICY).record_errors().run(body)).await;
    assert!(matches!(ended, Err(Failure::Idempotency(_))), "{ended:?}");
    assert!(!outcome.recorded() && matches!(outcome.disposition(), Disposition::Retry { .. }), "{outcome:?}");
    assert_eq!(world.state().await, State::Released);
}

#[tokio::test]
async fn running_steps_count_against_the_number_of_steps() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        let steps = (0..1001).map(|at| {
            attempt.step(("line", at)).run(async |_| {
                yields(1).await;
                Ok::<_, Error>(())
            })
        });
        let ended = futures::future::join_all(steps).await;
        let (ran, refused): (Vec<_>, Vec<_>) = ended.into_iter().partition(Result::is_ok);
        assert_eq!((ran.len(), refused.len()), (1000, 1));
        Ok(0_u32)
    };
    world.run(body).await.unwrap();
}

#[tokio::test]
async fn a_policy_limits_the_steps_the_values_and_the_journal() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        attempt.set_step_policy(StepPolicy::new().max_steps(3).max_value_bytes(10).max_journal_bytes(400));
        let step = |name: &'static str, len| attempt.step(name).run(async move |_| Ok::<_, Error>("x".repeat(len)));
        assert_eq!(step("short", 8).await?.len(), 8);
        assert_eq!(step("long", 9).await?.len(), 9, "this attempt has the value");
        // A renamed step counts once.
        attempt.step("third").was("old").run(async |_| Ok::<_, Error>(String::new())).await?;
        assert!(matches!(problem(step("fourth", 0).await), StepProblem::TooMany { max: 3, .. }));
        attempt.set_step_policy(StepPolicy::new().max_journal_bytes(400));
        assert_eq!(step("wide", 350).await?.len(), 350, "the value does not fit into the journal");
        step("fills", 200).await?;
        let refused = attempt.step("fifth").run(async |_| Ok::<_, Error>(unreachable_value())).await;
        assert!(matches!(problem(refused), StepProblem::JournalFull { max: 400, .. }));
        Err::<u32, _>(lost(Duration::from_secs(1)))
    };
    assert!(matches!(world.run(body).await, Err(Error::MessageLost { .. })));
    assert!(world.journal().await.unwrap().bytes().len() <= 400);
    let body = async {
        let attempt = current()?;
        let step = |name: &'static str| attempt.step(name).run(async |_| Ok::<_, Error>("again".to_owned()));
        assert_eq!(step("short").await?, "xxxxxxxx");
        assert!(matches!(problem(step("long").await), StepProblem::ValueUnavailable { attempt: 1, .. }));
        assert!(matches!(problem(step("wide").await), StepProblem::ValueUnavailable { attempt: 1, .. }));
        assert_eq!(step("fills").await?.len(), 200);
        Ok(0_u32)
    };
    world.run(body).await.unwrap();
}

#[tokio::test]
async fn a_journal_has_a_mebibyte_by_default() {
    const MAX: usize = 1024 * 1024;
    let world = World::new();
    let body = async {
        let attempt = current()?;
        for at in 0..4 {
            attempt.step(("fits", at)).run(async |_| Ok::<_, Error>("x".repeat(255 * 1024))).await?;
        }
        attempt.step("rest").run(async |_| Ok::<_, Error>("x".repeat(10 * 1024))).await?;
        for at in 0.. {
            let ended = attempt.step(("small", at)).run(async |_| Ok::<_, Error>("x".repeat(100))).await;
            if ended.is_err() {
                assert!(matches!(problem(ended), StepProblem::JournalFull { max: MAX, .. }));
                break;
            }
        }
        Err::<u32, _>(lost(Duration::from_secs(1)))
    };
    assert!(matches!(world.run(body).await, Err(Error::MessageLost { .. })));
    let length = world.journal().await.unwrap().bytes().len();
    assert!(length <= MAX && length > MAX - 100, "{length}");
    let body = async {
        let attempt = current()?;
        for at in 0..4 {
            let fits = attempt.step(("fits", at)).run(async |_| Ok::<_, Error>(String::new())).await?;
            assert_eq!(fits.len(), 255 * 1024);
        }
        let rest = attempt.step("rest").run(async |_| Ok::<_, Error>(String::new())).await;
        assert!(matches!(problem(rest), StepProblem::ValueUnavailable { attempt: 1, .. }), "no room for the value");
        Ok(0_u32)
    };
    world.run(body).await.unwrap();
}

#[tokio::test]
async fn a_journal_has_8000_entries_at_most_whatever_its_policy_allows() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        attempt.set_step_policy(StepPolicy::new().max_steps(usize::MAX));
        let steps = (0..8000).map(|at| {
            attempt.step(("line", at)).run(async |_| {
                yields(1).await;
                Ok::<_, Error>(())
            })
        });
        futures::future::try_join_all(steps).await?;
        attempt.step("last").run(async |_| Ok::<_, Error>(unreachable_value())).await
    };
    let refused = world.run(body).await.unwrap_err();
    assert!(refused.is_misconfigured(), "{refused}");
    assert!(matches!(problem::<u32>(Err(refused)), StepProblem::TooMany { max: 8000, .. }));
}

/// The body of a step runs only if the journal has room for its entries, so no effect is without an entry.
#[tokio::test]
async fn each_step_that_has_run_has_an_entry_in_a_full_journal() {
    for limit in (100..1500).step_by(37) {
        let (world, effects) = (World::new(), Effects::default());
        let body = async {
            let attempt = current()?;
            attempt.set_step_policy(StepPolicy::new().max_journal_bytes(limit));
            let steps = (0..12).map(|at| {
                let step = attempt.step(("line", at));
                let effects = &effects;
                let running: Pin<Box<dyn Future<Output = Result<u32, Error>>>> = match at % 3 {
                    0 => Box::pin(step.run(async |step| effects.charge(step.child_key()).await)),
                    1 => Box::pin(step.fail().run(async |step| {
                        yields(1).await;
                        effects.charge(step.child_key()).await
                    })),
                    _ => Box::pin(step.was(("old", at)).fail().run(async |step| {
                        effects.charge(step.child_key()).await?;
                        Err::<u32, _>(lost(Duration::from_secs(1)))
                    })),
                };
                running
            });
            let ran = futures::future::join_all(steps).await.iter().filter(|ended| ended.is_ok()).count();
            let journal = world.journal().await;
            let steps = journal.as_ref().map_or_else(Vec::new, |journal| journal.steps().unwrap());
            assert!(journal.is_none_or(|journal| journal.bytes().len() <= limit), "{limit}");
            assert_eq!(steps.iter().filter(|step| step.state() == StepState::Ended).count(), ran, "{limit}");
            assert_eq!(steps.len(), effects.count(), "{limit}");
            Ok(0_u32)
        };
        world.run(body).await.unwrap();
    }
}

#[tokio::test]
async fn a_policy_keeps_the_journal_with_the_result() {
    let world = World::new();
    for attempt in 1..=3 {
        let body = async {
            let attempt = current()?;
            attempt.set_step_policy(StepPolicy::new().keep());
            attempt.step("charge").run(async |_| Ok::<_, Error>(7_u32)).await?;
            if attempt.number() == 1 {
                return Err(lost(Duration::from_secs(1)));
            }
            attempt.step("book").run(async |_| Ok::<_, Error>("parcel".to_owned())).await
        };
        // The third call is a duplicate.
        let ended = world.run(body).await;
        assert!(ended.is_err() == (attempt == 1) && ended.is_ok_and(|parcel| parcel == "parcel") == (attempt > 1));
    }
    let operator = world.memory.operator().by("alice").reason("INC-7");
    let found = operator.inspect(&World::key("k")).await.unwrap().unwrap();
    let steps = found.steps().unwrap();
    let steps: Vec<_> = steps.iter().map(|step| (step.name(), step.attempt(), step.state())).collect();
    assert_eq!(steps, [("charge", 1, StepState::Ended), ("book", 2, StepState::Ended)]);
    let json = found.record.state.result().unwrap();
    assert!(
        matches!(json, StoredResult::Encoded { codec, bytes } if codec.as_str() == "json" && bytes == "\"parcel\"")
    );
    // A decision names the record that the operator saw.
    operator.discard(&World::key("k"), &found).await.unwrap();
    assert!(operator.inspect(&World::key("k")).await.unwrap().unwrap().steps().unwrap().is_empty());
}

#[tokio::test]
async fn a_step_may_fail_more_often_than_a_journal_has_steps() {
    let world = World::new();
    for _ in 0..20 {
        let body = async {
            let attempt = current()?;
            attempt.set_step_policy(StepPolicy::new().max_steps(1));
            attempt.step("pay").fail().run(async |_| Err::<u32, _>(lost(Duration::from_secs(1)))).await
        };
        assert!(matches!(world.run(body).await, Err(Error::MessageLost { .. })));
    }
}

#[tokio::test]
async fn the_journal_of_steps_in_other_tasks_is_kept() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        attempt.set_step_policy(StepPolicy::new().keep());
        let step = attempt.step("charge");
        tokio::spawn(async { step.run(async |_| Ok::<_, Error>(7_u32)).await }).await.unwrap()
    };
    assert_eq!(world.run(body).await.unwrap(), 7);
    let found = world.memory.operator().inspect(&World::key("k")).await.unwrap().unwrap();
    assert_eq!(found.steps().unwrap().len(), 1);
    // The same decision again changes nothing, and keeps the steps.
    let operator = world.memory.operator().by("alice").reason("INC-7");
    operator.resolve(&World::key("k"), &found, Resolution::completed(&7_u32).unwrap()).await.unwrap();
    let found = operator.inspect(&World::key("k")).await.unwrap().unwrap();
    assert_eq!((found.steps().unwrap().len(), found.decided_by()), (1, Some("alice")));
}

#[tokio::test]
async fn a_result_that_fits_only_alone_is_recorded_without_its_journal() {
    let world = World::new();
    let body = async {
        let attempt = current()?;
        attempt.set_step_policy(StepPolicy::new().keep());
        attempt.step("charge").run(async |_| Ok::<_, Error>(7_u32)).await
    };
    world.store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::TooLarge));
    assert_eq!(world.run(body).await.unwrap(), 7);
    assert_eq!(world.run(async { Ok::<_, Error>(unreachable_value()) }).await.unwrap(), 7, "a duplicate");
    let found = world.memory.operator().inspect(&World::key("k")).await.unwrap().unwrap();
    assert!(found.steps().unwrap().is_empty());
}

#[tokio::test]
async fn each_step_has_a_codec_of_its_own() {
    let world = World::new();
    let attempt_of = async |codec: &str| {
        let body = async {
            let step = current()?.step("rows");
            let body = async |_| Ok::<_, Error>(vec![7_u64, 8]);
            let rows = match codec {
                "postcard" => step.codec::<Postcard>().fail().run(body).await?,
                "msgpack" => step.codec::<MessagePack>().retry(2, Backoff::DEFAULT).run(body).await?,
                _ => step.run(body).await?,
            };
            assert_eq!(rows, [7, 8]);
            Err::<u32, _>(lost(Duration::from_secs(1)))
        };
        assert!(matches!(world.run(body).await, Err(Error::MessageLost { .. })));
    };
    attempt_of("postcard").await;
    let steps = world.journal().await.unwrap().steps().unwrap();
    let written = steps[0].value().unwrap();
    assert!(matches!(written, StoredResult::Encoded { codec, .. } if codec.as_str() == "postcard"), "{written:?}");
    for other in ["json", "msgpack", "postcard"] {
        attempt_of(other).await;
    }
}
