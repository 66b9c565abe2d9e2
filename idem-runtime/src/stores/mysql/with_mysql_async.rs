//! Transactions of `mysql_async`.

use mysql_async::prelude::Queryable;
use mysql_async::{Error, Transaction};

use super::failure::driver_text;
use super::sql::Row;
use super::within::{self, MySqlTransaction, StatementError};
use crate::store::transaction::{DriverTransaction, Sealed};

impl Sealed for Transaction<'_> {}

impl DriverTransaction for Transaction<'_> {
    type Shared = MySqlTransaction<Self>;

    fn unshare(shared: MySqlTransaction<Self>) -> Self {
        shared.into_inner()
    }

    fn is_broken(shared: &MySqlTransaction<Self>) -> bool {
        shared.is_doomed() || shared.try_lock().is_ok_and(|transaction| transaction.is_disconnected())
    }
}

impl within::Transaction for Transaction<'_> {
    async fn run(&mut self, text: &str) -> Result<Vec<Row>, StatementError> {
        // After an exchange that was dropped halfway, the driver would read the answer to an earlier statement.
        if self.is_disconnected() {
            return Err(StatementError::failed("a statement was dropped before its end"));
        }
        let mut result = self.query_iter(text).await?;
        let mut rows = Vec::new();
        while !result.is_empty() {
            rows.extend(result.collect::<mysql_async::Row>().await?.into_iter().map(Row::from));
        }
        result.drop_result().await?;
        Ok(rows)
    }
}

impl From<Error> for StatementError {
    fn from(error: Error) -> Self {
        match error {
            Error::Server(error) => Self::refused(error.code, &error.message),
            error => Self::failed(driver_text(&error)),
        }
    }
}
