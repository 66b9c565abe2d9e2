//! One exchange with the server, and what its failures mean.

use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_postgres::error::{DbError, SqlState};
use tokio_postgres::types::{IsNull, ToSql, Type};
use tokio_postgres::{Error, Row};

use super::sessions::{LONGEST, Sessions, Taken, unless_stuck};
use super::sql::Statement;
use crate::clock::{Clock, Instant};
use crate::store::{StoreError, StoreErrorKind};

/// What to do about an unexpected pooler.
const POOLED: &str = "a pooler stands between; see `PostgresOptions::behind_pgbouncer`";

/// What a statement does if the server runs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    Reads,
    Writes,
    /// Writes, with a result of so many bytes.
    Records(usize),
}

/// For every so many bytes sent, the answer may take one more time limit. What is still under way to the server can't be
/// seen: the system takes megabytes of it at once.
const SENT_WITHIN_LIMIT: usize = 256 * 1024;

impl Effect {
    /// How long an exchange may hear nothing, if `limit` is for a short one.
    fn limit(self, limit: Duration) -> Duration {
        match self {
            Self::Records(bytes) => {
                let times = u32::try_from(1 + bytes / SENT_WITHIN_LIMIT).unwrap_or(u32::MAX);
                limit.saturating_mul(times)
            }
            _ => limit,
        }
    }
}

/// The failure of an operation that was not done, or perhaps was; it may be the answer to many operations.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about one failure")]
pub(super) struct Failure {
    pub(super) kind: StoreErrorKind,
    message: Arc<str>,
    /// Whether one operation of a batch may be to blame for the whole failure.
    pub(super) blames_one: bool,
    /// Whether nothing was written and a retry is likely to succeed.
    pub(super) is_deadlock: bool,
    /// Whether the connection is unusable afterwards.
    gives_up: bool,
    /// Whether the server may still be working on the operation.
    is_late: bool,
    /// Whether an open transaction of another session holds what the operation needs.
    pub(super) is_locked: bool,
}

impl Failure {
    pub(super) fn new(kind: StoreErrorKind, message: impl Into<Arc<str>>) -> Self {
        Self {
            kind,
            message: message.into(),
            blames_one: false,
            is_deadlock: false,
            gives_up: false,
            is_late: false,
            is_locked: false,
        }
    }

    /// Nothing was sent.
    pub(super) fn not_sent(reason: &str) -> Self {
        Self::new(StoreErrorKind::Unavailable, format!("the server can't be asked: {reason}"))
    }

    /// The answer got lost.
    pub(super) fn lost() -> Self {
        Self::new(StoreErrorKind::Unconfirmed, "the answer got lost on its way")
    }

    /// The same for an operation without a result: its own parameters are never too large.
    pub(super) fn without_result(self) -> Self {
        match self.kind {
            StoreErrorKind::TooLarge => Self { kind: StoreErrorKind::Misconfigured, ..self },
            _ => self,
        }
    }

    fn giving_up(self) -> Self {
        Self { gives_up: true, ..self }
    }

    /// The same for a statement of this `effect`: one that only reads leaves nothing unknown.
    fn of(self, effect: Effect) -> Self {
        match (effect, self.kind) {
            (Effect::Reads, StoreErrorKind::Unconfirmed) => Self { kind: StoreErrorKind::Unavailable, ..self },
            _ => self,
        }
    }

    /// The server refused. The `DETAIL` of its error is left out: it may quote a result or an owner token.
    fn refused(error: &DbError) -> Self {
        let code = error.code();
        let (kind, advice) = match code.code() {
            // Only a pooler reports this.
            "08P01" if error.message().contains("startup parameter") => (StoreErrorKind::Misconfigured, POOLED),
            code => meaning(code, error.message()),
        };
        let message = format!("the server refused: {advice} ({}: {})", code.code(), error.message());
        let is_fatal = matches!(error.severity(), "FATAL" | "PANIC");
        let stale = matches!(code.code(), "25006" | "26000" | "42P05" | "0A000");
        let is_locked = *code == SqlState::LOCK_NOT_AVAILABLE;
        Self {
            blames_one: is_locked
                || kind == StoreErrorKind::TooLarge
                || (kind == StoreErrorKind::Misconfigured && matches!(&code.code()[..2], "22" | "23" | "44" | "P0")),
            is_deadlock: matches!(*code, SqlState::T_R_DEADLOCK_DETECTED | SqlState::T_R_SERIALIZATION_FAILURE),
            gives_up: is_fatal || stale || kind == StoreErrorKind::Unconfirmed,
            is_locked,
            ..Self::new(kind, message)
        }
    }

    /// An exchange that broke.
    fn broken(error: &Error) -> Self {
        match error.as_db_error() {
            Some(error) => Self::refused(error),
            // Any other error is a connection that ended or sent nonsense; how far the server got is unknown.
            None => {
                Self::new(StoreErrorKind::Unconfirmed, format!("the connection broke: {}", told(error))).giving_up()
            }
        }
    }

