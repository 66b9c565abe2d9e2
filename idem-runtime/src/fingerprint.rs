//! Unambiguous hashing of payloads, and keys derived for downstream calls.

use std::fmt::{self, Display, Write as _};

use serde::Serialize;
use serde::ser;
use sha2::{Digest, Sha256};

use crate::Key;

/// A SHA-256 digest of a payload: the same key with another fingerprint is a misuse.
///
/// Values that serde would write as the same JSON have the same fingerprint: numbers count by value and not by width,
/// the order of struct fields and of map entries doesn't matter, `Some(x)` is `x`. It doesn't depend on the build, the
/// machine or the order of a `HashMap`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; Self::BYTES]);

impl Fingerprint {
    /// The length of a fingerprint.
    pub const BYTES: usize = 32;

    /// The fingerprint of `value`.
    ///
    /// # Errors
    /// [`FingerprintError`] if the value's own `Serialize` fails, so that nothing is known about it. It is never read as
    /// "no fingerprint".
    ///
    /// ```
    /// use idem_runtime::Fingerprint;
    /// assert_eq!(Fingerprint::of(&("a", 1_u8)).unwrap(), Fingerprint::of(&("a", 1_i64)).unwrap());
    /// assert_ne!(Fingerprint::of(&["ab", "c"]).unwrap(), Fingerprint::of(&["a", "bc"]).unwrap());
    /// ```
    pub fn of<T: Serialize + ?Sized>(value: &T) -> Result<Self, FingerprintError> {
        let mut hash = Sha256::new();
        value.serialize(Hasher(&mut hash))?;
        Ok(Self(hash.finalize().into()))
    }

    /// The fingerprint with these bytes.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes of the fingerprint.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

/// Shows the first bytes only.
impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("…")
    }
}

/// A value whose `Serialize` failed, so that it has no fingerprint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FingerprintError(String);

impl Display for FingerprintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for FingerprintError {}

impl ser::Error for FingerprintError {
    fn custom<T: Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

/// A key for a downstream call: a UUID (version 8, RFC 9562) from SHA-256 over the parent key and the name, which is
/// short and plain enough for every API with idempotency keys.
pub(crate) fn child_key(parent: &Key, name: &str) -> String {
    let mut hash = Sha256::new();
    text(&mut hash, b'k', parent.as_str().as_bytes());
    text(&mut hash, b'c', name.as_bytes());
    let digest: [u8; 32] = hash.finalize().into();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&digest[..16]);
    uuid[6] = 0x80 | (uuid[6] & 0x0f);
    uuid[8] = 0x80 | (uuid[8] & 0x3f);
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        // Writing to a `String` never fails.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn text(hash: &mut Sha256, tag: u8, bytes: &[u8]) {
    hash.update([tag]);
    hash.update((bytes.len() as u64).to_be_bytes());
    hash.update(bytes);
}

/// A serializer that writes each value with a tag and its length, so that the written bytes can be read in one way only.
struct Hasher<'a>(&'a mut Sha256);

impl Hasher<'_> {
    fn tag(self, tag: u8) {
        self.0.update([tag]);
    }

    fn integer(self, negative: bool, magnitude: u128) {
        let bytes = magnitude.to_be_bytes();
        let bytes = &bytes[magnitude.leading_zeros() as usize / 8..];
        self.0.update([if negative { b'-' } else { b'+' }, u8::try_from(bytes.len()).unwrap_or(u8::MAX)]);
        self.0.update(bytes);
    }
}

/// The elements of a sequence, up to an end tag.
struct Elements<'a>(&'a mut Sha256);

/// The entries of a map or struct, hashed one by one and then sorted.
struct Entries<'a> {
    hash: &'a mut Sha256,
    key: [u8; 32],
    sorted: Vec<[[u8; 32]; 2]>,
}

impl<'a> Entries<'a> {
    fn new(hash: &'a mut Sha256) -> Self {
        Self { hash, key: [0; 32], sorted: Vec::new() }
    }

    fn entry<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), FingerprintError> {
        self.sorted.push([*Fingerprint::of(key)?.as_bytes(), *Fingerprint::of(value)?.as_bytes()]);
        Ok(())
    }

    fn finish(mut self) {
        self.sorted.sort_unstable();
        self.hash.update(b"{");
        self.hash.update((self.sorted.len() as u64).to_be_bytes());
        self.sorted.iter().flatten().for_each(|digest| self.hash.update(digest));
    }
}

macro_rules! integers {
    ($($method:ident($type:ty))*) => { $(
        fn $method(self, value: $type) -> Result<(), FingerprintError> {
            self.integer(i128::from(value) < 0, i128::from(value).unsigned_abs());
            Ok(())
        }
    )* };
}

