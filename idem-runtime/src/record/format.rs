//! Bytes of a record in format version 1, for stores that keep a record as one value. Integers are big-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0–3 | `idem` |
//! | 4 | version of the format: 1 |
//! | 5 | state: `P`ending, `R`eleased, `I`nterrupted, `C`ompleted, `F`ailed |
//! | 6 | flags: 1 a duplicate waits for this record, 2 `on_crash = fail`, 4 has a fingerprint, 8 has a provenance, 16 the body has begun |
//! | 7 | payload: 0 none, 1 stored, 2 too large, 3 unencodable, 4 journal of an unfinished operation |
//! | 8–23 | owner token |
//! | 24–27 | attempt |
//! | 28–31 | number of attempts that count against `max_attempts` |
//! | 32–39 | time when the key was first seen, see below; 0 if it is not written |
//! | 40–47 | time when the latest attempt began, see below; 0 if it is not written |
//! | 48–79 | fingerprint, if there is one |
//! | then | pending: lease and ttl, milliseconds, 8 bytes each |
//! | then | provenance, if any: holder, `traceparent`, operator (1 byte of length, text), reason (2 bytes of length, text) |
//! | rest | stored: length of the codec's name (1 byte), name, result; too large: size of the result, 8 bytes; journal: the journal |
//!
//! The two times are in milliseconds since 1970, by the store's clock. If the holder replaced the whole record, the
//! times are by the clock of the holder's machine.

use std::fmt;
use std::time::Duration;

#[cfg(feature = "redis")]
use bytes::Buf;
use bytes::Bytes;

use super::{Journal, OwnerToken, Provenance, Record, State, StoredResult};
use crate::codec::CodecName;
use crate::key::Fingerprint;
use crate::policy::OnCrash;

/// First bytes of every record.
pub const MAGIC: &[u8; 4] = b"idem";
/// Version of the format that this release writes.
pub const VERSION: u8 = 1;
/// Length of the fixed part of a record in bytes, which is the length of the shortest record.
pub const HEADER_BYTES: usize = 48;
/// End of the bytes that identify a write: state (byte 5), owner token, attempt and counted attempts (bytes 8 to here).
/// Any two different writes of a record differ in the bytes before this position.
pub const IDENTITY_END: usize = 32;
/// Number of leading bytes that [`decode_start`] needs to read a record without its result.
pub const START_BYTES: usize = 1024;
/// Position of the byte with the flags.
pub const FLAGS_AT: usize = 6;
/// Flag that a waiting duplicate sets on a pending record, so that the write that ends the attempt wakes the duplicate.
pub const FLAG_WAITED_FOR: u8 = 1;
const FLAG_ON_CRASH_FAIL: u8 = 2;
const FLAG_FINGERPRINT: u8 = 4;
const FLAG_PROVENANCE: u8 = 8;
/// Flag of a pending record whose body has begun.
const FLAG_BEGUN: u8 = 16;
/// Tag of an unfinished record that ends with a journal.
const TAG_JOURNAL: u8 = 4;

/// Reason why bytes are not a record that this release can read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FormatError {
    /// Another program wrote the value.
    Foreign,
    /// A later release of this library wrote the record.
    LaterVersion(u8),
    /// The record is damaged.
    Damaged,
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("the value is not a record of this library; it is left alone"),
            Self::LaterVersion(version) => {
                write!(f, "the record has format {version}, this release reads up to {VERSION}; upgrade this process")
            }
            Self::Damaged => f.write_str("the record is damaged; it is left alone"),
        }
    }
}

impl std::error::Error for FormatError {}

/// Returns the milliseconds of `duration`, rounded up, so that the written form never shortens a lease.
pub fn millis(duration: Duration) -> u64 {
    // `as_nanos` is avoided: a division of 128 bits takes longer than all other steps of writing a record.
    let rest = duration.subsec_nanos().div_ceil(1_000_000);
    duration.as_secs().saturating_mul(1000).saturating_add(rest.into())
}

/// Returns the written form of `record`.
pub fn encode(record: &Record) -> Vec<u8> {
    let mut out = Vec::with_capacity(room_for(record));
    write(record, &mut out);
    debug_assert_eq!(out.len(), room_for(record), "`room_for` returns the written length");
    out
}

/// Returns the number of bytes that [`encode`] writes.
#[cfg(feature = "redis")]
pub(crate) fn len(record: &Record) -> usize {
    room_for(record)
}

