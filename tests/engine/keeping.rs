//! Leases that are renewed and lost: beats on the library's own thread, bodies that block or hang, and stores that
//! accept no results.

use std::sync::Arc;
use std::thread;

use idem_runtime::clock::Clock;
use idem_runtime::policy::StepPolicy;
use idem_tests::clock::OddClock;

use super::super::*;

/// Blocks this thread until `done` returns true.
pub(super) fn block_until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..60_000 {
        if done() {
            return;
        }
        #[expect(clippy::disallowed_methods, reason = "this thread is to block")]
        thread::sleep(Duration::from_millis(1));
    }
    panic!("timed out while waiting for: {what}");
}

#[test]
fn a_body_that_blocks_its_only_thread_keeps_its_lease() {
    let clock = ManualClock::new();
    let memory = MemoryStore::options().clock(OddClock::new(clock.clone()).tasks_on_their_own_thread()).build();
    let store = FaultyStore::new(&memory);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let operation = Operation::new(&store, Ok(World::key("k")), POLICY);
    let body = async {
        for beats in 1..=30 {
            // The clock advances only after the renewal task sleeps until the next beat.
            block_until("the sleep", || clock.next_wake().is_some());
            clock.advance(LEASE / 3);
            block_until("a beat", || store.count(StoreCall::Renew) >= beats);
            let mut other = Box::pin(observe(
                Operation::new(&memory.peer(), Ok(World::key("k")), POLICY).run(async { Ok::<_, Error>(2) }),
            ));
            let Poll::Ready((result, _)) = other.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
                panic!("the store in memory answers at the first poll")
            };
            assert!(matches!(result, Err(Error::InProgress { .. })), "the running attempt was taken over: {result:?}");
        }
        Ok::<_, Error>(1)
    };
    assert_eq!(runtime.block_on(operation.run(body)).unwrap(), 1);
}

#[test]
fn a_call_that_is_dropped_outside_of_any_runtime_frees_its_key() {
    let store = FaultyStore::new(&MemoryStore::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let operation = Operation::new(&store, Ok(World::key("k")), POLICY);
    let mut call = Box::pin(operation.run(std::future::pending::<Result<u32, Error>>()));
    assert!(runtime.block_on(poll_once(call.as_mut())).is_pending());
    // The first tries of the release fail, so a task must wait and repeat the release.
    store.next(StoreCall::Release, Fault::Before(StoreErrorKind::Unavailable));
    store.next(StoreCall::Release, Fault::Before(StoreErrorKind::Unavailable));
    drop(runtime);
    drop(call);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.context().flush());
    let found = runtime.block_on(store.inspect(&World::key("k"))).unwrap().unwrap();
    assert_eq!(found.record.state, State::Released);
    assert_eq!(store.count(StoreCall::Release), 3);
}

#[tokio::test]
async fn a_body_is_not_polled_beyond_its_lease_until_it_is_renewed() {
    let world = World::new();
    let polls = Cell::new(0);
    let body = poll_fn(|_| {
        polls.set(polls.get() + 1);
        Poll::<Result<u32, Error>>::Pending
    });
    let mut call = Box::pin(world.operation(POLICY).run(body));
    assert!(poll_once(call.as_mut()).await.is_pending());
    world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
    // The process is stopped for longer than its lease.
    world.clock.advance(LEASE);
    for _ in 0..5 {
        assert!(poll_once(call.as_mut()).await.is_pending());
        settle().await;
        world.clock.advance(Duration::from_secs(5));
    }
    assert_eq!(polls.get(), 1, "a body whose lease may have lapsed is not polled");
    world.store.always(StoreCall::Renew, Fault::None);
    settle().await;
    world.clock.advance(Duration::from_secs(5));
    settle().await;
    assert!(poll_once(call.as_mut()).await.is_pending());
    assert_eq!(polls.get(), 2, "renewed");

    // Another attempt has taken over.
    world.clock.advance(LEASE * 2);
    assert!(world.call(POLICY).await.1.took_over());
    assert!(matches!(driving(&world.clock, call).await, Err(Error::LeaseLost { .. })));
    assert_eq!(polls.get(), 2);
}

