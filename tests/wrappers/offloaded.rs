//! `Offloaded`: results that become objects, and the answers of the store when an object is missing, altered
//! or unreachable.

use std::collections::VecDeque;
use std::fmt;
use std::future::pending;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use idem_runtime::codec::{CodecName, ResultProblem};
use idem_runtime::record::{Record, StoredResult};
use idem_runtime::step::StepProblem;
use idem_runtime::store::{Finish, Lease, OwnerToken, Reservation, Verdict};
use idem_runtime::{Cached, Error, MemoryStore, Offloaded, OnStoreError, Operation, Store, StoreErrorKind};
use idem_tests::Reopen as _;
use idem_tests::{Fault, StoreCall, settle};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};

use super::{
    LEASE, POLICY, World, bytes_of, codec_of, completed, hex, kept, key, noise, payload, polled, reason_of, stored,
    unhex,
};

const GOLDEN: &str = include_str!("../golden/envelope-object-v1.txt");
/// Default time limit of an object store call.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Fault of a call to the object store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    Fails,
    Denies,
    Hangs,
    /// The call takes effect, and returns an error.
    LosesAnswer,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verb {
    Put,
    Get,
    Delete,
}

/// Objects in memory, behind a connection with faults.
#[derive(Clone, Debug, Default)]
struct Objects {
    inner: Arc<InMemory>,
    plan: Arc<Mutex<Plan>>,
}

#[derive(Debug, Default)]
struct Plan {
    next: VecDeque<(Verb, Trouble)>,
    always: Option<(Verb, Trouble)>,
    calls: Vec<Verb>,
}

impl Objects {
    fn next(&self, verb: Verb, trouble: Trouble) {
        self.plan.lock().unwrap().next.push_back((verb, trouble));
    }

    fn always(&self, verb: Verb, trouble: impl Into<Option<Trouble>>) {
        self.plan.lock().unwrap().always = trouble.into().map(|trouble| (verb, trouble));
    }

    fn count(&self, verb: Verb) -> usize {
        self.plan.lock().unwrap().calls.iter().filter(|it| **it == verb).count()
    }

    fn meets(&self, verb: Verb) -> Option<Trouble> {
        let mut plan = self.plan.lock().unwrap();
        plan.calls.push(verb);
        if plan.next.front().is_some_and(|(other, _)| *other == verb) {
            return plan.next.pop_front().map(|(_, trouble)| trouble);
        }
        plan.always.filter(|(other, _)| *other == verb).map(|(_, trouble)| trouble)
    }

    async fn through<T>(
        &self,
        verb: Verb,
        call: impl Future<Output = object_store::Result<T>>,
    ) -> object_store::Result<T> {
        const SECRET: &str = "a password that stands in the request";
        let failed = || object_store::Error::Generic { store: "test", source: SECRET.into() };
        match self.meets(verb) {
            None => call.await,
            Some(Trouble::Fails) => Err(failed()),
            Some(Trouble::Denies) => {
                Err(object_store::Error::PermissionDenied { path: SECRET.to_owned(), source: SECRET.into() })
            }
            Some(Trouble::Hangs) => pending().await,
            Some(Trouble::LosesAnswer) => {
                call.await?;
                Err(failed())
            }
        }
    }

    async fn paths(&self) -> Vec<Path> {
        let mut listed = self.inner.list(None);
        let mut paths = Vec::new();
        while let Some(object) = listed.next().await {
            paths.push(object.unwrap().location);
        }
        paths
    }

    async fn only(&self) -> Path {
        let mut paths = self.paths().await;
        assert_eq!(paths.len(), 1, "{paths:?}");
        paths.remove(0)
    }

    async fn set(&self, path: &Path, bytes: Vec<u8>) {
        self.inner.put(path, PutPayload::from(bytes)).await.unwrap();
    }

    async fn get(&self, path: &Path) -> Vec<u8> {
        self.inner.get(path).await.unwrap().bytes().await.unwrap().to_vec()
    }
}

