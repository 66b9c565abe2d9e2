//! Measures the same work on every store, so that users can choose a store. On Redis, PostgreSQL and SQLite, the work
//! is also done by hand with the client of the server or the file.
//!
//! - *First run, replay, in progress*: thousands of calls per second by 1, 64 and 1024 tasks. The benches `redis`,
//!   `postgres` and `sqlite` describe the hand-written code; a replay and a refusal on SQLite are a `SELECT` in a bare
//!   loop.
//! - *Wait*: duplicates in another handle wait for a running attempt. The figure is the time in milliseconds from the
//!   end of the attempt's handler until the last duplicate has the result.
//! - *Results*: thousands of calls per second by 16 tasks, with results of 1 KB, 64 KB and 1 MB.
//! - *Steps*: first runs of a handler without steps and of a handler with three steps. The figure is the time of one
//!   step against half of a first run: a first run makes two writes, and a step makes one.
//! - *Takeovers*: second attempts that find 0, 10 or 100 steps in the journal of the first attempt, and run no step.
//!   The figure is the time of such an attempt against the time of one that finds no journal.
//! - *Leases*: elapsed time and processor time of one renewal of 100 000 leases.
//! - *Hot key*: 10 000 concurrent duplicates from another handle: while the handler runs, after its end, and waiting
//!   for its end. The calls of the store are counted, and the bench fails if a duplicate costs more than one call.
//!
//! A round has a duration, not a number of calls, so the bench takes some 6 minutes on any machine. DynamoDB is an
//! emulator here, with little optimisation and with one request at a time: its figures show the speed of the emulator.
//! The part for DynamoDB needs `--features dynamodb`, and `IDEM_TEST_DYNOXIDE`; the part for NATS needs `--features
//! nats`, and `IDEM_TEST_NATS`; the part for MariaDB needs `--features mysql`.

#![allow(clippy::cast_precision_loss)] // Counts and times of a run are far below 2^52.
#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::any::Any;
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use idem_benches::by_hand::{SqlByHand, new_orders, postgres, redis, share, sqlite};
use idem_benches::{
    Goal, Receipt, Samples, Table, alternate, alternate_all, is_wanted, paced, sized, thousands_per_second, timed,
};
use idem_runtime::metrics::STORE_SECONDS;
use idem_runtime::sqlite::Synchronous;
use idem_runtime::store::{Lease, Release, Verdict};
use idem_runtime::{
    Cached, Error, MemoryStore, Policy, PostgresStore, RedisStore, SqliteStore, Store, StoreExt as _, current,
    idempotent,
};
use idem_tests::cluster::Cluster;
use idem_tests::postgres::PostgresServer;
use idem_tests::server::{Kind, RedisServer};
use idem_tests::sqlite::Folder;
use idem_tests::{FaultyStore, StoreCall};
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const STORES: [&str; 8] =
    ["Memory", "SQLite", "Redis", "Redis Cluster", "PostgreSQL", "MariaDB", "NATS", "DynamoDB (emulator)"];
const TASKS: [u64; 3] = [1, 64, 1024];
/// Number of orders that are shipped before the measurement, and whose results are then replayed.
const SHIPPED: u64 = 1000;
/// Number of orders whose keys are reserved during the whole bench, so that calls for these orders find a running
/// attempt. Their numbers begin at `HELD_FROM`.
const HELD: u64 = 64;
const HELD_FROM: u64 = 500_000;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = shared("bench::ship"))]
async fn ship(store: &dyn Store, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
}

const STEPS: [&str; 3] = ["charge", "reserve", "book"];

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = shared("bench::ship"))]
async fn ship_in_steps(store: &dyn Store, order_id: u64) -> Result<Receipt, Error> {
    let attempt = current()?;
    for name in STEPS {
        attempt.step(name).run(async |_| Ok::<_, Error>(order_id)).await?;
    }
    Ok(Receipt::of(order_id))
}

/// Calls `steps` steps with the keys from 0 on; then fails, if `fails`.
#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = shared("bench::ship"))]
async fn ship_lines(store: &dyn Store, order_id: u64, steps: u64, fails: bool) -> Result<Receipt, Error> {
    let attempt = current()?;
    for line in 0..steps {
        attempt.step(("reserve", line)).run(async |_| Ok::<_, Error>(line)).await?;
    }
    if fails { Err(Error::NoAttempt) } else { Ok(Receipt::of(order_id)) }
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = shared("bench::ship"), policy = LARGE)]
async fn render(store: &dyn Store, order_id: u64, page: &str) -> Result<String, Error> {
    Ok(page.to_owned())
}

const LARGE: Policy = Policy::new(redis::TTL).max_result_bytes(2_000_000);

/// Returns a text of `bytes` letters that compresses poorly.
fn page(bytes: usize) -> Arc<str> {
    let mut state = 1_u64;
    let letter = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'a' + u8::try_from(state >> 60).expect("four bits"))
    };
    (0..bytes).map(letter).collect::<String>().into()
}

