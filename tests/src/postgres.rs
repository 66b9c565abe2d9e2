//! PostgreSQL servers for tests, and poolers in front of them.
//!
//! The programs come from Debian's `postgresql` 15 and `pgbouncer`. `IDEM_TEST_POSTGRES` names another folder of
//! programs, and `IDEM_TEST_PGBOUNCER` names another pooler. PostgreSQL and PgBouncer refuse to run as root, so root
//! starts them as the user `postgres`.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_runtime::conformance::Subject;
use idem_runtime::postgres::PostgresOptions;
use idem_runtime::{Key, PostgresStore};
use tokio_postgres::NoTls;

use crate::proxy::{Line, Proxy};
use crate::server::{Env, forever, free_port, keep, signal};

/// Server process; stopped when dropped.
#[derive(Debug)]
pub struct PostgresServer {
    port: u16,
    folder: PathBuf,
    args: Vec<String>,
    env: Env,
    child: Option<Child>,
}

fn program(name: &str) -> PathBuf {
    let folder = std::env::var_os("IDEM_TEST_POSTGRES").unwrap_or_else(|| "/usr/lib/postgresql/15/bin".into());
    Path::new(&folder).join(name)
}

fn am_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0)
}

/// Creates a folder to which the server may write.
fn folder(kind: &str, port: u16) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("idem-test-{kind}-{}-{port}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the server");
    give(&folder);
    folder
}

/// Lets the user that runs the server read and write `path`.
fn give(path: &Path) {
    if am_root() {
        let given = Command::new("chown").arg("postgres").arg(path).status();
        assert!(given.is_ok_and(|status| status.success()), "there is no user `postgres`; run ./scripts/test");
    }
}

/// Returns a command that runs a server, never as root. The kernel sends `signal` to the server if this process dies
/// first.
fn unprivileged(program: &Path, signal: Option<&str>) -> Command {
    let mut command = Command::new("setpriv");
    if let Some(signal) = signal {
        command.args(["--pdeathsig", signal]);
    }
    if am_root() {
        command.args(["--reuid=postgres", "--regid=postgres", "--init-groups"]);
    }
    command.arg(program).current_dir("/").stdin(Stdio::null());
    command
}

impl PostgresServer {
    /// Starts a server with default settings, which lose no committed data.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with these settings, such as `fsync=off`.
    pub fn start_with(settings: &[&str]) -> Self {
        Self::start_in(settings, &Vec::new())
    }

    /// Starts a server with these settings and this environment.
    pub fn start_in(settings: &[&str], env: &Env) -> Self {
        let port = free_port();
        let folder = folder("postgres", port);
        let made = unprivileged(&program("initdb"), None)
            .arg("-D")
            .arg(folder.join("data"))
            .args(["-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C", "--wal-segsize=1"])
            .output()
            .unwrap_or_else(|error| panic!("initdb can't be started: {error}; run ./scripts/test"));
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let mut server = Self { port, folder, args: Vec::new(), env: env.clone(), child: None };
        server.set(settings);
        server.run();
        server
    }

    /// Starts a standby that follows `primary` through the proxy on port `line`. No commit waits for the standby.
    pub fn standby_of(primary: &Self, line: u16) -> Self {
        let port = free_port();
        let folder = folder("postgres", port);
        let copied = unprivileged(&program("pg_basebackup"), None)
            .args(["-h", "127.0.0.1", "-p", &primary.port.to_string(), "-U", "postgres", "-R", "--no-sync"])
            .args(["-c", "fast", "-D"])
            .arg(folder.join("data"))
            .output()
            .unwrap_or_else(|error| panic!("pg_basebackup can't be started: {error}; run ./scripts/test"));
        assert!(copied.status.success(), "pg_basebackup: {}", String::from_utf8_lossy(&copied.stderr));
        let mut server = Self { port, folder, args: Vec::new(), env: primary.env.clone(), child: None };
        server.set(&[&format!("primary_conninfo=host=127.0.0.1 port={line} user=postgres")]);
        server.run();
        server
    }

    /// Port of the server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Folder of the server's files. Subfolder `data` holds the database.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// URL at which the server listens.
    pub fn url(&self) -> String {
        url(self.port)
    }

    /// Creates a database, and returns its URL.
    pub async fn database(&self, name: &str) -> String {
        self.raw().await.batch_execute(&format!("CREATE DATABASE {name}")).await.expect("a new database");
        self.url().rsplit_once('/').map(|(server, _)| format!("{server}/{name}")).expect("a URL")
    }

    /// Writes a file for the server to read, for example a key.
    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.folder.join(name);
        std::fs::write(&path, content).expect("can be written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("ours");
        give(&path);
        path
    }

