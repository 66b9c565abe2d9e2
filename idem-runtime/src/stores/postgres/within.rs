//! Records inside of a transaction of the user's.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use super::client::{Failure, Hidden};
use super::sql::{self, Found, Met, Statement, Statements};
use super::{LOOKS, corrupt};
use crate::record::Parts;
use crate::within::{self, Within};
use crate::{
    Finish, Inspection, Key, Lease, Meeting, Record, Release, Reservation, Reserve, State, StoreError, StoreErrorKind,
    Write,
};

/// An open transaction of `tokio-postgres`; see [`PostgresStore::within`](super::PostgresStore::within).
#[derive(Clone)]
pub struct InPostgres<'a> {
    session: &'a Transaction<'a>,
    table: Arc<Table>,
}

/// The table that records are in.
struct Table {
    statements: Statements,
    /// What the names of locks begin with, so that two schemas lock nothing of each other's.
    schema: String,
}

impl Table {
    fn new(schema: &str) -> Self {
        Self { statements: Statements::new(schema), schema: schema.to_owned() }
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

impl<'a> InPostgres<'a> {
    pub(super) fn new(session: &'a Transaction<'a>) -> Self {
        static DEFAULT: LazyLock<Arc<Table>> = LazyLock::new(|| Arc::new(Table::new(sql::SCHEMA)));
        Self { session, table: Arc::clone(&DEFAULT) }
    }
}

impl Within<InPostgres<'_>> {
    /// The schema that holds the table; `idem` where nothing is said.
    #[must_use]
    pub fn schema(mut self, schema: &str) -> Self {
        self.0.table = Arc::new(Table::new(schema));
        self
    }
}

impl fmt::Debug for InPostgres<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InPostgres").field("schema", &self.table.schema).finish_non_exhaustive()
    }
}

/// A failure of a statement: whatever it was, the transaction is over.
fn aborted(error: &tokio_postgres::Error) -> StoreError {
    let failure = StoreError::from(Failure::broken(error));
    let kind = match failure.kind() {
        kind @ (StoreErrorKind::Misconfigured | StoreErrorKind::Corrupt | StoreErrorKind::Full) => kind,
        _ => StoreErrorKind::Aborted,
    };
    StoreError::new(kind, format!("the transaction can't go on, roll it back: {failure}"))
}

impl InPostgres<'_> {
    async fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<tokio_postgres::Row>, StoreError> {
        // Not prepared: that would take an exchange of its own, and poolers forget it.
        let typed: Vec<_> = params.iter().zip(statement.types).map(|(param, ty)| (*param, ty.clone())).collect();
        self.session.query_typed(&statement.text, &typed).await.map_err(|error| aborted(&error))
    }

    async fn execute(&self, text: &str) -> Result<(), StoreError> {
        self.session.batch_execute(text).await.map_err(|error| aborted(&error))
    }

    async fn look(&self, key: &Key) -> Result<Option<Found>, StoreError> {
        let rows = self.rows(&self.table.statements.look, &[&key.as_str()]).await?;
        match rows.first().map(sql::met) {
            Some(Met::Found(found)) => Ok(Some(*found.map_err(corrupt)?).filter(|found| !found.is_expired())),
            Some(Met::Made | Met::Unseen) => Err(corrupt(crate::record::format::FormatError::Damaged)),
            None => Ok(None),
        }
    }

    async fn end(&self, lease: &Lease, state: State, refund: i64) -> Result<Write, StoreError> {
        let finishes = matches!(state, State::Completed(_) | State::Failed(_));
        let record = Record::after(lease, state);
        let parts = Parts::of(&record);
        let params: [&(dyn ToSql + Sync); 8] = [
            &lease.key.as_str(),
            &Hidden(parts.owner),
            &parts.state,
            &refund,
            &parts.codec,
            &Hidden(parts.result.as_deref()),
            &parts.result_bytes,
            &sql::millis(lease.ttl),
        ];
        if !self.rows(&self.table.statements.end, &params).await?.is_empty() {
            return Ok(Write::Done);
        }
        // A finished record of this attempt is done; a released one is not finished any more.
        let found = self.look(&lease.key).await?.filter(|found| found.record.owner == lease.owner);
        let repeated = found.is_some_and(|Found { record, .. }| {
            !matches!(record.state, State::Pending { .. }) && record.is_finished() == finishes
        });
        Ok(if repeated { Write::Done } else { Write::Refused })
    }

    /// Replaces the record that was met, if it still is the one that was met.
    async fn replace(&self, request: &Reserve, met: &Found, with: &Record) -> Result<bool, StoreError> {
        let (parts, seen) = (Parts::of(with), Parts::of(&met.record));
        let params: [&(dyn ToSql + Sync); 12] = [
            &request.key.as_str(),
            &Hidden(parts.owner),
            &Hidden(parts.fingerprint),
            &parts.on_crash_fail,
            &sql::millis(request.lease),
            &sql::millis(request.ttl),
            &parts.attempt,
            &parts.starts,
            &Hidden(seen.owner),
            &seen.attempt,
            &seen.state,
            &met.is_expired(),
        ];
        Ok(!self.rows(&self.table.statements.replace, &params).await?.is_empty())
    }
}

impl within::sealed::Sealed for InPostgres<'_> {}

impl within::Transaction for InPostgres<'_> {
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
            let rows = self.rows(&self.table.statements.reserve_within, &params).await?;
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
            if self.replace(request, &found, &with).await? {
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
        // What is set after a savepoint is undone with it, so only a lock that was got leaves something to put back.
        let rows = self
            .session
            .query_typed("SELECT current_setting('lock_timeout')", &[])
            .await
            .map_err(|error| aborted(&error))?;
        let before: String = rows.first().ok_or(()).and_then(|row| row.try_get(0).map_err(|_| ())).unwrap_or_default();
        self.execute(&format!("SAVEPOINT idem_wait; SET LOCAL lock_timeout = {millis}")).await?;
        let lock = format!("SELECT pg_advisory_xact_lock({})", self.table.lock(key));
        match self.session.batch_execute(&lock).await {
            Ok(()) => {
                let before = before.replace('\'', "''");
                self.execute(&format!("SET LOCAL lock_timeout = '{before}'; RELEASE SAVEPOINT idem_wait")).await
            }
            // Its time is up, whoever has set it; or two transactions wait for each other.
            Err(error)
                if matches!(
                    error.code(),
                    Some(&SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED | &SqlState::T_R_DEADLOCK_DETECTED)
                ) =>
            {
                self.execute("ROLLBACK TO SAVEPOINT idem_wait; RELEASE SAVEPOINT idem_wait").await
            }
            Err(error) => Err(aborted(&error)),
        }
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        Ok(self.look(key).await?.map(Found::inspection))
    }

    async fn reopen(&self, key: &Key, attempt: u32) -> Result<Write, StoreError> {
        let rows = self.rows(&self.table.statements.reopen, &[&key.as_str(), &i64::from(attempt)]).await?;
        Ok(if rows.is_empty() { Write::Refused } else { Write::Done })
    }
}
