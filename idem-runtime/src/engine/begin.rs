//! The beginning of a call: reserves its key, or returns why its body must not run.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::Subject;
use super::attempt::{self, Attempt};
use super::held::HeldAttempt;
use super::late;
use super::observed_call::Refusal;
use super::observer;
use super::poll_notes::waits;
use super::replay::Replay;
use super::turns::Turn;
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::error::{Error, Mismatch};
use crate::key::{Key, KeyError, KeyProblem};
use crate::metrics::StoreOp;
use crate::policy::{Backoff, InProgress, MissingKey, Mode, OnCrash, OnStoreError, Policy, PolicyProblem};
use crate::record::{Admission, Inspection, Lease, LeaseMark, Record, Reservation, ReserveRequest, Verdict};
use crate::store::flight::{WaitOutcome, WaitTicket, wait_once};
use crate::store::{LastWait, Store, StoreError, StoreErrorKind, StoreFuture, renew_all};

/// Pauses before the retries of a failed reservation. Few retries suffice: the broker delivers again anyway.
const RESERVE_PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(50)];
/// Pauses between the tries of a duplicate that waits for another attempt. The longest one is the delay of its result
/// after an outage.
const PAUSES_IN_WAIT: Backoff = Backoff::new(RESERVE_PAUSES[1], Duration::from_secs(1));
/// Pause of a duplicate that waits for the late end of an attempt in this process. The end is tried about as often.
const END_PAUSE: Duration = Duration::from_secs(1);
/// Number of owner tokens that a call may draw. It needs another one if a clean-up overtook its own late request, and
/// if its lease had lapsed before the record could say that the body begins.
const TOKENS: u8 = 3;

/// Beginning of a call.
pub(super) struct BeginResult {
    pub(super) start: Start,
    /// Time that the call waited for another attempt, if it did. A wait for another item of its batch counts as zero.
    pub(super) waited: Option<Duration>,
    /// True if the store answered without a wait.
    pub(super) at_once: bool,
    /// Turn of the call on its key, if the call is one of a batch. An `Arc`, because the drop of an empty `Option<Arc>`
    /// is inlined, and the drop of a box is a function that each call would call.
    pub(super) turn: Option<Arc<Turn>>,
}

/// Next step of a call: the use of its body, or its end.
pub(super) enum Start {
    /// The key is reserved: run the body and record what it returns.
    Reserved(HeldAttempt),
    /// Run the body without a reservation. The attempt is for [`current`](crate::current) only.
    Unprotected {
        attempt: Option<Attempt>,
        mode: Mode,
        /// Reason why the call would have been refused.
        bypassed: Option<Refusal>,
    },
    /// Return the recorded result.
    Replay(Replay),
    /// Return this error; the body does not run.
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
        // The delivery has to see each of its calls, in every mode.
        let turns = observer::begins(&**store, key.as_ref().ok());
        if mode == Mode::Off {
            let start = unprotected(&subject, mode, key.as_ref().ok(), None);
            return BeginResult { start, waited: None, at_once: false, turn: None };
        }
        // Items of one batch with one key run one after the other: the second item replays the first. Shadow mode must
        // not delay a call.
        let (mut turn, queued) = match (turns, key) {
            (Some((turns, item)), Ok(key)) if mode == Mode::Enforce => {
                let limit = || store.context().clock().sleep(policy.timeout.saturating_add(policy.lease));
                // Boxed: most calls are not in a batch, but would carry its size inline.
                Box::pin(turns.enter(key, item, limit)).await
            }
            _ => (None, false),
        };
        // Each round reserves once. Another round follows only while the message must outlast an outage of the store.
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
                    // Replaced in place, because a `Start` is large.
                    if let Some(instead) = instead(&subject, mode, &beginning.start) {
                        beginning.start = instead;
                    }
                    return beginning;
                };
                pause
            };
            waits();
            // The sleep is outside of the block above: a local that lives across this `await` would be stored in every
            // call.
            store.context().clock().sleep(pause).await;
        }
    }
}

/// Returns the next step of a call whose policy or mode runs the body although `start` does not.
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

