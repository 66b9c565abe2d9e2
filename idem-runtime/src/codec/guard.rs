//! A `Deserializer` that wraps another `Deserializer` and limits the cost of malformed bytes.
//!
//! Malformed bytes can nest values without end, and each level uses stack. They can also claim any number of elements
//! that take no bytes. The limits of `rmp-serde` do not count options and enums, and `postcard` has no limits;
//! `serde_json` limits the nesting itself.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor};

use super::shape::{Shape, ShapeStep};

/// Largest depth of nesting, the same as in `serde_json`.
const MAX_DEPTH: u8 = 127;
/// Number of elements that a value may have in addition to one element for each byte: elements such as `()` take no
/// bytes.
const MAX_EMPTY_ELEMENTS: usize = 65_536;

/// Limits of one deserialization, and the reason why it was stopped.
pub(super) struct Guard<'s> {
    /// Number of further elements that the guard accepts. Starts at the number of bytes plus [`MAX_EMPTY_ELEMENTS`].
    elements: Cell<usize>,
    /// Shape of the values read so far; `None` if the codec does not check the shape.
    shape: Option<&'s Shape>,
    problem: Cell<Option<&'static str>>,
}

impl<'s> Guard<'s> {
    pub(super) fn new(bytes: &[u8], shape: Option<&'s Shape>) -> Self {
        let elements = Cell::new(bytes.len().saturating_add(MAX_EMPTY_ELEMENTS));
        Self { elements, shape, problem: Cell::new(None) }
    }

    pub(super) fn around<D>(&self, inner: D) -> GuardedPart<'_, D> {
        GuardedPart { inner, guard: self, depth: MAX_DEPTH, counts: true, names: Names::None }
    }

    /// Returns the reason why the guard stopped the deserialization, if it did.
    pub(super) fn problem(&self) -> Option<&'static str> {
        self.problem.get()
    }

    fn kind(&self, kind: ShapeStep) {
        if let Some(shape) = self.shape {
            shape.kind(kind);
        }
    }

    fn name(&self, name: &str) {
        if let Some(shape) = self.shape {
            shape.name(name);
        }
    }

    fn len(&self, len: usize) {
        if let Some(shape) = self.shape {
            shape.len(len);
        }
    }

    fn stop<E: serde::de::Error>(&self, problem: &'static str) -> E {
        self.problem.set(Some(problem));
        E::custom(problem)
    }
}

/// A part of the deserialization (a deserializer, a visitor or an access to elements), wrapped in its guard.
pub(super) struct GuardedPart<'g, I> {
    inner: I,
    guard: &'g Guard<'g>,
    /// Number of further levels that may be nested inside of this part.
    depth: u8,
    /// True if the guard counts the elements of this part. The guard does not count the elements of a struct or a
    /// tuple, because the type fixes their number.
    counts: bool,
    names: Names,
}

/// Names that the type being read gives to the parts of a value, for a codec whose bytes contain no names.
#[derive(Clone, Copy)]
enum Names {
    None,
    /// Names of the fields of the struct that is being read.
    Fields(&'static [&'static str]),
    /// Names of the variants of the enum that is being read.
    Variants(&'static [&'static str]),
}

