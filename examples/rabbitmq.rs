//! Shows a consumer of RabbitMQ that uses `#[idempotent]`, and survives the kill of its process, of its broker, and an
//! outage of its store.
//!
//! `cargo run --example rabbitmq --features rabbitmq` publishes orders with duplicates and charges each exactly once.
//! Records are in a SQLite file. `-- --url amqp://user:password@host` uses another RabbitMQ than the local one, and `--
//! --outages` starts a RabbitMQ for this run and kills it.
//!
//! - *Key*: the order, from the payload. A delivery tag is valid only in its channel, and the publisher chooses
//!   `message_id`.
//! - *Slow handlers*: no extension is needed. The server waits for `consumer_timeout` (30 minutes), and redelivers all
//!   unacknowledged messages when their channel closes.
//! - *Retry*: a copy in a queue whose messages dead-letter into the work queue after their time, then an
//!   acknowledgement. There is one queue for each delay, because only the first message of a queue expires; so delays
//!   are rounded up to powers of two.
//! - *Poison*: the worker rejects the message without requeue, which dead-letters it.
#![allow(clippy::disallowed_methods, reason = "a server that is away is given some time")]

use std::process::ExitCode;
use std::time::Duration;

use futures::StreamExt as _;
use idem_examples::fleet::{self, Event, Failure, Receipt, Run};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, SqliteStore, StoreExt as _, current, idempotent, observe};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Number of handlers, and largest number of unacknowledged messages that the server sends.
const HANDLERS: u16 = 8;
/// Header with the number of the delivery. The server counts a copy of a message as a new message.
const DELIVERY: &str = "x-delivery";
const PAYMENTS: Policy = Policy::new(Duration::from_secs(7 * 86_400))
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

/// Handles one delivery.
async fn deliver(app: App, channel: Channel, message: Delivery) -> Result<(), Failure> {
    let event = match Event::read(&message.data) {
        Ok(event) => event,
        Err(error) => {
            eprintln!("delivery {} can't be read, and is set aside: {error}", message.delivery_tag);
            app.run.delivered(None)?;
            app.run.set_aside(None)?;
            return refuse(&message).await;
        }
    };
    app.run.delivered(Some(&event))?;
    let headers = message.properties.headers();
    let delivery = match headers.as_ref().and_then(|headers| headers.inner().get(DELIVERY)) {
        Some(AMQPValue::LongUInt(delivery)) => *delivery,
        _ => 1,
    };
    let (result, outcome) = observe(charge(&app, &event)).delivery(delivery).catch_panics().await;
    match outcome.disposition() {
        Disposition::Ack => {
            app.run.acknowledged(&event, &outcome)?;
            message.ack(BasicAckOptions::default()).await?;
        }
        Disposition::Retry { after } => {
            // If the worker dies between publishing the copy and acknowledging the message, there is a duplicate, which
            // is harmless.
            deliver_later(&app.run, &channel, &message, delivery + 1, after).await?;
            message.ack(BasicAckOptions::default()).await?;
        }
        Disposition::DeadLetter => {
            eprintln!("delivery {} is set aside: {}", message.delivery_tag, fleet::reason(result));
            app.run.set_aside(Some(&event))?;
            refuse(&message).await?;
        }
    }
    Ok(())
}

async fn refuse(message: &Delivery) -> Result<(), Failure> {
    message.nack(BasicNackOptions { requeue: false, ..Default::default() }).await?;
    Ok(())
}

async fn deliver_later(
    run: &Run,
    channel: &Channel,
    message: &Delivery,
    delivery: u32,
    after: Duration,
) -> Result<(), Failure> {
    let millis = u32::try_from(after.as_millis())?.next_power_of_two();
    let queue = format!("{}.after-{millis}-ms", run.name);
    let mut settings = dead_letters_to(&run.name);
    settings.insert("x-message-ttl".into(), AMQPValue::LongUInt(millis));
    // The server deletes the queue of a delay some time after its last message.
    settings.insert("x-expires".into(), AMQPValue::LongUInt(millis.saturating_add(60_000)));
    channel.queue_declare(queue.as_str().into(), QueueDeclareOptions::durable(), settings).await?;
    let mut headers = FieldTable::default();
    headers.insert(DELIVERY.into(), AMQPValue::LongUInt(delivery));
    send(channel, &queue, &message.data, BasicProperties::default().with_headers(headers)).await
}

