//! `RedisStore` on real servers: its values, its errors, its costs, and faults.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]
#![allow(clippy::format_collect, reason = "a handful of bytes")]

#[path = "redis/appends.rs"]
mod appends;
#[path = "redis/comparing.rs"]
mod comparing;
#[path = "redis/handles.rs"]
mod handles;
#[path = "redis/limits.rs"]
mod limits;
#[path = "redis/lines.rs"]
mod lines;
#[path = "redis/rights.rs"]
mod rights;

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_runtime::codec::CodecName;
use idem_runtime::key::Fingerprint;
use idem_runtime::operator::OperatorError;
use idem_runtime::record::format;
use idem_runtime::record::{Provenance, Record, State, StoredResult};
use idem_runtime::store::{
    Cursor, Decision, DecisionAnswer, Filter, Finish, Holder, Lease, OwnerToken, Release, Reservation, ReserveRequest,
    Standing, Verdict, renew_all,
};
use idem_runtime::{
    Error, InProgress, Json, Key, OnCrash, Operation, RedisStore, Store, StoreError, StoreErrorKind, StoreExt, observe,
};
use idem_tests::Reopen as _;
use idem_tests::calls::{
    Confirming, LEASE, POLICY, TRACEPARENT, TTL, call, call_with, done, is_of_a_later_format, kept, one_step, publish,
    request, reserved, stored, wins, with_journal,
};
use idem_tests::log::Log;
use idem_tests::proxy::{Line, Proxy};
use idem_tests::race::Race;
use idem_tests::server::{Kind, RedisServer, raw, until};
use idem_tests::tls::Certificate;
use redis::AsyncCommands;
use tokio::sync::Notify;

async fn connect(server: &RedisServer) -> RedisStore {
    RedisStore::connect(&server.url()).await.unwrap()
}

// Bytes of stored records.

/// Provenance with every optional field.
fn provenance() -> Provenance {
    let traceparent = TRACEPARENT.parse().ok();
    Provenance::default()
        .with_holder(Holder::new("host/7/name"))
        .with_traceparent(traceparent)
        .with_decision("alice", "INC-7")
}

