//! A unary call of a tonic service behind the layer.

use std::io;
use std::net::SocketAddr;

use bytes::{Buf, BufMut, Bytes};
use http::uri::PathAndQuery;
use http::{HeaderValue, Method};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use idem_runtime::http::{IdempotencyLayer, RequestBody};
use tokio::net::{TcpListener, TcpStream};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Request, Response, Status};
use tower::{Layer, service_fn};

use crate::rig::*;

/// Codec of text messages.
#[derive(Clone, Copy, Default)]
struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, item: String, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put_slice(item.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = bytes.copy_to_bytes(bytes.remaining());
        let text = String::from_utf8(bytes.to_vec()).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Some(text))
    }
}

/// Serves a method that answers with its argument and the number of its run, or with the status that its argument
/// names.
async fn serve_grpc(layer: IdempotencyLayer, stage: &Stage) -> SocketAddr {
    let stage = stage.clone();
    let service = service_fn(move |request: http::Request<RequestBody<Incoming>>| {
        let stage = stage.clone();
        let method = service_fn(move |request: Request<String>| {
            let stage = stage.clone();
            async move {
                let run = stage.play().await;
                match request.get_ref().as_str() {
                    "unavailable" => Err(Status::unavailable(format!("run {run}"))),
                    "not found" => Err(Status::not_found(format!("run {run}"))),
                    text => Ok(Response::new(format!("{text}, run {run}"))),
                }
            }
        });
        async move { Ok::<_, Never>(tonic::server::Grpc::new(Text).unary(method, request).await) }
    });
    let service = TowerToHyperService::new(layer.layer(service));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("accepts");
            let service = service.clone();
            tokio::spawn(async move {
                auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await
            });
        }
    });
    address
}

/// Calls the method. Returns its answer and whether it is a replay.
async fn call(address: SocketAddr, key: Option<&'static str>, text: &str) -> Result<(String, bool), Status> {
    let stream = TokioIo::new(TcpStream::connect(address).await.expect("connects"));
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.expect("opens");
    tokio::spawn(connection);
    let client = service_fn(move |request: http::Request<tonic::body::Body>| {
        let mut sender = sender.clone();
        async move { sender.send_request(request).await }
    });
    let origin = "http://till".parse().expect("a URI");
    let mut client = tonic::client::Grpc::with_origin(client, origin);
    let mut request = Request::new(text.to_owned());
    if let Some(key) = key {
        request.metadata_mut().insert("idempotency-key", key.parse().expect("a key"));
    }
    client.ready().await.expect("ready");
    let answer = client.unary(request, PathAndQuery::from_static("/till.Till/Pay"), Text).await?;
    let is_replay = answer.metadata().contains_key("idempotent-replayed");
    Ok((answer.into_inner(), is_replay))
}

#[tokio::test]
async fn a_unary_call_replays_with_its_trailers() {
    let stage = Stage::open();
    let address = serve_grpc(layer(), &stage).await;
    assert_eq!(call(address, Some("k"), "pay").await.unwrap(), ("pay, run 1".to_owned(), false));
    assert_eq!(call(address, Some("k"), "pay").await.unwrap(), ("pay, run 1".to_owned(), true));
    // Bytes on the wire: the message, and then the status in the trailers.
    let message = [&[0, 0, 0, 0, 3][..], b"pay"].concat();
    let request = request(Method::POST, "/till.Till/Pay")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("idempotency-key", "k")
        .body(axum::body::Body::from(message));
    let mut connection = Connection::open(address, Version::Two).await;
    let mut request = request.unwrap();
    request.headers_mut().remove("host");
    let replay = Reply::of(connection.send(request).await.unwrap()).await.unwrap();
    assert!(replay.is_replay());
    assert_eq!(replay.header("content-type"), Some("application/grpc"));
    assert_eq!(replay.body, [&[0, 0, 0, 0, 10][..], b"pay, run 1"].concat());
    assert_eq!(replay.trailers.unwrap().get("grpc-status"), Some(&HeaderValue::from_static("0")));
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn a_status_that_passes_is_not_recorded() {
    let stage = Stage::open();
    let address = serve_grpc(layer(), &stage).await;
    for run in ["run 1", "run 2"] {
        let status = call(address, Some("k1"), "unavailable").await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, run));
    }
    for _ in 0..2 {
        let status = call(address, Some("k2"), "not found").await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::NotFound, "run 3"));
    }
}

#[tokio::test]
async fn problems_become_a_status_of_grpc() {
    let stage = Stage::closed();
    let address = serve_grpc(layer(), &stage).await;
    let code = async |key, text| call(address, key, text).await.unwrap_err().code();
    assert_eq!(code(None, "pay").await, Code::InvalidArgument);
    let first = tokio::spawn(call(address, Some("k"), "pay"));
    stage.entered().await;
    assert_eq!(code(Some("k"), "pay").await, Code::Aborted);
    let other = call(address, Some("k"), "other").await.unwrap_err();
    assert_eq!(other.code(), Code::FailedPrecondition);
    assert_eq!(other.message(), "This idempotency key was used with another request");
    stage.go();
    assert_eq!(first.await.unwrap().unwrap().0, "pay, run 1");
}

/// Only the bytes of the message count when calls are compared.
#[tokio::test]
async fn a_call_without_a_body_is_an_operation_too() {
    let layer = layer();
    let request = http::Request::post("/till.Till/Pay").header("idempotency-key", "k").body(Bytes::new()).unwrap();
    let answered =
        layer.respond(request, async |_| Ok::<_, Never>(http::Response::new(axum::body::Body::empty()))).await;
    assert_eq!(answered.unwrap().into_body().collect().await.unwrap().to_bytes(), "");
}
