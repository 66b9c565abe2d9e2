//! Servers of MariaDB and MySQL for tests.
//!
//! The program comes from Debian's `mariadb-server` 10.11. `IDEM_TEST_MYSQL` names another program, `mariadbd` or
//! `mysqld`. The servers refuse to run as root, so root starts them as the user `mysql`.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_runtime::conformance::Subject;
use idem_runtime::mysql::MySqlOptions;
use idem_runtime::{Key, MySqlStore};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts};

use crate::proxy::{Line, Proxy};
use crate::server::{Env, forever, free_port, keep, signal, until};

/// Words of a server about its replication, which MySQL has renamed.
struct Words {
    primary: &'static str,
    replica: &'static str,
    /// Setting with which the commits of a primary without a replica wait, too.
    waits_alone: &'static str,
    /// Statement by which a replica follows the server at a port.
    follow: fn(u16) -> String,
    /// Column of the replica's status with the transactions that it has received.
    received: &'static str,
    /// Statement that answers 1 if the replica has run the transactions `RECEIVED`.
    has_run: &'static str,
}

impl Words {
    fn of_the_server() -> Self {
        if is_mariadb() {
            Self {
                primary: "master",
                replica: "slave",
                waits_alone: "wait_no_slave",
                follow: |port| {
                    format!(
                        "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {port}, MASTER_USER = 'root', \
                         MASTER_USE_GTID = slave_pos"
                    )
                },
                received: "Gtid_IO_Pos",
                has_run: "SELECT @@global.gtid_slave_pos = RECEIVED",
            }
        } else {
            Self {
                primary: "source",
                replica: "replica",
                waits_alone: "wait_no_replica",
                follow: |port| {
                    format!(
                        "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = {port}, \
                         SOURCE_USER = 'root', SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1"
                    )
                },
                received: "Retrieved_Gtid_Set",
                has_run: "SELECT gtid_subset(RECEIVED, @@global.gtid_executed)",
            }
        }
    }
}

/// Server process; killed when dropped.
#[derive(Debug)]
pub struct MySqlServer {
    port: u16,
    folder: PathBuf,
    args: Vec<String>,
    env: Env,
    child: Option<Child>,
}

fn program() -> PathBuf {
    std::env::var_os("IDEM_TEST_MYSQL").unwrap_or_else(|| "/usr/sbin/mariadbd".into()).into()
}

/// Reports whether the servers of the tests are MariaDB, not MySQL.
pub fn is_mariadb() -> bool {
    static IS_MARIADB: OnceLock<bool> = OnceLock::new();
    *IS_MARIADB.get_or_init(|| {
        let program = program();
        let said = Command::new(&program).arg("--version").output();
        let said = said.unwrap_or_else(|error| panic!("{}: {error}; run ./scripts/test", program.display()));
        String::from_utf8_lossy(&said.stdout).contains("MariaDB")
    })
}

/// Argument that keeps the files of a server small.
fn log_size() -> &'static str {
    if is_mariadb() { "--innodb-log-file-size=8M" } else { "--innodb-redo-log-capacity=16M" }
}

fn am_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0)
}

/// Lets the user that runs the server read and write `path` and everything in it.
fn give(path: &Path) {
    if am_root() {
        let given = Command::new("chown").args(["-R", "mysql"]).arg(path).status();
        assert!(given.is_ok_and(|status| status.success()), "there is no user `mysql`; run ./scripts/test");
    }
}

/// Returns a command that runs a program of the server, never as root. The kernel kills the program if this process
/// dies first.
fn unprivileged(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if am_root() {
        command.args(["--reuid=mysql", "--regid=mysql", "--init-groups"]);
    }
    command.arg(program).arg("--no-defaults").current_dir("/").stdin(Stdio::null());
    command
}

/// Returns the files of a server that has no tables yet. All servers of this process begin with a copy.
fn template() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("idem-test-mysql-{}", std::process::id()));
        std::fs::remove_dir_all(&folder).ok();
        std::fs::create_dir_all(&folder).expect("a folder for the server");
        give(&folder);
        let data = format!("--datadir={}", folder.join("data").display());
        let mut make = if is_mariadb() {
            let installer = Path::new("/usr/bin/mariadb-install-db");
            let mut make = unprivileged(installer);
            make.args(["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-log-bin"]);
            make
        } else {
            let mut make = unprivileged(&program());
            make.arg("--initialize-insecure");
            make
        };
        // `TMPDIR` may be a folder in which only the user of the tests may write.
        let temporary = format!("--tmpdir={}", folder.display());
        make.args([&*data, &*temporary, log_size(), "--innodb-buffer-pool-size=32M"]);
        let output =
            make.output().unwrap_or_else(|error| panic!("no server can be set up: {error}; run ./scripts/test"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        folder.join("data")
    })
}

impl MySqlServer {
    /// Starts a server with default settings, which lose no committed data.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with these arguments, such as `--read-only=1`.
    pub fn start_with(args: &[&str]) -> Self {
        Self::start_in(args, &Vec::new())
    }

