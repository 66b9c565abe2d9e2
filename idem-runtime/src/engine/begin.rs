//! The beginning of a call: its key is reserved, or the reason is found why its body is not to run.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::Operation;
use super::attempt::{self, Attempt};
use super::end;
use super::held::HeldAttempt;
use super::outcome::Refusal;
use crate::clock::{Clock, Instant};
use crate::error::{Error, Mismatch};
use crate::key::{Key, KeyError, KeyProblem};
use crate::policy::{InProgress, MissingKey, Mode, OnStoreError, OnUndecodable};
use crate::record::{Lease, Record, Reservation, ReserveRequest, Verdict};
use crate::store::{Store, StoreError, StoreErrorKind, StoreFuture, renew_all};

/// The pauses before a reservation that failed is tried again. Few: the broker delivers again anyway.
const RESERVE_PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(50)];
/// How long a duplicate waits before it asks again if its store can't wait for it.
const WAIT_FALLBACK: Duration = Duration::from_millis(100);
/// How many owner tokens a call draws. It needs a second one where a clean-up was faster than its late request.
const TOKENS: u8 = 3;

/// How a call begins.
pub(super) struct Beginning {
    pub(super) start: Start,
    /// Whether the call waited for another attempt.
    pub(super) waited: bool,
}

/// What a call does with its body.
pub(super) enum Start {
    /// The key is reserved: run the body and record what it returns.
    Reserved(HeldAttempt),
    /// Run the body without a reservation. The attempt is for [`current`](crate::current) only.
    Unprotected {
        attempt: Option<Attempt>,
        /// What the call would have been refused for.
        bypassed: Option<Refusal>,
    },
    /// Return what is recorded.
    Replay { key: Key, store: &'static str, record: Record, on_undecodable: OnUndecodable },
    /// Return this error; the body does not run.
    Refused(Error),
}

/// Reserves the key of `operation`, or finds out why its body is not to run.
///
/// Not an `async fn`: that stores its argument twice, which doubles every enclosing future.
#[expect(clippy::manual_async_fn, reason = "see above")]
pub(super) fn begin(operation: Operation) -> impl Future<Output = Beginning> {
    async move {
        let Operation { store, policy, key, .. } = &operation;
        let unprotected = |key: Option<&Key>, bypassed| {
            let attempt = key.map(|key| Attempt::unprotected(Arc::clone(store), key.clone(), policy));
            Start::Unprotected { attempt, bypassed }
        };
        let mode = policy.current_mode();
        if mode == Mode::Off {
            return Beginning { start: unprotected(key.as_ref().ok(), None), waited: false };
        }
        let Beginning { start, waited } = admit(&operation, mode).await;
        let start = match start {
            Start::Refused(error) if policy.on_store_error == OnStoreError::Run && is_no_answer(&error) => {
                tracing::warn!(%error, "the body runs unprotected");
                unprotected(error.key(), Some(Refusal::Store))
            }
            Start::Refused(error) if mode == Mode::Shadow => {
                tracing::info!(%error, "shadow mode: would have been refused");
                unprotected(error.key(), Refusal::of(&error))
            }
            Start::Replay { key, store, record, .. } if mode == Mode::Shadow => {
                tracing::info!(%key, store, attempt = record.attempt, "shadow mode: would have been replayed");
                unprotected(Some(&key), Some(Refusal::Replay))
            }
            start => start,
        };
        Beginning { start, waited }
    }
}

/// Whether the store did not answer. A record that can't be read is an answer: its operation may have finished.
fn is_no_answer(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. } if source.kind() != StoreErrorKind::Corrupt)
}

/// Asks for the key until it is decided what to do, and waits in between if the policy says so.
async fn admit(operation: &Operation, mode: Mode) -> Beginning {
    let mut waited = false;
    let mut request = match Request::new(operation, mode) {
        Ok(request) => request,
        Err(start) => return Beginning { start: *start, waited },
    };
    let mut give_up_at = None;
    loop {
        let running = match request.ask().await {
            Step::Decided(start) => return Beginning { start, waited },
            Step::AskAgain => continue,
            Step::Running(running) => running,
        };
        let left = request.may_wait(&mut give_up_at);
        if left.is_zero() {
            return Beginning { start: Start::Refused(request.in_progress(running)), waited };
        }
        waited = true;
        request.wait(running, left).await;
    }
}

