//! Contract between a call inside of a user's transaction and the store that keeps the record of the call in that
//! transaction.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};

use super::StoreError;
#[cfg(any(feature = "mysql", feature = "postgres"))]
use super::StoreErrorKind;
use crate::clock::Clock;
use crate::combine::race;
use crate::key::Key;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Lease, Release, Reservation, ReserveRequest, Verdict,
};

/// Restricts [`DriverTransaction`] and [`TransactionStore`] to types of this crate, so that these traits may gain
/// methods.
pub trait Sealed {}

/// Transaction of a driver, which an `OpenTransaction` can hold.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that this build of idem-runtime can use",
    label = "not the transaction of an enabled driver",
    note = "each driver, in one release, has a feature of idem-runtime: `with-tokio-postgres-0_7`, \
            `with-deadpool-postgres-0_14`, `with-mysql_async-0_37`, `with-sqlx-0_8` and `with-sqlx-0_9` (next to \
            `postgres` or `mysql`), `with-rusqlite`",
    note = "if the feature is enabled, compare the releases of the driver: `cargo tree -i sqlx`, for example, lists those of sqlx"
)]
pub trait DriverTransaction: Sealed + Sized {
    /// Type through which concurrent calls share the transaction.
    type Shared: From<Self>;

    /// Converts the shared transaction back into the driver's own type.
    #[doc(hidden)]
    fn unshare(shared: Self::Shared) -> Self;

    /// Returns whether the transaction must not be committed, although the driver would do so: a call was dropped
    /// before its end, and its writes could not be undone.
    #[doc(hidden)]
    fn is_broken(_: &Self::Shared) -> bool {
        false
    }

    /// Rolls a broken transaction back without waiting.
    #[doc(hidden)]
    fn abandon(self) {}
}

/// A transaction of a driver behind a lock, because body and record share its connection. Derefs to the lock.
pub struct SharedTransaction<T> {
    transaction: Mutex<T>,
    /// True once the writes of a call that was dropped could not be undone: the transaction must be rolled back.
    is_doomed: AtomicBool,
}

/// Longest wait for the lock on the connection. A body that holds this lock while it calls another handler on the same
/// transaction would wait for itself forever.
const LOCK_LIMIT: Duration = Duration::from_secs(30);

#[allow(dead_code, reason = "for types of drivers")]
impl<T> SharedTransaction<T> {
    /// Locks the connection for a statement. Returns the reason why no statement may run: the body holds the lock, or
    /// the transaction must be rolled back.
    pub(crate) async fn lock_for_statement(&self, clock: &dyn Clock) -> Result<MutexGuard<'_, T>, String> {
        let locked = race(self.transaction.lock(), clock.sleep(LOCK_LIMIT)).await;
        let locked = locked.ok_or_else(|| format!("the body held the lock on its transaction for {LOCK_LIMIT:?}"))?;
        if self.is_doomed() { Err(DOOMED.to_owned()) } else { Ok(locked) }
    }

    pub(crate) fn into_inner(self) -> T {
        self.transaction.into_inner()
    }

    pub(crate) fn doom(&self) {
        self.is_doomed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_doomed(&self) -> bool {
        self.is_doomed.load(Ordering::Relaxed)
    }
}

/// Guard of an exchange with the server. Its drop dooms the transaction, unless the exchange has ended.
#[allow(dead_code, reason = "for types of drivers")]
pub(crate) struct ExchangeGuard<'a, T>(&'a SharedTransaction<T>);

#[allow(dead_code, reason = "for types of drivers")]
impl<'a, T> ExchangeGuard<'a, T> {
    pub(crate) fn of(transaction: &'a SharedTransaction<T>) -> Self {
        Self(transaction)
    }

    /// Notes the end of the exchange.
    pub(crate) fn end(self) {
        std::mem::forget(self);
    }
}

impl<T> Drop for ExchangeGuard<'_, T> {
    fn drop(&mut self) {
        self.0.doom();
    }
}

// The lock is a type of tokio, which the interface shows only together with a driver.
#[cfg(any(feature = "with-mysql_async-0_37", feature = "with-sqlx-0_8", feature = "with-sqlx-0_9"))]
impl<T> std::ops::Deref for SharedTransaction<T> {
    type Target = Mutex<T>;

    fn deref(&self) -> &Mutex<T> {
        &self.transaction
    }
}

impl<T> From<T> for SharedTransaction<T> {
    fn from(transaction: T) -> Self {
        Self { transaction: Mutex::new(transaction), is_doomed: AtomicBool::new(false) }
    }
}

