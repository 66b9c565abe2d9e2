//! Begin of a call: reserves the key, or returns the reason why the body must not run.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::Subject;
use super::attempt::{self, Attempt};
use super::held::HeldAttempt;
use super::late;
use super::observed_call::Refusal;
use super::observer;
use super::outbox::{self, Dispatch};
use super::poll_notes::waits;
use super::replay::Replay;
use super::turns::Turn;
use crate::clock::{Clock, Instant};
use crate::combine::{erased, race};
use crate::error::{Error, Mismatch, UnsentReason};
use crate::key::{Key, KeyError, KeyProblem};
use crate::metrics::StoreOp;
use crate::policy::{Backoff, InProgress, MissingKey, Mode, OnCrash, OnStoreError, Policy, PolicyProblem};
use crate::record::{Admission, Inspection, Lease, LeaseMark, Record, Reservation, ReserveRequest, State, Verdict};
use crate::store::flight::{WaitOutcome, WaitTicket, wait_once};
use crate::store::{LastWait, Store, StoreError, StoreErrorKind, StoreFuture, renew_all};

/// Pauses before the retries of a failed reservation. Two retries suffice, because the broker delivers the message
/// again anyway.
const RESERVE_PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(50)];
/// Pauses between the tries of a duplicate that waits for another attempt while the store is down. After an outage the
/// duplicate gets its result up to one pause late.
const PAUSES_IN_WAIT: Backoff = Backoff::new(RESERVE_PAUSES[1], Duration::from_secs(1));
/// Pause between two reservations of a duplicate that waits until this process has written the end of an attempt whose
/// lease has lapsed. The process repeats that write about once a second too.
const END_PAUSE: Duration = Duration::from_secs(1);
/// Number of owner tokens that a call may use. A call needs another token if a clean-up has released its reservation,
/// or if its lease lapsed before the record was marked as begun.
const TOKENS: u8 = 3;

/// Result of the first phase of a call, which reserves the key.
pub(super) struct BeginResult {
    pub(super) start: Start,
    /// Time that the call waited for another attempt; `None` if the call did not wait. Zero if the call waited only for
    /// another item of its batch.
    pub(super) waited: Option<Duration>,
    /// True if the store answered the last reservation without a wait.
    pub(super) at_once: bool,
    /// Turn of the call on its key, if the call belongs to a batch. An `Arc`, because the drop of an empty
    /// `Option<Arc>` is inlined, while the drop of a box is a function call in every call.
    pub(super) turn: Option<Arc<Turn>>,
}

/// Next step of a call: it runs its body, or it ends.
pub(super) enum Start {
    /// The key is reserved: the call runs the body and records its result.
    Reserved(HeldAttempt),
    /// The body runs without a reservation. The attempt serves only [`current`](crate::current).
    Unprotected {
        attempt: Option<Attempt>,
        mode: Mode,
        /// Reason why the body would not have run without shadow mode or `on_store_error = run`.
        bypassed: Option<Refusal>,
    },
    /// The call returns the recorded result.
    Replay(Replay),
    /// The call returns this error; the body does not run.
    Refused(Error),
}

/// Reserves the key of `subject`, or returns the reason why its body must not run.
///
/// Not an `async fn`: that stores its argument twice, which doubles every enclosing future.
#[expect(clippy::manual_async_fn, reason = "see above")]
pub(super) fn begin(subject: Subject) -> impl Future<Output = BeginResult> {
    async move {
        let Subject { store, policy, key, .. } = &subject;
        let mode = policy.current_mode();
        // This line precedes the check of the mode, because the delivery must observe its calls in mode `off` too.
        let turns = observer::begins(&**store, key.as_ref().ok());
        if mode == Mode::Off {
            let start = unprotected(&subject, mode, key.as_ref().ok(), None);
            return BeginResult { start, waited: None, at_once: false, turn: None };
        }
        // Items of one batch with the same key run one after the other: the second item replays the result of the first
        // item. Shadow mode must not delay a call, so its items take no turns.
        let (mut turn, queued) = match (turns, key) {
            (Some((turns, item)), Ok(key)) if mode == Mode::Enforce => {
                let limit = || store.context().clock().sleep(policy.timeout.saturating_add(policy.lease));
                // Boxed: most calls are not in a batch, but would carry its size inline.
                erased(turns.enter(key, item, limit)).await
            }
            _ => (None, false),
        };
        // Each round reserves the key once. A further round follows only if the message has few deliveries left and
        // must outlast an outage of the store.
        let mut outage = None;
        loop {
            let pause = {
                let mut beginning = admit(&subject, mode).await;
                let pause = match &beginning.start {
                    Start::Refused(error) if mode == Mode::Enforce => outlasts(&subject, error, &mut outage),
                    _ => None,
                };
                let Some(pause) = pause else {
                    beginning.waited = beginning.waited.or(queued.then_some(Duration::ZERO));
                    beginning.turn = turn.take();
                    // The field is replaced in place, because a `Start` is large.
                    if let Some(instead) = instead(&subject, mode, &beginning.start) {
                        beginning.start = instead;
                    }
                    return beginning;
                };
                pause
            };
            waits();
            // The sleep is outside of the block above: every local that lives across this `await` enlarges every call.
            store.context().clock().sleep(pause).await;
        }
    }
}