    /// Adds settings for the next start.
    pub fn set(&mut self, settings: &[&str]) {
        self.args.extend(settings.iter().flat_map(|setting| ["-c".to_owned(), (*setting).to_owned()]));
    }

    /// Starts the process, also after a kill, and waits until the server answers.
    pub fn run(&mut self) {
        for _ in 0..100 {
            if self.runs() {
                return;
            }
        }
        panic!("processes of a killed server do not end:\n{}", self.log());
    }

    /// Starts the process. Returns false if a process of the killed server is still ending, and holds its memory.
    fn runs(&mut self) -> bool {
        let logged = self.log().len();
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log")).expect("a log");
        let child = unprivileged(&program("postgres"), Some("QUIT"))
            .arg("-D")
            .arg(self.folder.join("data"))
            .args(["-c", &format!("port={}", self.port), "-c", "listen_addresses=127.0.0.1"])
            .args(["-c", "unix_socket_directories=", "-c", "max_connections=600", "-c", "shared_buffers=32MB"])
            .args(&self.args)
            .envs(self.env.iter().cloned())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("postgres can't be started: {error}; run ./scripts/test"));
        self.child = Some(child);
        for _ in 0..3000 {
            // If the server has ended, an answer would come from another process that has taken its port.
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if ended.is_some() && self.log()[logged..].contains("pre-existing shared memory block") {
                return false;
            }
            assert!(ended.is_none(), "postgres ended at once on port {}: {ended:?}\n{}", self.port, self.log());
            if program_succeeds(&mut self.ready()) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("postgres does not answer on port {}:\n{}", self.port, self.log());
    }

    fn ready(&self) -> Command {
        let mut command = Command::new(program("pg_isready"));
        command.args(["-q", "-h", "127.0.0.1", "-p", &self.port.to_string()]);
        command
    }

