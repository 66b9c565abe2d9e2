//! Records inside of a transaction of the user's.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use super::LOOKS;
use super::client::{Effect, Hidden, meaning, told};
use super::sql::{self, Ask, Cells, Found, Met, Statement, Statements, corrupt};
use crate::record::Parts;
use crate::sync::lock;
use crate::within::{self, Within};
use crate::{
    Finish, Inspection, Key, Lease, Meeting, Record, Release, Reservation, Reserve, State, StoreError, StoreErrorKind,
    Write,
};

/// An open transaction; see [`PostgresStore::within`](super::PostgresStore::within).
#[derive(Clone)]
pub struct InPostgres<S> {
    session: S,
    table: Arc<Table>,
}

/// Whose connection the transaction is on: what a driver has to do.
pub trait Session: within::sealed::Sealed + Clone {
    #[doc(hidden)]
    type Row: Cells;

    /// The rows that a statement answers. Not prepared: that would take an exchange of its own, and poolers forget it.
    #[doc(hidden)]
    fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> impl Future<Output = Result<Vec<Self::Row>, Refused>>;

    /// Statements without parameters or rows.
    #[doc(hidden)]
    fn execute(&self, text: &str) -> impl Future<Output = Result<(), Refused>>;
}

/// What the server, or the driver, said of a statement.
#[derive(Debug)]
pub struct Refused {
    /// The `SQLSTATE`, if the server said something.
    pub(super) code: Option<String>,
    /// Without values: what the server quotes of them is in its `DETAIL`.
    pub(super) message: String,
}

impl Refused {
    /// Whether somebody's time limit ended the statement, or the server found two transactions waiting for each other.
    fn ended_a_wait(&self) -> bool {
        let ends = [&SqlState::LOCK_NOT_AVAILABLE, &SqlState::QUERY_CANCELED, &SqlState::T_R_DEADLOCK_DETECTED];
        ends.iter().any(|end| self.code.as_deref() == Some(end.code()))
    }
}

/// Whatever it was, the transaction is over.
impl From<Refused> for StoreError {
    fn from(refused: Refused) -> Self {
        let Refused { code, message } = refused;
        let (kind, advice) = code.as_deref().map_or((StoreErrorKind::Aborted, "the connection broke"), meaning);
        let kind = match kind {
            StoreErrorKind::Misconfigured | StoreErrorKind::Corrupt | StoreErrorKind::Full => kind,
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
}

impl From<tokio_postgres::Error> for Refused {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            Some(error) => Self { code: Some(error.code().code().to_owned()), message: error.message().to_owned() },
            None => Self { code: None, message: told(&error) },
        }
    }
}

/// The table that records are in.
struct Table {
    statements: Statements,
    /// What the names of locks begin with, so that two schemas lock nothing of each other's.
    schema: String,
}

impl Table {
    /// The one in `schema`. A handler asks for it at each call, so its statements are written once.
    fn of(schema: &str) -> Arc<Self> {
        static TABLES: Mutex<Vec<Arc<Table>>> = Mutex::new(Vec::new());
        let mut tables = lock(&TABLES);
        if let Some(table) = tables.iter().find(|table| table.schema == schema) {
            return Arc::clone(table);
        }
        let table = Arc::new(Self { statements: Statements::new(schema), schema: schema.to_owned() });
        tables.push(Arc::clone(&table));
        table
    }

    /// The lock on `key`. Another key, or something else of the user's, that has the same is as good as impossible, and
    /// would only have to wait.
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
        Self { session, table: Table::of(sql::SCHEMA) }
    }
}