/// Returns the step that replaces `start` if the policy or the mode runs the body anyway.
fn instead(subject: &Subject, mode: Mode, start: &Start) -> Option<Start> {
    match start {
        Start::Refused(error) if subject.policy.on_store_error == OnStoreError::Run && is_no_answer(error) => {
            tracing::debug!(%error, "the store failed; the body runs unprotected");
            Some(unprotected(subject, mode, error.key(), Some(Refusal::Store)))
        }
        Start::Refused(error) if mode == Mode::Shadow => {
            tracing::info!(%error, "shadow mode: would have been refused");
            Some(unprotected(subject, mode, error.key(), Refusal::of(error)))
        }
        Start::Replay(Replay { key, store, attempt, .. }) if mode == Mode::Shadow => {
            tracing::info!(%key, store, attempt, "shadow mode: would have been replayed");
            Some(unprotected(subject, mode, Some(key), Some(Refusal::Replay)))
        }
        _ => None,
    }
}

fn unprotected(subject: &Subject, mode: Mode, key: Option<&Key>, bypassed: Option<Refusal>) -> Start {
    let Subject { store, policy, .. } = subject;
    let attempt = key.map(|key| Attempt::unprotected(Arc::clone(store), key.clone(), policy));
    Start::Unprotected { attempt, mode, bypassed }
}

/// Returns the pause before the call repeats a reservation that failed; `None` if the call gives up. The call repeats
/// the reservation only if its message has few deliveries left, because an outage would otherwise use up the remaining
/// deliveries. `outage` holds the time at which the call gives up.
fn outlasts(subject: &Subject, error: &Error, outage: &mut Option<Instant>) -> Option<Duration> {
    let Error::Store { source, retry_after, .. } = error else { return None };
    let Policy { timeout, lease, on_store_error, .. } = subject.policy;
    if !source.is_transient() || on_store_error == OnStoreError::Run || !observer::budget().is_scarce() {
        return None;
    }
    let now = subject.store.context().clock().now();
    let left = outage.get_or_insert(now.saturating_add(timeout).saturating_add(lease)).saturating_since(now);
    // `retry_after` grows with the outage, but the store may answer again much earlier. So the pause is at most one
    // lease.
    (!left.is_zero()).then(|| left.min(lease).min(*retry_after))
}

/// Returns whether the store did not answer. An unreadable record is an answer, because its operation may have
/// finished.
fn is_no_answer(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. }
        if !matches!(source.kind(), StoreErrorKind::Corrupt | StoreErrorKind::Aborted))
}

/// Repeats the reservation until an answer decides the call. Between two reservations the call waits for the running
/// attempt, if the policy allows a wait.
async fn admit(subject: &Subject, mode: Mode) -> BeginResult {
    let mut request = match Request::new(subject, mode) {
        Ok(request) => request,
        Err(start) => return BeginResult { start: *start, waited: None, at_once: false, turn: None },
    };
    loop {
        let running = match request.ask().await {
            NextStep::Decided(start) => {
                let waited = request.since(request.met_at.filter(|_| request.waited));
                return BeginResult { start, waited, at_once: request.at_once, turn: None };
            }
            NextStep::AskAgain => continue,
            NextStep::Running(running) => running,
        };
        request.may_wait_at_last();
        if request.may_wait().is_zero() {
            let waited = request.since(request.met_at.filter(|_| request.waited));
            let start = Start::Refused(request.in_progress(running));
            return BeginResult { start, waited, at_once: false, turn: None };
        }
        request.waited = true;
        waits();
        // Boxed: most calls don't wait, but would carry its size inline.
        if let Some(start) = erased(request.wait(running)).await {
            let waited = request.since(request.met_at);
            return BeginResult { start: *start, waited, at_once: request.at_once, turn: None };
        }
    }
}

/// Next step after the answer to a reservation.
#[expect(clippy::large_enum_variant, reason = "nearly all are decided, and each value is matched immediately")]
enum NextStep {
    Decided(Start),
    /// The answer decides nothing: the call must reserve again immediately.
    AskAgain,
    Running(RunningAttempt),
}

/// Answer to a reservation after which the call must make one more request, or wait.
enum OpenAnswer {
    /// The attempt with this number has another payload under the same key.
    Mismatch(u32),
    /// The record shows the attempt with this number as interrupted, but this process still runs the attempt or writes
    /// its end.
    EndsLate(u32),
    /// The operation has finished in the attempt with this number, and its messages are not all sent.
    Unsent(u32),
}

/// Another attempt that holds the key.
#[derive(Clone, Copy)]
struct RunningAttempt {
    attempt: u32,
    lapses_in: Duration,
}

/// Request of a call for its key, and the state of that request.
struct Request<'a> {
    subject: &'a Subject,
    mode: Mode,
    reserve: ReserveRequest,
    /// Time when the earliest unanswered request with the current owner token was sent. An unanswered request may have
    /// taken effect, or may still take effect.
    unanswered_since: Option<Instant>,
    /// Time when the call found the first attempt that it waits for.
    met_at: Option<Instant>,
    /// Value of `LateWrites::changes` when the request was sent.
    late_ends: u32,
    /// True if the call has waited for another attempt.
    waited: bool,
    /// True if the store answered the last request immediately.
    at_once: bool,
    /// Number of owner tokens that the call has used.
    tokens: u8,
    /// Permission to wait regardless of `in_progress`, because the message has few deliveries left.
    last_wait: Option<LastWait>,
}

