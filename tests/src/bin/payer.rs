//! Subject of `tests/kills.rs`: a consumer whose handler pays, by one of several strategies. Tests kill this process.
//!
//! Arguments: the store in the form of `idem_tests::stores`, the strategy, the port of the broker, the port of the
//! bank. The broker sends `deliver ID`, and gets the end of this delivery. The line `cut` drops the delivery under way.
//! The effect of a handler is an entry in the ledger of the bank, a server of the test process. Only the strategy
//! `reconcile` can read the ledger.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::policy::Backoff;
use idem_runtime::step::Step;
use idem_runtime::within::OpenTransaction;
use idem_runtime::{
    Disposition, Error, InProgress, OnError, Outcome, Policy, PostgresStore, Reconciliation, Refusal, SqliteStore,
    Store, current, idempotent, observe,
};
use idem_tests::stores;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// Short leases and pauses, so that the next delivery after a kill runs soon. A busy machine still records a result
/// within a lease.
const POLICY: Policy = Policy::new(Duration::from_secs(90 * 86_400))
    .lease(Duration::from_secs(2))
    .in_progress(InProgress::Wait(Duration::from_secs(60)))
    .backoff(Backoff::new(Duration::from_millis(20), Duration::from_millis(100)));
/// Lease for which the time limits of the store are long enough on a busy machine.
const LONG_LEASE: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize, Deserialize)]
enum BankError {
    /// The bank has refused the request, and nothing happened.
    Busy,
    /// The bank refuses a second request with the reference. The first request may have succeeded.
    ReferenceUsed,
    /// The bank has not answered.
    TimedOut,
    /// The bank can't tell whether it knows the reference.
    Unknown,
    Idempotency(String),
}

impl From<Error> for BankError {
    fn from(error: Error) -> Self {
        Self::Idempotency(error.to_string())
    }
}

struct Bank {
    port: u16,
}

impl Bank {
    /// Sends one request over a connection of its own. A connection that ends without an answer is a time-out.
    async fn ask(&self, request: String) -> Result<String, BankError> {
        let exchange = async {
            let mut line = TcpStream::connect(("127.0.0.1", self.port)).await?;
            line.write_all(format!("{request}\n").as_bytes()).await?;
            let mut answer = String::new();
            line.read_to_string(&mut answer).await?;
            io::Result::Ok(answer)
        };
        match exchange.await {
            Ok(answer) if !answer.is_empty() => Ok(answer),
            Ok(_) | Err(_) => Err(BankError::TimedOut),
        }
    }

    /// Reports a place of the handler to the test, which may kill this process there.
    async fn pass(&self, id: u64, place: &str) {
        let answer = self.ask(format!("pass {id} {place}")).await;
        assert!(matches!(answer.as_deref(), Ok("go")), "{answer:?}");
    }

    async fn charge(&self, id: u64, reference: &str) -> Result<String, BankError> {
        match self.ask(format!("charge {id} {reference}")).await? {
            busy if busy == "busy" => Err(BankError::Busy),
            used if used == "used" => Err(BankError::ReferenceUsed),
            receipt => Ok(receipt),
        }
    }

    async fn by_reference(&self, id: u64, reference: &str) -> Result<Option<String>, BankError> {
        match self.ask(format!("find {id} {reference}")).await? {
            none if none == "none" => Ok(None),
            unknown if unknown == "unknown" => Err(BankError::Unknown),
            receipt => Ok(Some(receipt)),
        }
    }
}

struct App {
    store: Arc<dyn Store>,
    bank: Bank,
}

impl App {
    async fn pay(&self, id: u64, reference: &str) -> Result<String, BankError> {
        self.bank.pass(id, "before").await;
        let receipt = self.bank.charge(id, reference).await?;
        self.bank.pass(id, "after").await;
        Ok(receipt)
    }
}

#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "retry")]
async fn retry(app: &App, id: u64) -> Result<String, BankError> {
    app.pay(id, "-").await
}

#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "child_key")]
async fn child_key(app: &App, id: u64) -> Result<String, BankError> {
    app.pay(id, &current()?.child_key("charge")).await
}

impl App {
    /// Pays in a step, of which `reference` makes the reference for the bank.
    async fn pay_in_step(&self, id: u64, reference: impl FnOnce(Step) -> String) -> Result<String, BankError> {
        let charge = async |step| {
            self.bank.pass(id, "before").await;
            self.bank.charge(id, &reference(step)).await
        };
        let receipt = current()?.step("charge").run(charge).await?;
        self.bank.pass(id, "after").await;
        Ok(receipt)
    }
}

#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "step")]
async fn step(app: &App, id: u64) -> Result<String, BankError> {
    app.pay_in_step(id, |_| "-".to_owned()).await
}

#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "step_child_key")]
async fn step_child_key(app: &App, id: u64) -> Result<String, BankError> {
    app.pay_in_step(id, |step| step.child_key()).await
}

#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "fail", on_crash = fail)]
async fn fail(app: &App, id: u64) -> Result<String, BankError> {
    app.pay(id, "-").await
}

fn judge(error: &BankError) -> OnError {
    match error {
        BankError::TimedOut | BankError::ReferenceUsed => OnError::Uncertain,
        BankError::Busy | BankError::Unknown | BankError::Idempotency(_) => OnError::Release,
    }
}

#[idempotent(
    key = "refund:{id}", store = app.store, policy = POLICY, scope = "refund",
    on_error = judge, on_crash = reconcile(find_refund(app, id))
)]
async fn refund(app: &App, id: u64) -> Result<String, BankError> {
    app.pay(id, &current()?.child_key("refund")).await
}

