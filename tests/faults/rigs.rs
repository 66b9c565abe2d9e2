//! Each store with its servers, and the way to cause every fault in it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use idem_runtime::{Error, MySqlStore, Policy, PostgresStore};
use idem_tests::cluster::{Cluster, Watched, ask, until};
use idem_tests::dynamo::{self, Emulator, TABLE};
use idem_tests::mysql::{MySqlServer, is_mariadb};
use idem_tests::nats::{self, NatsCluster, NatsServer};
use idem_tests::postgres::PostgresServer;
use idem_tests::proxy::{Line, Proxy};
use idem_tests::race::{self, Crew};
use idem_tests::server::{Env, Kind, RedisServer, free_port};
use idem_tests::sqlite::{self, Folder};
use mysql_async::Conn;
use mysql_async::prelude::Queryable as _;
use redis::Value;
use rusqlite::config::DbConfig;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio_postgres::error::SqlState;

use crate::Fault;
use crate::tools::{Disk, FULL, READ_ONLY};

/// Store, its servers, and their possible faults.
pub trait Rig {
    /// Text by which a racer opens the store, for `idem_tests::stores::open`: kind, address and namespace.
    fn spec(&self) -> String;

    /// Environment variables of the racers.
    fn env(&self) -> Env {
        Env::new()
    }

    /// Proxies between racers and servers.
    fn lines(&self) -> &[Proxy] {
        &[]
    }

    /// True if the clock of the processes' host is the only clock that the store uses.
    fn clock_of_the_host(&self) -> bool {
        false
    }

    /// True if the store can still write into its existing files when the disk is full.
    fn fills_up_slowly(&self) -> bool {
        false
    }

    /// Reports whether a stopped process holds a lock that keeps all other processes from the store.
    async fn is_held_up(&self) -> bool {
        false
    }

    /// Stops `worker` at a moment when it holds no lock that other processes need.
    async fn stop(&self, crew: &Crew, worker: u32) {
        loop {
            crew.signal(worker, "-STOP");
            if !self.is_held_up().await {
                return;
            }
            crew.signal(worker, "-CONT");
        }
    }

    /// Size of each result in bytes, and number of bytes that a slow line carries in a second.
    fn slow_line(&self) -> (usize, u32) {
        (1024 * 1024, 2_000_000)
    }

    /// Length of leases while the record of key 0 is locked.
    fn lease_of_locked(&self) -> Duration {
        race::LEASE
    }

    /// Number of times that the record of key 0 is locked, and duration of each lock.
    fn locked_for(&self, lease: Duration) -> (usize, Duration) {
        (1, 3 * lease)
    }

    /// True if the store serves other keys while another session locks the record of key 0.
    fn works_next_to_a_lock(&self) -> bool {
        true
    }

    /// Returns a statement that waits for the open transaction with key 0; `None` if no statement waits.
    async fn waits_for_the_insert(&self) -> Option<String> {
        None
    }

    /// Reports whether the node that serves this key runs.
    fn is_of_a_healthy_node(&self, _key: usize) -> bool {
        true
    }

    /// Fault in which the store does not answer while messages are to be marked.
    fn away(&self) -> Fault {
        Fault::server_stopped_and_continued
    }

    /// Gives other users access to the store.
    fn let_other_users_in(&self) {}

    /// Reports whether the store opens in a process that can start no thread.
    fn opens_without_threads(&self) -> bool {
        true
    }

    /// Faults that the test `full_for_a_moment` causes one after the other. Each of them makes the store full or
    /// read-only.
    fn moments(&self) -> &'static [Fault];

    /// Causes the fault.
    async fn break_down(&mut self, fault: Fault);

    /// Ends the fault.
    async fn heal(&mut self, fault: Fault);
}

/// Node time-out in milliseconds for tests without a failover: so long that no server is replaced.
const NEVER: u32 = 600_000;

fn is_of_lines(fault: Fault) -> bool {
    matches!(
        fault,
        Fault::connections_cut | Fault::connections_delayed | Fault::connections_half_closed | Fault::lines_slow
    )
}

/// Sets the behaviour of all lines.
pub fn set_all(lines: &[Proxy], line: Line) {
    for proxy in lines {
        proxy.set(line);
    }
}

// Rig of SQLite.

/// SQLite database in a file.
pub struct Sqlite {
    folder: Folder,
    disk: Disk,
    /// Connection whose transaction locks the file.
    lock: Option<rusqlite::Connection>,
}

impl Sqlite {
    #[expect(clippy::unused_async, reason = "as for every other store")]
    pub async fn start(_: Fault) -> Self {
        let folder = Folder::new();
        Self { disk: Disk::of(folder.path()), folder, lock: None }
    }

