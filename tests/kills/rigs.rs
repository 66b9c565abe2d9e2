//! Stores for the processes under test.

use std::sync::atomic::{AtomicU64, Ordering};

use idem_runtime::{MySqlStore, PostgresStore};
use idem_tests::server::Kind;
use idem_tests::sqlite::Folder;
use idem_tests::{dynamo, mysql, nats, postgres, sqlite};
use mysql_async::prelude::Queryable as _;

/// Store of one test.
pub struct Rig {
    /// Text that names the store for `idem_tests::stores::open`.
    pub spec: String,
    folder: Option<Folder>,
}

/// Returns a number that no other caller gets.
pub fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Rig {
    pub async fn start(store: &str) -> Self {
        let mut folder = None;
        let spec = match store {
            "sqlite" => {
                let made = Folder::new();
                let table = "PRAGMA journal_mode = WAL; CREATE TABLE effects (id INTEGER)";
                sqlite::raw(&made.file()).execute_batch(table).expect("makes the table");
                let spec = format!("sqlite {}", made.file().display());
                folder = Some(made);
                spec
            }
            "postgres" => {
                let (url, schema) = (postgres::shared_schema().0, format!("kills_{}", number()));
                let store = PostgresStore::options().schema(&schema).ensure_schema().connect(&url).await;
                drop(store.expect("makes the table of records"));
                let table = format!("CREATE TABLE {schema}.effects (id bigint)");
                postgres::raw(&url).await.batch_execute(&table).await.expect("makes the table");
                format!("postgres {url} {schema}")
            }
            "mysql" => {
                let (url, table) = (mysql::shared_table().0, format!("kills_{}", number()));
                let store = MySqlStore::options().table(&table).ensure_schema().connect(&url).await;
                drop(store.expect("makes the table of records"));
                let effects = format!("CREATE TABLE {table}_effects (id bigint)");
                mysql::raw(&url).await.query_drop(effects).await.expect("makes the table");
                format!("mysql {url} {table}")
            }
            "redis" => format!("redis {} kills_{}", Kind::Redis.shared(), number()),
            "dynamo" => format!("dynamo {} {}", dynamo::Kind::Dynoxide.shared(), dynamo::TABLE),
            "nats" => format!("nats {} kills_{}", nats::shared(), number()),
            _ => panic!("`{store}` is no store"),
        };
        Self { spec, folder }
    }

    /// Number of the rows that a handler has written in its own transaction.
    pub async fn rows(&self, id: u64) -> usize {
        let id = i64::try_from(id).expect("a small number");
        let count: i64 = match (&self.folder, &self.spec.split(' ').collect::<Vec<_>>()[..]) {
            (Some(folder), _) => sqlite::raw(&folder.file())
                .query_row("SELECT count(*) FROM effects WHERE id = ?1", [id], |row| row.get(0))
                .expect("reads"),
            (None, ["postgres", url, schema]) => {
                let sql = format!("SELECT count(*) FROM {schema}.effects WHERE id = $1");
                postgres::raw(url).await.query_one(&sql, &[&id]).await.expect("reads").get(0)
            }
            (None, ["mysql", url, table]) => {
                let sql = format!("SELECT count(*) FROM {table}_effects WHERE id = {id}");
                mysql::raw(url).await.query_first(sql).await.expect("reads").expect("a row")
            }
            _ => panic!("{} has no transactions", self.spec),
        };
        usize::try_from(count).expect("a count")
    }
}
