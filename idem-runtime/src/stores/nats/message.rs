//! Records as messages: what the store writes, and the reading of messages that may be anybody's.

use std::borrow::Cow;
use std::time::Duration;

use async_nats::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use serde::Deserialize;

use super::server_clock::{ServerTime, read_time};
use crate::record::Record;
use crate::record::format::{self, millis};
use crate::record::messages::OutgoingMessage;

/// Header with the retention of a record, in milliseconds from the time at which the leader stored the message.
const RETENTION: &str = "Idem-Retention";
/// Header with the retention of a message, in whole seconds. The server removes the message afterwards.
const TTL: &str = "Nats-TTL";
/// Header with the sequence number of the message that a write replaces; 0 if there must be no message.
const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";
/// Headers of a message of a handler: its id, and its key for the order of messages.
const MESSAGE_ID: &str = "Idem-Message-Id";
const MESSAGE_KEY: &str = "Idem-Message-Key";
/// Headers of a batch, which the stream stores completely or not at all.
const BATCH_ID: &str = "Nats-Batch-Id";
const BATCH_SEQUENCE: &str = "Nats-Batch-Sequence";
const BATCH_COMMIT: &str = "Nats-Batch-Commit";
/// Header with the operation of a tool for key-value buckets: a removal, or the write of a value.
const OPERATION: &str = "KV-Operation";
/// Header of the message that a server writes in place of a removed one.
const MARKER: &str = "Nats-Marker-Reason";
/// Longest retention that the server counts, in seconds. A longer one would overflow the server's 64-bit nanoseconds,
/// and so the server keeps the message forever. The store treats the record as absent after its retention all the same.
const LONGEST: u64 = 100 * 365 * 86_400;

/// A message with a record.
#[derive(Clone, Debug)]
pub(super) struct StoredRecord {
    pub(super) sequence: u64,
    /// Time at which the leader stored the message.
    pub(super) stored_at: ServerTime,
    /// Retention from `stored_at`, in milliseconds; `None` if the message names none, so that it is kept forever.
    pub(super) retention: Option<u64>,
    /// The record in the form of `record::format`.
    pub(super) body: Bytes,
}

/// The last message on a subject.
#[derive(Debug)]
pub(super) enum LastMessage {
    /// There is no record. A write has to expect this sequence number: 0, or that of a message which says that the
    /// record was removed.
    Absent(u64),
    Record(StoredRecord),
}

/// Returns the written form of `record`, with the times when its key was first seen and when its latest attempt began,
/// in milliseconds since 1970.
pub(super) fn body_of(record: &Record, times: [u64; 2]) -> Bytes {
    let mut body = format::encode(record);
    format::set_times(&mut body, times);
    body.into()
}

/// Returns the headers of a write that replaces message number `expected` and is kept for `retention` milliseconds.
pub(super) fn headers(expected: u64, retention: u64) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(EXPECTED, HeaderValue::from(expected));
    headers.insert(RETENTION, HeaderValue::from(retention));
    headers.insert(TTL, ttl(retention));
    headers
}

/// Returns the retention of a message as the server counts it: in whole seconds, and at least one. Rounded up: a record
/// is never forgotten early.
fn ttl(retention: u64) -> HeaderValue {
    match retention.div_ceil(1000).max(1) {
        LONGEST.. => HeaderValue::from("never"),
        seconds => HeaderValue::from(seconds),
    }
}

/// Returns the headers of a message that says that the record was removed, in place of message number `expected`. The
/// message is kept for `kept` milliseconds.
pub(super) fn removal(expected: u64, kept: u64) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(EXPECTED, HeaderValue::from(expected));
    headers.insert(TTL, ttl(kept));
    headers.insert(OPERATION, "DEL");
    headers
}

/// Returns the headers of a message of a handler, which is kept for `kept`. The error is the reason why the message
/// can't have its headers: headers of the server (`Nats-…`) are instructions.
pub(super) fn headers_of_message(message: &OutgoingMessage, kept: Duration) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in message.headers() {
        let is_reserved = |prefix: &str| name.get(..prefix.len()).is_some_and(|it| it.eq_ignore_ascii_case(prefix));
        if ["Nats-", "Idem-"].into_iter().any(is_reserved) {
            return Err(format!("a message must not have the header `{name}`"));
        }
        let (parsed, value) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>());
        let (Ok(parsed), Ok(value)) = (parsed, value) else { return Err(format!("NATS has no such header: `{name}`")) };
        headers.append(parsed, value);
    }
    let own = [(MESSAGE_ID, Some(message.id())), (MESSAGE_KEY, message.partition_key())];
    for (name, value) in own.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        let value = value.parse::<HeaderValue>().map_err(|_| format!("NATS has no such header: `{name}`"))?;
        headers.insert(name, value);
    }
    headers.insert(TTL, ttl(millis(kept)));
    Ok(headers)
}

