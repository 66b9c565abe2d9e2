//! Bodies that are compared as JSON: documents of `JSONTestSuite`, random documents in random spellings, nested ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use idem_runtime::http::{IdempotencyLayer, Profile};
use proptest::prelude::*;
use serde_json::Value;

use crate::rig::*;

/// The layer's answer to a body under a key that may have been used before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    /// The handler ran.
    Ran,
    /// The body has the same meaning as the first body with this key.
    Same,
    /// The body has another meaning than the first body with this key.
    Other,
    /// The body can't be compared.
    Refused,
}

fn json_layer() -> IdempotencyLayer {
    layer().profile(Profile::acp())
}

async fn ask(layer: &IdempotencyLayer, key: &str, body: &[u8]) -> Verdict {
    let request = Request::post("/pay").header("idempotency-key", key).body(Bytes::copy_from_slice(body)).unwrap();
    let answer = layer.respond(request, async |_| Ok::<_, Never>(Response::new(Body::empty()))).await.unwrap();
    match (answer.status().as_u16(), answer.headers().contains_key("idempotent-replayed")) {
        (200, false) => Verdict::Ran,
        (200, true) => Verdict::Same,
        (422, _) => Verdict::Other,
        (400, _) => Verdict::Refused,
        (status, _) => panic!("a status of {status}"),
    }
}

/// Name and bytes of each document.
fn suite() -> Vec<(&'static str, Vec<u8>)> {
    let lines = include_str!("data/json_test_suite.txt").lines().filter(|line| !line.starts_with('#'));
    let document = |line: &'static str| {
        let (name, text) = line.split_once('\t').unwrap();
        let repeated = text.strip_prefix('*').and_then(|text| text.split_once(' '));
        let (times, text) = repeated.map_or((1, text), |(times, text)| (times.parse().unwrap(), text));
        let mut bytes = Vec::new();
        let mut parts = text.split('%');
        bytes.extend_from_slice(parts.next().unwrap().as_bytes());
        for part in parts {
            bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
            bytes.extend_from_slice(&part.as_bytes()[2..]);
        }
        (name, bytes.repeat(times))
    };
    lines.map(document).collect()
}

fn of_kind(kind: &str) -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    suite().into_iter().filter(move |(name, _)| name.starts_with(kind))
}

/// Returns the value that `serde_json` has read, with all numbers as floats.
fn meaning(value: Value) -> Value {
    match value {
        Value::Number(number) => number.as_f64().map(|float| float + 0.0).into(),
        Value::Array(values) => values.into_iter().map(meaning).collect(),
        Value::Object(members) => members.into_iter().map(|(name, value)| (name, meaning(value))).collect(),
        value => value,
    }
}

#[tokio::test]
async fn json_bodies_of_the_suite_are_equal_if_they_have_the_same_meaning() {
    const REFUSED: [&str; 2] = ["y_object_duplicated_key", "y_object_duplicated_key_and_value"];
    let layer = json_layer();
    let documents: Vec<_> = of_kind("y_").collect();
    assert_eq!(documents.len(), 95);
    let meanings: Vec<Value> =
        documents.iter().map(|(_, bytes)| meaning(serde_json::from_slice(bytes).unwrap())).collect();
    let mut equal = 0;
    for (first, (name, body)) in documents.iter().enumerate() {
        let is_refused = REFUSED.contains(name);
        assert_eq!(ask(&layer, name, body).await, if is_refused { Verdict::Refused } else { Verdict::Ran }, "{name}");
        for (second, (other, body)) in documents.iter().enumerate().filter(|_| !is_refused) {
            let is_same = meanings[first] == meanings[second];
            equal += usize::from(is_same && first != second);
            let expected = match is_same {
                _ if REFUSED.contains(other) => Verdict::Refused,
                true => Verdict::Same,
                false => Verdict::Other,
            };
            assert_eq!(ask(&layer, name, body).await, expected, "{name} and {other}");
        }
    }
    assert!(equal > 10, "{equal} pairs are equal: the comparison reads nothing");
}

#[tokio::test]
async fn request_bodies_that_are_not_json_are_refused_or_compared_as_bytes() {
    const REFUSED: [&str; 2] = ["n_structure_100000_opening_arrays", "n_structure_open_array_object"];
    let layer = json_layer();
    let documents: Vec<_> = of_kind("n_").collect();
    assert_eq!(documents.len(), 188);
    for (name, body) in documents {
        let first = ask(&layer, name, &body).await;
        assert_eq!(first == Verdict::Refused, REFUSED.contains(&name), "{name}");
        if first == Verdict::Ran {
            assert_eq!(ask(&layer, name, &body).await, Verdict::Same, "{name}");
            assert_eq!(ask(&layer, name, &[&body[..], b" "].concat()).await, Verdict::Other, "{name}");
        }
    }
}

