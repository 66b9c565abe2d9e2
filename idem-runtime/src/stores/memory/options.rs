//! Settings of the memory store, and the making of a store from them.

use std::sync::Arc;

use super::{MemoryStore, Records, SHARDS, Shard};
use crate::clock::{Clock, SystemClock};
use crate::store::StoreContext;
use crate::sync::SharedWithChild;
use crate::sync::atomic::AtomicUsize;

/// Settings of a [`MemoryStore`].
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::MemoryStore;
/// use idem_runtime::clock::ManualClock;
/// let clock = ManualClock::new();
/// let store = MemoryStore::options().max_records(10_000).namespace("shop").clock(clock.clone()).build();
/// clock.advance(Duration::from_secs(31)); // Every lease of 30 s has lapsed.
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct MemoryOptions {
    max_records: usize,
    namespace: Arc<str>,
    holder: String,
    clock: Option<Arc<dyn Clock>>,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self { max_records: 1_000_000, namespace: Arc::default(), holder: String::new(), clock: None }
    }
}

impl MemoryOptions {
    /// Largest number of records (default: 1 000 000). A full store refuses new keys.
    pub fn max_records(self, max_records: usize) -> Self {
        Self { max_records, ..self }
    }

    /// Name of this application, for its child keys (default: empty). The keys of
    /// [`Attempt::child_key`](crate::Attempt::child_key) contain the name; the records don't depend on it.
    pub fn namespace(self, namespace: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// Name of this handle in its records, next to host and process (default: none). The name shows who holds a key;
    /// see [`Holder`](crate::store::Holder).
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { holder: name.into(), ..self }
    }

    /// Clock that measures leases and retentions (default: [`SystemClock`]).
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }
    }

    /// Makes an empty store with these settings.
    pub fn build(self) -> MemoryStore {
        let Self { max_records, namespace, holder, clock } = self;
        let clock = clock.unwrap_or_else(|| Arc::new(SystemClock::default()));
        let context = Arc::new(StoreContext::in_process("memory", clock).held_by(&holder));
        let own = context.holder().as_str();
        let shards = (0..SHARDS).map(|_| SharedWithChild::new(Shard::of(own))).collect();
        let records = Arc::new(Records { shards, capacity: max_records, len: AtomicUsize::new(0) });
        MemoryStore::open(records, context, namespace)
    }
}
