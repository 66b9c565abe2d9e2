//! Settings of a layer for servers, the caller of a request, and the key of a request.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Response};

use super::json::JsonMembers;
use super::problem::Problem;
use super::profile::{Equality, Profile, Recording};
use super::tasks::{Carry, HandlerTasks};
use crate::engine::Reconciliation;
use crate::policy::{MissingKey, Policy};
use crate::store::Store;

/// The sender of a request. Two callers never share a key.
///
/// Name the *principal*, such as a customer or an account, not the token: a caller that refreshes its token between two
/// tries must stay the same caller.
#[derive(Clone)]
pub struct Caller(pub(super) Option<Principal>);

pub(super) type PrincipalOf = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

#[derive(Clone)]
pub(super) struct Principal {
    pub(super) of: PrincipalOf,
    pub(super) challenge: HeaderValue,
}

impl Caller {
    /// Finds the caller with `principal`, for example in an extension that authentication has inserted.
    ///
    /// If `principal` returns `None` or a blank text, the request gets 401, or 403 if it carries credentials. Nothing
    /// is stored for such a request.
    pub fn by<T: Into<String>>(principal: impl Fn(&Parts) -> Option<T> + Send + Sync + 'static) -> Self {
        let of = Arc::new(move |head: &Parts| principal(head).map(Into::into));
        Self(Some(Principal { of, challenge: HeaderValue::from_static("Bearer") }))
    }

    /// Treats all requests as sent by one caller: each client may see the response to another client's request with the
    /// same key.
    pub const fn single() -> Self {
        Self(None)
    }

    /// Sets the value of `WWW-Authenticate` in a 401 (default: `Bearer`).
    ///
    /// # Panics
    /// If `challenge` can't be a header.
    #[must_use]
    pub fn challenge(self, challenge: &str) -> Self {
        let challenge = HeaderValue::from_str(challenge).expect("a challenge is printable");
        Self(self.0.map(|principal| Principal { challenge, ..principal }))
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Caller::by(…)" } else { "Caller::single()" })
    }
}

/// The key of a request, without its quotes. Handlers behind the layer find the key in the request's extensions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdempotencyKey(pub String);

pub(super) type HeadRule = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

pub(super) type KeyRule = Arc<dyn Fn(&str) -> bool + Send + Sync>;

pub(super) type ResponseRule = Arc<dyn Fn(&http::response::Parts, &HeaderMap) -> Recording + Send + Sync>;

pub(super) type HeaderRule = Arc<dyn Fn(&HeaderName) -> bool + Send + Sync>;

/// Answer of the reconciler of a layer; `None` if the reconciler has failed.
pub(super) type ReconcilerAnswer = Option<Reconciliation<Response<Bytes>>>;

pub(super) type ReconcileRule =
    Arc<dyn Fn(Parts) -> Pin<Box<dyn Future<Output = ReconcilerAnswer> + Send>> + Send + Sync>;

pub(super) type ProblemHook = Arc<dyn Fn(&Problem, &mut Response<Bytes>) + Send + Sync>;

/// All settings of a layer.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) store: Arc<dyn Store>,
    pub(super) policy: Policy,
    pub(super) caller: Caller,
    pub(super) profile: Profile,
    pub(super) scope: Option<String>,
    pub(super) separate_hosts: bool,
    pub(super) header: HeaderName,
    pub(super) marker: HeaderName,
    /// Methods that the layer covers, in place of the profile's methods.
    pub(super) methods: Option<Vec<Method>>,
    pub(super) covers: Option<HeadRule>,
    pub(super) required: Option<HeadRule>,
    pub(super) key_format: Option<KeyRule>,
    pub(super) fingerprint_headers: Vec<HeaderName>,
    pub(super) fingerprint_members: Option<JsonMembers>,
    pub(super) max_body_bytes: usize,
    pub(super) body_deadline: Duration,
    pub(super) stream_digested: bool,
    pub(super) recording: Option<ResponseRule>,
    pub(super) replay_headers: Option<HeaderRule>,
    pub(super) reconcile: Option<ReconcileRule>,
    pub(super) on_problem: Option<ProblemHook>,
    pub(super) problem_base: String,
    pub(super) carry: Option<Carry>,
    pub(super) tasks: Arc<HandlerTasks>,
}

impl Settings {
    /// Returns the methods that the layer covers.
    pub(super) fn methods(&self) -> &[Method] {
        self.methods.as_deref().unwrap_or(self.profile.methods)
    }

    /// Returns whether bodies are compared as JSON.
    pub(super) fn compares_json(&self) -> bool {
        self.profile.equality == Equality::Json || self.fingerprint_members.is_some()
    }

    /// Returns whether `key` has the form that the layer requires.
    pub(super) fn accepts(&self, key: &str) -> bool {
        key.len() >= self.profile.min_key_chars && self.key_format.as_ref().is_none_or(|format| format(key))
    }

    /// Returns whether a request without a key is refused.
    pub(super) fn requires(&self, head: &Parts) -> bool {
        match &self.required {
            Some(required) => required(head),
            None => self.profile.requires_key || self.policy.missing_key == MissingKey::Reject,
        }
    }
}