/// Gate that keeps a handler running until the bench opens the gate, and counts the runs of the handler.
#[derive(Debug)]
struct Gate {
    runs: AtomicU64,
    entered: Semaphore,
    /// Semaphore that the handler waits for. Closing the semaphore opens the gate.
    leave: Semaphore,
}

impl Gate {
    fn new() -> Arc<Self> {
        Arc::new(Self { runs: AtomicU64::new(0), entered: Semaphore::new(0), leave: Semaphore::new(0) })
    }

    async fn pass(&self, order_id: u64) -> Receipt {
        self.runs.fetch_add(1, Ordering::Relaxed);
        self.entered.add_permits(1);
        drop(self.leave.acquire().await);
        Receipt::of(order_id)
    }

    async fn entered(&self) {
        self.entered.acquire().await.expect("never closed").forget();
    }
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = shared("bench::gate"))]
async fn rejecting(store: &dyn Store, order_id: u64, gate: &Gate) -> Result<Receipt, Error> {
    Ok(gate.pass(order_id).await)
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = shared("bench::gate"), in_progress = wait("10m"))]
async fn waiting(store: &dyn Store, order_id: u64, gate: &Gate) -> Result<Receipt, Error> {
    Ok(gate.pass(order_id).await)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    FirstRun,
    Replay,
    InProgress,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::FirstRun => "first run",
            Self::Replay => "replay",
            Self::InProgress => "in progress",
        }
    }

    /// Returns the number of the order that a call ships. First runs ship new orders, from `new` on.
    fn order(self, call: u64, new: u64) -> u64 {
        match self {
            Self::FirstRun => new + call,
            Self::Replay => call % SHIPPED,
            Self::InProgress => HELD_FROM + call % HELD,
        }
    }
}

async fn call(store: &dyn Store, work: Work, order_id: u64) {
    let answer = ship(store, order_id).await;
    match work {
        Work::InProgress => assert!(matches!(answer, Err(Error::InProgress { .. })), "{answer:?}"),
        Work::FirstRun | Work::Replay => assert_eq!(answer.expect("ships").order_id, order_id),
    }
}

/// Hand-written code that a line compares with the library; `None` if there is no such code for the store.
enum Raw {
    None,
    /// Redis: two hand-written clients, one with the default socket, and one with `TCP_NODELAY`.
    Redis([redis::ByHand; 2]),
    Postgres(Vec<Arc<postgres::ByHand>>),
    #[cfg(feature = "mysql")]
    MySql(Vec<Arc<idem_benches::by_hand::mysql::ByHand>>),
    Sqlite,
    #[cfg(feature = "nats")]
    Nats(idem_benches::by_hand::nats::ByHand),
}

/// One side of a comparison: a function that makes a given number of calls, and returns thousands of calls per second.
type Side<'a> = Box<dyn FnMut(u64) -> f64 + 'a>;

/// A store, with its server if the store has a server.
struct Subject {
    name: &'static str,
    runtime: Runtime,
    store: Arc<dyn Store>,
    /// A second handle of the same store, which simulates another process.
    peer: Arc<dyn Store>,
    raw: Raw,
    /// The file of SQLite, opened anew for each measurement and by no other handle meanwhile: see the bench `sqlite`.
    file: Option<PathBuf>,
    leases: u64,
    largest_result: usize,
    /// Number of duplicates that may call concurrently.
    crowd: u64,
    /// The store's server. The field is the last one, so that the server is dropped after all its clients.
    _server: Box<dyn Any>,
}

impl Subject {
    fn new(name: &'static str, runtime: Runtime, stores: [Arc<dyn Store>; 2], server: impl Any) -> Self {
        let [store, peer] = stores;
        let subject = Self {
            name,
            runtime,
            store,
            peer,
            raw: Raw::None,
            file: None,
            leases: sized(100_000, 500),
            largest_result: usize::MAX,
            crowd: u64::MAX,
            _server: Box::new(server),
        };
        subject.runtime.block_on(async {
            share(64, SHIPPED, |_, calls| {
                let store = Arc::clone(&subject.store);
                async move {
                    for order_id in calls {
                        ship(&*store, order_id).await.expect("ships");
                    }
                }
            })
            .await;
            hold(&subject.peer, "bench::ship", HELD_FROM, HELD).await;
        });
        subject
    }

    fn memory() -> Self {
        let store = MemoryStore::options().max_records(usize::MAX).build();
        Self::new("Memory", runtime(), [store.handle(), store.handle()], ())
    }

    fn sqlite() -> Self {
        let (folder, runtime) = (Folder::new(), runtime());
        let file = folder.file();
        let open = || runtime.block_on(SqliteStore::open(&file)).expect("opens").handle();
        let stores = [open(), open()];
        Self { raw: Raw::Sqlite, file: Some(file), ..Self::new("SQLite", runtime, stores, folder) }
    }

