//! The lease of an attempt.

use std::time::Duration;

use super::owner::OwnerToken;
use super::{Provenance, Record, ReserveRequest};
use crate::key::{Fingerprint, Key};
use crate::policy::OnCrash;

/// Reservation of an attempt, which the attempt presents with every later write.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Lease {
    /// Key that is reserved.
    pub key: Key,
    /// Identity of the attempt.
    pub owner: OwnerToken,
    /// Number of the attempt: the fencing token. Starts at 1 for each key.
    pub attempt: u32,
    /// Number of attempts, including this one, that count against `max_attempts`.
    pub attempts_used: u32,
    /// Time that the reservation is honoured without a renewal.
    pub duration: Duration,
    /// Retention of the record after its last write; while the record is pending, counted from the end of its lease.
    pub ttl: Duration,
    /// Effect of a lapsed lease.
    pub on_crash: OnCrash,
    /// Fingerprint in the record.
    pub fingerprint: Option<Fingerprint>,
    /// Further information in the record, for people.
    pub provenance: Provenance,
    /// Time of the reservation, in milliseconds since 1970 by the wall clock of this process. Only a store sets it
    /// whose record stays exactly the bytes that the reservation wrote, as long as no other write follows.
    pub(crate) reserved_at: ReservedAt,
}

/// Time when a lease was reserved, if the store records it. Comparisons ignore the time: a lease with the time equals
/// the same lease without it. The six bytes, big-endian, fit into space that a lease had left.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct ReservedAt(
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "no other store sets it"))] [u8; 6],
);

#[cfg(feature = "redis")]
impl ReservedAt {
    pub(crate) fn new(millis: u64) -> Self {
        let [_, _, millis @ ..] = millis.to_be_bytes();
        Self(millis)
    }

    pub(crate) fn millis(self) -> Option<u64> {
        let mut millis = [0; 8];
        millis[2..].copy_from_slice(&self.0);
        Some(u64::from_be_bytes(millis)).filter(|millis| *millis > 0)
    }
}

impl PartialEq for ReservedAt {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ReservedAt {}

impl Lease {
    /// Makes the lease of attempt number `attempt` that `request` asked for, as the first attempt that counts against
    /// `max_attempts`.
    pub fn new(request: &ReserveRequest, attempt: u32) -> Self {
        Record { attempt, ..Record::first(request) }.lease(request)
    }

    /// Returns the lease to release if the answer to `request` never arrives.
    pub(crate) fn unanswered(request: &ReserveRequest) -> Self {
        Record::first(request).lease(request)
    }
}
