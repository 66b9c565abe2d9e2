//! Writes that end an attempt: their repetition, and the late writes of dropped calls.

use std::sync::Arc;
use std::time::Duration;

use super::ending::AttemptEnd;
use crate::clock::Instant;
use crate::metrics::StoreOp;
use crate::policy::{Backoff, OnCrash};
use crate::record::{Lease, Release, Reservation, ReserveRequest, Verdict};
use crate::store::{FlushGuard, LateEndGuard, Store, StoreError, StoreErrorKind, StoreFuture};

/// First pause between two tries of a write. The pause doubles with each try, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Number of refusals, each after another renewal of the lease, that are blamed on the result. A store that fails twice
/// may renew a lease between its failures.
const REFUSALS: u32 = 2;

/// Writes the end of an attempt once.
pub(crate) fn write<'a>(store: &'a dyn Store, lease: &'a Lease, ending: &'a AttemptEnd) -> StoreFuture<'a, Verdict> {
    match ending {
        AttemptEnd::Finish(finish) => store.finish(lease, finish).watched(store, StoreOp::Finish),
        AttemptEnd::Release(release) => store.release(lease, *release).watched(store, StoreOp::Release),
    }
}

/// Returns whether the same write may succeed later: a failure of the store may pass, a problem with the record does
/// not.
pub(super) fn may_pass(error: &StoreError) -> bool {
    match error.kind() {
        StoreErrorKind::Unavailable
        | StoreErrorKind::Unconfirmed
        | StoreErrorKind::Full
        | StoreErrorKind::Misconfigured => true,
        StoreErrorKind::Corrupt | StoreErrorKind::TooLarge | StoreErrorKind::Unsupported | StoreErrorKind::Aborted => {
            false
        }
    }
}

/// Registers in the store handle that this process writes the end of an attempt of the key even after the lease has
/// lapsed. Returns `None` if this process gives up that write when the lease lapses.
pub(super) fn ends_late(store: &Arc<dyn Store>, lease: &Lease) -> Option<LateEndGuard> {
    outlasts_lease(lease).then(|| store.context().ends_late(&lease.key))
}

/// Tries of a write and the pauses between them. The tries continue while the lease may be held, for one lease at most;
/// some late writes continue for the retention of the record.
pub(super) struct Tries<'a> {
    store: &'a dyn Store,
    lease: &'a Lease,
    confirmed_at: Instant,
    began: Instant,
    pause: Duration,
    /// Number of tries that failed, each after another renewal of the lease.
    refusals: u32,
    /// Time of the renewal before the last such try; of the first try, if there is none.
    counted: Instant,
    /// Set if the write is repeated after the lapse of the lease, while the process lives and the record is retained.
    outlasts: Option<LateEndGuard>,
    /// Keeps `flush` waiting until the lease has lapsed. `None` after that lapse, and for a write that its call awaits.
    under_way: Option<FlushGuard>,
}

impl<'a> Tries<'a> {
    pub(super) fn new(store: &'a dyn Store, lease: &'a Lease, confirmed_at: Instant) -> Self {
        Self::since(store.context().clock().now(), store, lease, confirmed_at)
    }

    /// Makes tries of which the first was made at `began`.
    pub(super) fn since(began: Instant, store: &'a dyn Store, lease: &'a Lease, confirmed_at: Instant) -> Self {
        let (pause, refusals, counted) = (FIRST_PAUSE, 0, began);
        Self { store, lease, confirmed_at, began, pause, refusals, counted, outlasts: None, under_way: None }
    }

    /// Converts these tries into the tries of a late write, for which no call waits.
    pub(super) fn late(self, under_way: FlushGuard, outlasts: Option<LateEndGuard>) -> Self {
        Self { outlasts, under_way: Some(under_way), ..self }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.store.context().clock().now().saturating_since(self.began)
    }

