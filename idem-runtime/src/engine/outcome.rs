//! Outcomes of deliveries, and the log of a last delivery.

use std::time::Duration;

use super::budget::{Budget, unreached_calls};
use super::disposition::{DeliveryResult, Verdict, judge};
use super::observed_call::{Commit, NOTHING_KNOWN, ObservedCall, Progress, Refusal, TransactionEnd};
use super::observer::budget;
use crate::error::Disposition;
use crate::key::Key;
use crate::policy::Backoff;

/// Outcome of a delivery; [`observe`](crate::observe) returns it.
///
/// The methods about a call describe the last call, and the [disposition](Outcome::disposition) of the message is about
/// all calls.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    call: ObservedCall,
    disposition: Disposition,
    /// The disposition while the transaction of a call is not committed.
    uncommitted: Disposition,
    pending_commit: bool,
    uncertain: bool,
}

impl Outcome {
    /// Returns the key of the operation, if there is one.
    pub fn key(&self) -> Option<&Key> {
        self.call.key.as_ref()
    }

    /// Returns whether an idempotent function was called. A call in a spawned task is not observed here.
    pub fn observed(&self) -> bool {
        self.call.progress != Progress::None
    }

    /// Returns whether this call ran the body: to its end, or until it was cancelled.
    pub fn executed(&self) -> bool {
        self.call.executed()
    }

    /// Returns whether the call was dropped before it returned, for example by a time-out around it.
    pub fn cancelled(&self) -> bool {
        self.call.cancelled()
    }

    /// Returns whether this call returned a recorded result without running the body.
    pub fn replayed(&self) -> bool {
        matches!(self.call.progress, Progress::Replayed { .. })
    }

    /// Returns whether this call waited for another attempt.
    pub fn waited(&self) -> bool {
        self.call.waited
    }

    /// Returns whether this call took over from an attempt whose lease had lapsed.
    pub fn took_over(&self) -> bool {
        self.call.takeover
    }

    /// Whether the operation is recorded as finished, by this run or by an earlier one. False for a body that ran
    /// unprotected, whose error was released, whose lease was lost, or whose transaction was rolled back or is not
    /// [committed](Outcome::committed) yet.
    pub fn recorded(&self) -> bool {
        self.call.recorded() && !self.depends_on_commit()
    }

    /// Returns whether duplicates can replay the result. False if the result was too large or could not be encoded,
    /// although the completion is [recorded](Outcome::recorded).
    pub fn result_stored(&self) -> bool {
        self.call.result_stored() && !self.depends_on_commit()
    }

    /// Whether the last call wrote to, or read from, a transaction whose commit is still to come.
    fn depends_on_commit(&self) -> bool {
        self.pending_commit && self.call.commit == Commit::Pending
    }

    /// Returns whether the effect of any call may have happened although the record does not show it: the lease was
    /// lost, the result is not recorded, the body was cancelled, or an earlier attempt was interrupted. Alert on it.
    pub fn uncertain(&self) -> bool {
        self.uncertain
    }

    /// Returns whether a mistake of the deployment, and not of the message, kept the body from running.
    pub fn misconfigured(&self) -> bool {
        self.call.misconfigured()
    }

    /// Returns whether a call ran its body in a transaction of the user, so that its record takes effect only at the
    /// commit. Until [`committed`](Outcome::committed) notes the commit, the message is to be delivered again.
    /// `transact` notes the commit; a replay is not pending.
    pub fn is_pending_commit(&self) -> bool {
        self.pending_commit
    }

    /// Marks the transaction of the delivery as committed. Call this after the commit has succeeded.
    #[must_use]
    pub fn committed(mut self) -> Self {
        self.call.settle(TransactionEnd::Committed, true);
        Self { pending_commit: false, ..self }
    }

    /// Returns the number of the attempt that ran under a reservation or is replayed.
    pub fn attempt(&self) -> Option<u32> {
        self.call.attempt
    }

    /// Returns the reason why the call returned an [`Error`](crate::Error) instead of running its body.
    pub fn refusal(&self) -> Option<Refusal> {
        match self.call.progress {
            Progress::Refused { refusal, .. } => Some(refusal),
            _ => None,
        }
    }

    /// Returns the reason why the body would not have run, for a body that did run under
    /// [`Mode::Shadow`](crate::Mode::Shadow) or `on_store_error = run`.
    pub fn bypassed(&self) -> Option<Refusal> {
        self.call.bypassed
    }

