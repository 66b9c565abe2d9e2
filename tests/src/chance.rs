//! Random numbers from a seed.

use std::time::Duration;

/// Pseudo-random numbers from a seed (`SplitMix64`).
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// Returns the random numbers of `seed`.
    pub fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a new generator for the part `n` of a test. Each part gets different random numbers.
    #[must_use]
    pub fn of(&self, n: usize) -> Self {
        let mut other = Self(self.0 ^ (n as u64).wrapping_mul(0xd6e8_feb8_6659_fd93));
        other.next();
        other
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Random number below `n`. The limit `n` must not be zero.
    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).expect("below a `usize`")
    }

    /// Returns true with a probability of `times` percent.
    pub fn percent(&mut self, times: usize) -> bool {
        self.below(100) < times
    }

    /// Random duration, at most `longest`.
    pub fn up_to(&mut self, longest: Duration) -> Duration {
        let micros = usize::try_from(longest.as_micros()).expect("short");
        Duration::from_micros(self.below(micros + 1) as u64)
    }
}