impl fmt::Display for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("objects with troubles")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Objects {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.through(Verb::Put, self.inner.put_opts(location, payload, options)).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.through(Verb::Get, self.inner.get_opts(location, options)).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        let this = self.clone();
        let delete = move |location: object_store::Result<Path>| {
            let this = this.clone();
            async move {
                let location = location?;
                this.through(Verb::Delete, this.inner.delete(&location)).await?;
                Ok(location)
            }
        };
        locations.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

fn offloaded(world: &World, objects: &Objects) -> Offloaded {
    Offloaded::options().above(100).wrap(world.store.clone(), Arc::new(objects.clone()))
}

/// Awaits `work`, and advances the clock whenever `work` waits. Returns the output and the elapsed time.
async fn as_time_passes<T>(world: &World, work: impl Future<Output = T>) -> (T, Duration) {
    let mut passed = Duration::ZERO;
    let pass = async {
        loop {
            settle().await;
            let step = world.clock.next_wake().unwrap_or_default();
            world.clock.advance(step);
            passed += step;
        }
    };
    tokio::select! {
        biased;
        output = work => (output, passed),
        () = pass => unreachable!("time passes for ever"),
    }
}

#[tokio::test]
async fn the_envelope_of_a_wrapped_result_is_pinned() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    // With a fixed owner token, the object's name is fixed too.
    let request = world.request("pinned").owner(OwnerToken::from_bytes(*b"0123456789abcdef"));
    let Reservation::Granted { lease, .. } = store.reserve(&request).await.unwrap() else { panic!("a free key") };
    let finish = completed(&[b'x'; 101]);
    assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
    let other = world.reserved(&store, "as it was").await;
    let codec = CodecName::new(b"idem:object").unwrap();
    let escaped = Finish::Completed(StoredResult::Encoded { codec, bytes: b"of somebody else".to_vec().into() });
    assert_eq!(store.finish(&other, &escaped).await.unwrap(), Verdict::Applied);

    let written = format!(
        "as-it-was {}\nobject {}\npath {}\n",
        hex(&bytes_of(&kept(&world.store, "as it was").await)),
        hex(&bytes_of(&kept(&world.store, "pinned").await)),
        objects.only().await,
    );
    assert_eq!(written, GOLDEN, "a released envelope never changes: give a new envelope a new version");

    // Another process reads the result from the pinned record and object alone.
    let world = World::new();
    let reader = offloaded(&world, &objects);
    let pinned: Vec<&str> = GOLDEN.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    objects.set(&Path::from(pinned[2]), vec![b'x'; 101]).await;
    for (name, bytes, finish) in [("1", pinned[0], escaped), ("2", pinned[1], finish)] {
        let lease = world.reserved(&world.store, name).await;
        let envelope = Finish::Completed(StoredResult::Encoded { codec, bytes: unhex(bytes).into() });
        assert_eq!(world.store.finish(&lease, &envelope).await.unwrap(), Verdict::Applied);
        assert_eq!(Record::after(&lease, finish.state()), world.replay(&reader, name).await);
    }
}

#[tokio::test]
async fn results_above_the_threshold_become_objects() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    for (name, len, codec) in
        [("nothing", 0, "json"), ("at the threshold", 100, "json"), ("above it", 101, "idem:object")]
    {
        let record = world.finished(&store, name, &noise(len)).await;
        assert_eq!(codec_of(&kept(&world.store, name).await), codec, "{name}");
        assert_eq!(world.replay(&store, name).await, record, "{name}");
        assert_eq!(objects.paths().await.len(), usize::from(len > 100), "{name}");
    }
    assert_eq!(
        (objects.count(Verb::Put), objects.count(Verb::Get)),
        (1, 1),
        "one more call of the object store for each operation"
    );
    assert!(bytes_of(&kept(&world.store, "above it").await).len() < 200, "the record stays small");

    let default = Offloaded::new(world.store.clone(), Arc::new(objects));
    for (len, codec) in [(64 << 10, "json"), ((64 << 10) + 1, "idem:object"), (5 << 20, "idem:object")] {
        let name = len.to_string();
        let record = world.finished(&default, &name, &noise(len)).await;
        assert_eq!(codec_of(&kept(&world.store, &name).await), codec);
        assert!(world.replay(&default, &name).await == record);
    }
}

