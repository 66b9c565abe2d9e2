//! The layer, its settings, and its tower service.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::body::{BoxError, RequestBody, ResponseBody};
use super::describe::Description;
use super::problem::Problem;
use super::profile::{Profile, Recording};
use super::protect::{Keyed, Look};
use super::tasks::{Carry, Gate, Task, Tasks, detach};
use crate::key::is_scope;
use crate::policy::{MissingKey, OnStoreError, Policy};
use crate::store::{Store, StoreExt};

/// Who sends a request: keys of one caller are never those of another.
///
/// Name the *principal*, such as a customer or an account, and not the token: a token that is refreshed between two tries is
/// the same caller.
#[derive(Clone)]
pub struct Caller(pub(super) Option<Principal>);

type PrincipalOf = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

#[derive(Clone)]
pub(super) struct Principal {
    pub(super) of: PrincipalOf,
    pub(super) challenge: HeaderValue,
}

impl Caller {
    /// The caller that `principal` finds in a request, for example in an extension that authentication has left there.
    ///
    /// A request for which it is `None` or blank gets 401, or 403 if it carries credentials. Nothing is stored for it.
    pub fn by<T: Into<String>>(principal: impl Fn(&Parts) -> Option<T> + Send + Sync + 'static) -> Self {
        let of = Arc::new(move |head: &Parts| principal(head).map(Into::into));
        Self(Some(Principal { of, challenge: HeaderValue::from_static("Bearer") }))
    }

    /// There is one caller only: whoever can send a request may see the response to any other one with the same key.
    pub const fn single() -> Self {
        Self(None)
    }

    /// What `WWW-Authenticate` says in a 401 (default: `Bearer`).
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

/// The key of a request, without its quotes: in the request's extensions for handlers behind the layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdempotencyKey(pub String);

type HeadRule = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;
type ResponseRule = Arc<dyn Fn(&http::response::Parts, &HeaderMap) -> Recording + Send + Sync>;
type HeaderRule = Arc<dyn Fn(&HeaderName) -> bool + Send + Sync>;
type ProblemHook = Arc<dyn Fn(&Problem, &mut Response<Bytes>) + Send + Sync>;

/// Everything that is set.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) store: Arc<dyn Store>,
    pub(super) policy: Policy,
    pub(super) caller: Caller,
    pub(super) profile: Profile,
    pub(super) scope: Option<String>,
    pub(super) header: HeaderName,
    pub(super) marker: HeaderName,
    pub(super) methods: Vec<Method>,
    pub(super) covers: Option<HeadRule>,
    pub(super) required: Option<HeadRule>,
    pub(super) fingerprint_headers: Vec<HeaderName>,
    pub(super) max_body_bytes: usize,
    pub(super) body_deadline: Duration,
    pub(super) stream_digested: bool,
    pub(super) recording: Option<ResponseRule>,
    pub(super) replay_headers: Option<HeaderRule>,
    pub(super) on_problem: Option<ProblemHook>,
    pub(super) problem_base: String,
    pub(super) carry: Option<Carry>,
    pub(super) tasks: Arc<Tasks>,
}

/// Makes routes idempotent: the settings, a [`Layer`] of tower, and [`respond`](IdempotencyLayer::respond) for servers without
/// tower.
///
/// Clones share what is in flight, so that one of them can [`drain`](IdempotencyLayer::drain) all.
#[derive(Clone)]
pub struct IdempotencyLayer(pub(super) Arc<Settings>);

impl IdempotencyLayer {
    /// How many bytes of a request's body are read (default: 1 MiB).
    pub const DEFAULT_MAX_BODY_BYTES: usize = 1024 * 1024;
    /// For how long a request's body is waited for (default: 30 s).
    pub const DEFAULT_BODY_DEADLINE: Duration = Duration::from_secs(30);
    /// How many requests may be in flight (default: 1024).
    pub const DEFAULT_MAX_IN_FLIGHT: u32 = 1024;

