//! Disposition of a delivery, for every sequence of up to four calls with every ending, every nesting, and every result
//! of the delivery.

use std::future::ready;

use idem_runtime::observe_all;

use idem_tests::log::Log;

use super::super::*;

/// Way in which a call of the delivery ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    Completed,
    /// The body's error is recorded.
    RecordedError,
    /// The body's error frees the key.
    ReleasedError,
    /// Another attempt holds the key.
    InProgress,
    /// The key was used with another payload.
    Mismatch,
    /// An earlier attempt was interrupted.
    Interrupted,
    /// The call is dropped while its body runs.
    CutOff,
}

const ENDINGS: [Ending; 7] = [
    Ending::Completed,
    Ending::RecordedError,
    Ending::ReleasedError,
    Ending::InProgress,
    Ending::Mismatch,
    Ending::Interrupted,
    Ending::CutOff,
];

/// Nesting of the calls in a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Nesting {
    /// The delivery makes the calls directly.
    Flat,
    /// Each call is in its own `observe`.
    Observed,
    /// Each call is in its own batch.
    Batched,
}

/// Result of the delivery's future, and the time at which it comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Returned {
    Ok,
    /// The delivery returns an error, in the poll in which its calls ended.
    ErrWithTheCalls,
    /// The delivery returns an error, in a later poll.
    ErrLater,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Ack,
    Retry,
    DeadLetter,
}

/// Returns the expected disposition, independently of the code in `engine/disposition.rs`.
fn expected(calls: &[Ending], returned: Returned) -> Kind {
    let any = |of: &[Ending]| calls.iter().any(|call| of.contains(call));
    if calls.is_empty() || any(&[Ending::ReleasedError, Ending::InProgress, Ending::CutOff]) {
        Kind::Retry
    } else if any(&[Ending::Mismatch, Ending::Interrupted]) {
        Kind::DeadLetter
    } else {
        match returned {
            Returned::Ok => Kind::Ack,
            Returned::ErrWithTheCalls if any(&[Ending::RecordedError]) => Kind::DeadLetter,
            Returned::ErrWithTheCalls | Returned::ErrLater => Kind::Retry,
        }
    }
}

impl World {
    /// Returns a world whose store already has the records because of which calls are refused.
    async fn with_refusals() -> Self {
        let world = Self::new();
        let of = |name| Operation::new(&world.store, Ok(Self::key(name)), POLICY.on_crash(OnCrash::Fail));
        of("another payload").fingerprint("a").run(world.body()).await.unwrap();
        let mut interrupted = Box::pin(of("interrupted").run(std::future::pending::<Result<u32, Error>>()));
        assert!(poll_once(interrupted.as_mut()).await.is_pending());
        drop(interrupted);
        let owner = world.store.context().new_owner();
        let held = idem_runtime::store::ReserveRequest::new(Self::key("held"), owner, LEASE, TTL);
        assert!(matches!(world.store.reserve(&held).await, Ok(idem_runtime::store::Reservation::Granted { .. })));
        world
    }

    async fn ending(&self, ending: Ending) -> Result<u32, Failure> {
        let fresh = format!("call {}", self.runs.fetch_add(1, Ordering::SeqCst));
        let of = |name: &str| Operation::new(&self.store, Ok(Self::key(name)), POLICY);
        let failing = ready(Err(Failure::Declined(1)));
        match ending {
            Ending::Completed => of(&fresh).run(ready(Ok(1))).await,
            Ending::RecordedError => of(&fresh).record_errors().run(failing).await,
            Ending::ReleasedError => of(&fresh).run(failing).await,
            Ending::InProgress => of("held").run(ready(Ok(1))).await,
            Ending::Mismatch => of("another payload").fingerprint("b").run(ready(Ok(1))).await,
            Ending::Interrupted => of("interrupted").run(ready(Ok(1))).await,
            Ending::CutOff => of(&fresh).run(std::future::pending()).await,
        }
    }

