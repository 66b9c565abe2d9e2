//! Checks whether handlers charge a customer once, under every fault.
//!
//! `cargo run --example crash_at_every_await --features testing` checks four handlers. At each await of a handler, the
//! handler is killed, cancelled, or stopped while another worker takes over. Its store and its bank lose requests and
//! answers, and duplicates are delivered before, during and after its run. Time is simulated, so the run takes a
//! second. The first two handlers are wrong, and the output shows the steps that lead to a second charge. In your
//! project, write this check as a `#[test]` that ends with `assert_once()`.

use std::process::ExitCode;
use std::sync::Arc;

use idem_runtime::testing::{Explorer, NoAnswer, Report, Worker, explore};
use idem_runtime::{Error, Store, current, idempotent};
use serde::{Deserialize, Serialize};

// ---- The program ---------------------------------------------------------------------------------------------------

#[derive(Debug, Serialize, Deserialize)]
struct Receipt {
    order: u32,
}

#[derive(Debug, Serialize, Deserialize)]
enum PaymentError {
    /// The customer may or may not have been charged.
    NoAnswer,
    AlreadyCharged,
    /// The library's reason for not running the handler, or for not recording its result.
    Idempotency(String),
}

impl From<Error> for PaymentError {
    fn from(error: Error) -> Self {
        Self::Idempotency(error.to_string())
    }
}

/// A payment provider.
trait Bank {
    /// Charges the customer of `order`, unless a charge with this key exists.
    async fn charge(&self, order: u32, key: Option<String>) -> Result<(), PaymentError>;

    /// Returns whether the customer of `order` has been charged.
    async fn is_charged(&self, order: u32) -> Result<bool, PaymentError>;
}

/// The dependencies of a worker.
struct App<B> {
    store: Arc<dyn Store>,
    bank: B,
}

/// Charges first and checks too late: a second attempt has charged again before it checks.
#[idempotent(key = "order:{order}", ttl = "7d", store = app.store, scope = "charge_before_check")]
async fn charge_before_check<B: Bank>(app: &App<B>, order: u32) -> Result<Receipt, PaymentError> {
    app.bank.charge(order, None).await?;
    if !app.bank.is_charged(order).await? {
        return Err(PaymentError::NoAnswer);
    }
    Ok(Receipt { order })
}

/// Checks, then charges. The check protects against crashes, but not against a worker that is paused between check and
/// charge until another worker has taken over.
#[idempotent(key = "order:{order}", ttl = "7d", store = app.store, scope = "check_before_charge")]
async fn check_before_charge<B: Bank>(app: &App<B>, order: u32) -> Result<Receipt, PaymentError> {
    if !app.bank.is_charged(order).await? {
        app.bank.charge(order, None).await?;
    }
    Ok(Receipt { order })
}

/// Passes the bank a key that is the same on every attempt.
#[idempotent(key = "order:{order}", ttl = "7d", store = app.store, scope = "charge_with_key")]
async fn charge_with_key<B: Bank>(app: &App<B>, order: u32) -> Result<Receipt, PaymentError> {
    let key = current().ok().map(|attempt| attempt.child_key("charge"));
    app.bank.charge(order, key).await?;
    Ok(Receipt { order })
}

/// Charges at most once, for a bank that accepts no keys. An interrupted run, and a charge without an answer, are set
/// aside for a person, without another attempt.
#[idempotent(key = "order:{order}", ttl = "7d", store = app.store, scope = "charge_at_most_once", on_crash = fail, on_error = record)]
async fn charge_at_most_once<B: Bank>(app: &App<B>, order: u32) -> Result<Receipt, PaymentError> {
    if app.bank.is_charged(order).await? {
        return Err(PaymentError::AlreadyCharged);
    }
    app.bank.charge(order, None).await?;
    Ok(Receipt { order })
}

// ---- Its test ------------------------------------------------------------------------------------------------------

/// A bank that exists only in a test and counts its charges.
struct SimulatedBank(Worker);

impl Bank for SimulatedBank {
    async fn charge(&self, order: u32, key: Option<String>) -> Result<(), PaymentError> {
        let mut charge = self.0.effect(format!("charge order {order}"));
        if let Some(key) = key {
            charge = charge.key(key);
        }
        charge.await.map(drop).map_err(no_answer)
    }

    async fn is_charged(&self, order: u32) -> Result<bool, PaymentError> {
        self.0.happened(&format!("charge order {order}")).await.map_err(no_answer)
    }
}

fn no_answer(_: NoAnswer) -> PaymentError {
    PaymentError::NoAnswer
}

/// Builds the dependencies of a worker process.
fn app(worker: Worker) -> App<SimulatedBank> {
    App { store: Arc::new(worker.store()), bank: SimulatedBank(worker) }
}

fn main() -> ExitCode {
    let as_expected = [
        show("charge_before_check", false, &explore(|worker| async { charge_before_check(&app(worker), 42).await })),
        show("check_before_charge", false, &explore(|worker| async { check_before_charge(&app(worker), 42).await })),
        show("charge_with_key", true, &explore(|worker| async { charge_with_key(&app(worker), 42).await })),
        show(
            "charge_at_most_once",
            true,
            &Explorer::new().at_most_once().explore(|worker| async { charge_at_most_once(&app(worker), 42).await }),
        ),
    ];
    ExitCode::from(u8::from(as_expected != [true; 4]))
}

/// Prints the findings of a check. Returns whether the check found faults in a wrong handler, or none in a right
/// handler.
fn show(handler: &str, right: bool, report: &Report) -> bool {
    println!("{handler}: {report}\n");
    report.findings().is_empty() == right
}
