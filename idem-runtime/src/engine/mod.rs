//! Protocol of a call: reserve, run with heartbeats, record, replay. This folder holds the whole control flow.
//!
//! A call has three phases. [`begin`] reserves the key, or returns the reason why the body must not run. The body then
//! runs inside the caller's own future, as a [`held`] attempt. [`end`] records the result of the body. [`call`]
//! connects the three phases.

mod attempt;
mod batch;
mod beat;
mod begin;
mod budget;
mod call;
mod disposition;
mod end;
mod ending;
mod held;
mod late;
mod observe;
mod observed_call;
mod observer;
mod outbox;
mod outcome;
mod poll_notes;
pub(crate) mod reconciliation;
pub(crate) mod recorder;
mod replay;
mod resender;
mod step;
mod telemetry;
mod turns;
mod work;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use serde::Serialize;

#[cfg(feature = "testing")]
pub(crate) use self::attempt::CurrentGuard;
pub use self::attempt::{Attempt, current};
pub use self::batch::{Batch, BatchItem, ItemFailure, ItemFailures, KafkaRecord, ObserveAll, observe_all};
pub use self::beat::{NoBeat, OnBeat, OnBeatLost};
#[cfg(feature = "within")]
pub(crate) use self::budget::unreached;
pub(crate) use self::call::{Protocol, Run, TypedCall};
#[cfg(feature = "http")]
pub(crate) use self::ending::AttemptEnd;
pub use self::observe::{CatchPanics, Observe, observe};
pub use self::observed_call::Refusal;
#[cfg(feature = "within")]
pub(crate) use self::observed_call::{ErrorFacts, TransactionEnd};
#[cfg(feature = "testing")]
pub(crate) use self::observer::Observation;
#[cfg(feature = "within")]
pub(crate) use self::observer::{settle, unsettled};
pub use self::outbox::Outbox;
#[cfg(feature = "within")]
pub(crate) use self::outbox::{CommittedRecord, has_unsent, send_committed, send_unrecorded};
pub use self::outcome::Outcome;
#[cfg(feature = "tower")]
pub(crate) use self::poll_notes::has_begun_to_wait;
pub use self::reconciliation::{Reconciler, Reconciliation};
#[cfg(feature = "conformance")]
pub use self::recorder::replay;
pub(crate) use self::recorder::{ErrorRule, RecordResults, RecordValues, Recorder};
pub use self::resender::{Resender, Resent};
pub use self::step::{
    Always, AskDoubt, FailOnDoubt, Irreversible, Never, Reaction, ReconcileOnDoubt, RerunOnDoubt, RetriedStep, Step,
    StepBuilder, StepDoubt, StepName, UncertainIf,
};
#[cfg(feature = "testing")]
pub(crate) use self::step::{InsideStep, polled_step};
use crate::codec::{Codec, Json};
use crate::error::Error;
use crate::key::{Fingerprint, FingerprintError, Key, KeyError};
use crate::policy::{Mode, OnError, Policy};
use crate::store::Store;

/// One call of an idempotent function: its store, its key, its policy, and the recorder of its result.
///
/// `#[idempotent]` creates an operation for each call. By default a value is recorded as [`Json`], and an error frees
/// the key; [`codec`](Self::codec), [`record_errors`](Self::record_errors) and
/// [`record_errors_if`](Self::record_errors_if) set other rules. `Within::operation` makes an operation inside of a
/// user's transaction.
///
/// # Examples
/// ```
/// # use std::time::Duration;
/// use idem_runtime::{Error, Key, MemoryStore, Operation, Policy};
///
/// const POLICY: Policy = Policy::new(Duration::from_secs(7 * 86_400));
///
/// async fn ship(store: &MemoryStore, order: u32) -> Result<String, Error> {
///     let operation = Operation::new(store, Key::new("shop::ship", order), POLICY);
///     operation.run(async move { Ok(format!("parcel {order}")) }).await
/// }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # let store = MemoryStore::new();
/// # assert_eq!(ship(&store, 42).await.unwrap(), ship(&store, 42).await.unwrap());
/// # });
/// ```
#[must_use = "an operation does nothing until it is run"]
pub struct Operation<R = RecordValues<Json>, P = ()> {
    subject: Subject,
    recorder: R,
    /// Data that only a run inside of a transaction needs; `()` outside of a transaction.
    place: P,
}