/// Has the stream refuse the message if there is one on its subject.
pub(super) fn expect_none(headers: &mut HeaderMap) {
    headers.insert(EXPECTED, HeaderValue::from(0_u64));
}

/// Adds the headers of the message at `place` (from 1) of a batch of `count` messages.
pub(super) fn add_batch(headers: &mut HeaderMap, batch: &str, place: usize, count: usize) {
    headers.insert(BATCH_ID, batch);
    headers.insert(BATCH_SEQUENCE, HeaderValue::from(place));
    if place == count {
        headers.insert(BATCH_COMMIT, "1");
    }
}

/// Number of bytes of `headers` in a message.
pub(super) fn header_bytes(headers: &HeaderMap) -> usize {
    let lines =
        headers.iter().flat_map(|(name, values)| values.iter().map(move |value| (name.as_ref(), value.as_str())));
    "NATS/1.0\r\n\r\n".len()
        + lines.map(|(name, value): (&str, &str)| name.len() + value.len() + ": \r\n".len()).sum::<usize>()
}

/// Returns whether a message with these headers says that its key has no value. A message with another operation has a
/// value, which is a record or damaged.
fn is_removal(operation: Option<&str>, marker: Option<&str>) -> bool {
    marker.is_some() || operation.is_some_and(|it| matches!(it.trim(), "DEL" | "PURGE"))
}

/// Number of bytes that the headers of a record take at most.
pub(super) const HEADER_BYTES: usize = 256;

/// Message in an answer of the stream.
#[derive(Deserialize)]
pub(super) struct WireMessage<'a> {
    #[serde(borrow)]
    subject: Cow<'a, str>,
    seq: u64,
    #[serde(borrow, default)]
    hdrs: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    data: Option<Cow<'a, str>>,
    #[serde(borrow)]
    time: Cow<'a, str>,
}

impl WireMessage<'_> {
    /// Returns the record in the message on `subject`. `None` if the message is not as servers write messages, or is on
    /// another subject.
    pub(super) fn read(&self, subject: &str) -> Option<LastMessage> {
        if self.subject == subject { self.content() } else { None }
    }

    pub(super) fn subject(&self) -> &str {
        &self.subject
    }

    /// Returns the content of the message. `None` if the message is not as servers write messages.
    pub(super) fn content(&self) -> Option<LastMessage> {
        let decoded = |part: &Option<Cow<'_, str>>| {
            part.as_ref().map_or(Some(Vec::new()), |part| BASE64_STANDARD.decode(part.as_bytes()).ok())
        };
        // Headers of another program may be no text. The message is still the value of its key, so that an operator
        // can look at it and remove it.
        let headers = decoded(&self.hdrs)?;
        let headers = String::from_utf8_lossy(&headers);
        let header = |name: &str| {
            let mut lines = headers.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(it, _)| it.eq_ignore_ascii_case(name)).map(|(_, value)| value)
        };
        if is_removal(header(OPERATION), header(MARKER)) {
            return Some(LastMessage::Absent(self.seq));
        }
        let retention = header(RETENTION).and_then(|value| value.trim().parse().ok());
        let body = decoded(&self.data)?.into();
        Some(LastMessage::Record(StoredRecord {
            sequence: self.seq,
            stored_at: read_time(&self.time)?,
            retention,
            body,
        }))
    }
}

/// Reads the answer to a direct read of the last message on `subject`.
pub(super) fn read_direct(answer: &async_nats::Message, stream: &str, subject: &str) -> Option<LastMessage> {
    match answer.status {
        None => {}
        Some(StatusCode::NOT_FOUND) => return Some(LastMessage::Absent(0)),
        Some(_) => return None,
    }
    let headers = answer.headers.as_ref()?;
    let header = |name: &str| headers.get(name).map(HeaderValue::as_str);
    if header("Nats-Stream") != Some(stream) || header("Nats-Subject") != Some(subject) {
        return None;
    }
    let sequence = header("Nats-Sequence")?.parse().ok()?;
    if is_removal(header(OPERATION), header(MARKER)) {
        return Some(LastMessage::Absent(sequence));
    }
    let stored_at = read_time(header("Nats-Time-Stamp")?)?;
    let retention = header(RETENTION).and_then(|value| value.trim().parse().ok());
    Some(LastMessage::Record(StoredRecord { sequence, stored_at, retention, body: answer.payload.clone() }))
}

