//! The few connections of one runtime, which all operations of the runtime share, and exchanges with their time limits.

use std::collections::HashMap;
use std::fmt;
use std::future::Future as _;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, Params, Value};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::failure::OpFailure;
use super::sql::{self, Cell, Param, Row, Statement};
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::kit::lookup;
use crate::kit::metered::Moment;
use crate::kit::work::{Effect, Link, WorkFailure as _, unless_stuck};
use crate::store::StoreErrorKind;
use crate::sync::lock;

/// Time after which an idle connection is tested before its next use: the server or a proxy may have closed it, and the
/// driver notices that only at a statement.
const TESTED_AFTER: Duration = Duration::from_secs(10);

/// A connection, and the statements that are prepared in its session, by statement and number of rows.
struct MySqlSession {
    conn: Conn,
    prepared: HashMap<(usize, usize), mysql_async::Statement>,
    used_at: Instant,
}

/// Closes a connection whose exchange may still be in flight. The drop of a [`Conn`] would wait for the answer first.
fn close(session: MySqlSession) {
    // The first poll marks the connection as closed, and then writes the farewell. The rest is dropped.
    let mut closing = pin!(session.conn.disconnect());
    let _ = closing.as_mut().poll(&mut Context::from_waker(Waker::noop()));
}

/// The connections of one runtime, with their time limits.
pub(super) struct MySqlPool {
    opts: Opts,
    /// The connection that became idle last is used first: a lone task then always uses the same thread of the server.
    idle: Mutex<Vec<MySqlSession>>,
    room: Semaphore,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    moved: Moment,
    /// Permits for operations other than renewals; `None` if no connection has to stay free for renewals.
    spare: Option<Semaphore>,
    /// Permits for large operations of all kinds.
    large: Option<Semaphore>,
}

/// Rows of a statement, and the number of rows that it found or wrote.
pub(super) struct Answer {
    pub(super) rows: Vec<Row>,
    pub(super) affected: usize,
}

impl MySqlPool {
    pub(super) fn new(opts: Opts, size: usize, timeout: Duration, clock: Arc<dyn Clock>) -> Self {
        let large = size.saturating_sub(1) / 2;
        Self {
            opts,
            idle: Mutex::default(),
            room: Semaphore::new(size),
            clock,
            timeout,
            moved: Moment::default(),
            spare: None,
            large: (large > 0).then(|| Semaphore::new(large)),
        }
    }

    /// Limits operations other than renewals to one connection at a time, so that the other connections stay free for
    /// renewals.
    pub(super) fn for_renewals(self) -> Self {
        Self { spare: Some(Semaphore::new(1)), large: None, ..self }
    }

    /// Runs `statement` for `rows` in its own transaction.
    pub(super) async fn run(
        &self,
        statement: &Statement,
        rows: &[Vec<Param>],
        effect: Effect,
    ) -> Result<Answer, OpFailure> {
        self.ready().await?.run(statement, rows, effect).await
    }

    /// Runs `statement` like [`run`](Self::run), but takes no permit: renewals use the connection that stays free for
    /// them.
    pub(super) async fn renew(
        &self,
        statement: &Statement,
        rows: &[Vec<Param>],
        effect: Effect,
    ) -> Result<Answer, OpFailure> {
        self.ready_in(None).await?.run(statement, rows, effect).await
    }

