//! Idempotency keys: scope, escaping, limits, and the versioned form in which they are stored.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt::{self, Display, Write as _};
use std::hash::{BuildHasher, Hash, Hasher};
use std::panic::Location;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

/// The version of the stored form. A change of format gets a new version *and* a way to find records under the old one:
/// an upgrade never re-opens old operations in silence.
const VERSION: &str = "1/";

/// The text that names one operation, under the scope of its handler.
///
/// The stored form is `1/<scope>/<text>`: the version of the form, the scope (which holds no `/`), the key text.
/// `Display` and [`Key::as_str`] differ by the version prefix only. Cloning shares the text.
///
/// ```
/// let key = idem_runtime::Key::new("shop::ship_order", "order:42").unwrap();
/// assert_eq!(key.scope(), "shop::ship_order");
/// assert_eq!(key.text(), "order:42");
/// assert_eq!(key.to_string(), "shop::ship_order/order:42");
/// assert_eq!(key.as_str(), "1/shop::ship_order/order:42");
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    text: Arc<str>,
    /// Made once, with a secret of this process: a key is looked up several times in a call, and maps of keys grow.
    hash: u64,
}

impl Key {
    /// The longest stored form, in bytes.
    pub const MAX_BYTES: usize = 1024;
    /// The longest scope, in bytes.
    pub const MAX_SCOPE_BYTES: usize = 200;

    /// A key from one part. [`KeyBuilder`] takes several.
    ///
    /// # Errors
    /// [`KeyError`] if the scope isn't valid, the part is missing or blank or not UTF-8, or the key is too long.
    pub fn new<P: KeyPart>(scope: &str, part: P) -> Result<Self, KeyError> {
        let mut builder = KeyBuilder::under(scope, check_scope(scope));
        builder.part(&part, None);
        builder.build()
    }

    /// The stored form, with the version of the form in front.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Which of `shards` (at most 256) holds what belongs to the key, by bits of its hash that a map of keys uses neither for
    /// the place nor for the tag of an entry.
    #[cfg(any(feature = "memory", feature = "cached"))]
    pub(crate) fn shard(&self, shards: usize) -> usize {
        usize::from(self.hash.to_le_bytes()[5]) % shards
    }

    /// The first bits of its hash.
    #[cfg(feature = "memory")]
    pub(crate) fn short_hash(&self) -> u32 {
        let [a, b, c, d, ..] = self.hash.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// The stored form, for whoever keeps it.
    #[cfg(feature = "memory")]
    pub(crate) fn shared(&self) -> Arc<str> {
        Arc::clone(&self.text)
    }

    /// The scope the key lives under.
    pub fn scope(&self) -> &str {
        self.split().0
    }

    /// The key without its scope.
    pub fn text(&self) -> &str {
        self.split().1
    }

    fn split(&self) -> (&str, &str) {
        self.text[VERSION.len()..].split_once('/').unwrap_or_default()
    }
}

/// Reads a key as it is displayed, in errors and logs for example: `<scope>/<text>`, with its escapes.
///
/// ```
/// use idem_runtime::Key;
/// let shown = "shop::ship/a%3Ab:c"; // Not the same as `Key::new("shop::ship", "a%3Ab:c")`, which escapes the `%`.
/// assert_eq!(shown.parse::<Key>().unwrap().to_string(), shown);
/// ```
impl FromStr for Key {
    type Err = KeyError;

    fn from_str(shown: &str) -> Result<Self, KeyError> {
        let (scope, text) = shown.split_once('/').unwrap_or_default();
        let mut builder = KeyBuilder::under(scope, check_scope(scope));
        builder.text.push_str(text);
        builder.build()
    }
}

impl Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text[VERSION.len()..])
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// Takes the hash that a key has as it is, for maps of keys.
#[cfg(any(feature = "memory", feature = "cached"))]
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

#[cfg(any(feature = "memory", feature = "cached"))]
impl Hasher for KeyHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a key hashes as one `u64`");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// A key that could not be built.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyError {
    /// The scope it would have had.
    pub scope: String,
    /// What is wrong.
    pub problem: KeyProblem,
}

impl Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no idempotency key in scope `{}`: {}", self.scope, self.problem)
    }
}

impl std::error::Error for KeyError {}

