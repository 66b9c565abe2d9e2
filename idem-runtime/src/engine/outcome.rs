//! How one call ended, without a change to its signature.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tracing::Span;

use super::batch::Turns;
use super::beat::{Beats, Budget, NoBeat};
use crate::error::{Disposition, Error};
use crate::key::Key;
use crate::policy::Backoff;
use crate::record::Traceparent;
use crate::store::{Store, Timer};

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
            | Error::MessageLost { .. }
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

/// The pause before a message is delivered again if its call was dropped before the body started, or if it reached no
/// call.
const NOTHING_HAPPENED: Duration = Duration::from_secs(1);
/// The pause before a message is delivered again if its transaction was not committed.
const NOT_COMMITTED: Duration = Duration::from_millis(100);

impl Outcome {
    /// The outcome of a delivery that has reached no call yet.
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
        // A message that reached no idempotent function must not be acknowledged.
        disposition: Disposition::Retry { after: NOTHING_HAPPENED },
    };

    /// The key of the operation, where there is one.
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Whether an idempotent function was called at all. A call in a spawned task is not observed here.
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

    /// Whether the effect may have happened although the record does not say so: the lease was lost, the result is not
    /// recorded, the body was cancelled, or an earlier attempt was interrupted. Alert on it.
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

    /// Whether this call leaves nothing to do: it may be acknowledged, or its error is recorded.
    fn is_settled(&self) -> bool {
        self.disposition == Disposition::Ack || (self.recorded && !self.cancelled())
    }

    /// When the message of `call` is delivered again, which came no further.
    pub(super) fn pause_of(call: Option<&Self>) -> Duration {
        match call.map(|call| call.disposition) {
            Some(Disposition::Retry { after }) => after,
            _ => NOTHING_HAPPENED,
        }
    }

    /// The outcome of a delivery that made `calls`; `failed` if it returned an error.
    fn of_delivery(mut calls: Vec<Self>, failed: bool, budget: Budget) -> Self {
        for call in calls.iter_mut().filter(|call| call.cancelled()) {
            // Its last report came from before the drop: a body that had started is in doubt.
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
                "the observed future called no idempotent function, or called it in a spawned task; the message is \
                 not acknowledged"
            );
            return Self { disposition: budget.slowed(Self::UNKNOWN.disposition, 0), ..Self::UNKNOWN };
        };
        last.disposition = match (failed, last.disposition) {
            (true, Disposition::Ack) => Disposition::Retry { after: NOTHING_HAPPENED },
            (true, last) => last,
            (false, _) if all_settled => Disposition::Ack,
            (false, last) => retry.map_or(last, |after| Disposition::Retry { after }),
        };
        last.disposition = budget.slowed(last.disposition, last.key.as_ref().map_or(0, Key::seed));
        last.pending_commit = any_pending;
        last.uncertain = any_uncertain;
        last
    }
}

impl Budget {
    /// `disposition`, later with each delivery where it knows no better than that nothing has happened.
    fn slowed(self, disposition: Disposition, seed: u64) -> Disposition {
        match (disposition, self.number()) {
            (Disposition::Retry { after }, Some(number)) if after == NOTHING_HAPPENED => {
                Disposition::Retry { after: Backoff::DEFAULT.after(number, seed).max(after) }
            }
            _ => disposition,
        }
    }
}

/// The place of an observed call among the calls of its delivery.
pub(crate) type Seat = Option<usize>;

/// What is known of a delivery, and what its calls may know of it.
#[derive(Default)]
pub(crate) struct Observer {
    pub(super) calls: Vec<Outcome>,
    pub(super) budget: Budget,
    timer: TimerSlot,
    /// The batch that the delivery is one of, and its place there.
    pub(super) turns: Option<(Turns, usize)>,
    /// What the message is called, for spans.
    message: Option<Arc<Message>>,
}

/// What OpenTelemetry wants to know of a message.
#[derive(Clone, Default)]
struct Message {
    /// Its system, its destination and its id.
    called: Option<(&'static str, String, String)>,
    /// The trace that it is a part of.
    traceparent: Option<Traceparent>,
}

/// The timer of the first call, where a delivery has a use for it.
#[derive(Clone, Debug, Default)]
pub enum TimerSlot {
    #[default]
    Unwanted,
    Wanted,
    Known(Timer, Option<Key>),
}

impl Observer {
    /// Takes over what an observation around this one says of the message. Returns whether that one waits for a timer.
    fn is_inside_of_another(&mut self, wants_timer: bool) -> bool {
        let wanted_outside = OBSERVER.with_borrow(|outer| {
            let Some(outer) = outer else { return false };
            self.budget = self.budget.or(outer.budget);
            if self.turns.is_none() {
                self.turns.clone_from(&outer.turns);
            }
            if self.message.is_none() {
                self.message.clone_from(&outer.message);
            }
            matches!(outer.timer, TimerSlot::Wanted)
        });
        if matches!(self.timer, TimerSlot::Unwanted) && (wants_timer || wanted_outside) {
            self.timer = TimerSlot::Wanted;
        }
        wanted_outside
    }
}

thread_local! {
    /// The reports of the engine, while the future of an [`observe`] is being polled.
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Collects the outcomes of calls on this thread until it is dropped.
pub(crate) struct Observation<'a> {
    observer: &'a mut Option<Observer>,
}

impl<'a> Observation<'a> {
    /// `None`: the calls are not observed.
    pub(crate) fn enter(observer: &'a mut Option<Observer>) -> Self {
        swap(observer);
        Self { observer }
    }
}

impl Drop for Observation<'_> {
    fn drop(&mut self) {
        swap(self.observer);
    }
}

