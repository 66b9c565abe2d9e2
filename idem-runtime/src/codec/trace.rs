//! Traces of values in the data model of serde, to compare a value with the copy that a codec wrote and read back.
//!
//! A codec may lose a distinction of the data model: JSON writes `Some(None)` like `None`. A trace keeps all
//! distinctions. So two different values of one type have different traces, unless their own `Serialize` hides the
//! difference. Traces ignore the order of elements and entries, because the order of a hash table is random.

use std::fmt::{self, Display, Write as _};

use serde::Serialize;
use serde::ser::{self, Serializer};

/// Trace of a value in the data model of serde.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Trace {
    /// A value without data, for example `None`. The text names the kind of value.
    Plain(&'static str),
    /// A number, with the name of its kind. A float is represented by its bits.
    Number(&'static str, u128),
    Text(&'static str, Box<[u8]>),
    /// A value that consists of parts: its kind, the name of its variant (empty for other values), and its parts.
    Parts(&'static str, &'static str, Vec<(FieldName, Trace)>),
}

/// Name of the field that holds a part; empty for elements of sequences and entries of maps.
type FieldName = &'static str;

impl Trace {
    pub(super) fn of<T: Serialize + ?Sized>(value: &T) -> Result<Self, NoTrace> {
        value.serialize(Tracer)
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Plain(kind) | Self::Number(kind, _) | Self::Text(kind, _) | Self::Parts(kind, ..) => kind,
        }
    }

    /// Describes the first difference between this trace and `read`, the trace of the value that was read back; `None`
    /// if the traces are equal. The text names fields and variants of the type, and quotes no value.
    pub(super) fn difference(&self, read: &Self) -> Option<String> {
        let mut path = String::new();
        let what = self.first_difference(read, &mut path)?;
        let path = path.trim_start_matches('.');
        Some(if path.is_empty() { what } else { format!("`{path}`: {what}") })
    }

    fn first_difference(&self, read: &Self, path: &mut String) -> Option<String> {
        if self == read {
            return None;
        }
        if let (Self::Parts(kind, name, parts), Self::Parts(read_kind, read_name, read_parts)) = (self, read)
            && (kind, name, parts.len()) == (read_kind, read_name, read_parts.len())
        {
            let differ = parts.iter().zip(read_parts).find(|(part, read)| part != read);
            let ((place, part), (_, read)) = differ?;
            for step in [*name, *place].into_iter().filter(|step| !step.is_empty()) {
                // The result is ignored, because writing to a `String` never fails.
                let _ = write!(path, ".{step}");
            }
            return part.first_difference(read, path);
        }
        Some(match (self, read) {
            (Self::Parts(kind, name, _), Self::Parts(read_kind, read_name, _))
                if kind == read_kind && name != read_name =>
            {
                format!("the variant `{name}` is read back as `{read_name}`")
            }
            _ if self.kind() == read.kind() => format!("{} is read back as another one", self.kind()),
            _ => format!("{} is read back as {}", self.kind(), read.kind()),
        })
    }
}

/// Error for a value whose own `Serialize` failed.
#[derive(Debug)]
pub(super) struct NoTrace;

impl Display for NoTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no trace")
    }
}

impl std::error::Error for NoTrace {}

impl ser::Error for NoTrace {
    fn custom<T: Display>(_: T) -> Self {
        Self
    }
}

struct Tracer;

/// Trace of a value with parts, while serde still adds parts to the trace.
struct TracedParts {
    kind: &'static str,
    name: &'static str,
    list: Vec<(FieldName, Trace)>,
    is_sorted: bool,
}

impl TracedParts {
    const fn new(kind: &'static str, name: &'static str) -> Self {
        Self { kind, name, list: Vec::new(), is_sorted: false }
    }

    /// Starts the trace of a sequence or a map. The parts are sorted at the end, so that their order does not matter.
    fn unordered(kind: &'static str) -> Self {
        Self { is_sorted: true, ..Self::new(kind, "") }
    }

    fn push<T: Serialize + ?Sized>(&mut self, place: FieldName, value: &T) -> Result<(), NoTrace> {
        self.list.push((place, Trace::of(value)?));
        Ok(())
    }

    fn finish(mut self) -> Trace {
        if self.is_sorted {
            self.list.sort_unstable();
        }
        Trace::Parts(self.kind, self.name, self.list)
    }
}

macro_rules! numbers {
    ($($method:ident($type:ty) $kind:literal $bits:expr;)*) => { $(
        fn $method(self, value: $type) -> Result<Trace, NoTrace> {
            Ok(Trace::Number($kind, $bits(value)))
        }
    )* };
}

