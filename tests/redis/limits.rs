//! Values that a server can't store: the store returns an error that is not transient. Of the connections that other
//! calls use, only a few break.

use super::*;

const MIB: usize = 1024 * 1024;

fn result_of(bytes: usize) -> Finish {
    Finish::Completed(stored(vec![b'7'; bytes]))
}

async fn set(server: &RedisServer, setting: &str, value: &str) {
    let mut raw = server.raw().await;
    let _: () = redis::cmd("CONFIG").arg("SET").arg(setting).arg(value).query_async(&mut raw).await.unwrap();
}

/// Returns the number of connections that the server has accepted, without the connection of this query.
async fn connections(server: &RedisServer) -> u64 {
    let mut raw = server.raw().await;
    let stats: String = redis::cmd("INFO").arg("stats").query_async(&mut raw).await.unwrap();
    let accepted = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    accepted.unwrap().trim().parse::<u64>().unwrap() - 1
}

/// Opens a store whose login may not read the server's settings, so that the store does not know the size limit.
async fn unknowing(server: &RedisServer) -> RedisStore {
    let mut raw = server.raw().await;
    let rules = ["reset", "on", ">secret", "~*", "&*", "+@all", "-config"];
    let _: () = redis::cmd("ACL").arg("SETUSER").arg("worker").arg(&rules).query_async(&mut raw).await.unwrap();
    RedisStore::connect(&format!("redis://worker:secret@127.0.0.1:{}", server.port())).await.unwrap()
}

/// Repeats a `finish` while its error is transient. Returns the last answer and the number of tries.
async fn finally(store: &RedisStore, lease: &Lease, finish: &Finish) -> (Result<Verdict, StoreError>, usize) {
    let mut tries = 0;
    loop {
        tries += 1;
        match store.finish(lease, finish).await {
            Err(error) if error.is_transient() => assert!(tries < 20, "for ever"),
            answer => return (answer, tries),
        }
    }
}

fn too_large(answer: Result<Verdict, StoreError>) {
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TooLarge, "{error}");
}

#[tokio::test]
async fn a_full_server_refuses_every_write() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let leases = [reserved(&store, "alone").await, reserved(&store, "a").await, reserved(&store, "b").await];
    set(&server, "maxmemory", "1").await;
    let finish = done();
    let reserving = async || store.reserve(&request(&store, "new")).await.map(|_| ());
    let finishing = async |lease: &Lease| store.finish(lease, &finish).await.map(|_| ());
    let mut answers = vec![reserving().await, finishing(&leases[0]).await];
    // Concurrent requests fail too. The completions among them share a script.
    let (a, b, c, d) = futures::join!(reserving(), finishing(&leases[0]), finishing(&leases[1]), finishing(&leases[2]));
    answers.extend([a, b, c, d]);
    for answer in answers {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
        assert!(error.to_string().contains("OOM"), "{error}");
    }
    // A process that makes no calls also learns that the server is full.
    let idle = connect(&server).await;
    assert_eq!(idle.ping().await.unwrap_err().kind(), StoreErrorKind::Full);
    assert!(!idle.health().await.is_ready());
    set(&server, "maxmemory", "0").await;
    assert!(idle.health().await.is_ready());
    for lease in &leases {
        assert_eq!(store.finish(lease, &done()).await.unwrap(), Verdict::Applied);
    }
}

#[tokio::test]
async fn a_result_over_the_size_limit_of_the_server_is_not_sent() {
    for kind in [Kind::Redis, Kind::Valkey] {
        for setting in ["--proto-max-bulk-len", "--client-query-buffer-limit"] {
            let server = RedisServer::start_with(kind, &["--appendonly", "no", setting, "1mb"]);
            let store = connect(&server).await;
            let lease = reserved(&store, "k").await;
            let before = connections(&server).await;
            for _ in 0..3 {
                too_large(store.finish(&lease, &result_of(2 * MIB)).await);
            }
            // A result below the limit is stored.
            assert_eq!(
                store.finish(&lease, &result_of(MIB / 2)).await.unwrap(),
                Verdict::Applied,
                "{kind:?} {setting}"
            );
            assert_eq!(connections(&server).await - before, 1, "{kind:?} {setting}: a connection was closed");
        }
    }
}

