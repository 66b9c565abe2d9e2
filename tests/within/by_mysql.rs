//! Calls in transactions of MySQL or MariaDB, compiled once for each driver.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use idem_runtime::record::{State, StoredResult};
use idem_runtime::step::StepProblem;
use idem_runtime::within::OpenTransaction;
use idem_runtime::{
    Disposition, Error, InProgress, MemoryStore, MySqlStore, OnCrash, OnStoreError, Operation, Outcome, Policy,
    StoreErrorKind, current, idempotent, observe,
};
use idem_tests::polls::{dropped_after, next_round, poll_once};

use super::{Driver, begin, connect, execute, execute_alone, number, reopened, transact};
use crate::mysql_bank::MySqlBank;
use crate::{AnyError, Declined, End, POLICY, drop_beside_waiting_code, is_retry, key};

pub(crate) type Tx<'c> = OpenTransaction<Driver<'c>>;

#[idempotent(
    key = "{name}",
    ttl = "1h",
    store = MySqlStore::within(tx).table(table),
    scope = shared("pay"),
    fingerprint = name,
    in_progress = wait("50ms")
)]
async fn pay_by_attribute(tx: &Tx<'_>, table: &str, payments: &str, name: &str) -> Result<Vec<u8>, AnyError> {
    execute(tx, &format!("INSERT INTO {payments} VALUES ('{name}')")).await?;
    current().expect("inside").confirm_lease().await?;
    Ok(vec![0, 1, 255])
}

pub(crate) async fn insert(bank: &MySqlBank, tx: &Tx<'_>, name: &str) {
    execute(tx, &format!("INSERT INTO {} VALUES ('{name}')", bank.payments)).await.unwrap();
}

/// Pays once for `name` in the transaction `tx`.
async fn pay(bank: &MySqlBank, tx: &Tx<'_>, name: &str, policy: Policy) -> (Result<u32, Error>, Outcome) {
    let body = async {
        insert(bank, tx, name).await;
        Ok(current().unwrap().number())
    };
    let operation = MySqlStore::within(tx).table(&bank.table).operation(Ok(key(name)), policy);
    observe(operation.run(body)).await
}

/// Makes a call whose body pays and then ends as `end` says.
pub(crate) async fn make_call(
    bank: &MySqlBank,
    tx: &Tx<'_>,
    name: &str,
    policy: Policy,
    end: End,
) -> Result<u32, Declined> {
    let body = async {
        insert(bank, tx, name).await;
        match end {
            End::Succeed => Ok(current().unwrap().number()),
            End::Fail => Err(Declined("too poor".into())),
            End::FailInSql => Err(Declined(execute(tx, "SELECT nothing FROM nowhere").await.unwrap_err().to_string())),
            End::Panic => panic!("too rich"),
            End::Hang => {
                bank.hangs.set(true);
                std::future::pending().await
            }
        }
    };
    let operation = MySqlStore::within(tx).table(&bank.table).operation(Ok(key(name)), policy);
    match bank.records_errors {
        true => operation.record_errors().run(body).await,
        false => operation.run(body).await,
    }
}

async fn commit(tx: Tx<'_>) -> Result<(), AnyError> {
    Ok(tx.into_inner().commit().await?)
}

/// Pays in a transaction of its own, and commits it.
async fn pay_and_commit(bank: &MySqlBank, name: &str) -> (Result<u32, Error>, Outcome) {
    let mut connection = connect(bank).await;
    let tx = Tx::new(begin(&mut connection).await.unwrap());
    let paid = pay(bank, &tx, name, POLICY).await;
    commit(tx).await.unwrap();
    paid
}

/// Returns the session's limit of a wait for a lock, in seconds.
async fn lock_wait(tx: &Tx<'_>) -> i64 {
    number(tx, "SELECT @@SESSION.innodb_lock_wait_timeout").await
}

