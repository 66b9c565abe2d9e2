//! Errors that a call returns in place of a result, and the dispositions of messages that follow from them.

mod outbox;
mod step;

use std::fmt;
use std::io;
use std::time::Duration;

pub use self::outbox::{OutboxProblem, UnsentReason};
pub use self::step::StepProblem;
use crate::codec::ResultProblem;
use crate::key::{Fingerprint, FingerprintError, Key, KeyError, KeyProblem};
use crate::policy::{Backoff, Doubt, PolicyProblem, Uncertain};
use crate::store::{StoreError, StoreErrorKind};

/// Longest pause before a redelivery while a mistake of the deployment prevents success: long enough to avoid a hot
/// loop, short enough that messages flow soon after the correction.
const DEPLOYMENT_PAUSE: Duration = Duration::from_secs(60);

/// Returns the pause before a redelivery of a message with `key`, while a mistake of the deployment prevents success. A
/// mistake of the deployment delays many messages, so the pauses of different keys differ.
pub(crate) fn deployment_pause(key: Option<&Key>) -> Duration {
    Backoff::new(DEPLOYMENT_PAUSE, DEPLOYMENT_PAUSE).after(1, key.map_or(0, Key::spread))
}

/// Action for a message after a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disposition {
    /// The operation has finished: acknowledge the message.
    Ack,
    /// Deliver the message again after this time, which is never zero.
    Retry {
        /// Time until a new delivery is likely to succeed.
        after: Duration,
    },
    /// Set the message aside for an operator: no delivery of this message can succeed, or the broker does not deliver
    /// the message again. A delivery that returned `Ok` also gets this disposition if it swallowed the permanent
    /// refusal of a call.
    DeadLetter,
}