/// Why there is no key.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KeyProblem {
    /// The key, or a part of it, is `None`, empty or blank.
    Missing,
    /// The stored form is longer than [`Key::MAX_BYTES`].
    TooLong {
        /// Its length in bytes.
        bytes: usize,
    },
    /// A part given as bytes is not UTF-8.
    NotUtf8,
    /// The scope is empty, longer than [`Key::MAX_SCOPE_BYTES`], or holds a `/` or a control character.
    InvalidScope,
    /// Two handlers have the same scope and don't both say that they share it: one would replay the other's results.
    SharedScope {
        /// Where the handler that has the scope already is defined.
        other: Site,
        /// Where the handler that was refused is defined.
        this: Site,
    },
    /// A generic handler is called with another result type than before, under a scope that it doesn't call shared: one call
    /// would replay the result of the other.
    SharedByResults {
        /// Where the handler is defined.
        site: Site,
        /// The result type that has the scope already.
        other: &'static str,
        /// The result type that was refused.
        this: &'static str,
    },
}

impl KeyProblem {
    /// Whether the program is to blame and not the message: nothing that is delivered to this handler would have a key.
    pub const fn is_misconfiguration(&self) -> bool {
        matches!(self, Self::InvalidScope | Self::SharedScope { .. } | Self::SharedByResults { .. })
    }
}

impl Display for KeyProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the key or a part of it is `None`, empty or blank"),
            Self::TooLong { bytes } => write!(
                f,
                "the key has {bytes} bytes, {} are allowed; key on an identifier or on a digest of the text",
                Key::MAX_BYTES
            ),
            Self::NotUtf8 => f.write_str("the key is not UTF-8; write the bytes as hexadecimal or base64 text"),
            Self::InvalidScope => {
                write!(f, "the scope must have 1 to {} bytes, without `/` and control characters", Key::MAX_SCOPE_BYTES)
            }
            Self::SharedScope { other, this } => write!(
                f,
                "the handlers at {other} and {this} have the same scope, so that one would replay the other's results; \
                 write another `scope = \"…\"` on one of them, or `scope = shared(\"…\")` on both if that is meant"
            ),
            Self::SharedByResults { site, other, this } => write!(
                f,
                "the handler at {site} has returned `{other}` before and returns `{this}` here, under the same scope, so \
                 that one call would replay the other's result; make the type a part of the key and write \
                 `scope = shared(\"…\")`, or give each type a function of its own"
            ),
        }
    }
}

/// A place in the user's source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site(&'static Location<'static>);

impl Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a handler inside the key space; the attribute keeps one in a `static` for each handler.
///
/// In one process a scope belongs to one handler: the first one that uses it. Another one is refused with
/// [`KeyProblem::SharedScope`], unless both are [`shared`](Scope::shared). What [`Key::new`] makes is not looked at: there the
/// scope is only a part of the name.
#[derive(Debug)]
pub struct Scope {
    name: &'static str,
    site: Site,
    shared: bool,
    /// Whether the attribute made it, in a `static` of its own: the sites of what one `macro_rules!` wrote are all in one place.
    attribute: bool,
    /// The result type of the handler that uses it; empty if nobody says.
    claimed: OnceLock<Result<&'static str, KeyProblem>>,
}

impl Scope {
    /// A scope for one handler, which is made where this is called.
    #[track_caller]
    pub const fn named(name: &'static str) -> Self {
        Self::new(name, false, false)
    }

    /// A scope for several handlers, which replay each other's results where their keys are the same.
    #[track_caller]
    pub const fn shared(name: &'static str) -> Self {
        Self::new(name, true, false)
    }

    /// The scope of a handler with the attribute.
    #[track_caller]
    pub(crate) const fn of_handler(name: &'static str, shared: bool) -> Self {
        Self::new(name, shared, true)
    }

    #[track_caller]
    const fn new(name: &'static str, shared: bool, attribute: bool) -> Self {
        Self { name, site: Site(Location::caller()), shared, attribute, claimed: OnceLock::new() }
    }

    /// Whether a handler that records a `result` may use the scope. Asked at each call: one load and one comparison.
    fn check(&self, result: &'static str) -> Result<(), KeyProblem> {
        match self.claimed.get_or_init(|| self.claim(result)) {
            // The text is in one place, or in one for each crate.
            Ok(first) if std::ptr::eq(*first, result) || self.shared || *first == result => Ok(()),
            Ok(other) => Err(KeyProblem::SharedByResults { site: self.site, other, this: result }),
            Err(problem) => Err(problem.clone()),
        }
    }

