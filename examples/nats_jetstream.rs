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

use async_nats::jetstream::context::Context;
use async_nats::jetstream::{self, AckKind, Message};
use async_nats::{ConnectOptions, HeaderMap};
use futures::StreamExt as _;
use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Receipt, Run};
use idem_examples::nats::{MAX_AGE, consumer};
use idem_runtime::brokers::{DeadLetter, HandlerSlot, Intake, Redelivery};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, SqliteStore, current, idempotent, observe};

const HANDLERS: usize = 8;
/// Number of deliveries after which a message is set aside.
const DELIVERY_LIMIT: u32 = 8;
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
async fn deliver(app: &App, message: Message) -> Result<(), Failure> {
    let info = message.info()?;
    let (sequence, delivered) = (info.stream_sequence, u32::try_from(info.delivered)?);
    let (message, acker) = message.split();
    let acker = Arc::new(acker);
    // The copy is published before `Term`, so that a crash in between loses no message.
    let set_aside = async |event: Option<&Event>, letter: DeadLetter| {
        eprintln!("message {sequence} is set aside: {letter}");
        app.run.set_aside(event)?;
        let mut headers = HeaderMap::new();
        letter.headers().for_each(|(name, text)| headers.insert(name, text));
        let (subject, payload) = (format!("{}.dead", app.run.name), message.payload.clone());
        app.jetstream.publish_with_headers(subject, headers, payload).await?.await?;
        acker.ack_with(AckKind::Term).await
    };
    let event = match Event::read(&message.payload) {
        Ok(event) => event,
        Err(error) => {
            app.run.delivered(None)?;
            return set_aside(None, app.intake.unreadable(&error)).await;
        }
    };
    app.run.delivered(Some(&event))?;
    if let Some(letter) = app.intake.beyond_limit(delivered, DELIVERY_LIMIT) {
        return set_aside(Some(&event), letter).await;
    }
    let extend = Arc::clone(&acker);
    let (result, outcome) = observe(charge(app, &event))
        .delivery(delivered)
        .delivery_limit(DELIVERY_LIMIT)
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
        Disposition::DeadLetter => set_aside(Some(&event), app.intake.dead_letter(&result, &outcome)).await,
    }
}

async fn handle(app: App, message: Message, slot: HandlerSlot) {
    if let Err(error) = deliver(&app, message).await {
        eprintln!("a message could not be settled, and is delivered again after `ack_wait`: {error}");
    }
    drop(slot);
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    PAYMENTS.check_redelivery(&Redelivery::jetstream(MAX_AGE))?;
    let store = run.store().await?;
    let intake = Intake::new(&store, HANDLERS);
    fleet::stop_at_sigterm(&intake)?;
    // The client connects again whenever its connection is lost, and for as long as that takes.
    let nats = ConnectOptions::new().retry_on_initial_connect().connect(&run.url).await?;
    let app = App { jetstream: jetstream::new(nats), intake, store, run };
    while let Err(error) = consume(&app).await
        && app.intake.broker_failed(&error).await
    {}
    app.intake.drain().await;
    Ok(())
}

/// Consumes until the server does not answer or the worker is stopped.
async fn consume(app: &App) -> Result<(), Failure> {
    let consumer = consumer(&app.jetstream, &app.run).await?;
    // A message is fetched only when it can run, because nothing extends a message that waits for a slot.
    while let Some(slot) = app.intake.slot().await {
        let mut one = consumer.batch().max_messages(1).expires(Duration::from_millis(200)).messages().await?;
        if let Some(message) = one.next().await {
            tokio::spawn(handle(app.clone(), message?, slot));
        }
    }
    Ok(())
}

#[derive(Clone)]
struct App {
    run: Run,
    store: SqliteStore,
    jetstream: Context,
    intake: Intake,
}

fn main() -> ExitCode {
    fleet::main(&idem_examples::nats::Broker, &work)
}
