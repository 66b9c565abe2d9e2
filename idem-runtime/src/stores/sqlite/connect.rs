//! Settings, opening a file, and the meaning of SQLite's errors.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::ffi::{self, ErrorCode};
use rusqlite::{Connection, OpenFlags};

use super::table::{self, Form, Texts, Trouble};
use super::{SqliteStore, threads};
use crate::clock::{Clock, Instant, SystemClock};
use crate::record::Finish;
use crate::store::{StoreError, StoreErrorKind};

/// The pauses between two tries to get a lock that another process holds: about as long as a transaction.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);
/// The size of a file without records: the pages of the schema, of the table and of its indexes.
const EMPTY_FILE: u64 = 4 * 4096;
/// Pages of a bounded file that are reserved for clean-up.
const RESERVED_PAGES: i64 = 8;
/// Pages in the WAL from which on a renewal or a late write copies them into the file. Other writes do so from 1000 on, so
/// a renewal takes that long only if nobody else writes.
const UPKEEP_CHECKPOINT: u32 = 4000;
/// The prepared statements that a connection keeps.
const STATEMENTS: usize = 32;

/// What a commit waits for, and so what a loss of power can take back. The death of a process takes nothing back, and
/// nothing damages the file.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Synchronous {
    /// Each commit waits for the disk, and survives a loss of power. Concurrent calls share commits.
    #[default]
    Full,
    /// Commits don't wait for the disk. A loss of power, or a crash of the operating system, takes back what was
    /// committed since the last checkpoint, seconds or more of work: operations that had finished run again, attempt
    /// numbers start anew, and `on_crash = fail` is forgotten with its record.
    Normal,
}

/// Settings for a [`SqliteStore`].
///
/// ```
/// # async fn open(folder: &std::path::Path) -> Result<(), idem_runtime::StoreError> {
/// # use std::time::Duration;
/// use idem_runtime::{SqliteStore, Synchronous};
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
    clock: Option<Arc<dyn Clock>>,
}

impl Default for SqliteOptions {
    fn default() -> Self {
        Self {
            table: table::NAME.to_owned(),
            synchronous: Synchronous::Full,
            busy_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(10),
            queue_capacity: 16_384,
            max_bytes: None,
            namespace: String::new(),
            clock: None,
        }
    }
}

impl SqliteOptions {
    /// The table that holds the records (default: `idem_records`). Letters, digits and `_`. Applications that share a file
    /// but must not share operations need different tables.
    #[must_use]
    pub fn table(self, table: impl Into<String>) -> Self {
        Self { table: table.into(), ..self }
    }

    /// The name of this application, for its child keys (default: empty).
    ///
    /// It enters [`Attempt::child_key`](crate::Attempt::child_key): two applications with the same scopes and keys, in
    /// files or tables of their own, then never give the same child key to a third party. The records don't depend on it.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// What a commit waits for (default: [`Synchronous::Full`]). It holds for this handle only: every process that opens
    /// the file chooses for its own commits. The renewal of a lease never waits for the disk: a loss of power ends the
    /// attempt as well.
    #[must_use]
    pub fn synchronous(self, synchronous: Synchronous) -> Self {
        Self { synchronous, ..self }
    }

    /// How long a call waits for a lock that another process or handle holds on the file (default: 5 s). Then the call
    /// fails, and nothing was written. Renewals and late writes wait for as long as they make sense.
    #[must_use]
    pub fn busy_timeout(self, busy_timeout: Duration) -> Self {
        Self { busy_timeout, ..self }
    }

    /// How long a call waits for its answer, whatever delays it (default: 10 s). After a time-out the write may have taken
    /// effect, and is repeated with the same owner token; if no thread had taken it up, it never takes effect.
    #[must_use]
    pub fn response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// How many calls may wait to be taken up (default: 16 384). One more is refused at once.
    #[must_use]
    pub fn queue_capacity(self, queue_capacity: usize) -> Self {
        Self { queue_capacity: queue_capacity.max(1), ..self }
    }

    /// The largest size of the file, with everything else that is in it (default: what the disk holds). A full store
    /// refuses what needs more room, with [`StoreErrorKind::Full`]; it forgets nothing early. An attempt that has begun can
    /// always be ended without a result: that takes no room.
    #[must_use]
    pub fn max_bytes(self, max_bytes: u64) -> Self {
        Self { max_bytes: Some(max_bytes), ..self }
    }

    /// What measures time (default: [`SystemClock`]). Its [`wall`](Clock::wall) dates records, which all processes with this
    /// file compare: for tests of leases and retentions.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }
    }

    /// Opens the file at `path`, and creates it and its table if they are missing; see [`SqliteStore::open`].
    ///
    /// # Errors
    /// As [`SqliteStore::open`].
    pub async fn open(self, path: impl AsRef<Path>) -> Result<SqliteStore, StoreError> {
        let clock = self.clock.clone().unwrap_or_else(|| Arc::new(SystemClock::default()));
        let database = Database::new(path.as_ref(), self, Arc::clone(&clock))?;
        Ok(SqliteStore::new(threads::start(database).await?, clock))
    }
}

