//! Shows a consumer of Redis Streams that uses `#[idempotent]`, and survives the kill of its process and of its Redis.
//!
//! `cargo run --example redis_streams --features redis` publishes orders with duplicates and charges each exactly once,
//! with one Redis as broker and as store. `-- --url redis://host` uses another Redis than the local one, and `--
//! --outages` starts a Redis for this run and kills it.
//!
//! - *Key*: the order, from the payload. The id of an entry changes when the producer adds it again.
//! - *Slow handlers*: any consumer takes a message that has been idle for `BROKER_TIMEOUT`. The beat claims the message
//!   again for its own consumer, with `JUSTID`, which resets the idle time and counts no delivery.
//! - *Retry*: the message stays pending, and `XAUTOCLAIM` finds it when it has been idle for long enough. Each call
//!   examines only a few pending messages, so the next call continues at the cursor that the last call returned.
//! - *Poison*: Redis has no limit of deliveries, so the consumer has one. The consumer copies the message to a stream
//!   of its own, with the reasons as fields, then acknowledges the message.
//! - *Trimming*: other groups may not have read an entry that this group acknowledges, so the consumer deletes no
//!   entry. The producer trims the stream (`XADD … MINID ~ …`), or, from Redis 8.2 on, the consumer uses `XACKDEL …
//!   ACKED`.

use std::process::ExitCode;
use std::time::Duration;

use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Receipt, Run};
use idem_examples::redis_streams::{GROUP, connect, dead_letters, stream};
use idem_runtime::brokers::{DeadLetter, HandlerSlot, Intake};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, RedisStore, current, idempotent, observe};
use redis::aio::ConnectionManager;
use redis::streams::{
    StreamAutoClaimOptions, StreamAutoClaimReply, StreamId, StreamPendingCountReply, StreamReadOptions,
};
use redis::{AsyncTypedCommands as _, RedisResult};

const HANDLERS: usize = 8;
/// Number of deliveries after which a message is set aside.
const DELIVERY_LIMIT: u32 = 8;
/// Number of calls of `XAUTOCLAIM` in a row that may find no message. Each call examines ten pending messages.
const LOOKS: usize = 100;
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
async fn deliver(app: &App, message: &StreamId) -> Result<(), Failure> {
    let payload: Vec<u8> = message.get("event").unwrap_or_default();
    let event = match Event::read(&payload) {
        Ok(event) => event,
        Err(error) => {
            app.run.delivered(None)?;
            return app.set_aside(message, None, app.intake.unreadable(&error)).await;
        }
    };
    app.run.delivered(Some(&event))?;
    let delivery = app.deliveries(&message.id).await?;
    if let Some(letter) = app.intake.beyond_limit(delivery, DELIVERY_LIMIT) {
        return app.set_aside(message, Some(&event), letter).await;
    }
    let (extend, id) = (app.clone(), message.id.clone());
    let (result, outcome) = observe(charge(app, &event))
        .delivery(delivery)
        .delivery_limit(DELIVERY_LIMIT)
        .on_beat(BROKER_TIMEOUT / 3, move |_| {
            let (extend, id) = (extend.clone(), id.clone());
            async move { extend.claim(&id, None).await }
        })
        .catch_panics()
        .await;
    match outcome.disposition() {
        Disposition::Ack => {
            app.run.acknowledged(&event, &outcome)?;
            // If this acknowledgement fails, the next delivery gets the recorded result.
            app.ack(&message.id).await?;
        }
        // An outage of the store says nothing about the message, so this delivery is not counted.
        Disposition::Retry { .. } if outcome.store_failed() => app.claim(&message.id, Some(delivery - 1)).await?,
        Disposition::Retry { .. } => {}
        Disposition::DeadLetter => {
            app.set_aside(message, Some(&event), app.intake.dead_letter(&result, &outcome)).await?;
        }
    }
    Ok(())
}

async fn handle(app: App, message: StreamId, slot: HandlerSlot) {
    if let Err(error) = deliver(&app, &message).await {
        eprintln!("entry {} could not be settled, and is claimed again: {error}", message.id);
    }
    drop(slot);
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    let store = RedisStore::options().namespace(format!("{}:idem:", run.name)).connect(&run.url).await?;
    let intake = Intake::new(&store, HANDLERS);
    fleet::stop_at_sigterm(&intake)?;
    let consumer = format!("worker-{}", std::process::id());
    // A blocking read needs its own connection. Both connections are made again whenever they are lost.
    let mut source = Source { redis: connect(&run.url)?, cursor: START.to_owned(), claims: false };
    let app = App { redis: connect(&run.url)?, store, consumer, intake, run };
    // A message is read only when it can run, because nothing extends a message that waits for a slot.
    while let Some(slot) = app.intake.slot().await {
        // The read is never cancelled: a message of a cancelled read would be idle until another consumer claims it.
        match source.next(&app).await {
            Ok(Some(message)) => drop(tokio::spawn(handle(app.clone(), message, slot))),
            Ok(None) => {}
            Err(error) => _ = app.intake.broker_failed(&error).await,
        }
    }
    app.intake.drain().await;
    Ok(())
}

