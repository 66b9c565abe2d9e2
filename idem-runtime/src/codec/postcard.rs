//! `Postcard`: a binary codec that writes neither names nor types.

use postcard::ser_flavors::{Flavor, StdVec};
use postcard::{Deserializer, Error, Serializer};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::guard::Guard;
use super::shape::Shape;
use super::strict::Strict;
use super::{Codec, CodecError};

/// Postcard (its wire format 1), followed by a hash of the shape of the value. The smallest and fastest codec, for
/// types that do not change.
///
/// The bytes contain neither names nor types: only the reading type gives them a meaning. So the hash identifies the
/// type that wrote the bytes, by the names of types, fields and variants and the kinds of values, in order. If the
/// return type has changed in any way, including its name, the result is not read. A migration
/// ([`OnUndecodable`](crate::OnUndecodable)) can decode a result of an older type with a type to which
/// `#[serde(rename = "…")]` gives the old names.
///
/// To change the type while records exist, first change the codec to [`Json`](crate::Json) or `MessagePack`. A handler
/// with `Json` or `MessagePack` still reads Postcard's records while the type is unchanged. Change the type when the
/// retention of Postcard's records has ended.
///
/// Limits:
///
/// - A type with `#[serde(flatten)]`, or a field that was left out by `#[serde(skip_serializing_if)]`, does not encode:
///   the completion is recorded without its result.
/// - A type with `#[serde(tag)]` or `#[serde(untagged)]` encodes, but never decodes. A type that contains a tagged or
///   untagged type, for example `serde_json::Value`, never decodes either.
/// - A type whose `Deserialize` expects another form than its `Serialize` writes is encoded, but is never decoded.
///   Examples are `#[serde(alias)]`, and `#[serde(skip_serializing)]` without `skip_deserializing`.
/// - A value that is nested more than 127 levels deep (every option, collection, struct and enum is a level) is
///   written, but can't be read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Postcard;

impl Codec for Postcard {
    const NAME: &'static str = "postcard";
    const READS_OTHERS: bool = true;

    fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
        let (mut serializer, shape) = (Serializer { output: StdVec::new() }, Shape::new());
        value.serialize(Strict::new(&mut serializer, &shape)).map_err(|error| match error {
            Error::SerdeSerCustom => {
                CodecError::from("its `Serialize` failed or skipped a field, which Postcard can't encode")
            }
            error => error.into(),
        })?;
        let mut bytes = serializer.output.finalize()?;
        bytes.extend_from_slice(&shape.finish());
        Ok(bytes)
    }

    fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
        let (bytes, written) = bytes.split_last_chunk::<{ Shape::BYTES }>().ok_or("the bytes end early")?;
        let shape = Shape::new();
        let guard = Guard::new(bytes, Some(&shape));
        let mut inner = Deserializer::from_bytes(bytes);
        let value = T::deserialize(guard.around(&mut inner));
        let left = inner.finalize().map_or(0, <[u8]>::len);
        match value {
            Ok(value) if left == 0 && shape.finish() == *written => Ok(value),
            Ok(_) if left == 0 => Err("it was written as a value of another type".into()),
            Ok(_) => Err(format!("the value ends {left} bytes before the end").into()),
            Err(error) => Err(format!("{}, after byte {}", problem(&guard, &error), bytes.len() - left).into()),
        }
    }
}

fn problem(guard: &Guard<'_>, error: &Error) -> &'static str {
    guard.problem().unwrap_or(match error {
        Error::WontImplement => "Postcard can't decode a type that asks for the kind of a value",
        Error::DeserializeUnexpectedEnd => "the bytes end early",
        Error::DeserializeBadUtf8 => "a text is not UTF-8",
        _ => "a value does not fit its type",
    })
}
