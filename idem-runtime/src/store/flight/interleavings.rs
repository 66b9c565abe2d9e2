//! Tests of duplicates that wait together, in many orders of their steps: some give up, some are no longer polled, and
//! one takes a released key.

use shuttle::future::block_on;
use shuttle::thread;

use super::*;
use crate::record::{Finish, Lease, Release, Reservation, ReserveRequest, StoredResult, Verdict};
use crate::stores::memory::MemoryStore;
use crate::stores::memory::interleavings::request;
use crate::sync::atomic::AtomicUsize;
use crate::sync::{TestClock, explore, join_all};

/// Makes a store with one reserved key, and returns the store and the lease. The clock of the store stands still, so a
/// duplicate that is not woken waits forever.
fn held() -> (Arc<dyn Store>, Lease) {
    let store = MemoryStore::options().clock(TestClock::default()).build().handle();
    match block_on(store.reserve(&request(&store, 1))).expect("answered") {
        Reservation::Granted { lease, .. } => (store, lease),
        other => panic!("unexpected: {other:?}"),
    }
}

fn finish(store: &Arc<dyn Store>, lease: &Lease) {
    let written = block_on(store.finish(lease, &Finish::Completed(StoredResult::Unencodable)));
    assert_eq!(written.expect("answered"), Verdict::Applied);
}

fn join(store: &Arc<dyn Store>, request: &ReserveRequest) -> Option<WaitTicket> {
    match block_on(store.reserve(request)).expect("answered") {
        Reservation::InProgress { attempt, lapses_in } => {
            Some(WaitTicket::join(store, &request.key, attempt, lapses_in))
        }
        _ => None,
    }
}

/// Waits like a duplicate until the key is finished. Runs the body if the key becomes free and this duplicate reserves
/// it.
fn take_part(store: &Arc<dyn Store>, runs: &AtomicUsize) {
    let request = request(store, 1);
    let mut aboard: Option<WaitTicket> = None;
    loop {
        let attempt = match block_on(store.reserve(&request)).expect("answered") {
            Reservation::Finished { .. } => return,
            Reservation::Granted { lease, .. } => {
                if let Some(aboard) = &mut aboard {
                    aboard.settle(Some((lease.attempt, lease.duration)));
                }
                runs.fetch_add(1, Ordering::SeqCst);
                finish(store, &lease);
                return;
            }
            Reservation::InProgress { attempt, lapses_in } => (attempt, lapses_in),
            other => panic!("unexpected: {other:?}"),
        };
        if let Some(aboard) = &mut aboard {
            aboard.settle(Some(attempt));
        }
        let waits = aboard.get_or_insert_with(|| WaitTicket::join(store, &request.key, attempt.0, attempt.1));
        match block_on(waits) {
            WaitOutcome::Told(found) => {
                assert!(found.record.is_finished());
                return;
            }
            WaitOutcome::Turn => {}
            WaitOutcome::Ask => aboard = None,
        }
    }
}

fn assert_nothing_is_left(store: &Arc<dyn Store>) {
    assert!(lock(&store.context().flights().0).is_empty(), "a shared wait has outlived its members");
}

/// Each waiting duplicate gets the result, even if another duplicate gives up or is no longer polled.
#[test]
fn each_waiting_duplicate_gets_the_result() {
    explore(|| {
        let (store, lease) = held();
        let runs = Arc::new(AtomicUsize::new(0));
        let mut threads: Vec<_> = (0..3)
            .map(|_| {
                let (store, runs) = (Arc::clone(&store), Arc::clone(&runs));
                thread::spawn(move || take_part(&store, &runs))
            })
            .collect();
        let gives_up = Arc::clone(&store);
        threads.push(thread::spawn(move || {
            let request = request(&gives_up, 1);
            if let Some(mut aboard) = join(&gives_up, &request) {
                let _ = Pin::new(&mut aboard).poll(&mut Context::from_waker(Waker::noop()));
                thread::yield_now();
            }
        }));
        finish(&store, &lease);
        join_all(threads);
        assert_eq!(runs.load(Ordering::SeqCst), 0, "a finished key was run again");
        assert_nothing_is_left(&store);
    });
}

/// A duplicate that is polled only once does not block other duplicates.
#[test]
fn a_stalled_waiter_blocks_no_other() {
    explore(|| {
        let (store, lease) = held();
        let request = request(&store, 1);
        let mut still = join(&store, &request).expect("it waits");
        let polled = Pin::new(&mut still).poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        let runs = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (store, runs) = (Arc::clone(&store), Arc::clone(&runs));
                thread::spawn(move || take_part(&store, &runs))
            })
            .collect();
        finish(&store, &lease);
        join_all(threads);
        drop(still);
        assert_nothing_is_left(&store);
    });
}

/// One of the waiting duplicates takes a released key, and the other duplicates get its result.
#[test]
fn one_waiting_duplicate_takes_a_released_key() {
    explore(|| {
        let (store, lease) = held();
        let runs = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (store, runs) = (Arc::clone(&store), Arc::clone(&runs));
                thread::spawn(move || take_part(&store, &runs))
            })
            .collect();
        let written = block_on(store.release(&lease, Release::Returned));
        assert_eq!(written.expect("answered"), Verdict::Applied);
        join_all(threads);
        assert_eq!(runs.load(Ordering::SeqCst), 1, "the body has not run exactly once");
        assert_nothing_is_left(&store);
    });
}
