//! Calls in transactions of sqlx, compiled once for each supported release of the driver.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt as _;
use idem_runtime::record::State;
use idem_runtime::within::OpenTransaction;
use idem_runtime::{
    Disposition, Error, OnCrash, Operation, Policy, PostgresStore, StoreErrorKind, current, idempotent, observe,
};
use idem_tests::log::Log;
use idem_tests::polls::{dropped_after, next_round, poll_once};

use super::sqlx::postgres::PgPoolOptions;
use super::sqlx::{PgPool, Postgres, Transaction, query};
use super::{sql, transact};
use crate::{AnyError, Bank, Declined, End, POLICY, drop_beside_waiting_code, is_retry, key, tells_of_the_table};

pub(crate) type SqlxTransaction<'c> = OpenTransaction<Transaction<'c, Postgres>>;

#[idempotent(
    key = "{name}",
    ttl = "1h",
    store = PostgresStore::within(tx).schema(schema),
    scope = shared("pay"),
    fingerprint = name,
    in_progress = wait("50ms")
)]
async fn pay(tx: &SqlxTransaction<'_>, schema: &str, name: &str) -> Result<Vec<u8>, anyhow::Error> {
    let insert = query("INSERT INTO payments VALUES ($1)").bind(name);
    insert.execute(&mut **tx.lock().await).await?;
    current().expect("inside").confirm_lease().await?;
    Ok(vec![0, 1, 255])
}

/// Opens a pool of connections whose search path begins with the schema.
pub(crate) async fn pool(bank: &Bank) -> PgPool {
    pool_of(bank, 10).await
}

/// Opens such a pool with at most `connections` connections.
async fn pool_of(bank: &Bank, connections: u32) -> PgPool {
    let path = format!("SET search_path = \"{}\"", bank.schema.replace('"', "\"\""));
    PgPoolOptions::new()
        .max_connections(connections)
        .after_connect(move |connection, _| {
            let path = path.clone();
            Box::pin(async move { super::sqlx::Executor::execute(connection, sql(&path)).await.map(|_| ()) })
        })
        .connect(&bank.url)
        .await
        .unwrap()
}

/// Runs a step that pays in the transaction.
pub(crate) async fn debit(bank: &Bank, tx: &SqlxTransaction<'_>, name: &str) -> Result<u64, Error> {
    let debit = current()?.step(name).within(PostgresStore::within(tx).schema(&bank.schema));
    debit
        .run(async |step| {
            let insert = query("INSERT INTO payments VALUES ($1)").bind(step.name().to_owned());
            Ok(insert.execute(&mut **tx.lock().await).await.unwrap().rows_affected())
        })
        .await
}

/// Makes a call like [`Bank::end`], through sqlx.
pub(crate) async fn make_call(
    bank: &Bank,
    tx: &SqlxTransaction<'_>,
    name: &str,
    policy: Policy,
    end: End,
) -> Result<u32, Declined> {
    let body = async {
        let insert = query("INSERT INTO payments VALUES ($1)").bind(name);
        insert.execute(&mut **tx.lock().await).await.unwrap();
        match end {
            End::Succeed => Ok(current().unwrap().number()),
            End::Fail => Err(Declined("too poor".into())),
            End::FailInSql => {
                let failing = query("SELECT nothing FROM nowhere");
                Err(Declined(failing.execute(&mut **tx.lock().await).await.unwrap_err().to_string()))
            }
            End::Panic => panic!("too rich"),
            End::Hang => {
                bank.hangs.set(true);
                std::future::pending().await
            }
        }
    };
    let operation = PostgresStore::within(tx).schema(&bank.schema).operation(Ok(key(name)), policy);
    match bank.records_errors {
        true => operation.record_errors().run(body).await,
        false => operation.run(body).await,
    }
}
pub(crate) async fn insert(tx: &SqlxTransaction<'_>, name: &str) {
    let insert = query("INSERT INTO payments VALUES ($1)").bind(name);
    insert.execute(&mut **tx.lock().await).await.unwrap();
}

#[tokio::test]
async fn a_call_that_does_not_complete_is_undone() {
    let lease = Duration::from_millis(200);
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        for end in [End::Fail, End::FailInSql, End::Panic, End::Hang] {
            let bank = Bank::open().await;
            let pool = pool(&bank).await;
            let policy = POLICY.on_crash(on_crash).lease(lease);
            let tx = SqlxTransaction::new(pool.begin().await.unwrap());
            insert(&tx, "before").await;
            match end {
                End::Hang => {
                    let mut call = Box::pin(make_call(&bank, &tx, "a", policy, end));
                    while !bank.hangs.get() {
                        assert!(poll_once(call.as_mut()).await.is_pending());
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                }
                End::Panic => {
                    let call = AssertUnwindSafe(make_call(&bank, &tx, "a", policy, end)).catch_unwind();
                    call.await.unwrap_err();
                }
                _ => drop(make_call(&bank, &tx, "a", policy, end).await.unwrap_err()),
            }
            make_call(&bank, &tx, "b", POLICY, End::Succeed).await.unwrap();
            tx.into_inner().commit().await.unwrap();
            assert_eq!(bank.names().await, ["b", "before"], "{on_crash:?}, {end:?}");
            let state = bank.state("a").await;
            match (end, on_crash) {
                (End::Fail | End::FailInSql, _) => assert_eq!(state, Some(State::Released), "{on_crash:?}, {end:?}"),
                (_, OnCrash::Fail) => assert!(matches!(state, Some(State::Pending { .. })), "{end:?}: {state:?}"),
                _ => assert_eq!(state, None, "{on_crash:?}, {end:?}"),
            }
        }
    }
}

