//! NATS servers for tests, and the subjects of records, written independently of the store.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use async_nats::HeaderMap;
use idem_runtime::conformance::Subject;
use idem_runtime::nats::NatsOptions;
use idem_runtime::{Key, NatsStore};

use crate::proxy::{Line, Proxy};
use crate::server::{forever, free_port, keep, signal};

/// Kind of server. An environment variable names its program; `scripts/test` sets these variables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// NATS 2.11 or newer: the program that `IDEM_TEST_NATS` names.
    Nats,
    /// NATS before 2.11, which the store must refuse: the program that `IDEM_TEST_OLD_NATS` names.
    OldNats,
}

impl Kind {
    fn program(self) -> PathBuf {
        let variable = match self {
            Self::Nats => "IDEM_TEST_NATS",
            Self::OldNats => "IDEM_TEST_OLD_NATS",
        };
        let program = std::env::var_os(variable);
        program.unwrap_or_else(|| panic!("`{variable}` names no server program; run ./scripts/test")).into()
    }
}

/// URL of one server for the whole test process.
pub fn shared() -> String {
    static SERVER: OnceLock<String> = OnceLock::new();
    SERVER.get_or_init(|| forever(|| keep(NatsServer::start(), NatsServer::url))).clone()
}

/// Stores for the conformance suite: one on the shared server, and a second handle as another process would open it.
pub async fn subject() -> Subject {
    let url = shared();
    let store = NatsStore::connect(&url).await.expect("connects");
    let peer = NatsStore::connect(&url).await.expect("connects");
    let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    let cut_off = Proxy::to(port).await;
    let unreachable = cut_off.url().replace("redis://", "nats://");
    let unreachable = NatsStore::connect(&unreachable).await.expect("connects");
    cut_off.set(Line::Refuse);
    let spoil = move |key: Key| {
        let url = url.clone();
        async move { put(&url, &subject_of("idem", &key), crate::nonsense().as_bytes()).await }
    };
    Subject::new(store).peer(peer).unreachable(unreachable).spoil(spoil).largest_result(1_000_000)
}

/// URLs of the servers of one cluster for the whole test process.
///
/// # Panics
/// If the cluster can't be started.
pub fn shared_cluster() -> &'static [String] {
    static CLUSTER: OnceLock<Vec<String>> = OnceLock::new();
    CLUSTER.get_or_init(|| {
        forever(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let cluster = runtime.block_on(NatsCluster::start("idem"));
            keep(cluster, |cluster| cluster.servers.iter().map(NatsServer::url).collect())
        })
    })
}

/// Opens a store on a stream with three replicas. Servers that have just started answer only once they have a leader.
///
/// # Panics
/// If the cluster creates no bucket in a hundred tries.
pub async fn connect_replicated(options: NatsOptions, url: &str) -> NatsStore {
    let mut tries = 0;
    loop {
        match options.clone().num_replicas(3).connect(url).await {
            Ok(store) => return store,
            Err(error) => assert!(tries < 100, "no bucket: {error}"),
        }
        tries += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Stores for the conformance suite, on a stream with three replicas in a cluster of three servers. The handles are
/// connected to different servers.
///
/// # Panics
/// If the cluster can't be started.
pub async fn replicated_subject() -> Subject {
    let urls = shared_cluster();
    let [store, peer] = [0, 1].map(|n| connect_replicated(NatsStore::options(), &urls[n]));
    Subject::new(store.await).peer(peer.await).largest_result(1_000_000)
}

/// Stores a message under `subject`, as another program would.
///
/// # Panics
/// If no stream confirms the message.
pub async fn put(url: &str, subject: &str, body: &[u8]) {
    let client = async_nats::connect(url).await.expect("connects");
    let answer = client.request_with_headers(subject.to_owned(), HeaderMap::new(), body.to_vec().into()).await;
    let answer = answer.expect("an answer").payload;
    assert!(!String::from_utf8_lossy(&answer).contains("error"), "{answer:?}");
}

/// Returns the subject of the record of `key` in a bucket without a namespace.
pub fn subject_of(bucket: &str, key: &Key) -> String {
    let mut subject = format!("$KV.{bucket}.1");
    for token in key.as_str().splitn(3, '/').skip(1) {
        subject.push('.');
        for byte in token.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'/' => subject.push(byte.into()),
                _ => write!(subject, "={byte:02X}").expect("a string"),
            }
        }
    }
    subject
}

/// Server process; killed when dropped.
#[derive(Debug)]
pub struct NatsServer {
    kind: Kind,
    port: u16,
    folder: PathBuf,
    args: Vec<OsString>,
    child: Option<Child>,
}

