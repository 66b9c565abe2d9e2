//! The contract between the engine and a store.

use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::record::{Payload, Record, State};
use crate::sync::lock;
use crate::{Fingerprint, Heartbeats, Key, Lease, OnCrash, Owner};

/// Where records are kept.
///
/// The contract, which the suite in `idem_runtime::conformance` (feature `conformance`) checks:
///
/// - **Atomic.** [`reserve`](Store::reserve) finds or changes the record in one step; of many concurrent calls exactly
///   one is answered [`Reservation::Reserved`]. What a reservation does with the record it meets is decided by
///   [`Record::meet`]; the store makes that decision atomic.
/// - **Compare-and-set.** [`renew`](Store::renew), [`finish`](Store::finish) and [`release`](Store::release) change a
///   pending record only, and only if its owner token is the one presented; a renewal and a finish also compare the
///   number of the attempt. A refusal is an answer ([`Write::Refused`]), not an error.
/// - **Repeatable.** Every operation may be repeated with the same owner token; one that took effect although its answer
///   got lost is recognised as done.
/// - **Retained.** A pending record outlives its lease by its `ttl`; a finished or released one is kept for `ttl` from
///   that write. Nothing is forgotten earlier, and an expired record is treated as absent whether or not it has been
///   cleaned up.
/// - **One clock.** Leases and retentions are measured by the store's own clock, never by comparing two machines'.
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
    fn handle(&self) -> Arc<dyn Store>;

    /// A handle of the same store and the same [`Heartbeats`] for the library's own renewals and late writes.
    ///
    /// They run on a thread of their own ([`Clock::spawn`](crate::Clock::spawn)). A handle that shares no connection, no queue and no runtime with
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
    fn reserve<'a>(&'a self, request: &'a Reserve) -> StoreFuture<'a, Reservation>;

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
    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Write>;

    /// Ends the attempt without a result, keeps the record for `lease.ttl` from now, and wakes its waiters.
    ///
    /// `lease.attempt` is not looked at: a caller that never heard the answer to its reservation doesn't know it.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm; [`StoreError::may_have_landed`] tells whether it may be done.
    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Write>;

    /// Waits until attempt `attempt` of `key` is no longer pending, and at most `at_most`; may return early.
    ///
    /// # Errors
    /// [`StoreError`] if the store can't be asked.
    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()>;

    /// What is recorded for `key`, for operators and tests.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not answer.
    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>>;

    /// Lets the next delivery of `key` run again: the decision of an operator.
    ///
    /// The record becomes released, with no attempt counted against `max_attempts`, and keeps its retention and its
    /// attempt number. Refused unless the latest attempt is `attempt`, the one the operator looked at, and holds no
    /// live lease. A recorded result is given up.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not confirm.
    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Write>;
}

/// Takes what a store says of one lease of [`Store::renew`]: its place among the leases, and the answer.
pub type Answers<'a> = dyn Fn(usize, Write) + Send + Sync + 'a;

/// Renews `leases`, and waits for all answers.
///
/// # Errors
/// [`StoreError`] if a lease got no answer; each of them is then renewed or not.
pub async fn renew_all<S: Store + ?Sized>(store: &S, leases: &[Lease]) -> Result<Vec<Write>, StoreError> {
    let answers = Mutex::new(vec![None; leases.len()]);
    let answer = |at: usize, write| {
        if let Some(slot) = lock(&answers).get_mut(at) {
            *slot = Some(write);
        }
    };
    let renewed = store.renew(leases, &answer).await;
    let answers: Option<Vec<_>> = lock(&answers).drain(..).collect();
    match (answers, renewed) {
        (Some(answers), _) => Ok(answers),
        (None, Err(error)) => Err(error),
        (None, Ok(())) => Err(StoreError::new(StoreErrorKind::Unknown, "the store did not answer for a lease")),
    }
}

/// What an attempt asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reserve {
    /// The key to reserve.
    pub key: Key,
    /// The identity of the attempt.
    pub owner: Owner,
    /// How long the reservation is honoured without a renewal.
    pub lease: Duration,
    /// How long the record is remembered.
    pub ttl: Duration,
    /// The fingerprint of the payload.
    pub fingerprint: Option<Fingerprint>,
    /// Whether a lapsed attempt may be taken over.
    pub on_crash: OnCrash,
    /// How many attempts may start.
    pub max_attempts: Option<NonZeroU32>,
}

