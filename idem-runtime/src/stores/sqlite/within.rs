//! Records inside the user's transaction.

use std::fmt;
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::SqliteStore;
use super::failure::{failed, misconfigured};
use super::sql::{self, Table, TableForm, Trouble};
use crate::clock::{Clock, SystemClock, wall_millis};
use crate::engine::{Observe, observe};
use crate::key::Key;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Lease, Release, Reservation, ReserveRequest, Verdict,
};
use crate::store::{StoreError, StoreErrorKind};
use crate::within::{self, Journal, Within, WorkFailure, journaled};

/// Interval at which a call looks whether another call in the same transaction has ended.
const POLL: Duration = Duration::from_millis(5);

/// An open transaction of `rusqlite`; see [`SqliteStore::within`](super::SqliteStore::within).
#[derive(Clone)]
pub struct InSqlite<'a> {
    connection: &'a Connection,
    table: String,
    namespace: String,
    holder: String,
}

impl<'a> InSqlite<'a> {
    pub(super) fn new(connection: &'a Connection) -> Self {
        Self { connection, table: sql::NAME.to_owned(), namespace: String::new(), holder: String::new() }
    }
}

impl SqliteStore {
    /// Puts records inside your open transaction: they are committed with its other writes, or not at all. See
    /// [`Within`].
    ///
    /// The table is `idem_records`, or [`another`](Within::table), and is created if it is missing. Begin the
    /// transaction as `IMMEDIATE`. Only one writing transaction is open at a time, so a duplicate then waits at its
    /// `BEGIN`, for as long as the `busy_timeout` of its connection allows. In any other transaction, a duplicate gets
    /// [`Error::Store`] of kind [`StoreErrorKind::Aborted`] if another transaction writes. `rusqlite` works on the
    /// thread that calls it.
    ///
    /// [`Error::Store`]: crate::Error::Store
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// use idem_runtime::{Error, SqliteStore, idempotent};
    /// use rusqlite::{Connection, TransactionBehavior};
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = SqliteStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &rusqlite::Transaction<'_>, order: i64) -> Result<usize, Error> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES (?1)", [order]).expect("the table is there"))
    /// }
    ///
    /// let mut connection = Connection::open_in_memory().unwrap();
    /// connection.execute_batch("CREATE TABLE payments (order_id INTEGER)").unwrap();
    /// for _delivery in 0..2 {
    ///     let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    ///     pay(&tx, 42).await.unwrap(); // After an error, drop the transaction: that rolls it back.
    ///     tx.commit().unwrap(); // The payment and its record, or neither.
    /// }
    /// let payments: i64 = connection.query_row("SELECT count(*) FROM payments", [], |row| row.get(0)).unwrap();
    /// assert_eq!(payments, 1);
    /// # });
    /// ```
    pub fn within<'a>(tx: &'a rusqlite::Transaction<'_>) -> Within<InSqlite<'a>> {
        Within(InSqlite::new(tx))
    }
}

impl Within<InSqlite<'_>> {
    /// Table that holds the records (default: `idem_records`). Letters, digits and `_`.
    #[must_use]
    pub fn table(mut self, table: &str) -> Self {
        table.clone_into(&mut self.0.table);
        self
    }

    /// Name of this application, for its child keys; see [`SqliteOptions::namespace`](super::SqliteOptions::namespace).
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.0.namespace);
        self
    }

    /// Name of this program in its records, next to host and process (default: none); see
    /// [`SqliteOptions::holder`](super::SqliteOptions::holder). The process keeps each name forever, so don't use a
    /// name per call.
    #[must_use]
    pub fn holder(mut self, name: &str) -> Self {
        name.clone_into(&mut self.0.holder);
        self
    }
}

impl fmt::Debug for InSqlite<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InSqlite").field("table", &self.table).finish_non_exhaustive()
    }
}

