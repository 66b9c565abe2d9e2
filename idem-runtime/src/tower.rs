//! A layer for services of tower: each request runs once for its key (feature `tower`).
//!
//! [`OperationLayer`] does for a typed [`Service`] what `#[idempotent]` does for a function. The layer records the
//! response with a codec and replays it; an error frees the key.

use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::engine::{Operation, Reconciler, Reconciliation, Recorder, has_begun_to_wait};
use crate::error::Error;
use crate::key::{Key, KeyError};
use crate::policy::Policy;
use crate::store::Store;
use crate::sync::{Mutex, lock};

/// Runs each request of a service once for its key, and replays the recorded response to every duplicate.
///
/// The response must implement `Serialize` and `DeserializeOwned`. The error of the service must implement
/// `From<idem_runtime::Error>`, as boxed errors do. [`observe`](crate::observe) around `call` returns the action for
/// the message.
///
/// - *Readiness* is the readiness of the inner service. A request holds this readiness (the permit of a concurrency
///   limit, for example) until its body runs. The request gives the readiness back if the answer is a replay, or when
///   the request starts to wait for another attempt. So a concurrency limit or a buffer inside of this layer counts
///   bodies, and outside of this layer it counts all calls, including replays. If a request reserves the key after such
///   a wait, the request waits for the readiness of the service again before its body runs.
/// - *A middleware that retries* belongs outside of this layer: each try is a separate attempt.
///
/// # Cancel safety
/// As with [`Operation::run`], dropping the future of a response cancels the inner service and frees the key.
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::tower::OperationLayer;
/// use idem_runtime::{Error, Key, MemoryStore, Policy, observe};
/// # use std::convert::Infallible;
/// # use std::task::{Context, Poll};
/// use tower_layer::Layer;
/// use tower_service::Service;
///
/// const SHIPPING: Policy = Policy::new(Duration::from_secs(7 * 86_400));
///
/// #[derive(Clone)]
/// struct Ship;
///
/// struct Order {
///     id: u64,
/// }
///
/// impl Service<Order> for Ship {
///     type Response = String;
///     type Error = Error;
///     type Future = std::future::Ready<Result<String, Error>>;
///     # fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> { Poll::Ready(Ok(())) }
///     // …
///     fn call(&mut self, order: Order) -> Self::Future {
///         std::future::ready(Ok(format!("parcel for {}", order.id)))
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = MemoryStore::new();
/// let layer = OperationLayer::new(&store, SHIPPING, |order: &Order| Key::new("shop::ship", order.id));
/// let mut service = layer.layer(Ship);
/// for replayed in [false, true] {
///     std::future::poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
///     let (parcel, outcome) = observe(service.call(Order { id: 42 })).await;
///     assert_eq!((parcel.unwrap().as_str(), outcome.replayed()), ("parcel for 42", replayed));
/// }
/// # });
/// ```
#[derive(Clone)]
pub struct OperationLayer<O> {
    operation: O,
}

impl OperationLayer<()> {
    /// Creates a layer that records in `store`. `key` returns the key of a request.
    pub fn new<Req, S, K>(
        store: &S,
        policy: Policy,
        key: K,
    ) -> OperationLayer<impl Fn(&Req) -> Operation + Clone + Send + Sync + 'static + use<Req, S, K>>
    where
        S: Store + ?Sized,
        K: Fn(&Req) -> Result<Key, KeyError> + Clone + Send + Sync + 'static,
    {
        let store = store.handle();
        OperationLayer::of(move |request: &Req| Operation::new(&store, key(request), policy))
    }
}

impl<O> OperationLayer<O> {
    /// Creates a layer that runs the operation that `operation` returns for a request. So each request can have a
    /// store, a policy, a fingerprint, a codec, recorded errors or a reconciler of its own.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::tower::OperationLayer;
    /// # use idem_runtime::{Error, Key, MemoryStore, Operation, Policy, Reconciliation, current};
    /// # const SHIPPING: Policy = Policy::new(Duration::from_secs(7 * 86_400));
    /// # #[derive(serde::Serialize)]
    /// # struct Order { id: u64 }
    /// # async fn find_parcel(_: String) -> Result<Reconciliation<String>, Error> { Ok(Reconciliation::NotDone) }
    /// # let store = MemoryStore::new();
    /// let layer = OperationLayer::of(move |order: &Order| {
    ///     Operation::new(&store, Key::new("shop::ship", order.id), SHIPPING)
    ///         .fingerprint(order)
    ///         .uncertain_errors()
    ///         .reconcile(async { find_parcel(current()?.child_key("parcel")).await })
    /// });
    /// # let _ = layer;
    /// ```
    pub fn of<Req>(operation: O) -> Self
    where
        O: OperationSource<Req>,
    {
        Self { operation }
    }
}

