//! Settings, opening a store, and the requirements on the server.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mysql_async::{Opts, OptsBuilder};

use super::failure::{MISSING_TABLE, OpFailure, ROW_FORMAT, misconfigured};
use super::sql::{self, Row, SizeLimit, Statements};
use super::statement_pool::{ServerTraits, StatementPool};
use super::{MySqlCore, MySqlInner, MySqlStore};
use crate::clock::SystemClock;
use crate::kit::work::Effect;
use crate::store::{StoreContext, StoreError, StoreErrorKind};

/// Longest time that a statement waits for the lock of a record or of the whole table, in seconds: the shortest that
/// MySQL allows. While a statement waits, all operations in it wait.
const LOCK_TIMEOUT: u32 = 1;

/// Settings of a [`MySqlStore`].
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// # use std::time::Duration;
/// use idem_runtime::MySqlStore;
/// let store = MySqlStore::options()
///     .table("shop_idem")
///     .ensure_schema()
///     .purge_every(Duration::from_secs(60))
///     .connect("mysql://shop@localhost/shop?require_ssl=true")
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct MySqlOptions {
    table: String,
    namespace: String,
    holder: String,
    ensure_schema: bool,
    partitions: u16,
    pool_size: usize,
    response_timeout: Duration,
    purge_every: Option<Duration>,
    read_only: bool,
}

impl Default for MySqlOptions {
    fn default() -> Self {
        Self {
            table: sql::TABLE.to_owned(),
            namespace: String::new(),
            holder: String::new(),
            ensure_schema: false,
            partitions: 0,
            pool_size: 6,
            response_timeout: Duration::from_secs(5),
            purge_every: None,
            read_only: false,
        }
    }
}

impl MySqlOptions {
    /// Name of the table (default: `idem_records`), in the database that the URL names. Applications that share a
    /// database but must not share operations need different tables. The name has at most 64 ASCII letters, digits and
    /// `_`.
    #[must_use]
    pub fn table(self, table: impl Into<String>) -> Self {
        Self { table: table.into(), ..self }
    }

