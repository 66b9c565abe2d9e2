//! Records inside the user's transaction.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Transaction};

use super::client::{Effect, Hidden, meaning, told};
use super::sql::{self, Ask, Cells, Found, Met, Statement, Statements, corrupt};
use super::{LOOKED, LOOKS, PostgresStore, pause};
use crate::clock::SystemClock;
use crate::engine::Outcome;
use crate::key::Key;
use crate::record::format::FormatError;
use crate::record::{
    Admission, Finish, Inspection, Lease, Parts, Record, Release, Reservation, ReserveRequest, State, Verdict,
};
use crate::store::{StoreError, StoreErrorKind};
use crate::sync::lock;
use crate::within::{self, HELD_BY_ANOTHER, Journal, TRIES, Within, not_committed, observe_journaled, rolled_back};

/// How many tables keep their statements. With a schema for each tenant, each call may need another one.
const TABLES: usize = 16;

/// An open transaction; see [`PostgresStore::within`](super::PostgresStore::within).
#[derive(Clone)]
pub struct InPostgres<S> {
    session: S,
    table: Arc<Table>,
    namespace: Box<str>,
}

impl PostgresStore {
    /// Records inside your open transaction: they are committed with its other writes, or not at all. See [`Within`].
    ///
    /// The table is in the schema `idem`, or in another [`schema`](Within::schema). Under `REPEATABLE READ` and
    /// `SERIALIZABLE`, a duplicate that meets a record committed after this transaction began ends the transaction with an
    /// error, like any other conflict at these levels. Times count from each statement, not from the start of the
    /// transaction.
    ///
    /// ```no_run
    /// # async fn pay(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::{PostgresStore, idempotent};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &tokio_postgres::Transaction<'_>, order: i64) -> Result<u64, AnyError> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES ($1)", &[&order]).await?)
    /// }
    ///
    /// let tx = client.transaction().await?;
    /// pay(&tx, 42).await?; // An error returns from here, and the transaction is rolled back.
    /// tx.commit().await?; // The payment and its record, or neither.
    /// # Ok(()) }
    /// ```
    pub fn within<'a>(
        tx: &'a tokio_postgres::Transaction<'a>,
    ) -> Within<InPostgres<&'a tokio_postgres::Transaction<'a>>> {
        Within(InPostgres::new(tx))
    }
}

/// The connection of a transaction: what a driver has to provide.
pub trait Session: within::sealed::Sealed + Clone {
    #[doc(hidden)]
    type Row: Cells;

    /// Runs a statement and returns its rows. Not prepared: that would take an exchange of its own, and poolers forget it.
    #[doc(hidden)]
    fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> impl Future<Output = Result<Vec<Self::Row>, Refused>>;

    /// Runs statements without parameters or rows.
    #[doc(hidden)]
    fn execute(&self, text: &str) -> impl Future<Output = Result<(), Refused>>;

    /// Identifies this transaction among all that are open.
    #[doc(hidden)]
    fn identity(&self) -> usize;

    #[doc(hidden)]
    fn save(&self) -> impl Future<Output = Result<(), Refused>>;

    #[doc(hidden)]
    fn rewind(&self) -> impl Future<Output = Result<(), Refused>>;

    #[doc(hidden)]
    fn keep(&self, begun: impl FnOnce()) -> impl Future<Output = Result<(), Refused>>;

    #[doc(hidden)]
    fn undo(&self) -> impl Future<Output = Result<(), Refused>>;

    #[doc(hidden)]
    fn undo_at_once(&self);
}

/// An error of the server or the driver for a statement.
#[derive(Debug)]
pub struct Refused {
    /// The `SQLSTATE`, if the server answered.
    pub(super) code: Option<String>,
    /// Contains no values: the server quotes them only in its `DETAIL`.
    pub(super) message: String,
}

impl Refused {
    /// Whether a time limit ended the statement, or the server found a deadlock.
    fn ended_a_wait(&self) -> bool {
        let ends = [&SqlState::LOCK_NOT_AVAILABLE, &SqlState::QUERY_CANCELED, &SqlState::T_R_DEADLOCK_DETECTED];
        ends.iter().any(|end| self.code.as_deref() == Some(end.code()))
    }
}

/// Whether the server undid a transaction in favour of another one: it may be retried as a whole.
pub(super) fn is_conflict(code: &str) -> bool {
    [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED].iter().any(|it| it.code() == code)
}

impl From<Refused> for StoreError {
    fn from(refused: Refused) -> Self {
        let Refused { code, message } = refused;
        if code.as_deref().is_some_and(is_conflict) {
            within::journal(|journal| journal.conflict = true);
        }
        let (kind, advice) = match code.as_deref() {
            Some(code) => meaning(code, &message),
            None => (StoreErrorKind::Aborted, "the connection broke"),
        };
        let kind = match kind {
            StoreErrorKind::Misconfigured | StoreErrorKind::Corrupt | StoreErrorKind::TooLarge => kind,
            _ => StoreErrorKind::Aborted,
        };
        let code = code.map(|code| format!("{code}: ")).unwrap_or_default();
        Self::new(kind, format!("the transaction can't go on, roll it back: {advice} ({code}{message})"))
    }
}

