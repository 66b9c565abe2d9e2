//! The only reader of time and the only source of randomness.

mod manual;
mod random;
mod system;
mod upkeep;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

pub use self::manual::ManualClock;
pub(crate) use self::random::{Secret, SplitMix};
pub use self::system::SystemClock;

/// A point on a [`Clock`]: the time since an origin that only this clock knows.
///
/// Instants of two clocks, and so of two machines, can't be compared; only durations travel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Instant(Duration);

impl Instant {
    /// The point `since_origin` after the clock's origin.
    pub const fn new(since_origin: Duration) -> Self {
        Self(since_origin)
    }

    /// The time since the clock's origin.
    pub const fn since_origin(self) -> Duration {
        self.0
    }

    /// The time from `earlier` to `self`, zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The point `duration` later; the end of time if that overflows.
    #[must_use]
    pub const fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

/// A future that is ready when a [`Clock`] has moved on far enough.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The source of the library's time and randomness.
///
/// [`SystemClock`] is the real one. Tests pass [`ManualClock`] to a store and drive leases and retentions by hand.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The present. Never goes back.
    fn now(&self) -> Instant;

    /// The time since 1970 by the wall clock, which all processes of a host share. It may be set, and two hosts disagree.
    ///
    /// Only stores whose records are dated by the hosts that write them depend on it: SQLite and DynamoDB. Redis notes by it
    /// when an attempt began, and tells by it how old a record is that is replayed.
    fn wall(&self) -> Duration;

    /// A future that is ready once `duration` has passed.
    fn sleep(&self, duration: Duration) -> Sleep;

    /// 128 random bits: the owner token of an attempt, or where the tokens of a store in this process start.
    fn entropy(&self) -> u128;

    /// Runs `task`, for which no caller waits: a renewal, or the late write of a call that was dropped.
    ///
    /// The real clock runs it on a thread of the library's own. A clock for tests runs it where the test runs, so that the
    /// test decides the order of events.
    fn spawn(&self, task: Task);

    /// Whether a test has paused or moved the time of the current runtime, by which this clock goes (default: `false`). Leases
    /// that a thread or a server measures in real time can't be renewed there.
    fn is_moved(&self) -> bool {
        false
    }
}

/// A task for [`Clock::spawn`].
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Milliseconds since 1970 by the wall clock.
#[cfg(any(feature = "dynamodb", feature = "sqlite", feature = "redis"))]
pub(crate) fn wall_millis(clock: &dyn Clock) -> i64 {
    i64::try_from(clock.wall().as_millis()).unwrap_or(i64::MAX)
}
