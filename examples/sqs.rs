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

use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry, Message, MessageSystemAttributeName,
    QueueAttributeName,
};
use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Receipt, Run};
use idem_examples::sqs;
use idem_runtime::brokers::{Batch, Redelivery};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, SqliteStore, StoreExt as _, current, idempotent, observe, observe_all};

const DAY: Duration = Duration::from_secs(86_400);
const RETENTION: Duration = DAY.saturating_mul(4);
const DEAD_LETTER_RETENTION: Duration = DAY.saturating_mul(14);
/// SQS extends a message until 12 hours after it was received. The example stops an hour earlier.
const EXTENDED_AT_MOST: Duration = Duration::from_secs(11 * 3_600);
const MAX_RECEIVE_COUNT: u32 = 20;
/// Number of messages that a worker receives in one request: 10 at most.
const HANDLERS: i32 = 8;
/// Time that a receive waits for a message. 20 s costs least, but a shutdown may then take 20 s.
const LONG_POLL_SECONDS: i32 = 1;
const PAYMENTS: Policy = Policy::new(DAY.saturating_mul(28))
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

/// A message and its parsed content.
struct Delivery {
    message: Message,
    event: Event,
}

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message.message_id().unwrap_or_default())
    }
}

/// Handles all messages of a batch. On AWS Lambda, return its `item_failures()`.
async fn handle<'a>(app: &App, deliveries: &'a [Delivery]) -> Batch<&'a Delivery, Receipt, Failure> {
    let calls = deliveries.iter().map(|delivery| {
        let (extend, handle) = (app.clone(), delivery.message.receipt_handle().unwrap_or_default().to_owned());
        let call = observe(charge(app, &delivery.event))
            .delivery(receive_count(&delivery.message))
            .delivery_limit(MAX_RECEIVE_COUNT)
            .on_beat(BROKER_TIMEOUT / 3, move |beat| {
                let (extend, handle) = (extend.clone(), handle.clone());
                async move {
                    if beat.elapsed() > EXTENDED_AT_MOST {
                        beat.lost();
                        return Ok(());
                    }
                    extend.hide(&handle, BROKER_TIMEOUT).await
                }
            });
        (delivery, call)
    });
    observe_all(calls).limit(deliveries.len()).await
}

/// Reports the ends of a batch's messages to SQS.
async fn settle(app: &App, batch: Batch<&Delivery, Receipt, Failure>) -> Result<(), Failure> {
    let (mut done, mut later) = (Vec::new(), Vec::new());
    for item in batch.into_items() {
        let Delivery { message, event } = item.id;
        let (id, handle) = (message.message_id().unwrap_or_default(), message.receipt_handle().unwrap_or_default());
        match item.disposition() {
            Disposition::Ack => {
                app.run.acknowledged(event, &item.outcome)?;
                done.push(DeleteMessageBatchRequestEntry::builder().id(id).receipt_handle(handle).build()?);
            }
            Disposition::Retry { after } => {
                let entry = ChangeMessageVisibilityBatchRequestEntry::builder().id(id).receipt_handle(handle);
                later.push(entry.visibility_timeout(seconds(after)).build()?);
            }
            Disposition::DeadLetter => {
                eprintln!("message {id} is set aside: {}", fleet::reason(item.result));
                app.run.set_aside(Some(event))?;
                app.set_aside(message).await?;
            }
        }
    }
    // SQS answers each entry of a batch separately. A message that could not be deleted is delivered again and gets its
    // recorded result; a message whose time-out could not be changed is delivered again a little early.
    if !done.is_empty() {
        let answer = app.sqs.delete_message_batch().queue_url(&app.queue).set_entries(Some(done)).send().await?;
        for failed in answer.failed() {
            eprintln!("message {} could not be deleted: {}", failed.id(), failed.code());
        }
    }
    if !later.is_empty() {
        app.sqs.change_message_visibility_batch().queue_url(&app.queue).set_entries(Some(later)).send().await?;
    }
    Ok(())
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    let mut shutdown = run.shutdown()?;
    PAYMENTS.check_redelivery(&Redelivery::sqs(RETENTION).dlq(DEAD_LETTER_RETENTION))?;
    let app = App::new(run).await?;
    // A receive is never cancelled: messages of a cancelled receive would stay hidden for a while.
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            () = async {} => {}
        }
        let mut deliveries = Vec::new();
        for message in app.receive().await? {
            match Event::read(message.body().unwrap_or_default().as_bytes()) {
                Ok(event) => {
                    app.run.delivered(Some(&event))?;
                    deliveries.push(Delivery { message, event });
                }
                Err(error) => {
                    let id = message.message_id().unwrap_or_default();
                    eprintln!("message {id} can't be read, and is set aside: {error}");
                    app.run.delivered(None)?;
                    app.run.set_aside(None)?;
                    app.set_aside(&message).await?;
                }
            }
        }
        settle(&app, handle(&app, &deliveries).await).await?;
    }
    app.store.flush().await;
    Ok(())
}

