//! Keys of the application, and the keys that responses and errors show.

use http::{HeaderValue, Method, Request};
use idem_runtime::http::client::{CallKey, CallName, RetryError, RetryLayer, RetryLimit};
use tower::{BoxError, Layer, ServiceExt, service_fn};

use super::answers::{Script, Turn, hurried};
use super::{Hurried, Small, client, to};
use crate::rig::*;

fn keyed(key: CallKey) -> Request<Small> {
    let mut request = to("/pay");
    request.extensions_mut().insert(key);
    request
}

#[tokio::test]
async fn every_response_and_every_error_of_a_client_holds_the_key() {
    let layer = hurried(&Hurried::default());
    for turns in [
        vec![],
        vec![Turn::Whole(402, vec![], "declined")],
        vec![Turn::Whole(503, vec![("retry-after", "3600")], "")],
        (0..5).map(|_| Turn::Whole(500, vec![], "")).collect(),
    ] {
        let script = Script::of(turns);
        let response = layer.layer(script.client()).oneshot(to("/pay")).await.unwrap();
        let key = response.extensions().get::<CallKey>().expect("a key");
        assert!(script.keys.lock().unwrap().iter().all(|sent| sent.as_deref() == Some(key.as_str())));
    }
    let script = Script::of((0..5).map(|_| Turn::Fails("refused")));
    let error = layer.layer(script.client()).oneshot(to("/pay")).await.unwrap_err();
    assert_eq!(error.key().map(CallKey::as_str), script.keys.lock().unwrap()[0].as_deref());
    // The response to a request without a key holds no key.
    let get = || Request::get("http://till/pay").body(Small::default()).unwrap();
    let response = layer.layer(Script::default().client()).oneshot(get()).await.unwrap();
    assert!(response.extensions().get::<CallKey>().is_none());
    let error = layer.layer(Script::of([Turn::Fails("refused")]).client()).oneshot(get()).await.unwrap_err();
    assert_eq!((error.key(), error.limit()), (None, None));
}

#[tokio::test]
async fn an_application_that_gave_up_asks_again_with_the_same_key_and_pays_once() {
    let stage = Stage::closed();
    let address = serve_stage(layer(), &stage).await;
    let keys = std::sync::Arc::default();
    let first_hangs_up = client(address, &keys);
    let (running, inner) = (stage.clone(), first_hangs_up.clone());
    let inner = service_fn(move |request: Request<Small>| {
        let (running, inner) = (running.clone(), inner.clone());
        async move {
            if running.begun() > 0 {
                return inner.oneshot(request).await;
            }
            let asking = tokio::spawn(inner.oneshot(request));
            running.entered().await;
            asking.abort();
            Err(BoxError::from("hung up"))
        }
    });
    // The payment still runs. The last response holds the key that the layer made.
    let retry = hurried(&Hurried::default()).max_tries(2);
    let response = retry.layer(inner).oneshot(to("/pay")).await.unwrap();
    assert_eq!((response.status().as_u16(), response.extensions().get()), (409, Some(&RetryLimit::Tries)));
    let stored = response.extensions().get::<CallKey>().unwrap().as_str().to_owned();
    stage.go();
    until("the payment has ended", || stage.ended() == 1).await;
    // The application retries later, with the key that it has stored as a text.
    let again = RetryLayer::new().layer(first_hangs_up).oneshot(keyed(CallKey::new(stored).unwrap())).await.unwrap();
    let reply = Reply::of(again).await.unwrap();
    assert_eq!((reply.text(), reply.is_replay(), stage.begun()), ("run 1", true, 1));
}

#[tokio::test]
async fn a_key_of_the_application_is_sent_unchanged() {
    let (bare, quoted) = (hurried(&Hurried::default()), hurried(&Hurried::default()).quoted(true));
    for layer in [bare, quoted] {
        for text in ["order-42", "\"order-42\""] {
            let script = Script::default();
            let mut by_field = to("/pay");
            by_field.headers_mut().insert("idempotency-key", text.parse().unwrap());
            let mut next = Some(by_field);
            for _ in 0..3 {
                let response = layer.layer(script.client()).oneshot(next.take().unwrap()).await.unwrap();
                next = response.extensions().get::<CallKey>().cloned().map(keyed);
            }
            let sent = script.keys.lock().unwrap().clone();
            assert_eq!(sent[0].as_deref(), Some(text), "the header field is unchanged");
            // A layer that sends keys in quotes adds quotes to a key without them. The server reads the same key with
            // and without quotes.
            assert!(
                sent[1] == sent[2] && sent[1].as_ref().is_some_and(|it| it.trim_matches('"') == "order-42"),
                "{sent:?}"
            );
        }
        // A second layer keeps the key that the first layer has written.
        let script = Script::default();
        let response = layer.layer(script.client()).oneshot(to("/pay")).await.unwrap();
        let key = response.extensions().get::<CallKey>().unwrap().clone();
        layer.layer(script.client()).oneshot(keyed(key.clone())).await.unwrap();
        let mut by_field = to("/pay");
        by_field.headers_mut().insert("idempotency-key", key.as_str().parse().unwrap());
        layer.layer(script.client()).oneshot(by_field).await.unwrap();
        let sent = script.keys.lock().unwrap();
        assert!(sent.iter().all(|it| *it == sent[0]), "{sent:?}");
    }
}

