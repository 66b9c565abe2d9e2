//! `NatsStore` on real servers: its stream, its errors, its costs, and faults.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

#[path = "nats/outbox.rs"]
mod outbox;

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_nats::{Client, StatusCode};
use futures::StreamExt as _;
use idem_runtime::nats::NatsOptions;
use idem_runtime::operator::OperatorError;
use idem_runtime::record::{Record, State, StoredResult, format};
use idem_runtime::step::StepProblem;
use idem_runtime::store::{
    Cursor, Decision, DecisionAnswer, Filter, Finish, Release, Reservation, ReserveRequest, Standing, Verdict,
    renew_all,
};
use idem_runtime::{
    Error, Key, NatsStore, OnCrash, Operation, Store, StoreError, StoreErrorKind, StoreExt, current, observe,
};
use idem_tests::calls::{
    LEASE, POLICY, call, done, is_of_a_later_format, key, one_step, request, reserved, stored,
    takes_its_largest_journal, wins, with_journal,
};
use idem_tests::nats::{Kind, NatsServer, put, subject_of};
use idem_tests::proxy::{Line, Proxy};
use idem_tests::race::Race;
use idem_tests::server::until;
use idem_tests::tls::Certificate;
use serde_json::{Value, json};

async fn connect(server: &NatsServer) -> NatsStore {
    NatsStore::connect(&server.url()).await.expect("connects")
}

async fn raw(server: &NatsServer) -> Client {
    async_nats::connect(server.url()).await.expect("connects")
}

/// Sends a request to the interface of JetStream.
async fn api(raw: &Client, verb: &str, question: Value) -> Value {
    let answer = raw.request(format!("$JS.API.{verb}"), question.to_string().into()).await.expect("an answer");
    serde_json::from_slice(&answer.payload).expect("JSON")
}

/// Number of messages in the stream of the bucket.
async fn messages(raw: &Client, bucket: &str) -> u64 {
    api(raw, &format!("STREAM.INFO.KV_{bucket}"), json!({})).await["state"]["messages"].as_u64().expect("a number")
}

/// Settings of a stream that can hold records, for the bucket.
fn settings(bucket: &str) -> Value {
    json!({
        "name": format!("KV_{bucket}"), "subjects": [format!("$KV.{bucket}.>")], "retention": "limits",
        "storage": "file", "num_replicas": 1, "discard": "new", "max_msgs_per_subject": 1, "allow_msg_ttl": true,
    })
}

async fn refusal(options: NatsOptions, url: &str) -> StoreError {
    options.connect(url).await.map(drop).expect_err("refused")
}

// Servers and streams.

#[tokio::test]
async fn a_server_that_ignores_retentions_is_refused_and_left_unchanged() {
    let server = NatsServer::start_with(Kind::OldNats, "");
    let error = refusal(NatsStore::options(), &server.url()).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("2.11 or newer"), "{error}");
    let info = api(&raw(&server).await, "STREAM.NAMES", json!({})).await;
    assert_eq!(info["total"], 0, "{info}");
}

#[tokio::test]
async fn connect_creates_the_stream_and_uses_it_again() {
    let server = NatsServer::start();
    let runs = AtomicU32::new(0);
    for _ in 0..2 {
        let store = connect(&server).await;
        assert_eq!(call(&store, "k", &runs).await.0.unwrap(), 1);
        store.ping().await.unwrap();
    }
    let error = refusal(NatsStore::options().bucket("missing").create_bucket(false), &server.url()).await;
    assert!(error.to_string().contains("there is no bucket `missing`"), "{error}");
    // The settings that an administrator gets are those that the store creates.
    let settings: Value = serde_json::from_str(&NatsStore::options().bucket("by-hand").stream_settings()).unwrap();
    let created = api(&raw(&server).await, "STREAM.CREATE.KV_by-hand", settings).await;
    assert_eq!(created["did_create"], true, "{created}");
    NatsStore::options().bucket("by-hand").create_bucket(false).connect(&server.url()).await.expect("created");
    let info = api(&raw(&server).await, "STREAM.INFO.KV_idem", json!({})).await;
    let config = &info["config"];
    for (name, value) in [
        ("allow_msg_ttl", json!(true)),
        ("deny_delete", json!(true)),
        ("allow_rollup_hdrs", json!(false)),
        ("discard", json!("new")),
        ("max_msgs_per_subject", json!(1)),
        ("storage", json!("file")),
    ] {
        assert_eq!(config[name], value, "{name}");
    }
    // A single server has no replicas, so it refuses a stream with three of them.
    let error = refusal(NatsStore::options().bucket("three").num_replicas(3), &server.url()).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    let error = refusal(NatsStore::options().num_replicas(3), &server.url()).await;
    assert!(error.to_string().contains("num_replicas"), "{error}");
    for bucket in ["", "a.b", "a b", "a>", &"x".repeat(65)] {
        let error = refusal(NatsStore::options().bucket(bucket), &server.url()).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{bucket}");
    }
}

#[tokio::test]
async fn streams_that_could_lose_or_change_a_record_are_refused() {
    let server = NatsServer::start();
    let raw = raw(&server).await;
    let bad: &[&[(&str, Value)]] = &[
        &[("subjects", json!(["$KV.other.>"]))],
        &[("allow_msg_ttl", json!(false))],
        &[("max_age", json!(3_600_000_000_000_u64))],
        &[("max_msgs_per_subject", json!(5))],
        &[("max_bytes", json!(1_000_000)), ("discard", json!("old"))],
        &[("max_msgs", json!(1000)), ("discard", json!("old"))],
        &[("storage", json!("memory"))],
        &[("no_ack", json!(true))],
        &[("persist_mode", json!("async"))],
        &[("sources", json!([{ "name": "KV_sound" }]))],
        &[("subject_transform", json!({ "src": "$KV.x.>", "dest": "$KV.y.>" }))],
        &[("subject_delete_marker_ttl", json!(1_000_000_000_u64)), ("allow_rollup_hdrs", json!(true))],
    ];
    let created = api(&raw, "STREAM.CREATE.KV_sound", settings("sound")).await;
    assert_eq!(created["did_create"], true, "{created}");
    NatsStore::options().bucket("sound").connect(&server.url()).await.expect("a stream of another program");
    for (n, changes) in bad.iter().enumerate() {
        let bucket = format!("bad{n}");
        let mut settings = settings(&bucket);
        for (name, value) in *changes {
            settings[*name] = value.clone();
        }
        let created = raw.request(format!("$JS.API.STREAM.CREATE.KV_{bucket}"), settings.to_string().into()).await;
        let created = String::from_utf8_lossy(&created.expect("an answer").payload).into_owned();
        assert!(created.contains("did_create"), "{changes:?}: {created}");
        let error = refusal(NatsStore::options().bucket(&bucket), &server.url()).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{changes:?}: {error}");
    }
    let in_memory =
        NatsStore::options().bucket("bad6").in_memory(true).connect(&server.url()).await.expect("asked for");
    assert_eq!(call(&in_memory, "k", &AtomicU32::new(0)).await.0.unwrap(), 1);
}

