//! Attempts that hold their key while the body runs.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::attempt::{Attempt, CurrentGuard};
use super::ending::AttemptEnd;
use super::late;
use super::late::LateEndState;
use super::observed_call::ReportedDoubt;
use super::observer::{Observation, report_steps_in_doubt};
use super::poll_notes::{DoubtStage, NotesGuard, PollNotes};
use super::work::Work;
use crate::error::{Error, StepProblem};
use crate::policy::{Doubt, OnCrash, OptionalMillis, Policy, Uncertain};
use crate::record::messages::UnsentMessages;
use crate::record::{Finish, Journal, Lease, LeaseMark, Release, StoredResult, Verdict};
use crate::store::{AfterError, LeaseStanding, Limits, StepJournal, StoreError, StoreFuture};

/// An attempt that has reserved its key. The drop of this value releases the key, or marks the key as interrupted.
pub(super) struct HeldAttempt {
    /// The attempt. While the body is polled, the attempt is swapped with the current attempt of the thread: this field
    /// then holds the attempt of the outer call, or `None`.
    pub(super) attempt: Option<Attempt>,
    body: BodyStage,
    pub(super) takeover: bool,
    /// True if the loss of the lease cancels the body; false in shadow mode.
    pub(super) enforced: bool,
    limits: Limits,
    pub(super) on_uncertain: Option<fn(Uncertain<'_>)>,
    /// Release that the drop of this value writes; `None` if the drop writes nothing.
    on_drop: Option<Release>,
    /// Reason why the body ended; `None` while the body has not ended.
    ended: Option<BodyExit>,
    notes: PollNotes,
    /// True if the handler has a reconciler.
    reconciles: bool,
    /// Retention of a recorded error, if it differs from the retention of a value.
    error_ttl: OptionalMillis,
    /// Steps of earlier attempts; `None` if there are none.
    journal: Option<Journal>,
}

/// An attempt whose body has returned, and the ending to write. The type is separate from [`HeldAttempt`], because an
/// ending is large, and every earlier step of a call would carry the size of the ending.
pub(super) struct EndingAttempt {
    pub(super) held: HeldAttempt,
    /// Ending that the drop of this value writes; `None` if the drop writes nothing.
    pub(super) ending: Option<AttemptEnd>,
}

impl EndingAttempt {
    /// Sets the ending that is written if the encoding of the result panics. A body that has succeeded must not run
    /// again, and its messages leave without the result, too.
    #[inline]
    pub(super) fn unencoded(&mut self, is_ok: bool) {
        // A further message would not be part of the end.
        let messages = if self.held.sends() { self.held.seal_messages() } else { None };
        if is_ok {
            let unencodable = AttemptEnd::Finish(Finish::Completed(StoredResult::Unencodable));
            self.ending = Some(match messages.filter(|_| self.held.enforced) {
                Some(messages) => unencodable.with_messages(&messages),
                None => unencodable,
            });
        }
    }

    /// Sends the end of the attempt to the store once. Returns `None` if there is nothing to write.
    pub(super) fn write(&self) -> Option<StoreFuture<'_, Verdict>> {
        let Attempt { store, lease, .. } = self.held.attempt();
        self.ending.as_ref().map(|ending| late::write(&**store, lease, ending))
    }
}

impl Drop for EndingAttempt {
    fn drop(&mut self) {
        let ending = self.ending.take();
        self.held.ends(ending);
    }
}

/// Stage of a body.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyStage {
    /// The body is not polled yet, and its lease is not registered for heartbeats.
    New,
    /// The body is being polled. If the poll panics, the stage stays at this value.
    Polling,
    /// The body was polled at least once, and is not being polled now.
    Pending,
}

/// Reason why a body ended.
#[derive(Clone, Copy)]
pub(super) enum BodyExit {
    /// The body returned `Ok` (true) or `Err` (false).
    Returned(bool),
    /// The lease was lost.
    LeaseLost,
    /// The body ran for longer than the `timeout` of its policy.
    TimedOut,
    /// The lease lapsed, and the store refused its renewal permanently or failed to renew it for too long.
    Unrenewed,
}

