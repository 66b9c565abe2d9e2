//! Responses that the layer sends in place of the handler.

use std::time::Duration;

use http::header;
use http::{HeaderValue, Method};
use idem_runtime::http::{Caller, IdempotencyLayer, ProblemKind};
use idem_runtime::outbox::OutgoingMessage;
use idem_runtime::store::Filter;
use idem_runtime::{
    InProgress, MemoryStore, Mode, ModeSwitch, OnCrash, OnStoreError, Outcome, Policy, StoreErrorKind, StoreExt as _,
    current,
};
use idem_tests::brokers::AwayBroker;
use idem_tests::{Fault, FaultyStore, StoreCall};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::rig::*;

fn with(policy: Policy) -> IdempotencyLayer {
    IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single())
}

#[tokio::test]
async fn a_duplicate_of_a_running_request_gets_a_retry_after() {
    for version in BOTH {
        let stage = Stage::closed();
        let address = serve_stage(layer(), &stage).await;
        let first = tokio::spawn(send_by(version, address, post("k", "")));
        stage.entered().await;
        for _ in 0..3 {
            let duplicate = send_by(version, address, post("k", "")).await;
            assert_eq!(duplicate.problem(), (409, "in-progress".to_owned()));
            // The layer has not measured the duration of any handler yet.
            assert_eq!(duplicate.header("retry-after"), Some("1"));
        }
        stage.go();
        assert_eq!(first.await.unwrap().text(), "run 1");
        assert!(send_by(version, address, post("k", "")).await.is_replay());
    }
}

#[tokio::test]
async fn a_duplicate_can_wait_for_the_running_request() {
    let stage = Stage::closed();
    let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)));
    let address = serve_stage(with(policy), &stage).await;
    let first = tokio::spawn(send(address, post("k", "")));
    stage.entered().await;
    let waiting: Vec<_> = (0..5).map(|_| tokio::spawn(send(address, post("k", "")))).collect();
    stage.go();
    assert_eq!(first.await.unwrap().text(), "run 1");
    for duplicate in waiting {
        let duplicate = duplicate.await.unwrap();
        assert_eq!((duplicate.text(), duplicate.is_replay()), ("run 1", true));
    }
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn a_duplicate_whose_wait_has_ended_without_a_result_gets_a_409() {
    let stage = Stage::closed();
    let policy = POLICY.in_progress(InProgress::Wait(Duration::from_millis(1)));
    let address = serve_stage(with(policy), &stage).await;
    let first = tokio::spawn(send(address, post("k", "")));
    stage.entered().await;
    assert_eq!(send(address, post("k", "")).await.problem(), (409, "in-progress".to_owned()));
    stage.go();
    assert_eq!(first.await.unwrap().text(), "run 1");
}

#[tokio::test]
async fn an_interrupted_operation_is_a_409_without_a_time_to_retry() {
    let policy = POLICY.on_crash(OnCrash::Fail);
    let address = serve_handler(with(policy), async || -> String { panic!("on purpose") }).await;
    let mut connection = Connection::open(address, Version::Two).await;
    connection.send(post("k", "")).await.unwrap_err();
    for _ in 0..2 {
        let reply = send(address, post("k", "")).await;
        assert_eq!(reply.problem(), (409, "interrupted".to_owned()));
        assert_eq!(reply.header("retry-after"), None);
    }
}

#[tokio::test]
async fn an_exhausted_operation_is_a_409_without_a_time_to_retry() {
    let stage = Stage::open();
    let handler = {
        let stage = stage.clone();
        async move || {
            stage.play().await;
            answer(503, &[], "not now")
        }
    };
    let address = serve_handler(with(POLICY.max_attempts(2)), handler).await;
    for _ in 0..2 {
        let reply = send(address, post("k", "")).await;
        assert_eq!((reply.status.as_u16(), reply.text()), (503, "not now"));
    }
    let reply = send(address, post("k", "")).await;
    assert_eq!(reply.problem(), (409, "attempts-exhausted".to_owned()));
    assert_eq!((reply.header("retry-after"), stage.begun()), (None, 2));
}

