//! Encoding of results as bytes, and decoding.

pub(crate) mod bytes;
#[cfg(any(feature = "msgpack", feature = "postcard"))]
mod guard;
mod known;
#[cfg(feature = "msgpack")]
mod msgpack;
#[cfg(feature = "postcard")]
mod postcard;
mod problem;
#[cfg(any(feature = "msgpack", feature = "postcard"))]
mod shape;
#[cfg(feature = "postcard")]
mod strict;
mod trace;
mod undecodable;

use std::any::TypeId;
use std::cell::Cell;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

#[cfg(feature = "msgpack")]
pub use self::msgpack::MessagePack;
#[cfg(feature = "postcard")]
pub use self::postcard::Postcard;
pub use self::problem::ResultProblem;
use self::trace::Trace;
pub use self::undecodable::Undecodable;

/// Reason why a result could not be encoded or decoded.
pub type CodecError = Box<dyn std::error::Error + Send + Sync>;

/// Encoding of results in records.
///
/// A record carries the name of its codec, and this name includes the version of the written form. The first version
/// has no number, as in `json`; a second version would be `json2`. Change [`Codec::NAME`] whenever the written form
/// changes, so that a new version of the codec does not misread the records of an old version. The library reserves
/// `json`, `msgpack`, `postcard`, `bytes`, and these names with a number.
///
/// A handler with one of the library's codecs also reads results that another codec of the library wrote, if the
/// feature of that codec is enabled. So you can change the codec while records exist. For other changes, use
/// [`OnUndecodable`](crate::OnUndecodable).
///
/// ```
/// use idem_runtime::{Codec, CodecError, Json};
/// use serde::{Serialize, de::DeserializeOwned};
///
/// /// JSON with line breaks, for people who read their store by hand.
/// struct PrettyJson;
///
/// impl Codec for PrettyJson {
///     const NAME: &'static str = "pretty-json";
///
///     fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
///         serde_json::to_vec_pretty(value).map_err(Into::into)
///     }
///
///     fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
///         Json::decode(bytes)
///     }
/// }
/// ```
pub trait Codec: 'static {
    /// Name of the written form in records: 1 to 15 bytes of ASCII, the same in every release.
    const NAME: &'static str;

    /// True if handlers with this codec also decode results of [`Json`] and the library's other codecs.
    ///
    /// Write `true` if a codec of the library may have written earlier results. A codec that encrypts or signs must
    /// keep `false`: otherwise every program that can write to the store could forge a result.
    const READS_OTHERS: bool = false;

    /// Writes `value`.
    ///
    /// # Errors
    /// [`CodecError`] if the value can't be encoded. The completion is then recorded without its result.
    fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError>;

    /// Reads bytes that [`encode`](Codec::encode) wrote.
    ///
    /// # Errors
    /// [`CodecError`] if the bytes don't decode as a `T`. The caller then gets `Error::ResultUnavailable`, and the body
    /// does not run again.
    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError>;
}

/// Writes `value` as a handler with the codec `C` records it. Returns the bytes and the name of the codec that wrote
/// them.
///
/// # Errors
/// Error of the codec.
pub(crate) fn write<C: Codec, T: Serialize>(value: &T) -> Result<(CodecName, Vec<u8>), CodecError> {
    // Only a result of a handler with `Json` is recorded as plain bytes. A user's own codec may encrypt, so no result
    // of its handlers may bypass the codec.
    if TypeId::of::<C>() == TypeId::of::<Json>()
        && let Some(bytes) = bytes::of(value)
    {
        return Ok((bytes::NAME, bytes));
    }
    Ok((CodecName::of::<C>(), C::encode(value)?))
}

/// Reads bytes that the codec `name` wrote, for a handler with the codec `C`. Returns `None` if a handler with `C`
/// can't read results of the codec `name`.
pub(crate) fn read<C: Codec, T: DeserializeOwned>(name: CodecName, bytes: &[u8]) -> Option<Result<T, CodecError>> {
    match name == CodecName::of::<C>() {
        true => Some(C::decode(bytes)),
        false if C::READS_OTHERS => known::decode(name, bytes),
        false => None,
    }
}

