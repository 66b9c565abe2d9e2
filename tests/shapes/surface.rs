//! Properties of public types on which programs rely: the traits that they implement, and their sizes.

use std::fmt::Debug;
use std::sync::Arc;

use idem_runtime::store::StoreFuture;
use idem_runtime::{
    Attempt, Cached, Compressed, Disposition, DynamoStore, Error, Key, MemoryStore, Offloaded, Outcome, Policy,
    PostgresStore, RedisStore, SqliteStore, Store,
};

fn store<S: Store + Clone + Debug + Send + Sync + Into<Arc<dyn Store>> + 'static>() {}

fn value<T: Debug + Send + Sync + 'static>() {}

fn answers<T: Send + Unpin>() {}

#[test]
fn stores_are_cloned_shared_and_kept_behind_a_pointer() {
    store::<MemoryStore>();
    store::<SqliteStore>();
    store::<RedisStore>();
    store::<PostgresStore>();
    store::<DynamoStore>();
    store::<Cached>();
    store::<Compressed>();
    store::<Offloaded>();
}

#[test]
fn public_values_may_move_between_threads() {
    value::<Attempt>();
    value::<Disposition>();
    value::<Error>();
    value::<Key>();
    value::<Outcome>();
    value::<Policy>();
    answers::<StoreFuture<'static, ()>>();
    // Users' lints report error types of 128 bytes or more.
    assert!(size_of::<Error>() < 128, "{} bytes", size_of::<Error>());
}