#[tokio::test]
async fn payment_and_record_commit_together() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    let tx = Tx::new(begin(&mut connection).await.unwrap());
    let (paid, outcome) = pay(&bank, &tx, "a", POLICY).await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.executed() && !outcome.recorded() && outcome.committed().recorded());
    assert_eq!((bank.names().await.len(), bank.state("a").await), (0, None), "invisible to others");
    let (paid, outcome) = pay(&bank, &tx, "a", POLICY).await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.replayed(), "a second call in the same transaction");
    commit(tx).await.unwrap();
    assert!(matches!(bank.state("a").await, Some(State::Completed(_))));
    let (paid, outcome) = pay_and_commit(&bank, "a").await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.replayed());

    let tx = Tx::new(begin(&mut connection).await.unwrap());
    pay(&bank, &tx, "b", POLICY).await.0.unwrap();
    tx.into_inner().rollback().await.unwrap();
    assert_eq!((bank.names().await, bank.state("b").await), (vec!["a".to_owned()], None));
    assert!(pay_and_commit(&bank, "b").await.1.executed(), "the key is free");

    // The store replays records of transactions, and transactions those of the store.
    let operation = Operation::new(&bank.store, Ok(key("b")), POLICY);
    assert_eq!(operation.run(async { Ok::<u32, Error>(7) }).await.unwrap(), 1);
    let operation = Operation::new(&bank.store, Ok(key("c")), POLICY);
    operation.run(async { Ok::<u32, Error>(7) }).await.unwrap();
    assert_eq!(pay_and_commit(&bank, "c").await.0.unwrap(), 7);
}

#[tokio::test]
async fn the_attribute_takes_a_transaction_as_its_store() {
    let bank = MySqlBank::open().await;
    for replayed in [false, true] {
        let mut connection = connect(&bank).await;
        let tx = Tx::new(begin(&mut connection).await.unwrap());
        let paid = pay_by_attribute(&tx, &bank.table, &bank.payments, "a");
        let (paid, outcome) = observe(paid).await;
        assert_eq!((paid.unwrap(), outcome.replayed()), (vec![0, 1, 255], replayed));
        commit(tx).await.unwrap();
    }
}