#[test]
fn the_stored_form_is_pinned() {
    let owner = OwnerToken::from_bytes(*b"0123456789abcdef");
    let fingerprint = Some(Fingerprint::from_bytes([0x5a; 32]));
    let record = |state, fingerprint| {
        let mut record = Record::new(owner, 3, state);
        record.attempts_used = 2;
        record.fingerprint = fingerprint;
        if fingerprint.is_some() {
            record.provenance = provenance();
        }
        record
    };
    let (lease, ttl) = (Duration::from_secs(30), Duration::from_secs(60));
    let pending = |on_crash| State::Pending { lease, ttl, on_crash, begun: on_crash == OnCrash::Fail };
    let stored = StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: br#"{"a":1}"#.to_vec().into() };
    let journaled = |record| with_journal(record, one_step());
    // Records in every state, with and without the optional fields.
    let records = [
        ("pending", record(pending(OnCrash::Retry), None)),
        ("pending-fail-fingerprint", record(pending(OnCrash::Fail), fingerprint)),
        ("released", record(State::Released, None)),
        ("interrupted", record(State::Interrupted, fingerprint)),
        ("completed", record(State::Completed(stored.clone()), None)),
        ("completed-fingerprint", record(State::Completed(stored.clone()), fingerprint)),
        ("failed", record(State::Failed(stored), None)),
        ("too-large", record(State::Completed(StoredResult::TooLarge { size: 300_000 }), None)),
        ("unencodable", record(State::Completed(StoredResult::Unencodable), None)),
        ("pending-journal", journaled(record(pending(OnCrash::Retry), None))),
        ("pending-fail-fingerprint-journal", journaled(record(pending(OnCrash::Fail), fingerprint))),
        ("released-journal", journaled(record(State::Released, None))),
        ("interrupted-journal", journaled(record(State::Interrupted, fingerprint))),
        ("completed-kept-journal", record(State::Completed(kept()), None)),
    ];
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let written: String = records.iter().map(|(name, it)| format!("{name} {}\n", hex(&format::encode(it)))).collect();
    if std::env::var_os("IDEM_GOLDEN").is_some() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/record-v1.txt");
        std::fs::write(path, &written).unwrap();
    }
    let golden = include_str!("golden/record-v1.txt");
    assert_eq!(written, golden, "a released format never changes: give a new format a new version");
    // Each pinned value is decoded as the record from which it was encoded.
    for (line, (name, record)) in golden.lines().zip(&records) {
        let text = line.split(' ').nth(1).unwrap();
        let bytes: Vec<u8> =
            (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect();
        assert_eq!(&format::decode(&bytes.clone().into()).unwrap(), record, "{name}");
        // A value with one byte less or more is an error. Records with a result or a journal are the exception: the
        // result or the journal is the last part of the value, and may have any length.
        let has_open_end = record.journal.is_some()
            || matches!(
                record.state,
                State::Completed(StoredResult::Encoded { .. }) | State::Failed(StoredResult::Encoded { .. })
            );
        if !has_open_end {
            assert!(format::decode(&bytes[..bytes.len() - 1].to_vec().into()).is_err(), "{name}");
            assert!(format::decode(&[&bytes[..], b"x"].concat().into()).is_err(), "{name}");
        }
        // A longer record can also be decoded from its first bytes alone, without its result or journal.
        let start = bytes[..bytes.len().min(format::START_BYTES)].to_vec().into();
        let glance = format::decode_start(&start, bytes.len()).unwrap();
        match (&glance.state, record.state.result()) {
            (
                State::Completed(StoredResult::LeftOut { size, .. })
                | State::Failed(StoredResult::LeftOut { size, .. }),
                Some(StoredResult::Encoded { bytes, .. }),
            ) => assert_eq!(*size, Some(bytes.len() as u64), "{name}"),
            _ => {
                let mut without_journal = record.clone();
                without_journal.journal = None;
                assert_eq!(glance, without_journal, "{name}");
            }
        }
    }
}

#[tokio::test]
async fn the_redis_server_holds_the_pinned_bytes_of_a_record() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let mut raw = server.raw().await;
    let lease = reserved(&store, "k").await;
    let name = "idem:1/test/k";
    let value: Vec<u8> = raw.get(name).await.unwrap();
    let value = value.into();
    let record = format::decode(&value).unwrap();
    assert_eq!((record.owner, record.attempt), (lease.owner, 1));
    assert_eq!(format::times(&value), [None, None], "the times of the record follow from its retention");
    let untimed = |value: &[u8]| {
        let times = format::times(&value.to_vec().into());
        assert!(times[0].is_some() && times[0] <= times[1], "{times:?}");
        [&value[..format::IDENTITY_END], &[0; 16], &value[format::HEADER_BYTES..]].concat()
    };
    let left: i64 = raw.pttl(name).await.unwrap();
    assert!((3_600_000..=3_660_000).contains(&left), "the record outlives its lease by its ttl: {left}");
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    let value: Vec<u8> = raw.get(name).await.unwrap();
    let released = Record::after(&lease, State::Released);
    assert_eq!(format::encode(&released), untimed(&value), "scripts and code write the same bytes");
    let lease = reserved(&store, "k").await;
    assert_eq!(store.append(&lease, &one_step()).await.unwrap(), Verdict::Applied);
    let value: Vec<u8> = raw.get(name).await.unwrap();
    let pending = format::decode(&value.clone().into()).unwrap();
    let mut journaled = with_journal(Record::after(&lease, pending.state), one_step());
    assert_eq!(format::encode(&journaled), untimed(&value), "a script appends the journal");
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    let value: Vec<u8> = raw.get(name).await.unwrap();
    journaled.state = State::Released;
    assert_eq!(format::encode(&journaled), untimed(&value), "a release keeps the journal");
    let lease = reserved(&store, "k").await;
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    let value: Vec<u8> = raw.get(name).await.unwrap();
    assert_eq!(format::encode(&Record::after(&lease, done().state())), untimed(&value));
    let left: i64 = raw.pttl(name).await.unwrap();
    assert!((3_590_000..=3_600_000).contains(&left), "the ttl counts from completion: {left}");
}

