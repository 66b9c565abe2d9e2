//! Records inside the user's own transaction: committed with the effect, or not at all.
#![allow(
    clippy::large_stack_arrays,
    clippy::similar_names,
    clippy::match_same_arms,
    reason = "calls in transactions are large, and the names are those of the cases"
)]
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

#[path = "within/mysql_bank.rs"]
mod mysql_bank;
mod within {
    mod outbox;
    mod steps;
}

use std::cell::Cell;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::FutureExt as _;
use futures::future::join_all;
use idem_runtime::clock::ManualClock;
use idem_runtime::codec::ResultProblem;
use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::{Reservation, ReserveRequest};
use idem_runtime::within::OpenTransaction;
use idem_runtime::{
    Attempt, Codec, CodecError, Disposition, Error, InProgress, Key, MemoryStore, Mode, MySqlStore, OnCrash, Operation,
    Outcome, Policy, PostgresStore, SqliteStore, Store, StoreErrorKind, current, idempotent, observe,
};
use idem_tests::Reopen as _;
use idem_tests::log::Log;
use idem_tests::mysql::raw as raw_mysql;
use idem_tests::polls::{dropped_after, next_round, poll_once};
use idem_tests::postgres::{raw, shared_schema};
use idem_tests::sqlite::{Folder, raw as sqlite};
use rusqlite::{Connection, TransactionBehavior};
use tokio_postgres::{Client, IsolationLevel, Transaction};

use self::mysql_bank::MySqlBank;

type PgTx<'t> = OpenTransaction<Transaction<'t>>;
type SqliteTx<'t> = OpenTransaction<rusqlite::Transaction<'t>>;

const POLICY: Policy = Policy::new(Duration::from_secs(3600));

fn key(name: &str) -> Key {
    Key::new("pay", name).unwrap()
}

// ---- PostgreSQL
// ------------------------------------------------------------------------------------------------------

/// Schema for one test, with a table of payments and the table of records.
struct Bank {
    url: String,
    schema: String,
    store: PostgresStore,
    /// True if the handler records its errors.
    records_errors: bool,
    /// True once a body that never returns has paid.
    hangs: Cell<bool>,
}

impl Bank {
    async fn open() -> Self {
        Self::with_partitions(0).await
    }

    /// Opens a bank with a plain table, and a bank with a table of hash partitions.
    async fn of_each_kind() -> [Self; 2] {
        [Self::with_partitions(0).await, Self::with_partitions(4).await]
    }

    async fn with_partitions(partitions: u16) -> Self {
        let (url, schema) = shared_schema();
        let options = PostgresStore::options().schema(&schema).ensure_schema().partitions(partitions);
        let store = options.connect(&url).await.unwrap();
        let bank = Self { url, schema, store, records_errors: false, hangs: Cell::new(false) };
        bank.client().await.batch_execute("CREATE TABLE payments (name text)").await.unwrap();
        bank
    }

    /// Opens a connection whose search path begins with the schema.
    async fn client(&self) -> Client {
        let client = raw(&self.url).await;
        let schema = self.schema.replace('"', "\"\"");
        client.batch_execute(&format!("SET search_path = \"{schema}\"")).await.unwrap();
        client
    }

    /// Removes the table of the records.
    async fn drop_records(&self) {
        let schema = self.schema.replace('"', "\"\"");
        self.client().await.batch_execute(&format!("DROP TABLE \"{schema}\".records")).await.unwrap();
    }

    async fn payments(&self) -> i64 {
        self.client().await.query_one("SELECT count(*) FROM payments", &[]).await.unwrap().get(0)
    }

    async fn state(&self, name: &str) -> Option<State> {
        self.store.inspect(&key(name)).await.unwrap().map(|inspection| inspection.record.state)
    }

    /// Pays once for `name` in the transaction `tx`.
    async fn pay(&self, tx: &PgTx<'_>, name: &str, policy: Policy) -> (Result<u32, Error>, Outcome) {
        self.run(tx, name, policy, async {
            tx.execute("INSERT INTO payments VALUES ($1)", &[&name]).await.unwrap();
            Ok(current().unwrap().number())
        })
        .await
    }

    async fn run(
        &self,
        tx: &PgTx<'_>,
        name: &str,
        policy: Policy,
        body: impl Future<Output = Result<u32, Error>>,
    ) -> (Result<u32, Error>, Outcome) {
        let operation = PostgresStore::within(tx).schema(&self.schema).operation(Ok(key(name)), policy);
        observe(operation.run(body)).await
    }

    /// Pays in a transaction of its own, and commits it.
    async fn pay_and_commit(&self, name: &str) -> (Result<u32, Error>, Outcome) {
        let mut client = self.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let paid = self.pay(&tx, name, POLICY).await;
        tx.into_inner().commit().await.unwrap();
        paid
    }
}

#[tokio::test]
async fn in_postgres_payment_and_record_commit_together() {
    for bank in Bank::of_each_kind().await {
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let (paid, outcome) = bank.pay(&tx, "a", POLICY).await;
        assert_eq!(paid.unwrap(), 1);
        assert!(outcome.executed() && !outcome.recorded() && outcome.committed().recorded());
        assert_eq!(
            (bank.payments().await, bank.state("a").await),
            (0, None),
            "the open transaction is invisible to others"
        );
        // A second call in the same transaction replays the payment.
        let (paid, outcome) = bank.pay(&tx, "a", POLICY).await;
        assert_eq!(paid.unwrap(), 1);
        assert!(outcome.replayed());
        tx.into_inner().commit().await.unwrap();
        assert!(matches!(bank.state("a").await, Some(State::Completed(_))));

        let (paid, outcome) = bank.pay_and_commit("a").await;
        assert_eq!(paid.unwrap(), 1);
        assert!(outcome.replayed());
        assert_eq!(bank.payments().await, 1);
    }
}

#[tokio::test]
async fn a_rollback_undoes_payment_and_record_and_frees_the_key() {
    for bank in Bank::of_each_kind().await {
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        bank.pay(&tx, "a", POLICY).await.0.unwrap();
        tx.into_inner().rollback().await.unwrap();
        assert_eq!((bank.payments().await, bank.state("a").await), (0, None));
        let (paid, outcome) = bank.pay_and_commit("a").await;
        assert_eq!(paid.unwrap(), 1, "the first attempt never was");
        assert!(outcome.executed());
        assert_eq!(bank.payments().await, 1);
    }
}

#[tokio::test]
async fn a_broken_connection_undoes_payment_and_record() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    bank.pay(&tx, "a", POLICY).await.0.unwrap();
    let pid: i32 = tx.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    bank.client().await.execute("SELECT pg_terminate_backend($1)", &[&pid]).await.unwrap();
    tx.into_inner().commit().await.unwrap_err();
    // The server may still be ending the old transaction.
    let (payment, outcome) = bank.pay_waiting("a", Duration::from_secs(60)).await;
    assert_eq!(payment.unwrap(), 1);
    assert!(outcome.executed());
    assert_eq!(bank.payments().await, 1);
}

impl Bank {
    async fn pay_waiting(&self, name: &str, limit: Duration) -> (Result<u32, Error>, Outcome) {
        let mut client = self.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let paid = self.pay(&tx, name, POLICY.in_progress(InProgress::Wait(limit))).await;
        tx.into_inner().commit().await.unwrap();
        paid
    }
}

/// End of a body in these tests, in a transaction of any driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Succeed,
    Fail,
    /// The body fails because of an SQL statement. In PostgreSQL the failed statement aborts the transaction.
    FailInSql,
    Panic,
    Hang,
}

#[derive(Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Declined(String);

impl From<Error> for Declined {
    fn from(error: Error) -> Self {
        Self(format!("{error:?}"))
    }
}

impl Bank {
    /// Makes a call whose body pays and then ends as `end` says.
    async fn end(&self, tx: &PgTx<'_>, name: &str, policy: Policy, end: End) -> Result<u32, Declined> {
        let body = async {
            tx.execute("INSERT INTO payments VALUES ($1)", &[&name]).await.unwrap();
            match end {
                End::Succeed => Ok(current().unwrap().number()),
                End::Fail => Err(Declined("too poor".into())),
                End::FailInSql => {
                    Err(Declined(tx.execute("SELECT nothing FROM nowhere", &[]).await.unwrap_err().to_string()))
                }
                End::Panic => panic!("too rich"),
                End::Hang => {
                    self.hangs.set(true);
                    std::future::pending().await
                }
            }
        };
        let operation = PostgresStore::within(tx).schema(&self.schema).operation(Ok(key(name)), policy);
        match self.records_errors {
            true => operation.record_errors().run(body).await,
            false => operation.run(body).await,
        }
    }