#[tokio::test]
async fn a_call_that_does_not_complete_is_undone() {
    let lease = Duration::from_millis(200);
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        for end in [End::Fail, End::FailInSql, End::Panic, End::Hang] {
            let bank = MySqlBank::open().await;
            let policy = POLICY.on_crash(on_crash).lease(lease);
            let mut connection = connect(&bank).await;
            let tx = Tx::new(begin(&mut connection).await.unwrap());
            insert(&bank, &tx, "before").await;
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
            if matches!(end, End::Hang | End::Panic) {
                let refused = make_call(&bank, &tx, "b", POLICY, End::Succeed).await;
                assert!(refused.is_err(), "{refused:?}");
                AssertUnwindSafe(commit(tx)).catch_unwind().await.expect_err("no commit may seem to succeed");
                drop(connection);
                assert_eq!(bank.names().await, Vec::<String>::new(), "{on_crash:?}, {end:?}");
                assert_eq!(bank.state("a").await, None, "{on_crash:?}, {end:?}");
                continue;
            }
            make_call(&bank, &tx, "b", POLICY, End::Succeed).await.unwrap();
            commit(tx).await.unwrap();
            assert_eq!(bank.names().await, ["b", "before"], "{on_crash:?}, {end:?}");
            let state = bank.state("a").await;
            assert_eq!(state, Some(State::Released), "{on_crash:?}, {end:?}");
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
        let bank = MySqlBank::open().await;
        let mut polls = 0;
        for round in 0.. {
            let name = format!("{name} {round}");
            let mut connection = connect(&bank).await;
            let tx = Tx::new(begin(&mut connection).await.unwrap());
            let pause = async || tokio::time::sleep(Duration::from_millis(3)).await;
            let is_over = dropped_after(polls, make_call(&bank, &tx, &name, policy, end), pause).await;
            // Either payment and record are both committed, or the commit fails and neither is committed.
            let committed = AssertUnwindSafe(commit(tx)).catch_unwind().await.is_ok_and(|it| it.is_ok());
            // The connection has no open transaction, in which a later statement would never be committed.
            let alone = format!("INSERT INTO {} VALUES ('alone {name}')", bank.payments);
            let is_usable = execute_alone(&mut connection, &alone).await.unwrap();
            assert_eq!(bank.names().await.contains(&format!("alone {name}")), is_usable, "{name}");
            drop(connection);
            let (state, paid) = (bank.state(&name).await, bank.names().await.contains(&name));
            match (&state, paid) {
                (Some(State::Completed(_)), true) if committed => {}
                (None | Some(State::Released), false) => {}
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
async fn nested_calls_are_undone_with_their_outer_call() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    for outer_fails in [false, true] {
        let tx = Tx::new(begin(&mut connection).await.unwrap());
        let outer = async {
            insert(&bank, &tx, "outer").await;
            Box::pin(make_call(&bank, &tx, "failed", POLICY, End::FailInSql)).await.unwrap_err();
            Box::pin(make_call(&bank, &tx, "inner", POLICY, End::Succeed)).await.unwrap();
            if outer_fails { Err(Error::NoAttempt) } else { Ok(7) }
        };
        let within = MySqlStore::within(&tx).table(&bank.table);
        let result = within.operation(Ok(key("outer")), POLICY).run(outer).await;
        assert_eq!(result.is_err(), outer_fails);
        if outer_fails {
            commit(tx).await.unwrap();
            assert_eq!(bank.names().await, Vec::<String>::new());
            assert_eq!((bank.state("inner").await, bank.state("failed").await), (None, None));
            assert_eq!(bank.state("outer").await, Some(State::Released));
        } else {
            tx.into_inner().rollback().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_duplicate_in_another_transaction_is_in_progress_and_then_replays() {
    let bank = MySqlBank::open().await;
    let (mut first, mut second) = (connect(&bank).await, connect(&bank).await);
    let tx = Tx::new(begin(&mut first).await.unwrap());
    let other = Tx::new(begin(&mut second).await.unwrap());
    // The snapshot of this transaction is older than the record.
    execute(&other, "SET SESSION innodb_lock_wait_timeout = 7").await.unwrap();
    execute(&other, &format!("SELECT count(*) FROM {}", bank.payments)).await.unwrap();
    pay(&bank, &tx, "a", POLICY).await.0.unwrap();
    for policy in [POLICY, POLICY.in_progress(InProgress::Wait(Duration::from_millis(50)))] {
        let asked = Instant::now();
        let (refused, outcome) = pay(&bank, &other, "a", policy).await;
        assert!(matches!(refused, Err(Error::InProgress { attempt: 1, .. })), "{refused:?}");
        assert!(is_retry(&outcome) && asked.elapsed() < Duration::from_secs(60));
        assert_eq!(lock_wait(&other).await, 7, "the settings of the session have not changed");
    }
    assert!(pay(&bank, &other, "b", POLICY).await.1.executed(), "the transaction goes on");
    commit(tx).await.unwrap();
    let (paid, outcome) = pay(&bank, &other, "a", POLICY).await;
    assert_eq!(paid.unwrap(), 1);
    assert!(outcome.replayed(), "{outcome:?}");
    assert_eq!(lock_wait(&other).await, 7);
    commit(other).await.unwrap();
    assert_eq!(bank.names().await, ["a", "b"]);
}

#[tokio::test]
async fn a_duplicate_waits_for_the_commit_or_the_rollback() {
    let bank = MySqlBank::open().await;
    for commits in [true, false] {
        let name = if commits { "commits" } else { "rolls back" };
        let (mut first, mut second) = (connect(&bank).await, connect(&bank).await);
        let tx = Tx::new(begin(&mut first).await.unwrap());
        pay(&bank, &tx, name, POLICY).await.0.unwrap();
        let other = Tx::new(begin(&mut second).await.unwrap());
        let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)));
        let mut waiting = Box::pin(pay(&bank, &other, name, policy));
        // The reservation waits for a second, which the servers measure once a second. The call waits after it.
        let until = Instant::now() + Duration::from_millis(2500);
        while Instant::now() < until {
            assert!(poll_once(waiting.as_mut()).await.is_pending());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if commits {
            commit(tx).await.unwrap();
        } else {
            tx.into_inner().rollback().await.unwrap();
        }
        let (paid, outcome) = waiting.await;
        assert_eq!(paid.unwrap(), 1);
        assert!(outcome.waited());
        commit(other).await.unwrap();
        assert_eq!((outcome.replayed(), outcome.executed()), (commits, !commits));
    }
    assert_eq!(bank.names().await.len(), 2);
}

#[tokio::test]
async fn concurrent_replays_in_two_transactions_do_not_wait_for_each_other() {
    let bank = MySqlBank::open().await;
    pay_and_commit(&bank, "a").await.0.unwrap();
    let (mut first, mut second) = (connect(&bank).await, connect(&bank).await);
    let (tx, other) = (Tx::new(begin(&mut first).await.unwrap()), Tx::new(begin(&mut second).await.unwrap()));
    for tx in [&tx, &other] {
        let (paid, outcome) = pay(&bank, tx, "a", POLICY).await;
        assert!(paid.is_ok() && outcome.replayed() && !outcome.waited(), "{paid:?}");
    }
}

#[tokio::test]
async fn transactions_of_neighbouring_keys_commit() {
    let bank = MySqlBank::open().await;
    let (mut first, mut second) = (connect(&bank).await, connect(&bank).await);
    let (tx, other) = (Tx::new(begin(&mut first).await.unwrap()), Tx::new(begin(&mut second).await.unwrap()));
    for n in 0..10 {
        pay(&bank, &tx, &format!("{n} a"), POLICY).await.0.unwrap();
        pay(&bank, &other, &format!("{n} b"), POLICY).await.0.unwrap();
    }
    commit(tx).await.unwrap();
    commit(other).await.unwrap();
    assert_eq!(bank.names().await.len(), 20);
}

#[tokio::test]
async fn a_lapsed_attempt_is_taken_over_and_an_interrupted_one_is_not() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    for (name, on_crash) in [("retry", OnCrash::Retry), ("fail", OnCrash::Fail)] {
        let policy = POLICY.on_crash(on_crash).lease(Duration::from_millis(100));
        bank.abandon(name, on_crash).await;
        let tx = Tx::new(begin(&mut connection).await.unwrap());
        let (paid, outcome) = pay(&bank, &tx, name, policy).await;
        match on_crash {
            OnCrash::Retry => assert!(matches!(paid, Ok(2)) && outcome.executed(), "{paid:?}"),
            _ => assert!(matches!(paid, Err(Error::Interrupted { attempt: 1, .. })), "{paid:?}"),
        }
        commit(tx).await.unwrap();
    }
    assert_eq!(bank.names().await, ["retry"]);
}

#[tokio::test]
async fn a_result_larger_than_a_packet_ends_the_operation_without_its_result() {
    let bank = MySqlBank::with_packets_of(1024 * 1024).await;
    let mut connection = connect(&bank).await;
    let policy = POLICY.max_result_bytes(10_000_000);
    for bytes in [600_000, 2_000_000] {
        let name = &format!("{bytes}");
        let tx = Tx::new(begin(&mut connection).await.unwrap());
        let operation = MySqlStore::within(&tx).table(&bank.table).operation(Ok(key(name)), policy);
        let body = async {
            insert(&bank, &tx, name).await;
            Ok::<_, Error>("x".repeat(bytes))
        };
        let (result, outcome) = observe(operation.run(body)).await;
        commit(tx).await.unwrap();
        let outcome = outcome.committed();
        assert!(result.is_ok() && outcome.recorded() && !outcome.result_stored(), "{outcome:?}");
        assert!(matches!(bank.state(name).await, Some(State::Completed(StoredResult::TooLarge { .. }))));
    }
    assert_eq!(bank.names().await.len(), 2);
    let tx = Tx::new(begin(&mut connection).await.unwrap());
    let operation = MySqlStore::within(&tx).table(&bank.table).operation(Ok(key("fits")), policy);
    operation.run(async { Ok::<_, Error>("x".repeat(400_000)) }).await.unwrap();
    commit(tx).await.unwrap();
    assert!(matches!(bank.state("fits").await, Some(State::Completed(StoredResult::Encoded { .. }))));
}

#[tokio::test]
async fn a_missing_table_is_an_error_that_names_the_command() {
    let bank = MySqlBank::open().await;
    bank.execute(&format!("DROP TABLE {}", bank.table)).await;
    let mut connection = connect(&bank).await;
    let tx = Tx::new(begin(&mut connection).await.unwrap());
    let error = pay(&bank, &tx, "a", POLICY).await.0.unwrap_err();
    let Error::Store { source, .. } = error else { panic!("{error}") };
    assert_eq!(source.kind(), StoreErrorKind::Misconfigured);
    assert!(source.to_string().contains("ensure_schema"), "{source}");
}

#[tokio::test]
async fn a_transaction_is_begun_committed_and_acknowledged_by_the_library() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    for replayed in [false, true] {
        let (paid, outcome) =
            transact(&mut connection, async |tx| Ok::<_, AnyError>(pay(&bank, tx, "a", POLICY).await.0?)).await;
        assert_eq!((paid.unwrap(), outcome.replayed(), outcome.disposition()), (1, replayed, Disposition::Ack));
    }
    // A delivery fails after its call. The attempt counts, because its end is written after the rollback.
    let (result, outcome) = transact(&mut connection, async |tx| {
        pay(&bank, tx, "b", POLICY).await.0?;
        Err::<u32, AnyError>("the outbox is full".into())
    })
    .await;
    assert!(result.is_err() && is_retry(&outcome) && !outcome.recorded(), "{outcome:?}");
    assert_eq!((bank.names().await, bank.state("b").await), (vec!["a".to_owned()], Some(State::Released)));
    // In contrast to PostgreSQL, a failed statement leaves the transaction open.
    let (paid, outcome) = transact(&mut connection, async |tx| {
        execute(tx, "SELECT nothing FROM nowhere").await.unwrap_err();
        Ok::<_, AnyError>(pay(&bank, tx, "b", POLICY.max_attempts(2)).await.0?)
    })
    .await;
    assert_eq!((paid.unwrap(), outcome.disposition()), (2, Disposition::Ack));
    // A recorded error is committed, and everything else in the transaction is rolled back.
    let bank = MySqlBank { records_errors: true, ..bank };
    for replayed in [false, true] {
        let (result, outcome) = transact(&mut connection, async |tx| {
            insert(&bank, tx, "before").await;
            Ok::<_, AnyError>(make_call(&bank, tx, "c", POLICY, End::Fail).await.map_err(|it| it.0)?)
        })
        .await;
        assert_eq!(result.unwrap_err().to_string(), "too poor");
        assert_eq!((outcome.disposition(), outcome.replayed()), (Disposition::DeadLetter, replayed));
    }
    assert_eq!(bank.names().await, ["a", "b"]);
}

/// Makes a deadlock with `tx`, which the server ends in favour of the other transaction: the other one has written
/// more. Returns the error of the statement in `tx`.
async fn deadlock(bank: &MySqlBank, tx: &Tx<'_>, statement: impl AsyncFnOnce() -> Result<(), AnyError>) -> AnyError {
    let mut connection = connect(bank).await;
    let other = Tx::new(begin(&mut connection).await.unwrap());
    for n in 0..200 {
        insert(bank, &other, &format!("heavy {n}")).await;
    }
    lock_row(bank, &other, "one").await;
    lock_row(bank, tx, "two").await;
    let waiting = async { lock_row(bank, &other, "two").await };
    // The statement in `tx` waits for `one`, while `other` waits for `two`.
    let ((), refused) = futures::join!(waiting, statement());
    other.into_inner().rollback().await.unwrap();
    refused.expect_err("the server has chosen this transaction")
}

async fn lock_row(bank: &MySqlBank, tx: &Tx<'_>, row: &str) {
    execute(tx, &format!("UPDATE {} SET n = n + 1 WHERE name = '{row}'", bank.locks)).await.unwrap();
}

#[tokio::test]
async fn a_transaction_that_the_server_has_ended_is_never_committed() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    for (name, in_body) in [("in the body", true), ("after the call", false)] {
        let update = format!("UPDATE {} SET n = n + 1 WHERE name = 'one'", bank.locks);
        let (result, outcome) = transact(&mut connection, async |tx| {
            let body = async {
                insert(&bank, tx, name).await;
                if in_body {
                    // The body swallows the error, and goes on.
                    deadlock(&bank, tx, async || execute(tx, &update).await).await;
                }
                Ok(1_u32)
            };
            let operation = MySqlStore::within(tx).table(&bank.table).operation(Ok(key(name)), POLICY);
            let paid: Result<u32, Error> = operation.run(body).await;
            if !in_body {
                paid?;
                deadlock(&bank, tx, async || execute(tx, &update).await).await;
            }
            Ok::<_, AnyError>(1_u32)
        })
        .await;
        assert!(result.is_err() && is_retry(&outcome), "{name}: {result:?}, {outcome:?}");
        assert!(!bank.names().await.contains(&name.to_owned()), "{name}");
        assert!(!matches!(bank.state(name).await, Some(State::Completed(_))), "{name}");
        // The connection is usable.
        let (paid, outcome) =
            transact(&mut connection, async |tx| Ok::<_, AnyError>(pay(&bank, tx, name, POLICY).await.0?)).await;
        assert!(paid.is_ok() && outcome.disposition() == Disposition::Ack, "{name}: {paid:?}, {outcome:?}");
    }
    // A statement that commits is found, too.
    let (result, outcome) = transact(&mut connection, async |tx| {
        let paid = pay(&bank, tx, "ddl", POLICY).await.0?;
        execute(tx, &format!("CREATE TABLE {}_more (n int)", bank.payments)).await?;
        Ok::<_, AnyError>(paid)
    })
    .await;
    assert!(result.is_err() && is_retry(&outcome), "{result:?}, {outcome:?}");
}

#[tokio::test]
async fn a_transaction_that_conflicts_in_a_statement_of_the_library_is_retried() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    let tries = Cell::new(0);
    let (paid, outcome) = transact(&mut connection, async |tx| {
        tries.set(tries.get() + 1);
        if tries.get() > 1 {
            return Ok::<_, AnyError>(pay(&bank, tx, "a", POLICY).await.0?);
        }
        let mut other = connect(&bank).await;
        let other = Tx::new(begin(&mut other).await.unwrap());
        for n in 0..200 {
            insert(&bank, &other, &format!("heavy {n}")).await;
        }
        pay(&bank, &other, "a", POLICY).await.0?;
        lock_row(&bank, tx, "two").await;
        // The reservation waits for the record of the other transaction, which waits for a row of this one.
        let ((), paid) = futures::join!(lock_row(&bank, &other, "two"), pay(&bank, tx, "a", POLICY));
        other.into_inner().rollback().await?;
        Ok(paid.0?)
    })
    .await;
    assert_eq!((paid.unwrap(), tries.get(), outcome.disposition()), (1, 2, Disposition::Ack));
    assert_eq!(bank.names().await, ["a"]);
    // The limits of the session are the server's again.
    let tx = Tx::new(begin(&mut connection).await.unwrap());
    let limits = "SELECT @@SESSION.innodb_lock_wait_timeout = @@GLOBAL.innodb_lock_wait_timeout \
                  AND @@SESSION.lock_wait_timeout = @@GLOBAL.lock_wait_timeout";
    assert_eq!(number(&tx, limits).await, 1);
}

