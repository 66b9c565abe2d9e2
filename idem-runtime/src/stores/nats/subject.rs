//! Subjects of records.
//!
//! The record of the key `1/<scope>/<text>` is the message on `$KV.<bucket>.1.<scope>.<text>`, or on
//! `$KV.<bucket>.<namespace>.1.<scope>.<text>` if the store has a namespace. Scope, text and namespace are one token
//! each. A byte other than a letter, a digit, `-`, `_` and `/` is written as `=` and two hexadecimal digits, and an
//! empty text as `=` alone. So two keys never share a subject, and every subject is also a key that the tools for
//! key-value buckets accept.

use crate::key::Key;

/// Length of the longest bucket name, in bytes. The longest key takes 3072 bytes as a subject, and a server accepts
/// lines of 4096 bytes (`max_control_line`), which also hold the reply subject.
pub(super) const MAX_BUCKET_BYTES: usize = 64;
/// Length of the longest namespace, in bytes.
pub(super) const MAX_NAMESPACE_BYTES: usize = 128;

/// Returns the common beginning of the subjects of a store.
pub(super) fn prefix_of(bucket: &str, namespace: &str) -> String {
    let mut prefix = format!("$KV.{bucket}.");
    if !namespace.is_empty() {
        write_token(namespace, &mut prefix);
        prefix.push('.');
    }
    prefix
}

/// Returns the subject of the record of `key`.
pub(super) fn subject_of(prefix: &str, key: &Key) -> String {
    subject_of_stored(prefix, key.as_str())
}

fn subject_of_stored(prefix: &str, stored: &str) -> String {
    let mut subject = String::with_capacity(prefix.len() + stored.len() * 3 / 2);
    subject.push_str(prefix);
    for (at, part) in stored.splitn(3, '/').enumerate() {
        if at > 0 {
            subject.push('.');
        }
        write_token(part, &mut subject);
    }
    subject
}

/// Returns the subjects of all records whose stored keys begin with `stored`, as [`Filter::prefix`] returns it: a
/// version, and a scope if the filter has one.
///
/// [`Filter::prefix`]: crate::store::Filter
pub(super) fn subjects_of(prefix: &str, stored: &str) -> String {
    let mut subjects = prefix.to_owned();
    for part in stored.split_terminator('/') {
        write_token(part, &mut subjects);
        subjects.push('.');
    }
    subjects.push('>');
    subjects
}

/// Returns the stored form of the key whose record is on `subject`; `None` if no key has this subject. A record of a
/// namespace that looks like the beginning of a key has no key in a store without a namespace.
pub(super) fn key_of(prefix: &str, subject: &str) -> Option<String> {
    let mut stored = String::with_capacity(subject.len());
    for (at, token) in subject.strip_prefix(prefix)?.split('.').enumerate() {
        if at > 0 {
            stored.push('/');
        }
        stored.push_str(&read_token(token)?);
    }
    (subject_of_stored(prefix, &stored) == subject).then_some(stored)
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'/')
}

fn write_token(text: &str, out: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    if text.is_empty() {
        out.push('=');
    }
    for byte in text.bytes() {
        if is_plain(byte) {
            out.push(byte.into());
        } else {
            out.extend(['=', DIGITS[usize::from(byte >> 4)].into(), DIGITS[usize::from(byte & 15)].into()]);
        }
    }
}

/// Returns the text that [`write_token`] has written; `None` for any other token, so that no key has two subjects.
fn read_token(token: &str) -> Option<String> {
    if token == "=" {
        return Some(String::new());
    }
    let mut bytes = Vec::with_capacity(token.len());
    let mut rest = token.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'=' {
            bytes.push(*first);
            continue;
        }
        let [high, low, after @ ..] = rest else { return None };
        bytes.push(digit(*high)? << 4 | digit(*low)?);
        rest = after;
    }
    let text = String::from_utf8(bytes).ok()?;
    let mut again = String::with_capacity(token.len());
    write_token(&text, &mut again);
    (again == token).then_some(text)
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(scope: &str, text: &str) -> Key {
        Key::new(scope, text).expect("a sound key")
    }

    #[test]
    fn a_subject_leads_back_to_its_key() {
        let prefix = prefix_of("orders", "");
        for (scope, text, subject) in [
            ("shop::pay", "order:42", "$KV.orders.1.shop=3A=3Apay.order=3A42"),
            ("s", "a/b.c d*>=", "$KV.orders.1.s.a/b=2Ec=20d=2A=3E=3D"),
            ("s", "/a//", "$KV.orders.1.s./a//"),
            ("s", "ä\u{0}\n", "$KV.orders.1.s.=C3=A4=2500=250A"),
        ] {
            let key = key(scope, text);
            assert_eq!(subject_of(&prefix, &key), subject);
            assert_eq!(key_of(&prefix, subject).as_deref(), Some(key.as_str()));
        }
    }

    #[test]
    fn a_token_has_one_text() {
        for token in ["=4", "=zz", "=41", "=3a", "a=", "=FF", "", "a b"] {
            assert_eq!(read_token(token), None, "{token}");
        }
    }

    #[test]
    fn a_namespace_is_a_token_of_its_own() {
        let [with, without] = [prefix_of("b", "shop:"), prefix_of("b", "")];
        assert_eq!(subject_of(&with, &key("s", "t")), "$KV.b.shop=3A.1.s.t");
        // A key has three tokens, so a namespace is no version, and the version of a key is no namespace.
        assert_eq!(key_of(&without, "$KV.b.shop=3A.1.s.t"), None);
        assert_eq!(key_of(&without, "$KV.b.1.1.s.t"), None);
        assert_eq!(key_of(&without, "$KV.b.1.a/b.t"), None, "a scope has no slash");
        assert_eq!(key_of(&with, "$KV.b.1.s.t"), None);
        assert_eq!(subjects_of(&with, "1/a::b/"), "$KV.b.shop=3A.1.a=3A=3Ab.>");
        assert_eq!(subjects_of(&without, "1/"), "$KV.b.1.>");
    }
}
