//! Processes that can start no thread (`RLIMIT_NPROC`, `pids.max`) or open no descriptor (`RLIMIT_NOFILE`).
//!
//! `threads_exhausted` and `descriptors_exhausted` in `tests/faults.rs` check workers in such processes, for every
//! store. The tests here check the errors when a store is opened, and the store in memory.
//!
//! Each test runs itself in another process with low limits. The kernel applies no limit of threads to root, so a test
//! that root runs starts this process as another user.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real processes")]

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

#[cfg(feature = "nats")]
use idem_runtime::NatsStore;
use idem_runtime::{Error, Key, MemoryStore, Operation, Policy, RedisStore, Store, StoreError, StoreErrorKind};
#[cfg(feature = "nats")]
use idem_tests::nats::NatsServer;
use idem_tests::server::{Kind, RedisServer};

/// Environment variable of the limited process: the address of the server, or an empty text.
const ALONE: &str = "IDEM_TEST_EXHAUSTED";
const LEASE: Duration = Duration::from_millis(600);

/// Runs the test `name` again in a process with low limits, and passes the text that `server` returns to this process.
/// Returns the text in the limited process, and `None` in the process that started it.
fn limited(name: &str, server: impl FnOnce() -> (String, Box<dyn std::any::Any>)) -> Option<String> {
    /// Number of users so far. A limit of threads applies to all processes of a user, so each test runs as another
    /// user.
    static TESTS: AtomicU32 = AtomicU32::new(0);
    if let Ok(told) = std::env::var(ALONE) {
        return Some(told);
    }
    let (told, _server) = server();
    let said = |command: &mut Command| String::from_utf8(command.output().unwrap().stdout).unwrap();
    let mut command;
    let mut others = 0;
    if said(Command::new("id").arg("-u")).trim() == "0" {
        command = Command::new("setpriv");
        let user = (100_000 + 16 * std::process::id() + TESTS.fetch_add(1, Ordering::SeqCst)).to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "prlimit"]);
    } else {
        command = Command::new("prlimit");
        others =
            said(Command::new("ps").args(["-L", "-u", said(Command::new("id").arg("-un")).trim()])).lines().count();
    }
    command.args([format!("--nproc={}", others + 24), "--nofile=200".to_owned()]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", name, "--nocapture", "--test-threads=1"]);
    // The other user may write only into this folder.
    let folder = std::env::temp_dir().join(format!("idem-test-exhausted-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
    let ended = command.env(ALONE, told).env("TMPDIR", &folder).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let (said, wrong) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success() && said.contains("1 passed"), "{said}{wrong}");
    assert!(!wrong.contains("panicked"), "{wrong}");
    None
}

/// Starts no server.
fn nothing() -> (String, Box<dyn std::any::Any>) {
    (String::new(), Box::new(()))
}

fn redis() -> (String, Box<dyn std::any::Any>) {
    let server = RedisServer::start(Kind::Redis);
    (server.url(), Box::new(server))
}

#[cfg(feature = "nats")]
fn nats() -> (String, Box<dyn std::any::Any>) {
    let server = NatsServer::start();
    (server.url(), Box::new(server))
}

/// Threads that use up the limit of this process, until the guard is dropped.
struct Threads(Arc<AtomicBool>, Vec<thread::JoinHandle<()>>);

impl Threads {
    fn all() -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let waits = || {
            let over = Arc::clone(&over);
            thread::Builder::new().spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    thread::park();
                }
            })
        };
        let threads: Vec<_> = std::iter::from_fn(|| waits().ok()).take(1000).collect();
        assert!(threads.len() < 1000, "the limit has no effect");
        Self(over, threads)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
        for thread in self.1.drain(..) {
            thread.thread().unpark();
            thread.join().unwrap();
        }
    }
}

