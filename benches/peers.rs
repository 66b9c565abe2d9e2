//! Compares other libraries with this one: the same server, the same work, each library at its best concurrency.
//!
//! *First* lines measure calls for new orders: they reserve the order, run a handler that does nothing, and record 150
//! bytes of JSON. In the lines with 3 steps, the handler has three steps that do nothing and journal 150 bytes each.
//! *Replay* lines measure calls for recorded orders, which return the result decoded.
//!
//! | side | implementation |
//! |---|---|
//! | idem | an `#[idempotent]` function, one `RedisStore` or `PostgresStore` with its defaults |
//! | Powertools | `@idempotent_function` of AWS Lambda Powertools for Python with its Redis layer |
//! | Powertools with `hiredis` | Powertools with the parser in C, which its extra `[redis]` does not install |
//! | Powertools, local cache | Powertools with `use_local_cache`; compared with `Cached` |
//! | `idempotent` | the Rust crate, its `ValkeyStore` |
//! | blog pattern on Redis | `SET NX`, then `SET` or `GET`, over one connection of the Rust client; no owner is checked |
//! | DBOS | a workflow whose id is the order, without steps and with three steps, in Python |
//! | crate `dbos` | the same in Rust |
//! | blog pattern on PostgreSQL | `INSERT … ON CONFLICT DO NOTHING`, then `UPDATE` or `SELECT`, prepared, in Rust |
//!
//! The peers are separate processes, which run the programs in `benches/peers` and read their work line by line. Each
//! side has a list of concurrencies, and is first measured at each of them. Then all sides, each at its best
//! concurrency, take turns, round by round. Server and client share the machine. PostgreSQL has `fsync` and
//! `synchronous_commit` on.
//!
//! A quick run has no peers except the blog pattern. A full run needs `./scripts/bench peers` once, and takes 5
//! minutes.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use idem_benches::by_hand::{new_orders, postgres, redis, share};
use idem_benches::peer::Peer;
use idem_benches::{
    Goal, Receipt, Samples, Table, alternate_all, is_quick, is_wanted, paced, sized, thousands_per_second, timed,
};
use idem_runtime::{Cached, Error, PostgresStore, RedisStore, Store, current, idempotent};
use idem_tests::postgres::PostgresServer;
use idem_tests::server::{Kind, RedisServer};
use tokio::runtime::Runtime;

/// Number of orders that are shipped before the measurement, and whose results are then replayed.
const SHIPPED: u64 = 1000;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &dyn Store, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::fulfil")]
async fn fulfil(store: &dyn Store, order_id: u64) -> Result<Receipt, Error> {
    let attempt = current()?;
    for name in ["charge", "reserve"] {
        attempt.step(name).run(async |_| Ok::<_, Error>(Receipt::of(order_id))).await?;
    }
    attempt.step("book").run(async |_| Ok(Receipt::of(order_id))).await
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    First,
    Steps,
    Replay,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::First => "first run",
            Self::Steps => "first run with 3 steps",
            Self::Replay => "replay",
        }
    }

    /// Returns the name of the work in the lines that a peer reads.
    fn word(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Steps => "steps",
            Self::Replay => "replay",
        }
    }

    /// Returns the id of the first order that `count` calls use, and the number of distinct orders. Further calls
    /// repeat these orders.
    fn orders(self, count: u64) -> (u64, u64) {
        match self {
            Self::First | Self::Steps => (new_orders(count).start, count),
            Self::Replay => (0, SHIPPED),
        }
    }
}

/// Number of processes, and number of threads or tasks in each process.
type Concurrency = (u64, u64);

/// A library, or a pattern of code by hand, whose throughput is measured.
struct Side<'a> {
    name: &'static str,
    concurrencies: Vec<Concurrency>,
    /// Makes a given number of calls of a kind at a concurrency, and returns thousands of calls per second.
    run: Box<dyn Fn(Work, Concurrency, u64) -> f64 + 'a>,
    /// Goal for the throughput of `idem`, divided by the throughput of this side.
    goal: Goal,
    is_in_process: bool,
}

impl<'a> Side<'a> {
    /// Creates a side that runs in this process.
    fn here(name: &'static str, tasks: &[u64], goal: Goal, run: impl Fn(Work, u64, u64) -> f64 + 'a) -> Self {
        let concurrencies = tasks.iter().map(|tasks| (1, *tasks)).collect();
        let run = Box::new(move |work, (_, tasks), count| run(work, tasks, count));
        Self { name, concurrencies, run, goal, is_in_process: true }
    }