/// Checks that a duplicate gets the same `value` as the first caller. Writes the value as a handler with the codec `C`
/// records it, reads it back, and compares the two values.
///
/// Use this check in tests of your own result types. Debug builds, and all builds with the feature `testing`, make the
/// same check after a handler has recorded its result.
///
/// The check compares both values in the data model of serde. `Some(None)` and `None` differ, integers of different
/// widths differ, and so do NaNs with different bits. The check ignores the order of elements and entries. The check
/// also ignores data that the type hides from serde: a field with `#[serde(skip)]`, or a field that `serialize_with`
/// cuts short.
///
/// ```
/// use idem_runtime::codec::check_round_trip;
/// use idem_runtime::Json;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Receipt {
///     note: Option<Option<String>>,
/// }
///
/// check_round_trip::<Json, _>(&Receipt { note: None })?;
/// let lost = check_round_trip::<Json, _>(&Receipt { note: Some(None) }).unwrap_err();
/// assert!(lost.to_string().ends_with("than it wrote: `note`: `Some` is read back as `None`"));
/// # Ok::<(), idem_runtime::codec::RoundTripError>(())
/// ```
///
/// # Errors
/// [`RoundTripError`] if the value can't be written or read, or if it is read back as another value.
pub fn check_round_trip<C: Codec, T: Serialize + DeserializeOwned>(value: &T) -> Result<(), RoundTripError> {
    let failed = RoundTripError::new::<C, T>;
    let (name, bytes) = write::<C, T>(value).map_err(|source| failed(RoundTripProblem::Unencodable(source)))?;
    let read = read::<C, T>(name, &bytes).unwrap_or_else(|| C::decode(&bytes));
    let read = read.map_err(|source| failed(RoundTripProblem::Undecodable(source)))?;
    let (Ok(trace), Ok(read)) = (Trace::of(value), Trace::of(&read)) else { return Ok(()) };
    match trace.difference(&read) {
        // A value that serializes differently each time can't be compared, so no difference is reported.
        Some(difference) if Trace::of(value).is_ok_and(|again| again == trace) => {
            Err(failed(RoundTripProblem::Differs(difference)))
        }
        _ => Ok(()),
    }
}

/// Error for a value that is not read back as it was written. The text of this error names the codec, the type and the
/// field, and quotes no value. If the codec is your own, the text of the error's source may quote the value.
#[derive(Debug)]
pub struct RoundTripError {
    codec: &'static str,
    type_name: &'static str,
    problem: RoundTripProblem,
}

#[derive(Debug)]
enum RoundTripProblem {
    Unencodable(CodecError),
    Undecodable(CodecError),
    Differs(String),
}

impl RoundTripError {
    fn new<C: Codec, T>(problem: RoundTripProblem) -> Self {
        Self { codec: C::NAME, type_name: std::any::type_name::<T>(), problem }
    }

    /// Returns true if the value can't be written or read: a duplicate gets
    /// [`Error::ResultUnavailable`](crate::Error::ResultUnavailable). Returns false if the value is read back as
    /// another value: the duplicate gets this other value.
    pub const fn is_unavailable(&self) -> bool {
        matches!(self.problem, RoundTripProblem::Unencodable(_) | RoundTripProblem::Undecodable(_))
    }
}

impl fmt::Display for RoundTripError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { codec, type_name, problem } = self;
        match problem {
            RoundTripProblem::Unencodable(_) => write!(f, "the codec `{codec}` can't write this `{type_name}`"),
            RoundTripProblem::Undecodable(_) => write!(f, "the codec `{codec}` can't read back this `{type_name}`"),
            RoundTripProblem::Differs(difference) => {
                write!(f, "the codec `{codec}` reads another `{type_name}` than it wrote: {difference}")
            }
        }
    }
}

impl std::error::Error for RoundTripError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.problem {
            RoundTripProblem::Unencodable(source) | RoundTripProblem::Undecodable(source) => Some(&**source),
            RoundTripProblem::Differs(_) => None,
        }
    }
}

thread_local! {
    /// Buffer that all JSON encodings on this thread reuse. The bytes of a result are copied out of the buffer in their
    /// exact length, because a `Vec` that grew has spare capacity.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Length in bytes of the longest result that is copied out of the reused buffer. A longer result takes the buffer
/// itself, and the next result starts with a new buffer.
const LONGEST_BUFFER: usize = 16 * 1024;

/// JSON by `serde_json`, the default codec: readable, and tolerant of changes of the type.
///
/// Old records stay readable if a field is added with `#[serde(default)]`, made an `Option`, or removed.
///
/// Limits: keys of maps must be strings, numbers, or unit variants; otherwise the result does not encode. `Some(())`
/// and `Some(None)` are read back as `None`. An infinite float or NaN is written as `null`, and is read back as `None`
/// or not at all. A value that is nested more than 127 levels deep is written, but can't be read.
///
/// # Bytes
///
/// JSON has no type for bytes, and an array of numbers is three to four times as long. So a result that consists only
/// of bytes (a `Vec<u8>` or a `Bytes`, also inside of an `Option` or a newtype) is recorded as plain bytes, with
/// `bytes` as the name of the codec. Every type that could read the array can read the bytes, so the return type may
/// change as under JSON.
///
/// JSON writes bytes *inside of* a value as an array of numbers. `Postcard` writes all such bytes as bytes.
/// `MessagePack` writes them as bytes if their type uses the bytes of serde: a `Bytes`, or a `Vec<u8>` under
/// `#[serde(with = "serde_bytes")]`.
///
/// [`Json::encode`](Codec::encode) itself always writes JSON.
#[derive(Clone, Copy, Debug, Default)]
pub struct Json;

impl Codec for Json {
    const NAME: &'static str = "json";
    const READS_OTHERS: bool = true;

    fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
        let mut buffer = BUFFER.take();
        buffer.clear();
        serde_json::to_writer(&mut buffer, value)?;
        if buffer.len() > LONGEST_BUFFER {
            return Ok(buffer);
        }
        let bytes = buffer.as_slice().to_vec();
        BUFFER.set(buffer);
        Ok(bytes)
    }

    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
        serde_json::from_str(text(bytes)?).map_err(|error| place_of(&error).into())
    }
}

