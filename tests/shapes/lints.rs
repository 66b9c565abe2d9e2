//! Handlers of a user who denies every lint of clippy. The code of the user is clean, so a report is about code that
//! the attribute generates. `cargo clippy` is the test; `strict.rs` runs the handlers.

#![deny(warnings, clippy::all, clippy::pedantic, clippy::nursery, clippy::restriction)]
#![allow(
    clippy::blanket_clippy_restriction_lints,
    clippy::needless_return,
    clippy::pub_with_shorthand,
    clippy::redundant_pub_crate,
    reason = "this user wants every lint, and each of the other three lints contradicts another one"
)]

extern crate alloc;

use alloc::sync::Arc;
use core::fmt::Display;
use core::time::Duration;

use idem_runtime::policy::OnError;
use idem_runtime::{Error, Json, MemoryStore, Policy, Store, idempotent};
use serde::{Deserialize, Serialize};

/// Policy of some handlers.
static SHARED: Policy = Policy::new(Duration::from_secs(3600));

/// Failure that is recorded.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub(crate) enum Failure {
    /// The order is refused.
    Refused,
    /// The call was not made.
    Unmade(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        return Self::Unmade(error.to_string());
    }
}

/// Message of a broker.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Event {
    /// Number of the order.
    id: u32,
    /// Name of the customer.
    tenant: Option<String>,
}

impl Event {
    /// Makes a message.
    pub(crate) fn new(id: u32) -> Self {
        return Self { id, tenant: Some("ada".to_owned()) };
    }
}

/// A handler with methods.
#[derive(Debug, Default)]
pub(crate) struct Service {
    /// Records of this service.
    store: MemoryStore,
}

impl Service {
    /// A method whose policy is computed.
    #[idempotent(key = "{id}", ttl = Duration::from_secs(300), store = self.store, scope = "lints::charge")]
    pub(crate) async fn charge(&self, id: u32) -> Result<(), Error> {
        drop(self.store.clone());
        return Ok(());
    }

    /// A generic method.
    #[idempotent(key = id, ttl = "7d", store = self.store, scope = "lints::show")]
    pub(crate) async fn show<Id: Display>(&self, id: Id) -> Result<String, Error> {
        return Ok(id.to_string());
    }
}

/// Arguments that the body changes, takes apart or ignores, a rule for errors, and a codec.
#[idempotent(key = event.id, ttl = "7d", store = store, scope = shared("lints"), on_error = decide, codec = Json)]
pub(crate) async fn arguments(
    store: &MemoryStore,
    mut event: Event,
    _unused: String,
    _: u8,
    (first, _second): (u8, u8),
) -> Result<u32, Failure> {
    event.id = event.id.wrapping_add(u32::from(first));
    return Ok(event.id);
}

/// Decides whether a failure is recorded.
const fn decide(failure: &Failure) -> OnError {
    return match *failure {
        Failure::Refused => OnError::Record,
        Failure::Unmade(_) => OnError::Release,
    };
}

/// Every option that takes a literal.
#[idempotent(
    key = "{event.id}:{event.tenant}",
    ttl = "7d",
    store = store,
    fingerprint = (event.id, event.tenant),
    lease = "10s",
    timeout = "1m",
    max_attempts = 3,
    in_progress = wait("1s"),
    on_crash = fail,
    on_store_error = fail,
    missing_key = reject,
    max_result_bytes = 1024,
    mode = enforce
)]
pub(crate) async fn options(store: &MemoryStore, event: Event) -> Result<u32, Error> {
    if event.id > 3 {
        return Ok(3);
    }
    return Ok(event.id);
}

/// A key of a tuple, a shared policy, a recorded error.
#[idempotent(key = (event.id, event.tenant), policy = SHARED, store = store, on_error = record)]
pub(crate) async fn records(store: Arc<dyn Store>, event: &Event) -> Result<u32, Failure> {
    if event.id > 3 {
        return Err(Failure::Refused);
    }
    return Ok(event.id);
}

/// A template with a method call, and the same rule for errors as above.
#[idempotent(key = "{event.tenant.as_deref()}/{event.id + 1}", ttl = "7d", store = *store, scope = "lints::ruled", on_error = decide)]
pub(crate) async fn ruled(store: &MemoryStore, event: &Event) -> Result<u32, Failure> {
    return Ok(event.id);
}
