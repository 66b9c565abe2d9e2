//! The end of an attempt: the last write to its record, in its call, or late if the call is gone.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::attempt::Attempt;
use super::held::HeldAttempt;
use crate::clock::Instant;
use crate::error::Error;
use crate::key::Key;
use crate::record::{Finish, Lease, Release, Reservation, ReserveRequest, StoredResult, Verdict};
use crate::store::{Store, StoreError, StoreErrorKind, StoreFuture};

/// The first pause between two tries of a write; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How an attempt ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ending {
    /// With a result, or with the knowledge that there was one.
    Finish(Finish),
    /// Without one.
    Release(Release),
}

impl Ending {
    /// What is written if the store can't hold the result; `None` if there is no result to leave out.
    fn without_result(&self) -> Option<Self> {
        match self {
            Self::Finish(Finish::Completed(StoredResult::Encoded { bytes, .. })) => {
                Some(Self::Finish(Finish::Completed(StoredResult::TooLarge { size: bytes.len() as u64 })))
            }
            // An error that can't be replayed is not worth ending the operation for.
            Self::Finish(Finish::Failed(StoredResult::Encoded { .. })) => Some(Self::Release(Release::Returned)),
            _ => None,
        }
    }
}

/// What a record knows of the run that ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RecordContent {
    /// The result: duplicates replay it.
    Result,
    /// That the operation is completed, but not its result.
    Completion,
    /// Nothing: the key is free, or the attempt left it to another.
    Nothing,
}

/// Writes how the body ended, and says what the record knows of it. The heartbeat goes on meanwhile; an error says that
/// nothing is recorded.
///
/// Not an `async fn`: that stores its argument twice, which doubles every enclosing future.
#[expect(clippy::manual_async_fn, reason = "see above")]
pub(super) fn end(mut held: HeldAttempt) -> impl Future<Output = Result<RecordContent, Error>> {
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
            None => Ok(Verdict::Applied),
        };
        let ended = match written {
            Ok(written) => Ok(written),
            Err(error) => write_held_again(&mut held, error).await,
        };
        let content = match (&ended, &held.on_drop) {
            (Ok(Verdict::Applied), Some(ending)) => content(held.attempt().key(), ending),
            _ => RecordContent::Nothing,
        };
        // An error of a release is the one case where something is left to do: `HeldAttempt` does it late.
        if ended.is_ok() || matches!(held.on_drop, Some(Ending::Finish(_))) {
            held.on_drop = None;
        }
        let Attempt { store, lease, reserved_at, .. } = held.attempt();
        match ended {
            Ok(Verdict::Applied) => Ok(content),
            Ok(Verdict::Refused) => {
                tracing::warn!(
                    key = %lease.key, store = store.name(), attempt = lease.attempt,
                    "the body ran to its end, and another attempt has the key; the result is not recorded"
                );
                Err(held.lost())
            }
            Err(error) if held.on_drop.is_some() => {
                // The caller gets the body's own error, and does not wait for its key to be freed.
                tracing::debug!(key = %lease.key, %error, "the key could not be freed yet; trying again late");
                Ok(RecordContent::Nothing)
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
async fn write_held_again(held: &mut HeldAttempt, error: StoreError) -> Result<Verdict, StoreError> {
    match held {
        // A shadow slows nobody down.
        HeldAttempt {
            attempt: Some(Attempt { store, lease, reserved_at, .. }),
            on_drop: Some(ending),
            enforced: true,
            ..
        } if matches!(ending, Ending::Finish(_)) => {
            write_again(&**store, lease, *reserved_at, ending, Err(error)).await
        }
        _ => Err(error),
    }
}

/// What `ending` leaves in the record.
fn content(key: &Key, ending: &Ending) -> RecordContent {
    let Ending::Finish(finish) = ending else { return RecordContent::Nothing };
    let payload = finish.result();
    if matches!(payload, StoredResult::Encoded { .. }) {
        return RecordContent::Result;
    }
    tracing::warn!(%key, ?payload, "the completion is recorded without its result; duplicates can't replay it");
    RecordContent::Completion
}

/// Writes `ending` once.
pub(crate) fn write<'a>(store: &'a dyn Store, lease: &'a Lease, ending: &'a Ending) -> StoreFuture<'a, Verdict> {
    match ending {
        Ending::Finish(finish) => store.finish(lease, finish),
        Ending::Release(release) => store.release(lease, *release),
    }
}

