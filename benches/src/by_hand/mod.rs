//! The hand-written code that benches compare the library with.

pub mod memory;
#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(feature = "nats")]
pub mod nats;
pub mod outbox;
pub mod pipelined;
pub mod postgres;
pub mod redis;
pub mod sqlite;

use std::iter::StepBy;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use tokio::task::JoinSet;

use crate::Receipt;

/// Connection to an SQL server, with the statements by hand.
pub trait SqlByHand: Send + Sync + 'static {
    /// Makes a first run with the given handler: an insert, the handler, and an owner-checked `UPDATE`.
    fn run<T: Serialize + Send>(
        &self,
        order_id: u64,
        handler: impl FnOnce() -> T + Send,
    ) -> impl Future<Output = T> + Send;

    /// Makes a first run of the order.
    fn ship(&self, order_id: u64) -> impl Future<Output = Receipt> + Send {
        self.run(order_id, move || Receipt::of(order_id))
    }

    /// Reserves the order. Returns the number of rows that the reservation inserted: zero if another call has reserved
    /// the order.
    fn reserve(&self, order_id: u64) -> impl Future<Output = u64> + Send;

    /// Makes a replay: a `SELECT` of the library's result by primary key, not decoded.
    fn replay(&self, order_id: u64) -> impl Future<Output = Vec<u8>> + Send;
}

/// Returns `count` orders that no side has shipped yet. The first million is reserved for replays.
pub fn new_orders(count: u64) -> Range<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(1_000_000);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    first..first + count
}

/// Distributes `count` calls over `tasks` tasks. `task` makes the future of one task from its number and the numbers of
/// its calls.
pub async fn share<F>(tasks: u64, count: u64, mut task: impl FnMut(u64, StepBy<Range<u64>>) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut running = JoinSet::new();
    for number in 0..tasks {
        let calls = (number..count).step_by(usize::try_from(tasks).expect("few"));
        running.spawn(task(number, calls));
    }
    running.join_all().await;
}