#[tokio::test]
async fn a_record_with_a_journal_of_a_later_format_is_left_unchanged() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let mut raw = server.raw().await;
    let lease = reserved(&store, "k").await;
    assert_eq!(store.append(&lease, &one_step()).await.unwrap(), Verdict::Applied);
    let _: usize = raw.setrange("idem:1/test/k", 4, [2_u8].as_slice()).await.unwrap();
    let before: Vec<u8> = raw.get("idem:1/test/k").await.unwrap();
    is_of_a_later_format(&store, "k").await;
    let after: Vec<u8> = raw.get("idem:1/test/k").await.unwrap();
    assert_eq!(after, before);
}

#[tokio::test]
async fn namespaces_keep_applications_apart() {
    let server = RedisServer::start(Kind::Redis);
    let (a, b) = (RedisStore::options().namespace("a:"), RedisStore::options().namespace("b:"));
    let (a, b) = (a.connect(&server.url()).await.unwrap(), b.connect(&server.url()).await.unwrap());
    assert_eq!((reserved(&a, "k").await.attempt, reserved(&b, "k").await.attempt), (1, 1));
}

#[tokio::test]
async fn a_store_connects_by_resp2_resp3_and_unix_sockets() {
    let socket = std::env::temp_dir().join(format!("idem-test-{}.sock", std::process::id()));
    let server = RedisServer::start_with(Kind::Redis, &["--unixsocket", socket.to_str().unwrap()]);
    let unix = format!("redis+unix://{}", socket.display());
    let resp3 = format!("{}?protocol=resp3", server.url());
    for url in [unix, resp3] {
        let store = RedisStore::connect(&url).await.unwrap();
        let runs = AtomicU32::new(0);
        let calls: Vec<_> = (0..100).map(|n| format!("{}{n}", &url[..8])).collect();
        for round in [true, false] {
            let calls = futures::future::join_all(calls.iter().map(|name| call(&store, name, &runs))).await;
            assert!(calls.iter().all(|(result, outcome)| result.is_ok() && outcome.executed() == round), "{url}");
        }
        let lease = reserved(&store, &url[..8]).await;
        assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
        assert!(store.inspect(&lease.key).await.unwrap().is_some());
    }
}

/// The server speaks only TLS. Its certificate is trusted only by a process whose environment names the certificate.
#[test]
fn a_store_refuses_a_server_with_an_untrusted_certificate() {
    let certificate = Certificate::new();
    let port = idem_tests::server::free_port().to_string();
    let args = ["--tls-port", &port, "--tls-cert-file", &certificate.file(), "--tls-key-file", &certificate.key()];
    let server = RedisServer::start_with(Kind::BaselineRedis, &[&args[..], &["--tls-auth-clients", "no"]].concat());
    let url = format!("rediss://localhost:{port}");
    let race = |trusted: bool| {
        certificate.race(env!("CARGO_BIN_EXE_racer"), format!("redis {url} tls:"), server.folder(), trusted)
    };
    let refused = race(false);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("ertificate") && said.contains("Misconfigured"), "{said}");
    let trusting = race(true);
    assert!(trusting.status.success(), "{}", String::from_utf8_lossy(&trusting.stderr));
}

// Errors.

