//! Whether calls can be served, for readiness probes.

use std::fmt;
use std::time::Duration;

use super::{Store, StoreError, StoreErrorKind};
use crate::metrics::StoreOp;

/// What [`StoreExt::health`](super::StoreExt::health) found.
#[derive(Debug)]
#[non_exhaustive]
pub struct Health {
    /// Where the records are.
    pub store: &'static str,
    /// How long the store took to answer.
    pub took: Duration,
    /// How many leases this process keeps alive.
    pub leases: usize,
    /// By how much the latest renewal is overdue; zero if none is.
    pub beat_lag: Duration,
    /// What is wrong; empty if calls can be served.
    pub problems: Vec<HealthProblem>,
}

/// What keeps calls from being served.
#[derive(Debug)]
#[non_exhaustive]
pub enum HealthProblem {
    /// The store did not answer, or is full.
    Unreachable(StoreError),
    /// The store answers, and can't be used: its schema or version is another one, or rights are missing.
    Misconfigured(StoreError),
    /// Nothing renews the leases of this process: the runtime that did so is gone.
    NoHeartbeat,
    /// A lease should have been renewed by now, and a beat more has passed.
    #[non_exhaustive]
    BeatsLate {
        /// By how much it is overdue.
        lag: Duration,
    },
}

impl HealthProblem {
    /// A fixed name for it: `store`, `schema`, `heartbeat` or `beat_lag`.
    pub const fn axis(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "store",
            Self::Misconfigured(_) => "schema",
            Self::NoHeartbeat => "heartbeat",
            Self::BeatsLate { .. } => "beat_lag",
        }
    }
}

impl fmt::Display for HealthProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.axis())?;
        match self {
            Self::Unreachable(error) | Self::Misconfigured(error) => error.fmt(f),
            Self::NoHeartbeat => f.write_str("leases are held, and nothing renews them"),
            Self::BeatsLate { lag } => write!(f, "a lease is due for renewal since {lag:.1?}"),
        }
    }
}

impl Health {
    /// Whether calls can be served.
    pub fn is_ready(&self) -> bool {
        self.problems.is_empty()
    }
}

/// One line: `redis: ready`, or what is wrong.
impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.store)?;
        if self.is_ready() {
            return write!(f, "ready, {} leases held", self.leases);
        }
        for (at, problem) in self.problems.iter().enumerate() {
            write!(f, "{}{problem}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

pub(super) async fn check<S: Store + ?Sized>(store: &S) -> Health {
    let heartbeats = store.heartbeats();
    let asked_at = heartbeats.clock().now();
    let mut problems = Vec::new();
    if let Err(error) = store.ping().watched(store, StoreOp::Ping).await {
        problems.push(match error.kind() {
            StoreErrorKind::Misconfigured => HealthProblem::Misconfigured(error),
            _ => HealthProblem::Unreachable(error),
        });
    }
    let now = heartbeats.clock().now();
    let beating = heartbeats.beating(now);
    if beating.leases > 0 && !beating.is_running {
        problems.push(HealthProblem::NoHeartbeat);
    } else if beating.is_late {
        problems.push(HealthProblem::BeatsLate { lag: beating.lag });
    }
    Health {
        store: store.name(),
        took: now.saturating_since(asked_at),
        leases: beating.leases,
        beat_lag: beating.lag,
        problems,
    }
}
