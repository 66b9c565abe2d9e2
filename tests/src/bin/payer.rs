//! Subject of `tests/kills.rs`: a consumer whose handler pays, by one of several strategies. Tests kill this process.
//!
//! Arguments: the store in the form of `idem_tests::stores`, the strategy, the port of the broker, the port of the
//! bank. The broker sends `deliver ID`, and gets the end of this delivery. The line `cut` drops the delivery under way.
//! The effect of a handler is an entry in the ledger of the bank, a server of the test process. Only the strategies
//! `reconcile` and `step_reconcile` can read the ledger.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::policy::Backoff;
use idem_runtime::step::Step;
use idem_runtime::within::OpenTransaction;
use idem_runtime::{
    Disposition, Error, InProgress, MySqlStore, OnError, Outcome, Policy, PostgresStore, Reconciliation, Refusal,
    SqliteStore, Store, current, idempotent, observe,
};
use idem_tests::stores;
use mysql_async::prelude::Queryable as _;
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

/// The effect can't be undone, so an error of the step leaves the effect in doubt, as a crash does.
#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "step_fail")]
async fn step_fail(app: &App, id: u64) -> Result<String, BankError> {
    let charge = async |_| {
        app.bank.pass(id, "before").await;
        app.bank.charge(id, "-").await
    };
    let receipt = current()?.step("charge").irreversible().fail().run(charge).await?;
    app.bank.pass(id, "after").await;
    Ok(receipt)
}

