//! Records inside of the user's own transaction: with the effect, or not at all.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::{Pin, pin};
use std::process::{Child, Command};
use std::task::Poll;
use std::time::Duration;

use idem_runtime::{
    Attempt, Codec, CodecError, Disposition, Error, InProgress, Json, Key, OnCrash, Outcome, Policy, PostgresStore,
    Reservation, Reserve, SqliteStore, State, Store, StoreErrorKind, Unavailable, current, idempotent, observe,
    record_values, run_within,
};
use idem_tests::postgres::{raw, shared_schema};
use idem_tests::sqlite::{Folder, raw as sqlite};
use rusqlite::{Connection, TransactionBehavior};
use tokio_postgres::{Client, IsolationLevel, Transaction};

const POLICY: Policy = Policy::new(Duration::from_secs(3600));

async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

fn key(name: &str) -> Key {
    Key::new("pay", name).unwrap()
}

// ---- PostgreSQL ------------------------------------------------------------------------------------------------------

/// A schema of its own, with a table of payments beside the records.
struct Bank {
    url: String,
    schema: String,
    store: PostgresStore,
}

impl Bank {
    async fn open() -> Self {
        let (url, schema) = shared_schema();
        let store = PostgresStore::options().schema(&schema).ensure_schema().connect(&url).await.unwrap();
        let bank = Self { url, schema, store };
        bank.client().await.batch_execute("CREATE TABLE payments (name text)").await.unwrap();
        bank
    }

    /// A connection that sees the schema's tables first.
    async fn client(&self) -> Client {
        let client = raw(&self.url).await;
        let schema = self.schema.replace('"', "\"\"");
        client.batch_execute(&format!("SET search_path = \"{schema}\"")).await.unwrap();
        client
    }

    async fn payments(&self) -> i64 {
        self.client().await.query_one("SELECT count(*) FROM payments", &[]).await.unwrap().get(0)
    }

    async fn state(&self, name: &str) -> Option<State> {
        self.store.inspect(&key(name)).await.unwrap().map(|inspection| inspection.record.state)
    }

    /// Pays once for `name`, inside of `tx`.
    async fn pay(&self, tx: &Transaction<'_>, name: &str, policy: Policy) -> (Result<u32, Error>, Outcome) {
        self.run(tx, name, policy, async {
            tx.execute("INSERT INTO payments VALUES ($1)", &[&name]).await.unwrap();
            Ok(current().unwrap().number())
        })
        .await
    }

    async fn run(
        &self,
        tx: &Transaction<'_>,
        name: &str,
        policy: Policy,
        body: impl Future<Output = Result<u32, Error>>,
    ) -> (Result<u32, Error>, Outcome) {
        let operation = PostgresStore::within(tx).schema(&self.schema).operation(Ok(key(name)), policy);
        observe(run_within(operation, record_values::<Json>(), body)).await
    }

    /// Pays in a transaction of its own, and commits.
    async fn pay_and_commit(&self, name: &str) -> (Result<u32, Error>, Outcome) {
        let mut client = self.client().await;
        let tx = client.transaction().await.unwrap();
        let paid = self.pay(&tx, name, POLICY).await;
        tx.commit().await.unwrap();
        paid
    }
}

#[tokio::test]
async fn payment_and_record_commit_together() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    let (paid, outcome) = bank.pay(&tx, "a", POLICY).await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.executed() && outcome.recorded());
    assert_eq!((bank.payments().await, bank.state("a").await), (0, None), "nobody sees it yet");
    // A second call in the same transaction replays it already.
    let (paid, outcome) = bank.pay(&tx, "a", POLICY).await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.replayed());
    tx.commit().await.unwrap();
    assert!(matches!(bank.state("a").await, Some(State::Completed(_))));

    let (paid, outcome) = bank.pay_and_commit("a").await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.replayed());
    assert_eq!(bank.payments().await, 1);
}

#[tokio::test]
async fn a_roll_back_undoes_both_and_frees_the_key() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    bank.pay(&tx, "a", POLICY).await.0.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!((bank.payments().await, bank.state("a").await), (0, None));
    let (paid, outcome) = bank.pay_and_commit("a").await;
    assert_eq!(paid.unwrap(), 1, "the first attempt never was");
    assert!(outcome.executed());
    assert_eq!(bank.payments().await, 1);
}

