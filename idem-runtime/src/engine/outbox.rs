//! The outbox of an attempt: messages that are recorded with its result, sent after that, and then marked as sent.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::attempt::{Attempt, is_inside_another};
use super::ending::AttemptEnd;
use super::held::{EndingAttempt, HeldAttempt};
use super::poll_notes::note_refusal;
use super::step::is_inside_step_of;
use crate::codec::{Codec, Json};
use crate::combine::race;
use crate::error::{Error, OutboxProblem, UnsentReason, deployment_pause};
use crate::key::Key;
use crate::metrics::StoreOp;
#[cfg(feature = "within")]
use crate::policy::Backoff;
use crate::record::messages::{OutgoingMessage, UnsentMessages};
use crate::record::{Decision, DecisionAnswer, Finish, Inspection, Lease, Revision, State, StoredResult, Verdict};
use crate::store::sender::Sender;
use crate::store::{PushRefusal, Standing, Store, StoreContext, StoreError};

/// Largest size of the messages of one attempt in its record, in bytes. Every store holds them.
const MAX_BYTES: usize = 256 * 1024;

impl OutgoingMessage {
    /// Makes a message whose body is `content` as JSON.
    ///
    /// # Errors
    /// [`Error::Outbox`] if `content` does not encode.
    pub fn json<T: Serialize>(content: &T) -> Result<Self, Error> {
        match Json::encode(content) {
            Ok(body) => Ok(Self::new(body).header("content-type", "application/json")),
            Err(source) => Err(Error::Outbox { key: None, problem: OutboxProblem::Unencodable(source) }),
        }
    }
}

impl Attempt {
    /// Returns the outbox of this attempt: messages that leave if the body returns `Ok`, and only then.
    ///
    /// The write that records the result records the messages too. After that the
    /// [sender](crate::StoreExt::with_sender) of the store handle publishes them, in the order in which they were
    /// pushed, and one more write marks them as sent. Only then does the call return. If a message can't be sent, the
    /// call returns [`Error::Unsent`], and the next delivery sends what is not marked, without running the body.
    ///
    /// Nothing is sent for a body that returns an error, is cancelled or loses its lease. A process that dies between
    /// sending and marking sends the message again, with the same [id](OutgoingMessage::id).
    ///
    /// Without a reservation ([`is_protected`](Self::is_protected) returns false) and in shadow mode, the messages are
    /// sent after the body has returned `Ok`, and are not recorded.
    ///
    /// ```
    /// use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
    /// use idem_runtime::{Error, MemoryStore, StoreExt, current, idempotent};
    ///
    /// struct Printer;
    ///
    /// impl Sender for Printer {
    ///     fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
    ///         Box::pin(async move {
    ///             println!("{} for {}", message.id(), message.destination());
    ///             Ok(())
    ///         })
    ///     }
    /// }
    ///
    /// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// async fn pay(store: &MemoryStore, id: u32) -> Result<u32, Error> {
    ///     current()?.outbox().push("orders.paid", OutgoingMessage::json(&id)?.key(id))?;
    ///     Ok(id)
    /// }
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// let store = MemoryStore::new().with_sender(Printer);
    /// assert_eq!(pay(&store, 42).await.unwrap(), 42);
    /// # });
    /// ```
    pub fn outbox(&self) -> Outbox<'_> {
        Outbox { attempt: self }
    }
}

/// Takes the messages of an attempt; see [`Attempt::outbox`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Outbox<'a> {
    attempt: &'a Attempt,
}