#[tokio::test]
async fn values_that_are_not_records_are_left_unchanged() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let mut raw = server.raw().await;
    // A value of a later version, a damaged record, a text and a list: this version can't read any of these as a
    // record.
    let later = [&format::encode(&Record::first(&request(&store, "later")))[..4], &[2], &[0; 40]].concat();
    let mut damaged = format::encode(&Record::first(&request(&store, "damaged")));
    damaged[5] = b'X';
    let _: () = raw.set("idem:1/test/text", "hello").await.unwrap();
    let _: () = raw.set("idem:1/test/later", &later).await.unwrap();
    let _: () = raw.set("idem:1/test/damaged", &damaged).await.unwrap();
    let _: usize = raw.rpush("idem:1/test/list", "x").await.unwrap();
    for (name, words) in
        [("text", "not a record"), ("later", "format 2"), ("damaged", "damaged"), ("list", "WRONGTYPE")]
    {
        let runs = AtomicU32::new(0);
        let (result, _) = call(&store, name, &runs).await;
        let Err(Error::Store { source, .. }) = result else { panic!("{name}: {result:?}") };
        assert_eq!(source.kind(), StoreErrorKind::Corrupt, "{name}");
        assert!(source.to_string().contains(words), "{name}: {source}");
        assert_eq!(runs.into_inner(), 0, "{name}");
        // The writes of the attempt that owned the key leave the value unchanged, too.
        let lease = Record::first(&request(&store, name)).lease(&request(&store, name));
        for write in [store.finish(&lease, &done()).await, store.release(&lease, Release::Returned).await] {
            match write {
                Ok(write) => assert_eq!(write, Verdict::Refused, "{name}"),
                // A Redis value of another type than string is an error.
                Err(error) => assert_eq!((name, error.kind()), ("list", StoreErrorKind::Corrupt), "{error}"),
            }
        }
        // An operator can inspect the value, but not reopen it.
        match store.reopen(&lease.key, 1).await {
            Ok(write) => assert_eq!(write, Verdict::Refused, "{name}"),
            Err(error) => assert_eq!((name, error.kind()), ("list", StoreErrorKind::Corrupt), "{error}"),
        }
        assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Refused], "{name}");
        let left: i64 = raw.pttl(format!("idem:1/test/{name}")).await.unwrap();
        assert_eq!(left, -1, "{name} has not changed");
    }
    let text: String = raw.get("idem:1/test/text").await.unwrap();
    assert_eq!(text, "hello");
    for (name, words) in [("text", "not a record"), ("later", "format 2"), ("damaged", "damaged")] {
        idem_tests::forget_damaged(&store, &Key::new("test", name).unwrap(), words).await;
    }
}

/// Returns the error of a connection to `url`.
async fn refusal(url: &str) -> StoreError {
    RedisStore::connect(url).await.expect_err("refused")
}

#[tokio::test]
async fn urls_that_can_not_be_used_are_refused_without_showing_the_password() {
    for url in ["", "localhost", "http://user:secret@localhost", "redis://:secret@local host", "redis://:secret@h:x"] {
        let error = refusal(url).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}: {error}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    }
    let nobody = refusal("redis://127.0.0.1:1").await;
    assert_eq!(nobody.kind(), StoreErrorKind::Unavailable, "{nobody}");
}

#[tokio::test]
async fn connect_refuses_a_wrong_login() {
    let server = RedisServer::start_with(Kind::Redis, &["--requirepass", "secret"]);
    let at = format!("127.0.0.1:{}", server.port());
    for url in [format!("redis://{at}"), format!("redis://:wrong@{at}"), format!("redis://nobody:secret@{at}")] {
        let error = refusal(&url).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}: {error}");
        assert!(error.to_string().contains("login"), "{url}: {error}");
    }
    let store = RedisStore::connect(&format!("redis://:secret@{at}/3")).await.unwrap();
    reserved(&store, "k").await;
    assert!(!format!("{store:?}").contains("secret"));
}

#[tokio::test]
async fn redis_servers_of_unsupported_versions_are_refused() {
    let server = RedisServer::start(Kind::OldRedis);
    let error = refusal(&server.url()).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("Redis 6.2") && error.to_string().contains("7.0"), "{error}");
}

