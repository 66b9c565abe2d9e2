//! Unambiguous hashing of payloads, and keys derived for downstream calls.
//!
//! A fingerprint of version 1 is the byte 1, then the first 31 bytes of SHA-256 over `idem fingerprint 1`, a line feed,
//! and the canonical form of the JSON that serde would write:
//!
//! | JSON | canonical form |
//! |---|---|
//! | `null` | `0` |
//! | `true`, `false` | `t`, `f` |
//! | a text | `s`, its length, its UTF-8 bytes |
//! | a number | `n`, a length, the number without zeros at its ends: `15e-1` for 1.5, `-12e2` for -1200, `0e0` |
//! | an array of whole numbers from 0 to 255, at least one | `b`, the number of elements, each element as a byte |
//! | any other array | `[`, its elements, `]` |
//! | an array that serde collects from a hash table (a set, or an iterator) | `*`, the count, SHA-256 of each, sorted |
//! | an object | `{`, the number of entries, and for each SHA-256 of its name and SHA-256 of its value, sorted |
//!
//! A digest that the caller made has no JSON, and is hashed as `d`, its length and its bytes.
//!
//! Lengths and counts are eight bytes, big-endian. Of several entries with the same name, only the last entry is
//! hashed.

use std::fmt::{self, Display};
use std::io;

use serde::Serialize;
use serde::ser;
use sha2::{Digest, Sha256};

use super::Key;
use crate::codec::bytes;

/// A hash of a payload: the same key with a different fingerprint is a misuse.
///
/// Values that serde writes as equal JSON have equal fingerprints, and other values have other fingerprints, except
/// hash sets (see below). A number is hashed by the value that its JSON text shows: `1`, `1.0` and `1e0` are one
/// number, `-0.0` is 0, and `0.1` has one fingerprint as an `f32` and as an `f64`. NaN and the infinities are `null`,
/// like an absent value. The order of struct fields and of map entries doesn't matter. The fingerprint does not depend
/// on the build, the machine or the order of a `HashMap` or a `HashSet`.
///
/// A `HashSet`, of the standard library or of `hashbrown`, iterates in a random order, so the library makes its
/// fingerprint independent of the order of its elements. A hash set therefore has another fingerprint than an array
/// with the same elements, because the fingerprint of an array depends on the order: `[from, to]` is not `[to, from]`.
/// The library recognises a hash set by the name of its type. This name reaches the fingerprint only through
/// [`Serializer::collect_seq`], which serde's own implementations call. A type that writes its elements one after
/// another with `serialize_seq`, or a serializer in between (`erased_serde`, `serde_json::to_value`, the buffer of an
/// internally tagged enum), hides that name. In these cases, sort the elements, or use a `BTreeSet`.
///
/// [`Serializer::collect_seq`]: serde::Serializer::collect_seq
///
/// Bytes have the fingerprint of an array of numbers, as in JSON. Hashing a `Bytes` takes as long as hashing a text of
/// the same length, and hashing a `Vec<u8>` takes twice as long. If a digest of a large upload already exists, the
/// upload need not be hashed again: see [`PayloadDigest`].
///
/// The first byte of a fingerprint is the [version](Fingerprint::version) of the rules above. Fingerprints of different
/// versions can't be compared.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; Self::BYTES]);

impl Fingerprint {
    /// Length of a fingerprint, in bytes.
    pub const BYTES: usize = 32;
    /// Version of the fingerprints that [`of`](Fingerprint::of) makes.
    pub const VERSION: u8 = 1;

    /// Returns the fingerprint of `value`.
    ///
    /// # Errors
    /// [`FingerprintError`] if the value's own `Serialize` fails. Such a failure is never treated as a missing
    /// fingerprint.
    ///
    /// ```
    /// use idem_runtime::key::Fingerprint;
    /// assert_eq!(Fingerprint::of(&("a", 1_u8)).unwrap(), Fingerprint::of(&("a", 1.0_f32)).unwrap());
    /// assert_ne!(Fingerprint::of(&["ab", "c"]).unwrap(), Fingerprint::of(&["a", "bc"]).unwrap());
    /// ```
    pub fn of<T: Serialize + ?Sized>(value: &T) -> Result<Self, FingerprintError> {
        let mut hash = Sha256::new_with_prefix(PREFIX);
        value.serialize(Hasher::new(&mut hash))?;
        Ok(Self::from_hash(hash))
    }

    /// Returns the fingerprint of an object with these entries, whose names differ.
    #[cfg(feature = "http")]
    pub(crate) fn of_object<const N: usize>(entries: [[SumHash; 2]; N]) -> Self {
        let mut hash = Sha256::new_with_prefix(PREFIX);
        object(&mut hash, entries);
        Self::from_hash(hash)
    }

    fn from_hash(hash: Sha256) -> Self {
        let digest: [u8; 32] = hash.finalize().into();
        let mut bytes = [Self::VERSION; Self::BYTES];
        bytes[1..].copy_from_slice(&digest[..Self::BYTES - 1]);
        Self(bytes)
    }

