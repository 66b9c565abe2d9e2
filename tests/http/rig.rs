//! A server behind the layer on a real socket, and clients of both versions of HTTP.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::handler::Handler;
use axum::response::IntoResponse;
use axum::routing::any;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use idem_runtime::http::{Caller, IdempotencyLayer};
use idem_runtime::{MemoryStore, Policy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// Policy of the layers in tests that need no other policy.
pub(crate) const POLICY: Policy = Policy::new(Duration::from_secs(48 * 3600)).lease(Duration::from_secs(60));

/// Time after which a missing answer fails a test. The time is longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Layer with one caller, on its own store.
pub(crate) fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(&MemoryStore::new(), POLICY, Caller::single())
}

/// Gate in a handler, at which the handler waits until the test lets it go on. The stage counts the handlers that have
/// reached the gate, and the handlers that have passed the gate.
#[derive(Clone, Debug)]
pub(crate) struct Stage(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    begun: AtomicUsize,
    ended: AtomicUsize,
    entered: Semaphore,
    go: Semaphore,
}

impl Stage {
    /// Returns a stage whose handlers do not wait.
    pub(crate) fn open() -> Self {
        Self::with(Semaphore::MAX_PERMITS)
    }

    /// Returns a stage whose handlers wait for [`go`](Self::go).
    pub(crate) fn closed() -> Self {
        Self::with(0)
    }

    fn with(permits: usize) -> Self {
        let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self(Arc::new(Inner { begun, ended, entered: Semaphore::new(0), go: Semaphore::new(permits) }))
    }

    /// Makes the handler wait at this stage. Returns the number of handlers that have begun so far, including this
    /// handler.
    pub(crate) async fn play(&self) -> usize {
        let run = self.0.begun.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.entered.add_permits(1);
        self.0.go.acquire().await.expect("open").forget();
        self.0.ended.fetch_add(1, Ordering::SeqCst);
        run
    }

    /// Waits until one more handler has begun.
    pub(crate) async fn entered(&self) {
        self.0.entered.acquire().await.expect("open").forget();
    }

    /// Lets one handler go on.
    pub(crate) fn go(&self) {
        self.0.go.add_permits(1);
    }

    /// Number of handlers that have begun.
    pub(crate) fn begun(&self) -> usize {
        self.0.begun.load(Ordering::SeqCst)
    }

    /// Number of handlers that have gone on to their end.
    pub(crate) fn ended(&self) -> usize {
        self.0.ended.load(Ordering::SeqCst)
    }
}

/// Serves `app` until the test ends.
pub(crate) async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// Serves `handler` behind `layer`, at every path.
pub(crate) async fn serve_handler<H, T>(layer: IdempotencyLayer, handler: H) -> SocketAddr
where
    H: Handler<T, ()>,
    T: 'static,
{
    serve(Router::new().fallback(any(handler)).layer(layer)).await
}

/// Serves a handler that answers with the number of its run. The returned stage counts the runs.
pub(crate) async fn serve_counter(layer: IdempotencyLayer) -> (SocketAddr, Stage) {
    let stage = Stage::open();
    (serve_stage(layer, &stage).await, stage)
}

/// Serves a handler that plays `stage` and answers with the number of its run.
pub(crate) async fn serve_stage(layer: IdempotencyLayer, stage: &Stage) -> SocketAddr {
    let stage = stage.clone();
    serve_handler(layer, async move || format!("run {}", stage.play().await)).await
}

/// Version of HTTP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Version {
    One,
    Two,
}

pub(crate) const BOTH: [Version; 2] = [Version::One, Version::Two];

/// Response that has been read to its end.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Reply {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.headers.get("idempotent-replayed").is_some_and(|it| it == "true")
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().expect("text"))
    }

    /// Status, and name of the problem.
    pub(crate) fn problem(&self) -> (u16, String) {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{}", self.text());
        let body: serde_json::Value = serde_json::from_slice(&self.body).expect("JSON");
        let problem = body["type"].as_str().expect("a type");
        assert_eq!(body["status"], self.status.as_u16());
        assert!(body["detail"].as_str().is_some_and(|it| it.len() > 10) && body["title"].is_string(), "{body}");
        let name = problem.rsplit([':', '/', '#']).next().expect("a name");
        (self.status.as_u16(), name.to_owned())
    }

    pub(crate) async fn of<B>(response: Response<B>) -> Result<Self, B::Error>
    where
        B: http_body::Body<Data = Bytes>,
    {
        let (head, body) = response.into_parts();
        let body = body.collect().await?;
        let trailers = body.trailers().cloned();
        Ok(Self { status: head.status, headers: head.headers, body: body.to_bytes(), trailers })
    }
}

