//! The protocol: reserve, run with heartbeats, record, replay. The only file with this control flow.
//!
//! A call has three phases. [`begin`] reserves the key or finds out why not. The body then runs inside the caller's own
//! future. [`end`] records what it returned. [`Call`] strings them together by hand: an `async fn` that owns the body
//! would keep room for it twice, at every level of nested calls. It knows the body only as [`Work`], so that the compiler
//! makes it once and not once for each handler.

mod attempt;
mod ending;
mod outcome;
mod recorder;

use std::future::Future;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use serde::Serialize;

pub(crate) use self::attempt::Entered;
pub use self::attempt::{Attempt, current};
pub use self::ending::Ending;
pub use self::outcome::{CatchPanics, Observe, Outcome, Refusal, observe};
pub(crate) use self::outcome::{Observation, Seat, Stage, report};
pub use self::recorder::{
    ErrorRule, RecordResults, RecordValues, Recorder, record_results, record_results_if, record_values,
};

use crate::clock::{self, Clock, Instant};
use crate::codec::Unavailable;
use crate::error::{Disposition, Error, Mismatch};
use crate::key::{Fingerprint, FingerprintError, Key, KeyError, KeyProblem};
use crate::policy::{Doubt, InProgress, MissingKey, Mode, OnCrash, OnStoreError, OnUndecodable, Policy, Uncertain};
use crate::record::{Finish, Lease, Payload, Record, Release, Reservation, Reserve, State, Write};
use crate::store::{Standing, Store, StoreError, StoreErrorKind, StoreFuture, renew_all};

/// The pauses before a reservation that failed is tried again. Few: the broker delivers again anyway.
const RESERVE_PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(50)];
/// How long a duplicate waits before it asks again if its store can't wait for it.
const WAIT_FALLBACK: Duration = Duration::from_millis(100);
/// How many owner tokens a call draws: a second one where a clean-up was faster than the request that it was for.
const TOKENS: u8 = 3;

/// One call of an idempotent function: where, under which key, and how it is protected.
#[derive(Debug)]
pub struct Operation {
    store: Arc<dyn Store>,
    /// In a box, as every call would move its room about.
    key: Result<Key, Box<KeyError>>,
    policy: Policy,
    fingerprint: Option<Result<Fingerprint, FingerprintError>>,
}

impl Operation {
    /// An operation named by `key` in `store`. A key that could not be built is reported when the operation is run.
    pub fn new<S: Store + ?Sized>(store: &S, key: Result<Key, KeyError>, policy: Policy) -> Self {
        Self { store: store.handle(), key: key.map_err(Box::new), policy, fingerprint: None }
    }

    /// The operation with the fingerprint of its payload.
    #[must_use]
    pub fn fingerprint<F: Serialize + ?Sized>(mut self, payload: &F) -> Self {
        if self.policy.current_mode() != Mode::Off {
            self.fingerprint = Some(Fingerprint::of(payload));
        }
        self
    }
}

/// Runs `body` once for the key of `operation`, and replays its recorded result to every duplicate.
///
/// This is what `#[idempotent]` calls. `recorder` says how results are kept: [`record_values`](crate::record_values),
/// [`record_results`](crate::record_results) or [`record_results_if`](crate::record_results_if).
///
/// # Errors
/// What `body` returned, or the [`Error`] that says why it has no result.
///
/// # Panics
/// If `body` does; the key is then freed at once, or counts as interrupted under [`OnCrash::Fail`]. If a migration of
/// [`OnUndecodable`] does; nothing changes then.
///
/// # Cancel safety
/// Dropping the future cancels the body and frees the key, or counts as an interruption under [`OnCrash::Fail`]. Once
/// the body has returned, its result is recorded even if the future is dropped.
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::{Error, Json, Key, MemoryStore, Operation, Policy, record_values, run};
///
/// const POLICY: Policy = Policy::new(Duration::from_secs(7 * 86_400));
///
/// async fn ship(store: &MemoryStore, order: u32) -> Result<String, Error> {
///     let operation = Operation::new(store, Key::new("shop::ship", order), POLICY);
///     run(operation, record_values::<Json>(), async move { Ok(format!("parcel {order}")) }).await
/// }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # let store = MemoryStore::new();
/// # assert_eq!(ship(&store, 42).await.unwrap(), ship(&store, 42).await.unwrap());
/// # });
/// ```
pub fn run<T, E, R, B>(operation: Operation, recorder: R, body: B) -> impl Future<Output = Result<T, E>>
where
    R: Recorder<T, E>,
    E: From<Error>,
    B: Future<Output = Result<T, E>>,
{
    Run { protocol: protocol(operation), handled: Handled { body: Some(body), kept: Kept { recorder, result: None } } }
}

