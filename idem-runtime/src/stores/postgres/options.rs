//! Settings, opening a store, and the requirements on the server.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

#[cfg(feature = "with-deadpool-postgres-0_14")]
use deadpool_postgres::Pool;
use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};

use super::failure::{MISSING_TABLE, misconfigured};
use super::sessions::{ConnectionSource, LONGEST, Tls};
use super::sql::{self, Executor as _, Statements};
use super::wake::Listener;
use super::{PostgresCore, PostgresInner, PostgresStore, StatementPool};
use crate::clock::SystemClock;
use crate::kit::rows::Micros;
use crate::kit::work::Effect;
use crate::store::{StoreContext, StoreError};
use crate::sync::Process;

/// Oldest version of the server that supports all statements of this store, as in `server_version_num`.
const OLDEST: i64 = 120_000;
/// Rights on the table. Reading needs the first right, calls need the first three. Calls delete no rows: only purges
/// and operators who forget records need the right to `DELETE`.
const RIGHTS: [&str; 4] = ["SELECT", "INSERT", "UPDATE", "DELETE"];
/// Longest time that a statement waits for the lock of one key, in milliseconds. Only a transaction of the user holds a
/// key for longer than a commit takes. While a statement waits, all operations in it wait.
const LOCK_TIMEOUT_MS: u32 = 1000;
/// Longest time that a renewal or a late write waits for the lock of one key, in milliseconds. One locked row must not
/// delay the renewal of other leases.
const UPKEEP_LOCK_TIMEOUT_MS: u32 = 100;

/// Settings of a [`PostgresStore`].
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// # use std::time::Duration;
/// use idem_runtime::PostgresStore;
/// let store = PostgresStore::options()
///     .schema("shop_idem")
///     .ensure_schema()
///     .purge_every(Duration::from_secs(60))
///     .connect("postgres://shop@localhost/shop?sslmode=require")
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    schema: String,
    namespace: String,
    holder: String,
    ensure_schema: bool,
    partitions: u16,
    pool_size: usize,
    response_timeout: Duration,
    behind_pgbouncer: bool,
    purge_every: Option<Duration>,
    read_only: bool,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self {
            schema: sql::SCHEMA.to_owned(),
            namespace: String::new(),
            holder: String::new(),
            ensure_schema: false,
            partitions: 0,
            pool_size: 6,
            response_timeout: Duration::from_secs(5),
            behind_pgbouncer: false,
            purge_every: None,
            read_only: false,
        }
    }
}

impl PostgresOptions {
    /// Schema that holds the table (default: `idem`). Applications that share a database but must not share operations
    /// need different schemas. The name has at most 58 bytes.
    #[must_use]
    pub fn schema(self, schema: impl Into<String>) -> Self {
        Self { schema: schema.into(), ..self }
    }

    /// Name of this application, for its child keys ([`Attempt::child_key`](crate::Attempt::child_key); default: none).
    /// Two applications with separate tables may have the same scope and key. With different names, these applications
    /// never pass the same child key to a third party. The name has no other effect. Don't change the name once child
    /// keys are in use: a retried operation would get another child key.
    /// [`Within::namespace`](crate::within::Within::namespace) sets this name for a transaction.
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

    /// Creates the schema and the table if they are missing. Any number of processes may use this option
    /// simultaneously. The login then needs the right to create a schema. Without this option, the schema and the table
    /// must exist: see [`PostgresStore::schema_sql`].
    #[must_use]
    pub fn ensure_schema(self) -> Self {
        Self { ensure_schema: true, ..self }
    }

    /// Number of hash partitions of the table that [`ensure_schema`](PostgresOptions::ensure_schema) creates, up to 128
    /// (default: 0, a plain table). From about ten million records on, 16 partitions keep each index small, and let the
    /// server vacuum several partitions in parallel. With fewer records, partitions only make each call slower.
    /// docs/operations.md has the figures.
    ///
    /// Only the creation of the table uses this number: a store opens a table with any number of partitions. An
    /// existing table is never changed.
    #[must_use]
    pub fn partitions(self, partitions: u16) -> Self {
        Self { partitions, ..self }
    }

    /// Returns the statements that create the table with these settings, for your own migrations. The statements may be
    /// run repeatedly.
    ///
    /// ```
    /// # use idem_runtime::PostgresStore;
    /// let sql = PostgresStore::options().schema("shop_idem").partitions(16).schema_sql();
    /// assert!(sql.contains(r#"FOR VALUES WITH (MODULUS 16, REMAINDER 0)"#));
    /// ```
    pub fn schema_sql(&self) -> String {
        sql::ddl(&self.schema, self.partitions)
    }

