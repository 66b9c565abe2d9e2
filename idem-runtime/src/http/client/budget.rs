//! The share of retries among all requests.

use crate::clock::Instant;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The share of retries among the requests of a layer and its clones, so that retries do not multiply the load
/// of an outage.
///
/// The budget is a bucket of tokens, full at the start. Each request with a key adds a part of a token, each second
/// adds one token, and each retry takes one token out. Without a token there is no retry, and the caller gets the last
/// answer. So `n` requests in `t` seconds make at most `n × percent / 100 + t + reserve` retries.
///
/// ```
/// use idem_runtime::http::client::{RetryBudget, RetryLayer};
///
/// let layer = RetryLayer::new().budget(RetryBudget::new(10, 50));
/// # drop(layer);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetryBudget {
    percent: u32,
    reserve: u32,
}

impl RetryBudget {
    /// Retries for 20 % of the requests, and a reserve of 100.
    pub const DEFAULT: Self = Self::new(20, 100);

    /// Allows retries for `percent` of the requests. `reserve` is the largest number of tokens in the bucket: the
    /// number of retries that a client can make after a quiet time, or in the first moments of an outage. A reserve of
    /// 0 allows no retry.
    pub const fn new(percent: u32, reserve: u32) -> Self {
        Self { percent, reserve }
    }

    /// Allows every retry. [`RetryLayer::max_tries`](super::RetryLayer::max_tries) then is the only bound.
    pub const fn unlimited() -> Self {
        Self { percent: 0, reserve: u32::MAX }
    }
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Number of units in a token. A bucket gains one unit each millisecond.
const TOKEN: u64 = 1000;

/// The tokens of a [`RetryBudget`]. Atomics hold the tokens, because a forked child could wait forever for a lock.
#[derive(Debug)]
pub(super) struct TokenBucket {
    budget: RetryBudget,
    units: AtomicU64,
    /// Time up to which the bucket has gained units, in milliseconds since the origin of the clock.
    gained_until: AtomicU64,
}

impl TokenBucket {
    pub(super) fn new(budget: RetryBudget) -> Self {
        let units = AtomicU64::new(u64::from(budget.reserve) * TOKEN);
        Self { budget, units, gained_until: AtomicU64::new(0) }
    }

    /// Adds the part of a token for one request.
    pub(super) fn deposit(&self, now: Instant) {
        self.gain(now);
        self.add(u64::from(self.budget.percent) * TOKEN / 100);
    }

    /// Takes a token out. Returns false if the bucket has no whole token.
    pub(super) fn withdraw(&self, now: Instant) -> bool {
        if self.budget == RetryBudget::unlimited() {
            return true;
        }
        self.gain(now);
        self.units.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |units| units.checked_sub(TOKEN)).is_ok()
    }

    /// Adds the units for the time that has passed. If two threads call this function at the same time, only the thread
    /// that moves `gained_until` adds units.
    fn gain(&self, now: Instant) {
        let now = u64::try_from(now.since_origin().as_millis()).unwrap_or(u64::MAX);
        let before = self.gained_until.fetch_max(now, Ordering::Relaxed);
        self.add(now.saturating_sub(before));
    }

    fn add(&self, more: u64) {
        let most = u64::from(self.budget.reserve) * TOKEN;
        let add = |units: u64| Some(units.saturating_add(more).min(most));
        let added = self.units.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        debug_assert!(added.is_ok(), "`add` returns a number for each");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::new(Duration::from_millis(millis))
    }

    /// Takes out all tokens that the bucket has at the time `millis`, and returns their number.
    fn drain(bucket: &TokenBucket, millis: u64) -> u32 {
        let mut count = 0;
        while bucket.withdraw(at(millis)) {
            count += 1;
        }
        count
    }

    #[test]
    fn a_bucket_starts_full_and_holds_no_more_than_its_reserve() {
        let bucket = TokenBucket::new(RetryBudget::new(20, 3));
        bucket.deposit(at(1_000_000));
        assert_eq!(drain(&bucket, 1_000_000), 3);
        // After an hour without requests, the bucket still has only its reserve.
        assert_eq!(drain(&bucket, 4_600_000), 3);
    }

    #[test]
    fn each_request_adds_a_part_of_a_token() {
        let bucket = TokenBucket::new(RetryBudget::new(20, 100));
        assert_eq!(drain(&bucket, 0), 100);
        for _ in 0..99 {
            bucket.deposit(at(0));
        }
        assert_eq!(drain(&bucket, 0), 19, "a fifth of 99, rounded down");
        bucket.deposit(at(0));
        assert_eq!(drain(&bucket, 0), 1, "nothing is lost by rounding");
    }

    #[test]
    fn each_second_adds_a_token() {
        let bucket = TokenBucket::new(RetryBudget::new(0, 10));
        assert_eq!(drain(&bucket, 500), 10);
        assert_eq!(drain(&bucket, 1_499), 0);
        assert_eq!(drain(&bucket, 1_500), 1);
        assert_eq!(drain(&bucket, 4_500), 3);
        // A clock that goes back adds no tokens, neither at the step back nor until it has caught up.
        assert_eq!((drain(&bucket, 1_000), drain(&bucket, 4_500)), (0, 0));
    }

    #[test]
    fn budgets_of_zero_and_of_the_largest_numbers_do_not_overflow() {
        assert_eq!(drain(&TokenBucket::new(RetryBudget::new(100, 0)), 5_000), 0);
        let most = TokenBucket::new(RetryBudget::new(u32::MAX, u32::MAX));
        most.deposit(Instant::new(Duration::MAX));
        assert!(most.withdraw(at(0)));
        let bucket = TokenBucket::new(RetryBudget::unlimited());
        assert!((0..1000).all(|_| bucket.withdraw(at(0))));
    }
}