#[tokio::test]
async fn a_killed_session_undoes_payment_and_record() {
    let bank = MySqlBank::open().await;
    for _ in 0..2 {
        let mut connection = connect(&bank).await;
        let (result, outcome) = transact(&mut connection, async |tx| {
            let paid = pay(&bank, tx, "a", POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)))).await.0?;
            let session = number(tx, "SELECT connection_id()").await;
            bank.execute(&format!("KILL {session}")).await;
            Ok::<_, AnyError>(paid)
        })
        .await;
        assert!(result.is_err() && is_retry(&outcome), "{result:?}, {outcome:?}");
    }
    // A pool opens another connection, on which the ends of the attempts are written.
    let state = bank.state("a").await;
    assert!(matches!(state, None | Some(State::Released)), "{state:?}");
    assert_eq!(bank.names().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_delivery_that_is_dropped_is_rolled_back() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    {
        let work = async |tx: &Tx<'_>| make_call(&bank, tx, "a", POLICY, End::Hang).await.map_err(|it| it.0.into());
        let mut delivery = Box::pin(transact::<u32, AnyError, _>(&mut connection, work));
        while !bank.hangs.get() {
            assert!(poll_once(delivery.as_mut()).await.is_pending());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    let (paid, outcome) = transact(&mut connection, async |tx| {
        let waits = POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)));
        Ok::<_, AnyError>(pay(&bank, tx, "a", waits).await.0?)
    })
    .await;
    assert_eq!((paid.unwrap(), outcome.disposition()), (1, Disposition::Ack));
    assert_eq!(bank.names().await, ["a"]);
}

