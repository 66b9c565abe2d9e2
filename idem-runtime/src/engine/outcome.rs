//! Outcomes of deliveries, without a change to the signature of a handler.

use std::cell::{Cell, RefCell};
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
use super::disposition::{DeliveryResult, Standing, Verdict, judge};
use super::held::note_refusal;
use crate::clock::SystemClock;
use crate::error::{Disposition, Error, deployment_pause};
use crate::key::Key;
use crate::policy::Backoff;
use crate::record::Traceparent;
use crate::store::{Heartbeats, Store, Timer};
use crate::sync::SharedOnce;

/// Reason why a call did not run its body, or would not have run it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// The operation had finished: its result would have been replayed (shadow mode).
    Replay,
    /// Another attempt was running.
    InProgress,
    /// The key was used with another payload.
    FingerprintMismatch,
    /// An earlier run had been interrupted.
    Interrupted,
    /// As many attempts as `max_attempts` allows had started.
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
    /// Returns the refusal that `error` reports; `None` if the body had started.
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
            | Error::DeadlinePassed { .. }
            | Error::HeldBack { .. }
            | Error::Store { started: true, .. } => None,
            Error::MissingKey { .. } => Some(Self::MissingKey),
            Error::InvalidKey { .. } => Some(Self::InvalidKey),
            Error::InvalidFingerprint { .. } => Some(Self::InvalidFingerprint),
            Error::InvalidPolicy { .. } => Some(Self::InvalidPolicy),
        }
    }
}

/// Progress of a call up to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// No call was made.
    None,
    /// The key is being reserved.
    Reserving,
    /// The body is running.
    Running,
    /// The result of the body is being recorded.
    Recording,
    /// The body returned.
    Returned { is_ok: bool, kept: RecordedPart },
    /// The recorded result was returned. The body did not run.
    Replayed { is_ok: bool },
    /// The body did not run.
    Refused { refusal: Refusal, error: ErrorFacts },
    /// The body started, and the record does not hold its end: the lease was lost, the time was out, or the store did
    /// not answer.
    Unrecorded { error: ErrorFacts },
}

/// The part of a returned result that the record holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RecordedPart {
    /// Nothing: the key is free, or the body ran unprotected.
    Nothing,
    /// The completion, without the result.
    Completion,
    /// The result.
    Result,
}

/// Consequences of an [`Error`] for its call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ErrorFacts {
    pub(crate) disposition: Disposition,
    pub(crate) misconfigured: bool,
}

/// State of the transaction on which the record of a call depends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Commit {
    /// The record took effect when it was written, or its transaction is committed.
    Done,
    /// The transaction is open.
    Pending,
    /// The transaction was not committed: the writes of the call are undone.
    RolledBack,
}

/// One call of a delivery.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ObservedCall {
    pub(crate) key: Option<Key>,
    pub(crate) progress: Progress,
    pub(crate) waited: bool,
    pub(crate) takeover: bool,
    pub(crate) commit: Commit,
    pub(crate) attempt: Option<u32>,
    pub(crate) bypassed: Option<Refusal>,
    /// Time until a failed delivery that made this call is likely to get further, if known.
    pub(crate) again: Option<Duration>,
}

/// Pause before a message is delivered again if no better pause is known.
const NOTHING_KNOWN: Duration = Duration::from_secs(1);

impl ObservedCall {
    /// A call that has not begun.
    pub(crate) const NEW: Self = Self {
        key: None,
        progress: Progress::None,
        waited: false,
        takeover: false,
        commit: Commit::Done,
        attempt: None,
        bypassed: None,
        again: None,
    };

    /// Returns the standing of the call, given that its transaction will be committed unless it was rolled back
    /// already.
    fn standing(&self, budget: Budget) -> Standing {
        match (self.commit, self.standing_once_committed()) {
            (Commit::RolledBack, Standing::Finished(_)) => Standing::MayPass(None),
            // Fingerprints do not distinguish a payload of another type, which is a mistake of the deployment, from
            // another payload.
            (_, Standing::RefusedForGood) if self.is_mismatch() && budget.has_more() => {
                Standing::MayPass(Some(deployment_pause(self.key.as_ref())))
            }
            (_, standing) => standing,
        }
    }

    fn is_mismatch(&self) -> bool {
        matches!(self.progress, Progress::Refused { refusal: Refusal::FingerprintMismatch, .. })
    }

