//! Clients that hang up, pipeline or send many duplicates; and the task in which a handler runs.

use std::future::poll_fn;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::pin::pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::Router;
use axum::middleware::Next;
use axum::routing::post as on_post;
use bytes::Bytes;
use http::Request;
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::policy::StepPolicy;
use idem_runtime::{Error, InProgress, MemoryStore, OnCrash, Store, current};
use idem_tests::sqlite::Folder;
use idem_tests::{Fault, FaultyStore, StoreCall};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower::ServiceExt;
use tracing::Instrument;
use tracing_subscriber::registry::LookupSpan as _;

use crate::rig::*;

const HEAD: &str = "POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\n";

#[tokio::test]
async fn of_many_concurrent_duplicates_one_runs() {
    for (version, in_progress) in
        [(Version::One, InProgress::Reject), (Version::Two, InProgress::Wait(Duration::from_secs(60)))]
    {
        let stage = Stage::closed();
        let layer = IdempotencyLayer::new(&MemoryStore::new(), POLICY.in_progress(in_progress), Caller::single());
        let address = serve_stage(layer, &stage).await;
        let crowd: Vec<_> = (0..200).map(|_| tokio::spawn(send_by(version, address, post("k", "amount=1")))).collect();
        stage.entered().await;
        let other = tokio::spawn(send_by(version, address, post("k", "amount=2")));
        assert_eq!(other.await.unwrap().problem().0, 422);
        stage.go();
        let (mut firsts, mut replays, mut conflicts) = (0, 0, 0);
        for reply in crowd {
            let reply = reply.await.unwrap();
            match (reply.status.as_u16(), reply.is_replay()) {
                (200, false) => firsts += 1,
                (200, true) => replays += 1,
                _ => conflicts += usize::from(reply.problem() == (409, "in-progress".to_owned())),
            }
        }
        assert_eq!((stage.begun(), firsts, replays + conflicts), (1, 1, 199));
        assert!(conflicts == 0 || in_progress == InProgress::Reject);
    }
}

