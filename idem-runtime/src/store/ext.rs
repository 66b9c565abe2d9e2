//! Methods that every store has in addition to [`Store`].

use std::future::Future;
use std::sync::Arc;

use super::operator::Operator;
use super::sender::Sender;
use super::{Filter, Health, Store, StoreError, health};
use crate::metrics::{Snapshot, StoreOp};

/// Methods that every [`Store`] and `Arc<dyn Store>` has in addition to the contract.
pub trait StoreExt: Store {
    /// Returns the name of the store in errors and logs, for example `redis`.
    fn name(&self) -> &'static str {
        self.context().name()
    }

    /// Names the sender of the messages that handlers push to their [outbox](crate::Attempt::outbox). All clones of
    /// this store handle share the sender.
    ///
    /// # Panics
    /// If the handle has a sender already.
    #[must_use]
    fn with_sender(self, sender: impl Sender) -> Self
    where
        Self: Sized,
    {
        assert!(self.context().set_sender(Arc::new(sender)), "this store handle has a sender already");
        self
    }

    /// Waits until late writes and renewals are done; see [`StoreContext::flush`](super::StoreContext::flush). Call
    /// `flush` at the end of a program.
    fn flush(&self) -> impl Future<Output = ()> + Send + '_ {
        self.context().flush()
    }

    /// Returns the metrics of this handle and its clones; see [`crate::metrics`].
    fn metrics(&self) -> Snapshot {
        self.context().snapshot()
    }

    /// Counts the keys that [wait for the decision](crate::store::Inspection::waits_for_decision) of an operator, and
    /// sets the gauge `idem_keys_waiting_for_decision` to this number. Call this method about once a minute, in at
    /// least one process: an alert on the gauge then lasts until the last key is decided, even if processes end and
    /// others start.
    ///
    /// SQLite and PostgreSQL read an index that holds only the keys under `on_crash = fail` that run or wait for a
    /// decision; the memory store reads all its records. A count is taken from several pages, so a record that changes
    /// meanwhile may be counted or not. Damaged records are not counted.
    ///
    /// ```
    /// # use idem_runtime::{MemoryStore, StoreExt};
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// let store = MemoryStore::new();
    /// assert_eq!(store.count_undecided().await?, 0);
    /// assert!(store.metrics().prometheus_text().contains("idem_keys_waiting_for_decision{store=\"memory\"} 0"));
    /// # Ok::<(), idem_runtime::StoreError>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`StoreError`] if the store did not answer. The kind is
    /// [`StoreErrorKind::Unsupported`](crate::StoreErrorKind::Unsupported) in Redis and DynamoDB, which could
    /// count only by reading every record. After an error the gauge keeps its number.
    ///
    /// # Cancel safety
    /// Cancel safe: the count writes nothing, and a dropped count leaves the gauge unchanged.
    fn count_undecided(&self) -> impl Future<Output = Result<u64, StoreError>> + Send + '_ {
        count_undecided(self)
    }

    /// Checks whether the store can serve calls, for a readiness probe. Pings the store once.
    ///
    /// ```
    /// # use idem_runtime::{MemoryStore, StoreExt};
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// let store = MemoryStore::new();
    /// let health = store.health().await;
    /// assert!(health.is_ready(), "{health}");
    /// # });
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: the check writes nothing.
    fn health(&self) -> impl Future<Output = Health> + Send + '_ {
        health::check(self)
    }

    /// Returns the [`Operator`] of the store, through which a person decides about records.
    fn operator(&self) -> Operator<'_, Self> {
        Operator::new(self)
    }
}

impl<S: Store + ?Sized> StoreExt for S {}

async fn count_undecided<S: Store + ?Sized>(store: &S) -> Result<u64, StoreError> {
    let mut filter = Filter::new().undecided().limit(Filter::MAX_LIMIT);
    let mut count = 0;
    loop {
        let page = store.list(&filter).watched(store, StoreOp::List).await?;
        count += page.records.len() as u64;
        let Some(next) = page.next else { break };
        filter = filter.after(next);
    }
    store.context().metrics_here().keys_wait(count);
    Ok(count)
}
