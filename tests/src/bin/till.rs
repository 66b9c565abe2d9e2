//! Server with one route behind the idempotency layer: `till FILE`. The server prints its address, and tests kill it.
//!
//! `POST /charge` writes the number of its attempt to a file next to `FILE`, and answers with this number. If the
//! request body is `stuck`, the first attempt never ends.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::{Policy, SqliteStore, current};

const POLICY: Policy = Policy::new(Duration::from_secs(3600)).lease(Duration::from_secs(1));

#[tokio::main]
async fn main() {
    let file = PathBuf::from(std::env::args_os().nth(1).expect("a file"));
    let store = SqliteStore::open(&file).await.expect("opens");
    let charges = file.with_extension("charges");
    let charge = move |body: String| async move {
        let attempt = current().expect("behind the layer").number();
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(charges).expect("opens");
        writeln!(file, "{attempt}").expect("writes");
        if attempt == 1 && body == "stuck" {
            std::future::pending::<()>().await;
        }
        format!("charged by attempt {attempt}")
    };
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single());
    let app = Router::new().route("/charge", post(charge)).layer(layer);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("listens");
    println!("{}", listener.local_addr().expect("an address"));
    axum::serve(listener, app).await.expect("serves");
}
