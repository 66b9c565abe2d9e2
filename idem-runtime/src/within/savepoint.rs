//! Savepoints of calls: a call that does not complete leaves no write of its body.
//!
//! Each call has a savepoint. A call that ends without a completed record is rolled back to its savepoint, so that the
//! writes of its body disappear even if the user swallows the error and commits.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::mailbox::{MailboxRequest, Sender};
use super::open::TransactionNotes;
use super::turns::{CallNode, Turn};
use crate::engine::{CommittedRecord, has_unsent};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::{Finish, Lease, Release, Reservation, ReserveRequest, StoredResult, Verdict};
use crate::store::transaction::{TransactionStore, is_conflict};
use crate::store::{Store, StoreError, StoreErrorKind};
use crate::sync::lock;

/// Size in bytes from which a result may be too large for the server. Such a result is written inside of a further
/// savepoint, so that a refusal by the server undoes only the write of the result.
const LARGE: usize = 1024 * 1024;

/// A call and its savepoint.
pub(super) struct SavepointScope<'a, C> {
    transaction: C,
    notes: &'a TransactionNotes,
    /// Store whose sender publishes the messages of the call after the commit.
    outbox: Option<Arc<dyn Store>>,
    /// True if the writes of a body that does not complete are undone; false in shadow mode.
    undoes: bool,
    state: Mutex<CallState<'a>>,
}

struct CallState<'a> {
    turn: Option<Turn<'a>>,
    /// Number of open savepoints of the call, at most two: one of the call itself, and one of a write in the call.
    saved: usize,
    /// The call, once it has the turn.
    call: Option<Arc<CallNode>>,
    /// The reservation of the call, once the key is reserved.
    reserved: Option<ReserveRequest>,
}

