//! Profiles: the rules of the IETF draft, Stripe, ACP and UCP for keys, recordings and refusals.

use std::time::Duration;

use axum::body::Body;
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use idem_runtime::http::{Caller, Equality, IdempotencyLayer, Profile, Recording};
use idem_runtime::{MemoryStore, MissingKey, OnStoreError, StoreErrorKind};
use idem_tests::{Fault, FaultyStore, StoreCall};

use crate::rig::*;

fn with(profile: Profile) -> IdempotencyLayer {
    layer().profile(profile)
}

/// Serves a handler that answers with the status in its path and the number of its run.
async fn serve_statuses(layer: IdempotencyLayer) -> std::net::SocketAddr {
    let stage = Stage::open();
    serve_handler(layer, async move |request: Request<Body>| {
        let run = stage.play().await;
        answer(request.uri().path()[1..].parse().unwrap(), &[], format!("run {run}"))
    })
    .await
}

fn json(reply: &Reply) -> serde_json::Value {
    assert_eq!(reply.header("content-type"), Some("application/json"));
    serde_json::from_slice(&reply.body).unwrap()
}

#[tokio::test]
async fn under_stripe_rules_every_response_of_a_begun_request_is_replayed() {
    let address = serve_statuses(with(Profile::stripe())).await;
    for (status, is_recorded) in [(200, true), (402, true), (500, true), (503, true), (401, false), (429, false)] {
        let (path, key) = (format!("/{status}"), format!("k{status}"));
        send(address, post_to(&path, &key, "")).await;
        let again = send(address, post_to(&path, &key, "")).await;
        assert_eq!((again.status.as_u16(), again.is_replay()), (status, is_recorded));
    }
    let other = send(address, post_to("/200", "k200", "other")).await;
    assert_eq!(other.status, 400);
    assert_eq!(json(&other)["error"]["type"], "idempotency_error");
    assert_eq!(json(&other)["error"]["code"], "fingerprint_mismatch");
}

#[tokio::test]
async fn under_stripe_rules_a_request_that_failed_validation_frees_its_key_for_another_payload() {
    let address = serve_handler(with(Profile::stripe()), async move |request: Request<Body>| {
        let path = request.uri().path().to_owned();
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let status = if body == "corrected" { 200 } else { path[1..4].parse().unwrap() };
        let mut response = answer(status, &[], body);
        if path.ends_with("/final") {
            response.extensions_mut().insert(Recording::Record);
        }
        response
    })
    .await;
    for status in [400, 415, 422] {
        let (path, key) = (format!("/{status}"), format!("k{status}"));
        assert_eq!(send(address, post_to(&path, &key, "wrong")).await.status, status);
        let corrected = send(address, post_to(&path, &key, "corrected")).await;
        assert_eq!((corrected.status.as_u16(), corrected.text()), (200, "corrected"), "after {status}");
        // The key is bound to the corrected request now.
        assert!(send(address, post_to(&path, &key, "corrected")).await.is_replay());
        assert_eq!(send(address, post_to(&path, &key, "wrong")).await.status, 400);
    }
    // A handler that has begun its work asks for a recording of its response.
    assert_eq!(send(address, post_to("/400/final", "k", "wrong")).await.status, 400);
    assert!(send(address, post_to("/400/final", "k", "wrong")).await.is_replay());
    assert_eq!(send(address, post_to("/400/final", "k", "corrected")).await.status, 400);
}

#[tokio::test]
async fn an_operation_with_an_earlier_attempt_is_never_forgotten() {
    let store = FaultyStore::new(&MemoryStore::new());
    // This rule is the example of docs/http.md.
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single()).recording(|head, trailers| match head.status {
        StatusCode::BAD_REQUEST => Recording::Forget,
        _ => (Profile::ietf().recording)(head, trailers),
    });
    let statuses = std::sync::Mutex::new(vec![400, 400, 500, 201, 400]);
    let statuses = std::sync::Arc::new(statuses);
    let address = serve_handler(layer, async move || {
        let status = statuses.lock().unwrap().pop().unwrap();
        answer(status, &[], "")
    })
    .await;
    let ask = async |key: &str, body: &'static str| send(address, post_to("/pay", key, body)).await.status.as_u16();
    // The record of a 400 is forgotten, so another payload is a new operation.
    assert_eq!(ask("a", "wrong").await, 400);
    assert_eq!(ask("a", "corrected").await, 201);
    // The first attempt may have had an effect, so the key stays bound to its payload, even after the 400 of the second
    // attempt.
    assert_eq!(ask("b", "1").await, 500);
    assert_eq!(ask("b", "1").await, 400);
    assert_eq!(ask("b", "2").await, 422);
    // If the store can't forget the record, the layer only frees the key, and the record still binds the key to its
    // payload.
    store.always(StoreCall::Decide, Fault::Before(StoreErrorKind::Unavailable));
    assert_eq!(ask("c", "1").await, 400);
    assert_eq!(ask("c", "2").await, 422);
}