#[tokio::test]
async fn a_step_and_its_row_commit_together() {
    let bank = MySqlBank::open().await;
    let runs = Cell::new(0);
    let store = idem_runtime::MemoryStore::new();
    for delivery in 1..=3 {
        let body = async {
            let mut connection = connect(&bank).await;
            let tx = Tx::new(begin(&mut connection).await.unwrap());
            let debit = current()?.step("debit").within(MySqlStore::within(&tx).table(&bank.table));
            let debited = debit
                .run(async |step| {
                    runs.set(runs.get() + 1);
                    insert(&bank, &tx, step.name()).await;
                    Ok::<_, Error>(runs.get())
                })
                .await?;
            // The first transaction is rolled back, and the second is committed.
            if delivery == 1 {
                tx.into_inner().rollback().await.unwrap();
            } else {
                commit(tx).await.unwrap();
            }
            if delivery < 3 { Err(Error::NoAttempt) } else { Ok(debited) }
        };
        let done = Operation::new(&store, Ok(key("order")), POLICY).run(body).await;
        assert_eq!(done.ok(), (delivery == 3).then_some(2));
    }
    assert_eq!((bank.names().await, runs.get()), (vec!["debit".to_owned()], 2));
}

/// A duplicate never gets a result that is not committed, or that an operator has forgotten since its transaction
/// began.
#[tokio::test]
async fn a_duplicate_reads_neither_an_uncommitted_nor_an_old_result() {
    let bank = MySqlBank::open().await;
    for level in ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        pay_and_commit(&bank, level).await.0.unwrap();
        let (mut first, mut second) = (connect(&bank).await, connect(&bank).await);
        let tx = Tx::new(begin(&mut first).await.unwrap());
        let set = Tx::new(begin(&mut second).await.unwrap());
        execute(&set, &format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}")).await.unwrap();
        commit(set).await.unwrap();
        let other = Tx::new(begin(&mut second).await.unwrap());
        if level != "SERIALIZABLE" {
            execute(&other, &format!("SELECT count(*) FROM {}", bank.table)).await.unwrap();
        }
        bank.execute(&format!("DELETE FROM {}", bank.table)).await;
        assert!(pay(&bank, &tx, level, POLICY).await.1.executed(), "{level}");
        let (refused, _) = pay(&bank, &other, level, POLICY).await;
        assert!(matches!(refused, Err(Error::InProgress { .. })), "{level}: {refused:?}");
        tx.into_inner().rollback().await.unwrap();
        other.into_inner().rollback().await.unwrap();
    }
}

