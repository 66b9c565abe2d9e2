//! End of an attempt, and the part of the end that the record holds.

use std::borrow::Cow;

use crate::metrics::Dropped;
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

    /// Returns the ending without the journal beside its result, or without its result, for a store that can't hold
    /// them; `None` if the ending has no result.
    pub(super) fn without_result(&self) -> Option<Self> {
        if let Self::Finish(finish) = self
            && let (Cow::Owned(result), _) = finish.result().parts()
        {
            return Some(Self::Finish(finish.with_result(result)));
        }
        match self {
            Self::Finish(Finish::Completed(StoredResult::Encoded { bytes, .. })) => {
                Some(Self::Finish(Finish::Completed(StoredResult::TooLarge { size: bytes.len() as u64 })))
            }
            // An error ends the operation only if duplicates can replay the error. If the bytes of the error can't be
            // stored, the key is freed instead.
            Self::Finish(Finish::Failed(StoredResult::Encoded { .. })) => Some(Self::Release(Release::Returned)),
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
