//! Measures the whole loop of a consumer with `#[idempotent]`, including the work of the broker, compared with the same
//! loop without the attribute. The limit is the loop with records by hand: a reservation and a completion by the client
//! that is the limit of the bench `redis`.
//!
//! A round publishes messages, which is not measured, and then consumes and acknowledges all of them. Records are in a
//! separate Redis. There are two handlers: one does nothing, so its lines show every cost of the library; the other
//! writes its effect to a Redis with one `SET`, which is less than most handlers do. Brokers store nothing on disk,
//! which makes the comparison strict: the quicker the broker, the larger the library's share of the time. Brokers,
//! Redis and consumer share one machine.
//!
//! The bench also measures the broker's beats while 10 000 messages are in flight: processor time of the process per
//! callback, in a consumer that does nothing else.

#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_nats::jetstream::{self, consumer::pull, stream};
use futures::{Stream, StreamExt as _, stream as futures_stream};
use idem_benches::by_hand::pipelined::Pipelined;
use idem_benches::{Goal, Receipt, Sides, Table, alternate, is_wanted, paced, sized, thousands_per_second};
use idem_runtime::{Error, MemoryStore, Policy, RedisStore, idempotent, observe};
use idem_tests::server::{Kind, RedisServer, free_port};
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueuePurgeOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, ConnectionProperties};
use redis::AsyncCommands as _;
use redis::aio::MultiplexedConnection;
use redis::streams::{StreamReadOptions, StreamReadReply};
use rustix::time::{ClockId, clock_gettime};

const NAME: &str = "idem-bench";

/// Dependencies of the handler.
#[derive(Clone)]
struct App {
    store: RedisStore,
    /// Redis that the handler writes to; `None` if the handler has no effect.
    effects: Option<MultiplexedConnection>,
    records: Records,
}

/// Records of a consumer.
#[derive(Clone)]
enum Records {
    None,
    ByHand(Pipelined),
    Idem,
}

impl App {
    async fn effect(&self, order: u64) -> Receipt {
        if let Some(effects) = &self.effects {
            effects.clone().set::<_, _, ()>(format!("effect:{order}"), order).await.expect("writes");
        }
        Receipt::of(order)
    }

    /// Handles a message. Returns once the message can be acknowledged.
    async fn handle(&self, payload: &[u8]) {
        let order = serde_json::from_slice(payload).expect("a number");
        match &self.records {
            Records::None => drop(self.effect(order).await),
            // The effect comes before the reservation, because the handler by hand is no future; the cost is equal.
            Records::ByHand(records) => {
                let receipt = self.effect(order).await;
                drop(records.run(order, || receipt).await);
            }
            Records::Idem => drop(ship(self, order).await.expect("ships")),
        }
    }
}

#[idempotent(key = "order:{order}", ttl = "7d", store = app.store, scope = "bench::ship")]
async fn ship(app: &App, order: u64) -> Result<Receipt, Error> {
    Ok(app.effect(order).await)
}

/// Runs `handle` for each message, `in_flight` at a time, until `count` messages are done.
async fn consume<M, F: Future<Output = ()>>(
    messages: impl Stream<Item = M>,
    count: u64,
    in_flight: usize,
    handle: impl Fn(M) -> F,
) {
    let count = usize::try_from(count).expect("few");
    messages.take(count).for_each_concurrent(in_flight, handle).await;
}

/// Returns the payloads of `count` orders that no message has named yet.
fn payloads(count: u64) -> impl Iterator<Item = Vec<u8>> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    (first..first + count).map(|order| order.to_string().into_bytes())
}

/// Publishes `count` messages, and returns the time for consuming these messages.
trait Broker {
    async fn round(&self, app: &App, count: u64, in_flight: usize) -> Duration;
}

struct Streams {
    server: RedisServer,
}

impl Broker for Streams {
    async fn round(&self, app: &App, count: u64, in_flight: usize) -> Duration {
        let (mut reader, redis) = (self.server.raw().await, self.server.raw().await);
        reader.del::<_, ()>(NAME).await.expect("is there");
        reader.xgroup_create_mkstream::<_, _, _, ()>(NAME, "group", "0").await.expect("makes the group");
        let mut publish = redis::pipe();
        for payload in payloads(count) {
            publish.xadd(NAME, "*", &[("event", payload)]).ignore();
        }
        publish.exec_async(&mut reader).await.expect("publishes");
        let started = Instant::now();
        let messages = futures_stream::unfold(reader, |mut reader| async move {
            let options = StreamReadOptions::default().group("group", "worker").count(in_flight).block(5_000);
            let read: StreamReadReply = reader.xread_options(&[NAME], &[">"], &options).await.expect("reads");
            let read: Vec<_> = read.keys.into_iter().flat_map(|key| key.ids).collect();
            Some((futures_stream::iter(read), reader))
        });
        consume(messages.flatten(), count, in_flight, |message| {
            let mut redis = redis.clone();
            async move {
                app.handle(&message.get::<Vec<u8>>("event").expect("a payload")).await;
                redis.xack::<_, _, _, ()>(NAME, "group", &[message.id]).await.expect("acknowledges");
            }
        })
        .await;
        started.elapsed()
    }
}

