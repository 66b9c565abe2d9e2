//! Fingerprints compared with JSON, for all data that serde accepts: payloads with equal JSON have equal fingerprints,
//! and payloads with different JSON have different fingerprints.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, LinkedList, VecDeque};
use std::hash::{Hash, Hasher};

use bytes::Bytes;
use idem_runtime::key::{Fingerprint, PayloadDigest};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde::Serialize;
use serde::ser::{
    SerializeMap as _, SerializeSeq as _, SerializeStruct as _, SerializeStructVariant as _, SerializeTuple as _,
    SerializeTupleStruct as _, SerializeTupleVariant as _, Serializer,
};
use serde_json::Value;

const NAMES: [&str; 4] = ["a", "b", "1", "true"];

fn name(index: u8) -> &'static str {
    NAMES[usize::from(index) % NAMES.len()]
}

/// Every kind of value in serde's data model.
#[derive(Clone, Debug)]
enum Data {
    Bool(bool),
    I8(i8),
    I16(i16),
    I32(i32),
    I64(i64),
    I128(i128),
    U8(u8),
    U16(u16),
    U32(u32),
    U64(u64),
    U128(u128),
    F32(f32),
    F64(f64),
    Char(char),
    Str(String),
    Bytes(Vec<u8>),
    None,
    Some(Box<Data>),
    Unit,
    UnitStruct,
    UnitVariant(u8),
    NewtypeStruct(Box<Data>),
    NewtypeVariant(u8, Box<Data>),
    Seq(Vec<Data>),
    /// A sequence that is serialized by one call (`collect_seq`).
    Collected(Vec<Data>),
    Tuple(Vec<Data>),
    TupleStruct(Vec<Data>),
    TupleVariant(u8, Vec<Data>),
    Map(Vec<(Data, Data)>),
    Struct(Vec<(u8, Data)>),
    StructVariant(u8, Vec<(u8, Data)>),
    /// Value serialized by its `Display`.
    Shown(u8),
}

impl Serialize for Data {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Each variant calls the serializer's method of the same name. Maps and sequences are serialized element by
        // element.
        match self {
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::I8(value) => serializer.serialize_i8(*value),
            Self::I16(value) => serializer.serialize_i16(*value),
            Self::I32(value) => serializer.serialize_i32(*value),
            Self::I64(value) => serializer.serialize_i64(*value),
            Self::I128(value) => serializer.serialize_i128(*value),
            Self::U8(value) => serializer.serialize_u8(*value),
            Self::U16(value) => serializer.serialize_u16(*value),
            Self::U32(value) => serializer.serialize_u32(*value),
            Self::U64(value) => serializer.serialize_u64(*value),
            Self::U128(value) => serializer.serialize_u128(*value),
            Self::F32(value) => serializer.serialize_f32(*value),
            Self::F64(value) => serializer.serialize_f64(*value),
            Self::Char(value) => serializer.serialize_char(*value),
            Self::Str(value) => serializer.serialize_str(value),
            Self::Bytes(value) => serializer.serialize_bytes(value),
            Self::None => serializer.serialize_none(),
            Self::Some(value) => serializer.serialize_some(value),
            Self::Unit => serializer.serialize_unit(),
            Self::UnitStruct => serializer.serialize_unit_struct("S"),
            Self::UnitVariant(variant) => serializer.serialize_unit_variant("E", 0, name(*variant)),
            Self::NewtypeStruct(value) => serializer.serialize_newtype_struct("S", value),
            Self::NewtypeVariant(variant, value) => serializer.serialize_newtype_variant("E", 0, name(*variant), value),
            Self::Seq(values) => {
                let mut seq = serializer.serialize_seq(None)?;
                values.iter().try_for_each(|value| seq.serialize_element(value))?;
                seq.end()
            }
            Self::Collected(values) => serializer.collect_seq(values),
            Self::Tuple(values) => {
                let mut tuple = serializer.serialize_tuple(values.len())?;
                values.iter().try_for_each(|value| tuple.serialize_element(value))?;
                tuple.end()
            }
            Self::TupleStruct(values) => {
                let mut tuple = serializer.serialize_tuple_struct("S", values.len())?;
                values.iter().try_for_each(|value| tuple.serialize_field(value))?;
                tuple.end()
            }
            Self::TupleVariant(variant, values) => {
                let mut tuple = serializer.serialize_tuple_variant("E", 0, name(*variant), values.len())?;
                values.iter().try_for_each(|value| tuple.serialize_field(value))?;
                tuple.end()
            }
            Self::Map(entries) => {
                let mut map = serializer.serialize_map(None)?;
                entries.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
            Self::Struct(fields) => {
                let mut object = serializer.serialize_struct("S", fields.len())?;
                fields.iter().try_for_each(|(field, value)| object.serialize_field(name(*field), value))?;
                object.end()
            }
            Self::StructVariant(variant, fields) => {
                let mut object = serializer.serialize_struct_variant("E", 0, name(*variant), fields.len())?;
                fields.iter().try_for_each(|(field, value)| object.serialize_field(name(*field), value))?;
                object.end()
            }
            Self::Shown(text) => serializer.collect_str(name(*text)),
        }
    }
}

