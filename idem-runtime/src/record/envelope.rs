//! The envelope: the form of a result that is stored in another form, or together with the journal or the messages of
//! its operation. The envelope with the messages is always the outer one.
//!
//! A record with an envelope names a codec that no handler has. So a consumer that does not know the envelope gets
//! `ResultProblem::OtherCodec`, and does not decode the envelope as a result. Version 1, integers big-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 0 | version: 1 |
//! | 1 | form: 0 unchanged, 1 a zstd frame, 2 in an object, 3 with a journal, 4 with messages |
//! | 2 | length of the codec's name |
//! | that length | the name of the codec that wrote the result |
//! | 8 | size of the result |
//! | rest | form 0: the result; 1: the result as one zstd frame with a checksum; 2: the SHA-256 of the result (32 bytes), then the path of the object; 3: the result, then the [journal](super::journal); 4: 0 and the result, 1 if the result is too large, or 2 if it does not encode, then the [messages](super::messages) |

use std::borrow::Cow;

use bytes::Bytes;

#[cfg(any(feature = "compressed", feature = "offloaded"))]
use super::Finish;
use super::messages::UnsentMessages;
use super::{Journal, JournalError, StoredResult};
use crate::codec::CodecName;

const VERSION: u8 = 1;

/// Codec name in a record that holds a result together with the journal of its operation.
const WITH_JOURNAL: CodecName = CodecName::new(b"idem:steps").expect("a valid name");

/// Codec name in a record that holds messages that are not marked as sent.
const WITH_MESSAGES: CodecName = CodecName::new(MESSAGES_CODEC.as_bytes()).expect("a valid name");

/// Name of that codec.
pub(crate) const MESSAGES_CODEC: &str = "idem:outbox";

/// Codec name in a record with a compressed result. A store without the wrapper reads this name, too.
pub(crate) const COMPRESSED: CodecName = CodecName::new(b"idem:zstd").expect("a valid name");

/// Codec name in a record whose result is in an object.
pub(crate) const OFFLOADED: CodecName = CodecName::new(b"idem:object").expect("a valid name");

/// First bytes of an envelope with messages, in hexadecimal digits: version and form.
#[cfg(feature = "postgres")]
pub(crate) const MESSAGES_START: &str = "0104";

/// First byte of the rest of an envelope with messages: the result is stored, too large, or does not encode.
const STORED: u8 = 0;
const TOO_LARGE: u8 = 1;
const UNENCODABLE: u8 = 2;

/// The form of a result in an envelope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Form {
    /// The unchanged result, in an envelope. This form is needed if the result has the codec name of the envelope (from
    /// a nested wrapper, for example): a reader would take such a result for an envelope.
    AsItWas = 0,
    #[cfg(feature = "compressed")]
    Zstd = 1,
    #[cfg(feature = "offloaded")]
    Object = 2,
    /// The unchanged result, and the journal that the policy of the steps keeps.
    WithJournal = 3,
    /// The result, or the reason why none is stored, and the messages of the operation.
    WithMessages = 4,
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
    3 + codec.as_bytes().len() + 8
}

