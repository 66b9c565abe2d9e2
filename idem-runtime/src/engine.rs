//! The protocol: reserve, run with heartbeats, record, replay. The only file with this control flow.
//!
//! A call has three phases. [`begin`] reserves the key or finds out why not. The body then runs inside the caller's own
//! future. [`end`] records what it returned. [`Run`] strings them together by hand: an `async fn` that owns the body
//! would keep room for it twice, at every level of nested calls.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use serde::Serialize;

use crate::attempt::{self, Attempt, Entered};
use crate::clock::Instant;
use crate::ending::{self, Ending};
use crate::fingerprint::FingerprintError;
use crate::outcome::{Observation, report};
use crate::{
    Disposition, Error, Fingerprint, Finish, InProgress, Key, KeyError, KeyProblem, MissingKey, Mode, OnCrash,
    OnStoreError, OnUndecodable, Outcome, Payload, Policy, Record, Recorder, Refusal, Release, Reservation, Reserve,
    Store, StoreError, Write,
};

/// The pauses before a reservation that failed is tried again. Few: the broker delivers again anyway.
const RESERVE_PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(50)];
/// How long a duplicate waits before it asks again if its store can't wait for it.
const WAIT_FALLBACK: Duration = Duration::from_millis(100);

/// One call of an idempotent function: where, under which key, and how it is protected.
#[derive(Debug)]
pub struct Operation {
    store: Arc<dyn Store>,
    key: Result<Key, KeyError>,
    policy: Policy,
    fingerprint: Option<Result<Fingerprint, FingerprintError>>,
}