    fn standing_once_committed(&self) -> Standing {
        match self.progress {
            Progress::Returned { is_ok: true, .. } | Progress::Replayed { is_ok: true } => Standing::Finished(None),
            Progress::Returned { is_ok: false, kept: RecordedPart::Completion | RecordedPart::Result }
            | Progress::Replayed { is_ok: false } => Standing::Finished(Some(Disposition::DeadLetter)),
            // The operation has finished; the error is about its result.
            Progress::Refused { refusal: Refusal::ResultUnavailable, error } => {
                Standing::Finished(Some(error.disposition))
            }
            Progress::Refused { error, .. } | Progress::Unrecorded { error } => match error.disposition {
                Disposition::Retry { after } => Standing::MayPass(Some(after)),
                Disposition::DeadLetter | Disposition::Ack => Standing::RefusedForGood,
            },
            Progress::Returned { is_ok: false, kept: RecordedPart::Nothing }
            | Progress::None
            | Progress::Reserving
            | Progress::Running
            | Progress::Recording => Standing::MayPass(self.again),
        }
    }

    /// Returns the disposition of a message whose delivery made only this call, and returned the result of the call.
    pub(super) fn disposition(&self) -> Disposition {
        match self.standing_once_committed() {
            Standing::Finished(error) => error.unwrap_or(Disposition::Ack),
            Standing::RefusedForGood => Disposition::DeadLetter,
            Standing::MayPass(after) => Disposition::Retry { after: after.unwrap_or(NOTHING_KNOWN) },
        }
    }

    /// Returns whether the call finished with an error, so that its delivery may return that error.
    fn ends_with_final_error(&self) -> bool {
        matches!(self.standing_once_committed(), Standing::Finished(Some(_)))
    }

    fn executed(&self) -> bool {
        match self.progress {
            Progress::Running | Progress::Recording | Progress::Returned { .. } | Progress::Unrecorded { .. } => true,
            Progress::None | Progress::Reserving | Progress::Replayed { .. } | Progress::Refused { .. } => false,
        }
    }

    fn cancelled(&self) -> bool {
        matches!(self.progress, Progress::Reserving | Progress::Running | Progress::Recording)
    }

    /// Returns whether the effect may have happened although the record does not show it, given that the call goes no
    /// further.
    pub(super) fn uncertain(&self) -> bool {
        match self.progress {
            Progress::Running
            | Progress::Recording
            | Progress::Unrecorded { .. }
            | Progress::Refused { refusal: Refusal::Interrupted, .. } => true,
            Progress::None
            | Progress::Reserving
            | Progress::Returned { .. }
            | Progress::Replayed { .. }
            | Progress::Refused { .. } => false,
        }
    }

    fn misconfigured(&self) -> bool {
        match self.progress {
            Progress::Refused { error, .. } | Progress::Unrecorded { error } => error.misconfigured,
            _ => false,
        }
    }

    fn recorded(&self) -> bool {
        let recorded = match self.progress {
            Progress::Returned { kept, .. } => kept != RecordedPart::Nothing,
            Progress::Replayed { .. } | Progress::Refused { refusal: Refusal::ResultUnavailable, .. } => true,
            _ => false,
        };
        recorded && self.commit != Commit::RolledBack
    }

    fn result_stored(&self) -> bool {
        let stored =
            matches!(self.progress, Progress::Returned { kept: RecordedPart::Result, .. } | Progress::Replayed { .. });
        stored && self.commit != Commit::RolledBack
    }

    /// Returns whether the record takes effect only when a transaction of the user is committed. A replayed result is
    /// committed, or the call of this transaction that recorded it is pending.
    fn is_pending(&self) -> bool {
        self.commit == Commit::Pending && self.executed()
    }

    /// Applies the end of a transaction to the call. `of_transaction`: the record was written in that transaction.
    fn settle(&mut self, settled: TransactionEnd, of_transaction: bool) {
        if self.commit != Commit::Pending {
            return;
        }
        let failed = self.recorded() && self.ends_with_final_error();
        self.commit = match settled {
            TransactionEnd::RolledBack { failures_recorded } if of_transaction && !(failed && failures_recorded) => {
                let attempt = self.attempt.unwrap_or(1);
                let pause = Backoff::DEFAULT.after(attempt, self.key.as_ref().map_or(0, Key::seed));
                self.again = self.again.max(Some(pause));
                Commit::RolledBack
            }
            _ => Commit::Done,
        };
    }
}