#[tokio::test]
async fn a_connection_that_dies_takes_the_record_with_it() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    bank.pay(&tx, "a", POLICY).await.0.unwrap();
    let pid: i32 = tx.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    bank.client().await.execute("SELECT pg_terminate_backend($1)", &[&pid]).await.unwrap();
    tx.commit().await.unwrap_err();
    // The server may still be at it.
    let (payment, outcome) = bank.pay_waiting("a", Duration::from_secs(60)).await;
    assert_eq!(payment.unwrap(), 1);
    assert!(outcome.executed());
    assert_eq!(bank.payments().await, 1);
}

impl Bank {
    async fn pay_waiting(&self, name: &str, limit: Duration) -> (Result<u32, Error>, Outcome) {
        let mut client = self.client().await;
        let tx = client.transaction().await.unwrap();
        let paid = self.pay(&tx, name, POLICY.in_progress(InProgress::Wait(limit))).await;
        tx.commit().await.unwrap();
        paid
    }
}

#[tokio::test]
async fn an_error_that_is_committed_all_the_same_frees_the_key() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    let failing = async { Err(Error::MissingKey { scope: "declined".into() }) };
    let (result, outcome) = bank.run(&tx, "a", POLICY, failing).await;
    assert!(matches!(result, Err(Error::MissingKey { .. })) && !outcome.recorded());
    tx.commit().await.unwrap();
    assert_eq!(bank.state("a").await, Some(State::Released));
    assert_eq!(bank.pay_and_commit("a").await.0.unwrap(), 2);
}

#[tokio::test]
async fn a_cancelled_body_that_is_committed_all_the_same_counts_as_an_attempt_that_died() {
    for (on_crash, name) in [(OnCrash::Retry, "retry"), (OnCrash::Fail, "fail")] {
        let bank = Bank::open().await;
        let policy = POLICY.on_crash(on_crash).lease(Duration::from_millis(200));
        let mut client = bank.client().await;
        let tx = client.transaction().await.unwrap();
        {
            let started = Cell::new(false);
            let body = async {
                started.set(true);
                std::future::pending().await
            };
            let mut call = pin!(bank.run(&tx, name, policy, body));
            while !started.get() {
                assert!(poll_once(call.as_mut()).await.is_pending());
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        tx.commit().await.unwrap();
        assert!(matches!(bank.state(name).await, Some(State::Pending { .. })), "nothing was written late");
        tokio::time::sleep(Duration::from_millis(250)).await;
        let (paid, outcome) = {
            let mut client = bank.client().await;
            let tx = client.transaction().await.unwrap();
            let paid = bank.pay(&tx, name, policy).await;
            tx.commit().await.unwrap();
            paid
        };
        match on_crash {
            OnCrash::Retry => assert!(paid.unwrap() == 2 && outcome.took_over()),
            _ => assert!(matches!(paid, Err(Error::Interrupted { attempt: 1, .. })), "{paid:?}"),
        }
    }
}

#[tokio::test]
async fn a_duplicate_that_runs_at_the_same_time_is_rejected_at_once() {
    let bank = Bank::open().await;
    let (mut first, mut second) = (bank.client().await, bank.client().await);
    let tx = first.transaction().await.unwrap();
    bank.pay(&tx, "a", POLICY).await.0.unwrap();

    let other = second.transaction().await.unwrap();
    let (refused, outcome) = bank.pay(&other, "a", POLICY).await;
    assert!(matches!(refused, Err(Error::InProgress { attempt: 1, .. })), "{refused:?}");
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    // Its transaction is as good as before, also for another key.
    assert!(bank.pay(&other, "b", POLICY).await.1.executed());
    other.commit().await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(bank.payments().await, 1);
    assert!(bank.pay_and_commit("a").await.1.executed(), "free again");
}

#[tokio::test]
async fn a_duplicate_waits_for_the_commit_or_the_roll_back() {
    let bank = Bank::open().await;
    for commits in [true, false] {
        let name = if commits { "commits" } else { "rolls back" };
        let mut client = bank.client().await;
        let tx = client.transaction().await.unwrap();
        bank.pay(&tx, name, POLICY).await.0.unwrap();
        let mut second = bank.client().await;
        let other = second.transaction().await.unwrap();
        other.batch_execute("SET LOCAL lock_timeout = '7s'").await.unwrap();
        let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)));
        let waiter: i32 = other.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        let mut waiting = Box::pin(bank.pay(&other, name, policy));
        // Until the server says that it waits.
        let observer = bank.client().await;
        let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = $1";
        while observer.query_one(waits, &[&waiter]).await.unwrap().get::<_, i64>(0) == 0 {
            assert!(poll_once(waiting.as_mut()).await.is_pending());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if commits {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        let (paid, outcome) = waiting.await;
        assert_eq!(paid.unwrap(), 1);
        assert!(outcome.waited());
        let timeout: String = other.query_one("SHOW lock_timeout", &[]).await.unwrap().get(0);
        assert_eq!(timeout, "7s", "the transaction is as it was");
        other.commit().await.unwrap();
        assert_eq!((outcome.replayed(), outcome.executed()), (commits, !commits));
    }
    assert_eq!(bank.payments().await, 2);
}

#[tokio::test]
async fn a_wait_is_bounded_and_leaves_the_transaction_as_it_was() {
    let bank = Bank::open().await;
    let (mut first, mut second) = (bank.client().await, bank.client().await);
    let tx = first.transaction().await.unwrap();
    bank.pay(&tx, "a", POLICY).await.0.unwrap();
    let other = second.transaction().await.unwrap();
    other.batch_execute("SET LOCAL lock_timeout = '7s'").await.unwrap();
    let timeout = async || other.query_one("SHOW lock_timeout", &[]).await.unwrap().get::<_, String>(0);
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_millis(50)));
    let (refused, outcome) = bank.pay(&other, "a", wait).await;
    assert!(matches!(refused, Err(Error::InProgress { .. })) && outcome.waited(), "{refused:?}");
    assert_eq!(timeout().await, "7s");
    tx.commit().await.unwrap();
    let (paid, _) = bank.pay(&other, "a", wait).await;
    assert_eq!(paid.unwrap(), 1);
    assert_eq!(timeout().await, "7s");
    other.commit().await.unwrap();
}

