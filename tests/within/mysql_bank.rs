//! Tables of payments and records in a server of MySQL or MariaDB.

use std::cell::Cell;
use std::time::Duration;

use idem_runtime::record::State;
use idem_runtime::store::{ReserveRequest, Verdict};
use idem_runtime::{MySqlStore, OnCrash, Store as _};
use idem_tests::calls::lease_of;
use idem_tests::mysql::{MySqlServer, raw, shared_table};
use mysql_async::prelude::Queryable as _;

use crate::key;

/// Tables for one test: of payments, of records, and of rows to be locked.
pub(crate) struct MySqlBank {
    pub(crate) url: String,
    pub(crate) table: String,
    pub(crate) payments: String,
    pub(crate) locks: String,
    pub(crate) store: MySqlStore,
    /// True if the handler records its errors.
    pub(crate) records_errors: bool,
    /// True once a body that never returns has paid.
    pub(crate) hangs: Cell<bool>,
    /// Server of this bank alone.
    #[expect(dead_code, reason = "the server ends when it is dropped")]
    pub(crate) server: Option<MySqlServer>,
}

impl MySqlBank {
    /// Opens a bank on the shared server.
    pub(crate) async fn open() -> Self {
        let (url, table) = shared_table();
        Self::at(url, table, None).await
    }

    /// Opens a bank on a server of its own, which takes no message of more than `bytes`.
    pub(crate) async fn with_packets_of(bytes: u32) -> Self {
        let server = MySqlServer::start_with(&[&format!("--max-allowed-packet={bytes}")]);
        Self::at(server.url(), "records".to_owned(), Some(server)).await
    }

    async fn at(url: String, table: String, server: Option<MySqlServer>) -> Self {
        let store = MySqlStore::options().table(&table).ensure_schema().connect(&url).await.unwrap();
        let (payments, locks) = (format!("{table}_payments"), format!("{table}_locks"));
        let hangs = Cell::new(false);
        let bank = Self { url, table, payments, locks, store, records_errors: false, hangs, server };
        bank.execute(&format!("CREATE TABLE {} (name varchar(100))", bank.payments)).await;
        bank.execute(&format!("CREATE TABLE {} (name varchar(100) PRIMARY KEY, n int)", bank.locks)).await;
        bank.execute(&format!("INSERT INTO {} VALUES ('one', 0), ('two', 0)", bank.locks)).await;
        bank
    }

    pub(crate) async fn execute(&self, text: &str) {
        raw(&self.url).await.query_drop(text).await.unwrap();
    }

    pub(crate) async fn payments(&self) -> i64 {
        i64::try_from(self.names().await.len()).unwrap()
    }

    /// Returns the numbers in the rows of a statement.
    pub(crate) async fn numbers(&self, text: &str) -> Vec<i64> {
        raw(&self.url).await.query(text).await.unwrap()
    }

    pub(crate) async fn names(&self) -> Vec<String> {
        let names = format!("SELECT name FROM {} ORDER BY name", self.payments);
        raw(&self.url).await.query(names).await.unwrap()
    }

    pub(crate) async fn state(&self, name: &str) -> Option<State> {
        self.store.inspect(&key(name)).await.unwrap().map(|inspection| inspection.record.state)
    }

    /// Makes a record whose attempt has died, and whose lease has lapsed.
    pub(crate) async fn abandon(&self, name: &str, on_crash: OnCrash) {
        let (owner, hour) = (self.store.context().new_owner(), Duration::from_secs(3600));
        let request = ReserveRequest::new(key(name), owner, hour, hour).on_crash(on_crash);
        let held = lease_of(self.store.reserve(&request).await);
        assert_eq!(self.store.begin(&held).await.unwrap(), Verdict::Applied);
        // A short lease could lapse before its body begins.
        self.execute(&format!("UPDATE {} SET lapses_at = 0 WHERE state = 'pending'", self.table)).await;
    }
}