/// Returns the pause before the call asks a store again that has not answered; `None` if the call gives up. A message
/// with few deliveries left waits, because an outage would otherwise set it aside. `outage` holds the time at which the
/// call gives up.
fn outlasts(subject: &Subject, error: &Error, outage: &mut Option<Instant>) -> Option<Duration> {
    let Error::Store { source, retry_after, .. } = error else { return None };
    let Policy { timeout, lease, on_store_error, .. } = subject.policy;
    if !source.is_transient() || on_store_error == OnStoreError::Run || !observer::budget().is_scarce() {
        return None;
    }
    let now = subject.store.context().clock().now();
    let left = outage.get_or_insert(now.saturating_add(timeout).saturating_add(lease)).saturating_since(now);
    // `retry_after` grows with the outage. The store may be back much earlier, so the pause is a lease at most.
    (!left.is_zero()).then(|| left.min(lease).min(*retry_after))
}

/// Returns whether the store did not answer. A record that can't be read is an answer: its operation may have finished.
fn is_no_answer(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. } if source.kind() != StoreErrorKind::Corrupt)
}

/// Asks for the key until an answer decides the call. Waits for a running attempt in between if the policy allows it.
async fn admit(subject: &Subject, mode: Mode) -> BeginResult {
    let mut request = match Request::new(subject, mode) {
        Ok(request) => request,
        Err(start) => return BeginResult { start: *start, waited: None, at_once: false, turn: None },
    };
    loop {
        let running = match request.ask().await {
            Step::Decided(start) => {
                let waited = request.since(request.met_at.filter(|_| request.waited));
                return BeginResult { start, waited, at_once: request.at_once, turn: None };
            }
            Step::AskAgain => continue,
            Step::Running(running) => running,
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
        if let Some(start) = Box::pin(request.wait(running)).await {
            let waited = request.since(request.met_at);
            return BeginResult { start: *start, waited, at_once: request.at_once, turn: None };
        }
    }
}

/// The next step after the answer to a request.
enum Step {
    Decided(Start),
    /// The answer decides nothing: ask again immediately.
    AskAgain,
    Running(RunningAttempt),
}

/// An answer that needs one more request, or a wait.
enum OpenAnswer {
    /// Another payload, of this attempt.
    Mismatch(u32),
    /// The attempt is interrupted by its record, and is at work in this process.
    EndsLate(u32),
}

/// An attempt that holds the key.
#[derive(Clone, Copy)]
struct RunningAttempt {
    attempt: u32,
    lapses_in: Duration,
}

/// The request of a call for its key, and its state so far.
struct Request<'a> {
    subject: &'a Subject,
    mode: Mode,
    reserve: ReserveRequest,
    /// Time at which the earliest request of this owner that got no answer was sent. That request may have taken
    /// effect, or may still.
    unanswered_since: Option<Instant>,
    /// Time at which the call found the first attempt that it waits for.
    met_at: Option<Instant>,
    /// Late ends of attempts in this process when the key was asked for.
    late_ends: u32,
    /// Whether the call has waited for another attempt.
    waited: bool,
    /// Whether the last request was answered as soon as it was made.
    at_once: bool,
    /// Number of owner tokens that the call has drawn.
    tokens: u8,
    /// The right to wait on the last deliveries of the message.
    last_wait: Option<LastWait>,
}