    /// Text of the server's log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Kills all processes of the server (`kill -9`). If only the postmaster were killed, the processes of open
    /// connections would answer for a while.
    pub fn kill(&mut self) {
        let Some(mut postmaster) = self.child.take() else { return };
        // The postmaster stops first, so that it starts no further process.
        signal(postmaster.id(), "-STOP");
        let children = children(postmaster.id());
        for process in children.iter().chain([&postmaster.id()]) {
            signal(*process, "-KILL");
        }
        postmaster.wait().expect("was running");
        for process in children {
            while is_alive(process) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Stops all processes of the server.
    pub fn stop(&self) {
        let postmaster = self.child.as_ref().expect("running").id();
        // The postmaster stops first, so that it starts no further process.
        assert!(signal(postmaster, "-STOP"), "the process has ended");
        for child in children(postmaster) {
            signal(child, "-STOP");
        }
    }

    /// Continues all processes of the server.
    pub fn go_on(&self) {
        if let Some(child) = &self.child {
            for child in children(child.id()) {
                signal(child, "-CONT");
            }
            signal(child.id(), "-CONT");
        }
    }

    /// Opens a connection of `tokio-postgres` to the server.
    pub async fn raw(&self) -> tokio_postgres::Client {
        raw(&self.url()).await
    }

    /// Output of `name`, a program that comes with the server, for example `pg_dump`.
    pub fn ask(&self, name: &str, args: &[&str]) -> String {
        let said = Command::new(program(name))
            .args(["-h", "127.0.0.1", "-U", "postgres", "-p", &self.port.to_string()])
            .args(args)
            .output()
            .expect("a program of the server");
        assert!(said.status.success(), "{name}: {}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8_lossy(&said.stdout).into_owned()
    }
}

/// Child processes of the postmaster. A child process may end at any time.
fn children(postmaster: u32) -> Vec<u32> {
    // The file is gone if the process has ended.
    let children = std::fs::read_to_string(format!("/proc/{postmaster}/task/{postmaster}/children"));
    children.unwrap_or_default().split_ascii_whitespace().map(|child| child.parse().expect("a process")).collect()
}

/// Reports whether a process runs. An ended process remains listed until its parent reads its status.
fn is_alive(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn program_succeeds(command: &mut Command) -> bool {
    command.status().is_ok_and(|status| status.success())
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // A stopped process receives no signal except `SIGKILL`.
        self.go_on();
        if let Some(mut child) = self.child.take() {
            // `SIGQUIT` ends the server immediately, and unlike `SIGKILL` removes its shared memory.
            signal(child.id(), "-QUIT");
            child.wait().expect("was running");
        }
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

fn url(port: u16) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/postgres")
}

/// Opens a connection of `tokio-postgres` to `url`.
pub async fn raw(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connects");
    tokio::spawn(connection);
    client
}

/// Pooler that gives each transaction its own session of the server; killed when dropped.
#[derive(Debug)]
pub struct PgBouncer {
    port: u16,
    folder: PathBuf,
    child: Option<Child>,
}

impl PgBouncer {
    /// Starts a pooler in front of the server at `port`.
    pub fn start(server: u16) -> Self {
        let port = free_port();
        let folder = folder("pgbouncer", port);
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={server}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = {users}\npool_mode = transaction\n\
             max_client_conn = 1000\ndefault_pool_size = 20\nlogfile = {log}\n",
            users = folder.join("users").display(),
            log = folder.join("log").display(),
        );
        std::fs::write(folder.join("users"), "\"postgres\" \"\"\n").expect("can be written");
        std::fs::write(folder.join("ini"), settings).expect("can be written");
        let mut pooler = Self { port, folder, child: None };
        pooler.run();
        pooler
    }

    /// Starts the process, also after a kill, and waits until the pooler answers.
    pub fn run(&mut self) {
        let program = std::env::var_os("IDEM_TEST_PGBOUNCER").unwrap_or_else(|| "/usr/sbin/pgbouncer".into());
        let child = unprivileged(Path::new(&program), Some("KILL"))
            .arg("-q")
            .arg(self.folder.join("ini"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("pgbouncer can't be started: {error}; run ./scripts/test"));
        self.child = Some(child);
        for _ in 0..1000 {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            let log = || std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            assert!(ended.is_none(), "pgbouncer ended at once on port {}: {ended:?}\n{}", self.port, log());
            if std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("pgbouncer does not answer on port {}", self.port);
    }

    /// Kills the process (`kill -9`).
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }

    /// Port of the pooler.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// URL at which the pooler listens.
    pub fn url(&self) -> String {
        url(self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Port of a server that the whole test process shares, and port of a pooler in front of that server.
pub fn shared() -> (u16, u16) {
    static SHARED: OnceLock<(u16, u16)> = OnceLock::new();
    *SHARED.get_or_init(|| {
        forever(|| {
            let server = PostgresServer::start_with(&["fsync=off"]);
            let pooler = PgBouncer::start(server.port);
            keep((server, pooler), |(server, pooler)| (server.port, pooler.port))
        })
    })
}

/// URL of the shared server, and the name of a new schema for one test.
pub fn shared_schema() -> (String, String) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    (url(shared().0), format!("test \"{}\"", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Stores for the conformance suite: one on the shared server, in its own schema, and a second handle as another
/// process would open it.
pub async fn subject() -> Subject {
    subject_at(shared().0, PostgresStore::options()).await
}

/// Like [`subject`], with a table of hash partitions. The options of the second handle name no partitions.
pub async fn subject_partitioned() -> Subject {
    subject_at(shared().0, PostgresStore::options().partitions(4)).await
}

/// Like [`subject`], with connections through the pooler.
pub async fn subject_behind_pgbouncer() -> Subject {
    subject_at(shared().1, PostgresStore::options().behind_pgbouncer()).await
}

async fn subject_at(port: u16, options: PostgresOptions) -> Subject {
    let (direct, schema) = shared_schema();
    let options = options.schema(&schema).ensure_schema();
    let store = options.clone().connect(&url(port)).await.expect("connects");
    let peer = options.clone().partitions(0).connect(&url(port)).await.expect("connects");
    let cut_off = Proxy::to(port).await;
    let unreachable = options.connect(&url(cut_off.port())).await.expect("connects");
    cut_off.set(Line::Refuse);
    let spoil = move |key: Key| {
        let (direct, schema) = (direct.clone(), schema.clone());
        async move { write_nonsense(&direct, &schema, key.as_str()).await }
    };
    Subject::new(store).peer(peer).unreachable(unreachable).spoil(spoil)
}

/// Writes a row that no release of the library can have written.
pub async fn write_nonsense(url: &str, schema: &str, key: &str) {
    let text = format!(
        "INSERT INTO {}.records (key, owner, format, state, attempt, attempts_used, on_crash_fail, lease_ms, ttl_ms, lapses_at, \
         expires_at, listed_at, first_seen_at, began_at, holder) VALUES ($1, '\\x00112233445566778899aabbccddeeff', 99, 'pending', 1, 1, false, 1000, 1000, now(), \
         now() + interval '1 hour', now() + interval '1 hour', now(), now(), $2) \
         ON CONFLICT (key) DO UPDATE SET format = 99, holder = $2",
        quoted(schema)
    );
    raw(url).await.execute(&text, &[&key, &crate::nonsense()]).await.expect("writes");
}

/// `name` as a quoted SQL identifier.
pub fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