#[tokio::test]
async fn json_bodies_that_parsers_may_refuse_all_count_as_different() {
    const REFUSED: [&str; 1] = ["i_structure_500_nested_arrays"];
    // These documents are not UTF-8, or begin with a byte order mark, so they are compared as bytes.
    let is_bytes = |name: &str| {
        ["utf16", "UTF-16", "UTF-8_BOM", "invalid_utf-8", "UTF-8_invalid", "iso_latin", "not_in_unicode", "overlong"]
            .iter()
            .any(|part| name.contains(part))
            || ["i_string_UTF8_surrogate_U+D800", "i_string_lone_utf8_continuation_byte", "i_string_truncated-utf-8"]
                .contains(&name)
    };
    let layer = json_layer();
    let documents: Vec<_> = of_kind("i_").collect();
    assert_eq!(documents.len(), 35);
    for (name, body) in &documents {
        let first = ask(&layer, name, body).await;
        assert_eq!(first == Verdict::Refused, REFUSED.contains(name), "{name}");
        if first == Verdict::Ran {
            let with_blank = ask(&layer, name, &[&body[..], b" "].concat()).await;
            assert_eq!(with_blank, if is_bytes(name) { Verdict::Other } else { Verdict::Same }, "{name}");
            for (other, body) in documents.iter().filter(|(other, _)| other != name && !REFUSED.contains(other)) {
                let expected = if body == &documents.iter().find(|(it, _)| it == name).unwrap().1 {
                    Verdict::Same
                } else {
                    Verdict::Other
                };
                assert_eq!(ask(&layer, name, body).await, expected, "{name} and {other}");
            }
        }
    }
}

#[tokio::test]
async fn a_deeply_nested_request_body_is_refused_and_leaves_no_record() {
    let layer = json_layer();
    for (key, open, close, levels) in [("k1", "[", "]", 1), ("k2", "{\"a\":", "}", 1), ("k3", "[{\"a\":", "}]", 2)] {
        let nested = |depth: usize| [&*open.repeat(depth / levels), "1", &*close.repeat(depth / levels)].concat();
        let deepest = nested(400);
        assert_eq!(ask(&layer, key, nested(402).as_bytes()).await, Verdict::Refused);
        // Neither 10 000 levels nor 1 MB of levels overflow the stack.
        assert_eq!(ask(&layer, key, nested(10_000).as_bytes()).await, Verdict::Refused);
        assert_eq!(ask(&layer, key, open.repeat(1_000_000 / open.len()).as_bytes()).await, Verdict::Refused);
        assert_eq!(ask(&layer, key, deepest.as_bytes()).await, Verdict::Ran);
        assert_eq!(ask(&layer, key, format!(" {deepest}\n").as_bytes()).await, Verdict::Same);
    }
}

#[tokio::test]
async fn the_refusal_of_a_deeply_nested_request_body_names_the_limit() {
    let mut rules = Profile::ietf();
    rules.equality = Profile::acp().equality;
    let (address, stage) = serve_counter(layer().profile(rules)).await;
    let reply = send(address, post("k", "[".repeat(10_000))).await;
    assert_eq!(reply.problem(), (400, "invalid-body".to_owned()));
    assert!(reply.text().contains("400 levels"), "{}", reply.text());
    assert_eq!(stage.begun(), 0);
    assert_eq!(send(address, post("k", "[]")).await.text(), "run 1");
}

#[tokio::test]
async fn json_bodies_with_different_invalid_strings_count_as_different() {
    let layer = json_layer();
    let bodies: [&[u8]; 9] = [
        br#"{"to":"\ud800"}"#,
        br#"{"to":"\ud801"}"#,
        br#"{"to":"\udc00"}"#,
        br#"{"to":"\ud800\ud800"}"#,
        br#"{"to":"\ufffd"}"#,
        br#"{"to":""}"#,
        b"{\"to\":\"caf\xe9\"}",
        b"{\"to\":\"caf\xe8\"}",
        b"{\"to\":\"\xed\xa0\x80\"}",
    ];
    for (key, body) in bodies.iter().enumerate() {
        for (other, body) in [(key, body)].into_iter().chain(bodies.iter().enumerate()) {
            let expected = if key == other { [Verdict::Ran, Verdict::Same] } else { [Verdict::Other; 2] };
            assert!(expected.contains(&ask(&layer, &key.to_string(), body).await), "{key} and {other}");
        }
    }
    assert_eq!(ask(&layer, "0", br#"{"to":"\uD800"}"#).await, Verdict::Same);
}

/// A JSON value with exact numbers: a mantissa and a power of ten.
#[derive(Clone, PartialEq, Debug)]
enum Tree {
    Null,
    Flag(bool),
    Number(i64, i16),
    Text(String),
    Array(Vec<Tree>),
    Object(BTreeMap<String, Tree>),
}

fn trees() -> impl Strategy<Value = Tree> {
    let leaf = prop_oneof![
        Just(Tree::Null),
        any::<bool>().prop_map(Tree::Flag),
        (prop_oneof![-3_i64..4, any::<i64>()], -3_i16..4).prop_map(|(mantissa, power)| Tree::Number(mantissa, power)),
        "[a}\\]\"\\\\é😀\u{0}\u{7f}]{0,3}".prop_map(Tree::Text),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Tree::Array),
            prop::collection::btree_map("[ab}\"é]{0,2}", inner, 0..4).prop_map(Tree::Object),
        ]
    })
}

