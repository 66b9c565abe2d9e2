//! Delivery limits of brokers: while a handler runs for very long, the broker delivers its message again. These
//! deliveries must not use up the limit before the handler has ended, or the message is lost.

use idem_runtime::policy::Backoff;
use idem_runtime::testing::crash;
use idem_runtime::{Disposition, Mode, OnStoreError, StoreErrorKind, observe};
use idem_tests::{Fault, StoreCall};

use super::super::*;

/// Broker's rules for a message that is not acknowledged.
#[derive(Clone, Copy, Debug)]
struct Broker {
    name: &'static str,
    /// Number of deliveries after which the broker dead-letters or drops the message ("sets it aside").
    limit: u32,
    /// Time after which the broker delivers a message again, unless the consumer extends this time.
    timeout: Option<Duration>,
    /// True if the broker can deliver after a delay. Any other broker delivers immediately.
    delays: bool,
}

const BROKERS: [Broker; 5] = [
    Broker { name: "SQS", limit: 3, timeout: Some(LEASE), delays: true },
    Broker { name: "JetStream", limit: 5, timeout: Some(LEASE), delays: true },
    Broker { name: "Kafka share group", limit: 5, timeout: Some(LEASE), delays: false },
    // The queue dead-letters a message that was returned more than 20 times.
    Broker { name: "RabbitMQ quorum queue", limit: 21, timeout: None, delays: false },
    Broker { name: "Service Bus", limit: 10, timeout: Some(LEASE), delays: false },
];

/// Outcome of all deliveries of a message.
#[derive(PartialEq, Eq, Debug)]
struct DeliveryOutput {
    deliveries: u32,
    dead: bool,
    replayed: bool,
}

/// Delivers one message to its consumer until it is acknowledged or set aside. With `knows`, the consumer passes the
/// number of the delivery and the broker's limit to `observe`.
async fn consume(world: &World, broker: Broker, policy: Policy, knows: bool) -> DeliveryOutput {
    let mut deliveries = 0;
    loop {
        if deliveries == broker.limit {
            return DeliveryOutput { deliveries, dead: true, replayed: false };
        }
        deliveries += 1;
        // Until this time, the broker delivers the message to no other consumer.
        let hidden_until = std::sync::Arc::new(std::sync::Mutex::new(broker.timeout.map(|it| world.now() + it)));
        let mut call = observe(world.lasting("k", policy, Duration::from_secs(1)));
        if knows {
            call = call.delivery(deliveries).delivery_limit(broker.limit);
        }
        let (extended, clock) = (std::sync::Arc::clone(&hidden_until), world.clock.clone());
        let call = call.on_beat(LEASE / 3, move |_| {
            *extended.lock().unwrap() =
                broker.timeout.map(|it| idem_runtime::clock::Clock::now(&clock).since_origin() + it);
            async { Ok::<_, String>(()) }
        });
        let (_, outcome) = call.await;
        let hidden_until = *hidden_until.lock().unwrap();
        assert!(
            hidden_until.is_none_or(|until| world.now() <= until),
            "the broker delivered the message again during its handler"
        );
        match outcome.disposition() {
            Disposition::Ack => return DeliveryOutput { deliveries, dead: false, replayed: outcome.replayed() },
            Disposition::DeadLetter => return DeliveryOutput { deliveries, dead: true, replayed: false },
            Disposition::Retry { after } => {
                assert!(!after.is_zero());
                world.sleep(if broker.delays { after } else { Duration::from_millis(1) }).await;
            }
        }
    }
}

#[tokio::test]
async fn the_duplicate_of_a_handler_that_runs_for_ten_leases_is_not_dead_lettered() {
    for broker in BROKERS {
        let world = World::new();
        let handler = world.lasting("k", POLICY, LEASE * 10);
        let (first, duplicate) =
            world.drive(async { tokio::join!(handler, consume(&world, broker, POLICY, true)) }).await;
        assert_eq!((first.unwrap(), world.runs()), (1, 1), "{}", broker.name);
        assert!(!duplicate.dead && duplicate.replayed, "{}: {duplicate:?}", broker.name);
        assert!(world.now() < LEASE * 25, "{}: the duplicate is done soon after: {:?}", broker.name, world.now());
    }
}

#[tokio::test]
async fn a_consumer_that_does_not_count_deliveries_loses_its_duplicate() {
    for broker in BROKERS {
        let world = World::new();
        let handler = world.lasting("k", POLICY, LEASE * 10);
        let (_, duplicate) = world.drive(async { tokio::join!(handler, consume(&world, broker, POLICY, false)) }).await;
        let burnt = DeliveryOutput { deliveries: broker.limit, dead: true, replayed: false };
        assert_eq!(duplicate, burnt, "{}: without the wait the duplicates use up their deliveries", broker.name);
    }
}