    /// Largest number of connections for calls, in each runtime (default: 6). The store opens up to three further
    /// connections: two for renewals and late writes, and one that listens. Operations of any number of tasks share the
    /// connections. Operations with results over 8 KB use half of the connections at most.
    #[must_use]
    pub fn pool_size(self, pool_size: usize) -> Self {
        Self { pool_size: pool_size.max(1), ..self }
    }

    /// Time limit of one exchange with the server (default: 5 s). Keep this limit well below the shortest renewal
    /// interval (a third of the lease). After a time-out a write may have taken effect; the engine repeats the write
    /// with the same owner token. The `statement_timeout` of connections that the store opens is twelve times as long,
    /// except behind PgBouncer.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Adapts the store to a server behind PgBouncer, or behind another pooler that gives each transaction a session of
    /// its own.
    ///
    /// Behind a pooler, a session keeps no state between transactions. So the server plans each statement anew, and a
    /// duplicate that waits for a running attempt polls every 50 ms instead of being woken.
    #[must_use]
    pub fn behind_pgbouncer(self) -> Self {
        Self { behind_pgbouncer: true, ..self }
    }

    /// Deletes expired records in the background, in batches, every `interval` (default: never; only
    /// [`Store::purge`](crate::Store::purge) deletes them). The background task ends with the store.
    #[must_use]
    pub fn purge_every(self, interval: Duration) -> Self {
        Self { purge_every: Some(interval), ..self }
    }