impl<S> Within<InPostgres<S>> {
    /// The schema that holds the table; `idem` where nothing is said.
    #[must_use]
    pub fn schema(mut self, schema: &str) -> Self {
        self.0.table = Table::of(schema);
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
    /// What is recorded for `key`, unless it has expired.
    async fn look(&self, key: &Key) -> Result<Option<Found>, StoreError> {
        let found = self.table.statements.look_at(self, key.as_str()).await?;
        Ok(found.filter(|found| !found.is_expired()))
    }

    async fn end(&self, lease: &Lease, state: State, refund: i64) -> Result<Write, StoreError> {
        let record = Record::after(lease, state);
        if self.table.statements.end_pending(self, lease.key.as_str(), &record, refund, lease.ttl).await? {
            return Ok(Write::Done);
        }
        let found = self.look(&lease.key).await?;
        Ok(found.map_or(Write::Refused, |found| found.record.ended(lease, record.is_finished())))
    }
}

impl<S> within::sealed::Sealed for InPostgres<S> {}

impl<S: Session> within::Transaction for InPostgres<S> {
    const NAME: &'static str = "postgres";

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        let first = Record::first(request);
        let parts = Parts::of(&first);
        // Nobody knows how long another transaction stays open; a lease is as good a guess as any.
        let held_by_another = |attempt| Reservation::Pending { attempt, lapses_in: request.lease };
        for _ in 0..LOOKS {
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
                Met::Made => return Ok(Reservation::Reserved { lease: first.lease(request), takeover: false }),
                Met::Found(found) => found.map_err(corrupt)?,
                Met::Unseen if said.is_held => continue,
                Met::Unseen => return Ok(held_by_another(1)),
            };
            let (with, takeover) = if found.is_expired() {
                (first.clone(), false)
            } else {
                match found.record.meet(request, found.lapses_in()) {
                    Meeting::Answer(answer) => return Ok(answer),
                    Meeting::Replace { with, takeover } => (with, takeover),
                }
            };
            if !said.is_held {
                return Ok(held_by_another(with.attempt));
            }
            if self.table.statements.replace_met(self, request, &found, &with).await? {
                return Ok(Reservation::Reserved { lease: with.lease(request), takeover });
            }
        }
        Err(StoreError::new(StoreErrorKind::Aborted, "the record changed each time it was looked at"))
    }

    async fn finish(&self, lease: &Lease, finish: &Finish) -> Result<Write, StoreError> {
        sql::check_size(finish)?;
        self.end(lease, finish.state(), 0).await
    }

    async fn release(&self, lease: &Lease, release: Release) -> Result<Write, StoreError> {
        self.end(lease, release.state(), i64::from(release == Release::NotStarted)).await
    }

    async fn wait(&self, key: &Key, at_most: Duration) -> Result<(), StoreError> {
        let millis = sql::millis(at_most).clamp(1, i32::MAX.into());
        let rows = self.rows(&self.table.statements.lock_timeout, &[], Effect::Reads).await?;
        let before: Option<String> = rows.first().map(|row| row.cell(0)).transpose().map_err(corrupt)?;
        // What is set after a savepoint is undone with it, so only a lock that was got leaves something to put back.
        let begin = format!("SAVEPOINT idem_wait; SET LOCAL lock_timeout = {millis}");
        self.session.execute(&begin).await?;
        match self.session.execute(&format!("SELECT pg_advisory_xact_lock({})", self.table.lock(key))).await {
            Ok(()) => {
                let before = before.unwrap_or_default().replace('\'', "''");
                let end = format!("SET LOCAL lock_timeout = '{before}'; RELEASE SAVEPOINT idem_wait");
                Ok(self.session.execute(&end).await?)
            }
            Err(refused) if refused.ended_a_wait() => {
                Ok(self.session.execute("ROLLBACK TO SAVEPOINT idem_wait; RELEASE SAVEPOINT idem_wait").await?)
            }
            Err(refused) => Err(refused.into()),
        }
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        Ok(self.look(key).await?.map(Found::inspection))
    }

    async fn reopen(&self, key: &Key, attempt: u32) -> Result<Write, StoreError> {
        let params: [&(dyn ToSql + Sync); 2] = [&key.as_str(), &i64::from(attempt)];
        let rows = self.rows(&self.table.statements.reopen, &params, Effect::Writes).await?;
        Ok(if rows.is_empty() { Write::Refused } else { Write::Done })
    }
}
