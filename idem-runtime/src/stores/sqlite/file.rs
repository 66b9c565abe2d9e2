//! A database file, and the connections to it.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::ffi::ErrorCode;
use rusqlite::{Connection, OpenFlags};

use super::failure::{code, is_busy, misconfigured, not_written, unavailable};
use super::settings::{SqliteSettings, Synchronous};
use super::sql::{self, TableForm, Texts};
use crate::clock::{Clock, Instant};
use crate::store::StoreError;

/// First pause between two tries to get a lock that another connection holds; the pause doubles up to
/// [`LONGEST_PAUSE`]. Every pause is shorter than `TURN`, the time for which the upkeep thread leaves the lock free
/// between two transactions.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// Size of a file without records, in bytes: the pages of the schema, of the table and of its indexes.
const EMPTY_FILE: u64 = 4 * 4096;
/// Number of pages that are reserved for clean-up, in a file with a size limit.
const RESERVED_PAGES: i64 = 8;
/// Number of pages in the WAL at which a renewal or a late write copies the WAL into the file. Other writes copy the
/// WAL already at 1000 pages, so a renewal pays for the copy only if there are no other writes.
const UPKEEP_CHECKPOINT: u32 = 4000;
/// Number of prepared statements that a connection keeps.
const STATEMENTS: usize = 32;

/// A database file and its settings.
#[derive(Debug)]
pub(super) struct Database {
    pub(super) path: PathBuf,
    pub(super) settings: SqliteSettings,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) texts: Texts,
}

/// A connection, and the identity of the files that it uses.
pub(super) struct FileConnection {
    pub(super) connection: Connection,
    pub(super) files: Files,
    synchronous: Cell<Synchronous>,
}

impl FileConnection {
    /// Closes the connection. Leaves the WAL alone if the files were removed or replaced.
    pub(super) fn close(self) {
        match self.files.check() {
            Ok(()) => drop(self.connection),
            Err(_) => abandon(self.connection),
        }
    }

    /// Sets whether the next commits wait for the disk.
    pub(super) fn wait_for_disk(&self, synchronous: Synchronous) -> rusqlite::Result<()> {
        if self.synchronous.get() != synchronous {
            self.connection.execute_batch(synchronous.pragma())?;
            self.synchronous.set(synchronous);
        }
        Ok(())
    }
}

#[cfg(test)]
impl FileConnection {
    /// Returns SQLite's own value of `PRAGMA synchronous`.
    pub(super) fn synchronous(&self) -> i64 {
        self.connection.query_row("PRAGMA synchronous", [], |row| row.get(0)).unwrap()
    }
}

impl Database {
    pub(super) fn new(path: &Path, settings: SqliteSettings, clock: Arc<dyn Clock>) -> Result<Self, StoreError> {
        sql::check_name(&settings.table).map_err(misconfigured)?;
        if path.as_os_str().is_empty() || path.as_os_str() == ":memory:" {
            return Err(misconfigured(
                "an in-memory database holds no records; give a file, or use `MemoryStore`".to_owned(),
            ));
        }
        // The path becomes absolute, so that a later change of the working directory has no effect, and SQLite does not
        // read a path that starts with `file:` as a URI.
        let path = std::path::absolute(path)
            .map_err(|error| misconfigured(format!("`{}` can't be used: {error}", path.display())))?;
        let texts = Texts::of(&settings.table);
        Ok(Self { path, settings, clock, texts })
    }

    /// Opens a connection to the file. Creates the file and the table if they are missing.
    pub(super) fn create(&self) -> Result<FileConnection, StoreError> {
        self.connect(OpenFlags::SQLITE_OPEN_CREATE, true).map_err(|failure| match failure {
            OpenFailure::Refused(error) => error,
            OpenFailure::Sqlite(error) => self.unusable(&error),
        })
    }

    /// Opens another connection to the file. Does not create a missing file, because an empty new file would forget
    /// every record.
    pub(super) fn reconnect(&self) -> Result<FileConnection, StoreError> {
        self.connect(OpenFlags::empty(), false).map_err(|failure| match failure {
            OpenFailure::Refused(error) => error,
            OpenFailure::Sqlite(error) => not_written(&error),
        })
    }

    /// Returns whether a file of the largest size could hold the result, if the file held nothing else.
    pub(super) fn holds(&self, bytes: usize) -> bool {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.settings.max_bytes.is_none_or(|max| bytes <= max.saturating_sub(EMPTY_FILE))
    }

    /// Opens a connection for renewals and late writes.
    pub(super) fn reconnect_for_upkeep(&self) -> Result<FileConnection, StoreError> {
        let connected = self.reconnect()?;
        let pragma = format!("PRAGMA wal_autocheckpoint = {UPKEEP_CHECKPOINT}");
        let set = connected.connection.query_row(&pragma, [], |_| Ok(()));
        set.map(|()| connected).map_err(|error| not_written(&error))
    }

