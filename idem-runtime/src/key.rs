//! Idempotency keys: scope, escaping, limits, and the versioned form in which they are stored.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt::{self, Display, Write as _};
use std::hash::{BuildHasher, Hash, Hasher};
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
    /// [`KeyError`] if the scope isn't valid, the part is missing or not UTF-8, or the key is too long.
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
        if text.is_empty() {
            builder.missing_part();
        }
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
    /// The key, or a part of it, is `None` or empty.
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
    /// Two handlers have the same default scope, so that one would replay the other's results.
    SharedScope {
        /// Where the handler that has the scope already is defined.
        other: Site,
        /// Where the handler that was refused is defined.
        this: Site,
    },
}

impl Display for KeyProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the key or a part of it is `None` or empty"),
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
                "the handlers at {other} and {this} have the same default scope; write `scope = \"…\"` on one of them"
            ),
        }
    }
}

/// A place in the user's source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    file: &'static str,
    line: u32,
    column: u32,
}

impl Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// The name of a handler inside the key space; the attribute keeps one in a `static` for each handler.
#[derive(Debug)]
pub struct Scope {
    name: &'static str,
    /// Where a derived scope was written: two methods of one module can derive the same name.
    site: Option<Site>,
    checked: OnceLock<Result<(), KeyProblem>>,
}

impl Scope {
    /// A scope the user wrote down. Handlers that share it share their operations.
    pub const fn named(name: &'static str) -> Self {
        Self { name, site: None, checked: OnceLock::new() }
    }

    /// A scope made from a handler's path. A second handler that derives the same one is refused.
    pub const fn derived(name: &'static str, file: &'static str, line: u32, column: u32) -> Self {
        Self { name, site: Some(Site { file, line, column }), checked: OnceLock::new() }
    }

    fn check(&self) -> Result<(), KeyProblem> {
        let checked = self.checked.get_or_init(|| {
            check_scope(self.name)?;
            self.site.map_or(Ok(()), |site| claim(self.name, site))
        });
        match checked {
            Ok(()) => Ok(()),
            Err(problem) => Err(problem.clone()),
        }
    }
}

fn check_scope(scope: &str) -> Result<(), KeyProblem> {
    let valid = (1..=Key::MAX_SCOPE_BYTES).contains(&scope.len());
    let valid = valid && !scope.contains(|c: char| c == '/' || c.is_control());
    if valid { Ok(()) } else { Err(KeyProblem::InvalidScope) }
}

/// Registers a derived scope for the handler at `this`.
fn claim(name: &'static str, this: Site) -> Result<(), KeyProblem> {
    static CLAIMED: LazyLock<Mutex<HashMap<&'static str, Site>>> = LazyLock::new(Mutex::default);
    // A scope claims once for each `static`. The sites may be equal: what one `macro_rules!` wrote is all in one place.
    match crate::sync::lock(&CLAIMED).insert(name, this) {
        None => Ok(()),
        Some(other) => Err(KeyProblem::SharedScope { other, this }),
    }
}

thread_local! {
    /// Keys are written here and copied once into their shared allocation.
    static BUFFER: Cell<String> = const { Cell::new(String::new()) };
}

/// Builds a [`Key`] from literal text and values, so that different values never give the same key.
///
/// In each value, `%`, control characters and the character that follows the value in the template are written as
/// `%XX`. A value therefore ends at the first unescaped occurrence of the character that follows it, and the whole can
/// be read back in only one way. An empty or absent value makes the whole key missing: `order:` with nothing behind it
/// would be shared by unrelated messages.
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
        Self::under(scope.name, scope.check())
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
        let before = self.text.len();
        let mut escape = Escape { out: &mut self.text, next };
        // An error here is the value's own: `Escape` never fails. A key cut short could be another operation's.
        let shown = write!(escape, "{value}");
        if shown.is_err() || self.text.len() == before {
            self.missing_part();
        }
    }

    /// Appends text, as [`display_part`](KeyBuilder::display_part) does.
    fn text_part(&mut self, text: &str, next: Option<char>) {
        if text.is_empty() {
            self.missing_part();
        } else if text.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'%' && !is_char(byte, next)) {
            self.text.push_str(text);
        } else {
            // Never fails.
            let _ = Escape { out: &mut self.text, next }.write_str(text);
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
    /// [`KeyError`], the first problem that was met.
    pub fn build(self) -> Result<Key, KeyError> {
        let Self { text, problem, scope } = self;
        let problem = match problem {
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
}

impl fmt::Write for Escape<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
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
            static SCOPE: Scope = Scope::named("same");
            for next in [None, Some(':'), Some('-'), Some('0'), Some('9'), Some('a'), Some('é')] {
                let [short, long] = [true, false].map(|short| {
                    let mut builder = KeyBuilder::new(&SCOPE);
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
        for text in ["", "a", "a:b", "100%", "%3A", "a-b", "tab\t", "\u{7f}", "\u{85}", "é", "aé:0", "~ !", "09"] {
            same(text);
        }
    }

    fn build(parts: &[(&str, Option<char>)], separators: &[&str]) -> Result<Key, KeyError> {
        static SCOPE: Scope = Scope::named("test");
        let mut builder = KeyBuilder::new(&SCOPE);
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
        let values = ["a", "a:", ":", "a%3A", "%", "%3A", "b", ":b", "a:b", "é", "\n"];
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
    fn absent_and_empty_parts_make_the_key_missing() {
        assert_eq!(problem_of("s", ""), Err(KeyProblem::Missing));
        assert_eq!(problem_of("s", None::<&str>), Err(KeyProblem::Missing));
        assert_eq!(Key::new("s", Some("x")).unwrap().text(), "x");
        assert_eq!(problem(build(&[("", Some(':')), ("b", None)], &[":"])), Err(KeyProblem::Missing));
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
        static SCOPE: Scope = Scope::named("test");
        let mut builder = KeyBuilder::new(&SCOPE);
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

    #[test]
    fn a_derived_scope_belongs_to_one_handler() {
        static FIRST: Scope = Scope::derived("test::claimed", "a.rs", 1, 1);
        static SECOND: Scope = Scope::derived("test::claimed", "a.rs", 9, 1);
        assert!(KeyBuilder::new(&FIRST).build().is_ok());
        assert!(matches!(problem(KeyBuilder::new(&SECOND).build()), Err(KeyProblem::SharedScope { .. })));
        assert!(KeyBuilder::new(&FIRST).build().is_ok());
    }
}
