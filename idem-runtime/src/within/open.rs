//! Guard of a user's transaction. This guard holds the data that the calls in the transaction share.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use super::journal::Journal;
use super::turns::CallStack;
use crate::clock::{Clock, SystemClock};
use crate::store::transaction::{DOOMED, DriverTransaction};
use crate::sync::lock;

/// Your open transaction, for `PostgresStore::within`, `MySqlStore::within` and `SqliteStore::within`: the
/// `Transaction` of rusqlite, tokio-postgres, deadpool-postgres, `mysql_async` or sqlx.
///
/// The guard derefs to the driver's transaction, and is used like it; calls take a reference to the guard. A
/// transaction of sqlx or `mysql_async` is behind a `tokio::sync::Mutex`, because body and record share its connection.
///
/// All calls in the transaction share this guard, and so take turns. Dropping the guard rolls the transaction back.
/// `transact` makes the guard for you. For a transaction that you begin yourself, make the guard like this:
///
/// ```
/// # #[cfg(feature = "with-rusqlite")]
/// # fn commit(connection: &mut rusqlite::Connection) -> rusqlite::Result<()> {
/// use idem_runtime::within::OpenTransaction;
///
/// let tx = OpenTransaction::new(connection.transaction()?);
/// tx.execute("UPDATE accounts SET cents = cents - 100 WHERE name = 'ada'", [])?;
/// tx.into_inner().commit()
/// # }
/// ```
pub struct OpenTransaction<T: DriverTransaction> {
    /// `None` only while the guard is taken apart.
    shared: Option<T::Shared>,
    pub(super) notes: TransactionNotes,
}

impl<T: DriverTransaction> OpenTransaction<T> {
    /// Guards a transaction that you have begun, and commit or roll back yourself.
    pub fn new(transaction: T) -> Self {
        Self::with_clock(transaction, default_clock())
    }

    /// Guards a transaction like [`new`](OpenTransaction::new), with the clock of a test.
    pub fn with_clock(transaction: T, clock: Arc<dyn Clock>) -> Self {
        let notes = TransactionNotes { calls: CallStack::default(), journal: None, clock };
        Self { shared: Some(transaction.into()), notes }
    }

    /// Guards a transaction that the library has begun, and whose attempts are counted even after a rollback.
    pub(super) fn with_journal(transaction: T, clock: Arc<dyn Clock>) -> Self {
        let mut this = Self::with_clock(transaction, clock);
        this.notes.journal = Some(Arc::default());
        this
    }

    /// Returns the driver's transaction, to be committed or rolled back.
    ///
    /// # Panics
    /// If a call was dropped before its end, and the driver could not undo its writes: always on MySQL, and in a
    /// transaction of sqlx while other code holds or waits for the lock. Drop the guard instead, which rolls the
    /// transaction back.
    pub fn into_inner(mut self) -> T {
        let shared = self.shared();
        assert!(!T::is_broken(shared), "{DOOMED}; drop the guard, which rolls the transaction back");
        T::unshare(self.shared.take().expect("there until the end"))
    }

    /// Returns the driver's transaction, and the journal.
    pub(super) fn end(mut self) -> (T, Journal) {
        let journal = self.notes.journal.take().map(|journal| std::mem::take(&mut *lock(&journal)));
        let mut journal = journal.unwrap_or_default();
        journal.is_broken = T::is_broken(self.shared());
        (T::unshare(self.shared.take().expect("there until the end")), journal)
    }

    fn shared(&self) -> &T::Shared {
        self.shared.as_ref().expect("there until the end")
    }
}

impl<T: DriverTransaction> Drop for OpenTransaction<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take()
            && T::is_broken(&shared)
        {
            T::unshare(shared).abandon();
        }
    }
}

/// Returns the clock of a transaction for which no clock was given.
pub(super) fn default_clock() -> Arc<dyn Clock> {
    Arc::new(SystemClock::default())
}

impl<T: DriverTransaction> Deref for OpenTransaction<T> {
    type Target = T::Shared;

    fn deref(&self) -> &T::Shared {
        self.shared()
    }
}

impl<T: DriverTransaction> fmt::Debug for OpenTransaction<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTransaction").field("notes", &self.notes).finish_non_exhaustive()
    }
}

/// Data that the calls in one transaction share.
pub(super) struct TransactionNotes {
    pub(super) calls: CallStack,
    /// Notes for the time after the end; `None` in a transaction that the user began, whose end the library does not
    /// see.
    pub(super) journal: Option<Arc<Mutex<Journal>>>,
    pub(super) clock: Arc<dyn Clock>,
}

impl TransactionNotes {
    /// Adds a note to the journal. Returns whether there is a journal, which means that the library began the
    /// transaction.
    pub(super) fn note(&self, note: impl FnOnce(&mut Journal)) -> bool {
        self.journal.as_ref().map(|journal| note(&mut lock(journal))).is_some()
    }
}

impl fmt::Debug for TransactionNotes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionNotes").field("has_journal", &self.journal.is_some()).finish_non_exhaustive()
    }
}
