//! A `Deserializer` around another one that bounds what nonsense can cost.
//!
//! Bytes that are not what the type expects may nest without an end, where each level takes stack, and may claim to have
//! any number of elements that take no bytes. Neither `rmp-serde` (whose limit does not count options and enums) nor
//! `postcard` (which has none) stops at that; `serde_json` does.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor};

/// As deep as `serde_json` goes.
const MAX_DEPTH: u8 = 127;
/// How many elements without bytes are believed.
const MAX_EMPTY_ELEMENTS: usize = 65_536;

/// What is left to be claimed, and what went wrong.
pub(super) struct Guard {
    elements: Cell<usize>,
    problem: Cell<Option<&'static str>>,
}

impl Guard {
    pub(super) fn new(bytes: &[u8]) -> Self {
        Self { elements: Cell::new(bytes.len().saturating_add(MAX_EMPTY_ELEMENTS)), problem: Cell::new(None) }
    }

    pub(super) fn around<D>(&self, inner: D) -> Guarded<'_, D> {
        Guarded { inner, guard: self, depth: MAX_DEPTH, counts: true }
    }

    /// Why the guard stopped, if it did.
    pub(super) fn problem(&self) -> Option<&'static str> {
        self.problem.get()
    }

    fn stop<E: serde::de::Error>(&self, problem: &'static str) -> E {
        self.problem.set(Some(problem));
        E::custom(problem)
    }
}

/// A part of the deserialization, with the guard around it.
pub(super) struct Guarded<'g, I> {
    inner: I,
    guard: &'g Guard,
    /// How many levels may follow.
    depth: u8,
    /// Whether elements are counted: the length of a struct or a tuple is that of the type.
    counts: bool,
}

impl<'g, I> Guarded<'g, I> {
    fn with<J>(&self, inner: J) -> Guarded<'g, J> {
        Guarded { inner, guard: self.guard, depth: self.depth, counts: true }
    }

    fn deeper<E: serde::de::Error>(&mut self) -> Result<(), E> {
        match self.depth.checked_sub(1) {
            Some(depth) => self.depth = depth,
            None => return Err(self.guard.stop("it is nested too deeply")),
        }
        Ok(())
    }

    fn count<T, E: serde::de::Error>(&self, element: Option<T>) -> Result<Option<T>, E> {
        if self.counts && element.is_some() {
            match self.guard.elements.get().checked_sub(1) {
                Some(left) => self.guard.elements.set(left),
                None => return Err(self.guard.stop("it claims to have more elements than it can hold")),
            }
        }
        Ok(element)
    }

    fn believed(&self, claimed: Option<usize>) -> Option<usize> {
        claimed.map(|claimed| claimed.min(self.guard.elements.get()))
    }
}

macro_rules! deserialize {
    ($($method:ident($($name:ident: $type:ty),*) $counts:literal;)*) => {
        $(
            fn $method<V: Visitor<'de>>(self, $($name: $type,)* visitor: V) -> Result<V::Value, D::Error> {
                let visitor = Guarded { inner: visitor, guard: self.guard, depth: self.depth, counts: $counts };
                self.inner.$method($($name,)* visitor)
            }
        )*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Guarded<'_, D> {
    type Error = D::Error;

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }

    deserialize! {
        deserialize_any() true;
        deserialize_bool() true;
        deserialize_i8() true;
        deserialize_i16() true;
        deserialize_i32() true;
        deserialize_i64() true;
        deserialize_i128() true;
        deserialize_u8() true;
        deserialize_u16() true;
        deserialize_u32() true;
        deserialize_u64() true;
        deserialize_u128() true;
        deserialize_f32() true;
        deserialize_f64() true;
        deserialize_char() true;
        deserialize_str() true;
        deserialize_string() true;
        deserialize_bytes() true;
        deserialize_byte_buf() true;
        deserialize_option() true;
        deserialize_unit() true;
        deserialize_unit_struct(name: &'static str) true;
        deserialize_newtype_struct(name: &'static str) true;
        deserialize_seq() true;
        deserialize_tuple(len: usize) false;
        deserialize_tuple_struct(name: &'static str, len: usize) false;
        deserialize_map() true;
        deserialize_struct(name: &'static str, fields: &'static [&'static str]) false;
        deserialize_enum(name: &'static str, variants: &'static [&'static str]) true;
        deserialize_identifier() true;
        deserialize_ignored_any() true;
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

impl<'de, V: Visitor<'de>> Visitor<'de> for Guarded<'_, V> {
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
        visit_u32(u32);
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

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(mut self, inner: D) -> Result<V::Value, D::Error> {
        self.deeper()?;
        let inner = self.with(inner);
        self.inner.visit_some(inner)
    }

    // A type that holds itself does so behind an option, a collection or an enum; a newtype alone is no level.
    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        let inner = self.with(inner);
        self.inner.visit_newtype_struct(inner)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, inner: A) -> Result<V::Value, A::Error> {
        self.deeper()?;
        let inner = Guarded { inner, guard: self.guard, depth: self.depth, counts: self.counts };
        self.inner.visit_seq(inner)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, inner: A) -> Result<V::Value, A::Error> {
        self.deeper()?;
        let inner = Guarded { inner, guard: self.guard, depth: self.depth, counts: self.counts };
        self.inner.visit_map(inner)
    }

    fn visit_enum<A: EnumAccess<'de>>(mut self, inner: A) -> Result<V::Value, A::Error> {
        self.deeper()?;
        let inner = self.with(inner);
        self.inner.visit_enum(inner)
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Guarded<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        let inner = self.with(inner);
        self.inner.deserialize(inner)
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Guarded<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let seed = self.with(seed);
        let element = self.inner.next_element_seed(seed)?;
        self.count(element)
    }

    fn size_hint(&self) -> Option<usize> {
        self.believed(self.inner.size_hint())
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Guarded<'_, A> {
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

impl<'g, 'de, A: EnumAccess<'de>> EnumAccess<'de> for Guarded<'g, A> {
    type Error = A::Error;
    type Variant = Guarded<'g, A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        let seed = self.with(seed);
        let Self { inner, guard, depth, counts } = self;
        let (value, inner) = inner.variant_seed(seed)?;
        Ok((value, Guarded { inner, guard, depth, counts }))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Guarded<'_, A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.with(seed);
        self.inner.newtype_variant_seed(seed)
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        let visitor = Guarded { inner: visitor, guard: self.guard, depth: self.depth, counts: false };
        self.inner.tuple_variant(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let visitor = Guarded { inner: visitor, guard: self.guard, depth: self.depth, counts: false };
        self.inner.struct_variant(fields, visitor)
    }
}
