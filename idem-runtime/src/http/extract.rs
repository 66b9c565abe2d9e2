//! Request data that only axum has, and the extractor of keys.

use axum::extract::{FromRequestParts, MatchedPath, OptionalFromRequestParts, OriginalUri};
use axum::response::{IntoResponse, Response};
use http::Uri;
use http::header::HeaderName;
use http::request::Parts;

use super::field::{self, KeyFieldProblem};
use super::problem::{Problem, ProblemKind};
use super::settings::IdempotencyKey;

/// Returns the template of the route.
pub(super) fn template(head: &Parts) -> Option<&str> {
    head.extensions.get::<MatchedPath>().map(MatchedPath::as_str)
}

/// Returns the whole target. In a nested router, the request's own `uri` lacks the prefix of the router.
pub(super) fn uri(head: &Parts) -> &Uri {
    head.extensions.get::<OriginalUri>().map_or(&head.uri, |original| &original.0)
}

/// The rejection of a request that has no key, or an invalid key.
#[derive(Debug)]
pub struct KeyRejection(Problem);

impl IntoResponse for KeyRejection {
    fn into_response(self) -> Response {
        let problem = self.0;
        let status = problem.status();
        problem.at(status, "urn:idem:http:").response().map(axum::body::Body::from)
    }
}

fn read(head: &Parts) -> Result<IdempotencyKey, KeyFieldProblem> {
    match head.extensions.get::<IdempotencyKey>() {
        Some(key) => Ok(key.clone()),
        None => field::key(&head.headers, &HeaderName::from_static("idempotency-key")).map(IdempotencyKey),
    }
}

fn rejection(problem: KeyFieldProblem) -> KeyRejection {
    KeyRejection(Problem::new(match problem {
        KeyFieldProblem::Missing => ProblemKind::MissingKey,
        _ => ProblemKind::InvalidKey,
    }))
}

/// Extracts the key that the layer around the handler read. Without a layer, the key is read from the field
/// `Idempotency-Key`, so that a handler can use the key in its attribute: `#[idempotent(key = "{key.0}", …)]`.
impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = KeyRejection;

    async fn from_request_parts(head: &mut Parts, _: &S) -> Result<Self, KeyRejection> {
        read(head).map_err(rejection)
    }
}

/// Extracts `None` if the request has no key. An invalid key is rejected.
impl<S: Send + Sync> OptionalFromRequestParts<S> for IdempotencyKey {
    type Rejection = KeyRejection;

    async fn from_request_parts(head: &mut Parts, _: &S) -> Result<Option<Self>, KeyRejection> {
        match read(head) {
            Err(KeyFieldProblem::Missing) => Ok(None),
            key => key.map(Some).map_err(rejection),
        }
    }
}
