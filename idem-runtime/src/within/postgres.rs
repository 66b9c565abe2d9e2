//! Calls in a transaction of PostgreSQL, and deliveries by each release of sqlx.

use super::{OpenTransaction, Within};
#[cfg(any(feature = "with-sqlx-0_8", feature = "with-sqlx-0_9"))]
use crate::engine::Observe;
use crate::stores::postgres::{InPostgres, PostgresStore, Transaction};

impl PostgresStore {
    /// Puts records inside of your open transaction. The records are committed together with its other writes, or not
    /// at all. See [`Within`].
    ///
    /// The table is in the schema `idem`, or in another [`schema`](Within::schema). Under `REPEATABLE READ` and
    /// `SERIALIZABLE`, a call ends the transaction with an error if the record of its key was committed after this
    /// transaction began, as with any other conflict at these levels. Leases and retentions begin at the statement that
    /// writes the record, not at the start of the transaction.
    ///
    /// ```no_run
    /// # #[cfg(feature = "with-tokio-postgres-0_7")]
    /// # async fn pay(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{PostgresStore, idempotent};
    /// use tokio_postgres::Transaction;
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_>>, order: i64) -> Result<u64, AnyError> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES ($1)", &[&order]).await?)
    /// }
    ///
    /// let tx = OpenTransaction::new(client.transaction().await?);
    /// pay(&tx, 42).await?; // An error returns from here, and the transaction is rolled back.
    /// tx.into_inner().commit().await?; // The payment and its record, or neither.
    /// # Ok(()) }
    /// ```
    ///
    /// In a transaction of sqlx, body and record share the connection through a lock. The body must not hold the lock
    /// while it calls another handler in the same transaction.
    ///
    /// ```no_run
    /// # #[cfg(feature = "with-sqlx-0_9")] use sqlx_0_9 as sqlx;
    /// # #[cfg(feature = "with-sqlx-0_9")]
    /// # async fn pay(pool: &sqlx::PgPool) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{PostgresStore, idempotent};
    /// use sqlx::{Postgres, Transaction};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_, Postgres>>, order: i64) -> Result<u64, AnyError> {
    ///     let payment = sqlx::query("INSERT INTO payments (order_id) VALUES ($1)").bind(order);
    ///     Ok(payment.execute(&mut **tx.lock().await).await?.rows_affected())
    /// }
    ///
    /// let tx = OpenTransaction::new(pool.begin().await?);
    /// pay(&tx, 42).await?; // An error returns from here, and the transaction is rolled back.
    /// tx.into_inner().commit().await?; // The payment and its record, or neither.
    /// # Ok(()) }
    /// ```
    pub fn within<T: Transaction>(tx: &OpenTransaction<T>) -> Within<'_, InPostgres<'_, T::Session<'_>>> {
        Within::new(records(tx), &tx.notes)
    }
}

pub(super) fn records<T: Transaction>(tx: &OpenTransaction<T>) -> InPostgres<'_, T::Session<'_>> {
    let clock = &*tx.notes.clock;
    InPostgres::new(T::session(tx, clock), clock)
}

#[cfg(any(feature = "with-sqlx-0_8", feature = "with-sqlx-0_9"))]
fn in_schema<'a, T: Transaction>(tx: &'a OpenTransaction<T>, schema: &str) -> InPostgres<'a, T::Session<'a>> {
    records(tx).schema(schema)
}

impl<S> Within<'_, InPostgres<'_, S>> {
    /// Schema that holds the table (default: `idem`).
    #[must_use]
    pub fn schema(mut self, schema: &str) -> Self {
        self.transaction = self.transaction.schema(schema);
        self
    }
}

// One file has the deliveries of both releases of sqlx, because their interfaces differ only in the name of the crate.

#[cfg(feature = "with-sqlx-0_8")]
#[path = "."]
mod with_sqlx_0_8 {
    use ::sqlx_0_8 as sqlx;

    #[path = "postgres_by_sqlx.rs"]
    pub(super) mod driver;
}

#[cfg(feature = "with-sqlx-0_9")]
#[path = "."]
mod with_sqlx_0_9 {
    use ::sqlx_0_9 as sqlx;

    #[path = "postgres_by_sqlx.rs"]
    #[allow(clippy::duplicate_mod, reason = "each release of sqlx has its own types")]
    pub(super) mod driver;
}

#[cfg(feature = "with-sqlx-0_8")]
impl PostgresStore {
    /// Begins, runs and commits a transaction of sqlx 0.8.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then can the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). Otherwise the transaction is rolled back, the ends of its attempts are written
    /// in a separate transaction, and the message is to be delivered again.
    ///
    /// ```no_run
    /// # use sqlx_0_8 as sqlx;
    /// # async fn deliver(pool: &sqlx::PgPool, order: i64) {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{PostgresStore, idempotent};
    /// use sqlx::{Postgres, Transaction};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_, Postgres>>, order: i64) -> Result<u64, AnyError> {
    ///     let payment = sqlx::query("INSERT INTO payments (order_id) VALUES ($1)").bind(order);
    ///     Ok(payment.execute(&mut **tx.lock().await).await?.rows_affected())
    /// }
    ///
    /// let (paid, outcome) = PostgresStore::transact_sqlx_0_8(pool, async |tx| pay(tx, order).await).await;
    /// println!("{paid:?}, {:?}", outcome.disposition());
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the future rolls the transaction back, unless the `COMMIT` has already been sent.
    pub fn transact_sqlx_0_8<T, E, W>(pool: &sqlx_0_8::PgPool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<sqlx_0_8::Transaction<'_, sqlx_0_8::Postgres>>) -> Result<T, E> + Clone,
        E: From<sqlx_0_8::Error>,
    {
        with_sqlx_0_8::driver::delivery::transact(pool, work)
    }
}

#[cfg(feature = "with-sqlx-0_9")]
impl PostgresStore {
    /// Begins, runs and commits a transaction of sqlx 0.9.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then can the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). Otherwise the transaction is rolled back, the ends of its attempts are written
    /// in a separate transaction, and the message is to be delivered again.
    ///
    /// ```no_run
    /// # use sqlx_0_9 as sqlx;
    /// # async fn deliver(pool: &sqlx::PgPool, order: i64) {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{PostgresStore, idempotent};
    /// use sqlx::{Postgres, Transaction};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_, Postgres>>, order: i64) -> Result<u64, AnyError> {
    ///     let payment = sqlx::query("INSERT INTO payments (order_id) VALUES ($1)").bind(order);
    ///     Ok(payment.execute(&mut **tx.lock().await).await?.rows_affected())
    /// }
    ///
    /// let (paid, outcome) = PostgresStore::transact_sqlx_0_9(pool, async |tx| pay(tx, order).await).await;
    /// println!("{paid:?}, {:?}", outcome.disposition());
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the future rolls the transaction back, unless the `COMMIT` has already been sent.
    pub fn transact_sqlx_0_9<T, E, W>(pool: &sqlx_0_9::PgPool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<sqlx_0_9::Transaction<'_, sqlx_0_9::Postgres>>) -> Result<T, E> + Clone,
        E: From<sqlx_0_9::Error>,
    {
        with_sqlx_0_9::driver::delivery::transact(pool, work)
    }
}
