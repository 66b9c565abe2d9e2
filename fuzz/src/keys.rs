//! Keys, and the templates and durations in handlers.

use std::fmt::Write;

use idem_runtime::Key;
use idem_runtime::key::{KeyBuilder, KeyProblem, Scope};
use proc_macro2::Span;
use quote::ToTokens;
use syn::LitStr;

use super::input::Input;

// The attribute's own parsers, included as files: a macro crate has no other interface.
#[allow(dead_code, unused_imports, unreachable_pub)]
#[path = "../../idem-macros/src/duration.rs"]
mod duration;
#[allow(dead_code, unused_imports, unreachable_pub)]
#[path = "../../idem-macros/src/nearest.rs"]
mod nearest;
#[allow(dead_code, unused_imports, unreachable_pub)]
#[path = "../../idem-macros/src/template.rs"]
mod template;

use template::Part;

/// Size of the longest template. The compiler may be unable to parse the nesting of a longer template.
const MAX_TEMPLATE_BYTES: usize = 256;

/// Asserts that a parsed template, duration or key parses to the same value after it is written out. The values of a
/// key must be readable from the key, so that different values never produce equal keys.
pub fn keys(data: &[u8]) {
    let mut input = Input(data);
    let which = input.below(5);
    let text = || String::from_utf8_lossy(input.0);
    match which {
        0 => templates(&text()),
        1 => durations(&text()),
        2 => displayed(&text()),
        3 => one_part(&mut input),
        _ => several_parts(&mut input),
    }
}

fn templates(text: &str) {
    if text.len() > MAX_TEMPLATE_BYTES {
        return;
    }
    let parse = |text: &str| template::parse(&LitStr::new(text, Span::call_site()), None);
    // If the parser refuses a template, its error must contain a message.
    let parts = match parse(text) {
        Ok(parts) => parts,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let mut values = 0;
    let mut again = String::new();
    for (at, part) in parts.iter().enumerate() {
        match part {
            Part::Text(text) => {
                assert!(!text.is_empty() && !text.contains('%') && !text.contains(char::is_control), "{text:?}");
                again.push_str(&text.replace('{', "{{").replace('}', "}}"));
            }
            Part::Value(value) => {
                assert!(!matches!(parts.get(at + 1), Some(Part::Value(_))), "{text}: values run into each other");
                values += 1;
                // The space in front keeps a block's brace from being read as a literal brace.
                write!(again, "{{ {} }}", value.to_token_stream()).expect("a `String` takes everything");
            }
        }
    }
    assert!(values > 0, "{text}: every call has the same key");
    // The template is written again from its parts, and must be parsed as the same parts.
    let again = match parse(&again) {
        Ok(again) => again,
        Err(error) => panic!("{text} is read, {again} is not: {error}"),
    };
    assert_eq!(again.len(), parts.len(), "{text}");
    for (part, again) in parts.iter().zip(&again) {
        match (part, again) {
            (Part::Text(text), Part::Text(again)) => assert_eq!(text, again),
            (Part::Value(value), Part::Value(again)) => {
                assert_eq!(value.to_token_stream().to_string(), again.to_token_stream().to_string());
            }
            _ => panic!("{text}: text and values are mistaken for each other"),
        }
    }
}

fn durations(text: &str) {
    match duration::parse(text) {
        Ok(duration) => assert_eq!(duration::parse(&duration::show(duration)), Ok(duration), "{text}"),
        Err(message) => {
            assert!(message.contains(text), "{message}");
            // The duration that the message suggests must be accepted.
            let rest = message.strip_prefix(&format!("can't read `{text}` as a duration; write `"));
            if let Some(better) = rest.and_then(|rest| rest.strip_suffix('`')) {
                duration::parse(better).expect("a suggestion is accepted");
            }
        }
    }
}

fn displayed(text: &str) {
    if let Ok(key) = text.parse::<Key>() {
        assert_eq!(key.to_string(), text);
        sound(&key);
    }
}

/// Returns whether the text has no visible character.
fn is_blank(text: &str) -> bool {
    let of_no_width = |c: char| ['\u{200b}', '\u{200c}', '\u{200d}', '\u{2060}', '\u{feff}'].contains(&c);
    text.trim_matches(|c: char| c.is_whitespace() || c.is_control() || of_no_width(c)).is_empty()
}

fn sound(key: &Key) {
    assert!(key.as_str().len() <= Key::MAX_BYTES && key.scope().len() <= Key::MAX_SCOPE_BYTES);
    assert_eq!(key.as_str(), format!("1/{}/{}", key.scope(), key.text()));
    assert_eq!(key.to_string().parse::<Key>().as_ref(), Ok(key));
    assert!(!key.as_str().contains(char::is_control), "stores differ in what they do with one");
}

fn one_part(input: &mut Input<'_>) {
    let (scope, part) = (input.text(), input.bytes());
    match Key::new(&scope, part) {
        Ok(key) => {
            sound(&key);
            assert!(std::str::from_utf8(part).is_ok_and(|part| !is_blank(part)), "{key}");
            assert_eq!(key.scope(), scope);
            assert_eq!(value(key.text(), None), Some((part.to_vec(), "")));
        }
        Err(error) => match error.problem {
            KeyProblem::Missing => assert!(std::str::from_utf8(part).is_ok_and(is_blank)),
            KeyProblem::NotUtf8 => assert!(std::str::from_utf8(part).is_err()),
            _ => {}
        },
    }
}

/// Builds a key from a template as the attribute does, and parses the values back by that template.
fn several_parts(input: &mut Input<'_>) {
    static SCOPE: Scope = Scope::named("fuzz");
    let mut separator = || input.text().replace(|c: char| c == '%' || c.is_control(), "");
    let separators = [separator(), separator(), separator(), separator()];
    let values = [input.text(), input.text(), input.text()];
    // A template without text between two values is refused.
    if separators[1..3].iter().any(String::is_empty) {
        return;
    }
    let mut builder = KeyBuilder::new(&SCOPE);
    builder.text(&separators[0]);
    for (value, behind) in values.iter().zip(&separators[1..]) {
        builder.part(value, behind.chars().next());
        builder.text(behind);
    }
    let key = match builder.build() {
        Ok(key) => key,
        Err(error) => {
            match error.problem {
                KeyProblem::Missing => assert!(values.iter().any(|value| is_blank(value))),
                problem => assert!(matches!(problem, KeyProblem::TooLong { .. }), "{problem:?}"),
            }
            return;
        }
    };
    sound(&key);
    assert!(!values.iter().any(|value| is_blank(value)), "{key}");
    let mut rest = key.text().strip_prefix(&*separators[0]).expect("begins as the template does");
    for (expected, behind) in values.iter().zip(&separators[1..]) {
        let (read, after) = value(rest, behind.chars().next()).expect("an escape is complete");
        assert_eq!(read, expected.as_bytes(), "{key}");
        rest = after.strip_prefix(&**behind).expect("goes on as the template does");
    }
    assert_eq!(rest, "");
}

/// Reads a value up to the first unescaped `next`, or to the end.
fn value(text: &str, next: Option<char>) -> Option<(Vec<u8>, &str)> {
    let mut value = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next().filter(|c| Some(*c) != next) {
        let len = if c == '%' {
            value.push(u8::from_str_radix(rest.get(1..3)?, 16).ok()?);
            3
        } else {
            value.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            c.len_utf8()
        };
        rest = &rest[len..];
    }
    Some((value, rest))
}