    /// Makes one call. A call that is cut off is dropped together with the observation that encloses it.
    async fn nested(&self, ending: Ending, nesting: Nesting) {
        let call = self.ending(ending);
        let mut call: std::pin::Pin<Box<dyn Future<Output = ()> + '_>> = match nesting {
            Nesting::Flat => Box::pin(async { drop(call.await) }),
            Nesting::Observed => Box::pin(async { drop(observe(call).await) }),
            Nesting::Batched => Box::pin(async { drop(observe_all([((), observe(call))]).await) }),
        };
        assert_eq!(poll_once(call.as_mut()).await.is_pending(), ending == Ending::CutOff);
    }

    async fn delivery(&self, calls: &[Ending], nesting: Nesting, returned: Returned) -> Outcome {
        self.delivery_of(calls, nesting, returned, None).await
    }

    /// Like `delivery`, for a delivery with a number and a limit.
    async fn delivery_of(
        &self,
        calls: &[Ending],
        nesting: Nesting,
        returned: Returned,
        budget: Option<(u32, u32)>,
    ) -> Outcome {
        let mut delivery = observe(async {
            for call in calls {
                self.nested(*call, nesting).await;
            }
            match returned {
                Returned::Ok => Ok(()),
                Returned::ErrWithTheCalls => Err(Failure::Declined(2)),
                Returned::ErrLater => {
                    tokio::task::yield_now().await;
                    Err(Failure::Declined(2))
                }
            }
        });
        if let Some((number, limit)) = budget {
            delivery = delivery.delivery(number).delivery_limit(limit);
        }
        delivery.await.1
    }
}

/// Every sequence of `calls` endings, as an iterator.
fn sequences(calls: u32) -> impl Iterator<Item = Vec<Ending>> {
    (0..ENDINGS.len().pow(calls)).map(move |number| {
        (0..calls).map(|at| ENDINGS[number / ENDINGS.len().pow(at) % ENDINGS.len()]).collect::<Vec<_>>()
    })
}

