//! A loop for a profiler: `./scripts/bench share` runs it under `perf` and shows the share of time that each part of
//! the code takes.
//!
//! `-- memory replay 1 5` makes replays on a `MemoryStore` with one task for 5 seconds. The other stores are `redis`,
//! `postgres` and `sqlite`, and the other work is `first`. Without arguments, both kinds of work run briefly on a
//! `MemoryStore`, to show that the program works.

#![allow(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_benches::Receipt;
use idem_benches::by_hand::{new_orders, share};
use idem_runtime::sqlite::Synchronous;
use idem_runtime::{Error, MemoryStore, PostgresStore, RedisStore, SqliteStore, Store, idempotent};
use idem_tests::postgres::PostgresServer;
use idem_tests::server::{Kind, RedisServer};

/// Number of orders that are shipped before the measurement, and whose results are then replayed.
const SHIPPED: u64 = 1000;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &dyn Store, order_id: u64) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id))
}

async fn calls(store: &Arc<dyn Store>, is_first: bool, tasks: u64, duration: Duration) {
    share(tasks, SHIPPED, |_, calls| {
        let store = Arc::clone(store);
        async move {
            for order_id in calls {
                ship(&*store, order_id).await.expect("ships");
            }
        }
    })
    .await;
    let until = Instant::now() + duration;
    let mut made = 0;
    while Instant::now() < until {
        let count = 20_000.min(200 * tasks);
        let first = if is_first { new_orders(count).start } else { 0 };
        share(tasks, count, |_, calls| {
            let store = Arc::clone(store);
            async move {
                for n in calls {
                    let order_id = if is_first { first + n } else { n % SHIPPED };
                    ship(&*store, order_id).await.expect("ships");
                }
            }
        })
        .await;
        made += count;
    }
    println!("{made} calls");
}

/// Creates a folder in the target folder, so that the file of SQLite is on the disk of the target folder.
fn tempfile() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("profile-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|it| !it.starts_with('-')).collect();
    let loops = match &arguments[..] {
        [store, work, tasks, seconds] => {
            let number = |text: &str| text.parse::<u64>().expect("a number");
            vec![(store.as_str(), work == "first", number(tasks), Duration::from_secs(number(seconds)))]
        }
        _ => vec![("memory", false, 1, Duration::ZERO), ("memory", true, 1, Duration::ZERO)],
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    for (name, is_first, tasks, duration) in loops {
        println!("{name}, {}, {tasks} tasks", if is_first { "first run" } else { "replay" });
        let run = |store: &Arc<dyn Store>| runtime.block_on(calls(store, is_first, tasks, duration));
        match name {
            "memory" => run(&MemoryStore::options().max_records(50_000_000).build().handle()),
            "redis" => {
                let server = RedisServer::start(Kind::Redis);
                run(&runtime.block_on(RedisStore::connect(&server.url())).expect("connects").handle());
            }
            "postgres" => {
                let server = PostgresServer::start();
                let open = PostgresStore::options().ensure_schema();
                run(&runtime.block_on(open.connect(&server.url())).expect("connects").handle());
            }
            "sqlite" => {
                let folder = tempfile();
                let open = SqliteStore::options().synchronous(Synchronous::Normal).open(folder.join("idem.db"));
                run(&runtime.block_on(open).expect("opens").handle());
                std::fs::remove_dir_all(folder).expect("is there");
            }
            _ => panic!("there is no store {name}"),
        }
    }
}