/// A file and how it is to be used.
#[derive(Debug)]
pub(super) struct Database {
    pub(super) path: PathBuf,
    pub(super) options: SqliteOptions,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) texts: Texts,
}

/// A connection, and which file it is connected to.
pub(super) struct Connected {
    pub(super) connection: Connection,
    file: FileId,
    synchronous: Cell<Synchronous>,
}

impl Connected {
    /// Chooses what the next commits wait for.
    pub(super) fn wait_for_disk(&self, synchronous: Synchronous) -> rusqlite::Result<()> {
        if self.synchronous.get() != synchronous {
            self.connection.execute_batch(synchronous.pragma())?;
            self.synchronous.set(synchronous);
        }
        Ok(())
    }
}

#[cfg(test)]
impl Connected {
    /// What SQLite reports that it waits for.
    pub(super) fn synchronous(&self) -> i64 {
        self.connection.query_row("PRAGMA synchronous", [], |row| row.get(0)).unwrap()
    }
}

impl Synchronous {
    fn pragma(self) -> &'static str {
        match self {
            Self::Full => "PRAGMA synchronous = FULL",
            Self::Normal => "PRAGMA synchronous = NORMAL",
        }
    }
}

impl Database {
    pub(super) fn new(path: &Path, options: SqliteOptions, clock: Arc<dyn Clock>) -> Result<Self, StoreError> {
        table::check_name(&options.table).map_err(misconfigured)?;
        if path.as_os_str().is_empty() || path.as_os_str() == ":memory:" {
            return Err(misconfigured("records need a file; `MemoryStore` keeps them in memory".to_owned()));
        }
        // Absolute, so that a later change of the working directory has no effect, and `file:` is no URI.
        let path = std::path::absolute(path)
            .map_err(|error| misconfigured(format!("`{}` can't be used: {error}", path.display())))?;
        let texts = Texts::of(&options.table);
        Ok(Self { path, options, clock, texts })
    }

    /// Connects, and creates the file and the table if they are missing.
    pub(super) fn create(&self) -> Result<Connected, StoreError> {
        self.connect(OpenFlags::SQLITE_OPEN_CREATE, true).map_err(|failure| match failure {
            Failure::Refused(error) => error,
            Failure::Sqlite(error) => self.unusable(&error),
        })
    }

    /// Connects again. A missing file is not created: that would forget every record.
    pub(super) fn reconnect(&self) -> Result<Connected, StoreError> {
        self.connect(OpenFlags::empty(), false).map_err(|failure| match failure {
            Failure::Refused(error) => error,
            Failure::Sqlite(error) => not_written(&error),
        })
    }

    /// Whether a file of the largest size could hold the result, if nothing else were in it.
    pub(super) fn holds(&self, finish: &Finish) -> bool {
        let bytes = u64::try_from(finish.result().stored_bytes()).unwrap_or(u64::MAX);
        self.options.max_bytes.is_none_or(|max| bytes <= max.saturating_sub(EMPTY_FILE))
    }

    /// Connects for renewals and late writes.
    pub(super) fn reconnect_for_upkeep(&self) -> Result<Connected, StoreError> {
        let connected = self.reconnect()?;
        let pragma = format!("PRAGMA wal_autocheckpoint = {UPKEEP_CHECKPOINT}");
        let set = connected.connection.query_row(&pragma, [], |_| Ok(()));
        set.map(|()| connected).map_err(|error| not_written(&error))
    }

