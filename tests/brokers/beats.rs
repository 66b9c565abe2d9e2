//! Beats: a delivery repeatedly reports to its broker that the message is still being handled.

use std::future::pending;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, mpsc};

use idem_runtime::brokers::{Beat, OnBeatLost};
use idem_runtime::policy::{Doubt, Uncertain};
use idem_runtime::record::State;
use idem_runtime::{Disposition, InProgress, MissingKey, Mode, OnCrash, StoreErrorKind, observe};
use idem_tests::{Fault, StoreCall};

use super::super::*;

const EVERY: Duration = Duration::from_secs(10);

/// Calls of a beat callback: for each beat its number, and the time since the first call of the delivery began to wait.
#[derive(Clone, Default)]
struct CallbackCalls(Arc<Mutex<Vec<(u32, Duration)>>>);

impl CallbackCalls {
    fn note(&self, beat: &Beat) {
        self.0.lock().unwrap().push((beat.number(), beat.elapsed()));
    }

    /// Returns a callback that is ready immediately.
    fn callback(&self) -> impl FnMut(Beat) -> std::future::Ready<Result<(), String>> + Send + 'static {
        let told = self.clone();
        move |beat| {
            told.note(&beat);
            std::future::ready(Ok(()))
        }
    }

    fn seconds(&self) -> Vec<u64> {
        self.0.lock().unwrap().iter().map(|(_, elapsed)| elapsed.as_secs()).collect()
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

#[tokio::test]
async fn a_handler_that_takes_long_beats_until_it_ends() {
    let world = World::new();
    let told = CallbackCalls::default();
    let call = observe(world.lasting("k", POLICY, Duration::from_secs(35))).on_beat(EVERY, told.callback());
    let (result, outcome) = world.drive(call).await;
    assert_eq!((result.unwrap(), outcome.disposition()), (1, Disposition::Ack));
    assert_eq!(told.seconds(), [10, 20, 30]);
    assert_eq!(told.0.lock().unwrap().iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2, 3]);
    // The message is settled, so no callback may report it to the broker any more.
    world.drive(world.sleep(EVERY * 10)).await;
    assert_eq!(told.count(), 3);
}

#[tokio::test]
async fn a_handler_that_is_ready_immediately_has_no_beat() {
    let world = World::new();
    let told = CallbackCalls::default();
    let (_, outcome) =
        observe(world.lasting("k", POLICY, Duration::ZERO)).on_beat(Duration::ZERO, told.callback()).await;
    assert!(outcome.executed());
    world.drive(world.sleep(EVERY)).await;
    assert_eq!(told.count(), 0);
}

#[tokio::test]
async fn a_duplicate_that_waits_for_another_attempt_beats() {
    let world = World::new();
    let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(600)));
    let told = CallbackCalls::default();
    let first = world.lasting("k", POLICY, Duration::from_secs(35));
    let duplicate = observe(world.lasting("k", policy, Duration::ZERO)).on_beat(EVERY, told.callback());
    let (_, (result, outcome)) = world.drive(async { tokio::join!(first, duplicate) }).await;
    assert!(outcome.replayed() && outcome.waited());
    assert_eq!((result.unwrap(), world.runs()), (1, 1));
    assert_eq!(told.seconds(), [10, 20, 30]);
}

#[tokio::test]
async fn a_call_beats_in_every_mode_and_without_a_key() {
    for mode in [Mode::Enforce, Mode::Shadow, Mode::Off] {
        let world = World::new();
        let told = CallbackCalls::default();
        let call = world.lasting("k", POLICY.mode(mode), Duration::from_secs(25));
        world.drive(observe(call).on_beat(EVERY, told.callback())).await.0.unwrap();
        assert_eq!(told.seconds(), [10, 20], "{mode:?}");
    }
    let world = World::new();
    let told = CallbackCalls::default();
    let call = world.lasting("", POLICY.missing_key(MissingKey::Run), Duration::from_secs(25));
    world.drive(observe(call).on_beat(EVERY, told.callback())).await.0.unwrap();
    assert_eq!(told.seconds(), [10, 20], "without a key");
}

