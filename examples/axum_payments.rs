//! An HTTP API that charges customers and is safe to retry: one layer on its routes, and records in a SQLite file.
//!
//! ```sh
//! cargo run --example axum_payments --features axum
//! ```
//!
//! The program prints commands for another terminal: a first request, a duplicate, another payload, a duplicate of a
//! running request, a client that hangs up. Kill the server and start it again between any two commands: no customer is
//! charged twice. SIGTERM and Ctrl-C wait for the payments in flight.
//!
//! `GET /count` returns the number of charges, `GET /contract` the contract for clients. Arguments: the address to
//! listen on (default: `127.0.0.1:8080`), the file (default: one in the folder for temporary files), and the profile
//! (default: `ietf`; or `stripe`, `acp`, `ucp`).
//!
//! `idem conformance http http://127.0.0.1:8080` can check this server. For these checks the server also has
//! `/refunds`, PUT, and payments whose status and length the request chooses (`status`, `bytes`).
#![allow(clippy::disallowed_methods)] // A payment takes its time.

use std::error::Error;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderName, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{AppendHeaders, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use idem_runtime::http::{Caller, IdempotencyLayer, Profile};
use idem_runtime::{MissingKey, Policy, SqliteStore, current};
use serde::{Deserialize, Serialize};
#[cfg(unix)]
use tokio::signal::unix::{SignalKind, signal};

/// A crash blocks a key for 5 s, and a response is retained for a day.
const PAYMENTS: Policy = Policy::new(Duration::from_secs(24 * 3600)).lease(Duration::from_secs(5));

const LINES: &str = r#"
pay() { curl -s -i localhost:8080/payments -H "Authorization: Bearer $1" -H "Idempotency-Key: $2" \
  -H 'Content-Type: application/json' -d "$3"; echo; }

pay alice-1 order-1 '{"amount_cents":500}'                     # 201: charged
pay alice-1 order-1 '{"amount_cents":500}'                     # the same response, Idempotent-Replayed: true
pay alice-2 order-1 '{"amount_cents":500}'                     # a new token of the same customer: the same response
pay bob-1   order-1 '{"amount_cents":500}'                     # another customer with the same key: 201
pay alice-1 order-1 '{"amount_cents":900}'                     # 422: another payload under the same key
pay alice-1 order-2 '{"amount_cents":500,"takes_ms":3000}' &   # takes a while...
sleep 1; pay alice-1 order-2 '{"amount_cents":500,"takes_ms":3000}'; wait  # 409, Retry-After: 1
timeout 1 bash -c "$(declare -f pay); pay alice-1 order-3 '{\"amount_cents\":500,\"takes_ms\":3000}'"  # hangs up
sleep 3; pay alice-1 order-3 '{"amount_cents":500,"takes_ms":3000}'  # was charged, once: replayed
pay nobody  order-4 '{"amount_cents":500}'                     # 403: nothing is stored
curl -s localhost:8080/count                                   # {"charges":4}, if nothing else was charged
"#;

/// The payment provider, which counts its charges.
#[derive(Clone, Default)]
struct Bank {
    charges: Arc<AtomicU64>,
}

/// The customer who is logged in.
#[derive(Clone)]
struct Customer(&'static str);

#[derive(Deserialize)]
struct Payment {
    amount_cents: u64,
    #[serde(default)]
    takes_ms: u64,
    /// Status that the bank answers with, chosen by the request for tests.
    #[serde(default)]
    status: Option<u16>,
    /// Length of the receipt in bytes, chosen by the request for tests.
    #[serde(default)]
    bytes: usize,
}

#[derive(Serialize)]
struct Receipt {
    payment: String,
    amount_cents: u64,
    #[serde(skip_serializing_if = "String::is_empty")]
    text: String,
}

#[derive(Serialize)]
struct Refund {
    refund: String,
}

#[derive(Serialize)]
struct Count {
    charges: u64,
}

async fn pay(State(bank): State<Bank>, Json(payment): Json<Payment>) -> Response {
    if payment.amount_cents == 0 {
        // The response depends on the request alone, so the layer may record it.
        return (StatusCode::BAD_REQUEST, "nothing to pay\n").into_response();
    }
    // A real provider gets the attempt's key: if this process dies here, the next attempt sends the same key.
    let number = bank.charges.fetch_add(1, Ordering::SeqCst);
    let payment_id = current().map_or_else(|_| format!("unkeyed-{number}"), |attempt| attempt.child_key("charge"));
    tokio::time::sleep(Duration::from_millis(payment.takes_ms)).await;
    let headers = headers_of("payments", &payment_id);
    let status = payment.status.and_then(|status| StatusCode::from_u16(status).ok()).unwrap_or(StatusCode::CREATED);
    let text = "x".repeat(payment.bytes.min(64 << 20));
    let receipt = Receipt { payment: payment_id, amount_cents: payment.amount_cents, text };
    (status, headers, Json(receipt)).into_response()
}

async fn refund(State(bank): State<Bank>) -> Response {
    let number = bank.charges.fetch_add(1, Ordering::SeqCst);
    let refund = current().map_or_else(|_| format!("unkeyed-{number}"), |attempt| attempt.child_key("refund"));
    (StatusCode::CREATED, headers_of("refunds", &refund), Json(Refund { refund })).into_response()
}

/// Headers of a response. A replay has all of them except the cookie, which belongs to the first client's session.
/// `no-store` forbids HTTP caches to keep the response. The layer records the response nevertheless.
fn headers_of(route: &str, id: &str) -> AppendHeaders<[(HeaderName, String); 5]> {
    let location = format!("/{route}/{id}");
    AppendHeaders([
        (header::LINK, format!("<{location}>; rel=\"self\"")),
        (header::LINK, "</contract>; rel=\"describedby\"".to_owned()),
        (header::LOCATION, location),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (header::SET_COOKIE, format!("last={id}; HttpOnly")),
    ])
}

async fn count(State(bank): State<Bank>) -> Json<Count> {
    Json(Count { charges: bank.charges.load(Ordering::SeqCst) })
}

/// Finds the customer of a token. This middleware runs outside of the idempotency layer, which identifies callers by
/// customer, not by token.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request.headers().get(header::AUTHORIZATION).and_then(|it| it.to_str().ok()?.strip_prefix("Bearer "));
    let customer = match token {
        Some("alice-1" | "alice-2") => Some(Customer("alice")),
        Some("bob-1") => Some(Customer("bob")),
        _ => None,
    };
    if let Some(customer) = customer {
        request.extensions_mut().insert(customer);
    }
    next.run(request).await
}

/// Returns a future that ends at Ctrl-C, and at SIGTERM, which containers send. A container must wait longer for the
/// end of the process than a payment takes.
#[cfg(unix)]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    Ok(async {
        tokio::signal::ctrl_c().await.ok();
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    let file = arguments.next().map(PathBuf::from);
    let file = file.unwrap_or_else(|| std::env::temp_dir().join("idem-axum-payments.db"));
    let (profile, policy) = match arguments.next().as_deref() {
        None | Some("ietf") => (Profile::ietf(), PAYMENTS),
        // In the Stripe profile, a request may have no key.
        Some("stripe") => (Profile::stripe(), PAYMENTS.missing_key(MissingKey::Run)),
        Some("acp") => (Profile::acp(), PAYMENTS),
        Some("ucp") => (Profile::ucp(), PAYMENTS.ttl(Duration::from_secs(48 * 3600))),
        Some(other) => return Err(format!("`{other}` is not ietf, stripe, acp or ucp").into()),
    };

    let store = SqliteStore::open(&file).await?;
    let caller = Caller::by(|request| request.extensions.get::<Customer>().map(|customer| customer.0));
    let layer = IdempotencyLayer::new(&store, policy, caller).profile(profile);
    let contract = layer.describe().text;

    let app = Router::new()
        .route("/payments", post(pay).put(pay))
        .route("/refunds", post(refund))
        .layer(layer.clone())
        .layer(middleware::from_fn(authenticate))
        .route("/count", get(count))
        .route("/contract", get(async move || contract))
        .with_state(Bank::default());

    // The signal handler is installed before the first connection is accepted: without a handler, a signal ends the
    // process immediately.
    let stop = stop_signal()?;
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("Listening on {}, records in {}. In another terminal:", listener.local_addr()?, file.display());
    println!("{}", LINES.replace("localhost:8080", &listener.local_addr()?.to_string()));
    axum::serve(listener, app)
        // The server accepts no new connections, and requests in flight get their responses.
        .with_graceful_shutdown(stop)
        .await?;
    // Waits for payments whose clients have hung up, and for late writes of the store.
    layer.drain().await;
    Ok(())
}