#[tokio::test]
async fn a_delivery_can_be_dropped_at_every_await() {
    let bank = MySqlBank::open().await;
    let mut polls = 0;
    for round in 0.. {
        let mut connection = connect(&bank).await;
        let (first, second) = (format!("first {round}"), format!("second {round}"));
        let is_over = {
            let delivery =
                transact(&mut connection, async |tx| Ok::<_, AnyError>(pay(&bank, tx, &first, POLICY).await.0?));
            let pause = async || tokio::time::sleep(Duration::from_millis(3)).await;
            dropped_after(polls, Box::pin(delivery), pause).await
        };
        // The connection, or the next one of the pool, has no open transaction and no foreign answer.
        let alone = format!("INSERT INTO {} VALUES ('{second}')", bank.payments);
        let is_usable = execute_alone(&mut connection, &alone).await.unwrap();
        let names = bank.names().await;
        assert_eq!(names.contains(&second), is_usable, "{round}");
        let is_recorded = matches!(bank.state(&first).await, Some(State::Completed(_)));
        assert_eq!(names.contains(&first), is_recorded, "{round}");
        let Some(next) = next_round(polls, is_over) else { break };
        polls = next;
    }
}

/// Other code waits for the lock of the transaction when a call in it is dropped.
#[tokio::test]
async fn a_call_that_is_dropped_while_other_code_waits_for_the_lock_commits_nothing() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    let (result, outcome) = transact(&mut connection, async |tx| {
        let call = async {
            let body = async {
                insert(&bank, tx, "first").await;
                execute(tx, "SELECT SLEEP(0.3)").await.ok();
                Ok::<_, Error>(1_u32)
            };
            let operation = MySqlStore::within(tx).table(&bank.table).operation(Ok(key("first")), POLICY);
            Ok::<_, AnyError>(operation.run(body).await?)
        };
        drop_beside_waiting_code(call, insert(&bank, tx, "audit")).await
    })
    .await;
    assert!(result.is_err() && is_retry(&outcome), "{result:?}, {outcome:?}");
    let mut connection = reopened(&bank, connection).await;
    for name in ["second", "third"] {
        let (paid, outcome) =
            transact(&mut connection, async |tx| Ok::<_, AnyError>(pay(&bank, tx, name, POLICY).await.0?)).await;
        assert_eq!((paid.unwrap(), outcome.disposition()), (1, Disposition::Ack));
        assert!(bank.names().await.contains(&name.to_owned()), "acknowledged and not committed");
    }
    assert_eq!(bank.names().await, ["second", "third"]);
}

