//! Transactions of `sqlx`, compiled once for each supported release of the driver.

use bytes::Bytes;

use super::sql;
use super::sqlx::mysql::{MySqlDatabaseError, MySqlRow};
use super::sqlx::{Connection as _, Error, Executor, MySql, MySqlConnection, Row as _, Transaction};
use crate::store::transaction::{DriverTransaction, Sealed};
use crate::stores::mysql::sql::{Cell, Row};
use crate::stores::mysql::within::{self, MySqlTransaction, StatementError};

impl Sealed for Transaction<'_, MySql> {}

impl DriverTransaction for Transaction<'_, MySql> {
    type Shared = MySqlTransaction<Self>;

    fn unshare(shared: MySqlTransaction<Self>) -> Self {
        shared.into_inner()
    }

    fn is_broken(shared: &MySqlTransaction<Self>) -> bool {
        // If the user's own savepoint was dropped while it was made, the driver rolls everything back.
        shared.is_doomed() || shared.try_lock().is_ok_and(|transaction| !transaction.is_in_transaction())
    }
}

impl within::Transaction for Transaction<'_, MySql> {
    async fn run(&mut self, text: &str) -> Result<Vec<Row>, StatementError> {
        let connection: &mut MySqlConnection = self;
        Ok(connection.fetch_all(sql(text)).await?.iter().map(row).collect())
    }
}

/// Converts a row of a statement without parameters, whose values are texts.
fn row(row: &MySqlRow) -> Row {
    let cell = |at| match row.try_get_unchecked::<Option<Vec<u8>>, _>(at) {
        Ok(None) => Cell::Null,
        Ok(Some(bytes)) => Cell::Bytes(Bytes::from(bytes)),
        Err(_) => Cell::Other,
    };
    Row((0..row.len()).map(cell).collect())
}

impl From<Error> for StatementError {
    fn from(error: Error) -> Self {
        let refused = error.as_database_error().and_then(|error| error.try_downcast_ref::<MySqlDatabaseError>());
        match refused {
            Some(error) => Self::refused(error.number(), error.message()),
            None => Self::failed(error.to_string()),
        }
    }
}
