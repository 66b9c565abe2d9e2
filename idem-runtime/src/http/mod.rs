//! The `Idempotency-Key` header for HTTP servers: one line makes a route safe to retry.
//!
//! ```
//! # #[cfg(all(feature = "axum", feature = "memory"))] {
//! use std::time::Duration;
//!
//! use axum::{Router, routing::post};
//! use idem_runtime::http::{Caller, IdempotencyLayer};
//! use idem_runtime::{MemoryStore, Policy, current};
//!
//! async fn pay() -> String {
//!     // The same on every attempt, so that the payment provider recognises a retry.
//!     current().unwrap().child_key("charge")
//! }
//!
//! const PAYMENTS: Policy = Policy::new(Duration::from_secs(24 * 3600));
//!
//! let caller = Caller::by(|request| Some(request.headers.get("x-customer")?.to_str().ok()?.to_owned()));
//! let layer = IdempotencyLayer::new(&MemoryStore::new(), PAYMENTS, caller);
//! let app: Router = Router::new().route("/payments", post(pay)).layer(layer.clone());
//! // … serve `app`; then, at the end:
//! # let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
//! # runtime.block_on(async {
//! layer.drain().await;
//! # });
//! # }
//! ```
//!
//! - The first request with a key runs its handler, and its response is recorded before it is sent. Every later request
//!   with this key gets the same status, headers, body and trailers, with `Idempotent-Replayed: true`.
//! - Another request under the same key gets 422. A duplicate of a running request gets 409 with `Retry-After`, or
//!   waits ([`InProgress::Wait`](crate::policy::InProgress::Wait)). [`ProblemKind`] lists all answers.
//! - A client that hangs up cancels nothing: a handler that has begun runs to its end, in a task that
//!   [`IdempotencyLayer::drain`] waits for.
//! - The layer uses the engine of [`#[idempotent]`](macro@crate::idempotent): leases, takeovers, `on_crash`,
//!   `max_attempts`, modes and every [`Store`](crate::Store) work as they do under the attribute, and
//!   [`current`](crate::current) gives the handler its attempt.
//!
//! Place the layer inside of compression, authentication and CORS, and outside of every layer on which the effect of
//! the handler depends. Under `on_crash = fail` a time limit or a guard against panics inside of this layer interrupts
//! the operation, so set the policy's `timeout` instead. Without tower, call [`IdempotencyLayer::respond`].

mod body;
#[cfg(feature = "http-client")]
pub mod client;
mod describe;
#[cfg(feature = "axum")]
mod extract;
mod field;
mod grpc;
mod identity;
mod json;
mod layer;
mod problem;
mod profile;
mod protect;
mod record;
mod settings;
mod tasks;

pub use self::body::{RequestBody, ResponseBody};
pub use self::describe::Description;
#[cfg(feature = "axum")]
pub use self::extract::KeyRejection;
#[cfg(feature = "conformance")]
pub use self::identity::json_fingerprint;
pub use self::identity::request_key;
pub use self::json::JsonMembers;
pub use self::layer::{Idempotency, IdempotencyLayer};
pub use self::problem::{Problem, ProblemKind};
pub use self::profile::{Equality, Profile, Recording};
pub use self::record::{recorded_response, response_of};
pub use self::settings::{Caller, IdempotencyKey};
pub use self::tasks::HandlerTask;
