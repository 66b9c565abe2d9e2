//! What a caller gets instead of a result: what happened to the operation, and what to do next.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::codec::CodecError;
use crate::codecs;
use crate::fingerprint::FingerprintError;
use crate::key::{KeyError, KeyProblem};
use crate::policy::InvalidPolicy;
use crate::store::StoreError;
use crate::{Disposition, Key};

/// Why an idempotent function did not return a result of its body.
///
/// A handler's own error type implements `From<Error>`; `anyhow::Error`, `Box<dyn std::error::Error>` and
/// [`std::io::Error`] do. [`Error::disposition`] says what to do with the message.
///
/// ```
/// # use idem_runtime::Error;
/// #[derive(Debug)]
/// enum ShipError {
///     Carrier(String),
///     Idempotency(Error),
/// }
///
/// impl From<Error> for ShipError {
///     fn from(error: Error) -> Self {
///         Self::Idempotency(error)
///     }
/// }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The key, or a part of it, is `None` or empty. The body did not run.
    MissingKey {
        /// The scope of the handler.
        scope: String,
    },
    /// There is no valid key. The body did not run.
    InvalidKey {
        /// The scope of the handler.
        scope: String,
        /// What is wrong with the key.
        reason: KeyProblem,
    },
    /// The payload can't be hashed. The body did not run.
    InvalidFingerprint {
        /// The key of the operation.
        key: Key,
        /// What its `Serialize` said.
        source: FingerprintError,
    },
    /// The policy can't be honoured. The body did not run.
    InvalidPolicy {
        /// The key of the operation.
        key: Key,
        /// Which option is wrong, and what to write instead.
        reason: InvalidPolicy,
    },
    /// Another attempt is running. The body did not run.
    InProgress {
        /// The key of the operation.
        key: Key,
        /// Where the record is.
        store: &'static str,
        /// The number of the running attempt.
        attempt: u32,
        /// When its lease lapses unless it is renewed: a good time for the next delivery.
        retry_after: Duration,
    },
    /// The key was used with another payload. The body did not run.
    FingerprintMismatch {
        /// The key of the operation.
        key: Key,
        /// Where the record is.
        store: &'static str,
        /// The attempt that the recorded payload belongs to.
        attempt: u32,
    },
    /// An earlier run started and did not return, and `on_crash = fail` forbids another. The body did not run now.
    Interrupted {
        /// The key of the operation.
        key: Key,
        /// Where the record is.
        store: &'static str,
        /// The attempt that was interrupted.
        attempt: u32,
    },
    /// `max_attempts` runs have started without a recorded result. The body did not run again.
    AttemptsExhausted {
        /// The key of the operation.
        key: Key,
        /// Where the record is.
        store: &'static str,
        /// How many attempts have started.
        attempts: u32,
    },
    /// The lease lapsed while the body ran and another attempt took over, or the record is gone. The body was cancelled,
    /// or it ran to its end and its result was not recorded.
    LeaseLost {
        /// The key of the operation.
        key: Key,
        /// Where the record is.
        store: &'static str,
        /// The attempt that lost its lease.
        attempt: u32,
    },
    /// The body ran, and its result could not be recorded. The key is held until the lease lapses.
    Unrecorded {
        /// The key of the operation.
        key: Key,
        /// Where the record should be.
        store: &'static str,
        /// The attempt that ran.
        attempt: u32,
        /// When the lease lapses.
        retry_after: Duration,
        /// What the store said last.
        source: StoreError,
    },
    /// The operation has finished, but its result was not storable or no longer decodes. The body did not run again.
    ResultUnavailable {
        /// The key of the operation.
        key: Key,
        /// Where the record is.
        store: &'static str,
        /// Why there is no result.
        reason: Unavailable,
    },
    /// The store could not reserve the key, or confirm its lease to a body that asked.
    Store {
        /// The key of the operation.
        key: Key,
        /// Which store it was.
        store: &'static str,
        /// Whether the body had started.
        started: bool,
        /// What the store said.
        source: StoreError,
    },
}

/// Why a finished operation has no result to replay.
#[derive(Debug)]
#[non_exhaustive]
pub enum Unavailable {
    /// The encoded result was larger than `max_result_bytes`, or than the store can hold.
    TooLarge {
        /// Its size in bytes.
        bytes: u64,
    },
    /// The codec could not write the result.
    Unencodable,
    /// Another codec wrote the result, and the handler can't read it.
    OtherCodec {
        /// Its name.
        codec: String,
    },
    /// The stored result doesn't decode as the function's return type.
    Undecodable {
        /// What the codec said.
        source: CodecError,
    },
    /// The function given as `on_undecodable` could not migrate the result.
    MigrationFailed {
        /// What the function said.
        source: CodecError,
    },
    /// The bytes that the function given as `on_undecodable` returned don't decode as the function's return type.
    MigratedUndecodable {
        /// What the codec said.
        source: CodecError,
    },
    /// What is needed to read the result is gone or was altered, for example an object that it was offloaded to.
    Unreadable {
        /// What is wrong.
        reason: Arc<str>,
    },
    /// An error was recorded, and this handler doesn't read recorded errors (`on_error = release`).
    RecordedError,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { bytes } => {
                write!(f, "it had {bytes} bytes, more than `max_result_bytes` or the store allows")
            }
            Self::Unencodable => f.write_str("the codec could not write it"),
            Self::OtherCodec { codec } => match codecs::missing_feature(codec) {
                Some(feature) => {
                    write!(f, "codec `{codec}` wrote it; enable the feature `{feature}` of `idem-runtime` to read it")
                }
                None => write!(f, "codec `{codec}` wrote it; `on_undecodable` can name a function that migrates it"),
            },
            Self::Unreadable { reason } => write!(f, "it can't be read: {reason}"),
            Self::Undecodable { .. } => f.write_str("it does not decode as the function's return type"),
            Self::MigrationFailed { .. } => f.write_str("`on_undecodable` could not migrate it"),
            Self::MigratedUndecodable { .. } => {
                f.write_str("what `on_undecodable` made of it does not decode as the function's return type")
            }
            Self::RecordedError => {
                f.write_str("it is an error, and this handler does not read recorded errors (`on_error = release`)")
            }
        }
    }
}

