//! `RedisStore` compared with hand-written code over one multiplexed connection of `redis`.
//!
//! - *First run*, by hand: the same formatted key, `SET key owner NX GET PX lease`, the same handler, its result as
//!   JSON, and a script that replaces the value if the owner is unchanged (`EVALSHA`). The value is the bare result.
//! - *Replay*, by hand: `GET` of the same record that the library replays, decoded by the same codec.
//! - *In progress*, by hand: `SET key owner NX GET PX lease` that finds another owner.
//!
//! The hand-written code is measured over two connections: one with the client's defaults, and one with `TCP_NODELAY`.
//! A line compares the library with the faster of the two. Server and client share the machine.
//!
//! *Limit* is the same work over a hand-written client (`by_hand::pipelined`), which writes the commands of all tasks
//! together and decodes nothing.

use idem_benches::by_hand::pipelined::Pipelined;
use idem_benches::by_hand::redis::ByHand;
use idem_benches::by_hand::share;
use idem_benches::{Goal, Receipt, Sides, Table, alternate, hold, is_wanted, sized, thousands_per_second, timed};
use idem_runtime::{Error, RedisStore, Store, idempotent};
use idem_tests::server::{Kind, RedisServer};
use tokio::runtime::Runtime;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &RedisStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
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

    fn goal(self, tasks: u64) -> Goal {
        match (self, tasks) {
            (Self::FirstRun, ..=64) | (Self::Replay, 1) => Goal::OfLimit(0.9),
            (Self::FirstRun, _) => Goal::OfLimit(0.6),
            (Self::Replay, _) => Goal::OfLimit(0.5),
            (Self::InProgress, _) => Goal::None,
        }
    }

    /// Returns the number of orders among which calls of this kind choose. Each first run takes a new order.
    fn orders(self) -> u64 {
        match self {
            Self::FirstRun => u64::MAX,
            Self::Replay => 1000,
            Self::InProgress => 64,
        }
    }
}

#[derive(Clone)]
enum Side {
    Idem(RedisStore),
    ByHand(ByHand),
    Limit(Pipelined),
}

impl Side {
    async fn call(&mut self, work: Work, order_id: u64) {
        match (self, work) {
            (Self::Idem(store), Work::FirstRun | Work::Replay) => {
                ship(store, order_id).await.expect("ships");
            }
            (Self::Idem(store), Work::InProgress) => {
                let refused = ship(store, order_id).await;
                assert!(matches!(refused, Err(Error::InProgress { .. })), "{refused:?}");
            }
            (Self::ByHand(by_hand), Work::FirstRun) => drop(by_hand.ship(order_id).await),
            (Self::ByHand(by_hand), Work::Replay) => drop(by_hand.replay::<Receipt>(order_id).await),
            (Self::ByHand(by_hand), Work::InProgress) => drop(by_hand.in_progress(order_id).await),
            (Self::Limit(limit), Work::FirstRun) => drop(limit.ship(order_id).await),
            (Self::Limit(limit), Work::Replay) => drop(limit.replay(order_id).await),
            (Self::Limit(limit), Work::InProgress) => drop(limit.in_progress(order_id).await),
        }
    }
}

struct Bench {
    server: RedisServer,
    runtime: Runtime,
    idem: Side,
    default: Side,
    nodelay: Side,
    limit: Side,
}

impl Bench {
    fn new() -> Self {
        let server = RedisServer::start(Kind::Redis);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime can be built");
        let [idem, default, nodelay, limit] = runtime.block_on(async {
            let url = server.url();
            [
                Side::Idem(RedisStore::connect(&url).await.expect("connects")),
                Side::ByHand(ByHand::connect(&url, false).await),
                Side::ByHand(ByHand::connect(&url, true).await),
                Side::Limit(Pipelined::connect(&format!("127.0.0.1:{}", server.port())).await),
            ]
        });
        Self { server, runtime, idem, default, nodelay, limit }
    }

    /// Deletes all keys of the server, but keeps its scripts, and prepares the orders that `work` needs.
    fn prepare(&self, work: Work) {
        self.runtime.block_on(async {
            let flush = redis::cmd("FLUSHDB").exec_async(&mut self.server.raw().await).await;
            flush.expect("flushes");
            match work {
                Work::FirstRun => {}
                Work::Replay => {
                    for order_id in 0..work.orders() {
                        self.idem.clone().call(Work::FirstRun, order_id).await;
                    }
                }
                Work::InProgress => {
                    let holder = RedisStore::connect(&self.server.url()).await.expect("connects");
                    for order_id in 0..work.orders() {
                        hold(&*holder.handle(), "bench::ship", order_id).await;
                    }
                }
            }
        });
    }

    /// Returns thousands of calls per second of `tasks` tasks, which make `count` calls together, each task one call
    /// after the other.
    fn measure(&self, side: &Side, work: Work, tasks: u64, count: u64) -> f64 {
        if work == Work::FirstRun {
            self.prepare(work);
        }
        let calls = share(tasks, count, |_, calls| {
            let mut side = side.clone();
            async move {
                for call in calls {
                    side.call(work, call % work.orders()).await;
                }
            }
        });
        let took = timed(|| self.runtime.block_on(calls));
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }
}

fn main() {
    let bench = Bench::new();
    let table = Table::with_limit("Redis", "thousand a second", "times its throughput");
    for work in [Work::FirstRun, Work::Replay, Work::InProgress] {
        let mut is_prepared = false;
        // The speed of a lone task varies, depending on the cores on which the system places task and server. Many
        // short rounds cover all cases.
        for (tasks, count, rounds) in
            [(1, 400, 61), (16, 10_000, 15), (64, 20_000, 15), (256, 30_000, 15), (1024, 60_000, 15)]
        {
            let name = format!("{}, {tasks} {}", work.name(), if tasks == 1 { "task" } else { "tasks" });
            if !is_wanted(&name) {
                continue;
            }
            if !is_prepared {
                bench.prepare(work);
                is_prepared = true;
            }
            let (count, rounds) = (sized(count, count / 20), sized(rounds, 1));
            let measure = |side| bench.measure(side, work, tasks, count);
            let [default, nodelay, limit, idem] = alternate(
                rounds,
                [
                    &mut || measure(&bench.default),
                    &mut || measure(&bench.nodelay),
                    &mut || measure(&bench.limit),
                    &mut || measure(&bench.idem),
                ],
            );
            let (raw, socket) = if nodelay.median() > default.median() {
                (nodelay, "against no-delay socket")
            } else {
                (default, "against default socket")
            };
            let sides = Sides { raw: &raw, limit: Some(&limit), idem: &idem };
            table.sides(&format!("{name} ({socket})"), &sides, |idem, raw| idem / raw, work.goal(tasks));
        }
    }
}