/// End of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(
    not(any(feature = "with-rusqlite-0_40", feature = "with-sqlx-0_8", feature = "with-tokio-postgres-0_7")),
    expect(dead_code, reason = "no transactions")
)]
pub(crate) enum TransactionEnd {
    Committed,
    /// `failures_recorded`: the errors that its calls had recorded were recorded again, in another transaction.
    RolledBack {
        failures_recorded: bool,
    },
    /// The transaction could not begin, and may begin after this time.
    NotBegun {
        again: Duration,
    },
}

/// Outcome of a delivery; [`observe`] returns it.
///
/// The methods about a call describe the last call, and the [disposition](Outcome::disposition) of the message is about
/// all calls.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    call: ObservedCall,
    disposition: Disposition,
    /// The disposition while the transaction of a call is not committed.
    uncommitted: Disposition,
    pending_commit: bool,
    uncertain: bool,
}

impl Outcome {
    /// Returns the key of the operation, if there is one.
    pub fn key(&self) -> Option<&Key> {
        self.call.key.as_ref()
    }

    /// Returns whether an idempotent function was called. A call in a spawned task is not observed here.
    pub fn observed(&self) -> bool {
        self.call.progress != Progress::None
    }

    /// Returns whether this call ran the body: to its end, or until it was cancelled.
    pub fn executed(&self) -> bool {
        self.call.executed()
    }

    /// Returns whether the call was dropped before it returned, for example by a time-out around it.
    pub fn cancelled(&self) -> bool {
        self.call.cancelled()
    }

    /// Returns whether this call returned a recorded result without running the body.
    pub fn replayed(&self) -> bool {
        matches!(self.call.progress, Progress::Replayed { .. })
    }

    /// Returns whether this call waited for another attempt.
    pub fn waited(&self) -> bool {
        self.call.waited
    }

    /// Returns whether this call took over from an attempt whose lease had lapsed.
    pub fn took_over(&self) -> bool {
        self.call.takeover
    }

    /// Whether the operation is recorded as finished, by this run or by an earlier one. False for a body that ran
    /// unprotected, whose error was released, whose lease was lost, or whose transaction was rolled back or is not
    /// [committed](Outcome::committed) yet.
    pub fn recorded(&self) -> bool {
        self.call.recorded() && !self.depends_on_commit()
    }

    /// Returns whether duplicates can replay the result. False if the result was too large or could not be encoded,
    /// although the completion is [recorded](Outcome::recorded).
    pub fn result_stored(&self) -> bool {
        self.call.result_stored() && !self.depends_on_commit()
    }

    /// Whether the last call wrote to, or read from, a transaction whose commit is still to come.
    fn depends_on_commit(&self) -> bool {
        self.pending_commit && self.call.commit == Commit::Pending
    }

    /// Returns whether the effect of any call may have happened although the record does not show it: the lease was
    /// lost, the result is not recorded, the body was cancelled, or an earlier attempt was interrupted. Alert on it.
    pub fn uncertain(&self) -> bool {
        self.uncertain
    }

    /// Returns whether a mistake of the deployment, and not of the message, kept the body from running.
    pub fn misconfigured(&self) -> bool {
        self.call.misconfigured()
    }

    /// Returns whether a call ran its body in a transaction of the user, so that its record takes effect only at the
    /// commit. Until [`committed`](Outcome::committed) notes the commit, the message is to be delivered again.
    /// `transact` notes the commit; a replay is not pending.
    pub fn is_pending_commit(&self) -> bool {
        self.pending_commit
    }

    /// Marks the transaction of the delivery as committed. Call this after the commit has succeeded.
    #[must_use]
    pub fn committed(mut self) -> Self {
        self.call.settle(TransactionEnd::Committed, true);
        Self { pending_commit: false, ..self }
    }

    /// Returns the number of the attempt that ran under a reservation or is replayed.
    pub fn attempt(&self) -> Option<u32> {
        self.call.attempt
    }

    /// Returns the reason why the call returned an [`Error`] instead of running its body.
    pub fn refusal(&self) -> Option<Refusal> {
        match self.call.progress {
            Progress::Refused { refusal, .. } => Some(refusal),
            _ => None,
        }
    }

    /// Returns the reason why the body would not have run, for a body that did run under
    /// [`Mode::Shadow`](crate::Mode::Shadow) or `on_store_error = run`.
    pub fn bypassed(&self) -> Option<Refusal> {
        self.call.bypassed
    }

    /// Returns the action for the message.
    ///
    /// `DeadLetter` may come with a delivery that returned `Ok`: a call was refused permanently, and the handler
    /// swallowed that error.
    pub fn disposition(&self) -> Disposition {
        match self.disposition {
            Disposition::Ack if self.pending_commit => {
                tracing::warn!(
                    key = self.key().map(tracing::field::display),
                    "the delivery returned `Ok`, and nothing says that its transaction is committed, so the message is \
                     delivered again: use `transact`, or `Outcome::committed` after the commit"
                );
                self.uncommitted
            }
            disposition => disposition,
        }
    }

