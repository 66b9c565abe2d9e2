//! Records inside the user's transaction: the operations of a store on the connection of any driver.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use super::failure::meaning;
use super::locked_or_changing;
use super::param::HiddenParam;
use super::sql::{self, Cells, Executor, LookupResult, Statement, Statements};
use crate::clock::Clock;
use crate::key::Key;
use crate::kit::held::{MEETINGS, held_by_another};
use crate::kit::looks::{LOOKS, pause_before};
use crate::kit::rows::{AdmissionOutcome, FoundRow, corrupt, millis};
use crate::kit::tables::{NamedTable, RecentTables};
use crate::kit::work::Effect;
use crate::record::format::FormatError;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Lease, Parts, Record, Release, Reservation, ReserveRequest, State,
    Verdict,
};
use crate::store::transaction::{DriverTransaction, Sealed, TransactionStore, can_not_continue};
use crate::store::{StoreError, StoreErrorKind};

/// An open transaction; see [`PostgresStore::within`](super::PostgresStore::within).
#[derive(Clone)]
pub struct InPostgres<'a, S> {
    session: S,
    table: Arc<NamedTable<Statements>>,
    clock: &'a dyn Clock,
}

/// An open transaction of a driver, for [`PostgresStore::within`](super::PostgresStore::within): the `Transaction` of
/// tokio-postgres 0.7, of deadpool-postgres 0.14, or of sqlx 0.8 or 0.9. Each driver has its own feature, for example
/// `with-sqlx-0_9`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction of PostgreSQL that `PostgresStore` can use",
    label = "not the transaction of a driver for PostgreSQL"
)]
pub trait Transaction: DriverTransaction {
    #[doc(hidden)]
    type Session<'a>: TransactionSession
    where
        Self: 'a;

    #[doc(hidden)]
    fn session<'a>(shared: &'a Self::Shared, clock: &'a dyn Clock) -> Self::Session<'a>
    where
        Self: 'a;
}

/// The connection of a transaction: the operations that a driver has to provide.
pub trait TransactionSession: Sealed + Clone {
    #[doc(hidden)]
    type Row: Cells;

    /// Runs a statement and returns its rows. Does not prepare the statement: the preparation would take one more
    /// exchange, and poolers forget prepared statements.
    #[doc(hidden)]
    fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> impl Future<Output = Result<Vec<Self::Row>, StatementError>>;

    /// Runs statements without parameters or rows.
    #[doc(hidden)]
    fn execute(&self, text: &str) -> impl Future<Output = Result<(), StatementError>>;

    #[doc(hidden)]
    fn save(&self) -> impl Future<Output = Result<(), StatementError>>;

    #[doc(hidden)]
    fn rewind(&self) -> impl Future<Output = Result<(), StatementError>>;

    #[doc(hidden)]
    fn keep(&self, begun: impl FnOnce()) -> impl Future<Output = Result<(), StatementError>>;

    #[doc(hidden)]
    fn undo(&self) -> impl Future<Output = Result<(), StatementError>>;

    #[doc(hidden)]
    fn undo_immediately(&self);
}

/// An error of the server or the driver for a statement.
#[derive(Debug)]
pub struct StatementError {
    /// The `SQLSTATE`, if the server answered.
    pub(super) code: Option<String>,
    /// Text of the error. The text contains no values, because the server quotes values only in the `DETAIL`.
    pub(super) message: String,
}

impl StatementError {
    /// Returns whether a time limit ended the statement, or the server found a deadlock.
    fn ended_a_wait(&self) -> bool {
        let ends = [&SqlState::LOCK_NOT_AVAILABLE, &SqlState::QUERY_CANCELED, &SqlState::T_R_DEADLOCK_DETECTED];
        ends.iter().any(|end| self.code.as_deref() == Some(end.code()))
    }
}

/// Returns whether the server aborted a transaction because of a conflict with another transaction. The whole
/// transaction may be retried.
pub(crate) fn is_conflict(code: &str) -> bool {
    [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED].iter().any(|it| it.code() == code)
}

impl From<StatementError> for StoreError {
    fn from(refused: StatementError) -> Self {
        let StatementError { code, message } = refused;
        let conflicts = code.as_deref().is_some_and(is_conflict);
        let (kind, advice) = match code.as_deref() {
            Some(code) => meaning(code, &message),
            None => (StoreErrorKind::Aborted, "the connection broke"),
        };
        can_not_continue(kind, advice, code, &message, conflicts)
    }
}

/// The tables of records, by their schemas.
static TABLES: RecentTables<Statements> = RecentTables::empty();

fn table_in(schema: &str) -> Arc<NamedTable<Statements>> {
    TABLES.of(schema, Statements::new)
}

impl<'a, S> InPostgres<'a, S> {
    pub(crate) fn new(session: S, clock: &'a dyn Clock) -> Self {
        Self { session, table: table_in(sql::SCHEMA), clock }
    }

    pub(crate) fn schema(mut self, schema: &str) -> Self {
        self.table = table_in(schema);
        self
    }
}

