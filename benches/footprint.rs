//! Counts the bytes per record of a `MemoryStore`, and the allocations per call.
//!
//! No time is measured. In the tables, *asked for* is the memory requested from the allocator, which is equal on every
//! machine; *resident* is the growth of the process, with the allocator's overhead, measured for the first line of a
//! run only. Records are counted while the store fills: the worst moment is just after its tables have grown.

#![allow(clippy::cast_precision_loss)] // Counts are far below 2^52.

use std::cell::Cell;
use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use allocation_counter::measure;
use idem_benches::{Receipt, is_wanted, sized};
use idem_runtime::codec::CodecName;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Lease, Reservation, ReserveRequest, Verdict};
use idem_runtime::{Error, Json, Key, MemoryStore, Store, idempotent};

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
async fn ship(store: &MemoryStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(black_box(Receipt::of(order_id)))
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
async fn hang(store: &MemoryStore, order_id: u64) -> Result<Receipt, Error> {
    std::future::pending::<()>().await;
    Ok(Receipt::of(order_id))
}

fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the memory store answers at once"),
    }
}

fn key(id: usize) -> Key {
    Key::new("footprint", format!("order:{id:09}")).expect("a valid key")
}

fn reserve(store: &MemoryStore, id: usize) -> Lease {
    let request = ReserveRequest::new(
        key(id),
        store.context().new_owner(),
        Duration::from_secs(30),
        Duration::from_secs(7 * 86_400),
    );
    match now(store.reserve(&request)).expect("reserves") {
        Reservation::Granted { lease, .. } => lease,
        other => panic!("{other:?}"),
    }
}

fn finish(store: &MemoryStore, lease: &Lease, payload: usize) {
    let finish =
        Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: vec![b'x'; payload].into() });
    assert_eq!(now(store.finish(lease, &finish)).expect("finishes"), Verdict::Applied);
}

thread_local! {
    /// True until the first line. Only the first line shows resident memory: a later store reuses memory that an
    /// earlier store has freed, so the process does not grow.
    static FIRST: Cell<bool> = const { Cell::new(true) };
}

/// Returns the resident memory of this process.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

fn records(name: &str, payload: Option<usize>, goal: f64) {
    if !is_wanted(name) {
        return;
    }
    let most = sized(1_000_000, 20_000);
    let own = key(0).as_str().len() + payload.unwrap_or(0);
    let store = MemoryStore::options().max_records(usize::MAX).build();
    let before = resident();
    let (mut held, mut worst, mut sum, mut counted) = (0, 0.0_f64, 0.0, 0.0);
    for id in 0..most {
        held += measure(|| {
            let lease = reserve(&store, id);
            if let Some(payload) = payload {
                finish(&store, &lease, payload);
            }
        })
        .bytes_current;
        if id >= 10_000 {
            let each = held as f64 / (id + 1) as f64 - own as f64;
            worst = worst.max(each);
            sum += each;
            counted += 1.0;
        }
    }
    let resident = match (before, resident()) {
        (Some(before), Some(after)) if FIRST.take() => {
            format!("{:.0}", after.saturating_sub(before) as f64 / most as f64 - own as f64)
        }
        _ => "run it alone".to_owned(),
    };
    let met = if worst <= goal { "met" } else { "MISSED" };
    let mean: f64 = sum / counted;
    println!("| {name} | {own} | {mean:.0} | **{worst:.0}** | {resident} | ≤ {goal} | {met} |");
    drop(store);
}

/// Counts the allocations of one call after ten other calls, and the allocations that outlive the call.
fn calls(name: &str, mut call: impl FnMut(u64)) {
    for id in 0..10 {
        call(id);
    }
    let counted = measure(|| call(10));
    println!("| {name} | {} | {} | {} |", counted.count_total, counted.bytes_total, counted.count_current);
}

fn main() {
    if ["pending", "finished, 150 bytes", "finished, 1 KB"].into_iter().any(is_wanted) {
        println!("\n### Memory of a record in `MemoryStore`, 10 000 to 1 000 000 records\n");
        println!("| record | key and result, bytes | beyond that: mean | worst | resident at the end | goal | |");
        println!("|---|---|---|---|---|---|---|");
        records("pending", None, 200.0);
        records("finished, 150 bytes", Some(150), 150.0);
        records("finished, 1 KB", Some(1000), 150.0);
    }
    if is_wanted("allocations of a call") {
        println!("\n### Allocations of a call on `MemoryStore`\n");
        println!("| call | allocations | bytes | of them kept |");
        println!("|---|---|---|---|");
        let store = MemoryStore::new();
        // The shards are filled first, so that their tables need not grow during the measurement.
        (1_000..11_000).for_each(|id| drop(now(ship(&store, id))));
        calls("the handler alone: its result has 3 texts", |id| drop(black_box(Receipt::of(id))));
        calls("first run", |id| drop(now(ship(&store, id)).expect("ships")));
        calls("replay", |id| drop(now(ship(&store, id)).expect("replays")));
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
        let _entered = runtime.enter();
        let store = MemoryStore::new();
        let mut running: Vec<_> = (0..=10).map(|id| Box::pin(hang(&store, id))).collect();
        for call in &mut running {
            assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        calls("in progress", |id| drop(now(hang(&store, id)).expect_err("is running")));
    }
}
