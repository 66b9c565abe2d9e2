//! Wrappers around stores, for the conformance suite.

use std::sync::Arc;

use idem_runtime::conformance::Subject;
use idem_runtime::{Cached, Compressed, Key, MemoryStore, Offloaded, RedisStore};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use redis::AsyncCommands;

use crate::proxy::{Line, Proxy};
use crate::server::{Kind, raw};

/// `Cached` around a store in memory. The second handle shares the cache, as the contract requires: a separate cache
/// would notice another process's `reopen` in time, but not immediately.
pub fn cached() -> Subject {
    let store = MemoryStore::new();
    let cached = Cached::new(store.clone());
    let peer = cached.peer(store.peer());
    Subject::new(cached).peer(peer)
}

/// `Compressed` around a store in memory. Every result that becomes smaller is compressed.
pub fn compressed() -> Subject {
    let store = MemoryStore::new();
    let around = |store| Compressed::options().above(0).wrap(store);
    Subject::new(around(store.clone())).peer(around(store.peer()))
}

/// `Offloaded` around a store in memory. Every result that is not empty is offloaded.
pub fn offloaded() -> Subject {
    let store = MemoryStore::new();
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let around = |store| Offloaded::options().above(0).wrap(store, Arc::clone(&objects));
    Subject::new(around(store.clone())).peer(around(store.peer()))
}

/// Redis store inside of all wrappers, which cache, compress and offload results of any size.
pub async fn stacked() -> Subject {
    let url = Kind::Redis.shared();
    let connect = async |url: &str| RedisStore::connect(url).await.expect("connects");
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let around = |store: RedisStore| {
        let offloaded = Offloaded::options().above(0).wrap(store, Arc::clone(&objects));
        Compressed::options().above(0).wrap(offloaded)
    };
    let cached = Cached::new(around(connect(&url).await));
    let peer = cached.peer(around(connect(&url).await));

    let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    let cut_off = Proxy::to(port).await;
    let unreachable = Cached::new(around(connect(&cut_off.url()).await));
    cut_off.set(Line::Refuse);
    let spoil = move |key: Key| {
        let url = url.clone();
        async move {
            let name = format!("idem:{}", key.as_str());
            let _: () = raw(&url).await.set(name, crate::nonsense()).await.expect("sets");
        }
    };
    Subject::new(cached).peer(peer).unreachable(unreachable).spoil(spoil)
}

/// `store` inside of all wrappers, which treat results of any size. Processes share the folder of offloaded results.
pub fn in_folder(store: RedisStore, folder: &str) -> Cached {
    let objects = Arc::new(LocalFileSystem::new_with_prefix(folder).expect("the folder exists"));
    Cached::new(Compressed::options().above(0).wrap(Offloaded::options().above(0).wrap(store, objects)))
}
