//! Shows a consumer of SQS that uses `#[idempotent]`, and survives the kill of its process, outages of SQS and of its
//! store, and a redriven message.
//!
//! `cargo run --example sqs --features sqs -- --url http://host:4566` publishes orders with duplicates and charges each
//! exactly once, on an emulator of SQS. Records are in a SQLite file. `-- --outages` starts an emulator of its own, and
//! makes it unreachable.
//!
//! - *Key*: the order, from the payload. Redrive gives a message a new `MessageId`, and so does a producer that sends
//!   the message again, as `redrive` below shows.
//! - *Requests*: a receive asks for as many messages as handlers are free. On Lambda, which receives the messages
//!   itself, use `observe_all` and return `Batch::item_failures`.
//! - *Slow handlers*: another consumer gets the message after its visibility time-out. The beat extends that time-out,
//!   up to 12 hours after the message was received.
//! - *Retry*: a new visibility time-out, in whole seconds. SQS counts each receive, even one that failed because the
//!   store was away.
//! - *Poison*: sent to the dead-letter queue with the reasons as attributes, then deleted. `maxReceiveCount` is higher
//!   than the consumer's own limit, because SQS adds no reason to a message that it moves.

use std::process::ExitCode;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::error::DisplayErrorContext;
use aws_sdk_sqs::types::{Message, MessageAttributeValue, MessageSystemAttributeName};
use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Receipt, Run};
use idem_examples::sqs::{Broker, Queues};
use idem_runtime::brokers::{DeadLetter, HandlerSlot, Intake, Redelivery};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, SqliteStore, current, idempotent, observe};

const DAY: Duration = Duration::from_secs(86_400);
/// SQS extends a message until 12 hours after it was received. The example stops an hour earlier.
const EXTENDED_AT_MOST: Duration = Duration::from_secs(11 * 3_600);
/// Number of deliveries after which a message is set aside.
const DELIVERY_LIMIT: u32 = 8;
const HANDLERS: usize = 8;
/// Largest number of messages in one answer of SQS.
const AT_A_TIME: usize = 10;
/// Time that a receive waits for a message. 20 s costs least, but a shutdown may then take 20 s.
const LONG_POLL_SECONDS: i32 = 1;
const PAYMENTS: Policy = Policy::new(DAY.saturating_mul(28))
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
async fn deliver(app: &App, message: &Message) -> Result<(), Failure> {
    let delivery = receive_count(message);
    let event = match Event::read(message.body().unwrap_or_default().as_bytes()) {
        Ok(event) => event,
        Err(error) => {
            app.run.delivered(None)?;
            return app.set_aside(message, None, app.intake.unreadable(&error)).await;
        }
    };
    app.run.delivered(Some(&event))?;
    if let Some(letter) = app.intake.beyond_limit(delivery, DELIVERY_LIMIT) {
        return app.set_aside(message, Some(&event), letter).await;
    }
    let (extend, extended) = (app.clone(), message.clone());
    let (result, outcome) = observe(charge(app, &event))
        .delivery(delivery)
        .delivery_limit(DELIVERY_LIMIT)
        .on_beat(BROKER_TIMEOUT / 3, move |beat| {
            let (extend, message) = (extend.clone(), extended.clone());
            async move {
                if beat.elapsed() > EXTENDED_AT_MOST {
                    beat.lost();
                    return Ok(());
                }
                extend.hide(&message, BROKER_TIMEOUT).await
            }
        })
        .catch_panics()
        .await;
    match outcome.disposition() {
        Disposition::Ack => {
            app.run.acknowledged(&event, &outcome)?;
            // If this request fails, the next delivery gets the recorded result.
            app.delete(message).await
        }
        Disposition::Retry { after } => app.hide(message, after).await,
        Disposition::DeadLetter => {
            app.set_aside(message, Some(&event), app.intake.dead_letter(&result, &outcome)).await
        }
    }
}

