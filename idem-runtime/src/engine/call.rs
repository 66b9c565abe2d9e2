//! State machine of one call. The types of its body and result are hidden behind [`Work`].
//!
//! ```text
//!              ┌─ Reserved ───> Body ── returned ──> End ──┐
//!  Begin ──────┼─ Unprotected ─> Unprotected ── (Sending) ─┼──> Over
//!              └─ Replay, Refused ─────────────────────────┘
//! ```
//!
//! The [`Telemetry`] of the call writes its span, its events and its metrics.
//!
//! `Body` goes directly to `Over` if the lease is lost or the time limit is over. If a call is dropped in `Body` or
//! `End`, the drop of its [`HeldAttempt`] ends the attempt. On every way out the values of the body are dropped before
//! the key is freed.
//!
//! The future is not made by an `async fn`, because an `async fn` would store the body twice, and so double the future
//! at every level of nested calls.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tracing::Span;

use super::Subject;
use super::attempt::Attempt;
use super::begin::{BeginResult, Start, begin};
use super::end::end;
use super::ending::{AttemptEnd, RecordContent};
use super::held::{EndingAttempt, HeldAttempt, poll_as, report_uncertain};
use super::observed_call::{Commit, ErrorFacts, ObservedCall, Progress, RecordedPart, Refusal, ReportedDoubt};
use super::observer::{Seat, report, report_again};
use super::outbox;
use super::poll_notes::{DoubtStage, PollNotes, ask_again, note_refusal};
use super::recorder::{Recorder, encoded};
use super::telemetry::{Facts, Telemetry};
use super::turns::Turn;
use super::work::Work;
use crate::codec::{ResultProblem, RoundTripError};
use crate::error::{Disposition, Error};
use crate::policy::{OnUndecodable, Uncertain};
use crate::record::{Finish, Release, State};
use crate::store::AfterError;

/// Makes the future of a call of a handler.
pub(super) fn run<T, E, R, B>(subject: Subject, recorder: R, body: B) -> impl Future<Output = Result<T, E>>
where
    R: Recorder<T, E>,
    E: From<Error>,
    B: Future<Output = Result<T, E>>,
{
    Run { body: Some(body), call: typed(subject, recorder) }
}

/// Makes a call without its body.
#[inline]
pub(super) fn typed<R, T, E>(subject: Subject, recorder: R) -> TypedCall<impl Protocol, R, T, E> {
    let migrates = matches!(subject.policy.on_undecodable, OnUndecodable::Migrate(_));
    let slot = ResultSlot { recorder, result: None, is_recorded: false, migrates };
    TypedCall { slot, protocol: protocol(subject) }
}

/// Body of a call, without its own type. Dropped as soon as it has ended.
trait Body<T, E> {
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T, E>>;

    fn clear(self: Pin<&mut Self>);
}

// The compiler makes a copy of this `impl` for each handler: keep it minimal.
impl<T, E, B: Future<Output = Result<T, E>>> Body<T, E> for Option<B> {
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T, E>> {
        match self.as_pin_mut() {
            Some(body) => body.poll(cx),
            None => ended(),
        }
    }

    fn clear(mut self: Pin<&mut Self>) {
        self.set(None);
    }
}

#[cold]
fn ended() -> ! {
    unreachable!("the body is present until it has ended")
}

/// Body and result of a call. Handlers with the same types share this code.
struct BodyAndSlot<'a, R, T, E> {
    body: Pin<&'a mut (dyn Body<T, E> + 'a)>,
    slot: &'a mut ResultSlot<R, T, E>,
}

impl<R: Recorder<T, E>, T, E: From<Error>> Work for BodyAndSlot<'_, R, T, E> {
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let result = ready!(self.body.as_mut().poll(cx));
        Poll::Ready(self.slot.keep(result))
    }

    fn record(&mut self, max_result_bytes: usize) -> AttemptEnd {
        self.slot.record(max_result_bytes)
    }

    fn drop_body(&mut self) {
        self.body.as_mut().clear();
    }

    fn replay(&mut self, state: &State, on_undecodable: OnUndecodable) -> Result<bool, ResultProblem> {
        self.slot.replay(state, on_undecodable)
    }

    fn refuse(&mut self, error: Error) {
        self.slot.refuse(error);
    }
}

