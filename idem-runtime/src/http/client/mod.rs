//! The client side: sends keys, and retries requests that are safe to retry.
//!
//! A key makes a payment safe only if the *next* request for the same payment has the same key, even after this process
//! has died. The application therefore makes the key, stores it with the order, and sends the same key again for as
//! long as it has no answer:
//!
//! ```
//! # use std::convert::Infallible;
//! # use bytes::Bytes;
//! # use http_body_util::{BodyExt, Full};
//! # use tower_service::Service;
//! use http::{Request, Response, StatusCode};
//! use idem_runtime::http::client::{CallKey, RetryLayer, RetryLimit};
//! use tower_layer::Layer;
//!
//! # #[derive(Clone)]
//! # struct Bank;
//! # impl Service<Request<Full<Bytes>>> for Bank {
//! #     type Response = Response<Full<Bytes>>;
//! #     type Error = Infallible;
//! #     type Future = std::future::Ready<Result<Response<Full<Bytes>>, Infallible>>;
//! #     fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
//! #         std::task::Poll::Ready(Ok(()))
//! #     }
//! #     fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
//! #         assert!(request.headers().contains_key("idempotency-key"));
//! #         std::future::ready(Ok(Response::new(Full::default())))
//! #     }
//! # }
//! # let bank = Bank;
//! # struct Order { charge_key: Option<String> }
//! # impl Order { fn save(&self) {} }
//! # let mut order = Order { charge_key: None };
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! // 1. Make the key, and store it with the order before the first request.
//! let key = match &order.charge_key {
//!     Some(stored) => CallKey::new(stored.clone())?,
//!     None => CallKey::random(),
//! };
//! order.charge_key = Some(key.as_str().to_owned());
//! order.save();
//!
//! // 2. Send it. The layer repeats the request with this key.
//! let mut client = RetryLayer::new().layer(bank);
//! let request = Request::post("https://bank.example/charges").extension(key);
//! match client.call(request.body(Full::from("amount=1"))?).await {
//!     // The server still runs it, or can't answer: run this function again later. It sends the same key.
//!     Ok(response) if response.extensions().get::<RetryLimit>().is_some() => {}
//!     Ok(response) => assert_eq!(response.status(), StatusCode::OK),
//!     // No answer. The server may have run it: run this function again later.
//!     Err(error) => eprintln!("{error}"),
//! }
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! # Keys
//!
//! The key of a request is the first of these that is present: the header field, the extension [`CallKey`], the
//! extension [`CallName`], a random UUID. A random key protects only the tries of one request: an application that
//! sends the request again gets a new key. [`RetryLayer::require_key`] refuses requests that would get a random key.
//! Every response has the sent key as its extension [`CallKey`], and an error of a request that was sent has the key in
//! [`RetryError::key`].
//!
//! Inside of an idempotent handler a [`CallName`] takes the place of a stored key: the key derives from the handler's
//! own key. A request that is sent from another task (a `tower::buffer::Buffer`, `tokio::spawn`) needs a name that
//! contains the key: [`CallName::of`].
//!
//! Keys may name customers or orders. So the library logs no key, and `Debug` shows the hash of a [`CallKey`].
//!
//! # Answers
//!
//! The layer retries a request:
//!
//! - without a response, or whose response took longer than [`RetryLayer::try_timeout`];
//! - whose response breaks off, with any status: the application has no answer, although the server may have run the
//!   request;
//! - whose response has the status 408, 425, 429, 500, 502, 503 or 504, or 409 with `Retry-After`, because the first
//!   try still runs;
//! - whose response has `Stripe-Should-Retry: true`. With `Stripe-Should-Retry: false` a response is final, with any
//!   status.
//!
//! Every other response is final. A request without a key, such as a GET, is sent once.
//!
//! `Retry-After` may hold seconds or a date. The layer pauses as long as the server asks for, but at least for the
//! [`Backoff`](crate::policy::Backoff). A random part of up to a quarter is added, so that clients don't return at the
//! same time. A [`RetryBudget`] bounds all retries of a layer and its clones, so that retries do not multiply the load
//! of an outage. If a limit ends the tries although the last response is retryable, this response has the limit as its
//! extension [`RetryLimit`].
//!
//! # Bodies
//!
//! The layer reads the body of a response before it decides, up to [`RetryLayer::max_body_bytes`]; [`ReplyBody`] holds
//! the bytes. A larger body streams: the layer has read its beginning, and passes on the remaining frames as the server
//! sends them. Event streams are not read at all. If a streamed body breaks off, the application gets the error of the
//! body, and sends the request again with the same key.
//!
//! The body of a request is cloned for each try. Each clone must yield the whole body, as a clone of
//! `http_body_util::Full` does. If clones share one stream, a later try sends a shorter body, which the server refuses
//! (422).
//!
//! # Cancel safety
//!
//! A call that is dropped sends no further request. A request that was sent may still run on the server, but its answer
//! is lost. If the layer made a random key, the key is lost too: make the key yourself, or name the call.

mod body;
mod budget;
mod error;
mod key;
mod layer;
mod pause;
mod service;
mod settings;

pub use self::body::ReplyBody;
pub use self::budget::RetryBudget;
pub use self::error::{RetryError, RetryLimit};
pub use self::key::{CallKey, CallName, InvalidCallKey};
pub use self::layer::RetryLayer;
pub use self::service::{Retry, RetryFuture};
