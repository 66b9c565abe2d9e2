//! Two servers, a Redis, a PostgreSQL and a MariaDB under load and faults: `soak SECONDS SEED`; `scripts/soak` starts
//! it.
//!
//! Clients send orders, hang up, and send duplicates to both servers, while processes are killed and stopped. Then the
//! faults stop, every order gets its final answer, and the answers are compared with the ledger of effects. The exit
//! status is 1 if a rule is broken:
//!
//! - No operation under `on_crash = fail` has two effects, and no attempt of any operation has two effects.
//! - Every operation with a 2xx answer has had its effect.
//! - All recorded answers of an operation are equal, byte for byte, and no client gets the answer of another operation.
//! - A request with a used key and another payload runs no handler. Every answer is one that docs/http.md lists.
//! - Once the faults have ended, every order gets a final answer, and each recorded answer is replayed.
#![allow(clippy::disallowed_methods)] // Clients wait on real time.

mod books;
mod client;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use idem_runtime::{MySqlStore, PostgresStore};
use idem_tests::chance::Chance;
use idem_tests::mysql::MySqlServer;
use idem_tests::postgres::PostgresServer;
use idem_tests::server::{Kind, RedisServer, free_port, signal};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::books::{Answers, Ledger};
use crate::client::{HangUp, Order, send};

const WORKERS: usize = 64;
/// Longest pause of a server or a store, longer than the lease of the servers.
const PAUSE: Duration = Duration::from_secs(4);
/// Tries after which a client stops sending an order. Duplicates of the order may still come.
const TRIES: usize = 30;
/// Time within which every order must get a final answer once the faults have ended.
const SETTLING: Duration = Duration::from_secs(120);
/// Number of recorded answers that must be replayed at the end.
const REPLAYS: usize = 2000;

/// Server process, which is killed and started again.
struct Checkout {
    port: u16,
    args: Vec<String>,
    child: Child,
}

impl Checkout {
    fn start(args: &[String]) -> Self {
        let port = free_port();
        Self { port, args: args.to_vec(), child: Self::spawn(port, args) }
    }

    fn spawn(port: u16, args: &[String]) -> Child {
        let program: PathBuf = std::env::current_exe().expect("a path").with_file_name("checkout");
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program).arg(port.to_string()).args(args).stdout(Stdio::null());
        command.spawn().expect("setpriv starts")
    }

    fn kill(&mut self) {
        self.child.kill().expect("a process");
        self.child.wait().expect("a process");
    }

    fn run(&mut self) {
        self.child = Self::spawn(self.port, &self.args);
    }

    fn signal(&self, name: &str) {
        assert!(signal(self.child.id(), name), "the server has ended");
    }
}

/// Servers and books, which all clients share.
struct Market {
    ports: [u16; 2],
    answers: Answers,
    next: AtomicUsize,
    is_over: AtomicBool,
}

impl Market {
    /// Sends new orders, duplicates and other payloads until the faults have ended.
    async fn shop(&self, mut chance: Chance) {
        while !self.is_over.load(Ordering::Relaxed) {
            let order = Order(self.next.fetch_add(1, Ordering::Relaxed));
            let (one, other) = (chance.of(1), chance.of(2));
            match chance.below(4) {
                0 => {
                    tokio::join!(self.deliver(order, one), self.deliver(order, other));
                }
                1 => {
                    self.deliver(order, one).await;
                    self.deliver(order, other).await;
                }
                _ => self.deliver(order, one).await,
            }
            if chance.percent(30) {
                let earlier = Order(order.0.saturating_sub(chance.below(2000)));
                self.deliver(earlier, chance.of(3)).await;
            }
            if chance.percent(3) {
                let answer = send(self.ports[chance.below(2)], order, "0 ms, another amount", HangUp::Never).await;
                // The first request may have reached no server.
                if self.answers.is_settled(order) {
                    self.answers.note_mismatch(order, answer.as_ref());
                }
            }
        }
    }