#[tokio::test]
async fn a_request_body_that_is_too_long_is_refused_if_possible_before_the_client_sends_it() {
    let (address, stage) = serve_counter(layer().max_body_bytes(10)).await;
    let head = "POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\ncontent-length: 11\r\nexpect: 100-continue\r\n\
                connection: close\r\n\r\n";
    let said = send_raw(address, head).await;
    assert!(said.starts_with("HTTP/1.1 413 "), "{said}");
    assert!(!said.contains("100 Continue"), "{said}");
    // The server asks the client to send a body that is short enough.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(head.replace("11", "2").as_bytes()).await.unwrap();
    let mut said = [0; 25];
    stream.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"HTTP/1.1 100 Continue\r\n\r\n");
    // A request body without `Content-Length` is read up to the limit.
    let mut chunked = post("k2", "");
    *chunked.body_mut() = frames([Ok("123456"), Ok("78901")]);
    assert_eq!(send(address, chunked).await.problem(), (413, "body-too-large".to_owned()));
    assert_eq!(stage.begun(), 0);
    let mut chunked = post("k2", "");
    *chunked.body_mut() = frames([Ok("12345"), Ok("67890")]);
    assert_eq!(send(address, chunked).await.text(), "run 1");
    assert!(send(address, post("k2", "1234567890")).await.is_replay());
}

#[tokio::test]
async fn a_request_body_that_does_not_end_holds_no_key() {
    let store = FaultyStore::new(&MemoryStore::new());
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single()).body_deadline(Duration::from_millis(1));
    let (address, stage) = serve_counter(layer).await;
    let slow = "POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\ncontent-length: 10\r\n\r\n123";
    let said = send_raw(address, slow).await;
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    assert!(said.contains("body-timeout"), "{said}");
    let endless =
        "POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
    let said = send_raw(address, endless).await;
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    assert_eq!((stage.begun(), store.count(StoreCall::Reserve)), (0, 0));
}

#[tokio::test]
async fn an_unreachable_store_is_a_503_and_no_handler_runs() {
    let store = FaultyStore::new(&MemoryStore::new());
    store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let (address, stage) = serve_counter(IdempotencyLayer::new(&store, POLICY, Caller::single())).await;
    let reply = send(address, post("k", "")).await;
    assert_eq!(reply.problem(), (503, "store-unavailable".to_owned()));
    let seconds: u64 = reply.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=5).contains(&seconds), "{seconds}");
    assert_eq!(stage.begun(), 0);
    // The response must not show the error text of the store.
    assert!(!reply.text().contains("failed on command"), "{}", reply.text());
    store.always(StoreCall::Reserve, Fault::None);
    assert_eq!(send(address, post("k", "")).await.text(), "run 1");
}

#[tokio::test]
async fn a_response_of_a_handler_that_ran_without_the_store_says_so() {
    let store = FaultyStore::new(&MemoryStore::new());
    store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let policy = POLICY.on_store_error(OnStoreError::Run);
    let (address, _) = serve_counter(IdempotencyLayer::new(&store, policy, Caller::single())).await;
    for run in ["run 1", "run 2"] {
        let reply = send(address, post("k", "")).await;
        assert_eq!((reply.text(), reply.header("idempotency-recorded")), (run, Some("false")));
    }
}

