//! How does a consumer of Redis Streams use `#[idempotent]`, and what happens when its process is killed?
//!
//! `cargo run --example redis_streams --features redis` does the work of `quickstart` with a Redis as broker and as store,
//! and with worker processes that are killed in the middle of handlers. `-- --url redis://host` uses another server than
//! `$REDIS_URL` or the local one; `-- --help` lists all options.
#![allow(clippy::disallowed_methods, reason = "a payment provider takes its time")]

use std::error::Error;
use std::io::{self, BufRead as _, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;
use std::{env, thread};

use idem_examples::{
    Charges, Count, Counts, Event, Keeps, Mishap, PaymentError, Receipt, VISIBILITY_TIMEOUT, counts, deliveries,
    explain,
};
use idem_runtime::{Disposition, RedisStore, Store as _, current, idempotent, observe};
use redis::aio::MultiplexedConnection;
use redis::streams::{StreamAutoClaimOptions, StreamAutoClaimReply, StreamId, StreamReadOptions};
use redis::{AsyncConnectionConfig, AsyncTypedCommands as _, RedisResult};
use tokio::time::sleep;

const WORKERS: usize = 4;
const HANDLERS_PER_WORKER: usize = 8;
const GROUP: &str = "payments";

type Failure = Box<dyn Error>;

/// The handler: it runs once for each order, and every duplicate gets the receipt of that run.
///
/// A worker can die between the charge and its record. The body then runs again, so it passes the payment provider a key
/// that is the same on every attempt.
#[idempotent(
    key = "order:{event.order.order_id}",
    ttl = "7d",
    store = app.store,
    lease = "500ms",
    in_progress = wait("250ms"),
    fingerprint = event.order
)]
async fn charge_customer(app: &App, event: &Event) -> Result<Receipt, PaymentError> {
    let payment_key = current()?.child_key("charge");
    app.charge(event, payment_key).await
}

/// The consumer: the outcome of the call decides what happens to the message.
async fn consume(app: Arc<App>, mut stream: Stream) -> RedisResult<()> {
    while let Some(message) = stream.receive().await? {
        app.run.count(Count::Delivery).await?;
        let (result, outcome) = observe(charge_customer(&app, &message.event)).await;
        for count in counts(&outcome) {
            app.run.count(count).await?;
        }
        match outcome.disposition() {
            Disposition::Ack => stream.ack(&message).await?,
            // A message that is not acknowledged stays pending, and `XAUTOCLAIM` delivers it again.
            Disposition::Retry { .. } => {}
            Disposition::DeadLetter => {
                if let Err(error) = result {
                    eprintln!("line {}: set aside: {error}", message.event.line);
                }
                stream.ack(&message).await?;
            }
        }
    }
    Ok(())
}

/// The same without the attribute.
async fn consume_without_idempotency(app: Arc<App>, mut stream: Stream) -> RedisResult<()> {
    while let Some(message) = stream.receive().await? {
        app.run.count(Count::Delivery).await?;
        match app.charge(&message.event, app.run.invented_key().await?).await {
            Ok(_) => stream.ack(&message).await?,
            Err(_) => app.run.count(Count::Failure).await?,
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    // This program starts itself again for each worker.
    if let Ok(prefix) = env::var(PREFIX) {
        let url = env::var("REDIS_URL").unwrap_or_default();
        let idempotent = env::args().all(|arg| arg != WITHOUT);
        return match block_on(work(&url, prefix, idempotent)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("worker: {}", explain(&*error));
                ExitCode::FAILURE
            }
        };
    }
    idem_examples::main("redis_streams", Keeps::OnServer, |arguments, events| {
        let url = arguments.url.clone().or_else(|| env::var("REDIS_URL").ok());
        let url = url.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
        block_on(deliver(&url, arguments.idempotent, events))
    })
}

fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future)
}

/// Publishes the events, lets workers charge them, and reads the books of the payment provider.
async fn deliver(url: &str, idempotent: bool, events: &[Event]) -> Result<(Counts, Charges), Failure> {
    // Fails here, with a clear message, if the server is too old or can't be reached.
    RedisStore::connect(url).await?;
    let mut redis = connect(url).await?;
    let (seconds, micros): (u64, u64) = redis::cmd("TIME").query_async(&mut redis).await?;
    let mut run = Run { redis, prefix: format!("idem-example:{seconds}.{micros:06}:") };
    let delivered = run.publish_and_work(url, idempotent, events).await;
    let cleaned_up = run.clean_up().await;
    let delivered = delivered?;
    cleaned_up?;
    Ok(delivered)
}