/// Whether the same write may succeed later: whatever ails the store may pass, but not what ails the record.
fn may_pass(error: &StoreError) -> bool {
    match error.kind() {
        StoreErrorKind::Unavailable
        | StoreErrorKind::Unconfirmed
        | StoreErrorKind::Full
        | StoreErrorKind::Misconfigured => true,
        StoreErrorKind::Corrupt | StoreErrorKind::TooLarge | StoreErrorKind::Aborted => false,
    }
}

/// The pauses between tries, until `limit` has passed or the lease is over.
struct Tries<'a> {
    store: &'a dyn Store,
    lease: &'a Lease,
    confirmed_at: Instant,
    began: Instant,
    pause: Duration,
}

impl<'a> Tries<'a> {
    fn new(store: &'a dyn Store, lease: &'a Lease, confirmed_at: Instant) -> Self {
        let began = store.heartbeats().clock().now();
        Self { store, lease, confirmed_at, began, pause: FIRST_PAUSE }
    }

    fn elapsed(&self) -> Duration {
        self.store.heartbeats().clock().now().saturating_since(self.began)
    }

    /// Whether a renewal that was asked for since the first try is confirmed.
    fn renewed(&self) -> bool {
        self.store.heartbeats().confirmed_at(self.lease.owner).is_some_and(|confirmed_at| confirmed_at > self.began)
    }

    /// Waits for the next try; false if there is none. An attempt is ended within one lease, or not at all: a store that
    /// renews leases but takes no results would keep the call for ever.
    async fn again(&mut self) -> bool {
        let heartbeats = self.store.heartbeats();
        let held = heartbeats.may_be_held_for(self.lease, self.confirmed_at);
        let left = held.min(self.lease.duration.saturating_sub(self.elapsed()));
        if left.is_zero() {
            return false;
        }
        heartbeats.clock().sleep(self.pause.min(left)).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        true
    }
}

/// Writes `ending` again, of which `written` came when it was written first, and again for one lease, while that can be held:
/// every write is safe to repeat with its owner token. If the store can't hold the result, or renews the lease and has not
/// taken it for half a lease, `ending` becomes one without it.
pub(crate) async fn write_again(
    store: &dyn Store,
    lease: &Lease,
    confirmed_at: Instant,
    ending: &mut Ending,
    mut written: Result<Verdict, StoreError>,
) -> Result<Verdict, StoreError> {
    let mut tries = Tries::new(store, lease, confirmed_at);
    // Whether the store had taken a renewal of this lease, in this time, before it was asked for the last write.
    let mut renews = false;
    loop {
        let Err(error) = written else { return written };
        let too_large = error.kind() == StoreErrorKind::TooLarge;
        // A store that takes no writes at all may take the result when it comes back.
        let too_long = renews && may_pass(&error) && tries.elapsed() >= lease.duration / 2;
        written = Err(error);
        if (too_large || too_long)
            && let Some(without_result) = ending.without_result()
        {
            let shortened = write(store, lease, &without_result).await;
            // A release that is refused may have met the result itself, whose answer got lost: that is asked for again.
            let settled = matches!(shortened, Ok(Verdict::Applied)) || matches!(without_result, Ending::Finish(_));
            if too_large || (shortened.is_ok() && settled) {
                *ending = without_result;
                written = shortened;
                continue;
            }
        }
        if !matches!(&written, Err(error) if may_pass(error)) || !tries.again().await {
            return written;
        }
        renews = tries.renewed();
        written = write(store, lease, ending).await;
    }
}