    /// Makes a call that is dropped while its body runs.
    async fn drop_in_body(&self, tx: &PgTx<'_>, name: &str, policy: Policy) {
        let mut call = Box::pin(self.end(tx, name, policy, End::Hang));
        self.hangs.set(false);
        while !self.hangs.get() {
            assert!(poll_once(call.as_mut()).await.is_pending());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

#[tokio::test]
async fn a_failed_call_whose_error_is_ignored_leaves_no_payment() {
    for end in [End::Fail, End::FailInSql] {
        for on_crash in [OnCrash::Retry, OnCrash::Fail] {
            let bank = Bank::open().await;
            let policy = POLICY.on_crash(on_crash);
            let mut client = bank.client().await;
            let tx = OpenTransaction::new(client.transaction().await.unwrap());
            tx.execute("INSERT INTO payments VALUES ('before')", &[]).await.unwrap();
            for _ in 0..2 {
                bank.end(&tx, "a", policy, end).await.unwrap_err();
            }
            tx.execute("INSERT INTO payments VALUES ('after')", &[]).await.unwrap();
            tx.into_inner().commit().await.unwrap();
            assert_eq!(bank.names().await, ["after", "before"], "{end:?}, {on_crash:?}");
            assert_eq!(bank.state("a").await, Some(State::Released), "an attempt without a result");
            let (paid, outcome) = bank.pay_and_commit("a").await;
            assert_eq!(paid.unwrap(), 3, "attempts are counted");
            assert!(outcome.executed());
        }
    }
}

impl Bank {
    async fn names(&self) -> Vec<String> {
        let rows = self.client().await.query("SELECT name FROM payments ORDER BY name", &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }
}

#[tokio::test]
async fn a_recorded_error_keeps_its_record_and_undoes_the_payment() {
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        let bank = Bank { records_errors: true, ..Bank::open().await };
        let policy = POLICY.on_crash(on_crash);
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let declined = Declined("too poor".into());
        assert_eq!(bank.end(&tx, "a", policy, End::Fail).await.unwrap_err(), declined);
        assert_eq!(bank.end(&tx, "a", policy, End::Succeed).await.unwrap_err(), declined, "replayed already");
        tx.into_inner().commit().await.unwrap();
        assert_eq!(bank.payments().await, 0);
        assert!(matches!(bank.state("a").await, Some(State::Failed(_))));
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        assert_eq!(bank.end(&tx, "a", policy, End::Succeed).await.unwrap_err(), declined);
    }
}

#[tokio::test]
async fn the_work_of_a_call_that_is_dropped_or_panics_is_undone() {
    let lease = Duration::from_millis(200);
    for (on_crash, panics) in
        [(OnCrash::Retry, false), (OnCrash::Retry, true), (OnCrash::Fail, false), (OnCrash::Fail, true)]
    {
        let bank = Bank::open().await;
        let policy = POLICY.on_crash(on_crash).lease(lease);
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        tx.execute("INSERT INTO payments VALUES ('before')", &[]).await.unwrap();
        if panics {
            let call = AssertUnwindSafe(bank.end(&tx, "a", policy, End::Panic)).catch_unwind();
            call.await.unwrap_err();
        } else {
            bank.drop_in_body(&tx, "a", policy).await;
        }
        assert!(bank.pay(&tx, "b", POLICY).await.1.executed(), "the transaction goes on");
        tx.into_inner().commit().await.unwrap();
        assert_eq!(bank.names().await, ["b", "before"], "{on_crash:?}, panics: {panics}");
        if on_crash == OnCrash::Retry {
            assert_eq!(bank.state("a").await, None, "the rollback left no record");
            assert_eq!(bank.pay_and_commit("a").await.0.unwrap(), 1);
        } else {
            assert!(matches!(bank.state("a").await, Some(State::Pending { .. })));
            tokio::time::sleep(lease).await;
            let tx = OpenTransaction::new(client.transaction().await.unwrap());
            let (paid, _) = bank.pay(&tx, "a", policy).await;
            assert!(matches!(paid, Err(Error::Interrupted { attempt: 1, .. })), "{paid:?}");
        }
    }
}

#[tokio::test]
async fn a_call_can_be_dropped_at_every_await() {
    let fail = POLICY.on_crash(OnCrash::Fail);
    for (name, policy, end, records_errors) in [
        ("ok", POLICY, End::Succeed, false),
        ("err", POLICY, End::Fail, false),
        ("recorded", POLICY, End::Fail, true),
        ("fail", fail, End::Succeed, false),
        ("fail err", fail, End::Fail, false),
        ("fail recorded", fail, End::Fail, true),
    ] {
        let bank = Bank { records_errors, ..Bank::open().await };
        let mut client = bank.client().await;
        let mut polls = 0;
        // Each round drops the call at another await, in a transaction of its own.
        for round in 0.. {
            let name = format!("{name} {round}");
            let tx = OpenTransaction::new(client.transaction().await.unwrap());
            let is_over = dropped_after(polls, bank.end(&tx, &name, policy, end), async || {
                // The answer to this statement shows that the server has executed every request of the last poll.
                tx.batch_execute("SELECT 1").await.unwrap_or_default();
                tokio::time::sleep(Duration::from_millis(2)).await;
            })
            .await;
            tx.execute("INSERT INTO payments VALUES ($1)", &[&format!("after {name}")]).await.unwrap();
            tx.into_inner().commit().await.unwrap();
            // The transaction can go on. Its commit contains the payment only together with the record.
            let (state, names) = (bank.state(&name).await, bank.names().await);
            assert!(names.contains(&format!("after {name}")), "{name}: the transaction goes on");
            match (&state, names.contains(&name)) {
                (Some(State::Completed(_)), true) => {}
                (None | Some(State::Released | State::Failed(_)), false) => {}
                (Some(State::Pending { .. }), false) if name.starts_with("fail") => {}
                other => panic!("{name}: {other:?}"),
            }
            if is_over {
                assert_eq!(matches!(state, Some(State::Completed(_))), end == End::Succeed, "{name}");
            }
            let Some(next) = next_round(polls, is_over) else { break };
            assert!(next > 0 || round < 1000, "{name} is never pending");
            polls = next;
        }
    }
}

#[tokio::test]
async fn nested_calls_are_undone_with_their_outer_call() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    for outer_fails in [false, true] {
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let outer = async {
            tx.execute("INSERT INTO payments VALUES ('outer')", &[]).await.unwrap();
            Box::pin(bank.end(&tx, "failed", POLICY, End::FailInSql)).await.unwrap_err();
            Box::pin(bank.end(&tx, "inner", POLICY, End::Succeed)).await.unwrap();
            if outer_fails { Err(Error::NoAttempt) } else { Ok(7) }
        };
        let (result, _) = bank.run(&tx, "outer", POLICY, outer).await;
        assert_eq!(result.is_err(), outer_fails);
        if outer_fails {
            tx.into_inner().commit().await.unwrap();
            assert_eq!(bank.names().await, Vec::<String>::new());
            assert_eq!((bank.state("inner").await, bank.state("failed").await), (None, None));
            assert_eq!(bank.state("outer").await, Some(State::Released));
        } else {
            let names = tx.query("SELECT name FROM payments ORDER BY name", &[]).await.unwrap();
            assert_eq!(names.iter().map(|row| row.get(0)).collect::<Vec<String>>(), ["inner", "outer"]);
            tx.into_inner().rollback().await.unwrap();
        }
    }
}

#[tokio::test]
async fn concurrent_calls_in_one_transaction_run_one_after_the_other() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    let slow = |name: &'static str, end: End| {
        let (bank, tx) = (&bank, &tx);
        async move {
            let body = async {
                tx.execute("INSERT INTO payments VALUES ($1)", &[&name]).await.unwrap();
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                    tx.batch_execute("SELECT 1").await.unwrap();
                }
                if end == End::Fail { Err(Error::NoAttempt) } else { Ok(7) }
            };
            bank.run(tx, name, POLICY, body).await.0.is_ok()
        }
    };
    // If these calls overlapped, the rollback of a failed call would undo the work of other calls since its start.
    let calls = [slow("a", End::Fail), slow("b", End::Succeed), slow("c", End::Fail), slow("d", End::Succeed)];
    assert_eq!(join_all(calls).await, [false, true, false, true]);
    // A call that is dropped while it waits for its turn must delay no other call.
    {
        let mut first = Box::pin(slow("e", End::Succeed));
        let mut second = Box::pin(slow("f", End::Succeed));
        assert!(poll_once(first.as_mut()).await.is_pending());
        assert!(poll_once(second.as_mut()).await.is_pending());
        drop(second);
        assert!(first.await);
    }
    tx.into_inner().commit().await.unwrap();
    assert_eq!(bank.names().await, ["b", "d", "e"]);
    for (name, ended) in [("a", false), ("b", true), ("c", false), ("d", true)] {
        assert_eq!(matches!(bank.state(name).await, Some(State::Completed(_))), ended, "{name}");
    }
}

#[tokio::test]
async fn a_failed_call_in_shadow_mode_undoes_nothing() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    bank.end(&tx, "a", POLICY.mode(Mode::Shadow), End::Fail).await.unwrap_err();
    tx.into_inner().commit().await.unwrap();
    assert_eq!((bank.names().await, bank.state("a").await), (vec!["a".to_owned()], Some(State::Released)));
}

#[tokio::test]
async fn a_lease_that_lapsed_since_the_transaction_began_is_taken_over() {
    for bank in Bank::of_each_kind().await {
        let lease = Duration::from_millis(300);
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let begun: SystemTime = tx.query_one("SELECT now()", &[]).await.unwrap().get(0);
        let died = ReserveRequest::new(key("a"), bank.store.context().new_owner(), lease, Duration::from_secs(3600));
        assert!(matches!(bank.store.reserve(&died).await, Ok(Reservation::Granted { .. })));
        tokio::time::sleep(lease + Duration::from_millis(50)).await;
        let (paid, outcome) = bank.pay(&tx, "a", POLICY).await;
        assert_eq!(paid.unwrap(), 2);
        assert!(outcome.took_over());
        tx.into_inner().commit().await.unwrap();
        // The retention counts from the completion, and not from the start of the transaction.
        let client = bank.client().await;
        let expires: SystemTime = client.query_one("SELECT expires_at FROM records", &[]).await.unwrap().get(0);
        assert!(expires >= begun + Duration::from_secs(3600) + lease, "{:?}", expires.duration_since(begun));
    }
}