#[tokio::test]
async fn a_stream_that_has_changed_fails_a_ping() {
    let server = NatsServer::start();
    let (store, raw) = (connect(&server).await, raw(&server).await);
    let mut changed = settings("idem");
    changed["max_age"] = json!(3_600_000_000_000_u64);
    changed["deny_delete"] = json!(true);
    let updated = api(&raw, "STREAM.UPDATE.KV_idem", changed).await;
    assert!(updated["error"].is_null(), "{updated}");
    let error = store.ping().await.unwrap_err();
    assert!(error.to_string().contains("max_age"), "{error}");
    api(&raw, "STREAM.DELETE.KV_idem", json!({})).await;
    let error = store.ping().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    // Without the stream, no call reads "no record".
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
}

#[tokio::test]
async fn a_wrong_login_is_refused_without_showing_the_password() {
    let server = NatsServer::start_with(Kind::Nats, r#"authorization { user: shop, password: "r@ght" }"#);
    let port = server.port();
    for url in ["nats://shop:secret@", "nats://secret@", "nats://"] {
        let error = refusal(NatsStore::options(), &format!("{url}127.0.0.1:{port}")).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}: {error}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    }
    let error = refusal(NatsStore::options(), "nats://shop:secret@:x:y").await;
    assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    let store = NatsStore::connect(&format!("nats://shop:r%40ght@127.0.0.1:{port}")).await.expect("connects");
    assert!(!format!("{store:?}").contains("ght"));
}

#[tokio::test]
async fn a_store_logs_in_with_an_nkey_or_credentials() {
    // A pair of the documentation of NATS.
    let (public, seed) = (
        "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4",
        "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY",
    );
    let server = NatsServer::start_with(Kind::Nats, &format!("authorization {{ users: [ {{ nkey: {public} }} ] }}"));
    let store = NatsStore::options().nkey(seed).connect(&server.url()).await.expect("the key is known");
    assert_eq!(call(&store, "k", &AtomicU32::new(0)).await.0.unwrap(), 1);
    let file = server.folder().join("login.creds");
    for content in [None, Some("no credentials")] {
        if let Some(content) = content {
            std::fs::write(&file, content).unwrap();
        }
        let error = refusal(NatsStore::options().credentials_file(&file), &server.url()).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("login.creds"), "{error}");
    }
    let error = refusal(NatsStore::options().nkey("SUNONSENSE"), &server.url()).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
}

/// The leader of the stream answers reads where direct reads are not possible.
#[tokio::test]
async fn a_store_without_direct_reads_asks_the_leader() {
    let rights = r#"
        accounts { A { jetstream: enabled, users: [
            { user: all, password: all }
            { user: few, password: few, permissions: { publish: { deny: "$JS.API.DIRECT.>" }, subscribe: ">" } }
        ] } }
        no_auth_user: all"#;
    let server = NatsServer::start_with(Kind::Nats, rights);
    let mut settings = settings("indirect");
    settings["allow_direct"] = json!(false);
    api(&raw(&server).await, "STREAM.CREATE.KV_indirect", settings).await;
    for (user, bucket) in [("few", "idem"), ("all", "indirect")] {
        let url = format!("nats://{user}:{user}@127.0.0.1:{}", server.port());
        let store = NatsStore::options().bucket(bucket).connect(&url).await.expect("connects");
        let mut counted = Counted::on(&server).await;
        let runs = AtomicU32::new(0);
        for _ in 0..3 {
            assert_eq!(call(&store, "k", &runs).await.0.unwrap(), 1);
        }
        assert_eq!(counted.since_all_of(&store).await, [4, 2, 0], "{bucket}");
        assert_eq!(counted.directly, 0, "{bucket}");
    }
}

#[tokio::test]
async fn a_login_without_the_right_to_publish_is_told_at_once() {
    let rights_of = |publish: &str| {
        format!(
            r#"accounts {{ A {{ jetstream: enabled, users: [
                {{ user: all, password: all }}
                {{ user: reader, password: reader, permissions: {{ publish: ["{publish}"], subscribe: ">" }} }}
            ] }} }}"#
        )
    };
    let server = NatsServer::start_with(Kind::Nats, &rights_of("$JS.API.STREAM.>"));
    let url = |user: &str| format!("nats://{user}:{user}@127.0.0.1:{}", server.port());
    let all = NatsStore::connect(&url("all")).await.expect("connects");
    let lease = reserved(&all, "k").await;
    let options = NatsStore::options().response_timeout(Duration::from_secs(600));
    let reader = options.clone().connect(&url("reader")).await.expect("may ask for the stream");
    // The time limit is long, so these answers come from the refusal.
    for error in [
        reader.reserve(&request(&reader, "other")).await.map(drop).unwrap_err(),
        reader.finish(&lease, &done()).await.map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("Permissions Violation"), "{error}");
    }
    assert!(reader.inspect(&lease.key).await.unwrap().is_some(), "the login may read");
    // The login may not make a consumer, or may make one and not ask it for messages.
    for rights in ["$JS.API.STREAM.>", r#"$JS.API.STREAM.>", "$JS.API.CONSUMER.*.KV_idem.>"#] {
        server.configure(&rights_of(rights));
        let reader = options.clone().connect(&url("reader")).await.expect("may ask for the stream");
        let error = reader.operator().list(&Filter::new().scan()).await.unwrap_err();
        assert!(error.to_string().contains("Permissions Violation"), "{rights}: {error}");
    }
    assert_eq!(all.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
}

/// The server speaks TLS, with a certificate of its own.
#[tokio::test]
async fn a_store_refuses_a_server_with_an_untrusted_certificate() {
    let certificate = Certificate::new();
    let lines = format!("tls {{ cert_file: {:?}, key_file: {:?} }}", certificate.file(), certificate.key());
    let server = NatsServer::start_with(Kind::Nats, &lines);
    let url = format!("tls://localhost:{}", server.port());
    let error = refusal(NatsStore::options(), &url).await;
    assert_ne!(error.kind(), StoreErrorKind::Unconfirmed, "{error}");
    let trusting = NatsStore::options().root_certificates(certificate.file());
    let store = trusting.connect(&url).await.expect("a trusted certificate");
    assert_eq!(call(&store, "k", &AtomicU32::new(0)).await.0.unwrap(), 1);
}

