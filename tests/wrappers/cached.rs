//! `Cached`: the records that it caches, the ages of entries, and the events that remove entries.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use idem_runtime::cached::CachedOptions;
use idem_runtime::key::Fingerprint;
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::store::{
    Finish, Inspection, Release, Reservation, ReserveRequest, StoreContext, StoreFuture, Verdict, forward,
};
use idem_runtime::{Cached, Error, InProgress, Key, MemoryStore, OnCrash, OnStoreError, Store, StoreErrorKind};
use idem_tests::Reopen as _;
use idem_tests::{Fault, StoreCall};

use super::{LEASE, POLICY, TICK, TTL, World, completed, key, payload, polled, stored};

const EVERY: [StoreCall; 7] = [
    StoreCall::Reserve,
    StoreCall::Renew,
    StoreCall::Finish,
    StoreCall::Release,
    StoreCall::Wait,
    StoreCall::Inspect,
    StoreCall::Decide,
];
/// Maximum age of cache entries that outlasts every retention in these tests.
const AGELESS: Duration = Duration::from_secs(1 << 30);

fn calls(world: &World) -> usize {
    EVERY.iter().map(|call| world.store.count(*call)).sum()
}

fn ageless(world: &World) -> Cached {
    Cached::options().max_age(AGELESS).wrap(world.store.clone())
}

/// Replays `name`, and returns the number of operations that the replay costs at the inner store.
async fn costs(world: &World, store: &Cached, name: &str, expected: &Record) -> usize {
    let before = calls(world);
    assert_eq!(world.replay(store, name).await, *expected);
    calls(world) - before
}

#[tokio::test]
async fn a_replay_of_a_result_that_the_same_handle_recorded_makes_no_store_call() {
    let world = World::new();
    let store = Cached::new(world.store.clone());
    world.call(&store, POLICY, "first").await.0.unwrap();
    assert_eq!(calls(&world), 2, "a first run makes as many store calls as without the cache");
    for on_store_error in [OnStoreError::Fail, OnStoreError::Run] {
        for _ in 0..5 {
            let (replayed, outcome) = world.call(&store, POLICY.on_store_error(on_store_error), "again").await;
            assert_eq!(replayed.unwrap(), "first");
            assert!(outcome.replayed() && outcome.attempt() == Some(1));
        }
    }
    assert_eq!((calls(&world), world.runs()), (2, 1));

    // The cache also holds recorded errors, and results that could not be stored.
    for (name, finish) in [
        ("failed", Finish::Failed(stored(b"1"))),
        ("too large", Finish::Completed(StoredResult::TooLarge { size: 9 })),
        ("unencodable", Finish::Completed(StoredResult::Unencodable)),
    ] {
        let lease = world.reserved(&store, name).await;
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
        assert_eq!(costs(&world, &store, name, &Record::after(&lease, finish.state())).await, 0, "{name}");
    }
}

#[tokio::test]
async fn a_result_of_another_process_costs_one_store_call_for_each_of_the_first_two_replays() {
    let world = World::new();
    let record = world.finished(&world.memory, "k", b"1").await;
    let store = Cached::new(world.store.clone());
    for expected in [1, 1, 0, 0, 0] {
        assert_eq!(costs(&world, &store, "k", &record).await, expected);
    }
    assert_eq!((world.store.count(StoreCall::Reserve), world.store.count(StoreCall::Inspect)), (1, 1));
}

/// As long as a record may change, the cache asks the store each time.
#[tokio::test]
async fn only_finished_records_are_cached() {
    let world = World::new();
    let store = ageless(&world);
    let asks = async |name: &str, request: ReserveRequest, is: fn(&Reservation) -> bool| {
        for _ in 0..3 {
            let before = world.store.count(StoreCall::Reserve);
            let request = request.clone().owner(world.memory.context().new_owner());
            let answer = store.reserve(&request).await.unwrap();
            assert!(is(&answer), "{name}: {answer:?}");
            assert_eq!(world.store.count(StoreCall::Reserve), before + 1, "{name}");
        }
        assert!(store.is_empty(), "{name}");
    };
    world.reserved(&store, "pending").await;
    asks("pending", world.request("pending"), |it| matches!(it, Reservation::InProgress { .. })).await;

    let fail = world.request("interrupted").on_crash(OnCrash::Fail);
    let Reservation::Granted { lease, .. } = store.reserve(&fail).await.unwrap() else { panic!() };
    assert_eq!(store.release(&lease, Release::Interrupted).await.unwrap(), Verdict::Applied);
    asks("interrupted", fail, |it| matches!(it, Reservation::Interrupted { .. })).await;

    let lease = world.reserved(&store, "released").await;
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    let limited = world.request("released").max_attempts(std::num::NonZeroU32::new(1));
    asks("exhausted", limited, |it| matches!(it, Reservation::AttemptsExhausted { .. })).await;
    assert_eq!(world.reserved(&store, "released").await.attempt, 2);
    assert!(store.is_empty());
}