    /// A layer by the rules of [`Profile::ietf`], for POST and PATCH, that records in `store`.
    ///
    /// The policy's [`missing_key`](Policy::missing_key) says whether a key is required (default) or optional.
    ///
    /// # Panics
    /// If `policy` can't be honoured; see [`Policy::check`].
    pub fn new<S: Store + ?Sized>(store: &S, policy: Policy, caller: Caller) -> Self {
        if let Err(problem) = policy.check() {
            panic!("the policy of an idempotency layer can't be honoured: {problem}");
        }
        Self(Arc::new(Settings {
            store: store.handle(),
            policy,
            caller,
            profile: Profile::ietf(),
            scope: None,
            header: HeaderName::from_static("idempotency-key"),
            marker: HeaderName::from_static("idempotent-replayed"),
            methods: vec![Method::POST, Method::PATCH],
            covers: None,
            required: None,
            fingerprint_headers: Vec::new(),
            max_body_bytes: Self::DEFAULT_MAX_BODY_BYTES,
            body_deadline: Self::DEFAULT_BODY_DEADLINE,
            stream_digested: false,
            recording: None,
            replay_headers: None,
            on_problem: None,
            problem_base: "urn:idem:http:".to_owned(),
            carry: None,
            tasks: Arc::new(Tasks::new(Self::DEFAULT_MAX_IN_FLIGHT)),
        }))
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// The rules of a protocol.
    ///
    /// # Panics
    /// If the policy does not keep them: a `ttl` below the floor of the profile, or `on_store_error = run` where it must fail.
    #[must_use]
    pub fn profile(self, profile: Profile) -> Self {
        let Policy { ttl, on_store_error, .. } = self.0.policy;
        let Profile { name, min_ttl, advised_ttl, .. } = profile;
        assert!(ttl >= min_ttl, "the profile `{name}` keeps keys for {min_ttl:?} at least, and `ttl` is {ttl:?}");
        assert!(
            !profile.fails_closed || on_store_error == OnStoreError::Fail,
            "the profile `{name}` never runs a handler without its store, and `on_store_error` is `run`"
        );
        if ttl < advised_ttl {
            tracing::warn!("the profile `{name}` advises a `ttl` of {advised_ttl:?}, and it is {ttl:?}");
        }
        self.with(|it| it.profile = profile)
    }

    /// The name under which the keys of this layer live, in place of the route's template: routes with one name share their
    /// keys. Without a name, and where no template is known (that is, without axum), all routes do; the same key on another
    /// path is then refused as another request.
    ///
    /// # Panics
    /// If it has more than 200 bytes, is empty, or holds a `/` or a control character.
    #[must_use]
    pub fn scope(self, scope: impl Into<String>) -> Self {
        let scope = scope.into();
        assert!(is_scope(&scope), "a scope has 1 to 200 bytes, without `/` and control characters: {scope:?}");
        self.with(|it| it.scope = Some(scope))
    }

    /// The methods that the layer covers (default: POST and PATCH). Requests of others pass.
    #[must_use]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|it| it.methods = methods.into_iter().collect())
    }