#[tokio::test]
async fn a_delivery_of_several_calls_beats_through_all_of_them_and_in_between() {
    let world = World::new();
    let told = CallbackCalls::default();
    let delivery = observe(async {
        // The first call ends immediately. From now on the delivery uses the clock of this call's store, and beats
        // although no call runs.
        world.lasting("a", POLICY, Duration::ZERO).await?;
        world.sleep(Duration::from_secs(15)).await;
        world.lasting("b", POLICY, Duration::from_secs(15)).await?;
        observe(world.lasting("c", POLICY, Duration::from_secs(15))).await.0
    });
    let (result, outcome) = world.drive(delivery.on_beat(EVERY, told.callback())).await;
    assert_eq!((result.unwrap(), outcome.disposition()), (3, Disposition::Ack));
    assert_eq!(told.seconds(), [10, 20, 30, 40]);
}

#[tokio::test]
async fn a_call_in_a_nested_observation_gives_beats_to_both_observations() {
    let world = World::new();
    let (outer, inner) = (CallbackCalls::default(), CallbackCalls::default());
    let delivery = observe(async {
        observe(world.lasting("k", POLICY, Duration::from_secs(25))).on_beat(EVERY, inner.callback()).await.0
    });
    world.drive(delivery.on_beat(EVERY, outer.callback())).await.0.unwrap();
    assert_eq!((outer.seconds(), inner.seconds()), (vec![10, 20], vec![10, 20]));
}

#[tokio::test]
async fn a_handler_whose_message_went_elsewhere_goes_on_under_its_lease() {
    let world = World::new();
    let told = CallbackCalls::default();
    let note = told.clone();
    let call = observe(world.lasting("k", POLICY, Duration::from_secs(120))).on_beat(EVERY, move |beat| {
        note.note(&beat);
        async move {
            assert_eq!(beat.key().unwrap().text(), "k");
            if beat.number() == 2 {
                beat.lost();
            }
            Ok::<_, String>(())
        }
    });
    let (result, outcome) = world.drive(call).await;
    assert_eq!((result.unwrap(), outcome.disposition()), (1, Disposition::Ack));
    assert_eq!(told.seconds(), [10, 20]);
}

static CANCELLED: Mutex<Vec<Doubt>> = Mutex::new(Vec::new());

fn note(uncertain: Uncertain<'_>) {
    CANCELLED.lock().unwrap().push(uncertain.cause);
}

#[tokio::test]
async fn a_handler_whose_message_went_elsewhere_is_cancelled_if_configured() {
    let lost = |beat: Beat| {
        beat.lost();
        async { Ok::<_, String>(()) }
    };
    for (on_crash, left) in [(OnCrash::Retry, State::Released), (OnCrash::Fail, State::Interrupted)] {
        let world = World::new();
        let policy = POLICY.on_crash(on_crash).on_uncertain(note);
        let call = observe(world.lasting("k", policy, Duration::from_secs(120)));
        let (result, outcome) = world.drive(call.on_beat(EVERY, lost).on_beat_lost(OnBeatLost::Cancel)).await;
        let error = result.unwrap_err();
        assert!(matches!(&error, Error::MessageLost { key: Some(key), attempt: Some(1), .. } if key.text() == "k"));
        assert!(error.is_uncertain() && error.to_string().contains("attempt 1 was cancelled"), "{error}");
        assert!(outcome.cancelled() && outcome.executed() && outcome.uncertain() && !outcome.recorded());
        assert!(matches!(outcome.disposition(), Disposition::Retry { after } if !after.is_zero()));
        assert_eq!(world.record("k").await.state, left);
        assert!(world.now() < EVERY * 2, "{:?}", world.now());
    }
    assert_eq!(*CANCELLED.lock().unwrap(), [Doubt::Cancelled; 2], "one notification for each cancelled attempt");

    // A duplicate that waits has no body to cancel. `on_beat` can be combined with `catch_panics`.
    let world = World::new();
    let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(600)));
    let first = world.lasting("k", POLICY, Duration::from_secs(35));
    let duplicate = observe(world.lasting("k", policy, Duration::ZERO));
    let duplicate = duplicate.on_beat(EVERY, lost).on_beat_lost(OnBeatLost::Cancel).catch_panics();
    let (first, (result, outcome)) = world.drive(async { tokio::join!(first, duplicate) }).await;
    let error = result.unwrap_err();
    assert!(matches!(&error, Error::MessageLost { attempt: None, .. }) && !error.is_uncertain(), "{error}");
    assert!(!outcome.executed() && !outcome.uncertain() && first.is_ok());
}