impl<T> fmt::Debug for SharedTransaction<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedTransaction").field("is_doomed", &self.is_doomed()).finish_non_exhaustive()
    }
}

/// Reason why a transaction can only be rolled back.
pub(crate) const DOOMED: &str = "a call in it was dropped before its end, and its writes could not be undone";

/// Operations of a store inside an open transaction. An operation takes a few statements at most.
///
/// A failed statement makes the transaction unusable until an [undo](TransactionStore::undo) returns to the last open
/// savepoint ([`save`](TransactionStore::save)).
pub trait TransactionStore: Sealed + Clone {
    #[doc(hidden)]
    const NAME: &'static str;

    /// Name of the schema (PostgreSQL) or of the table (MySQL, SQLite) that holds the records.
    #[doc(hidden)]
    fn place(&self) -> &str;

    /// Makes a savepoint.
    #[doc(hidden)]
    fn save(&self) -> impl Future<Output = Result<(), StoreError>>;

    /// Undoes the writes since the last savepoint, and keeps the savepoint open.
    #[doc(hidden)]
    fn rewind(&self) -> impl Future<Output = Result<(), StoreError>>;

    /// Releases the last savepoint, and keeps the writes since. Calls `begun` when the release begins: from then on the
    /// savepoint is released even if the future is dropped.
    #[doc(hidden)]
    fn keep(&self, begun: impl FnOnce()) -> impl Future<Output = Result<(), StoreError>>;

    /// Undoes the writes since the last savepoint, and releases the savepoint.
    #[doc(hidden)]
    fn undo(&self) -> impl Future<Output = Result<(), StoreError>>;

    /// Does the same as [`undo`](TransactionStore::undo), but in a `drop`, which can't await a future.
    #[doc(hidden)]
    fn undo_immediately(&self);

    #[doc(hidden)]
    fn reserve(&self, request: &ReserveRequest) -> impl Future<Output = Result<Reservation, StoreError>>;

    /// Marks that the body of an attempt begins.
    #[doc(hidden)]
    fn begin(&self, lease: &Lease) -> impl Future<Output = Result<Verdict, StoreError>>;

    #[doc(hidden)]
    fn finish(&self, lease: &Lease, finish: &Finish) -> impl Future<Output = Result<Verdict, StoreError>>;

    #[doc(hidden)]
    fn release(&self, lease: &Lease, release: Release) -> impl Future<Output = Result<Verdict, StoreError>>;

    /// Waits until no other transaction holds `key`, for at most `at_most`. Returns true if the caller must keep the
    /// effects of the wait (locks and settings), and false if the caller must undo them by the savepoint.
    #[doc(hidden)]
    fn wait(&self, key: &Key, at_most: Duration) -> impl Future<Output = Result<bool, StoreError>>;

    #[doc(hidden)]
    fn inspect(&self, key: &Key) -> impl Future<Output = Result<Option<Inspection>, StoreError>>;

    #[doc(hidden)]
    fn decide(&self, decision: &Decision) -> impl Future<Output = Result<DecisionAnswer, StoreError>>;
}

/// Source of a [`StoreError`] for a transaction that the server rolled back because it conflicts with another
/// transaction: the user may repeat the whole transaction.
#[derive(Debug)]
#[cfg_attr(
    not(any(feature = "mysql", feature = "postgres")),
    allow(dead_code, reason = "SQLite has no conflicts of transactions")
)]
pub(crate) struct TransactionConflict;

impl fmt::Display for TransactionConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the server undid the transaction in favour of another one")
    }
}

impl Error for TransactionConflict {}

/// Returns the error of a transaction in which a statement has failed with `kind`. `code` and `message` are of the
/// server, and `conflicts` says whether the whole transaction may be repeated.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) fn can_not_continue(
    kind: StoreErrorKind,
    advice: &str,
    code: Option<impl fmt::Display>,
    message: &str,
    conflicts: bool,
) -> StoreError {
    let kind = match kind {
        StoreErrorKind::Misconfigured | StoreErrorKind::Corrupt | StoreErrorKind::TooLarge => kind,
        _ => StoreErrorKind::Aborted,
    };
    let code = code.map(|code| format!("{code}: ")).unwrap_or_default();
    let text = format!("the transaction can't continue; roll it back: {advice} ({code}{message})");
    let error = StoreError::new(kind, text);
    if conflicts { error.with_source(TransactionConflict) } else { error }
}

/// Returns whether the server rolled the transaction back because it conflicts with another transaction.
pub(crate) fn is_conflict(error: &StoreError) -> bool {
    error.source().is_some_and(<dyn Error>::is::<TransactionConflict>)
}
