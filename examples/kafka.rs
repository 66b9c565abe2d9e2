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

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use idem_examples::fleet::{self, Event, Failure, Receipt, Run};
use idem_examples::kafka::{Broker, config};
use idem_runtime::brokers::{DeadLetter, HandlerSlot, Intake, OffsetTracker, Redelivery, StartedMessage};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, SqliteStore, current, idempotent, observe};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext, Rebalance, StreamConsumer};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Header, Headers as _, Message as _, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

const DAY: Duration = Duration::from_secs(86_400);
const HANDLERS: usize = 8;
/// Time without a heartbeat after which the group removes a member: longer than the 3 s for which a new group waits for
/// its members (`group.initial.rebalance.delay.ms`). 45 s is the usual value.
const SESSION: Duration = Duration::from_secs(4);
/// Largest number of messages in memory, with those that wait for their time.
const MESSAGES: usize = 1_000;
/// Number of deliveries after which a message is set aside.
const DELIVERY_LIMIT: u32 = 8;
/// Headers of the retry topic: the number of deliveries so far, and the due time in milliseconds since 1970.
const DELIVERIES: &str = "deliveries";
const NOT_BEFORE: &str = "not-before";
const PAYMENTS: Policy = Policy::new(DAY.saturating_mul(14))
    .lease(Duration::from_secs(2))
    .max_attempts(4)
    .backoff(Backoff::new(Duration::from_millis(100), Duration::from_secs(2)));

/// The handler: it runs once for each order, and every duplicate gets the receipt of that run.
#[idempotent(key = "order:{event.order}", policy = app.run.policy(PAYMENTS, event), store = app.store, fingerprint = (event.order, event.cents))]
async fn charge(app: &App, event: &Event) -> Result<Receipt, Failure> {
    // The worker can die between the charge and its record, so every attempt gives the bank the same key.
    let payment = current()?.child_key("charge");
    Ok(app.run.charge(event, payment).await?)
}

/// Handles one delivery. Returns the copy, if any, that must be written to another topic before the message is settled.
async fn deliver(app: &App, message: &OwnedMessage) -> Result<Option<Copy>, Failure> {
    let delivery = 1 + header(message, DELIVERIES).map_or(0, |count| u32::try_from(count).unwrap_or(u32::MAX - 1));
    let event = match Event::read(message.payload().unwrap_or_default()) {
        Ok(event) => event,
        Err(error) => {
            app.run.delivered(None)?;
            return app.set_aside(message, None, &app.intake.unreadable(&error));
        }
    };
    app.run.delivered(Some(&event))?;
    if let Some(letter) = app.intake.beyond_limit(delivery, DELIVERY_LIMIT) {
        return app.set_aside(message, Some(&event), &letter);
    }
    let call = observe(charge(app, &event)).delivery(delivery).delivery_limit(DELIVERY_LIMIT);
    let (result, outcome) = call.catch_panics().await;
    match outcome.disposition() {
        Disposition::Ack => {
            app.run.acknowledged(&event, &outcome)?;
            Ok(None)
        }
        Disposition::Retry { after } => {
            // An outage of the store says nothing about the message, so this delivery is not counted.
            let deliveries = if outcome.store_failed() { delivery - 1 } else { delivery };
            let not_before = now() + u64::try_from(after.as_millis())?;
            let headers = with_header(OwnedHeaders::new(), DELIVERIES, &deliveries.to_string());
            Ok(Some(Copy { topic: "retry", headers: with_header(headers, NOT_BEFORE, &not_before.to_string()) }))
        }
        Disposition::DeadLetter => app.set_aside(message, Some(&event), &app.intake.dead_letter(&result, &outcome)),
    }
}

/// A copy of a message for another topic.
struct Copy {
    topic: &'static str,
    headers: OwnedHeaders,
}

/// Waits for a message's time and for a slot. A message that waits occupies no handler. Returns whether the offset of
/// the message may be committed.
async fn wait_and_handle(app: App, message: OwnedMessage, wait: Duration) -> bool {
    tokio::select! {
        () = sleep(wait) => {}
        () = app.intake.stopped() => return false,
    }
    match app.intake.slot().await {
        Some(slot) => handle(app, message, slot).await,
        None => false,
    }
}

/// Handles one message. Returns whether its offset may be committed.
async fn handle(app: App, message: OwnedMessage, _slot: HandlerSlot) -> bool {
    let copy = match deliver(&app, &message).await {
        Ok(copy) => copy,
        Err(error) => {
            eprintln!("offset {} could not be handled: {error}", message.offset());
            return false;
        }
    };
    // The offset is settled only after the copy is written, however long that takes.
    while let Some(copy) = &copy
        && let Err(error) = app.send(copy, &message).await
    {
        if !app.intake.broker_failed(&error).await {
            return false;
        }
    }
    true
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    PAYMENTS.check_redelivery(&Redelivery::kafka(DAY * 7, DAY * 7))?;
    let store = run.store().await?;
    let intake = Intake::new(&store, HANDLERS);
    fleet::stop_at_sigterm(&intake)?;
    let producer = config(&run.url).set("message.timeout.ms", "5000").create()?;
    let app = App { run, store, producer, intake };
    // librdkafka connects again whenever a connection is lost. Only a fatal error needs another consumer.
    while let Err(error) = consume(&app).await
        && app.intake.broker_failed(&error).await
    {}
    app.intake.drain().await;
    Ok(())
}