impl Data {
    fn any(&self, is: &impl Fn(&Self) -> bool) -> bool {
        is(self)
            || match self {
                Self::Some(value) | Self::NewtypeStruct(value) | Self::NewtypeVariant(_, value) => value.any(is),
                Self::Seq(values)
                | Self::Collected(values)
                | Self::Tuple(values)
                | Self::TupleStruct(values)
                | Self::TupleVariant(_, values) => values.iter().any(|value| value.any(is)),
                Self::Map(entries) => entries.iter().any(|(key, value)| key.any(is) || value.any(is)),
                Self::Struct(fields) | Self::StructVariant(_, fields) => fields.iter().any(|(_, value)| value.any(is)),
                _ => false,
            }
    }

    /// True if the value contains a number that a `serde_json::Value` can't hold exactly.
    fn is_more_than_a_value(&self) -> bool {
        self.any(&|data| match data {
            Self::I128(value) => i64::try_from(*value).is_err() && u64::try_from(*value).is_err(),
            Self::U128(value) => u64::try_from(*value).is_err(),
            _ => false,
        })
    }

    /// True if `serde_json::to_value` writes another number than `serde_json::to_string`.
    fn is_widened(&self) -> bool {
        self.any(&|data| match data {
            Self::F32(value) => {
                let text = serde_json::to_string(value).unwrap();
                text != "null" && text.parse() != Ok(f64::from(*value))
            }
            _ => false,
        })
    }
}

fn leaf() -> impl Strategy<Value = Data> {
    // Generates small numbers, so that many are equal, and arbitrary numbers.
    let float = prop_oneof![
        (-4_i8..4).prop_map(f64::from),
        (254_u16..258).prop_map(f64::from),
        (-8_i8..8).prop_map(|n| f64::from(n) / 4.0),
        any::<f64>()
    ];
    let single =
        prop_oneof![(-4_i8..4).prop_map(f32::from), (-9_i8..9).prop_map(|n| f32::from(n) / 10.0), any::<f32>()];
    let odd = prop_oneof![
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(-0.0),
        Just(f64::MIN_POSITIVE),
        Just(5e-324),
        Just(f64::MAX),
        Just(1e21),
        Just(1e23),
        Just(18_446_744_073_709_551_615.0)
    ];
    prop_oneof![
        any::<bool>().prop_map(Data::Bool),
        prop_oneof![-2_i8..3, any::<i8>()].prop_map(Data::I8),
        prop_oneof![-2_i16..3, any::<i16>()].prop_map(Data::I16),
        prop_oneof![-2_i32..3, any::<i32>()].prop_map(Data::I32),
        prop_oneof![-2_i64..3, any::<i64>()].prop_map(Data::I64),
        prop_oneof![-2_i128..3, any::<i128>(), Just(1_000_000_000_000_000_000_000)].prop_map(Data::I128),
        prop_oneof![0_u8..3, any::<u8>()].prop_map(Data::U8),
        prop_oneof![0_u16..3, 254_u16..258, any::<u16>()].prop_map(Data::U16),
        prop_oneof![0_u32..3, any::<u32>()].prop_map(Data::U32),
        prop_oneof![0_u64..3, any::<u64>(), Just(u64::MAX)].prop_map(Data::U64),
        prop_oneof![0_u128..3, any::<u128>()].prop_map(Data::U128),
        single.prop_map(Data::F32),
        prop_oneof![4 => float, 1 => odd].prop_map(Data::F64),
        prop_oneof![Just('a'), Just('1'), any::<char>()].prop_map(Data::Char),
        prop_oneof![(0_u8..4).prop_map(|n| name(n).to_owned()), ".{0,3}", Just("null".to_owned())].prop_map(Data::Str),
        prop::collection::vec(0_u8..3, 0..3).prop_map(Data::Bytes),
        prop_oneof![Just(Data::None), Just(Data::Unit), Just(Data::UnitStruct)],
        (0_u8..4).prop_map(Data::UnitVariant),
        (0_u8..4).prop_map(Data::Shown),
    ]
}

