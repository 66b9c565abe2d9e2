//! Commands and bytes, counted on their way to Redis, and memory, as Redis counts it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use idem_runtime::{Key, Store};
use redis::aio::MultiplexedConnection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{Measured, Meter, Unit};
use crate::report::Stop;

const UNITS: [Unit; 2] = [
    Unit { name: "commands", price: Some(("commands", 1e6)) },
    Unit { name: "bytes", price: Some(("gb_transfer", 1e9)) },
];

/// Traffic that has passed.
#[derive(Default, Debug)]
struct Passed {
    commands: AtomicU64,
    bytes: AtomicU64,
}

/// Counts the commands in a client's stream, whose pieces may have any length.
#[derive(Default)]
struct Commands {
    line: Vec<u8>,
    /// Bytes of an argument that have not arrived yet.
    skip: usize,
}

impl Commands {
    fn count(&mut self, mut bytes: &[u8]) -> u64 {
        let mut commands = 0;
        while let Some((byte, rest)) = bytes.split_first() {
            if self.skip > 0 {
                let some = self.skip.min(bytes.len());
                (self.skip, bytes) = (self.skip - some, &bytes[some..]);
                continue;
            }
            bytes = rest;
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            let line = String::from_utf8_lossy(&self.line);
            match line.trim_end().split_at_checked(1) {
                Some(("*", _)) => commands += 1,
                Some(("$", length)) => self.skip = length.parse::<usize>().map_or(0, |length| length + 2),
                _ => {}
            }
            self.line.clear();
        }
        commands
    }
}

/// Forwards connections to `server` and counts their traffic. Returns the local port.
async fn pass_on(server: (String, u16), passed: Arc<Passed>) -> io::Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, passed) = (server.clone(), Arc::clone(&passed));
            tokio::spawn(async move {
                let server = TcpStream::connect(server).await?;
                client.set_nodelay(true)?;
                server.set_nodelay(true)?;
                let ((mut from, mut to), (mut back, mut answers)) = (client.into_split(), server.into_split());
                let answers_passed = Arc::clone(&passed);
                tokio::spawn(async move {
                    let mut piece = vec![0; 16_384];
                    while let Ok(some @ 1..) = back.read(&mut piece).await {
                        answers_passed.bytes.fetch_add(some as u64, Ordering::Relaxed);
                        if to.write_all(&piece[..some]).await.is_err() {
                            break;
                        }
                    }
                });
                let (mut piece, mut commands) = (vec![0; 16_384], Commands::default());
                while let some @ 1.. = from.read(&mut piece).await? {
                    passed.bytes.fetch_add(some as u64, Ordering::Relaxed);
                    passed.commands.fetch_add(commands.count(&piece[..some]), Ordering::Relaxed);
                    answers.write_all(&piece[..some]).await?;
                }
                io::Result::Ok(())
            });
        }
    });
    Ok(port)
}

/// A server behind a counting proxy.
pub(crate) struct Counted {
    store: Arc<dyn Store>,
    raw: MultiplexedConnection,
    namespace: String,
    passed: Arc<Passed>,
}

impl Counted {
    /// Connects to the server at `url` through the proxy. `open` opens a store at a URL.
    pub(crate) async fn at<T: Future<Output = Result<Arc<dyn Store>, Stop>>>(
        url: &str,
        namespace: String,
        raw: MultiplexedConnection,
        open: impl FnOnce(String) -> T,
    ) -> Result<Self, Stop> {
        let plain = || {
            Stop::Refused(
                "commands are counted on their way, to one server without TLS: give the URL `redis://…` of such a one, \
                 for instance of an empty one on this machine; calls cost the same everywhere"
                    .to_owned(),
            )
        };
        let rest = url.strip_prefix("redis://").ok_or_else(plain)?;
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let (login, host) = authority.rsplit_once('@').map_or(("", authority), |(login, host)| (login, host));
        let (name, port) = match host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()) {
            Some((name, port)) => (name, port.parse().unwrap_or(6379)),
            None => (host, 6379),
        };
        let passed = Arc::new(Passed::default());
        let name = name.trim_matches(['[', ']']);
        let server = (if name.is_empty() { "127.0.0.1" } else { name }.to_owned(), port);
        let port = pass_on(server, Arc::clone(&passed)).await.map_err(Stop::Output)?;
        let login = if login.is_empty() { String::new() } else { format!("{login}@") };
        let store = open(format!("redis://{login}127.0.0.1:{port}{path}")).await?;
        Ok(Self { store, raw, namespace, passed })
    }
}

impl Meter for Counted {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store)
    }

    fn units(&self) -> &'static [Unit] {
        &UNITS
    }

    fn records(&self) -> usize {
        50
    }

    fn count(&self) -> Measured<'_, Vec<f64>> {
        let of = |count: &AtomicU64| {
            #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
            let count = count.load(Ordering::Relaxed) as f64;
            count
        };
        Box::pin(std::future::ready(Ok(vec![of(&self.passed.commands), of(&self.passed.bytes)])))
    }

    fn stored<'a>(&'a self, key: &'a Key) -> Measured<'a, f64> {
        Box::pin(async move {
            let name = format!("{}{}", self.namespace, key.as_str());
            let mut usage = redis::cmd("MEMORY");
            usage.arg("USAGE").arg(&name).arg("SAMPLES").arg(0);
            let bytes = usage.query_async::<Option<u32>>(&mut self.raw.clone()).await;
            let bytes = bytes.map_err(|error| Stop::Unreachable(format!("MEMORY USAGE failed: {error}")))?;
            bytes.map(f64::from).ok_or_else(|| Stop::Refused("the record is gone".to_owned()))
        })
    }

    fn notes(&self) -> &'static [&'static str] {
        &[
            "bytes a record: MEMORY USAGE, which leaves out some 30 bytes of the table of expiries; replicas hold each record \
             again, and the append-only file writes what is sent",
            "a script counts as one command",
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_counted_whatever_the_pieces() {
        let sent =
            b"*3\r\n$3\r\nSET\r\n$4\r\na\n*1\r\n$6\r\n*1\r\n$9\r\n*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nGET\r\n$0\r\n\r\n";
        for piece in 1..=sent.len() {
            let mut commands = Commands::default();
            let counted: u64 = sent.chunks(piece).map(|piece| commands.count(piece)).sum();
            assert_eq!(counted, 3, "in pieces of {piece}");
        }
    }
}