/// What follows from the answer to a request.
#[expect(clippy::large_enum_variant, reason = "it lives for a moment; a box would cost each call an allocation")]
enum Step {
    Decided(Start),
    /// The answer decides nothing: ask again at once.
    AskAgain,
    Running(Running),
}

/// An attempt that holds the key.
#[derive(Clone, Copy)]
struct Running {
    attempt: u32,
    lapses_in: Duration,
}

/// What a reservation that took a while is worth.
enum Timeliness {
    /// It counts. (An error counts too.)
    InTime(Result<Reservation, StoreError>),
    /// It grants a lease that is over already: somebody else may have run meanwhile.
    TooLate { lease: Lease, takeover: bool },
}

/// The request of a call for its key, and what became of it so far.
struct Request<'a> {
    operation: &'a Operation,
    mode: Mode,
    reserve: ReserveRequest,
    /// When the earliest request of this owner was sent that got no answer. It may have taken effect, or may still.
    unanswered_since: Option<Instant>,
    /// How many owner tokens the call has drawn.
    tokens: u8,
}

impl<'a> Request<'a> {
    /// Checks key, policy and fingerprint. The `Err` is boxed: it is large and rare.
    fn new(operation: &'a Operation, mode: Mode) -> Result<Self, Box<Start>> {
        let refuse = |error| Err(Box::new(Start::Refused(error)));
        let Operation { store, key, policy, fingerprint } = operation;
        let key = match key {
            Ok(key) => key.clone(),
            Err(error) if error.problem == KeyProblem::Missing && policy.missing_key == MissingKey::Run => {
                return Err(Box::new(Start::Unprotected { attempt: None, bypassed: None }));
            }
            Err(error) => return refuse(KeyError::clone(error).into()),
        };
        if let Err(reason) = policy.check() {
            return refuse(Error::InvalidPolicy { key, problem: reason });
        }
        if let Err(reason) = policy.check_with(store)
            && store.heartbeats().warns_now()
        {
            tracing::warn!(%key, store = store.name(), "{reason}");
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
            owner: store.heartbeats().new_owner(),
            lease: policy.lease,
            ttl: policy.ttl,
            fingerprint,
            on_crash: policy.on_crash,
            max_attempts: policy.max_attempts,
        };
        Ok(Self { operation, mode, reserve, unanswered_since: None, tokens: 1 })
    }

