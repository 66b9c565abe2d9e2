//! Workers of `idem_apalis` with a real Redis: a killed worker, a poison task, a value that hides a refusal, a replay.
#![allow(clippy::disallowed_methods, reason = "tests wait for processes")]

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use apalis::prelude::{TaskBuilder, TaskId, TaskSink as _};
use apalis_redis::{Config, RedisStorage};
use redis::aio::ConnectionManager;

/// A Redis, a queue and the folder of its workers. All of it ends with the test.
struct Shop {
    redis: Child,
    url: String,
    folder: PathBuf,
    workers: Vec<Child>,
}

impl Shop {
    async fn open(name: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let folder = std::env::temp_dir().join(format!("idem-apalis-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let program = std::env::var_os("IDEM_TEST_REDIS").unwrap_or_else(|| "redis-server".into());
        // `setpriv` has the kernel kill the server if this process dies first.
        let redis = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(&program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir"])
            .arg(&folder)
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{} can't be started: {error}", program.display()));
        let shop = Self { redis, url: format!("redis://127.0.0.1:{port}"), folder, workers: Vec::new() };
        let client = redis::Client::open(shop.url.as_str()).unwrap();
        until("Redis answers", async || client.get_multiplexed_async_connection().await.is_ok()).await;
        shop
    }

    fn start_worker(&mut self) {
        let worker = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_shop"), &self.url, "test"])
            .arg(&self.folder)
            .spawn()
            .unwrap();
        self.workers.push(worker);
    }

    async fn queue(&self, queue: &str) -> RedisStorage<String> {
        let connection = apalis_redis::connect(self.url.as_str()).await.unwrap();
        RedisStorage::new(connection).with_config(Config::default().queue(queue))
    }

    async fn push(&self, queue: &str, id: &str, order: &str) {
        let task = TaskBuilder::new(order.to_owned()).task_id(TaskId::from_string(id)).build();
        self.queue(queue).await.push_task(task).await.unwrap();
    }

    /// Waits until the task has this status, and returns all fields that apalis stores for the task.
    async fn ended(&self, queue: &str, id: &str, status: &str) -> BTreeMap<String, String> {
        let mut connection: ConnectionManager = apalis_redis::connect(self.url.as_str()).await.unwrap();
        let mut seen = BTreeMap::new();
        let began = Instant::now();
        while seen.get("status").map(String::as_str) != Some(status) {
            assert!(began.elapsed() < Duration::from_secs(60), "{id} never is {status}: {seen:?}\n{}", self.books());
            tokio::time::sleep(Duration::from_millis(20)).await;
            seen = redis::cmd("HGETALL").arg(format!("{queue}:meta:{id}")).query_async(&mut connection).await.unwrap();
        }
        seen
    }

    fn books(&self) -> String {
        fs::read_to_string(self.folder.join("books")).unwrap_or_default()
    }

    fn count(&self, line: &str) -> usize {
        self.books().lines().filter(|it| *it == line).count()
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        for child in self.workers.iter_mut().chain([&mut self.redis]) {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(60), "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_task_of_a_killed_worker_runs_again_after_its_lease_and_charges_once() {
    let mut shop = Shop::open("kill").await;
    shop.start_worker();
    shop.push("test-orders", "a", "1:dies").await;
    until("the handler has charged and hangs", async || shop.count("hangs 1") == 1).await;
    let mut worker = shop.workers.pop().unwrap();
    worker.kill().unwrap(); // SIGKILL
    worker.wait().unwrap();
    shop.start_worker();
    let ended = shop.ended("test-orders", "a", "Done").await;
    assert_eq!((shop.count("body 1"), shop.count("charge 1")), (2, 1), "{}", shop.books());
    assert_eq!(ended["result"], r#"{"Ok":"receipt of attempt 2 for 1"}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_never_succeeds_is_killed_after_its_attempts() {
    let mut shop = Shop::open("poison").await;
    shop.start_worker();
    shop.push("test-orders", "a", "1:poison").await;
    let ended = shop.ended("test-orders", "a", "Killed").await;
    assert_eq!(shop.count("body 1"), 3, "{}", shop.books());
    assert!(ended["result"].contains("attempts"), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_pushed_again_gets_the_recorded_value() {
    let mut shop = Shop::open("replay").await;
    shop.start_worker();
    shop.push("test-orders", "a", "1:fine").await;
    let first = shop.ended("test-orders", "a", "Done").await;
    shop.push("test-orders", "b", "1:fine").await;
    let second = shop.ended("test-orders", "b", "Done").await;
    assert_eq!((&first["result"], shop.count("body 1")), (&second["result"], 1), "{}", shop.books());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_that_hides_a_failed_call_is_not_acknowledged() {
    let mut shop = Shop::open("careless").await;
    shop.start_worker();
    shop.push("test-mails", "a", "1").await;
    let ended = shop.ended("test-mails", "a", "Done").await;
    assert_eq!((ended["attempts"].as_str(), shop.count("notify")), ("2", 2), "{}", shop.books());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_without_a_key_is_killed() {
    let mut shop = Shop::open("keyless").await;
    shop.start_worker();
    shop.push("test-orders", "a", ":fine").await;
    shop.ended("test-orders", "a", "Killed").await;
    assert_eq!(shop.books(), "");
}
