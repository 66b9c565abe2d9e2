//! Limits of requests in flight ("slots"): for all keys, for waiting duplicates, for each caller, and during uploads.

use std::time::Duration;

use axum::body::Body;
use http::{Method, Request};
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::{InProgress, MemoryStore};
use idem_tests::{FaultyStore, StoreCall};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::rig::*;

const BUSY: (u16, &str) = (503, "busy");

fn problem(reply: &Reply) -> (u16, String) {
    assert_eq!(reply.header("retry-after"), Some("1"));
    reply.problem()
}

#[tokio::test]
async fn waiting_duplicates_of_a_key_use_up_no_slots_of_other_keys() {
    let (stage, store) = (Stage::closed(), FaultyStore::new(&MemoryStore::new()));
    let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(600)));
    let layer = IdempotencyLayer::new(&store, policy, Caller::single()).max_in_flight(2);
    let address = serve_stage(layer.clone(), &stage).await;
    let first = tokio::spawn(send(address, post("k", "")));
    stage.entered().await;
    let waiting: Vec<_> = (0..2).map(|_| tokio::spawn(send(address, post("k", "")))).collect();
    until("both wait", || store.count(StoreCall::Wait) == 2).await;
    // Waiting duplicates have their own limit.
    assert_eq!(problem(&send(address, post("k", "")).await), (BUSY.0, BUSY.1.to_owned()));
    let other = tokio::spawn(send(address, post("other", "")));
    stage.entered().await;
    assert_eq!(layer.in_flight(), 4);
    // Handlers run for two keys, so there is no slot for a third key.
    assert_eq!(problem(&send(address, post("third", "")).await), (BUSY.0, BUSY.1.to_owned()));
    stage.go();
    stage.go();
    let texts = [first.await.unwrap(), other.await.unwrap()].map(|reply| reply.text().to_owned());
    assert!(texts.contains(&"run 1".to_owned()) && texts.contains(&"run 2".to_owned()), "{texts:?}");
    for waiter in waiting {
        assert!(waiter.await.unwrap().is_replay());
    }
    until("no request is in flight", || layer.in_flight() == 0).await;
}

#[tokio::test]
async fn a_duplicate_that_runs_after_its_wait_keeps_the_slot_of_its_key() {
    let (stage, store) = (Stage::closed(), FaultyStore::new(&MemoryStore::new()));
    let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(600)));
    let layer = IdempotencyLayer::new(&store, policy, Caller::single()).max_in_flight(1);
    let running = stage.clone();
    let address = serve_handler(layer.clone(), async move || {
        let run = running.play().await;
        answer(if run == 1 { 500 } else { 200 }, &[], format!("run {run}"))
    })
    .await;
    let first = tokio::spawn(send(address, post("k", "")));
    stage.entered().await;
    let waiting = tokio::spawn(send(address, post("k", "")));
    until("it waits", || store.count(StoreCall::Wait) == 1).await;
    stage.go();
    assert_eq!(first.await.unwrap().status, 500);
    stage.entered().await;
    assert_eq!(problem(&send(address, post("other", "")).await), (BUSY.0, BUSY.1.to_owned()));
    stage.go();
    assert_eq!(waiting.await.unwrap().text(), "run 2");
    assert_eq!(layer.in_flight(), 0);
}

/// POST of this caller.
fn post_by(caller: &str, key: &str) -> Request<Body> {
    let request = request(Method::POST, "/pay").header("idempotency-key", key).header("x-caller", caller);
    request.body("".into()).unwrap()
}

#[tokio::test]
async fn one_caller_cannot_use_up_the_slots_of_all_callers() {
    let callers = || Caller::by(|head| Some(head.headers.get("x-caller")?.to_str().ok()?.to_owned()));
    let by_callers = || IdempotencyLayer::new(&MemoryStore::new(), POLICY, callers());
    for layer in [by_callers().max_in_flight(8), by_callers().max_in_flight_per_caller(2).max_in_flight(3)] {
        let stage = Stage::closed();
        let address = serve_stage(layer.clone(), &stage).await;
        let mut running = Vec::new();
        for key in ["a", "b"] {
            running.push(tokio::spawn(send(address, post_by("alice", key))));
            stage.entered().await;
        }
        for key in ["c", "a"] {
            let reply = send(address, post_by("alice", key)).await;
            assert_eq!(problem(&reply), (429, "caller-busy".to_owned()));
        }
        running.push(tokio::spawn(send(address, post_by("bob", "a"))));
        stage.entered().await;
        for _ in &running {
            stage.go();
        }
        for reply in running {
            assert_eq!(reply.await.unwrap().status, 200);
        }
        assert_eq!(layer.in_flight(), 0);
        stage.go();
        assert_eq!(send(address, post_by("alice", "c")).await.text(), "run 4");
    }
}

#[tokio::test]
async fn a_layer_with_a_single_caller_has_no_limit_per_caller() {
    let stage = Stage::closed();
    let address = serve_stage(layer().max_in_flight(2).max_in_flight_per_caller(1), &stage).await;
    let running = ["a", "b"].map(|key| tokio::spawn(send(address, post(key, ""))));
    stage.entered().await;
    stage.entered().await;
    stage.go();
    stage.go();
    for reply in running {
        assert_eq!(reply.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_request_counts_as_in_flight_from_the_start_of_its_upload() {
    let stage = Stage::open();
    let layer = layer().max_in_flight(1);
    let address = serve_stage(layer.clone(), &stage).await;
    let mut uploading = TcpStream::connect(address).await.unwrap();
    let head =
        "POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\nconnection: close\r\ncontent-length: 10\r\n\r\n";
    uploading.write_all(head.as_bytes()).await.unwrap();
    uploading.write_all(b"12345").await.unwrap();
    until("the upload is in flight", || layer.in_flight() == 1).await;
    assert_eq!(problem(&send(address, post("other", "")).await), (BUSY.0, BUSY.1.to_owned()));
    assert_eq!(stage.begun(), 0);
    uploading.write_all(b"67890").await.unwrap();
    let mut answer = String::new();
    uploading.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with("run 1"), "{answer}");
    // An upload that breaks off frees its slot.
    let mut uploading = TcpStream::connect(address).await.unwrap();
    uploading.write_all(head.replace(": k", ": k2").as_bytes()).await.unwrap();
    until("the upload is in flight", || layer.in_flight() == 1).await;
    drop(uploading);
    until("the upload is no longer in flight", || layer.in_flight() == 0).await;
}
