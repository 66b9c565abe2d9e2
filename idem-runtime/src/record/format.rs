//! The bytes of a record, version 1, for stores that keep records as one value. Integers are big-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0–3 | `idem` |
//! | 4 | version of the format: 1 |
//! | 5 | state: `P`ending, `R`eleased, `I`nterrupted, `C`ompleted, `F`ailed |
//! | 6 | flags: 1 somebody waits for this record, 2 `on_crash = fail`, 4 has a fingerprint |
//! | 7 | payload: 0 none, 1 stored, 2 too large, 3 unencodable |
//! | 8–23 | owner token |
//! | 24–27 | attempt |
//! | 28–31 | starts |
//! | 32–63 | fingerprint, if there is one |
//! | rest | pending: lease and ttl, milliseconds, 8 bytes each; stored: length of the codec's name (1 byte), name, result; too large: size of the result, 8 bytes |

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::{OwnerToken, Record, State, StoredResult};
use crate::codec::CodecName;
use crate::key::Fingerprint;
use crate::policy::OnCrash;

/// The first bytes of every record.
pub const MAGIC: &[u8; 4] = b"idem";
/// The version that is written.
pub const VERSION: u8 = 1;
/// How many bytes every record has at least.
pub const HEADER_BYTES: usize = 32;
/// Where the flags are.
pub const FLAGS_AT: usize = 6;
/// The flag that a waiting duplicate sets on a pending record, so that the write that ends it wakes the waiter.
pub const FLAG_WAITED_FOR: u8 = 1;
const FLAG_ON_CRASH_FAIL: u8 = 2;
const FLAG_FINGERPRINT: u8 = 4;

/// Bytes that are not a record of this version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FormatError {
    /// Something else wrote the value.
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

/// Milliseconds, rounded up: a lease is never cut short by its written form.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Writes `record`.
pub fn encode(record: &Record) -> Vec<u8> {
    let (mut flags, tag, room) = match &record.state {
        State::Pending { on_crash: OnCrash::Retry, .. } => (0, 0, 16),
        State::Pending { .. } => (FLAG_ON_CRASH_FAIL, 0, 16),
        State::Released | State::Interrupted => (0, 0, 0),
        State::Completed(payload) | State::Failed(payload) => (0, tag(payload), room(payload)),
    };
    if record.fingerprint.is_some() {
        flags |= FLAG_FINGERPRINT;
    }
    let mut out = Vec::with_capacity(HEADER_BYTES + Fingerprint::BYTES + room);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[VERSION, record.state.letter().as_bytes()[0], flags, tag]);
    out.extend_from_slice(record.owner.as_bytes());
    out.extend_from_slice(&record.attempt.to_be_bytes());
    out.extend_from_slice(&record.attempts_used.to_be_bytes());
    if let Some(fingerprint) = &record.fingerprint {
        out.extend_from_slice(fingerprint.as_bytes());
    }
    match &record.state {
        State::Pending { lease, ttl, .. } => {
            out.extend_from_slice(&millis(*lease).to_be_bytes());
            out.extend_from_slice(&millis(*ttl).to_be_bytes());
        }
        State::Completed(StoredResult::Encoded { codec, bytes })
        | State::Failed(StoredResult::Encoded { codec, bytes }) => {
            let name = codec.as_str().as_bytes();
            out.push(u8::try_from(name.len()).unwrap_or_default());
            out.extend_from_slice(name);
            out.extend_from_slice(bytes);
        }
        State::Completed(StoredResult::TooLarge { size }) | State::Failed(StoredResult::TooLarge { size }) => {
            out.extend_from_slice(&size.to_be_bytes());
        }
        _ => {}
    }
    out
}

fn tag(payload: &StoredResult) -> u8 {
    match payload {
        StoredResult::Encoded { .. } => 1,
        StoredResult::TooLarge { .. } => 2,
        // Nobody writes what could not be read; if somebody did, it would stay unavailable.
        StoredResult::Unencodable | StoredResult::Unreadable { .. } => 3,
    }
}

fn room(payload: &StoredResult) -> usize {
    match payload {
        StoredResult::Encoded { bytes, .. } => 1 + CodecName::MAX_BYTES + bytes.len(),
        _ => 8,
    }
}

/// Reads what [`encode`] wrote; the result shares the memory of `value`.
///
/// # Errors
/// [`FormatError`] for everything else, down to a single byte too many.
pub fn decode(value: &Bytes) -> Result<Record, FormatError> {
    if value.len() < HEADER_BYTES || value[..4] != *MAGIC {
        return Err(FormatError::Foreign);
    }
    match value[4] {
        VERSION => {}
        0 => return Err(FormatError::Damaged),
        later => return Err(FormatError::LaterVersion(later)),
    }
    read(value).ok_or(FormatError::Damaged)
}

fn read(value: &Bytes) -> Option<Record> {
    let mut rest = Reader(value.clone());
    let [_, _, _, _, _, state, flags, tag] = rest.array()?;
    let owner = OwnerToken::from_bytes(rest.array()?);
    let attempt = u32::from_be_bytes(rest.array()?);
    let starts = u32::from_be_bytes(rest.array()?);
    let known = FLAG_WAITED_FOR | FLAG_ON_CRASH_FAIL | FLAG_FINGERPRINT;
    let fingerprint = if flags & FLAG_FINGERPRINT == 0 { None } else { Some(Fingerprint::from_bytes(rest.array()?)) };
    let state = match (state, tag) {
        (b'P', 0) => State::Pending {
            lease: Duration::from_millis(u64::from_be_bytes(rest.array()?)),
            ttl: Duration::from_millis(u64::from_be_bytes(rest.array()?)),
            on_crash: if flags & FLAG_ON_CRASH_FAIL == 0 { OnCrash::Retry } else { OnCrash::Fail },
        },
        (b'R', 0) => State::Released,
        (b'I', 0) => State::Interrupted,
        (b'C', tag) => State::Completed(rest.payload(tag)?),
        (b'F', tag) => State::Failed(rest.payload(tag)?),
        _ => return None,
    };
    let sound = attempt > 0 && starts <= attempt && flags & !known == 0 && rest.0.is_empty();
    sound.then_some(Record { owner, attempt, attempts_used: starts, fingerprint, state })
}

struct Reader(Bytes);

impl Reader {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = (self.0.len() >= N).then(|| self.0.split_to(N))?;
        bytes.as_ref().try_into().ok()
    }

    fn payload(&mut self, tag: u8) -> Option<StoredResult> {
        match tag {
            1 => {
                let [len] = self.array()?;
                let name = (self.0.len() >= usize::from(len)).then(|| self.0.split_to(usize::from(len)))?;
                let codec = CodecName::new(&name)?;
                Some(StoredResult::Encoded { codec, bytes: std::mem::take(&mut self.0) })
            }
            2 => Some(StoredResult::TooLarge { size: u64::from_be_bytes(self.array()?) }),
            3 => Some(StoredResult::Unencodable),
            _ => None,
        }
    }
}
