//! A `Serializer` that wraps another `Serializer`, hashes the shape of the value, and refuses to leave out a field.
//!
//! `#[serde(skip_serializing_if)]` is harmless if the reader finds fields by name. A reader that finds fields by
//! position would read the fields after a skipped field as other fields, often without an error.

use serde::ser::{
    Error as _, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};

use super::shape::{Shape, ShapeStep};

/// A part of the serialization (a serializer or a compound), wrapped to hash its shape.
pub(super) struct Strict<'s, S> {
    inner: S,
    shape: &'s Shape,
}

impl<'s, S> Strict<'s, S> {
    pub(super) fn new(inner: S, shape: &'s Shape) -> Self {
        Self { inner, shape }
    }

    /// Adds a named part to the shape.
    fn named(&self, kind: ShapeStep, name: &str) {
        self.shape.kind(kind);
        self.shape.name(name);
    }

    /// Adds a variant of an enum to the shape.
    fn variant(&self, name: &str, variant: &str, kind: ShapeStep) {
        self.named(ShapeStep::Enum, name);
        self.shape.name(variant);
        self.shape.kind(kind);
    }
}

/// A value inside of another value. Its parts enter the shape of the outer value.
struct InnerValue<'a, T: ?Sized>(&'a T, &'a Shape);

impl<T: Serialize + ?Sized> Serialize for InnerValue<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(Strict::new(serializer, self.1))
    }
}

macro_rules! serialize {
    ($($method:ident($($name:ident: $type:ty),*) $kind:ident;)*) => {
        $(
            fn $method(self, $($name: $type),*) -> Result<S::Ok, S::Error> {
                self.shape.kind(ShapeStep::$kind);
                self.inner.$method($($name),*)
            }
        )*
    };
}

