//! Writes of whole records, by a reservation or a completion: as a caller describes them, as bytes, and as commands.

use redis::Cmd;

use super::command::Name;
use super::scripts::Script;
use crate::record::Record;
use crate::record::format;

/// A record to write under a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordWrite<'a> {
    pub(super) name: Name<'a>,
    pub(super) record: &'a Record,
    /// Time at which the attempt was reserved, in milliseconds since 1970. `None` in a reservation, and in a completion
    /// whose record must have changed since its reservation.
    pub(super) reserved_at: Option<u64>,
    /// The record as the reservation wrote it; `None` if `reserved_at` is `None` or the server does not support `SET …
    /// IFEQ`.
    pub(super) expected: Option<&'a Record>,
    pub(super) ttl_ms: u64,
}

impl RecordWrite<'_> {
    /// Returns the size of the record, in bytes.
    pub(super) fn value_len(&self) -> usize {
        format::len(self.record)
    }

    /// Appends key, value and expected record to `bytes`, end to end.
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) -> WriteLayout {
        bytes.reserve(self.name.len() + self.value_len() + self.expected.map_or(0, format::len));
        let at = bytes.len();
        self.name.write(bytes);
        let value_at = bytes.len();
        format::write(self.record, bytes);
        if let Some(reserved_at) = self.reserved_at {
            // `SET … IFEQ` writes this time. A script instead keeps the times of the stored record, if the stored
            // record has times.
            format::set_times(&mut bytes[value_at..], [reserved_at; 2]);
        }
        let expected_at = bytes.len();
        if let Some(expected) = self.expected {
            format::write(expected, bytes);
        }
        let (key, value) = (value_at - at, expected_at - value_at);
        WriteLayout { at, key, value, expected: bytes.len() - expected_at, ttl_ms: self.ttl_ms }
    }

    /// Makes the command of a lone reservation.
    pub(super) fn reserve(&self) -> Cmd {
        let mut bytes = Vec::new();
        self.encode(&mut bytes).write_in(&bytes).reserve()
    }
}

/// Offset of an encoded write in its buffer, and the lengths of its parts.
#[derive(Clone, Copy)]
pub(super) struct WriteLayout {
    at: usize,
    key: usize,
    pub(super) value: usize,
    pub(super) expected: usize,
    ttl_ms: u64,
}

impl WriteLayout {
    pub(super) fn write_in<'a>(&self, bytes: &'a [u8]) -> EncodedWrite<'a> {
        let (key, rest) = bytes[self.at..].split_at(self.key);
        let (value, rest) = rest.split_at(self.value);
        EncodedWrite { key, value, expected: &rest[..self.expected], ttl_ms: self.ttl_ms }
    }
}

/// An encoded write. Like every record, the value contains the owner token and the number of the attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct EncodedWrite<'a> {
    pub(super) key: &'a [u8],
    value: &'a [u8],
    /// The bytes of the record before a completion; empty if a script has to compare the owner token instead.
    pub(super) expected: &'a [u8],
    ttl_ms: u64,
}

impl EncodedWrite<'_> {
    /// Makes the command that reserves an absent key. The answer of this command is nil, or the existing value.
    pub(super) fn reserve(self) -> Cmd {
        let mut command = Cmd::with_capacity(7, self.key.len() + self.value.len() + 32);
        command.arg("SET").arg(self.key).arg(self.value).arg("NX").arg("GET").arg("PX").arg(self.ttl_ms);
        command
    }

    /// Makes the command that finishes a record if the record is unchanged since its reservation. The answer is `OK`,
    /// or nil.
    pub(super) fn compare(self) -> Cmd {
        let Self { key, value, expected, ttl_ms } = self;
        let mut command = Cmd::with_capacity(7, key.len() + value.len() + expected.len() + 32);
        command.arg("SET").arg(key).arg(value).arg("IFEQ").arg(expected).arg("PX").arg(ttl_ms);
        command
    }
}

/// Makes the call of `script` that finishes records: with the script's source, or with its hash.
pub(super) fn finish<'a>(
    script: &Script,
    with_source: bool,
    channel: &str,
    writes: impl ExactSizeIterator<Item = EncodedWrite<'a>> + Clone,
) -> Cmd {
    let (name, script) = if with_source { ("EVAL", script.source) } else { ("EVALSHA", script.sha.as_str()) };
    let bytes: usize = writes.clone().map(|it| it.key.len() + it.value.len() + 20).sum();
    let mut command = Cmd::with_capacity(4 + 3 * writes.len(), bytes + script.len() + channel.len() + 16);
    command.arg(name).arg(script).arg(writes.len());
    for it in writes.clone() {
        command.arg(it.key);
    }
    command.arg(channel);
    for it in writes {
        command.arg(it.value).arg(it.ttl_ms);
    }
    command
}
