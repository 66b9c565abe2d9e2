//! The client side: sends keys, and retries requests that are safe to retry.
//!
//! ```
//! # use std::convert::Infallible;
//! # use bytes::Bytes;
//! # use tower_service::Service;
//! use http::{Request, Response};
//! use idem_runtime::http::client::{CallName, RetryLayer};
//! use tower_layer::Layer;
//!
//! # #[derive(Clone)]
//! # struct Client;
//! # impl Service<Request<Bytes>> for Client {
//! #     type Response = Response<Bytes>;
//! #     type Error = Infallible;
//! #     type Future = std::future::Ready<Result<Response<Bytes>, Infallible>>;
//! #     fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
//! #         std::task::Poll::Ready(Ok(()))
//! #     }
//! #     fn call(&mut self, request: Request<Bytes>) -> Self::Future {
//! #         assert!(request.headers().contains_key("idempotency-key"));
//! #         std::future::ready(Ok(Response::new(Bytes::new())))
//! #     }
//! # }
//! # let client = Client;
//! let mut client = RetryLayer::new().layer(client);
//! let request = Request::post("https://bank.example/charges").extension(CallName::new("charge"));
//! let charging = client.call(request.body(Bytes::from("amount=1"))?);
//! # drop(charging);
//! # Ok::<_, http::Error>(())
//! ```

use std::borrow::Cow;
use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{self, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode, Uri};
use tower_layer::Layer;
use tower_service::Service;

use crate::clock::{Clock, SystemClock};
use crate::engine::current;
use crate::policy::Backoff;

/// The name of a call inside of an idempotent handler: an extension of the request.
///
/// The key that is sent derives from this name ([`Attempt::child_key`](crate::Attempt::child_key)), so every attempt of
/// the handler sends the same key. Each call of a handler needs its own name. A call in a loop names its item:
/// `format!("charge {}", item.id)`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CallName(Cow<'static, str>);

impl CallName {
    /// A name for one call of the handler.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self(name.into())
    }
}

/// Reason why a request has no response.
#[derive(Debug)]
#[non_exhaustive]
pub enum RetryError<E> {
    /// The request was made inside of an idempotent handler, and no [`CallName`] identifies the call. Nothing was sent:
    /// with a new key for each attempt, an attempt after a crash would repeat the call.
    Unnamed {
        /// The method of the request.
        method: Method,
        /// The target of the request.
        uri: Uri,
    },
    /// The client's error of the last try.
    Client(E),
}

impl<E: fmt::Display> fmt::Display for RetryError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The query is left out: it may hold secrets.
            Self::Unnamed { method, uri } => write!(
                f,
                "{method} {} was called inside of an idempotent handler and has no name, so that it has no key which is the \
                 same on every attempt; nothing was sent; add the extension `CallName` to the request",
                uri.path()
            ),
            Self::Client(error) => write!(f, "the request has no response: {error}"),
        }
    }
}

// Most stacks use boxed errors, which do not implement `Error`. So the text contains their message, and there is no
// `source`.
impl<E: fmt::Debug + fmt::Display> std::error::Error for RetryError<E> {}

#[derive(Clone, Debug)]
struct Settings {
    header: HeaderName,
    methods: Vec<Method>,
    max_tries: u32,
    max_pause: Duration,
    backoff: Backoff,
    quoted: bool,
    clock: Arc<dyn Clock>,
}

/// Gives every request a key, and repeats the request with the same key until a final response arrives.
///
/// - A request that has a key keeps it. Inside of an idempotent handler the key derives from the handler's key and the
///   request's [`CallName`]. Anywhere else it is a random UUID.
/// - The layer retries requests without a response, and the statuses 408, 425, 429, 500, 502, 503, 504, and 409 with
///   `Retry-After`, which means that the first try still runs. Every other response is final.
/// - A request without a key, such as a GET, is sent once.
///
/// The request is cloned for each try, so its body must be `Clone`, such as `http_body_util::Full<Bytes>`.
#[derive(Clone, Debug)]
pub struct RetryLayer(Arc<Settings>);

impl Default for RetryLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl RetryLayer {
    /// Creates a layer that gives keys to POST and PATCH requests and makes up to 5 tries.
    pub fn new() -> Self {
        Self(Arc::new(Settings {
            header: HeaderName::from_static("idempotency-key"),
            methods: vec![Method::POST, Method::PATCH],
            max_tries: 5,
            max_pause: Duration::from_secs(60),
            backoff: Backoff::new(Duration::from_millis(200), Duration::from_secs(10)),
            quoted: false,
            clock: Arc::new(SystemClock::default()),
        }))
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// The field that holds the key (default: `Idempotency-Key`).
    #[must_use]
    pub fn header(self, header: HeaderName) -> Self {
        self.with(|it| it.header = header)
    }

    /// The methods whose requests get a key (default: POST and PATCH).
    #[must_use]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|it| it.methods = methods.into_iter().collect())
    }

