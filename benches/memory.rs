//! The whole library on a `MemoryStore`, compared with a hand-written map.
//!
//! By hand: a `DashMap` from the same formatted key to the state. A first run inserts "pending", runs the handler and
//! inserts its result as JSON; a duplicate gets the entry and decodes it. It has no lease, no owner, no retention and no
//! bound.

use std::hint::black_box;

use dashmap::{DashMap, Entry};
use idem_benches::{Goal, Receipt, Table, alternate, is_wanted, nanos_each, sized, timed_on_cpu};
use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
async fn ship(store: &MemoryStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(black_box(Receipt::of(order_id)))
}

type Map = DashMap<String, State>;

enum State {
    Pending,
    Completed(Vec<u8>),
}

fn key(order_id: u64) -> String {
    format!("1/memory::ship/order:{order_id}")
}

fn ship_by_hand(map: &Map, order_id: u64) -> Option<Receipt> {
    let key = key(order_id);
    match map.entry(key.clone()) {
        Entry::Occupied(_) => return None,
        Entry::Vacant(entry) => drop(entry.insert(State::Pending)),
    }
    let receipt = black_box(Receipt::of(order_id));
    let bytes = serde_json::to_vec(&receipt).ok()?;
    *map.get_mut(&key)? = State::Completed(bytes);
    Some(receipt)
}

fn replay_by_hand(map: &Map, order_id: u64) -> Option<Receipt> {
    match &*map.get(&key(order_id))? {
        State::Completed(bytes) => serde_json::from_slice(bytes).ok(),
        State::Pending => None,
    }
}

fn main() {
    let orders: u64 = sized(10_000, 200);
    let count = usize::try_from(orders).expect("a small number");
    let rounds = sized(151, 2);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    let table = Table::new("Memory, one thread", "ns", "times its time");
    let ours = |store: &MemoryStore| {
        let took = timed_on_cpu(|| {
            runtime.block_on(async {
                for order_id in 0..orders {
                    black_box(ship(store, order_id).await.expect("ships"));
                }
            });
        });
        nanos_each(took, count)
    };
    let first_by_hand = |map: &Map| {
        let took = timed_on_cpu(|| {
            for order_id in 0..orders {
                black_box(ship_by_hand(map, order_id).expect("ships"));
            }
        });
        nanos_each(took, count)
    };
    let times = |ours, raw| ours / raw;

    if is_wanted("first run") {
        let [raw, idem] = alternate(rounds, [&mut || first_by_hand(&Map::new()), &mut || ours(&MemoryStore::new())]);
        table.line("first run", &raw, &idem, times, Goal::AtMost(2.0));
    }
    if is_wanted("replay") {
        let (map, store) = (Map::new(), MemoryStore::new());
        first_by_hand(&map);
        ours(&store);
        let by_hand = || {
            let took = timed_on_cpu(|| {
                for order_id in 0..orders {
                    black_box(replay_by_hand(&map, order_id).expect("is there"));
                }
            });
            nanos_each(took, count)
        };
        let [raw, idem] = alternate(rounds, [&mut { by_hand }, &mut || ours(&store)]);
        table.line("replay", &raw, &idem, times, Goal::AtMost(1.5));
    }
}