impl Operation {
    /// An operation named by `key` in `store`. A key that could not be built is reported when the operation is run.
    pub fn new<S: Store + ?Sized>(store: &S, key: Result<Key, KeyError>, policy: Policy) -> Self {
        Self { store: store.handle(), key, policy, fingerprint: None }
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
    let max_result_bytes = operation.policy.max_result_bytes;
    Run {
        phase: Phase::Begin { begin: begin(operation) },
        body: Some(body),
        outcome: Outcome::UNKNOWN,
        recorder,
        max_result_bytes,
        end,
        result: PhantomData,
    }
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
            Begun::Refused(error @ Error::Store { .. }) if policy.on_store_error == OnStoreError::Run => {
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

async fn admit(operation: &Operation, mode: Mode, waited: &mut bool) -> Begun {
    let Operation { store, key, policy, fingerprint } = operation;
    let key = match key {
        Ok(key) => key.clone(),
        Err(error) if error.problem == KeyProblem::Missing && policy.missing_key == MissingKey::Run => {
            return Begun::Unprotected(None, None);
        }
        Err(error) => return Begun::Refused(error.clone().into()),
    };
    if let Err(reason) = policy.check() {
        return Begun::Refused(Error::InvalidPolicy { key, reason });
    }
    let fingerprint = match fingerprint {
        Some(Err(source)) => return Begun::Refused(Error::InvalidFingerprint { key, source: source.clone() }),
        Some(Ok(fingerprint)) => Some(*fingerprint),
        None => None,
    };
    let name = store.name();
    let request = Reserve {
        key,
        owner: store.heartbeats().new_owner(),
        lease: policy.lease,
        ttl: policy.ttl,
        fingerprint,
        on_crash: policy.on_crash,
        max_attempts: policy.max_attempts,
    };
    let mut give_up_at = None;
    loop {
        let (reservation, asked_at) = match reserve(store, &request).await {
            Ok(answer) => answer,
            Err(source) => {
                return Begun::Refused(Error::Store { key: request.key, store: name, started: false, source });
            }
        };
        let key = &request.key;
        match reservation {
            Reservation::Reserved { lease, takeover } => {
                if takeover {
                    tracing::info!(%key, store = name, attempt = lease.attempt, "took over from a lapsed attempt");
                }
                let attempt = Attempt::new(Arc::clone(store), lease, asked_at);
                return Begun::Reserved(Held::new(attempt, takeover, mode == Mode::Enforce));
            }
            Reservation::Finished(record) => {
                let on_undecodable = policy.on_undecodable;
                return Begun::Replay { key: request.key, store: name, record, on_undecodable };
            }
            Reservation::Pending { attempt, lapses_in } => {
                let now = store.heartbeats().clock().now();
                let left = match policy.in_progress {
                    // A handler that waited for itself would wait in vain, and a shadow must not slow anybody down.
                    InProgress::Wait(limit) if mode == Mode::Enforce && !attempt::is_inside(key) => {
                        give_up_at.get_or_insert(now.saturating_add(limit)).saturating_since(now)
                    }
                    _ => Duration::ZERO,
                };
                if left.is_zero() {
                    let retry_after = lapses_in;
                    return Begun::Refused(Error::InProgress { key: request.key, store: name, attempt, retry_after });
                }
                *waited = true;
                if let Err(error) = store.wait(key, attempt, left.min(lapses_in)).await {
                    tracing::warn!(%key, store = name, %error, "can't wait for a running attempt; asking again");
                    store.heartbeats().clock().sleep(left.min(WAIT_FALLBACK)).await;
                }
            }
            Reservation::Mismatch { attempt } => {
                return Begun::Refused(Error::FingerprintMismatch { key: request.key, store: name, attempt });
            }
            Reservation::Interrupted { attempt } => {
                return Begun::Refused(Error::Interrupted { key: request.key, store: name, attempt });
            }
            Reservation::Exhausted { attempts } => {
                return Begun::Refused(Error::AttemptsExhausted { key: request.key, store: name, attempts });
            }
        }
    }
}

/// Reserves, and repeats that with the same owner token if the store fails: a reservation that landed is recognised.
async fn reserve(store: &Arc<dyn Store>, request: &Reserve) -> Result<(Reservation, Instant), StoreError> {
    let clock = store.heartbeats().clock();
    // The lease of a repeated reservation began at the earliest when the first one was sent.
    let asked_at = clock.now();
    let mut unanswered = Unanswered { store, request, asked_at, may_have_landed: true };
    let mut pauses = RESERVE_PAUSES.iter();
    let mut may_have_landed = false;
    loop {
        match store.reserve(request).await {
            Ok(reservation) => {
                unanswered.may_have_landed = false;
                return Ok((reservation, asked_at));
            }
            Err(error) => {
                may_have_landed |= error.may_have_landed();
                match pauses.next() {
                    Some(pause) if error.is_transient() => clock.sleep(*pause).await,
                    _ => {
                        unanswered.may_have_landed = may_have_landed;
                        return Err(error);
                    }
                }
            }
        }
    }
}

/// Releases a reservation that may have landed although its answer never arrived.
struct Unanswered<'a> {
    store: &'a Arc<dyn Store>,
    request: &'a Reserve,
    asked_at: Instant,
    may_have_landed: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.may_have_landed {
            let ending = Ending::Release(Release::NotStarted);
            ending::write_late(Arc::clone(self.store), self.request.unanswered(), self.asked_at, ending);
        }
    }
}

/// A reservation and what has to happen to it if the call ends here: dropped while the body runs, it releases the key
/// (or marks it interrupted); dropped while the result is being recorded, it records the result late.
struct Held {
    /// Empty only while the attempt is the current one of this thread.
    attempt: Option<Attempt>,
    registered: bool,
    takeover: bool,
    /// Whether a lost lease cancels the body.
    enforced: bool,
    on_drop: Option<Ending>,
}

impl Held {
    fn new(attempt: Attempt, takeover: bool, enforced: bool) -> Self {
        let release = match attempt.lease.on_crash {
            OnCrash::Retry => Release::Returned,
            OnCrash::Fail => Release::Interrupted,
        };
        let on_drop = Some(Ending::Release(release));
        Self { attempt: Some(attempt), registered: false, takeover, enforced, on_drop }
    }

    fn attempt(&self) -> &Attempt {
        self.attempt.as_ref().expect("swapped out only while the body is being polled")
    }

    /// Polls the body as this attempt, with a heartbeat from its first `Pending` on. `None` if the lease was lost.
    fn poll_body<B: Future>(&mut self, body: Pin<&mut B>, cx: &mut Context<'_>) -> Poll<Option<B::Output>> {
        if self.registered && !self.is_held(cx) && self.enforced {
            return Poll::Ready(None);
        }
        let polled = poll_as(&mut self.attempt, body, cx);
        if polled.is_pending() && !self.registered {
            self.registered = true;
            let Attempt { store, lease, reserved_at, .. } = self.attempt();
            store.heartbeats().register(&**store, lease, *reserved_at, cx.waker());
        }
        polled.map(Some)
    }

