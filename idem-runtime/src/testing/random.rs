//! Pseudorandom numbers from a seed.

use crate::clock::SplitMix;

/// A generator of pseudorandom numbers: the same seed gives the same numbers.
///
/// ```
/// use idem_runtime::testing::Random;
///
/// let mut dice = Random::seeded(7);
/// let thrown: Vec<u64> = (0..5).map(|_| 1 + dice.below(6)).collect();
/// assert!(thrown.iter().all(|it| (1..=6).contains(it)));
/// ```
#[derive(Clone, Debug)]
pub struct Random(pub(super) SplitMix);

impl Random {
    /// Creates the generator with this `seed`.
    pub const fn seeded(seed: u64) -> Self {
        Self(SplitMix(seed))
    }

    /// Returns the next number below `limit`, or zero if `limit` is zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The high half of the product is as uniform as 64 random bits allow.
        u64::try_from((u128::from(self.0.next()) * u128::from(limit)) >> 64).unwrap_or_default()
    }

    /// Returns true with a probability of one half.
    pub fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}
