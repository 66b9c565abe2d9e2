//! The programs of docs/start.md, as the page shows them, with real servers: duplicates have no effect, poison messages
//! are set aside, and each program outlives its broker and its store.
//!
//! `cargo test --workspace` builds the programs. To run this test alone: `cargo build -p idem-examples --examples
//! --features start,postgres` and `cargo build -p idem-cli` first.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use idem_runtime::record::State;
use idem_runtime::{Key, RedisStore, Store as _};
use idem_tests::postgres::PostgresServer;
use idem_tests::server::{Kind, RedisServer, free_port};
use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueuePurgeOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};

const PAGE: &str = include_str!("../docs/start.md");
/// Longest wait for any event. A busy machine may need most of this time.
const LIMIT: Duration = Duration::from_secs(120);

/// Path of a program that the workspace has built.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let path = test.ancestors().nth(2).expect("the folder of the profile").join(name);
    assert!(path.exists(), "{} is not built; the head of this file has the command", path.display());
    path
}

/// Waits until `is_done` returns true.
async fn until(what: &str, mut is_done: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_done().await {
        assert!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A RabbitMQ of one test.
struct Rabbit {
    port: u16,
    folder: PathBuf,
    server: Option<Child>,
}

impl Rabbit {
    async fn start() -> Self {
        let port = free_port();
        let folder = std::env::temp_dir().join(format!("idem-start-{}-{port}", std::process::id()));
        let mut rabbit = Self { port, folder, server: None };
        rabbit.run().await;
        rabbit
    }

    /// Starts the server, also after a kill, with the same queues.
    async fn run(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/rabbitmq");
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(script).arg(self.port.to_string()).arg(&self.folder);
        // The process group is new, because the script and the server start processes of their own.
        command.process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
        self.server = Some(command.spawn().expect("setpriv is installed"));
        until("RabbitMQ answers", async || self.channel().await.is_ok()).await;
    }

    /// Kills the server (`kill -9`).
    fn kill(&mut self) {
        let Some(mut server) = self.server.take() else { return };
        let group = format!("-{}", server.id());
        Command::new("kill").args(["-KILL", "--", &group]).status().expect("kill runs");
        server.wait().expect("was running");
    }

    fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}", self.port)
    }

    async fn channel(&self) -> lapin::Result<(Connection, Channel)> {
        let connection = Connection::connect(&self.url(), ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        Ok((connection, channel))
    }

    async fn publish(&self, queue: &str, payloads: &[&str]) {
        let (connection, channel) = self.channel().await.expect("RabbitMQ answers");
        // The server drops messages for a queue that does not exist yet.
        until("the program declares its queue", async || self.messages(queue).await.is_some()).await;
        for payload in payloads {
            let properties = BasicProperties::default().with_delivery_mode(2);
            let options = BasicPublishOptions::default();
            let sent = channel.basic_publish("".into(), queue.into(), options, payload.as_bytes(), properties).await;
            sent.expect("sent").await.expect("taken");
        }
        connection.close(200, "published".into()).await.expect("closed");
    }

    /// Number of messages in a queue that wait for a consumer; `None` if there is no such queue.
    async fn messages(&self, queue: &str) -> Option<u32> {
        let (_connection, channel) = self.channel().await.ok()?;
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::durable() };
        let queue = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.ok()?;
        Some(queue.message_count())
    }

    /// Removes all messages from a queue.
    async fn purge(&self, queue: &str) {
        let (_connection, channel) = self.channel().await.expect("RabbitMQ answers");
        channel.queue_purge(queue.into(), QueuePurgeOptions::default()).await.expect("purged");
    }
}

