//! Leases of attempts.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use super::owner::OwnerToken;
use super::{Provenance, Record, ReserveRequest};
use crate::key::{Fingerprint, Key};
use crate::policy::OnCrash;

/// Right of an attempt to its key. The attempt presents its lease with every later write.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Lease {
    /// Reserved key.
    pub key: Key,
    /// Identity of the attempt.
    pub owner: OwnerToken,
    /// Number of the attempt: the fencing token. Starts at 1 for each key.
    pub attempt: u32,
    /// Number of attempts, including this one, that count against `max_attempts`.
    pub attempts_used: u32,
    /// Time for which the attempt holds the key without a renewal.
    pub duration: Duration,
    /// Retention of the record after its last write. While the record is pending, the retention begins when the lease
    /// lapses.
    pub ttl: Duration,
    /// Reaction to a crash of the attempt, after the lease has lapsed.
    pub on_crash: OnCrash,
    /// Fingerprint in the record, if the record has a fingerprint.
    pub fingerprint: Option<Fingerprint>,
    /// Information for people, in addition to the standing of the operation.
    pub provenance: Provenance,
    /// Number that the store set at the reservation, for its own use.
    pub mark: LeaseMark,
}

/// Number in a [`Lease`] that its store uses for its own purposes: up to 48 bits, 0 by default.
///
/// A store sets the mark in the lease that its `reserve` returns, and receives the mark with every later call for that
/// attempt. The engine sets the mark back to 0 if a write between the reservation and the start of the body has changed
/// the record. Comparisons ignore the mark: a lease with a mark equals the same lease without one.
///
/// ```
/// use idem_runtime::store::LeaseMark;
///
/// assert_eq!(LeaseMark::new(7).get().map(u64::from), Some(7));
/// assert_eq!(LeaseMark::default().get(), None);
/// ```
// Six bytes fit into the padding of a `Lease`, so the mark does not enlarge a lease.
#[derive(Clone, Copy, Default)]
pub struct LeaseMark([u8; 6]);

impl LeaseMark {
    /// Creates a mark of the lower 48 bits of `number`.
    pub const fn new(number: u64) -> Self {
        let [_, _, lower @ ..] = number.to_be_bytes();
        Self(lower)
    }

    /// Returns the number, or `None` if it is 0.
    pub fn get(self) -> Option<NonZeroU64> {
        let mut number = [0; 8];
        number[2..].copy_from_slice(&self.0);
        NonZeroU64::new(u64::from_be_bytes(number))
    }
}

impl fmt::Debug for LeaseMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LeaseMark").field(&self.get().map_or(0, NonZeroU64::get)).finish()
    }
}

impl PartialEq for LeaseMark {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for LeaseMark {}

impl Lease {
    /// Makes the lease of attempt number `attempt` for `request`, as the first attempt that counts against
    /// `max_attempts`.
    pub fn new(request: &ReserveRequest, attempt: u32) -> Self {
        Record { attempt, ..Record::first(request) }.lease(request)
    }

    /// Returns the lease that the engine releases if the answer to `request` never arrives.
    pub(crate) fn unanswered(request: &ReserveRequest) -> Self {
        Record::first(request).lease(request)
    }
}