#[tokio::test]
async fn a_call_can_be_dropped_at_every_await() {
    let fail = POLICY.on_crash(OnCrash::Fail);
    for (name, policy, end) in [
        ("ok", POLICY, End::Succeed),
        ("err", POLICY, End::Fail),
        ("fail", fail, End::Succeed),
        ("fail err", fail, End::Fail),
    ] {
        let bank = Bank::open().await;
        // Each transaction uses the connection of the one before it.
        let pool = pool_of(&bank, 1).await;
        let mut polls = 0;
        for round in 0.. {
            let name = format!("{name} {round}");
            let tx = SqlxTransaction::new(pool.begin().await.unwrap());
            let pause = async || tokio::time::sleep(Duration::from_millis(3)).await;
            let is_over = dropped_after(polls, make_call(&bank, &tx, &name, policy, end), pause).await;
            // Either payment and record are both committed, or the commit fails and neither is committed.
            let committing = AssertUnwindSafe(async { tx.into_inner().commit().await }).catch_unwind();
            let committed = committing.await.is_ok_and(|committed| committed.is_ok());
            // The connection has no open transaction, in which a later statement would never be committed.
            query("INSERT INTO payments VALUES ($1)").bind(format!("alone {name}")).execute(&pool).await.unwrap();
            assert!(bank.names().await.contains(&format!("alone {name}")), "{name}");
            let (state, paid) = (bank.state(&name).await, bank.names().await.contains(&name));
            match (&state, paid) {
                (Some(State::Completed(_)), true) if committed => {}
                (None | Some(State::Released), false) => {}
                (Some(State::Pending { .. }), false) if name.starts_with("fail") && committed => {}
                other => panic!("{name}: {other:?}"),
            }
            if is_over {
                assert!(committed);
                assert_eq!(matches!(state, Some(State::Completed(_))), end == End::Succeed, "{name}");
            }
            let Some(next) = next_round(polls, is_over) else { break };
            assert!(next > 0 || round < 1000, "{name} is never pending");
            polls = next;
        }
    }
}

#[tokio::test]
async fn a_transaction_is_begun_committed_and_acknowledged_by_the_library() {
    let bank = Bank::open().await;
    bank.checks_at_commit().await;
    let pool = pool(&bank).await;
    // The delivery runs in a spawned task. A second delivery replays its result.
    for replayed in [false, true] {
        let (pool, schema) = (pool.clone(), bank.schema.clone());
        let delivery = tokio::spawn(async move { transact(&pool, async |tx| pay(tx, &schema, "a").await).await });
        let (paid, outcome) = delivery.await.unwrap();
        assert_eq!(paid.unwrap(), [0, 1, 255]);
        assert_eq!((outcome.replayed(), outcome.disposition()), (replayed, Disposition::Ack));
    }
    // Three deliveries fail: one by a refused commit, one by an error after the call, and one by a failed statement
    // whose error is ignored.
    for case in 0..3 {
        let (result, outcome) = transact(&pool, async |tx| {
            let paid = make_call(&bank, tx, "b", POLICY, End::Succeed).await.map_err(|it| it.0)?;
            match case {
                0 => insert(tx, "a").await,
                1 => return Err("the outbox is full".into()),
                _ => {
                    let failing = query("SELECT nothing FROM nowhere");
                    failing.execute(&mut **tx.lock().await).await.unwrap_err();
                }
            }
            Ok::<_, AnyError>(paid)
        })
        .await;
        assert!(result.is_err() && is_retry(&outcome) && !outcome.replayed(), "{case}: {result:?}, {outcome:?}");
        assert_eq!(bank.names().await, ["a"], "{case}");
    }
    let bank = Bank { records_errors: true, ..bank };
    // The recorded error is committed, and everything else in the transaction is rolled back.
    for replayed in [false, true] {
        let (result, outcome) = transact(&pool, async |tx| {
            insert(tx, "before").await;
            let paid = make_call(&bank, tx, "c", POLICY, End::Fail).await.map_err(|it| it.0)?;
            Ok::<_, AnyError>(paid)
        })
        .await;
        assert_eq!(result.unwrap_err().to_string(), "too poor");
        assert_eq!((outcome.disposition(), outcome.replayed()), (Disposition::DeadLetter, replayed));
    }
    assert_eq!(bank.names().await, ["a"]);
    // A transaction that conflicts with another one is repeated.
    let tries = Cell::new(0);
    let (paid, outcome) = transact(&pool, async |tx| {
        tries.set(tries.get() + 1);
        let level = query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ");
        level.execute(&mut **tx.lock().await).await?;
        query("SELECT count(*) FROM payments").execute(&mut **tx.lock().await).await?;
        if tries.get() == 1 {
            bank.pay_and_commit("d").await.0?;
        }
        let paid = make_call(&bank, tx, "d", POLICY, End::Succeed).await.map_err(|it| it.0)?;
        Ok::<_, AnyError>(paid)
    })
    .await;
    assert_eq!((paid.unwrap(), tries.get()), (1, 2));
    assert!(outcome.replayed() && outcome.disposition() == Disposition::Ack, "{outcome:?}");
}

