//! Transactions of `sqlx`: the same statements, parameters and rows, handed over as the bytes of the protocol.

use std::fmt;
use std::time::Duration;

use bytes::BytesMut;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgArguments, PgRow, PgTypeInfo};
use sqlx::{Arguments, Encode, Executor, PgConnection, Postgres, Row, ValueRef};
use tokio::sync::{Mutex, MutexGuard};
use tokio_postgres::types::{FromSql, IsNull as Nothing, ToSql, Type};

use super::sql::{Cells, Statement};
use super::within::{Refused, Session};
use crate::clock::{Clock, SystemClock, race};
use crate::record::format::FormatError;
use crate::within::sealed::Sealed;

/// How long the connection is waited for: a body that holds it while a handler that it calls needs it waits for itself.
const LOCK_LIMIT: Duration = Duration::from_secs(30);

/// A transaction of `sqlx`; see [`PostgresStore::within_sqlx`](super::PostgresStore::within_sqlx).
#[derive(Clone, Copy)]
pub struct InSqlx<'a, 'c>(pub(super) &'a Mutex<sqlx::Transaction<'c, Postgres>>);

impl fmt::Debug for InSqlx<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InSqlx")
    }
}

impl<'c> InSqlx<'_, 'c> {
    async fn lock(&self) -> Result<MutexGuard<'_, sqlx::Transaction<'c, Postgres>>, Refused> {
        race(self.0.lock(), SystemClock::default().sleep(LOCK_LIMIT)).await.ok_or_else(|| Refused {
            code: None,
            message: format!("the body held the lock on its transaction for {LOCK_LIMIT:?}"),
        })
    }
}

impl Sealed for InSqlx<'_, '_> {}

impl Session for InSqlx<'_, '_> {
    type Row = PgRow;

    async fn rows(&self, statement: &Statement, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<PgRow>, Refused> {
        let mut arguments = PgArguments::default();
        for (param, ty) in params.iter().zip(statement.types) {
            let mut bytes = BytesMut::new();
            let encoded =
                param.to_sql_checked(ty, &mut bytes).map(|nothing| (!matches!(nothing, Nothing::Yes)).then_some(bytes));
            let added = encoded.and_then(|bytes| arguments.add(Param { ty, bytes }));
            added.map_err(|error| Refused { code: None, message: error.to_string() })?;
        }
        let mut connection = self.lock().await?;
        let connection: &mut PgConnection = &mut connection;
        Ok(sqlx::query_with(&statement.text, arguments).persistent(false).fetch_all(connection).await?)
    }

    async fn execute(&self, text: &str) -> Result<(), Refused> {
        let mut connection = self.lock().await?;
        let connection: &mut PgConnection = &mut connection;
        connection.execute(text).await?;
        Ok(())
    }
}

/// A parameter as the server reads it.
struct Param<'a> {
    ty: &'a Type,
    bytes: Option<BytesMut>,
}

impl sqlx::Type<Postgres> for Param<'_> {
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

impl From<sqlx::Error> for Refused {
    fn from(error: sqlx::Error) -> Self {
        match &error {
            sqlx::Error::Database(error) => {
                Self { code: error.code().map(Into::into), message: error.message().to_owned() }
            }
            _ => Self { code: None, message: error.to_string() },
        }
    }
}