#[tokio::test]
async fn pipelined_duplicates_get_the_response_of_the_first_request() {
    let (address, stage) = serve_counter(layer()).await;
    let one = format!("{HEAD}content-length: 0\r\n\r\n");
    let last = format!("{HEAD}content-length: 0\r\nconnection: close\r\n\r\n");
    let said = send_raw(address, &format!("{}{last}", one.repeat(9))).await;
    assert_eq!(said.matches("HTTP/1.1 200 OK").count(), 10, "{said}");
    assert_eq!(said.matches("run 1").count(), 10, "{said}");
    assert_eq!(said.matches("idempotent-replayed: true").count(), 9, "{said}");
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn a_client_that_hangs_up_while_it_sends_its_request_starts_no_handler() {
    let store = FaultyStore::new(&MemoryStore::new());
    let (address, stage) = serve_counter(IdempotencyLayer::new(&store, POLICY, Caller::single())).await;
    for part in [
        "POST /pay HTTP/1.1\r\nhost:",
        &format!("{HEAD}content-length: 10\r\n\r\n"),
        &format!("{HEAD}content-length: 10\r\n\r\n12345"),
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(part.as_bytes()).await.unwrap();
        drop(stream);
    }
    assert_eq!(send(address, post("k", "1234567890")).await.text(), "run 1");
    assert_eq!((stage.begun(), store.count(StoreCall::Reserve)), (1, 1));
}

/// Sends the request, waits until `reached`, and hangs up.
async fn hang_up(version: Version, address: SocketAddr, reached: impl Future<Output = ()>) {
    match version {
        Version::One => {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(format!("{HEAD}content-length: 0\r\n\r\n").as_bytes()).await.unwrap();
            reached.await;
        }
        // Resets the stream. The connection stays open.
        Version::Two => {
            let mut connection = Connection::open(address, version).await;
            let asking = tokio::spawn(async move {
                let response = connection.send(post("k", "")).await;
                (connection, response)
            });
            reached.await;
            asking.abort();
        }
    }
}

/// Number of requests that have ended, with a response or by a drop.
#[derive(Debug, Default)]
struct Gone(Arc<AtomicUsize>);

/// Guard that one request holds. The drop of the guard counts the request as ended.
struct Held(Arc<AtomicUsize>);

impl Gone {
    fn hold(&self) -> Held {
        Held(Arc::clone(&self.0))
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_no_handler_that_has_begun() {
    for version in BOTH {
        for on_crash in [OnCrash::Retry, OnCrash::Fail] {
            let stage = Stage::closed();
            let layer = IdempotencyLayer::new(&MemoryStore::new(), POLICY.on_crash(on_crash), Caller::single());
            let (running, gone) = (stage.clone(), Arc::new(Gone::default()));
            let requests = Arc::clone(&gone);
            let outside = axum::middleware::from_fn(move |request: axum::extract::Request, next: Next| {
                let held = requests.hold();
                async move {
                    let response = next.run(request).await;
                    drop(held);
                    response
                }
            });
            let handler = async move || format!("run {}", running.play().await);
            let app = Router::new().route("/pay", on_post(handler)).layer(layer.clone()).layer(outside);
            let address = serve(app).await;
            hang_up(version, address, stage.entered()).await;
            until("the server has dropped the request", || gone.count() == 1).await;
            // Of the request, only the task of its handler is left.
            let duplicate = send_by(version, address, post("k", "")).await;
            assert_eq!(duplicate.problem(), (409, "in-progress".to_owned()));
            assert_eq!((stage.begun(), stage.ended(), layer.in_flight()), (1, 0, 1));
            stage.go();
            until("the handler has come to its end", || layer.in_flight() == 0).await;
            let reply = send_by(version, address, post("k", "")).await;
            assert_eq!((reply.text(), reply.is_replay()), ("run 1", true), "{version:?}");
            assert_eq!((stage.begun(), stage.ended()), (1, 1));
        }
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_while_its_key_is_reserved_leaves_the_key_free() {
    let store = FaultyStore::new(&MemoryStore::new());
    store.next(StoreCall::Reserve, Fault::Hang);
    let layer = IdempotencyLayer::new(&store, POLICY.on_crash(OnCrash::Fail), Caller::single());
    let address = serve_stage(layer.clone(), &Stage::open()).await;
    hang_up(Version::Two, address, until("it asks", || store.count(StoreCall::Reserve) == 1)).await;
    until("the request is no longer in flight", || layer.in_flight() == 0).await;
    store.context().flush().await;
    assert_eq!(send(address, post("k", "")).await.text(), "run 1");
}

#[tokio::test]
async fn a_waiting_duplicate_whose_client_hangs_up_no_longer_counts_as_in_flight() {
    let stage = Stage::closed();
    let policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(600)));
    let store = FaultyStore::new(&MemoryStore::new());
    let layer = IdempotencyLayer::new(&store, policy, Caller::single());
    let address = serve_stage(layer.clone(), &stage).await;
    let first = tokio::spawn(send(address, post("k", "")));
    stage.entered().await;
    hang_up(Version::Two, address, until("it waits", || store.count(StoreCall::Wait) == 1)).await;
    until("the duplicate is no longer in flight", || layer.in_flight() == 1).await;
    stage.go();
    assert_eq!(first.await.unwrap().text(), "run 1");
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn a_client_that_hangs_up_during_the_response_gets_a_replay_from_its_retry() {
    let policy = POLICY.max_result_bytes(16 << 20);
    let layer = IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single());
    let stage = Stage::open();
    let runs = stage.clone();
    let address = serve_handler(layer, async move || {
        runs.play().await;
        vec![b'x'; 8 << 20]
    })
    .await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("{HEAD}content-length: 0\r\n\r\n").as_bytes()).await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'H');
    drop(stream);
    let reply = send(address, post("k", "")).await;
    assert_eq!((reply.is_replay(), reply.body.len(), stage.begun()), (true, 8 << 20, 1));
}

#[tokio::test]
async fn drain_waits_for_handlers_whose_clients_are_gone() {
    let stage = Stage::closed();
    let layer = layer();
    let address = serve_stage(layer.clone(), &stage).await;
    hang_up(Version::One, address, stage.entered()).await;
    let drained = tokio::spawn({
        let layer = layer.clone();
        async move { layer.drain().await }
    });
    until("new requests are refused", || layer.in_flight() == 1).await;
    let mut refused = send(address, post("k2", "")).await;
    while refused.status == 200 {
        refused = send(address, post("k2", "")).await;
    }
    assert_eq!(refused.problem(), (503, "busy".to_owned()));
    assert_eq!((drained.is_finished(), stage.ended()), (false, 0));
    stage.go();
    drained.await.unwrap();
    assert_eq!(stage.ended(), 1);
    // The layer keeps refusing requests, even those with a recorded response: the process is about to end.
    assert_eq!(send(address, post("k", "")).await.problem(), (503, "busy".to_owned()));
    layer.drain().await;
}

tokio::task_local! { static TENANT: &'static str; }

#[tokio::test]
async fn a_handler_has_its_attempt_its_span_and_its_carried_values() {
    let seen = async || {
        let attempt = current().expect("an attempt");
        // The span of the call is inside the span of the request.
        let span = tracing::Span::current().with_subscriber(|(id, subscriber)| {
            let spans = subscriber.downcast_ref::<tracing_subscriber::Registry>().expect("spans");
            let names: Vec<_> = spans.span(id).expect("it is open").scope().map(|span| span.name()).collect();
            names.join("<")
        });
        let span = span.unwrap_or_default();
        let tenant = TENANT.try_with(|tenant| *tenant).unwrap_or("none");
        format!("{} {} {span} {tenant}", attempt.number(), attempt.child_key("charge").len())
    };
    let outside = |request: axum::extract::Request, next: Next| {
        let span = tracing::info_span!("request");
        TENANT.scope("acme", next.run(request).instrument(span))
    };
    idem_tests::log::hear_all();
    let subscriber = tracing_subscriber::fmt().with_writer(std::io::sink).finish();
    let _default = tracing::subscriber::set_default(subscriber);
    for (layer, expected) in [
        (layer(), "1 36 idempotent<request none"),
        (layer().carry(|task| Box::pin(TENANT.scope(TENANT.get(), task))), "1 36 idempotent<request acme"),
    ] {
        let app = Router::new().route("/pay", on_post(seen)).layer(layer).layer(axum::middleware::from_fn(outside));
        let address = serve(app).await;
        assert_eq!(send(address, post("k", "")).await.text(), expected);
    }
}

#[tokio::test]
async fn a_handler_that_panics_frees_its_key_before_its_client_learns_of_it() {
    for version in BOTH {
        for (on_crash, carries, second) in [
            (OnCrash::Retry, false, (200, "run 2")),
            (OnCrash::Retry, true, (200, "run 2")),
            (OnCrash::Fail, false, (409, "interrupted")),
        ] {
            let stage = Stage::open();
            let mut layer = IdempotencyLayer::new(&MemoryStore::new(), POLICY.on_crash(on_crash), Caller::single());
            if carries {
                layer = layer.carry(|task| task);
            }
            let runs = stage.clone();
            let address = serve_handler(layer.clone(), async move || {
                let run = runs.play().await;
                // The handler panics in its first run, before it waits for anything.
                assert!(run > 1, "on purpose");
                format!("run {run}")
            })
            .await;
            let mut connection = Connection::open(address, version).await;
            connection.send(request_as(version, post("k", ""))).await.unwrap_err();
            let reply = send_by(version, address, post("k", "")).await;
            assert_eq!(reply.status.as_u16(), second.0, "{version:?}");
            match second.0 {
                200 => assert_eq!(reply.text(), second.1),
                _ => assert_eq!(reply.problem().1, second.1),
            }
            assert_eq!(layer.in_flight(), 0);
        }
    }
}

/// Adapts a request to a server with this version of HTTP.
fn request_as(version: Version, mut request: Request<axum::body::Body>) -> Request<axum::body::Body> {
    match version {
        Version::One => *request.uri_mut() = request.uri().path().parse().unwrap(),
        Version::Two => drop(request.headers_mut().remove("host")),
    }
    request
}

#[tokio::test]
async fn a_task_that_the_carrier_drops_is_a_503_and_leaves_its_key_free() {
    let store = MemoryStore::new();
    let stage = Stage::open();
    let dropping = IdempotencyLayer::new(&store, POLICY, Caller::single()).carry(|_| Box::pin(async {}));
    let address = serve_stage(dropping.clone(), &stage).await;
    assert_eq!(send(address, post("k", "")).await.problem(), (503, "busy".to_owned()));
    assert_eq!((stage.begun(), dropping.in_flight()), (0, 0));
    let address = serve_stage(IdempotencyLayer::new(&store, POLICY, Caller::single()), &stage).await;
    assert_eq!(send(address, post("k", "")).await.text(), "run 1");
}

/// Service whose handler waits for its stage.
fn staged(layer: &IdempotencyLayer, stage: &Stage) -> Router {
    let stage = stage.clone();
    Router::new().fallback(on_post(async move || format!("run {}", stage.play().await))).layer(layer.clone())
}

#[test]
fn the_end_of_a_runtime_drops_its_handlers_and_frees_their_keys() {
    let layer = layer();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (begun, stage) in [(0, Stage::closed()), (1, Stage::closed())] {
        let key = format!("begun-{begun}");
        let first = runtime();
        // The test polls the call itself, and this poll makes the task of the handler. In some cases the task has begun
        // to run.
        let mut asking = {
            let mut asking = Box::pin(staged(&layer, &stage).oneshot(post(&key, "")));
            let _entered = first.enter();
            let mut polls = 0;
            while layer.in_flight() == 0 || polls < 3 {
                assert!(asking.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
                polls += 1;
            }
            asking
        };
        if begun == 1 {
            first.block_on(stage.entered());
        }
        assert_eq!((stage.begun(), layer.in_flight()), (begun, 1));
        drop(first);
        assert_eq!((stage.ended(), layer.in_flight()), (0, 0));
        // A client that still waits for the response gets "busy", and its retry runs.
        runtime().block_on(async {
            let reply = Reply::of(asking.as_mut().await.unwrap()).await.unwrap();
            assert_eq!(reply.problem(), (503, "busy".to_owned()));
            let stage = Stage::open();
            let again = staged(&layer, &stage).oneshot(post(&key, "")).await.unwrap();
            assert_eq!((Reply::of(again).await.unwrap().text(), stage.begun()), ("run 1", 1));
        });
    }
}

#[test]
fn a_call_that_is_dropped_after_its_runtime_has_ended_frees_its_key() {
    // The calls are dropped outside of any runtime, before and after their handlers have begun.
    let layer = layer();
    for has_begun in [false, true] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let stage = Stage::closed();
        let mut asking = Box::pin(staged(&layer, &stage).oneshot(post("k", "")));
        runtime.block_on(async {
            let mut entered = pin!(stage.entered());
            poll_fn(|cx| {
                assert!(asking.as_mut().poll(cx).is_pending());
                if has_begun { entered.as_mut().poll(cx) } else { Poll::Ready(()) }
            })
            .await;
        });
        drop(asking);
        // The call has outlived its client. Only the call's runtime still holds the call.
        assert_eq!((stage.begun(), stage.ended()), (usize::from(has_begun), 0));
        drop(runtime);
        assert_eq!(layer.in_flight(), 0);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stage = Stage::open();
    let reply = runtime.block_on(staged(&layer, &stage).oneshot(post("k", ""))).unwrap();
    assert_eq!(runtime.block_on(Reply::of(reply)).unwrap().text(), "run 1");
}

#[tokio::test]
async fn a_handler_has_the_same_task_locals_whether_its_client_stays_or_hangs_up() {
    // The handler finds the same task-local before and after it waits: none, unless `carry` carries it.
    for (layer, expected) in
        [(layer(), "none none"), (layer().carry(|task| Box::pin(TENANT.scope(TENANT.get(), task))), "acme acme")]
    {
        let tenant = || TENANT.try_with(|tenant| *tenant).unwrap_or("none");
        let outside = |request: axum::extract::Request, next: Next| TENANT.scope("acme", next.run(request));
        for hangs_up in [false, true] {
            let stage = Stage::closed();
            let running = stage.clone();
            let handler = async move || {
                let before = tenant();
                running.play().await;
                format!("{before} {}", tenant())
            };
            let app = Router::new().route("/pay", on_post(handler)).layer(layer.clone());
            let address = serve(app.layer(axum::middleware::from_fn(outside))).await;
            let key = format!("hangs-up-{hangs_up}");
            let asking = tokio::spawn(send_by(Version::Two, address, post(&key, "")));
            stage.entered().await;
            if hangs_up {
                asking.abort();
                stage.go();
                until("the handler has come to its end", || layer.in_flight() == 0).await;
            } else {
                stage.go();
                asking.await.unwrap();
            }
            let reply = send(address, post(&key, "")).await;
            assert_eq!((reply.text(), reply.is_replay()), (expected, true));
        }
    }
}

#[tokio::test]
async fn the_layer_serves_a_request_without_tower() {
    let layer = layer();
    let stage = Stage::open();
    let ask = async |body: &'static str, fails: bool| {
        let request = Request::post("/pay").header("idempotency-key", "k").body(Bytes::from_static(body.as_bytes()));
        let handler = async |request: Request<Bytes>| {
            let run = stage.play().await;
            let attempt = current().expect("an attempt").number();
            let body = format!("run {run} of {:?} in attempt {attempt}", request.body());
            if fails { Err("on purpose") } else { Ok(http::Response::new(http_body_util::Full::from(body))) }
        };
        let response = layer.respond(request.unwrap(), handler).await?;
        let outcome = response.extensions().get::<idem_runtime::Outcome>().expect("an outcome").clone();
        Ok::<_, &'static str>((Reply::of(response).await.unwrap(), outcome))
    };
    assert_eq!(ask("a", true).await.unwrap_err(), "on purpose");
    let (first, outcome) = ask("a", false).await.unwrap();
    assert_eq!(first.text(), "run 2 of b\"a\" in attempt 2");
    assert!(outcome.executed() && outcome.recorded());
    let (again, outcome) = ask("a", false).await.unwrap();
    assert!(again.is_replay() && outcome.replayed());
    assert_eq!(again.text(), first.text());
    assert_eq!(ask("b", false).await.unwrap().0.problem(), (422, "fingerprint-mismatch".to_owned()));
    let passes = layer.respond(Request::get("/pay").body(Bytes::new()).unwrap(), async |_| {
        Ok::<_, Never>(http::Response::new(http_body_util::Full::from("seen")))
    });
    assert_eq!(Reply::of(passes.await.unwrap()).await.unwrap().text(), "seen");
    layer.drain().await;
}

#[tokio::test]
async fn a_response_is_replayed_from_beside_the_kept_journal_of_its_handler() {
    let layer = layer();
    let stage = Stage::open();
    let ask = async || {
        let request = Request::post("/pay").header("idempotency-key", "k").body(Bytes::from_static(b"a"));
        let handler = async |_: Request<Bytes>| {
            let attempt = current().expect("an attempt");
            attempt.set_step_policy(StepPolicy::new().keep());
            let charge = attempt.step("charge").run(async |_| Ok::<_, Error>(stage.play().await)).await;
            let body = format!("charge {}", charge.expect("a value"));
            Ok::<_, Never>(http::Response::new(http_body_util::Full::from(body)))
        };
        Reply::of(layer.respond(request.unwrap(), handler).await.unwrap()).await.unwrap()
    };
    let first = ask().await;
    let again = ask().await;
    assert_eq!((first.text(), again.text()), ("charge 1", "charge 1"));
    assert!(!first.is_replay() && again.is_replay());
    layer.drain().await;
}

/// Process of the binary `till`.
struct Till {
    child: Child,
    address: SocketAddr,
}

impl Till {
    fn start(folder: &Folder) -> Self {
        let mut child =
            Command::new(env!("CARGO_BIN_EXE_till")).arg(folder.file()).stdout(Stdio::piped()).spawn().expect("starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("reads");
        Self { child, address: line.trim().parse().expect("an address") }
    }
}

impl Till {
    fn kill(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for Till {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_takes_over_from_a_server_that_was_killed_in_its_handler() {
    let folder = Folder::new();
    let charges = folder.file().with_extension("charges");
    let written = || std::fs::read_to_string(&charges).unwrap_or_default();
    let [mut first, second] = [Till::start(&folder), Till::start(&folder)];
    let address = first.address;
    let asking = tokio::spawn(async move {
        let mut connection = Connection::open(address, Version::Two).await;
        connection.send(post_to("/charge", "k", "stuck")).await.map(drop)
    });
    until("the handler has begun", || written() == "1\n").await;
    let ask = || send(second.address, post_to("/charge", "k", "stuck"));
    assert_eq!(ask().await.problem(), (409, "in-progress".to_owned()));
    first.kill();
    asking.await.unwrap().unwrap_err();
    // The client retries, as `Retry-After` demands; after at most one lease, a retry takes over.
    let mut reply = ask().await;
    while reply.status == 409 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        reply = ask().await;
    }
    assert_eq!((reply.text(), reply.is_replay()), ("charged by attempt 2", false));
    assert!(ask().await.is_replay());
    assert_eq!(written(), "1\n2\n");
}
