//! Steps whose effect is a row: the row and the entry of the step commit together.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Within;
use crate::engine::{Step, StepBuilder};
use crate::error::Error;
use crate::key::Key;
use crate::store::transaction::TransactionStore;

/// Scope of the records of steps in transactions. The text of such a key is the child key of the step.
const SCOPE: &str = "idem::steps";

impl StepBuilder {
    /// Keeps the entry of the step in your transaction instead of in the journal: the rows of the body and the entry
    /// commit together, so the effect happens exactly once. `records` is `PostgresStore::within(&tx)` or
    /// `SqliteStore::within(&tx)`.
    ///
    /// The entry is a record of its own, whose key is the [child key](Step::child_key) of the step in the scope
    /// `idem::steps`. It is kept for the retention of the operation. The store of the operation may be another one. If
    /// the body returns an error or runs into its time limit, its writes are undone. Commit the transaction once the
    /// step has ended: if the transaction is rolled back, the step runs again in the next attempt.
    ///
    /// Of the options, [`fingerprint`](Self::fingerprint), [`was`](Self::was), [`timeout`](Self::timeout) and
    /// [`on_undecodable`](Self::on_undecodable) apply; a step with another option has no `within`. The value is JSON.
    /// A record without inputs is taken for the inputs of this attempt. With `mysql_async`, a time limit that passes
    /// during a statement leaves a transaction that can only be rolled back.
    ///
    /// ```
    /// # #[cfg(all(feature = "with-rusqlite", feature = "memory"))]
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// use idem_runtime::within::OpenTransaction;
    /// use idem_runtime::{MemoryStore, SqliteStore, current, idempotent};
    /// use rusqlite::Connection;
    /// # type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = store, scope = "pay")]
    /// async fn pay(store: &MemoryStore, db: &mut Connection, order: i64) -> Result<usize, AnyError> {
    ///     let tx = OpenTransaction::new(db.transaction()?);
    ///     let debit = current()?.step("debit").within(SqliteStore::within(&tx));
    ///     let debited = debit
    ///         .run(async |_| {
    ///             Ok::<_, AnyError>(tx.execute("INSERT INTO payments (order_id) VALUES (?1)", [order])?)
    ///         })
    ///         .await?;
    ///     tx.into_inner().commit()?;
    ///     Ok(debited)
    /// }
    ///
    /// # let mut db = Connection::open_in_memory().unwrap();
    /// # db.execute_batch("CREATE TABLE payments (order_id INTEGER)").unwrap();
    /// # assert_eq!(pay(&MemoryStore::new(), &mut db, 42).await.unwrap(), 1);
    /// # });
    /// ```
    pub fn within<C: TransactionStore>(self, records: Within<'_, C>) -> StepWithin<'_, C> {
        StepWithin { step: self, records }
    }
}

/// Description of a step whose entry is a record in a transaction; see [`StepBuilder::within`].
#[must_use = "a step does nothing until it is run"]
pub struct StepWithin<'a, C> {
    step: StepBuilder,
    records: Within<'a, C>,
}

impl<C> fmt::Debug for StepWithin<'_, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StepWithin").field(&self.step).finish()
    }
}

impl<C: TransactionStore> StepWithin<'_, C> {
    /// Runs `body` and records its value in the transaction, or returns the value of an earlier attempt.
    ///
    /// # Errors
    /// The error of `body`, whose writes are then undone. [`Error::Step`] if the step did not run, ran into its time
    /// limit, or has no value. The other errors of a call in a transaction.
    ///
    /// # Cancel safety
    /// If the future is dropped before it has ended, the writes of `body` are undone.
    pub async fn run<T, E, F, Fut>(self, body: F) -> Result<T, E>
    where
        F: FnOnce(Step) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
    {
        let claim = match self.step.begin::<T>().await? {
            Ok(value) => return Ok(value),
            Err(claim) => claim,
        };
        // Atomic: a handler with such a step may be spawned.
        let ran = AtomicBool::new(false);
        let running = async {
            ran.store(true, Ordering::Relaxed);
            let ended = claim.limited(body(claim.step().clone())).await;
            ended.map_or(Err(NoValue::TimedOut), |ended| ended.map_err(NoValue::Body))
        };
        let ended = if claim.is_journaled() {
            let mut operation =
                self.records.operation(Key::of_library(SCOPE, claim.step().child_key()), claim.policy());
            if let Some(inputs) = claim.inputs() {
                operation = operation.fingerprinted(inputs);
            }
            operation.run(running).await
        } else {
            running.await
        };
        match ended {
            Ok(value) => {
                claim.ended(!ran.load(Ordering::Relaxed));
                Ok(value)
            }
            Err(NoValue::Body(error)) => {
                claim.failed();
                Err(error)
            }
            Err(NoValue::TimedOut) => Err(claim.timed_out().into()),
            Err(NoValue::Call(error)) => Err(claim.refused(error).into()),
        }
    }
}

/// Reason why a step in a transaction has no value.
enum NoValue<E> {
    /// The body returned this error.
    Body(E),
    /// The time limit of the body passed.
    TimedOut,
    /// The call in the transaction failed with this error.
    Call(Error),
}

impl<E> From<Error> for NoValue<E> {
    fn from(error: Error) -> Self {
        Self::Call(error)
    }
}