#[tokio::test]
async fn a_duplicate_of_an_open_transaction_gets_a_short_pause() {
    let bank = Bank::open().await;
    let (mut first, mut second) = (bank.client().await, bank.client().await);
    let (tx, other) = (
        OpenTransaction::new(first.transaction().await.unwrap()),
        OpenTransaction::new(second.transaction().await.unwrap()),
    );
    bank.pay(&tx, "a", POLICY).await.0.unwrap();
    let (refused, outcome) = bank.pay(&other, "a", POLICY).await;
    assert!(matches!(refused, Err(Error::InProgress { .. })), "{refused:?}");
    match outcome.disposition() {
        Disposition::Retry { after } => assert!(after <= Duration::from_millis(100), "{after:?}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_pauses_of_duplicates_of_an_open_transaction_grow() {
    let bank = Bank::open().await;
    let mut first = bank.client().await;
    let tx = OpenTransaction::new(first.transaction().await.unwrap());
    bank.pay(&tx, "of an open one", POLICY).await.0.unwrap();
    let mut pauses = Vec::new();
    for n in 0..6 {
        let refused = if n % 2 == 0 {
            let mut client = bank.client().await;
            let other = OpenTransaction::new(client.transaction().await.unwrap());
            bank.pay(&other, "of an open one", POLICY).await.0
        } else {
            let operation = idem_runtime::Operation::new(&bank.store, Ok(key("of an open one")), POLICY);
            operation.run(async { Ok::<u32, Error>(7) }).await
        };
        match refused {
            Err(Error::InProgress { retry_after, .. }) => pauses.push(retry_after),
            other => panic!("{other:?}"),
        }
    }
    assert!(pauses.is_sorted_by(|before, after| before < after), "{pauses:?}");
}

#[tokio::test]
async fn a_call_in_a_transaction_waits_for_no_locked_record() {
    for bank in Bank::of_each_kind().await {
        bank.pay_and_commit("a").await.0.unwrap();
        assert_eq!(bank.store.reopen(&key("a"), 1).await.unwrap(), idem_runtime::store::Verdict::Applied);
        let mut holder = bank.client().await;
        let holding = OpenTransaction::new(holder.transaction().await.unwrap());
        holding.execute("SELECT FROM records FOR UPDATE", &[]).await.unwrap();
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let (refused, _) = bank.pay(&tx, "a", POLICY).await;
        match refused {
            Err(Error::Store { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted),
            other => panic!("{other:?}"),
        }
        holding.into_inner().rollback().await.unwrap();
        assert_eq!(bank.pay(&tx, "a", POLICY).await.0.unwrap(), 2, "the transaction goes on");
    }
}

#[tokio::test]
async fn an_operation_whose_result_the_server_refuses_ends_without_its_result() {
    let bank = Bank::open().await;
    let client = bank.client().await;
    // This trigger makes the server refuse the result with the error code of a result that is too large.
    client
        .batch_execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF octet_length(NEW.result) > 1000000 THEN RAISE 'too large' USING ERRCODE = '54000'; END IF; RETURN NEW; \
             END $$; CREATE TRIGGER refuse BEFORE UPDATE ON records FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .await
        .unwrap();
    let policy = POLICY.max_result_bytes(usize::MAX);
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    let operation = PostgresStore::within(&tx).schema(&bank.schema).operation(Ok(key("a")), policy);
    let body = async {
        tx.execute("INSERT INTO payments VALUES ('a')", &[]).await.unwrap();
        Ok::<_, Error>("x".repeat(2_000_000))
    };
    let (result, outcome) = observe(operation.run(body)).await;
    tx.into_inner().commit().await.unwrap();
    let outcome = outcome.committed();
    assert!(result.is_ok() && outcome.recorded() && !outcome.result_stored(), "{outcome:?}");
    assert_eq!(bank.payments().await, 1);
    assert!(matches!(bank.state("a").await, Some(State::Completed(StoredResult::TooLarge { .. }))));
    // Outside of a user's transaction, too, the store records the completion without the result.
    let operation = idem_runtime::Operation::new(&bank.store, Ok(key("b")), policy);
    let body = async { Ok::<_, Error>("x".repeat(2_000_000)) };
    let (result, outcome) = observe(operation.run(body)).await;
    assert!(result.is_ok() && outcome.recorded() && !outcome.result_stored(), "{outcome:?}");
    assert!(matches!(bank.state("b").await, Some(State::Completed(StoredResult::TooLarge { .. }))));
}

#[tokio::test]
async fn a_record_made_in_a_transaction_names_its_holder() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    let within = PostgresStore::within(&tx).schema(&bank.schema);
    let nameless = within.operation(Ok(key("nameless")), POLICY).run(async { Ok::<_, Error>(1) });
    nameless.await.unwrap();
    let named = PostgresStore::within(&tx).schema(&bank.schema).holder("billing");
    let named = named.operation(Ok(key("named")), POLICY).run(async { Ok::<_, Error>(1) });
    observe(named).traceparent(TRACE.parse().ok()).await.0.unwrap();
    tx.into_inner().commit().await.unwrap();
    for (name, holder) in [("nameless", None), ("named", Some("billing"))] {
        tells(&bank.store, name, holder).await;
    }
}

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Checks the provenance of the record of `name`, which this process has made. If `holder` is `Some`, it must be the
/// holder name of the store handle, and the record must have the trace of the call.
async fn tells(store: &dyn Store, name: &str, holder: Option<&str>) {
    let found = store.inspect(&key(name)).await.unwrap().unwrap();
    let told = found.holder().unwrap();
    assert_eq!((told.process(), told.name()), (Some(std::process::id()), holder));
    assert_eq!(Some(told.host()), store.context().holder().as_str().split('/').next(), "{name}");
    assert_eq!(found.traceparent().map(|trace| trace.to_string()).as_deref(), holder.map(|_| TRACE), "{name}");
    for ago in [found.first_seen, found.began] {
        assert!(ago.is_some_and(|ago| ago < Duration::from_secs(600)), "{name}: {ago:?}");
    }
}

#[tokio::test]
async fn child_keys_in_a_transaction_equal_those_of_the_store_with_its_namespace() {
    let bank = Bank::open().await;
    let options = PostgresStore::options().schema(&bank.schema);
    let named = options.clone().namespace("shop").connect(&bank.url).await.unwrap();
    assert_eq!((named.namespace(), named.upkeep().namespace(), bank.store.namespace()), ("shop", "shop", ""));
    let child = async || Ok::<_, Error>(current().unwrap().child_key("charge"));
    let mut keys = Vec::new();
    for store in [&bank.store, &named] {
        let operation = idem_runtime::Operation::new(store, Ok(key("a")), POLICY.mode(Mode::Shadow));
        keys.push(operation.run(child()).await.unwrap());
    }
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    for namespace in ["", "shop"] {
        let within = PostgresStore::within(&tx).schema(&bank.schema).namespace(namespace);
        let operation = within.operation(Ok(key("a")), POLICY.mode(Mode::Shadow));
        keys.push(operation.run(child()).await.unwrap());
    }
    assert_eq!(keys[..2], keys[2..]);
    assert_ne!(keys[0], keys[1]);
}

#[tokio::test]
async fn a_concurrent_duplicate_is_rejected_immediately() {
    for bank in Bank::of_each_kind().await {
        let (mut first, mut second) = (bank.client().await, bank.client().await);
        let tx = OpenTransaction::new(first.transaction().await.unwrap());
        bank.pay(&tx, "a", POLICY).await.0.unwrap();

        let other = OpenTransaction::new(second.transaction().await.unwrap());
        let (refused, outcome) = bank.pay(&other, "a", POLICY).await;
        assert!(matches!(refused, Err(Error::InProgress { attempt: 1, .. })), "{refused:?}");
        assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
        // The other transaction remains usable, for this key and for other keys.
        assert!(bank.pay(&other, "b", POLICY).await.1.executed());
        other.into_inner().commit().await.unwrap();
        tx.into_inner().rollback().await.unwrap();
        assert_eq!(bank.payments().await, 1);
        assert!(bank.pay_and_commit("a").await.1.executed(), "free again");
    }
}

#[tokio::test]
async fn a_duplicate_in_another_transaction_waits_for_the_commit_or_the_rollback() {
    let bank = Bank::open().await;
    for commits in [true, false] {
        let name = if commits { "commits" } else { "rolls back" };
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        bank.pay(&tx, name, POLICY).await.0.unwrap();
        let mut second = bank.client().await;
        let other = OpenTransaction::new(second.transaction().await.unwrap());
        other.batch_execute("SET LOCAL lock_timeout = '7s'").await.unwrap();
        let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)));
        let waiter: i32 = other.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        let mut waiting = Box::pin(bank.pay(&other, name, policy));
        // Poll the call until the server reports that it waits.
        let observer = bank.client().await;
        let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = $1";
        while observer.query_one(waits, &[&waiter]).await.unwrap().get::<_, i64>(0) == 0 {
            assert!(poll_once(waiting.as_mut()).await.is_pending());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if commits {
            tx.into_inner().commit().await.unwrap();
        } else {
            tx.into_inner().rollback().await.unwrap();
        }
        let (paid, outcome) = waiting.await;
        assert_eq!(paid.unwrap(), 1);
        assert!(outcome.waited());
        let timeout: String = other.query_one("SHOW lock_timeout", &[]).await.unwrap().get(0);
        assert_eq!(timeout, "7s", "the settings of the transaction have not changed");
        other.into_inner().commit().await.unwrap();
        assert_eq!((outcome.replayed(), outcome.executed()), (commits, !commits));
    }
    assert_eq!(bank.payments().await, 2);
}

#[tokio::test]
async fn a_transaction_is_usable_after_a_bounded_wait_for_another_transaction() {
    let bank = Bank::open().await;
    let (mut first, mut second) = (bank.client().await, bank.client().await);
    let tx = OpenTransaction::new(first.transaction().await.unwrap());
    bank.pay(&tx, "a", POLICY).await.0.unwrap();
    let other = OpenTransaction::new(second.transaction().await.unwrap());
    other.batch_execute("SET LOCAL lock_timeout = '7s'").await.unwrap();
    let timeout = async || other.query_one("SHOW lock_timeout", &[]).await.unwrap().get::<_, String>(0);
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_millis(50)));
    let (refused, outcome) = bank.pay(&other, "a", wait).await;
    assert!(matches!(refused, Err(Error::InProgress { .. })) && outcome.waited(), "{refused:?}");
    assert_eq!(timeout().await, "7s");
    tx.into_inner().commit().await.unwrap();
    let (paid, _) = bank.pay(&other, "a", wait).await;
    assert_eq!(paid.unwrap(), 1);
    assert_eq!(timeout().await, "7s");
    other.into_inner().commit().await.unwrap();
}

#[tokio::test]
async fn concurrent_replays_in_two_transactions_do_not_wait_for_each_other() {
    let bank = Bank::open().await;
    bank.pay_and_commit("a").await.0.unwrap();
    let (mut first, mut second) = (bank.client().await, bank.client().await);
    let (tx, other) = (
        OpenTransaction::new(first.transaction().await.unwrap()),
        OpenTransaction::new(second.transaction().await.unwrap()),
    );
    for tx in [&tx, &other] {
        let (paid, outcome) = bank.pay(tx, "a", POLICY).await;
        assert!(paid.is_ok() && outcome.replayed(), "{paid:?}");
    }
}

#[tokio::test]
async fn results_of_the_store_and_of_transactions_replay_each_other() {
    for bank in Bank::of_each_kind().await {
        let operation = || idem_runtime::Operation::new(&bank.store, Ok(key("a")), POLICY);
        let result = operation().run(async { Ok::<u32, Error>(7) }).await;
        assert_eq!(result.unwrap(), 7);
        let (paid, outcome) = bank.pay_and_commit("a").await;
        assert_eq!(paid.unwrap(), 7);
        assert!(outcome.replayed());

        bank.pay_and_commit("b").await.0.unwrap();
        let operation = idem_runtime::Operation::new(&bank.store, Ok(key("b")), POLICY);
        let result = operation.run(async { Ok::<u32, Error>(7) }).await;
        assert_eq!(result.unwrap(), 1);
    }
}