#[tokio::test]
async fn under_acp_rules_request_bodies_are_compared_as_json() {
    let layer = with(Profile::acp());
    let address = serve_statuses(layer.clone()).await;
    let ask = async |key: &str, body: &'static str| send(address, post_to("/200", key, body)).await;
    assert_eq!(ask("k", r#"{"a":1,"b":[1,2]}"#).await.text(), "run 1");
    assert!(ask("k", r#"{ "b": [1.0, 2], "a": 1 }"#).await.is_replay());
    let mut other_headers = post_to("/200?x=1", "k", r#"{"a":1,"b":[1,2]}"#);
    other_headers.headers_mut().insert("x-a", "1".parse().unwrap());
    assert!(send(address, other_headers).await.is_replay());
    for other in [r#"{"a":1,"b":[2,1]}"#, r#"{"b":[1,2]}"#, r#"{"a":1,"b":[1,2],"c":null}"#] {
        let reply = ask("k", other).await;
        assert_eq!(reply.status, 422);
        assert_eq!(
            (&json(&reply)["type"], &json(&reply)["code"]),
            (&"invalid_request".into(), &"idempotency_conflict".into())
        );
    }
    assert_eq!(ask("k2", r#"{"a":1,"a":2}"#).await.status, 400);
    // The same key on another path is another operation.
    assert_eq!(send(address, post_to("/201", "k", "{}")).await.text(), "run 2");
    // A server error is never recorded.
    assert_eq!(send(address, post_to("/500", "k3", "{}")).await.text(), "run 3");
    assert_eq!(send(address, post_to("/500", "k3", "{}")).await.text(), "run 4");
    // A key is required, even if the policy allows requests without a key.
    let policy = POLICY.missing_key(MissingKey::Run);
    let layer = IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single()).profile(Profile::acp());
    let address = serve_statuses(layer).await;
    let reply = send(address, request(Method::POST, "/200").body("{}".into()).unwrap()).await;
    assert_eq!((reply.status.as_u16(), &json(&reply)["code"]), (400, &"idempotency_key_required".into()));
}

#[tokio::test]
async fn under_acp_rules_a_duplicate_of_a_running_request_gets_in_flight() {
    let stage = Stage::closed();
    let address = serve_stage(with(Profile::acp()), &stage).await;
    let first = tokio::spawn(send(address, post("k", "{}")));
    stage.entered().await;
    let reply = send(address, post("k", "{ }")).await;
    assert_eq!((reply.status.as_u16(), &json(&reply)["code"]), (409, &"idempotency_in_flight".into()));
    assert_eq!(reply.header("retry-after"), Some("1"));
    stage.go();
    assert_eq!(first.await.unwrap().text(), "run 1");
}

#[tokio::test]
async fn under_ucp_rules_request_bodies_are_compared_as_bytes_and_short_keys_are_refused() {
    let key = "8e03978e-40d5-43e8-bc93-6894a57f9324";
    let store = FaultyStore::new(&MemoryStore::new());
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single()).profile(Profile::ucp());
    let address = serve_statuses(layer).await;
    let reply = send(address, post_to("/200", "short", "{}")).await;
    assert_eq!((reply.status.as_u16(), &json(&reply)["code"]), (400, &"invalid_key".into()));
    assert_eq!(send(address, post_to("/200", key, "{}")).await.text(), "run 1");
    let reply = send(address, post_to("/200", key, "{ }")).await;
    assert_eq!((reply.status.as_u16(), &json(&reply)["code"]), (409, &"fingerprint_mismatch".into()));
    store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let reply = send(address, post_to("/200", key, "{}")).await;
    assert_eq!((reply.status.as_u16(), &json(&reply)["code"]), (503, &"store_unavailable".into()));
}

#[tokio::test]
async fn each_field_of_a_profile_can_be_changed() {
    let mut rules = Profile::ietf();
    rules.mismatch = StatusCode::CONFLICT;
    rules.equality = Equality::Json;
    rules.recording = |_, _| Recording::Mark;
    let address = serve_statuses(with(rules)).await;
    assert_eq!(send(address, post_to("/200", "k", "[1]")).await.text(), "run 1");
    assert_eq!(send(address, post_to("/200", "k", "[ 1 ]")).await.problem(), (410, "result-unavailable".to_owned()));
    assert_eq!(send(address, post_to("/200", "k", "[2]")).await.problem(), (409, "fingerprint-mismatch".to_owned()));
}

/// POST to `/200` with this field.
fn with_field(field: &str, body: &'static str) -> Request<Body> {
    post_to("/200", field, body)
}

#[tokio::test]
async fn each_response_repeats_the_key_header_if_the_profile_asks_for_it() {
    let mut ietf = Profile::ietf();
    ietf.echoes_key = true;
    for profile in [Profile::acp(), Profile::stripe(), ietf] {
        let layer = with(profile).max_body_bytes(100);
        // The handler sets the same header itself, with another value.
        let address = serve_handler(layer, async || answer(200, &[("idempotency-key", "of the handler")], "")).await;
        let echoes = async |field: &str, body: &'static str| {
            let reply = send(address, with_field(field, body)).await;
            let fields: Vec<_> =
                reply.headers.get_all("idempotency-key").iter().map(|it| it.to_str().unwrap()).collect();
            (reply.status.as_u16(), reply.is_replay(), fields.join(" and "))
        };
        let mismatch = profile.mismatch.as_u16();
        for (field, body, status, is_replay) in [
            ("\"k\"", "1", 200, false),
            ("\"k\"", "1", 200, true),
            ("k", "1", 200, true),
            ("k", "2", mismatch, false),
            ("a b", "1", 400, false),
            ("k", "a body that is much too long: ".repeat(4).leak(), 413, false),
        ] {
            assert_eq!(echoes(field, body).await, (status, is_replay, field.to_owned()), "{}", profile.name);
        }
        // The response to a request without a key header, or with two key headers, has no key header.
        let none = request(Method::POST, "/200").body("".into()).unwrap();
        assert_eq!(send(address, none).await.header("idempotency-key"), None);
        let mut two = with_field("k", "1");
        two.headers_mut().append("idempotency-key", "k".parse().unwrap());
        let reply = send(address, two).await;
        assert_eq!((reply.status.as_u16(), reply.header("idempotency-key")), (400, None));
    }
    for profile in [Profile::ietf(), Profile::ucp()] {
        let key = "8e03978e-40d5-43e8-bc93-6894a57f9324";
        let address = serve_handler(with(profile), async || answer(200, &[], "")).await;
        for _ in 0..2 {
            assert_eq!(send(address, with_field(key, "")).await.header("idempotency-key"), None, "{}", profile.name);
        }
        // A handler's own field is a header like any other.
        let address = serve_handler(with(profile), async || answer(200, &[("idempotency-key", "own")], "")).await;
        for _ in 0..2 {
            assert_eq!(send(address, with_field(key, "")).await.header("idempotency-key"), Some("own"));
        }
    }
}

#[tokio::test]
async fn the_refusal_of_a_duplicate_repeats_its_key_header() {
    let stage = Stage::closed();
    let address = serve_stage(with(Profile::acp()), &stage).await;
    let first = tokio::spawn(send(address, post("k", "{}")));
    stage.entered().await;
    let reply = send(address, post("\"k\"", "{}")).await;
    assert_eq!((reply.status.as_u16(), reply.header("idempotency-key")), (409, Some("\"k\"")));
    stage.go();
    assert_eq!(first.await.unwrap().header("idempotency-key"), Some("k"));
}

#[test]
fn a_policy_weaker_than_its_profile_requires_is_refused_when_the_layer_is_built() {
    let short = POLICY.ttl(Duration::from_secs(3600));
    let open = POLICY.on_store_error(OnStoreError::Run);
    for (policy, profile, works) in [
        (short, Profile::ietf(), true),
        (short, Profile::stripe(), false),
        (short, Profile::acp(), false),
        (short, Profile::ucp(), false),
        (open, Profile::acp(), true),
        (open, Profile::ucp(), false),
        (POLICY, Profile::ucp(), true),
    ] {
        let built = std::panic::catch_unwind(|| {
            drop(IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single()).profile(profile));
        });
        assert_eq!(built.is_ok(), works, "{} {policy:?}", profile.name);
    }
}
