//! Steps whose entry is a record in the user's transaction.

use idem_runtime::key::Fingerprint;
use idem_runtime::policy::{OnUndecodable, StepPolicy};
use idem_runtime::step::StepProblem;
use idem_runtime::{Json, StoreExt as _, Undecodable};
use mysql_async::TxOpts;

use super::super::*;

/// Runs attempts of one operation, whose record is in a store of its own, until one of them returns `Ok`.
async fn attempts<T>(store: &impl Store, body: impl AsyncFn(u32) -> Result<T, Error>) -> T
where
    T: serde::Serialize + for<'a> serde::Deserialize<'a>,
{
    for delivery in 1..10 {
        if let Ok(value) = Operation::new(store, Ok(key("order")), POLICY).run(body(delivery)).await {
            return value;
        }
    }
    panic!("no attempt has succeeded");
}

/// Returns the problem of the step that `error` names.
fn problem(error: &Error) -> &StepProblem {
    match error {
        Error::Step { problem, .. } => problem,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn in_sqlite_a_step_and_its_row_commit_together() {
    let (till, runs) = (Till::new(), Cell::new(0));
    let till = &till;
    let fulfilled = attempts(&MemoryStore::new(), async |delivery| {
        let mut connection = till.connection();
        let tx = begin(&mut connection);
        let debit = current()?.step("debit").fingerprint("25 EUR").within(SqliteStore::within(&tx));
        let debited = debit.run(async |step| {
            runs.set(runs.get() + 1);
            assert_eq!(step.child_key(), current().unwrap().key().text(), "the record of the step has its child key");
            tx.execute("INSERT INTO payments VALUES (?1)", [step.name()]).unwrap();
            Ok::<_, Error>(runs.get())
        });
        let debited = debited.await?;
        // The first transaction is rolled back. The second is committed, and its handler fails later.
        match delivery {
            1 => drop(tx),
            _ => tx.into_inner().commit().unwrap(),
        }
        if delivery < 4 { Err(Error::NoAttempt) } else { Ok(debited) }
    })
    .await;
    assert_eq!((fulfilled, runs.get(), till.payments()), (2, 2, 1), "two runs, of which one was rolled back");
}

#[tokio::test]
async fn a_step_in_a_transaction_keeps_the_rules_of_steps() {
    let till = Till::new();
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    let body = async {
        let attempt = current()?;
        let debit = |name: &'static str| attempt.step(name).within(SqliteStore::within(&tx));
        let pay = |name: &str| tx.execute("INSERT INTO payments VALUES (?1)", [name]).unwrap();
        let failed = debit("debit").run(async |_| {
            pay("undone");
            Err::<u32, _>(Error::NoAttempt)
        });
        assert!(matches!(failed.await, Err(Error::NoAttempt)));
        // The body of the first call failed, so the name is free.
        let nested = debit("debit").run(async |step| {
            let inner = step.attempt().step("inner").run(async |_| Ok::<_, Error>(0_u32)).await;
            assert!(matches!(inner, Err(Error::Step { problem: StepProblem::Nested, .. })), "{inner:?}");
            pay("debit");
            Ok::<_, Error>(1_u32)
        });
        assert_eq!(nested.await?, 1);
        let twice = debit("debit").run(async |_| Ok::<_, Error>(0_u32)).await;
        assert!(matches!(twice, Err(Error::Step { problem: StepProblem::UsedTwice, .. })), "{twice:?}");
        // A journaled step stays journaled.
        attempt.step("journaled").run(async |_| Ok::<_, Error>(7_u32)).await?;
        Ok::<_, Error>(2_u32)
    };
    let store = MemoryStore::new();
    assert_eq!(Operation::new(&store, Ok(key("rules")), POLICY).run(body).await.unwrap(), 2);
    tx.into_inner().commit().unwrap();
    assert_eq!(till.payments(), 1, "the writes of the failed body are undone");
    let names: String = till.connection().query_row("SELECT name FROM payments", [], |row| row.get(0)).unwrap();
    assert_eq!(names, "debit");
}

/// A version of the handler under `.fail()` died in the step, and the next version has the step in a transaction.
#[tokio::test]
async fn a_step_in_doubt_does_not_run_in_a_transaction() {
    let (till, store) = (Till::new(), MemoryStore::new());
    let body = async {
        let step = current()?.step("debit").fail().timeout(std::time::Duration::from_millis(1));
        step.run(async |_| std::future::pending::<Result<u32, Error>>().await).await
    };
    assert!(Operation::new(&store, Ok(key("order")), POLICY).run(body).await.is_err());
    let operator = store.operator().by("alice").reason("INC-7");
    let found = operator.inspect(&key("order")).await.unwrap().unwrap();
    operator.reopen(&key("order"), &found).await.unwrap();
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    let body = async {
        let debit = current()?.step("debit").within(SqliteStore::within(&tx));
        debit.run(async |_| -> Result<u32, Error> { unreachable!("the step is in doubt") }).await
    };
    let refused = Operation::new(&store, Ok(key("order")), POLICY).run(body).await;
    assert!(matches!(refused, Err(Error::Step { problem: StepProblem::Interrupted { .. }, .. })), "{refused:?}");
}

#[tokio::test]
async fn other_inputs_of_a_step_in_a_transaction_are_refused() {
    let till = &Till::new();
    let refused = Cell::new(0);
    attempts(&MemoryStore::new(), async |delivery| {
        let mut connection = till.connection();
        let tx = begin(&mut connection);
        let cents = if delivery == 2 { 50 } else { 25 };
        let debit = current()?.step("debit").fingerprint(&cents).within(SqliteStore::within(&tx));
        let debited =
            debit.run(async |_| Ok::<_, Error>(tx.execute("INSERT INTO payments VALUES ('a')", []).unwrap())).await;
        if delivery == 2 {
            let error = debited.as_ref().unwrap_err();
            let of = |cents: i32| Fingerprint::of(&cents).unwrap();
            let text = format!("(fingerprint {}, now {})", of(25).short(), of(50).short());
            assert!(error.to_string().contains(&text) && !error.is_misconfigured(), "{error}");
            match problem(error) {
                StepProblem::OtherInputs { attempt: 1, recorded: Some(recorded), presented, .. } => {
                    assert_eq!((**recorded, **presented), (of(25), of(50)));
                }
                other => panic!("{other:?}"),
            }
            refused.set(refused.get() + 1);
        }
        debited?;
        tx.into_inner().commit().unwrap();
        if delivery == 1 { Err(Error::NoAttempt) } else { Ok(()) }
    })
    .await;
    assert_eq!((refused.get(), till.payments()), (1, 1));
}

#[tokio::test]
async fn a_step_in_a_transaction_is_undone_at_its_time_limit() {
    const LIMIT: Duration = Duration::from_millis(1);
    for mode in [Mode::Enforce, Mode::Off] {
        let (till, bank) = (Till::new(), Bank::open().await);
        let (mut connection, mut client) = (till.connection(), bank.client().await);
        let tx = begin(&mut connection);
        let pg_tx = OpenTransaction::new(client.transaction().await.unwrap());
        let body = async {
            let attempt = current()?;
            let debit = attempt.step("debit").timeout(LIMIT).within(SqliteStore::within(&tx));
            let slow = debit.run(async |_| {
                tx.execute("INSERT INTO payments VALUES ('slow')", []).unwrap();
                std::future::pending::<Result<u32, Error>>().await
            });
            let error = slow.await.unwrap_err();
            assert!(matches!(problem(&error), StepProblem::TimedOut { timeout: LIMIT, .. }), "{error}");
            assert!(matches!(error.disposition(), Disposition::Retry { .. }), "{error}");
            let records = PostgresStore::within(&pg_tx).schema(&bank.schema);
            let slow = attempt.step("credit").timeout(LIMIT).within(records).run(async |_| {
                pg_tx.execute("INSERT INTO payments VALUES ('slow')", &[]).await.unwrap();
                // The limit passes while the server executes this statement.
                pg_tx.execute("SELECT pg_sleep(0.05)", &[]).await.unwrap();
                std::future::pending::<Result<u32, Error>>().await
            });
            let error = slow.await.unwrap_err();
            assert!(matches!(problem(&error), StepProblem::TimedOut { timeout: LIMIT, .. }), "{error}");
            if mode == Mode::Off {
                return Ok(0);
            }
            // The names are free again, and both transactions can be committed.
            let debit = attempt.step("debit").timeout(Duration::from_secs(3600)).within(SqliteStore::within(&tx));
            debit.run(async |_| Ok::<_, Error>(tx.execute("INSERT INTO payments VALUES ('a')", []).unwrap())).await?;
            let credit = attempt.step("credit").within(PostgresStore::within(&pg_tx).schema(&bank.schema));
            let credited = credit
                .run(async |_| Ok::<_, Error>(pg_tx.execute("INSERT INTO payments VALUES ('a')", &[]).await.unwrap()));
            credited.await
        };
        Operation::new(&MemoryStore::new(), Ok(key("order")), POLICY.mode(mode)).run(body).await.unwrap();
        if mode == Mode::Off {
            continue;
        }
        tx.into_inner().commit().unwrap();
        pg_tx.into_inner().commit().await.unwrap();
        assert_eq!((till.payments(), bank.payments().await), (1, 1), "the writes before the limit are undone");
    }
}

#[tokio::test]
async fn a_value_of_another_type_in_a_transaction_is_refused_or_migrated() {
    fn migrate(recorded: Undecodable<'_>) -> Result<Vec<u8>, CodecError> {
        let old: u32 = recorded.decode()?;
        Json::encode(&format!("{old} cents"))
    }
    let (till, store) = (Till::new(), MemoryStore::new());
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    let body = async {
        current()?.step("debit").within(SqliteStore::within(&tx)).run(async |_| Ok::<_, Error>(25_u32)).await?;
        Err::<String, _>(Error::NoAttempt)
    };
    assert!(Operation::new(&store, Ok(key("order")), POLICY).run(body).await.is_err());
    tx.into_inner().commit().unwrap();
    let next_version = async |reaction| {
        let mut connection = till.connection();
        let tx = begin(&mut connection);
        let body = async {
            let debit = current()?.step("debit").on_undecodable(reaction).within(SqliteStore::within(&tx));
            debit.run(async |_| -> Result<String, Error> { unreachable!("the step has ended") }).await
        };
        Operation::new(&store, Ok(key("order")), POLICY).run(body).await
    };
    let error = next_version(OnUndecodable::Error).await.unwrap_err();
    assert!(error.is_misconfigured(), "{error}");
    match problem(&error) {
        StepProblem::ValueUnavailable { attempt: 1, problem, .. } => {
            assert!(matches!(**problem, ResultProblem::Undecodable { .. }), "{problem}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(next_version(OnUndecodable::Migrate(migrate)).await.unwrap(), "25 cents");
}

#[tokio::test]
async fn the_policy_of_the_steps_limits_a_value_in_a_transaction() {
    let (till, store) = (Till::new(), MemoryStore::new());
    for delivery in 1..=2 {
        let mut connection = till.connection();
        let tx = begin(&mut connection);
        let body = async {
            let attempt = current()?;
            attempt.set_step_policy(StepPolicy::new().max_value_bytes(8));
            let debit = attempt.step("debit").within(SqliteStore::within(&tx));
            debit.run(async |_| Ok::<_, Error>("a long text".to_owned())).await?;
            Err::<u32, _>(Error::NoAttempt)
        };
        let error = Operation::new(&store, Ok(key("order")), POLICY).run(body).await.unwrap_err();
        match (delivery, error) {
            (1, error) => assert!(matches!(error, Error::NoAttempt), "this attempt has the value: {error}"),
            (_, error) => match problem(&error) {
                StepProblem::ValueUnavailable { attempt: 1, problem, .. } => {
                    assert!(matches!(**problem, ResultProblem::TooLarge { size: 13, .. }), "{problem}");
                }
                other => panic!("{other:?}"),
            },
        }
        tx.into_inner().commit().unwrap();
    }
}

#[tokio::test]
async fn names_in_a_transaction_are_checked_before_the_body_runs() {
    let till = Till::new();
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    let body = async {
        let attempt = current()?;
        for name in ["", " ", "idem:x", "a[b"] {
            for step in [attempt.step(name), attempt.step("debit").was(name)] {
                let step = step.within(SqliteStore::within(&tx));
                let refused = step.run(async |_| -> Result<u32, Error> { unreachable!("the step is refused") }).await;
                assert!(matches!(problem(&refused.unwrap_err()), StepProblem::InvalidName), "{name:?}");
            }
        }
        Ok::<_, Error>(0_u32)
    };
    Operation::new(&MemoryStore::new(), Ok(key("names")), POLICY).run(body).await.unwrap();
}

/// Runs a step as the body of a call in a transaction, and checks that the step is refused.
async fn refused_step() -> Result<u32, Error> {
    let step = current()?.step("debit");
    let refused = step.run(async |_| -> Result<u32, Error> { unreachable!("the step is refused") }).await;
    let error = refused.unwrap_err();
    assert!(matches!(problem(&error), StepProblem::InTransaction), "{error}");
    assert!(error.is_misconfigured(), "{error}");
    assert!(error.to_string().contains("commit together, so the effect needs no step"), "{error}");
    Ok(7)
}

#[tokio::test]
async fn a_step_in_a_call_in_a_transaction_is_refused() {
    let till = Till::new();
    let mut connection = till.connection();
    let tx = begin(&mut connection);
    let body = async {
        let step = current()?.step("debit").within(SqliteStore::within(&tx));
        let refused = step.run(async |_| -> Result<u32, Error> { unreachable!("the step is refused") }).await;
        assert!(matches!(problem(&refused.unwrap_err()), StepProblem::InTransaction));
        refused_step().await
    };
    assert_eq!(SqliteStore::within(&tx).operation(Ok(key("a")), POLICY).run(body).await.unwrap(), 7);

    let bank = Bank::open().await;
    let mut client = bank.client().await;
    let tx = OpenTransaction::new(client.transaction().await.unwrap());
    let operation = PostgresStore::within(&tx).schema(&bank.schema).operation(Ok(key("a")), POLICY);
    assert_eq!(operation.run(refused_step()).await.unwrap(), 7);

    let bank = MySqlBank::open().await;
    let mut connection = raw_mysql(&bank.url).await;
    let tx = OpenTransaction::new(connection.start_transaction(TxOpts::default()).await.unwrap());
    let operation = MySqlStore::within(&tx).table(&bank.table).operation(Ok(key("a")), POLICY);
    assert_eq!(operation.run(refused_step()).await.unwrap(), 7);
}

#[tokio::test]
async fn in_postgres_a_step_and_its_row_commit_together_and_block_no_renewal() {
    let (bank, runs) = (&Bank::open().await, Cell::new(0));
    // The record of the operation is in the same table as the record of the step.
    let fulfilled = attempts(&bank.store, async |delivery| {
        let attempt = current()?;
        let mut client = bank.client().await;
        let tx = OpenTransaction::new(client.transaction().await.unwrap());
        let records = PostgresStore::within(&tx).schema(&bank.schema);
        let debited = attempt.step("debit").within(records).run(async |step| {
            runs.set(runs.get() + 1);
            tx.execute("INSERT INTO payments VALUES ($1)", &[&step.name()]).await.unwrap();
            Ok::<_, Error>(runs.get())
        });
        let debited = debited.await?;
        attempt.confirm_lease().await?;
        attempt.step(("journaled", delivery)).run(async |_| Ok::<_, Error>(0_u32)).await?;
        match delivery {
            1 => drop(tx),
            _ => tx.into_inner().commit().await.unwrap(),
        }
        if delivery < 3 { Err(Error::NoAttempt) } else { Ok(debited) }
    })
    .await;
    assert_eq!((fulfilled, runs.get(), bank.payments().await), (2, 2, 1));
}

#[tokio::test]
async fn with_sqlx_a_step_and_its_row_commit_together() {
    let bank = &Bank::open().await;
    let (pool, new_pool) = (&by_sqlx::pool(bank).await, &by_new_sqlx::pool(bank).await);
    let fulfilled = attempts(&MemoryStore::new(), async |delivery| {
        let tx = by_sqlx::SqlxTransaction::new(pool.begin().await.unwrap());
        let old = by_sqlx::debit(bank, &tx, "old").await?;
        match delivery {
            1 => drop(tx),
            _ => tx.into_inner().commit().await.unwrap(),
        }
        let tx = by_new_sqlx::SqlxTransaction::new(new_pool.begin().await.unwrap());
        let new = by_new_sqlx::debit(bank, &tx, "new").await?;
        match delivery {
            1 => drop(tx),
            _ => tx.into_inner().commit().await.unwrap(),
        }
        if delivery < 3 { Err(Error::NoAttempt) } else { Ok(old + new) }
    })
    .await;
    assert_eq!((fulfilled, bank.payments().await), (2, 2), "one payment with each release of the driver");
}

#[tokio::test]
async fn without_a_reservation_a_step_runs_each_time_in_its_transaction() {
    let till = Till::new();
    for _ in 0..2 {
        let mut connection = till.connection();
        let tx = begin(&mut connection);
        let body = async {
            let debit = current()?.step("debit").within(SqliteStore::within(&tx));
            debit.run(async |_| Ok::<_, Error>(tx.execute("INSERT INTO payments VALUES ('a')", []).unwrap())).await
        };
        Operation::new(&MemoryStore::new(), Ok(key("off")), POLICY.mode(Mode::Off)).run(body).await.unwrap();
        tx.into_inner().commit().unwrap();
    }
    assert_eq!(till.payments(), 2);
}
