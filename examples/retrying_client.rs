//! The client side: a hyper client behind `RetryLayer`, against `axum_payments`.
//!
//! ```sh
//! cargo run --example axum_payments --features axum
//! cargo run --example retrying_client --features axum   # in another terminal
//! ```
//!
//! The first try hangs up after a second, while the payment runs. The next tries get 409, wait for the time in
//! `Retry-After`, and then get the receipt. The first argument is the address of the server (default:
//! `127.0.0.1:8080`), and the second argument the key. If an earlier run has used the same key, the server charges
//! nothing and sends the same receipt.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use idem_runtime::http::client::{CallKey, RetryLayer, RetryLimit};
use tower::{Layer, ServiceExt};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    // An application stores the key with its order, before the first request.
    let key = arguments.next().map_or_else(|| Ok(CallKey::random()), CallKey::new)?;
    println!("key {}", key.as_str());

    let http = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    // Prints the result of each try.
    let one_try = http
        .map_request(|request| {
            println!("sends the request");
            request
        })
        .map_result(|answer| {
            match &answer {
                Ok(response) => println!("{}", response.status()),
                Err(error) => println!("{error}"),
            }
            answer
        });
    let client = RetryLayer::new().try_timeout(Duration::from_secs(1)).layer(one_try);
    let request = Request::post(format!("http://{address}/payments"))
        .header("authorization", "Bearer alice-1")
        .header("content-type", "application/json")
        .extension(key)
        .body(Full::from(r#"{"amount_cents":500,"takes_ms":2500}"#))?;
    let response = client.oneshot(request).await?;
    if let Some(limit) = response.extensions().get::<RetryLimit>() {
        println!("not decided ({limit}): run this again with the key");
    }
    println!("{}, replayed: {:?}", response.status(), response.headers().get("idempotent-replayed"));
    println!("{}", String::from_utf8_lossy(&response.into_body().collect().await?.to_bytes()));
    Ok(())
}
