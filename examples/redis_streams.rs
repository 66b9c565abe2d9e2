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
use std::sync::Arc;
use std::time::Duration;

use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Receipt, Run};
use idem_runtime::policy::Backoff;
use idem_runtime::{Disposition, Policy, RedisStore, StoreExt as _, current, idempotent, observe};
use redis::aio::MultiplexedConnection;
use redis::streams::{
    StreamAutoClaimOptions, StreamAutoClaimReply, StreamId, StreamPendingCountReply, StreamReadOptions,
};
use redis::{AsyncConnectionConfig, AsyncTypedCommands as _, RedisResult};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const GROUP: &str = "payments";
const HANDLERS: usize = 8;
/// Number of deliveries after which the example sets a message aside: Redis itself has no limit.
const DELIVERY_LIMIT: u32 = 20;
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
async fn deliver(app: App, message: StreamId) -> Result<(), Failure> {
    let payload: Vec<u8> = message.get("event").unwrap_or_default();
    let event = match Event::read(&payload) {
        Ok(event) => event,
        Err(error) => {
            eprintln!("entry {} can't be read, and is set aside: {error}", message.id);
            app.run.delivered(None)?;
            app.run.set_aside(None)?;
            return app.set_aside(&message).await;
        }
    };
    app.run.delivered(Some(&event))?;
    let (extend, id) = (app.clone(), message.id.clone());
    let (result, outcome) = observe(charge(&app, &event))
        .delivery(app.deliveries(&message.id).await?)
        .delivery_limit(DELIVERY_LIMIT)
        .on_beat(BROKER_TIMEOUT / 3, move |_| {
            let (extend, id) = (extend.clone(), id.clone());
            async move { extend.extend(&id).await }
        })
        .catch_panics()
        .await;
    match outcome.disposition() {
        Disposition::Ack => {
            app.run.acknowledged(&event, &outcome)?;
            app.ack(&message.id).await?;
        }
            // If this acknowledgement fails, the next delivery gets the recorded result.
        Disposition::Retry { .. } => {}
        Disposition::DeadLetter => {
            eprintln!("entry {} is set aside: {}", message.id, fleet::reason(result));
            app.run.set_aside(Some(&event))?;
            app.set_aside(&message).await?;
        }
    }
    Ok(())
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    let mut shutdown = run.shutdown()?;
    let store = RedisStore::options().namespace(format!("{}:idem:", run.name)).connect(&run.url).await?;
    let consumer = format!("worker-{}", std::process::id());
    let app = App { redis: connect(&run.url).await?, store, consumer, run };
    // A blocking read needs its own connection.
    let mut reader = connect(&app.run.url).await?;
    let (mut handlers, slots) = (JoinSet::new(), Arc::new(Semaphore::new(HANDLERS)));
    loop {
        // A message is read only when it can run, because nothing extends a message that waits for a slot.
        let slot = tokio::select! {
            slot = Arc::clone(&slots).acquire_owned() => slot?,
            () = &mut shutdown => break,
        };
        // The read is never cancelled: a message of a cancelled read would be idle until another consumer claims it.
        if let Some(message) = app.receive(&mut reader).await? {
            let app = app.clone();
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
    store: RedisStore,
    redis: MultiplexedConnection,
    consumer: String,
}

impl App {
    /// Returns a message whose consumer did not settle it in time, or a new message.
    async fn receive(&self, reader: &mut MultiplexedConnection) -> RedisResult<Option<StreamId>> {
        let (stream, idle) = (stream(&self.run), BROKER_TIMEOUT.as_millis().to_string());
        let one = StreamAutoClaimOptions::default().count(1);
        let abandoned = reader.xautoclaim_options(&stream, GROUP, &self.consumer, idle, "0-0", one).await?;
        let StreamAutoClaimReply { claimed, .. } = abandoned;
        if let Some(message) = claimed.into_iter().next() {
            return Ok(Some(message));
        }
        let new = StreamReadOptions::default().group(GROUP, &self.consumer).count(1).block(50);
        let read = reader.xread_options(&[&stream], &[">"], &new).await?;
        Ok(read.into_iter().flat_map(|read| read.keys).flat_map(|key| key.ids).next())
    }

    /// Returns the number of deliveries of the message.
    async fn deliveries(&self, id: &str) -> RedisResult<u32> {
        let pending: StreamPendingCountReply =
            self.redis.clone().xpending_count(stream(&self.run), GROUP, id, id, 1).await?;
        Ok(pending.ids.first().map_or(1, |pending| u32::try_from(pending.times_delivered).unwrap_or(u32::MAX)))
    }

    /// Keeps the message from other consumers while its handler runs.
    async fn extend(&self, id: &str) -> RedisResult<()> {
        let mut claim = redis::cmd("XCLAIM");
        claim.arg(stream(&self.run)).arg(GROUP).arg(&self.consumer).arg(0).arg(id).arg("JUSTID");
        claim.exec_async(&mut self.redis.clone()).await
    }

    async fn ack(&self, id: &str) -> RedisResult<()> {
        let (stream, mut ack) = (stream(&self.run), redis::pipe());
        ack.atomic().xack(&stream, GROUP, &[id]).ignore().xdel(&stream, &[id]).ignore();
        ack.exec_async(&mut self.redis.clone()).await
    }

    /// Moves the message to another stream.
    async fn set_aside(&self, message: &StreamId) -> Result<(), Failure> {
        let payload: Vec<u8> = message.get("event").unwrap_or_default();
        self.redis.clone().xadd(format!("{}:dead", self.run.name), "*", &[("event", payload)]).await?;
        Ok(self.ack(&message.id).await?)
    }
}

fn stream(run: &Run) -> String {
    format!("{}:orders", run.name)
}

async fn connect(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(5)));
    redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}

async fn publish(run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
    let mut redis = connect(&run.url).await?;
    let made: RedisResult<()> = redis.xgroup_create_mkstream(stream(run), GROUP, "0").await.map(drop);
    if let Err(error) = made
        && error.code() != Some("BUSYGROUP")
    {
        return Err(error.into());
    }
    for message in messages {
        redis.xadd(stream(run), "*", &[("event", message)]).await?;
    }
    Ok(())
}

async fn clean_up(run: &Run) -> Result<(), Failure> {
    let mut redis = connect(&run.url).await?;
    let mut keys = Vec::new();
    let mut found = redis.scan_match::<_, String>(format!("{}:*", run.name)).await?;
    while let Some(key) = found.next_item().await {
        keys.push(key?);
    }
    drop(found);
    Ok(redis.unlink(keys).await.map(drop)?)
}

fn main() -> ExitCode {
    fleet::main("redis_streams", "redis://127.0.0.1:6379", &publish, &work, &clean_up)
}