/// Converts an error inside the transaction. Even if SQLite did not end the transaction, it can only be rolled back,
/// because a part of it is missing.
fn aborted(trouble: &Trouble) -> StoreError {
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
        let attempt = || work(&mut Table::new(self.connection, &self.table), wall_millis(&SystemClock::default()));
        let tried = attempt();
        let trouble = match tried {
            Ok(done) => return Ok(done),
            Err(trouble) => trouble,
        };
        // Checked only now: in all but the first transaction the table exists.
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

impl within::sealed::Sealed for InSqlite<'_> {}

impl within::Transaction for InSqlite<'_> {
    const NAME: &'static str = "sqlite";

    fn identity(&self) -> usize {
        std::ptr::from_ref(self.connection).addr()
    }

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn holder(&self) -> &str {
        &self.holder
    }

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

    /// Only one transaction writes at a time, so the running attempt belongs to this transaction.
    async fn wait(&self, _: &Key, at_most: Duration) -> Result<bool, StoreError> {
        SystemClock::default().sleep(at_most.min(POLL)).await;
        Ok(true)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        self.on_table(|table, now| table.inspect(key, now))
    }

    async fn decide(&self, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
        self.on_table(|table, now| table.decide(decision, now))
    }
}

impl SqliteStore {
    /// Begins a transaction that may write, does `work` in it and commits it. Returns the outcome of the delivery, with
    /// the disposition of its message.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then may the [`Outcome`](crate::Outcome) be
    /// [`Ack`](crate::Disposition::Ack). If `work` returns an error or panics, or if the commit fails, the transaction
    /// is rolled back and the message is to be delivered again. An error that a handler recorded (`on_error = record`)
    /// is still recorded, alone. The attempts that began are written after the rollback, so that `max_attempts` counts
    /// them, and pauses grow.
    ///
    /// The returned future is an observed delivery with all settings of [`Observe`]: `delivery`, `delivery_limit`,
    /// `on_beat`, `catch_panics`, `message`. One delivery may contain another.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// use idem_runtime::{Disposition, SqliteStore, idempotent};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = SqliteStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &rusqlite::Transaction<'_>, order: i64) -> Result<usize, AnyError> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES (?1)", [order])?)
    /// }
    ///
    /// let mut connection = rusqlite::Connection::open_in_memory().unwrap();
    /// connection.execute_batch("CREATE TABLE payments (order_id INTEGER)").unwrap();
    /// for _delivery in 0..2 {
    ///     let (paid, outcome) = SqliteStore::transact(&mut connection, async |tx| pay(tx, 42).await).await;
    ///     assert_eq!(paid.unwrap(), 1);
    ///     assert_eq!(outcome.disposition(), Disposition::Ack);
    /// }
    /// let payments: i64 = connection.query_row("SELECT count(*) FROM payments", [], |row| row.get(0)).unwrap();
    /// assert_eq!(payments, 1);
    /// # });
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the future rolls the transaction back.
    pub fn transact<T, E, W>(connection: &mut Connection, work: W) -> Observe<impl Future<Output = Result<T, E>>>
    where
        W: AsyncFnOnce(&Transaction<'_>) -> Result<T, E>,
        E: From<rusqlite::Error>,
    {
        observe(async move {
            let begun = connection.transaction_with_behavior(TransactionBehavior::Immediate);
            let tx = begun.inspect_err(|_| within::not_begun())?;
            within::begun();
            let (ended, journal) = journaled(work(&tx)).await;
            let ended = match ended {
                Ok(done) => tx.commit().map(|()| done).map_err(|error| WorkFailure::Error(error.into())),
                Err(failed) => {
                    drop(tx);
                    Err(failed)
                }
            };
            match ended {
                Ok(done) => {
                    within::committed();
                    Ok(done)
                }
                Err(failed) => {
                    within::rolled_back(count(connection, &journal).await);
                    Err(failed.into_error())
                }
            }
        })
    }
}

/// Writes the ends of the attempts of a transaction that was rolled back. Returns whether the errors among them are
/// recorded.
async fn count(connection: &mut Connection, journal: &Journal) -> Result<bool, StoreError> {
    if journal.attempts.is_empty() {
        return Ok(false);
    }
    let failed = |error: rusqlite::Error| aborted(&error.into());
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let mut recorded = true;
    for attempt in &journal.attempts {
        let Within(at) = Within(InSqlite::new(&tx)).table(&attempt.place);
        recorded &= attempt.write(&at).await? || !attempt.has_failure();
    }
    tx.commit().map_err(failed)?;
    Ok(recorded)
}
