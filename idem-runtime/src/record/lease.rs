//! Who holds a key, and for how long.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::key::{Fingerprint, Key};
use crate::policy::OnCrash;

/// The random identity of one attempt; every later write to the record must present it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwnerToken([u8; Self::BYTES]);

impl OwnerToken {
    /// The length of a token.
    pub const BYTES: usize = 16;

    /// The token with these bytes.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes of the token.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// A number that differs from attempt to attempt: where pauses are spread.
    pub(crate) fn seed(&self) -> u64 {
        self.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

/// Shows the first half only: a token in a log is no key to the record.
impl fmt::Debug for OwnerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("…")
    }
}

/// Gives every attempt of one process a token of its own, for records that no other process sees.
///
/// The tokens are a Weyl sequence from a random start: unique within the handle, and those of two handles meet with a
/// probability of their number divided by 2^128. After `fork()`, and in copies of a virtual machine, the sequence repeats;
/// records that others see need randomness for each attempt ([`Heartbeats::new`](crate::Heartbeats::new)).
#[derive(Debug)]
pub(crate) struct Owners {
    start: u128,
    next: AtomicU64,
}

impl Owners {
    pub(crate) fn new(entropy: u128) -> Self {
        Self { start: entropy, next: AtomicU64::new(1) }
    }

    pub(crate) fn next(&self) -> OwnerToken {
        // The golden ratio of 2^128, odd: multiples of it are distinct and differ in many bits.
        const STEP: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        let n = u128::from(self.next.fetch_add(1, Ordering::Relaxed));
        OwnerToken(self.start.wrapping_add(n.wrapping_mul(STEP)).to_be_bytes())
    }
}

/// What the winner of a reservation holds and presents with every later write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lease {
    /// The key that is reserved.
    pub key: Key,
    /// The identity of the attempt.
    pub owner: OwnerToken,
    /// The number of the attempt: the fencing token. Starts at 1 for each key.
    pub attempt: u32,
    /// How many attempts, this one included, count against `max_attempts`.
    pub attempts_used: u32,
    /// How long the reservation is honoured without a renewal.
    pub duration: Duration,
    /// How long the record is remembered after its last write, beyond the lease while it is pending.
    pub ttl: Duration,
    /// What the record does once the lease has lapsed.
    pub on_crash: OnCrash,
    /// The fingerprint the record carries.
    pub fingerprint: Option<Fingerprint>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn tokens_differ() {
        let owners = Owners::new(u128::MAX - 5);
        let tokens: HashSet<_> = (0..10_000).map(|_| owners.next()).collect();
        assert_eq!(tokens.len(), 10_000);
    }
}
