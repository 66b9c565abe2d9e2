//! `PostgresStore` compared with the same SQL by hand, on a server that loses nothing (`fsync` and `synchronous_commit`
//! on).
//!
//! - *First run*, by hand: the same formatted key, `INSERT … ON CONFLICT DO NOTHING` into a table with the same columns
//!   and indexes, the same handler, its result as JSON, and an `UPDATE` that compares the owner. The statements are
//!   prepared and run one by one, each task on its own connection.
//! - *First run*, limit of 64 tasks and more: the same work in statements of many rows (`by_hand::postgres::Gathered`),
//!   which read no records.
//! - *Replay*, by hand: a prepared `SELECT` by primary key of the same result that the library replays, without
//!   decoding. Each task has its own connection.
//! - *Replay*, limit of a lone task: a `SELECT` of all columns that decide whether a record may be replayed, and the
//!   result is decoded.
//!
//! The library has its default pool of 6 connections for every number of tasks. Server and client share the machine.

use std::sync::Arc;

use idem_benches::by_hand::SqlByHand as _;
use idem_benches::by_hand::postgres::{ByHand, Gathered};
use idem_benches::by_hand::{new_orders, share};
use idem_benches::{
    Goal, Receipt, Samples, Sides, Table, alternate, hold, is_wanted, sized, thousands_per_second, timed,
};
use idem_runtime::store::{Lease, Verdict};
use idem_runtime::{Error, PostgresStore, Store, idempotent};
use idem_tests::postgres::PostgresServer;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &PostgresStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    FirstRun,
    Replay,
}

/// Number of orders that are shipped before the measurement, and whose results are then replayed.
const SHIPPED: u64 = 1000;

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::FirstRun => "first run",
            Self::Replay => "replay",
        }
    }

    fn goal(self, tasks: u64) -> Goal {
        match (self, tasks) {
            (Self::FirstRun, 1) => Goal::AtLeast(0.9),
            (Self::FirstRun, 64) | (Self::Replay, 1) => Goal::OfLimit(0.75),
            (Self::Replay, 64) => Goal::AtLeast(1.3),
            _ => Goal::None,
        }
    }

    fn order(self, call: u64) -> u64 {
        match self {
            Self::FirstRun => new_orders(1).start,
            Self::Replay => call % SHIPPED,
        }
    }
}

struct Bench {
    server: PostgresServer,
    runtime: Runtime,
    store: PostgresStore,
    by_hand: Vec<Arc<ByHand>>,
    limit: Gathered,
}

#[derive(Clone, Copy)]
enum Side {
    Idem,
    ByHand,
    Limit,
}

impl Bench {
    fn new(mut runtime: Builder, connections: usize) -> Self {
        let server = PostgresServer::start();
        let runtime = runtime.enable_all().build().expect("a runtime can be built");
        let (store, by_hand, limit) = runtime.block_on(async {
            let store = PostgresStore::options().ensure_schema().connect(&server.url()).await.expect("connects");
            for order_id in 0..SHIPPED {
                ship(&store, order_id).await.expect("ships");
            }
            let by_hand = ByHand::connections(&server.url(), connections).await;
            (store, by_hand, Gathered::connect(&server.url()).await)
        });
        Self { server, runtime, store, by_hand, limit }
    }

    /// Returns thousands of calls per second of `tasks` tasks, which make `count` calls together, each task one call
    /// after the other.
    fn measure(&self, side: Side, work: Work, tasks: u64, count: u64) -> f64 {
        let calls = share(tasks, count, |task, calls| {
            let hand = Arc::clone(&self.by_hand[usize::try_from(task).expect("few")]);
            let (limit, store) = (self.limit.clone(), self.store.clone());
            async move {
                for call in calls {
                    let order_id = work.order(call);
                    match (side, work) {
                        (Side::Idem, _) => drop(ship(&store, order_id).await.expect("ships")),
                        (Side::ByHand, Work::FirstRun) => drop(hand.ship(order_id).await),
                        (Side::ByHand, Work::Replay) => drop(hand.replay(order_id).await),
                        (Side::Limit, Work::FirstRun) => drop(limit.ship(order_id).await),
                        (Side::Limit, Work::Replay) => drop(hand.replay_whole(order_id).await),
                    }
                }
            }
        });
        let took = timed(|| self.runtime.block_on(calls));
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }

    fn number(&self, query: &str) -> f64 {
        self.runtime.block_on(async {
            let query = format!("SELECT ({query})::float8");
            self.server.raw().await.query_one(&query, &[]).await.expect("answers").get(0)
        })
    }

