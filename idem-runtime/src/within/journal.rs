//! Notes about the attempts in a transaction that the library began, for use after its commit or rollback.

use super::outbox::CommitOutbox;
use crate::record::{Finish, Release, Reservation, ReserveRequest, Verdict};
use crate::store::StoreError;
use crate::store::transaction::TransactionStore;

/// Notes about a transaction, for use after its end.
#[derive(Default)]
pub(super) struct Journal {
    /// Attempts that began in the transaction, the earliest first.
    attempts: Vec<UndoneAttempt>,
    /// True if a statement of the library conflicted with another transaction, so that the whole transaction should be
    /// tried again.
    pub(super) conflict: bool,
    /// True if the transaction must not be committed; see `DriverTransaction::is_broken`.
    #[allow(dead_code, reason = "only drivers of MySQL can't undo the writes of a dropped call")]
    pub(super) is_broken: bool,
    /// Messages that leave after the commit.
    pub(super) outbox: CommitOutbox,
}

impl Journal {
    /// Returns whether no attempt began in the transaction.
    pub(super) fn is_empty(&self) -> bool {
        self.attempts.is_empty()
    }

    /// Notes the attempt that begins with `request`.
    pub(super) fn begins(&mut self, place: &str, request: &ReserveRequest) {
        self.attempts.push(UndoneAttempt { place: place.to_owned(), request: request.clone(), failure: None });
    }

    /// Notes that the attempt of `request` has recorded an error.
    pub(super) fn fails(&mut self, request: &ReserveRequest, failure: &Finish) {
        if let Some(attempt) = self.attempts.iter_mut().find(|it| it.request.owner == request.owner) {
            attempt.failure = Some(failure.clone());
        }
    }

    /// Writes the end of each attempt into a new record, after the rollback. `records` returns the operations on the
    /// schema or table of an attempt. Returns whether all errors that the attempts had recorded are recorded again.
    pub(super) async fn write<C: TransactionStore>(&self, records: impl Fn(&str) -> C) -> Result<bool, StoreError> {
        let mut recorded = true;
        for attempt in &self.attempts {
            recorded &= attempt.write(&records(&attempt.place)).await? || attempt.failure.is_none();
        }
        Ok(recorded)
    }
}

/// An attempt whose record was rolled back with its transaction.
struct UndoneAttempt {
    /// Name of the schema or the table of its record.
    place: String,
    request: ReserveRequest,
    /// Error that the attempt recorded; `None` if the attempt must free its key.
    failure: Option<Finish>,
}

impl UndoneAttempt {
    /// Writes a record with the end of the attempt, so that `max_attempts` counts the attempt, and the next attempt has
    /// another number. Returns false without a write if another attempt has reserved the key by now.
    async fn write<C: TransactionStore>(&self, transaction: &C) -> Result<bool, StoreError> {
        match transaction.reserve(&self.request).await? {
            Reservation::Granted { lease, .. } => {
                let written = match &self.failure {
                    Some(failure) => transaction.finish(&lease, failure).await?,
                    None => transaction.release(&lease, Release::Returned).await?,
                };
                Ok(written == Verdict::Applied)
            }
            _ => Ok(false),
        }
    }
}