#[tokio::test]
async fn a_locked_table_delays_a_call_by_seconds_only() {
    let bank = MySqlBank::open().await;
    let mut locking = idem_tests::mysql::raw(&bank.url).await;
    mysql_async::prelude::Queryable::query_drop(&mut locking, format!("LOCK TABLES {} WRITE", bank.table))
        .await
        .unwrap();
    let mut connection = connect(&bank).await;
    let delivery = transact(&mut connection, async |tx| Ok::<_, AnyError>(pay(&bank, tx, "a", POLICY).await.0?));
    let (paid, outcome) = tokio::time::timeout(Duration::from_secs(60), delivery).await.expect("is limited");
    assert!(paid.is_err() && is_retry(&outcome), "{paid:?}, {outcome:?}");
}

#[tokio::test]
async fn no_body_runs_in_a_transaction_that_has_ended() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    let policy = POLICY.on_store_error(OnStoreError::Run);
    let update = format!("UPDATE {} SET n = n + 1 WHERE name = 'one'", bank.locks);
    let (result, outcome) = transact(&mut connection, async |tx| {
        deadlock(&bank, tx, async || execute(tx, &update).await).await;
        Ok::<_, AnyError>(pay(&bank, tx, "a", policy).await.0?)
    })
    .await;
    assert!(result.is_err() && is_retry(&outcome) && !outcome.executed(), "{result:?}, {outcome:?}");
    assert_eq!((bank.names().await.len(), bank.state("a").await), (0, None));
}