    /// Returns a connection that can send a statement immediately. So the caller can check, right before sending,
    /// whether the statement is still wanted.
    pub(super) async fn ready(&self) -> Result<Ready<'_>, OpFailure> {
        let room = match &self.spare {
            Some(spare) => {
                let room = unless_stuck(&*self.clock, self.timeout, || self.moved(), spare.acquire()).await;
                Some(room.and_then(Result::ok).ok_or_else(|| OpFailure::not_sent("no connection was free in time"))?)
            }
            None => None,
        };
        self.ready_in(room).await
    }

    async fn ready_in<'a>(&'a self, spare: Option<SemaphorePermit<'a>>) -> Result<Ready<'a>, OpFailure> {
        let room = match self.room.try_acquire() {
            Ok(room) => room,
            Err(_) => {
                let room = unless_stuck(&*self.clock, self.timeout, || self.moved(), self.room.acquire()).await;
                room.and_then(Result::ok).ok_or_else(|| OpFailure::not_sent("no connection became free in time"))?
            }
        };
        let mut ready = Ready { database: self, session: None, _room: room, _spare: spare };
        let now = self.clock.now();
        let idle = lock(&self.idle).pop();
        if let Some(mut idle) = idle {
            // Half of the time remains for a new connection, so that both together take no longer than one exchange.
            if now.saturating_since(idle.used_at) < TESTED_AFTER
                || matches!(race(idle.conn.ping(), self.clock.sleep(self.timeout / 2)).await, Some(Ok(())))
            {
                ready.session = Some(idle);
                return Ok(ready);
            }
            self.close_idle(idle.used_at);
            close(idle);
        }
        let left = self.timeout.saturating_sub(self.clock.now().saturating_since(now));
        ready.session = Some(self.connect(left).await?);
        Ok(ready)
    }

    /// Closes the idle connections that were not used after `used_at`. They are probably unusable if a connection that
    /// was used then is unusable.
    fn close_idle(&self, used_at: Instant) {
        let mut idle = lock(&self.idle);
        let all = std::mem::take(&mut *idle).into_iter();
        let (old, fresh): (Vec<_>, Vec<_>) = all.partition(|it| it.used_at <= used_at);
        *idle = fresh;
        drop(idle);
        old.into_iter().for_each(close);
    }

    /// Opens a connection within `limit`.
    async fn connect(&self, limit: Duration) -> Result<MySqlSession, OpFailure> {
        let host = (self.opts.socket().is_none()).then(|| self.opts.ip_or_hostname());
        lookup::check(host.into_iter()).map_err(|error| OpFailure::not_sent(&error.to_string()))?;
        match race(Box::pin(Conn::new(self.opts.clone())), self.clock.sleep(limit)).await {
            Some(Ok(conn)) => {
                self.moved.set(self.clock.now());
                Ok(MySqlSession { conn, prepared: HashMap::new(), used_at: self.clock.now() })
            }
            Some(Err(error)) => Err(OpFailure::not_connected(&error, self.opts.ssl_opts().is_some())),
            None => Err(OpFailure::not_sent("no connection could be opened in time")),
        }
    }
}

impl Link for MySqlPool {
    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn moved(&self) -> Instant {
        self.moved.get()
    }

    fn large(&self) -> Option<&Semaphore> {
        self.large.as_ref()
    }
}

impl fmt::Debug for MySqlPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlPool").finish_non_exhaustive()
    }
}

/// A connection that can send a statement immediately. The drop of this value closes the connection.
pub(super) struct Ready<'a> {
    database: &'a MySqlPool,
    session: Option<MySqlSession>,
    // Fields drop in order: the permit is returned only after the connection.
    _room: SemaphorePermit<'a>,
    _spare: Option<SemaphorePermit<'a>>,
}