impl HeldAttempt {
    /// Makes a held attempt. `in_doubt` is true if the reconciler must settle the effect of an earlier attempt first.
    pub(super) fn new(
        attempt: Attempt,
        takeover: bool,
        in_doubt: bool,
        enforced: bool,
        policy: &Policy,
        journal: Option<Journal>,
    ) -> Self {
        let release = match attempt.lease.on_crash {
            OnCrash::Retry => Release::Returned,
            OnCrash::Fail => Release::Interrupted,
        };
        let Policy { timeout, on_uncertain, max_attempts, reconciles, .. } = *policy;
        let notes = match in_doubt {
            true => {
                let may_run = max_attempts.is_none_or(|max| attempt.lease.attempts_used <= max.get());
                PollNotes { doubt: DoubtStage::Asked { may_run }, ..PollNotes::NEW }
            }
            false => PollNotes::NEW,
        };
        let limits = Limits::new(timeout, enforced.then(|| policy.longest_pause()));
        Self {
            attempt: Some(attempt),
            body: BodyStage::New,
            takeover,
            enforced,
            limits,
            on_uncertain,
            on_drop: Some(release),
            ended: None,
            notes,
            reconciles,
            error_ttl: policy.error_ttl,
            journal,
        }
    }

    pub(super) fn attempt(&self) -> &Attempt {
        self.attempt.as_ref().expect("swapped out only while the body is being polled")
    }

    /// Polls the body as this attempt, if its lease is held. The lease is registered for heartbeats before the first
    /// poll, because that poll may block the thread.
    pub(super) fn poll_body(&mut self, work: &mut dyn Work, cx: &mut Context<'_>) -> Poll<BodyExit> {
        if self.body != BodyStage::New {
            match self.standing(cx) {
                LeaseStanding::Lapsed => return Poll::Pending,
                LeaseStanding::Lost => return Poll::Ready(BodyExit::LeaseLost),
                LeaseStanding::TimedOut => return Poll::Ready(BodyExit::TimedOut),
                LeaseStanding::Unrenewed => return Poll::Ready(BodyExit::Unrenewed),
                LeaseStanding::Held => return self.poll_as_attempt(work, cx),
            }
        }
        let Attempt { store, lease, reserved_at, .. } = self.attempt();
        store.context().leases_here().register(
            store,
            lease,
            *reserved_at,
            self.limits,
            self.journal.as_ref(),
            self.enforced,
        );
        let polled = self.poll_as_attempt(work, cx);
        if polled.is_pending() && self.standing(cx) != LeaseStanding::Held {
            // The lease ended during the first poll, when no waker was registered yet, so the task must be woken here.
            cx.waker().wake_by_ref();
        }
        polled
    }

    fn poll_as_attempt(&mut self, work: &mut dyn Work, cx: &mut Context<'_>) -> Poll<BodyExit> {
        self.body = BodyStage::Polling;
        let polled = poll_as(&mut self.attempt, &mut self.notes, work, cx);
        self.body = BodyStage::Pending;
        polled.map(BodyExit::Returned)
    }

    /// Returns the standing of the lease. In shadow mode the standing never stops the body.
    fn standing(&self, cx: &Context<'_>) -> LeaseStanding {
        let Attempt { store, lease, .. } = self.attempt();
        match self.enforced {
            true => store.context().leases().standing(lease.owner, cx.waker()),
            false => LeaseStanding::Held,
        }
    }

    /// Returns whether a refused call in the body may be the cause of the body's error. An error after a refused call
    /// is not recorded, because the next delivery may succeed.
    pub(super) fn refused_inside(&self) -> bool {
        self.notes.refused
    }

    /// Checks the steps of a body that has returned `Ok`: logs the steps that earlier attempts have journaled and this
    /// attempt has not reached.
    ///
    /// # Errors
    /// [`Error::Step`] if the body has made such a step an error. The drop then ends the attempt.
    fn check_steps(&mut self) -> Result<(), Error> {
        let Some(journal) = self.journal.as_ref().and_then(|_| self.step_journal()) else { return Ok(()) };
        let Attempt { store, lease, .. } = self.attempt();
        let (key, store, attempt) = (&lease.key, store.context().name(), lease.attempt);
        let (unreached, is_strict) = journal.unreached(attempt);
        for (step, journaled_by) in &unreached {
            tracing::warn!(
                %key, store, attempt, %step, journaled_by,
                "an earlier attempt has journaled the step, and this attempt has not reached it"
            );
        }
        let Some((step, attempt)) = unreached.into_iter().next().filter(|_| is_strict) else { return Ok(()) };
        let problem = StepProblem::NotReached { attempt };
        let error = Error::Step { key: key.clone(), store, step: (*step).into(), problem };
        // The error tells the caller what happened, so the drop must not report the call as cancelled.
        self.on_uncertain = None;
        Err(error)
    }

