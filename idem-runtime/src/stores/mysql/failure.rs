//! Classifies the errors of the server and of the driver.

use std::sync::Arc;

use mysql_async::{DriverError, Error, ServerError};

use crate::kit::work::{Effect, WorkFailure};
use crate::store::{StoreError, StoreErrorKind};

/// Advice if there is no table.
pub(super) const MISSING_TABLE: &str = "the table of the records is missing; `MySqlOptions::ensure_schema` creates it \
    at `connect`, and `MySqlStore::schema_sql` returns its statement";
/// Advice if the server can't write its log of changes under `READ COMMITTED`.
pub(super) const ROW_FORMAT: &str = "the server logs statements; set `binlog_format` to `ROW` or `MIXED`";

/// The failure of an operation. `kind` shows whether the operation may have had an effect. One failure may answer all
/// operations of a batch.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about one failure")]
pub(super) struct OpFailure {
    pub(super) kind: StoreErrorKind,
    message: Arc<str>,
    blames_one: bool,
    pub(super) is_deadlock: bool,
    /// True if the connection is unusable afterwards.
    pub(super) gives_up: bool,
    /// True if the connection broke: other idle connections to the same server are probably broken, too.
    pub(super) is_broken: bool,
    /// True if the server did not answer in time.
    pub(super) is_silent: bool,
    pub(super) is_locked: bool,
    /// True if the server has no room for the temporary table of a statement about many records. Nothing was written.
    /// The statement about one record needs no such table.
    pub(super) lacks_room: bool,
    /// True if the server prepares no further statement.
    pub(super) is_unprepared: bool,
    /// True if the record of an insert exists.
    pub(super) is_duplicate: bool,
}

impl OpFailure {
    pub(super) fn new(kind: StoreErrorKind, message: impl Into<Arc<str>>) -> Self {
        Self {
            kind,
            message: message.into(),
            blames_one: false,
            is_deadlock: false,
            gives_up: false,
            is_broken: false,
            is_silent: false,
            is_locked: false,
            lacks_room: false,
            is_unprepared: false,
            is_duplicate: false,
        }
    }

    /// Returns the failure of an operation that got no answer in time.
    pub(super) fn timed_out() -> Self {
        let failure = Self::new(StoreErrorKind::Unconfirmed, "the server did not answer in time");
        Self { gives_up: true, is_silent: true, ..failure }
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

    /// Adapts the failure to the `effect` of its statement. A statement that only reads has written nothing, so
    /// `Unconfirmed` becomes `Unavailable`.
    pub(super) fn of(self, effect: Effect) -> Self {
        match (effect, self.kind) {
            (Effect::Reads, StoreErrorKind::Unconfirmed) => Self { kind: StoreErrorKind::Unavailable, ..self },
            _ => self,
        }
    }

    fn refused(error: &ServerError) -> Self {
        // The engines of temporary tables hold no records.
        let is_temporary = error.code == 1030 && ["Aria", "MyISAM"].iter().any(|engine| error.message.contains(engine));
        let (kind, advice) = meaning(if is_temporary { 1021 } else { error.code });
        let lacks_room = is_temporary || matches!(error.code, 1021 | 1114);
        let text = shown(error.code, &error.message);
        let message = format!("the server refused: {advice} ({}: {text})", error.code);
        // The server undoes the whole statement in these cases, and the statement is the whole transaction.
        let is_locked = matches!(error.code, 1205 | 3572);
        Self {
            blames_one: is_locked
                || lacks_room
                || kind == StoreErrorKind::TooLarge
                || matches!(error.code, 1048 | 1062 | 1264 | 1292 | 1364 | 1366 | 1406 | 3819 | 4025),
            is_deadlock: matches!(error.code, 1213 | 1020 | 3101),
            gives_up: kind == StoreErrorKind::Unconfirmed
                || matches!(error.code, 1153 | 1243 | 1290 | 1792 | 1836 | 1927 | 4031),
            is_locked,
            lacks_room,
            is_unprepared: error.code == 1461,
            is_duplicate: error.code == 1062,
            ..Self::new(kind, message)
        }
    }

    /// Converts the error of an exchange that broke.
    pub(super) fn broken(error: &Error) -> Self {
        match error {
            Error::Server(error) => Self::refused(error),
            Error::Driver(DriverError::PacketTooLarge) => {
                let message = "the record is larger than the server's `max_allowed_packet`";
                Self { blames_one: true, gives_up: true, ..Self::new(StoreErrorKind::TooLarge, message) }
            }
            // Without an error of the server, the connection ended or carried invalid bytes. The server may have run
            // the statement.
            error => {
                let message = format!("the connection broke: {}", driver_text(error));
                Self { gives_up: true, is_broken: true, ..Self::new(StoreErrorKind::Unconfirmed, message) }
            }
        }
    }

    /// Converts the error of a connection that could not be opened.
    pub(super) fn not_connected(error: &Error, is_encrypted: bool) -> Self {
        let failure = match error {
            // MariaDB does not tell that it takes only encrypted connections.
            Error::Server(error) if error.code == 1045 && !is_encrypted => {
                let refused = Self::refused(error);
                let hint = "if it takes only encrypted connections, add `?require_ssl=true` to the URL";
                Self { message: format!("{}; {hint}", refused.message).into(), ..refused }
            }
            Error::Server(error) => Self::refused(error),
            error => {
                let is_wrong = match error {
                    Error::Driver(
                        DriverError::UnknownAuthPlugin { .. }
                        | DriverError::CleartextPluginDisabled
                        | DriverError::MysqlOldPasswordDisabled
                        | DriverError::NoClientSslFlagFromServer,
                    )
                    | Error::Url(_) => true,
                    // A retry does not help against an untrusted certificate.
                    #[cfg(feature = "mysql-tls")]
                    Error::Io(mysql_async::IoError::Io(error)) => {
                        error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<rustls::Error>)
                    }
                    #[cfg(feature = "mysql-tls")]
                    Error::Io(mysql_async::IoError::Tls(_)) => true,
                    _ => false,
                };
                let kind = if is_wrong { StoreErrorKind::Misconfigured } else { StoreErrorKind::Unavailable };
                Self::new(kind, format!("the server can't be reached: {}", driver_text(error)))
            }
        };
        failure.of(Effect::Reads)
    }
}