/// Reason why a call of an idempotent function did not return the result of its body.
///
/// A handler's own error type must implement `From<Error>`. `anyhow::Error`, `Box<dyn std::error::Error>` and
/// [`std::io::Error`] already implement it. [`Error::disposition`] returns the action for the message.
///
/// ```
/// # use idem_runtime::Error;
/// #[derive(Debug)]
/// enum ShipError {
///     Carrier(String),
///     Idempotency(Error),
/// }
///
/// impl From<Error> for ShipError {
///     fn from(error: Error) -> Self {
///         Self::Idempotency(error)
///     }
/// }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// [`current`](crate::current) was called where no attempt runs. Effects before that call are not undone.
    NoAttempt,
    /// The key, or a part of it, is `None`, empty or blank. The body did not run.
    #[non_exhaustive]
    MissingKey {
        /// Scope of the handler.
        scope: String,
    },
    /// The key is not valid. The body did not run.
    #[non_exhaustive]
    InvalidKey {
        /// Scope of the handler.
        scope: String,
        /// Reason why the key is not valid.
        problem: KeyProblem,
    },
    /// The payload can't be hashed. The body did not run.
    #[non_exhaustive]
    InvalidFingerprint {
        /// Key of the operation.
        key: Key,
        /// Error of the payload's `Serialize` implementation.
        source: FingerprintError,
    },
    /// The policy can't be honoured. The body did not run.
    #[non_exhaustive]
    InvalidPolicy {
        /// Key of the operation.
        key: Key,
        /// Option that is wrong, with a suggested value.
        problem: PolicyProblem,
    },
    /// Another attempt is running. The body did not run.
    #[non_exhaustive]
    InProgress {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Number of the running attempt.
        attempt: u32,
        /// Pause before the next delivery: the remaining lease of the running attempt, or longer.
        retry_after: Duration,
    },
    /// The key was used with another payload. The body did not run.
    #[non_exhaustive]
    FingerprintMismatch {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Number of the attempt that ran with the recorded payload.
        attempt: u32,
        /// Fingerprints of both payloads, as far as they are known.
        payloads: Box<Mismatch>,
    },
    /// The effect of an earlier run is in doubt: the run did not return under `on_crash = fail`, or returned an
    /// [uncertain](crate::OnError::Uncertain) error. No other body may run. The body of this call did not run.
    #[non_exhaustive]
    Interrupted {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Number of the attempt that was interrupted.
        attempt: u32,
        /// Time until the [reconciler](crate::Reconciliation) of the handler may know more; `None` if an operator has
        /// to decide, because the handler has no reconciler, or because the reconciler was asked as often as the policy
        /// allows.
        ask_again: Option<Duration>,
    },
    /// `max_attempts` runs have started without a recorded result. The body did not run again.
    #[non_exhaustive]
    AttemptsExhausted {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Number of attempts that have started.
        attempts: u32,
    },
    /// The lease lapsed while the body ran. The body was cancelled, or returned a result that was not recorded.
    ///
    /// Without a `source`, another attempt took over, or the record is gone. With a `source`, the store permanently
    /// refused to renew the lease, or did not renew it for [`Policy::max_pause`](crate::Policy::max_pause); another
    /// attempt may have taken over meanwhile. The key is freed if the store accepts the release; otherwise another
    /// attempt can take over immediately. Under `on_crash = fail` the operation is interrupted.
    #[non_exhaustive]
    LeaseLost {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Number of the attempt that lost its lease.
        attempt: u32,
        /// Suggested time until the next delivery.
        retry_after: Duration,
        /// Error of the last renewal; `None` if another attempt took over, or if the record is gone.
        source: Option<StoreError>,
    },
    /// The body ran for longer than `timeout` and was cancelled. The key is free, or under `on_crash = fail` the
    /// operation is interrupted.
    #[non_exhaustive]
    TimedOut {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Number of the attempt that was cancelled.
        attempt: u32,
        /// Time limit of the attempt.
        timeout: Duration,
        /// Suggested time until the next delivery.
        retry_after: Duration,
    },
    /// The delivery panicked, and [`Observe::catch_panics`](crate::future::Observe::catch_panics) caught the panic. A
    /// running body was dropped: its key is free, or under `on_crash = fail` the operation is interrupted.
    #[non_exhaustive]
    Panicked {
        /// Key of the last call of the delivery; `None` if no call was made.
        key: Option<Key>,
        /// Number of the last call's attempt; `None` if its body had not started.
        attempt: Option<u32>,
        /// Suggested time until the next delivery.
        retry_after: Duration,
    },
    /// The broker no longer extends the message, and [`OnBeatLost::Cancel`](crate::brokers::OnBeatLost) cancelled the
    /// delivery. A running body was dropped: its key is free, or under `on_crash = fail` the operation is interrupted.
    MessageLost {
        /// Key of the last call of the delivery; `None` if no call was made.
        key: Option<Key>,
        /// Number of the last call's attempt; `None` if its body had not started.
        attempt: Option<u32>,
        /// Suggested time until the next delivery, if the broker still accepts a response for the message.
        retry_after: Duration,
    },
    /// The [deadline](crate::future::ObserveAll::deadline) of the batch passed before the delivery had ended, or before
    /// it began. A running body was dropped: its key is free, or under `on_crash = fail` the operation is interrupted.
    #[non_exhaustive]
    DeadlinePassed {
        /// Key of the last call of the delivery; `None` if no call was made.
        key: Option<Key>,
        /// Number of the last call's attempt; `None` if its body had not started.
        attempt: Option<u32>,
        /// Suggested time until the next delivery.
        retry_after: Duration,
    },
    /// An earlier message of the same [group](crate::future::Observe::group) is not acknowledged, so the delivery did
    /// not begin.
    #[non_exhaustive]
    HeldBack {
        /// Suggested time until the next delivery: the pause of the earlier message, if that pause is known.
        retry_after: Duration,
    },
    /// The body ran, and its result could not be recorded. The key is held until the lease lapses. Under `on_crash =
    /// fail` the process keeps trying to write the result, and duplicates get [`Error::Interrupted`] until the result
    /// is recorded.
    #[non_exhaustive]
    Unrecorded {
        /// Key of the operation.
        key: Key,
        /// Name of the store that should hold the record.
        store: &'static str,
        /// Number of the attempt that ran.
        attempt: u32,
        /// Time until the lease lapses, or the suggested time until the next delivery if that time is longer.
        retry_after: Duration,
        /// Last error of the store.
        source: StoreError,
    },
    /// The operation has finished, but its result was not storable or no longer decodes. The body did not run again.
    #[non_exhaustive]
    ResultUnavailable {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Number of the attempt that finished the operation.
        attempt: u32,
        /// Reason why there is no result.
        problem: ResultProblem,
    },
    /// A [step](crate::Attempt::step) did not run, or ended in an earlier attempt and has no value. `problem` is the
    /// reason. Effects before the step are not undone.
    #[non_exhaustive]
    Step {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Name of the step.
        step: Box<str>,
        /// Reason why the step did not run or has no value.
        problem: StepProblem,
    },
    /// A message was not accepted by the [outbox](crate::Attempt::outbox) of the attempt. It was not sent, and effects
    /// before that are not undone.
    #[non_exhaustive]
    Outbox {
        /// Key of the operation; `None` if the body of the message does not encode.
        key: Option<Key>,
        /// Reason why the message was not accepted.
        problem: OutboxProblem,
    },
    /// The operation has finished and its result is recorded, but not all of its messages are marked as sent. The next
    /// delivery, or any duplicate, sends the rest and returns the recorded result. The body does not run again. If the
    /// body ran without a reservation or in shadow mode (`attempt` is 0), no record holds its messages, and only
    /// another run of the body pushes them again.
    #[non_exhaustive]
    Unsent {
        /// Key of the operation.
        key: Key,
        /// Name of the store that holds the record.
        store: &'static str,
        /// Number of the attempt that recorded the result; 0 if the body ran without a reservation.
        attempt: u32,
        /// True if the body of this call ran; false if this call is a duplicate.
        ran: bool,
        /// True if duplicates can replay the result: it is recorded, and was not left out.
        replayable: bool,
        /// Number of messages that are not marked as sent, if it is known.
        unsent: Option<u32>,
        /// Suggested time until the next delivery.
        retry_after: Duration,
        /// Reason why they are not marked as sent.
        reason: Box<UnsentReason>,
    },
    /// The store could not reserve the key, did not confirm the lease when the body asked for a confirmation, or did
    /// not confirm the journal entry of a step.
    #[non_exhaustive]
    Store {
        /// Key of the operation.
        key: Key,
        /// Name of the store that failed.
        store: &'static str,
        /// True if the body of the call had started.
        started: bool,
        /// True if the key may be reserved for this call until its lease lapses, because a failed request may still
        /// have taken effect, or because the body had started. False if nothing was written.
        may_be_reserved: bool,
        /// Suggested time until the next delivery.
        retry_after: Duration,
        /// Error of the store.
        source: StoreError,
    },
}