impl<'a> Request<'a> {
    /// Checks key, policy and fingerprint. The `Err` is boxed: it is large and rare.
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
        // A policy that can't be honoured is refused before the store is asked.
        if let Err(reason) = policy.check() {
            return refuse(Error::InvalidPolicy { key, problem: reason });
        }
        // After the end of the retention a redelivery would run the body again.
        if let Some(longest) = observer::redelivered_for()
            && policy.ttl < longest
        {
            let redelivery = (longest < Duration::MAX).then_some(longest);
            return refuse(Error::InvalidPolicy {
                key,
                problem: PolicyProblem::TtlBelowRedelivery { ttl: policy.ttl, redelivery },
            });
        }
        // Only a warning, once for each store handle: most calls of the store are much faster than its time limit.
        if let Err(reason) = policy.check_with(store)
            && store.context().warns_now()
        {
            tracing::warn!(%key, store = store.context().name(), "{reason}");
        }
        // Leases that are measured in real time can't be renewed in a test that moves tokio's time.
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
        let reserve = ReserveRequest {
            key,
            owner: store.context().new_owner(),
            lease: policy.lease,
            ttl: policy.ttl,
            fingerprint,
            on_crash: policy.on_crash,
            max_attempts: policy.max_attempts,
            provenance: store.context().provenance(),
        };
        let reserve = match observer::traceparent() {
            Some(traceparent) => reserve.traceparent(traceparent),
            None => reserve,
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

    /// Asks the store for the key.
    async fn ask(&mut self) -> Step {
        // Blocks end what an await after them would carry along: every call has the size of its largest await.
        let unsettled = {
            let now = self.clock().now();
            self.late_ends = self.store().context().late_writes().changes();
            // A repeated reservation may have taken effect by its first request: count the lease from that request.
            let mut asked_at = self.unanswered_since.unwrap_or(now);
            // Only a store that does not answer immediately costs the state of a repeated request.
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
            // The body of a granted lease may have to wait for a confirmation or for a mark.
            if let Some(unready) = self.unready(&answer, since) {
                self.at_once = false;
                // Boxed: most calls are ready, and would carry its size inline.
                match Box::pin(prepare(self, unready)).await {
                    Ok(PreparedLease::Since(since)) => {
                        asked_at = since;
                        if let Ok(Reservation::Granted { lease, .. }) = &mut answer {
                            // The record no longer equals the bytes that the reservation wrote.
                            lease.mark = LeaseMark::default();
                        }
                    }
                    Ok(PreparedLease::Lost) => return Step::AskAgain,
                    Ok(PreparedLease::NotMarked) => return self.ask_as_another(lapsed_before_its_body),
                    Err(error) => return Step::Decided(self.no_answer(error, true)),
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
                Ok(reservation) => return self.decide(reservation, asked_at),
                Err(error) => return Step::Decided(self.no_answer(error, self.unanswered_since.is_some())),
            }
        };
        // Boxed: both are rare, and every call would carry their size inline.
        match unsettled {
            OpenAnswer::Mismatch(attempt) => {
                Step::Decided(Start::Refused(Box::pin(mismatch(self.store(), &self.reserve, attempt)).await))
            }
            OpenAnswer::EndsLate(attempt) => Box::pin(self.await_end(attempt)).await,
        }
    }

    /// Waits for attempt `attempt`, whose lease has lapsed and which this process runs or is still ending, for as long
    /// as the policy says. The record calls it interrupted, and will not once that end is written.
    async fn await_end(&mut self, attempt: u32) -> Step {
        self.store().context().store_answered();
        self.may_wait_at_last();
        let left = self.may_wait();
        if left.is_zero() {
            return Step::Decided(Start::Refused(self.in_progress(RunningAttempt { attempt, lapses_in: END_PAUSE })));
        }
        self.waited = true;
        waits();
        self.clock().sleep(left.min(END_PAUSE)).await;
        Step::AskAgain
    }

    /// Returns whether the record must be marked as begun before the body begins.
    ///
    /// Under `fail` a crash after the mark interrupts the key, and a crash before the mark leaves the key free.
    /// `max_attempts` counts only marked attempts. The first attempt of a key, which most calls are, is marked only if
    /// no other attempt is allowed.
    fn marks(&self, lease: &Lease) -> bool {
        let Policy { on_crash, max_attempts, .. } = self.subject.policy;
        let counts = max_attempts.is_some_and(|max| lease.attempt > 1 || max.get() == 1);
        on_crash == OnCrash::Fail || counts
    }

    /// Returns the lease that `answer` grants if its body may not begin yet. The request was first sent at `since`
    /// (`None`: just now).
    fn unready(&self, answer: &Result<Reservation, StoreError>, since: Option<Instant>) -> Option<GrantedLease> {
        let Ok(Reservation::Granted { lease, .. }) = answer else { return None };
        let too_late = since.is_some_and(|since| self.clock().now() >= since.saturating_add(lease.duration));
        let unmarked = self.marks(lease);
        (too_late || unmarked).then(|| GrantedLease { lease: lease.clone(), too_late, unmarked })
    }

    /// Asks again with another owner token, or fails with `error` if the call has drawn all of its tokens.
    fn ask_as_another(&mut self, error: fn() -> StoreError) -> Step {
        if self.tokens == TOKENS {
            return Step::Decided(self.no_answer(error(), false));
        }
        self.reserve.owner = self.store().context().new_owner();
        (self.tokens, self.unanswered_since) = (self.tokens + 1, None);
        Step::AskAgain
    }

    /// Returns the next step after a reservation.
    fn decide(&self, reservation: Reservation, asked_at: Instant) -> Step {
        let Subject { store, policy, .. } = self.subject;
        let (key, name) = (&self.reserve.key, store.context().name());
        match store.context().renews() {
            true => store.context().store_answered(),
            false => _ = store.context().counts().refusals_in_transactions(key, false),
        }
        Step::Decided(match reservation {
            Reservation::Finished { record, age } => {
                let Policy { on_undecodable, ttl, backoff, .. } = *policy;
                let Record { owner, attempt, state, provenance, .. } = record;
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
            Reservation::Granted { lease, takeover } => {
                if takeover {
                    tracing::warn!(
                        %key, store = name, attempt = lease.attempt,
                        "took over: the lease of the attempt before had lapsed; its process died, stood still or did not \
                         reach the store"
                    );
                }
                let attempt = Attempt::new(Arc::clone(store), lease, asked_at, policy.backoff);
                Start::Reserved(HeldAttempt::new(attempt, takeover, self.mode == Mode::Enforce, policy))
            }
            Reservation::InProgress { attempt, lapses_in } => {
                return Step::Running(RunningAttempt { attempt, lapses_in });
            }
            Reservation::Interrupted { attempt } => {
                Start::Refused(Error::Interrupted { key: key.clone(), store: name, attempt })
            }
            Reservation::AttemptsExhausted { attempts } => {
                Start::Refused(Error::AttemptsExhausted { key: key.clone(), store: name, attempts })
            }
            Reservation::Released { .. } | Reservation::FingerprintMismatch { .. } => {
                unreachable!("answered by the caller")
            }
        })
    }

    /// Returns the error of a request whose tries have all failed. `may_be_reserved`: one of the tries may have taken
    /// effect.
    fn no_answer(&self, source: StoreError, may_be_reserved: bool) -> Start {
        let Subject { store, policy, .. } = self.subject;
        let seed = self.reserve.owner.seed();
        let retry_after = match source.kind() {
            // A repair takes minutes.
            StoreErrorKind::Corrupt => policy.backoff.after(8, seed),
            // The handle of a call in a transaction ends with it, and knows nothing of earlier failures.
            _ if !store.context().renews() => {
                policy.backoff.after(store.context().counts().refusals_in_transactions(&self.reserve.key, true), seed)
            }
            _ => policy.backoff.during(store.context().store_failed(), seed),
        };
        let key = self.reserve.key.clone();
        let store = store.context().name();
        Start::Refused(Error::Store { key, store, started: false, may_be_reserved, retry_after, source })
    }

    /// Takes the right to wait for another attempt, regardless of `in_progress`, if the message has few deliveries left
    /// and not too many other calls have that right.
    fn may_wait_at_last(&mut self) {
        if self.last_wait.is_none() && self.mode == Mode::Enforce && observer::budget().is_scarce() {
            self.last_wait = self.store().context().counts().last_wait();
        }
    }

    /// Returns the time that the call, which has found another attempt, may still wait for it.
    fn may_wait(&mut self) -> Duration {
        match self.longest_wait() {
            Some(limit) => {
                let now = self.clock().now();
                self.met_at.get_or_insert(now).saturating_add(limit).saturating_since(now)
            }
            // Most calls don't wait, and read no clock.
            None => Duration::ZERO,
        }
    }

    /// Returns the time that the call may still wait for another attempt. The limit counts from the first attempt that
    /// the call has found; before that the time is zero.
    fn left_to_wait(&self) -> Duration {
        let Some(met_at) = self.met_at else { return Duration::ZERO };
        let limit = self.longest_wait().unwrap_or_default();
        met_at.saturating_add(limit).saturating_since(self.clock().now())
    }

    /// Returns the time that the call may wait for another attempt in all; `None` if it does not wait.
    fn longest_wait(&self) -> Option<Duration> {
        let Policy { in_progress, timeout, lease, .. } = self.subject.policy;
        // An attempt may hold the key for this long.
        let scarce = self.last_wait.is_some().then(|| timeout.saturating_add(lease));
        let limit = match in_progress {
            InProgress::Wait(limit) => Some(limit).max(scarce),
            InProgress::Reject => scarce,
        };
        // A handler that waits for itself is never woken, and shadow mode must not delay a call.
        limit.filter(|_| self.mode == Mode::Enforce && !attempt::is_inside(&self.reserve.key))
    }

    /// Pause before a request is sent again whose try number `tried`, from 0, has failed with `error`. Each call has
    /// `pauses`. A duplicate in its wait goes on for as long as it may wait: the attempt that it waits for may outlive
    /// the outage. Its pauses are drawn, so that thousands of waiting duplicates do not ask together.
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
                // Only deliveries that found this same attempt count: others show nothing about its duration.
                let met = self.store().context().counts().meets(&key, attempt).min(number);
                backoff.beyond(lapses_in, lease, met, self.reserve.owner.seed())
            }
            None => lapses_in,
        };
        Error::InProgress { key, store: self.store().context().name(), attempt, retry_after }
    }

