//! Calls and deliveries in a transaction of SQLite.

use std::future::Future;
use std::sync::Arc;

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::journal::Journal;
use super::open::default_clock;
use super::transact::{TryFailure, committed, not_begun, rolled_back, run};
use super::{OpenTransaction, Within};
use crate::clock::Clock;
use crate::engine::{Observe, observe};
use crate::store::StoreError;
use crate::stores::sqlite::{InSqlite, SqliteStore, aborted};

impl SqliteStore {
    /// Puts records inside of your open transaction. The records are committed together with its other writes, or not
    /// at all. See [`Within`].
    ///
    /// The table is `idem_records`, or [`another`](Within::table), and is created if it is missing. Begin the
    /// transaction as `IMMEDIATE`. Only one writing transaction is open at a time, so a duplicate then waits at its
    /// `BEGIN`, for as long as the `busy_timeout` of its connection allows. In a transaction that is not `IMMEDIATE`, a
    /// duplicate gets [`Error::Store`] of kind [`Aborted`] while another transaction writes. `rusqlite` blocks the
    /// calling thread.
    ///
    /// [`Aborted`]: crate::StoreErrorKind::Aborted
    /// [`Error::Store`]: crate::Error::Store
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{Error, SqliteStore, idempotent};
    /// use rusqlite::{Connection, Transaction, TransactionBehavior};
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = SqliteStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_>>, order: i64) -> Result<usize, Error> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES (?1)", [order]).expect("the table is there"))
    /// }
    ///
    /// let mut connection = Connection::open_in_memory().unwrap();
    /// connection.execute_batch("CREATE TABLE payments (order_id INTEGER)").unwrap();
    /// for _delivery in 0..2 {
    ///     let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    ///     let tx = OpenTransaction::new(tx);
    ///     pay(&tx, 42).await.unwrap(); // After an error, drop the transaction: that rolls it back.
    ///     tx.into_inner().commit().unwrap(); // The payment and its record, or neither.
    /// }
    /// let payments: i64 = connection.query_row("SELECT count(*) FROM payments", [], |row| row.get(0)).unwrap();
    /// assert_eq!(payments, 1);
    /// # });
    /// ```
    pub fn within<'a>(tx: &'a OpenTransaction<Transaction<'_>>) -> Within<'a, InSqlite<'a>> {
        Within::new(records(tx), &tx.notes)
    }

    /// Begins a transaction that may write, does `work` in it and commits it. Returns the outcome of the delivery, with
    /// the disposition of its message.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then can the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). If `work` returns an error or panics, or if the commit fails, the transaction
    /// is rolled back and the message is to be delivered again. An error that a handler recorded (`on_error = record`)
    /// stays recorded, without the body's writes. The ends of the attempts are written after the rollback, so that
    /// `max_attempts` counts the attempts, and pauses grow.
    ///
    /// The returned future is an observed delivery with all settings of [`Observe`]: `delivery`, `delivery_limit`,
    /// `on_beat`, `catch_panics`, `message`. A delivery may be nested in another delivery.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{Disposition, SqliteStore, idempotent};
    /// use rusqlite::Transaction;
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = SqliteStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_>>, order: i64) -> Result<usize, AnyError> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES (?1)", [order])?)
    /// }
    ///
    /// let mut connection = rusqlite::Connection::open_in_memory().unwrap();
    /// connection.execute_batch("CREATE TABLE payments (order_id INTEGER)").unwrap();
    /// for _delivery in 0..2 {
    ///     let (paid, outcome) = SqliteStore::transact(&mut connection, async |tx| pay(tx, 42).await).await;
    ///     assert_eq!(paid.unwrap(), 1);
    ///     assert_eq!(outcome.disposition(), Disposition::Ack);
    /// }
    /// let payments: i64 = connection.query_row("SELECT count(*) FROM payments", [], |row| row.get(0)).unwrap();
    /// assert_eq!(payments, 1);
    /// # });
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the future rolls the transaction back.
    pub fn transact<T, E, W>(connection: &mut Connection, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<Transaction<'_>>) -> Result<T, E>,
        E: From<rusqlite::Error>,
    {
        observe(async move {
            let clock = default_clock();
            let begun = connection.transaction_with_behavior(TransactionBehavior::Immediate);
            let (tx, ended, journal) = run(begun.inspect_err(|_| not_begun())?, &clock, work).await;
            let failed = match ended {
                Ok(done) => match tx.commit() {
                    Ok(()) => return Ok(committed(done, journal).await),
                    Err(error) => TryFailure::at_commit(error, false),
                },
                Err(failed) => {
                    drop(tx);
                    failed
                }
            };
            Err(rolled_back(failed, &journal, count(connection, &journal, clock)).await)
        })
    }
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether all errors that the attempts
/// had recorded are recorded again.
async fn count(connection: &mut Connection, journal: &Journal, clock: Arc<dyn Clock>) -> Result<bool, StoreError> {
    let failed = |error: rusqlite::Error| aborted(&error.into());
    let begun = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let tx = OpenTransaction::with_clock(begun, clock);
    let recorded = journal.write(|place| records(&tx).table(place)).await?;
    tx.into_inner().commit().map_err(failed)?;
    Ok(recorded)
}

fn records<'a>(tx: &'a OpenTransaction<Transaction<'_>>) -> InSqlite<'a> {
    InSqlite::new(tx, &*tx.notes.clock)
}

impl Within<'_, InSqlite<'_>> {
    /// Table that holds the records (default: `idem_records`). Letters, digits and `_`.
    #[must_use]
    pub fn table(mut self, table: &str) -> Self {
        self.transaction = self.transaction.table(table);
        self
    }
}
