//! What keeps a store from an answer.

use std::fmt;
use std::sync::Arc;

/// What kind of failure a [`StoreError`] is: kinds differ where a caller acts differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// Nothing was written; the same call may succeed later.
    Unavailable,
    /// The write may have landed, for example because the answer timed out. Repeating it with the same owner token is
    /// safe, and recognises its own effect.
    Unconfirmed,
    /// What is stored is not a record of this library or of this version; it is left alone.
    Corrupt,
    /// The configuration, the server's version or the credentials are wrong; a retry can't help.
    Misconfigured,
    /// The store is full: new keys are refused, nothing is forgotten. Nothing was written.
    Full,
    /// The result is larger than the store can hold. Nothing was written; the engine records the completion without it.
    TooLarge,
    /// The store can't do this at all, or not unless it is asked for more explicitly. Nothing was written.
    Unsupported,
    /// The user's transaction can't go on. Nothing of it takes effect: roll it back and deliver the message again.
    Aborted,
}

/// A store that did not do what it was asked for. Clones share what it says: one failed call may be about many leases.
#[derive(Clone)]
pub struct StoreError(Arc<Failure>);

#[derive(Clone)]
struct Failure {
    kind: StoreErrorKind,
    message: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl StoreError {
    /// A failure of `kind`; `message` says what failed, without secrets and payloads.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(Failure { kind, message: message.into(), source: None }))
    }

    /// The failure with what caused it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Arc::make_mut(&mut self.0).source = Some(source.into().into());
        self
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> StoreErrorKind {
        self.0.kind
    }

    /// Whether the write may have landed.
    pub fn may_have_landed(&self) -> bool {
        self.kind() == StoreErrorKind::Unconfirmed
    }

    /// Whether the same call may succeed if it is repeated.
    pub fn is_transient(&self) -> bool {
        matches!(self.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Unconfirmed)
    }

    /// Whether only a person can make the same call succeed: something is damaged, forbidden or wrongly set up.
    pub(crate) fn is_for_good(&self) -> bool {
        matches!(self.kind(), StoreErrorKind::Corrupt | StoreErrorKind::Misconfigured | StoreErrorKind::Unsupported)
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("StoreError");
        shown.field("kind", &self.0.kind).field("message", &self.0.message);
        if let Some(source) = &self.0.source {
            shown.field("source", source);
        }
        shown.finish()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as _)
    }
}