#[tokio::test]
async fn a_response_that_could_not_be_recorded_is_sent_and_says_so() {
    let store = FaultyStore::new(&MemoryStore::new());
    store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
    // The lease lapses while the recording is repeated.
    store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
    let policy = POLICY.lease(Duration::from_millis(200));
    let layer = IdempotencyLayer::new(&store, policy, Caller::single());
    let outcomes = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = outcomes.clone();
    let note = axum::middleware::map_response(move |response: axum::response::Response| {
        seen.lock().unwrap().push(response.extensions().get::<Outcome>().expect("an outcome").clone());
        async { response }
    });
    let stage = Stage::open();
    let runs = stage.clone();
    let handler = async move || format!("run {}", runs.play().await);
    let app = axum::Router::new().route("/pay", axum::routing::post(handler)).layer(layer).layer(note);
    let address = serve(app).await;
    let reply = send(address, post("k", "")).await;
    assert_eq!((reply.status.as_u16(), reply.text()), (200, "run 1"));
    assert_eq!(reply.header("idempotency-recorded"), Some("false"));
    let outcome = outcomes.lock().unwrap().pop().unwrap();
    assert!(outcome.executed() && !outcome.recorded() && outcome.uncertain(), "{outcome:?}");
    store.always(StoreCall::Finish, Fault::None);
    let reply = send(address, post("k2", "")).await;
    assert_eq!((reply.text(), reply.header("idempotency-recorded")), ("run 2", None));
    assert!(outcomes.lock().unwrap().pop().unwrap().recorded());
    assert!(send(address, post("k2", "")).await.is_replay());
    assert!(outcomes.lock().unwrap().pop().unwrap().replayed());
}

/// Policy with a short lease, which lapses soon.
const SHORT: Policy = POLICY.lease(Duration::from_millis(200));

#[tokio::test]
async fn a_handler_whose_renewals_are_refused_for_good_is_a_503_and_its_effects_may_have_happened() {
    for (policy, retry) in [(SHORT, None), (SHORT.on_crash(OnCrash::Fail), Some((409, "interrupted".to_owned())))] {
        for refusal in [StoreErrorKind::Misconfigured, StoreErrorKind::Corrupt] {
            let store = FaultyStore::new(&MemoryStore::new());
            store.always(StoreCall::Renew, Fault::Before(refusal));
            let stage = Stage::closed();
            let address = serve_stage(IdempotencyLayer::new(&store, policy, Caller::single()), &stage).await;
            let cut_off = send(address, post("k", "")).await;
            assert_eq!(cut_off.problem(), (503, "unrecorded".to_owned()), "{refusal:?}");
            assert!(cut_off.text().contains("Its effects may have happened."), "{}", cut_off.text());
            assert!(!cut_off.text().contains("failed on command"), "{}", cut_off.text());
            assert!(cut_off.header("retry-after").is_some_and(|after| after.parse::<u32>().is_ok_and(|it| it > 0)));
            assert_eq!((stage.begun(), stage.ended()), (1, 0));
            store.always(StoreCall::Renew, Fault::None);
            stage.go();
            let again = send(address, post("k", "")).await;
            match &retry {
                Some(problem) => assert_eq!(again.problem(), *problem),
                None => assert_eq!(again.text(), "run 2"),
            }
        }
    }
}

#[tokio::test]
async fn a_handler_whose_lease_is_taken_away_is_a_503_whether_or_not_another_one_runs() {
    for (another_runs, is_forgotten) in [(true, false), (false, false), (false, true)] {
        let store = MemoryStore::new();
        let stage = Stage::closed();
        let address = serve_stage(IdempotencyLayer::new(&store, SHORT, Caller::single()), &stage).await;
        let first = tokio::spawn(send(address, post("k", "")));
        stage.entered().await;
        let operator = store.operator();
        let (key, held) = operator.list(&Filter::new()).await.unwrap().records.remove(0);
        operator.break_lease(&key, &held).await.unwrap();
        if is_forgotten {
            let broken = operator.inspect(&key).await.unwrap().unwrap();
            assert!(operator.forget(&key, &broken).await.unwrap());
        }
        let second = another_runs.then(|| tokio::spawn(send(address, post("k", ""))));
        if another_runs {
            stage.entered().await;
        }
        let cut_off = first.await.unwrap();
        assert_eq!(cut_off.problem(), (503, "unrecorded".to_owned()));
        assert!(cut_off.header("retry-after").is_some());
        stage.go();
        if let Some(second) = second {
            assert_eq!(second.await.unwrap().text(), "run 2");
        }
        let again = send(address, post("k", "")).await;
        assert_eq!((again.text(), again.is_replay()), ("run 2", another_runs));
    }
}

