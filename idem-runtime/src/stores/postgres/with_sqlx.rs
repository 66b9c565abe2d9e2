//! Transactions of `sqlx`, compiled once for each supported release of the driver. The statements are the same for all
//! drivers; parameters and rows are passed in the binary format of the protocol.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::sync::MutexGuard;
use tokio_postgres::types::{FromSql, IsNull as Nothing, ToSql, Type};

use super::sqlx::encode::IsNull;
use super::sqlx::error::BoxDynError;
use super::sqlx::postgres::types::Oid;
use super::sqlx::postgres::{PgArgumentBuffer, PgArguments, PgRow, PgTypeInfo};
use super::sqlx::{
    Arguments, Connection as _, Database, Encode, Error, Executor, PgConnection, Postgres, Row, Transaction,
    Type as SqlxType, ValueRef, query_with,
};
use super::{TransactionManager, sql};
use crate::clock::Clock;
use crate::record::format::FormatError;
use crate::store::transaction::{DriverTransaction, ExchangeGuard, Sealed, SharedTransaction};
use crate::stores::postgres::sql::{Cells, Statement};
use crate::stores::postgres::within::{self, StatementError, TransactionSession};

/// A transaction of `sqlx`, which the user shares with the library.
#[derive(Clone, Copy)]
pub struct InSqlx<'a, 'c> {
    transaction: &'a SharedTransaction<Transaction<'c, Postgres>>,
    clock: &'a dyn Clock,
}

impl Sealed for Transaction<'_, Postgres> {}

impl DriverTransaction for Transaction<'_, Postgres> {
    type Shared = SharedTransaction<Self>;

    fn unshare(shared: SharedTransaction<Self>) -> Self {
        shared.into_inner()
    }

    fn is_broken(shared: &SharedTransaction<Self>) -> bool {
        // If the user's own savepoint was dropped while it was made, the driver rolls everything back.
        shared.is_doomed() || shared.try_lock().is_ok_and(|transaction| !transaction.is_in_transaction())
    }

    /// Leaves no savepoint to the driver. Its own `drop` would undo only the last one, and return the connection to the
    /// pool with an open transaction, in which all later transactions would then be savepoints.
    fn abandon(mut self) {
        while Manager::get_transaction_depth(&self) > 1 {
            Manager::start_rollback(&mut self);
        }
    }
}

impl<'c> within::Transaction for Transaction<'c, Postgres> {
    type Session<'a>
        = InSqlx<'a, 'c>
    where
        Self: 'a;

    fn session<'a>(transaction: &'a SharedTransaction<Self>, clock: &'a dyn Clock) -> InSqlx<'a, 'c>
    where
        Self: 'a,
    {
        InSqlx { transaction, clock }
    }
}

impl fmt::Debug for InSqlx<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InSqlx")
    }
}

impl<'c> InSqlx<'_, 'c> {
    async fn lock(&self) -> Result<MutexGuard<'_, Transaction<'c, Postgres>>, StatementError> {
        let locked = self.transaction.lock_for_statement(self.clock).await;
        locked.map_err(|message| StatementError { code: None, message })
    }
}

impl Sealed for InSqlx<'_, '_> {}

impl TransactionSession for InSqlx<'_, '_> {
    type Row = PgRow;

