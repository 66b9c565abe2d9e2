//! SQLite files for tests.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_runtime::conformance::Subject;
use idem_runtime::{Key, SqliteStore};
use rusqlite::Connection;

/// Folder that is deleted when dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Creates an empty folder.
    #[allow(clippy::new_without_default)] // The call creates a folder.
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("idem-test-sqlite-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Path of the database in the folder.
    pub fn file(&self) -> PathBuf {
        self.0.join("records.db")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Opens a connection of the raw client, which waits for locks.
pub fn raw(path: &Path) -> Connection {
    let connection = Connection::open(path).expect("the file exists");
    connection.busy_timeout(Duration::from_secs(30)).expect("waits");
    connection
}

/// Three stores for the conformance suite: one on a file that all clauses share, a second handle as another process
/// would open it, and a store whose file is gone.
pub async fn subject() -> Subject {
    static SHARED: OnceLock<Folder> = OnceLock::new();
    let path = SHARED.get_or_init(Folder::new).file();
    let store = SqliteStore::open(&path).await.expect("opens");
    let peer = SqliteStore::open(&path).await.expect("opens");
    let gone = Folder::new();
    let unreachable = SqliteStore::open(gone.file()).await.expect("opens");
    drop(gone);
    let spoil = move |key: Key| {
        let path = path.clone();
        async move {
            let sql = "INSERT OR REPLACE INTO idem_records (key, format, state, owner, attempt, attempts_used, on_crash_fail, expires_at, \
                       listed_at, first_seen_at, began_at) \
                       VALUES (?1, 1, ?2, x'00', 1, 1, 0, 4102444800000, 4102444800000, 0, 0)";
            raw(&path).execute(sql, [key.as_str(), &crate::nonsense()]).expect("inserts");
        }
    };
    Subject::new(store).peer(peer).unreachable(unreachable).spoil(spoil)
}