#[tokio::test]
async fn a_handler_that_runs_for_too_long_is_a_504() {
    let stage = Stage::closed();
    let address = serve_stage(with(POLICY.timeout(Duration::from_millis(50))), &stage).await;
    assert_eq!(send(address, post("k", "")).await.problem(), (504, "timed-out".to_owned()));
    assert_eq!((stage.begun(), stage.ended()), (1, 0));
    // The handler that timed out has freed its key.
    stage.go();
    assert_eq!(send(address, post("k", "")).await.text(), "run 2");
}

#[tokio::test]
async fn a_request_beyond_the_limit_of_requests_in_flight_gets_a_503() {
    let stage = Stage::closed();
    let layer = layer().max_in_flight(1);
    let address = serve_stage(layer.clone(), &stage).await;
    let first = tokio::spawn(send(address, post("k1", "")));
    stage.entered().await;
    assert_eq!(layer.in_flight(), 1);
    let reply = send(address, post("k2", "")).await;
    assert_eq!((reply.problem(), reply.header("retry-after")), ((503, "busy".to_owned()), Some("1")));
    stage.go();
    stage.go();
    assert_eq!(first.await.unwrap().text(), "run 1");
    until("the first request is no longer in flight", || layer.in_flight() == 0).await;
    assert_eq!(send(address, post("k2", "")).await.text(), "run 2");
}

#[tokio::test]
async fn problem_responses_link_to_pages_and_can_be_replaced() {
    let (address, _) = serve_counter(layer()).await;
    let without = || request(Method::POST, "/pay").body("".into()).unwrap();
    let reply = send(address, without()).await;
    assert!(reply.text().contains("\"urn:idem:http:missing-key\""), "{}", reply.text());
    assert_eq!(reply.header("link"), None);

    let (address, _) = serve_counter(layer().problem_base("https://api.example.com/problems#")).await;
    let reply = send(address, without()).await;
    assert!(reply.text().contains("\"https://api.example.com/problems#missing-key\""), "{}", reply.text());
    let link = "<https://api.example.com/problems#missing-key>; rel=\"describedby\"";
    assert_eq!(reply.header("link"), Some(link));

    let replaced = layer().on_problem(|problem, response| {
        assert_eq!(problem.kind(), ProblemKind::MissingKey);
        assert!(problem.error().is_none());
        *response.body_mut() = format!("{problem}").into();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    });
    let (address, _) = serve_counter(replaced).await;
    let reply = send(address, without()).await;
    assert_eq!(reply.text(), "400 missing-key: The request has no idempotency key");
}

#[tokio::test]
async fn in_shadow_mode_the_layer_refuses_no_request() {
    static MODE: ModeSwitch = ModeSwitch::new(Mode::Shadow);
    let layer = with(POLICY.mode_switch(&MODE)).max_body_bytes(10);
    let (address, stage) = serve_counter(layer).await;
    let bad =
        || vec![request(Method::POST, "/pay").body("".into()).unwrap(), post("a b", ""), post("k", "x".repeat(11))];
    for mode in [Mode::Shadow, Mode::Off] {
        MODE.set(mode);
        for request in bad().into_iter().chain([post("k", "1"), post("k", "1"), post("k", "2")]) {
            let (runs, reply) = (stage.begun(), send(address, request).await);
            assert_eq!((reply.text(), reply.is_replay()), (&*format!("run {}", runs + 1), false));
        }
    }
    MODE.set(Mode::Enforce);
    // In shadow mode the layer recorded the result, which it replays now.
    let reply = send(address, post("k", "1")).await;
    assert_eq!((reply.text(), reply.is_replay()), ("run 4", true));
    for request in bad() {
        assert!(send(address, request).await.status.is_client_error());
    }
    // In shadow mode the layer refuses neither a request with a malformed digest nor a request over its limit.
    MODE.set(Mode::Shadow);
    let (address, _) = serve_counter(with(POLICY.mode_switch(&MODE)).max_in_flight(0)).await;
    let mut lie = post("k", "1");
    let digest = HeaderValue::from_static("sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:");
    lie.headers_mut().insert("content-digest", digest);
    assert_eq!(send(address, lie).await.text(), "run 1");
}

