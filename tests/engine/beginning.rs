//! Mark in a record that the attempt's body has begun; and reservations and marks that take effect late.

use idem_runtime::store::{Reservation, Verdict};

use super::super::*;

const AT_MOST_ONCE: Policy = POLICY.on_crash(OnCrash::Fail);

/// Advances the clock by `leases` times the lease duration, in steps of a quarter of a lease.
async fn outlast(world: &World, leases: u32) {
    for _ in 0..leases * 4 {
        settle().await;
        world.clock.advance(LEASE / 4);
    }
    settle().await;
}

#[tokio::test]
async fn only_policies_with_fail_or_max_attempts_mark_that_the_body_begins() {
    let one = POLICY.max_attempts(1);
    let three = POLICY.max_attempts(3);
    for (policy, first, second) in [(POLICY, 0, 0), (AT_MOST_ONCE, 1, 2), (one, 1, 1), (three, 0, 1)] {
        let world = World::new();
        let failing = world.operation(policy).run(async { Err::<u32, Error>(Error::NoAttempt) });
        assert!(failing.await.is_err());
        assert_eq!(world.store.count(StoreCall::Begin), first, "{policy:?}, the first attempt");
        let _ = world.call(policy).await;
        assert_eq!(world.store.count(StoreCall::Begin), second, "{policy:?}, the second attempt");
    }
}

/// A server that stood still for longer than a lease executes the reservation of a process that has died meanwhile.
#[tokio::test]
async fn a_reservation_that_takes_effect_after_its_process_died_is_not_counted() {
    let one = POLICY.max_attempts(1);
    for policy in [AT_MOST_ONCE, one, AT_MOST_ONCE.max_attempts(1)] {
        let world = World::new();
        for _ in 0..3 {
            let dead = FaultyStore::new(&world.store);
            dead.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
            let lost = Operation::new(&dead, Ok(World::key("k")), policy).run(world.body());
            let lost = driving(&world.clock, lost).await;
            assert!(matches!(lost, Err(Error::Store { started: false, .. })), "{lost:?}");
            let request = dead.reserves().pop().unwrap();
            assert!(matches!(world.store.reserve(&request).await, Ok(Reservation::Granted { .. })));
            world.clock.advance(LEASE);
        }
        assert_eq!(world.runs(), 0);
        let (result, outcome) = world.call(policy).await;
        assert_eq!(result.unwrap(), 1, "{policy:?}");
        assert_eq!((outcome.attempt(), world.record().await.unwrap().attempts_used), (Some(4), 1));
    }
}

#[tokio::test]
async fn no_body_begins_before_its_mark_is_confirmed() {
    for fault in [Fault::Before(StoreErrorKind::Unavailable), Fault::After] {
        let world = World::new();
        world.store.always(StoreCall::Begin, fault);
        let (result, outcome) = driving(&world.clock, observe(world.operation(AT_MOST_ONCE).run(world.body()))).await;
        assert!(matches!(result, Err(Error::Store { started: false, .. })), "{result:?}");
        assert!(!outcome.executed() && !outcome.uncertain());
        assert_eq!(world.runs(), 0);
        // The clean-up releases the key.
        settle().await;
        assert_eq!(world.state().await, State::Released);
        world.store.always(StoreCall::Begin, Fault::None);
        assert_eq!(world.call(AT_MOST_ONCE).await.0.unwrap(), 1);
    }
}

#[tokio::test]
async fn a_mark_that_takes_effect_in_an_outage_is_removed_after_the_outage() {
    let world = World::new();
    world.store.always(StoreCall::Begin, Fault::After);
    world.store.always(StoreCall::Release, Fault::Before(StoreErrorKind::Unavailable));
    let result = driving(&world.clock, world.operation(AT_MOST_ONCE).run(world.body())).await;
    assert!(matches!(result, Err(Error::Store { started: false, .. })), "{result:?}");
    outlast(&world, 5).await;
    assert!(matches!(world.state().await, State::Pending { begun: true, .. }));
    // `flush` returns before the outage ends.
    assert!(poll_once(std::pin::pin!(world.store.context().flush())).await.is_ready());
    world.store.always(StoreCall::Begin, Fault::None);
    world.store.always(StoreCall::Release, Fault::None);
    outlast(&world, 2).await;
    assert_eq!(world.state().await, State::Released);
    assert_eq!(world.call(AT_MOST_ONCE).await.0.unwrap(), 1);
}