    /// Name of this application, for its child keys ([`Attempt::child_key`](crate::Attempt::child_key); default: none).
    /// Two applications with separate tables may have the same scope and key. With different names, these applications
    /// never pass the same child key to a third party. The name has no other effect. Don't change the name once child
    /// keys are in use: a retried operation would get another child key.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// Name of this handle in its records, next to host and process (default: none). The name shows who holds a key;
    /// see [`Holder`](crate::store::Holder).
    #[must_use]
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { holder: name.into(), ..self }
    }

    /// Creates the table if it is missing. Any number of processes may use this option simultaneously. The login then
    /// needs the right to create a table. Without this option, the table must exist: see [`MySqlStore::schema_sql`].
    #[must_use]
    pub fn ensure_schema(self) -> Self {
        Self { ensure_schema: true, ..self }
    }

    /// Number of partitions of the table that [`ensure_schema`](MySqlOptions::ensure_schema) creates, by a hash of the
    /// key, up to 1024 (default: 0, a plain table). Partitions keep each index small in a table of many millions of
    /// records. Only the creation of the table uses this number: a store opens a table with any number of partitions.
    /// An existing table is never changed.
    #[must_use]
    pub fn partitions(self, partitions: u16) -> Self {
        Self { partitions, ..self }
    }

    /// Returns the statement that creates the table with these settings, for your own migrations. The statement may be
    /// run repeatedly.
    ///
    /// ```
    /// # use idem_runtime::MySqlStore;
    /// let sql = MySqlStore::options().table("shop_idem").partitions(16).schema_sql();
    /// assert!(sql.contains("PARTITION BY KEY (`key`) PARTITIONS 16"));
    /// ```
    pub fn schema_sql(&self) -> String {
        sql::ddl(&self.table, self.partitions)
    }

    /// Largest number of connections for calls, in each runtime (default: 6). The store opens up to two further
    /// connections, for renewals and late writes. Operations of any number of tasks share the connections. Operations
    /// with results over 8 KB use half of the connections at most.
    #[must_use]
    pub fn pool_size(self, pool_size: usize) -> Self {
        Self { pool_size: pool_size.max(1), ..self }
    }

    /// Time limit of one exchange with the server (default: 5 s). A result that is written gets this time anew for each
    /// 256 KiB; a result that is read has to arrive within this time. Keep this limit well below the shortest renewal
    /// interval (a third of the lease), and above 1 s, for which a statement may wait for a lock. After a time-out a
    /// write may have taken effect; the engine repeats the write with the same owner token.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Deletes expired records in the background, in batches, every `interval` (default: never; only
    /// [`Store::purge`](crate::Store::purge) deletes them). The background task ends with the store.
    #[must_use]
    pub fn purge_every(self, interval: Duration) -> Self {
        Self { purge_every: Some(interval), ..self }
    }

    /// Opens the store for reading only. A replica, and a login with the right to `SELECT`, then suffice.
    /// [`inspect`](crate::Store::inspect) and [`list`](crate::Store::list) work, and every write fails. A replica may
    /// lag behind its primary: it may show a running attempt that has ended. No table is created, and nothing is
    /// purged. Calls of handlers need a store that writes.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { read_only: true, ..self }
    }

    /// Connects to the server at `url`; see [`MySqlStore::connect`].
    ///
    /// # Errors
    /// The errors of [`MySqlStore::connect`].
    pub async fn connect(self, url: &str) -> Result<MySqlStore, StoreError> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if self.table.is_empty() || self.table.len() > sql::MAX_TABLE_BYTES || !self.table.chars().all(is_name) {
            let limit = sql::MAX_TABLE_BYTES;
            return Err(misconfigured(format!("the name of the table must have 1 to {limit} letters, digits and `_`")));
        }
        if self.partitions > sql::MAX_PARTITIONS {
            return Err(misconfigured(format!("a table has {} partitions at most", sql::MAX_PARTITIONS)));
        }
        let opts = Opts::from_url(url).map_err(|_| {
            // The text of the driver may quote the URL, which may hold a password.
            misconfigured("the MySQL URL can't be used: write `mysql://[user[:password]@]host[:port]/database`".into())
        })?;
        if opts.db_name().is_none_or(str::is_empty) {
            return Err(misconfigured("the MySQL URL names no database: end it with `/database`".to_owned()));
        }
        let opts = session_options(opts)?;
        let clock = Arc::new(SystemClock::default());
        let core = MySqlCore {
            context: Arc::new(StoreContext::new("mysql", clock.clone()).system("mysql").held_by(&self.holder)),
            clock,
            namespace: self.namespace.clone().into(),
            response_timeout: self.response_timeout,
            sql: Arc::new(Statements::new(&self.table)),
            table: self.table.clone().into(),
            opts,
            traits: Arc::new(OnceLock::new()),
            waiters: Arc::default(),
            writes: !self.read_only,
            purge_every: self.purge_every.filter(|_| !self.read_only),
        };
        let inner = MySqlInner::new(Arc::new(core), self.pool_size, false);
        self.check(&inner).await?;
        Ok(MySqlStore(inner))
    }

    /// Checks the server and the table, and creates the table if that is wanted.
    async fn check(&self, inner: &MySqlInner) -> Result<(), StoreError> {
        let here = inner.here()?;
        let server = &here.server;
        let traits = server.check_server(!self.read_only).await?;
        let _ = inner.common.traits.set(traits);
        if !server.has_table(&self.table).await? {
            if !self.ensure_schema || self.read_only {
                return Err(misconfigured(format!("there is no table `{}`: {MISSING_TABLE}", self.table)));
            }
            let ddl = self.schema_sql();
            server.database.ready().await?.text(&ddl, Effect::Writes).await?;
            if !server.has_table(&self.table).await? {
                return Err(misconfigured("the table is missing although it was created just now".to_owned()));
            }
        }
        server.check_rights(&self.table, !self.read_only, inner.common.purge_every.is_some()).await
    }
}

