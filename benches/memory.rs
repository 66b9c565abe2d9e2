//! Measures the whole library on a `MemoryStore`, compared with a hand-written map.
//!
//! The hand-written side is a `DashMap` that maps the same formatted key to the state of the operation, its owner and
//! its expiry. A first run inserts "pending" unless there is a valid entry, runs the handler, and replaces the entry by
//! the result as JSON if the entry still has the same owner. A duplicate gets the entry, checks its expiry, and decodes
//! it. The map renews no lease, and has no bound.

#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dashmap::{DashMap, Entry};
use idem_benches::{Goal, Receipt, Table, alternate, is_wanted, nanos_each, sized, timed_on_cpu};
use idem_runtime::{Error, MemoryStore, idempotent};

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
async fn ship(store: &MemoryStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(black_box(Receipt::of(order_id)))
}

const LEASE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(7 * 86_400);

type Map = DashMap<String, Record>;

struct Record {
    owner: u64,
    expires_at: Instant,
    /// The result as JSON; `None` while the handler runs.
    result: Option<Vec<u8>>,
}

fn key(order_id: u64) -> String {
    format!("1/memory::ship/order:{order_id}")
}

fn ship_by_hand(map: &Map, order_id: u64) -> Option<Receipt> {
    static OWNERS: AtomicU64 = AtomicU64::new(0);
    let (key, now) = (key(order_id), Instant::now());
    let owner = OWNERS.fetch_add(1, Ordering::Relaxed);
    let pending = Record { owner, expires_at: now + LEASE, result: None };
    match map.entry(key.clone()) {
        Entry::Occupied(entry) if entry.get().expires_at > now => return None,
        Entry::Occupied(mut entry) => drop(entry.insert(pending)),
        Entry::Vacant(entry) => drop(entry.insert(pending)),
    }
    let receipt = black_box(Receipt::of(order_id));
    let bytes = serde_json::to_vec(&receipt).ok()?;
    let mut record = map.get_mut(&key).filter(|record| record.owner == owner)?;
    (record.expires_at, record.result) = (Instant::now() + TTL, Some(bytes));
    Some(receipt)
}

fn replay_by_hand(map: &Map, order_id: u64) -> Option<Receipt> {
    let record = map.get(&key(order_id)).filter(|record| record.expires_at > Instant::now())?;
    serde_json::from_slice(record.result.as_deref()?).ok()
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
                black_box(ship_by_hand(map, order_id).expect("ships"));
            }
        });
        nanos_each(took, count)
    };
    let times = |ours, raw| ours / raw;

    if is_wanted("first run") {
        let [raw, idem] = alternate(rounds, [&mut || first_by_hand(&Map::new()), &mut || ours(&MemoryStore::new())]);
        table.line("first run", &raw, &idem, times, Goal::AtMost(1.5));
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
