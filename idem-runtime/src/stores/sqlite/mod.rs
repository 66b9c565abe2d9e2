//! Records in a SQLite file.
//!
//! A record is a row, and each operation is one or two statements on it ([`sql`]). Concurrent calls share a
//! transaction, and so wait for the disk only once ([`batch`]).
//!
//! Layers, from the top. Imports stay within a layer or go down:
//!
//! | layer | files |
//! |---|---|
//! | opening; the store and its operations | `options`, `store` |
//! | the threads of a handle; replays on the caller's thread | `batch`, `inline_read` |
//! | the connections of a process; a file and its connections | `fork_guard`, `file` |
//! | data | `settings`, `sql`, `failure` |
//!
//! `within` runs the statements in a transaction of the user, on the user's connection.

mod batch;
mod failure;
mod file;
mod fork_guard;
mod inline_read;
mod options;
mod settings;
mod sql;
mod store;
#[cfg(feature = "with-rusqlite")]
mod within;

use std::path::Path;

pub use self::options::SqliteOptions;
pub use self::settings::Synchronous;
pub use self::store::SqliteStore;
#[cfg(feature = "conformance")]
pub use self::store::meet_row;
#[cfg(feature = "with-rusqlite")]
pub use self::within::InSqlite;
#[cfg(feature = "with-rusqlite")]
pub(crate) use self::within::aborted;
use crate::store::StoreError;

impl SqliteStore {
    /// Opens the file at `path`. Creates the file and its table if they are missing. For settings see
    /// [`SqliteOptions`].
    ///
    /// Any number of handles and processes of this host may have the file open.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] if the file or its folder can't be read and written, if the file is not a
    /// SQLite database, or if it holds a table `idem_records` of another application or of a later release;
    /// [`StoreErrorKind::Unavailable`] if another process keeps the file locked.
    ///
    /// [`StoreErrorKind::Misconfigured`]: crate::StoreErrorKind::Misconfigured
    /// [`StoreErrorKind::Unavailable`]: crate::StoreErrorKind::Unavailable
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::options().open(path).await
    }

    /// Returns the default settings, to be changed before opening a store.
    pub fn options() -> SqliteOptions {
        SqliteOptions::default()
    }

    /// Returns the statements that create the table of this name, for your own migrations. [`open`](SqliteStore::open)
    /// runs the same statements.
    ///
    /// ```
    /// # use idem_runtime::SqliteStore;
    /// assert!(SqliteStore::schema_sql("idem_records").contains(r#"CREATE TABLE IF NOT EXISTS "idem_records""#));
    /// ```
    pub fn schema_sql(table: &str) -> String {
        sql::ddl(table)
    }
}