#[tokio::test]
async fn a_duplicate_takes_over_from_a_worker_that_died() {
    for broker in BROKERS {
        let clock = ManualClock::new();
        let memory = MemoryStore::options().clock(clock.clone()).build();
        let dead = World { clock: clock.clone(), store: FaultyStore::new(&memory), runs: AtomicU32::new(0) };
        let mut handler = Box::pin(dead.lasting("k", POLICY, LEASE * 10));
        assert!(poll_once(handler.as_mut()).await.is_pending());
        // The handler's process renews its lease for three times the lease duration, and then dies.
        dead.drive(dead.sleep(LEASE * 3)).await;
        crash(&dead.store);
        drop(handler);
        let world = World { clock, store: FaultyStore::new(&memory.peer()), runs: AtomicU32::new(0) };
        let before = world.now();
        let delivered = world.drive(consume(&world, broker, POLICY, true)).await;
        assert_eq!((world.runs(), delivered.dead), (1, false), "{}: {delivered:?}", broker.name);
        assert!(
            world.now() - before <= LEASE * 2,
            "{}: the takeover comes within two leases: {:?}",
            broker.name,
            world.now() - before
        );
    }
}

#[tokio::test]
async fn an_outage_of_the_store_dead_letters_no_message() {
    for broker in BROKERS {
        for knows in [true, false] {
            let world = World::new();
            world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
            let outage = async {
                world.sleep(Duration::from_secs(1_800)).await;
                world.store.always(StoreCall::Reserve, Fault::None);
            };
            let (delivered, ()) =
                world.drive(async { tokio::join!(consume(&world, broker, POLICY, knows), outage) }).await;
            assert_eq!(delivered.dead, !knows, "{}: {delivered:?}", broker.name);
            assert_eq!(world.runs(), u32::from(!delivered.dead), "{}", broker.name);
        }
    }
    // Under `on_store_error = run`, an outage starts the body immediately, without protection.
    let world = World::new();
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let call = world.lasting("k", POLICY.on_store_error(OnStoreError::Run), Duration::ZERO);
    assert!(world.drive(observe(call).delivery(5).delivery_limit(5)).await.1.executed());
    assert!(world.now() < Duration::from_secs(1));
    // A permanent error of the store ends the call immediately. An outage that does not end makes the call fail after
    // the policy's time-out and a lease.
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Misconfigured));
    let call = world.lasting("l", POLICY, Duration::ZERO);
    assert!(world.drive(observe(call).delivery(5).delivery_limit(5)).await.1.misconfigured());
    assert!(world.now() < Duration::from_secs(1));
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let call = world.lasting("m", POLICY, Duration::ZERO);
    let (result, outcome) = world.drive(observe(call).delivery(5).delivery_limit(5)).await;
    assert!(matches!(result, Err(Error::Store { .. })) && !outcome.executed());
    assert!(world.now() >= Policy::DEFAULT_TIMEOUT + LEASE);
}

#[tokio::test]
async fn the_pauses_between_retries_of_a_duplicate_grow() {
    let world = World::new();
    let handler = world.lasting("k", POLICY.timeout(LEASE * 1_000), LEASE * 100);
    let ask = async {
        let mut pauses = Vec::new();
        for delivery in 1..=8 {
            let (_, outcome) = observe(world.lasting("k", POLICY, Duration::ZERO)).delivery(delivery).await;
            let Disposition::Retry { after } = outcome.disposition() else { panic!("{outcome:?}") };
            pauses.push(after);
        }
        pauses
    };
    let mut handler = pin!(handler);
    assert!(poll_once(handler.as_mut()).await.is_pending());
    let pauses = ask.await;
    assert_eq!(pauses[0], LEASE, "the first pause may be due to a worker that died");
    let longest = Duration::from_secs(300);
    for (at, pause) in pauses.iter().enumerate().skip(1) {
        let most = (LEASE + LEASE * (1 << (at - 1))).min(longest);
        assert!((LEASE.max(most / 2)..=most).contains(pause), "delivery {}: {pause:?}, at most {most:?}", at + 1);
    }
    // The policy bounds the backoff, but no retry comes before the lease lapses.
    let short = POLICY.backoff(Backoff::new(Duration::from_secs(1), Duration::from_secs(8)));
    let (_, outcome) = observe(world.lasting("k", short, Duration::ZERO)).delivery(7).await;
    assert_eq!(outcome.disposition(), Disposition::Retry { after: LEASE });
}

#[tokio::test]
async fn a_duplicate_waits_only_near_the_delivery_limit() {
    for (delivery, limit, waits) in
        [(1, 5, false), (3, 5, false), (4, 5, true), (5, 5, true), (9, 5, true), (1, 1, true)]
    {
        let world = World::new();
        let mut handler = pin!(world.lasting("k", POLICY, LEASE));
        assert!(poll_once(handler.as_mut()).await.is_pending());
        let mut duplicate = pin!(observe(world.lasting("k", POLICY, LEASE)).delivery(delivery).delivery_limit(limit));
        assert_eq!(poll_once(duplicate.as_mut()).await.is_pending(), waits, "delivery {delivery} of {limit}");
    }
    // If only the delivery limit is known, any delivery may be the last one. In shadow mode no call waits.
    let world = World::new();
    let mut handler = pin!(world.lasting("k", POLICY, LEASE));
    assert!(poll_once(handler.as_mut()).await.is_pending());
    let mut duplicate = pin!(observe(world.lasting("k", POLICY, LEASE)).delivery_limit(20));
    assert!(poll_once(duplicate.as_mut()).await.is_pending());
    let shadow = observe(world.lasting("k", POLICY.mode(Mode::Shadow), Duration::ZERO)).delivery(5).delivery_limit(5);
    assert!(shadow.await.1.bypassed().is_some());
}