impl within::sealed::Sealed for &Transaction<'_> {}

impl Session for &Transaction<'_> {
    type Row = tokio_postgres::Row;

    async fn rows(&self, statement: &Statement, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Self::Row>, Refused> {
        let typed: Vec<_> = params.iter().zip(statement.types).map(|(param, ty)| (*param, ty.clone())).collect();
        Ok(self.query_typed(&statement.text, &typed).await?)
    }

    async fn execute(&self, text: &str) -> Result<(), Refused> {
        Ok(self.batch_execute(text).await?)
    }

    fn identity(&self) -> usize {
        std::ptr::from_ref(*self).addr()
    }

    async fn save(&self) -> Result<(), Refused> {
        send(self, "SAVEPOINT idem");
        Ok(())
    }

    async fn rewind(&self) -> Result<(), Refused> {
        send(self, "ROLLBACK TO SAVEPOINT idem");
        Ok(())
    }

    async fn keep(&self, begun: impl FnOnce()) -> Result<(), Refused> {
        begun();
        send(self, "RELEASE SAVEPOINT idem");
        Ok(())
    }

    async fn undo(&self) -> Result<(), Refused> {
        self.undo_at_once();
        Ok(())
    }

    fn undo_at_once(&self) {
        send(self, "ROLLBACK TO SAVEPOINT idem; RELEASE SAVEPOINT idem");
    }
}

/// Queues `text` on the connection, before every later statement, and does not wait for it. If it fails, the transaction
/// can't go on, which the next statement reports.
fn send(tx: &Transaction<'_>, text: &str) {
    let sent = pin!(tx.batch_execute(text));
    // The first poll hands it over.
    drop(sent.poll(&mut Context::from_waker(Waker::noop())));
}

impl From<tokio_postgres::Error> for Refused {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            Some(error) => Self { code: Some(error.code().code().to_owned()), message: error.message().to_owned() },
            None => Self { code: None, message: told(&error) },
        }
    }
}

/// The table of records in one schema.
struct Table {
    statements: Statements,
    /// Part of every lock's name, so that two schemas share no locks.
    schema: String,
}

/// The recently used tables, the latest one first.
static LATEST: Mutex<Vec<Arc<Table>>> = Mutex::new(Vec::new());

impl Table {
    /// The table in `schema`. A handler asks for it at each call, so its statements are built once.
    fn of(schema: &str) -> Arc<Self> {
        let mut latest = lock(&LATEST);
        if let Some(at) = latest.iter().position(|table| table.schema == schema) {
            // Most programs have one: nothing moves.
            let table = Arc::clone(&latest[at]);
            latest[..=at].rotate_right(1);
            return table;
        }
        let table = Arc::new(Self { statements: Statements::new(schema), schema: schema.to_owned() });
        latest.truncate(TABLES - 1);
        latest.insert(0, Arc::clone(&table));
        table
    }

    /// The lock on `key`. It is practically impossible that another key, or another lock of the user's, has the same
    /// number, and would only cause a wait.
    fn lock(&self, key: &Key) -> i64 {
        let digest = Sha256::new()
            .chain_update((self.schema.len() as u64).to_be_bytes())
            .chain_update(&self.schema)
            .chain_update(key.as_str())
            .finalize();
        i64::from_be_bytes(*digest.first_chunk().expect("a digest is longer"))
    }
}

impl<S> InPostgres<S> {
    pub(super) fn new(session: S) -> Self {
        Self { session, table: Table::of(sql::SCHEMA), namespace: Box::default() }
    }
}

impl<S> Within<InPostgres<S>> {
    /// The schema that holds the table (default: `idem`).
    #[must_use]
    pub fn schema(mut self, schema: &str) -> Self {
        self.0.table = Table::of(schema);
        self
    }

    /// The name of this application, for its child keys; see
    /// [`PostgresOptions::namespace`](super::PostgresOptions::namespace).
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.0.namespace = namespace.into();
        self
    }
}

impl<S> fmt::Debug for InPostgres<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InPostgres").field("schema", &self.table.schema).finish_non_exhaustive()
    }
}

impl<S: Session> Ask for InPostgres<S> {
    type Row = S::Row;
    type Error = StoreError;

    async fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        _: Effect,
    ) -> Result<Vec<S::Row>, StoreError> {
        Ok(self.session.rows(statement, params).await?)
    }
}