#[tokio::test]
async fn a_body_that_waits_for_its_lease_is_woken_by_a_confirmation_of_another_task() {
    #[derive(Default)]
    struct Wakes(AtomicU32);
    impl std::task::Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let (world, wakes, attempt) = (World::new(), Arc::new(Wakes::default()), std::sync::Mutex::new(None));
    let body = async {
        *attempt.lock().unwrap() = Some(current()?);
        std::future::pending::<Result<u32, Error>>().await
    };
    let mut call = Box::pin(world.operation(POLICY).run(body));
    let task = Waker::from(Arc::clone(&wakes));
    let mut poll = || call.as_mut().poll(&mut Context::from_waker(&task));
    assert!(poll().is_pending());
    // The renewals fail until the lease has lapsed. The body is then not polled, so it misses its own wake-ups.
    world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
    world.clock.advance(LEASE * 2);
    settle().await;
    assert!(poll().is_pending());
    let before = wakes.0.load(Ordering::SeqCst);
    world.store.always(StoreCall::Renew, Fault::None);
    let attempt = attempt.lock().unwrap().take().unwrap();
    attempt.confirm_lease().await.unwrap();
    assert_eq!(wakes.0.load(Ordering::SeqCst), before + 1);
}

#[tokio::test]
async fn a_body_that_hangs_holds_its_key_for_its_timeout_at_most() {
    for (policy, left) in [(POLICY, State::Released), (POLICY.on_crash(OnCrash::Fail), State::Interrupted)] {
        let world = World::new();
        let policy = policy.timeout(LEASE * 4);
        let began = world.clock.now();
        let call = observe(world.operation(policy).run(std::future::pending::<Result<u32, Error>>()));
        let (result, outcome) = driving(&world.clock, call).await;
        let Err(Error::TimedOut { attempt: 1, timeout, .. }) = result else { panic!("{result:?}") };
        let took = world.clock.now().saturating_since(began);
        assert!(timeout == LEASE * 4 && (timeout..timeout + LEASE).contains(&took), "{took:?}");
        assert!(outcome.executed() && outcome.uncertain() && !outcome.recorded());
        assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
        assert_eq!(world.state().await, left);
    }
}

#[tokio::test]
async fn the_lease_of_a_body_that_can_not_be_cancelled_lapses() {
    let world = World::new();
    // The call is not polled, as on a stuck thread.
    let call = world.hang(POLICY.timeout(LEASE)).await;
    for _ in 0..6 {
        settle().await;
        world.clock.advance(LEASE / 2);
    }
    settle().await;
    assert!(world.call(POLICY).await.1.took_over());
    drop(call);
    assert!(world.call(POLICY).await.1.replayed(), "the late end of the first attempt is refused");
}

#[tokio::test]
async fn a_renewal_that_hangs_costs_no_other_lease() {
    let world = World::new();
    let stuck = world.hang(POLICY).await;
    let others: Vec<_> = futures::future::join_all((0..5).map(async |n| {
        let operation = Operation::new(&world.store, Ok(World::key(&format!("other {n}"))), POLICY);
        let mut call = Box::pin(operation.run(std::future::pending::<Result<u32, Error>>()));
        assert!(poll_once(call.as_mut()).await.is_pending());
        call
    }))
    .await;
    // Every fourth step starts a renewal that never ends, and other calls renew the remaining leases.
    for _ in 0..30 {
        world.store.next(StoreCall::Renew, Fault::Hang);
        for _ in 0..4 {
            settle().await;
            world.clock.advance(LEASE / 12);
        }
    }
    settle().await;
    for n in 0..5 {
        let other = Operation::new(&world.store, Ok(World::key(&format!("other {n}"))), POLICY);
        let result = other.run(world.body()).await;
        assert!(matches!(result, Err(Error::InProgress { .. })), "{n}: {result:?}");
    }
    drop((stuck, others));
}

