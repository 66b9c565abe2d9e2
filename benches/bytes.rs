//! Measures results and payloads that are bytes: their recorded form, the cost of a call, the cost of a fingerprint.
//!
//! The hand-written side is a `DashMap` that maps the same formatted key to a copy of the bytes; a replay copies these
//! bytes again. The lines *as JSON* measure bytes that are a field of a struct, which JSON writes as an array of
//! numbers. A fingerprint of bytes is compared with the fingerprint of a text of the same length.

use std::hint::black_box;

use bytes::Bytes;
use dashmap::DashMap;
use idem_benches::{Goal, Samples, Table, alternate_all, nanos_each, sized, timed_on_cpu};
use idem_runtime::key::{Fingerprint, PayloadDigest};
use idem_runtime::record::StoredResult;
use idem_runtime::{Error, MemoryStore, StoreExt, idempotent};
use serde::{Deserialize, Serialize};

#[idempotent(key = "label:{id}", ttl = "7d", store = store, max_result_bytes = usize::MAX)]
async fn vec_of_u8(store: &MemoryStore, id: u64, label: &[u8]) -> Result<Vec<u8>, Error> {
    Ok(black_box(label.to_vec()))
}

#[idempotent(key = "label:{id}", ttl = "7d", store = store, max_result_bytes = usize::MAX)]
async fn bytes(store: &MemoryStore, id: u64, label: &Bytes) -> Result<Bytes, Error> {
    Ok(black_box(label.clone()))
}

#[derive(Serialize, Deserialize)]
struct Label {
    pdf: Vec<u8>,
}

#[idempotent(key = "label:{id}", ttl = "7d", store = store, max_result_bytes = usize::MAX)]
async fn as_json(store: &MemoryStore, id: u64, label: &[u8]) -> Result<Label, Error> {
    Ok(black_box(Label { pdf: label.to_vec() }))
}

/// Kinds of result, each with the name of its handler.
const KINDS: [(&str, &str); 3] = [("Vec<u8>", "vec_of_u8"), ("Bytes", "bytes"), ("as JSON", "as_json")];

/// Returns `len` bytes that can't be compressed, like those of a compressed file.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    (0..len).map(next).collect()
}

/// Runs `work` for each of `count` labels. Returns nanoseconds per label.
fn each(count: u64, mut work: impl FnMut(u64)) -> f64 {
    let took = timed_on_cpu(|| (0..count).for_each(&mut work));
    nanos_each(took, usize::try_from(count).expect("a small number"))
}

async fn call(kind: usize, store: &MemoryStore, id: u64, label: &Bytes) {
    match kind {
        0 => drop(black_box(vec_of_u8(store, id, label).await.expect("makes a label"))),
        1 => drop(black_box(bytes(store, id, label).await.expect("makes a label"))),
        _ => drop(black_box(as_json(store, id, label).await.expect("makes a label"))),
    }
}

/// Returns the codec of the recorded result, and its length in bytes.
async fn recorded(store: &MemoryStore, handler: &str) -> (String, usize) {
    let operator = store.operator();
    let key = operator.key(&format!("bytes::{handler}/label:0")).expect("a key");
    let found = operator.inspect(&key).await.expect("answers").expect("a record");
    match found.record.state.result() {
        Some(StoredResult::Encoded { codec, bytes }) => (codec.as_str().to_owned(), bytes.len()),
        other => panic!("{other:?}"),
    }
}

