//! Slow lines, long answers, and callers that drop their calls.

use std::task::{Context, Waker};

use idem_runtime::StoreExt;
use idem_tests::Reopen as _;

use super::*;

const MIB: usize = 1024 * 1024;
/// Number of large results.
const RESULTS: usize = 24;
/// Number of bytes that a slow line carries in a second.
const SLOW: u32 = 6 * 1024 * 1024;
/// `response_timeout` of a store on a slow line: longer than the transfer of one result, much shorter than the transfer
/// of all results.
const LIMIT: Duration = Duration::from_secs(1);

/// Records results of 1 MiB, and opens a store behind a proxy.
async fn large_results(server: &RedisServer) -> (RedisStore, Proxy) {
    let direct = connect(server).await;
    let finish = Finish::Completed(stored(vec![b'7'; MIB]));
    for n in 0..RESULTS {
        let lease = reserved(&direct, &format!("large{n}")).await;
        assert_eq!(direct.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
    }
    let proxy = Proxy::to(server.port()).await;
    let store = RedisStore::options().response_timeout(LIMIT).connect(&proxy.url()).await.unwrap();
    (store, proxy)
}

async fn replays(store: &RedisStore) {
    let requests: Vec<_> = (0..RESULTS).map(|n| request(store, &format!("large{n}"))).collect();
    for answer in futures::future::join_all(requests.iter().map(|request| store.reserve(request))).await {
        let answer = answer.unwrap();
        let Reservation::Finished { record: Record { state: State::Completed(payload), .. }, .. } = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(payload.stored_bytes(), MIB);
    }
}

/// The time limit ends a connection only if the server is silent: all slow answers arrive on the existing connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_connection_that_makes_progress_is_kept() {
    let server = RedisServer::start(Kind::Redis);
    let (store, proxy) = large_results(&server).await;
    let before = proxy.sent().len();
    proxy.set(Line::Slow(SLOW));
    let since = std::time::Instant::now();
    replays(&store).await;
    assert!(since.elapsed() > 3 * LIMIT, "the line was not slow");
    // A single result that takes longer than the limit arrives too.
    proxy.set(Line::Pass);
    let direct = connect(&server).await;
    let lease = reserved(&direct, "huge").await;
    let huge = Finish::Completed(stored(vec![b'7'; 16 * MIB]));
    assert_eq!(direct.finish(&lease, &huge).await.unwrap(), Verdict::Applied);
    proxy.set(Line::Slow(SLOW));
    let answer = store.reserve(&request(&store, "huge")).await.unwrap();
    assert!(matches!(answer, Reservation::Finished { .. }), "{answer:?}");
    assert_eq!(proxy.sent().len(), before, "no connection was given up");
}

/// The total time of a slow answer is limited, too.
#[tokio::test]
async fn a_connection_that_carries_too_few_bytes_is_given_up() {
    let server = RedisServer::start(Kind::Redis);
    let (_, proxy) = large_results(&server).await;
    let limit = Duration::from_millis(200);
    let store = RedisStore::options().response_timeout(limit).connect(&proxy.url()).await.unwrap();
    // The line carries some pieces of 16 KiB in each time limit, and would take 10 s for the whole result.
    proxy.set(Line::Slow(100 * 1024));
    let error = store.reserve(&request(&store, "large0")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unconfirmed, "{error}");
    proxy.set(Line::Pass);
    assert!(matches!(store.reserve(&request(&store, "large0")).await, Ok(Reservation::Finished { .. })));
}

/// Once the store knows that answers are large, only a few answers of many concurrent requests are under way at a time.
#[tokio::test]
async fn few_exchanges_with_large_answers_are_under_way_at_a_time() {
    let server = RedisServer::start(Kind::Redis);
    let (store, proxy) = large_results(&server).await;
    // The store measures the size of records by these replays.
    replays(&store).await;
    proxy.set(Line::LoseReplies);
    let requests: Vec<_> = (0..RESULTS).map(|n| request(&store, &format!("large{n}"))).collect();
    let answers = futures::future::join_all(requests.iter().map(|request| store.reserve(request))).await;
    let failed = answers.into_iter().map(Result::unwrap_err);
    let sent = failed.filter(StoreError::may_have_landed).count();
    // The first request is sent alone, and then each lane sends at most one request at a time.
    assert!((1..=4).contains(&sent), "{sent} of {RESULTS} were sent at once");
}