impl Outbox<'_> {
    /// Adds a message for `destination`: a topic, subject, queue or exchange, as the sender understands it.
    ///
    /// The [id](OutgoingMessage::id) of the message is a child key of the attempt and of the place of the message: each
    /// time it is sent, it is the same, and no other message of a recorded attempt has it.
    ///
    /// # Errors
    /// [`Error::Outbox`] if the store handle has no sender, the messages of this attempt have more than 256 KiB
    /// together, or the body has returned. In the user's transaction a push needs `transact` and
    /// [`sender_of`](crate::within::Within::sender_of). A push inside of a [step](Attempt::step) or of another
    /// idempotent call is refused as well: the next attempt would not run it, and so would not push. (A task that a
    /// step spawns is not recognised.) The message is not added.
    pub fn push(&self, destination: &str, message: OutgoingMessage) -> Result<(), Error> {
        let Attempt { store, .. } = self.attempt;
        let refused = |problem: OutboxProblem| {
            if problem.is_misconfiguration() || matches!(problem, OutboxProblem::AttemptEnded) {
                // An error of the body that only repeats this refusal must not end the operation.
                note_refusal();
            }
            Err(Error::Outbox { key: Some(self.attempt.key().clone()), problem })
        };
        if store.context().sender().is_none() {
            let is_leased = store.context().renews();
            return refused(if is_leased { OutboxProblem::NoSender } else { OutboxProblem::InTransaction });
        }
        if is_inside_step_of(&self.attempt.lease) || is_inside_another(self.attempt) {
            return refused(OutboxProblem::InStep);
        }
        if destination.is_empty() {
            return refused(OutboxProblem::NoDestination);
        }
        if message.headers().count() > usize::from(u16::MAX) {
            return refused(OutboxProblem::TooManyHeaders);
        }
        let (journal, attempt) = match self.attempt.unrecorded() {
            Some(unrecorded) => (Arc::clone(unrecorded), 0),
            None => match store.context().leases().outbox(self.attempt.lease.owner) {
                Some((journal, is_recorded)) => (journal, if is_recorded { self.attempt.number() } else { 0 }),
                None => return refused(OutboxProblem::AttemptEnded),
            },
        };
        // The owner token differs if a key is used again after its record is gone.
        let owner = if attempt == 0 { 0 } else { u64::from_be_bytes(self.attempt.lease.owner.tag()) };
        let address = |place| {
            let id = self.attempt.child_key(&format!("idem:message:{attempt}:{owner:016x}:{place}"));
            message.addressed(destination, id)
        };
        match journal.push(MAX_BYTES, address) {
            Ok(()) => Ok(()),
            Err(PushRefusal::Sealed) => refused(OutboxProblem::AttemptEnded),
            Err(PushRefusal::TooLarge(bytes)) => refused(OutboxProblem::TooLarge { bytes, max: MAX_BYTES }),
        }
    }
}

/// Future that sends the messages of a body without a reservation.
type SendTask = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// Returns whether a finished record holds messages that are to be sent.
pub(crate) fn has_unsent(state: &State) -> bool {
    match state.result().and_then(StoredResult::messages) {
        Some(Ok((_, messages))) => messages.has_sendable(),
        // The call then reports the damage.
        Some(Err(_)) => true,
        None => false,
    }
}

/// Returns whether the messages of a call leave only after the commit of the user's transaction: the transaction takes
/// note of them, and nothing is sent in the call.
pub(super) fn leave_after_commit(context: &StoreContext) -> bool {
    !context.renews() && context.sender().is_some()
}

/// A record with messages that was committed in a user's transaction.
#[cfg(feature = "within")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct CommittedRecord {
    pub(crate) key: Key,
    /// First half of the owner token, and the number of the attempt.
    pub(crate) written_by: ([u8; 8], u32),
    /// Retention and lease of a call that found the record; `None` if the body ran in this delivery.
    pub(crate) found_by: Option<(Duration, Duration)>,
}