    /// Waits until the running attempt may have ended. Returns the next step if it is known then; otherwise the caller
    /// asks.
    ///
    /// The futures of rare steps are boxed: there may be thousands of waiting duplicates.
    async fn wait(&mut self, mut running: RunningAttempt) -> Option<Box<Start>> {
        let mut aboard = None;
        let told = loop {
            let left = self.may_wait();
            // A call with an unanswered request may find its own reservation in the record, so it can't use what others
            // read. Inside of a transaction no other call shares the wait.
            if self.unanswered_since.is_some() || !self.store().context().renews() {
                break Box::pin(self.wait_alone(running, left)).await;
            }
            let (sleep, RunningAttempt { attempt, lapses_in }) = (self.clock().sleep(left), running);
            let aboard =
                aboard.get_or_insert_with(|| WaitTicket::join(self.store(), &self.reserve.key, attempt, lapses_in));
            match race(&mut *aboard, sleep).await {
                Some(WaitOutcome::Told(found)) => break Some(found),
                Some(WaitOutcome::Turn) => match Box::pin(self.ask_for_all(aboard)).await {
                    Step::Running(now) if !self.may_wait().is_zero() => running = now,
                    Step::Running(now) => return Some(Box::new(Start::Refused(self.in_progress(now)))),
                    Step::Decided(start) => return Some(Box::new(start)),
                    Step::AskAgain => return None,
                },
                Some(WaitOutcome::Ask) | None => return None,
            }
        };
        self.at_once = false;
        let found = told.filter(|found| !found.record.is_pending() && !found.expires_in.is_zero())?;
        match found.record.admit(&self.reserve, Duration::ZERO) {
            Admission::Answer(Reservation::Released { .. }) | Admission::Replace { .. } => None,
            Admission::Answer(Reservation::FingerprintMismatch { attempt }) => {
                Some(Box::new(Start::Refused(mismatch(self.store(), &self.reserve, attempt).await)))
            }
            Admission::Answer(answer) => match self.decide(answer.aged(found.began), self.clock().now()) {
                Step::Decided(start) => Some(Box::new(start)),
                Step::AskAgain | Step::Running(_) => None,
            },
        }
    }

