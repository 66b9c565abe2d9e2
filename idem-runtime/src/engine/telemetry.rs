//! Telemetry of a call: its span, its events, its metrics. Only this module writes telemetry, so that every way to make
//! a call has the same telemetry: the attribute, [`Operation`](super::Operation), calls in transactions, the HTTP layer
//! and tower.

use std::sync::Arc;
use std::time::Duration;

use tracing::Span;
use tracing::field::Empty;

use super::Subject;
use super::ending::RecordContent;
use super::observed_call::{ObservedCall, Refusal, ReportedDoubt};
use super::observer;
use super::poll_notes::DoubtStage;
use super::replay::Replay;
use crate::clock::Instant;
use crate::error::{Disposition, Error};
use crate::metrics::{CallOutcome, DispositionLabel, DoubtLabel, ScopeCells};
use crate::policy::{Doubt, Mode};
use crate::store::{Store, StoreErrorKind};

/// Value of `body_began` while no body runs.
const NO_BODY: u64 = u64::MAX;

/// Span and metrics of one call. If the call is dropped before its end, a cancellation or a panic is recorded.
pub(super) struct Telemetry {
    /// Span of the call, if a subscriber listens. Boxed: every call would carry the size of the span inline.
    pub(super) span: Option<Box<Span>>,
    pub(super) facts: Facts,
}

/// Facts about a call that its metrics need.
pub(super) struct Facts {
    /// Counters of the scope; `None` once the call is over.
    cells: Option<Arc<ScopeCells>>,
    /// True once the call was polled. A call that was never polled is not counted.
    begun: bool,
    /// Start of the body in nanoseconds since the origin of the clock, or [`NO_BODY`].
    body_began: u64,
    /// True while the body is being polled. Stays true if that poll panics.
    pub(super) polling: bool,
    /// Outcome of the call, if a replay, an error or the mode decides the outcome; `None` if the result of the body
    /// decides.
    outcome: Option<CallOutcome>,
}

impl Telemetry {
    /// Creates the telemetry of a call. The current span becomes the parent of the call's span. A function with
    /// `#[idempotent]` creates its call when the function is first polled, so the parent is the span of that poll.
    pub(super) fn new(subject: &Subject) -> Self {
        let Subject { store, key, policy, fingerprint } = subject;
        // A call without a valid key is still counted under its scope.
        let (scope, key) = match key {
            Ok(key) => (key.scope(), Some(key)),
            Err(error) => (error.scope.as_str(), None),
        };
        let name = store.context().name();
        let cells = store.context().metrics_here().scope(scope);
        // Empty fields are recorded later, once their values are known.
        let span = tracing::info_span!(
            "idempotent",
            otel.name = %format_args!("idempotent {scope}"),
            otel.status_code = Empty,
            error.r#type = Empty,
            idem.scope = scope,
            idem.key = key.map(display),
            idem.store = name,
            idem.lease_ms = millis(policy.lease),
            idem.outcome = Empty,
            idem.attempt = Empty,
            idem.takeover = Empty,
            idem.replayed = Empty,
            idem.age_ms = Empty,
            idem.waited_ms = Empty,
            idem.disposition = Empty,
            idem.retry_after_ms = Empty,
            idem.uncertain = Empty,
            idem.original_trace = Empty,
            messaging.operation.r#type = Empty,
            messaging.system = Empty,
            messaging.destination.name = Empty,
            messaging.message.id = Empty,
        );
        let span = (!span.is_disabled()).then(|| Box::new(span));
        if let Some(span) = &span {
            observer::describe_message(span);
        }
        // Shadow mode compares the keys of equal payloads, to detect keys that change although the payload is the same.
        if let (Some(key), Some(Ok(fingerprint)), Mode::Shadow) = (key, fingerprint, policy.current_mode()) {
            cells.payload_under_key(fingerprint.seed(), key.seed());
        }
        let facts = Facts { cells: Some(cells), begun: false, body_began: NO_BODY, polling: false, outcome: None };
        Self { span, facts }
    }
}

