//! Tests of the wrappers: the effects of each wrapper on a store, and the rule that no wrapper makes a body run again.
#![allow(clippy::unchecked_time_subtraction, reason = "the durations are constants")]

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_runtime::clock::ManualClock;
use idem_runtime::codec::{CodecName, ResultProblem};
use idem_runtime::key::Fingerprint;
use idem_runtime::policy::StepPolicy;
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::store::{
    Finish, JournalError, Lease, Release, Reservation, ReserveRequest, StepState, StoreFuture, Verdict, forward,
    renew_all,
};
use idem_runtime::{
    Cached, Compressed, Disposition, Error, Json, Key, MemoryStore, Offloaded, OnStoreError, Operation, Outcome,
    Policy, Store, StoreExt, current, observe,
};
use idem_tests::Reopen as _;
use idem_tests::polls::poll_once;
use idem_tests::race::Race;
use idem_tests::server::{Kind, RedisServer};
use idem_tests::{FaultyStore, StoreCall};
use object_store::ObjectStore;
use object_store::memory::InMemory;

#[path = "wrappers/cached.rs"]
mod cached;
#[path = "wrappers/compressed.rs"]
mod compressed;
#[path = "wrappers/offloaded.rs"]
mod offloaded;

const LEASE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(3600);
const TICK: Duration = Duration::from_millis(1);
const POLICY: Policy = Policy::new(TTL).max_result_bytes(64 * 1024 * 1024);

/// Store in memory that fails on command, with a clock that the test advances.
struct World {
    clock: ManualClock,
    memory: MemoryStore,
    store: FaultyStore,
    runs: AtomicU32,
}

impl World {
    fn new() -> Self {
        let clock = ManualClock::new();
        let memory = MemoryStore::options().clock(clock.clone()).build();
        Self { clock, store: FaultyStore::new(&memory), memory, runs: AtomicU32::new(0) }
    }

    fn request(&self, name: &str) -> ReserveRequest {
        ReserveRequest::new(key(name), self.memory.context().new_owner(), LEASE, TTL)
    }

    /// Reserves a new attempt, and returns its lease.
    async fn reserved(&self, store: &dyn Store, name: &str) -> Lease {
        match store.reserve(&self.request(name)).await.unwrap() {
            Reservation::Granted { lease, .. } => lease,
            other => panic!("{other:?}"),
        }
    }

    /// Records an operation whose result has these bytes.
    async fn finished(&self, store: &dyn Store, name: &str, bytes: &[u8]) -> Record {
        let lease = self.reserved(store, name).await;
        let finish = completed(bytes);
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
        Record::after(&lease, finish.state())
    }

    /// Returns the finished record that a reservation finds.
    async fn replay(&self, store: &dyn Store, name: &str) -> Record {
        match store.reserve(&self.request(name)).await.unwrap() {
            Reservation::Finished { record, .. } => record,
            other => panic!("{other:?}"),
        }
    }

    /// Makes one call of a handler that counts its runs and returns `result`.
    async fn call(&self, store: &dyn Store, policy: Policy, result: &str) -> (Result<String, Error>, Outcome) {
        let operation = Operation::new(store, Ok(key("call")), policy);
        let body = async {
            self.runs.fetch_add(1, Ordering::SeqCst);
            Ok(result.to_owned())
        };
        observe(operation.run(body)).await
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }

    /// Checks that a call gets `ResultUnavailable` because of `why` and runs no body, under both values of
    /// `on_store_error`.
    async fn has_no_result(&self, store: &dyn Store, why: &str) {
        let runs = self.runs();
        for on_store_error in [OnStoreError::Fail, OnStoreError::Run] {
            let (result, outcome) = self.call(store, POLICY.on_store_error(on_store_error), "again").await;
            let Err(Error::ResultUnavailable { problem: ResultProblem::Unreadable { reason, .. }, .. }) = &result
            else {
                panic!("{why}: {result:?}")
            };
            assert!(reason.contains(why), "{why}: {reason}");
            assert_eq!(outcome.disposition(), Disposition::DeadLetter, "{why}");
        }
        assert_eq!(self.runs(), runs, "{why}: a finished operation ran again");
    }
}

