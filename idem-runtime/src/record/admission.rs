//! The effect of a reservation on the record that it finds: one pure decision, which every store calls.

use std::time::Duration;

use super::{Lease, Record, Reservation, ReserveRequest, State, Verdict};
use crate::policy::OnCrash;

/// Effect of a reservation on the record that it found; see [`Record::admit`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Admission {
    /// The record stays unchanged, and this is the answer.
    Answer(Reservation),
    /// The store may replace the record by this one, if it is still the record that was found.
    Replace {
        /// The pending record of the new attempt.
        with: Record,
        /// True if the new attempt takes over an attempt whose lease has lapsed.
        takeover: bool,
    },
}

impl Record {
    /// Decides the effect of `request` on this record. `lapses_in`: time until the lease of a pending record lapses;
    /// zero if it has lapsed. Pure: every store calls this one function, and makes the decision atomic in its own way.
    pub fn admit(&self, request: &ReserveRequest, lapses_in: Duration) -> Admission {
        self.meet(request, lapses_in).unwrap_or_else(|| Admission::Answer(Reservation::finished(self.clone())))
    }

    /// Like [`admit`](Self::admit), but takes the record by value, and so copies no result.
    #[cfg(any(feature = "memory", feature = "redis", feature = "sqlite"))]
    pub(crate) fn admit_owned(self, request: &ReserveRequest, lapses_in: Duration) -> Admission {
        self.meet(request, lapses_in).unwrap_or_else(|| Admission::Answer(Reservation::finished(self)))
    }

    /// Like [`admit`](Self::admit). Returns `None` if the record itself is the answer.
    pub(crate) fn meet(&self, request: &ReserveRequest, lapses_in: Duration) -> Option<Admission> {
        // Checked in every state: a replay or a takeover for another payload would be wrong.
        if let (Some(recorded), Some(presented)) = (self.fingerprint, request.fingerprint)
            && recorded.is_comparable(&presented)
            && recorded != presented
        {
            return Some(Admission::Answer(Reservation::FingerprintMismatch { attempt: self.attempt }));
        }
        let (on_crash, takeover) = match &self.state {
            State::Completed(_) | State::Failed(_) => return None,
            // The same owner has already reserved this record: its request is repeated because the answer was lost.
            State::Pending { .. } if self.owner == request.owner => {
                return Some(Admission::Answer(Reservation::Granted { lease: self.lease(request), takeover: false }));
            }
            State::Pending { .. } if !lapses_in.is_zero() => {
                return Some(Admission::Answer(Reservation::InProgress { attempt: self.attempt, lapses_in }));
            }
            State::Pending { on_crash, begun, .. } => (lapsed(*on_crash, *begun, request.on_crash), true),
            State::Interrupted => (OnCrash::Fail, false),
            // The request arrived after its own release, or after a decision about its attempt. It must not hold the
            // key: no body would run under it.
            State::Released if self.owner.is_after(request.owner) => {
                return Some(Admission::Answer(Reservation::Released { attempt: self.attempt }));
            }
            State::Released => (OnCrash::Retry, false),
        };
        if on_crash == OnCrash::Fail {
            return Some(Admission::Answer(Reservation::Interrupted { attempt: self.attempt }));
        }
        // An attempt that lapsed before its body was marked as begun does not count: its body may never have begun.
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

    /// Returns whether this is the pending record of `lease`, and its body may be marked as begun; see
    /// [`Store::begin`](crate::Store::begin). `lapses_in` is the rest of its lease.
    pub fn may_begin(&self, lease: &Lease, lapses_in: Duration) -> bool {
        match self.state {
            State::Pending { begun, .. } => self.is_of(lease) && (begun || !lapses_in.is_zero()),
            _ => false,
        }
    }

    /// Returns the answer to a finish (`with_result`) or a release of the attempt of `lease` that found this record
    /// instead of its own pending one: [`Verdict::Applied`] if an earlier copy of that write produced this record.
    pub fn ended(&self, lease: &Lease, with_result: bool) -> Verdict {
        // A release may lack its attempt number; see `Store::release`.
        let own = if with_result { self.is_of(lease) } else { self.owner == lease.owner };
        // A repeated finish needs a finished record, a repeated release a released or interrupted one.
        let repeated = own && !self.is_pending() && self.is_finished() == with_result;
        if repeated { Verdict::Applied } else { Verdict::Refused }
    }
}

/// Decides how the crash of an attempt counts that lapsed under `on_crash`, for a request with `on_crash = caller`.
///
/// `fail` promises at most one run, no matter whether the lapsed attempt or the request has it. An attempt under `fail`
/// marks its record before its body begins, so without the mark no body began. An attempt under `retry` may have begun
/// without a mark.
fn lapsed(on_crash: OnCrash, begun: bool, caller: OnCrash) -> OnCrash {
    match (on_crash, begun) {
        (OnCrash::Fail, false) => OnCrash::Retry,
        (OnCrash::Fail, true) => OnCrash::Fail,
        (OnCrash::Retry, _) => caller,
    }
}
