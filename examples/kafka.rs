//! Shows a consumer of Kafka that uses `#[idempotent]`, and survives the kill of its process, an outage of its broker,
//! and an outage of its store.
//!
//! `cargo run --example kafka --features kafka` publishes orders with duplicates and charges each exactly once. Records
//! are in a SQLite file, and the broker is librdkafka's own mock. `-- --url host:9092` uses a real cluster, and
//! `-- --outages` makes the mock unreachable.
//!
//! - *Key*: the order, from the payload. In a topic that is created anew, offsets start at 0 again.
//! - *Offsets*: several messages of a partition are handled concurrently, and settle out of order; `OffsetTracker`
//!   returns the offset that may be stored. A rebalance begins or ends a generation of a partition. If a message
//!   settles after the generation in which it was started, no offset is stored.
//! - *Slow handlers*: the consumer is polled all the time, and its partitions are paused while all handlers are
//!   busy. So the consumer stays within `max.poll.interval.ms`, no matter how long a handler takes, and no
//!   extension is needed.
//! - *Retry*: the worker copies the message to a retry topic, with the due time in a header; other messages overtake
//!   this message. (To keep the sequence, pause the partition, wait and seek: meanwhile no other message of the
//!   partition is handled.) A message that waits for its due time occupies no handler.
//! - *Count*: Kafka counts no deliveries, so a header carries their number.
//! - *Poison*: the worker copies the message to another topic, with the reasons as headers.
#![allow(clippy::disallowed_methods, reason = "a message of the retry topic waits for its time")]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Receipt, Run};
use idem_examples::kafka::{Mock, config, make_topics, mock, remove_topics};
use idem_runtime::brokers::{OffsetTracker, Redelivery, StartedMessage};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, SqliteStore, StoreExt as _, current, idempotent, observe};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext, Rebalance, StreamConsumer};
use rdkafka::message::{Header, Headers as _, Message as _, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

const DAY: Duration = Duration::from_secs(86_400);
const HANDLERS: usize = 8;
/// Headers of the retry topic: the number of the delivery, and its due time in milliseconds since 1970.
const DELIVERY: &str = "delivery";
const NOT_BEFORE: &str = "not-before";
const PAYMENTS: Policy = Policy::new(DAY.saturating_mul(14))
    .lease(Duration::from_secs(2))
    .max_attempts(4)
    .backoff(Backoff::new(Duration::from_millis(100), Duration::from_secs(2)));

/// The handler: it runs once for each order, and every duplicate gets the receipt of that run.
#[idempotent(key = "order:{event.order}", policy = PAYMENTS, store = app.store, fingerprint = (event.order, event.cents))]
async fn charge(app: &App, event: &Event) -> Result<Receipt, Failure> {
    // The worker can die between the charge and its record, so every attempt gives the bank the same key.
    let payment = current()?.child_key("charge");
    Ok(app.run.charge(event, payment).await?)
}

/// Handles one delivery, until its offset is settled.
async fn deliver(app: App, message: OwnedMessage) -> Result<(), Failure> {
    let payload = message.payload().unwrap_or_default();
    sleep(Duration::from_millis(header(&message, NOT_BEFORE).unwrap_or(0).saturating_sub(now()))).await;
    let event = match Event::read(payload) {
        Ok(event) => event,
        Err(error) => {
            let (topic, partition, offset) = (message.topic(), message.partition(), message.offset());
            eprintln!("{topic}/{partition}/{offset} can't be read, and is set aside: {error}");
            app.run.delivered(None)?;
            app.run.set_aside(None)?;
            return app.send("dead", payload, OwnedHeaders::new()).await;
        }
    };
    app.run.delivered(Some(&event))?;
    let delivery = header(&message, DELIVERY).map_or(1, |delivery| u32::try_from(delivery).unwrap_or(u32::MAX));
    let (result, outcome) = observe(charge(&app, &event)).delivery(delivery).catch_panics().await;
    match outcome.disposition() {
        Disposition::Ack => Ok(app.run.acknowledged(&event, &outcome)?),
        Disposition::Retry { after } => {
            let not_before = now() + u64::try_from(after.as_millis())?;
            let headers = with_header(OwnedHeaders::new(), DELIVERY, u64::from(delivery) + 1);
            app.send("retry", payload, with_header(headers, NOT_BEFORE, not_before)).await
        }
        Disposition::DeadLetter => {
            eprintln!("{}/{} is set aside: {}", message.partition(), message.offset(), fleet::reason(result));
            app.run.set_aside(Some(&event))?;
            app.send("dead", payload, OwnedHeaders::new()).await
        }
    }
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    let mut shutdown = run.shutdown()?;
    PAYMENTS.check_redelivery(&Redelivery::kafka(DAY * 7, DAY * 7))?;
    let consumer = consumer(&run)?;
    let app = App { store: run.store().await?, producer: config(&run.url).create()?, run };
    let offsets = consumer.context();
    let mut handlers = JoinSet::new();
    loop {
        // Polling goes on while partitions are paused.
        let is_full = handlers.len() >= HANDLERS;
        if is_full != offsets.is_paused.swap(is_full, Ordering::Relaxed) {
            let partitions = consumer.assignment()?;
            match is_full {
                true => consumer.pause(&partitions)?,
                false => consumer.resume(&partitions)?,
            }
        }
        tokio::select! {
            message = consumer.recv() => {
                let message = message?.detach();
                let partition = (message.topic().to_owned(), message.partition());
                let Some(started) = lock(&offsets.tracker).started(&partition, message.offset()) else { continue };
                let app = app.clone();
                handlers.spawn(async move { (partition, started, deliver(app, message).await) });
            }
            Some(ended) = handlers.join_next() => settle(&consumer, ended?)?,
            () = &mut shutdown => break,
        }
    }
    // Running handlers finish, and their offsets are committed. Rebalances continue meanwhile; this worker leaves
    // messages that arrive now to other workers.
    while !handlers.is_empty() {
        tokio::select! {
            Some(ended) = handlers.join_next() => settle(&consumer, ended?)?,
            _ = consumer.recv() => {}
        }
    }
    // librdkafka can hang forever when it closes a consumer during a rebalance (its issue 4884), so the worker waits
    // for a limited time. After the same time (`session.timeout.ms`) the group removes the consumer.
    let (closed, is_closed) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = consumer.commit_consumer_state(CommitMode::Sync);
        drop(consumer);
        closed.send(())
    });
    let _ = timeout(BROKER_TIMEOUT, is_closed).await;
    app.store.flush().await;
    Ok(())
}