    /// Makes a fingerprint from its bytes.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Bytes of the fingerprint.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// Version of the canonical form that was hashed: the first byte.
    pub const fn version(&self) -> u8 {
        self.0[0]
    }

    /// Returns whether this fingerprint and `other` have the same version. Fingerprints of different versions don't
    /// show whether the payloads are equal.
    pub const fn is_comparable(&self, other: &Self) -> bool {
        self.version() == other.version()
    }

    /// Returns the last 64 bits of the fingerprint: a number that differs between payloads.
    pub(crate) fn seed(&self) -> u64 {
        self.0.last_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }

    /// Returns the beginning of the hash, for messages: eight hexadecimal digits.
    pub fn short(&self) -> impl Display {
        struct Short(u32);
        impl Display for Short {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:08x}", self.0)
            }
        }
        let [_, a, b, c, d, ..] = self.0;
        Short(u32::from_be_bytes([a, b, c, d]))
    }
}

/// Shows only the beginning of the hash.
impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}…", self.short())
    }
}

/// Error for a value that has no fingerprint, because its `Serialize` failed.
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

/// Returns a key for a downstream call: a UUID (version 8, RFC 9562) from SHA-256 over the namespace of the store, the
/// parent key and the name. The UUID is short and plain enough for every API with idempotency keys.
///
/// The UUID depends only on these three texts. Two applications need different namespaces, or they make the same child
/// keys. A parent key that is used again after its retention gives the same child keys as before, and the other API may
/// still return its old answer for these keys.
pub(crate) fn child_key(namespace: &str, parent: &Key, name: &str) -> String {
    let mut hash = Sha256::new_with_prefix(b"idem child key 1\n");
    for part in [namespace, parent.as_str(), name] {
        text(&mut hash, b's', part.as_bytes());
    }
    let digest: [u8; 32] = hash.finalize().into();
    let [bits @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = digest;
    uuid(u128::from_be_bytes(bits), 8)
}

/// Formats `bits` as a UUID of the version `version` (RFC 9562). The version and the variant of the UUID replace
/// six bits.
pub(crate) fn uuid(bits: u128, version: u8) -> String {
    let bits = bits & !(0xf << 76) & !(0x3 << 62) | u128::from(version) << 76 | 0x2 << 62;
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

const PREFIX: &[u8] = b"idem fingerprint 1\n";

/// An existing digest in place of its payload: `fingerprint = PayloadDigest::new(&upload.sha256)`.
///
/// A `PayloadDigest` can be the whole payload, or a part of the payload. Hashing a `PayloadDigest` takes as long as
/// hashing a few bytes, however large the upload is. Its fingerprint differs from the fingerprint of the same bytes as
/// a plain payload, and from the fingerprint of the upload itself. So let all producers and consumers of a handler use
/// the digest, or let all use the upload; otherwise a duplicate is reported as a mismatch.
///
/// Two payloads with equal digests have equal fingerprints, so use a cryptographic digest. Make the digest from the
/// bytes that *arrived*: a digest that the sender merely claims proves nothing about the payload. A digest of fewer
/// bytes than [`MIN_BYTES`](Self::MIN_BYTES), such as a CRC or an absent header, is refused
/// ([`Error::InvalidFingerprint`](crate::Error::InvalidFingerprint)), and the body does not run. The bytes of a digest
/// and its text (in hexadecimal or Base64) have different fingerprints.
///
/// A serializer that computes no fingerprint gets the bytes of the digest.
///
/// ```
/// use idem_runtime::key::{Fingerprint, PayloadDigest};
///
/// let (sha256, other) = ([7; 32], [8; 32]);
/// let of = |sha256| Fingerprint::of(&("invoice.pdf", PayloadDigest::new(sha256)));
/// assert_eq!(of(sha256)?, of(sha256)?);
/// assert_ne!(of(sha256)?, of(other)?);
/// assert_ne!(of(sha256)?, Fingerprint::of(&("invoice.pdf", sha256))?);
/// assert!(Fingerprint::of(&PayloadDigest::new(b"")).is_err());
/// # Ok::<(), idem_runtime::key::FingerprintError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PayloadDigest<D>(D);

impl PayloadDigest<()> {
    /// Length of the shortest digest that is accepted, in bytes.
    pub const MIN_BYTES: usize = 16;
}

impl<D: AsRef<[u8]>> PayloadDigest<D> {
    /// Makes a digest from its bytes: an array, a slice, or the output of a hash function.
    pub const fn new(digest: D) -> Self {
        Self(digest)
    }
}

impl<D: AsRef<[u8]>> Serialize for PayloadDigest<D> {
    fn serialize<S: ser::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Bytes<'a>(&'a [u8]);
        impl Serialize for Bytes<'_> {
            fn serialize<S: ser::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_bytes(self.0)
            }
        }
        serializer.serialize_newtype_struct(DIGEST, &Bytes(self.0.as_ref()))
    }
}

/// Type name by which [`Hasher`] recognises a [`PayloadDigest`].
const DIGEST: &str = "$idem_runtime::private::PayloadDigest";

type Sum = [u8; 32];

