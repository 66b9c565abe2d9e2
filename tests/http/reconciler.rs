//! Reconcilers of the layer, which find the answers to requests that were cut off.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::routing::post as on_post;
use bytes::Bytes;
use futures::FutureExt as _;
use http::{HeaderValue, Response, StatusCode};
use idem_runtime::http::{Caller, IdempotencyKey, IdempotencyLayer, ProblemKind, Recording};
use idem_runtime::{Error, MemoryStore, Outcome, Policy, Reconciliation, Store, StoreErrorKind, current};
use idem_tests::{Fault, FaultyStore, StoreCall};
use tower::ServiceExt;
use tower_http::timeout::TimeoutLayer;

use crate::rig::*;

type Answer = Result<Reconciliation<Response<Bytes>>, Error>;

/// Answers that a reconciler gives in turn, and the questions that it got.
#[derive(Clone, Default)]
struct Outside {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    questions: Arc<Mutex<Vec<String>>>,
}

impl Outside {
    fn with(answers: impl IntoIterator<Item = Answer>) -> Self {
        Self { answers: Arc::new(Mutex::new(answers.into_iter().collect())), ..Self::default() }
    }

    /// Layer over `store` that asks for these answers.
    fn layer<S: Store>(&self, store: &S, policy: Policy) -> IdempotencyLayer {
        let outside = self.clone();
        IdempotencyLayer::new(store, policy, Caller::single()).reconcile(move |head| {
            let outside = outside.clone();
            async move {
                let key = &head.extensions.get::<IdempotencyKey>().expect("the key of the client").0;
                let question = format!("{} {} {key} {}", head.method, head.uri, current()?.child_key("payment"));
                outside.questions.lock().unwrap().push(question);
                outside.answers.lock().unwrap().pop_front().expect("no further question")
            }
        })
    }

    fn asked(&self) -> usize {
        self.questions.lock().unwrap().len()
    }
}

fn receipt() -> Response<Bytes> {
    let mut receipt = Response::new(Bytes::from_static(b"receipt 7"));
    *receipt.status_mut() = StatusCode::CREATED;
    receipt.headers_mut().insert("location", HeaderValue::from_static("/payments/7"));
    // Only the layer sends this field.
    receipt.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
    receipt
}

/// Policy whose calls soon give up on a store that refuses.
const SHORT: Policy = POLICY.lease(Duration::from_millis(200));
const AGAIN: Duration = Duration::from_secs(7);

/// Serves a handler that panics in its first run.
async fn serve_panicking(layer: IdempotencyLayer, stage: &Stage) -> std::net::SocketAddr {
    let stage = stage.clone();
    serve_handler(layer, async move || {
        let run = stage.play().await;
        assert!(run > 1, "on purpose");
        format!("run {run}")
    })
    .await
}

async fn cut_off(address: std::net::SocketAddr) {
    Connection::open(address, Version::Two).await.send(post("k", "")).await.unwrap_err();
}

#[tokio::test]
async fn a_request_that_was_cut_off_is_answered_by_the_reconciler_and_recorded() {
    let (outside, stage) = (Outside::with([Ok(Reconciliation::Done(receipt()))]), Stage::open());
    let address = serve_panicking(outside.layer(&MemoryStore::new(), POLICY), &stage).await;
    cut_off(address).await;
    for is_replay in [false, true, true] {
        let reply = send(address, post("k", "")).await;
        assert_eq!((reply.status.as_u16(), reply.text(), reply.is_replay()), (201, "receipt 7", is_replay));
        assert_eq!(reply.header("location"), Some("/payments/7"));
    }
    assert_eq!((stage.begun(), outside.asked()), (1, 1));
    let questions = outside.questions.lock().unwrap();
    assert!(questions[0].starts_with("POST /pay k "), "{questions:?}");
}

#[tokio::test]
async fn the_handler_runs_after_the_reconciler_has_answered_that_nothing_happened() {
    let (outside, stage) = (Outside::with([Ok(Reconciliation::NotDone)]), Stage::open());
    let address = serve_panicking(outside.layer(&MemoryStore::new(), POLICY), &stage).await;
    cut_off(address).await;
    for is_replay in [false, true] {
        let reply = send(address, post("k", "")).await;
        assert_eq!((reply.text(), reply.is_replay()), ("run 2", is_replay));
    }
    assert_eq!((stage.begun(), outside.asked()), (2, 1));
}

