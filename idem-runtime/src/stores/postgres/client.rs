//! Exchanges with the server, with their time limits.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Error, Row};

use super::failure::OpFailure;
use super::sessions::{LONGEST, Sessions, TakenSession};
use super::sql::Statement;
use crate::clock::{Clock, Instant};
use crate::kit::work::{Effect, Link, WorkFailure as _, unless_stuck};

/// The connections of one runtime, with their time limits.
pub(super) struct Database {
    sessions: Sessions,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    /// True if a connection is one session of the server: such a session keeps prepared statements.
    prepares: bool,
    /// Permits for operations other than renewals; `None` if no connection has to stay free for renewals.
    spare: Option<Semaphore>,
    /// Permits for large operations of all kinds.
    large: Option<Semaphore>,
}

impl Database {
    pub(super) fn new(sessions: Sessions, clock: Arc<dyn Clock>, timeout: Duration, prepares: bool) -> Self {
        let large = sessions.size().saturating_sub(1) / 2;
        let large = (large > 0).then(|| Semaphore::new(large));
        Self { sessions, clock, timeout, prepares, spare: None, large }
    }

    /// Limits operations other than renewals to one connection at a time, so that the other connections stay free for
    /// renewals.
    pub(super) fn for_renewals(self) -> Self {
        Self { spare: Some(Semaphore::new(1)), large: None, ..self }
    }

    /// Runs `statement` in its own transaction and returns its rows.
    pub(super) async fn query(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> Result<Vec<Row>, OpFailure> {
        self.ready(statement).await?.query(params, effect).await
    }

    /// Runs `statement` like [`query`](Self::query), but takes no permit: renewals use the connection that stays free
    /// for them.
    pub(super) async fn renew(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> Result<Vec<Row>, OpFailure> {
        self.ready_in(statement, None).await?.query(params, effect).await
    }

    /// Returns a connection that can send `statement` immediately. So the caller can check, right before sending,
    /// whether the statement is still wanted.
    pub(super) async fn ready<'a>(&'a self, statement: &'a Statement) -> Result<Ready<'a>, OpFailure> {
        let room = match &self.spare {
            Some(spare) => {
                let room = unless_stuck(&*self.clock, self.timeout, || self.moved(), spare.acquire()).await;
                Some(room.and_then(Result::ok).ok_or_else(|| OpFailure::not_sent("no connection was free in time"))?)
            }
            None => None,
        };
        self.ready_in(statement, room).await
    }

    async fn ready_in<'a>(
        &'a self,
        statement: &'a Statement,
        room: Option<SemaphorePermit<'a>>,
    ) -> Result<Ready<'a>, OpFailure> {
        let connection = self.sessions.take().await?;
        let mut ready = Ready { database: self, connection, statement, prepared: None, _room: room };
        if self.prepares {
            let prepared = ready.bounded(Effect::Reads, ready.connection.prepare(statement)).await;
            match prepared.map_err(|failure| failure.of(Effect::Reads)) {
                Ok(prepared) => ready.prepared = Some(prepared),
                Err(failure) => return Err(ready.failed(failure)),
            }
        }
        Ok(ready)
    }

    /// Runs statements without parameters or rows.
    pub(super) async fn execute(&self, text: &str) -> Result<(), OpFailure> {
        let connection = self.sessions.take().await?;
        let exchange = async { connection.batch_execute(text).await.map_err(|error| OpFailure::broken(&error)) };
        let done = unless_stuck(&*self.clock, self.timeout, || connection.moved(), exchange).await;
        let done = done.unwrap_or_else(|| Err(OpFailure::timed_out()));
        if done.is_err() {
            // The connection may be in the middle of a transaction.
            connection.give_up(true);
        }
        done
    }
}

impl Link for Database {
    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn moved(&self) -> Instant {
        self.sessions.moved()
    }

    /// About half of all connections stay free for other operations. `None` if there are too few connections, and for
    /// the pool of renewals.
    fn large(&self) -> Option<&Semaphore> {
        self.large.as_ref()
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").field("prepares", &self.prepares).finish_non_exhaustive()
    }
}

/// A statement, and a connection that can send it immediately.
pub(super) struct Ready<'a> {
    database: &'a Database,
    connection: TakenSession<'a>,
    statement: &'a Statement,
    prepared: Option<tokio_postgres::Statement>,
    _room: Option<SemaphorePermit<'a>>,
}

impl Ready<'_> {
    /// Returns the rows of the statement.
    ///
    /// The future is ready when the server reports the end of the statement. The server reports this end after the
    /// commit. A row that arrives earlier proves no commit.
    pub(super) async fn query(self, params: &[&(dyn ToSql + Sync)], effect: Effect) -> Result<Vec<Row>, OpFailure> {
        let answer = match &self.prepared {
            Some(prepared) => self.bounded(effect, self.connection.query(prepared, params)).await,
            None => {
                let types = self.statement.types.iter().cloned();
                let pairs: Vec<_> = params.iter().copied().zip(types).collect();
                self.bounded(effect, self.connection.query_typed(&self.statement.text, &pairs)).await
            }
        };
        answer.map_err(|failure| self.failed(failure.of(effect)))
    }

    async fn bounded<T>(
        &self,
        effect: Effect,
        exchange: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, OpFailure> {
        let Database { clock, timeout, .. } = self.database;
        let limit = effect.limit(*timeout);
        let longest = clock.now().saturating_add(limit.saturating_mul(LONGEST));
        // After `longest`, the exchange is given up even if the server keeps sending bytes.
        let moved = || if clock.now() < longest { self.connection.moved() } else { Instant::new(Duration::ZERO) };
        match unless_stuck(&**clock, limit, moved, exchange).await {
            Some(answer) => answer.map_err(|error| OpFailure::broken(&error)),
            None => Err(OpFailure::timed_out()),
        }
    }

    /// Closes the connection if `failure` has made it unusable.
    fn failed(self, failure: OpFailure) -> OpFailure {
        if failure.gives_up {
            self.connection.give_up(failure.is_late);
        }
        failure
    }
}