/// Sends the messages of a record that was committed in a user's transaction, and marks them as sent. `store` holds
/// the record.
#[cfg(feature = "within")]
pub(crate) async fn send_committed(store: &dyn Store, committed: &CommittedRecord) -> Result<(), Error> {
    let CommittedRecord { key, written_by, found_by } = committed;
    let (context, ran) = (store.context(), found_by.is_none());
    let dispatch = |pause| Dispatch { store, key, attempt: written_by.1, ran, replayable: true, pause };
    let first = dispatch(Backoff::DEFAULT.after(1, key.seed()));
    // Taken before the record is read, so that no other call of this process marks the messages in between.
    let Some(_sending) = context.sends(key) else { return Err(first.unsent(None, UnsentReason::Sending)) };
    let found = match store.inspect(key).watched(store, StoreOp::Inspect).await {
        Ok(Some(found)) if (found.record.owner.tag(), found.attempt()) == *written_by => found,
        // The store is not the one of the transaction, or the user has undone the call by a savepoint of their own.
        Ok(_) => return Err(first.unsent(None, UnsentReason::RecordChanged)),
        Err(source) => return Err(first.unsent(None, UnsentReason::NotRead(source))),
    };
    if !has_unsent(&found.record.state) {
        return Ok(());
    }
    let dispatch = dispatch(Backoff::DEFAULT.during(found.began.unwrap_or_default(), key.seed()));
    match found_by {
        Some((ttl, lease)) if is_being_sent(context, &found, *ttl, *lease) => {
            Err(dispatch.unsent(None, UnsentReason::Sending))
        }
        _ => dispatch.send_recorded(&found).await,
    }
}

/// Sends messages of the operation `key` that no record holds, after the commit of the user's transaction.
#[cfg(feature = "within")]
pub(crate) async fn send_unrecorded(store: &dyn Store, key: &Key, messages: &[OutgoingMessage]) -> Result<(), Error> {
    let Some(messages) = UnsentMessages::pushed(messages) else { return Ok(()) };
    let pause = Backoff::DEFAULT.after(1, key.seed());
    Dispatch { store, key, attempt: 0, ran: true, replayable: false, pause }.send_unrecorded(&messages).await
}

/// Time after the write of a record in which the process of its attempt is probably sending the messages.
const GRACE: Duration = Duration::from_secs(1);

/// Returns whether another process is probably sending the messages of the record: it wrote the record just now. `ttl`:
/// retention of the record after its last write. `longest`: time after which the attempt has certainly ended. Within a
/// process the guards of `sends` are exact.
pub(super) fn is_being_sent(context: &StoreContext, found: &Inspection, ttl: Duration, longest: Duration) -> bool {
    let is_of_this_process = found.holder().is_none_or(|holder| holder == context.holder());
    // The retention of this caller may differ from the retention of the record, so the age of the attempt bounds a
    // wrong guess.
    let is_young = found.began.is_some_and(|began| began < longest.saturating_add(GRACE));
    let since = found.record.retention(ttl).checked_sub(found.expires_in);
    !is_of_this_process && is_young && since.is_some_and(|since| since < GRACE)
}

/// Returns the future that sends the messages of a body that ran without a reservation; `None` if there are none, or if
/// the body returned an error.
pub(super) fn unrecorded(attempt: &Attempt, is_ok: bool) -> Option<SendTask> {
    let messages = attempt.unrecorded()?.seal().filter(|_| is_ok)?;
    let (store, key) = (Arc::clone(&attempt.store), attempt.key().clone());
    let pause = attempt.backoff.after(1, key.seed());
    Some(Box::pin(async move {
        let dispatch = Dispatch { store: &*store, key: &key, attempt: 0, ran: true, replayable: false, pause };
        dispatch.send_unrecorded(&messages).await
    }))
}

/// Messages that leave after the end of an attempt was written.
pub(super) enum OutgoingMessages {
    /// The record holds the messages.
    Recorded(UnsentMessages),
    /// No record holds the messages of a body in shadow mode.
    Unrecorded(UnsentMessages),
}

