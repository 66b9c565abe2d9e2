//! The contract between the engine and a store.

pub(crate) mod context;
mod error;
mod ext;
pub(crate) mod flight;
mod forward;
mod future;
mod health;
mod listing;
pub(crate) mod operator;
mod outage;
pub(crate) mod sender;
#[cfg(feature = "within")]
pub(crate) mod transaction;
mod watch;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use self::context::StoreContext;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) use self::context::TagCounts;
pub(crate) use self::context::{
    AfterError, Beat, BeatGuard, Callback, FlushGuard, JournalAccess, LastWait, LateEndGuard, LeaseStanding, Limits,
    PushRefusal, StepClaim, StepJournal, Timer,
};
pub use self::error::{StoreError, StoreErrorKind};
pub use self::ext::StoreExt;
#[doc(inline)]
pub use self::forward::forward;
#[allow(unused_imports, reason = "unused without a store of the library")]
pub(crate) use self::forward::store_of_shared;
pub use self::future::StoreFuture;
pub use self::health::{Health, HealthProblem};
pub use self::listing::{Counts, Cursor, Filter, Page, Stats};
use crate::key::Key;
use crate::metrics::StoreOp;
use crate::policy::{Policy, PolicyProblem};
use crate::record::StoredResult;
pub use crate::record::decision::{Action, Decision, DecisionAnswer};
pub use crate::record::inspection::Inspection;
pub use crate::record::journal::{Journal, JournalError};
pub use crate::record::journaled_step::{JournaledStep, StepDecisionError, StepState};
pub use crate::record::lease::{Lease, LeaseMark};
pub use crate::record::messages::{UnsentMessage, UnsentMessages};
pub use crate::record::owner::OwnerToken;
pub use crate::record::provenance::Holder;
pub use crate::record::request::{Finish, Release, ReserveRequest, Verdict};
pub use crate::record::reservation::Reservation;
pub use crate::record::revision::{Revision, RevisionError};
pub use crate::record::standing::Standing;
use crate::sync::lock;

/// Place of step values that are too large for a record; see [`Store::step_values`].
pub trait StepValues: Send + Sync {
    /// Stores the value of a step of the attempt of `lease`, if the value is large. Returns what the journal holds in
    /// its place: a reference, or the value itself.
    ///
    /// # Errors
    /// [`StoreError`] if the value can't be stored here. The journal then holds the value.
    fn keep<'a>(&'a self, lease: &'a Lease, value: &'a StoredResult) -> StoreFuture<'a, StoredResult>;

    /// Returns the value that [`keep`](Self::keep) stored, if `stored` is a reference; otherwise returns `stored`. A
    /// value that is missing or was altered is [`StoredResult::Unreadable`].
    ///
    /// # Errors
    /// [`StoreError`] if the value can't be read now.
    fn fetch<'a>(&'a self, stored: &'a StoredResult) -> StoreFuture<'a, StoredResult>;
}