/// Reads, and never writes.
async fn find_refund(app: &App, id: u64) -> Result<Reconciliation<String>, BankError> {
    let answer = match app.bank.by_reference(id, &current()?.child_key("refund")).await {
        Ok(Some(receipt)) => Reconciliation::Done(receipt),
        // This bank refuses a reference the second time, so a request that is still on its way changes nothing.
        Ok(None) => Reconciliation::NotDone,
        Err(BankError::Unknown) => Reconciliation::Unknown { ask_again: Duration::from_millis(100) },
        Err(error) => return Err(error),
    };
    app.bank.pass(id, "found").await;
    Ok(answer)
}

#[idempotent(
    key = "{id}", ttl = "90d", store = PostgresStore::within(tx).schema(schema), scope = "within", in_progress = wait("60s")
)]
async fn in_postgres(
    tx: &OpenTransaction<tokio_postgres::Transaction<'_>>,
    schema: &str,
    bank: &Bank,
    id: i64,
) -> Result<String, Error> {
    bank.pass(id.cast_unsigned(), "before").await;
    tx.execute("INSERT INTO effects (id) VALUES ($1)", &[&id]).await.expect("inserts");
    bank.pass(id.cast_unsigned(), "made").await;
    Ok("a row".to_owned())
}

#[idempotent(key = "{id}", ttl = "90d", store = SqliteStore::within(tx), scope = "within")]
async fn in_sqlite(tx: &OpenTransaction<rusqlite::Transaction<'_>>, bank: &Bank, id: i64) -> Result<String, Error> {
    bank.pass(id.cast_unsigned(), "before").await;
    tx.execute("INSERT INTO effects (id) VALUES (?1)", [id]).expect("inserts");
    bank.pass(id.cast_unsigned(), "made").await;
    Ok("a row".to_owned())
}

/// Handler of the messages.
enum Subject {
    Asking(App, String),
    Postgres(tokio_postgres::Client, String, Bank),
    Sqlite(rusqlite::Connection, Bank),
}

impl Subject {
    async fn open(spec: &str, strategy: &str, bank: Bank) -> Self {
        let words: Vec<&str> = spec.split(' ').collect();
        match (strategy, &words[..]) {
            ("within", ["postgres", url, schema]) => {
                let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("connects");
                tokio::spawn(connection);
                client.batch_execute(&format!("SET search_path = {schema}")).await.expect("a schema");
                Self::Postgres(client, (*schema).to_owned(), bank)
            }
            ("within", ["sqlite", path]) => {
                let connection = rusqlite::Connection::open(path).expect("opens");
                connection.busy_timeout(Duration::from_secs(60)).expect("waits");
                Self::Sqlite(connection, bank)
            }
            _ => Self::Asking(App { store: stores::open(spec, LONG_LEASE).await, bank }, strategy.to_owned()),
        }
    }

    /// Makes one delivery. Returns its end for the broker.
    async fn deliver(&mut self, id: u64) -> String {
        match self {
            Self::Asking(app, strategy) => {
                let (result, outcome) = match strategy.as_str() {
                    "retry" => observe(retry(app, id)).await,
                    "child_key" => observe(child_key(app, id)).await,
                    "step" => observe(step(app, id)).await,
                    "step_child_key" => observe(step_child_key(app, id)).await,
                    "fail" => observe(fail(app, id)).await,
                    "reconcile" => observe(refund(app, id)).await,
                    _ => panic!("`{strategy}` is no strategy"),
                };
                end(result, &outcome)
            }
            Self::Postgres(client, schema, bank) => {
                let tx = OpenTransaction::new(client.transaction().await.expect("begins"));
                let (result, outcome) = observe(in_postgres(&tx, schema, bank, id.cast_signed())).await;
                if result.is_err() {
                    return end(result, &outcome);
                }
                bank.pass(id, "after").await;
                tx.into_inner().commit().await.expect("commits");
                end(result, &outcome.committed())
            }
            Self::Sqlite(connection, bank) => {
                let tx =
                    connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).expect("begins");
                let tx = OpenTransaction::new(tx);
                let (result, outcome) = observe(in_sqlite(&tx, bank, id.cast_signed())).await;
                if result.is_err() {
                    return end(result, &outcome);
                }
                bank.pass(id, "after").await;
                tx.into_inner().commit().expect("commits");
                end(result, &outcome.committed())
            }
        }
    }
}

fn end<E: std::fmt::Debug>(result: Result<String, E>, outcome: &Outcome) -> String {
    match (outcome.disposition(), result) {
        (Disposition::Ack, Ok(receipt)) => format!("ack {receipt}"),
        (Disposition::Retry { after }, _) => format!("retry {}", after.as_micros()),
        (Disposition::DeadLetter, Err(_)) if outcome.refusal() == Some(Refusal::Interrupted) => "person".to_owned(),
        (disposition, result) => format!("unexpected {disposition:?} {result:?}"),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [spec, strategy, broker, bank] = &args[..] else { panic!("store, strategy, two ports") };
    let port = |text: &str| text.parse::<u16>().expect("a port");
    let mut subject = Subject::open(spec, strategy, Bank { port: port(bank) }).await;
    let (read, mut write) = TcpStream::connect(("127.0.0.1", port(broker))).await.expect("connects").into_split();
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // A `cut` may come after the end of its delivery.
        let Some(id) = line.strip_prefix("deliver ") else { continue };
        let end = tokio::select! {
            end = subject.deliver(id.parse().expect("a number")) => end,
            _ = lines.next_line() => "cut".to_owned(),
        };
        write.write_all(format!("{end}\n").as_bytes()).await.expect("the broker reads");
    }
}
