//! The worker with a real NATS: a killed worker, a message that is published again, a handler that fails once.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use async_nats::jetstream::{self, Context};

/// A NATS server, its stream and the folder of its workers. All of it ends with the test.
struct Shop {
    nats: Child,
    url: String,
    folder: PathBuf,
    workers: Vec<Child>,
    stream: Context,
}

impl Shop {
    async fn open(name: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let folder = std::env::temp_dir().join(format!("idem-ruststream-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let program = std::env::var_os("IDEM_TEST_NATS").unwrap_or_else(|| "nats-server".into());
        // `setpriv` has the kernel kill the server if this process dies first.
        let nats = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(&program)
            .args(["-a", "127.0.0.1", "-p", &port.to_string(), "-js", "-sd"])
            .arg(folder.join("jetstream"))
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{} can't be started: {error}", program.display()));
        let url = format!("nats://127.0.0.1:{port}");
        let began = Instant::now();
        let client = loop {
            match async_nats::connect(&url).await {
                Ok(client) => break client,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(30), "NATS does not answer: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let stream = jetstream::new(client);
        let config = jetstream::stream::Config {
            name: "ORDERS".to_owned(),
            subjects: vec!["orders".to_owned()],
            ..Default::default()
        };
        stream.create_stream(config).await.unwrap();
        Self { nats, url, folder, workers: Vec::new(), stream }
    }

    fn start_worker(&mut self) {
        let worker = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_ruststream-worker"), &self.url])
            .arg(&self.folder)
            .spawn()
            .unwrap();
        self.workers.push(worker);
    }

    async fn publish(&self, order: &'static str) {
        self.stream.publish("orders", order.into()).await.unwrap().await.unwrap();
    }

    /// Waits until the worker's consumer has acknowledged this many messages.
    async fn acknowledged(&self, messages: u64) {
        until(
            "every message is acknowledged",
            || self.books(),
            async || {
                let Ok(stream) = self.stream.get_stream("ORDERS").await else { return false };
                let info = stream.consumer_info("shop").await;
                info.is_ok_and(|info| info.ack_floor.stream_sequence == messages)
            },
        )
        .await;
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
        for child in self.workers.iter_mut().chain([&mut self.nats]) {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

async fn until(what: &str, seen: impl Fn() -> String, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(60), "never: {what}\n{}", seen());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_message_of_a_killed_worker_runs_again_after_its_lease_and_charges_once() {
    let mut shop = Shop::open("kill").await;
    shop.start_worker();
    shop.publish(r#"{"id":1,"fault":"dies"}"#).await;
    until("the handler has charged and hangs", || shop.books(), async || shop.count("hangs") == 1).await;
    let mut worker = shop.workers.pop().unwrap();
    worker.kill().unwrap(); // SIGKILL
    worker.wait().unwrap();
    shop.start_worker();
    shop.acknowledged(1).await;
    assert_eq!((shop.count("body 1"), shop.count("charge 1")), (2, 1), "{}", shop.books());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_published_again_is_acknowledged_without_the_body() {
    let mut shop = Shop::open("again").await;
    shop.start_worker();
    for _ in 0..3 {
        shop.publish(r#"{"id":1}"#).await;
    }
    shop.acknowledged(3).await;
    assert_eq!((shop.count("body 1"), shop.count("charge 1")), (1, 1), "{}", shop.books());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_handler_returns_an_error_is_delivered_again() {
    let mut shop = Shop::open("fails").await;
    shop.start_worker();
    shop.publish(r#"{"id":1,"fault":"fails"}"#).await;
    shop.acknowledged(1).await;
    assert_eq!((shop.count("body 1"), shop.count("charge 1")), (2, 1), "{}", shop.books());
}
