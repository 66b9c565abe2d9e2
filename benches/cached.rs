//! Measures a replay through `Cached`, compared with a hand-written map.
//!
//! The hand-written side is a `DashMap` that maps the same formatted key to the result as JSON and its expiry; a replay
//! looks up the key and decodes the result. The map compares no fingerprint and has no bound. The store behind the
//! cache counts its calls; a replay must not call this store.

#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use idem_benches::{Goal, Receipt, Table, alternate, nanos_each, sized, timed_on_cpu};
use idem_runtime::{Cached, Error, MemoryStore, idempotent};
use idem_tests::{Fault, FaultyStore, StoreCall};

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
async fn ship(store: &Cached, order_id: u64) -> Result<Receipt, Error> {
    Ok(black_box(Receipt::of(order_id)))
}

fn main() {
    let orders: u64 = sized(10_000, 200);
    let count = usize::try_from(orders).expect("a small number");
    let rounds = sized(151, 2);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");

    let map: DashMap<String, (Instant, Vec<u8>)> = DashMap::new();
    let key = |order_id: u64| format!("1/cached::ship/order:{order_id}");
    let expires_at = Instant::now() + Duration::from_secs(7 * 86_400);
    for order_id in 0..orders {
        map.insert(key(order_id), (expires_at, serde_json::to_vec(&Receipt::of(order_id)).expect("encodes")));
    }
    // Both sides measure processor time, which other processes on the machine do not change.
    let by_hand = || {
        let took = timed_on_cpu(|| {
            for order_id in 0..orders {
                let found = map.get(&key(order_id)).filter(|found| found.0 > Instant::now()).expect("is there");
                black_box(serde_json::from_slice::<Receipt>(&found.1).expect("decodes"));
            }
        });
        nanos_each(took, count)
    };

    let counted = FaultyStore::new(&MemoryStore::new());
    let cached = Cached::new(counted.clone());
    let ours = || {
        let took = timed_on_cpu(|| {
            runtime.block_on(async {
                for order_id in 0..orders {
                    black_box(ship(&cached, order_id).await.expect("ships"));
                }
            });
        });
        nanos_each(took, count)
    };
    // This round runs the handler of each order, so the measured rounds only replay.
    ours();
    let calls = || {
        [StoreCall::Reserve, StoreCall::Renew, StoreCall::Finish, StoreCall::Release, StoreCall::Wait]
            .map(|call| counted.count(call))
    };
    let before = calls();
    let [raw, idem] = alternate(rounds, [&mut { by_hand }, &mut { ours }]);
    assert_eq!(calls(), before, "a replay that hits makes no call of the store");

    let table = Table::new("Cached, one thread", "ns", "times its time");
    table.line("cached replay", &raw, &idem, |ours, raw| ours / raw, Goal::AtMost(1.7));
    hot_key(&runtime);
}

/// Lets duplicates of one key arrive together, each in its own task, while the cache is empty.
fn hot_key(runtime: &tokio::runtime::Runtime) {
    let duplicates = sized(10_000, 200);
    println!("\n| hot key, {duplicates} duplicates at once | store calls | microseconds in all |");
    println!("|---|---|---|");
    for (name, finished) in [("finished by another process", true), ("new: one runs, and the others replay it", false)]
    {
        let memory = MemoryStore::new();
        let counted = FaultyStore::new(&memory);
        let cached = Cached::new(counted.clone());
        if finished {
            runtime.block_on(ship(&Cached::new(memory), 0)).expect("ships");
        }
        counted.next(StoreCall::Reserve, Fault::Slow(3));
        let took = timed_on_cpu(|| {
            runtime.block_on(async {
                let call = |_| {
                    let cached = cached.clone();
                    tokio::spawn(async move { ship(&cached, 0).await.is_ok() })
                };
                let calls: Vec<_> = (0..duplicates).map(call).collect();
                for call in calls {
                    black_box(call.await.expect("ends"));
                }
            });
        });
        let calls = [StoreCall::Reserve, StoreCall::Inspect, StoreCall::Finish]
            .map(|call| counted.count(call))
            .iter()
            .sum::<usize>();
        println!("| {name} | {calls} | {} |", took.as_micros());
    }
}