    fn step_journal(&self) -> Option<Arc<StepJournal>> {
        let Attempt { store, lease, .. } = self.attempt();
        store.context().leases().known_journal(lease.owner)
    }

    /// Returns the consequences of the steps for the end of an attempt whose body returned an error (`is_ok` is false).
    pub(super) fn steps_after_error(&self, is_ok: bool) -> AfterError {
        if is_ok {
            return AfterError::default();
        }
        self.step_journal().map(|journal| journal.after_error()).unwrap_or_default()
    }

    /// Returns `end` with the journal beside its result, if the policy of the steps keeps the journal, and with the
    /// messages that the body has pushed.
    #[inline]
    pub(super) fn with_journal_and_messages(&self, end: AttemptEnd) -> AttemptEnd {
        let is_journaled = self.notes.journaled || self.journal.is_some();
        let sends = self.enforced && self.sends();
        if is_journaled || sends { self.beside_result(end, is_journaled, sends) } else { end }
    }

    #[cold]
    fn beside_result(&self, end: AttemptEnd, is_journaled: bool, sends: bool) -> AttemptEnd {
        let kept = if is_journaled { self.step_journal().and_then(|journal| journal.kept()) } else { None };
        let messages = if sends { self.seal_messages() } else { None };
        let end = match kept {
            Some(kept) => end.with_journal(&kept),
            None => end,
        };
        match messages {
            Some(messages) => end.with_messages(&messages),
            None => end,
        }
    }

    /// Returns whether the body may push messages.
    #[inline]
    fn sends(&self) -> bool {
        self.attempt().store.context().sender().is_some()
    }

    /// Accepts no further message, and returns those that the body has pushed; `None` if there are none.
    pub(super) fn seal_messages(&self) -> Option<UnsentMessages> {
        let Attempt { store, lease, .. } = self.attempt();
        store.context().leases().seal_messages(lease.owner)
    }

    /// Returns whether the store has published the messages of the body together with its finished record.
    pub(super) fn have_messages_left(&self) -> bool {
        let Attempt { store, lease, .. } = self.attempt();
        store.context().leases().have_messages_left(lease.owner)
    }

    /// Ends the renewals of an attempt whose end is recorded. Returns the attempt.
    pub(super) fn over(&mut self) -> Attempt {
        let attempt = self.attempt().clone();
        self.ends(None);
        attempt
    }

    /// Returns the progress of the reconciler.
    pub(super) fn doubt(&self) -> DoubtStage {
        self.notes.doubt
    }

    /// Sets the retention of a recorded error.
    pub(super) fn keeps_error(&mut self) {
        if let (Some(attempt), Some(ttl)) = (&mut self.attempt, self.error_ttl.get()) {
            attempt.lease.ttl = ttl;
        }
    }

    /// Reports that the body returned an error whose effect is in doubt. Returns who settles the doubt.
    pub(super) fn reported_doubt(&mut self) -> ReportedDoubt {
        let Attempt { store, lease, .. } = self.attempt();
        let (key, store, attempt) = (&lease.key, store.context().name(), lease.attempt);
        report_uncertain(self.on_uncertain, Uncertain { key, store, attempt, cause: Doubt::Reported });
        match self.reconciles {
            true => {
                tracing::warn!(%key, store, attempt, "the body returned an error, and its effect is in doubt; the next delivery asks the reconciler");
                ReportedDoubt::ForReconciler
            }
            false => {
                tracing::error!(
                    %key, store, attempt, "the body returned an error, its effect is in doubt, and no other body may run until an operator decides"
                );
                ReportedDoubt::ForOperator
            }
        }
    }

    /// Keeps the lease alive while the values of the body are dropped. The body is not polled again.
    pub(super) fn drops_values(&self) {
        let Some(Attempt { store, lease, .. }) = &self.attempt else { return };
        if self.body != BodyStage::New {
            store.context().leases().drops_values(lease.owner, self.limits.timeout());
        }
    }

