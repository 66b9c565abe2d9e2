//! Number of allocations of a call, and memory that a store needs for a record. The tests count allocations and measure
//! no time, so the results are the same on every machine.
//!
//! The tests count the bytes that the code requests, without the allocator's overhead, which `benches/footprint.rs`
//! measures. The tests count only the allocations of their own threads.

use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use allocation_counter::{AllocationInfo, measure};
use idem_runtime::clock::ManualClock;
use idem_runtime::codec::{CodecName, check_round_trip};
use idem_runtime::key::Fingerprint;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Reservation, ReserveRequest, Verdict};
use idem_runtime::{Codec, Error, Json, Key, MemoryStore, RedisStore, Store, idempotent, observe};
use idem_tests::server::{Kind, RedisServer};
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

/// Result of a handler. Each of its texts needs an allocation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Receipt {
    order_id: u64,
    carrier: String,
    tracking: String,
    cents: u64,
}

const TEXTS: u64 = 2;

fn receipt(order_id: u64) -> Receipt {
    Receipt { order_id, carrier: "Hinterland Parcel".to_owned(), tracking: "HP-2031-0000".to_owned(), cents: 129_900 }
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
async fn ship(store: &MemoryStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(receipt(order_id))
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store)]
async fn hang(store: &MemoryStore, order_id: u64) -> Result<Receipt, Error> {
    std::future::pending::<()>().await;
    Ok(receipt(order_id))
}

/// Returns the number of allocations of the round-trip check. In these tests, a call that runs its body also decodes
/// the encoded result and compares it with the value.
fn of_the_check() -> u64 {
    let receipt = receipt(1);
    check_round_trip::<Json, _>(&receipt).unwrap();
    measure(|| check_round_trip::<Json, _>(&receipt).unwrap()).count_total
}

/// Polls a future that is ready immediately, and returns its output.
fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the store in memory answers at the first poll"),
    }
}

/// Counts the allocations of one call. Ten earlier calls make the allocations that a process or a thread makes only
/// once.
fn counted(mut call: impl FnMut(u64)) -> AllocationInfo {
    for id in 0..10 {
        call(id);
    }
    measure(|| call(10))
}

#[test]
fn a_replay_allocates_the_key_and_the_result_and_nothing_else() {
    let store = MemoryStore::new();
    for id in 0..=10 {
        now(ship(&store, id)).unwrap();
    }
    let expected: Vec<_> = (0..=10).map(receipt).collect();
    let replay = counted(|id| assert_eq!(now(ship(&store, id)).unwrap(), expected[usize::try_from(id).unwrap()]));
    assert_eq!(replay.count_total, 1 + TEXTS, "a replay allocates the key and the texts of the result: {replay:?}");
    assert_eq!(replay.count_current, 0, "{replay:?}");
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "allocations::ship_by_redis")]
async fn ship_by_redis(store: &RedisStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(receipt(order_id))
}

/// Returns the average numbers of allocations and of allocated bytes for one call, in `rounds` rounds of 64 concurrent
/// calls. Allocations of the store's connection and lanes are included.
fn of_64_at_once(runtime: &Runtime, rounds: u64, call: impl AsyncFn(u64)) -> [u64; 2] {
    let count = measure(|| {
        runtime.block_on(async {
            for round in 0..rounds {
                futures::future::join_all((0..64).map(|task| call(64 * round + task))).await;
            }
        });
    });
    [count.count_total, count.bytes_total].map(|all| all.div_ceil(64 * rounds))
}

#[test]
fn over_redis_a_result_is_encoded_once_and_decoded_in_place() {
    let server = RedisServer::start(Kind::Redis);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let store = runtime.block_on(RedisStore::connect(&server.url())).unwrap();
    let ships = async |order_id| assert_eq!(ship_by_redis(&store, order_id).await.unwrap(), receipt(order_id));
    let [first, first_bytes] = of_64_at_once(&runtime, 40, ships);
    // After these replays the store expects further replays, and reads a record before it reserves.
    of_64_at_once(&runtime, 20, ships);
    let [replay, replay_bytes] = of_64_at_once(&runtime, 40, ships);
    println!("first run: {first} ({first_bytes} bytes), replay: {replay} ({replay_bytes} bytes)");
    // A replay allocates the key, the store's future, the returned value, its provenance, and the texts of two copies
    // of the result; the task of `join_all`; and a share of the batch.
    assert!(replay < 4 + 2 * TEXTS + 1 + 2, "{replay}");
    // A first run allocates the key, two futures of the store, the encoded result, the texts of two copies of the
    // result, and two commands with their arguments; the task of `join_all`; and a share of two batches.
    assert!(first < 4 + 2 * TEXTS + 4 + 1 + 3 + of_the_check(), "{first}");
}

