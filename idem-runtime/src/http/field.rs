//! Parsers of header fields: the key, which is a `String` of RFC 9651 or a bare token, and the digests of RFC 9530.

use http::HeaderMap;
use http::header::HeaderName;

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
    /// The value is neither a structured field's `String` nor a bare token.
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
        [b'"', rest @ ..] => {
            let (key, rest) = string(rest).ok_or(KeyFieldProblem::Malformed)?;
            parameters(rest).ok_or(KeyFieldProblem::Malformed)?;
            key
        }
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

/// Reads a `String` whose opening quote has been read. Returns its text and the rest of the field.
fn string(mut rest: &[u8]) -> Option<(String, &[u8])> {
    let mut text = String::with_capacity(rest.len().min(MAX_KEY_BYTES));
    loop {
        match rest {
            [b'"', rest @ ..] => return Some((text, rest)),
            [b'\\', byte @ (b'"' | b'\\'), left @ ..] | [byte @ (b' '..=b'[' | b']'..=b'~'), left @ ..] => {
                text.push(char::from(*byte));
                rest = left;
            }
            _ => return None,
        }
    }
}

/// Reads a key without quotes, as most clients send it: printable characters except those with a meaning in a
/// structured field.
fn token(bare: &[u8]) -> Option<String> {
    let is_plain = |byte: &u8| matches!(byte, b'!'..=b'~') && !matches!(byte, b'"' | b',' | b';' | b'\\');
    let text = std::str::from_utf8(bare).ok()?;
    bare.iter().all(is_plain).then(|| text.to_owned())
}

/// Skips the parameters of an item (`;name` or `;name=value`) to the end of the field. They do not belong to the key.
fn parameters(mut rest: &[u8]) -> Option<()> {
    while let [b';', left @ ..] = rest {
        let left = &left[left.iter().take_while(|byte| **byte == b' ').count()..];
        let [b'a'..=b'z' | b'*', ..] = left else { return None };
        let name =
            left.iter().take_while(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'*')).count();
        rest = match &left[name..] {
            [b'=', value @ ..] => item(value)?,
            left => left,
        };
    }
    rest.is_empty().then_some(())
}

/// Skips the bare item at the start of `rest`, and returns the text after it.
fn item(rest: &[u8]) -> Option<&[u8]> {
    let after = |len: usize| rest.get(len..);
    match rest {
        [b'"', rest @ ..] => string(rest).map(|(_, rest)| rest),
        [b':', rest @ ..] => {
            let len = rest.iter().position(|byte| *byte == b':')?;
            base64(&rest[..len])?;
            rest.get(len + 1..)
        }
        [b'?', b'0' | b'1', rest @ ..] => Some(rest),
        [b'@', date @ ..] => {
            let len = number(date)?;
            (!date[..len].contains(&b'.')).then(|| &date[len..])
        }
        [b'%', b'"', text @ ..] => display_string(text),
        [b'-' | b'0'..=b'9', ..] => after(number(rest)?),
        [b'a'..=b'z' | b'A'..=b'Z' | b'*', ..] => {
            let is_plain = |byte: &&u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(byte);
            after(rest.iter().take_while(is_plain).count())
        }
        _ => None,
    }
}

/// Returns the length of the number at the start of `rest`: up to 15 digits, or up to 12 before and 3 after the point.
fn number(rest: &[u8]) -> Option<usize> {
    let sign = usize::from(rest.first() == Some(&b'-'));
    let digits = |from: usize| rest[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let whole = digits(sign);
    match rest.get(sign + whole) {
        Some(b'.') => {
            let fraction = digits(sign + whole + 1);
            ((1..=12).contains(&whole) && (1..=3).contains(&fraction)).then_some(sign + whole + 1 + fraction)
        }
        _ => (1..=15).contains(&whole).then_some(sign + whole),
    }
}

/// Skips a display string whose opening quote has been read, and returns the text after it.
fn display_string(mut rest: &[u8]) -> Option<&[u8]> {
    let mut text = Vec::new();
    loop {
        match rest {
            [b'"', rest @ ..] => return std::str::from_utf8(&text).ok().map(|_| rest),
            [b'%', high @ (b'0'..=b'9' | b'a'..=b'f'), low @ (b'0'..=b'9' | b'a'..=b'f'), left @ ..] => {
                let digit = |byte: u8| if byte.is_ascii_digit() { byte - b'0' } else { byte - b'a' + 10 };
                text.push(digit(*high) << 4 | digit(*low));
                rest = left;
            }
            [byte @ (b' '..=b'$' | b'&'..=b'~'), left @ ..] => {
                text.push(*byte);
                rest = left;
            }
            _ => return None,
        }
    }
}

/// The digests in `Content-Digest` that the layer can check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Digests {
    pub(super) sha256: Option<[u8; 32]>,
    pub(super) sha512: Option<[u8; 64]>,
}