    /// Files of the database: the path of each, and its path in the folder to which tests move the files.
    fn files(&self) -> impl Iterator<Item = (PathBuf, PathBuf)> {
        let away = self.folder.path().join("away");
        std::fs::create_dir_all(&away).expect("a folder");
        let folder = self.folder.path().to_owned();
        ["records.db", "records.db-wal", "records.db-shm"].map(|name| (folder.join(name), away.join(name))).into_iter()
    }
}

impl Rig for Sqlite {
    fn spec(&self) -> String {
        format!("sqlite {}", self.folder.file().display())
    }

    fn env(&self) -> Env {
        self.disk.env()
    }

    fn clock_of_the_host(&self) -> bool {
        true
    }

    fn lease_of_locked(&self) -> Duration {
        Duration::from_secs(4)
    }

    fn locked_for(&self, lease: Duration) -> (usize, Duration) {
        (3, lease / 2)
    }

    fn works_next_to_a_lock(&self) -> bool {
        false
    }

    fn away(&self) -> Fault {
        Fault::record_locked
    }

    fn let_other_users_in(&self) {
        for (path, mode) in [(self.folder.path().to_owned(), 0o777), (self.folder.file(), 0o666)] {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
        }
    }

    fn opens_without_threads(&self) -> bool {
        false
    }

    fn moments(&self) -> &'static [Fault] {
        &[Fault::disk_full, Fault::read_only]
    }

    async fn is_held_up(&self) -> bool {
        let path = self.folder.file();
        // This connection fails to lock the file after half a minute.
        let locked = move || sqlite::raw(&path).execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_err();
        tokio::task::spawn_blocking(locked).await.expect("asked")
    }

    async fn break_down(&mut self, fault: Fault) {
        match fault {
            Fault::disk_full => self.disk.fail(FULL),
            Fault::read_only => self.disk.fail(READ_ONLY),
            Fault::records_deleted => {
                let deleted = sqlite::raw(&self.folder.file()).execute_batch("DELETE FROM idem_records");
                deleted.expect("deletes");
            }
            Fault::table_removed => {
                self.files().for_each(|(here, away)| std::fs::rename(here, away).expect("can be moved"));
            }
            Fault::index_removed => {
                let lock = sqlite::raw(&self.folder.file());
                lock.execute_batch("BEGIN IMMEDIATE").expect("locks");
                let (index, _) = self.files().last().expect("three files");
                std::fs::remove_file(index).expect("can be removed");
                // The log file must stay, even if this connection is the last one to close.
                lock.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).expect("is set");
            }
            Fault::record_locked => {
                let lock = sqlite::raw(&self.folder.file());
                lock.execute_batch("BEGIN IMMEDIATE").expect("locks");
                self.lock = Some(lock);
            }
            Fault::renewals_refused => {
                let made = sqlite::raw(&self.folder.file()).execute_batch(
                    "CREATE TRIGGER no_renewal BEFORE UPDATE OF lapses_at ON idem_records \
                     WHEN NEW.lapses_at > OLD.lapses_at BEGIN SELECT RAISE(ABORT, 'no'); END",
                );
                made.expect("makes the trigger");
            }
            _ => unreachable!("{fault:?}"),
        }
    }

    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::table_removed => {
                self.files().for_each(|(here, away)| std::fs::rename(away, here).expect("can be moved"));
            }
            Fault::record_locked => self.lock = None,
            Fault::renewals_refused => {
                sqlite::raw(&self.folder.file()).execute_batch("DROP TRIGGER no_renewal").expect("is removed");
            }
            _ => self.disk.heal(),
        }
    }
}

// Rig of Redis: one server, a cluster, or a primary with sentinels.

/// Redis servers of one topology.
pub struct Redis {
    servers: Servers,
    lines: Vec<Proxy>,
    disk: Disk,
    replicated: bool,
}

enum Servers {
    One(RedisServer),
    Cluster(Cluster),
    Watched(Watched),
}

/// Index of the cluster's primary that the fault `node_stopped` stops.
const STOPPED: usize = 1;

/// Settings of a server for this fault.
fn settings(fault: Fault) -> Vec<String> {
    let settings: &[&str] = match fault {
        Fault::server_killed_and_restarted => &["--appendonly", "yes", "--appendfsync", "always"],
        Fault::disk_full | Fault::full_for_a_moment => &["--appendonly", "yes"],
        _ => &["--appendonly", "no"],
    };
    settings.iter().map(ToString::to_string).collect()
}

