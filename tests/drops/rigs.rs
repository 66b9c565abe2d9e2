//! Every store, its servers, and the proxies ("lines") in front of the servers.

use std::any::Any;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_runtime::postgres::PostgresOptions;
use idem_runtime::{Cached, MemoryStore, MySqlStore, NatsStore, PostgresStore, RedisStore, SqliteStore, Store};
use idem_tests::cluster::{Cluster, Watched};
use idem_tests::dynamo::{self, Emulator, TABLE, Wire};
use idem_tests::mysql::MySqlServer;
use idem_tests::nats::NatsServer;
use idem_tests::postgres::{PgBouncer, PostgresServer};
use idem_tests::proxy::{Line, Proxy};
use idem_tests::server::{Kind, RedisServer, free_port};
use idem_tests::sqlite::{self, Folder};

use crate::outage::Outage;

/// Node time-out in milliseconds, so long that no server is replaced.
const NEVER: u32 = 600_000;

/// Store, its lines and its servers.
pub struct Rig {
    /// Handle whose calls are dropped.
    pub store: Arc<dyn Store>,
    /// Handle of another process, with which records are checked.
    pub peer: Arc<dyn Store>,
    pub lines: Vec<Proxy>,
    /// Database file of a store without lines, and the transaction that locks it.
    file: Option<PathBuf>,
    lock: Mutex<Option<rusqlite::Connection>>,
    _servers: Box<dyn Any + Send + Sync>,
}

fn rig<S: Store>(
    [store, peer]: [S; 2],
    lines: impl IntoIterator<Item = Proxy>,
    servers: impl Any + Send + Sync,
) -> Rig {
    let lines = lines.into_iter().collect();
    let (file, lock) = (None, Mutex::default());
    Rig { store: Arc::new(store), peer: Arc::new(peer), lines, file, lock, _servers: Box::new(servers) }
}

impl Rig {
    /// Outages that the store can have.
    pub fn outages(&self) -> &'static [Outage] {
        match (&self.file, &self.lines[..]) {
            (Some(_), _) => &[Outage::Locked],
            (None, []) => &[],
            (None, _) => &[Outage::Held, Outage::Muted],
        }
    }

    /// Begins an outage of both handles that lasts for `time`.
    pub fn cut_off(&self, outage: Outage, time: Duration) {
        let line = match outage {
            Outage::Held => Line::Delay(time),
            Outage::Muted => Line::LoseReplies,
            Outage::Locked => {
                let lock = sqlite::raw(self.file.as_ref().expect("a file"));
                lock.execute_batch("BEGIN IMMEDIATE").expect("locks");
                *self.lock.lock().unwrap() = Some(lock);
                return;
            }
        };
        self.lines.iter().for_each(|proxy| proxy.set(line));
    }

    /// Ends the outage. Delayed requests take effect soon after.
    pub fn go_on(&self) {
        *self.lock.lock().unwrap() = None;
        self.lines.iter().for_each(|proxy| proxy.set(Line::Pass));
    }
}

pub async fn memory(_: Duration) -> Rig {
    let store = MemoryStore::new();
    let peer = store.peer();
    rig([store, peer], [], ())
}

pub async fn sqlite(answer: Duration) -> Rig {
    let folder = Folder::new();
    let options = SqliteStore::options().busy_timeout(answer).response_timeout(answer);
    let open = async || options.clone().open(folder.file()).await.expect("opens");
    let stores = [open().await, open().await];
    Rig { file: Some(folder.file()), ..rig(stores, [], folder) }
}

async fn connect(url: &str, answer: Duration) -> RedisStore {
    RedisStore::options().response_timeout(answer).connect(url).await.expect("connects")
}

async fn handles(url: &str, answer: Duration) -> [RedisStore; 2] {
    [connect(url, answer).await, connect(url, answer).await]
}

async fn one(kind: Kind, answer: Duration) -> Rig {
    let server = RedisServer::start(kind);
    let line = Proxy::to(server.port()).await;
    rig(handles(&line.url(), answer).await, [line], server)
}