    #[cold]
    fn claim(&self, result: &'static str) -> Result<&'static str, KeyProblem> {
        static CLAIMED: LazyLock<Mutex<HashMap<&'static str, Claim>>> = LazyLock::new(Mutex::default);
        check_scope(self.name)?;
        let handler = if self.attribute { Some(std::ptr::from_ref(self).addr()) } else { None };
        let claim = Claim { site: self.site, handler, shared: self.shared };
        let first = *crate::sync::lock(&CLAIMED).entry(self.name).or_insert(claim);
        if first == claim || first.shared && self.shared {
            Ok(result)
        } else {
            Err(KeyProblem::SharedScope { other: first.site, this: self.site })
        }
    }
}

/// Who uses a scope.
#[derive(Clone, Copy, PartialEq)]
struct Claim {
    site: Site,
    /// The address of its `static`.
    handler: Option<usize>,
    shared: bool,
}

/// Whether `scope` can be one.
pub(crate) const fn is_scope(scope: &str) -> bool {
    let bytes = scope.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        // The last control characters are the second byte of two: U+0080 to U+009F.
        let control = bytes[at] < b' ' || bytes[at] == 0x7f || at > 0 && bytes[at - 1] == 0xc2 && bytes[at] < 0xa0;
        if bytes[at] == b'/' || control {
            return false;
        }
        at += 1;
    }
    !bytes.is_empty() && bytes.len() <= Key::MAX_SCOPE_BYTES
}

fn check_scope(scope: &str) -> Result<(), KeyProblem> {
    if is_scope(scope) { Ok(()) } else { Err(KeyProblem::InvalidScope) }
}

thread_local! {
    /// Keys are written here and copied once into their shared allocation.
    static BUFFER: Cell<String> = const { Cell::new(String::new()) };
}

/// Builds a [`Key`] from literal text and values, so that different values never give the same key.
///
/// In each value, `%`, control characters and the character that follows the value in the template are written as
/// `%XX`. A value therefore ends at the first unescaped occurrence of the character that follows it, and the whole can
/// be read back in only one way. An absent value makes the whole key missing, and so does an empty or blank one: `order:` with
/// nothing behind it would be shared by unrelated messages. Blank is what holds nothing but white space (Unicode's, a no-break
/// space included), control characters and characters of no width (U+200B to U+200D, U+2060, U+FEFF).
///
/// ```
/// use idem_runtime::{KeyBuilder, Scope};
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
    /// An empty key under `scope`.
    pub fn new(scope: &'a Scope) -> Self {
        Self::of_results(scope, "")
    }

    /// The same for a handler that records a `result`.
    pub(crate) fn of_results(scope: &'a Scope, result: &'static str) -> Self {
        Self::under(scope.name, scope.check(result))
    }

    fn under(scope: &'a str, checked: Result<(), KeyProblem>) -> Self {
        let mut text = BUFFER.take();
        text.clear();
        text.push_str(VERSION);
        text.push_str(scope);
        text.push('/');
        Self { scope, text, problem: checked.err() }
    }

    /// Appends literal text of the template; it holds no `%`.
    pub fn text(&mut self, text: &str) {
        debug_assert!(!text.contains('%'), "`%` introduces an escape");
        self.text.push_str(text);
    }

    /// Appends a value that is followed by `next` in the template.
    pub fn part<P: KeyPart + ?Sized>(&mut self, value: &P, next: Option<char>) {
        value.append(self, next);
    }

    /// Appends what `value` displays.
    pub fn display_part(&mut self, value: &dyn Display, next: Option<char>) {
        let mut escape = Escape { out: &mut self.text, next, blank: true };
        // An error here is the value's own: `Escape` never fails. A key cut short could be another operation's.
        let shown = write!(escape, "{value}");
        if shown.is_err() || escape.blank {
            self.missing_part();
        }
    }

    /// Appends text, as [`display_part`](KeyBuilder::display_part) does.
    fn text_part(&mut self, text: &str, next: Option<char>) {
        if is_blank(text) {
            self.missing_part();
        } else if text.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'%' && !is_char(byte, next)) {
            self.text.push_str(text);
        } else {
            // Never fails.
            let _ = Escape { out: &mut self.text, next, blank: false }.write_str(text);
        }
    }

    /// Notes that a value is absent: the whole key is missing.
    pub fn missing_part(&mut self) {
        self.problem.get_or_insert(KeyProblem::Missing);
    }

    fn not_utf8(&mut self) {
        self.problem.get_or_insert(KeyProblem::NotUtf8);
    }

    /// The finished key.
    ///
    /// # Errors
    /// [`KeyError`], the first problem that was met. A key without a part is missing, too.
    pub fn build(self) -> Result<Key, KeyError> {
        let Self { text, problem, scope } = self;
        let problem = match problem {
            None if is_blank(&text[VERSION.len() + scope.len() + 1..]) => Some(KeyProblem::Missing),
            None if text.len() > Key::MAX_BYTES => Some(KeyProblem::TooLong { bytes: text.len() }),
            problem => problem,
        };
        let result = match problem {
            Some(problem) => Err(KeyError { scope: scope.to_owned(), problem }),
            None => Ok(Key { hash: hash(&text), text: Arc::from(text.as_str()) }),
        };
        if text.capacity() <= 2 * Key::MAX_BYTES {
            BUFFER.set(text);
        }
        result
    }
}