#[tokio::test]
async fn a_refused_or_failed_finish_is_not_cached() {
    let world = World::new();
    let store = ageless(&world);
    let late = world.reserved(&store, "k").await;
    world.clock.advance(LEASE);
    let successor = world.reserved(&store, "k").await;
    assert_eq!(store.finish(&late, &completed(b"late")).await.unwrap(), Verdict::Refused);
    assert!(store.is_empty());
    assert!(matches!(store.reserve(&world.request("k")).await.unwrap(), Reservation::InProgress { attempt: 2, .. }));
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Full, StoreErrorKind::TooLarge] {
        world.store.next(StoreCall::Finish, Fault::Before(kind));
        store.finish(&successor, &completed(b"1")).await.unwrap_err();
        assert!(store.is_empty());
    }
    // The failed write had no effect, so the retention counts from the successful write.
    assert_eq!(store.finish(&successor, &completed(b"1")).await.unwrap(), Verdict::Applied);
    assert_eq!(costs(&world, &store, "k", &Record::after(&successor, completed(b"1").state())).await, 0);
}

#[tokio::test]
async fn the_fingerprint_is_checked_when_the_cache_answers() {
    let world = World::new();
    let store = Cached::new(world.store.clone());
    let marked = |payload| world.request("k").fingerprint(Fingerprint::of(&payload).unwrap());
    let Reservation::Granted { lease, .. } = store.reserve(&marked(1)).await.unwrap() else { panic!() };
    assert_eq!(store.finish(&lease, &completed(b"1")).await.unwrap(), Verdict::Applied);
    let before = calls(&world);
    let record = Record::after(&lease, completed(b"1").state());
    for _ in 0..3 {
        assert_eq!(store.reserve(&marked(2)).await.unwrap(), Reservation::FingerprintMismatch { attempt: 1 });
        assert_eq!(store.reserve(&marked(1)).await.unwrap().aged(None), Reservation::finished(record.clone()));
        assert_eq!(world.replay(&store, "k").await, record, "nothing to compare");
        let own = marked(1).owner(lease.owner);
        assert_eq!(
            store.reserve(&own).await.unwrap().aged(None),
            Reservation::finished(record.clone()),
            "met by its own owner"
        );
    }
    assert_eq!(calls(&world), before);

    // The fingerprint is also compared when the record enters the cache.
    let elsewhere = Cached::new(world.store.clone());
    for _ in 0..3 {
        assert_eq!(elsewhere.reserve(&marked(2)).await.unwrap(), Reservation::FingerprintMismatch { attempt: 1 });
        assert_eq!(elsewhere.reserve(&marked(1)).await.unwrap().aged(None), Reservation::finished(record.clone()));
    }
}

#[tokio::test]
async fn a_cache_entry_ends_with_the_retention_of_its_record() {
    // Case 1: the same handle has finished the record.
    let world = World::new();
    let store = ageless(&world);
    world.clock.advance(Duration::from_secs(5));
    let record = world.finished(&store, "k", b"1").await;
    world.clock.advance(TTL - TICK);
    assert_eq!(costs(&world, &store, "k", &record).await, 0);
    world.clock.advance(TICK);
    assert_eq!(world.reserved(&store, "k").await.attempt, 1, "forgotten");

    // Case 2: another handle has finished the record, and this handle reads the record after half of the retention.
    let world = World::new();
    let store = ageless(&world);
    let record = world.finished(&world.memory, "k", b"1").await;
    world.clock.advance(TTL / 2);
    for expected in [1, 1, 0] {
        assert_eq!(costs(&world, &store, "k", &record).await, expected);
    }
    world.clock.advance(TTL / 2 - TICK);
    assert_eq!(costs(&world, &store, "k", &record).await, 0);
    world.clock.advance(TICK);
    assert_eq!(world.reserved(&store, "k").await.attempt, 1, "forgotten");

    // Case 3: the answer to the write comes late. The retention counts from the request of the write.
    let world = World::new();
    let store = ageless(&world);
    let lease = world.reserved(&store, "k").await;
    world.store.next(StoreCall::Finish, Fault::Slow(1));
    let finish = completed(b"1");
    let mut call = polled(store.finish(&lease, &finish), 2).await;
    world.clock.advance(TTL / 2);
    assert_eq!((&mut call).await.unwrap(), Verdict::Applied);
    world.clock.advance(TTL / 2);
    assert_eq!(world.reserved(&store, "k").await.attempt, 1, "forgotten");

    // Case 4: the handle reads the record. The retention counts from the write of the record, and not from the answer
    // to the read.
    let world = World::new();
    let store = ageless(&world);
    world.finished(&world.memory, "k", b"1").await;
    world.replay(&store, "k").await;
    world.store.next(StoreCall::Inspect, Fault::Slow(1));
    let request = world.request("k");
    let call = polled(store.reserve(&request), 2).await;
    world.clock.advance(TTL / 2);
    call.await.unwrap();
    world.clock.advance(TTL / 2);
    assert_eq!(world.reserved(&store, "k").await.attempt, 1, "forgotten");
}

