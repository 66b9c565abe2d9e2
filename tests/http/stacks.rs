//! Layers of tower-http around and inside of the idempotency layer: their effects on requests and on runs of handlers.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::{MethodRouter, post as on_post};
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HeaderName, HeaderValue, ORIGIN};
use http::{Method, Response, StatusCode};
use idem_runtime::http::{Caller, IdempotencyLayer, Profile, Recording};
use idem_runtime::{MemoryStore, OnCrash};
use tower::{Layer, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::TimeoutLayer;

use crate::rig::*;

const POLICIES: [OnCrash; 2] = [OnCrash::Retry, OnCrash::Fail];

fn under(on_crash: OnCrash) -> IdempotencyLayer {
    IdempotencyLayer::new(&MemoryStore::new(), POLICY.on_crash(on_crash), Caller::single())
}

/// Asserts that the request with the response `again` ran the handler again under `retry`, and found the operation
/// interrupted under `fail`.
fn assert_cut_off(on_crash: OnCrash, again: &Reply, what: &str) {
    match on_crash {
        OnCrash::Retry => assert_eq!(again.text(), "run 2", "{what}"),
        _ => assert_eq!(again.problem(), (409, "interrupted".to_owned()), "{what}"),
    }
}

/// Sends a request to `app` without a socket, so that the test can pause time.
async fn ask(app: &Router, request: Request) -> Reply {
    Reply::of(app.clone().oneshot(request).await.unwrap()).await.unwrap()
}

/// Handler that plays `stage` and answers with the number of its run.
fn counting(stage: &Stage) -> MethodRouter {
    let stage = stage.clone();
    on_post(async move || format!("run {}", stage.play().await))
}

const LIMIT: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_time_limit_inside_of_the_layer_interrupts_the_run() {
    for on_crash in POLICIES {
        for status in [408, 503, 504] {
            let stage = Stage::closed();
            let limit = TimeoutLayer::with_status_code(status.try_into().unwrap(), LIMIT);
            let app = Router::new().route("/pay", counting(&stage)).layer(limit).layer(under(on_crash));
            assert_eq!(ask(&app, post("k", "")).await.status, status);
            assert_eq!((stage.begun(), stage.ended()), (1, 0));
            stage.go();
            assert_cut_off(on_crash, &ask(&app, post("k", "")).await, &format!("{status}"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_response_of_an_inner_time_limit_with_an_unusual_status_is_recorded() {
    for on_crash in POLICIES {
        let stage = Stage::closed();
        let limit = TimeoutLayer::with_status_code(StatusCode::IM_A_TEAPOT, LIMIT);
        let app = Router::new().route("/pay", counting(&stage)).layer(limit).layer(under(on_crash));
        assert_eq!(ask(&app, post("k", "")).await.status, 418);
        let again = ask(&app, post("k", "")).await;
        assert_eq!((again.status.as_u16(), again.is_replay(), stage.begun()), (418, true, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_time_limit_outside_of_the_layer_stops_no_handler() {
    for on_crash in POLICIES {
        let stage = Stage::closed();
        let limit = TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LIMIT);
        let layer = under(on_crash);
        let app = Router::new().route("/pay", counting(&stage)).layer(layer.clone()).layer(limit);
        assert_eq!(ask(&app, post("k", "")).await.status, 504);
        assert_eq!((stage.begun(), stage.ended()), (1, 0));
        stage.go();
        until("the handler ends", || layer.in_flight() == 0).await;
        let again = ask(&app, post("k", "")).await;
        assert_eq!((again.text(), again.is_replay(), stage.begun()), ("run 1", true, 1));
    }
}

#[tokio::test]
async fn a_layer_that_catches_panics_does_not_hide_them_from_the_idempotency_layer() {
    for on_crash in POLICIES {
        for is_inside in [true, false] {
            let stage = Stage::open();
            let running = stage.clone();
            let handler = on_post(async move || {
                let run = running.play().await;
                assert!(run > 1, "on purpose");
                format!("run {run}")
            });
            let (app, guard) = (Router::new().route("/pay", handler), CatchPanicLayer::new());
            let app = match is_inside {
                true => app.layer(guard).layer(under(on_crash)),
                false => app.layer(under(on_crash)).layer(guard),
            };
            let address = serve(app).await;
            assert_eq!(send(address, post("k", "")).await.status, 500);
            assert_cut_off(on_crash, &send(address, post("k", "")).await, "panic");
        }
    }
}

#[tokio::test]
async fn an_error_of_the_inner_service_interrupts_the_run() {
    for on_crash in POLICIES {
        let stage = Stage::open();
        let running = stage.clone();
        let service = under(on_crash).layer(service_fn(move |_| {
            let running = running.clone();
            async move {
                match running.play().await {
                    1 => Err("the time is over"),
                    run => Ok(Response::new(Body::from(format!("run {run}")))),
                }
            }
        }));
        assert_eq!(service.clone().oneshot(post("k", "")).await.unwrap_err(), "the time is over");
        let again = service.oneshot(post("k", "")).await.unwrap();
        assert_cut_off(on_crash, &Reply::of(again).await.unwrap(), "error");
    }
}

#[tokio::test]
async fn under_on_crash_fail_a_response_that_leaves_the_effect_unclear_interrupts_the_key() {
    for (profile, status, own, is_free) in [
        (Profile::ietf(), 408, None, false),
        (Profile::ietf(), 500, None, false),
        (Profile::ietf(), 599, None, false),
        (Profile::ucp(), 502, None, false),
        (Profile::stripe(), 408, None, false),
        // These statuses refuse a request before it has any effect.
        (Profile::ietf(), 401, None, true),
        (Profile::ietf(), 409, None, true),
        (Profile::ietf(), 429, None, true),
        // The handler's own decision outranks its status.
        (Profile::ietf(), 503, Some(Recording::Release), true),
        (Profile::ietf(), 409, Some(Recording::Interrupt), false),
    ] {
        let stage = Stage::open();
        let running = stage.clone();
        let handler = async move || {
            let run = running.play().await;
            let mut response = answer(if run == 1 { status } else { 200 }, &[], format!("run {run}"));
            response.extensions_mut().extend(own.into_iter().fold(http::Extensions::new(), |mut all, own| {
                all.insert(own);
                all
            }));
            response
        };
        let address = serve_handler(under(OnCrash::Fail).profile(profile), handler).await;
        let key = "8e03978e-40d5-43e8-bc93-6894a57f9324";
        assert_eq!(send(address, post(key, "")).await.status, status);
        let again = send(address, post(key, "")).await;
        assert_eq!((again.status == 200, stage.begun() == 2), (is_free, is_free), "{} {status}", profile.name);
    }
}

#[tokio::test]
async fn a_request_body_beyond_the_limit_of_an_outer_layer_is_a_413() {
    let read = async |body: Body| match axum::body::to_bytes(body, usize::MAX).await {
        Ok(body) => (StatusCode::OK, format!("{} bytes", body.len())),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    };
    let app = Router::new().route("/pay", on_post(read)).layer(layer().stream_digested(true));
    let address = serve(app.layer(RequestBodyLimitLayer::new(10))).await;
    // The second body streams, because it has a digest.
    for digest in ["", "content-digest: sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:\r\n"] {
        let head = format!("POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\n{digest}connection: close\r\n");
        let long = format!("{head}transfer-encoding: chunked\r\n\r\nb\r\n12345678901\r\n0\r\n\r\n");
        let said = send_raw(address, &long).await;
        assert!(said.starts_with("HTTP/1.1 413 ") && said.contains("body-too-large"), "{said}");
    }
    // The outer limit itself refuses a request whose announced length is too large.
    assert_eq!(send(address, post("k", "12345678901")).await.status, 413);
    assert_eq!(send(address, post("k2", "short")).await.text(), "5 bytes");
}

/// `amount=1` as gzip.
const GZIP: [u8; 28] =
    [31, 139, 8, 0, 0, 0, 0, 0, 2, 3, 75, 204, 205, 47, 205, 43, 177, 53, 4, 0, 97, 136, 165, 232, 8, 0, 0, 0];

/// POST with the body [`GZIP`] and its digest.
fn encoded(key: &str) -> Request {
    let mut request = post(key, GZIP.to_vec());
    let digest = "sha-256=:K7Uw/4MovjRcpd75oOwhZXWeQHzTjqCJvcimUpopJ/A=:";
    request.headers_mut().extend([(CONTENT_ENCODING, "gzip"), (CONTENT_DIGEST, digest)].map(field));
    request
}

const CONTENT_DIGEST: HeaderName = HeaderName::from_static("content-digest");

fn field((name, value): (HeaderName, &'static str)) -> (HeaderName, HeaderValue) {
    (name, HeaderValue::from_static(value))
}

#[tokio::test]
async fn a_request_body_is_decompressed_inside_of_the_layer() {
    let decompression = RequestDecompressionLayer::new;
    let app = || Router::new().route("/pay", on_post(async |body: String| body));
    let address = serve(app().layer(decompression()).layer(layer())).await;
    for is_replay in [false, true] {
        let reply = send(address, encoded("k")).await;
        assert_eq!((reply.status.as_u16(), reply.text(), reply.is_replay()), (200, "amount=1", is_replay));
    }
    // With the decompression outside, the digest does not match the body that the layer reads.
    let address = serve(app().layer(layer()).layer(decompression())).await;
    assert_eq!(send(address, encoded("k")).await.problem(), (400, "digest-mismatch".to_owned()));
    // A limit inside of the decompression bounds the decoded body.
    let limited = app().layer(RequestBodyLimitLayer::new(7)).layer(decompression()).layer(layer());
    let address = serve(limited).await;
    assert_eq!(send(address, encoded("k")).await.status, 413);
}

#[tokio::test]
async fn a_response_is_compressed_outside_of_the_layer() {
    let text = "a receipt of many words, and then of some more words";
    let app = || Router::new().route("/pay", on_post(async move || text));
    let compressed = || {
        let mut request = post("k", "");
        request.headers_mut().extend([(ACCEPT_ENCODING, "gzip")].map(field));
        request
    };
    let address = serve(app().layer(layer()).layer(CompressionLayer::new())).await;
    assert_eq!(send(address, compressed()).await.header("content-encoding"), Some("gzip"));
    let plain = send(address, post("k", "")).await;
    assert_eq!((plain.text(), plain.header("content-encoding"), plain.is_replay()), (text, None, true));
    let again = send(address, compressed()).await;
    assert_eq!((again.header("content-encoding"), again.is_replay()), (Some("gzip"), true));
    // With the compression inside, the response suits the first client only, so it is not replayed.
    let address = serve(app().layer(CompressionLayer::new()).layer(layer())).await;
    let first = send(address, compressed()).await;
    assert_eq!((first.status.as_u16(), first.header("idempotency-replayable")), (200, Some("false")));
    assert_eq!(send(address, post("k", "")).await.problem(), (410, "result-unavailable".to_owned()));
}

#[tokio::test]
async fn each_origin_gets_its_own_fields_of_cors() {
    const ORIGINS: [&str; 2] = ["https://shop.example", "https://desk.example"];
    let cors = || {
        CorsLayer::new()
            .allow_origin(ORIGINS.map(HeaderValue::from_static))
            .allow_methods([Method::POST])
            .allow_headers([HeaderName::from_static("idempotency-key")])
    };
    let from = |origin: &'static str, mut request: Request| {
        request.headers_mut().extend([(ORIGIN, origin)].map(field));
        request
    };
    let allowed = |reply: &Reply| reply.header("access-control-allow-origin").map(str::to_owned);
    let stage = Stage::open();
    let app = || Router::new().route("/pay", counting(&stage));
    let address = serve(app().layer(layer()).layer(cors())).await;
    // A preflight has no key.
    let preflight = request(Method::OPTIONS, "/pay").header("access-control-request-method", "POST");
    let preflight = send(address, from(ORIGINS[0], preflight.body(Body::empty()).unwrap())).await;
    assert_eq!((preflight.status.as_u16(), allowed(&preflight).as_deref()), (200, Some(ORIGINS[0])));
    assert_eq!(preflight.header("access-control-allow-headers"), Some("idempotency-key"));
    assert_eq!(stage.begun(), 0);
    for (origin, is_replay) in [(ORIGINS[0], false), (ORIGINS[1], true)] {
        let reply = send(address, from(origin, post("k", ""))).await;
        assert_eq!((allowed(&reply).as_deref(), reply.is_replay()), (Some(origin), is_replay));
        let problem = send(address, from(origin, post("k", "another"))).await;
        assert_eq!((problem.problem().0, allowed(&problem).as_deref()), (422, Some(origin)));
    }
    // With CORS inside, the record has the fields of the first origin, and a refusal by the layer has none.
    let address = serve(app().layer(cors()).layer(layer())).await;
    for origin in ORIGINS {
        assert_eq!(allowed(&send(address, from(origin, post("k", ""))).await).as_deref(), Some(ORIGINS[0]));
    }
    assert_eq!(allowed(&send(address, from(ORIGINS[0], post("k", "another"))).await), None);
}

#[test]
fn each_status_of_grpc_records_releases_or_interrupts_its_key() {
    let head = Response::new(()).into_parts().0;
    let meaning = |status: u32| {
        let trailers = [("grpc-status".parse().unwrap(), status.into())].into_iter().collect();
        (Profile::ietf().recording)(&head, &trailers)
    };
    for (statuses, expected) in [
        (&[0, 3, 5, 6, 9, 11, 12][..], Recording::Record),
        (&[7, 8, 10, 16], Recording::Release),
        // A server reports a time limit as CANCELLED or DEADLINE_EXCEEDED, and a panic as UNKNOWN or INTERNAL.
        (&[1, 2, 4, 13, 14, 15, 99], Recording::Interrupt),
    ] {
        assert_eq!(statuses.iter().map(|status| meaning(*status)).collect::<Vec<_>>(), vec![expected; statuses.len()]);
    }
}
