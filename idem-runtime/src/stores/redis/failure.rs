//! The failures of an exchange with a server, and their meaning for its operation.

use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerError, ServerErrorKind, Value};

use super::scripts::DAMAGED;
use crate::record::format;
use crate::store::{StoreError, StoreErrorKind};

/// Reason why an exchange failed.
#[derive(Clone, Debug)]
pub(super) enum ExchangeFailure {
    /// The server refused this operation and wrote nothing for it.
    Refused(ErrorReply),
    /// No connection could be opened, or the connection did not take the operation in time: nothing was sent.
    NotSent(Arc<str>),
    /// This process or runtime can't use a connection: nothing was sent, and a retry does not help.
    Unusable(Arc<str>),
    /// The exchange broke off: the operation may have taken effect.
    Broken(Arc<RedisError>),
    /// No answer came in time: the operation may have taken effect.
    TimedOut,
    /// The runtime dropped the exchange, the answer makes no sense, or the answering server had already been replaced:
    /// the operation may have taken effect.
    Lost,
    /// The server gave this answer, but too few replicas have confirmed the write: the write may get lost with the
    /// server. The second field is the server's reason why confirmations are missing, if the server gave a reason.
    Unreplicated(Box<Value>, Option<Arc<str>>),
}

/// An error reply of the server.
#[derive(Clone, Debug)]
pub(super) struct ErrorReply {
    pub(super) code: Arc<str>,
    pub(super) message: Arc<str>,
}

impl ErrorReply {
    /// Reads the text of an error that a script returned. The first word of the text is the error's code.
    pub(super) fn read(text: &str) -> Self {
        let (code, message) = text.split_once(' ').unwrap_or((text, ""));
        Self { code: code.into(), message: message.into() }
    }

    /// Returns whether the server refused the arguments of a command, and not the command.
    pub(super) fn is_about_arguments(&self) -> bool {
        &*self.code == "ERR" && !FORBIDDEN.iter().any(|words| self.message.contains(words))
    }
}

impl From<&ServerError> for ErrorReply {
    fn from(error: &ServerError) -> Self {
        Self { code: error.code().into(), message: error.details().unwrap_or_default().into() }
    }
}

impl From<&ServerError> for ExchangeFailure {
    fn from(error: &ServerError) -> Self {
        Self::Refused(error.into())
    }
}

impl ExchangeFailure {
    /// Returns whether the server has forgotten a script. A command with an unknown script has written nothing.
    pub(super) fn is_unknown_script(&self) -> bool {
        matches!(self, Self::Refused(refusal) if &*refusal.code == "NOSCRIPT")
    }

    /// Returns whether the keys of a command are on two nodes, because their slot migrates. Such a command has written
    /// nothing.
    pub(super) fn is_split_slot(&self) -> bool {
        matches!(self, Self::Refused(refusal) if &*refusal.code == "TRYAGAIN")
    }

    /// Returns whether the server does not support an option of a command. Such a command has written nothing. Returns
    /// true for every error with the general code `ERR`, because the text differs from server to server; false for a
    /// request that the server could not read (`Protocol error`).
    pub(super) fn is_unknown_option(&self) -> bool {
        matches!(self, Self::Refused(ErrorReply { code, message })
            if &**code == "ERR" && !message.starts_with("Protocol error"))
    }

    /// Converts the error of a failed try to open a connection. Nothing was sent before that try. An error reply of the
    /// server keeps its code.
    pub(super) fn not_opened(error: RedisError) -> Self {
        match error.kind() {
            ErrorKind::Server(_) => Self::of(error),
            _ => Self::NotSent(error.to_string().into()),
        }
    }

    /// Classifies the error of an exchange. An error reply of the server arrives here only during the set-up of a
    /// connection, so nothing was written. (On an open connection, an error reply is a value.)
    pub(super) fn of(error: RedisError) -> Self {
        match error.kind() {
            ErrorKind::Server(_) => Self::Refused(ErrorReply {
                code: error.code().unwrap_or_default().into(),
                message: error.detail().unwrap_or_default().into(),
            }),
            ErrorKind::AuthenticationFailed
            | ErrorKind::InvalidClientConfig
            | ErrorKind::Client
            | ErrorKind::RESP3NotSupported => Self::NotSent(error.to_string().into()),
            _ if error.is_connection_refusal() => Self::NotSent(error.to_string().into()),
            _ if error.is_timeout() => Self::TimedOut,
            // A closed connection does not show whether the server received the command.
            _ => Self::Broken(Arc::new(error)),
        }
    }
}

