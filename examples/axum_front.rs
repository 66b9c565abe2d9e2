//! The first program of docs/http.md, word for word: a payment route that is safe to retry.
//!
//! ```sh
//! cargo run --example axum_front --features axum
//! curl -i localhost:8081/payments -H 'Authorization: Bearer alice-1' -H 'Idempotency-Key: order-1' -d 500
//! ```

// docs/http.md has the program from here on.
use std::error::Error;
use std::future::Future;
use std::io;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::post;
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::{Policy, SqliteStore, current};
use tokio::signal::unix::{SignalKind, signal};

/// The policy of payments: a recorded response is retained for a day.
const PAYMENTS: Policy = Policy::new(Duration::from_secs(24 * 3600));

#[derive(Clone)]
struct Customer(&'static str);

async fn pay(amount: String) -> Result<(StatusCode, String), StatusCode> {
    // The payment provider gets the same key on every attempt.
    let charge = current().map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?.child_key("charge");
    Ok((StatusCode::CREATED, format!("{amount} cents are paid with {charge}\n")))
}

/// Stands in for your authentication, which runs outside of the layer, and identifies the customer, not the token.
async fn authenticate(mut request: Request, next: Next) -> Response {
    if request.headers().get(header::AUTHORIZATION).is_some_and(|it| it == "Bearer alice-1") {
        request.extensions_mut().insert(Customer("alice"));
    }
    next.run(request).await
}

/// Returns a future that ends at Ctrl-C, and at SIGTERM, which containers send.
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = SqliteStore::open("payments.db").await?;
    let caller = Caller::by(|request| request.extensions.get::<Customer>().map(|customer| customer.0));
    let layer = IdempotencyLayer::new(&store, PAYMENTS, caller);
    let app = Router::new().route("/payments", post(pay)).layer(layer.clone()).layer(from_fn(authenticate));

    let stop = stop_signal()?;
    let address = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8081".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    // Payments continue after their clients have hung up: wait for them.
    layer.drain().await;
    Ok(())
}