fn key() -> impl Strategy<Value = Data> {
    // serde_json refuses a map key that can't be a name in JSON; fingerprints accept such a key.
    let wrapped = leaf().prop_flat_map(|data| {
        prop_oneof![
            Just(data.clone()),
            Just(Data::NewtypeStruct(Box::new(data.clone()))),
            Just(Data::Some(Box::new(data)))
        ]
    });
    prop_oneof![8 => (0_u8..4).prop_map(|n| Data::Str(name(n).to_owned())), 4 => leaf(), 1 => wrapped]
}

fn data() -> impl Strategy<Value = Data> {
    leaf().prop_recursive(3, 12, 3, |inner| {
        let values = || prop::collection::vec(inner.clone(), 0..3);
        let fields = || prop::collection::vec((0_u8..4, inner.clone()), 0..3);
        let boxed = || inner.clone().prop_map(Box::new);
        prop_oneof![
            boxed().prop_map(Data::Some),
            boxed().prop_map(Data::NewtypeStruct),
            (0_u8..4, boxed()).prop_map(|(variant, value)| Data::NewtypeVariant(variant, value)),
            values().prop_map(Data::Seq),
            values().prop_map(Data::Collected),
            values().prop_map(Data::Tuple),
            values().prop_map(Data::TupleStruct),
            (0_u8..4, values()).prop_map(|(variant, values)| Data::TupleVariant(variant, values)),
            prop::collection::vec((key(), inner.clone()), 0..3).prop_map(Data::Map),
            fields().prop_map(Data::Struct),
            (0_u8..4, fields()).prop_map(|(variant, fields)| Data::StructVariant(variant, fields)),
        ]
    })
}

/// Value of a JSON number: sign, digits without zeros at either end, exponent of the last digit.
type Number = (bool, String, i64);

/// JSON, as an independent parser reads it.
#[derive(Clone, PartialEq, Debug)]
enum Json {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

struct Reader<'a>(&'a str);

impl Reader<'_> {
    fn read(text: &str) -> Json {
        let mut reader = Reader(text);
        let value = reader.value();
        assert!(reader.0.is_empty(), "{text}");
        value
    }

    fn take(&mut self, expected: &str) -> bool {
        let rest = self.0.strip_prefix(expected);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn value(&mut self) -> Json {
        match () {
            () if self.take("null") => Json::Null,
            () if self.take("true") => Json::Bool(true),
            () if self.take("false") => Json::Bool(false),
            () if self.0.starts_with('"') => Json::Text(self.text()),
            () if self.take("[") => {
                let mut values = Vec::new();
                while !self.take("]") {
                    values.push(self.value());
                    self.take(",");
                }
                Json::List(values)
            }
            () if self.take("{") => {
                let mut entries = BTreeMap::new();
                while !self.take("}") {
                    let name = self.text();
                    assert!(self.take(":"));
                    // If a name occurs twice, the last entry replaces the first.
                    entries.insert(name, self.value());
                    self.take(",");
                }
                Json::Object(entries)
            }
            () => Json::Number(self.number()),
        }
    }

    fn text(&mut self) -> String {
        let mut escaped = false;
        let inside = |c: char| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        };
        let end = self.0[1..].find(inside).expect("a text ends") + 2;
        let (text, rest) = self.0.split_at(end);
        self.0 = rest;
        serde_json::from_str(text).expect("a text")
    }

    fn number(&mut self) -> Number {
        let end = self.0.find([',', ']', '}']).unwrap_or(self.0.len());
        let (number, rest) = self.0.split_at(end);
        self.0 = rest;
        let (mut digits, mut exponent, mut behind) = (Vec::new(), 0, false);
        let mut chars = number.chars();
        for c in chars.by_ref() {
            match c {
                '-' => {}
                '.' => behind = true,
                'e' | 'E' => break,
                digit => {
                    assert!(digit.is_ascii_digit(), "{number}");
                    digits.push(digit);
                    exponent -= i64::from(behind);
                }
            }
        }
        let written = chars.as_str();
        exponent += if written.is_empty() { 0 } else { written.parse::<i64>().expect("an exponent") };
        while digits.last() == Some(&'0') {
            digits.pop();
            exponent += 1;
        }
        let digits: String = digits.into_iter().skip_while(|digit| *digit == '0').collect();
        if digits.is_empty() { (false, digits, 0) } else { (number.starts_with('-'), digits, exponent) }
    }
}

