//! Idempotency keys: scope, escaping, limits, and the versioned form in which they are stored.

mod builder;
mod fingerprint;
mod scope;

use std::fmt::{self, Display};
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::Arc;

pub use self::builder::{KeyBuilder, KeyPart};
pub(crate) use self::fingerprint::child_key;
pub use self::fingerprint::{Fingerprint, FingerprintError};
use self::scope::check_scope;
pub(crate) use self::scope::is_scope;
pub use self::scope::{Scope, Site};

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