impl<'g, I> GuardedPart<'g, I> {
    fn with<J>(&self, inner: J) -> GuardedPart<'g, J> {
        GuardedPart { inner, guard: self.guard, depth: self.depth, counts: true, names: Names::None }
    }

    /// Wraps a tuple or struct, whose length the type fixes.
    fn parts<J>(&self, inner: J, fields: &'static [&'static str]) -> GuardedPart<'g, J> {
        GuardedPart { counts: false, names: Names::Fields(fields), ..self.with(inner) }
    }

    /// Adds a named part to the shape.
    fn named(&self, kind: ShapeStep, name: &str) {
        self.guard.kind(kind);
        self.guard.name(name);
    }

    /// Counts one more level of nesting. Fails if the bytes are nested too deeply.
    fn deeper<E: serde::de::Error>(&mut self) -> Result<(), E> {
        match self.depth.checked_sub(1) {
            Some(depth) => self.depth = depth,
            None => return Err(self.guard.stop("it is nested too deeply")),
        }
        Ok(())
    }

    /// Counts an element. Fails if the bytes contain more elements than the limit.
    fn count<T, E: serde::de::Error>(&self, element: Option<T>) -> Result<Option<T>, E> {
        if self.counts && element.is_some() {
            match self.guard.elements.get().checked_sub(1) {
                Some(left) => self.guard.elements.set(left),
                None => return Err(self.guard.stop("it claims to have more elements than it can hold")),
            }
        }
        Ok(element)
    }

    /// Limits the number of elements that the bytes claim to contain, because the caller may allocate memory for
    /// that number.
    fn believed(&self, claimed: Option<usize>) -> Option<usize> {
        claimed.map(|claimed| claimed.min(self.guard.elements.get()))
    }
}

