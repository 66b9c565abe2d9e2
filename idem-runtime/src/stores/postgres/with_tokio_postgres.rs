//! Transactions of tokio-postgres, and of the pool deadpool-postgres.

use std::pin::pin;
use std::task::{Context, Waker};

use tokio_postgres::Transaction;
use tokio_postgres::types::ToSql;

use super::failure::driver_text;
use super::sql::Statement;
use super::within::{StatementError, TransactionSession};
use crate::clock::Clock;
use crate::store::transaction::{DriverTransaction, Sealed};

impl Sealed for Transaction<'_> {}

impl DriverTransaction for Transaction<'_> {
    type Shared = Self;

    fn unshare(shared: Self) -> Self {
        shared
    }
}

impl<'t> super::within::Transaction for Transaction<'t> {
    type Session<'a>
        = &'a Transaction<'t>
    where
        Self: 'a;

    fn session<'a>(transaction: &'a Self, _: &'a dyn Clock) -> &'a Self
    where
        Self: 'a,
    {
        transaction
    }
}

#[cfg(feature = "with-deadpool-postgres-0_14")]
impl Sealed for deadpool_postgres::Transaction<'_> {}

#[cfg(feature = "with-deadpool-postgres-0_14")]
impl DriverTransaction for deadpool_postgres::Transaction<'_> {
    type Shared = Self;

    fn unshare(shared: Self) -> Self {
        shared
    }
}

#[cfg(feature = "with-deadpool-postgres-0_14")]
impl<'t> super::within::Transaction for deadpool_postgres::Transaction<'t> {
    type Session<'a>
        = &'a Transaction<'t>
    where
        Self: 'a;

    fn session<'a>(transaction: &'a Self, _: &'a dyn Clock) -> &'a Transaction<'t>
    where
        Self: 'a,
    {
        transaction
    }
}

impl Sealed for &Transaction<'_> {}

impl TransactionSession for &Transaction<'_> {
    type Row = tokio_postgres::Row;

    async fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Self::Row>, StatementError> {
        let typed: Vec<_> = params.iter().zip(statement.types).map(|(param, ty)| (*param, ty.clone())).collect();
        Ok(self.query_typed(&statement.text, &typed).await?)
    }

    async fn execute(&self, text: &str) -> Result<(), StatementError> {
        Ok(self.batch_execute(text).await?)
    }

    async fn save(&self) -> Result<(), StatementError> {
        send(self, "SAVEPOINT idem");
        Ok(())
    }

    async fn rewind(&self) -> Result<(), StatementError> {
        send(self, "ROLLBACK TO SAVEPOINT idem");
        Ok(())
    }

    async fn keep(&self, begun: impl FnOnce()) -> Result<(), StatementError> {
        begun();
        send(self, "RELEASE SAVEPOINT idem");
        Ok(())
    }

    async fn undo(&self) -> Result<(), StatementError> {
        self.undo_immediately();
        Ok(())
    }

    fn undo_immediately(&self) {
        send(self, "ROLLBACK TO SAVEPOINT idem; RELEASE SAVEPOINT idem");
    }
}

/// Queues the statement `text` on the connection, before every later statement, and does not wait for the answer. If
/// `text` fails, the server refuses every further statement of the transaction, so the next statement reports the
/// failure.
fn send(tx: &Transaction<'_>, text: &str) {
    let sent = pin!(tx.batch_execute(text));
    // The first poll queues the statement.
    drop(sent.poll(&mut Context::from_waker(Waker::noop())));
}

impl From<tokio_postgres::Error> for StatementError {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            Some(error) => Self { code: Some(error.code().code().to_owned()), message: error.message().to_owned() },
            None => Self { code: None, message: driver_text(&error) },
        }
    }
}
