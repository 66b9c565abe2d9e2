//! The end of an attempt, and the part of it that a record holds.

use crate::metrics::Dropped;
use crate::record::{Finish, Release, StoredResult};

/// End of an attempt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AttemptEnd {
    /// With a result, or only with the completion.
    Finish(Finish),
    /// Without a result.
    Release(Release),
}

impl AttemptEnd {
    /// Returns the ending to write if the store can't hold the result; `None` if there is no result to leave out.
    pub(super) fn without_result(&self) -> Option<Self> {
        match self {
            Self::Finish(Finish::Completed(StoredResult::Encoded { bytes, .. })) => {
                Some(Self::Finish(Finish::Completed(StoredResult::TooLarge { size: bytes.len() as u64 })))
            }
            // An error that can't be replayed must not end the operation.
            Self::Finish(Finish::Failed(StoredResult::Encoded { .. })) => Some(Self::Release(Release::Returned)),
            _ => None,
        }
    }
}

/// Part of the ended attempt that the record holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RecordContent {
    /// The result, of this number of bytes: duplicates replay it.
    Result { bytes: usize },
    /// The completion, without the result.
    Completion(Dropped),
    /// Nothing: the key is free, or another attempt has it.
    Nothing,
}