    /// Starts a server with these arguments and this environment.
    pub fn start_in(args: &[&str], env: &Env) -> Self {
        let port = free_port();
        let folder = std::env::temp_dir().join(format!("idem-test-mysql-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the server");
        let copied = Command::new("cp").arg("-r").arg(template()).arg(folder.join("data")).status();
        assert!(copied.is_ok_and(|status| status.success()), "the files of the server are copied");
        // Each server of a replication has its own identity.
        std::fs::remove_file(folder.join("data/auto.cnf")).ok();
        give(&folder);
        let mut server = Self { port, folder, args: Vec::new(), env: env.clone(), child: None };
        server.set(args);
        server.run();
        server
    }

    /// Starts a server that a replica can follow.
    pub fn primary() -> Self {
        Self::replicating(1, &[])
    }

    /// Starts a server with this number that takes part in semi-synchronous replication.
    fn replicating(number: u32, args: &[&str]) -> Self {
        let number = format!("--server-id={number}");
        let common = ["--log-bin=log", "--binlog-format=ROW", "--sync-binlog=1"];
        let own: &[&str] = if is_mariadb() {
            &["--log-slave-updates=1", "--rpl-semi-sync-master-wait-point=AFTER_SYNC"]
        } else {
            let plugins = "--plugin-load-add=semisync_source.so;semisync_replica.so";
            &[plugins, "--gtid-mode=ON", "--enforce-gtid-consistency=ON"]
        };
        Self::start_with(&[&[&*number], &common[..], own, args].concat())
    }

    /// Starts a replica that follows `primary`, and lets each commit of `primary` wait until the replica has received
    /// it, before the commit shows to other sessions.
    pub async fn replica_of(primary: &Self) -> Self {
        let replica = Self::replicating(2, &["--read-only=1"]);
        let (mut follower, mut raw) = (replica.raw().await, primary.raw().await);
        let words = Words::of_the_server();
        follower.query_drop(format!("SET GLOBAL rpl_semi_sync_{}_enabled = 1", words.replica)).await.expect("is set");
        for statement in [(words.follow)(primary.port), format!("START {}", words.replica)] {
            follower.query_drop(statement).await.expect("follows");
        }
        // The commit of a primary without a replica waits for one, too.
        for (name, value) in [(words.waits_alone, "1"), ("timeout", "600000"), ("enabled", "1")] {
            let set = format!("SET GLOBAL rpl_semi_sync_{}_{name} = {value}", words.primary);
            raw.query_drop(set).await.expect("is set");
        }
        until("commits wait for the replica", async || {
            let names = format!("'Rpl_semi_sync_{0}_clients', 'Rpl_semi_sync_{0}_status'", words.primary);
            let question = format!("SHOW GLOBAL STATUS WHERE Variable_name IN ({names})");
            let rows: Vec<(String, String)> = raw.query(question).await.expect("answers");
            rows.len() == 2 && rows.iter().all(|(_, value)| value == "1" || value == "ON")
        })
        .await;
        replica
    }

    /// Makes this replica a primary, once it has run all statements that it has received. The old primary is dead.
    pub async fn promote(&self) {
        let mut raw = self.raw().await;
        let words = Words::of_the_server();
        raw.query_drop(format!("STOP {} IO_THREAD", words.replica)).await.expect("obeys");
        until("the replica has run what it has received", async || {
            let status = raw.query_first(format!("SHOW {} STATUS", words.replica)).await.expect("answers");
            let status: mysql_async::Row = status.expect("a row");
            let received: String = status.get(words.received).expect("a text");
            let has_run = words.has_run.replace("RECEIVED", &format!("'{received}'"));
            raw.query_first::<u8, _>(has_run).await.expect("answers") == Some(1)
        })
        .await;
        let stop = [format!("STOP {}", words.replica), format!("RESET {} ALL", words.replica)];
        for statement in stop.into_iter().chain(["SET GLOBAL read_only = 0".to_owned()]) {
            raw.query_drop(statement).await.expect("obeys");
        }
    }

    /// Lets commits no longer wait for the replica.
    pub async fn stop_waiting(&self) {
        let set = format!("SET GLOBAL rpl_semi_sync_{}_enabled = 0", Words::of_the_server().primary);
        self.raw().await.query_drop(set).await.expect("is set");
    }

    /// Port of the server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Folder of the server's files. Subfolder `data` holds the databases.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// URL of the database `idem` of the server, which each start creates.
    pub fn url(&self) -> String {
        url(self.port)
    }

    /// Adds arguments for the next start.
    pub fn set(&mut self, args: &[&str]) {
        self.args.extend(args.iter().map(ToString::to_string));
    }

    /// Starts the process, also after a kill, and waits until the server answers.
    pub fn run(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log")).expect("a log");
        let program = program();
        let mut command = unprivileged(&program);
        command
            .arg(format!("--datadir={}", self.folder.join("data").display()))
            .arg(format!("--socket={}", self.folder.join("socket").display()))
            .arg(format!("--pid-file={}", self.folder.join("pid").display()))
            .arg(format!("--tmpdir={}", self.folder.display()))
            .arg(format!("--port={}", self.port))
            .args(["--bind-address=127.0.0.1", "--skip-networking=0", "--max-connections=600"])
            .args(["--innodb-buffer-pool-size=32M", log_size()]);
        if !is_mariadb() {
            command.arg("--mysqlx=OFF");
        }
        let child = command
            .args(&self.args)
            .envs(self.env.iter().cloned())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("{} can't be started: {error}; run ./scripts/test", program.display()));
        self.child = Some(child);
        for _ in 0..3000 {
            // If the server has ended, an answer would come from another process that has taken its port.
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            assert!(ended.is_none(), "the server ended at once on port {}: {ended:?}\n{}", self.port, self.log());
            if std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return self.create_database();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the server does not answer on port {}:\n{}", self.port, self.log());
    }

    /// Creates the database `idem`, from a thread of its own because the caller may be in a runtime.
    fn create_database(&self) {
        let url = format!("mysql://root@127.0.0.1:{}", self.port);
        let made = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let opts = Opts::from_url(&url).expect("a URL");
                let opts = mysql_async::OptsBuilder::from_opts(opts).prefer_socket(false);
                let mut conn = Conn::new(opts).await?;
                // A server that allows only reading has the database from an earlier start.
                conn.query_drop("CREATE DATABASE IF NOT EXISTS idem").await
            })
        });
        let made = made.join().expect("does not panic");
        assert!(made.is_ok() || self.args.iter().any(|arg| arg.contains("read")), "{made:?}\n{}", self.log());
    }

    /// Text of the server's log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Kills the process (`kill -9`).
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }

    /// Stops the process.
    pub fn stop(&self) {
        assert!(signal(self.child.as_ref().expect("running").id(), "-STOP"), "the process has ended");
    }

    /// Continues the process.
    pub fn go_on(&self) {
        if let Some(child) = &self.child {
            signal(child.id(), "-CONT");
        }
    }

    /// Opens a connection of `mysql_async` to the server.
    pub async fn raw(&self) -> Conn {
        raw(&self.url()).await
    }
}