/// Starts proxies in front of `ports` if the fault concerns lines. Returns the proxies and the ports for clients.
async fn proxied(fault: Fault, ports: &[u16]) -> (Vec<Proxy>, Vec<u16>) {
    let mut lines = Vec::new();
    if is_of_lines(fault) {
        for port in ports {
            lines.push(Proxy::to(*port).await);
        }
    }
    let through = if lines.is_empty() { ports.to_vec() } else { lines.iter().map(Proxy::port).collect() };
    (lines, through)
}

/// Environment of a server under `fault`: with a disk that can fail, if the fault needs one.
fn disk_env(fault: Fault, disk: &Disk) -> Env {
    if matches!(fault, Fault::disk_full | Fault::full_for_a_moment) { disk.env() } else { Env::new() }
}

impl Redis {
    async fn server(fault: Fault, disk: &Disk) -> (RedisServer, Vec<Proxy>, u16) {
        let settings = settings(fault);
        let mut args: Vec<&str> = settings.iter().map(String::as_str).collect();
        args.extend(["--repl-diskless-sync-delay", "0"]);
        let server = RedisServer::start_at(Kind::Redis, free_port(), &args, &disk_env(fault, disk));
        let (lines, through) = proxied(fault, &[server.port()]).await;
        (server, lines, through[0])
    }

    pub async fn one(fault: Fault) -> Self {
        let disk = Disk::of(&std::env::temp_dir());
        let (server, lines, _) = Self::server(fault, &disk).await;
        Self { servers: Servers::One(server), lines, disk, replicated: false }
    }

    pub async fn cluster(fault: Fault) -> Self {
        let disk = Disk::of(&std::env::temp_dir());
        if fault == Fault::failover {
            let servers = Servers::Cluster(Cluster::start(2000));
            return Self { servers, lines: Vec::new(), disk, replicated: true };
        }
        let ports = [free_port(), free_port()];
        let (lines, through) = proxied(fault, &ports).await;
        let args = |n: usize| {
            // The nodes announce the ports of the proxies to clients.
            let announced = ["--cluster-announce-port".to_owned(), through[n].to_string()];
            [settings(fault), announced.to_vec()].concat()
        };
        let cluster = Cluster::start_at(&ports, ports.len(), NEVER, args, &disk_env(fault, &disk));
        Self { servers: Servers::Cluster(cluster), lines, disk, replicated: false }
    }

    pub async fn sentinel(fault: Fault) -> Self {
        let disk = Disk::of(&std::env::temp_dir());
        let (server, lines, through) = Self::server(fault, &disk).await;
        let replicated = fault == Fault::failover;
        let watched = Watched::start_at(server, through, if replicated { 1500 } else { NEVER });
        Self { servers: Servers::Watched(watched), lines, disk, replicated }
    }

    /// Servers that accept writes.
    fn primaries(&mut self) -> &mut [RedisServer] {
        match &mut self.servers {
            Servers::One(server) => std::slice::from_mut(server),
            Servers::Cluster(cluster) => &mut cluster.nodes,
            Servers::Watched(watched) => &mut watched.servers[..1],
        }
    }

    fn say(&mut self, command: &str) {
        for server in self.primaries() {
            ask::<Value>(server.port(), command).unwrap_or_else(|error| panic!("{command}: {error}"));
        }
    }

    /// Kills a primary, and restarts it after its replica has replaced it.
    async fn fail_over(&mut self) {
        match &mut self.servers {
            Servers::Cluster(cluster) => {
                cluster.nodes[2].kill();
                let replica = cluster.nodes[5].port();
                until("the replica is promoted", async || is_primary(replica)).await;
                cluster.nodes[2].run();
            }
            Servers::Watched(watched) => {
                let (old, new) = (watched.servers[0].port(), watched.servers[1].port());
                watched.servers[0].kill();
                until("the sentinels name the replica", async || watched.primary() == Some(new)).await;
                // The promoted server confirms no write until it has a replica. The test sends the old primary the
                // command that the sentinels would send later.
                watched.servers[0].run();
                ask::<Value>(old, &format!("REPLICAOF 127.0.0.1 {new}")).expect("obeys");
            }
            Servers::One(_) => unreachable!("a single server has no replica"),
        }
    }
}

fn is_primary(port: u16) -> bool {
    idem_tests::cluster::field(port, "INFO replication", "role").as_deref() == Some("master")
}