    fn redis() -> Self {
        let (server, runtime) = (RedisServer::start(Kind::Redis), runtime());
        let url = server.url();
        let (stores, raw) = runtime.block_on(async {
            let open = async || RedisStore::connect(&url).await.expect("connects").handle();
            let raw = [redis::ByHand::connect(&url, false).await, redis::ByHand::connect(&url, true).await];
            ([open().await, open().await], raw)
        });
        Self { raw: Raw::Redis(raw), ..Self::new("Redis", runtime, stores, server) }
    }

    fn cluster() -> Self {
        let (cluster, runtime) = (Cluster::start_with(3, 0, 5000), runtime());
        let url = format!("redis-cluster://127.0.0.1:{}", cluster.nodes[0].port());
        let stores = runtime.block_on(async {
            let open = async || RedisStore::connect(&url).await.expect("connects").handle();
            [open().await, open().await]
        });
        Self::new("Redis Cluster", runtime, stores, cluster)
    }

    fn postgres() -> Self {
        let (server, runtime) = (PostgresServer::start(), runtime());
        let url = server.url();
        let (stores, raw) = runtime.block_on(async {
            let open =
                async || PostgresStore::options().ensure_schema().connect(&url).await.expect("connects").handle();
            let stores = [open().await, open().await];
            (stores, postgres::ByHand::connections(&url, sized(256, 64)).await)
        });
        runtime.block_on(async {
            for order_id in HELD_FROM..HELD_FROM + HELD {
                assert_eq!(raw[0].reserve(order_id).await, 1);
            }
        });
        Self { raw: Raw::Postgres(raw), ..Self::new("PostgreSQL", runtime, stores, server) }
    }

    #[cfg(feature = "mysql")]
    fn mariadb() -> Self {
        use idem_benches::by_hand::mysql::ByHand;
        use idem_runtime::MySqlStore;
        let (server, runtime) = (idem_tests::mysql::MySqlServer::start(), runtime());
        let url = server.url();
        let (stores, raw) = runtime.block_on(async {
            let open = async || MySqlStore::options().ensure_schema().connect(&url).await.expect("connects").handle();
            let stores = [open().await, open().await];
            let raw = ByHand::connections(&url, sized(256, 64)).await;
            for order_id in HELD_FROM..HELD_FROM + HELD {
                assert_eq!(raw[0].reserve(order_id).await, 1);
            }
            (stores, raw)
        });
        Self { raw: Raw::MySql(raw), ..Self::new("MariaDB", runtime, stores, server) }
    }

    #[cfg(feature = "nats")]
    fn nats() -> Self {
        use idem_benches::by_hand::nats::ByHand;
        let (server, runtime) = (idem_tests::nats::NatsServer::start(), runtime());
        let url = server.url();
        let (stores, raw) = runtime.block_on(async {
            let open = async || idem_runtime::NatsStore::connect(&url).await.expect("connects").handle();
            let raw = ByHand::connect(&url).await;
            for order_id in (0..SHIPPED).chain(HELD_FROM..HELD_FROM + HELD) {
                raw.ship(order_id).await;
            }
            ([open().await, open().await], raw)
        });
        Self { raw: Raw::Nats(raw), largest_result: 1_000_000, ..Self::new("NATS", runtime, stores, server) }
    }

    #[cfg(feature = "nats")]
    fn raw_nats(&self, raw: &idem_benches::by_hand::nats::ByHand, work: Work, tasks: u64, count: u64) -> f64 {
        let new = new_orders(count).start;
        let calls = share(tasks, count, |_, calls| {
            let raw = raw.clone();
            async move {
                for order_id in calls.map(|n| work.order(n, new)) {
                    match work {
                        Work::FirstRun => drop(raw.ship(order_id).await),
                        Work::Replay => drop(raw.replay::<Receipt>(order_id).await),
                        Work::InProgress => drop(raw.in_progress(order_id).await),
                    }
                }
            }
        });
        self.rate(count, calls)
    }

    #[cfg(feature = "dynamodb")]
    fn dynamodb() -> Self {
        use idem_tests::dynamo::{Emulator, Kind, TABLE, open};
        let runtime = runtime();
        let emulator = runtime.block_on(Emulator::with_table(Kind::Dynoxide));
        let stores = [(); 2].map(|()| open(&emulator.endpoint(), TABLE).handle());
        Self {
            leases: sized(2000, 100),
            largest_result: 300_000,
            crowd: 256,
            ..Self::new("DynamoDB (emulator)", runtime, stores, emulator)
        }
    }

    fn table(&self, section: &str, unit: &str, result: &str) -> Table {
        Table::new(&format!("{}: {section}", self.name), unit, result)
    }

