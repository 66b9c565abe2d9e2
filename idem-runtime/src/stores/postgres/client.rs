//! One exchange with the server over a connection of the pool, and what its failures mean.

use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use deadpool_postgres::{Object, Pool, PoolError};
use tokio_postgres::error::{DbError, SqlState};
use tokio_postgres::types::{IsNull, ToSql, Type};
use tokio_postgres::{Error, Row};

use super::sql::Statement;
use crate::clock::{Clock, race};
use crate::{StoreError, StoreErrorKind};

/// How often another connection is tried when the pool's turns out to be broken.
const CONNECTIONS: usize = 64;

/// What to do about a pooler that was not expected.
const POOLED: &str = "a pooler stands between; see `PostgresOptions::behind_pgbouncer`";

/// What a statement does if it lands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    Reads,
    Writes,
}

/// An operation that was not done, or perhaps was; one failure may be the answer to many operations.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) kind: StoreErrorKind,
    message: Arc<str>,
    /// Whether one operation of a batch may be to blame for all of it.
    pub(super) blames_one: bool,
    /// Whether nothing was written, and the same again has every chance.
    pub(super) is_deadlock: bool,
    /// Whether the connection is of no more use.
    gives_up: bool,
}

impl Failure {
    pub(super) fn new(kind: StoreErrorKind, message: impl Into<Arc<str>>) -> Self {
        Self { kind, message: message.into(), blames_one: false, is_deadlock: false, gives_up: false }
    }

    /// Nothing was sent.
    pub(super) fn not_sent(reason: &str) -> Self {
        Self::new(StoreErrorKind::Unavailable, format!("the server can't be asked: {reason}"))
    }

    /// The answer got lost.
    pub(super) fn lost() -> Self {
        Self::new(StoreErrorKind::Unknown, "the answer got lost on its way")
    }

    fn giving_up(self) -> Self {
        Self { gives_up: true, ..self }
    }

    /// The same for a statement that writes nothing.
    fn of(self, effect: Effect) -> Self {
        match (effect, self.kind) {
            (Effect::Reads, StoreErrorKind::Unknown) => Self { kind: StoreErrorKind::Unavailable, ..self },
            _ => self,
        }
    }

    /// The server refused. What it says of values (its `DETAIL`) is left out: it may quote a result or an owner token.
    fn refused(error: &DbError) -> Self {
        let code = error.code();
        let (kind, advice) = match code.code() {
            // Only a pooler says so.
            "08P01" if error.message().contains("startup parameter") => (StoreErrorKind::Misconfigured, POOLED),
            code => meaning(code),
        };
        let message = format!("the server refused: {advice} ({}: {})", code.code(), error.message());
        let is_fatal = matches!(error.severity(), "FATAL" | "PANIC");
        let stale = matches!(code.code(), "25006" | "26000" | "42P05" | "0A000");
        Self {
            blames_one: (kind == StoreErrorKind::Misconfigured
                && matches!(&code.code()[..2], "22" | "23" | "44" | "54" | "P0"))
                // One key that a transaction of somebody's holds.
                || *code == SqlState::LOCK_NOT_AVAILABLE,
            is_deadlock: matches!(*code, SqlState::T_R_DEADLOCK_DETECTED | SqlState::T_R_SERIALIZATION_FAILURE),
            gives_up: is_fatal || stale || kind == StoreErrorKind::Unknown,
            ..Self::new(kind, message)
        }
    }

    /// An exchange that broke.
    fn broken(error: &Error) -> Self {
        match error.as_db_error() {
            Some(error) => Self::refused(error),
            // Everything else is a connection that ended or talks nonsense; how far the server got nobody knows.
            None => Self::new(StoreErrorKind::Unknown, format!("the connection broke: {}", told(error))).giving_up(),
        }
    }

    /// A connection that could not be made.
    pub(super) fn not_connected(error: &Error) -> Self {
        let failure = match error.as_db_error() {
            Some(error) => Self::refused(error),
            None => {
                let text = error.to_string();
                // A certificate that is not trusted is no matter of time.
                let cause = error.source().and_then(|cause| cause.downcast_ref::<std::io::Error>());
                let untrusted = cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::InvalidData);
                let refused = ["authentication", "invalid configuration", "invalid connection string"];
                let is_wrong = refused.iter().any(|start| text.starts_with(start))
                    || (text.contains("TLS") && (untrusted || cause.is_none()));
                let kind = if is_wrong { StoreErrorKind::Misconfigured } else { StoreErrorKind::Unavailable };
                Self::new(kind, format!("the server can't be reached: {}", told(error)))
            }
        };
        failure.of(Effect::Reads)
    }
}

