//! `Postcard`: results without names or types.

use postcard::ser_flavors::{Flavor, StdVec};
use postcard::{Deserializer, Error, Serializer};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::guard::Guard;
use super::strict::Strict;
use super::{Codec, CodecError};

/// Postcard (its wire format 1): the smallest and the fastest, for types that do not change.
///
/// The bytes hold no names and no types: what they mean is known only to the type that reads them. **If the return type
/// changes in any way while there are records, they may be read as something that was never returned, without an error.**
/// Change the codec to [`Json`](crate::Json) or `MessagePack` first, which still reads them while the type is the same, and
/// wait until the retention of the records written before has ended. Or change the type together with the codec, to one of
/// your own that calls this one under another name, and let [`OnUndecodable`](crate::OnUndecodable) migrate the records.
///
/// What is noticed when the type has changed: bytes that are missing or left over; a `bool`, an `Option` or an enum with
/// a number that it doesn't have; a number that doesn't fit; a text that isn't UTF-8. What is not noticed: whatever
/// happens to have the same form. Two fields of like types that swap places; variants that are reordered, or one that is
/// inserted before others; `u32` that becomes `u64`, or `i32` (which doubles or changes sign); a `String` that becomes a
/// `Vec<u8>`; a field that is removed while another one that takes as many bytes is added. A field with
/// `#[serde(default)]` has no default here.
///
/// What it can't do:
///
/// - A type with `#[serde(flatten)]`, or a field that was left out by `#[serde(skip_serializing_if)]`, does not encode: the
///   completion is recorded without its result.
/// - A type with `#[serde(tag)]` or `#[serde(untagged)]`, or that holds something like `serde_json::Value`, encodes, but
///   never decodes.
/// - A type that is written in another way than it is read, for example by `#[serde(skip_serializing)]` without
///   `skip_deserializing`, may be read as something else.
/// - What is nested more than 127 levels deep (every option, collection, struct and enum is one) is written, but not read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Postcard;

impl Codec for Postcard {
    const NAME: &'static str = "postcard";
    const READS_OTHERS: bool = true;

    fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
        let mut serializer = Serializer { output: StdVec::new() };
        value.serialize(Strict::new(&mut serializer)).map_err(|error| match error {
            Error::SerdeSerCustom => {
                CodecError::from("its `Serialize` failed, or left out a field, which Postcard can't")
            }
            error => error.into(),
        })?;
        serializer.output.finalize().map_err(Into::into)
    }

    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
        let guard = Guard::new(bytes);
        let mut inner = Deserializer::from_bytes(bytes);
        let value = T::deserialize(guard.around(&mut inner));
        let left = inner.finalize().map_or(0, <[u8]>::len);
        match value {
            Ok(value) if left == 0 => Ok(value),
            Ok(_) => Err(format!("the value ends {left} bytes before the end").into()),
            Err(error) => Err(format!("{}, after byte {}", problem(&guard, &error), bytes.len() - left).into()),
        }
    }
}

fn problem(guard: &Guard, error: &Error) -> &'static str {
    guard.problem().unwrap_or(match error {
        Error::WontImplement => "Postcard can't read a type that asks what there is",
        Error::DeserializeUnexpectedEnd => "the bytes end early",
        Error::DeserializeBadUtf8 => "a text is not UTF-8",
        _ => "a value is not what the type needs",
    })
}
