//! How one call ended, without a change to its signature.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;

use crate::error::{Disposition, Error};
use crate::key::Key;

/// Why a call did not run its body, or would not have run it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// The operation had finished: its result would have been replayed (shadow mode).
    Replay,
    /// Another attempt was running.
    InProgress,
    /// The payload was another one.
    FingerprintMismatch,
    /// An earlier run had been interrupted.
    Interrupted,
    /// As many attempts as are allowed had started.
    AttemptsExhausted,
    /// The key was missing.
    MissingKey,
    /// The key was not valid.
    InvalidKey,
    /// The payload could not be hashed.
    InvalidFingerprint,
    /// The policy could not be honoured.
    InvalidPolicy,
    /// The operation had finished, and its result can't be replayed.
    ResultUnavailable,
    /// The store did not answer.
    Store,
}

impl Refusal {
    /// `None` if the body had started.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        match error {
            Error::InProgress { .. } => Some(Self::InProgress),
            Error::FingerprintMismatch { .. } => Some(Self::FingerprintMismatch),
            Error::Interrupted { .. } => Some(Self::Interrupted),
            Error::AttemptsExhausted { .. } => Some(Self::AttemptsExhausted),
            Error::ResultUnavailable { .. } => Some(Self::ResultUnavailable),
            Error::Store { started: false, .. } => Some(Self::Store),
            Error::NoAttempt
            | Error::LeaseLost { .. }
            | Error::Unrecorded { .. }
            | Error::TimedOut { .. }
            | Error::Panicked { .. }
            | Error::Store { started: true, .. } => None,
            Error::MissingKey { .. } => Some(Self::MissingKey),
            Error::InvalidKey { .. } => Some(Self::InvalidKey),
            Error::InvalidFingerprint { .. } => Some(Self::InvalidFingerprint),
            Error::InvalidPolicy { .. } => Some(Self::InvalidPolicy),
        }
    }
}

/// How far a call has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// No call was observed.
    None,
    /// Its key is being reserved.
    Reserving,
    /// Its body runs.
    Running,
    /// What its body returned is being recorded.
    Recording,
    /// It has returned.
    Over,
}

/// How one call of an idempotent function ended; [`observe`] returns it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(clippy::struct_excessive_bools)] // Independent facts, each with an accessor of its own.
pub struct Outcome {
    pub(crate) key: Option<Key>,
    pub(crate) stage: Stage,
    pub(crate) executed: bool,
    pub(crate) replayed: bool,
    pub(crate) waited: bool,
    pub(crate) takeover: bool,
    pub(crate) recorded: bool,
    pub(crate) result_stored: bool,
    pub(crate) uncertain: bool,
    pub(crate) misconfigured: bool,
    pub(crate) pending_commit: bool,
    pub(crate) attempt: Option<u32>,
    pub(crate) refusal: Option<Refusal>,
    pub(crate) bypassed: Option<Refusal>,
    pub(crate) disposition: Disposition,
}

/// When a message is delivered again whose call was dropped before its body started, or that reached no call at all.
const NOTHING_HAPPENED: Duration = Duration::from_secs(1);
/// When a message is delivered again whose transaction was not committed.
const NOT_COMMITTED: Duration = Duration::from_millis(100);

impl Outcome {
    /// The outcome of a call that hasn't come further than this.
    pub(crate) const UNKNOWN: Self = Self {
        key: None,
        stage: Stage::None,
        executed: false,
        replayed: false,
        waited: false,
        takeover: false,
        recorded: false,
        result_stored: false,
        uncertain: false,
        misconfigured: false,
        pending_commit: false,
        attempt: None,
        refusal: None,
        bypassed: None,
        // What did not reach an idempotent function must not be acknowledged on its behalf.
        disposition: Disposition::Retry { after: NOTHING_HAPPENED },
    };

    /// The key of the operation, where there is one.
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Whether an idempotent function was called at all. A call that is made in a task of its own is observed there.
    pub fn observed(&self) -> bool {
        self.stage != Stage::None
    }

    /// Whether this call ran the body: to its end, or until it was cancelled.
    pub fn executed(&self) -> bool {
        self.executed
    }

    /// Whether the call was dropped before it returned, for example by a time-out around it.
    pub fn cancelled(&self) -> bool {
        matches!(self.stage, Stage::Reserving | Stage::Running | Stage::Recording)
    }

    /// Whether this call returned a recorded result without running the body.
    pub fn replayed(&self) -> bool {
        self.replayed
    }

    /// Whether this call waited for another attempt.
    pub fn waited(&self) -> bool {
        self.waited
    }

    /// Whether this call took over from an attempt whose lease had lapsed.
    pub fn took_over(&self) -> bool {
        self.takeover
    }

    /// Whether the operation is recorded as finished, by this run or by an earlier one. False for a body that ran
    /// unprotected, whose error was released, or whose lease was lost.
    pub fn recorded(&self) -> bool {
        self.recorded
    }

