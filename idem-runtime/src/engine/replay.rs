//! Finished records whose results are returned to duplicates.

use std::time::Duration;

use crate::key::Key;
use crate::policy::{Backoff, OnUndecodable};
use crate::record::{Provenance, State};

/// A finished record whose result is returned to a duplicate.
pub(super) struct Replay {
    pub(super) key: Key,
    pub(super) store: &'static str,
    /// State of the record. The state holds the result. Other parts of the record are dropped, because each call
    /// carries the size of this value.
    pub(super) state: State,
    /// Number of the attempt that recorded the result.
    pub(super) attempt: u32,
    /// Seed for the pause after a failed delivery.
    pub(super) seed: u64,
    pub(super) provenance: Provenance,
    /// Age of the record, if the store reports it.
    pub(super) age: Option<Duration>,
    /// Retention of results in the policy of the call.
    pub(super) ttl: Duration,
    pub(super) backoff: Backoff,
    pub(super) on_undecodable: OnUndecodable,
}

impl Replay {
    /// Returns the pause before a message is delivered again if its delivery fails after this replay. The pause is
    /// about as long as the age of the record, so the pauses grow from delivery to delivery.
    pub(super) fn pause(&self) -> Duration {
        self.backoff.during(self.age.unwrap_or_default(), self.seed)
    }
}
