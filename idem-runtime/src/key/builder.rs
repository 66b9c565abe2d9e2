//! Builds keys from literal text and values, so that different values never give the same key.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::{self, Display, Write as _};
use std::hash::BuildHasher;
use std::rc::Rc;
use std::sync::Arc;

use super::display::KeyHash;
use super::{Key, KeyError, KeyProblem, Scope, VERSION};
use crate::clock::Secret;
use crate::sync::SharedOnce;

thread_local! {
    /// Reused buffer for the text of a key. The finished text is copied once, into the key's own allocation.
    static BUFFER: Cell<String> = const { Cell::new(String::new()) };
}

/// Builds a [`Key`] from literal text and values, so that different values never give the same key.
///
/// In a value, `%`, control characters and the character that follows the value in the template are written as `%XX`.
/// So a value ends at the first occurrence of the character that follows it, and the whole key can be parsed in only
/// one way.
///
/// An absent, empty or blank value makes the whole key missing: otherwise unrelated messages would share the key
/// `order:`. A value is blank if it consists only of white space (Unicode's, no-break spaces included), control
/// characters and characters of no width (U+200B to U+200D, U+2060, U+FEFF).
///
/// ```
/// use idem_runtime::key::{KeyBuilder, Scope};
/// static SCOPE: Scope = Scope::named("shop::refund");
/// let key = |tenant: &str, id: &str| {
///     let mut builder = KeyBuilder::new(&SCOPE);
///     builder.part(tenant, Some(':'));
///     builder.text(":");
///     builder.part(id, None);
///     builder.build()
/// };
/// assert_eq!(key("a:b", "c").unwrap().text(), "a%3Ab:c");
/// assert_eq!(key("a", "b:c").unwrap().text(), "a:b:c");
/// assert!(key("a", "").is_err());
/// ```
#[derive(Debug)]
pub struct KeyBuilder<'a> {
    scope: &'a str,
    text: String,
    problem: Option<KeyProblem>,
}

impl<'a> KeyBuilder<'a> {
    /// Starts an empty key under `scope`.
    pub fn new(scope: &'a Scope) -> Self {
        Self::of_results(scope, "")
    }

    /// Starts an empty key under `scope`, for a handler that records values of the type named `result`.
    pub(crate) fn of_results(scope: &'a Scope, result: &'static str) -> Self {
        Self::under(scope.name, scope.check(result))
    }

    pub(crate) fn under(scope: &'a str, checked: Result<(), KeyProblem>) -> Self {
        let mut text = BUFFER.take();
        text.clear();
        text.push_str(VERSION);
        text.push_str(scope);
        text.push('/');
        Self { scope, text, problem: checked.err() }
    }

    /// Appends literal text of the template. The text must not contain `%`. A control character in `text` makes
    /// [`build`](Self::build) fail.
    pub fn text(&mut self, text: &str) {
        debug_assert!(!text.contains('%'), "`%` introduces an escape");
        self.literal(text);
    }

    /// Appends literal text that the attribute has checked: the text has neither `%` nor control characters.
    #[inline]
    pub(crate) fn checked(&mut self, text: &'static str) {
        debug_assert!(!text.contains('%') && !text.contains(char::is_control), "checked by the attribute");
        self.text.push_str(text);
    }

    /// Appends `text` unchanged: literal text of a template, or the text of a whole key, whose values are already
    /// escaped. A control character makes [`build`](Self::build) fail.
    pub(super) fn literal(&mut self, text: &str) {
        if text.contains(char::is_control) {
            self.problem.get_or_insert(KeyProblem::ControlCharacter);
        }
        self.text.push_str(text);
    }

    /// Appends a value. `next` is the character that follows the value in the template.
    pub fn part<P: KeyPart + ?Sized>(&mut self, value: &P, next: Option<char>) {
        value.append(self, next);
    }

    /// Appends the text that the [`Display`] of `value` writes.
    pub fn display_part(&mut self, value: &dyn Display, next: Option<char>) {
        let mut escape = Escape { out: &mut self.text, next, blank: true };
        // `Escape` never fails, so an error of `write!` is an error of the value's own `Display`. The key is then
        // missing: a truncated key could be the key of another operation.
        let shown = write!(escape, "{value}");
        if shown.is_err() || escape.blank {
            self.missing_part();
        }
    }

