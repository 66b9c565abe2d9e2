//! A duplicate, a concurrent duplicate, a handler that fails and a worker that dies, each in a few lines.
//!
//! ```sh
//! cargo run --example tour --features redis                          # in memory
//! cargo run --example tour --features redis -- redis://localhost     # in a Redis
//! ```

#![allow(clippy::disallowed_methods, reason = "the carrier takes real time")]

use std::sync::Arc;
use std::time::Duration;
use std::{env, fmt, process, thread};

use idem_runtime::StoreExt;
use idem_runtime::testing::crash;
use idem_runtime::{Disposition, Error, MemoryStore, Outcome, RedisStore, Store, current, idempotent, observe};
use serde::{Deserialize, Serialize};
use tokio::runtime::Builder;
use tokio::time::sleep;

/// The recorded result, which every duplicate gets.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Parcel {
    number: String,
}

#[derive(Debug)]
enum ShipError {
    CarrierAway,
    /// Reason why the library did not run the handler, or could not record its result.
    Idempotency(Error),
}

impl From<Error> for ShipError {
    fn from(error: Error) -> Self {
        Self::Idempotency(error)
    }
}

impl fmt::Display for ShipError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CarrierAway => f.write_str("the carrier does not answer"),
            Self::Idempotency(error) => error.fmt(f),
        }
    }
}

/// Behaviour of the carrier, which this program chooses for each order.
#[derive(Clone, Copy)]
enum Carrier {
    Answers,
    TakesItsTime,
    IsAway,
    Hangs,
}

#[idempotent(key = "order:{order_id}", ttl = "10m", store = store, scope = "ship", lease = "1s")]
async fn ship(store: &Arc<dyn Store>, order_id: u32, carrier: Carrier) -> Result<Parcel, ShipError> {
    // Every attempt gives the carrier the same key: a carrier that accepts idempotency keys books one parcel, even if
    // it is asked repeatedly.
    let number = current()?.child_key("parcel");
    match carrier {
        Carrier::Answers => {}
        Carrier::TakesItsTime => sleep(Duration::from_millis(300)).await,
        Carrier::IsAway => return Err(ShipError::CarrierAway),
        Carrier::Hangs => std::future::pending().await,
    }
    Ok(Parcel { number })
}

/// Handles one delivery of a message, like the loop of a consumer.
async fn deliver(store: &Arc<dyn Store>, order_id: u32, carrier: Carrier) -> (Option<Parcel>, Outcome) {
    let (result, outcome) = observe(ship(store, order_id, carrier)).await;
    if let Err(error) = &result {
        println!("  {error}");
    }
    match outcome.disposition() {
        Disposition::Ack => println!("  acknowledged"),
        // A real broker would wait, and then deliver the message again.
        Disposition::Retry { after } => sleep(after).await,
        Disposition::DeadLetter => println!("  set aside"),
    }
    (result.ok(), outcome)
}

/// Runs a worker until it is in the middle of a handler.
async fn work(store: Arc<dyn Store>, order_id: u32) {
    tokio::spawn(async move { ship(&store, order_id, Carrier::Hangs).await });
    sleep(Duration::from_millis(100)).await;
}

async fn tour(store: &Arc<dyn Store>, lose_a_worker: impl FnOnce(u32)) {
    // Each run of this program has its own order numbers.
    let order = process::id() * 10;

    println!("a duplicate");
    let (first, outcome) = deliver(store, order, Carrier::Answers).await;
    assert!(outcome.executed());
    let (duplicate, outcome) = deliver(store, order, Carrier::Answers).await;
    assert!(outcome.replayed() && duplicate == first);

    println!("a duplicate while the handler runs");
    let slow = || deliver(store, order + 1, Carrier::TakesItsTime);
    let ((first, ran), (_, rejected)) = tokio::join!(slow(), slow());
    assert!(ran.executed() && !rejected.executed());
    let (redelivered, outcome) = slow().await;
    assert!(outcome.replayed() && redelivered == first);

    println!("a handler that fails");
    let (_, outcome) = deliver(store, order + 2, Carrier::IsAway).await;
    assert!(outcome.executed() && matches!(outcome.disposition(), Disposition::Retry { .. }));
    let (_, outcome) = deliver(store, order + 2, Carrier::Answers).await;
    assert!(outcome.executed() && outcome.attempt() == Some(2));

    println!("a worker that dies");
    lose_a_worker(order + 3);
    // The dead worker's key is held until its lease lapses.
    let (_, outcome) = deliver(store, order + 3, Carrier::Answers).await;
    assert!(!outcome.executed());
    let (_, outcome) = deliver(store, order + 3, Carrier::Answers).await;
    assert!(outcome.executed() && outcome.took_over() && outcome.attempt() == Some(2));
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    match &args[..] {
        [] => {
            let store = MemoryStore::new();
            // A peer simulates another process: a handle that renews only its own leases. Once the peer is abandoned,
            // it renews and releases no lease.
            let peer = store.peer();
            let lose_a_worker = |order| {
                let worker = thread::spawn(move || {
                    let runtime = Builder::new_current_thread().enable_all().build();
                    let runtime = runtime.expect("a runtime can be built");
                    runtime.block_on(work(peer.handle(), order));
                    crash(&peer);
                });
                worker.join().expect("the worker thread does not panic");
            };
            tour(&store.handle(), lose_a_worker).await;
            store.flush().await;
        }
        [url] => {
            let store = RedisStore::connect(url).await?;
            // Starts this program again; the new process kills itself.
            let lose_a_worker = |order: u32| {
                let program = env::current_exe().expect("this program has a path");
                process::Command::new(program).args([url, &order.to_string()]).status().expect("it can be started");
            };
            tour(&store.handle(), lose_a_worker).await;
            // The runtime must still run here: `flush` writes the releases of cancelled handlers.
            store.flush().await;
        }
        [url, order] => {
            work(RedisStore::connect(url).await?.handle(), order.parse()?).await;
            process::abort();
        }
        _ => return Err("give the URL of a Redis, or nothing".into()),
    }
    Ok(())
}
