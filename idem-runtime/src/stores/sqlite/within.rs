//! Records inside of the user's transaction: the operations of a store on the user's connection.

use std::fmt;
use std::time::Duration;

use rusqlite::{Connection, Transaction};

use super::failure::{failed, misconfigured};
use super::sql::{self, Table, TableForm, Trouble};
use crate::clock::{Clock, wall_millis};
use crate::key::Key;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Lease, Release, Reservation, ReserveRequest, Verdict,
};
use crate::store::transaction::{DriverTransaction, Sealed, TransactionStore};
use crate::store::{StoreError, StoreErrorKind};

/// Interval at which a call checks whether another call in the same transaction has ended.
const POLL: Duration = Duration::from_millis(5);

impl Sealed for Transaction<'_> {}

impl DriverTransaction for Transaction<'_> {
    type Shared = Self;

    fn unshare(shared: Self) -> Self {
        shared
    }
}

/// An open transaction of `rusqlite`; see [`SqliteStore::within`](super::SqliteStore::within).
#[derive(Clone)]
pub struct InSqlite<'a> {
    connection: &'a Connection,
    table: String,
    clock: &'a dyn Clock,
}

impl<'a> InSqlite<'a> {
    pub(crate) fn new(connection: &'a Connection, clock: &'a dyn Clock) -> Self {
        Self { connection, table: sql::NAME.to_owned(), clock }
    }

    pub(crate) fn table(mut self, table: &str) -> Self {
        table.clone_into(&mut self.table);
        self
    }
}

impl fmt::Debug for InSqlite<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InSqlite").field("table", &self.table).finish_non_exhaustive()
    }
}

/// Converts an error inside of the user's transaction. Even if SQLite did not end the transaction, the user can only
/// roll it back, because one of its writes is missing.
pub(crate) fn aborted(trouble: &Trouble) -> StoreError {
    let error = failed(trouble);
    match error.kind() {
        StoreErrorKind::Unavailable | StoreErrorKind::Unconfirmed => {
            StoreError::new(StoreErrorKind::Aborted, format!("the transaction can't continue; roll it back: {error}"))
        }
        _ => error,
    }
}

impl InSqlite<'_> {
    /// Runs a statement about savepoints.
    fn savepoint(&self, text: &str) -> Result<(), StoreError> {
        self.check_open()?;
        self.connection.execute_batch(text).map_err(|error| aborted(&error.into()))
    }

    fn check_open(&self) -> Result<(), StoreError> {
        if self.connection.is_autocommit() {
            let message = "there is no transaction: SQLite has ended it, after an error or at its `COMMIT`";
            return Err(StoreError::new(StoreErrorKind::Aborted, message));
        }
        Ok(())
    }

    fn on_table<T>(&self, work: impl Fn(&mut Table<'_>, i64) -> Result<T, Trouble>) -> Result<T, StoreError> {
        sql::check_name(&self.table).map_err(misconfigured)?;
        self.check_open()?;
        let attempt = || work(&mut Table::new(self.connection, &self.table), wall_millis(self.clock));
        let tried = attempt();
        let trouble = match tried {
            Ok(done) => return Ok(done),
            Err(trouble) => trouble,
        };
        // The table is checked only after a failure, because it exists in every transaction but the first.
        let form = sql::form(self.connection, &self.table).map_err(|error| aborted(&error.into()))?;
        if form == TableForm::Absent {
            sql::create(self.connection, &self.table).map_err(|error| aborted(&error.into()))?;
            let tried = attempt();
            return tried.map_err(|trouble| aborted(&trouble));
        }
        match form.problem() {
            Some(problem) => Err(misconfigured(format!("the table `{}` {problem}", self.table))),
            None => Err(aborted(&trouble)),
        }
    }
}

impl Sealed for InSqlite<'_> {}

impl TransactionStore for InSqlite<'_> {
    const NAME: &'static str = "sqlite";

    fn place(&self) -> &str {
        &self.table
    }

    async fn save(&self) -> Result<(), StoreError> {
        self.savepoint("SAVEPOINT idem")
    }

    async fn rewind(&self) -> Result<(), StoreError> {
        self.savepoint("ROLLBACK TO idem")
    }

    async fn keep(&self, begun: impl FnOnce()) -> Result<(), StoreError> {
        begun();
        self.savepoint("RELEASE idem")
    }

    async fn undo(&self) -> Result<(), StoreError> {
        self.savepoint("ROLLBACK TO idem; RELEASE idem")
    }

    fn undo_immediately(&self) {
        if let Err(error) = self.savepoint("ROLLBACK TO idem; RELEASE idem") {
            tracing::debug!(%error, "the writes of a call could not be undone: its transaction has ended");
        }
    }

    async fn reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        self.on_table(|table, now| table.reserve(request, now))
    }

    async fn begin(&self, lease: &Lease) -> Result<Verdict, StoreError> {
        self.on_table(|table, now| table.begin(lease, now))
    }

    async fn finish(&self, lease: &Lease, finish: &Finish) -> Result<Verdict, StoreError> {
        self.on_table(|table, now| table.finish(lease, finish, now))
    }

    async fn release(&self, lease: &Lease, release: Release) -> Result<Verdict, StoreError> {
        self.on_table(|table, now| table.release(lease, release, now))
    }

    /// Waits for [`POLL`]. Only one transaction writes at a time, so the running attempt was reserved in this
    /// transaction.
    async fn wait(&self, _: &Key, at_most: Duration) -> Result<bool, StoreError> {
        self.clock.sleep(at_most.min(POLL)).await;
        Ok(true)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        self.on_table(|table, now| table.inspect(key, now))
    }

    async fn decide(&self, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
        self.on_table(|table, now| table.decide(decision, now))
    }
}