struct JetStream {
    server: Server,
}

impl Broker for JetStream {
    async fn round(&self, app: &App, count: u64, in_flight: usize) -> Duration {
        let client = async_nats::connect(format!("nats://127.0.0.1:{}", self.server.port)).await.expect("connects");
        let jetstream = jetstream::new(client);
        let _ = jetstream.delete_stream(NAME).await;
        let (name, storage) = (NAME.to_owned(), stream::StorageType::Memory);
        let settings = stream::Config { name, storage, ..Default::default() };
        let stream = jetstream.create_stream(settings).await.expect("makes the stream");
        let settings = pull::Config { durable_name: Some("worker".to_owned()), ..Default::default() };
        let consumer = stream.create_consumer(settings).await.expect("makes the consumer");
        // The client allows only some thousand publications without a confirmation, so the bench publishes in portions.
        let payloads: Vec<_> = payloads(count).collect();
        for payloads in payloads.chunks(1_000) {
            let mut confirmed = Vec::new();
            for payload in payloads {
                confirmed.push(jetstream.publish(NAME, payload.clone().into()).await.expect("publishes"));
            }
            for confirmed in confirmed {
                confirmed.await.expect("is there");
            }
        }
        let started = Instant::now();
        let messages = consumer.stream().max_messages_per_batch(in_flight).messages().await.expect("consumes");
        consume(messages, count, in_flight, |message| async move {
            let message = message.expect("a message");
            app.handle(&message.payload).await;
            message.ack().await.expect("acknowledges");
        })
        .await;
        started.elapsed()
    }
}

struct RabbitMq {
    server: Server,
}

impl Broker for RabbitMq {
    async fn round(&self, app: &App, count: u64, in_flight: usize) -> Duration {
        let url = format!("amqp://guest:guest@127.0.0.1:{}", self.server.port);
        let connection = lapin::Connection::connect(&url, ConnectionProperties::default()).await.expect("connects");
        let channel = connection.create_channel().await.expect("makes a channel");
        let queue = || NAME.into();
        let declared = channel.queue_declare(queue(), QueueDeclareOptions::default(), FieldTable::default()).await;
        declared.expect("makes the queue");
        channel.queue_purge(queue(), QueuePurgeOptions::default()).await.expect("is empty");
        channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
        let mut confirmed = Vec::new();
        for payload in payloads(count) {
            let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
            let publish = channel.basic_publish("".into(), queue(), options, &payload, properties);
            confirmed.push(publish.await.expect("publishes"));
        }
        for confirmed in confirmed {
            confirmed.await.expect("is there");
        }
        let in_flight_at_most = u16::try_from(in_flight).expect("few");
        channel.basic_qos(in_flight_at_most, BasicQosOptions::default()).await.expect("sets the limit");
        let started = Instant::now();
        let consumer = channel.basic_consume(queue(), "".into(), BasicConsumeOptions::default(), FieldTable::default());
        let messages = consumer.await.expect("consumes");
        consume(messages, count, in_flight, |message| async move {
            let message = message.expect("a message");
            app.handle(&message.data).await;
            message.ack(BasicAckOptions::default()).await.expect("acknowledges");
        })
        .await;
        let took = started.elapsed();
        connection.close(200, "done".into()).await.expect("closes");
        took
    }
}

/// The process of a broker, killed when this value is dropped.
struct Server {
    child: Child,
    port: u16,
    folder: PathBuf,
}