    /// Computes the outcome of a delivery that made `calls` and returned `returned`.
    fn of_delivery(mut calls: Vec<ObservedCall>, returned: DeliveryResult, budget: Budget) -> Self {
        // Leaves out the calls of a transaction's earlier try, which the next try did not make. A transaction that
        // could not begin stays: it may begin later.
        calls.retain(|call| call.progress != Progress::None || call.again.is_some());
        if calls.iter().any(|call| call.key.is_some()) {
            unreached_calls().store_answered();
        }
        if calls.is_empty() {
            tracing::warn!(
                "the observed future called no idempotent function, or called it in a spawned task; the message is \
                 not acknowledged"
            );
        }
        let verdict = judge(calls.iter().map(|call| call.standing(budget)), returned);
        let pending_commit = calls.iter().any(ObservedCall::is_pending);
        let uncertain = calls.iter().any(ObservedCall::uncertain);
        let misconfigured = calls.iter().any(ObservedCall::misconfigured);
        let is_mismatch = calls.iter().any(ObservedCall::is_mismatch);
        let again = calls.iter().filter_map(|call| call.again).max();
        let call = calls.pop().unwrap_or(ObservedCall::NEW);
        let disposition = match verdict {
            Verdict::Ack => Disposition::Ack,
            Verdict::DeadLetter => {
                // It was delivered again until now.
                if is_mismatch && budget.is_last() {
                    log_last_delivery(&call, SetAside::Mismatch);
                }
                Disposition::DeadLetter
            }
            Verdict::Retry(after) => {
                if budget.is_last() {
                    log_last_delivery(&call, if misconfigured { SetAside::Deployment } else { SetAside::Failure });
                }
                budget.retry(after, again, call.key.as_ref())
            }
        };
        let uncommitted = match pending_commit {
            true => {
                let pause = Backoff::DEFAULT.after(call.attempt.unwrap_or(1), call.key.as_ref().map_or(0, Key::seed));
                budget.retry(None, Some(pause), call.key.as_ref())
            }
            false => disposition,
        };
        Self { call, disposition, uncommitted, pending_commit, uncertain }
    }

    /// Returns the outcome of a delivery that did not begin, and may begin `after` that time.
    pub(crate) fn not_begun(after: Option<Duration>) -> Self {
        let disposition = budget().retry(None, after, None);
        let (call, uncommitted) = (ObservedCall::NEW, disposition);
        Self { call, disposition, uncommitted, pending_commit: false, uncertain: false }
    }

    /// Returns the time until the message is delivered again.
    pub(super) fn retry_after(&self) -> Duration {
        match self.disposition {
            Disposition::Retry { after } => after,
            Disposition::Ack | Disposition::DeadLetter => NOTHING_KNOWN,
        }
    }
}

/// Why a message is set aside with its last delivery.
#[derive(Clone, Copy)]
enum SetAside {
    /// Its deliveries failed.
    Failure,
    /// The deployment is wrong, and not the message.
    Deployment,
    /// The payload is another one than that of its key, or its type has changed: the fingerprints do not say which.
    Mismatch,
}

/// Logs that a message is set aside because its broker delivers it no more.
fn log_last_delivery(call: &ObservedCall, why: SetAside) {
    let key = call.key.as_ref().map(tracing::field::display);
    match why {
        SetAside::Deployment => tracing::error!(
            key,
            "the last delivery of a message failed for a mistake of the deployment, not of the message: it is set aside; \
             correct the deployment, then deliver what was set aside again"
        ),
        SetAside::Mismatch => tracing::error!(
            key,
            "the last delivery of a message had another payload than its key, and it is set aside. If two operations share \
             the key, give each one of its own. If the type of the payload changed with a deployment, go back to a fingerprint \
             that stays (`skip_serializing_if`, or only some parts), then deliver what was set aside again"
        ),
        SetAside::Failure => tracing::warn!(
            key,
            "the last delivery of a message failed, and it is set aside: the events of its call say why; once that is \
             corrected, deliver it again"
        ),
    }
}

