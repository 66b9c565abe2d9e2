//! Every store, its servers, and the lines to them.

use std::any::Any;
use std::sync::Arc;

use idem_runtime::postgres::PostgresOptions;
use idem_runtime::{Cached, MemoryStore, PostgresStore, RedisStore, SqliteStore, Store};
use idem_tests::cluster::{Cluster, Watched};
use idem_tests::dynamo::{self, Emulator, TABLE, Wire};
use idem_tests::postgres::{PgBouncer, PostgresServer};
use idem_tests::proxy::Proxy;
use idem_tests::server::{Kind, RedisServer, free_port};
use idem_tests::sqlite::Folder;

use crate::{ANSWER, LEASE};

/// So long that no server is replaced.
const NEVER: u32 = 600_000;

/// A store, its lines and its servers.
pub struct Rig {
    /// The handle whose calls are dropped.
    pub store: Arc<dyn Store>,
    /// The handle of another process.
    pub peer: Arc<dyn Store>,
    pub lines: Vec<Proxy>,
    _servers: Box<dyn Any + Send + Sync>,
}

fn rig<S: Store>(
    [store, peer]: [S; 2],
    lines: impl IntoIterator<Item = Proxy>,
    servers: impl Any + Send + Sync,
) -> Rig {
    assert!(LEASE > store.response_timeout(), "a lease that can be kept");
    let lines = lines.into_iter().collect();
    Rig { store: Arc::new(store), peer: Arc::new(peer), lines, _servers: Box::new(servers) }
}

pub async fn memory() -> Rig {
    let store = MemoryStore::new();
    let peer = store.peer();
    rig([store, peer], [], ())
}

pub async fn sqlite() -> Rig {
    let folder = Folder::new();
    let options = SqliteStore::options().busy_timeout(ANSWER).response_timeout(ANSWER);
    let open = async || options.clone().open(folder.file()).await.expect("opens");
    rig([open().await, open().await], [], folder)
}

async fn connect(url: &str) -> RedisStore {
    RedisStore::options().response_timeout(ANSWER).connect(url).await.expect("connects")
}

async fn handles(url: &str) -> [RedisStore; 2] {
    [connect(url).await, connect(url).await]
}

async fn one(kind: Kind) -> Rig {
    let server = RedisServer::start(kind);
    let line = Proxy::to(server.port()).await;
    rig(handles(&line.url()).await, [line], server)
}

pub async fn redis() -> Rig {
    one(Kind::Redis).await
}

pub async fn valkey() -> Rig {
    one(Kind::Valkey).await
}

pub async fn cached() -> Rig {
    let server = RedisServer::start(Kind::Redis);
    let line = Proxy::to(server.port()).await;
    let around = handles(&line.url()).await.map(Cached::new);
    rig(around, [line], server)
}

pub async fn cluster() -> Rig {
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
    rig(handles(&format!("redis-cluster://{}", seeds.join(","))).await, lines, cluster)
}

pub async fn sentinel() -> Rig {
    let args = ["--appendonly", "no", "--repl-diskless-sync-delay", "0"];
    let server = RedisServer::start_with(Kind::Redis, &args);
    let line = Proxy::to(server.port()).await;
    // The sentinels name the line as the primary.
    let watched = Watched::start_at(server, line.port(), NEVER);
    rig(handles(&watched.url()).await, [line], watched)
}

pub async fn postgres() -> Rig {
    let server = PostgresServer::start();
    let line = Proxy::to(server.port()).await;
    through_postgres(line, PostgresStore::options(), server).await
}

pub async fn pgbouncer() -> Rig {
    let server = PostgresServer::start();
    let pooler = PgBouncer::start(server.port());
    let line = Proxy::to(pooler.port()).await;
    through_postgres(line, PostgresStore::options().behind_pgbouncer(), (pooler, server)).await
}

async fn through_postgres(line: Proxy, options: PostgresOptions, servers: impl Any + Send + Sync) -> Rig {
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", line.port());
    let options = options.response_timeout(ANSWER).ensure_schema();
    let open = async || options.clone().connect(&url).await.expect("connects");
    rig([open().await, open().await], [line], servers)
}

async fn dynamo(kind: dynamo::Kind) -> Rig {
    let emulator = Emulator::with_table(kind).await;
    let line = Proxy::to(emulator.port()).await;
    let endpoint = format!("http://127.0.0.1:{}", line.port());
    let client = || dynamo::client(&Wire::to(&endpoint));
    let open = || dynamo::options().response_timeout(ANSWER).upkeep_client(client()).build(client(), TABLE);
    rig([open(), open()], [line], emulator)
}

pub async fn dynoxide() -> Rig {
    dynamo(dynamo::Kind::Dynoxide).await
}

pub async fn ministack() -> Rig {
    dynamo(dynamo::Kind::Ministack).await
}
