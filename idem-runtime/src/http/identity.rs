//! The operation that a request names (its key), and the payload that is compared.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use http::HeaderMap;
use http::header::HeaderName;
use serde::Serialize;
use serde::de::IgnoredAny;
use sha2::{Digest, Sha256};

use crate::key::{Fingerprint, FingerprintError, Key, KeyBuilder, KeyError, KeyProblem, SumHash, is_scope};
use crate::sync::SharedOnce;

/// A longer route or caller is replaced by its hash in the key.
const MAX_ROUTE_BYTES: usize = 128;
const MAX_CALLER_BYTES: usize = 64;

/// Scope of layers that have no scope of their own.
const SCOPE: &str = "http";

/// Returns the key under which the layer records a request, so that the record can be looked up:
/// `<method> <route>:<caller>:<the client's key>`, in the `scope` of the layer, or in `http` if it has none.
///
/// Under a profile that compares JSON, `route` is the path of the request. Otherwise it is the template of an axum
/// route (`/payments/{id}`), or empty if the layer has a scope or the template is not known. An empty `route` or
/// `caller` leaves its place empty. The client's `key` is written without the quotes that its header may have.
///
/// # Errors
/// [`KeyError`] if the scope is invalid, the key is blank, or the result is too long.
///
/// ```
/// let key = idem_runtime::http::request_key(None, "POST", "/payments", "alice", "order-42")?;
/// assert_eq!(key.to_string(), "http/POST /payments:alice:order-42");
/// # Ok::<(), idem_runtime::key::KeyError>(())
/// ```
pub fn request_key(scope: Option<&str>, method: &str, route: &str, caller: &str, key: &str) -> Result<Key, KeyError> {
    let scope = scope.unwrap_or(SCOPE);
    let checked = if is_scope(scope) { Ok(()) } else { Err(KeyProblem::InvalidScope) };
    let mut builder = KeyBuilder::under(scope, checked);
    match route.is_empty() {
        true => builder.part(method, Some(':')),
        false => builder.part(&[method, " ", &*bounded(route, MAX_ROUTE_BYTES)].concat(), Some(':')),
    }
    builder.text(":");
    if !caller.is_empty() {
        builder.part(&*bounded(caller, MAX_CALLER_BYTES), Some(':'));
    }
    builder.text(":");
    builder.part(key, None);
    builder.build()
}

/// Returns `text`, or `#` and its hash if it is longer than `limit` or starts with `#`, as hashes do.
fn bounded(text: &str, limit: usize) -> Cow<'_, str> {
    match text.len() > limit || text.starts_with('#') {
        true => Cow::Owned(format!("#{}", hex(&Sha256::digest(text.as_bytes())))),
        false => Cow::Borrowed(text),
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| DIGITS[usize::from(nibble & 15)];
    let mut text = Vec::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.extend_from_slice(&[digit(byte >> 4), digit(*byte)]);
    }
    String::from_utf8(text).expect("digits are text")
}

/// The data that identify a payload. Each field is hashed as a separate value, so different payloads never give the
/// same input to the hash.
#[derive(Serialize)]
pub(super) struct Payload<'a> {
    target: Option<Target<'a>>,
    headers: Vec<(String, Vec<String>)>,
    body: BodyPrint,
}

/// Path and query.
pub(super) type Target<'a> = (&'a str, Option<&'a str>);

/// The fingerprint input that stands for a body.
#[derive(Serialize)]
pub(super) enum BodyPrint {
    /// The SHA-256 of the bytes.
    Sha256(String),
    /// The JSON value of the body.
    Json(Json),
}

impl BodyPrint {
    pub(super) fn of_digest(digest: &[u8; 32]) -> Self {
        Self::Sha256(hex(digest))
    }

    pub(super) fn of_bytes(bytes: &[u8]) -> Self {
        Self::Sha256(hex(&Sha256::digest(bytes)))
    }

    /// Parses `bytes` as JSON. Bytes that are not JSON are compared as bytes.
    ///
    /// An object with two members of one name is an error: readers differ about which one counts.
    pub(super) fn of_json(bytes: &Bytes) -> Result<Self, TwoMembers> {
        match serde_json::from_slice::<IgnoredAny>(bytes) {
            Ok(_) => Reader { rest: bytes }.value().map(Self::Json),
            Err(_) => Ok(Self::of_bytes(bytes)),
        }
    }
}