/// Returns the messages that leave now: `written` is the answer to the write of the end.
#[inline]
pub(super) fn outgoing(attempt: &EndingAttempt, written: &Result<Verdict, StoreError>) -> Option<OutgoingMessages> {
    let Some(AttemptEnd::Finish(Finish::Completed(result))) = &attempt.ending else { return None };
    match attempt.held.enforced {
        true if !result.has_messages() || leave_after_commit(attempt.held.attempt().store.context()) => None,
        true => recorded(result, written).filter(|_| !attempt.held.have_messages_left()),
        false => attempt.held.seal_messages().map(OutgoingMessages::Unrecorded),
    }
}

#[cold]
fn recorded(result: &StoredResult, written: &Result<Verdict, StoreError>) -> Option<OutgoingMessages> {
    match (written, result.messages()) {
        (Ok(Verdict::Applied), Some(Ok((_, messages)))) => Some(OutgoingMessages::Recorded(messages)),
        _ => None,
    }
}

impl OutgoingMessages {
    /// Ends the lease of the attempt, and sends the messages.
    pub(super) async fn send(self, held: &mut HeldAttempt, replayable: bool) -> Result<(), Error> {
        let pause = held.pause();
        // Until here, duplicates in this process find the lease of the attempt, and leave its messages to it.
        let _sending = held.attempt().store.context().sends(held.attempt().key());
        let Attempt { store, lease, .. } = held.over();
        let Lease { key, owner, attempt, .. } = &lease;
        let dispatch = Dispatch { store: &*store, key, attempt: *attempt, ran: true, replayable, pause };
        match self {
            Self::Unrecorded(messages) => {
                Dispatch { attempt: 0, replayable: false, ..dispatch }.send_unrecorded(&messages).await
            }
            Self::Recorded(messages) => {
                let seen =
                    Revision { owner: owner.tag(), attempt: *attempt, standing: Standing::Completed, journal: 0 };
                dispatch.send(seen, &messages).await
            }
        }
    }
}

/// Messages of an operation, on their way to the broker.
pub(super) struct Dispatch<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) key: &'a Key,
    pub(super) attempt: u32,
    /// True if the body of this call ran.
    pub(super) ran: bool,
    /// True if duplicates can replay the result.
    pub(super) replayable: bool,
    /// Pause before the next delivery after a failure.
    pub(super) pause: Duration,
}