    /// Asks as the one duplicate that has the turn, and reports the attempt that then holds the key to the others.
    async fn ask_for_all(&mut self, aboard: &mut WaitTicket) -> Step {
        let step = self.ask().await;
        aboard.settle(match &step {
            Step::Running(RunningAttempt { attempt, lapses_in }) => Some((*attempt, *lapses_in)),
            Step::Decided(Start::Reserved(held)) => {
                let Lease { attempt, duration, .. } = held.attempt().lease;
                Some((attempt, duration))
            }
            Step::Decided(Start::Replay(replay)) => Some((replay.attempt, self.reserve.lease)),
            Step::AskAgain | Step::Decided(_) => None,
        });
        step
    }

    /// Waits without the other duplicates. Returns the record that the store read at the end of the wait.
    async fn wait_alone(&mut self, running: RunningAttempt, left: Duration) -> Option<Arc<Inspection>> {
        let (store, key) = (self.store(), &self.reserve.key);
        // Our unanswered request may land while we wait.
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

/// Makes the error for a key that was used with another payload. The record is read once more, only for the details of
/// the error.
async fn mismatch(store: &Arc<dyn Store>, request: &ReserveRequest, attempt: u32) -> Error {
    let inspection = store.inspect(&request.key).watched(store, StoreOp::Inspect).await.ok().flatten();
    let recorded = inspection.as_ref().and_then(|found| found.record.fingerprint);
    let age = inspection.map(|found| found.record.retention(request.ttl).saturating_sub(found.expires_in));
    let payloads = Box::new(Mismatch { presented: request.fingerprint, recorded, age });
    Error::FingerprintMismatch { key: request.key.clone(), store: store.context().name(), attempt, payloads }
}

/// The answer to a request.
struct Reply {
    answer: Result<Reservation, StoreError>,
    /// True if a try without an answer may have landed.
    unanswered: bool,
}

/// Awaits `asking`, and repeats the request with the same owner token if the store fails: the store recognises a try
/// that took effect.
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

/// A granted lease, and the steps that are missing before its body may begin.
struct GrantedLease {
    lease: Lease,
    /// The answer took longer than the lease: another attempt may have run meanwhile.
    too_late: bool,
    /// The record must be marked as begun first.
    unmarked: bool,
}

/// State of a lease after its preparation.
enum PreparedLease {
    /// The lease is held since this time: the body may begin.
    Since(Instant),
    /// Another attempt has the key.
    Lost,
    /// The store refuses the mark. The reservation is released.
    NotMarked,
}

/// Confirms and marks a lease, as far as these steps are missing.
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

/// Renews a lease that has lapsed before its body could start. Returns the time since which the lease is held again;
/// `None` if it is lost. If the renewal fails, the reservation is released.
async fn confirm(request: &Request<'_>, lease: &Lease) -> Result<Option<Instant>, StoreError> {
    let renew = || async {
        let answers = renew_all(request.store(), std::slice::from_ref(lease)).await?;
        let unanswered = "the store did not answer the renewal of the lease";
        answers.first().copied().ok_or_else(|| StoreError::new(StoreErrorKind::Unconfirmed, unanswered))
    };
    hold(request, lease, false, &[], renew).await
}

/// Marks that the body is about to begin. Returns the time since which the lease is held; `None` if the store refuses
/// the mark. If the store does not answer, the reservation is released: the body has not begun.
async fn mark(request: &Request<'_>, lease: &Lease) -> Result<Option<Instant>, StoreError> {
    let store = request.store();
    hold(request, lease, true, &RESERVE_PAUSES, || store.begin(lease).watched(store, StoreOp::Begin)).await
}

/// Sends the request `ask` until the answer arrives within the lease that it renews. Returns the time since which that
/// lease is held; `None` if the store refuses. After an error, and if this future is dropped, the reservation is
/// released. `marks`: the request may leave a mark.
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
    // Once the lease may have lapsed under a mark, duplicates in this process ask again before they believe its
    // record.
    let mut ends_late = None;
    loop {
        let since = clock.now();
        let answer = ask().await;
        if clock.now() >= since.saturating_add(lease.duration) || answer.is_err() {
            ends_late.get_or_insert_with(|| late::ends_late(store, lease));
        }
        match answer {
            Ok(Verdict::Refused) => {
                unused.may_have_landed = false;
                return Ok(None);
            }
            Ok(Verdict::Applied) if clock.now() < since.saturating_add(lease.duration) => {
                unused.may_have_landed = false;
                return Ok(Some(since));
            }
            // The answer came after the lease: another request renews it.
            Ok(Verdict::Applied) => {}
            Err(error) => match request.pause(&error, failed, pauses) {
                Some(pause) => {
                    clock.sleep(pause).await;
                    failed += 1;
                }
                None => return Err(error),
            },
        }
    }
}

/// Releases a reservation whose mark is refused because its lease has lapsed. Where clocks differ, the record would
/// otherwise block the next attempt for as long as they may differ. If the release is refused, another attempt has the
/// key.
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

fn lapsed_before_its_body() -> StoreError {
    let message = "the lease lapsed before the record could say that the body begins, again and again";
    StoreError::new(StoreErrorKind::Unavailable, message)
}

/// Frees the key if a call is dropped whose reservation may have taken effect, or still may.
struct ReservationGuard<'a> {
    store: &'a Arc<dyn Store>,
    request: &'a ReserveRequest,
    may_have_landed: bool,
    /// True if the record may be marked as begun.
    may_be_marked: bool,
}

impl Drop for ReservationGuard<'_> {
    fn drop(&mut self) {
        if self.may_have_landed {
            late::clean_up_late(self.store, self.request, self.may_be_marked);
        }
    }
}