#[tokio::test]
async fn a_key_of_the_application_works_with_every_method() {
    for method in [Method::PUT, Method::DELETE, Method::POST] {
        let script = Script::of([Turn::Fails("refused")]);
        let mut request = keyed(CallKey::new("mine").unwrap());
        *request.method_mut() = method;
        // A key outranks a call name.
        request.extensions_mut().insert(CallName::new("charge"));
        hurried(&Hurried::default()).layer(script.client()).oneshot(request).await.unwrap();
        assert_eq!(*script.keys.lock().unwrap(), [Some("mine".to_owned()), Some("mine".to_owned())]);
    }
}

#[tokio::test]
async fn a_client_layer_that_requires_keys_makes_none() {
    let layer = hurried(&Hurried::default()).require_key(true);
    let script = Script::default();
    let error = layer.layer(script.client()).oneshot(to("/pay?token=secret")).await.unwrap_err();
    assert!(matches!(error, RetryError::NoKey { .. }) && !error.was_sent() && script.tries() == 0, "{error:?}");
    let said = format!("{error} {error:?}");
    assert!(said.contains("CallKey") && !said.contains("secret"), "{said}");
    layer.layer(script.client()).oneshot(keyed(CallKey::random())).await.unwrap();
    let get = Request::get("http://till/pay").body(Small::default()).unwrap();
    layer.layer(script.client()).oneshot(get).await.unwrap();
    assert_eq!(script.tries(), 2);
}

#[tokio::test]
async fn a_request_whose_key_header_holds_no_valid_key_is_not_sent() {
    for values in [&[""][..], &["  "], &["\"\""], &["\" \""], &["a", "b"], &["a", "a"], &["k\u{e9}y"]] {
        let script = Script::default();
        let mut request = to("/pay?token=secret");
        for value in values {
            request.headers_mut().append("idempotency-key", HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        let error = hurried(&Hurried::default()).layer(script.client()).oneshot(request).await.unwrap_err();
        assert!(matches!(error, RetryError::InvalidKey { .. }), "{values:?}: {error:?}");
        assert!(!error.was_sent() && script.tries() == 0, "{values:?}");
        let said = format!("{error} {error:?}");
        assert!(said.contains("/pay") && said.contains("nothing was sent") && !said.contains("secret"), "{said}");
    }
}

#[tokio::test]
async fn debug_output_and_errors_of_a_client_show_no_key_and_no_payload() {
    const SECRETS: [&str; 3] = ["card-4111", "cookie-secret", "body-secret"];
    let key = || CallKey::new("card-4111").unwrap();
    let mut turns = vec![Turn::Whole(503, vec![("set-cookie", "cookie-secret")], "body-secret")];
    turns.extend((0..4).map(|_| Turn::Fails("refused")));
    let script = Script::of(turns);
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let (inner, shown) = (script.client(), std::sync::Arc::clone(&seen));
    let inner = service_fn(move |request: Request<Small>| {
        // The key is in the field and in the extensions of the request.
        let key = request.extensions().get::<CallKey>();
        shown.lock().unwrap().push(format!("{:?} {key:?}", request.headers()));
        inner.clone().oneshot(request)
    });
    let retry = hurried(&Hurried::default()).layer(inner);
    let error = retry.oneshot(keyed(key())).await.unwrap_err();
    assert_eq!(error.key(), Some(&key()));
    let broken = Script::of((0..5).map(|_| Turn::Breaks(200, "body-secret")));
    let broken = hurried(&Hurried::default()).layer(broken.client()).oneshot(keyed(key())).await.unwrap_err();
    for said in [format!("{error:?} {error}"), format!("{broken:?} {broken}"), seen.lock().unwrap().concat()] {
        assert!(SECRETS.iter().all(|secret| !said.contains(secret)), "{said}");
        assert!(said.contains("%hash:"), "the output holds a hash, by which a reader finds a known key: {said}");
    }
}