#[tokio::test]
async fn a_beat_callback_that_fails_is_called_again_soon() {
    let world = World::new();
    let told = CallbackCalls::default();
    let note = told.clone();
    let call = observe(world.lasting("k", POLICY, Duration::from_secs(24))).on_beat(EVERY, move |beat| {
        note.note(&beat);
        async move { if beat.number() < 3 { Err("the broker is away") } else { Ok(()) } }
    });
    world.drive(call).await.0.unwrap();
    // The retry comes a quarter of `every` after the failed beat. The next beat is on schedule.
    assert_eq!(
        told.0.lock().unwrap().iter().map(|(_, at)| at.as_millis()).collect::<Vec<_>>(),
        [10_000, 12_500, 15_000]
    );
}

#[tokio::test]
async fn a_beat_callback_that_hangs_harms_no_delivery() {
    let world = World::new();
    let (told, other) = (CallbackCalls::default(), CallbackCalls::default());
    let note = told.clone();
    let hanging = observe(world.lasting("k", POLICY, Duration::from_secs(55))).on_beat(EVERY, move |beat| {
        note.note(&beat);
        pending::<Result<(), String>>()
    });
    let beside = observe(world.lasting("l", POLICY, Duration::from_secs(55))).on_beat(EVERY, other.callback());
    let ((hung, _), (result, _)) = world.drive(async { tokio::join!(hanging, beside) }).await;
    assert_eq!((hung.is_ok(), result.is_ok()), (true, true));
    assert_eq!(other.seconds(), [10, 20, 30, 40, 50]);
    // A callback that hangs is dropped when the next beat is due, and the next beat calls it again.
    assert!((3..=5).contains(&told.count()), "{:?}", told.seconds());
    assert_eq!(world.store.count(StoreCall::Renew), 5, "one store call every 10 s renews both leases");
}

#[tokio::test]
async fn a_beat_callback_that_panics_delays_no_other_and_is_called_again() {
    let world = World::new();
    let told = CallbackCalls::default();
    let note = told.clone();
    let call = observe(world.lasting("k", POLICY, Duration::from_secs(23))).on_beat(EVERY, move |beat| {
        note.note(&beat);
        async move {
            assert!(beat.number() > 1, "on purpose");
            Ok::<_, String>(())
        }
    });
    world.drive(call).await.0.unwrap();
    assert_eq!(told.count(), 3, "{:?}", told.seconds());
}

