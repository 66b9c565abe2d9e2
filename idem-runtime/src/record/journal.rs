//! Journals: the results of a handler's steps, kept in the record until the operation has finished.
//!
//! Bytes of a journal in version 1. Integers are big-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 1 | version of the journal: 1 |
//! | then, for each step | length of the name (2 bytes), name, number of the attempt (4 bytes), 1 if a fingerprint of the inputs follows, fingerprint |
//! | then | progress: 1 ended with a stored value, 2 ended with a value that is too large, 3 ended with a value that does not encode, 4 begun, 5 undone |
//! | then | stored: length of the codec's name (1 byte), name, length of the value (4 bytes), value; too large: size of the value (8 bytes) |
//!
//! A step may have several entries: the last one counts.

use std::fmt;
use std::sync::Arc;

use bytes::{Buf, Bytes};

use super::StoredResult;
use crate::codec::CodecName;
use crate::key::Fingerprint;

/// Version of the journals that this release writes.
const VERSION: u8 = 1;
const STORED: u8 = 1;
const TOO_LARGE: u8 = 2;
const UNENCODABLE: u8 = 3;
const BEGUN: u8 = 4;
const UNDONE: u8 = 5;
/// Longest name of a step, in bytes.
pub(crate) const MAX_STEP_NAME_BYTES: usize = 256;

/// Written form of a journal, as a store keeps it in the record of an unfinished operation.
///
/// A store compares only lengths: each journal of one attempt begins with the bytes of the journal before it, so the
/// longer of two journals is the later one. The engine reads the content.
// One pointer: a record without a journal, which is almost every record, is moved often.
#[derive(Clone, PartialEq, Eq)]
pub struct Journal(Arc<Bytes>);

impl Journal {
    /// Makes a journal of its written form; `None` if `bytes` is empty.
    pub fn new(bytes: impl Into<Bytes>) -> Option<Self> {
        let bytes = bytes.into();
        (!bytes.is_empty()).then(|| Self(Arc::new(bytes)))
    }

    /// Returns the written form.
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }

    /// Makes the journal that continues `earlier` with `entries`; `None` if it has no entry.
    pub(crate) fn continued<'a>(
        earlier: Option<&Self>,
        entries: impl Iterator<Item = &'a JournalEntry> + Clone,
    ) -> Option<Self> {
        let added: usize = entries.clone().map(JournalEntry::written_bytes).sum();
        if added == 0 {
            return earlier.cloned();
        }
        let mut written = Vec::with_capacity(earlier.map_or(1, |earlier| earlier.0.len()) + added);
        match earlier {
            Some(earlier) => written.extend_from_slice(earlier.bytes()),
            None => written.push(VERSION),
        }
        entries.for_each(|entry| entry.write(&mut written));
        Self::new(written)
    }

    /// Returns the later journal of `self` and `other`, two journals that one attempt has sent to the store.
    #[must_use]
    pub fn later(self, other: Self) -> Self {
        if other.0.len() > self.0.len() { other } else { self }
    }

    /// Reads the entries, in the order in which the steps ended.
    pub(crate) fn entries(&self) -> Result<Vec<JournalEntry>, JournalError> {
        let mut rest = self.0.slice(1..);
        match self.0[0] {
            VERSION => {}
            0 => return Err(JournalError::Damaged),
            later => return Err(JournalError::LaterVersion(later)),
        }
        let mut entries = Vec::new();
        while !rest.is_empty() {
            entries.push(JournalEntry::read(&mut rest).ok_or(JournalError::Damaged)?);
        }
        Ok(entries)
    }
}

/// Writes the size of a journal, never its content: payloads must not reach logs.
impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Journal({} bytes)", self.0.len())
    }
}

/// Reason why a journal can't be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum JournalError {
    /// A later release of this library wrote the journal.
    LaterVersion(u8),
    /// The journal is damaged.
    Damaged,
    /// The result was compressed by the wrapper `Compressed`, and so was a journal that is kept with the result. The
    /// store was read without this wrapper.
    Compressed,
    /// The result is in an object of the wrapper `Offloaded`, and so is a journal that is kept with the result. The
    /// store was read without this wrapper.
    Offloaded,
    /// The result can't be read, and so can't a journal that may be kept with the result.
    UnreadableResult,
}

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LaterVersion(version) => write!(
                f,
                "the journal has version {version}, and this release reads version {VERSION}; upgrade this process"
            ),
            Self::Damaged => f.write_str("the journal is damaged"),
            Self::Compressed => f.write_str(
                "the result is compressed, and any steps kept with it are not readable here; read the record through the \
                 wrapper `Compressed`",
            ),
            Self::Offloaded => f.write_str(
                "the result is in an object, and any steps kept with it are not readable here; read the record through the \
                 wrapper `Offloaded`",
            ),
            Self::UnreadableResult => {
                f.write_str("the result can't be read, and neither can any steps that are kept with it")
            }
        }
    }
}

impl std::error::Error for JournalError {}

/// Progress of one step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct JournalEntry {
    pub(crate) name: Arc<str>,
    /// Number of the attempt that ran the step.
    pub(crate) attempt: u32,
    /// Fingerprint of the inputs of the step, if it has one.
    pub(crate) inputs: Option<Fingerprint>,
    pub(crate) progress: StepProgress,
}

/// Progress of a step in an entry of a journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum StepProgress {
    /// The body of the step is about to run, and its effect is in doubt until a later entry.
    Begun,
    /// The body that had begun has had no effect, and the step may run again.
    Undone,
    /// The step has ended. Holds its value, or the reason why no value is stored.
    Ended(StoredResult),
}