impl Reserve {
    /// The lease to release if the answer to this request never arrives.
    pub(crate) fn unanswered(&self) -> Lease {
        Record::first(self).lease(self)
    }
}

/// The answer to a [`Reserve`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reservation {
    /// The owner of the request has released the key already: the request arrived late. Nothing was changed; another attempt
    /// needs another owner token.
    Released {
        /// The latest attempt.
        attempt: u32,
    },
    /// Pending and mine: run the body.
    Reserved {
        /// What the attempt presents with every later write.
        lease: Lease,
        /// Whether an attempt whose lease had lapsed was taken over.
        takeover: bool,
    },
    /// Another attempt holds the key: reject, or wait.
    Pending {
        /// Its number.
        attempt: u32,
        /// When its lease lapses unless it is renewed; never zero.
        lapses_in: Duration,
    },
    /// Completed or failed: replay it.
    Finished(Record),
    /// The same key with another fingerprint.
    Mismatch {
        /// The latest attempt.
        attempt: u32,
    },
    /// A body started and did not return, and may not run again.
    Interrupted {
        /// The attempt that was interrupted.
        attempt: u32,
    },
    /// As many attempts as are allowed have started.
    Exhausted {
        /// How many that were.
        attempts: u32,
    },
}

/// Whether a compare-and-set was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Write {
    /// The record is as asked for, by this call or by an earlier one with the same owner token.
    Done,
    /// The record belongs to somebody else, or is gone; nothing was changed.
    Refused,
}

/// How an attempt ends with a result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Finish {
    /// The body succeeded.
    Completed(Payload),
    /// The body returned an error that is to be replayed.
    Failed(Payload),
}

impl Finish {
    /// The result, or why there is none.
    pub fn payload(&self) -> &Payload {
        match self {
            Self::Completed(payload) | Self::Failed(payload) => payload,
        }
    }

    /// The state the record gets.
    pub fn state(&self) -> State {
        match self {
            Self::Completed(payload) => State::Completed(payload.clone()),
            Self::Failed(payload) => State::Failed(payload.clone()),
        }
    }
}

/// How an attempt ends without a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Release {
    /// The body returned, panicked or was cancelled; the next attempt may run.
    Returned,
    /// The body never started, so the attempt doesn't count against `max_attempts`.
    NotStarted,
    /// The body started and did not return, and may not run again.
    Interrupted,
}

impl Release {
    /// The state the record gets.
    pub fn state(self) -> State {
        match self {
            Self::Returned | Self::NotStarted => State::Released,
            Self::Interrupted => State::Interrupted,
        }
    }
}

/// A record as an operator sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inspection {
    /// The record.
    pub record: Record,
    /// When it is forgotten, unless it is written again.
    pub expires_in: Duration,
    /// When its lease lapses; zero if it has lapsed, `None` unless it is pending.
    pub lapses_in: Option<Duration>,
}

/// What kind of failure a [`StoreError`] is: kinds differ where a caller acts differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// Nothing was written; the same call may succeed later.
    Unavailable,
    /// The write may have landed, for example because the answer timed out. Repeating it with the same owner token is
    /// safe, and recognises its own effect.
    Unknown,
    /// What is stored is not a record of this library or of this version; it is left alone.
    Corrupt,
    /// The configuration, the server's version or the credentials are wrong; a retry can't help.
    Misconfigured,
    /// The store is full: new keys are refused, nothing is forgotten. Nothing was written.
    Full,
    /// The result is larger than the store can hold. Nothing was written; the engine records the completion without it.
    TooLarge,
    /// The user's transaction can't go on. Nothing of it takes effect: roll it back and deliver the message again.
    Aborted,
}

/// A store that did not do what it was asked for.
pub struct StoreError(Box<Failure>);

struct Failure {
    kind: StoreErrorKind,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl StoreError {
    /// A failure of `kind`; `message` says what failed, without secrets and payloads.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Failure { kind, message: message.into(), source: None }))
    }

    /// The failure with what caused it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> StoreErrorKind {
        self.0.kind
    }

    /// Whether the write may have landed.
    pub fn may_have_landed(&self) -> bool {
        self.kind() == StoreErrorKind::Unknown
    }

    /// Whether the same call may succeed if it is repeated.
    pub fn is_transient(&self) -> bool {
        matches!(self.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Unknown)
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("StoreError");
        shown.field("kind", &self.0.kind).field("message", &self.0.message);
        if let Some(source) = &self.0.source {
            shown.field("source", source);
        }
        shown.finish()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as _)
    }
}

