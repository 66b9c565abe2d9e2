//! Effect of a reservation on the record that it finds, decided by a pure function that every store calls.

use std::num::NonZeroU32;
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
    #[cfg(any(feature = "memory", feature = "redis", feature = "sqlite", feature = "nats"))]
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
                return Some(Admission::Answer(self.grant(request, false)));
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
            return Some(self.settle_doubt(request, takeover));
        }
        let counted = self.attempts_counted();
        if self.has_no_attempt_left(request.max_attempts) {
            return Some(Admission::Answer(Reservation::AttemptsExhausted { attempts: counted }));
        }
        let fingerprint = request.fingerprint.or(self.fingerprint);
        let provenance = request.provenance.after(&self.provenance);
        let with = Self::pending(request, self.attempt + 1, counted + 1, fingerprint, false, provenance);
        Some(Admission::Replace { with: Self { journal: self.journal.clone(), ..with }, takeover })
    }

    /// Returns the number of attempts that count against the `max_attempts` of the next attempt. A lapsed attempt whose
    /// record is not marked as begun does not count, because its body may never have begun.
    pub fn attempts_counted(&self) -> u32 {
        match &self.state {
            State::Pending { begun: false, .. } => self.attempts_used.saturating_sub(1),
            _ => self.attempts_used,
        }
    }

    fn has_no_attempt_left(&self, max_attempts: Option<NonZeroU32>) -> bool {
        self.attempt == u32::MAX || max_attempts.is_some_and(|max| self.attempts_counted() >= max.get())
    }

    /// Returns whether a reservation under this `max_attempts` is answered by
    /// [`Reservation::AttemptsExhausted`]. `lapses_in` is the time until the lease of a pending record lapses; zero if
    /// the lease has lapsed. The `on_crash` of the reservation is taken to be that of the record.
    pub fn is_exhausted(&self, max_attempts: NonZeroU32, lapses_in: Duration) -> bool {
        let may_run = match &self.state {
            State::Pending { on_crash, begun, .. } => {
                lapses_in.is_zero() && lapsed(*on_crash, *begun, *on_crash) == OnCrash::Retry
            }
            State::Released => true,
            State::Interrupted | State::Completed(_) | State::Failed(_) => false,
        };
        may_run && self.has_no_attempt_left(Some(max_attempts))
    }

    /// Decides the effect of `request` on a record whose effect is in doubt. A caller with a reconciler gets the key,
    /// to find out whether the effect has happened; `max_attempts` limits only bodies. Every other caller is refused.
    fn settle_doubt(&self, request: &ReserveRequest, takeover: bool) -> Admission {
        // The request arrived after its own attempt had ended, so no reconciler waits for the answer.
        if self.owner.is_after(request.owner) && request.max_reconciliations.is_some() {
            return Admission::Answer(Reservation::Released { attempt: self.attempt });
        }
        let asked = self.provenance.reconciliations();
        let may_ask = request.max_reconciliations.is_some_and(|max| asked < max.get());
        if !may_ask || self.attempt == u32::MAX {
            return Admission::Answer(Reservation::Interrupted { attempt: self.attempt });
        }
        let fingerprint = request.fingerprint.or(self.fingerprint);
        let provenance = request.provenance.reconciling(asked + 1);
        // The mark of the earlier attempt remains: if the reconciler crashes, the effect is still in doubt.
        let with = Self::pending(request, self.attempt + 1, self.attempts_counted() + 1, fingerprint, true, provenance);
        Admission::Replace { with: Self { journal: self.journal.clone(), ..with }, takeover }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;
    use crate::record::{OwnerToken, StoredResult};

    #[test]
    fn a_record_is_exhausted_exactly_if_a_reservation_is_answered_so() {
        let long = Duration::from_secs(60);
        let mut states = vec![
            State::Released,
            State::Interrupted,
            State::Completed(StoredResult::Unencodable),
            State::Failed(StoredResult::Unencodable),
        ];
        for on_crash in [OnCrash::Retry, OnCrash::Fail] {
            states.extend([false, true].map(|begun| State::Pending { lease: long, ttl: long, on_crash, begun }));
        }
        let mut exhausted = 0;
        for state in states {
            for (attempt, attempts_used) in [(1, 0), (1, 1), (3, 1), (3, 3), (u32::MAX, 0)] {
                for (most, lapses_in) in (1..5).flat_map(|most| [(most, Duration::ZERO), (most, long)]) {
                    let most = NonZeroU32::new(most).unwrap();
                    let record = Record {
                        attempts_used,
                        ..Record::new(OwnerToken::from_bytes([1; 16]), attempt, state.clone())
                    };
                    let key: Key = "pay/42".parse().unwrap();
                    let request = ReserveRequest::new(key, OwnerToken::from_bytes([2; 16]), long, long);
                    let on_crash = match state {
                        State::Pending { on_crash, .. } => on_crash,
                        _ => OnCrash::Retry,
                    };
                    let answer = record.admit(&request.max_attempts(most).on_crash(on_crash), lapses_in);
                    let is_exhausted = matches!(answer, Admission::Answer(Reservation::AttemptsExhausted { .. }));
                    assert_eq!(
                        record.is_exhausted(most, lapses_in),
                        is_exhausted,
                        "{record:?} under {most}: {answer:?}"
                    );
                    exhausted += u32::from(is_exhausted);
                }
            }
        }
        assert!(exhausted > 20, "{exhausted}");
    }
}