impl<'s, S: Serializer> Serializer for Strict<'s, S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Strict<'s, S::SerializeSeq>;
    type SerializeTuple = Strict<'s, S::SerializeTuple>;
    type SerializeTupleStruct = Strict<'s, S::SerializeTupleStruct>;
    type SerializeTupleVariant = Strict<'s, S::SerializeTupleVariant>;
    type SerializeMap = Strict<'s, S::SerializeMap>;
    type SerializeStruct = Strict<'s, S::SerializeStruct>;
    type SerializeStructVariant = Strict<'s, S::SerializeStructVariant>;

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }

    serialize! {
        serialize_bool(value: bool) Bool;
        serialize_i8(value: i8) I8;
        serialize_i16(value: i16) I16;
        serialize_i32(value: i32) I32;
        serialize_i64(value: i64) I64;
        serialize_i128(value: i128) I128;
        serialize_u8(value: u8) U8;
        serialize_u16(value: u16) U16;
        serialize_u32(value: u32) U32;
        serialize_u64(value: u64) U64;
        serialize_u128(value: u128) U128;
        serialize_f32(value: f32) F32;
        serialize_f64(value: f64) F64;
        serialize_char(value: char) Char;
        serialize_str(value: &str) Str;
        serialize_bytes(value: &[u8]) Bytes;
        serialize_none() None;
        serialize_unit() Unit;
    }

    fn collect_str<T: std::fmt::Display + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.shape.kind(ShapeStep::Str);
        self.inner.collect_str(value)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.shape.kind(ShapeStep::Some);
        self.inner.serialize_some(&InnerValue(value, self.shape))
    }

    fn serialize_unit_struct(self, name: &'static str) -> Result<S::Ok, S::Error> {
        self.named(ShapeStep::UnitStruct, name);
        self.inner.serialize_unit_struct(name)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, name: &'static str, value: &T) -> Result<S::Ok, S::Error> {
        self.named(ShapeStep::NewtypeStruct, name);
        self.inner.serialize_newtype_struct(name, &InnerValue(value, self.shape))
    }

    fn serialize_unit_variant(self, name: &'static str, at: u32, variant: &'static str) -> Result<S::Ok, S::Error> {
        self.variant(name, variant, ShapeStep::UnitVariant);
        self.inner.serialize_unit_variant(name, at, variant)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        self.variant(name, variant, ShapeStep::NewtypeVariant);
        self.inner.serialize_newtype_variant(name, at, variant, &InnerValue(value, self.shape))
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<Self::SerializeSeq, S::Error> {
        self.shape.kind(ShapeStep::Seq);
        Ok(Strict::new(self.inner.serialize_seq(len)?, self.shape))
    }

    fn serialize_tuple(self, len: usize) -> Result<Self::SerializeTuple, S::Error> {
        self.shape.kind(ShapeStep::Tuple);
        self.shape.len(len);
        Ok(Strict::new(self.inner.serialize_tuple(len)?, self.shape))
    }

    fn serialize_tuple_struct(self, name: &'static str, len: usize) -> Result<Self::SerializeTupleStruct, S::Error> {
        self.named(ShapeStep::TupleStruct, name);
        self.shape.len(len);
        Ok(Strict::new(self.inner.serialize_tuple_struct(name, len)?, self.shape))
    }

    fn serialize_tuple_variant(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Self::SerializeTupleVariant, S::Error> {
        self.variant(name, variant, ShapeStep::TupleVariant);
        self.shape.len(len);
        Ok(Strict::new(self.inner.serialize_tuple_variant(name, at, variant, len)?, self.shape))
    }

    fn serialize_map(self, len: Option<usize>) -> Result<Self::SerializeMap, S::Error> {
        self.shape.kind(ShapeStep::Map);
        Ok(Strict::new(self.inner.serialize_map(len)?, self.shape))
    }

    fn serialize_struct(self, name: &'static str, len: usize) -> Result<Self::SerializeStruct, S::Error> {
        self.named(ShapeStep::Struct, name);
        Ok(Strict::new(self.inner.serialize_struct(name, len)?, self.shape))
    }

    fn serialize_struct_variant(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Self::SerializeStructVariant, S::Error> {
        self.variant(name, variant, ShapeStep::StructVariant);
        Ok(Strict::new(self.inner.serialize_struct_variant(name, at, variant, len)?, self.shape))
    }
}

macro_rules! elements {
    ($($compound:ident $method:ident;)*) => {
        $(
            impl<S: $compound> $compound for Strict<'_, S> {
                type Ok = S::Ok;
                type Error = S::Error;

                fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
                    self.inner.$method(&InnerValue(value, self.shape))
                }

                fn end(self) -> Result<S::Ok, S::Error> {
                    self.shape.kind(ShapeStep::End);
                    self.inner.end()
                }
            }
        )*
    };
}

elements! {
    SerializeSeq serialize_element;
    SerializeTuple serialize_element;
    SerializeTupleStruct serialize_field;
    SerializeTupleVariant serialize_field;
}

impl<S: SerializeMap> SerializeMap for Strict<'_, S> {
    type Ok = S::Ok;
    type Error = S::Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), S::Error> {
        self.inner.serialize_key(&InnerValue(key, self.shape))
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
        self.inner.serialize_value(&InnerValue(value, self.shape))
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        self.shape.kind(ShapeStep::End);
        self.inner.end()
    }
}

macro_rules! fields {
    ($($compound:ident;)*) => {
        $(
            impl<S: $compound> $compound for Strict<'_, S> {
                type Ok = S::Ok;
                type Error = S::Error;

                fn serialize_field<T: Serialize + ?Sized>(
                    &mut self,
                    name: &'static str,
                    value: &T,
                ) -> Result<(), S::Error> {
                    self.shape.name(name);
                    self.inner.serialize_field(name, &InnerValue(value, self.shape))
                }

                fn skip_field(&mut self, name: &'static str) -> Result<(), S::Error> {
                    Err(S::Error::custom(format_args!("field `{name}` is skipped")))
                }

                fn end(self) -> Result<S::Ok, S::Error> {
                    self.shape.kind(ShapeStep::End);
                    self.inner.end()
                }
            }
        )*
    };
}

fields! {
    SerializeStruct;
    SerializeStructVariant;
}