impl Dispatch<'_> {
    /// Returns the error of the call. `unsent`: number of messages that are not marked as sent, if it is known.
    pub(super) fn unsent(&self, unsent: Option<u32>, reason: UnsentReason) -> Error {
        let Self { store, key, attempt, ran, replayable, pause } = *self;
        let retry_after = match reason {
            // A deployment has to change, or a person has to repair the record.
            UnsentReason::NoSender => deployment_pause(Some(key)),
            UnsentReason::Unreadable { .. } => pause.max(deployment_pause(Some(key))),
            _ => pause,
        };
        let store = store.context().name();
        match &reason {
            UnsentReason::Sending => {
                tracing::debug!(%key, store, attempt, "a duplicate: another call is sending the messages of the operation");
            }
            UnsentReason::NotConfirmed { source, .. } => tracing::warn!(
                %key, store, attempt, unsent, %reason, error = %source, "the messages of an operation are not all sent"
            ),
            _ => tracing::warn!(%key, store, attempt, unsent, %reason, "the messages of an operation are not all sent"),
        }
        let (key, reason) = (key.clone(), Box::new(reason));
        Error::Unsent { key, store, attempt, ran, replayable, unsent, retry_after, reason }
    }

    /// Sends the messages of the finished record `found`, as another process may have left it, and marks them as sent.
    pub(super) async fn send_recorded(&self, found: &Inspection) -> Result<(), Error> {
        match found.record.state.result().and_then(StoredResult::messages) {
            None => Ok(()),
            Some(Ok((_, messages))) => self.send(found.revision(), &messages).await,
            Some(Err(reason)) => Err(self.unsent(None, UnsentReason::Unreadable { reason: reason.into() })),
        }
    }

    /// Sends the messages of the record `seen`, and marks them as sent.
    pub(super) async fn send(&self, seen: Revision, messages: &UnsentMessages) -> Result<(), Error> {
        let unmarked = Some(messages.count());
        let Some(sender) = self.store.context().sender() else {
            return match messages.has_sendable() {
                true => Err(self.unsent(unmarked, UnsentReason::NoSender)),
                false => Ok(()),
            };
        };
        let (left, failure) = self.publish(&**sender, messages, true).await;
        let mut unmarked = left.as_ref().map(UnsentMessages::count);
        let mut not_marked = None;
        if left.as_ref() != Some(messages)
            && let Err(reason) = self.mark(seen, left).await
        {
            unmarked = Some(messages.count());
            not_marked = Some(reason);
        }
        match failure.or(not_marked) {
            Some(reason) => Err(self.unsent(unmarked, reason)),
            None => Ok(()),
        }
    }

    /// Sends messages that no record holds, of a body that ran without a reservation. No message is set aside, because
    /// nothing would keep it.
    pub(super) async fn send_unrecorded(&self, messages: &UnsentMessages) -> Result<(), Error> {
        let Some(sender) = self.store.context().sender() else { return Ok(()) };
        match self.publish(&**sender, messages, false).await {
            (Some(left), Some(reason)) => Err(self.unsent(Some(left.count()), reason)),
            _ => Ok(()),
        }
    }

    /// Sends one message after the other. A message waits for all earlier messages of its destination. Returns the
    /// messages that are not sent, and the reason if one of them is to be sent again.
    async fn publish(
        &self,
        sender: &dyn Sender,
        messages: &UnsentMessages,
        sets_aside: bool,
    ) -> (Option<UnsentMessages>, Option<UnsentReason>) {
        let Self { key, attempt, .. } = *self;
        let (mut left, mut failure) = (Vec::new(), None);
        let (mut blocked, mut hangs) = (BTreeSet::new(), false);
        for unsent in messages.messages() {
            let (message, mut unsent) = (unsent.message(), unsent.clone());
            let destination = message.destination();
            if hangs || unsent.set_aside || blocked.contains(destination) {
                left.push(unsent);
                continue;
            }
            let clock = self.store.context().clock();
            let reason = match race(sender.send(message), clock.sleep(sender.timeout())).await {
                Some(Ok(())) => continue,
                Some(Err(error)) => {
                    let refused = error.is_refused();
                    unsent.refusals = unsent.refusals.saturating_add(u32::from(refused));
                    unsent.set_aside = sets_aside && refused && unsent.refusals >= sender.max_refusals();
                    let (destination, source) = (destination.into(), error.into_source());
                    UnsentReason::NotConfirmed { destination, refused, source }
                }
                None => UnsentReason::TimedOut { destination: destination.into() },
            };
            // A broker that does not answer holds up all messages: each would take as long.
            hangs |= matches!(reason, UnsentReason::TimedOut { .. });
            if unsent.set_aside {
                tracing::error!(
                    %key, attempt, destination, id = message.id(), refusals = unsent.refusals,
                    "the broker refuses a message, and it is set aside: `idem show KEY`, then `idem outbox resend` or `idem outbox drop`"
                );
            } else {
                blocked.insert(destination);
                failure = failure.or(Some(reason));
            }
            left.push(unsent);
        }
        (UnsentMessages::new(left), failure)
    }

    async fn mark(&self, seen: Revision, left: Option<UnsentMessages>) -> Result<(), UnsentReason> {
        let decision = Decision::mark_sent(self.key, seen, left);
        match self.store.decide(&decision).watched(self.store, StoreOp::Decide).await {
            Ok(DecisionAnswer::Applied) => Ok(()),
            Ok(_) => Err(UnsentReason::RecordChanged),
            Err(source) => Err(UnsentReason::NotMarked(source)),
        }
    }
}