    fn connect(&self, flags: OpenFlags, may_create: bool) -> Result<FileConnection, OpenFailure> {
        let flags = flags | OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.path, flags)?;
        // This store waits for locks itself, with shorter pauses than SQLite.
        connection.busy_timeout(Duration::ZERO)?;
        // If SQLite can't open the file for writing, SQLite opens the file read-only, without an error.
        if connection.is_readonly("main")? {
            let message = format!("`{}` is read-only: records can't be written", self.path.display());
            return Err(OpenFailure::Refused(misconfigured(message)));
        }
        let mode =
            self.patiently(|| connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get::<_, String>(0)))?;
        if mode != "wal" {
            let message = format!("`{}` can't be used in WAL mode: it stays in mode `{mode}`", self.path.display());
            return Err(OpenFailure::Refused(misconfigured(message)));
        }
        let synchronous = self.settings.synchronous;
        // `fullfsync` is for macOS, where a plain fsync leaves the data in the disk's own cache.
        connection.execute_batch(&format!("{}; PRAGMA fullfsync = ON;", synchronous.pragma()))?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        self.patiently(|| self.limit_size(&connection, false))?;
        self.check_table(&connection, may_create)?;
        // The connection has read from the file, so it holds a lock that keeps SQLite from removing the WAL and its
        // index.
        match Files::of(&self.path) {
            Ok(files) => Ok(FileConnection { connection, files, synchronous: Cell::new(synchronous) }),
            Err(error) => {
                abandon(connection);
                Err(OpenFailure::Refused(error))
            }
        }
    }

    /// Limits the size of the file. The last pages are reserved for clean-up: the removal of a row may need one more
    /// page before it frees pages.
    pub(super) fn limit_size(&self, connection: &Connection, cleans_up: bool) -> rusqlite::Result<()> {
        let Some(max_bytes) = self.settings.max_bytes else { return Ok(()) };
        let page_size: i64 = connection.query_row("PRAGMA page_size", [], |row| row.get(0))?;
        let pages = i64::try_from(max_bytes).unwrap_or(i64::MAX) / page_size.max(1);
        let pages = if cleans_up { pages } else { pages - RESERVED_PAGES };
        // SQLite raises a value below the present size of the file, and lowers a value above SQLite's own maximum.
        connection.query_row(&format!("PRAGMA max_page_count = {}", pages.clamp(1, 4_294_967_294)), [], |_| Ok(()))
    }

    fn check_table(&self, connection: &Connection, may_create: bool) -> Result<(), OpenFailure> {
        let table = &self.settings.table;
        let mut form = self.patiently(|| sql::form(connection, table))?;
        if form == TableForm::Absent && may_create {
            self.patiently(|| connection.execute_batch("BEGIN IMMEDIATE"))?;
            let created = sql::create(connection, table).and_then(|()| connection.execute_batch("COMMIT"));
            if created.is_err() && !connection.is_autocommit() {
                connection.execute_batch("ROLLBACK").ok();
            }
            created?;
            form = self.patiently(|| sql::form(connection, table))?;
        }
        match form.problem() {
            None => Ok(()),
            Some(problem) => {
                let message = format!("the table `{table}` in `{}` {problem}", self.path.display());
                Err(OpenFailure::Refused(misconfigured(message)))
            }
        }
    }

    /// Repeats `work` while another connection holds the lock, up to the busy timeout.
    pub(super) fn patiently<T>(&self, mut work: impl FnMut() -> rusqlite::Result<T>) -> rusqlite::Result<T> {
        let started: Instant = self.clock.now();
        let mut pause = FIRST_PAUSE;
        loop {
            match work() {
                Err(error)
                    if is_busy(&error) && self.clock.now().saturating_since(started) < self.settings.busy_timeout =>
                {
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                done => return done,
            }
        }
    }

    /// Converts a failure to open the file.
    fn unusable(&self, error: &rusqlite::Error) -> StoreError {
        let path = self.path.display();
        match code(error) {
            Some(ErrorCode::CannotOpen) if no_descriptors() => {
                unavailable(format!("`{path}` can't be opened: this process has too many open files: {error}"))
            }
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

/// Returns whether this process, or the system, has too few file descriptors left for the files of a connection: the
/// database, its WAL and its index.
#[cfg(unix)]
fn no_descriptors() -> bool {
    let opened: Vec<_> = (0..4).map(|_| std::fs::File::open("/dev/null")).collect();
    // The errors `ENFILE` and `EMFILE`: no file descriptor is left.
    opened.iter().any(|file| matches!(file, Err(error) if matches!(error.raw_os_error(), Some(23 | 24))))
}

#[cfg(not(unix))]
fn no_descriptors() -> bool {
    false
}

/// Reason why a connection could not be made.
enum OpenFailure {
    Refused(StoreError),
    Sqlite(rusqlite::Error),
}

impl From<rusqlite::Error> for OpenFailure {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// Identity of the database file, its log (`-wal`) and its index (`-shm`), as a connection found them.
///
/// The index holds the locks of all processes, and the log holds their commits. If a process keeps using a file that is
/// no longer at its path, other processes don't see its records.
#[derive(Clone)]
pub(super) struct Files([FileAtPath; 3]);

impl Files {
    fn of(path: &Path) -> Result<Self, StoreError> {
        let named = |end: &str| {
            // SQLite follows symbolic links, and derives the names of log and index from the target.
            let mut name = std::fs::canonicalize(path).map_err(|error| gone(path, &error))?.into_os_string();
            name.push(end);
            let name = PathBuf::from(name);
            FileAtPath::at(&name)
        };
        let files = Self([FileAtPath::at(path)?, named("-wal")?, named("-shm")?]);
        let index = &files.0[2].path;
        if uses_removed(index) {
            return Err(unavailable(format!(
                "`{}` was removed or replaced, and another connection of this process still uses the old one; it must be closed",
                index.display()
            )));
        }
        Ok(files)
    }

    /// Returns an error if one of the files is not at its path.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        self.0.iter().try_for_each(|found| match found.place.id() {
            Ok(id) if id == found.id => Ok(()),
            Ok(_) => Err(unavailable(format!("`{}` was replaced by another file", found.path.display()))),
            Err(error) => Err(gone(&found.path, &error)),
        })
    }

    /// Returns an error if a connection of the same process to the same file uses another index. SQLite shares one
    /// index among all connections of a process: the index of the first connection.
    pub(super) fn check_against(&self, other: &Self) -> Result<(), StoreError> {
        let [ours, theirs] = [&self.0, &other.0];
        match ours[0].id == theirs[0].id && ours[2].id != theirs[2].id {
            true => Err(unavailable(format!("`{}` was replaced by another file", ours[2].path.display()))),
            false => Ok(()),
        }
    }
}

/// Closes a connection whose files may have been removed or replaced. Normally the last connection to a file copies the
/// log into the file, and removes log and index. A connection whose files are outdated must neither copy nor remove
/// anything, because other processes may use the files at the path.
pub(super) fn abandon(connection: Connection) {
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).ok();
    drop(connection);
}

