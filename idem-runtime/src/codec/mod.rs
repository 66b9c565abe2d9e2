//! Results to bytes and back.

#[cfg(any(feature = "msgpack", feature = "postcard"))]
mod guard;
pub(crate) mod known;
#[cfg(feature = "msgpack")]
mod msgpack;
#[cfg(feature = "postcard")]
mod postcard;
mod problem;
#[cfg(feature = "postcard")]
mod strict;
mod undecodable;

use std::cell::Cell;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

#[cfg(feature = "msgpack")]
pub use self::msgpack::MessagePack;
#[cfg(feature = "postcard")]
pub use self::postcard::Postcard;
pub use self::problem::ResultProblem;
pub use self::undecodable::Undecodable;

/// A result that could not be encoded or decoded.
pub type CodecError = Box<dyn std::error::Error + Send + Sync>;

/// How results are written into records.
///
/// A record carries the name of its codec, and the version of the written form is part of that name: the first one has
/// none, as in `json`, a second one would be `json2`. Change [`Codec::NAME`] whenever the written form changes, so that no
/// record is ever read as something else. `json`, `msgpack`, `postcard`, and these with a number, are the library's.
///
/// A handler with one of the library's codecs also reads what the others wrote, as far as their features are enabled: a
/// codec can be changed while there are records. For everything else there is [`OnUndecodable`](crate::OnUndecodable).
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
    /// The name under which records keep this form: 1 to 15 bytes of ASCII, the same in every release.
    const NAME: &'static str;

    /// Whether records that [`Json`] and the library's other codecs wrote are read, too, each as what it is.
    ///
    /// Say `true` if results may have been recorded by one of them before. A codec that encrypts or signs leaves it
    /// `false`: whoever can write to the store could slip in a result of their own.
    const READS_OTHERS: bool = false;

    /// Writes `value`.
    ///
    /// # Errors
    /// Whatever keeps the value from being written. The completion is then recorded without its result.
    fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError>;

    /// Reads what [`encode`](Codec::encode) wrote.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being read as a `T`. The caller gets `Error::ResultUnavailable`, never a second run.
    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError>;
}

thread_local! {
    /// JSON is written here and copied once, as most of a result that grew byte by byte would be room for more.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// What was longer is handed out as it is, and the next result gets another buffer.
const LONGEST_BUFFER: usize = 16 * 1024;

/// JSON by `serde_json`, the default: for people to read, and forgiving when the type changes.
///
/// A field that is added with `#[serde(default)]`, made an `Option`, or removed does no harm to old records.
///
/// What it can't do: keys of maps are strings, numbers, or unit variants, or the result does not encode. `Some(())` and
/// `Some(None)` are read back as `None`. A float that is infinite or no number is written as `null`, and is read back as
/// `None` or not at all. What is nested more than 127 levels deep is written, but not read.
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
        serde_json::from_slice(bytes).map_err(|error| place_of(&error).into())
    }
}

/// Where decoding failed. What `serde_json` says of it quotes the result, and results don't reach logs.
fn place_of(error: &serde_json::Error) -> String {
    let problem = match error.classify() {
        serde_json::error::Category::Data => "a value is not what the type needs",
        serde_json::error::Category::Eof => "the JSON ends early",
        _ => "it is not JSON",
    };
    format!("{problem}, at line {} column {}", error.line(), error.column())
}

/// The name of a [`Codec`] as a record keeps it, without an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodecName {
    len: u8,
    bytes: [u8; Self::MAX_BYTES],
}

impl CodecName {
    /// The longest name.
    pub const MAX_BYTES: usize = 15;

    /// The name of `C`; a name that can't be stored is a compile error where the codec is used.
    pub const fn of<C: Codec>() -> Self {
        const {
            match Self::new(C::NAME.as_bytes()) {
                Some(name) => name,
                None => panic!("`Codec::NAME` must have 1 to 15 bytes of ASCII"),
            }
        }
    }

    /// The name in `name`, if it can be one.
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
        #[allow(clippy::cast_possible_truncation)] // At most 15, see above.
        Some(Self { len: name.len() as u8, bytes })
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
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
    fn names_fit_or_are_refused() {
        assert_eq!(CodecName::of::<Json>().as_str(), "json");
        assert_eq!(CodecName::new(b""), None);
        assert_eq!(CodecName::new(b"sixteen-bytes-xx"), None);
        assert_eq!(CodecName::new("é".as_bytes()), None);
    }

    #[test]
    fn a_result_that_does_not_decode_is_not_quoted() {
        let error = Json::decode::<u32>(br#""4111 1111""#).unwrap_err();
        assert_eq!(error.to_string(), "a value is not what the type needs, at line 1 column 11");
    }

    #[test]
    fn falsy_results_survive() {
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
