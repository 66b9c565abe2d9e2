//! Settings of the SQLite store, and the opening of a file.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::batch;
use super::file::Database;
use super::settings::{SqliteSettings, Synchronous};
use super::store::SqliteStore;
use crate::clock::{Clock, SystemClock};
use crate::store::StoreError;

/// Settings of a [`SqliteStore`].
///
/// ```
/// # async fn open(folder: &std::path::Path) -> Result<(), idem_runtime::StoreError> {
/// # use std::time::Duration;
/// use idem_runtime::SqliteStore;
/// use idem_runtime::sqlite::Synchronous;
/// let store = SqliteStore::options()
///     .table("shop_operations")
///     .synchronous(Synchronous::Normal)
///     .busy_timeout(Duration::from_secs(1))
///     .open(folder.join("shop.db"))
///     .await?;
/// # Ok(()) }
/// # let folder = std::env::temp_dir().join(format!("idem-doc-options-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(open(&folder)).unwrap();
/// # std::fs::remove_dir_all(&folder).unwrap();
/// ```
#[derive(Clone, Default, Debug)]
pub struct SqliteOptions {
    settings: SqliteSettings,
    clock: Option<Arc<dyn Clock>>,
}

impl SqliteOptions {
    /// Table that holds the records (default: `idem_records`). The name consists of letters, digits and `_`.
    /// Applications that share a file but must not share operations need different tables.
    #[must_use]
    pub fn table(self, table: impl Into<String>) -> Self {
        Self { settings: SqliteSettings { table: table.into(), ..self.settings }, ..self }
    }

    /// Name of this application, for its child keys (default: empty).
    ///
    /// The keys of [`Attempt::child_key`](crate::Attempt::child_key) contain the name. With different names, two
    /// applications that have the same scopes and keys in different files or tables never give the same child key to a
    /// third party. The records don't depend on the name.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { settings: SqliteSettings { namespace: namespace.into(), ..self.settings }, ..self }
    }

    /// Name of this handle in its records, next to host and process (default: none). The name shows who holds a key;
    /// see [`Holder`](crate::store::Holder).
    #[must_use]
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { settings: SqliteSettings { holder: name.into(), ..self.settings }, ..self }
    }

    /// Durability of commits (default: [`Synchronous::Full`]). The setting applies to the commits of this handle; other
    /// processes with the same file may choose another setting. The renewal of a lease never waits for the disk,
    /// because a loss of power also ends the attempt.
    #[must_use]
    pub fn synchronous(self, synchronous: Synchronous) -> Self {
        Self { settings: SqliteSettings { synchronous, ..self.settings }, ..self }
    }

    /// Longest time that a call waits for a lock that another process or handle holds on the file (default: 5 s). After
    /// this time the call fails, and has written nothing. Renewals and late writes ignore this limit: the store retries
    /// them until `response_timeout`.
    #[must_use]
    pub fn busy_timeout(self, busy_timeout: Duration) -> Self {
        Self { settings: SqliteSettings { busy_timeout, ..self.settings }, ..self }
    }

    /// Longest time that a call waits for its answer, for any reason (default: 10 s). After a time-out a write may have
    /// taken effect; the engine repeats the write with the same owner token. A write that no thread had started never
    /// takes effect.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { settings: SqliteSettings { response_timeout, ..self.settings }, ..self }
    }

    /// Number of calls that may wait for a thread (default: 16 384). The store refuses further calls immediately.
    #[must_use]
    pub fn queue_capacity(self, queue_capacity: usize) -> Self {
        Self { settings: SqliteSettings { queue_capacity: queue_capacity.max(1), ..self.settings }, ..self }
    }

    /// Largest size of the file in bytes, including your own tables in it (default: no limit but the disk). A full
    /// store refuses writes that need more space, with [`StoreErrorKind::Full`](crate::StoreErrorKind::Full); it
    /// forgets no record early. An attempt that has begun can always end without a result, because such an end needs no
    /// space.
    #[must_use]
    pub fn max_bytes(self, max_bytes: u64) -> Self {
        Self { settings: SqliteSettings { max_bytes: Some(max_bytes), ..self.settings }, ..self }
    }

    /// Clock of the store (default: [`SystemClock`]). The times in the records are read from its [`wall`](Clock::wall)
    /// clock, and all processes with this file compare these times. Set another clock only in tests of leases and
    /// retentions.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }
    }

    /// Opens the file at `path`. Creates the file and its table if they are missing; see [`SqliteStore::open`].
    ///
    /// # Errors
    /// The errors of [`SqliteStore::open`].
    pub async fn open(self, path: impl AsRef<Path>) -> Result<SqliteStore, StoreError> {
        let clock = self.clock.unwrap_or_else(|| Arc::new(SystemClock::default()));
        let database = Database::new(path.as_ref(), self.settings, Arc::clone(&clock))?;
        Ok(SqliteStore::new(batch::start(database).await?, clock))
    }
}
