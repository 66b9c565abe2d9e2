//! Settings of the store, and how a file becomes a store.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::file::Database;
use super::{SqliteStore, batch, sql};
use crate::clock::{Clock, SystemClock};
use crate::store::StoreError;

/// Durability of a commit: whether a loss of power can undo it. The death of a process undoes no commit, and neither
/// damages the file.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Synchronous {
    /// Each commit waits for the disk, and survives a loss of power. Concurrent calls share commits.
    #[default]
    Full,
    /// Commits don't wait for the disk. A loss of power, or a crash of the operating system, undoes the commits since
    /// the last checkpoint: seconds of work or more. Operations that had finished run again, attempt numbers start
    /// anew, and `on_crash = fail` is forgotten with its record.
    Normal,
}

impl Synchronous {
    pub(super) fn pragma(self) -> &'static str {
        match self {
            Self::Full => "PRAGMA synchronous = FULL",
            Self::Normal => "PRAGMA synchronous = NORMAL",
        }
    }
}

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
#[derive(Clone, Debug)]
pub struct SqliteOptions {
    pub(super) table: String,
    pub(super) synchronous: Synchronous,
    pub(super) busy_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) queue_capacity: usize,
    pub(super) max_bytes: Option<u64>,
    pub(super) namespace: String,
    pub(super) holder: String,
    clock: Option<Arc<dyn Clock>>,
}

impl Default for SqliteOptions {
    fn default() -> Self {
        Self {
            table: sql::NAME.to_owned(),
            synchronous: Synchronous::Full,
            busy_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(10),
            queue_capacity: 16_384,
            max_bytes: None,
            namespace: String::new(),
            holder: String::new(),
            clock: None,
        }
    }
}

impl SqliteOptions {
    /// Table that holds the records (default: `idem_records`). Letters, digits and `_`. Applications that share a file
    /// but must not share operations need different tables.
    #[must_use]
    pub fn table(self, table: impl Into<String>) -> Self {
        Self { table: table.into(), ..self }
    }

    /// Name of this application, for its child keys (default: empty).
    ///
    /// The name enters [`Attempt::child_key`](crate::Attempt::child_key). Two applications with the same scopes and
    /// keys, in different files or tables, then never give the same child key to a third party. The records don't
    /// depend on the name.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// Name of this handle in its records, next to host and process (default: none). Shows who holds a key; see
    /// [`Holder`](crate::store::Holder).
    #[must_use]
    pub fn holder(self, name: impl Into<String>) -> Self {
        Self { holder: name.into(), ..self }
    }

    /// Durability of commits (default: [`Synchronous::Full`]). Holds for this handle only: every process that opens the
    /// file chooses for its own commits. The renewal of a lease never waits for the disk: a loss of power ends the
    /// attempt as well.
    #[must_use]
    pub fn synchronous(self, synchronous: Synchronous) -> Self {
        Self { synchronous, ..self }
    }

    /// Longest time that a call waits for a lock that another process or handle holds on the file (default: 5 s). Then
    /// the call fails, and nothing was written. Renewals and late writes ignore this limit: they are retried until
    /// `response_timeout`.
    #[must_use]
    pub fn busy_timeout(self, busy_timeout: Duration) -> Self {
        Self { busy_timeout, ..self }
    }

    /// Longest time that a call waits for its answer, for any reason (default: 10 s). After a time-out the write may
    /// have taken effect, and is repeated with the same owner token. If no thread had started the write, it never takes
    /// effect.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Number of calls that may wait for a thread (default: 16 384). A further call is refused immediately.
    #[must_use]
    pub fn queue_capacity(self, queue_capacity: usize) -> Self {
        Self { queue_capacity: queue_capacity.max(1), ..self }
    }

    /// Largest size of the file in bytes, including everything else in it (default: no limit but the disk). A full
    /// store refuses writes that need more room, with [`StoreErrorKind::Full`](crate::StoreErrorKind::Full); it forgets
    /// no record early. An attempt that has begun can always end without a result, because that takes no room.
    #[must_use]
    pub fn max_bytes(self, max_bytes: u64) -> Self {
        Self { max_bytes: Some(max_bytes), ..self }
    }

    /// Clock of the store (default: [`SystemClock`]). Its [`wall`](Clock::wall) dates the records; all processes with
    /// this file compare these dates. For tests of leases and retentions.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }
    }

    /// Opens the file at `path`. Creates the file and its table if they are missing; see [`SqliteStore::open`].
    ///
    /// # Errors
    /// The errors of [`SqliteStore::open`].
    pub async fn open(self, path: impl AsRef<Path>) -> Result<SqliteStore, StoreError> {
        let clock = self.clock.clone().unwrap_or_else(|| Arc::new(SystemClock::default()));
        let database = Database::new(path.as_ref(), self, Arc::clone(&clock))?;
        Ok(SqliteStore::new(batch::start(database).await?, clock))
    }
}