/// The limit passes while the server executes a statement of the body, or before.
#[tokio::test]
async fn a_step_is_undone_at_its_time_limit() {
    let bank = MySqlBank::open().await;
    let mut connection = connect(&bank).await;
    let tx = Tx::new(begin(&mut connection).await.unwrap());
    let body = async {
        let attempt = current()?;
        let records = || MySqlStore::within(&tx).table(&bank.table);
        let debit = attempt.step("debit").timeout(Duration::from_millis(20)).within(records());
        let slow = debit.run(async |_| {
            insert(&bank, &tx, "slow").await;
            execute(&tx, "DO SLEEP(0.2)").await.unwrap();
            std::future::pending::<Result<u32, Error>>().await
        });
        let slow = slow.await;
        assert!(matches!(slow, Err(Error::Step { problem: StepProblem::TimedOut { .. }, .. })), "{slow:?}");
        let credit = attempt.step("credit").within(records());
        credit
            .run(async |_| {
                insert(&bank, &tx, "a").await;
                Ok::<_, Error>(1_u32)
            })
            .await
    };
    let ended = Operation::new(&MemoryStore::new(), Ok(key("order")), POLICY).run(body).await;
    // A driver that can't go on after a dropped statement commits nothing.
    let is_committed = ended.is_ok() && commit(tx).await.is_ok();
    assert_eq!(bank.names().await, if is_committed { vec!["a"] } else { vec![] }, "{ended:?}");
}