/// SHA-256 of a name or a value, from which the hash of an object is computed. A name or value that occurs in many
/// objects is hashed only once.
#[cfg(feature = "http")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumHash(Sum);

#[cfg(feature = "http")]
impl SumHash {
    pub(crate) fn of<T: Serialize + ?Sized>(value: &T) -> Result<Self, FingerprintError> {
        sum(value).map(Self)
    }

    /// Returns the SHA-256 of an object with these entries, whose names differ. The result can be a value in another
    /// object.
    pub(crate) fn of_object<const N: usize>(entries: [[Self; 2]; N]) -> Self {
        let mut hash = Sha256::new();
        object(&mut hash, entries);
        Self(hash.finalize().into())
    }
}

/// Hashes an object with these entries, whose names differ.
#[cfg(feature = "http")]
fn object<const N: usize>(hash: &mut Sha256, mut entries: [[SumHash; 2]; N]) {
    entries.sort_unstable_by_key(|[SumHash(name), _]| *name);
    hash.update(b"{");
    hash.update((N as u64).to_be_bytes());
    entries.as_flattened().iter().for_each(|SumHash(sum)| hash.update(sum));
}

fn text(hash: &mut Sha256, tag: u8, bytes: &[u8]) {
    hash.update([tag]);
    hash.update((bytes.len() as u64).to_be_bytes());
    hash.update(bytes);
}

fn digest(hash: &mut Sha256, digest: &[u8]) -> Result<(), FingerprintError> {
    if digest.len() < PayloadDigest::MIN_BYTES {
        let (is, least) = (digest.len(), PayloadDigest::MIN_BYTES);
        return Err(ser::Error::custom(format_args!("a digest of {is} bytes, and not of at least {least}")));
    }
    text(hash, b'd', digest);
    Ok(())
}

/// Returns the SHA-256 of the canonical form of a name or a value in an object.
fn sum<T: Serialize + ?Sized>(value: &T) -> Result<Sum, FingerprintError> {
    let mut hash = Sha256::new();
    value.serialize(Hasher::new(&mut hash))?;
    Ok(hash.finalize().into())
}

/// Returns whether a collection or an iterator of this type yields its elements in the random order of a hash table.
///
/// The `type_name` is the only information that serde passes on about a collection. If a later compiler spells the name
/// in another way, a test fails, because fingerprints then depend on the order of the elements.
fn is_unordered<I: ?Sized>() -> bool {
    /// Adapters that keep the order of their inner iterator, and yield or skip its elements.
    const ADAPTERS: [&str; 5] =
        ["map::Map<", "copied::Copied<", "cloned::Cloned<", "filter::Filter<", "filter_map::FilterMap<"];
    const TABLES: [&str; 4] =
        ["std::collections::hash::set::", "std::collections::hash::map::", "hashbrown::set::", "hashbrown::map::"];
    let mut name = std::any::type_name::<I>();
    loop {
        name = name.trim_start_matches('&').trim_start_matches("mut ");
        let adapted = name.strip_prefix("core::iter::adapters::");
        match adapted.and_then(|name| ADAPTERS.iter().find_map(|adapter| name.strip_prefix(adapter))) {
            Some(inner) => name = inner,
            None => return TABLES.iter().any(|table| name.starts_with(table)),
        }
    }
}

/// A serializer that hashes the canonical form.
struct Hasher<'a> {
    hash: &'a mut Sha256,
    position: Position<'a>,
}

/// Position of a value inside of the value that contains it.
enum Position<'a> {
    /// The value is neither an element of an array nor the name of an entry.
    Plain,
    /// The value is an element of this array.
    Element(&'a mut Array),
    /// The value is the name of an entry. A name is a text in JSON: `1` becomes `"1"`. A value that can't be a name in
    /// JSON is hashed like any other value.
    Name,
}

/// An array while its elements are hashed. The array is hashed as bytes only if all its elements prove to be bytes.
#[derive(Default)]
struct Array {
    /// Elements of the array, as long as all elements are bytes.
    bytes: Vec<u8>,
    /// True once an element was not a byte. From then on each element is hashed individually.
    mixed: bool,
}

impl Array {
    /// Hashes the bytes so far as elements of an array of values, because the next element is not a byte.
    fn mix(&mut self, hash: &mut Sha256) {
        if !self.mixed {
            self.mixed = true;
            hash.update(b"[");
            let mut number = itoa::Buffer::new();
            for byte in std::mem::take(&mut self.bytes) {
                Hasher::new(hash).number(number.format(byte));
            }
        }
    }

    fn finish(mut self, hash: &mut Sha256) {
        match self.mixed || self.bytes.is_empty() {
            true => {
                self.mix(hash);
                hash.update(b"]");
            }
            false => text(hash, b'b', &self.bytes),
        }
    }
}

/// Returns the whole number from 0 to 255 that these digits denote, or `None`.
fn byte(sign: &str, whole: &str, exponent: i128) -> Option<u8> {
    let zeros = u32::try_from(exponent).ok().filter(|zeros| *zeros <= 2)?;
    match (sign, whole.len()) {
        ("", 1..=3) => u8::try_from(whole.parse::<u32>().ok()? * 10_u32.pow(zeros)).ok(),
        _ => None,
    }
}