    fn is_held(&self, cx: &Context<'_>) -> bool {
        let Attempt { store, lease, .. } = self.attempt();
        store.heartbeats().is_held(&**store, lease.owner, cx.waker())
    }

    fn lost(&self) -> Error {
        let Attempt { store, lease, .. } = self.attempt();
        Error::LeaseLost { key: lease.key.clone(), store: store.name(), attempt: lease.attempt }
    }
}

/// Polls a body as `attempt`; the calls it makes are nobody else's to observe.
fn poll_as<B: Future>(attempt: &mut Option<Attempt>, body: Pin<&mut B>, cx: &mut Context<'_>) -> Poll<B::Output> {
    let mut nobody = None;
    let _observation = Observation::enter(&mut nobody);
    let _entered = Entered::enter(attempt);
    body.poll(cx)
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(Attempt { store, lease, reserved_at, .. }) = self.attempt.take() else { return };
        let confirmed_at = match self.registered {
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
        let ended = write_end(&mut held).await;
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
            Ok(Write::Refused) => Err(held.lost()),
            Err(error) if held.on_drop.is_some() => {
                // The caller gets the body's own error, and does not wait for its key to be freed.
                tracing::debug!(key = %lease.key, %error, "the key could not be freed yet; trying again late");
                Ok(None)
            }
            Err(source) => Err(Error::Unrecorded {
                key: lease.key.clone(),
                store: store.name(),
                attempt: lease.attempt,
                retry_after: store.heartbeats().lease_remaining(lease, *reserved_at),
                source,
            }),
        }
    }
}

async fn write_end(held: &mut Held) -> Result<Write, StoreError> {
    let Held { attempt: Some(Attempt { store, lease, reserved_at, .. }), on_drop: Some(ending), .. } = held else {
        return Ok(Write::Done);
    };
    match ending {
        Ending::Release(release) => store.release(lease, *release).await,
        Ending::Finish(_) => ending::write(&**store, lease, *reserved_at, ending).await,
    }
}

pin_project! {
    /// One call: its phases, and the body that they share.
    struct Run<A, B, C, R, T, E> {
        #[pin]
        phase: Phase<A, C, T, E>,
        #[pin]
        body: Option<B>,
        outcome: Outcome,
        recorder: R,
        max_result_bytes: usize,
        end: fn(Held) -> C,
        result: PhantomData<fn() -> Result<T, E>>,
    }
}

pin_project! {
    #[project = PhaseProjection]
    enum Phase<A, C, T, E> {
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
            result: Option<Result<T, E>>,
            enforced: bool,
        },
        Over,
    }
}