    /// A connection that could not be opened.
    pub(super) fn not_connected(error: &Error) -> Self {
        let failure = match error.as_db_error() {
            Some(error) => Self::refused(error),
            None => {
                let text = error.to_string();
                // A retry does not help against an untrusted certificate.
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
pub(super) fn meaning(code: &str, message: &str) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Corrupt, Full, Misconfigured, TooLarge, Unavailable, Unconfirmed};
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
        "40003" => (Unconfirmed, "the connection broke before the answer came"),
        // Nothing was written; there may be room later, or for a smaller record.
        "53100" => (Full, "its disk is full"),
        "53200" => (Full, "it has no memory for more"),
        "53300" => (Unavailable, "it has as many connections as it allows"),
        "55P03" => (Unavailable, "another session has locked the record, or is about to make it"),
        "57014" => (Unavailable, "the statement was cancelled, and nothing was written"),
        "57P03" => (Unavailable, "it is starting up or shutting down"),
        "XX001" | "XX002" => (Corrupt, "its data is damaged"),
        // How the server reports a value that is too large, or has a part that is.
        "XX000" if message.starts_with("invalid memory alloc request size") => (TooLarge, "the result is too large"),
        code => match code.get(..2).unwrap_or_default() {
            "08" | "57" => (Unconfirmed, "the connection broke before the answer came"),
            "54" => (TooLarge, "the result is too large"),
            "22" | "23" | "42" | "44" | "P0" => (Misconfigured, "it does not accept this operation"),
            _ => (Unavailable, "nothing was written"),
        },
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        Self::new(failure.kind, &*failure.message)
    }
}

/// The text of an error of the driver, not of the server, and its cause. It holds neither values nor passwords.
pub(super) fn told(error: &Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// A parameter of a statement. The driver logs parameters, so this one hides its value.
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

/// The connections of one runtime, and how they are used.
pub(super) struct Database {
    sessions: Sessions,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    /// Whether a connection is one session of the server, which keeps prepared statements.
    prepares: bool,
    /// The connections that anything but a renewal may use, if renewals are to find one free at all times.
    spare: Option<Semaphore>,
}

impl Database {
    pub(super) fn new(sessions: Sessions, clock: Arc<dyn Clock>, timeout: Duration, prepares: bool) -> Self {
        Self { sessions, clock, timeout, prepares, spare: None }
    }

    /// The same, with all connections but one reserved for renewals.
    pub(super) fn for_renewals(self) -> Self {
        Self { spare: Some(Semaphore::new(1)), ..self }
    }

    pub(super) fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// When bytes were last exchanged.
    pub(super) fn moved(&self) -> Instant {
        self.sessions.moved()
    }

    /// Runs `statement` in a transaction of its own and returns its rows.
    pub(super) async fn query(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> Result<Vec<Row>, Failure> {
        self.ready(statement).await?.query(params, effect).await
    }

    /// The same for renewals.
    pub(super) async fn renew(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> Result<Vec<Row>, Failure> {
        self.ready_in(statement, None).await?.query(params, effect).await
    }

    /// A connection that is ready to send `statement` at once, so that the caller can still check whether it is wanted.
    pub(super) async fn ready<'a>(&'a self, statement: &'a Statement) -> Result<Ready<'a>, Failure> {
        let room = match &self.spare {
            Some(spare) => {
                let room = unless_stuck(&*self.clock, self.timeout, || self.moved(), spare.acquire()).await;
                Some(room.and_then(Result::ok).ok_or_else(|| Failure::not_sent("no connection was free in time"))?)
            }
            None => None,
        };
        self.ready_in(statement, room).await
    }

    async fn ready_in<'a>(
        &'a self,
        statement: &'a Statement,
        room: Option<SemaphorePermit<'a>>,
    ) -> Result<Ready<'a>, Failure> {
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
    pub(super) async fn execute(&self, text: &str) -> Result<(), Failure> {
        let connection = self.sessions.take().await?;
        let exchange = async { connection.batch_execute(text).await.map_err(|error| Failure::broken(&error)) };
        let done = unless_stuck(&*self.clock, self.timeout, || connection.moved(), exchange).await;
        let done = done.unwrap_or_else(|| Err(timed_out()));
        if done.is_err() {
            // It may be in the middle of a transaction.
            connection.give_up(true);
        }
        done
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").field("prepares", &self.prepares).finish_non_exhaustive()
    }
}

/// A statement that can be sent at once.
pub(super) struct Ready<'a> {
    database: &'a Database,
    connection: Taken<'a>,
    statement: &'a Statement,
    prepared: Option<tokio_postgres::Statement>,
    _room: Option<SemaphorePermit<'a>>,
}

impl Ready<'_> {
    /// Returns the rows of the statement.
    ///
    /// They are returned once the server is ready again, which is after the commit; a row alone proves nothing.
    pub(super) async fn query(self, params: &[&(dyn ToSql + Sync)], effect: Effect) -> Result<Vec<Row>, Failure> {
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

    async fn bounded<T>(&self, effect: Effect, exchange: impl Future<Output = Result<T, Error>>) -> Result<T, Failure> {
        let Database { clock, timeout, .. } = self.database;
        let limit = effect.limit(*timeout);
        let longest = clock.now().saturating_add(limit.saturating_mul(LONGEST));
        // After that, a server that keeps sending is given up, too.
        let moved = || if clock.now() < longest { self.connection.moved() } else { Instant::new(Duration::ZERO) };
        match unless_stuck(&**clock, limit, moved, exchange).await {
            Some(answer) => answer.map_err(|error| Failure::broken(&error)),
            None => Err(timed_out()),
        }
    }

    /// Gives the connection up if `failure` has made it unusable.
    fn failed(self, failure: Failure) -> Failure {
        if failure.gives_up {
            self.connection.give_up(failure.is_late);
        }
        failure
    }
}

fn timed_out() -> Failure {
    let failure = Failure::new(StoreErrorKind::Unconfirmed, "the server did not answer in time").giving_up();
    Failure { is_late: true, ..failure }
}
