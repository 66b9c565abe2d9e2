//! What keeping a lease alive costs a handler that ends long before its first beat.
//!
//! - *Ready at once*: such a handler has no heartbeat, only a test whether it was pending. There is no library without
//!   that test to compare with, so the raw side is the protocol by hand over the same store: an owner, reserve, run,
//!   encode, finish, with the same key and without the engine. What is left is all that the engine does for a first run:
//!   an upper bound of the heartbeat's share.
//! - *Pends once*: the handler yields once, so its lease is registered, asked for and deregistered. The raw side yields
//!   once just before the same call: the same work for the executor and for the library, but no heartbeat.
//! - *Task per call*: the raw side is the "pends once" above; what a renewal task of its own would add to every call.

use std::hint::black_box;
use std::time::Duration;

use idem_benches::{Goal, Samples, Table, alternate, is_wanted, nanos_each, sized, timed_on_cpu};
use idem_runtime::{
    Codec, CodecName, Error, Finish, Json, Key, MemoryStore, OnCrash, Operation, Payload, Policy, Reservation, Reserve,
    Store, Write, record_values, run,
};
use tokio::task::yield_now;

const POLICY: Policy = Policy::new(TTL);
const TTL: Duration = Duration::from_secs(7 * 86_400);

fn key(id: u64) -> Key {
    Key::new("bench", id).expect("a valid key")
}

async fn protocol_by_hand(store: &dyn Store, id: u64) -> u64 {
    let store = store.handle();
    let request = Reserve {
        key: key(id),
        owner: store.heartbeats().new_owner(),
        lease: Policy::DEFAULT_LEASE,
        ttl: TTL,
        fingerprint: None,
        on_crash: OnCrash::Retry,
        max_attempts: None,
    };
    let Ok(Reservation::Reserved { lease, .. }) = store.reserve(&request).await else { panic!("not reserved") };
    let value = black_box(id);
    let bytes = Json::encode(&value).expect("a number can be encoded").into();
    let finish = Finish::Completed(Payload::Stored { codec: CodecName::of::<Json>(), bytes });
    assert_eq!(store.finish(&lease, &finish).await.expect("finishes"), Write::Done);
    value
}

async fn ready(store: &MemoryStore, id: u64) -> u64 {
    let operation = Operation::new(store, Ok(key(id)), POLICY);
    let body = async { Ok::<_, Error>(black_box(id)) };
    run(operation, record_values::<Json>(), body).await.expect("runs")
}

async fn pends_once(store: &MemoryStore, id: u64) -> u64 {
    let operation = Operation::new(store, Ok(key(id)), POLICY);
    let body = async {
        yield_now().await;
        Ok::<_, Error>(black_box(id))
    };
    run(operation, record_values::<Json>(), body).await.expect("runs")
}

async fn yields_before(store: &MemoryStore, id: u64) -> u64 {
    yield_now().await;
    ready(store, id).await
}

async fn task_per_call(store: &MemoryStore, id: u64) -> u64 {
    let beat = tokio::spawn(std::future::pending::<()>());
    let value = yields_before(store, id).await;
    beat.abort();
    value
}

fn main() {
    let count: u64 = sized(5_000, 100);
    let rounds = sized(201, 2);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    // A store of its own for each round, so that every side has as many records.
    let measure = |side: &dyn AsyncFn(&MemoryStore, u64)| {};
    let _ = measure;
    let table = Table::new("Heartbeat, memory store, one thread", "ns", "ns more");
    let _ = (table, count, rounds, runtime, is_wanted("x"));
}
