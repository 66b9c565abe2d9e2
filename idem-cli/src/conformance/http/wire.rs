//! HTTP/1.1 over a socket, byte for byte: sends requests that a client library would refuse, and stops at a given
//! point.

use std::fmt::{self, Write as _};

use http::Uri;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::tls;

/// Limit for a response: a longer response is treated as endless.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
const MAX_FIELDS: usize = 128;

/// The server under test.
pub(super) struct Server {
    host: String,
    port: u16,
    authority: String,
    prefix: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl Server {
    /// Parses the URL of a server. The error describes the mistake in the URL.
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let example = "write it as http://127.0.0.1:8080";
        let uri: Uri = url.parse().map_err(|error| format!("{error}; {example}"))?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            Some(other) => return Err(format!("`{other}` is not http; {example}")),
            None => return Err(format!("it has no scheme; {example}")),
        };
        let authority = uri.authority().ok_or_else(|| format!("it names no host; {example}"))?;
        if authority.as_str().contains('@') {
            return Err("it holds a user or a password; give credentials with --caller".to_owned());
        }
        if uri.query().is_some() {
            return Err("it has a query; give the routes with --path and --counter".to_owned());
        }
        let host = authority.host();
        let has_port = authority.as_str().len() > host.len();
        if host.is_empty() || (has_port && authority.port_u16().is_none_or(|port| port == 0)) {
            return Err(format!("it names no host and port; {example}"));
        }
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let tls = match is_tls {
            true => {
                let name = ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
                Some((tls::connector()?, name))
            }
            false => None,
        };
        Ok(Self {
            tls,
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            authority: authority.as_str().to_owned(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }

    pub(super) async fn connect(&self) -> Result<Connection, String> {
        let failed = |error: std::io::Error| format!("can't connect to {}: {error}", self.authority);
        let stream = TcpStream::connect((&*self.host, self.port)).await.map_err(failed)?;
        // Disables Nagle's algorithm, so that half a request arrives before the rest is sent.
        let _ = stream.set_nodelay(true);
        let stream: Box<dyn Stream> = match &self.tls {
            Some((tls, name)) => Box::new(tls.connect(name.clone(), stream).await.map_err(failed)?),
            None => Box::new(stream),
        };
        Ok(Connection { stream, read: Vec::new() })
    }

    /// Returns the bytes of a request.
    pub(super) fn request(&self, method: &str, path: &str, fields: &[(String, String)], body: &[u8]) -> Vec<u8> {
        let mut head = format!("{method} {}{path} HTTP/1.1\r\nhost: {}\r\n", self.prefix, self.authority);
        for (name, value) in fields {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        if !body.is_empty() || method != "GET" {
            let _ = write!(head, "content-length: {}\r\n", body.len());
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        bytes
    }
}

/// A byte stream to the server, with or without TLS.
trait Stream: AsyncRead + AsyncWrite + Unpin {}

impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

/// A response that was read to its end.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    /// Header fields, with lower-case names, in the order of arrival.
    fields: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
}

impl Reply {
    /// Returns the values of all fields with this name, in their order.
    pub(super) fn field(&self, name: &str) -> Vec<&str> {
        self.fields.iter().filter(|(it, _)| it.eq_ignore_ascii_case(name)).map(|(_, value)| &**value).collect()
    }

    /// Returns the body as JSON; `Null` if it is not JSON.
    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns the beginning of the body, at most one line long.
    pub(super) fn excerpt(&self) -> String {
        let text = String::from_utf8_lossy(&self.body[..self.body.len().min(400)]);
        text.chars().take(120).flat_map(char::escape_debug).collect()
    }
}

/// A connection, and the bytes that were read but not parsed yet.
pub(super) struct Connection {
    stream: Box<dyn Stream>,
    read: Vec<u8>,
}

impl Connection {
    pub(super) async fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let written = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        written.await.map_err(|error: std::io::Error| format!("the server took no request: {error}"))
    }

    /// Waits for the first byte of a response.
    pub(super) async fn first_byte(&mut self) -> Result<(), String> {
        while self.read.is_empty() {
            self.more("the head of a response").await?;
        }
        Ok(())
    }

    /// Reads the next response to its end; `None` if the server has closed the connection before the response began.
    pub(super) async fn next_reply(&mut self) -> Result<Option<Reply>, String> {
        if self.read.is_empty() && !self.more_or_end().await.unwrap_or(false) {
            return Ok(None);
        }
        self.reply().await.map(Some)
    }

    /// Reads the next response to its end.
    pub(super) async fn reply(&mut self) -> Result<Reply, String> {
        loop {
            let (mut reply, length) = self.head().await?;
            match (reply.status, length) {
                // Interim responses such as 100 Continue precede the final response.
                (100..200, _) => continue,
                (204 | 304, _) => {}
                (_, Length::Known(length)) => reply.body = self.take(length, "a body of its Content-Length").await?,
                (_, Length::Chunked) => reply.body = self.chunks().await?,
                (_, Length::UntilClosed) => {
                    while self.more_or_end().await? {}
                    reply.body = std::mem::take(&mut self.read);
                }
            }
            return Ok(reply);
        }
    }

    async fn head(&mut self) -> Result<(Reply, Length), String> {
        loop {
            let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
            let mut response = httparse::Response::new(&mut fields);
            let state = response.parse(&self.read).map_err(|error| format!("the answer is not HTTP/1.1: {error}"))?;
            if let httparse::Status::Complete(length) = state {
                let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
                let fields = response.headers.iter().map(|it| (it.name.to_ascii_lowercase(), text(it.value))).collect();
                let reply = Reply { status: response.code.unwrap_or_default(), fields, body: Vec::new() };
                self.read.drain(..length);
                let length = match (reply.field("transfer-encoding").last(), reply.field("content-length").first()) {
                    (Some(coding), _) if coding.to_ascii_lowercase().ends_with("chunked") => Length::Chunked,
                    (None, Some(length)) => {
                        Length::Known(length.parse().map_err(|_| format!("Content-Length is `{length}`"))?)
                    }
                    _ => Length::UntilClosed,
                };
                return Ok((reply, length));
            }
            self.more("the head of a response").await?;
        }
    }

    async fn chunks(&mut self) -> Result<Vec<u8>, String> {
        let mut body = Vec::new();
        loop {
            let line = self.line().await?;
            let digits = line.split(';').next().unwrap_or_default().trim();
            let length = usize::from_str_radix(digits, 16).map_err(|_| format!("a chunk has the length `{digits}`"))?;
            if length == 0 {
                // Skips the trailers of a chunked body, up to the empty line.
                while !self.line().await?.is_empty() {}
                return Ok(body);
            }
            body.extend(self.take(length, "a chunk").await?);
            if body.len() > MAX_RESPONSE_BYTES {
                return Err(too_long());
            }
            self.line().await?;
        }
    }

    async fn line(&mut self) -> Result<String, String> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned());
            }
            self.more("the end of a line").await?;
        }
    }

    async fn take(&mut self, length: usize, what: &str) -> Result<Vec<u8>, String> {
        if length > MAX_RESPONSE_BYTES {
            return Err(too_long());
        }
        while self.read.len() < length {
            self.more(what).await?;
        }
        Ok(self.read.drain(..length).collect())
    }

    async fn more(&mut self, what: &str) -> Result<(), String> {
        match self.more_or_end().await? {
            true => Ok(()),
            false => Err(format!("the server closed the connection before {what}")),
        }
    }

    async fn more_or_end(&mut self) -> Result<bool, String> {
        if self.read.len() > MAX_RESPONSE_BYTES {
            return Err(too_long());
        }
        let read = self.stream.read_buf(&mut self.read).await;
        read.map(|bytes| bytes > 0).map_err(|error| format!("the connection broke: {error}"))
    }
}

fn too_long() -> String {
    format!("the response is longer than {MAX_RESPONSE_BYTES} bytes")
}

/// Length of a body.
enum Length {
    Known(usize),
    Chunked,
    UntilClosed,
}
