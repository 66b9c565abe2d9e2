//! Calls in a transaction of PostgreSQL, and deliveries by each release of sqlx.

use std::future::Future;
use std::sync::Arc;

use super::journal::Journal;
use super::open::default_clock;
use super::transact::{TryFailure, committed, not_begun, pause_after, rolled_back, run};
use super::{OpenTransaction, Within};
use crate::clock::Clock;
use crate::engine::{Observe, observe};
use crate::store::StoreError;
use crate::stores::postgres::{InPostgres, PostgresStore, StatementError, Transaction, is_conflict};

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

fn records<T: Transaction>(tx: &OpenTransaction<T>) -> InPostgres<'_, T::Session<'_>> {
    let clock = &*tx.notes.clock;
    InPostgres::new(T::session(tx, clock), clock)
}

impl<S> Within<'_, InPostgres<'_, S>> {
    /// Schema that holds the table (default: `idem`).
    #[must_use]
    pub fn schema(mut self, schema: &str) -> Self {
        self.transaction = self.transaction.schema(schema);
        self
    }
}

#[cfg(feature = "with-tokio-postgres-0_7")]
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
    pub fn transact<T, E, W>(
        client: &mut tokio_postgres::Client,
        work: W,
    ) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<tokio_postgres::Transaction<'_>>) -> Result<T, E> + Clone,
        E: From<tokio_postgres::Error>,
    {
        observe(async move {
            let (clock, mut number) = (default_clock(), 1);
            loop {
                let begun = client.transaction().await.inspect_err(|_| not_begun())?;
                let (tx, ended, journal) = run(begun, &clock, work.clone()).await;
                let failed = match ended {
                    Ok(done) => match commit(tx).await {
                        Ok(()) => return Ok(committed(done)),
                        Err(error) => {
                            let conflicts = error.code().is_some_and(|code| is_conflict(code.code()));
                            TryFailure::at_commit(error, conflicts)
                        }
                    },
                    Err(failed) => {
                        tx.rollback().await.ok();
                        failed
                    }
                };
                if !failed.invites_another_try(number) {
                    return Err(rolled_back(failed, &journal, count(client, &journal, clock)).await);
                }
                pause_after(number, &clock).await;
                number += 1;
            }
    /// # use sqlx_0_9 as sqlx;
        })
    }
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether all errors that the attempts
/// had recorded are recorded again.
#[cfg(feature = "with-tokio-postgres-0_7")]
async fn count(
    client: &mut tokio_postgres::Client,
    journal: &Journal,
    clock: Arc<dyn Clock>,
) -> Result<bool, StoreError> {
    let tx = OpenTransaction::with_clock(client.transaction().await.map_err(StatementError::from)?, clock);
    let recorded = journal.write(|place| records(&tx).schema(place)).await?;
    commit(tx.into_inner()).await.map_err(StatementError::from)?;
    Ok(recorded)
}

/// Commits the transaction. First checks that no statement has failed: the server would then roll back, but report
/// success.
#[cfg(feature = "with-tokio-postgres-0_7")]
async fn commit(tx: tokio_postgres::Transaction<'_>) -> Result<(), tokio_postgres::Error> {
    tx.batch_execute("SELECT 1").await?;
    tx.commit().await
}

#[cfg(feature = "with-sqlx-0_8")]
impl PostgresStore {
    /// Begins, runs and commits a transaction of sqlx 0.9.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then can the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). Otherwise the transaction is rolled back, the ends of its attempts are written
    /// in a separate transaction, and the message is to be delivered again.
    ///
    /// ```no_run
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
    pub fn transact_sqlx<T, E, W>(pool: &sqlx::PgPool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<sqlx::Transaction<'_, sqlx::Postgres>>) -> Result<T, E> + Clone,
        E: From<sqlx::Error>,
    {
        observe(async move {
            let (clock, mut number) = (default_clock(), 1);
            loop {
                let begun = pool.begin().await.inspect_err(|_| not_begun())?;
                let (tx, ended, journal) = run(begun, &clock, work.clone()).await;
                let failed = match ended {
                    Ok(done) => match commit_sqlx(tx).await {
                        Ok(()) => return Ok(committed(done)),
                        Err(error) => {
                            let conflicts = error
                                .as_database_error()
                                .and_then(sqlx::error::DatabaseError::code)
                                .is_some_and(|code| is_conflict(&code));
                            TryFailure::at_commit(error, conflicts)
                        }
                    },
                    Err(failed) => {
                        tx.rollback().await.ok();
                        failed
                    }
                };
                if !failed.invites_another_try(number) {
                    return Err(rolled_back(failed, &journal, count_sqlx(pool, &journal, clock)).await);
                }
                pause_after(number, &clock).await;
                number += 1;
            }
        })
    }
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether all errors that the attempts
/// had recorded are recorded again.
#[cfg(feature = "with-sqlx-0_8")]
async fn count_sqlx(pool: &sqlx::PgPool, journal: &Journal, clock: Arc<dyn Clock>) -> Result<bool, StoreError> {
    let tx = OpenTransaction::with_clock(pool.begin().await.map_err(StatementError::from)?, clock);
    let recorded = journal.write(|place| records(&tx).schema(place)).await?;
    commit_sqlx(tx.into_inner()).await.map_err(StatementError::from)?;
    Ok(recorded)
}

/// Commits the transaction. First checks that no statement has failed and that the transaction is open: otherwise the
/// driver would report success.
#[cfg(feature = "with-sqlx-0_8")]
async fn commit_sqlx(mut tx: sqlx::Transaction<'static, sqlx::Postgres>) -> Result<(), sqlx::Error> {
    sqlx::Executor::execute(&mut *tx, "SAVEPOINT idem; RELEASE SAVEPOINT idem").await?;
    tx.commit().await
}