/// What a late write is about, for the log.
fn what(ending: &Ending) -> &'static str {
    match ending {
        Ending::Finish(_) => "a result that was being recorded when its call was dropped",
        Ending::Release(Release::Interrupted) => "that a body was interrupted",
        Ending::Release(_) => "the end of a call whose body was dropped",
    }
}

/// Writes `ending` although nobody waits for it: at once if the store can, otherwise by [`Clock::spawn`](crate::Clock::spawn).
pub(crate) fn write_late(store: Arc<dyn Store>, lease: Lease, confirmed_at: Instant, mut ending: Ending) {
    // An open transaction decides by itself what is left of its records.
    if !store.heartbeats().writes_late() || write(&*store, &lease, &ending).at_once().is_some() {
        return;
    }
    let under_way = store.heartbeats().under_way();
    let clock = Arc::clone(&store);
    clock.heartbeats().clock().spawn(Box::pin(async move {
        let _under_way = under_way;
        let store = store.upkeep();
        let (key, name, attempt) = (&lease.key, store.name(), lease.attempt);
        let written = write(&*store, &lease, &ending).await;
        let written = write_again(&*store, &lease, confirmed_at, &mut ending, written).await;
        let what = what(&ending);
        match written {
            Ok(Verdict::Applied) => tracing::debug!(%key, store = name, attempt, what, "written late"),
            Ok(Verdict::Refused) => {
                tracing::warn!(%key, store = name, attempt, what, "too late: the key is another attempt's by now");
            }
            Err(error) => tracing::error!(
                %key, store = name, attempt, what, %error,
                "could not be written; the key is held until its lease lapses"
            ),
        }
    }));
}

/// Frees a key that a request may have reserved, or may still reserve, although nobody waits for its answer any more.
///
/// A release alone could overtake the reservation, which would then hold the key with nobody to run under it. So the key is
/// reserved once more with the same owner token, and then released. What is there afterwards is a record that the late request
/// has not met: it can neither insert its own nor replace this one.
pub(crate) fn clean_up_late(store: &Arc<dyn Store>, request: &ReserveRequest) {
    if !store.heartbeats().writes_late() {
        return;
    }
    if let Some(reservation) = store.reserve(request).at_once() {
        if let Reservation::Granted { lease, .. } = reservation {
            let ending = Ending::Release(Release::NotStarted);
            write_late(Arc::clone(store), lease, store.heartbeats().clock().now(), ending);
        }
        return;
    }
    let request = request.clone();
    let under_way = store.heartbeats().under_way();
    let upkeep = Arc::clone(store);
    store.heartbeats().clock().spawn(Box::pin(async move {
        let _under_way = under_way;
        let store = upkeep.upkeep();
        let (key, name) = (&request.key, store.name());
        match clean_up(&*store, &request).await {
            Ok(()) => tracing::debug!(%key, store = name, "nothing is left of a call that was dropped before its body"),
            Err(error) => tracing::warn!(
                %key, store = name, %error,
                "a call was dropped while its key was being reserved, and the store can't be asked what became of that; \
                 no body ran; if it is reserved, its lease lapses by itself"
            ),
        }
    }));
}

async fn clean_up(store: &dyn Store, request: &ReserveRequest) -> Result<(), StoreError> {
    let asked_at = store.heartbeats().clock().now();
    let unanswered = request.unanswered();
    let mut tries = Tries::new(store, &unanswered, asked_at);
    loop {
        let freed = match store.reserve(request).await {
            Ok(Reservation::Granted { lease, .. }) => match store.release(&lease, Release::NotStarted).await {
                Ok(Verdict::Applied) => Ok(()),
                // Taken over in between.
                Ok(Verdict::Refused) => {
                    Err(StoreError::new(StoreErrorKind::Unavailable, "taken over before its release"))
                }
                Err(error) => Err(error),
            },
            // Ours is released already, or the record is somebody else's, which a request that has not met it leaves alone.
            Ok(_) => Ok(()),
            // It may have landed all the same; then it is ours to release.
            Err(error) if error.may_have_landed() => match store.release(&unanswered, Release::NotStarted).await {
                Ok(Verdict::Applied) => Ok(()),
                _ => Err(error),
            },
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
