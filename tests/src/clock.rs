//! Clocks of tests that differ from the machine's clock and from one that only a test advances.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use idem_runtime::clock::{Clock, Instant, Sleep, SystemClock, Task};

/// Another clock, with the differences that a test sets.
#[derive(Clone, Debug)]
pub struct OddClock {
    inner: Arc<dyn Clock>,
    /// Reading of the wall clock, in milliseconds since 1970.
    wall: Option<Arc<AtomicI64>>,
    /// Lead of the wall clock, in milliseconds.
    ahead: i64,
    /// Factor by which the clock runs slower.
    slowness: u32,
    entropy: Option<u128>,
    tasks: Option<SystemClock>,
}

impl OddClock {
    /// Returns a clock equal to `inner`.
    pub fn new(inner: impl Clock) -> Self {
        Self { inner: Arc::new(inner), wall: None, ahead: 0, slowness: 1, entropy: None, tasks: None }
    }

    /// Returns the machine's clock with a wall clock that stands still at `millis` since 1970.
    pub fn at(millis: i64) -> Self {
        Self { wall: Some(Arc::new(AtomicI64::new(millis))), ..Self::new(SystemClock::default()) }
    }

    /// Returns the machine's clock with a wall clock that is `millis` ahead.
    pub fn ahead_by(millis: i64) -> Self {
        Self { ahead: millis, ..Self::new(SystemClock::default()) }
    }

    /// Sets the wall clock of this clock and its clones.
    pub fn set_wall(&self, millis: i64) {
        self.wall.as_ref().expect("a clock made by `at`").store(millis, Ordering::SeqCst);
    }

    /// Makes the clock run at half speed.
    #[must_use]
    pub fn half_speed(self) -> Self {
        Self { slowness: 2, ..self }
    }

    /// Makes each random number the same.
    #[must_use]
    pub fn without_chance(self) -> Self {
        Self { entropy: Some(7), ..self }
    }

    /// Runs tasks on the library's own thread, as the machine's clock does.
    #[must_use]
    pub fn tasks_on_their_own_thread(self) -> Self {
        Self { tasks: Some(SystemClock::default()), ..self }
    }
}

impl Clock for OddClock {
    fn now(&self) -> Instant {
        Instant::new(self.inner.now().since_origin() / self.slowness)
    }

    fn wall(&self) -> Duration {
        match &self.wall {
            Some(millis) => Duration::from_millis(millis.load(Ordering::SeqCst).unsigned_abs()),
            None => {
                let (wall, by) = (self.inner.wall(), Duration::from_millis(self.ahead.unsigned_abs()));
                if self.ahead < 0 { wall.saturating_sub(by) } else { wall.saturating_add(by) }
            }
        }
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        self.inner.sleep(duration.saturating_mul(self.slowness))
    }

    fn entropy(&self) -> u128 {
        self.entropy.unwrap_or_else(|| self.inner.entropy())
    }

    fn spawn(&self, task: Task) {
        match &self.tasks {
            Some(clock) => clock.spawn(task),
            None => self.inner.spawn(task),
        }
    }
}
