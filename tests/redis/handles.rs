//! Handles of one store on several runtimes, for upkeep, and in forked processes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;

use futures::FutureExt;
use idem_tests::server::wait_until;
use tokio::runtime::{Builder, Runtime};

use super::*;

/// Makes a runtime that makes progress only while a thread blocks on one of its futures.
fn lone_runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Checks every operation of a handle.
async fn works(store: &RedisStore, name: &str) {
    let runs = AtomicU32::new(0);
    let names: Vec<_> = (0..50).map(|n| format!("{name} {n}")).collect();
    for first in [true, false] {
        let calls = futures::future::join_all(names.iter().map(|name| call(store, name, &runs))).await;
        assert!(
            calls.iter().all(|(result, outcome)| result.is_ok() && outcome.executed() == first),
            "{name}: {calls:?}"
        );
    }
    let lease = reserved(store, name).await;
    assert_eq!(renew_all(store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied], "{name}");
    store.wait(&lease.key, lease.attempt, Duration::from_millis(1)).await.unwrap();
    assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied, "{name}");
}

/// Number of clients that the server lists, without the client of this query.
fn clients(server: &RedisServer) -> usize {
    lone_runtime().block_on(async {
        let mut raw = server.raw().await;
        let list: String = redis::cmd("CLIENT").arg("LIST").query_async(&mut raw).await.unwrap();
        list.lines().count() - 1
    })
}

#[test]
fn a_store_outlives_the_runtime_that_connected_it() {
    let server = RedisServer::start(Kind::Redis);
    let store = {
        let runtime = lone_runtime();
        let store = runtime.block_on(connect(&server));
        runtime.block_on(works(&store, "first"));
        store
    };
    lone_runtime().block_on(works(&store, "second"));
    // A runtime's connections close when the runtime ends.
    wait_until("the connections are closed", || clients(&server) == 0);
}

#[test]
fn a_stalled_runtime_delays_no_other_runtime_of_its_store() {
    let server = RedisServer::start(Kind::Redis);
    let runtime = lone_runtime();
    let store = runtime.block_on(connect(&server));
    let lease = runtime.block_on(async {
        works(&store, "first").await;
        reserved(&store, "held").await
    });
    // No thread drives the first runtime from here on.
    let elsewhere = lone_runtime();
    elsewhere.block_on(works(&store, "second"));
    assert_eq!(elsewhere.block_on(store.finish(&lease, &done())).unwrap(), Verdict::Applied);
    runtime.block_on(works(&store, "third"));
}

#[test]
fn many_runtimes_share_a_store() {
    let server = RedisServer::start(Kind::Redis);
    let store = lone_runtime().block_on(connect(&server));
    thread::scope(|scope| {
        for thread in 0..8 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..4 {
                    lone_runtime().block_on(works(store, &format!("{thread} {round}")));
                }
            });
        }
    });
    wait_until("the connections are closed", || clients(&server) == 0);
}

#[test]
fn an_operation_outside_of_a_runtime_returns_an_error() {
    let server = RedisServer::start(Kind::Redis);
    let store = lone_runtime().block_on(connect(&server));
    let error = store.reserve(&request(&store, "k")).now_or_never().expect("at once").unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("tokio runtime"), "{error}");
}

// Renewals by the upkeep of a store.

