//! Methods that every store has in addition to [`Store`].

use std::future::Future;

use super::operator::Operator;
use super::{Health, Store, health};
use crate::metrics::Snapshot;

/// Methods that every [`Store`] and `Arc<dyn Store>` has in addition to the contract.
pub trait StoreExt: Store {
    /// Returns the name of the store in errors and logs, for example `redis`.
    fn name(&self) -> &'static str {
        self.context().name()
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