macro_rules! deserialize {
    ($($method:ident $($kind:ident)?;)*) => {
        $(
            fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
                $(self.guard.kind(ShapeStep::$kind);)?
                let visitor = self.with(visitor);
                self.inner.$method(visitor)
            }
        )*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for GuardedPart<'_, D> {
    type Error = D::Error;

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }

    deserialize! {
        deserialize_any;
        deserialize_bool Bool;
        deserialize_i8 I8;
        deserialize_i16 I16;
        deserialize_i32 I32;
        deserialize_i64 I64;
        deserialize_i128 I128;
        deserialize_u8 U8;
        deserialize_u16 U16;
        deserialize_u32 U32;
        deserialize_u64 U64;
        deserialize_u128 U128;
        deserialize_f32 F32;
        deserialize_f64 F64;
        deserialize_char Char;
        deserialize_str Str;
        deserialize_string Str;
        deserialize_bytes Bytes;
        deserialize_byte_buf Bytes;
        deserialize_option;
        deserialize_unit Unit;
        deserialize_seq Seq;
        deserialize_map Map;
        deserialize_ignored_any;
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        self.named(ShapeStep::UnitStruct, name);
        let visitor = self.with(visitor);
        self.inner.deserialize_unit_struct(name, visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        self.named(ShapeStep::NewtypeStruct, name);
        let visitor = self.with(visitor);
        self.inner.deserialize_newtype_struct(name, visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, D::Error> {
        self.guard.kind(ShapeStep::Tuple);
        self.guard.len(len);
        let visitor = self.parts(visitor, &[]);
        self.inner.deserialize_tuple(len, visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.named(ShapeStep::TupleStruct, name);
        self.guard.len(len);
        let visitor = self.parts(visitor, &[]);
        self.inner.deserialize_tuple_struct(name, len, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.named(ShapeStep::Struct, name);
        let visitor = self.parts(visitor, fields);
        self.inner.deserialize_struct(name, fields, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.named(ShapeStep::Enum, name);
        let visitor = GuardedPart { names: Names::Variants(variants), ..self.with(visitor) };
        self.inner.deserialize_enum(name, variants, visitor)
    }

    /// Reads the number of a variant. The wrapped visitor adds the name of the variant to the shape.
    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = GuardedPart { names: self.names, ..self.with(visitor) };
        self.inner.deserialize_identifier(visitor)
    }
}

macro_rules! visit {
    ($($method:ident($type:ty);)*) => {
        $(
            fn $method<E: serde::de::Error>(self, value: $type) -> Result<V::Value, E> {
                self.inner.$method(value)
            }
        )*
    };
}

impl<'de, V: Visitor<'de>> Visitor<'de> for GuardedPart<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    visit! {
        visit_bool(bool);
        visit_i8(i8);
        visit_i16(i16);
        visit_i32(i32);
        visit_i64(i64);
        visit_i128(i128);
        visit_u8(u8);
        visit_u16(u16);
        visit_u64(u64);
        visit_u128(u128);
        visit_f32(f32);
        visit_f64(f64);
        visit_char(char);
        visit_str(&str);
        visit_borrowed_str(&'de str);
        visit_string(String);
        visit_bytes(&[u8]);
        visit_borrowed_bytes(&'de [u8]);
        visit_byte_buf(Vec<u8>);
    }

    fn visit_u32<E: serde::de::Error>(self, value: u32) -> Result<V::Value, E> {
        if let Names::Variants(variants) = self.names
            && let Some(name) = variants.get(value as usize)
        {
            self.guard.name(name);
        }
        self.inner.visit_u32(value)
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.guard.kind(ShapeStep::None);
        self.inner.visit_none()
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(mut self, inner: D) -> Result<V::Value, D::Error> {
        self.deeper()?;
        self.guard.kind(ShapeStep::Some);
        let inner = self.with(inner);
        self.inner.visit_some(inner)
    }

    // A newtype is not counted as a level of nesting: a recursive type contains itself only through an option, a
    // collection or an enum.
    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        let inner = self.with(inner);
        self.inner.visit_newtype_struct(inner)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, inner: A) -> Result<V::Value, A::Error> {
        self.deeper()?;
        let inner = GuardedPart { counts: self.counts, names: self.names, ..self.with(inner) };
        let value = self.inner.visit_seq(inner)?;
        self.guard.kind(ShapeStep::End);
        Ok(value)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, inner: A) -> Result<V::Value, A::Error> {
        self.deeper()?;
        let inner = GuardedPart { counts: self.counts, names: self.names, ..self.with(inner) };
        let value = self.inner.visit_map(inner)?;
        self.guard.kind(ShapeStep::End);
        Ok(value)
    }

    fn visit_enum<A: EnumAccess<'de>>(mut self, inner: A) -> Result<V::Value, A::Error> {
        self.deeper()?;
        let inner = GuardedPart { names: self.names, ..self.with(inner) };
        self.inner.visit_enum(inner)
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for GuardedPart<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        let inner = GuardedPart { names: self.names, ..self.with(inner) };
        self.inner.deserialize(inner)
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for GuardedPart<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        if let Names::Fields([name, rest @ ..]) = self.names {
            self.guard.name(name);
            self.names = Names::Fields(rest);
        }
        let seed = self.with(seed);
        let element = self.inner.next_element_seed(seed)?;
        self.count(element)
    }

    fn size_hint(&self) -> Option<usize> {
        self.believed(self.inner.size_hint())
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for GuardedPart<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let seed = self.with(seed);
        let key = self.inner.next_key_seed(seed)?;
        self.count(key)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.with(seed);
        self.inner.next_value_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.believed(self.inner.size_hint())
    }
}

impl<'g, 'de, A: EnumAccess<'de>> EnumAccess<'de> for GuardedPart<'g, A> {
    type Error = A::Error;
    type Variant = GuardedPart<'g, A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        let seed = GuardedPart { names: self.names, ..self.with(seed) };
        let Self { inner, guard, depth, counts, .. } = self;
        let (value, inner) = inner.variant_seed(seed)?;
        Ok((value, GuardedPart { inner, guard, depth, counts, names: Names::None }))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for GuardedPart<'_, A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.guard.kind(ShapeStep::UnitVariant);
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        self.guard.kind(ShapeStep::NewtypeVariant);
        let seed = self.with(seed);
        self.inner.newtype_variant_seed(seed)
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        self.guard.kind(ShapeStep::TupleVariant);
        self.guard.len(len);
        let visitor = self.parts(visitor, &[]);
        self.inner.tuple_variant(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.guard.kind(ShapeStep::StructVariant);
        let visitor = self.parts(visitor, fields);
        self.inner.struct_variant(fields, visitor)
    }
}