impl<'a> Hasher<'a> {
    fn new(hash: &'a mut Sha256) -> Self {
        Self { hash, position: Position::Plain }
    }

    fn reborrow(&mut self) -> Hasher<'_> {
        let position = match &mut self.position {
            Position::Plain => Position::Plain,
            Position::Element(array) => Position::Element(array),
            Position::Name => Position::Name,
        };
        Hasher { hash: self.hash, position }
    }

    /// Returns the hash to which the value is written. Not called for a byte in an array that has only bytes so far.
    fn out(self) -> &'a mut Sha256 {
        if let Position::Element(array) = self.position {
            array.mix(self.hash);
        }
        self.hash
    }

    /// Returns whether the value is the name of an entry.
    fn is_name(&self) -> bool {
        matches!(self.position, Position::Name)
    }

    /// Returns whether the value is an element of an array that has only bytes so far.
    fn follows_bytes(&self) -> bool {
        matches!(&self.position, Position::Element(array) if !array.mixed)
    }

    fn tag(self, tag: u8) {
        self.out().update([tag]);
    }

    /// Hashes a number from 0 to 255.
    fn byte(self, byte: u8) {
        match self.position {
            Position::Element(array) if !array.mixed => array.bytes.push(byte),
            _ => self.number(itoa::Buffer::new().format(byte)),
        }
    }

    /// Hashes a number in its JSON form.
    fn number(self, written: &str) {
        if self.is_name() {
            return text(self.hash, b's', written.as_bytes());
        }
        let (sign, rest) = written.strip_prefix('-').map_or(("", written), |rest| ("-", rest));
        let (digits, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let Ok(exponent) = exponent.parse::<i64>() else {
            // An exponent that does not fit an `i64` exists only as text (serde_json's `arbitrary_precision`): hash
            // the text.
            return text(self.out(), b'N', written.as_bytes());
        };
        // Drop the zeros at both ends. `exponent` is the power of ten of the last remaining digit.
        let (mut whole, mut significant) = (whole, fraction.trim_end_matches('0'));
        let mut exponent = i128::from(exponent) - significant.len() as i128;
        if significant.is_empty() {
            let all = whole.len();
            whole = whole.trim_end_matches('0');
            exponent += (all - whole.len()) as i128;
        }
        whole = whole.trim_start_matches('0');
        if whole.is_empty() {
            significant = significant.trim_start_matches('0');
        }
        // If the array has only bytes so far and this number is a byte too, the array can still be hashed as bytes.
        let mut number = itoa::Buffer::new();
        let is_zero = whole.is_empty() && significant.is_empty();
        if self.follows_bytes() && significant.is_empty() {
            let value = if is_zero { Some(0) } else { byte(sign, whole, exponent) };
            if let Some(value) = value {
                return self.byte(value);
            }
        }
        // Hash the canonical number.
        let parts = match is_zero {
            true => ["0e0", "", "", "", ""],
            false => [sign, whole, significant, "e", number.format(exponent)],
        };
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let hash = self.out();
        hash.update([b'n']);
        hash.update((len as u64).to_be_bytes());
        for part in parts {
            hash.update(part);
        }
    }
}

/// A float as `serde_json` writes it. The shortest text is not unique: halfway between two candidates (7202.28125 as an
/// `f32`) other libraries choose the other candidate.
#[derive(Default)]
struct FloatText {
    text: [u8; 32],
    len: usize,
}

impl FloatText {
    fn of(value: impl Serialize) -> Result<Self, FingerprintError> {
        let mut written = Self::default();
        serde_json::to_writer(&mut written, &value).map_err(ser::Error::custom)?;
        Ok(written)
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.text[..self.len]).unwrap_or_default()
    }
}

/// The longest text is `-2.2250738585072014e-308`.
impl io::Write for FloatText {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let end = self.len + text.len();
        self.text.get_mut(self.len..end).ok_or(io::ErrorKind::WriteZero)?.copy_from_slice(text);
        self.len = end;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Elements of an array.
struct Elements<'a> {
    hash: &'a mut Sha256,
    array: Array,
}

impl Elements<'_> {
    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), FingerprintError> {
        value.serialize(Hasher { hash: self.hash, position: Position::Element(&mut self.array) })
    }
}

/// Entries of an object, each hashed individually and then sorted.
#[derive(Default)]
struct Entries {
    name: Sum,
    entries: Vec<[Sum; 2]>,
}

impl Entries {
    fn field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), FingerprintError> {
        self.entries.push([sum(name)?, sum(value)?]);
        Ok(())
    }

    fn finish(mut self, hash: &mut Sha256) {
        // The sort is stable: the last of several entries with the same name stays last, and JSON readers use the
        // last one.
        self.entries.sort_by_key(|[name, _]| *name);
        let counts = |at: usize| self.entries.get(at + 1).is_none_or(|[next, _]| *next != self.entries[at][0]);
        let entries = (0..self.entries.len()).filter(|at| counts(*at));
        hash.update(b"{");
        hash.update((entries.clone().count() as u64).to_be_bytes());
        entries.for_each(|at| hash.update(self.entries[at].as_flattened()));
    }
}

