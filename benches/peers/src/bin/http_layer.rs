//! The route of the bench `http` behind `axum-idempotent`, with its session on a Valkey. The argument is the server's
//! port.
//!
//! The program prints `ready` and its address. A request to `/login` gets the cookie of a session, without which the
//! layer does nothing.

use std::sync::Arc;

use axum::routing::{get, post};
use axum::{Json, Router};
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use fred::clients::Client;
use fred::interfaces::ClientLike;
use fred::types::Builder;
use fred::types::config::Config;
use ruts::store::Ttl;
use ruts::store::redis::RedisStore;
use ruts::{CookieOptions, Session, SessionLayer};
use serde_json::Value;
use tower_cookies::CookieManagerLayer;

type Store = RedisStore<Client>;

async fn echo(Json(order): Json<Value>) -> Json<Value> {
    Json(order)
}

async fn login(session: Session<Store>) -> &'static str {
    let hour = Ttl::new(3600).expect("a time");
    session.set("user", &1, hour, None).await.expect("a session");
    "welcome"
}

fn main() {
    let port = std::env::args().nth(1).expect("a port");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be built").block_on(async {
        let config = Config::from_url(&format!("redis://127.0.0.1:{port}")).expect("a valid URL");
        let client = Builder::from_config(config).build().expect("a client");
        client.init().await.expect("connects");
        let store: Arc<Store> = Arc::new(RedisStore::new(Arc::new(client)).await.expect("a store"));
        let options = IdempotentOptions::default()
            .use_idempotency_key_header(Some("idempotency-key"), true)
            .expire_after(24 * 3600);
        let cookie = CookieOptions::build().name("session").secure(false).max_age(3600).path("/");
        let app = Router::new()
            .route("/orders", post(echo))
            .layer(IdempotentLayer::<Store>::new(options))
            .route("/login", get(login))
            .layer(SessionLayer::new(store).with_cookie_options(cookie))
            .layer(CookieManagerLayer::new());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("listens");
        println!("ready\n{}", listener.local_addr().expect("an address"));
        axum::serve(listener, app).await.expect("serves");
    });
}