    fn connect(&self, flags: OpenFlags, may_create: bool) -> Result<Connected, Failure> {
        let flags = flags | OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.path, flags)?;
        // This store waits for locks itself, with shorter pauses than SQLite's.
        connection.busy_timeout(Duration::ZERO)?;
        // If the file can't be opened for writing, SQLite opens it for reading.
        if connection.is_readonly("main")? {
            let message = format!("`{}` is read-only: records can't be written", self.path.display());
            return Err(Failure::Refused(misconfigured(message)));
        }
        let file = FileId::of(&self.path).map_err(|error| {
            Failure::Refused(unavailable(format!("`{}` can't be looked at: {error}", self.path.display())))
        })?;
        let mode =
            self.patiently(|| connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get::<_, String>(0)))?;
        if mode != "wal" {
            let message = format!("`{}` can't be used in WAL mode: it stays in mode `{mode}`", self.path.display());
            return Err(Failure::Refused(misconfigured(message)));
        }
        let synchronous = self.options.synchronous;
        // `fullfsync` is for macOS, where a plain fsync leaves the data in the disk's own cache.
        connection.execute_batch(&format!("{}; PRAGMA fullfsync = ON;", synchronous.pragma()))?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        self.patiently(|| self.limit_size(&connection, false))?;
        self.check_table(&connection, may_create)?;
        Ok(Connected { connection, file, synchronous: Cell::new(synchronous) })
    }

    /// Bounds the file. The last pages are reserved for clean-up: the removal of a row may take one before others are free.
    pub(super) fn limit_size(&self, connection: &Connection, cleans_up: bool) -> rusqlite::Result<()> {
        let Some(max_bytes) = self.options.max_bytes else { return Ok(()) };
        let page_size: i64 = connection.query_row("PRAGMA page_size", [], |row| row.get(0))?;
        let pages = i64::try_from(max_bytes).unwrap_or(i64::MAX) / page_size.max(1);
        let pages = if cleans_up { pages } else { pages - RESERVED_PAGES };
        // SQLite bounds the value by the present size of the file, and by its own limit.
        connection.query_row(&format!("PRAGMA max_page_count = {}", pages.clamp(1, 4_294_967_294)), [], |_| Ok(()))
    }

    fn check_table(&self, connection: &Connection, may_create: bool) -> Result<(), Failure> {
        let table = &self.options.table;
        let mut form = self.patiently(|| table::form(connection, table))?;
        if form == Form::Absent && may_create {
            self.patiently(|| connection.execute_batch("BEGIN IMMEDIATE"))?;
            let created = table::create(connection, table).and_then(|()| connection.execute_batch("COMMIT"));
            if created.is_err() && !connection.is_autocommit() {
                connection.execute_batch("ROLLBACK").ok();
            }
            created?;
            form = self.patiently(|| table::form(connection, table))?;
        }
        match form.problem() {
            None => Ok(()),
            Some(problem) => {
                let message = format!("the table `{table}` in `{}` {problem}", self.path.display());
                Err(Failure::Refused(misconfigured(message)))
            }
        }
    }

    /// Repeats `work` while another process or handle holds the lock, up to the busy timeout.
    pub(super) fn patiently<T>(&self, mut work: impl FnMut() -> rusqlite::Result<T>) -> rusqlite::Result<T> {
        let started: Instant = self.clock.now();
        let mut pause = FIRST_PAUSE;
        loop {
            match work() {
                Err(error)
                    if is_busy(&error) && self.clock.now().saturating_since(started) < self.options.busy_timeout =>
                {
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                done => return done,
            }
        }
    }

    /// Fails if the file at the path is not the connected one: after a removal or a replacement this process would
    /// otherwise keep records that nobody else sees.
    pub(super) fn check_file(&self, connected: &Connected) -> Result<(), StoreError> {
        match FileId::of(&self.path) {
            Ok(file) if file == connected.file => Ok(()),
            Ok(_) => Err(unavailable(format!("`{}` was replaced by another file", self.path.display()))),
            Err(error) => Err(unavailable(format!("`{}` is gone: {error}", self.path.display()))),
        }
    }

    /// The error for a failure to open the file.
    fn unusable(&self, error: &rusqlite::Error) -> StoreError {
        let path = self.path.display();
        match code(error) {
            Some(ErrorCode::CannotOpen | ErrorCode::PermissionDenied | ErrorCode::ReadOnly) => misconfigured(format!(
                "`{path}` can't be opened; its folder must be there, and both must be writable: {error}"
            )),
            Some(ErrorCode::NotADatabase) => {
                misconfigured(format!("`{path}` is not a SQLite database; it is left alone: {error}"))
            }
            _ => not_written(error),
        }
    }
}

/// Why there is no connection.
enum Failure {
    Refused(StoreError),
    Sqlite(rusqlite::Error),
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// Distinguishes a file from another one at the same path.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileId(u64, u64);

impl FileId {
    #[cfg(unix)]
    fn of(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).map(|file| Self(file.dev(), file.ino()))
    }

    /// On this system an open file can't be removed.
    #[cfg(not(unix))]
    fn of(path: &Path) -> io::Result<Self> {
        std::fs::metadata(path).map(|_| Self(0, 0))
    }
}

fn code(error: &rusqlite::Error) -> Option<ErrorCode> {
    error.sqlite_error_code()
}

fn extended(error: &rusqlite::Error) -> Option<i32> {
    error.sqlite_error().map(|error| error.extended_code)
}

/// SQLite's error while another connection holds the lock.
pub(super) fn busy() -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_BUSY), None)
}

pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(code(error), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Whether the connection must be reopened after `error`.
pub(super) fn breaks_connection(error: &rusqlite::Error) -> bool {
    !matches!(
        code(error),
        Some(
            ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::DiskFull
                | ErrorCode::TooBig
                | ErrorCode::ConstraintViolation
        )
    )
}

/// The meaning of `error` if its transaction has not been committed.
pub(super) fn not_written(error: &rusqlite::Error) -> StoreError {
    use StoreErrorKind::{Corrupt, Full, Misconfigured, TooLarge, Unavailable};
    let (kind, what) = match code(error) {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            (Unavailable, "another process holds the lock on the file")
        }
        Some(ErrorCode::DiskFull) => (Full, "the disk, or the file as far as it may grow, is full"),
        // The file was removed or replaced; the next call checks what is there.
        Some(ErrorCode::ReadOnly) if extended(error) == Some(ffi::SQLITE_READONLY_DBMOVED) => {
            (Unavailable, "the file was moved away")
        }
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied) => {
            (Misconfigured, "the file can't be written")
        }
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => (Corrupt, "the file is damaged"),
        Some(ErrorCode::TooBig) => (TooLarge, "SQLite can't hold a row of that size"),
        // For example a table that was removed or altered, or a trigger that refuses.
        Some(ErrorCode::Unknown | ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch) => {
            (Misconfigured, "the table can't be used")
        }
        _ => (Unavailable, "SQLite failed"),
    };
    StoreError::new(kind, format!("nothing was written: {what}: {error}"))
}

/// The meaning of `error` as the answer to a commit.
pub(super) fn not_committed(error: &rusqlite::Error) -> StoreError {
    match code(error) {
        // Without the lock, or without room for the frame that makes the others valid, there is no commit.
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::DiskFull) => not_written(error),
        _ => StoreError::new(
            StoreErrorKind::Unconfirmed,
            format!("the commit failed, and may count after a crash: {error}"),
        ),
    }
}

/// The error of one operation.
pub(super) fn failed(trouble: &Trouble) -> StoreError {
    match trouble {
        Trouble::Sqlite(error) => not_written(error),
        Trouble::Format(error) => StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(*error),
        Trouble::TooLarge(bytes) => {
            StoreError::new(StoreErrorKind::TooLarge, format!("the file can't hold a result of {bytes} bytes"))
        }
    }
}

pub(super) fn unavailable(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}

pub(super) fn misconfigured(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

#[cfg(test)]
mod tests {
    use rusqlite::ffi::*;

    use super::*;

    #[test]
    fn every_failure_of_sqlite_has_its_kind() {
        use StoreErrorKind::{Corrupt, Full, Misconfigured, TooLarge, Unavailable, Unconfirmed};
        // Its meaning before a commit, its meaning as the answer to one, and whether the connection must be reopened.
        let codes = [
            (SQLITE_BUSY, Unavailable, Unavailable, false),
            (SQLITE_BUSY_RECOVERY, Unavailable, Unavailable, false),
            (SQLITE_BUSY_SNAPSHOT, Unavailable, Unavailable, false),
            (SQLITE_LOCKED, Unavailable, Unavailable, false),
            (SQLITE_FULL, Full, Full, false),
            (SQLITE_READONLY, Misconfigured, Unconfirmed, true),
            (SQLITE_READONLY_DIRECTORY, Misconfigured, Unconfirmed, true),
            (SQLITE_READONLY_DBMOVED, Unavailable, Unconfirmed, true),
            (SQLITE_PERM, Misconfigured, Unconfirmed, true),
            (SQLITE_CANTOPEN, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_READ, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_WRITE, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_FSYNC, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_SHMSIZE, Unavailable, Unconfirmed, true),
            (SQLITE_IOERR_NOMEM, Unavailable, Unconfirmed, true),
            (SQLITE_NOMEM, Unavailable, Unconfirmed, true),
            (SQLITE_PROTOCOL, Unavailable, Unconfirmed, true),
            (SQLITE_INTERRUPT, Unavailable, Unconfirmed, true),
            (SQLITE_CORRUPT, Corrupt, Unconfirmed, true),
            (SQLITE_CORRUPT_INDEX, Corrupt, Unconfirmed, true),
            (SQLITE_NOTADB, Corrupt, Unconfirmed, true),
            (SQLITE_TOOBIG, TooLarge, Unconfirmed, false),
            // No such table, another table, a trigger that refuses.
            (SQLITE_ERROR, Misconfigured, Unconfirmed, true),
            (SQLITE_CONSTRAINT_TRIGGER, Misconfigured, Unconfirmed, false),
        ];
        for (code, before, commit, anew) in codes {
            let error = rusqlite::Error::SqliteFailure(Error::new(code), None);
            assert_eq!(not_written(&error).kind(), before, "{error}");
            assert_eq!(not_committed(&error).kind(), commit, "{error}");
            assert_eq!(breaks_connection(&error), anew, "{error}");
        }
    }
}