impl<'a> ser::Serializer for Hasher<'a> {
    type Ok = ();
    type Error = FingerprintError;
    type SerializeSeq = Elements<'a>;
    type SerializeTuple = Elements<'a>;
    type SerializeTupleStruct = Elements<'a>;
    type SerializeTupleVariant = Variant<'a>;
    type SerializeMap = Entries<'a>;
    type SerializeStruct = Entries<'a>;
    type SerializeStructVariant = Variant<'a>;

    integers! {
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64) serialize_i128(i128)
        serialize_u8(u8) serialize_u16(u16) serialize_u32(u32) serialize_u64(u64)
    }

    fn serialize_u128(self, value: u128) -> Result<(), FingerprintError> {
        self.integer(false, value);
        Ok(())
    }

    fn serialize_bool(self, value: bool) -> Result<(), FingerprintError> {
        self.tag(if value { b't' } else { b'f' });
        Ok(())
    }

    fn serialize_f32(self, value: f32) -> Result<(), FingerprintError> {
        self.serialize_f64(f64::from(value))
    }

    fn serialize_f64(self, value: f64) -> Result<(), FingerprintError> {
        // One pattern of bits for each value: there are two zeros and many NaNs.
        let bits = if value.is_nan() { f64::NAN.to_bits() } else { (value + 0.0).to_bits() };
        text(self.0, b'd', &bits.to_be_bytes());
        Ok(())
    }

    fn serialize_char(self, value: char) -> Result<(), FingerprintError> {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<(), FingerprintError> {
        text(self.0, b's', value.as_bytes());
        Ok(())
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<(), FingerprintError> {
        text(self.0, b'b', value);
        Ok(())
    }

    fn serialize_none(self) -> Result<(), FingerprintError> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), FingerprintError> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), FingerprintError> {
        self.tag(b'0');
        Ok(())
    }

    fn serialize_unit_struct(self, _name: &'static str) -> Result<(), FingerprintError> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
    ) -> Result<(), FingerprintError> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        value: &T,
    ) -> Result<(), FingerprintError> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), FingerprintError> {
        let mut entries = Entries::new(self.0);
        entries.entry(variant, value)?;
        entries.finish();
        Ok(())
    }

    fn serialize_seq(self, _len: Option<usize>) -> Result<Elements<'a>, FingerprintError> {
        self.0.update(b"[");
        Ok(Elements(self.0))
    }

    fn serialize_tuple(self, len: usize) -> Result<Elements<'a>, FingerprintError> {
        self.serialize_seq(Some(len))
    }

    fn serialize_tuple_struct(self, _name: &'static str, len: usize) -> Result<Elements<'a>, FingerprintError> {
        self.serialize_seq(Some(len))
    }

    fn serialize_tuple_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Variant<'a>, FingerprintError> {
        Ok(Variant::new(self.0, variant, true))
    }

    fn serialize_map(self, _len: Option<usize>) -> Result<Entries<'a>, FingerprintError> {
        Ok(Entries::new(self.0))
    }

    fn serialize_struct(self, _name: &'static str, _len: usize) -> Result<Entries<'a>, FingerprintError> {
        Ok(Entries::new(self.0))
    }

    fn serialize_struct_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Variant<'a>, FingerprintError> {
        Ok(Variant::new(self.0, variant, false))
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<(), FingerprintError> {
        self.serialize_str(&value.to_string())
    }
}

macro_rules! elements {
    ($($trait:ident::$method:ident)*) => { $(
        impl ser::$trait for Elements<'_> {
            type Ok = ();
            type Error = FingerprintError;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), FingerprintError> {
                value.serialize(Hasher(self.0))
            }

            fn end(self) -> Result<(), FingerprintError> {
                self.0.update(b"]");
                Ok(())
            }
        }
    )* };
}

elements! { SerializeSeq::serialize_element SerializeTuple::serialize_element SerializeTupleStruct::serialize_field }

impl ser::SerializeMap for Entries<'_> {
    type Ok = ();
    type Error = FingerprintError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), FingerprintError> {
        self.key = *Fingerprint::of(key)?.as_bytes();
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), FingerprintError> {
        self.sorted.push([self.key, *Fingerprint::of(value)?.as_bytes()]);
        Ok(())
    }

    fn end(self) -> Result<(), FingerprintError> {
        self.finish();
        Ok(())
    }
}

impl ser::SerializeStruct for Entries<'_> {
    type Ok = ();
    type Error = FingerprintError;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), FingerprintError> {
        self.entry(key, value)
    }

    fn end(self) -> Result<(), FingerprintError> {
        self.finish();
        Ok(())
    }
}

/// The payload of an enum variant: a map with one entry, as JSON has it.
struct Variant<'a> {
    outer: &'a mut Sha256,
    name: &'static str,
    inner: Sha256,
    /// The fields of a struct variant; a tuple variant is hashed as it comes.
    fields: Option<Vec<[[u8; 32]; 2]>>,
}

