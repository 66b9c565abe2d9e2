//! `sqlite:PATH[?table=NAME]`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::{SqliteStore, Store};
use rusqlite::{Connection, OpenFlags};

use super::{Access, NO_INDEX_FOR_DECISIONS, NO_INDEX_FOR_PURGES, Place, PlaceFuture, Server, compare};
use crate::report::Stop;
use crate::shell;

/// Default name of the table of records.
pub(crate) const TABLE: &str = "idem_records";

/// A file, and the name of the table in this file.
pub(crate) struct File {
    pub(crate) path: PathBuf,
    pub(crate) table: String,
}

impl File {
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let rest = url.split_once(':').map_or("", |(_, rest)| rest);
        // A path may contain a `?`; only `?table=` starts a parameter.
        let (path, table) = match rest.rsplit_once("?table=") {
            Some((path, table)) => (path, table),
            None => (rest, TABLE),
        };
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() || path == ":memory:" {
            return Err("write `sqlite:` and the path of a file".to_owned());
        }
        if table.is_empty() || !table.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err("the name of a table has letters, digits and `_`".to_owned());
        }
        Ok(Self { path: PathBuf::from(path), table: table.to_owned() })
    }

    /// Opens a read-only connection, which neither creates the file nor changes its mode.
    pub(crate) fn read(&self) -> Result<Connection, Stop> {
        let shown = self.path.display();
        match std::fs::metadata(&self.path) {
            Ok(found) if found.is_file() => {}
            Ok(_) => return Err(Stop::Unreachable(format!("`{shown}` is not a file"))),
            Err(error) => return Err(Stop::Unreachable(format!("`{shown}` can't be read: {error}"))),
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        Connection::open_with_flags(&self.path, flags).map_err(|error| self.failed(&error))
    }

    /// Returns the columns of the table; an empty list if the table does not exist.
    pub(crate) fn columns(&self, connection: &Connection) -> Result<Vec<String>, Stop> {
        let columns = || -> rusqlite::Result<Vec<String>> {
            let mut columns = connection.prepare("SELECT name FROM pragma_table_info(?1)")?;
            columns.query_map([&self.table], |row| row.get(0))?.collect()
        };
        columns().map_err(|error| self.failed(&error))
    }

    /// Returns whether the table has an index that begins with `column`: over some rows if `partial`, otherwise over
    /// all rows.
    fn has_index(&self, connection: &Connection, column: &str, partial: bool) -> Result<bool, Stop> {
        let question = "SELECT EXISTS (SELECT 1 FROM pragma_index_list(?1) AS i JOIN pragma_index_info(i.name) AS c \
                        WHERE c.seqno = 0 AND c.name = ?2 AND i.partial = ?3)";
        let params = (&self.table, column, partial);
        connection.query_row(question, params, |row| row.get(0)).map_err(|error| self.failed(&error))
    }

    pub(crate) fn failed(&self, error: &rusqlite::Error) -> Stop {
        Stop::Unreachable(format!("`{}` can't be used: {error}", self.path.display()))
    }

    async fn open_store(&self, timeout: Duration) -> Result<Arc<dyn Store>, Stop> {
        // The table is checked first, because the store would create file and table even for a mistyped path.
        if self.columns(&self.read()?)?.is_empty() {
            return Err(Stop::Unreachable(format!(
                "there is no table `{}` in `{}`; name another with `?table=`, or make it with `idem schema migrate`",
                self.table,
                self.path.display()
            )));
        }
        let options = SqliteStore::options().table(&self.table).response_timeout(timeout);
        Ok(Arc::new(options.open(&self.path).await?))
    }
}

impl Place for File {
    fn kind(&self) -> &'static str {
        "sqlite"
    }

    fn look_up(&self, _: Option<&str>, key: &str) -> (String, String) {
        let question = format!("SELECT * FROM \"{}\" WHERE key = '{}'", self.table, key.replace('\'', "''"));
        let path = self.path.to_string_lossy();
        (key.to_owned(), shell::line(["sqlite3", "-readonly", &path, &question]))
    }

    fn without_namespace(&self) -> Option<&'static str> {
        Some("`?table=NAME` in the URL names the table of another application")
    }

    fn open(&self, _: Option<String>, timeout: Duration, _: Access) -> PlaceFuture<'_, Arc<dyn Store>> {
        Box::pin(self.open_store(timeout))
    }

    fn create(&self, _: Option<u16>, timeout: Duration) -> PlaceFuture<'_, ()> {
        Box::pin(async move {
            SqliteStore::options().table(&self.table).response_timeout(timeout).open(&self.path).await?;
            Ok(())
        })
    }

    fn differences(&self, _: Option<u16>, _: Duration) -> PlaceFuture<'_, Option<Vec<String>>> {
        let compared = || {
            let connection = self.read()?;
            let found = self.columns(&connection)?;
            if found.is_empty() {
                return Ok(None);
            }
            let mut differences = compare(&SqliteStore::schema_sql(&self.table), &found);
            if !self.has_index(&connection, "listed_at", false)? {
                differences.push(NO_INDEX_FOR_PURGES.to_owned());
            }
            if !self.has_index(&connection, "key", true)? {
                differences.push(NO_INDEX_FOR_DECISIONS.to_owned());
            }
            Ok(Some(differences))
        };
        Box::pin(std::future::ready(compared()))
    }

    fn server(&self) -> Server<'_> {
        Server::Sqlite(self)
    }
}
