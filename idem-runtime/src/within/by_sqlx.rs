//! Deliveries in a transaction of sqlx, compiled once for each supported release of the driver.

use std::sync::Arc;

use super::sqlx::error::DatabaseError;
use super::sqlx::{Error, Executor as _, PgPool, Postgres, Transaction};
use crate::clock::Clock;
use crate::engine::{Observe, observe};
use crate::store::StoreError;
use crate::stores::postgres::within::{StatementError, is_conflict};
use crate::within::OpenTransaction;
use crate::within::journal::Journal;
use crate::within::open::default_clock;
use crate::within::postgres::records;
use crate::within::transact::{TryFailure, committed, not_begun, pause_after, rolled_back, run};

pub(crate) fn transact<T, E, W>(pool: &PgPool, work: W) -> Observe<impl Future<Output = Result<T, E>>>
where
    W: AsyncFnOnce(&OpenTransaction<Transaction<'_, Postgres>>) -> Result<T, E> + Clone,
    E: From<Error>,
{
    observe(async move {
        let (clock, mut number) = (default_clock(), 1);
        loop {
            let begun = pool.begin().await.inspect_err(|_| not_begun())?;
            let (tx, ended, journal) = run(begun, &clock, work.clone()).await;
            let failed = match ended {
                Ok(done) => match commit(tx).await {
                    Ok(()) => return Ok(committed(done, journal).await),
                    Err(error) => {
                        let code = error.as_database_error().and_then(DatabaseError::code);
                        let conflicts = code.is_some_and(|code| is_conflict(&code));
                        TryFailure::at_commit(error, conflicts)
                    }
                },
                Err(failed) => {
                    tx.rollback().await.ok();
                    failed
                }
            };
            if !failed.invites_another_try(number) {
                return Err(rolled_back(failed, &journal, count(pool, &journal, clock)).await);
            }
            pause_after(number, &clock).await;
            number += 1;
        }
    })
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether all errors that the attempts
/// had recorded are recorded again.
async fn count(pool: &PgPool, journal: &Journal, clock: Arc<dyn Clock>) -> Result<bool, StoreError> {
    let tx = OpenTransaction::with_clock(pool.begin().await.map_err(StatementError::from)?, clock);
    let recorded = journal.write(|place| records(&tx).schema(place)).await?;
    commit(tx.into_inner()).await.map_err(StatementError::from)?;
    Ok(recorded)
}

/// Commits the transaction. First checks that no statement has failed and that the transaction is open: otherwise the
/// driver would report success.
async fn commit(mut tx: Transaction<'static, Postgres>) -> Result<(), Error> {
    let connection = &mut *tx;
    connection.execute("SAVEPOINT idem; RELEASE SAVEPOINT idem").await?;
    tx.commit().await
}
