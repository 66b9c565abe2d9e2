//! Servers that an example starts, kills and starts again.
#![allow(clippy::disallowed_methods, reason = "a server takes its time")]

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use std::{env, process};

/// Number of tries to reach a new server, with a pause of [`LOOK`] in between.
const LOOKS: u32 = 1_200;
const LOOK: Duration = Duration::from_millis(50);

/// A server of a broker.
pub trait Server {
    /// Returns the URL of the server, which stays the same after a restart.
    fn url(&self) -> String;

    /// Kills the server (SIGKILL), so that it refuses connections until the next [`start`](Server::start).
    ///
    /// # Errors
    /// If the server can't be killed.
    fn kill(&mut self) -> io::Result<()>;

    /// Starts the server with its files, and waits until it accepts connections.
    ///
    /// # Errors
    /// If the server does not start.
    fn start(&mut self) -> io::Result<()>;
}

/// A server in a process of its own. The drop kills the process.
pub struct ServerProcess {
    scheme: &'static str,
    port: u16,
    folder: PathBuf,
    command: fn(u16, &Path) -> Command,
    child: Option<Child>,
}

impl ServerProcess {
    fn new(scheme: &'static str, folder: &Path, command: fn(u16, &Path) -> Command) -> io::Result<Self> {
        let mut server = Self { scheme, port: free_port()?, folder: folder.to_owned(), command, child: None };
        server.start()?;
        Ok(server)
    }

    /// Starts a Redis that writes each command to its disk: the program that `IDEM_TEST_REDIS` names, or
    /// `redis-server`.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn redis(folder: &Path) -> io::Result<Self> {
        Self::new("redis://127.0.0.1", folder, |port, folder| {
            let mut redis = command(program("IDEM_TEST_REDIS", "redis-server"));
            redis.args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", "always"]);
            redis.arg("--port").arg(port.to_string()).arg("--dir").arg(folder);
            redis
        })
    }

    /// Starts a NATS server with JetStream: the program that `IDEM_TEST_NATS` names, or `nats-server`.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn nats(folder: &Path) -> io::Result<Self> {
        Self::new("nats://127.0.0.1", folder, |port, folder| {
            let mut nats = command(program("IDEM_TEST_NATS", "nats-server"));
            nats.args(["-a", "127.0.0.1", "-p", &port.to_string(), "-js", "-sd"]).arg(folder);
            nats
        })
    }

    /// Starts a RabbitMQ by `scripts/rabbitmq`.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn rabbitmq(folder: &Path) -> io::Result<Self> {
        Self::new("amqp://guest:guest@127.0.0.1", folder, |port, folder| {
            let mut rabbitmq = command(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/rabbitmq"));
            rabbitmq.arg(port.to_string()).arg(folder);
            rabbitmq
        })
    }

    /// Starts an emulator of SQS: the program that `IDEM_TEST_MINISTACK` names, or `ministack`.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn ministack(folder: &Path) -> io::Result<Self> {
        Self::new("http://127.0.0.1", folder, |port, _| {
            let mut ministack = command(program("IDEM_TEST_MINISTACK", "ministack"));
            ministack.env("BIND_HOST", "127.0.0.1").env("GATEWAY_PORT", port.to_string());
            ministack
        })
    }
}

/// Returns the command that starts a server. The kernel kills this server if this process dies first.
fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

fn program(variable: &str, default: &str) -> OsString {
    env::var_os(variable).unwrap_or_else(|| default.into())
}

/// Returns a port that the system assigns to no client, and that is free together with the two ports above it.
fn free_port() -> io::Result<u16> {
    let first = u16::try_from(process::id() % 4_000).unwrap_or(0);
    let mut ports = (0..4_000).map(|at| 20_000 + (first + at) % 4_000 * 3);
    let is_free = |port: &u16| (0..3).all(|above| TcpListener::bind(("127.0.0.1", port + above)).is_ok());
    ports.find(is_free).ok_or_else(|| io::Error::other("no free port"))
}

impl Server for ServerProcess {
    fn url(&self) -> String {
        format!("{}:{}", self.scheme, self.port)
    }

    fn kill(&mut self) -> io::Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        // The server may be a child of the script that started it, so the whole group of processes is killed.
        Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status()?;
        child.wait().map(drop)
    }

    fn start(&mut self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let log = self.folder.join("server.log");
        let mut command = (self.command)(self.port, &self.folder);
        command.stdin(Stdio::null()).stdout(File::create(&log)?).stderr(Stdio::null()).process_group(0);
        let child = self.child.insert(command.spawn()?);
        for _ in 0..LOOKS {
            if let Some(status) = child.try_wait()? {
                return Err(io::Error::other(format!("the server has ended: {status}; is its program installed?")));
            }
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return Ok(());
            }
            thread::sleep(LOOK);
        }
        Err(io::Error::new(ErrorKind::TimedOut, format!("the server does not answer; see {}", log.display())))
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.kill();
        // RabbitMQ's `epmd`, which maps the names of nodes to ports, is a separate process. It refuses to end until it
        // has noticed the end of its node.
        if self.scheme.starts_with("amqp") {
            for _ in 0..100 {
                let mut end = Command::new("epmd");
                end.arg("-kill").env("ERL_EPMD_PORT", (self.port + 2).to_string());
                match end.stdout(Stdio::null()).stderr(Stdio::null()).status() {
                    Ok(status) if !status.success() => thread::sleep(LOOK),
                    _ => break,
                }
            }
        }
    }
}

/// A server that keeps its messages in memory only, behind a proxy. To kill this server means to close all connections
/// of the proxy and to refuse new ones.
pub struct ProxiedServer {
    server: ServerProcess,
    port: u16,
    line: Arc<Mutex<ProxyLine>>,
}

#[derive(Default)]
struct ProxyLine {
    is_open: bool,
    streams: Vec<TcpStream>,
}

impl ProxiedServer {
    /// Puts a proxy in front of `server`.
    ///
    /// # Errors
    /// If no port is free.
    pub fn new(server: ServerProcess) -> io::Result<Self> {
        let mut proxied = Self { server, port: free_port()?, line: Arc::default() };
        proxied.start()?;
        Ok(proxied)
    }
}

impl Server for ProxiedServer {
    fn url(&self) -> String {
        format!("{}:{}", self.server.scheme, self.port)
    }

    fn kill(&mut self) -> io::Result<()> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        line.is_open = false;
        for stream in line.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(line);
        // The listener ends at the next connection, because `line` is closed.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        while TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn start(&mut self) -> io::Result<()> {
        let listener = TcpListener::bind(("127.0.0.1", self.port))?;
        self.line.lock().unwrap_or_else(PoisonError::into_inner).is_open = true;
        let (line, target) = (Arc::clone(&self.line), self.server.port);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let mut line = line.lock().unwrap_or_else(PoisonError::into_inner);
                if !line.is_open {
                    return;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else { continue };
                let ends = || Ok::<_, io::Error>([client.try_clone()?, server.try_clone()?]);
                let (Ok(kept), Ok([from_client, to_server])) = (ends(), ends()) else { continue };
                line.streams.extend(kept);
                carry(from_client, to_server);
                carry(server, client);
            }
        });
        Ok(())
    }
}

/// Carries the bytes of one direction on a thread of its own.
fn carry(mut from: TcpStream, mut to: TcpStream) {
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}