    /// Sends an order to a random server, and repeats it until the answer is final. Hangs up now and then.
    async fn deliver(&self, order: Order, mut chance: Chance) {
        for _ in 0..TRIES {
            let hang_up = match chance.below(23) {
                0 => HangUp::InBody,
                1 | 2 => HangUp::WhileRunning(chance.up_to(Duration::from_millis(60))),
                _ => HangUp::Never,
            };
            if self.ask(order, chance.below(2), hang_up).await {
                return;
            }
            sleep(Duration::from_millis(50) + chance.up_to(Duration::from_millis(400))).await;
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    async fn ask(&self, order: Order, server: usize, hang_up: HangUp) -> bool {
        self.answers.count(match hang_up {
            HangUp::Never => "requests",
            _ => "requests of clients that hang up",
        });
        let answer = send(self.ports[server], order, &order.payload(), hang_up).await;
        self.answers.note(order, answer)
    }

    /// Sends every order without a final answer again, and then orders with recorded answers.
    async fn settle(self: &Arc<Self>, mut chance: Chance) {
        let until = Instant::now() + SETTLING;
        loop {
            let open = self.answers.open();
            if open.is_empty() {
                break;
            }
            if Instant::now() > until {
                let names = open.iter().map(|order| format!("{}: no answer after the faults", order.name()));
                names.for_each(|violation| self.answers.violate(violation));
                break;
            }
            self.ask_all(open).await;
            sleep(Duration::from_millis(200)).await;
        }
        let recorded = self.answers.recorded();
        let some = (0..REPLAYS.min(recorded.len())).map(|_| recorded[chance.below(recorded.len())]);
        let some: Vec<_> = some.collect();
        let expected = some.len();
        if self.ask_all(some).await != expected {
            self.answers.violate("a recorded answer is not replayed".to_owned());
        }
    }

    /// Sends each of these orders once. Returns the number of final answers.
    async fn ask_all(self: &Arc<Self>, orders: Vec<Order>) -> usize {
        let mut tasks = JoinSet::new();
        for part in orders.chunks(orders.len().div_ceil(WORKERS).max(1)) {
            let (market, part) = (Arc::clone(self), part.to_vec());
            tasks.spawn(async move {
                let mut finals = 0;
                for order in part {
                    finals += usize::from(market.ask(order, order.0 / Order::OF_A_KEY % 2, HangUp::Never).await);
                }
                finals
            });
        }
        tasks.join_all().await.into_iter().sum()
    }
}

/// Processes in which the soak causes faults.
struct Machines {
    servers: [Checkout; 2],
    redis: RedisServer,
    postgres: PostgresServer,
    mysql: MySqlServer,
}

impl Machines {
    /// Causes a random fault, and waits for its end. Returns the name of the fault.
    async fn suffer(&mut self, chance: &mut Chance) -> &'static str {
        let (pause, server) = (chance.up_to(PAUSE), chance.below(2));
        match chance.below(23) {
            0..8 => {
                self.servers[server].kill();
                sleep(pause / 2).await;
                self.servers[server].run();
                "a server was killed"
            }
            8..12 => {
                self.servers[server].signal("-STOP");
                sleep(pause).await;
                self.servers[server].signal("-CONT");
                "a server was stopped"
            }
            12..14 => {
                self.redis.signal("-STOP");
                sleep(pause).await;
                self.redis.signal("-CONT");
                "Redis was stopped"
            }
            14..16 => {
                self.postgres.stop();
                sleep(pause).await;
                self.postgres.go_on();
                "PostgreSQL was stopped"
            }
            16 | 17 => {
                self.redis.kill();
                sleep(pause / 2).await;
                self.redis.run();
                "Redis was killed"
            }
            18 => {
                self.postgres.kill();
                sleep(pause / 2).await;
                self.postgres.run();
                "PostgreSQL was killed"
            }
            19 | 20 => {
                self.mysql.stop();
                sleep(pause).await;
                self.mysql.go_on();
                "MariaDB was stopped"
            }
            21 => {
                self.mysql.kill();
                sleep(pause / 2).await;
                self.mysql.run();
                "MariaDB was killed"
            }
            _ => {
                // A server is killed while all stores are stopped.
                self.mysql.stop();
                self.postgres.stop();
                self.redis.signal("-STOP");
                self.servers[server].kill();
                sleep(pause).await;
                self.redis.signal("-CONT");
                self.postgres.go_on();
                self.mysql.go_on();
                self.servers[server].run();
                "all stores were stopped, and a server was killed"
            }
        }
    }
}

async fn start(ledger: u16) -> Machines {
    // The stores lose no answered write in a crash.
    let redis = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes", "--appendfsync", "always"]);
    let postgres = PostgresServer::start();
    let options = PostgresStore::options().schema("soak").ensure_schema();
    drop(options.connect(&postgres.url()).await.expect("makes the table"));
    let mysql = MySqlServer::start();
    let options = MySqlStore::options().table("soak").ensure_schema();
    drop(options.connect(&mysql.url()).await.expect("makes the table"));
    let stores = [
        format!("redis {} soak", redis.url()),
        format!("postgres {} soak", postgres.url()),
        format!("mysql {} soak", mysql.url()),
    ];
    let args: Vec<String> = [ledger.to_string()].into_iter().chain(stores).collect();
    let servers = [Checkout::start(&args), Checkout::start(&args)];
    Machines { servers, redis, postgres, mysql }
}

#[tokio::main]
async fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|it| it.parse().expect("a number")).collect();
    let [seconds, seed] = args[..] else { panic!("arguments: seconds, seed") };
    let chance = Chance::seeded(seed);
    let ledger = Ledger::default();
    // The kernel kills child processes when the thread that started them ends, so this thread starts them.
    let mut machines = start(ledger.serve().await).await;
    let ports = [machines.servers[0].port, machines.servers[1].port];
    let (answers, next, is_over) = (Answers::default(), AtomicUsize::new(0), AtomicBool::new(false));
    let market = Arc::new(Market { ports, answers, next, is_over });
    let workers: Vec<_> = (0..WORKERS)
        .map(|worker| {
            let (market, chance) = (Arc::clone(&market), chance.of(100 + worker));
            tokio::spawn(async move { market.shop(chance).await })
        })
        .collect();
    let (until, mut faults) = (Instant::now() + Duration::from_secs(seconds), chance.of(1));
    while Instant::now() < until {
        sleep(faults.up_to(Duration::from_secs(3))).await;
        market.answers.count(machines.suffer(&mut faults).await);
    }
    market.is_over.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.await.expect("no panic");
    }
    market.settle(chance.of(2)).await;
    println!("soak of {seconds} s with seed {seed}");
    let violations = market.answers.audit(&ledger);
    violations.iter().take(20).for_each(|violation| println!("VIOLATION {violation}"));
    println!("violations: {}", violations.len());
    drop(machines);
    std::process::exit(i32::from(!violations.is_empty()));
}
