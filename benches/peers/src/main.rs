//! The crate `idempotent` on Redis, as a child process of the bench `peers`. The argument is the server's port.
//!
//! The program follows the protocol of `sides.py`, but uses tasks instead of threads. The program reads `WORK COUNT
//! PROCESSES TASKS FIRST`, and answers with thousands of calls per second.

use std::io::BufRead;
use std::sync::Arc;
use std::time::{Duration, Instant};

use idempotent::entry::{CachedResponse, ExistingEntry, IdempotencyEntry, Metadata};
use idempotent::fingerprint::{DefaultFingerprintStrategy, FingerprintStrategy};
use idempotent::key::IdempotencyKey;
use idempotent::store::valkey::ValkeyStore;
use idempotent::store::{IdempotencyStore, InsertResult};
use serde::{Deserialize, Serialize};

/// Number of orders that are shipped before the measurement, and whose results are then replayed.
const SHIPPED: u64 = 1000;
const TTL: Duration = Duration::from_secs(7 * 86_400);

#[derive(Serialize, Deserialize)]
struct Receipt {
    order_id: u64,
    carrier: String,
    tracking: String,
    cents: u64,
    currency: String,
    lines: u32,
    express: bool,
}

/// Returns the result that every side records.
fn receipt(order_id: u64) -> Receipt {
    Receipt {
        order_id,
        carrier: "Hinterland Parcel".to_owned(),
        tracking: "HP-2031-0000-4711-8842-XZ".to_owned(),
        cents: 129_900,
        currency: "EUR".to_owned(),
        lines: 3,
        express: true,
    }
}

/// A handler as in the crate's documentation.
async fn ship(store: &ValkeyStore, order_id: u64) -> (bool, Receipt) {
    let key = IdempotencyKey::new(format!("bench:order:{order_id}")).expect("a valid key");
    let fingerprint = DefaultFingerprintStrategy.compute("ship", &order_id.to_le_bytes());
    let entry = IdempotencyEntry::new(fingerprint, TTL);
    match store.try_insert(&key, entry.clone()).await.expect("answers") {
        InsertResult::Claimed { fencing_token } => {
            let receipt = receipt(order_id);
            let body = serde_json::to_vec(&receipt).expect("encodes").into();
            let response = CachedResponse { status_code: 200, metadata: Metadata::default(), body };
            store.complete(&key, entry.complete(response), fencing_token).await.expect("completes");
            (true, receipt)
        }
        InsertResult::Exists(ExistingEntry::Completed(found)) => {
            assert!(found.fingerprint_matches(fingerprint), "another request");
            (false, serde_json::from_slice(&found.into_response().body).expect("decodes"))
        }
        InsertResult::Exists(ExistingEntry::Processing(_)) => panic!("{order_id} is running"),
    }
}

fn main() {
    let port = std::env::args().nth(1).expect("a port");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a valid URL");
    let store = Arc::new(runtime.block_on(ValkeyStore::new(client)).expect("connects"));
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("reads");
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().expect("a number")).collect();
        let [count, _, tasks, first] = numbers[..] else { panic!("{line}") };
        let is_first = words[0] == "first";
        let started = Instant::now();
        runtime.block_on(async {
            let running: Vec<_> = (0..tasks)
                .map(|task| {
                    let store = Arc::clone(&store);
                    tokio::spawn(async move {
                        for call in (task..count).step_by(tasks as usize) {
                            let order_id = first + if is_first { call } else { call % SHIPPED };
                            let (ran, receipt) = ship(&store, order_id).await;
                            assert!(ran == is_first && receipt.order_id == order_id);
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
