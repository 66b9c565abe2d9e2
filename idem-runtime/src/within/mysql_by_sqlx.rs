//! Transactions of MySQL by `sqlx`, compiled once for each supported release of the driver.

use super::sqlx;
use crate::store::StoreError;
use crate::stores::mysql::within::{StatementError, is_conflict, is_intact, mark_start};
use crate::within::mysql::in_table as records_in;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::pool::PoolConnection;
use sqlx::{Connection as _, Error, MySql as Database, MySqlPool as Pool, Transaction};

#[path = "by_sqlx.rs"]
#[allow(clippy::duplicate_mod, reason = "each release of sqlx and each database has its own types")]
pub(in crate::within) mod delivery;

async fn begin(connection: &mut PoolConnection<Database>) -> Result<Transaction<'_, Database>, Error> {
    let mut tx = connection.begin().await?;
    mark_start(&mut tx).await.map_err(failed)?;
    Ok(tx)
}

/// Fails if the server has ended the transaction.
async fn check(tx: &mut Transaction<'_, Database>) -> Result<(), Error> {
    match is_intact(tx).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::Protocol("the answers don't belong to the statements".into())),
        Err(error) => Err(failed(error)),
    }
}

fn failed(error: StatementError) -> Error {
    Error::Io(std::io::Error::other(StoreError::from(error)))
}

fn has_conflict(error: &Error) -> bool {
    let refused = error.as_database_error().and_then(|error| error.try_downcast_ref::<MySqlDatabaseError>());
    refused.is_some_and(|error| is_conflict(error.number()))
}