// Messages.

#[tokio::test]
async fn a_record_is_the_message_on_the_subject_of_its_key() {
    let server = NatsServer::start();
    let (store, raw) = (connect(&server).await, raw(&server).await);
    let key = Key::new("shop::pay", "order:42/a.b *").unwrap();
    let name = ReserveRequest::new(key.clone(), store.context().new_owner(), LEASE, Duration::from_millis(1500));
    let lease = wins(&store, &name).await;
    let subject = subject_of("idem", &key);
    assert_eq!(subject, "$KV.idem.1.shop=3A=3Apay.order=3A42/a=2Eb=20=2A");
    let message = async || {
        let found = api(&raw, "STREAM.MSG.GET.KV_idem", json!({ "last_by_subj": subject })).await;
        let part = |name: &str| base64(found["message"][name].as_str().expect("a text"));
        (String::from_utf8(part("hdrs")).unwrap(), part("data"))
    };
    let (headers, body) = message().await;
    // The retention of a pending record is its lease and its retention, in whole seconds, rounded up.
    assert!(headers.contains("Nats-TTL: 62\r\n") && headers.contains("Idem-Retention: 61500\r\n"), "{headers}");
    assert!(headers.contains("Nats-Expected-Last-Subject-Sequence: 0\r\n"), "{headers}");
    let record = format::decode(&body.into()).unwrap();
    assert_eq!((record.owner, record.attempt), (lease.owner, 1));
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    let (headers, body) = message().await;
    assert!(headers.contains("Nats-TTL: 2\r\n") && headers.contains("Idem-Retention: 1500\r\n"), "{headers}");
    assert_eq!(format::decode(&body.into()).unwrap().state, done().state());
    assert_eq!(messages(&raw, "idem").await, 1, "a write replaces the message before it");
    // The server removes the record, and the key is free.
    until("the server has removed the record", async || messages(&raw, "idem").await == 0).await;
    assert_eq!(wins(&store, &request(&store, "k")).await.attempt, 1);
}

fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for digit in text.bytes().filter(|byte| *byte != b'=') {
        bits = bits << 6 | u32::try_from(DIGITS.iter().position(|it| *it == digit).expect("a digit")).unwrap();
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 255).unwrap());
        }
    }
    bytes
}

#[tokio::test]
async fn namespaces_keep_applications_apart() {
    let server = NatsServer::start();
    let runs = AtomicU32::new(0);
    for (namespace, run) in [("", 1), ("shop:", 2), ("shop", 3), ("1", 4), ("", 1), ("shop:", 2)] {
        let store = NatsStore::options().namespace(namespace).connect(&server.url()).await.unwrap();
        assert_eq!(call(&store, "k", &runs).await.0.unwrap(), run, "{namespace}");
        assert_eq!(store.namespace(), namespace);
        let page = store.operator().list(&Filter::new().scan().scope("test")).await.unwrap();
        assert_eq!(page.records.len(), 1, "{namespace}");
    }
    // The records of the namespace `1` are no records of a store without a namespace.
    let page = connect(&server).await.operator().list(&Filter::new().scan()).await.unwrap();
    let keys: Vec<_> = page.records.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, [key("k").as_str()]);
    let other = NatsStore::options().bucket("other").connect(&server.url()).await.unwrap();
    assert_eq!(call(&other, "k", &runs).await.0.unwrap(), 5);
}

#[tokio::test]
async fn a_value_that_a_tool_or_the_server_has_deleted_is_an_absent_record() {
    let server = NatsServer::start();
    let (store, raw) = (connect(&server).await, raw(&server).await);
    let lease = reserved(&store, "k").await;
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    publish(&raw, &lease.key, b"KV-Operation: DEL", b"").await;
    assert_eq!(store.inspect(&lease.key).await.unwrap(), None);
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Refused);
    let expiring = request(&store, "k").ttl(Duration::from_secs(1));
    let lease = wins(&store, &expiring).await;
    assert_eq!(lease.attempt, 1);
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    until("the retention has ended", async || store.inspect(&lease.key).await.unwrap().is_none()).await;
    until("the server has removed the message", async || messages(&raw, "idem").await == 0).await;
    assert_eq!(reserved(&store, "k").await.attempt, 1);
}

/// Publishes a message with this header on the subject of a record, byte by byte as given.
async fn publish(raw: &Client, key: &Key, header: &[u8], body: &[u8]) {
    let port = raw.server_info().port;
    let head = [b"NATS/1.0\r\n", header, b"\r\n\r\n"].concat();
    let subject = subject_of("idem", key);
    let line = format!("HPUB {subject} {} {}\r\n", head.len(), head.len() + body.len());
    let hello = br#"CONNECT {"verbose":false,"headers":true}"#;
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).expect("connects");
    let all = [hello, &b"\r\n"[..], line.as_bytes(), &head, body, b"\r\nPING\r\n"].concat();
    std::io::Write::write_all(&mut stream, &all).expect("can be sent");
    // The server answers the question after it has handled the message.
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(stream));
    while !lines.next().expect("an answer").expect("an answer").starts_with("PONG") {}
    // The stream has stored the message before it answers a later question.
    messages(raw, "idem").await;
}

