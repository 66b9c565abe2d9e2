//! TCP proxy that delays, loses or breaks the traffic of its connections on command.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::chance::Chance;

/// Largest number of bytes that the proxy reads at a time.
const PIECE: usize = 16 * 1024;

/// Behaviour of the proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Carries all bytes.
    Pass,
    /// Carries bytes after this time, in both directions.
    Delay(Duration),
    /// Carries each piece after a random time of at most this duration, so that connections overtake each other.
    Uneven(Duration),
    /// Carries this many bytes a second in each direction, all connections taken together.
    Slow(u32),
    /// Swallows the client's bytes: the server executes nothing.
    LoseRequests,
    /// Swallows the server's answers: the request was executed.
    LoseReplies,
    /// Resets the connection when an answer arrives: the request was executed.
    ResetOnReply,
    /// Resets every connection immediately, old and new.
    Refuse,
    /// Swallows all bytes on existing connections, and carries all bytes on new ones, like a changed route.
    Stale,
    /// On existing connections, ends the stream to the client and still carries the client's bytes. Carries all bytes
    /// on new connections.
    EndToClient,
    /// On existing connections, ends the stream to the server and sends the client nothing. Carries all bytes on new
    /// connections.
    EndToServer,
}

impl Line {
    /// True if the proxy carries all bytes of connections that are made while this behaviour is set.
    fn spares_new_ones(self) -> bool {
        matches!(self, Self::Stale | Self::EndToClient | Self::EndToServer)
    }

    /// True if a connection can go on when another behaviour is set. A connection that has lost bytes can't go on,
    /// because TCP never loses bytes from the middle of a stream.
    fn loses_nothing(self) -> bool {
        matches!(self, Self::Pass | Self::Delay(_) | Self::Uneven(_) | Self::Slow(_))
    }
}

/// Proxy in front of one server.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    line: Arc<watch::Sender<Line>>,
    halved: Arc<AtomicUsize>,
    sent: Sent,
    /// Port to which the proxy carries the bytes of new connections.
    target: Arc<AtomicU16>,
}

/// Number of bytes that the client sent on each connection, in the order in which the connections were made.
type Sent = Arc<Mutex<Vec<Arc<AtomicUsize>>>>;

/// Traffic of all connections in one direction.
#[derive(Debug, Default)]
struct Direction {
    /// Time at which a slow line will have carried all bytes that it has accepted.
    free_at: Mutex<Option<Instant>>,
}

impl Direction {
    /// Waits for as long as `line` takes to carry `bytes` bytes.
    async fn takes(&self, line: Line, bytes: usize, chance: &mut Chance) {
        match line {
            Line::Delay(delay) => tokio::time::sleep(delay).await,
            Line::Uneven(longest) => tokio::time::sleep(chance.up_to(longest)).await,
            Line::Slow(rate) => {
                let takes = Duration::from_secs(bytes as u64) / rate;
                let carried_at = {
                    let mut free_at = self.free_at.lock().unwrap();
                    let now = Instant::now();
                    let carried_at = free_at.map_or(now, |at| at.max(now)) + takes;
                    *free_at = Some(carried_at);
                    carried_at
                };
                tokio::time::sleep_until(carried_at.into()).await;
            }
            _ => {}
        }
    }
}

impl Proxy {
    /// Listens on a free port and carries bytes to `port`.
    ///
    /// # Panics
    /// If there is no free port.
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let line = Arc::new(watch::channel(Line::Pass).0);
        let halved = Arc::default();
        let (lines, count) = (Arc::clone(&line), Arc::clone(&halved));
        let sent = Sent::default();
        let sent_by_each = Arc::clone(&sent);
        let target = Arc::new(AtomicU16::new(port));
        let aim = Arc::clone(&target);
        tokio::spawn(async move {
            let directions: [Arc<Direction>; 2] = Default::default();
            let (chance, mut connections) = (Chance::seeded(u64::from(port)), 0);
            while let Ok((client, _)) = listener.accept().await {
                connections += 1;
                let chance = chance.of(connections);
                let (sent, count) = (Arc::default(), Arc::clone(&count));
                sent_by_each.lock().unwrap().push(Arc::clone(&sent));
                let port = aim.load(Ordering::Relaxed);
                tokio::spawn(carry(client, port, lines.subscribe(), count, sent, directions.clone(), chance));
            }
        });
        Self { address, line, halved, sent, target }
    }

    /// URL at which the proxy listens.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Port on which the proxy listens.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Number of connections of which the proxy has ended one direction.
    pub fn halved(&self) -> usize {
        self.halved.load(Ordering::Relaxed)
    }

    /// Number of bytes that the client sent on each connection, in the order in which the connections were made.
    pub fn sent(&self) -> Vec<usize> {
        self.sent.lock().unwrap().iter().map(|sent| sent.load(Ordering::SeqCst)).collect()
    }

    /// Carries the bytes of new connections to `port` from now on, as after a failover.
    pub fn redirect(&self, port: u16) {
        self.target.store(port, Ordering::Relaxed);
    }

    /// Sets the behaviour of the proxy from now on.
    pub fn set(&self, line: Line) {
        self.line.send_replace(line);
    }
}

