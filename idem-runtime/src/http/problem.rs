//! Problems: the answers that the layer gives in place of the handler.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Response, StatusCode};

use crate::error::Error;
use crate::key::uuid;

/// Reason why the layer answers a request in place of the handler.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ProblemKind {
    /// The request has no key, and a key is required.
    MissingKey,
    /// The header field of the key does not hold exactly one valid key.
    InvalidKey,
    /// The body can't be read.
    InvalidBody,
    /// The body does not match its `Content-Digest`.
    DigestMismatch,
    /// The request names no host, or several, and the layer separates the keys of each host.
    InvalidHost,
    /// The request carries no credentials, and the layer separates the keys of each caller.
    Unauthenticated,
    /// The request carries credentials that name no caller.
    Forbidden,
    /// The body did not arrive in time.
    BodyTimeout,
    /// The body is longer than the layer reads.
    BodyTooLarge,
    /// The first request with this key is running.
    InProgress,
    /// The key was used with another request.
    FingerprintMismatch,
    /// The first request with this key was cut off, and its effects are unknown.
    Interrupted,
    /// The first request with this key was cut off, and the [reconciler](super::IdempotencyLayer::reconcile) does not
    /// know yet whether its effects have happened.
    Unresolved,
    /// The operation has reached its limit of attempts.
    AttemptsExhausted,
    /// The operation has finished, and its response can't be replayed.
    ResultUnavailable,
    /// The handler exceeded its time limit.
    TimedOut,
    /// The limit of requests in flight is reached, or the server is shutting down.
    Busy,
    /// The limit of requests in flight of one caller is reached.
    CallerBusy,
    /// The store does not answer, is full, or refuses. The handler did not run.
    StoreUnavailable,
    /// The handler ran, or was cut off, and its response could not be recorded.
    Unrecorded,
    /// The operation has finished, and its messages are not all sent. A repetition sends the rest.
    Unsent,
    /// The server is not configured correctly.
    Misconfigured,
}

impl ProblemKind {
    /// All kinds of problems.
    pub const ALL: [Self; 22] = [
        Self::MissingKey,
        Self::InvalidKey,
        Self::InvalidBody,
        Self::DigestMismatch,
        Self::InvalidHost,
        Self::Unauthenticated,
        Self::Forbidden,
        Self::BodyTimeout,
        Self::BodyTooLarge,
        Self::InProgress,
        Self::FingerprintMismatch,
        Self::Interrupted,
        Self::Unresolved,
        Self::AttemptsExhausted,
        Self::ResultUnavailable,
        Self::TimedOut,
        Self::Busy,
        Self::CallerBusy,
        Self::StoreUnavailable,
        Self::Unrecorded,
        Self::Unsent,
        Self::Misconfigured,
    ];

