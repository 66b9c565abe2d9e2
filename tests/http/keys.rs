//! Keys of requests, callers, and the comparison of payloads.

use http::header::HeaderName;
use http::{HeaderValue, Method, Request};
use idem_runtime::http::{Caller, IdempotencyKey, IdempotencyLayer, JsonMembers, Profile};
use idem_runtime::{MemoryStore, MissingKey, Policy};
use idem_tests::{FaultyStore, StoreCall};

use crate::rig::*;

/// `Content-Digest` of `amount=1`, of `amount=2`, and of 3,000,000 times `x`.
fn content_digest(body: &str) -> &'static str {
    match body {
        "amount=1" => "sha-256=:WoeHucCRTYQAPf2NDYCDit5PO9F81vl4KW35e18huSI=:",
        "amount=2" => "sha-256=:8G7ICndBqtCLvdGbu00RTpU2k2iSI3UxBawkLjgCRkU=:",
        _ => "sha-256=:5VuL32Id2qj0YsdHRduWgNO7dTapz4VPjWZos0ooeJA=:",
    }
}

#[tokio::test]
async fn a_duplicate_gets_the_response_of_the_first_run() {
    for version in BOTH {
        let (address, stage) = serve_counter(layer()).await;
        let first = send_by(version, address, post("k", "amount=1")).await;
        assert_eq!((first.status.as_u16(), first.text(), first.is_replay()), (200, "run 1", false));
        let again = send_by(version, address, post("k", "amount=1")).await;
        assert_eq!((again.status.as_u16(), again.text(), again.is_replay()), (200, "run 1", true));
        let other = send_by(version, address, post("k2", "amount=1")).await;
        assert_eq!((other.text(), other.is_replay()), ("run 2", false));
        assert_eq!(stage.begun(), 2);
    }
}