/// Completes the settings of the connections.
fn session_options(opts: Opts) -> Result<Opts, StoreError> {
    #[cfg(not(feature = "mysql-tls"))]
    if opts.ssl_opts().is_some() {
        return Err(misconfigured("`require_ssl=true` needs the feature `mysql-tls` of idem-runtime".to_owned()));
    }
    #[cfg(feature = "mysql-tls")]
    let ssl = opts.ssl_opts().cloned().map(trusted).transpose()?;
    // A user's default for one of the later settings would leave out rows, refuse or cancel statements, or let an
    // abandoned statement wait in the server until it is run long after its caller has gone. Each server skips the
    // comment for the other one.
    let settings = format!(
        "SET SESSION autocommit = 1, sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', \
         innodb_lock_wait_timeout = {LOCK_TIMEOUT}, lock_wait_timeout = {LOCK_TIMEOUT}, \
         sql_select_limit = 18446744073709551615, sql_big_selects = 1, sql_safe_updates = 0 \
         /*M!100600 , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */"
    );
    let builder = OptsBuilder::from_opts(opts)
        // A statement that leaves a row as it is has still found the row.
        .client_found_rows(true)
        // The store keeps each prepared statement for as long as its connection.
        .stmt_cache_size(0)
        .prefer_socket(false)
        .tcp_keepalive(Some(Duration::from_secs(30)))
        .setup(vec!["SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE".to_owned(), settings]);
    #[cfg(feature = "mysql-tls")]
    let builder = builder.ssl_opts(ssl);
    Ok(builder.into())
}

/// Adds the certificates that the system trusts.
#[cfg(feature = "mysql-tls")]
fn trusted(ssl: mysql_async::SslOpts) -> Result<mysql_async::SslOpts, StoreError> {
    // Keeps the cryptography provider that the application has chosen. Without any provider, TLS would panic.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut roots: Vec<_> = ssl.root_certs().to_vec();
    if !ssl.disable_built_in_roots() {
        let system = rustls_native_certs::load_native_certs();
        roots.extend(system.certs.into_iter().map(|cert| cert.to_vec().into()));
    }
    if roots.is_empty() {
        return Err(misconfigured("the system has no trusted certificates, which TLS needs".to_owned()));
    }
    Ok(ssl.with_root_certs(roots).with_disable_built_in_roots(true))
}

/// Global settings of the server, by name.
struct ServerVariables(Vec<Row>);

impl ServerVariables {
    fn get(&self, name: &str) -> Option<&str> {
        let row = self.0.iter().find(|row| row.text(0).ok().flatten().is_some_and(|it| it.eq_ignore_ascii_case(name)));
        row.and_then(|row| row.text(1).ok().flatten())
    }

    fn is_on(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value.eq_ignore_ascii_case("on") || value == "1")
    }

    /// Returns whether the server accepts writes. `read_only` has more values than on and off on newer servers.
    fn accepts_writes(&self) -> bool {
        let is_off = |value: &str| value.is_empty() || value == "0" || value.eq_ignore_ascii_case("off");
        READ_ONLY.iter().all(|name| self.get(name).is_none_or(is_off))
    }

    /// Returns the reason why several servers may accept writes of one table, if there is one. Each of these servers
    /// has its own clock and sees the writes of the others late, so two attempts could hold one key.
    fn several_writers(&self) -> Option<&'static str> {
        let nodes = self.get("wsrep_cluster_size").and_then(|nodes| nodes.parse().ok()).unwrap_or(0_u32);
        if self.is_on("wsrep_on") && nodes > 1 {
            return Some(
                "the server is a node of a Galera cluster, in which every node accepts writes; use a server with one \
                 primary",
            );
        }
        let is_multi = self.get("group_replication_single_primary_mode").is_some()
            && !self.is_on("group_replication_single_primary_mode");
        is_multi.then_some("the server is in a replication group with several primaries; use a single primary")
    }

    /// Returns a warning for each setting with which a crash loses acknowledged records.
    fn losses(&self) -> Vec<&'static str> {
        let mut losses = Vec::new();
        // 3 is a value of MariaDB, which writes more than 1.
        if self.get("innodb_flush_log_at_trx_commit").is_some_and(|it| !matches!(it, "1" | "3")) {
            losses.push("`innodb_flush_log_at_trx_commit` is not 1");
        }
        // After a crash the server undoes the transactions that its binary log lacks.
        if self.is_on("log_bin") && self.get("sync_binlog").is_some_and(|it| it != "1") {
            losses.push("`sync_binlog` is not 1, and the server has a binary log");
        }
        if self.get("Innodb_redo_log_enabled").is_some_and(|it| it.eq_ignore_ascii_case("off")) {
            losses.push("the redo log is off");
        }
        losses
    }
}

/// Settings that decide whether the server accepts writes.
const READ_ONLY: [&str; 3] = ["read_only", "super_read_only", "innodb_read_only"];
/// Settings that the checks read.
const VARIABLES: &str = "'read_only', 'super_read_only', 'innodb_read_only', 'log_bin', 'binlog_format', \
    'innodb_flush_log_at_trx_commit', 'sync_binlog', 'max_allowed_packet', 'wsrep_on', \
    'group_replication_single_primary_mode'";

