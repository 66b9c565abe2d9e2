//! End of an attempt: the last write to its record, made by its call.

use std::future::Future;

use super::attempt::Attempt;
use super::ending::{AttemptEnd, RecordContent};
use super::held::{EndingAttempt, HeldAttempt};
use super::late::{Tries, may_pass, outlasts_lease, write_again};
use super::outbox;
use crate::combine::erased;
use crate::error::Error;
use crate::key::Key;
use crate::metrics::Dropped;
use crate::record::{StoredResult, Verdict};
use crate::store::{Store, StoreError};

/// Writes the end of the attempt, while the heartbeat goes on. Returns the part of the end that the record holds; an
/// error means that nothing is recorded.
///
/// This function is no `async fn`, because an `async fn` stores its argument twice, which doubles every enclosing
/// future.
#[expect(clippy::manual_async_fn, reason = "see above")]
pub(super) fn end(mut attempt: EndingAttempt) -> impl Future<Output = Result<RecordContent, Error>> {
    async move {
        // The body has returned, so its effect is known to the caller, even if its error is released and not recorded.
        attempt.held.on_uncertain = None;
        let written = 'written: {
            let Some(mut writing) = attempt.write() else { break 'written Ok(Verdict::Applied) };
            if let Some(written) = writing.at_once() {
                break 'written Ok(written);
            }
            // From here on only the store decides about the attempt: neither the body's time limit nor a refused
            // renewal may end a slow write.
            let Attempt { store, lease, .. } = attempt.held.attempt();
            store.context().leases().body_returned(lease.owner);
            (&mut writing).await
        };
        let ended = match written {
            Ok(written) => Ok(written),
            // Boxed: a repetition is rare, and every call would carry its size inline.
            Err(error) => erased(write_held_again(&mut attempt, error)).await,
        };
        let content = match (&ended, &attempt.ending) {
            (Ok(Verdict::Applied), Some(ending)) => content(attempt.held.attempt().key(), ending),
            _ => RecordContent::Nothing,
        };
        let outgoing = outbox::outgoing(&attempt, &ended);
        let is_release = matches!(attempt.ending, Some(AttemptEnd::Release(_)));
        let EndingAttempt { held, ending } = &mut attempt;
        // The drop of `EndingAttempt` repeats two kinds of failed writes. One kind is a release. The other is a result
        // under `on_crash = fail`, because no other attempt may run to produce the result.
        let goes_on = match &ended {
            Ok(_) => false,
            Err(error) => is_release || (held.enforced && may_pass(error) && outlasts_lease(&held.attempt().lease)),
        };
        if !goes_on {
            *ending = None;
        }
        if let Some(outgoing) = outgoing {
            drop(ended);
            // Boxed: most calls have no messages, and would carry its size inline.
            let replayable = matches!(content, RecordContent::Result { .. });
            return erased(outgoing.send(held, replayable)).await.map(|()| content);
        }
        let Attempt { store, lease, reserved_at, .. } = held.attempt();
        match ended {
            Ok(Verdict::Applied) => Ok(content),
            Ok(Verdict::Refused) => {
                tracing::warn!(
                    key = %lease.key, store = store.context().name(), attempt = lease.attempt,
                    "the body ran to its end, and its result is not recorded: another attempt has taken over, or the record was removed"
                );
                Err(held.lost())
            }
            Err(error) if is_release => {
                // The caller gets the body's own error, and does not wait until its key is freed.
                tracing::debug!(
                    key = %lease.key, %error,
                    "the key could not be released yet; trying again in the background"
                );
                Ok(RecordContent::Nothing)
            }
            Err(source) => Err(Error::Unrecorded {
                key: lease.key.clone(),
                store: store.context().name(),
                attempt: lease.attempt,
                retry_after: store.context().leases().may_be_held_for(lease, *reserved_at).max(held.pause()),
                source,
            }),
        }
    }
}

/// Repeats a failed `finish` while the lease can be held. For a failed release this function returns immediately,
/// because the drop repeats the release.
async fn write_held_again(attempt: &mut EndingAttempt, error: StoreError) -> Result<Verdict, StoreError> {
    match attempt {
        // Shadow mode must not delay a call, so its write is not repeated.
        EndingAttempt {
            held: HeldAttempt { attempt: Some(Attempt { store, lease, reserved_at, .. }), enforced: true, .. },
            ending: Some(ending),
        } if matches!(ending, AttemptEnd::Finish(_)) => {
            write_again(Tries::new(&**store, lease, *reserved_at), ending, Err(error)).await
        }
        _ => Err(error),
    }
}

/// Returns the part of `ending` that the record holds after the write.
fn content(key: &Key, ending: &AttemptEnd) -> RecordContent {
    let AttemptEnd::Finish(finish) = ending else { return RecordContent::Nothing };
    let (result, _) = finish.result().parts();
    let why = match &*result {
        StoredResult::Encoded { .. } => {
            return RecordContent::Result { bytes: result.stored_bytes() };
        }
        StoredResult::TooLarge { .. } => Dropped::TooLarge,
        StoredResult::Unencodable | StoredResult::Unreadable { .. } | StoredResult::LeftOut { .. } => {
            Dropped::Unencodable
        }
    };
    tracing::warn!(%key, ?result, "the completion is recorded without its result; duplicates can't replay it");
    RecordContent::Completion(why)
}