/// Returns the error of an operation whose exchange failed.
pub(super) fn failed(failure: ExchangeFailure) -> StoreError {
    match failure {
        // A refused script has written nothing: every script makes all its checks before its first write.
        ExchangeFailure::Refused(refusal) => refused(&refusal),
        ExchangeFailure::NotSent(reason) => {
            StoreError::new(StoreErrorKind::Unavailable, format!("the server can't be reached: {reason}"))
        }
        ExchangeFailure::Unusable(reason) => {
            StoreError::new(StoreErrorKind::Misconfigured, format!("the server can't be reached: {reason}"))
        }
        ExchangeFailure::Broken(error) => {
            StoreError::new(StoreErrorKind::Unconfirmed, "the connection broke before the answer came")
                .with_source(error)
        }
        ExchangeFailure::TimedOut => StoreError::new(StoreErrorKind::Unconfirmed, "the server did not answer in time"),
        ExchangeFailure::Lost => StoreError::new(StoreErrorKind::Unconfirmed, "the answer was lost"),
        ExchangeFailure::Unreplicated(_, why) => {
            let why = why.map_or_else(|| "it in time".to_owned(), |said| format!("it: the server refused: {said}"));
            let message = format!("fewer replicas than `min_replicas` confirmed {why}");
            StoreError::new(StoreErrorKind::Unconfirmed, message)
        }
    }
}

fn refused(ErrorReply { code, message }: &ErrorReply) -> StoreError {
    let (kind, what) = match &**code {
        DAMAGED => return damaged(),
        "WRONGTYPE" => (
            StoreErrorKind::Corrupt,
            "the key holds a value of another type of Redis, which is no record and is left alone: find out with `TYPE` who \
             wrote it, and rename or delete it there",
        ),
        "OOM" => (StoreErrorKind::Full, "the server is full"),
        "NOAUTH" | "WRONGPASS" | "NOPERM" => {
            (StoreErrorKind::Misconfigured, "the server refused the login, or the login lacks a right")
        }
        // A command that is forbidden in a script has no error code of its own.
        "ERR" if FORBIDDEN.iter().any(|words| message.contains(words)) => {
            (StoreErrorKind::Misconfigured, "the server forbids a command that the store needs")
        }
        _ => (StoreErrorKind::Unavailable, "the server refused"),
    };
    StoreError::new(kind, format!("{what}: {code} {message}"))
}

/// Texts by which servers refuse a command in a script: the login lacks the right, or the command is unknown, perhaps
/// because it was renamed.
const FORBIDDEN: [&str; 5] = [
    "The user executing the script can't",
    "ACL failure in script",
    "ACL permissions",
    "unknown command",
    "Unknown Redis command",
];

/// Returns the error of a store that could not be opened.
pub(super) fn not_connected(error: &RedisError) -> StoreError {
    match error.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => {
            misconfigured(format!("the server refused the login: {error}"))
        }
        ErrorKind::MasterNameNotFoundBySentinel | ErrorKind::EmptySentinelList => misconfigured(error.to_string()),
        ErrorKind::InvalidClientConfig | ErrorKind::Client => {
            misconfigured(format!("the connection can't be made: {error}"))
        }
        _ => match error.code() {
            Some("NOAUTH" | "WRONGPASS") => misconfigured(format!("the server refused the login: {error}")),
            _ => StoreError::new(StoreErrorKind::Unavailable, "the server can't be reached").with_source(error.clone()),
        },
    }
}

pub(super) fn misconfigured(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

pub(super) fn corrupt(error: format::FormatError) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(error)
}

/// Returns the error for an answer that no command of this store can have. The error does not show the value, which may
/// be a payload.
pub(super) fn unexpected(value: &Value) -> StoreError {
    let kind = match value {
        Value::Nil => "nil",
        Value::Int(_) => "a number",
        Value::BulkString(_) => "a string",
        Value::Array(_) => "an array",
        _ => "something else",
    };
    StoreError::new(StoreErrorKind::Unconfirmed, format!("the server gave an unexpected answer: {kind}"))
}

/// Returns the error for a pending record without an expiry: the expiry was removed, or the record was restored without
/// one.
pub(super) fn damaged() -> StoreError {
    StoreError::new(
        StoreErrorKind::Corrupt,
        "the record is pending but has no expiry, so whether its lease holds is unknown; it is left alone: forget it once \
         no handler is running for the key",
    )
}

pub(super) fn too_large(bytes: usize, most: usize) -> StoreError {
    let message = format!("the record has {bytes} bytes, more than the {most} that the server takes");
    StoreError::new(StoreErrorKind::TooLarge, message)
}
