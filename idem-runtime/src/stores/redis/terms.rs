//! Settings that all connections of a store share.

use std::sync::Arc;
use std::time::Duration;

use super::scripts::Scripts;
use crate::clock::Clock;

/// Number of replicas that must confirm a write, and the time that the server waits for their confirmations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replicas {
    pub(super) count: usize,
    pub(super) within: Duration,
}

/// Settings of the exchanges with a server.
#[derive(Clone)]
pub(super) struct ExchangeTerms {
    pub(super) clock: Arc<dyn Clock>,
    /// Time limit of one exchange that waits for no replica.
    pub(super) timeout: Duration,
    /// The replicas that have to confirm a write; `None` if no replica has to.
    pub(super) replicas: Option<Replicas>,
    /// Channel on which ends of attempts are published.
    pub(super) channel: Arc<str>,
    pub(super) scripts: Arc<Scripts>,
    /// True if a command may name only one key, as in a cluster.
    pub(super) one_key: bool,
    /// True if the first server that was asked supports `SET … IFEQ`.
    pub(super) compares: bool,
}

impl ExchangeTerms {
    /// Returns the time limit of a write. An exchange that ends in `WAIT` may have to wait for an earlier exchange that
    /// also ends in `WAIT`.
    pub(super) fn write_timeout(&self) -> Duration {
        let waits = self.replicas.map_or(Duration::ZERO, |replicas| replicas.within.saturating_mul(2));
        self.timeout.saturating_add(waits)
    }
}