/// Source of the operation of a request, for an [`OperationLayer`]: usually a closure.
pub trait OperationSource<Req>: Clone {
    /// Operation with its recorder and its reconciler.
    type Operation;

    /// Returns the operation of `request`.
    fn operation(&self, request: &Req) -> Self::Operation;
}

impl<Req, O, P> OperationSource<Req> for O
where
    O: Fn(&Req) -> P + Clone,
{
    type Operation = P;

    fn operation(&self, request: &Req) -> P {
        self(request)
    }
}

/// [`Operation`] with any recorder, with a reconciler or without one. Other types can't implement this trait.
pub trait RunOperation<T, E>: Sealed {
    /// Runs `body` as [`Operation::run`].
    #[doc(hidden)]
    fn run_once<B>(self, body: B) -> impl Future<Output = Result<T, E>> + Send
    where
        B: Future<Output = Result<T, E>> + Send;
}

/// Supertrait that only types of this library have.
pub trait Sealed {}

impl<R, P> Sealed for Operation<R, P> {}

impl<T, E, R> RunOperation<T, E> for Operation<R>
where
    R: Recorder<T, E> + Send,
    T: Send,
    E: From<Error> + Send,
{
    fn run_once<B>(self, body: B) -> impl Future<Output = Result<T, E>> + Send
    where
        B: Future<Output = Result<T, E>> + Send,
    {
        self.run(body)
    }
}

impl<T, E, R, F> RunOperation<T, E> for Operation<R, Reconciler<F>>
where
    R: Recorder<T, E> + Send,
    T: Send,
    E: From<Error> + Send,
    F: Future<Output = Result<Reconciliation<T>, E>> + Send,
{
    fn run_once<B>(self, body: B) -> impl Future<Output = Result<T, E>> + Send
    where
        B: Future<Output = Result<T, E>> + Send,
    {
        self.run(body)
    }
}

impl<O> fmt::Debug for OperationLayer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperationLayer")
    }
}

impl<S, O: Clone> Layer<S> for OperationLayer<O> {
    type Service = OperationService<S, O>;

    fn layer(&self, inner: S) -> Self::Service {
        OperationService { inner, operation: self.operation.clone() }
    }
}

/// A service behind an [`OperationLayer`].
#[derive(Clone)]
pub struct OperationService<S, O> {
    inner: S,
    operation: O,
}

impl<S: fmt::Debug, O> fmt::Debug for OperationService<S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, O, Req> Service<Req> for OperationService<S, O>
where
    S: Service<Req> + Clone + Send + 'static,
    S::Response: Send + 'static,
    S::Error: From<Error> + Send + 'static,
    S::Future: Send,
    O: OperationSource<Req>,
    O::Operation: RunOperation<S::Response, S::Error> + 'static,
    Req: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = OperationFuture<S::Response, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let operation = self.operation.operation(&request);
        // The instance that `poll_ready` has polled is ready; a clone may not be ready.
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        let waiting = Arc::new(Mutex::new(Some(InnerService { service: ready, is_ready: true })));
        let inner = Arc::clone(&waiting);
        let body = async move {
            let InnerService { mut service, is_ready } = lock(&inner).take().expect("taken by the body only");
            if !is_ready {
                poll_fn(|cx| service.poll_ready(cx)).await?;
            }
            service.call(request).await
        };
        let call = operation.run_once(body);
        OperationFuture(Box::pin(ServiceCall { call, waiting }))
    }
}

/// The inner service of a call whose body has not begun.
struct InnerService<S> {
    service: S,
    is_ready: bool,
}

pin_project! {
    /// A call that holds the readiness of its service until its body begins, or until it waits for another attempt.
    struct ServiceCall<F, S> {
        #[pin]
        call: F,
        waiting: Arc<Mutex<Option<InnerService<S>>>>,
    }
}

impl<F: Future, S: Clone> Future for ServiceCall<F, S> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        // Clears the thread's note that a call has begun to wait: a call that was polled earlier may have left this
        // note.
        let _ = has_begun_to_wait();
        let polled = this.call.poll(cx);
        if has_begun_to_wait()
            && let Some(inner) = &mut *lock(this.waiting)
            && inner.is_ready
        {
            // The call starts to wait. A clone, which holds no permit, replaces the ready instance, whose drop returns
            // the permit.
            let clone = inner.service.clone();
            *inner = InnerService { service: clone, is_ready: false };
        }
        polled
    }
}

/// The future of a response.
#[must_use = "futures do nothing unless polled"]
pub struct OperationFuture<T, E>(Pin<Box<dyn Future<Output = Result<T, E>> + Send>>);

impl<T, E> fmt::Debug for OperationFuture<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperationFuture")
    }
}

impl<T, E> Future for OperationFuture<T, E> {
    type Output = Result<T, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}