impl Rig for Redis {
    fn spec(&self) -> String {
        let hosts: Vec<_> = self.lines.iter().map(|line| format!("127.0.0.1:{}", line.port())).collect();
        let hosts = hosts.join(",");
        let url = match &self.servers {
            Servers::One(server) if hosts.is_empty() => server.url(),
            Servers::One(_) => format!("redis://{hosts}"),
            Servers::Cluster(cluster) if hosts.is_empty() => cluster.url(),
            Servers::Cluster(_) => format!("redis-cluster://{hosts}"),
            // The sentinels name the port of the proxy.
            Servers::Watched(watched) => watched.url(),
        };
        format!("{} {url} race:", if self.replicated { "replicated" } else { "redis" })
    }

    fn lines(&self) -> &[Proxy] {
        &self.lines
    }

    fn is_of_a_healthy_node(&self, key: usize) -> bool {
        match &self.servers {
            Servers::Cluster(cluster) => {
                let name = format!("race:{}", race::key(key).as_str());
                cluster.serves(&name).expect("every key has a node") != STOPPED
            }
            Servers::One(_) | Servers::Watched(_) => true,
        }
    }

    fn moments(&self) -> &'static [Fault] {
        &[Fault::out_of_memory, Fault::disk_full, Fault::read_only]
    }

    async fn break_down(&mut self, fault: Fault) {
        match fault {
            Fault::node_stopped => self.primaries()[STOPPED].signal("-STOP"),
            Fault::server_killed_and_restarted => self.primaries().iter_mut().for_each(RedisServer::kill),
            Fault::server_stopped_and_continued => self.primaries().iter().for_each(|server| server.signal("-STOP")),
            Fault::failover => self.fail_over().await,
            Fault::connections_cut => set_all(&self.lines, Line::Refuse),
            Fault::out_of_memory => self.say("CONFIG SET maxmemory 1"),
            Fault::disk_full => self.disk.fail(FULL),
            Fault::read_only => match self.servers {
                Servers::One(_) => self.say("REPLICAOF 127.0.0.1 1"),
                // `REPLICAOF` is not possible here, because the cluster or the sentinels choose the replicas.
                Servers::Cluster(_) | Servers::Watched(_) => self.say("CONFIG SET min-replicas-to-write 9"),
            },
            Fault::records_deleted => self.say("FLUSHALL"),
            Fault::renewals_refused => self.say("ACL SETUSER default -pexpire"),
            _ => unreachable!("{fault:?}"),
        }
    }

    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.primaries().iter_mut().for_each(RedisServer::run),
            Fault::server_stopped_and_continued => self.primaries().iter().for_each(|server| server.signal("-CONT")),
            Fault::node_stopped => self.primaries()[STOPPED].signal("-CONT"),
            Fault::connections_cut => set_all(&self.lines, Line::Pass),
            Fault::out_of_memory => self.say("CONFIG SET maxmemory 0"),
            Fault::renewals_refused => self.say("ACL SETUSER default +pexpire"),
            Fault::disk_full => self.disk.heal(),
            Fault::read_only => match self.servers {
                Servers::One(_) => self.say("REPLICAOF NO ONE"),
                Servers::Cluster(_) | Servers::Watched(_) => self.say("CONFIG SET min-replicas-to-write 0"),
            },
            _ => {}
        }
    }
}

// Rig of PostgreSQL.

/// PostgreSQL server.
pub struct Postgres {
    server: PostgresServer,
    lines: Vec<Proxy>,
    disk: Disk,
    /// Role as which the workers log in.
    login: &'static str,
    /// Connection that holds the server's locks, or the record of key 0, until the fault ends.
    hoarder: Option<tokio_postgres::Client>,
    /// Open transaction of a call: process id of its session in the server, and its task.
    inserted: Option<(i32, AbortHandle)>,
}

impl Postgres {
    pub async fn start(fault: Fault) -> Self {
        let disk = Disk::of(&std::env::temp_dir());
        // The server has few locks, so that they can run out.
        let settings = ["max_locks_per_transaction=10"];
        let server = PostgresServer::start_in(&settings, &disk_env(fault, &disk));
        let (lines, _) = proxied(fault, &[server.port()]).await;
        // The workers log in as an ordinary role, because a superuser can't lose a right.
        let login = if fault == Fault::renewals_refused { "worker" } else { "postgres" };
        let rig = Self { server, lines, disk, login, hoarder: None, inserted: None };
        rig.make_table().await;
        rig.say("CREATE ROLE worker LOGIN;GRANT USAGE ON SCHEMA idem TO worker;GRANT ALL ON idem.records TO worker")
            .await;
        rig
    }

    async fn make_table(&self) {
        PostgresStore::options().ensure_schema().connect(&self.server.url()).await.expect("makes the table");
    }

