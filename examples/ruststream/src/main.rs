//! Shows a worker of RustStream that uses `idem_ruststream::DeliveryLayer`, with a stream of JetStream as its broker:
//! `cargo run --manifest-path examples/ruststream/Cargo.toml -- <URL> <folder>`. The stream is `ORDERS`, its subject
//! `orders`. The folder has the records, and the books of a bank.
//!
//! - *Key*: the order, from the payload.
//! - *Retry*: JetStream delays the message itself. *Slow handlers*: `ack_wait` is longer than the handler takes,
//!   because a layer can't extend a message.

use std::error::Error as StdError;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::policy::Backoff;
use idem_runtime::{Policy, SqliteStore, StoreExt as _, current, idempotent};
use idem_ruststream::DeliveryLayer;
use ruststream_nats::prelude::*;
use serde::Deserialize;

type Failure = Box<dyn StdError + Send + Sync>;

const POLICY: Policy = Policy::new(Duration::from_secs(86_400))
    .lease(Duration::from_secs(1))
    .max_attempts(5)
    .backoff(Backoff::new(Duration::from_millis(100), Duration::from_secs(1)));

#[derive(Deserialize)]
struct Order {
    id: u64,
    /// Fault that a test requests.
    #[serde(default)]
    fault: String,
}

/// The books of a bank that charges once for each key.
struct Bank(PathBuf);

impl Bank {
    fn note(&self, line: &str) -> io::Result<()> {
        let mut books = OpenOptions::new().create(true).append(true).open(self.0.join("books"))?;
        books.write_all(format!("{line}\n").as_bytes())
    }

    /// Returns true only at the first call with this `what` in all processes.
    fn is_first(&self, what: &str) -> io::Result<bool> {
        match File::create_new(self.0.join(what)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[derive(Clone, FromRef)]
struct Shop {
    store: SqliteStore,
    bank: Arc<Bank>,
}

#[idempotent(key = "order:{order.id}", policy = POLICY, store = store)]
async fn charge(store: &SqliteStore, bank: &Bank, order: &Order) -> Result<String, Failure> {
    bank.note(&format!("body {}", order.id))?;
    if order.fault == "fails" && bank.is_first("failed")? {
        return Err("the bank does not answer".into());
    }
    // The worker can die between the charge and its record, so every attempt gives the bank the same key.
    let payment = current()?.child_key("charge").replace('/', "-");
    if bank.is_first(&format!("payment {payment}"))? {
        bank.note(&format!("charge {}", order.id))?;
    }
    if order.fault == "dies" && bank.is_first("died")? {
        bank.note("hangs")?;
        std::future::pending::<()>().await;
    }
    Ok(format!("receipt for {}", order.id))
}

#[subscriber(
    JetStreamSubject::new("orders", "ORDERS").durable("shop").ack_wait(NonZeroDuration::from_secs(nonzero!(2)))
)]
async fn on_order(
    order: &Order,
    State(store): State<SqliteStore>,
    State(bank): State<Arc<Bank>>,
) -> Result<(), Failure> {
    charge(&store, &bank, order).await.map(drop)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, folder] = arguments.as_slice() else { return Err("usage: ruststream-worker <URL> <folder>".into()) };
    let store = SqliteStore::open(PathBuf::from(folder).join("idem.db")).await?;
    let shop = Shop { store: store.clone(), bank: Arc::new(Bank(folder.into())) };
    RustStream::new(AppInfo::new("shop", "0.1.0"))
        .layer(DeliveryLayer::new())
        .on_startup(async move |()| Ok::<_, io::Error>(shop))
        .with_broker(NatsBroker::new(url.as_str()), |broker| {
            broker.include(on_order);
        })
        .run()
        .await?;
    store.flush().await;
    Ok(())
}
