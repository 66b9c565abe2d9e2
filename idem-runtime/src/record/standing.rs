//! Standing of an operation.

use std::fmt;

/// Standing of an operation: the state of its record, and for a pending record also the state of its lease.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Standing {
    /// An attempt is running, and its lease is live.
    Running,
    /// An attempt crashed before it recorded an end, or can't reach the store. The lease of the attempt has lapsed, and
    /// no other attempt has taken over.
    Lapsed,
    /// The latest attempt ended without a result, and the next attempt may run.
    Released,
    /// The effect of a body is in doubt. No body may run until a reconciler or an operator settles the doubt.
    Interrupted,
    /// The body succeeded.
    Completed,
    /// The body returned an error, and duplicates get the recorded error.
    Failed,
    /// The record can't be read, so every delivery fails until an operator forgets the record.
    Damaged,
}

impl Standing {
    /// All standings.
    pub const ALL: [Self; 7] =
        [Self::Running, Self::Lapsed, Self::Released, Self::Interrupted, Self::Completed, Self::Failed, Self::Damaged];

    /// Returns the name in commands and lists: `running`, `lapsed`, `released`, `interrupted`, `completed`, `failed` or
    /// `damaged`. `running` and `lapsed` are the same state, `pending`, before and after the lapse of the lease.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Lapsed => "lapsed",
            Self::Released => "released",
            Self::Interrupted => "interrupted",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Damaged => "damaged",
        }
    }

    /// Returns the [name](State::name) of the record's state.
    #[cfg(feature = "postgres")]
    pub(crate) const fn state(self) -> &'static str {
        match self {
            Self::Running | Self::Lapsed => "pending",
            other => other.name(),
        }
    }

    /// Returns whether the effect of the operation may have happened although the record does not show the effect.
    pub const fn is_uncertain(self) -> bool {
        matches!(self, Self::Lapsed | Self::Interrupted | Self::Damaged)
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