/// Awaits `work`, and panics if a session of the server waits for the transaction of `pid` meanwhile.
async fn without_waiting_for<T>(bank: &Bank, pid: i32, work: impl Future<Output = T>) -> T {
    let watcher = bank.client().await;
    let watch = async {
        loop {
            let waits = "SELECT query FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))";
            let waiting = watcher.query(waits, &[&pid]).await.unwrap();
            assert!(waiting.is_empty(), "waits for the open transaction: {}", waiting[0].get::<_, String>(0));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        done = work => done,
        () = watch => unreachable!("the watching future never ends"),
    }
}

/// Invariant L6 of ARCHITECTURE.md, for a key whose record is inserted and not committed: other keys of the same
/// batches are reserved, finished and replayed without waiting, and calls for the key itself get `InProgress`.
#[tokio::test]
async fn a_transaction_that_stays_open_holds_up_its_own_key_only() {
    for bank in Bank::of_each_kind().await {
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        bank.pay(&tx, "0", POLICY).await.0.unwrap();
        let pid: i32 = tx.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        // Calls for the key of the open transaction and for 63 other keys share batches.
        let all = async || {
            let mut calls = tokio::task::JoinSet::new();
            for n in 0..64 {
                let store = bank.store.clone();
                calls.spawn(async move {
                    let operation = idem_runtime::Operation::new(&store, Ok(key(&n.to_string())), POLICY);
                    (n, operation.run(async { Ok::<u32, Error>(7) }).await)
                });
            }
            calls.join_all().await
        };
        without_waiting_for(&bank, pid, async {
            for _ in 0..4 {
                for (n, result) in all().await {
                    match result {
                        Ok(7) if n > 0 => {}
                        Err(Error::InProgress { .. }) if n == 0 => {}
                        other => panic!("{n}: {other:?}"),
                    }
                }
            }
            // A call for the key alone, and a duplicate that waits, get `InProgress`, too.
            let waits = POLICY.in_progress(InProgress::Wait(Duration::from_millis(300)));
            for policy in [POLICY, waits] {
                let alone = idem_runtime::Operation::new(&bank.store, Ok(key("0")), policy);
                let result = alone.run(async { Ok::<u32, Error>(7) }).await;
                assert!(matches!(result, Err(Error::InProgress { .. })), "{result:?}");
            }
        })
        .await;
        // After the commit, a call replays the payment.
        tx.into_inner().commit().await.unwrap();
        assert!(matches!(bank.state("0").await, Some(State::Completed(_))));
        for (n, result) in all().await {
            assert_eq!(result.unwrap(), if n == 0 { 1 } else { 7 });
        }
    }
}

#[tokio::test]
async fn fingerprints_are_compared_in_a_transaction() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    for (amount, is_same) in [(1, true), (1, true), (2, false)] {
        let operation = PostgresStore::within(&tx).schema(&bank.schema).operation(Ok(key("a")), POLICY);
        let operation = operation.fingerprint(&amount);
        let result = operation.run(async { Ok::<u32, Error>(7) }).await;
        match result {
            Ok(7) if is_same => {}
            Err(Error::FingerprintMismatch { .. }) if !is_same => {}
            other => panic!("{amount}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn an_sql_error_that_a_body_ignores_undoes_only_that_body() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    let body = async {
        tx.execute("INSERT INTO payments VALUES ('a')", &[]).await.unwrap();
        tx.execute("INSERT INTO nowhere VALUES (1)", &[]).await.unwrap_err();
        // The body ignores the failed statement.
        Ok(7)
    };
    let (result, outcome) = bank.run(&tx, "a", POLICY, body).await;
    match result {
        Err(Error::Unrecorded { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted),
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }) && !outcome.recorded());
    bank.pay(&tx, "b", POLICY).await.0.unwrap();
    tx.into_inner().commit().await.unwrap();
    assert_eq!((bank.names().await, bank.state("a").await), (vec!["b".to_owned()], None));
}

#[tokio::test]
async fn in_an_aborted_transaction_no_body_runs() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    tx.execute("INSERT INTO nowhere VALUES (1)", &[]).await.unwrap_err();
    for _ in 0..2 {
        let (result, _) = bank.pay(&tx, "b", POLICY).await;
        match result {
            Err(Error::Store { source, started: false, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted),
            other => panic!("{other:?}"),
        }
    }
    tx.into_inner().commit().await.unwrap();
    assert_eq!((bank.payments().await, bank.state("b").await), (0, None));
}

#[tokio::test]
async fn under_serializable_a_conflict_is_an_error_and_never_a_second_payment() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(
        client.build_transaction().isolation_level(IsolationLevel::Serializable).start().await.unwrap(),
    );
    // The first query of the transaction fixes its snapshot, so that the transaction sees no later changes.
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
async fn a_missing_table_of_records_is_an_error_that_names_the_table() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    let operation = PostgresStore::within(&tx).schema("nowhere").operation(Ok(key("a")), POLICY);
    let result = operation.run(async { Ok::<u32, Error>(7) }).await;
    match result {
        Err(Error::Store { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Misconfigured, "{source}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_handler_in_a_transaction_has_an_attempt_and_may_call_other_handlers() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
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
    tx.into_inner().commit().await.unwrap();
    let kept = kept.unwrap();
    assert!(matches!(kept.confirm_lease().await, Err(Error::LeaseLost { .. })), "the call is over");
    assert_eq!(bank.payments().await, 1);
}

/// Handler made by the attribute. Its future is `Send`, so that a test can spawn it.
#[idempotent(key = "{name}", ttl = "1h", store = PostgresStore::within(tx).schema(schema), scope = shared("pay"), fingerprint = (name, 7))]
async fn pay(tx: &PgTx<'_>, schema: &str, name: &str) -> Result<u32, Box<dyn std::error::Error + Send + Sync>> {
    tx.execute("INSERT INTO payments VALUES ($1)", &[&name]).await?;
    tokio::task::yield_now().await;
    Ok(7)
}

#[tokio::test]
async fn the_attribute_accepts_a_transaction_as_its_store() {
    let bank = Bank::open().await;
    for replayed in [false, true] {
        let (mut client, schema) = (bank.client().await, bank.schema.clone());
        let call = tokio::spawn(async move {
            let tx = OpenTransaction::new(client.transaction().await.unwrap());
            let (result, outcome) = observe(pay(&tx, &schema, "a")).await;
            tx.into_inner().commit().await.unwrap();
            (result.unwrap(), outcome.replayed())
        });
        assert_eq!(call.await.unwrap(), (7, replayed));
    }
    assert_eq!(bank.payments().await, 1);
}

// ---- Commits, and the dispositions of messages
// ------------------------------------------------------------------------

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Drops `call` before its end, while `audit` waits for the lock of its transaction. Returns the error of this.
async fn drop_beside_waiting_code(
    call: impl Future<Output = Result<u32, AnyError>>,
    audit: impl Future<Output = ()>,
) -> Result<u32, AnyError> {
    let audit = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        audit.await;
        Ok(())
    };
    let check = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Err::<(), AnyError>("not allowed".into())
    };
    // Dropped in reverse: the call before the code that waits.
    futures::try_join!(audit, call, check).map(|((), paid, ())| paid)
}

fn is_retry(outcome: &Outcome) -> bool {
    matches!(outcome.disposition(), Disposition::Retry { after } if after > Duration::ZERO)
}

#[tokio::test]
async fn an_outcome_is_pending_until_its_transaction_is_committed() {
    let bank = Bank::open().await;
    for replayed in [false, true] {
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let (_, outcome) = bank.pay(&tx, "a", POLICY).await;
        assert_eq!((outcome.is_pending_commit(), outcome.replayed()), (!replayed, replayed), "a replay is committed");
        assert_eq!(is_retry(&outcome), !replayed, "{outcome:?}");
        tx.into_inner().commit().await.unwrap();
        let outcome = outcome.committed();
        assert!(!outcome.is_pending_commit());
        assert_eq!(outcome.disposition(), Disposition::Ack);
    }
}

impl Bank {
    /// Adds a constraint that is checked at the commit: no name is paid twice.
    async fn checks_at_commit(&self) {
        let unique = "ALTER TABLE payments ADD UNIQUE (name) DEFERRABLE INITIALLY DEFERRED";
        self.client().await.batch_execute(unique).await.unwrap();
    }
}

#[tokio::test]
async fn a_commit_that_is_refused_is_never_acknowledged() {
    let bank = Bank::open().await;
    bank.checks_at_commit().await;
    bank.client().await.batch_execute("INSERT INTO payments VALUES ('a')").await.unwrap();
    for kills in [false, true] {
        // Case 1: a transaction that the user begins. The delivery fails because the commit fails.
        let mut client = bank.client().await;
        let (result, outcome) = observe(async {
            let tx = OpenTransaction::new(client.transaction().await?);
            bank.pay(&tx, "a", POLICY).await.0?;
            if kills {
                kill(&bank, &tx).await;
            }
            tx.into_inner().commit().await?;
            Ok::<_, AnyError>(())
        })
        .await;
        assert!(result.is_err() && is_retry(&outcome), "{result:?}, {outcome:?}");
        // Case 2: the outcome of the call alone. Before the commit, its disposition is a retry.
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let (paid, outcome) = bank.pay_waiting_in(&tx, "a").await;
        assert!(paid.is_ok() && is_retry(&outcome), "{paid:?}, {outcome:?}");
        drop(tx);
        // Case 3: `transact`.
        let mut client = bank.client().await;
        let (result, outcome) = PostgresStore::transact(&mut client, async |tx| {
            let paid = bank.pay_waiting_in(tx, "a").await.0?;
            if kills {
                kill(&bank, tx).await;
            }
            Ok::<_, AnyError>(paid)
        })
        .await;
        assert!(result.is_err() && is_retry(&outcome) && !outcome.recorded(), "{result:?}, {outcome:?}");
        // The attempt counts, because the library records it after the rollback, in a separate transaction.
        assert_eq!(bank.state("a").await, Some(State::Released));
    }
    assert_eq!(bank.payments().await, 1);
}

/// Ends the server session of a transaction.
async fn kill(bank: &Bank, tx: &PgTx<'_>) {
    let pid: i32 = tx.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let other = bank.client().await;
    other.execute("SELECT pg_terminate_backend($1, 10000)", &[&pid]).await.unwrap();
}

impl Bank {
    /// Pays in `tx`. If another transaction holds the key, waits until that transaction has ended.
    async fn pay_waiting_in(&self, tx: &PgTx<'_>, name: &str) -> (Result<u32, Error>, Outcome) {
        self.pay(tx, name, POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)))).await
    }
}

#[tokio::test]
async fn an_error_after_a_successful_handler_is_never_acknowledged() {
    let bank = Bank::open().await;
    for sees_replay in [false, true] {
        let mut client = bank.client().await;
        let (result, outcome) = PostgresStore::transact(&mut client, async |tx| {
            bank.pay(tx, "a", POLICY).await.0?;
            Err::<(), AnyError>("the outbox is full".into())
        })
        .await;
        assert_eq!(result.unwrap_err().to_string(), "the outbox is full");
        assert!(is_retry(&outcome), "{outcome:?}");
        assert_eq!(outcome.replayed(), sees_replay);
        if !sees_replay {
            assert_eq!((bank.payments().await, bank.state("a").await), (0, Some(State::Released)), "rolled back");
            bank.pay_and_commit("a").await.0.unwrap();
        }
    }
    assert_eq!(bank.payments().await, 1);
}

#[tokio::test]
async fn a_statement_that_failed_without_notice_is_never_committed() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let (result, outcome) = PostgresStore::transact(&mut client, async |tx| {
        let paid = bank.pay(tx, "a", POLICY).await.0?;
        tx.execute("INSERT INTO nowhere VALUES (1)", &[]).await.unwrap_err();
        Ok::<_, AnyError>(paid)
    })
    .await;
    // The server answers `COMMIT` with `ROLLBACK`, and the driver treats this answer as success.
    assert!(result.is_err() && is_retry(&outcome), "{result:?}, {outcome:?}");
    assert_eq!((bank.payments().await, bank.state("a").await), (0, Some(State::Released)));
}

#[tokio::test]
async fn a_transaction_is_begun_committed_and_acknowledged_by_the_library() {
    let bank = Bank::open().await;
    for replayed in [false, true] {
        let (url, schema) = (bank.url.clone(), bank.schema.clone());
        // The delivery runs in a spawned task.
        let delivery = tokio::spawn(async move {
            let mut client = raw(&url).await;
            let path = format!("SET search_path = \"{}\"", schema.replace('"', "\"\""));
            client.batch_execute(&path).await.unwrap();
            let name = "a".to_owned();
            PostgresStore::transact(&mut client, async |tx| pay(tx, &schema, &name).await).await
        });
        let (paid, outcome) = delivery.await.unwrap();
        assert_eq!(paid.unwrap(), 7);
        assert_eq!((outcome.replayed(), outcome.disposition()), (replayed, Disposition::Ack));
        assert!(outcome.recorded() && !outcome.is_pending_commit());
    }
    assert_eq!(bank.payments().await, 1);
    // The deliveries use pooled connections: a working one, and one whose server session has ended.
    let config: tokio_postgres::Config = bank.url.parse().unwrap();
    let manager = deadpool_postgres::Manager::new(config, tokio_postgres::NoTls);
    let pool = deadpool_postgres::Pool::builder(manager).build().unwrap();
    let mut client = pool.get().await.unwrap();
    let (paid, outcome) = PostgresStore::transact(&mut client, async |tx| pay(tx, &bank.schema, "a").await).await;
    assert!(paid.is_ok() && outcome.disposition() == Disposition::Ack, "{paid:?}");
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    bank.client().await.execute("SELECT pg_terminate_backend($1, 10000)", &[&pid]).await.unwrap();
    let (paid, outcome) = PostgresStore::transact(&mut client, async |tx| pay(tx, &bank.schema, "a").await).await;
    assert!(paid.is_err() && is_retry(&outcome) && !outcome.observed(), "{paid:?}");
}

