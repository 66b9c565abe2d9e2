//! Redis clusters, and primaries with sentinels, for tests.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use idem_runtime::conformance::Subject;
use idem_runtime::redis::RedisOptions;
use idem_runtime::{Key, RedisStore};
use redis::{Connection, FromRedisValue, Value};

use crate::server::{Env, Kind, RedisServer, forever, free_port, keep};
pub use crate::server::{until, wait_until};

/// Opens a blocking connection to the server on `port`.
pub fn dial(port: u16) -> Option<Connection> {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
    let connection = client.get_connection_with_timeout(Duration::from_secs(2)).ok()?;
    connection.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    Some(connection)
}

/// Returns the answer of the server on `port` to `command`. Spaces separate the words of `command`; `''` is an empty
/// word.
///
/// # Errors
/// If the server can't be reached, refuses the command, or answers with another type.
pub fn ask<T: FromRedisValue>(port: u16, command: &str) -> Result<T, String> {
    let mut words = command.split_ascii_whitespace();
    let mut asked = redis::cmd(words.next().expect("a command"));
    words.for_each(|word| {
        asked.arg(if word == "''" { "" } else { word });
    });
    asked.query(&mut dial(port).ok_or("no node answers")?).map_err(|error| error.to_string())
}

/// Value of one field of `INFO` or `CLUSTER INFO`.
pub fn field(port: u16, command: &str, name: &str) -> Option<String> {
    let text: String = ask(port, command).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(|value| value.trim().to_owned())
}

/// Number of replicas of the server on `port` that are connected and up to date.
pub fn replicas_online(port: u16) -> usize {
    let text: String = ask(port, "INFO replication").unwrap_or_default();
    text.lines().filter(|line| line.starts_with("slave") && line.contains("state=online")).count()
}

/// Cluster of Redis servers.
#[derive(Debug)]
pub struct Cluster {
    /// Primaries, then their replicas in the same order.
    pub nodes: Vec<RedisServer>,
    primaries: usize,
}

impl Cluster {
    /// Starts three primaries and three replicas. A replica replaces a primary that does not answer for `node_timeout`
    /// milliseconds.
    pub fn start(node_timeout: u32) -> Self {
        Self::start_with(3, 3, node_timeout)
    }

    /// Starts a cluster of this many nodes, with at most one replica for each primary.
    pub fn start_with(primaries: usize, replicas: usize, node_timeout: u32) -> Self {
        Self::start_of(&vec![Kind::Redis; primaries + replicas], primaries, node_timeout)
    }

    /// Starts a cluster with one node for each of `kinds`, primaries first.
    pub fn start_of(kinds: &[Kind], primaries: usize, node_timeout: u32) -> Self {
        let ports: Vec<u16> = kinds.iter().map(|_| free_port()).collect();
        let args = |_| vec!["--appendonly".to_owned(), "no".to_owned()];
        Self::start_each(kinds, &ports, primaries, node_timeout, args, &Vec::new())
    }

    /// Starts a cluster on these ports, primaries first, each node with these arguments and this environment.
    pub fn start_at(
        ports: &[u16],
        primaries: usize,
        node_timeout: u32,
        args: impl Fn(usize) -> Vec<String>,
        env: &Env,
    ) -> Self {
        Self::start_each(&vec![Kind::Redis; ports.len()], ports, primaries, node_timeout, args, env)
    }