impl<S: Session> InPostgres<S> {
    /// The record of `key`, unless it has expired.
    async fn look(&self, key: &Key) -> Result<Option<Found>, StoreError> {
        let found = self.table.statements.look_at(self, key.as_str()).await?;
        Ok(found.filter(|found| !found.is_expired()))
    }

    async fn end(&self, lease: &Lease, state: State, refund: i64) -> Result<Verdict, StoreError> {
        let record = Record::after(lease, state);
        if self.table.statements.end_pending(self, lease.key.as_str(), &record, refund, lease.ttl).await? {
            return Ok(Verdict::Applied);
        }
        let found = self.look(&lease.key).await?;
        Ok(found.map_or(Verdict::Refused, |found| found.record.ended(lease, record.is_finished())))
    }
}

impl<S> within::sealed::Sealed for InPostgres<S> {}

impl<S: Session> within::Transaction for InPostgres<S> {
    const NAME: &'static str = "postgres";

    fn identity(&self) -> usize {
        self.session.identity()
    }

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn place(&self) -> &str {
        &self.table.schema
    }

    async fn save(&self) -> Result<(), StoreError> {
        Ok(self.session.save().await?)
    }

    async fn rewind(&self) -> Result<(), StoreError> {
        Ok(self.session.rewind().await?)
    }

    async fn keep(&self, begun: impl FnOnce()) -> Result<(), StoreError> {
        Ok(self.session.keep(begun).await?)
    }

    async fn undo(&self) -> Result<(), StoreError> {
        Ok(self.session.undo().await?)
    }

    fn undo_at_once(&self) {
        self.session.undo_at_once();
    }

    async fn reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let first = Record::first(request);
        let parts = Parts::of(&first);
        let held_by_another = |attempt| Reservation::InProgress { attempt, lapses_in: HELD_BY_ANOTHER };
        let clock = SystemClock::default();
        for look in 0..LOOKS {
            pause(&clock, look).await;
            let params: [&(dyn ToSql + Sync); 7] = [
                &request.key.as_str(),
                &Hidden(parts.owner),
                &Hidden(parts.fingerprint),
                &parts.on_crash_fail,
                &sql::millis(request.lease),
                &sql::millis(request.ttl),
                &self.table.lock(&request.key),
            ];
            let rows = self.rows(&self.table.statements.reserve_within, &params, Effect::Writes).await?;
            let Some(said) = rows.first().map(sql::within) else {
                return Err(StoreError::new(StoreErrorKind::Aborted, "the server answered nothing to a reservation"));
            };
            let said = said.map_err(corrupt)?;
            let found = match said.met {
                Met::Made => return Ok(Reservation::Granted { lease: first.lease(request), takeover: false }),
                Met::Found(found) => found.map_err(corrupt)?,
                Met::Unseen if said.is_held => continue,
                Met::Unseen => return Ok(held_by_another(1)),
                Met::LeftOut => return Err(corrupt(FormatError::Damaged)),
            };
            let (with, takeover) = if found.is_expired() {
                (first.clone(), false)
            } else {
                match found.record.admit(request, found.lapses_in()) {
                    Admission::Answer(answer) => return Ok(answer),
                    Admission::Replace { with, takeover } => (with, takeover),
                }
            };
            if !said.is_held {
                return Ok(held_by_another(with.attempt));
            }
            if self.table.statements.replace_met(self, request, &found, &with).await? {
                return Ok(Reservation::Granted { lease: with.lease(request), takeover });
            }
        }
        Err(StoreError::new(StoreErrorKind::Aborted, LOOKED))
    }

    async fn finish(&self, lease: &Lease, finish: &Finish) -> Result<Verdict, StoreError> {
        sql::check_size(finish)?;
        self.end(lease, finish.state(), 0).await
    }

    async fn release(&self, lease: &Lease, release: Release) -> Result<Verdict, StoreError> {
        self.end(lease, release.state(), i64::from(release == Release::NotStarted)).await
    }

    async fn wait(&self, key: &Key, at_most: Duration) -> Result<bool, StoreError> {
        let millis = sql::millis(at_most).clamp(1, i32::MAX.into());
        let rows = self.rows(&self.table.statements.lock_timeout, &[], Effect::Reads).await?;
        let before: Option<String> = rows.first().map(|row| row.cell(0)).transpose().map_err(corrupt)?;
        self.session.execute(&format!("SET LOCAL lock_timeout = {millis}")).await?;
        match self.session.execute(&format!("SELECT pg_advisory_xact_lock({})", self.table.lock(key))).await {
            Ok(()) => {
                let before = before.unwrap_or_default().replace('\'', "''");
                self.session.execute(&format!("SET LOCAL lock_timeout = '{before}'")).await?;
                Ok(true)
            }
            // The rollback to the savepoint undoes the setting.
            Err(refused) if refused.ended_a_wait() => Ok(false),
            Err(refused) => Err(refused.into()),
        }
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        Ok(self.look(key).await?.map(Found::inspection))
    }

    async fn reopen(&self, key: &Key, attempt: u32) -> Result<Verdict, StoreError> {
        let params: [&(dyn ToSql + Sync); 2] = [&key.as_str(), &i64::from(attempt)];
        let rows = self.rows(&self.table.statements.reopen, &params, Effect::Writes).await?;
        Ok(if rows.is_empty() { Verdict::Refused } else { Verdict::Applied })
    }
}