#[test]
fn a_delivery_that_is_ready_immediately_allocates_nothing_for_beats() {
    // A call whose record makes a table grow allocates more, so the test takes the minimum of 50 calls.
    let least = |call: &dyn Fn(u64)| (0..50).map(|id| measure(|| call(id)).count_total).min();
    let (store, acker) = (MemoryStore::new(), std::sync::Arc::new(7));
    let plain = least(&|id| drop(now(observe(ship(&store, id)))));
    let beating = least(&|id| {
        let acker = std::sync::Arc::clone(&acker);
        let call = observe(ship(&store, 1_000 + id)).on_beat(Duration::from_secs(10), move |_| {
            let acker = std::sync::Arc::clone(&acker);
            async move { if *acker > 0 { Ok(()) } else { Err("no broker") } }
        });
        let _ = now(call);
    });
    assert_eq!(beating, plain);
}

#[test]
fn a_duplicate_of_a_running_attempt_allocates_its_key_alone() {
    let store = MemoryStore::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _entered = runtime.enter();
    let mut running: Vec<_> = (0..=10).map(|id| Box::pin(hang(&store, id))).collect();
    for call in &mut running {
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    let refused = counted(|id| assert!(matches!(now(hang(&store, id)), Err(Error::InProgress { .. }))));
    assert_eq!(refused.count_total, 1, "the key: {refused:?}");
}

#[test]
fn a_first_run_allocates_its_key_its_result_and_its_record() {
    let store = MemoryStore::new();
    // The shards' chunks, tables and lists grow from time to time. With a filled store, most calls find spare capacity.
    for id in 1_000..11_000 {
        now(ship(&store, id)).unwrap();
    }
    let mut most = 0;
    let mut least = u64::MAX;
    for id in 0..100 {
        let first = measure(|| drop(black_box(now(ship(&store, id)))));
        most = most.max(first.count_total);
        least = least.min(first.count_total);
    }
    // A call allocates the key, the texts of the result, its encoding, the record, and the value that replays share.
    assert_eq!(least, 1 + TEXTS + 1 + 1 + 1 + of_the_check());
    // A shard that grows adds allocations for its chunk of slots, and sometimes for its table or its list.
    assert!(most <= least + 4, "{most}");
}

// ---- Memory for each record ----------------------------------------------------------------------------------------

const PAYLOAD: usize = 150;

fn key(id: usize) -> Key {
    Key::new("footprint", format_args!("order:{id:09}").to_string()).unwrap()
}

fn reserve(store: &MemoryStore, id: usize, fingerprint: Option<Fingerprint>) -> idem_runtime::store::Lease {
    let request = ReserveRequest::new(
        key(id),
        store.context().new_owner(),
        Duration::from_secs(30),
        Duration::from_secs(7 * 86_400),
    )
    .fingerprint(fingerprint);
    match now(store.reserve(&request)).unwrap() {
        Reservation::Granted { lease, .. } => lease,
        other => panic!("{other:?}"),
    }
}

fn finish(store: &MemoryStore, lease: &idem_runtime::store::Lease) {
    // The vector has spare capacity, like the vector into which an encoder has written.
    let mut bytes = Vec::with_capacity(4 * PAYLOAD);
    bytes.resize(PAYLOAD, b'x');
    let finish = Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: bytes.into() });
    assert_eq!(now(store.finish(lease, &finish)).unwrap(), Verdict::Applied);
}

/// Fills a store record by record, and measures the bytes for each record in addition to key and payload. Returns the
/// largest and the last of the measured numbers.
fn overhead(most: usize, finished: bool, fingerprint: Option<Fingerprint>) -> (f64, f64) {
    let key_bytes = key(0).as_str().len();
    let own = key_bytes + if finished { PAYLOAD } else { 0 };
    let mut held = 0;
    let store = MemoryStore::options().clock(ManualClock::new()).build();
    let (mut worst, mut last) = (0.0_f64, 0.0);
    for id in 0..most {
        held += measure(|| {
            let lease = reserve(&store, id, fingerprint);
            if finished {
                finish(&store, &lease);
            }
        })
        .bytes_current;
        let count = id + 1;
        // In a small store, the chunks of the shards take more memory than the records.
        if count >= 10_000 {
            #[allow(clippy::cast_precision_loss)]
            let each = held as f64 / count as f64 - own as f64;
            worst = worst.max(each);
            last = each;
        }
    }
    println!("finished {finished}, fingerprint {}: worst {worst:.1}, last {last:.1}", fingerprint.is_some());
    (worst, last)
}

