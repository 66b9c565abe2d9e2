//! Records inside of a transaction of the user's.

use std::fmt;
use std::time::Duration;

use rusqlite::Connection;

use super::connect::{failed, misconfigured};
use super::table::{self, Form, Table, Trouble};
use crate::clock::{Clock, SystemClock, wall_millis};
use crate::within::{self, Within};
use crate::{Finish, Inspection, Key, Lease, Release, Reservation, Reserve, StoreError, StoreErrorKind, Write};

/// How often a call looks whether another one in the same transaction has ended.
const POLL: Duration = Duration::from_millis(5);

/// An open transaction of `rusqlite`; see [`SqliteStore::within`](super::SqliteStore::within).
#[derive(Clone)]
pub struct InSqlite<'a> {
    connection: &'a Connection,
    table: String,
}

impl<'a> InSqlite<'a> {
    pub(super) fn new(connection: &'a Connection) -> Self {
        Self { connection, table: table::NAME.to_owned() }
    }
}

impl Within<InSqlite<'_>> {
    /// The table that holds the records; `idem_records` where nothing is said. Letters, digits and `_`.
    #[must_use]
    pub fn table(mut self, table: &str) -> Self {
        table.clone_into(&mut self.0.table);
        self
    }
}

impl fmt::Debug for InSqlite<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InSqlite").field("table", &self.table).finish_non_exhaustive()
    }
}

/// What trouble means to a transaction: one that SQLite did not end can only be rolled back all the same, as a part of it
/// is missing.
fn aborted(trouble: &Trouble) -> StoreError {
    let error = failed(trouble);
    match error.kind() {
        StoreErrorKind::Unavailable | StoreErrorKind::Unknown => {
            StoreError::new(StoreErrorKind::Aborted, format!("the transaction can't go on, roll it back: {error}"))
        }
        _ => error,
    }
}

impl InSqlite<'_> {
    fn on_table<T>(&self, work: impl Fn(&mut Table<'_>, i64) -> Result<T, Trouble>) -> Result<T, StoreError> {
        table::check_name(&self.table).map_err(misconfigured)?;
        if self.connection.is_autocommit() {
            let message = "there is no transaction: SQLite has ended it, after an error or at its `COMMIT`";
            return Err(StoreError::new(StoreErrorKind::Aborted, message));
        }
        let tried = work(&mut Table::new(self.connection, &self.table), wall_millis());
        let trouble = match tried {
            Ok(done) => return Ok(done),
            Err(trouble) => trouble,
        };
        // Looked at only now: in all but the first transaction the table is there.
        let form = table::form(self.connection, &self.table).map_err(|error| aborted(&error.into()))?;
        if form == Form::Absent {
            table::create(self.connection, &self.table).map_err(|error| aborted(&error.into()))?;
            let tried = work(&mut Table::new(self.connection, &self.table), wall_millis());
            return tried.map_err(|trouble| aborted(&trouble));
        }
        match form.problem() {
            Some(problem) => Err(misconfigured(format!("the table `{}` {problem}", self.table))),
            None => Err(aborted(&trouble)),
        }
    }
}

impl within::sealed::Sealed for InSqlite<'_> {}

impl within::Transaction for InSqlite<'_> {
    const NAME: &'static str = "sqlite";

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.on_table(|table, now| table.reserve(request, now))
    }

    async fn finish(&self, lease: &Lease, finish: &Finish) -> Result<Write, StoreError> {
        self.on_table(|table, now| table.finish(lease, finish, now))
    }

    async fn release(&self, lease: &Lease, release: Release) -> Result<Write, StoreError> {
        self.on_table(|table, now| table.release(lease, release, now))
    }

    /// Only one transaction writes at a time, so the attempt that is running is one of this very transaction.
    async fn wait(&self, _: &Key, at_most: Duration) -> Result<(), StoreError> {
        SystemClock::default().sleep(at_most.min(POLL)).await;
        Ok(())
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        self.on_table(|table, now| table.inspect(key, now))
    }

    async fn reopen(&self, key: &Key, attempt: u32) -> Result<Write, StoreError> {
        self.on_table(|table, now| table.reopen(key, attempt, now))
    }
}