#[tokio::test]
async fn a_replica_is_refused_as_the_server_of_a_store() {
    let primary = RedisServer::start(Kind::Redis);
    let port = primary.port().to_string();
    let replica = RedisServer::start_with(Kind::Redis, &["--replicaof", &format!("127.0.0.1 {port}")]);
    let error = refusal(&replica.url()).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("replica"), "{error}");
    // A server that becomes a replica later executes no write, and the store returns an error.
    let store = connect(&primary).await;
    let mut raw = primary.raw().await;
    let _: () = redis::cmd("REPLICAOF").arg("127.0.0.1").arg("1").query_async(&mut raw).await.unwrap();
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("READONLY"), "{error}");
}

#[tokio::test]
async fn connect_warns_of_a_server_that_may_evict_records() {
    let connect_logged = async |policy: &str| {
        let server = RedisServer::start_with(Kind::Redis, &["--maxmemory", "100mb", "--maxmemory-policy", policy]);
        let log = Log::start();
        RedisStore::connect(&server.url()).await.unwrap();
        log.end()
    };
    for policy in ["allkeys-lru", "volatile-ttl"] {
        let log = connect_logged(policy).await;
        assert!(log.contains("WARN") && log.contains(policy) && log.contains("noeviction"), "{log}");
    }
    let log = connect_logged("noeviction").await;
    assert!(!log.contains("WARN"), "{log}");
}

// Faults.

#[tokio::test]
async fn operations_survive_a_flush_of_the_scripts() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let mut raw = server.raw().await;
    let mut flush = async || {
        let _: () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut raw).await.unwrap();
    };
    flush().await;
    let lease = reserved(&store, "k").await;
    flush().await;
    assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    flush().await;
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    flush().await;
    let lease = reserved(&store, "k").await;
    flush().await;
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    flush().await;
    assert!(store.inspect(&lease.key).await.unwrap().is_some());
    flush().await;
    assert_eq!(store.reopen(&lease.key, 2).await.unwrap(), Verdict::Applied);
    // Concurrent completions share one call of the script.
    flush().await;
    let runs = AtomicU32::new(0);
    let names: Vec<_> = (0..500).map(|n| format!("many{n}")).collect();
    let calls = futures::future::join_all(names.iter().map(|name| call(&store, name, &runs))).await;
    assert!(calls.iter().all(|(result, outcome)| result.is_ok() && outcome.recorded()));
}

#[tokio::test]
async fn a_restart_with_persistence_keeps_every_record() {
    let mut server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes", "--appendfsync", "always"]);
    let store = connect(&server).await;
    let runs = AtomicU32::new(0);
    assert_eq!(call(&store, "done", &runs).await.0.unwrap(), 1);
    let pending = reserved(&store, "pending").await;
    server.kill();
    let (result, _) = call(&store, "done", &runs).await;
    assert!(matches!(result, Err(Error::Store { .. })), "{result:?}");
    assert_eq!(runs.load(Ordering::SeqCst), 1, "a server that is away is never read as `no record`");
    server.run();
    // The store reconnects without help, although the new server process has no scripts.
    let replayed = loop {
        match call(&store, "done", &runs).await {
            (Ok(result), outcome) => break (result, outcome.replayed()),
            (Err(Error::Store { .. }), _) => {}
            (Err(error), _) => panic!("{error}"),
        }
    };
    assert_eq!(replayed, (1, true));
    assert_eq!(store.finish(&pending, &done()).await.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn a_result_is_recorded_after_a_restart_within_the_lease() {
    let mut server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes", "--appendfsync", "always"]);
    let store = connect(&server).await;
    let body = async {
        server.kill();
        let mut server = server;
        // The server restarts only after the first tries to record have failed.
        let restart = tokio::task::spawn_blocking(move || {
            std::thread::sleep(Duration::from_millis(300));
            server.run();
            server
        });
        Ok::<_, Error>((7, restart))
    };
    let running = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&running);
    let body = async move {
        let (result, restart) = body.await?;
        *keep.lock().unwrap() = Some(restart);
        Ok::<_, Error>(result)
    };
    let operation = Operation::new(&store, Key::new("test", "k"), POLICY);
    let (result, outcome) = observe(operation.run(body)).await;
    assert_eq!(result.unwrap(), 7);
    assert!(outcome.recorded(), "`Ok` is returned only after the result is recorded");
    let restart = running.lock().unwrap().take().unwrap();
    restart.await.unwrap();
}

#[tokio::test]
async fn records_lost_by_the_server_are_noticed() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let mut raw = server.raw().await;
    let body = async {
        let _: () = redis::cmd("FLUSHALL").query_async(&mut raw).await.unwrap();
        Ok::<_, Error>(1)
    };
    let result = Operation::new(&store, Key::new("test", "k"), POLICY).run(body).await;
    assert!(matches!(result, Err(Error::LeaseLost { .. })), "{result:?}");
}

