//! The envelope: the form in which [`Compressed`](crate::Compressed) and [`Offloaded`](crate::Offloaded) write a result
//! that they changed.
//!
//! A record with an envelope names a codec that no handler has. So a consumer without the wrapper gets
//! `ResultProblem::OtherCodec`, and does not decode the envelope as a result. Version 1, integers big-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 0 | version: 1 |
//! | 1 | form: 0 unchanged, 1 a zstd frame, 2 in an object |
//! | 2 | length of the codec's name |
//! | that length | the name of the codec that wrote the result |
//! | 8 | size of the result |
//! | rest | form 0: the result; 1: the result as one zstd frame with a checksum; 2: the SHA-256 of the result (32 bytes), then the path of the object |

use bytes::Bytes;

use crate::codec::CodecName;
use crate::record::{Finish, Record, State, StoredResult};

const VERSION: u8 = 1;

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
pub(crate) fn concerns(finish: &Finish, envelope: CodecName, above: usize) -> bool {
    match finish.result() {
        StoredResult::Encoded { codec, bytes } => *codec == envelope || bytes.len() > above,
        _ => false,
    }
}

/// Returns `finish` with `payload` in place of its result.
pub(crate) fn replaced(finish: &Finish, payload: StoredResult) -> Finish {
    match finish {
        Finish::Completed(_) => Finish::Completed(payload),
        Finish::Failed(_) => Finish::Failed(payload),
    }
}

/// Returns the payload of a finished record.
pub(crate) fn payload_of(record: &mut Record) -> Option<&mut StoredResult> {
    match &mut record.state {
        State::Completed(payload) | State::Failed(payload) => Some(payload),
        _ => None,
    }
}

/// Returns the payload of a record whose result can't be read, with the reason.
pub(crate) fn unreadable(reason: impl Into<std::sync::Arc<str>>) -> StoredResult {
    StoredResult::Unreadable { reason: reason.into() }
}
