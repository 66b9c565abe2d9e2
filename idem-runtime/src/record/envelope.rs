//! The envelope: the form of a result that is stored in another form, or together with the journal of its operation.
//!
//! A record with an envelope names a codec that no handler has. So a consumer that does not know the envelope gets
//! `ResultProblem::OtherCodec`, and does not decode the envelope as a result. Version 1, integers big-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 0 | version: 1 |
//! | 1 | form: 0 unchanged, 1 a zstd frame, 2 in an object, 3 with a journal |
//! | 2 | length of the codec's name |
//! | that length | the name of the codec that wrote the result |
//! | 8 | size of the result |
//! | rest | form 0: the result; 1: the result as one zstd frame with a checksum; 2: the SHA-256 of the result (32 bytes), then the path of the object; 3: the result, then the [journal](super::journal) |

use std::borrow::Cow;

use bytes::Bytes;

#[cfg(any(feature = "compressed", feature = "offloaded"))]
use super::Finish;
use super::{Journal, StoredResult};
use crate::codec::CodecName;

const VERSION: u8 = 1;

/// Codec name in a record that holds a result together with the journal of its operation.
const WITH_JOURNAL: CodecName = CodecName::new(b"idem:steps").expect("a valid name");

/// The form of a result in an envelope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Form {
    /// The unchanged result, in an envelope. This form is needed if the result has the codec name of the envelope (from
    /// a nested wrapper, for example): a reader would take such a result for an envelope.
    #[cfg(any(feature = "compressed", feature = "offloaded"))]
    AsItWas = 0,
    #[cfg(feature = "compressed")]
    Zstd = 1,
    #[cfg(feature = "offloaded")]
    Object = 2,
    /// The unchanged result, and the journal that the policy of the steps keeps.
    WithJournal = 3,
}

/// A decoded envelope.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Envelope {
    /// Number of the [`Form`]. An envelope with an unknown number is read as damaged.
    pub(crate) form: u8,
    /// The codec that wrote the result.
    pub(crate) codec: CodecName,
    /// The size of the result.
    pub(crate) size: u64,
    pub(crate) rest: Bytes,
}

/// Returns the size of the envelope's header, in bytes.
pub(crate) fn header_bytes(codec: &CodecName) -> usize {
    3 + codec.as_str().len() + 8
}

/// Writes an envelope.
pub(crate) fn seal(form: Form, codec: &CodecName, size: usize, rest: &[&[u8]]) -> Bytes {
    let name = codec.as_str().as_bytes();
    let len = header_bytes(codec) + rest.iter().map(|part| part.len()).sum::<usize>();
    let mut out = Vec::with_capacity(len);
    out.extend_from_slice(&[VERSION, form as u8, u8::try_from(name.len()).unwrap_or_default()]);
    out.extend_from_slice(name);
    out.extend_from_slice(&(size as u64).to_be_bytes());
    for part in rest {
        out.extend_from_slice(part);
    }
    out.into()
}

/// Decodes an envelope. The error is the reason why the envelope can't be read.
pub(crate) fn open(bytes: &Bytes) -> Result<Envelope, String> {
    if let Some(later @ VERSION..) = bytes.first()
        && *later != VERSION
    {
        return Err(format!("its envelope has version {later}, this release reads up to {VERSION}"));
    }
    read(bytes).ok_or_else(|| "its envelope is damaged".to_owned())
}

fn read(bytes: &Bytes) -> Option<Envelope> {
    let mut rest = bytes.clone();
    let mut take = |len: usize| (rest.len() >= len).then(|| rest.split_to(len));
    let [VERSION, form, len] = take(3)?[..] else { return None };
    let codec = CodecName::new(&take(usize::from(len))?)?;
    let size = u64::from_be_bytes(take(8)?[..].try_into().ok()?);
    Some(Envelope { form, codec, size, rest })
}

/// Returns whether `finish` may need an envelope: its result has more than `above` bytes, or has the codec name of the
/// envelope.
#[cfg(any(feature = "compressed", feature = "offloaded"))]
pub(crate) fn concerns(finish: &Finish, envelope: CodecName, above: usize) -> bool {
    match finish.result() {
        StoredResult::Encoded { codec, bytes } => *codec == envelope || bytes.len() > above,
        _ => false,
    }
}

/// Returns the payload of a record whose result can't be read, with the reason.
pub(crate) fn unreadable(reason: impl Into<std::sync::Arc<str>>) -> StoredResult {
    StoredResult::Unreadable { reason: reason.into() }
}

impl StoredResult {
    /// Returns this result together with the journal of its operation, as one stored value. A result that is not stored
    /// keeps no journal.
    pub(crate) fn with_journal(&self, journal: &Journal) -> Self {
        match self {
            Self::Encoded { codec, bytes } => {
                let bytes = seal(Form::WithJournal, codec, bytes.len(), &[bytes, journal.bytes()]);
                Self::Encoded { codec: WITH_JOURNAL, bytes }
            }
            other => other.clone(),
        }
    }

    /// Returns the result alone, and the journal that is stored with it.
    pub(crate) fn parts(&self) -> (Cow<'_, Self>, Option<Journal>) {
        let Self::Encoded { codec: WITH_JOURNAL, bytes } = self else { return (Cow::Borrowed(self), None) };
        let Envelope { form, codec, size, mut rest } = match open(bytes) {
            Ok(envelope) => envelope,
            Err(reason) => return (Cow::Owned(unreadable(reason)), None),
        };
        match usize::try_from(size) {
            Ok(size) if form == Form::WithJournal as u8 && size <= rest.len() => {
                let bytes = rest.split_to(size);
                (Cow::Owned(Self::Encoded { codec, bytes }), Journal::new(rest))
            }
            _ => (Cow::Owned(unreadable("its envelope is damaged")), None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_and_its_journal_are_read_back() {
        let codec = CodecName::new(b"json").unwrap();
        let result = StoredResult::Encoded { codec, bytes: Bytes::from_static(b"{}") };
        let journal = Journal::new(vec![1, 2, 3]).unwrap();
        let stored = result.with_journal(&journal);
        assert_eq!(stored.parts(), (Cow::Borrowed(&result), Some(journal.clone())));
        assert_eq!(result.parts(), (Cow::Borrowed(&result), None));
        assert_eq!(StoredResult::Unencodable.with_journal(&journal), StoredResult::Unencodable);
    }

    #[test]
    fn a_damaged_envelope_is_no_result() {
        let codec = CodecName::new(b"json").unwrap();
        let result = StoredResult::Encoded { codec, bytes: Bytes::from_static(b"{\"total\":1}") };
        let StoredResult::Encoded { codec, bytes } = result.with_journal(&Journal::new(vec![1]).unwrap()) else {
            panic!("a stored result has a codec")
        };
        for cut in 0..bytes.len() - 1 {
            let stored = StoredResult::Encoded { codec, bytes: bytes.slice(..cut) };
            assert!(matches!(*stored.parts().0, StoredResult::Unreadable { .. }), "{cut}");
        }
        let mut other_form = bytes.to_vec();
        other_form[1] = 0;
        let stored = StoredResult::Encoded { codec, bytes: other_form.into() };
        assert!(matches!(*stored.parts().0, StoredResult::Unreadable { .. }));
    }
}
