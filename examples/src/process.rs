//! A process in miniature.

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::{
    Finish, Heartbeats, Inspection, Key, Lease, MemoryStore, Release, Reservation, Reserve, Store, StoreFuture,
    SystemClock, Write,
};

/// One process's handle to a store that several share.
///
/// Clones of a [`MemoryStore`] share one heartbeat: a worker that dies would either be kept alive by it, or take it along.
/// This handle has a heartbeat of its own, as each process has with a store on a server.
#[derive(Clone, Debug)]
pub struct ProcessStore {
    shared: MemoryStore,
    heartbeats: Arc<Heartbeats>,
}

impl ProcessStore {
    /// A new process's handle to `shared`.
    pub fn new(shared: &MemoryStore) -> Self {
        let heartbeats = Arc::new(Heartbeats::new(Arc::new(SystemClock::default())));
        Self { shared: shared.clone(), heartbeats }
    }
}

impl Store for ProcessStore {
    fn name(&self) -> &'static str {
        self.shared.name()
    }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }

    fn reserve<'a>(&'a self, request: &'a Reserve) -> StoreFuture<'a, Reservation> {
        self.shared.reserve(request)
    }

    fn renew<'a>(&'a self, leases: &'a [Lease]) -> StoreFuture<'a, Vec<Write>> {
        self.shared.renew(leases)
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Write> {
        self.shared.finish(lease, finish)
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Write> {
        self.shared.release(lease, release)
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        self.shared.wait(key, attempt, at_most)
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        self.shared.inspect(key)
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Write> {
        self.shared.reopen(key, attempt)
    }
}