    async fn say(&self, text: &str) {
        let raw = self.server.raw().await;
        for statement in text.split(';') {
            raw.batch_execute(statement).await.unwrap_or_else(|error| panic!("{statement}: {error:?}"));
        }
    }

    /// Calls a handler for key 0 in a transaction, and leaves the transaction open.
    async fn insert(&mut self) {
        let mut raw = self.server.raw().await;
        let pid = raw.query_one("SELECT pg_backend_pid()", &[]).await.expect("answers").get(0);
        let (begins, begun) = oneshot::channel();
        let call = tokio::spawn(async move {
            let tx = raw.transaction().await.expect("begins");
            let tx = idem_runtime::within::OpenTransaction::new(tx);
            let policy = Policy::new(Duration::from_secs(3600));
            let operation = PostgresStore::within(&tx).operation(Ok(race::key(0)), policy);
            let body = async {
                begins.send(()).expect("is waited for");
                std::future::pending::<Result<(), Error>>().await
            };
            operation.run(body).await.expect("never ends");
        });
        begun.await.expect("the body begins");
        self.inserted = Some((pid, call.abort_handle()));
    }

    /// Takes locks until the server has no memory for further locks.
    async fn hoard(&mut self) {
        let raw = self.server.raw().await;
        let (mut next, mut refused) = (0_u32, 0);
        // Repeat, because other connections may release some locks meanwhile.
        while refused < 50 {
            let more = if refused == 0 { 1000 } else { 1 };
            let sql = format!("SELECT count(pg_advisory_lock(n)) FROM generate_series({next}, {}) n", next + more - 1);
            next += more;
            refused = match raw.batch_execute(&sql).await {
                Ok(()) => refused.min(1),
                Err(error) => {
                    assert_eq!(error.code().map(SqlState::code), Some("53200"), "{error:?}");
                    refused + 1
                }
            };
            if refused > 1 {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        }
        self.hoarder = Some(raw);
    }
}

impl Rig for Postgres {
    fn spec(&self) -> String {
        let port = self.lines.first().map_or(self.server.port(), Proxy::port);
        format!("postgres postgres://{}@127.0.0.1:{port}/postgres idem", self.login)
    }

    fn fills_up_slowly(&self) -> bool {
        true
    }

    fn moments(&self) -> &'static [Fault] {
        &[Fault::disk_full, Fault::read_only]
    }

    fn lines(&self) -> &[Proxy] {
        &self.lines
    }

    async fn waits_for_the_insert(&self) -> Option<String> {
        let (pid, _) = self.inserted.as_ref()?;
        let waits = "SELECT query FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))";
        let rows = self.server.raw().await.query(waits, &[pid]).await.expect("answers");
        rows.first().map(|row| row.get(0))
    }

    async fn break_down(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.server.kill(),
            Fault::server_stopped_and_continued => self.server.stop(),
            Fault::connections_cut => set_all(&self.lines, Line::Refuse),
            Fault::out_of_memory => self.hoard().await,
            Fault::insert_uncommitted => self.insert().await,
            Fault::record_locked => {
                let raw = self.server.raw().await;
                raw.batch_execute("BEGIN").await.expect("begins");
                let key = race::key(0);
                let lock = raw.query("SELECT 1 FROM idem.records WHERE key = $1 FOR UPDATE", &[&key.as_str()]).await;
                assert_eq!(lock.expect("locks").len(), 1, "the record exists");
                self.hoarder = Some(raw);
            }
            Fault::disk_full => {
                // The server gets its next log segment while the disk works: a server that can't write its log ends
                // itself, which is another fault.
                self.say("SELECT pg_switch_wal();CHECKPOINT").await;
                self.disk.fail(FULL);
            }
            Fault::read_only => {
                self.say("ALTER SYSTEM SET default_transaction_read_only = on;SELECT pg_reload_conf()").await;
            }
            Fault::records_deleted => self.say("TRUNCATE idem.records").await,
            Fault::renewals_refused => self.say("REVOKE UPDATE ON idem.records FROM worker").await,
            Fault::table_removed => self.say("DROP SCHEMA idem CASCADE").await,
            _ => unreachable!("{fault:?}"),
        }
    }

    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.server.run(),
            Fault::server_stopped_and_continued => self.server.go_on(),
            Fault::connections_cut => set_all(&self.lines, Line::Pass),
            Fault::out_of_memory | Fault::record_locked => self.hoarder = None,
            Fault::insert_uncommitted => {
                if let Some((_, call)) = self.inserted.take() {
                    call.abort();
                }
            }
            Fault::disk_full => self.disk.heal(),
            Fault::read_only => {
                self.say("ALTER SYSTEM RESET default_transaction_read_only;SELECT pg_reload_conf()").await;
            }
            Fault::table_removed => self.make_table().await,
            Fault::renewals_refused => self.say("GRANT UPDATE ON idem.records TO worker").await,
            _ => {}
        }
    }
}