#[tokio::test]
async fn object_names_contain_neither_key_nor_token() {
    let world = World::new();
    let objects = Objects::default();
    let store =
        Offloaded::options().prefix("shop/results").above(0).wrap(world.store.clone(), Arc::new(objects.clone()));
    let lease = world.reserved(&store, "order:42").await;
    assert_eq!(store.finish(&lease, &completed(b"1")).await.unwrap(), Verdict::Applied);
    let path = objects.only().await.to_string();
    let parts: Vec<_> = path.split('/').collect();
    assert_eq!((&parts[..2], parts[2].len(), parts[3].len()), (&["shop", "results"][..], 64, 32), "{path}");
    assert!(!path.contains("order") && !path.contains(&hex(lease.owner.as_bytes())[..8]), "{path}");

    // A consumer with another prefix can still read the result.
    let other = Offloaded::options().prefix("elsewhere").wrap(world.store.clone(), Arc::new(objects.clone()));
    assert_eq!(world.replay(&other, "order:42").await, Record::after(&lease, completed(b"1").state()));
    let shown = format!("{store:?}");
    assert!(!shown.contains("Objects {") && shown.contains("shop/results"), "{shown}");
}

/// The test covers every way in which an object can differ from its record.
#[tokio::test]
async fn a_result_without_its_object_is_unavailable_and_never_runs_again() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    let result = "r".repeat(500);
    assert_eq!(world.call(&store, POLICY, &result).await.0.unwrap(), result);
    let path = objects.only().await;
    let whole = objects.get(&path).await;
    let others = noise(whole.len());

    objects.inner.delete(&path).await.unwrap();
    world.has_no_result(&store, "its object is missing").await;
    assert_eq!(reason_of(&kept(&store, "call").await), "its object is missing");
    for (bytes, why) in [
        (Vec::new(), "another size"),
        (whole[..whole.len() - 1].to_vec(), "another size"),
        ([&whole[..], b" "].concat(), "another size"),
        (others, "was altered"),
        ([b"'", &whole[1..]].concat(), "was altered"),
    ] {
        objects.set(&path, bytes).await;
        world.has_no_result(&store, why).await;
        assert!(reason_of(&kept(&store, "call").await).contains(why));
    }
    objects.set(&path, whole).await;
    assert_eq!(world.call(&store, POLICY, "again").await.0.unwrap(), result, "the object is back");
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn an_object_of_another_key_is_not_accepted() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    let mut records = Vec::new();
    for n in 0..2 {
        records.push(world.finished(&store, &n.to_string(), &[b'0' + n; 200]).await);
    }
    let paths = objects.paths().await;
    let contents = [objects.get(&paths[0]).await, objects.get(&paths[1]).await];
    for (path, bytes) in paths.iter().zip(contents.iter().rev()) {
        objects.set(path, bytes.clone()).await;
    }
    for n in 0..2 {
        assert_eq!(reason_of(payload(&world.replay(&store, &n.to_string()).await)), "its object was altered");
    }
    // Equal results of two keys become two objects, each of which is removed with its own record.
    for name in ["a", "b"] {
        world.finished(&store, name, &[b'x'; 200]).await;
    }
    assert_eq!(objects.paths().await.len(), 4);
}