/// Returns JSON as text: one check of the whole costs less than a check of each string in it. Has no type parameter, so
/// that it is not compiled again for each type of result.
fn text(bytes: &[u8]) -> Result<&str, CodecError> {
    std::str::from_utf8(bytes).map_err(|error| {
        let mut lines = bytes[..error.valid_up_to()].split(|byte| *byte == b'\n');
        place("it is not JSON", lines.clone().count(), 1 + lines.next_back().map_or(0, <[u8]>::len)).into()
    })
}

/// Describes where and why decoding failed. Leaves out the text of `serde_json`'s error, because this text quotes the
/// result, and results must not reach logs.
fn place_of(error: &serde_json::Error) -> String {
    let problem = match error.classify() {
        serde_json::error::Category::Data => "a value does not fit its type",
        serde_json::error::Category::Eof => "the JSON ends early",
        _ => "it is not JSON",
    };
    place(problem, error.line(), error.column())
}

fn place(problem: &str, line: usize, column: usize) -> String {
    format!("{problem}, at line {line} column {column}")
}

/// Name of a [`Codec`] as a record stores it, without an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodecName {
    len: u8,
    bytes: [u8; Self::MAX_BYTES],
}

impl CodecName {
    /// Length of the longest name, in bytes.
    pub const MAX_BYTES: usize = 15;

    /// Returns the name of `C`. An invalid name is a compile error where the codec is used.
    pub const fn of<C: Codec>() -> Self {
        const {
            match Self::new(C::NAME.as_bytes()) {
                Some(name) => name,
                None => panic!("`Codec::NAME` must have 1 to 15 bytes of ASCII"),
            }
        }
    }

    /// Makes a name from bytes; `None` if the bytes are not a valid name.
    pub const fn new(name: &[u8]) -> Option<Self> {
        if name.is_empty() || name.len() > Self::MAX_BYTES || !name.is_ascii() {
            return None;
        }
        let mut bytes = [0; Self::MAX_BYTES];
        let mut at = 0;
        while at < name.len() {
            bytes[at] = name[at];
            at += 1;
        }
        #[allow(clippy::cast_possible_truncation)] // At most 15, as checked above.
        Some(Self { len: name.len() as u8, bytes })
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for CodecName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_codec_names_are_refused() {
        assert_eq!(CodecName::of::<Json>().as_str(), "json");
        assert_eq!(CodecName::new(b""), None);
        assert_eq!(CodecName::new(b"sixteen-bytes-xx"), None);
        assert_eq!(CodecName::new("é".as_bytes()), None);
    }

    #[test]
    fn the_error_of_an_undecodable_result_does_not_quote_it() {
        let error = Json::decode::<u32>(br#""4111 1111""#).unwrap_err();
        assert_eq!(error.to_string(), "a value does not fit its type, at line 1 column 11");
        let error = Json::decode::<Vec<String>>(b"[\"4111\",\n\"1\xff1\"]").unwrap_err();
        assert_eq!(error.to_string(), "it is not JSON, at line 2 column 3");
    }

    #[test]
    fn json_reads_back_empty_and_zero_results_as_written() {
        fn there_and_back<T: Serialize + DeserializeOwned + PartialEq + fmt::Debug>(value: &T) {
            assert_eq!(Json::decode::<T>(&Json::encode(value).unwrap()).unwrap(), *value);
        }
        there_and_back(&());
        there_and_back(&0);
        there_and_back(&false);
        there_and_back(&String::new());
        there_and_back(&Vec::<u8>::new());
        there_and_back(&None::<u8>);
    }
}
