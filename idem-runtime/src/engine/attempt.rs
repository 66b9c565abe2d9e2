//! Attempts: the runs of handler bodies, and the attempt that is current on a thread.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::poll_notes::note_refusal;
use crate::clock::Instant;
use crate::error::Error;
use crate::key::Key;
use crate::policy::{Backoff, Policy};
use crate::record::{Lease, LeaseMark, OwnerToken, Provenance, Verdict};
use crate::store::{StepJournal, Store, StoreError, renew_all};

thread_local! {
    /// Attempt whose body is being polled on this thread.
    static CURRENT: RefCell<Option<Attempt>> = const { RefCell::new(None) };
}

/// Returns the attempt in which this code runs.
///
/// # Errors
/// [`Error::NoAttempt`] outside of the body of an idempotent function, and in a body whose message has no key
/// (`missing_key = run`).
///
/// `current` also returns the attempt after each `await` of the body. A spawned task has no current attempt: give the
/// task a clone of the [`Attempt`].
///
/// ```
/// # use idem_runtime::{Error, MemoryStore, current, idempotent};
/// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
/// async fn pay(store: &MemoryStore, id: u32) -> Result<String, Error> {
///     let attempt = current()?;
///     assert_eq!(attempt.number(), 1);
///     // The child key is the same on every attempt, so the payment provider recognises a retry.
///     Ok(attempt.child_key("charge"))
/// }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # assert_eq!(pay(&MemoryStore::new(), 42).await.unwrap().len(), 36);
/// # assert!(current().is_err());
/// # });
/// ```
pub fn current() -> Result<Attempt, Error> {
    CURRENT.with_borrow(Clone::clone).ok_or(Error::NoAttempt)
}

/// One run of a handler body.
///
/// A body that runs without a reservation (mode `off` or `shadow`, `on_store_error = run`) also has an attempt, so that
/// a handler works the same in every mode. The [`number`](Attempt::number) of that attempt is 0.
#[derive(Clone)]
pub struct Attempt {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) lease: Lease,
    /// Time when the request for the reservation was sent, on the clock of the store handle.
    pub(crate) reserved_at: Instant,
    pub(crate) backoff: Backoff,
    /// Parts that only some attempts have; `None` if there are none. One pointer, because every call carries it.
    surroundings: Option<Arc<Surroundings>>,
}

/// Parts that only some attempts have.
struct Surroundings {
    /// Attempt whose body made this call; `None` for a call outside of a body.
    parent: Option<Attempt>,
    /// Messages of a body whose result is not recorded; `None` under a reservation, or if the store handle has no
    /// sender.
    unrecorded: Option<Arc<StepJournal>>,
}

impl Attempt {
    /// Creates an attempt for `key` without a reservation.
    pub(crate) fn unprotected(store: Arc<dyn Store>, key: Key, policy: &Policy) -> Self {
        let lease = Lease {
            key,
            owner: OwnerToken::from_bytes([0; OwnerToken::BYTES]),
            attempt: 0,
            attempts_used: 0,
            duration: policy.lease,
            ttl: policy.ttl,
            on_crash: policy.on_crash,
            fingerprint: None,
            provenance: Provenance::default(),
            mark: LeaseMark::default(),
        };
        let unrecorded = store.context().sender().map(|_| Arc::default());
        Self::within(store, lease, Instant::new(Duration::ZERO), policy.backoff, unrecorded)
    }

    pub(crate) fn new(store: Arc<dyn Store>, lease: Lease, reserved_at: Instant, backoff: Backoff) -> Self {
        Self::within(store, lease, reserved_at, backoff, None)
    }

    #[inline]
    fn within(
        store: Arc<dyn Store>,
        lease: Lease,
        reserved_at: Instant,
        backoff: Backoff,
        unrecorded: Option<Arc<StepJournal>>,
    ) -> Self {
        let parent = CURRENT.with_borrow(Clone::clone);
        let has_some = parent.is_some() || unrecorded.is_some();
        let surroundings = has_some.then(|| Arc::new(Surroundings { parent, unrecorded }));
        Self { store, lease, reserved_at, backoff, surroundings }
    }

    /// Returns the place of the messages of a body whose result is not recorded; `None` under a reservation, or if the
    /// store handle has no sender.
    pub(super) fn unrecorded(&self) -> Option<&Arc<StepJournal>> {
        self.surroundings.as_ref()?.unrecorded.as_ref()
    }

    /// Returns the key of the operation.
    pub fn key(&self) -> &Key {
        &self.lease.key
    }

    /// Returns the number of the attempt, from 1 and strictly increasing for a key. The number is a fencing token for a
    /// system that can refuse writes of an older attempt. The number is 0 if the body runs without a reservation.
    pub fn number(&self) -> u32 {
        self.lease.attempt
    }