// Rig of MariaDB.

/// MariaDB server, with a replica for the fault `failover`.
pub struct MySql {
    server: MySqlServer,
    replica: Option<MySqlServer>,
    /// Proxies in front of the server. After a failover the proxy leads to the replica.
    lines: Vec<Proxy>,
    disk: Disk,
    /// Session whose open transaction holds the record of key 0.
    holder: Option<Conn>,
}

/// Table of the racers.
const RECORDS: &str = "race";

impl MySql {
    pub async fn start(fault: Fault) -> Self {
        let disk = Disk::of(&std::env::temp_dir());
        let is_failover = fault == Fault::failover;
        let server = match is_failover {
            true => MySqlServer::primary(),
            false => MySqlServer::start_in(&[], &disk_env(fault, &disk)),
        };
        let replica = if is_failover { Some(MySqlServer::replica_of(&server).await) } else { None };
        let (mut lines, _) = proxied(fault, &[server.port()]).await;
        if is_failover {
            lines.push(Proxy::to(server.port()).await);
        }
        let rig = Self { server, replica, lines, disk, holder: None };
        rig.make_table().await;
        // An administrator may write to a server that is read-only, and can't lose a right. So the workers have their
        // own login.
        rig.say(&format!("CREATE USER worker@'%';GRANT SELECT, INSERT, UPDATE ON idem.{RECORDS} TO worker@'%'")).await;
        rig
    }

    async fn make_table(&self) {
        let options = MySqlStore::options().table(RECORDS).ensure_schema();
        options.connect(&self.server.url()).await.expect("makes the table");
    }

    async fn say(&self, text: &str) {
        let mut raw = self.server.raw().await;
        for statement in text.split(';') {
            raw.query_drop(statement).await.unwrap_or_else(|error| panic!("{statement}: {error:?}"));
        }
    }

    /// Runs `statement` in a transaction, and leaves the transaction open.
    async fn hold(&mut self, statement: String) {
        let mut raw = self.server.raw().await;
        raw.query_drop("BEGIN").await.expect("begins");
        raw.exec_drop(statement, (race::key(0).as_str(),)).await.expect("has a lock");
        assert_eq!(raw.affected_rows(), 1, "one record");
        self.holder = Some(raw);
    }

    /// Kills the primary, and promotes its replica.
    async fn fail_over(&mut self) {
        self.server.kill();
        let replica = self.replica.take().expect("a replica");
        replica.promote().await;
        self.lines[0].redirect(replica.port());
        self.server = replica;
    }
}

impl Rig for MySql {
    fn spec(&self) -> String {
        let port = self.lines.first().map_or(self.server.port(), Proxy::port);
        format!("mysql mysql://worker@127.0.0.1:{port}/idem {RECORDS}")
    }

    fn fills_up_slowly(&self) -> bool {
        true
    }

    fn moments(&self) -> &'static [Fault] {
        // A MySQL that finds the disk of its binary log full tries again after a minute, by when the leases are lost.
        if is_mariadb() { &[Fault::disk_full, Fault::read_only] } else { &[Fault::read_only] }
    }

    fn lines(&self) -> &[Proxy] {
        &self.lines
    }

    fn slow_line(&self) -> (usize, u32) {
        // Results are small, because a result that is read has to arrive within one time limit, whatever its size.
        (40 * 1024, 2_000_000)
    }

    fn lease_of_locked(&self) -> Duration {
        // A statement waits a second for a lock, and the store's time limit, three tenths of this, must be longer.
        Duration::from_secs(5)
    }

    async fn break_down(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.server.kill(),
            Fault::server_stopped_and_continued => self.server.stop(),
            Fault::failover => self.fail_over().await,
            Fault::connections_cut => set_all(&self.lines, Line::Refuse),
            Fault::insert_uncommitted => self.hold(format!(
                "INSERT INTO {RECORDS} (`key`, owner, format, state, attempt, attempts_used, on_crash_fail, lease_ms, \
                 ttl_ms, lapses_at, expires_at, listed_at, first_seen_at, began_at) VALUES (?, '0123456789abcdef', 1, \
                 'pending', 1, 1, 0, 60000, 3600000, 9e15, 9e15, 9e15, 0, 0)"
            ))
            .await,
            Fault::record_locked => {
                self.hold(format!("UPDATE {RECORDS} SET listed_at = listed_at + 1 WHERE `key` = ?")).await;
            }
            Fault::disk_full => self.disk.fail(FULL),
            Fault::read_only => self.say("SET GLOBAL read_only = 1").await,
            Fault::records_deleted => self.say(&format!("TRUNCATE idem.{RECORDS}")).await,
            Fault::renewals_refused => self.say(&format!("REVOKE UPDATE ON idem.{RECORDS} FROM worker@'%'")).await,
            Fault::table_removed => self.say(&format!("DROP TABLE idem.{RECORDS}")).await,
            _ => unreachable!("{fault:?}"),
        }
    }

    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.server.run(),
            Fault::server_stopped_and_continued => self.server.go_on(),
            Fault::connections_cut => set_all(&self.lines, Line::Pass),
            Fault::insert_uncommitted | Fault::record_locked => {
                if let Some(mut holder) = self.holder.take() {
                    holder.query_drop("ROLLBACK").await.expect("ends");
                }
            }
            Fault::disk_full => self.disk.heal(),
            Fault::read_only => self.say("SET GLOBAL read_only = 0").await,
            Fault::table_removed => self.make_table().await,
            Fault::renewals_refused => self.say(&format!("GRANT UPDATE ON idem.{RECORDS} TO worker@'%'")).await,
            _ => {}
        }
    }
}