impl<S> fmt::Debug for InPostgres<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InPostgres").field("schema", &self.table.name).finish_non_exhaustive()
    }
}

impl<S: TransactionSession> Executor for InPostgres<'_, S> {
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

impl<S: TransactionSession> InPostgres<'_, S> {
    /// Returns the record of `key`, unless it has expired.
    async fn look(&self, key: &Key) -> Result<Option<FoundRow>, StoreError> {
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

impl<S> Sealed for InPostgres<'_, S> {}

impl<S: TransactionSession> TransactionStore for InPostgres<'_, S> {
    const NAME: &'static str = "postgres";

    fn place(&self) -> &str {
        &self.table.name
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

    fn undo_immediately(&self) {
        self.session.undo_immediately();
    }

    async fn reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let first = Record::first(request);
        let parts = Parts::of(&first);
        for look in 0..LOOKS {
            pause_before(look, self.clock).await;
            let params: [&(dyn ToSql + Sync); 8] = [
                &request.key.as_str(),
                &HiddenParam(parts.owner),
                &HiddenParam(parts.fingerprint),
                &parts.on_crash_fail,
                &millis(request.lease),
                &millis(request.ttl),
                &parts.holder,
                &parts.traceparent,
            ];
            let rows = self.rows(&self.table.statements.reserve_within, &params, Effect::Writes).await?;
            let Some(said) = rows.first().map(sql::within) else {
                return Err(StoreError::new(StoreErrorKind::Aborted, "the server returned no row for a reservation"));
            };
            let said = said.map_err(corrupt)?;
            // This transaction holds the key. The count of calls that found the key held by another transaction starts
            // anew.
            if said.is_held {
                MEETINGS.forget(request.key.seed());
            }
            let found = match said.met {
                LookupResult::Made => return Ok(first.grant(request, false)),
                LookupResult::Found(found) => found.map_err(corrupt)?,
                LookupResult::Unseen if said.is_held => continue,
                LookupResult::Unseen => return Ok(held_by_another(&request.key, 1)),
                LookupResult::LeftOut => return Err(corrupt(FormatError::Damaged)),
            };
            let (met, with, takeover) = match found.meet(request) {
                AdmissionOutcome::Answer(answer) => return Ok(answer),
                AdmissionOutcome::Replace { met, with, takeover } => (met, with, takeover),
            };
            // Another transaction holds the key, and may be about to replace the same record.
            if !said.is_held {
                return Ok(held_by_another(&request.key, with.attempt));
            }
            if self.table.statements.replace_met(self, request, &met, &with).await? {
                return Ok(with.grant(request, takeover));
            }
        }
        Err(locked_or_changing(StoreErrorKind::Aborted))
    }

    async fn begin(&self, lease: &Lease) -> Result<Verdict, StoreError> {
        let (keys, owners) = (vec![lease.key.as_str()], vec![&lease.owner.as_bytes()[..]]);
        let params: [&(dyn ToSql + Sync); 3] = [&keys, &HiddenParam(owners), &vec![i64::from(lease.attempt)]];
        let rows = self.rows(&self.table.statements.begin, &params, Effect::Writes).await?;
        Ok(if rows.is_empty() { Verdict::Refused } else { Verdict::Applied })
    }

    async fn finish(&self, lease: &Lease, finish: &Finish) -> Result<Verdict, StoreError> {
        sql::check_size(finish.result())?;
        self.end(lease, finish.state(), 0).await
    }

    async fn release(&self, lease: &Lease, release: Release) -> Result<Verdict, StoreError> {
        self.end(lease, release.state(), i64::from(!release.counts())).await
    }

    async fn wait(&self, key: &Key, at_most: Duration) -> Result<bool, StoreError> {
        let millis = millis(at_most).clamp(1, i32::MAX.into());
        let rows = self.rows(&self.table.statements.lock_timeout, &[], Effect::Reads).await?;
        let before: Option<String> = rows.first().map(|row| row.cell(0)).transpose().map_err(corrupt)?;
        self.session.execute(&format!("SET LOCAL lock_timeout = {millis}")).await?;
        match self.session.rows(&self.table.statements.hold, &[&key.as_str()]).await {
            Ok(_) => {
                let before = before.unwrap_or_default().replace('\'', "''");
                self.session.execute(&format!("SET LOCAL lock_timeout = '{before}'")).await?;
                Ok(true)
            }
            // The rollback to the savepoint also restores the `lock_timeout` that was set for this wait.
            Err(refused) if refused.ended_a_wait() => Ok(false),
            Err(refused) => Err(refused.into()),
        }
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        self.table.statements.inspect_at(self, key.as_str()).await
    }

    async fn decide(&self, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
        sql::check_decision(decision)?;
        for look in 0..LOOKS {
            pause_before(look, self.clock).await;
            if let Some(decided) = self.table.statements.try_decide(self, decision).await? {
                return Ok(decided);
            }
        }
        Err(locked_or_changing(StoreErrorKind::Aborted))
    }
}
