//! Clocks that differ from the machine's clock by a set amount.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use idem_runtime::clock::{Clock, Instant, Sleep, SystemClock, Task};

/// Clock that reads another clock, and changes the readings in the way that a test has chosen.
#[derive(Clone, Debug)]
pub struct OddClock {
    inner: Arc<dyn Clock>,
    /// Fixed reading of the wall clock, in milliseconds since 1970.
    wall: Option<Arc<AtomicI64>>,
    /// Milliseconds by which the wall clock is ahead.
    ahead: i64,
    /// Factor by which the clock runs slower than the other clock.
    slowness: u32,
    entropy: Option<u128>,
    tasks: Option<SystemClock>,
}

impl OddClock {
    /// Returns a clock with the readings of `inner`.
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

    /// Makes the clock return the same number whenever it is asked for a random number.
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