#[tokio::test]
async fn a_transaction_commits_payment_and_record_together() {
    let bank = Bank::open().await;
    let pool = pool(&bank).await;
    let begin = async || SqlxTransaction::new(pool.begin().await.unwrap());

    let tx = begin().await;
    assert_eq!(pay(&tx, &bank.schema, "a").await.unwrap(), [0, 1, 255]);
    tx.into_inner().rollback().await.unwrap();
    assert_eq!((bank.payments().await, bank.state("a").await), (0, None));

    let tx = begin().await;
    let other = begin().await;
    pay(&tx, &bank.schema, "a").await.unwrap();
    let (refused, outcome) = observe(pay(&other, &bank.schema, "a")).await;
    assert!(refused.unwrap_err().to_string().contains("is running"));
    assert!(outcome.waited());
    tx.into_inner().commit().await.unwrap();
    let (paid, outcome) = observe(pay(&other, &bank.schema, "a")).await;
    assert_eq!(paid.unwrap(), [0, 1, 255]);
    assert!(outcome.replayed());
    other.into_inner().commit().await.unwrap();
    assert_eq!(bank.payments().await, 1);

    // A transaction of the other driver replays the record.
    let operation = Operation::new(&bank.store, Ok(key("a")), POLICY);
    let result = operation.run(async { Ok::<Vec<u8>, Error>(vec![]) }).await;
    assert_eq!(result.unwrap(), [0, 1, 255]);

    let tx = begin().await;
    query("SELECT 1 FROM nowhere").execute(&mut **tx.lock().await).await.unwrap_err();
    let error = pay(&tx, &bank.schema, "b").await.unwrap_err();
    let error = error.downcast::<Error>().unwrap();
    assert!(matches!(&error, Error::Store { source, .. } if source.kind() == StoreErrorKind::Aborted), "{error:?}");
}

#[tokio::test]
async fn the_error_for_a_missing_table_names_the_command_that_creates_it() {
    let bank = Bank::open().await;
    let pool = pool(&bank).await;
    bank.drop_records().await;
    let log = Log::start();
    let (paid, outcome) = transact(&pool, async |tx| pay(tx, &bank.schema, "a").await).await;
    let refused = paid.unwrap_err().downcast::<Error>().expect("an error of the library");
    tells_of_the_table(&refused, &log.end(), "transact");
    assert!(is_retry(&outcome), "{outcome:?}");
    assert_eq!(bank.payments().await, 0);
}

/// Other code waits for the lock of the transaction when a call in it is dropped.
#[tokio::test]
async fn a_call_that_is_dropped_while_other_code_waits_for_the_lock_commits_nothing() {
    let bank = Bank::open().await;
    let pool = pool_of(&bank, 1).await;
    let (result, outcome) = transact(&pool, async |tx| {
        let call = async {
            let body = async {
                insert(tx, "first").await;
                query("SELECT pg_sleep(0.3)").execute(&mut **tx.lock().await).await.ok();
                Ok::<_, Error>(1_u32)
            };
            let operation = PostgresStore::within(tx).schema(&bank.schema).operation(Ok(key("first")), POLICY);
            Ok::<_, AnyError>(operation.run(body).await?)
        };
        Box::pin(drop_beside_waiting_code(call, insert(tx, "audit"))).await
    })
    .await;
    assert!(result.is_err() && is_retry(&outcome), "{result:?}, {outcome:?}");
    for name in ["second", "third"] {
        let (paid, outcome) = transact(&pool, async |tx| {
            Ok::<_, AnyError>(make_call(&bank, tx, name, POLICY, End::Succeed).await.map_err(|it| it.0)?)
        })
        .await;
        assert_eq!((paid.unwrap(), outcome.disposition()), (1, Disposition::Ack));
        assert!(bank.names().await.contains(&name.to_owned()), "acknowledged and not committed");
    }
    assert_eq!(bank.names().await, ["second", "third"]);
}