impl Error {
    /// The key of the operation, where there is one.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::MissingKey { .. } | Self::InvalidKey { .. } => None,
            Self::InvalidFingerprint { key, .. }
            | Self::InvalidPolicy { key, .. }
            | Self::InProgress { key, .. }
            | Self::FingerprintMismatch { key, .. }
            | Self::Interrupted { key, .. }
            | Self::AttemptsExhausted { key, .. }
            | Self::LeaseLost { key, .. }
            | Self::Unrecorded { key, .. }
            | Self::ResultUnavailable { key, .. }
            | Self::Store { key, .. } => Some(key),
        }
    }

    /// What to do with the message that was being handled.
    pub fn disposition(&self) -> Disposition {
        match self {
            Self::InProgress { retry_after, .. } | Self::Unrecorded { retry_after, .. } => {
                Disposition::Retry { after: Some(*retry_after) }
            }
            Self::LeaseLost { .. } | Self::Store { .. } => Disposition::Retry { after: None },
            // The operation is done; only its result is not to be had.
            Self::ResultUnavailable { .. } => Disposition::Ack,
            Self::MissingKey { .. }
            | Self::InvalidKey { .. }
            | Self::InvalidFingerprint { .. }
            | Self::InvalidPolicy { .. }
            | Self::FingerprintMismatch { .. }
            | Self::Interrupted { .. }
            | Self::AttemptsExhausted { .. } => Disposition::DeadLetter,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingKey { scope } => write!(
                f,
                "a message for `{scope}` has no idempotency key: the key or a part of it is `None` or empty; \
                 the body did not run; give every message an id, or write `missing_key = run`"
            ),
            Self::InvalidKey { scope, reason } => {
                write!(f, "no valid idempotency key for `{scope}`: {reason}; the body did not run")
            }
            Self::InvalidFingerprint { key, .. } => {
                write!(f, "key `{key}`: the fingerprint can't be computed; the body did not run")
            }
            Self::InvalidPolicy { key, reason } => write!(f, "key `{key}`: {reason}; the body did not run"),
            Self::InProgress { key, store, attempt, retry_after } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} is running; the body did not run; \
                 deliver the message again in {retry_after:?}"
            ),
            Self::FingerprintMismatch { key, store, attempt } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} had another payload; the body did not run; \
                 give each operation a key of its own"
            ),
            Self::Interrupted { key, store, attempt } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} started and did not return, and `on_crash = fail` allows no \
                 other; find out whether it took effect, then use `Store::reopen` to let the next delivery run"
            ),
            Self::AttemptsExhausted { key, store, attempts } => write!(
                f,
                "key `{key}` in {store}: {attempts} attempts have started, as many as `max_attempts` allows; the body \
                 did not run again; `Store::reopen` lets the next delivery run"
            ),
            Self::LeaseLost { key, store, attempt } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} lost its lease while the body ran; its result is not \
                 recorded; deliver the message again to get the result of the attempt that took over"
            ),
            Self::Unrecorded { key, store, attempt, retry_after, .. } => write!(
                f,
                "key `{key}` in {store}: the body ran as attempt {attempt}, its result is not recorded; the key is held \
                 for {retry_after:?} more; deliver the message again after that"
            ),
            Self::ResultUnavailable { key, store, reason } => write!(
                f,
                "key `{key}` in {store}: the operation has finished, but its result can't be replayed: {reason}; \
                 the body did not run again"
            ),
            Self::Store { key, store, started: true, .. } => write!(
                f,
                "key `{key}` in {store}: the lease could not be confirmed; the body had started; whether another \
                 attempt has taken over is not known"
            ),
            Self::Store { key, store, source, started: false } => {
                let left = match source.may_have_landed() {
                    true => "the key may be reserved until its lease lapses",
                    false => "nothing was written",
                };
                write!(
                    f,
                    "key `{key}` in {store}: the key could not be reserved; the body did not run; {left}; \
                     deliver the message again"
                )
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::InvalidFingerprint { source, .. } => Some(source),
            Self::Unrecorded { source, .. } | Self::Store { source, .. } => Some(source),
            Self::ResultUnavailable {
                reason:
                    Unavailable::Undecodable { source }
                    | Unavailable::MigrationFailed { source }
                    | Unavailable::MigratedUndecodable { source },
                ..
            } => Some(&**source),
            _ => None,
        }
    }
}

impl From<KeyError> for Error {
    fn from(error: KeyError) -> Self {
        match error {
            KeyError { scope, problem: KeyProblem::Missing } => Self::MissingKey { scope },
            KeyError { scope, problem } => Self::InvalidKey { scope, reason: problem },
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::MissingKey { .. }
            | Error::InvalidKey { .. }
            | Error::InvalidFingerprint { .. }
            | Error::InvalidPolicy { .. }
            | Error::FingerprintMismatch { .. } => io::ErrorKind::InvalidInput,
            Error::InProgress { .. } => io::ErrorKind::ResourceBusy,
            Error::ResultUnavailable { .. } => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
