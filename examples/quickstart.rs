//! Shows the effect of `#[idempotent]` on a consumer whose messages are delivered more than once.
//!
//! `cargo run --example quickstart` charges 2,000 orders. A broker delivers them, at least once, to workers that fail
//! and die. The records are in a file: a second run replays every result, and a run that follows a killed run
//! (`kill -9`, or `-- --die-after 700`) finishes the work of the killed run. `-- --fresh` forgets earlier runs,
//! `-- --without-idempotency` shows the same deliveries without the attribute, and `-- --help` lists all options.
#![allow(clippy::disallowed_methods, reason = "a payment provider takes its time")]

use std::collections::{BTreeSet, HashSet};
use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{env, fs, io, mem, process, thread};

use idem_examples::{
    Arguments, Charges, Count, Counts, Event, Ledger, Mishap, PaymentError, Queue, Receipt, counts, deliveries,
};
use idem_runtime::policy::Backoff;
use idem_runtime::testing::crash;
use idem_runtime::{Disposition, Key, Policy, SqliteStore, Store, StoreError, current, idempotent, observe};
use tokio::sync::mpsc;
use tokio::time::sleep;

const WORKERS: usize = 4;
const HANDLERS_PER_WORKER: usize = 8;

type Failure = Box<dyn Error>;

/// Settings of the handler: results are retained for a week, and a failed payment is retried after a short pause.
const PAYMENTS: Policy = Policy::new(Duration::from_secs(7 * 86_400))
    .backoff(Backoff::new(Duration::from_millis(50), Duration::from_secs(1)));

/// The handler: it runs once for each order, and every duplicate gets the receipt of that run.
///
/// A worker can die between the charge and its record. The body then runs again, so it gives the payment provider a key
/// that is the same on every attempt.
#[idempotent(
    key = "order:{event.order.order_id}",
    policy = PAYMENTS,
    store = app.store,
    scope = "charge_customer",
    lease = "500ms",
    in_progress = wait("250ms"),
    fingerprint = event.order
)]
async fn charge_customer(app: &App, event: &Event) -> Result<Receipt, PaymentError> {
    let payment_key = current()?.child_key("charge");
    app.charge(event, payment_key).await
}

/// The consumer of one worker: the outcome of each call decides whether its message is acknowledged, delivered again or
/// set aside.
async fn consume(app: Arc<App>) {
    while let Some(message) = app.world.queue.receive().await {
        app.count(Count::Delivery);
        let (result, outcome) = observe(charge_customer(&app, &message.event)).await;
        counts(&outcome).for_each(|count| app.count(count));
        match outcome.disposition() {
            Disposition::Ack => app.world.queue.ack(&message),
            Disposition::Retry { after } => app.world.queue.nack(&message, Some(after)),
            Disposition::DeadLetter => {
                if let Err(error) = result {
                    eprintln!("line {}: set aside: {error}", message.event.line);
                }
                // A real broker has a dead-letter queue for messages that are set aside.
                app.world.queue.ack(&message);
            }
        }
    }
}

/// The same consumer without the attribute. Deliveries, faults and the payment provider's keys are the same as with
/// the attribute.
async fn consume_without_idempotency(app: Arc<App>) {
    while let Some(message) = app.world.queue.receive().await {
        app.count(Count::Delivery);
        let payment_key = format!("charge order {}", message.event.order.order_id);
        if app.charge(&message.event, payment_key).await.is_ok() {
            app.count(Count::Handled);
            app.world.queue.ack(&message);
        } else {
            app.count(Count::Failure);
            app.world.queue.nack(&message, None);
        }
    }
}

fn main() -> ExitCode {
    idem_examples::main("quickstart", deliver)
}

fn deliver(arguments: &Arguments, events: &[Event]) -> Result<(Counts, Charges), Failure> {
    let folder = folder(events)?;
    let file = folder.join("records.db");
    let mut counts = Counts::default();
    let mut ledger = Ledger::default();
    if arguments.fresh && folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    if arguments.idempotent {
        println!("records: {} (`-- --fresh` starts over)\n", file.display());
        counts.add(Count::FinishedBefore, runtime().block_on(results_on_record(&file, events))?);
        ledger = Ledger::open(&folder.join("charges.jsonl"))?;
    }
    let bank = Bank { ledger, asked: HashSet::new(), die_after: arguments.die_after };
    let queue = Queue::new(deliveries(events));
    let world = Arc::new(World { queue, bank: Mutex::new(bank), counts: Mutex::new(counts) });
    thread::scope(|scope| {
        let work = || {
            while !work_until_done_or_dead(&world, &file, arguments.idempotent)? {}
            Ok(())
        };
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })
    .map_err(|error: StoreError| Failure::from(error))?;
    let mut counts = lock(&world.counts).clone();
    if arguments.idempotent {
        counts.add(Count::OnRecord, runtime().block_on(results_on_record(&file, events))?);
    }
    let charges = mem::take(&mut lock(&world.bank).ledger).into_charges();
    Ok((counts, charges))
}