impl Server {
    fn start(command: impl FnOnce(u16, &PathBuf) -> Command) -> Self {
        let port = free_port();
        let folder = std::env::temp_dir().join(format!("idem-bench-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the server");
        let mut command = command(port, &folder);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the server of scripts/test");
        Self { child, port, folder }
    }

    fn nats() -> Self {
        Self::start(|port, folder| {
            let program = std::env::var_os("IDEM_TEST_NATS").unwrap_or("nats-server".into());
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL"]).arg(program).args(["-a", "127.0.0.1", "-js", "-p"]);
            command.arg(port.to_string()).arg("-sd").arg(folder);
            command
        })
    }

    fn rabbitmq() -> Self {
        Self::start(|port, folder| {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/rabbitmq");
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", script, &port.to_string()]).arg(folder);
            command
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        // `epmd`, which maps the names of RabbitMQ's nodes, would outlive the server.
        Command::new("epmd").arg("-kill").env("ERL_EPMD_PORT", (self.port + 2).to_string()).output().ok();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Returns the processor time of this process.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("since the process started")
}

/// Returns the nanoseconds of processor time per beat, with 10 000 messages in flight. Without beats, the time is
/// divided by the number of beats that the same run with beats would make.
fn beats(with_beats: bool) -> f64 {
    #[idempotent(key = "order:{order}", ttl = "7d", store = store, scope = "bench::slow", lease = "60s")]
    async fn slow(store: &MemoryStore, order: u64) -> Result<(), Error> {
        std::future::pending().await
    }

    let (in_flight, rounds) = (sized(10_000, 100), sized(10, 2));
    let every = Duration::from_millis(sized(1_000, 100));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    let (store, beats) = (MemoryStore::new(), Arc::new(AtomicU64::new(0)));
    for order in 0..in_flight {
        let (store, beats) = (store.clone(), Arc::clone(&beats));
        runtime.spawn(async move {
            let every = if with_beats { every } else { Policy::DEFAULT_LEASE * 1_000 };
            let call = observe(slow(&store, order)).on_beat(every, move |_| {
                beats.fetch_add(1, Ordering::Relaxed);
                async { Ok::<_, Error>(()) }
            });
            drop(call.await);
        });
    }
    // The first two intervals are not measured. The measurement covers a whole number of intervals.
    std::thread::sleep(every * 2);
    let (before, counted) = (processor_time(), beats.load(Ordering::Relaxed));
    std::thread::sleep(every * rounds);
    let took = processor_time().saturating_sub(before);
    let counted = beats.load(Ordering::Relaxed) - counted;
    let counted = if with_beats { counted } else { in_flight * u64::from(rounds) };
    idem_benches::nanos_each(took, usize::try_from(counted).expect("few"))
}

fn main() {
    let records = RedisServer::start(Kind::Redis);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    let store = runtime.block_on(RedisStore::connect(&records.url())).expect("connects");
    let effects = runtime.block_on(records.raw());
    let by_hand = runtime.block_on(Pipelined::connect(&format!("127.0.0.1:{}", records.port())));

    let table = Table::with_limit("Consumers", "thousand messages a second", "times its throughput");
    // Each line of the table shows one of the two handlers, with 1 message or 64 messages in flight.
    let compare = |name: &str, broker: &dyn Fn(&App, u64, usize) -> Duration| {
        for (what, effects) in [("that does nothing", None), ("that writes once", Some(effects.clone()))] {
            for (in_flight, least, goal) in [(1, 200, Goal::None), (64, 2_000, Goal::OfLimit(0.8))] {
                let line = format!("{name}, handler {what}, {in_flight} in flight");
                if !is_wanted(&line) {
                    continue;
                }
                let side = |records| {
                    let app = App { store: store.clone(), effects: effects.clone(), records };
                    let measure = move |count| {
                        thousands_per_second(broker(&app, count, in_flight), usize::try_from(count).expect("few"))
                    };
                    paced(Duration::from_millis(sized(400, 20)), sized(least, 20), measure)
                };
                let mut sides = [Records::None, Records::ByHand(by_hand.clone()), Records::Idem].map(side);
                let [raw, limit, idem] =
                    alternate(sized(15, 1), sides.each_mut().map(|side| side as &mut dyn FnMut() -> f64));
                // The records of all rounds together would fill the memory.
                runtime.block_on(async {
                    let flushed = redis::cmd("FLUSHDB").arg("ASYNC").exec_async(&mut records.raw().await).await;
                    flushed.expect("flushes");
                });
                let sides = Sides { raw: &raw, limit: Some(&limit), idem: &idem };
                table.sides(&line, &sides, |idem, raw| idem / raw, goal);
            }
        }
    };
    if is_wanted("Redis Streams") {
        let broker = Streams { server: RedisServer::start(Kind::Redis) };
        compare("Redis Streams", &|app, count, in_flight| runtime.block_on(broker.round(app, count, in_flight)));
    }
    if is_wanted("JetStream") {
        let broker = JetStream { server: Server::nats() };
        idem_tests::server::wait_until("NATS listens", || {
            std::net::TcpStream::connect(("127.0.0.1", broker.server.port)).is_ok()
        });
        compare("JetStream", &|app, count, in_flight| runtime.block_on(broker.round(app, count, in_flight)));
    }
    if is_wanted("RabbitMQ") {
        let broker = RabbitMq { server: Server::rabbitmq() };
        idem_tests::server::wait_until("RabbitMQ listens", || {
            std::net::TcpStream::connect(("127.0.0.1", broker.server.port)).is_ok()
        });
        compare("RabbitMQ", &|app, count, in_flight| runtime.block_on(broker.round(app, count, in_flight)));
    }

    if is_wanted("beat") {
        // The cost of a beat is the difference between a run with beats and a run without.
        let table = Table::new("Beats of the broker's, 10 000 messages in flight", "ns a message", "ns a beat");
        let [without, with] = alternate(sized(3, 1), [&mut || beats(false), &mut || beats(true)]);
        table.line("a callback that does nothing", &without, &with, |idem, raw| idem - raw, Goal::None);
    }
}