/// A handler blocks the only thread of its runtime, and thus the connection of the store on that runtime.
#[test]
fn upkeep_goes_on_while_a_runtime_is_blocked() {
    let server = RedisServer::start(Kind::Redis);
    for own_client in [false, true] {
        let runtime = lone_runtime();
        let store = runtime.block_on(async {
            match own_client {
                true => RedisStore::options().connect_with(redis::Client::open(server.url()).unwrap()).await.unwrap(),
                false => connect(&server).await,
            }
        });
        let (blocked, is_blocked) = mpsc::channel();
        let (renewed, is_renewed) = mpsc::channel();
        thread::scope(|scope| {
            let (store, name) = (&store, format!("{own_client}"));
            scope.spawn(move || {
                runtime.block_on(async {
                    let lease = reserved(store, &name).await;
                    // These requests have been sent, and their answers wait on the blocked connection.
                    let _ = futures::poll!(Box::pin(store.inspect(&lease.key)));
                    blocked.send(lease.clone()).unwrap();
                    is_renewed.recv().unwrap();
                    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
                });
            });
            let lease = is_blocked.recv().unwrap();
            let upkeep = store.upkeep();
            lone_runtime().block_on(async {
                for _ in 0..30 {
                    let answers = renew_all(&*upkeep, std::slice::from_ref(&lease)).await.unwrap();
                    assert_eq!(answers, [Verdict::Applied]);
                }
                // The handle for upkeep also makes the late writes of dropped calls: a reservation, and its release.
                let other = reserved(&upkeep, &format!("late {own_client}")).await;
                assert_eq!(upkeep.release(&other, Release::NotStarted).await.unwrap(), Verdict::Applied);
            });
            renewed.send(()).unwrap();
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_renewal_opens_connections_for_upkeep() {
    let server = RedisServer::start(Kind::Redis);
    let proxy = Proxy::to(server.port()).await;
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    let lease = reserved(&store, "k").await;
    let upkeep = store.upkeep();
    assert_eq!(proxy.sent().len(), 1, "the connection is opened at its first use");
    assert!(std::ptr::eq(store.context(), upkeep.context()));
    assert_eq!((store.namespace(), store.response_timeout()), (upkeep.namespace(), upkeep.response_timeout()));
    let before = proxy.sent()[0];
    for _ in 0..10 {
        for upkeep in [&upkeep, &store.upkeep(), &upkeep.upkeep(), &upkeep.handle()] {
            assert_eq!(renew_all(&**upkeep, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
        }
    }
    assert_eq!(proxy.sent().len(), 2, "one more connection, for renewals");
    assert_eq!(upkeep.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    assert_eq!(proxy.sent().len(), 3, "one more connection, for late writes");
    assert_eq!(proxy.sent()[0], before, "nothing by the connection of the callers");
}

/// Results of 1 MiB keep a slow line busy, and ten leases are renewed meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_on_a_slow_line_cost_no_lease() {
    const RESULTS: usize = 48;
    let server = RedisServer::start(Kind::Redis);
    let direct = connect(&server).await;
    let large = Finish::Completed(stored(vec![b'7'; 1024 * 1024]));
    for n in 0..RESULTS {
        let lease = reserved(&direct, &format!("large{n}")).await;
        assert_eq!(direct.finish(&lease, &large).await.unwrap(), Verdict::Applied);
    }
    let proxy = Proxy::to(server.port()).await;
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    proxy.set(Line::Slow(6 * 1024 * 1024));
    // The leases of ten running handlers need renewals over the slow line.
    let policy = POLICY.lease(Duration::from_secs(3));
    let done = Arc::new(Notify::new());
    let handlers: Vec<_> = (0..10)
        .map(|n| {
            let (store, done) = (store.clone(), Arc::clone(&done));
            tokio::spawn(async move {
                let ended = done.notified();
                let body = async {
                    ended.await;
                    Ok::<_, Error>(n)
                };
                let operation = Operation::new(&store, Key::new("test", format!("running{n}")), policy);
                observe(operation.run(body)).await
            })
        })
        .collect();
    until("the calls run", async || store.context().live() == 10).await;
    // Each result is requested again as soon as it has been read, so that the line is busy for more than two leases.
    let since = std::time::Instant::now();
    while since.elapsed() < 7 * Duration::from_secs(1) {
        let requests: Vec<_> = (0..RESULTS).map(|n| request(&store, &format!("large{n}"))).collect();
        let answers = futures::future::join_all(requests.iter().map(|request| store.reserve(request))).await;
        assert!(answers.iter().all(|answer| matches!(answer, Ok(Reservation::Finished { .. }))), "no replay is lost");
    }
    done.notify_waiters();
    for handler in handlers {
        let (result, outcome) = handler.await.unwrap();
        assert!(result.is_ok() && outcome.recorded(), "{result:?}");
    }
}

// Forked processes.

const ALONE: &str = "IDEM_TEST_ALONE";

/// Runs in its own process, because a fork copies the locks that threads of other tests hold.
#[test]
fn a_forked_process_does_not_use_the_connections_of_its_parent() {
    if std::env::var_os(ALONE).is_none() {
        let name = "handles::a_forked_process_does_not_use_the_connections_of_its_parent";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let ended = alone.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let (said, wrong) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
        assert!(ended.status.success() && said.contains("1 passed"), "{said}{wrong}");
        return;
    }
    let server = RedisServer::start(Kind::Redis);
    let proxies = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let proxy = proxies.block_on(Proxy::to(server.port()));
    let runtime = lone_runtime();
    // The parent has connections for calls and for upkeep, and holds a lease.
    let (store, held) = runtime.block_on(async {
        let store = RedisStore::connect(&proxy.url()).await.unwrap();
        works(&store, "parent").await;
        let held = reserved(&store, "held").await;
        let upkeep = store.upkeep();
        assert_eq!(renew_all(&*upkeep, std::slice::from_ref(&held)).await.unwrap(), [Verdict::Applied]);
        (store, held)
    });
    let upkeep = store.upkeep();
    let before = proxy.sent();
    match fork::fork().unwrap() {
        fork::Fork::Child => {
            let worked = catch_unwind(AssertUnwindSafe(|| {
                lone_runtime().block_on(async {
                    works(&store, "child").await;
                    assert_eq!(renew_all(&*upkeep, std::slice::from_ref(&held)).await.unwrap(), [Verdict::Applied]);
                });
                // If the child drops the store, the parent's connections must stay open.
                drop((upkeep, store));
            }));
            std::process::exit(i32::from(worked.is_err()));
        }
        fork::Fork::Parent(child) => {
            let status = fork::waitpid(child).unwrap();
            assert_eq!(status, 0, "the child failed");
        }
    }
    // The child sent nothing over the parent's connections, and the parent can still use these connections.
    let after = proxy.sent();
    assert_eq!(after[..before.len()], before, "the child wrote to a connection of its parent");
    assert!(after.len() > before.len(), "the child has connections of its own");
    runtime.block_on(async {
        works(&store, "parent again").await;
        assert_eq!(renew_all(&*upkeep, std::slice::from_ref(&held)).await.unwrap(), [Verdict::Applied]);
        assert_eq!(store.finish(&held, &done()).await.unwrap(), Verdict::Applied);
    });
    assert_eq!(proxy.sent().len(), after.len(), "the parent opens no new connection");
}

/// A store that was made from a connection of the user has only this connection, which belongs to the parent process.
#[test]
fn a_forked_process_does_not_use_a_connection_that_the_user_gave() {
    if std::env::var_os(ALONE).is_none() {
        let name = "handles::a_forked_process_does_not_use_a_connection_that_the_user_gave";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let ended = alone.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        return;
    }
    let server = RedisServer::start(Kind::Redis);
    let runtime = lone_runtime();
    let store = runtime.block_on(async { RedisStore::options().connect_over(server.raw().await).await.unwrap() });
    match fork::fork().unwrap() {
        fork::Fork::Child => {
            let refused = catch_unwind(AssertUnwindSafe(|| {
                let error = lone_runtime().block_on(store.reserve(&request(&store, "k"))).unwrap_err();
                assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
            }));
            std::process::exit(i32::from(refused.is_err()));
        }
        fork::Fork::Parent(child) => assert_eq!(fork::waitpid(child).unwrap(), 0, "the child failed"),
    }
    runtime.block_on(works(&store, "parent"));
}