    /// Returns the last part of the problem's `type`. A name never changes.
    pub const fn name(self) -> &'static str {
        self.about().0
    }

    /// Returns the status of the response, unless the profile sets another status.
    pub const fn status(self) -> StatusCode {
        match self {
            Self::MissingKey | Self::InvalidKey | Self::InvalidBody | Self::DigestMismatch | Self::InvalidHost => {
                StatusCode::BAD_REQUEST
            }
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::InProgress | Self::Interrupted | Self::Unresolved | Self::AttemptsExhausted => StatusCode::CONFLICT,
            Self::FingerprintMismatch => StatusCode::UNPROCESSABLE_ENTITY,
            Self::CallerBusy => StatusCode::TOO_MANY_REQUESTS,
            Self::ResultUnavailable => StatusCode::GONE,
            Self::TimedOut => StatusCode::GATEWAY_TIMEOUT,
            Self::Busy | Self::StoreUnavailable | Self::Unrecorded | Self::Unsent => StatusCode::SERVICE_UNAVAILABLE,
            Self::Misconfigured => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns whether the same request with the same key may succeed later, without a change by the client or by an
    /// operator.
    pub const fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::BodyTimeout
                | Self::InProgress
                | Self::Unresolved
                | Self::TimedOut
                | Self::Busy
                | Self::StoreUnavailable
                | Self::Unrecorded
                | Self::Unsent
        )
    }

    /// Returns the title of the problem.
    pub const fn title(self) -> &'static str {
        self.about().1
    }

    /// Returns the meaning of the problem, and the next step of the client.
    pub const fn detail(self) -> &'static str {
        self.about().2
    }

    /// Returns the gRPC status.
    pub(super) const fn grpc_status(self) -> &'static str {
        match self {
            // INVALID_ARGUMENT
            Self::MissingKey | Self::InvalidKey | Self::InvalidBody | Self::DigestMismatch | Self::InvalidHost => "3",
            // UNAUTHENTICATED
            Self::Unauthenticated => "16",
            // PERMISSION_DENIED
            Self::Forbidden => "7",
            // DEADLINE_EXCEEDED
            Self::BodyTimeout | Self::TimedOut => "4",
            // RESOURCE_EXHAUSTED
            Self::BodyTooLarge | Self::CallerBusy => "8",
            // ABORTED
            Self::InProgress | Self::Unresolved => "10",
            // FAILED_PRECONDITION
            Self::FingerprintMismatch | Self::Interrupted | Self::AttemptsExhausted | Self::ResultUnavailable => "9",
            // UNAVAILABLE
            Self::Busy | Self::StoreUnavailable | Self::Unrecorded | Self::Unsent => "14",
            // INTERNAL
            Self::Misconfigured => "13",
        }
    }

    #[expect(clippy::too_many_lines, reason = "one text for each kind, to be read together")]
    const fn about(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::MissingKey => (
                "missing-key",
                "The request has no idempotency key",
                "Nothing was done. Send the request again with a key that names this operation and no other.",
            ),
            Self::InvalidKey => (
                "invalid-key",
                "The idempotency key is not valid",
                "Nothing was done. Send one field with one key of 1 to 255 printable characters.",
            ),
            Self::InvalidBody => (
                "invalid-body",
                "The body of the request can't be read",
                "Nothing was done. Send the whole body. As JSON it nests at most 400 levels deep, and no object in it has \
                 two members of one name.",
            ),
            Self::DigestMismatch => (
                "digest-mismatch",
                "The body is not the one of its Content-Digest",
                "Nothing was recorded. Send the request again with the digest of its body.",
            ),
            Self::InvalidHost => (
                "invalid-host",
                "The request does not name its host",
                "Nothing was done. Send the request again with one Host field, or one :authority.",
            ),
            Self::Unauthenticated => (
                "unauthenticated",
                "Idempotency keys belong to callers, and this request names none",
                "Nothing was done, and nothing was stored. Send the request again with credentials.",
            ),
            Self::Forbidden => (
                "forbidden",
                "The credentials name no caller",
                "Nothing was done, and nothing was stored. Send the request again with other credentials.",
            ),
            Self::BodyTimeout => (
                "body-timeout",
                "The body did not arrive in time",
                "Nothing was recorded. Send the request again with the same key.",
            ),
            Self::BodyTooLarge => {
                ("body-too-large", "The body is too large", "Nothing was done. Send less in one request.")
            }
            Self::InProgress => (
                "in-progress",
                "A request with this idempotency key is running",
                "Send the same request again, with the same key, after the time in Retry-After.",
            ),
            Self::FingerprintMismatch => (
                "fingerprint-mismatch",
                "This idempotency key was used with another request",
                "Nothing was done. Give each operation a key of its own; a retry repeats its request unchanged.",
            ),
            Self::Interrupted => (
                "interrupted",
                "An earlier request with this idempotency key was cut off",
                "Nobody knows how far it came, and it is not started again. Ask the operator of this service; a retry \
                 gets the same answer until then.",
            ),
            Self::Unresolved => (
                "unresolved",
                "The outcome of an earlier request with this idempotency key is not known yet",
                "The request was cut off. The service is finding out how far it came, and does nothing until it knows. \
                 Send the request again after the time in `Retry-After`.",
            ),
            Self::AttemptsExhausted => (
                "attempts-exhausted",
                "The operation has failed as often as it may",
                "It is not started again. Ask the operator of this service; a retry gets the same answer until then.",
            ),
            Self::ResultUnavailable => (
                "result-unavailable",
                "The operation has finished, and its response was not kept",
                "It is not done again. Look for its effect with another request.",
            ),
            Self::TimedOut => (
                "timed-out",
                "The request ran for longer than it may",
                "Its effects may have happened in part. Send the same request again, with the same key.",
            ),
            Self::Busy => (
                "busy",
                "The service has as many requests as it can take",
                "Nothing was done. Send the same request again, with the same key, after the time in Retry-After.",
            ),
            Self::CallerBusy => (
                "caller-busy",
                "This caller has as many requests running as it may",
                "Nothing was done. Send the same request again, with the same key, after the time in Retry-After.",
            ),
            Self::StoreUnavailable => (
                "store-unavailable",
                "The service can't tell whether this request is a duplicate",
                "Nothing was done. Send the same request again, with the same key, after the time in Retry-After.",
            ),
            Self::Unsent => (
                "unsent",
                "The operation is done, and its messages have not all been sent",
                "It is not done again. Send the same request again, with the same key, after the time in Retry-After: that \
                 sends the rest, and returns the response.",
            ),
            Self::Unrecorded => (
                "unrecorded",
                "The service could not record what became of this request",
                "Its effects may have happened. Send the same request again, with the same key, after the time in Retry-After.",
            ),
            Self::Misconfigured => (
                "misconfigured",
                "The service is not set up right",
                "Nothing was done. Tell the operator of this service.",
            ),
        }
    }
}