/// The server refuses the value and closes the connection, and its error message may not arrive. After a few tries the
/// store knows the size limit.
#[tokio::test]
async fn a_store_that_may_not_read_the_size_limit_of_the_server_learns_it() {
    for kind in [Kind::Redis, Kind::Valkey] {
        let server = RedisServer::start_with(kind, &["--appendonly", "no", "--proto-max-bulk-len", "1mb"]);
        let store = unknowing(&server).await;
        let (lease, other) = (reserved(&store, "k").await, reserved(&store, "other").await);
        let (answer, tries) = finally(&store, &lease, &result_of(2 * MIB)).await;
        too_large(answer);
        assert!(tries <= 4, "{kind:?}: {tries} tries");
        let before = connections(&server).await;
        too_large(store.finish(&lease, &result_of(2 * MIB)).await);
        too_large(store.finish(&lease, &result_of(3 * MIB)).await);
        assert_eq!(store.finish(&other, &done()).await.unwrap(), Verdict::Applied);
        assert_eq!(connections(&server).await - before, 1, "{kind:?}: more than the asking connection is open");
    }
}

/// A value that may exceed the size limit is sent on a separate connection.
#[tokio::test]
async fn a_result_over_the_size_limit_of_the_server_fails_no_other_operation() {
    let server = RedisServer::start_with(Kind::Redis, &["--appendonly", "no", "--proto-max-bulk-len", "1mb"]);
    let store = unknowing(&server).await;
    let names: Vec<_> = (0..200).map(|n| format!("k{n}")).collect();
    let leases = futures::future::join_all(names.iter().map(|name| reserved(&store, name))).await;
    let (small, large) = (done(), result_of(2 * MIB));
    let finishes = leases.iter().enumerate().map(|(n, lease)| {
        let (store, finish) = (&store, if n % 50 == 7 { &large } else { &small });
        async move { (n, finally(store, lease, finish).await) }
    });
    for (n, (answer, tries)) in futures::future::join_all(finishes).await {
        if n % 50 == 7 {
            too_large(answer);
        } else {
            assert_eq!((answer.unwrap(), tries), (Verdict::Applied, 1));
        }
    }
}

/// The server closes the connection without a reason.
#[tokio::test]
async fn a_result_that_breaks_several_connections_counts_as_too_large() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let lease = reserved(&store, "k").await;
    // The limit is lowered after the store has read it.
    set(&server, "client-query-buffer-limit", "1mb").await;
    let (answer, tries) = finally(&store, &lease, &result_of(4 * MIB)).await;
    too_large(answer);
    assert!(tries <= 4, "{tries} tries");
    too_large(store.finish(&lease, &result_of(4 * MIB)).await);
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
}

/// The engine records the completion without its result, and later callers get an error that names the reason.
#[tokio::test]
async fn an_operation_whose_result_is_too_large_for_the_server_runs_once() {
    let server = RedisServer::start_with(Kind::Redis, &["--appendonly", "no", "--proto-max-bulk-len", "1mb"]);
    for (name, store) in [("told", connect(&server).await), ("learned", unknowing(&server).await)] {
        let runs = AtomicU32::new(0);
        for first in [true, false] {
            let body = async {
                runs.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Error>("7".repeat(2 * MIB))
            };
            let policy = POLICY.max_result_bytes(8 * MIB);
            let operation = Operation::new(&store, Key::new("test", name), policy);
            let (result, outcome) = observe(operation.run(body)).await;
            match result {
                Ok(result) => assert!(first && result.len() == 2 * MIB, "{name}"),
                Err(error) => {
                    assert!(!first && matches!(error, Error::ResultUnavailable { .. }), "{name}: {error}");
                }
            }
            assert!(outcome.recorded(), "{name}");
        }
        assert_eq!(runs.into_inner(), 1, "{name}");
    }
}
