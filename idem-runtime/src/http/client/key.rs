//! Keys and names of calls.

use std::borrow::Cow;
use std::fmt;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::clock::{Clock, SystemClock};
use crate::engine::Attempt;
use crate::key::{uuid, write_hash};

/// Longest key that [`CallKey::new`] takes, in bytes.
const MAX_KEY_BYTES: usize = 255;

/// The key of a call to a server: an extension of the request, and of each response.
///
/// The text is the value of the header field, byte for byte. So a key that was stored, or taken from a response, is
/// sent unchanged, whether as an extension or as a field.
///
/// ```
/// use idem_runtime::http::client::CallKey;
///
/// let key = CallKey::random();
/// let stored = key.as_str().to_owned(); // In the same transaction as the order.
/// assert_eq!(CallKey::new(stored)?, key);
/// # Ok::<_, idem_runtime::http::client::InvalidCallKey>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct CallKey(String);

impl CallKey {
    /// Makes a random key, a UUID of version 4. Store the key before you send it: no other call makes the same key.
    ///
    /// # Panics
    /// If the operating system has no randomness.
    pub fn random() -> Self {
        Self::from_bits(SystemClock::default().entropy())
    }

    /// Takes a stored key, or a key that the application made: 1 to 255 printable ASCII characters, without blanks at
    /// the ends.
    ///
    /// # Errors
    /// [`InvalidCallKey`] for any other text.
    pub fn new(text: impl Into<String>) -> Result<Self, InvalidCallKey> {
        let text = text.into();
        let is_printable = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        let is_key = is_printable && text.len() <= MAX_KEY_BYTES && text.trim() == text && !is_blank(&text);
        if is_key { Ok(Self(text)) } else { Err(InvalidCallKey) }
    }

    /// Returns the text of the key, to be stored.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Formats random bits as a UUID of version 4.
    pub(super) fn from_bits(random: u128) -> Self {
        Self(uuid(random, 4))
    }

    /// Reads the key that the caller has set in the field `name`; `None` if there is no such field.
    ///
    /// # Errors
    /// [`InvalidCallKey`] for a field in which a server may find no key, so that a retry would be another operation.
    pub(super) fn in_field(headers: &HeaderMap, name: &HeaderName) -> Result<Option<Self>, InvalidCallKey> {
        let mut lines = headers.get_all(name).iter();
        let Some(line) = lines.next() else { return Ok(None) };
        let text = line.to_str().map_err(|_| InvalidCallKey)?;
        if lines.next().is_some() || is_blank(text) {
            return Err(InvalidCallKey);
        }
        Ok(Some(Self(text.to_owned())))
    }

    /// Returns the key as a `String` of structured fields, in quotes.
    pub(super) fn quoted(self) -> Self {
        if self.0.starts_with('"') {
            return self;
        }
        Self(format!("\"{}\"", self.0.replace('\\', "\\\\").replace('"', "\\\"")))
    }

    /// Returns the value of the header field. The value is marked as sensitive: `Debug` of a request does not show it,
    /// and HPACK does not index it.
    pub(super) fn to_field(&self) -> Result<HeaderValue, InvalidCallKey> {
        let mut value = HeaderValue::try_from(&self.0).map_err(|_| InvalidCallKey)?;
        value.set_sensitive(true);
        Ok(value)
    }
}

/// Returns whether a field with this text holds no key: the text is blank, or an empty `String` of structured fields.
fn is_blank(text: &str) -> bool {
    text.trim().trim_matches('"').trim().is_empty()
}

impl fmt::Debug for CallKey {
    /// Shows `%hash:` and the first 16 hexadecimal digits of the SHA-256 of the text, as
    /// [`KeyDisplay::Hashed`](crate::KeyDisplay::Hashed) does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallKey(")?;
        write_hash(&self.0, f)?;
        f.write_str(")")
    }
}

/// Error for a text that is no key: empty, too long, or with characters that a header field can't contain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct InvalidCallKey;