impl<'a> Request<'a> {
    /// Makes the request after a check of key, policy and fingerprint. The `Err` is boxed, because it is large and
    /// rare.
    fn new(subject: &'a Subject, mode: Mode) -> Result<Self, Box<Start>> {
        let refuse = |error| Err(Box::new(Start::Refused(error)));
        let Subject { store, key, policy, fingerprint } = subject;
        let key = match key {
            Ok(key) => key.clone(),
            Err(error) if error.problem == KeyProblem::Missing && policy.missing_key == MissingKey::Run => {
                return Err(Box::new(Start::Unprotected { attempt: None, mode, bypassed: None }));
            }
            Err(error) => return refuse(KeyError::clone(error).into()),
        };
        // A policy that can't be honoured is refused before any request to the store.
        if let Err(reason) = policy.check() {
            return refuse(Error::InvalidPolicy { key, problem: reason });
        }
        // A redelivery after the end of the retention would run the body again.
        if let Some(longest) = observer::redelivered_for()
            && policy.ttl < longest
        {
            let redelivery = (longest < Duration::MAX).then_some(longest);
            return refuse(Error::InvalidPolicy {
                key,
                problem: PolicyProblem::TtlBelowRedelivery { ttl: policy.ttl, redelivery },
            });
        }
        // A time limit longer than the lease only logs a warning, once for each store handle: most calls of a store are
        // much faster than its time limit.
        if let Err(reason) = policy.check_lease(store)
            && store.context().warns_now()
        {
            tracing::warn!(%key, store = store.context().name(), "{reason}");
        }
        // A lease that is counted in real time can't be renewed in a test that moves tokio's time.
        if store.context().is_out_of_time() {
            let source = StoreError::new(
                StoreErrorKind::Misconfigured,
                "a test has paused or moved tokio's time (`start_paused`, `tokio::time::pause`), and the leases of this store are \
                 measured in real time: use `MemoryStore` in this test, or let its time run",
            );
            let retry_after = policy.backoff.after(1, key.seed());
            let (store, started) = (store.context().name(), false);
            return refuse(Error::Store { key, store, started, may_be_reserved: false, retry_after, source });
        }
        let fingerprint = match fingerprint {
            Some(Err(source)) => {
                return refuse(Error::InvalidFingerprint { key, source: source.clone() });
            }
            Some(Ok(fingerprint)) => Some(*fingerprint),
            None => None,
        };
        let mut provenance = store.context().provenance();
        if let Some(traceparent) = observer::traceparent() {
            provenance = provenance.with_traceparent(Some(traceparent));
        }
        let reserve = ReserveRequest {
            key,
            owner: store.context().new_owner(),
            lease: policy.lease,
            ttl: policy.ttl,
            fingerprint,
            on_crash: policy.on_crash,
            max_attempts: policy.max_attempts,
            // In shadow mode the body runs whatever the record says, so its reconciler is not asked.
            max_reconciliations: policy.reconciliations().filter(|_| mode == Mode::Enforce),
            provenance,
        };
        let (unanswered_since, met_at) = (None, None);
        Ok(Self {
            subject,
            mode,
            reserve,
            unanswered_since,
            met_at,
            late_ends: 0,
            waited: false,
            at_once: false,
            tokens: 1,
            last_wait: None,
        })
    }

