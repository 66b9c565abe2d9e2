//! A TCP proxy that breaks connections on command.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What the proxy does with bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Carries them.
    Pass,
    /// Carries them after this time, in both directions.
    Delay(Duration),
    /// Swallows what the client sends: the server does nothing.
    LoseRequests,
    /// Swallows what the server answers: it was done.
    LoseReplies,
    /// Resets the connection instead of carrying an answer: it was done.
    ResetOnReply,
    /// Resets every connection at once, old and new.
    Refuse,
    /// Swallows everything on the connections that are there, and carries new ones: a route that changed.
    Stale,
    /// Ends the stream to the client on the connections that are there, and goes on carrying what the client sends; carries
    /// new ones.
    EndToClient,
    /// Ends the stream to the server on the connections that are there, and leaves the client without an answer; carries new
    /// ones.
    EndToServer,
}

impl Line {
    /// Whether connections made meanwhile are left alone.
    fn spares_new_ones(self) -> bool {
        matches!(self, Self::Stale | Self::EndToClient | Self::EndToServer)
    }

    /// Whether a connection on which this was so can go on. In TCP nothing is lost from the middle.
    fn loses_nothing(self) -> bool {
        matches!(self, Self::Pass | Self::Delay(_))
    }
}

/// A proxy in front of one server.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    line: Arc<watch::Sender<Line>>,
    halved: Arc<AtomicUsize>,
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
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, port, lines.subscribe(), Arc::clone(&count)));
            }
        });
        Self { address, line, halved }
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// How many connections it has ended in one direction.
    pub fn halved(&self) -> usize {
        self.halved.load(Ordering::Relaxed)
    }

    /// What it does from now on.
    pub fn set(&self, line: Line) {
        self.line.send_replace(line);
    }
}

async fn carry(client: TcpStream, port: u16, line: watch::Receiver<Line>, halved: Arc<AtomicUsize>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    let spared = line.borrow().spares_new_ones();
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    // So that a drop is a reset and not an orderly end.
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
        () = upstream(&mut from_client, &mut to_server, lines.clone(), spared, &halved) => {}
        () = downstream(&mut from_server, to_client, lines, spared, &halved) => {}
        () = healed => {}
    }
}

/// What `line` does to a connection.
fn done_to(spared: bool, line: &mut watch::Receiver<Line>) -> Line {
    let line = *line.borrow_and_update();
    if spared && line.spares_new_ones() { Line::Pass } else { line }
}

/// What comes next from `from`: some bytes, `None` at the end; or the line has changed.
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
    halved: &AtomicUsize,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        if done_to(spared, &mut line) == Line::EndToServer && to.shutdown().await.is_ok() {
            halved.fetch_add(1, Ordering::Relaxed);
        }
        let Some(read) = next(from, &mut buffer, &mut line).await else { return };
        match done_to(spared, &mut line) {
            _ if read == 0 => continue,
            Line::LoseRequests | Line::Stale | Line::EndToServer => continue,
            Line::Delay(delay) => tokio::time::sleep(delay).await,
            _ => {}
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
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        if done_to(spared, &mut line) == Line::EndToClient && to.shutdown().await.is_ok() {
            halved.fetch_add(1, Ordering::Relaxed);
        }
        let read = next(from, &mut buffer, &mut line).await;
        match (read, done_to(spared, &mut line)) {
            // Only the client learns nothing of it.
            (None, Line::EndToServer) => std::future::pending().await,
            (None, _) | (Some(1..), Line::ResetOnReply) => break,
            (Some(0), _) | (Some(_), Line::LoseReplies | Line::Stale | Line::EndToClient | Line::EndToServer) => {
                continue;
            }
            (Some(_), Line::Delay(delay)) => tokio::time::sleep(delay).await,
            _ => {}
        }
        if to.write_all(&buffer[..read.unwrap_or_default()]).await.is_err() {
            break;
        }
    }
    // Dropping the half would end the stream in order; forgotten, the whole is reset.
    to.forget();
}
