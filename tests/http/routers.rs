//! Position of the layer: in nested routers, on a single route, or applied twice.

use axum::Router;
use axum::routing::{MethodRouter, any};
use idem_runtime::MemoryStore;
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_tests::{FaultyStore, StoreCall};

use crate::rig::*;

/// Handler that answers with the number of its run.
fn counter(stage: &Stage) -> MethodRouter {
    let stage = stage.clone();
    any(async move || format!("run {}", stage.play().await))
}

/// Two nested routers with the same path below their prefixes.
fn nested(stage: &Stage, layer: Option<&IdempotencyLayer>) -> Router {
    let sibling = || {
        let router = Router::new().route("/pay/{id}", counter(stage)).route("/refund/{id}", counter(stage));
        match layer {
            Some(layer) => router.layer(layer.clone()),
            None => router,
        }
    };
    Router::new().nest("/eu", sibling()).nest("/us", sibling())
}

#[tokio::test]
async fn routes_of_different_nested_routers_are_different_operations() {
    let store = MemoryStore::new();
    for inside in [true, false] {
        let stage = Stage::open();
        let layer = IdempotencyLayer::new(&store, POLICY, Caller::single());
        let app = if inside { nested(&stage, Some(&layer)) } else { nested(&stage, None).layer(layer) };
        let address = serve(app).await;
        let key = format!("inside-{inside}");
        // The same key on two routes names two operations.
        assert_eq!(send(address, post_to("/eu/pay/1", &key, "")).await.text(), "run 1");
        assert_eq!(send(address, post_to("/us/pay/1", &key, "")).await.text(), "run 2");
        assert_eq!(send(address, post_to("/eu/refund/1", &key, "")).await.text(), "run 3");
        // The same key on two paths of a route is a misuse.
        assert_eq!(send(address, post_to("/eu/pay/2", &key, "")).await.problem().0, 422);
        let again = send(address, post_to("/us/pay/1", &key, "")).await;
        assert_eq!((again.text(), again.is_replay()), ("run 2", true));
    }
}

#[tokio::test]
async fn routes_with_the_same_scope_share_their_keys() {
    let stage = Stage::open();
    let layer = IdempotencyLayer::new(&MemoryStore::new(), POLICY, Caller::single()).scope("payments");
    let address = serve(nested(&stage, Some(&layer))).await;
    assert_eq!(send(address, post_to("/eu/pay/1", "k", "")).await.text(), "run 1");
    assert_eq!(send(address, post_to("/us/pay/1", "k", "")).await.problem().0, 422);
}

#[tokio::test]
async fn without_a_router_requests_with_different_paths_are_different_operations() {
    let stage = Stage::open();
    let app = Router::new().fallback_service(counter(&stage)).layer(layer());
    let address = serve(app).await;
    assert_eq!(send(address, post_to("/a", "k", "")).await.text(), "run 1");
    assert_eq!(send(address, post_to("/b", "k", "")).await.problem().0, 422);
}

#[tokio::test]
async fn a_layer_that_is_applied_twice_to_a_route_works_once() {
    let store = FaultyStore::new(&MemoryStore::new());
    let stage = Stage::open();
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single());
    let app = Router::new().route("/pay", counter(&stage).layer(layer.clone())).layer(layer);
    let address = serve(app).await;
    assert_eq!(send(address, post("k", "")).await.text(), "run 1");
    assert_eq!((store.count(StoreCall::Reserve), store.count(StoreCall::Finish)), (1, 1));
    let again = send(address, post("k", "")).await;
    assert_eq!((again.text(), again.is_replay()), ("run 1", true));
}

#[tokio::test]
async fn two_layers_with_two_scopes_are_two_operations() {
    let store = FaultyStore::new(&MemoryStore::new());
    let stage = Stage::open();
    let named = |scope: &str| IdempotencyLayer::new(&store, POLICY, Caller::single()).scope(scope);
    let app = Router::new().route("/pay", counter(&stage)).layer(named("inner")).layer(named("outer"));
    let address = serve(app).await;
    assert_eq!(send(address, post("k", "")).await.text(), "run 1");
    assert_eq!(store.count(StoreCall::Finish), 2);
    assert!(send(address, post("k", "")).await.is_replay());
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn an_idempotent_function_in_a_handler_is_an_operation_of_its_own() {
    use idem_runtime::{Error, idempotent};

    #[idempotent(key = "{order}", ttl = "1h", store = store, scope = "http test: charge")]
    async fn charge(store: &MemoryStore, stage: &Stage, order: u32) -> Result<usize, Error> {
        Ok(stage.play().await)
    }

    let (store, stage) = (MemoryStore::new(), Stage::open());
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single());
    let charges = stage.clone();
    let address = serve_handler(layer, async move || {
        let charge = charge(&store, &charges, 7).await.expect("charges");
        answer(if charges.begun() == 1 { 503 } else { 200 }, &[], format!("charge {charge}"))
    })
    .await;
    // The response is not recorded, but the charge is.
    for _ in 0..2 {
        let reply = send(address, post("k", "")).await;
        assert_eq!((reply.status.as_u16(), reply.text(), reply.is_replay()), (503, "charge 1", false));
    }
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn a_path_parameter_can_get_another_name_without_losing_keys() {
    let store = MemoryStore::new();
    let answer = async |route: &str, path: &str, key: &str| {
        let stage = Stage::open();
        let layer = IdempotencyLayer::new(&store, POLICY, Caller::single());
        let app = Router::new().route(route, counter(&stage)).layer(layer);
        let reply = send(serve(app).await, post_to(path, key, "")).await;
        (reply.status.as_u16(), reply.is_replay())
    };
    assert_eq!(answer("/pay/{id}/of/{customer}", "/pay/1/of/2", "k").await, (200, false));
    assert_eq!(answer("/pay/{payment_id}/of/{id}", "/pay/1/of/2", "k").await, (200, true));
    // A path with a wildcard, or with other text in braces, is another route.
    assert_eq!(answer("/pay/{*rest}", "/pay/1/of/2", "k").await, (200, false));
    assert_eq!(answer("/pay/{*all}", "/pay/1/of/2", "k").await, (200, true));
    assert_eq!(answer("/see/{id}", "/see/{id}", "k").await, (200, false));
    assert_eq!(answer("/see/{{id}}", "/see/{id}", "k").await, (200, false));
    assert_eq!(answer("/see/{{number}}", "/see/{number}", "k").await, (200, false));
}