#[tokio::test]
async fn a_key_with_and_without_quotes_is_the_same_key() {
    let (address, stage) = serve_counter(layer()).await;
    for key in ["8e03978e-40d5", "\"8e03978e-40d5\"", "  \"8e03978e-40d5\" ", "\"8e03978e-40d5\";v=1"] {
        assert_eq!(send(address, post(key, "")).await.text(), "run 1", "{key}");
    }
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn an_invalid_key_is_refused() {
    let (address, stage) = serve_counter(layer()).await;
    let without = request(Method::POST, "/pay").body("".into()).unwrap();
    assert_eq!(send(address, without).await.problem(), (400, "missing-key".to_owned()));
    let long = "x".repeat(256);
    for key in ["", "\"\"", "\" \"", "a b", "a, b", "\"a", "\"a\"b", &long] {
        assert_eq!(send(address, post(key, "")).await.problem(), (400, "invalid-key".to_owned()), "{key}");
    }
    let mut unprintable = post("k", "");
    unprintable.headers_mut().insert("idempotency-key", HeaderValue::from_bytes(b"caf\xe9").unwrap());
    assert_eq!(send(address, unprintable).await.problem(), (400, "invalid-key".to_owned()));
    let mut twice = post("k", "");
    twice.headers_mut().append("idempotency-key", HeaderValue::from_static("k"));
    assert_eq!(send(address, twice).await.problem(), (400, "invalid-key".to_owned()));
    assert_eq!(stage.begun(), 0);
    assert_eq!(send(address, post(&"x".repeat(255), "")).await.text(), "run 1");
}

#[tokio::test]
async fn policy_and_route_decide_whether_a_key_is_needed() {
    let without = |path: &str| request(Method::POST, path).body("".into()).unwrap();
    let optional = POLICY.missing_key(MissingKey::Run);
    let (address, _) = serve_counter(IdempotencyLayer::new(&MemoryStore::new(), optional, Caller::single())).await;
    assert_eq!(send(address, without("/pay")).await.text(), "run 1");
    assert_eq!(send(address, without("/pay")).await.text(), "run 2");
    assert_eq!(send(address, post("", "")).await.problem(), (400, "invalid-key".to_owned()));

    for key in ["\"\"", " "] {
        assert_eq!(send(address, post(key, "")).await.problem(), (400, "invalid-key".to_owned()), "{key:?}");
    }

    let by_route = layer().required(|head| head.uri.path() == "/pay").covers(|head| head.uri.path() != "/hook");
    let (address, _) = serve_counter(by_route).await;
    assert_eq!(send(address, without("/pay")).await.problem(), (400, "missing-key".to_owned()));
    assert_eq!(send(address, without("/look")).await.text(), "run 1");
    assert_eq!(send(address, post_to("/hook", "k", "")).await.text(), "run 2");
    assert_eq!(send(address, post_to("/hook", "k", "")).await.text(), "run 3");
}

#[tokio::test]
async fn requests_with_methods_outside_of_the_setting_pass_through() {
    let (address, _) = serve_counter(layer()).await;
    let with = |method| request(method, "/pay").header("idempotency-key", "k").body("".into()).unwrap();
    for (run, method) in [Method::GET, Method::PUT, Method::DELETE, Method::GET].into_iter().enumerate() {
        assert_eq!(send(address, with(method)).await.text(), format!("run {}", run + 1));
    }
    assert_eq!(send(address, with(Method::PATCH)).await.text(), "run 5");
    assert!(send(address, with(Method::PATCH)).await.is_replay());
    // The same key with another method is another operation.
    assert_eq!(send(address, with(Method::POST)).await.text(), "run 6");
    let (address, _) = serve_counter(layer().methods([Method::PUT])).await;
    assert_eq!(send(address, with(Method::PUT)).await.text(), "run 1");
    assert!(send(address, with(Method::PUT)).await.is_replay());
    assert_eq!(send(address, with(Method::POST)).await.text(), "run 2");
}

#[tokio::test]
async fn the_key_header_and_the_replay_header_can_have_other_names() {
    let layer = layer()
        .header(HeaderName::from_static("paypal-request-id"))
        .replay_marker(HeaderName::from_static("x-idempotent-replayed"));
    let (address, _) = serve_counter(layer).await;
    let with = || request(Method::POST, "/pay").header("paypal-request-id", "k").body("".into()).unwrap();
    assert!(send(address, with()).await.header("x-idempotent-replayed").is_none());
    assert_eq!(send(address, with()).await.header("x-idempotent-replayed"), Some("true"));
}

#[tokio::test]
async fn a_handler_reads_the_key_without_its_quotes() {
    let address = serve_handler(layer(), async |key: IdempotencyKey| key.0).await;
    assert_eq!(send(address, post("\"a \\\"b\\\"\"", "")).await.text(), "a \"b\"");
    // Without a layer the extractor reads the header field.
    let handler = async |key: Option<IdempotencyKey>| key.map_or("none".to_owned(), |key| key.0);
    let app = axum::Router::new().route("/pay", axum::routing::post(handler));
    let address = serve(app).await;
    assert_eq!(send(address, post("\"k\"", "")).await.text(), "k");
    assert_eq!(send(address, request(Method::POST, "/pay").body("".into()).unwrap()).await.text(), "none");
    assert_eq!(send(address, post("a b", "")).await.problem(), (400, "invalid-key".to_owned()));
}

/// Caller that a bearer token such as `alice.3` names: the name, without the number of the token.
fn by_token() -> Caller {
    Caller::by(|head| {
        let token = head.headers.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")?;
        let (name, _) = token.split_once('.')?;
        Some(name.to_owned())
    })
}

fn as_caller(token: &str, key: &str) -> Request<axum::body::Body> {
    let mut request = post(key, "amount=1");
    request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

#[tokio::test]
async fn two_callers_with_one_key_are_two_operations() {
    let (address, _) = serve_counter(IdempotencyLayer::new(&MemoryStore::new(), POLICY, by_token())).await;
    assert_eq!(send(address, as_caller("alice.1", "k")).await.text(), "run 1");
    assert_eq!(send(address, as_caller("bob.1", "k")).await.text(), "run 2");
    // A caller can't write a key that equals another caller's key in the store.
    assert_eq!(send(address, as_caller("alice.1", "bob:k")).await.text(), "run 3");
    assert_eq!(send(address, as_caller("alice:bob.1", "k")).await.text(), "run 4");
    let long = ["a", "b"].map(|end| format!("{}{end}.1", "x".repeat(100)));
    assert_eq!(send(address, as_caller(&long[0], "k")).await.text(), "run 5");
    assert_eq!(send(address, as_caller(&long[1], "k")).await.text(), "run 6");
    assert_eq!(send(address, as_caller(&long[0], "k")).await.text(), "run 5");
}

#[tokio::test]
async fn a_refreshed_token_is_the_same_caller() {
    let (address, stage) = serve_counter(IdempotencyLayer::new(&MemoryStore::new(), POLICY, by_token())).await;
    assert_eq!(send(address, as_caller("alice.1", "k")).await.text(), "run 1");
    assert_eq!(send(address, as_caller("alice.2", "k")).await.text(), "run 1");
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn a_request_without_credentials_is_neither_recorded_nor_replayed() {
    let store = FaultyStore::new(&MemoryStore::new());
    let caller = by_token().challenge("Bearer realm=\"till\"");
    let (address, stage) = serve_counter(IdempotencyLayer::new(&store, POLICY, caller)).await;
    for _ in 0..2 {
        let reply = send(address, post("k", "")).await;
        assert_eq!(reply.problem(), (401, "unauthenticated".to_owned()));
        assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"till\""));
    }
    for token in ["nobody", " .1", ".1"] {
        let reply = send(address, as_caller(token, "k")).await;
        assert_eq!(reply.problem(), (403, "forbidden".to_owned()));
        assert_eq!(reply.header("www-authenticate"), None);
    }
    assert_eq!((stage.begun(), store.count(StoreCall::Reserve)), (0, 0));
}

#[tokio::test]
async fn a_key_is_bound_to_its_path_query_headers_and_body() {
    let layer = layer().fingerprint_headers([HeaderName::from_static("x-account")]);
    let (address, stage) = serve_counter(layer).await;
    let of = |path: &str, accounts: &[&'static str], body: &'static str| {
        let mut request = post_to(path, "k", body);
        for account in accounts {
            request.headers_mut().append("x-account", HeaderValue::from_static(account));
        }
        request
    };
    assert_eq!(send(address, of("/pay/1?x=1", &["a", "b"], "amount=1")).await.text(), "run 1");
    for other in [
        of("/pay/2?x=1", &["a", "b"], "amount=1"),
        of("/pay/1?x=2", &["a", "b"], "amount=1"),
        of("/pay/1", &["a", "b"], "amount=1"),
        of("/pay/1?x=1", &["a, b"], "amount=1"),
        of("/pay/1?x=1", &["b", "a"], "amount=1"),
        of("/pay/1?x=1", &[], "amount=1"),
        of("/pay/1?x=1", &["a", "b"], "amount=2"),
        of("/pay/1?x=1", &["a", "b"], ""),
    ] {
        assert_eq!(send(address, other).await.problem(), (422, "fingerprint-mismatch".to_owned()));
    }
    let mut unchosen = of("/pay/1?x=1", &["a", "b"], "amount=1");
    unchosen.headers_mut().insert("user-agent", HeaderValue::from_static("another"));
    assert!(send(address, unchosen).await.is_replay());
    assert_eq!(stage.begun(), 1);
}

#[tokio::test]
async fn request_bodies_are_compared_byte_by_byte() {
    let (address, _) = serve_counter(layer()).await;
    for (number, [one, other]) in [
        [r#"{"amount":1}"#, r#"{ "amount":1}"#],
        [r#"{"amount":9007199254740993}"#, r#"{"amount":9007199254740992}"#],
        [r#"{"amount":1,"amount":2}"#, r#"{"amount":2}"#],
        ["[1]", "[1.0]"],
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("k{number}");
        assert_eq!(send(address, post(&key, one)).await.status, 200);
        assert_eq!(send(address, post(&key, other)).await.status, 422, "{one}, {other}");
    }
}

#[tokio::test]
async fn equal_payloads_under_two_keys_are_two_operations() {
    let (address, _) = serve_counter(layer()).await;
    assert_eq!(send(address, post("k1", "amount=1")).await.text(), "run 1");
    assert_eq!(send(address, post("k2", "amount=1")).await.text(), "run 2");
}

#[tokio::test]
async fn a_different_request_is_a_mismatch_while_the_first_runs() {
    let stage = Stage::closed();
    let address = serve_stage(layer(), &stage).await;
    let first = tokio::spawn(send(address, post("k", "amount=1")));
    stage.entered().await;
    let other = send(address, post("k", "amount=2")).await;
    assert_eq!(other.problem(), (422, "fingerprint-mismatch".to_owned()));
    assert_eq!(other.header("retry-after"), None);
    assert_eq!(send(address, post("k", "amount=1")).await.problem(), (409, "in-progress".to_owned()));
    stage.go();
    assert_eq!(first.await.unwrap().text(), "run 1");
    assert_eq!(send(address, post("k", "amount=2")).await.problem().0, 422);
}

fn digested(key: &str, digest_of: &str, body: &str) -> Request<axum::body::Body> {
    let mut request = post(key, body.to_owned());
    request.headers_mut().insert("content-digest", HeaderValue::from_static(content_digest(digest_of)));
    request
}

#[tokio::test]
async fn a_content_digest_is_checked_and_stands_for_the_request_body() {
    let (address, stage) = serve_counter(layer()).await;
    let lie = send(address, digested("k", "amount=2", "amount=1")).await;
    assert_eq!((lie.problem(), stage.begun()), ((400, "digest-mismatch".to_owned()), 0));
    let mut nonsense = post("k", "amount=1");
    nonsense.headers_mut().insert("content-digest", HeaderValue::from_static("sha-256=nonsense"));
    assert_eq!(send(address, nonsense).await.problem(), (400, "digest-mismatch".to_owned()));
    assert_eq!(send(address, digested("k", "amount=1", "amount=1")).await.text(), "run 1");
    // A request with the digest and a request without it have the same payload.
    assert!(send(address, post("k", "amount=1")).await.is_replay());
    assert_eq!(send(address, digested("k", "amount=2", "amount=2")).await.problem().0, 422);
}

/// SHA-512 of 3,000,000 times `x`.
const SHA_512_OF_LARGE: &str =
    "TL5K8krBXD7ykUEbw422kDcPTiYxnxnFkSercoWhH3F6hUAZSZtBzUW+QpRuxbPrLtcRN5ujSW4rbeuxSwBv3g==";

#[tokio::test]
async fn a_large_request_body_with_a_digest_streams_through() {
    use http_body_util::BodyExt;
    let large = "x".repeat(3_000_000);
    let (sizes, stage) = (Stage::open(), Stage::open());
    let read = {
        let (sizes, stage) = (sizes.clone(), stage.clone());
        async move |body: axum::body::Body| {
            stage.play().await;
            match body.collect().await {
                Ok(body) => {
                    sizes.play().await;
                    format!("{} bytes", body.to_bytes().len())
                }
                // The handler ignores the error, but the client still gets the mismatch.
                Err(error) => format!("an error, and a success nevertheless: {error}"),
            }
        }
    };
    let address = serve_handler(layer().stream_digested(true), read).await;
    assert_eq!(send(address, post("k", large.clone())).await.problem(), (413, "body-too-large".to_owned()));
    let lie = send(address, digested("k", "large", &large.replacen('x', "y", 1))).await;
    assert_eq!((lie.problem(), stage.begun(), sizes.begun()), ((400, "digest-mismatch".to_owned()), 1, 0));
    let truth = send(address, digested("k", "large", &large)).await;
    assert_eq!((truth.text(), truth.is_replay()), ("3000000 bytes", false));
    let again = send(address, digested("k", "large", &large)).await;
    assert_eq!((again.text(), again.is_replay()), ("3000000 bytes", true));
    assert_eq!(send(address, digested("k", "amount=1", &large)).await.problem().0, 422);
    // The request is repeated without `Content-Length`.
    let mut chunked = digested("k2", "large", "");
    *chunked.body_mut() = frames((0..3000).map(|_| Ok("x".repeat(1000).leak() as &str)).collect::<Vec<_>>());
    assert_eq!(send(address, chunked).await.text(), "3000000 bytes");
    assert_eq!(stage.begun(), 3);
    let (address, _) = serve_counter(layer()).await;
    assert_eq!(send(address, digested("k", "large", &large)).await.problem(), (413, "body-too-large".to_owned()));
}

#[tokio::test]
async fn a_content_digest_is_read_as_a_structured_field() {
    let (address, stage) = serve_counter(layer()).await;
    let with = |key: &str, digests: &str| {
        let mut request = post(key, "amount=1");
        request.headers_mut().insert("content-digest", HeaderValue::from_str(digests).unwrap());
        request
    };
    let digest = content_digest("amount=1");
    for (number, wrong) in [
        format!("{digest}garbage"),
        format!("{digest} garbage"),
        format!("{digest},"),
        "sha-256=?1".to_owned(),
        // The first digest is right, and the second digest is wrong.
        format!("{digest}, sha-512=:{}:", "A".repeat(86)),
    ]
    .iter()
    .enumerate()
    {
        let reply = send(address, with(&format!("wrong-{number}"), wrong)).await;
        assert_eq!(reply.problem(), (400, "digest-mismatch".to_owned()), "{wrong}");
    }
    assert_eq!(stage.begun(), 0);
    // Unknown algorithms may have any value, parameters of a digest are ignored, and an empty field holds no digest.
    for (number, right) in [format!("md5=1, {digest}"), format!("{digest};v=1"), String::new()].iter().enumerate() {
        assert_eq!(send(address, with(&format!("right-{number}"), right)).await.status, 200, "{right}");
    }
}

#[tokio::test]
async fn all_digests_of_a_streamed_request_body_are_checked() {
    let large = "x".repeat(3_000_000);
    let read = async |body: axum::body::Body| {
        use http_body_util::BodyExt;
        match body.collect().await {
            Ok(_) => "read",
            Err(_) => "an error",
        }
    };
    let address = serve_handler(layer().stream_digested(true), read).await;
    let with = |key: &str, sha512: String| {
        let mut request = digested(key, "large", &large);
        let sha512 = HeaderValue::from_str(&format!("sha-512=:{sha512}:")).unwrap();
        request.headers_mut().append("content-digest", sha512);
        request
    };
    let lie = send(address, with("k", "A".repeat(86))).await;
    assert_eq!(lie.problem(), (400, "digest-mismatch".to_owned()));
    let truth = send(address, with("k", SHA_512_OF_LARGE.to_owned())).await;
    assert_eq!((truth.text(), truth.is_replay()), ("read", false));
}

#[tokio::test]
async fn a_streamed_request_body_has_a_deadline() {
    use http_body_util::BodyExt;
    let read = async |body: axum::body::Body| match body.collect().await {
        Ok(_) => "read",
        // The handler ignores the error.
        Err(_) => "a success nevertheless",
    };
    let layer = layer().stream_digested(true).body_deadline(std::time::Duration::from_millis(1)).max_in_flight(1);
    let address = serve_handler(layer, read).await;
    for body in ["content-length: 3000000\r\n\r\nxxx", "transfer-encoding: chunked\r\n\r\n3\r\nxxx\r\n"] {
        let digest = content_digest("large");
        let head = format!("POST /pay HTTP/1.1\r\nhost: till\r\nidempotency-key: k\r\ncontent-digest: {digest}\r\n");
        let said = send_raw(address, &format!("{head}{body}")).await;
        assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
        assert!(said.contains("body-timeout"), "{said}");
    }
    // The slot of the streamed request is free.
    assert_eq!(send(address, post("k2", "short")).await.text(), "read");
}

/// POST with the key `k` to a host.
fn to_host(host: &str) -> Request<axum::body::Body> {
    let mut request = post("k", "");
    *request.uri_mut() = format!("http://{host}/pay").parse().unwrap();
    request.headers_mut().insert("host", host.parse().unwrap());
    request
}

#[tokio::test]
async fn each_host_can_have_its_own_keys() {
    let (address, stage) = serve_counter(layer().separate_hosts(true)).await;
    assert_eq!(send_by(Version::One, address, to_host("a.example")).await.text(), "run 1");
    assert_eq!(send_by(Version::Two, address, to_host("b.example")).await.text(), "run 2");
    // All spellings name the same host, in both versions of HTTP.
    for version in BOTH {
        for (host, run) in [("a.example", "run 1"), ("A.Example:80", "run 1"), ("b.example", "run 2")] {
            let again = send_by(version, address, to_host(host)).await;
            assert_eq!((again.text(), again.is_replay()), (run, true), "{version:?} {host}");
        }
    }
    assert_eq!(send(address, to_host("a.example:8080")).await.text(), "run 3");
    let head = "POST /pay HTTP/1.1\r\nidempotency-key: k\r\nconnection: close\r\n";
    for hosts in ["", "host: a.example\r\nhost: b.example\r\n", "host: a/b\r\n"] {
        let said = send_raw(address, &format!("{head}{hosts}\r\n")).await;
        assert!(said.starts_with("HTTP/1.1 400 "), "{said}");
        assert!(said.contains("invalid-host"), "{said}");
    }
    assert_eq!(stage.begun(), 3);
    // Without the setting, hosts share their keys.
    let (address, _) = serve_counter(layer()).await;
    for host in ["a.example", "b.example"] {
        assert_eq!(send(address, to_host(host)).await.text(), "run 1");
    }
}

#[tokio::test]
async fn the_keys_of_hosts_are_separate_under_each_scope_and_profile() {
    let acp = layer().profile(idem_runtime::http::Profile::acp()).separate_hosts(true);
    for layer in [layer().scope("payments").separate_hosts(true), acp] {
        let (address, _) = serve_counter(layer).await;
        for (host, run) in [("a.example", "run 1"), ("b.example", "run 2"), ("a.example", "run 1")] {
            assert_eq!(send(address, to_host(host)).await.text(), run);
        }
    }
}

#[tokio::test]
async fn a_host_in_the_payload_is_the_same_in_http_1_and_http_2() {
    let (address, _) = serve_counter(layer().fingerprint_headers([http::header::HOST])).await;
    for (version, host) in [(Version::One, "a.example"), (Version::Two, "a.example"), (Version::Two, "A.example:443")] {
        assert_eq!(send_by(version, address, to_host(host)).await.text(), "run 1");
    }
    for version in BOTH {
        let other = send_by(version, address, to_host("b.example")).await;
        assert_eq!(other.problem(), (422, "fingerprint-mismatch".to_owned()), "{version:?}");
    }
}

#[test]
#[should_panic(expected = "`ttl` is 0ns")]
fn an_invalid_policy_is_refused_when_the_layer_is_built() {
    let policy = Policy::new(std::time::Duration::ZERO);
    drop(IdempotencyLayer::new(&MemoryStore::new(), policy, Caller::single()));
}

#[tokio::test]
async fn only_chosen_members_of_a_json_request_body_are_compared() {
    let digest = "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:";
    let layer = layer().fingerprint_members(JsonMembers::without(["sent_at"])).stream_digested(true);
    let (address, _) = serve_counter(layer).await;
    let ask = async |body: &'static str| send(address, post("k", body)).await;
    assert_eq!(ask(r#"{"amount":5,"sent_at":1}"#).await.text(), "run 1");
    for same in [r#"{"amount":5,"sent_at":2}"#, r#"{ "amount": 5.0 }"#] {
        assert!(ask(same).await.is_replay(), "{same}");
    }
    assert_eq!(ask(r#"{"amount":6,"sent_at":1}"#).await.problem(), (422, "fingerprint-mismatch".to_owned()));
    assert_eq!(ask(r#"{"amount":5,"amount":6}"#).await.problem(), (400, "invalid-body".to_owned()));
    // Path, query and the body's digest are checked as before.
    let reply = send(address, post_to("/pay?x=1", "k", r#"{"amount":5}"#)).await;
    assert_eq!(reply.problem(), (422, "fingerprint-mismatch".to_owned()));
    let mut lie = post("k", r#"{"amount":5}"#);
    lie.headers_mut().insert("content-digest", digest.parse().unwrap());
    assert_eq!(send(address, lie).await.problem(), (400, "digest-mismatch".to_owned()));
    // Bytes that are not JSON are compared as bytes.
    assert_eq!(send(address, post("k2", "amount=5")).await.text(), "run 2");
    assert!(send(address, post("k2", "amount=5")).await.is_replay());
    assert_eq!(send(address, post("k2", "amount=6")).await.status, 422);
}

#[tokio::test]
async fn a_key_that_fails_the_format_check_of_the_service_is_refused() {
    let (address, stage) = serve_counter(layer().key_format(|key| key.starts_with("order-"))).await;
    assert_eq!(send(address, post("order-1", "")).await.text(), "run 1");
    // Quotes are not part of a key.
    assert!(send(address, post("\"order-1\"", "")).await.is_replay());
    for refused in ["1", "\"1\"", "Order-1"] {
        assert_eq!(send(address, post(refused, "")).await.problem(), (400, "invalid-key".to_owned()));
    }
    assert_eq!(stage.begun(), 1);
    // The limits of the library and of the profile apply as well.
    let long = format!("order-{}", "x".repeat(250));
    assert_eq!(send(address, post(&long, "")).await.problem(), (400, "invalid-key".to_owned()));
    let ucp = layer().profile(Profile::ucp()).key_format(|_| true);
    let (address, _) = serve_counter(ucp).await;
    assert_eq!(send(address, post("short", "")).await.status, 400);
}
