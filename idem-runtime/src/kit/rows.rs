//! Rows of the tables of database servers: a record as a statement read it, with its times by the server's clock.

use std::time::Duration;

use crate::record::format::FormatError;
use crate::record::{Admission, Inspection, Record, Reservation, ReserveRequest, State, signed_millis};
use crate::store::{StoreError, StoreErrorKind};

/// A thousand years, in milliseconds: longer than any policy allows, and far from the end of any server's calendar.
const MAX_MILLIS: i64 = 1000 * 366 * 86_400_000;

/// Returns `duration` in milliseconds, as a parameter of a statement.
pub(crate) fn millis(duration: Duration) -> i64 {
    signed_millis(duration).min(MAX_MILLIS)
}

/// Returns the length of the stored journal of an unfinished record, or of the stored result of a finished one.
pub(crate) fn stored_length(record: &Record) -> i64 {
    let result = record.state.result().map(|result| result.stored_bytes() as u64);
    i64::try_from(result.unwrap_or_else(|| record.journal_bytes())).unwrap_or(i64::MAX)
}

/// Returns the attempt number to compare; `None` for a release, whose caller may not know the number.
pub(crate) fn number_of(record: &Record) -> Option<i64> {
    record.is_finished().then_some(record.attempt.into())
}

/// Returns the error for a row that is no record.
pub(crate) fn corrupt(error: FormatError) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(error)
}

/// A time on the server's clock, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Micros(pub(crate) i64);

impl Micros {
    /// The earliest time.
    #[cfg(feature = "postgres")]
    pub(crate) const FIRST: Self = Self(i64::MIN);

    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or_default())
    }
}

/// A record as a statement read it, expired or not.
#[derive(Clone, Debug)]
pub(crate) struct FoundRow {
    pub(crate) record: Record,
    pub(crate) lapses_at: Micros,
    pub(crate) expires_at: Micros,
    /// Time of the server's clock at which the statement read the record.
    pub(crate) now: Micros,
    /// Time at which the key was first seen; `None` if the statement did not read this column.
    pub(crate) first_seen_at: Option<Micros>,
    pub(crate) began_at: Micros,
}

impl FoundRow {
    pub(crate) fn is_expired(&self) -> bool {
        self.expires_at <= self.now
    }

    pub(crate) fn expires_in(&self) -> Duration {
        self.expires_at.since(self.now)
    }

    /// Returns the remaining time of the lease; zero if the lease has lapsed or the record is not pending.
    pub(crate) fn lapses_in(&self) -> Duration {
        match self.record.state {
            // A statement that waited for a lock reads a record that was written after the time of the statement.
            State::Pending { lease, .. } => self.lapses_at.since(self.now).min(lease),
            _ => Duration::ZERO,
        }
    }

    /// Decides a reservation that found this record. Takes the record by value, so that the result is not copied.
    pub(crate) fn meet(self, request: &ReserveRequest) -> AdmissionOutcome {
        if self.is_expired() {
            return AdmissionOutcome::Replace { met: self, with: Record::first(request), takeover: false };
        }
        let age = self.now.since(self.began_at);
        match self.record.meet(request, self.lapses_in()) {
            None => AdmissionOutcome::Answer(Reservation::finished(self.record).aged(age)),
            Some(Admission::Answer(answer)) => AdmissionOutcome::Answer(answer.aged(age)),
            Some(Admission::Replace { with, takeover }) => AdmissionOutcome::Replace { met: self, with, takeover },
        }
    }

    pub(crate) fn inspection(self) -> Inspection {
        let lapses_in = matches!(self.record.state, State::Pending { .. }).then(|| self.lapses_in());
        let first_seen = self.first_seen_at.map(|at| self.now.since(at));
        let (expires_in, began) = (self.expires_in(), self.now.since(self.began_at));
        Inspection::new(self.record, expires_in, lapses_in).since(first_seen, Some(began))
    }

    /// Makes the row that a reservation has just written. The other requests for the same key in its batch find this
    /// row.
    #[cfg(feature = "postgres")]
    pub(crate) fn made(record: Record, lease: Duration) -> Self {
        let (lapses_at, expires_at) = (Micros(millis(lease).saturating_mul(1000).max(1)), Micros(i64::MAX));
        let now = Micros(0);
        Self { record, lapses_at, expires_at, now, first_seen_at: Some(now), began_at: now }
    }
}

/// Decision about a reservation that found a record.
pub(crate) enum AdmissionOutcome {
    Answer(Reservation),
    /// Replace the record `met` by `with`, if the record is still unchanged.
    Replace {
        met: FoundRow,
        with: Record,
        takeover: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;
    use crate::record::OwnerToken;

    #[test]
    fn a_lease_that_began_after_the_statement_lapses_within_its_length() {
        let (lease, ttl) = (Duration::from_secs(30), Duration::from_secs(60));
        let key = Key::new("test", "k").expect("a key");
        let record = Record::first(&ReserveRequest::new(key, OwnerToken::from_bytes([1; 16]), lease, ttl));
        let at = |seconds: i64| Micros(seconds * 1_000_000);
        let found = |now| FoundRow {
            record: record.clone(),
            lapses_at: at(130),
            expires_at: at(190),
            now,
            first_seen_at: None,
            began_at: at(100),
        };
        assert_eq!(found(at(99)).lapses_in(), lease, "the lease began a second later");
        assert_eq!(found(at(110)).lapses_in(), Duration::from_secs(20));
        assert_eq!(found(at(131)).lapses_in(), Duration::ZERO);
    }
}