async fn handle(app: App, message: Message, slot: HandlerSlot) {
    if let Err(error) = deliver(&app, &message).await {
        let id = message.message_id().unwrap_or_default();
        eprintln!("message {id} could not be settled, and comes again after its visibility time-out: {error}");
    }
    drop(slot);
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    PAYMENTS.check_redelivery(&Redelivery::sqs(Queues::RETENTION).dlq(Queues::DEAD_LETTER_RETENTION))?;
    let store = run.store().await?;
    let intake = Intake::new(&store, HANDLERS);
    fleet::stop_at_sigterm(&intake)?;
    let queues = Queues::of(&run).await?;
    let app = App { sqs: queues.client.clone(), queues, intake, store, run };
    // A receive is never cancelled: messages of a cancelled receive would stay hidden for a while.
    while let Some(slot) = app.intake.slot().await {
        let mut slots = vec![slot];
        while slots.len() < AT_A_TIME
            && let Some(slot) = app.intake.try_slot()
        {
            slots.push(slot);
        }
        match app.receive(slots.len()).await {
            Ok(messages) => {
                for (message, slot) in messages.into_iter().zip(slots) {
                    tokio::spawn(handle(app.clone(), message, slot));
                }
            }
            Err(error) => _ = app.intake.broker_failed(&error).await,
        }
    }
    app.intake.drain().await;
    Ok(())
}

#[derive(Clone)]
struct App {
    run: Run,
    store: SqliteStore,
    sqs: Client,
    queues: Queues,
    intake: Intake,
}

impl App {
    async fn receive(&self, at_most: usize) -> Result<Vec<Message>, Failure> {
        let receive = self.sqs.receive_message().queue_url(&self.queues.orders);
        // SQS returns the number of deliveries only on request.
        let receive = receive.message_system_attribute_names(MessageSystemAttributeName::ApproximateReceiveCount);
        let receive = receive.max_number_of_messages(i32::try_from(at_most)?).wait_time_seconds(LONG_POLL_SECONDS);
        Ok(receive.send().await.map_err(explained)?.messages.unwrap_or_default())
    }

    /// Hides the message from other consumers for `time`.
    async fn hide(&self, message: &Message, time: Duration) -> Result<(), Failure> {
        let hide = self.sqs.change_message_visibility().queue_url(&self.queues.orders);
        let hide = hide.set_receipt_handle(message.receipt_handle.clone()).visibility_timeout(seconds(time));
        hide.send().await.map_err(explained)?;
        Ok(())
    }

    async fn delete(&self, message: &Message) -> Result<(), Failure> {
        let delete = self.sqs.delete_message().queue_url(&self.queues.orders);
        delete.set_receipt_handle(message.receipt_handle.clone()).send().await.map_err(explained)?;
        Ok(())
    }

    /// Moves the message to the dead-letter queue, with the reasons of `letter`. A crash in between loses no message.
    async fn set_aside(&self, message: &Message, event: Option<&Event>, letter: DeadLetter) -> Result<(), Failure> {
        eprintln!("message {} is set aside: {letter}", message.message_id().unwrap_or_default());
        self.run.set_aside(event)?;
        let mut send = self.sqs.send_message().queue_url(&self.queues.dead_letters);
        for (name, text) in letter.headers() {
            let text = MessageAttributeValue::builder().data_type("String").string_value(text).build()?;
            send = send.message_attributes(name, text);
        }
        send.set_message_body(message.body.clone()).send().await.map_err(explained)?;
        self.delete(message).await
    }
}

/// Adds the causes to the text of an error, which the client of SQS leaves out.
fn explained(error: impl std::error::Error) -> Failure {
    DisplayErrorContext(error).to_string().into()
}

/// Converts to whole seconds, rounded up, so that a pause is never zero.
fn seconds(time: Duration) -> i32 {
    i32::try_from(time.as_millis().div_ceil(1000)).unwrap_or(i32::MAX)
}

fn receive_count(message: &Message) -> u32 {
    let counted = message.attributes().and_then(|all| all.get(&MessageSystemAttributeName::ApproximateReceiveCount));
    counted.and_then(|count| count.parse().ok()).unwrap_or(1)
}

/// Sends the message of a charged order through the dead-letter queue, as if the worker had failed to delete the
/// message, and an operator had redriven it. Checks that the second delivery is a replay.
async fn redrive(run: &Run) -> Result<(), Failure> {
    let store = run.store().await?;
    let (queues, intake) = (Queues::of(run).await?, Intake::new(&store, 1));
    let app = App { sqs: queues.client.clone(), queues, intake, store, run: run.clone() };
    let charged = Event::plain(1);
    let message = app.queues.redriven(&serde_json::to_string(&charged)?).await?;
    app.run.delivered(Some(&charged))?;
    let (_, outcome) = observe(charge(&app, &charged)).delivery(receive_count(&message)).await;
    if outcome.disposition() != Disposition::Ack || !outcome.replayed() {
        return Err("the message that was redriven is not a replay".into());
    }
    app.run.acknowledged(&charged, &outcome)?;
    app.delete(&message).await
}

fn main() -> ExitCode {
    fleet::main(&Broker { redrive }, &work)
}