    /// Appends a value whose `Display` writes exactly `text`. A fast path of
    /// [`display_part`](KeyBuilder::display_part), with the same result.
    fn text_part(&mut self, text: &str, next: Option<char>) {
        if is_blank(text) {
            self.missing_part();
        } else if text.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'%' && !is_char(byte, next)) {
            self.text.push_str(text);
        } else {
            // The result is ignored, because `Escape` never fails.
            let _ = Escape { out: &mut self.text, next, blank: false }.write_str(text);
        }
    }

    /// Records that a value is absent, so that the whole key is missing.
    pub fn missing_part(&mut self) {
        self.problem.get_or_insert(KeyProblem::Missing);
    }

    fn not_utf8(&mut self) {
        self.problem.get_or_insert(KeyProblem::NotUtf8);
    }

    /// Returns the finished key.
    ///
    /// # Errors
    /// [`KeyError`] with the first problem of the key. The problem of a key without parts is [`KeyProblem::Missing`].
    pub fn build(self) -> Result<Key, KeyError> {
        let Self { text, problem, scope } = self;
        let problem = match problem {
            None if is_blank(&text[VERSION.len() + scope.len() + 1..]) => Some(KeyProblem::Missing),
            None if text.len() > Key::MAX_BYTES => Some(KeyProblem::TooLong { bytes: text.len() }),
            problem => problem,
        };
        let result = match problem {
            Some(problem) => Err(KeyError { scope: scope.to_owned(), problem }),
            None => Ok(Key { hash: KeyHash::new(hash(&text)), text: Arc::from(text.as_str()) }),
        };
        if text.capacity() <= 2 * Key::MAX_BYTES {
            BUFFER.set(text);
        }
        result
    }
}

/// Returns whether `text` is empty or blank. Usually the first character decides.
fn is_blank(text: &str) -> bool {
    text.chars()
        .all(|c| c.is_whitespace() || c.is_control() || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}'))
}

fn is_char(byte: u8, c: Option<char>) -> bool {
    c == Some(char::from(byte))
}

fn hash(text: &str) -> u64 {
    static SECRET: SharedOnce<Secret> = SharedOnce::new();
    SECRET.get_or_init(Secret::default).hash_one(text)
}

struct Escape<'a> {
    out: &'a mut String,
    next: Option<char>,
    /// True while the whole text so far is blank.
    blank: bool,
}

impl fmt::Write for Escape<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.blank = self.blank && is_blank(text);
        let reserved = |c: char| c == '%' || c.is_control() || Some(c) == self.next;
        let mut rest = text;
        while let Some(at) = rest.find(reserved) {
            let (plain, escaped) = rest.split_at(at);
            self.out.push_str(plain);
            let c = escaped.chars().next().unwrap_or_default();
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                write!(self.out, "%{byte:02X}")?;
            }
            rest = &escaped[c.len_utf8()..];
        }
        self.out.push_str(rest);
        Ok(())
    }
}

/// A value that can be a part of an idempotency key.
///
/// Text, numbers, `bool`, `char` and UTF-8 bytes are key parts, and so are references, smart pointers and `Option`s of
/// these types. In the attribute, every type that implements [`Display`] is a key part too. Implement `KeyPart` for
/// your own types to use them with [`KeyBuilder::part`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be part of an idempotency key",
    label = "not text, a number, or another `KeyPart`",
    note = "implement `Display` or `idem_runtime::KeyPart` for it, or write an expression that yields text"
)]
pub trait KeyPart {
    /// Appends the value to `builder`; `next` is the character that follows the value in the template.
    fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>);
}

impl KeyPart for str {
    fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
        builder.text_part(self, next);
    }
}

impl KeyPart for [u8] {
    fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
        match std::str::from_utf8(self) {
            Ok(text) => text.append(builder, next),
            Err(_) => builder.not_utf8(),
        }
    }
}

impl<const N: usize> KeyPart for [u8; N] {
    fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
        self.as_slice().append(builder, next);
    }
}

impl<P: KeyPart> KeyPart for Option<P> {
    fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
        match self {
            Some(part) => part.append(builder, next),
            None => builder.missing_part(),
        }
    }
}

/// Appends the text of another key, without its scope.
impl KeyPart for Key {
    fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
        self.text().append(builder, next);
    }
}

