//! Reasons why a request has no final response.

use std::fmt;

use bytes::Bytes;
use http::{Method, Response, Uri};

use super::key::CallKey;

/// The limit that ended the tries of a request before it had a final response.
///
/// If the last response was retryable, the layer returns this response with the limit as an extension. The outcome of
/// the operation is still open: send the request again later, with the same key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RetryLimit {
    /// The number of tries, set by [`RetryLayer::max_tries`](super::RetryLayer::max_tries).
    Tries,
    /// The server asks for a pause that is longer than [`RetryLayer::max_pause`](super::RetryLayer::max_pause).
    Pause,
    /// The share of retries, set by [`RetryLayer::budget`](super::RetryLayer::budget).
    Budget,
}

impl fmt::Display for RetryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tries => "the request was tried as often as `max_tries` allows",
            Self::Pause => "the server asks for a pause longer than `max_pause`",
            Self::Budget => "the retry budget is used up",
        })
    }
}

/// Reason why a request has no response, or was not sent.
///
/// If the request was sent ([`was_sent`](Self::was_sent)), the server may have run it. Send such a request again with
/// the same [`key`](Self::key) until there is a response.
#[non_exhaustive]
pub enum RetryError<E> {
    /// The request was made inside of an idempotent handler, and no [`CallName`](super::CallName) identifies the call.
    /// Nothing was sent: each attempt of the handler would send another key, so an attempt after a crash would repeat
    /// the call.
    Unnamed {
        /// The method of the request.
        method: Method,
        /// The target of the request.
        uri: Uri,
    },
    /// The request has a [`CallName`](super::CallName), but the client runs outside of the handler's task, where there
    /// is no attempt from which the key could derive. Nothing was sent. Use [`CallName::of`](super::CallName::of) to
    /// make a name that contains the key.
    NoAttempt {
        /// The method of the request.
        method: Method,
        /// The target of the request.
        uri: Uri,
    },
    /// The request has no key, and [`RetryLayer::require_key`](super::RetryLayer::require_key) allows no random key.
    /// Nothing was sent.
    NoKey {
        /// The method of the request.
        method: Method,
        /// The target of the request.
        uri: Uri,
    },
    /// The field for the key is empty, has several lines, or is not printable ASCII. Nothing was sent: the server might
    /// find no key in such a field, and each try would be another operation.
    InvalidKey {
        /// The method of the request.
        method: Method,
        /// The target of the request.
        uri: Uri,
    },
    /// The client's error of the last try.
    Client {
        /// Error of the client.
        error: E,
        /// The key that was sent; `None` if the request has no key, or the client was never ready for the request.
        key: Option<CallKey>,
        /// The limit that ended the tries; `None` if the request has no key, or the client takes no more requests.
        limit: Option<RetryLimit>,
        /// The last response of the server, from an earlier try.
        last: Option<Box<Response<Bytes>>>,
    },
    /// The last try took longer than [`RetryLayer::try_timeout`](super::RetryLayer::try_timeout).
    TimedOut {
        /// The key that was sent; `None` for a request without a key.
        key: Option<CallKey>,
        /// The limit that ended the tries; `None` if the request has no key.
        limit: Option<RetryLimit>,
        /// The part of a response that arrived in time; otherwise the last response of an earlier try.
        last: Option<Box<Response<Bytes>>>,
    },
    /// The response to the last try broke off.
    BrokenBody {
        /// Message of the body's error.
        reason: String,
        /// The key that was sent.
        key: CallKey,
        /// The limit that ended the tries.
        limit: RetryLimit,
        /// The response, with the part of its body that arrived.
        last: Box<Response<Bytes>>,
    },
}

impl<E> RetryError<E> {
    /// Returns the key that was sent; `None` if nothing was sent, or the request has no key.
    pub fn key(&self) -> Option<&CallKey> {
        match self {
            Self::Client { key, .. } | Self::TimedOut { key, .. } => key.as_ref(),
            Self::BrokenBody { key, .. } => Some(key),
            _ => None,
        }
    }

    /// Returns the limit that ended the tries; `None` if no limit ended the tries.
    pub fn limit(&self) -> Option<RetryLimit> {
        match self {
            Self::Client { limit, .. } | Self::TimedOut { limit, .. } => *limit,
            Self::BrokenBody { limit, .. } => Some(*limit),
            _ => None,
        }
    }