    /// Returns the bytes of log, and of table and indexes, per first run.
    fn bytes(&self, count: u64) -> (f64, f64) {
        let empty = "TRUNCATE idem.records; VACUUM idem.records; CHECKPOINT";
        for statement in empty.split("; ") {
            let done = self.runtime.block_on(async { self.server.raw().await.batch_execute(statement).await });
            done.expect("empties the table");
        }
        let position = "pg_current_wal_insert_lsn() - '0/0'";
        let before = self.number(position);
        // The table is emptied first, because the first change of an old page after a checkpoint logs the whole page.
        self.measure(Side::Idem, Work::FirstRun, 64, count);
        #[allow(clippy::cast_precision_loss)] // Far below 2^52.
        let count = count as f64;
        let log = (self.number(position) - before) / count;
        (log, self.number("pg_total_relation_size('idem.records')") / count)
    }

    /// Returns the milliseconds of one beat of `count` leases, measured `rounds` times.
    fn beats(&self, count: u64, rounds: usize) -> Samples {
        let leases: Vec<Lease> = self.runtime.block_on(async {
            let mut running = JoinSet::new();
            for n in 0..count {
                let store = self.store.clone();
                running.spawn(async move { hold(&*store.handle(), "bench::hold", n).await });
            }
            running.join_all().await
        });
        let beat = || {
            let renewed = self.runtime.block_on(idem_runtime::store::renew_all(&self.store, &leases)).expect("answers");
            assert!(renewed.iter().all(|write| *write == Verdict::Applied));
        };
        let beats: Vec<f64> = (0..rounds).map(|_| timed(beat).as_secs_f64() * 1e3).collect();
        beats.into()
    }
}

fn main() {
    // A single thread runs the lone task: with two threads, its speed varies for seconds, depending on whether the task
    // and its driver run on one core.
    let lone = Bench::new(Builder::new_current_thread(), 1);
    let mut threads = Builder::new_multi_thread();
    threads.worker_threads(2);
    let bench = Bench::new(threads, 256);
    let table = Table::with_limit("PostgreSQL", "thousand a second", "times its throughput");
    for work in [Work::FirstRun, Work::Replay] {
        for (tasks, count, rounds) in [(1, 300, 41), (16, 6000, 11), (64, 12_000, 11), (256, 20_000, 11)] {
            let name = format!("{}, {tasks} {}", work.name(), if tasks == 1 { "task" } else { "tasks" });
            if !is_wanted(&name) {
                continue;
            }
            let (count, rounds) = (sized(count, count / 10), sized(rounds, 1));
            let at = if tasks == 1 { &lone } else { &bench };
            let measure = |side| at.measure(side, work, tasks, count);
            let by_hand = &mut || measure(Side::ByHand);
            let idem = &mut || measure(Side::Idem);
            let (by_hand, limit, idem) =
                if (work == Work::FirstRun && tasks >= 64) || (work == Work::Replay && tasks == 1) {
                    let [by_hand, limit, idem] = alternate(rounds, [by_hand, &mut || measure(Side::Limit), idem]);
                    (by_hand, Some(limit), idem)
                } else {
                    let [by_hand, idem] = alternate(rounds, [by_hand, idem]);
                    (by_hand, None, idem)
                };
            let sides = Sides { raw: &by_hand, limit: limit.as_ref(), idem: &idem };
            table.sides(&name, &sides, |idem, raw| idem / raw, work.goal(tasks));
        }
    }
    if is_wanted("beat") {
        let beats = bench.beats(sized(10_000, 1000), sized(15, 3));
        table.value("one beat of 10 000 leases, ms", &beats, beats.median(), Goal::AtMost(1000.0));
    }
    if is_wanted("bytes") {
        let (log, space) = bench.bytes(sized(100_000, 5000));
        table.value("bytes of log a first run, 64 tasks", &vec![log].into(), log, Goal::None);
        table.value("bytes of table and indexes a record", &vec![space].into(), space, Goal::None);
        // The server adds the counts of a session to its statistics when the session ends.
        let Bench { server, runtime, store, by_hand, limit: _ } = bench;
        drop(store);
        let hot = runtime.block_on(async {
            let raw = server.raw().await;
            let stats = "SELECT (n_tup_hot_upd::float8 / nullif(n_tup_upd, 0))::float8, n_tup_upd >= n_tup_ins \
                         FROM pg_stat_user_tables WHERE schemaname = 'idem'";
            raw.batch_execute("SELECT pg_stat_reset()").await.expect("resets");
            let store = PostgresStore::connect(&server.url()).await.expect("connects");
            let mut running = JoinSet::new();
            for task in 0..64 {
                let store = store.clone();
                running.spawn(async move {
                    for n in 0..sized(500, 50) {
                        ship(&store, 1_000_000_000 + task * 1000 + n).await.expect("ships");
                    }
                });
            }
            running.join_all().await;
            drop(store);
            loop {
                let row = raw.query_one(stats, &[]).await.expect("answers");
                if let (Ok(hot), Ok(true)) = (row.try_get::<_, f64>(0), row.try_get(1)) {
                    break hot;
                }
                tokio::task::yield_now().await;
            }
        });
        table.value("completions that change no index, 64 tasks", &vec![hot].into(), hot, Goal::AtLeast(0.95));
        drop(by_hand);
    }
}
