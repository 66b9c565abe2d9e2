//! Pause before a message is delivered again.

use std::time::Duration;

use crate::clock::SplitMix;

/// Pause before a message is delivered again, if no better time is known. The end of a lease, for example, is a better
/// time.
///
/// The pause doubles with each attempt, from `first` to `longest`. A random cut of up to half of the pause keeps
/// messages that failed together from returning together ("equal jitter": Brooker, "Exponential Backoff And Jitter",
/// 2015).
///
/// ```
/// use std::time::Duration;
/// use idem_runtime::policy::Backoff;
///
/// let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// let after = backoff.after(3, 0x5eed);
/// assert!((Duration::from_secs(2)..=Duration::from_secs(4)).contains(&after));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backoff {
    /// First pause, in milliseconds.
    first: u32,
    /// Longest pause, in milliseconds.
    longest: u32,
}

impl Backoff {
    /// Default backoff: from 1 s to 5 min.
    pub const DEFAULT: Self = Self::new(Duration::from_secs(1), Duration::from_secs(300));

    /// Creates a backoff whose pause is `first` after the first attempt, and at most `longest` after later attempts.
    /// Pauses are rounded to milliseconds, and range from 1 ms to 49 days.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        let first = Self::millis(first);
        let longest = Self::millis(longest);
        Self { first, longest: if longest < first { first } else { longest } }
    }

    const fn millis(duration: Duration) -> u32 {
        let millis = duration.as_millis();
        if millis == 0 {
            1
        } else if millis > u32::MAX as u128 {
            u32::MAX
        } else {
            #[expect(clippy::cast_possible_truncation, reason = "compared just now")]
            {
                millis as u32
            }
        }
    }

    /// Returns the pause after attempt `attempt` (from 1). `seed` selects the random cut of the pause.
    pub fn after(self, attempt: u32, seed: u64) -> Duration {
        self.spread(u64::from(self.first) << attempt.saturating_sub(1).min(31), seed)
    }

    /// Returns the pause while a store does not answer: about as long as the `outage` has lasted.
    pub(crate) fn during(self, outage: Duration, seed: u64) -> Duration {
        self.spread(u64::from(Self::millis(outage)).saturating_mul(2).max(self.first.into()), seed)
    }

    /// Returns the pause before the next delivery of a duplicate; the current delivery has the `number` (from 1).
    /// Another attempt holds the key, with a lease that lapses in `lapses_in`. After its first delivery, the duplicate
    /// comes back when that lease lapses, because the attempt may have crashed. A later delivery has found that the
    /// lease was renewed, so the duplicate comes back after a multiple of `lease`.
    pub(crate) fn beyond(self, lapses_in: Duration, lease: Duration, number: u32, seed: u64) -> Duration {
        match number.checked_sub(2) {
            None => lapses_in,
            Some(doublings) => {
                let more = u64::from(Self::millis(lease)) << doublings.min(31);
                lapses_in.max(self.spread(more.saturating_add(lapses_in.as_millis().try_into().unwrap_or(0)), seed))
            }
        }
    }

    fn spread(self, millis: u64, seed: u64) -> Duration {
        let pause = millis.min(u64::from(self.longest));
        let half = pause / 2;
        let spread = pause - half + 1;
        Duration::from_millis((half + SplitMix(seed).next() % spread).max(1))
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::DEFAULT
    }
}