#[tokio::test]
async fn a_damaged_envelope_is_unavailable() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    let record = world.finished(&store, "k", &[b'x'; 200]).await;
    let whole = bytes_of(&kept(&world.store, "k").await);
    let codec = CodecName::new(b"idem:object").unwrap();
    let put = async |name: &str, bytes: &[u8]| {
        let lease = world.reserved(&world.store, name).await;
        let finish = Finish::Completed(StoredResult::Encoded { codec, bytes: bytes.to_vec().into() });
        assert_eq!(world.store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
        payload(&world.replay(&store, name).await).clone()
    };
    for len in 0..whole.len() {
        let cut = put(&format!("cut at {len}"), &whole[..len]).await;
        assert!(matches!(cut, StoredResult::Unreadable { .. }), "cut at {len}: {cut:?}");
    }
    for at in 0..whole.len() {
        let mut altered = whole.clone();
        altered[at] ^= 1;
        match put(&format!("altered at {at}"), &altered).await {
            StoredResult::Unreadable { .. } => {}
            // A damaged byte in the codec's name changes only the name of the codec.
            StoredResult::Encoded { codec, .. } if (3..7).contains(&at) => assert_ne!(codec.as_str(), "json"),
            other => panic!("altered at {at}: {other:?}"),
        }
    }
    // These paths lead to another object, or are invalid.
    for path in ["../../etc/passwd", "/", "a//b", "other"] {
        let forged = put(path, &[&whole[..15 + 32], path.as_bytes()].concat()).await;
        assert!(matches!(forged, StoredResult::Unreadable { .. }), "{path}: {forged:?}");
    }
    assert_eq!(world.replay(&store, "k").await, record);
}

#[tokio::test]
async fn a_failing_read_of_an_object_is_repeated_for_a_limited_time() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    let record = world.finished(&store, "k", &[b'x'; 200]).await;

    for _ in 0..3 {
        objects.next(Verb::Get, Trouble::Fails);
    }
    let (replayed, _) = as_time_passes(&world, world.replay(&store, "k")).await;
    assert_eq!(replayed, record, "the fourth try succeeds");
    assert_eq!(objects.count(Verb::Get), 4);

    for (trouble, why, takes) in [
        (Trouble::Fails, "the object store failed", TIMEOUT),
        (Trouble::Hangs, "the object store does not answer", TIMEOUT),
        (Trouble::Denies, "the object store denies access to its object", Duration::ZERO),
    ] {
        objects.always(Verb::Get, trouble);
        let (replayed, passed) = as_time_passes(&world, world.replay(&store, "k")).await;
        // The answer is a finished record without a result. An error of the store instead could lead to a second run.
        assert_eq!((reason_of(payload(&replayed)), passed), (why, takes), "{trouble:?}");
        let (inspected, _) = as_time_passes(&world, store.inspect(&key("k"))).await;
        let error = inspected.unwrap_err();
        let kind = if trouble == Trouble::Denies { StoreErrorKind::Misconfigured } else { StoreErrorKind::Unavailable };
        assert_eq!((error.kind(), error.to_string().as_str()), (kind, why), "an operator is told why");
        assert!(!format!("{error:?}").contains("password"));
    }
    objects.always(Verb::Get, None);
    assert_eq!(world.replay(&store, "k").await, record, "nothing was given up");
}

#[tokio::test]
async fn an_unreachable_object_store_causes_no_second_run() {
    for trouble in [Trouble::Fails, Trouble::Hangs, Trouble::Denies] {
        let world = World::new();
        let objects = Objects::default();
        let store = offloaded(&world, &objects);
        let result = "r".repeat(500);
        world.call(&store, POLICY, &result).await.0.unwrap();
        objects.always(Verb::Get, trouble);
        as_time_passes(&world, world.has_no_result(&store, "the object store")).await;
        objects.always(Verb::Get, None);
        let (again, outcome) = world.call(&store, POLICY.on_store_error(OnStoreError::Run), "again").await;
        assert_eq!(again.unwrap(), result, "{trouble:?}");
        assert!(outcome.replayed());
        assert_eq!(world.runs(), 1);
    }
}

#[tokio::test]
async fn a_failing_upload_is_repeated() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    objects.next(Verb::Put, Trouble::Fails);
    objects.next(Verb::Put, Trouble::LosesAnswer);
    let (record, _) = as_time_passes(&world, world.finished(&store, "k", &[b'x'; 200])).await;
    assert_eq!(objects.count(Verb::Put), 3);
    objects.only().await;
    assert_eq!(codec_of(&kept(&world.store, "k").await), "idem:object");
    assert_eq!(world.replay(&store, "k").await, record);
}

