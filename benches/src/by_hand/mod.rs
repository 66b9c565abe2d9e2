//! What one would write by hand, for every bench that compares with it.

pub mod postgres;
pub mod redis;
pub mod sqlite;

use std::iter::StepBy;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::task::JoinSet;

/// The first of `count` orders that nobody has shipped yet, neither by hand nor otherwise. The first million is for replays.
pub fn new_orders(count: u64) -> Range<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(1_000_000);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    first..first + count
}

/// Has `tasks` tasks make `count` calls in all. `task` makes what one of them does, from its number and those of its calls.
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
