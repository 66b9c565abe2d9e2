//! Recorded responses, and the parts that a replay repeats.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use idem_runtime::codec::CodecName;
use idem_runtime::http::{Caller, IdempotencyLayer, Profile, Recording};
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::{Error, Key, MemoryStore, OnCrash, Operation, Store};
use idem_tests::{FaultyStore, StoreCall};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::rig::*;

/// Serves `respond`, which gets the number of its run and the request. Counts the runs of `respond`.
async fn serve_responses(
    layer: IdempotencyLayer,
    respond: impl Fn(usize, Request<Body>) -> Response<Body> + Clone + Send + Sync + 'static,
) -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    let handler = async move |request: Request<Body>| respond(count.fetch_add(1, Ordering::SeqCst) + 1, request);
    (serve_handler(layer, handler).await, runs)
}

#[tokio::test]
async fn final_responses_are_recorded_and_temporary_refusals_and_failures_are_not() {
    let (address, _) = serve_responses(layer(), |run, request| {
        let status = request.uri().path()[1..].parse().unwrap();
        let body = if status == 204 || status == 304 { String::new() } else { format!("run {run}") };
        answer(status, &[], body)
    })
    .await;
    for status in
        (200..600).filter(|status| StatusCode::from_u16(*status).is_ok_and(|it| it.canonical_reason().is_some()))
    {
        let path = format!("/{status}");
        let key = format!("k{status}");
        let first = send(address, post_to(&path, &key, "")).await;
        let again = send(address, post_to(&path, &key, "")).await;
        assert_eq!((first.status, again.status), (status.try_into().unwrap(), status.try_into().unwrap()));
        let is_recorded = status < 500 && ![401, 403, 408, 409, 421, 425, 429].contains(&status);
        assert_eq!((first.is_replay(), again.is_replay()), (false, is_recorded), "{status}");
        assert_eq!(first.body == again.body, is_recorded || status == 204 || status == 304, "{status}");
    }
}

#[tokio::test]
async fn a_handler_can_decide_whether_its_response_is_recorded() {
    let (address, _) = serve_responses(layer(), |run, request| {
        let (status, recording) = match request.uri().path() {
            "/500" => (500, Recording::Record),
            "/200" => (200, Recording::Release),
            _ => (200, Recording::Mark),
        };
        let mut response = answer(status, &[], format!("run {run}"));
        response.extensions_mut().insert(recording);
        response
    })
    .await;
    assert_eq!(send(address, post_to("/500", "k1", "")).await.text(), "run 1");
    let replay = send(address, post_to("/500", "k1", "")).await;
    assert_eq!((replay.status.as_u16(), replay.text(), replay.is_replay()), (500, "run 1", true));
    assert_eq!(send(address, post_to("/200", "k2", "")).await.text(), "run 2");
    assert_eq!(send(address, post_to("/200", "k2", "")).await.text(), "run 3");
    assert_eq!(send(address, post_to("/mark", "k3", "")).await.text(), "run 4");
    assert_eq!(send(address, post_to("/mark", "k3", "")).await.problem(), (410, "result-unavailable".to_owned()));
    let by_rule = layer().recording(|head, _| match head.headers.contains_key("x-final") {
        true => Recording::Record,
        false => Recording::Release,
    });
    let (address, _) = serve_responses(by_rule, |run, request| match request.uri().path() {
        "/final" => answer(500, &[("x-final", "1")], format!("run {run}")),
        _ => answer(200, &[], format!("run {run}")),
    })
    .await;
    assert!(!send(address, post_to("/final", "k", "")).await.is_replay());
    assert!(send(address, post_to("/final", "k", "")).await.is_replay());
    assert!(!send(address, post_to("/", "k2", "")).await.is_replay());
    assert!(!send(address, post_to("/", "k2", "")).await.is_replay());
}

