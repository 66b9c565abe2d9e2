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
///
/// Counted in nanoseconds; the last possible point is 584 years after the origin.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// Creates the point `since_origin` after the clock's origin; the last possible point if it is later than that.
    #[inline]
    pub const fn new(since_origin: Duration) -> Self {
        Self(as_nanos(since_origin))
    }

    /// Returns the time since the clock's origin.
    #[inline]
    pub const fn since_origin(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// Returns the nanoseconds since the clock's origin.
    pub(crate) const fn nanos(self) -> u64 {
        self.0
    }

    /// Returns the time from `earlier` to `self`, zero if `earlier` is later.
    #[inline]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the point `duration` later; the last possible point if that overflows.
    #[must_use]
    #[inline]
    pub const fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(as_nanos(duration)))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Instant").field(&self.since_origin()).finish()
    }
}

/// Returns the nanoseconds of `duration`; the largest number if there are more.
#[inline]
pub(crate) const fn as_nanos(duration: Duration) -> u64 {
    duration.as_secs().saturating_mul(1_000_000_000).saturating_add(duration.subsec_nanos() as u64)
}

/// A future that is ready when a [`Clock`] has moved on far enough.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The source of the library's time and randomness.
///
/// [`SystemClock`] is the real source. Tests pass [`ManualClock`] to a store and drive leases and retentions by hand.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the present time, which never goes back.
    fn now(&self) -> Instant;

    /// Returns the time since 1970 by the wall clock, which all processes of a host share. The wall clock may be set,
    /// and two hosts may disagree.
    ///
    /// Only stores whose records are dated by the hosts that write them depend on the wall clock: SQLite and DynamoDB.
    /// Redis uses it to note the beginning of an attempt, and to report the age of a replayed record.
    fn wall(&self) -> Duration;

    /// Returns a future that is ready once `duration` has passed.
    fn sleep(&self, duration: Duration) -> Sleep;

    /// Returns 128 random bits: the owner token of an attempt, or the start of the tokens of a store in this process.
    fn entropy(&self) -> u128;

    /// Runs `task`, for which no caller waits: a renewal, or the late write of a call that was dropped.
    ///
    /// The real clock runs the task on a thread of the library's own. A clock for tests runs the task where the test
    /// runs, so that the test decides the order of events.
    fn spawn(&self, task: Task);

    /// Returns whether a test has paused or moved the time of the current runtime, if this clock goes by that time
    /// (default: `false`). Leases that a thread or a server measures in real time can't be renewed there.
    fn is_moved(&self) -> bool {
        false
    }
}

/// A task for [`Clock::spawn`].
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Returns the milliseconds since 1970 by the wall clock.
#[cfg(any(feature = "dynamodb", feature = "sqlite", feature = "redis"))]
pub(crate) fn wall_millis(clock: &dyn Clock) -> i64 {
    i64::try_from(clock.wall().as_millis()).unwrap_or(i64::MAX)
}
