//! Properties that only the store in memory has: its limit of records, and renewals in a test's paused time.

#![allow(clippy::disallowed_methods, reason = "some of these tests pause the time of tokio")]

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::clock::{Clock, ManualClock, SystemClock};
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Lease, Release, Reservation, ReserveRequest, StoreContext, Verdict, renew_all};
use idem_runtime::{Error, Key, MemoryStore, Operation, Outcome, Policy, Store, StoreError, StoreErrorKind, observe};
use idem_tests::Reopen as _;

const LEASE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(3600);

struct World {
    clock: ManualClock,
    store: MemoryStore,
    owners: StoreContext,
}

impl World {
    fn new(capacity: usize) -> Self {
        let clock = ManualClock::seeded(1);
        let store = MemoryStore::options().max_records(capacity).clock(clock.clone()).build();
        Self { owners: StoreContext::new("memory", Arc::new(clock.clone())), clock, store }
    }

    fn request(&self, n: usize) -> ReserveRequest {
        ReserveRequest::new(Key::new("memory", n).unwrap(), self.owners.new_owner(), LEASE, TTL)
    }

    async fn reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        self.store.reserve(request).await
    }

    async fn reserved(&self, request: &ReserveRequest) -> Lease {
        match self.reserve(request).await.unwrap() {
            Reservation::Granted { lease, .. } => lease,
            other => panic!("{other:?}"),
        }
    }

    async fn refuses(&self, request: &ReserveRequest) {
        let error = self.reserve(request).await.expect_err("the store is full");
        assert_eq!(error.kind(), StoreErrorKind::Full);
        assert!(!error.is_transient() && !error.may_have_landed(), "a full store has written nothing");
        assert_eq!(self.store.inspect(&request.key).await.unwrap(), None);
    }
}

fn done() -> Finish {
    Finish::Completed(StoredResult::Unencodable)
}

#[tokio::test]
async fn a_full_store_refuses_new_keys_and_still_serves_recorded_keys() {
    let world = World::new(4);
    let mut leases = Vec::new();
    for n in 0..4 {
        leases.push(world.reserved(&world.request(n)).await);
    }
    assert_eq!(world.store.len(), 4);
    for n in 4..100 {
        world.refuses(&world.request(n)).await;
    }
    assert_eq!(world.store.len(), 4, "a refused key takes no room");

    // A full store still serves every operation on records in every state.
    assert!(matches!(world.reserve(&world.request(0)).await.unwrap(), Reservation::InProgress { attempt: 1, .. }));
    assert_eq!(renew_all(&world.store, &leases).await.unwrap(), [Verdict::Applied; 4]);
    assert_eq!(world.store.finish(&leases[0], &done()).await.unwrap(), Verdict::Applied);
    assert!(matches!(world.reserve(&world.request(0)).await.unwrap(), Reservation::Finished { .. }));
    assert_eq!(world.store.release(&leases[1], Release::Returned).await.unwrap(), Verdict::Applied);
    assert_eq!(world.reserved(&world.request(1)).await.attempt, 2);
    world.clock.advance(LEASE);
    assert_eq!(world.reserved(&world.request(2)).await.attempt, 2, "a takeover needs no room");
    assert_eq!(world.store.reopen(&leases[0].key, 1).await.unwrap(), Verdict::Applied);
    world.refuses(&world.request(4)).await;
    assert_eq!(world.store.len(), 4);
}

