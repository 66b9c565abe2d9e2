//! Simulated crashes of processes that consist only of a store handle.

use crate::store::Store;

/// Stops all renewals, releases and late writes of this store handle, as if its process had crashed. Running calls do
/// not end: the test must drop them. Use `crash` in tests and demonstrations in which several store handles of one
/// process represent several processes.
///
/// ```
/// use idem_runtime::MemoryStore;
/// use idem_runtime::testing::crash;
///
/// let store = MemoryStore::new();
/// let worker = store.peer();
/// // … `worker` runs a handler, and the call is dropped …
/// crash(&worker);
/// // The key stays reserved until the lease of `worker` lapses.
/// ```
pub fn crash<S: Store + ?Sized>(store: &S) {
    store.context().abandon();
}
