//! The layer for clients, and the methods that set its options.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use http::header::HeaderName;
use tower_layer::Layer;

use super::budget::{RetryBudget, TokenBucket};
use super::service::Retry;
use super::settings::Settings;
use crate::clock::Clock;
use crate::policy::Backoff;

/// Gives every request a key, and repeats the request with the same key until a final response arrives.
///
/// The [module](super) describes the keys, the responses that are final, and the bodies. The body of a request must be
/// `Clone`. The body of a response can be any [`http_body::Body`] of [`Bytes`](bytes::Bytes). The layer works in every
/// task, and its future is `Send` if the future of the client is `Send`.
///
/// ```
/// # use std::convert::Infallible;
/// # use std::future::{Ready, ready};
/// # use std::task::{Context, Poll};
/// # use std::time::Duration;
/// # use bytes::Bytes;
/// # use http_body_util::Full;
/// use http::{Request, Response, StatusCode};
/// use idem_runtime::http::client::{CallKey, RetryBudget, RetryLayer};
/// use idem_runtime::policy::Backoff;
/// use tower_layer::Layer;
/// use tower_service::Service;
///
/// /// A bank that is overloaded at the first request.
/// #[derive(Clone, Default)]
/// struct Bank {
///     keys: Vec<String>,
/// }
///
/// impl Service<Request<Full<Bytes>>> for Bank {
///     type Response = Response<Full<Bytes>>;
///     type Error = Infallible;
///     type Future = Ready<Result<Self::Response, Infallible>>;
///     # fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> { Poll::Ready(Ok(())) }
///     // …
///     fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
///         self.keys.push(request.headers()["idempotency-key"].to_str().unwrap().to_owned());
///         // Each try has the key of the first one.
///         assert!(self.keys.iter().all(|key| *key == self.keys[0]));
///         let status = if self.keys.len() == 1 { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::CREATED };
///         ready(Ok(Response::builder().status(status).body(Full::default()).unwrap()))
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let layer = RetryLayer::new()
///     .require_key(true)
///     .max_tries(3)
///     .backoff(Backoff::new(Duration::from_millis(1), Duration::from_millis(10)))
///     .budget(RetryBudget::unlimited());
/// let mut client = layer.layer(Bank::default());
/// // The key that the application has stored with the order.
/// let request = Request::post("https://bank.example/charges").extension(CallKey::new("order-1")?);
/// let response = client.call(request.body(Full::from("amount=1"))?).await?;
/// assert_eq!(response.status(), StatusCode::CREATED);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, Default)]
pub struct RetryLayer(Arc<Settings>);

impl RetryLayer {
    /// Creates a layer that gives keys to POST and PATCH requests and makes up to 5 tries.
    pub fn new() -> Self {
        Self::default()
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// Sets the field that holds the key (default: `Idempotency-Key`).
    #[must_use]
    pub fn header(self, header: HeaderName) -> Self {
        self.with(|it| it.header = header)
    }

    /// Sets the methods whose requests get a random key if the application gives them no key (default: POST and PATCH).
    /// Requests with a [`CallKey`](super::CallKey) or a [`CallName`](super::CallName) have a key with every method.
    #[must_use]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|it| it.methods = methods.into_iter().collect())
    }

    /// Refuses requests of the [methods](Self::methods) that would get a random key
    /// ([`RetryError::NoKey`](super::RetryError::NoKey); default: no). With this setting the application must store
    /// every key itself, and a handler can't send a request from another task without a name.
    #[must_use]
    pub fn require_key(self, require_key: bool) -> Self {
        self.with(|it| it.requires_key = require_key)
    }

    /// Sets the maximum number of tries of a request, including the first (default: 5).
    #[must_use]
    pub fn max_tries(self, max_tries: u32) -> Self {
        self.with(|it| it.max_tries = max_tries)
    }

    /// Sets the time limit of one try, from the request to the end of the response as far as the layer reads it
    /// (default: none). After a time-out the request is tried again with the same key, although the server may still be
    /// running the first try.
    #[must_use]
    pub fn try_timeout(self, try_timeout: Duration) -> Self {
        self.with(|it| it.try_timeout = Some(try_timeout))
    }

    /// Sets the longest pause that a server can ask for with `Retry-After` (default: 60 s). A response that asks for a
    /// longer pause is returned with [`RetryLimit::Pause`](super::RetryLimit::Pause).
    #[must_use]
    pub fn max_pause(self, max_pause: Duration) -> Self {
        self.with(|it| it.max_pause = max_pause)
    }

    /// Sets the largest body of a response that the layer reads before it returns the response, in bytes (default: 1
    /// MiB). A longer body streams to the application. With 0 every body streams, and a body that breaks off is not
    /// retried.
    #[must_use]
    pub fn max_body_bytes(self, max_body_bytes: usize) -> Self {
        self.with(|it| it.max_body_bytes = max_body_bytes)
    }

    /// Sets the shortest pauses between tries, for responses that ask for no pause or for a shorter pause (default:
    /// from 200 ms to 10 s).
    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Self {
        self.with(|it| it.backoff = backoff)
    }

    /// Sets the share of retries among the requests of this layer (default: 20 %, and a reserve of 100).
    ///
    /// All clones of the layer, layers made from a clone by further settings, and all their services share one budget.
    #[must_use]
    pub fn budget(self, budget: RetryBudget) -> Self {
        self.with(|it| it.bucket = Arc::new(TokenBucket::new(budget)))
    }

    /// Writes keys in quotes, as the draft of the IETF requires (default: no, because most services expect no quotes).
    /// A key that already has quotes stays unchanged. A field that the caller has set also stays unchanged.
    #[must_use]
    pub fn quoted(self, quoted: bool) -> Self {
        self.with(|it| it.quoted = quoted)
    }

    /// Sets the source of time and random numbers (default: the clock and the random numbers of the machine). A date in
    /// `Retry-After` is compared with the wall clock of this source.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        self.with(|it| it.clock = Arc::new(clock))
    }
}

impl<S> Layer<S> for RetryLayer {
    type Service = Retry<S>;

    fn layer(&self, inner: S) -> Retry<S> {
        Retry::new(inner, Arc::clone(&self.0))
    }
}
