//! The protocol of `sides.py` with tasks instead of threads: a peer reads `WORK COUNT PROCESSES TASKS FIRST`, and
//! answers with thousands of calls per second.

use std::io::BufRead;
use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Runtime;

#[path = "../../src/receipt.rs"]
mod receipt;

pub use self::receipt::Receipt;

/// Number of orders that are shipped before the measurement, and whose results are then replayed.
const SHIPPED: u64 = 1000;

/// Work of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    First,
    Replay,
    Steps,
}

/// A library to compare with.
pub trait Peer: Send + Sync + 'static {
    /// Makes a call, and checks its result.
    fn call(&self, work: Work, order_id: u64) -> impl Future<Output = ()> + Send;
}

/// Makes the calls that the bench asks for.
pub fn serve(runtime: &Runtime, peer: impl Peer) {
    let peer = Arc::new(peer);
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("reads");
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().expect("a number")).collect();
        let [count, _, tasks, first] = numbers[..] else { panic!("{line}") };
        let work = match words[0] {
            "first" => Work::First,
            "steps" => Work::Steps,
            _ => Work::Replay,
        };
        let started = Instant::now();
        runtime.block_on(async {
            let running: Vec<_> = (0..tasks)
                .map(|task| {
                    let peer = Arc::clone(&peer);
                    tokio::spawn(async move {
                        for call in (task..count).step_by(tasks as usize) {
                            let call = if work == Work::Replay { call % SHIPPED } else { call };
                            peer.call(work, first + call).await;
                        }
                    })
                })
                .collect();
            for task in running {
                task.await.expect("ships");
            }
        });
        println!("{}", count as f64 / started.elapsed().as_secs_f64() / 1e3);
    }
}