    async fn rows(&self, statement: &Statement, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<PgRow>, StatementError> {
        let mut arguments = PgArguments::default();
        for (param, ty) in params.iter().zip(statement.types) {
            let mut bytes = BytesMut::new();
            let encoded =
                param.to_sql_checked(ty, &mut bytes).map(|nothing| (!matches!(nothing, Nothing::Yes)).then_some(bytes));
            let added = encoded.and_then(|bytes| arguments.add(Param { ty, bytes }));
            added.map_err(|error| StatementError { code: None, message: error.to_string() })?;
        }
        let mut connection = self.lock().await?;
        let connection: &mut PgConnection = &mut connection;
        Ok(query_with(sql(&statement.text), arguments).persistent(false).fetch_all(connection).await?)
    }

    async fn execute(&self, text: &str) -> Result<(), StatementError> {
        let mut connection = self.lock().await?;
        let connection: &mut PgConnection = &mut connection;
        connection.execute(sql(text)).await?;
        Ok(())
    }

    // The savepoints are the driver's, because only the driver can undo a savepoint in a `drop`.

    async fn save(&self) -> Result<(), StatementError> {
        let mut connection = self.lock().await?;
        SavepointGuard(Some(Box::pin(Manager::begin(&mut connection, None)))).await?;
        Ok(())
    }

    async fn rewind(&self) -> Result<(), StatementError> {
        let mut connection = self.lock().await?;
        let connection: &mut PgConnection = &mut connection;
        let name = Manager::get_transaction_depth(connection) - 1;
        connection.execute(sql(&format!("ROLLBACK TO SAVEPOINT _sqlx_savepoint_{name}"))).await?;
        Ok(())
    }

    async fn keep(&self, begun: impl FnOnce()) -> Result<(), StatementError> {
        let mut connection = self.lock().await?;
        // No other statement is in flight on the connection, so the first poll of `commit` queues the `RELEASE`.
        begun();
        // The driver still counts a savepoint whose release was dropped halfway or refused, and would release it in
        // place of the commit.
        let release = ExchangeGuard::of(self.transaction);
        Manager::commit(&mut connection).await?;
        release.end();
        Ok(())
    }

    async fn undo(&self) -> Result<(), StatementError> {
        let mut connection = self.lock().await?;
        Manager::rollback(&mut connection).await?;
        Ok(())
    }

    fn undo_immediately(&self) {
        // The body has been dropped. If the lock is taken, the user's own code uses the transaction concurrently, or
        // waits for it.
        match self.transaction.try_lock() {
            Ok(mut connection) => Manager::start_rollback(&mut connection),
            Err(_) => self.transaction.doom(),
        }
    }
}

type Manager = <Postgres as Database>::TransactionManager;

/// A savepoint that is being made. If the driver's future were dropped halfway, the driver would undo the whole
/// transaction, but a later commit would report success. Therefore `drop` leaks the driver's future, which may leave an
/// unused savepoint.
struct SavepointGuard<'a>(Option<SavepointFuture<'a>>);

type SavepointFuture<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + Send + 'a>>;

impl Future for SavepointGuard<'_> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let making = self.0.as_mut().expect("polled after it was ready");
        let made = ready!(making.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(made)
    }
}

impl Drop for SavepointGuard<'_> {
    fn drop(&mut self) {
        std::mem::forget(self.0.take());
    }
}

/// A parameter in the binary format of the server.
struct Param<'a> {
    ty: &'a Type,
    bytes: Option<BytesMut>,
}

impl SqlxType<Postgres> for Param<'_> {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_name("unknown")
    }
}

impl Encode<'_, Postgres> for Param<'_> {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        match &self.bytes {
            Some(bytes) => {
                buffer.extend_from_slice(bytes);
                Ok(IsNull::No)
            }
            None => Ok(IsNull::Yes),
        }
    }

    fn produces(&self) -> Option<PgTypeInfo> {
        Some(PgTypeInfo::with_oid(Oid(self.ty.oid())))
    }
}

impl Cells for PgRow {
    fn cell<'a, T: FromSql<'a>>(&'a self, at: usize) -> Result<T, FormatError> {
        let value = self.try_get_raw(at).map_err(|_| FormatError::Damaged)?;
        let bytes = match value.is_null() {
            true => None,
            false => Some(value.as_bytes().map_err(|_| FormatError::Damaged)?),
        };
        T::from_sql_nullable(&Type::UNKNOWN, bytes).map_err(|_| FormatError::Damaged)
    }
}

impl From<Error> for StatementError {
    fn from(error: Error) -> Self {
        match &error {
            Error::Database(error) => Self { code: error.code().map(Into::into), message: error.message().to_owned() },
            _ => Self { code: None, message: error.to_string() },
        }
    }
}
