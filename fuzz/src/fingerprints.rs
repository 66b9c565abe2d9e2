//! Fingerprints of producers' payloads.

use std::collections::BTreeMap;

use idem_runtime::key::Fingerprint;
use serde::Serialize;
use serde_json::Value;

/// Asserts that equal JSON has equal fingerprints in every spelling, and that different JSON has different
/// fingerprints.
pub fn fingerprints(data: &[u8]) {
    // The documents are separated by a byte that no text contains.
    let mut documents = data.split(|byte| *byte == 0xff).filter_map(|text| serde_json::from_slice::<Value>(text).ok());
    let (Some(one), other) = (documents.next(), documents.next()) else { return };
    let pretty = serde_json::to_string_pretty(&one).expect("writes");
    assert_eq!(of(&one), of(&serde_json::from_str::<Value>(&pretty).expect("reads")), "{one}");
    assert_eq!(of(&one), of(&typed(&one)), "{one}");
    assert_ne!(of(&one), of(&[&one]), "{one}");
    if let Some(other) = other {
        let equal = equal(&one, &other);
        assert_eq!(equal, of(&one) == of(&other), "{one} and {other}");
        assert_eq!(of(&[&one, &other]) == of(&[&other, &one]), equal, "{one} and {other}");
    }
}

/// Returns whether two values are equal. Numbers are compared by value: `1` is `1.0`.
pub(crate) fn equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => decimal(&one.to_string()) == decimal(&other.to_string()),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| equal(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let same = |(name, value): (&String, &Value)| other.get(name).is_some_and(|other| equal(value, other));
            one.len() == other.len() && one.iter().all(same)
        }
        (one, other) => one == other,
    }
}

/// Returns the sign, the digits without zeros at either end, and the exponent of the last digit.
fn decimal(number: &str) -> (bool, String, i32) {
    let (digits, exponent) = number.split_once('e').unwrap_or((number, "0"));
    let behind = digits.split_once('.').map_or(0, |(_, behind)| behind.len());
    let all: String = digits.chars().filter(char::is_ascii_digit).collect();
    let kept = all.trim_end_matches('0');
    let exponent: i32 = exponent.parse().expect("a number has an exponent or none");
    let exponent = exponent + i32::try_from(all.len() - kept.len()).expect("few") - i32::try_from(behind).expect("few");
    let kept = kept.trim_start_matches('0');
    if kept.is_empty() { (false, String::new(), 0) } else { (number.starts_with('-'), kept.to_owned(), exponent) }
}

fn of<T: Serialize + ?Sized>(value: &T) -> Fingerprint {
    Fingerprint::of(value).expect("JSON serializes")
}

/// Converts a JSON value to other Rust types with the same meaning.
fn typed(value: &Value) -> Typed<'_> {
    match value {
        Value::Null => Typed::Absent(None),
        Value::Bool(flag) => Typed::Flag(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(number), ..) => Typed::Signed(Some(number.into())),
            (None, Some(number), _) => Typed::Unsigned(number.into()),
            (None, None, number) => Typed::Float(number.unwrap_or_default()),
        },
        Value::String(text) => Typed::Text(text),
        Value::Array(values) => Typed::List(values.iter().rev().map(typed).rev().collect()),
        Value::Object(entries) => Typed::Map(entries.iter().map(|(name, value)| (&**name, typed(value))).collect()),
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Typed<'a> {
    Absent(Option<u8>),
    Flag(bool),
    Signed(Option<i128>),
    Unsigned(u128),
    Float(f64),
    Text(&'a str),
    List(Box<[Typed<'a>]>),
    Map(BTreeMap<&'a str, Typed<'a>>),
}