/// What [`begin`] decided.
enum Begun {
    /// Reserved: run the body and record what it returns.
    Reserved(Held),
    /// Run the body without a reservation; the attempt is for [`current`](crate::current) only.
    Unprotected(Option<Attempt>, Option<Refusal>),
    /// Return what is recorded.
    Replay { key: Key, store: &'static str, record: Record, on_undecodable: OnUndecodable },
    /// Return this error; the body doesn't run.
    Refused(Error),
}

/// Reserves the key, or finds out why the body is not to run; and says whether it had to wait.
///
/// Not an `async fn`: that would keep room for its argument twice, and so would every call around it.
#[expect(clippy::manual_async_fn, reason = "see above")]
fn begin(operation: Operation) -> impl Future<Output = (Begun, bool)> {
    async move {
        let Operation { store, policy, key, .. } = &operation;
        let unprotected = |key: Option<&Key>, why| {
            let attempt = key.map(|key| Attempt::unprotected(Arc::clone(store), key.clone(), policy));
            Begun::Unprotected(attempt, why)
        };
        let mode = policy.current_mode();
        if mode == Mode::Off {
            return (unprotected(key.as_ref().ok(), None), false);
        }
        let mut waited = false;
        let begun = match admit(&operation, mode, &mut waited).await {
            Begun::Refused(error) if policy.on_store_error == OnStoreError::Run && is_no_answer(&error) => {
                tracing::warn!(%error, "the body runs unprotected");
                unprotected(error.key(), Some(Refusal::Store))
            }
            Begun::Refused(error) if mode == Mode::Shadow => {
                tracing::info!(%error, "shadow mode: would have been refused");
                unprotected(error.key(), Refusal::of(&error))
            }
            Begun::Replay { key, store, record, .. } if mode == Mode::Shadow => {
                tracing::info!(%key, store, attempt = record.attempt, "shadow mode: would have been replayed");
                unprotected(Some(&key), Some(Refusal::Replay))
            }
            begun => begun,
        };
        (begun, waited)
    }
}

/// Whether the store did not answer. A record that can't be read is an answer: its operation may have finished.
fn is_no_answer(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. } if source.kind() != StoreErrorKind::Corrupt)
}

async fn admit(operation: &Operation, mode: Mode, waited: &mut bool) -> Begun {
    let Operation { store, key, policy, fingerprint } = operation;
    let key = match key {
        Ok(key) => key.clone(),
        Err(error) if error.problem == KeyProblem::Missing && policy.missing_key == MissingKey::Run => {
            return Begun::Unprotected(None, None);
        }
        Err(error) => return Begun::Refused(KeyError::clone(error).into()),
    };
    if let Err(reason) = policy.check() {
        return Begun::Refused(Error::InvalidPolicy { key, reason });
    }
    if let Err(reason) = policy.check_with(store)
        && store.heartbeats().warns_now()
    {
        tracing::warn!(%key, store = store.name(), "{reason}");
    }
    let fingerprint = match fingerprint {
        Some(Err(source)) => return Begun::Refused(Error::InvalidFingerprint { key, source: source.clone() }),
        Some(Ok(fingerprint)) => Some(*fingerprint),
        None => None,
    };
    let mut request = Reserve {
        key,
        owner: store.heartbeats().new_owner(),
        lease: policy.lease,
        ttl: policy.ttl,
        fingerprint,
        on_crash: policy.on_crash,
        max_attempts: policy.max_attempts,
    };
    let mut give_up_at = None;
    let mut unanswered_since = None;
    let mut tokens = 1;
    loop {
        // In a block of its own, as all that is in reach of an `await` takes room in the future of the call.
        let (attempt, lapses_in) = {
            let clock = store.heartbeats().clock();
            let now = clock.now();
            // The lease of a repeated reservation began at the earliest when the first one was sent.
            let mut asked_at = unanswered_since.unwrap_or(now);
            let mut asking = clock::asked(clock, now, || store.reserve(&request));
            let (answer, since) = match asking.at_once() {
                Some(answer) => (Ok(answer), unanswered_since),
                None => {
                    let answer = reserve(store, &request, asked_at, &mut asking, &mut unanswered_since).await;
                    (answer, Some(asked_at))
                }
            };
            let mut reservation = match timely(answer, clock, since) {
                ControlFlow::Continue(answer) => answer,
                // Boxed, as it is rare and would take room in every call.
                ControlFlow::Break((lease, takeover)) => {
                    match Box::pin(confirm(store, &request, lease, takeover, &mut asked_at)).await {
                        Ok(Some(confirmed)) => Ok(confirmed),
                        Ok(None) => continue,
                        Err(error) => Err(error),
                    }
                }
            };
            drop(asking);
            if matches!(reservation, Ok(Reservation::Released { .. })) {
                if tokens < TOKENS {
                    request.owner = store.heartbeats().new_owner();
                    (tokens, unanswered_since) = (tokens + 1, None);
                    continue;
                }
                reservation = Err(tokens_repeat());
            }
            if let Ok(Reservation::Mismatch { attempt }) = reservation {
                return Begun::Refused(Box::pin(mismatch(store, &request, attempt)).await);
            }
            match settle(operation, mode, &request, reservation, asked_at) {
                ControlFlow::Break(begun) => return begun,
                ControlFlow::Continue(running) => running,
            }
        };
        let now = store.heartbeats().clock().now();
        let left = match policy.in_progress {
            // A handler that waited for itself would wait in vain, and a shadow must not slow anybody down.
            InProgress::Wait(limit) if mode == Mode::Enforce && !attempt::is_inside(&request.key) => {
                give_up_at.get_or_insert(now.saturating_add(limit)).saturating_since(now)
            }
            _ => Duration::ZERO,
        };
        let key = &request.key;
        if left.is_zero() {
            let key = key.clone();
            return Begun::Refused(Error::InProgress { key, store: store.name(), attempt, retry_after: lapses_in });
        }
        *waited = true;
        // A request of ours that got no answer may land while we wait.
        let may_have_landed = unanswered_since.is_some();
        let mut unanswered = Unanswered { store, request: &request, may_have_landed };
        if let Err(error) = store.wait(key, attempt, left.min(lapses_in)).await {
            tracing::warn!(%key, store = store.name(), %error, "can't wait for a running attempt; asking again");
            store.heartbeats().clock().sleep(left.min(WAIT_FALLBACK)).await;
        }
        unanswered.may_have_landed = false;
    }
}

