//! Reasons why a finished operation has no result to replay.

use std::fmt;
use std::sync::Arc;

use super::{CodecError, known};

/// Reason why a finished operation has no result to replay.
#[derive(Debug)]
#[non_exhaustive]
pub enum ResultProblem {
    /// The encoded result was larger than `max_result_bytes`, or larger than the store allows.
    #[non_exhaustive]
    TooLarge {
        /// Size of the result in bytes.
        size: u64,
    },
    /// The codec could not write the result, or an operator resolved the operation without a result.
    Unencodable,
    /// Another codec wrote the result, and the handler can't read it.
    #[non_exhaustive]
    OtherCodec {
        /// Name of the codec that wrote the result.
        codec: String,
    },
    /// The stored result doesn't decode as the function's return type.
    #[non_exhaustive]
    Undecodable {
        /// Error of the codec.
        source: CodecError,
    },
    /// The migration function of `on_undecodable` returned an error.
    #[non_exhaustive]
    MigrationFailed {
        /// Error of the migration function.
        source: CodecError,
    },
    /// The output of the migration function of `on_undecodable` doesn't decode as the handler's return type.
    #[non_exhaustive]
    MigratedUndecodable {
        /// Error of the codec.
        source: CodecError,
    },
    /// A part of the result is gone or was altered, for example the object that a wrapper stored outside of the record.
    #[non_exhaustive]
    Unreadable {
        /// Description of the damage.
        reason: Arc<str>,
    },
    /// The record holds an error, and this handler doesn't read recorded errors (`on_error = release`).
    RecordedError,
}

impl ResultProblem {
    /// Returns whether the deployment is wrong: the result exists, but this version of the handler can't read it.
    pub(crate) fn is_misconfiguration(&self) -> bool {
        match self {
            Self::OtherCodec { .. }
            | Self::Undecodable { .. }
            | Self::MigrationFailed { .. }
            | Self::MigratedUndecodable { .. } => true,
            // `RecordedError` is no misconfiguration: handlers that share a key may intentionally differ in `on_error`.
            // As a misconfiguration, `RecordedError` would cause endless redeliveries.
            Self::TooLarge { .. } | Self::Unencodable | Self::Unreadable { .. } | Self::RecordedError => false,
        }
    }
}

impl fmt::Display for ResultProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { size } => {
                write!(f, "it had {size} bytes, more than `max_result_bytes` or the store allows")
            }
            Self::Unencodable => {
                f.write_str("the codec could not write it, or an operator resolved the operation without one")
            }
            Self::OtherCodec { codec } => match known::missing_feature(codec) {
                Some(feature) => {
                    write!(f, "codec `{codec}` wrote it; enable the feature `{feature}` of `idem-runtime` to read it")
                }
                None => write!(f, "codec `{codec}` wrote it; `on_undecodable` can name a function that migrates it"),
            },
            Self::Unreadable { reason } => write!(f, "it can't be read: {reason}"),
            Self::Undecodable { .. } => f.write_str(
                "it does not decode as the function's return type, which has changed since: mark a new field with \
                 `#[serde(default)]`, or migrate recorded results with `on_undecodable`",
            ),
            Self::MigrationFailed { .. } => f.write_str("`on_undecodable` could not migrate it"),
            Self::MigratedUndecodable { .. } => {
                f.write_str("the output of `on_undecodable` does not decode as the function's return type")
            }
            Self::RecordedError => {
                f.write_str("it is an error, and this handler does not read recorded errors (`on_error = release`)")
            }
        }
    }
}