    /// Tries `ending` once, and counts a failure if it follows another renewal than those before.
    async fn write(&mut self, ending: &AttemptEnd) -> Result<Verdict, StoreError> {
        let renewed_at = self.store.context().leases().confirmed_at(self.lease.owner);
        let written = write(self.store, self.lease, ending).await;
        if let (Err(_), Some(renewed_at)) = (&written, renewed_at.filter(|renewed_at| *renewed_at > self.counted)) {
            (self.refusals, self.counted) = (self.refusals + 1, renewed_at);
        }
        written
    }

    /// Waits for the next try; returns false if the tries are over. A write is tried for one lease at most: otherwise a
    /// store that renews leases but accepts no results would keep the call forever.
    pub(super) async fn again(&mut self) -> bool {
        let context = self.store.context();
        let held = context.leases().may_be_held_for(self.lease, self.confirmed_at);
        let left = held.min(self.lease.duration.saturating_sub(self.elapsed()));
        let pause = match left.is_zero() {
            false => self.pause.min(left),
            true if self.outlasts.is_some() && context.writes_late() && self.elapsed() < self.lease.ttl => {
                self.under_way = None;
                // The pause is random, so that the ends of all attempts in an outage do not reach the store together.
                Backoff::new(self.pause, self.pause).after(1, self.lease.owner.seed())
            }
            true => return false,
        };
        context.clock().sleep(pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        true
    }
}

/// Repeats `ending`, whose first write returned `written`, for one lease at most and while the lease can be held. Every
/// write is safe to repeat with its owner token. `ending` loses its result if the store can't hold the result, or if
/// the store refuses the result for half a lease, and after each of two renewals of the lease.
pub(super) async fn write_again(
    mut tries: Tries<'_>,
    ending: &mut AttemptEnd,
    mut written: Result<Verdict, StoreError>,
) -> Result<Verdict, StoreError> {
    let Tries { store, lease, .. } = tries;
    loop {
        let Err(error) = written else { return written };
        let too_large = error.kind() == StoreErrorKind::TooLarge;
        // The result is given up only if the store renews leases: a store that accepts no write at all may accept the
        // result after the outage.
        let too_long = tries.refusals >= REFUSALS && may_pass(&error) && tries.elapsed() >= lease.duration / 2;
        written = Err(error);
        if (too_large || too_long)
            && let Some(mut without_result) = ending.without_result()
        {
            let mut shortened = write(store, lease, &without_result).await;
            // Without its journal, a result may still be what the store does not accept.
            while let Err(error) = &shortened
                && (too_long || error.kind() == StoreErrorKind::TooLarge)
                && let Some(next) = without_result.without_result()
            {
                shortened = write(store, lease, &next).await;
                without_result = next;
            }
            // A refused release may mean that an earlier `finish` took effect and only its answer was lost. So the
            // `finish` is repeated.
            let settled = matches!(shortened, Ok(Verdict::Applied)) || matches!(without_result, AttemptEnd::Finish(_));
            if too_large || (shortened.is_ok() && settled) {
                *ending = without_result;
                written = shortened;
                continue;
            }
        }
        if !matches!(&written, Err(error) if may_pass(error)) || !tries.again().await {
            return written;
        }
        written = tries.write(ending).await;
    }
}

/// State of a call whose end is written late, for log lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LateEndState {
    /// The call was dropped before its body started.
    NotStarted,
    /// The call was dropped while its body ran.
    Cancelled,
    /// The body panicked.
    Panicked,
    /// The body was cancelled at its time limit; the caller has the error.
    TimedOut,
    /// The body was cancelled because its lease could not be renewed; the caller has the error.
    Unrenewed,
    /// The body returned an error to the caller, and the key could not be freed at that time.
    Returned,
    /// The body returned, and the call was dropped while its result was being recorded.
    Recording,
}

impl LateEndState {
    fn what_happened(self) -> &'static str {
        match self {
            Self::NotStarted => "the call was dropped before its body ran",
            Self::Cancelled => "the call was dropped while its body ran",
            Self::Panicked => "the body panicked",
            Self::TimedOut => "the body ran for longer than its `timeout` and was cancelled",
            Self::Unrenewed => "the lease of the body could not be renewed, and the body was cancelled",
            Self::Returned => "the body returned an error, and its caller has it",
            Self::Recording => "the body returned, and the call was dropped while that was being recorded",
        }
    }
}