#[tokio::test]
async fn a_recorded_error_is_committed_although_all_other_work_of_the_transaction_is_rolled_back() {
    let bank = Bank { records_errors: true, ..Bank::open().await };
    for replayed in [false, true] {
        let mut client = bank.client().await;
        let (result, outcome) = PostgresStore::transact(&mut client, async |tx| {
            tx.execute("INSERT INTO payments VALUES ('before')", &[]).await?;
            bank.end(tx, "a", POLICY, End::Fail).await.map_err(|declined| declined.0.into())
        })
        .await;
        let result: Result<u32, AnyError> = result;
        assert_eq!(result.unwrap_err().to_string(), "too poor");
        assert_eq!((outcome.disposition(), outcome.replayed()), (Disposition::DeadLetter, replayed));
        assert!(outcome.recorded());
        assert!(matches!(bank.state("a").await, Some(State::Failed(_))));
    }
    assert_eq!(bank.payments().await, 0);
}

#[tokio::test]
async fn a_transaction_that_conflicts_with_another_transaction_is_retried() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    client.batch_execute("SET default_transaction_isolation = 'repeatable read'").await.unwrap();
    let tries = Cell::new(0);
    // A statement of the library finds that the record has changed since the snapshot.
    let (paid, outcome) = PostgresStore::transact(&mut client, async |tx| {
        tries.set(tries.get() + 1);
        tx.query("SELECT count(*) FROM payments", &[]).await?;
        if tries.get() == 1 {
            bank.pay_and_commit("a").await.0?;
        }
        Ok::<_, AnyError>(bank.pay(tx, "a", POLICY).await.0?)
    })
    .await;
    assert_eq!((paid.unwrap(), tries.get()), (1, 2));
    assert!(outcome.replayed() && outcome.disposition() == Disposition::Ack, "{outcome:?}");
    // Under SERIALIZABLE the commit finds the conflict, and the repetitions must end.
    client.batch_execute("SET default_transaction_isolation = 'serializable'").await.unwrap();
    for always in [false, true] {
        tries.set(0);
        let name = format!("b{always}");
        let (paid, outcome) = PostgresStore::transact(&mut client, async |tx| {
            tries.set(tries.get() + 1);
            tx.query("SELECT count(*) FROM payments", &[]).await?;
            let paid = bank.pay(tx, &name, POLICY).await.0?;
            if always || tries.get() == 1 {
                let mut other = bank.client().await;
                let meanwhile = OpenTransaction::new(
                    other.build_transaction().isolation_level(IsolationLevel::Serializable).start().await?,
                );
                meanwhile.query("SELECT count(*) FROM payments", &[]).await?;
                meanwhile.execute("INSERT INTO payments VALUES ('meanwhile')", &[]).await?;
                meanwhile.into_inner().commit().await?;
            }
            Ok::<_, AnyError>(paid)
        })
        .await;
        if always {
            assert!(paid.is_err() && is_retry(&outcome), "{paid:?}, {outcome:?}");
            assert_eq!(tries.get(), 5);
        } else {
            assert_eq!((paid.unwrap(), tries.get(), outcome.disposition()), (1, 2, Disposition::Ack));
        }
    }
    assert_eq!(bank.names().await.iter().filter(|name| name.starts_with('b')).count(), 1);
}

