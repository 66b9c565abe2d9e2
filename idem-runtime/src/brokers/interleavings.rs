//! Tests of an intake in many orders of the steps of its threads: slots that are freed while others wait, an outage
//! that begins and ends, and a stop.

use std::sync::Arc;
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread;

use super::Intake;
use crate::store::Store;
use crate::stores::memory::MemoryStore;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{TestClock, explore, join_all};

fn store(clock: &TestClock) -> Arc<dyn Store> {
    MemoryStore::options().clock(clock.clone()).build().handle()
}

/// Each waiting loop gets a slot that another loop has freed, and no slot is given twice.
#[test]
fn each_freed_slot_goes_to_one_waiting_loop() {
    explore(|| {
        let intake = Intake::new(&store(&TestClock::default()), 2);
        let held = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (intake, held) = (intake.clone(), Arc::clone(&held));
                thread::spawn(move || {
                    for _ in 0..2 {
                        let slot = block_on(intake.slot()).expect("not stopped");
                        assert!(held.fetch_add(1, Ordering::SeqCst) < 2, "more slots than handlers");
                        thread::yield_now();
                        held.fetch_sub(1, Ordering::SeqCst);
                        drop(slot);
                    }
                })
            })
            .collect();
        join_all(threads);
        let slots: Vec<_> = std::iter::from_fn(|| intake.try_slot()).collect();
        assert_eq!(slots.len(), 2);
    });
}

/// A drain ends after the last handler, in whatever order handlers end and loops wait.
#[test]
fn a_drain_waits_for_each_slot_and_for_no_loop() {
    explore(|| {
        let intake = Intake::new(&store(&TestClock::default()), 1);
        let running = Arc::new(AtomicUsize::new(0));
        let mut threads: Vec<_> = (0..3)
            .map(|_| {
                let (intake, running) = (intake.clone(), Arc::clone(&running));
                thread::spawn(move || {
                    while let Some(slot) = block_on(intake.slot()) {
                        running.fetch_add(1, Ordering::SeqCst);
                        thread::yield_now();
                        running.fetch_sub(1, Ordering::SeqCst);
                        drop(slot);
                    }
                })
            })
            .collect();
        let (drained, still) = (intake.clone(), Arc::clone(&running));
        threads.push(thread::spawn(move || {
            block_on(drained.drain());
            assert_eq!(still.load(Ordering::SeqCst), 0, "a handler outlives the drain");
        }));
        join_all(threads);
        assert!(intake.try_slot().is_none());
    });
}

/// Loops that wait during an outage go on after it, even if several loops notice the outage, and reservations are
/// answered in the middle of a trial.
#[test]
fn each_loop_goes_on_after_an_outage() {
    explore(|| {
        let clock = TestClock::default();
        let store = store(&clock);
        let intake = Intake::new(&store, 2);
        store.context().store_failed();
        let done = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let (intake, store, done) = (intake.clone(), Arc::clone(&store), Arc::clone(&done));
                thread::spawn(move || {
                    let slot = block_on(intake.slot()).expect("not stopped");
                    match number {
                        0 => drop(store.context().store_failed()),
                        1 => store.context().store_answered(),
                        _ => {}
                    }
                    drop(slot);
                    store.context().store_answered();
                    done.fetch_add(1, Ordering::SeqCst);
                })
            })
            .collect();
        let ended = Arc::clone(&done);
        let time = thread::spawn(move || {
            while ended.load(Ordering::SeqCst) < 3 {
                block_on(clock.pass(Duration::from_secs(1), |_| ()));
                thread::yield_now();
            }
        });
        join_all(threads);
        time.join().expect("no panic");
        assert!(block_on(intake.slot()).is_some());
    });
}