/// The body has had its effect, so the completion must be recorded, even if its result can't become an object.
#[tokio::test]
async fn a_result_that_can_not_be_uploaded_is_stored_in_the_record() {
    for (trouble, takes) in
        [(Trouble::Fails, LEASE / 3), (Trouble::Hangs, LEASE / 3), (Trouble::Denies, Duration::ZERO)]
    {
        let world = World::new();
        let objects = Objects::default();
        // The time limit is longer than the lease, but the upload must leave time for the record's write.
        let store = Offloaded::options().timeout(LEASE * 10).above(100);
        let store = store.wrap(world.store.clone(), Arc::new(objects.clone()));
        objects.always(Verb::Put, trouble);
        let result = "r".repeat(500);
        let ((first, outcome), passed) = as_time_passes(&world, world.call(&store, POLICY, &result)).await;
        assert_eq!(first.unwrap(), result);
        assert!(outcome.recorded() && outcome.result_stored(), "{trouble:?}");
        assert_eq!(passed, takes, "{trouble:?}");
        assert_eq!(codec_of(&kept(&world.store, "call").await), "json");
        assert_eq!(world.call(&store, POLICY, "again").await.0.unwrap(), result);
        assert_eq!((world.runs(), objects.paths().await.len()), (1, 0));
    }

    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    objects.always(Verb::Put, Trouble::Denies);
    world.store.next(StoreCall::Finish, Fault::Before(StoreErrorKind::TooLarge));
    let (first, outcome) = world.call(&store, POLICY, &"r".repeat(500)).await;
    first.unwrap();
    assert!(outcome.recorded() && !outcome.result_stored());
    let (second, _) = world.call(&store, POLICY, "again").await;
    let Err(Error::ResultUnavailable { problem: ResultProblem::TooLarge { size: 502, .. }, .. }) = second else {
        panic!("{second:?}")
    };
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn an_upload_stays_within_the_timeout() {
    let world = World::new();
    let objects = Objects::default();
    let store = Offloaded::options().timeout(Duration::from_secs(2)).above(100);
    let store = store.wrap(world.store.clone(), Arc::new(objects.clone()));
    objects.always(Verb::Put, Trouble::Hangs);
    let (_, passed) = as_time_passes(&world, world.finished(&store, "k", &[b'x'; 200])).await;
    assert_eq!(passed, Duration::from_secs(2));
}

/// Runs a handler with a step whose value has 200 bytes, which fails after the step.
async fn fails_after_a_step(store: &dyn Store, effects: &AtomicU32) -> Result<(), Error> {
    let body = async {
        let rows = idem_runtime::current()?.step("rows").run(async |_| {
            effects.fetch_add(1, Relaxed);
            Ok::<_, Error>("x".repeat(200))
        });
        assert_eq!(rows.await?.len(), 200);
        Err::<(), _>(Error::NoAttempt)
    };
    Operation::new(store, Ok(key("k")), POLICY).run(body).await
}

/// Size of the journal of the record.
async fn journal_bytes(world: &World) -> usize {
    let found = world.memory.inspect(&key("k")).await.unwrap().unwrap();
    found.record.journal.map_or(0, |journal| journal.bytes().len())
}

#[tokio::test]
async fn large_values_of_steps_become_objects() {
    let world = World::new();
    let (objects, effects) = (Objects::default(), AtomicU32::new(0));
    let store = Cached::new(offloaded(&world, &objects));
    let call = async || {
        let (ended, _) = as_time_passes(&world, fails_after_a_step(&store, &effects)).await;
        ended.unwrap_err()
    };
    assert!(matches!(call().await, Error::NoAttempt));
    let path = objects.only().await;
    assert!(journal_bytes(&world).await < 200, "the journal holds the path");
    assert!(matches!(call().await, Error::NoAttempt));
    assert_eq!((effects.load(Relaxed), objects.count(Verb::Put)), (1, 1));
    // An object store that does not answer: the step does not run, and its name may be used again.
    objects.always(Verb::Get, Trouble::Fails);
    assert!(matches!(call().await, Error::Store { .. }));
    objects.always(Verb::Get, None);
    objects.next(Verb::Get, Trouble::Denies);
    let body = async {
        let attempt = idem_runtime::current()?;
        let rows = || attempt.step("rows").run(async |_| Ok::<_, Error>(String::new()));
        assert!(matches!(rows().await, Err(Error::Store { .. })));
        assert_eq!(rows().await?.len(), 200);
        Err::<(), _>(Error::NoAttempt)
    };
    let (ended, _) = as_time_passes(&world, Operation::new(&store, Ok(key("k")), POLICY).run(body)).await;
    assert!(matches!(ended, Err(Error::NoAttempt)), "{ended:?}");
    assert!(matches!(call().await, Error::NoAttempt));
    objects.inner.delete(&path).await.unwrap();
    let gone = call().await;
    assert!(matches!(&gone, Error::Step { problem: StepProblem::ValueUnavailable { .. }, .. }), "{gone}");
    assert_eq!(effects.load(Relaxed), 1, "the step has run once");
}

/// The late finish of an attempt that was taken over removes the object of its result, and not of an equal value.
#[tokio::test]
async fn a_refused_finish_removes_no_value_of_a_step() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    let lease = world.reserved(&store, "k").await;
    let value = completed(&[b'x'; 200]).result().clone();
    let values = store.step_values().unwrap();
    let kept = values.keep(&lease, &value).await.unwrap();
    world.clock.advance(LEASE);
    world.reserved(&store, "k").await;
    assert_eq!(store.finish(&lease, &completed(&[b'x'; 200])).await.unwrap(), Verdict::Refused);
    assert_eq!(values.fetch(&kept).await.unwrap(), value);
}