// Dropped calls.

async fn sets(server: &RedisServer) -> u64 {
    let calls = calls_of(server).await;
    calls("set") + calls("mget") + calls("evalsha")
}

/// Drops store calls after their first poll: at that moment the requests are queued, and no lane has sent them yet.
fn drop_at_once<F: Future>(calls: impl Iterator<Item = F>) {
    let calls: Vec<_> = calls
        .map(|call| {
            let mut call = Box::pin(call);
            assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            call
        })
        .collect();
    drop(calls);
}

#[tokio::test]
async fn a_dropped_operation_is_not_sent() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    let finished = reserved(&store, "finished").await;
    assert_eq!(store.finish(&finished, &done()).await.unwrap(), Verdict::Applied);
    let requests: Vec<_> = (0..1000).map(|n| request(&store, &format!("k{n}"))).collect();
    let leases: Vec<_> = (0..100).map(|n| Record::first(&requests[n]).lease(&requests[n])).collect();
    let before = sets(&server).await;
    drop_at_once(requests.iter().map(|request| store.reserve(request)));
    drop_at_once(leases.iter().map(|lease| store.inspect(&lease.key)));
    drop_at_once(leases.iter().map(|lease| store.reopen(&lease.key, 1)));
    drop_at_once(leases.iter().map(|lease| renew_all(&store, std::slice::from_ref(lease))));
    // An answer to this request shows that the lanes have handled all earlier requests.
    assert!(store.inspect(&finished.key).await.unwrap().is_some());
    let sent = sets(&server).await - before;
    assert!(sent <= 1 + 4, "{sent} commands of dropped calls were sent");
    assert!(store.inspect(&requests[999].key).await.unwrap().is_none());
}

#[tokio::test]
async fn the_end_of_an_attempt_is_sent_although_its_caller_is_gone() {
    let server = RedisServer::start(Kind::Redis);
    let store = connect(&server).await;
    for count in [1, 300] {
        // The end of each attempt is sent even if the server has lost the store's scripts meanwhile.
        for forgetful in [false, true] {
            let names =
                |what: &str| -> Vec<_> { (0..count).map(|n| format!("{what} {count} {forgetful} {n}")).collect() };
            let (finishing, releasing) = (names("finishing"), names("releasing"));
            let reserve = async |names: &[String]| -> Vec<Lease> {
                futures::future::join_all(names.iter().map(|name| reserved(&store, name))).await
            };
            let (finishing, releasing) = (reserve(&finishing).await, reserve(&releasing).await);
            if forgetful {
                let mut raw = server.raw().await;
                let _: () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut raw).await.unwrap();
            }
            let finish = done();
            drop_at_once(finishing.iter().map(|lease| store.finish(lease, &finish)));
            drop_at_once(releasing.iter().map(|lease| store.release(lease, Release::Returned)));
            for lease in finishing.iter().chain(&releasing) {
                until("the attempt has ended", async || {
                    !store.inspect(&lease.key).await.unwrap().unwrap().record.is_pending()
                })
                .await;
            }
        }
    }
}

