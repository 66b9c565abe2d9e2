//! Values of the `store` option: a store, a pointer to a store, or an application that holds a store.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::{Arc, LazyLock, OnceLock};

use idem_runtime::{Error, MemoryStore, Store, idempotent};

use crate::{App, spawned, twice, twice_here};

static LAZY: LazyLock<MemoryStore> = LazyLock::new(MemoryStore::new);
static SHARED: LazyLock<Arc<dyn Store>> = LazyLock::new(|| Arc::new(MemoryStore::new()));
static ONCE: OnceLock<MemoryStore> = OnceLock::new();

#[derive(Clone)]
struct Wrapper(MemoryStore);

impl Deref for Wrapper {
    type Target = MemoryStore;

    fn deref(&self) -> &MemoryStore {
        &self.0
    }
}

fn open() -> MemoryStore {
    ONCE.get_or_init(MemoryStore::new).clone()
}

fn consume<T>(_: T) {}

/// Defines handlers that differ only in the store.
macro_rules! stores {
    ($($name:ident($($arg:ident: $ty:ty)?): $store:expr;)*) => {$(
        #[idempotent(key = "{id}", ttl = "1h", store = $store)]
        async fn $name(app: &App, id: u32, $($arg: $ty)?) -> Result<u32, Error> {
            // The body may consume the value from which the store was borrowed.
            $(consume($arg);)?
            tokio::task::yield_now().await;
            Ok(app.run() + id)
        }
    )*};
}

stores! {
    value(store: MemoryStore): store;
    reference(store: &MemoryStore): store;
    references(store: &&MemoryStore): store;
    borrowed(store: MemoryStore): &store;
    arc(store: Arc<MemoryStore>): store;
    object(store: Arc<dyn Store>): store;
    boxed(store: Box<dyn Store>): store;
    plain_object(store: &dyn Store): store;
    wrapper(store: Wrapper): store;
    nested(store: Arc<Arc<dyn Store>>): store;
    option(store: Option<MemoryStore>): store.as_ref().expect("the argument has a store");
    lazy(): LAZY;
    shared(): SHARED;
    function(): open();
    path(): crate::shapes::stores::ONCE.get_or_init(MemoryStore::new);
    block(): { let mut store = open(); store = store.clone(); store };
    cell(store: &RefCell<MemoryStore>): store.borrow();
}

#[test]
fn every_kind_of_store_value_is_accepted() {
    spawned(async {
        let app = &App::default();
        let store = MemoryStore::new();
        assert_eq!(twice(value(app, 7, store.clone()), value(app, 7, store.clone())).await, 8);
        assert_eq!(twice(reference(app, 7, &store), reference(app, 7, &store)).await, 9);
        assert_eq!(twice(references(app, 7, &&store), references(app, 7, &&store)).await, 10);
        assert_eq!(twice(borrowed(app, 7, store.clone()), borrowed(app, 7, store.clone())).await, 11);
        let shared_store = Arc::new(store.clone());
        assert_eq!(twice(arc(app, 7, shared_store.clone()), arc(app, 7, shared_store.clone())).await, 12);
        assert_eq!(twice(object(app, 7, shared_store.clone()), object(app, 7, shared_store)).await, 13);
        let call = || boxed(app, 7, Box::new(store.clone()));
        assert_eq!(twice(call(), call()).await, 14);
        assert_eq!(twice(plain_object(app, 7, &store), plain_object(app, 7, &store)).await, 15);
        let call = || wrapper(app, 7, Wrapper(store.clone()));
        assert_eq!(twice(call(), call()).await, 16);
        let call = || nested(app, 7, Arc::new(Arc::new(store.clone())));
        assert_eq!(twice(call(), call()).await, 17);
        let call = || option(app, 7, Some(store.clone()));
        assert_eq!(twice(call(), call()).await, 18);
        assert_eq!(twice(lazy(app, 7), lazy(app, 7)).await, 19);
        assert_eq!(twice(shared(app, 7), shared(app, 7)).await, 20);
        assert_eq!(twice(function(app, 7), function(app, 7)).await, 21);
        assert_eq!(twice(path(app, 7), path(app, 7)).await, 22);
        assert_eq!(twice(block(app, 7), block(app, 7)).await, 23);
    });
}

#[tokio::test]
async fn a_store_that_is_not_sync_is_accepted() {
    let app = &App::default();
    let store = RefCell::new(MemoryStore::new());
    assert_eq!(twice_here(cell(app, 7, &store), cell(app, 7, &store)).await, 8);
}
