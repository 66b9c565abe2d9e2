//! Deliveries whose transaction the library begins and commits.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::journal::Journal;
use super::open::OpenTransaction;
use crate::clock::Clock;
use crate::engine::{TransactionEnd, settle, unreached, unsettled};
use crate::store::StoreError;
use crate::store::transaction::DriverTransaction;

/// Largest number of tries of a transaction that conflicts with other transactions.
#[allow(dead_code, reason = "SQLite has no conflicts of transactions")]
const TRIES: u32 = 5;

/// Notes that no transaction could be begun for the delivery, in most cases because no connection is available.
pub(super) fn not_begun() {
    settle(TransactionEnd::NotBegun { again: unreached() });
}

/// Does `work` in the transaction `begun`. Returns the transaction, still open, with its journal.
pub(super) async fn run<D, T, E>(
    begun: D,
    clock: &Arc<dyn Clock>,
    work: impl AsyncFnOnce(&OpenTransaction<D>) -> Result<T, E>,
) -> (D, Result<T, TryFailure<E>>, Journal)
where
    D: DriverTransaction,
{
    unsettled();
    let tx = OpenTransaction::with_journal(begun, Arc::clone(clock));
    let ended = CaughtWork(Some(Box::pin(work(&tx)))).await;
    let (tx, journal) = tx.end();
    let ended = ended.map_err(|cause| {
        let conflicts = journal.conflict && matches!(cause, FailureCause::Error(_));
        TryFailure { cause, conflicts }
    });
    (tx, ended, journal)
}

/// Ends a delivery whose transaction was committed: sends the messages of its calls.
pub(super) async fn committed<T>(done: T, journal: Journal) -> T {
    // Boxed: most transactions have no messages, and every delivery would carry its size inline.
    match journal.outbox.is_empty() {
        true => settle(TransactionEnd::Committed),
        false => Box::pin(journal.outbox.send()).await,
    }
    done
}

/// Ends a delivery whose transaction was rolled back. `count` writes the ends of the attempts of this transaction, and
/// returns whether all errors that the attempts had recorded are recorded again. Returns the error of the work.
///
/// # Panics
/// If the work panicked.
pub(super) async fn rolled_back<E>(
    failure: TryFailure<E>,
    journal: &Journal,
    count: impl Future<Output = Result<bool, StoreError>>,
) -> E {
    let recorded = if journal.is_empty() { Ok(false) } else { count.await };
    let failures_recorded = recorded.unwrap_or_else(|error| {
        tracing::warn!(%error, "a transaction was rolled back, and its attempts could not be counted");
        false
    });
    settle(TransactionEnd::RolledBack { failures_recorded });
    match failure.cause {
        FailureCause::Error(error) => error,
        FailureCause::Panic(panic) => resume_unwind(panic),
    }
}

/// Failure of one try of a transaction.
pub(super) struct TryFailure<E> {
    cause: FailureCause<E>,
    /// True if the server aborted the transaction because of a conflict with another transaction.
    #[allow(dead_code, reason = "SQLite has no conflicts of transactions")]
    conflicts: bool,
}

enum FailureCause<E> {
    Error(E),
    Panic(Box<dyn Any + Send>),
}

impl<E> TryFailure<E> {
    /// Returns the failure of a try whose commit failed.
    pub(super) fn at_commit(error: impl Into<E>, conflicts: bool) -> Self {
        Self { cause: FailureCause::Error(error.into()), conflicts }
    }

    /// Returns whether another try may follow try number `number`.
    #[allow(dead_code, reason = "SQLite has no conflicts of transactions")]
    pub(super) fn invites_another_try(&self, number: u32) -> bool {
        self.conflicts && number < TRIES
    }
}

/// Pauses after try number `number`.
#[allow(dead_code, reason = "SQLite has no conflicts of transactions")]
pub(super) async fn pause_after(number: u32, clock: &Arc<dyn Clock>) {
    clock.sleep(Duration::from_millis(10 << number.min(6))).await;
}

/// The user's work in a transaction. A panic of the work is caught, because the end of the panicked attempt must be
/// written after the rollback. `None` once the work has ended.
///
/// Boxed: a call in a transaction is large, and its caller's future would store it more than once.
struct CaughtWork<F>(Option<Pin<Box<F>>>);

impl<F: Future<Output = Result<T, E>>, T, E> Future for CaughtWork<F> {
    type Output = Result<T, FailureCause<E>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let polling = self.0.as_mut().expect("polled after it was ready").as_mut();
        let ended = match catch_unwind(AssertUnwindSafe(|| polling.poll(cx))) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(result)) => result.map_err(FailureCause::Error),
            Err(panic) => Err(FailureCause::Panic(panic)),
        };
        self.0 = None;
        Poll::Ready(ended)
    }
}