#[tokio::test]
async fn a_problem_response_has_an_id_of_its_occurrence_and_says_whether_to_retry() {
    let stage = Stage::closed();
    let address = serve_stage(with(POLICY), &stage).await;
    let first = tokio::spawn(send(address, post("k", "1")));
    stage.entered().await;
    let mut instances = std::collections::HashSet::new();
    for (request, name, retryable) in [
        (post("k", "1"), "in-progress", true),
        (post("k", "1"), "in-progress", true),
        (post("k", "2"), "fingerprint-mismatch", false),
        (post("", "2"), "invalid-key", false),
    ] {
        let reply = send(address, request).await;
        assert_eq!(reply.problem().1, name);
        let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
        assert_eq!(body["retryable"], retryable, "{name}");
        let instance = body["instance"].as_str().unwrap();
        assert!(instance.starts_with("urn:uuid:") && instance.len() == 45, "{instance}");
        assert!(instances.insert(instance.to_owned()), "{instance} names two occurrences");
    }
    stage.go();
    first.await.unwrap();
}

#[test]
fn only_temporary_problems_are_marked_as_retryable() {
    use ProblemKind::{BodyTimeout, Busy, InProgress, StoreUnavailable, TimedOut, Unrecorded, Unresolved, Unsent};
    let retryable: Vec<_> = ProblemKind::ALL.into_iter().filter(|kind| kind.is_retryable()).collect();
    assert_eq!(retryable, [BodyTimeout, InProgress, Unresolved, TimedOut, Busy, StoreUnavailable, Unrecorded, Unsent]);
}

#[tokio::test]
async fn a_response_waits_until_its_messages_are_sent() {
    let publish = async || {
        let pushed = current().and_then(|it| it.outbox().push("orders.paid", OutgoingMessage::new("paid")));
        pushed.map(|()| "paid").map_err(|error| error.to_string())
    };
    let broker = AwayBroker::default();
    let store = MemoryStore::new().with_sender(broker.clone());
    let serves = |mode| serve_handler(IdempotencyLayer::new(&store, POLICY.mode(mode), Caller::single()), publish);
    let address = serves(Mode::Enforce).await;
    let unsent = send(address, post("k", "")).await;
    assert_eq!(unsent.problem(), (503, "unsent".to_owned()));
    assert!(unsent.header("retry-after").is_some(), "{unsent:?}");
    broker.returns();
    let sent = send(address, post("k", "")).await;
    assert_eq!((sent.text(), sent.is_replay(), broker.arrived()), ("paid", true, 1));

    // A response that can't be replayed, or that the layer only observes, is not withheld.
    let broker = AwayBroker::default();
    let store = MemoryStore::new().with_sender(broker.clone());
    for (policy, replayable) in [(POLICY.max_result_bytes(0), Some("false")), (POLICY.mode(Mode::Shadow), None)] {
        let address = serve_handler(IdempotencyLayer::new(&store, policy, Caller::single()), publish).await;
        let reply = send(address, post(if replayable.is_some() { "large" } else { "shadow" }, "")).await;
        assert_eq!((reply.text(), reply.header("idempotency-replayable")), ("paid", replayable));
    }
}
