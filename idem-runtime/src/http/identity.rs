//! The key of a request, and the payload by which two requests with one key are compared.

use std::borrow::Cow;

use http::header::{HOST, HeaderMap, HeaderName};
use http::uri::{Authority, Uri};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::json::{self, JsonDefect, JsonMembers};
use crate::key::{Fingerprint, FingerprintError, Key, KeyBuilder, KeyError, SumHash, check_own_scope};
use crate::sync::SharedOnce;

/// Longest route in a key, in bytes. A hash replaces a longer route, or a caller longer than [`MAX_CALLER_BYTES`].
const MAX_ROUTE_BYTES: usize = 128;
const MAX_CALLER_BYTES: usize = 64;

/// Scope of a layer for which no scope is set.
const SCOPE: &str = "http";

/// Returns the key under which the layer records a request, so that the record can be looked up:
/// `<method> <route>:<caller>:<the client's key>`, in the `scope` of the layer, or in `http` if the layer has no scope.
///
/// Under a profile that compares JSON, `route` is the path of the request. Under other profiles, `route` is the
/// template of an axum route, without the names of its parameters (`/payments/{}`, `/files/{*}`). Under these profiles,
/// `route` is empty if the layer has a scope, or if the template is not known. With
/// [`separate_hosts`](super::IdempotencyLayer::separate_hosts) the host precedes the route:
/// `api.example.com/payments/{}`. If `route` or `caller` is empty, its part of the key is empty. The client's `key` is
/// written without the quotes that its header may have.
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
    let mut builder = KeyBuilder::under(scope, check_own_scope(scope));
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

/// Returns the template of a route without the names of its parameters, so that renaming a parameter changes no key:
/// `/payments/{}` for `/payments/{id}`, `/files/{*}` for `/files/{*path}`. Escaped braces stay escaped.
#[cfg(feature = "axum")]
pub(super) fn unnamed(template: &str) -> Cow<'_, str> {
    if !template.contains('{') {
        return Cow::Borrowed(template);
    }
    let mut route = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let (text, parameter) = rest.split_at(at);
        route.push_str(text);
        rest = match (parameter.strip_prefix("{{"), parameter.find('}')) {
            (Some(rest), _) => {
                route.push_str("{{");
                rest
            }
            (None, Some(end)) => {
                route.push_str(if parameter.starts_with("{*") { "{*}" } else { "{}" });
                &parameter[end + 1..]
            }
            // This case does not happen, because a template of axum closes its braces.
            (None, None) => {
                route.push_str(parameter);
                ""
            }
        };
    }
    Cow::Owned(route + rest)
}

/// Returns the host that a request names, in lower case and without a default port: the authority of its target, which
/// is `:authority` in HTTP/2, or the only `Host` field of the request.
pub(super) fn host(target: &Uri, headers: &HeaderMap) -> Option<String> {
    let field;
    let authority = match target.authority() {
        Some(authority) => authority,
        None => {
            let mut lines = headers.get_all(HOST).iter();
            let line = lines.next().filter(|_| lines.next().is_none())?;
            field = Authority::try_from(line.as_bytes()).ok()?;
            &field
        }
    };
    let name = authority.host().to_ascii_lowercase();
    match authority.port_u16() {
        _ if name.is_empty() => None,
        // Both default ports are left out, because the scheme is unknown behind a proxy that ends TLS.
        None | Some(80 | 443) => Some(name),
        Some(port) => Some(format!("{name}:{port}")),
    }
}

/// Returns `text`, or `#` and the hash of `text`. The hash is returned if `text` is longer than `limit`, or starts with
/// `#` and so could be mistaken for a hash.
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

/// Path and query of a request.
pub(super) type Target<'a> = (&'a str, Option<&'a str>);

/// Hash that enters the fingerprint in place of a body.
#[derive(Serialize)]
pub(super) enum BodyPrint {
    /// The SHA-256 of the body's bytes.
    Sha256(String),
    /// The print of the body as JSON.
    Json(String),
}

impl BodyPrint {
    pub(super) fn of_digest(digest: &[u8; 32]) -> Self {
        Self::Sha256(hex(digest))
    }

    pub(super) fn of_bytes(bytes: &[u8]) -> Self {
        Self::Sha256(hex(&Sha256::digest(bytes)))
    }

    /// Makes the print of `bytes`, or of their `chosen` members, from their meaning as JSON. If `bytes` are not JSON,
    /// the print is the hash of the bytes.
    ///
    /// # Errors
    /// The body nests too deep, or an object has two members of one name.
    pub(super) fn of_json(bytes: &[u8], chosen: Option<&JsonMembers>) -> Result<Self, JsonDefect> {
        match json::print(bytes, chosen) {
            Ok(print) => Ok(Self::Json(hex(&print))),
            Err(JsonDefect::NotJson) => Ok(Self::of_bytes(bytes)),
            Err(defect) => Err(defect),
        }
    }
}

