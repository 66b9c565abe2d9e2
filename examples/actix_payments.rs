//! Uses the layer without tower: an actix-web handler that hands its requests to [`IdempotencyLayer::respond`].
//!
//! ```sh
//! cargo run --example actix_payments --features actix
//! curl -s -i localhost:8082/payments -H 'Idempotency-Key: order-1' -d 500   # as often as you like
//! ```

use std::convert::Infallible;
use std::time::Duration;

use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::{MemoryStore, Policy, current};

const PAYMENTS: Policy = Policy::new(Duration::from_secs(24 * 3600));

/// The handler of payments, which runs once for each key.
async fn charge(request: Request<Bytes>) -> Result<Response<Full<Bytes>>, Infallible> {
    let payment = current().map_or_else(|_| "unprotected".to_owned(), |attempt| attempt.child_key("charge"));
    let amount = String::from_utf8_lossy(request.body()).into_owned();
    Ok(Response::new(Full::from(format!("payment {payment} of {amount}\n"))))
}

/// Converts actix-web's types to those of `http`, and back.
async fn pay(layer: web::Data<IdempotencyLayer>, asked: HttpRequest, body: web::Bytes) -> HttpResponse {
    let mut request = Request::builder().method(asked.method().as_str()).uri(asked.uri().to_string());
    for (name, value) in asked.headers() {
        request = request.header(name.as_str(), value.as_bytes());
    }
    let Ok(request) = request.body(body) else { return HttpResponse::BadRequest().finish() };
    // The call runs in a separate task, so that it outlives a client that hangs up.
    let answering = actix_web::rt::spawn(async move { layer.respond(request, charge).await });
    let Ok(Ok(response)) = answering.await else { return HttpResponse::InternalServerError().finish() };
    let (head, body) = response.into_parts();
    let Ok(body) = body.collect().await;
    let status = actix_web::http::StatusCode::from_u16(head.status.as_u16()).unwrap_or_default();
    let mut answer = HttpResponse::build(status);
    for (name, value) in &head.headers {
        answer.append_header((name.as_str(), value.as_bytes()));
    }
    answer.body(body.to_bytes())
}

#[actix_web::main]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8082".to_owned());
    let layer = IdempotencyLayer::new(&MemoryStore::new(), PAYMENTS, Caller::single());
    let shared = web::Data::new(layer.clone());
    println!("Listening on {address}");
    HttpServer::new(move || App::new().app_data(shared.clone()).route("/payments", web::post().to(pay)))
        .bind(address)?
        .run()
        .await?;
    layer.drain().await;
    Ok(())
}
