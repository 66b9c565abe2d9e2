//! Layers around and inside of this one: what each of them does to a request, and to a run.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::routing::post as on_post;
use futures::FutureExt;
use http::{Response, StatusCode};
use http_body_util::Limited;
use idem_runtime::http::{Caller, IdempotencyLayer, Profile, Recording};
use idem_runtime::{MemoryStore, OnCrash};
use tokio::sync::Notify;
use tower::{Layer, ServiceExt, service_fn};

use crate::rig::*;

const POLICIES: [OnCrash; 2] = [OnCrash::Retry, OnCrash::Fail];

fn under(on_crash: OnCrash) -> IdempotencyLayer {
    IdempotencyLayer::new(&MemoryStore::new(), POLICY.on_crash(on_crash), Caller::single())
}

/// Asserts that the next request runs under `retry`, and finds an interrupted operation under `fail`.
fn assert_cut_off(on_crash: OnCrash, again: &Reply, what: &str) {
    match on_crash {
        OnCrash::Retry => assert_eq!(again.text(), "run 2", "{what}"),
        _ => assert_eq!(again.problem(), (409, "interrupted".to_owned()), "{what}"),
    }
}

#[tokio::test]
async fn a_time_limit_inside_cuts_off_a_run() {
    for on_crash in POLICIES {
        for status in [408, 503, 504] {
            let (stage, limit) = (Stage::closed(), Arc::new(Notify::new()));
            let (running, over) = (stage.clone(), Arc::clone(&limit));
            // A `TimeoutLayer` whose time is over when the test says so.
            let inside = from_fn(move |request: Request, next: Next| {
                let over = Arc::clone(&over);
                async move {
                    tokio::select! {
                        response = next.run(request) => response,
                        () = over.notified() => answer(status, &[], ""),
                    }
                }
            });
            let handler = async move || format!("run {}", running.play().await);
            let app = Router::new().route("/pay", on_post(handler)).layer(inside).layer(under(on_crash));
            let address = serve(app).await;
            let first = tokio::spawn(send(address, post("k", "")));
            stage.entered().await;
            limit.notify_one();
            assert_eq!(first.await.unwrap().status, status);
            assert_eq!((stage.begun(), stage.ended()), (1, 0));
            stage.go();
            assert_cut_off(on_crash, &send(address, post("k", "")).await, &format!("{status}"));
        }
    }
}

#[tokio::test]
async fn a_guard_against_panics_inside_hides_no_panic() {
    for on_crash in POLICIES {
        let stage = Stage::open();
        let running = stage.clone();
        let inside = from_fn(async |request: Request, next: Next| {
            let run = AssertUnwindSafe(next.run(request)).catch_unwind();
            run.await.unwrap_or_else(|_| answer(500, &[], ""))
        });
        let handler = async move || {
            let run = running.play().await;
            assert!(run > 1, "on purpose");
            format!("run {run}")
        };
        let app = Router::new().route("/pay", on_post(handler)).layer(inside).layer(under(on_crash));
        let address = serve(app).await;
        assert_eq!(send(address, post("k", "")).await.status, 500);
        assert_cut_off(on_crash, &send(address, post("k", "")).await, "panic");
    }
}

#[tokio::test]
async fn an_error_of_the_service_inside_cuts_off_a_run() {
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
async fn a_response_that_proves_nothing_interrupts_under_fail() {
    for (profile, status, own, is_free) in [
        (Profile::ietf(), 408, None, false),
        (Profile::ietf(), 500, None, false),
        (Profile::ietf(), 599, None, false),
        (Profile::ucp(), 502, None, false),
        (Profile::stripe(), 408, None, false),
        // Refused before anything was done.
        (Profile::ietf(), 401, None, true),
        (Profile::ietf(), 409, None, true),
        (Profile::ietf(), 429, None, true),
        // The handler knows better.
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
async fn a_body_that_an_outer_limit_cuts_is_a_413() {
    // As `RequestBodyLimitLayer` does to a body without a length.
    let limit = from_fn(async |request: Request, next: Next| {
        let limited = request.map(|body| Body::new(Limited::new(body, 10)));
        Ok::<_, Infallible>(next.run(limited).await)
    });
    let read = async |body: Body| match axum::body::to_bytes(body, usize::MAX).await {
        Ok(body) => (StatusCode::OK, format!("{} bytes", body.len())),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    };
    let app = Router::new().route("/pay", on_post(read)).layer(layer().stream_digested(true)).layer(limit);
    let address = serve(app).await;
    // The second body streams, as it has a digest.
    for digest in ["", "content-digest: sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:\r\n"] {
        let head = format!("POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\n{digest}connection: close\r\n");
        let long = format!("{head}transfer-encoding: chunked\r\n\r\nb\r\n12345678901\r\n0\r\n\r\n");
        let said = send_raw(address, &long).await;
        assert!(said.starts_with("HTTP/1.1 413 ") && said.contains("body-too-large"), "{said}");
    }
    assert_eq!(send(address, post("k2", "short")).await.text(), "5 bytes");
}

#[test]
fn each_status_of_grpc_has_a_meaning() {
    let head = Response::new(()).into_parts().0;
    let meaning = |status: u32| {
        let trailers = [("grpc-status".parse().unwrap(), status.into())].into_iter().collect();
        (Profile::ietf().recording)(&head, &trailers)
    };
    for (statuses, expected) in [
        (&[0, 3, 5, 6, 9, 11, 12][..], Recording::Record),
        (&[7, 8, 10, 16], Recording::Release),
        // A time limit is CANCELLED or DEADLINE_EXCEEDED, a panic UNKNOWN or INTERNAL.
        (&[1, 2, 4, 13, 14, 15, 99], Recording::Interrupt),
    ] {
        assert_eq!(statuses.iter().map(|status| meaning(*status)).collect::<Vec<_>>(), vec![expected; statuses.len()]);
    }
}
