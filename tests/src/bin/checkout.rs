//! Server of the soak: `checkout PORT LEDGER STORE…`, with the port of the ledger and the stores in the form of
//! `idem_tests::stores`.
//!
//! `POST /redis/fail` and `/redis/retry`, and the same of each other store, are behind the idempotency layer. The path
//! names the store of the records, and the value of `on_crash`. The effect of a request is an entry in the ledger.
//! This process can't read the ledger, which answers only with the number of the entry. The body of a request begins
//! with the duration of the payment in milliseconds.
#![allow(clippy::disallowed_methods)] // A payment takes its time.

use std::io;
use std::time::Duration;

use axum::Router;
use axum::extract::OriginalUri;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use idem_runtime::http::{Caller, IdempotencyKey, IdempotencyLayer};
use idem_runtime::{OnCrash, Policy, current};
use idem_tests::stores;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const LEASE: Duration = Duration::from_secs(2);
const POLICY: Policy = Policy::new(Duration::from_secs(24 * 3600)).lease(LEASE);

/// Appends an entry to the ledger. Returns the number of the entry.
async fn append(ledger: u16, entry: &str) -> io::Result<String> {
    let mut line = TcpStream::connect(("127.0.0.1", ledger)).await?;
    line.write_all(format!("{entry}\n").as_bytes()).await?;
    let mut number = String::new();
    line.read_to_string(&mut number).await?;
    Ok(number)
}

type Paid = (StatusCode, [(&'static str, String); 1], String);

async fn pay(
    ledger: u16,
    OriginalUri(uri): OriginalUri,
    IdempotencyKey(key): IdempotencyKey,
    headers: HeaderMap,
    body: String,
) -> Result<Paid, StatusCode> {
    let internal = StatusCode::INTERNAL_SERVER_ERROR;
    let attempt = current().map_err(|_| internal)?.number();
    let caller = headers.get("x-caller").and_then(|it| it.to_str().ok()).unwrap_or_default();
    let operation = format!("{} {caller} {key}", uri.path());
    let takes = body.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or_default();
    tokio::time::sleep(Duration::from_millis(takes) / 2).await;
    let number = append(ledger, &format!("{operation} {attempt}")).await.map_err(|_| internal)?;
    tokio::time::sleep(Duration::from_millis(takes) / 2).await;
    let paid = format!("{operation} effect {number}");
    Ok((StatusCode::CREATED, [("x-effect", number)], paid))
}

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [port, ledger, specs @ ..] = &args[..] else { panic!("port, port of the ledger, stores") };
    let ledger: u16 = ledger.parse().expect("a port");
    let mut app = Router::new();
    for spec in specs {
        let store = stores::open(spec, LEASE).await;
        let kind = spec.split(' ').next().expect("a store");
        for (name, on_crash) in [("fail", OnCrash::Fail), ("retry", OnCrash::Retry)] {
            let caller = Caller::by(|head| Some(head.headers.get("x-caller")?.to_str().ok()?.to_owned()));
            let layer = IdempotencyLayer::new(&*store, POLICY.on_crash(on_crash), caller);
            let handler = post(move |uri, key, headers, body| pay(ledger, uri, key, headers, body));
            app = app.merge(Router::new().route(&format!("/{kind}/{name}"), handler).layer(layer));
        }
    }
    let listener = TcpListener::bind(("127.0.0.1", port.parse().expect("a port"))).await.expect("listens");
    println!("listening");
    axum::serve(listener, app).await.expect("serves");
}