impl<'a, C: TransactionStore> SavepointScope<'a, C> {
    /// Makes the scope of a call. If `undoes`, the writes of a body that does not complete are undone. `outbox`: store
    /// whose sender publishes the messages of the call.
    pub(super) fn new(
        transaction: C,
        notes: &'a TransactionNotes,
        undoes: bool,
        outbox: Option<Arc<dyn Store>>,
    ) -> Self {
        let state = CallState { turn: None, saved: 0, call: None, reserved: None };
        Self { transaction, notes, outbox, undoes, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, CallState<'a>> {
        lock(&self.state)
    }

    async fn save(&self) -> Result<(), StoreError> {
        self.transaction.save().await?;
        self.state().saved += 1;
        Ok(())
    }

    async fn keep(&self) -> Result<(), StoreError> {
        self.transaction.keep(|| self.state().saved -= 1).await
    }

    async fn undo(&self) -> Result<(), StoreError> {
        self.transaction.undo().await?;
        self.state().saved -= 1;
        Ok(())
    }

    /// Undoes the writes before `error`, and returns the error of the call. A conflict may have undone the whole
    /// transaction, with its savepoints.
    async fn undo_after(&self, error: StoreError) -> StoreError {
        match self.undo().await {
            Err(undone) if !is_conflict(&error) => undone,
            _ => error,
        }
    }

    /// Runs `work` inside of a savepoint, so that `work` takes effect in full or not at all.
    async fn saved<T>(&self, work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        self.save().await?;
        match work.await {
            Ok(done) => {
                self.keep().await?;
                Ok(done)
            }
            Err(error) => Err(self.undo_after(error).await),
        }
    }

    /// Waits until all calls in this transaction have ended, except for the calls that enclose this call.
    pub(super) async fn take_turn(&self, node: &Arc<CallNode>) -> Result<(), StoreError> {
        if self.state().turn.is_none() {
            let turn = Turn::take(&self.notes.calls, node, &*self.notes.clock).await?;
            let mut state = self.state();
            (state.turn, state.call) = (Some(turn), Some(Arc::clone(node)));
        }
        Ok(())
    }

    async fn reserve(&self, request: ReserveRequest) -> Result<Reservation, StoreError> {
        if self.undoes && request.max_attempts.is_some() && !self.notes.note(|_| ()) {
            // There is no journal, so the user began the transaction, and no attempt is counted after a rollback.
            let message = "`max_attempts` can't count in a transaction that you begin yourself, as a rollback takes the \
                           attempt with it; use `transact`, which counts it after the rollback";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        self.save().await?;
        let reserved = match self.reserve_marked(&request).await {
            Ok(reserved) => reserved,
            Err(error) => return Err(self.undo_after(error).await),
        };
        match &reserved {
            Reservation::Granted { .. } if self.undoes => {
                if request.on_crash == OnCrash::Fail {
                    // The record must show that the body has begun even after the body's writes are undone.
                    self.keep().await?;
                    self.save().await?;
                }
                self.notes.note(|journal| journal.begins(self.transaction.place(), &request));
                self.state().reserved = Some(request.clone());
            }
            _ => self.keep().await?,
        }
        if let Reservation::Finished { record, .. } = &reserved
            && has_unsent(&record.state)
        {
            let written_by = (record.owner.tag(), record.attempt);
            let found_by = Some((request.ttl, request.lease));
            self.leaves_later(CommittedRecord { key: request.key, written_by, found_by });
        }
        Ok(reserved)
    }

    /// Reserves a key. Under `on_crash = fail`, also marks in the record that the body begins: the reservation and the
    /// mark are committed together.
    async fn reserve_marked(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let reserved = self.transaction.reserve(request).await?;
        if let Reservation::Granted { lease, .. } = &reserved
            && request.on_crash == OnCrash::Fail
            && self.transaction.begin(lease).await? == Verdict::Refused
        {
            let message = "the lease lapsed before the record could say that the body begins";
            return Err(StoreError::new(StoreErrorKind::Aborted, message));
        }
        Ok(reserved)
    }

    async fn finish(&self, lease: &Lease, finish: &Finish) -> Result<Verdict, StoreError> {
        match finish {
            Finish::Completed(payload) => {
                let written = match !self.undoes || is_large(payload) {
                    true => self.saved(self.transaction.finish(lease, finish)).await?,
                    false => self.transaction.finish(lease, finish).await?,
                };
                if written == Verdict::Applied {
                    if self.undoes {
                        self.over().await?;
                    }
                    if payload.has_messages() {
                        let written_by = (lease.owner.tag(), lease.attempt);
                        self.leaves_later(CommittedRecord { key: lease.key.clone(), written_by, found_by: None });
                    }
                }
                Ok(written)
            }
            Finish::Failed(_) => {
                let written = self.end_undone(lease, UndoneEnd::Finish(finish)).await?;
                if written == Verdict::Applied
                    && let Some(request) = self.state().reserved.take()
                {
                    self.notes.note(|journal| journal.fails(&request, finish));
                }
                Ok(written)
            }
        }
    }

    async fn release(&self, lease: &Lease, release: Release) -> Result<Verdict, StoreError> {
        self.end_undone(lease, UndoneEnd::Release(release)).await
    }

    /// Undoes the writes of the body, and ends its attempt.
    async fn end_undone(&self, lease: &Lease, ending: UndoneEnd<'_>) -> Result<Verdict, StoreError> {
        let Some(request) = self.state().reserved.clone() else {
            return self.saved(ending.write(&self.transaction, lease)).await;
        };
        self.transaction.rewind().await?;
        self.forgets_messages();
        let written = match request.on_crash {
            OnCrash::Fail => ending.write(&self.transaction, lease).await?,
            // The rollback to the savepoint has also undone the reservation, so the key is reserved again, with the
            // same attempt number.
            _ => match self.transaction.reserve(&request).await? {
                Reservation::Granted { lease, .. } => ending.write(&self.transaction, &lease).await?,
                // Another transaction has reserved the key in between, so no record of this attempt is written.
                _ => Verdict::Applied,
            },
        };
        self.over().await?;
        Ok(written)
    }

    /// Notes that `record` has messages, which leave after the commit.
    fn leaves_later(&self, record: CommittedRecord) {
        if let (Some(store), Some(call)) = (&self.outbox, &self.state().call) {
            self.notes.note(|journal| journal.outbox.recorded(call, store, record));
        }
    }

    /// Forgets the messages of the call and of the calls in its body, whose writes are undone.
    fn forgets_messages(&self) {
        if let Some(call) = &self.state().call {
            self.notes.note(|journal| journal.outbox.forget(call));
        }
    }

    /// Keeps the writes of the call, by releasing its savepoint.
    async fn over(&self) -> Result<(), StoreError> {
        if self.state().saved > 0 {
            self.keep().await?;
        }
        Ok(())
    }

    /// Undoes the writes of a call that is over although its attempt has no recorded end: the lease was lost, or the
    /// result could not be recorded.
    pub(super) async fn end(&self) {
        while self.state().saved > 0 {
            if let Err(error) = self.noted(self.undo().await) {
                tracing::debug!(
                    %error,
                    "the writes of a call could not be undone; its transaction can't be committed either"
                );
                return;
            }
            self.forgets_messages();
        }
        self.state().turn = None;
    }

    /// Answers a request of the engine. If the engine no longer waits for the answer, the answer is dropped.
    pub(super) async fn answer(&self, ask: MailboxRequest) {
        let at = &self.transaction;
        match ask {
            MailboxRequest::Reserve(request, answer) => self.send(answer, self.reserve(request).await),
            MailboxRequest::Finish(lease, finish, answer) => self.send_end(answer, self.finish(&lease, &finish).await),
            MailboxRequest::Release(lease, release, answer) => {
                self.send_end(answer, self.release(&lease, release).await);
            }
            MailboxRequest::Wait(key, at_most, answer) => self.send(answer, self.wait(&key, at_most).await),
            MailboxRequest::Inspect(key, answer) => self.send(answer, self.saved(at.inspect(&key)).await),
            MailboxRequest::Decide(decision, answer) => self.send(answer, self.saved(at.decide(&decision)).await),
        }
    }

    fn send<T>(&self, answer: Sender<T>, done: Result<T, StoreError>) {
        drop(answer.send(self.noted(done)));
    }

    fn send_end(&self, answer: Sender<Verdict>, done: Result<Verdict, StoreError>) {
        drop(answer.send(self.noted(done).map_err(ended)));
    }

    /// Notes a conflict with another transaction in the journal.
    fn noted<T>(&self, done: Result<T, StoreError>) -> Result<T, StoreError> {
        done.inspect_err(|error| {
            if is_conflict(error) {
                self.notes.note(|journal| journal.conflict = true);
            }
        })
    }

    async fn wait(&self, key: &Key, at_most: Duration) -> Result<(), StoreError> {
        self.save().await?;
        match self.transaction.wait(key, at_most).await {
            Ok(true) => self.keep().await,
            Ok(false) => self.undo().await,
            Err(error) => Err(self.undo_after(error).await),
        }
    }
}

/// End of an attempt whose writes are undone.
#[derive(Clone, Copy)]
enum UndoneEnd<'a> {
    Finish(&'a Finish),
    Release(Release),
}

impl UndoneEnd<'_> {
    async fn write<C: TransactionStore>(self, transaction: &C, lease: &Lease) -> Result<Verdict, StoreError> {
        match self {
            Self::Finish(finish) => transaction.finish(lease, finish).await,
            Self::Release(release) => transaction.release(lease, release).await,
        }
    }
}

/// Converts an error at the end of an attempt. A retry in the same transaction does not help, so errors that suggest a
/// retry become `Aborted`.
fn ended(error: StoreError) -> StoreError {
    match error.kind() {
        StoreErrorKind::TooLarge | StoreErrorKind::Corrupt | StoreErrorKind::Aborted => error,
        _ => StoreError::new(StoreErrorKind::Aborted, error.to_string()).with_source(error),
    }
}

fn is_large(payload: &StoredResult) -> bool {
    payload.stored_bytes() >= LARGE
}

/// Guard that undoes the writes of a call if the call is dropped before its end.
pub(super) struct Undo<'a, C: TransactionStore>(pub(super) Arc<SavepointScope<'a, C>>);

impl<C: TransactionStore> Drop for Undo<'_, C> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        let is_undone = state.saved > 0;
        while state.saved > 0 {
            self.0.transaction.undo_immediately();
            state.saved -= 1;
        }
        state.turn = None;
        drop(state);
        if is_undone {
            self.0.forgets_messages();
        }
    }
}