/// Opens files until no descriptor is left. A drop of the files frees the descriptors.
fn descriptors() -> Vec<File> {
    let files: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).take(1000).collect();
    assert!(files.len() < 1000, "the limit has no effect");
    files
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Calls a handler whose body sleeps for `sleeps`.
async fn call(store: &impl Store, key: &str, sleeps: Duration) -> Result<u32, Error> {
    let body = async {
        tokio::time::sleep(sleeps).await;
        Ok::<_, Error>(1)
    };
    // A busy machine renews leases late. A late renewal must not end the body.
    let policy = Policy::new(Duration::from_secs(3600)).lease(LEASE).max_pause(Duration::from_secs(3600));
    Operation::new(store, Key::new("exhausted", key), policy).run(body).await
}

fn is_transient(error: &StoreError) {
    assert!(error.kind() == StoreErrorKind::Unavailable && error.is_transient(), "{error:?}");
}

#[test]
fn without_threads_a_store_in_memory_renews_on_the_runtime_of_its_callers() {
    let name = "without_threads_a_store_in_memory_renews_on_the_runtime_of_its_callers";
    if limited(name, nothing).is_some() {
        let store = MemoryStore::new();
        block_on(async {
            let threads = Threads::all();
            let duplicate = async {
                tokio::time::sleep(LEASE * 2).await;
                call(&store, "k", Duration::ZERO).await
            };
            let (first, duplicate) = tokio::join!(call(&store, "k", LEASE * 3), duplicate);
            assert_eq!(first.unwrap(), 1);
            assert!(matches!(duplicate, Err(Error::InProgress { .. })), "the lease is held: {duplicate:?}");
            drop(threads);
            assert_eq!(call(&store, "l", LEASE * 2).await.unwrap(), 1);
        });
    }
}

#[test]
fn without_threads_a_redis_url_with_a_host_name_is_unavailable() {
    let name = "without_threads_a_redis_url_with_a_host_name_is_unavailable";
    let Some(url) = limited(name, redis) else { return };
    let named = url.replace("127.0.0.1", "localhost");
    assert_ne!(url, named);
    block_on(async {
        let threads = Threads::all();
        is_transient(&RedisStore::connect(&named).await.expect_err("no thread looks the name up"));
        drop(threads);
        RedisStore::connect(&named).await.unwrap();
    });
}

/// Checks that a store whose URL has a host name is unavailable without threads, and looks the name up afterwards. No
/// server listens at the port: without a thread the store fails before it connects.
fn needs_a_thread_for_a_host_name<S>(connect: impl AsyncFn() -> Result<S, StoreError>) {
    let fails = async |what: &str| match connect().await {
        Ok(_) => panic!("{what}"),
        Err(error) => {
            is_transient(&error);
            error.to_string()
        }
    };
    block_on(async {
        let threads = Threads::all();
        let without = fails("no thread looks the name up").await;
        drop(threads);
        assert_ne!(without, fails("no server listens").await, "the store asks for the name");
    });
}

#[test]
#[cfg(feature = "nats")]
fn without_threads_a_nats_url_with_a_host_name_is_unavailable() {
    let name = "without_threads_a_nats_url_with_a_host_name_is_unavailable";
    let Some(url) = limited(name, nats) else { return };
    let named = url.replace("127.0.0.1", "localhost");
    assert_ne!(url, named);
    block_on(async {
        let threads = Threads::all();
        is_transient(&NatsStore::connect(&named).await.expect_err("no thread looks the name up"));
        drop(threads);
        NatsStore::connect(&named).await.unwrap();
    });
}

#[test]
#[cfg(feature = "postgres")]
fn without_threads_a_postgres_url_with_a_host_name_is_unavailable() {
    use idem_runtime::PostgresStore;
    let name = "without_threads_a_postgres_url_with_a_host_name_is_unavailable";
    if limited(name, nothing).is_some() {
        needs_a_thread_for_a_host_name(async || PostgresStore::connect("postgres://shop@localhost:1/shop").await);
    }
}

#[test]
#[cfg(feature = "mysql")]
fn without_threads_a_mysql_url_with_a_host_name_is_unavailable() {
    use idem_runtime::MySqlStore;
    let name = "without_threads_a_mysql_url_with_a_host_name_is_unavailable";
    if limited(name, nothing).is_some() {
        needs_a_thread_for_a_host_name(async || MySqlStore::connect("mysql://shop@localhost:1/shop").await);
    }
}