fn tokens_repeat() -> StoreError {
    let message = "says of new owner tokens that they were released before: the randomness of this system repeats";
    StoreError::new(StoreErrorKind::Corrupt, message)
}

/// What follows from a reservation; or the attempt that is running, and when its lease lapses.
fn settle(
    operation: &Operation,
    mode: Mode,
    request: &Reserve,
    reservation: Result<Reservation, StoreError>,
    asked_at: Instant,
) -> ControlFlow<Begun, (u32, Duration)> {
    let Operation { store, policy, .. } = operation;
    let (key, name) = (&request.key, store.name());
    if reservation.is_ok() {
        store.heartbeats().store_answered();
    }
    ControlFlow::Break(match reservation {
        Ok(Reservation::Finished(record)) => {
            Begun::Replay { key: key.clone(), store: name, record, on_undecodable: policy.on_undecodable }
        }
        Ok(Reservation::Reserved { lease, takeover }) => {
            if takeover {
                tracing::info!(%key, store = name, attempt = lease.attempt, "took over from a lapsed attempt");
            }
            let attempt = Attempt::new(Arc::clone(store), lease, asked_at, policy.backoff);
            Begun::Reserved(Held::new(attempt, takeover, mode == Mode::Enforce, policy))
        }
        Ok(Reservation::Pending { attempt, lapses_in }) => return ControlFlow::Continue((attempt, lapses_in)),
        Ok(Reservation::Released { .. } | Reservation::Mismatch { .. }) => unreachable!("met by the caller"),
        Ok(Reservation::Interrupted { attempt }) => {
            Begun::Refused(Error::Interrupted { key: key.clone(), store: name, attempt })
        }
        Ok(Reservation::Exhausted { attempts }) => {
            Begun::Refused(Error::AttemptsExhausted { key: key.clone(), store: name, attempts })
        }
        Err(source) => {
            let retry_after = match source.kind() {
                // Whoever mends it takes minutes.
                StoreErrorKind::Corrupt => policy.backoff.after(8, request.owner.seed()),
                _ => policy.backoff.during(store.heartbeats().store_failed(), request.owner.seed()),
            };
            Begun::Refused(Error::Store { key: key.clone(), store: name, started: false, retry_after, source })
        }
    })
}

/// The error for a key that was used with another payload. The record is asked for once more, for the error's sake.
async fn mismatch(store: &Arc<dyn Store>, request: &Reserve, attempt: u32) -> Error {
    let inspection = store.inspect(&request.key).await.ok().flatten();
    let recorded = inspection.as_ref().and_then(|found| found.record.fingerprint);
    let age = inspection.map(|found| found.record.retention(request.ttl).saturating_sub(found.expires_in));
    let payloads = Box::new(Mismatch { presented: request.fingerprint, recorded, age });
    Error::FingerprintMismatch { key: request.key.clone(), store: store.name(), attempt, payloads }
}