/// An answer of the layer in place of the handler's response, before it is written as a response.
#[derive(Debug)]
pub struct Problem {
    kind: ProblemKind,
    status: StatusCode,
    type_uri: String,
    /// Random URI of this occurrence; empty if no layer has made this problem.
    instance: String,
    retry_after: Option<Duration>,
    /// Boxed: an error is large, and most problems have none.
    error: Option<Box<Error>>,
}

impl Problem {
    pub(super) fn new(kind: ProblemKind) -> Self {
        Self {
            kind,
            status: kind.status(),
            type_uri: String::new(),
            instance: String::new(),
            retry_after: None,
            error: None,
        }
    }

    pub(super) fn retry_after(self, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..self }
    }

    pub(super) fn of(error: Error) -> Self {
        let kind = match &error {
            Error::Store { started: false, .. } => ProblemKind::StoreUnavailable,
            // A handler that lost its lease had begun, so its effects may have happened, even if another attempt has
            // reserved the key since.
            Error::Store { started: true, .. } | Error::Unrecorded { .. } | Error::LeaseLost { .. } => {
                ProblemKind::Unrecorded
            }
            Error::ResultUnavailable { .. } => ProblemKind::ResultUnavailable,
            _ if error.is_misconfigured() => ProblemKind::Misconfigured,
            Error::MissingKey { .. } | Error::InvalidKey { .. } => ProblemKind::InvalidKey,
            Error::InvalidFingerprint { .. } => ProblemKind::InvalidBody,
            Error::InProgress { .. } => ProblemKind::InProgress,
            Error::FingerprintMismatch { .. } => ProblemKind::FingerprintMismatch,
            Error::Interrupted { ask_again: Some(_), .. } => ProblemKind::Unresolved,
            Error::Interrupted { ask_again: None, .. } => ProblemKind::Interrupted,
            Error::AttemptsExhausted { .. } => ProblemKind::AttemptsExhausted,
            Error::TimedOut { .. } => ProblemKind::TimedOut,
            Error::Unsent { .. } => ProblemKind::Unsent,
            Error::NoAttempt
            | Error::Step { .. }
            | Error::Outbox { .. }
            | Error::InvalidPolicy { .. }
            | Error::Panicked { .. }
            | Error::MessageLost { .. }
            | Error::DeadlinePassed { .. }
            | Error::HeldBack { .. } => ProblemKind::Misconfigured,
        };
        let retry_after = match &error {
            Error::Interrupted { ask_again: Some(retry_after), .. }
            | Error::InProgress { retry_after, .. }
            | Error::LeaseLost { retry_after, .. }
            | Error::TimedOut { retry_after, .. }
            | Error::Unrecorded { retry_after, .. }
            | Error::Unsent { retry_after, .. }
            | Error::Store { retry_after, .. } => Some(*retry_after),
            _ => None,
        };
        Self { retry_after, error: Some(Box::new(error)), ..Self::new(kind) }
    }

    /// Limits the retry time to `limit`, because most handlers end much sooner than their leases.
    pub(super) fn retry_within(self, limit: Duration) -> Self {
        Self { retry_after: self.retry_after.map(|after| after.min(limit)), ..self }
    }

    /// Sets the status, and the `type`: `base` followed by the name of the problem.
    pub(super) fn at(self, status: StatusCode, base: &str) -> Self {
        let type_uri = format!("{base}{}", self.kind.name());
        Self { status, type_uri, ..self }
    }

    /// Sets the `instance` of this problem to a UUID of these random bits.
    pub(super) fn named(self, random: u128) -> Self {
        Self { instance: format!("urn:uuid:{}", uuid(random, 4)), ..self }
    }

    /// Returns the reason why there is no response from the handler.
    pub fn kind(&self) -> ProblemKind {
        self.kind
    }

    /// Returns the status of the response.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the `type` of RFC 9457: a URI that names the kind of problem.
    pub fn type_uri(&self) -> &str {
        &self.type_uri
    }

    /// The `instance` of RFC 9457: a random URI that names this occurrence. The layer's log contains this URI, too.
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// Returns the time until a retry is likely to succeed, in whole seconds, at least 1. `None` if a retry alone does
    /// not help.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        let after = self.retry_after?;
        Some((after.as_secs() + u64::from(after.subsec_nanos() > 0)).max(1))
    }

    /// Returns the engine's error, for logs. Do not send this error to clients: the error names the key and the store.
    pub fn error(&self) -> Option<&Error> {
        self.error.as_deref()
    }

    /// Returns the default response: `application/problem+json` of RFC 9457.
    pub(super) fn response(&self) -> Response<Bytes> {
        let Self { kind, status, type_uri, instance, .. } = self;
        let mut body = serde_json::json!({
            "type": type_uri,
            "title": kind.title(),
            "status": status.as_u16(),
            "detail": kind.detail(),
            "retryable": kind.is_retryable(),
        });
        if !instance.is_empty() {
            body["instance"] = instance.as_str().into();
        }
        let mut response = self.with_body("application/problem+json", &body);
        if type_uri.starts_with("http") || type_uri.starts_with('/') {
            let link = format!("<{type_uri}>; rel=\"describedby\"");
            if let Ok(link) = HeaderValue::from_str(&link) {
                response.headers_mut().insert(header::LINK, link);
            }
        }
        response
    }

    /// Returns a response with the status and the headers of this problem, and with `body`.
    pub(super) fn with_body(&self, content_type: &'static str, body: &serde_json::Value) -> Response<Bytes> {
        let mut response = Response::new(Bytes::from(body.to_string()));
        *response.status_mut() = self.status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        self.put_headers(response.headers_mut());
        response
    }

    /// Sets the headers that every response to this problem has.
    pub(super) fn put_headers(&self, headers: &mut HeaderMap) {
        if let Some(seconds) = self.retry_after_seconds() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.kind == ProblemKind::BodyTimeout {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.status.as_u16(), self.kind.name(), self.kind.title())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_kind_of_problem_has_its_own_type_and_text() {
        let names: HashSet<_> = ProblemKind::ALL.iter().map(|kind| kind.name()).collect();
        let titles: HashSet<_> = ProblemKind::ALL.iter().map(|kind| kind.title()).collect();
        assert_eq!((names.len(), titles.len()), (ProblemKind::ALL.len(), ProblemKind::ALL.len()));
    }

    #[test]
    fn the_retry_time_is_in_whole_seconds_and_at_least_one() {
        let seconds =
            |millis| Problem::new(ProblemKind::Busy).retry_after(Duration::from_millis(millis)).retry_after_seconds();
        assert_eq!([0, 1, 1000, 1001, 30_000].map(seconds), [1, 1, 1, 2, 30].map(Some));
        assert_eq!(Problem::new(ProblemKind::Interrupted).retry_after_seconds(), None);
    }
}