    fn start_each(
        kinds: &[Kind],
        ports: &[u16],
        primaries: usize,
        node_timeout: u32,
        args: impl Fn(usize) -> Vec<String>,
        env: &Env,
    ) -> Self {
        let node_timeout = node_timeout.to_string();
        let node = |(n, port): (usize, &u16)| {
            let (bus, args) = (free_port().to_string(), args(n));
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            RedisServer::start_at(
                kinds[n],
                *port,
                &[
                    &args[..],
                    &[
                        "--cluster-enabled",
                        "yes",
                        "--cluster-config-file",
                        "nodes.conf",
                        "--cluster-node-timeout",
                        &node_timeout,
                        "--cluster-replica-validity-factor",
                        "0",
                        "--cluster-port",
                        &bus,
                        "--repl-diskless-sync-delay",
                        "0",
                        "--cluster-allow-replica-migration",
                        "no",
                    ],
                ]
                .concat(),
                env,
            )
        };
        // The primaries get their slots before the nodes meet, so that no two nodes claim the same slot.
        let replicas = ports.len() - primaries;
        let cluster = Self { nodes: ports.iter().enumerate().map(node).collect(), primaries };
        let say = |port: u16, command: &str| ask::<Value>(port, command).unwrap_or_else(|error| panic!("{error}"));
        for (n, port) in ports.iter().enumerate() {
            say(*port, &format!("CLUSTER SET-CONFIG-EPOCH {}", n + 1));
        }
        for (n, port) in ports[..primaries].iter().enumerate() {
            let (first, end) = (n * 16_384 / primaries, (n + 1) * 16_384 / primaries);
            say(*port, &format!("CLUSTER ADDSLOTSRANGE {first} {}", end - 1));
        }
        for node in &cluster.nodes[1..] {
            let bus = node.argument("--cluster-port");
            say(ports[0], &format!("CLUSTER MEET 127.0.0.1 {} {bus}", node.port()));
        }
        let known = ports.len().to_string();
        let all_say = |what: &str, value: &str| {
            wait_until(&format!("{what} {value}"), || {
                ports.iter().all(|port| field(*port, "CLUSTER INFO", what).as_deref() == Some(value))
            });
        };
        all_say("cluster_known_nodes", &known);
        // A replica can follow only a node in its own view of the cluster.
        for (replica, primary) in ports[primaries..].iter().zip(ports) {
            let id: String = ask(*primary, "CLUSTER MYID").expect("an id");
            wait_until("replicated", || ask::<Value>(*replica, &format!("CLUSTER REPLICATE {id}")).is_ok());
        }
        all_say("cluster_state", "ok");
        for primary in &ports[..replicas] {
            wait_until("replicas are online", || replicas_online(*primary) == 1);
        }
        cluster.wait_agreed();
        cluster
    }

    /// Ports of all nodes.
    pub fn ports(&self) -> Vec<u16> {
        self.nodes.iter().map(RedisServer::port).collect()
    }

    /// URL with all primaries as seeds.
    pub fn url(&self) -> String {
        url(&self.ports()[..self.primaries])
    }

    /// Index of the node that serves `key` as a primary now, according to the living nodes.
    pub fn serves(&self, key: &str) -> Option<usize> {
        let ports = self.ports();
        let slot: i64 = ports.iter().find_map(|port| ask(*port, &format!("CLUSTER KEYSLOT {key}")).ok())?;
        // Only the node that serves the key has its own port in the map of slots that it reports.
        (0..ports.len()).find(|n| {
            let ranges = slots(ports[*n]).unwrap_or_default();
            field(ports[*n], "INFO replication", "role").as_deref() == Some("master")
                && ranges.iter().any(|(first, last, owner)| (first..=last).contains(&&slot) && *owner == ports[*n])
        })
    }

    /// Waits until all living nodes report a complete cluster, and agree on the slots of each node.
    pub fn wait_agreed(&self) {
        wait_until("the nodes agree", || {
            let views: Vec<_> = self
                .ports()
                .into_iter()
                .filter(|port| dial(*port).is_some())
                .map(|port| (field(port, "CLUSTER INFO", "cluster_state"), slots(port)))
                .collect();
            views[0].0.as_deref() == Some("ok") && views[0].1.is_some() && views.iter().all(|view| *view == views[0])
        });
    }

    /// Sets `key` to `value`, on the node that serves it.
    pub fn set(&self, key: &str, value: &str) {
        set(&self.ports(), key, value);
    }
}

fn url(ports: &[u16]) -> String {
    let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("redis-cluster://{}", hosts.join(","))
}