/// Awaits a reservation, and repeats it with the same owner token if the store fails: one that landed is recognised.
///
/// `unanswered_since` is when the first request of this owner was sent that may still land, or may have.
async fn reserve<'a>(
    store: &'a Arc<dyn Store>,
    request: &'a Reserve,
    asked_at: Instant,
    asking: &mut StoreFuture<'a, Reservation>,
    unanswered_since: &mut Option<Instant>,
) -> Result<Reservation, StoreError> {
    let mut unanswered = Unanswered { store, request, may_have_landed: true };
    let mut pauses = RESERVE_PAUSES.iter();
    let mut may_have_landed = unanswered_since.is_some();
    loop {
        match (&mut *asking).await {
            Ok(reservation) => {
                unanswered.may_have_landed = false;
                return Ok(reservation);
            }
            Err(error) => {
                if error.may_have_landed() {
                    may_have_landed = true;
                    *unanswered_since = Some(asked_at);
                }
                match pauses.next() {
                    Some(pause) if error.is_transient() => store.heartbeats().clock().sleep(*pause).await,
                    _ => {
                        unanswered.may_have_landed = may_have_landed;
                        return Err(error);
                    }
                }
            }
        }
        *asking = store.reserve(request);
    }
}

/// The answer to what was first asked `since` (`None`: just now); or the lease it grants, if it took longer than that:
/// somebody else may have run meanwhile.
fn timely(
    answer: Result<Reservation, StoreError>,
    clock: &dyn Clock,
    since: Option<Instant>,
) -> ControlFlow<(Lease, bool), Result<Reservation, StoreError>> {
    match answer {
        Ok(Reservation::Reserved { lease, takeover })
            if since.is_some_and(|since| clock.now() >= since.saturating_add(lease.lease)) =>
        {
            ControlFlow::Break((lease, takeover))
        }
        answer => ControlFlow::Continue(answer),
    }
}

/// Renews a lease that has lapsed before its body could start; `None` if it is lost. A reservation that can't be used any
/// more is released.
async fn confirm(
    store: &Arc<dyn Store>,
    request: &Reserve,
    lease: Lease,
    takeover: bool,
    asked_at: &mut Instant,
) -> Result<Option<Reservation>, StoreError> {
    let clock = store.heartbeats().clock();
    let mut unused = Unanswered { store, request, may_have_landed: true };
    loop {
        let now = clock.now();
        let answers = renew_all(store, std::slice::from_ref(&lease)).await?;
        let Some(answer) = answers.first().copied() else {
            return Err(StoreError::new(StoreErrorKind::Unknown, "the store answered for no lease"));
        };
        *asked_at = now;
        let held = answer == Write::Done;
        if !held || clock.now() < now.saturating_add(lease.lease) {
            unused.may_have_landed = false;
            return Ok(held.then_some(Reservation::Reserved { lease, takeover }));
        }
    }
}

/// Frees the key if a reservation may have landed, or may still land, although nobody waits for its answer any more.
struct Unanswered<'a> {
    store: &'a Arc<dyn Store>,
    request: &'a Reserve,
    may_have_landed: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.may_have_landed {
            ending::clean_up_late(self.store, self.request);
        }
    }
}

/// A reservation and what has to happen to it if the call ends here: dropped while the body runs, it releases the key
/// (or marks it interrupted); dropped while the result is being recorded, it records the result late.
struct Held {
    /// Empty only while the attempt is the current one of this thread.
    attempt: Option<Attempt>,
    body: BodyStage,
    takeover: bool,
    /// Whether a lost lease cancels the body.
    enforced: bool,
    timeout: Duration,
    on_uncertain: Option<fn(Uncertain<'_>)>,
    on_drop: Option<Ending>,
}

/// Where a body stands between two polls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyStage {
    /// Not polled, and not registered for heartbeats.
    New,
    /// Being polled; a panic leaves it so.
    Polling,
    /// Polled.
    Pending,
}

/// How a body ended.
#[derive(Clone, Copy)]
enum BodyEnd {
    /// It returned, and says whether that is `Ok`.
    Returned(bool),
    /// Its lease was lost.
    LeaseLost,
    /// It ran for longer than it may.
    TimedOut,
}

impl Held {
    fn new(attempt: Attempt, takeover: bool, enforced: bool, policy: &Policy) -> Self {
        let release = match attempt.lease.on_crash {
            OnCrash::Retry => Release::Returned,
            OnCrash::Fail => Release::Interrupted,
        };
        let on_drop = Some(Ending::Release(release));
        let Policy { timeout, on_uncertain, .. } = *policy;
        Self { attempt: Some(attempt), body: BodyStage::New, takeover, enforced, timeout, on_uncertain, on_drop }
    }

