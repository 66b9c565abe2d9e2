//! Parsers of header fields: the key, which is a `String` of RFC 9651 or has no quotes, and the digests of RFC 9530.

use std::borrow::Cow;
use std::convert::Infallible;

use http::HeaderMap;
use http::header::HeaderName;
use sfv::visitor::{DictionaryVisitor, EntryVisitor, Ignored, InnerListVisitor, ItemVisitor};
use sfv::{BareItemFromInput, KeyRef, Parser, StringRef};

/// Longest key, in bytes.
pub(super) const MAX_KEY_BYTES: usize = 255;

const CONTENT_DIGEST: HeaderName = HeaderName::from_static("content-digest");

/// Defect of a field that should hold a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeyFieldProblem {
    /// The field is missing.
    Missing,
    /// The field has more than one line.
    Repeated,
    /// The value is neither a structured field's `String` nor a key without quotes.
    Malformed,
    /// The key is empty or blank.
    Empty,
    /// The key is longer than [`MAX_KEY_BYTES`].
    TooLong,
}

/// Reads the key in the field `name`: `"k"`, `k` and `"k";v=1` are one key.
pub(super) fn key(headers: &HeaderMap, name: &HeaderName) -> Result<String, KeyFieldProblem> {
    let mut lines = headers.get_all(name).iter();
    let line = lines.next().ok_or(KeyFieldProblem::Missing)?;
    if lines.next().is_some() {
        return Err(KeyFieldProblem::Repeated);
    }
    let key = match trim(line.as_bytes()) {
        [] => return Err(KeyFieldProblem::Empty),
        quoted @ [b'"', ..] => string(quoted).ok_or(KeyFieldProblem::Malformed)?,
        bare => token(bare).ok_or(KeyFieldProblem::Malformed)?,
    };
    match key.len() {
        _ if key.trim().is_empty() => Err(KeyFieldProblem::Empty),
        0..=MAX_KEY_BYTES => Ok(key),
        _ => Err(KeyFieldProblem::TooLong),
    }
}

fn trim(line: &[u8]) -> &[u8] {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = line.iter().position(|byte| !is_blank(byte)).unwrap_or(line.len());
    let end = line.iter().rposition(|byte| !is_blank(byte)).map_or(start, |at| at + 1);
    &line[start..end]
}

/// Reads a `String`. The parameters (`;name=value`) after the `String` are not part of the key.
fn string(quoted: &[u8]) -> Option<String> {
    let text = Parser::new(quoted).parse_item::<Cow<'_, StringRef>>().ok()?;
    Some(text.into_owned().into())
}

/// Returns whether the value of `Content-Type` is the media type `name`, with or without a suffix and parameters.
pub(super) fn is_type(value: &[u8], name: &str) -> bool {
    let Some((start, rest)) = value.split_at_checked(name.len()) else { return false };
    start.eq_ignore_ascii_case(name.as_bytes()) && matches!(rest.first(), None | Some(b'+' | b';' | b' ' | b'\t'))
}

/// Reads a key without quotes, as most clients send it: printable characters except those with a meaning in a
/// structured field.
fn token(bare: &[u8]) -> Option<String> {
    let is_plain = |byte: &u8| matches!(byte, b'!'..=b'~') && !matches!(byte, b'"' | b',' | b';' | b'\\');
    let text = std::str::from_utf8(bare).ok()?;
    bare.iter().all(is_plain).then(|| text.to_owned())
}

/// The digests in `Content-Digest` that the layer can check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Digests {
    pub(super) sha256: Option<[u8; 32]>,
    pub(super) sha512: Option<[u8; 64]>,
}

/// Reads `Content-Digest`; `None` if the field is malformed. Unknown algorithms are skipped. An empty field has no
/// digest.
pub(super) fn digests(headers: &HeaderMap) -> Option<Digests> {
    let mut values = DigestValues::default();
    for line in headers.get_all(CONTENT_DIGEST) {
        Parser::new(trim(line.as_bytes())).parse_dictionary_with_visitor(&mut values).ok()?;
    }
    let DigestValues { sha256, sha512 } = values;
    Some(Digests {
        sha256: sha256.map(<[u8; 32]>::try_from).transpose().ok()?,
        sha512: sha512.map(<[u8; 64]>::try_from).transpose().ok()?,
    })
}

/// The digests of the known algorithms, collected while a dictionary is read. If a name occurs several times, its last
/// value is used. A value that is not a byte sequence becomes an empty value, whose length is invalid.
#[derive(Default)]
struct DigestValues {
    sha256: Option<Vec<u8>>,
    sha512: Option<Vec<u8>>,
}

impl<'de> DictionaryVisitor<'de> for &mut DigestValues {
    type Out = ();
    type Error = Infallible;

    fn entry(&mut self, name: &'de KeyRef) -> Result<impl EntryVisitor<'de>, Infallible> {
        Ok(match name.as_str() {
            "sha-256" => Some(DigestValue(&mut self.sha256)),
            "sha-512" => Some(DigestValue(&mut self.sha512)),
            _ => None,
        })
    }

    fn finish(self) -> Result<(), Infallible> {
        Ok(())
    }
}

struct DigestValue<'a>(&'a mut Option<Vec<u8>>);