#[tokio::test]
async fn a_value_of_a_step_that_can_not_be_uploaded_is_journaled_itself() {
    for trouble in [Trouble::Fails, Trouble::Denies, Trouble::Hangs] {
        let world = World::new();
        let (objects, effects) = (Objects::default(), AtomicU32::new(0));
        let store = offloaded(&world, &objects);
        objects.always(Verb::Put, trouble);
        for _ in 0..2 {
            let (ended, _) = as_time_passes(&world, fails_after_a_step(&store, &effects)).await;
            assert!(matches!(ended, Err(Error::NoAttempt)), "{trouble:?}: {ended:?}");
        }
        assert!(journal_bytes(&world).await > 200, "{trouble:?}");
        assert_eq!(effects.load(Relaxed), 1, "{trouble:?}");
    }
}

/// A step that is dropped while its value is uploaded has ended: its name stays taken, and its value is journaled with
/// the next write.
#[tokio::test]
async fn a_step_that_is_dropped_in_its_upload_keeps_its_entry() {
    let world = World::new();
    let (objects, effects) = (Objects::default(), AtomicU32::new(0));
    let store = offloaded(&world, &objects);
    objects.always(Verb::Put, Trouble::Hangs);
    let body = async {
        let attempt = idem_runtime::current()?;
        let rows = async |_| {
            effects.fetch_add(1, Relaxed);
            Ok::<_, Error>("x".repeat(200))
        };
        let mut dropped = Box::pin(attempt.step("rows").run(rows));
        assert!(futures::poll!(dropped.as_mut()).is_pending());
        drop(dropped);
        let again = attempt.step("rows").run(rows).await;
        assert!(matches!(again, Err(Error::Step { problem: StepProblem::UsedTwice, .. })), "{again:?}");
        attempt.step("other").run(async |_| Ok::<_, Error>(0)).await?;
        Err::<(), _>(Error::NoAttempt)
    };
    let call = Operation::new(&store, Ok(key("k")), POLICY).run(body);
    assert!(matches!(as_time_passes(&world, call).await.0, Err(Error::NoAttempt)));
    objects.always(Verb::Put, None);
    let (ended, _) = as_time_passes(&world, fails_after_a_step(&store, &effects)).await;
    assert!(matches!(ended, Err(Error::NoAttempt)), "{ended:?}");
    assert_eq!(effects.load(Relaxed), 1);
}

