//! Processes that fork in the middle of calls: no child waits for a lock that a thread of its parent holds.
//!
//! A fork copies every lock in its present state, and only the thread that forks. The parents in these tests have
//! threads in every part of the library while they fork, and each child calls handlers. `IDEM_FORKS` is the number of
//! forks for each store (default: 60).
#![allow(clippy::disallowed_methods, reason = "these tests wait for real processes")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use fork::Fork;
#[cfg(feature = "postgres")]
use idem_runtime::PostgresStore;
#[cfg(feature = "sqlite")]
use idem_runtime::SqliteStore;
use idem_runtime::clock::SystemClock;
use idem_runtime::key::{KeyBuilder, Scope};
use idem_runtime::store::{HealthProblem, StoreContext, StoreExt};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use idem_runtime::within::OpenTransaction;
use idem_runtime::{Error, InProgress, Key, MemoryStore, Operation, Policy, Store, StoreErrorKind};
#[cfg(feature = "postgres")]
use idem_tests::postgres::PostgresServer;
use idem_tests::server::{Kind, RedisServer};
#[cfg(feature = "sqlite")]
use idem_tests::sqlite::Folder;
use idem_tests::stores;
use tokio::runtime::Builder;

const ALONE: &str = "IDEM_TEST_ALONE";
/// Time after which a child counts as hanging; shorter than SQLite's limit of 30 s for an answer.
const DEADLINE: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_millis(100);
const POLICY: Policy = Policy::new(Duration::from_secs(3600));
/// Number of handlers that a parent runs concurrently. In every second handler the body sleeps and needs renewals.
const BUSY: u64 = 32;

/// Returns true in a process that runs only the test `name`. In any other process, runs the test alone in a new
/// process, where the test must pass, and returns false.
fn is_alone(name: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut alone = Command::new(std::env::current_exe().unwrap());
    let ended = alone.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let (said, wrong) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success() && said.contains("1 passed"), "{said}{wrong}");
    false
}

/// Calls a handler whose body sleeps for `sleeps`.
async fn call(store: &dyn Store, key: &str, lease: Duration, sleeps: Duration) -> Result<u32, Error> {
    let policy = POLICY.lease(lease).in_progress(InProgress::Wait(LEASE));
    // A busy machine renews leases late. A late renewal must not end the body.
    let policy = policy.max_pause(Duration::from_secs(3600));
    let body = async {
        tokio::time::sleep(sleeps).await;
        Ok::<_, Error>(1)
    };
    Operation::new(store, Key::new("forks", key), policy).run(body).await
}

/// Calls like [`call`] until the store answers in time. On a busy machine a store may answer later than a lease lasts.
async fn call_until_answered(store: &dyn Store, key: &str, sleeps: Duration) -> Result<u32, Error> {
    loop {
        match call(store, key, LEASE, sleeps).await {
            Err(Error::Store { source, .. }) if source.to_string().contains("later than the lease lasts") => {}
            ended => return ended,
        }
    }
}

/// Reports whether a child may get this error. The memory store and the SQLite store refuse calls if a thread of the
/// parent was inside the store during the fork.
fn is_refused(error: &Error) -> bool {
    let Error::Store { source, .. } = error else { return false };
    source.kind() == StoreErrorKind::Misconfigured && source.to_string().contains("forked")
}

/// Calls a handler in the child. Its body checks that the child renews this lease, and none of its parent, and that the
/// record names the child as its holder.
async fn renews_its_lease(store: Arc<dyn Store>, number: usize) -> Result<(), Error> {
    let key = Key::new("forks", format!("leases of child {number}")).expect("a key");
    let operation = Operation::new(&*store, Ok(key.clone()), POLICY);
    let body = async {
        let health = store.health().await;
        let is_renewed = !health.problems.iter().any(|problem| matches!(problem, HealthProblem::NoHeartbeat));
        assert!(is_renewed && health.leases == 1, "child {number}: {health}");
        // A store in memory is a copy of the parent's store, with the parent's name.
        if let (Ok(Some(found)), false) = (store.inspect(&key).await, store.context().name() == "memory") {
            let process = found.holder().and_then(|holder| holder.process());
            assert_eq!(process, Some(std::process::id()), "child {number}: {found:?}");
        }
        Ok(())
    };
    operation.run(body).await
}

