//! The observed delivery of the current thread, to which calls report.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use tracing::Span;

use super::beat::TimerSlot;
use super::budget::Budget;
use super::observed_call::{ObservedCall, Progress};
#[cfg(feature = "within")]
use super::observed_call::{RecordedPart, TransactionEnd};
use super::turns::Turns;
use crate::key::Key;
use crate::record::Traceparent;
use crate::store::Store;

/// Index of an observed call among the calls of its delivery; `None` before its first report.
pub(crate) type Seat = Option<usize>;

/// State of an observed delivery. The calls of the delivery read parts of this state.
#[derive(Default)]
pub(crate) struct Observer {
    pub(super) calls: Vec<ObservedCall>,
    /// Index of each call of `calls` among the calls of the enclosing observation; `None` before its first report.
    pub(super) outside: Vec<Seat>,
    /// True if a call has changed since the last report to the enclosing observation.
    pub(super) changed: bool,
    /// Number of steps that the calls have left in doubt, and the number that the enclosing observation knows.
    // Not a part of a call: the future of each call would carry it.
    pub(super) steps_in_doubt: (u32, u32),
    /// True if a call finished with a final error in the current poll of the delivery or, between two polls, in the
    /// last poll.
    pub(super) final_error: bool,
    pub(super) budget: Budget,
    pub(super) timer: TimerSlot,
    /// Batch of the delivery, and the index of the delivery in the batch; `None` outside of a batch.
    pub(super) turns: Option<(Turns, usize)>,
    /// Time for which the broker may go on redelivering the message, if known; `Duration::MAX` means that there is no
    /// limit.
    pub(super) redelivered_for: Option<Duration>,
    /// Group of messages that the broker wants handled in order.
    pub(super) group: Option<Box<str>>,
    /// Attributes of the message, for spans and records.
    pub(super) message: Option<Arc<Message>>,
}

/// Attributes of a message in the terms of OpenTelemetry.
#[derive(Clone, Default)]
pub(super) struct Message {
    /// System, destination and id of the message.
    pub(super) called: Option<(&'static str, String, String)>,
    /// Trace of the message.
    pub(super) traceparent: Option<Traceparent>,
}

impl Observer {
    /// Records the progress of a call. A call without an index gets the next index, in `seat`.
    pub(super) fn note(&mut self, seat: &mut Seat, call: ObservedCall) {
        self.changed = true;
        self.final_error |= call.ends_with_final_error();
        match seat.and_then(|seat| self.calls.get_mut(seat)) {
            Some(known) => *known = call,
            None => {
                *seat = Some(self.calls.len());
                // Most deliveries make one call, but the first `push` of a vector would reserve space for four.
                if self.calls.is_empty() {
                    self.calls.reserve_exact(1);
                }
                self.calls.push(call);
            }
        }
    }

