//! The part of a key that errors, logs and spans show.

use std::fmt;

use sha2::{Digest, Sha256};

/// Part of a key that errors, logs and spans show; [`Policy::key_display`](crate::Policy::key_display) sets it. The
/// scope of a key is always shown. Results and payloads are never shown.
///
/// In a key, a `%` always begins an escape such as `%2F`, so a hidden key can't be mistaken for a whole key:
/// [`Key`](super::Key) refuses to parse a hidden key, and the error names the reason.
///
/// ```
/// use idem_runtime::{Key, KeyDisplay};
///
/// let key = Key::new("shop::pay", "card:4111")?.shown_as(KeyDisplay::Hashed);
/// assert_eq!(key.to_string(), "shop::pay/%hash:ed2fd615ccb5fbb9");
/// assert_eq!(key.as_str(), "1/shop::pay/card:4111");
/// assert!(key.to_string().parse::<Key>().is_err());
/// # Ok::<(), idem_runtime::key::KeyError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum KeyDisplay {
    /// The whole key is shown.
    #[default]
    Whole,
    /// The first characters of the key's text, and `%…`. The number of these characters is the value of the variant, at
    /// most 253. A text that has no more characters is shown whole.
    Prefix(u8),
    /// `%hash:` and the first 16 hexadecimal digits of the SHA-256 of the stored form
    /// ([`Key::as_str`](super::Key::as_str)). A reader who guesses the key can verify the guess.
    Hashed,
}

/// A [`KeyDisplay`] in one byte. The future of each call stores several policies and keys, so a larger type would
/// enlarge every call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct DisplayByte(u8);

impl DisplayByte {
    /// The byte of [`KeyDisplay::Whole`].
    pub(crate) const WHOLE: Self = Self(0);
    const HASHED: u8 = u8::MAX;

    pub(crate) const fn new(display: KeyDisplay) -> Self {
        match display {
            KeyDisplay::Whole => Self::WHOLE,
            KeyDisplay::Prefix(count) if count < Self::HASHED - 2 => Self(count + 1),
            KeyDisplay::Prefix(_) => Self(Self::HASHED - 1),
            KeyDisplay::Hashed => Self(Self::HASHED),
        }
    }

    const fn display(self) -> KeyDisplay {
        match self.0 {
            0 => KeyDisplay::Whole,
            Self::HASHED => KeyDisplay::Hashed,
            prefix => KeyDisplay::Prefix(prefix - 1),
        }
    }
}

impl fmt::Debug for DisplayByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.display().fmt(f)
    }
}

/// Hash of a key. Byte 6 holds the [`DisplayByte`] of the key in place of hash bits.
#[derive(Clone, Copy)]
pub(super) struct KeyHash(u64);

impl KeyHash {
    const SHIFT: u32 = 48;
    const SHOWN: u64 = 0xff << Self::SHIFT;

    pub(super) const fn new(hash: u64) -> Self {
        Self(hash & !Self::SHOWN)
    }

    pub(super) const fn get(self) -> u64 {
        self.0 & !Self::SHOWN
    }

    pub(super) fn shown(self, shown: DisplayByte) -> Self {
        Self(self.get() | u64::from(shown.0) << Self::SHIFT)
    }

    pub(super) const fn display(self) -> KeyDisplay {
        DisplayByte(self.0.to_le_bytes()[6]).display()
    }
}

const HASH: &str = "%hash:";
const CUT: &str = "%…";

impl KeyDisplay {
    /// Writes `text`, the text of a key, as far as this display shows it. `stored` is the stored form of the same key.
    pub(super) fn hide(self, stored: &str, text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str(text),
            Self::Prefix(count) => match text.char_indices().nth(usize::from(count)) {
                Some((end, _)) => {
                    // An escape that the cut would split is left out, because half an escape is not a part of the key.
                    let shown = &text[..end];
                    let escape = shown.len().saturating_sub(2);
                    let cut = shown.bytes().skip(escape).position(|byte| byte == b'%');
                    write!(f, "{}{CUT}", &shown[..cut.map_or(end, |at| escape + at)])
                }
                None => f.write_str(text),
            },
            Self::Hashed => write_hash(stored, f),
        }
    }
}

/// Writes `%hash:` and the first 16 hexadecimal digits of the SHA-256 of `text`.
pub(crate) fn write_hash(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(HASH)?;
    Sha256::digest(text).iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// Returns whether `text` is the hidden display of a key, as opposed to the text of a key.
pub(super) fn is_hidden(text: &str) -> bool {
    text.starts_with(HASH) || text.ends_with(CUT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;

    #[test]
    fn a_hidden_key_does_not_parse_as_a_key() {
        let key = Key::new("s", "a%b").unwrap();
        assert_eq!(key.text(), "a%25b");
        let shown = |display| key.clone().shown_as(display).to_string();
        assert_eq!(shown(KeyDisplay::Whole), "s/a%25b");
        for (count, prefix) in [(0, "s/%…"), (1, "s/a%…"), (2, "s/a%…"), (3, "s/a%…"), (4, "s/a%25%…"), (5, "s/a%25b")]
        {
            assert_eq!(shown(KeyDisplay::Prefix(count)), prefix, "{count}");
        }
        for display in [KeyDisplay::Prefix(1), KeyDisplay::Hashed] {
            let error = shown(display).parse::<Key>().unwrap_err();
            assert!(error.to_string().contains("key_display"), "{error}");
        }
        for display in [KeyDisplay::Whole, KeyDisplay::Prefix(0), KeyDisplay::Prefix(253), KeyDisplay::Hashed] {
            let shown = key.clone().shown_as(KeyDisplay::Prefix(7)).shown_as(display);
            assert_eq!(shown.hash.display(), display);
            assert_eq!((&shown, shown.seed()), (&key, key.seed()), "it is the same key");
        }
        assert_eq!(shown(KeyDisplay::Prefix(5)).parse::<Key>().unwrap(), key);
    }
}