/// Recorder of a call, and the result of the call as soon as the result is known. Handlers with the same types share
/// this code.
struct ResultSlot<R, T, E> {
    recorder: R,
    result: Option<Result<T, E>>,
    /// True if the body of this call returned the result, and the result is recorded and short enough to compare.
    is_recorded: bool,
    /// True if the policy migrates a result that can't be decoded.
    migrates: bool,
}

/// True if results are compared with the results that duplicates will get: in debug builds and with the feature
/// `testing`.
const COMPARES: bool = cfg!(any(debug_assertions, feature = "testing"));

/// Length in bytes of the longest result that is compared: a comparison takes many times the memory of the result.
const LONGEST_COMPARED: usize = 64 * 1024;

impl<R: Recorder<T, E>, T, E: From<Error>> ResultSlot<R, T, E> {
    fn keep(&mut self, result: Result<T, E>) -> bool {
        self.result.insert(result).is_ok()
    }

    fn record(&mut self, max_result_bytes: usize) -> AttemptEnd {
        let ending = self.recorder.record(self.result.as_ref().expect("kept by the last poll"), max_result_bytes);
        if COMPARES && let AttemptEnd::Finish(finish) = &ending {
            self.is_recorded = encoded(finish.result()).is_ok_and(|(_, bytes)| bytes.len() <= LONGEST_COMPARED);
        }
        ending
    }

    /// Compares the result with the result that duplicates will get, if the body of this call recorded a result.
    ///
    /// # Panics
    /// If the two results differ.
    fn compare(&self) {
        let Some(result) = self.result.as_ref().filter(|_| self.is_recorded) else { return };
        match self.recorder.check(result) {
            Err(error) if !(self.migrates && error.is_unavailable()) => differs(&error),
            _ => {}
        }
    }

    fn replay(&mut self, state: &State, on_undecodable: OnUndecodable) -> Result<bool, ResultProblem> {
        let result = self.recorder.replay(state, on_undecodable)?;
        Ok(self.keep(result))
    }

    fn refuse(&mut self, error: Error) {
        self.is_recorded = false;
        self.keep(Err(E::from(error)));
    }

    fn take(&mut self) -> Result<T, E> {
        self.result.take().expect("kept by the protocol")
    }
}

/// Panics, in a debug build or a test, because duplicates of the call will get another result.
#[cold]
fn differs(error: &RoundTripError) -> ! {
    panic!(
        "a duplicate does not get the result of this call: {error}. The operation is done and recorded. Return a type that is read \
         back as it is written, or use another `codec` (see `idem_runtime::codec::check_round_trip`). Only debug builds and the \
         feature `testing` look for this"
    );
}

pin_project! {
    /// Future of one call. The order of the fields is the order of their drops: first the values of the body, whose
    /// drops may undo effects, then the protocol, which frees the key for another body.
    pub(crate) struct Run<P: Protocol, B, R, T, E> {
        #[pin]
        pub(crate) body: Option<B>,
        #[pin]
        pub(crate) call: TypedCall<P, R, T, E>,
    }

    impl<P: Protocol, B, R, T, E> PinnedDrop for Run<P, B, R, T, E> {
        fn drop(this: Pin<&mut Self>) {
            this.project().call.drops_values();
        }
    }
}

// The compiler makes a copy of this `impl` for each handler: keep it minimal.
impl<P, B, R, T, E> Future for Run<P, B, R, T, E>
where
    P: Protocol,
    B: Future<Output = Result<T, E>>,
    R: Recorder<T, E>,
    E: From<Error>,
{
    type Output = Result<T, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        this.call.poll(this.body, cx)
    }
}

pin_project! {
    /// A call without its body. Handlers with the same types share this code.
    pub(crate) struct TypedCall<P, R, T, E> {
        slot: ResultSlot<R, T, E>,
        #[pin]
        protocol: P,
    }
}

impl<P: Protocol, R, T, E> TypedCall<P, R, T, E> {
    fn drops_values(self: Pin<&mut Self>) {
        self.project().protocol.drops_values();
    }