/// Consumes until the consumer fails for good or the worker is stopped.
async fn consume(app: &App) -> Result<(), Failure> {
    let consumer = consumer(&app.run)?;
    let (mut handlers, mut ended) = (JoinSet::new(), Ok(()));
    // Messages that have no slot yet. A pause drops the messages that the client has fetched ahead, so a pause, once
    // begun, lasts until this queue is empty.
    let mut waiting = VecDeque::new();
    loop {
        while !waiting.is_empty()
            && let Some(slot) = app.intake.try_slot()
            && let Some((message, partition, started)) = waiting.pop_front()
        {
            let handled = handle(app.clone(), message, slot);
            handlers.spawn(async move { (partition, started, handled.await) });
        }
        let is_full = handlers.len() >= MESSAGES || waiting.len() >= HANDLERS;
        if is_full || waiting.is_empty() {
            pause(&consumer, is_full)?;
        }
        // Polling goes on while partitions are paused.
        tokio::select! {
            message = consumer.recv() => match message {
                Ok(message) => {
                    let message = message.detach();
                    let partition = (message.topic().to_owned(), message.partition());
                    let started = lock(&consumer.context().tracker).started(&partition, message.offset());
                    let Some(started) = started else { continue };
                    match header(&message, NOT_BEFORE).map(|due| due.saturating_sub(now())) {
                        None | Some(0) => waiting.push_back((message, partition, started)),
                        Some(millis) => {
                            let handled = wait_and_handle(app.clone(), message, Duration::from_millis(millis));
                            handlers.spawn(async move { (partition, started, handled.await) });
                        }
                    }
                }
                Err(error) if error.rdkafka_error_code() == Some(RDKafkaErrorCode::Fatal) => {
                    ended = Err(error.into());
                    break;
                }
                Err(error) => eprintln!("worker {}: {error}", std::process::id()),
            },
            Some(ended) = handlers.join_next() => settle(&consumer, ended?),
            // This branch only wakes the loop, which takes the slot above.
            Some(_slot) = app.intake.slot(), if !waiting.is_empty() => {}
            () = app.intake.stopped() => break,
        }
    }
    // Running handlers finish, and their offsets are committed. Rebalances continue meanwhile; this worker leaves
    // messages that arrive now to other workers.
    while !handlers.is_empty() {
        tokio::select! {
            Some(ended) = handlers.join_next() => settle(&consumer, ended?),
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
    let _ = timeout(SESSION, is_closed).await;
    ended
}

/// Pauses or resumes the partitions of the consumer.
fn pause(consumer: &Consumer, pauses: bool) -> Result<(), Failure> {
    if pauses != consumer.context().is_paused.swap(pauses, Ordering::Relaxed) {
        let partitions = consumer.assignment()?;
        match pauses {
            true => consumer.pause(&partitions)?,
            false => consumer.resume(&partitions)?,
        }
    }
    Ok(())
}

type Partition = (String, i32);

/// Stores the offset that may be committed now. If a message could not be settled, the offset does not move: the
/// message is delivered again after a restart or a rebalance.
fn settle(consumer: &Consumer, (partition, started, is_settled): (Partition, StartedMessage, bool)) {
    // The tracker is locked until the offset is stored, so that no rebalance happens in between.
    let mut offsets = lock(&consumer.context().tracker);
    if is_settled && let Some(next) = offsets.settled(started) {
        let mut stored = TopicPartitionList::new();
        let added = stored.add_partition_offset(&partition.0, partition.1, Offset::Offset(next));
        // If the partition is lost, its next owner commits the offset.
        if let Err(error) = added.and_then(|()| consumer.store_offsets(&stored)) {
            eprintln!("the offset {next} was not stored: {error}");
        }
    }
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
                for partition in partitions.elements() {
                    lock(&self.tracker).revoked(&name(partition.topic(), partition.partition()));
                }
            }
            Rebalance::Error(_) => {}
        }
        // New partitions are not paused yet.
        self.is_paused.store(false, Ordering::Relaxed);
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
    intake: Intake,
}

impl App {
    /// Returns the copy for the topic of messages that are set aside.
    fn set_aside(
        &self,
        message: &OwnedMessage,
        event: Option<&Event>,
        letter: &DeadLetter,
    ) -> Result<Option<Copy>, Failure> {
        eprintln!("{}/{} is set aside: {letter}", message.partition(), message.offset());
        self.run.set_aside(event)?;
        let add = |headers, (name, text)| with_header(headers, name, text);
        Ok(Some(Copy { topic: "dead", headers: letter.headers().fold(OwnedHeaders::new(), add) }))
    }

    async fn send(&self, copy: &Copy, message: &OwnedMessage) -> Result<(), Failure> {
        let topic = format!("{}-{}", self.run.name, copy.topic);
        let payload = message.payload().unwrap_or_default();
        let record = FutureRecord::<(), _>::to(&topic).payload(payload).headers(copy.headers.clone());
        self.producer.send(record, Duration::from_secs(5)).await.map_err(|(error, _)| error)?;
        Ok(())
    }
}

fn consumer(run: &Run) -> Result<Consumer, Failure> {
    let timeout = SESSION.as_millis().to_string();
    let mut config = config(&run.url);
    // A partition that is resumed waits for the end of the fetch that is under way.
    config.set("fetch.wait.max.ms", "100");
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

fn with_header(headers: OwnedHeaders, key: &str, value: &str) -> OwnedHeaders {
    headers.insert(Header { key, value: Some(value) })
}

fn main() -> ExitCode {
    fleet::main(&Broker::default(), &work)
}