/// Returns the bytes that identify a write of a record: its state, whether its body has begun, its owner token, attempt
/// and counted attempts, and the length of the record, which each entry of the journal changes. `None` if `value` is
/// too short.
#[cfg(feature = "redis")]
pub(crate) fn identity(value: &[u8]) -> Option<[u8; 30]> {
    let mut identity = [0; 30];
    identity[0] = *value.get(5)?;
    identity[1] = value.get(FLAGS_AT)? & FLAG_BEGUN;
    identity[2..26].copy_from_slice(value.get(8..IDENTITY_END)?);
    identity[26..].copy_from_slice(&u32::try_from(value.len()).ok()?.to_be_bytes());
    Some(identity)
}

/// Sets both times in `value`: the time when the key was first seen, and the time when the latest attempt began.
#[cfg(any(feature = "redis", feature = "nats"))]
pub(crate) fn set_times(value: &mut [u8], times: [u64; 2]) {
    value[IDENTITY_END..HEADER_BYTES].copy_from_slice(times.map(u64::to_be_bytes).as_flattened());
}

/// Returns the number of bytes of `record` in its written form.
fn room_for(record: &Record) -> usize {
    let state = match &record.state {
        State::Pending { .. } => 16,
        State::Released | State::Interrupted => 0,
        State::Completed(payload) | State::Failed(payload) => room(payload),
    };
    let provenance = match &record.provenance {
        provenance if provenance.is_empty() => 0,
        provenance => 5 + provenance.texts().iter().map(|text| text.len()).sum::<usize>(),
    };
    let journal = record.journal_in(&record.state).map_or(0, |journal| journal.bytes().len());
    HEADER_BYTES + record.fingerprint.map_or(0, |_| Fingerprint::BYTES) + state + provenance + journal
}

/// Appends the bytes of `record` to `out`.
pub(crate) fn write(record: &Record, out: &mut Vec<u8>) {
    // Flags, and tag of the payload.
    let (mut flags, tag) = match &record.state {
        State::Pending { on_crash, begun, .. } => {
            let fail = if *on_crash == OnCrash::Fail { FLAG_ON_CRASH_FAIL } else { 0 };
            (if *begun { fail | FLAG_BEGUN } else { fail }, 0)
        }
        State::Released | State::Interrupted => (0, 0),
        State::Completed(payload) | State::Failed(payload) => (0, tag(payload)),
    };
    let tag = if record.journal_in(&record.state).is_some() { TAG_JOURNAL } else { tag };
    if record.fingerprint.is_some() {
        flags |= FLAG_FINGERPRINT;
    }
    let provenance = &record.provenance;
    if !provenance.is_empty() {
        flags |= FLAG_PROVENANCE;
    }
    // The last 16 bytes hold the two times. The times stay 0 here, because the store sets them.
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(MAGIC);
    header[4..8].copy_from_slice(&[VERSION, letter(&record.state), flags, tag]);
    header[8..24].copy_from_slice(record.owner.as_bytes());
    header[24..28].copy_from_slice(&record.attempt.to_be_bytes());
    header[28..IDENTITY_END].copy_from_slice(&record.attempts_used.to_be_bytes());
    out.extend_from_slice(&header);
    // An optional part is written only if the header announces it.
    if let Some(fingerprint) = &record.fingerprint {
        out.extend_from_slice(fingerprint.as_bytes());
    }
    if let State::Pending { lease, ttl, .. } = &record.state {
        out.extend_from_slice(&millis(*lease).to_be_bytes());
        out.extend_from_slice(&millis(*ttl).to_be_bytes());
    }
    if flags & FLAG_PROVENANCE != 0 {
        provenance.write(out);
    }
    match &record.state {
        State::Completed(StoredResult::Encoded { codec, bytes })
        | State::Failed(StoredResult::Encoded { codec, bytes }) => {
            let name = codec.as_bytes();
            out.push(u8::try_from(name.len()).unwrap_or_default());
            out.extend_from_slice(name);
            out.extend_from_slice(bytes);
        }
        State::Completed(StoredResult::TooLarge { size }) | State::Failed(StoredResult::TooLarge { size }) => {
            out.extend_from_slice(&size.to_be_bytes());
        }
        _ => {
            if let Some(journal) = record.journal_in(&record.state) {
                out.extend_from_slice(journal.bytes());
            }
        }
    }
}