impl<P: KeyPart + ToOwned + ?Sized> KeyPart for Cow<'_, P> {
    fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
        P::append(self, builder, next);
    }
}

macro_rules! forwarded {
    ($(($($generics:tt)*) $type:ty => $target:ty;)*) => { $(
        impl<$($generics)*> KeyPart for $type {
            fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
                <$target as KeyPart>::append(self, builder, next);
            }
        }
    )* };
}

forwarded! {
    () String => str;
    () Vec<u8> => [u8];
    () bytes::Bytes => [u8];
    (P: KeyPart + ?Sized) &P => P;
    (P: KeyPart + ?Sized) &mut P => P;
    (P: KeyPart + ?Sized) Box<P> => P;
    (P: KeyPart + ?Sized) Rc<P> => P;
    (P: KeyPart + ?Sized) Arc<P> => P;
}

macro_rules! displayed {
    ($($type:ty)*) => { $(
        impl KeyPart for $type {
            fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
                builder.display_part(self, next);
            }
        }
    )* };
}

macro_rules! whole {
    ($($type:ty)*) => { $(
        impl KeyPart for $type {
            fn append(&self, builder: &mut KeyBuilder<'_>, next: Option<char>) {
                builder.text_part(itoa::Buffer::new().format(*self), next);
            }
        }
    )* };
}

whole! { u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize }

displayed! {
    bool char
    std::num::NonZeroU8 std::num::NonZeroU16 std::num::NonZeroU32 std::num::NonZeroU64 std::num::NonZeroU128
    std::num::NonZeroI8 std::num::NonZeroI16 std::num::NonZeroI32 std::num::NonZeroI64 std::num::NonZeroI128
    std::num::NonZeroUsize std::num::NonZeroIsize
    std::net::IpAddr std::net::Ipv4Addr std::net::Ipv6Addr std::net::SocketAddr
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// For numbers and plain text, the fast paths of `part` must write the same text as `display_part`.
    #[test]
    fn numbers_and_text_enter_a_key_as_they_are_displayed() {
        fn same<P: KeyPart + Display + ?Sized>(value: &P) {
            for next in [None, Some(':'), Some('-'), Some('0'), Some('9'), Some('a'), Some('é')] {
                let [short, long] = [true, false].map(|short| {
                    let mut builder = KeyBuilder::under("same", Ok(()));
                    match short {
                        true => value.append(&mut builder, next),
                        false => builder.display_part(&value, next),
                    }
                    builder.build()
                });
                assert_eq!(short, long, "{value}, {next:?}");
            }
        }
        macro_rules! extremes {
            ($($type:ty)*) => { $( [<$type>::MIN, <$type>::MAX, 0, 1, 9, 10, 99, 100].iter().for_each(same); )* };
        }
        extremes! { u8 u16 u32 u64 usize i8 i16 i32 i64 isize u128 i128 }
        (-1000_i64..1000).for_each(|value| same(&value));
        for text in [
            "", " ", "\t", "\u{a0}", "a", "a:b", "100%", "%3A", "a-b", "tab\t", "\u{7f}", "\u{85}", "é", "aé:0", "~ !",
            "09",
        ] {
            same(text);
        }
    }

    fn build(parts: &[(&str, Option<char>)], separators: &[&str]) -> Result<Key, KeyError> {
        let mut builder = KeyBuilder::under("test", Ok(()));
        for (i, (value, next)) in parts.iter().enumerate() {
            builder.part(*value, *next);
            builder.text(separators.get(i).copied().unwrap_or_default());
        }
        builder.build()
    }

    fn problem(result: Result<Key, KeyError>) -> Result<Key, KeyProblem> {
        result.map_err(|error| error.problem)
    }

    fn problem_of<P: KeyPart>(scope: &str, part: P) -> Result<Key, KeyProblem> {
        problem(Key::new(scope, part))
    }

    #[test]
    fn values_never_run_into_each_other() {
        let values = ["a", "a:", ":", "a%3A", "%", "%3A", "b", ":b", "a:b", "é", "\n:"];
        let mut seen = HashMap::new();
        for x in values {
            for y in values {
                let key = build(&[(x, Some(':')), (y, None)], &[":"]).unwrap();
                assert_eq!(seen.insert(key.clone(), (x, y)), None, "{key} twice");
            }
        }
    }

    #[test]
    fn a_multibyte_separator_of_a_template_is_escaped_in_values() {
        let key = build(&[("a→b", Some('→')), ("c", None)], &["→"]).unwrap();
        assert_eq!(key.text(), "a%E2%86%92b→c");
    }

    #[test]
    fn absent_empty_and_blank_parts_make_the_key_missing() {
        assert_eq!(problem_of("s", None::<&str>), Err(KeyProblem::Missing));
        assert_eq!(Key::new("s", Some("x")).unwrap().text(), "x");
        assert_eq!(problem("s/  ".parse()), Err(KeyProblem::Missing));
        assert_eq!(problem("s/ \t".parse()), Err(KeyProblem::ControlCharacter));
        let blanks =
            ["", " ", "   ", "\t", "\r\n", "\0", "\u{7f}", "\u{85}", "\u{a0}", "\u{2003}", "\u{2028}", "\u{3000}"];
        let of_no_width = ["\u{200b}", "\u{200c}", "\u{200d}", "\u{2060}", "\u{feff}", "\u{feff} \t\u{200b}"];
        for blank in blanks.into_iter().chain(of_no_width) {
            assert_eq!(problem_of("s", blank), Err(KeyProblem::Missing), "{blank:?}");
            assert_eq!(problem_of("s", blank.as_bytes()), Err(KeyProblem::Missing), "{blank:?}");
            assert_eq!(
                problem(build(&[(blank, Some(':')), ("b", None)], &[":"])),
                Err(KeyProblem::Missing),
                "{blank:?}"
            );
            assert_eq!(
                problem(build(&[("a", Some(':')), (blank, None)], &[":"])),
                Err(KeyProblem::Missing),
                "{blank:?}"
            );
            let mut displayed = KeyBuilder::under("s", Ok(()));
            displayed.text("order:");
            displayed.display_part(&format_args!("{}{blank}", ""), None);
            assert_eq!(problem(displayed.build()), Err(KeyProblem::Missing), "{blank:?}");
            // Blanks inside a longer part are kept.
            let key = Key::new("s", format!("{blank}x{blank}")).unwrap();
            assert_eq!(key.text() == "x", blank.is_empty(), "{key}");
            let mut displayed = KeyBuilder::under("s", Ok(()));
            displayed.display_part(&format_args!("{blank}{}{blank}", 'x'), None);
            assert_eq!(displayed.build(), Ok(key));
        }
        for part in [".", "0", "-", "\u{ad}", "é", "\u{2800}"] {
            assert!(Key::new("s", part).is_ok(), "{part:?}");
        }
    }

    #[test]
    fn a_value_that_fails_to_display_makes_the_key_missing() {
        struct FailingDisplay;
        impl Display for FailingDisplay {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("half")?;
                Err(fmt::Error)
            }
        }
        let mut builder = KeyBuilder::under("test", Ok(()));
        builder.display_part(&FailingDisplay, None);
        assert_eq!(problem(builder.build()), Err(KeyProblem::Missing));
    }

    #[test]
    fn a_displayed_key_can_be_read_back() {
        let key = build(&[("a:b%", Some(':')), ("c/d", None)], &[":"]).unwrap();
        assert_eq!(key.to_string().parse(), Ok(key));
        assert_eq!(problem("no scope".parse()), Err(KeyProblem::InvalidScope));
        assert_eq!(problem("scope/".parse()), Err(KeyProblem::Missing));
    }

    #[test]
    fn keys_and_scopes_that_are_too_long_or_hold_invalid_text_are_refused() {
        assert_eq!(problem_of("s", [0xff_u8].as_slice()), Err(KeyProblem::NotUtf8));
        assert_eq!(Key::new("s", b"order".as_slice()).unwrap().text(), "order");
        let room = Key::MAX_BYTES - "1/s/".len();
        assert!(Key::new("s", "x".repeat(room)).is_ok());
        assert_eq!(problem_of("s", "x".repeat(room + 1)), Err(KeyProblem::TooLong { bytes: Key::MAX_BYTES + 1 }));
        for scope in ["", "a/b", "a\nb", &"x".repeat(Key::MAX_SCOPE_BYTES + 1)] {
            assert_eq!(problem_of(scope, "x"), Err(KeyProblem::InvalidScope), "{scope:?}");
        }
    }
}