/// Store behind a proxy. The store waits for an answer for only 200 ms, so that a lost answer soon is an error.
async fn behind_a_proxy(server: &RedisServer) -> (RedisStore, Proxy) {
    let proxy = Proxy::to(server.port()).await;
    let options = RedisStore::options().response_timeout(Duration::from_millis(200));
    (options.connect(&proxy.url()).await.unwrap(), proxy)
}

#[tokio::test]
async fn a_reservation_cut_off_mid_call_is_recognised_when_repeated() {
    let server = RedisServer::start(Kind::Redis);
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
    for kind in [Kind::Redis, Kind::Valkey] {
        a_completion_cut_off_mid_call(&RedisServer::start(kind)).await;
    }
}

async fn a_completion_cut_off_mid_call(server: &RedisServer) {
    for (line, landed) in [(Line::LoseReplies, true), (Line::ResetOnReply, true), (Line::LoseRequests, false)] {
        let (store, proxy) = behind_a_proxy(server).await;
        let lease = reserved(&store, &format!("{line:?}")).await;
        proxy.set(line);
        let error = store.finish(&lease, &done()).await.unwrap_err();
        assert!(error.may_have_landed(), "{line:?}: {error}");
        let direct = connect(server).await;
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
    let server = RedisServer::start(Kind::Redis);
    let (store, proxy) = behind_a_proxy(&server).await;
    let direct = connect(&server).await;
    for (n, line) in [Line::LoseReplies, Line::ResetOnReply, Line::LoseRequests, Line::Refuse].into_iter().enumerate() {
        let (runs, name) = (AtomicU32::new(0), format!("k{n}"));
        // The line breaks while the result is being recorded, and recovers after a while.
        let body = async {
            proxy.set(line);
            Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst) + 1)
        };
        let operation = Operation::new(&store, Key::new("test", &name), POLICY);
        let call_through = observe(operation.run(body));
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
    let server = RedisServer::start(Kind::Redis);
    let (store, proxy) = behind_a_proxy(&server).await;
    let runs = AtomicU32::new(0);
    proxy.set(Line::Refuse);
    let (result, _) = call(&store, "k", &runs).await;
    assert!(matches!(result, Err(Error::Store { .. })), "{result:?}");
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    proxy.set(Line::Pass);
    loop {
        match call(&store, "k", &runs).await.0 {
            Ok(run) => break assert_eq!(run, 1),
            Err(error) => assert!(matches!(error, Error::Store { .. } | Error::InProgress { .. }), "{error}"),
        }
    }
}

#[tokio::test]
async fn a_connection_without_answers_is_replaced() {
    let server = RedisServer::start(Kind::Redis);
    let (store, proxy) = behind_a_proxy(&server).await;
    let request = request(&store, "k");
    proxy.set(Line::Stale);
    let error = store.reserve(&request).await.unwrap_err();
    assert!(error.may_have_landed(), "{error}");
    // Neither client nor server has closed the old connection, which would stay silent forever.
    assert!(matches!(store.reserve(&request).await, Ok(Reservation::Granted { .. })));
}

