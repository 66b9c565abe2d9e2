//! `SqliteStore` compared with hand-written code over one connection of `rusqlite`, with the same durability.
//!
//! By hand, a record is a row with the necessary columns, and has the same index for clean-up. A first run is an
//! `INSERT` that reserves the key, the same handler, its result as JSON, and an `UPDATE` that compares the owner.
//!
//! - *One commit per step*: each statement is a transaction, as without grouping. One thread makes all calls, and no
//!   task waits.
//! - *Same grouping*: a thread takes the waiting steps from a channel, runs them in one transaction, and answers the
//!   tasks. The limit does this with the rows of the library.
//! - *Bare loop*: the same statements without tasks. Each transaction has one first run for each task of the library.
//! - *Replay*: a `SELECT` of the record that the library replays; the result is not decoded, and no task waits. The
//!   limit of a lone task reads all columns that decide whether the record may be replayed, decodes the result, and
//!   checks before each read that the three files are still at their paths.
//!
//! Each measurement opens its file anew, while the other side's file is closed: connections of one process share a pool
//! of cached pages, and the pages of one file can displace the pages of the other.
//!
//! The file is in the target folder, so the bench measures the disk on which that folder is.

use std::path::{Path, PathBuf};

use idem_benches::by_hand::new_orders;
use idem_benches::by_hand::sqlite::{ByHand, Rows};
use idem_benches::{Goal, Receipt, Sides, Table, alternate, is_wanted, sized, thousands_per_second, timed};
use idem_runtime::sqlite::Synchronous;
use idem_runtime::{Error, SqliteStore, idempotent};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &SqliteStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
}

/// Number of orders that are shipped before the measurement, and whose results are then replayed.
const ORDERS: u64 = 1000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    FirstRun,
    Replay,
}

/// Hand-written code with which a line compares the library.
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

    /// Runs `work` with a store that is closed afterwards.
    fn with_store<T>(&self, work: impl FnOnce(&SqliteStore) -> T) -> T {
        let options = SqliteStore::options().synchronous(self.synchronous);
        let store = self.runtime.block_on(options.open(self.folder.join("idem.db"))).expect("opens");
        let done = work(&store);
        drop(store);
        // The store's threads close the file, and the last thread to close it removes the log.
        while self.folder.join("idem.db-wal").exists() {
            std::thread::yield_now();
        }
        done
    }

    /// Ships the orders with `tasks` tasks, each task one order after the other.
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

    /// Returns thousands of calls per second that `tasks` tasks make with the library.
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

    fn by_hand(&self, rows: Rows) -> ByHand {
        ByHand::open(&self.folder.join("by_hand.db"), self.synchronous, rows)
    }

    fn replays_by_hand(&self, count: u64, is_whole: bool) -> f64 {
        let by_hand = ByHand::open(&self.folder.join("idem.db"), self.synchronous, Rows::Least);
        if is_whole { by_hand.whole_replays(ORDERS, count) } else { by_hand.replays(ORDERS, count) }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

fn main() {
    let table = Table::with_limit("SQLite", "thousand a second", "times its throughput");
    let times: fn(f64, f64) -> f64 = |idem, raw| idem / raw;
    for (synchronous, name) in [(Synchronous::Full, "FULL"), (Synchronous::Normal, "NORMAL")] {
        let bench = Bench::new(synchronous);
        let full = synchronous == Synchronous::Full;
        // The goals depend on durability: with FULL, grouping saves most; with NORMAL, only overhead differs.
        let lines = [
            (1, 1_000, Against::OneCommitPerStep, Goal::None),
            (64, 2_000, Against::OneCommitPerStep, if full { Goal::AtLeast(6.0) } else { Goal::None }),
            (64, 20_000, Against::SameGrouping, if full { Goal::None } else { Goal::OfLimit(0.85) }),
            (64, 20_000, Against::BareLoop, Goal::None),
        ];
        for (tasks, count, against, goal) in lines {
            let line = format!("first run, {name}, {tasks} {} (against {})", several(tasks), against.name());
            if !is_wanted(&line) {
                continue;
            }
            let (count, rounds) = (sized(count, count / 20), sized(9, 1));
            let mut by_hand = || match against {
                Against::OneCommitPerStep => bench.by_hand(Rows::Least).loops(1, count),
                Against::SameGrouping => bench.by_hand(Rows::Least).grouped(&bench.runtime, tasks, count),
                Against::BareLoop => bench.by_hand(Rows::Least).loops(tasks, count),
            };
            let limit = &mut || bench.by_hand(Rows::OfLibrary).grouped(&bench.runtime, tasks, count);
            let idem = &mut || bench.idem(Work::FirstRun, tasks, count);
            if against == Against::SameGrouping {
                let [raw, limit, idem] = alternate(rounds, [&mut by_hand, limit, idem]);
                table.sides(&line, &Sides { raw: &raw, limit: Some(&limit), idem: &idem }, times, goal);
            } else {
                let [raw, idem] = alternate(rounds, [&mut by_hand, idem]);
                table.line(&line, &raw, &idem, times, goal);
            }
        }
        for tasks in [1, 64] {
            let line = format!("replay, {name}, {tasks} {}", several(tasks));
            // A replay writes nothing, so durability makes no difference.
            if !is_wanted(&line) || !full {
                continue;
            }
            let (count, rounds) = (sized(20_000, 1_000), sized(9, 1));
            let by_hand = &mut || bench.replays_by_hand(count, false);
            let idem = &mut || bench.idem(Work::Replay, tasks, count);
            if tasks == 1 {
                let limit = &mut || bench.replays_by_hand(count, true);
                let [raw, limit, idem] = alternate(rounds, [by_hand, limit, idem]);
                let sides = Sides { raw: &raw, limit: Some(&limit), idem: &idem };
                table.sides(&line, &sides, times, Goal::OfLimit(0.75));
            } else {
                let [raw, idem] = alternate(rounds, [by_hand, idem]);
                table.line(&line, &raw, &idem, times, Goal::None);
            }
        }
    }
}

fn several(tasks: u64) -> &'static str {
    if tasks == 1 { "task" } else { "tasks" }
}