/// Reads `Content-Digest`; `None` if it is malformed. Unknown algorithms are skipped.
pub(super) fn digests(headers: &HeaderMap) -> Option<Digests> {
    let mut digests = Digests::default();
    for line in headers.get_all(CONTENT_DIGEST) {
        for member in line.to_str().ok()?.split(',') {
            let (name, value) = member.trim_matches([' ', '\t']).split_once('=')?;
            let value = value.strip_prefix(':')?.split_once(':')?.0;
            let bytes = base64(value.as_bytes())?;
            match name {
                "sha-256" => digests.sha256 = Some(bytes.try_into().ok()?),
                "sha-512" => digests.sha512 = Some(bytes.try_into().ok()?),
                _ => {}
            }
        }
    }
    Some(digests)
}

/// Decodes Base64, with or without padding.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    let digits = &text[..text.len() - padding];
    if digits.len() % 4 == 1 || padding > 2 || (padding > 0 && !text.len().is_multiple_of(4)) {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for group in digits.chunks(4) {
        let mut bits = 0_u32;
        for byte in group {
            let six = match byte {
                b'A'..=b'Z' => byte - b'A',
                b'a'..=b'z' => byte - b'a' + 26,
                b'0'..=b'9' => byte - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(six);
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

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
    fn a_quoted_and_a_bare_key_are_one_key() {
        for line in ["8e03978e", "\"8e03978e\"", "  \"8e03978e\"\t", "\"8e03978e\";v=1", "\"8e03978e\"; a;b=?0;c=\"x\""]
        {
            assert_eq!(of(&[line.as_bytes()]).as_deref(), Ok("8e03978e"), "{line}");
        }
        assert_eq!(of(&[br#""a \"b\" \\ c""#]).as_deref(), Ok(r#"a "b" \ c"#));
        assert_eq!(of(&[b"order:4/2%"]).as_deref(), Ok("order:4/2%"));
    }

    #[test]
    fn invalid_keys_are_distinguished() {
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
    fn digests_are_read() {
        let mut headers = HeaderMap::new();
        assert_eq!(digests(&headers), Some(Digests::default()));
        let empty = "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:";
        let value = format!("unixsum=:AAAA:, {empty}");
        headers.insert("content-digest", HeaderValue::from_str(&value).unwrap());
        let sha256 = digests(&headers).unwrap().sha256.unwrap();
        assert_eq!(sha256[..4], [0xe3, 0xb0, 0xc4, 0x42]);
        for wrong in ["sha-256=47DE", "sha-256=:47DE:", "sha-256=:47D!:", "sha-256", "sha-256=:A:"] {
            headers.insert("content-digest", HeaderValue::from_str(wrong).unwrap());
            assert_eq!(digests(&headers), None, "{wrong}");
        }
    }

    proptest! {
        /// A common parser of structured fields (`sfv`) agrees about every `String`.
        #[test]
        fn structured_fields_are_read_as_others_read_them(
            text in r#""([ -~]|\\"|\\\\){0,12}"?(; ?[a-z*][a-z0-9]?(=(-?[0-9]{1,3}(\.[0-9])?|"x"|tok|\?1|:YQ==:|@5|%"%c3%a9"))?){0,2}"#
        ) {
            let theirs = sfv::Parser::new(text.as_bytes()).parse::<sfv::Item>().ok().and_then(|item| {
                Some(item.bare_item.as_string()?.as_str().to_owned())
            });
            let ours = match of(&[text.as_bytes()]) {
                Err(KeyFieldProblem::Empty) => theirs.clone().filter(|it| it.trim().is_empty()),
                ours => ours.ok(),
            };
            prop_assert_eq!(ours, theirs);
        }
    }
}