#[tokio::test]
async fn a_cancelled_caller_fails_no_other_call() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let runs = Arc::new(AtomicU32::new(0));
    let calls: Vec<_> = (0..2000)
        .map(|n| {
            let (store, runs) = (store.clone(), Arc::clone(&runs));
            tokio::spawn(async move { call(&store, &format!("k{n}"), &runs).await.0 })
        })
        .collect();
    tokio::task::yield_now().await;
    for (n, call) in calls.into_iter().enumerate() {
        if n % 2 == 0 {
            call.abort();
        } else {
            call.await.unwrap().unwrap();
        }
    }
    store.context().flush().await;
    for n in 0..2000 {
        assert!(call(&store, &format!("k{n}"), &runs).await.0.is_ok(), "key {n} is free or finished");
    }
}

// Costs in commands.

async fn calls_of(server: &RedisServer) -> impl Fn(&str) -> u64 {
    let mut raw = server.raw().await;
    let stats: String = redis::cmd("INFO").arg("commandstats").query_async(&mut raw).await.unwrap();
    move |command| {
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().unwrap())
    }
}

#[tokio::test]
async fn a_first_run_sends_two_commands_and_most_other_calls_send_one() {
    let server = RedisServer::start(Kind::Redis);
    let has_ifeq = server.has_ifeq().await;
    let (owner, other) = (connect(&server).await, connect(&server).await);
    let sent = async || {
        let calls = calls_of(&server).await;
        ["set", "evalsha", "eval", "get", "mget"].iter().map(|command| calls(command)).sum::<u64>()
    };
    let runs = AtomicU32::new(0);
    // The commands inside of a script are counted too.
    let before = sent().await;
    call(&owner, "k", &runs).await.0.unwrap();
    // The reservation is a `SET`. The completion is another one; without `IFEQ` an `EVALSHA` with a `GET` and a `SET`.
    assert_eq!(sent().await - before, if has_ifeq { 1 + 1 } else { 1 + 3 });
    let before = sent().await;
    assert!(call(&other, "k", &runs).await.1.replayed());
    assert_eq!(sent().await - before, 1, "a replay is one SET … NX GET");
    let publisher = connect(&server).await.with_sender(Confirming);
    let sets = async || calls_of(&server).await("set");
    let before = sets().await;
    assert!(publish(&publisher, "published").await.executed());
    assert_eq!(sets().await - before, 3, "reservation, completion, and one write more for the message");
    let before = sent().await;
    assert!(publish(&publisher, "published").await.replayed());
    assert_eq!(sent().await - before, 1, "a replay with no message left");

    let _lease = reserved(&owner, "busy").await;
    // The first duplicate of another handle also asks for the remaining time of the lease; later duplicates need
    // one command.
    call(&other, "busy", &runs).await.0.unwrap_err();
    for _ in 0..5 {
        let before = sent().await;
        let (result, _) = call(&other, "busy", &runs).await;
        assert!(matches!(result, Err(Error::InProgress { .. })));
        assert_eq!(sent().await - before, 1);
    }
}

#[tokio::test]
async fn ten_thousand_leases_are_renewed_in_short_calls() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let leases = futures::future::join_all((0..10_000).map(|n| {
        let store = store.clone();
        async move { reserved(&store, &format!("k{n}")).await }
    }))
    .await;
    let before = calls_of(&server).await("evalsha");
    let answers = renew_all(&store, &leases).await.unwrap();
    assert!(answers.iter().all(|answer| *answer == Verdict::Applied));
    let calls = calls_of(&server).await("evalsha") - before;
    assert_eq!(calls, 100, "100 leases a call bound how long the server does nothing else");
}

// Several connections and processes.

#[tokio::test]
async fn a_waiter_of_another_process_is_woken() {
    for kind in [Kind::Redis, Kind::Valkey] {
        waiters_are_woken(&RedisServer::start(kind)).await;
    }
}