impl Budget {
    /// Returns the disposition of a message that is to be delivered again. After its last delivery the message is set
    /// aside, because some brokers then delete it. Before that, it is delivered again after `after`, if known.
    /// Otherwise the time grows with the number of deliveries, if they are counted, and is at least `again`.
    fn retry(self, after: Option<Duration>, again: Option<Duration>, key: Option<&Key>) -> Disposition {
        match self.is_last() {
            true => Disposition::DeadLetter,
            false => Disposition::Retry { after: after.unwrap_or_else(|| self.pause(again, key)) },
        }
    }

    /// Returns the pause before a message is delivered again if only `again` is known.
    fn pause(self, again: Option<Duration>, key: Option<&Key>) -> Duration {
        let (seed, again) = match key {
            Some(key) => (key.spread(), again),
            // A run in simulated time repeats to the byte.
            None if unreached_calls().clock().is_moved() => (0, again),
            None => {
                let seed = unreached_calls().new_owner().seed();
                (seed, again.or_else(|| Some(Backoff::DEFAULT.during(unreached_calls().store_failed(), seed))))
            }
        };
        match (self.number(), again) {
            (None, Some(again)) => again,
            (number, again) => Backoff::DEFAULT.after(number.unwrap_or(1), seed).max(again.unwrap_or_default()),
        }
    }
}

/// Holds since when no delivery of this process has reached a call: no connection was available, mostly.
fn unreached_calls() -> &'static Heartbeats {
    static UNREACHED: SharedOnce<Heartbeats> = SharedOnce::new();
    UNREACHED.get_or_init(|| Heartbeats::none(Arc::new(SystemClock::default())))
}

/// The pause of a delivery that reached no call. It grows for as long as no other delivery reaches one.
#[cfg(any(feature = "with-rusqlite-0_40", feature = "with-sqlx-0_8", feature = "with-tokio-postgres-0_7"))]
pub(crate) fn unreached() -> Duration {
    Backoff::DEFAULT.during(unreached_calls().store_failed(), unreached_calls().new_owner().seed())
}

/// The place of an observed call among the calls of its delivery.
pub(crate) type Seat = Option<usize>;

/// State of an observed delivery, including the parts that its calls may read.
#[derive(Default)]
pub(crate) struct Observer {
    calls: Vec<ObservedCall>,
    /// Seats of these calls in the enclosing observation.
    outside: Vec<Seat>,
    /// True if a call has changed since the enclosing observation got the calls.
    changed: bool,
    /// True if a call has finished with an error in the current poll, or in the last poll.
    final_error: bool,
    pub(super) budget: Budget,
    timer: TimerSlot,
    /// Batch of the delivery, and the position in that batch.
    pub(super) turns: Option<(Turns, usize)>,
    /// Time for which the broker may deliver the message again, if known; `Duration::MAX` means forever.
    redelivered_for: Option<Duration>,
    /// Group of messages that the broker wants handled in order.
    pub(super) group: Option<Box<str>>,
    /// Names of the message, for spans and records.
    message: Option<Arc<Message>>,
}

/// Attributes of a message in the terms of OpenTelemetry.
#[derive(Clone, Default)]
struct Message {
    /// System, destination and id of the message.
    called: Option<(&'static str, String, String)>,
    /// Trace that the message is a part of.
    traceparent: Option<Traceparent>,
}

/// Timer of the first call, if the delivery needs one.
#[derive(Clone, Debug, Default)]
pub enum TimerSlot {
    #[default]
    Unwanted,
    Wanted,
    Known(Timer, Option<Key>),
}

impl Observer {
    /// Notes the progress of a call.
    fn note(&mut self, seat: &mut Seat, call: ObservedCall) {
        self.changed = true;
        self.final_error |= call.ends_with_final_error();
        match seat.and_then(|seat| self.calls.get_mut(seat)) {
            Some(known) => *known = call,
            None => {
                *seat = Some(self.calls.len());
                // Most deliveries make one call; a vector that grows on its own reserves room for four.
                if self.calls.is_empty() {
                    self.calls.reserve_exact(1);
                }
                self.calls.push(call);
            }
        }
    }

    /// Reports the progress of the calls to the enclosing observation, which is the current one again. The enclosing
    /// observation gets each call as soon as that call has begun, so that no call is lost if this observation is
    /// dropped.
    fn report_to_outer(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        with_observer(|outer| {
            if self.outside.len() < self.calls.len() {
                self.outside.resize(self.calls.len(), None);
            }
            for (call, seat) in self.calls.iter().zip(&mut self.outside) {
                if seat.and_then(|seat| outer.calls.get(seat)) != Some(call) {
                    outer.note(seat, call.clone());
                }
            }
        });
    }

