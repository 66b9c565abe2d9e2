//! Deliveries in a transaction of sqlx, compiled once for each supported release of the driver and each database.

use std::io;
use std::sync::Arc;

use super::sqlx::pool::PoolConnection;
use super::sqlx::{Connection as _, Error, Transaction};
use super::{Database, Pool, begin, check, has_conflict, records_in};
use crate::clock::Clock;
use crate::engine::{Observe, observe};
use crate::store::transaction::DOOMED;
use crate::store::{StoreError, StoreErrorKind};
use crate::within::OpenTransaction;
use crate::within::journal::Journal;
use crate::within::open::default_clock;
use crate::within::transact::{TryFailure, committed, not_begun, pause_after, rolled_back, run};

pub(crate) fn transact<T, E, W>(pool: &Pool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
where
    W: AsyncFnOnce(&OpenTransaction<Transaction<'_, Database>>) -> Result<T, E> + Clone,
    E: From<Error>,
{
    observe(async move {
        let (clock, mut number) = (default_clock(), 1);
        loop {
            let tried = attempt(pool, &clock, work.clone()).await;
            let (ended, journal) = tried.inspect_err(|_| not_begun())?;
            let failed = match ended {
                Ok(done) => return Ok(committed(done, journal).await),
                Err(failed) => failed,
            };
            if !failed.invites_another_try(number) {
                return Err(rolled_back(failed, &journal, count(pool, &journal, clock)).await);
            }
            pause_after(number, &clock).await;
            number += 1;
        }
    })
}

/// A connection of the pool. It is closed when it is dropped, unless its transaction has ended as planned: the driver
/// would return it to the pool with an open transaction, or with an answer that the next statement takes for its own.
struct OwnConnection {
    connection: PoolConnection<Database>,
    is_clean: bool,
}

impl Drop for OwnConnection {
    fn drop(&mut self) {
        if !self.is_clean || self.connection.is_in_transaction() {
            self.connection.close_on_drop();
        }
    }
}

impl OwnConnection {
    async fn of(pool: &Pool) -> Result<Self, Error> {
        Ok(Self { connection: pool.acquire().await?, is_clean: false })
    }
}

/// Does `work` in a transaction, and commits it or rolls it back. Returns the journal of the transaction.
///
/// # Errors
/// If no transaction could be begun.
async fn attempt<T, E, W>(
    pool: &Pool,
    clock: &Arc<dyn Clock>,
    work: W,
) -> Result<(Result<T, TryFailure<E>>, Journal), Error>
where
    W: AsyncFnOnce(&OpenTransaction<Transaction<'_, Database>>) -> Result<T, E>,
    E: From<Error>,
{
    let mut own = OwnConnection::of(pool).await?;
    let begun = begin(&mut own.connection).await?;
    let (tx, ended, journal) = run(begun, clock, work).await;
    let ended = match ended {
        Ok(_) if journal.is_broken => {
            let doomed = StoreError::new(StoreErrorKind::Aborted, DOOMED);
            Err(TryFailure::at_commit(Error::Io(io::Error::other(doomed)), false))
        }
        Ok(done) => match commit(tx).await {
            Ok(()) => {
                own.is_clean = true;
                Ok(done)
            }
            Err(error) => {
                let conflicts = has_conflict(&error);
                Err(TryFailure::at_commit(error, conflicts))
            }
        },
        Err(failed) => {
            own.is_clean = !journal.is_broken && tx.rollback().await.is_ok();
            Err(failed)
        }
    };
    Ok((ended, journal))
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether all errors that the attempts
/// had recorded are recorded again.
async fn count(pool: &Pool, journal: &Journal, clock: Arc<dyn Clock>) -> Result<bool, StoreError> {
    let failed = |error: Error| StoreError::new(StoreErrorKind::Aborted, error.to_string());
    let mut own = OwnConnection::of(pool).await.map_err(failed)?;
    let tx = OpenTransaction::with_clock(begin(&mut own.connection).await.map_err(failed)?, clock);
    let recorded = journal.write(|place| records_in(&tx, place)).await?;
    commit(tx.into_inner()).await.map_err(failed)?;
    own.is_clean = true;
    Ok(recorded)
}

/// Commits the transaction. First checks that it can be committed: the driver may report success even if it can't.
async fn commit(mut tx: Transaction<'_, Database>) -> Result<(), Error> {
    check(&mut tx).await?;
    tx.commit().await
}