    /// Runs `work` with the store. The file of SQLite is opened for `work` alone.
    fn with_store<T>(&self, work: impl FnOnce(&Arc<dyn Store>) -> T) -> T {
        let Some(file) = &self.file else { return work(&self.store) };
        work(&self.runtime.block_on(SqliteStore::open(file)).expect("opens").handle())
    }

    fn idem(&self, work: Work, tasks: u64, count: u64) -> f64 {
        self.with_store(|store| {
            let new = new_orders(count).start;
            let calls = share(tasks, count, |_, calls| {
                let store = Arc::clone(store);
                async move {
                    for n in calls {
                        call(&*store, work, work.order(n, new)).await;
                    }
                }
            });
            self.rate(count, calls)
        })
    }

    fn rate(&self, count: u64, calls: impl Future<Output = ()>) -> f64 {
        thousands_per_second(timed(|| self.runtime.block_on(calls)), usize::try_from(count).expect("few"))
    }

    fn raw_redis(&self, raw: &redis::ByHand, work: Work, tasks: u64, count: u64) -> f64 {
        let new = new_orders(count).start;
        let calls = share(tasks, count, |_, calls| {
            let mut raw = raw.clone();
            async move {
                for order_id in calls.map(|n| work.order(n, new)) {
                    match work {
                        Work::FirstRun => drop(raw.ship(order_id).await),
                        Work::Replay => drop(raw.replay::<Receipt>(order_id).await),
                        Work::InProgress => drop(raw.in_progress(order_id).await),
                    }
                }
            }
        });
        self.rate(count, calls)
    }

    fn raw_sql(&self, raw: &[Arc<impl SqlByHand>], work: Work, tasks: u64, count: u64) -> f64 {
        let new = new_orders(count).start;
        let calls = share(tasks, count, |task, calls| {
            let raw = Arc::clone(&raw[usize::try_from(task).expect("few") % raw.len()]);
            async move {
                for order_id in calls.map(|n| work.order(n, new)) {
                    match work {
                        Work::FirstRun => drop(raw.ship(order_id).await),
                        Work::Replay => drop(raw.replay(order_id).await),
                        Work::InProgress => assert_eq!(raw.reserve(order_id).await, 0),
                    }
                }
            }
        });
        self.rate(count, calls)
    }

    fn raw_sqlite(&self, work: Work, tasks: u64, count: u64) -> f64 {
        let file = self.file.as_ref().expect("a file");
        let open = |file| sqlite::ByHand::open(file, Synchronous::Full, sqlite::Rows::Least);
        let by_hand = file.with_file_name("by_hand.db");
        match work {
            Work::FirstRun if tasks == 1 => open(&by_hand).loops(1, count),
            Work::FirstRun => open(&by_hand).grouped(&self.runtime, tasks, count),
            Work::Replay | Work::InProgress => open(file).replays(SHIPPED, count),
        }
    }

    fn calls(&self) {
        let table = self.table("calls", "thousand a second", "times its throughput");
        let rounds = sized(9, 1);
        for work in [Work::FirstRun, Work::Replay, Work::InProgress] {
            for tasks in TASKS.into_iter().take(sized(3, 2)) {
                let name = format!("{}, {tasks} {}", work.name(), if tasks == 1 { "task" } else { "tasks" });
                if !self.is_wanted(&name) {
                    continue;
                }
                let mut sides: Vec<Side<'_>> = vec![Box::new(|count| self.idem(work, tasks, count))];
                sides.extend(self.by_hand(work, tasks));
                let target = Duration::from_millis(sized(150, 1));
                let mut sides: Vec<_> = sides.into_iter().map(|side| paced(target, tasks.max(20), side)).collect();
                let mut sides: Vec<_> = sides.iter_mut().map(|side| -> &mut dyn FnMut() -> f64 { side }).collect();
                let mut samples = alternate_all(rounds, &mut sides).into_iter();
                let idem = samples.next().expect("the first side");
                match samples.max_by(|a, b| a.median().total_cmp(&b.median())) {
                    Some(raw) => table.line(&name, &raw, &idem, |idem, raw| idem / raw, Goal::None),
                    None => table.value(&name, &idem, idem.median(), Goal::None),
                }
            }
        }
    }

    /// Returns thousands of first runs of the handler with steps per second.
    fn runs_in_steps(&self, tasks: u64, count: u64) -> f64 {
        self.with_store(|store| {
            let new = new_orders(count).start;
            let calls = share(tasks, count, |_, calls| {
                let store = Arc::clone(store);
                async move {
                    for order_id in calls.map(|n| new + n) {
                        assert_eq!(ship_in_steps(&*store, order_id).await.expect("ships").order_id, order_id);
                    }
                }
            });
            self.rate(count, calls)
        })
    }

