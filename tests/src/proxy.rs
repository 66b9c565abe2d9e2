//! A TCP proxy that breaks connections on command.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What the proxy does with bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Carries them.
    Pass,
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
}

/// A proxy in front of one server.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    line: Arc<watch::Sender<Line>>,
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
        let lines = Arc::clone(&line);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, port, lines.subscribe()));
            }
        });
        Self { address, line }
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// What it does from now on.
    pub fn set(&self, line: Line) {
        self.line.send_replace(line);
    }
}

async fn carry(client: TcpStream, port: u16, line: watch::Receiver<Line>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    let stale = *line.borrow() == Line::Stale;
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    // So that a drop is a reset and not an orderly end.
    client.set_zero_linger().ok();
    let (mut from_client, to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (lines, mut line) = (line.clone(), line);
    // A line that has lost bytes never carries again: in TCP nothing is lost from the middle.
    let healed = async {
        loop {
            let was = *line.borrow_and_update();
            if line.changed().await.is_err() || was != Line::Pass || *line.borrow() == Line::Refuse {
                return;
            }
        }
    };
    if *lines.borrow() == Line::Refuse {
        return;
    }
    tokio::select! {
        () = upstream(&mut from_client, &mut to_server, lines.clone(), stale) => {}
        () = downstream(&mut from_server, to_client, lines, stale) => {}
        () = healed => {}
    }
}

async fn upstream(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, line: watch::Receiver<Line>, new: bool) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let lost = matches!(*line.borrow(), Line::LoseRequests) || (*line.borrow() == Line::Stale && !new);
        if !lost && to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

async fn downstream(from: &mut OwnedReadHalf, mut to: OwnedWriteHalf, line: watch::Receiver<Line>, new: bool) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let now = *line.borrow();
        match now {
            Line::LoseReplies => {}
            Line::Stale if !new => {}
            Line::ResetOnReply => break,
            _ if to.write_all(&buffer[..read]).await.is_err() => break,
            _ => {}
        }
    }
    // Dropping the half would end the stream in order; forgotten, the whole is reset.
    to.forget();
}