    /// Returns a key for a call to another API that accepts idempotency keys. The child key is a UUID made from the
    /// namespace of the store, the key of this operation and `name`, and is the same on every attempt.
    ///
    /// No other input enters the child key. If a key is used again after its retention, the new operation has the child
    /// keys of the old operation, and the other API may treat the new call as a repetition of the old call: never use a
    /// key for two operations. Two applications that share an account at that API need stores with different namespaces
    /// ([`Store::namespace`]).
    pub fn child_key(&self, name: &str) -> String {
        crate::key::child_key(self.store.namespace(), self.key(), name)
    }

    /// Returns whether the body runs under a reservation, so that its result will be recorded.
    pub fn is_protected(&self) -> bool {
        self.number() > 0
    }

    /// Returns the time for which the lease is certainly held. Makes no call of the store. Zero means that another
    /// attempt may have taken over, that there is no reservation, or that the call has ended.
    pub fn lease_remaining(&self) -> Duration {
        if !self.is_protected() {
            return Duration::ZERO;
        }
        self.store.context().leases().lease_remaining(self.lease.owner)
    }

    /// Renews the lease now. Use this method just before a side effect, to be sure that the lease is still held.
    /// Without a reservation this method returns `Ok` and does not ask the store.
    ///
    /// # Errors
    /// [`Error::LeaseLost`] if another attempt took over, or if the record was removed. [`Error::Store`] if the store
    /// failed: it is unknown whether the lease is held.
    ///
    /// # Cancel safety
    /// Cancel safe. If the future is dropped, it is unknown whether the lease was renewed.
    pub async fn confirm_lease(&self) -> Result<(), Error> {
        if !self.is_protected() {
            return Ok(());
        }
        let asked_at = self.store.context().clock().now();
        match renew_all(&self.store, std::slice::from_ref(&self.lease)).await.map(|answers| answers.first().copied()) {
            Ok(Some(Verdict::Applied)) => {
                self.store.context().leases().confirmed(self.lease.owner, asked_at);
                Ok(())
            }
            Ok(_) => Err(self.refused()),
            Err(source) => Err(self.unconfirmed(source)),
        }
    }
}

impl Attempt {
    /// Returns the error for a body whose renewal or journal entry the store has refused.
    pub(super) fn refused(&self) -> Error {
        note_refusal();
        let (key, store, attempt) = (self.key().clone(), self.store.context().name(), self.number());
        Error::LeaseLost { key, store, attempt, retry_after: self.pause(), source: None }
    }

    /// Returns the error for a body whose renewal or journal entry the store has not confirmed.
    pub(super) fn unconfirmed(&self, source: StoreError) -> Error {
        note_refusal();
        let (key, store, retry_after) = (self.key().clone(), self.store.context().name(), self.pause());
        Error::Store { key, store, started: true, may_be_reserved: true, retry_after, source }
    }

    /// Returns the pause before the message is delivered again if this attempt fails.
    pub(crate) fn pause(&self) -> Duration {
        self.backoff.after(self.number(), self.lease.owner.seed())
    }
}

impl Attempt {
    /// Records the end of a body without a reservation, and returns the pause before the message is delivered again. No
    /// record counts the failures of a body without a reservation, so the store handle counts the failures by key.
    pub(crate) fn pause_unprotected(&self, is_ok: bool) -> Duration {
        let failures = self.store.context().counts().unrecorded_failures(self.key(), is_ok);
        self.backoff.after(failures.max(1), self.key().spread() ^ u64::from(failures))
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt").field("key", self.key()).field("number", &self.number()).finish_non_exhaustive()
    }
}

/// Returns whether the current attempt, or an attempt that encloses it, has `key`.
pub(crate) fn is_inside(key: &Key) -> bool {
    CURRENT.with_borrow(|current| {
        let mut attempt = current.as_ref();
        while let Some(it) = attempt {
            if it.key() == key && it.is_protected() {
                return true;
            }
            attempt = it.surroundings.as_ref().and_then(|around| around.parent.as_ref());
        }
        false
    })
}

/// Returns whether the body that is being polled on this thread is the body of another protected attempt than
/// `attempt`.
pub(super) fn is_inside_another(attempt: &Attempt) -> bool {
    CURRENT.with_borrow(|current| {
        current.as_ref().is_some_and(|current| current.is_protected() && current.lease.owner != attempt.lease.owner)
    })
}

/// Makes an attempt the current attempt of this thread until the guard is dropped.
pub(crate) struct CurrentGuard<'a> {
    slot: &'a mut Option<Attempt>,
}

impl<'a> CurrentGuard<'a> {
    pub(crate) fn enter(slot: &'a mut Option<Attempt>) -> Self {
        CURRENT.with_borrow_mut(|current| std::mem::swap(current, slot));
        Self { slot }
    }
}

impl Drop for CurrentGuard<'_> {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| std::mem::swap(current, self.slot));
    }
}
