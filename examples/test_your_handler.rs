//! Shows tests for a handler like your own.
//!
//! There are three tests, each of which is a `#[test]` in your project: a duplicate arrives; a worker dies (on a clock
//! that the test moves); and the handler is killed at each of its awaits, with duplicates and lost requests.
//! `cargo run --example test_your_handler --features testing` runs them; `crash_at_every_await` shows the findings of
//! the third test for wrong handlers.

use std::io;
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_runtime::clock::ManualClock;
use idem_runtime::testing::{Worker, crash, explore};
use idem_runtime::{Disposition, MemoryStore, Store, current, idempotent, observe};
use tokio::runtime::Builder;

// ---- The program ---------------------------------------------------------------------------------------------------

/// The service that the handler calls, as a trait, so that tests can replace it.
trait Bank {
    async fn charge(&self, order: u32, key: String) -> io::Result<u32>;
}

struct App<B> {
    store: Arc<dyn Store>,
    bank: B,
}

#[idempotent(key = "order:{order}", ttl = "7d", store = app.store, scope = "charge", lease = "30s")]
async fn charge<B: Bank>(app: &App<B>, order: u32) -> io::Result<u32> {
    let key = current()?.child_key("charge");
    app.bank.charge(order, key).await
}

// ---- Its tests -----------------------------------------------------------------------------------------------------

/// A bank that counts its charges, and hangs on request.
#[derive(Clone, Default)]
struct CountingBank {
    charges: Arc<AtomicU32>,
    hangs: bool,
}

impl Bank for CountingBank {
    async fn charge(&self, order: u32, _: String) -> io::Result<u32> {
        self.charges.fetch_add(1, Ordering::Relaxed);
        if self.hangs {
            std::future::pending::<()>().await;
        }
        Ok(order)
    }
}

fn a_duplicate_is_not_charged() {
    block_on(async {
        let app = App { store: MemoryStore::new().handle(), bank: CountingBank::default() };
        let first = charge(&app, 42).await.unwrap();
        let (duplicate, outcome) = observe(charge(&app, 42)).await;
        assert!(outcome.replayed());
        assert_eq!(outcome.disposition(), Disposition::Ack);
        assert_eq!(duplicate.unwrap(), first);
        assert_eq!(app.bank.charges.load(Ordering::Relaxed), 1);
    });
}

fn a_dead_worker_is_followed_after_its_lease() {
    block_on(async {
        let clock = ManualClock::new();
        let store = MemoryStore::options().clock(clock.clone()).build();
        // A separate handle simulates a separate process. This process dies: it renews and releases no lease.
        let dead = store.peer();
        let app = App { store: dead.handle(), bank: CountingBank { hangs: true, ..Default::default() } };
        let dying = tokio::spawn(async move { charge(&app, 42).await });
        tokio::task::yield_now().await;
        crash(&dead);
        dying.abort();

        let app = App { store: store.handle(), bank: CountingBank::default() };
        let (_, outcome) = observe(charge(&app, 42)).await;
        let retry = Disposition::Retry { after: Duration::from_secs(30) };
        assert_eq!((outcome.executed(), outcome.disposition()), (false, retry));
        clock.advance(Duration::from_secs(30));
        let (_, outcome) = observe(charge(&app, 42)).await;
        assert!(outcome.took_over());
        assert_eq!(outcome.attempt(), Some(2));
    });
}

/// A bank whose charges the simulation counts, and whose answers the simulation loses.
impl Bank for Worker {
    async fn charge(&self, order: u32, key: String) -> io::Result<u32> {
        self.effect(format!("charge {order}")).key(key).await.map_err(io::Error::other)?;
        Ok(order)
    }
}

fn every_fault_at_every_await_charges_once() {
    let report = explore(|worker| async { charge(&App { store: Arc::new(worker.store()), bank: worker }, 42).await });
    println!("{report}");
    report.assert_once();
}

fn block_on(future: impl Future<Output = ()>) {
    Builder::new_current_thread().enable_time().build().unwrap().block_on(future);
}

fn main() -> ExitCode {
    let tests: [fn(); 3] = [
        a_duplicate_is_not_charged,
        a_dead_worker_is_followed_after_its_lease,
        every_fault_at_every_await_charges_once,
    ];
    let failed = tests.into_iter().filter(|test| catch_unwind(test).is_err()).count();
    println!("{} tests passed, {failed} failed", tests.len() - failed);
    ExitCode::from(u8::from(failed > 0))
}