    fn store(&self) -> &'a Arc<dyn Store> {
        &self.operation.store
    }

    fn clock(&self) -> &'a dyn Clock {
        self.store().heartbeats().clock()
    }

    /// Asks the store for the key.
    async fn ask(&mut self) -> Step {
        let now = self.clock().now();
        // The lease of a repeated reservation began at the earliest when its first request was sent.
        let mut asked_at = self.unanswered_since.unwrap_or(now);
        let mut asking = self.store().reserve(&self.reserve);
        let (answer, since) = match asking.at_once() {
            Some(answer) => (Ok(answer), self.unanswered_since),
            None => {
                let reply = send(self.store(), &self.reserve, &mut asking, self.unanswered_since.is_some()).await;
                if reply.unanswered {
                    self.unanswered_since = Some(asked_at);
                }
                (reply.answer, Some(asked_at))
            }
        };
        drop(asking);
        let reservation = match timeliness(answer, self.clock(), since) {
            Timeliness::InTime(reservation) => reservation,
            // Boxed: it is rare, and every call would carry its size inline.
            Timeliness::TooLate { lease, takeover } => {
                match Box::pin(confirm(self.store(), &self.reserve, lease, takeover)).await {
                    Ok(Confirmation::Held { reservation, since }) => {
                        asked_at = since;
                        Ok(reservation)
                    }
                    Ok(Confirmation::Lost) => return Step::AskAgain,
                    Err(error) => Err(error),
                }
            }
        };
        match reservation {
            Ok(Reservation::Released { .. }) if self.tokens < TOKENS => {
                self.reserve.owner = self.store().heartbeats().new_owner();
                (self.tokens, self.unanswered_since) = (self.tokens + 1, None);
                Step::AskAgain
            }
            Ok(Reservation::Released { .. }) => Step::Decided(self.no_answer(tokens_repeat())),
            Ok(Reservation::FingerprintMismatch { attempt }) => {
                Step::Decided(Start::Refused(Box::pin(mismatch(self.store(), &self.reserve, attempt)).await))
            }
            Ok(reservation) => self.decide(reservation, asked_at),
            Err(error) => Step::Decided(self.no_answer(error)),
        }
    }

    /// What follows from a reservation.
    fn decide(&self, reservation: Reservation, asked_at: Instant) -> Step {
        let Operation { store, policy, .. } = self.operation;
        let (key, name) = (&self.reserve.key, store.name());
        store.heartbeats().store_answered();
        Step::Decided(match reservation {
            Reservation::Finished(record) => {
                Start::Replay { key: key.clone(), store: name, record, on_undecodable: policy.on_undecodable }
            }
            Reservation::Granted { lease, takeover } => {
                if takeover {
                    tracing::info!(%key, store = name, attempt = lease.attempt, "took over from a lapsed attempt");
                }
                let attempt = Attempt::new(Arc::clone(store), lease, asked_at, policy.backoff);
                Start::Reserved(HeldAttempt::new(attempt, takeover, self.mode == Mode::Enforce, policy))
            }
            Reservation::InProgress { attempt, lapses_in } => return Step::Running(Running { attempt, lapses_in }),
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

    /// What follows where the store has no answer.
    fn no_answer(&self, source: StoreError) -> Start {
        let Operation { store, policy, .. } = self.operation;
        let seed = self.reserve.owner.seed();
        let retry_after = match source.kind() {
            // Whoever mends it takes minutes.
            StoreErrorKind::Corrupt => policy.backoff.after(8, seed),
            _ => policy.backoff.during(store.heartbeats().store_failed(), seed),
        };
        let key = self.reserve.key.clone();
        Start::Refused(Error::Store { key, store: store.name(), started: false, retry_after, source })
    }

    /// How much longer the call may wait for another attempt, since it first met one.
    fn may_wait(&self, give_up_at: &mut Option<Instant>) -> Duration {
        let now = self.clock().now();
        match self.operation.policy.in_progress {
            // A handler that waited for itself would wait in vain, and a shadow must not slow anybody down.
            InProgress::Wait(limit) if self.mode == Mode::Enforce && !attempt::is_inside(&self.reserve.key) => {
                give_up_at.get_or_insert(now.saturating_add(limit)).saturating_since(now)
            }
            _ => Duration::ZERO,
        }
    }

    fn in_progress(&self, running: Running) -> Error {
        let Running { attempt, lapses_in } = running;
        let key = self.reserve.key.clone();
        Error::InProgress { key, store: self.store().name(), attempt, retry_after: lapses_in }
    }

    /// Waits until the running attempt may have ended, for `left` at most.
    async fn wait(&self, running: Running, left: Duration) {
        let (store, key) = (self.store(), &self.reserve.key);
        // A request of ours that got no answer may land while we wait.
        let may_have_landed = self.unanswered_since.is_some();
        let mut unanswered = Unanswered { store, request: &self.reserve, may_have_landed };
        if let Err(error) = store.wait(key, running.attempt, left.min(running.lapses_in)).await {
            tracing::warn!(%key, store = store.name(), %error, "can't wait for a running attempt; asking again");
            self.clock().sleep(left.min(WAIT_FALLBACK)).await;
        }
        unanswered.may_have_landed = false;
    }
}

fn tokens_repeat() -> StoreError {
    let message = "says of new owner tokens that they were released before: the randomness of this system repeats";
    StoreError::new(StoreErrorKind::Corrupt, message)
}

/// The error for a key that was used with another payload. The record is asked for once more, for the error's sake.
async fn mismatch(store: &Arc<dyn Store>, request: &ReserveRequest, attempt: u32) -> Error {
    let inspection = store.inspect(&request.key).await.ok().flatten();
    let recorded = inspection.as_ref().and_then(|found| found.record.fingerprint);
    let age = inspection.map(|found| found.record.retention(request.ttl).saturating_sub(found.expires_in));
    let payloads = Box::new(Mismatch { presented: request.fingerprint, recorded, age });
    Error::FingerprintMismatch { key: request.key.clone(), store: store.name(), attempt, payloads }
}

/// What became of a request.
struct Reply {
    answer: Result<Reservation, StoreError>,
    /// Whether one of its tries may have landed, although it got no answer.
    unanswered: bool,
}

/// Awaits `asking`, and repeats the request with the same owner token if the store fails: a try that landed is recognised.
/// `may_have_landed` says so of the tries before.
async fn send<'a>(
    store: &'a Arc<dyn Store>,
    request: &'a ReserveRequest,
    asking: &mut StoreFuture<'a, Reservation>,
    mut may_have_landed: bool,
) -> Reply {
    let mut guard = Unanswered { store, request, may_have_landed: true };
    let mut pauses = RESERVE_PAUSES.iter();
    let mut unanswered = false;
    loop {
        match (&mut *asking).await {
            Ok(reservation) => {
                guard.may_have_landed = false;
                return Reply { answer: Ok(reservation), unanswered };
            }
            Err(error) => {
                unanswered |= error.may_have_landed();
                may_have_landed |= unanswered;
                match pauses.next() {
                    Some(pause) if error.is_transient() => store.heartbeats().clock().sleep(*pause).await,
                    _ => {
                        guard.may_have_landed = may_have_landed;
                        return Reply { answer: Err(error), unanswered };
                    }
                }
            }
        }
        *asking = store.reserve(request);
    }
}

/// Whether an answer still counts that was first asked for `since` (`None`: just now).
fn timeliness(answer: Result<Reservation, StoreError>, clock: &dyn Clock, since: Option<Instant>) -> Timeliness {
    match answer {
        Ok(Reservation::Granted { lease, takeover })
            if since.is_some_and(|since| clock.now() >= since.saturating_add(lease.duration)) =>
        {
            Timeliness::TooLate { lease, takeover }
        }
        answer => Timeliness::InTime(answer),
    }
}

/// What became of a lease that was over before its body could start.
enum Confirmation {
    /// It is held again since then.
    Held {
        reservation: Reservation,
        since: Instant,
    },
    Lost,
}

/// Renews a lease that has lapsed before its body could start. If the renewal fails, the reservation is released.
async fn confirm(
    store: &Arc<dyn Store>,
    request: &ReserveRequest,
    lease: Lease,
    takeover: bool,
) -> Result<Confirmation, StoreError> {
    let clock = store.heartbeats().clock();
    let mut unused = Unanswered { store, request, may_have_landed: true };
    loop {
        let since = clock.now();
        let answers = renew_all(store, std::slice::from_ref(&lease)).await?;
        let Some(answer) = answers.first().copied() else {
            return Err(StoreError::new(StoreErrorKind::Unconfirmed, "the store answered for no lease"));
        };
        if answer == Verdict::Refused {
            unused.may_have_landed = false;
            return Ok(Confirmation::Lost);
        }
        if clock.now() < since.saturating_add(lease.duration) {
            unused.may_have_landed = false;
            return Ok(Confirmation::Held { reservation: Reservation::Granted { lease, takeover }, since });
        }
    }
}

/// Frees the key if a reservation may have landed, or may still land, although nobody waits for its answer any more.
struct Unanswered<'a> {
    store: &'a Arc<dyn Store>,
    request: &'a ReserveRequest,
    may_have_landed: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.may_have_landed {
            end::clean_up_late(self.store, self.request);
        }
    }
}