/// Whether `text` names nothing; true of the empty one, too. Mostly the first character tells.
fn is_blank(text: &str) -> bool {
    text.chars()
        .all(|c| c.is_whitespace() || c.is_control() || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}'))
}

fn is_char(byte: u8, c: Option<char>) -> bool {
    c == Some(char::from(byte))
}

fn hash(text: &str) -> u64 {
    static SECRET: LazyLock<RandomState> = LazyLock::new(RandomState::default);
    SECRET.hash_one(text)
}

struct Escape<'a> {
    out: &'a mut String,
    next: Option<char>,
    /// Whether all that was written is blank.
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

/// A value that can stand in an idempotency key.
///
/// Text, numbers, `bool`, `char`, UTF-8 bytes, references and smart pointers to them and `Option`s of them are key
/// parts; in the attribute, so is everything that implements [`Display`]. Implement it for types of your own to use
/// them with [`KeyBuilder::part`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be part of an idempotency key",
    label = "not text, a number, or another `KeyPart`",
    note = "implement `Display` or `idem_runtime::KeyPart` for it, or write an expression that yields text"
)]
pub trait KeyPart {
    /// Appends the value to `builder`; `next` is the character that follows it in the template.
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

/// The text of another key, without its scope.
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
    use super::*;

    /// The short ways for numbers and plain text must never write another key than the long one.
    #[test]
    fn numbers_and_text_are_written_as_they_are_displayed() {
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
    fn a_multibyte_separator_is_escaped() {
        let key = build(&[("a→b", Some('→')), ("c", None)], &["→"]).unwrap();
        assert_eq!(key.text(), "a%E2%86%92b→c");
    }

    #[test]
    fn absent_empty_and_blank_parts_make_the_key_missing() {
        assert_eq!(problem_of("s", None::<&str>), Err(KeyProblem::Missing));
        assert_eq!(Key::new("s", Some("x")).unwrap().text(), "x");
        assert_eq!(problem("s/ \t".parse()), Err(KeyProblem::Missing));
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
            // Beside something else they are kept.
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
    fn a_value_that_fails_to_display_is_not_cut_short() {
        struct Broken;
        impl Display for Broken {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("half")?;
                Err(fmt::Error)
            }
        }
        let mut builder = KeyBuilder::under("test", Ok(()));
        builder.display_part(&Broken, None);
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
    fn limits_are_enforced() {
        assert_eq!(problem_of("s", [0xff_u8].as_slice()), Err(KeyProblem::NotUtf8));
        assert_eq!(Key::new("s", b"order".as_slice()).unwrap().text(), "order");
        let room = Key::MAX_BYTES - "1/s/".len();
        assert!(Key::new("s", "x".repeat(room)).is_ok());
        assert_eq!(problem_of("s", "x".repeat(room + 1)), Err(KeyProblem::TooLong { bytes: Key::MAX_BYTES + 1 }));
        for scope in ["", "a/b", "a\nb", &"x".repeat(Key::MAX_SCOPE_BYTES + 1)] {
            assert_eq!(problem_of(scope, "x"), Err(KeyProblem::InvalidScope), "{scope:?}");
        }
    }

    #[track_caller]
    fn claim(scope: &Scope, result: &'static str) -> Result<(), KeyProblem> {
        let mut builder = KeyBuilder::of_results(scope, result);
        builder.text("x");
        problem(builder.build()).map(drop)
    }

    #[test]
    fn a_scope_belongs_to_one_handler() {
        static FIRST: Scope = Scope::of_handler("test::claimed", false);
        static SECOND: Scope = Scope::of_handler("test::claimed", false);
        static SHARED: Scope = Scope::of_handler("test::claimed", true);
        assert_eq!(claim(&FIRST, "u8"), Ok(()));
        for other in [&SECOND, &SHARED, &Scope::named("test::claimed"), &Scope::shared("test::claimed")] {
            let problem = claim(other, "u8").unwrap_err();
            assert_eq!(problem, KeyProblem::SharedScope { other: FIRST.site, this: other.site });
            assert!(problem.is_misconfiguration());
            let shown = problem.to_string();
            assert!(shown.contains(&FIRST.site.to_string()) && shown.contains(&other.site.to_string()), "{shown}");
            assert!(shown.contains("`scope = shared(\"…\")` on both"), "{shown}");
        }
        assert_eq!(claim(&FIRST, "u8"), Ok(()));
    }

    #[test]
    fn two_handlers_in_one_place_are_two() {
        macro_rules! scopes {
            ($($name:ident)*) => { $( static $name: Scope = Scope::of_handler("test::one place", false); )* };
        }
        scopes!(ONE TWO);
        assert_eq!(ONE.site, TWO.site);
        assert_eq!(claim(&ONE, ""), Ok(()));
        assert_eq!(claim(&TWO, ""), Err(KeyProblem::SharedScope { other: ONE.site, this: TWO.site }));
    }

    #[test]
    fn a_scope_is_shared_by_those_who_say_so() {
        static FIRST: Scope = Scope::of_handler("test::shared", true);
        static SECOND: Scope = Scope::of_handler("test::shared", true);
        for scope in [&FIRST, &SECOND, &Scope::shared("test::shared")] {
            assert_eq!(claim(scope, "u8"), Ok(()));
            assert_eq!(claim(scope, "u16"), Ok(()));
        }
        let claimed = claim(&Scope::named("test::shared"), "u8");
        assert!(matches!(claimed, Err(KeyProblem::SharedScope { .. })), "{claimed:?}");
    }

    #[test]
    fn a_scope_made_by_hand_belongs_to_its_place() {
        let make = || Scope::named("test::by hand");
        let (first, again) = (make(), make());
        assert_eq!(claim(&first, ""), Ok(()));
        assert_eq!(claim(&again, ""), Ok(()));
        assert!(matches!(claim(&Scope::named("test::by hand"), ""), Err(KeyProblem::SharedScope { .. })));
    }

    #[test]
    fn a_generic_handler_has_one_result_type_for_each_scope() {
        static SCOPE: Scope = Scope::of_handler("test::generic", false);
        assert_eq!(claim(&SCOPE, "alloc::string::String"), Ok(()));
        let problem = claim(&SCOPE, "u32").unwrap_err();
        assert!(problem.is_misconfiguration());
        let shown = problem.to_string();
        assert!(shown.contains("`alloc::string::String` before and returns `u32`"), "{shown}");
        // The same text in another place.
        let text: &'static str = String::from("alloc::string::String").leak();
        assert_eq!(claim(&SCOPE, text), Ok(()));
    }

    #[test]
    fn scopes_are_checked_while_compiling_as_well() {
        for text in ["a", "shop::ship", "a b", "é", "Â\u{a0}", "\u{a0}", "x".repeat(Key::MAX_SCOPE_BYTES).as_str()] {
            assert!(is_scope(text) && !text.contains(char::is_control), "{text:?}");
        }
        let long = "x".repeat(Key::MAX_SCOPE_BYTES + 1);
        for text in ["", "/", "a/b", "\0", "a\nb", "\u{7f}", "\u{80}", "é\u{9f}", &long] {
            assert!(!is_scope(text), "{text:?}");
        }
    }
}