    /// Opens the store for reading only. A hot standby, and a login with the right to `SELECT`, then suffice.
    /// [`inspect`](crate::Store::inspect) and [`list`](crate::Store::list) work, and every write fails. A standby may
    /// lag behind its primary: it may show a running attempt that has ended. No schema is created, and nothing is
    /// purged. Calls of handlers need a store that writes.
    ///
    /// ```no_run
    /// # async fn connect() -> Result<(), Box<dyn std::error::Error>> {
    /// use idem_runtime::store::Filter;
    /// use idem_runtime::{PostgresStore, StoreExt};
    ///
    /// let store = PostgresStore::options().read_only().connect("postgres://support@standby/shop").await?;
    /// let stuck = store.operator().list(&Filter::new().uncertain()).await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { read_only: true, ..self }
    }

    /// Connects to the server at `url`; see [`PostgresStore::connect`].
    ///
    /// # Errors
    /// The errors of [`PostgresStore::connect`].
    pub async fn connect(self, url: &str) -> Result<PostgresStore, StoreError> {
        // This store's TLS checks every certificate in full, so `verify-full` and `require` mean the same.
        let checked = url.replace("sslmode=verify-full", "sslmode=require");
        let mut config: Config = checked.parse().map_err(|error: tokio_postgres::Error| {
            // The parser's error may quote the URL, which may hold a password.
            let detail = std::error::Error::source(&error).map(ToString::to_string);
            let detail = detail.filter(|_| !url.contains('@') && !url.contains("password"));
            let detail = detail.unwrap_or_else(|| "write `postgres://[user[:password]@]host[:port][/database]`".into());
            misconfigured(format!("the PostgreSQL URL can't be used: {detail}"))
        })?;
        let tls = tls(&mut config)?;
        let mut upkeep = config.clone();
        if config.get_application_name().is_none() {
            upkeep.application_name("idem-upkeep");
        }
        self.complete(&mut config, LOCK_TIMEOUT_MS);
        self.complete(&mut upkeep, UPKEEP_LOCK_TIMEOUT_MS);
        let listener = (!self.behind_pgbouncer).then(|| Listener { config: config.clone(), tls: tls.clone() });
        let calls = ConnectionSource::Config(Box::new(config), tls.clone());
        self.open(calls, ConnectionSource::Config(Box::new(upkeep), tls), listener).await
    }

    /// Uses your own pool, which may also serve other work of yours.
    ///
    /// The type is the pool of deadpool-postgres 0.14 (feature `with-deadpool-postgres-0_14`).
    ///
    /// The pool decides on size, TLS and login. The pool's connections can't listen, so a duplicate that waits for a
    /// running attempt polls every 50 ms; with [`connect`](PostgresOptions::connect) a notification wakes the
    /// duplicate.
    ///
    /// # Errors
    /// The errors of [`PostgresStore::connect`].
    #[cfg(feature = "with-deadpool-postgres-0_14")]
    pub async fn connect_with(self, pool: Pool) -> Result<PostgresStore, StoreError> {
        self.open(ConnectionSource::Pool(pool.clone()), ConnectionSource::LikePool(pool), None).await
    }

    /// Completes the settings of the connections that this store opens.
    fn complete(&self, config: &mut Config, lock_timeout: u32) {
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(self.response_timeout);
        }
        config.keepalives_idle(Duration::from_secs(30));
        let any = config.get_target_session_attrs() == TargetSessionAttrs::Any;
        if config.get_hosts().len() > 1 && any && !self.read_only {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        if config.get_application_name().is_none() {
            config.application_name("idem");
        }
        // A pooler refuses session settings.
        if !self.behind_pgbouncer {
            // `statement_timeout` is longer than the time limit of an exchange, because a long answer takes time on a
            // slow network. When the store gives up an exchange, it cancels the statement itself.
            let timeout = (self.response_timeout * LONGEST).as_millis().clamp(1, 2_147_483_647);
            // With these settings, the planner finds rows only by an index and joins them only in nested loops, even if
            // the table was empty a moment ago. A statement thus has only one possible plan, and the server plans each
            // statement only once.
            let ours = format!(
                "-c statement_timeout={timeout} -c lock_timeout={lock_timeout} -c default_transaction_isolation=read\\ committed -c jit=off \
                 -c enable_seqscan=off -c enable_bitmapscan=off -c enable_hashjoin=off -c enable_mergejoin=off \
                 -c plan_cache_mode=force_generic_plan"
            );
            let theirs = config.get_options().unwrap_or_default().to_owned();
            config.options(format!("{ours} {theirs}").trim_end());
        }
    }

    async fn open(
        self,
        calls: ConnectionSource,
        upkeep: ConnectionSource,
        listener: Option<Listener>,
    ) -> Result<PostgresStore, StoreError> {
        // Checks the settings before it contacts the server.
        if self.schema.is_empty() || self.schema.len() > sql::MAX_SCHEMA_BYTES || self.schema.contains('\0') {
            let limit = sql::MAX_SCHEMA_BYTES;
            return Err(misconfigured(format!("the name of the schema must have 1 to {limit} bytes, and no NUL")));
        }
        if self.partitions > sql::MAX_PARTITIONS {
            return Err(misconfigured(format!("a table has {} hash partitions at most", sql::MAX_PARTITIONS)));
        }
        let clock = Arc::new(SystemClock::default());
        let common = PostgresCore {
            context: Arc::new(StoreContext::new("postgres", clock.clone()).system("postgresql").held_by(&self.holder)),
            clock,
            namespace: self.namespace.into(),
            response_timeout: self.response_timeout,
            has_sessions: !self.behind_pgbouncer,
            sql: Arc::new(Statements::new(&self.schema)),
            schema: self.schema.into(),
            calls,
            upkeep,
            listener,
            writes: !self.read_only,
            purge_every: self.purge_every.filter(|_| !self.read_only),
            purged_to: AtomicI64::new(Micros::FIRST.0),
            process: Process::this(),
        };
        let shared = PostgresInner::new(Arc::new(common), self.pool_size, false);
        let schema = &*shared.common.schema;
        // Scoped so that the borrow of the runtime's state ends before `shared` moves.
        {
            let here = shared.here()?;
            let needed = match (self.read_only, self.purge_every) {
                (true, _) => &RIGHTS[..1],
                (false, None) => &RIGHTS[..3],
                (false, Some(_)) => &RIGHTS[..],
            };
            if here.server.check(schema, needed).await?.is_none() {
                if !self.ensure_schema || self.read_only {
                    return Err(misconfigured(format!(
                        "there is no table `records` in the schema `{schema}`: {MISSING_TABLE}"
                    )));
                }
                here.server.database.execute(&sql::ensure(schema, self.partitions)).await?;
                if here.server.check(schema, needed).await?.is_none() {
                    return Err(misconfigured("the table is missing although it was created just now".to_owned()));
                }
            }
        }
        Ok(PostgresStore(shared))
    }
}