#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "step_reconcile")]
async fn step_reconcile(app: &App, id: u64) -> Result<String, BankError> {
    let refund = async |step: Step| {
        app.bank.pass(id, "before").await;
        app.bank.charge(id, &step.child_key()).await
    };
    let receipt = current()?
        .step("refund")
        .uncertain_errors_if(|error| matches!(judge(error), OnError::Uncertain))
        .reconcile(async |step: Step| app.find(id, &step.child_key()).await)
        .run(refund)
        .await?;
    app.bank.pass(id, "after").await;
    Ok(receipt)
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

async fn find_refund(app: &App, id: u64) -> Result<Reconciliation<String>, BankError> {
    app.find(id, &current()?.child_key("refund")).await
}

impl App {
    /// Looks up a payment. Reads, and never writes.
    async fn find(&self, id: u64, reference: &str) -> Result<Reconciliation<String>, BankError> {
        let answer = match self.bank.by_reference(id, reference).await {
            Ok(Some(receipt)) => Reconciliation::Done(receipt),
            // This bank refuses a reference the second time, so a request that is still on its way changes nothing.
            Ok(None) => Reconciliation::NotDone,
            Err(BankError::Unknown) => Reconciliation::Unknown { ask_again: Duration::from_millis(100) },
            Err(error) => return Err(error),
        };
        self.bank.pass(id, "found").await;
        Ok(answer)
    }
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

#[idempotent(
    key = "{id}", ttl = "90d", store = MySqlStore::within(tx).table(table), scope = "within", in_progress = wait("60s")
)]
async fn in_mysql(
    tx: &OpenTransaction<mysql_async::Transaction<'_>>,
    table: &str,
    bank: &Bank,
    id: i64,
) -> Result<String, Error> {
    bank.pass(id.cast_unsigned(), "before").await;
    let insert = format!("INSERT INTO {table}_effects (id) VALUES ({id})");
    tx.lock().await.query_drop(insert).await.expect("inserts");
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

/// Inserts a row in a step, and commits row and entry together. The record of the operation is written later, on
/// another connection.
#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "step_within")]
async fn step_in_postgres(
    app: &App,
    client: &mut tokio_postgres::Client,
    schema: &str,
    id: u64,
) -> Result<String, BankError> {
    let tx = OpenTransaction::new(client.transaction().await.expect("begins"));
    let insert = async |_| {
        app.bank.pass(id, "before").await;
        tx.execute("INSERT INTO effects (id) VALUES ($1)", &[&id.cast_signed()]).await.expect("inserts");
        app.bank.pass(id, "made").await;
        Ok::<_, BankError>("a row".to_owned())
    };
    let row = current()?.step("insert").within(PostgresStore::within(&tx).schema(schema)).run(insert).await?;
    tx.into_inner().commit().await.expect("commits");
    app.bank.pass(id, "after").await;
    Ok(row)
}

/// As [`step_in_postgres`].
#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "step_within")]
async fn step_in_mysql(
    app: &App,
    connection: &mut mysql_async::Conn,
    table: &str,
    id: u64,
) -> Result<String, BankError> {
    let begun = connection.start_transaction(mysql_async::TxOpts::default()).await.expect("begins");
    let tx = OpenTransaction::new(begun);
    let insert = async |_| {
        app.bank.pass(id, "before").await;
        let insert = format!("INSERT INTO {table}_effects (id) VALUES ({id})");
        tx.lock().await.query_drop(insert).await.expect("inserts");
        app.bank.pass(id, "made").await;
        Ok::<_, BankError>("a row".to_owned())
    };
    let row = current()?.step("insert").within(MySqlStore::within(&tx).table(table)).run(insert).await?;
    tx.into_inner().commit().await.expect("commits");
    app.bank.pass(id, "after").await;
    Ok(row)
}

/// As [`step_in_postgres`].
#[idempotent(key = "{id}", store = app.store, policy = POLICY, scope = "step_within")]
async fn step_in_sqlite(app: &App, connection: &mut rusqlite::Connection, id: u64) -> Result<String, BankError> {
    let behaviour = rusqlite::TransactionBehavior::Immediate;
    let tx = OpenTransaction::new(connection.transaction_with_behavior(behaviour).expect("begins"));
    let insert = async |_| {
        app.bank.pass(id, "before").await;
        tx.execute("INSERT INTO effects (id) VALUES (?1)", [id.cast_signed()]).expect("inserts");
        app.bank.pass(id, "made").await;
        Ok::<_, BankError>("a row".to_owned())
    };
    let row = current()?.step("insert").within(SqliteStore::within(&tx)).run(insert).await?;
    tx.into_inner().commit().expect("commits");
    app.bank.pass(id, "after").await;
    Ok(row)
}

/// Handler of the messages.
enum Subject {
    Asking(App, String),
    Postgres(tokio_postgres::Client, String, Bank),
    MySql(mysql_async::Conn, String, Bank),
    Sqlite(rusqlite::Connection, Bank),
    PostgresStep(App, tokio_postgres::Client, String),
    MySqlStep(App, mysql_async::Conn, String),
    SqliteStep(App, rusqlite::Connection),
}

/// Connects to the database of the rows, whose schema is the default.
async fn postgres(url: &str, schema: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("connects");
    tokio::spawn(connection);
    client.batch_execute(&format!("SET search_path = {schema}")).await.expect("a schema");
    client
}

/// Opens the file of the rows.
fn sqlite(path: &str) -> rusqlite::Connection {
    let connection = rusqlite::Connection::open(path).expect("opens");
    connection.busy_timeout(Duration::from_secs(60)).expect("waits");
    connection
}

impl Subject {
    async fn open(spec: &str, strategy: &str, bank: Bank) -> Self {
        let words: Vec<&str> = spec.split(' ').collect();
        match (strategy, &words[..]) {
            ("within", ["postgres", url, schema]) => {
                Self::Postgres(postgres(url, schema).await, (*schema).to_owned(), bank)
            }
            ("within", ["mysql", url, table]) => {
                Self::MySql(idem_tests::mysql::raw(url).await, (*table).to_owned(), bank)
            }
            ("within", ["sqlite", path]) => Self::Sqlite(sqlite(path), bank),
            _ => {
                let app = App { store: stores::open(spec, LONG_LEASE).await, bank };
                match (strategy, &words[..]) {
                    ("step_within", ["postgres", url, schema]) => {
                        Self::PostgresStep(app, postgres(url, schema).await, (*schema).to_owned())
                    }
                    ("step_within", ["mysql", url, table]) => {
                        Self::MySqlStep(app, idem_tests::mysql::raw(url).await, (*table).to_owned())
                    }
                    ("step_within", ["sqlite", path]) => Self::SqliteStep(app, sqlite(path)),
                    _ => Self::Asking(app, strategy.to_owned()),
                }
            }
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
                    "step_fail" => observe(step_fail(app, id)).await,
                    "step_reconcile" => observe(step_reconcile(app, id)).await,
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
            Self::MySql(connection, table, bank) => {
                let begun = connection.start_transaction(mysql_async::TxOpts::default()).await.expect("begins");
                let tx = OpenTransaction::new(begun);
                let (result, outcome) = observe(in_mysql(&tx, table, bank, id.cast_signed())).await;
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
            Self::PostgresStep(app, client, schema) => {
                let (result, outcome) = observe(step_in_postgres(app, client, schema, id)).await;
                end(result, &outcome)
            }
            Self::MySqlStep(app, connection, table) => {
                let (result, outcome) = observe(step_in_mysql(app, connection, table, id)).await;
                end(result, &outcome)
            }
            Self::SqliteStep(app, connection) => {
                let (result, outcome) = observe(step_in_sqlite(app, connection, id)).await;
                end(result, &outcome)
            }
        }
    }
}

fn end<E: std::fmt::Debug>(result: Result<String, E>, outcome: &Outcome) -> String {
    let is_in_doubt = outcome.refusal() == Some(Refusal::Interrupted) || outcome.steps_in_doubt() > 0;
    match (outcome.disposition(), result) {
        (Disposition::Ack, Ok(receipt)) => format!("ack {receipt}"),
        (Disposition::Retry { after }, _) => format!("retry {}", after.as_micros()),
        (Disposition::DeadLetter, Err(_)) if is_in_doubt => "person".to_owned(),
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