impl Drop for MySqlServer {
    fn drop(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

fn url(port: u16) -> String {
    format!("mysql://root@127.0.0.1:{port}/idem")
}

/// Opens a connection of `mysql_async` to `url`.
pub async fn raw(url: &str) -> Conn {
    let opts = mysql_async::OptsBuilder::from_opts(Opts::from_url(url).expect("a URL")).prefer_socket(false);
    Conn::new(opts).await.expect("connects")
}

/// Port of a server that the whole test process shares.
pub fn shared() -> u16 {
    static SHARED: OnceLock<u16> = OnceLock::new();
    *SHARED.get_or_init(|| {
        forever(|| keep(MySqlServer::start_with(&["--innodb-flush-log-at-trx-commit=2"]), MySqlServer::port))
    })
}

/// URL of the shared server, and the name of a new table for one test.
pub fn shared_table() -> (String, String) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    (url(shared()), format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Stores for the conformance suite: one on the shared server, in its own table, and a second handle as another process
/// would open it.
pub async fn subject() -> Subject {
    subject_with(MySqlStore::options()).await
}

/// Like [`subject`], with a table of partitions. The options of the second handle name no partitions.
pub async fn subject_partitioned() -> Subject {
    subject_with(MySqlStore::options().partitions(4)).await
}

async fn subject_with(options: MySqlOptions) -> Subject {
    let (direct, table) = shared_table();
    let options = options.table(&table).ensure_schema();
    let store = options.clone().connect(&direct).await.expect("connects");
    let peer = options.clone().partitions(0).connect(&direct).await.expect("connects");
    let cut_off = Proxy::to(shared()).await;
    let unreachable = options.connect(&url(cut_off.port())).await.expect("connects");
    cut_off.set(Line::Refuse);
    let spoil = move |key: Key| {
        let (direct, table) = (direct.clone(), table.clone());
        async move { write_nonsense(&direct, &table, key.as_str()).await }
    };
    Subject::new(store).peer(peer).unreachable(unreachable).spoil(spoil)
}

/// Writes a row that no release of the library can have written.
pub async fn write_nonsense(url: &str, table: &str, key: &str) {
    let hour = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) + 3600000000";
    let text = format!(
        "INSERT INTO {table} (`key`, owner, format, state, attempt, attempts_used, on_crash_fail, lease_ms, ttl_ms, lapses_at, \
         expires_at, listed_at, first_seen_at, began_at, holder) VALUES (?, x'00112233445566778899aabbccddeeff', 99, \
         'pending', 1, 1, false, 1000, 1000, {hour}, {hour}, {hour}, 0, 0, ?) ON DUPLICATE KEY UPDATE format = 99, holder = ?"
    );
    let holder = crate::nonsense();
    raw(url).await.exec_drop(text, (key, &holder, &holder)).await.expect("writes");
}