/// Returns the encryption of the connections of `config`.
fn tls(config: &mut Config) -> Result<Tls, StoreError> {
    if config.get_ssl_mode() != SslMode::Require {
        // The driver's default (`prefer`) is not used: it does not stop an attacker who suppresses the encryption, and
        // it fails if a certificate is not trusted.
        config.ssl_mode(SslMode::Disable);
        return Ok(Tls::Off);
    }
    #[cfg(not(feature = "postgres-tls"))]
    return Err(misconfigured("`sslmode=require` needs the feature `postgres-tls` of idem-runtime".to_owned()));
    #[cfg(feature = "postgres-tls")]
    {
        // Keeps the cryptography provider that the application has chosen. Without any provider, TLS would panic.
        let _ = rustls::crypto::ring::default_provider().install_default();
        match tokio_postgres_rustls::MakeRustlsConnect::with_native_certs() {
            Ok((tls, _)) => Ok(Tls::On(tls)),
            Err(_) => Err(misconfigured("the system has no trusted certificates, which TLS needs".to_owned())),
        }
    }
}

impl StatementPool {
    /// Checks the server and the table, and whether the login has the rights in `needed`. Returns `None` if the table
    /// does not exist; any other problem is an error.
    async fn check(&self, schema: &str, needed: &[&str]) -> Result<Option<()>, StoreError> {
        let rows = self.rows(&self.sql.check, &[&schema], Effect::Reads).await?;
        let unusable = || misconfigured("the server is not PostgreSQL: it answers differently".to_owned());
        let row = rows.first().ok_or_else(unusable)?;
        // Columns of a wrong type also show that the server is not PostgreSQL.
        let read = || -> Result<_, tokio_postgres::Error> {
            let (version, number): (&str, i64) = (row.try_get(0)?, row.try_get(1)?);
            let (encoding, standby): (&str, bool) = (row.try_get(2)?, row.try_get(3)?);
            let (read_only, durable): (bool, bool) = (row.try_get(4)?, row.try_get(5)?);
            let (there, comment): (bool, Option<&str>) = (row.try_get(6)?, row.try_get(7)?);
            let missing: (Option<&str>, Vec<&str>) = (row.try_get(8)?, row.try_get(9)?);
            Ok((version, number, encoding, standby, read_only, durable, there, comment, missing))
        };
        let (version, number, encoding, standby, read_only, durable, there, comment, (usage, mut missing)) =
            read().map_err(|_| unusable())?;
        // Checks the server: its version, its encoding, and its ability to write.
        if !version.starts_with("PostgreSQL ") || version.contains("-YB-") || number < OLDEST {
            let name: String = version.split(" on ").next().unwrap_or(version).chars().take(60).collect();
            return Err(misconfigured(format!("the server is {name}; PostgreSQL 12 or newer is needed")));
        }
        if encoding != "UTF8" {
            return Err(misconfigured(format!("the database has the encoding {encoding}; UTF8 is needed for keys")));
        }
        let writes = needed.len() > 1;
        if writes && (standby || read_only) {
            return Err(misconfigured(
                "the server is a standby or allows reading only; connect to the primary, or name all hosts in the URL"
                    .to_owned(),
            ));
        }
        if writes && !durable {
            tracing::warn!(
                "`fsync` or `synchronous_commit` is off: a crash of the server forgets records that were acknowledged, and \
                 a forgotten operation runs again"
            );
        }
        // Checks the table: a foreign table is refused, and a missing right is reported before the first call needs it.
        if there && comment.is_none_or(|comment| !is_ours(comment)) {
            return Err(misconfigured(format!(
                "the table `records` in the schema `{schema}` is of another version, or not of this library: its \
                 comment is not `{}`; it is left alone",
                sql::TABLE_VERSION
            )));
        }
        missing.retain(|right| needed.contains(right));
        let missing = match (usage, missing.join(", ")) {
            (None, missing) if missing.is_empty() => return Ok(there.then_some(())),
            (None, missing) => format!("{missing} on the table `records` in the schema `{schema}`"),
            (Some(usage), missing) if missing.is_empty() => format!("{usage} on the schema `{schema}`"),
            (Some(usage), missing) => {
                format!("{usage} on the schema `{schema}`, and {missing} on its table `records`")
            }
        };
        Err(misconfigured(format!(
            "the login lacks {missing}; `idem schema print postgres --login NAME` prints the grants"
        )))
    }
}

/// Returns whether the comment on a table begins with [`sql::TABLE_VERSION`]. An administrator may have added text
/// after the version.
fn is_ours(comment: &str) -> bool {
    comment.strip_prefix(sql::TABLE_VERSION).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}