/// Fingerprints of two payloads under one key; see [`Error::FingerprintMismatch`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Mismatch {
    /// Fingerprint of this call's payload.
    pub presented: Option<Fingerprint>,
    /// Fingerprint in the record; `None` if the store did not return the fingerprint.
    pub recorded: Option<Fingerprint>,
    /// Time since the last write of the record; `None` if the time is unknown.
    pub age: Option<Duration>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |f: &mut fmt::Formatter<'_>, fingerprint: &Option<Fingerprint>| match fingerprint {
            Some(fingerprint) => write!(f, "{}", fingerprint.short()),
            None => f.write_str("unknown"),
        };
        f.write_str("fingerprint ")?;
        show(f, &self.presented)?;
        f.write_str(" here, ")?;
        show(f, &self.recorded)?;
        f.write_str(" in the record")?;
        match self.age {
            Some(age) => write!(f, ", which was written {age:.0?} ago"),
            None => Ok(()),
        }
    }
}

impl Error {
    /// Returns the key of the operation, if the error has a key.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::NoAttempt | Self::MissingKey { .. } | Self::InvalidKey { .. } | Self::HeldBack { .. } => None,
            Self::Panicked { key, .. } | Self::MessageLost { key, .. } | Self::DeadlinePassed { key, .. } => {
                key.as_ref()
            }
            Self::InvalidFingerprint { key, .. }
            | Self::InvalidPolicy { key, .. }
            | Self::InProgress { key, .. }
            | Self::FingerprintMismatch { key, .. }
            | Self::Interrupted { key, .. }
            | Self::AttemptsExhausted { key, .. }
            | Self::LeaseLost { key, .. }
            | Self::TimedOut { key, .. }
            | Self::Unrecorded { key, .. }
            | Self::ResultUnavailable { key, .. }
            | Self::Step { key, .. }
            | Self::Unsent { key, .. }
            | Self::Store { key, .. } => Some(key),
            Self::Outbox { key, .. } => key.as_ref(),
        }
    }

    /// Returns the action for the message. The action is never [`Disposition::Ack`]: the message of a failed call is
    /// not acknowledged.
    pub fn disposition(&self) -> Disposition {
        match self {
            Self::InProgress { retry_after, .. }
            | Self::Unrecorded { retry_after, .. }
            | Self::LeaseLost { retry_after, .. }
            | Self::TimedOut { retry_after, .. }
            | Self::Panicked { retry_after, .. }
            | Self::MessageLost { retry_after, .. }
            | Self::DeadlinePassed { retry_after, .. }
            | Self::HeldBack { retry_after, .. }
            | Self::Unsent { retry_after, .. }
            | Self::Store { retry_after, .. }
            | Self::Interrupted { ask_again: Some(retry_after), .. } => Disposition::Retry { after: *retry_after },
            Self::Step { problem: StepProblem::Unresolved { ask_again: after, .. }, .. }
            | Self::Step { problem: StepProblem::TimedOut { retry_after: after, .. }, .. } => {
                Disposition::Retry { after: *after }
            }
            // The next delivery runs the step, or pushes the message: the attempt of this delivery has ended.
            Self::Outbox { problem: OutboxProblem::AttemptEnded, .. }
            | Self::Step { problem: StepProblem::AttemptEnded, .. } => {
                Disposition::Retry { after: deployment_pause(self.key()) }
            }
            _ if self.is_misconfigured() => Disposition::Retry { after: deployment_pause(self.key()) },
            // No delivery can finish the operation, so a person must decide about it.
            Self::NoAttempt
            | Self::ResultUnavailable { .. }
            | Self::Step { .. }
            | Self::Outbox { .. }
            | Self::MissingKey { .. }
            | Self::InvalidKey { .. }
            | Self::InvalidFingerprint { .. }
            | Self::InvalidPolicy { .. }
            | Self::FingerprintMismatch { .. }
            | Self::Interrupted { .. }
            | Self::AttemptsExhausted { .. } => Disposition::DeadLetter,
        }
    }

    /// Returns whether the deployment is wrong, as opposed to the message. Examples are a policy that can't be
    /// honoured, two handlers with one scope, `current()` outside of a handler, a return type that no longer decodes
    /// recorded results, or a store with the wrong version, rights or settings. The message is delivered again until
    /// the deployment is fixed.
    pub fn is_misconfigured(&self) -> bool {
        match self {
            Self::NoAttempt | Self::InvalidPolicy { .. } => true,
            Self::InvalidKey { problem, .. } => problem.is_misconfiguration(),
            Self::ResultUnavailable { problem, .. } => problem.is_misconfiguration(),
            Self::Step { problem, .. } => problem.is_misconfiguration(),
            Self::Outbox { problem, .. } => problem.is_misconfiguration(),
            Self::Unsent { reason, .. } => matches!(**reason, UnsentReason::NoSender),
            Self::Store { source, .. } | Self::Unrecorded { source, .. } => {
                source.kind() == StoreErrorKind::Misconfigured
            }
            Self::LeaseLost { source: Some(source), .. } => source.kind() == StoreErrorKind::Misconfigured,
            _ => false,
        }
    }

    /// Returns whether the broker of the messages is away: it did not confirm a message, and did not refuse it.
    pub(crate) fn is_broker_outage(&self) -> bool {
        match self {
            Self::Unsent { reason, .. } => matches!(
                **reason,
                UnsentReason::NotConfirmed { refused: false, .. }
                    | UnsentReason::TimedOut { .. }
                    | UnsentReason::Sending
            ),
            _ => false,
        }
    }

    /// Returns the error of the store, if the store caused this error.
    pub(crate) fn store_error(&self) -> Option<&StoreError> {
        match self {
            Self::Store { source, .. } | Self::Unrecorded { source, .. } => Some(source),
            Self::LeaseLost { source, .. } => source.as_ref(),
            Self::Unsent { reason, .. } => match &**reason {
                UnsentReason::NotMarked(source) | UnsentReason::NotRead(source) => Some(source),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns whether the effect of the operation may have happened although the record does not show the effect. An
    /// alert on uncertain errors is advisable.
    pub fn is_uncertain(&self) -> bool {
        self.doubt().is_some()
    }

    fn doubt(&self) -> Option<Doubt> {
        match self {
            Self::LeaseLost { .. } | Self::Store { started: true, .. } => Some(Doubt::LeaseLost),
            Self::Unrecorded { .. } => Some(Doubt::Unrecorded),
            Self::TimedOut { .. } | Self::Step { problem: StepProblem::TimedOut { .. }, .. } => Some(Doubt::TimedOut),
            Self::Panicked { attempt: Some(_), .. } => Some(Doubt::Panicked),
            Self::MessageLost { attempt: Some(_), .. } | Self::DeadlinePassed { attempt: Some(_), .. } => {
                Some(Doubt::Cancelled)
            }
            Self::Interrupted { .. }
            | Self::Step { problem: StepProblem::Interrupted { .. } | StepProblem::Unresolved { .. }, .. } => {
                Some(Doubt::Interrupted)
            }
            _ => None,
        }
    }

    /// Returns the uncertain operation, for the hook `on_uncertain`; `None` if the error leaves nothing uncertain.
    pub(crate) fn uncertain(&self) -> Option<Uncertain<'_>> {
        let cause = self.doubt()?;
        match self {
            Self::LeaseLost { key, store, attempt, .. }
            | Self::Unrecorded { key, store, attempt, .. }
            | Self::TimedOut { key, store, attempt, .. }
            | Self::Interrupted { key, store, attempt, .. } => Some(Uncertain { key, store, attempt: *attempt, cause }),
            _ => None,
        }
    }
}

/// Next step for a store that refuses until a person has acted.
const CORRECT_STORE: &str = "correct the store or the rights of its login (`idem doctor` finds the problem, and \
    `idem schema migrate` creates a missing table); the message can be delivered again";

impl fmt::Display for Error {
    #[expect(clippy::too_many_lines, reason = "one text for each variant, to be read together")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAttempt => f.write_str(
                "no attempt runs here: `current()` was called outside of the body of an idempotent function, in a task that \
                 the body spawned, or in a run without a key",
            ),
            Self::MissingKey { scope } => write!(
                f,
                "a message for `{scope}` has no idempotency key: the key or a part of it is `None`, empty or blank; \
                 the body did not run; give every message an id, or write `missing_key = run`"
            ),
            Self::InvalidKey { scope, problem: reason } => {
                write!(f, "no valid idempotency key for `{scope}`: {reason}; the body did not run")
            }
            Self::InvalidFingerprint { key, .. } => {
                write!(f, "key `{key}`: the fingerprint can't be computed; the body did not run")
            }
            Self::InvalidPolicy { key, problem: reason } => write!(f, "key `{key}`: {reason}; the body did not run"),
            Self::InProgress { key, store, attempt, retry_after } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} is running; the body did not run; \
                 deliver the message again in {retry_after:?}"
            ),
            Self::FingerprintMismatch { key, store, attempt, payloads } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} had another payload ({payloads}); the body did not run; \
                 either two operations share a key: give each one of its own; or the type of the payload changed with a \
                 deployment, by a new field for example: leave the field out while it is absent \
                 (`skip_serializing_if`), or hash only parts that stay (`fingerprint = (event.id, event.amount)`)"
            ),
            Self::Interrupted { key, store, attempt, ask_again: Some(after) } => write!(
                f,
                "key `{key}` in {store}: the effect of attempt {attempt} is in doubt, and the reconciler does not know yet; the \
                 body did not run; deliver the message again in {after:?}"
            ),
            Self::Interrupted { key, store, attempt, .. } => write!(
                f,
                "key `{key}` in {store}: the effect of attempt {attempt} is in doubt, and no other may run; find out whether it \
                 took effect, then record that with `idem resolve`, or let the next delivery run with `idem reopen` (in code: \
                 `store.operator()`)"
            ),
            Self::AttemptsExhausted { key, store, attempts } => write!(
                f,
                "key `{key}` in {store}: {attempts} attempts have started, as many as `max_attempts` allows; the body \
                 did not run again; `idem reopen` lets the next delivery run (in code: `store.operator().reopen`)"
            ),
            Self::Panicked { key: Some(key), attempt: Some(attempt), .. } => write!(
                f,
                "key `{key}`: the body panicked in attempt {attempt}, and its effects may have happened in part; deliver the \
                 message again, or set it aside if it panics each time"
            ),
            Self::Panicked { .. } => f.write_str(
                "the delivery panicked, and no body was running; deliver the message again, or set it aside if it panics \
                 each time",
            ),
            Self::MessageLost { key: Some(key), attempt: Some(attempt), .. } => write!(
                f,
                "key `{key}`: the broker extends the message no further; attempt {attempt} was cancelled, and its effects may \
                 have happened in part; the next delivery runs it again"
            ),
            Self::MessageLost { .. } => f.write_str(
                "the broker extends the message no further, and the delivery was cancelled; no body was running; the next \
                 delivery runs it",
            ),
            Self::DeadlinePassed { key: Some(key), attempt: Some(attempt), .. } => write!(
                f,
                "key `{key}`: the deadline of the batch passed; attempt {attempt} was cancelled, and its effects may have \
                 happened in part; the next delivery runs it again"
            ),
            Self::DeadlinePassed { .. } => f.write_str(
                "the deadline of the batch passed; no body was running for this message; the next delivery runs it",
            ),
            Self::HeldBack { .. } => f.write_str(
                "a message before this one in its group is not acknowledged, so this one did not begin; deliver it again after \
                 that one",
            ),
            Self::TimedOut { key, store, attempt, timeout, .. } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} ran for longer than its `timeout` of {timeout:?}; the body was \
                 cancelled, and its effects may have happened in part; deliver the message again, or give the handler \
                 more time"
            ),
            Self::LeaseLost { key, store, attempt, source: Some(source), .. } => {
                let next = match source.kind() {
                    StoreErrorKind::Corrupt => {
                        "look at the record with `idem show`, and remove it with `idem forget` once no handler is running for it; until then \
                         no delivery runs"
                    }
                    _ if source.is_for_good() => CORRECT_STORE,
                    StoreErrorKind::Full => "make room in the store; the message can be delivered again",
                    _ => "deliver the message again once the store answers",
                };
                let why = match source.kind() {
                    _ if source.is_for_good() => "its renewal was refused for good",
                    StoreErrorKind::Full => "the store was too full to renew it",
                    _ => "its renewal was not available for too long",
                };
                write!(
                    f,
                    "key `{key}` in {store}: the lease of attempt {attempt} lapsed while the body ran, and {why}; the \
                     body was cancelled, and its effects may have happened in part; {next}"
                )
            }
            Self::LeaseLost { key, store, attempt, source: None, .. } => write!(
                f,
                "key `{key}` in {store}: attempt {attempt} lost its lease while the body ran: another attempt took over, or the \
                 record was removed; its result is not recorded; deliver the message again"
            ),
            Self::Unrecorded { key, store, attempt, retry_after, .. } => write!(
                f,
                "key `{key}` in {store}: the body ran as attempt {attempt}, its result is not recorded; the key is held \
                 for {retry_after:?} more, and under `on_crash = fail` until this process has recorded the result; deliver the \
                 message again after that"
            ),
            Self::ResultUnavailable { key, store, problem: reason, .. } => write!(
                f,
                "key `{key}` in {store}: the operation has finished, but its result can't be replayed: {reason}; \
                 the body did not run again"
            ),
            Self::Step { key, store, step, problem } => write!(f, "key `{key}` in {store}, step `{step}`: {problem}"),
            Self::Outbox { key: Some(key), problem } => {
                write!(f, "key `{key}`: a message is not accepted, and was not sent: {problem}")
            }
            Self::Outbox { problem, .. } => write!(f, "a message is not accepted, and was not sent: {problem}"),
            Self::Unsent { key, store, attempt: 0, reason, .. } => write!(
                f,
                "key `{key}` in {store}: the body ran unprotected, and its messages are not all sent: {reason}; no record \
                 holds them, and only another run of the body pushes them again"
            ),
            Self::Unsent { key, store, attempt, unsent, reason, .. } => {
                let count = unsent.map_or(String::new(), |unsent| format!(" ({unsent})"));
                write!(
                    f,
                    "key `{key}` in {store}: the result of attempt {attempt} is recorded, and its messages{count} are not marked \
                     as sent: {reason}; the body does not run again; deliver the message again: that sends the rest"
                )
            }
            Self::Store { key, store, started: true, .. } => write!(
                f,
                "key `{key}` in {store}: the lease, or the journal entry of a step, could not be confirmed; the body \
                 had started; whether another attempt has taken over is not known"
            ),
            Self::Store { key, store, source, started: false, may_be_reserved, .. } => {
                let left = match may_be_reserved {
                    true => "the key may be reserved until its lease lapses",
                    false => "nothing was written",
                };
                let next = match source.kind() {
                    StoreErrorKind::Corrupt => "look at the record; no delivery runs before it is forgotten",
                    _ if source.is_for_good() => CORRECT_STORE,
                    StoreErrorKind::Full => "make room in the store; the message can be delivered again",
                    _ => "deliver the message again",
                };
                write!(f, "key `{key}` in {store}: the key could not be reserved; the body did not run; {left}; {next}")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::InvalidFingerprint { source, .. }
            | Self::Step { problem: StepProblem::InvalidInputs(source), .. } => Some(source),
            Self::Unrecorded { source, .. }
            | Self::Store { source, .. }
            | Self::LeaseLost { source: Some(source), .. } => Some(source),
            Self::ResultUnavailable {
                problem:
                    ResultProblem::Undecodable { source }
                    | ResultProblem::MigrationFailed { source }
                    | ResultProblem::MigratedUndecodable { source },
                ..
            }
            | Self::Outbox { problem: OutboxProblem::Unencodable(source), .. } => Some(&**source),
            Self::Step { problem: StepProblem::UnreadableJournal(source), .. } => Some(source),
            Self::Unsent { reason, .. } => match &**reason {
                UnsentReason::NotConfirmed { source, .. } => Some(&**source),
                UnsentReason::NotMarked(source) | UnsentReason::NotRead(source) => Some(source),
                _ => None,
            },
            _ => None,
        }
    }
}

impl From<KeyError> for Error {
    fn from(error: KeyError) -> Self {
        match error {
            KeyError { scope, problem: KeyProblem::Missing } => Self::MissingKey { scope },
            KeyError { scope, problem } => Self::InvalidKey { scope, problem },
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::MissingKey { .. }
            | Error::InvalidKey { .. }
            | Error::InvalidFingerprint { .. }
            | Error::InvalidPolicy { .. }
            | Error::FingerprintMismatch { .. } => io::ErrorKind::InvalidInput,
            Error::InProgress { .. } => io::ErrorKind::ResourceBusy,
            Error::ResultUnavailable { .. } => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