    /// Which requests of these methods the layer covers (default: all). Others pass, with or without a key.
    #[must_use]
    pub fn covers(self, covers: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|it| it.covers = Some(Arc::new(covers)))
    }

    /// Which covered requests need a key (default: what the policy's `missing_key` says). Others may come without, and then
    /// run unprotected.
    #[must_use]
    pub fn required(self, required: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|it| it.required = Some(Arc::new(required)))
    }

    /// The field that holds the key (default: `Idempotency-Key`).
    #[must_use]
    pub fn header(self, header: HeaderName) -> Self {
        self.with(|it| it.header = header)
    }

    /// The field that marks a replay (default: `Idempotent-Replayed`).
    #[must_use]
    pub fn replay_marker(self, marker: HeaderName) -> Self {
        self.with(|it| it.marker = marker)
    }

    /// Headers that belong to the payload: the same key with another value is another request (default: none).
    #[must_use]
    pub fn fingerprint_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.with(|it| it.fingerprint_headers = names.into_iter().collect())
    }

    /// The longest body of a request that is read (default: 1 MiB). A longer one gets 413; one that says its length, before it
    /// is asked for.
    #[must_use]
    pub fn max_body_bytes(self, max_body_bytes: usize) -> Self {
        self.with(|it| it.max_body_bytes = max_body_bytes)
    }

    /// For how long a request's body is waited for (default: 30 s); then it gets 408. No key is reserved meanwhile.
    #[must_use]
    pub fn body_deadline(self, body_deadline: Duration) -> Self {
        self.with(|it| it.body_deadline = body_deadline)
    }

    /// Lets bodies that are too long to be read, or do not say how long they are, stream through to the handler if their
    /// `Content-Digest` holds a `sha-256`, which stands for the body then (default: no; they get 413).
    ///
    /// The digest is checked while the body streams. A lie is an error for whoever reads the body, the client gets 400 and
    /// nothing is recorded; what the handler did until then is done. A body that the handler does not read to its end is not
    /// checked.
    #[must_use]
    pub fn stream_digested(self, stream_digested: bool) -> Self {
        self.with(|it| it.stream_digested = stream_digested)
    }

    /// What becomes of a response without a [`Recording`] of its handler's (default: what the profile says). Called with the
    /// head, and once more with the trailers if there are any.
    #[must_use]
    pub fn recording(
        self,
        recording: impl Fn(&http::response::Parts, &HeaderMap) -> Recording + Send + Sync + 'static,
    ) -> Self {
        self.with(|it| it.recording = Some(Arc::new(recording)))
    }

    /// Which headers of a response are recorded (default: all), besides those that never are: cookies, challenges, dates,
    /// rate limits, and what belongs to one connection.
    #[must_use]
    pub fn replay_headers(self, replays: impl Fn(&HeaderName) -> bool + Send + Sync + 'static) -> Self {
        self.with(|it| it.replay_headers = Some(Arc::new(replays)))
    }

    /// Where your pages about the problems are, such as `https://api.example.com/problems/`: the `type` of a problem is this and
    /// its [name](super::ProblemKind::name), and `Link` points there (default: `urn:idem:http:`, and no `Link`).
    #[must_use]
    pub fn problem_base(self, base: impl Into<String>) -> Self {
        self.with(|it| it.problem_base = base.into())
    }

    /// Changes or replaces the response to a problem.
    #[must_use]
    pub fn on_problem(self, hook: impl Fn(&Problem, &mut Response<Bytes>) + Send + Sync + 'static) -> Self {
        self.with(|it| it.on_problem = Some(Arc::new(hook)))
    }

    /// How many requests with a key may be in flight, replays and waiting duplicates included (default: 1024). One more gets
    /// 503.
    #[must_use]
    pub fn max_in_flight(self, max_in_flight: u32) -> Self {
        self.with(|it| it.tasks = Arc::new(Tasks::new(max_in_flight)))
    }

    /// Wraps the task in which a handler runs, while the request's own task is still at hand: to take task-locals along that
    /// layers outside of this one have set. The current tracing span comes along by itself; what other thread- or task-locals
    /// such layers set does not.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::http::{Caller, IdempotencyLayer};
    /// # use idem_runtime::{MemoryStore, Policy};
    /// tokio::task_local! { static TENANT: String; }
    ///
    /// # let policy = Policy::new(Duration::from_secs(3600));
    /// let layer = IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::by(|_| TENANT.try_with(Clone::clone).ok()))
    ///     .carry(|task| Box::pin(TENANT.scope(TENANT.get(), task)));
    /// ```
    #[must_use]
    pub fn carry(self, carry: impl Fn(Task) -> Task + Send + Sync + 'static) -> Self {
        self.with(|it| it.carry = Some(Arc::new(carry)))
    }

    /// What clients have to know, as text and as a part of an `OpenAPI` document: lifetime and form of keys, statuses, replays.
    pub fn describe(&self) -> Description {
        Description::of(&self.0)
    }

    /// Ends the work of the layer: refuses requests with a key from here on (503), waits for those in flight, whose clients may
    /// have gone, and for the late writes of the store.
    ///
    /// # Cancel safety
    /// Cancel safe: new requests stay refused.
    pub async fn drain(&self) {
        self.0.tasks.drain().await;
        self.0.store.flush().await;
    }

    /// How many requests with a key are in flight.
    pub fn in_flight(&self) -> usize {
        self.0.tasks.count()
    }

    /// Answers `request` with the help of `handler`, for servers without tower: by its response, by a recorded one, or by a
    /// problem. The response's extensions hold the [`Outcome`](crate::Outcome) of the call.
    ///
    /// Limit the length of the body, and the time that it takes, before.
    ///
    /// # Errors
    /// What `handler` returned; the key is free then.
    ///
    /// # Panics
    /// If `handler` does.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the handler, and frees the key or counts as an interruption. Spawn it, so that the handler
    /// outlives its client.
    pub async fn respond<F, H, R, E>(&self, request: Request<Bytes>, handler: F) -> Result<Response<ResponseBody<R>>, E>
    where
        F: FnOnce(Request<Bytes>) -> H,
        H: Future<Output = Result<Response<R>, E>>,
        R: Body<Data = Bytes>,
    {
        let settings = &*self.0;
        let (head, body) = request.into_parts();
        let mut asked = match settings.look(&head, Some(body.len() as u64)) {
            Look::Pass => {
                return Ok(handler(Request::from_parts(head, body)).await?.map(ResponseBody::as_it_comes));
            }
            Look::Refuse(refusal) => return Ok(settings.refuse(refusal)),
            Look::Protect(asked) => asked,
        };
        let print = match settings.print(&head, &asked, &body) {
            Ok(print) => print,
            Err(problem) => return Ok(settings.refuse(asked.refusal(problem))),
        };
        let Ok(counted) = settings.enter() else {
            return Ok(settings.refuse(asked.busy()));
        };
        let request = Request::from_parts(asked.mark(head), body);
        let keyed = Keyed { asked, print, claim: None, counted };
        Settings::run(settings, keyed, Gate::open(), move || handler(request)).await
    }
}