    /// Returns the key of the last call, its attempt, and the time until the next delivery, for a delivery that gets no
    /// further.
    fn last(observer: Option<&Self>) -> (Option<Key>, Option<u32>, Duration) {
        let Some(Self { calls, budget, .. }) = observer else {
            return (None, None, Budget::default().pause(None, None));
        };
        let last = calls.last();
        let (key, again) = (last.and_then(|call| call.key.clone()), last.and_then(|call| call.again));
        let pause = budget.pause(again, key.as_ref());
        (key, last.and_then(|call| call.attempt), pause)
    }

    /// Takes over the settings of the message from the enclosing observation. Returns whether that observation waits
    /// for a timer.
    fn is_inside_of_another(&mut self, wants_timer: bool) -> bool {
        let wanted_outside = with_observer(|outer| {
            self.budget = self.budget.or(outer.budget);
            self.redelivered_for = self.redelivered_for.or(outer.redelivered_for);
            if self.turns.is_none() {
                self.turns.clone_from(&outer.turns);
            }
            if self.message.is_none() {
                self.message.clone_from(&outer.message);
            }
            matches!(outer.timer, TimerSlot::Wanted)
        })
        .unwrap_or_default();
        if matches!(self.timer, TimerSlot::Unwanted) && (wants_timer || wanted_outside) {
            self.timer = TimerSlot::Wanted;
        }
        wanted_outside
    }
}

thread_local! {
    /// The observer of the delivery whose [`observe`] is being polled on this thread.
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
    /// True while [`OBSERVER`] has an observer. Each call looks several times, and most calls are not observed. This
    /// value needs no drop, so a look is one load.
    static IS_OBSERVED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `look` with the observer of the delivery whose [`observe`] is being polled on this thread, if there is one.
fn with_observer<R>(look: impl FnOnce(&mut Observer) -> R) -> Option<R> {
    if !IS_OBSERVED.get() {
        return None;
    }
    OBSERVER.with_borrow_mut(|observer| observer.as_mut().map(look))
}

/// Collects the outcomes of calls on this thread, until the guard is dropped.
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
        if let Some(observer) = self.observer {
            observer.report_to_outer();
        }
    }
}

fn swap(other: &mut Option<Observer>) {
    // Most calls are not observed.
    if IS_OBSERVED.get() || other.is_some() {
        OBSERVER.with_borrow_mut(|observer| {
            std::mem::swap(observer, other);
            IS_OBSERVED.set(observer.is_some());
        });
    }
}

/// Reports the progress of a call, or its end, to the enclosing `observe`.
pub(crate) fn report(seat: &mut Seat, call: impl FnOnce() -> ObservedCall) {
    with_observer(|observer| observer.note(seat, call()));
}

/// Notes the time until the next delivery, for a delivery that ends without another report of its call.
pub(super) fn report_again(seat: Seat, again: Option<Duration>) {
    with_observer(|observer| {
        if let Some(call) = seat.and_then(|seat| observer.calls.get_mut(seat)) {
            call.again = again;
        }
    });
}

/// Notes that the transaction of this delivery begins, for the first time or again. Until the transaction is settled,
/// the delivery counts as cut off, and the calls of an earlier try are forgotten.
#[cfg(any(feature = "with-rusqlite-0_40", feature = "with-sqlx-0_8", feature = "with-tokio-postgres-0_7"))]
pub(crate) fn unsettled() {
    with_observer(|observer| {
        observer.calls.fill(ObservedCall::NEW);
        observer.note(&mut Some(0), ObservedCall { progress: Progress::Reserving, ..ObservedCall::NEW });
    });
}

/// Notes that the transaction of this delivery is over, or could not begin.
#[cfg(any(feature = "with-rusqlite-0_40", feature = "with-sqlx-0_8", feature = "with-tokio-postgres-0_7"))]
pub(crate) fn settle(settled: TransactionEnd) {
    with_observer(|Observer { calls, changed, final_error, .. }| {
        *changed = true;
        // The first call stands for the transaction.
        let mut transaction = ObservedCall::NEW;
        if let TransactionEnd::NotBegun { again } = settled {
            // The calls of an earlier try are undone.
            calls.fill(ObservedCall::NEW);
            transaction.again = Some(again);
        }
        match calls.first_mut() {
            Some(first) => *first = transaction,
            None => calls.push(transaction),
        }
        let written: Vec<Key> = calls.iter().filter(|call| call.is_pending()).filter_map(|it| it.key.clone()).collect();
        for call in calls {
            let of_transaction = call.key.as_ref().is_some_and(|key| written.contains(key));
            call.settle(settled, of_transaction);
            *final_error |= call.ends_with_final_error();
        }
    });
}