/// Calls handlers in the child, and replays them. Returns the errors.
async fn child(store: Arc<dyn Store>, number: usize) -> Vec<Error> {
    // The first call of the child, because a later call could hide that an earlier one has started no renewals.
    let renewed = renews_its_lease(Arc::clone(&store), number).await;
    let calls = (0..4).map(|at| {
        let (store, key) = (Arc::clone(&store), format!("child {number} {at}"));
        // The first body takes longer than a lease.
        let sleeps = if at == 0 { LEASE * 3 / 2 } else { Duration::ZERO };
        tokio::spawn(async move {
            call_until_answered(&*store, &key, sleeps).await?;
            call_until_answered(&*store, &key, sleeps).await
        })
    });
    let calls: Vec<_> = calls.collect();
    let mut refused = Vec::from_iter(renewed.err());
    for call in calls {
        refused.extend(call.await.expect("no panic").err());
    }
    refused
}

/// Handlers of a parent. They pause while a child runs, so that the child gets enough processor time.
struct Busy {
    store: Arc<dyn Store>,
    calls: AtomicU64,
    paused: AtomicBool,
}

impl Busy {
    async fn work(&self, at: u64) {
        loop {
            while self.paused.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let number = self.calls.fetch_add(1, Ordering::Relaxed);
            // Two handlers share each key, so one of them may wait. Short leases keep the upkeep thread at work.
            let (key, lease) = (format!("parent {}", number / 2), Duration::from_millis(3 + number % 20));
            let sleeps = if at.is_multiple_of(2) { Duration::from_millis(number % 30) } else { Duration::ZERO };
            let _ = call(&*self.store, &key, lease, sleeps).await;
        }
    }

    /// Lets the handlers run until `calls` more calls have begun.
    fn goes_on(&self, calls: u64) {
        let before = self.calls.load(Ordering::Relaxed);
        self.paused.store(false, Ordering::Relaxed);
        while self.calls.load(Ordering::Relaxed) < before + calls {
            std::thread::yield_now();
        }
    }
}

/// Number of forks in each test.
fn forks() -> usize {
    std::env::var("IDEM_FORKS").map_or(60, |forks| forks.parse().expect("a number"))
}

/// Forks [`forks`] children, one after the other, and fails if a child fails, or if more than `may_hang` children hang.
/// The parent runs `goes_on` before each fork, and the child runs `child`. Each fork sets `paused`, which `goes_on` has
/// to clear.
fn no_child_hangs(paused: &AtomicBool, may_hang: usize, goes_on: impl Fn(usize), child: impl Fn(usize)) {
    let (forks, mut hung) = (forks(), Vec::new());
    for number in 0..forks {
        goes_on(number);
        match fork::fork().unwrap() {
            Fork::Child => {
                let ended = catch_unwind(AssertUnwindSafe(|| child(number)));
                std::process::exit(i32::from(ended.is_err()));
            }
            Fork::Parent(child) => {
                paused.store(true, Ordering::Relaxed);
                match ends(child) {
                    Some(status) => assert_eq!(status, 0, "child {number} failed"),
                    None => hung.push(number),
                }
            }
        }
        // Stop early, because each hanging child takes as long as the deadline.
        assert!(hung.len() < 3, "of {} children, these children hang: {hung:?}", number + 1);
    }
    assert!(hung.len() <= may_hang, "of {forks} children, these children hang: {hung:?}");
}

/// Forks children while handlers run. The bodies of `held` further handlers never end, so that the upkeep has many
/// leases. At most `may_hang` children may hang.
fn forks_while_busy(held: u64, may_refuse: bool, may_hang: usize, open: impl AsyncFnOnce() -> Arc<dyn Store>) {
    let parents = Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    // The parent runs busy handlers, and handlers that never end.
    let store = parents.block_on(open());
    let (calls, paused) = (AtomicU64::new(0), AtomicBool::new(false));
    let busy = Arc::new(Busy { store: Arc::clone(&store), calls, paused });
    for at in 0..BUSY {
        let busy = Arc::clone(&busy);
        parents.spawn(async move { busy.work(at).await });
    }
    for at in 0..held {
        let store = Arc::clone(&store);
        let lease = Duration::from_millis(200 + at % 100);
        parents.spawn(async move { call(&*store, &format!("held {at}"), lease, Duration::from_secs(3600)).await });
    }
    let child = |number| {
        // The child's runtime has one thread. With tokio's feature `parking_lot`, which any crate may enable, several
        // threads would share a table of the process, and a fork may copy this table in the middle of a change.
        let own = Builder::new_current_thread().enable_all().build().unwrap();
        let refused = own.block_on(child(Arc::clone(&store), number));
        for error in refused {
            assert!(may_refuse && is_refused(&error), "child {number}: {error}");
        }
    };
    // Each fork comes after another number of calls, so that it finds the handlers at different points.
    no_child_hangs(&busy.paused, may_hang, |number| busy.goes_on(BUSY + number as u64 % 31), child);
    assert!(parents.block_on(call_until_answered(&*store, "parent goes on", Duration::ZERO)).is_ok());
    parents.shutdown_background();
}

