//! Tests of concurrent attempts for a few keys, under many interleavings of the threads.

use std::sync::atomic::AtomicUsize as Count;

use shuttle::future::block_on;
use shuttle::thread;

use super::*;
use crate::record::StoredResult;
use crate::sync::{TestClock, explore, join_all};

const LEASE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(60);

pub(crate) fn request(store: &impl Store, key: u32) -> ReserveRequest {
    ReserveRequest::new(Key::new("interleavings", key).expect("a key"), store.context().new_owner(), LEASE, TTL)
}

fn result() -> Finish {
    Finish::Completed(StoredResult::Unencodable)
}

/// Returns the number of records, and the number of keys with waiting duplicates.
fn counted(store: &MemoryStore) -> (usize, usize) {
    let shards = store.0.records.shards.iter().flat_map(SharedWithChild::lock);
    shards.fold((0, 0), |(records, waiters), shard| (records + shard.places.len(), waiters + shard.waiters.len()))
}

/// Repeats the reservation of the key until the key is finished. Releases the first attempt of the key, and finishes
/// the second attempt.
fn take_part(store: &MemoryStore, key: u32, holders: &Count) {
    loop {
        let request = request(store, key);
        match block_on(store.reserve(&request)).expect("answered") {
            Reservation::Granted { lease, takeover, .. } => {
                assert!(!takeover);
                assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two attempts hold one key");
                thread::yield_now();
                holders.fetch_sub(1, Ordering::SeqCst);
                let written = match lease.attempt {
                    1 => block_on(store.release(&lease, Release::Returned)),
                    _ => block_on(store.finish(&lease, &result())),
                };
                assert_eq!(written.expect("answered"), Verdict::Applied);
            }
            Reservation::InProgress { attempt, .. } => {
                let waiting = store.wait(&request.key, attempt, LEASE);
                // The duplicate is already registered as a waiter here, before the first poll of its future.
                thread::yield_now();
                block_on(waiting).expect("answered");
            }
            Reservation::Finished { record, .. } => {
                assert_eq!(record.attempt, 2);
                return;
            }
            other => panic!("unexpected: {other:?}"),
        }
    }
}

/// One attempt at a time holds the key, and the end of the attempt wakes the waiters. The clock stands still, so
/// nothing else ends a wait.
#[test]
fn one_attempt_wins_and_waiters_are_woken() {
    explore(|| {
        let store = MemoryStore::options().clock(TestClock::default()).build();
        let holders = Arc::new([Count::new(0), Count::new(0)]);
        let threads: Vec<_> = [0, 0, 0, 1, 1]
            .into_iter()
            .map(|key| {
                let (store, holders) = (store.clone(), Arc::clone(&holders));
                thread::spawn(move || take_part(&store, key, &holders[key as usize]))
            })
            .collect();
        join_all(threads);
        assert_eq!(counted(&store), (2, 0));
        assert_eq!(store.len(), 2);
    });
}

/// An attempt with a lapsed lease finishes while two other attempts try to take the key over: exactly one of the three
/// succeeds. A takeover wakes waiters, too.
#[test]
fn a_lapsed_attempt_is_ended_or_taken_over_once() {
    explore(|| {
        let clock = TestClock::default();
        let store = MemoryStore::options().clock(clock.clone()).build();
        let lapsing = request(&store, 0);
        let Ok(Reservation::Granted { lease, .. }) = block_on(store.reserve(&lapsing)) else { panic!("not reserved") };
        let waits = {
            let (store, key) = (store.clone(), lapsing.key.clone());
            thread::spawn(move || block_on(store.wait(&key, 1, LEASE * 2)).expect("answered"))
        };
        // The attempt with the lapsed lease tries to finish while two other attempts try to take the key over.
        clock.advance(LEASE);
        let finishes = {
            let store = store.clone();
            thread::spawn(move || block_on(store.finish(&lease, &result())).expect("answered"))
        };
        let take: Vec<_> = (0..2)
            .map(|_| {
                let store = store.clone();
                thread::spawn(move || {
                    let request = request(&store, 0);
                    match block_on(store.reserve(&request)).expect("answered") {
                        Reservation::Granted { lease, takeover, .. } => {
                            assert!(takeover);
                            Some(lease)
                        }
                        Reservation::InProgress { .. } | Reservation::Finished { .. } => None,
                        other => panic!("unexpected: {other:?}"),
                    }
                })
            })
            .collect();
        let taken: Vec<_> = take.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect();
        let finished = finishes.join().expect("no panic");
        waits.join().expect("no panic");
        match finished {
            Verdict::Applied => assert!(taken.is_empty(), "taken over although it was finished"),
            Verdict::Refused => assert_eq!(taken.len(), 1, "not taken over once"),
        }
        assert_eq!((counted(&store), store.len()), ((1, 0), 1));
    });
}

/// Waiters that give up leave no entry behind, and the remaining waiters are woken.
#[test]
fn a_cancelled_waiter_leaves_no_entry() {
    explore(|| {
        let store = MemoryStore::options().clock(TestClock::default()).build();
        let running = request(&store, 0);
        let Ok(Reservation::Granted { lease, .. }) = block_on(store.reserve(&running)) else { panic!("not reserved") };
        let give_up = |store: &MemoryStore| {
            let (store, key) = (store.clone(), running.key.clone());
            thread::spawn(move || {
                let waiting = store.wait(&key, 1, LEASE);
                thread::yield_now();
                drop(waiting);
            })
        };
        let giving_up = [give_up(&store), give_up(&store)];
        giving_up.into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert_eq!(counted(&store), (1, 0), "a waiter that gave up left an entry");
        let giving_up = give_up(&store);
        let stays = {
            let (store, key) = (store.clone(), running.key.clone());
            thread::spawn(move || block_on(store.wait(&key, 1, LEASE)).expect("answered"))
        };
        assert_eq!(block_on(store.finish(&lease, &result())).expect("answered"), Verdict::Applied);
        giving_up.join().expect("no panic");
        stays.join().expect("no panic");
        assert_eq!(counted(&store), (1, 0));
    });
}

/// A full store with expired records takes only as many new records as `max_records` allows, in any order in which the
/// threads remove expired records.
#[test]
fn a_full_store_never_exceeds_its_limit() {
    explore(|| {
        let clock = TestClock::default();
        let store = MemoryStore::options().max_records(3).clock(clock.clone()).build();
        for key in 0..3 {
            let request = request(&store, key);
            let Ok(Reservation::Granted { lease, .. }) = block_on(store.reserve(&request)) else { panic!("no room") };
            assert_eq!(block_on(store.finish(&lease, &result())).expect("answered"), Verdict::Applied);
        }
        clock.advance(TTL);
        // Two of these keys have expired records.
        let threads: Vec<_> = (1..5)
            .map(|key| {
                let store = store.clone();
                thread::spawn(move || {
                    let request = request(&store, key);
                    let reserved = match block_on(store.reserve(&request)) {
                        Ok(Reservation::Granted { .. }) => true,
                        Err(error) if error.kind() == StoreErrorKind::Full => false,
                        other => panic!("unexpected: {other:?}"),
                    };
                    assert!(store.len() <= 3, "more records than allowed");
                    reserved
                })
            })
            .collect();
        let reserved = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        assert_eq!(reserved.filter(|reserved| *reserved).count(), 3, "the store takes three new records");
        assert_eq!((counted(&store), store.len()), ((3, 0), 3));
    });
}
