//! Bytes that a finished record takes in each store: figures of docs/scale.md. The bench `footprint` has those of a
//! `MemoryStore`.
//!
//! Each store makes first runs of new keys of 36 bytes, whose results have 156 bytes of JSON, by 64 tasks. The bytes of
//! a record are the growth of what the server itself reports, with its indexes, divided by the number of records. For
//! DynamoDB they are the size of one item by the rules of its bill. The parts for DynamoDB, MariaDB and NATS need
//! `--features dynamodb,mysql,nats`.
#![allow(clippy::cast_precision_loss)] // Sizes are far below 2^52.

use std::sync::Arc;

use idem_benches::by_hand::{new_orders, share};
use idem_benches::{Goal, Receipt, Table, alternate, is_wanted, sized};
use idem_runtime::{Error, PostgresStore, RedisStore, SqliteStore, Store, idempotent};
use idem_tests::postgres::PostgresServer;
use idem_tests::server::{Kind, RedisServer};
use idem_tests::sqlite::Folder;

#[idempotent(key = "order:{order_id}", ttl = "7d", store = store, scope = "bench::ship")]
async fn ship(store: &Arc<dyn Store>, order_id: String) -> Result<Receipt, Error> {
    Ok(Receipt::of(order_id.len() as u64))
}

/// Number of records.
fn records() -> u64 {
    sized(100_000, 1000)
}

/// Fills `store` with records.
async fn fill(store: Arc<dyn Store>) {
    let new = new_orders(records()).start;
    let calls = share(64, records(), |_, calls| {
        let store = Arc::clone(&store);
        async move {
            for call in calls {
                ship(&store, format!("{:030}", new + call)).await.expect("ships");
            }
        }
    });
    calls.await;
}

/// Returns the bytes of a record, by the size that `size` returns before and after the records are made.
async fn growth(store: Arc<dyn Store>, mut size: impl AsyncFnMut() -> u64) -> f64 {
    let before = size().await;
    fill(store).await;
    (size().await.saturating_sub(before)) as f64 / records() as f64
}

async fn sqlite() -> f64 {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).await.expect("opens");
    growth(store.handle(), async || {
        let raw = idem_tests::sqlite::raw(&folder.file());
        let size = "SELECT (page_count - freelist_count) * page_size \
                    FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()";
        raw.query_row(size, [], |row| row.get::<_, i64>(0)).expect("answers").unsigned_abs()
    })
    .await
}

async fn redis() -> f64 {
    let server = RedisServer::start(Kind::Redis);
    let store = RedisStore::connect(&server.url()).await.expect("connects");
    growth(store.handle(), async || {
        let mut raw = server.raw().await;
        let info: String = ::redis::cmd("INFO").arg("memory").query_async(&mut raw).await.expect("answers");
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory_dataset:")).expect("a line");
        line.trim().parse().expect("a number")
    })
    .await
}

async fn postgres() -> f64 {
    let server = PostgresServer::start();
    let store = PostgresStore::options().ensure_schema().connect(&server.url()).await.expect("connects");
    growth(store.handle(), async || {
        let raw = server.raw().await;
        let size = "SELECT pg_total_relation_size('idem.records')";
        let size: i64 = raw.query_one(size, &[]).await.expect("answers").get(0);
        size.unsigned_abs()
    })
    .await
}

#[cfg(feature = "mysql")]
async fn mariadb() -> f64 {
    use mysql_async::prelude::Queryable as _;
    let server = idem_tests::mysql::MySqlServer::start();
    let store = idem_runtime::MySqlStore::options().ensure_schema().connect(&server.url()).await.expect("connects");
    growth(store.handle(), async || {
        let mut raw = server.raw().await;
        raw.query_drop("ANALYZE TABLE idem_records").await.expect("answers");
        let size = "SELECT file_size FROM information_schema.innodb_sys_tablespaces WHERE name = 'idem/idem_records'";
        raw.query_first(size).await.expect("answers").expect("a row")
    })
    .await
}

#[cfg(feature = "nats")]
async fn nats() -> f64 {
    use idem_benches::by_hand::nats::stored_bytes;
    let server = idem_tests::nats::NatsServer::start();
    let store = idem_runtime::NatsStore::connect(&server.url()).await.expect("connects");
    growth(store.handle(), async || stored_bytes(&server.url()).await).await
}

/// Returns the size of one item, by the rules of the bill.
#[cfg(feature = "dynamodb")]
async fn dynamodb() -> f64 {
    use idem_tests::dynamo::{Emulator, Kind, TABLE, largest_item, open};
    let emulator = Emulator::with_table(Kind::Dynoxide).await;
    let store = open(&emulator.endpoint(), TABLE).handle();
    ship(&store, format!("{:030}", new_orders(1).start)).await.expect("ships");
    largest_item(&emulator).await as f64
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("builds");
    let table = Table::new("Bytes of a finished record", "bytes", "bytes");
    let line = |name: &str, mut bytes: Box<dyn FnMut() -> f64>| {
        if is_wanted(name) {
            let [measured] = alternate(1, [&mut *bytes]);
            table.value(name, &measured, measured.median(), Goal::None);
        }
    };
    line("SQLite", Box::new(|| runtime.block_on(sqlite())));
    line("Redis", Box::new(|| runtime.block_on(redis())));
    line("PostgreSQL", Box::new(|| runtime.block_on(postgres())));
    #[cfg(feature = "mysql")]
    line("MariaDB", Box::new(|| runtime.block_on(mariadb())));
    #[cfg(feature = "nats")]
    line("NATS", Box::new(|| runtime.block_on(nats())));
    #[cfg(feature = "dynamodb")]
    line("DynamoDB", Box::new(|| runtime.block_on(dynamodb())));
}
