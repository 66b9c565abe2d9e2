//! Processes that fork in the middle of calls: no child waits for what a thread of its parent holds.
//!
//! A fork copies every lock in the state of that moment, and no thread but the one that forks. The parents here have threads
//! in every part of the library while they fork; each child calls handlers of its own. `IDEM_FORKS` is the number of forks for
//! each store (default: 60).
#![allow(clippy::disallowed_methods, reason = "these tests wait for real processes")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fork::Fork;
use idem_runtime::{Error, InProgress, Key, MemoryStore, Operation, Policy, Store, StoreErrorKind};
use idem_tests::server::{Kind, RedisServer};
#[cfg(feature = "sqlite")]
use idem_tests::sqlite::Folder;
use idem_tests::stores;
use tokio::runtime::Builder;

const ALONE: &str = "IDEM_TEST_ALONE";
/// A child that has taken as long waits for something that does not come: SQLite's answers are due after 30 s.
const DEADLINE: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_millis(100);
/// Handlers of a parent that run at the same time. Every other one has a body that sleeps while its lease is renewed.
const BUSY: u64 = 32;

/// Whether this process runs nothing but the test `name`; otherwise, such a process has run and passed.
fn is_alone(name: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut alone = Command::new(std::env::current_exe().unwrap());
    let ended = alone.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let (said, wrong) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success() && said.contains("1 passed"), "{said}{wrong}");
    false
}

/// Calls a handler whose body sleeps for `sleeps`.
async fn call(store: &dyn Store, key: &str, lease: Duration, sleeps: Duration) -> Result<u32, Error> {
    let policy = Policy::new(Duration::from_secs(3600)).lease(lease).in_progress(InProgress::Wait(LEASE));
    // Renewals may be late on a machine that has much to do.
    let policy = policy.max_pause(Duration::from_secs(3600));
    let body = async {
        tokio::time::sleep(sleeps).await;
        Ok::<_, Error>(1)
    };
    Operation::new(store, Key::new("forks", key), policy).run(body).await
}

/// Whether a child may be refused so. A store in memory and SQLite refuse where the fork met a thread at work in them.
fn is_refused(error: &Error) -> bool {
    let Error::Store { source, .. } = error else { return false };
    source.kind() == StoreErrorKind::Misconfigured && source.to_string().contains("forked")
}

/// Handlers of its own, and replays. Returns what was refused.
async fn child(store: Arc<dyn Store>, number: usize) -> Vec<Error> {
    let calls = (0..4).map(|at| {
        let (store, key) = (Arc::clone(&store), format!("child {number} {at}"));
        // One of them outlives its first lease.
        let sleeps = if at == 0 { LEASE * 3 / 2 } else { Duration::ZERO };
        tokio::spawn(async move {
            call(&*store, &key, LEASE, sleeps).await?;
            call(&*store, &key, LEASE, sleeps).await
        })
    });
    let calls: Vec<_> = calls.collect();
    let mut refused = Vec::new();
    for call in calls {
        refused.extend(call.await.expect("no panic").err());
    }
    refused
}

/// The handlers of a parent, which pause while a child runs: a child that waits does not wait for its turn.
struct Busy {
    store: Arc<dyn Store>,
    calls: AtomicU64,
    paused: AtomicBool,
}

impl Busy {
    async fn work(&self, at: u64) {
        loop {
            while self.paused.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let number = self.calls.fetch_add(1, Ordering::Relaxed);
            // In pairs: of two calls for one key one may wait. Short leases keep the upkeep thread at work.
            let (key, lease) = (format!("parent {}", number / 2), Duration::from_millis(3 + number % 20));
            let sleeps = if at.is_multiple_of(2) { Duration::from_millis(number % 30) } else { Duration::ZERO };
            let _ = call(&*self.store, &key, lease, sleeps).await;
        }
    }

    /// Waits until handlers have been called `calls` times more.
    fn goes_on(&self, calls: u64) {
        let before = self.calls.load(Ordering::Relaxed);
        self.paused.store(false, Ordering::Relaxed);
        while self.calls.load(Ordering::Relaxed) < before + calls {
            std::thread::yield_now();
        }
    }
}