    /// Returns the last response of the server to any try, with the part of its body that was read.
    pub fn last_response(&self) -> Option<&Response<Bytes>> {
        match self {
            Self::Client { last, .. } | Self::TimedOut { last, .. } => last.as_deref(),
            Self::BrokenBody { last, .. } => Some(last),
            _ => None,
        }
    }

    /// Returns whether the request may have reached the server. False means that the request certainly has not reached
    /// the server. The result is also true if the client was never ready for the request, because this case is a
    /// [`Client`](Self::Client) error, too.
    pub fn was_sent(&self) -> bool {
        matches!(self, Self::Client { .. } | Self::TimedOut { .. } | Self::BrokenBody { .. })
    }

    /// Returns the name of the variant.
    fn name(&self) -> &'static str {
        match self {
            Self::Unnamed { .. } => "Unnamed",
            Self::NoAttempt { .. } => "NoAttempt",
            Self::NoKey { .. } => "NoKey",
            Self::InvalidKey { .. } => "InvalidKey",
            Self::Client { .. } => "Client",
            Self::TimedOut { .. } => "TimedOut",
            Self::BrokenBody { .. } => "BrokenBody",
        }
    }
}

impl<E: fmt::Debug> fmt::Debug for RetryError<E> {
    /// Shows no query, no header field and no body, because these may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct(self.name());
        match self {
            Self::Unnamed { method, uri }
            | Self::NoAttempt { method, uri }
            | Self::NoKey { method, uri }
            | Self::InvalidKey { method, uri } => {
                return shown.field("method", method).field("path", &uri.path()).finish();
            }
            Self::Client { error, .. } => shown.field("error", error),
            Self::TimedOut { .. } => &mut shown,
            Self::BrokenBody { reason, .. } => shown.field("reason", reason),
        };
        let status = self.last_response().map(Response::status);
        shown.field("key", &self.key()).field("limit", &self.limit()).field("last", &status).finish()
    }
}

impl<E: fmt::Display> fmt::Display for RetryError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The query is left out, because it may contain secrets.
            Self::Unnamed { method, uri } => write!(
                f,
                "{method} {} was called inside of an idempotent handler and has no name, so that it has no key which is the \
                 same on every attempt; nothing was sent; add the extension `CallName` to the request",
                uri.path()
            ),
            Self::NoAttempt { method, uri } => write!(
                f,
                "{method} {} has a `CallName` and was called outside of a handler's task, so that it has no key which is the \
                 same on every attempt; nothing was sent; make the name in the handler, with `CallName::of(&current()?, …)`",
                uri.path()
            ),
            Self::NoKey { method, uri } => write!(
                f,
                "{method} {} has no key, and the client makes none; nothing was sent; store a `CallKey` and add it to the \
                 request as an extension, or a `CallName` inside of a handler",
                uri.path()
            ),
            Self::InvalidKey { method, uri } => write!(
                f,
                "{method} {} has a field for its key that is empty, repeated or not printable; nothing was sent; set one \
                 key, for example the extension `CallKey`",
                uri.path()
            ),
            Self::Client { error, .. } => write!(f, "the request has no response: {error}"),
            Self::TimedOut { .. } => f.write_str("the request has no response within the time limit of a try"),
            Self::BrokenBody { reason, last, .. } => {
                write!(f, "the response ({}) broke off: {reason}", last.status())
            }
        }?;
        if let Some(limit) = self.limit() {
            write!(f, "; {limit}")?;
        }
        if self.key().is_some() {
            f.write_str("; the server may have run it, so send it again with the same key")?;
        }
        Ok(())
    }
}

// Most clients use boxed errors, which do not implement `Error`. The text therefore contains the client's message, and
// there is no `source`.
impl<E: fmt::Debug + fmt::Display> std::error::Error for RetryError<E> {}

/// Reason why a request is not sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallRefusal {
    Unnamed,
    NoAttempt,
    NoKey,
    InvalidKey,
}

impl CallRefusal {
    /// Returns the error of a request with this method and target.
    pub(super) fn of<E>(self, method: Method, uri: Uri) -> RetryError<E> {
        match self {
            Self::Unnamed => RetryError::Unnamed { method, uri },
            Self::NoAttempt => RetryError::NoAttempt { method, uri },
            Self::NoKey => RetryError::NoKey { method, uri },
            Self::InvalidKey => RetryError::InvalidKey { method, uri },
        }
    }
}
