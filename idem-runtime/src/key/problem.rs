//! Limits of keys and scopes, and the reasons why a key can't be built.

use std::fmt::{self, Display};
use std::panic::Location;

/// Length of the longest stored form of a key, in bytes.
pub(super) const MAX_BYTES: usize = 1024;
/// Length of the longest scope, in bytes.
pub(super) const MAX_SCOPE_BYTES: usize = 200;
/// Beginning of the scopes in which the library keeps records of its own.
pub(super) const RESERVED_PREFIX: &str = "idem::";

/// Location in the user's source code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site(&'static Location<'static>);

impl Site {
    /// Returns the location of the caller.
    #[track_caller]
    pub(super) const fn caller() -> Self {
        Self(Location::caller())
    }
}

impl Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A key that could not be built.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyError {
    /// Scope of the key.
    pub scope: String,
    /// Reason why the key could not be built.
    pub problem: KeyProblem,
}

impl Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no idempotency key in scope `{}`: {}", self.scope, self.problem)
    }
}

impl std::error::Error for KeyError {}

/// Reason why a key could not be built.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KeyProblem {
    /// The key, or a part of it, is `None`, empty or blank.
    Missing,
    /// The stored form of the key is longer than [`Key::MAX_BYTES`](super::Key::MAX_BYTES).
    #[non_exhaustive]
    TooLong {
        /// Length of the key's stored form in bytes.
        bytes: usize,
    },
    /// A part of the key was given as bytes that are not UTF-8.
    NotUtf8,
    /// The text to parse as a key, or the literal text of a template, contains a control character. In values, control
    /// characters are escaped instead.
    ControlCharacter,
    /// The text to parse as a key begins with the namespace of a store.
    Namespaced,
    /// The text to parse as a key shows only a part of a key; see [`KeyDisplay`](super::KeyDisplay).
    Hidden,
    /// The scope is empty, longer than [`Key::MAX_SCOPE_BYTES`](super::Key::MAX_SCOPE_BYTES), or holds a `/` or a
    /// control character.
    InvalidScope,
    /// The scope begins with `idem::`. Such scopes belong to the library: a key of yours would share its records with
    /// the records of steps in transactions (`idem::steps`), or of a resender (`idem::outbox`).
    ReservedScope,
    /// Two handlers have the same scope, and at least one of them does not declare the scope as shared: one handler
    /// would replay the results of the other.
    #[non_exhaustive]
    SharedScope {
        /// Location of the handler that already owns the scope.
        other: Site,
        /// Location of the refused handler.
        this: Site,
    },
    /// A generic handler is called with a second result type, under a scope that is not declared as shared: one call
    /// would replay the result of the other.
    #[non_exhaustive]
    SharedByResults {
        /// Location of the handler.
        site: Site,
        /// Result type that already owns the scope.
        other: &'static str,
        /// Result type that was refused.
        this: &'static str,
    },
}

impl KeyProblem {
    /// Returns whether the program, not the message, causes the problem. If so, this handler can't build a key for any
    /// message.
    pub const fn is_misconfiguration(&self) -> bool {
        matches!(
            self,
            Self::InvalidScope | Self::ReservedScope | Self::SharedScope { .. } | Self::SharedByResults { .. }
        )
    }
}

impl Display for KeyProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the key or a part of it is `None`, empty or blank"),
            Self::TooLong { bytes } => write!(
                f,
                "the key has {bytes} bytes, {MAX_BYTES} are allowed; key on an identifier or on a digest of the text"
            ),
            Self::NotUtf8 => f.write_str("the key is not UTF-8; write the bytes as hexadecimal or base64 text"),
            Self::ControlCharacter => f.write_str(
                "the key holds a control character, such as a NUL or a line feed; a stored key has it as `%00` or `%0A`",
            ),
            Self::Namespaced => f.write_str(
                "this is how a store with a namespace keeps a key; leave out the namespace: begin with `1/<scope>/`",
            ),
            Self::Hidden => f.write_str(
                "this is what logs and errors show of a key whose policy hides the rest (`key_display`); take the whole key \
                 from the message or the request",
            ),
            Self::InvalidScope => {
                write!(f, "the scope must have 1 to {MAX_SCOPE_BYTES} bytes, without `/` and control characters")
            }
            Self::ReservedScope => {
                write!(f, "scopes that begin with `{RESERVED_PREFIX}` belong to the library; write another scope")
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
