//! Random choices of a simulation, all from one seed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_runtime::testing::Random;

/// Dice that all parts of a world share. The seed also decides the order in which they are thrown.
#[derive(Clone, Debug)]
pub(crate) struct Dice(Arc<Mutex<Random>>);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Random::seeded(seed))))
    }

    /// Returns a number from `from` to `to`, both included.
    pub(crate) fn between(&self, from: u64, to: u64) -> u64 {
        from + self.0.lock().unwrap().below(to - from + 1)
    }

    pub(crate) fn pick<T: Copy>(&self, from: &[T]) -> T {
        from[usize::try_from(self.between(0, from.len() as u64 - 1)).expect("less than `len`")]
    }

    /// Returns true with a probability of `permille` thousandths.
    pub(crate) fn chance(&self, permille: u64) -> bool {
        self.between(1, 1000) <= permille
    }

    /// Returns a random duration in whole milliseconds, at most `longest`.
    pub(crate) fn up_to(&self, longest: Duration) -> Duration {
        Duration::from_millis(self.between(0, u64::try_from(longest.as_millis()).unwrap_or(u64::MAX)))
    }
}