fn of<T: Serialize + ?Sized>(value: &T) -> Fingerprint {
    Fingerprint::of(value).expect("serializes")
}

/// Returns data of other Rust types that have the same JSON.
fn retyped(json: &Json, dice: &mut impl FnMut() -> u8) -> Data {
    match json {
        Json::Null => [Data::None, Data::Unit, Data::F64(f64::NAN), Data::UnitStruct][usize::from(dice() % 4)].clone(),
        Json::Bool(value) => Data::Some(Box::new(Data::Bool(*value))),
        Json::Number((negative, digits, exponent)) => {
            // A number becomes any Rust type that writes the same JSON.
            let text = format!("{}{digits}e{exponent}", if *negative { "-" } else { "" });
            let text = if digits.is_empty() { "0".to_owned() } else { text };
            let (double, single) = (text.parse::<f64>().unwrap(), text.parse::<f32>().unwrap());
            let whole = match usize::try_from(*exponent) {
                Ok(zeros) if zeros < 40 => {
                    format!("{}{digits}{}", if *negative { "-" } else { "" }, "0".repeat(zeros)).parse::<i128>().ok()
                }
                _ => None,
            };
            let is = |data: &Data| Reader::read(&serde_json::to_string(data).unwrap()) == *json;
            let mut forms: Vec<_> = [Data::F64(double), Data::F32(single)].into_iter().filter(is).collect();
            if let Some(whole) = whole {
                forms.push(Data::I128(whole));
                forms.extend(i64::try_from(whole).ok().map(Data::I64));
                forms.extend(u64::try_from(whole).ok().map(Data::U64));
                forms.extend(u128::try_from(whole).ok().map(Data::U128));
                forms.extend(i8::try_from(whole).ok().map(Data::I8));
            }
            // The list above has no type for an integer that fits only a `u128`.
            let big = || format!("{digits}{}", "0".repeat(usize::try_from(*exponent).unwrap())).parse().unwrap();
            let choice = usize::from(dice());
            if forms.is_empty() { Data::U128(big()) } else { forms.swap_remove(choice % forms.len()) }
        }
        Json::Text(text) => {
            // A text becomes a string, newtype, char, unit variant or displayed value.
            let mut forms = vec![Data::Str(text.clone()), Data::NewtypeStruct(Box::new(Data::Str(text.clone())))];
            let mut chars = text.chars();
            forms.extend(chars.next().filter(|_| chars.as_str().is_empty()).map(Data::Char));
            let known = NAMES.iter().zip(0_u8..).find(|(name, _)| *name == text).map(|(_, index)| index);
            forms.extend(known.into_iter().flat_map(|index| [Data::UnitVariant(index), Data::Shown(index)]));
            forms.swap_remove(usize::from(dice()) % forms.len())
        }
        Json::List(values) => {
            // A list becomes any kind of sequence, or bytes if all elements are bytes.
            let values: Vec<_> = values.iter().map(|value| retyped(value, dice)).collect();
            let byte = |value: &Data| match value {
                Data::U64(byte) => u8::try_from(*byte).ok(),
                _ => None,
            };
            match (dice() % 6, values.iter().map(byte).collect()) {
                (0..=2, Some(bytes)) => Data::Bytes(bytes),
                (0 | 3, _) => Data::Seq(values),
                (1, _) => Data::Tuple(values),
                (2 | 4, _) => Data::Collected(values),
                _ => Data::TupleStruct(values),
            }
        }
        Json::Object(entries) => {
            // An object becomes a map, struct or variant with its entries in any order, as far as its names allow.
            let known =
                |name: &str| NAMES.iter().zip(0_u8..).find(|(known, _)| **known == name).map(|(_, index)| index);
            let mut retyped: Vec<_> =
                entries.iter().map(|(name, value)| (name.clone(), retyped(value, dice))).collect();
            if dice().is_multiple_of(2) {
                retyped.reverse();
            }
            let fields = retyped.iter().map(|(name, value)| Some((known(name)?, value.clone()))).collect();
            match (dice() % 3, fields, &*retyped) {
                (0, Some(fields), _) => Data::Struct(fields),
                (1, _, [(name, value)]) if known(name).is_some() => {
                    let (variant, value) = (known(name).unwrap(), value.clone());
                    match value {
                        Data::Struct(fields) => Data::StructVariant(variant, fields),
                        Data::Seq(values) => Data::TupleVariant(variant, values),
                        value => Data::NewtypeVariant(variant, Box::new(value)),
                    }
                }
                _ => Data::Map(
                    retyped
                        .into_iter()
                        .map(|(name, value)| {
                            let key = match (&*name, dice() % 2) {
                                ("1", 0) => Data::U16(1),
                                ("true", 0) => Data::Bool(true),
                                _ => self::retyped(&Json::Text(name), dice),
                            };
                            (key, value)
                        })
                        .collect(),
                ),
            }
        }
    }
}

