//! The calls of `by_mysql` by sqlx, compiled once for each supported release of the driver.

use idem_runtime::within::OpenTransaction;

use super::sqlx::mysql::MySqlPoolOptions;
use super::sqlx::{Error, Executor as _, MySql, MySqlConnection, MySqlPool, query_scalar};
use super::{sql, sqlx, transact};
use crate::AnyError;
use crate::mysql_bank::MySqlBank;

#[path = "by_mysql.rs"]
#[allow(clippy::duplicate_mod, reason = "each driver has its own types")]
pub(crate) mod calls;

pub(crate) type Driver<'c> = sqlx::Transaction<'c, MySql>;

/// Opens a pool with one connection, so that each transaction uses the connection of the one before it.
pub(crate) async fn connect(bank: &MySqlBank) -> MySqlPool {
    MySqlPoolOptions::new().max_connections(1).connect(&bank.url).await.unwrap()
}

/// The pool itself opens a connection in place of one on which a statement was dropped.
async fn reopened(_: &MySqlBank, pool: MySqlPool) -> MySqlPool {
    pool
}

async fn begin(pool: &mut MySqlPool) -> Result<Driver<'static>, Error> {
    pool.begin().await
}

async fn execute(tx: &OpenTransaction<Driver<'_>>, text: &str) -> Result<(), AnyError> {
    let mut tx = tx.lock().await;
    let connection: &mut MySqlConnection = &mut tx;
    connection.execute(sql(text)).await?;
    Ok(())
}

/// Runs a statement outside of a transaction.
async fn execute_alone(pool: &mut MySqlPool, text: &str) -> Result<bool, AnyError> {
    let pool: &MySqlPool = pool;
    pool.execute(sql(text)).await?;
    Ok(true)
}

async fn number(tx: &OpenTransaction<Driver<'_>>, text: &str) -> i64 {
    let cast = format!("SELECT CAST(({text}) AS SIGNED)");
    query_scalar(sql(&cast)).fetch_one(&mut **tx.lock().await).await.unwrap()
}
