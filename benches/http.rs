//! A route of axum with `IdempotencyLayer`, compared with the same route without it.
//!
//! - *First run* and *replay*: requests per second over real sockets, kept alive, one request at a time on each; a body
//!   of 1 KB of JSON that the handler reads and returns. Every first run has its own key; replays choose among 500.
//!   Clients and server share a runtime of two workers, so both sides include the clients' work.
//! - *Beside others*: replays and first runs compared with those of `axum-idempotent`, the only other layer for axum on
//!   Redis that our compiler builds (`idempotent` 2.0 needs Rust 1.98, `footing` 0.6 1.99). Both servers are separate
//!   processes on one Valkey, because `axum-idempotent` needs `HEXPIRE`; each side has its best number of connections.
//!   `axum-idempotent` looks for a response and then runs the handler, so two concurrent requests may both run; our
//!   layer reserves the key first.
//! - *Allocations* are counted for one request through the tower service, on one thread and without a socket. The bytes
//!   requested from the allocator are counted as well: each copy of the body adds a kilobyte.
//! - *Instructions* are for a profiler. The cost of 1000 requests is the count of
//!   `valgrind --tool=callgrind target/release/deps/http-… turns first socket 1500` minus the count of the same command
//!   with 500. `bare` and `replay` can stand for `first`, and `service` for `socket`. The load of the machine does not
//!   change these counts.
//! - *Running key*: 10 000 duplicates of one running request: the time until all have an answer, and the memory that
//!   the duplicates hold.

#![allow(clippy::cast_precision_loss)] // Counts and times of a run are far below 2^52.

use std::cell::RefCell;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use allocation_counter::measure;
use axum::Router;
use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use idem_benches::peer::Peer;
use idem_benches::{
    Goal, Table, alternate, is_quick, is_wanted, nanos_each, sized, thousands_per_second, timed, timed_on_cpu,
};
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::{InProgress, MemoryStore, Policy, RedisStore, Store};
use idem_tests::server::{Kind, RedisServer};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tower::ServiceExt;

const POLICY: Policy = Policy::new(Duration::from_secs(24 * 3600)).lease(Duration::from_secs(60));

/// Number of keys whose responses are replayed.
const REPLAYED: usize = 500;

/// Returns the body of each request: 1 KB of JSON.
fn payload() -> String {
    let body = json!({ "amount_cents": 129_900, "currency": "EUR", "note": "x".repeat(970) }).to_string();
    assert!((1000..1048).contains(&body.len()), "{}", body.len());
    body
}

async fn echo(axum::Json(order): axum::Json<Value>) -> axum::Json<Value> {
    axum::Json(order)
}