/// Waits until a worker process has ended. False if it was killed.
fn supervise(url: &str, prefix: &str, idempotent: bool) -> io::Result<bool> {
    let mut command = Command::new(env::current_exe()?);
    command.env(PREFIX, prefix).env("REDIS_URL", url).stdin(Stdio::null()).stdout(Stdio::piped());
    if !idempotent {
        command.arg(WITHOUT);
    }
    let mut worker = command.spawn()?;
    let said = worker.stdout.take().map(BufReader::new);
    if said.is_some_and(|said| said.lines().map_while(Result::ok).any(|line| line == IN_THE_MIDDLE)) {
        worker.kill()?;
        worker.wait()?;
        return Ok(false);
    }
    let status = worker.wait()?;
    if status.success() { Ok(true) } else { Err(io::Error::other(format!("a worker failed: {status}"))) }
}

/// The environment variable that makes this program a worker.
const PREFIX: &str = "IDEM_EXAMPLE_PREFIX";
const WITHOUT: &str = "--without-idempotency";
/// A worker's message that it is a good time to kill it.
const IN_THE_MIDDLE: &str = "in the middle of a charge";

/// A worker process.
async fn work(url: &str, prefix: String, idempotent: bool) -> Result<(), Failure> {
    let store = RedisStore::options().namespace(format!("{prefix}idem:")).connect(url).await?;
    let app = Arc::new(App { store, run: Run { redis: connect(url).await?, prefix } });
    let mut consumers = Vec::new();
    for number in 0..HANDLERS_PER_WORKER {
        // A read that blocks needs a connection of its own.
        let stream = Stream {
            redis: connect(url).await?,
            name: app.run.key("orders"),
            consumer: format!("{}-{number}", std::process::id()),
            cursor: "0-0".to_owned(),
        };
        let app = Arc::clone(&app);
        consumers.push(if idempotent {
            tokio::spawn(consume(app, stream))
        } else {
            tokio::spawn(consume_without_idempotency(app, stream))
        });
    }
    for consumer in consumers {
        consumer.await??;
    }
    // On a shutdown, waits for the late writes of cancelled handlers.
    app.store.heartbeats().flush().await;
    Ok(())
}

async fn connect(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(5)));
    redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}

/// A consumer group's view of a stream.
struct Stream {
    redis: MultiplexedConnection,
    name: String,
    consumer: String,
    /// The position of the search for abandoned messages.
    cursor: String,
}

struct Message {
    id: String,
    event: Event,
}

