//! All chance of a simulation comes from one seed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Dice that are thrown by everybody in a world, in an order that the seed decides, too.
#[derive(Clone, Debug)]
pub(crate) struct Dice(Arc<Mutex<u64>>);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(seed)))
    }

    /// `SplitMix64` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
    pub(crate) fn throw(&self) -> u64 {
        let mut state = self.0.lock().unwrap();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from `from` up to and with `to`.
    pub(crate) fn between(&self, from: u64, to: u64) -> u64 {
        from + self.throw() % (to - from + 1)
    }

    pub(crate) fn index(&self, len: usize) -> usize {
        usize::try_from(self.between(0, len as u64 - 1)).expect("less than `len`")
    }

    pub(crate) fn pick<T: Copy>(&self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// Whether something happens that does so `permille` times out of a thousand.
    pub(crate) fn chance(&self, permille: u64) -> bool {
        self.between(1, 1000) <= permille
    }

    /// Whole milliseconds, up to and with `longest`.
    pub(crate) fn up_to(&self, longest: Duration) -> Duration {
        Duration::from_millis(self.between(0, u64::try_from(longest.as_millis()).unwrap_or(u64::MAX)))
    }
}
