//! The last write of an attempt: in its call, or late if the call is gone.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::runtime::Handle;

use crate::clock::Instant;
use crate::heartbeat::UnderWay;
use crate::{Finish, Lease, Payload, Release, Store, StoreError, StoreErrorKind, StoreFuture, Write};

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
            Self::Finish(Finish::Completed(Payload::Stored { bytes, .. })) => {
                Some(Self::Finish(Finish::Completed(Payload::TooLarge { bytes: bytes.len() as u64 })))
            }
            // An error that can't be replayed is not worth ending the operation for.
            Self::Finish(Finish::Failed(Payload::Stored { .. })) => Some(Self::Release(Release::Returned)),
            _ => None,
        }
    }
}

/// Writes `ending` once.
pub(crate) fn write<'a>(store: &'a dyn Store, lease: &'a Lease, ending: &'a Ending) -> StoreFuture<'a, Write> {
    match ending {
        Ending::Finish(finish) => store.finish(lease, finish),
        Ending::Release(release) => store.release(lease, *release),
    }
}

/// Writes `ending` again, of which `written` came when it was written first, and again while the lease can be held: every
/// write is safe to repeat with its owner token. If the store can't hold the result, `ending` becomes one without it.
pub(crate) async fn write_again(
    store: &dyn Store,
    lease: &Lease,
    confirmed_at: Instant,
    ending: &mut Ending,
    mut written: Result<Write, StoreError>,
) -> Result<Write, StoreError> {
    let heartbeats = store.heartbeats();
    let mut pause = FIRST_PAUSE;
    loop {
        let Err(error) = written else { return written };
        if error.kind() == StoreErrorKind::TooLarge
            && let Some(without_result) = ending.without_result()
        {
            *ending = without_result;
            written = write(store, lease, ending).await;
            continue;
        }
        let remaining = heartbeats.lease_remaining(lease, confirmed_at);
        if !error.is_transient() || remaining.is_zero() {
            return Err(error);
        }
        heartbeats.clock().sleep(pause.min(remaining)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        written = write(store, lease, ending).await;
    }
}

/// Writes `ending` although nobody waits for it: at once if the store can, otherwise in a task of its own.
pub(crate) fn write_late(store: Arc<dyn Store>, lease: Lease, confirmed_at: Instant, mut ending: Ending) {
    let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
        let _under_way = UnderWay::new(store.heartbeats());
        let key = &lease.key;
        let written = write(&*store, &lease, &ending).await;
        match write_again(&*store, &lease, confirmed_at, &mut ending, written).await {
            Ok(Write::Done) => tracing::debug!(%key, store = store.name(), attempt = lease.attempt, "written late"),
            // A reservation whose answer was not awaited need not have landed.
            Ok(Write::Refused) => tracing::debug!(%key, store = store.name(), "nothing of this attempt to write to"),
            Err(error) => tracing::warn!(
                %key, store = store.name(), attempt = lease.attempt, %error,
                "the end of a cancelled attempt could not be written; the key is held until its lease lapses"
            ),
        }
    });
    // The first poll hands the write to the store, even where there is no runtime any more to wait for its answer.
    if task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
        && let Ok(runtime) = Handle::try_current()
    {
        runtime.spawn(task);
    }
}
