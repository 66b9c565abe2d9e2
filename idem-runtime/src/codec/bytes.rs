//! Recording of values that consist only of bytes.
//!
//! In serde a `Vec<u8>` is a sequence of numbers, and JSON writes it as a text that is three to four times as long.

use serde::de::value::{self, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Visitor};
use serde::ser::{self, Impossible, Serialize, SerializeSeq, Serializer};

use super::{CodecError, CodecName};

/// Name of the codec in records whose result is stored as plain bytes, without an encoding.
pub(super) const NAME: CodecName = CodecName::new(b"bytes").expect("a name that fits");

/// Returns the bytes that `value` consists of, if there is at least one byte; `None` for any other value.
pub(crate) fn of<T: Serialize + ?Sized>(value: &T) -> Option<Vec<u8>> {
    value.serialize(Whole).ok().filter(|bytes| !bytes.is_empty())
}

/// Reads recorded bytes as a `T`, if `T` can be read from an array of numbers in JSON.
///
/// # Errors
/// [`CodecError`] if `T` can't be read from an array of numbers.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    // The text of serde's error may quote the result, and results must not reach logs.
    T::deserialize(RecordedBytes(bytes)).map_err(|_| CodecError::from("the bytes do not fit the type"))
}

/// Splits a sequence into its leading elements that are bytes and the remaining elements.
pub(crate) fn leading<I>(elements: I) -> (Vec<u8>, impl Iterator<Item = I::Item>)
where
    I: IntoIterator<Item: Serialize>,
{
    let mut elements = elements.into_iter().peekable();
    let (mut bytes, mut rest) = (Vec::new(), Vec::new());
    let unread = match elements.peek().is_some_and(|first| first.serialize(Element).is_ok()) {
        true => {
            // The loop never exits early, so for elements of type `u8` it compiles to a copy of memory.
            bytes.extend(elements.map(|element| match element.serialize(Element) {
                Ok(byte) if rest.is_empty() => byte,
                _ => {
                    rest.push(element);
                    0
                }
            }));
            bytes.truncate(bytes.len() - rest.len());
            None
        }
        false => Some(elements),
    };
    (bytes, rest.into_iter().chain(unread.into_iter().flatten()))
}

/// Error for a value that does not consist only of bytes.
#[derive(Debug)]
struct NotBytes;

impl std::fmt::Display for NotBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("not bytes")
    }
}

impl std::error::Error for NotBytes {}

impl ser::Error for NotBytes {
    fn custom<T: std::fmt::Display>(_: T) -> Self {
        Self
    }
}

macro_rules! refuse {
    ($($method:ident($($type:ty),*) $(-> $answer:ident)?;)*) => { $(
        fn $method(self, $(_: $type),*) -> refuse!(@ $($answer)?) {
            Err(NotBytes)
        }
    )* };
    (@) => { Result<Self::Ok, NotBytes> };
    (@ $answer:ident) => { Result<Self::$answer, NotBytes> };
}