/// A repeated `finish` is applied, but the handle does not know the time of the first `finish`.
#[tokio::test]
async fn a_repeated_finish_does_not_prolong_the_retention() {
    for how in ["lost", "dropped", "at once"] {
        let world = World::new();
        let store = ageless(&world);
        let lease = world.reserved(&store, "k").await;
        let finish = completed(b"1");
        let pending = match how {
            "lost" => {
                world.store.next(StoreCall::Finish, Fault::After);
                assert!(store.finish(&lease, &finish).await.unwrap_err().may_have_landed());
                None
            }
            how => {
                world.store.next(StoreCall::Finish, Fault::Slow(1));
                let call = polled(store.finish(&lease, &finish), 2).await;
                (how == "at once").then_some(call)
            }
        };
        world.clock.advance(TTL / 2);
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied, "{how}");
        drop(pending);
        let record = Record::after(&lease, finish.state());
        world.replay(&store, "k").await;
        world.replay(&store, "k").await;
        assert_eq!(costs(&world, &store, "k", &record).await, 0, "{how}: read from the store meanwhile");
        world.clock.advance(TTL / 2);
        assert_eq!(world.reserved(&store, "k").await.attempt, 1, "{how}: forgotten with the first write");
    }

    // The `finish` is repeated after its answer. The cache entry keeps its content and its expiry.
    let world = World::new();
    let store = ageless(&world);
    let lease = world.reserved(&store, "k").await;
    assert_eq!(store.finish(&lease, &completed(b"1")).await.unwrap(), Verdict::Applied);
    world.clock.advance(TTL / 2);
    let _either = store.finish(&lease, &completed(b"2")).await.unwrap();
    assert_eq!(world.replay(&store, "k").await, Record::after(&lease, completed(b"1").state()));
    world.clock.advance(TTL / 2);
    assert_eq!(world.reserved(&store, "k").await.attempt, 1, "forgotten");
}

#[tokio::test]
async fn a_reopen_through_the_cache_takes_effect_immediately() {
    let world = World::new();
    let store = ageless(&world);
    let peer = store.peer(world.memory.peer());
    for reopener in [&store, &peer] {
        let name = if std::ptr::eq(reopener, &raw const store) { "own" } else { "peer" };
        world.finished(&store, name, b"1").await;
        world.replay(&peer, name).await;
        assert_eq!(reopener.reopen(&key(name), 2).await.unwrap(), Verdict::Refused);
        assert_eq!(reopener.reopen(&key(name), 1).await.unwrap(), Verdict::Applied);
        assert_eq!(world.reserved(&store, name).await.attempt, 2, "{name}");
        assert!(matches!(
            peer.reserve(&world.request(name)).await.unwrap(),
            Reservation::InProgress { attempt: 2, .. }
        ));
    }
}

#[tokio::test]
async fn a_reopen_by_another_process_is_noticed_within_the_maximum_age() {
    const AGE: Duration = Duration::from_secs(60);
    let world = World::new();
    let store = Cached::new(world.store.clone());
    let record = world.finished(&store, "k", b"1").await;
    // The cache asks the store once within each maximum age.
    for _ in 0..3 {
        world.clock.advance(AGE - TICK);
        assert_eq!(costs(&world, &store, "k", &record).await, 0);
        world.clock.advance(TICK);
        assert_eq!(costs(&world, &store, "k", &record).await, 1);
    }
    world.clock.advance(TICK);
    assert_eq!(world.memory.reopen(&key("k"), 1).await.unwrap(), Verdict::Applied);
    assert_eq!(costs(&world, &store, "k", &record).await, 0, "this process does not know of the change");
    world.clock.advance(AGE - TICK);
    assert_eq!(world.reserved(&store, "k").await.attempt, 2);
    assert!(store.is_empty());
}

