//! Requests of a client. Each request has its own connection, which the client may close at any moment.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Time after which a client gives up an exchange.
const PATIENCE: Duration = Duration::from_secs(8);

/// Operation of a client. [`Order::OF_A_KEY`] operations have the same key, and differ in the route or the caller.
#[derive(Clone, Copy)]
pub(crate) struct Order(pub(crate) usize);

impl Order {
    /// Routes: those under `on_crash = fail`, then those under `retry`.
    const PATHS: [&str; 6] =
        ["/redis/fail", "/postgres/fail", "/mysql/fail", "/redis/retry", "/postgres/retry", "/mysql/retry"];
    const CALLERS: usize = 4;
    /// Number of operations that have one key.
    pub(crate) const OF_A_KEY: usize = Self::PATHS.len() * Self::CALLERS;

    fn path(self) -> &'static str {
        Self::PATHS[self.0 % Self::PATHS.len()]
    }

    fn caller(self) -> String {
        format!("caller-{}", self.0 / Self::PATHS.len() % Self::CALLERS)
    }

    fn key(self) -> String {
        format!("order-{}", self.0 / Self::OF_A_KEY)
    }

    /// Name of the operation, as the server writes it into the ledger.
    pub(crate) fn name(self) -> String {
        format!("{} {} {}", self.path(), self.caller(), self.key())
    }

    /// Returns whether the order's route has the policy `on_crash = fail`.
    pub(crate) fn is_under_fail(self) -> bool {
        self.path().ends_with("/fail")
    }

    /// Body of the operation's requests. Most operations are short; one of a hundred is longer than its lease.
    pub(crate) fn payload(self) -> String {
        let millis = if self.0 % 100 == 99 { 3000 } else { self.0 % 30 };
        format!("{millis} ms, amount {}", self.0)
    }
}

/// Complete response.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Header lines in lower case, without the lines that concern only this exchange.
    pub(crate) head: Vec<String>,
    pub(crate) body: String,
}

impl Answer {
    fn read(bytes: &[u8]) -> Option<Self> {
        let (head, body) = std::str::from_utf8(bytes).ok()?.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        let lines: Vec<String> = head.split("\r\n").skip(1).map(str::to_ascii_lowercase).collect();
        let length = lines.iter().find_map(|line| line.strip_prefix("content-length: "))?;
        (length.parse() == Ok(body.len())).then(|| Self { status, head: lines, body: body.to_owned() })
    }

    pub(crate) fn has(&self, line: &str) -> bool {
        self.head.iter().any(|it| it == line)
    }

    /// Returns the parts of the answer that are the same in each replay.
    pub(crate) fn repeated(mut self) -> Self {
        self.head.retain(|line| !line.starts_with("date: ") && !line.starts_with("idempotent-replayed: "));
        self
    }
}

/// Moment at which a client closes its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HangUp {
    Never,
    InBody,
    WhileRunning(Duration),
}

/// Sends an order with this payload. `None` if no complete response arrived.
pub(crate) async fn send(port: u16, order: Order, payload: &str, hang_up: HangUp) -> Option<Answer> {
    let (path, caller, key) = (order.path(), order.caller(), order.key());
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: shop\r\nx-caller: {caller}\r\nidempotency-key: \"{key}\"\r\nconnection: close\r\n"
    );
    let exchange = async {
        let mut line = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        let sent = if hang_up == HangUp::InBody { &payload[..payload.len() / 2] } else { payload };
        let request = format!("{head}content-length: {}\r\n\r\n{sent}", payload.len());
        line.write_all(request.as_bytes()).await.ok()?;
        match hang_up {
            HangUp::Never => {}
            HangUp::InBody => return None,
            HangUp::WhileRunning(after) => {
                tokio::time::sleep(after).await;
                return None;
            }
        }
        let mut answer = Vec::new();
        line.read_to_end(&mut answer).await.ok()?;
        Answer::read(&answer)
    };
    tokio::time::timeout(PATIENCE, exchange).await.ok()?
}