/// Store, key, policy and fingerprint of an operation.
#[derive(Debug)]
struct Subject {
    store: Arc<dyn Store>,
    /// Boxed: the error is large, and every call would carry its size inline.
    key: Result<Key, Box<KeyError>>,
    policy: Policy,
    fingerprint: Option<Result<Fingerprint, FingerprintError>>,
}

impl<R, P> fmt::Debug for Operation<R, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Subject { store, key, policy, .. } = &self.subject;
        f.debug_struct("Operation")
            .field("store", store)
            .field("key", key)
            .field("policy", policy)
            .finish_non_exhaustive()
    }
}

impl Operation {
    /// Creates an operation with the key `key` in `store`. If the key could not be built, [`Operation::run`] returns an
    /// error with the reason.
    pub fn new<S: Store + ?Sized>(store: &S, key: Result<Key, KeyError>, policy: Policy) -> Self {
        let key = key.map(|key| key.shown(policy.key_display)).map_err(Box::new);
        let subject = Subject { store: store.handle(), key, policy, fingerprint: None };
        Self { subject, recorder: RecordValues::new(), place: () }
    }
}

/// Makes the call of `operation` without its body, for [`Run`].
#[inline]
pub(crate) fn typed_call<R, T, E>(operation: Operation, recorder: R) -> TypedCall<impl Protocol, R, T, E> {
    call::typed(operation.subject, recorder)
}

impl<R, P> Operation<R, P> {
    /// Adds the fingerprint of the payload: a call with another payload under the same key is refused.
    pub fn fingerprint<F: Serialize + ?Sized>(mut self, payload: &F) -> Self {
        if self.subject.policy.current_mode() != Mode::Off {
            self.subject.fingerprint = Some(Fingerprint::of(payload));
        }
        self
    }

    /// Adds a fingerprint that the caller has computed.
    #[cfg(any(feature = "http", feature = "within"))]
    pub(crate) fn fingerprinted(mut self, fingerprint: Result<Fingerprint, FingerprintError>) -> Self {
        if self.subject.policy.current_mode() != Mode::Off {
            self.subject.fingerprint = Some(fingerprint);
        }
        self
    }

    /// Replaces the data that a run inside of a transaction needs, and returns the earlier data.
    #[cfg(feature = "within")]
    pub(crate) fn at<Q>(self, place: Q) -> (Operation<R, Q>, P) {
        let Self { subject, recorder, place: left } = self;
        (Operation { subject, recorder, place }, left)
    }

    pub(crate) fn recorded_by<Q>(self, recorder: Q) -> Operation<Q, P> {
        let Self { subject, place, .. } = self;
        Operation { subject, recorder, place }
    }
}

impl<C: Codec, P> Operation<RecordValues<C>, P> {
    /// Records the result with another codec (default: [`Json`]).
    pub fn codec<D: Codec>(self) -> Operation<RecordValues<D>, P> {
        self.recorded_by(RecordValues::new())
    }

    /// Records errors too, and replays them to duplicates (default: an error frees the key).
    pub fn record_errors(self) -> Operation<RecordResults<C, ()>, P> {
        self.recorded_by(RecordResults::new(()))
    }

    /// Treats the effect of each error as uncertain: no body runs again before a
    /// [reconciler](Operation::reconcile) or an operator has settled the doubt (default: an error frees the key).
    pub fn uncertain_errors(self) -> Operation<RecordValues<C, true>, P> {
        self.recorded_by(RecordValues::new())
    }