    fn store(&self) -> &'a Arc<dyn Store> {
        &self.subject.store
    }

    fn clock(&self) -> &'a dyn Clock {
        self.store().context().clock()
    }

    /// Returns the time since `then`.
    fn since(&self, then: Option<Instant>) -> Option<Duration> {
        then.map(|then| self.clock().now().saturating_since(then))
    }

    /// Reserves the key. Returns the next step after the answer.
    async fn ask(&mut self) -> NextStep {
        // Locals are scoped in blocks that end before the next `await`: every call is as large as its largest `await`.
        let unsettled = {
            let now = self.clock().now();
            self.late_ends = self.store().context().late_writes().changes();
            // A repeated reservation may have taken effect at its first request, so the lease is measured from that
            // request.
            let mut asked_at = self.unanswered_since.unwrap_or(now);
            // The future that repeats the request is created only if the store does not answer immediately.
            let (mut answer, since, unanswered) = {
                let asking = self.store().reserve(&self.reserve);
                let mut asking = asking.watched_since(self.store(), StoreOp::Reserve, Some(now));
                if let Some(answer) = asking.at_once() {
                    self.at_once = true;
                    (Ok(answer), self.unanswered_since, false)
                } else {
                    self.at_once = false;
                    let reply = send(self, &mut asking).await;
                    (reply.answer, Some(asked_at), reply.unanswered)
                }
            };
            if unanswered {
                self.unanswered_since = Some(asked_at);
            }
            // Before the body begins, the granted lease may have to be renewed, or the record marked as begun. Boxed:
            // most leases are ready, and every call would carry the size of `prepare`, or of its argument, inline.
            let prepared = {
                let preparing = self.unready(&answer, since).map(|unready| erased(prepare(self, unready)));
                match preparing {
                    Some(preparing) => Some(preparing.await),
                    None => None,
                }
            };
            if let Some(prepared) = prepared {
                self.at_once = false;
                match prepared {
                    Ok(PreparedLease::Since(since)) => {
                        asked_at = since;
                        if let Ok(Reservation::Granted { lease, .. }) = &mut answer {
                            // The renewal, or the mark that the body begins, has changed the record, so the `LeaseMark`
                            // of the reservation no longer fits the record.
                            lease.mark = LeaseMark::default();
                        }
                    }
                    Ok(PreparedLease::Lost) => return NextStep::AskAgain,
                    Ok(PreparedLease::NotMarked) => return self.ask_as_another(lapsed_before_its_body),
                    Err(error) => return NextStep::Decided(self.no_answer(error, true)),
                }
            }
            match answer {
                Ok(Reservation::Released { .. }) => return self.ask_as_another(tokens_repeat),
                Ok(Reservation::FingerprintMismatch { attempt }) => OpenAnswer::Mismatch(attempt),
                Ok(Reservation::Interrupted { attempt })
                    if self.store().context().is_at_work(&self.reserve.key, self.late_ends) =>
                {
                    OpenAnswer::EndsLate(attempt)
                }
                Ok(Reservation::Finished { record, .. })
                    if self.mode == Mode::Enforce
                        && outbox::has_unsent(&record.state)
                        && !outbox::leave_after_commit(self.store().context()) =>
                {
                    OpenAnswer::Unsent(record.attempt)
                }
                Ok(reservation) => return self.decide(reservation, asked_at),
                Err(error) => return NextStep::Decided(self.no_answer(error, self.unanswered_since.is_some())),
            }
        };
        // Boxed: the two kinds of answers are rare, and every call would carry the size of their futures inline.
        match unsettled {
            OpenAnswer::Mismatch(attempt) => {
                NextStep::Decided(Start::Refused(erased(mismatch(self.store(), &self.reserve, attempt)).await))
            }
            OpenAnswer::EndsLate(attempt) => erased(self.await_end(attempt)).await,
            OpenAnswer::Unsent(attempt) => erased(self.send_unsent(attempt)).await,
        }
    }

    /// Waits for attempt `attempt`, whose lease has lapsed, and which this process still runs or whose end this process
    /// still writes. The record shows the attempt as interrupted until its end is written. The wait is as long as the
    /// policy allows.
    async fn await_end(&mut self, attempt: u32) -> NextStep {
        self.store().context().store_answered();
        self.may_wait_at_last();
        let left = self.may_wait();
        if left.is_zero() {
            return NextStep::Decided(Start::Refused(
                self.in_progress(RunningAttempt { attempt, lapses_in: END_PAUSE }),
            ));
        }
        self.waited = true;
        waits();
        self.clock().sleep(left.min(END_PAUSE)).await;
        NextStep::AskAgain
    }

    /// Sends the messages of the finished attempt `attempt`, and then asks again for its result. If another call is
    /// probably sending them, waits for that call as long as the policy allows.
    async fn send_unsent(&mut self, attempt: u32) -> NextStep {
        let (store, key) = (self.store(), &self.reserve.key);
        let context = store.context();
        context.store_answered();
        // Taken before the record is read, so that no other call of this process marks the messages in between.
        let sending = if context.is_at_work(key, self.late_ends) { None } else { context.sends(key) };
        let found = store.inspect(key).watched(store, StoreOp::Inspect).await;
        let began = found.as_ref().ok().and_then(|found| found.as_ref()?.began);
        let Policy { backoff, timeout, lease, .. } = self.subject.policy;
        // The pauses grow with the age of the operation, as after a replay whose delivery fails.
        let pause = backoff.during(began.unwrap_or_default(), self.reserve.owner.seed());
        let dispatch = Dispatch { store: &**store, key, attempt, ran: false, replayable: true, pause };
        let found = match found {
            Ok(Some(found)) if found.attempt() == attempt && outbox::has_unsent(&found.record.state) => found,
            // Another call has sent them, or the record has changed.
            Ok(_) => return NextStep::AskAgain,
            Err(source) => {
                return NextStep::Decided(Start::Refused(dispatch.unsent(None, UnsentReason::NotRead(source))));
            }
        };
        let longest = timeout.saturating_add(lease);
        let sending = sending.filter(|_| !outbox::is_being_sent(context, &found, self.reserve.ttl, longest));
        let Some(_sending) = sending else {
            let error = dispatch.unsent(None, UnsentReason::Sending);
            self.may_wait_at_last();
            let left = self.may_wait();
            if left.is_zero() {
                return NextStep::Decided(Start::Refused(error));
            }
            self.waited = true;
            waits();
            // The longer the call has waited, the longer it pauses: many duplicates may wait.
            let waited = self.since(self.met_at).unwrap_or_default();
            self.clock().sleep(left.min((waited / 4).clamp(RESERVE_PAUSES[1], END_PAUSE))).await;
            return NextStep::AskAgain;
        };
        match dispatch.send_recorded(&found).await {
            Ok(()) => NextStep::AskAgain,
            Err(error) => NextStep::Decided(Start::Refused(error)),
        }
    }

    /// Returns whether the record must be marked as begun before the body of `lease` begins.
    ///
    /// Under `on_crash = fail` a crash after the mark interrupts the key, and a crash before the mark leaves the key
    /// free. `max_attempts` counts only marked attempts. Most calls are the first attempt of their key. To save a
    /// write, a first attempt under `max_attempts` is marked only if the limit is 1.
    fn marks(&self, lease: &Lease) -> bool {
        let Policy { on_crash, max_attempts, .. } = self.subject.policy;
        let counts = max_attempts.is_some_and(|max| lease.attempt > 1 || max.get() == 1);
        on_crash == OnCrash::Fail || counts
    }

    /// Returns the lease that `answer` grants if another step must come before the body: a renewal of the lease, or the
    /// mark that the body begins. `since` is the time of the first request; `None` if the answer was immediate.
    fn unready(&self, answer: &Result<Reservation, StoreError>, since: Option<Instant>) -> Option<GrantedLease> {
        let Ok(Reservation::Granted { lease, in_doubt, .. }) = answer else { return None };
        let too_late = since.is_some_and(|since| self.clock().now() >= since.saturating_add(lease.duration));
        // The record of a lease in doubt has the mark of the earlier attempt.
        let unmarked = !in_doubt && self.marks(lease);
        (too_late || unmarked).then(|| GrantedLease { lease: lease.clone(), too_late, unmarked })
    }

    /// Repeats the reservation with another owner token, or fails with `error` if the call has used all of its tokens.
    fn ask_as_another(&mut self, error: fn() -> StoreError) -> NextStep {
        if self.tokens == TOKENS {
            return NextStep::Decided(self.no_answer(error(), false));
        }
        self.reserve.owner = self.store().context().new_owner();
        (self.tokens, self.unanswered_since) = (self.tokens + 1, None);
        NextStep::AskAgain
    }

    /// Returns the next step after the answer to a reservation.
    fn decide(&self, reservation: Reservation, asked_at: Instant) -> NextStep {
        let Subject { store, policy, .. } = self.subject;
        let (key, name) = (&self.reserve.key, store.context().name());
        match store.context().renews() {
            true => store.context().store_answered(),
            false => _ = store.context().counts().refusals_in_transactions(key, false),
        }
        NextStep::Decided(match reservation {
            Reservation::Finished { record, age } => {
                let Policy { on_undecodable, backoff, .. } = *policy;
                let Record { owner, attempt, state, provenance, .. } = record;
                let ttl = policy.retention(matches!(state, State::Failed(_)));
                let (key, store, seed) = (key.clone(), name, owner.seed());
                Start::Replay(Replay {
                    key,
                    store,
                    state,
                    attempt,
                    seed,
                    provenance,
                    age,
                    ttl,
                    backoff,
                    on_undecodable,
                })
            }
            Reservation::Granted { lease, takeover, in_doubt, journal } => {
                if in_doubt {
                    tracing::warn!(
                        %key, store = name, attempt = lease.attempt,
                        "the effect of an earlier attempt is in doubt: its reconciler is asked before the body may run"
                    );
                } else if takeover {
                    tracing::warn!(
                        %key, store = name, attempt = lease.attempt,
                        "took over: the lease of the attempt before had lapsed; its process died, stood still or did not \
                         reach the store"
                    );
                }
                let attempt = Attempt::new(Arc::clone(store), lease, asked_at, policy.backoff);
                Start::Reserved(HeldAttempt::new(
                    attempt,
                    takeover,
                    in_doubt,
                    self.mode == Mode::Enforce,
                    policy,
                    journal,
                ))
            }
            Reservation::InProgress { attempt, lapses_in } => {
                return NextStep::Running(RunningAttempt { attempt, lapses_in });
            }
            Reservation::Interrupted { attempt } => {
                Start::Refused(Error::Interrupted { key: key.clone(), store: name, attempt, ask_again: None })
            }
            Reservation::AttemptsExhausted { attempts } => {
                Start::Refused(Error::AttemptsExhausted { key: key.clone(), store: name, attempts })
            }
            Reservation::Released { .. } | Reservation::FingerprintMismatch { .. } => {
                unreachable!("answered by the caller")
            }
        })
    }

    /// Returns the error of a request whose tries have all failed. `may_be_reserved` is true if a try may have taken
    /// effect.
    fn no_answer(&self, source: StoreError, may_be_reserved: bool) -> Start {
        let Subject { store, policy, .. } = self.subject;
        let seed = self.reserve.owner.seed();
        let retry_after = match source.kind() {
            // An unreadable record needs a repair, which takes minutes.
            StoreErrorKind::Corrupt => policy.backoff.after(8, seed),
            // The store handle of a transaction ends with its call and has no memory of earlier failures, so the
            // failures are counted by key.
            _ if !store.context().renews() => {
                policy.backoff.after(store.context().counts().refusals_in_transactions(&self.reserve.key, true), seed)
            }
            _ => policy.backoff.during(store.context().store_failed(), seed),
        };
        let key = self.reserve.key.clone();
        let store = store.context().name();
        Start::Refused(Error::Store { key, store, started: false, may_be_reserved, retry_after, source })
    }

    /// Requests the permission to wait for another attempt regardless of `in_progress`. The permission is granted only
    /// if the message has few deliveries left and few other calls hold this permission.
    fn may_wait_at_last(&mut self) {
        if self.last_wait.is_none() && self.mode == Mode::Enforce && observer::budget().is_scarce() {
            self.last_wait = self.store().context().counts().last_wait();
        }
    }

    /// Returns the time that the call may still wait for the attempt that it has found.
    fn may_wait(&mut self) -> Duration {
        match self.longest_wait() {
            Some(limit) => {
                let now = self.clock().now();
                self.met_at.get_or_insert(now).saturating_add(limit).saturating_since(now)
            }
            // Most calls don't wait, and skip the reading of the clock.
            None => Duration::ZERO,
        }
    }

    /// Returns the time that the call may still wait for other attempts, counted from the moment when the call found
    /// the first attempt. Returns zero before the call has found an attempt.
    fn left_to_wait(&self) -> Duration {
        let Some(met_at) = self.met_at else { return Duration::ZERO };
        let limit = self.longest_wait().unwrap_or_default();
        met_at.saturating_add(limit).saturating_since(self.clock().now())
    }

    /// Returns the total time that the call may wait for other attempts; `None` if the call does not wait.
    fn longest_wait(&self) -> Option<Duration> {
        let Policy { in_progress, timeout, lease, .. } = self.subject.policy;
        // Another attempt may hold the key for its `timeout` plus one lease.
        let scarce = self.last_wait.is_some().then(|| timeout.saturating_add(lease));
        let limit = match in_progress {
            InProgress::Wait(limit) => Some(limit).max(scarce),
            InProgress::Reject => scarce,
        };
        // A handler that waits for its own key is never woken, and shadow mode must not delay a call.
        limit.filter(|_| self.mode == Mode::Enforce && !attempt::is_inside(&self.reserve.key))
    }

    /// Returns the pause after try number `tried` (from 0) has failed with `error`; `None` if the call gives up. The
    /// first pauses are `pauses`. A duplicate that waits then continues for as long as it may wait, because the
    /// attempt may outlive the outage. The pauses of a waiting duplicate are random, so that thousands of duplicates
    /// do not ask together.
    fn pause(&self, error: &StoreError, tried: u32, pauses: &[Duration]) -> Option<Duration> {
        if !error.is_transient() {
            return None;
        }
        pauses.get(tried as usize).copied().or_else(|| {
            let left = self.left_to_wait();
            (!left.is_zero()).then(|| PAUSES_IN_WAIT.after(tried, self.reserve.owner.seed()).min(left))
        })
    }

    fn in_progress(&self, running: RunningAttempt) -> Error {
        let RunningAttempt { attempt, lapses_in } = running;
        let key = self.reserve.key.clone();
        let Policy { backoff, lease, .. } = self.subject.policy;
        let retry_after = match observer::budget().number() {
            Some(number) => {
                // Only deliveries that found this attempt are counted: other deliveries show nothing about the duration
                // of this attempt.
                let met = self.store().context().counts().meets(&key, attempt).min(number);
                backoff.beyond(lapses_in, lease, met, self.reserve.owner.seed())
            }
            None => lapses_in,
        };
        Error::InProgress { key, store: self.store().context().name(), attempt, retry_after }
    }

    /// Waits until the running attempt may have ended. Returns the next step if the record at the end of the wait
    /// decides the call; `None` if the caller must reserve again.
    ///
    /// The futures of rare steps are boxed, because thousands of duplicates may wait at a time.
    async fn wait(&mut self, mut running: RunningAttempt) -> Option<Box<Start>> {
        let mut aboard = None;
        let told = loop {
            let left = self.may_wait();
            // The record may hold the call's own unanswered reservation, so the call can't share the wait of other
            // duplicates. In a transaction no other call could share the wait.
            if self.unanswered_since.is_some() || !self.store().context().renews() {
                break Box::pin(self.wait_alone(running, left)).await;
            }
            let (sleep, RunningAttempt { attempt, lapses_in }) = (self.clock().sleep(left), running);
            let aboard =
                aboard.get_or_insert_with(|| WaitTicket::join(self.store(), &self.reserve.key, attempt, lapses_in));
            match race(&mut *aboard, sleep).await {
                Some(WaitOutcome::Told(found)) => break Some(found),
                Some(WaitOutcome::Turn) => match Box::pin(self.ask_for_all(aboard)).await {
                    NextStep::Running(now) if !self.may_wait().is_zero() => running = now,
                    NextStep::Running(now) => return Some(Box::new(Start::Refused(self.in_progress(now)))),
                    NextStep::Decided(start) => return Some(Box::new(start)),
                    NextStep::AskAgain => return None,
                },
                Some(WaitOutcome::Ask) | None => return None,
            }
        };
        self.at_once = false;
        let found = told.filter(|found| !found.record.is_pending() && !found.expires_in.is_zero())?;
        if outbox::has_unsent(&found.record.state) {
            return None;
        }
        match found.record.admit(&self.reserve, Duration::ZERO) {
            Admission::Answer(Reservation::Released { .. }) | Admission::Replace { .. } => None,
            Admission::Answer(Reservation::FingerprintMismatch { attempt }) => {
                Some(Box::new(Start::Refused(mismatch(self.store(), &self.reserve, attempt).await)))
            }
            Admission::Answer(answer) => match self.decide(answer.aged(found.began), self.clock().now()) {
                NextStep::Decided(start) => Some(Box::new(start)),
                NextStep::AskAgain | NextStep::Running(_) => None,
            },
        }
    }

    /// Reserves the key as the only one of the waiting duplicates that asks the store now. Passes the number of the
    /// attempt that holds the key after this reservation to the other waiting duplicates.
    async fn ask_for_all(&mut self, aboard: &mut WaitTicket) -> NextStep {
        let step = self.ask().await;
        aboard.settle(match &step {
            NextStep::Running(RunningAttempt { attempt, lapses_in }) => Some((*attempt, *lapses_in)),
            NextStep::Decided(Start::Reserved(held)) => {
                let Lease { attempt, duration, .. } = held.attempt().lease;
                Some((attempt, duration))
            }
            NextStep::Decided(Start::Replay(replay)) => Some((replay.attempt, self.reserve.lease)),
            NextStep::AskAgain | NextStep::Decided(_) => None,
        });
        step
    }

    /// Waits without other duplicates. Returns the record that the store read at the end of the wait.
    async fn wait_alone(&mut self, running: RunningAttempt, left: Duration) -> Option<Arc<Inspection>> {
        let (store, key) = (self.store(), &self.reserve.key);
        // The call's own unanswered request may take effect during the wait.
        let may_have_landed = self.unanswered_since.is_some();
        let mut unanswered = ReservationGuard { store, request: &self.reserve, may_have_landed, may_be_marked: false };
        let told = wait_once(store, key, running.attempt, left.min(running.lapses_in), left).await;
        unanswered.may_have_landed = false;
        told.map(Arc::new)
    }
}