    /// Whether duplicates can replay the result: false where it was too large or could not be encoded, although the
    /// completion is [recorded](Outcome::recorded).
    pub fn result_stored(&self) -> bool {
        self.result_stored
    }

    /// Whether the effect may have happened although the record does not know: the lease was lost, the result is not
    /// recorded, the body was cancelled, or an earlier attempt was interrupted. What an alert should tell.
    pub fn uncertain(&self) -> bool {
        self.uncertain
    }

    /// Whether a mistake of the deployment, and not of the message, kept the body from running.
    pub fn misconfigured(&self) -> bool {
        self.misconfigured
    }

    /// Whether the record takes effect only when a transaction of the user's is committed. Until
    /// [`committed`](Outcome::committed) says that it is, the message is to be delivered again.
    pub fn is_pending_commit(&self) -> bool {
        self.pending_commit
    }

    /// The outcome once the transaction is committed.
    #[must_use]
    pub fn committed(self) -> Self {
        Self { pending_commit: false, ..self }
    }

    /// The number of the attempt that ran under a reservation or is replayed.
    pub fn attempt(&self) -> Option<u32> {
        self.attempt
    }

    /// Why the call returned an [`Error`] instead of running its body.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    /// Under [`Mode::Shadow`](crate::Mode::Shadow) or `on_store_error = run`: why the body, which did run, would not have.
    pub fn bypassed(&self) -> Option<Refusal> {
        self.bypassed
    }

    /// What to do with the message.
    pub fn disposition(&self) -> Disposition {
        match self.disposition {
            Disposition::Ack if self.pending_commit => Disposition::Retry { after: NOT_COMMITTED },
            disposition => disposition,
        }
    }

    /// Whether nothing is left to do for this call, as far as it knows.
    fn is_settled(&self) -> bool {
        self.disposition == Disposition::Ack || (self.recorded && !self.cancelled())
    }

    /// The outcome of a delivery in which `calls` were made, and which failed or did not.
    fn of_delivery(mut calls: Vec<Self>, failed: bool) -> Self {
        for call in calls.iter_mut().filter(|call| call.cancelled()) {
            // The stages before have reported what is known by then.
            call.uncertain = call.executed;
        }
        let retry = |calls: &[Self]| {
            let after = calls.iter().filter(|call| !call.is_settled()).filter_map(|call| match call.disposition {
                Disposition::Retry { after } => Some(after),
                _ => None,
            });
            after.max()
        };
        let all_settled = calls.iter().all(Self::is_settled);
        let retry = retry(&calls);
        let any_pending = calls.iter().any(|call| call.pending_commit);
        let any_uncertain = calls.iter().any(|call| call.uncertain);
        let Some(mut last) = calls.pop() else {
            tracing::warn!(
                "no idempotent function was called in what was observed, or it was called in a task of its own; the \
                 message is not acknowledged"
            );
            return Self::UNKNOWN;
        };
        last.disposition = match (failed, last.disposition) {
            (true, Disposition::Ack) => Disposition::Retry { after: NOTHING_HAPPENED },
            (true, last) => last,
            (false, _) if all_settled => Disposition::Ack,
            (false, last) => retry.map_or(last, |after| Disposition::Retry { after }),
        };
        last.pending_commit = any_pending;
        last.uncertain = any_uncertain;
        last
    }
}

/// Where an observed call reports: its place among the calls of its delivery.
pub(crate) type Seat = Option<usize>;

thread_local! {
    /// Where the engine reports, while the future of an [`observe`] is being polled.
    static OBSERVER: RefCell<Option<Vec<Outcome>>> = const { RefCell::new(None) };
}

/// Puts a place for outcomes of calls made on this thread, until it is dropped.
pub(crate) struct Observation<'a> {
    calls: &'a mut Option<Vec<Outcome>>,
}

impl<'a> Observation<'a> {
    /// `None` means that nobody observes.
    pub(crate) fn enter(calls: &'a mut Option<Vec<Outcome>>) -> Self {
        swap(calls);
        Self { calls }
    }
}

impl Drop for Observation<'_> {
    fn drop(&mut self) {
        swap(self.calls);
    }
}

fn swap(calls: &mut Option<Vec<Outcome>>) {
    OBSERVER.with_borrow_mut(|observer| {
        // Most calls are observed by nobody.
        if observer.is_some() || calls.is_some() {
            std::mem::swap(observer, calls);
        }
    });
}

/// Reports how far a call has come, or how it ended, to whoever observes it.
pub(crate) fn report(seat: &mut Seat, outcome: impl FnOnce() -> Outcome) {
    OBSERVER.with_borrow_mut(|observer| {
        let Some(calls) = observer else { return };
        match seat.and_then(|seat| calls.get_mut(seat)) {
            Some(call) => *call = outcome(),
            None => {
                *seat = Some(calls.len());
                calls.push(outcome());
            }
        }
    });
}

