//! `NatsStore` compared with hand-written code over the client of NATS.
//!
//! - *First run*, by hand: a message that expects no message on its subject, the same handler, and its result as JSON
//!   in a message that expects the first one. The messages by hand have no retention.
//! - *Replay*, by hand: a direct read of the bare result.
//! - *In progress*, by hand: a message that is refused, and a direct read.
//! - The limit is the same code by hand with messages of the size and the retention of the library's: the server has
//!   more work with them.
//!
//! Server and client share the machine. The server writes to its file without waiting for the disk (`sync_interval`),
//! as is its default.

use idem_benches::by_hand::nats::ByHand;
use idem_benches::by_hand::{new_orders, share};
use idem_benches::{Goal, Receipt, Sides, Table, alternate, hold, is_wanted, sized, thousands_per_second, timed};
use idem_runtime::{Error, NatsStore, Store, idempotent};
use idem_tests::nats::NatsServer;
use tokio::runtime::Runtime;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &NatsStore, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    FirstRun,
    Replay,
    InProgress,
}

/// Number of orders with results, and number of orders whose attempts run. The latter begin at `HELD_FROM`.
const SHIPPED: u64 = 1000;
const HELD: u64 = 64;
const HELD_FROM: u64 = 500_000;

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::FirstRun => "first run",
            Self::Replay => "replay",
            Self::InProgress => "in progress",
        }
    }

    fn goal(self) -> Goal {
        match self {
            Self::FirstRun => Goal::AtLeast(0.9),
            Self::Replay => Goal::AtLeast(0.8),
            Self::InProgress => Goal::None,
        }
    }
}

#[derive(Clone)]
enum Side {
    Idem(NatsStore),
    ByHand(ByHand),
}

impl Side {
    async fn call(&self, work: Work, order_id: u64) {
        match (self, work) {
            (Self::Idem(store), Work::FirstRun | Work::Replay) => drop(ship(store, order_id).await.expect("ships")),
            (Self::Idem(store), Work::InProgress) => {
                let refused = ship(store, order_id).await;
                assert!(matches!(refused, Err(Error::InProgress { .. })), "{refused:?}");
            }
            (Self::ByHand(by_hand), Work::FirstRun) => drop(by_hand.ship(order_id).await),
            (Self::ByHand(by_hand), Work::Replay) => drop(by_hand.replay::<Receipt>(order_id).await),
            (Self::ByHand(by_hand), Work::InProgress) => drop(by_hand.in_progress(order_id).await),
        }
    }
}

/// Returns thousands of calls per second of `tasks` tasks, which make `count` calls together.
fn measure(runtime: &Runtime, side: &Side, work: Work, tasks: u64, count: u64) -> f64 {
    let first = if work == Work::FirstRun { new_orders(count).start } else { 0 };
    let calls = share(tasks, count, |_, calls| {
        let side = side.clone();
        async move {
            for call in calls {
                let order_id = match work {
                    Work::FirstRun => first + call,
                    Work::Replay => call % SHIPPED,
                    Work::InProgress => HELD_FROM + call % HELD,
                };
                side.call(work, order_id).await;
            }
        }
    });
    let took = timed(|| runtime.block_on(calls));
    thousands_per_second(took, usize::try_from(count).expect("few"))
}

fn main() {
    let server = NatsServer::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    let (idem, by_hand, limit) = runtime.block_on(async {
        let store = NatsStore::connect(&server.url()).await.expect("connects");
        let (by_hand, limit) = (ByHand::connect(&server.url()).await, ByHand::limit(&server.url()).await);
        for order_id in 0..HELD {
            hold(&*store.handle(), "bench::ship", HELD_FROM + order_id).await;
            by_hand.ship(HELD_FROM + order_id).await;
            limit.ship(HELD_FROM + order_id).await;
        }
        let (idem, by_hand, limit) = (Side::Idem(store), Side::ByHand(by_hand), Side::ByHand(limit));
        for order_id in 0..SHIPPED {
            idem.call(Work::FirstRun, order_id).await;
            by_hand.call(Work::FirstRun, order_id).await;
            limit.call(Work::FirstRun, order_id).await;
        }
        (idem, by_hand, limit)
    });
    let table = Table::with_limit("NATS", "thousand a second", "times its throughput");
    for work in [Work::FirstRun, Work::Replay, Work::InProgress] {
        for (tasks, count, rounds) in [(1, 400, 41), (16, 5000, 15), (64, 10_000, 15), (256, 20_000, 11)] {
            let name = format!("{}, {tasks} {}", work.name(), if tasks == 1 { "task" } else { "tasks" });
            if !is_wanted(&name) {
                continue;
            }
            let (count, rounds) = (sized(count, count / 20), sized(rounds, 1));
            let measured = |side: &Side| measure(&runtime, side, work, tasks, count);
            let [raw, limit, idem] =
                alternate(rounds, [&mut || measured(&by_hand), &mut || measured(&limit), &mut || measured(&idem)]);
            let sides = Sides { raw: &raw, limit: Some(&limit), idem: &idem };
            table.sides(&name, &sides, |idem, raw| idem / raw, work.goal());
        }
    }
}