#[tokio::test]
async fn a_result_is_recorded_after_its_store_was_full_for_a_moment() {
    for kind in [StoreErrorKind::Full, StoreErrorKind::Misconfigured, StoreErrorKind::Unavailable] {
        // A body that is ready immediately and a body that was pending must behave alike.
        for pends in [false, true] {
            let world = World::new();
            world.store.always(StoreCall::Finish, Fault::Before(kind));
            let body = async {
                if pends {
                    tokio::task::yield_now().await;
                }
                world.body().await
            };
            let mut call = Box::pin(observe(world.operation(POLICY).run(body)));
            for _ in 0..10 {
                assert!(poll_once(call.as_mut()).await.is_pending());
                settle().await;
                world.clock.advance(Duration::from_millis(50));
            }
            world.store.always(StoreCall::Finish, Fault::None);
            let (result, outcome) = driving(&world.clock, call).await;
            assert_eq!(result.unwrap(), 1, "{kind:?}");
            assert!(outcome.recorded() && outcome.result_stored());
        }
    }
}

#[tokio::test]
async fn a_result_that_the_store_never_accepts_is_left_out_of_the_record_after_half_a_lease() {
    for kind in [StoreErrorKind::Full, StoreErrorKind::Unconfirmed] {
        let world = World::new();
        world.store.always(StoreCall::Finish, Fault::BeforeResult(kind));
        let began = world.clock.now();
        let (result, outcome) = driving(&world.clock, world.call(POLICY)).await;
        assert_eq!(result.unwrap(), 1, "{kind:?}");
        assert!(outcome.recorded() && !outcome.result_stored(), "{kind:?}");
        let took = world.clock.now().saturating_since(began);
        assert!((LEASE / 2..LEASE).contains(&took), "{took:?}");
        assert!(matches!(world.call(POLICY).await.0, Err(Error::ResultUnavailable { .. })));
        assert_eq!(world.runs(), 1);
    }
}

#[tokio::test]
async fn a_result_that_fails_again_after_an_outage_is_recorded_all_the_same() {
    let world = World::new();
    let mut call = Box::pin(observe(world.operation(POLICY).run(world.body())));
    let began = world.clock.now();
    // Within half a lease, one renewal succeeds. Then the store fails for a moment in which another request succeeds.
    for (fault, until) in [
        (Fault::Before(StoreErrorKind::Unavailable), LEASE / 2),
        (Fault::BeforeResult(StoreErrorKind::Unavailable), LEASE * 3 / 5),
    ] {
        world.store.always(StoreCall::Finish, fault);
        while world.clock.now().saturating_since(began) < until {
            assert!(poll_once(call.as_mut()).await.is_pending());
            settle().await;
            world.clock.advance(Duration::from_millis(50));
        }
    }
    world.store.always(StoreCall::Finish, Fault::None);
    let (result, outcome) = driving(&world.clock, call).await;
    assert_eq!(result.unwrap(), 1);
    assert!(outcome.recorded() && outcome.result_stored());
}

#[tokio::test]
async fn a_result_beside_a_journal_that_the_store_never_accepts_is_left_out_as_well() {
    let world = World::new();
    world.store.always(StoreCall::Finish, Fault::BeforeResult(StoreErrorKind::Full));
    let began = world.clock.now();
    let body = async {
        current()?.set_step_policy(StepPolicy::new().keep());
        current()?.step("charge").run(async |_| Ok::<_, Error>(7_u32)).await
    };
    let call = observe(world.operation(POLICY).run(body));
    let (result, outcome) = driving(&world.clock, call).await;
    assert_eq!(result.unwrap(), 7);
    assert!(outcome.recorded() && !outcome.result_stored());
    assert!((LEASE / 2..LEASE).contains(&world.clock.now().saturating_since(began)));
}

