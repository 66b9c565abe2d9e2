//! Tests of waiters that join, give up and are woken, in many orders of their steps.

use std::pin::pin;

use shuttle::future::block_on;
use shuttle::thread;

use super::*;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{explore, join_all};

/// Stand-in for a store with two keys, an attempt of each key, and the waiters for these attempts.
#[derive(Default)]
struct RunningAttempts {
    waiting: WaiterTable,
    ended: [AtomicBool; 2],
}

const KEYS: [&str; 2] = ["a", "b"];

impl RunningAttempts {
    /// Waits until the attempt has ended, as stores do: first registers a waiter, then reads the state of the attempt.
    fn wait(&self, key: usize) {
        block_on(async {
            loop {
                let waiter = self.waiting.join(KEYS[key]);
                let mut woken = pin!(waiter.woken());
                woken.as_mut().enable();
                if self.ended[key].load(Ordering::SeqCst) {
                    return;
                }
                woken.await;
            }
        });
    }
}

/// A waiter that has joined before an attempt ends is woken by that end. Once all waiters are gone, no entry is left.
#[test]
fn each_end_of_an_attempt_wakes_its_waiters_and_no_table_entry_is_left() {
    explore(|| {
        let running = Arc::new(RunningAttempts::default());
        let mut threads: Vec<_> = [0, 0, 1, 1]
            .into_iter()
            .map(|key| {
                let running = Arc::clone(&running);
                thread::spawn(move || running.wait(key))
            })
            .collect();
        // A waiter that gives up removes no entry of another waiter.
        let gives_up = Arc::clone(&running);
        threads.push(thread::spawn(move || drop(gives_up.waiting.join(KEYS[0]))));
        let ends = Arc::clone(&running);
        threads.push(thread::spawn(move || {
            ends.ended[0].store(true, Ordering::SeqCst);
            ends.waiting.wake(KEYS[0]);
        }));
        let ends = Arc::clone(&running);
        threads.push(thread::spawn(move || {
            ends.ended[1].store(true, Ordering::SeqCst);
            ends.waiting.wake_all();
        }));
        join_all(threads);
        assert!(lock(&running.waiting.0).is_empty(), "an entry is left that nobody waits for");
    });
}