    fn steps(&self) {
        let table = self.table("steps", "thousand first runs a second", "time of a step, in halves of a first run");
        for tasks in [1, 64] {
            let name = format!("step, {tasks} {}", if tasks == 1 { "task" } else { "tasks" });
            if !self.is_wanted(&name) {
                continue;
            }
            let target = Duration::from_millis(sized(300, 1));
            let mut without = paced(target, tasks.max(20), |count| self.idem(Work::FirstRun, tasks, count));
            let mut with = paced(target, tasks.max(20), |count| self.runs_in_steps(tasks, count));
            let [without, with] = alternate(sized(15, 1), [&mut without, &mut with]);
            // A run with steps takes 1 / `with`, a run without takes 1 / `without`.
            let of_a_step = |with, without| (without / with - 1.0) / STEPS.len() as f64 * 2.0;
            table.line(&name, &without, &with, of_a_step, Goal::None);
        }
    }

    /// Returns thousands of second attempts per second, each with the journal of a first attempt with `steps` steps.
    fn takeovers(&self, tasks: u64, steps: u64, count: u64) -> f64 {
        self.with_store(|store| {
            let new = new_orders(count + 1).start;
            let journal = self.runtime.block_on(async {
                ship_lines(&**store, new, steps, true).await.expect_err("the first attempt fails");
                let key = store.operator().key(&format!("bench::ship/order:{new}")).expect("a key");
                store.inspect(&key).await.expect("answers").expect("a record").record.journal
            });
            // Not timed: each key gets the journal in one write, as if its first attempt had made these steps.
            self.runtime.block_on(async {
                for lease in hold(store, "bench::ship", new + 1, count).await {
                    if let Some(journal) = &journal {
                        assert_eq!(store.append(&lease, journal).await.expect("answers"), Verdict::Applied);
                    }
                    assert_eq!(store.release(&lease, Release::Returned).await.expect("answers"), Verdict::Applied);
                }
            });
            let calls = share(tasks, count, |_, calls| {
                let store = Arc::clone(store);
                async move {
                    for order_id in calls.map(|n| new + 1 + n) {
                        let receipt = ship_lines(&*store, order_id, steps, false).await.expect("ships");
                        assert_eq!(receipt.order_id, order_id);
                    }
                }
            });
            self.rate(count, calls)
        })
    }

    fn journals(&self) {
        let table = self.table("takeovers", "thousand a second", "time against an attempt without a journal");
        for (steps, tasks) in [(10, 1), (100, 1), (10, 64), (100, 64)] {
            let name = format!("takeover, {steps} entries, {tasks} {}", if tasks == 1 { "task" } else { "tasks" });
            if !self.is_wanted(&name) {
                continue;
            }
            let target = Duration::from_millis(sized(100, 1));
            let mut without = paced(target, tasks.max(20), |count| self.takeovers(tasks, 0, count));
            let mut with = paced(target, tasks.max(20), |count| self.takeovers(tasks, steps, count));
            let [without, with] = alternate(sized(9, 1), [&mut without, &mut with]);
            table.line(&name, &without, &with, |with, without| without / with, Goal::None);
        }
    }

