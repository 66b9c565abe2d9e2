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
/// Time limit for the end of a worker after its stop signal. Most handlers need less.
const GRACE: Duration = Duration::from_secs(2);
/// Number of attempts after which the queue gives up a task.
const ATTEMPTS: u32 = 25;
const PAYMENTS: Policy = Policy::new(Duration::from_secs(7 * 86_400))
    .lease(Duration::from_secs(2))
    .max_attempts(4)
    .backoff(Backoff::new(Duration::from_millis(100), Duration::from_secs(2)));

/// The handler: it runs once for each order, and every duplicate gets the receipt of that run.
async fn charge(run: Run, event: Event) -> Result<Receipt, Failure> {
    // The worker can die between the charge and its record, so every attempt gives the bank the same key.
    let payment = current()?.child_key("charge");
    Ok(run.charge(&event, payment).await?)
}

/// Handles one delivery, with a service that has an `OperationLayer`.
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
        // A handler may return `Ok` although it ignored the error of a call, so the outcome decides.
        Disposition::Retry { after } => Err(RetryAfterError::new(fleet::reason(result), after).into()),
        Disposition::DeadLetter => {
            let error = fleet::reason(result);
            eprintln!("task {id} is set aside: {error}");
            run.set_aside(Some(&event))?;
            Err(AbortError::new(error).into())
        }
    }
}

/// Runs a worker process.
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
    // After the stop signal the worker finishes its running tasks, but its future may never end, so it is dropped after
    // `GRACE`. The queue hands out the dropped tasks again.
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