/// Writes an envelope.
pub(crate) fn seal(form: Form, codec: &CodecName, size: u64, rest: &[&[u8]]) -> Bytes {
    let name = codec.as_bytes();
    let len = header_bytes(codec) + rest.iter().map(|part| part.len()).sum::<usize>();
    let mut out = Vec::with_capacity(len);
    out.extend_from_slice(&[VERSION, form as u8, u8::try_from(name.len()).unwrap_or_default()]);
    out.extend_from_slice(name);
    out.extend_from_slice(&size.to_be_bytes());
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
/// envelope, or is stored with messages.
#[cfg(any(feature = "compressed", feature = "offloaded"))]
pub(crate) fn concerns(finish: &Finish, envelope: CodecName, above: usize) -> bool {
    match finish.result() {
        StoredResult::Encoded { codec, bytes } => *codec == envelope || *codec == WITH_MESSAGES || bytes.len() > above,
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
                let bytes = seal(Form::WithJournal, codec, bytes.len() as u64, &[bytes, journal.bytes()]);
                Self::Encoded { codec: WITH_JOURNAL, bytes }
            }
            other => other.clone(),
        }
    }

    /// Returns the result alone, and the journal that is stored with it.
    pub(crate) fn parts(&self) -> (Cow<'_, Self>, Option<Journal>) {
        if !self.has_messages() {
            return self.without_journal();
        }
        let stored = self.without_messages();
        let (result, journal) = stored.without_journal();
        (Cow::Owned(result.into_owned()), journal)
    }

    fn without_journal(&self) -> (Cow<'_, Self>, Option<Journal>) {
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

    /// Returns the reason why a journal that may be stored with this result can't be read here: a wrapper has stored
    /// both in another form, or the result itself can't be read. `None` if no journal is hidden: the envelope of a
    /// wrapper names the codec of its content.
    pub(crate) fn hidden_journal(&self) -> Option<JournalError> {
        let (mut codec, mut bytes) = match self {
            Self::Encoded { codec, bytes } => (*codec, bytes.clone()),
            Self::Unreadable { .. } => return Some(JournalError::UnreadableResult),
            _ => return None,
        };
        loop {
            let hidden = match codec {
                COMPRESSED => JournalError::Compressed,
                OFFLOADED => JournalError::Offloaded,
                _ => return None,
            };
            let Ok(Envelope { form, codec: content, rest, .. }) = open(&bytes) else { return Some(hidden) };
            if form != Form::AsItWas as u8 {
                return [WITH_JOURNAL, COMPRESSED, OFFLOADED].contains(&content).then_some(hidden);
            }
            (codec, bytes) = (content, rest);
        }
    }

    /// Returns this result together with messages, as one stored value. A result that could not be stored is kept as
    /// that.
    pub(crate) fn with_messages(&self, messages: &UnsentMessages) -> Self {
        let (kind, codec, size, result): (_, _, _, &[u8]) = match self {
            Self::Encoded { codec, bytes } => (STORED, *codec, bytes.len() as u64, bytes),
            Self::TooLarge { size } => (TOO_LARGE, WITH_MESSAGES, *size, &[]),
            _ => (UNENCODABLE, WITH_MESSAGES, 0, &[]),
        };
        let bytes = seal(Form::WithMessages, &codec, size, &[&[kind], result, &messages.write()]);
        Self::Encoded { codec: WITH_MESSAGES, bytes }
    }

    /// Returns whether messages are stored with the result.
    #[inline]
    pub(crate) fn has_messages(&self) -> bool {
        matches!(self, Self::Encoded { codec: WITH_MESSAGES, .. } | Self::LeftOut { codec: WITH_MESSAGES, .. })
    }

    /// Returns the result without the messages that are stored with it.
    pub(crate) fn without_messages(&self) -> Cow<'_, Self> {
        match self.messages() {
            None => Cow::Borrowed(self),
            Some(Ok((result, _))) => Cow::Owned(result),
            Some(Err(reason)) => Cow::Owned(unreadable(reason)),
        }
    }

    /// Returns the result and the messages that are stored with it, or the reason why they can't be read; `None` if
    /// no messages are stored.
    pub(crate) fn messages(&self) -> Option<Result<(Self, UnsentMessages), String>> {
        let read = |(result, messages)| Ok((result, UnsentMessages::read(messages)?));
        self.around_messages().map(|parts| parts.and_then(read))
    }

    /// Returns the result that is stored with messages, if the result can be read.
    pub(crate) fn beside_messages(&self) -> Option<Self> {
        Some(self.around_messages()?.ok()?.0)
    }

    /// Returns the result that is stored with messages, and the written form of the messages.
    fn around_messages(&self) -> Option<Result<(Self, Bytes), String>> {
        let Self::Encoded { codec: WITH_MESSAGES, bytes } = self else { return None };
        let damaged = || "its envelope is damaged".to_owned();
        let read = || {
            let Envelope { form, codec, size, mut rest } = open(bytes)?;
            if form != Form::WithMessages as u8 || rest.is_empty() {
                return Err(damaged());
            }
            let result = match (rest.split_to(1)[0], usize::try_from(size)) {
                (STORED, Ok(size)) if size <= rest.len() => Self::Encoded { codec, bytes: rest.split_to(size) },
                (TOO_LARGE, _) => Self::TooLarge { size },
                (UNENCODABLE, _) => Self::Unencodable,
                _ => return Err(damaged()),
            };
            Ok((result, rest))
        };
        Some(read())
    }

    /// Parts the result from the messages that are stored with it, for a wrapper that stores the result in another
    /// form.
    #[cfg(any(feature = "compressed", feature = "offloaded"))]
    pub(crate) fn apart(&self) -> (Cow<'_, Self>, Option<UnsentMessages>) {
        match self.messages() {
            Some(Ok((result, messages))) => (Cow::Owned(result), Some(messages)),
            _ => (Cow::Borrowed(self), None),
        }
    }

    /// Joins what [`apart`](Self::apart) has parted.
    #[cfg(any(feature = "compressed", feature = "offloaded"))]
    pub(crate) fn together(self, messages: Option<&UnsentMessages>) -> Self {
        match messages {
            Some(messages) => self.with_messages(messages),
            None => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::messages::OutgoingMessage;
    use super::*;

    /// The statement of `PostgresStore` that removes messages relies on these bytes.
    #[cfg(feature = "postgres")]
    #[test]
    fn an_envelope_with_messages_has_the_form_that_statements_expect() {
        let codec = CodecName::new(b"json").unwrap();
        let result = StoredResult::Encoded { codec, bytes: Bytes::from_static(b"{}") };
        let message = OutgoingMessage::new(b"hello".to_vec()).addressed("orders", "an id");
        let messages = UnsentMessages::pushed(&[message]).unwrap();
        let StoredResult::Encoded { codec, bytes } = result.with_messages(&messages) else { panic!("not stored") };
        let start = format!("{:02x}{:02x}", bytes[0], bytes[1]);
        assert_eq!((codec.as_str(), &*start), (MESSAGES_CODEC, MESSAGES_START));
        assert_eq!(bytes[..18], *b"\x01\x04\x04json\0\0\0\0\0\0\0\x02\0{}");
    }

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
    fn a_result_and_its_messages_are_read_back() {
        let codec = CodecName::new(b"json").unwrap();
        let result = StoredResult::Encoded { codec, bytes: Bytes::from_static(b"{}") };
        let message = OutgoingMessage::new("paid").addressed("orders", "id".to_owned());
        let messages = UnsentMessages::pushed(&[message]).unwrap();
        let journal = Journal::new(vec![1, 2, 3]).unwrap();
        for inner in [
            result.clone(),
            result.with_journal(&journal),
            StoredResult::TooLarge { size: 1 << 40 },
            StoredResult::Unencodable,
        ] {
            let stored = inner.with_messages(&messages);
            assert!(stored.has_messages() && !inner.has_messages());
            assert_eq!(stored.messages(), Some(Ok((inner.clone(), messages.clone()))));
            assert_eq!(stored.parts(), inner.parts());
            let StoredResult::Encoded { codec, bytes } = stored else { panic!("a stored value has a codec") };
            for cut in 0..bytes.len() {
                let stored = StoredResult::Encoded { codec, bytes: bytes.slice(..cut) };
                assert!(matches!(*stored.parts().0, StoredResult::Unreadable { .. }), "{cut}");
            }
        }
        assert_eq!(result.messages(), None);
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