fn key(name: &str) -> Key {
    Key::new("wrappers", name).unwrap()
}

fn stored(bytes: &[u8]) -> StoredResult {
    StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: bytes.to_vec().into() }
}

fn completed(bytes: &[u8]) -> Finish {
    Finish::Completed(stored(bytes))
}

fn payload(record: &Record) -> &StoredResult {
    match &record.state {
        State::Completed(payload) | State::Failed(payload) => payload,
        other => panic!("not finished: {other:?}"),
    }
}

/// Returns the result in the form in which the innermost store holds it.
async fn kept(store: &dyn Store, name: &str) -> StoredResult {
    payload(&store.inspect(&key(name)).await.unwrap().expect("a record").record).clone()
}

fn codec_of(payload: &StoredResult) -> &str {
    match payload {
        StoredResult::Encoded { codec, .. } => codec.as_str(),
        other => panic!("{other:?}"),
    }
}

fn bytes_of(payload: &StoredResult) -> Vec<u8> {
    match payload {
        StoredResult::Encoded { bytes, .. } => bytes.to_vec(),
        other => panic!("{other:?}"),
    }
}

fn reason_of(payload: &StoredResult) -> &str {
    match payload {
        StoredResult::Unreadable { reason } => reason,
        other => panic!("{other:?}"),
    }
}

/// Bytes that do not compress, because they have no repetitions (xorshift64, Marsaglia 2003).
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_be_bytes()[0]
    })
    .take(len)
    .collect()
}

