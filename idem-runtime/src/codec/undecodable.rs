//! Recorded results that no longer decode.

use std::fmt;

use serde::de::DeserializeOwned;

use super::{CodecError, CodecName, ResultProblem, known};

/// A recorded result that can't be read as the function's return type: the input of a migration.
#[derive(Clone, Copy)]
pub struct Undecodable<'a> {
    codec: &'a str,
    bytes: &'a [u8],
    is_error: bool,
}

impl<'a> Undecodable<'a> {
    pub(crate) const fn new(codec: &'a str, bytes: &'a [u8], is_error: bool) -> Self {
        Self { codec, bytes, is_error }
    }

    /// A value that the function returned as `Ok`. For tests of a migration.
    pub const fn value(codec: &'a str, bytes: &'a [u8]) -> Self {
        Self { codec, bytes, is_error: false }
    }

    /// A recorded error, which the function returned as `Err`. For tests of a migration.
    pub const fn error(codec: &'a str, bytes: &'a [u8]) -> Self {
        Self { codec, bytes, is_error: true }
    }

    /// Name of the codec that wrote the result: its [`Codec::NAME`](super::Codec::NAME).
    pub const fn codec(&self) -> &'a str {
        self.codec
    }

    /// Bytes that the codec wrote.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns whether this is a recorded error (`on_error = record`). Migrate it to the function's error type, not to
    /// the type of its value.
    pub const fn is_error(&self) -> bool {
        self.is_error
    }

    /// Decodes the result as an old type `T`, if one of the library's own codecs wrote it and is compiled in. For a
    /// codec of your own call that codec: `MyCodec::decode(recorded.bytes())`.
    ///
    /// # Errors
    /// Another codec wrote the result, or the result is not a `T` either.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, CodecError> {
        let decoded = CodecName::new(self.codec.as_bytes()).and_then(|codec| known::decode(codec, self.bytes));
        decoded.unwrap_or_else(|| Err(ResultProblem::OtherCodec { codec: self.codec.to_owned() }.to_string().into()))
    }
}

impl fmt::Debug for Undecodable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { codec, bytes, is_error } = self;
        f.debug_struct("Undecodable")
            .field("codec", codec)
            .field("bytes", &format_args!("{} bytes", bytes.len()))
            .field("is_error", is_error)
            .finish()
    }
}