impl Drop for Rabbit {
    fn drop(&mut self) {
        self.kill();
        // `epmd` outlives its servers.
        let port = (self.port + 2).to_string();
        Command::new("epmd").arg("-kill").env("ERL_EPMD_PORT", port).stdout(Stdio::null()).status().ok();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// A program of the page; killed when dropped.
struct Program(Child);

impl Program {
    fn start(name: &str, env: &[(&str, String)], arguments: &[&str]) -> Self {
        let program = built(&format!("examples/{name}"));
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program).args(arguments).envs(env.iter().map(|(k, v)| (k, v)));
        Self(command.spawn().expect("setpriv is installed"))
    }

    fn is_running(&mut self) -> bool {
        self.0.try_wait().expect("a child").is_none()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Runs the statements with which the page makes the tables.
fn make_tables(url: &str) {
    let (_, rest) = PAGE.split_once("## The table").expect("the section");
    let (_, rest) = rest.split_once("```sh\n").expect("the statements");
    let (statements, _) = rest.split_once("```").expect("their end");
    let programs = std::env::var("IDEM_TEST_POSTGRES").expect("run ./scripts/test");
    let path = std::env::var("PATH").expect("a path");
    let folder = std::env::temp_dir().join(format!("idem-start-{}-{}", std::process::id(), free_port()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let idem = built("idem");
    let path = format!("{}:{programs}:{path}", idem.parent().expect("a folder").display());
    let mut bash = Command::new("bash");
    bash.args(["-ec", statements]).current_dir(&folder).env("PATH", path).env("DATABASE_URL", url);
    let made = bash.output().expect("bash runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    std::fs::remove_dir_all(folder).ok();
}

async fn pays_each_order_once(name: &str) {
    let (mut rabbit, mut postgres) = (Rabbit::start().await, PostgresServer::start());
    postgres.raw().await.batch_execute("CREATE ROLE shop LOGIN").await.expect("a login");
    make_tables(&postgres.url());
    // No order has a negative number, so the body of such a message always fails.
    let refuse = "ALTER TABLE payments ADD CHECK (order_id > 0)";
    postgres.raw().await.batch_execute(refuse).await.expect("altered");
    let paid = async |server: &PostgresServer| -> Vec<i64> {
        let rows = server.raw().await.query("SELECT order_id FROM payments ORDER BY 1", &[]).await;
        rows.expect("an answer").iter().map(|row| row.get(0)).collect()
    };
    let url = postgres.url().replace("postgres@", "shop@");
    let env = [("AMQP_URL", rabbit.url()), ("DATABASE_URL", url)];
    let mut program = Program::start(name, &env, &[]);

    rabbit.publish("payments", &["1", "2", "1", "2", "not a number", "-1", "3", "1"]).await;
    until("two messages are set aside", async || rabbit.messages("payments.dead").await == Some(2)).await;
    until("each order is paid", async || paid(&postgres).await.len() >= 3).await;
    assert_eq!(paid(&postgres).await, [1, 2, 3]);

    // The broker is killed, and comes back.
    rabbit.kill();
    rabbit.run().await;
    rabbit.publish("payments", &["3", "4", "4"]).await;
    until("order 4 is paid", async || paid(&postgres).await.contains(&4)).await;

    // The database is killed, and comes back. No message is set aside meanwhile.
    rabbit.purge("payments.dead").await;
    postgres.kill();
    rabbit.publish("payments", &["5", "4", "5"]).await;
    until("the program has the messages", async || rabbit.messages("payments").await == Some(0)).await;
    postgres.run();
    until("order 5 is paid", async || paid(&postgres).await.contains(&5)).await;

    // The program is killed and started again. No message gets lost or is set aside.
    drop(program);
    program = Program::start(name, &env, &[]);
    rabbit.publish("payments", &["6", "5", "6", "1"]).await;
    until("order 6 is paid", async || paid(&postgres).await.contains(&6)).await;
    until("the queue is empty", async || rabbit.messages("payments").await == Some(0)).await;
    assert_eq!(paid(&postgres).await, [1, 2, 3, 4, 5, 6]);
    assert_eq!(rabbit.messages("payments.dead").await, Some(0));
    assert!(program.is_running());
}

#[tokio::test]
async fn the_program_with_sqlx_pays_each_order_once() {
    pays_each_order_once("start_sqlx").await;
}

#[tokio::test]
async fn the_program_with_tokio_postgres_pays_each_order_once() {
    pays_each_order_once("start_tokio_postgres").await;
}

#[tokio::test]
async fn the_program_with_redis_ships_each_order_once() {
    let (mut rabbit, redis) = (Rabbit::start().await, RedisServer::start(Kind::Redis));
    let env = [("AMQP_URL", rabbit.url()), ("REDIS_URL", redis.url())];
    let mut program = Program::start("start_redis", &env, &[]);
    let store = RedisStore::connect(&redis.url()).await.expect("connects");
    // `attempt` returns the number of the attempt that completed an order; `None` if the order is not completed.
    let attempt = async |order: i64| -> Option<u32> {
        let found = store.inspect(&Key::new("ship", order).expect("a key")).await.expect("an answer")?;
        matches!(found.record.state, State::Completed(_)).then_some(found.record.attempt)
    };
    rabbit.publish("orders", &["1", "2", "1", "not a number", "2"]).await;
    until("a message is set aside", async || rabbit.messages("orders.dead").await == Some(1)).await;
    until("two orders are recorded", async || attempt(1).await.and(attempt(2).await).is_some()).await;
    rabbit.kill();
    rabbit.run().await;
    rabbit.publish("orders", &["3", "1"]).await;
    until("order 3 is recorded", async || attempt(3).await.is_some()).await;
    until("the queue is empty", async || rabbit.messages("orders").await == Some(0)).await;
    // A second run of an order would have been its second attempt.
    for order in 1..=3 {
        assert_eq!(attempt(order).await, Some(1), "order {order}");
    }
    assert!(program.is_running());
}