#[tokio::test]
async fn a_response_is_recorded_whatever_its_cache_control() {
    for value in ["no-store", "private, no-cache, max-age=0"] {
        let (address, runs) =
            serve_responses(layer(), move |_, _| answer(200, &[("cache-control", value)], "paid")).await;
        send(address, post("k", "")).await;
        let again = send(address, post("k", "")).await;
        assert_eq!((again.is_replay(), again.header("cache-control")), (true, Some(value)));
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_replay_has_the_same_headers_in_their_order() {
    const HEADERS: &[(&str, &str)] = &[
        ("location", "/payments/1"),
        ("content-type", "application/json"),
        ("etag", "\"v1\""),
        ("content-disposition", "attachment; filename=\"a,b.txt\""),
        ("link", "</a>; rel=\"next\""),
        ("x-many", "1, 2"),
        ("vary", "accept"),
        ("x-many", "3"),
        ("link", "</b>; rel=\"last\""),
        ("last-modified", "Sun, 22 Nov 2026 14:00:00 GMT"),
    ];
    for version in BOTH {
        let (address, _) = serve_responses(layer(), |_, _| answer(201, HEADERS, "{}")).await;
        let first = send_by(version, address, post("k", "")).await;
        let mut again = send_by(version, address, post("k", "")).await;
        assert_eq!((first.status.as_u16(), again.status.as_u16()), (201, 201));
        assert_eq!(again.headers.remove("idempotent-replayed").unwrap(), "true");
        let of = |headers: &HeaderMap| {
            let pairs = headers.iter().filter(|(name, _)| *name != "date");
            pairs.map(|(name, value)| format!("{name}: {value:?}")).collect::<Vec<_>>()
        };
        let (mut first, mut again) = (of(&first.headers), of(&again.headers));
        // The server may put the length anywhere; only the order of values with the same name matters.
        first.sort_by_key(|line| line.split(':').next().map(str::to_owned));
        again.sort_by_key(|line| line.split(':').next().map(str::to_owned));
        assert_eq!(first, again);
        assert_eq!(again.iter().filter(|line| line.starts_with("x-many")).count(), 2);
    }
}

#[tokio::test]
async fn a_header_that_is_no_text_is_replayed_unchanged() {
    let (address, _) = serve_responses(layer(), |_, _| {
        let mut response = answer(200, &[], "");
        response.headers_mut().insert("x-name", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        response
    })
    .await;
    send(address, post("k", "")).await;
    let again = send(address, post("k", "")).await;
    assert_eq!((again.is_replay(), again.headers["x-name"].as_bytes()), (true, &b"caf\xe9"[..]));
}

#[tokio::test]
async fn headers_that_concern_only_the_first_exchange_are_not_replayed() {
    const NEVER: &[(&str, &str)] = &[
        ("set-cookie", "session=1; Path=/"),
        ("set-cookie", "b=2, c=3"),
        ("www-authenticate", "Bearer"),
        ("proxy-authenticate", "Basic"),
        ("authentication-info", "nextnonce=1"),
        ("clear-site-data", "\"cookies\""),
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("server", "till/1"),
        ("via", "1.1 proxy"),
        ("age", "1"),
        ("alt-svc", "h3=\":443\""),
        ("server-timing", "db;dur=1"),
        ("ratelimit", "limit=1"),
        ("ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "1"),
        ("retry-after", "7"),
        ("idempotent-replayed", "false"),
        ("date", "Thu, 01 Jan 1970 00:00:00 GMT"),
    ];
    // The layer also leaves `x-request-id` out of replays.
    let layer = layer().replay_headers(|name| name != "x-request-id");
    let (address, _) = serve_responses(layer, |_, _| {
        let mut response = answer(200, NEVER, "paid");
        response.headers_mut().insert("x-request-id", HeaderValue::from_static("7"));
        response.headers_mut().insert("x-kept", HeaderValue::from_static("1"));
        response
    })
    .await;
    let first = send(address, post("k", "")).await;
    assert_eq!(first.headers.get_all("set-cookie").iter().count(), 2);
    assert_eq!((first.header("x-request-id"), first.header("retry-after")), (Some("7"), Some("7")));
    let again = send(address, post("k", "")).await;
    assert_eq!((again.text(), again.header("x-kept"), again.header("x-request-id")), ("paid", Some("1"), None));
    assert_eq!(again.header("content-length"), Some("4"));
    // The replay lacks each header above; the server sets the date and the replay mark anew.
    for (name, value) in NEVER {
        match *name {
            "idempotent-replayed" => assert!(again.is_replay()),
            "date" => assert_ne!(again.header("date"), Some(*value), "the date is that of the replay"),
            name => assert_eq!(again.header(name), None),
        }
    }
}

#[tokio::test]
async fn responses_without_a_body_are_replayed_without_a_body() {
    for version in BOTH {
        let layer = layer().methods([Method::POST, Method::HEAD]);
        let (address, _) = serve_responses(layer, |_, request| match (request.method(), request.uri().path()) {
            (&Method::HEAD, "/big") => answer(200, &[("content-length", "1234")], Body::empty()),
            (&Method::HEAD, _) => answer(200, &[], "four"),
            (_, "/304") => answer(304, &[("etag", "\"e\""), ("content-length", "99")], Body::empty()),
            (_, "/empty") => answer(200, &[], Body::empty()),
            _ => answer(204, &[], Body::empty()),
        })
        .await;
        for (method, path) in [
            (Method::HEAD, "/big"),
            (Method::HEAD, "/"),
            (Method::POST, "/304"),
            (Method::POST, "/204"),
            (Method::POST, "/empty"),
        ] {
            let with = || request(method.clone(), path).header("idempotency-key", path).body("".into()).unwrap();
            let first = send_by(version, address, with()).await;
            let again = send_by(version, address, with()).await;
            assert_eq!((first.is_replay(), again.is_replay()), (false, true), "{method} {path}");
            assert_eq!((first.status, &first.body), (again.status, &again.body), "{method} {path}");
            assert_eq!(first.header("etag"), again.header("etag"));
            if path != "/" {
                assert_eq!(
                    first.header("content-length"),
                    again.header("content-length"),
                    "{version:?} {method} {path}"
                );
            }
        }
    }
}

/// Names and values of trailer fields.
type Fields = [(&'static str, &'static str)];

fn with_trailers(name: &'static str, value: &'static str) -> Body {
    with_trailer_fields([b"pa", b"id"].map(|data| Bytes::from_static(data)), &[(name, value)])
}

fn with_trailer_fields<const N: usize>(data: [Bytes; N], fields: &Fields) -> Body {
    let fields = fields.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    let frames = data.into_iter().map(Frame::data).chain([Frame::trailers(fields.collect())]);
    let frames: Vec<_> = frames.map(Ok::<_, Never>).collect();
    Body::new(StreamBody::new(futures::stream::iter(frames)))
}

#[tokio::test]
async fn trailers_are_replayed() {
    for version in BOTH {
        let (address, _) = serve_responses(layer(), |_, _| {
            answer(200, &[("trailer", "x-checksum")], with_trailers("x-checksum", "7"))
        })
        .await;
        for replays in [false, true] {
            let mut request = post("k", "");
            request.headers_mut().insert("te", HeaderValue::from_static("trailers"));
            let reply = send_by(version, address, request).await;
            assert_eq!((reply.text(), reply.is_replay()), ("paid", replays));
            assert_eq!(reply.trailers.unwrap().get("x-checksum").unwrap(), "7", "{version:?}");
        }
    }
}

#[tokio::test]
async fn marks_that_a_handler_forges_in_trailers_reach_no_client() {
    const MARKS: [(&str, &str); 5] = [
        ("idempotent-replayed", "true"),
        ("idempotency-recorded", "false"),
        ("idempotency-replayable", "false"),
        ("idempotency-key", "k"),
        ("x-checksum", "7"),
    ];
    const NAMES: &str =
        "idempotent-replayed, idempotency-recorded, idempotency-replayable, idempotency-key, x-checksum";
    for (version, echoes_key) in BOTH.into_iter().flat_map(|version| [(version, false), (version, true)]) {
        let mut profile = Profile::ietf();
        profile.echoes_key = echoes_key;
        let store = MemoryStore::new();
        let layer = IdempotencyLayer::new(&store, POLICY.max_result_bytes(400), Caller::single()).profile(profile);
        let (address, _) = serve_responses(layer, |_, request| {
            let path = request.uri().path();
            let status = if path == "/error" { 503 } else { 200 };
            let kind = if path == "/events" { "text/event-stream" } else { "text/plain" };
            let length = if path == "/large" { 500 } else { 1 };
            let body = with_trailer_fields([Bytes::from(vec![b'x'; length])], &MARKS);
            let mut response = answer(status, &[("content-type", kind), ("trailer", NAMES)], body);
            if path == "/mark" {
                response.extensions_mut().insert(Recording::Mark);
            }
            response
        })
        .await;
        let expected = if echoes_key { &["x-checksum"][..] } else { &["idempotency-key", "x-checksum"] };
        // The layer reads the first response whole, and replays it. The next three responses stream. The layer reads a
        // part of the last response before this response streams, too.
        for path in ["/whole", "/whole", "/error", "/events", "/mark", "/large"] {
            let mut request = post_to(path, &path[1..], "");
            request.headers_mut().insert("te", HeaderValue::from_static("trailers"));
            let reply = send_by(version, address, request).await;
            let trailers = reply.trailers.unwrap_or_default();
            let mut names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
            names.sort_unstable();
            assert_eq!(names, expected, "{version:?} {path}");
        }
    }
}

#[tokio::test]
async fn a_grpc_status_in_the_trailers_decides_about_recording() {
    let (address, _) = serve_responses(layer(), |_, request| match request.uri().path() {
        "/14" => answer(200, &[], with_trailers("grpc-status", "14")),
        _ => answer(200, &[], with_trailers("grpc-status", "5")),
    })
    .await;
    for (path, is_recorded) in [("/14", false), ("/5", true)] {
        for is_again in [false, true] {
            let reply = send_by(Version::Two, address, post_to(path, &path[1..], "")).await;
            assert_eq!(reply.trailers.as_ref().unwrap()["grpc-status"], path[1..]);
            assert_eq!(reply.is_replay(), is_recorded && is_again, "{path}");
        }
    }
}

#[tokio::test]
async fn a_handler_whose_response_is_too_large_to_record_never_runs_again() {
    let policy = POLICY.max_result_bytes(1000).lease(Duration::from_millis(100));
    // The responses have a length, have no length, or have headers that are too large without the body.
    for path in ["/sized", "/chunked", "/headers"] {
        let layer = IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single());
        let (address, runs) = serve_responses(layer, |_, request| match request.uri().path() {
            "/sized" => answer(200, &[], "x".repeat(1001)),
            "/chunked" => answer(200, &[], frames(vec![Ok("x"); 1001])),
            _ => answer(200, &[("x-large", "y".repeat(999).leak())], "x".repeat(2)),
        })
        .await;
        let first = send(address, post_to(path, "k", "")).await;
        let expected = if path == "/headers" { 2 } else { 1001 };
        assert_eq!((first.status.as_u16(), first.text()), (200, &*"x".repeat(expected)), "{path}");
        for _ in 0..2 {
            assert_eq!(send(address, post_to(path, "k", "")).await.problem(), (410, "result-unavailable".to_owned()));
        }
        // After the end of the lease the result must not change.
        tokio::time::sleep(Duration::from_millis(150)).await;
        assert_eq!(send(address, post_to(path, "k", "")).await.problem().0, 410);
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_stream_of_events_reaches_the_first_client_as_it_comes() {
    for version in BOTH {
        let (events, received) = mpsc::unbounded_channel::<&'static str>();
        let received = Arc::new(std::sync::Mutex::new(Some(received)));
        let (address, runs) = serve_responses(layer(), move |_, _| {
            let received = received.lock().unwrap().take().expect("one run");
            let stream = futures::stream::unfold(received, async |mut received| {
                let event = received.recv().await?;
                Some((Ok::<_, Never>(Frame::data(Bytes::from_static(event.as_bytes()))), received))
            });
            answer(200, &[("content-type", "text/event-stream")], Body::new(StreamBody::new(stream)))
        })
        .await;
        let mut connection = Connection::open(address, version).await;
        let mut request = post("k", "");
        if version == Version::One {
            *request.uri_mut() = "/pay".parse().unwrap();
        }
        let mut body = connection.send(request).await.unwrap().into_body();
        for event in ["data: 1\n\n", "data: 2\n\n"] {
            events.send(event).unwrap();
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), event);
        }
        assert_eq!(send_by(version, address, post("k", "")).await.problem(), (410, "result-unavailable".to_owned()));
        drop(events);
        assert_eq!(body.collect().await.unwrap().to_bytes(), "");
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn an_encoded_response_is_marked_as_finished_and_not_recorded() {
    let (address, runs) = serve_responses(layer(), |_, request| match request.uri().path() {
        "/gzip" => answer(200, &[("content-encoding", "gzip")], "\u{1f}"),
        _ => answer(200, &[("content-encoding", "identity")], "paid"),
    })
    .await;
    assert_eq!(send(address, post_to("/gzip", "k", "")).await.header("content-encoding"), Some("gzip"));
    assert_eq!(send(address, post_to("/gzip", "k", "")).await.problem(), (410, "result-unavailable".to_owned()));
    assert!(!send(address, post_to("/", "k2", "")).await.is_replay());
    assert!(send(address, post_to("/", "k2", "")).await.is_replay());
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn an_upgrade_goes_through_and_its_key_is_marked_as_finished() {
    let (address, _) = serve_responses(layer(), |_, mut request| {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = hyper_util::rt::TokioIo::new(upgrade.await.expect("upgrades"));
            let mut said = [0; 4];
            stream.read_exact(&mut said).await.expect("reads");
            stream.write_all(&said).await.expect("writes");
        });
        answer(101, &[("connection", "upgrade"), ("upgrade", "echo")], Body::empty())
    })
    .await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = "POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut said = Vec::new();
    while !said.ends_with(b"\r\n\r\n") {
        said.push(stream.read_u8().await.unwrap());
    }
    assert!(said.starts_with(b"HTTP/1.1 101 "), "{said:?}");
    stream.write_all(b"ping").await.unwrap();
    let mut echo = [0; 4];
    stream.read_exact(&mut echo).await.unwrap();
    assert_eq!(&echo, b"ping");
    assert_eq!(send(address, post("k", "")).await.problem(), (410, "result-unavailable".to_owned()));
}

#[tokio::test]
async fn handlers_that_panic_or_break_off_their_response_free_the_key() {
    for (on_crash, next) in [(OnCrash::Retry, 200), (OnCrash::Fail, 409)] {
        for path in ["/panic", "/breaks-off"] {
            let layer = IdempotencyLayer::new(&MemoryStore::new(), POLICY.on_crash(on_crash), Caller::single());
            let (address, _) = serve_responses(layer, |run, request| match (run, request.uri().path()) {
                (1, "/panic") => panic!("on purpose"),
                (1, _) => answer(200, &[], frames([Ok("half"), Err("on purpose")])),
                _ => answer(200, &[], format!("run {run}")),
            })
            .await;
            let mut connection = Connection::open(address, Version::Two).await;
            // The client must not receive the response as a success.
            if let Ok(response) = connection.send(post_to(path, "k", "")).await {
                assert_eq!(path, "/breaks-off");
                drop(Reply::of(response).await.expect_err("cut off"));
            }
            assert_eq!(send(address, post_to(path, "k", "")).await.status.as_u16(), next, "{path}");
        }
    }
}

#[tokio::test]
async fn the_response_is_recorded_before_it_is_sent() {
    let store = FaultyStore::new(&MemoryStore::new());
    store.next(StoreCall::Finish, idem_tests::Fault::Slow(50));
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single());
    let (address, _) = serve_responses(layer, |_, _| answer(200, &[], "paid")).await;
    let mut connection = Connection::open(address, Version::Two).await;
    // The head has arrived; the body may not have arrived yet.
    let response = connection.send(post("k", "")).await.unwrap();
    let found = store.inspect(&"http/POST::k".parse().unwrap()).await.unwrap().expect("a record");
    assert!(matches!(found.record.state, State::Completed(_)), "{:?}", found.record.state);
    assert_eq!(Reply::of(response).await.unwrap().text(), "paid");
}

async fn found(store: &MemoryStore, shown: &str) -> Record {
    store.inspect(&shown.parse().unwrap()).await.unwrap().expect("a record").record
}

async fn recorded(store: &MemoryStore, shown: &str) -> (CodecName, Bytes) {
    match found(store, shown).await.state {
        State::Completed(StoredResult::Encoded { codec, bytes }) => (codec, bytes),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_record_of_a_response_of_a_megabyte_is_hardly_larger() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(&store, POLICY.max_result_bytes(2 << 20), Caller::single()).scope("large");
    let (address, _) = serve_responses(layer, |_, _| answer(200, &[], vec![0x80; 1 << 20])).await;
    assert_eq!(send(address, post("k", "")).await.body.len(), 1 << 20);
    let (_, bytes) = recorded(&store, "large/POST::k").await;
    assert!((1 << 20..(1 << 20) + 200).contains(&bytes.len()), "{}", bytes.len());
    let again = send(address, post("k", "")).await;
    assert!(again.is_replay() && again.body == vec![0x80; 1 << 20]);
}

#[tokio::test]
async fn recorded_responses_have_the_bytes_of_the_golden_file() {
    let lines = include_str!("../golden/http-v1.txt").lines();
    let pinned: HashMap<_, _> = lines.map(|line| line.split_once(' ').expect("a name and its bytes")).collect();
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single())
        .scope("golden")
        .fingerprint_headers([HeaderName::from_static("x-account")]);
    let (address, runs) = serve_responses(layer, |_, request| match request.uri().path() {
        "/plain" => answer(201, &[("location", "/p/1"), ("x-a", "1"), ("x-a", "2, 3")], "paid"),
        "/empty" => answer(204, &[], Body::empty()),
        _ => answer(200, &[], with_trailers("x-checksum", "7")),
    })
    .await;
    let hex = |bytes: &[u8]| -> String {
        let digit = |nibble: u8| char::from_digit(nibble.into(), 16).expect("a digit");
        bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
    };
    for name in ["plain", "empty", "trailers"] {
        send(address, post_to(&format!("/{name}"), name, "")).await;
        let (codec, bytes) = recorded(&store, &format!("golden/POST::{name}")).await;
        assert_eq!((codec.as_str(), hex(&bytes)), ("http1", pinned[name].to_owned()));
    }
    // If a release changed the fingerprint, each retry of a request from before the upgrade would get a 422.
    let mut request = post_to("/plain?a=1", "payload", "amount=1");
    request.headers_mut().insert("x-account", HeaderValue::from_static("7"));
    send(address, request).await;
    let fingerprint = found(&store, "golden/POST::payload").await.fingerprint.expect("a fingerprint");
    assert_eq!(hex(fingerprint.as_bytes()), pinned["fingerprint"]);
    assert_eq!(runs.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_key_that_a_call_outside_of_http_has_finished_runs_no_request_handler() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(&store, POLICY, Caller::single()).scope("shared");
    let (address, runs) = serve_responses(layer, |_, _| answer(200, &[], "paid")).await;
    assert_eq!(send(address, post("k", "")).await.text(), "paid");
    // A call outside of HTTP uses the same key.
    let operation = Operation::new(&store, Key::new("shared", "POST::k2"), POLICY);
    operation.run(async { Ok::<_, Error>(7) }).await.unwrap();
    assert_eq!(send(address, post("k2", "")).await.problem(), (410, "result-unavailable".to_owned()));
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_stream_is_recognised_by_its_content_type_in_any_case() {
    for content_type in ["Text/Event-Stream; charset=utf-8", "MULTIPART/x-mixed-replace"] {
        let (address, _) = serve_responses(layer(), move |_, _| {
            let mut response = answer(200, &[], "data: 1\n\n");
            response.headers_mut().insert("content-type", HeaderValue::from_static(content_type));
            response
        })
        .await;
        assert_eq!(send(address, post("k", "")).await.text(), "data: 1\n\n");
        assert_eq!(send(address, post("k", "")).await.problem(), (410, "result-unavailable".to_owned()));
    }
}

#[tokio::test]
async fn a_handler_can_not_forge_the_marks_of_the_layer() {
    const FORGED: &[(&str, &str)] = &[
        ("idempotent-replayed", "true"),
        ("idempotent-replayed", "maybe"),
        ("idempotency-recorded", "false"),
        ("idempotency-replayable", "false"),
        ("x-own", "1"),
    ];
    for status in [200, 500] {
        let (address, _) = serve_responses(layer(), move |_, _| answer(status, FORGED, "")).await;
        let first = send(address, post("k", "")).await;
        assert_eq!(first.status.as_u16(), status);
        for mark in ["idempotent-replayed", "idempotency-recorded", "idempotency-replayable"] {
            assert_eq!(first.header(mark), None, "{mark}");
        }
        let again = send(address, post("k", "")).await;
        assert_eq!(again.headers.get_all("idempotent-replayed").iter().count(), usize::from(status == 200));
        assert_eq!((again.is_replay(), again.header("x-own")), (status == 200, Some("1")));
        assert_eq!(again.header("idempotency-replayable"), None);
    }
}

#[tokio::test]
async fn a_response_that_can_not_be_replayed_tells_its_client_so() {
    let policy = POLICY.max_result_bytes(1000);
    let layer = IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single());
    let (address, _) = serve_responses(layer, |_, request| {
        let mut response = match request.uri().path() {
            "/large" => answer(200, &[], "x".repeat(1001)),
            // The body alone fits, but not together with its headers.
            "/head" => answer(200, &[("x-a", "1")], "x".repeat(1000)),
            "/events" => answer(200, &[("content-type", "text/event-stream")], "data: 1\n\n"),
            "/encoded" => answer(200, &[("content-encoding", "br")], "x"),
            "/error" => answer(500, &[("content-encoding", "br")], "x"),
            _ => answer(200, &[], "x"),
        };
        if request.uri().path() == "/mark" {
            response.extensions_mut().insert(Recording::Mark);
        }
        response
    })
    .await;
    for path in ["/large", "/head", "/events", "/encoded", "/mark"] {
        let first = send(address, post_to(path, &format!("k{}", &path[1..]), "")).await;
        assert_eq!((first.status.as_u16(), first.header("idempotency-replayable")), (200, Some("false")), "{path}");
        assert_eq!(first.header("idempotency-recorded"), None);
        let again = send(address, post_to(path, &format!("k{}", &path[1..]), "")).await;
        assert_eq!(again.problem(), (410, "result-unavailable".to_owned()), "{path}");
    }
    for path in ["/plain", "/error"] {
        let first = send(address, post_to(path, &format!("k{}", &path[1..]), "")).await;
        assert_eq!(first.header("idempotency-replayable"), None, "{path}");
    }
}