/// Pseudo-random numbers from a seed.
fn dice(mut seed: u64) -> impl FnMut() -> u8 {
    move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed.to_be_bytes()[0]
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// A consumer that parses the text of a payload and a consumer that has the value compute the same fingerprint.
    #[test]
    fn data_and_its_json_have_the_same_fingerprint(data in data()) {
        let fingerprint = of(&data);
        if let Ok(text) = serde_json::to_string(&data) {
            let read: Value = serde_json::from_str(&text).expect("serde_json reads what it wrote");
            if !data.is_more_than_a_value() {
                prop_assert_eq!(fingerprint, of(&read), "{}", text);
            }
        }
        if let Ok(value) = serde_json::to_value(&data) && !data.is_widened() {
            prop_assert_eq!(fingerprint, of(&value), "{}", value);
        }
    }

    #[test]
    fn equal_json_of_different_types_has_equal_fingerprints(data in data(), seed in any::<u64>()) {
        if let Ok(text) = serde_json::to_string(&data) {
            let json = Reader::read(&text);
            let other = retyped(&json, &mut dice(seed));
            let again = serde_json::to_string(&other).expect("JSON");
            prop_assert_eq!(Reader::read(&again), json, "{} {}", text, again);
            prop_assert_eq!(of(&data), of(&other), "{} {} {:?}", text, again, other);
        }
    }

    #[test]
    fn different_json_has_different_fingerprints(one in data(), other in data()) {
        // The pair of the two values has another fingerprint than the pair in the opposite order, unless the JSON is
        // equal: a fingerprint must depend on where one value ends and the next begins.
        let (there, back) = ([&one, &other], [&other, &one]);
        if let (Ok(a), Ok(b)) = (serde_json::to_string(&one), serde_json::to_string(&other)) {
            let equal = Reader::read(&a) == Reader::read(&b);
            prop_assert_eq!(of(&one) == of(&other), equal, "{} {}", a, b);
            prop_assert_eq!(of(&there) == of(&back), equal, "{} {}", a, b);
        }
        prop_assert_ne!(of(&one), of(&[&one]));
        prop_assert_ne!(of(&[&one]), of(&there));
    }
}

#[test]
fn bytes_of_every_type_have_the_fingerprint_of_an_array_of_numbers() {
    for len in [0, 1, 2, 31, 32, 33, 255, 256, 1000, 70_000] {
        let bytes: Vec<u8> = (0..=255).cycle().take(len).collect();
        let same = [
            of(&bytes),
            of(&*bytes),
            of(&Some(bytes.clone())),
            of(&Bytes::from(bytes.clone())),
            of(&Data::Bytes(bytes.clone())),
            of(&Data::Seq(bytes.iter().map(|byte| Data::U8(*byte)).collect())),
            of(&Data::Collected(bytes.iter().map(|byte| Data::U8(*byte)).collect())),
            of(&Data::Tuple(bytes.iter().map(|byte| Data::F32((*byte).into())).collect())),
            of(&bytes.iter().map(|byte| u64::from(*byte)).collect::<Vec<_>>()),
            of(&bytes.iter().map(|byte| i128::from(*byte)).collect::<Vec<_>>()),
            of(&bytes.iter().map(|byte| f64::from(*byte)).collect::<Vec<_>>()),
            of(&serde_json::to_value(&bytes).unwrap()),
        ];
        assert!(same.iter().all(|other| *other == same[0]), "{len}: {same:?}");
        // Inside an enum, too, bytes and a tuple of the same numbers have equal fingerprints. A further element that is
        // no byte changes the fingerprint, however the sequence is serialized.
        let numbers: Vec<_> = bytes.iter().map(|byte| Data::U16((*byte).into())).collect();
        let variant = Data::NewtypeVariant(0, Box::new(Data::Bytes(bytes.clone())));
        assert_eq!(of(&variant), of(&Data::TupleVariant(0, numbers.clone())), "{len}");
        for last in [Data::U16(256), Data::I8(-1), Data::F64(0.5), Data::None, Data::Str("1".to_owned())] {
            let with = |all: fn(Vec<Data>) -> Data| of(&all([&numbers[..], std::slice::from_ref(&last)].concat()));
            let small = bytes.iter().map(|byte| Data::U8(*byte)).chain([last.clone()]).collect();
            assert_eq!(with(Data::Seq), with(Data::Collected), "{len} {last:?}");
            assert_eq!(with(Data::Seq), of(&Data::Collected(small)), "{len} {last:?}");
            assert_ne!(with(Data::Seq), same[0], "{len} {last:?}");
        }
    }
    // Bytes before the first element that is no byte also enter the fingerprint.
    assert!(of(&[1, 256]) != of(&[2, 256]) && of(&[1, 256]) != of(&[256]) && of(&[256, 1]) != of(&[256, 2]));
    let of_one = |byte: u8| of(&[byte]);
    assert!((1..=255).all(|byte| of_one(byte) != of_one(0) && of_one(byte) != of(&byte)));
}

