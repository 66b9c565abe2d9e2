//! Transactions of PostgreSQL by `sqlx`, compiled once for each supported release of the driver.

use super::sqlx;
use crate::stores::postgres::within::is_conflict;
use crate::within::postgres::in_schema as records_in;
use sqlx::error::DatabaseError;
use sqlx::pool::PoolConnection;
use sqlx::{Connection as _, Error, Executor as _, PgPool as Pool, Postgres as Database, Transaction};

#[path = "by_sqlx.rs"]
#[allow(clippy::duplicate_mod, reason = "each release of sqlx and each database has its own types")]
pub(in crate::within) mod delivery;

async fn begin(connection: &mut PoolConnection<Database>) -> Result<Transaction<'_, Database>, Error> {
    connection.begin().await
}

/// Fails if a statement has failed, or if no transaction is open.
async fn check(tx: &mut Transaction<'_, Database>) -> Result<(), Error> {
    let connection = &mut **tx;
    connection.execute("SAVEPOINT idem; RELEASE SAVEPOINT idem").await.map(drop)
}

fn has_conflict(error: &Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    code.is_some_and(|code| is_conflict(&code))
}