#[tokio::test]
async fn a_call_whose_result_is_refused_ends_after_one_lease() {
    let world = World::new();
    world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Full));
    let began = world.clock.now();
    let (result, _) = driving(&world.clock, world.call(POLICY)).await;
    assert!(matches!(result, Err(Error::Unrecorded { .. })), "{result:?}");
    assert_eq!(world.clock.now().saturating_since(began), LEASE, "the call ends after exactly one lease");
}

#[tokio::test]
async fn a_renewal_that_is_refused_after_the_attempt_recorded_its_result_loses_nothing() {
    let world = World::new();
    // The result is recorded, but the answer is lost, and further completions fail until after the next beat.
    world.store.next(StoreCall::Finish, Fault::After);
    world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
    let mut call = Box::pin(observe(world.operation(POLICY).run(world.body())));
    while world.store.count(StoreCall::Renew) == 0 {
        assert!(poll_once(call.as_mut()).await.is_pending());
        settle().await;
        world.clock.advance(Duration::from_secs(1));
    }
    // The store refuses the renewal, because the attempt has ended. The call still repeats its completion.
    for _ in 0..3 {
        settle().await;
        world.clock.advance(Duration::from_secs(1));
        assert!(poll_once(call.as_mut()).await.is_pending());
    }
    world.store.always(StoreCall::Finish, Fault::None);
    let (result, outcome) = driving(&world.clock, call).await;
    assert_eq!(result.unwrap(), 1);
    assert!(outcome.recorded());
}

#[tokio::test]
async fn an_attempt_that_has_ended_has_no_lease_time_left() {
    let world = World::new();
    let kept = Cell::new(None);
    world
        .operation(POLICY)
        .run(async {
            let attempt = current().expect("inside");
            assert_eq!(attempt.lease_remaining(), LEASE);
            kept.set(Some(attempt));
            Ok::<_, Error>(1)
        })
        .await
        .unwrap();
    assert_eq!(kept.take().unwrap().lease_remaining(), Duration::ZERO);
}

#[test]
fn a_lease_too_short_for_its_store_is_refused_at_the_start() {
    #[derive(Clone, Debug)]
    struct Slow(Arc<MemoryStore>);
    let policy = POLICY.lease(Duration::from_secs(1));
    assert!(policy.check_with(&MemoryStore::new()).is_ok());
    let store = FaultyStore::new(&*Slow(Arc::new(MemoryStore::new())).0).answers_within(Duration::from_secs(5));
    let problem = policy.check_with(&store).unwrap_err();
    assert!(problem.to_string().contains("`lease` is 1s, but one store call may take 5s"), "{problem}");
    assert!(POLICY.check_with(&store).is_ok());
}

#[tokio::test]
async fn a_renewal_that_is_refused_for_good_ends_the_body_when_its_lease_lapses() {
    for kind in [StoreErrorKind::Misconfigured, StoreErrorKind::Corrupt, StoreErrorKind::Unsupported] {
        for (policy, left) in [(POLICY, State::Released), (POLICY.on_crash(OnCrash::Fail), State::Interrupted)] {
            let world = World::new();
            world.store.always(StoreCall::Renew, Fault::Before(kind));
            let began = world.clock.now();
            let call = observe(world.operation(policy).run(std::future::pending::<Result<u32, Error>>()));
            let (result, outcome) = driving(&world.clock, call).await;
            let Err(error) = result else { panic!("{result:?}") };
            let took = world.clock.now().saturating_since(began);
            // The clock of this test moves in steps, so the lapse is noticed up to half a lease late.
            assert!((LEASE..LEASE * 3 / 2).contains(&took), "{kind:?}: {took:?}");
            let Error::LeaseLost { source: Some(source), attempt: 1, .. } = &error else { panic!("{error:?}") };
            assert_eq!(source.kind(), kind);
            assert_eq!(error.is_misconfigured(), kind == StoreErrorKind::Misconfigured);
            assert!(error.to_string().contains("refused for good"), "{error}");
            assert!(outcome.executed() && outcome.uncertain() && !outcome.recorded());
            assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
            assert_eq!(world.state().await, left, "{kind:?}");
        }
    }
}