/// Writes a tree, in a spelling that the bits of `choices` select.
fn write(tree: &Tree, choices: &mut u64, out: &mut String) {
    let mut choose = |n: u64| {
        *choices = choices.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (*choices >> 32) % n
    };
    out.push_str(["", " ", "\n\t"][usize::try_from(choose(3)).unwrap()]);
    let text = |text: &str, escapes: bool, out: &mut String| {
        out.push('"');
        for unit in text.chars() {
            if escapes || matches!(unit, '"' | '\\' | '\0'..='\x1f') {
                let mut units = [0; 2];
                unit.encode_utf16(&mut units).iter().for_each(|unit| write!(out, "\\u{unit:04X}").unwrap());
            } else {
                out.push(unit);
            }
        }
        out.push('"');
    };
    match tree {
        Tree::Null => out.push_str("null"),
        Tree::Flag(flag) => write!(out, "{flag}").unwrap(),
        Tree::Number(mantissa, power) => match choose(3) {
            0 => write!(out, "{mantissa}.00E{power:+}").unwrap(),
            1 if *mantissa != 0 => write!(out, "{mantissa}000e{}", power - 3).unwrap(),
            _ => write!(out, "{mantissa}e{power}").unwrap(),
        },
        Tree::Text(it) => text(it, choose(2) == 0, out),
        Tree::Array(elements) => {
            out.push('[');
            for (at, element) in elements.iter().enumerate() {
                out.push_str(if at == 0 { "" } else { "," });
                write(element, choices, out);
            }
            out.push_str(" ]");
        }
        Tree::Object(members) => {
            let escapes = choose(2) == 0;
            let mut members: Vec<_> = members.iter().collect();
            if choose(2) == 0 {
                members.reverse();
            }
            out.push('{');
            for (at, (name, value)) in members.into_iter().enumerate() {
                out.push_str(if at == 0 { "" } else { " , " });
                text(name, escapes, out);
                out.push(':');
                write(value, choices, out);
            }
            out.push('}');
        }
    }
}

/// Converts each number to its shortest form, so that trees of the same meaning are equal.
fn shortest(tree: Tree) -> Tree {
    match tree {
        Tree::Number(0, _) => Tree::Number(0, 0),
        Tree::Number(mantissa, power) if mantissa % 10 == 0 => shortest(Tree::Number(mantissa / 10, power + 1)),
        Tree::Array(elements) => Tree::Array(elements.into_iter().map(shortest).collect()),
        Tree::Object(members) => Tree::Object(members.into_iter().map(|(name, it)| (name, shortest(it))).collect()),
        tree => tree,
    }
}

fn spelled(tree: &Tree, mut choices: u64) -> String {
    let mut out = String::new();
    write(tree, &mut choices, &mut out);
    out
}

proptest! {
    /// Two spellings of a document are the same payload, and two different documents are different payloads.
    #[test]
    fn random_json_bodies_are_compared_by_their_meaning(
        one in trees(), other in trees(), choices in any::<[u64; 3]>(), at in any::<prop::sample::Index>(), byte: u8,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let [first, second] = [choices[0], choices[1]].map(|choices| spelled(&one, choices));
        let third = spelled(&other, choices[2]);
        // `serde_json` parses both spellings, to the same value if it reads the numbers exactly.
        let [read, again] = [&first, &second].map(|text| meaning(serde_json::from_str(text).unwrap()));
        prop_assert_eq!(read, again);
        // One byte of the document is changed. The body is then another payload, unless it still has the same meaning.
        let mut altered = first.clone().into_bytes();
        let at = at.index(altered.len());
        altered[at] = byte;
        let is_other = match (serde_json::from_slice(&altered), serde_json::from_str(&first)) {
            (Ok(altered), Ok(first)) => meaning(altered) != meaning(first),
            _ => true,
        };
        runtime.block_on(async {
            let layer = json_layer();
            prop_assert_eq!(ask(&layer, "k", first.as_bytes()).await, Verdict::Ran);
            prop_assert_eq!(ask(&layer, "k", second.as_bytes()).await, Verdict::Same, "{} and {}", first, second);
            let expected = if shortest(one) == shortest(other) { Verdict::Same } else { Verdict::Other };
            prop_assert_eq!(ask(&layer, "k", third.as_bytes()).await, expected, "{} and {}", first, third);
            if is_other {
                prop_assert_ne!(ask(&layer, "k", &altered).await, Verdict::Same, "{} and {:?}", first, altered);
            }
            Ok(())
        })?;
    }
}