/// Returns the folder of a run with these orders: under `target`, or under the system's temporary files.
fn folder(events: &[Event]) -> io::Result<PathBuf> {
    let program = env::current_exe()?;
    let target = program.ancestors().nth(3).filter(|_| program.parent().is_some_and(|it| it.ends_with("examples")));
    let base = target.map_or_else(|| env::temp_dir().join("idem-quickstart"), |target| target.join("quickstart"));
    let mut orders = DefaultHasher::new();
    for event in events {
        event.order.to_string().hash(&mut orders);
    }
    Ok(base.join(format!("{:016x}", orders.finish())))
}

/// Returns the number of orders with a recorded result.
async fn results_on_record(file: &Path, events: &[Event]) -> Result<u64, Failure> {
    let store = SqliteStore::open(file).await?;
    let mut finished = 0;
    for order_id in events.iter().map(|event| &event.order.order_id).collect::<BTreeSet<_>>() {
        // An order without a valid key (empty or too long) has no record.
        let Ok(key) = Key::new("charge_customer", format!("order:{order_id}")) else { continue };
        finished += u64::from(store.inspect(&key).await?.is_some_and(|found| found.record.is_finished()));
    }
    Ok(finished)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built")
}

/// Runs one worker with its own runtime, like a separate process. Returns false if it died.
fn work_until_done_or_dead(world: &Arc<World>, file: &Path, idempotent: bool) -> Result<bool, StoreError> {
    let runtime = runtime();
    let (die, mut death) = mpsc::channel(1);
    // Each worker has a separate store handle, as a process would have: no other worker renews the leases of
    // this handle.
    let store = runtime.block_on(SqliteStore::open(file))?;
    let app = Arc::new(App { store: store.clone(), world: Arc::clone(world), die });
    for _ in 0..HANDLERS_PER_WORKER {
        let app = Arc::clone(&app);
        if idempotent {
            runtime.spawn(consume(app));
        } else {
            runtime.spawn(consume_without_idempotency(app));
        }
    }
    drop(app);
    let died = runtime.block_on(death.recv()).is_some();
    if died {
        lock(&world.counts).add(Count::WorkerDied, 1);
        // Behaves like `kill -9`: no key is released, and no lease is renewed.
        crash(&store);
    }
    Ok(!died)
}

/// The dependencies of a worker.
struct App {
    store: SqliteStore,
    world: Arc<World>,
    die: mpsc::Sender<()>,
}

impl App {
    /// Asks the payment provider to charge a customer.
    async fn charge(&self, event: &Event, payment_key: String) -> Result<Receipt, PaymentError> {
        self.count(Count::BodyRun);
        let mishap = Mishap::of(event, lock(&self.world.bank).asked.insert(event.index));
        sleep(Duration::from_millis(if mishap == Mishap::Slow { 700 } else { 2 })).await;
        if mishap == Mishap::Unreachable {
            return Err(PaymentError::Unreachable);
        }
        let receipt = Receipt { payment: payment_key.clone(), amount_cents: event.order.amount_cents };
        let charged = lock(&self.world.bank).charge(payment_key, event);
        if !charged.map_err(|_| PaymentError::Unreachable)? {
            self.count(Count::RepeatedCharge);
        }
        match mishap {
            Mishap::AnswerLost => Err(PaymentError::AnswerLost),
            Mishap::WorkerDies => {
                let _ = self.die.send(()).await;
                std::future::pending().await
            }
            _ => Ok(receipt),
        }
    }

    fn count(&self, count: Count) {
        lock(&self.world.counts).add(count, 1);
    }
}

/// The state that all workers share.
struct World {
    queue: Queue,
    bank: Mutex<Bank>,
    counts: Mutex<Counts>,
}

/// A payment provider, whose books outlive this process.
struct Bank {
    ledger: Ledger,
    /// Indexes of the events whose charge was requested in this run.
    asked: HashSet<usize>,
    /// Number of charges after which this process is killed.
    die_after: Option<u64>,
}

impl Bank {
    fn charge(&mut self, payment_key: String, event: &Event) -> io::Result<bool> {
        let charged = self.ledger.charge(payment_key, &event.order)?;
        if let Some(left) = &mut self.die_after {
            *left = left.saturating_sub(u64::from(charged));
            if *left == 0 {
                kill_this_process();
            }
        }
        Ok(charged)
    }
}

/// Kills this process: no value is dropped, and no output is flushed.
fn kill_this_process() -> ! {
    let _ = Command::new("kill").args(["-9", &process::id().to_string()]).status();
    // A machine may have no `kill` program.
    process::abort()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