fn set(ports: &[u16], key: &str, value: &str) {
    let done = ports.iter().any(|port| {
        dial(*port).is_some_and(|mut to| redis::cmd("SET").arg(key).arg(value).query::<()>(&mut to).is_ok())
    });
    assert!(done, "no node accepts the command");
}

/// Owners of slots according to the node on `port`: first slot, last slot, port.
fn slots(port: u16) -> Option<Vec<(i64, i64, u16)>> {
    let ranges: Vec<Vec<Value>> = ask(port, "CLUSTER SLOTS").ok()?;
    let mut ranges = ranges
        .into_iter()
        .map(|range| match &range[..] {
            [Value::Int(first), Value::Int(last), Value::Array(primary), ..] => match primary.get(1) {
                Some(Value::Int(port)) => Some((*first, *last, u16::try_from(*port).ok()?)),
                _ => None,
            },
            _ => None,
        })
        .collect::<Option<Vec<_>>>()?;
    ranges.sort_unstable();
    Some(ranges)
}

/// Starts a primary and its replica, and waits until the replica is up to date.
pub fn pair(kind: Kind) -> (RedisServer, RedisServer) {
    let args = ["--appendonly", "no", "--repl-diskless-sync-delay", "0"];
    let primary = RedisServer::start_with(kind, &args);
    let replica = replica(kind, primary.port(), primary.port());
    (primary, replica)
}

/// Starts a replica that reaches the server on port `of` through port `through`. Returns once the replica is up to
/// date.
fn replica(kind: Kind, of: u16, through: u16) -> RedisServer {
    let args = ["--appendonly", "no", "--repl-diskless-sync-delay", "0"];
    let replica =
        RedisServer::start_with(kind, &[&args[..], &["--replicaof", &format!("127.0.0.1 {through}")]].concat());
    wait_until("the replica is online", || replicas_online(of) == 1);
    replica
}

/// Primary, its replica, and three sentinels that watch both.
#[derive(Debug)]
pub struct Watched {
    /// The original primary, then the replica.
    pub servers: Vec<RedisServer>,
    /// The sentinels.
    pub sentinels: Vec<Sentinel>,
}

/// Name under which the sentinels know the primary.
pub const NAME: &str = "mymaster";

impl Watched {
    /// Starts all servers. The sentinels replace a primary that does not answer for `down_after` milliseconds.
    pub fn start(down_after: u32) -> Self {
        let primary = RedisServer::start_with(Kind::Redis, &["--appendonly", "no", "--repl-diskless-sync-delay", "0"]);
        let through = primary.port();
        Self::start_at(primary, through, down_after)
    }

    /// Starts a replica and sentinels of `primary`. They reach `primary` through the proxy on port `through`.
    pub fn start_at(primary: RedisServer, through: u16, down_after: u32) -> Self {
        let replica = replica(Kind::Redis, primary.port(), through);
        let sentinels = (0..3).map(|_| Sentinel::start(through, down_after)).collect();
        let watched = Self { servers: vec![primary, replica], sentinels };
        watched.wait_ready();
        watched
    }

    /// Waits until the sentinels know each other and the replica: only then can they replace the primary.
    pub fn wait_ready(&self) {
        wait_until("the sentinels are ready", || {
            self.sentinels.iter().all(|sentinel| {
                let ready: Result<String, _> = ask(sentinel.port, &format!("SENTINEL CKQUORUM {NAME}"));
                let known = sentinel.says("num-slaves").as_deref() == Some("1")
                    && sentinel.says("num-other-sentinels").as_deref() == Some("2")
                    && sentinel.says("flags").as_deref() == Some("master");
                ready.is_ok_and(|ready| ready.starts_with("OK 3")) && known
            })
        });
    }