#[tokio::test]
async fn every_expired_record_frees_space_in_a_full_store() {
    let world = World::new(64);
    for n in 0..64 {
        let lease = world.reserved(&world.request(n)).await;
        if n % 2 == 0 {
            assert_eq!(world.store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
        }
    }
    world.clock.advance(TTL.saturating_sub(Duration::from_nanos(1)));
    world.refuses(&world.request(64)).await;
    world.clock.advance(Duration::from_nanos(1));
    // The 32 finished records have expired. The unfinished records are kept for one lease longer.
    for n in 100..132 {
        world.reserved(&world.request(n)).await;
    }
    world.refuses(&world.request(132)).await;
    for n in [1, 63] {
        assert_eq!(world.reserved(&world.request(n)).await.attempt, 2, "nothing is forgotten early");
    }
    world.clock.advance(LEASE);
    for n in 132..162 {
        world.reserved(&world.request(n)).await;
    }
    world.refuses(&world.request(162)).await;
    assert_eq!(world.store.len(), 64);
}

/// A later write may shorten a record's retention: another version of the handler has a shorter `ttl`, or an attempt
/// ends after a lease that was longer than the `ttl`.
#[tokio::test]
async fn a_record_frees_space_when_its_own_retention_ends() {
    let short = Duration::from_secs(1);

    // The second attempt of the key has a shorter `ttl` than the first.
    let world = World::new(1);
    let lease = world.reserved(&world.request(0)).await;
    assert_eq!(world.store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    let lease = world.reserved(&world.request(0).ttl(short)).await;
    assert_eq!(world.store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    world.clock.advance(short);
    assert_eq!(world.store.inspect(&lease.key).await.unwrap(), None, "its retention is over");
    world.reserved(&world.request(1)).await;
    assert_eq!(world.store.len(), 1);

    // The attempt runs for longer than its `ttl`, and another reservation needs space meanwhile.
    let world = World::new(1);
    let lease = world.reserved(&world.request(0).ttl(short)).await;
    world.clock.advance(short * 2);
    world.refuses(&world.request(1)).await;
    assert_eq!(world.store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    world.clock.advance(short);
    assert_eq!(world.store.inspect(&lease.key).await.unwrap(), None, "its retention is over");
    world.reserved(&world.request(1)).await;
    assert_eq!(world.store.len(), 1);
}

#[tokio::test]
async fn the_number_of_records_is_bounded_under_churn() {
    const CAPACITY: usize = 1_000;
    let world = World::new(CAPACITY);
    let (mut refused, mut reserved, mut longest) = (0, 0, 0);
    for n in 0..200_000 {
        world.clock.advance(Duration::from_millis(100));
        // Half of the attempts finish immediately. Of the other attempts, some are released and some never end.
        let ttl = Duration::from_secs(1 + n as u64 % 60);
        match world.reserve(&world.request(n % 50_000).ttl(ttl)).await {
            Ok(Reservation::Granted { lease, .. }) => {
                reserved += 1;
                let written = match n % 4 {
                    0 | 1 => world.store.finish(&lease, &done()).await.unwrap(),
                    2 => world.store.release(&lease, Release::Returned).await.unwrap(),
                    _ => Verdict::Applied,
                };
                assert_eq!(written, Verdict::Applied);
            }
            Ok(_) => {}
            Err(error) if error.kind() == StoreErrorKind::Full => refused += 1,
            Err(error) => panic!("{error}"),
        }
        longest = longest.max(world.store.len());
    }
    // At most 900 records are live: 10 new records a second, each kept for at most 90 seconds. The store has space for
    // 900 records.
    assert_eq!(refused, 0);
    assert_eq!(reserved, 200_000);
    assert!(longest <= CAPACITY, "{longest}");
}

#[tokio::test]
async fn in_a_store_without_a_limit_expired_records_do_not_pile_up() {
    let world = World::new(usize::MAX);
    let mut longest = 0;
    for n in 0..100_000 {
        world.clock.advance(Duration::from_secs(1));
        let lease = world.reserved(&world.request(n).ttl(Duration::from_secs(10))).await;
        assert_eq!(world.store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
        longest = longest.max(world.store.len());
    }
    // Ten records are live at any time. Expired records stay until the next operation in their shard.
    assert!(longest < 1_000, "{longest} records are held, ten are live");
}

#[tokio::test]
async fn an_expired_record_is_absent_before_it_is_cleaned_up() {
    let world = World::new(usize::MAX);
    for n in 0..2_000 {
        let lease = world.reserved(&world.request(n)).await;
        assert_eq!(world.store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    }
    world.clock.advance(TTL);
    assert_eq!(world.store.len(), 2_000);
    // The keys are reserved in reverse order, because the clean-up starts with the oldest record.
    for n in (0..2_000).rev() {
        assert_eq!(world.reserved(&world.request(n)).await.attempt, 1);
    }
    assert_eq!(world.store.len(), 2_000);
}

/// The list of records to clean up must not grow beyond the number of records.
#[tokio::test]
async fn the_list_of_records_to_clean_up_is_bounded() {
    let world = World::new(usize::MAX);
    let entries = || format!("{:?}", world.store).matches("ListEntry(").count();
    for _ in 0..100 {
        // Each of these writes shortens the time until the record expires.
        for (ttl, attempt) in [(TTL, 1), (TTL / 2, 2), (TTL / 4, 3)] {
            let lease = world.reserved(&world.request(0).ttl(ttl)).await;
            assert_eq!(lease.attempt, attempt);
            assert_eq!(world.store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
        }
        world.clock.advance(TTL / 4);
    }
    assert!(entries() <= 20, "{} entries for one record", entries());
    world.reserved(&world.request(0)).await;
    world.clock.advance(TTL);
    world.reserve(&world.request(0)).await.unwrap();
    assert_eq!(entries(), 1, "a record has one entry of waiters");
}

#[test]
fn a_new_store_is_empty() {
    assert!(MemoryStore::default().is_empty());
    assert_eq!(MemoryStore::new().len(), 0);
}

#[tokio::test]
async fn a_memory_store_with_a_limit_of_zero_records_refuses_every_key() {
    let world = World::new(0);
    world.refuses(&world.request(0)).await;
    assert!(world.store.is_empty());
}

/// The store keeps an entry for each key that a call waits for. The last wait must remove the entry, however that wait
/// ends: the record may never be written again, so no later write would remove the entry.
#[tokio::test]
async fn an_ended_wait_leaves_no_entry_of_its_waiter() {
    let world = World::new(usize::MAX);
    let entries = || format!("{:?}", world.store).matches("Waiters {").count();
    let lease = world.reserved(&world.request(0)).await;
    let wait = || world.store.wait(&lease.key, 1, LEASE / 2);

    let mut waits = [wait(), wait(), wait()];
    assert_eq!(entries(), 1);
    for wait in &mut waits {
        assert!(futures::poll!(wait).is_pending());
    }
    drop(waits);
    assert_eq!(entries(), 0, "the entries of dropped waiters are removed");

    drop([wait(), wait()]);
    assert_eq!(entries(), 0, "waiters that were never polled leave no entry");

    let (waited, ()) = futures::join!(wait(), async { world.clock.advance(LEASE / 2) });
    waited.unwrap();
    assert_eq!(entries(), 0, "their time was up");

    let early = wait();
    assert_eq!(world.store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    let second = world.reserved(&world.request(0)).await;
    let late = world.store.wait(&second.key, 2, LEASE / 2);
    early.await.unwrap();
    assert_eq!(entries(), 1, "the waiter for the second attempt has its own entry");
    drop(late);
    assert_eq!(entries(), 0, "woken, and dropped");
}

#[test]
fn every_handle_of_a_memory_store_has_its_namespace() {
    let store = MemoryStore::options().namespace("shop").build();
    assert_eq!([store.namespace(), store.peer().namespace(), store.upkeep().namespace()], ["shop"; 3]);
    assert_eq!(MemoryStore::new().namespace(), "");
}

// Tests that pause tokio's clock.

/// Calls a handler whose body awaits `sleep`, with a lease of [`LEASE`].
async fn outlives_its_lease(
    store: &MemoryStore,
    name: &str,
    sleep: impl Future<Output = ()>,
) -> (Result<u32, Error>, Outcome) {
    let operation = Operation::new(store, Ok(Key::new("memory", name).unwrap()), Policy::new(TTL).lease(LEASE));
    let body = async {
        sleep.await;
        Ok(7)
    };
    observe(operation.run(body)).await
}

#[tokio::test(start_paused = true)]
async fn the_clock_follows_a_moved_time() {
    let (clock, hour) = (SystemClock::default(), Duration::from_secs(3600));
    let before = clock.now();
    tokio::time::advance(hour).await;
    let passed = clock.now().saturating_since(before);
    // A little less than an hour, because the machine's time had passed, and the time of the test had not.
    assert!(passed > hour / 2 && clock.is_moved(), "{passed:?} have passed, moved: {}", clock.is_moved());
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_in_paused_time() {
    let store = MemoryStore::new();
    let late = async {
        tokio::time::sleep(LEASE * 2).await;
        outlives_its_lease(&store, "k", async {}).await
    };
    let ((result, outcome), (duplicate, _)) =
        tokio::join!(outlives_its_lease(&store, "k", tokio::time::sleep(LEASE * 3)), late);
    assert_eq!(result.unwrap(), 7);
    assert!(outcome.executed() && outcome.attempt() == Some(1), "{outcome:?}");
    assert!(matches!(duplicate, Err(Error::InProgress { .. })), "the lease is held: {duplicate:?}");
}

#[tokio::test(start_paused = true)]
async fn a_body_continues_when_a_test_advances_time_beyond_its_lease() {
    let store = MemoryStore::new();
    let call = outlives_its_lease(&store, "k", tokio::time::sleep(LEASE * 3));
    let steps = async {
        for _ in 0..3 {
            tokio::task::yield_now().await;
            tokio::time::advance(LEASE).await;
        }
    };
    let ((result, outcome), ()) = tokio::join!(call, steps);
    assert_eq!(result.unwrap(), 7);
    assert!(outcome.executed() && outcome.attempt() == Some(1), "{outcome:?}");
    // One jump of the clock passes the end of every lease.
    let ((result, outcome), ()) =
        tokio::join!(outlives_its_lease(&store, "l", tokio::time::sleep(LEASE * 3)), tokio::time::advance(LEASE * 3));
    assert_eq!(result.unwrap(), 7);
    assert!(outcome.executed() && outcome.attempt() == Some(1), "{outcome:?}");
}

/// The renewal task of the store starts in real time, before the test pauses the clock.
#[tokio::test]
async fn a_lease_is_renewed_if_a_test_pauses_time_after_the_first_call() {
    let store = MemoryStore::new();
    assert!(outlives_its_lease(&store, "before", async {}).await.0.is_ok());
    tokio::time::pause();
    let (result, outcome) = outlives_its_lease(&store, "k", tokio::time::sleep(LEASE * 3)).await;
    assert_eq!(result.unwrap(), 7);
    assert!(outcome.executed() && outcome.attempt() == Some(1), "{outcome:?}");
}