impl Serializer for Tracer {
    type Ok = Trace;
    type Error = NoTrace;
    type SerializeSeq = TracedParts;
    type SerializeTuple = TracedParts;
    type SerializeTupleStruct = TracedParts;
    type SerializeTupleVariant = TracedParts;
    type SerializeMap = TracedParts;
    type SerializeStruct = TracedParts;
    type SerializeStructVariant = TracedParts;

    numbers! {
        serialize_bool(bool) "a bool" u128::from;
        serialize_i8(i8) "an i8" |value: i8| u128::from(value.cast_unsigned());
        serialize_i16(i16) "an i16" |value: i16| u128::from(value.cast_unsigned());
        serialize_i32(i32) "an i32" |value: i32| u128::from(value.cast_unsigned());
        serialize_i64(i64) "an i64" |value: i64| u128::from(value.cast_unsigned());
        serialize_i128(i128) "an i128" i128::cast_unsigned;
        serialize_u8(u8) "a u8" u128::from;
        serialize_u16(u16) "a u16" u128::from;
        serialize_u32(u32) "a u32" u128::from;
        serialize_u64(u64) "a u64" u128::from;
        serialize_u128(u128) "a u128" u128::from;
        serialize_f32(f32) "an f32" |value: f32| u128::from(value.to_bits());
        serialize_f64(f64) "an f64" |value: f64| u128::from(value.to_bits());
        serialize_char(char) "a char" |value: char| u128::from(u32::from(value));
    }

    fn serialize_str(self, value: &str) -> Result<Trace, NoTrace> {
        Ok(Trace::Text("a text", value.as_bytes().into()))
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<Trace, NoTrace> {
        Ok(Trace::Text("bytes", value.into()))
    }

    fn serialize_none(self) -> Result<Trace, NoTrace> {
        Ok(Trace::Plain("`None`"))
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Trace, NoTrace> {
        let mut parts = TracedParts::new("`Some`", "");
        parts.push("", value)?;
        Ok(parts.finish())
    }

    fn serialize_unit(self) -> Result<Trace, NoTrace> {
        Ok(Trace::Plain("`()`"))
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Trace, NoTrace> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<Trace, NoTrace> {
        Ok(TracedParts::new("a variant", variant).finish())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<Trace, NoTrace> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<Trace, NoTrace> {
        let mut parts = TracedParts::new("a variant", variant);
        parts.push("", value)?;
        Ok(parts.finish())
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<TracedParts, NoTrace> {
        Ok(TracedParts::unordered("a sequence"))
    }

    fn serialize_tuple(self, _: usize) -> Result<TracedParts, NoTrace> {
        Ok(TracedParts::new("a tuple", ""))
    }

    fn serialize_tuple_struct(self, _: &'static str, len: usize) -> Result<TracedParts, NoTrace> {
        self.serialize_tuple(len)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<TracedParts, NoTrace> {
        Ok(TracedParts::new("a variant", variant))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<TracedParts, NoTrace> {
        Ok(TracedParts::unordered("a map"))
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<TracedParts, NoTrace> {
        Ok(TracedParts::new("a struct", ""))
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<TracedParts, NoTrace> {
        Ok(TracedParts::new("a variant", variant))
    }
}

macro_rules! parts {
    ($($of:ident::$method:ident($($name:ident)?) at $place:expr;)*) => { $(
        impl ser::$of for TracedParts {
            type Ok = Trace;
            type Error = NoTrace;

            fn $method<T: Serialize + ?Sized>(&mut self, $($name: &'static str,)? value: &T) -> Result<(), NoTrace> {
                self.push($place, value)
            }

            fn end(self) -> Result<Trace, NoTrace> {
                Ok(self.finish())
            }
        }
    )* };
}

parts! {
    SerializeSeq::serialize_element() at "";
    SerializeTuple::serialize_element() at "";
    SerializeTupleStruct::serialize_field() at "";
    SerializeTupleVariant::serialize_field() at "";
    SerializeStruct::serialize_field(name) at name;
    SerializeStructVariant::serialize_field(name) at name;
}

impl ser::SerializeMap for TracedParts {
    type Ok = Trace;
    type Error = NoTrace;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), NoTrace> {
        let mut entry = TracedParts::new("an entry", "");
        entry.push("", key)?;
        self.list.push(("", entry.finish()));
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), NoTrace> {
        let value = Trace::of(value)?;
        match self.list.last_mut() {
            Some((_, Trace::Parts(_, _, entry))) => {
                entry.push(("", value));
                Ok(())
            }
            _ => Err(NoTrace),
        }
    }

    fn end(self) -> Result<Trace, NoTrace> {
        Ok(self.finish())
    }
}