    fn attempt(&self) -> &Attempt {
        self.attempt.as_ref().expect("swapped out only while the body is being polled")
    }

    /// Polls the body as this attempt, if its lease is held. It is registered for heartbeats before it is first polled, as it
    /// may block in there.
    fn poll_body(&mut self, work: Pin<&mut dyn Work>, cx: &mut Context<'_>) -> Poll<BodyEnd> {
        if self.body != BodyStage::New {
            match self.standing(cx) {
                Standing::Lapsed => return Poll::Pending,
                Standing::Lost => return Poll::Ready(BodyEnd::LeaseLost),
                Standing::TimedOut => return Poll::Ready(BodyEnd::TimedOut),
                Standing::Held => return self.poll_as_attempt(work, cx),
            }
        }
        let Attempt { store, lease, reserved_at, .. } = self.attempt();
        store.heartbeats().register(store, lease, *reserved_at, self.timeout);
        let polled = self.poll_as_attempt(work, cx);
        if polled.is_pending() && self.standing(cx) != Standing::Held {
            // There was nobody to wake yet.
            cx.waker().wake_by_ref();
        }
        polled
    }

    fn poll_as_attempt(&mut self, work: Pin<&mut dyn Work>, cx: &mut Context<'_>) -> Poll<BodyEnd> {
        self.body = BodyStage::Polling;
        let polled = poll_as(&mut self.attempt, work, cx);
        self.body = BodyStage::Pending;
        polled.map(BodyEnd::Returned)
    }

    /// Whether the body may be polled. A shadow changes nothing.
    fn standing(&self, cx: &Context<'_>) -> Standing {
        let Attempt { store, lease, .. } = self.attempt();
        match self.enforced {
            true => store.heartbeats().standing(lease.owner, cx.waker()),
            false => Standing::Held,
        }
    }

    /// Writes how the body ended, once.
    fn write(&self) -> Option<StoreFuture<'_, Write>> {
        let Attempt { store, lease, .. } = self.attempt();
        self.on_drop.as_ref().map(|ending| ending::write(&**store, lease, ending))
    }

    /// What follows from the end of the body: whether its result is `Ok`, or why it has none.
    fn end_of(&mut self, ended: BodyEnd) -> Result<bool, Error> {
        let key = self.attempt().key();
        match ended {
            BodyEnd::Returned(is_ok) => Ok(is_ok),
            BodyEnd::LeaseLost => {
                tracing::warn!(%key, "the lease was lost; the body was cancelled");
                self.on_drop = None;
                Err(self.lost())
            }
            BodyEnd::TimedOut => {
                tracing::warn!(%key, "the body ran for longer than its `timeout` and was cancelled");
                // The error tells what the drop would tell again. The drop frees the key.
                self.on_uncertain = None;
                Err(self.timed_out())
            }
        }
    }

    /// How long the message waits before it is delivered again.
    fn pause(&self) -> Duration {
        let Attempt { lease, backoff, .. } = self.attempt();
        backoff.after(lease.attempt, lease.owner.seed())
    }

    fn lost(&self) -> Error {
        let Attempt { store, lease, .. } = self.attempt();
        let (key, store, attempt) = (lease.key.clone(), store.name(), lease.attempt);
        Error::LeaseLost { key, store, attempt, retry_after: self.pause() }
    }

    fn timed_out(&self) -> Error {
        let Attempt { store, lease, .. } = self.attempt();
        let (key, store, attempt) = (lease.key.clone(), store.name(), lease.attempt);
        Error::TimedOut { key, store, attempt, timeout: self.timeout, retry_after: self.pause() }
    }
}

/// Tells the user's hook of an operation in doubt.
fn tell(hook: Option<fn(Uncertain<'_>)>, uncertain: Uncertain<'_>) {
    let Some(hook) = hook else { return };
    if std::panic::catch_unwind(|| hook(uncertain)).is_err() {
        tracing::error!(key = %uncertain.key, "the hook `on_uncertain` panicked");
    }
}

/// Polls a body as `attempt`; the calls it makes are nobody else's to observe.
fn poll_as(attempt: &mut Option<Attempt>, work: Pin<&mut dyn Work>, cx: &mut Context<'_>) -> Poll<bool> {
    let mut nobody = None;
    let _observation = Observation::enter(&mut nobody);
    let _entered = Entered::enter(attempt);
    work.poll_body(cx)
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(Attempt { store, lease, reserved_at, .. }) = self.attempt.take() else { return };
        let begun = self.body != BodyStage::New;
        if begun && matches!(self.on_drop, Some(Ending::Release(_))) {
            let cause = if self.body == BodyStage::Polling { Doubt::Panicked } else { Doubt::Cancelled };
            let (key, attempt) = (&lease.key, lease.attempt);
            tell(self.on_uncertain, Uncertain { key, store: store.name(), attempt, cause });
        }
        let confirmed_at = match begun {
            true => store.heartbeats().deregister(lease.owner).unwrap_or(reserved_at),
            false => reserved_at,
        };
        if let Some(ending) = self.on_drop.take() {
            ending::write_late(store, lease, confirmed_at, ending);
        }
    }
}