/// Another program's message with any headers is a value of its key, and an operator can remove the value.
#[tokio::test]
async fn a_message_with_foreign_headers_is_damaged_and_does_not_block_its_key() {
    let server = NatsServer::start();
    let (store, raw) = (connect(&server).await, raw(&server).await);
    for (name, header) in [("operation", &b"KV-Operation: PUT"[..]), ("bytes", b"X: \xff\xfe")] {
        publish(&raw, &key(name), header, b"hello").await;
        let error = store.reserve(&request(&store, name)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{name}: {error}");
        let found = store.inspect(&key(name)).await.unwrap().expect("there is a value");
        assert_eq!(found.standing(), Standing::Damaged, "{name}");
        let forget = Decision::forget(&key(name), &found);
        assert_eq!(store.decide(&forget).await.unwrap(), DecisionAnswer::Applied, "{name}");
        assert_eq!(reserved(&store, name).await.attempt, 1, "{name}");
    }
}

/// The driver gives up its connection at a message whose headers are no text.
#[tokio::test]
async fn a_message_that_the_driver_can_not_read_is_listed_with_all_others() {
    let server = NatsServer::start();
    let (store, raw) = (connect(&server).await, raw(&server).await);
    reserved(&store, "first").await;
    publish(&raw, &key("second"), b"X: \xff\xfe", b"hello").await;
    reserved(&store, "third").await;
    let (mut filter, mut listed) = (Filter::new().scan(), Vec::new());
    loop {
        let page = store.list(&filter).await.unwrap();
        listed.extend(page.records.into_iter().map(|(key, found)| (key, found.standing())));
        match page.next {
            Some(next) => filter = filter.after(next),
            None => break,
        }
    }
    let expected = [("first", Standing::Running), ("second", Standing::Damaged), ("third", Standing::Running)];
    assert_eq!(listed, expected.map(|(name, standing)| (key(name), standing)));
}

/// A mirror with `mirror_direct` answers direct reads of the origin, maybe with an earlier state.
#[tokio::test]
async fn a_store_whose_bucket_has_a_mirror_reads_from_the_leader() {
    let server = NatsServer::start();
    let (store, raw) = (connect(&server).await, raw(&server).await);
    let mirror = json!({
        "name": "KV_copy", "storage": "file", "num_replicas": 1, "max_msgs_per_subject": 1, "allow_direct": true,
        "mirror_direct": true, "allow_msg_ttl": true, "mirror": { "name": "KV_idem" },
    });
    let created = api(&raw, "STREAM.CREATE.KV_copy", mirror).await;
    assert_eq!(created["did_create"], true, "{created}");
    let runs = AtomicU32::new(0);
    call(&store, "k", &runs).await.0.unwrap();
    until("the mirror has the record", async || messages(&raw, "copy").await == 1).await;
    let mut counted = Counted::on(&server).await;
    for _ in 0..100 {
        let (result, outcome) = call(&store, "k", &runs).await;
        assert_eq!(result.unwrap(), 1);
        assert!(outcome.replayed());
    }
    counted.since_all_of(&store).await;
    let before = counted.directly;
    assert!(before < 100, "the mirror has answered none of {before} reads");
    call(&store, "k", &runs).await.0.unwrap();
    counted.since_all_of(&store).await;
    assert_eq!(counted.directly, before, "no further read is direct");
}

/// A mirror that has no record of a key answers direct reads, too: a replay then takes two further requests, not more.
#[tokio::test]
async fn a_mirror_without_the_record_costs_a_replay_two_requests() {
    let server = NatsServer::start();
    let (store, raw) = (connect(&server).await, raw(&server).await);
    let mirror = json!({
        "name": "KV_copy", "storage": "file", "num_replicas": 1, "max_msgs_per_subject": 1, "allow_direct": true,
        "mirror_direct": true, "allow_msg_ttl": true,
        "mirror": { "name": "KV_idem", "filter_subject": "$KV.idem.1.other.>" },
    });
    let created = api(&raw, "STREAM.CREATE.KV_copy", mirror).await;
    assert_eq!(created["did_create"], true, "{created}");
    let runs = AtomicU32::new(0);
    call(&store, "k", &runs).await.0.unwrap();
    // A mirror answers once it has a message.
    put(&server.url(), "$KV.idem.1.other.x", b"x").await;
    let question = format!("$JS.API.DIRECT.GET.KV_idem.{}", subject_of("idem", &key("k")));
    until("the mirror answers", async || {
        raw.request(question.clone(), "".into()).await.unwrap().status == Some(StatusCode::NOT_FOUND)
    })
    .await;
    let mut counted = Counted::on(&server).await;
    let mut most = 0;
    for n in 0..100 {
        assert!(call(&store, "k", &runs).await.1.replayed());
        // The mirror has requests of its own.
        let [writes, reads, _] = counted.since_all_of(&store).await;
        // The first replays are not expected, and begin with a write.
        most = if n < 20 { 0 } else { most.max(writes + reads) };
    }
    assert_eq!(most, 3, "the mirror has answered a read that no record exists");
}

#[tokio::test]
async fn values_that_are_not_records_are_left_unchanged() {
    let server = NatsServer::start();
    let (store, runs) = (connect(&server).await, AtomicU32::new(0));
    put(&server.url(), &subject_of("idem", &key("text")), b"hello").await;
    put(&server.url(), &subject_of("idem", &key("later")), &[b"idem\x02".as_slice(), &[0; 60]].concat()).await;
    for (name, words) in [("text", "not a record"), ("later", "format 2")] {
        let (result, _) = call(&store, name, &runs).await;
        let Err(Error::Store { source, .. }) = result else { panic!("{name}: {result:?}") };
        assert_eq!(source.kind(), StoreErrorKind::Corrupt, "{name}");
        assert!(source.to_string().contains(words), "{name}: {source}");
        let found = store.inspect(&key(name)).await.unwrap().expect("there is a value");
        assert_eq!(found.standing(), Standing::Damaged, "{name}");
        let forget = Decision::forget(&key(name), &found);
        assert_eq!(store.decide(&forget).await.unwrap(), DecisionAnswer::Applied, "{name}");
        assert_eq!(store.inspect(&key(name)).await.unwrap(), None, "{name}");
    }
    assert_eq!(runs.into_inner(), 0);
}

#[tokio::test]
async fn nats_lists_records_only_if_the_filter_asks_for_a_scan() {
    let server = NatsServer::start();
    let store = NatsStore::options().holder("worker-7").connect(&server.url()).await.unwrap();
    for n in 0..600 {
        reserved(&store, &format!("k{n}")).await;
    }
    call(&store, "done", &AtomicU32::new(0)).await.0.unwrap();
    put(&server.url(), "$KV.idem.of.another.program", b"x").await;
    let operator = store.operator();
    let refused = operator.list(&Filter::new()).await.unwrap_err();
    assert!(matches!(refused, OperatorError::Unsupported { .. }), "{refused:?}");
    let stats = operator.stats(&Filter::new().scan(), u64::MAX).await.unwrap();
    let total = stats.total();
    assert_eq!((total.of(Standing::Running), total.of(Standing::Completed), stats.unreadable), (600, 1, 0));
    let mut filter = Filter::new().scan().standing(Standing::Completed);
    let (mut holders, mut pages) = (Vec::new(), 0);
    loop {
        let page = operator.list(&filter).await.unwrap();
        holders.extend(page.records.iter().filter_map(|(_, found)| found.holder()?.name().map(str::to_owned)));
        pages += 1;
        let Some(next) = page.next else { break };
        filter = filter.after(next);
    }
    assert!(pages > 2, "{pages}");
    assert_eq!(holders, ["worker-7"]);
    for cursor in ["1/test/k", "", "-1"] {
        let wrong = operator.list(&Filter::new().scan().after(Cursor::new(cursor))).await.unwrap_err();
        assert!(matches!(wrong, OperatorError::Unsupported { .. }), "{cursor}: {wrong:?}");
    }
}

#[tokio::test]
async fn a_record_with_a_journal_of_a_later_format_is_left_unchanged() {
    let server = NatsServer::start();
    let store = connect(&server).await;
    let lease = reserved(&store, "k").await;
    let record = with_journal(Record::after(&lease, State::Released), one_step());
    let mut later = format::encode(&record);
    later[4] = 2;
    put(&server.url(), &subject_of("idem", &key("k")), &later).await;
    let raw = raw(&server).await;
    let last = async || api(&raw, "STREAM.INFO.KV_idem", json!({})).await["state"]["last_seq"].clone();
    let before = last().await;
    // Another process: the first one holds the key.
    is_of_a_later_format(&connect(&server).await, "k").await;
    assert_eq!(last().await, before, "nothing was written");
}

// Limits.

#[tokio::test]
async fn a_result_too_large_for_the_stream_ends_the_operation_without_the_result() {
    let server = NatsServer::start();
    let raw = raw(&server).await;
    let mut small = settings("small");
    small["max_msg_size"] = json!(4096);
    api(&raw, "STREAM.CREATE.KV_small", small).await;
    for (bucket, most) in [("small", 4096), ("idem", 1_048_576)] {
        let store = NatsStore::options().bucket(bucket).connect(&server.url()).await.unwrap();
        let lease = reserved(&store, "k").await;
        let error = store.finish(&lease, &Finish::Completed(stored(vec![b'1'; most]))).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TooLarge, "{error}");
        let fitting = Finish::Completed(stored(vec![b'1'; most - 1024]));
        assert_eq!(store.finish(&lease, &fitting).await.unwrap(), Verdict::Applied, "{bucket}");
        assert_eq!(store.inspect(&lease.key).await.unwrap().unwrap().record.state, fitting.state());
        let body = async { Ok::<_, Error>("x".repeat(most)) };
        let policy = POLICY.max_result_bytes(10 * most);
        let (result, outcome) = observe(Operation::new(&store, Ok(key("call")), policy).run(body)).await;
        assert!(result.is_ok() && outcome.executed(), "{result:?}");
        let state = store.inspect(&key("call")).await.unwrap().unwrap().record.state;
        assert!(matches!(state, State::Completed(StoredResult::TooLarge { .. })), "{bucket}: {state:?}");
    }
}