/// The `finish` of a caller that has lost its lease leaves no object, and does not change the successor's object.
#[tokio::test]
async fn a_refused_finish_removes_its_object() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    let finish = completed(&[b'x'; 200]);
    let late = world.reserved(&store, "k").await;
    world.clock.advance(LEASE);
    let successor = world.reserved(&store, "k").await;
    assert_eq!(store.finish(&late, &finish).await.unwrap(), Verdict::Refused);
    assert_eq!(objects.paths().await, [], "the object of the late attempt is removed");
    // The successor's equal result becomes another object.
    assert_eq!(store.finish(&successor, &finish).await.unwrap(), Verdict::Applied);
    let path = objects.only().await;
    assert_eq!(store.finish(&late, &finish).await.unwrap(), Verdict::Refused);
    assert_eq!(objects.only().await, path);
    assert_eq!(world.replay(&store, "k").await, Record::after(&successor, finish.state()));

    // A finish succeeds even if the removal of the object fails.
    for trouble in [Trouble::Fails, Trouble::Denies, Trouble::Hangs] {
        objects.always(Verb::Delete, trouble);
        let (answer, _) = as_time_passes(&world, store.finish(&late, &finish)).await;
        assert_eq!(answer.unwrap(), Verdict::Refused, "{trouble:?}");
    }
    assert_eq!(world.replay(&store, "k").await, Record::after(&successor, finish.state()));
}

#[tokio::test]
async fn an_object_is_removed_only_if_no_record_can_name_it() {
    let finish = completed(&[b'x'; 200]);
    for (fault, objects_left) in [
        (Fault::Before(StoreErrorKind::TooLarge), 0),
        (Fault::Before(StoreErrorKind::Unavailable), 1),
        (Fault::Before(StoreErrorKind::Unconfirmed), 1),
        (Fault::After, 1),
    ] {
        let world = World::new();
        let objects = Objects::default();
        let store = offloaded(&world, &objects);
        let lease = world.reserved(&store, "k").await;
        world.store.next(StoreCall::Finish, fault);
        store.finish(&lease, &finish).await.unwrap_err();
        assert_eq!(objects.paths().await.len(), objects_left, "{fault:?}");
        // A repeated finish leaves one object and one result.
        for _ in 0..2 {
            assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
            objects.only().await;
        }
        assert_eq!(world.replay(&store, "k").await, Record::after(&lease, finish.state()), "{fault:?}");
        // An operator discards the result, and then the caller repeats the finish. The store refuses the finish, and
        // the wrapper removes the object, which no record names.
        assert_eq!(store.reopen(&lease.key, 1).await.unwrap(), Verdict::Applied);
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Refused);
        assert_eq!(objects.paths().await, []);
    }
}

/// A finished record never changes, and its object never changes.
#[tokio::test]
async fn a_second_result_of_an_attempt_leaves_the_first_result_unchanged() {
    let world = World::new();
    let objects = Objects::default();
    let store = offloaded(&world, &objects);
    let lease = world.reserved(&store, "k").await;
    let first = completed(&[b'1'; 200]);
    assert_eq!(store.finish(&lease, &first).await.unwrap(), Verdict::Applied);
    for other in [completed(&[b'2'; 200]), completed(b"small"), Finish::Failed(stored(&[b'3'; 200]))] {
        let _either = store.finish(&lease, &other).await.unwrap();
        assert_eq!(world.replay(&store, "k").await, Record::after(&lease, first.state()));
    }
    objects.next(Verb::Put, Trouble::Denies);
    let _either = store.finish(&lease, &first).await.unwrap();
    assert_eq!(world.replay(&store, "k").await, Record::after(&lease, first.state()), "repeated without its object");
}

