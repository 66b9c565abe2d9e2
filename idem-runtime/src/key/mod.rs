//! Idempotency keys: scope, escaping, limits, and the versioned text under which stores hold them.

mod builder;
mod display;
mod fingerprint;
mod problem;
mod scope;

use std::cmp::Ordering;
use std::fmt::{self, Display};
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::Arc;

pub use self::builder::{KeyBuilder, KeyPart};
pub(crate) use self::display::DisplayByte;
pub use self::display::KeyDisplay;
use self::display::KeyHash;
#[cfg(feature = "http-client")]
pub(crate) use self::display::write_hash;
#[cfg(feature = "http")]
pub(crate) use self::fingerprint::SumHash;
pub(crate) use self::fingerprint::child_key;
#[cfg(feature = "http")]
pub(crate) use self::fingerprint::uuid;
pub use self::fingerprint::{Fingerprint, FingerprintError, PayloadDigest};
pub use self::problem::{KeyError, KeyProblem, Site};
pub use self::scope::Scope;
use self::scope::check_scope;
pub(crate) use self::scope::{check_own_scope, is_reserved, is_scope};

/// Version of the stored form of keys. A change of this form needs a new version *and* a way to find records under the
/// old version: otherwise an upgrade would silently run old operations again.
const VERSION: &str = "1/";

/// Name of one operation: the scope of its handler, and a text that identifies the operation within this scope.
///
/// The stored form is `1/<scope>/<text>`: the version of the form, the scope (which contains no `/`), the text.
/// `Display` leaves out the version that [`Key::as_str`] contains, and hides a part of the key if the policy requires
/// it ([`KeyDisplay`]). Clones share the text.
///
/// ```
/// let key = idem_runtime::Key::new("shop::ship_order", "order:42").unwrap();
/// assert_eq!(key.scope(), "shop::ship_order");
/// assert_eq!(key.text(), "order:42");
/// assert_eq!(key.to_string(), "shop::ship_order/order:42");
/// assert_eq!(key.as_str(), "1/shop::ship_order/order:42");
/// ```
#[derive(Clone)]
pub struct Key {
    text: Arc<str>,
    /// Hash of the key, computed once with a secret of this process: a call looks up its key several times, and a map
    /// of keys rehashes when it grows. Byte 6, which no map uses, holds the [`DisplayByte`]: a separate field would
    /// enlarge each key by a word, and the future of a call holds several keys.
    hash: KeyHash,
}

impl Key {
    /// Beginning of every stored key.
    pub(crate) const STORED: &str = VERSION;
    /// Length of the longest stored form of a key, in bytes.
    pub const MAX_BYTES: usize = problem::MAX_BYTES;
    /// Length of the longest scope, in bytes.
    pub const MAX_SCOPE_BYTES: usize = problem::MAX_SCOPE_BYTES;

    /// Makes a key from one part. Use [`KeyBuilder`] for several parts.
    ///
    /// # Errors
    /// [`KeyError`] if the scope isn't valid or begins with `idem::`, if the part is missing, blank or not UTF-8, or if
    /// the key is too long.
    pub fn new<P: KeyPart>(scope: &str, part: P) -> Result<Self, KeyError> {
        let mut builder = KeyBuilder::under(scope, check_own_scope(scope));
        builder.part(&part, None);
        builder.build()
    }

    /// Makes a key of a record that the library keeps for itself, in a scope that no key of a user may have.
    pub(crate) fn of_library(scope: &'static str, part: impl KeyPart) -> Result<Self, KeyError> {
        debug_assert!(is_reserved(scope), "{scope} may also be the scope of a handler");
        let mut builder = KeyBuilder::under(scope, check_scope(scope));
        builder.part(&part, None);
        builder.build()
    }

    /// Returns the key with another display in errors, logs and spans.
    ///
    /// ```
    /// use idem_runtime::{Key, KeyDisplay};
    ///
    /// let key = Key::new("shop::pay", "card:4111")?;
    /// assert_eq!(key.shown_as(KeyDisplay::Prefix(5)).to_string(), "shop::pay/card:%…");
    /// # Ok::<(), idem_runtime::key::KeyError>(())
    /// ```
    #[must_use]
    pub fn shown_as(self, display: KeyDisplay) -> Self {
        self.shown(DisplayByte::new(display))
    }

    pub(crate) fn shown(mut self, shown: DisplayByte) -> Self {
        self.hash = self.hash.shown(shown);
        self
    }

