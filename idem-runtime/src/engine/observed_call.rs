//! Calls of observed deliveries, and the reasons why a call did not run its body.

use std::time::Duration;

use super::budget::Budget;
use super::disposition::Standing;
use crate::error::{Disposition, Error, deployment_pause};
use crate::key::Key;
use crate::policy::Backoff;
use crate::store::StoreErrorKind;

/// Reason why a call did not run its body. In shadow mode the body runs, and the refusal is the reason why the body
/// would not have run under [`Mode::Enforce`](crate::Mode::Enforce).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// The operation had finished: outside of shadow mode its result would have been replayed.
    Replay,
    /// Another attempt was running.
    InProgress,
    /// The key was used with another payload.
    FingerprintMismatch,
    /// An earlier run had been interrupted.
    Interrupted,
    /// The number of started attempts had reached `max_attempts`.
    AttemptsExhausted,
    /// The key was missing.
    MissingKey,
    /// The key was not valid.
    InvalidKey,
    /// The payload could not be hashed.
    InvalidFingerprint,
    /// The policy could not be honoured.
    InvalidPolicy,
    /// The operation had finished, and its result can't be replayed.
    ResultUnavailable,
    /// The store could not reserve the key.
    Store,
}

impl Refusal {
    /// Returns the refusal that `error` reports; `None` if the body had started.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        match error {
            Error::InProgress { .. } => Some(Self::InProgress),
            Error::FingerprintMismatch { .. } => Some(Self::FingerprintMismatch),
            Error::Interrupted { .. } => Some(Self::Interrupted),
            Error::AttemptsExhausted { .. } => Some(Self::AttemptsExhausted),
            Error::ResultUnavailable { .. } => Some(Self::ResultUnavailable),
            Error::Store { started: false, .. } => Some(Self::Store),
            Error::NoAttempt
            | Error::Step { .. }
            | Error::Outbox { .. }
            | Error::Unsent { .. }
            | Error::LeaseLost { .. }
            | Error::Unrecorded { .. }
            | Error::TimedOut { .. }
            | Error::Panicked { .. }
            | Error::MessageLost { .. }
            | Error::DeadlinePassed { .. }
            | Error::HeldBack { .. }
            | Error::Store { started: true, .. } => None,
            Error::MissingKey { .. } => Some(Self::MissingKey),
            Error::InvalidKey { .. } => Some(Self::InvalidKey),
            Error::InvalidFingerprint { .. } => Some(Self::InvalidFingerprint),
            Error::InvalidPolicy { .. } => Some(Self::InvalidPolicy),
        }
    }
}

/// Progress of a call, from its first poll to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// The call has not begun.
    None,
    /// The key is being reserved.
    Reserving,
    /// The body is running.
    Running,
    /// The result of the body is being recorded.
    Recording,
    /// The body returned.
    Returned { is_ok: bool, kept: RecordedPart },
    /// A recorded result was returned, and the body did not run.
    Replayed { is_ok: bool },
    /// The body did not run.
    Refused { refusal: Refusal, error: ErrorFacts },
    /// The body started, and the record does not hold its end: the lease was lost, the time limit was over, or the
    /// store did not answer.
    Unrecorded { error: ErrorFacts },
    /// The operation has finished, and not all of its messages are marked as sent. `ran`: the body of this call ran.
    /// `kept`: what the record holds, which is nothing without a reservation.
    Unsent { ran: bool, kept: RecordedPart, error: ErrorFacts },
}

/// Part of the returned result that the record holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RecordedPart {
    /// No part: the key is free, or the body ran unprotected.
    Nothing,
    /// The completion, without the result.
    Completion,
    /// The result.
    Result,
}

/// Disposition of a call's [`Error`], and whether the deployment, the store or the broker of its messages caused the
/// error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ErrorFacts {
    pub(crate) disposition: Disposition,
    pub(crate) misconfigured: bool,
    pub(crate) store_failed: bool,
}

impl ErrorFacts {
    pub(crate) fn of(error: &Error) -> Self {
        // An unreadable record is an answer of the store, so the store did not fail.
        let store_failed = error.store_error().is_some_and(|source| source.kind() != StoreErrorKind::Corrupt)
            || error.is_broker_outage();
        Self { disposition: error.disposition(), misconfigured: error.is_misconfigured(), store_failed }
    }
}