/// A step whose entry did not fit would have an effect that no later attempt knows of.
#[tokio::test]
async fn a_step_beyond_the_largest_message_is_refused_before_its_body() {
    // The journal leaves room for the headers of its message, and for the other parts of a record.
    const LARGEST: usize = 16_384 - 256 - 2 * 1024;
    let server = NatsServer::start_with(Kind::Nats, "max_payload: 16384\n");
    let store = NatsStore::connect(&server.url()).await.unwrap();
    let raw = raw(&server).await;
    let last = async || api(&raw, "STREAM.INFO.KV_idem", json!({})).await["state"]["last_seq"].clone();
    let body = async {
        let attempt = current()?;
        // The rest of the journal has less room than the entries of one step may need.
        attempt.step("fills").run(async |_| Ok::<_, Error>("x".repeat(LARGEST - 100))).await?;
        let before = last().await;
        let refused = attempt.step("refused").run(async |_| -> Result<u8, Error> { panic!("the body ran") }).await;
        assert_eq!(last().await, before, "nothing was sent for the step");
        refused
    };
    let error = Operation::new(&store, Ok(key("steps")), POLICY).run(body).await.unwrap_err();
    let Error::Step { problem: StepProblem::JournalFull { max: LARGEST, .. }, .. } = error else { panic!("{error}") };

    takes_its_largest_journal(&store, LARGEST).await;
}