#[test]
fn a_digest_and_a_payload_of_the_same_bytes_have_different_fingerprints() {
    let digest: [u8; 32] = std::array::from_fn(|at| 7 * u8::try_from(at).unwrap());
    let of_digest = of(&PayloadDigest::new(digest));
    // The container of a digest makes no difference.
    assert_eq!(of_digest, of(&PayloadDigest::new(&digest[..])));
    assert_eq!(of_digest, of(&PayloadDigest::new(digest.to_vec())));
    assert_eq!(of_digest, of(&Some(PayloadDigest::new(Bytes::copy_from_slice(&digest)))));
    let shown = format!("{digest:02x?}");
    let others = [
        of(&digest),
        of(&[PayloadDigest::new(digest)]),
        of(&("", PayloadDigest::new(digest))),
        of(&("", digest)),
        of(&BTreeMap::from([("a", PayloadDigest::new(digest))])),
        of(&BTreeMap::from([("a", digest)])),
        of(&shown),
        of(&PayloadDigest::new(&shown)),
        of(&PayloadDigest::new(&digest[..31])),
        of(&PayloadDigest::new([digest, digest].as_flattened())),
        of(&PayloadDigest::new(of_digest.as_bytes())),
        of(of_digest.as_bytes()),
    ];
    for (at, other) in others.iter().enumerate() {
        assert_ne!(*other, of_digest, "{at}");
        assert!(others[at + 1..].iter().all(|next| next != other), "the fingerprint of case {at} occurs twice");
    }
    // Other serializers write a digest as its bytes.
    assert_eq!(
        serde_json::to_string(&PayloadDigest::new([1_u8; 16])).unwrap(),
        serde_json::to_string(&[1; 16]).unwrap()
    );
}

#[test]
fn a_digest_that_is_too_short_is_refused_as_a_fingerprint() {
    for len in 0..PayloadDigest::MIN_BYTES {
        let error = Fingerprint::of(&("upload", PayloadDigest::new(vec![7; len]))).unwrap_err();
        assert_eq!(error.to_string(), format!("a digest of {len} bytes, and not of at least 16"));
    }
    assert!(Fingerprint::of(&PayloadDigest::new([7; PayloadDigest::MIN_BYTES])).is_ok());
}

/// Checks that the generators produce both equal and unequal data.
#[test]
fn the_generators_produce_equal_and_unequal_data() {
    let mut runner = TestRunner::deterministic();
    let mut texts = BTreeMap::<String, (usize, Vec<String>)>::new();
    for _ in 0..2000 {
        let data = data().new_tree(&mut runner).expect("a tree").current();
        let Ok(text) = serde_json::to_string(&data) else { continue };
        let (count, written) = texts.entry(format!("{:?}", Reader::read(&text))).or_default();
        *count += 1;
        if !written.contains(&text) {
            written.push(text);
        }
    }
    assert!(texts.len() > 500, "{} values", texts.len());
    assert!(texts.values().any(|(count, _)| *count > 20), "no value occurs often");
    assert!(texts.values().any(|(_, written)| written.len() > 1), "no value is written in two ways");
}