#[tokio::test]
async fn two_replays_at_the_same_time_need_not_wait_for_each_other() {
    let bank = Bank::open().await;
    bank.pay_and_commit("a").await.0.unwrap();
    let (mut first, mut second) = (bank.client().await, bank.client().await);
    let (tx, other) = (first.transaction().await.unwrap(), second.transaction().await.unwrap());
    for tx in [&tx, &other] {
        let (paid, outcome) = bank.pay(tx, "a", POLICY).await;
        assert!(paid.is_ok() && outcome.replayed(), "{paid:?}");
    }
}

#[tokio::test]
async fn what_the_store_has_recorded_is_replayed_in_a_transaction_and_the_other_way_round() {
    let bank = Bank::open().await;
    let operation = || idem_runtime::Operation::new(&bank.store, Ok(key("a")), POLICY);
    let result = idem_runtime::run(operation(), record_values::<Json>(), async { Ok::<u32, Error>(7) }).await;
    assert_eq!(result.unwrap(), 7);
    let (paid, outcome) = bank.pay_and_commit("a").await;
    assert_eq!(paid.unwrap(), 7);
    assert!(outcome.replayed());

    bank.pay_and_commit("b").await.0.unwrap();
    let operation = idem_runtime::Operation::new(&bank.store, Ok(key("b")), POLICY);
    let result = idem_runtime::run(operation, record_values::<Json>(), async { Ok::<u32, Error>(7) }).await;
    assert_eq!(result.unwrap(), 1);
}

#[tokio::test]
async fn a_transaction_that_stays_open_holds_up_its_own_key_only() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    bank.pay(&tx, "0", POLICY).await.0.unwrap();
    // The store itself can't see that record, and waits for it; what is asked in the same moment must not.
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..64 {
        let store = bank.store.clone();
        calls.spawn(async move {
            let operation = idem_runtime::Operation::new(&store, Ok(key(&n.to_string())), POLICY);
            (n, idem_runtime::run(operation, record_values::<Json>(), async { Ok::<u32, Error>(7) }).await)
        });
    }
    for (n, result) in calls.join_all().await {
        match result {
            Ok(7) if n > 0 => {}
            Err(Error::Store { source, .. }) if n == 0 => assert_eq!(source.kind(), StoreErrorKind::Unavailable),
            other => panic!("{n}: {other:?}"),
        }
    }
    tx.commit().await.unwrap();
    assert!(matches!(bank.state("0").await, Some(State::Completed(_))));
}