    /// Creates a side that runs in separate processes, and lets these processes ship the orders that are replayed
    /// later.
    fn there(name: &'static str, concurrencies: &[Concurrency], goal: Goal, mut peer: Peer) -> Self {
        peer.run("first", SHIPPED, concurrencies[0], 0);
        let peer = RefCell::new(peer);
        let run = Box::new(move |work: Work, concurrency, count| {
            let (first, _) = work.orders(count);
            peer.borrow_mut().run(work.word(), count, concurrency, first)
        });
        Self { name, concurrencies: concurrencies.to_vec(), run, goal, is_in_process: false }
    }

    fn paced(&self, work: Work, concurrency: Concurrency, target: Duration) -> impl FnMut() -> f64 {
        let least = (concurrency.0 * concurrency.1).max(50);
        paced(target, least, move |count| (self.run)(work, concurrency, count))
    }

    /// Returns the concurrency of this side's list with the highest throughput. Each concurrency is measured twice.
    fn best(&self, work: Work) -> Concurrency {
        let measure = |concurrency: Concurrency| {
            let mut side = self.paced(work, concurrency, Duration::from_millis(sized(400, 1)));
            side().max(side())
        };
        let measured = self.concurrencies.iter().map(|concurrency| (*concurrency, measure(*concurrency)));
        let best = measured.max_by(|a, b| a.1.total_cmp(&b.1)).expect("some");
        best.0
    }

    fn at(&self, (processes, threads): Concurrency) -> String {
        match self.is_in_process {
            true => format!("{threads} tasks"),
            false if self.name.contains("crate") => format!("{threads} tasks"),
            false => format!("{processes} × {threads} threads"),
        }
    }
}

/// Measures each side at its best concurrency. Prints a line for each side except the first side, which is the library.
fn compare(table: &Table, work: Work, sides: &[Side<'_>]) {
    let wanted = |side: &&Side<'_>| is_wanted(&format!("{}: {}", work.name(), side.name));
    let (idem, others) = sides.split_first().expect("some");
    let others: Vec<_> = others.iter().filter(wanted).collect();
    if others.is_empty() {
        return;
    }
    let sides: Vec<_> = std::iter::once(idem).chain(others).collect();
    let best: Vec<_> = sides.iter().map(|side| side.best(work)).collect();
    let target = Duration::from_millis(sized(500, 1));
    let mut measured: Vec<_> = sides.iter().zip(&best).map(|(side, best)| side.paced(work, *best, target)).collect();
    let mut measured: Vec<_> = measured.iter_mut().map(|side| -> &mut dyn FnMut() -> f64 { side }).collect();
    let samples: Vec<Samples> = alternate_all(sized(11, 1), &mut measured);
    for n in 1..sides.len() {
        let side = sides[n];
        let name = format!("{}: {} ({}), idem ({})", work.name(), side.name, side.at(best[n]), idem.at(best[0]));
        table.line(&name, &samples[n], &samples[0], |idem, raw| idem / raw, side.goal);
    }
}

/// Returns thousands of calls per second that `tasks` tasks make with `store`.
fn ours(runtime: &Runtime, store: &Arc<dyn Store>, work: Work, tasks: u64, count: u64) -> f64 {
    let (first, cycle) = work.orders(count);
    let calls = share(tasks, count, |_, calls| {
        let store = Arc::clone(store);
        async move {
            for n in calls {
                let order_id = first + n % cycle;
                let shipped = match work {
                    Work::Steps => fulfil(&*store, order_id).await,
                    Work::First | Work::Replay => ship(&*store, order_id).await,
                };
                assert_eq!(shipped.expect("ships").order_id, order_id);
            }
        }
    });
    rate(runtime, count, calls)
}

fn rate(runtime: &Runtime, count: u64, calls: impl Future<Output = ()>) -> f64 {
    thousands_per_second(timed(|| runtime.block_on(calls)), usize::try_from(count).expect("few"))
}

const TASKS: [u64; 4] = [64, 256, 512, 1024];
const PYTHON: [Concurrency; 7] = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 4), (4, 4)];