/// Exit status of a child; `None` if the child hangs.
fn ends(child: i32) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < DEADLINE {
        if let Some(status) = fork::waitpid_nohang(child).unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Command::new("kill").args(["-9", &child.to_string()]).status().unwrap();
    fork::waitpid(child).unwrap();
    None
}

/// Counts the steps that threads repeat while the process forks. At most [`STEPS`] are allowed for each fork.
struct Steps {
    taken: AtomicUsize,
    allowed: AtomicUsize,
    paused: AtomicBool,
}

const STEPS: usize = 2000;

impl Steps {
    /// Forks children that run `child` while threads repeat `step`. `step` gets the number of this step; `child` gets
    /// the number of the fork and the number of the latest step.
    fn fork(step: impl Fn(usize) + Send + Sync + 'static, child: impl Fn(usize, usize)) {
        let (taken, allowed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let steps = Arc::new(Self { taken, allowed, paused: AtomicBool::new(true) });
        let step = Arc::new(step);
        for _ in 0..3 {
            let (steps, step) = (Arc::clone(&steps), Arc::clone(&step));
            std::thread::spawn(move || {
                loop {
                    while steps.paused.load(Ordering::Relaxed) || steps.taken() >= steps.allowed.load(Ordering::Relaxed)
                    {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    step(steps.taken.fetch_add(1, Ordering::Relaxed));
                }
            });
        }
        let goes_on = |number: usize| {
            let before = steps.taken();
            steps.allowed.store(before + STEPS - 100, Ordering::Relaxed);
            steps.paused.store(false, Ordering::Relaxed);
            while steps.taken() < before + 10 + number % 31 {
                std::thread::yield_now();
            }
        };
        no_child_hangs(&steps.paused, 0, goes_on, |number| child(number, steps.taken()));
    }

    fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

/// Makes one call with a store in memory, without a runtime: the store answers immediately.
fn call_now(store: &MemoryStore, scope: &str, key: &str) -> Result<u32, Error> {
    let call = Operation::new(store, Key::new(scope, key), POLICY).run(async { Ok::<_, Error>(1) });
    let Poll::Ready(ended) = pin!(call).poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("a store in memory answers at the first poll");
    };
    ended
}

fn leaked(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

#[test]
fn a_child_never_hangs_in_the_first_call_of_a_handler() {
    if is_alone("a_child_never_hangs_in_the_first_call_of_a_handler") {
        // Leaks one scope for each step, as the attribute makes one for each handler.
        let scopes = (0..forks() * STEPS).map(|number| Scope::named(leaked(format!("handler {number}"))));
        let scopes: &'static [Scope] = Box::leak(scopes.collect());
        let first_use = |scope: &Scope| {
            let mut key = KeyBuilder::new(scope);
            key.text("x");
            key.build().unwrap();
        };
        Steps::fork(
            move |number| first_use(&scopes[number]),
            move |number, latest| {
                scopes[latest.saturating_sub(16)..][..32].iter().for_each(first_use);
                first_use(&Scope::named(leaked(format!("child {number}"))));
            },
        );
    }
}

#[test]
fn a_child_never_hangs_in_the_first_call_of_a_store_handle() {
    if is_alone("a_child_never_hangs_in_the_first_call_of_a_store_handle") {
        let first_use = |name: &str| {
            let handle = StoreContext::in_process("memory", Arc::new(SystemClock::default())).held_by(name);
            assert!(handle.holder().name() == Some(name));
        };
        (0..1000).for_each(|number| first_use(&format!("worker {number}")));
        Steps::fork(
            move |number| first_use(&format!("worker {}", number % 1000)),
            move |number, _| first_use(&format!("child {number}")),
        );
    }
}

#[test]
fn a_child_never_hangs_in_the_first_call_of_a_scope() {
    if is_alone("a_child_never_hangs_in_the_first_call_of_a_scope") {
        let store = MemoryStore::new();
        // Uses up the scopes that have counters of their own (200), so that later scopes share counters.
        (0..200).for_each(|number| drop(call_now(&store, &format!("scope {number}"), "key")));
        let calls = store.clone();
        Steps::fork(
            move |number| drop(call_now(&calls, &format!("later scope {number}"), "key")),
            move |number, _| {
                for at in 0..8 {
                    let ended = call_now(&store, &format!("scope of child {number} {at}"), "key");
                    assert!(ended.as_ref().err().is_none_or(is_refused), "{ended:?}");
                }
            },
        );
    }
}

#[test]
fn a_child_never_hangs_where_the_store_of_its_parent_fails() {
    if is_alone("a_child_never_hangs_where_the_store_of_its_parent_fails") {
        let store = MemoryStore::options().max_records(1).build();
        call_now(&store, "forks", "the only one").unwrap();
        let calls = store.clone();
        let fails = |store: &MemoryStore, key: &str| {
            let Err(error) = call_now(store, "forks", key) else { panic!("the store is full") };
            let is_full = matches!(&error, Error::Store { source, .. } if source.kind() == StoreErrorKind::Full);
            assert!(is_full || is_refused(&error), "{error}");
        };
        Steps::fork(
            move |number| fails(&calls, &format!("parent {number}")),
            move |number, _| (0..8).for_each(|at| fails(&store, &format!("child {number} {at}"))),
        );
    }
}

/// Exporter that stops one thread of the parent: the first thread that makes a counter while `is_armed` is set. This
/// thread goes on when `goes_on` is set. Threads of a child are never stopped.
#[cfg(feature = "metrics")]
#[derive(Default)]
struct SlowExporter {
    parent: u32,
    is_armed: AtomicBool,
    stands: AtomicBool,
    goes_on: AtomicBool,
}

#[cfg(feature = "metrics")]
impl metrics::Recorder for &'static SlowExporter {
    fn describe_counter(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_gauge(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_histogram(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}

    fn register_counter(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        if std::process::id() == self.parent && self.is_armed.swap(false, Ordering::SeqCst) {
            self.stands.store(true, Ordering::SeqCst);
            while !self.goes_on.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        metrics::Counter::noop()
    }

    fn register_gauge(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        metrics::Gauge::noop()
    }

    fn register_histogram(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

#[cfg(feature = "metrics")]
impl SlowExporter {
    /// Forks while the exporter stops a thread of the parent in `call`, where the thread makes a counter. The child
    /// runs `call` too.
    fn fork(&self, what: &str, call: impl Fn() + Sync) {
        self.stands.store(false, Ordering::SeqCst);
        self.goes_on.store(false, Ordering::SeqCst);
        self.is_armed.store(true, Ordering::SeqCst);
        std::thread::scope(|threads| {
            threads.spawn(&call);
            while !self.stands.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let child = match fork::fork().unwrap() {
                Fork::Child => std::process::exit(i32::from(catch_unwind(AssertUnwindSafe(&call)).is_err())),
                Fork::Parent(child) => child,
            };
            let ended = ends(child);
            self.goes_on.store(true, Ordering::SeqCst);
            assert_eq!(ended, Some(0), "the child, {what}");
        });
    }
}

#[test]
#[cfg(feature = "metrics")]
fn a_child_never_hangs_where_its_parent_makes_counters() {
    if is_alone("a_child_never_hangs_where_its_parent_makes_counters") {
        let exporter = SlowExporter { parent: std::process::id(), ..SlowExporter::default() };
        let exporter: &'static SlowExporter = Box::leak(Box::new(exporter));
        assert!(metrics::set_global_recorder(exporter).is_ok());
        let store = MemoryStore::new();
        let calls = |scope: &str| assert!(call_now(&store, scope, &format!("key of {}", std::process::id())).is_ok());
        exporter.fork("of a store handle", || calls("first"));
        exporter.fork("of a handler", || calls("second"));
        #[cfg(feature = "sqlite")]
        exporter.fork("of all transactions", || {
            let mut connection = rusqlite::Connection::open_in_memory().unwrap();
            connection.execute_batch(&SqliteStore::schema_sql("idem_records")).unwrap();
            let transaction = OpenTransaction::new(connection.transaction().unwrap());
            let call = SqliteStore::within(&transaction).operation(Key::new("forks", "within"), POLICY);
            let own = Builder::new_current_thread().enable_all().build().unwrap();
            assert_eq!(own.block_on(call.run(async { Ok::<_, Error>(1) })).unwrap(), 1);
        });
    }
}

/// Polls a call once; the call waits for the transaction's running call.
#[cfg(feature = "postgres")]
fn wait_for_turn(transaction: &OpenTransaction<tokio_postgres::Transaction<'_>>, runtime: &tokio::runtime::Handle) {
    let _entered = runtime.enter();
    let call = PostgresStore::within(transaction).operation(Key::new("forks", "waits"), POLICY);
    let mut call = pin!(call.run(async { Ok::<_, Error>(1) }));
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

/// Makes two calls in a transaction of a new connection.
#[cfg(feature = "postgres")]
async fn pay_twice(url: &str, key: &str) {
    let mut client = idem_tests::postgres::raw(url).await;
    let transaction = OpenTransaction::new(client.transaction().await.unwrap());
    for _ in 0..2 {
        let call = PostgresStore::within(&transaction).operation(Key::new("forks", key), POLICY);
        assert_eq!(call.run(async { Ok::<_, Error>(1) }).await.unwrap(), 1);
    }
    transaction.into_inner().commit().await.unwrap();
}

#[test]
#[cfg(feature = "postgres")]
fn a_child_never_hangs_in_a_transaction() {
    if is_alone("a_child_never_hangs_in_a_transaction") {
        let server = PostgresServer::start();
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (url, handle) = (server.url(), runtime.handle().clone());
        let transaction: &'static OpenTransaction<tokio_postgres::Transaction<'static>> = runtime.block_on(async {
            PostgresStore::options().ensure_schema().connect(&url).await.unwrap();
            let client = Box::leak(Box::new(idem_tests::postgres::raw(&url).await));
            Box::leak(Box::new(OpenTransaction::new(client.transaction().await.unwrap())))
        });
        let (runs, run) = std::sync::mpsc::channel();
        let running = handle.clone();
        std::thread::spawn(move || {
            let call = PostgresStore::within(transaction).operation(Key::new("forks", "runs"), POLICY);
            running.block_on(call.run(async {
                runs.send(()).unwrap();
                std::future::pending::<Result<u32, Error>>().await
            }))
        });
        run.recv().unwrap();
        let children = url.clone();
        Steps::fork(
            move |_| wait_for_turn(transaction, &handle),
            move |number, _| {
                let own = Builder::new_current_thread().enable_all().build().unwrap();
                own.block_on(pay_twice(&children, &format!("child {number}")));
            },
        );
        runtime.block_on(pay_twice(&url, "parent"));
        runtime.shutdown_background();
    }
}

#[test]
fn a_child_of_a_busy_process_never_hangs_with_a_store_in_memory() {
    if is_alone("a_child_of_a_busy_process_never_hangs_with_a_store_in_memory") {
        forks_while_busy(4000, true, 0, async || Arc::new(MemoryStore::new()) as _);
    }
}

#[test]
#[cfg(feature = "sqlite")]
fn a_child_of_a_busy_process_never_hangs_with_sqlite() {
    if is_alone("a_child_of_a_busy_process_never_hangs_with_sqlite") {
        let folder = Folder::new();
        let spec = format!("sqlite {}", folder.file().display());
        forks_while_busy(20, true, 0, async || {
            let path = folder.file();
            // Other tasks open and close connections, and so take locks inside SQLite.
            tokio::spawn(async move {
                loop {
                    let opened = idem_runtime::SqliteStore::open(&path).await;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    drop(opened);
                }
            });
            // Long time limits delay no refusal: a store that is inherited in a bad state refuses calls immediately.
            stores::open(&spec, Duration::from_secs(100)).await
        });
    }
}

#[test]
fn a_child_of_a_busy_process_never_hangs_with_redis() {
    if is_alone("a_child_of_a_busy_process_never_hangs_with_redis") {
        let server = RedisServer::start(Kind::Redis);
        let spec = format!("redis {} forks", server.url());
        forks_while_busy(1000, false, 0, async || stores::open(&spec, Duration::from_secs(100)).await);
    }
}

#[test]
#[cfg(feature = "mysql")]
fn a_child_of_a_busy_process_never_hangs_with_mysql() {
    if is_alone("a_child_of_a_busy_process_never_hangs_with_mysql") {
        let server = idem_tests::mysql::MySqlServer::start_with(&["--innodb-flush-log-at-trx-commit=2"]);
        let spec = format!("mysql {} idem_records", server.url());
        // The client keeps its buffers in a queue of the process. If the fork catches a thread in the middle of a
        // change of this queue, the child spins. That happens to one of some thousand children.
        forks_while_busy(1000, false, 1, async || {
            let made = idem_runtime::MySqlStore::options().ensure_schema().connect(&server.url()).await;
            drop(made.unwrap());
            stores::open(&spec, Duration::from_secs(100)).await
        });
    }
}

#[test]
#[cfg(feature = "nats")]
fn a_child_of_a_busy_process_never_hangs_with_nats() {
    if is_alone("a_child_of_a_busy_process_never_hangs_with_nats") {
        let server = idem_tests::nats::NatsServer::start();
        let spec = format!("nats {} forks", server.url());
        forks_while_busy(1000, false, 0, async || stores::open(&spec, Duration::from_secs(100)).await);
    }
}