#[tokio::test]
async fn a_transaction_of_the_library_that_is_dropped_is_rolled_back() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    {
        let work = async |tx: &PgTx<'_>| bank.end(tx, "a", POLICY, End::Hang).await.map_err(|it| it.0.into());
        let mut delivery = Box::pin(PostgresStore::transact::<u32, AnyError, _>(&mut client, work));
        while !bank.hangs.get() {
            assert!(poll_once(delivery.as_mut()).await.is_pending());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    let (paid, outcome) =
        PostgresStore::transact(&mut client, async |tx| Ok::<_, AnyError>(bank.pay(tx, "a", POLICY).await.0?)).await;
    assert_eq!((paid.unwrap(), outcome.disposition()), (1, Disposition::Ack));
    assert_eq!(bank.payments().await, 1);
}

/// Checks that the error of a call, and the log, name the command that creates the missing table.
fn tells_of_the_table(error: &Error, log: &str, place: &str) {
    assert!(error.is_misconfigured() && matches!(error, Error::Store { .. }), "{place}: {error:?}");
    let answer = std::error::Error::source(error).expect("the answer of the store").to_string();
    assert!(error.to_string().contains("the body did not run"), "{place}: {error}");
    for text in [error.to_string(), answer, log.to_owned()] {
        assert!(text.contains("`idem schema migrate` creates"), "{place}: {text}");
        assert!(!text.contains("does not answer"), "{place}: {text}");
    }
}

#[tokio::test]
async fn the_error_for_a_missing_table_names_the_command_that_creates_it() {
    let bank = Bank::open().await;
    bank.drop_records().await;
    let log = Log::start();
    let mut client = bank.client().await;
    let work = async |tx: &PgTx<'_>| bank.pay(tx, "a", POLICY).await.0.map_err(AnyError::from);
    let (paid, outcome) = PostgresStore::transact(&mut client, work).await;
    let refused = paid.unwrap_err().downcast::<Error>().expect("an error of the library");
    tells_of_the_table(&refused, &log.end(), "transact");
    assert!(is_retry(&outcome), "{outcome:?}");

    let log = Log::start();
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    let refused = bank.pay(&tx, "a", POLICY).await.0.unwrap_err();
    tells_of_the_table(&refused, &log.end(), "a transaction of the user");

    let log = Log::start();
    let operation = Operation::new(&bank.store, Ok(key("a")), POLICY);
    let refused = operation.run(async { Ok::<u32, Error>(1) }).await.unwrap_err();
    let log = log.end();
    let first = log.lines().find(|line| line.contains("WARN")).unwrap_or_else(|| panic!("{log}"));
    assert!(first.contains("the store refuses"), "{first}");
    tells_of_the_table(&refused, first, "the store");
    assert_eq!(bank.payments().await, 0);
}

// ---- PostgreSQL through sqlx
// -----------------------------------------------------------------------------------------

#[path = "within"]
mod sqlx_0_8 {
    use idem_runtime::PostgresStore;
    use idem_runtime::future::Observe;
    use idem_runtime::within::OpenTransaction;

    use ::sqlx_0_8 as sqlx;

    #[path = "by_sqlx.rs"]
    pub(crate) mod calls;

    /// Makes a delivery by [`PostgresStore::transact_sqlx_0_8`].
    fn transact<T, E, W>(pool: &sqlx::PgPool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<sqlx::Transaction<'_, sqlx::Postgres>>) -> Result<T, E> + Clone,
        E: From<sqlx::Error>,
    {
        PostgresStore::transact_sqlx_0_8(pool, work)
    }

    fn sql(text: &str) -> &str {
        text
    }
}

#[path = "within"]
mod sqlx_0_9 {
    use idem_runtime::PostgresStore;
    use idem_runtime::future::Observe;
    use idem_runtime::within::OpenTransaction;

    use ::sqlx_0_9 as sqlx;

    #[path = "by_sqlx.rs"]
    #[allow(clippy::duplicate_mod, reason = "each release of sqlx has its own types")]
    pub(crate) mod calls;

    /// Makes a delivery by [`PostgresStore::transact_sqlx_0_9`].
    fn transact<T, E, W>(pool: &sqlx::PgPool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<sqlx::Transaction<'_, sqlx::Postgres>>) -> Result<T, E> + Clone,
        E: From<sqlx::Error>,
    {
        PostgresStore::transact_sqlx_0_9(pool, work)
    }

    fn sql(text: &str) -> sqlx::AssertSqlSafe<String> {
        sqlx::AssertSqlSafe(text.to_owned())
    }
}

use mysql_by_mysql_async::calls as by_mysql_async;
use mysql_by_sqlx_0_9::driver::calls as mysql_by_sqlx;
use sqlx_0_8::calls as by_sqlx;
use sqlx_0_9::calls as by_new_sqlx;

// ---- MySQL and MariaDB, through each driver
// --------------------------------------------------------------------------

#[path = "within"]
mod mysql_by_mysql_async {
    use idem_runtime::MySqlStore;
    use idem_runtime::future::Observe;
    use idem_runtime::within::OpenTransaction;
    use mysql_async::prelude::Queryable as _;
    use mysql_async::{Conn, TxOpts};

    use crate::AnyError;
    use crate::mysql_bank::MySqlBank;

    #[path = "by_mysql.rs"]
    pub(crate) mod calls;

    pub(crate) type Driver<'c> = mysql_async::Transaction<'c>;

    async fn connect(bank: &MySqlBank) -> Conn {
        idem_tests::mysql::raw(&bank.url).await
    }

    /// Opens a connection in place of one on which a statement was dropped.
    async fn reopened(bank: &MySqlBank, connection: Conn) -> Conn {
        if connection.is_disconnected() { connect(bank).await } else { connection }
    }

    async fn begin(connection: &mut Conn) -> Result<Driver<'_>, mysql_async::Error> {
        connection.start_transaction(TxOpts::default()).await
    }

    async fn execute(tx: &OpenTransaction<Driver<'_>>, text: &str) -> Result<(), AnyError> {
        Ok(tx.lock().await.query_drop(text).await?)
    }

    /// Runs a statement outside of a transaction, unless a dropped statement has broken the connection.
    async fn execute_alone(connection: &mut Conn, text: &str) -> Result<bool, AnyError> {
        if connection.is_disconnected() {
            return Ok(false);
        }
        connection.query_drop(text).await?;
        Ok(true)
    }

    async fn number(tx: &OpenTransaction<Driver<'_>>, text: &str) -> i64 {
        tx.lock().await.query_first(text).await.unwrap().unwrap()
    }

    fn transact<T, E, W>(connection: &mut Conn, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<Driver<'_>>) -> Result<T, E> + Clone,
        E: From<mysql_async::Error>,
    {
        MySqlStore::transact(connection, work)
    }
}

#[path = "within"]
mod mysql_by_sqlx_0_8 {
    use ::sqlx_0_8 as sqlx;
    use idem_runtime::MySqlStore;
    use idem_runtime::future::Observe;
    use idem_runtime::within::OpenTransaction;

    #[path = "mysql_by_sqlx.rs"]
    pub(crate) mod driver;

    fn transact<T, E, W>(pool: &mut sqlx::MySqlPool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<driver::Driver<'_>>) -> Result<T, E> + Clone,
        E: From<sqlx::Error>,
    {
        MySqlStore::transact_sqlx_0_8(pool, work)
    }

    fn sql(text: &str) -> &str {
        text
    }
}

#[path = "within"]
mod mysql_by_sqlx_0_9 {
    use ::sqlx_0_9 as sqlx;
    use idem_runtime::MySqlStore;
    use idem_runtime::future::Observe;
    use idem_runtime::within::OpenTransaction;

    #[path = "mysql_by_sqlx.rs"]
    #[allow(clippy::duplicate_mod, reason = "each release of sqlx has its own types")]
    pub(crate) mod driver;

    fn transact<T, E, W>(pool: &mut sqlx::MySqlPool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<driver::Driver<'_>>) -> Result<T, E> + Clone,
        E: From<sqlx::Error>,
    {
        MySqlStore::transact_sqlx_0_9(pool, work)
    }

    fn sql(text: &str) -> sqlx::AssertSqlSafe<String> {
        sqlx::AssertSqlSafe(text.to_owned())
    }
}

// ---- SQLite
// ----------------------------------------------------------------------------------------------------------

/// Database file with a table of payments.
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

async fn sell(tx: &SqliteTx<'_>, name: &str, policy: Policy) -> (Result<u32, Error>, Outcome) {
    let operation = SqliteStore::within(tx).operation(Ok(key(name)), policy);
    let body = async {
        tx.execute("INSERT INTO payments VALUES (?1)", [name]).unwrap();
        Ok(current().unwrap().number())
    };
    observe(operation.run(body)).await
}

fn begin(connection: &mut Connection) -> OpenTransaction<rusqlite::Transaction<'_>> {
    OpenTransaction::new(connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap())
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
    assert_eq!(till.payments(), 0, "the open transaction is invisible to others");
    tx.into_inner().commit().unwrap();
    assert!(matches!(till.state("a").await, Some(State::Completed(_))));
    let tx = begin(&mut connection);
    let (paid, outcome) = sell(&tx, "a", POLICY).await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.replayed());
    tx.into_inner().commit().unwrap();
    assert_eq!(till.payments(), 1);
}

#[tokio::test]
async fn in_sqlite_a_duplicate_in_another_transaction_never_pays_again() {
    let till = Till::new();
    // The store creates its table before the test begins.
    SqliteStore::open(till.folder.file()).await.unwrap();
    let (mut first, mut second) = (till.connection(), till.connection());
    second.busy_timeout(Duration::from_millis(20)).unwrap();
    let tx = begin(&mut first);
    sell(&tx, "a", POLICY).await.0.unwrap();
    // This transaction has begun as a reader, so its first write is refused.
    let other = OpenTransaction::new(second.transaction().unwrap());
    let (refused, outcome) = sell(&other, "a", POLICY).await;
    match refused {
        Err(Error::Store { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted, "{source}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    drop(other);
    tx.into_inner().commit().unwrap();
    let other = OpenTransaction::new(second.transaction().unwrap());
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
        .reserve(&ReserveRequest::new(
            key("a"),
            store.context().new_owner(),
            Duration::from_secs(60),
            Duration::from_secs(60),
        ))
        .await
        .unwrap();
    assert!(matches!(reserved, Reservation::Granted { .. }));
    let tx = begin(&mut connection);
    let (refused, _) = sell(&tx, "a", POLICY).await;
    assert!(matches!(refused, Err(Error::InProgress { attempt: 1, .. })), "{refused:?}");
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_millis(20)));
    let (refused, outcome) = sell(&tx, "a", wait).await;
    assert!(matches!(refused, Err(Error::InProgress { .. })) && outcome.waited());
    assert!(sell(&tx, "b", POLICY).await.1.executed());
    tx.into_inner().commit().unwrap();
    assert!(matches!(till.state("b").await, Some(State::Completed(_))));
}

#[tokio::test]
async fn in_sqlite_a_record_made_in_a_transaction_names_its_holder() {
    let shop = Till::new();
    let mut connection = shop.connection();
    let tx = begin(&mut connection);
    SqliteStore::within(&tx).operation(Ok(key("nameless")), POLICY).run(async { Ok::<_, Error>(1) }).await.unwrap();
    let named = SqliteStore::within(&tx).holder("billing").operation(Ok(key("named")), POLICY);
    observe(named.run(async { Ok::<_, Error>(1) })).traceparent(TRACE.parse().ok()).await.0.unwrap();
    tx.into_inner().commit().unwrap();
    let store = SqliteStore::open(shop.folder.file()).await.unwrap();
    for (name, holder) in [("nameless", None), ("named", Some("billing"))] {
        tells(&store, name, holder).await;
    }
}

#[tokio::test]
async fn in_sqlite_a_table_of_another_application_is_left_unchanged() {
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
    assert_eq!(other.run(async { Ok::<u32, Error>(7) }).await.unwrap(), 7);
    for name in ["", "a b", "sqlite_x"] {
        let wrong = SqliteStore::within(&tx).table(name).operation(Ok(key("a")), POLICY);
        let result = wrong.run(async { Ok::<u32, Error>(7) }).await;
        assert!(matches!(result, Err(Error::Store { .. })), "`{name}`");
    }
}

#[tokio::test]
async fn in_sqlite_a_call_in_a_transaction_that_has_ended_is_an_error() {
    let till = Till::new();
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    let operation = SqliteStore::within(&tx).operation(Ok(key("a")), POLICY);
    let body = async {
        // In some cases SQLite itself rolls a transaction back, for example when the disk is full. This statement has
        // the same effect.
        tx.execute_batch("ROLLBACK").unwrap();
        Ok::<u32, Error>(7)
    };
    match operation.run(body).await {
        Err(Error::Unrecorded { source, .. }) => assert_eq!(source.kind(), StoreErrorKind::Aborted),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn in_sqlite_an_operation_whose_result_is_too_large_for_a_row_ends_without_its_result() {
    let till = Till::new();
    let mut connection = till.connection();
    let policy = POLICY.max_result_bytes(usize::MAX);
    let tx = begin(&mut connection);
    for replays in [false, true] {
        let operation = SqliteStore::within(&tx).operation(Ok(key("a")), policy);
        let (result, outcome) = observe(operation.codec::<Huge>().run(async { Ok::<_, Error>(7) })).await;
        if replays {
            let unavailable = matches!(
                result,
                Err(Error::ResultUnavailable { problem: ResultProblem::TooLarge { size: HUGE, .. }, .. })
            );
            assert!(unavailable && !outcome.executed(), "{result:?}");
        } else {
            let outcome = outcome.committed();
            assert!(result.is_ok() && outcome.recorded() && !outcome.result_stored());
        }
    }
}

const HUGE: u64 = 1_000_000_000;

/// Codec that encodes every value as a result too large for a row.
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

async fn sell_and_end(
    tx: &SqliteTx<'_>,
    name: &str,
    policy: Policy,
    end: End,
    records_errors: bool,
) -> Result<u32, Declined> {
    let body = async {
        tx.execute("INSERT INTO payments VALUES (?1)", [name]).unwrap();
        tokio::task::yield_now().await;
        match end {
            End::Succeed => Ok(current().unwrap().number()),
            End::Fail => Err(Declined("too poor".into())),
            End::FailInSql => Err(Declined(tx.execute("SELECT nothing FROM nowhere", []).unwrap_err().to_string())),
            End::Panic => panic!("too rich"),
            End::Hang => std::future::pending().await,
        }
    };
    let operation = SqliteStore::within(tx).operation(Ok(key(name)), policy);
    match records_errors {
        true => operation.record_errors().run(body).await,
        false => operation.run(body).await,
    }
}

impl Till {
    fn names(&self) -> Vec<String> {
        let connection = self.connection();
        let mut names = connection.prepare("SELECT name FROM payments ORDER BY name").unwrap();
        names.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    }
}

#[tokio::test]
async fn in_sqlite_a_call_that_does_not_complete_is_undone() {
    let lease = Duration::from_millis(200);
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        for (end, recorded) in
            [(End::Fail, false), (End::Fail, true), (End::FailInSql, false), (End::Panic, false), (End::Hang, false)]
        {
            let till = Till::new();
            let mut connection = till.connection();
            let policy = POLICY.on_crash(on_crash).lease(lease);
            let tx = begin(&mut connection);
            tx.execute("INSERT INTO payments VALUES ('before')", []).unwrap();
            match end {
                End::Hang => {
                    let mut call = Box::pin(sell_and_end(&tx, "a", policy, end, recorded));
                    for _ in 0..10 {
                        assert!(poll_once(call.as_mut()).await.is_pending());
                    }
                    let paid: i64 = tx.query_row("SELECT count(*) FROM payments", [], |row| row.get(0)).unwrap();
                    assert_eq!(paid, 2);
                }
                End::Panic => {
                    AssertUnwindSafe(sell_and_end(&tx, "a", policy, end, recorded)).catch_unwind().await.unwrap_err();
                }
                _ => drop(sell_and_end(&tx, "a", policy, end, recorded).await.unwrap_err()),
            }
            sell_and_end(&tx, "b", POLICY, End::Succeed, false).await.unwrap();
            tx.into_inner().commit().unwrap();
            assert_eq!(till.names(), ["b", "before"], "{on_crash:?}, {end:?}");
            let state = till.state("a").await;
            match (end, on_crash) {
                (End::Fail, _) if recorded => assert!(matches!(state, Some(State::Failed(_))), "{state:?}"),
                (End::Fail | End::FailInSql, _) => assert_eq!(state, Some(State::Released), "{on_crash:?}, {end:?}"),
                (_, OnCrash::Fail) => assert!(matches!(state, Some(State::Pending { .. })), "{end:?}: {state:?}"),
                _ => assert_eq!(state, None, "{on_crash:?}, {end:?}"),
            }
        }
    }
}

/// The next transaction of the connection has the same address as the transaction of the leaked call.
#[tokio::test]
async fn in_sqlite_a_call_that_is_leaked_delays_no_later_transaction() {
    let till = Till::new();
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    let mut call = Box::pin(sell_and_end(&tx, "a", POLICY, End::Hang, false));
    for _ in 0..10 {
        assert!(poll_once(call.as_mut()).await.is_pending());
    }
    std::mem::forget(call);
    drop(tx);
    let tx = begin(&mut connection);
    let (paid, outcome) = sell(&tx, "a", POLICY).now_or_never().expect("the call waits for no other");
    assert_eq!((paid.unwrap(), outcome.executed()), (1, true));
}

#[tokio::test]
async fn a_transaction_begun_by_the_user_does_not_use_the_journal_of_an_outer_transact() {
    let (outer, inner) = (Till::new(), Till::new());
    let mut connection = outer.connection();
    let (paid, _) = SqliteStore::transact(&mut connection, async |_| {
        let mut connection = inner.connection();
        let tx = begin(&mut connection);
        let policy = POLICY.max_attempts(3);
        let paid = sell_and_end(&tx, "a", policy, End::Succeed, false).await.map_err(|it| it.0)?;
        Ok::<_, AnyError>(paid)
    })
    .await;
    assert!(paid.unwrap_err().to_string().contains("use `transact`"), "a rollback would take the attempt with it");
}

#[tokio::test]
async fn in_sqlite_a_transaction_uses_the_clock_of_its_guard() {
    let till = Till::new();
    let mut connection = till.connection();
    let clock = ManualClock::new();
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let tx = OpenTransaction::with_clock(tx, Arc::new(clock.clone()));
    assert!(sell(&tx, "a", POLICY).await.1.executed());
    clock.advance(Duration::from_secs(3599));
    assert!(sell(&tx, "a", POLICY).await.1.replayed());
    clock.advance(Duration::from_secs(2));
    assert!(sell(&tx, "a", POLICY).await.1.executed(), "the record has expired");
}

#[idempotent(key = "{name}", ttl = "1h", store = SqliteStore::within(tx), scope = shared("pay"))]
async fn sell_by_attribute(tx: &SqliteTx<'_>, name: &str) -> Result<u32, AnyError> {
    tx.execute("INSERT INTO payments VALUES (?1)", [name])?;
    Ok(7)
}

#[tokio::test]
async fn in_sqlite_a_transaction_is_begun_committed_and_acknowledged_by_the_library() {
    let till = Till::new();
    let mut connection = till.connection();
    connection.execute_batch("PRAGMA foreign_keys = ON; CREATE TABLE names (name TEXT PRIMARY KEY)").unwrap();
    connection
        .execute_batch("CREATE TABLE sold (name TEXT REFERENCES names (name) DEFERRABLE INITIALLY DEFERRED)")
        .unwrap();
    // The first delivery runs the body, and the second delivery replays its result.
    for replayed in [false, true] {
        let (paid, outcome) = SqliteStore::transact(&mut connection, async |tx| sell_by_attribute(tx, "a").await).await;
        assert_eq!(paid.unwrap(), 7);
        assert_eq!((outcome.replayed(), outcome.disposition()), (replayed, Disposition::Ack));
    }
    // Two deliveries fail: one by a refused commit, and one by an error after the call.
    for refused in [true, false] {
        let (result, outcome) = SqliteStore::transact(&mut connection, async |tx| {
            let paid = sell_by_attribute(tx, "b").await?;
            if !refused {
                return Err("the outbox is full".into());
            }
            tx.execute("INSERT INTO sold VALUES ('b')", [])?;
            Ok::<_, AnyError>(paid)
        })
        .await;
        assert!(result.is_err() && is_retry(&outcome) && !outcome.replayed(), "{result:?}, {outcome:?}");
        assert_eq!((till.names(), till.state("b").await), (vec!["a".to_owned()], Some(State::Released)));
    }
    // The recorded error is committed, and everything else in the transaction is rolled back.
    for replayed in [false, true] {
        let (result, outcome) = SqliteStore::transact(&mut connection, async |tx| {
            tx.execute("INSERT INTO payments VALUES ('before')", [])?;
            let sold = sell_and_end(tx, "c", POLICY, End::Fail, true).await.map_err(|declined| declined.0)?;
            Ok::<_, AnyError>(sold)
        })
        .await;
        assert_eq!(result.unwrap_err().to_string(), "too poor");
        assert_eq!((outcome.disposition(), outcome.replayed()), (Disposition::DeadLetter, replayed));
        assert!(matches!(till.state("c").await, Some(State::Failed(_))));
    }
    assert_eq!(till.names(), ["a"]);
    // Another connection holds the write lock.
    let mut other = till.connection();
    other.busy_timeout(Duration::from_millis(20)).unwrap();
    let holding = begin(&mut connection);
    let (result, outcome) = SqliteStore::transact(&mut other, async |tx| sell_by_attribute(tx, "d").await).await;
    assert!(result.is_err() && is_retry(&outcome), "{result:?}, {outcome:?}");
    drop(holding);
}

#[tokio::test]
async fn an_observation_around_a_transaction_counts_committed_calls() {
    let till = Till::new();
    let mut connection = till.connection();
    let name = "a";
    // After a commit, the record takes effect and the message is acknowledged.
    let (_, outcome) =
        observe(async { SqliteStore::transact(&mut connection, async |tx| sell_by_attribute(tx, name).await).await.0 })
            .await;
    assert_eq!((outcome.disposition(), outcome.is_pending_commit()), (Disposition::Ack, false), "{outcome:?}");
    // In each case of this loop the transaction fails. A successful call before or after the transaction must not hide
    // the failure.
    let other = MemoryStore::new();
    let done = async |name| {
        Operation::new(&other, Key::new("other", name), POLICY).run(async { Ok::<_, Error>(1) }).await.unwrap()
    };
    for order in ["before", "after"] {
        // The transaction is rolled back, and the delivery ignores the error.
        let (_, outcome) = observe(async {
            if order == "before" {
                done("rolled back before").await;
            }
            let (result, inner) = SqliteStore::transact(&mut connection, async |tx| {
                sell_by_attribute(tx, "b").await?;
                Err::<u32, AnyError>("the outbox is full".into())
            })
            .await;
            assert!(result.is_err() && !inner.recorded() && inner.executed());
            if order == "after" {
                done("rolled back after").await;
            }
            Ok::<_, Error>(())
        })
        .await;
        assert!(is_retry(&outcome), "{order}: {outcome:?}");
        // The delivery is cut off in a call, or before its first call.
        for calls in [true, false] {
            let (_, outcome) = observe(async {
                if order == "before" {
                    done("cut off before").await;
                }
                let mut cut_off = Box::pin(SqliteStore::transact(&mut connection, async |tx| {
                    if calls {
                        sell_by_attribute(tx, "b").await?;
                    }
                    std::future::pending::<Result<u32, AnyError>>().await
                }));
                assert!(poll_once(cut_off.as_mut()).await.is_pending());
                drop(cut_off);
                if order == "after" {
                    done("cut off after").await;
                }
                Ok::<_, Error>(())
            })
            .await;
            assert!(is_retry(&outcome), "{order}: {outcome:?}");
        }
        // The transaction can't begin.
        let holding = begin(&mut connection);
        let mut busy = till.connection();
        busy.busy_timeout(Duration::from_millis(1)).unwrap();
        let (_, outcome) = observe(async {
            if order == "before" {
                done("not begun before").await;
            }
            let (result, inner) = SqliteStore::transact(&mut busy, async |tx| sell_by_attribute(tx, "b").await).await;
            assert!(result.is_err() && is_retry(&inner));
            if order == "after" {
                done("not begun after").await;
            }
            Ok::<_, Error>(())
        })
        .await;
        assert!(is_retry(&outcome), "{order}: {outcome:?}");
        drop(holding);
    }
    assert_eq!(till.names(), ["a"]);
    // A recorded error of the body is committed.
    let (_, outcome) = observe(async {
        let failing = async |tx: &SqliteTx<'_>| {
            sell_and_end(tx, "c", POLICY, End::Fail, true).await.map_err(|declined| AnyError::from(declined.0))
        };
        SqliteStore::transact(&mut connection, failing).await.0
    })
    .await;
    assert_eq!((outcome.disposition(), outcome.recorded()), (Disposition::DeadLetter, true), "{outcome:?}");
}

// ---- Processes that die
// ----------------------------------------------------------------------------------------------

const KEYS: usize = 400;
const RACERS: usize = 7;
const KILLS: usize = 12;

fn ledger(spec: &str, begin: usize) -> Child {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_ledger"), spec, &KEYS.to_string(), &begin.to_string()]);
    command.spawn().expect("a process starts")
}

/// Runs eight processes of `ledger`, and kills one of them repeatedly.
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
async fn in_mysql_processes_that_die_leave_every_effect_exactly_once() {
    let bank = MySqlBank::open().await;
    bank.execute(&format!("CREATE TABLE {}_effects (n int)", bank.table)).await;
    race(&format!("mysql {} {}", bank.url, bank.table)).await;
    is_once(&bank.numbers(&format!("SELECT count(*) FROM {}_effects GROUP BY n", bank.table)).await);
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

// ---- Dispositions of messages whose handlers have a transaction
// --------------------------------------------------------

/// Driver of a database with a table of payments and a table of records.
enum Driver {
    TokioPostgres(Bank),
    Sqlx(Bank, ::sqlx_0_8::PgPool),
    NewSqlx(Bank, ::sqlx_0_9::PgPool),
    MySqlAsync(MySqlBank),
    MySqlSqlx(MySqlBank, ::sqlx_0_9::MySqlPool),
    Rusqlite(Till),
}

impl Driver {
    async fn all() -> [Self; 6] {
        let (bank, new_bank) = (Bank::open().await, Bank::open().await);
        let (pool, new_pool) = (by_sqlx::pool(&bank).await, by_new_sqlx::pool(&new_bank).await);
        let (of_sqlx, of_new_sqlx) = (Self::Sqlx(bank, pool), Self::NewSqlx(new_bank, new_pool));
        let mysql = MySqlBank::open().await;
        let pool = mysql_by_sqlx_0_9::driver::connect(&mysql).await;
        [
            Self::TokioPostgres(Bank::open().await),
            of_sqlx,
            of_new_sqlx,
            Self::MySqlAsync(MySqlBank::open().await),
            Self::MySqlSqlx(mysql, pool),
            Self::Rusqlite(Till::new()),
        ]
    }

    fn name(&self) -> &'static str {
        match self {
            Self::TokioPostgres(_) => "tokio-postgres",
            Self::Sqlx(..) => "sqlx 0.8",
            Self::NewSqlx(..) => "sqlx 0.9",
            Self::MySqlAsync(_) => "mysql_async",
            Self::MySqlSqlx(..) => "sqlx 0.9 on MySQL",
            Self::Rusqlite(_) => "rusqlite",
        }
    }

    /// Name for the payments. It differs for each driver, because all transactions for a table name share the counts of
    /// failures.
    fn payee(&self) -> String {
        match self {
            Self::TokioPostgres(bank) | Self::Sqlx(bank, _) | Self::NewSqlx(bank, _) => bank.schema.clone(),
            Self::MySqlAsync(bank) | Self::MySqlSqlx(bank, _) => bank.table.clone(),
            Self::Rusqlite(till) => till.folder.path().display().to_string(),
        }
    }

    async fn payments(&self) -> i64 {
        match self {
            Self::TokioPostgres(bank) | Self::Sqlx(bank, _) | Self::NewSqlx(bank, _) => bank.payments().await,
            Self::MySqlAsync(bank) | Self::MySqlSqlx(bank, _) => bank.payments().await,
            Self::Rusqlite(till) => till.payments(),
        }
    }

    /// Makes one delivery by `transact`. If `fails_after` is true, the delivery fails after its call.
    async fn transact(
        &self,
        delivery: u32,
        policy: Policy,
        end: End,
        fails_after: bool,
    ) -> (Result<u32, AnyError>, Outcome) {
        let after = |paid: Result<u32, Declined>| -> Result<u32, AnyError> {
            let paid = paid.map_err(|declined| declined.0)?;
            if fails_after { Err("the outbox is full".into()) } else { Ok(paid) }
        };
        match self {
            Self::TokioPostgres(bank) => {
                let mut client = bank.client().await;
                let work = async |tx: &PgTx<'_>| after(bank.end(tx, &self.payee(), policy, end).await);
                PostgresStore::transact(&mut client, work).delivery(delivery).catch_panics().await
            }
            Self::Sqlx(bank, pool) => {
                let work = async |tx: &by_sqlx::SqlxTransaction<'_>| {
                    after(by_sqlx::make_call(bank, tx, &self.payee(), policy, end).await)
                };
                PostgresStore::transact_sqlx_0_8(pool, work).delivery(delivery).catch_panics().await
            }
            Self::NewSqlx(bank, pool) => {
                let work = async |tx: &by_new_sqlx::SqlxTransaction<'_>| {
                    after(by_new_sqlx::make_call(bank, tx, &self.payee(), policy, end).await)
                };
                PostgresStore::transact_sqlx_0_9(pool, work).delivery(delivery).catch_panics().await
            }
            Self::MySqlAsync(bank) => {
                let mut connection = raw_mysql(&bank.url).await;
                let work = async |tx: &by_mysql_async::Tx<'_>| {
                    after(by_mysql_async::make_call(bank, tx, &self.payee(), policy, end).await)
                };
                MySqlStore::transact(&mut connection, work).delivery(delivery).catch_panics().await
            }
            Self::MySqlSqlx(bank, pool) => {
                let work = async |tx: &mysql_by_sqlx::Tx<'_>| {
                    after(mysql_by_sqlx::make_call(bank, tx, &self.payee(), policy, end).await)
                };
                MySqlStore::transact_sqlx_0_9(pool, work).delivery(delivery).catch_panics().await
            }
            Self::Rusqlite(till) => {
                let mut connection = till.connection();
                let work = async |tx: &SqliteTx<'_>| after(sell_and_end(tx, &self.payee(), policy, end, false).await);
                SqliteStore::transact(&mut connection, work).delivery(delivery).catch_panics().await
            }
        }
    }

    /// Makes one delivery in which this test, and not `transact`, begins and commits the transaction.
    async fn by_hand(&self, policy: Policy, end: End) -> (Result<u32, AnyError>, Outcome) {
        match self {
            Self::TokioPostgres(bank) => {
                observe(async {
                    let mut client = bank.client().await;
                    let tx = OpenTransaction::new(client.transaction().await?);
                    let paid = bank.end(&tx, &self.payee(), policy, end).await;
                    match paid.is_ok() {
                        true => tx.into_inner().commit().await?,
                        // Otherwise the next delivery may find the key still held.
                        false => tx.into_inner().rollback().await?,
                    }
                    Ok(paid.map_err(|it| it.0)?)
                })
                .await
            }
            Self::Sqlx(bank, pool) => {
                observe(async {
                    let tx = by_sqlx::SqlxTransaction::new(pool.begin().await?);
                    let paid = by_sqlx::make_call(bank, &tx, &self.payee(), policy, end).await;
                    match paid.is_ok() {
                        true => tx.into_inner().commit().await?,
                        // The rollback is explicit, because a dropped transaction is rolled back only when its
                        // connection is used again.
                        false => tx.into_inner().rollback().await?,
                    }
                    Ok(paid.map_err(|it| it.0)?)
                })
                .await
            }
            Self::NewSqlx(bank, pool) => {
                observe(async {
                    let tx = by_new_sqlx::SqlxTransaction::new(pool.begin().await?);
                    let paid = by_new_sqlx::make_call(bank, &tx, &self.payee(), policy, end).await;
                    match paid.is_ok() {
                        true => tx.into_inner().commit().await?,
                        // The rollback is explicit, because a dropped transaction is rolled back only when its
                        // connection is used again.
                        false => tx.into_inner().rollback().await?,
                    }
                    Ok(paid.map_err(|it| it.0)?)
                })
                .await
            }
            Self::MySqlAsync(bank) => {
                observe(async {
                    let mut connection = raw_mysql(&bank.url).await;
                    let begun = connection.start_transaction(mysql_async::TxOpts::default()).await?;
                    let tx = by_mysql_async::Tx::new(begun);
                    let paid = by_mysql_async::make_call(bank, &tx, &self.payee(), policy, end).await;
                    match paid.is_ok() {
                        true => tx.into_inner().commit().await?,
                        false => tx.into_inner().rollback().await?,
                    }
                    Ok(paid.map_err(|it| it.0)?)
                })
                .await
            }
            Self::MySqlSqlx(bank, pool) => {
                observe(async {
                    let tx = mysql_by_sqlx::Tx::new(pool.begin().await?);
                    let paid = mysql_by_sqlx::make_call(bank, &tx, &self.payee(), policy, end).await;
                    match paid.is_ok() {
                        true => tx.into_inner().commit().await?,
                        // The rollback is explicit, because a dropped transaction is rolled back only when its
                        // connection is used again.
                        false => tx.into_inner().rollback().await?,
                    }
                    Ok(paid.map_err(|it| it.0)?)
                })
                .await
            }
            Self::Rusqlite(till) => {
                observe(async {
                    let mut connection = till.connection();
                    let tx = begin(&mut connection);
                    let paid = sell_and_end(&tx, &self.payee(), policy, end, false).await.map_err(|it| it.0)?;
                    tx.into_inner().commit()?;
                    Ok(paid)
                })
                .await
            }
        }
    }
}

