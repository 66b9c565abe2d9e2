//! What becomes of a request that meets a record: the one pure decision that every store asks for.

use std::time::Duration;

use super::{Lease, Record, Reservation, ReserveRequest, State, Verdict};
use crate::policy::OnCrash;

/// What a reservation does with the record it met; see [`Record::admit`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Admission {
    /// The record stays as it is, and this is the answer.
    Answer(Reservation),
    /// The record may be replaced by this one, if it still is the one that was met.
    Replace {
        /// The pending record of the new attempt.
        with: Record,
        /// Whether an attempt whose lease has lapsed is taken over.
        takeover: bool,
    },
}

impl Record {
    /// Decides what `request` does with this record, whose lease (if it is pending) lapses in `lapses_in`; zero means it
    /// has lapsed. Pure: every store asks this one function, and then makes the answer atomic in its own way.
    pub fn admit(&self, request: &ReserveRequest, lapses_in: Duration) -> Admission {
        self.decide(request, lapses_in).unwrap_or_else(|| Admission::Answer(Reservation::Finished(self.clone())))
    }

    /// The same for a record that nobody else needs.
    #[cfg(feature = "memory")]
    pub(crate) fn admit_owned(self, request: &ReserveRequest, lapses_in: Duration) -> Admission {
        self.decide(request, lapses_in).unwrap_or_else(|| Admission::Answer(Reservation::Finished(self)))
    }

    /// `None` if the record itself is the answer.
    fn decide(&self, request: &ReserveRequest, lapses_in: Duration) -> Option<Admission> {
        // Checked in every state: a replay or a takeover for another payload would be a wrong answer.
        if let (Some(recorded), Some(presented)) = (self.fingerprint, request.fingerprint)
            && recorded.is_comparable(&presented)
            && recorded != presented
        {
            return Some(Admission::Answer(Reservation::FingerprintMismatch { attempt: self.attempt }));
        }
        let (on_crash, takeover) = match &self.state {
            State::Completed(_) | State::Failed(_) => return None,
            // A reservation that was repeated because its answer got lost recognises its own record.
            State::Pending { .. } if self.owner == request.owner => {
                return Some(Admission::Answer(Reservation::Granted { lease: self.lease(request), takeover: false }));
            }
            State::Pending { .. } if !lapses_in.is_zero() => {
                return Some(Admission::Answer(Reservation::InProgress { attempt: self.attempt, lapses_in }));
            }
            State::Pending { on_crash, .. } => (*on_crash, true),
            State::Interrupted => (OnCrash::Fail, false),
            // A request that arrives after its own release must not hold the key: nobody would run under it.
            State::Released if self.owner == request.owner => {
                return Some(Admission::Answer(Reservation::Released { attempt: self.attempt }));
            }
            State::Released => (OnCrash::Retry, false),
        };
        // Whoever started or meets the interrupted body under `fail` has promised at most one run.
        let interrupted = on_crash == OnCrash::Fail || (takeover && request.on_crash == OnCrash::Fail);
        if interrupted {
            return Some(Admission::Answer(Reservation::Interrupted { attempt: self.attempt }));
        }
        if self.attempt == u32::MAX || request.max_attempts.is_some_and(|max| self.attempts_used >= max.get()) {
            return Some(Admission::Answer(Reservation::AttemptsExhausted { attempts: self.attempts_used }));
        }
        let fingerprint = request.fingerprint.or(self.fingerprint);
        let with = Self::pending(request, self.attempt + 1, self.attempts_used + 1, fingerprint);
        Some(Admission::Replace { with, takeover })
    }

    /// What a write that ends the attempt of `lease`, with a result or without one, is answered if it met this record and
    /// not a pending one that it may end: done if an earlier write of the same attempt did it.
    pub fn ended(&self, lease: &Lease, with_result: bool) -> Verdict {
        // A release may not know its number; see `Store::release`.
        let own = if with_result { self.is_of(lease) } else { self.owner == lease.owner };
        // A finished record is done; a released one is not finished any more.
        let repeated = own && !self.is_pending() && self.is_finished() == with_result;
        if repeated { Verdict::Applied } else { Verdict::Refused }
    }
}