#[allow(clippy::format_collect)] // A handful of bytes.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Polls a store call `polls` times; the call must not end.
async fn polled<T>(mut call: StoreFuture<'_, T>, polls: u32) -> StoreFuture<'_, T> {
    for _ in 0..polls {
        assert!(poll_once(Pin::new(&mut call)).await.is_pending(), "the call should still be under way");
    }
    call
}

/// Returns every wrapper around every other wrapper and around itself, set up so that each wrapper changes
/// every result.
fn compositions(store: &dyn Store, objects: &Arc<dyn ObjectStore>) -> Vec<(&'static str, Arc<dyn Store>)> {
    let cached = |store: Arc<dyn Store>| -> Arc<dyn Store> { Arc::new(Cached::new(store)) };
    let compressed = |store: Arc<dyn Store>| -> Arc<dyn Store> { Arc::new(Compressed::options().above(0).wrap(store)) };
    let offloaded = |store: Arc<dyn Store>| -> Arc<dyn Store> {
        Arc::new(Offloaded::options().above(0).wrap(store, Arc::clone(objects)))
    };
    let store = || store.handle();
    vec![
        ("cached, compressed, offloaded", cached(compressed(offloaded(store())))),
        ("cached, offloaded, compressed", cached(offloaded(compressed(store())))),
        ("compressed, cached, offloaded", compressed(cached(offloaded(store())))),
        ("compressed, offloaded, cached", compressed(offloaded(cached(store())))),
        ("offloaded, cached, compressed", offloaded(cached(compressed(store())))),
        ("offloaded, compressed, cached", offloaded(compressed(cached(store())))),
        ("cached twice", cached(cached(store()))),
        ("compressed twice", compressed(compressed(store()))),
        ("offloaded twice", offloaded(offloaded(store()))),
    ]
}

/// Returns each wrapper alone, and the [`compositions`].
fn wrapped(store: &dyn Store, objects: &Arc<dyn ObjectStore>) -> Vec<(&'static str, Arc<dyn Store>)> {
    let mut wrapped = compositions(store, objects);
    wrapped.push(("cached", Arc::new(Cached::new(store.handle()))));
    wrapped.push(("compressed", Arc::new(Compressed::options().above(0).wrap(store.handle()))));
    let offloaded = Offloaded::options().above(0).wrap(store.handle(), Arc::clone(objects));
    wrapped.push(("offloaded", Arc::new(offloaded)));
    wrapped
}

#[tokio::test]
async fn wrappers_compose_in_every_order() {
    let results = [vec![], b"1".to_vec(), vec![b'x'; 100], vec![b'x'; 200_000], noise(100), noise(100_000)];
    let count = compositions(&MemoryStore::new(), &(Arc::new(InMemory::new()) as _)).len();
    for n in 0..count {
        let world = World::new();
        let (order, store) = compositions(&world.store, &(Arc::new(InMemory::new()) as _)).swap_remove(n);
        for (i, bytes) in results.iter().enumerate() {
            let name = format!("{i}");
            let record = world.finished(&*store, &name, bytes).await;
            for _ in 0..3 {
                assert_eq!(world.replay(&*store, &name).await, record, "{order}, result {i}");
                assert_eq!(store.inspect(&key(&name)).await.unwrap().unwrap().record, record, "{order}, result {i}");
            }
            // Another process, with the same wrappers but empty caches, reads the result too.
            let failed = Finish::Failed(stored(bytes));
            let lease = world.reserved(&*store, &format!("{i} failed")).await;
            assert_eq!(store.finish(&lease, &failed).await.unwrap(), Verdict::Applied);
            let record = Record::after(&lease, failed.state());
            assert_eq!(world.replay(&*store, &format!("{i} failed")).await, record, "{order}, error {i}");
        }
        let result = "a result of some length ".repeat(1000);
        for _ in 0..3 {
            assert_eq!(world.call(&*store, POLICY, &result).await.0.unwrap(), result, "{order}");
        }
        assert_eq!(world.runs(), 1, "{order}");
    }
}

/// A wrapper's codec name marks its own envelopes. A result that another codec wrote under this name comes back
/// unchanged.
#[tokio::test]
async fn results_of_a_codec_with_the_name_of_a_wrapper_come_back() {
    let count = compositions(&MemoryStore::new(), &(Arc::new(InMemory::new()) as _)).len();
    for n in 0..count {
        let world = World::new();
        let (order, store) = compositions(&world.store, &(Arc::new(InMemory::new()) as _)).swap_remove(n);
        for codec in ["idem:zstd", "idem:object"] {
            for bytes in [&b""[..], b"\x01", b"\x01\x02\x04json", &noise(40), &[b'x'; 4000]] {
                let name = format!("{codec} {}", bytes.len());
                let lease = world.reserved(&*store, &name).await;
                let codec = CodecName::new(codec.as_bytes()).unwrap();
                let finish = Finish::Completed(StoredResult::Encoded { codec, bytes: bytes.to_vec().into() });
                assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
                let record = Record::after(&lease, finish.state());
                for _ in 0..2 {
                    assert_eq!(world.replay(&*store, &name).await, record, "{order}: {codec:?}");
                }
            }
        }
    }
}

/// A consumer without the wrapper gets an error that names another codec.
#[tokio::test]
async fn without_the_wrapper_a_result_is_an_error_of_another_codec() {
    for name in ["idem:zstd", "idem:object"] {
        let world = World::new();
        let store: Arc<dyn Store> = match name {
            "idem:zstd" => Arc::new(Compressed::options().above(10).wrap(world.store.clone())),
            _ => Arc::new(Offloaded::options().above(10).wrap(world.store.clone(), Arc::new(InMemory::new()))),
        };
        let result = "x".repeat(1000);
        world.call(&*store, POLICY, &result).await.0.unwrap();
        for on_store_error in [OnStoreError::Fail, OnStoreError::Run] {
            let (answer, outcome) = world.call(&world.store, POLICY.on_store_error(on_store_error), "again").await;
            let Err(Error::ResultUnavailable { problem: ResultProblem::OtherCodec { codec, .. }, .. }) = answer else {
                panic!("{answer:?}")
            };
            assert_eq!(codec, name);
            assert!(outcome.misconfigured() && matches!(outcome.disposition(), Disposition::Retry { .. }));
        }
        assert_eq!(world.call(&*store, POLICY, "again").await.0.unwrap(), result);
        assert_eq!(world.runs(), 1);
    }
}

/// Runs the handler `call` with one step and a policy that keeps the journal. Returns its result.
async fn call_with_a_kept_step(world: &World, store: &dyn Store) -> Result<String, Error> {
    let operation = Operation::new(store, Ok(key("call")), POLICY);
    let body = async {
        let attempt = current()?;
        attempt.set_step_policy(StepPolicy::new().keep());
        let charge: u32 =
            attempt.step("charge").run(async |_| Ok::<_, Error>(world.runs.fetch_add(1, Ordering::SeqCst) + 7)).await?;
        Ok(format!("{charge}{}", "x".repeat(2000)))
    };
    operation.run(body).await
}

/// A kept journal is part of the stored value, so a wrapper that transforms the value also hides the journal. A reader
/// without the wrapper must not get an empty list.
#[tokio::test]
async fn a_kept_journal_is_found_through_each_wrapper() {
    let count = wrapped(&MemoryStore::new(), &(Arc::new(InMemory::new()) as _)).len();
    for n in 0..count {
        let world = World::new();
        let (order, store) = wrapped(&world.store, &(Arc::new(InMemory::new()) as _)).swap_remove(n);
        for _ in 0..3 {
            assert_eq!(call_with_a_kept_step(&world, &*store).await.unwrap(), format!("7{}", "x".repeat(2000)));
            let found = store.operator().inspect(&key("call")).await.unwrap().expect("a record");
            let steps = found.steps().unwrap();
            let [charge] = &steps[..] else { panic!("{order}: {steps:?}") };
            assert_eq!((charge.name(), charge.state()), ("charge", StepState::Ended), "{order}");
            // A value that became an object when its step was journaled stays there.
            let codec = if order.contains("offloaded") { "idem:object" } else { "json" };
            assert_eq!(charge.value().map(codec_of), Some(codec), "{order}");
            assert_eq!(codec_of(payload(&found.record)), "json", "{order}: the result has no journal");
        }
        assert_eq!(world.runs(), 1, "{order}");

        let raw = world.store.operator().inspect(&key("call")).await.unwrap().expect("a record");
        let expected = match codec_of(payload(&raw.record)) {
            "idem:zstd" => Err(JournalError::Compressed),
            "idem:object" => Err(JournalError::Offloaded),
            _ => Ok(1),
        };
        assert_eq!(raw.steps().map(|steps| steps.len()), expected, "{order}: without the wrapper");
    }
}

/// The envelope of a wrapper names the codec of its content, so a reader without the wrapper can tell a result that has
/// no journal. It can't if another wrapper has transformed the result before.
#[tokio::test]
async fn a_wrapped_result_without_a_journal_has_no_steps() {
    let count = wrapped(&MemoryStore::new(), &(Arc::new(InMemory::new()) as _)).len();
    for n in 0..count {
        let world = World::new();
        let (order, store) = wrapped(&world.store, &(Arc::new(InMemory::new()) as _)).swap_remove(n);
        world.call(&*store, POLICY, &"x".repeat(2000)).await.0.unwrap();
        let through = store.operator().inspect(&key("call")).await.unwrap().expect("a record");
        assert_eq!(through.steps(), Ok(vec![]), "{order}");
        let raw = world.store.operator().inspect(&key("call")).await.unwrap().expect("a record");
        // The object holds a compressed result, or a reference to another object.
        let hidden = order.contains("compressed, offloaded") || order == "compressed, cached, offloaded";
        assert_eq!(raw.steps().is_err(), hidden || order == "offloaded twice", "{order}: {:?}", raw.steps());
    }
}

/// A wrapper can be added to a store with records. The wrapper can be removed as long as it has changed no result.
#[tokio::test]
async fn wrappers_write_small_results_unchanged() {
    let world = World::new();
    let objects = Arc::new(InMemory::new());
    let wrapped = Cached::new(Compressed::new(Offloaded::new(world.store.clone(), objects)));
    let old = world.finished(&world.store, "old", b"[1,2,3]").await;
    assert_eq!(world.replay(&wrapped, "old").await, old);
    let new = world.finished(&wrapped, "new", b"[4,5,6]").await;
    assert_eq!(world.replay(&world.store, "new").await, new);
}

#[tokio::test]
async fn wrappers_pass_on_ends_without_a_result_and_mismatches_unchanged() {
    let count = compositions(&MemoryStore::new(), &(Arc::new(InMemory::new()) as _)).len();
    for n in 0..count {
        let world = World::new();
        let (order, store) = compositions(&world.store, &(Arc::new(InMemory::new()) as _)).swap_remove(n);
        for (name, finish) in [
            ("too large", Finish::Completed(StoredResult::TooLarge { size: 1 << 40 })),
            ("unencodable", Finish::Failed(StoredResult::Unencodable)),
        ] {
            let lease = world.reserved(&*store, name).await;
            assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied, "{order}");
            assert_eq!(kept(&world.store, name).await, *payload(&Record::after(&lease, finish.state())), "{order}");
            assert_eq!(world.replay(&*store, name).await, Record::after(&lease, finish.state()), "{order}");
        }
        assert_eq!(store.context().name(), "memory", "{order}: errors name the store itself");
        assert!(std::ptr::eq(store.context(), world.memory.context()), "{order}");
        let marked = world.request("marked").fingerprint(Fingerprint::of(&1).unwrap());
        let Reservation::Granted { lease, .. } = store.reserve(&marked).await.unwrap() else { panic!("{order}") };
        assert_eq!(store.finish(&lease, &completed(&[b'x'; 5000])).await.unwrap(), Verdict::Applied);
        let other = world.request("marked").fingerprint(Fingerprint::of(&2).unwrap());
        for _ in 0..3 {
            assert_eq!(
                store.reserve(&other).await.unwrap(),
                Reservation::FingerprintMismatch { attempt: 1 },
                "{order}"
            );
        }
    }
}