    /// Reports the progress of the calls to the enclosing observation, which is now the current observation. The
    /// enclosing observation gets each call as soon as the call has begun, so that no call is lost if this observation
    /// is dropped.
    fn report_to_outer(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        with_observer(|outer| {
            let (steps, known) = &mut self.steps_in_doubt;
            outer.add_steps_in_doubt(steps.saturating_sub(std::mem::replace(known, *steps)));
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

    fn add_steps_in_doubt(&mut self, steps: u32) {
        self.steps_in_doubt.0 = self.steps_in_doubt.0.saturating_add(steps);
        self.changed |= steps > 0;
    }

    /// Returns key and attempt of the last call, and the time until the next delivery, for a delivery that the library
    /// ends early.
    pub(super) fn last(observer: Option<&Self>) -> (Option<Key>, Option<u32>, Duration) {
        let Some(Self { calls, budget, .. }) = observer else {
            return (None, None, Budget::default().pause(None, None));
        };
        let last = calls.last();
        let (key, again) = (last.and_then(|call| call.key.clone()), last.and_then(|call| call.again));
        let pause = budget.pause(again, key.as_ref());
        (key, last.and_then(|call| call.attempt), pause)
    }

    /// If this observation lacks a setting of the message, copies the setting from the enclosing observation. Returns
    /// whether the enclosing observation needs a timer.
    pub(super) fn is_inside_of_another(&mut self, wants_timer: bool) -> bool {
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
    /// Observer of the delivery whose [`observe`] is being polled on this thread.
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
    /// True while [`OBSERVER`] holds an observer. A call checks this several times, and most calls are not observed. A
    /// thread-local value without a destructor is read by one load.
    static IS_OBSERVED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `look` with the observer of the delivery whose [`observe`] is being polled on this thread, if such a delivery
/// exists.
pub(super) fn with_observer<R>(look: impl FnOnce(&mut Observer) -> R) -> Option<R> {
    if !IS_OBSERVED.get() {
        return None;
    }
    OBSERVER.with_borrow_mut(|observer| observer.as_mut().map(look))
}

/// Makes an observer the current observer of this thread until the guard is dropped.
pub(crate) struct Observation<'a> {
    pub(super) observer: &'a mut Option<Observer>,
}

impl<'a> Observation<'a> {
    /// Makes `observer` current. With `None`, calls are not observed.
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

pub(super) fn swap(other: &mut Option<Observer>) {
    // Returns early, because most calls are not observed.
    if IS_OBSERVED.get() || other.is_some() {
        OBSERVER.with_borrow_mut(|observer| {
            std::mem::swap(observer, other);
            IS_OBSERVED.set(observer.is_some());
        });
    }
}

/// Reports the progress or the end of a call to the enclosing `observe`.
pub(crate) fn report(seat: &mut Seat, call: impl FnOnce() -> ObservedCall) {
    with_observer(|observer| observer.note(seat, call()));
}

/// Records that an attempt of the delivery has ended, and leaves this number of steps in doubt. The drop of an attempt
/// calls this function, so the attempt is found by its key and number: a dropped call does not know whether the
/// observation that is current now is the one to which it reported.
pub(super) fn report_steps_in_doubt(key: &Key, attempt: u32, steps: u32) {
    with_observer(|observer| {
        let is_of_attempt =
            |call: &ObservedCall| call.attempt == Some(attempt) && call.key.as_ref() == Some(key) && call.cancelled();
        if observer.calls.iter().any(is_of_attempt) {
            observer.add_steps_in_doubt(steps);
        }
    });
}

/// Records the time until the next delivery, in case the call ends without a further report.
pub(super) fn report_again(seat: Seat, again: Option<Duration>) {
    with_observer(|observer| {
        if let Some(call) = seat.and_then(|seat| observer.calls.get_mut(seat)) {
            call.again = again;
        }
    });
}

/// Records that the transaction of this delivery begins, for the first time or again. Forgets the calls of an earlier
/// try. The first entry becomes a call that reserves its key: if the delivery ends before [`settle`] is called, the
/// message is delivered again.
#[cfg(feature = "within")]
pub(crate) fn unsettled() {
    with_observer(|observer| {
        observer.calls.fill(ObservedCall::NEW);
        observer.note(&mut Some(0), ObservedCall { progress: Progress::Reserving, ..ObservedCall::NEW });
    });
}

/// Records that the transaction of this delivery has ended, or could not begin.
#[cfg(feature = "within")]
pub(crate) fn settle(settled: TransactionEnd) {
    with_observer(|Observer { calls, changed, final_error, .. }| {
        *changed = true;
        // The entry of the first call holds the state of the transaction.
        let mut transaction = ObservedCall::NEW;
        match settled {
            TransactionEnd::NotBegun { again } => {
                // The calls of an earlier try are undone, and must not decide the disposition.
                calls.fill(ObservedCall::NEW);
                transaction.again = Some(again);
            }
            TransactionEnd::Unsent(error) => {
                transaction.progress = Progress::Unsent { ran: true, kept: RecordedPart::Result, error };
            }
            TransactionEnd::Committed | TransactionEnd::RolledBack { .. } => {}
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

/// Records that a call on `store` begins. A delivery that needs a timer takes the timer of its first call. Returns the
/// batch of the delivery and the index of the delivery in that batch; `None` outside of a batch.
pub(super) fn begins(store: &dyn Store, key: Option<&Key>) -> Option<(Turns, usize)> {
    with_observer(|observer| {
        // The call was added last, without its key. The key seeds the pause of the delivery, in case the call is
        // dropped.
        if let Some(call @ ObservedCall { progress: Progress::Reserving, key: None, .. }) = observer.calls.last_mut() {
            call.key = key.cloned();
        }
        if matches!(observer.timer, TimerSlot::Wanted) {
            observer.timer = TimerSlot::Known(store.context().timer(), key.cloned());
        }
        observer.turns.clone()
    })
    .flatten()
}

/// Returns the delivery count and the delivery limit of the message that is being handled.
pub(super) fn budget() -> Budget {
    with_observer(|observer| observer.budget).unwrap_or_default()
}

/// Returns the time for which the broker may go on redelivering the current message, if known; `Duration::MAX` means
/// that there is no limit.
pub(super) fn redelivered_for() -> Option<Duration> {
    with_observer(|observer| observer.redelivered_for).flatten()
}

/// Writes the names of the current message, if known, into the span of the call.
pub(super) fn describe_message(span: &Span) {
    // The borrow is shared, because a subscriber that receives these fields may itself borrow the observer.
    OBSERVER.with_borrow(|observer| {
        let message = observer.as_ref().and_then(|observer| observer.message.as_ref());
        let Some((system, destination, id)) = message.and_then(|message| message.called.as_ref()) else { return };
        span.record("messaging.operation.type", "process");
        span.record("messaging.system", *system);
        span.record("messaging.destination.name", &**destination);
        span.record("messaging.message.id", &**id);
    });
}

/// Returns the trace of the current message, if known.
pub(super) fn traceparent() -> Option<Traceparent> {
    with_observer(|observer| observer.message.as_ref()?.traceparent).flatten()
}