/// Returns the text of an error of the server; empty if the text may quote values.
pub(super) fn shown(code: u16, message: &str) -> &str {
    if matches!(code, 1062 | 1292 | 1366 | 1406 | 3819 | 4025) { "" } else { message }
}

/// Returns the meaning of an error of the server, by its number, and advice for it. An error that this function does
/// not know may come from the commit of the statement, so its effect is unknown.
pub(super) fn meaning(code: u16) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Corrupt, Full, Misconfigured, TooLarge, Unavailable, Unconfirmed};
    let read_only = "the server is read-only: a replica, or a former primary; the next call connects again";
    match code {
        1146 => (Misconfigured, MISSING_TABLE),
        1054 | 1136 => (Misconfigured, "the table is of another version"),
        1044 | 1045 | 1142 | 1143 | 1227 | 1698 | 3118 => {
            (Misconfigured, "the login is refused, or may not use the table")
        }
        1049 => (Misconfigured, "there is no such database"),
        1046 => (Misconfigured, "the URL names no database"),
        1820 | 1862 => (Misconfigured, "the password of the login has expired"),
        3159 => (Misconfigured, "it takes only encrypted connections; add `?require_ssl=true` to the URL"),
        1290 | 1792 | 1836 => (Unavailable, read_only),
        1665 => (Misconfigured, ROW_FORMAT),
        // Nothing was written. The server may accept the record later, or a smaller one now.
        1021 | 1114 => (Full, "its disk or the table is full"),
        1037 | 1038 | 1041 | 1135 | 1206 => (Full, "it is out of memory"),
        1040 | 1203 | 1226 => (Unavailable, "its limit of connections is reached"),
        1461 => (Unavailable, "its limit of prepared statements is reached; raise `max_prepared_stmt_count`"),
        1205 | 3572 => (Unavailable, "another session has locked the record, or is about to make it"),
        1213 | 1020 | 3101 => (Unavailable, "the statement met another one, and nothing was written"),
        1317 | 1969 | 3024 => (Unavailable, "the statement was cancelled, and nothing was written"),
        1412 | 1615 | 4031 => (Unavailable, "the table or the session has changed, and nothing was written"),
        1243 => (Unavailable, "a pooler stands between, which does not keep prepared statements"),
        1047 | 1053 | 1077 | 1079 => (Unconfirmed, "it is starting up or shutting down"),
        126 | 127 | 134 | 145 | 1034 | 1194 | 1712 => (Corrupt, "its data is damaged"),
        1118 | 1153 | 1301 => (TooLarge, "the result is too large"),
        1048 | 1062 | 1064 | 1264 | 1292 | 1364 | 1366 | 1406 | 3819 | 4025 => {
            (Misconfigured, "it does not accept this operation")
        }
        _ => (Unconfirmed, "the statement may have been written"),
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
        // An insert that waited in vain for a lock would only wait again.
        self.is_deadlock
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

/// Returns the text of an error of the driver (not of the server). The text contains neither values nor passwords.
pub(super) fn driver_text(error: &Error) -> String {
    match error {
        Error::Driver(
            DriverError::FromValue { .. } | DriverError::FromRow { .. } | DriverError::UnexpectedPacket { .. },
        ) => "the server sent an answer of another kind".to_owned(),
        error => error.to_string(),
    }
}

pub(super) fn misconfigured(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: u16, message: &str) -> OpFailure {
        OpFailure::refused(&ServerError { code, message: message.to_owned(), state: "HY000".to_owned() })
    }

    #[test]
    fn only_errors_before_the_commit_state_that_nothing_was_written() {
        // 1026: the binary log can't be written. 1030: the engine of the records fails.
        for code in [1026, 1030, 1053, 65_000] {
            let failure = refused(code, "Got error 28 from storage engine InnoDB");
            assert_eq!(failure.kind, StoreErrorKind::Unconfirmed, "{code}");
            assert!(!failure.blames_one && !failure.lacks_room, "{code}");
        }
        for code in [1412, 1615, 4031, 1205, 1213, 1461] {
            assert_eq!(refused(code, "").kind, StoreErrorKind::Unavailable, "{code}");
        }
        // 1206: there is no memory for further locks, and the server undoes the whole transaction.
        for code in [1021, 1114, 1206] {
            assert_eq!(refused(code, "").kind, StoreErrorKind::Full, "{code}");
        }
        for code in [1820, 1862, 3159] {
            assert_eq!(refused(code, "").kind, StoreErrorKind::Misconfigured, "{code}");
        }
    }

    #[test]
    fn without_room_for_a_temporary_table_each_operation_is_sent_alone() {
        for failure in [
            refused(1021, "Disk full (/tmp/#sql-temptable.MAI)"),
            refused(1114, "The table '(temporary)' is full"),
            refused(1030, "Got error 28 \"No space left on device\" from storage engine Aria"),
        ] {
            assert_eq!(failure.kind, StoreErrorKind::Full);
            assert!(failure.lacks_room && failure.blames_one);
            // A renewal may be repeated even if an earlier statement has renewed some of the leases.
            assert!(failure.after_writes().lacks_room);
        }
    }
}
