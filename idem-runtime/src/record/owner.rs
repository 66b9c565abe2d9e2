//! The random identity of an attempt.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Random identity of one attempt; every later write to the record must present it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwnerToken([u8; Self::BYTES]);

impl OwnerToken {
    /// Length of a token, in bytes.
    pub const BYTES: usize = 16;

    /// Makes a token from its bytes.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Bytes of the token.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// Returns the token of the record that a decision about this token's record makes. No attempt has the new token,
    /// so the earlier attempt can't write any more.
    pub(super) fn succeeded(self) -> Self {
        Self(u128::from_be_bytes(self.0).wrapping_add(Self::DECISION).to_be_bytes())
    }

    /// Returns the token that this token [succeeded](Self::succeeded), if a decision made this one.
    pub(super) fn preceded(self) -> Self {
        Self(u128::from_be_bytes(self.0).wrapping_sub(Self::DECISION).to_be_bytes())
    }

    /// Returns whether this is the token `attempt`, or a token that decisions about that attempt have made.
    pub(super) fn is_after(self, attempt: Self) -> bool {
        // The product is the number of decisions in between: the step is odd, so it has an inverse.
        let apart = u128::from_be_bytes(self.0).wrapping_sub(u128::from_be_bytes(attempt.0));
        apart.wrapping_mul(Self::DECISION_INVERSE) <= u128::from(u32::MAX)
    }

    const DECISION: u128 = 0x517c_c1b7_2722_0a94_fe13_abe8_fa9a_6ee1;
    const DECISION_INVERSE: u128 = 0x478a_f0a0_204e_8eda_08ca_6a7f_6727_5521;

    /// First half of the token. It identifies a record, but does not permit to write it.
    pub(super) fn tag(self) -> [u8; 8] {
        let [tag @ .., _, _, _, _, _, _, _, _] = self.0;
        tag
    }

    /// Seed for the pauses of an attempt, which should differ between attempts.
    pub(crate) fn seed(&self) -> u64 {
        self.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

/// Shows only the first half: a token in a log must not permit to write the record.
impl fmt::Debug for OwnerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tag().iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("…")
    }
}

/// Makes a unique token for every attempt of one process, for records that no other process sees.
///
/// The tokens are a Weyl sequence from a random start, and unique within the handle. The probability that two handles
/// make the same token is the number of tokens divided by 2^128. After `fork()`, and in copies of a virtual machine,
/// the sequence repeats. Records that other processes see need randomness for each attempt
/// ([`StoreContext::new`](crate::store::StoreContext::new)).
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
        // The golden ratio of 2^128, odd: its multiples are distinct and differ in many bits.
        const STEP: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        let n = u128::from(self.next.fetch_add(1, Ordering::Relaxed));
        OwnerToken(self.start.wrapping_add(n.wrapping_mul(STEP)).to_be_bytes())
    }
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

    #[test]
    fn a_token_is_after_those_that_it_succeeded_and_no_other() {
        let first = OwnerToken::from_bytes([0xff; 16]);
        let second = first.succeeded();
        assert!(first.is_after(first) && second.is_after(first) && second.succeeded().is_after(first));
        assert!(!first.is_after(second) && !OwnerToken::from_bytes([7; 16]).is_after(first));
        assert_eq!(second.preceded(), first);
        assert_ne!(second.tag(), first.tag());
    }
}
