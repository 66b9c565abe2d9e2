//! Failures of a store.

use std::fmt;
use std::sync::Arc;

/// Kind of a failure. Failures of different kinds need different reactions of the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// Nothing was written; the same call may succeed later.
    Unavailable,
    /// The write may have taken effect, for example because the answer timed out. Repeating the call with the same
    /// owner token is safe: the store recognises its earlier effect.
    Unconfirmed,
    /// The stored value is not a record of this library or of this version. The store leaves the value unchanged.
    Corrupt,
    /// The configuration, the server's version or the credentials are wrong; a retry can't help.
    Misconfigured,
    /// The store is full: it refuses new keys, and forgets no record. Nothing was written.
    Full,
    /// The result is larger than the store can hold. Nothing was written; the engine records the completion without the
    /// result.
    TooLarge,
    /// The store can't do this operation, or does it only on an explicit request, such as a list by `Filter::scan`.
    /// Nothing was written.
    Unsupported,
    /// The user's transaction can't continue, and none of its writes takes effect. Roll the transaction back and
    /// deliver the message again.
    Aborted,
}

/// A failed request to a store. Clones share their content, because one failed call may concern many leases.
#[derive(Clone)]
pub struct StoreError(Arc<ErrorContent>);

#[derive(Clone)]
struct ErrorContent {
    kind: StoreErrorKind,
    message: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl StoreError {
    /// Makes a failure of `kind`. `message` describes the failure, without secrets and payloads.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(ErrorContent { kind, message: message.into(), source: None }))
    }

    /// Adds the cause of the failure.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Arc::make_mut(&mut self.0).source = Some(source.into().into());
        self
    }

    /// Kind of the failure.
    pub fn kind(&self) -> StoreErrorKind {
        self.0.kind
    }

    /// Returns whether the write may have taken effect.
    pub fn may_have_landed(&self) -> bool {
        self.kind() == StoreErrorKind::Unconfirmed
    }

    /// Returns whether the same call may succeed if it is repeated.
    pub fn is_transient(&self) -> bool {
        matches!(self.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Unconfirmed)
    }

    /// Returns whether the same call succeeds only after a person has acted: a record is damaged, a right is missing,
    /// or the setup is wrong.
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