#[tokio::test]
async fn a_call_that_is_dropped_while_its_begin_is_marked_frees_its_key() {
    for fault in [Fault::Hang, Fault::Slow(3)] {
        let world = World::new();
        world.store.next(StoreCall::Begin, fault);
        let mut call = Box::pin(world.operation(AT_MOST_ONCE).run(world.body()));
        assert!(poll_once(call.as_mut()).await.is_pending());
        drop(call);
        settle().await;
        assert_eq!(world.state().await, State::Released, "{fault:?}");
        assert_eq!((world.runs(), world.call(AT_MOST_ONCE).await.0.unwrap()), (0, 1));
    }
}

/// The store refuses the first mark because, by the store's clock, the lease has lapsed. The process can't know this in
/// advance.
#[tokio::test]
async fn a_mark_that_is_refused_after_the_lapse_of_its_lease_leads_to_another_attempt() {
    let world = World::new();
    world.store.next(StoreCall::Begin, Fault::Slow(1));
    let mut call = Box::pin(observe(world.operation(AT_MOST_ONCE).run(world.body())));
    assert!(poll_once(call.as_mut()).await.is_pending());
    world.clock.advance(LEASE);
    let (result, outcome) = driving(&world.clock, call).await;
    assert_eq!(result.unwrap(), 1);
    assert_eq!((outcome.attempt(), world.record().await.unwrap().attempts_used), (Some(2), 1));
    assert_eq!(
        world.store.count(StoreCall::Release),
        1,
        "the lapsed reservation is released: by another clock its lease may still hold"
    );
}

#[tokio::test]
async fn under_on_crash_fail_an_error_frees_its_key_after_an_outage_of_many_leases() {
    let world = World::new();
    let body = async { Err::<u32, Error>(Error::NoAttempt) };
    world.store.always(StoreCall::Release, Fault::Before(StoreErrorKind::Unavailable));
    assert!(world.operation(AT_MOST_ONCE).run(body).await.is_err());
    outlast(&world, 6).await;
    let (result, outcome) = world.call(AT_MOST_ONCE).await;
    assert!(
        matches!(result, Err(Error::InProgress { attempt: 1, .. })),
        "this process knows that the attempt has ended: {result:?}"
    );
    assert!(
        matches!(outcome.disposition(), Disposition::Retry { .. }),
        "the key is released soon, so the message must not be dead-lettered"
    );
    let elsewhere = world.memory.peer();
    let elsewhere = Operation::new(&elsewhere, Ok(World::key("k")), AT_MOST_ONCE);
    assert!(
        matches!(elsewhere.run(world.body()).await, Err(Error::Interrupted { .. })),
        "another process does not know it"
    );
    let patient = AT_MOST_ONCE.in_progress(InProgress::Wait(LEASE * 9));
    let mut waiting = Box::pin(world.call(patient));
    assert!(poll_once(waiting.as_mut()).await.is_pending(), "the call waits for the end of the attempt");
    drop(waiting);
    world.store.always(StoreCall::Release, Fault::None);
    outlast(&world, 2).await;
    assert_eq!(world.state().await, State::Released);
    assert_eq!(world.call(AT_MOST_ONCE).await.0.unwrap(), 1);
}

#[tokio::test]
async fn under_on_crash_fail_a_result_is_recorded_after_an_outage_of_many_leases() {
    let world = World::new();
    world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
    let (result, outcome) = driving(&world.clock, observe(world.operation(AT_MOST_ONCE).run(world.body()))).await;
    assert!(matches!(result, Err(Error::Unrecorded { .. })), "{result:?}");
    assert!(outcome.uncertain());
    outlast(&world, 5).await;
    world.store.always(StoreCall::Finish, Fault::None);
    outlast(&world, 2).await;
    let (result, outcome) = world.call(AT_MOST_ONCE).await;
    assert!(outcome.replayed() && result.unwrap() == 1, "the body ran once, and its result is replayed");
}

#[tokio::test]
async fn a_late_release_of_a_reopened_attempt_does_not_end_its_successor() {
    let world = World::new();
    let dead = FaultyStore::new(&world.store);
    dead.always(StoreCall::Release, Fault::Before(StoreErrorKind::Unavailable));
    let body = async { Err::<u32, Error>(Error::NoAttempt) };
    assert!(Operation::new(&dead, Ok(World::key("k")), AT_MOST_ONCE).run(body).await.is_err());
    outlast(&world, 2).await;
    assert_eq!(world.store.reopen(&World::key("k"), 1).await.unwrap(), Verdict::Applied);
    let call = world.hang(AT_MOST_ONCE).await;
    dead.always(StoreCall::Release, Fault::None);
    for _ in 0..2 {
        outlast(&world, 1).await;
        assert!(
            matches!(world.state().await, State::Pending { begun: true, .. }),
            "the late release does not apply to the next attempt"
        );
    }
    drop(call);
}
