//! Reads answers and subjects that may be anybody's, for the fuzzer.

use std::time::Duration;

use super::access::{GetAnswer, RecordTimes};
use super::message::LastMessage;
use super::subject::{key_of, prefix_of};
use crate::record::{Record, format};

/// A message in an answer of a stream.
#[derive(Debug)]
pub enum StreamMessage {
    /// There is no record. A write has to expect this sequence number.
    Absent(u64),
    /// The message is no record.
    Damaged,
    /// The retention of the record has ended.
    Expired,
    /// The message is a record.
    Record {
        /// The record.
        record: Box<Record>,
        /// Time until its retention ends.
        left: Duration,
    },
}

/// Reads the answer of a stream to a question about `subject`. `now`: time of the leader in nanoseconds since 1970.
/// `None` if the answer is not as servers write answers, or is about another subject.
pub fn read_answer(answer: &[u8], subject: &str, now: i64) -> Option<StreamMessage> {
    let answer: GetAnswer<'_> = serde_json::from_slice(answer).ok()?;
    let stored = match answer.message?.read(subject)? {
        LastMessage::Absent(sequence) => return Some(StreamMessage::Absent(sequence)),
        LastMessage::Record(stored) => stored,
    };
    let Ok(record) = format::decode(&stored.body) else { return Some(StreamMessage::Damaged) };
    Some(match RecordTimes::at(now, &stored, &record) {
        None => StreamMessage::Expired,
        Some(times) => StreamMessage::Record { record: Box::new(record), left: times.expires_in },
    })
}

/// Returns the stored form of the key whose record is on `subject` in this bucket.
pub fn read_subject(bucket: &str, subject: &str) -> Option<String> {
    key_of(&prefix_of(bucket, ""), subject)
}