/// Returns the byte of `state` in a record.
pub(crate) fn letter(state: &State) -> u8 {
    match state {
        State::Pending { .. } => b'P',
        State::Released => b'R',
        State::Interrupted => b'I',
        State::Completed(_) => b'C',
        State::Failed(_) => b'F',
    }
}

fn tag(payload: &StoredResult) -> u8 {
    match payload {
        StoredResult::Encoded { .. } => 1,
        StoredResult::TooLarge { .. } => 2,
        // `Unreadable` and `LeftOut` are never written. They have the tag of unencodable results, so that a bug can't
        // create a result.
        StoredResult::Unencodable | StoredResult::Unreadable { .. } | StoredResult::LeftOut { .. } => 3,
    }
}

fn room(payload: &StoredResult) -> usize {
    match payload {
        StoredResult::Encoded { codec, bytes } => 1 + codec.as_bytes().len() + bytes.len(),
        StoredResult::TooLarge { .. } => 8,
        _ => 0,
    }
}

/// Reads a record that [`encode`] wrote. The result shares the memory of `value`.
///
/// # Errors
/// [`FormatError`] if the bytes are not exactly a record; a single additional byte is an error.
pub fn decode(value: &Bytes) -> Result<Record, FormatError> {
    check(value)?;
    let (mut record, payload_at) = read(value, None).ok_or(FormatError::Damaged)?;
    if let (Some(at), Some(payload)) = (payload_at, payload(&mut record)) {
        *payload = value.slice(at..);
    }
    Ok(record)
}

/// Decodes like [`decode`], but consumes `value`: the result takes over the memory of `value`, without another
/// reference count. From the provenance of a finished record only the trace is read, because a replay needs no more.
#[cfg(feature = "redis")]
pub(crate) fn decode_owned(mut value: Bytes) -> Result<Record, FormatError> {
    check(&value)?;
    let read = if matches!(value[5], b'C' | b'F') {
        read_with(&value, None, Provenance::read_trace)
    } else {
        read(&value, None)
    };
    let (mut record, payload_at) = read.ok_or(FormatError::Damaged)?;
    if let (Some(at), Some(payload)) = (payload_at, payload(&mut record)) {
        value.advance(at);
        *payload = value;
    }
    Ok(record)
}

/// Returns whether `value` is an unfinished record whose owner token is not `owner`.
#[cfg(feature = "redis")]
pub(crate) fn is_unfinished_of_another(value: &[u8], owner: OwnerToken) -> Result<bool, FormatError> {
    check(value)?;
    let (record, _) = read(value, None).ok_or(FormatError::Damaged)?;
    Ok(!record.is_finished() && record.owner != owner)
}

/// Returns the bytes of the result in a finished record, for the caller to fill in.
fn payload(record: &mut Record) -> Option<&mut Bytes> {
    match &mut record.state {
        State::Completed(StoredResult::Encoded { bytes, .. }) | State::Failed(StoredResult::Encoded { bytes, .. }) => {
            Some(bytes)
        }
        _ => None,
    }
}

/// Reads the first [`START_BYTES`] of a record whose full length is `len`. The result is [left
/// out](StoredResult::LeftOut).
///
/// # Errors
/// See [`decode`].
pub fn decode_start(value: &Bytes, len: usize) -> Result<Record, FormatError> {
    check(value)?;
    read(value, Some(len)).map(|(record, _)| record).ok_or(FormatError::Damaged)
}

/// Returns the time when the key of a record was first seen, and the time when its latest attempt began; `None` for a
/// time that is not written. The times are in milliseconds since 1970, by the store's clock or the holder's clock.
pub fn times(value: &Bytes) -> [Option<u64>; 2] {
    [32, 40].map(|at| {
        let bytes = value.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_be_bytes(bytes)).filter(|time| *time > 0)
    })
}

fn check(value: &[u8]) -> Result<(), FormatError> {
    if value.len() < IDENTITY_END || value[..4] != *MAGIC {
        return Err(FormatError::Foreign);
    }
    match value[4] {
        VERSION => {}
        0 => return Err(FormatError::Damaged),
        later => return Err(FormatError::LaterVersion(later)),
    }
    Ok(())
}

/// Reads the record in `value` without its result. Also returns the position of the result, if `value` contains a
/// stored result.
fn read(value: &[u8], len: Option<usize>) -> Option<(Record, Option<usize>)> {
    read_with(value, len, Provenance::read)
}

