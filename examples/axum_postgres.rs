//! A payment API on several machines that is safe to retry: records in PostgreSQL, so that a duplicate may reach any
//! server.
//!
//! ```sh
//! cargo run --example axum_postgres --features postgres -- postgres://shop@localhost/shop 127.0.0.1:8082 &
//! cargo run --example axum_postgres --features postgres -- postgres://shop@localhost/shop 127.0.0.1:8083 &
//! pay() { curl -s -i "localhost:$1/payments" -H 'X-Customer: alice' -H "Idempotency-Key: $2" -d 500; echo; }
//! pay 8082 order-1                             # 201, and the process that took the payment
//! pay 8083 order-1                             # the same response from the other server
//! pay 8082 order-2 & pay 8083 order-2; wait    # at the same time: one takes it, the other waits for the response
//! ```
//!
//! `kill -9` one server in the middle of a payment: after the lease the other server takes over, with the same key for
//! the payment provider. Arguments: the URL of the database, and the address to listen on (default: `127.0.0.1:8082`).
#![allow(clippy::disallowed_methods)] // A payment takes its time.

// docs/start.md has the program from here on.
use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::{InProgress, Policy, PostgresStore, StoreExt, current};
use tokio::signal::unix::{SignalKind, signal};

/// A crash blocks a key for 5 s. A duplicate of a running payment waits for its response, which PostgreSQL announces.
const PAYMENTS: Policy = Policy::new(Duration::from_secs(24 * 3600))
    .lease(Duration::from_secs(5))
    .in_progress(InProgress::Wait(Duration::from_secs(20)));

async fn pay(cents: String) -> Result<(StatusCode, String), StatusCode> {
    // The payment provider gets the same key on every attempt, in every process.
    let charge = current().map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?.child_key("charge");
    tokio::time::sleep(Duration::from_millis(500)).await;
    let taken = format!("{cents} cents are paid with {charge}, process {}\n", std::process::id());
    Ok((StatusCode::CREATED, taken))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let database = arguments.next().ok_or("the URL of a database is missing")?;
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:8082".to_owned());
    // Creates the table if it is missing. Without `purge_every` no expired record is deleted.
    let options = PostgresStore::options().ensure_schema().purge_every(Duration::from_secs(3600));
    let store = options.connect(&database).await?;
    // Replace this closure by your authentication, which belongs outside of the layer.
    let caller = Caller::by(|request| Some(request.headers.get("x-customer")?.to_str().ok()?.to_owned()));
    let layer = IdempotencyLayer::new(&store, PAYMENTS, caller);
    let ready = async move || match store.health().await.is_ready() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let app = Router::new().route("/payments", post(pay)).layer(layer.clone()).route("/readyz", get(ready));

    let mut stop = signal(SignalKind::terminate())?;
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("Listening on {}.", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(async move { _ = stop.recv().await }).await?;
    // Wait for payments whose clients have hung up: otherwise each of their keys would be held for one more lease.
    layer.drain().await;
    Ok(())
}
