//! Calls in a transaction of MySQL or MariaDB, and deliveries by each release of sqlx.

use super::{OpenTransaction, Within};
#[cfg(any(feature = "with-sqlx-0_8", feature = "with-sqlx-0_9"))]
use crate::engine::Observe;
use crate::stores::mysql::{InMySql, MySqlStore, Transaction};

impl MySqlStore {
    /// Puts records inside of your open transaction. The records are committed together with its other writes, or not
    /// at all. See [`Within`].
    ///
    /// The table is `idem_records`, or [`another`](Within::table). A duplicate of a key that another transaction holds
    /// waits for a second, and then gets [`Error::InProgress`](crate::Error::InProgress); with `in_progress = wait` it
    /// waits again. Every read of a record that decides locks its row, so it reads the latest version at every
    /// isolation level. Under `READ COMMITTED` the server locks fewer gaps between keys, so that fewer transactions
    /// meet.
    ///
    /// - *A deadlock* ends the whole transaction, whatever statement of it the server picks. So return an error of a
    ///   statement from the body: later statements would commit one by one. `transact` commits nothing then.
    /// - *A statement that commits*, such as `CREATE TABLE`, must not be in the transaction.
    /// - *A call that is dropped* before its end, or panics, dooms the transaction: it can only be rolled back. Drop
    ///   its guard, and then its connection, on which the answer to a statement may still be under way.
    /// - *sqlx logs* statements that take more than a second, with their texts, which contain key, owner token and
    ///   result as hexadecimal digits. Turn this off by `log_slow_statements` of its connect options.
    ///
    /// The body uses the transaction through its lock, and must not hold the lock while it calls another handler in the
    /// same transaction.
    ///
    /// ```no_run
    /// # #[cfg(feature = "with-mysql_async-0_37")]
    /// # async fn pay(conn: &mut mysql_async::Conn) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{MySqlStore, idempotent};
    /// use mysql_async::prelude::Queryable;
    /// use mysql_async::{Transaction, TxOpts};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = MySqlStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_>>, order: i64) -> Result<u64, AnyError> {
    ///     let mut tx = tx.lock().await;
    ///     tx.exec_drop("INSERT INTO payments (order_id) VALUES (?)", (order,)).await?;
    ///     Ok(tx.affected_rows())
    /// }
    ///
    /// let tx = OpenTransaction::new(conn.start_transaction(TxOpts::default()).await?);
    /// pay(&tx, 42).await?; // An error returns from here, and the transaction is rolled back.
    /// tx.into_inner().commit().await?; // The payment and its record, or neither.
    /// # Ok(()) }
    /// ```
    pub fn within<T: Transaction>(tx: &OpenTransaction<T>) -> Within<'_, InMySql<'_, T>> {
        Within::new(records(tx), &tx.notes)
    }
}

pub(super) fn records<T: Transaction>(tx: &OpenTransaction<T>) -> InMySql<'_, T> {
    InMySql::new(tx, &*tx.notes.clock)
}

#[cfg(any(feature = "with-sqlx-0_8", feature = "with-sqlx-0_9"))]
fn in_table<'a, T: Transaction>(tx: &'a OpenTransaction<T>, table: &str) -> InMySql<'a, T> {
    records(tx).table(table)
}

impl<T> Within<'_, InMySql<'_, T>> {
    /// Table that holds the records (default: `idem_records`).
    #[must_use]
    pub fn table(mut self, table: &str) -> Self {
        self.transaction = self.transaction.table(table);
        self
    }
}

// One file has the deliveries of both releases of sqlx, because their interfaces differ only in the name of the crate.

#[cfg(feature = "with-sqlx-0_8")]
#[path = "."]
mod with_sqlx_0_8 {
    use ::sqlx_0_8 as sqlx;

    #[path = "mysql_by_sqlx.rs"]
    pub(super) mod driver;
}

#[cfg(feature = "with-sqlx-0_9")]
#[path = "."]
mod with_sqlx_0_9 {
    use ::sqlx_0_9 as sqlx;

    #[path = "mysql_by_sqlx.rs"]
    #[allow(clippy::duplicate_mod, reason = "each release of sqlx has its own types")]
    pub(super) mod driver;
}

#[cfg(feature = "with-sqlx-0_8")]
impl MySqlStore {
    /// Begins, runs and commits a transaction of sqlx 0.8.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then can the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). Otherwise the transaction is rolled back, the ends of its attempts are written
    /// in a separate transaction, and the message is to be delivered again.
    ///
    /// ```no_run
    /// # use sqlx_0_8 as sqlx;
    /// # async fn deliver(pool: &sqlx::MySqlPool, order: i64) {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{MySqlStore, idempotent};
    /// use sqlx::{MySql, Transaction};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = MySqlStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_, MySql>>, order: i64) -> Result<u64, AnyError> {
    ///     let payment = sqlx::query("INSERT INTO payments (order_id) VALUES (?)").bind(order);
    ///     Ok(payment.execute(&mut **tx.lock().await).await?.rows_affected())
    /// }
    ///
    /// let (paid, outcome) = MySqlStore::transact_sqlx_0_8(pool, async |tx| pay(tx, order).await).await;
    /// println!("{paid:?}, {:?}", outcome.disposition());
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the future rolls the transaction back, unless the `COMMIT` has already been sent.
    pub fn transact_sqlx_0_8<T, E, W>(
        pool: &sqlx_0_8::MySqlPool,
        work: W,
    ) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<sqlx_0_8::Transaction<'_, sqlx_0_8::MySql>>) -> Result<T, E> + Clone,
        E: From<sqlx_0_8::Error>,
    {
        with_sqlx_0_8::driver::delivery::transact(pool, work)
    }
}

#[cfg(feature = "with-sqlx-0_9")]
impl MySqlStore {
    /// Begins, runs and commits a transaction of sqlx 0.9.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then can the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). Otherwise the transaction is rolled back, the ends of its attempts are written
    /// in a separate transaction, and the message is to be delivered again.
    ///
    /// ```no_run
    /// # use sqlx_0_9 as sqlx;
    /// # async fn deliver(pool: &sqlx::MySqlPool, order: i64) {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{MySqlStore, idempotent};
    /// use sqlx::{MySql, Transaction};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = MySqlStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_, MySql>>, order: i64) -> Result<u64, AnyError> {
    ///     let payment = sqlx::query("INSERT INTO payments (order_id) VALUES (?)").bind(order);
    ///     Ok(payment.execute(&mut **tx.lock().await).await?.rows_affected())
    /// }
    ///
    /// let (paid, outcome) = MySqlStore::transact_sqlx_0_9(pool, async |tx| pay(tx, order).await).await;
    /// println!("{paid:?}, {:?}", outcome.disposition());
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the future rolls the transaction back, unless the `COMMIT` has already been sent.
    pub fn transact_sqlx_0_9<T, E, W>(
        pool: &sqlx_0_9::MySqlPool,
        work: W,
    ) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<sqlx_0_9::Transaction<'_, sqlx_0_9::MySql>>) -> Result<T, E> + Clone,
        E: From<sqlx_0_9::Error>,
    {
        with_sqlx_0_9::driver::delivery::transact(pool, work)
    }
}
