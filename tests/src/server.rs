//! Servers for tests. Each server has a free port and its own folder, and ends with the process that started it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use idem_runtime::conformance::Subject;
use idem_runtime::{Key, RedisStore};
use redis::AsyncCommands;

use crate::chance::Chance;
use crate::proxy::{Line, Proxy};

/// Kind of server. An environment variable names its program; `scripts/test` sets these variables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Redis 7.0 or newer: the program that `IDEM_TEST_REDIS` names, or `redis-server`.
    Redis,
    /// Redis 7.0 to 8.3, built with TLS and without `SET … IFEQ`: the program that `IDEM_TEST_BASELINE_REDIS` names, or
    /// that of [`Kind::Redis`]. Tests that compare servers with and without `IFEQ` use it, whichever Redis the suite
    /// runs on.
    BaselineRedis,
    /// Valkey 8 or newer: the program that `IDEM_TEST_VALKEY` names.
    Valkey,
    /// Redis before 7.0, which the store must refuse: the program that `IDEM_TEST_OLD_REDIS` names.
    OldRedis,
}

impl Kind {
    pub(crate) fn program(self) -> PathBuf {
        let (variable, default) = match self {
            Self::BaselineRedis => match std::env::var_os("IDEM_TEST_BASELINE_REDIS") {
                Some(program) => return program.into(),
                None => return Self::Redis.program(),
            },
            Self::Redis => ("IDEM_TEST_REDIS", Some("redis-server")),
            Self::Valkey => ("IDEM_TEST_VALKEY", None),
            Self::OldRedis => ("IDEM_TEST_OLD_REDIS", None),
        };
        let program = std::env::var_os(variable).or_else(|| default.map(Into::into));
        program.unwrap_or_else(|| panic!("`{variable}` names no server program; run ./scripts/test")).into()
    }

    /// URL of one server for the whole test process.
    pub fn shared(self) -> String {
        static SERVERS: OnceLock<Mutex<Vec<(Kind, String)>>> = OnceLock::new();
        let mut servers = SERVERS.get_or_init(Mutex::default).lock().unwrap();
        if let Some((_, url)) = servers.iter().find(|(kind, _)| *kind == self) {
            return url.clone();
        }
        let url = forever(move || keep(RedisServer::start(self), RedisServer::url));
        servers.push((self, url.clone()));
        url
    }

    /// Stores for the conformance suite: one on the shared server, and a second handle as another process would open
    /// it.
    pub async fn subject(self) -> Subject {
        let url = self.shared();
        let store = RedisStore::connect(&url).await.expect("connects");
        let peer = RedisStore::connect(&url).await.expect("connects");
        let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
        let cut_off = Proxy::to(port).await;
        let unreachable = RedisStore::connect(&cut_off.url()).await.expect("connects");
        cut_off.set(Line::Refuse);
        let spoil = move |key: Key| {
            let url = url.clone();
            async move {
                let name = format!("idem:{}", key.as_str());
                let _: () = raw(&url).await.set(name, crate::nonsense()).await.expect("sets");
            }
        };
        Subject::new(store).peer(peer).unreachable(unreachable).spoil(spoil)
    }
}

/// Environment variables that a process gets in addition.
pub type Env = Vec<(String, OsString)>;

/// Server process; killed when dropped.
#[derive(Debug)]
pub struct RedisServer {
    kind: Kind,
    port: u16,
    folder: PathBuf,
    args: Vec<String>,
    env: Env,
    child: Option<Child>,
}

impl RedisServer {
    /// Starts a server without persistence.
    pub fn start(kind: Kind) -> Self {
        Self::start_with(kind, &["--appendonly", "no"])
    }

    /// Starts a server with these arguments.
    pub fn start_with(kind: Kind, args: &[&str]) -> Self {
        Self::start_at(kind, free_port(), args, &[])
    }