/// If the store reads a record before an operator's decision, and the answer to the read arrives after the decision,
/// the record must not enter the cache.
#[tokio::test]
async fn a_decision_during_a_read_leaves_no_stale_entry() {
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Meanwhile {
        Reopened,
        ReopenedByPeer,
        ReopenDropped,
        ReopenAnswerLost,
        Rerun,
        RunsElsewhere,
        InterruptedElsewhere,
    }
    use Meanwhile::*;
    for entering in ["finish", "read"] {
        for meanwhile in
            [Reopened, ReopenedByPeer, ReopenDropped, ReopenAnswerLost, Rerun, RunsElsewhere, InterruptedElsewhere]
        {
            let world = World::new();
            let store = ageless(&world);
            let peer = store.peer(world.memory.peer());
            let (finish, request, lease);
            // A finish or a read is under way, and its answer will hold the record from before the decision.
            let call: std::pin::Pin<Box<dyn Future<Output = bool>>> = if entering == "finish" {
                lease = world.reserved(&store, "k").await;
                finish = completed(b"1");
                world.store.next(StoreCall::Finish, Fault::Slow(1));
                let call = polled(store.finish(&lease, &finish), 2).await;
                Box::pin(async { call.await.unwrap() == Verdict::Applied })
            } else {
                world.finished(&world.memory, "k", b"1").await;
                world.replay(&store, "k").await;
                world.store.next(StoreCall::Inspect, Fault::Slow(1));
                request = world.request("k");
                let call = polled(store.reserve(&request), 2).await;
                Box::pin(async { matches!(call.await.unwrap(), Reservation::Finished { .. }) })
            };
            let reopen_elsewhere =
                async || assert_eq!(world.memory.reopen(&key("k"), 1).await.unwrap(), Verdict::Applied);
            // The record changes meanwhile: through this cache, its second handle, or another process.
            match meanwhile {
                Reopened => assert_eq!(store.reopen(&key("k"), 1).await.unwrap(), Verdict::Applied),
                ReopenedByPeer => assert_eq!(peer.reopen(&key("k"), 1).await.unwrap(), Verdict::Applied),
                ReopenDropped => {
                    world.store.next(StoreCall::Decide, Fault::Slow(1));
                    let key = key("k");
                    drop(polled(store.reopen(&key, 1), 2).await);
                }
                ReopenAnswerLost => {
                    world.store.next(StoreCall::Decide, Fault::After);
                    store.reopen(&key("k"), 1).await.unwrap_err();
                }
                Rerun => {
                    reopen_elsewhere().await;
                    // The reservation gets the second attempt: the key was reopened elsewhere.
                    assert_eq!(world.reserved(&peer, "k").await.attempt, 2);
                }
                RunsElsewhere => {
                    reopen_elsewhere().await;
                    world.reserved(&world.memory, "k").await;
                    let answer = peer.reserve(&world.request("k")).await.unwrap();
                    assert!(matches!(answer, Reservation::InProgress { attempt: 2, .. }), "{answer:?}");
                }
                InterruptedElsewhere => {
                    reopen_elsewhere().await;
                    let lease = world.reserved(&world.memory, "k").await;
                    assert_eq!(world.memory.release(&lease, Release::Interrupted).await.unwrap(), Verdict::Applied);
                    let answer = peer.reserve(&world.request("k")).await.unwrap();
                    assert_eq!(answer, Reservation::Interrupted { attempt: 2 });
                }
            }
            assert!(call.await, "{entering}: an earlier request gets the earlier record");
            // No later reservation may get the old record from the cache.
            let after = store.reserve(&world.request("k")).await.unwrap();
            assert!(!matches!(after, Reservation::Finished { .. }), "{entering}, {meanwhile:?}: a stale entry");
        }
    }
}

/// A read during an operator's decision may return the old record, even if the read began later than the decision.
#[tokio::test]
async fn a_slow_decision_leaves_no_stale_entry() {
    for ends in ["before", "after"] {
        let world = World::new();
        let store = ageless(&world);
        world.finished(&world.memory, "k", b"1").await;
        world.replay(&store, "k").await;
        world.store.next(StoreCall::Decide, Fault::Slow(1));
        let k = key("k");
        let reopen = polled(store.reopen(&k, 1), 1).await;
        if ends == "before" {
            world.replay(&store, "k").await;
            assert_eq!(reopen.await.unwrap(), Verdict::Applied);
        } else {
            // The decision is under way, so the handle reads the record from the store.
            world.store.next(StoreCall::Inspect, Fault::Slow(1));
            let request = world.request("k");
            let read = polled(store.reserve(&request), 2).await;
            assert_eq!(reopen.await.unwrap(), Verdict::Applied);
            assert!(matches!(read.await.unwrap(), Reservation::Finished { .. }));
        }
        assert_eq!(world.reserved(&store, "k").await.attempt, 2, "{ends}: a stale entry");
    }
}

/// A late `InProgress` of an attempt must not remove the cached result of that attempt.
#[tokio::test]
async fn a_late_in_progress_answer_keeps_the_cached_result_of_its_attempt() {
    let world = World::new();
    let store = ageless(&world);
    let lease = world.reserved(&store, "k").await;
    world.store.next(StoreCall::Reserve, Fault::Slow(1));
    let duplicate = world.request("k");
    let call = polled(store.reserve(&duplicate), 2).await;
    assert_eq!(store.finish(&lease, &completed(b"1")).await.unwrap(), Verdict::Applied);
    assert!(matches!(call.await.unwrap(), Reservation::InProgress { attempt: 1, .. }));
    assert_eq!(costs(&world, &store, "k", &Record::after(&lease, completed(b"1").state())).await, 0);
}