    /// Sets the maximum number of tries of a request, including the first (default: 5).
    #[must_use]
    pub fn max_tries(self, max_tries: u32) -> Self {
        self.with(|it| it.max_tries = max_tries)
    }

    /// Sets the longest pause that a server can ask for with `Retry-After` (default: 60 s). A response that asks for
    /// more is final.
    #[must_use]
    pub fn max_pause(self, max_pause: Duration) -> Self {
        self.with(|it| it.max_pause = max_pause)
    }

    /// Sets the pauses for responses that ask for none (default: from 200 ms to 10 s).
    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Self {
        self.with(|it| it.backoff = backoff)
    }

    /// Writes keys in quotes, as the draft of the IETF requires (default: no, because most services expect bare keys).
    #[must_use]
    pub fn quoted(self, quoted: bool) -> Self {
        self.with(|it| it.quoted = quoted)
    }

    /// Sets the source of time and randomness (default: the machine's).
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        self.with(|it| it.clock = Arc::new(clock))
    }
}

impl Settings {
    /// Gives `request` a key if it needs one. Returns whether the request has a key.
    fn give_key<B>(&self, request: &mut Request<B>) -> Result<bool, CallIsUnnamed> {
        if request.headers().contains_key(&self.header) {
            return Ok(true);
        }
        if !self.methods.contains(request.method()) {
            return Ok(false);
        }
        let key = match current() {
            Ok(attempt) => {
                let name = request.extensions().get::<CallName>().ok_or(CallIsUnnamed)?;
                attempt.child_key(&name.0)
            }
            Err(_) => uuid(self.clock.entropy()),
        };
        let value = if self.quoted { format!("\"{key}\"") } else { key };
        // Both forms of the key are UUIDs, which are valid header values.
        if let Ok(value) = HeaderValue::try_from(value) {
            request.headers_mut().insert(self.header.clone(), value);
        }
        Ok(true)
    }

    /// Returns the pause before a request with this response is retried; `None` if the response is final.
    fn pause<B>(&self, response: &Response<B>, tries: u32) -> Option<Duration> {
        let asked = response.headers().get(header::RETRY_AFTER).map(|value| value.to_str().ok()?.trim().parse().ok());
        let pause = match (response.status(), asked) {
            // A 409 without `Retry-After` has another cause, which a retry does not change.
            (StatusCode::CONFLICT, Some(Some(seconds))) => Duration::from_secs(seconds),
            (
                StatusCode::REQUEST_TIMEOUT
                | StatusCode::TOO_EARLY
                | StatusCode::TOO_MANY_REQUESTS
                | StatusCode::INTERNAL_SERVER_ERROR
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT,
                asked,
            ) => asked.flatten().map_or_else(|| self.backoff(tries), Duration::from_secs),
            _ => return None,
        };
        (pause <= self.max_pause).then_some(pause)
    }

    fn backoff(&self, tries: u32) -> Duration {
        let [seed, ..] = self.clock.entropy().to_le_bytes();
        self.backoff.after(tries, seed.into())
    }
}

struct CallIsUnnamed;

/// Formats random bits as a UUID of version 4.
fn uuid(random: u128) -> String {
    let bits = random & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

impl<S> Layer<S> for RetryLayer {
    type Service = Retry<S>;

    fn layer(&self, inner: S) -> Retry<S> {
        Retry { inner, settings: Arc::clone(&self.0) }
    }
}

/// The service of a [`RetryLayer`].
#[derive(Clone, Debug)]
pub struct Retry<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S, B, R> Service<Request<B>> for Retry<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Clone + Send + 'static,
    R: Send + 'static,
{
    type Response = Response<R>;
    type Error = RetryError<S::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, RetryError<S::Error>>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(RetryError::Client)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // The call uses the service that is ready; the clone takes its place.
        let next = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, next);
        let settings = Arc::clone(&self.settings);
        // Computed here, while the handler's attempt is the current one: the future may be polled elsewhere.
        let has_key = settings.give_key(&mut request);
        Box::pin(async move {
            let has_key = has_key.map_err(|CallIsUnnamed| RetryError::Unnamed {
                method: request.method().clone(),
                uri: request.uri().clone(),
            })?;
            let mut tries = 1;
            loop {
                let is_last = !has_key || tries >= settings.max_tries;
                if is_last {
                    return inner.call(request).await.map_err(RetryError::Client);
                }
                let answered = inner.call(request.clone()).await;
                let pause = match &answered {
                    Ok(response) => settings.pause(response, tries),
                    Err(_) => Some(settings.backoff(tries)),
                };
                let Some(pause) = pause else { return answered.map_err(RetryError::Client) };
                tracing::debug!(tries, ?pause, "a request is tried again with the same key");
                // The connection is free only after its response is dropped.
                drop(answered);
                settings.clock.sleep(pause).await;
                tries += 1;
                poll_fn(|cx| inner.poll_ready(cx)).await.map_err(RetryError::Client)?;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_keys_are_uuids_of_version_4() {
        assert_eq!(uuid(0), "00000000-0000-4000-8000-000000000000");
        assert_eq!(uuid(u128::MAX), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }
}
