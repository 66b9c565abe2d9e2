//! The Universal Commerce Protocol: the operations of its REST binding that have a key, and operations without a key.
//!
//! The cases are those of the protocol's own conformance suite (`idempotency_test.py`): creation, update, completion
//! and cancellation of a checkout.

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::routing::{get, post, put};
use bytes::Bytes;
use http::{Method, Request, Response};
use idem_runtime::MissingKey;
use idem_runtime::http::{Caller, IdempotencyLayer, Profile};
use serde_json::{Value, json};

use crate::rig::*;

const KEY: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";
const OTHER_KEY: &str = "0f0f3a1c-6d0e-4c4b-9a44-5d1d3f0c7b52";

/// Changes a checkout. Returns the shop's response: the checkout, with the number of the change.
async fn change(stage: &Stage, status: u16, id: Option<String>, sent: &[u8]) -> Response<Body> {
    let run = stage.play().await;
    let id = id.unwrap_or_else(|| format!("chk_{run}"));
    let sent: Value = serde_json::from_slice(sent).unwrap_or(Value::Null);
    let checkout = json!({ "id": id, "sent": sent, "change": run }).to_string();
    answer(status, &[("content-type", "application/json")], checkout)
}

/// Serves a shop. The returned stage counts the changes and the searches.
async fn serve_shop(layer: IdempotencyLayer) -> (SocketAddr, Stage) {
    async fn create(State(stage): State<Stage>, body: Bytes) -> Response<Body> {
        change(&stage, 201, None, &body).await
    }
    async fn update(State(stage): State<Stage>, Path(id): Path<String>, body: Bytes) -> Response<Body> {
        change(&stage, 200, Some(id), &body).await
    }
    async fn search(State(stage): State<Stage>, body: Bytes) -> Response<Body> {
        change(&stage, 200, Some("found".to_owned()), &body).await
    }
    let stage = Stage::open();
    let shop = Router::new()
        .route("/checkout-sessions", post(create))
        .route("/checkout-sessions/{id}", put(update).get(async || "the checkout"))
        .route("/checkout-sessions/{id}/complete", post(update))
        .route("/checkout-sessions/{id}/cancel", post(update))
        .route("/catalog/search", post(search))
        .route("/catalog/lookup", post(search))
        .route("/catalog/product", post(search))
        .route("/orders/{id}", get(async || "the order"))
        .with_state(stage.clone());
    (serve(Router::new().nest("/shop", shop).layer(layer)).await, stage)
}

fn ucp() -> IdempotencyLayer {
    layer().profile(Profile::ucp())
}

fn ask(method: &Method, path: &str, key: Option<&str>, body: Option<&Value>) -> Request<Body> {
    let mut request =
        request(method.clone(), &format!("/shop{path}")).header("ucp-agent", "profile=\"https://a.example\"");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let request = if body.is_some() { request.header("content-type", "application/json") } else { request };
    request.body(body.map_or_else(Body::empty, |body| Body::from(body.to_string()))).unwrap()
}

fn parsed(reply: &Reply) -> Value {
    serde_json::from_slice(&reply.body).unwrap()
}