/// Payload with ordered and unordered collections.
#[derive(Clone, Debug)]
enum Tree {
    Number(u16),
    Text(String),
    Option(Option<Box<Tree>>),
    List(Vec<Tree>),
    Tuple(Box<(Tree, Tree)>),
    Set(Vec<Tree>),
    Map(Vec<(u8, Tree)>),
    Variant(Box<Tree>, Box<Tree>),
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf =
        prop_oneof![(0..4_u16).prop_map(Tree::Number), "[ab]{0,2}".prop_map(Tree::Text), Just(Tree::Option(None))];
    leaf.prop_recursive(4, 24, 4, |tree| {
        let trees = || proptest::collection::vec(tree.clone(), 0..4);
        let boxed = || tree.clone().prop_map(Box::new);
        prop_oneof![
            boxed().prop_map(|tree| Tree::Option(Some(tree))),
            trees().prop_map(Tree::List),
            (tree.clone(), tree.clone()).prop_map(|pair| Tree::Tuple(Box::new(pair))),
            trees().prop_map(Tree::Set),
            trees().prop_map(Tree::Set),
            proptest::collection::vec((0..4_u8, tree.clone()), 0..4).prop_map(Tree::Map),
            (boxed(), boxed()).prop_map(|(one, other)| Tree::Variant(one, other)),
        ]
    })
}

/// Tree as one process builds it: each hash table has its own hasher. Nodes of equal trees are equal.
#[derive(Debug)]
struct Node {
    /// Text of the tree, in which the order of tables has no effect. `Some` is written like its value, as in JSON and
    /// in a fingerprint.
    text: String,
    built: Built,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Built {
    Number(u16),
    Text(String),
    Option(Option<Box<Node>>),
    List(Vec<Node>),
    Tuple(Box<(Node, Node)>),
    Set(HashSet<Node>),
    Map(HashMap<u8, Node>),
    Variant(Variant),
}

#[derive(Debug, Serialize)]
enum Variant {
    Tuple(Box<Node>, Box<Node>),
}

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.built.serialize(serializer)
    }
}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Node {}