// Rig of DynamoDB.

/// DynamoDB emulator that keeps its tables on disk.
pub struct Dynamo {
    emulator: Emulator,
    lines: Vec<Proxy>,
    disk: Disk,
    /// Largest difference between the clocks of workers in seconds, for faults that set clocks.
    skew: Option<u64>,
}

impl Dynamo {
    pub async fn start(fault: Fault) -> Self {
        let disk = Disk::of(&std::env::temp_dir());
        let emulator = Emulator::durable_in(&disk_env(fault, &disk)).await;
        let (lines, _) = proxied(fault, &[emulator.port()]).await;
        let skew = (fault == Fault::clock_stepped_within_the_skew).then_some(2 * 3600);
        Self { emulator, lines, disk, skew }
    }

    fn client(&self) -> aws_sdk_dynamodb::Client {
        dynamo::client(&dynamo::Wire::to(&self.emulator.endpoint()))
    }

    async fn delete_all(&self) {
        let client = self.client();
        let found = client.scan().table_name(TABLE).consistent_read(true).send().await.expect("scans");
        for item in found.items() {
            let delete = client.delete_item().table_name(TABLE).key("key", item["key"].clone());
            delete.send().await.expect("deletes");
        }
    }
}

impl Rig for Dynamo {
    fn spec(&self) -> String {
        let port = self.lines.first().map_or(self.emulator.port(), Proxy::port);
        let skew = self.skew.map(|skew| format!(" {skew}")).unwrap_or_default();
        format!("dynamo http://127.0.0.1:{port} {TABLE}{skew}")
    }

    fn lines(&self) -> &[Proxy] {
        &self.lines
    }

    fn slow_line(&self) -> (usize, u32) {
        // Results are small, because an item has at most 400 KB and each call has a time limit.
        (40 * 1024, 2_000_000)
    }

    fn moments(&self) -> &'static [Fault] {
        &[Fault::disk_full]
    }

    async fn break_down(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.emulator.kill(),
            Fault::server_stopped_and_continued => self.emulator.signal("-STOP"),
            Fault::connections_cut => set_all(&self.lines, Line::Refuse),
            Fault::disk_full => self.disk.fail(FULL),
            Fault::records_deleted => self.delete_all().await,
            Fault::table_removed => {
                self.client().delete_table().table_name(TABLE).send().await.expect("deletes");
            }
            _ => unreachable!("{fault:?}"),
        }
    }

    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.emulator.run(),
            Fault::server_stopped_and_continued => self.emulator.signal("-CONT"),
            Fault::connections_cut => set_all(&self.lines, Line::Pass),
            Fault::disk_full => self.disk.heal(),
            Fault::table_removed => self.emulator.ensure_table().await,
            _ => {}
        }
    }
}

// Rig of NATS.

/// NATS server, or a cluster of three servers for the fault `failover`.
pub struct Nats {
    servers: NatsServers,
    lines: Vec<Proxy>,
}

enum NatsServers {
    One(NatsServer),
    Cluster(NatsCluster),
}

/// Bucket of the racers.
const BUCKET: &str = "race";

/// Configuration of a server whose user `worker` may publish on these subjects.
fn rights(publish: &str) -> String {
    format!(
        "accounts {{ A {{ jetstream: enabled, users: [ {{ user: all, password: all }}, {{ user: worker, password: worker, \
         permissions: {{ publish: {{ {publish} }}, subscribe: \">\" }} }} ] }} }}\nno_auth_user: all\n"
    )
}