impl Stream {
    /// The next message: one that was not acknowledged in time, or a new one. `None` once all are acknowledged.
    async fn receive(&mut self) -> RedisResult<Option<Message>> {
        let new = StreamReadOptions::default().group(GROUP, &self.consumer).count(1).block(50);
        loop {
            let (idle, one) = (VISIBILITY_TIMEOUT.as_millis().to_string(), StreamAutoClaimOptions::default().count(1));
            let abandoned = self.redis.xautoclaim_options(&self.name, GROUP, &self.consumer, idle, &self.cursor, one);
            let StreamAutoClaimReply { next_stream_id, claimed, .. } = abandoned.await?;
            self.cursor = next_stream_id;
            if let Some(entry) = claimed.into_iter().next() {
                return message(&entry).map(Some);
            }
            let read = self.redis.xread_options(&[&self.name], &[">"], &new).await?;
            if let Some(entry) = read.into_iter().flat_map(|read| read.keys).flat_map(|key| key.ids).next() {
                return message(&entry).map(Some);
            }
            if self.redis.xlen(&self.name).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// The message has been handled.
    async fn ack(&mut self, message: &Message) -> RedisResult<()> {
        let mut ack = redis::pipe();
        ack.atomic().xack(&self.name, GROUP, &[&message.id]).ignore().xdel(&self.name, &[&message.id]).ignore();
        ack.query_async(&mut self.redis).await
    }
}

fn message(entry: &StreamId) -> RedisResult<Message> {
    let event: String = entry.get("event").unwrap_or_default();
    let event = serde_json::from_str(&event).map_err(io::Error::from)?;
    Ok(Message { id: entry.id.clone(), event })
}

/// What a worker has.
struct App {
    store: RedisStore,
    run: Run,
}

impl App {
    /// Asks the payment provider to charge a customer.
    async fn charge(&self, event: &Event, payment_key: String) -> Result<Receipt, PaymentError> {
        // The provider keeps its books in Redis as well.
        let is_first = self.run.is_first(event).await.map_err(|_| PaymentError::Unreachable)?;
        let mishap = Mishap::of(event, is_first);
        sleep(Duration::from_millis(if mishap == Mishap::Slow { 700 } else { 2 })).await;
        if mishap == Mishap::Unreachable {
            return Err(PaymentError::Unreachable);
        }
        let mut redis = self.run.redis.clone();
        let charged = redis.hset_nx(self.run.key("charges"), &payment_key, event.order.to_string()).await;
        if !charged.map_err(|_| PaymentError::AnswerLost)? {
            self.run.count(Count::RepeatedCharge).await.map_err(|_| PaymentError::AnswerLost)?;
        }
        match mishap {
            Mishap::AnswerLost => Err(PaymentError::AnswerLost),
            Mishap::WorkerDies => {
                println!("{IN_THE_MIDDLE}");
                std::future::pending().await
            }
            _ => Ok(Receipt { payment: payment_key, amount_cents: event.order.amount_cents }),
        }
    }
}

/// Shared by all processes: the stream, and the books of the payment provider.
struct Run {
    redis: MultiplexedConnection,
    prefix: String,
}

impl Run {
    async fn publish_and_work(
        &mut self,
        url: &str,
        idempotent: bool,
        events: &[Event],
    ) -> Result<(Counts, Charges), Failure> {
        let stream = self.key("orders");
        self.redis.xgroup_create_mkstream(&stream, GROUP, "0").await?;
        let messages: Vec<_> = deliveries(events).collect();
        for batch in messages.chunks(500) {
            let mut publish = redis::pipe();
            for event in batch {
                publish.xadd(&stream, "*", &[("event", serde_json::to_string(event)?)]).ignore();
            }
            publish.query_async::<()>(&mut self.redis).await?;
        }
        let died = thread::scope(|scope| {
            let supervisor = || {
                let mut died = 0;
                while !supervise(url, &self.prefix, idempotent)? {
                    died += 1;
                }
                Ok::<_, io::Error>(died)
            };
            let supervisors: Vec<_> = (0..WORKERS).map(|_| scope.spawn(supervisor)).collect();
            supervisors.into_iter().map(|it| it.join().expect("a supervisor does not panic")).sum::<Result<u64, _>>()
        })?;
        let mut counts = Counts::default();
        counts.add(Count::WorkerDied, died);
        let counted = self.redis.hgetall(self.key("counts")).await?;
        for count in Count::ALL {
            counts.add(count, counted.get(count.name()).map_or(Ok(0), |times| times.parse())?);
        }
        let mut charges = Charges::default();
        for (payment_key, order) in self.redis.hgetall(self.key("charges")).await? {
            charges.charge(payment_key, &serde_json::from_str(&order)?);
        }
        Ok((counts, charges))
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Counted at once: a worker that is killed loses what it has not counted yet.
    async fn count(&self, count: Count) -> RedisResult<()> {
        self.redis.clone().hincr(self.key("counts"), count.name(), 1).await.map(drop)
    }

    /// Whether this is the first call for the event.
    async fn is_first(&self, event: &Event) -> RedisResult<bool> {
        self.count(Count::BodyRun).await?;
        self.redis.clone().hset_nx(self.key("asked"), event.index, true).await
    }

    /// Without an idempotency key, every call is a separate charge.
    async fn invented_key(&self) -> RedisResult<String> {
        let call = self.redis.clone().incr(self.key("invented"), 1).await?;
        Ok(format!("call {call}"))
    }

    /// Removes every key of this run.
    async fn clean_up(&mut self) -> RedisResult<()> {
        let mut keys = Vec::new();
        let mut found = self.redis.scan_match::<_, String>(self.key("*")).await?;
        while let Some(key) = found.next_item().await {
            keys.push(key?);
        }
        drop(found);
        for batch in keys.chunks(500) {
            self.redis.unlink(batch).await?;
        }
        Ok(())
    }
}
