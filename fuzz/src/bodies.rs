//! Request bodies that the HTTP layer compares as JSON.

use idem_runtime::__stored::json_fingerprint;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::fingerprints::equal;
use super::input::Input;

/// Asserts that the layer takes two bodies for the same only if they mean the same to `serde_json`, or are equal bytes
/// that are not JSON.
pub fn bodies(data: &[u8]) {
    let mut input = Input(data);
    let (one, other) = (input.bytes(), input.rest());
    let (Some(first), Some(second)) = (json_fingerprint(one), json_fingerprint(other)) else { return };
    let is_duplicate = first == second;
    if !is_json(one) || !is_json(other) {
        assert_eq!(is_duplicate, one == other);
    }
    // Values that `serde_json` can't hold, such as numbers out of the range of a double, are compared by the layer
    // alone.
    if let (Ok(one), Ok(other)) = (serde_json::from_slice::<Value>(one), serde_json::from_slice::<Value>(other)) {
        assert!(!is_duplicate || equal(&one, &other), "{one} and {other}");
        let is_exact = !has_float(&one) && !has_float(&other);
        assert!(is_duplicate || !is_exact || one != other, "{one} twice");
    }
}

fn is_json(body: &[u8]) -> bool {
    std::str::from_utf8(body).is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok())
}

/// Returns whether a number was rounded to a double, perhaps.
fn has_float(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(values) => values.iter().any(has_float),
        Value::Object(members) => members.values().any(has_float),
        _ => false,
    }
}
