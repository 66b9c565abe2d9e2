//! The protocol by hand over one connection of `rusqlite`.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use idem_runtime::SqliteStore;
use idem_runtime::sqlite::Synchronous;
use rusqlite::{Connection, Statement, params};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::by_hand::new_orders;
use crate::{Receipt, thousands_per_second, timed};

/// A connection to the file. Threads use this connection in turn.
pub struct ByHand {
    connection: Mutex<Connection>,
    path: PathBuf,
    rows: Rows,
}

/// Rows of the first runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rows {
    /// The columns that the protocol needs, and one index.
    Least,
    /// The columns and indexes of the library, which people and later attempts need, too.
    OfLibrary,
}

/// A step of a first run, and the channel to the task that waits for the step.
type Job = (Step, oneshot::Sender<usize>);

enum Step {
    Reserve(u64),
    Complete(u64, Vec<u8>),
}

/// The statements of the two steps: reserve and complete.
struct Steps<'c> {
    insert: Statement<'c>,
    update: Statement<'c>,
    begin: Statement<'c>,
    commit: Statement<'c>,
}

impl<'c> Steps<'c> {
    fn new(connection: &'c Connection, rows: Rows) -> Self {
        let least = [
            "INSERT INTO records (key, state, owner, attempt, lapses_at, expires_at, listed_at) \
             VALUES (?1, 'P', ?2, 1, ?3, ?4, ?5) ON CONFLICT (key) DO NOTHING",
            "UPDATE records SET state = 'C', lapses_at = NULL, expires_at = ?3, result = ?4 \
             WHERE key = ?1 AND owner = ?2 AND state = 'P'",
        ];
        let of_library = [
            "INSERT INTO whole (key, state, owner, attempt, lapses_at, expires_at, listed_at, format, attempts_used, \
             on_crash_fail, begun, lease_ms, ttl_ms, holder, began_at, first_seen_at) VALUES (?1, 'pending', ?2, 1, ?3, ?4, ?5, \
             1, 1, 0, 0, 30000, 604800000, 'host/1234/worker', ?3 - 30000, ?3 - 30000) ON CONFLICT (key) DO NOTHING",
            "UPDATE whole SET state = 'completed', on_crash_fail = 0, begun = 0, lease_ms = NULL, ttl_ms = NULL, \
             lapses_at = NULL, expires_at = ?3, codec = 'json', result_bytes = NULL, result = ?4 \
             WHERE key = ?1 AND owner = ?2 AND attempt = 1 AND state = 'pending' AND format = 1 AND expires_at > ?3 - ttl_ms",
        ];
        let [insert, update] = if rows == Rows::Least { least } else { of_library };
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
    /// Opens the file at `path`, and creates the table of the hand-written side.
    pub fn open(path: &Path, synchronous: Synchronous, rows: Rows) -> Self {
        let connection = Connection::open(path).expect("opens");
        let synchronous = if synchronous == Synchronous::Full { "FULL" } else { "NORMAL" };
        let schema = "CREATE TABLE IF NOT EXISTS records (key TEXT NOT NULL PRIMARY KEY, state TEXT NOT NULL, owner BLOB \
                      NOT NULL, attempt INTEGER NOT NULL, lapses_at INTEGER, expires_at INTEGER NOT NULL, listed_at \
                      INTEGER NOT NULL, result BLOB); \
                      CREATE INDEX IF NOT EXISTS records_listed ON records (listed_at);";
        let pragmas = format!("PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous};");
        connection.execute_batch(&pragmas).expect("is set");
        connection.execute_batch(schema).expect("creates");
        connection.execute_batch(&SqliteStore::schema_sql("whole")).expect("creates");
        Self { connection: Mutex::new(connection), path: path.to_owned(), rows }
    }

    /// Returns thousands of first runs per second, with `group` first runs in each transaction.
    pub fn loops(&self, group: u64, count: u64) -> f64 {
        let connection = self.connection.lock().expect("no panic before");
        let mut steps = Steps::new(&connection, self.rows);
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

    /// Returns thousands of first runs per second. `tasks` tasks delegate the steps to a thread, which groups the steps
    /// as they arrive.
    pub fn grouped(&self, runtime: &Runtime, tasks: u64, count: u64) -> f64 {
        let (jobs, waiting) = mpsc::channel::<Job>();
        let (connection, rows) = (&self.connection, self.rows);
        let orders = new_orders(count);
        let work = move || {
            let connection = connection.lock().expect("no panic before");
            let mut steps = Steps::new(&connection, rows);
            let mut answers = Vec::new();
            while let Ok(first) = waiting.recv() {
                let group = std::iter::once(first).chain(waiting.try_iter().take(255));
                answers.clear();
                steps.transact(group.map(|(step, answer)| {
                    answers.push(answer);
                    step
                }));
                answers.drain(..).for_each(|answer| answer.send(1).expect("a task waits"));
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

    /// Returns thousands of replays per second, of the first `orders` orders that the library has shipped in this file.
    pub fn replays(&self, orders: u64, count: u64) -> f64 {
        let sql = "SELECT owner, attempt, state, expires_at, result FROM idem_records WHERE key = ?1";
        let connection = self.connection.lock().expect("no panic before");
        let mut select = connection.prepare(sql).expect("prepares");
        let took = timed(|| {
            for call in 0..count {
                let result = select.query_row([key(call % orders)], |row| row.get::<_, Vec<u8>>(4)).expect("is there");
                assert!(!result.is_empty());
            }
        });
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }

    /// Returns thousands of replays per second that read and check as much as the library: the files at their paths,
    /// and all columns that decide whether the record may be replayed. The result is decoded.
    pub fn whole_replays(&self, orders: u64, count: u64) -> f64 {
        let sql = "SELECT format, expires_at, state, owner, attempt, attempts_used, fingerprint, on_crash_fail, lease_ms, \
                   ttl_ms, lapses_at, traceparent, began_at, begun, codec, result_bytes, result FROM idem_records WHERE key = ?1";
        let connection = self.connection.lock().expect("no panic before");
        let mut select = connection.prepare(sql).expect("prepares");
        let files = ["", "-wal", "-shm"].map(|end| PathBuf::from(format!("{}{end}", self.path.display())));
        let took = timed(|| {
            for call in 0..count {
                assert!(files.iter().all(|file| file.metadata().is_ok()));
                let receipt = select.query_row([key(call % orders)], |row| {
                    assert!(row.get_ref(2)?.as_str()? == "completed" && row.get::<_, i64>(1)? > now());
                    Ok(serde_json::from_slice::<Receipt>(row.get_ref(16)?.as_blob()?).expect("decodes"))
                });
                std::hint::black_box(receipt.expect("is there"));
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

#[allow(clippy::disallowed_methods)] // The hand-written side reads the clock itself.
fn now() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    i64::try_from(now.as_millis()).expect("not yet")
}