    fn poll(self: Pin<&mut Self>, body: Pin<&mut dyn Body<T, E>>, cx: &mut Context<'_>) -> Poll<Result<T, E>>
    where
        R: Recorder<T, E>,
        E: From<Error>,
    {
        let this = self.project();
        let mut work = BodyAndSlot { body, slot: this.slot };
        ready!(this.protocol.poll(&mut work, cx));
        if COMPARES {
            work.slot.compare();
        }
        Poll::Ready(work.slot.take())
    }
}

/// Drives a [`Work`] until the call has its result.
pub(crate) trait Protocol {
    fn poll(self: Pin<&mut Self>, work: &mut dyn Work, cx: &mut Context<'_>) -> Poll<()>;

    /// Keeps the lease alive while the call is dropped. The drop of the call begins with the drop of the body's values.
    fn drops_values(self: Pin<&mut Self>);
}

fn protocol(subject: Subject) -> impl Protocol {
    let (max_result_bytes, on_uncertain) = (subject.policy.result_limit(), subject.policy.on_uncertain);
    let commit = if subject.store.context().renews() { Commit::Done } else { Commit::Pending };
    let seen = ObservedCall { commit, ..ObservedCall::NEW };
    let telemetry = Telemetry::new(&subject);
    // Built in place, because a call is large.
    Call {
        phase: Phase::Begin { begin: begin(subject) },
        seen,
        seat: None,
        max_result_bytes,
        on_uncertain,
        code: &CallCode { poll: poll_call, drops_values, end },
        turn: None,
        telemetry,
    }
}

type PollCall<A, C> = fn(Pin<&mut Call<A, C>>, &mut dyn Work, &mut Context<'_>) -> Poll<()>;

/// Functions of a call. A call reaches them by a pointer, so that they are compiled with this crate: functions that are
/// only named by a generic type are compiled again with each crate of handlers.
struct CallCode<A: 'static, C: 'static> {
    poll: PollCall<A, C>,
    drops_values: fn(Pin<&mut Call<A, C>>),
    end: fn(EndingAttempt) -> C,
}

impl<A: 'static, C: 'static> Protocol for Call<A, C> {
    fn poll(self: Pin<&mut Self>, work: &mut dyn Work, cx: &mut Context<'_>) -> Poll<()> {
        (self.code.poll)(self, work, cx)
    }

    fn drops_values(self: Pin<&mut Self>) {
        (self.code.drops_values)(self);
    }
}

pin_project! {
    struct Call<A: 'static, C: 'static> {
        #[pin]
        phase: Phase<A, C>,
        seen: ObservedCall,
        seat: Seat,
        max_result_bytes: usize,
        on_uncertain: Option<fn(Uncertain<'_>)>,
        code: &'static CallCode<A, C>,
        // Dropped after the phase, so that the next item of the batch finds the key free.
        turn: Option<Arc<Turn>>,
        // Dropped last, because its drop reports the end of the call.
        telemetry: Telemetry,
    }
}

pin_project! {
    #[project = PhaseProjection]
    enum Phase<A, C> {
        Begin {
            #[pin]
            begin: A,
        },
        // The body runs under a reservation.
        Body {
            held: Option<HeldAttempt>,
        },
        // The body runs without a reservation.
        Unprotected {
            attempt: Option<Attempt>,
            notes: PollNotes,
        },
        // The messages of a body without a reservation are being sent.
        Sending {
            sending: Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>,
        },
        End {
            #[pin]
            end: C,
            is_ok: bool,
            enforced: bool,
            doubt: DoubtStage,
        },
    }
}

/// Polls a call.
fn poll_call<A, C>(call: Pin<&mut Call<A, C>>, work: &mut dyn Work, cx: &mut Context<'_>) -> Poll<()>
where
    A: Future<Output = BeginResult> + 'static,
    C: Future<Output = Result<RecordContent, Error>> + 'static,
{
    let mut this = call.project();
    let Telemetry { span, facts } = this.telemetry;
    let span = span.as_deref();
    let _entered = span.map(Span::enter);
    loop {
        match this.phase.as_mut().project() {
            PhaseProjection::Begin { begin } => {
                // A call begins with its first poll. A call that is never polled is not counted.
                if this.seen.progress == Progress::None {
                    this.seen.progress = Progress::Reserving;
                    facts.begins();
                    report(this.seat, || this.seen.clone());
                }
                // The answer is used where the poll has left it, because it is large and each move copies it.
                let mut polled = begin.poll(cx);
                let Poll::Ready(begun) = &mut polled else { return Poll::Pending };
                *this.turn = begun.turn.take();
                this.seen.waited = begun.waited.is_some();
                if let Some(waited) = begun.waited {
                    facts.waited(span, waited);
                }
                // The body runs, or the call ends with a replay or an error.
                if !enters(&mut begun.start, this.seen, *this.seat, facts, span, work, *this.on_uncertain) {
                    break;
                }
                this.seen.progress = Progress::Running;
                report(this.seat, || this.seen.clone());
                // If the store answered immediately, the time of the reservation saves a second reading of the
                // clock.
                facts.body_begins(match &begun.start {
                    Start::Reserved(held) if begun.at_once => Some(held.attempt().reserved_at),
                    _ => None,
                });
                this.phase.set(match polled {
                    Poll::Ready(BeginResult { start: Start::Reserved(held), .. }) => Phase::Body { held: Some(held) },
                    Poll::Ready(BeginResult { start: Start::Unprotected { attempt, .. }, .. }) => {
                        Phase::Unprotected { attempt, notes: PollNotes::NEW }
                    }
                    _ => unreachable!("the call has ended"),
                });
            }
            PhaseProjection::Unprotected { attempt, notes } => {
                let is_ok = ready!(polling(facts, || poll_as(attempt, notes, work, cx)));
                // A refused call in the body may have caused this error, so an enclosing body must not record the
                // error either.
                if notes.refused && !is_ok {
                    note_refusal();
                }
                facts.body_ended(None);
                this.seen.again = attempt.as_ref().map(|attempt| attempt.pause_unprotected(is_ok));
                this.seen.progress = Progress::Returned { is_ok, kept: RecordedPart::Nothing };
                match attempt.as_ref().and_then(|attempt| outbox::unrecorded(attempt, is_ok)) {
                    Some(sending) => this.phase.set(Phase::Sending { sending }),
                    None => break,
                }
            }
            PhaseProjection::Sending { sending } => {
                if let Err(error) = ready!(sending.as_mut().poll(cx)) {
                    facts.refused(span, &error);
                    refuse(this.seen, work, error, *this.on_uncertain);
                }
                break;
            }
            PhaseProjection::Body { held } => {
                let running = held.as_mut().expect("taken at the end only");
                let ended = ready!(polling(facts, || running.poll_body(work, cx)));
                facts.body_ended(Some(running.attempt().lease.duration));
                // If the body has no result, the call returns an error, and the drop of `held` ends the attempt.
                let is_ok = match running.end_of(ended) {
                    Ok(is_ok) => is_ok,
                    Err(error) => {
                        let _held = held.take();
                        work.drop_body();
                        facts.refused(span, &error);
                        refuse(this.seen, work, error, *this.on_uncertain);
                        break;
                    }
                };
                if this.seen.commit == Commit::Pending {
                    // A rollback undoes the attempt too, so the number of the attempt can't grow with the failures.
                    // The store handle counts the failures instead.
                    this.seen.again = this.seen.again.max(Some(running.attempt().pause_unprotected(is_ok)));
                }
                let steps = running.steps_after_error(is_ok);
                let doubt = note_return(this.seen, running.doubt(), steps.ask_again);
                report(this.seat, || this.seen.clone());
                let mut ending = held.take().expect("polled just now").ending();
                ending.unencoded(is_ok);
                this.seen.reported = end_of(&mut ending, (is_ok, doubt, steps), work, *this.max_result_bytes);
                facts.reports_doubt(this.seen.reported);
                // The body is dropped before the write: its variables may be large, or hold locks or permits that
                // other tasks need.
                work.drop_body();
                let enforced = ending.held.enforced;
                this.phase.set(Phase::End { end: (this.code.end)(ending), is_ok, enforced, doubt });
            }
            PhaseProjection::End { end, is_ok, enforced, doubt } => {
                let (ended, enforced) = (ready!(end.poll(cx)), *enforced);
                if let Err(error) = note_end(this.seen, facts, span, ended, (*is_ok, enforced, *doubt)) {
                    facts.refused(span, &error);
                    refuse(this.seen, work, error, *this.on_uncertain);
                }
                break;
            }
        }
    }
    // The ended phase is not overwritten: an assignment would copy the full size of the enum, which holds the
    // future of the store's write.
    work.drop_body();
    *this.turn = None;
    facts.over(span, this.seen);
    report(this.seat, || std::mem::replace(this.seen, ObservedCall::NEW));
    Poll::Ready(())
}

fn drops_values<A: 'static, C: 'static>(call: Pin<&mut Call<A, C>>) {
    if let PhaseProjection::Body { held: Some(held) } = call.project().phase.project() {
        held.drops_values();
    }
}

/// Returns whether the body runs. If the body does not run, the call gets the replayed result, or the error that
/// `start` holds.
fn enters(
    start: &mut Start,
    seen: &mut ObservedCall,
    seat: Seat,
    facts: &mut Facts,
    span: Option<&Span>,
    work: &mut dyn Work,
    on_uncertain: Option<fn(Uncertain<'_>)>,
) -> bool {
    let error = match start {
        Start::Reserved(held) => {
            let number = held.attempt().number();
            seen.key = Some(held.attempt().key().clone());
            seen.attempt = Some(number);
            seen.takeover = held.takeover;
            seen.again = Some(held.pause());
            facts.reserved(span, number, held.takeover);
            return true;
        }
        Start::Unprotected { attempt, mode, bypassed } => {
            seen.key = attempt.as_ref().map(|attempt| attempt.key().clone());
            seen.bypassed = *bypassed;
            facts.unprotected(*mode, *bypassed);
            return true;
        }
        Start::Replay(replay) => {
            seen.again = Some(replay.pause());
            // The pause is reported before the decoding, because the decoding may panic.
            report_again(seat, seen.again);
            match work.replay(&replay.state, replay.on_undecodable) {
                Ok(is_ok) => {
                    facts.replayed(span, replay, seen.waited);
                    seen.progress = Progress::Replayed { is_ok };
                    seen.attempt = Some(replay.attempt);
                    seen.key = Some(replay.key.clone());
                    return false;
                }
                Err(problem) => {
                    let (key, store, attempt) = (replay.key.clone(), replay.store, replay.attempt);
                    Error::ResultUnavailable { key, store, attempt, problem }
                }
            }
        }
        Start::Refused(error) => std::mem::replace(error, Error::NoAttempt),
    };
    // The call is refused, or its recorded result can't be decoded.
    facts.refused(span, &error);
    refuse(seen, work, error, on_uncertain);
    false
}

/// Sets a flag in `facts` while `poll` polls the body. The flag stays set after a panic.
fn polling<T>(facts: &mut Facts, poll: impl FnOnce() -> T) -> T {
    facts.polling = true;
    let polled = poll();
    facts.polling = false;
    polled
}

/// Sets the end of an attempt whose body or reconciler has returned. `steps`: consequences of the steps, if the body
/// returned an error. Returns who settles the doubt, if the body has reported a doubt.
fn end_of(
    ending: &mut EndingAttempt,
    (is_ok, doubt, steps): (bool, DoubtStage, AfterError),
    work: &mut dyn Work,
    max_result_bytes: usize,
) -> Option<ReportedDoubt> {
    let end = match doubt {
        DoubtStage::Unresolved => AttemptEnd::Release(Release::Unresolved),
        DoubtStage::Exhausted => AttemptEnd::Release(Release::NotStarted),
        _ => match work.record(max_result_bytes) {
            // An effect in doubt stays in doubt, whichever calls were refused.
            uncertain @ AttemptEnd::Release(Release::Interrupted) => uncertain,
            _ if steps.interrupts => AttemptEnd::Release(Release::Interrupted),
            // A refused call in the body may have caused this error. The error is not recorded, because the next
            // delivery may succeed.
            _ if (ending.held.refused_inside() && !is_ok) || steps.keeps_open => {
                note_refusal();
                AttemptEnd::Release(Release::Returned)
            }
            recorded => ending.held.with_journal_and_messages(recorded),
        },
    };
    let reported = match &end {
        AttemptEnd::Release(Release::Interrupted) => Some(ending.held.reported_doubt()),
        AttemptEnd::Finish(Finish::Failed(_)) => {
            ending.held.keeps_error();
            None
        }
        _ => None,
    };
    ending.ending = Some(end);
    reported
}

/// Notes that a body has returned, and the answer of the reconciler, if it was asked. `step`: time until the reconciler
/// of a step may know more. Returns `doubt`.
fn note_return(seen: &mut ObservedCall, doubt: DoubtStage, step: Option<Duration>) -> DoubtStage {
    seen.reconciled = doubt == DoubtStage::Done;
    seen.again = step.or(seen.again);
    if doubt == DoubtStage::Unresolved {
        seen.again = Some(ask_again());
    }
    seen.progress = Progress::Recording;
    doubt
}

/// Notes the end of an attempt: whether its body returned `Ok`, whether the lease was enforced, and the progress of its
/// reconciler.
///
/// # Errors
/// Error that the call returns in place of the result of its body.
#[inline]
fn note_end(
    seen: &mut ObservedCall,
    facts: &mut Facts,
    span: Option<&Span>,
    ended: Result<RecordContent, Error>,
    (is_ok, enforced, doubt): (bool, bool, DoubtStage),
) -> Result<(), Error> {
    match ended {
        Ok(content) => {
            facts.settled(span, doubt);
            let returned = Progress::Returned { is_ok, kept: kept(content) };
            seen.progress = progress_after(doubt, seen.again).unwrap_or(returned);
            facts.recorded(is_ok, seen.attempt, content);
        }
        Err(error) if enforced || matches!(error, Error::Unsent { .. }) => return Err(error),
        // In shadow mode the call returns the result of its body even if the result is not recorded.
        Err(error) => {
            seen.progress = Progress::Returned { is_ok, kept: RecordedPart::Nothing };
            tracing::info!(%error, "shadow mode: the result is not recorded");
        }
    }
    Ok(())
}

/// Returns the progress of a call whose reconciler was asked, and whose body did not run. If the reconciler had no
/// answer, the message is delivered again after the time `after`; `None` makes it a dead letter.
fn progress_after(doubt: DoubtStage, after: Option<Duration>) -> Option<Progress> {
    let (refusal, disposition) = match (doubt, after) {
        (DoubtStage::Unresolved, Some(after)) => (Refusal::Interrupted, Disposition::Retry { after }),
        (DoubtStage::Unresolved, None) => (Refusal::Interrupted, Disposition::DeadLetter),
        (DoubtStage::Exhausted, _) => (Refusal::AttemptsExhausted, Disposition::DeadLetter),
        _ => return None,
    };
    let error = ErrorFacts { disposition, misconfigured: false, store_failed: false };
    Some(Progress::Refused { refusal, error })
}

fn kept(content: RecordContent) -> RecordedPart {
    match content {
        RecordContent::Nothing => RecordedPart::Nothing,
        RecordContent::Completion(_) => RecordedPart::Completion,
        RecordContent::Result { .. } => RecordedPart::Result,
    }
}

fn refuse(seen: &mut ObservedCall, work: &mut dyn Work, error: Error, on_uncertain: Option<fn(Uncertain<'_>)>) {
    seen.key = error.key().cloned();
    let facts = ErrorFacts::of(&error);
    if let Disposition::Retry { after } = facts.disposition {
        note_refusal();
        seen.again = Some(after);
    }
    seen.progress = match (Refusal::of(&error), &error) {
        (None, &Error::Unsent { ran, attempt, replayable, .. }) => {
            let kept = match (attempt, replayable) {
                (0, _) => RecordedPart::Nothing,
                (_, true) => RecordedPart::Result,
                (_, false) => RecordedPart::Completion,
            };
            Progress::Unsent { ran, kept, error: facts }
        }
        (Some(refusal), _) => Progress::Refused { refusal, error: facts },
        (None, _) => Progress::Unrecorded { error: facts },
    };
    if let Some(uncertain) = error.uncertain() {
        report_uncertain(on_uncertain, uncertain);
    }
    work.refuse(error);
}
