//! Clock whose time stands still until a test moves it.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Duration;

use super::random::SplitMix;
use super::{Clock, Instant, Sleep, Task, upkeep};
use crate::sync;

/// A clock for tests, whose time stands still until the test moves it.
///
/// ```
/// # use std::time::Duration;
/// # use idem_runtime::MemoryStore;
/// # use idem_runtime::clock::{Clock, ManualClock};
/// let clock = ManualClock::new();
/// let store = MemoryStore::options().clock(clock.clone()).build();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(31)); // Every lease of 30 s has lapsed.
/// assert_eq!(clock.now().saturating_since(before).as_secs(), 31);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    state: Arc<Mutex<Manual>>,
}

#[derive(Debug, Default)]
struct Manual {
    now: Duration,
    /// Time since 1970 that the wall clock shows at the origin of this clock.
    wall: Duration,
    random: SplitMix,
    sleepers: Vec<(Duration, Waker)>,
}

impl ManualClock {
    /// Creates a clock at its origin.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a clock whose entropy comes from `seed`, for runs that must repeat exactly.
    pub fn seeded(seed: u64) -> Self {
        let clock = Self::default();
        clock.lock().random = SplitMix(seed);
        clock
    }

    /// Moves time forward by `duration`, and wakes every sleeper that is due.
    pub fn advance(&self, duration: Duration) {
        let due = {
            let mut state = self.lock();
            state.now = state.now.saturating_add(duration);
            let now = state.now;
            let (due, rest) = state.sleepers.drain(..).partition::<Vec<_>, _>(|(at, _)| *at <= now);
            state.sleepers = rest;
            due
        };
        for (_, waker) in due {
            waker.wake();
        }
    }

    /// Sets only the wall clock: leases and retentions of stores that use the wall clock end earlier or later, and no
    /// sleeper wakes. The wall clock starts at 1970 and moves with [`advance`](ManualClock::advance).
    pub fn set_wall(&self, since_1970: Duration) {
        let mut state = self.lock();
        state.wall = since_1970.saturating_sub(state.now);
    }

    /// Returns the time until the earliest sleeper is due; `None` if there is no sleeper.
    pub fn next_wake(&self) -> Option<Duration> {
        let state = self.lock();
        state.sleepers.iter().map(|(at, _)| at.saturating_sub(state.now)).min()
    }

    fn lock(&self) -> MutexGuard<'_, Manual> {
        sync::lock(&self.state)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        Instant::new(self.lock().now)
    }

    fn wall(&self) -> Duration {
        let state = self.lock();
        state.wall.saturating_add(state.now)
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        let until = self.lock().now.saturating_add(duration);
        let clock = self.clone();
        Box::pin(poll_fn(move |cx| {
            let mut state = clock.lock();
            if state.now >= until {
                return Poll::Ready(());
            }
            if !state.sleepers.iter().any(|(at, waker)| *at == until && waker.will_wake(cx.waker())) {
                state.sleepers.push((until, cx.waker().clone()));
            }
            Poll::Pending
        }))
    }

    fn entropy(&self) -> u128 {
        self.lock().random.bits()
    }

    fn spawn(&self, task: Task) {
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(task)),
            Err(_) => upkeep::spawn(task),
        }
    }
}
