//! The rules of a protocol, as plain values.

use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderValue};
use http::response::Parts;
use http::{Method, Response, StatusCode};
use serde_json::json;

use super::problem::{Problem, ProblemKind};

/// Decision about a response: recorded or not.
///
/// A handler decides with an extension of its response: `response.extensions_mut().insert(Recording::Record)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Recording {
    /// The response is recorded, and every duplicate gets it.
    Record,
    /// The key is freed: a retry of the same request runs the handler again. Another request with this key is refused
    /// until the record expires.
    Release,
    /// The key is forgotten: the next request with this key is a new operation, with any payload. Use this for a
    /// request that failed validation, before it had an effect.
    ///
    /// If an earlier attempt had begun, the key is freed as by [`Release`](Self::Release): the effects of that attempt
    /// may have happened, so another payload must not use the key. If the store does not answer, the key is also freed
    /// as by [`Release`](Self::Release).
    Forget,
    /// The layer treats the run as cut off, with unknown effects. Under `on_crash = retry` the key is freed; under
    /// `on_crash = fail` the operation is interrupted.
    Interrupt,
    /// The operation is recorded without its response: duplicates get 410, and the handler never runs again. Use this
    /// for responses that are streamed, or must not be stored.
    Mark,
}

/// Rule that decides whether two requests are the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Equality {
    /// Path, query, the chosen headers and the bytes of the body are the same.
    Bytes,
    /// The bodies are equal as JSON: the order of members and the spelling of numbers do not matter. Query and headers
    /// are not compared, and each path is a separate operation. A body that is not JSON is compared by its bytes.
    Json,
}

/// The rules of a protocol: a plain value whose fields can be changed.
///
/// ```
/// use http::StatusCode;
/// use idem_runtime::http::Profile;
///
/// let mut rules = Profile::ietf();
/// rules.mismatch = StatusCode::CONFLICT;
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Profile {
    /// Name of the protocol.
    pub name: &'static str,
    /// Methods of the requests that the layer covers, unless the layer sets [other
    /// methods](super::IdempotencyLayer::methods).
    pub methods: &'static [Method],
    /// Suffixes of paths whose requests only read, with any method. Such requests pass to the handler, with or without
    /// a key. The function [`covers`](super::IdempotencyLayer::covers), if set, decides in place of this list.
    pub reads: &'static [&'static str],
    /// True if every request of a covered method needs a key, regardless of the policy's `missing_key`.
    pub requires_key: bool,
    /// Minimum number of characters of a key.
    pub min_key_chars: usize,
    /// Rule that decides whether two requests are the same.
    pub equality: Equality,
    /// Status of a request whose key was used with another request.
    pub mismatch: StatusCode,
    /// Decides how a response is recorded if its handler has not decided. The function is called with the head, and
    /// again with the trailers if there are any.
    pub recording: fn(&Parts, &HeaderMap) -> Recording,
    /// Shortest retention: the policy's `ttl` must not be shorter.
    pub min_ttl: Duration,
    /// Advised retention: a shorter `ttl` causes a warning.
    pub advised_ttl: Duration,
    /// True if every response to a request with a key repeats the field of the key as the client sent it. Problems and
    /// replays repeat the field, too.
    pub echoes_key: bool,
    /// True if no handler may run while the store does not answer.
    pub fails_closed: bool,
    /// Writes the response to a problem.
    pub problem: fn(&Problem) -> Response<Bytes>,
}

const DAY: Duration = Duration::from_secs(24 * 3600);

impl Profile {
    /// The draft of the IETF (`draft-ietf-httpapi-idempotency-key-header-07`), with errors of RFC 9457.
    pub const fn ietf() -> Self {
        Self {
            name: "ietf",
            methods: &[Method::POST, Method::PATCH],
            reads: &[],
            requires_key: false,
            min_key_chars: 1,
            equality: Equality::Bytes,
            mismatch: StatusCode::UNPROCESSABLE_ENTITY,
            recording: record_what_depends_on_the_request,
            min_ttl: Duration::ZERO,
            advised_ttl: Duration::ZERO,
            echoes_key: false,
            fails_closed: false,
            problem: Problem::response,
        }
    }

    /// The rules of Stripe's API: every response of an endpoint that has begun is recorded, including 500; another
    /// request under a used key gets 400; every response repeats the key.
    ///
    /// The layer treats a 400, 415 or 422 as a validation that failed before the endpoint began, and forgets the key: a
    /// corrected request can use the key again. A handler that refuses with such a status after it has begun inserts
    /// [`Recording::Record`].
    pub const fn stripe() -> Self {
        Self {
            name: "stripe",
            mismatch: StatusCode::BAD_REQUEST,
            recording: record_what_began,
            min_ttl: DAY,
            advised_ttl: DAY,
            echoes_key: true,
            problem: stripe_problem,
            ..Self::ietf()
        }
    }