/// Writes `ending` for a call that no longer exists: immediately if the store can, otherwise by
/// [`Clock::spawn`](crate::clock::Clock::spawn).
///
/// `ends_late` is the value of the function [`ends_late`]. The guard is made before the lease is deregistered, so that
/// a duplicate finds the lease or the guard at any time.
pub(crate) fn write_late(
    store: Arc<dyn Store>,
    lease: Lease,
    confirmed_at: Instant,
    mut ending: AttemptEnd,
    late: LateEndState,
    ends_late: Option<LateEndGuard>,
) {
    // In an open transaction nothing is written late, because the commit or the rollback decides about the record.
    if !store.context().writes_late() || write(&*store, &lease, &ending).at_once().is_some() {
        return;
    }
    let under_way = store.context().late_writes().under_way();
    let clock = Arc::clone(&store);
    clock.context().clock().spawn(Box::pin(async move {
        let store = store.upkeep();
        let tries = Tries::new(&*store, &lease, confirmed_at).late(under_way, ends_late);
        let written = write(&*store, &lease, &ending).await;
        let written = write_again(tries, &mut ending, written).await;
        log_late(store.context().name(), &lease, &ending, late.what_happened(), &written);
    }));
}

/// Logs the result of a late write. The event names the key, because the span of the call has ended.
fn log_late(
    store: &'static str,
    lease: &Lease,
    ending: &AttemptEnd,
    call: &'static str,
    written: &Result<Verdict, StoreError>,
) {
    let Lease { key, attempt, .. } = lease;
    match (written, ending) {
        (Ok(Verdict::Applied), AttemptEnd::Finish(_)) => {
            tracing::debug!(parent: None, %key, store, attempt, call, "the result is recorded, late");
        }
        (Ok(Verdict::Applied), AttemptEnd::Release(Release::Interrupted)) => tracing::debug!(
            parent: None, %key, store, attempt, call, "the operation is marked as interrupted, late"
        ),
        (Ok(Verdict::Applied), AttemptEnd::Release(_)) => {
            tracing::debug!(parent: None, %key, store, attempt, call, "the key is free, late");
        }
        (Ok(Verdict::Refused), AttemptEnd::Finish(_)) => tracing::error!(
            parent: None, %key, store, attempt, call,
            "the result is not recorded: another attempt has taken over, or the record was removed; the operation may happen twice: \
             `idem show KEY`"
        ),
        (Ok(Verdict::Refused), AttemptEnd::Release(_)) => tracing::warn!(
            parent: None, %key, store, attempt, call, "nothing is written: another attempt has taken over, or the record was removed"
        ),
        (Err(error), AttemptEnd::Finish(_)) => tracing::error!(
            parent: None, %key, store, attempt, call, %error,
            "the result could not be recorded; once the lease has lapsed, another attempt may run, unless `idem resolve` records \
             the end before"
        ),
        (Err(error), AttemptEnd::Release(Release::Interrupted)) => tracing::error!(
            parent: None, %key, store, attempt, call, %error,
            "the operation could not be marked as interrupted; once the lease has lapsed, it counts as that"
        ),
        // A debug event, because the only harm is a delay, and an outage may cause many such events.
        (Err(error), AttemptEnd::Release(_)) => tracing::debug!(
            parent: None, %key, store, attempt, call, %error, "the key could not be freed; it is held until its lease lapses"
        ),
    }
}