/// The future of a store call: an answer that is there at once, or a boxed future.
///
/// A store in memory answers without an allocation; every other store writes `StoreFuture::new(async move { … })`.
#[must_use = "futures do nothing unless polled"]
pub struct StoreFuture<'a, T>(Reply<'a, T>);

enum Reply<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Later(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>),
}

// Nothing in it is pinned in place.
impl<T> Unpin for StoreFuture<'_, T> {}

impl<'a, T> StoreFuture<'a, T> {
    /// An answer that is there at once.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self(Reply::Ready(Some(answer)))
    }

    /// Takes the answer, if it was there at once and is no error; otherwise the future is as it was.
    pub(crate) fn at_once(&mut self) -> Option<T> {
        match &mut self.0 {
            Reply::Ready(answer) if matches!(answer, Some(Ok(_))) => answer.take()?.ok(),
            _ => None,
        }
    }

    /// The answer of `future`.
    pub fn new(future: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self(Reply::Later(Box::pin(future)))
    }
}

impl<'a> StoreFuture<'a, ()> {
    /// For [`Store::renew`] of a store whose answers come together, in the order of the leases.
    pub fn renewed(
        answer: &'a Answers<'a>,
        renewed: impl Future<Output = Result<Vec<Write>, StoreError>> + Send + 'a,
    ) -> Self {
        Self::new(async move {
            renewed.await?.into_iter().enumerate().for_each(|(at, write)| answer(at, write));
            Ok(())
        })
    }
}

impl<T> Future for StoreFuture<'_, T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Reply::Ready(answer) => Poll::Ready(answer.take().expect("polled after it was ready")),
            Reply::Later(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreFuture")
    }
}

/// Implements [`Store`] by handing every call on; without default bodies, a method that is added can't be forgotten.
macro_rules! forward {
    ($(($($generics:tt)*) $store:ty => $target:ident;)*) => { $(
        impl<$($generics)*> $crate::Store for $store {
            fn name(&self) -> &'static str {
                self.$target().name()
            }

            fn handle(&self) -> ::std::sync::Arc<dyn $crate::Store> {
                self.$target().handle()
            }

            fn upkeep(&self) -> ::std::sync::Arc<dyn $crate::Store> {
                self.$target().upkeep()
            }

            fn namespace(&self) -> &str {
                self.$target().namespace()
            }

            fn response_timeout(&self) -> ::std::time::Duration {
                self.$target().response_timeout()
            }

            fn heartbeats(&self) -> &$crate::Heartbeats {
                self.$target().heartbeats()
            }

            fn reserve<'a>(&'a self, request: &'a $crate::Reserve) -> $crate::StoreFuture<'a, $crate::Reservation> {
                self.$target().reserve(request)
            }

            fn renew<'a>(
                &'a self,
                leases: &'a [$crate::Lease],
                answer: &'a $crate::Answers<'a>,
            ) -> $crate::StoreFuture<'a, ()> {
                self.$target().renew(leases, answer)
            }

            fn finish<'a>(
                &'a self,
                lease: &'a $crate::Lease,
                finish: &'a $crate::Finish,
            ) -> $crate::StoreFuture<'a, $crate::Write> {
                self.$target().finish(lease, finish)
            }

            fn release<'a>(
                &'a self,
                lease: &'a $crate::Lease,
                release: $crate::Release,
            ) -> $crate::StoreFuture<'a, $crate::Write> {
                self.$target().release(lease, release)
            }

            fn wait<'a>(
                &'a self,
                key: &'a $crate::Key,
                attempt: u32,
                at_most: ::std::time::Duration,
            ) -> $crate::StoreFuture<'a, ()> {
                self.$target().wait(key, attempt, at_most)
            }

            fn inspect<'a>(&'a self, key: &'a $crate::Key) -> $crate::StoreFuture<'a, Option<$crate::Inspection>> {
                self.$target().inspect(key)
            }

            fn reopen<'a>(&'a self, key: &'a $crate::Key, attempt: u32) -> $crate::StoreFuture<'a, $crate::Write> {
                self.$target().reopen(key, attempt)
            }
        }
    )* };
}

#[allow(unused_imports, reason = "without a store of the library nobody else forwards")]
pub(crate) use forward;

forward! {
    (S: Store + ?Sized) Arc<S> => as_ref;
    (S: Store + ?Sized) Box<S> => as_ref;
}