pub async fn redis(answer: Duration) -> Rig {
    one(Kind::Redis, answer).await
}

pub async fn valkey(answer: Duration) -> Rig {
    one(Kind::Valkey, answer).await
}

pub async fn cached(answer: Duration) -> Rig {
    let server = RedisServer::start(Kind::Redis);
    let line = Proxy::to(server.port()).await;
    let around = handles(&line.url(), answer).await.map(Cached::new);
    rig(around, [line], server)
}

pub async fn cluster(answer: Duration) -> Rig {
    let ports = [free_port(), free_port(), free_port()];
    let mut lines = Vec::new();
    for port in ports {
        lines.push(Proxy::to(port).await);
    }
    let announced = |n: usize| -> Vec<String> {
        let port = lines[n].port().to_string();
        ["--appendonly", "no", "--cluster-announce-port", &port].map(ToOwned::to_owned).into()
    };
    let cluster = Cluster::start_at(&ports, ports.len(), NEVER, announced, &Vec::new());
    let seeds: Vec<_> = lines.iter().map(|line| format!("127.0.0.1:{}", line.port())).collect();
    rig(handles(&format!("redis-cluster://{}", seeds.join(",")), answer).await, lines, cluster)
}

pub async fn sentinel(answer: Duration) -> Rig {
    let args = ["--appendonly", "no", "--repl-diskless-sync-delay", "0"];
    let server = RedisServer::start_with(Kind::Redis, &args);
    let line = Proxy::to(server.port()).await;
    // The sentinels name the port of the proxy.
    let watched = Watched::start_at(server, line.port(), NEVER);
    rig(handles(&watched.url(), answer).await, [line], watched)
}

pub async fn mysql(answer: Duration) -> Rig {
    let server = MySqlServer::start();
    let line = Proxy::to(server.port()).await;
    let url = format!("mysql://root@127.0.0.1:{}/idem", line.port());
    let options = MySqlStore::options().response_timeout(answer).ensure_schema();
    let open = async || options.clone().connect(&url).await.expect("connects");
    rig([open().await, open().await], [line], server)
}

pub async fn postgres(answer: Duration) -> Rig {
    let server = PostgresServer::start();
    let line = Proxy::to(server.port()).await;
    through_postgres(line, PostgresStore::options().response_timeout(answer), server).await
}

pub async fn pgbouncer(answer: Duration) -> Rig {
    let server = PostgresServer::start();
    let pooler = PgBouncer::start(server.port());
    let line = Proxy::to(pooler.port()).await;
    through_postgres(line, PostgresStore::options().behind_pgbouncer().response_timeout(answer), (pooler, server)).await
}

async fn through_postgres(line: Proxy, options: PostgresOptions, servers: impl Any + Send + Sync) -> Rig {
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", line.port());
    let options = options.ensure_schema();
    let open = async || options.clone().connect(&url).await.expect("connects");
    rig([open().await, open().await], [line], servers)
}

async fn dynamo(kind: dynamo::Kind, answer: Duration) -> Rig {
    let emulator = Emulator::with_table(kind).await;
    let line = Proxy::to(emulator.port()).await;
    let endpoint = format!("http://127.0.0.1:{}", line.port());
    let client = || dynamo::client(&Wire::to(&endpoint));
    let open = || dynamo::options().response_timeout(answer).upkeep_client(client()).build(client(), TABLE);
    rig([open(), open()], [line], emulator)
}

pub async fn dynoxide(answer: Duration) -> Rig {
    dynamo(dynamo::Kind::Dynoxide, answer).await
}

pub async fn ministack(answer: Duration) -> Rig {
    dynamo(dynamo::Kind::Ministack, answer).await
}

pub async fn nats(answer: Duration) -> Rig {
    let server = NatsServer::start();
    let line = Proxy::to(server.port()).await;
    let url = format!("nats://127.0.0.1:{}", line.port());
    let open = async || NatsStore::options().response_timeout(answer).connect(&url).await.expect("connects");
    rig([open().await, open().await], [line], server)
}