/// Reads a message that a consumer delivers, with its sequence number and the time at which it was stored.
pub(super) fn read_delivered(message: &async_nats::Message) -> Option<(String, LastMessage)> {
    // $JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<number>.<time>.<pending>, since 2.10 optionally with the
    // domain and the account after `ACK`, and with a random token at the end.
    let reply = message.reply.as_deref()?;
    let tokens: Vec<&str> = reply.split('.').collect();
    let first = if tokens.len() == 9 { 4 } else { 6 };
    let sequence = tokens.get(first + 1)?.parse().ok()?;
    let stored_at = tokens.get(first + 3)?.parse().ok()?;
    let header = |name: &str| message.headers.as_ref().and_then(|headers| headers.get(name)).map(HeaderValue::as_str);
    let found = if is_removal(header(OPERATION), header(MARKER)) {
        LastMessage::Absent(sequence)
    } else {
        let retention = header(RETENTION).and_then(|value| value.trim().parse().ok());
        LastMessage::Record(StoredRecord { sequence, stored_at, retention, body: message.payload.clone() })
    };
    Some((message.subject.to_string(), found))
}

/// Returns whether a message that was published on the subject of an awaited attempt may end the wait. The first
/// attempt of a key ends no other attempt: such a message is a renewal, or the reservation of a duplicate, which the
/// stream refuses.
pub(super) fn may_end_a_wait(body: &[u8]) -> bool {
    // Byte 5 is the state, bytes 24 to 27 are the number of the attempt; see `record::format`.
    !matches!((body.get(5), body.get(24..28)), (Some(b'P'), Some([0, 0, 0, 1])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Option<LastMessage> {
        serde_json::from_str::<WireMessage<'_>>(json).ok()?.read("s")
    }

    #[test]
    fn retentions_are_rounded_up_to_whole_seconds() {
        for (retention, ttl) in [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (60_000, "60"), (u64::MAX, "never")] {
            let headers = headers(7, retention);
            assert_eq!(headers.get(TTL).map(HeaderValue::as_str), Some(ttl), "{retention} ms");
            assert_eq!(headers.get(RETENTION).map(HeaderValue::as_str), Some(&*retention.to_string()));
            assert_eq!(headers.get(EXPECTED).map(HeaderValue::as_str), Some("7"));
        }
    }

    #[test]
    fn a_message_without_a_value_is_no_record() {
        let encoded = |headers: &str| BASE64_STANDARD.encode(headers);
        for headers in [
            "NATS/1.0\r\nKV-Operation: DEL\r\n\r\n",
            "NATS/1.0\r\nkv-operation: PURGE\r\n\r\n",
            "NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\n\r\n",
        ] {
            let json =
                format!(r#"{{"subject":"s","seq":3,"hdrs":"{}","time":"2026-11-27T16:19:23Z"}}"#, encoded(headers));
            assert!(matches!(read(&json), Some(LastMessage::Absent(3))), "{headers}");
        }
        let headers = encoded("NATS/1.0\r\nidem-retention: 1500\r\nNats-TTL: 2\r\n\r\n");
        let json =
            format!(r#"{{"subject":"s","seq":3,"hdrs":"{headers}","data":"aWRlbQ==","time":"1970-01-01T00:00:01Z"}}"#);
        let Some(LastMessage::Record(record)) = read(&json) else { panic!("a record") };
        assert_eq!((record.sequence, record.stored_at, record.retention), (3, 1_000_000_000, Some(1500)));
        assert_eq!(&record.body[..], b"idem");
    }

    #[test]
    fn a_message_with_foreign_headers_has_a_value() {
        for headers in [&b"NATS/1.0\r\nKV-Operation: PUT\r\n\r\n"[..], b"NATS/1.0\r\nX: \xff\r\n\r\n"] {
            let encoded = BASE64_STANDARD.encode(headers);
            let json = format!(r#"{{"subject":"s","seq":3,"hdrs":"{encoded}","time":"1970-01-01T00:00:01Z"}}"#);
            assert!(matches!(read(&json), Some(LastMessage::Record(_))), "{headers:?}");
        }
    }

    #[test]
    fn garbage_is_no_message() {
        for json in [
            r#"{"subject":"s","seq":3,"time":"now"}"#,
            r#"{"subject":"other","seq":3,"time":"2026-11-27T16:19:23Z"}"#,
            r#"{"subject":"s","seq":3,"data":"!","time":"2026-11-27T16:19:23Z"}"#,
            r#"{"subject":"s","data":"aQ==","time":"2026-11-27T16:19:23Z"}"#,
        ] {
            assert!(read(json).is_none(), "{json}");
        }
    }
}