#[tokio::test]
async fn a_waiting_duplicate_gets_the_result_from_the_cache() {
    let world = World::new();
    let store = Cached::new(world.store.clone());
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(10)));
    let lease = world.reserved(&store, "call").await;
    let finish = async {
        idem_tests::settle().await;
        assert_eq!(store.finish(&lease, &completed(b"\"first\"")).await.unwrap(), Verdict::Applied);
    };
    let ((result, _), ()) = futures::join!(world.call(&store, wait, "again"), finish);
    assert_eq!((result.unwrap().as_str(), world.runs()), ("first", 0));
    // Two reservations reached the store: one of each caller.
    assert_eq!(world.store.count(StoreCall::Reserve), 2);
}

#[tokio::test]
async fn a_cached_record_is_replayed_while_the_store_is_away() {
    let world = World::new();
    let store = ageless(&world);
    world.call(&store, POLICY, "first").await.0.unwrap();
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Unconfirmed, StoreErrorKind::Corrupt] {
        for call in EVERY {
            world.store.always(call, Fault::Before(kind));
        }
        let (result, _) = world.call(&store, POLICY.on_store_error(OnStoreError::Run), "again").await;
        assert_eq!(result.unwrap(), "first");
        // The store is asked for a key that is not in the cache.
        let answer = store.reserve(&world.request("another")).await;
        assert_eq!(answer.unwrap_err().kind(), kind);
    }
    assert_eq!(world.runs(), 1);
}