    /// The Agentic Commerce Protocol: every request has a key, and every response repeats the key; bodies are compared
    /// as JSON, and each path is a separate operation.
    pub const fn acp() -> Self {
        Self {
            name: "acp",
            requires_key: true,
            equality: Equality::Json,
            min_ttl: DAY,
            advised_ttl: DAY,
            echoes_key: true,
            problem: acp_problem,
            ..Self::ietf()
        }
    }

    /// The Universal Commerce Protocol, by its text of 2026-08-22: POST and PUT need keys of 128 bits, except for the
    /// reads of the catalog; bodies are compared by their bytes, another request under a used key gets 409, and no
    /// handler runs while the store does not answer.
    pub const fn ucp() -> Self {
        Self {
            name: "ucp",
            // The protocol has no PATCH. This profile protects PATCH requests nevertheless, like all other profiles.
            methods: &[Method::POST, Method::PUT, Method::PATCH],
            reads: &["/catalog/search", "/catalog/lookup", "/catalog/product"],
            requires_key: true,
            // Length of 128 bits in base64.
            min_key_chars: 22,
            mismatch: StatusCode::CONFLICT,
            min_ttl: DAY,
            advised_ttl: Duration::from_secs(48 * 3600),
            fails_closed: true,
            problem: ucp_problem,
            ..Self::ietf()
        }
    }
}

/// Records a 2xx, a 3xx, and a 4xx that depends on the request alone. A status that depends on credentials, or on the
/// time of the request, frees the key. A 408 or 5xx leaves the effects unknown: a time limit or a guard against panics
/// between the layer and the handler may have sent that status. For a gRPC response, the status in its trailers
/// decides.
fn record_what_depends_on_the_request(head: &Parts, trailers: &HeaderMap) -> Recording {
    let grpc = trailers.get("grpc-status").or_else(|| head.headers.get("grpc-status"));
    match grpc.map(HeaderValue::as_bytes) {
        // OK, and the errors of clients: INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION,
        // OUT_OF_RANGE, UNIMPLEMENTED.
        Some(b"0" | b"3" | b"5" | b"6" | b"9" | b"11" | b"12") => Recording::Record,
        // PERMISSION_DENIED, RESOURCE_EXHAUSTED, ABORTED, UNAUTHENTICATED.
        Some(b"7" | b"8" | b"10" | b"16") => Recording::Release,
        // CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE, DATA_LOSS.
        Some(_) => Recording::Interrupt,
        None => match head.status.as_u16() {
            401 | 403 | 409 | 421 | 425 | 429 => Recording::Release,
            408 | 500.. => Recording::Interrupt,
            _ => Recording::Record,
        },
    }
}

/// Records everything except responses that an endpoint gives before it begins: validation, credentials, concurrent
/// requests, rate limits.
fn record_what_began(head: &Parts, _: &HeaderMap) -> Recording {
    match head.status.as_u16() {
        400 | 415 | 422 => Recording::Forget,
        401 | 403 | 409 | 425 | 429 => Recording::Release,
        408 => Recording::Interrupt,
        _ => Recording::Record,
    }
}

fn stripe_problem(problem: &Problem) -> Response<Bytes> {
    let kind = problem.kind();
    let error_type = match kind {
        ProblemKind::MissingKey
        | ProblemKind::InvalidKey
        | ProblemKind::InProgress
        | ProblemKind::FingerprintMismatch
        | ProblemKind::Interrupted
        | ProblemKind::Unresolved
        | ProblemKind::AttemptsExhausted
        | ProblemKind::ResultUnavailable => "idempotency_error",
        _ if problem.status().is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    let message = format!("{}. {}", kind.title(), kind.detail());
    let error = json!({ "type": error_type, "code": code(kind), "message": message, "doc_url": problem.type_uri() });
    problem.with_body("application/json", &json!({ "error": error }))
}

fn acp_problem(problem: &Problem) -> Response<Bytes> {
    let kind = problem.kind();
    let error_type = match kind {
        ProblemKind::Busy | ProblemKind::StoreUnavailable | ProblemKind::Unrecorded | ProblemKind::Unsent => {
            "service_unavailable"
        }
        _ if problem.status().is_server_error() => "processing_error",
        _ => "invalid_request",
    };
    let code = match kind {
        ProblemKind::MissingKey => "idempotency_key_required".to_owned(),
        ProblemKind::FingerprintMismatch => "idempotency_conflict".to_owned(),
        ProblemKind::InProgress => "idempotency_in_flight".to_owned(),
        kind => code(kind),
    };
    let message = format!("{}. {}", kind.title(), kind.detail());
    problem.with_body("application/json", &json!({ "type": error_type, "code": code, "message": message }))
}

fn ucp_problem(problem: &Problem) -> Response<Bytes> {
    let kind = problem.kind();
    let content = format!("{}. {}", kind.title(), kind.detail());
    problem.with_body("application/json", &json!({ "code": code(kind), "content": content }))
}

/// Returns the name of a problem in the spelling of an error code: with `_` in place of `-`.
fn code(kind: ProblemKind) -> String {
    kind.name().replace('-', "_")
}
