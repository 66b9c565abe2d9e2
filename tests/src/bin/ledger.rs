//! One of several processes that work on the same keys. Each process writes an effect and the record of the call in one
//! transaction. `tests/within.rs` starts and kills the processes.
//!
//! Arguments: the store (`sqlite PATH`, `postgres URL SCHEMA` or `mysql URL TABLE`), the number of keys, the first key.
#![allow(clippy::disallowed_methods)] // A consumer loop sleeps.

use std::time::Duration;

use idem_runtime::within::OpenTransaction;
use idem_runtime::{Disposition, Error, MySqlStore, PostgresStore, SqliteStore, current, idempotent, observe};
use mysql_async::prelude::Queryable as _;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

#[idempotent(
    key = "{n}",
    ttl = "1h",
    store = PostgresStore::within(tx).schema(schema),
    scope = shared("race"),
    in_progress = wait("2s")
)]
async fn in_postgres(
    tx: &OpenTransaction<tokio_postgres::Transaction<'_>>,
    schema: &str,
    n: usize,
) -> Result<u32, Error> {
    let attempt = current().expect("inside").number();
    let effect = i32::try_from(n).expect("a few");
    tx.execute("INSERT INTO effects (n) VALUES ($1)", &[&effect]).await.expect("inserts");
    Ok(attempt)
}

#[idempotent(
    key = "{n}",
    ttl = "1h",
    store = MySqlStore::within(tx).table(table),
    scope = shared("race"),
    in_progress = wait("2s")
)]
async fn in_mysql(tx: &OpenTransaction<mysql_async::Transaction<'_>>, table: &str, n: usize) -> Result<u32, AnyError> {
    let attempt = current().expect("inside").number();
    tx.lock().await.exec_drop(format!("INSERT INTO {table}_effects (n) VALUES (?)"), (n,)).await?;
    Ok(attempt)
}

#[idempotent(key = "{n}", ttl = "1h", store = SqliteStore::within(tx), scope = shared("race"))]
async fn in_sqlite(tx: &OpenTransaction<rusqlite::Transaction<'_>>, n: usize) -> Result<u32, Error> {
    let attempt = current().expect("inside").number();
    tx.execute("INSERT INTO effects (n) VALUES (?1)", [i64::try_from(n).expect("a few")]).expect("inserts");
    Ok(attempt)
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [spec, keys, begin] = &args[..] else { panic!("database, number of keys, first key") };
    let (keys, begin): (usize, usize) = (keys.parse().unwrap(), begin.parse().unwrap());
    let keys = (0..keys).map(|n| (begin + n) % keys);
    match spec.split_once(' ') {
        Some(("postgres", place)) => {
            let (url, schema) = place.split_once(' ').unwrap();
            let (mut client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            let quoted = schema.replace('"', "\"\"");
            client.batch_execute(&format!("SET search_path = \"{quoted}\"")).await.unwrap();
            for n in keys {
                loop {
                    let tx = OpenTransaction::new(client.transaction().await.unwrap());
                    let (result, outcome) = observe(in_postgres(&tx, schema, n)).await;
                    if result.is_ok() {
                        tx.into_inner().commit().await.unwrap();
                        break;
                    }
                    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }), "{n}: {result:?}");
                    tx.into_inner().rollback().await.unwrap();
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        Some(("mysql", place)) => {
            let (url, table) = place.split_once(' ').unwrap();
            let mut connection = idem_tests::mysql::raw(url).await;
            for n in keys {
                loop {
                    let work = async |tx: &OpenTransaction<mysql_async::Transaction<'_>>| in_mysql(tx, table, n).await;
                    let (result, outcome) = MySqlStore::transact(&mut connection, work).await;
                    if result.is_ok() {
                        break;
                    }
                    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }), "{n}: {result:?}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        Some(("sqlite", path)) => {
            let mut connection = rusqlite::Connection::open(path).unwrap();
            connection.busy_timeout(Duration::from_secs(30)).unwrap();
            for n in keys {
                let tx = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
                let tx = OpenTransaction::new(tx);
                in_sqlite(&tx, n).await.unwrap();
                tx.into_inner().commit().unwrap();
            }
        }
        _ => panic!("`{spec}` names no database"),
    }
}
