//! Tests of concurrent duplicates of one key that ask the store and give up while an operator reopens the record, in
//! many orders of the threads.

use shuttle::future::block_on;
use shuttle::thread;

use super::*;
use crate::stores::memory::MemoryStore;
use crate::stores::memory::interleavings::request;
use crate::sync::{TestClock, explore, join_all};

fn reserve(store: &impl Store) -> Reservation {
    block_on(store.reserve(&request(store, 1))).expect("answered")
}

fn finish(store: &impl Store, lease: &Lease) {
    let written = block_on(store.finish(lease, &Finish::Completed(StoredResult::Unencodable)));
    assert_eq!(written.expect("answered"), Verdict::Applied);
}

/// Returns a store in which attempt 1 is finished, and an empty cache in front of that store. The clock stands still: a
/// duplicate that is not woken waits forever.
fn finished() -> (MemoryStore, Cached) {
    let store = MemoryStore::options().clock(TestClock::default()).build();
    match reserve(&store) {
        Reservation::Granted { lease, .. } => finish(&store, &lease),
        other => panic!("unexpected: {other:?}"),
    }
    (store.clone(), Cached::new(store))
}

/// Repeats the reservation of the key until the key is finished, and returns the attempt number of the replay. Finishes
/// each attempt that is granted.
fn take_part(store: &Cached) -> u32 {
    loop {
        match reserve(store) {
            Reservation::Finished { record, .. } => return record.attempt,
            Reservation::Granted { lease, .. } => finish(store, &lease),
            Reservation::InProgress { .. } => thread::yield_now(),
            other => panic!("unexpected: {other:?}"),
        }
    }
}

fn assert_nothing_is_left(store: &Cached) {
    for shard in store.0.cache.shards() {
        let shard = lock(shard);
        assert!(shard.flights.is_empty() && shard.making.is_empty(), "an entry of a reservation is left");
        assert_eq!(shard.ring.len(), shard.entries.len());
    }
}

/// A duplicate that has joined another reservation gets an answer, even if that other reservation is dropped.
#[test]
fn each_duplicate_that_joined_a_reservation_is_answered() {
    explore(|| {
        let (_, store) = finished();
        let mut threads: Vec<_> = (0..3)
            .map(|_| {
                let store = store.clone();
                thread::spawn(move || assert_eq!(take_part(&store), 1))
            })
            .collect();
        let gives_up = store.clone();
        threads.push(thread::spawn(move || {
            let request = request(&gives_up, 1);
            let asks = gives_up.reserve(&request);
            thread::yield_now();
            drop(asks);
        }));
        join_all(threads);
        assert_nothing_is_left(&store);
    });
}

/// After a `reopen` no duplicate gets the reopened result, even if the duplicate's reservation began
/// before the `reopen`.
#[test]
fn a_reopened_result_is_not_replayed() {
    explore(|| {
        let (inner, store) = finished();
        let threads: Vec<_> = [store.clone(), store.clone(), store.peer(inner)]
            .into_iter()
            .map(|store| {
                thread::spawn(move || {
                    let seen = [take_part(&store), take_part(&store), take_part(&store)];
                    assert!(seen.is_sorted(), "a reopened result is replayed again: {seen:?}");
                })
            })
            .collect();
        let key = request(&store, 1).key;
        let found = block_on(store.inspect(&key)).expect("answered").expect("a record");
        assert_eq!(
            block_on(store.decide(&Decision::discard(&key, &found))).expect("answered"),
            DecisionAnswer::Applied
        );
        assert_eq!(take_part(&store), 2);
        join_all(threads);
        assert_eq!(take_part(&store), 2);
        assert_nothing_is_left(&store);
    });
}
