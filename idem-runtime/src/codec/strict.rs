//! A `Serializer` around another one that refuses to leave out a field.
//!
//! `#[serde(skip_serializing_if)]` makes no difference to a reader who finds fields by name. Where they are known by their
//! place, those behind the missing one would be read as something else, and often without an error.

use serde::ser::{
    Error as _, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};

/// A part of the serialization that is watched.
pub(super) struct Strict<S>(S);

impl<S> Strict<S> {
    pub(super) fn new(inner: S) -> Self {
        Self(inner)
    }
}

/// A value inside of the one that is watched.
struct Inner<'a, T: ?Sized>(&'a T);

impl<T: Serialize + ?Sized> Serialize for Inner<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(Strict(serializer))
    }
}

macro_rules! serialize {
    ($($method:ident($($name:ident: $type:ty),*);)*) => {
        $(
            fn $method(self, $($name: $type),*) -> Result<S::Ok, S::Error> {
                self.0.$method($($name),*)
            }
        )*
    };
}

macro_rules! begin {
    ($($method:ident($($name:ident: $type:ty),*) $compound:ident;)*) => {
        $(
            fn $method(self, $($name: $type),*) -> Result<Self::$compound, S::Error> {
                self.0.$method($($name),*).map(Strict)
            }
        )*
    };
}

impl<S: Serializer> Serializer for Strict<S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Strict<S::SerializeSeq>;
    type SerializeTuple = Strict<S::SerializeTuple>;
    type SerializeTupleStruct = Strict<S::SerializeTupleStruct>;
    type SerializeTupleVariant = Strict<S::SerializeTupleVariant>;
    type SerializeMap = Strict<S::SerializeMap>;
    type SerializeStruct = Strict<S::SerializeStruct>;
    type SerializeStructVariant = Strict<S::SerializeStructVariant>;

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }

    serialize! {
        serialize_bool(value: bool);
        serialize_i8(value: i8);
        serialize_i16(value: i16);
        serialize_i32(value: i32);
        serialize_i64(value: i64);
        serialize_i128(value: i128);
        serialize_u8(value: u8);
        serialize_u16(value: u16);
        serialize_u32(value: u32);
        serialize_u64(value: u64);
        serialize_u128(value: u128);
        serialize_f32(value: f32);
        serialize_f64(value: f64);
        serialize_char(value: char);
        serialize_str(value: &str);
        serialize_bytes(value: &[u8]);
        serialize_none();
        serialize_unit();
        serialize_unit_struct(name: &'static str);
        serialize_unit_variant(name: &'static str, at: u32, variant: &'static str);
    }

    begin! {
        serialize_seq(len: Option<usize>) SerializeSeq;
        serialize_tuple(len: usize) SerializeTuple;
        serialize_tuple_struct(name: &'static str, len: usize) SerializeTupleStruct;
        serialize_tuple_variant(name: &'static str, at: u32, variant: &'static str, len: usize) SerializeTupleVariant;
        serialize_map(len: Option<usize>) SerializeMap;
        serialize_struct(name: &'static str, len: usize) SerializeStruct;
        serialize_struct_variant(name: &'static str, at: u32, variant: &'static str, len: usize) SerializeStructVariant;
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.0.serialize_some(&Inner(value))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, name: &'static str, value: &T) -> Result<S::Ok, S::Error> {
        self.0.serialize_newtype_struct(name, &Inner(value))
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        self.0.serialize_newtype_variant(name, at, variant, &Inner(value))
    }

    fn collect_str<T: std::fmt::Display + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        self.0.collect_str(value)
    }
}

macro_rules! elements {
    ($($compound:ident $method:ident;)*) => {
        $(
            impl<S: $compound> $compound for Strict<S> {
                type Ok = S::Ok;
                type Error = S::Error;

                fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
                    self.0.$method(&Inner(value))
                }

                fn end(self) -> Result<S::Ok, S::Error> {
                    self.0.end()
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

impl<S: SerializeMap> SerializeMap for Strict<S> {
    type Ok = S::Ok;
    type Error = S::Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), S::Error> {
        self.0.serialize_key(&Inner(key))
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
        self.0.serialize_value(&Inner(value))
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        self.0.end()
    }
}

macro_rules! fields {
    ($($compound:ident;)*) => {
        $(
            impl<S: $compound> $compound for Strict<S> {
                type Ok = S::Ok;
                type Error = S::Error;

                fn serialize_field<T: Serialize + ?Sized>(
                    &mut self,
                    name: &'static str,
                    value: &T,
                ) -> Result<(), S::Error> {
                    self.0.serialize_field(name, &Inner(value))
                }

                fn skip_field(&mut self, name: &'static str) -> Result<(), S::Error> {
                    Err(S::Error::custom(format_args!("field `{name}` is left out")))
                }

                fn end(self) -> Result<S::Ok, S::Error> {
                    self.0.end()
                }
            }
        )*
    };
}

fields! {
    SerializeStruct;
    SerializeStructVariant;
}