fn tokens_repeat() -> StoreError {
    let message = "reports new owner tokens as released before: the random numbers of this system repeat";
    StoreError::new(StoreErrorKind::Corrupt, message)
}

/// Makes the error for a key that was used with another payload. A further read of the record supplies only details of
/// the error.
async fn mismatch(store: &Arc<dyn Store>, request: &ReserveRequest, attempt: u32) -> Error {
    let inspection = store.inspect(&request.key).watched(store, StoreOp::Inspect).await.ok().flatten();
    let recorded = inspection.as_ref().and_then(|found| found.record.fingerprint);
    let age = inspection.map(|found| found.record.retention(request.ttl).saturating_sub(found.expires_in));
    let payloads = Box::new(Mismatch { presented: request.fingerprint, recorded, age });
    Error::FingerprintMismatch { key: request.key.clone(), store: store.context().name(), attempt, payloads }
}

/// Answer to a reservation.
struct Reply {
    answer: Result<Reservation, StoreError>,
    /// True if a try without an answer may have taken effect.
    unanswered: bool,
}

/// Awaits `asking`. If the store fails, repeats the request with the same owner token, by which the store recognises a
/// try that took effect.
async fn send<'a>(request: &'a Request<'_>, asking: &mut StoreFuture<'a, Reservation>) -> Reply {
    let store = request.store();
    let mut guard = ReservationGuard { store, request: &request.reserve, may_have_landed: true, may_be_marked: false };
    let (mut tried, mut unanswered) = (0, false);
    loop {
        let pause = match (&mut *asking).await {
            Ok(reservation) => {
                guard.may_have_landed = false;
                return Reply { answer: Ok(reservation), unanswered };
            }
            Err(error) => {
                unanswered |= error.may_have_landed();
                match request.pause(&error, tried, &RESERVE_PAUSES) {
                    Some(pause) => pause,
                    None => {
                        guard.may_have_landed = unanswered || request.unanswered_since.is_some();
                        return Reply { answer: Err(error), unanswered };
                    }
                }
            }
        };
        store.context().clock().sleep(pause).await;
        tried += 1;
        *asking = store.reserve(&request.reserve).watched(store, StoreOp::Reserve);
    }
}

