//! Request bodies that the HTTP layer compares as JSON.

use idem_runtime::__stored::json_fingerprint;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::fingerprints::equal;
use super::input::Input;

/// Asserts that the layer treats two bodies as equal only if `serde_json` parses equal values from them, or if they are
/// equal bytes that are not JSON.
pub fn bodies(data: &[u8]) {
    let mut input = Input(data);
    let (one, other) = (input.bytes(), input.rest());
    let (Some(first), Some(second)) = (json_fingerprint(one), json_fingerprint(other)) else { return };
    let is_duplicate = first == second;
    if !is_json(one) || !is_json(other) {
        assert_eq!(is_duplicate, one == other);
    }
    // `serde_json` can't hold some values, for example numbers beyond the range of a double, so only the layer compares
    // them.
    if let (Ok(one), Ok(other)) = (serde_json::from_slice::<Value>(one), serde_json::from_slice::<Value>(other)) {
        assert!(!is_duplicate || equal(&one, &other), "{one} and {other}");
        let is_exact = !has_float(&one) && !has_float(&other);
        assert!(is_duplicate || !is_exact || one != other, "{one} twice");
    }
}

fn is_json(body: &[u8]) -> bool {
    std::str::from_utf8(body).is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok())
}

/// Returns whether the value has a number that `serde_json` may have rounded to a double.
fn has_float(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(values) => values.iter().any(has_float),
        Value::Object(members) => members.values().any(has_float),
        _ => false,
    }
}