/// Forks off children while handlers run; `held` of them never end, so that there are many leases to look through.
fn forks_while_busy(held: u64, may_refuse: bool, open: impl AsyncFnOnce() -> Arc<dyn Store>) {
    let forks: usize = std::env::var("IDEM_FORKS").map_or(60, |forks| forks.parse().expect("a number"));
    let parents = Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    let store = parents.block_on(open());
    let (calls, paused) = (AtomicU64::new(0), AtomicBool::new(false));
    let busy = Arc::new(Busy { store: Arc::clone(&store), calls, paused });
    for at in 0..BUSY {
        let busy = Arc::clone(&busy);
        parents.spawn(async move { busy.work(at).await });
    }
    for at in 0..held {
        let store = Arc::clone(&store);
        let lease = Duration::from_millis(200 + at % 100);
        parents.spawn(async move { call(&*store, &format!("held {at}"), lease, Duration::from_secs(3600)).await });
    }
    let mut hung = Vec::new();
    for number in 0..forks {
        // The forks meet the handlers at different places.
        busy.goes_on(BUSY + number as u64 % 31);
        match fork::fork().unwrap() {
            Fork::Child => {
                let ended = catch_unwind(AssertUnwindSafe(|| {
                    // Of one thread: a tokio with its feature `parking_lot`, which any crate may ask for, parks threads in a table
                    // of the process, and a fork may copy that in the middle of a change.
                    let own = Builder::new_current_thread().enable_all().build().unwrap();
                    let refused = own.block_on(child(Arc::clone(&store), number));
                    for error in refused {
                        assert!(may_refuse && is_refused(&error), "child {number}: {error}");
                    }
                }));
                std::process::exit(i32::from(ended.is_err()));
            }
            Fork::Parent(child) => {
                busy.paused.store(true, Ordering::Relaxed);
                match ends(child) {
                    Some(status) => assert_eq!(status, 0, "child {number} failed"),
                    None => hung.push(number),
                }
            }
        }
    }
    assert!(hung.is_empty(), "of {forks} children these hang: {hung:?}");
    assert!(parents.block_on(call(&*store, "parent goes on", LEASE, Duration::ZERO)).is_ok());
    parents.shutdown_background();
}

/// The status with which a child has ended; `None` if it hangs.
fn ends(child: i32) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < DEADLINE {
        if let Some(status) = fork::waitpid_nohang(child).unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Command::new("kill").args(["-9", &child.to_string()]).status().unwrap();
    fork::waitpid(child).unwrap();
    None
}

#[test]
fn a_child_of_a_busy_process_never_hangs_with_a_store_in_memory() {
    if is_alone("a_child_of_a_busy_process_never_hangs_with_a_store_in_memory") {
        forks_while_busy(4000, true, async || Arc::new(MemoryStore::new()) as _);
    }
}

#[test]
#[cfg(feature = "sqlite")]
fn a_child_of_a_busy_process_never_hangs_with_sqlite() {
    if is_alone("a_child_of_a_busy_process_never_hangs_with_sqlite") {
        let folder = Folder::new();
        let spec = format!("sqlite {}", folder.file().display());
        forks_while_busy(20, true, async || {
            let path = folder.file();
            // Connections are opened and closed, too, which takes locks inside SQLite.
            tokio::spawn(async move {
                loop {
                    let opened = idem_runtime::SqliteStore::open(&path).await;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    drop(opened);
                }
            });
            // With long limits: a refusal takes no time.
            stores::open(&spec, Duration::from_secs(100)).await
        });
    }
}

#[test]
fn a_child_of_a_busy_process_never_hangs_with_redis() {
    if is_alone("a_child_of_a_busy_process_never_hangs_with_redis") {
        let server = RedisServer::start(Kind::Redis);
        let spec = format!("redis {} forks", server.url());
        forks_while_busy(1000, false, async || stores::open(&spec, Duration::from_secs(100)).await);
    }
}