    /// Starts a server on this port, with these arguments and this environment.
    pub fn start_at(kind: Kind, port: u16, args: &[&str], env: &[(String, OsString)]) -> Self {
        let folder = std::env::temp_dir().join(format!("idem-test-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the server");
        let args = args.iter().map(ToString::to_string).collect();
        let mut server = Self { kind, port, folder, args, env: env.to_vec(), child: None };
        server.run();
        server
    }

    /// URL at which the server listens.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Port of the server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Folder of the server's files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Value of the argument `name` with which the server was started.
    pub(crate) fn argument(&self, name: &str) -> &str {
        let at = self.args.iter().position(|it| it == name).expect("given");
        &self.args[at + 1]
    }

    /// Starts the process, also after a kill, and waits until the server answers.
    pub fn run(&mut self) {
        let program = self.kind.program();
        // `setpriv` has the kernel kill the server if this process dies first.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(&program)
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"])
            .arg(&self.folder)
            .args(&self.args)
            .envs(self.env.iter().cloned())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{} can't be started: {error}; run ./scripts/test", program.display()));
        self.child = Some(child);
        for _ in 0..1000 {
            // If the server has ended, an answer would come from another process that has taken its port.
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "{} ended at once on port {}: {ended:?}", program.display(), self.port);
            if self.ping() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{} does not answer on port {}", program.display(), self.port);
    }

    fn ping(&self) -> bool {
        use std::io::{Read, Write};
        let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut answer = [0; 5];
        // A server that wants a password answers with an error, which shows that it works.
        stream.write_all(b"PING\r\n").is_ok()
            && stream.read_exact(&mut answer).is_ok()
            && (answer == *b"+PONG" || answer == *b"-NOAU")
    }

    /// Kills the process (`kill -9`).
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }

    /// Stops or continues the process.
    pub fn signal(&self, signal: &str) {
        assert!(self::signal(self.child.as_ref().expect("running").id(), signal), "the process has ended");
    }

    /// Opens a connection of the `redis` crate to the server.
    pub async fn raw(&self) -> redis::aio::MultiplexedConnection {
        raw(&self.url()).await
    }

    /// Reports whether the server has `SET … IFEQ`: Valkey from 8.1 on, Redis from 8.4 on.
    pub async fn has_ifeq(&self) -> bool {
        let mut set = redis::cmd("SET");
        set.arg("idem-test-ifeq").arg("new").arg("IFEQ").arg("old");
        set.query_async::<redis::Value>(&mut self.raw().await).await.is_ok()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Opens a connection of the `redis` crate to `url`.
pub async fn raw(url: &str) -> redis::aio::MultiplexedConnection {
    redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap()
}

/// Returns a port that no process listens on now.
///
/// No port is returned twice: tests run concurrently, and each test frees its port before its server binds the port.
/// The system assigns none of these ports to a client or to a process that lets the system choose.
pub fn free_port() -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap();
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("the clock shows a time after 1970");
    let mut chance = Chance::seeded(u64::from(now.subsec_nanos()) << 32 | u64::from(std::process::id()));
    loop {
        let port = 10_000 + u16::try_from(chance.below(20_000)).expect("small");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() && given.insert(port) {
            return port;
        }
    }
}

/// Sends `signal`, such as `-STOP`, to a process, and returns whether the process existed. After `-STOP` no thread of
/// the process runs any more.
pub fn signal(pid: u32, signal: &str) -> bool {
    let sent = Command::new("kill").args([signal, &pid.to_string()]).stderr(Stdio::null()).status();
    let existed = sent.expect("kill runs").success();
    // A thread that runs on another processor stops only a moment later, and may answer a request until then.
    while signal == "-STOP" && runs(pid) {
        std::thread::yield_now();
    }
    existed
}

/// Returns whether a thread of the process is not stopped.
fn runs(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok()).any(|stat| {
        // The state follows the name of the thread, which is in brackets and may itself contain brackets.
        let state = stat.rsplit_once(')').and_then(|(_, fields)| fields.trim_start().chars().next());
        !matches!(state, None | Some('T' | 't' | 'Z' | 'X'))
    })
}

/// Runs `start` on a thread that lives as long as the process, because servers die with the thread that started them.
pub fn forever<T: Send + 'static>(start: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        sender.send(start()).ok();
        loop {
            std::thread::park();
        }
    });
    receiver.recv().expect("started")
}

/// Leaks `it`, which is therefore never dropped. Returns the value that `read` takes from it.
pub fn keep<I: Send + 'static, T>(it: I, read: impl FnOnce(&I) -> T) -> T {
    let read = read(&it);
    std::mem::forget(it);
    read
}

/// Longest time for which a test waits for a condition. Only a hang takes this long.
const PATIENCE: Duration = Duration::from_secs(180);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Blocks until `condition` holds. `what` names the condition in the panic.
///
/// # Panics
/// If `condition` does not hold within three minutes.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if condition() {
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    panic!("timed out while waiting for: {what}");
}

/// Waits until `condition` holds. `what` names the condition in the panic.
///
/// # Panics
/// If `condition` does not hold within three minutes.
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if condition().await {
            return;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    panic!("timed out while waiting for: {what}");
}