impl Ready<'_> {
    /// Runs `statement` for `rows`, as one transaction. The future is ready after the commit.
    pub(super) async fn run(
        mut self,
        statement: &Statement,
        rows: &[Vec<Param>],
        effect: Effect,
    ) -> Result<Answer, OpFailure> {
        let (count, params) = statement.params(rows);
        let session = self.session.as_mut().expect("there until the end");
        let prepared = match session.prepared.get(&(statement.place, count)) {
            Some(prepared) => prepared.clone(),
            None => {
                let text = statement.text(count);
                let prepared = race(session.conn.prep(text), self.database.clock.sleep(self.database.timeout)).await;
                match prepared {
                    Some(Ok(prepared)) => {
                        session.prepared.insert((statement.place, count), prepared.clone());
                        prepared
                    }
                    Some(Err(error)) => {
                        let failure = OpFailure::broken(&error).of(Effect::Reads);
                        if failure.is_unprepared {
                            return self
                                .unprepared(&sql::inline(&statement.text(count), &params), effect, failure)
                                .await;
                        }
                        return Err(self.failed(failure));
                    }
                    None => return Err(self.failed(OpFailure::timed_out().of(Effect::Reads))),
                }
            }
        };
        let params = Params::Positional(params.into_iter().map(Value::from).collect());
        let limit = effect.limit(self.database.timeout);
        let exchange = async {
            let mut result = session.conn.exec_iter(&prepared, params).await?;
            let rows: Vec<mysql_async::Row> = result.collect().await?;
            let affected = result.affected_rows();
            result.drop_result().await?;
            Ok((rows, affected))
        };
        let answer = race(exchange, self.database.clock.sleep(limit)).await;
        self.answered(answer, effect)
    }

    /// Runs the statement `text`, which contains its values, because the server prepares no further statements, as
    /// `failure` shows.
    async fn unprepared(mut self, text: &str, effect: Effect, failure: OpFailure) -> Result<Answer, OpFailure> {
        let session = self.session.as_mut().expect("there until the end");
        let limit = effect.limit(self.database.timeout);
        let exchange = async {
            let mut result = session.conn.query_iter(text).await?;
            let rows: Vec<mysql_async::Row> = result.collect().await?;
            let affected = result.affected_rows();
            result.drop_result().await?;
            Ok((rows, affected))
        };
        let answer = race(exchange, self.database.clock.sleep(limit)).await;
        self.answered(answer, effect).map_err(|error| match error.kind {
            // The text is longer than the values, which may not be too large for a prepared statement.
            StoreErrorKind::TooLarge => failure,
            _ => error,
        })
    }

    /// Reads the answer to a statement; `None` if there was no answer in time.
    fn answered(
        mut self,
        answer: Option<Result<(Vec<mysql_async::Row>, u64), mysql_async::Error>>,
        effect: Effect,
    ) -> Result<Answer, OpFailure> {
        match answer {
            Some(Ok((rows, affected))) => {
                self.keep();
                let rows = rows.into_iter().map(Row::from).collect();
                Ok(Answer { rows, affected: usize::try_from(affected).unwrap_or(usize::MAX) })
            }
            Some(Err(error)) => Err(self.failed(OpFailure::broken(&error).of(effect))),
            None => Err(self.failed(OpFailure::timed_out().of(effect))),
        }
    }

    /// Runs a statement without parameters. Returns its rows.
    pub(super) async fn text(mut self, text: &str, effect: Effect) -> Result<Vec<Row>, OpFailure> {
        let session = self.session.as_mut().expect("there until the end");
        let exchange = session.conn.query::<mysql_async::Row, _>(text);
        match race(exchange, self.database.clock.sleep(self.database.timeout)).await {
            Some(Ok(rows)) => {
                self.keep();
                Ok(rows.into_iter().map(Row::from).collect())
            }
            Some(Err(error)) => Err(self.failed(OpFailure::broken(&error).of(effect))),
            None => Err(self.failed(OpFailure::timed_out().of(effect))),
        }
    }

    /// Returns the connection to the idle ones.
    fn keep(&mut self) {
        let now = self.database.clock.now();
        self.database.moved.set(now);
        if let Some(mut session) = self.session.take() {
            session.used_at = now;
            lock(&self.database.idle).push(session);
        }
    }

    /// Keeps the connection unless `failure` has made it unusable.
    fn failed(mut self, failure: OpFailure) -> OpFailure {
        if !failure.gives_up {
            self.keep();
        } else if failure.is_broken {
            // The server has probably ended, and with it the connections that are idle.
            let idle = std::mem::take(&mut *lock(&self.database.idle));
            idle.into_iter().for_each(close);
        } else if failure.is_silent
            && let Some(session) = &self.session
        {
            self.database.close_idle(session.used_at);
        }
        failure
    }
}

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            close(session);
        }
    }
}

impl From<Param> for Value {
    fn from(param: Param) -> Self {
        match param {
            Param::Null => Self::NULL,
            Param::Int(number) => Self::Int(number),
            Param::Bytes(bytes) => Self::Bytes(bytes),
        }
    }
}

impl From<mysql_async::Row> for Row {
    fn from(row: mysql_async::Row) -> Self {
        row.unwrap().into()
    }
}

impl From<Vec<Value>> for Row {
    fn from(values: Vec<Value>) -> Self {
        let cell = |value| match value {
            Value::NULL => Cell::Null,
            Value::Int(number) => Cell::Int(number),
            // No number of the table is as large; a damaged one must not become another number.
            Value::UInt(number) => i64::try_from(number).map_or(Cell::Other, Cell::Int),
            Value::Bytes(bytes) => Cell::Bytes(Bytes::from(bytes)),
            _ => Cell::Other,
        };
        Self(values.into_iter().map(cell).collect())
    }
}