    /// Returns the hand-written sides. A line of the table compares the library with the fastest of them.
    fn by_hand(&self, work: Work, tasks: u64) -> Vec<Side<'_>> {
        match &self.raw {
            Raw::None => Vec::new(),
            Raw::Redis([default, nodelay]) => vec![
                Box::new(move |count| self.raw_redis(default, work, tasks, count)),
                Box::new(move |count| self.raw_redis(nodelay, work, tasks, count)),
            ],
            Raw::Postgres(raw) => vec![Box::new(move |count| self.raw_sql(raw, work, tasks, count))],
            #[cfg(feature = "mysql")]
            Raw::MySql(raw) => vec![Box::new(move |count| self.raw_sql(raw, work, tasks, count))],
            #[cfg(feature = "nats")]
            Raw::Nats(raw) => vec![Box::new(move |count| self.raw_nats(raw, work, tasks, count))],
            Raw::Sqlite => vec![Box::new(move |count| self.raw_sqlite(work, tasks, count))],
        }
    }

    fn waits(&self) {
        let table = self.table("wait", "ms", "until the last has its result");
        for tasks in TASKS.into_iter().take(sized(3, 2)) {
            let name = format!("wait, {tasks} {}", if tasks == 1 { "task" } else { "tasks" });
            if self.is_wanted(&name) {
                let waits: Vec<f64> = (0..sized(7, 1)).map(|_| self.wait(tasks).0.as_secs_f64() * 1e3).collect();
                let waits = Samples::from(waits);
                table.value(&name, &waits, waits.median(), Goal::None);
            }
        }
    }

    /// Returns the time from the end of a handler until the last of `duplicates` has its result, and the number of
    /// calls that the store of the duplicates got.
    fn wait(&self, duplicates: u64) -> (Duration, u64) {
        let (gate, peer, order_id) = (Gate::new(), &self.peer, new_orders(1).start);
        let answered = |labels: &[(&str, &str)]| peer.metrics().count(&STORE_SECONDS, labels);
        let (asked, before) = (answered(&[("op", "reserve")]), answered(&[]));
        self.runtime.block_on(async {
            let runner = self.start(order_id, &gate).await;
            let mut waiters = JoinSet::new();
            for _ in 0..duplicates {
                let (gate, peer) = (Arc::clone(&gate), Arc::clone(peer));
                waiters.spawn(async move {
                    let receipt = waiting(&*peer, order_id, &gate).await.expect("is replayed");
                    assert_eq!(receipt.order_id, order_id);
                    Instant::now()
                });
            }
            while answered(&[("op", "reserve")]) - asked < duplicates {
                pause(Duration::from_millis(5)).await;
            }
            // After this pause all duplicates wait.
            pause(Duration::from_millis(100)).await;
            let ended = Instant::now();
            gate.leave.close();
            let last = waiters.join_all().await.into_iter().max().expect("some");
            runner.await.expect("ships");
            assert_eq!(gate.runs.load(Ordering::Relaxed), 1, "the handler ran more than once");
            (last.saturating_duration_since(ended), answered(&[]) - before)
        })
    }

    /// Starts a call of `order_id` whose handler runs until `gate` opens.
    async fn start(&self, order_id: u64, gate: &Arc<Gate>) -> tokio::task::JoinHandle<()> {
        let (store, its_gate) = (Arc::clone(&self.store), Arc::clone(gate));
        let runner = tokio::spawn(async move {
            waiting(&*store, order_id, &its_gate).await.expect("ships");
        });
        gate.entered().await;
        runner
    }

    fn results(&self) {
        let table = self.table("results", "thousand a second", "times its throughput");
        for (size, bytes) in [("1 KB", 1_000), ("64 KB", 64_000), ("1 MB", 1_000_000)] {
            if bytes > self.largest_result || bytes > sized(usize::MAX, 64_000) {
                continue;
            }
            // Each round records only some 5 MB, so that the records of all rounds fit into the memory of the machine.
            let count = sized((5_000_000 / bytes as u64).min(500), 16);
            let page = page(bytes);
            for work in [Work::FirstRun, Work::Replay] {
                let name = format!("{} of {size}, 16 tasks", work.name());
                if !self.is_wanted(&name) {
                    continue;
                }
                // Both sides replay the library's latest results.
                let last = Cell::new(new_orders(count).start);
                let next = || match work {
                    Work::FirstRun => new_orders(count).start,
                    _ => last.get(),
                };
                let mut idem = || {
                    last.set(next());
                    self.result(last.get(), count, &page)
                };
                idem();
                let rounds = sized(7, 1);
                let is_compared = match &self.raw {
                    Raw::Redis(_) | Raw::Postgres(_) => true,
                    #[cfg(feature = "mysql")]
                    Raw::MySql(_) => true,
                    _ => false,
                };
                if is_compared {
                    let mut raw = || self.raw_result(work, next(), count, &page);
                    let [raw, idem] = alternate(rounds, [&mut raw, &mut idem]);
                    table.line(&name, &raw, &idem, |idem, raw| idem / raw, Goal::None);
                } else {
                    let [idem] = alternate(rounds, [&mut idem]);
                    table.value(&name, &idem, idem.median(), Goal::None);
                }
            }
        }
    }

    /// Makes `count` calls for the orders from `first` on, whose result is `page`. Returns thousands of calls per
    /// second.
    fn result(&self, first: u64, count: u64, page: &Arc<str>) -> f64 {
        let calls = share(16, count, |_, calls| {
            let (store, page) = (Arc::clone(&self.store), Arc::clone(page));
            async move {
                for n in calls {
                    assert_eq!(render(&*store, first + n, &page).await.expect("renders").len(), page.len());
                }
            }
        });
        self.rate(count, calls)
    }

    fn raw_result(&self, work: Work, first: u64, count: u64, page: &Arc<str>) -> f64 {
        match &self.raw {
            Raw::Redis([raw, _]) => {
                let calls = share(16, count, |_, calls| {
                    let (mut raw, page) = (raw.clone(), Arc::clone(page));
                    async move {
                        for order_id in calls.map(|n| first + n) {
                            match work {
                                Work::FirstRun => drop(raw.run(order_id, || (*page).to_owned()).await),
                                _ => assert_eq!(raw.replay::<String>(order_id).await.len(), page.len()),
                            }
                        }
                    }
                });
                self.rate(count, calls)
            }
            #[cfg(feature = "nats")]
            Raw::Nats(raw) => {
                let calls = share(16, count, |_, calls| {
                    let (raw, page) = (raw.clone(), Arc::clone(page));
                    async move {
                        for order_id in calls.map(|n| first + n) {
                            match work {
                                Work::FirstRun => drop(raw.run(order_id, || (*page).to_owned()).await),
                                _ => assert_eq!(raw.replay::<String>(order_id).await.len(), page.len()),
                            }
                        }
                    }
                });
                self.rate(count, calls)
            }
            Raw::Postgres(raw) => self.raw_sql_result(raw, work, first, count, page),
            #[cfg(feature = "mysql")]
            Raw::MySql(raw) => self.raw_sql_result(raw, work, first, count, page),
            Raw::None | Raw::Sqlite => unreachable!("not compared"),
        }
    }

    fn raw_sql_result(&self, raw: &[Arc<impl SqlByHand>], work: Work, first: u64, count: u64, page: &Arc<str>) -> f64 {
        let calls = share(16, count, |task, calls| {
            let raw = Arc::clone(&raw[usize::try_from(task).expect("few")]);
            let page = Arc::clone(page);
            async move {
                for order_id in calls.map(|n| first + n) {
                    match work {
                        Work::FirstRun => drop(raw.run(order_id, || (*page).to_owned()).await),
                        _ => assert!(raw.replay(order_id).await.len() > page.len()),
                    }
                }
            }
        });
        self.rate(count, calls)
    }

    fn leases(&self) {
        let name = format!("one renewal of {} leases", self.leases);
        if !self.is_wanted(&name) {
            return;
        }
        let table = self.table("leases", "ms", "result");
        let leases = self.runtime.block_on(hold(&self.store, "bench::leases", 0, self.leases));
        // At most as many calls are in flight at a time as in a heartbeat.
        let upkeep = self.store.upkeep();
        let (mut elapsed, mut server, mut own) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=sized(5, 1) {
            let before = (cpu_of_children(), cpu_of_this_process());
            let took = timed(|| {
                let renewed = self.runtime.block_on(idem_runtime::store::renew_all(&upkeep, &leases)).expect("answers");
                assert!(renewed.iter().all(|write| *write == Verdict::Applied), "a lease was lost");
            });
            if round > 0 {
                elapsed.push(took.as_secs_f64() * 1e3);
                server.push(cpu_of_children() - before.0);
                own.push(cpu_of_this_process() - before.1);
            }
        }
        let lines = [("elapsed", elapsed), ("processor time of the server", server), ("of this process", own)];
        for (what, samples) in lines {
            let samples = Samples::from(samples);
            table.value(&format!("{name}: {what}"), &samples, samples.median(), Goal::None);
        }
    }

    fn hot_key(&self) {
        let duplicates: u64 = sized(10_000, 100);
        let name = format!("hot key, {duplicates} duplicates");
        if !self.is_wanted(&name) {
            return;
        }
        let table = self.table("hot key", "ms; calls of the store for each duplicate", "result");
        let crowd = duplicates.min(self.crowd);
        let (gate, peer, order_id) = (Gate::new(), FaultyStore::new(&*self.peer), new_orders(1).start);
        // All duplicates call for one order. No duplicate may run the handler.
        let ask = |store: Arc<dyn Store>, finished: bool| {
            let took = timed(|| {
                self.runtime.block_on(share(crowd, duplicates, |_, calls| {
                    let (store, gate) = (Arc::clone(&store), Arc::clone(&gate));
                    async move {
                        for _ in calls {
                            match rejecting(&*store, order_id, &gate).await {
                                Ok(receipt) => assert!(finished && receipt.order_id == order_id),
                                Err(Error::InProgress { .. }) => assert!(!finished),
                                Err(error) => panic!("{error:?}"),
                            }
                        }
                    }
                }));
            });
            took.as_secs_f64() * 1e3
        };
        let print = |when: &str, took: f64, calls: usize, most: Option<f64>| {
            let each = calls as f64 / duplicates as f64;
            table.value(&format!("{name} {when}: ms"), &vec![took].into(), took, Goal::None);
            let goal = most.map_or(Goal::None, Goal::AtMost);
            table.value(&format!("{name} {when}: calls each"), &vec![each].into(), each, goal);
            assert!(most.is_none_or(|most| each <= most), "{when}: {each} calls for each duplicate");
        };

        // While the handler runs, each duplicate is refused after one call of the store.
        let runner = self.runtime.block_on(self.start(order_id, &gate));
        let took = ask(peer.handle(), false);
        print("while it runs", took, all_calls(&peer), Some(1.0));
        gate.leave.close();
        self.runtime.block_on(runner).expect("ships");

        let before = all_calls(&peer);
        let took = ask(peer.handle(), true);
        print("after it", took, all_calls(&peer) - before, Some(1.0));

        // Duplicates in the handler's process, behind a cache: the first two calls read the store, later calls do not.
        let counted = FaultyStore::new(&*self.store);
        let cached = Cached::new(counted.clone());
        self.runtime.block_on(async {
            for _ in 0..2 {
                rejecting(&cached, order_id, &gate).await.expect("is replayed");
            }
        });
        let took = ask(cached.handle(), true);
        print("after it, behind `Cached`", took, all_calls(&counted), Some(0.1));
        assert_eq!(gate.runs.load(Ordering::Relaxed), 1, "the handler ran more than once");

        // Waiting duplicates: their store sends one wait for all of them.
        let (took, calls) = self.wait(crowd);
        let each = calls as f64 / crowd as f64;
        let took = took.as_secs_f64() * 1e3;
        let name = format!("hot key, {crowd} duplicates wait");
        table.value(&format!("{name}: ms"), &vec![took].into(), took, Goal::None);
        table.value(&format!("{name}: calls each"), &vec![each].into(), each, Goal::None);
    }

    /// Returns whether the command line selects the line, by its own name or with the name of its store in front.
    fn is_wanted(&self, work: &str) -> bool {
        is_wanted(&format!("{}: {work}", self.name))
    }

    fn measure(self) {
        self.calls();
        self.steps();
        self.journals();
        self.results();
        self.waits();
        self.hot_key();
        self.leases();
    }
}