/// Builds the measured route, behind `layer` if there is one.
fn route(layer: Option<IdempotencyLayer>) -> Router {
    let router = Router::new().route("/orders", post(echo));
    match layer {
        Some(layer) => router.layer(layer),
        None => router,
    }
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// A connection that sends one request at a time.
struct Client {
    stream: TcpStream,
    body: Arc<str>,
    cookie: Arc<str>,
    sent: Vec<u8>,
    read: Vec<u8>,
}

impl Client {
    async fn connect(address: SocketAddr, body: &Arc<str>, cookie: &Arc<str>) -> Self {
        let stream = TcpStream::connect(address).await.expect("connects");
        stream.set_nodelay(true).expect("a socket");
        let (body, cookie) = (Arc::clone(body), Arc::clone(cookie));
        Self { stream, body, cookie, sent: Vec::new(), read: Vec::new() }
    }

    /// Sends a request, and reads its response to the end. Returns whether it is a replay.
    async fn ask(&mut self, key: usize) -> bool {
        let (length, body, cookie) = (self.body.len(), &self.body, &self.cookie);
        self.sent.clear();
        let head = format!(
            "POST /orders HTTP/1.1\r\nhost: till\r\nidempotency-key: order-{key}\r\ncontent-type: application/json\r\n\
             {cookie}content-length: {length}\r\n\r\n"
        );
        self.sent.extend_from_slice(head.as_bytes());
        self.sent.extend_from_slice(body.as_bytes());
        self.stream.write_all(&self.sent).await.expect("sends");
        self.read.clear();
        loop {
            if let Some(end) = self.read.windows(4).position(|it| it == b"\r\n\r\n") {
                // The handler echoes the body of the request, so the body of the response has the same length.
                if self.read.len() >= end + 4 + length {
                    assert!(self.read.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&self.read));
                    let marks: [&[u8]; 2] = [b"\r\nidempotent-replayed:", b"\r\nidempotency-replayed:"];
                    return marks.iter().any(|mark| self.read[..end].windows(mark.len()).any(|it| it == *mark));
                }
            }
            assert!(self.stream.read_buf(&mut self.read).await.expect("reads") > 0, "an answer");
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    FirstRun,
    Replay,
}

/// A server whose requests are measured. `replays` is false if the server has no layer.
struct Target {
    address: SocketAddr,
    cookie: Arc<str>,
    replays: bool,
    /// Number of the first key that no request has used.
    next: usize,
}

impl Target {
    fn new(address: SocketAddr, replays: bool) -> Self {
        Self { address, cookie: "".into(), replays, next: REPLAYED }
    }

    /// Opens a session at a server whose layer requires a session.
    async fn with_session(address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).await.expect("connects");
        let login = b"GET /login HTTP/1.1\r\nhost: till\r\nconnection: close\r\n\r\n";
        stream.write_all(login).await.expect("sends");
        let mut said = String::new();
        stream.read_to_string(&mut said).await.expect("answers");
        let line = said.lines().find_map(|line| line.strip_prefix("set-cookie: ")).expect("a session");
        let cookie = format!("cookie: {}\r\n", line.split(';').next().expect("a cookie"));
        Self { cookie: cookie.into(), ..Self::new(address, true) }
    }
}

/// Returns thousands of requests per second at a fresh server in this process.
fn throughput(runtime: &Runtime, layer: Option<IdempotencyLayer>, work: Work, connections: usize) -> f64 {
    let replays = layer.is_some();
    let address = runtime.block_on(serve(route(layer)));
    throughput_of(runtime, &mut Target::new(address, replays), work, connections)
}

/// Returns thousands of requests per second that `connections` clients make at `target`.
fn throughput_of(runtime: &Runtime, target: &mut Target, work: Work, connections: usize) -> f64 {
    let each = sized(6000, 64).max(connections) / connections;
    let (replays, first) = (target.replays, target.next);
    target.next += each * connections;
    let body: Arc<str> = payload().into();
    let mut clients = runtime.block_on(async {
        let mut clients = Vec::new();
        for _ in 0..connections {
            clients.push(Client::connect(target.address, &body, &target.cookie).await);
        }
        if work == Work::Replay {
            for key in 0..REPLAYED {
                clients[0].ask(key).await;
            }
        }
        clients
    });
    let took = timed(|| {
        runtime.block_on(async {
            let tasks: Vec<_> = std::mem::take(&mut clients)
                .into_iter()
                .enumerate()
                .map(|(connection, mut client)| {
                    tokio::spawn(async move {
                        for turn in 0..each {
                            let number = connection * each + turn;
                            let key = if work == Work::Replay { number % REPLAYED } else { first + number };
                            let is_replay = client.ask(key).await;
                            assert_eq!(is_replay, replays && work == Work::Replay);
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("a client");
            }
        });
    });
    thousands_per_second(took, each * connections)
}

/// Returns a layer on `store` with a new scope, in which every key is new.
fn fresh(store: &dyn Store, number: &mut u32) -> IdempotencyLayer {
    *number += 1;
    IdempotencyLayer::new(store, POLICY, Caller::single()).scope(format!("round{number}"))
}

fn throughputs(runtime: &Runtime) {
    let table = Table::new("HTTP: a route with the layer, and without", "thousand/s", "times its throughput");
    let rounds = sized(15, 1);
    let server = RedisServer::start(Kind::Redis);
    let redis = runtime.block_on(RedisStore::connect(&server.url())).expect("connects");
    let mut number = 0;
    for (store_name, goal) in [("memory", Goal::AtLeast(0.9)), ("Redis", Goal::None)] {
        for connections in [1, 64] {
            for (work, work_name) in [(Work::FirstRun, "first run"), (Work::Replay, "replay")] {
                let plural = if connections == 1 { "" } else { "s" };
                let name = format!("{store_name}, {work_name}, {connections} connection{plural}");
                if !is_wanted(&name) {
                    continue;
                }
                let mut bare = || throughput(runtime, None, work, connections);
                let mut ours = || {
                    let store: Arc<dyn Store> = match store_name {
                        "memory" => Arc::new(MemoryStore::new()),
                        _ => Arc::new(redis.clone()),
                    };
                    throughput(runtime, Some(fresh(&*store, &mut number)), work, connections)
                };
                let [raw, idem] = alternate(rounds, [&mut bare, &mut ours]);
                table.line(&name, &raw, &idem, |ours, raw| ours / raw, goal);
            }
        }
    }
}

/// Compares the layer with `axum-idempotent`, each in a separate process at its best number of connections.
fn beside_others(runtime: &Runtime) {
    let valkey = RedisServer::start(Kind::Valkey);
    let port = valkey.port().to_string();
    let mut ours = Peer::this("idem", &["serve", &port]);
    let mut theirs = Peer::rust("axum-idempotent", "http_layer", &[&port]);
    let address = |peer: &mut Peer| peer.read().parse().expect("an address");
    let (ours, theirs) = (Target::new(address(&mut ours), true), address(&mut theirs));
    let theirs = runtime.block_on(Target::with_session(theirs));
    let (ours, theirs) = (RefCell::new(ours), RefCell::new(theirs));
    let table = Table::new("HTTP on Valkey: beside axum-idempotent 0.6", "thousand/s", "times its throughput");
    for (work, work_name) in [(Work::FirstRun, "first run"), (Work::Replay, "replay")] {
        let name = format!("beside others, {work_name}");
        if !is_wanted(&name) {
            continue;
        }
        let at =
            |target: &RefCell<Target>, connections| throughput_of(runtime, &mut target.borrow_mut(), work, connections);
        let best = |target| {
            let measured = [16, 64, 256].map(|connections| (connections, at(target, connections)));
            measured.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("three").0
        };
        let (our_best, their_best) = (best(&ours), best(&theirs));
        let [raw, idem] = alternate(sized(15, 1), [&mut || at(&theirs, their_best), &mut || at(&ours, our_best)]);
        let line = format!("{name}, {our_best} connections against {their_best}");
        table.line(&line, &raw, &idem, |ours, theirs| ours / theirs, Goal::AtLeast(1.5));
    }
}

/// Serves the route with the layer, on the Valkey at `port`: the process that `beside_others` starts.
fn serve_alone(runtime: &Runtime, port: &str) {
    runtime.block_on(async {
        let store = RedisStore::connect(&format!("redis://127.0.0.1:{port}")).await.expect("connects");
        let address = serve(route(Some(IdempotencyLayer::new(&store, POLICY, Caller::single())))).await;
        println!("ready\n{address}");
        std::future::pending::<()>().await;
    });
}

fn request(key: &str, body: &Bytes) -> Request<Body> {
    let request = Request::post("/orders").header("idempotency-key", key).header("content-type", "application/json");
    request.body(Body::from(body.clone())).expect("a request")
}

/// Counts the allocations of one request through the service, after ten other requests.
fn allocations() {
    println!("\n### HTTP: allocations of one request of 1 KB, counted\n");
    println!("| work | allocations | bytes asked for |\n|---|---|---|");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
    let body = Bytes::from(payload());
    let with_layer = || route(Some(IdempotencyLayer::new(&MemoryStore::new(), POLICY, Caller::single())));
    for (name, app, is_replay) in
        [("without the layer", route(None), false), ("first run", with_layer(), false), ("replay", with_layer(), true)]
    {
        let ask = |number: usize| {
            let key = if is_replay { "order".to_owned() } else { format!("order-{number}") };
            let request = request(&key, &body);
            let app = app.clone();
            // The request is made before the measurement, because the allocations of a client are not the server's.
            measure(|| {
                runtime.block_on(async {
                    let response = app.oneshot(request).await.expect("answers");
                    assert_eq!(response.status(), StatusCode::OK);
                    drop(response.into_body().collect().await.expect("a body"));
                });
            })
        };
        for number in 0..10 {
            ask(number);
        }
        let counted = ask(10);
        println!("| {name} | {} | {} |", counted.count_total, counted.bytes_total);
    }
}

/// Sends many duplicates of one request while its handler runs, and prints the time and the memory that they take.
fn running_key() {
    let duplicates = sized(10_000, 200);
    println!("\n### HTTP: {duplicates} duplicates of one running key\n");
    println!("| they | milliseconds until all have an answer | bytes held for each, at most |\n|---|---|---|");
    let body = Bytes::from(payload());
    for (name, in_progress) in
        [("are refused", InProgress::Reject), ("wait for its response", InProgress::Wait(Duration::from_secs(3600)))]
    {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
        let go = Arc::new(Semaphore::new(0));
        let entered = Arc::new(Semaphore::new(0));
        let (opened, told) = (Arc::clone(&go), Arc::clone(&entered));
        let handler = async move |order: axum::Json<Value>| {
            told.add_permits(1);
            opened.acquire().await.expect("open").forget();
            order
        };
        // The layer must admit all duplicates next to the first request.
        let limit = u32::try_from(duplicates).expect("a small number") + 1;
        let layer = IdempotencyLayer::new(&MemoryStore::new(), POLICY.in_progress(in_progress), Caller::single());
        let app = Router::new().route("/orders", post(handler)).layer(layer.max_in_flight(limit));
        let first = runtime.spawn(app.clone().oneshot(request("order", &body)));
        runtime.block_on(async { entered.acquire().await.expect("open").forget() });
        let is_waited_for = matches!(in_progress, InProgress::Wait(_));
        let mut took = Duration::ZERO;
        // Only the duplicates are measured: the first request already runs.
        let held = measure(|| {
            took = timed(|| {
                runtime.block_on(async {
                    let asked: Vec<_> =
                        (0..duplicates).map(|_| tokio::spawn(app.clone().oneshot(request("order", &body)))).collect();
                    if is_waited_for {
                        // The runtime polls tasks in turn, some dozens in each pass: after these passes all of them
                        // wait.
                        for _ in 0..duplicates {
                            pass().await;
                        }
                        go.add_permits(1);
                    }
                    for asked in asked {
                        let response = asked.await.expect("a task").expect("answers");
                        let is_replay = response.headers().contains_key("idempotent-replayed");
                        assert_eq!(
                            (response.status() == StatusCode::CONFLICT, is_replay),
                            (!is_waited_for, is_waited_for)
                        );
                    }
                });
            });
        });
        if !is_waited_for {
            go.add_permits(1);
        }
        let first = runtime.block_on(first).expect("a task").expect("answers");
        assert_eq!(first.status(), StatusCode::OK);
        let each = held.bytes_max as f64 / f64::from(limit - 1);
        println!("| {name} | {:.1} | {each:.0} |", took.as_secs_f64() * 1e3);
    }
}

/// Yields until every other task has been polled.
async fn pass() {
    let mut has_passed = false;
    poll_fn(|context| match std::mem::replace(&mut has_passed, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

/// Makes `count` requests for a profiler, on one thread, with one task each for client and server.
fn turns(side: &str, transport: &str, count: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
    let layer = (side != "bare").then(|| IdempotencyLayer::new(&MemoryStore::new(), POLICY, Caller::single()));
    let app = route(layer);
    let key = |number| if side == "first" { number } else { 0 };
    let took = timed_on_cpu(|| {
        runtime.block_on(async {
            match transport {
                "service" => {
                    let body = Bytes::from(payload());
                    for number in 0..count {
                        let request = request(&format!("order-{}", key(number)), &body);
                        let response = app.clone().oneshot(request).await.expect("answers");
                        assert_eq!(response.status(), StatusCode::OK);
                        drop(response.into_body().collect().await.expect("a body"));
                    }
                }
                "socket" => {
                    let address = serve(app).await;
                    let mut client = Client::connect(address, &payload().into(), &"".into()).await;
                    for number in 0..count {
                        client.ask(key(number)).await;
                    }
                }
                _ => panic!("`service` or `socket`"),
            }
        });
    });
    println!("{side}, {transport}: {:.0} ns of processor time a request", nanos_each(took, count));
}

fn main() {
    if let [_, command, side, transport, count, ..] = &*std::env::args().collect::<Vec<_>>()
        && command == "turns"
    {
        return turns(side, transport, count.parse().expect("a number"));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    if let [_, command, port] = &*std::env::args().collect::<Vec<_>>()
        && command == "serve"
    {
        return serve_alone(&runtime, port);
    }
    throughputs(&runtime);
    // `./scripts/bench peers` installs `axum-idempotent`.
    if !is_quick() && is_wanted("beside others") {
        beside_others(&runtime);
    }
    if is_wanted("allocations") {
        allocations();
    }
    if is_wanted("running key") {
        running_key();
    }
}