/// Implements the methods of a `Serializer` that serde does not call for a byte or a list of bytes. Each of these
/// methods returns [`NotBytes`].
macro_rules! refuse_the_rest {
    () => {
        type Error = NotBytes;
        type SerializeTuple = Impossible<Self::Ok, NotBytes>;
        type SerializeTupleStruct = Impossible<Self::Ok, NotBytes>;
        type SerializeTupleVariant = Impossible<Self::Ok, NotBytes>;
        type SerializeMap = Impossible<Self::Ok, NotBytes>;
        type SerializeStruct = Impossible<Self::Ok, NotBytes>;
        type SerializeStructVariant = Impossible<Self::Ok, NotBytes>;

        refuse! {
            serialize_bool(bool);
            serialize_i8(i8);
            serialize_i16(i16);
            serialize_i32(i32);
            serialize_i64(i64);
            serialize_i128(i128);
            serialize_u16(u16);
            serialize_u32(u32);
            serialize_u64(u64);
            serialize_u128(u128);
            serialize_f32(f32);
            serialize_f64(f64);
            serialize_char(char);
            serialize_str(&str);
            serialize_none();
            serialize_unit();
            serialize_unit_struct(&'static str);
            serialize_unit_variant(&'static str, u32, &'static str);
            serialize_tuple(usize) -> SerializeTuple;
            serialize_tuple_struct(&'static str, usize) -> SerializeTupleStruct;
            serialize_tuple_variant(&'static str, u32, &'static str, usize) -> SerializeTupleVariant;
            serialize_map(Option<usize>) -> SerializeMap;
            serialize_struct(&'static str, usize) -> SerializeStruct;
            serialize_struct_variant(&'static str, u32, &'static str, usize) -> SerializeStructVariant;
        }

        fn serialize_newtype_variant<T: Serialize + ?Sized>(
            self,
            _: &'static str,
            _: u32,
            _: &'static str,
            _: &T,
        ) -> Result<Self::Ok, NotBytes> {
            Err(NotBytes)
        }

        // The value is refused without formatting it, because the formatting might be slow.
        fn collect_str<T: std::fmt::Display + ?Sized>(self, _: &T) -> Result<Self::Ok, NotBytes> {
            Err(NotBytes)
        }
    };
}

/// Serializer that accepts a single byte.
struct Element;

impl Serializer for Element {
    type Ok = u8;
    type SerializeSeq = Impossible<u8, NotBytes>;

    refuse_the_rest!();

    refuse! {
        serialize_bytes(&[u8]);
        serialize_seq(Option<usize>) -> SerializeSeq;
    }

    fn serialize_u8(self, byte: u8) -> Result<u8, NotBytes> {
        Ok(byte)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, _: &T) -> Result<u8, NotBytes> {
        Err(NotBytes)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, _: &T) -> Result<u8, NotBytes> {
        Err(NotBytes)
    }
}

/// Serializer that accepts a value that consists of bytes. The bytes may be inside of any number of `Some` and
/// newtypes, because JSON writes a `Some` and a newtype like the value inside.
struct Whole;

impl Serializer for Whole {
    type Ok = Vec<u8>;
    type SerializeSeq = Elements;

    refuse_the_rest!();

    refuse! {
        serialize_u8(u8);
    }

    fn serialize_bytes(self, bytes: &[u8]) -> Result<Vec<u8>, NotBytes> {
        Ok(bytes.to_vec())
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Vec<u8>, NotBytes> {
        value.serialize(self)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<Vec<u8>, NotBytes> {
        value.serialize(self)
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Elements, NotBytes> {
        Ok(Elements(Vec::new()))
    }

    fn collect_seq<I>(self, elements: I) -> Result<Vec<u8>, NotBytes>
    where
        I: IntoIterator<Item: Serialize>,
    {
        let (bytes, mut rest) = leading(elements);
        rest.next().map_or(Ok(bytes), |_| Err(NotBytes))
    }
}

struct Elements(Vec<u8>);

impl SerializeSeq for Elements {
    type Ok = Vec<u8>;
    type Error = NotBytes;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, element: &T) -> Result<(), NotBytes> {
        self.0.push(element.serialize(Element)?);
        Ok(())
    }

    fn end(self) -> Result<Vec<u8>, NotBytes> {
        Ok(self.0)
    }
}

/// Deserializer of recorded bytes. A type that does not ask for bytes reads them as an array of numbers.
struct RecordedBytes<'a>(&'a [u8]);

impl<'de> Deserializer<'de> for RecordedBytes<'_> {
    type Error = value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, value::Error> {
        let mut elements = SeqDeserializer::new(self.0.iter().copied());
        let value = visitor.visit_seq(&mut elements)?;
        elements.end()?;
        Ok(value)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, value::Error> {
        visitor.visit_bytes(self.0)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, value::Error> {
        visitor.visit_byte_buf(self.0.to_vec())
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, value::Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, value::Error> {
        visitor.visit_newtype_struct(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string unit unit_struct seq tuple tuple_struct map
        struct enum identifier ignored_any
    }
}