async fn waiters_are_woken(server: &RedisServer) {
    let (owner, waiter) = (connect(server).await, connect(server).await);
    let plain = RedisStore::options().connect_over(server.raw().await).await.unwrap();
    for (n, waiting) in [waiter, plain].into_iter().enumerate() {
        let name = format!("k{n}");
        let lease = reserved(&owner, &name).await;
        let runs = AtomicU32::new(0);
        let policy = POLICY.in_progress(InProgress::Wait(LEASE));
        let operation = Operation::new(&waiting, Key::new("test", &name), policy);
        let body = async { Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst)) };
        let duplicate = observe(operation.run(body));
        let finish = async {
            // The completion comes after the waiter has marked the record.
            if n == 0 {
                let mut raw = server.raw().await;
                loop {
                    let value: Vec<u8> = raw.get(format!("idem:1/test/{name}")).await.unwrap();
                    if value[format::FLAGS_AT] & format::FLAG_WAITED_FOR != 0 {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
            }
            assert_eq!(owner.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
        };
        let ((result, outcome), ()) = tokio::join!(duplicate, finish);
        assert_eq!(result.unwrap(), 42);
        assert!(outcome.replayed());
        assert_eq!(runs.into_inner(), 0);
    }
}

#[tokio::test]
async fn a_store_uses_a_connection_or_client_of_the_user() {
    let server = RedisServer::start(Kind::Redis);
    let client = redis::Client::open(server.url()).unwrap();
    let mut own = raw(&server.url()).await;
    let stores = [
        RedisStore::options().connect_with(client).await.unwrap(),
        RedisStore::options().connect_over(own.clone()).await.unwrap(),
    ];
    let runs = AtomicU32::new(0);
    for store in stores {
        assert_eq!(call(&store, "k", &runs).await.0.unwrap(), 1);
    }
    let _: () = own.set("still", "usable").await.unwrap();
}

#[tokio::test]
async fn processes_race_for_the_same_keys() {
    let server = RedisServer::start(Kind::Redis);
    let spec = format!("redis {} race:", server.url());
    let race = Race::new(env!("CARGO_BIN_EXE_racer"), &spec);
    let effects = race.run(async {}).await;
    assert!(
        effects.repeated() <= race.kills,
        "only a killed process may leave an effect without a record: {effects:?}"
    );
}

// Lists of records.

#[tokio::test]
async fn redis_lists_records_only_if_the_filter_asks_for_a_scan() {
    let server = RedisServer::start(Kind::Redis);
    let store = RedisStore::options().namespace("a*[b]?:").holder("worker-7").connect(&server.url()).await.unwrap();
    let other = RedisStore::options().namespace("axbb:").connect(&server.url()).await.unwrap();
    call(&store, "k", &AtomicU32::new(0)).await.0.unwrap();
    reserved(&other, "other").await;
    let mut raw = server.raw().await;
    let _: () = raw.set("a*[b]?:1/test/foreign", "not a record").await.unwrap();
    let _: () = raw.lpush("a*[b]?:1/test/list", "of another type").await.unwrap();

    let operator = store.operator();
    let refused = operator.list(&Filter::new()).await.unwrap_err();
    assert!(matches!(refused, OperatorError::Unsupported { .. }), "{refused:?}");
    assert!(refused.to_string().contains("Filter::scan"), "{refused}");
    let stats = operator.stats(&Filter::new().scan(), u64::MAX).await.unwrap();
    let total = stats.total();
    assert_eq!((total.total(), total.of(Standing::Completed), total.of(Standing::Damaged)), (2, 1, 1));
    assert_eq!(stats.unreadable, 1, "a value of another type");
    let page = operator.list(&Filter::new().scan().scope("test").standing(Standing::Completed)).await.unwrap();
    let holders: Vec<_> = page.records.iter().map(|(_, found)| found.holder().and_then(|it| it.name())).collect();
    assert_eq!(holders, [Some("worker-7")]);
    for cursor in ["1/test/k", "|", "|x", "|-1"] {
        let wrong = operator.list(&Filter::new().scan().after(Cursor::new(cursor))).await.unwrap_err();
        assert!(matches!(wrong, OperatorError::Unsupported { .. }), "{cursor}: {wrong:?}");
    }
    store.ping().await.unwrap();
}
