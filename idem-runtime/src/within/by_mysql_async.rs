//! Deliveries in a transaction of `mysql_async`.

use std::sync::Arc;

use mysql_async::{Conn, DriverError, Error, Transaction, TxOpts};

use super::OpenTransaction;
use super::journal::Journal;
use super::mysql::records;
use super::open::default_clock;
use super::transact::{TryFailure, committed, not_begun, pause_after, rolled_back, run};
use crate::clock::Clock;
use crate::engine::{Observe, observe};
use crate::store::transaction::DOOMED;
use crate::store::{StoreError, StoreErrorKind};
use crate::stores::mysql::MySqlStore;
use crate::stores::mysql::within::{is_conflict, is_intact, mark_start};

impl MySqlStore {
    /// Begins a transaction, does `work` in it and commits it. Returns the outcome of the delivery, with the
    /// disposition of its message.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then can the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). If `work` returns an error or panics, or if the commit is refused, the
    /// transaction is rolled back and the message is to be delivered again. An error that a handler recorded (`on_error
    /// = record`) stays recorded, without the body's writes. The ends of the attempts are written after the rollback,
    /// so that `max_attempts` counts the attempts, and pauses grow. If the connection breaks during the commit, the
    /// message is delivered again; if the transaction was committed, that delivery gets the recorded result.
    ///
    /// The returned future is an observed delivery with all settings of [`Observe`]: `delivery`, `delivery_limit`,
    /// `on_beat`, `catch_panics`, `message`. A delivery may be nested in another delivery.
    ///
    /// `conn` may come from a pool, which checks connections that it hands out: take a new one for each delivery. If
    /// the connection is dead, `transact` returns the driver's error, and the message is delivered again after a pause
    /// that grows with the length of the outage.
    ///
    /// If the server aborts the transaction because of a conflict (a deadlock, or the certification of a cluster, at
    /// the commit or in a statement of the library), a clone of `work` is tried again, up to five times in total. No
    /// write of the aborted transaction has taken effect in the database. If the server has ended the transaction
    /// during a statement of the body, nothing more is committed, and `transact` returns an error.
    ///
    /// ```no_run
    /// # async fn deliver(pool: &mysql_async::Pool, order: i64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{Disposition, MySqlStore, idempotent};
    /// use mysql_async::Transaction;
    /// use mysql_async::prelude::Queryable;
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = MySqlStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_>>, order: i64) -> Result<u64, AnyError> {
    ///     let mut tx = tx.lock().await;
    ///     tx.exec_drop("INSERT INTO payments (order_id) VALUES (?)", (order,)).await?;
    ///     Ok(tx.affected_rows())
    /// }
    ///
    /// let mut conn = pool.get_conn().await?;
    /// let (paid, outcome) = MySqlStore::transact(&mut conn, async |tx| pay(tx, order).await).await;
    /// match outcome.disposition() {
    ///     Disposition::Ack => println!("the payment and its record are committed: {paid:?}"),
    ///     Disposition::Retry { after } => println!("deliver it again after {after:?}"),
    ///     Disposition::DeadLetter => println!("set it aside: {paid:?}"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the future rolls the transaction back, unless the `COMMIT` has already been sent. The driver does so at
    /// the next use of `conn`, or at its drop. If a statement was under way, `conn` can't be used any more.
    pub fn transact<T, E, W>(conn: &mut Conn, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&OpenTransaction<Transaction<'_>>) -> Result<T, E> + Clone,
        E: From<Error>,
    {
        observe(async move {
            let (clock, mut number) = (default_clock(), 1);
            loop {
                let begun = begin(conn).await.inspect_err(|_| not_begun())?;
                let (tx, ended, journal) = run(begun, &clock, work.clone()).await;
                let failed = match ended {
                    Ok(_) if journal.is_broken => {
                        rollback(tx).await;
                        let doomed = StoreError::new(StoreErrorKind::Aborted, DOOMED);
                        TryFailure::at_commit(Error::Other(doomed.into()), false)
                    }
                    Ok(done) => match commit(tx).await {
                        Ok(()) => return Ok(committed(done, journal).await),
                        Err(error) => {
                            let conflicts = matches!(&error, Error::Server(error) if is_conflict(error.code));
                            TryFailure::at_commit(error, conflicts)
                        }
                    },
                    Err(failed) => {
                        rollback(tx).await;
                        failed
                    }
                };
                if !failed.invites_another_try(number) {
                    return Err(rolled_back(failed, &journal, count(conn, &journal, clock)).await);
                }
                pause_after(number, &clock).await;
                number += 1;
            }
        })
    }
}

/// Begins a transaction, unless an earlier statement on the connection was dropped before its end.
async fn begin(conn: &mut Conn) -> Result<Transaction<'_>, Error> {
    if conn.is_disconnected() {
        return Err(DriverError::ConnectionClosed.into());
    }
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    mark_start(&mut tx).await.map_err(|error| Error::Other(StoreError::from(error).into()))?;
    Ok(tx)
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether all errors that the attempts
/// had recorded are recorded again.
async fn count(conn: &mut Conn, journal: &Journal, clock: Arc<dyn Clock>) -> Result<bool, StoreError> {
    let failed = |error: Error| StoreError::new(StoreErrorKind::Aborted, error.to_string());
    let tx = OpenTransaction::with_clock(begin(conn).await.map_err(failed)?, clock);
    let recorded = journal.write(|place| records(&tx).table(place)).await?;
    commit(tx.into_inner()).await.map_err(failed)?;
    Ok(recorded)
}

/// Commits the transaction. First checks that it is still open: the driver would report success even if the server has
/// ended it.
async fn commit(mut tx: Transaction<'_>) -> Result<(), Error> {
    match is_intact(&mut tx).await {
        Ok(true) => tx.commit().await,
        Ok(false) => Err(DriverError::ConnectionClosed.into()),
        Err(error) => {
            rollback(tx).await;
            Err(Error::Other(StoreError::from(error).into()))
        }
    }
}

/// Rolls the transaction back. A broken connection does so by its end.
async fn rollback(tx: Transaction<'_>) {
    if !tx.is_disconnected() {
        tx.rollback().await.ok();
    }
}