/// State of the transaction in which the record of a call was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Commit {
    /// The record has taken effect. Outside of a transaction a record takes effect when it is written, in a transaction
    /// at the commit.
    Done,
    /// The transaction is still open.
    Pending,
    /// The transaction was not committed, so the writes of the call are undone.
    RolledBack,
}

/// Settlement of a doubt that the body of a call has reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReportedDoubt {
    /// The next delivery asks the reconciler.
    ForReconciler,
    /// An operator has to decide.
    ForOperator,
}

/// One call of a delivery.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ObservedCall {
    pub(crate) key: Option<Key>,
    pub(crate) progress: Progress,
    pub(crate) waited: bool,
    pub(crate) takeover: bool,
    pub(crate) commit: Commit,
    pub(crate) attempt: Option<u32>,
    pub(crate) bypassed: Option<Refusal>,
    /// True if the result is the answer of the reconciler.
    pub(crate) reconciled: bool,
    /// Set if the body returned an error whose effect is in doubt.
    pub(crate) reported: Option<ReportedDoubt>,
    /// Time until a redelivery of the message is likely to succeed, if known.
    pub(crate) again: Option<Duration>,
}

/// Pause before a message is delivered again if no better pause is known.
pub(super) const NOTHING_KNOWN: Duration = Duration::from_secs(1);

impl ObservedCall {
    /// Initial state of a call, before it begins.
    pub(crate) const NEW: Self = Self {
        key: None,
        progress: Progress::None,
        waited: false,
        takeover: false,
        commit: Commit::Done,
        attempt: None,
        bypassed: None,
        reconciled: false,
        reported: None,
        again: None,
    };

    /// Returns the standing of the call. An open transaction counts as committed. If the transaction was rolled back
    /// already, returns the standing after the rollback.
    pub(super) fn standing(&self, budget: Budget) -> Standing {
        match (self.commit, self.standing_once_committed()) {
            (Commit::RolledBack, Standing::Finished(_)) => Standing::MayPass(None),
            // A mismatch of fingerprints may mean another payload, or a payload whose type changed with a deployment.
            // In the second case a later delivery may succeed.
            (_, Standing::RefusedForGood) if self.is_mismatch() && budget.has_more() => {
                Standing::MayPass(Some(deployment_pause(self.key.as_ref())))
            }
            (_, standing) => standing,
        }
    }

    pub(super) fn is_mismatch(&self) -> bool {
        matches!(self.progress, Progress::Refused { refusal: Refusal::FingerprintMismatch, .. })
    }

    fn standing_once_committed(&self) -> Standing {
        match self.progress {
            Progress::Returned { is_ok: true, .. } | Progress::Replayed { is_ok: true } => Standing::Finished(None),
            Progress::Returned { is_ok: false, kept: RecordedPart::Completion | RecordedPart::Result }
            | Progress::Replayed { is_ok: false } => Standing::Finished(Some(Disposition::DeadLetter)),
            // The operation has finished; the error means only that its result can't be replayed.
            Progress::Refused { refusal: Refusal::ResultUnavailable, error } => {
                Standing::Finished(Some(error.disposition))
            }
            Progress::Refused { error, .. } | Progress::Unrecorded { error } | Progress::Unsent { error, .. } => {
                match error.disposition {
                    Disposition::Retry { after } => Standing::MayPass(Some(after)),
                    Disposition::DeadLetter | Disposition::Ack => Standing::RefusedForGood,
                }
            }
            Progress::Returned { is_ok: false, kept: RecordedPart::Nothing }
                if self.reported == Some(ReportedDoubt::ForOperator) =>
            {
                Standing::RefusedForGood
            }
            Progress::Returned { is_ok: false, kept: RecordedPart::Nothing }
            | Progress::None
            | Progress::Reserving
            | Progress::Running
            | Progress::Recording => Standing::MayPass(self.again),
        }
    }

    /// Returns the disposition of a message whose delivery made only this call, and returned the result of the call.
    pub(super) fn disposition(&self) -> Disposition {
        match self.standing_once_committed() {
            Standing::Finished(error) => error.unwrap_or(Disposition::Ack),
            Standing::RefusedForGood => Disposition::DeadLetter,
            Standing::MayPass(after) => Disposition::Retry { after: after.unwrap_or(NOTHING_KNOWN) },
        }
    }

