//! Messages of a stream of NATS, which any client may have published, and subjects.
//!
//! An input is an answer of the stream, byte by byte, and the parts of a message in an answer that a stream could give.

use std::time::Duration;

use idem_runtime::__stored::{StreamMessage, read_answer, read_subject};
use idem_runtime::record::format;
use idem_runtime::{Key, NatsStore};

use super::input::Input;

const SUBJECT: &str = "$KV.fuzz.1.scope.key";
const NANOS: i64 = 1_000_000_000;

/// Asserts that each message is an absent record, a damaged record, or a record with times that follow from its headers
/// and its date.
pub fn messages(data: &[u8]) {
    let _ = read_answer(data, SUBJECT, 0);
    let mut input = Input(data);
    let (now, stored_at) = (i64::from(input.byte()) * NANOS, i64::from(input.byte() % 60));
    let mut headers = b"NATS/1.0\r\n".to_vec();
    let (mut removed, mut retention) = (None, None);
    for _ in 0..input.below(4) {
        let millis = u32::from_be_bytes(input.array());
        let line = match input.below(6) {
            0 => {
                let operation = ["DEL", "PURGE", "PUT", ""][usize::from(input.below(4))];
                removed = removed.or(Some(matches!(operation, "DEL" | "PURGE")));
                format!("KV-Operation: {operation}").into_bytes()
            }
            1 => {
                retention = retention.or(Some(Some(millis)));
                format!("Idem-Retention: {millis}").into_bytes()
            }
            2 => {
                retention = retention.or(Some(None));
                b"idem-retention: soon".to_vec()
            }
            // A line of any bytes, which is no header with an effect.
            _ => [b"X", input.text().replace(['\r', '\n', ':'], "").as_bytes(), b": \xff"].concat(),
        };
        headers.extend_from_slice(&line);
        headers.extend_from_slice(b"\r\n");
    }
    headers.extend_from_slice(b"\r\n");
    let body = if input.flag() { format::encode(&input.record()) } else { input.bytes().to_vec() };
    let (headers, content) = (base64(&headers), base64(&body));
    let time = format!("1970-01-01T00:00:{stored_at:02}Z");
    let message = format!(r#"{{"subject":"{SUBJECT}","seq":7,"hdrs":"{headers}","data":"{content}","time":"{time}"}}"#);
    let answer = format!(r#"{{"message":{message}}}"#);
    let read = read_answer(answer.as_bytes(), SUBJECT, now).expect("a message of a server is read");
    assert!(read_answer(answer.as_bytes(), "$KV.fuzz.1.scope.other", now).is_none(), "a message on another subject");
    let record = format::decode(&body.into());
    let expires_in = retention.flatten().map(|millis| {
        let end = stored_at * 1000 + i64::from(millis);
        Duration::from_millis(u64::try_from(end - now / 1_000_000).unwrap_or_default())
    });
    match (read, record) {
        (StreamMessage::Absent(sequence), _) => assert!(sequence == 7 && removed == Some(true)),
        (StreamMessage::Damaged, record) => assert!(record.is_err() && removed != Some(true)),
        (StreamMessage::Expired, record) => {
            assert!(record.is_ok() && expires_in == Some(Duration::ZERO) && removed != Some(true));
        }
        (StreamMessage::Record { record, left }, Ok(written)) => {
            assert_eq!(*record, written);
            assert_eq!(left, expires_in.unwrap_or(Duration::MAX));
        }
        (StreamMessage::Record { record, .. }, Err(_)) => panic!("{record:?} was no record"),
    }
    subjects(&String::from_utf8_lossy(data));
}

/// Asserts that a subject is the subject of at most one key.
fn subjects(text: &str) {
    if let Some(stored) = read_subject("fuzz", text) {
        assert!(text.starts_with("$KV.fuzz."), "{text}");
        let parts: Vec<&str> = stored.splitn(3, '/').collect();
        if let ["1", scope, key] = parts[..]
            && let Ok(key) = Key::new(scope, key)
        {
            assert_eq!(NatsStore::options().bucket("fuzz").subject_of(&key), text);
        }
    }
    if let Ok(key) = Key::new("scope", text) {
        let subject = NatsStore::options().bucket("fuzz").subject_of(&key);
        assert_eq!(read_subject("fuzz", &subject).as_deref(), Some(key.as_str()));
    }
}

/// Returns the bytes in base64.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let digit = char::from(DIGITS[bits >> (18 - 6 * place) & 63]);
            text.push(if place > chunk.len() { '=' } else { digit });
        }
    }
    text
}
