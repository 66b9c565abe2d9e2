//! Shows a consumer of NATS JetStream that uses `#[idempotent]`, and survives the kill of its process, of its broker,
//! and an outage of its store.
//!
//! `cargo run --example nats_jetstream --features nats` publishes orders with duplicates and charges each exactly once.
//! Records are in a SQLite file. `-- --url nats://host` uses another server than the local `nats-server -js`, and `--
//! --outages` starts a server for this run and kills it.
//!
//! - *Key*: the order, from the payload. The sequence of a message changes with its stream, and a `Nats-Msg-Id` is
//!   recognised for two minutes only.
//! - *Slow handlers*: after `ack_wait` the server delivers the message again. The beat sends `Progress`, with an acker
//!   that outlives the message.
//! - *Retry*: `Nak` with a delay. The server counts each delivery, even one that failed because the store was away.
//! - *Poison*: after `max_deliver` the server would forget the message without a trace, so the consumer has no
//!   `max_deliver`. On its last delivery the worker copies the message to a stream of its own, with the reasons as
//!   headers, then sends `Term`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::{PullConsumer, pull};
use async_nats::jetstream::{self, AckKind, Message, stream};
use futures::StreamExt as _;
use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Receipt, Run};
use idem_runtime::brokers::Redelivery;
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, SqliteStore, StoreExt as _, current, idempotent, observe};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const DAY: Duration = Duration::from_secs(86_400);
/// Time for which the stream keeps a message.
const MAX_AGE: Duration = DAY.saturating_mul(3);
const MAX_DELIVER: u32 = 20;
const HANDLERS: usize = 8;
const PAYMENTS: Policy = Policy::new(DAY.saturating_mul(7))
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
async fn deliver(app: App, message: Message) -> Result<(), Failure> {
    let info = message.info()?;
    let (sequence, delivered) = (info.stream_sequence, u32::try_from(info.delivered)?);
    let (message, acker) = message.split();
    let acker = Arc::new(acker);
    // The copy is published before `Term`, so that a crash in between loses no message.
    let set_aside = async |event: Option<&Event>| {
        app.run.set_aside(event)?;
        app.jetstream.publish(format!("{}.dead", app.run.name), message.payload.clone()).await?.await?;
        acker.ack_with(AckKind::Term).await
    };
    let event = match Event::read(&message.payload) {
        Ok(event) => event,
        Err(error) => {
            eprintln!("message {sequence} can't be read, and is set aside: {error}");
            app.run.delivered(None)?;
            return set_aside(None).await;
        }
    };
    app.run.delivered(Some(&event))?;
    let extend = Arc::clone(&acker);
    let (result, outcome) = observe(charge(&app, &event))
        .delivery(delivered)
        .delivery_limit(MAX_DELIVER)
        .on_beat(BROKER_TIMEOUT / 3, move |_| {
            let extend = Arc::clone(&extend);
            async move { extend.ack_with(AckKind::Progress).await }
        })
        .catch_panics()
        .await;
    match outcome.disposition() {
        Disposition::Ack => {
            app.run.acknowledged(&event, &outcome)?;
            // The server confirms this acknowledgement. If the acknowledgement fails, the next delivery gets the
            // recorded result.
            acker.double_ack().await
        }
        Disposition::Retry { after } => acker.ack_with(AckKind::Nak(Some(after))).await,
        Disposition::DeadLetter => {
            eprintln!("message {sequence} is set aside: {}", fleet::reason(result));
            set_aside(Some(&event)).await
        }
    }
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    let mut shutdown = run.shutdown()?;
    PAYMENTS.check_redelivery(&Redelivery::jetstream(MAX_AGE))?;
    let jetstream = jetstream::new(async_nats::connect(&run.url).await?);
    let consumer = consumer(&jetstream, &run).await?;
    let app = App { store: run.store().await?, jetstream, run };
    let (mut handlers, slots) = (JoinSet::new(), Arc::new(Semaphore::new(HANDLERS)));
    loop {
        // A message is fetched only when it can run, because nothing extends a message that waits for a slot.
        let slot = tokio::select! {
            slot = Arc::clone(&slots).acquire_owned() => slot?,
            () = &mut shutdown => break,
        };
        let mut one = consumer.batch().max_messages(1).expires(Duration::from_millis(200)).messages().await?;
        if let Some(message) = one.next().await {
            let (app, message) = (app.clone(), message?);
            handlers.spawn(async move {
                let _slot = slot;
                deliver(app, message).await
            });
        }
        while let Some(ended) = handlers.try_join_next() {
            ended??;
        }
    }
    // Running handlers finish.
    while let Some(ended) = handlers.join_next().await {
        ended??;
    }
    app.store.flush().await;
    Ok(())
}

#[derive(Clone)]
struct App {
    run: Run,
    store: SqliteStore,
    jetstream: jetstream::Context,
}

async fn consumer(jetstream: &jetstream::Context, run: &Run) -> Result<PullConsumer, Failure> {
    let settings = stream::Config {
        name: run.name.clone(),
        subjects: vec![format!("{}.orders", run.name)],
        max_age: MAX_AGE,
        ..Default::default()
    };
    let stream = jetstream.get_or_create_stream(settings).await?;
    let settings = pull::Config {
        durable_name: Some("payments".to_owned()),
        ack_wait: BROKER_TIMEOUT,
        max_deliver: MAX_DELIVER.into(),
        ..Default::default()
    };
    Ok(stream.get_or_create_consumer("payments", settings).await?)
}

async fn publish(run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
    let jetstream = jetstream::new(async_nats::connect(&run.url).await?);
    consumer(&jetstream, run).await?;
    let (name, subject) = (format!("{}-dead", run.name), format!("{}.dead", run.name));
    jetstream.get_or_create_stream(stream::Config { name, subjects: vec![subject], ..Default::default() }).await?;
    for message in messages {
        jetstream.publish(format!("{}.orders", run.name), message.clone().into()).await?.await?;
    }
    Ok(())
}

async fn clean_up(run: &Run) -> Result<(), Failure> {
    let jetstream = jetstream::new(async_nats::connect(&run.url).await?);
    jetstream.delete_stream(&run.name).await?;
    jetstream.delete_stream(format!("{}-dead", run.name)).await?;
    Ok(())
}

fn main() -> ExitCode {
    fleet::main("nats_jetstream", "nats://127.0.0.1:4222", &publish, &work, &clean_up)
}
