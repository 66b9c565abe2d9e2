//! Why a finished operation has no result to replay.

use std::fmt;
use std::sync::Arc;

use super::{CodecError, known};

/// Why a finished operation has no result to replay.
#[derive(Debug)]
#[non_exhaustive]
pub enum ResultProblem {
    /// The encoded result was larger than `max_result_bytes`, or than the store can hold.
    TooLarge {
        /// Its size in bytes.
        size: u64,
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

impl fmt::Display for ResultProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { size } => {
                write!(f, "it had {size} bytes, more than `max_result_bytes` or the store allows")
            }
            Self::Unencodable => f.write_str("the codec could not write it"),
            Self::OtherCodec { codec } => match known::missing_feature(codec) {
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
