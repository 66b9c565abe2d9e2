//! Measures the whole library on a `MemoryStore`, compared with a hand-written map.

#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::hint::black_box;

use idem_benches::by_hand::memory::{self, Map};
use idem_benches::{Goal, Receipt, Table, alternate, is_wanted, nanos_each, sized, timed_on_cpu};
use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
async fn ship(store: &MemoryStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(black_box(Receipt::of(order_id)))
}

fn main() {
    let orders: u64 = sized(10_000, 200);
    let count = usize::try_from(orders).expect("a small number");
    let rounds = sized(151, 2);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    let table = Table::new("Memory, one thread", "ns", "times its time");
    // The bench measures processor time, which other processes on the machine do not change.
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
                black_box(memory::ship(map, order_id).expect("ships"));
            }
        });
        nanos_each(took, count)
    };
    let times = |ours, raw| ours / raw;

    if is_wanted("first run") {
        let [raw, idem] =
            alternate(rounds, [&mut || first_by_hand(&Map::default()), &mut || ours(&MemoryStore::new())]);
        table.line("first run", &raw, &idem, times, Goal::AtMost(2.5));
    }
    if is_wanted("replay") {
        let (map, store) = (Map::default(), MemoryStore::new());
        first_by_hand(&map);
        ours(&store);
        let by_hand = || {
            let took = timed_on_cpu(|| {
                for order_id in 0..orders {
                    black_box(memory::replay(&map, order_id).expect("is there"));
                }
            });
            nanos_each(took, count)
        };
        let [raw, idem] = alternate(rounds, [&mut { by_hand }, &mut || ours(&store)]);
        table.line("replay", &raw, &idem, times, Goal::AtMost(1.7));
    }
    if is_wanted("replay, somebody takes its span") {
        let store = MemoryStore::new();
        ours(&store);
        // Formats the fields of spans as text, as an exporting layer does.
        let subscriber = || tracing_subscriber::fmt().with_writer(std::io::sink).finish();
        let mut taken = || tracing::subscriber::with_default(subscriber(), || ours(&store));
        let [raw, idem] = alternate(rounds, [&mut || ours(&store), &mut taken]);
        table.line("replay, somebody takes its span (left: nobody)", &raw, &idem, times, Goal::None);
    }
}