/// Function that reads a provenance, and returns the provenance with the bytes that follow it.
type ReadProvenance = fn(&[u8]) -> Option<(Provenance, &[u8])>;

/// Reads like `read`, but reads the provenance with `read_provenance`.
fn read_with(value: &[u8], len: Option<usize>, read_provenance: ReadProvenance) -> Option<(Record, Option<usize>)> {
    // Fixed part of the record.
    let mut rest = Reader(value);
    let [_, _, _, _, _, state, flags, tag] = rest.array()?;
    let owner = OwnerToken::from_bytes(rest.array()?);
    let attempt = u32::from_be_bytes(rest.array()?);
    let starts = u32::from_be_bytes(rest.array()?);
    let known = FLAG_WAITED_FOR | FLAG_ON_CRASH_FAIL | FLAG_FINGERPRINT | FLAG_PROVENANCE | FLAG_BEGUN;
    let _times: [u8; HEADER_BYTES - IDENTITY_END] = rest.array()?;
    // Parts that the flags and the state announce.
    let fingerprint = if flags & FLAG_FINGERPRINT == 0 { None } else { Some(Fingerprint::from_bytes(rest.array()?)) };
    let pending = matches!((state, tag), (b'P', 0 | TAG_JOURNAL));
    let [lease, ttl] = if pending { [rest.millis()?, rest.millis()?] } else { [Duration::ZERO; 2] };
    let provenance = if flags & FLAG_PROVENANCE == 0 {
        Provenance::NONE
    } else {
        let (provenance, after) = read_provenance(rest.0)?;
        rest.0 = after;
        provenance
    };
    // Journal: the rest of an unfinished record. A list, which reads the start of a record, leaves the journal out.
    let mut journal = None;
    if tag == TAG_JOURNAL && matches!(state, b'P' | b'R' | b'I') {
        let written = std::mem::take(&mut rest.0);
        if len.is_none() {
            journal = Some(Journal::new(Bytes::copy_from_slice(written))?);
        }
    }
    // Result: its position if `value` is the whole record, its size if `value` is only the start of the record.
    let left_out = len.map(|len| len.checked_sub(value.len() - rest.0.len())).map(Option::unwrap_or_default);
    let mut payload_at = None;
    let mut payload = |tag| {
        let payload = rest.payload(tag, left_out)?;
        if matches!(payload, StoredResult::Encoded { .. }) {
            payload_at = Some(value.len() - std::mem::take(&mut rest.0).len());
        }
        Some(payload)
    };
    let state = match (state, tag) {
        (b'P', 0 | TAG_JOURNAL) => State::Pending {
            lease,
            ttl,
            on_crash: if flags & FLAG_ON_CRASH_FAIL == 0 { OnCrash::Retry } else { OnCrash::Fail },
            begun: flags & FLAG_BEGUN != 0,
        },
        (b'R', 0 | TAG_JOURNAL) => State::Released,
        (b'I', 0 | TAG_JOURNAL) => State::Interrupted,
        (b'C', tag) => State::Completed(payload(tag)?),
        (b'F', tag) => State::Failed(payload(tag)?),
        _ => return None,
    };
    // Unknown flags, impossible counts of attempts and additional bytes are refused.
    let sound = attempt > 0 && starts <= attempt && flags & !known == 0 && rest.0.is_empty();
    let record = Record { owner, attempt, attempts_used: starts, fingerprint, state, provenance, journal };
    sound.then_some((record, payload_at))
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn millis(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(u64::from_be_bytes(self.array()?)))
    }

    /// Reads the head of the result, without the bytes of the result that follow. `left_out` is the number of bytes
    /// after the provenance, if the result is left out.
    fn payload(&mut self, tag: u8, left_out: Option<usize>) -> Option<StoredResult> {
        match tag {
            1 => {
                let [len] = self.array()?;
                let (name, rest) = self.0.split_at_checked(len.into())?;
                self.0 = rest;
                let codec = CodecName::new(name)?;
                if let Some(left_out) = left_out {
                    self.0 = &[];
                    let size = left_out.checked_sub(1 + name.len())? as u64;
                    return Some(StoredResult::LeftOut { codec, size: Some(size) });
                }
                Some(StoredResult::Encoded { codec, bytes: Bytes::new() })
            }
            2 => Some(StoredResult::TooLarge { size: u64::from_be_bytes(self.array()?) }),
            3 => Some(StoredResult::Unencodable),
            _ => None,
        }
    }
}
