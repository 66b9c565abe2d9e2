//! Clocks: the only reader of time and the only source of randomness in the library.

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

/// A point in the time of a [`Clock`]: the time since the origin of this clock.
///
/// Instants of two clocks, and so of two machines, can't be compared. The library sends durations, never instants, to
/// other processes.
///
/// An instant is counted in nanoseconds. The last possible instant is 584 years after the origin.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// Creates the instant `since_origin` after the clock's origin, or the last possible instant if `since_origin` is
    /// too long.
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

    /// Returns the time from `earlier` to `self`; zero if `earlier` is the later instant.
    #[inline]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the instant `duration` after this instant, or the last possible instant if `duration` is too long.
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

/// Returns the nanoseconds of `duration`, or the largest number if the duration is too long.
#[inline]
pub(crate) const fn as_nanos(duration: Duration) -> u64 {
    duration.as_secs().saturating_mul(1_000_000_000).saturating_add(duration.subsec_nanos() as u64)
}

/// A future that is ready after a time on a [`Clock`].
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Source of the library's time and randomness.
///
/// [`SystemClock`] is the real source. Tests pass [`ManualClock`] to a store, and move its time past the end of a lease
/// or a retention.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the present time, which never goes back.
    fn now(&self) -> Instant;

    /// Returns the time since 1970 by the wall clock, which all processes of a host share. The wall clock may be set,
    /// and the wall clocks of two hosts may differ.
    ///
    /// Decisions depend on the wall clock only in stores whose records are dated by the hosts that write them: SQLite
    /// and DynamoDB. `RedisStore` uses the wall clock only to report when an attempt began and how old a replayed
    /// record is.
    fn wall(&self) -> Duration;

    /// Returns a future that is ready once `duration` has passed.
    fn sleep(&self, duration: Duration) -> Sleep;

    /// Returns 128 random bits, for the owner token of an attempt or the first token of a store in memory.
    fn entropy(&self) -> u128;

    /// Runs `task`, which no caller awaits: a renewal, or a late write of a call that was dropped.
    ///
    /// [`SystemClock`] runs the task on a thread of the library. A test clock runs the task on the runtime of the test,
    /// so that the test decides the order of events.
    fn spawn(&self, task: Task);

    /// Returns whether a test has paused or moved the time of the current runtime (default: `false`, for a clock that
    /// does not use that time). A lease that a thread or a server counts in real time can't be renewed in a runtime
    /// whose time a test has moved.
    fn is_moved(&self) -> bool {
        false
    }
}

/// Task for [`Clock::spawn`].
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Returns the milliseconds since 1970 by the wall clock.
#[cfg(any(feature = "dynamodb", feature = "sqlite", feature = "redis"))]
pub(crate) fn wall_millis(clock: &dyn Clock) -> i64 {
    i64::try_from(clock.wall().as_millis()).unwrap_or(i64::MAX)
}