/// What an error of the server means, by its `SQLSTATE`, and what to do about it.
pub(super) fn meaning(code: &str) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Corrupt, Full, Misconfigured, Unavailable, Unknown};
    let read_only = "a read-only server: a standby, or a primary that was replaced; it is asked for anew";
    match code {
        "42P01" | "3F000" | "42703" | "42883" => {
            (Misconfigured, "the table is not there, or is another version's; see `PostgresOptions::ensure_schema`")
        }
        "42501" => (Misconfigured, "the login may not use the table"),
        "28000" | "28P01" => (Misconfigured, "the login is refused"),
        "3D000" => (Misconfigured, "there is no such database"),
        "25006" => (Unavailable, read_only),
        "26000" | "42P05" => (Unavailable, POOLED),
        "0A000" => (Unavailable, "the table was changed; the statement is prepared anew"),
        "40003" => (Unknown, "the connection broke before the answer came"),
        "53100" | "53200" => (Full, "it has no room"),
        "57P03" => (Unavailable, "it is starting up or shutting down"),
        "XX001" | "XX002" => (Corrupt, "its data is damaged"),
        code => match code.get(..2).unwrap_or_default() {
            "08" | "57" if code != "57014" => (Unknown, "the connection broke before the answer came"),
            "22" | "23" | "42" | "44" | "54" | "P0" => (Misconfigured, "it does not accept this operation"),
            _ => (Unavailable, "nothing was written"),
        },
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        Self::new(failure.kind, &*failure.message)
    }
}

/// An error of the driver that is none of the server's, and what caused it. Those hold neither values nor passwords.
pub(super) fn told(error: &Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// A parameter of a statement. The driver logs parameters, so this one does not show itself.
pub(super) struct Hidden<T>(pub(super) T);

impl<T> fmt::Debug for Hidden<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl<T: ToSql> ToSql for Hidden<T> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        self.0.to_sql(ty, out)
    }

    fn accepts(ty: &Type) -> bool {
        T::accepts(ty)
    }

    tokio_postgres::types::to_sql_checked!();
}

/// The pool and how it is used.
pub(super) struct Database {
    pool: Pool,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    /// Whether a connection is one session of the server, which remembers statements.
    sessions: bool,
}

impl Database {
    pub(super) fn new(pool: Pool, clock: Arc<dyn Clock>, timeout: Duration, sessions: bool) -> Self {
        Self { pool, clock, timeout, sessions }
    }

    pub(super) fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The rows that `statement` answers, all of it in one transaction of its own.
    ///
    /// The rows are there once the server says that it is ready again, which is after the commit; a row alone proves
    /// nothing.
    pub(super) async fn query(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> Result<Vec<Row>, Failure> {
        let client = self.client().await?;
        // Whether more was said than how the statement reads.
        let sent = AtomicBool::new(!self.sessions);
        let answer = {
            let exchange = async {
                if self.sessions {
                    let prepared = client.prepare_typed_cached(&statement.text, statement.types).await;
                    let prepared = prepared.map_err(|error| Failure::broken(&error).of(Effect::Reads))?;
                    sent.store(true, Ordering::Relaxed);
                    client.query(&prepared, params).await.map_err(|error| Failure::broken(&error).of(effect))
                } else {
                    let typed: Vec<_> =
                        params.iter().zip(statement.types).map(|(param, ty)| (*param, ty.clone())).collect();
                    let answer = client.query_typed(&statement.text, &typed).await;
                    answer.map_err(|error| Failure::broken(&error).of(effect))
                }
            };
            race(exchange, self.clock.sleep(self.timeout)).await.unwrap_or_else(|| {
                let effect = if sent.load(Ordering::Relaxed) { effect } else { Effect::Reads };
                Err(timed_out().of(effect))
            })
        };
        if matches!(&answer, Err(failure) if failure.gives_up) {
            drop(Object::take(client));
        }
        answer
    }

    /// Statements without parameters or rows.
    pub(super) async fn execute(&self, text: &str) -> Result<(), Failure> {
        let client = self.client().await?;
        let done = {
            let exchange = async { client.batch_execute(text).await.map_err(|error| Failure::broken(&error)) };
            race(exchange, self.clock.sleep(self.timeout)).await.unwrap_or_else(|| Err(timed_out()))
        };
        if done.is_err() {
            // It may be in the middle of a transaction.
            drop(Object::take(client));
        }
        done
    }

    async fn client(&self) -> Result<Object, Failure> {
        for _ in 0..CONNECTIONS {
            let got = race(self.pool.get(), self.clock.sleep(self.timeout)).await;
            let client = match got {
                Some(Ok(client)) => client,
                Some(Err(PoolError::Backend(error))) => return Err(Failure::not_connected(&error)),
                Some(Err(error @ PoolError::NoRuntimeSpecified)) => {
                    return Err(Failure::new(
                        StoreErrorKind::Misconfigured,
                        format!("the pool can't be used: {error}"),
                    ));
                }
                Some(Err(PoolError::Timeout(_))) | None => {
                    return Err(Failure::not_sent("no connection was free, or could be made, in time"));
                }
                Some(Err(error)) => return Err(Failure::not_sent(&error.to_string())),
            };
            // One that broke while it lay in the pool has sent nothing.
            if !client.is_closed() {
                return Ok(client);
            }
            drop(Object::take(client));
        }
        Err(Failure::not_sent("every connection breaks as soon as it is made"))
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").field("sessions", &self.sessions).finish_non_exhaustive()
    }
}

fn timed_out() -> Failure {
    Failure::new(StoreErrorKind::Unknown, "the server did not answer in time").giving_up()
}