impl<A, B, C, R, T, E> Future for Run<A, B, C, R, T, E>
where
    A: Future<Output = (Begun, bool)>,
    B: Future<Output = Result<T, E>>,
    C: Future<Output = Result<Option<bool>, Error>>,
    R: Recorder<T, E>,
    E: From<Error>,
{
    type Output = Result<T, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = loop {
            let mut this = self.as_mut().project();
            match this.phase.as_mut().project() {
                PhaseProjection::Begin { begin } => {
                    let (begun, waited) = ready!(begin.poll(cx));
                    this.outcome.waited = waited;
                    let phase = match begun {
                        Begun::Reserved(held) => {
                            this.outcome.key = Some(held.attempt().key().clone());
                            this.outcome.attempt = Some(held.attempt().number());
                            this.outcome.takeover = held.takeover;
                            Phase::Body { held: Some(held) }
                        }
                        Begun::Unprotected(attempt, suppressed) => {
                            this.outcome.key = attempt.as_ref().map(|attempt| attempt.key().clone());
                            this.outcome.suppressed = suppressed;
                            Phase::Unprotected { attempt }
                        }
                        Begun::Replay { key, store, record, on_undecodable } => {
                            break replay(this.outcome, this.recorder, key, store, &record, on_undecodable);
                        }
                        Begun::Refused(error) => break refuse(this.outcome, error),
                    };
                    this.phase.set(phase);
                }
                PhaseProjection::Unprotected { attempt } => {
                    let body = this.body.as_mut().as_pin_mut().expect("present until it has ended");
                    let result = ready!(poll_as(attempt, body, cx));
                    this.outcome.executed = true;
                    this.outcome.disposition = disposition(&result);
                    break result;
                }
                PhaseProjection::Body { held } => {
                    let body = this.body.as_mut().as_pin_mut().expect("present until it has ended");
                    let polled = ready!(held.as_mut().expect("taken at the end only").poll_body(body, cx));
                    let mut held = held.take().expect("polled just now");
                    this.outcome.executed = true;
                    let Some(result) = polled else {
                        this.body.set(None);
                        held.on_drop = None;
                        tracing::warn!(key = %held.attempt().key(), "the lease was lost; the body was cancelled");
                        break refuse(this.outcome, held.lost());
                    };
                    this.outcome.disposition = disposition(&result);
                    if result.is_ok() {
                        // What happens if the encoding panics: the body has succeeded, so nobody else may run.
                        held.on_drop = Some(Ending::Finish(Finish::Completed(Payload::Unencodable)));
                    }
                    held.on_drop = Some(this.recorder.ending(&result, *this.max_result_bytes));
                    // The body's own variables may be large, and may hold what others wait for.
                    this.body.set(None);
                    let enforced = held.enforced;
                    this.phase.set(Phase::End { end: (this.end)(held), result: Some(result), enforced });
                }
                PhaseProjection::End { end, result, enforced } => {
                    let ended = ready!(end.poll(cx));
                    let result = result.take().expect("taken once");
                    match ended {
                        Ok(stored) => {
                            this.outcome.recorded = stored.is_some();
                            this.outcome.result_stored = stored == Some(true);
                            if result.is_err() && stored.is_some() {
                                this.outcome.disposition = Disposition::DeadLetter;
                            }
                            break result;
                        }
                        Err(error) if *enforced => break refuse(this.outcome, error),
                        Err(error) => {
                            tracing::info!(%error, "shadow mode: the result is not recorded");
                            break result;
                        }
                    }
                }
                PhaseProjection::Over => unreachable!("polled after it was ready"),
            }
        };
        let mut this = self.project();
        this.phase.set(Phase::Over);
        this.body.set(None);
        report(|| std::mem::replace(this.outcome, Outcome::UNKNOWN));
        Poll::Ready(result)
    }
}

/// Whether `ending` writes a finished record, and with the result in it.
fn stored(key: &Key, ending: &Ending) -> Option<bool> {
    let Ending::Finish(Finish::Completed(payload) | Finish::Failed(payload)) = ending else { return None };
    let stored = matches!(payload, Payload::Stored { .. });
    if !stored {
        tracing::warn!(%key, ?payload, "the completion is recorded without its result; duplicates can't replay it");
    }
    Some(stored)
}

fn replay<T, E: From<Error>, R: Recorder<T, E>>(
    outcome: &mut Outcome,
    recorder: &R,
    key: Key,
    store: &'static str,
    record: &Record,
    on_undecodable: OnUndecodable,
) -> Result<T, E> {
    match recorder.replay(&record.state, on_undecodable) {
        Ok(result) => {
            outcome.replayed = true;
            outcome.recorded = true;
            outcome.result_stored = true;
            outcome.attempt = Some(record.attempt);
            outcome.disposition = if result.is_ok() { Disposition::Ack } else { Disposition::DeadLetter };
            outcome.key = Some(key);
            result
        }
        Err(reason) => refuse(outcome, Error::ResultUnavailable { key, store, reason }),
    }
}

/// What to do with the message of a body whose result was not recorded, or not yet.
fn disposition<T, E>(result: &Result<T, E>) -> Disposition {
    match result {
        Ok(_) => Disposition::Ack,
        Err(_) => Disposition::Retry { after: None },
    }
}

fn refuse<T, E: From<Error>>(outcome: &mut Outcome, error: Error) -> Result<T, E> {
    outcome.key = error.key().cloned();
    outcome.refused = Refusal::of(&error);
    outcome.disposition = error.disposition();
    Err(E::from(error))
}
