//! What the rules of a protocol ask for, as plain values.

use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderValue};
use http::response::Parts;
use http::{Response, StatusCode};
use serde_json::json;

use super::problem::{Problem, ProblemKind};

/// What becomes of a response.
///
/// A handler decides for itself with an extension of its response: `response.extensions_mut().insert(Recording::Record)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Recording {
    /// It is recorded, and every duplicate gets it.
    Record,
    /// It frees the key: the next request with this key runs the handler again.
    Release,
    /// The operation is recorded without its response: duplicates get 410, and the handler never runs again. For what is
    /// streamed, or must not be kept.
    Mark,
}

/// When two requests are the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Equality {
    /// Path, query, the chosen headers and the bytes of the body are the same.
    Bytes,
    /// The bodies say the same as JSON, whatever the order of members and the writing of numbers. Query and headers are left
    /// out, and a path is an operation of its own. What is no JSON is compared by its bytes.
    Json,
}

/// The rules of a protocol: a plain value, each field of which can be changed.
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
    /// What it is called.
    pub name: &'static str,
    /// Whether every request of a covered method needs a key, whatever the policy's `missing_key` says.
    pub requires_key: bool,
    /// The fewest characters of a key.
    pub min_key_chars: usize,
    /// When two requests are the same.
    pub equality: Equality,
    /// The status where a key was used with another request.
    pub mismatch: StatusCode,
    /// What becomes of a response without a word from its handler. Called with the head, and once more with the trailers if
    /// there are any.
    pub recording: fn(&Parts, &HeaderMap) -> Recording,
    /// The shortest retention: the policy's `ttl` can't be less.
    pub min_ttl: Duration,
    /// A `ttl` below this is worth a warning.
    pub advised_ttl: Duration,
    /// Whether a store that does not answer must keep the handler from running.
    pub fails_closed: bool,
    /// The response to a problem.
    pub problem: fn(&Problem) -> Response<Bytes>,
}

const DAY: Duration = Duration::from_secs(24 * 3600);

impl Profile {
    /// The draft of the IETF (`draft-ietf-httpapi-idempotency-key-header-07`), with errors of RFC 9457.
    pub const fn ietf() -> Self {
        Self {
            name: "ietf",
            requires_key: false,
            min_key_chars: 1,
            equality: Equality::Bytes,
            mismatch: StatusCode::UNPROCESSABLE_ENTITY,
            recording: record_what_depends_on_the_request,
            min_ttl: Duration::ZERO,
            advised_ttl: Duration::ZERO,
            fails_closed: false,
            problem: Problem::response,
        }
    }

    /// As Stripe's API: what an endpoint answers is recorded, 500 included; another request is 400.
    pub const fn stripe() -> Self {
        Self {
            name: "stripe",
            mismatch: StatusCode::BAD_REQUEST,
            recording: record_what_began,
            min_ttl: DAY,
            advised_ttl: DAY,
            problem: stripe_problem,
            ..Self::ietf()
        }
    }

    /// The Agentic Commerce Protocol: a key on every request, bodies compared as JSON, each path by itself.
    pub const fn acp() -> Self {
        Self {
            name: "acp",
            requires_key: true,
            equality: Equality::Json,
            min_ttl: DAY,
            advised_ttl: DAY,
            problem: acp_problem,
            ..Self::ietf()
        }
    }

    /// The Universal Commerce Protocol: keys of 128 bits, bodies compared by their bytes, 409 for another request, and never
    /// a handler without its store.
    pub const fn ucp() -> Self {
        Self {
            name: "ucp",
            // What 128 bits take in base64.
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

/// 2xx, 3xx, and those 4xx that depend on the request alone. What depends on credentials, on the moment or on the server
/// frees the key. A response of gRPC is judged by the status in its trailers.
fn record_what_depends_on_the_request(head: &Parts, trailers: &HeaderMap) -> Recording {
    let grpc = trailers.get("grpc-status").or_else(|| head.headers.get("grpc-status"));
    let is_final = match grpc.map(HeaderValue::as_bytes) {
        // OK, and the errors of clients: INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, OUT_OF_RANGE,
        // UNIMPLEMENTED.
        Some(status) => [&b"0"[..], b"3", b"5", b"6", b"9", b"11", b"12"].contains(&status),
        None => match head.status.as_u16() {
            401 | 403 | 408 | 409 | 421 | 425 | 429 => false,
            status => status < 500,
        },
    };
    if is_final { Recording::Record } else { Recording::Release }
}

/// Everything but what is refused before an endpoint begins: credentials, concurrent requests, rate limits.
fn record_what_began(head: &Parts, _: &HeaderMap) -> Recording {
    match head.status.as_u16() {
        401 | 403 | 408 | 409 | 425 | 429 => Recording::Release,
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
        ProblemKind::Busy | ProblemKind::StoreUnavailable | ProblemKind::Unrecorded => "service_unavailable",
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

/// The name of a problem as codes are written.
fn code(kind: ProblemKind) -> String {
    kind.name().replace('-', "_")
}
