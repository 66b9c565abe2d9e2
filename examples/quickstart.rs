//! What does `#[idempotent]` do for a consumer whose messages are delivered more than once?
//!
//! `cargo run --example quickstart` charges some thousand orders from a broker that delivers at least once, to workers
//! that fail and die. `-- --without-idempotency` shows the same deliveries without the attribute; `-- --help` the rest.
#![allow(clippy::disallowed_methods, reason = "a payment provider takes its time")]

use std::collections::HashSet;
use std::convert::Infallible;
use std::mem;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use idem_examples::{Charges, Count, Counts, Event, Mishap, PaymentError, Queue, Receipt, counts, deliveries};
use idem_runtime::{Disposition, MemoryStore, current, idempotent, observe};
use tokio::sync::mpsc;
use tokio::time::sleep;

const WORKERS: usize = 4;
const HANDLERS_PER_WORKER: usize = 8;

/// The handler: it runs once for each order, and every duplicate gets the receipt of that run.
///
/// A worker can die between the charge and its record. The body then runs again, so it hands the payment provider a key
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
    let payment_key = current().expect("an attempt runs this body").child_key("charge");
    app.charge(event, payment_key).await
}

/// The consumer: what becomes of a message is decided by how the call ended.
async fn consume(app: Arc<App>) {
    while let Some(message) = app.world.queue.receive().await {
        app.count(Count::Delivery);
        let (result, outcome) = observe(charge_customer(&app, &message.event)).await;
        counts(&outcome).for_each(|count| app.count(count));
        match outcome.disposition() {
            Disposition::Ack => app.world.queue.ack(&message),
            Disposition::Retry { after } => app.world.queue.nack(&message, after),
            Disposition::DeadLetter => {
                if let Err(error) = result {
                    eprintln!("line {}: set aside: {error}", message.event.line);
                }
                // A real broker keeps a queue for these.
                app.world.queue.ack(&message);
            }
        }
    }
}

/// The same without the attribute.
async fn consume_without_idempotency(app: Arc<App>) {
    while let Some(message) = app.world.queue.receive().await {
        app.count(Count::Delivery);
        let payment_key = app.world.invented_key();
        let result = app.charge(&message.event, payment_key).await;
        if result.is_ok() {
            app.world.queue.ack(&message);
        } else {
            app.count(Count::Failure);
            app.world.queue.nack(&message, None);
        }
    }
}

fn main() -> ExitCode {
    idem_examples::main("quickstart", false, |arguments, events| {
        let queue = Queue::new(deliveries(events));
        let world = Arc::new(World { queue, bank: Mutex::default(), counts: Mutex::default() });
        let store = MemoryStore::with_capacity(events.len());
        thread::scope(|workers| {
            for _ in 0..WORKERS {
                workers.spawn(|| while !work_until_done_or_dead(&world, &store, arguments.idempotent) {});
            }
        });
        let counts = lock(&world.counts).clone();
        let charges = mem::take(&mut lock(&world.bank).charges);
        Ok::<_, Infallible>((counts, charges))
    })
}

/// One worker, with a runtime of its own as if it were a process of its own. False if it died.
fn work_until_done_or_dead(world: &Arc<World>, store: &MemoryStore, idempotent: bool) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    let (die, mut death) = mpsc::channel(1);
    // A handle of its own, as another process would have: nobody else renews its leases.
    let app = Arc::new(App { store: store.peer(), world: Arc::clone(world), die });
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
        // As `kill -9` does it: no handler is dropped, so no key is released, and no lease is renewed any more.
        mem::forget(runtime);
    }
    !died
}

/// What a worker has.
struct App {
    store: MemoryStore,
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
        if !lock(&self.world.bank).charges.charge(payment_key, &event.order) {
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

/// What all workers share.
struct World {
    queue: Queue,
    bank: Mutex<Bank>,
    counts: Mutex<Counts>,
}

impl World {
    /// Without an idempotency key, every call is a charge of its own.
    fn invented_key(&self) -> String {
        let mut bank = lock(&self.bank);
        bank.invented += 1;
        format!("call {}", bank.invented)
    }
}

/// A payment provider.
#[derive(Default)]
struct Bank {
    charges: Charges,
    /// The events it has heard of.
    asked: HashSet<usize>,
    invented: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