#[tokio::test]
async fn fingerprints_are_compared_in_a_transaction() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    for (amount, is_same) in [(1, true), (1, true), (2, false)] {
        let operation = PostgresStore::within(&tx).schema(&bank.schema).operation(Ok(key("a")), POLICY);
        let operation = operation.fingerprint(&amount);
        let result = run_within(operation, record_values::<Json>(), async { Ok::<u32, Error>(7) }).await;
        match result {
            Ok(7) if is_same => {}
            Err(Error::FingerprintMismatch { .. }) if !is_same => {}
            other => panic!("{amount}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_statement_that_fails_ends_the_transaction_and_nothing_takes_effect() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    let body = async {
        tx.execute("INSERT INTO payments VALUES ('a')", &[]).await.unwrap();
        tx.execute("INSERT INTO nowhere VALUES (1)", &[]).await.unwrap_err();
        // It does not notice.
        Ok(7)
    };
    let (result, outcome) = bank.run(&tx, "a", POLICY, body).await;
    match result {
        Err(Error::Unrecorded { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted),
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }) && !outcome.recorded());
    let (result, _) = bank.pay(&tx, "b", POLICY).await;
    match result {
        Err(Error::Store { source, started: false, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted),
        other => panic!("{other:?}"),
    }
    tx.commit().await.unwrap();
    assert_eq!((bank.payments().await, bank.state("a").await), (0, None));
}

#[tokio::test]
async fn under_serializable_a_conflict_is_an_error_and_never_a_second_payment() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.build_transaction().isolation_level(IsolationLevel::Serializable).start().await.unwrap();
    // From here on it sees what is there now, and nothing else.
    tx.query("SELECT count(*) FROM payments", &[]).await.unwrap();
    bank.pay_and_commit("a").await.0.unwrap();
    let (result, _) = bank.pay(&tx, "a", POLICY).await;
    match result {
        Err(Error::Store { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted),
        other => panic!("{other:?}"),
    }
    drop(tx);
    assert_eq!(bank.payments().await, 1);
}

#[tokio::test]
async fn a_table_that_is_not_there_is_said_to_be_so() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    let operation = PostgresStore::within(&tx).schema("nowhere").operation(Ok(key("a")), POLICY);
    let result = run_within(operation, record_values::<Json>(), async { Ok::<u32, Error>(7) }).await;
    match result {
        Err(Error::Store { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Misconfigured, "{source}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn inside_of_a_transaction_a_handler_has_an_attempt_and_may_call_others() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = client.transaction().await.unwrap();
    let mut kept: Option<Attempt> = None;
    let (result, _) = bank
        .run(&tx, "outer", POLICY, async {
            let attempt = current().unwrap();
            assert_eq!((attempt.number(), attempt.lease_remaining()), (1, Policy::DEFAULT_LEASE));
            attempt.confirm_lease().await?;
            kept = Some(attempt);
            let (inner, outcome) = Box::pin(bank.pay(&tx, "inner", POLICY)).await;
            assert!(outcome.executed());
            let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)));
            let (own, _) = Box::pin(bank.pay(&tx, "outer", wait)).await;
            assert!(matches!(own, Err(Error::InProgress { attempt: 1, .. })), "not a deadlock: {own:?}");
            inner
        })
        .await;
    assert_eq!(result.unwrap(), 1);
    tx.commit().await.unwrap();
    let kept = kept.unwrap();
    assert!(matches!(kept.confirm_lease().await, Err(Error::LeaseLost { .. })), "the call is over");
    assert_eq!(bank.payments().await, 1);
}

/// The attribute; its future can be spawned.
#[idempotent(key = "{name}", ttl = "1h", store = PostgresStore::within(tx).schema(schema), scope = "pay", fingerprint = (name, 7))]
async fn pay(tx: &Transaction<'_>, schema: &str, name: &str) -> Result<u32, anyhow::Error> {
    tx.execute("INSERT INTO payments VALUES ($1)", &[&name]).await?;
    tokio::task::yield_now().await;
    Ok(7)
}