/// If the cache can't read a record, because a right is missing or because of a fault, the cache passes the reservation
/// to the store.
#[tokio::test]
async fn a_cached_store_reserves_the_key_if_its_read_fails() {
    let world = World::new();
    let record = world.finished(&world.memory, "k", b"1").await;
    let store = Cached::new(world.store.clone());
    world.store.always(StoreCall::Inspect, Fault::Before(StoreErrorKind::Misconfigured));
    for expected in [1, 2, 2] {
        assert_eq!(costs(&world, &store, "k", &record).await, expected);
    }
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let error = store.reserve(&world.request("k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "a failed request must not be answered from the cache");
    // The record is forgotten between the answer of the read and the reservation.
    let world = World::new();
    let store = Cached::new(world.store.clone());
    world.finished(&world.memory, "k", b"1").await;
    world.replay(&store, "k").await;
    world.clock.advance(TTL);
    assert_eq!(world.reserved(&store, "k").await.attempt, 1);
    assert!(store.is_empty());
}

/// Store in memory that either renews no leases or can't read finished records.
#[derive(Clone, Debug)]
struct Peculiar {
    memory: MemoryStore,
    /// Context without renewal, like the context of a store inside a user's transaction, which may be rolled back.
    none: Option<Arc<StoreContext>>,
    /// True if finished records can't be read at present.
    unreadable: bool,
}

impl Peculiar {
    fn seen(&self, record: Record) -> Record {
        match self.unreadable && record.is_finished() {
            true => {
                let mut record = record;
                record.state = State::Completed(StoredResult::Unreadable { reason: "not now".into() });
                record
            }
            false => record,
        }
    }
}

impl Store for Peculiar {
    forward! {
        |store| store.memory => namespace, response_timeout, begin, renew, append, finish, release, wait, decide, purge, list, ping
    }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn context(&self) -> &StoreContext {
        self.none.as_deref().unwrap_or(self.memory.context())
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(async move {
            Ok(match self.memory.reserve(request).await? {
                Reservation::Finished { record, age, .. } => Reservation::finished(self.seen(record)).aged(age),
                other => other,
            })
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let inspection = self.memory.inspect(key).await?;
            Ok(inspection.map(|mut found| {
                found.record = self.seen(found.record.clone());
                found
            }))
        })
    }
}

#[tokio::test]
async fn no_record_of_a_transaction_is_cached() {
    let world = World::new();
    let none = Some(Arc::new(StoreContext::without_renewal("memory", Arc::new(world.clock.clone()))));
    let store = Cached::new(Peculiar { memory: world.memory.clone(), none, unreadable: false });
    for name in ["1", "2"] {
        let record = world.finished(&store, name, b"1").await;
        for _ in 0..3 {
            assert_eq!(world.replay(&store, name).await, record);
        }
        assert!(store.is_empty());
    }
    // After a rollback, another attempt must be able to run. The reopening has the same effect as a rollback here.
    assert_eq!(world.memory.reopen(&key("1"), 1).await.unwrap(), Verdict::Applied);
    assert_eq!(world.reserved(&store, "1").await.attempt, 2);
}

#[tokio::test]
async fn the_cache_asks_the_store_again_for_an_unreadable_result() {
    let world = World::new();
    world.finished(&world.memory, "k", b"1").await;
    let readable = Cached::new(world.memory.clone());
    let store = readable.peer(Peculiar { memory: world.memory.clone(), none: None, unreadable: true });
    for _ in 0..3 {
        let met = world.replay(&store, "k").await;
        assert!(matches!(payload(&met), StoredResult::Unreadable { .. }), "{met:?}");
    }
    assert!(store.is_empty());
    world.replay(&readable, "k").await;
    let met = world.replay(&store, "k").await;
    assert!(matches!(payload(&met), StoredResult::Unreadable { .. }), "known to be finished, and still not readable");
    assert_eq!(*payload(&world.replay(&readable, "k").await), stored(b"1"), "the result is readable later");
}

#[tokio::test]
async fn recently_used_entries_stay_in_the_cache() {
    let world = World::new();
    let store = Cached::options().max_entries(8).max_age(AGELESS).wrap(world.store.clone());
    let hot = world.finished(&store, "hot", b"hot").await;
    for n in 0..200 {
        let name = n.to_string();
        let record = world.finished(&store, &name, b"1").await;
        if n % 20 == 0 {
            assert_eq!(costs(&world, &store, &name, &record).await, 0, "the latest record is cached");
        }
        assert_eq!(costs(&world, &store, "hot", &hot).await, 0, "a record in use stays cached");
        assert!(store.len() <= 8);
    }
    assert_eq!(store.len(), 8);
    // A record without a cache entry still exists in the store, and its replay costs one operation of the store.
    let before = calls(&world);
    world.replay(&store, "3").await;
    assert_eq!(calls(&world) - before, 1);
}

#[tokio::test]
async fn the_memory_of_a_cache_is_bounded() {
    const MAX: usize = 100_000;
    let world = World::new();
    let store = Cached::options().max_bytes(MAX).max_age(AGELESS).wrap(world.store.clone());
    for n in 0..300_usize {
        world.finished(&store, &n.to_string(), &vec![b'x'; n * 97 % 20_000]).await;
        assert!(store.bytes() <= MAX, "{} bytes", store.bytes());
    }
    assert!(store.bytes() > MAX / 2, "{} bytes: the room is used", store.bytes());
    // A record too large for the cache removes no other entry, and each replay asks the store.
    let before = store.len();
    let large = world.finished(&store, "large", &vec![b'x'; MAX]).await;
    assert_eq!(store.len(), before);
    for _ in 0..3 {
        assert_eq!(costs(&world, &store, "large", &large).await, 1);
    }
    // An entry takes memory for its key and for its result.
    let bytes = store.bytes();
    assert!(bytes >= store.len() * 300, "{bytes} bytes for {} entries", store.len());
}

#[tokio::test]
async fn a_cache_without_space_caches_nothing() {
    for options in [Cached::options().max_entries(0), Cached::options().max_bytes(0), Cached::options().max_bytes(100)]
    {
        let world = World::new();
        let store = options.wrap(world.store.clone());
        let record = world.finished(&store, "k", b"1").await;
        for _ in 0..3 {
            assert_eq!(costs(&world, &store, "k", &record).await, 1);
        }
        assert!(store.is_empty() && store.bytes() == 0);
    }
    let world = World::new();
    let store = Cached::options().max_age(Duration::ZERO).wrap(world.store.clone());
    let record = world.finished(&store, "k", b"1").await;
    for _ in 0..3 {
        assert_eq!(costs(&world, &store, "k", &record).await, 1, "no age is allowed");
    }
}

/// Threads finish, replay and reopen the same keys through two handles. The cache never exceeds its limits, and no
/// caller gets a result that was discarded before the caller's request.
#[test]
fn concurrent_threads_exceed_no_limit_and_get_no_discarded_result() {
    const ENTRIES: usize = 40;
    const BYTES: usize = 60_000;
    const KEYS: usize = 60;
    let memory = MemoryStore::new();
    let options: CachedOptions = Cached::options().max_entries(ENTRIES).max_bytes(BYTES).max_age(AGELESS);
    let store = options.wrap(memory.clone());
    let peer = store.peer(memory.peer());
    // `floors` holds, for each key, the smallest number of an attempt whose result may still be replayed.
    let floors: Vec<AtomicU32> = (0..KEYS).map(|_| AtomicU32::new(0)).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let floors = &floors;
        let workers: Vec<_> = [&store, &peer, &store, &peer]
            .into_iter()
            .enumerate()
            .map(|(thread, store)| {
                scope.spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(work(thread, store, floors))
                })
            })
            .collect();
        let (store, over) = (&store, &over);
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                assert!(store.len() <= ENTRIES, "{} entries", store.len());
                assert!(store.bytes() <= BYTES, "{} bytes", store.bytes());
                std::thread::yield_now();
            }
        });
        let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        let reopened: usize = ended.into_iter().map(Result::unwrap).sum();
        assert!(reopened > 1000, "something happened: {reopened}");
    });
    assert!(store.len() > ENTRIES / 2, "the room is used: {}", store.len());
}