    /// Converts this value into an attempt whose body has returned.
    pub(super) fn ending(mut self) -> EndingAttempt {
        if let (Some(attempt), true) = (&mut self.attempt, self.notes.journaled) {
            // The journal has changed the record, so the mark of the reservation no longer describes it.
            attempt.lease.mark = LeaseMark::default();
        }
        let ending = self.on_drop.map(AttemptEnd::Release);
        EndingAttempt { held: self, ending }
    }

    /// Returns whether the body returned `Ok`. If the body was cancelled, or did not reach a step that it must reach,
    /// returns the error of the call.
    pub(super) fn end_of(&mut self, ended: BodyExit) -> Result<bool, Error> {
        self.ended = Some(ended);
        let Attempt { store, lease, .. } = self.attempt();
        let (key, store, attempt) = (&lease.key, store.context().name(), lease.attempt);
        match ended {
            BodyExit::Returned(true) => self.check_steps().map(|()| true),
            BodyExit::Returned(false) => Ok(false),
            BodyExit::LeaseLost => {
                tracing::warn!(
                    %key, store, attempt,
                    "the lease was lost: another attempt has taken over, or the record was removed; the body was cancelled"
                );
                // Another attempt has written the record, or the record is gone, so the drop must not write.
                self.on_drop = None;
                Err(self.lost())
            }
            BodyExit::TimedOut => {
                self.drops_values();
                let timeout = self.limits.timeout();
                match self.on_drop {
                    Some(Release::Interrupted) => tracing::error!(
                        %key, store, attempt, ?timeout,
                        "the body ran for longer than its `timeout` and was cancelled; no other may run until an operator \
                         decides: `idem show KEY`, then `idem resolve` or `idem reopen`"
                    ),
                    _ => tracing::warn!(
                        %key, store, attempt, ?timeout, "the body ran for longer than its `timeout` and was cancelled"
                    ),
                }
                // The error reports the uncertainty to the caller, so the drop must not report it again. The drop still
                // frees the key.
                self.on_uncertain = None;
                Err(self.timed_out())
            }
            BodyExit::Unrenewed => {
                let source = self.attempt().store.context().leases().why_unrenewed(lease.owner);
                self.drops_values();
                match source.is_for_good() {
                    true => tracing::error!(
                        %key, store, attempt, error = %source,
                        "the lease lapsed, and the store refuses to renew it; the body was cancelled"
                    ),
                    false => tracing::warn!(
                        %key, store, attempt, error = %source,
                        "the lease lapsed, and the store has not renewed it for as long as a body may be paused; the body was \
                         cancelled"
                    ),
                }
                // The error reports the uncertainty to the caller, so the drop must not report it again. The drop still
                // ends the attempt.
                self.on_uncertain = None;
                Err(self.unrenewed(source))
            }
        }
    }

    /// Returns the pause before the message is delivered again if this attempt fails.
    pub(super) fn pause(&self) -> Duration {
        let Attempt { lease, backoff, .. } = self.attempt();
        backoff.after(lease.attempt, lease.owner.seed())
    }

    pub(super) fn lost(&self) -> Error {
        let Attempt { store, lease, .. } = self.attempt();
        let (key, store, attempt) = (lease.key.clone(), store.context().name(), lease.attempt);
        Error::LeaseLost { key, store, attempt, retry_after: self.pause(), source: None }
    }

    fn unrenewed(&self, source: StoreError) -> Error {
        let Attempt { store, lease, backoff, .. } = self.attempt();
        let (key, store, attempt) = (lease.key.clone(), store.context().name(), lease.attempt);
        let retry_after = match source.is_for_good() {
            // An unreadable record needs a repair, which takes minutes.
            true => backoff.after(8, lease.owner.seed()),
            false => self.pause(),
        };
        Error::LeaseLost { key, store, attempt, retry_after, source: Some(source) }
    }

    fn timed_out(&self) -> Error {
        let Attempt { store, lease, .. } = self.attempt();
        let (key, store, attempt) = (lease.key.clone(), store.context().name(), lease.attempt);
        Error::TimedOut { key, store, attempt, timeout: self.limits.timeout(), retry_after: self.pause() }
    }
}