async fn carry(
    client: TcpStream,
    port: u16,
    line: watch::Receiver<Line>,
    halved: Arc<AtomicUsize>,
    sent: Arc<AtomicUsize>,
    [up, down]: [Arc<Direction>; 2],
    chance: Chance,
) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    let spared = line.borrow().spares_new_ones();
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    // Makes a drop of the client's connection a reset instead of an orderly end.
    client.set_zero_linger().ok();
    let (mut from_client, to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (lines, mut line) = (line.clone(), line);
    let healed = async {
        loop {
            let was = *line.borrow_and_update();
            if line.changed().await.is_err() || !was.loses_nothing() || *line.borrow() == Line::Refuse {
                return;
            }
        }
    };
    if *lines.borrow() == Line::Refuse {
        return;
    }
    tokio::select! {
        () = upstream(&mut from_client, &mut to_server, lines.clone(), spared, [&halved, &sent], (&up, chance.of(1))) => {}
        () = downstream(&mut from_server, to_client, lines, spared, &halved, (&down, chance.of(2))) => {}
        () = healed => {}
    }
}

/// Behaviour of `line` for a connection. A `spared` connection is newer than the behaviour.
fn done_to(spared: bool, line: &mut watch::Receiver<Line>) -> Line {
    let line = *line.borrow_and_update();
    if spared && line.spares_new_ones() { Line::Pass } else { line }
}

/// Reads from `from`: some bytes, `None` at the end of the stream, or zero bytes if the line has changed.
async fn next(from: &mut OwnedReadHalf, buffer: &mut [u8], line: &mut watch::Receiver<Line>) -> Option<usize> {
    tokio::select! {
        read = from.read(buffer) => read.ok().filter(|read| *read > 0),
        changed = line.changed() => changed.ok().map(|()| 0),
    }
}

async fn upstream(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    mut line: watch::Receiver<Line>,
    spared: bool,
    [halved, sent]: [&AtomicUsize; 2],
    (direction, mut chance): (&Direction, Chance),
) {
    let mut buffer = vec![0; PIECE];
    loop {
        if done_to(spared, &mut line) == Line::EndToServer && to.shutdown().await.is_ok() {
            halved.fetch_add(1, Ordering::Relaxed);
        }
        let Some(read) = next(from, &mut buffer, &mut line).await else { return };
        sent.fetch_add(read, Ordering::SeqCst);
        match done_to(spared, &mut line) {
            _ if read == 0 => continue,
            Line::LoseRequests | Line::Stale | Line::EndToServer => continue,
            line => direction.takes(line, read, &mut chance).await,
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

async fn downstream(
    from: &mut OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut line: watch::Receiver<Line>,
    spared: bool,
    halved: &AtomicUsize,
    (direction, mut chance): (&Direction, Chance),
) {
    let mut buffer = vec![0; PIECE];
    loop {
        if done_to(spared, &mut line) == Line::EndToClient && to.shutdown().await.is_ok() {
            halved.fetch_add(1, Ordering::Relaxed);
        }
        let read = next(from, &mut buffer, &mut line).await;
        match (read, done_to(spared, &mut line)) {
            // The client must not notice that the server's stream has ended.
            (None, Line::EndToServer) => std::future::pending().await,
            (None, _) | (Some(1..), Line::ResetOnReply) => break,
            (Some(0), _) | (Some(_), Line::LoseReplies | Line::Stale | Line::EndToClient | Line::EndToServer) => {
                continue;
            }
            (Some(read), line) => direction.takes(line, read, &mut chance).await,
        }
        if to.write_all(&buffer[..read.unwrap_or_default()]).await.is_err() {
            break;
        }
    }
    // The write half is leaked, so that the connection is reset. A drop of the half would end the stream in order.
    to.forget();
}