/// Records how the body ended, and says whether that left a finished record, and with the result in it. The heartbeat
/// goes on meanwhile; the error says that nothing is recorded.
///
/// Not an `async fn`, for the reason given at [`begin`].
#[expect(clippy::manual_async_fn, reason = "see above")]
fn end(mut held: Held) -> impl Future<Output = Result<Option<bool>, Error>> {
    async move {
        // From here on an error of the caller's own makes nothing uncertain.
        held.on_uncertain = None;
        let written = match held.write() {
            Some(mut writing) => match writing.at_once() {
                Some(written) => Ok(written),
                None => {
                    let Attempt { store, lease, .. } = held.attempt();
                    store.heartbeats().body_returned(lease.owner);
                    writing.await
                }
            },
            None => Ok(Write::Done),
        };
        let ended = match written {
            Ok(written) => Ok(written),
            Err(error) => write_again(&mut held, error).await,
        };
        let stored = match (&ended, &held.on_drop) {
            (Ok(Write::Done), Some(ending)) => stored(held.attempt().key(), ending),
            _ => None,
        };
        // An error of a release is the one case where something is left to do: `Held` does it late.
        if ended.is_ok() || matches!(held.on_drop, Some(Ending::Finish(_))) {
            held.on_drop = None;
        }
        let Attempt { store, lease, reserved_at, .. } = held.attempt();
        match ended {
            Ok(Write::Done) => Ok(stored),
            Ok(Write::Refused) => {
                tracing::warn!(
                    key = %lease.key, store = store.name(), attempt = lease.attempt,
                    "the body ran to its end, and another attempt has the key; the result is not recorded"
                );
                Err(held.lost())
            }
            Err(error) if held.on_drop.is_some() => {
                // The caller gets the body's own error, and does not wait for its key to be freed.
                tracing::debug!(key = %lease.key, %error, "the key could not be freed yet; trying again late");
                Ok(None)
            }
            Err(source) => Err(Error::Unrecorded {
                key: lease.key.clone(),
                store: store.name(),
                attempt: lease.attempt,
                retry_after: store.heartbeats().may_be_held_for(lease, *reserved_at).max(held.pause()),
                source,
            }),
        }
    }
}

/// A release that failed is not for the caller to wait for; everything else is written while the lease can be held.
async fn write_again(held: &mut Held, error: StoreError) -> Result<Write, StoreError> {
    match held {
        // A shadow slows nobody down.
        Held {
            attempt: Some(Attempt { store, lease, reserved_at, .. }),
            on_drop: Some(ending),
            enforced: true,
            ..
        } if matches!(ending, Ending::Finish(_)) => {
            ending::write_again(&**store, lease, *reserved_at, ending, Err(error)).await
        }
        _ => Err(error),
    }
}

