//! Shows workers of apalis 1 that use `idem_apalis::OperationLayer`, and survive the kill of one of them.
//!
//! `cargo run --manifest-path examples/apalis/Cargo.toml` pushes orders with duplicates as tasks and charges each
//! exactly once, with a Redis as the queue. Records are in a SQLite file. `-- --url redis://host` uses another Redis
//! server than the local one.
//!
//! - *Key*: the order, from the arguments of the task. If an order is pushed again, its task has another `TaskId`. The
//!   `idempotency_key` of apalis prevents a second push of a task, not a second run.
//! - *Slow handlers*: no extension is needed. A worker that sends no heartbeats loses its tasks, even if it is only
//!   frozen.
//! - *Place of the layer*: around the handler; see `idem_apalis`.
//! - *Retry* and *poison*: the layer returns the errors that apalis expects. The queue in Redis ignores the time of a
//!   retry: the queue waits one second longer after each attempt. It gives up after 25 attempts.
//! - *Arguments*: as text, because arguments that apalis itself can't decode end the worker. A task whose arguments
//!   can't be read has no key, so the layer sets the task aside.
#![allow(clippy::disallowed_methods, reason = "a worker that is stopped is given some time")]

use std::io;
use std::path::Path;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use apalis::prelude::{AbortError, BoxDynError, Task, TaskSink as _, WorkerBuilder, WorkerBuilderExt as _};
use apalis_redis::{Config, RedisStorage};
use idem_apalis::OperationLayer;
use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Headers, Receipt, Run};
use idem_examples::servers::Server;
use idem_runtime::policy::Backoff;
use idem_runtime::{Key, Operation, Policy, StoreExt as _, current, observe};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{interval, sleep};
use tower::{Service, ServiceExt as _, service_fn};

const HANDLERS: usize = 8;
/// Time limit for the end of a worker after its stop signal. Most handlers need less.
const GRACE: Duration = Duration::from_secs(2);
const PAYMENTS: Policy = Policy::new(Duration::from_secs(7 * 86_400))
    .lease(Duration::from_secs(2))
    .max_attempts(4)
    .backoff(Backoff::new(Duration::from_millis(100), Duration::from_secs(2)));

/// The handler: it runs once for each order, and every duplicate gets the receipt of that run.
async fn charge(run: Run, payload: String) -> Result<Receipt, Failure> {
    let event = Event::read(payload.as_bytes())?;
    // The worker can die between the charge and its record, so every attempt gives the bank the same key.
    let payment = current()?.child_key("charge");
    Ok(run.charge(&event, payment).await?)
}

/// Writes the books of the example around a delivery. A program without books passes the service to the worker.
async fn deliver<S>(run: Run, service: S, task: Task<String>) -> Result<Receipt, BoxDynError>
where
    S: Service<Task<String>, Response = Receipt, Error = BoxDynError>,
{
    let event = Event::read(task.args.as_bytes()).ok();
    run.delivered(event.as_ref())?;
    let (result, outcome) = observe(service.oneshot(task)).await;
    match (&result, &event) {
        (Ok(_), Some(event)) => run.acknowledged(event, &outcome)?,
        (Err(error), _) if error.is::<AbortError>() => {
            eprintln!("a task is set aside: {error}");
            run.set_aside(event.as_ref())?;
        }
        _ => {}
    }
    result
}

/// Runs a worker process.
async fn work(run: Run) -> Result<(), Failure> {
    let (mut shutdown, mut late) = (signal(SignalKind::terminate())?, signal(SignalKind::terminate())?);
    let store = run.store().await?;
    let operations = {
        let store = store.clone();
        OperationLayer::of(move |task: &Task<String>| {
            let event = Event::read(task.args.as_bytes()).ok();
            let key = Key::new("payments::charge", event.as_ref().map(|event| event.order));
            Operation::new(&store, key, PAYMENTS).fingerprint(&event.map(|event| (event.order, event.cents)))
        })
    };
    let bank = run.clone();
    let service = operations.handler(move |payload: String| charge(bank.clone(), payload));
    let worker = WorkerBuilder::new(format!("worker-{}", std::process::id()))
        .backend(queue(&run).await?)
        .concurrency(HANDLERS)
        .build(service_fn(move |task: Task<String>| deliver(run.clone(), service.clone(), task)));
    let stopped = async move {
        shutdown.recv().await;
        Ok::<_, io::Error>(())
    };
    // After the stop signal the worker finishes its running tasks, but its future may never end, so it is dropped after
    // `GRACE`. The queue hands out the dropped tasks again.
    let late = async move {
        late.recv().await;
        sleep(GRACE).await;
    };
    let (mut worker, mut late) = (pin!(worker.run_until(stopped)), pin!(late));
    let mut wake = interval(BROKER_TIMEOUT / 4);
    loop {
        tokio::select! {
            ended = &mut worker => break ended?,
            () = &mut late => break,
            // A worker of apalis 1.0 can sleep through its own heartbeat. Each tick polls the worker.
            _ = wake.tick() => {}
        }
    }
    store.flush().await;
    Ok(())
}

async fn queue(run: &Run) -> Result<RedisStorage<String>, Failure> {
    let heartbeat = BROKER_TIMEOUT / 4;
    let config = Config::default().queue(&run.name).batch_size(1).heartbeat_interval(heartbeat).missed_heartbeats(4);
    Ok(RedisStorage::new(apalis_redis::connect(run.url.as_str()).await?).with_config(config))
}

struct Broker;

impl fleet::Broker for Broker {
    const NAME: &str = "apalis_worker";
    const URL: Option<&str> = Some("redis://127.0.0.1:6379");

    /// A worker of apalis ends when its Redis is away, and its supervisor starts it again, so there is no run with
    /// outages.
    fn start(&self, _: &str, _: &Path) -> Result<Box<dyn Server>, Failure> {
        Err("this example has no run with outages".into())
    }

    async fn publish(&self, run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
        let mut queue = queue(run).await?;
        for message in messages {
            queue.push(String::from_utf8_lossy(message).into_owned()).await?;
        }
        Ok(())
    }

    /// apalis keeps no reasons with its dead tasks.
    async fn dead_letters(&self, _: &Run) -> Result<Vec<Headers>, Failure> {
        Ok(Vec::new())
    }

    async fn clean_up(&self, run: &Run) -> Result<(), Failure> {
        let mut queue = queue(run).await?;
        let redis = queue.get_connection();
        let keys: Vec<String> = redis::cmd("KEYS").arg(format!("{}*", run.name)).query_async(redis).await?;
        Ok(redis::cmd("UNLINK").arg(keys).exec_async(redis).await?)
    }
}

fn main() -> ExitCode {
    fleet::main(&Broker, &work)
}
