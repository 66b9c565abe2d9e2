//! Deliveries in a transaction of tokio-postgres.

use std::sync::Arc;

use super::OpenTransaction;
use super::journal::Journal;
use super::open::default_clock;
use super::postgres::records;
use super::transact::{TryFailure, committed, not_begun, pause_after, rolled_back, run};
use crate::clock::Clock;
use crate::engine::{Observe, observe};
use crate::store::StoreError;
use crate::stores::postgres::PostgresStore;
use crate::stores::postgres::within::{StatementError, is_conflict};

impl PostgresStore {
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
    /// `client` may come from a pool. If the connection is dead, `transact` returns the driver's error, and the message
    /// is delivered again after a pause that grows with the length of the outage. So let the pool check connections
    /// that it hands out, and take a new connection from the pool for each delivery.
    ///
    /// If the server aborts the transaction because of a conflict (a serialization failure or a deadlock, at the commit
    /// or in a statement of the library), a clone of `work` is tried again, up to five times in total. No write of the
    /// aborted transaction has taken effect in the database. The isolation level is the session's default.
    ///
    /// ```no_run
    /// # async fn deliver(client: &mut tokio_postgres::Client, order: i64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{Disposition, PostgresStore, idempotent};
    /// use tokio_postgres::Transaction;
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &OpenTransaction<Transaction<'_>>, order: i64) -> Result<u64, AnyError> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES ($1)", &[&order]).await?)
    /// }
    ///
    /// let (paid, outcome) = PostgresStore::transact(client, async |tx| pay(tx, order).await).await;
    /// match outcome.disposition() {
    ///     Disposition::Ack => println!("the payment and its record are committed: {paid:?}"),
    ///     Disposition::Retry { after } => println!("deliver it again after {after:?}"),
    ///     Disposition::DeadLetter => println!("set it aside: {paid:?}"),
    /// }
    /// # Ok(()) }
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
                        Ok(()) => return Ok(committed(done, journal).await),
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
        })
    }
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether all errors that the attempts
/// had recorded are recorded again.
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
async fn commit(tx: tokio_postgres::Transaction<'_>) -> Result<(), tokio_postgres::Error> {
    tx.batch_execute("SELECT 1").await?;
    tx.commit().await
}
