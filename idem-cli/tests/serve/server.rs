//! The program as a server, and a client that sends any request.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use idem_runtime::store::{Release, Reservation, ReserveRequest};
use idem_runtime::{Key, Store};
use serde_json::Value;

use super::support::{Records, command};

/// `idem serve` on a file with records; killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
    pub(crate) token: Option<String>,
}

impl Server {
    /// Starts the program with these arguments, and reads its address.
    pub(crate) fn start(records: &Records, arguments: &[&str]) -> Self {
        let mut command = command([&["serve", "--json"], arguments].concat());
        command.env("IDEM_STORE", records.url()).env("USER", "alice").stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        let port = said["url"].as_str().unwrap().strip_prefix("http://127.0.0.1:").unwrap().trim_end_matches('/');
        Self { child, port: port.parse().unwrap(), token: said["token"].as_str().map(str::to_owned) }
    }

    pub(crate) fn url(&self, target: &str) -> String {
        format!("http://127.0.0.1:{}{target}", self.port)
    }

    /// Sends a request, with the usual `Host` unless `headers` has one.
    pub(crate) fn send(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        exchange(self.port, method, target, headers, body)
    }

    pub(crate) fn get(&self, target: &str) -> Answer {
        self.send("GET", target, &[], "")
    }

    /// Enters the token, and returns the cookie of the session.
    pub(crate) fn sign_in(&self) -> String {
        let form = format!("token={}", self.token.as_ref().expect("decisions are allowed"));
        let answer = self.send("POST", "/session", &[], &form);
        assert_eq!((answer.status, answer.header("location")), (303, "/"), "{answer:?}");
        let cookie = answer.header("set-cookie");
        for attribute in ["; HttpOnly", "; SameSite=Strict", "; Path=/"] {
            assert!(cookie.contains(attribute), "no `{attribute}` in {cookie}");
        }
        cookie.split(';').next().unwrap().to_owned()
    }

    /// Opens a page in a session.
    pub(crate) fn open(&self, cookie: &str, target: &str) -> Answer {
        self.send("GET", target, &[("cookie", cookie)], "")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Response of a server.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
    headers: Vec<(String, String)>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(it, _)| it.eq_ignore_ascii_case(name)).map_or("", |(_, value)| value)
    }

    #[track_caller]
    pub(crate) fn has(self, status: u16, text: &str) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        assert!(self.body.contains(text), "no `{text}` in {}", self.body);
        self
    }

    /// Returns the value of a hidden field.
    pub(crate) fn field(&self, name: &str) -> &str {
        let (_, rest) = self.body.split_once(&format!("name=\"{name}\" value=\"")).expect("the field");
        rest.split('"').next().unwrap()
    }
}

/// Sends a request over a new connection to this port, and reads the response. `Host` and `Content-Length` are added
/// unless `headers` has them.
pub(crate) fn exchange(port: u16, method: &str, target: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let mut request = format!("{method} {target} HTTP/1.1\r\nConnection: close\r\n");
    let usual = [("host", format!("127.0.0.1:{port}")), ("content-length", body.len().to_string())];
    for (name, value) in usual.iter().filter(|(name, _)| !headers.iter().any(|(it, _)| it == name)) {
        request = format!("{request}{name}: {value}\r\n");
    }
    for (name, value) in headers {
        request = format!("{request}{name}: {value}\r\n");
    }
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    stream.write_all(format!("{request}\r\n{body}").as_bytes()).unwrap();
    // Not every server closes the connection, so the length of the body ends the response.
    let mut stream = BufReader::new(stream);
    let (mut head, mut line) = (String::new(), String::new());
    while line != "\r\n" {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "no response to {method} {target}, but {head:?}");
        head.push_str(&line);
    }
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|status| status.parse().ok());
    let headers =
        lines.filter_map(|line| line.split_once(':')).map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
    let mut answer = Answer { status: status.expect("a status"), headers: headers.collect(), body: String::new() };
    let length: u64 = answer.header("content-length").parse().unwrap_or_default();
    stream.take(length).read_to_string(&mut answer.body).unwrap();
    answer
}

/// Makes a record whose attempt was interrupted.
pub(crate) async fn cut_off(store: &dyn Store, key: &Key) {
    let (context, hour) = (store.context(), Duration::from_secs(3600));
    let request = ReserveRequest::new(key.clone(), context.new_owner(), hour, hour).holder(context.holder());
    let Reservation::Granted { lease, .. } = store.reserve(&request).await.unwrap() else { panic!("not new") };
    let _ = store.release(&lease, Release::Interrupted).await.unwrap();
}