/// Returns the number of calls of `Store` methods that the store got.
fn all_calls(store: &FaultyStore) -> usize {
    let calls = [
        StoreCall::Reserve,
        StoreCall::Renew,
        StoreCall::Finish,
        StoreCall::Release,
        StoreCall::Wait,
        StoreCall::Inspect,
        StoreCall::Decide,
    ];
    calls.map(|call| store.count(call)).iter().sum()
}

/// Reserves `count` orders, from `from` on, for longer than the bench takes. Returns their leases.
async fn hold(store: &Arc<dyn Store>, scope: &'static str, from: u64, count: u64) -> Vec<Lease> {
    let leases = Arc::new(Mutex::new(Vec::new()));
    share(count.min(256), count, |_, calls| {
        let (store, leases) = (Arc::clone(store), Arc::clone(&leases));
        async move {
            for n in calls {
                let lease = idem_benches::hold(&*store, scope, from + n).await;
                leases.lock().expect("no panic before").push(lease);
            }
        }
    })
    .await;
    std::mem::take(&mut *leases.lock().expect("no panic before"))
}

/// Returns the milliseconds of processor time that this process's servers, and their child processes, have used so far.
fn cpu_of_children() -> f64 {
    let mut processes = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("a Linux").flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // The name in parentheses may contain any character.
        let Some((pid, rest)) = stat.split_once(' ') else { continue };
        let fields: Vec<&str> = rest.rsplit_once(')').map_or(rest, |(_, rest)| rest).split_whitespace().collect();
        let field = |n: usize| fields.get(n).and_then(|it| it.parse::<u64>().ok()).unwrap_or_default();
        // Fields 11 to 14 after the name hold user and kernel time of the process, and of its ended children, in ticks.
        let ticks: u64 = (11..15).map(field).sum();
        processes.push((pid.parse::<u64>().unwrap_or_default(), field(1), ticks));
    }
    let mut family = vec![u64::from(std::process::id())];
    let mut ticks = 0;
    while let Some(parent) = family.pop() {
        for (pid, _, its_ticks) in processes.iter().filter(|process| process.1 == parent) {
            family.push(*pid);
            ticks += its_ticks;
        }
    }
    ticks as f64 * 10.0
}