/// Returns the fingerprint of a body that is compared as JSON; `None` if the body is refused. The fuzzer calls this
/// function.
#[cfg(feature = "conformance")]
#[doc(hidden)]
pub fn json_fingerprint(body: &[u8]) -> Option<Fingerprint> {
    Fingerprint::of(&BodyPrint::of_json(body, None).ok()?).ok()
}

impl<'a> Payload<'a> {
    /// Returns the payload of a request to `uri`. The headers with these `names` are part of the payload.
    pub(super) fn new(
        target: Option<Target<'a>>,
        uri: &Uri,
        headers: &HeaderMap,
        names: &[HeaderName],
        body: BodyPrint,
    ) -> Self {
        // Maps each byte to one character.
        let text = |value: &[u8]| value.iter().copied().map(char::from).collect::<String>();
        let values = |name: &HeaderName| match *name {
            // `host` returns the same host for HTTP/1.1 and HTTP/2.
            HOST => host(uri, headers).into_iter().collect(),
            _ => headers.get_all(name).iter().map(|value| text(value.as_bytes())).collect(),
        };
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

/// Precomputed hashes of the constant parts of a payload that consists of a target and the bytes of a body, without
/// headers.
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn requests_that_differ_in_a_field_get_different_keys() {
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

    #[cfg(feature = "axum")]
    #[test]
    fn names_of_path_parameters_do_not_change_the_route_in_a_key() {
        for (template, route) in [
            ("/payments", "/payments"),
            ("/payments/{id}", "/payments/{}"),
            ("/a/{b}/c/{d}/{*rest}", "/a/{}/c/{}/{*}"),
            ("/{id}.json", "/{}.json"),
            ("/{{id}}/{id}", "/{{id}}/{}"),
            ("/{{{id}}}", "/{{{}}}"),
            ("/{", "/{"),
        ] {
            assert_eq!(unnamed(template), route);
        }
    }

    #[test]
    fn all_spellings_of_a_host_give_the_same_text() {
        let of = |target: &str, fields: &[&str]| {
            let mut headers = HeaderMap::new();
            for field in fields {
                headers.append(HOST, http::HeaderValue::from_str(field).unwrap());
            }
            host(&target.parse().unwrap(), &headers)
        };
        for (target, fields) in [
            ("/pay", &["shop.example"][..]),
            ("/pay", &["SHOP.example:80"]),
            ("/pay", &["Shop.Example:443"]),
            ("/pay", &["user@shop.example"]),
            ("https://Shop.example/pay", &[]),
            ("https://shop.example:443/pay", &["other.example"]),
        ] {
            assert_eq!(of(target, fields).as_deref(), Some("shop.example"), "{target} {fields:?}");
        }
        assert_eq!(of("/", &["shop.example:8080"]).as_deref(), Some("shop.example:8080"));
        assert_eq!(of("/", &["[::1]:8080"]).as_deref(), Some("[::1]:8080"));
        for fields in [&[][..], &[""], &["a", "a"], &["a b"], &["a/b"], &["a, b"]] {
            assert_eq!(of("/", fields), None, "{fields:?}");
        }
    }

    #[test]
    fn a_body_that_is_not_json_is_compared_by_its_bytes() {
        let of = |body: &[u8]| Fingerprint::of(&BodyPrint::of_json(body, None).unwrap()).unwrap();
        let bodies =
            [&b"no json"[..], b"no  json", b"\"caf\xe9\"", b"\"caf\xe8\"", b"\"\xef\xbf\xbd\"", b"[1", b"[1]", b""];
        let prints: std::collections::HashSet<_> = bodies.into_iter().map(of).collect();
        assert_eq!(prints.len(), bodies.len());
        let digest = BodyPrint::of_bytes(b"[1]");
        assert_ne!(of(b"[1]"), Fingerprint::of(&digest).unwrap());
    }

    #[test]
    fn precomputed_hashes_do_not_change_a_fingerprint() {
        let body = || BodyPrint::of_bytes(b"body");
        for target in [Some(("/a", None)), Some(("/a", Some("b"))), Some(("", Some(""))), None] {
            let payload = Payload::new(target, &Uri::default(), &HeaderMap::new(), &[], body());
            assert_eq!(payload.fingerprint(), Fingerprint::of(&payload), "{target:?}");
        }
        let named = Payload::new(None, &Uri::default(), &HeaderMap::new(), &[HeaderName::from_static("x-a")], body());
        assert_eq!(named.fingerprint(), Fingerprint::of(&named));
        assert_ne!(
            named.fingerprint(),
            Payload::new(None, &Uri::default(), &HeaderMap::new(), &[], body()).fingerprint()
        );
    }

    #[test]
    fn requests_that_differ_in_a_field_get_different_payloads() {
        let of = |path: &str, query: Option<&str>, value: Option<&'static str>, body: &str| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert("x-a", http::HeaderValue::from_static(value));
            }
            let names = [HeaderName::from_static("x-a")];
            let body = BodyPrint::of_bytes(body.as_bytes());
            Payload::new(Some((path, query)), &Uri::default(), &headers, &names, body).fingerprint().unwrap()
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