impl StatementPool {
    /// Checks the version of the server, and with `writes` also the settings that writes depend on.
    async fn check_server(&self, writes: bool) -> Result<ServerTraits, StoreError> {
        let version = self.database.ready().await?.text("SELECT version()", Effect::Reads).await?;
        let version = version.first().and_then(|row| row.text(0).ok().flatten().map(str::to_owned)).unwrap_or_default();
        let is_mariadb = version.contains("MariaDB");
        let mut numbers = version.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or_default());
        let number = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
        let is_other = ["TiDB", "Vitess", "OceanBase"].iter().any(|name| version.contains(name));
        if is_other || number < if is_mariadb { (10, 6) } else { (8, 0) } {
            let name: String = version.chars().take(60).collect();
            return Err(misconfigured(format!("the server is {name}; MySQL 8.0 or MariaDB 10.6, or newer, is needed")));
        }
        let settings = self.settings().await?;
        if writes {
            if !settings.accepts_writes() || self.is_replica().await {
                return Err(misconfigured(
                    "the server is a replica or allows reading only; connect to the primary".to_owned(),
                ));
            }
            if let Some(why) = settings.several_writers() {
                return Err(misconfigured(why.to_owned()));
            }
            let logs_statements = settings.get("binlog_format").is_some_and(|it| it.eq_ignore_ascii_case("statement"));
            if settings.is_on("log_bin") && logs_statements {
                return Err(misconfigured(ROW_FORMAT.to_owned()));
            }
            for loss in settings.losses() {
                tracing::warn!(
                    "{loss}: a crash of the server forgets records that were acknowledged, and a forgotten operation \
                     runs again"
                );
            }
        }
        let packet = settings.get("max_allowed_packet").and_then(|bytes| bytes.parse().ok());
        Ok(ServerTraits { returns_rows: is_mariadb, size_limit: SizeLimit(packet.unwrap_or(4 * 1024 * 1024)) })
    }

    async fn settings(&self) -> Result<ServerVariables, OpFailure> {
        let text = format!("SHOW GLOBAL VARIABLES WHERE Variable_name IN ({VARIABLES})");
        let mut rows = self.database.ready().await?.text(&text, Effect::Reads).await?;
        let text = "SHOW GLOBAL STATUS WHERE Variable_name IN ('wsrep_cluster_size', 'Innodb_redo_log_enabled')";
        rows.extend(self.database.ready().await?.text(text, Effect::Reads).await?);
        Ok(ServerVariables(rows))
    }

    /// Returns whether the server has a source from which it replicates. Most logins may not ask, and some versions
    /// don't know the statement; the answer is then false.
    async fn is_replica(&self) -> bool {
        let Ok(ready) = self.database.ready().await else { return false };
        ready.text("SHOW REPLICA STATUS", Effect::Reads).await.is_ok_and(|rows| !rows.is_empty())
    }

    /// Returns whether the table exists. A table of another version, or of another application, is an error.
    async fn has_table(&self, table: &str) -> Result<bool, StoreError> {
        let text = format!(
            "SELECT table_comment, engine FROM information_schema.tables \
             WHERE table_schema = database() AND table_name = '{table}'"
        );
        let rows = self.database.ready().await?.text(&text, Effect::Reads).await?;
        let Some(row) = rows.first() else { return Ok(false) };
        let text = |at| row.text(at).ok().flatten().unwrap_or_default();
        if !is_ours(text(0)) {
            return Err(misconfigured(format!(
                "the table `{table}` is of another version, or not of this library: its comment is not `{}`; it is left \
                 alone",
                sql::TABLE_VERSION
            )));
        }
        if !text(1).eq_ignore_ascii_case("innodb") {
            return Err(misconfigured(format!("the table `{table}` has the engine {}; InnoDB is needed", text(1))));
        }
        Ok(true)
    }

    /// Checks that the login may use the table as this store will. Changes nothing.
    async fn check_rights(&self, table: &str, writes: bool, deletes: bool) -> Result<(), StoreError> {
        self.one(&self.sql.ping, Vec::new(), Effect::Reads).await?;
        let table = sql::quoted(table);
        // The servers check the rights of a statement when they explain it.
        let insert = format!(
            "EXPLAIN INSERT INTO {table} (`key`, `format`, `state`, `owner`, `attempt`, `attempts_used`, \
             `on_crash_fail`, `lapses_at`, `expires_at`, `listed_at`, `first_seen_at`, `began_at`) \
             VALUES ('', 1, '', '', 1, 1, 0, 0, 0, 0, 0, 0)"
        );
        let update = format!("EXPLAIN UPDATE {table} SET `lapses_at` = 0 WHERE `key` = ''");
        let delete = format!("EXPLAIN DELETE FROM {table} WHERE `key` = ''");
        let wanted = [("INSERT", insert, writes), ("UPDATE", update, writes), ("DELETE", delete, deletes)];
        for (right, text, _) in wanted.into_iter().filter(|(_, _, is_wanted)| *is_wanted) {
            match self.database.ready().await?.text(&text, Effect::Reads).await {
                Ok(_) => {}
                Err(failure) if failure.kind == StoreErrorKind::Misconfigured => {
                    return Err(misconfigured(format!("the login lacks {right} on the table {table}")));
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(())
    }

    /// Checks that the store can serve calls; without `writes`, that it can read.
    pub(super) async fn ping(&self, table: &str, writes: bool, deletes: bool) -> Result<(), StoreError> {
        if writes {
            let settings = self.settings().await?;
            if !settings.accepts_writes() {
                let message = "the server allows only reading: it is a replica, or `read_only` is on";
                return Err(StoreError::new(StoreErrorKind::Unavailable, message));
            }
            if let Some(why) = settings.several_writers() {
                return Err(misconfigured(why.to_owned()));
            }
        }
        self.check_rights(table, writes, deletes).await
    }
}

/// Returns whether the comment on a table begins with [`sql::TABLE_VERSION`]. An administrator may have added text
/// after the version.
fn is_ours(comment: &str) -> bool {
    comment.strip_prefix(sql::TABLE_VERSION).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::mysql::sql::Cell;

    fn variables(of: &[(&str, &str)]) -> ServerVariables {
        let cell = |text: &str| Cell::Bytes(text.as_bytes().to_vec().into());
        ServerVariables(of.iter().map(|(name, value)| Row(vec![cell(name), cell(value)])).collect())
    }

    #[test]
    fn every_value_of_read_only_but_off_refuses_writes() {
        for off in ["OFF", "off", "0"] {
            assert!(variables(&[("read_only", off)]).accepts_writes(), "{off}");
        }
        for on in ["ON", "1", "NO_LOCK", "NO_LOCK_NO_ADMIN"] {
            assert!(!variables(&[("read_only", on)]).accepts_writes(), "{on}");
        }
    }

    #[test]
    fn servers_with_several_writers_are_recognised() {
        let galera = |size| variables(&[("wsrep_on", "ON"), ("wsrep_cluster_size", size)]).several_writers();
        assert!(galera("3").is_some());
        assert!(galera("1").is_none() && galera("0").is_none());
        assert!(variables(&[("wsrep_on", "OFF"), ("wsrep_cluster_size", "3")]).several_writers().is_none());
        let group = |mode| variables(&[("group_replication_single_primary_mode", mode)]).several_writers();
        assert!(group("OFF").is_some() && group("ON").is_none());
        assert!(variables(&[]).several_writers().is_none());
    }

    #[test]
    fn settings_that_lose_acknowledged_records_are_named() {
        let flush = "innodb_flush_log_at_trx_commit";
        let losses = |of: &[(&str, &str)]| variables(of).losses().len();
        assert_eq!([losses(&[(flush, "1")]), losses(&[(flush, "3")])], [0, 0]);
        assert_eq!([losses(&[(flush, "0")]), losses(&[(flush, "2")])], [1, 1]);
        assert_eq!(losses(&[("log_bin", "ON"), ("sync_binlog", "0")]), 1);
        assert_eq!(losses(&[("log_bin", "ON"), ("sync_binlog", "100")]), 1);
        assert_eq!(losses(&[("log_bin", "ON"), ("sync_binlog", "1")]), 0);
        assert_eq!(losses(&[("log_bin", "OFF"), ("sync_binlog", "0")]), 0);
        assert_eq!(
            [losses(&[("Innodb_redo_log_enabled", "OFF")]), losses(&[("Innodb_redo_log_enabled", "ON")])],
            [1, 0]
        );
    }
}