#[tokio::test]
async fn a_refusal_for_good_ends_a_thousand_bodies_within_a_beat_of_the_lapse() {
    const BODIES: usize = 1000;
    let world = World::new();
    world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Misconfigured));
    let began = world.clock.now();
    let names: Vec<_> = (0..BODIES).map(|at| at.to_string()).collect();
    let calls = names.iter().map(|name| {
        let operation = Operation::new(&world.store, Ok(World::key(name)), POLICY);
        Box::pin(operation.run(std::future::pending::<Result<u32, Error>>()))
    });
    let all = driving(&world.clock, futures::future::join_all(calls)).await;
    let took = world.clock.now().saturating_since(began);
    assert!(all.iter().all(|result| matches!(result, Err(Error::LeaseLost { source: Some(_), .. }))));
    assert!((LEASE..LEASE * 3 / 2).contains(&took), "{took:?}");
}

#[tokio::test]
async fn an_outage_pauses_a_body_for_max_pause_at_most() {
    for (policy, pause) in [(POLICY, LEASE * 3), (POLICY.max_pause(LEASE / 2), LEASE / 2)] {
        for fault in [Fault::Before(StoreErrorKind::Unavailable), Fault::After, Fault::Hang] {
            let world = World::new();
            world.store.always(StoreCall::Renew, fault);
            let began = world.clock.now();
            let call = world.operation(policy).run(std::future::pending::<Result<u32, Error>>());
            let Err(error) = driving(&world.clock, call).await else { panic!("the call hangs") };
            let took = world.clock.now().saturating_since(began);
            // A renewal that takes effect without an answer does not confirm the lease.
            assert!((LEASE + pause..LEASE * 3 / 2 + pause).contains(&took), "{fault:?}: {took:?}");
            let Error::LeaseLost { source: Some(source), .. } = &error else { panic!("{error:?}") };
            assert!(source.is_transient() && error.is_uncertain() && !error.is_misconfigured(), "{source:?}");
        }
    }
}

#[tokio::test]
async fn a_process_that_stood_still_for_many_leases_renews_before_it_ends_its_bodies() {
    let world = World::new();
    let mut call = world.hang(POLICY).await;
    world.store.next(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
    world.clock.advance(LEASE * 50);
    settle().await;
    assert!(poll_once(call.as_mut()).await.is_pending(), "the first renewal after the standstill has failed");
    world.clock.advance(LEASE / 3);
    settle().await;
    assert!(poll_once(call.as_mut()).await.is_pending());
    assert!(matches!(world.call(POLICY).await.0, Err(Error::InProgress { .. })), "renewed");
}

#[tokio::test]
async fn a_refusal_of_one_lease_ends_the_body_of_no_other() {
    let world = World::new();
    let mut calls = Vec::new();
    for name in ["one", "other"] {
        let operation = Operation::new(&world.store, Ok(World::key(name)), POLICY);
        let mut call = Box::pin(operation.run(std::future::pending::<Result<u32, Error>>()));
        assert!(poll_once(call.as_mut()).await.is_pending());
        calls.push(call);
    }
    // For as long as a lease lasts, one store call renews both leases, and its error `Corrupt` does not name the
    // damaged record. Later each lease is renewed by its own call, and the store is unavailable.
    for _ in 0..60 {
        let both = world.clock.now().since_origin() < LEASE;
        let kind = if both { StoreErrorKind::Corrupt } else { StoreErrorKind::Unavailable };
        world.store.always(StoreCall::Renew, Fault::Before(kind));
        world.clock.advance(LEASE / 30);
        settle().await;
        for call in &mut calls {
            assert!(poll_once(call.as_mut()).await.is_pending());
        }
    }
    world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Corrupt));
    for _ in 0..10 {
        world.clock.advance(LEASE / 12);
        settle().await;
    }
    for call in &mut calls {
        let Poll::Ready(Err(error)) = poll_once(call.as_mut()).await else { panic!("the call goes on") };
        assert!(matches!(error, Error::LeaseLost { source: Some(_), .. }), "{error:?}");
    }
}
