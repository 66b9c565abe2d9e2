//! The protocol on a map in memory.

#![allow(unreachable_pub, missing_docs, reason = "the module is public in one of its two packages")]
#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::hash::{BuildHasherDefault, DefaultHasher};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dashmap::{DashMap, Entry};

use crate::receipt::Receipt;

const LEASE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(7 * 86_400);

/// Records by key. The map renews no lease, and has no bound. Its hashes are the same in each run, so that instructions
/// can be counted.
pub type Map = DashMap<String, Record, BuildHasherDefault<DefaultHasher>>;

/// State of an operation.
#[derive(Debug)]
pub struct Record {
    owner: u64,
    expires_at: Instant,
    /// The result as JSON; `None` while the handler runs.
    result: Option<Vec<u8>>,
}

fn key(order_id: u64) -> String {
    format!("1/memory::ship/order:{order_id}")
}

/// Makes a first run: inserts "pending" unless there is a valid record, runs the handler, and records the result if the
/// record still has the same owner.
pub fn ship(map: &Map, order_id: u64) -> Option<Receipt> {
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

/// Makes a replay: finds the record, checks its expiry, and decodes its result.
pub fn replay(map: &Map, order_id: u64) -> Option<Receipt> {
    let record = map.get(&key(order_id)).filter(|record| record.expires_at > Instant::now())?;
    serde_json::from_slice(record.result.as_deref()?).ok()
}