impl Facts {
    /// Records that the call is polled for the first time.
    pub(super) fn begins(&mut self) {
        self.begun = true;
    }

    /// Records that the call has waited for another attempt.
    pub(super) fn waited(&self, span: Option<&Span>, waited: Duration) {
        // A call that waited only for an item of its batch has the duration zero, and does not count as a wait for a
        // running attempt.
        if let Some(cells) = self.cells.as_ref().filter(|_| !waited.is_zero()) {
            cells.waited(waited);
        }
        if let Some(span) = span {
            span.record("idem.waited_ms", millis(waited));
        }
    }

    /// Records that the key is reserved for this attempt.
    pub(super) fn reserved(&self, span: Option<&Span>, attempt: u32, takeover: bool) {
        if takeover && let Some(cells) = &self.cells {
            cells.took_over();
        }
        if let Some(span) = span {
            span.record("idem.attempt", attempt);
            span.record("idem.takeover", takeover);
        }
    }

    /// Records that the body runs without a reservation.
    pub(super) fn unprotected(&mut self, mode: Mode, bypassed: Option<Refusal>) {
        if bypassed == Some(Refusal::FingerprintMismatch)
            && let Some(cells) = &self.cells
        {
            cells.key_is_too_coarse();
        }
        self.outcome = Some(match (mode, bypassed) {
            (Mode::Off, _) => CallOutcome::Off,
            (Mode::Shadow, Some(_)) => CallOutcome::Suppressed,
            _ => CallOutcome::Unprotected,
        });
    }

    /// Records that the body is about to be polled for the first time, at `now` if that time is known.
    pub(super) fn body_begins(&mut self, now: Option<Instant>) {
        let now = now.or_else(|| self.cells.as_ref().map(|cells| cells.now()));
        self.body_began = now.map_or(NO_BODY, Instant::nanos);
    }

    /// Records that the body has returned or was cancelled; `lease` is the duration of its lease, if it had a
    /// reservation.
    pub(super) fn body_ended(&mut self, lease: Option<Duration>) {
        let began = std::mem::replace(&mut self.body_began, NO_BODY);
        if let Some(cells) = self.cells.as_ref().filter(|_| began != NO_BODY) {
            cells.ran(Duration::from_nanos(cells.now().nanos().saturating_sub(began)), lease);
        }
    }

    /// Records that the attempt has ended, and which part of the end its record holds.
    pub(super) fn recorded(&self, is_ok: bool, attempt: Option<u32>, content: RecordContent) {
        let (Some(cells), Some(attempt), true) = (&self.cells, attempt, is_ok) else { return };
        match content {
            RecordContent::Result { bytes } => cells.recorded(attempt, bytes),
            RecordContent::Completion(why) => cells.recorded_without_result(attempt, why),
            RecordContent::Nothing => {}
        }
    }

    /// Records that the call returns a recorded result.
    pub(super) fn replayed(&mut self, span: Option<&Span>, replay: &Replay, waited: bool) {
        let Replay { key, store, attempt, age, ttl, .. } = replay;
        if let (Some(cells), Some(age)) = (&self.cells, *age) {
            cells.replayed(age, *ttl);
        }
        self.outcome = Some(if waited { CallOutcome::WaitedReplayed } else { CallOutcome::Replayed });
        if let Some(span) = span {
            span.record("idem.replayed", true);
            span.record("idem.attempt", *attempt);
            if let Some(age) = age {
                span.record("idem.age_ms", millis(*age));
            }
            if let Some(run) = replay.provenance.traceparent() {
                span.record("idem.original_trace", run.trace_id());
            }
        }
        tracing::debug!(%key, store, attempt, "a duplicate: the recorded result is returned");
    }

