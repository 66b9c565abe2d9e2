//! The layer for servers, and its tower service.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName};
use http::request::Parts;
use http::{Method, Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::body::{BoxError, RequestBody, ResponseBody};
use super::describe::Description;
use super::json::JsonMembers;
use super::problem::Problem;
use super::profile::{Profile, Recording};
use super::protect::{Classification, ErrorOrigin, PreparedRequest};
use super::settings::{Caller, ReconcileRule, Settings};
use super::tasks::{Gate, HandlerTask, HandlerTasks, detach};
use crate::engine::Reconciliation;
use crate::key::{is_reserved, is_scope};
use crate::policy::{OnStoreError, Policy};
use crate::store::{Store, StoreExt};

/// Makes routes idempotent. Holds the settings, and is a [`Layer`] of tower. Servers without tower call
/// [`respond`](IdempotencyLayer::respond).
///
/// Clones share their requests in flight, so one clone can [`drain`](IdempotencyLayer::drain) them all.
///
/// ```
/// # #[cfg(all(feature = "axum", feature = "memory"))] {
/// # use std::time::Duration;
/// use axum::body::Body;
/// use axum::http::Request;
/// use axum::{Router, routing::post};
/// use idem_runtime::http::{Caller, IdempotencyLayer};
/// use idem_runtime::{MemoryStore, Policy};
/// use tower_service::Service;
///
/// async fn pay(body: String) -> String {
///     format!("{body} cents are paid")
/// }
///
/// const PAYMENTS: Policy = Policy::new(Duration::from_secs(24 * 3600));
///
/// let caller = Caller::by(|request| Some(request.headers.get("x-customer")?.to_str().ok()?.to_owned()));
/// let layer = IdempotencyLayer::new(&MemoryStore::new(), PAYMENTS, caller).max_body_bytes(64 * 1024);
/// let mut app: Router = Router::new().route("/payments", post(pay)).layer(layer);
///
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let mut send = async |key: &str, body: &'static str| {
///     let request = Request::post("/payments").header("x-customer", "alice").header("idempotency-key", key);
///     Service::call(&mut app, request.body(Body::from(body)).unwrap()).await.unwrap()
/// };
/// assert!(!send("order-1", "500").await.headers().contains_key("idempotent-replayed"));
/// assert_eq!(send("order-1", "500").await.headers()["idempotent-replayed"], "true");
/// // Another payload under the same key.
/// assert_eq!(send("order-1", "900").await.status(), 422);
/// # });
/// # }
/// ```
#[derive(Clone)]
pub struct IdempotencyLayer(pub(super) Arc<Settings>);

impl IdempotencyLayer {
    /// Longest request body that is read (default: 1 MiB).
    pub const DEFAULT_MAX_BODY_BYTES: usize = 1024 * 1024;
    /// Time limit for reading a request's body (default: 30 s).
    pub const DEFAULT_BODY_DEADLINE: Duration = Duration::from_secs(30);
    /// Limit of keys in flight (default: 1024).
    pub const DEFAULT_MAX_IN_FLIGHT: u32 = 1024;

    /// Creates a layer that records in `store`. The layer covers POST and PATCH, by the rules of [`Profile::ietf`].
    ///
    /// The policy's [`missing_key`](Policy::missing_key) decides whether a key is required (default) or optional.
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
            separate_hosts: false,
            header: HeaderName::from_static("idempotency-key"),
            marker: HeaderName::from_static("idempotent-replayed"),
            methods: None,
            covers: None,
            required: None,
            key_format: None,
            fingerprint_headers: Vec::new(),
            fingerprint_members: None,
            max_body_bytes: Self::DEFAULT_MAX_BODY_BYTES,
            body_deadline: Self::DEFAULT_BODY_DEADLINE,
            stream_digested: false,
            recording: None,
            replay_headers: None,
            reconcile: None,
            on_problem: None,
            problem_base: "urn:idem:http:".to_owned(),
            carry: None,
            tasks: Arc::new(HandlerTasks::new(Self::DEFAULT_MAX_IN_FLIGHT, None)),
        }))
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// Sets the rules of a protocol (default: `Profile::ietf()`).
    ///
    /// # Panics
    /// If the policy violates these rules: its `ttl` is below the minimum of the profile, or it has `on_store_error =
    /// run` although the profile fails closed.
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

    /// Sets the scope of the keys of this layer (default: the route's template): routes with one scope share their
    /// keys. Without a scope, and without a known template (that is, without axum), all routes share their keys. If all
    /// routes share their keys, the layer refuses a request whose key was used on another path: the layer treats it as
    /// another request under a used key.
    ///
    /// # Panics
    /// If the scope has more than 200 bytes, is empty, holds a `/` or a control character, or begins with `idem::`.
    #[must_use]
    pub fn scope(self, scope: impl Into<String>) -> Self {
        let scope = scope.into();
        assert!(is_scope(&scope), "a scope has 1 to 200 bytes, without `/` and control characters: {scope:?}");
        assert!(!is_reserved(&scope), "scopes that begin with `idem::` belong to the library: {scope:?}");
        self.with(|it| it.scope = Some(scope))
    }

    /// Keeps the keys of each host apart (default: no): the same key on another host is another operation. Use this if
    /// one server serves several tenants under several hosts, and a [`Caller`] is unique only within its tenant.
    ///
    /// The host is `:authority` in HTTP/2 and `Host` in HTTP/1.1, in lower case and without the ports 80 and 443. A
    /// request that names no host, or several, gets 400. Behind a proxy, the layer uses the host that the proxy sends.
    #[must_use]
    pub fn separate_hosts(self, separate_hosts: bool) -> Self {
        self.with(|it| it.separate_hosts = separate_hosts)
    }

    /// Sets the methods that the layer covers (default: POST and PATCH, and PUT under [`Profile::ucp`]). Requests with
    /// other methods pass to the handler.
    #[must_use]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|it| it.methods = Some(methods.into_iter().collect()))
    }

    /// Selects, among the requests with a covered method ([`methods`](IdempotencyLayer::methods)), the requests that
    /// the layer covers (default: all but the profile's `reads`). Other requests pass to the handler, with or without a
    /// key.
    #[must_use]
    pub fn covers(self, covers: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|it| it.covers = Some(Arc::new(covers)))
    }

    /// Selects the covered requests that need a key (default: as the policy's `missing_key` decides). Other requests
    /// may have no key; a request without a key runs unprotected.
    #[must_use]
    pub fn required(self, required: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|it| it.required = Some(Arc::new(required)))
    }

    /// Sets the field that holds the key (default: `Idempotency-Key`).
    #[must_use]
    pub fn header(self, header: HeaderName) -> Self {
        self.with(|it| it.header = header)
    }

    /// Sets the form of keys: a request whose key `accepts` refuses gets 400 (default: any printable text). `accepts`
    /// gets the text of the key, without its quotes. The profile's [`min_key_chars`](super::Profile::min_key_chars) and
    /// the limit of 255 characters apply, too.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::http::{Caller, IdempotencyLayer};
    /// # use idem_runtime::{MemoryStore, Policy};
    /// # let policy = Policy::new(Duration::from_secs(3600));
    /// let layer = IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single())
    ///     .key_format(|key| key.len() == 36 && key.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit()));
    /// ```
    #[must_use]
    pub fn key_format(self, accepts: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.with(|it| it.key_format = Some(Arc::new(accepts)))
    }

    /// Sets the field that marks a replay (default: `Idempotent-Replayed`).
    #[must_use]
    pub fn replay_marker(self, marker: HeaderName) -> Self {
        self.with(|it| it.marker = marker)
    }

    /// Adds headers to the payload: a request with the same key and another value of such a header is refused as
    /// another request (default: none). The name `Host` also selects `:authority` of HTTP/2; see
    /// [`separate_hosts`](IdempotencyLayer::separate_hosts).
    #[must_use]
    pub fn fingerprint_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.with(|it| it.fingerprint_headers = names.into_iter().collect())
    }

    /// Compares only these members of a body that is a JSON object (default: the whole body), so that a retry may have
    /// another time stamp, for example. Members of inner objects can't be chosen alone.
    ///
    /// All bodies are then compared [as JSON](super::Equality::Json), under the limits of that comparison: a body that
    /// nests deeper than 400 levels, or repeats a name, gets 400. A body that is no object is compared as a whole. A
    /// body that is not JSON is compared by its bytes. A body never [streams](IdempotencyLayer::stream_digested). Path,
    /// query and headers are still compared.
    ///
    /// A change of this setting changes fingerprints: a retry of a request from before the change gets 422.
    #[must_use]
    pub fn fingerprint_members(self, members: JsonMembers) -> Self {
        self.with(|it| it.fingerprint_members = Some(members))
    }

    /// Sets the longest request body that is read (default: 1 MiB). A longer body gets 413. If the request states its
    /// length, the layer answers before it reads the body.
    #[must_use]
    pub fn max_body_bytes(self, max_body_bytes: usize) -> Self {
        self.with(|it| it.max_body_bytes = max_body_bytes)
    }

    /// Sets the time limit for reading a request's body (default: 30 s). A slower request gets 408. No key is reserved
    /// before the body is read. For a body that [streams](IdempotencyLayer::stream_digested), the limit applies to the
    /// time in which its reader waits for the client; after this time the reader gets an error, and nothing is
    /// recorded.
    #[must_use]
    pub fn body_deadline(self, body_deadline: Duration) -> Self {
        self.with(|it| it.body_deadline = body_deadline)
    }

    /// Streams a body to the handler if `Content-Digest` has a `sha-256`, and the body is too long to be read or its
    /// length is not stated (default: no; the layer reads every body, and a body that is too long gets 413). The
    /// `sha-256` then enters the fingerprint in place of the body.
    ///
    /// The digest, and a `sha-512` next to it, are checked while the body streams. If a digest does not match, the
    /// reader of the body gets an error, the client gets 400, and nothing is recorded. Effects that the handler had
    /// until then remain. If the handler does not read the body to its end, the digest is not checked.
    #[must_use]
    pub fn stream_digested(self, stream_digested: bool) -> Self {
        self.with(|it| it.stream_digested = stream_digested)
    }

    /// Decides how a response is recorded if its handler did not set a [`Recording`] (default: as the profile decides).
    /// `recording` is called with the head, and again with the trailers if there are any.
    #[must_use]
    pub fn recording(
        self,
        recording: impl Fn(&http::response::Parts, &HeaderMap) -> Recording + Send + Sync + 'static,
    ) -> Self {
        self.with(|it| it.recording = Some(Arc::new(recording)))
    }

    /// Selects the headers of a response that are recorded (default: all). Some headers are never recorded: cookies,
    /// challenges, dates, rate limits, and headers of one connection.
    #[must_use]
    pub fn replay_headers(self, replays: impl Fn(&HeaderName) -> bool + Send + Sync + 'static) -> Self {
        self.with(|it| it.replay_headers = Some(Arc::new(replays)))
    }

    /// Sets the reconciler, which asks the outside world about a request that was cut off (default: none; the policy's
    /// [`on_crash`](Policy::on_crash) decides). With a reconciler, a crash, a time limit, a cancelled handler and
    /// [`Recording::Interrupt`] leave the effect of a request in doubt, and the next request with the key asks
    /// `reconcile` before the handler may run; see [`Reconciliation`].
    ///
    /// `reconcile` gets the head of that request, without the body. The extensions of the head hold the
    /// [`IdempotencyKey`](super::IdempotencyKey). [`current`](crate::current) returns the attempt, so `reconcile` can
    /// make the same child keys as the handler. After [`Done`](Reconciliation::Done) the response is recorded, and all
    /// requests get it. After [`Unknown`](Reconciliation::Unknown) or an error the client gets 409 `unresolved` with
    /// `Retry-After`. The error itself is dropped, so write it to your own log.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use http::Response;
    /// use idem_runtime::http::{Caller, IdempotencyLayer};
    /// use idem_runtime::{Error, MemoryStore, Policy, Reconciliation, current};
    /// # async fn find_payment(_: String) -> Option<String> { None }
    ///
    /// # let policy = Policy::new(Duration::from_secs(3600));
    /// let layer = IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single()).reconcile(|_head| async {
    ///     let reference = current()?.child_key("payment");
    ///     Ok::<_, Error>(match find_payment(reference).await {
    ///         Some(receipt) => Reconciliation::Done(Response::new(receipt.into())),
    ///         None => Reconciliation::Unknown { ask_again: Duration::from_secs(30) },
    ///     })
    /// });
    /// ```
    #[must_use]
    pub fn reconcile<F, A, E>(self, reconcile: F) -> Self
    where
        F: Fn(Parts) -> A + Send + Sync + 'static,
        A: Future<Output = Result<Reconciliation<Response<Bytes>>, E>> + Send + 'static,
    {
        let reconcile: ReconcileRule = Arc::new(move |head| {
            let asking = reconcile(head);
            Box::pin(async { asking.await.ok() })
        });
        self.with(|it| {
            it.policy = it.policy.reconciling();
            it.reconcile = Some(reconcile);
        })
    }

    /// Sets the address of your pages about the problems, such as `https://api.example.com/problems/`. The `type` of a
    /// problem is this address followed by its [name](super::ProblemKind::name), and the header `Link` of the response
    /// points to this `type` (default: `urn:idem:http:`, and no `Link`).
    #[must_use]
    pub fn problem_base(self, base: impl Into<String>) -> Self {
        self.with(|it| it.problem_base = base.into())
    }

    /// Changes or replaces the response to a problem (default: no change).
    #[must_use]
    pub fn on_problem(self, hook: impl Fn(&Problem, &mut Response<Bytes>) + Send + Sync + 'static) -> Self {
        self.with(|it| it.on_problem = Some(Arc::new(hook)))
    }

    /// Sets the limit of keys in flight (default: 1024). A key is in flight as soon as the layer begins to read the
    /// body of its first request. Once the limit is reached, a request with another key gets 503.
    ///
    /// Concurrent requests with one key are one key in flight, because at most one of these requests runs its handler.
    /// The number of duplicates (requests in addition to the first request of a key) has the same limit. So the layer
    /// holds at most twice `max_in_flight` requests, each with a body of up to
    /// [`max_body_bytes`](IdempotencyLayer::max_body_bytes).
    #[must_use]
    pub fn max_in_flight(self, max_in_flight: u32) -> Self {
        self.with(|it| it.tasks = Arc::new(it.tasks.with_limit(max_in_flight)))
    }

    /// Sets the limit of requests in flight of one caller, including duplicates (default: a quarter of `max_in_flight`,
    /// at least 1). Once the limit is reached, another request of this caller gets 429. This limit has no effect with
    /// [`Caller::single`], which distinguishes no callers.
    #[must_use]
    pub fn max_in_flight_per_caller(self, max_in_flight: u32) -> Self {
        self.with(|it| it.tasks = Arc::new(it.tasks.with_caller_limit(max_in_flight)))
    }

    /// Wraps the task in which a handler runs (default: no wrapper). `carry` is called in the request's own task, so it
    /// can pass on task-locals that outer layers have set. The current tracing span is passed on without this setting,
    /// but thread-locals and task-locals of outer layers are not.
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
    pub fn carry(self, carry: impl Fn(HandlerTask) -> HandlerTask + Send + Sync + 'static) -> Self {
        self.with(|it| it.carry = Some(Arc::new(carry)))
    }

    /// Returns the contract for clients, as text and as a part of an `OpenAPI` document. The contract states the
    /// lifetime and form of keys, the statuses, and the replays.
    pub fn describe(&self) -> Description {
        Description::of(&self.0)
    }

    /// Ends the work of the layer. From this call on, the layer refuses requests with a key (503). Waits for requests
    /// in flight, even if their clients have gone, and for the late writes of the store.
    ///
    /// # Cancel safety
    /// Cancel safe: new requests stay refused.
    pub async fn drain(&self) {
        self.0.tasks.drain().await;
        self.0.store.flush().await;
    }

    /// Returns the number of requests with a key in flight.
    pub fn in_flight(&self) -> usize {
        self.0.tasks.count()
    }

    /// Answers `request`, for servers without tower: with the response of `handler`, with a recorded response, or with
    /// a problem. The response's extensions hold the [`Outcome`](crate::Outcome) of the call.
    ///
    /// Limit the length of the body, and the time for reading it, before this call.
    ///
    /// # Errors
    /// The error of `handler`, after which the key is free.
    ///
    /// # Panics
    /// If `handler` panics.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the handler. The cancellation frees the key, or, under `on_crash = fail`, interrupts
    /// an operation that has begun. Spawn the future, so that the handler outlives its client.
    pub async fn respond<F, H, R, E>(&self, request: Request<Bytes>, handler: F) -> Result<Response<ResponseBody<R>>, E>
    where
        F: FnOnce(Request<Bytes>) -> H,
        H: Future<Output = Result<Response<R>, E>>,
        R: Body<Data = Bytes>,
    {
        let settings = &*self.0;
        let (head, body) = request.into_parts();
        let mut asked = match settings.look(&head, Some(body.len() as u64)) {
            Classification::Pass => {
                return Ok(handler(Request::from_parts(head, body)).await?.map(ResponseBody::as_it_comes));
            }
            Classification::Refuse(refusal) => return Ok(settings.refuse(refusal)),
            Classification::Protect(asked) => asked,
        };
        let place = match settings.enter(&asked) {
            Ok(place) => place,
            Err(problem) => return Ok(settings.refuse(asked.refusal(problem))),
        };
        let print = match settings.print(&head, &asked, &body) {
            Ok(print) => print,
            Err(problem) => return Ok(settings.refuse(asked.refusal(problem))),
        };
        let head = asked.mark(head);
        let question = settings.question(&head);
        let request = Request::from_parts(head, body);
        let keyed = PreparedRequest { asked, print, claim: None, question, on_error: ErrorOrigin::Handler, place };
        Settings::run(settings, keyed, Gate::open(), move || handler(request)).await
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

type ResponseFuture<R, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<R>>, E>> + Send>>;

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
    type Future = ResponseFuture<R, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // This call takes the service that is ready, and leaves its clone for the next call.
        let next = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, next);
        let (head, body) = request.into_parts();
        match self.settings.look(&head, body.size_hint().exact()) {
            Classification::Pass => {
                let passed = inner.call(Request::from_parts(head, RequestBody::as_it_comes(body)));
                Box::pin(async move { Ok(passed.await?.map(ResponseBody::as_it_comes)) })
            }
            Classification::Refuse(refusal) => {
                let answer = self.settings.refuse(refusal);
                Box::pin(async move { Ok(answer) })
            }
            Classification::Protect(mut asked) => {
                let settings = Arc::clone(&self.settings);
                Box::pin(async move {
                    // A request is in flight while its body is being read, because uploads take memory.
                    let place = match settings.enter(&asked) {
                        Ok(place) => place,
                        Err(problem) => return Ok(settings.refuse(asked.refusal(problem))),
                    };
                    let (body, print, claim) = match settings.read(&head, &asked, body).await {
                        Ok(read) => read,
                        Err(problem) => return Ok(settings.refuse(asked.refusal(problem))),
                    };
                    let (gate, busy) = (Gate::closed(), asked.busy());
                    let head = asked.mark(head);
                    let question = settings.question(&head);
                    let request = Request::from_parts(head, body);
                    let keyed =
                        PreparedRequest { asked, print, claim, question, on_error: ErrorOrigin::Service, place };
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
