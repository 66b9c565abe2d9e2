//! Shows a worker that publishes two messages for each paid order, with one line for each message, and loses and
//! invents none while it is killed again and again.
//!
//! ```sh
//! cargo run --example outbox --features outbox
//! cargo run --example outbox --features outbox -- 300 --outages
//! cargo run --example outbox --features outbox -- --without-outbox
//! ```
//!
//! The example starts a `nats-server` with JetStream and then a RabbitMQ (`IDEM_TEST_NATS` and `IDEM_TEST_RABBITMQ`
//! name the programs). Two workers share a store, and each gets all open orders. The example kills the workers
//! (SIGKILL) at random times, 20 times for each broker, and delivers each order again until a worker has acknowledged
//! it. Then it compares the messages at the broker with the orders:
//!
//! - Each message of a paid order has arrived, under one id, with the payment that the record holds.
//! - No message of a declined order was published, not even by an attempt that pushed messages before it failed.
//! - A worker that dies between sending and marking sends again, under the same id. JetStream drops these duplicates by
//!   their `Nats-Msg-Id`. RabbitMQ keeps them, and its consumers recognise the `message_id`.
//!
//! The first argument is the number of kills. The second is another store: a file of SQLite (default: a new one), or
//! the URL of a Redis, with the feature `redis`. With `--outages` the example kills each broker once, too.
//!
//! With `--without-outbox` the handler publishes in its body, and the exit status is 1: messages of declined orders
//! arrive, and duplicates have other ids and other payments.
#![allow(clippy::disallowed_methods, reason = "a worker waits for its orders")]

#[path = "outbox/audit.rs"]
mod audit;
#[path = "outbox/kills.rs"]
mod kills;

use std::env;
use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::{ConnectOptions, jetstream};
use idem_examples::Claims;
use idem_examples::senders::{JetStreamSender, RabbitMqSender};
use idem_runtime::outbox::{OutgoingMessage, SendError, SendFuture, Sender};
use idem_runtime::{Disposition, OnError, SqliteStore, Store, StoreExt as _, current, idempotent, observe};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::kills::Settings;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Destinations of the messages of each paid order: subjects of JetStream, queues of RabbitMQ.
const PAID: &str = "orders.paid";
const LETTERS: &str = "orders.letters";

struct Shop {
    store: Arc<dyn Store>,
    broker: Broker,
    /// Run of the example, whose orders have records of their own.
    run: String,
    /// Name of this worker process among those of the run.
    worker: String,
    payments: AtomicU64,
}

/// Content of both messages of an order, and result of its handler. Each attempt makes another payment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Receipt {
    order: u64,
    payment: String,
}

#[derive(Debug, Serialize, Deserialize)]
enum PaymentError {
    Declined,
    Failed(String),
}

/// Pays an order, and tells the warehouse and the post office about it.
#[idempotent(key = "{shop.run}:{order}", ttl = "7d", lease = "500ms", store = *shop.store, scope = "pay", on_error = judge)]
async fn pay(shop: &Shop, order: u64) -> Result<Receipt, PaymentError> {
    let attempt = current()?;
    let receipt = shop.charge(order).await;
    attempt.outbox().push(PAID, OutgoingMessage::json(&receipt)?.key(order))?;
    attempt.outbox().push(LETTERS, OutgoingMessage::json(&receipt)?.key(order))?;
    shop.settle(order, attempt.number()).await?;
    Ok(receipt)
}

/// Pays an order without an outbox: the messages leave before the result is recorded.
#[idempotent(key = "{shop.run}:{order}", ttl = "7d", lease = "500ms", store = *shop.store, scope = "pay_directly", on_error = judge)]
async fn pay_directly(shop: &Shop, order: u64) -> Result<Receipt, PaymentError> {
    let attempt = current()?;
    let receipt = shop.charge(order).await;
    shop.publish(PAID, &receipt).await?;
    shop.publish(LETTERS, &receipt).await?;
    shop.settle(order, attempt.number()).await?;
    Ok(receipt)
}

fn judge(error: &PaymentError) -> OnError {
    match error {
        PaymentError::Declined => OnError::Record,
        PaymentError::Failed(_) => OnError::Release,
    }
}

impl Shop {
    async fn charge(&self, order: u64) -> Receipt {
        sleep(Duration::from_millis(5)).await;
        Receipt { order, payment: self.new_id() }
    }

    /// Ends a payment. One order in five is declined, and for one in five the bank does not answer at first.
    async fn settle(&self, order: u64, attempt: u32) -> Result<(), PaymentError> {
        sleep(Duration::from_millis(5)).await;
        match order % 5 {
            0 => Err(PaymentError::Declined),
            1 if attempt == 1 => Err(PaymentError::Failed("the bank does not answer".to_owned())),
            _ => Ok(()),
        }
    }

