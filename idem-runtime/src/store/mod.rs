//! The contract between the engine and a store.

mod error;
pub(crate) mod flight;
mod forward;
mod future;
mod health;
pub(crate) mod heartbeat;
mod listing;
pub(crate) mod operator;
mod outage;
mod repeats;
mod watch;

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use self::error::{StoreError, StoreErrorKind};
#[doc(inline)]
pub use self::forward::forward;
#[allow(unused_imports, reason = "without a store of the library nobody else forwards")]
pub(crate) use self::forward::store_of_shared;
pub use self::future::StoreFuture;
pub use self::health::{Health, HealthProblem};
pub use self::heartbeat::Heartbeats;
pub(crate) use self::heartbeat::{Beat, Beating, Callback, EndsLate, LastWait, LeaseStanding, Limits, Timer, UnderWay};
pub use self::listing::{Counts, Cursor, Filter, Page, Stats};
use self::operator::Operator;
#[cfg(feature = "postgres")]
pub(crate) use self::repeats::Repeats;
use crate::key::Key;
use crate::metrics::{Snapshot, StoreOp};
use crate::policy::{Policy, PolicyProblem};
pub use crate::record::decision::{Action, Decided, Decision};
pub use crate::record::lease::{Lease, OwnerToken};
pub use crate::record::request::{Finish, Inspection, Release, Reservation, ReserveRequest, Standing, Verdict};
pub use crate::record::revision::{Revision, RevisionError};
pub use crate::record::trail::Holder;
use crate::sync::lock;

/// Where records are kept.
///
/// The contract, which the suite in `idem_runtime::conformance` (feature `conformance`) checks:
///
/// - **Atomic.** [`reserve`](Store::reserve) finds or changes the record in one step; of many concurrent calls exactly
///   one is answered [`Reservation::Granted`]. What a reservation does with the record it meets is decided by
///   [`Record::admit`](crate::record::Record::admit); the store makes that decision atomic.
/// - **Compare-and-set.** [`begin`](Store::begin), [`renew`](Store::renew), [`finish`](Store::finish) and
///   [`release`](Store::release) change a pending record only, and only if its owner token is the one presented; all but a
///   release also compare the number of the attempt. A refusal is an answer ([`Verdict::Refused`]), not an error.
/// - **Repeatable.** Every operation may be repeated with the same owner token; one that took effect although its answer
///   got lost is recognised as done.
/// - **Retained.** A pending record outlives its lease by its `ttl`; a finished or released one is kept for `ttl` from
///   that write. Nothing is forgotten earlier, and an expired record is treated as absent whether or not it has been
///   cleaned up.
/// - **One clock.** Leases and retentions are measured by the store's own clock, never by comparing two machines'.
/// - **Told.** A record keeps the [`Trail`](crate::record::Trail) that `admit`, `decide` and the lease give it, and the store
///   notes when the key was first seen and when the latest attempt began. Nothing is decided by them.
/// - **Bounded.** Every call ends; a store that can hang has a timeout of its own.
/// - **Cancel safe.** Any returned future may be dropped at any time; its write then happened in full or not at all.
///
/// There are no default bodies: a `reserve` made of a read and a write would compile, and race.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a `Store`",
    label = "not an idempotency store",
    note = "name a value that implements `idem_runtime::Store`, or derefs to or shares one, for example `store = app.idempotency`"
)]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// What errors and logs call the store, for example `redis`.
    fn name(&self) -> &'static str;

    /// Another handle to the same store and the same [`Heartbeats`], for work that outlives a call.
    ///
    /// Each operation takes one. Duplicates of one key share a wait if theirs are the same `Arc`; a store that makes a new one
    /// each time works as well, and each duplicate waits by itself.
    fn handle(&self) -> Arc<dyn Store>;

    /// A handle of the same store and the same [`Heartbeats`] for the library's own renewals and late writes.
    ///
    /// They run on a thread of their own ([`Clock::spawn`](crate::clock::Clock::spawn)). A handle that shares no connection, no queue and no runtime with
    /// other callers keeps leases alive while those are slow or blocked. It should open its connection at its first use. A
    /// store that has nothing to share returns [`handle`](Store::handle).
    fn upkeep(&self) -> Arc<dyn Store>;

    /// What tells this application's records from those of others in the same place. It enters child keys
    /// ([`Attempt::child_key`](crate::Attempt::child_key)), so that two applications never share one. Empty if there is none.
    fn namespace(&self) -> &str;

    /// How long one call of the store may take before it is given up; zero if calls can't hang. A lease has to be longer.
    fn response_timeout(&self) -> Duration;

    /// The leases this handle keeps alive, its clock, and its late writes.
    fn heartbeats(&self) -> &Heartbeats;

    /// Reserves `request.key` for one attempt, or reports what is there, in one atomic step.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not answer; it is never an answer such as "no record".
    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation>;

    /// Marks in the record that the body of this attempt begins, and renews the lease. Under `on_crash = fail`, and where
    /// `max_attempts` counts, the engine polls no body before this write is confirmed: an attempt that lapses without the mark
    /// is neither interrupted nor counted.
    ///
    /// Owner token and `lease.attempt` are compared, as in [`finish`](Store::finish). A lease that has lapsed by the store's
    /// clock is refused, unless the record is marked already: so a request that arrives late marks nothing. The condition is
    /// [`Record::may_begin`](crate::record::Record::may_begin).
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm; [`StoreError::may_have_landed`] tells whether it may be done.
    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict>;

    /// Renews the leases and calls `answer` for each, by its place in `leases`, as soon as the store has answered for it. A
    /// lease that has lapsed is renewed if nobody took over.
    ///
    /// Owner token and `lease.attempt` are compared, as in [`finish`](Store::finish). A lease without an answer is renewed or
    /// not: its record could not be reached, or was locked by somebody else. Such a lease must not hold up the others.
    ///
    /// # Errors
    /// [`StoreError`] says why leases have no answer. The answers that were given stand.
    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()>;

    /// Turns the pending record into a finished one, kept for `lease.ttl` from now, and wakes its waiters.
    ///
    /// Refused unless owner token and `lease.attempt` are those of the record. The token alone is not enough: a reservation
    /// that arrives again late may get its owner a later attempt, whose number would then go backwards.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm; [`StoreError::may_have_landed`] tells whether it may be done.
    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict>;

    /// Ends the attempt without a result, keeps the record for `lease.ttl` from now, and wakes its waiters.
    ///
    /// `lease.attempt` is not looked at: a caller that never heard the answer to its reservation doesn't know it.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm; [`StoreError::may_have_landed`] tells whether it may be done.
    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict>;

    /// Waits until attempt `attempt` of `key` is no longer pending, and at most `at_most`; may return early. Tells what is
    /// recorded then, so that a waiting duplicate need not ask again.
    ///
    /// What is told was read after the call began, and is as good as the answer to a reservation: a duplicate replays the
    /// result in it. `None` says nothing, neither that there is no record nor that the attempt goes on: the caller reserves. A
    /// store may always answer so. A record that can't be read is an error, as for a reservation.
    ///
    /// The engine makes one such call for all duplicates of a key that wait in one [`handle`](Store::handle) and runtime.
    ///
    /// # Errors
    /// [`StoreError`] if the store can't be asked.
    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>>;

    /// Looks at the record of `key`, for operators and tests. A record that can't be read is an
    /// [`Inspection::damaged`] of all that is stored.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not answer.
    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>>;

    /// Does with a record what an operator has decided, in one atomic step, and wakes its waiters.
    ///
    /// [`Inspection::decide`] says what that is, and when it is refused; the store makes that decision atomic. The record keeps its
    /// retention, and unless it is removed, its attempt number. A decision is applied only to the record that its operator
    /// saw: of two decisions about the same record one is applied. A decision may be repeated: it then changes nothing.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm; [`StoreError::may_have_landed`] tells whether it may be done.
    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, Decided>;

    /// Looks at up to `batch` records that may have expired, and removes those that have. Returns how many it removed.
    ///
    /// Purging changes nothing but the size of the store. A store whose server removes expired records removes none here.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm; the call may be repeated.
    fn purge(&self, batch: u32) -> StoreFuture<'_, u64>;

    /// Some of the records that `filter` asks for, without their results, and where the next ones begin.
    ///
    /// A record that is there from the first page to the last is shown once, whatever is written meanwhile, in the order of the
    /// store. A call looks at a bounded number of records; a page with few of them, or none, may be followed by others. A
    /// store that has no order to walk by does so only under [`Filter::scan`], where records may be missed and repeated. Records
    /// that can't be read are shown as [`inspect`](Store::inspect) shows them; damage to a result alone is seen there only.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not answer; of kind [`StoreErrorKind::Unsupported`] if it can't list records, or if
    /// the filter has to ask for a scan, or has the cursor of another store.
    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page>;

    /// Whether the store can be reached: one cheap exchange with it, or with each of its servers. Changes nothing.
    ///
    /// # Errors
    /// [`StoreError`] says why it can't be.
    fn ping(&self) -> StoreFuture<'_, ()>;
}