    /// Returns whether the operation of the call has finished with an error, which its delivery may return.
    pub(super) fn ends_with_final_error(&self) -> bool {
        matches!(self.standing_once_committed(), Standing::Finished(Some(_)))
    }

    pub(super) fn executed(&self) -> bool {
        !self.reconciled
            && match self.progress {
                Progress::Running | Progress::Recording | Progress::Returned { .. } | Progress::Unrecorded { .. } => {
                    true
                }
                Progress::Unsent { ran, .. } => ran,
                Progress::None | Progress::Reserving | Progress::Replayed { .. } | Progress::Refused { .. } => false,
            }
    }

    /// Returns whether the call has begun and has not returned.
    pub(super) fn cancelled(&self) -> bool {
        matches!(self.progress, Progress::Reserving | Progress::Running | Progress::Recording)
    }

    /// Returns whether the effect of the operation may have happened although the record does not show the effect.
    /// Assumes that the call is not polled again.
    pub(super) fn uncertain(&self) -> bool {
        match self.progress {
            Progress::Running
            | Progress::Recording
            | Progress::Unrecorded { .. }
            | Progress::Refused { refusal: Refusal::Interrupted, .. } => true,
            Progress::Returned { .. } => self.reported.is_some(),
            Progress::None
            | Progress::Reserving
            | Progress::Replayed { .. }
            | Progress::Unsent { .. }
            | Progress::Refused { .. } => false,
        }
    }

    pub(super) fn misconfigured(&self) -> bool {
        match self.progress {
            Progress::Refused { error, .. } | Progress::Unrecorded { error } | Progress::Unsent { error, .. } => {
                error.misconfigured
            }
            _ => false,
        }
    }

    pub(super) fn store_failed(&self) -> bool {
        match self.progress {
            Progress::Refused { error, .. } | Progress::Unrecorded { error } | Progress::Unsent { error, .. } => {
                error.store_failed
            }
            _ => false,
        }
    }

    pub(super) fn recorded(&self) -> bool {
        let recorded = match self.progress {
            Progress::Returned { kept, .. } | Progress::Unsent { kept, .. } => kept != RecordedPart::Nothing,
            Progress::Replayed { .. } | Progress::Refused { refusal: Refusal::ResultUnavailable, .. } => true,
            _ => false,
        };
        recorded && self.commit != Commit::RolledBack
    }

    /// Returns whether the operation has finished, and not all of its messages are marked as sent.
    pub(super) fn unsent(&self) -> bool {
        matches!(self.progress, Progress::Unsent { .. })
    }

    pub(super) fn result_stored(&self) -> bool {
        let stored = matches!(
            self.progress,
            Progress::Returned { kept: RecordedPart::Result, .. }
                | Progress::Unsent { kept: RecordedPart::Result, .. }
                | Progress::Replayed { .. }
        );
        stored && self.commit != Commit::RolledBack
    }

    /// Returns whether the record takes effect only with the commit of a user's transaction. Returns false for a
    /// replay, because the replayed result is committed already, or the call that recorded the result is pending.
    pub(super) fn is_pending(&self) -> bool {
        self.commit == Commit::Pending && self.executed()
    }

    /// Applies the end of a transaction to the call. `of_transaction` is true if that transaction contains the record
    /// of the call.
    pub(super) fn settle(&mut self, settled: TransactionEnd, of_transaction: bool) {
        if self.commit != Commit::Pending {
            return;
        }
        let failed = self.recorded() && self.ends_with_final_error();
        self.commit = match settled {
            TransactionEnd::RolledBack { failures_recorded } if of_transaction && !(failed && failures_recorded) => {
                let attempt = self.attempt.unwrap_or(1);
                let pause = Backoff::DEFAULT.after(attempt, self.key.as_ref().map_or(0, Key::seed));
                self.again = self.again.max(Some(pause));
                Commit::RolledBack
            }
            _ => Commit::Done,
        };
    }
}

/// End of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "within"), expect(dead_code, reason = "no transactions"))]
pub(crate) enum TransactionEnd {
    Committed,
    /// The transaction was committed, and not all messages of its calls are marked as sent.
    Unsent(ErrorFacts),
    /// The transaction was rolled back. `failures_recorded` is true if the errors that the calls had recorded in this
    /// transaction were recorded again in a separate transaction.
    RolledBack {
        failures_recorded: bool,
    },
    /// The transaction could not begin. A new try may succeed after this time.
    NotBegun {
        again: Duration,
    },
}