#[tokio::test]
async fn a_healthy_message_is_acknowledged() {
    for driver in Driver::all().await {
        // If the test commits the transaction itself, the outcome of the first delivery does not include the commit.
        // The next delivery replays the committed record.
        for (n, expected) in [(1, None), (2, Some(Disposition::Ack)), (3, Some(Disposition::Ack))] {
            let (paid, outcome) = driver.by_hand(POLICY, End::Succeed).await;
            assert_eq!((paid.unwrap(), outcome.replayed()), (1, n > 1), "{}", driver.name());
            match expected {
                Some(expected) => assert_eq!(outcome.disposition(), expected, "{}", driver.name()),
                None => assert!(is_retry(&outcome), "{}: {outcome:?}", driver.name()),
            }
            assert_eq!((outcome.recorded(), outcome.committed().recorded()), (n > 1, true), "{}", driver.name());
        }
        assert_eq!(driver.payments().await, 1);
    }
    for driver in Driver::all().await {
        for n in 1..4 {
            let (paid, outcome) = driver.transact(n, POLICY, End::Succeed, false).await;
            assert_eq!((paid.unwrap(), outcome.replayed()), (1, n > 1), "{}", driver.name());
            assert_eq!(outcome.disposition(), Disposition::Ack, "{}", driver.name());
        }
    }
}