    /// Returns the action for the message.
    ///
    /// `DeadLetter` may come with a delivery that returned `Ok`: a call was refused permanently, and the handler
    /// swallowed that error.
    pub fn disposition(&self) -> Disposition {
        match self.disposition {
            Disposition::Ack if self.pending_commit => {
                tracing::warn!(
                    key = self.key().map(tracing::field::display),
                    "the delivery returned `Ok`, and nothing says that its transaction is committed, so the message is \
                     delivered again: use `transact`, or `Outcome::committed` after the commit"
                );
                self.uncommitted
            }
            disposition => disposition,
        }
    }

    /// Computes the outcome of a delivery that made `calls` and returned `returned`.
    pub(super) fn of_delivery(mut calls: Vec<ObservedCall>, returned: DeliveryResult, budget: Budget) -> Self {
        // Leaves out the calls of a transaction's earlier try, which the next try did not make. A transaction that
        // could not begin stays: it may begin later.
        calls.retain(|call| call.progress != Progress::None || call.again.is_some());
        if calls.iter().any(|call| call.key.is_some()) {
            unreached_calls().store_answered();
        }
        if calls.is_empty() {
            tracing::warn!(
                "the observed future called no idempotent function, or called it in a spawned task; the message is \
                 not acknowledged"
            );
        }
        let verdict = judge(calls.iter().map(|call| call.standing(budget)), returned);
        let pending_commit = calls.iter().any(ObservedCall::is_pending);
        let uncertain = calls.iter().any(ObservedCall::uncertain);
        let misconfigured = calls.iter().any(ObservedCall::misconfigured);
        let is_mismatch = calls.iter().any(ObservedCall::is_mismatch);
        let again = calls.iter().filter_map(|call| call.again).max();
        let call = calls.pop().unwrap_or(ObservedCall::NEW);
        let disposition = match verdict {
            Verdict::Ack => Disposition::Ack,
            Verdict::DeadLetter => {
                // It was delivered again until now.
                if is_mismatch && budget.is_last() {
                    log_last_delivery(&call, SetAside::Mismatch);
                }
                Disposition::DeadLetter
            }
            Verdict::Retry(after) => {
                if budget.is_last() {
                    log_last_delivery(&call, if misconfigured { SetAside::Deployment } else { SetAside::Failure });
                }
                budget.retry(after, again, call.key.as_ref())
            }
        };
        let uncommitted = match pending_commit {
            true => {
                let pause = Backoff::DEFAULT.after(call.attempt.unwrap_or(1), call.key.as_ref().map_or(0, Key::seed));
                budget.retry(None, Some(pause), call.key.as_ref())
            }
            false => disposition,
        };
        Self { call, disposition, uncommitted, pending_commit, uncertain }
    }

    /// Returns the outcome of a delivery that did not begin, and may begin `after` that time.
    pub(crate) fn not_begun(after: Option<Duration>) -> Self {
        let disposition = budget().retry(None, after, None);
        let (call, uncommitted) = (ObservedCall::NEW, disposition);
        Self { call, disposition, uncommitted, pending_commit: false, uncertain: false }
    }

    /// Returns the time until the message is delivered again.
    pub(super) fn retry_after(&self) -> Duration {
        match self.disposition {
            Disposition::Retry { after } => after,
            Disposition::Ack | Disposition::DeadLetter => NOTHING_KNOWN,
        }
    }
}

/// Why a message is set aside with its last delivery.
#[derive(Clone, Copy)]
enum SetAside {
    /// Its deliveries failed.
    Failure,
    /// The deployment is wrong, and not the message.
    Deployment,
    /// The payload is another one than that of its key, or its type has changed: the fingerprints do not say which.
    Mismatch,
}

/// Logs that a message is set aside because its broker delivers it no more.
fn log_last_delivery(call: &ObservedCall, why: SetAside) {
    let key = call.key.as_ref().map(tracing::field::display);
    match why {
        SetAside::Deployment => tracing::error!(
            key,
            "the last delivery of a message failed for a mistake of the deployment, not of the message: it is set aside; \
             correct the deployment, then deliver what was set aside again"
        ),
        SetAside::Mismatch => tracing::error!(
            key,
            "the last delivery of a message had another payload than its key, and it is set aside. If two operations share \
             the key, give each one of its own. If the type of the payload changed with a deployment, go back to a fingerprint \
             that stays (`skip_serializing_if`, or only some parts), then deliver what was set aside again"
        ),
        SetAside::Failure => tracing::warn!(
            key,
            "the last delivery of a message failed, and it is set aside: the events of its call say why; once that is \
             corrected, deliver it again"
        ),
    }
}