/// A body and its result, for those who need not know their types.
trait Work {
    /// Polls the body, keeps what it returned, and says whether that is `Ok`.
    fn poll_body(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<bool>;

    /// How an attempt ends whose body returned what is kept.
    fn ending(self: Pin<&mut Self>, max_result_bytes: usize) -> Ending;

    /// Drops the body.
    fn drop_body(self: Pin<&mut Self>);

    /// Keeps the result in a finished record, and says whether it is `Ok`.
    fn replay(self: Pin<&mut Self>, state: &State, on_undecodable: OnUndecodable) -> Result<bool, Unavailable>;

    /// Keeps `error` as the result.
    fn refuse(self: Pin<&mut Self>, error: Error);
}

pin_project! {
    struct Handled<B, R, T, E> {
        #[pin]
        body: Option<B>,
        kept: Kept<R, T, E>,
    }
}

// One for each handler: as little as there can be.
impl<B, R, T, E> Work for Handled<B, R, T, E>
where
    B: Future<Output = Result<T, E>>,
    R: Recorder<T, E>,
    E: From<Error>,
{
    fn poll_body(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<bool> {
        let this = self.project();
        let result = ready!(this.body.as_pin_mut().expect("present until it has ended").poll(cx));
        Poll::Ready(this.kept.keep(result))
    }

    fn ending(self: Pin<&mut Self>, max_result_bytes: usize) -> Ending {
        self.project().kept.ending(max_result_bytes)
    }

    fn drop_body(self: Pin<&mut Self>) {
        self.project().body.set(None);
    }

    fn replay(self: Pin<&mut Self>, state: &State, on_undecodable: OnUndecodable) -> Result<bool, Unavailable> {
        self.project().kept.replay(state, on_undecodable)
    }

    fn refuse(self: Pin<&mut Self>, error: Error) {
        self.project().kept.refuse(error);
    }
}

/// The result of a call, as soon as there is one. Handlers with the same types share its code.
struct Kept<R, T, E> {
    recorder: R,
    result: Option<Result<T, E>>,
}

impl<R: Recorder<T, E>, T, E: From<Error>> Kept<R, T, E> {
    fn keep(&mut self, result: Result<T, E>) -> bool {
        self.result.insert(result).is_ok()
    }

    fn ending(&self, max_result_bytes: usize) -> Ending {
        self.recorder.ending(self.result.as_ref().expect("kept by the last poll"), max_result_bytes)
    }

    fn replay(&mut self, state: &State, on_undecodable: OnUndecodable) -> Result<bool, Unavailable> {
        let result = self.recorder.replay(state, on_undecodable)?;
        Ok(self.keep(result))
    }

    fn refuse(&mut self, error: Error) {
        self.keep(Err(E::from(error)));
    }

    fn take(&mut self) -> Result<T, E> {
        self.result.take().expect("kept by the protocol")
    }
}

pin_project! {
    /// One call: the protocol, and what it is about.
    struct Run<P, B, R, T, E> {
        #[pin]
        protocol: P,
        #[pin]
        handled: Handled<B, R, T, E>,
    }
}

impl<P, B, R, T, E> Future for Run<P, B, R, T, E>
where
    P: Protocol,
    B: Future<Output = Result<T, E>>,
    R: Recorder<T, E>,
    E: From<Error>,
{
    type Output = Result<T, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        ready!(this.protocol.poll(this.handled.as_mut(), cx));
        Poll::Ready(this.handled.project().kept.take())
    }
}

/// What a call does with its [`Work`], until that has its result.
trait Protocol {
    fn poll(self: Pin<&mut Self>, work: Pin<&mut dyn Work>, cx: &mut Context<'_>) -> Poll<()>;
}

#[inline]
fn protocol(operation: Operation) -> impl Protocol {
    let Policy { max_result_bytes, on_uncertain, .. } = operation.policy;
    let pending_commit = !operation.store.heartbeats().renews();
    let outcome = Outcome { pending_commit, ..Outcome::UNKNOWN };
    // Made in its place: a call is large.
    Call { outcome, seat: None, max_result_bytes, on_uncertain, end, phase: Phase::Begin { begin: begin(operation) } }
}

pin_project! {
    struct Call<A, C> {
        #[pin]
        phase: Phase<A, C>,
        outcome: Outcome,
        seat: Seat,
        max_result_bytes: usize,
        on_uncertain: Option<fn(Uncertain<'_>)>,
        end: fn(Held) -> C,
    }
}

pin_project! {
    #[project = PhaseProjection]
    enum Phase<A, C> {
        Begin {
            #[pin]
            begin: A,
        },
        // With a reservation...
        Body {
            held: Option<Held>,
        },
        // ...and without.
        Unprotected {
            attempt: Option<Attempt>,
        },
        End {
            #[pin]
            end: C,
            is_ok: bool,
            enforced: bool,
        },
        Over,
    }
}

impl<A, C> Protocol for Call<A, C>
where
    A: Future<Output = (Begun, bool)>,
    C: Future<Output = Result<Option<bool>, Error>>,
{
    fn poll(mut self: Pin<&mut Self>, mut work: Pin<&mut dyn Work>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let mut this = self.as_mut().project();
            match this.phase.as_mut().project() {
                PhaseProjection::Begin { begin } => {
                    if this.outcome.stage == Stage::None {
                        this.outcome.stage = Stage::Reserving;
                        report(this.seat, || this.outcome.clone());
                    }
                    let (begun, waited) = ready!(begin.poll(cx));
                    this.outcome.waited = waited;
                    let phase = match begun {
                        Begun::Reserved(held) => {
                            this.outcome.key = Some(held.attempt().key().clone());
                            this.outcome.attempt = Some(held.attempt().number());
                            this.outcome.takeover = held.takeover;
                            this.outcome.disposition = Disposition::Retry { after: held.pause() };
                            Phase::Body { held: Some(held) }
                        }
                        Begun::Unprotected(attempt, suppressed) => {
                            this.outcome.key = attempt.as_ref().map(|attempt| attempt.key().clone());
                            this.outcome.suppressed = suppressed;
                            Phase::Unprotected { attempt }
                        }
                        Begun::Replay { key, store, record, on_undecodable } => {
                            match work.as_mut().replay(&record.state, on_undecodable) {
                                Ok(is_ok) => replayed(this.outcome, key, &record, is_ok),
                                Err(reason) => {
                                    let error = Error::ResultUnavailable { key, store, reason };
                                    refuse(this.outcome, work.as_mut(), error, *this.on_uncertain);
                                }
                            }
                            break;
                        }
                        Begun::Refused(error) => {
                            refuse(this.outcome, work.as_mut(), error, *this.on_uncertain);
                            break;
                        }
                    };
                    this.outcome.stage = Stage::Running;
                    this.outcome.executed = true;
                    report(this.seat, || this.outcome.clone());
                    this.phase.set(phase);
                }
                PhaseProjection::Unprotected { attempt } => {
                    let is_ok = ready!(poll_as(attempt, work.as_mut(), cx));
                    this.outcome.disposition = disposition(is_ok, this.outcome.disposition);
                    break;
                }
                PhaseProjection::Body { held } => {
                    let ended = ready!(held.as_mut().expect("taken at the end only").poll_body(work.as_mut(), cx));
                    let mut held = held.take().expect("polled just now");
                    let is_ok = match held.end_of(ended) {
                        Ok(is_ok) => is_ok,
                        Err(error) => {
                            work.as_mut().drop_body();
                            refuse(this.outcome, work.as_mut(), error, *this.on_uncertain);
                            break;
                        }
                    };
                    this.outcome.stage = Stage::Recording;
                    report(this.seat, || this.outcome.clone());
                    this.outcome.disposition = disposition(is_ok, this.outcome.disposition);
                    if is_ok {
                        // What happens if the encoding panics: the body has succeeded, so nobody else may run.
                        held.on_drop = Some(Ending::Finish(Finish::Completed(Payload::Unencodable)));
                    }
                    held.on_drop = Some(work.as_mut().ending(*this.max_result_bytes));
                    // The body's own variables may be large, and may hold what others wait for.
                    work.as_mut().drop_body();
                    let enforced = held.enforced;
                    this.phase.set(Phase::End { end: (this.end)(held), is_ok, enforced });
                }
                PhaseProjection::End { end, is_ok, enforced } => {
                    match ready!(end.poll(cx)) {
                        Ok(stored) => {
                            this.outcome.recorded = stored.is_some();
                            this.outcome.result_stored = stored == Some(true);
                            if !*is_ok && stored.is_some() {
                                this.outcome.disposition = Disposition::DeadLetter;
                            }
                        }
                        Err(error) if *enforced => {
                            refuse(this.outcome, work.as_mut(), error, *this.on_uncertain);
                        }
                        Err(error) => tracing::info!(%error, "shadow mode: the result is not recorded"),
                    }
                    break;
                }
                PhaseProjection::Over => unreachable!("polled after it was ready"),
            }
        }
        let mut this = self.project();
        this.phase.set(Phase::Over);
        work.drop_body();
        this.outcome.stage = Stage::Over;
        report(this.seat, || std::mem::replace(this.outcome, Outcome::UNKNOWN));
        Poll::Ready(())
    }
}

/// Whether `ending` writes a finished record, and with the result in it.
fn stored(key: &Key, ending: &Ending) -> Option<bool> {
    let Ending::Finish(finish) = ending else { return None };
    let payload = finish.payload();
    let stored = matches!(payload, Payload::Stored { .. });
    if !stored {
        tracing::warn!(%key, ?payload, "the completion is recorded without its result; duplicates can't replay it");
    }
    Some(stored)
}

fn replayed(outcome: &mut Outcome, key: Key, record: &Record, is_ok: bool) {
    outcome.replayed = true;
    outcome.recorded = true;
    outcome.result_stored = true;
    outcome.attempt = Some(record.attempt);
    outcome.disposition = if is_ok { Disposition::Ack } else { Disposition::DeadLetter };
    outcome.key = Some(key);
}

/// What to do with the message of a body whose result was not recorded, or not yet; `retry` if it returned an error.
fn disposition(is_ok: bool, retry: Disposition) -> Disposition {
    if is_ok { Disposition::Ack } else { retry }
}

fn refuse(outcome: &mut Outcome, work: Pin<&mut dyn Work>, error: Error, on_uncertain: Option<fn(Uncertain<'_>)>) {
    outcome.key = error.key().cloned();
    outcome.refused = Refusal::of(&error);
    outcome.recorded = matches!(error, Error::ResultUnavailable { .. });
    outcome.uncertain = error.is_uncertain();
    outcome.misconfigured = error.is_misconfigured();
    outcome.disposition = error.disposition();
    if let Some(uncertain) = error.uncertain() {
        tell(on_uncertain, uncertain);
    }
    work.refuse(error);
}