/// Publishes a message, and waits until the server has confirmed it.
async fn send(channel: &Channel, queue: &str, payload: &[u8], properties: BasicProperties) -> Result<(), Failure> {
    let (persistent, options) = (properties.with_delivery_mode(2), BasicPublishOptions::default());
    let confirmed = channel.basic_publish("".into(), queue.into(), options, payload, persistent).await?.await?;
    if confirmed.is_nack() { Err("the server did not take a message".into()) } else { Ok(()) }
}

/// Runs a worker process, which reconnects whenever its connection is lost.
async fn work(run: Run) -> Result<(), Failure> {
    let mut shutdown = run.shutdown()?;
    let app = App { store: run.store().await?, run };
    while !session(&app, &mut shutdown).await? {
        eprintln!("worker {}: the connection is lost; connecting again", std::process::id());
        sleep(Duration::from_millis(200)).await;
    }
    app.store.flush().await;
    Ok(())
}

/// Runs one connection until it is lost (`false`) or the worker should end (`true`).
async fn session(app: &App, shutdown: &mut (impl Future<Output = ()> + Unpin)) -> Result<bool, Failure> {
    let (connection, channel) = connect(&app.run).await?;
    channel.basic_qos(HANDLERS, BasicQosOptions::default()).await?;
    let (queue, options) = (app.run.name.as_str().into(), BasicConsumeOptions::default());
    let mut messages = channel.basic_consume(queue, "".into(), options, FieldTable::default()).await?;
    let (mut handlers, mut received) = (JoinSet::new(), 0);
    let stopped = loop {
        let message = tokio::select! {
            message = messages.next() => message,
            () = &mut *shutdown => break true,
        };
        let Some(Ok(message)) = message else { break false };
        handlers.spawn(deliver(app.clone(), channel.clone(), message));
        received += 1;
        if app.run.loses_connection(received)? {
            connection.close(200, "to see what happens".into()).await?;
        }
    };
    // Running handlers finish. On a lost connection they can't acknowledge; the broker delivers their messages again,
    // and the workers replay the results. The broker also redelivers fetched messages without a handler.
    while let Some(ended) = handlers.join_next().await {
        if let Err(error) = ended? {
            eprintln!("worker {}: a message could not be settled: {error}", std::process::id());
        }
    }
    if stopped {
        connection.close(200, "stopped".into()).await?;
    }
    Ok(stopped)
}

#[derive(Clone)]
struct App {
    run: Run,
    store: SqliteStore,
}

async fn connect(run: &Run) -> Result<(Connection, Channel), Failure> {
    let connection = Connection::connect(&run.url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let dead = format!("{}.dead", run.name);
    channel.queue_declare(dead.as_str().into(), QueueDeclareOptions::durable(), FieldTable::default()).await?;
    let settings = dead_letters_to(&dead);
    channel.queue_declare(run.name.as_str().into(), QueueDeclareOptions::durable(), settings).await?;
    Ok((connection, channel))
}

/// Returns the settings of a queue whose messages go to `queue` when they expire or are refused.
fn dead_letters_to(queue: &str) -> FieldTable {
    let mut settings = FieldTable::default();
    settings.insert("x-dead-letter-exchange".into(), AMQPValue::LongString("".into()));
    settings.insert("x-dead-letter-routing-key".into(), AMQPValue::LongString(queue.into()));
    settings
}

async fn publish(run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
    let (connection, channel) = connect(run).await?;
    for message in messages {
        send(&channel, &run.name, message, BasicProperties::default()).await?;
    }
    Ok(connection.close(200, "published".into()).await?)
}

async fn clean_up(run: &Run) -> Result<(), Failure> {
    let (connection, channel) = connect(run).await?;
    for queue in [run.name.clone(), format!("{}.dead", run.name)] {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
    }
    Ok(connection.close(200, "done".into()).await?)
}

fn main() -> ExitCode {
    fleet::main("rabbitmq", "amqp://guest:guest@127.0.0.1:5672", &publish, &work, &clean_up)
}