impl PostgresStore {
    /// Begins a transaction, does `work` in it and commits it. Returns how the delivery ended and what to do with its
    /// message.
    ///
    /// If `work` returns `Ok`, the transaction is committed, and only then may the [`Outcome`] say
    /// [`Ack`](crate::Disposition::Ack). If it returns an error, or the commit is refused, everything is rolled back and
    /// the message is to be delivered again; an error that a handler recorded (`on_error = record`) is still recorded,
    /// alone. If the connection breaks and the commit is uncertain, the message is delivered again, and replayed if it was
    /// committed.
    ///
    /// If the server undoes the transaction in favour of another one (a serialization failure or a deadlock, at the commit
    /// or in a statement of the library's), a clone of `work` is tried again, up to five times in all: nothing of it has
    /// happened in the database. The isolation level is the session's default.
    ///
    /// ```no_run
    /// # async fn deliver(client: &mut tokio_postgres::Client, order: i64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::{Disposition, PostgresStore, idempotent};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &tokio_postgres::Transaction<'_>, order: i64) -> Result<u64, AnyError> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES ($1)", &[&order]).await?)
    /// }
    ///
    /// let (paid, outcome) = PostgresStore::transact(client, async |tx| pay(tx, order).await).await;
    /// match outcome.disposition() {
    ///     Disposition::Ack => println!("the payment and its record are committed: {paid:?}"),
    ///     Disposition::Retry { after } => println!("deliver it again after {after:?}"),
    ///     Disposition::DeadLetter => println!("set it aside: {paid:?}"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the future rolls the transaction back, unless its `COMMIT` is under way.
    pub async fn transact<T, E, W>(client: &mut Client, work: W) -> (Result<T, E>, Outcome)
    where
        W: AsyncFnOnce(&Transaction<'_>) -> Result<T, E> + Clone,
        E: From<tokio_postgres::Error>,
    {
        let is_conflict = |error: &tokio_postgres::Error| error.code().is_some_and(|code| is_conflict(code.code()));
        let mut next = 1;
        loop {
            let tx = match client.transaction().await {
                Ok(tx) => tx,
                Err(error) => return (Err(error.into()), Outcome::UNKNOWN),
            };
            // Boxed: a call in a transaction is large, and its caller's future would store it more than once.
            let (result, outcome, journal) = observe_journaled(Box::pin(work.clone()(&tx))).await;
            match result {
                Ok(done) => match commit(tx).await {
                    Ok(()) => return (Ok(done), outcome.committed()),
                    Err(error) if is_conflict(&error) && next < TRIES => {}
                    Err(error) => return (Err(error.into()), not_committed(outcome)),
                },
                Err(_) if journal.conflict && next < TRIES => drop(tx.rollback().await),
                Err(error) => {
                    tx.rollback().await.ok();
                    let recorded = record_failed(client, &journal).await;
                    return (Err(error), rolled_back(outcome, &recorded));
                }
            }
            within::pause_before(next).await;
            next += 1;
        }
    }
}

/// Commits, unless a statement has failed: the server would roll back, and report success.
async fn commit(tx: Transaction<'_>) -> Result<(), tokio_postgres::Error> {
    tx.batch_execute("SELECT 1").await?;
    tx.commit().await
}

/// Records the errors that handlers recorded in a transaction that was rolled back. Returns whether there were any.
async fn record_failed(client: &mut Client, journal: &Journal) -> Result<bool, StoreError> {
    if journal.failed.is_empty() {
        return Ok(false);
    }
    let tx = client.transaction().await.map_err(Refused::from)?;
    for failed in &journal.failed {
        let Within(at) = Within(InPostgres::new(&tx)).schema(&failed.place);
        failed.write(&at).await?;
    }
    commit(tx).await.map_err(Refused::from)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statements_of_few_schemas_are_kept() {
        let first = Table::of("tenant 0");
        for n in 0..10 * TABLES {
            Table::of(&format!("tenant {n}"));
            assert!(Arc::ptr_eq(&first, &Table::of("tenant 0")), "what is used is kept");
            assert!(lock(&LATEST).len() <= TABLES);
        }
        assert_eq!(Arc::strong_count(&first), 2);
        for n in 1..=TABLES {
            Table::of(&format!("tenant {n}"));
        }
        assert_eq!(Arc::strong_count(&first), 1, "what is not used is given up");
    }
}
