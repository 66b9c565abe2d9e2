//! `SqliteStore` against what one would write by hand over one connection of `rusqlite`, with the same durability.
//!
//! By hand a record is a row with the columns that matter, and there is the same index for clean-up. A first run is an
//! `INSERT` that reserves the key, the same handler, its result as JSON, and an `UPDATE` that compares the owner.
//!
//! - *One commit per step*: each statement is a transaction of its own, as it is where nobody groups them. One thread does
//!   nothing else, and no task waits for anything.
//! - *Same grouping*: a thread takes what waits in a channel, makes one transaction of it, and answers the tasks.
//! - *Bare loop*: the same statements, as many in a transaction as there are tasks, without any task.
//! - *Replay*: a `SELECT` of the very record that the library replays; nothing is decoded, no task waits for anything.
//!
//! Each measurement opens its file anew, and the other side's is closed meanwhile: connections of one process share a pool
//! of cached pages, and what one leaves there can starve the other.
//!
//! The file is below the target folder: on a disk, where that is on one.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use idem_benches::{Goal, Receipt, Table, alternate, is_wanted, sized, thousands_per_second, timed};
use idem_runtime::{Error, SqliteStore, Synchronous, idempotent};
use rusqlite::{Connection, Statement, params};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &SqliteStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
}

/// How many orders there are to replay.
const ORDERS: u64 = 1000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    FirstRun,
    Replay,
}

/// Orders that nobody has had before.
fn new_orders(count: u64) -> std::ops::Range<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(ORDERS);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    first..first + count
}

/// What the lines are measured against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Against {
    OneCommitPerStep,
    SameGrouping,
    BareLoop,
}

impl Against {
    fn name(self) -> &'static str {
        match self {
            Self::OneCommitPerStep => "one commit per step",
            Self::SameGrouping => "same grouping",
            Self::BareLoop => "bare loop",
        }
    }
}

struct Bench {
    folder: PathBuf,
    runtime: Runtime,
    synchronous: Synchronous,
}

impl Bench {
    fn new(synchronous: Synchronous) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-sqlite-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let bench = Self { folder, runtime: runtime.expect("a runtime can be built"), synchronous };
        bench.with_store(|store| bench.ship(store, 0..ORDERS, 64));
        bench
    }

    /// Does `work` with a store that is open meanwhile and closed afterwards.
    fn with_store<T>(&self, work: impl FnOnce(&SqliteStore) -> T) -> T {
        let options = SqliteStore::options().synchronous(self.synchronous);
        let store = self.runtime.block_on(options.open(self.folder.join("idem.db"))).expect("opens");
        let done = work(&store);
        drop(store);
        // Its threads close the file, and the last to do so takes this away.
        while self.folder.join("idem.db-wal").exists() {
            std::thread::yield_now();
        }
        done
    }

    /// Has `tasks` tasks ship the orders, each one after the other.
    fn ship(&self, store: &SqliteStore, orders: std::ops::Range<u64>, tasks: u64) {
        self.runtime.block_on(async {
            let mut running = JoinSet::new();
            for task in 0..tasks {
                let store = store.clone();
                let orders = (orders.start + task..orders.end).step_by(usize::try_from(tasks).expect("few"));
                running.spawn(async move {
                    for order_id in orders {
                        ship(&store, order_id).await.expect("ships");
                    }
                });
            }
            running.join_all().await;
        });
    }

    /// Thousands of calls a second that `tasks` tasks make.
    fn idem(&self, work: Work, tasks: u64, count: u64) -> f64 {
        let took = self.with_store(|store| match work {
            Work::FirstRun => {
                let orders = new_orders(count);
                timed(|| self.ship(store, orders, tasks))
            }
            Work::Replay => {
                timed(|| (0..count.div_ceil(ORDERS)).for_each(|_| self.ship(store, 0..ORDERS.min(count), tasks)))
            }
        });
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }

    fn by_hand(&self, name: &str) -> ByHand {
        ByHand::open(&self.folder.join(name), self.synchronous)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// The protocol by hand.
struct ByHand(Mutex<Connection>);

/// A step, and who waits for it.
type Job = (Step, oneshot::Sender<usize>);

enum Step {
    Reserve(u64),
    Complete(u64, Vec<u8>),
}

/// The statements of both steps.
struct Steps<'c> {
    insert: Statement<'c>,
    update: Statement<'c>,
    begin: Statement<'c>,
    commit: Statement<'c>,
}