/// A granted lease, and the steps that must precede its body.
struct GrantedLease {
    lease: Lease,
    /// True if the answer took longer than the lease, so that another attempt may have run meanwhile.
    too_late: bool,
    /// True if the record must be marked as begun.
    unmarked: bool,
}

/// State of a lease after [`prepare`].
enum PreparedLease {
    /// The lease is held, and its duration is measured from this time: the body may begin.
    Since(Instant),
    /// Another attempt holds the key.
    Lost,
    /// The store refused to mark the record as begun, and the reservation is released.
    NotMarked,
}

/// Renews the lease if the answer to the reservation came too late, and marks the record as begun if that is required.
async fn prepare(request: &Request<'_>, unready: GrantedLease) -> Result<PreparedLease, StoreError> {
    let GrantedLease { lease, too_late, unmarked } = unready;
    let mut since = request.clock().now();
    if too_late {
        match confirm(request, &lease).await? {
            Some(confirmed) => since = confirmed,
            None => return Ok(PreparedLease::Lost),
        }
    }
    if unmarked {
        match mark(request, &lease).await? {
            Some(marked) => since = marked,
            None => {
                give_back(request, &lease).await?;
                return Ok(PreparedLease::NotMarked);
            }
        }
    }
    Ok(PreparedLease::Since(since))
}