    /// Records an error if `decide` returns [`OnError::Record`].
    pub fn record_errors_if<E, F: Fn(&E) -> OnError>(self, decide: F) -> Operation<RecordResults<C, F>, P> {
        self.recorded_by(RecordResults::new(decide))
    }
}

impl<R> Operation<R> {
    /// Runs `body` once for the key of the operation, and replays its recorded result to every duplicate.
    ///
    /// # Errors
    /// The error of `body`, or an [`Error`] with the reason why there is no result.
    ///
    /// # Panics
    /// If `body` panics. The key is then freed immediately, or is interrupted under
    /// [`OnCrash::Fail`](crate::OnCrash::Fail). A panic of a migration ([`OnUndecodable`](crate::OnUndecodable)) also
    /// becomes a panic of this call, and leaves the record unchanged.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the body, drops its values, and then frees the key, or interrupts the key under
    /// [`OnCrash::Fail`](crate::OnCrash::Fail). Once the body has returned, its result is recorded even if the future
    /// is dropped.
    pub fn run<T, E, B>(self, body: B) -> impl Future<Output = Result<T, E>>
    where
        R: Recorder<T, E>,
        E: From<Error>,
        B: Future<Output = Result<T, E>>,
    {
        call::run(self.subject, self.recorder, body)
    }

    /// Sets the reconciler. If the effect of an earlier attempt is in doubt, the reconciler is polled before the body
    /// may run; otherwise it is not polled; see [`Reconciliation`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// use idem_runtime::{Error, Key, MemoryStore, Operation, Policy, Reconciliation};
    ///
    /// # async fn refund(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// let policy = Policy::new(Duration::from_secs(90 * 86_400));
    /// let operation = Operation::new(store, Key::new("shop::refund", id), policy)
    ///     .uncertain_errors()
    ///     .reconcile(async { Ok(Reconciliation::Unknown { ask_again: Duration::from_secs(60) }) });
    /// operation.run(async move { Ok(format!("refund {id}")) }).await
    /// # }
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// # assert_eq!(refund(&MemoryStore::new(), 7).await.unwrap(), "refund 7");
    /// # });
    /// ```
    pub fn reconcile<F>(self, reconciler: F) -> Operation<R, Reconciler<F>> {
        let Self { subject, recorder, .. } = self.reconciles();
        Operation { subject, recorder, place: Reconciler(reconciler) }
    }

    /// Returns the operation with a policy for a body that asks its reconciler itself.
    pub(crate) fn reconciles(mut self) -> Self {
        self.subject.policy = self.subject.policy.reconciling();
        self
    }
}

impl<R, F> Operation<R, Reconciler<F>> {
    /// Runs `body` once for the key of the operation, like [`Operation::run`]. If the effect of an earlier attempt is
    /// in doubt, the reconciler runs first.
    ///
    /// # Errors
    /// The error of `body` or of the reconciler, or an [`Error`] with the reason why there is no result.
    ///
    /// # Panics
    /// If `body` or the reconciler panics. After a panic of the reconciler the operation is still in doubt.
    ///
    /// # Cancel safety
    /// A drop has the same effect as for [`Operation::run`]. If the future is dropped while the reconciler runs, the
    /// operation is still in doubt.
    pub fn run<T, E, B>(self, body: B) -> impl Future<Output = Result<T, E>>
    where
        R: Recorder<T, E>,
        E: From<Error>,
        B: Future<Output = Result<T, E>>,
        F: Future<Output = Result<Reconciliation<T>, E>>,
    {
        let Self { subject, recorder, place: Reconciler(reconciler) } = self;
        call::run(subject, recorder, async move {
            if reconciliation::is_asked()
                && let Some(result) = reconciliation::settle(reconciler.await)
            {
                return result;
            }
            body.await
        })
    }
}