/// Frees a key that the request of a dropped call may have reserved, or may still reserve.
///
/// A release alone could arrive before the reservation, which would then hold the key without a body. So the key is
/// reserved once more with the same owner token, and then released. After that the late request can't succeed: an
/// insert finds a record, and a replacement names a record that has been replaced.
///
/// If the late reservation takes effect after the clean-up has given up, its lease lapses without a body: the key is
/// held for one lease, the attempt is not counted, and the key is not interrupted. If the record may be marked as begun
/// (`may_be_marked`), the attempt would be counted and the key interrupted, so the clean-up is then repeated after the
/// lease too.
pub(crate) fn clean_up_late(store: &Arc<dyn Store>, request: &ReserveRequest, may_be_marked: bool) {
    if !store.context().writes_late() {
        return;
    }
    let mut request = request.clone();
    if may_be_marked {
        // Another attempt may have taken over by now, and left a doubt. This request must not be granted that
        // operation: a release of the dropped call, which is still under way, would then end the doubt.
        request.max_reconciliations = None;
    }
    if let Some(reservation) = store.reserve(&request).watched(store, StoreOp::Reserve).at_once() {
        if let Reservation::Granted { lease, in_doubt, .. } = reservation {
            let ending = AttemptEnd::Release(unused(in_doubt));
            let now = store.context().clock().now();
            let ends_late = ends_late(store, &lease);
            write_late(Arc::clone(store), lease, now, ending, LateEndState::NotStarted, ends_late);
        }
        return;
    }
    let under_way = store.context().late_writes().under_way();
    let ends_late = may_be_marked.then(|| store.context().ends_late(&request.key));
    let upkeep = Arc::clone(store);
    store.context().clock().spawn(Box::pin(async move {
        let store = upkeep.upkeep();
        let (key, name) = (&request.key, store.context().name());
        let asked_at = store.context().clock().now();
        let unanswered = Lease::unanswered(&request);
        let tries = Tries::new(&*store, &unanswered, asked_at).late(under_way, ends_late);
        match clean_up(tries, &request).await {
            Ok(()) => tracing::debug!(
                parent: None, %key, store = name, "the reservation of a call that was dropped before its body is cleaned up"
            ),
            // A debug event, because the only harm is a delay, and an outage may cause many such events.
            Err(error) => tracing::debug!(
                parent: None, %key, store = name, %error,
                "a call was dropped while reserving its key, and the store does not say whether the key is reserved; \
                 the body did not run; if the key is reserved, its lease lapses"
            ),
        }
    }));
}

pub(super) fn free<'a>(store: &'a dyn Store, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
    release(store, lease, Release::NotStarted)
}

fn release<'a>(store: &'a dyn Store, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
    store.release(lease, release).watched(store, StoreOp::Release)
}

/// Returns the end of a reservation whose call was dropped before its body. If the effect of an earlier attempt is in
/// doubt, it stays in doubt.
fn unused(in_doubt: bool) -> Release {
    if in_doubt { Release::Unresolved } else { Release::NotStarted }
}

async fn clean_up(mut tries: Tries<'_>, request: &ReserveRequest) -> Result<(), StoreError> {
    let Tries { store, lease: unanswered, .. } = tries;
    loop {
        let freed = match store.reserve(request).watched(store, StoreOp::Reserve).await {
            Ok(Reservation::Granted { lease, in_doubt, .. }) => {
                match release(store, &lease, unused(in_doubt)).await {
                    Ok(Verdict::Applied) => Ok(()),
                    // Another attempt took over between the reservation and the release.
                    Ok(Verdict::Refused) => {
                        Err(StoreError::new(StoreErrorKind::Unavailable, "taken over before its release"))
                    }
                    Err(error) => Err(error),
                }
            }
            // The call's reservation is released already, or another attempt has written the record. The late request
            // can't replace a record that is newer than itself.
            Ok(_) => Ok(()),
            // The reservation of this clean-up may have taken effect, so it is released. A caller with a reconciler may
            // have got the key of an operation in doubt: without an answer, only the lapse of the lease keeps the
            // doubt.
            Err(error) if error.may_have_landed() && request.max_reconciliations.is_none() => {
                match free(store, unanswered).await {
                    Ok(Verdict::Applied) => Ok(()),
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        };
        match freed {
            Err(error) if may_pass(&error) => {
                if !tries.again().await {
                    return Err(error);
                }
            }
            freed => return freed,
        }
    }
}

/// Returns whether the end of this attempt must be written even after its lease. Under `on_crash = fail` a body that
/// has begun blocks all other attempts until its end is written, or an operator decides.
pub(super) fn outlasts_lease(lease: &Lease) -> bool {
    lease.on_crash == OnCrash::Fail
}