/// A process that dies between the writes of object and record leaves an object without a record. Another attempt takes
/// over the key.
#[tokio::test]
async fn a_dropped_finish_happens_in_full_or_not_at_all() {
    let finish = completed(&[b'x'; 200]);
    for polls in 0..6 {
        let world = World::new();
        let objects = Objects::default();
        let store = offloaded(&world, &objects);
        let lease: Lease = world.reserved(&store, "k").await;
        world.store.next(StoreCall::Finish, Fault::Slow(2));
        drop(polled(store.finish(&lease, &finish), polls.min(4)).await);
        match store.inspect(&key("k")).await.unwrap().unwrap().record {
            record if record.is_finished() => assert_eq!(record, Record::after(&lease, finish.state())),
            pending => assert_eq!((pending.owner, pending.attempt), (lease.owner, 1)),
        }
        assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied, "after {polls} polls");
        assert_eq!(world.replay(&store, "k").await, Record::after(&lease, finish.state()));
        objects.only().await;
    }
}

#[tokio::test]
async fn results_can_be_files_in_a_folder() {
    let folder = std::env::temp_dir().join(format!("idem-offloaded-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let objects = Arc::new(LocalFileSystem::new_with_prefix(&folder).unwrap());
    let memory = MemoryStore::new();
    let world = World::new();
    let store = Offloaded::options().above(100).wrap(memory.clone(), objects);
    let bytes = noise(300_000);
    let record = world.finished(&store, "k", &bytes).await;
    // Another process reads the objects later.
    let objects = Arc::new(LocalFileSystem::new_with_prefix(&folder).unwrap());
    let reader = Offloaded::options().wrap(memory.peer(), objects);
    assert_eq!(world.replay(&reader, "k").await, record);

    let file = walk(&folder);
    for (content, why) in [(&bytes[..1000], "another size"), (&noise(300_001)[1..], "was altered")] {
        std::fs::write(&file, content).unwrap();
        assert!(reason_of(payload(&world.replay(&reader, "k").await)).contains(why));
    }
    std::fs::remove_file(&file).unwrap();
    assert_eq!(reason_of(payload(&world.replay(&reader, "k").await)), "its object is missing");
    // The folder is gone, so nothing can be written to it.
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "a file in its place").unwrap();
    let store = Offloaded::options().above(100).timeout(Duration::from_millis(50));
    let folder_gone: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new());
    let store = store.prefix(folder.to_str().unwrap()).wrap(memory.clone(), folder_gone);
    let record = world.finished(&store, "no folder", &bytes).await;
    assert_eq!(world.replay(&memory, "no folder").await, record, "the result was stored in the record");
    std::fs::remove_file(&folder).unwrap();
}

/// Returns the only file in a folder.
fn walk(folder: &std::path::Path) -> std::path::PathBuf {
    let entry = std::fs::read_dir(folder).unwrap().next().expect("an entry").unwrap().path();
    if entry.is_dir() { walk(&entry) } else { entry }
}

/// A handler may block the runtime of the object store's connections, so the upkeep can have its own object store.
#[tokio::test]
async fn upkeep_can_have_its_own_object_store() {
    let world = World::new();
    let (calls, late) = (Objects::default(), Objects::default());
    let late = Objects { inner: Arc::clone(&calls.inner), ..late };
    let options = Offloaded::options().above(10).upkeep_objects(Arc::new(late.clone()));
    assert!(!format!("{options:?}").contains("Objects"), "{options:?}");
    let store = options.wrap(world.store.clone(), Arc::new(calls.clone()));
    calls.always(Verb::Put, Trouble::Denies);
    let result = [b'x'; 1000];
    let lease = world.reserved(&store, "k").await;
    assert_eq!(store.upkeep().finish(&lease, &completed(&result)).await.unwrap(), Verdict::Applied);
    assert_eq!((calls.count(Verb::Put), late.count(Verb::Put)), (0, 1));
    assert_eq!(codec_of(&kept(&world.store, "k").await), "idem:object");
    assert_eq!(payload(&world.replay(&store, "k").await), &stored(&result));
    assert!(Arc::ptr_eq(&store.upkeep(), &store.upkeep()));
}