/// Runs `future`, the handling of one delivery, and tells how it ended.
///
/// The [`Outcome`] describes the last idempotent call in it; its [disposition](Outcome::disposition) is about all of it:
///
/// - A delivery that returns an error is never acknowledged, whatever its calls said: an error after a successful call, such
///   as a commit that was refused, means that the message has to come again.
/// - A delivery that returns `Ok` is acknowledged if nothing is left to do for any of its calls. A call whose error was
///   swallowed is delivered again unless that error is recorded.
/// - A call that was dropped before it returned, for example by a time-out around it, is delivered again.
/// - If no idempotent function was reached, the message is delivered again, and a warning says so. A call in a spawned task is
///   observed there: `tokio::spawn(observe(…))`.
///
/// Calls made inside the body of an idempotent function are that function's own affair.
///
/// ```
/// # use std::time::Duration;
/// # use idem_runtime::{Disposition, Error, MemoryStore, idempotent, observe};
/// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
/// async fn ship(store: &MemoryStore, id: u32) -> Result<String, Error> {
///     Ok(format!("parcel for {id}"))
/// }
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = MemoryStore::new();
/// let (first, outcome) = observe(ship(&store, 42)).await;
/// assert!(outcome.executed());
/// let (duplicate, outcome) = observe(ship(&store, 42)).await;
/// assert!(outcome.replayed());
/// assert_eq!(outcome.disposition(), Disposition::Ack);
/// assert_eq!(first.unwrap(), duplicate.unwrap());
/// # });
/// ```
///
/// # Cancel safety
/// As cancel safe as `future`.
pub fn observe<F, T, E>(future: F) -> Observe<F>
where
    F: Future<Output = Result<T, E>>,
{
    Observe::new(future, Result::is_err)
}

pin_project! {
    /// The future of [`observe`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Observe<F: Future> {
        #[pin]
        future: Option<F>,
        calls: Option<Vec<Outcome>>,
        failed: fn(&F::Output) -> bool,
    }
}

impl<F: Future> fmt::Debug for Observe<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observe").field("calls", &self.calls).finish_non_exhaustive()
    }
}

impl<F: Future> Observe<F> {
    pub(crate) fn new(future: F, failed: fn(&F::Output) -> bool) -> Self {
        Self { future: Some(future), calls: Some(Vec::new()), failed }
    }

    fn poll_observed(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let _observation = Observation::enter(this.calls);
        this.future.as_pin_mut().expect("polled after it was ready").poll(cx)
    }

    /// How the delivery ended that gave `output`.
    fn conclude(self: Pin<&mut Self>, output: F::Output) -> (F::Output, Outcome) {
        let this = self.project();
        let calls = this.calls.take().unwrap_or_default();
        // An observation around this one is about these calls, too.
        for call in &calls {
            report(&mut None, || call.clone());
        }
        let outcome = Outcome::of_delivery(calls, (this.failed)(&output));
        (output, outcome)
    }
}

impl<F, T, E> Observe<F>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
{
    /// Turns a panic of the delivery into [`Error::Panicked`], so that it ends this delivery and not the consumer. What was
    /// held is dropped before: keys are freed, or count as interrupted under `on_crash = fail`.
    ///
    /// ```
    /// # use idem_runtime::{Disposition, Error, MemoryStore, idempotent, observe};
    /// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// async fn ship(store: &MemoryStore, id: u32) -> Result<String, Error> {
    ///     panic!("order {id} has no address")
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// let store = MemoryStore::new();
    /// let (result, outcome) = observe(ship(&store, 42)).catch_panics().await;
    /// assert!(matches!(result, Err(Error::Panicked { .. })));
    /// assert!(outcome.executed() && outcome.uncertain());
    /// assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    /// # });
    /// ```
    pub fn catch_panics(self) -> CatchPanics<F> {
        CatchPanics { observe: self }
    }
}

pin_project! {
    /// The future of [`Observe::catch_panics`].
    #[must_use = "futures do nothing unless polled"]
    #[derive(Debug)]
    pub struct CatchPanics<F: Future> {
        #[pin]
        observe: Observe<F>,
    }
}

impl<F, T, E> Future for CatchPanics<F>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
{
    type Output = (Result<T, E>, Outcome);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut observe = self.project().observe;
        // What a panic leaves behind is dropped below, and never polled again.
        let result = match std::panic::catch_unwind(AssertUnwindSafe(|| observe.as_mut().poll_observed(cx))) {
            Ok(polled) => ready!(polled),
            Err(_) => {
                let mut this = observe.as_mut().project();
                this.future.set(None);
                let last = this.calls.as_ref().and_then(|calls| calls.last());
                Err(E::from(Error::Panicked {
                    key: last.and_then(|call| call.key.clone()),
                    attempt: last.and_then(|call| call.attempt),
                    retry_after: match last.map(|call| call.disposition) {
                        Some(Disposition::Retry { after }) => after,
                        _ => NOTHING_HAPPENED,
                    },
                }))
            }
        };
        Poll::Ready(observe.conclude(result))
    }
}

impl<F: Future> Future for Observe<F> {
    type Output = (F::Output, Outcome);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let output = ready!(self.as_mut().poll_observed(cx));
        Poll::Ready(self.conclude(output))
    }
}
