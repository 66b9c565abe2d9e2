//! `RedisStore` on clusters, behind sentinels, and with replicas that must confirm writes: failovers, and the writes
//! that a failover loses.
#![allow(
    clippy::similar_names,
    clippy::maybe_infinite_iter,
    reason = "the names are those of the nodes, and each of them serves some key"
)]
// The futures of these tests are deep: they contain a store, its lanes and its connection.
#![recursion_limit = "256"]
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_runtime::record::{State, StoredResult};
use idem_runtime::redis::RedisOptions;
use idem_runtime::store::{Inspection, Lease, Release, Reservation, Verdict, renew_all};
use idem_runtime::{Disposition, Error, Operation, RedisStore, Store, StoreError, StoreErrorKind, observe};
use idem_tests::calls::{LEASE, POLICY, call, call_with, done, key, lease_of, request};
use idem_tests::cluster::{Cluster, NAME, Watched, ask, field, pair, replicas_online, until, wait_until};
use idem_tests::race::{Orders, Race};
use idem_tests::server::{Kind, RedisServer, free_port};
use redis::Value;

/// Silence after which a replica replaces a primary, in milliseconds: long for a live process, short for a test.
const NODE_TIMEOUT: u32 = 2000;
/// Silence after which the sentinels replace a primary, in milliseconds.
const DOWN_AFTER: u32 = 1500;

/// Key of the record of `name` on the servers.
fn record_of(name: &str) -> String {
    format!("idem:1/test/{name}")
}

async fn reserved(store: &RedisStore, name: &str) -> Lease {
    let request = request(store, name);
    lease_of(Ok(answered(async || store.reserve(&request).await).await))
}

/// Repeats a store call until it succeeds, because a failover or a slow replica makes calls fail for a while.
async fn answered<T>(mut call: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
}

/// Options with short time limits, because the servers of these tests hang on purpose.
fn options() -> RedisOptions {
    RedisStore::options().response_timeout(Duration::from_millis(500))
}

/// Options under which the replica of each primary confirms every write.
fn replicated() -> RedisOptions {
    options().min_replicas(1, Duration::from_millis(500))
}

/// Reports whether the server on `port` considers itself a primary.
fn is_primary(port: u16) -> bool {
    field(port, "INFO replication", "role").as_deref() == Some("master")
}

/// Runs `test` for each of `cases` on its own thread, because the tests mostly wait.
fn side_by_side<C: Copy + Send + Sync>(cases: [C; 2], test: impl AsyncFn(C) + Sync) {
    std::thread::scope(|scope| {
        let tests = cases.map(|case| {
            let test = &test;
            scope.spawn(move || {
                let mut runtime = tokio::runtime::Builder::new_multi_thread();
                runtime.worker_threads(2).enable_all().build().unwrap().block_on(test(case));
            })
        });
        let ended = tests.map(std::thread::ScopedJoinHandle::join);
        assert!(ended.iter().all(Result::is_ok), "see above");
    });
}

// Failovers while handlers run.

/// Handlers that are called with one new key after the other until `stop` is set. Each message is delivered until it is
/// acknowledged.
struct Load {
    store: RedisStore,
    stop: Arc<AtomicBool>,
    workers: Vec<tokio::task::JoinHandle<()>>,
    report: Arc<Mutex<BTreeMap<String, Done>>>,
    served: Arc<AtomicUsize>,
}

/// Result of the call that ended the deliveries of one key, and the number of runs of the key's body.
#[derive(Debug)]
struct Done {
    result: u32,
    runs: u32,
    /// Number of failed calls before the result.
    failed: usize,
}

impl Load {
    fn start(store: &RedisStore) -> Self {
        let (stop, report, served) = (Arc::default(), Arc::default(), Arc::default());
        let workers = (0..8)
            .map(|worker| {
                let (store, stop) = (store.clone(), Arc::<AtomicBool>::clone(&stop));
                let (report, served) = (Arc::clone(&report), Arc::<AtomicUsize>::clone(&served));
                tokio::spawn(async move {
                    for n in 0.. {
                        if stop.load(Ordering::SeqCst) {
                            return;
                        }
                        let name = format!("{worker}-{n}");
                        let done = Self::serve(&store, &name).await;
                        let report: &Mutex<BTreeMap<_, _>> = &report;
                        report.lock().unwrap().insert(name, done);
                        served.fetch_add(1, Ordering::SeqCst);
                        tokio::time::sleep(Duration::from_millis(3)).await;
                    }
                })
            })
            .collect();
        Self { store: store.clone(), stop, workers, report, served }
    }

