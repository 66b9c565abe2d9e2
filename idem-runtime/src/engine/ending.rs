//! End of an attempt, and the part of the end that the record holds.

use std::borrow::Cow;

use crate::metrics::Dropped;
use crate::record::messages::UnsentMessages;
use crate::record::{Finish, Journal, Release, StoredResult};

/// End of an attempt, as it is written to the record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AttemptEnd {
    /// The operation finished, with a stored result or without one.
    Finish(Finish),
    /// The attempt ended without a finished operation.
    Release(Release),
}

impl AttemptEnd {
    /// Returns the ending with the journal beside its result, if it has a result.
    pub(super) fn with_journal(self, journal: &Journal) -> Self {
        match self {
            Self::Finish(finish) => Self::Finish(finish.with_result(finish.result().with_journal(journal))),
            Self::Release(_) => self,
        }
    }

    /// Returns the ending with messages beside its result. Only a completed operation has messages.
    pub(super) fn with_messages(self, messages: &UnsentMessages) -> Self {
        match self {
            Self::Finish(finish @ Finish::Completed(_)) => {
                Self::Finish(finish.with_result(finish.result().with_messages(messages)))
            }
            other => other,
        }
    }

    /// Returns the ending without the journal beside its result, or without its result, for a store that can't hold
    /// them; `None` if the ending has no result.
    pub(super) fn without_result(&self) -> Option<Self> {
        let Self::Finish(finish) = self else { return None };
        if let Some(Ok((result, messages))) = finish.result().messages() {
            // The messages are kept: they are as much a part of the operation as its result.
            let alone = Self::Finish(finish.with_result(result)).without_result()?;
            return Some(alone.with_messages(&messages));
        }
        if let (Cow::Owned(result), _) = finish.result().parts() {
            return Some(Self::Finish(finish.with_result(result)));
        }
        match finish {
            Finish::Completed(StoredResult::Encoded { bytes, .. }) => {
                Some(Self::Finish(Finish::Completed(StoredResult::TooLarge { size: bytes.len() as u64 })))
            }
            // An error ends the operation only if duplicates can replay the error. If the bytes of the error can't be
            // stored, the key is freed instead.
            Finish::Failed(StoredResult::Encoded { .. }) => Some(Self::Release(Release::Returned)),
            _ => None,
        }
    }
}

/// Part of the end of an attempt that the record holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RecordContent {
    /// The result, whose size is `bytes`: duplicates replay it.
    Result { bytes: usize },
    /// The completion, without the result.
    Completion(Dropped),
    /// No part: the key is free, or another attempt holds it.
    Nothing,
}