    /// URL with the sentinels' hosts and the name of the primary.
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port)).collect();
        format!("redis-sentinel://{}/{NAME}", hosts.join(","))
    }

    /// Port of the primary that every sentinel names; `None` if the sentinels disagree.
    pub fn primary(&self) -> Option<u16> {
        let named: Vec<_> = self.sentinels.iter().map(Sentinel::names).collect();
        named[0].filter(|_| named.iter().all(|port| *port == named[0]))
    }
}

/// Sentinel process; killed when dropped.
#[derive(Debug)]
pub struct Sentinel {
    /// Port of the sentinel.
    pub port: u16,
    folder: PathBuf,
    child: Child,
}

impl Sentinel {
    fn start(primary: u16, down_after: u32) -> Self {
        let port = free_port();
        let folder = std::env::temp_dir().join(format!("idem-test-sentinel-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the sentinel");
        let file = folder.join("sentinel.conf");
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor {NAME} 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds {NAME} {down_after}\nsentinel failover-timeout {NAME} 4000\n\
             sentinel parallel-syncs {NAME} 1\n",
            folder.display()
        );
        std::fs::write(&file, text).expect("a file for the sentinel");
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(Kind::Redis.program())
            .arg(&file)
            .arg("--sentinel")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server starts as a sentinel");
        wait_until("the sentinel answers", || dial(port).is_some());
        Self { port, folder, child }
    }

    /// Value of one field of the sentinel's report about the primary.
    pub fn says(&self, field: &str) -> Option<String> {
        let fields: std::collections::HashMap<String, String> =
            ask(self.port, &format!("SENTINEL MASTER {NAME}")).ok()?;
        fields.get(field).cloned()
    }

    /// Port of the server that the sentinel names as the primary.
    pub fn names(&self) -> Option<u16> {
        let named: (String, u16) = ask(self.port, &format!("SENTINEL GET-MASTER-ADDR-BY-NAME {NAME}")).ok()?;
        Some(named.1)
    }

    /// Kills the sentinel (`kill -9`).
    pub fn kill(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

// Stores for the conformance suite.

/// Stores for the conformance suite: one on a cluster that the whole test process shares, and a second handle as
/// another process would open it.
pub async fn cluster_subject(options: fn() -> RedisOptions) -> Subject {
    static SHARED: OnceLock<Vec<u16>> = OnceLock::new();
    // The time-out is long, because a slow machine must not start a failover. No test kills a node of this cluster.
    let ports = SHARED.get_or_init(|| forever(|| keep(Cluster::start(20_000), Cluster::ports))).clone();
    let url = url(&ports);
    let spoil = move |key: Key| {
        let ports = ports.clone();
        async move { set(&ports, &format!("idem:{}", key.as_str()), &crate::nonsense()) }
    };
    subject(&url, options).await.unreachable(unreachable_cluster()).spoil(spoil)
}

/// Stores for the conformance suite: one on sentinels that the whole test process shares, and a second handle as
/// another process would open it.
pub async fn sentinel_subject(options: fn() -> RedisOptions) -> Subject {
    static SHARED: OnceLock<(String, u16)> = OnceLock::new();
    let (url, primary) =
        SHARED.get_or_init(|| forever(|| keep(Watched::start(20_000), |it| (it.url(), it.servers[0].port())))).clone();
    let spoil = move |key: Key| async move { set(&[primary], &format!("idem:{}", key.as_str()), &crate::nonsense()) };
    subject(&url, options).await.spoil(spoil)
}

async fn subject(url: &str, options: fn() -> RedisOptions) -> Subject {
    let store = options().connect(url).await.expect("connects");
    let peer = options().connect(url).await.expect("connects");
    Subject::new(store).peer(peer)
}

/// Store whose cluster has ended.
fn unreachable_cluster() -> RedisStore {
    static GONE: OnceLock<RedisStore> = OnceLock::new();
    let start = || {
        let cluster = Cluster::start_with(1, 0, 20_000);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let store = runtime.block_on(RedisStore::connect(&cluster.url())).expect("connects");
        std::mem::forget(runtime);
        store
    };
    GONE.get_or_init(|| forever(start)).clone()
}