fn gone(path: &Path, error: &io::Error) -> StoreError {
    unavailable(format!("`{}` is gone: {error}", path.display()))
}

/// Returns whether this process has mapped a removed file called `index`, as far as the operating system shows. SQLite
/// maps the index of a file into memory for every connection, including connections that this store did not open.
fn uses_removed(index: &Path) -> bool {
    let removed = format!("{} (deleted)", index.display()).replace('\n', "\\012");
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    String::from_utf8_lossy(&maps).lines().any(|line| line.find('/').is_some_and(|at| line[at..] == removed))
}

/// Identity of a file, which distinguishes it from another file at the same path.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileId(u64, u64);

/// A file as a connection found it.
#[derive(Clone)]
struct FileAtPath {
    path: PathBuf,
    place: NativePath,
    id: FileId,
}

impl FileAtPath {
    fn at(path: &Path) -> Result<Self, StoreError> {
        let found = NativePath::new(path).and_then(|place| Ok((place.id()?, place)));
        let (id, place) = found.map_err(|error| gone(path, &error))?;
        Ok(Self { path: path.to_owned(), place, id })
    }
}

/// A path in the form that system calls take. Each transaction checks three files twice, and a `Path` would be copied
/// and converted at each check.
#[cfg(any(target_os = "linux", target_os = "android"))]
#[derive(Clone)]
struct NativePath(std::ffi::CString);

#[cfg(any(target_os = "linux", target_os = "android"))]
impl NativePath {
    fn new(path: &Path) -> io::Result<Self> {
        use std::os::unix::ffi::OsStrExt;
        Ok(Self(std::ffi::CString::new(path.as_os_str().as_bytes())?))
    }

    fn id(&self) -> io::Result<FileId> {
        let file = rustix::fs::stat(&*self.0)?;
        #[allow(clippy::unnecessary_cast, reason = "the types of these numbers differ between systems")]
        Ok(FileId(file.st_dev as u64, file.st_ino as u64))
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
#[derive(Clone)]
struct NativePath(PathBuf);

#[cfg(not(any(target_os = "linux", target_os = "android")))]
impl NativePath {
    #[expect(clippy::unnecessary_wraps, reason = "other systems refuse some paths")]
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self(path.to_owned()))
    }

    #[cfg(unix)]
    fn id(&self) -> io::Result<FileId> {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(&self.0).map(|file| FileId(file.dev(), file.ino()))
    }

    /// Returns the same identity for every file: on this system an open file can't be removed.
    #[cfg(not(unix))]
    fn id(&self) -> io::Result<FileId> {
        std::fs::metadata(&self.0).map(|_| FileId(0, 0))
    }
}