impl Nats {
    pub async fn start(fault: Fault) -> Self {
        if fault == Fault::failover {
            return Self { servers: NatsServers::Cluster(NatsCluster::start(BUCKET).await), lines: Vec::new() };
        }
        let server = NatsServer::start_with(nats::Kind::Nats, &rights("allow: \">\""));
        let (lines, _) = proxied(fault, &[server.port()]).await;
        let rig = Self { servers: NatsServers::One(server), lines };
        rig.make_stream().await;
        rig
    }

    fn server(&mut self) -> &mut NatsServer {
        match &mut self.servers {
            NatsServers::One(server) => server,
            NatsServers::Cluster(_) => unreachable!("only a failover needs a cluster"),
        }
    }

    fn url(&self) -> String {
        match &self.servers {
            NatsServers::One(server) => server.url(),
            NatsServers::Cluster(cluster) => cluster.url(),
        }
    }

    async fn make_stream(&self) {
        idem_runtime::NatsStore::options().bucket(BUCKET).connect(&self.url()).await.expect("makes the stream");
    }

    /// Sends a request about the stream, and returns the answer.
    async fn ask(&self, verb: &str, question: String) -> serde_json::Value {
        let client = async_nats::connect(self.url()).await.expect("connects");
        let answer = client.request(format!("$JS.API.STREAM.{verb}.KV_{BUCKET}"), question.into()).await;
        let answer: serde_json::Value = serde_json::from_slice(&answer.expect("an answer").payload).expect("JSON");
        assert!(answer["error"].is_null(), "{verb}: {answer}");
        answer
    }

    /// Sets the number of bytes that the stream may hold: as many as it holds now, or any number (-1).
    async fn limit(&self, unlimited: bool) {
        let mut info = self.ask("INFO", String::new()).await;
        let most = if unlimited { (-1).into() } else { info["state"]["bytes"].take() };
        info["config"]["max_bytes"] = most;
        self.ask("UPDATE", info["config"].to_string()).await;
    }

    /// Kills the leader of the stream, and starts it again after another server leads.
    async fn fail_over(&mut self) {
        let NatsServers::Cluster(cluster) = &mut self.servers else { unreachable!("a single server has no replica") };
        let leader = cluster.leader(0, BUCKET).await.expect("a leader");
        cluster.servers[leader].kill();
        let other = (leader + 1) % 3;
        until("another server leads", async || cluster.leader(other, BUCKET).await.is_some_and(|it| it != leader))
            .await;
        cluster.servers[leader].run();
    }
}

impl Rig for Nats {
    fn spec(&self) -> String {
        match (&self.servers, self.lines.first()) {
            (NatsServers::Cluster(_), _) => format!("nats {} {BUCKET} 3", self.url()),
            (NatsServers::One(server), None) => {
                format!("nats nats://worker:worker@127.0.0.1:{} {BUCKET}", server.port())
            }
            (NatsServers::One(_), Some(line)) => {
                format!("nats nats://worker:worker@127.0.0.1:{} {BUCKET}", line.port())
            }
        }
    }

    fn lines(&self) -> &[Proxy] {
        &self.lines
    }

    fn slow_line(&self) -> (usize, u32) {
        // Results are small, because each call has a time limit, whatever the size of its message.
        (40 * 1024, 2_000_000)
    }

    fn moments(&self) -> &'static [Fault] {
        &[Fault::out_of_memory]
    }

    async fn break_down(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.server().kill(),
            Fault::server_stopped_and_continued => self.server().signal("-STOP"),
            Fault::failover => self.fail_over().await,
            Fault::connections_cut => set_all(&self.lines, Line::Refuse),
            Fault::out_of_memory => self.limit(false).await,
            Fault::records_deleted => {
                self.ask("PURGE", String::new()).await;
            }
            Fault::table_removed => {
                self.ask("DELETE", String::new()).await;
            }
            Fault::renewals_refused => self.server().configure(&rights("deny: \"$KV.>\"")),
            _ => unreachable!("{fault:?}"),
        }
    }

    async fn heal(&mut self, fault: Fault) {
        match fault {
            Fault::server_killed_and_restarted => self.server().run(),
            Fault::server_stopped_and_continued => self.server().signal("-CONT"),
            Fault::connections_cut => set_all(&self.lines, Line::Pass),
            Fault::out_of_memory => self.limit(true).await,
            Fault::table_removed => self.make_stream().await,
            Fault::renewals_refused => self.server().configure(&rights("allow: \">\"")),
            _ => {}
        }
    }
}