#[tokio::test]
async fn the_attribute_takes_a_transaction_for_a_store() {
    let bank = Bank::open().await;
    for replayed in [false, true] {
        let (mut client, schema) = (bank.client().await, bank.schema.clone());
        let call = tokio::spawn(async move {
            let tx = client.transaction().await.unwrap();
            let (result, outcome) = observe(pay(&tx, &schema, "a")).await;
            tx.commit().await.unwrap();
            (result.unwrap(), outcome.replayed())
        });
        assert_eq!(call.await.unwrap(), (7, replayed));
    }
    assert_eq!(bank.payments().await, 1);
}

// ---- PostgreSQL through sqlx -----------------------------------------------------------------------------------------

type SqlxTransaction = tokio::sync::Mutex<sqlx::Transaction<'static, sqlx::Postgres>>;

#[idempotent(
    key = "{name}",
    ttl = "1h",
    store = PostgresStore::within_sqlx(tx).schema(schema),
    scope = "pay",
    fingerprint = name,
    in_progress = wait("50ms")
)]
async fn pay_by_sqlx(tx: &SqlxTransaction, schema: &str, name: &str) -> Result<Vec<u8>, anyhow::Error> {
    let insert = sqlx::query("INSERT INTO payments VALUES ($1)").bind(name);
    insert.execute(&mut **tx.lock().await).await?;
    current().expect("inside").confirm_lease().await?;
    Ok(vec![0, 1, 255])
}

#[tokio::test]
async fn a_transaction_of_sqlx_does_the_same() {
    let bank = Bank::open().await;
    let schema = bank.schema.replace('"', "\"\"");
    let pool = sqlx::postgres::PgPoolOptions::new()
        .after_connect(move |connection, _| {
            let path = format!("SET search_path = \"{schema}\"");
            Box::pin(async move { sqlx::Executor::execute(connection, &*path).await.map(|_| ()) })
        })
        .connect(&bank.url)
        .await
        .unwrap();
    let begin = async || SqlxTransaction::new(pool.begin().await.unwrap());

    let tx = begin().await;
    assert_eq!(pay_by_sqlx(&tx, &bank.schema, "a").await.unwrap(), [0, 1, 255]);
    tx.into_inner().rollback().await.unwrap();
    assert_eq!((bank.payments().await, bank.state("a").await), (0, None));

    let tx = begin().await;
    let other = begin().await;
    pay_by_sqlx(&tx, &bank.schema, "a").await.unwrap();
    let (refused, outcome) = observe(pay_by_sqlx(&other, &bank.schema, "a")).await;
    assert!(refused.unwrap_err().to_string().contains("is running"));
    assert!(outcome.waited());
    tx.into_inner().commit().await.unwrap();
    let (paid, outcome) = observe(pay_by_sqlx(&other, &bank.schema, "a")).await;
    assert_eq!(paid.unwrap(), [0, 1, 255]);
    assert!(outcome.replayed());
    other.into_inner().commit().await.unwrap();
    assert_eq!(bank.payments().await, 1);

    // By the other driver, too.
    let operation = idem_runtime::Operation::new(&bank.store, Ok(key("a")), POLICY);
    let result = idem_runtime::run(operation, record_values::<Json>(), async { Ok::<Vec<u8>, Error>(vec![]) }).await;
    assert_eq!(result.unwrap(), [0, 1, 255]);

    let tx = begin().await;
    sqlx::query("SELECT 1 FROM nowhere").execute(&mut **tx.lock().await).await.unwrap_err();
    let error = pay_by_sqlx(&tx, &bank.schema, "b").await.unwrap_err();
    let error = error.downcast::<Error>().unwrap();
    assert!(matches!(&error, Error::Store { source, .. } if source.kind() == StoreErrorKind::Aborted), "{error:?}");
}

// ---- SQLite ----------------------------------------------------------------------------------------------------------

/// A file with a table of payments.
struct Till {
    folder: Folder,
}

impl Till {
    fn new() -> Self {
        let till = Self { folder: Folder::new() };
        till.connection().execute_batch("CREATE TABLE payments (name TEXT)").unwrap();
        till
    }

    fn connection(&self) -> Connection {
        sqlite(&self.folder.file())
    }

    fn payments(&self) -> i64 {
        self.connection().query_row("SELECT count(*) FROM payments", [], |row| row.get(0)).unwrap()
    }

    async fn state(&self, name: &str) -> Option<State> {
        let store = SqliteStore::open(self.folder.file()).await.unwrap();
        store.inspect(&key(name)).await.unwrap().map(|inspection| inspection.record.state)
    }
}

