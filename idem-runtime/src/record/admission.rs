//! Effect of a reservation on the record that it finds, decided by a pure function that every store calls.

use std::time::Duration;

use super::{Lease, Record, Reservation, ReserveRequest, State, Verdict};
use crate::policy::OnCrash;

/// Effect of a reservation on the record that it found; see [`Record::admit`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Admission {
    /// The record stays unchanged, and the caller gets this answer.
    Answer(Reservation),
    /// The store may replace the record by `with`, but only if the stored record is still the one that was read.
    Replace {
        /// The pending record of the new attempt.
        with: Record,
        /// True if the new attempt takes over an attempt whose lease has lapsed.
        takeover: bool,
    },
}

impl Record {
    /// Decides the effect of `request` on this record. `lapses_in` is the time until the lease of a pending record
    /// lapses; zero if the lease has lapsed. The function is pure: every store calls it, and applies the returned
    /// effect atomically.
    pub fn admit(&self, request: &ReserveRequest, lapses_in: Duration) -> Admission {
        self.meet(request, lapses_in).unwrap_or_else(|| Admission::Answer(Reservation::finished(self.clone())))
    }

    /// Decides like [`admit`](Self::admit), but takes the record by value and so copies no result.
    #[cfg(any(feature = "memory", feature = "redis", feature = "sqlite"))]
    pub(crate) fn admit_owned(self, request: &ReserveRequest, lapses_in: Duration) -> Admission {
        self.meet(request, lapses_in).unwrap_or_else(|| Admission::Answer(Reservation::finished(self)))
    }

    /// Decides like [`admit`](Self::admit), but returns `None` if the record has finished and is itself the answer.
    pub(crate) fn meet(&self, request: &ReserveRequest, lapses_in: Duration) -> Option<Admission> {
        // Fingerprints are compared in every state: a replay or a takeover for another payload would be wrong.
        if let (Some(recorded), Some(presented)) = (self.fingerprint, request.fingerprint)
            && recorded.is_comparable(&presented)
            && recorded != presented
        {
            return Some(Admission::Answer(Reservation::FingerprintMismatch { attempt: self.attempt }));
        }
        let (on_crash, takeover) = match &self.state {
            State::Completed(_) | State::Failed(_) => return None,
            // The same owner has already reserved this record, and repeats its request because the answer was lost.
            State::Pending { .. } if self.owner == request.owner => {
                return Some(Admission::Answer(Reservation::Granted { lease: self.lease(request), takeover: false }));
            }
            State::Pending { .. } if !lapses_in.is_zero() => {
                return Some(Admission::Answer(Reservation::InProgress { attempt: self.attempt, lapses_in }));
            }
            State::Pending { on_crash, begun, .. } => (lapsed(*on_crash, *begun, request.on_crash), true),
            State::Interrupted => (OnCrash::Fail, false),
            // The request arrived after its attempt was released, or after a decision about that attempt. The request
            // must not reserve the key, because no body would run under that reservation.
            State::Released if self.owner.is_after(request.owner) => {
                return Some(Admission::Answer(Reservation::Released { attempt: self.attempt }));
            }
            State::Released => (OnCrash::Retry, false),
        };
        if on_crash == OnCrash::Fail {
            return Some(Admission::Answer(Reservation::Interrupted { attempt: self.attempt }));
        }
        // A lapsed attempt whose record is not marked as begun does not count, because its body may never have begun.
        let counted = match &self.state {
            State::Pending { begun: false, .. } => self.attempts_used.saturating_sub(1),
            _ => self.attempts_used,
        };
        if self.attempt == u32::MAX || request.max_attempts.is_some_and(|max| counted >= max.get()) {
            return Some(Admission::Answer(Reservation::AttemptsExhausted { attempts: counted }));
        }
        let fingerprint = request.fingerprint.or(self.fingerprint);
        let provenance = request.provenance.after(&self.provenance);
        let with = Self::pending(request, self.attempt + 1, counted + 1, fingerprint, provenance);
        Some(Admission::Replace { with, takeover })
    }

    /// Returns whether the body of `lease` may be marked as begun in this record; see
    /// [`Store::begin`](crate::Store::begin). The record must be the pending record of `lease`. `lapses_in` is the
    /// remaining time of the lease.
    pub fn may_begin(&self, lease: &Lease, lapses_in: Duration) -> bool {
        match self.state {
            State::Pending { begun, .. } => self.is_of(lease) && (begun || !lapses_in.is_zero()),
            _ => false,
        }
    }

    /// Returns the answer to a `finish` (`with_result` is true) or a `release` of `lease` that found this record, which
    /// is not pending. [`Verdict::Applied`] if an earlier copy of the same write produced this record.
    pub fn ended(&self, lease: &Lease, with_result: bool) -> Verdict {
        // A release may have no attempt number; see `Store::release`.
        let own = if with_result { self.is_of(lease) } else { self.owner == lease.owner };
        // A repeated `finish` must find a finished record; a repeated `release` must find a released or interrupted
        // record.
        let repeated = own && !self.is_pending() && self.is_finished() == with_result;
        if repeated { Verdict::Applied } else { Verdict::Refused }
    }
}

/// Returns the option `on_crash` that applies to a lapsed attempt: `Fail` interrupts the key, `Retry` lets the new
/// request run its body. `on_crash` is the option of that attempt, `caller` the option of the new request.
///
/// `fail` promises at most one run, no matter whether the lapsed attempt or the new request has this option. An attempt
/// under `fail` marks its record as begun before its body begins, so without this mark no body began. The body of an
/// attempt under `retry` may have begun without the mark.
fn lapsed(on_crash: OnCrash, begun: bool, caller: OnCrash) -> OnCrash {
    match (on_crash, begun) {
        (OnCrash::Fail, false) => OnCrash::Retry,
        (OnCrash::Fail, true) => OnCrash::Fail,
        (OnCrash::Retry, _) => caller,
    }
}