/// Store whose upkeep has its own connection.
#[derive(Clone, Debug)]
struct Apart {
    calls: FaultyStore,
    upkeep: FaultyStore,
    is_upkeep: bool,
}

impl Apart {
    fn new(memory: &MemoryStore) -> Self {
        Self { calls: FaultyStore::new(memory), upkeep: FaultyStore::new(memory), is_upkeep: false }
    }

    fn line(&self) -> &FaultyStore {
        if self.is_upkeep { &self.upkeep } else { &self.calls }
    }
}

impl Store for Apart {
    forward! {
        |store| store.line() => context, reserve, begin, renew, append, finish, release, wait, inspect, decide, purge, list, ping
    }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        Arc::new(Self { is_upkeep: true, ..self.clone() })
    }

    fn namespace(&self) -> &'static str {
        "apart"
    }

    fn response_timeout(&self) -> Duration {
        LEASE / 10
    }
}

#[tokio::test]
async fn the_upkeep_of_a_wrapper_uses_the_upkeep_of_its_store() {
    let count = compositions(&MemoryStore::new(), &(Arc::new(InMemory::new()) as _)).len();
    for n in 0..count {
        let world = World::new();
        let apart = Apart::new(&world.memory);
        let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let (order, store) = compositions(&apart, &objects).swap_remove(n);
        let upkeep = store.upkeep();
        assert!(std::ptr::eq(upkeep.context(), world.memory.context()), "{order}");
        assert!(Arc::ptr_eq(&upkeep, &store.upkeep()), "{order}: made once");
        assert_eq!(
            (upkeep.context().name(), upkeep.namespace(), upkeep.response_timeout()),
            ("memory", "apart", LEASE / 10)
        );
        // The upkeep renews leases, records a late result, and cleans up a dropped call.
        let leases = [world.reserved(&*store, "late").await, world.reserved(&*store, "dropped").await];
        assert_eq!(renew_all(&*upkeep, &leases).await.unwrap(), [Verdict::Applied; 2], "{order}");
        let result = completed(&[b'x'; 5000]);
        assert_eq!(upkeep.finish(&leases[0], &result).await.unwrap(), Verdict::Applied, "{order}");
        let again = world.request("dropped").owner(leases[1].owner);
        assert!(matches!(upkeep.reserve(&again).await.unwrap(), Reservation::Granted { .. }), "{order}");
        assert_eq!(upkeep.release(&leases[1], Release::NotStarted).await.unwrap(), Verdict::Applied, "{order}");
        for call in [StoreCall::Renew, StoreCall::Finish, StoreCall::Release] {
            assert_eq!((apart.calls.count(call), apart.upkeep.count(call)), (0, 1), "{order}: {call:?}");
        }
        // The store's own upkeep wrote the record, with the result in the form of the wrappers.
        let as_it_was = kept(&world.memory, "late").await == *result.result();
        assert_eq!(as_it_was, order == "cached twice", "{order}");
        for _ in 0..3 {
            assert_eq!(world.replay(&*store, "late").await, Record::after(&leases[0], result.state()), "{order}");
        }
    }
}