    async fn publish(&self, destination: &str, receipt: &Receipt) -> Result<(), PaymentError> {
        let body = serde_json::to_vec(receipt).map_err(|error| PaymentError::Failed(error.to_string()))?;
        Ok(self.broker.publish(destination, &self.new_id(), &body).await?)
    }

    fn new_id(&self) -> String {
        format!("{}.{}", self.worker, self.payments.fetch_add(1, Ordering::Relaxed))
    }
}

/// Broker of a run, as its sender.
#[derive(Clone)]
enum Broker {
    JetStream(JetStreamSender),
    RabbitMq(RabbitMqSender),
}

impl Broker {
    async fn connect(url: &str) -> Result<Self, Failure> {
        Ok(match url.starts_with("nats") {
            true => {
                let client = ConnectOptions::new().retry_on_initial_connect().connect(url).await?;
                Self::JetStream(JetStreamSender::new(jetstream::new(client)))
            }
            false => Self::RabbitMq(RabbitMqSender::new(url)),
        })
    }

    async fn publish(&self, destination: &str, id: &str, body: &[u8]) -> Result<(), SendError> {
        let headers = std::iter::empty();
        match self {
            Self::JetStream(sender) => sender.publish(destination, id, body, headers).await,
            Self::RabbitMq(sender) => sender.publish(destination, id, body, headers).await,
        }
    }
}

impl Sender for Broker {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        match self {
            Self::JetStream(sender) => sender.send(message),
            Self::RabbitMq(sender) => sender.send(message),
        }
    }
}

/// Delivers one order until its input is acknowledged. Prints the end for the main process.
async fn deliver(shop: Arc<Shop>, order: u64, has_outbox: bool) {
    for delivery in 1_u32.. {
        let (result, outcome) = match has_outbox {
            true => observe(pay(&shop, order)).await,
            false => observe(pay_directly(&shop, order)).await,
        };
        match (outcome.disposition(), result) {
            (Disposition::Retry { after }, result) => {
                if delivery.is_multiple_of(200) {
                    eprintln!("order {order} after {delivery} deliveries: {result:?}");
                }
                sleep(after.min(Duration::from_millis(50))).await;
            }
            (Disposition::Ack, Ok(receipt)) => return println!("paid {order} {}", receipt.payment),
            (_, Err(PaymentError::Declined)) => return println!("declined {order}"),
            (_, result) => return println!("stuck {order} {result:?}"),
        }
    }
}

/// Runs a worker: a separate process, which the main process kills. Each line of its input is an order.
async fn work(worker: &str, words: [&str; 4]) -> Result<(), Failure> {
    let [run, url, store, form] = words;
    let (store, broker, has_outbox) = (open(store).await?, Broker::connect(url).await?, form == "outbox");
    let store = if has_outbox { store.with_sender(broker.clone()) } else { store };
    let (run, worker, payments) = (run.to_owned(), worker.to_owned(), AtomicU64::new(0));
    let shop = Arc::new(Shop { store, broker, run, worker, payments });
    println!("ready");
    let (mut lines, mut deliveries) = (BufReader::new(stdin()).lines(), JoinSet::new());
    while let Some(order) = lines.next_line().await? {
        deliveries.spawn(deliver(Arc::clone(&shop), order.parse()?, has_outbox));
    }
    deliveries.join_all().await;
    shop.store.flush().await;
    Ok(())
}

async fn open(store: &str) -> Result<Arc<dyn Store>, Failure> {
    match store.split_once("://").map(|(scheme, _)| scheme) {
        #[cfg(feature = "redis")]
        Some("redis") => Ok(Arc::new(idem_runtime::RedisStore::connect(store).await?)),
        Some(scheme) => Err(format!("`{scheme}` needs the feature of its store").into()),
        None => Ok(Arc::new(SqliteStore::open(store).await?)),
    }
}

impl fmt::Display for PaymentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Declined => f.write_str("the bank declines"),
            Self::Failed(why) => write!(f, "not paid: {why}"),
        }
    }
}

impl std::error::Error for PaymentError {}

impl From<idem_runtime::Error> for PaymentError {
    fn from(error: idem_runtime::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<SendError> for PaymentError {
    fn from(error: SendError) -> Self {
        Self::Failed(error.to_string())
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let mut claims = Claims::default();
    let result = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["worker", worker, run, url, store, form] => work(worker, [run, url, store, form]).await,
        ref words => {
            let (has_outbox, has_outages) = (!words.contains(&"--without-outbox"), words.contains(&"--outages"));
            let is_option = |word: &&str| ["--without-outbox", "--outages"].contains(word);
            let mut words = words.iter().copied().filter(|word| !is_option(word));
            match words.next().map_or(Ok(20), str::parse) {
                Ok(kills) => {
                    let settings = Settings { kills, store: words.next(), has_outbox, has_outages };
                    kills::run(settings, &mut claims).await
                }
                Err(_) => Err("the first argument is the number of kills".into()),
            }
        }
    };
    claims.exit_code(&result)
}