/// Renews a lease that has lapsed before its body could start. Returns the time when the confirmed renewal was sent,
/// from which the lease is measured; `None` if the lease is lost. If the renewal fails, the reservation is released.
async fn confirm(request: &Request<'_>, lease: &Lease) -> Result<Option<Instant>, StoreError> {
    let renew = || async {
        let answers = renew_all(request.store(), std::slice::from_ref(lease)).await?;
        let unanswered = "the store did not answer the renewal of the lease";
        answers.first().copied().ok_or_else(|| StoreError::new(StoreErrorKind::Unconfirmed, unanswered))
    };
    hold(request, lease, false, &[], renew).await
}

/// Marks in the record that the body begins. Returns the time when the confirmed mark was sent, from which the lease is
/// measured; `None` if the store refuses the mark. If the store does not answer, the reservation is released, because
/// the body has not begun.
async fn mark(request: &Request<'_>, lease: &Lease) -> Result<Option<Instant>, StoreError> {
    let store = request.store();
    hold(request, lease, true, &RESERVE_PAUSES, || store.begin(lease).watched(store, StoreOp::Begin)).await
}

/// Sends the request `ask`, which renews `lease`, until an answer arrives within the duration of the lease. Returns the
/// time when the confirmed request was sent, from which the lease is measured; `None` if the store refuses the request.
/// After an error, and if this future is dropped, the reservation is released. `marks` is true if the request may mark
/// the record as begun. `pauses` are the pauses after requests that have failed.
async fn hold<F>(
    request: &Request<'_>,
    lease: &Lease,
    marks: bool,
    pauses: &[Duration],
    ask: impl Fn() -> F,
) -> Result<Option<Instant>, StoreError>
where
    F: Future<Output = Result<Verdict, StoreError>>,
{
    let (store, clock) = (request.store(), request.clock());
    let mut unused = ReservationGuard { store, request: &request.reserve, may_have_landed: true, may_be_marked: marks };
    let mut failed = 0;
    // To another process, a record that is marked as begun and whose lease has lapsed looks like a crash. A duplicate
    // in this process reports no crash: it reserves again while this value exists.
    let mut ends_late = None;
    loop {
        let since = clock.now();
        let answer = ask().await;
        if clock.now() >= since.saturating_add(lease.duration) || answer.is_err() {
            ends_late.get_or_insert_with(|| late::ends_late(store, lease));
        }
        let (error, pauses) = match answer {
            Ok(Verdict::Refused) => {
                unused.may_have_landed = false;
                return Ok(None);
            }
            Ok(Verdict::Applied) if clock.now() < since.saturating_add(lease.duration) => {
                unused.may_have_landed = false;
                return Ok(Some(since));
            }
            // The answer came after the end of the lease, so a further request renews the lease. Without a pause and a
            // limit, the calls that an overloaded store slows down would keep it overloaded.
            Ok(Verdict::Applied) => (answers_late(), &RESERVE_PAUSES[..]),
            Err(error) => (error, pauses),
        };
        let Some(pause) = request.pause(&error, failed, pauses) else { return Err(error) };
        clock.sleep(pause).await;
        failed += 1;
    }
}