/// What every store can do besides; for `Arc<dyn Store>`, too.
pub trait StoreExt: Store {
    /// Waits until late writes and renewals are done; see [`Heartbeats::flush`]. For the end of a program.
    fn flush(&self) -> impl Future<Output = ()> + Send + '_ {
        self.heartbeats().flush()
    }

    /// What this handle and its clones have counted; see [`crate::metrics`].
    fn metrics(&self) -> Snapshot {
        self.heartbeats().snapshot(self.name())
    }

    /// Whether calls can be served: for a readiness probe. Pings the store once.
    ///
    /// ```
    /// # use idem_runtime::{MemoryStore, StoreExt};
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// let store = MemoryStore::new();
    /// let health = store.health().await;
    /// assert!(health.is_ready(), "{health}");
    /// # });
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is written.
    fn health(&self) -> impl Future<Output = Health> + Send + '_ {
        health::check(self)
    }

    /// What a person does about a record: see [`Operator`].
    fn operator(&self) -> Operator<'_, Self> {
        Operator::new(self)
    }
}

impl<S: Store + ?Sized> StoreExt for S {}

/// Takes what a store says of one lease of [`Store::renew`]: its place among the leases, and the answer.
pub type Answers<'a> = dyn Fn(usize, Verdict) + Send + Sync + 'a;

/// Renews `leases`, and waits for all answers.
///
/// # Errors
/// [`StoreError`] if a lease got no answer; each of them is then renewed or not.
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
    /// Whether the durations can be honoured by `store`: besides [`check`](Policy::check), a lease must be longer than a call
    /// of the store may take, or one call that is slow costs the lease. For the start of a program; a call under such a
    /// policy only warns.
    ///
    /// # Errors
    /// [`PolicyProblem`] names the option that can't be honoured and what to write instead.
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
        let response_timeout = store.response_timeout();
        if self.lease > response_timeout {
            return Ok(());
        }
        Err(PolicyProblem::LeaseBelowResponseTimeout { lease: self.lease, response_timeout })
    }
}
