//! Classifies the errors of the server and of the driver.

use std::error::Error as _;
use std::sync::Arc;

use tokio_postgres::Error;
use tokio_postgres::error::{DbError, SqlState};

use crate::kit::work::{Effect, WorkFailure};
use crate::store::{StoreError, StoreErrorKind};

/// Advice if an unexpected pooler answers.
const POOLED: &str = "a pooler stands between; see `PostgresOptions::behind_pgbouncer`";

/// Advice if there is no table.
pub(super) const MISSING_TABLE: &str = "the table of the records is missing; `idem schema migrate` creates it, \
    `PostgresOptions::ensure_schema` creates it at `connect`, and `idem schema print postgres` prints its statements";

/// The failure of an operation. `kind` shows whether the operation may have had an effect. One failure may answer all
/// operations of a batch.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about one failure")]
pub(super) struct OpFailure {
    pub(super) kind: StoreErrorKind,
    message: Arc<str>,
    /// True if a single operation may have caused the failure of its whole batch.
    pub(super) blames_one: bool,
    /// True if the server undid the statement because of a deadlock: nothing was written, and a retry will probably
    /// succeed.
    pub(super) is_deadlock: bool,
    /// True if the connection is unusable afterwards.
    pub(super) gives_up: bool,
    /// True if the server may still be working on the operation.
    pub(super) is_late: bool,
    /// True if an open transaction of another session holds a row or key that the operation needs.
    pub(super) is_locked: bool,
}

impl OpFailure {
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

    /// Returns the failure of an operation that got no answer in time.
    pub(super) fn timed_out() -> Self {
        let failure = Self::new(StoreErrorKind::Unconfirmed, "the server did not answer in time").giving_up();
        Self { is_late: true, ..failure }
    }

    /// Adapts the failure to an operation that writes no result. The parameters of such an operation are never too
    /// large, so `TooLarge` becomes `Misconfigured`.
    pub(super) fn without_result(self) -> Self {
        match self.kind {
            StoreErrorKind::TooLarge => Self { kind: StoreErrorKind::Misconfigured, ..self },
            _ => self,
        }
    }

    /// Adapts the failure to operations that earlier statements may have written: the error must not state that nothing
    /// was written, and the batch must not be sent again, because a further failure would state that.
    pub(super) fn after_writes(self) -> Self {
        let kind = StoreErrorKind::Unconfirmed;
        Self { kind, blames_one: false, is_deadlock: false, is_locked: false, ..self }
    }

    fn giving_up(self) -> Self {
        Self { gives_up: true, ..self }
    }

    /// Adapts the failure to the `effect` of its statement. A statement that only reads has written nothing, so
    /// `Unconfirmed` becomes `Unavailable`.
    pub(super) fn of(self, effect: Effect) -> Self {
        match (effect, self.kind) {
            (Effect::Reads, StoreErrorKind::Unconfirmed) => Self { kind: StoreErrorKind::Unavailable, ..self },
            _ => self,
        }
    }

    /// Converts an error of the server. Leaves out the `DETAIL` of the error, because the `DETAIL` may quote a result
    /// or an owner token.
    fn refused(error: &DbError) -> Self {
        let code = error.code();
        let (kind, advice) = match code.code() {
            // Only a pooler refuses a startup parameter with this code.
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

    /// Converts the error of an exchange that broke.
    pub(super) fn broken(error: &Error) -> Self {
        match error.as_db_error() {
            Some(error) => Self::refused(error),
            // Without an error of the server, the connection ended or carried invalid bytes. The server may have run
            // the statement.
            None => Self::new(StoreErrorKind::Unconfirmed, format!("the connection broke: {}", driver_text(error)))
                .giving_up(),
        }
    }

    /// Converts the error of a connection that could not be opened.
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
                Self::new(kind, format!("the server can't be reached: {}", driver_text(error)))
            }
        };
        failure.of(Effect::Reads)
    }
}

/// Returns the meaning of an error of the server, by its `SQLSTATE`, and advice for it.
pub(super) fn meaning(code: &str, message: &str) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Corrupt, Full, Misconfigured, TooLarge, Unavailable, Unconfirmed};
    let read_only = "the server is read-only: a standby, or a former primary; the next call connects again";
    match code {
        "42P01" | "3F000" => (Misconfigured, MISSING_TABLE),
        "42703" | "42883" => {
            (Misconfigured, "the table is of another version; `idem schema diff` lists the differences")
        }
        "42501" => (Misconfigured, "the login may not use the table"),
        "28000" | "28P01" => (Misconfigured, "the login is refused"),
        "3D000" => (Misconfigured, "there is no such database"),
        "25006" => (Unavailable, read_only),
        "26000" | "42P05" => (Unavailable, POOLED),
        "0A000" => (Unavailable, "the table was altered; the next call prepares its statement again"),
        "40003" => (Unconfirmed, "the connection broke before the answer came"),
        // Nothing was written. The server may accept the record later, or a smaller one now.
        "53100" => (Full, "its disk is full"),
        "53200" => (Full, "it is out of memory"),
        "53300" => (Unavailable, "its limit of connections is reached"),
        "55P03" => (Unavailable, "another session has locked the record, or is about to make it"),
        "57014" => (Unavailable, "the statement was cancelled, and nothing was written"),
        "57P03" => (Unavailable, "it is starting up or shutting down"),
        "XX001" | "XX002" => (Corrupt, "its data is damaged"),
        // The server reports in this way that a value is too large.
        "XX000" if message.starts_with("invalid memory alloc request size") => (TooLarge, "the result is too large"),
        code => match code.get(..2).unwrap_or_default() {
            "08" | "57" => (Unconfirmed, "the connection broke before the answer came"),
            "54" => (TooLarge, "the result is too large"),
            "22" | "23" | "42" | "44" | "P0" => (Misconfigured, "it does not accept this operation"),
            _ => (Unavailable, "nothing was written"),
        },
    }
}

impl WorkFailure for OpFailure {
    fn not_sent(reason: &str) -> Self {
        Self::new(StoreErrorKind::Unavailable, format!("the server can't be reached: {reason}"))
    }

    fn lost() -> Self {
        Self::new(StoreErrorKind::Unconfirmed, "the answer was lost")
    }

    fn is_locked(&self) -> bool {
        self.is_locked
    }

    fn is_worth_repeating(&self) -> bool {
        // If another session locked a row while the statement ran, a second statement skips that row from the start.
        self.is_deadlock || self.is_locked
    }

    fn blames_one(&self) -> bool {
        self.blames_one
    }
}

impl From<OpFailure> for StoreError {
    fn from(failure: OpFailure) -> Self {
        Self::new(failure.kind, &*failure.message)
    }
}

/// Returns the text and the cause of an error of the driver (not of the server). The text contains neither values nor
/// passwords.
pub(super) fn driver_text(error: &Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

pub(super) fn misconfigured(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}