/// Connection of a client.
pub(crate) enum Connection {
    One(http1::SendRequest<Body>),
    Two(http2::SendRequest<Body>),
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr, version: Version) -> Self {
        let stream = TokioIo::new(TcpStream::connect(address).await.expect("connects"));
        match version {
            Version::One => {
                let (sender, connection) = http1::handshake(stream).await.expect("shakes hands");
                tokio::spawn(connection);
                Self::One(sender)
            }
            Version::Two => {
                let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.expect("shakes hands");
                tokio::spawn(connection);
                Self::Two(sender)
            }
        }
    }

    pub(crate) async fn send(&mut self, request: Request<Body>) -> hyper::Result<Response<hyper::body::Incoming>> {
        let asking = async {
            match self {
                Self::One(sender) => {
                    sender.ready().await?;
                    sender.send_request(request).await
                }
                Self::Two(sender) => {
                    sender.ready().await?;
                    sender.send_request(request).await
                }
            }
        };
        tokio::time::timeout(PATIENCE, asking).await.expect("the server answers within the time limit")
    }
}

/// Builder of a request.
pub(crate) fn request(method: Method, path: &str) -> http::request::Builder {
    Request::builder().method(method).uri(format!("http://till{path}")).header("host", "till")
}

/// POST to `/pay` with this key.
pub(crate) fn post(key: &str, body: impl Into<Bytes>) -> Request<Body> {
    post_to("/pay", key, body)
}

/// POST to `path` with this key.
pub(crate) fn post_to(path: &str, key: &str, body: impl Into<Bytes>) -> Request<Body> {
    let request = request(Method::POST, path).header("idempotency-key", key);
    request.body(Body::new(Full::new(body.into()))).expect("a request")
}

/// Sends `request` over its own connection.
pub(crate) async fn send(address: SocketAddr, request: Request<Body>) -> Reply {
    send_by(Version::One, address, request).await
}

/// Sends `request` over its own connection with this version of HTTP.
pub(crate) async fn send_by(version: Version, address: SocketAddr, mut request: Request<Body>) -> Reply {
    if version == Version::One {
        *request.uri_mut() = request.uri().path_and_query().expect("a path").as_str().parse().expect("a path");
    } else {
        request.headers_mut().remove("host");
    }
    let mut connection = Connection::open(address, version).await;
    Reply::of(connection.send(request).await.expect("an answer")).await.expect("a body")
}

/// Sends these bytes, and reads until the server closes the connection.
pub(crate) async fn send_raw(address: SocketAddr, bytes: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connects");
    stream.write_all(bytes.as_bytes()).await.expect("writes");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("reads");
    String::from_utf8_lossy(&answer).into_owned()
}

/// Response with these headers.
pub(crate) fn answer(status: u16, headers: &[(&'static str, &'static str)], body: impl Into<Body>) -> Response<Body> {
    let mut response = StatusCode::from_u16(status).expect("a status").into_response();
    for (name, value) in headers {
        response.headers_mut().append(*name, value.parse().expect("a value"));
    }
    *response.body_mut() = body.into();
    response
}

/// Body of these frames, each of which may be an error.
pub(crate) fn frames<I>(frames: I) -> Body
where
    I: IntoIterator<Item = Result<&'static str, &'static str>>,
    I::IntoIter: Send + 'static,
{
    let frames = frames.into_iter().map(|frame| match frame {
        Ok(text) => Ok(Bytes::from_static(text.as_bytes())),
        Err(error) => Err(std::io::Error::other(error)),
    });
    Body::from_stream(futures::stream::iter(frames))
}

/// Waits until `condition` holds, for events that no answer reports.
pub(crate) async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    idem_tests::server::until(what, async || condition()).await;
}

/// Error of an operation that can't fail.
pub(crate) type Never = Infallible;