#[test]
fn a_pending_record_takes_its_key_and_at_most_150_bytes() {
    let (worst, _) = overhead(100_000, false, None);
    assert!(worst <= 150.0, "{worst}");
    let (worst, _) = overhead(100_000, false, Some(Fingerprint::of(&1).unwrap()));
    assert!(worst <= 150.0 + 32.0, "{worst}");
}

#[test]
fn a_finished_record_takes_its_key_its_result_and_at_most_150_bytes() {
    let (worst, _) = overhead(100_000, true, None);
    assert!(worst <= 150.0, "{worst}");
    // A fingerprint takes 32 bytes more.
    let (worst, _) = overhead(100_000, true, Some(Fingerprint::of(&1).unwrap()));
    assert!(worst <= 150.0 + 32.0, "{worst}");
}

/// A store frees the memory of expired records, except for a small reserve for new records.
#[test]
fn the_memory_of_expired_records_is_freed() {
    let clock = ManualClock::new();
    let store = MemoryStore::options().clock(clock.clone()).build();
    let held = measure(|| {
        for id in 0..20_000 {
            finish(&store, &reserve(&store, id, None));
        }
        clock.advance(Duration::from_secs(30 * 86_400));
        for id in 20_000..60_000 {
            finish(&store, &reserve(&store, id, None));
        }
    });
    assert_eq!(store.len(), 40_000);
    let own = key(0).as_str().len() + PAYLOAD;
    let each = usize::try_from(held.bytes_current).unwrap() / store.len() - own;
    assert!(each <= 150, "{each}");
}

/// The number of allocations for an encoding depends on the codec. `Json` needs a single allocation.
#[test]
fn json_encodes_with_one_allocation_of_the_exact_size() {
    let value = receipt(1);
    let _ = Json::encode(&value).unwrap();
    let mut bytes = Vec::new();
    let encoded = measure(|| bytes = Json::encode(&value).unwrap());
    assert_eq!((encoded.count_total, encoded.bytes_total), (1, bytes.len() as u64));
}

/// Processes a request body of about 1 MB, which is compared as JSON. Returns the largest memory in use, in bytes.
#[cfg(feature = "http")]
fn memory_of_json(body: String) -> u64 {
    use idem_runtime::Policy;
    use idem_runtime::http::{Caller, IdempotencyLayer, Profile};

    assert!((900_000..1_100_000).contains(&body.len()), "{}", body.len());
    let policy = Policy::new(Duration::from_secs(24 * 3600));
    let layer = IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single())
        .profile(Profile::acp())
        .max_body_bytes(2_000_000);
    let request = http::Request::post("/pay").header("idempotency-key", "k").body(bytes::Bytes::from(body)).unwrap();
    let respond = || {
        let body = http_body_util::Empty::<bytes::Bytes>::new();
        now(layer.respond(request, async |_| Ok::<_, Error>(http::Response::new(body)))).unwrap()
    };
    let mut status = None;
    let used = measure(|| status = Some(respond().status()));
    assert_eq!(status.unwrap(), 200);
    used.bytes_max
}

#[test]
#[cfg(feature = "http")]
fn comparing_a_large_request_body_as_json_takes_a_few_times_its_size() {
    let nested = |inner: &str| [&*"[".repeat(399), inner, &*"]".repeat(399)].concat();
    let list = |element: &str| format!("[{}{element}]", format!("{element},").repeat(1_000_000 / (element.len() + 1)));
    let members = |value: &str| {
        let count = 1_000_000 / (9 + value.len());
        let members: Vec<_> = (0..count).map(|number| format!("\"{number:05x}\":{value}")).collect();
        format!("{{{}}}", members.join(","))
    };
    let bodies = [
        list("1"),
        list("{}"),
        list("[]"),
        list("{\"\":0}"),
        list("{\"a\":\"a long value that is hashed\"}"),
        format!("\"{}\"", "x".repeat(1_000_000)),
        format!("\"{}\"", "\\u00e9".repeat(160_000)),
        members("1"),
        members("{\"a\":[1,{\"b\":2}]}"),
        nested(list("1")[1..999_000].trim_end_matches(',')),
        "1".repeat(1_000_000),
        format!("1e{}", "9".repeat(1_000_000)),
    ];
    for body in bodies {
        let (beginning, size) = (body[..20].to_owned(), body.len() as u64);
        let most = memory_of_json(body);
        println!("{beginning}…: {most} bytes");
        assert!(most < 5 * size, "{beginning}…: {most} bytes");
    }
}
