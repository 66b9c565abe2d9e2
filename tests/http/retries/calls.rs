//! Calls of handlers: each attempt sends the same key, from any task.

use std::net::SocketAddr;

use axum::body::Body;
use bytes::Bytes;
use http::Request;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use idem_runtime::http::client::{CallKey, CallName, RetryError, RetryLayer};
use idem_runtime::{Error, MemoryStore, current, idempotent};
use tower::buffer::Buffer;
use tower::util::BoxCloneService;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};

use super::answers::{Script, hurried};
use super::{Hurried, Small, to};
use crate::rig::*;

/// Task in which the client of a handler runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// The task of a `tower::buffer::Buffer`.
    Buffer,
    /// A task that the handler spawned.
    Spawned,
}

fn named(name: CallName) -> Request<Small> {
    let mut request = to("/pay");
    request.extensions_mut().insert(name);
    request
}

/// Sends the request of `name` from another task.
async fn send_from(place: Place, script: &Script, name: CallName) -> Result<String, BoxError> {
    let client = hurried(&Hurried::default()).layer(script.client());
    let response = match place {
        Place::Buffer => Buffer::new(client, 4).oneshot(named(name)).await?,
        Place::Spawned => tokio::spawn(client.oneshot(named(name))).await??,
    };
    Ok(response.status().to_string())
}

#[tokio::test]
async fn a_call_name_that_carries_its_attempt_gives_every_attempt_the_same_key() {
    #[idempotent(key = "{order}", ttl = "1h", store = store, scope = "http test: name of an attempt")]
    async fn order(
        store: &MemoryStore,
        script: Script,
        place: Place,
        order: u32,
        fails: bool,
    ) -> Result<String, BoxError> {
        let attempt = current()?;
        let sent = send_from(place, &script, CallName::of(&attempt, "charge")).await?;
        assert_eq!(script.keys.lock().unwrap().last(), Some(&Some(attempt.child_key("charge"))));
        if fails { Err("crashed".into()) } else { Ok(sent) }
    }

    let store = MemoryStore::new();
    for (place, number) in [(Place::Buffer, 1), (Place::Spawned, 2)] {
        let script = Script::default();
        assert_eq!(order(&store, script.clone(), place, number, true).await.unwrap_err().to_string(), "crashed");
        assert_eq!(order(&store, script.clone(), place, number, false).await.unwrap(), "200 OK");
        let keys = script.keys.lock().unwrap().clone();
        assert!(keys.len() == 2 && keys[0].is_some() && keys[0] == keys[1], "{place:?}: one charge: {keys:?}");
        // The call of another operation has another key.
        order(&store, script.clone(), place, number + 10, false).await.unwrap();
        assert_ne!(script.keys.lock().unwrap()[2], keys[0]);
    }
}

#[tokio::test]
async fn a_call_name_without_an_attempt_is_refused() {
    #[idempotent(key = "{order}", ttl = "1h", store = store, scope = "http test: plain name elsewhere")]
    async fn order(store: &MemoryStore, script: Script, place: Place, order: u32) -> Result<String, Error> {
        let sent = send_from(place, &script, CallName::new("charge")).await;
        Ok(sent.unwrap_or_else(|error| error.to_string()))
    }

    let store = MemoryStore::new();
    for (place, number) in [(Place::Buffer, 1), (Place::Spawned, 2)] {
        let script = Script::default();
        let said = order(&store, script.clone(), place, number).await.unwrap();
        assert_eq!(*script.keys.lock().unwrap(), [], "{place:?}: nothing is sent");
        assert!(said.contains("CallName::of") && said.contains("nothing was sent"), "{place:?}: {said}");
    }
    // A request with the same call name is refused outside of every handler.
    let script = Script::default();
    let client = hurried(&Hurried::default()).layer(script.client());
    let error = client.oneshot(named(CallName::new("charge"))).await.unwrap_err();
    assert!(matches!(error, RetryError::NoAttempt { .. }), "{error:?}");
    assert!(!error.was_sent() && error.key().is_none() && script.tries() == 0);
}

/// Handler that makes its client, and boxes every error: the compiler has to prove that its future is `Send`.
#[idempotent(key = "{order}", ttl = "1h", store = store, scope = "http test: a client of its own")]
async fn charge(store: &MemoryStore, address: SocketAddr, order: u32) -> Result<String, BoxError> {
    let one_try = service_fn(move |request: Request<Small>| async move {
        let mut connection = Connection::open(address, Version::Two).await;
        Ok::<_, BoxError>(connection.send(request.map(Body::new)).await?)
    });
    let mut client = RetryLayer::new().layer(one_try);
    let response = client.ready().await?.call(named(CallName::new("charge"))).await?;
    let bytes = response.into_body().collect().await?.to_bytes();
    let again = client.oneshot(named(CallName::new("refund"))).await?;
    Ok(format!("{}, {}", String::from_utf8_lossy(&bytes), Reply::of(again).await?.text()))
}

/// Handler that uses hyper's client. A layer in the middle boxes the client's errors and bodies.
#[idempotent(key = "{order}", ttl = "1h", store = store, scope = "http test: hyper's client")]
async fn charge_by_hyper(store: &MemoryStore, address: SocketAddr, order: u32) -> Result<String, BoxError> {
    let hyper = Client::builder(TokioExecutor::new()).http2_only(true).build_http::<Full<Bytes>>();
    let boxed = hyper.clone().map_err(BoxError::from);
    let boxed = boxed.map_response(|it| it.map(|body| BoxBody::new(body.map_err(BoxError::from))));
    let request = |name: &'static str| {
        let request = Request::post(format!("http://{address}/pay")).extension(CallName::new(name));
        request.body(Small::from("amount=1"))
    };
    let plain = RetryLayer::new().layer(hyper).oneshot(request("charge")?).await?;
    let client = RetryLayer::new().layer(BoxCloneService::new(boxed));
    let boxed = client.oneshot(request("refund")?).await?;
    assert!(boxed.extensions().get::<CallKey>().is_some());
    Ok(format!("{}, {}", Reply::of(plain).await?.text(), Reply::of(boxed).await?.text()))
}

#[tokio::test]
async fn a_spawned_handler_can_call_a_client_with_boxed_errors() {
    let (address, stage) = serve_counter(layer()).await;
    let store = MemoryStore::new();
    let its = store.clone();
    let spawned = tokio::spawn(async move { charge(&its, address, 1).await });
    assert_eq!(spawned.await.unwrap().unwrap(), "run 1, run 2");
    let its = store.clone();
    let spawned = tokio::spawn(async move { charge_by_hyper(&its, address, 1).await });
    assert_eq!(spawned.await.unwrap().unwrap(), "run 3, run 4");
    assert_eq!(stage.begun(), 4);
}

#[tokio::test]
async fn a_handler_of_axum_can_call_a_client_with_boxed_errors() {
    let (bank, stage) = serve_counter(layer()).await;
    let store = MemoryStore::new();
    let pay = async move || charge(&store, bank, 1).await.unwrap_or_else(|error| error.to_string());
    let shop = serve(axum::Router::new().route("/pay", axum::routing::post(pay))).await;
    for _ in 0..2 {
        assert_eq!(send(shop, post("k", "")).await.text(), "run 1, run 2");
    }
    assert_eq!(stage.begun(), 2);
}
