//! Contract between a call inside of a user's transaction and the store that keeps the record of the call in that
//! transaction.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use super::StoreError;
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
            `with-deadpool-postgres-0_14`, `with-sqlx-0_8`, `with-sqlx-0_9`, `with-rusqlite`",
    note = "if the feature is enabled, compare the releases of the driver: `cargo tree -i sqlx`, for example, lists those of sqlx"
)]
pub trait DriverTransaction: Sealed + Sized {
    /// Type through which concurrent calls share the transaction.
    type Shared: From<Self>;

    /// Converts the shared transaction back into the driver's own type.
    #[doc(hidden)]
    fn unshare(shared: Self::Shared) -> Self;
}

/// Operations of a store inside an open transaction. An operation takes a few statements at most.
///
/// A failed statement makes the transaction unusable until an [undo](TransactionStore::undo) returns to the last open
/// savepoint ([`save`](TransactionStore::save)).
pub trait TransactionStore: Sealed + Clone {
    #[doc(hidden)]
    const NAME: &'static str;

    /// Name of the schema (PostgreSQL) or of the table (SQLite) that holds the records.
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
#[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "SQLite has no conflicts of transactions"))]
pub(crate) struct TransactionConflict;

impl fmt::Display for TransactionConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the server undid the transaction in favour of another one")
    }
}

impl Error for TransactionConflict {}

/// Returns whether the server rolled the transaction back because it conflicts with another transaction.
pub(crate) fn is_conflict(error: &StoreError) -> bool {
    error.source().is_some_and(<dyn Error>::is::<TransactionConflict>)
}