struct Object<'a> {
    hash: &'a mut Sha256,
    entries: Entries,
}

impl<'a> Object<'a> {
    fn new(hash: &'a mut Sha256) -> Self {
        Self { hash, entries: Entries::default() }
    }

    fn finish(self) {
        self.entries.finish(self.hash);
    }
}

/// A struct, or one of the private structs in which `serde_json` passes values for which serde has no type.
enum Struct<'a> {
    Fields(Object<'a>),
    /// Text of a number (feature `arbitrary_precision`, which another crate may have enabled).
    Number(Hasher<'a>),
    /// Text of any JSON (feature `raw_value`).
    Raw(Hasher<'a>),
}

const NUMBER: &str = "$serde_json::private::Number";
const RAW: &str = "$serde_json::private::RawValue";

/// Returns the text in a private struct of `serde_json`.
fn private_text<T: Serialize + ?Sized>(value: &T) -> Result<String, FingerprintError> {
    let text = serde_json::to_value(value).map_err(ser::Error::custom)?;
    text.as_str().map(str::to_owned).ok_or_else(|| ser::Error::custom("not what serde_json writes"))
}

macro_rules! integers {
    ($($method:ident($type:ty))*) => { $(
        fn $method(self, value: $type) -> Result<(), FingerprintError> {
            self.number(itoa::Buffer::new().format(value));
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
    type SerializeTupleVariant = TupleVariant<'a>;
    type SerializeMap = Object<'a>;
    type SerializeStruct = Struct<'a>;
    type SerializeStructVariant = StructVariant<'a>;

    integers! {
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64) serialize_i128(i128)
        serialize_u16(u16) serialize_u32(u32) serialize_u64(u64) serialize_u128(u128)
    }

    fn serialize_u8(self, value: u8) -> Result<(), FingerprintError> {
        self.byte(value);
        Ok(())
    }

    fn serialize_bool(self, value: bool) -> Result<(), FingerprintError> {
        match (self.is_name(), value) {
            (true, _) => text(self.hash, b's', if value { b"true" } else { b"false" }),
            (false, true) => self.tag(b't'),
            (false, false) => self.tag(b'f'),
        }
        Ok(())
    }

    fn serialize_f32(self, value: f32) -> Result<(), FingerprintError> {
        match value.is_finite() {
            true => self.number(FloatText::of(value)?.as_str()),
            false => self.tag(b'0'),
        }
        Ok(())
    }

    fn serialize_f64(self, value: f64) -> Result<(), FingerprintError> {
        match value.is_finite() {
            true => self.number(FloatText::of(value)?.as_str()),
            false => self.tag(b'0'),
        }
        Ok(())
    }

    fn serialize_char(self, value: char) -> Result<(), FingerprintError> {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<(), FingerprintError> {
        text(self.out(), b's', value.as_bytes());
        Ok(())
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<(), FingerprintError> {
        match value {
            [] => Array::default().finish(self.out()),
            _ => text(self.out(), b'b', value),
        }
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
        name: &'static str,
        value: &T,
    ) -> Result<(), FingerprintError> {
        match name {
            DIGEST => digest(self.out(), bytes::of(value).unwrap_or_default().as_slice()),
            _ => value.serialize(self),
        }
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), FingerprintError> {
        let mut entries = Entries::default();
        entries.field(variant, value)?;
        entries.finish(self.out());
        Ok(())
    }

    fn serialize_seq(self, _len: Option<usize>) -> Result<Elements<'a>, FingerprintError> {
        Ok(Elements { hash: self.out(), array: Array::default() })
    }

    fn collect_seq<I>(self, elements: I) -> Result<(), FingerprintError>
    where
        I: IntoIterator<Item: Serialize>,
    {
        if is_unordered::<I>() {
            let mut sums = elements.into_iter().map(|element| sum(&element)).collect::<Result<Vec<_>, _>>()?;
            sums.sort_unstable();
            let hash = self.out();
            hash.update(b"*");
            hash.update((sums.len() as u64).to_be_bytes());
            hash.update(sums.as_flattened());
            return Ok(());
        }
        let (bytes, mut rest) = bytes::leading(elements);
        let mut elements = Elements { hash: self.out(), array: Array { bytes, mixed: false } };
        rest.try_for_each(|element| elements.element(&element))?;
        elements.array.finish(elements.hash);
        Ok(())
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
    ) -> Result<TupleVariant<'a>, FingerprintError> {
        Ok(TupleVariant { outer: self.out(), name: variant, payload: Sha256::new(), array: Array::default() })
    }

    fn serialize_map(self, _len: Option<usize>) -> Result<Object<'a>, FingerprintError> {
        Ok(Object::new(self.out()))
    }

    fn collect_map<K, V, I>(self, entries: I) -> Result<(), FingerprintError>
    where
        K: Serialize,
        V: Serialize,
        I: IntoIterator<Item = (K, V)>,
    {
        let mut object = self.serialize_map(None)?;
        entries
            .into_iter()
            .try_for_each(|(name, value)| ser::SerializeMap::serialize_entry(&mut object, &name, &value))?;
        if is_unordered::<I>() {
            // The random order of a hash table must not decide which of two entries with the same name is hashed.
            object.entries.entries.sort_unstable();
        }
        ser::SerializeMap::end(object)
    }

    fn serialize_struct(self, name: &'static str, _len: usize) -> Result<Struct<'a>, FingerprintError> {
        Ok(match name {
            NUMBER => Struct::Number(self),
            RAW => Struct::Raw(self),
            _ => Struct::Fields(Object::new(self.out())),
        })
    }

    fn serialize_struct_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<StructVariant<'a>, FingerprintError> {
        Ok(StructVariant { outer: self.out(), name: variant, fields: Entries::default() })
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
                self.element(value)
            }

            fn end(self) -> Result<(), FingerprintError> {
                self.array.finish(self.hash);
                Ok(())
            }
        }
    )* };
}

