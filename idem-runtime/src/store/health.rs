//! Health of a store, for readiness probes.

use std::fmt;
use std::time::Duration;

use super::{Store, StoreError, StoreErrorKind};
use crate::metrics::StoreOp;

/// Result of [`StoreExt::health`](super::StoreExt::health).
#[derive(Debug)]
#[non_exhaustive]
pub struct Health {
    /// Name of the store.
    pub store: &'static str,
    /// Time that the ping of the store took.
    pub took: Duration,
    /// Number of leases that this process keeps alive.
    pub leases: usize,
    /// Time for which each operation of a call has been slow; `None` if the latest operations were fast. A slow store
    /// is no [problem](Self::problems): calls still succeed. If slowness were a problem, a slow store would make all
    /// processes unready together.
    pub slow_for: Option<Duration>,
    /// Longest time by which the renewal of a lease is overdue; zero if no renewal is overdue.
    pub beat_lag: Duration,
    /// Problems of the store; empty if the store can serve calls.
    pub problems: Vec<HealthProblem>,
}

/// Reason why the store can't serve calls or keep leases alive.
#[derive(Debug)]
#[non_exhaustive]
pub enum HealthProblem {
    /// The store did not answer, or is full.
    Unreachable(StoreError),
    /// The store answers but can't be used: its schema or version is wrong, or rights are missing.
    Misconfigured(StoreError),
    /// The store answers a ping, but an operation of a call failed within the last 30 s, and no operation of the same
    /// kind has succeeded since.
    #[non_exhaustive]
    CallsFail {
        /// Error of the latest of these failures.
        error: StoreError,
        /// Time since the latest of these failures.
        ago: Duration,
    },
    /// No task renews the leases of this process: the runtime of the renewal task has ended.
    NoHeartbeat,
    /// The renewal of a lease is overdue by more than a beat.
    #[non_exhaustive]
    BeatsLate {
        /// Time by which the renewal is overdue.
        lag: Duration,
    },
}

impl HealthProblem {
    /// Returns the name of the problem for labels: `store`, `schema`, `calls`, `heartbeat` or `beat_lag`.
    pub const fn axis(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "store",
            Self::Misconfigured(_) => "schema",
            Self::CallsFail { .. } => "calls",
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
            Self::CallsFail { error, ago } => {
                write!(f, "operations of calls fail, the last one {ago:.1?} ago: {error}")
            }
            Self::NoHeartbeat => f.write_str("leases are held, and nothing renews them"),
            Self::BeatsLate { lag } => write!(f, "a lease is due for renewal since {lag:.1?}"),
        }
    }
}

impl Health {
    /// Returns whether the store can serve calls.
    pub fn is_ready(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Writes one line: `redis: ready`, or the list of problems.
impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.store)?;
        if self.is_ready() {
            write!(f, "ready, {} leases held", self.leases)?;
            return self.slow_for.map_or(Ok(()), |time| write!(f, ", and slow for {time:.1?}"));
        }
        for (at, problem) in self.problems.iter().enumerate() {
            write!(f, "{}{problem}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

pub(super) async fn check<S: Store + ?Sized>(store: &S) -> Health {
    let context = store.context();
    let asked_at = context.clock().now();
    let mut problems = Vec::new();
    if let Err(error) = store.ping().watched(store, StoreOp::Ping).await {
        problems.push(match error.kind() {
            StoreErrorKind::Misconfigured => HealthProblem::Misconfigured(error),
            _ => HealthProblem::Unreachable(error),
        });
    }
    let now = context.clock().now();
    // If the ping failed, its error already reports the outage.
    if let Some((error, ago)) = context.outage().failing_calls(now).filter(|_| problems.is_empty()) {
        problems.push(HealthProblem::CallsFail { error, ago });
    }
    let beating = context.renewal_states(now);
    if beating.leases > 0 && !beating.is_running {
        problems.push(HealthProblem::NoHeartbeat);
    } else if beating.is_late {
        problems.push(HealthProblem::BeatsLate { lag: beating.lag });
    }
    Health {
        store: store.context().name(),
        took: now.saturating_since(asked_at),
        leases: beating.leases,
        slow_for: context.slowness().lasts(now),
        beat_lag: beating.lag,
        problems,
    }
}