#[tokio::test]
async fn a_full_stream_refuses_new_keys_and_forgets_none() {
    let server = NatsServer::start();
    let raw = raw(&server).await;
    let mut full = settings("full");
    full["max_bytes"] = json!(20_000);
    api(&raw, "STREAM.CREATE.KV_full", full).await;
    let store = NatsStore::options().bucket("full").connect(&server.url()).await.unwrap();
    let runs = AtomicU32::new(0);
    let mut recorded = 0;
    let error = loop {
        match call(&store, &recorded.to_string(), &runs).await.0 {
            Ok(_) => recorded += 1,
            Err(Error::Store { source, .. }) => break source,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
    assert!(recorded > 10, "{recorded}");
    for n in 0..recorded {
        assert!(call(&store, &n.to_string(), &runs).await.1.replayed(), "{n}");
    }
    assert_eq!(runs.into_inner(), recorded, "a body began without a record");
}

#[tokio::test]
async fn a_full_stream_refuses_running_attempts_what_takes_more_room() {
    let server = NatsServer::start();
    let raw = raw(&server).await;
    let mut full = settings("full");
    full["max_bytes"] = json!(20_000);
    // The number of the reservation makes the first renewal longer than the reservation.
    full["first_seq"] = json!(1_795_796_363_740_546_u64);
    api(&raw, "STREAM.CREATE.KV_full", full).await;
    let store = NatsStore::options().bucket("full").connect(&server.url()).await.unwrap();
    let held = reserved(&store, "held").await;
    let mut filled = 0;
    while store.reserve(&request(&store, &format!("fill{filled}"))).await.is_ok() {
        filled += 1;
    }
    let larger = Finish::Completed(stored(vec![b'1'; 200]));
    for error in [
        renew_all(&store, std::slice::from_ref(&held)).await.map(drop).unwrap_err(),
        store.begin(&held).await.map(drop).unwrap_err(),
        store.finish(&held, &larger).await.map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
    }
    assert_eq!(messages(&raw, "full").await, filled + 1, "no record is forgotten");
}

// Costs.

/// Key whose reads are not counted.
const UNCOUNTED: &str = "uncounted";

/// Counts the requests that a store sends: writes of records, reads of records, and questions about the stream.
struct Counted {
    records: async_nats::Subscriber,
    api: async_nats::Subscriber,
    marks: async_nats::Subscriber,
    raw: Client,
    /// Number of direct reads.
    directly: usize,
}

impl Counted {
    async fn on(server: &NatsServer) -> Self {
        Self::of(raw(server).await, "$KV.>", "$JS.API.>").await
    }

    /// Counts the requests on these subjects.
    async fn of(raw: Client, records: &'static str, api: &'static str) -> Self {
        let records = raw.subscribe(records).await.unwrap();
        let api = raw.subscribe(api).await.unwrap();
        let mut counted = Self { records, api, marks: raw.subscribe("mark").await.unwrap(), raw, directly: 0 };
        counted.since().await;
        counted
    }

    /// Returns the numbers of requests since the last call, with all requests of `store`. Once the server has answered
    /// a further request of the same connection, which is not counted, it has delivered the earlier ones.
    async fn since_all_of(&mut self, store: &dyn Store) -> [usize; 3] {
        store.inspect(&key(UNCOUNTED)).await.unwrap();
        self.since().await
    }

    /// Returns the numbers of requests since the last call. The stream may answer a request before the server has
    /// delivered it here.
    async fn since(&mut self) -> [usize; 3] {
        // The server delivers all earlier messages before this one.
        self.raw.publish("mark", "".into()).await.unwrap();
        self.marks.next().await.expect("the message");
        let mut counts = [0; 3];
        while let Some(Some(_)) = now(self.records.next()).await {
            counts[0] += 1;
        }
        while let Some(Some(message)) = now(self.api.next()).await {
            // The subject of the record is in the question to the leader, or in the subject of a direct read.
            if message.subject.contains(UNCOUNTED) || String::from_utf8_lossy(&message.payload).contains(UNCOUNTED) {
                continue;
            }
            self.directly += usize::from(message.subject.contains("DIRECT"));
            counts[if message.subject.contains(".GET.") { 1 } else { 2 }] += 1;
        }
        counts
    }
}

/// Returns the output of `future` if it is ready now.
async fn now<F: Future + Unpin>(mut future: F) -> Option<F::Output> {
    std::future::poll_fn(|cx| match std::pin::Pin::new(&mut future).poll(cx) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

#[tokio::test]
async fn each_operation_costs_its_documented_requests() {
    let server = NatsServer::start();
    let store = connect(&server).await;
    let runs = AtomicU32::new(0);
    let mut counted = Counted::on(&server).await;
    call(&store, "k", &runs).await.0.unwrap();
    assert_eq!(counted.since_all_of(&store).await, [2, 0, 0], "a first run");
    call(&store, "k", &runs).await.0.unwrap();
    assert_eq!(counted.since_all_of(&store).await, [1, 1, 0], "a replay");
    let lease = wins(&store, &request(&store, "held").on_crash(OnCrash::Fail)).await;
    counted.since_all_of(&store).await;
    assert!(matches!(store.reserve(&request(&store, "held")).await, Ok(Reservation::InProgress { .. })));
    assert_eq!(counted.since_all_of(&store).await, [1, 1, 0], "a duplicate of a running attempt");
    assert_eq!(store.begin(&lease).await.unwrap(), Verdict::Applied);
    assert_eq!(counted.since_all_of(&store).await, [1, 0, 0], "the begin of a body");
    assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    assert_eq!(counted.since_all_of(&store).await, [1, 0, 0], "a renewal");
    assert_eq!(store.upkeep().release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    assert_eq!(counted.since_all_of(&*store.upkeep()).await, [1, 0, 0], "a release by the other handle");
    reserved(&store, "held").await;
    assert_eq!(counted.since_all_of(&store).await, [2, 1, 0], "another attempt after a release");
    // Another process has written the record last.
    let lease = reserved(&store, "other").await;
    let other = connect(&server).await;
    assert_eq!(renew_all(&other, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    counted.since_all_of(&other).await;
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    assert_eq!(counted.since_all_of(&store).await, [2, 1, 0], "a write to a record that another process has changed");
    // A lapse is decided by a question to the leader of the stream.
    let brief = request(&store, "brief").lease(Duration::from_millis(1));
    wins(&store, &brief).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    counted.since_all_of(&store).await;
    assert_eq!(reserved(&store, "brief").await.attempt, 2);
    assert_eq!(counted.since_all_of(&store).await, [2, 1, 1], "a takeover");
    // After some replays, a replay is one read.
    for _ in 0..10 {
        call(&store, "k", &runs).await.0.unwrap();
    }
    counted.since_all_of(&store).await;
    call(&store, "k", &runs).await.0.unwrap();
    assert_eq!(counted.since_all_of(&store).await, [0, 1, 0], "a replay among replays");
    assert!(counted.directly > 10, "a stream without replicas is read directly");
    assert_eq!(runs.into_inner(), 1);
}

/// A message on the subject of a record makes a waiter read the record, also if the stream refuses the message.
#[tokio::test]
async fn messages_wake_a_waiter_of_another_process() {
    const HINTS: usize = 50;
    let server = NatsServer::start();
    let (owner, waiter) = (connect(&server).await, connect(&server).await);
    let lease = reserved(&owner, "k").await;
    let mut counted = Counted::on(&server).await;
    let began = std::time::Instant::now();
    let waits = tokio::spawn(async move { waiter.wait(&key("k"), 1, LEASE).await });
    let mut reads = 0;
    until("the waiter has read the record", async || {
        reads += counted.since().await[1];
        reads > 0
    })
    .await;
    let ended = format::encode(&Record::after(&lease, done().state()));
    for _ in 0..HINTS {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Nats-Expected-Last-Subject-Sequence", "7");
        let subject = subject_of("idem", &lease.key);
        let refused = counted.raw.request_with_headers(subject, headers, ended.clone().into()).await.unwrap();
        assert!(String::from_utf8_lossy(&refused.payload).contains("10071"), "{refused:?}");
        let before = reads;
        until("the waiter has read the record again", async || {
            reads += counted.since().await[1];
            reads > before
        })
        .await;
    }
    // Without a message, a waiter reads once a second, after five reads in its first second.
    let polls = usize::try_from(began.elapsed().as_secs()).unwrap() + 6;
    assert!(reads > 2 * polls, "{reads} reads, of which {polls} may be polls");
    assert_eq!(owner.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    let ended = waits.await.unwrap().unwrap().expect("there is a record");
    assert!(ended.record.is_finished());
}

// Faults.

/// A stream that replaces a deleted one uses other sequence numbers.
#[tokio::test]
async fn a_write_from_before_a_deletion_of_the_stream_is_refused_after_it() {
    let server = NatsServer::start();
    let store = connect(&server).await;
    let lost = reserved(&store, "k").await;
    api(&raw(&server).await, "STREAM.DELETE.KV_idem", json!({})).await;
    let other = connect(&server).await;
    let lease = reserved(&other, "k").await;
    assert_eq!(store.finish(&lost, &done()).await.unwrap(), Verdict::Refused);
    assert_eq!(other.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
}

/// A server that can't read a record answers like one that has none, which is how the stream answers after a purge.
#[tokio::test]
async fn an_answer_from_before_a_confirmed_write_is_no_loss_of_the_lease() {
    let server = NatsServer::start();
    let (store, raw) = (connect(&server).await, raw(&server).await);
    let lease = reserved(&store, "k").await;
    api(&raw, "STREAM.PURGE.KV_idem", json!({})).await;
    for error in [
        renew_all(&store, std::slice::from_ref(&lease)).await.map(drop).unwrap_err(),
        store.finish(&lease, &done()).await.map(drop).unwrap_err(),
        store.finish(&lease, &done()).await.map(drop).unwrap_err(),
        store.upkeep().release(&lease, Release::Returned).await.map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    }
    assert_eq!(store.inspect(&lease.key).await.unwrap(), None, "no write replaced what can't be read");
    // A later record of another owner is evidence, and so is a removal.
    let other = connect(&server).await;
    reserved(&other, "k").await;
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Refused);
    let removed = wins(&store, &request(&store, "removed").lease(Duration::from_millis(1))).await;
    until("the record of the lapsed attempt is removed", async || {
        let found = other.inspect(&removed.key).await.unwrap().expect("a record");
        other.decide(&Decision::forget(&removed.key, &found)).await.unwrap() == DecisionAnswer::Applied
    })
    .await;
    let question = json!({ "last_by_subj": subject_of("idem", &removed.key) });
    let removal = api(&raw, "STREAM.MSG.GET.KV_idem", question).await;
    let headers = String::from_utf8(base64(removal["message"]["hdrs"].as_str().unwrap())).unwrap();
    assert!(!headers.contains("Nats-TTL: 1\r\n"), "as long as the record would have been kept: {headers}");
    assert_eq!(store.finish(&removed, &done()).await.unwrap(), Verdict::Refused);
}

/// A server that has lost its latest messages uses their numbers again.
#[tokio::test]
async fn a_holder_whose_record_was_lost_does_not_overwrite_that_of_the_next_holder() {
    let mut server = NatsServer::start();
    connect(&server).await;
    server.kill();
    let copy = |from: &str, to: &str| {
        let [from, to] = [from, to].map(|name| server.folder().join(name));
        assert!(Command::new("cp").arg("-a").args([from, to]).status().expect("cp runs").success());
    };
    copy("data", "earlier");
    server.run();
    let store = connect(&server).await;
    let lost = reserved(&store, "k").await;
    // The files of the server are as they were before the reservation.
    server.kill();
    std::fs::remove_dir_all(server.folder().join("data")).unwrap();
    std::fs::rename(server.folder().join("earlier"), server.folder().join("data")).unwrap();
    server.run();
    let other = connect(&server).await;
    let lease = reserved(&other, "k").await;
    until("the store has connected again", async || store.ping().await.is_ok()).await;
    assert_eq!(store.finish(&lost, &done()).await.unwrap(), Verdict::Refused);
    assert_eq!(other.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn renewals_without_answers_end_after_one_time_limit() {
    let server = NatsServer::start();
    let (patient, (store, proxy)) = (connect(&server).await, behind_a_proxy(&server).await);
    let mut leases = Vec::new();
    for n in 0..600 {
        leases.push(reserved(&patient, &format!("k{n}")).await);
    }
    // A busy machine may not renew all of them within the short time limit.
    until("the leases are renewed", async || {
        renew_all(&store, &leases).await.is_ok_and(|renewed| renewed == [Verdict::Applied; 600])
    })
    .await;
    let mut counted = Counted::on(&server).await;
    proxy.set(Line::LoseReplies);
    renew_all(&store, &leases).await.unwrap_err();
    let mut sent = 0;
    while let [more @ (1..), ..] = counted.since().await {
        sent += more;
    }
    assert!((1..=256).contains(&sent), "{sent} renewals were sent");
}

/// Store behind a proxy. The store waits for an answer for only 300 ms, so that a lost answer soon is an error.
async fn behind_a_proxy(server: &NatsServer) -> (NatsStore, Proxy) {
    let proxy = Proxy::to(server.port()).await;
    let options = NatsStore::options().response_timeout(Duration::from_millis(300));
    (options.connect(&format!("nats://127.0.0.1:{}", proxy.port())).await.unwrap(), proxy)
}

#[tokio::test]
async fn a_reservation_cut_off_mid_call_is_recognised_when_repeated() {
    let server = NatsServer::start();
    for line in [Line::LoseReplies, Line::ResetOnReply] {
        let (store, proxy) = behind_a_proxy(&server).await;
        let request = request(&store, &format!("{line:?}"));
        proxy.set(line);
        let error = store.reserve(&request).await.unwrap_err();
        assert!(error.may_have_landed(), "{line:?}: {error}");
        proxy.set(Line::Pass);
        let lease = loop {
            match store.reserve(&request).await {
                Ok(Reservation::Granted { lease, .. }) => break lease,
                Ok(other) => panic!("{line:?}: the call's own reservation was not recognised: {other:?}"),
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        };
        assert_eq!(lease.attempt, 1, "{line:?}");
    }
}

#[tokio::test]
async fn a_completion_cut_off_mid_call_is_recognised_when_repeated() {
    let server = NatsServer::start();
    for (line, landed) in [(Line::LoseReplies, true), (Line::ResetOnReply, true), (Line::LoseRequests, false)] {
        let (store, proxy) = behind_a_proxy(&server).await;
        let lease = reserved(&store, &format!("{line:?}")).await;
        proxy.set(line);
        let error = store.finish(&lease, &done()).await.unwrap_err();
        assert!(error.may_have_landed(), "{line:?}: {error}");
        let direct = connect(&server).await;
        let state = direct.inspect(&lease.key).await.unwrap().unwrap().record.state;
        assert_eq!(matches!(state, State::Completed(_)), landed, "{line:?}: {state:?}");
        proxy.set(Line::Pass);
        loop {
            match store.finish(&lease, &done()).await {
                Ok(write) => break assert_eq!(write, Verdict::Applied, "{line:?}"),
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    }
}

#[tokio::test]
async fn calls_through_a_line_that_breaks_take_effect_once() {
    let server = NatsServer::start();
    let (store, proxy) = behind_a_proxy(&server).await;
    let direct = connect(&server).await;
    for (n, line) in [Line::LoseReplies, Line::ResetOnReply, Line::LoseRequests, Line::Refuse].into_iter().enumerate() {
        let (runs, name) = (AtomicU32::new(0), format!("k{n}"));
        // The line breaks while the result is being recorded, and recovers after a while.
        let body = async {
            proxy.set(line);
            Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst) + 1)
        };
        let call_through = observe(Operation::new(&store, Key::new("test", &name), POLICY).run(body));
        let heal = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            proxy.set(Line::Pass);
        };
        let ((result, outcome), ()) = tokio::join!(call_through, heal);
        assert_eq!(result.unwrap(), 1, "{line:?}");
        assert!(outcome.recorded(), "{line:?}");
        assert!(call(&direct, &name, &runs).await.1.replayed(), "{line:?}");
        assert_eq!(runs.into_inner(), 1, "{line:?}");
    }
}

#[tokio::test]
async fn a_refused_connection_writes_nothing_and_the_store_reconnects_later() {
    let server = NatsServer::start();
    let (store, proxy) = behind_a_proxy(&server).await;
    proxy.set(Line::Refuse);
    // The first answer may come from the connection that breaks now.
    store.reserve(&request(&store, "first")).await.unwrap_err();
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    let direct = connect(&server).await;
    assert_eq!(direct.inspect(&key("k")).await.unwrap(), None);
    proxy.set(Line::Pass);
    until("the store has connected again", async || store.ping().await.is_ok()).await;
    assert_eq!(direct.inspect(&key("k")).await.unwrap(), None, "the request was sent late");
    assert_eq!(reserved(&store, "k").await.attempt, 1);
}

#[tokio::test]
async fn a_connection_without_answers_is_replaced() {
    let server = NatsServer::start();
    let (store, proxy) = behind_a_proxy(&server).await;
    proxy.set(Line::Stale);
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert!(error.may_have_landed(), "{error}");
    // Neither client nor server has closed the old connection, which would stay silent forever.
    let repeated = request(&store, "k");
    let mut failed = 0;
    until("a new connection answers", async || {
        let answer = store.reserve(&repeated).await;
        failed += usize::from(answer.is_err());
        matches!(answer, Ok(Reservation::Granted { .. }))
    })
    .await;
    // The driver itself notices a silent connection only after some fifty calls.
    assert!(failed < 10, "{failed} calls failed");
}

/// The connection of a server that answers is kept, also if its stream does not answer.
#[tokio::test]
async fn a_connection_to_a_slow_stream_is_kept() {
    let server = NatsServer::start();
    let (store, proxy) = behind_a_proxy(&server).await;
    let raw = raw(&server).await;
    api(&raw, "STREAM.DELETE.KV_idem", json!({})).await;
    // In place of the stream, a subscriber takes the records and does not answer.
    let mut slow = Counted::on(&server).await;
    let connections = proxy.sent().len();
    for n in 0..8 {
        let error = store.reserve(&request(&store, &n.to_string())).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unconfirmed, "{error}");
    }
    assert_eq!(slow.since().await[0], 8);
    assert_eq!(proxy.sent().len(), connections);
}

#[tokio::test]
async fn a_write_that_a_stopped_server_stores_late_is_recognised() {
    let server = NatsServer::start();
    let store = NatsStore::options().response_timeout(Duration::from_millis(300)).connect(&server.url()).await.unwrap();
    let lease = reserved(&store, "finish").await;
    server.signal("-STOP");
    let request = request(&store, "reserve");
    let errors = [store.reserve(&request).await.map(drop), store.finish(&lease, &done()).await.map(drop)];
    server.signal("-CONT");
    assert!(errors.iter().all(|error| error.as_ref().is_err_and(StoreError::is_transient)), "{errors:?}");
    let mut answer = None;
    until("the store has answered", async || {
        answer = store.reserve(&request).await.ok();
        answer.is_some()
    })
    .await;
    assert!(matches!(&answer, Some(Reservation::Granted { lease, .. }) if lease.attempt == 1), "{answer:?}");
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn a_killed_server_keeps_every_confirmed_record() {
    let mut server = NatsServer::start();
    let store = connect(&server).await;
    let runs = AtomicU32::new(0);
    for n in 0..50 {
        call(&store, &n.to_string(), &runs).await.0.unwrap();
    }
    let held = reserved(&store, "held").await;
    server.kill();
    server.run();
    until("the store has connected again", async || store.ping().await.is_ok()).await;
    for n in 0..50 {
        assert!(call(&store, &n.to_string(), &runs).await.1.replayed(), "{n}");
    }
    assert_eq!(store.finish(&held, &done()).await.unwrap(), Verdict::Applied);
    assert_eq!(runs.into_inner(), 50);
}

/// The driver's own names for inboxes come from a generator whose state a forked child inherits: two children would
/// receive each other's answers.
#[tokio::test]
async fn the_inbox_of_each_connection_has_a_name_from_the_system() {
    let server = NatsServer::start();
    let mut records = raw(&server).await.subscribe("$KV.>").await.unwrap();
    let mut inboxes = std::collections::BTreeSet::new();
    for n in 0..3 {
        let store = connect(&server).await;
        for store in [store.handle(), store.upkeep()] {
            let owner = store.context().new_owner();
            let key = Key::new("test", format!("{n}{}", inboxes.len())).unwrap();
            store.reserve(&ReserveRequest::new(key, owner, LEASE, LEASE)).await.unwrap();
            let reply = records.next().await.unwrap().reply.expect("a subject for the answer").to_string();
            let name = reply.split('.').nth(1).unwrap().to_owned();
            assert!(name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit()), "{reply}");
            inboxes.insert(name);
        }
    }
    assert_eq!(inboxes.len(), 6, "{inboxes:?}");
}

#[test]
fn each_runtime_has_a_connection_of_its_own() {
    let server = NatsServer::start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let store = first.block_on(connect(&server));
    let runs = AtomicU32::new(0);
    assert_eq!(first.block_on(call(&store, "k", &runs)).0.unwrap(), 1);
    // The second runtime works although the first is not driven, and has then ended.
    let second = runtime();
    assert!(second.block_on(call(&store, "k", &runs)).1.replayed());
    drop(first);
    assert!(second.block_on(call(&store, "k", &runs)).1.replayed());
    assert!(runtime().block_on(call(&store, "k", &runs)).1.replayed());
}

#[tokio::test]
async fn processes_race_for_the_same_keys_while_the_server_restarts() {
    let mut server = NatsServer::start();
    connect(&server).await;
    let spec = format!("nats {} idem", server.url());
    let race = Race::new(env!("CARGO_BIN_EXE_racer"), &spec);
    let restarting = async {
        for _ in 0..3 {
            server.kill();
            server.run();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let effects = race.run(restarting).await;
    // At each restart of the server, each process may leave one effect without a record.
    let bound = race.kills + 3 * (race.racers + 1);
    assert!(effects.repeated() <= bound, "{} repeated: {effects:?}", effects.repeated());
}