/// Cursor of `XAUTOCLAIM` at the oldest pending message.
const START: &str = "0-0";

/// The messages of the stream, as a consumer of the group gets them.
struct Source {
    redis: ConnectionManager,
    /// Place among the pending messages at which the search for abandoned messages continues.
    cursor: String,
    /// True if the last call of `next` looked for an abandoned message first.
    claims: bool,
}

impl Source {
    /// Returns the next message. Abandoned and new messages take turns, so that neither kind waits behind the other.
    async fn next(&mut self, app: &App) -> RedisResult<Option<StreamId>> {
        self.claims = !self.claims;
        if self.claims
            && let Some(abandoned) = self.abandoned(app).await?
        {
            return Ok(Some(abandoned));
        }
        let new = StreamReadOptions::default().group(GROUP, &app.consumer).count(1).block(50);
        let read = self.redis.xread_options(&[&stream(&app.run)], &[">"], &new).await?;
        Ok(read.into_iter().flat_map(|read| read.keys).flat_map(|key| key.ids).next())
    }

    /// Returns a message whose consumer did not settle it in time.
    async fn abandoned(&mut self, app: &App) -> RedisResult<Option<StreamId>> {
        let (stream, idle) = (stream(&app.run), BROKER_TIMEOUT.as_millis().to_string());
        for _ in 0..LOOKS {
            let one = StreamAutoClaimOptions::default().count(1);
            let claimed =
                self.redis.xautoclaim_options(&stream, GROUP, &app.consumer, &idle, &self.cursor, one).await?;
            let StreamAutoClaimReply { next_stream_id, claimed, .. } = claimed;
            self.cursor = next_stream_id;
            if !claimed.is_empty() || self.cursor == START {
                return Ok(claimed.into_iter().next());
            }
        }
        Ok(None)
    }
}

#[derive(Clone)]
struct App {
    run: Run,
    store: RedisStore,
    redis: ConnectionManager,
    consumer: String,
    intake: Intake,
}

impl App {
    /// Returns the number of deliveries of the message.
    async fn deliveries(&self, id: &str) -> RedisResult<u32> {
        let pending: StreamPendingCountReply =
            self.redis.clone().xpending_count(stream(&self.run), GROUP, id, id, 1).await?;
        Ok(pending.ids.first().map_or(1, |pending| u32::try_from(pending.times_delivered).unwrap_or(u32::MAX)))
    }

    /// Resets the idle time of the message, so that it stays with this consumer. Sets the number of its deliveries, if
    /// given.
    async fn claim(&self, id: &str, deliveries: Option<u32>) -> RedisResult<()> {
        let mut claim = redis::cmd("XCLAIM");
        claim.arg(stream(&self.run)).arg(GROUP).arg(&self.consumer).arg(0).arg(id);
        if let Some(deliveries) = deliveries {
            claim.arg("RETRYCOUNT").arg(deliveries);
        }
        claim.arg("JUSTID").exec_async(&mut self.redis.clone()).await
    }

    async fn ack(&self, id: &str) -> RedisResult<()> {
        self.redis.clone().xack(stream(&self.run), GROUP, &[id]).await.map(drop)
    }

    /// Moves the message to another stream, with the reasons of `letter`. A crash in between loses no message.
    async fn set_aside(&self, message: &StreamId, event: Option<&Event>, letter: DeadLetter) -> Result<(), Failure> {
        eprintln!("entry {} is set aside: {letter}", message.id);
        self.run.set_aside(event)?;
        let payload: Vec<u8> = message.get("event").unwrap_or_default();
        let mut fields: Vec<_> = letter.headers().map(|(name, text)| (name, text.as_bytes())).collect();
        fields.push(("event", &payload));
        self.redis.clone().xadd(dead_letters(&self.run), "*", &fields).await?;
        Ok(self.ack(&message.id).await?)
    }
}

fn main() -> ExitCode {
    fleet::main(&idem_examples::redis_streams::Broker, &work)
}