    /// Stored form of the key, with its version prefix.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the index of the shard that holds the key, for at most 256 shards: byte 5 of the hash. Maps use other
    /// bits of the hash for buckets and tags.
    #[cfg(any(feature = "memory", feature = "cached"))]
    pub(crate) fn shard(&self, shards: usize) -> usize {
        usize::from(self.hash.get().to_le_bytes()[5]) % shards
    }

    /// Returns a seed for delays and samples that must differ between keys.
    pub(crate) fn seed(&self) -> u64 {
        self.hash.get()
    }

    /// Returns a seed that, unlike [`seed`](Self::seed), is the same in every process, so that a simulation can be
    /// repeated: FNV-1a of the stored form.
    pub(crate) fn spread(&self) -> u64 {
        let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        self.text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
    }

    /// Returns the first 32 bits of the hash.
    #[cfg(feature = "memory")]
    pub(crate) fn short_hash(&self) -> u32 {
        let [a, b, c, d, ..] = self.hash.get().to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// Returns the stored form, which shares the memory of the key.
    #[cfg(feature = "memory")]
    pub(crate) fn shared(&self) -> Arc<str> {
        Arc::clone(&self.text)
    }

    /// Scope of the key.
    pub fn scope(&self) -> &str {
        self.split().0
    }

    /// Text of the key, without its scope.
    pub fn text(&self) -> &str {
        self.split().1
    }

    /// Returns `<scope>/<text>`, the form in errors and logs, with no part hidden by a [`KeyDisplay`].
    pub(crate) fn shown_whole(&self) -> &str {
        &self.text[VERSION.len()..]
    }

    fn split(&self) -> (&str, &str) {
        let text = self.shown_whole();
        // The search compares single bytes: a scope is short, and a search that compares whole words takes longer
        // to start.
        let end = text.bytes().position(|byte| byte == b'/');
        end.map(|end| (&text[..end], &text[end + 1..])).unwrap_or_default()
    }
}

/// Parses a key as errors and logs show it (`<scope>/<text>`, with escapes), or as a store holds it
/// (`1/<scope>/<text>`).
///
/// Control characters are refused: stores treat them differently, so no key contains a control character. A text that
/// begins with the namespace of a store is refused too; [`Operator::key`](crate::operator::Operator::key) accepts such
/// a text. A key whose scope is `1`, or ends with `:1`, must be given in its stored form. The scopes of the library
/// (`idem::steps`) are accepted here only, so that an operator can look at their records.
///
/// ```
/// use idem_runtime::Key;
/// let shown = "shop::ship/a%3Ab:c"; // Not the same as `Key::new("shop::ship", "a%3Ab:c")`, which escapes the `%`.
/// assert_eq!(shown.parse::<Key>().unwrap().to_string(), shown);
///
/// let stored = "1/shop::ship/a%3Ab:c"; // The form in a row of a table.
/// assert_eq!(stored.parse::<Key>().unwrap().to_string(), shown);
/// assert!("shop:1/shop::ship/a%3Ab:c".parse::<Key>().unwrap_err().to_string().contains("leave out the namespace"));
/// ```
impl FromStr for Key {
    type Err = KeyError;

    fn from_str(shown: &str) -> Result<Self, KeyError> {
        let stored = shown.strip_prefix(Self::STORED).filter(|rest| rest.contains('/'));
        let (scope, text) = stored.unwrap_or(shown).split_once('/').unwrap_or_default();
        if stored.is_none() && scope.ends_with(":1") && text.contains('/') {
            return Err(KeyError { scope: scope.to_owned(), problem: KeyProblem::Namespaced });
        }
        if display::is_hidden(text) {
            return Err(KeyError { scope: scope.to_owned(), problem: KeyProblem::Hidden });
        }
        let mut builder = KeyBuilder::under(scope, check_scope(scope));
        builder.literal(text);
        builder.build()
    }
}

/// Writes the key as the [`KeyDisplay`] of its policy requires: `<scope>/<text>`, or a part of it.
impl Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.hash.display() {
            KeyDisplay::Whole => f.write_str(self.shown_whole()),
            display => {
                let (scope, text) = self.split();
                write!(f, "{scope}/")?;
                display.hide(&self.text, text, f)
            }
        }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.hash.get() == other.hash.get() && self.text == other.text
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.text.cmp(&other.text)
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash.get());
    }
}

/// Hasher for maps of keys. The hasher returns the hash that the key computed when it was made.
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