#[tokio::test]
async fn a_disposition_depends_on_the_set_of_calls_and_not_on_their_order() {
    let world = World::with_refusals().await;
    let mut wrong = Vec::new();
    for calls in (0..=4).flat_map(sequences) {
        for returned in [Returned::Ok, Returned::ErrWithTheCalls, Returned::ErrLater] {
            for nesting in [Nesting::Flat, Nesting::Observed, Nesting::Batched] {
                let outcome = world.delivery(&calls, nesting, returned).await;
                let kind = match outcome.disposition() {
                    Disposition::Ack => Kind::Ack,
                    Disposition::Retry { after } => {
                        assert!(!after.is_zero(), "a hot loop: {calls:?}");
                        Kind::Retry
                    }
                    Disposition::DeadLetter => Kind::DeadLetter,
                };
                let observed = !calls.is_empty();
                let uncertain = calls.iter().any(|call| matches!(call, Ending::CutOff | Ending::Interrupted));
                let right = (expected(&calls, returned), observed, uncertain);
                if (kind, outcome.observed(), outcome.uncertain()) != right {
                    wrong.push((calls.clone(), nesting, returned, kind));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} deliveries, such as {:?}", wrong.len(), &wrong[..wrong.len().min(5)]);
}

#[tokio::test]
async fn a_failure_of_the_last_delivery_is_dead_lettered() {
    let world = World::with_refusals().await;
    for calls in (0..=2).flat_map(sequences) {
        for returned in [Returned::Ok, Returned::ErrWithTheCalls, Returned::ErrLater] {
            for delivery in 3..=6 {
                // A duplicate of a running attempt waits if its delivery is one of the last. Another test covers this
                // wait.
                if calls.contains(&Ending::InProgress) {
                    continue;
                }
                let outcome = world.delivery_of(&calls, Nesting::Flat, returned, Some((delivery, 5))).await;
                let kind = match outcome.disposition() {
                    Disposition::Ack => Kind::Ack,
                    Disposition::Retry { .. } => Kind::Retry,
                    Disposition::DeadLetter => Kind::DeadLetter,
                };
                let may_be_the_deployment = calls.contains(&Ending::Mismatch);
                let right = match expected(&calls, returned) {
                    Kind::Ack => Kind::Ack,
                    _ if delivery >= 5 => Kind::DeadLetter,
                    Kind::DeadLetter if may_be_the_deployment => Kind::Retry,
                    kind => kind,
                };
                assert_eq!(kind, right, "delivery {delivery} of 5: {calls:?} {returned:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_message_that_fails_for_a_mistake_of_the_deployment_is_dead_lettered_only_at_its_last_delivery() {
    let world = World::new();
    world.call(POLICY).await.0.unwrap();
    for delivery in 1..=5 {
        // The return type of the handler has changed since the result was recorded.
        let changed = world.operation(POLICY).run(async { Ok::<_, Error>("text".to_owned()) });
        let (result, outcome) = observe(changed).delivery(delivery).delivery_limit(5).await;
        let error = result.unwrap_err();
        assert!(matches!(&error, Error::ResultUnavailable { problem: ResultProblem::Undecodable { .. }, .. }));
        assert!(error.is_misconfigured() && outcome.misconfigured() && outcome.recorded());
        assert!(error.to_string().contains("serde(default)"), "{error}");
        match outcome.disposition() {
            Disposition::Retry { .. } => assert!(delivery < 5),
            other => assert_eq!((other, delivery), (Disposition::DeadLetter, 5)),
        }
    }
    let error = world.operation(POLICY).fingerprint("a").run(world.body()).await.err();
    assert!(error.is_none(), "a record without a fingerprint matches every payload");
    let world = World::new();
    world.operation(POLICY).fingerprint("a").run(world.body()).await.unwrap();
    let error = world.operation(POLICY).fingerprint("b").run(world.body()).await.unwrap_err().to_string();
    for remedy in ["a key", "skip_serializing_if"] {
        assert!(error.contains(remedy), "{error}");
    }
}

/// The log names the cause when a message is set aside with its last delivery, and not before.
#[tokio::test]
async fn the_last_delivery_of_a_message_has_an_event_that_names_the_cause() {
    let world = World::new();
    world.operation(POLICY).fingerprint("a").run(world.body()).await.unwrap();
    let event = "the last delivery of a message";
    for delivery in 4..=5 {
        for (cause, expected) in [
            ("another payload", "had another payload than its key"),
            ("another return type", "failed for a mistake of the deployment"),
            ("an error", "the events of its call say why"),
        ] {
            let log = Log::start();
            let operation = |name| Operation::new(&world.store, Ok(World::key(name)), POLICY);
            let observed = match cause {
                "another payload" => {
                    observe(operation("k").fingerprint("b").run(world.body()))
                        .delivery(delivery)
                        .delivery_limit(5)
                        .await
                        .1
                }
                "another return type" => {
                    let changed = operation("k").fingerprint("a").run(async { Ok::<_, Error>("text".to_owned()) });
                    observe(changed).delivery(delivery).delivery_limit(5).await.1
                }
                _ => {
                    let failing = operation("failing").run(async { Err::<u32, _>(Error::NoAttempt) });
                    observe(failing).delivery(delivery).delivery_limit(5).await.1
                }
            };
            let text = log.end();
            let is_last = delivery == 5;
            assert_eq!(observed.disposition() == Disposition::DeadLetter, is_last, "{cause}: {observed:?}");
            assert_eq!(text.matches(event).count(), usize::from(is_last), "{cause}: {text}");
            assert_eq!(text.contains(expected), is_last, "{cause}: {text}");
        }
    }
}

#[tokio::test]
async fn a_temporary_refusal_of_an_inner_call_is_not_recorded() {
    /// Error that can always be encoded.
    #[derive(Debug, Serialize, Deserialize)]
    struct Text(String);
    impl From<Error> for Text {
        fn from(error: Error) -> Self {
            Self(error.to_string())
        }
    }
    for mode in [Mode::Enforce, Mode::Off] {
        for ending in ENDINGS {
            let world = World::with_refusals().await;
            // A handler of any mode may run between the outer handler and the refused call.
            let between = Operation::new(&world.store, Ok(World::key("between")), POLICY.mode(mode));
            let body = between.run(async { world.ending(ending).await.map_err(|error| Text(format!("{error:?}"))) });
            let mut outer = Box::pin(world.operation(POLICY).record_errors().run(body));
            let Poll::Ready(result) = poll_once(outer.as_mut()).await else { continue };
            let recorded = matches!(world.state().await, State::Failed(_));
            let for_the_moment = ending == Ending::InProgress;
            assert_eq!(recorded, result.is_err() && !for_the_moment, "{mode:?} {ending:?}: {result:?}");
        }
    }
}

#[tokio::test]
async fn retry_pauses_grow_and_differ_by_key_without_a_delivery_number() {
    /// Returns the pauses after eight failed deliveries. Each delivery comes when the pause after the previous one
    /// ends.
    async fn pauses(world: &World, deliver: impl AsyncFn() -> Outcome) -> Vec<Duration> {
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let Disposition::Retry { after } = deliver().await.disposition() else { panic!("it failed") };
            pauses.push(after);
            world.clock.advance(after);
        }
        pauses
    }
    // A value of this type encodes, and panics when it is decoded.
    struct Panics;
    impl Serialize for Panics {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_u32(1)
        }
    }
    impl<'de> Deserialize<'de> for Panics {
        fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            panic!("on purpose")
        }
    }
    let failed = || Err::<(), _>(Failure::Declined(1));
    for kind in ["an error after a success", "no reservation", "a result that panics"] {
        // Collects the second pause of each key. These pauses must differ, so that failed deliveries of many keys do
        // not return together.
        let mut first = Vec::new();
        let world = World::new();
        for key in ["a", "b", "c", "d", "e", "f"] {
            let operation = |policy| Operation::new(&world.store, Ok(World::key(key)), policy);
            let panicking = || operation(POLICY).run(async { Ok::<_, Error>(Panics) });
            // The result is recorded, and then the round-trip check decodes it and panics.
            let _ = futures::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(panicking())).await;
            let all = pauses(&world, async || match kind {
                "an error after a success" => {
                    let delivery = async {
                        operation(POLICY).record_errors().run(async { Ok::<_, Failure>(1) }).await.ok();
                        failed()
                    };
                    observe(delivery).await.1
                }
                "no reservation" => observe(operation(POLICY.mode(Mode::Off)).run(async { failed() })).await.1,
                _ => observe(panicking()).catch_panics().await.1,
            })
            .await;
            assert!(all[0] <= Duration::from_secs(1), "{kind}: {all:?}");
            assert!(all[7] >= Duration::from_secs(60), "{kind}: {all:?}");
            assert!(all.iter().all(|pause| *pause <= Duration::from_secs(300)), "{kind}: {all:?}");
            first.push(all[1]);
        }
        first.sort_unstable();
        first.dedup();
        assert!(first.len() > 3, "{kind}: {first:?}");
    }
}

#[tokio::test]
async fn the_pauses_of_many_keys_that_fail_in_turn_grow() {
    const KEYS: usize = 60;
    let world = World::new();
    let keys: Vec<_> = (0..KEYS).map(|n| World::key(&format!("fails {n}"))).collect();
    let mut last = vec![Duration::ZERO; KEYS];
    for _ in 0..8 {
        for (key, pause) in keys.iter().zip(&mut last) {
            let operation = Operation::new(&world.store, Ok(key.clone()), POLICY.mode(Mode::Off));
            let call = operation.run(async { Err::<(), _>(Failure::Declined(1)) });
            let Disposition::Retry { after } = observe(call).await.1.disposition() else { panic!("it failed") };
            *pause = after;
        }
    }
    let short: Vec<_> = last.iter().filter(|pause| **pause < Duration::from_secs(60)).collect();
    assert!(short.is_empty(), "{} of {KEYS} keys: {short:?}", short.len());
}