/// A store of records.
///
/// The contract, which the suite in `idem_runtime::conformance` (feature `conformance`) checks:
///
/// - **Atomic.** [`reserve`](Store::reserve) finds or changes the record in one step; of many concurrent calls exactly
///   one gets [`Reservation::Granted`]. [`Record::admit`](crate::record::Record::admit) decides the effect of a
///   reservation on the record; the store applies that effect atomically.
/// - **Compare-and-set.** [`begin`](Store::begin), [`renew`](Store::renew), [`append`](Store::append),
///   [`finish`](Store::finish) and [`release`](Store::release) change only a pending record, and only if the call
///   presents the record's owner token. `begin`, `renew`, `append` and `finish` also compare the number of the attempt.
///   A refusal is an answer ([`Verdict::Refused`]), not an error.
/// - **Repeatable.** Every operation may be repeated with the same owner token. If the first call took effect although
///   its answer was lost, the store recognises that effect and answers the repetition like the first call.
/// - **Retained.** A pending record is kept for its `ttl` after its lease lapses; a finished or released record is kept
///   for `ttl` from the write that ended its attempt. No store forgets a record before this retention ends. A store
///   treats an expired record as absent even if the record is still stored.
/// - **One clock.** The store measures leases and retentions by its own clock, and never compares the clocks of two
///   machines.
/// - **Traceable.** A record keeps the [`Provenance`](crate::record::Provenance) that it gets from `admit`, from
///   `decide` or from the lease. The store also records when the key was first seen and when the latest attempt began.
///   No decision depends on this information.
/// - **Bounded.** Every call ends; a store that can hang has its own timeout.
/// - **Cancel safe.** Any returned future may be dropped at any time. The write of a dropped future happened completely
///   or not at all.
///
/// Almost no method has a default body: a default `reserve` that first reads and then writes would compile, but
/// concurrent calls could both win.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a `Store`",
    label = "not an idempotency store",
    note = "name a value that implements `idem_runtime::Store`, or derefs to or shares one, for example `store = app.idempotency`"
)]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Returns a handle to the same store and the same [`StoreContext`], for work that outlives a call.
    ///
    /// Each operation calls this method once. Duplicates of one key share a wait if their handles are the same `Arc`.
    /// If a store makes a new handle for each call, each duplicate waits alone.
    fn handle(&self) -> Arc<dyn Store>;

    /// Returns a handle to the same store and the same [`StoreContext`] for the library's own renewals and late writes.
    ///
    /// Renewals and late writes run on a thread of the library ([`Clock::spawn`](crate::clock::Clock::spawn)). A handle
    /// that shares no connection, no queue and no runtime with other callers keeps leases alive while these callers are
    /// slow or blocked. A handle with its own connection should open the connection at its first use. A store that has
    /// nothing to share, such as a store in memory, returns [`handle`](Store::handle).
    fn upkeep(&self) -> Arc<dyn Store>;

    /// Returns the prefix that separates this application's records from records of other applications in the same
    /// database; empty without a namespace. The namespace enters child keys
    /// ([`Attempt::child_key`](crate::Attempt::child_key)), so that two applications never share a child key.
    fn namespace(&self) -> &str;

    /// Returns the time limit of one call of the store; zero if calls can't hang. A lease has to be longer than this
    /// limit.
    fn response_timeout(&self) -> Duration;

    /// Returns the state that the engine keeps for this store: its name, clock, leases, late writes and metrics.
    fn context(&self) -> &StoreContext;

    /// Reserves `request.key` for one attempt, or returns the state of its record, in one atomic step.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not answer. A failure is never reported as "no record".
    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation>;

    /// Marks in the record that the body of this attempt begins, and renews the lease. Under `on_crash = fail`, and for
    /// an attempt that must count against `max_attempts`, the engine polls the body only after the store has confirmed
    /// this write. An attempt that lapses without the mark is neither interrupted nor counted.
    ///
    /// Compares owner token and `lease.attempt`, like [`finish`](Store::finish). Refuses a lease that has lapsed by the
    /// store's clock, unless the record is already marked: a late request must not mark a record.
    /// [`Record::may_begin`](crate::record::Record::may_begin) is the condition.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm the write, which may have taken effect if
    /// [`StoreError::may_have_landed`] returns true.
    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict>;

    /// Renews the leases. Calls `answer` for each lease, with the index of the lease in `leases`, as soon as the store
    /// has answered for that lease. A lapsed lease is renewed if no other attempt has taken over.
    ///
    /// Compares owner token and `lease.attempt`, like [`finish`](Store::finish). A lease without an answer may or may
    /// not have been renewed: its record could not be reached, or another session had locked the record. A lease
    /// without an answer must not delay the other leases.
    ///
    /// # Errors
    /// [`StoreError`] holds the reason why leases have no answer. The answers that were given stay valid.
    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()>;

    /// Puts `journal` into the pending record, and renews the lease. The journal comes back with the reservation of the
    /// next attempt. `finish` removes the journal; `release` and [`decide`](Store::decide) keep it unless the operation
    /// has finished.
    ///
    /// Compares owner token and `lease.attempt`, like [`finish`](Store::finish). Like [`renew`](Store::renew), applies
    /// to a lapsed lease if no other attempt has taken over. The journals of one attempt only grow, and each begins
    /// with the bytes of the journal before it. So the store keeps the longer journal: a copy of an earlier request
    /// that lands late changes nothing, and the answer is [`Verdict::Applied`].
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm the write, which may have taken effect if
    /// [`StoreError::may_have_landed`] returns true. [`StoreErrorKind::TooLarge`] if the record can't hold the journal.
    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict>;

    /// Returns the place of step values that are too large for a record. A store that returns `None` (the default)
    /// keeps each value in the journal, up to the limits of [`StepPolicy`](crate::policy::StepPolicy). A wrapper
    /// forwards this method.
    fn step_values(&self) -> Option<&dyn StepValues> {
        None
    }

    /// Turns the pending record into a finished one, kept for `lease.ttl` from now, and wakes its waiters.
    ///
    /// Refuses unless owner token and `lease.attempt` match the record. The token alone is not enough: a late copy of a
    /// reservation may create a later attempt with the same owner token, and the finish of the earlier attempt would
    /// then lower the attempt number in the record.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm the write, which may have taken effect if
    /// [`StoreError::may_have_landed`] returns true.
    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict>;

    /// Ends the attempt without a result, keeps the record for `lease.ttl` from now, and wakes its waiters.
    ///
    /// Ignores `lease.attempt`: a caller without an answer to its reservation doesn't know the number.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm the write, which may have taken effect if
    /// [`StoreError::may_have_landed`] returns true.
    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict>;

    /// Waits until attempt `attempt` of `key` is no longer pending, for at most `at_most`; may return early. Returns
    /// the record at the end of the wait, so that a waiting duplicate need not reserve.
    ///
    /// The store reads the returned record after the call began, so a duplicate uses the record like the answer to a
    /// reservation, and replays the result that the record holds. After `None` the caller reserves: `None` shows
    /// neither whether there is a record nor whether the attempt still runs. A store may always return `None`. A record
    /// that can't be read is an error, as for a reservation.
    ///
    /// The engine makes one `wait` call for all duplicates of a key that wait in the same [`handle`](Store::handle) and
    /// runtime.
    ///
    /// # Errors
    /// [`StoreError`] if the store can't be reached.
    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>>;

    /// Reads the record of `key`, for operators and tests. A record that can't be read is returned as
    /// [`Inspection::damaged`] with all its stored parts.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not answer.
    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>>;

    /// Applies an operator's decision to a record, in one atomic step, and wakes its waiters.
    ///
    /// [`Inspection::decide`] returns the effect of the decision, or the reason for its refusal; the store applies that
    /// effect atomically. The record keeps its retention, and also its attempt number unless the decision removes the
    /// record. A decision is applied only to the record that its operator saw: of two different decisions about the
    /// same record, the store applies only one. A repeated decision changes nothing.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm the write, which may have taken effect if
    /// [`StoreError::may_have_landed`] returns true.
    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer>;

    /// Checks up to `batch` records that may have expired, and removes the expired records. Returns the number of
    /// removed records.
    ///
    /// Purging changes only the size of the store. If the server itself removes expired records, purging removes no
    /// record.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm; the call may be repeated.
    fn purge(&self, batch: u32) -> StoreFuture<'_, u64>;

    /// Returns a page of the records that `filter` selects, without their results, and the start of the next page.
    ///
    /// A record that exists from the first page to the last is returned once, in the order of the store, no matter what
    /// is written meanwhile. A call reads a bounded number of records; more pages may follow a page with few records or
    /// no record. A store without an order of its keys lists records only under [`Filter::scan`], and may then miss and
    /// repeat records. A record that can't be read is returned as by [`inspect`](Store::inspect). A list reads no
    /// results: only `inspect` shows that a result can't be read.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not answer. The kind of the error is [`StoreErrorKind::Unsupported`] if the
    /// store can't list records, if the store can list records only by a scan, or if another store made the cursor.
    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page>;

    /// Checks with one cheap request to each server that the store can serve calls: the store can be reached, its table
    /// has all columns, the login has the rights that calls need, and the server accepts writes. Changes nothing. A
    /// store checks what its server can answer without a write; the failures of real calls show the rest (see
    /// [`health`](StoreExt::health)).
    ///
    /// # Errors
    /// [`StoreError`] holds the reason why the store can't serve calls.
    fn ping(&self) -> StoreFuture<'_, ()>;
}