/// Releases a reservation after the store has refused to mark its record as begun, because its lease had lapsed. Where
/// clocks of machines differ, the record would otherwise block the next attempt for as long as the clocks may differ.
/// If the release is refused, another attempt holds the key.
async fn give_back(request: &Request<'_>, lease: &Lease) -> Result<(), StoreError> {
    let (store, clock) = (request.store(), request.clock());
    let mut unused = ReservationGuard { store, request: &request.reserve, may_have_landed: true, may_be_marked: true };
    let mut failed = 0;
    while let Err(error) = late::free(&**store, lease).await {
        match request.pause(&error, failed, &[]) {
            Some(pause) => clock.sleep(pause).await,
            None => return Err(error),
        }
        failed += 1;
    }
    unused.may_have_landed = false;
    Ok(())
}

fn answers_late() -> StoreError {
    let message =
        "answers later than the lease lasts, again and again: the store is overloaded, or the lease is too short";
    StoreError::new(StoreErrorKind::Unconfirmed, message)
}

fn lapsed_before_its_body() -> StoreError {
    let message = "the lease lapsed before the record could say that the body begins, again and again";
    StoreError::new(StoreErrorKind::Unavailable, message)
}

/// Frees the key when a call is dropped while its reservation may have taken effect, or may still take effect.
struct ReservationGuard<'a> {
    store: &'a Arc<dyn Store>,
    request: &'a ReserveRequest,
    may_have_landed: bool,
    /// True if the record may already be marked as begun.
    may_be_marked: bool,
}

impl Drop for ReservationGuard<'_> {
    fn drop(&mut self) {
        if self.may_have_landed {
            late::clean_up_late(self.store, self.request, self.may_be_marked);
        }
    }
}