elements! { SerializeSeq::serialize_element SerializeTuple::serialize_element SerializeTupleStruct::serialize_field }

impl ser::SerializeMap for Object<'_> {
    type Ok = ();
    type Error = FingerprintError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), FingerprintError> {
        let mut hash = Sha256::new();
        key.serialize(Hasher { hash: &mut hash, position: Position::Name })?;
        self.entries.name = hash.finalize().into();
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), FingerprintError> {
        self.entries.entries.push([self.entries.name, sum(value)?]);
        Ok(())
    }

    fn end(self) -> Result<(), FingerprintError> {
        self.finish();
        Ok(())
    }
}

impl ser::SerializeStruct for Struct<'_> {
    type Ok = ();
    type Error = FingerprintError;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), FingerprintError> {
        match self {
            Self::Fields(object) => object.entries.field(name, value),
            Self::Number(hasher) => {
                hasher.reborrow().number(&private_text(value)?);
                Ok(())
            }
            Self::Raw(hasher) => {
                let json = serde_json::from_str::<serde_json::Value>(&private_text(value)?);
                json.map_err(ser::Error::custom)?.serialize(hasher.reborrow())
            }
        }
    }

    fn end(self) -> Result<(), FingerprintError> {
        if let Self::Fields(object) = self {
            object.finish();
        }
        Ok(())
    }
}

/// Hashes a variant of an enum in its JSON form: an object with one entry.
fn variant(outer: &mut Sha256, name: &str, payload: Sha256) -> Result<(), FingerprintError> {
    let entries = vec![[sum(name)?, payload.finalize().into()]];
    Entries { entries, ..Entries::default() }.finish(outer);
    Ok(())
}

struct TupleVariant<'a> {
    outer: &'a mut Sha256,
    name: &'static str,
    payload: Sha256,
    array: Array,
}

impl ser::SerializeTupleVariant for TupleVariant<'_> {
    type Ok = ();
    type Error = FingerprintError;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), FingerprintError> {
        value.serialize(Hasher { hash: &mut self.payload, position: Position::Element(&mut self.array) })
    }

    fn end(mut self) -> Result<(), FingerprintError> {
        self.array.finish(&mut self.payload);
        variant(self.outer, self.name, self.payload)
    }
}

struct StructVariant<'a> {
    outer: &'a mut Sha256,
    name: &'static str,
    fields: Entries,
}