/// Works on the keys as one of several threads. Returns the number of reopened operations.
async fn work(thread: usize, store: &Cached, floors: &[AtomicU32]) -> usize {
    let world = World::new();
    let mut reopened = 0;
    for n in 0..8000_usize {
        let at = (n * 7 + n / 11 + thread * 17) % floors.len();
        let owner = store.context().new_owner();
        let request = world.request(&at.to_string()).owner(owner).lease(LEASE * 100);
        let floor = floors[at].load(Ordering::SeqCst);
        match store.reserve(&request).await.unwrap() {
            Reservation::Granted { lease, .. } => {
                let bytes = [lease.attempt.to_string().into_bytes(), vec![b' '; n % 3000]].concat();
                assert_eq!(store.finish(&lease, &completed(&bytes)).await.unwrap(), Verdict::Applied);
            }
            Reservation::Finished { record, .. } => {
                let StoredResult::Encoded { bytes, .. } = payload(&record) else { panic!("{record:?}") };
                assert_eq!(bytes.split(|it| *it == b' ').next(), Some(record.attempt.to_string().as_bytes()));
                assert!(record.attempt >= floor, "attempt {} was given up, {floor} is the next", record.attempt);
                if n % 3 == 0 && store.reopen(&request.key, record.attempt).await.unwrap() == Verdict::Applied {
                    floors[at].fetch_max(record.attempt + 1, Ordering::SeqCst);
                    reopened += 1;
                }
            }
            Reservation::InProgress { attempt, .. } => assert!(attempt >= floor),
            other => panic!("{other:?}"),
        }
    }
    reopened
}

#[tokio::test]
async fn a_call_that_fails_or_is_dropped_leaves_no_cache_entry() {
    // After an error or a dropped call, the cache holds no unfinished entry.
    let world = World::new();
    let store = ageless(&world);
    for n in 0..1000 {
        let lease = world.reserved(&store, &n.to_string()).await;
        world.store.next(StoreCall::Finish, Fault::Hang);
        let finish = completed(b"1");
        drop(polled(store.finish(&lease, &finish), 1).await);
    }
    assert!(store.is_empty());
    assert_eq!(store.bytes(), 0);
    let (result, _) = world.call(&store, POLICY, "first").await;
    assert_eq!(result.unwrap(), "first");
    let late: Result<String, Error> = world.call(&store, POLICY, "again").await.0;
    assert_eq!((late.unwrap().as_str(), world.runs()), ("first", 1));
}

// ---- One read for many callers -------------------------------------------------------------------------------------

const MANY: usize = 10_000;

fn asks(world: &World) -> usize {
    world.store.count(StoreCall::Reserve) + world.store.count(StoreCall::Inspect)
}

#[tokio::test]
async fn many_concurrent_duplicates_of_a_finished_key_make_one_store_call() {
    let world = World::new();
    let record = world.finished(&world.memory, "k", b"1").await;
    for fingerprint in [None, Some(Fingerprint::of(&1).unwrap())] {
        let store = ageless(&world);
        let requests: Vec<_> = (0..MANY).map(|_| world.request("k").fingerprint(fingerprint)).collect();
        let before = calls(&world);
        world.store.next(StoreCall::Reserve, Fault::Slow(3));
        for answer in futures::future::join_all(requests.iter().map(|request| store.reserve(request))).await {
            assert_eq!(answer.unwrap().aged(None), Reservation::finished(record.clone()));
        }
        assert_eq!(calls(&world) - before, 1);
    }
}

#[tokio::test]
async fn each_caller_that_shares_a_read_has_its_fingerprint_compared() {
    let world = World::new();
    let [right, wrong] = [1, 2].map(|payload| Some(Fingerprint::of(&payload).unwrap()));
    let first = world.request("k").fingerprint(right);
    let Reservation::Granted { lease, .. } = world.memory.reserve(&first).await.unwrap() else {
        panic!("not reserved")
    };
    assert_eq!(world.memory.finish(&lease, &completed(b"1")).await.unwrap(), Verdict::Applied);
    let store = ageless(&world);
    world.store.next(StoreCall::Reserve, Fault::Slow(3));
    let requests = [right, wrong, right, None].map(|fingerprint| world.request("k").fingerprint(fingerprint));
    let answers = futures::future::join_all(requests.iter().map(|request| store.reserve(request))).await;
    let mismatches: Vec<_> =
        answers.into_iter().map(|answer| matches!(answer.unwrap(), Reservation::FingerprintMismatch { .. })).collect();
    assert_eq!(mismatches, [false, true, false, false]);
    assert_eq!(calls(&world), 1);
}