fn cpu_of_this_process() -> f64 {
    let now = Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("since it started");
    now.as_secs_f64() * 1e3
}

async fn pause(duration: Duration) {
    tokio::time::sleep(duration).await;
}

fn runtime() -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be built")
}

fn main() {
    // `-- Redis` selects one store, `-- "Redis: hot key"` one part of it, `-- "hot key"` this part of every store.
    let is_asked = |name: &str| {
        let mut filters = std::env::args().skip(1).filter(|it| !it.starts_with('-')).peekable();
        let asks = |filter: String| match filter.split_once(':') {
            Some((store, _)) => store == name,
            None => name.starts_with(&filter) || !STORES.iter().any(|store| store.starts_with(&filter)),
        };
        filters.peek().is_none() || filters.any(asks)
    };
    let starts = [Subject::memory, Subject::sqlite, Subject::redis, Subject::cluster, Subject::postgres];
    for (name, start) in STORES.into_iter().zip(starts) {
        if is_asked(name) {
            start().measure();
        }
    }
    #[cfg(feature = "mysql")]
    if is_asked("MariaDB") {
        Subject::mariadb().measure();
    }
    #[cfg(feature = "nats")]
    if is_asked("NATS") {
        Subject::nats().measure();
    }
    #[cfg(feature = "dynamodb")]
    if is_asked("DynamoDB (emulator)") {
        Subject::dynamodb().measure();
    }
}