#[derive(Clone)]
struct App {
    run: Run,
    store: SqliteStore,
    sqs: Client,
    queue: String,
    dead_letters: String,
}

impl App {
    /// Creates the queues unless they exist.
    async fn new(run: Run) -> Result<Self, Failure> {
        let sqs = sqs::client(&run.url);
        let dead_letters = sqs::queue(&sqs, &format!("{}-dead", run.name), [retention(DEAD_LETTER_RETENTION)]).await?;
        let settings = [
            retention(RETENTION),
            (QueueAttributeName::VisibilityTimeout, seconds(BROKER_TIMEOUT).to_string()),
            sqs::redrive_policy(&sqs, &dead_letters, MAX_RECEIVE_COUNT).await?,
        ];
        let queue = sqs::queue(&sqs, &run.name, settings).await?;
        Ok(Self { store: run.store().await?, run, sqs, queue, dead_letters })
    }

    async fn receive(&self) -> Result<Vec<Message>, Failure> {
        let receive = self.sqs.receive_message().queue_url(&self.queue).max_number_of_messages(HANDLERS);
        // SQS returns the number of deliveries only on request.
        let receive = receive.message_system_attribute_names(MessageSystemAttributeName::ApproximateReceiveCount);
        Ok(receive.wait_time_seconds(LONG_POLL_SECONDS).send().await?.messages.unwrap_or_default())
    }

    /// Hides the message from other consumers for `time`.
    async fn hide(&self, handle: &str, time: Duration) -> Result<(), Failure> {
        let hide = self.sqs.change_message_visibility().queue_url(&self.queue).receipt_handle(handle);
        hide.visibility_timeout(seconds(time)).send().await?;
        Ok(())
    }

    /// Moves the message to the dead-letter queue.
    async fn set_aside(&self, message: &Message) -> Result<(), Failure> {
        let body = message.body.clone();
        self.sqs.send_message().queue_url(&self.dead_letters).set_message_body(body).send().await?;
        let handle = message.receipt_handle.clone();
        self.sqs.delete_message().queue_url(&self.queue).set_receipt_handle(handle).send().await?;
        Ok(())
    }
}

fn retention(time: Duration) -> (QueueAttributeName, String) {
    (QueueAttributeName::MessageRetentionPeriod, seconds(time).to_string())
}

/// Converts to whole seconds, rounded up, so that a pause is never zero.
fn seconds(time: Duration) -> i32 {
    i32::try_from(time.as_millis().div_ceil(1000)).unwrap_or(i32::MAX)
}

fn receive_count(message: &Message) -> u32 {
    let counted = message.attributes().and_then(|all| all.get(&MessageSystemAttributeName::ApproximateReceiveCount));
    counted.and_then(|count| count.parse().ok()).unwrap_or(1)
}

async fn publish(run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
    let app = App::new(run.clone()).await?;
    sqs::publish(&app.sqs, &app.queue, messages).await
}

/// Sends the message of a charged order through the dead-letter queue, as if the worker had failed to delete the
/// message, and an operator had redriven it.
async fn redrive(app: &App) -> Result<(), Failure> {
    let charged = Event::plain(1);
    let body = serde_json::to_string(&charged)?;
    let message = sqs::redriven(&app.sqs, &app.dead_letters, &app.queue, &body).await?;
    app.run.delivered(Some(&charged))?;
    let deliveries = [Delivery { event: charged, message }];
    let batch = handle(app, &deliveries).await;
    if !batch.item_failures().batch_item_failures.is_empty() || !batch.items()[0].outcome.replayed() {
        return Err("the message that was redriven is not a replay".into());
    }
    settle(app, batch).await
}

async fn clean_up(run: &Run) -> Result<(), Failure> {
    let app = App::new(run.clone()).await?;
    let redriven = redrive(&app).await;
    for queue in [&app.queue, &app.dead_letters] {
        app.sqs.delete_queue().queue_url(queue).send().await?;
    }
    redriven
}

fn main() -> ExitCode {
    fleet::main("sqs", "http://127.0.0.1:4566", &publish, &work, &clean_up)
}
