//! Steps whose effect is a row: the row and the entry of the step commit together.

use std::cell::Cell;
use std::fmt;
use std::future::Future;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Within;
use crate::engine::{Step, StepBuilder};
use crate::error::Error;
use crate::key::Key;
use crate::policy::Policy;
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
    /// the body returns an error, its writes are undone. Commit the transaction once the step has ended: if the
    /// transaction is rolled back, the step runs again in the next attempt. The other options of a step have no effect,
    /// except [`fingerprint`](Self::fingerprint) and [`was`](Self::was). The value is JSON.
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
    /// The error of `body`, whose writes are then undone. [`Error::Step`] if the step did not run. The errors of a call
    /// in a transaction.
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
        let step = claim.step().clone();
        if !claim.is_journaled() {
            return claim.inside(body(step)).await;
        }
        let policy = Policy::new(step.attempt().lease.ttl);
        let mut operation = self.records.operation(Key::new(SCOPE, step.child_key()), policy);
        if let Some(inputs) = claim.inputs() {
            operation = operation.fingerprinted(inputs);
        }
        let ran = Cell::new(false);
        let running = async {
            ran.set(true);
            claim.inside(body(step)).await
        };
        let ended = operation.run(running).await;
        match &ended {
            Ok(_) => claim.ended(!ran.get()),
            Err(_) => claim.failed(),
        }
        ended
    }
}