/// Calls the user's hook for an operation whose effect is uncertain.
pub(super) fn report_uncertain(hook: Option<fn(Uncertain<'_>)>, uncertain: Uncertain<'_>) {
    let Some(hook) = hook else { return };
    if std::panic::catch_unwind(|| hook(uncertain)).is_err() {
        tracing::error!(key = %uncertain.key, "the hook `on_uncertain` panicked");
    }
}

/// Logs that a call was dropped while its body ran. The event names the key, because the span of the call is not the
/// current span.
fn log_dropped(late: LateEndState, store: &'static str, lease: &Lease) {
    let Lease { key, attempt, on_crash, .. } = lease;
    match (late, on_crash) {
        (LateEndState::Panicked | LateEndState::Cancelled, OnCrash::Fail) => tracing::error!(
            %key, store, attempt, panicked = late == LateEndState::Panicked,
            "the body started and did not return, and no other may run until an operator decides: `idem show KEY`, then \
             `idem resolve` or `idem reopen`"
        ),
        (LateEndState::Panicked, OnCrash::Retry) => tracing::warn!(
            %key, store, attempt, "the body panicked, and its effects may have happened in part; the next delivery runs it"
        ),
        (LateEndState::Cancelled, OnCrash::Retry) => tracing::info!(
            %key, store, attempt,
            "the call was dropped while its body ran, and its effects may have happened in part; the next delivery runs it"
        ),
        _ => {}
    }
}

/// Polls a body as `attempt`. Calls in the body are not observed by an `observe` outside of the body. `notes` gets the
/// notes about the body.
pub(super) fn poll_as(
    attempt: &mut Option<Attempt>,
    notes: &mut PollNotes,
    work: &mut dyn Work,
    cx: &mut Context<'_>,
) -> Poll<bool> {
    let mut nobody = None;
    let _notes = NotesGuard::enter(notes);
    let _observation = Observation::enter(&mut nobody);
    let _entered = CurrentGuard::enter(attempt);
    work.poll_body(cx)
}

impl HeldAttempt {
    /// Starts the late write of `ending`, unless the attempt has ended already.
    fn ends(&mut self, ending: Option<AttemptEnd>) {
        let Some(Attempt { store, lease, reserved_at, .. }) = self.attempt.take() else { return };
        let begun = self.body != BodyStage::New;
        let late = match (self.ended, &ending) {
            (None, _) if !begun => LateEndState::NotStarted,
            (None, _) if self.body == BodyStage::Polling => LateEndState::Panicked,
            (None, _) => LateEndState::Cancelled,
            (Some(BodyExit::TimedOut), _) => LateEndState::TimedOut,
            (Some(BodyExit::Unrenewed), _) => LateEndState::Unrenewed,
            (_, Some(AttemptEnd::Release(_))) => LateEndState::Returned,
            _ => LateEndState::Recording,
        };
        if begun && matches!(ending, Some(AttemptEnd::Release(_))) {
            let cause = if self.body == BodyStage::Polling { Doubt::Panicked } else { Doubt::Cancelled };
            let (key, attempt) = (&lease.key, lease.attempt);
            report_uncertain(self.on_uncertain, Uncertain { key, store: store.context().name(), attempt, cause });
            log_dropped(late, store.context().name(), &lease);
        }
        // An attempt whose body has not begun is released, under `on_crash = fail` too. If the reconciler of the
        // attempt has not answered, the operation is still in doubt.
        let ending = match (self.notes.doubt, begun) {
            // After a lost lease there is nothing to write.
            (DoubtStage::Asked { .. }, true) => ending.map(|_| AttemptEnd::Release(Release::Unresolved)),
            (DoubtStage::Asked { .. }, false) => Some(AttemptEnd::Release(Release::Unresolved)),
            (_, true) => ending,
            (_, false) => Some(AttemptEnd::Release(Release::NotStarted)),
        };
        let ends_late = ending.as_ref().and_then(|_| late::ends_late(&store, &lease));
        let deregistered = begun.then(|| store.context().leases().deregister(lease.owner)).flatten();
        let (confirmed_at, steps_in_doubt) = deregistered.unwrap_or((reserved_at, 0));
        if steps_in_doubt > 0 {
            report_steps_in_doubt(&lease.key, lease.attempt, steps_in_doubt);
        }
        if let Some(ending) = ending {
            late::write_late(store, lease, confirmed_at, ending, late, ends_late);
        }
    }
}

impl Drop for HeldAttempt {
    fn drop(&mut self) {
        self.ends(self.on_drop.map(AttemptEnd::Release));
    }
}