impl NatsServer {
    /// Starts a server with JetStream and default settings.
    pub fn start() -> Self {
        Self::start_with(Kind::Nats, "")
    }

    /// Starts a server with JetStream and these lines in its configuration.
    pub fn start_with(kind: Kind, lines: &str) -> Self {
        Self::start_at(kind, free_port(), lines)
    }

    /// Starts a server with JetStream on this port, and these lines in its configuration.
    pub fn start_at(kind: Kind, port: u16, lines: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("idem-test-nats-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the server");
        let file = folder.join("nats.conf");
        std::fs::write(&file, lines).expect("can be written");
        let mut args: Vec<OsString> = ["-a", "127.0.0.1", "-p", &port.to_string(), "-js"].map(Into::into).to_vec();
        args.extend(["-sd".into(), folder.join("data").into(), "-l".into(), folder.join("log").into()]);
        args.extend(["-c".into(), file.into()]);
        let mut server = Self { kind, port, folder, args, child: None };
        server.run();
        server
    }

    /// URL at which the server listens.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Port of the server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Folder of the server's files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Text of the server's log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Starts the process, also after a kill, and waits until JetStream works.
    pub fn run(&mut self) {
        self.spawn();
        for _ in 0..3000 {
            // If the server has ended, an answer would come from another process that has taken its port.
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "nats-server ended at once on port {}: {ended:?}\n{}", self.port, self.log());
            if self.greets() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("nats-server does not answer on port {}:\n{}", self.port, self.log());
    }

    /// Starts the process, and does not wait.
    pub fn spawn(&mut self) {
        let program = self.kind.program();
        // `setpriv` has the kernel kill the server if this process dies first.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(&program)
            .args(&self.args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{} can't be started: {error}; run ./scripts/test", program.display()));
        self.child = Some(child);
    }

    /// Returns whether the server greets a client. A server accepts clients only after it has recovered its streams.
    fn greets(&self) -> bool {
        let Ok(stream) = std::net::TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).is_ok() && line.contains(r#""jetstream":true"#)
    }

    /// Gives the running server another configuration.
    pub fn configure(&self, lines: &str) {
        std::fs::write(self.folder.join("nats.conf"), lines).expect("can be written");
        let reloads = || self.log().matches("Reloaded server configuration").count();
        let before = reloads();
        self.signal("-HUP");
        crate::server::wait_until("the server has read its configuration", || reloads() > before);
    }

    /// Kills the process (`kill -9`).
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }

    /// Stops or continues the process.
    pub fn signal(&self, name: &str) {
        assert!(signal(self.child.as_ref().expect("running").id(), name), "the process has ended");
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Three servers of one cluster.
#[derive(Debug)]
pub struct NatsCluster {
    /// The servers, which are called `node0` to `node2`.
    pub servers: Vec<NatsServer>,
}

impl NatsCluster {
    /// Starts three servers, and creates a bucket of this name with three replicas.
    ///
    /// # Panics
    /// If the cluster can't hold the bucket.
    pub async fn start(bucket: &str) -> Self {
        let routes = [free_port(), free_port(), free_port()];
        let all = routes.map(|port| format!("nats://127.0.0.1:{port}")).join(", ");
        let servers = routes.iter().enumerate().map(|(n, port)| {
            let cluster = format!("cluster {{ name: idem, listen: \"127.0.0.1:{port}\", routes: [{all}] }}");
            NatsServer::start_with(Kind::Nats, &format!("server_name: node{n}\n{cluster}\n"))
        });
        let cluster = Self { servers: servers.collect() };
        connect_replicated(NatsStore::options().bucket(bucket), &cluster.url()).await;
        cluster
    }

    /// URLs of all servers.
    pub fn url(&self) -> String {
        self.servers.iter().map(NatsServer::url).collect::<Vec<_>>().join(",")
    }

    /// Index of the server that leads the stream of the bucket, as the running server `asked` names it.
    ///
    /// # Panics
    /// If the server can't be reached.
    pub async fn leader(&self, asked: usize, bucket: &str) -> Option<usize> {
        let client = async_nats::connect(self.servers[asked].url()).await.expect("connects");
        let answer = client.request(format!("$JS.API.STREAM.INFO.KV_{bucket}"), "".into()).await.ok()?;
        let info: serde_json::Value = serde_json::from_slice(&answer.payload).ok()?;
        info["cluster"]["leader"].as_str()?.strip_prefix("node")?.parse().ok()
    }
}