/// Notes that a call on `store` begins, whose timer the delivery may need. Returns the delivery's batch and its index
/// there, if it is one of a batch.
pub(super) fn begins(store: &dyn Store, key: Option<&Key>) -> Option<(Turns, usize)> {
    with_observer(|observer| {
        // Entered just before this, at the end. Until its end is reported, the key distinguishes its pause from others.
        if let Some(call @ ObservedCall { progress: Progress::Reserving, key: None, .. }) = observer.calls.last_mut() {
            call.key = key.cloned();
        }
        if matches!(observer.timer, TimerSlot::Wanted) {
            observer.timer = TimerSlot::Known(store.heartbeats().timer(), key.cloned());
        }
        observer.turns.clone()
    })
    .flatten()
}

/// Returns the delivery count and the delivery limit of the current call's message.
pub(super) fn budget() -> Budget {
    with_observer(|observer| observer.budget).unwrap_or_default()
}

/// Returns the time for which the broker may deliver the current call's message again, if known; `Duration::MAX` means
/// forever.
pub(super) fn redelivered_for() -> Option<Duration> {
    with_observer(|observer| observer.redelivered_for).flatten()
}

/// Writes the names of the current call's message into the span of the call, if known.
pub(super) fn describe_message(span: &Span) {
    // Shared: a subscriber that is told the fields may look at the observer.
    OBSERVER.with_borrow(|observer| {
        let message = observer.as_ref().and_then(|observer| observer.message.as_ref());
        let Some((system, destination, id)) = message.and_then(|message| message.called.as_ref()) else { return };
        span.record("messaging.operation.type", "process");
        span.record("messaging.system", *system);
        span.record("messaging.destination.name", &**destination);
        span.record("messaging.message.id", &**id);
    });
}

/// Returns the trace that the current call's message is a part of, if known.
pub(super) fn traceparent() -> Option<Traceparent> {
    with_observer(|observer| observer.message.as_ref()?.traceparent).flatten()
}

/// Runs `future`, which handles one delivery, and returns its result and its [`Outcome`].
///
/// The [`Outcome`] describes the last idempotent call of the delivery. The [disposition](Outcome::disposition) depends
/// on the set of all calls that began, not on their order:
///
/// - A delivery that returns an error is never acknowledged, even if all of its calls succeeded: an error after a
///   successful call, such as a refused commit, means that the message has to come again.
/// - A delivery that returns `Ok` is acknowledged if nothing is left to do for any of its calls. If the delivery
///   swallowed the error of a call, the message is delivered again. If no delivery can change that error, the message
///   is set aside, although the delivery returned `Ok`. A recorded error that was swallowed leaves nothing to do.
/// - If the delivery returns a recorded error, the message is set aside. The delivery counts as returning that error if
///   the delivery ends in the same poll as the call. An error of a later poll is a different error, and its message is
///   delivered again.
/// - If a call was dropped before it returned, for example by a time-out around it, the message is delivered again. The
///   same applies to a call in a nested `observe`, `observe_all` or `transact`.
/// - If no idempotent function was reached, the message is delivered again, and the library logs a warning. A call in a
///   spawned task is observed there: `tokio::spawn(observe(…))`.
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
    /// Names the message in the spans of its calls: the broker in the terms of OpenTelemetry (`kafka`, `rabbitmq`,
    /// `aws_sqs`, `gcp_pubsub`), the queue or topic, and the id of the message. They become the attributes
    /// `messaging.system`, `messaging.destination.name` and `messaging.message.id`.
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

    /// Sets the trace that the message is a part of, from its header `traceparent`. The record keeps the trace, so that
    /// the span of a replay names the trace of the run that made the result (`idem.original_trace`). The HTTP layer
    /// sets the trace automatically.
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

    /// Sets the group in which the broker wants the message handled in order: the `MessageGroupId` of a FIFO queue of
    /// SQS, the partition of Kafka, the partition key of Kinesis. Within [`observe_all`](crate::observe_all) the
    /// deliveries of one group run one after the other, in their order. A delivery after one that is not acknowledged
    /// does not begin: it ends with [`Error::HeldBack`]. Outside of `observe_all` the group has no effect.
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, idempotent, observe, observe_all};
    /// # #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// # async fn ship(store: &MemoryStore, id: u64) -> Result<String, Error> {
    /// #     if id == 0 { Err(Error::NoAttempt) } else { Ok(format!("parcel for {id}")) }
    /// # }
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let store = MemoryStore::new();
    /// let messages = [("a", "customer 1", 0), ("b", "customer 1", 41), ("c", "customer 2", 42)];
    /// let calls = messages.map(|(id, group, order)| (id, observe(ship(&store, order)).group(group)));
    /// let batch = observe_all(calls).await;
    /// let failures = serde_json::to_string(&batch.item_failures()).unwrap();
    /// // "a" fails, so "b" does not begin.
    /// assert_eq!(failures, r#"{"batchItemFailures":[{"itemIdentifier":"a"},{"itemIdentifier":"b"}]}"#);
    /// # });
    /// ```
    pub fn group(self, group: impl Into<String>) -> Self {
        self.map_observer(|observer| observer.group = Some(group.into().into_boxed_str()))
    }

    /// Sets the time for which the broker may deliver the message again; `None` means forever.
    pub(crate) fn redelivered_for(self, longest: Option<Duration>) -> Self {
        self.map_observer(|observer| observer.redelivered_for = Some(longest.unwrap_or(Duration::MAX)))
    }

    /// Takes the group out of the delivery.
    pub(super) fn take_group(&mut self) -> Option<Box<str>> {
        self.observer.as_mut().and_then(|observer| observer.group.take())
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
        if let Some(observer) = this.observer {
            observer.final_error = false;
        }
        let observer = this.observer.as_ref();
        let lost = || {
            let (key, attempt, retry_after) = Observer::last(observer);
            Error::MessageLost { key, attempt, retry_after }
        };
        if let Some(output) = this.beat.lost(&lost, cx) {
            note_refusal();
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
                with_observer(|outer| outer.timer = timer.clone());
            }
        }
        polled
    }

    /// Ends the delivery, and returns its `output` with its outcome.
    fn conclude(self: Pin<&mut Self>, output: F::Output) -> (F::Output, Outcome, Observer) {
        let this = self.project();
        this.beat.stop();
        let mut observer = this.observer.take().unwrap_or_default();
        let returned = match (this.failed)(&output) {
            true => DeliveryResult::Err { with_a_call: observer.final_error },
            false => DeliveryResult::Ok,
        };
        let outcome = Outcome::of_delivery(std::mem::take(&mut observer.calls), returned, observer.budget);
        (output, outcome, observer)
    }
}