impl Settings {
    /// Whether a request without a key is refused.
    pub(super) fn requires(&self, head: &Parts) -> bool {
        match &self.required {
            Some(required) => required(head),
            None => self.profile.requires_key || self.policy.missing_key == MissingKey::Reject,
        }
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { store, policy, caller, profile, scope, tasks, .. } = &*self.0;
        f.debug_struct("IdempotencyLayer")
            .field("store", &store.name())
            .field("policy", policy)
            .field("caller", caller)
            .field("profile", &profile.name)
            .field("scope", scope)
            .field("tasks", tasks)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        Idempotency { inner, settings: Arc::clone(&self.0) }
    }
}

/// The service of an [`IdempotencyLayer`].
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency").field("inner", &self.inner).finish_non_exhaustive()
    }
}

type Answering<R, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<R>>, E>> + Send>>;

impl<S, B, R> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = Answering<R, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that is ready goes with the request.
        let next = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, next);
        let (head, body) = request.into_parts();
        match self.settings.look(&head, body.size_hint().exact()) {
            Look::Pass => {
                let passed = inner.call(Request::from_parts(head, RequestBody::as_it_comes(body)));
                Box::pin(async move { Ok(passed.await?.map(ResponseBody::as_it_comes)) })
            }
            Look::Refuse(refusal) => {
                let answer = self.settings.refuse(refusal);
                Box::pin(async move { Ok(answer) })
            }
            Look::Protect(mut asked) => {
                let settings = Arc::clone(&self.settings);
                Box::pin(async move {
                    let (body, print, claim) = match settings.read(&head, &asked, body).await {
                        Ok(read) => read,
                        Err(problem) => return Ok(settings.refuse(asked.refusal(problem))),
                    };
                    let Ok(counted) = settings.enter() else {
                        return Ok(settings.refuse(asked.busy()));
                    };
                    let (gate, busy) = (Gate::closed(), asked.busy());
                    let request = Request::from_parts(asked.mark(head), body);
                    let keyed = Keyed { asked, print, claim, counted };
                    let run = Settings::run(Arc::clone(&settings), keyed, gate.clone(), move || inner.call(request));
                    match detach(Box::pin(run), &gate, settings.carry.as_ref()).await {
                        Ok(answer) => answer,
                        Err(_) => Ok(settings.refuse(busy)),
                    }
                })
            }
        }
    }
}