#[test]
#[cfg(feature = "mysql")]
fn without_descriptors_mysql_is_unavailable() {
    use idem_runtime::MySqlStore;
    use idem_tests::mysql::MySqlServer;
    let server = || {
        let server = MySqlServer::start();
        (server.url(), Box::new(server) as _)
    };
    let Some(url) = limited("without_descriptors_mysql_is_unavailable", server) else { return };
    block_on(async {
        let store = MySqlStore::options().ensure_schema().connect(&url).await.unwrap();
        let files = descriptors();
        for host in ["127.0.0.1", "localhost"] {
            let refused = MySqlStore::connect(&url.replace("127.0.0.1", host)).await;
            is_transient(&refused.expect_err("a connection needs a descriptor"));
        }
        // The open store has a connection already.
        assert_eq!(call(&store, "k", Duration::ZERO).await.unwrap(), 1);
        drop(files);
        assert_eq!(call(&store, "l", LEASE * 2).await.unwrap(), 1);
    });
}

#[test]
#[cfg(feature = "sqlite")]
fn without_threads_sqlite_can_not_be_opened_and_an_open_store_goes_on() {
    use idem_runtime::SqliteStore;
    let Some(_) = limited("without_threads_sqlite_can_not_be_opened_and_an_open_store_goes_on", nothing) else {
        return;
    };
    let folder = idem_tests::sqlite::Folder::new();
    block_on(async {
        let open = SqliteStore::open(folder.file()).await.unwrap();
        let threads = Threads::all();
        is_transient(&SqliteStore::open(folder.file()).await.expect_err("SQLite can't be opened without a thread"));
        // The open store has its writer thread already.
        assert_eq!(call(&open, "k", Duration::ZERO).await.unwrap(), 1);
        drop(threads);
        SqliteStore::open(folder.file()).await.unwrap();
    });
}

#[test]
fn without_descriptors_a_store_in_memory_goes_on() {
    if limited("without_descriptors_a_store_in_memory_goes_on", nothing).is_some() {
        let store = MemoryStore::new();
        block_on(async {
            let files = descriptors();
            assert_eq!(call(&store, "k", LEASE * 2).await.unwrap(), 1);
            drop(files);
            assert_eq!(call(&store, "l", LEASE * 2).await.unwrap(), 1);
        });
    }
}

#[test]
fn without_descriptors_redis_is_unavailable() {
    let Some(url) = limited("without_descriptors_redis_is_unavailable", redis) else { return };
    block_on(async {
        let files = descriptors();
        for host in ["127.0.0.1", "localhost"] {
            let refused = RedisStore::connect(&url.replace("127.0.0.1", host)).await;
            is_transient(&refused.expect_err("a connection needs a descriptor"));
        }
        drop(files);
        RedisStore::connect(&url).await.unwrap();
    });
}

#[test]
#[cfg(feature = "nats")]
fn without_descriptors_nats_is_unavailable() {
    let Some(url) = limited("without_descriptors_nats_is_unavailable", nats) else { return };
    block_on(async {
        let files = descriptors();
        for host in ["127.0.0.1", "localhost"] {
            let refused = NatsStore::connect(&url.replace("127.0.0.1", host)).await;
            is_transient(&refused.expect_err("a connection needs a descriptor"));
        }
        drop(files);
        NatsStore::connect(&url).await.unwrap();
    });
}

#[test]
#[cfg(feature = "sqlite")]
fn without_descriptors_sqlite_is_unavailable() {
    use idem_runtime::SqliteStore;
    let Some(_) = limited("without_descriptors_sqlite_is_unavailable", nothing) else { return };
    let folder = idem_tests::sqlite::Folder::new();
    block_on(async {
        // This store stays open, so that its descriptors remain in use.
        let _open = SqliteStore::open(folder.file()).await.unwrap();
        let mut files = descriptors();
        // Descriptors are left for the database file, but not for all files that SQLite opens.
        for left in 0..3 {
            is_transient(
                &SqliteStore::open(folder.path().join(format!("{left}.db"))).await.expect_err("no descriptor"),
            );
            files.pop();
        }
        drop(files);
        SqliteStore::open(folder.path().join("0.db")).await.unwrap();
    });
}