#[tokio::test]
async fn an_attempt_counts_although_its_transaction_is_rolled_back() {
    for (end, fails_after) in [(End::Fail, false), (End::FailInSql, false), (End::Panic, false), (End::Succeed, true)] {
        for driver in Driver::all().await {
            let what = format!("{}, {end:?}", driver.name());
            let mut pauses = Vec::new();
            for n in 1..=3 {
                let (paid, outcome) = driver.transact(1, POLICY.max_attempts(3), end, fails_after).await;
                assert!(paid.is_err() && outcome.executed() && !outcome.recorded(), "{what}: {outcome:?}");
                assert_eq!(outcome.attempt(), Some(n), "{what}");
                match outcome.disposition() {
                    Disposition::Retry { after } => pauses.push(after),
                    other => panic!("{what}: {other:?}"),
                }
            }
            assert!(pauses.is_sorted_by(|before, after| before < after), "{what}: {pauses:?}");
            let (paid, outcome) = driver.transact(4, POLICY.max_attempts(3), end, fails_after).await;
            assert!(paid.is_err() && !outcome.executed(), "{what}");
            assert_eq!(outcome.refusal(), Some(idem_runtime::Refusal::AttemptsExhausted), "{what}");
            assert_eq!(outcome.disposition(), Disposition::DeadLetter, "{what}");
            assert_eq!(driver.payments().await, 0, "{what}");
        }
    }
}

#[tokio::test]
async fn max_attempts_is_refused_where_no_attempt_would_be_counted() {
    for driver in Driver::all().await {
        let (paid, outcome) = driver.by_hand(POLICY.max_attempts(3), End::Succeed).await;
        assert!(paid.unwrap_err().to_string().contains("use `transact`"));
        assert!(!outcome.executed() && outcome.misconfigured() && is_retry(&outcome), "{outcome:?}");
        assert_eq!(driver.payments().await, 0);
    }
}

/// A delivery that is rolled back leaves nothing in the database, and its [`OpenTransaction`] ends as well. Neither of
/// the two can hold the number of failures on which the pause depends.
#[tokio::test]
async fn the_pauses_of_a_delivery_that_the_user_rolls_back_grow() {
    let cases = [
        ("the body fails", POLICY, End::Fail),
        ("the statement fails", POLICY, End::FailInSql),
        ("the body fails without a record", POLICY.mode(Mode::Off), End::Fail),
        ("the call is refused", POLICY.max_attempts(3), End::Succeed),
    ];
    for (what, policy, end) in cases {
        for driver in Driver::all().await {
            let mut pauses = Vec::new();
            for _ in 0..8 {
                let (paid, outcome) = driver.by_hand(policy, end).await;
                match outcome.disposition() {
                    Disposition::Retry { after } if paid.is_err() => pauses.push(after),
                    other => panic!("{}, {what}: {other:?}", driver.name()),
                }
            }
            let name = driver.name();
            assert!(pauses[0] <= Duration::from_secs(4), "{name}, {what}: {pauses:?}");
            assert!(pauses[7] >= Duration::from_secs(60), "{name}, {what}: {pauses:?}");
            assert_eq!(driver.payments().await, 0, "{name}, {what}");
        }
    }
}

#[tokio::test]
async fn only_some_duplicates_of_open_transactions_wait_on_their_last_delivery() {
    const SLOTS: usize = 7;
    const WAITERS: usize = 4;
    let bank = Bank::open().await;
    let mut holder = bank.client().await;
    let holding = OpenTransaction::new(holder.transaction().await.unwrap());
    let names: Vec<_> = (0..SLOTS).map(|at| format!("held {at}")).collect();
    for name in &names {
        bank.pay(&holding, name, POLICY).await.0.unwrap();
    }
    let duplicates = names.iter().map(|name| {
        let delivery = async {
            let mut client = bank.client().await;
            let tx = OpenTransaction::new(client.transaction().await.unwrap());
            let paid = bank.pay(&tx, name, POLICY).await.0;
            tx.into_inner().commit().await.unwrap();
            paid
        };
        Box::pin(observe(delivery).delivery(5).delivery_limit(5))
    });
    let mut waiting: futures::stream::FuturesUnordered<_> = duplicates.collect();
    for _ in WAITERS..SLOTS {
        let (_, outcome) = futures::StreamExt::next(&mut waiting).await.expect("a duplicate that does not wait");
        assert!(!outcome.waited() && outcome.disposition() == Disposition::DeadLetter, "{outcome:?}");
    }
    holding.into_inner().commit().await.unwrap();
    for _ in 0..WAITERS {
        let (paid, outcome) = futures::StreamExt::next(&mut waiting).await.expect("a duplicate that waits");
        assert!(paid.is_ok() && outcome.replayed() && outcome.waited(), "{outcome:?}");
    }
}

#[tokio::test]
async fn a_replay_of_a_rolled_back_result_is_not_recorded() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let (result, outcome) = PostgresStore::transact(&mut client, async |tx| {
        bank.pay(tx, "a", POLICY).await.0?;
        bank.pay(tx, "a", POLICY).await.0?;
        Err::<(), AnyError>("the outbox is full".into())
    })
    .await;
    assert!(result.is_err() && outcome.replayed() && is_retry(&outcome), "{outcome:?}");
    assert!(!outcome.recorded() && !outcome.result_stored() && !outcome.is_pending_commit(), "{outcome:?}");
}

#[tokio::test]
async fn transact_takes_every_option_of_an_observed_delivery() {
    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let beats = async |_| Ok::<_, Error>(());
    // The delivery uses every option of an observed delivery, inside another observation.
    let (paid, outcome) = observe(async {
        let work = async |tx: &PgTx<'_>| Ok::<_, AnyError>(bank.pay(tx, "a", POLICY).await.0?);
        let (paid, inner) = PostgresStore::transact(&mut client, work)
            .delivery(2)
            .delivery_limit(5)
            .message("kafka", "orders", "17")
            .on_beat(Duration::from_secs(10), beats)
            .catch_panics()
            .await;
        assert_eq!(inner.disposition(), Disposition::Ack);
        paid
    })
    .await;
    assert_eq!((paid.unwrap(), outcome.disposition()), (1, Disposition::Ack));
    assert!(!outcome.is_pending_commit() && outcome.recorded());
    // The transaction fails or is cut off, and the outer delivery ignores the failure.
    for cut_off in [false, true] {
        let end = if cut_off { End::Hang } else { End::Fail };
        let (result, outcome) = observe(async {
            let work =
                async |tx: &PgTx<'_>| Ok::<_, AnyError>(bank.end(tx, "b", POLICY, end).await.map_err(|it| it.0)?);
            let mut delivery = Box::pin(PostgresStore::transact(&mut client, work));
            while cut_off && !bank.hangs.get() {
                assert!(poll_once(delivery.as_mut()).await.is_pending());
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            if !cut_off {
                delivery.await.0.unwrap_err();
            }
            Ok::<_, AnyError>(())
        })
        .await;
        assert!(result.is_ok() && is_retry(&outcome), "{outcome:?}");
    }
    assert_eq!(bank.payments().await, 1);
}