    /// Records that the call returns `error` in place of a result.
    pub(super) fn refused(&mut self, span: Option<&Span>, error: &Error) {
        let outcome = outcome_of(error);
        self.outcome = Some(outcome);
        if let (Some(cells), Some(uncertain)) = (&self.cells, error.uncertain()) {
            cells.is_uncertain(label(uncertain.cause));
        }
        if let Some(span) = span
            && outcome != CallOutcome::InProgress
        {
            fails(span, outcome);
        }
        log_error(error);
    }

    /// Records the doubt that the body has reported, if any.
    pub(super) fn reports_doubt(&self, reported: Option<ReportedDoubt>) {
        if let (Some(cells), Some(_)) = (&self.cells, reported) {
            cells.is_uncertain(DoubtLabel::Reported);
        }
    }

    /// Records the end of the reconciler, if the reconciler was asked and the body did not run.
    pub(super) fn settled(&mut self, span: Option<&Span>, doubt: DoubtStage) {
        let outcome = match doubt {
            DoubtStage::Settled | DoubtStage::Asked { .. } => return,
            DoubtStage::Done => CallOutcome::Reconciled,
            DoubtStage::Unresolved => CallOutcome::Unresolved,
            DoubtStage::Exhausted => CallOutcome::AttemptsExhausted,
        };
        self.outcome = Some(outcome);
        if let Some(span) = span.filter(|_| outcome != CallOutcome::Reconciled) {
            fails(span, outcome);
        }
    }

    /// Records that the call has returned.
    pub(super) fn over(&mut self, span: Option<&Span>, seen: &ObservedCall) {
        let Some(cells) = self.cells.take() else { return };
        let disposed = seen.disposition();
        let label = self.outcome.unwrap_or(match disposed {
            Disposition::Ack => CallOutcome::Executed,
            _ => CallOutcome::Failed,
        });
        let disposition = match disposed {
            Disposition::Ack => DispositionLabel::Ack,
            Disposition::Retry { .. } => DispositionLabel::Retry,
            Disposition::DeadLetter => DispositionLabel::DeadLetter,
        };
        cells.ended(label);
        cells.disposed(disposition);
        let Some(span) = span else { return };
        span.record("idem.outcome", label.name());
        span.record("idem.disposition", disposition.name());
        if let Disposition::Retry { after } = disposed {
            span.record("idem.retry_after_ms", millis(after));
        }
        if seen.uncertain() {
            span.record("idem.uncertain", true);
        }
        if label == CallOutcome::Failed {
            fails(span, label);
        }
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        let Self { span, facts } = self;
        let Some(cells) = facts.cells.take().filter(|_| facts.begun) else { return };
        let (outcome, doubt) = match facts.polling {
            true => (CallOutcome::Panicked, DoubtLabel::Panicked),
            false => (CallOutcome::Cancelled, DoubtLabel::Cancelled),
        };
        cells.ended(outcome);
        let is_uncertain = facts.body_began != NO_BODY;
        if is_uncertain {
            cells.is_uncertain(doubt);
        }
        if let Some(span) = span {
            span.record("idem.outcome", outcome.name());
            span.record("idem.uncertain", is_uncertain);
            fails(span, outcome);
        }
    }
}

fn fails(span: &Span, outcome: CallOutcome) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", outcome.name());
}

fn outcome_of(error: &Error) -> CallOutcome {
    match error {
        Error::MissingKey { .. } => CallOutcome::MissingKey,
        Error::NoAttempt
        | Error::Step { .. }
        | Error::Outbox { .. }
        | Error::InvalidKey { .. }
        | Error::InvalidFingerprint { .. }
        | Error::InvalidPolicy { .. } => CallOutcome::Invalid,
        Error::InProgress { .. } => CallOutcome::InProgress,
        Error::FingerprintMismatch { .. } => CallOutcome::FingerprintMismatch,
        Error::Interrupted { .. } => CallOutcome::Interrupted,
        Error::AttemptsExhausted { .. } => CallOutcome::AttemptsExhausted,
        Error::LeaseLost { .. } => CallOutcome::LeaseLost,
        Error::TimedOut { .. } => CallOutcome::TimedOut,
        Error::Panicked { .. } => CallOutcome::Panicked,
        Error::MessageLost { .. } | Error::DeadlinePassed { .. } | Error::HeldBack { .. } => CallOutcome::Cancelled,
        Error::Unrecorded { .. } => CallOutcome::Unrecorded,
        Error::ResultUnavailable { .. } => CallOutcome::ResultUnavailable,
        Error::Unsent { .. } => CallOutcome::Unsent,
        Error::Store { .. } => CallOutcome::StoreError,
    }
}

