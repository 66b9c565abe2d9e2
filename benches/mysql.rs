//! `MySqlStore` compared with the same SQL by hand, on a MariaDB or MySQL that loses nothing
//! (`innodb_flush_log_at_trx_commit = 1`).
//!
//! - *First run*, by hand: the same formatted key, `INSERT … ON DUPLICATE KEY UPDATE` into a table with the same
//!   columns and indexes, the same handler, its result as JSON, and an `UPDATE` that compares the owner. The statements
//!   are prepared and run one by one, each task on its own connection.
//! - *Replay*, by hand: a prepared `SELECT` by primary key of the same result that the library replays, without
//!   decoding. Each task has its own connection.
//!
//! The library has its default pool of connections for every number of tasks. Server and client share the machine.

use std::sync::Arc;

use idem_benches::by_hand::SqlByHand as _;
use idem_benches::by_hand::mysql::ByHand;
use idem_benches::by_hand::{new_orders, share};
use idem_benches::{Goal, Receipt, Table, alternate, is_wanted, sized, thousands_per_second, timed};
use idem_runtime::{Error, MySqlStore, idempotent};
use idem_tests::mysql::MySqlServer;
use tokio::runtime::{Builder, Runtime};

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &MySqlStore, order_id: u64) -> Result<Receipt, Error> {
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
            (Self::FirstRun, 64) => Goal::AtLeast(2.0),
            (Self::Replay, 1) => Goal::AtLeast(0.7),
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
    /// Ends with the bench.
    _server: MySqlServer,
    runtime: Runtime,
    store: MySqlStore,
    by_hand: Vec<Arc<ByHand>>,
}

impl Bench {
    fn new(mut runtime: Builder, connections: usize) -> Self {
        let server = MySqlServer::start_with(&["--max-connections=400"]);
        let runtime = runtime.enable_all().build().expect("a runtime can be built");
        let (store, by_hand) = runtime.block_on(async {
            let store = MySqlStore::options().ensure_schema().connect(&server.url()).await.expect("connects");
            for order_id in 0..SHIPPED {
                ship(&store, order_id).await.expect("ships");
            }
            (store, ByHand::connections(&server.url(), connections).await)
        });
        Self { _server: server, runtime, store, by_hand }
    }

    /// Returns thousands of calls per second of `tasks` tasks, which make `count` calls together, each task one call
    /// after the other.
    fn measure(&self, by_hand: bool, work: Work, tasks: u64, count: u64) -> f64 {
        let calls = share(tasks, count, |task, calls| {
            let hand = by_hand.then(|| Arc::clone(&self.by_hand[usize::try_from(task).expect("few")]));
            let store = self.store.clone();
            async move {
                for call in calls {
                    let order_id = work.order(call);
                    match &hand {
                        Some(hand) if work == Work::FirstRun => drop(hand.ship(order_id).await),
                        Some(hand) => drop(hand.replay(order_id).await),
                        None => drop(ship(&store, order_id).await.expect("ships")),
                    }
                }
            }
        });
        let took = timed(|| self.runtime.block_on(calls));
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }
}

fn main() {
    // A single thread runs the lone task, as in the bench `postgres`.
    let lone = Bench::new(Builder::new_current_thread(), 1);
    let mut threads = Builder::new_multi_thread();
    threads.worker_threads(2);
    let bench = Bench::new(threads, 256);
    let kind = if idem_tests::mysql::is_mariadb() { "MariaDB" } else { "MySQL" };
    let table = Table::new(kind, "thousand a second", "times its throughput");
    for work in [Work::FirstRun, Work::Replay] {
        for (tasks, count, rounds) in [(1, 300, 41), (16, 4000, 11), (64, 8000, 11), (256, 12_000, 11)] {
            let name = format!("{}, {tasks} {}", work.name(), if tasks == 1 { "task" } else { "tasks" });
            if !is_wanted(&name) {
                continue;
            }
            let (count, rounds) = (sized(count, count / 10), sized(rounds, 1));
            let at = if tasks == 1 { &lone } else { &bench };
            let [by_hand, idem] = alternate(
                rounds,
                [&mut || at.measure(true, work, tasks, count), &mut || at.measure(false, work, tasks, count)],
            );
            table.line(&name, &by_hand, &idem, |idem, raw| idem / raw, work.goal(tasks));
        }
    }
}
