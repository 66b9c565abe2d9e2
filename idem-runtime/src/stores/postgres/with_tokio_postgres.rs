//! Transactions of tokio-postgres, and of its pool.

use std::pin::pin;
use std::task::{Context, Waker};

use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Transaction};

use super::PostgresStore;
use super::failure::driver_text;
use super::sql::Statement;
use super::within::{InPostgres, StatementError, TransactionSession, is_conflict};
use crate::engine::{Observe, observe};
use crate::store::StoreError;
use crate::within::sealed::Sealed;
use crate::within::{self, Journal, TRIES, Within, WorkFailure, journaled};

impl Sealed for &Transaction<'_> {}

impl super::within::Transaction for &Transaction<'_> {
    type Session = Self;

    fn session(self) -> Self {
        self
    }
}

#[cfg(feature = "with-deadpool-postgres-0_14")]
impl Sealed for &deadpool_postgres::Transaction<'_> {}

#[cfg(feature = "with-deadpool-postgres-0_14")]
impl<'a, 'b> super::within::Transaction for &'a deadpool_postgres::Transaction<'b> {
    type Session = &'a Transaction<'b>;

    fn session(self) -> Self::Session {
        self
    }
}

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

    fn identity(&self) -> usize {
        std::ptr::from_ref(*self).addr()
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

/// Queues `text` on the connection, before every later statement, and does not wait for it. If `text` fails, the
/// transaction can't go on, which the next statement reports.
fn send(tx: &Transaction<'_>, text: &str) {
    let sent = pin!(tx.batch_execute(text));
    // The first poll queues it.
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

impl PostgresStore {
    /// Begins a transaction, does `work` in it and commits it. Returns the outcome of the delivery, with the
    /// disposition of its message.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then may the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). If `work` returns an error or panics, or if the commit is refused, the
    /// transaction is rolled back and the message is to be delivered again. An error that a handler recorded (`on_error
    /// = record`) is still recorded, alone. The attempts that began are written after the rollback, so that
    /// `max_attempts` counts them, and pauses grow. If the connection breaks and the commit is uncertain, the message
    /// is delivered again, and replayed if the transaction was committed.
    ///
    /// The returned future is an observed delivery with all settings of [`Observe`]: `delivery`, `delivery_limit`,
    /// `on_beat`, `catch_panics`, `message`. One delivery may contain another.
    ///
    /// `client` may come from a pool. A connection that has died makes `transact` return the driver's error, and the
    /// message is delivered again after a pause that grows with the outage. So let the pool check connections that it
    /// hands out, and take a new connection from the pool for each delivery.
    ///
    /// If the server undoes the transaction in favour of another one (a serialization failure or a deadlock, at the
    /// commit or in a statement of the library), a clone of `work` is tried again, up to five times in all: none of its
    /// writes has taken effect in the database. The isolation level is the session's default.
    ///
    /// ```no_run
    /// # async fn deliver(client: &mut tokio_postgres::Client, order: i64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::{Disposition, PostgresStore, idempotent};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &tokio_postgres::Transaction<'_>, order: i64) -> Result<u64, AnyError> {
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
    /// Dropping the future rolls the transaction back, unless its `COMMIT` is under way.
    pub fn transact<T, E, W>(client: &mut Client, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&Transaction<'_>) -> Result<T, E> + Clone,
        E: From<tokio_postgres::Error>,
    {
        observe(async move {
            let is_conflict = |error: &tokio_postgres::Error| error.code().is_some_and(|code| is_conflict(code.code()));
            let mut next = 1;
            loop {
                let tx = client.transaction().await.inspect_err(|_| within::not_begun())?;
                within::begun();
                let (ended, journal) = journaled(work.clone()(&tx)).await;
                let failed = match ended {
                    Ok(done) => match commit(tx).await {
                        Ok(()) => {
                            within::committed();
                            return Ok(done);
                        }
                        Err(error) if is_conflict(&error) && next < TRIES => None,
                        Err(error) => Some(WorkFailure::Error(error.into())),
                    },
                    Err(failed) => {
                        tx.rollback().await.ok();
                        let again = journal.conflict && next < TRIES && matches!(failed, WorkFailure::Error(_));
                        (!again).then_some(failed)
                    }
                };
                if let Some(failed) = failed {
                    within::rolled_back(count(client, &journal).await);
                    return Err(failed.into_error());
                }
                within::pause_before(next).await;
                next += 1;
            }
        })
    }
}

/// Commits, unless a statement has failed: the server would roll back, and report success.
async fn commit(tx: Transaction<'_>) -> Result<(), tokio_postgres::Error> {
    tx.batch_execute("SELECT 1").await?;
    tx.commit().await
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether the errors among them are
/// recorded.
async fn count(client: &mut Client, journal: &Journal) -> Result<bool, StoreError> {
    if journal.attempts.is_empty() {
        return Ok(false);
    }
    let tx = client.transaction().await.map_err(StatementError::from)?;
    let mut recorded = true;
    for attempt in &journal.attempts {
        let Within(at) = Within(InPostgres::new(&tx)).schema(&attempt.place);
        recorded &= attempt.write(&at).await? || !attempt.has_failure();
    }
    commit(tx).await.map_err(StatementError::from)?;
    Ok(recorded)
}
