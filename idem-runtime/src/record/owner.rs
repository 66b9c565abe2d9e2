//! Owner tokens: the random identities of attempts.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Random identity of one attempt. Every later write to the record must present the token.
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

    /// Returns the successor of this token, for the record that a decision makes. No attempt has this successor as its
    /// token, so the attempt with the earlier token can't write any more.
    pub(super) fn succeeded(self) -> Self {
        Self(u128::from_be_bytes(self.0).wrapping_add(Self::DECISION).to_be_bytes())
    }

    /// Returns the token of which this token is the [successor](Self::succeeded).
    pub(super) fn preceded(self) -> Self {
        Self(u128::from_be_bytes(self.0).wrapping_sub(Self::DECISION).to_be_bytes())
    }

    /// Returns whether this token is `attempt`, or was made from `attempt` by decisions.
    pub(super) fn is_after(self, attempt: Self) -> bool {
        // The product is the number of decisions between the two tokens: `DECISION` is odd, so it has an inverse modulo
        // 2^128.
        let apart = u128::from_be_bytes(self.0).wrapping_sub(u128::from_be_bytes(attempt.0));
        apart.wrapping_mul(Self::DECISION_INVERSE) <= u128::from(u32::MAX)
    }

    const DECISION: u128 = 0x517c_c1b7_2722_0a94_fe13_abe8_fa9a_6ee1;
    const DECISION_INVERSE: u128 = 0x478a_f0a0_204e_8eda_08ca_6a7f_6727_5521;

    /// Returns the first half of the token. This half identifies a record, but does not permit a write.
    pub(crate) fn tag(self) -> [u8; 8] {
        let [tag @ .., _, _, _, _, _, _, _, _] = self.0;
        tag
    }

    /// Returns a seed for the pauses of an attempt, so that different attempts have different pauses.
    pub(crate) fn seed(&self) -> u64 {
        self.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

/// Writes only the first half of the token: a token in a log must not permit a write to the record.
impl fmt::Debug for OwnerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tag().iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("…")
    }
}

/// Source of unique owner tokens in one process, for records that no other process sees.
///
/// The tokens are a Weyl sequence from a random start, and unique within one `Owners` value. The probability that two
/// `Owners` values make the same token is the number of tokens divided by 2^128. After a `fork()`, and in copies of a
/// virtual machine, the sequence repeats. So records that other processes see need random tokens
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
        // The step is 2^128 divided by the golden ratio, made odd: its multiples are distinct and differ in many bits.
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
    fn owner_tokens_never_repeat() {
        let owners = Owners::new(u128::MAX - 5);
        let tokens: HashSet<_> = (0..10_000).map(|_| owners.next()).collect();
        assert_eq!(tokens.len(), 10_000);
    }

    #[test]
    fn a_token_is_after_only_the_tokens_that_it_succeeded() {
        let first = OwnerToken::from_bytes([0xff; 16]);
        let second = first.succeeded();
        assert!(first.is_after(first) && second.is_after(first) && second.succeeded().is_after(first));
        assert!(!first.is_after(second) && !OwnerToken::from_bytes([7; 16]).is_after(first));
        assert_eq!(second.preceded(), first);
        assert_ne!(second.tag(), first.tag());
    }
}