#[tokio::test]
async fn an_unknown_outcome_is_a_409_to_be_retried_until_the_questions_are_used_up() {
    let unknown = || Ok(Reconciliation::Unknown { ask_again: AGAIN });
    let outside = Outside::with([unknown(), Err(Error::NoAttempt), unknown()]);
    let stage = Stage::open();
    let address = serve_panicking(outside.layer(&MemoryStore::new(), POLICY.max_reconciliations(3)), &stage).await;
    cut_off(address).await;
    for after in [Some("7"), None, Some("7")] {
        let reply = send(address, post("k", "")).await;
        assert_eq!(reply.problem(), (409, "unresolved".to_owned()));
        assert!(reply.text().contains(r#""retryable":true"#), "{}", reply.text());
        match after {
            Some(_) => assert_eq!(reply.header("retry-after"), after),
            None => assert!(reply.header("retry-after").is_some()),
        }
    }
    let reply = send(address, post("k", "")).await;
    assert_eq!((reply.problem(), reply.header("retry-after")), ((409, "interrupted".to_owned()), None));
    assert_eq!((stage.begun(), outside.asked()), (1, 3));
}

#[tokio::test(start_paused = true)]
async fn a_time_limit_and_an_unclear_response_leave_the_question_to_the_reconciler() {
    let store = MemoryStore::new();
    let outside = Outside::with([Ok(Reconciliation::Done(receipt())), Ok(Reconciliation::Done(receipt()))]);
    let stage = Stage::closed();
    let slow = stage.clone();
    let unclear = async || {
        let mut response = answer(409, &[], "the bank did not answer");
        response.extensions_mut().insert(Recording::Interrupt);
        response
    };
    let limit = TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(1));
    let app = Router::new()
        .route("/slow", on_post(async move || format!("run {}", slow.play().await)))
        .route("/unclear", on_post(unclear))
        .layer(limit)
        .layer(outside.layer(&store, POLICY));
    for (path, status) in [("/slow", 504), ("/unclear", 409)] {
        let ask = async || Reply::of(app.clone().oneshot(post_to(path, path, "")).await.unwrap()).await.unwrap();
        assert_eq!(ask().await.status.as_u16(), status, "{path}");
        let found = ask().await;
        assert_eq!((found.status.as_u16(), found.text(), found.is_replay()), (201, "receipt 7", false), "{path}");
        assert!(ask().await.is_replay(), "{path}");
    }
    assert_eq!((stage.begun(), outside.asked()), (1, 2));
}

#[tokio::test]
async fn an_answer_that_could_not_be_recorded_is_sent_with_a_mark() {
    let store = FaultyStore::new(&MemoryStore::new());
    let outside = Outside::with([Ok(Reconciliation::Done(receipt()))]);
    let stage = Stage::open();
    let address = serve_panicking(outside.layer(&store, SHORT), &stage).await;
    cut_off(address).await;
    store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Misconfigured));
    let reply = send(address, post("k", "")).await;
    assert_eq!((reply.text(), reply.header("idempotency-recorded")), ("receipt 7", Some("false")));
}

#[tokio::test]
async fn a_response_says_that_it_comes_from_the_reconciler() {
    let outside = Outside::with([Ok(Reconciliation::Done(receipt()))]);
    let layer = outside.layer(&MemoryStore::new(), POLICY);
    let request = || http::Request::from_parts(post("k", "").into_parts().0, Bytes::new());
    let never = async |_| std::future::pending::<Result<Response<axum::body::Body>, Error>>().await;
    // The server drops the handler: its effect is in doubt.
    assert!(layer.respond(request(), never).now_or_never().is_none());
    let outcome = layer.respond(request(), never).await.unwrap().extensions().get::<Outcome>().cloned().unwrap();
    assert_eq!((outcome.reconciled(), outcome.recorded(), outcome.replayed()), (true, true, false));
    let outcome = layer.respond(request(), never).await.unwrap().extensions().get::<Outcome>().cloned().unwrap();
    assert_eq!((outcome.reconciled(), outcome.replayed(), outside.asked()), (false, true, 1));
}

#[test]
fn the_contract_names_the_problem_of_an_unknown_outcome() {
    let store = MemoryStore::new();
    let with = Outside::default().layer(&store, POLICY).describe();
    let without = IdempotencyLayer::new(&store, POLICY, Caller::single()).describe();
    let name = format!("urn:idem:http:{}", ProblemKind::Unresolved.name());
    assert_eq!((with.text.contains(&name), without.text.contains(&name)), (true, false));
}