/// Callers share only a finished record. A reservation belongs to one caller, and an "in progress" answer depends on
/// the caller's token.
#[tokio::test]
async fn callers_share_no_unfinished_record() {
    let world = World::new();
    let store = Cached::new(world.store.clone());
    world.store.next(StoreCall::Reserve, Fault::Slow(3));
    let requests: Vec<_> = (0..MANY).map(|_| world.request("k")).collect();
    let answers = futures::future::join_all(requests.iter().map(|request| store.reserve(request))).await;
    let reserved = |answer: &Result<Reservation, _>| matches!(answer, Ok(Reservation::Granted { .. }));
    let pending = |answer: &Result<Reservation, _>| matches!(answer, Ok(Reservation::InProgress { attempt: 1, .. }));
    assert_eq!(answers.iter().filter(|answer| reserved(answer)).count(), 1);
    assert_eq!(answers.iter().filter(|answer| pending(answer)).count(), MANY - 1);
    assert_eq!(calls(&world), MANY, "each asks at most once");

    // The owner repeats its reservation because its answer got lost, while another caller reserves.
    let winner = answers.iter().position(reserved).unwrap();
    world.store.next(StoreCall::Reserve, Fault::Slow(3));
    let repeated = [&world.request("k"), &requests[winner]];
    let answers = futures::future::join_all(repeated.map(|request| store.reserve(request))).await;
    assert!(pending(&answers[0]) && reserved(&answers[1]), "{answers:?}");

    // If the request of one caller fails, the other caller makes its own request.
    world.finished(&world.memory, "other", b"1").await;
    world.store.next(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let requests = [world.request("other"), world.request("other")];
    let answers = futures::future::join_all(requests.iter().map(|request| store.reserve(request))).await;
    assert_eq!(answers[0].as_ref().unwrap_err().kind(), StoreErrorKind::Unavailable);
    assert!(matches!(answers[1], Ok(Reservation::Finished { .. })), "{answers:?}");
}

#[tokio::test]
async fn each_of_many_waiting_duplicates_reserves_once() {
    let world = World::new();
    let store = Cached::new(world.store.clone());
    let lease = world.reserved(&store, "call").await;
    let before = asks(&world);
    let waiting = POLICY.in_progress(InProgress::Wait(LEASE / 2));
    let mut duplicates: Vec<_> = (0..MANY).map(|_| Box::pin(world.call(&store, waiting, "again"))).collect();
    for _ in 0..3 {
        for duplicate in &mut duplicates {
            assert!(futures::poll!(duplicate).is_pending());
        }
    }
    assert_eq!(asks(&world) - before, MANY, "each asks once, and then waits");
    assert_eq!(store.finish(&lease, &completed(br#""first""#)).await.unwrap(), Verdict::Applied);
    for (replayed, outcome) in futures::future::join_all(duplicates).await {
        assert_eq!(replayed.unwrap(), "first");
        assert!(outcome.waited() && outcome.replayed());
    }
    assert_eq!(asks(&world) - before, MANY, "the result is already recorded");
}

/// The call that reads for several callers may be dropped, or never be polled again.
#[tokio::test]
async fn a_slow_call_delays_no_other_key() {
    let world = World::new();
    let record = world.finished(&world.memory, "k", b"1").await;
    let store = ageless(&world);
    let requests = [world.request("k"), world.request("k"), world.request("k")];
    let [first, second, third] = &requests;

    world.store.next(StoreCall::Reserve, Fault::Hang);
    let mut hanging = store.reserve(first);
    assert!(futures::poll!(&mut hanging).is_pending());
    let mut joined = store.reserve(second);
    assert!(futures::poll!(&mut joined).is_pending());
    world.clock.advance(Duration::from_millis(100));
    assert_eq!(
        joined.await.unwrap().aged(None),
        Reservation::finished(record.clone()),
        "after a while the duplicate asks the store itself"
    );

    let mut joined = store.reserve(third);
    assert!(futures::poll!(&mut joined).is_pending());
    drop(hanging);
    assert_eq!(
        joined.await.unwrap().aged(None),
        Reservation::finished(record),
        "the duplicate gets the record although the first caller is gone"
    );
}

/// A request made after a `reopen` must not get an answer from before the `reopen`.
#[tokio::test]
async fn no_caller_joins_an_outdated_read() {
    let world = World::new();
    let record = world.finished(&world.memory, "k", b"1").await;
    let store = ageless(&world);
    let [early, late] = [world.request("k"), world.request("k")];
    world.store.next(StoreCall::Reserve, Fault::Slow(1));
    let mut asking = store.reserve(&early);
    // The store has answered, and the answer is under way.
    asking = polled(asking, 2).await;
    assert_eq!(store.reopen(&key("k"), 1).await.unwrap(), Verdict::Applied);
    assert!(matches!(store.reserve(&late).await.unwrap(), Reservation::Granted { .. }));
    assert_eq!(asking.await.unwrap().aged(None), Reservation::finished(record));
}