    async fn serve(store: &RedisStore, name: &str) -> Done {
        let (runs, mut failed) = (AtomicU32::new(0), 0);
        loop {
            let (result, outcome) = call_with(store, name, POLICY.lease(Duration::from_millis(900)), &runs).await;
            match (result, outcome.disposition()) {
                (Ok(result), Disposition::Ack) => return Done { result, runs: runs.into_inner(), failed },
                // Every failed call returns one of these errors, after which the message is delivered again.
                (
                    Err(
                        Error::Store { .. }
                        | Error::Unrecorded { .. }
                        | Error::InProgress { .. }
                        | Error::LeaseLost { .. },
                    ),
                    Disposition::Retry { .. },
                ) => {
                    failed += 1;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    /// Waits until `more` further keys are done, which shows that the store works.
    async fn serves(&self, more: usize) {
        let enough = self.served.load(Ordering::SeqCst) + more;
        until("keys are served", async || self.served.load(Ordering::SeqCst) >= enough).await;
    }

    /// Returns the record of `name`. Repeats failed reads, because the store may still follow a failover.
    async fn inspect(&self, name: &str) -> Option<Inspection> {
        let mut failed = 0;
        loop {
            match self.store.inspect(&key(name)).await {
                Ok(found) => return found,
                Err(error) if failed == 50 => panic!("{name}: {error}"),
                Err(_) => failed += 1,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Stops the workers, and compares the acknowledged results with the records. Returns the names of the keys whose
    /// acknowledged results are lost.
    async fn audit(mut self) -> Vec<String> {
        self.stop.store(true, Ordering::SeqCst);
        for worker in std::mem::take(&mut self.workers) {
            worker.await.unwrap();
        }
        let mut lost = Vec::new();
        let report = std::mem::take(&mut *self.report.lock().unwrap());
        for (name, done) in &report {
            assert!(done.runs == 1 || done.failed > 0, "{name}: ran again for no reason: {done:?}");
            match self.inspect(name).await.map(|found| found.record.state) {
                Some(State::Completed(StoredResult::Encoded { bytes, .. })) => {
                    assert_eq!(bytes, done.result.to_string(), "{name}: another result is recorded: {done:?}");
                }
                _ => lost.push(name.clone()),
            }
        }
        assert!(report.len() > 100, "{} keys are no load", report.len());
        lost
    }
}

/// Runs each lost key again: its body runs once, and the result is recorded.
async fn run_again(store: &RedisStore, lost: &[String]) {
    for name in lost {
        let done = Load::serve(store, name).await;
        assert_eq!(done.runs, 1, "{name}: {done:?}");
    }
}

// Clusters.

/// Opens a store on `cluster`, and then resets the nodes' counts of commands and errors, because `connect` sends
/// commands for a key that another node may serve.
async fn connected(cluster: &Cluster) -> RedisStore {
    let store = RedisStore::connect(&cluster.url()).await.unwrap();
    for port in cluster.ports() {
        let _: String = ask(port, "CONFIG RESETSTAT").unwrap();
    }
    store
}

#[tokio::test]
async fn no_command_has_keys_of_two_slots() {
    let cluster = Cluster::start_with(3, 0, 20_000);
    let store = connected(&cluster).await;
    // Text in braces inside a user's key looks like a hash tag to the servers.
    let names: Vec<String> = (0..1500)
        .map(|n| [format!("k{n}"), format!("{{{n}}}x"), format!("}}{{{n}"), format!("{{}}{n}")][n % 4].clone())
        .collect();
    let runs = AtomicU32::new(0);
    for first in [true, false, false] {
        let calls = futures::future::join_all(names.iter().map(|name| call(&store, name, &runs))).await;
        for (name, (result, outcome)) in names.iter().zip(calls) {
            assert!(result.is_ok() && outcome.executed() == first, "{name}: {result:?}");
        }
    }
    let more: Vec<String> = names.iter().map(|name| format!("lease {name}")).collect();
    let leases = futures::future::join_all(more.iter().map(|name| reserved(&store, name))).await;
    let renewed = renew_all(&store, &leases).await.unwrap();
    assert!(renewed.len() == leases.len() && renewed.iter().all(|renewed| *renewed == Verdict::Applied));
    let released = futures::future::join_all(leases.iter().map(|lease| store.release(lease, Release::Returned))).await;
    assert!(released.into_iter().all(|released| released.unwrap() == Verdict::Applied));
    for port in cluster.ports() {
        let errors: String = ask(port, "INFO errorstats").unwrap();
        assert!(!errors.contains("CROSSSLOT"), "{errors}");
        // The servers redirected no request: the store knows the map of the slots, and computes slots as the servers
        // do.
        assert!(!errors.contains("MOVED"), "{errors}");
        let keys: usize = ask(port, "DBSIZE").unwrap();
        assert!(keys > 500, "each node serves a third of the keys: {keys}");
    }
}

/// One call renews at most a hundred leases, all of the same slot.
#[tokio::test]
async fn leases_of_one_slot_are_renewed_by_one_call() {
    let cluster = Cluster::start_with(3, 0, 20_000);
    let store = connected(&cluster).await;
    let names = (0..500).map(|n| format!("{{{}}}{n}", n % 2)).chain((0..300).map(|n| format!("k{n}")));
    let names: Vec<String> = names.collect();
    let leases = futures::future::join_all(names.iter().map(|name| reserved(&store, name))).await;
    let slots: BTreeSet<u16> = names[500..]
        .iter()
        .map(|name| ask(cluster.ports()[0], &format!("CLUSTER KEYSLOT {}", record_of(name))).unwrap())
        .collect();
    let calls = || cluster.ports().into_iter().map(|port| calls_of(port, "evalsha")).sum::<u32>();
    let before = calls();
    let gone = store.release(&leases[0], Release::Returned).await.unwrap();
    assert_eq!((gone, calls() - before), (Verdict::Applied, 1));
    let renewed = renew_all(&store, &leases).await.unwrap();
    assert_eq!(renewed[0], Verdict::Refused, "only the released lease is refused");
    assert!(renewed[1..].iter().all(|renewed| *renewed == Verdict::Applied), "{renewed:?}");
    let made = usize::try_from(calls() - before).unwrap() - 1;
    assert_eq!(
        made,
        2 * 3 + slots.len(),
        "three calls for 250 leases in each of two slots, and one call for each other slot"
    );
    for port in cluster.ports() {
        let errors: String = ask(port, "INFO errorstats").unwrap();
        assert!(!errors.contains("CROSSSLOT") && !errors.contains("MOVED"), "{errors}");
    }
}

/// Number of calls of `command` that a server has received.
fn calls_of(port: u16, command: &str) -> u32 {
    let calls = field(port, "INFO commandstats", &format!("cmdstat_{command}")).unwrap_or_default();
    calls.trim_start_matches("calls=").split(',').next().map_or(0, |calls| calls.parse().unwrap_or(0))
}

/// A cluster has nodes of different versions during an upgrade.
#[tokio::test]
async fn each_node_gets_the_commands_of_its_own_version() {
    for kinds in [[Kind::Valkey; 3], [Kind::Valkey, Kind::Redis, Kind::Valkey]] {
        let cluster = Cluster::start_of(&kinds, 3, 20_000);
        let store = connected(&cluster).await;
        let names: Vec<String> = (0..900).map(|n| format!("k{n}")).collect();
        let runs = AtomicU32::new(0);
        for first in [true, false] {
            let calls = futures::future::join_all(names.iter().map(|name| call(&store, name, &runs))).await;
            for (name, (result, outcome)) in names.iter().zip(calls) {
                assert!(result.is_ok() && outcome.executed() == first, "{kinds:?}: {name}: {result:?}");
            }
        }
        assert_eq!(runs.into_inner(), 900);
        for (kind, port) in kinds.iter().zip(cluster.ports()) {
            let (keys, scripts): (u32, u32) = (ask(port, "DBSIZE").unwrap(), calls_of(port, "evalsha"));
            match kind {
                // In a mixed cluster, a runtime that first connected to a Redis node uses scripts on this Valkey node
                // too, until it learns that this node has commands that compare values.
                Kind::Valkey if kinds[1] == Kind::Valkey => assert_eq!(scripts, 0, "of {keys}"),
                Kind::Valkey => assert!(scripts <= keys, "{scripts} of {keys}"),
                _ => assert!(scripts >= keys, "{scripts} of {keys}"),
            }
        }
    }
}

#[test]
fn a_killed_primary_of_a_cluster_is_replaced_under_load() {
    side_by_side([false, true], async |confirmed| {
        let mut cluster = Cluster::start(NODE_TIMEOUT);
        let options = if confirmed { replicated() } else { options() };
        let store = options.connect(&cluster.url()).await.unwrap();
        let load = Load::start(&store);
        load.serves(100).await;
        cluster.nodes[0].kill();
        let replica = cluster.nodes[3].port();
        until("the replica is promoted", async || is_primary(replica)).await;
        if confirmed {
            // The promoted node confirms no write until it has a replica of its own.
            cluster.nodes[0].run();
        }
        load.serves(500).await;
        let lost = load.audit().await;
        assert!(!confirmed || lost.is_empty(), "confirmed, and lost: {lost:?}");
        // A result is lost if only the killed node has stored it.
        run_again(&store, &lost).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_failover_of_a_cluster_loses_no_result() {
    // No live server is silent for this node time-out of 5 s, so only the command below starts a failover.
    let cluster = Cluster::start(5000);
    let store = options().connect(&cluster.url()).await.unwrap();
    let load = Load::start(&store);
    load.serves(100).await;
    for (replica, primary) in [(3, 0), (4, 1), (0, 3)] {
        let (new, old) = (cluster.nodes[replica].port(), cluster.nodes[primary].port());
        let mut looks = 0;
        until("the replica is promoted", async || {
            // Repeat the command, because the servers abandon a failover that takes longer than 5 s.
            if looks % 500 == 0 {
                ask::<Value>(new, "CLUSTER FAILOVER").unwrap();
            }
            looks += 1;
            is_primary(new)
        })
        .await;
        until("the old primary follows", async || !is_primary(old) && replicas_online(new) == 1).await;
        load.serves(200).await;
    }
    assert_eq!(load.audit().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_leaves_a_primary_that_stopped_and_was_replaced() {
    let cluster = Cluster::start(NODE_TIMEOUT);
    let store = replicated().connect(&cluster.url()).await.unwrap();
    let load = Load::start(&store);
    load.serves(100).await;
    cluster.nodes[1].signal("-STOP");
    let replica = cluster.nodes[4].port();
    until("the replica is promoted", async || field(replica, "INFO replication", "role").as_deref() == Some("master"))
        .await;
    // The stopped node continues as a primary and executes requests that it received before its stop. The node discards
    // the effects when it learns of the new primary.
    cluster.nodes[1].signal("-CONT");
    load.serves(500).await;
    assert_eq!(load.audit().await, [""; 0]);
}

#[tokio::test]
async fn answers_of_a_replaced_primary_of_a_cluster_are_not_trusted() {
    let cluster = Cluster::start(NODE_TIMEOUT);
    // The time-out is so long that the store still awaits the stopped node's answer when the node continues and
    // answers.
    let store = RedisStore::options().response_timeout(LEASE).connect(&cluster.url()).await.unwrap();
    let name = (0..1000).map(|n| format!("k{n}")).find(|name| cluster.serves(&record_of(name)) == Some(0)).unwrap();
    cluster.nodes[0].signal("-STOP");
    let request = request(&store, &name);
    let in_flight = tokio::spawn({
        let (store, request) = (store.clone(), request.clone());
        async move { store.reserve(&request).await }
    });
    let replica = cluster.nodes[3].port();
    until("the replica is promoted", async || field(replica, "INFO replication", "role").as_deref() == Some("master"))
        .await;
    // An answered `inspect` shows that the store uses the new primary.
    until("the store knows the new primary", async || {
        tokio::time::timeout(Duration::from_millis(200), store.inspect(&key(&name))).await.is_ok()
    })
    .await;
    cluster.nodes[0].signal("-CONT");
    let error = in_flight.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unconfirmed, "{error}");
    let answer = store.reserve(&request).await.unwrap();
    assert!(matches!(answer, Reservation::Granted { .. }), "{answer:?}");
    assert!(ask::<usize>(replica, &format!("EXISTS {}", record_of(&name))).unwrap() == 1);
}

/// Renews `leases` by `handle`. The leases that `silent` marks are on a stopped node: their renewals hang, and all
/// other leases must be renewed meanwhile.
async fn renews_but(handle: &dyn Store, leases: &[Lease], silent: &[bool], how: &str) {
    let answered = Mutex::new(vec![None; leases.len()]);
    let answer = |at: usize, write| answered.lock().unwrap()[at] = Some(write);
    let healthy = until("all leases on healthy nodes are renewed", async || {
        let answered = answered.lock().unwrap();
        silent.iter().zip(answered.iter()).all(|(silent, write)| *silent || *write == Some(Verdict::Applied))
    });
    tokio::select! {
        renewed = handle.renew(leases, &answer) => panic!("{how}: the renewal waited for the silent node: {renewed:?}"),
        () = healthy => {}
    }
    let answered = answered.into_inner().unwrap();
    let early = silent.iter().zip(&answered).filter(|(silent, write)| **silent && write.is_some());
    assert_eq!(early.count(), 0, "{how}");
}

#[test]
fn a_stopped_node_delays_only_its_own_keys() {
    side_by_side([false, true], async |confirmed| {
        // No replica replaces the silent node, and the store awaits the node's answers for the whole test.
        let cluster = Cluster::start(60_000);
        let patient = || RedisStore::options().response_timeout(LEASE);
        let options = || if confirmed { patient().min_replicas(1, Duration::from_secs(5)) } else { patient() };
        let store = options().connect(&cluster.url()).await.unwrap();
        let names: Vec<_> = (0..120).map(|n| format!("k{n}")).collect();
        let leases = futures::future::join_all(names.iter().map(|name| reserved(&store, name))).await;
        let on_first = |name: &str| cluster.serves(&record_of(name)) == Some(0);
        let silent: Vec<_> = names.iter().map(|name| on_first(name)).collect();
        assert!(silent.contains(&true) && silent.contains(&false));
        // The slot of this key moves from the second node to the third node. The store does not know of the move.
        let moved =
            (0..).map(|n| format!("moved{n}")).find(|name| cluster.serves(&record_of(name)) == Some(1)).unwrap();
        let named = |prefix: &str, first: bool, count: usize| -> Vec<String> {
            let names = (0..).map(|n| format!("{prefix}{n}"));
            names.filter(|name| on_first(name) == first).take(count).collect()
        };
        let (hanging, more) = (named("hanging", true, 20), named("more", false, 60));
        cluster.nodes[0].signal("-STOP");
        let (from, to) = (cluster.nodes[1].port(), cluster.nodes[2].port());
        let slot: u16 = ask(from, &format!("CLUSTER KEYSLOT {}", record_of(&moved))).unwrap();
        let to_id: String = ask(to, "CLUSTER MYID").unwrap();
        for port in [to, from] {
            ask::<Value>(port, &format!("CLUSTER SETSLOT {slot} NODE {to_id}")).unwrap();
        }

        // Leases are renewed on existing connections, on new connections of the upkeep, and on a runtime without
        // connections.
        let upkeep = store.upkeep();
        for round in 0..3 {
            renews_but(&store, &leases, &silent, "a caller").await;
            renews_but(&*upkeep, &leases, &silent, &format!("the upkeep, round {round}")).await;
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    renews_but(&store, &leases, &silent, "another runtime").await;
                    renews_but(&*upkeep, &leases, &silent, "the upkeep on another runtime").await;
                });
            });
        });
        // All operations on other nodes succeed while operations on the stopped node hang.
        let hanging: Vec<_> = hanging.iter().map(|name| request(&store, name)).collect();
        let hang = futures::future::join_all(hanging.iter().map(|request| store.reserve(request)));
        let go_on = async {
            assert_eq!(reserved(&store, &moved).await.attempt, 1);
            for name in &more {
                let lease = reserved(&store, name).await;
                assert_eq!(answered(async || store.finish(&lease, &done()).await).await, Verdict::Applied);
                assert!(store.inspect(&lease.key).await.unwrap().is_some());
            }
            for (lease, _) in leases.iter().zip(&silent).filter(|(_, silent)| !**silent).take(10) {
                assert_eq!(answered(async || store.release(lease, Release::Returned).await).await, Verdict::Applied);
            }
        };
        tokio::select! {
            hung = hang => panic!("the node answers: {hung:?}"),
            () = go_on => {}
        }
        // A store that opens now waits only a moment for the silent node.
        let url = cluster.url();
        let opening = options().connect(&url);
        let opened = tokio::time::timeout(LEASE / 2, opening).await.expect("not held up").unwrap();
        renews_but(&opened, &leases[leases.len() - 40..], &silent[leases.len() - 40..], "a new store").await;
        cluster.nodes[0].signal("-CONT");
        let kept = &leases[leases.len() - 40..];
        let renewed = answered(async || renew_all(&store, kept).await).await;
        assert!(renewed.iter().all(|write| *write == Verdict::Applied), "{renewed:?}");
    });
}

#[tokio::test]
async fn a_store_follows_slots_that_move() {
    let cluster = Cluster::start(20_000);
    for (tag, options) in [("a", options()), ("b", replicated())] {
        let store = options.connect(&cluster.url()).await.unwrap();
        let runs = AtomicU32::new(0);
        let name = |n: usize| format!("{{{tag}}}{n}");
        let each = async |range: std::ops::Range<usize>, runs: u32| {
            let count = AtomicU32::new(0);
            let names: Vec<_> = range.map(name).collect();
            let calls = futures::future::join_all(names.iter().map(|name| call(&store, name, &count))).await;
            for (name, (result, _)) in names.iter().zip(calls) {
                assert!(result.is_ok(), "{name}: {result:?}");
            }
            assert_eq!(count.into_inner(), runs);
        };
        each(0..50, 50).await;
        let pending = reserved(&store, &name(1000)).await;
        let held = futures::future::join_all((2000..2010).map(async |n| reserved(&store, &name(n)).await)).await;
        let renews = async || {
            // A renewal fails if the replica confirms it too late. The test then repeats the renewal.
            for _ in 0..20 {
                match renew_all(&store, &held).await {
                    Ok(renewed) => return assert!(renewed.iter().all(|it| *it == Verdict::Applied), "{renewed:?}"),
                    Err(error) => assert!(error.is_transient(), "{error}"),
                }
            }
            panic!("{tag}: leases in one batch with moved keys are never renewed");
        };
        let from = cluster.serves(&record_of(&name(0))).unwrap();
        let to = (from + 1) % 3;
        let (from, to) = (cluster.nodes[from].port(), cluster.nodes[to].port());
        let slot: u16 = ask(from, &format!("CLUSTER KEYSLOT {}", record_of(&name(0)))).unwrap();
        let say = |port: u16, command: &str| ask::<Value>(port, command).unwrap();
        let (from_id, to_id): (String, String) = (ask(from, "CLUSTER MYID").unwrap(), ask(to, "CLUSTER MYID").unwrap());
        say(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}"));
        say(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {to_id}"));
        // The old node answers for existing records, and redirects new keys to the other node (`ASK`).
        each(0..100, 50).await;
        assert_eq!(ask::<usize>(to, &format!("CLUSTER COUNTKEYSINSLOT {slot}")).unwrap(), 50);
        let begun_there = reserved(&store, &name(1001)).await;
        assert_eq!(renew_all(&store, std::slice::from_ref(&begun_there)).await.unwrap(), [Verdict::Applied]);
        // One call renews leases whose records have moved, and leases whose records have not moved.
        renews().await;
        let moved: Vec<String> = (2000..2004).map(|n| record_of(&name(n))).collect();
        say(from, &format!("MIGRATE 127.0.0.1 {to} {EMPTY} 0 5000 KEYS {}", moved.join(" ")));
        renews().await;
        let errors: String = [from, to].map(|port| ask::<String>(port, "INFO errorstats").unwrap()).concat();
        assert!(errors.contains("TRYAGAIN"), "{errors}");
        // Half of the slot's records move.
        let keys: Vec<String> = ask(from, &format!("CLUSTER GETKEYSINSLOT {slot} 25")).unwrap();
        say(from, &format!("MIGRATE 127.0.0.1 {to} {EMPTY} 0 5000 KEYS {}", keys.join(" ")));
        each(0..100, 0).await;
        let keys: Vec<String> = ask(from, &format!("CLUSTER GETKEYSINSLOT {slot} 1000")).unwrap();
        say(from, &format!("MIGRATE 127.0.0.1 {to} {EMPTY} 0 5000 KEYS {}", keys.join(" ")));
        each(0..120, 20).await;
        say(to, &format!("CLUSTER SETSLOT {slot} NODE {to_id}"));
        say(from, &format!("CLUSTER SETSLOT {slot} NODE {to_id}"));
        // The whole slot has moved, and the old node redirects every key (`MOVED`).
        each(0..150, 30).await;
        renews().await;
        assert_eq!(store.finish(&pending, &done()).await.unwrap(), Verdict::Applied);
        assert_eq!(store.finish(&begun_there, &done()).await.unwrap(), Verdict::Applied);
        assert_eq!(call(&store, &name(1000), &runs).await.0.unwrap(), 42);
        assert_eq!(runs.into_inner(), 0);
    }
}

/// Empty argument of a command, for [`ask`].
const EMPTY: &str = "''";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_race_while_a_cluster_fails_over() {
    let mut cluster = Cluster::start(NODE_TIMEOUT);
    let url = cluster.url();
    let spec = format!("replicated {url} race:");
    let race = Race { keys: 400, racers: 4, kills: 6, ..Race::new(env!("CARGO_BIN_EXE_racer"), &spec) };
    let effects = race
        .run(async {
            let keys = || (0..3).map(|n| ask::<usize>(cluster.nodes[n].port(), "DBSIZE").unwrap_or(0)).sum::<usize>();
            until("the race is on", async || keys() > 40).await;
            cluster.nodes[2].kill();
            let replica = cluster.nodes[5].port();
            until("the replica is promoted", async || is_primary(replica)).await;
            cluster.nodes[2].run();
        })
        .await;
    // The audit of the race checks that the last attempt recorded each key, and that no two attempts overlapped.
    assert_eq!(effects.0.len(), 400);
}

// Failovers by sentinels.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_primary_is_replaced_by_the_sentinels_under_load() {
    let mut watched = Watched::start(DOWN_AFTER);
    let store = options().connect(&watched.url()).await.unwrap();
    let load = Load::start(&store);
    load.serves(100).await;
    let (old, new) = (watched.servers[0].port(), watched.servers[1].port());
    watched.servers[0].kill();
    until("the sentinels name the replica", async || watched.primary() == Some(new)).await;
    load.serves(200).await;
    // The old primary returns as a primary, and accepts writes until the sentinels demote it.
    watched.servers[0].run();
    ask::<Value>(old, "SET still yes").ok();
    let late = options().connect(&watched.url()).await.unwrap();
    reserved(&late, "late").await;
    let before = store.inspect(&key("late")).await.unwrap();
    assert!(before.is_some(), "the reservation and the read used the new primary");
    load.serves(200).await;
    // Whether the old server is still a primary or already a replica, no store writes to it.
    let writes = field(old, "INFO commandstats", "cmdstat_evalsha").is_some();
    assert!(!writes, "the stale primary ran a script");
    let lost = load.audit().await;
    run_again(&store, &lost).await;
}

#[tokio::test]
async fn answers_of_a_primary_that_the_sentinels_replaced_are_not_trusted() {
    let watched = Watched::start(DOWN_AFTER);
    let store = RedisStore::options().response_timeout(LEASE).connect(&watched.url()).await.unwrap();
    let (old, new) = (&watched.servers[0], watched.servers[1].port());
    old.signal("-STOP");
    let request = request(&store, "k");
    let in_flight = tokio::spawn({
        let (store, request) = (store.clone(), request.clone());
        async move { store.reserve(&request).await }
    });
    until("the sentinels name the replica", async || watched.primary() == Some(new)).await;
    // The store learns of the new primary although no request has failed, and no longer uses the connection to the old
    // primary.
    until("the store knows the new primary", async || {
        tokio::time::timeout(Duration::from_millis(200), store.inspect(&key("k"))).await.is_ok()
    })
    .await;
    old.signal("-CONT");
    let error = in_flight.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unconfirmed, "{error}");
    let answer = store.reserve(&request).await.unwrap();
    assert!(matches!(answer, Reservation::Granted { .. }), "{answer:?}");
    assert_eq!(ask::<usize>(new, &format!("EXISTS {}", record_of("k"))), Ok(1));
}

#[tokio::test]
async fn waiting_duplicates_are_woken_after_a_failover_by_the_sentinels() {
    let mut watched = Watched::start(DOWN_AFTER);
    let store = options().connect(&watched.url()).await.unwrap();
    let heard = |port: u16| ask(port, "PUBSUB NUMSUB idem:wake").map_or(0, |(_, heard): (String, usize)| heard);
    let lease = reserved(&store, "before").await;
    store.wait(&lease.key, lease.attempt, Duration::from_millis(1)).await.unwrap();
    until("subscribed", async || heard(watched.servers[0].port()) == 1).await;
    watched.servers[0].kill();
    until("subscribed at the new primary", async || heard(watched.servers[1].port()) == 1).await;
    let lease = reserved(&store, "after").await;
    let waiting = tokio::spawn({
        let (store, lease) = (store.clone(), lease.clone());
        async move { store.wait(&lease.key, lease.attempt, LEASE).await }
    });
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    waiting.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_race_while_the_sentinels_fail_over() {
    let mut watched = Watched::start(DOWN_AFTER);
    let url = watched.url();
    let spec = format!("replicated {url} race:");
    let race = Race { keys: 400, racers: 4, kills: 6, ..Race::new(env!("CARGO_BIN_EXE_racer"), &spec) };
    race.run(async {
        let (old, new) = (watched.servers[0].port(), watched.servers[1].port());
        until("the race is on", async || ask::<usize>(old, "DBSIZE").unwrap_or(0) > 40).await;
        watched.servers[0].kill();
        until("the sentinels name the replica", async || watched.primary() == Some(new)).await;
        // The promoted node confirms no write until it has a replica. The test sends the old primary the command that
        // the sentinels would send later.
        watched.servers[0].run();
        ask::<Value>(old, &format!("REPLICAOF 127.0.0.1 {new}")).unwrap();
    })
    .await;
}

// Acknowledged writes, with and without `min_replicas`.

/// Disconnects the replica, so that only the primary has the writes from now on.
fn cut_off(primary: u16, replica: u16) {
    for setting in ["masteruser nobody", "masterauth wrong"] {
        ask::<Value>(replica, &format!("CONFIG SET {setting}")).unwrap();
    }
    ask::<Value>(primary, "CLIENT KILL TYPE replica").unwrap();
    wait_until("the replica is cut off", || replicas_online(primary) == 0);
}

/// A primary and its replica: in a cluster, or behind sentinels.
enum Pair {
    Cluster(Cluster),
    Watched(Watched),
}

#[derive(Clone, Copy)]
enum Topology {
    Cluster,
    Watched,
}

const BOTH: [Topology; 2] = [Topology::Cluster, Topology::Watched];

impl Pair {
    fn start(topology: Topology) -> Self {
        match topology {
            // A cluster with one primary has no other primaries that could elect a successor.
            Topology::Cluster => Self::Cluster(Cluster::start(NODE_TIMEOUT)),
            Topology::Watched => Self::Watched(Watched::start(DOWN_AFTER)),
        }
    }

    fn url(&self) -> String {
        match self {
            Self::Cluster(cluster) => cluster.url(),
            Self::Watched(watched) => watched.url(),
        }
    }

    fn servers(&mut self) -> (&mut RedisServer, u16) {
        let (servers, replica) = match self {
            Self::Cluster(cluster) => (&mut cluster.nodes, 3),
            Self::Watched(watched) => (&mut watched.servers, 1),
        };
        let replica = servers[replica].port();
        (&mut servers[0], replica)
    }

    /// Returns a name whose record is on the first server of the pair.
    fn name(&self, prefix: &str) -> String {
        let names = (0..).map(|n| format!("{prefix}{n}"));
        match self {
            Self::Cluster(cluster) => {
                names.into_iter().find(|name| cluster.serves(&record_of(name)) == Some(0)).unwrap()
            }
            Self::Watched(_) => format!("{prefix}0"),
        }
    }

    /// Kills the first server, and waits until its replica has replaced it.
    async fn fail_over(&mut self) {
        let (primary, replica) = self.servers();
        primary.kill();
        until("the replica is promoted", async || is_primary(replica)).await;
        match self {
            Self::Cluster(cluster) => cluster.wait_agreed(),
            Self::Watched(watched) => {
                until("the sentinels agree", async || watched.primary() == Some(replica)).await;
            }
        }
    }
}

#[test]
fn an_unreplicated_result_is_lost_with_the_primary_and_runs_again() {
    side_by_side(BOTH, async |topology| {
        let mut pair = Pair::start(topology);
        let store = options().connect(&pair.url()).await.unwrap();
        let (finished, running) = (pair.name("finished"), pair.name("running"));
        let (primary, replica) = pair.servers();
        let runs = AtomicU32::new(0);
        cut_off(primary.port(), replica);
        // Only the primary has these two records.
        assert_eq!(call(&store, &finished, &runs).await.0.unwrap(), 1);
        let lease = reserved(&store, &running).await;
        pair.fail_over().await;
        // The finished operation is forgotten: it runs again, and its fencing tokens start over.
        assert!(answered(async || store.inspect(&key(&finished)).await).await.is_none());
        let (result, outcome) = call(&store, &finished, &runs).await;
        assert_eq!((result.unwrap(), outcome.executed(), outcome.attempt()), (2, true, Some(1)));
        // The pending reservation is forgotten too: another attempt runs concurrently with the same attempt number. The
        // first attempt loses its lease at its next write.
        let other = reserved(&store, &running).await;
        assert_eq!((lease.attempt, other.attempt), (1, 1));
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Refused);
        assert_eq!(store.finish(&other, &done()).await.unwrap(), Verdict::Applied);
    });
}

#[test]
fn with_min_replicas_an_unreplicated_result_was_never_acknowledged() {
    side_by_side(BOTH, async |topology| {
        let mut pair = Pair::start(topology);
        let store = replicated().connect(&pair.url()).await.unwrap();
        let names = ["replayed", "finished", "unreserved", "held"].map(|name| pair.name(name));
        let [replayed, finished, unreserved, held] = &names;
        let (primary, replica) = pair.servers();
        let port = primary.port();
        let runs = AtomicU32::new(0);
        let lease = reserved(&store, replayed).await;
        assert_eq!(answered(async || store.finish(&lease, &done()).await).await, Verdict::Applied);
        let lease = reserved(&store, held).await;
        // The replica is disconnected while the body runs: the primary has the result, but the caller gets
        // `Unrecorded`.
        let body = async {
            cut_off(port, replica);
            Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst) + 1)
        };
        let policy = POLICY.lease(Duration::from_secs(2));
        let operation = Operation::new(&store, Ok(key(finished)), policy);
        let (result, outcome) = observe(operation.run(body)).await;
        assert!(matches!(result, Err(Error::Unrecorded { .. })), "{result:?}");
        assert!(!outcome.recorded());
        assert_eq!(ask::<usize>(port, &format!("EXISTS {}", record_of(finished))), Ok(1));
        // A duplicate gets no replay either, because a failover would lose the result.
        let (result, _) = call(&store, finished, &runs).await;
        assert!(matches!(result, Err(Error::Store { .. })), "{result:?}");
        // A reservation without a replica's confirmation starts no body.
        let (result, _) = call(&store, unreserved, &runs).await;
        let Err(Error::Store { source, .. }) = result else { panic!("{result:?}") };
        assert_eq!(source.kind(), StoreErrorKind::Unconfirmed, "{source}");
        assert_eq!(runs.load(Ordering::SeqCst), 1);
        // A renewal without a replica's confirmation fails. A duplicate still gets `InProgress`, because no caller
        // relies on this answer.
        let error = renew_all(&store, std::slice::from_ref(&lease)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unconfirmed, "{error}");
        let pending = store.reserve(&request(&store, held)).await.unwrap();
        assert!(matches!(pending, Reservation::InProgress { attempt: 1, .. }), "{pending:?}");

        pair.fail_over().await;
        // The new primary has every acknowledged record.
        let inspected = answered(async || store.inspect(&key(replayed)).await).await;
        assert!(inspected.unwrap().record.is_finished());
        let inspected = answered(async || store.inspect(&key(held)).await).await.unwrap();
        assert_eq!(inspected.record.owner, lease.owner);
        // The result was not acknowledged: the record is pending, its lease lapses, and the next attempt has the next
        // number.
        let inspected = answered(async || store.inspect(&key(finished)).await).await.unwrap();
        assert!(matches!(inspected.record.state, State::Pending { .. }), "{inspected:?}");
        // The old primary returns as a replica of the new one, and writes are confirmed again.
        let (old, new) = pair.servers();
        old.run();
        if let Pair::Watched(watched) = &pair {
            ask::<Value>(watched.servers[0].port(), &format!("REPLICAOF 127.0.0.1 {new}")).unwrap();
        }
        wait_until("a replica again", || replicas_online(new) == 1);
        let attempt = loop {
            match call_with(&store, finished, policy, &runs).await {
                (Ok(run), outcome) => break (run, outcome.attempt()),
                // The call is repeated if the replica is slow.
                (Err(Error::Store { .. } | Error::InProgress { .. } | Error::Unrecorded { .. }), _) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                (Err(error), _) => panic!("{error}"),
            }
        };
        assert!(matches!(attempt, (2.., Some(2..))), "{attempt:?}");
        assert_eq!(answered(async || store.finish(&lease, &done()).await).await, Verdict::Applied);
    });
}

/// `WAIT` covers only writes of its own connection: after an operation that wrote nothing, `WAIT` returns immediately,
/// although no replica may have the record that the operation found.
#[tokio::test]
async fn a_found_record_does_not_count_as_replicated() {
    for kind in [Kind::Redis, Kind::Valkey] {
        let (primary, replica) = pair(kind);
        let connect = async || replicated().connect(&primary.url()).await.unwrap();
        let unconfirmed = |error: StoreError| {
            assert_eq!(error.kind(), StoreErrorKind::Unconfirmed, "{kind:?}: {error}");
            assert!(error.to_string().contains("min_replicas"), "{kind:?}: {error}");
        };
        let store = connect().await;
        let (finished, released) = (reserved(&store, "finished").await, reserved(&store, "released").await);
        // The stopped replica is still connected, but far behind.
        replica.signal("-STOP");
        let request = request(&store, "k");
        // In the first round each operation writes. Then the same store and a new store repeat the operations, which
        // change nothing.
        for round in 0..3 {
            let store = if round == 2 { connect().await } else { store.clone() };
            unconfirmed(store.reserve(&request).await.unwrap_err());
            unconfirmed(store.finish(&finished, &done()).await.unwrap_err());
            unconfirmed(store.release(&released, Release::Returned).await.unwrap_err());
            // Three operations share one batch.
            let finish = done();
            let (a, b, c) = futures::join!(
                store.reserve(&request),
                store.finish(&finished, &finish),
                store.release(&released, Release::Returned)
            );
            unconfirmed(a.unwrap_err());
            unconfirmed(b.unwrap_err());
            unconfirmed(c.unwrap_err());
            // A replay needs a confirmation too, because no caller has received the result yet.
            unconfirmed(store.reserve(&self::request(&store, "finished")).await.unwrap_err());
        }
        let times = |name: &str| ask::<i64>(primary.port(), &format!("PEXPIRETIME {}", record_of(name))).unwrap();
        let before = [times("finished"), times("released"), times("k")];
        unconfirmed(store.finish(&finished, &done()).await.unwrap_err());
        unconfirmed(store.reserve(&request).await.unwrap_err());
        assert_eq!([times("finished"), times("released"), times("k")], before, "retentions have not changed");

        replica.signal("-CONT");
        until("the replica has caught up", async || store.reserve(&request).await.is_ok()).await;
        let answer = store.reserve(&request).await.unwrap();
        assert!(matches!(answer, Reservation::Granted { lease: Lease { attempt: 1, .. }, .. }), "{answer:?}");
        assert_eq!(store.finish(&finished, &done()).await.unwrap(), Verdict::Applied);
        assert_eq!(store.release(&released, Release::Returned).await.unwrap(), Verdict::Applied);
        let replay = store.reserve(&self::request(&store, "finished")).await.unwrap();
        assert!(matches!(replay, Reservation::Finished { .. }), "{replay:?}");
    }
}

#[tokio::test]
async fn concurrent_operations_share_wait_commands() {
    let (primary, _replica) = pair(Kind::Redis);
    let store = RedisStore::options().min_replicas(1, Duration::from_secs(5)).connect(&primary.url()).await.unwrap();
    let names: Vec<_> = (0..1000).map(|n| format!("k{n}")).collect();
    let runs = AtomicU32::new(0);
    for first in [true, false] {
        let calls = futures::future::join_all(names.iter().map(|name| call(&store, name, &runs))).await;
        assert!(calls.iter().all(|(result, outcome)| result.is_ok() && outcome.executed() == first));
    }
    let waits = field(primary.port(), "INFO commandstats", "cmdstat_wait").unwrap();
    let waits: usize = waits.trim_start_matches("calls=").split(',').next().unwrap().parse().unwrap();
    assert!((1..=100).contains(&waits), "{waits} waits for 3000 operations");
}

// Errors.

async fn refusal(options: RedisOptions, url: &str) -> StoreError {
    options.connect(url).await.expect_err("refused")
}

#[tokio::test]
async fn connect_refuses_a_url_of_another_topology() {
    let cluster = Cluster::start_with(1, 0, 20_000);
    let single = RedisServer::start(Kind::Redis);
    let watched = Watched::start(20_000);
    let port = cluster.ports()[0];
    let says = async |url: &str, kind: StoreErrorKind, words: &str| {
        let error = refusal(options(), url).await;
        assert_eq!(error.kind(), kind, "{url}: {error}");
        assert!(error.to_string().contains(words), "{url}: {error}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    };
    let wrong = StoreErrorKind::Misconfigured;
    says(&format!("redis://127.0.0.1:{port}"), wrong, "redis-cluster://").await;
    says(&format!("redis-cluster://127.0.0.1:{}", single.port()), wrong, "redis://").await;
    says(&format!("redis-cluster://127.0.0.1:{port}/3"), wrong, "database").await;
    says(&format!("redis-cluster://u:secret@127.0.0.1:{port}?tls=maybe"), wrong, "tls").await;
    says(&format!("redis-cluster://u:secret@127.0.0.1:{port}?color=secret"), wrong, "parameters").await;
    says("redis-cluster://u:secret@", wrong, "host").await;
    says("redis-cluster://u:secret@h:x", wrong, "redis").await;
    let nobody = format!("127.0.0.1:{}", free_port());
    says(&format!("redis-cluster://:secret@{nobody}"), StoreErrorKind::Unavailable, "").await;
    says(&format!("redis-sentinel://:secret@{nobody}/{NAME}"), StoreErrorKind::Unavailable, "").await;
    says(&format!("redis-sentinel://:secret@{nobody}"), wrong, "name").await;
    let sentinels = watched.url();
    says(&sentinels.replace(NAME, "other"), wrong, "no primary of that name").await;
    // A URL needs only one reachable sentinel or node.
    let some = sentinels.replace("redis-sentinel://", &format!("redis-sentinel://{nobody},"));
    reserved(&RedisStore::connect(&some).await.unwrap(), "k").await;
    let some = format!("redis-cluster://{nobody},127.0.0.1:{port}");
    reserved(&RedisStore::connect(&some).await.unwrap(), "k").await;
    // With `min_replicas` a store refuses a raw connection, because a `WAIT` would delay other users of that
    // connection.
    let error = replicated().connect_over(single.raw().await).await.unwrap_err();
    assert_eq!(error.kind(), wrong, "{error}");
}

#[tokio::test]
async fn a_store_logs_in_to_clusters_and_sentinels() {
    let cluster = Cluster::start_with(1, 0, 20_000);
    let watched = Watched::start(20_000);
    let hosts: Vec<_> = watched.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port)).collect();
    let hosts = hosts.join(",");
    let port = cluster.ports()[0];
    ask::<Value>(port, "CONFIG SET requirepass se@cret").unwrap();
    for server in &watched.servers[..1] {
        // The sentinels use the server's default user, whose rights are reduced; only the user `shop` may access keys.
        // The replica has no logins, because no store connects to it.
        ask::<Value>(server.port(), "ACL SETUSER shop on >se@cret ~* &* +@all").unwrap();
        ask::<Value>(
            server.port(),
            "ACL SETUSER default -@all +@connection +role +info +ping +publish +subscribe +replicaof +psync +replconf",
        )
        .unwrap();
    }
    for sentinel in &watched.sentinels {
        ask::<Value>(sentinel.port, "CONFIG SET sentinel-user default").ok();
        ask::<Value>(sentinel.port, "ACL SETUSER watcher on >wa@tcher ~* &* +@all").unwrap();
        ask::<Value>(sentinel.port, "ACL SETUSER default -@all +hello +ping +publish +subscribe").unwrap();
    }
    let good = [
        format!("redis-cluster://:se%40cret@127.0.0.1:{port}"),
        format!("redis-sentinel://shop:se%40cret@{hosts}/{NAME}/2?sentinel_user=watcher&sentinel_password=wa%40tcher"),
    ];
    for url in &good {
        let store = RedisStore::connect(url).await.unwrap_or_else(|error| panic!("{url}: {error}"));
        reserved(&store, "k").await;
    }
    let bad = [
        format!("redis-cluster://127.0.0.1:{port}"),
        format!("redis-cluster://:wrong@127.0.0.1:{port}"),
        good[1].replace("shop:se", "shop:wrong"),
        good[1].replace("=wa", "=wrong"),
    ];
    for url in &bad {
        let error = refusal(options(), url).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}: {error}");
        assert!(!format!("{error:?}").contains("wrong"), "{error:?}");
    }
}

/// The nodes speak TLS to clients, under the host name in their certificate.
#[test]
fn a_store_connects_to_a_cluster_over_tls() {
    let folder = std::env::temp_dir().join(format!("idem-test-cluster-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let made = std::process::Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"])
        .args(["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"])
        .args(["-keyout", &path("key.pem"), "-out", &path("cert.pem")])
        .output()
        .expect("openssl runs; ./scripts/test installs it");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let (tls, bus) = (free_port().to_string(), free_port().to_string());
    let (cert, key) = (path("cert.pem"), path("key.pem"));
    let files = ["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-ca-cert-file", &cert];
    // A node announces its TLS port to clients only with `tls-cluster`.
    let encrypted = ["--tls-port", &tls, "--tls-auth-clients", "no", "--tls-cluster", "yes"];
    let named = ["--cluster-announce-hostname", "localhost", "--cluster-preferred-endpoint-type", "hostname"];
    let of_a_cluster = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-port", &bus];
    let server = RedisServer::start_with(Kind::Redis, &[&files[..], &encrypted, &named, &of_a_cluster].concat());
    ask::<Value>(server.port(), "CLUSTER ADDSLOTSRANGE 0 16383").unwrap();
    wait_until("the cluster is up", || field(server.port(), "CLUSTER INFO", "cluster_state").as_deref() == Some("ok"));
    let (spec, effects) = (format!("redis redis-cluster://localhost:{tls}?tls=true tls:"), path("effects"));
    std::fs::write(&effects, "").unwrap();
    let orders = Orders::plain(spec, &effects, 3);
    // The racer repeats its calls until they succeed.
    let racer = std::process::Command::new("timeout")
        .args(["60", env!("CARGO_BIN_EXE_racer")])
        .args(orders.words())
        // The store runs in another process, because trusted certificates come from environment variables.
        .env("SSL_CERT_FILE", path("cert.pem"))
        .output()
        .unwrap();
    assert!(racer.status.success(), "{}", String::from_utf8_lossy(&racer.stderr));
    assert_eq!(ask::<usize>(server.port(), "DBSIZE"), Ok(3));
    std::fs::remove_dir_all(folder).ok();
}