#[tokio::test]
async fn a_running_beat_callback_is_dropped_when_its_delivery_ends() {
    struct Dropped(Arc<AtomicBool>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let world = World::new();
    let (began, dropped) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (told, flag) = (Arc::clone(&began), Arc::clone(&dropped));
    let call = observe(world.lasting("k", POLICY, EVERY + Duration::from_secs(1))).on_beat(EVERY, move |_| {
        told.store(true, Ordering::SeqCst);
        let dropped = Dropped(Arc::clone(&flag));
        async move {
            let _dropped = dropped;
            pending::<Result<(), String>>().await
        }
    });
    world.drive(call).await.0.unwrap();
    settle().await;
    assert!(began.load(Ordering::SeqCst) && dropped.load(Ordering::SeqCst));
}

#[tokio::test]
async fn beats_continue_while_the_store_is_unreachable() {
    let world = World::new();
    world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
    let told = CallbackCalls::default();
    let call = world.lasting("k", POLICY, Duration::from_secs(25));
    world.drive(observe(call).on_beat(EVERY, told.callback())).await.0.unwrap();
    assert_eq!(told.seconds(), [10, 20]);
}

#[tokio::test]
async fn many_deliveries_beat_concurrently() {
    let world = World::new();
    let told = CallbackCalls::default();
    let calls = (0..200_u32).map(|number| {
        let call = observe(world.lasting(&number.to_string(), POLICY, Duration::from_secs(25)));
        let call = call.on_beat(EVERY, told.callback());
        let world = &world;
        async move {
            world.sleep(Duration::from_millis(u64::from(number % 10))).await;
            call.await.0.unwrap();
        }
    });
    world.drive(futures::future::join_all(calls)).await;
    assert_eq!(told.count(), 400);
}

/// Runs `test` on real threads and in real time.
fn on_threads<F: Future>(test: impl FnOnce() -> F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(test());
}

#[test]
fn beats_continue_while_a_handler_blocks_its_thread() {
    on_threads(|| async {
        let (tell, told) = mpsc::channel();
        let store = FaultyStore::new(&MemoryStore::new());
        store.always(StoreCall::Reserve, Fault::Slow(1));
        let body = async move {
            // The body blocks its thread until the callback has run three times.
            for _ in 0..3 {
                told.recv_timeout(Duration::from_secs(20)).expect("a beat");
            }
            Ok::<_, Error>(1)
        };
        let operation = Operation::new(&store, Key::new("brokers", "k"), POLICY);
        let call = observe(operation.run(body)).on_beat(Duration::from_millis(20), move |_| {
            let _ = tell.send(());
            async { Ok::<_, String>(()) }
        });
        assert_eq!(tokio::spawn(call).await.unwrap().0.unwrap(), 1);
    });
}

#[test]
fn a_beat_callback_that_blocks_its_thread_costs_no_lease() {
    on_threads(|| async {
        let store = FaultyStore::new(&MemoryStore::new());
        let (blocked, is_blocked) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let is_stuck = Arc::new(AtomicBool::new(false));
        let gave_up = Arc::clone(&is_stuck);
        let renewing = store.clone();
        let body = async move {
            tokio::task::yield_now().await;
            tokio::task::spawn_blocking(move || is_blocked.recv().unwrap()).await.unwrap();
            // The lease is renewed several times while the callback blocks its thread.
            let before = renewing.count(StoreCall::Renew);
            while renewing.count(StoreCall::Renew) < before + 3 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let _ = release.send(());
            Ok::<_, Error>(1)
        };
        let operation = Operation::new(&store, Key::new("brokers", "k"), POLICY.lease(Duration::from_millis(300)));
        let call = observe(operation.run(body));
        let call = call.on_beat(Duration::from_millis(20), move |beat| {
            if beat.number() == 1 {
                blocked.send(()).unwrap();
                // The callback gives up after 20 s, so that a failing test ends.
                let given_up = released.lock().unwrap().recv_timeout(Duration::from_secs(20)).is_err();
                gave_up.store(given_up, Ordering::SeqCst);
            }
            async { Ok::<_, String>(()) }
        });
        assert_eq!(tokio::spawn(call).await.unwrap().0.unwrap(), 1);
        assert!(!is_stuck.load(Ordering::SeqCst), "no lease was renewed while a callback blocked its thread");
    });
}

#[cfg(feature = "sqlite")]
#[test]
fn a_call_in_a_transaction_beats_although_no_lease_is_renewed() {
    on_threads(|| async {
        let mut connection = rusqlite::Connection::open_in_memory().unwrap();
        let tx = idem_runtime::within::OpenTransaction::new(connection.transaction().unwrap());
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let body = async {
            for _ in 0..3 {
                told.recv().await.unwrap();
            }
            Ok::<_, Error>(1)
        };
        let operation = idem_runtime::SqliteStore::within(&tx).operation(Key::new("brokers", "k"), POLICY);
        let call = observe(operation.run(body));
        let call = call.on_beat(Duration::from_millis(20), move |_| {
            let _ = tell.send(());
            async { Ok::<_, String>(()) }
        });
        let (result, outcome) = call.await;
        assert_eq!((result.unwrap(), outcome.committed().disposition()), (1, Disposition::Ack));
    });
}