impl Hash for Node {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

impl Tree {
    /// Builds the payload. Each table is filled starting at the element with the index `turn`.
    fn build(&self, turn: usize) -> Node {
        let nodes = |trees: &[Self]| -> Vec<Node> { trees.iter().map(|tree| tree.build(turn)).collect() };
        let texts = |nodes: &[Node]| nodes.iter().map(|node| node.text.clone()).collect::<Vec<_>>().join(",");
        match self {
            Self::Number(number) => Node { text: number.to_string(), built: Built::Number(*number) },
            Self::Text(text) => Node { text: format!("{text:?}"), built: Built::Text(text.clone()) },
            Self::Option(value) => {
                let value = value.as_ref().map(|tree| Box::new(tree.build(turn)));
                Node {
                    text: value.as_ref().map_or("null".into(), |node| node.text.clone()),
                    built: Built::Option(value),
                }
            }
            Self::List(trees) => {
                let nodes = nodes(trees);
                Node { text: format!("[{}]", texts(&nodes)), built: Built::List(nodes) }
            }
            Self::Tuple(pair) => {
                let (one, other) = (pair.0.build(turn), pair.1.build(turn));
                Node { text: format!("[{},{}]", one.text, other.text), built: Built::Tuple(Box::new((one, other))) }
            }
            // The start index changes the order in which equal tables iterate.
            Self::Set(trees) => {
                let mut nodes = nodes(trees);
                let middle = turn % nodes.len().max(1);
                nodes.rotate_left(middle);
                let set: HashSet<Node> = nodes.into_iter().collect();
                let texts: BTreeSet<&str> = set.iter().map(|node| &*node.text).collect();
                Node { text: format!("*{texts:?}"), built: Built::Set(set) }
            }
            Self::Map(entries) => {
                // If a name occurs twice, the last entry is used, whatever the start index is.
                let last: BTreeMap<u8, &Self> = entries.iter().map(|(name, tree)| (*name, tree)).collect();
                let mut entries: Vec<_> = last.into_iter().map(|(name, tree)| (name, tree.build(turn))).collect();
                let text =
                    entries.iter().map(|(name, node)| format!("{name}:{}", node.text)).collect::<Vec<_>>().join(",");
                let middle = turn % entries.len().max(1);
                entries.rotate_left(middle);
                Node { text: format!("{{{text}}}"), built: Built::Map(entries.into_iter().collect()) }
            }
            Self::Variant(one, other) => {
                let (one, other) = (Box::new(one.build(turn)), Box::new(other.build(turn)));
                let text = format!("variant [{},{}]", one.text, other.text);
                Node { text, built: Built::Variant(Variant::Tuple(one, other)) }
            }
        }
    }
}

proptest! {
    /// Equal messages have equal fingerprints in every process, and different messages have different fingerprints. The
    /// order of elements changes the fingerprint, except in hash tables.
    #[test]
    fn hash_tables_are_unordered_and_lists_are_ordered(one in tree(), other in tree(), turn in 1..4_usize) {
        let of = |tree: &Tree, turn| { let node = tree.build(turn); (Fingerprint::of(&node).unwrap(), node.text) };
        let ((first, text), (second, again)) = (of(&one, 0), of(&one, turn));
        prop_assert_eq!(&text, &again);
        prop_assert_eq!(first, second, "{}", &text);
        let (third, other) = of(&other, 0);
        prop_assert_eq!(first == third, text == other, "{} and {}", text, other);
    }
}

#[test]
fn a_set_of_many_elements_has_one_fingerprint_in_any_order() {
    let of = || Fingerprint::of(&(0..100).collect::<HashSet<u32>>()).unwrap();
    let first = of();
    assert!((0..20).all(|_| of() == first));
}

/// Only hash sets and hash maps are hashed as unordered. The library recognizes them by the type names that this
/// compiler prints.
#[test]
fn only_hash_tables_count_as_unordered() {
    struct Collects<F>(F);

    impl<I: IntoIterator<Item: Serialize>, F: Fn() -> I> Serialize for Collects<F> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_seq((self.0)())
        }
    }

    let set: HashSet<u32> = (0..100).collect();
    let map: HashMap<u32, u32> = (0..100).map(|n| (n, n)).collect();
    let expected = Fingerprint::of(&set).unwrap();
    assert_eq!(Fingerprint::of(&&&set).unwrap(), expected);
    assert_eq!(Fingerprint::of(&Collects(|| set.iter())).unwrap(), expected);
    assert_eq!(Fingerprint::of(&Collects(|| set.clone())).unwrap(), expected);
    assert_eq!(Fingerprint::of(&Collects(|| set.iter().copied().filter(|_| true).map(u64::from))).unwrap(), expected);
    assert_eq!(Fingerprint::of(&Collects(|| map.keys())).unwrap(), expected);
    assert_eq!(Fingerprint::of(&Collects(|| map.values().copied())).unwrap(), expected);

    // Every other collection is hashed as an array, even if its elements are tables.
    let array = Fingerprint::of(&(300, 1, 2)).unwrap();
    assert_eq!(Fingerprint::of(&[300, 1, 2]).unwrap(), array);
    assert_eq!(Fingerprint::of(&vec![300, 1, 2]).unwrap(), array);
    assert_eq!(Fingerprint::of(&VecDeque::from([300, 1, 2])).unwrap(), array);
    assert_eq!(Fingerprint::of(&LinkedList::from([300, 1, 2])).unwrap(), array);
    assert_eq!(Fingerprint::of(&Collects(|| [300_u16, 1, 2].iter().map(|n| u32::from(*n)))).unwrap(), array);
    assert_ne!(Fingerprint::of(&HashSet::from([300, 1, 2])).unwrap(), array);
    assert_eq!(Fingerprint::of(&BTreeSet::from([300, 1, 2])).unwrap(), Fingerprint::of(&(1, 2, 300)).unwrap());
    let (one, two) = (HashSet::from([1]), HashSet::from([2]));
    let (forth, back) = (vec![one.clone(), two.clone()], vec![two, one]);
    assert_ne!(Fingerprint::of(&forth).unwrap(), Fingerprint::of(&back).unwrap());
}

/// Two keys of a table may have the same JSON name. The fingerprint must be the same for every order in which the table
/// iterates over the two entries.
#[test]
fn table_keys_with_one_json_name_have_one_fingerprint() {
    #[derive(PartialEq, Eq, Hash)]
    struct Named(u8);

    impl Serialize for Named {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_str("name")
        }
    }

    let of = || Fingerprint::of(&(0..10).map(|n| (Named(n), n)).collect::<HashMap<_, _>>()).unwrap();
    let first = of();
    assert!((0..20).all(|_| of() == first));
}
