//! Tools for consumers of message brokers: beats, delivery limits, batches, offsets, retention.
#![allow(
    clippy::disallowed_methods,
    clippy::unchecked_time_subtraction,
    clippy::unused_async,
    reason = "tests wait for threads, bodies need not wait, and the durations are constants"
)]

mod brokers {
    mod batches;
    mod beats;
    mod budgets;
    mod intake;
    mod offsets;
    mod redelivery;
    mod turns;
}

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use idem_runtime::clock::ManualClock;
use idem_runtime::record::Record;
use idem_runtime::{Error, Key, MemoryStore, Operation, Policy, Store};
use idem_tests::{FaultyStore, settle};

const LEASE: Duration = Duration::from_secs(30);
const POLICY: Policy = Policy::new(Duration::from_secs(3600)).lease(LEASE);

/// Store, and a clock that stands still until a test advances it.
struct World {
    clock: ManualClock,
    store: FaultyStore,
    runs: AtomicU32,
}

impl World {
    fn new() -> Self {
        let clock = ManualClock::new();
        let store = FaultyStore::new(&MemoryStore::options().clock(clock.clone()).build());
        Self { clock, store, runs: AtomicU32::new(0) }
    }

    fn operation(&self, key: &str, policy: Policy) -> Operation {
        Operation::new(&self.store, Key::new("brokers", key), policy)
    }

    /// Returns a call for the key `key` whose body takes `duration`.
    fn lasting(
        &self,
        key: &str,
        policy: Policy,
        duration: Duration,
    ) -> impl Future<Output = Result<u32, Error>> + use<'_> {
        let body = async move {
            let number = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
            self.sleep(duration).await;
            Ok(number)
        };
        self.operation(key, policy).run(body)
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }

    async fn sleep(&self, duration: Duration) {
        if !duration.is_zero() {
            self.store.context().clock().sleep(duration).await;
        }
    }

    fn now(&self) -> Duration {
        self.store.context().clock().now().since_origin()
    }

    async fn record(&self, key: &str) -> Record {
        self.store.inspect(&Key::new("brokers", key).unwrap()).await.unwrap().expect("a record").record
    }

    /// Polls `future` to its end, and advances the clock whenever `future` waits.
    async fn drive<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        for _ in 0..20_000 {
            woken.0.store(false, Ordering::SeqCst);
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return output;
            }
            settle().await;
            if woken.0.load(Ordering::SeqCst) {
                continue;
            }
            if let Some(next) = self.clock.next_wake() {
                self.clock.advance(next);
            }
        }
        panic!("hangs");
    }
}

/// Waker that notes that its future must be polled again.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

async fn poll_once<F: Future + ?Sized>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}
