//! Helpers for the tests of every store: reservations, results, and calls of a handler that counts its runs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::codec::CodecName;
use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Lease, Reservation, ReserveRequest};
use idem_runtime::{Error, Json, Key, Operation, Outcome, Policy, Store, StoreError, current, observe};

/// Lease that outlasts any test.
pub const LEASE: Duration = Duration::from_secs(60);
/// Retention of records.
pub const TTL: Duration = Duration::from_secs(3600);
/// Example of a W3C trace context.
pub const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// Policy with [`LEASE`] and [`TTL`].
pub const POLICY: Policy = Policy::new(TTL).lease(LEASE);

/// Key in the scope of tests.
pub fn key(name: &str) -> Key {
    Key::new("test", name).expect("a valid key")
}

/// Reservation of `name` for a new attempt.
pub fn request(store: &impl Store, name: &str) -> ReserveRequest {
    ReserveRequest::new(key(name), store.context().new_owner(), LEASE, TTL)
}

/// Returns the lease in the answer to a reservation. The reservation must have been granted.
pub fn lease_of(answer: Result<Reservation, StoreError>) -> Lease {
    match answer {
        Ok(Reservation::Granted { lease, .. }) => lease,
        other => panic!("{other:?}"),
    }
}

/// Makes the reservation `request`, which must succeed.
pub async fn wins(store: &impl Store, request: &ReserveRequest) -> Lease {
    lease_of(store.reserve(request).await)
}

/// Reserves `name`; the reservation must succeed.
pub async fn reserved(store: &impl Store, name: &str) -> Lease {
    wins(store, &request(store, name)).await
}

/// Result that consists of these bytes.
pub fn stored(bytes: impl Into<Bytes>) -> StoredResult {
    StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: bytes.into() }
}

/// Completion with the result `42`.
pub fn done() -> Finish {
    Finish::Completed(stored("42"))
}

/// Makes one call of a handler that counts its runs, and returns the count.
pub async fn call(store: &impl Store, name: &str, runs: &AtomicU32) -> (Result<u32, Error>, Outcome) {
    call_with(store, name, POLICY, runs).await
}

/// Makes one call with this policy, of a handler that counts its runs.
pub async fn call_with(
    store: &impl Store,
    name: &str,
    policy: Policy,
    runs: &AtomicU32,
) -> (Result<u32, Error>, Outcome) {
    let body = async { Ok(runs.fetch_add(1, Ordering::SeqCst) + 1) };
    observe(Operation::new(store, Ok(key(name)), policy).run(body)).await
}

/// Sender to a broker that confirms each message immediately.
pub struct Confirming;

impl Sender for Confirming {
    fn send<'a>(&'a self, _: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async { Ok(()) })
    }
}

/// Makes a call of the key `name` whose body pushes one message. `store` has a [sender](Confirming).
///
/// # Panics
/// If the call fails.
pub async fn publish(store: &impl Store, name: &str) -> Outcome {
    let body = async {
        current()?.outbox().push("orders", OutgoingMessage::new(b"paid".to_vec()))?;
        Ok::<_, Error>(())
    };
    let (result, outcome) = observe(Operation::new(store, Key::new("test", name), POLICY).run(body)).await;
    result.expect("sent and marked");
    outcome
}