impl<'de> EntryVisitor<'de> for DigestValue<'_> {
    type Error = Infallible;

    fn item(self) -> Result<impl ItemVisitor<'de>, Infallible> {
        Ok(|item| {
            *self.0 = Some(if let BareItemFromInput::ByteSequence(bytes) = item { bytes } else { Vec::new() });
            Ok::<_, Infallible>(Ignored)
        })
    }

    fn inner_list(self) -> Result<impl InnerListVisitor<'de>, Infallible> {
        *self.0 = Some(Vec::new());
        Ok(Ignored)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const NAME: HeaderName = HeaderName::from_static("idempotency-key");

    fn of(lines: &[&[u8]]) -> Result<String, KeyFieldProblem> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(NAME, HeaderValue::from_bytes(line).unwrap());
        }
        key(&headers, &NAME)
    }

    #[test]
    fn a_key_in_quotes_and_the_same_key_without_quotes_are_one_key() {
        for line in ["8e03978e", "\"8e03978e\"", "  \"8e03978e\"\t", "\"8e03978e\";v=1", "\"8e03978e\"; a;b=?0;c=\"x\""]
        {
            assert_eq!(of(&[line.as_bytes()]).as_deref(), Ok("8e03978e"), "{line}");
        }
        assert_eq!(of(&[br#""a \"b\" \\ c""#]).as_deref(), Ok(r#"a "b" \ c"#));
        assert_eq!(of(&[b"order:4/2%"]).as_deref(), Ok("order:4/2%"));
    }

    #[test]
    fn each_defect_of_a_key_field_has_its_own_error() {
        use KeyFieldProblem::{Empty, Malformed, Missing, Repeated, TooLong};
        assert_eq!(of(&[]), Err(Missing));
        assert_eq!(of(&[b"a", b"a"]), Err(Repeated));
        for empty in [&b""[..], b"  ", b"\"\"", b"\"   \""] {
            assert_eq!(of(&[empty]), Err(Empty), "{empty:?}");
        }
        for malformed in [
            &b"a, b"[..],
            b"\"a\", \"b\"",
            b"a b",
            b"\"a",
            b"a\"",
            b"\"a\"b",
            b"\"\\a\"",
            b"\"a\";",
            b"\"a\";A=1",
            b"\"a\";v=",
            b"a;v=1",
            b"caf\xc3\xa9",
            b"\"\xc3\xa9\"",
            b"\"tab\t\"",
            b"a\\b",
        ] {
            assert_eq!(of(&[malformed]), Err(Malformed), "{malformed:?}");
        }
        assert_eq!(of(&["x".repeat(255).as_bytes()]), Ok("x".repeat(255)));
        assert_eq!(of(&["x".repeat(256).as_bytes()]), Err(TooLong));
    }

    #[test]
    fn digests_in_content_digest_are_parsed() {
        let mut headers = HeaderMap::new();
        assert_eq!(digests(&headers), Some(Digests::default()));
        let empty = "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:";
        let value = format!("unixsum=:AAAA:, {empty}");
        headers.insert("content-digest", HeaderValue::from_str(&value).unwrap());
        let sha256 = digests(&headers).unwrap().sha256.unwrap();
        assert_eq!(sha256[..4], [0xe3, 0xb0, 0xc4, 0x42]);
        for wrong in [
            "sha-256=47DE",
            "sha-256=:47DE:",
            "sha-256=:47D!:",
            "sha-256",
            "sha-256=:A:",
            "sha-256=()",
            "md5=:AAAA:garbage",
            ",",
            &format!("{empty}garbage"),
            &format!("{empty} garbage"),
            &format!("{empty},"),
            &format!("{empty}, sha-256=:47DE:"),
            &format!("{empty}, sha-512=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"),
        ] {
            headers.insert("content-digest", HeaderValue::from_str(wrong).unwrap());
            assert_eq!(digests(&headers), None, "{wrong}");
        }
        let unpadded = empty.replace("=:", ":").replace("sha-256:", "sha-256=:");
        let last = format!("sha-256=1, {empty}");
        for right in [empty, &format!(" {empty};v=1\t"), &format!("md5=1, x=(1 2), {empty}"), &unpadded, &last] {
            headers.insert("content-digest", HeaderValue::from_str(right).unwrap());
            assert_eq!(digests(&headers).and_then(|it| it.sha256), Some(sha256), "{right}");
        }
        // Several lines are one dictionary, and an empty field has no digest.
        headers.append("content-digest", HeaderValue::from_static("md5=:AAAA:"));
        assert_eq!(digests(&headers).unwrap().sha256, Some(sha256));
        headers.insert("content-digest", HeaderValue::from_static(""));
        assert_eq!(digests(&headers), Some(Digests::default()));
    }
}