impl ser::SerializeStructVariant for StructVariant<'_> {
    type Ok = ();
    type Error = FingerprintError;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), FingerprintError> {
        self.fields.field(name, value)
    }

    fn end(self) -> Result<(), FingerprintError> {
        let mut payload = Sha256::new();
        self.fields.finish(&mut payload);
        variant(self.outer, self.name, payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, HashMap};

    fn of<T: Serialize>(value: T) -> Fingerprint {
        Fingerprint::of(&value).unwrap()
    }

    fn json(text: &str) -> Fingerprint {
        of(serde_json::from_str::<serde_json::Value>(text).unwrap())
    }

    #[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
    enum Shape {
        Unit,
        Newtype(u8),
        Tuple(u8, u8),
        Struct { a: u8, b: u8 },
    }

    struct Bytes(&'static [u8]);

    impl Serialize for Bytes {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_bytes(self.0)
        }
    }

    #[test]
    fn equal_json_has_equal_fingerprints() {
        #[derive(Serialize)]
        struct One {
            b: u64,
            a: Option<&'static str>,
        }
        assert_eq!(of(One { b: 1, a: Some("x") }), json(r#"{"a":"x","b":1}"#));
        assert_eq!(of(One { b: 1, a: None }), json(r#"{"a":null,"b":1}"#));
        assert_eq!(of(Shape::Unit), of("Unit"));
        assert_eq!(of(Shape::Newtype(1)), json(r#"{"Newtype":1}"#));
        assert_eq!(of(Shape::Tuple(1, 2)), json(r#"{"Tuple":[1,2]}"#));
        assert_eq!(of(Shape::Struct { a: 1, b: 2 }), json(r#"{"Struct":{"b":2,"a":1}}"#));
        let hash: HashMap<_, _> = (0..100).map(|n| (n.to_string(), n)).collect();
        let tree: BTreeMap<_, _> = hash.clone().into_iter().collect();
        assert_eq!(of(hash), of(tree));
        assert_eq!(of(Bytes(b"\0\xffa")), of([0, 255, 97]));
        assert_eq!(of(Bytes(b"")), json("[]"));
        assert_eq!(of(Some(Some(Some(1)))), of(1));
        assert_eq!(of((Some(None::<u8>), Some(()))), json("[null,null]"));
    }

    #[test]
    fn numbers_of_equal_value_have_equal_fingerprints() {
        for same in [
            vec![
                of(1),
                of(1_u128),
                of(1_i128),
                of(1.0_f32),
                of(1.0_f64),
                json("1"),
                json("1.0"),
                json("1e0"),
                json("10e-1"),
            ],
            vec![of(0), of(0.0_f64), of(-0.0_f64), of(-0.0_f32), json("0"), json("-0"), json("-0.0"), json("0e7")],
            vec![of(-1200), of(-1200.0_f32), json("-1.2e3"), json("-12E+2")],
            vec![of(0.1_f32), of(0.1_f64), json("0.1"), json("0.10"), json("1e-1")],
            vec![of(16_777_217), of(16_777_217_f64), json("16777217")],
            vec![of(10_u128.pow(23)), of(1e23_f64), of(1e23_f32), json("1e23"), json("100000000000000000000000")],
            vec![of(f32::MAX), of(3.402_823_5e38_f64)],
            // This `f32` has two shortest texts. The fingerprint uses the text that `serde_json` writes.
            vec![of(7_202.281_3_f32), json("7202.2812")],
            vec![of(f64::NAN), of(f64::INFINITY), of(f32::NEG_INFINITY), of(()), json("null")],
        ] {
            assert!(same.iter().all(|other| *other == same[0]), "{same:?}");
        }
        let others = [0.1, 0.100_000_001_490_116_12, f64::MIN_POSITIVE, 5e-324, 1e308, 1.797_693_134_862_315_7e308];
        let others: Vec<_> = others.into_iter().map(of).chain([of(16_777_216), of(16_777_217), of(f32::MAX)]).collect();
        for (at, one) in others.iter().enumerate() {
            assert!(others[at + 1..].iter().all(|other| other != one), "{at} is met again");
        }
    }

    struct Floats;
    impl Serialize for Floats {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_map([(0.1_f32, 1)])
        }
    }

    #[test]
    fn names_of_entries_enter_the_fingerprint_as_texts() {
        let one = |name: &str| of(BTreeMap::from([(name, 0)]));
        assert_eq!(of(BTreeMap::from([(1_u8, 0)])), one("1"));
        assert_eq!(of(BTreeMap::from([(i128::MIN, 0)])), one("-170141183460469231731687303715884105728"));
        assert_eq!(of(BTreeMap::from([(true, 0)])), one("true"));
        assert_eq!(of(BTreeMap::from([('é', 0)])), one("é"));
        assert_eq!(of(BTreeMap::from([(Shape::Unit, 0)])), one("Unit"));
        assert_eq!(of(BTreeMap::from([(Some(std::num::Wrapping(7)), 0)])), one("7"));
        assert_eq!(of(Floats), of(BTreeMap::from([("0.1", 1)])));
        // These values can't be names in JSON.
        let nameless = [
            of(BTreeMap::from([((), 0)])),
            of(BTreeMap::from([((1, 2), 0)])),
            of(BTreeMap::from([(Shape::Newtype(1), 0)])),
            of(BTreeMap::from([(Shape::Struct { a: 1, b: 2 }, 0)])),
            of(BTreeMap::from([(vec![b'a'], 0)])),
            of(BTreeMap::from([(BTreeMap::from([("a", 1)]), 0)])),
            one("null"),
            one("[1,2]"),
            one(""),
        ];
        for (at, name) in nameless.iter().enumerate() {
            assert!(nameless[at + 1..].iter().all(|other| other != name), "{at} is met again");
        }
    }

    #[test]
    fn the_last_of_several_entries_with_one_name_enters_the_fingerprint() {
        struct Entries(&'static [(&'static str, u8)]);
        impl Serialize for Entries {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().copied())
            }
        }
        let twice = Entries(&[("a", 1), ("b", 0), ("a", 2)]);
        assert_eq!(of(&twice), of(BTreeMap::from([("a", 2), ("b", 0)])));
        assert_eq!(of(&twice), json(&serde_json::to_string(&twice).unwrap()));
        assert_ne!(of(&twice), of(Entries(&[("a", 2), ("b", 0), ("a", 1)])));
    }

    #[test]
    fn numbers_and_raw_values_of_serde_json_are_hashed_as_their_json() {
        #[derive(Serialize)]
        #[serde(rename = "$serde_json::private::Number")]
        struct Number {
            #[serde(rename = "$serde_json::private::Number")]
            text: &'static str,
        }
        #[derive(Serialize)]
        #[serde(rename = "$serde_json::private::RawValue")]
        struct Raw {
            #[serde(rename = "$serde_json::private::RawValue")]
            text: &'static str,
        }
        for text in ["0", "-0.0", "1", "1.50", "-12e3", "0.1", "1E-7", "1e+300", "0.00120"] {
            assert_eq!(of(Number { text }), of(text.parse::<f64>().unwrap()), "{text}");
        }
        let beyond =
            ["1e400", "1e-400", "1e99999999999999999999", "-1e99999999999999999999", "1e-99999999999999999999"];
        let beyond = beyond.map(|text| of(Number { text }));
        for (at, one) in beyond.iter().enumerate() {
            assert!(beyond[at + 1..].iter().all(|other| other != one) && *one != of(0), "{at} is met again");
        }
        assert_eq!(of(Number { text: "18446744073709551616" }), of(u128::from(u64::MAX) + 1));
        assert_eq!(of(Raw { text: r#" {"b": [1.0, "x"], "a": null} "# }), json(r#"{"a":null,"b":[1,"x"]}"#));
        assert!(Fingerprint::of(&Raw { text: "{" }).is_err());
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
            of(1.5),
            of(""),
            of("0"),
            of("1"),
            of("null"),
            of("1e0"),
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
        struct FailingSerialize;
        impl Serialize for FailingSerialize {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(ser::Error::custom("no"))
            }
        }
        assert!(Fingerprint::of(&[FailingSerialize]).is_err());
        assert!(Fingerprint::of(&BTreeMap::from([("a", Some(FailingSerialize))])).is_err());
    }

    #[test]
    fn the_canonical_form_of_a_payload_is_the_documented_one() {
        let sum = |form: &[u8]| <[u8; 32]>::from(Sha256::digest(form));
        let text = |tag: &[u8], text: &str| [tag, &(text.len() as u64).to_be_bytes(), text.as_bytes()].concat();
        let list = [&b"["[..], &text(b"n", "15e-1"), b"0t", &text(b"n", "0e0"), b"]"].concat();
        let above = [&b"["[..], &text(b"n", "1e0"), &text(b"n", "256e0"), b"[]", b"]"].concat();
        let mut entries = [
            [sum(&text(b"s", "amounts")), sum(&list)].concat(),
            [sum(&text(b"s", "bytes")), sum(&text(b"b", "\0\u{7f}x"))].concat(),
            [sum(&text(b"s", "above")), sum(&above)].concat(),
            [sum(&text(b"s", "é")), sum(&text(b"n", "-12e2"))].concat(),
        ];
        entries.sort();
        let object = [b"{", &4_u64.to_be_bytes()[..], &entries.concat()].concat();
        let digest = sum(&[b"idem fingerprint 1\n", &object[..]].concat());
        let expected: Vec<u8> = [1].into_iter().chain(digest).take(32).collect();
        let fingerprint =
            json(r#"{"é": -1200, "amounts": [1.5, null, true, 0], "bytes": [0, 127.0, 12e1], "above": [1, 256, []]}"#);
        assert_eq!(fingerprint.as_bytes()[..], expected);
        let digest = sum(&[b"idem fingerprint 1\n", &text(b"d", "0123456789abcdef")[..]].concat());
        let expected: Vec<u8> = [1].into_iter().chain(digest).take(32).collect();
        assert_eq!(of(PayloadDigest::new("0123456789abcdef")).as_bytes()[..], expected);
    }

    #[test]
    fn fingerprints_of_fixed_payloads_never_change() {
        // If these fingerprints changed, no operation would run again, but an upgrade would turn duplicates in flight
        // into mismatches. So a change needs a new version.
        let order = of(("order", 42, [1.5], BTreeMap::from([("a", None::<u8>)])));
        assert_eq!(Fingerprint::VERSION, 1);
        assert_eq!(format!("{order:?} {}", order.short()), "13ee3e49… 13ee3e49");
    }

    #[test]
    fn fingerprints_of_different_versions_are_not_comparable() {
        let one = of(1);
        assert_eq!((one.version(), one.as_bytes()[0]), (1, 1));
        assert!(one.is_comparable(&of(2)));
        let mut other = *one.as_bytes();
        other[0] = 2;
        let other = Fingerprint::from_bytes(other);
        assert!(other != one && !one.is_comparable(&other) && !other.is_comparable(&one));
        assert_eq!(other.version(), 2);
    }

    #[test]
    fn child_keys_are_stable_uuids() {
        let key = Key::new("shop::ship", "order:42").unwrap();
        let child = child_key("shop", &key, "charge");
        assert_eq!(child, child_key("shop", &key, "charge"));
        for other in [
            child_key("shop", &key, "refund"),
            child_key("", &key, "charge"),
            child_key("office", &key, "charge"),
            child_key("shop", &Key::new("shop::ship", "order:43").unwrap(), "charge"),
            child_key("charge", &key, "shop"),
        ] {
            assert_ne!(child, other);
        }
        assert_eq!((child.len(), &child[14..15]), (36, "8"));
        assert_eq!(child, "9f59f64b-6cfd-8c6d-aa1a-3b56a500a3fa");
        assert_eq!(child_key("", &key, "charge"), "8ad1c015-b448-8e5f-bee0-a71001895493");
    }
}