fn calls(name: &str, len: usize, count: u64, rounds: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    let (label, key) = (Bytes::from(noise(len)), |id: u64| format!("1/bytes::label/label:{id}"));
    let first = |kind: usize, store: &MemoryStore| each(count, |id| runtime.block_on(call(kind, store, id, &label)));
    // The map that the hand-written replays read: filled before the measurement.
    let filled: DashMap<String, Vec<u8>> = DashMap::new();
    (0..count).for_each(|id| drop(filled.insert(key(id), label.to_vec())));
    let stores: Vec<_> = (0..KINDS.len())
        .map(|kind| {
            let store = MemoryStore::new();
            first(kind, &store);
            store
        })
        .collect();

    // Prints the recorded form of each kind of result.
    println!("\n| {name}, result | codec in the record | bytes in the record |");
    println!("|---|---|---|");
    for ((kind, handler), store) in KINDS.iter().zip(&stores) {
        let (codec, bytes) = runtime.block_on(recorded(store, handler));
        println!("| {kind} | `{codec}` | {bytes} |");
    }

    // First runs are measured with a new map and new stores in each round.
    let mut by_hand = || {
        let map: DashMap<String, Vec<u8>> = DashMap::new();
        each(count, |id| {
            let made = black_box(label.to_vec());
            map.insert(key(id), made.clone());
        })
    };
    let mut runs: Vec<_> = (0..KINDS.len()).map(|kind| move || first(kind, &MemoryStore::new())).collect();
    let mut sides: Vec<&mut dyn FnMut() -> f64> = vec![&mut by_hand];
    sides.extend(runs.iter_mut().map(|side| side as &mut dyn FnMut() -> f64));
    table(name, "first run", &alternate_all(rounds, &mut sides));

    // Replays are measured with the filled map and the filled stores.
    let mut by_hand = || each(count, |id| drop(black_box(filled.get(&key(id)).expect("is there").to_vec())));
    let mut runs: Vec<_> = (0..KINDS.len())
        .map(|kind| {
            let store = &stores[kind];
            move || first(kind, store)
        })
        .collect();
    let mut sides: Vec<&mut dyn FnMut() -> f64> = vec![&mut by_hand];
    sides.extend(runs.iter_mut().map(|side| side as &mut dyn FnMut() -> f64));
    table(name, "replay", &alternate_all(rounds, &mut sides));
}

fn table(name: &str, work: &str, samples: &[Samples]) {
    let table = Table::new(&format!("Bytes: {work} of {name}, one thread"), "ns", "times a copy");
    for ((kind, _), idem) in KINDS.iter().zip(&samples[1..]) {
        table.line(&format!("{work}, {name}, {kind}"), &samples[0], idem, |ours, raw| ours / raw, Goal::None);
    }
}

fn fingerprints(name: &str, len: usize, count: u64, rounds: usize) {
    fn of<T: Serialize + ?Sized>(payload: &T) {
        black_box(Fingerprint::of(black_box(payload)).expect("serializes"));
    }
    let (vec, text) = (noise(len), "x".repeat(len));
    let (shared, digest) = (Bytes::from(vec.clone()), PayloadDigest::new([7; 32]));
    let numbers: Vec<u32> = vec.iter().map(|byte| u32::from(*byte)).collect();
    let mut sides: [&mut dyn FnMut() -> f64; 6] = [
        &mut || each(count, |_| of(&*text)),
        &mut || each(count, |_| of(&*vec)),
        &mut || each(count, |_| of(&vec)),
        &mut || each(count, |_| of(&shared)),
        &mut || each(count, |_| of(&numbers)),
        &mut || each(count, |_| of(&digest)),
    ];
    let samples = alternate_all(rounds, &mut sides);
    let table = Table::new(&format!("Bytes: fingerprint of {name}, one thread"), "ns", "times that of a text");
    let goals = [Goal::AtMost(1.2), Goal::AtMost(1.2), Goal::AtMost(1.2), Goal::None, Goal::None];
    let kinds = ["&[u8]", "Vec<u8>", "Bytes", "the same numbers as Vec<u32>", "PayloadDigest"];
    for ((kind, goal), idem) in kinds.iter().zip(goals).zip(&samples[1..]) {
        table.line(&format!("fingerprint, {name}, {kind}"), &samples[0], idem, |ours, raw| ours / raw, goal);
    }
}

fn main() {
    let rounds = sized(51, 2);
    for (name, len, count) in [("1 KB", 1 << 10, sized(2000, 20)), ("64 KB", 1 << 16, sized(100, 2))] {
        calls(name, len, count, rounds);
        fingerprints(name, len, count, rounds);
    }
}
