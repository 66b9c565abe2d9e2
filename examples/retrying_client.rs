//! The client side: a hyper client behind `RetryLayer`, against `axum_payments`.
//!
//! ```sh
//! cargo run --example axum_payments --features axum
//! cargo run --example retrying_client --features axum   # in another terminal
//! ```
//!
//! The first try hangs up after a second, while the payment runs. The next tries get 409, wait for the time in
//! `Retry-After`, and then get the receipt. The address of the server is an argument (default: `127.0.0.1:8080`).
#![allow(clippy::disallowed_methods)] // A try has a time limit.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use idem_runtime::http::client::RetryLayer;
use tower::{BoxError, Layer, ServiceExt, service_fn};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    let http = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    // Prints the result of each try.
    let one_try = service_fn(move |request: Request<Full<Bytes>>| {
        let http = http.clone();
        async move {
            let key = request.headers()["idempotency-key"].clone();
            let answer = tokio::time::timeout(Duration::from_secs(1), http.request(request)).await;
            match &answer {
                Ok(Ok(response)) => println!("{key:?}: {}", response.status()),
                Ok(Err(error)) => println!("{key:?}: {error}"),
                Err(_) => println!("{key:?}: hung up after a second"),
            }
            Ok::<_, BoxError>(answer??)
        }
    });
    let client = RetryLayer::new().layer(one_try);
    let request = Request::post(format!("http://{address}/payments"))
        .header("authorization", "Bearer alice-1")
        .header("content-type", "application/json")
        .body(Full::from(r#"{"amount_cents":500,"takes_ms":2500}"#))?;
    let response = client.oneshot(request).await?;
    println!("{}, replayed: {:?}", response.status(), response.headers().get("idempotent-replayed"));
    println!("{}", String::from_utf8_lossy(&response.into_body().collect().await?.to_bytes()));
    Ok(())
}