/// Receives the store's answer about one lease of [`Store::renew`]: the index of the lease, and the verdict.
pub type Answers<'a> = dyn Fn(usize, Verdict) + Send + Sync + 'a;

/// Renews `leases`, and waits for all answers.
///
/// # Errors
/// [`StoreError`] if a lease got no answer. Such a lease may or may not have been renewed.
pub async fn renew_all<S: Store + ?Sized>(store: &S, leases: &[Lease]) -> Result<Vec<Verdict>, StoreError> {
    let answers = Mutex::new(vec![None; leases.len()]);
    let answer = |at: usize, write| {
        if let Some(slot) = lock(&answers).get_mut(at) {
            *slot = Some(write);
        }
    };
    let renewed = store.renew(leases, &answer).watched(store, StoreOp::Renew).await;
    let answers: Option<Vec<_>> = lock(&answers).drain(..).collect();
    match (answers, renewed) {
        (Some(answers), _) => Ok(answers),
        (None, Err(error)) => Err(error),
        (None, Ok(())) => {
            Err(StoreError::new(StoreErrorKind::Unconfirmed, "the store did not answer the renewal of a lease"))
        }
    }
}

impl Policy {
    /// Checks that `store` can honour the durations of this policy. In addition to [`check`](Policy::check), a lease
    /// must be longer than the time limit of a call of the store; otherwise a lease may lapse during one slow call.
    /// Call this method at the start of a program: a call of a handler under a wrong policy only logs a warning.
    ///
    /// # Errors
    /// [`PolicyProblem`] names the option that the store can't honour, and suggests a value.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use idem_runtime::{MemoryStore, Policy};
    ///
    /// const PAYMENTS: Policy = Policy::new(Duration::from_secs(7 * 86_400)).lease(Duration::from_secs(10));
    /// PAYMENTS.check_with(&MemoryStore::new())?;
    /// # Ok::<(), idem_runtime::policy::PolicyProblem>(())
    /// ```
    pub fn check_with<S: Store + ?Sized>(&self, store: &S) -> Result<(), PolicyProblem> {
        self.check()?;
        self.check_lease(store)
    }

    /// Checks that the lease is longer than the time limit of a call of `store`.
    pub(crate) fn check_lease<S: Store + ?Sized>(&self, store: &S) -> Result<(), PolicyProblem> {
        let response_timeout = store.response_timeout();
        if self.lease > response_timeout {
            return Ok(());
        }
        Err(PolicyProblem::LeaseBelowResponseTimeout { lease: self.lease, response_timeout })
    }
}