impl<'a> Payload<'a> {
    pub(super) fn new(target: Option<Target<'a>>, headers: &HeaderMap, names: &[HeaderName], body: BodyPrint) -> Self {
        // Maps each byte to one character.
        let text = |value: &[u8]| value.iter().copied().map(char::from).collect::<String>();
        let values = |name| headers.get_all(name).iter().map(|value| text(value.as_bytes())).collect();
        let headers = names.iter().map(|name| (name.as_str().to_owned(), values(name))).collect();
        Self { target, headers, body }
    }

    pub(super) fn fingerprint(&self) -> Result<Fingerprint, FingerprintError> {
        let (Ok(known), [], BodyPrint::Sha256(digest)) = (known(), &self.headers[..], &self.body) else {
            return Fingerprint::of(self);
        };
        let body = SumHash::of_object([[known.sha256, SumHash::of(digest)?]]);
        let target = [known.target, SumHash::of(&self.target)?];
        Ok(Fingerprint::of_object([target, [known.headers, known.no_headers], [known.body, body]]))
    }
}

/// Hashes of the parts that are the same in every payload that is compared by the bytes of its body alone.
struct PartHashes {
    target: SumHash,
    headers: SumHash,
    no_headers: SumHash,
    body: SumHash,
    sha256: SumHash,
}

fn known() -> &'static Result<PartHashes, FingerprintError> {
    static KNOWN: SharedOnce<Result<PartHashes, FingerprintError>> = SharedOnce::new();
    KNOWN.get_or_init(|| {
        let of = |name: &str| SumHash::of(name);
        Ok(PartHashes {
            target: of("target")?,
            headers: of("headers")?,
            no_headers: SumHash::of::<[(); 0]>(&[])?,
            body: of("body")?,
            sha256: of("Sha256")?,
        })
    })
}

/// Error: an object has two members with one name.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct TwoMembers;

/// A JSON value. Numbers are compared by their exact value: a float would make two large amounts equal.
#[derive(Serialize, PartialEq, Debug)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    Array(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

/// Reads JSON that `serde_json` has already accepted as valid, and as not nested too deeply.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn peek(&mut self) -> u8 {
        self.rest = self.rest.trim_ascii_start();
        self.rest.first().copied().unwrap_or_default()
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(len.min(self.rest.len()));
        self.rest = rest;
        taken
    }

    /// Reads the next character if it is `end`. Returns whether it was, or the input is over.
    fn ends(&mut self, end: u8) -> bool {
        let ends = matches!(self.peek(), byte if byte == end || byte == 0);
        if ends {
            self.take(1);
        }
        ends
    }

    fn value(&mut self) -> Result<Json, TwoMembers> {
        Ok(match self.peek() {
            b'n' | b't' | b'f' => match self.take(self.rest.iter().take_while(|it| it.is_ascii_lowercase()).count()) {
                b"null" => Json::Null,
                word => Json::Bool(word == b"true"),
            },
            b'"' => Json::Text(self.text()),
            b'[' => {
                self.take(1);
                let mut elements = Vec::new();
                while !self.ends(b']') {
                    elements.push(self.value()?);
                    self.comma();
                }
                Json::Array(elements)
            }
            b'{' => {
                self.take(1);
                let mut members = BTreeMap::new();
                while !self.ends(b'}') {
                    let name = self.text();
                    self.peek();
                    self.take(1);
                    if members.insert(name, self.value()?).is_some() {
                        return Err(TwoMembers);
                    }
                    self.comma();
                }
                Json::Object(members)
            }
            _ => {
                let is_number = |byte: &&u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                let len = self.rest.iter().take_while(is_number).count().max(1);
                Json::Number(number(self.take(len)))
            }
        })
    }

    fn comma(&mut self) {
        if self.peek() == b',' {
            self.take(1);
        }
    }

    fn text(&mut self) -> String {
        self.peek();
        let mut len = 1;
        while let Some(byte) = self.rest.get(len) {
            len += if *byte == b'\\' { 2 } else { 1 };
            if *byte == b'"' {
                break;
            }
        }
        serde_json::from_slice(self.take(len)).unwrap_or_default()
    }
}