fn swap(other: &mut Option<Observer>) {
    OBSERVER.with_borrow_mut(|observer| {
        // Most calls are not observed.
        if observer.is_some() || other.is_some() {
            std::mem::swap(observer, other);
        }
    });
}

/// Reports how far a call has come, or how it ended, to the `observe` around it.
pub(crate) fn report(seat: &mut Seat, outcome: impl FnOnce() -> Outcome) {
    OBSERVER.with_borrow_mut(|observer| {
        let Some(Observer { calls, turns, .. }) = observer else { return };
        let outcome = outcome();
        if let Some((turns, item)) = turns
            && outcome.stage == Stage::Over
            && let Some(key) = &outcome.key
        {
            turns.leave(key, *item);
        }
        match seat.and_then(|seat| calls.get_mut(seat)) {
            Some(call) => *call = outcome,
            None => {
                *seat = Some(calls.len());
                // Most deliveries make one call; a vector that grows by itself takes room for four.
                if calls.is_empty() {
                    calls.reserve_exact(1);
                }
                calls.push(outcome);
            }
        }
    });
}

/// A call on `store` begins. Returns how its message is delivered, and its batch if it is one of many.
pub(super) fn begins(store: &dyn Store, key: Option<&Key>) -> Option<(Turns, usize)> {
    OBSERVER.with_borrow_mut(|observer| {
        let observer = observer.as_mut()?;
        if matches!(observer.timer, TimerSlot::Wanted) {
            observer.timer = TimerSlot::Known(store.heartbeats().timer(), key.cloned());
        }
        observer.turns.clone()
    })
}

/// How often the message of the present call has been delivered, and may be.
pub(super) fn budget() -> Budget {
    OBSERVER.with_borrow(|observer| observer.as_ref().map(|observer| observer.budget).unwrap_or_default())
}

/// Writes into the span of a call which message it handles, where that is known.
pub(super) fn describe_message(span: &Span) {
    OBSERVER.with_borrow(|observer| {
        let message = observer.as_ref().and_then(|observer| observer.message.as_ref());
        let Some((system, destination, id)) = message.and_then(|message| message.called.as_ref()) else { return };
        span.record("messaging.operation.type", "process");
        span.record("messaging.system", *system);
        span.record("messaging.destination.name", &**destination);
        span.record("messaging.message.id", &**id);
    });
}

/// The trace that the message of the present call is a part of, where that is known.
pub(super) fn traceparent() -> Option<Traceparent> {
    OBSERVER.with_borrow(|observer| observer.as_ref()?.message.as_ref()?.traceparent)
}

/// Runs `future`, which handles one delivery, and returns how it ended.
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
/// Calls inside the body of an idempotent function are not reported: the function itself is.
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
    pub struct Observe<F: Future, B = NoBeat> {
        #[pin]
        future: Option<F>,
        observer: Option<Observer>,
        failed: fn(&F::Output) -> bool,
        beat: B,
    }
}

impl<F: Future, B: fmt::Debug> fmt::Debug for Observe<F, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls = self.observer.as_ref().map(|observer| &observer.calls);
        f.debug_struct("Observe").field("calls", &calls).field("beat", &self.beat).finish_non_exhaustive()
    }
}

impl<F: Future> Observe<F> {
    pub(crate) fn new(future: F, failed: fn(&F::Output) -> bool) -> Self {
        Self { future: Some(future), observer: Some(Observer::default()), failed, beat: NoBeat }
    }

    pub(super) fn with_beat<B>(self, beat: B) -> Observe<F, B> {
        let Self { future, observer, failed, beat: NoBeat } = self;
        Observe { future, observer, failed, beat }
    }
}