#[tokio::test]
async fn each_failed_delivery_is_retried_after_a_longer_pause() {
    const LONGEST: Duration = Duration::from_secs(300);
    // Makes a call whose body fails. In mode `Enforce` the key's record counts the attempt; in mode `Off` there is no
    // record.
    let failing = |world: &World, mode: Mode| {
        let body = async { Err::<u32, _>(Error::NoAttempt) };
        world.operation("k", POLICY.mode(mode)).run(body)
    };
    for mode in [Mode::Enforce, Mode::Off] {
        let world = World::new();
        let mut last = Duration::ZERO;
        let mut spread = std::collections::BTreeSet::new();
        for delivery in 1..=12 {
            let (_, outcome) = observe(failing(&world, mode)).delivery(delivery).await;
            let Disposition::Retry { after } = outcome.disposition() else { panic!("{outcome:?}") };
            let most = Duration::from_secs(1 << (delivery - 1)).min(LONGEST);
            assert!((most / 2..=most).contains(&after), "{mode:?}, delivery {delivery}: {after:?}");
            spread.insert(after);
            last = after;
        }
        assert!(last >= LONGEST / 2 && spread.len() >= 9, "{mode:?}: {spread:?}");
    }
    // A delivery may also fail after its call succeeded, or without any call.
    let world = World::new();
    let (_, outcome) = observe(async {
        world.lasting("ok", POLICY, Duration::ZERO).await?;
        Err::<u32, _>(Error::NoAttempt)
    })
    .delivery(9)
    .await;
    assert!(matches!(outcome.disposition(), Disposition::Retry { after } if after >= Duration::from_secs(100)));
    let (_, outcome) = observe(async { Ok::<_, Error>(1) }).delivery(9).await;
    assert!(matches!(outcome.disposition(), Disposition::Retry { after } if after >= Duration::from_secs(100)));
}

#[tokio::test]
async fn a_duplicates_pause_grows_with_its_deliveries_during_one_attempt() {
    let world = World::new();
    let mut handler = pin!(world.lasting("k", POLICY, LEASE * 10));
    assert!(poll_once(handler.as_mut()).await.is_pending());
    // Deliveries 1 to 8 failed before this attempt began, so these deliveries must not lengthen the pause.
    let (_, outcome) = observe(world.lasting("k", POLICY, Duration::ZERO)).delivery(9).await;
    assert_eq!(
        outcome.disposition(),
        Disposition::Retry { after: LEASE },
        "the first duplicate that finds this attempt running"
    );
    let (_, outcome) = observe(world.lasting("k", POLICY, Duration::ZERO)).delivery(10).await;
    assert!(matches!(outcome.disposition(), Disposition::Retry { after } if after <= LEASE * 2), "{outcome:?}");
}

#[tokio::test]
async fn at_most_four_duplicates_on_their_last_deliveries_wait() {
    const SLOTS: u32 = 10;
    for delivery in [4, 5] {
        let world = World::new();
        let names = (0..SLOTS).map(|at| format!("held {at}")).collect::<Vec<_>>();
        let mut handlers = names.iter().map(|it| Box::pin(world.lasting(it, POLICY, LEASE))).collect::<Vec<_>>();
        for handler in &mut handlers {
            assert!(poll_once(handler.as_mut()).await.is_pending());
        }
        let mut waiting = Vec::new();
        for name in &names {
            let mut duplicate =
                Box::pin(observe(world.lasting(name, POLICY, LEASE)).delivery(delivery).delivery_limit(5));
            match poll_once(duplicate.as_mut()).await {
                Poll::Pending => waiting.push(duplicate),
                Poll::Ready((_, outcome)) => match outcome.disposition() {
                    Disposition::DeadLetter => {
                        assert_eq!(delivery, 5, "a message is dead-lettered only on its last delivery");
                    }
                    other => assert!(matches!(other, Disposition::Retry { .. }) && delivery == 4, "{other:?}"),
                },
            }
        }
        assert_eq!(waiting.len(), 4, "number of duplicates that wait");
        // One waiting duplicate ends, so another one may wait.
        waiting.pop();
        let mut duplicate =
            Box::pin(observe(world.lasting(&names[9], POLICY, LEASE)).delivery(delivery).delivery_limit(5));
        assert!(poll_once(duplicate.as_mut()).await.is_pending());
    }
}
