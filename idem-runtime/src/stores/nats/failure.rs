//! Classifies the errors of servers and driver.

use std::error::Error;

use async_nats::{ConnectError, ConnectErrorKind};
use serde::Deserialize;

use crate::kit::looks::looked_in_vain;
use crate::record::format::FormatError;
use crate::store::{StoreError, StoreErrorKind};

/// Error in an answer of JetStream.
#[derive(Clone, Deserialize, Debug)]
pub(super) struct ApiError {
    #[serde(default)]
    pub(super) err_code: u32,
    #[serde(default)]
    description: String,
}

/// A write named another sequence number than that of the last message on its subject. This is an answer.
const WRONG_LAST_SEQUENCE: [u32; 2] = [10071, 10164];
/// The stream takes no batch, or has not received all messages of this one. It has stored no message of the batch.
const NO_BATCH: [u32; 8] = [10174, 10175, 10176, 10177, 10179, 10199, 10200, 10210];
/// There is no message on the subject. This is an answer.
const NO_MESSAGE: u32 = 10037;
/// There is no stream of this name.
const NO_STREAM: u32 = 10059;
/// There is a stream of this name, with other settings.
const STREAM_NAME_IN_USE: u32 = 10058;
/// The stream could not store the message, for the reason in the description.
const STORE_FAILED: u32 = 10077;

impl ApiError {
    pub(super) fn is_wrong_sequence(&self) -> bool {
        WRONG_LAST_SEQUENCE.contains(&self.err_code)
    }

    pub(super) fn is_no_batch(&self) -> bool {
        NO_BATCH.contains(&self.err_code)
    }

    pub(super) fn is_no_message(&self) -> bool {
        self.err_code == NO_MESSAGE
    }

    pub(super) fn is_no_stream(&self) -> bool {
        self.err_code == NO_STREAM
    }

    pub(super) fn is_name_in_use(&self) -> bool {
        self.err_code == STREAM_NAME_IN_USE
    }

    /// Returns the error of the store. JetStream refused the request, so the request had no effect, unless the error is
    /// about the write itself.
    pub(super) fn failed(&self) -> StoreError {
        use StoreErrorKind::{Full, Misconfigured, TooLarge, Unavailable, Unconfirmed};
        let Self { err_code, description } = self;
        let kind = match *err_code {
            // Resources of the account or of the server, and the limits of the stream.
            10002 | 10023 | 10028 | 10047 => Full,
            STORE_FAILED if description.contains("maximum") => Full,
            STORE_FAILED => Unconfirmed,
            10054 => TooLarge,
            // No leader, a peer that is behind, or a server that starts.
            10004 | 10005 | 10006 | 10008 | 10009 | 10014 | 10041 => Unavailable,
            // JetStream or per-message TTLs are off, the stream is sealed, mirrored or missing.
            10007 | 10033 | 10074 | 10035 | 10039 | 10076 | 10109 | 10165 | 10166 | NO_STREAM | STREAM_NAME_IN_USE => {
                Misconfigured
            }
            _ => Unconfirmed,
        };
        StoreError::new(kind, format!("JetStream refused with error {err_code}: {description}"))
    }
}

/// Returns the error for an answer that JetStream does not give.
pub(super) fn unexpected(what: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Unconfirmed, format!("the answer is not JetStream's: {what}"))
}

/// Returns the error for a connection that can't be opened. The address may hold a password, so its text is left out.
pub(super) fn not_connected(error: &ConnectError) -> StoreError {
    let kind = match error.kind() {
        ConnectErrorKind::ServerParse
        | ConnectErrorKind::Authentication
        | ConnectErrorKind::AuthorizationViolation
        | ConnectErrorKind::Tls => StoreErrorKind::Misconfigured,
        _ => StoreErrorKind::Unavailable,
    };
    let cause = match error.kind() {
        ConnectErrorKind::Io | ConnectErrorKind::Dns | ConnectErrorKind::Tls => {
            error.source().map(|cause| format!(": {cause}")).unwrap_or_default()
        }
        _ => String::new(),
    };
    StoreError::new(kind, format!("NATS can't be reached: {}{cause}", error.kind()))
}

pub(super) fn misconfigured(message: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

pub(super) fn unavailable(message: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}

pub(super) fn too_large(bytes: usize, at_most: usize) -> StoreError {
    let message = format!("the record would have {bytes} bytes, and the bucket takes {at_most}");
    StoreError::new(StoreErrorKind::TooLarge, message)
}

pub(super) fn corrupt(error: FormatError) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(error)
}

pub(super) fn keeps_changing() -> StoreError {
    looked_in_vain(StoreErrorKind::Unavailable, "kept changing")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(err_code: u32, description: &str) -> StoreErrorKind {
        ApiError { err_code, description: description.to_owned() }.failed().kind()
    }

    #[test]
    fn a_refusal_that_may_follow_a_write_is_unconfirmed() {
        assert_eq!(kind(10077, "maximum bytes exceeded"), StoreErrorKind::Full);
        assert_eq!(kind(10077, "write failed: no space left on device"), StoreErrorKind::Unconfirmed);
        assert_eq!(kind(10047, "insufficient storage resources available"), StoreErrorKind::Full);
        assert_eq!(kind(10054, "message size exceeds maximum allowed"), StoreErrorKind::TooLarge);
        assert_eq!(kind(10166, "per-message TTL is disabled"), StoreErrorKind::Misconfigured);
        assert_eq!(kind(1, "a code of a later server"), StoreErrorKind::Unconfirmed);
    }
}
