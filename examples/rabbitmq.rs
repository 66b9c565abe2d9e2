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
//! - *Retry*: the worker publishes a copy to a queue whose messages dead-letter into the work queue after their time,
//!   then acknowledges the message. There is one queue for each delay, because only the first message of a queue
//!   expires; so delays are rounded up. These are quorum queues that dead-letter at least once: a classic queue loses
//!   the messages that expire while the work queue is not ready, for example at the start of the server.
//! - *Count*: a copy is a new message for the server, so a header carries the number of its deliveries. A quorum queue
//!   counts the deliveries that a lost connection cut off.
//! - *Poison*: the worker publishes a copy to the dead-letter queue, with the reasons as headers, then acknowledges.
//! - *Time limits*: `lapin` has none, so every call that waits for the server has one. A handler that waits for ever
//!   would hold up the end of its worker.

use std::process::ExitCode;
use std::time::Duration;

use futures::StreamExt as _;
use idem_examples::fleet::{self, Event, Failure, Receipt, Run};
use idem_examples::rabbitmq::{acknowledge, close, connect, delay_queue_for, hand_back, send};
use idem_runtime::brokers::{DeadLetter, HandlerSlot, Intake};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, SqliteStore, current, idempotent, observe};
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Channel};

/// Number of handlers, and largest number of unacknowledged messages that the server sends.
const HANDLERS: u16 = 8;
/// Number of deliveries after which a message is set aside.
const DELIVERY_LIMIT: u32 = 8;
/// Header of a copy with the number of deliveries of the message so far.
const DELIVERIES: &str = "x-deliveries";
const PAYMENTS: Policy = Policy::new(Duration::from_secs(7 * 86_400))
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

/// Handles one delivery.
async fn deliver(app: &App, channel: &Channel, message: &Delivery) -> Result<(), Failure> {
    let delivery = delivery(message);
    let event = match Event::read(&message.data) {
        Ok(event) => event,
        Err(error) => {
            app.run.delivered(None)?;
            return set_aside(app, channel, message, None, app.intake.unreadable(&error)).await;
        }
    };
    app.run.delivered(Some(&event))?;
    if let Some(letter) = app.intake.beyond_limit(delivery, DELIVERY_LIMIT) {
        return set_aside(app, channel, message, Some(&event), letter).await;
    }
    let call = observe(charge(app, &event)).delivery(delivery).delivery_limit(DELIVERY_LIMIT);
    let (result, outcome) = call.catch_panics().await;
    match outcome.disposition() {
        Disposition::Ack => app.run.acknowledged(&event, &outcome)?,
        Disposition::Retry { after } => {
            // An outage of the store says nothing about the message, so this delivery is not counted.
            let deliveries = if outcome.store_failed() { delivery - 1 } else { delivery };
            // If the worker dies between the copy and the acknowledgement, there is a duplicate, which is harmless.
            deliver_later(app, channel, message, deliveries, after).await?;
        }
        Disposition::DeadLetter => {
            let letter = app.intake.dead_letter(&result, &outcome);
            return set_aside(app, channel, message, Some(&event), letter).await;
        }
    }
    // If this acknowledgement fails, the next delivery gets the recorded result.
    acknowledge(message).await
}

/// Returns the number of this delivery: deliveries of earlier copies, and of this copy.
fn delivery(message: &Delivery) -> u32 {
    let headers = message.properties.headers().as_ref();
    let count = |name: &str| match headers.and_then(|headers| headers.inner().get(name)) {
        Some(AMQPValue::LongUInt(count)) => *count,
        Some(AMQPValue::LongLongInt(count)) => u32::try_from(*count).unwrap_or(0),
        _ => 0,
    };
    count(DELIVERIES).saturating_add(count("x-delivery-count")).saturating_add(1)
}

async fn deliver_later(
    app: &App,
    channel: &Channel,
    message: &Delivery,
    deliveries: u32,
    after: Duration,
) -> Result<(), Failure> {
    let queue = delay_queue_for(&app.run, after);
    let mut headers = FieldTable::default();
    headers.insert(DELIVERIES.into(), AMQPValue::LongUInt(deliveries));
    send(channel, &queue, &message.data, BasicProperties::default().with_headers(headers)).await
}

/// Moves the message to the dead-letter queue, with the reasons of `letter`. A crash in between loses no message.
async fn set_aside(
    app: &App,
    channel: &Channel,
    message: &Delivery,
    event: Option<&Event>,
    letter: DeadLetter,
) -> Result<(), Failure> {
    eprintln!("delivery {} is set aside: {letter}", message.delivery_tag);
    app.run.set_aside(event)?;
    let mut headers = FieldTable::default();
    for (name, text) in letter.headers() {
        headers.insert(name.into(), AMQPValue::LongString(LongString::from(text)));
    }
    let properties = BasicProperties::default().with_headers(headers);
    send(channel, &format!("{}.dead", app.run.name), &message.data, properties).await?;
    acknowledge(message).await
}

async fn handle(app: App, channel: Channel, message: Delivery, slot: HandlerSlot) {
    if let Err(error) = deliver(&app, &channel, &message).await {
        // If the channel was lost, the server delivers the unsettled message again. If the channel still works, and
        // only the copy could not be published, `nack` returns the message to the queue.
        eprintln!("delivery {} could not be settled: {error}", message.delivery_tag);
        app.intake.broker_failed(&error).await;
        hand_back(&message).await;
    }
    drop(slot);
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    let store = run.store().await?;
    let intake = Intake::new(&store, HANDLERS.into());
    fleet::stop_at_sigterm(&intake)?;
    let app = App { run, store, intake };
    while let Err(error) = consume(&app).await
        && app.intake.broker_failed(&error).await
    {}
    app.intake.drain().await;
    Ok(())
}

/// Consumes over one connection, until that connection is lost or the worker has ended its work. Handlers outlive a
/// lost connection: the server delivers their messages again, and their results are replayed.
async fn consume(app: &App) -> Result<(), Failure> {
    let (connection, channel) = connect(&app.run).await?;
    channel.basic_qos(HANDLERS, BasicQosOptions::default()).await?;
    let (queue, options) = (app.run.name.as_str().into(), BasicConsumeOptions::default());
    let mut messages = channel.basic_consume(queue, "".into(), options, FieldTable::default()).await?;
    let mut received = 0;
    // While the store is away, the messages that were sent ahead wait here, and no others come.
    while let Some(slot) = app.intake.slot().await {
        let message = tokio::select! {
            message = messages.next() => message.ok_or("the connection is lost")??,
            () = app.intake.stopped() => break,
        };
        tokio::spawn(handle(app.clone(), channel.clone(), message, slot));
        received += 1;
        if app.run.loses_connection(received)? {
            close(&connection, "to see what happens").await?;
        }
    }
    // Running handlers still need the connection.
    app.intake.drain().await;
    close(&connection, "stopped").await
}

#[derive(Clone)]
struct App {
    run: Run,
    store: SqliteStore,
    intake: Intake,
}

fn main() -> ExitCode {
    fleet::main(&idem_examples::rabbitmq::Broker, &work)
}