/// Writes a number in its only form without leading and trailing zeros: `15e-1` for 1.50.
fn number(written: &[u8]) -> String {
    let written = String::from_utf8_lossy(written);
    let (sign, rest) = written.strip_prefix('-').map_or(("", &*written), |rest| ("-", rest));
    let (digits, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let Ok(exponent) = exponent.parse::<i64>() else { return written.into_owned() };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let all = format!("{whole}{fraction}");
    let significant = all.trim_end_matches('0');
    let dropped = all.len() - significant.len();
    let exponent = i128::from(exponent) - fraction.len() as i128 + dropped as i128;
    match significant.trim_start_matches('0') {
        "" => "0".to_owned(),
        digits => format!("{sign}{digits}e{exponent}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn fields_of_a_key_never_run_into_each_other() {
        let parts = ["", "a", "a:", ":a", "a:a", "#a", "/a", &"a".repeat(65), &format!("#{}", "a".repeat(64))];
        let mut seen = HashMap::new();
        for route in parts.iter().map(|it| if it.is_empty() { String::new() } else { format!("/{it}") }) {
            for caller in parts {
                for name in parts.iter().filter(|name| !name.is_empty()) {
                    let key = request_key(Some("s"), "POST", &route, caller, name).unwrap();
                    let this = (route.clone(), caller.to_owned(), (*name).to_owned());
                    assert_eq!(seen.insert(key.clone(), this), None, "{key} twice");
                }
            }
        }
        assert_eq!(request_key(Some("s"), "POST", "", "", "k").unwrap().text(), "POST::k");
        assert_eq!(request_key(Some("s"), "POST", "/p/{id}", "alice", "k").unwrap().text(), "POST /p/{id}:alice:k");
    }

    fn print(json: &str) -> Fingerprint {
        let body = BodyPrint::of_json(&Bytes::copy_from_slice(json.as_bytes())).unwrap();
        Fingerprint::of(&body).unwrap()
    }

    #[test]
    fn json_is_compared_by_its_content() {
        let groups = [
            &[r#"{"a":1,"b":[1,2]}"#, " {\n\"b\" : [1.0 , 2e0], \"a\":10e-1 } ", r#"{"\u0061":1,"b":[1,2]}"#][..],
            &[r#"{"a":1,"b":[2,1]}"#],
            &[r#"{"a":1}"#],
            &[r#"{"a":1,"b":null}"#],
            &[r#"{"a":"1"}"#],
            &["9007199254740993"],
            &["9007199254740992", "9007199254740992.0"],
            &["36893488147419103233"],
            &["36893488147419103232"],
            &["0", "-0", "0.0", "0e9"],
            &["-1"],
            &["[]"],
            &["{}"],
            &[r#""a\"]""#],
            &["[[],{}]", "[ [ ] , { } ]"],
            &["null"],
            &["true"],
            &["no json"],
            &["no  json"],
        ];
        let mut seen = HashMap::new();
        for group in groups {
            let first = print(group[0]);
            assert_eq!(seen.insert(first, group[0]), None, "{}", group[0]);
            for other in group {
                assert_eq!(print(other), first, "{other}");
            }
        }
        for twice in [r#"{"a":1,"a":1}"#, r#"[{"b":{"a":1,"\u0061":2}}]"#] {
            let body = Bytes::copy_from_slice(twice.as_bytes());
            assert_eq!(BodyPrint::of_json(&body).map(|_| ()), Err(TwoMembers), "{twice}");
        }
    }

    #[test]
    fn a_payload_of_bytes_alone_has_the_fingerprint_of_all_others() {
        let body = || BodyPrint::of_bytes(b"body");
        for target in [Some(("/a", None)), Some(("/a", Some("b"))), Some(("", Some(""))), None] {
            let payload = Payload::new(target, &HeaderMap::new(), &[], body());
            assert_eq!(payload.fingerprint(), Fingerprint::of(&payload), "{target:?}");
        }
        let named = Payload::new(None, &HeaderMap::new(), &[HeaderName::from_static("x-a")], body());
        assert_eq!(named.fingerprint(), Fingerprint::of(&named));
        assert_ne!(named.fingerprint(), Payload::new(None, &HeaderMap::new(), &[], body()).fingerprint());
    }

    #[test]
    fn fields_of_a_payload_never_run_into_each_other() {
        let of = |path: &str, query: Option<&str>, value: Option<&'static str>, body: &str| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert("x-a", http::HeaderValue::from_static(value));
            }
            let names = [HeaderName::from_static("x-a")];
            let body = BodyPrint::of_bytes(body.as_bytes());
            Payload::new(Some((path, query)), &headers, &names, body).fingerprint().unwrap()
        };
        let prints = [
            of("/a", None, None, ""),
            of("/a", Some(""), None, ""),
            of("/a", Some("b"), None, ""),
            of("/ab", None, None, ""),
            of("/a", None, Some(""), ""),
            of("/a", None, Some("b"), ""),
            of("/a", None, None, "b"),
        ];
        assert_eq!(prints.iter().collect::<std::collections::HashSet<_>>().len(), prints.len());
    }
}