impl fmt::Display for InvalidCallKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a key has 1 to {MAX_KEY_BYTES} printable ASCII characters, without blanks at the ends; \
             use `CallKey::random`, or shorten the text"
        )
    }
}

impl std::error::Error for InvalidCallKey {}

/// The name of a call inside of an idempotent handler: an extension of the request.
///
/// The key that is sent derives from this name ([`Attempt::child_key`]), so every attempt of the handler sends the same
/// key. Each call of a handler needs its own name. A call in a loop names its item: `format!("charge {}", item.id)`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CallName {
    name: Cow<'static, str>,
    /// The key, if [`of`](CallName::of) made this name.
    key: Option<CallKey>,
}

impl CallName {
    /// Makes the name of a call. The client must run in the task of the handler.
    ///
    /// In another task there is no attempt from which the key could derive, so the request is refused
    /// ([`RetryError::NoAttempt`](super::RetryError::NoAttempt)). Use [`CallName::of`] there.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self { name: name.into(), key: None }
    }

    /// Makes a name that contains its key. Use such a name if the client runs in another task than the handler: behind
    /// a `tower::buffer::Buffer`, or in a task that the handler spawns.
    ///
    /// ```
    /// # use http::Request;
    /// # use idem_runtime::{Error, MemoryStore, current, idempotent};
    /// use idem_runtime::http::client::CallName;
    ///
    /// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// async fn pay(store: &MemoryStore, id: u32) -> Result<(), Error> {
    ///     let name = CallName::of(&current()?, "charge");
    ///     let request = Request::post("https://bank.example/charges").extension(name);
    ///     // … hand the request to another task.
    ///     # drop(request);
    ///     Ok(())
    /// }
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// # pay(&MemoryStore::new(), 42).await.unwrap();
    /// # });
    /// ```
    pub fn of(attempt: &Attempt, name: impl Into<Cow<'static, str>>) -> Self {
        let name = name.into();
        let key = Some(Self::child_key(attempt, &name));
        Self { name, key }
    }

    fn child_key(attempt: &Attempt, name: &str) -> CallKey {
        CallKey(attempt.child_key(name))
    }

    /// Returns the key of the call: the contained key, or the key that derives from the `current` attempt.
    pub(super) fn key(&self, current: Option<&Attempt>) -> Option<CallKey> {
        self.key.clone().or_else(|| Some(Self::child_key(current?, &self.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_keys_are_uuids_of_version_4() {
        assert_eq!(CallKey::from_bits(0).as_str(), "00000000-0000-4000-8000-000000000000");
        assert_eq!(CallKey::from_bits(u128::MAX).as_str(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_ne!(CallKey::random(), CallKey::random());
    }

    #[test]
    fn a_call_key_must_be_printable_and_not_blank() {
        for text in ["k", "order 42", "\"quoted\"", "a\"b", &"k".repeat(255)] {
            assert_eq!(CallKey::new(text).unwrap().as_str(), text);
        }
        for text in ["", " ", "\"\"", "\" \"", " k", "k ", "k\n", "kéy", "\0", &"k".repeat(256)] {
            assert_eq!(CallKey::new(text), Err(InvalidCallKey), "{text:?}");
        }
    }

    #[test]
    fn a_key_is_quoted_once() {
        let key = CallKey::new("a\"b\\c").unwrap().quoted();
        assert_eq!(key.as_str(), r#""a\"b\\c""#);
        assert_eq!(key.clone().quoted(), key);
    }

    #[test]
    fn debug_shows_the_hash_of_a_key() {
        let key = CallKey::new("card 4111").unwrap();
        assert_eq!(format!("{key:?}"), "CallKey(%hash:41c37e375cc9c4ad)");
        let field = key.to_field().unwrap();
        assert_eq!((format!("{field:?}"), field.as_bytes()), ("Sensitive".to_owned(), &b"card 4111"[..]));
    }
}