type Partition = (String, i32);

/// Stores the offset that may be committed now. If a message could not be settled, the offset does not move.
fn settle(consumer: &Consumer, ended: (Partition, StartedMessage, Result<(), Failure>)) -> Result<(), Failure> {
    let (partition, started, delivered) = ended;
    delivered?;
    // The tracker is locked until the offset is stored, so that no rebalance happens in between.
    let mut offsets = lock(&consumer.context().tracker);
    if let Some(next) = offsets.settled(started) {
        let mut stored = TopicPartitionList::new();
        stored.add_partition_offset(&partition.0, partition.1, Offset::Offset(next))?;
        consumer.store_offsets(&stored)?;
    }
    Ok(())
}

type Consumer = StreamConsumer<Offsets>;

/// State of the partitions that are assigned to this consumer.
#[derive(Default)]
struct Offsets {
    tracker: Mutex<OffsetTracker<Partition>>,
    is_paused: AtomicBool,
}

impl ClientContext for Offsets {}

impl ConsumerContext for Offsets {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        let name = |topic: &str, partition| (topic.to_owned(), partition);
        match rebalance {
            Rebalance::Assign(partitions) => {
                for partition in partitions.elements() {
                    lock(&self.tracker).assigned(&name(partition.topic(), partition.partition()));
                }
            }
            Rebalance::Revoke(partitions) => {
                // Revoked partitions are resumed here, because they would otherwise still be paused at their
                // next assignment.
                let _ = consumer.resume(partitions);
                self.is_paused.store(false, Ordering::Relaxed);
                for partition in partitions.elements() {
                    lock(&self.tracker).revoked(&name(partition.topic(), partition.partition()));
                }
            }
            Rebalance::Error(_) => {}
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[derive(Clone)]
struct App {
    run: Run,
    store: SqliteStore,
    producer: FutureProducer,
}

impl App {
    async fn send(&self, topic: &str, payload: &[u8], headers: OwnedHeaders) -> Result<(), Failure> {
        let topic = format!("{}-{topic}", self.run.name);
        let record = FutureRecord::<(), _>::to(&topic).payload(payload).headers(headers);
        self.producer.send(record, Duration::from_secs(5)).await.map_err(|(error, _)| error)?;
        Ok(())
    }
}

fn consumer(run: &Run) -> Result<Consumer, Failure> {
    let timeout = BROKER_TIMEOUT.as_millis().to_string();
    let mut config = config(&run.url);
    config.set("group.id", &run.name).set("auto.offset.reset", "earliest");
    config.set("enable.auto.offset.store", "false").set("auto.commit.interval.ms", "200");
    config
        .set("session.timeout.ms", &timeout)
        .set("max.poll.interval.ms", &timeout)
        .set("heartbeat.interval.ms", "300");
    let consumer: Consumer = config.create_with_context(Offsets::default())?;
    consumer.subscribe(&[&format!("{}-orders", run.name), &format!("{}-retry", run.name)])?;
    Ok(consumer)
}

fn now() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

fn header(message: &OwnedMessage, name: &str) -> Option<u64> {
    let header = message.headers()?.iter().find(|header| header.key == name)?;
    std::str::from_utf8(header.value?).ok()?.parse().ok()
}

fn with_header(headers: OwnedHeaders, key: &str, value: u64) -> OwnedHeaders {
    headers.insert(Header { key, value: Some(&value.to_string()) })
}

async fn publish(run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
    make_topics(&run.url, &run.name).await?;
    let (producer, topic): (FutureProducer, _) = (config(&run.url).create()?, format!("{}-orders", run.name));
    for message in messages {
        let record = FutureRecord::<(), _>::to(&topic).payload(message);
        producer.send(record, Duration::from_secs(5)).await.map_err(|(error, _)| error)?;
    }
    Ok(())
}

async fn clean_up(run: &Run) -> Result<(), Failure> {
    remove_topics(&run.url, &run.name).await
}

fn main() -> ExitCode {
    let mock = mock().expect("librdkafka has a mock");
    let url = mock.as_ref().map_or_else(|| "localhost:9092".to_owned(), Mock::bootstrap_servers);
    fleet::main("kafka", &url, &publish, &work, &clean_up)
}