impl<F, T, E, B> Observe<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
{
    /// Turns a panic of the delivery into [`Error::Panicked`], so that the panic ends this delivery and not the
    /// consumer. The delivery is dropped first: its keys are freed, or count as interrupted under `on_crash = fail`.
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
        match std::panic::catch_unwind(AssertUnwindSafe(|| observe.as_mut().poll_observed(cx))) {
            Ok(polled) => {
                let (result, outcome, _) = observe.conclude(ready!(polled));
                Poll::Ready((result, outcome))
            }
            Err(_) => {
                Poll::Ready(observe.cut_off(|key, attempt, retry_after| Error::Panicked { key, attempt, retry_after }))
            }
        }
    }
}

impl<F, T, E, B> Observe<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    /// Drops the delivery. It ends with an error that is made of the key of its last call, the attempt, and the time
    /// until the next delivery.
    fn cut_off(
        mut self: Pin<&mut Self>,
        error: impl FnOnce(Option<Key>, Option<u32>, Duration) -> Error,
    ) -> (Result<T, E>, Outcome) {
        let mut this = self.as_mut().project();
        this.future.set(None);
        if let Some(observer) = this.observer {
            // The delivery ends for this reason, and not by the error of a call.
            observer.final_error = false;
        }
        let (key, attempt, retry_after) = Observer::last(this.observer.as_ref());
        let (result, outcome, _) = self.conclude(Err(E::from(error(key, attempt, retry_after))));
        (result, outcome)
    }
}

impl<F, T, E, B> CatchPanics<F, B>
where
    F: Future<Output = Result<T, E>>,
    E: From<Error>,
    B: Beats<Result<T, E>>,
{
    /// Drops the delivery because the deadline of its batch has passed.
    pub(super) fn passed_deadline(self: Pin<&mut Self>) -> (Result<T, E>, Outcome) {
        note_refusal();
        self.project().observe.cut_off(|key, attempt, retry_after| Error::DeadlinePassed { key, attempt, retry_after })
    }
}

impl<F: Future, B: Beats<F::Output>> Future for Observe<F, B> {
    type Output = (F::Output, Outcome);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let output = ready!(self.as_mut().poll_observed(cx));
        let (output, outcome, _) = self.conclude(output);
        Poll::Ready((output, outcome))
    }
}