/// Operations with a key: method, path, status, body, and another body.
fn operations() -> [(Method, &'static str, u16, Option<Value>, Value); 4] {
    let lines = |quantity: u32| json!([{ "item": { "id": "rose" }, "quantity": quantity, "id": "li_1" }]);
    let payment = |token: &str| json!({ "payment_data": { "credential": { "token": token } } });
    let creation = |currency: &str| json!({ "currency": currency, "line_items": lines(1) });
    let update = |quantity| json!({ "id": "chk_9", "currency": "USD", "line_items": lines(quantity) });
    [
        (Method::POST, "/checkout-sessions", 201, Some(creation("USD")), creation("EUR")),
        (Method::PUT, "/checkout-sessions/chk_9", 200, Some(update(2)), update(3)),
        (Method::POST, "/checkout-sessions/chk_9/complete", 200, Some(payment("a")), payment("different_token")),
        (Method::POST, "/checkout-sessions/chk_9/cancel", 200, None, json!({ "reason": "other" })),
    ]
}

#[tokio::test]
async fn under_ucp_a_duplicate_gets_the_response_and_another_payload_is_a_conflict() {
    let (address, stage) = serve_shop(ucp()).await;
    for (at, (method, path, status, body, other)) in operations().into_iter().enumerate() {
        let what = format!("{method} {path}");
        let first = send(address, ask(&method, path, Some(KEY), body.as_ref())).await;
        assert_eq!(first.status, status, "{what}");
        let duplicate = send(address, ask(&method, path, Some(KEY), body.as_ref())).await;
        assert_eq!((duplicate.status, parsed(&duplicate)), (first.status, parsed(&first)), "{what}");
        let conflict = send(address, ask(&method, path, Some(KEY), Some(&other))).await;
        assert_eq!((conflict.status.as_u16(), &parsed(&conflict)["code"]), (409, &"fingerprint_mismatch".into()));
        assert_eq!(stage.begun(), at + 1, "{what}");
    }
}

#[tokio::test]
async fn another_key_is_another_operation() {
    let (address, stage) = serve_shop(ucp()).await;
    for (method, path, _, body, _) in operations() {
        let [one, two] = [KEY, OTHER_KEY].map(|key| send(address, ask(&method, path, Some(key), body.as_ref())));
        assert_ne!(parsed(&one.await)["change"], parsed(&two.await)["change"], "{method} {path}");
    }
    assert_eq!(stage.begun(), 8);
}

#[tokio::test]
async fn the_same_key_in_two_checkouts_is_two_operations() {
    let (address, stage) = serve_shop(ucp()).await;
    // Both bodies are empty, so their digests are equal.
    let cancel = |id| ask(&Method::POST, id, Some(KEY), None);
    assert_eq!(send(address, cancel("/checkout-sessions/a/cancel")).await.status, 200);
    assert_eq!(send(address, cancel("/checkout-sessions/b/cancel")).await.status, 409);
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn under_ucp_changes_need_a_key_and_reads_have_none() {
    // The policy's setting for missing keys has no effect.
    for policy in [POLICY, POLICY.missing_key(MissingKey::Run)] {
        let store = idem_runtime::MemoryStore::new();
        let layer = IdempotencyLayer::new(&store, policy, Caller::single()).profile(Profile::ucp());
        let (address, stage) = serve_shop(layer).await;
        for (method, path, _, body, _) in operations() {
            let refused = send(address, ask(&method, path, None, body.as_ref())).await;
            assert_eq!((refused.status.as_u16(), &parsed(&refused)["code"]), (400, &"missing_key".into()), "{path}");
        }
        assert_eq!(stage.begun(), 0);
        for path in ["/checkout-sessions/chk_9", "/orders/1"] {
            assert_eq!(send(address, ask(&Method::GET, path, None, None)).await.status, 200, "{path}");
        }
        // A search is not replayed, even if the client sends a key: it returns the present catalog.
        let query = json!({ "query": "roses" });
        for (at, (path, key)) in ["search", "lookup", "product"]
            .into_iter()
            .flat_map(|name| [None, Some(KEY), Some(KEY)].map(|key| (format!("/catalog/{name}"), key)))
            .enumerate()
        {
            let found = send(address, ask(&Method::POST, &path, key, Some(&query))).await;
            assert_eq!((found.status.as_u16(), found.is_replay()), (200, false), "{path}");
            assert_eq!(stage.begun(), at + 1);
        }
    }
}

#[tokio::test]
async fn the_settings_of_a_layer_win_over_the_methods_and_reads_of_the_profile() {
    let (address, stage) = serve_shop(ucp().methods([Method::POST]).covers(|_| true)).await;
    let query = json!({ "query": "roses" });
    for _ in 0..2 {
        assert_eq!(send(address, ask(&Method::POST, "/catalog/search", Some(KEY), Some(&query))).await.status, 200);
    }
    assert_eq!(stage.begun(), 1);
    for _ in 0..2 {
        let update = ask(&Method::PUT, "/checkout-sessions/chk_9", Some(KEY), Some(&query));
        assert_eq!(send(address, update).await.status, 200);
    }
    assert_eq!(stage.begun(), 3);
}

#[test]
fn the_contract_names_the_operations_without_a_key() {
    let said = ucp().describe().text;
    assert!(said.contains("required on POST, PUT, PATCH. It has no effect on /catalog/search, "), "{said}");
    let said = ucp().covers(|_| true).describe().text;
    assert!(said.contains("required on POST, PUT, PATCH. Its value"), "{said}");
}
