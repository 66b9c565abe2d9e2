//! A handler that publishes one message, with records in PostgreSQL: [the outbox](idem_runtime::outbox) compared with a
//! table of messages and relays by hand.
//!
//! - *By hand*: the prepared `INSERT` and the owner-checked `UPDATE` of the bench `postgres`; the statement of the
//!   `UPDATE` also inserts the message, so both are one commit. Two relays take up to 256 messages at a time by
//!   `FOR UPDATE SKIP LOCKED`, send them, delete them and commit. Each task and each relay has its own connection.
//! - *Broker*: both sides give a message to the same broker, which confirms it immediately and counts it. A round ends
//!   when it has counted every message.
//!
//! The library has its default pool of 6 connections. Server and client share the machine.

use std::sync::Arc;

use idem_benches::by_hand::outbox::{Broker, Publisher, Relay};
use idem_benches::by_hand::{new_orders, share};
use idem_benches::{Goal, Receipt, Table, alternate, is_wanted, sized, thousands_per_second, timed};
use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
use idem_runtime::{Error, PostgresStore, StoreExt as _, current, idempotent};
use idem_tests::postgres::PostgresServer;
use tokio::runtime::{Builder, Runtime};

/// The broker as the library's sender.
struct Outlet(Broker);

impl Sender for Outlet {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            self.0.publish(message.body()).await;
            Ok(())
        })
    }
}

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::publish")]
async fn ship(store: &PostgresStore, order_id: u64) -> Result<Receipt, Error> {
    let receipt = Receipt::of(order_id);
    current()?.outbox().push("orders.shipped", OutgoingMessage::json(&receipt)?.key(order_id))?;
    Ok(receipt)
}

struct Bench {
    runtime: Runtime,
    store: PostgresStore,
    publishers: Vec<Arc<Publisher>>,
    broker: Broker,
    _server: PostgresServer,
}

impl Bench {
    fn new(mut runtime: Builder, connections: usize) -> Self {
        let server = PostgresServer::start();
        let runtime = runtime.enable_all().build().expect("a runtime can be built");
        let broker = Broker::default();
        let (store, publishers) = runtime.block_on(async {
            let store = PostgresStore::options().ensure_schema().connect(&server.url()).await.expect("connects");
            let publishers = Publisher::connections(&server.url(), connections).await;
            for _ in 0..2 {
                let (relay, broker) = (Relay::connect(&server.url()).await, broker.clone());
                tokio::spawn(relay.run(broker));
            }
            (store.with_sender(Outlet(broker.clone())), publishers)
        });
        Self { runtime, store, publishers, broker, _server: server }
    }

    /// Returns thousands of orders per second of `tasks` tasks, which ship `count` orders together.
    fn measure(&self, by_hand: bool, tasks: u64, count: u64) -> f64 {
        let sent = self.broker.count() + count;
        let calls = share(tasks, count, |task, calls| {
            let hand = by_hand.then(|| Arc::clone(&self.publishers[usize::try_from(task).expect("few")]));
            let store = self.store.clone();
            async move {
                for _ in calls {
                    let order_id = new_orders(1).start;
                    match &hand {
                        Some(hand) => drop(hand.ship(order_id).await),
                        None => drop(ship(&store, order_id).await.expect("ships")),
                    }
                }
            }
        });
        let took = timed(|| {
            self.runtime.block_on(async {
                calls.await;
                while self.broker.count() < sent {
                    tokio::task::yield_now().await;
                }
            });
        });
        assert_eq!(self.broker.count(), sent, "a message was sent twice");
        thousands_per_second(took, usize::try_from(count).expect("few"))
    }
}

fn main() {
    let lone = Bench::new(Builder::new_current_thread(), 1);
    let mut threads = Builder::new_multi_thread();
    threads.worker_threads(2);
    let bench = Bench::new(threads, 256);
    let table = Table::new("outbox on PostgreSQL", "thousand a second", "times its throughput");
    for (tasks, count, rounds) in [(1, 300, 21), (16, 4000, 11), (64, 8000, 11), (256, 12_000, 11)] {
        let name = format!("first run with a message, {tasks} {}", if tasks == 1 { "task" } else { "tasks" });
        if !is_wanted(&name) {
            continue;
        }
        let (count, rounds) = (sized(count, count / 10), sized(rounds, 1));
        let at = if tasks == 1 { &lone } else { &bench };
        let [by_hand, idem] =
            alternate(rounds, [&mut || at.measure(true, tasks, count), &mut || at.measure(false, tasks, count)]);
        let goal = if tasks == 64 { Goal::AtLeast(1.5) } else { Goal::None };
        table.line(&name, &by_hand, &idem, |idem, raw| idem / raw, goal);
    }
}