/// Logs an error, at a level that matches the need for an operator. An outage of the store is logged by the store
/// handle, once for all calls. A lost lease and a passed time limit are logged where they are detected.
fn log_error(error: &Error) {
    match error {
        Error::Unrecorded { key, store, attempt, source, .. } => tracing::error!(
            %key, store, attempt, error = %source,
            "the body ran, and its result could not be recorded; find out whether it took effect before it runs again: if it did, \
             `idem resolve`"
        ),
        Error::Interrupted { key, store, attempt, .. } => tracing::error!(
            %key, store, attempt,
            "the effect of an earlier attempt is in doubt, and no other may run until an operator decides: `idem show KEY`, then \
             `idem resolve` or `idem reopen`"
        ),
        Error::AttemptsExhausted { key, store, attempts } => tracing::error!(
            %key, store, attempts,
            "as many attempts as are allowed have started, and no other may run until an operator decides: `idem show KEY`, \
             then `idem reopen` or `idem resolve`"
        ),
        Error::Store { key, store, source, .. } if source.kind() == StoreErrorKind::Corrupt => tracing::error!(
            %key, store, error = %source, "what is stored for the key can't be read; the body did not run. `idem show KEY` \
             prints the reason"
        ),
        Error::Store { key, store, source, .. } => {
            tracing::debug!(%key, store, error = %source, "the store failed; the body did not run");
        }
        Error::InProgress { key, store, attempt, .. } => {
            tracing::debug!(%key, store, attempt, "a duplicate: another attempt is running");
        }
        Error::FingerprintMismatch { key, store, attempt, payloads } => tracing::warn!(
            %key, store, attempt, %payloads,
            "the key was used with another payload; the body did not run. If two operations share a key, give each one of its \
             own; if the type of the payload changed with a deployment, leave a new field out while it is absent, or hash only \
             parts that stay"
        ),
        Error::ResultUnavailable { key, store, problem, .. } => {
            tracing::warn!(
                %key, store, %problem,
                "the operation has finished, and its result can't be replayed; `idem resolve` supplies a result"
            );
        }
        Error::MissingKey { scope } => tracing::warn!(scope, "a message has no key; the body did not run"),
        Error::InvalidKey { .. } | Error::InvalidFingerprint { .. } | Error::InvalidPolicy { .. } => {
            tracing::warn!(%error, "the call can't be protected; the body did not run");
        }
        // These errors are logged where they are detected.
        Error::NoAttempt
        | Error::Unsent { .. }
        | Error::Outbox { .. }
        | Error::Step { .. }
        | Error::LeaseLost { .. }
        | Error::TimedOut { .. }
        | Error::Panicked { .. }
        | Error::MessageLost { .. }
        | Error::DeadlinePassed { .. }
        | Error::HeldBack { .. } => {}
    }
}

fn label(doubt: Doubt) -> DoubtLabel {
    match doubt {
        Doubt::LeaseLost => DoubtLabel::LeaseLost,
        Doubt::Unrecorded => DoubtLabel::Unrecorded,
        Doubt::TimedOut => DoubtLabel::TimedOut,
        Doubt::Cancelled => DoubtLabel::Cancelled,
        Doubt::Panicked => DoubtLabel::Panicked,
        Doubt::Interrupted => DoubtLabel::Interrupted,
        Doubt::Reported => DoubtLabel::Reported,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
