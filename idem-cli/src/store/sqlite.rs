//! `sqlite:PATH[?table=NAME]`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::{SqliteStore, Store};
use rusqlite::{Connection, OpenFlags};

use super::{Place, PlaceFuture, Server, compare};
use crate::report::Stop;

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

    pub(crate) fn failed(&self, error: &rusqlite::Error) -> Stop {
        Stop::Unreachable(format!("`{}` can't be used: {error}", self.path.display()))
    }

    async fn open_store(&self, namespace: Option<String>, timeout: Duration) -> Result<Arc<dyn Store>, Stop> {
        // The table is checked first, because the store would create file and table even for a mistyped path.
        if self.columns(&self.read()?)?.is_empty() {
            return Err(Stop::Unreachable(format!(
                "there is no table `{}` in `{}`; name another with `?table=`, or make it with `idem schema migrate`",
                self.table,
                self.path.display()
            )));
        }
        let options = SqliteStore::options().table(&self.table).response_timeout(timeout);
        Ok(Arc::new(options.namespace(namespace.unwrap_or_default()).open(&self.path).await?))
    }
}

impl Place for File {
    fn kind(&self) -> &'static str {
        "sqlite"
    }

    fn look_up(&self, _: Option<&str>, key: &str) -> (String, String) {
        let question = format!("SELECT * FROM \"{}\" WHERE key = '{}'", self.table, key.replace('\'', "''"));
        (key.to_owned(), question)
    }

    fn open(&self, namespace: Option<String>, timeout: Duration) -> PlaceFuture<'_, Arc<dyn Store>> {
        Box::pin(self.open_store(namespace, timeout))
    }

    fn create(&self, _: Option<u16>, timeout: Duration) -> PlaceFuture<'_, ()> {
        Box::pin(async move {
            SqliteStore::options().table(&self.table).response_timeout(timeout).open(&self.path).await?;
            Ok(())
        })
    }

    fn differences(&self, _: Option<u16>, _: Duration) -> PlaceFuture<'_, Option<Vec<String>>> {
        let compared = || {
            let found = self.columns(&self.read()?)?;
            Ok((!found.is_empty()).then(|| compare(&SqliteStore::schema_sql(&self.table), &found)))
        };
        Box::pin(std::future::ready(compared()))
    }

    fn server(&self) -> Server<'_> {
        Server::Sqlite(self)
    }
}