impl JournalEntry {
    fn read(rest: &mut Bytes) -> Option<Self> {
        let length = rest.try_get_u16().ok()?.into();
        let name = taken(rest, length)?;
        let name = std::str::from_utf8(&name).ok()?.into();
        let attempt = rest.try_get_u32().ok()?;
        let inputs = match rest.try_get_u8().ok()? {
            0 => None,
            1 => Some(Fingerprint::from_bytes(taken(rest, Fingerprint::BYTES)?[..].try_into().ok()?)),
            _ => return None,
        };
        let progress = match rest.try_get_u8().ok()? {
            STORED => {
                let length = rest.try_get_u8().ok()?.into();
                let codec = CodecName::new(&taken(rest, length)?)?;
                let length = rest.try_get_u32().ok()?;
                let bytes = taken(rest, usize::try_from(length).ok()?)?;
                StepProgress::Ended(StoredResult::Encoded { codec, bytes })
            }
            TOO_LARGE => StepProgress::Ended(StoredResult::TooLarge { size: rest.try_get_u64().ok()? }),
            UNENCODABLE => StepProgress::Ended(StoredResult::Unencodable),
            BEGUN => StepProgress::Begun,
            UNDONE => StepProgress::Undone,
            _ => return None,
        };
        Some(Self { name, attempt, inputs, progress })
    }

    /// Returns the largest size of an entry without a value.
    pub(crate) fn bytes_without_value(name: &str) -> usize {
        2 + name.len() + 4 + 1 + Fingerprint::BYTES + 1 + 8
    }

    /// Returns the size of the entry in a journal, or up to 40 bytes more.
    pub(crate) fn written_bytes(&self) -> usize {
        let value = match &self.progress {
            StepProgress::Ended(StoredResult::Encoded { codec, bytes }) => 1 + codec.as_bytes().len() + 4 + bytes.len(),
            _ => 0,
        };
        Self::bytes_without_value(&self.name) + value
    }

    fn write(&self, out: &mut Vec<u8>) {
        let name = self.name.as_bytes();
        out.extend_from_slice(&u16::try_from(name.len()).unwrap_or_default().to_be_bytes());
        out.extend_from_slice(name);
        out.extend_from_slice(&self.attempt.to_be_bytes());
        match &self.inputs {
            None => out.push(0),
            Some(inputs) => {
                out.push(1);
                out.extend_from_slice(inputs.as_bytes());
            }
        }
        match &self.progress {
            StepProgress::Begun => out.push(BEGUN),
            StepProgress::Undone => out.push(UNDONE),
            StepProgress::Ended(StoredResult::Encoded { codec, bytes }) => {
                let codec = codec.as_bytes();
                out.extend_from_slice(&[STORED, u8::try_from(codec.len()).unwrap_or_default()]);
                out.extend_from_slice(codec);
                out.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or_default().to_be_bytes());
                out.extend_from_slice(bytes);
            }
            StepProgress::Ended(StoredResult::TooLarge { size }) => {
                out.push(TOO_LARGE);
                out.extend_from_slice(&size.to_be_bytes());
            }
            // `Unreadable` and `LeftOut` are never written.
            StepProgress::Ended(
                StoredResult::Unencodable | StoredResult::Unreadable { .. } | StoredResult::LeftOut { .. },
            ) => out.push(UNENCODABLE),
        }
    }
}

fn taken(rest: &mut Bytes, length: usize) -> Option<Bytes> {
    (length <= rest.len()).then(|| rest.split_to(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<JournalEntry> {
        let inputs = Some(Fingerprint::from_bytes([7; Fingerprint::BYTES]));
        let stored = StoredResult::Encoded { codec: CodecName::new(b"json").unwrap(), bytes: Bytes::from_static(b"1") };
        [
            (None, StepProgress::Ended(stored)),
            (inputs, StepProgress::Ended(StoredResult::TooLarge { size: 7 })),
            (None, StepProgress::Ended(StoredResult::Unencodable)),
            (inputs, StepProgress::Begun),
            (None, StepProgress::Undone),
        ]
        .into_iter()
        .enumerate()
        .map(|(at, (inputs, progress))| JournalEntry {
            name: format!("step {at}").into(),
            attempt: 3,
            inputs,
            progress,
        })
        .collect()
    }

    fn journal(entries: &[JournalEntry]) -> Journal {
        Journal::continued(None, entries.iter()).unwrap()
    }

    #[test]
    fn a_journal_is_read_back_as_written() {
        let entries = entries();
        assert_eq!(journal(&entries).entries(), Ok(entries.clone()));
        let first = journal(&entries[..1]);
        assert_eq!(Journal::continued(Some(&first), entries[1..].iter()), Some(journal(&entries)));
        assert_eq!(Journal::continued(Some(&first), [].iter()), Some(first));
        assert_eq!(Journal::continued(None, [].iter()), None);
    }

    #[test]
    fn a_journal_that_is_cut_or_altered_is_never_read_as_shorter() {
        let entries = entries();
        let whole = journal(&entries);
        let ends: Vec<_> = (0..=entries.len()).map(|n| journal_len(&entries[..n])).collect();
        for len in 1..whole.bytes().len() {
            // A journal that ends after a whole entry is a journal; a store compares the length of the record.
            let cut = Journal::new(whole.bytes().slice(..len)).unwrap();
            assert_eq!(cut.entries().is_ok(), ends.contains(&len), "{len}");
        }
        let later = Journal::new([&[2], &whole.bytes()[1..]].concat()).unwrap();
        assert_eq!(later.entries(), Err(JournalError::LaterVersion(2)));
        let zero = Journal::new(vec![0]).unwrap();
        assert_eq!(zero.entries(), Err(JournalError::Damaged));
    }

    fn journal_len(entries: &[JournalEntry]) -> usize {
        Journal::continued(None, entries.iter()).map_or(1, |journal| journal.bytes().len())
    }
}