impl<'a> Variant<'a> {
    fn new(outer: &'a mut Sha256, name: &'static str, tuple: bool) -> Self {
        let mut inner = Sha256::new();
        if tuple {
            inner.update(b"[");
        }
        Self { outer, name, inner, fields: (!tuple).then(Vec::new) }
    }

    fn finish(mut self) -> Result<(), FingerprintError> {
        match self.fields {
            Some(sorted) => Entries { hash: &mut self.inner, key: [0; 32], sorted }.finish(),
            None => self.inner.update(b"]"),
        }
        let mut entries = Entries::new(self.outer);
        entries.sorted.push([*Fingerprint::of(self.name)?.as_bytes(), self.inner.finalize().into()]);
        entries.finish();
        Ok(())
    }
}

impl ser::SerializeTupleVariant for Variant<'_> {
    type Ok = ();
    type Error = FingerprintError;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), FingerprintError> {
        value.serialize(Hasher(&mut self.inner))
    }

    fn end(self) -> Result<(), FingerprintError> {
        self.finish()
    }
}

impl ser::SerializeStructVariant for Variant<'_> {
    type Ok = ();
    type Error = FingerprintError;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), FingerprintError> {
        let entry = [*Fingerprint::of(key)?.as_bytes(), *Fingerprint::of(value)?.as_bytes()];
        self.fields.get_or_insert_default().push(entry);
        Ok(())
    }

    fn end(self) -> Result<(), FingerprintError> {
        self.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, HashMap};

    fn of<T: Serialize>(value: T) -> Fingerprint {
        Fingerprint::of(&value).unwrap()
    }

    #[derive(Serialize)]
    enum Shape {
        Unit,
        Newtype(u8),
        Tuple(u8, u8),
        Struct { a: u8, b: u8 },
    }

    #[test]
    fn equal_json_has_equal_fingerprints() {
        #[derive(Serialize)]
        struct One {
            b: u64,
            a: Option<&'static str>,
        }
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(of(One { b: 1, a: Some("x") }), of(json(r#"{"a":"x","b":1}"#)));
        assert_eq!(of(One { b: 1, a: None }), of(json(r#"{"a":null,"b":1}"#)));
        assert_eq!(of(Shape::Unit), of("Unit"));
        assert_eq!(of(Shape::Newtype(1)), of(json(r#"{"Newtype":1}"#)));
        assert_eq!(of(Shape::Tuple(1, 2)), of(json(r#"{"Tuple":[1,2]}"#)));
        assert_eq!(of(Shape::Struct { a: 1, b: 2 }), of(json(r#"{"Struct":{"b":2,"a":1}}"#)));
        let hash: HashMap<_, _> = (0..100).map(|n| (n.to_string(), n)).collect();
        let tree: BTreeMap<_, _> = hash.clone().into_iter().collect();
        assert_eq!(of(hash), of(tree));
        assert_eq!(of(-0.0), of(0.0));
    }

    #[test]
    fn different_values_have_different_fingerprints() {
        let all = [
            of(()),
            of(false),
            of(true),
            of(0),
            of(256),
            of(-1),
            of(1),
            of(1.0),
            of(""),
            of("0"),
            of("1"),
            of([""; 0]),
            of([""]),
            of(["", ""]),
            of([["", ""]]),
            of([[""], [""]]),
            of(["ab", "c"]),
            of(["a", "bc"]),
            of(u128::MAX),
            of(i128::MIN),
            of(BTreeMap::<&str, u8>::new()),
            of(BTreeMap::from([("a", 1)])),
            of(BTreeMap::from([("a", 2)])),
            of(BTreeMap::from([("a", 1), ("b", 2)])),
            of(BTreeMap::from([("a", 2), ("b", 1)])),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{i} is met again");
        }
    }

    #[test]
    fn a_value_that_fails_to_serialize_has_no_fingerprint() {
        struct Broken;
        impl Serialize for Broken {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(ser::Error::custom("no"))
            }
        }
        assert!(Fingerprint::of(&[Broken]).is_err());
    }

    #[test]
    fn values_are_pinned() {
        // A change here re-opens no operation, but turns duplicates in flight during an upgrade into mismatches.
        assert_eq!(format!("{:?}", of(("order", 42, [1.5]))), "79c9328e…");
    }

    #[test]
    fn child_keys_are_stable_uuids() {
        let key = Key::new("shop::ship", "order:42").unwrap();
        let child = child_key(&key, "charge");
        assert_eq!(child, child_key(&key, "charge"));
        assert_ne!(child, child_key(&key, "refund"));
        assert_eq!((child.len(), &child[14..15]), (36, "8"));
        assert_eq!(child, "b2b1494d-835d-816f-8dae-fa37552560b2");
    }
}
