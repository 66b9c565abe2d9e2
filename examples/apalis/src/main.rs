//! How do workers of apalis 1 use the layer for tower, and what happens when one is killed?
//!
//! `cargo run --manifest-path examples/apalis/Cargo.toml` pushes orders with duplicates as tasks and charges each exactly once, with a
//! Redis as the queue. Records are in a SQLite file. `-- --url redis://host` uses another server than the local one.
//!
//! - *Key*: the order, from the arguments of the task. Whoever pushes the order again makes another `TaskId`, and the
//!   `idempotency_key` of apalis keeps a task from being pushed twice: it says nothing about running twice.
//! - *Slow handlers*: nothing to extend. A worker that sends no heartbeats loses its tasks, also when it is merely frozen.
//! - *Where the layer goes*: around the service that the task's function calls. A layer of the worker is outside of what apalis
//!   keeps its books by: a task that such a layer answers without the function, as a replay is, would stay pending and be handed
//!   out again at once, for ever.
//! - *Retry*: `RetryAfterError`. The queue in Redis reads no time from it: it waits a second more after each attempt, and gives
//!   up after 25. *Poison*: `AbortError`, which moves the task to the dead ones.
//! - *Arguments*: as text, so that what can't be read is ours to set aside.
#![allow(clippy::disallowed_methods, reason = "a worker that is stopped is given some time")]

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use apalis::prelude::{
    AbortError, Attempt, BoxDynError, RetryAfterError, TaskId, TaskSink as _, WorkerBuilder, WorkerBuilderExt as _,
};
use apalis_redis::{Config, RedisStorage};
use idem_examples::fleet::{self, BROKER_TIMEOUT, Event, Failure, Receipt, Run};
use idem_runtime::policy::Backoff;
use idem_runtime::tower::OperationLayer;
use idem_runtime::{Disposition, Key, Operation, Policy, StoreExt as _, current, observe};
use tokio::time::sleep;
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

const HANDLERS: usize = 8;
/// How long a worker that is stopped may take. Longer than a handler.
const GRACE: Duration = Duration::from_secs(2);
/// After how many attempts the queue gives a task up.
const ATTEMPTS: u32 = 25;
const PAYMENTS: Policy = Policy::new(Duration::from_secs(7 * 86_400))
    .lease(Duration::from_secs(2))
    .max_attempts(4)
    .backoff(Backoff::new(Duration::from_millis(100), Duration::from_secs(2)));

/// The handler: it runs once for each order, and every duplicate gets the receipt of that run.
async fn charge(run: Run, event: Event) -> Result<Receipt, Failure> {
    // The worker can die between the charge and its record. The bank knows the payment by this key on every attempt.
    let payment = current()?.child_key("charge");
    Ok(run.charge(&event, payment).await?)
}

/// One delivery, by a service that has an `OperationLayer`.
async fn deliver<S>(run: Run, service: S, payload: String, id: TaskId, attempt: Attempt) -> Result<Receipt, BoxDynError>
where
    S: Service<Event, Response = Receipt, Error = Failure>,
{
    let event = match Event::read(payload.as_bytes()) {
        Ok(event) => event,
        Err(error) => {
            eprintln!("task {id} can't be read, and is set aside: {error}");
            run.delivered(None)?;
            run.set_aside(None)?;
            return Err(AbortError::new(error).into());
        }
    };
    run.delivered(Some(&event))?;
    let attempt = u32::try_from(attempt.current()).unwrap_or(u32::MAX);
    let call = service.oneshot(event.clone());
    let (result, outcome) = observe(call).delivery(attempt).delivery_limit(ATTEMPTS).catch_panics().await;
    match outcome.disposition() {
        Disposition::Ack => {
            run.acknowledged(&event, &outcome)?;
            result
        }
        // A handler may return `Ok` all the same: it swallowed the error of a call.
        Disposition::Retry { after } => Err(RetryAfterError::new(fleet::reason(result), after).into()),
        Disposition::DeadLetter => {
            let error = fleet::reason(result);
            eprintln!("task {id} is set aside: {error}");
            run.set_aside(Some(&event))?;
            Err(AbortError::new(error).into())
        }
    }
}

/// A worker process.
async fn work(run: Run) -> Result<(), Failure> {
    let (shutdown, late) = (run.shutdown()?, run.shutdown()?);
    let store = run.store().await?;
    let operations = {
        let store = store.clone();
        OperationLayer::of(move |event: &Event| {
            Operation::new(&store, Key::new("payments::charge", event.order), PAYMENTS)
                .fingerprint(&(event.order, event.cents))
        })
    };
    let bank = run.clone();
    let service = operations.layer(service_fn(move |event| charge(bank.clone(), event)));
    let worker = WorkerBuilder::new(format!("worker-{}", std::process::id()))
        .backend(queue(&run).await?)
        .concurrency(HANDLERS)
        .build(move |payload: String, id: TaskId, attempt: Attempt| {
            deliver(run.clone(), service.clone(), payload, id, attempt)
        });
    let stopped = async move {
        shutdown.await;
        Ok::<_, io::Error>(())
    };
    // It finishes what it has begun. It may also never end; whatever is then cancelled is handed out again.
    let late = async move {
        late.await;
        sleep(GRACE).await;
    };
    tokio::select! {
        ended = worker.run_until(stopped) => ended?,
        () = late => {}
    }
    store.flush().await;
    Ok(())
}

async fn queue(run: &Run) -> Result<RedisStorage<String>, Failure> {
    let heartbeat = BROKER_TIMEOUT / 4;
    let config = Config::default().queue(&run.name).batch_size(1).heartbeat_interval(heartbeat).missed_heartbeats(4);
    Ok(RedisStorage::new(apalis_redis::connect(run.url.as_str()).await?).with_config(config))
}

async fn publish(run: &Run, messages: &[Vec<u8>]) -> Result<(), Failure> {
    let mut queue = queue(run).await?;
    for message in messages {
        queue.push(String::from_utf8_lossy(message).into_owned()).await?;
    }
    Ok(())
}

async fn clean_up(run: &Run) -> Result<(), Failure> {
    let mut queue = queue(run).await?;
    let redis = queue.get_connection();
    let keys: Vec<String> = redis::cmd("KEYS").arg(format!("{}*", run.name)).query_async(redis).await?;
    Ok(redis::cmd("UNLINK").arg(keys).exec_async(redis).await?)
}

fn main() -> ExitCode {
    fleet::main("apalis_worker", "redis://127.0.0.1:6379", &publish, &work, &clean_up)
}