impl<F: Future, B> Observe<F, B> {
    /// What the message is called, for the spans of its calls: the broker as OpenTelemetry calls it (`kafka`, `rabbitmq`,
    /// `aws_sqs`, `gcp_pubsub`), the queue or topic, and the id of the message. They are the attributes `messaging.system`,
    /// `messaging.destination.name` and `messaging.message.id`.
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe};
    /// # #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     Ok(format!("parcel for {id}"))
    /// # }
    /// # async fn deliver(store: &MemoryStore, id: u64, message_id: &str) {
    /// let (result, outcome) = observe(ship(store, id)).message("aws_sqs", "orders", message_id).await;
    /// # let _ = (result, outcome.disposition());
    /// # }
    /// ```
    pub fn message(self, system: &'static str, destination: impl Into<String>, id: impl Into<String>) -> Self {
        let called = (system, destination.into(), id.into());
        self.map_message(|message| message.called = Some(called))
    }

    /// The trace that the message is a part of, as its header `traceparent` has it. The record keeps it, so that the span of a
    /// replay names the trace of the run that made the result (`idem.original_trace`). The HTTP layer does this by itself.
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe};
    /// # #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     Ok(format!("parcel for {id}"))
    /// # }
    /// # async fn deliver(store: &MemoryStore, id: u64, header: &str) {
    /// let (result, outcome) = observe(ship(store, id)).traceparent(header.parse().ok()).await;
    /// # let _ = (result, outcome.disposition());
    /// # }
    /// ```
    pub fn traceparent(self, traceparent: impl Into<Option<Traceparent>>) -> Self {
        match traceparent.into() {
            Some(traceparent) => self.map_message(|message| message.traceparent = Some(traceparent)),
            None => self,
        }
    }

    fn map_message(self, change: impl FnOnce(&mut Message)) -> Self {
        self.map_observer(|observer| change(Arc::make_mut(observer.message.get_or_insert_default())))
    }

    pub(super) fn map_beat(self, change: impl FnOnce(B) -> B) -> Self {
        Self { beat: change(self.beat), ..self }
    }

    pub(super) fn map_observer(mut self, change: impl FnOnce(&mut Observer)) -> Self {
        change(self.observer.get_or_insert_default());
        self
    }
}

impl<F: Future, B: Beats<F::Output>> Observe<F, B> {
    fn poll_observed(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        let calls = this.observer.as_ref().map(|observer| &*observer.calls).unwrap_or_default();
        if let Some(output) = this.beat.lost(calls, cx) {
            this.future.set(None);
            return Poll::Ready(output);
        }
        let wanted_outside =
            this.observer.as_mut().is_some_and(|observer| observer.is_inside_of_another(B::WANTS_TIMER));
        let polled = {
            let _observation = Observation::enter(this.observer);
            this.future.as_mut().as_pin_mut().expect("polled after it was ready").poll(cx)
        };
        if polled.is_pending()
            && let Some(Observer { timer: timer @ TimerSlot::Known(..), .. }) = this.observer
        {
            this.beat.start(timer, cx);
            if wanted_outside {
                OBSERVER.with_borrow_mut(|outer| {
                    if let Some(outer) = outer {
                        outer.timer = timer.clone();
                    }
                });
            }
        }
        polled
    }

    /// How the delivery with this `output` ended.
    fn conclude(self: Pin<&mut Self>, output: F::Output) -> (F::Output, Outcome) {
        let this = self.project();
        this.beat.stop();
        let Observer { calls, budget, .. } = this.observer.take().unwrap_or_default();
        // An outer `observe` covers these calls, too.
        for call in &calls {
            report(&mut None, || call.clone());
        }
        let outcome = Outcome::of_delivery(calls, (this.failed)(&output), budget);
        (output, outcome)
    }
}

impl<F, T, E, B> Observe<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
{
    /// Turns a panic of the delivery into [`Error::Panicked`], so that it ends this delivery and not the consumer. The
    /// delivery is dropped first: its keys are freed, or count as interrupted under `on_crash = fail`.
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
    pub fn catch_panics(self) -> CatchPanics<F, B> {
        CatchPanics { observe: self }
    }
}

pin_project! {
    /// The future of [`Observe::catch_panics`].
    #[must_use = "futures do nothing unless polled"]
    #[derive(Debug)]
    pub struct CatchPanics<F: Future, B = NoBeat> {
        #[pin]
        observe: Observe<F, B>,
    }
}

impl<F, T, E, B> Future for CatchPanics<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    type Output = (Result<T, E>, Outcome);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut observe = self.project().observe;
        // After a panic the future is dropped below, and never polled again.
        let result = match std::panic::catch_unwind(AssertUnwindSafe(|| observe.as_mut().poll_observed(cx))) {
            Ok(polled) => ready!(polled),
            Err(_) => {
                let mut this = observe.as_mut().project();
                this.future.set(None);
                let last = this.observer.as_ref().and_then(|observer| observer.calls.last());
                Err(E::from(Error::Panicked {
                    key: last.and_then(|call| call.key.clone()),
                    attempt: last.and_then(|call| call.attempt),
                    retry_after: Outcome::pause_of(last),
                }))
            }
        };
        Poll::Ready(observe.conclude(result))
    }
}

impl<F: Future, B: Beats<F::Output>> Future for Observe<F, B> {
    type Output = (F::Output, Outcome);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let output = ready!(self.as_mut().poll_observed(cx));
        Poll::Ready(self.conclude(output))
    }
}