async fn sell(tx: &rusqlite::Transaction<'_>, name: &str, policy: Policy) -> (Result<u32, Error>, Outcome) {
    let operation = SqliteStore::within(tx).operation(Ok(key(name)), policy);
    let body = async {
        tx.execute("INSERT INTO payments VALUES (?1)", [name]).unwrap();
        Ok(current().unwrap().number())
    };
    observe(run_within(operation, record_values::<Json>(), body)).await
}

fn begin(connection: &mut Connection) -> rusqlite::Transaction<'_> {
    connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap()
}

#[tokio::test]
async fn in_sqlite_payment_and_record_commit_together_or_not_at_all() {
    let till = Till::new();
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    assert_eq!(sell(&tx, "a", POLICY).await.0.unwrap(), 1);
    assert!(sell(&tx, "a", POLICY).await.1.replayed());
    drop(tx);
    assert_eq!((till.payments(), till.state("a").await), (0, None), "rolled back");

    let tx = begin(&mut connection);
    assert_eq!(sell(&tx, "a", POLICY).await.0.unwrap(), 1);
    assert_eq!(till.payments(), 0, "nobody sees it yet");
    tx.commit().unwrap();
    assert!(matches!(till.state("a").await, Some(State::Completed(_))));
    let tx = begin(&mut connection);
    let (paid, outcome) = sell(&tx, "a", POLICY).await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.replayed());
    tx.commit().unwrap();
    assert_eq!(till.payments(), 1);
}