fn on_redis(runtime: &Runtime) {
    let server = RedisServer::start(Kind::Redis);
    let port = server.port().to_string();
    let (store, blog) = runtime.block_on(async {
        let store = RedisStore::connect(&server.url()).await.expect("connects").handle();
        (store, redis::ByHand::connect(&server.url(), false).await)
    });
    // A duplicate must not run the handler of the blog pattern.
    let in_blogs = |work: Work, tasks, count| {
        let (first, cycle) = work.orders(count);
        let calls = share(tasks, count, |_, calls| {
            let mut blog = blog.clone();
            async move {
                for n in calls {
                    let (ran, receipt) = blog.as_in_blogs(first + n % cycle).await;
                    assert!(ran == (work == Work::First) && receipt.order_id == first + n % cycle);
                }
            }
        });
        rate(runtime, count, calls)
    };
    runtime.block_on(async {
        // The replays need recorded orders.
        for order_id in 0..SHIPPED {
            ship(&*store, order_id).await.expect("ships");
            assert!(blog.clone().as_in_blogs(order_id).await.0);
        }
    });
    let mut sides = vec![
        Side::here("idem", &TASKS, Goal::None, |work, tasks, count| ours(runtime, &store, work, tasks, count)),
        Side::here("blog pattern", &TASKS, Goal::None, in_blogs),
    ];
    // Peers must be installed, and a quick run goes without.
    if !is_quick() {
        let powertools = Peer::python("Powertools", "powertools.py", &[&port]);
        sides.push(Side::there("Powertools", &PYTHON, Goal::AtLeast(20.0), powertools));
        let hiredis = Peer::python("Powertools with hiredis", "powertools.py", &[&port, "hiredis"]);
        sides.push(Side::there("Powertools with `hiredis`", &PYTHON[..5], Goal::None, hiredis));
        let tasks = TASKS.map(|tasks| (1, tasks));
        let idempotent = Peer::rust("idempotent", "peers", &[&port]);
        sides.push(Side::there("crate `idempotent`", &tasks, Goal::AtLeast(1.4), idempotent));
    }
    let table = Table::new("Peers on Redis", "thousand a second", "times its throughput");
    compare(&table, Work::First, &sides);
    compare(&table, Work::Replay, &sides);
    drop(sides);

    // In these lines, each side replays from the memory of its process, without a request to the server.
    let cached =
        Cached::new(RedisStore::clone(&runtime.block_on(RedisStore::connect(&server.url())).expect("connects")))
            .handle();
    let mut sides =
        vec![Side::here("idem", &[2, 64], Goal::None, |work, tasks, count| ours(runtime, &cached, work, tasks, count))];
    if !is_quick() {
        let powertools = Peer::python("Powertools", "powertools.py", &[&port, "hiredis", "cached"]);
        let concurrencies = [(1, 1), (2, 1), (3, 1), (4, 1)];
        sides.push(Side::there("Powertools, local cache, beside `Cached`", &concurrencies, Goal::None, powertools));
    }
    compare(&table, Work::Replay, &sides);
}

fn on_postgres(runtime: &Runtime) {
    let server = PostgresServer::start();
    let tasks = &[16, 64, 256][..sized(3, 1)];
    let (store, blog, databases) = runtime.block_on(async {
        let store = PostgresStore::options().ensure_schema().connect(&server.url()).await.expect("connects").handle();
        let blog = postgres::ByHand::connections(&server.url(), sized(256, 16)).await;
        for order_id in 0..SHIPPED {
            ship(&*store, order_id).await.expect("ships");
            assert!(blog[0].as_in_blogs(order_id).await.0);
        }
        (store, blog, [server.database("dbos").await, server.database("dbos_in_rust").await])
    });
    let in_blogs = |work: Work, tasks, count| {
        let (first, cycle) = work.orders(count);
        let calls = share(tasks, count, |task, calls| {
            let blog = Arc::clone(&blog[usize::try_from(task).expect("few")]);
            async move {
                for n in calls {
                    let (ran, receipt) = blog.as_in_blogs(first + n % cycle).await;
                    assert!(ran == (work == Work::First) && receipt.order_id == first + n % cycle);
                }
            }
        });
        rate(runtime, count, calls)
    };
    let mut sides = vec![
        Side::here("idem", &TASKS, Goal::None, |work, tasks, count| ours(runtime, &store, work, tasks, count)),
        Side::here("blog pattern", tasks, Goal::None, in_blogs),
    ];
    if !is_quick() {
        let dbos = Peer::python("DBOS", "durable.py", &[&databases[0]]);
        let concurrencies = [(1, 4), (2, 4), (4, 4), (2, 16), (4, 16), (8, 8)];
        sides.push(Side::there("DBOS", &concurrencies, Goal::AtLeast(20.0), dbos));
        let dbos = Peer::rust("dbos", "dbos_workflows", &[&databases[1]]);
        sides.push(Side::there("crate `dbos`", &TASKS.map(|tasks| (1, tasks)), Goal::None, dbos));
    }
    let table = Table::new("Peers on PostgreSQL", "thousand a second", "times its throughput");
    compare(&table, Work::First, &sides);
    compare(&table, Work::Replay, &sides);
    // The blog pattern has no steps.
    sides.remove(1);
    for dbos in &mut sides[1..] {
        dbos.goal = Goal::AtLeast(10.0);
    }
    compare(&table, Work::Steps, &sides);
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    on_redis(&runtime);
    on_postgres(&runtime);
}
