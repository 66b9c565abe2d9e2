//! A unary call of a tonic service behind the layer.

use std::io;
use std::net::SocketAddr;
use std::slice;

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
    // The bytes on the wire are the message, and then the status in the trailers.
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
async fn a_temporary_status_of_grpc_is_not_recorded() {
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
async fn a_refusal_by_the_layer_becomes_a_status_of_grpc() {
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

#[tokio::test]
async fn a_request_and_a_response_without_bytes_pass_the_layer() {
    let layer = layer();
    let request = http::Request::post("/till.Till/Pay").header("idempotency-key", "k").body(Bytes::new()).unwrap();
    let answered =
        layer.respond(request, async |_| Ok::<_, Never>(http::Response::new(axum::body::Body::empty()))).await;
    assert_eq!(answered.unwrap().into_body().collect().await.unwrap().to_bytes(), "");
}

/// Sends a request without a key, and with these fields.
async fn without_key(version: Version, address: SocketAddr, fields: &[(&str, &str)]) -> Reply {
    let request =
        fields.iter().fold(request(Method::POST, "/till.Till/Pay"), |it, (name, value)| it.header(*name, *value));
    send_by(version, address, request.body("".into()).unwrap()).await
}

#[tokio::test]
async fn only_a_client_of_grpc_gets_refusals_as_a_status_of_grpc() {
    let (address, _) = serve_counter(layer()).await;
    let grpc = ("content-type", "application/grpc");
    let te = ("te", "trailers");
    for (version, fields) in [
        (Version::One, &[grpc][..]),
        (Version::One, &[grpc, te]),
        (Version::Two, &[grpc]),
        (Version::Two, &[("content-type", "application/grpcx"), te]),
        (Version::Two, &[("content-type", "application/json"), te]),
    ] {
        let reply = without_key(version, address, fields).await;
        assert_eq!(reply.problem(), (400, "missing-key".to_owned()), "{version:?} {fields:?}");
    }
    for content_type in ["application/grpc", "Application/gRPC+proto", "application/grpc; charset=utf-8"] {
        let reply = without_key(Version::Two, address, &[("content-type", content_type), te]).await;
        assert_eq!((reply.status.as_u16(), reply.header("grpc-status")), (200, Some("3")), "{content_type}");
    }
}

/// Frame of gRPC-web.
fn web_frame(flag: u8, content: &str) -> Vec<u8> {
    [&[flag][..], &u32::try_from(content.len()).unwrap().to_be_bytes(), content.as_bytes()].concat()
}

/// Body of type `grpc-web-text`: each frame is encoded as Base64 separately.
fn web_text(frames: &[Vec<u8>]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in frames.iter().flat_map(|frame| frame.chunks(3)) {
        let bits = group.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte)) << (8 * (3 - group.len()));
        for at in 0..4 {
            let digit = char::from(DIGITS[bits >> (18 - 6 * at) & 63]);
            text.push(if at <= group.len() { digit } else { '=' });
        }
    }
    text
}

#[tokio::test]
async fn refusals_to_grpc_web_clients_are_trailers_in_the_body() {
    let (address, _) = serve_counter(layer()).await;
    let frame = web_frame(0x80, "grpc-status: 3\r\ngrpc-message: The request has no idempotency key\r\n");
    for version in BOTH {
        for (asked, answered, body) in [
            ("application/grpc-web", "application/grpc-web+proto", frame.clone()),
            ("application/grpc-web+proto", "application/grpc-web+proto", frame.clone()),
            ("application/grpc-web-text", "application/grpc-web-text+proto", web_text(slice::from_ref(&frame)).into()),
            (
                "application/grpc-web-text+proto",
                "application/grpc-web-text+proto",
                web_text(slice::from_ref(&frame)).into(),
            ),
        ] {
            let reply = without_key(version, address, &[("content-type", asked)]).await;
            assert_eq!((reply.status.as_u16(), reply.header("content-type")), (200, Some(answered)), "{asked}");
            assert_eq!(reply.body, body, "{asked}");
            assert_eq!(reply.header("grpc-status"), None);
        }
    }
}

#[tokio::test]
async fn the_status_in_the_body_of_a_grpc_web_response_decides_whether_it_is_recorded() {
    let stage = Stage::open();
    let runs = stage.clone();
    let address = serve_handler(layer(), async move |request: axum::extract::Request| {
        let run = runs.play().await;
        let frames = [
            web_frame(0, "a message"),
            web_frame(0x80, &format!("Grpc-Status:{}\r\nx-run: {run}\r\n", &request.uri().path()[1..])),
        ];
        let is_text = request.headers()["content-type"] == "application/grpc-web-text";
        let body = if is_text { web_text(&frames).into() } else { frames.concat() };
        let content_type = if is_text { "application/grpc-web-text+proto" } else { "application/grpc-web+proto" };
        answer(200, &[("content-type", content_type)], body)
    })
    .await;
    for content_type in ["application/grpc-web", "application/grpc-web-text"] {
        for (path, is_recorded) in [("/0", true), ("/14", false), ("/5", true)] {
            let with_key = || {
                let mut request = post_to(path, content_type, "");
                request.headers_mut().insert("content-type", HeaderValue::from_static(content_type));
                request.headers_mut().insert("idempotency-key", format!("{path}{content_type}").parse().unwrap());
                request
            };
            let first = send(address, with_key()).await;
            let again = send(address, with_key()).await;
            assert_eq!(again.is_replay(), is_recorded, "{content_type} {path}");
            assert_eq!(again.body == first.body, is_recorded, "{content_type} {path}");
        }
    }
}
