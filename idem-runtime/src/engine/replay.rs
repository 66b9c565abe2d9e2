//! A record whose result is returned.

use std::time::Duration;

use crate::key::Key;
use crate::policy::{Backoff, OnUndecodable};
use crate::record::{Provenance, State};

/// A record whose result is returned.
pub(super) struct Replay {
    pub(super) key: Key,
    pub(super) store: &'static str,
    /// State of the record, which holds the result. Only the parts that a replay needs are kept, because each call
    /// carries their size along.
    pub(super) state: State,
    /// Number of the attempt that ended.
    pub(super) attempt: u32,
    /// Seed for the pauses of that attempt.
    pub(super) seed: u64,
    pub(super) provenance: Provenance,
    /// Age of the record, if the store reports it.
    pub(super) age: Option<Duration>,
    /// Time for which the policy of the call keeps a result.
    pub(super) ttl: Duration,
    pub(super) backoff: Backoff,
    pub(super) on_undecodable: OnUndecodable,
}

impl Replay {
    /// Returns the pause before a message is delivered again if its delivery fails after this replay. The pause is as
    /// long as the record is old, so that it doubles each time.
    pub(super) fn pause(&self) -> Duration {
        self.backoff.during(self.age.unwrap_or_default(), self.seed)
    }
}
