//! A hand-written client of Redis with minimal work: one connection, one write for all commands that have gathered, and
//! no decoding of answers. No library reaches this limit, because every library does more.
//!
//! A command is written immediately while no command is in flight. Otherwise the command waits until the next answers
//! have been read, and is then written together with other waiting commands.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};

use super::redis::{LEASE, OWNER_CHECKED_SET, TTL, key, millis};
use crate::Receipt;

/// A connection, and the script that completes a first run. Clones share the connection.
#[derive(Clone)]
pub struct Pipelined {
    gathering: Arc<Gathering>,
    script: Arc<str>,
    owners: Arc<AtomicU64>,
}

/// The commands that wait for the next write, and the tasks that wait for their answers.
#[derive(Default)]
struct Gathering {
    next: Mutex<Next>,
    /// Notified when the first command for the next write arrives.
    begun: Notify,
}

#[derive(Default)]
struct Next {
    bytes: Vec<u8>,
    callers: Vec<oneshot::Sender<Bytes>>,
}

impl Gathering {
    fn next(&self) -> MutexGuard<'_, Next> {
        self.next.lock().expect("no panic before")
    }
}

impl Pipelined {
    /// Connects to the server at `address`; the connection is a task of the current runtime.
    pub async fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.expect("connects");
        let gathering = Arc::<Gathering>::default();
        tokio::spawn(drive(stream, Arc::clone(&gathering)));
        let mut connected = Self { gathering, script: "".into(), owners: Arc::default() };
        let script = connected.ask(&[b"SCRIPT", b"LOAD", OWNER_CHECKED_SET.as_bytes()]).await;
        connected.script = std::str::from_utf8(value(&script)).expect("a hash").into();
        connected
    }

    /// Sends a command, and returns the server's answer, not decoded.
    async fn ask(&self, command: &[&[u8]]) -> Bytes {
        let (sender, answer) = oneshot::channel();
        let is_first = {
            let mut next = self.gathering.next();
            write_number(&mut next.bytes, b'*', command.len());
            for argument in command {
                write_number(&mut next.bytes, b'$', argument.len());
                next.bytes.extend_from_slice(argument);
                next.bytes.extend_from_slice(b"\r\n");
            }
            next.callers.push(sender);
            next.callers.len() == 1
        };
        if is_first {
            self.gathering.begun.notify_one();
        }
        answer.await.expect("answers")
    }

    async fn reserve(&self, key: &str, owner: &str) -> Bytes {
        let lease = millis(LEASE).to_string();
        self.ask(&[b"SET", key.as_bytes(), owner.as_bytes(), b"NX", b"GET", b"PX", lease.as_bytes()]).await
    }

    /// Makes a first run: `SET key owner NX GET PX lease`, the trivial handler, and an owner-checked `SET` as a script.
    pub async fn ship(&self, order_id: u64) -> Receipt {
        self.run(order_id, || Receipt::of(order_id)).await
    }

    /// Makes a first run with the given handler, whose result can have any type.
    pub async fn run<T: Serialize>(&self, order_id: u64, handler: impl FnOnce() -> T) -> T {
        let key = key(order_id);
        let owner = format!("{:016}", self.owners.fetch_add(1, Ordering::Relaxed));
        assert_eq!(&*self.reserve(&key, &owner).await, b"$-1\r\n", "another owner holds the key");
        let result = handler();
        let json = serde_json::to_vec(&result).expect("encodes");
        let ttl = millis(TTL).to_string();
        let [script, key] = [&*self.script, &*key].map(str::as_bytes);
        let done = self.ask(&[b"EVALSHA", script, b"1", key, owner.as_bytes(), &json, ttl.as_bytes()]).await;
        assert_eq!(&*done, b":1\r\n", "another owner has taken over");
        result
    }

    /// Makes a replay: `GET` of the record, not decoded.
    pub async fn replay(&self, order_id: u64) -> Bytes {
        let found = self.ask(&[b"GET", key(order_id).as_bytes()]).await;
        assert!(found.len() > 5, "there is no record");
        found
    }

    /// Makes a call of an order that another owner has reserved: `SET key owner NX GET PX lease` returns that owner's
    /// value.
    pub async fn in_progress(&self, order_id: u64) -> Bytes {
        let found = self.reserve(&key(order_id), "0000000000000000").await;
        assert!(found.len() > 5, "nobody has it");
        found
    }
}

/// Writes the gathered commands and distributes the answers, until the server or all users of the connection are gone.
async fn drive(mut stream: TcpStream, gathering: Arc<Gathering>) {
    let (mut writing, mut in_flight) = (Vec::new(), VecDeque::new());
    let mut read = BytesMut::with_capacity(1 << 16);
    loop {
        {
            let mut next = gathering.next();
            std::mem::swap(&mut next.bytes, &mut writing);
            in_flight.extend(next.callers.drain(..));
        }
        if in_flight.is_empty() {
            gathering.begun.notified().await;
            continue;
        }
        if !writing.is_empty() {
            stream.write_all(&writing).await.expect("the server reads");
            writing.clear();
        }
        read.reserve(1 << 14);
        if stream.read_buf(&mut read).await.unwrap_or_default() == 0 {
            return;
        }
        while let Some(answer) = whole(&read).map(|length| read.split_to(length).freeze()) {
            let caller: oneshot::Sender<Bytes> = in_flight.pop_front().expect("as many answers as commands");
            let _ = caller.send(answer);
        }
        // Tasks that were just answered run first, so that the next write includes their next commands.
        tokio::task::yield_now().await;
    }
}

/// Returns the length of the first answer in `read`, if it is complete: a number, a status or a string.
fn whole(read: &BytesMut) -> Option<usize> {
    let line = read.iter().position(|byte| *byte == b'\n')? + 1;
    match read.first()? {
        b':' | b'+' => Some(line),
        b'$' if read[1] == b'-' => Some(line),
        b'$' => Some(line + number(&read[1..line - 2]) + 2).filter(|length| read.len() >= *length),
        _ => panic!("{}", String::from_utf8_lossy(&read[..line])),
    }
}

/// Returns the string that an answer contains, without its length and line ends.
fn value(answer: &Bytes) -> &[u8] {
    let line = answer.iter().position(|byte| *byte == b'\n').expect("a whole answer") + 1;
    &answer[line..answer.len() - 2]
}

fn number(digits: &[u8]) -> usize {
    std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).expect("a number")
}

/// Writes a number with its kind, in the form of the Redis protocol: `*7\r\n` or `$24\r\n`.
fn write_number(bytes: &mut Vec<u8>, kind: u8, number: usize) {
    use std::io::Write as _;
    bytes.push(kind);
    write!(bytes, "{number}\r\n").expect("memory takes it");
}

#[cfg(test)]
mod tests {
    use bytes::Buf;

    use super::*;

    #[test]
    fn the_parser_finds_one_answer_of_redis_after_the_other() {
        let mut read = BytesMut::from(&b":1\r\n$-1\r\n$5\r\na\r\nbc\r\n+OK\r\n$3\r\nab"[..]);
        let lengths: Vec<_> = std::iter::from_fn(|| {
            let length = whole(&read)?;
            read.advance(length);
            Some(length)
        })
        .collect();
        assert_eq!(lengths, [4, 5, 11, 5]);
        assert_eq!(value(&Bytes::from_static(b"$5\r\na\r\nbc\r\n")), b"a\r\nbc");
    }
}