/// Reservations that read the record first are dropped while that read is under way.
#[tokio::test]
async fn a_call_that_is_dropped_between_two_exchanges_reserves_nothing() {
    let server = RedisServer::start(Kind::Redis);
    let (store, proxy) = (connect(&server).await, Proxy::to(server.port()).await);
    let finished: Vec<_> = (0..500).map(|n| format!("finished{n}")).collect();
    let runs = AtomicU32::new(0);
    futures::future::join_all(finished.iter().map(|name| call(&store, name, &runs))).await;
    let slow = RedisStore::connect(&proxy.url()).await.unwrap();
    // After these replays the store expects further replays, and reads a record before it reserves the key.
    futures::future::join_all(finished.iter().map(|name| call(&slow, name, &runs))).await;
    proxy.set(Line::Delay(Duration::from_millis(100)));
    let requests: Vec<_> = (0..200).map(|n| request(&slow, &format!("new{n}"))).collect();
    let before = calls_of(&server).await("mget");
    let reserving = futures::future::join_all(requests.iter().map(|request| slow.reserve(request)));
    let looked = until("the keys were read", async || calls_of(&server).await("mget") > before);
    tokio::select! {
        answers = reserving => panic!("too early: {answers:?}"),
        () = looked => {}
    }
    // The answers to the reads are still under way, but no call waits for them.
    slow.inspect(&requests[0].key).await.unwrap();
    proxy.set(Line::Pass);
    slow.inspect(&requests[0].key).await.unwrap();
    let mut reserved = 0;
    for request in &requests {
        reserved += u32::from(store.inspect(&request.key).await.unwrap().is_some());
    }
    assert!(reserved <= 1, "{reserved} keys were reserved for dropped calls, and only one command was sent alone");
}

/// Calls are dropped at random moments, one at a time, together, and among replays. Then every key must be free, or
/// interrupted if its body began.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_calls_leave_their_keys_as_promised() {
    const CALLS: usize = 1500;
    let server = RedisServer::start(Kind::Redis);
    let proxy = Proxy::to(server.port()).await;
    let (store, direct) = (RedisStore::connect(&proxy.url()).await.unwrap(), connect(&server).await);
    proxy.set(Line::Uneven(Duration::from_millis(3)));
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        for replays in [false, true] {
            // After many replays, the store reads a record before it reserves the key.
            if replays {
                let runs = AtomicU32::new(0);
                let names: Vec<_> = (0..300).map(|n| format!("done{on_crash:?}{n}")).collect();
                for _ in 0..3 {
                    futures::future::join_all(names.iter().map(|name| call(&store, name, &runs))).await;
                }
            }
            let started: Arc<Vec<AtomicU32>> = Arc::new((0..CALLS).map(|_| AtomicU32::new(0)).collect());
            let name = |n: usize| format!("{on_crash:?} {replays} {n}");
            let calls: Vec<_> = (0..CALLS)
                .map(|n| {
                    let (store, name, started) = (store.clone(), name(n), Arc::clone(&started));
                    // The time before a call is dropped ranges from zero to longer than a reservation takes.
                    let patience = Duration::from_micros(n as u64 % 100 * 100);
                    tokio::spawn(async move {
                        let body = async {
                            started[n].fetch_add(1, Ordering::SeqCst);
                            std::future::pending::<Result<u32, Error>>().await
                        };
                        let policy = POLICY.on_crash(on_crash);
                        let operation = Operation::new(&store, Key::new("test", &name), policy);
                        let called = operation.run(body);
                        let _ = tokio::time::timeout(patience, called).await;
                    })
                })
                .collect();
            for call in calls {
                call.await.unwrap();
            }
            store.flush().await;
            // After the late writes, every key must be free, or interrupted if its body had started under `fail`.
            let mut troubled = Vec::new();
            for (n, started) in started.iter().enumerate() {
                let found = direct.inspect(&Key::new("test", name(n)).unwrap()).await.unwrap();
                let state = found.map(|found| found.record.state);
                let started = started.load(Ordering::SeqCst) > 0;
                let right = match (on_crash, started) {
                    (OnCrash::Fail, true) => matches!(state, Some(State::Interrupted)),
                    _ => matches!(state, None | Some(State::Released)),
                };
                if !right {
                    troubled.push((n, started, state));
                }
            }
            let count = troubled.len();
            troubled.truncate(5);
            assert_eq!(count, 0, "{on_crash:?}, replays {replays}: of {CALLS} keys, for example {troubled:?}");
        }
    }
}
