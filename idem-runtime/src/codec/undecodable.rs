//! Recorded results that no longer decode, for migrations.

use std::fmt;

use serde::de::DeserializeOwned;

use super::{CodecError, CodecName, ResultProblem, known};

/// A recorded result that does not decode as the function's return type: the input of a migration.
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

    /// Makes a recorded value, as if the function had returned it as `Ok`, for tests of a migration.
    pub const fn value(codec: &'a str, bytes: &'a [u8]) -> Self {
        Self { codec, bytes, is_error: false }
    }

    /// Makes a recorded error, as if the function had returned it as `Err`, for tests of a migration.
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

    /// Returns whether this is a recorded error (`on_error = record`). Migrate an error to the function's error type,
    /// and a value to the type of its `Ok`.
    pub const fn is_error(&self) -> bool {
        self.is_error
    }

    /// Decodes the result as an old type `T`, if a codec of the library wrote the result and this build includes that
    /// codec. For your own codec, call that codec instead: `MyCodec::decode(recorded.bytes())`.
    ///
    /// # Errors
    /// [`CodecError`] if another codec wrote the result, or if the result is not a `T`.
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
