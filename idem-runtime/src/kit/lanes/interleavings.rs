//! Tests of lanes in many orders of their steps: operations join the queue while lanes start and end. Also the fake
//! server of the tests of the stores' batches.

use std::collections::HashSet;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use shuttle::future::{block_on, yield_now};
use shuttle::thread;
use tokio::sync::Semaphore;

use super::*;
use crate::sync::{explore, join_all};

impl<Q: Default> Lanes<Q> {
    /// Checks that after the end of all lanes the count of running lanes is zero, and that `is_empty` finds no
    /// operation in the queue.
    pub(crate) async fn all_have_ended(&self, is_empty: impl FnOnce(&Q) -> bool) {
        self.runtime.0.idle().await;
        assert_eq!(self.runtime.0.alive(), 0, "a lane is still running");
        assert_eq!(self.running.load(Ordering::SeqCst), 0, "a lane is still counted");
        assert!(is_empty(&lock(&self.queue)), "an operation is left that no lane will take");
        assert!(!self.lone.load(Ordering::SeqCst), "a lone operation is still counted");
    }

    /// Shuts down the runtime of the lanes.
    pub(crate) fn end_runtime(&self) {
        self.runtime.0.end();
    }
}

/// A fake server, which logs each exchange on arrival, and answers exchanges only after a test has opened its gate.
pub(crate) struct GatedServer {
    /// Blocks each exchange that has arrived.
    gate: Semaphore,
    // A mutex of `std`: the scheduler switches no threads while this lock is held.
    log: std::sync::Mutex<ExchangeLog>,
}

#[derive(Default)]
struct ExchangeLog {
    exchanges: usize,
    /// The key of every operation that arrived.
    arrived: Vec<String>,
}

impl GatedServer {
    pub(crate) fn shut() -> Arc<Self> {
        Arc::new(Self { gate: Semaphore::new(0), log: std::sync::Mutex::default() })
    }

    /// Opens the gate for all further exchanges.
    pub(crate) fn open(&self) {
        self.gate.add_permits(1000);
    }

    /// Returns how often operations on `key` have arrived.
    pub(crate) fn arrived(&self, key: &str) -> usize {
        lock(&self.log).arrived.iter().filter(|it| *it == key).count()
    }

    /// Returns the number of exchanges that have arrived.
    pub(crate) fn count(&self) -> usize {
        lock(&self.log).exchanges
    }

    /// Waits until `count` exchanges have arrived.
    pub(crate) async fn exchanges(&self, count: usize) {
        while self.count() < count {
            yield_now().await;
        }
    }

    /// Logs the arrival of an exchange about `keys`, and waits until the gate is open.
    pub(crate) async fn exchange(&self, keys: impl Iterator<Item = String>) {
        // The exchange arrives at the next poll: a caller that gives up before that poll has sent nothing.
        yield_now().await;
        {
            let mut log = lock(&self.log);
            log.exchanges += 1;
            log.arrived.extend(keys);
        }
        let _through = self.gate.acquire().await;
        yield_now().await;
    }
}

/// Polls `call` once, so that its operation is sent or joins the queue. Returns whether the call has ended.
pub(crate) async fn polled_once<F: Future>(mut call: Pin<&mut F>) -> bool {
    poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await
}

/// An owner of lanes whose operations are numbers.
struct Numbers {
    lanes: Lanes<Vec<u32>>,
    // A mutex of `std`: the scheduler switches no threads while this lock is held.
    ends: std::sync::Mutex<NumberEnds>,
}

#[derive(Default)]
struct NumberEnds {
    sent: Vec<u32>,
    refused: Vec<u32>,
    /// Number of batches in flight.
    in_flight: usize,
}

const LIMIT: usize = 2;

impl LaneOwner for Numbers {
    type Queue = Vec<u32>;

    fn lanes(&self) -> &Lanes<Vec<u32>> {
        &self.lanes
    }

    async fn run(mut lane: Lane<Self>) {
        while let Some(number) = lane.next(Vec::pop) {
            {
                let mut ends = lock(&lane.ends);
                ends.sent.push(number);
                ends.in_flight += 1;
                assert!(ends.in_flight <= LIMIT, "more than {LIMIT} lanes send");
            }
            let _exchange = BatchGuard(&lane);
            yield_now().await;
        }
    }

    fn refuse(&self, queue: Vec<u32>) {
        lock(&self.ends).refused.extend(queue);
    }
}

struct BatchGuard<'a>(&'a Numbers);

impl Drop for BatchGuard<'_> {
    fn drop(&mut self) {
        lock(&self.0.ends).in_flight -= 1;
    }
}

/// Adds two numbers from each of four threads. With `ends`, the runtime of the lanes shuts down in between.
fn gather_numbers(ends: bool) -> Arc<Numbers> {
    let numbers = Arc::new(Numbers { lanes: Lanes::new(), ends: std::sync::Mutex::default() });
    let threads: Vec<_> = (0..4)
        .map(|of| {
            let numbers = Arc::clone(&numbers);
            thread::spawn(move || {
                gather(&numbers, LIMIT, |queue| queue.push(of));
                if let Some(_turn) = numbers.lanes.enter() {
                    assert!(numbers.lanes.enter().is_none(), "two operations are alone");
                }
                gather(&numbers, LIMIT, |queue| queue.push(4 + of));
            })
        })
        .collect();
    if ends {
        numbers.lanes.end_runtime();
    }
    join_all(threads);
    block_on(numbers.lanes.all_have_ended(Vec::is_empty));
    numbers
}

/// Each operation is sent once, by at most as many lanes as allowed, even if the operation joins the queue while
/// lanes end.
#[test]
fn lanes_send_each_operation_once() {
    explore(|| {
        let numbers = gather_numbers(false);
        let ends = lock(&numbers.ends);
        assert_eq!((ends.sent.len(), ends.refused.len()), (8, 0));
        assert_eq!(ends.sent.iter().collect::<HashSet<_>>().len(), 8);
    });
}

/// When the runtime shuts down, each operation is either sent or refused.
#[test]
fn no_operation_is_left_in_the_queue_when_the_runtime_of_its_lanes_shuts_down() {
    explore(|| {
        let numbers = gather_numbers(true);
        let ends = lock(&numbers.ends);
        let ended: HashSet<_> = ends.sent.iter().chain(&ends.refused).collect();
        assert_eq!((ended.len(), ends.sent.len() + ends.refused.len()), (8, 8));
    });
}
