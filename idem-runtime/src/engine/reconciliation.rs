//! Reconcilers: functions of the user that find out whether an effect in doubt has happened.

use std::fmt;
use std::time::Duration;

use super::attempt::current;
use super::poll_notes::{DoubtStage, doubt, note_doubt, note_unresolved};
use crate::error::Error;

/// Shortest pause between two questions to a reconciler.
pub(super) const SHORTEST_PAUSE: Duration = Duration::from_millis(100);

/// Answer of a reconciler: whether an effect in doubt has happened.
///
/// An effect is in doubt after a crash, after a cancelled body, and after an error that is
/// [`OnError::Uncertain`](crate::OnError::Uncertain). A handler with `on_crash = reconcile(…)` then asks the outside
/// world before its body runs again: the next delivery reserves the key and runs the reconciler as a new attempt, with
/// heartbeats and [`current`](crate::current). [`Attempt::child_key`](crate::Attempt::child_key) returns the same keys
/// as in the attempt in doubt. An error, a panic or a crash of the reconciler leaves the operation in doubt.
///
/// ```
/// use std::time::Duration;
/// use idem_runtime::{Error, MemoryStore, OnError, Reconciliation, current, idempotent};
/// # #[derive(Debug)] enum BankError { TimedOut, Idempotency(Error) }
/// # impl From<Error> for BankError { fn from(error: Error) -> Self { Self::Idempotency(error) } }
/// # struct Bank;
/// # impl Bank {
/// #     async fn refund(&self, _: u64, _: String) -> Result<String, BankError> { Err(BankError::TimedOut) }
/// #     async fn by_reference(&self, _: String) -> Result<Option<String>, BankError> { Ok(Some("receipt 7".into())) }
/// # }
/// struct App {
///     store: MemoryStore,
///     bank: Bank,
/// }
///
/// #[idempotent(key = "{id}", ttl = "90d", store = app.store, on_error = uncertain, on_crash = reconcile(find(app)))]
/// async fn refund(app: &App, id: u64) -> Result<String, BankError> {
///     app.bank.refund(id, current()?.child_key("refund")).await
/// }
///
/// /// Reads at the bank, and never writes.
/// async fn find(app: &App) -> Result<Reconciliation<String>, BankError> {
///     match app.bank.by_reference(current()?.child_key("refund")).await? {
///         Some(receipt) => Ok(Reconciliation::Done(receipt)),
///         // The bank refuses a reference that it has not seen for an hour, so the refund can't happen any more.
///         None => Ok(Reconciliation::NotDone),
///     }
/// }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # let app = App { store: MemoryStore::new(), bank: Bank };
/// assert!(refund(&app, 7).await.is_err()); // The bank timed out.
/// assert_eq!(refund(&app, 7).await.unwrap(), "receipt 7"); // The bank knows the refund: no second one is made.
/// # });
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reconciliation<T> {
    /// The effect has happened. The value is recorded as the result of the operation, and returned to all duplicates.
    Done(T),
    /// The effect has not happened, **and can't happen any more**: the body runs, in the same attempt.
    ///
    /// "Not found" alone is not enough: a request of the attempt in doubt may still be on its way. The answer is right
    /// if the other side refuses a second request with the same reference, or if the other side no longer accepts the
    /// first request because too much time has passed. Otherwise the answer is [`Unknown`](Self::Unknown).
    NotDone,
    /// The effect may have happened. The operation remains in doubt, and the message is delivered again.
    Unknown {
        /// Time until the outside world may know more, at least 100 ms.
        ask_again: Duration,
    },
}

/// Future of the user that supplies a [`Reconciliation`]; see
/// [`Operation::reconcile`](crate::Operation::reconcile).
pub struct Reconciler<F>(pub(super) F);

impl<F> fmt::Debug for Reconciler<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reconciler")
    }
}

/// Returns whether the body that is being polled must first ask its reconciler.
pub fn is_asked() -> bool {
    matches!(doubt(), DoubtStage::Asked { .. })
}

/// Applies the answer of the reconciler of the body that is being polled. Returns the result of the call; `None` if the
/// body must run.
pub(crate) fn settle<T, E: From<Error>>(answer: Result<Reconciliation<T>, E>) -> Option<Result<T, E>> {
    let attempt = match current() {
        Ok(attempt) => attempt,
        Err(error) => return Some(Err(error.into())),
    };
    let DoubtStage::Asked { may_run } = doubt() else { return None };
    let (key, store, number) = (attempt.key().clone(), attempt.store.context().name(), attempt.number());
    match answer {
        Ok(Reconciliation::Done(value)) => {
            note_doubt(DoubtStage::Done);
            Some(Ok(value))
        }
        Ok(Reconciliation::NotDone) if may_run => {
            note_doubt(DoubtStage::Settled);
            None
        }
        Ok(Reconciliation::NotDone) => {
            note_doubt(DoubtStage::Exhausted);
            let attempts = attempt.lease.attempts_used.saturating_sub(1);
            Some(Err(Error::AttemptsExhausted { key, store, attempts }.into()))
        }
        Ok(Reconciliation::Unknown { ask_again }) => {
            let ask_again = ask_again.max(SHORTEST_PAUSE);
            note_unresolved(ask_again);
            let (attempt, ask_again) = (number.saturating_sub(1), Some(ask_again));
            Some(Err(Error::Interrupted { key, store, attempt, ask_again }.into()))
        }
        Err(error) => {
            note_unresolved(attempt.pause());
            Some(Err(error))
        }
    }
}