impl<'c> Steps<'c> {
    fn new(connection: &'c Connection) -> Self {
        let insert = "INSERT INTO records (key, state, owner, attempt, lapses_at, expires_at, listed_at) \
                      VALUES (?1, 'P', ?2, 1, ?3, ?4, ?5) ON CONFLICT (key) DO NOTHING";
        let update = "UPDATE records SET state = 'C', lapses_at = NULL, expires_at = ?3, result = ?4 \
                      WHERE key = ?1 AND owner = ?2 AND state = 'P'";
        let [insert, update, begin, commit] =
            [insert, update, "BEGIN IMMEDIATE", "COMMIT"].map(|sql| connection.prepare(sql).expect("prepares"));
        Self { insert, update, begin, commit }
    }

    fn transact(&mut self, steps: impl IntoIterator<Item = Step>) {
        self.begin.execute([]).expect("begins");
        let now = now();
        for step in steps {
            assert_eq!(self.perform(&step, now), 1);
        }
        self.commit.execute([]).expect("commits");
    }

    fn perform(&mut self, step: &Step, now: i64) -> usize {
        let (lease, ttl) = (30_000, 7 * 86_400_000_i64);
        let changed = match step {
            Step::Reserve(order_id) => {
                let columns = params![key(*order_id), owner(*order_id), now + lease, now + lease + ttl, now + ttl];
                self.insert.execute(columns)
            }
            Step::Complete(order_id, result) => {
                self.update.execute(params![key(*order_id), owner(*order_id), now + ttl, result])
            }
        };
        changed.expect("executes")
    }
}

impl ByHand {
    fn open(path: &Path, synchronous: Synchronous) -> Self {
        let connection = Connection::open(path).expect("opens");
        let synchronous = if synchronous == Synchronous::Full { "FULL" } else { "NORMAL" };
        let schema = "CREATE TABLE IF NOT EXISTS records (key TEXT NOT NULL PRIMARY KEY, state TEXT NOT NULL, owner BLOB \
                      NOT NULL, attempt INTEGER NOT NULL, lapses_at INTEGER, expires_at INTEGER NOT NULL, listed_at \
                      INTEGER NOT NULL, result BLOB); \
                      CREATE INDEX IF NOT EXISTS records_listed ON records (listed_at);";
        let pragmas = format!("PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous};");
        connection.execute_batch(&pragmas).expect("is set");
        connection.execute_batch(schema).expect("creates");
        Self(Mutex::new(connection))
    }

    /// Thousands of first runs a second, `group` in a transaction.
    fn loops(&self, group: u64, count: u64) -> f64 {
        let connection = self.0.lock().expect("no panic before");
        let mut steps = Steps::new(&connection);
        let mut orders = new_orders(count);
        let took = timed(|| {
            loop {
                let group: Vec<u64> = orders.by_ref().take(usize::try_from(group).expect("few")).collect();
                if group.is_empty() {
                    break;
                }
                steps.transact(group.iter().map(|order_id| Step::Reserve(*order_id)));
                steps.transact(group.iter().map(|order_id| Step::Complete(*order_id, result(*order_id))));
            }
        });
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }

    /// Thousands of first runs a second that `tasks` tasks have a thread make, grouped as they come.
    fn grouped(&self, runtime: &Runtime, tasks: u64, count: u64) -> f64 {
        let (jobs, waiting) = mpsc::channel::<Job>();
        let connection = &self.0;
        let orders = new_orders(count);
        let work = move || {
            let connection = connection.lock().expect("no panic before");
            let mut steps = Steps::new(&connection);
            let mut answers = Vec::new();
            while let Ok(first) = waiting.recv() {
                let group = std::iter::once(first).chain(waiting.try_iter().take(255));
                answers.clear();
                steps.transact(group.map(|(step, answer)| {
                    answers.push(answer);
                    step
                }));
                answers.drain(..).for_each(|answer| answer.send(1).expect("somebody waits"));
            }
        };
        let took = timed(|| {
            std::thread::scope(|scope| {
                scope.spawn(work);
                runtime.block_on(async {
                    let mut running = JoinSet::new();
                    for task in 0..tasks {
                        let jobs = jobs.clone();
                        let orders = (orders.start + task..orders.end).step_by(usize::try_from(tasks).expect("few"));
                        running.spawn(async move {
                            for order_id in orders {
                                ask(&jobs, Step::Reserve(order_id)).await;
                                ask(&jobs, Step::Complete(order_id, result(order_id))).await;
                            }
                        });
                    }
                    drop(jobs);
                    running.join_all().await;
                });
            });
        });
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }

    /// Thousands of replays a second.
    fn replays(&self, count: u64) -> f64 {
        let sql = "SELECT owner, attempt, state, expires_at, result FROM idem_records WHERE key = ?1";
        let connection = self.0.lock().expect("no panic before");
        let mut select = connection.prepare(sql).expect("prepares");
        let took = timed(|| {
            for call in 0..count {
                let result = select.query_row([key(call % ORDERS)], |row| row.get::<_, Vec<u8>>(4)).expect("is there");
                assert!(!result.is_empty());
            }
        });
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }
}

async fn ask(jobs: &mpsc::Sender<Job>, step: Step) {
    let (sender, answer) = oneshot::channel();
    jobs.send((step, sender)).expect("the thread waits");
    assert_eq!(answer.await.expect("answers"), 1);
}

fn result(order_id: u64) -> Vec<u8> {
    serde_json::to_vec(&Receipt::of(order_id)).expect("encodes")
}

fn key(order_id: u64) -> String {
    format!("1/bench::ship/order:{order_id}")
}

fn owner(order_id: u64) -> Vec<u8> {
    u128::from(order_id).to_be_bytes().to_vec()
}

#[allow(clippy::disallowed_methods)] // As by hand.
fn now() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    i64::try_from(now.as_millis()).expect("not yet")
}

fn main() {
    let table = Table::new("SQLite", "thousand a second", "times its throughput");
    for (synchronous, name) in [(Synchronous::Full, "FULL"), (Synchronous::Normal, "NORMAL")] {
        let bench = Bench::new(synchronous);
        let full = synchronous == Synchronous::Full;
        let lines = [
            (1, 1_000, Against::OneCommitPerStep, Goal::None),
            (64, 2_000, Against::OneCommitPerStep, if full { Goal::AtLeast(6.0) } else { Goal::None }),
            (64, 20_000, Against::SameGrouping, if full { Goal::None } else { Goal::AtLeast(0.85) }),
            (64, 20_000, Against::BareLoop, Goal::None),
        ];
        for (tasks, count, against, goal) in lines {
            let line = format!("first run, {name}, {tasks} {} (against {})", several(tasks), against.name());
            if !is_wanted(&line) {
                continue;
            }
            let (count, rounds) = (sized(count, count / 20), sized(9, 1));
            let mut by_hand = || match against {
                Against::OneCommitPerStep => bench.by_hand("by_hand.db").loops(1, count),
                Against::SameGrouping => bench.by_hand("by_hand.db").grouped(&bench.runtime, tasks, count),
                Against::BareLoop => bench.by_hand("by_hand.db").loops(tasks, count),
            };
            let [raw, idem] = alternate(rounds, [&mut by_hand, &mut || bench.idem(Work::FirstRun, tasks, count)]);
            table.line(&line, &raw, &idem, |idem, raw| idem / raw, goal);
        }
        for tasks in [1, 64] {
            let line = format!("replay, {name}, {tasks} {}", several(tasks));
            if !is_wanted(&line) || !full {
                continue;
            }
            let (count, rounds) = (sized(20_000, 1_000), sized(9, 1));
            let [raw, idem] = alternate(
                rounds,
                [&mut || bench.by_hand("idem.db").replays(count), &mut || bench.idem(Work::Replay, tasks, count)],
            );
            table.line(&line, &raw, &idem, |idem, raw| idem / raw, Goal::None);
        }
    }
}

fn several(tasks: u64) -> &'static str {
    if tasks == 1 { "task" } else { "tasks" }
}