/// `upkeep` of a wrapper returns a handle whose own `upkeep` is the same handle. This handle does not keep itself
/// alive.
#[tokio::test]
async fn a_wrapper_of_a_store_without_upkeep_is_its_own_upkeep() {
    let memory = MemoryStore::new();
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    for (order, store) in compositions(&memory, &objects) {
        let weak = Arc::downgrade(&store.upkeep());
        assert!(Arc::ptr_eq(&store.upkeep().upkeep(), &store.upkeep()), "{order}");
        drop(store);
        assert!(weak.upgrade().is_none(), "{order}: the store keeps itself alive");
    }
}

/// A reservation that takes effect after its own release gets `Released`, and no wrapper caches this answer.
#[tokio::test]
async fn no_wrapper_caches_the_answer_to_a_late_reservation() {
    let count = compositions(&MemoryStore::new(), &(Arc::new(InMemory::new()) as _)).len();
    for n in 0..count {
        let world = World::new();
        let (order, store) = compositions(&world.store, &(Arc::new(InMemory::new()) as _)).swap_remove(n);
        let request = world.request("k");
        let Reservation::Granted { lease, .. } = store.reserve(&request).await.unwrap() else { panic!("{order}") };
        assert_eq!(store.release(&lease, Release::NotStarted).await.unwrap(), Verdict::Applied, "{order}");
        for _ in 0..3 {
            assert_eq!(store.reserve(&request).await.unwrap(), Reservation::Released { attempt: 1 }, "{order}");
        }
        let second = world.reserved(&*store, "k").await;
        assert_eq!(second.attempt, 2, "{order}");
        // The same reservation arrives again, while another attempt holds the key and after that attempt has finished.
        assert!(
            matches!(store.reserve(&request).await.unwrap(), Reservation::InProgress { attempt: 2, .. }),
            "{order}"
        );
        let result = completed(&[b'x'; 5000]);
        assert_eq!(store.finish(&second, &result).await.unwrap(), Verdict::Applied, "{order}");
        for _ in 0..3 {
            assert_eq!(world.replay(&*store, "k").await, Record::after(&second, result.state()), "{order}");
            let Reservation::Finished { .. } = store.reserve(&request).await.unwrap() else { panic!("{order}") };
        }
        // After an operator's reopening, a late reservation of the other attempt changes nothing.
        assert_eq!(store.reopen(&key("k"), 2).await.unwrap(), Verdict::Applied, "{order}");
        let late = world.request("k").owner(second.owner);
        assert_eq!(store.reserve(&late).await.unwrap(), Reservation::Released { attempt: 2 }, "{order}");
        assert_eq!(world.reserved(&*store, "k").await.attempt, 3, "{order}");
    }
}

/// Processes that share records and objects are killed at any point, also between the writes of object and record.
#[tokio::test]
async fn processes_race_for_the_same_keys() {
    let server = RedisServer::start(Kind::Redis);
    let folder = std::env::temp_dir().join(format!("idem-objects-{}-{}", std::process::id(), server.port()));
    std::fs::create_dir_all(&folder).unwrap();
    let spec = format!("wrapped {} race: {}", server.url(), folder.display());
    let race = Race::new(env!("CARGO_BIN_EXE_racer"), &spec);
    let effects = race.run(async {}).await;
    assert!(
        effects.repeated() <= race.kills,
        "only a killed process may leave an effect without a record: {effects:?}"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}