#[tokio::test]
async fn in_sqlite_a_duplicate_in_another_transaction_never_pays_again() {
    let till = Till::new();
    // The table is made by whoever comes first.
    SqliteStore::open(till.folder.file()).await.unwrap();
    let (mut first, mut second) = (till.connection(), till.connection());
    second.busy_timeout(Duration::from_millis(20)).unwrap();
    let tx = begin(&mut first);
    sell(&tx, "a", POLICY).await.0.unwrap();
    // Not begun as one that writes, it is told so by the first write.
    let other = second.transaction().unwrap();
    let (refused, outcome) = sell(&other, "a", POLICY).await;
    match refused {
        Err(Error::Store { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted, "{source}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    drop(other);
    tx.commit().unwrap();
    let other = second.transaction().unwrap();
    assert!(sell(&other, "a", POLICY).await.1.replayed());
    drop(other);
    assert_eq!(till.payments(), 1);
}

#[tokio::test]
async fn in_sqlite_the_store_and_transactions_share_records() {
    let till = Till::new();
    let store = SqliteStore::open(till.folder.file()).await.unwrap();
    let mut connection = till.connection();
    let reserved = store
        .reserve(&Reserve {
            key: key("a"),
            owner: store.heartbeats().new_owner(),
            lease: Duration::from_secs(60),
            ttl: Duration::from_secs(60),
            fingerprint: None,
            on_crash: OnCrash::Retry,
            max_attempts: None,
        })
        .await
        .unwrap();
    assert!(matches!(reserved, Reservation::Reserved { .. }));
    let tx = begin(&mut connection);
    let (refused, _) = sell(&tx, "a", POLICY).await;
    assert!(matches!(refused, Err(Error::InProgress { attempt: 1, .. })), "{refused:?}");
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_millis(20)));
    let (refused, outcome) = sell(&tx, "a", wait).await;
    assert!(matches!(refused, Err(Error::InProgress { .. })) && outcome.waited());
    assert!(sell(&tx, "b", POLICY).await.1.executed());
    tx.commit().unwrap();
    assert!(matches!(till.state("b").await, Some(State::Completed(_))));
}

#[tokio::test]
async fn in_sqlite_a_table_of_somebody_else_is_left_alone() {
    let till = Till::new();
    let mut connection = till.connection();
    connection.execute_batch("CREATE TABLE idem_records (key TEXT, mine TEXT)").unwrap();
    let tx = begin(&mut connection);
    let (refused, _) = sell(&tx, "a", POLICY).await;
    match refused {
        Err(Error::Store { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Misconfigured, "{source}"),
        other => panic!("{other:?}"),
    }
    let other = SqliteStore::within(&tx).table("mine").operation(Ok(key("a")), POLICY);
    assert_eq!(run_within(other, record_values::<Json>(), async { Ok::<u32, Error>(7) }).await.unwrap(), 7);
    for name in ["", "a b", "sqlite_x"] {
        let wrong = SqliteStore::within(&tx).table(name).operation(Ok(key("a")), POLICY);
        let result = run_within(wrong, record_values::<Json>(), async { Ok::<u32, Error>(7) }).await;
        assert!(matches!(result, Err(Error::Store { .. })), "`{name}`");
    }
}

#[tokio::test]
async fn in_sqlite_a_transaction_that_is_over_is_noticed() {
    let till = Till::new();
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    let operation = SqliteStore::within(&tx).operation(Ok(key("a")), POLICY);
    let body = async {
        // What SQLite does by itself when the disk is full.
        tx.execute_batch("ROLLBACK").unwrap();
        Ok::<u32, Error>(7)
    };
    match run_within(operation, record_values::<Json>(), body).await {
        Err(Error::Unrecorded { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn in_sqlite_a_result_too_large_for_a_row_ends_the_operation_without_it() {
    let till = Till::new();
    let mut connection = till.connection();
    let policy = POLICY.max_result_bytes(usize::MAX);
    let tx = begin(&mut connection);
    for replays in [false, true] {
        let operation = SqliteStore::within(&tx).operation(Ok(key("a")), policy);
        let (result, outcome) =
            observe(run_within(operation, record_values::<Huge>(), async { Ok::<_, Error>(7) })).await;
        if replays {
            let unavailable =
                matches!(result, Err(Error::ResultUnavailable { reason: Unavailable::TooLarge { bytes: HUGE }, .. }));
            assert!(unavailable && !outcome.executed(), "{result:?}");
        } else {
            assert!(result.is_ok() && outcome.recorded() && !outcome.result_stored());
        }
    }
}

const HUGE: u64 = 1_000_000_000;

/// A codec that needs much room.
struct Huge;

impl Codec for Huge {
    const NAME: &'static str = "huge";

    fn encode<T: serde::Serialize>(_: &T) -> Result<Vec<u8>, CodecError> {
        Ok(vec![0; usize::try_from(HUGE).unwrap()])
    }

    fn decode<T: serde::de::DeserializeOwned>(_: &[u8]) -> Result<T, CodecError> {
        Err("there is none".into())
    }
}

// ---- Processes that die ----------------------------------------------------------------------------------------------

const KEYS: usize = 400;
const RACERS: usize = 7;
const KILLS: usize = 12;

fn ledger(spec: &str, begin: usize) -> Child {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_ledger"), spec, &KEYS.to_string(), &begin.to_string()]);
    command.spawn().expect("a process starts")
}

/// Eight processes, one of which is killed again and again.
async fn race(spec: &str) {
    let mut racers: Vec<Child> = (0..RACERS).map(|n| ledger(spec, n * KEYS / RACERS)).collect();
    for kill in 0..KILLS {
        let mut victim = ledger(spec, kill * KEYS / KILLS);
        tokio::time::sleep(Duration::from_millis(40)).await;
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
    for racer in &mut racers {
        assert!(racer.wait().unwrap().success());
    }
}

fn is_once(counts: &[i64]) {
    assert_eq!(counts.len(), KEYS);
    assert!(counts.iter().all(|count| *count == 1), "exactly once: {counts:?}");
}

#[tokio::test]
async fn in_postgres_processes_that_die_leave_every_effect_exactly_once() {
    let bank = Bank::open().await;
    let client = bank.client().await;
    client.batch_execute("CREATE TABLE effects (n int)").await.unwrap();
    race(&format!("postgres {} {}", bank.url, bank.schema)).await;
    let rows = client.query("SELECT count(*) FROM effects GROUP BY n", &[]).await.unwrap();
    is_once(&rows.iter().map(|row| row.get(0)).collect::<Vec<_>>());
}

#[tokio::test]
async fn in_sqlite_processes_that_die_leave_every_effect_exactly_once() {
    let till = Till::new();
    let connection = till.connection();
    connection.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE effects (n INTEGER)").unwrap();
    let path: &Path = &till.folder.file();
    race(&format!("sqlite {}", path.display())).await;
    let mut counts = connection.prepare("SELECT count(*) FROM effects GROUP BY n").unwrap();
    let counts = counts.query_map([], |row| row.get(0)).unwrap().collect::<Result<Vec<i64>, _>>().unwrap();
    is_once(&counts);
}
