//! Outcomes of deliveries, and log lines about last deliveries.

use std::time::Duration;

use super::budget::{Budget, unreached_calls};
use super::disposition::{DeliveryResult, Verdict, judge};
use super::observed_call::{Commit, NOTHING_KNOWN, ObservedCall, Progress, Refusal, TransactionEnd};
use super::observer::budget;
use crate::error::Disposition;
use crate::key::Key;
use crate::policy::Backoff;

/// Outcome of a delivery, as [`observe`](crate::observe) returns it.
///
/// The methods about a call describe the last call. The [disposition](Outcome::disposition) of the message depends on
/// all calls.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the answers to independent questions")]
pub struct Outcome {
    call: ObservedCall,
    disposition: Disposition,
    /// Disposition of the message until [`committed`](Self::committed) records the commit of the user's transaction;
    /// `None` if no commit is pending.
    uncommitted: Option<Disposition>,
    uncertain: bool,
    steps_in_doubt: u32,
    store_failed: bool,
    unsent: bool,
    is_last_delivery: bool,
    delivery: Option<u32>,
}

impl Outcome {
    /// Returns the key of the operation, if the operation has a key.
    pub fn key(&self) -> Option<&Key> {
        self.call.key.as_ref()
    }

    /// Returns whether the delivery called an idempotent function. A call in a spawned task is not observed here.
    pub fn observed(&self) -> bool {
        self.call.progress != Progress::None
    }

    /// Returns whether the last call started its body. The body may have been cancelled later.
    pub fn executed(&self) -> bool {
        self.call.executed()
    }

    /// Returns whether the last call was dropped before it returned, for example by a time-out around it.
    pub fn cancelled(&self) -> bool {
        self.call.cancelled()
    }

    /// Returns whether the last call returned a recorded result without running the body.
    pub fn replayed(&self) -> bool {
        matches!(self.call.progress, Progress::Replayed { .. })
    }

    /// Returns whether the reconciler of the last call supplied the result
    /// ([`Reconciliation::Done`](crate::Reconciliation::Done)), so that the body did not run. The call still returns
    /// [`Error::Unrecorded`](crate::Error::Unrecorded) if this result could not be recorded.
    pub fn reconciled(&self) -> bool {
        self.call.reconciled
    }

    /// Returns whether the last call waited for another attempt.
    pub fn waited(&self) -> bool {
        self.call.waited
    }

    /// Returns whether the last call took over from an attempt whose lease had lapsed.
    pub fn took_over(&self) -> bool {
        self.call.takeover
    }

    /// Returns whether the operation is recorded as finished, by this run or by an earlier run. False for a body that
    /// ran unprotected, whose error was released, whose lease was lost, or whose transaction was rolled back or is not
    /// [committed](Outcome::committed) yet.
    pub fn recorded(&self) -> bool {
        self.call.recorded() && !self.depends_on_commit()
    }

    /// Returns whether duplicates can replay the result. False if the result was too large or could not be encoded; the
    /// completion is then [recorded](Outcome::recorded) without the result.
    pub fn result_stored(&self) -> bool {
        self.call.result_stored() && !self.depends_on_commit()
    }

    /// Returns whether the last call wrote or read its record in a transaction that is not committed yet.
    fn depends_on_commit(&self) -> bool {
        self.is_pending_commit() && self.call.commit == Commit::Pending
    }

    /// Returns whether the effect of any call may have happened although the record does not show it: the lease was
    /// lost, the result is not recorded, the body was cancelled, an earlier attempt was interrupted, or a
    /// [step is in doubt](Outcome::steps_in_doubt). An alert on this value is advisable.
    pub fn uncertain(&self) -> bool {
        self.uncertain
    }

    /// Returns the number of [steps](crate::Attempt::step) that the calls of the delivery have left in doubt: the
    /// effect may have happened, and the journal does not say so. The body of such a step has begun, and was dropped
    /// (by `select!`, by a time-out, or with its call), ran into its time limit, panicked, or returned an uncertain
    /// error; or the store has not confirmed its end; or the step was in doubt before, and is not decided yet.
    ///
    /// A step without `.fail()` and `.reconcile(…)` counts, too: the next attempt runs it again. The number is also
    /// above zero if the handler returned `Ok` although it had dropped a step. Steps that are not journaled (without a
    /// reservation, in shadow mode) and steps [within](crate::step::StepBuilder::within) a transaction do not count.
    ///
    /// The number is the sum over all attempts of the delivery. The observed future must own its calls: a call behind a
    /// reference ends after the observation, and its steps do not count. A step that was dropped after its body had
    /// returned counts, although [`StepPolicy::keep`](crate::policy::StepPolicy::keep) may have kept its value.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::{Error, MemoryStore, current, idempotent, observe};
    /// # async fn quote(_: u32) -> Result<u32, Error> { std::future::pending().await }
    /// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// async fn ship(store: &MemoryStore, id: u32) -> Result<Option<u32>, Error> {
    ///     let rate = current()?.step("rate").run(async |_| quote(id).await);
    ///     // The carrier is slow, so the order is shipped without a rate.
    ///     Ok(tokio::time::timeout(Duration::from_millis(1), rate).await.ok().transpose()?)
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// let (shipped, outcome) = observe(ship(&MemoryStore::new(), 42)).await;
    /// assert_eq!(shipped.unwrap(), None);
    /// assert_eq!(outcome.steps_in_doubt(), 1);
    /// assert!(outcome.recorded() && outcome.uncertain());
    /// # });
    /// ```
    pub fn steps_in_doubt(&self) -> u32 {
        self.steps_in_doubt
    }

    /// Returns whether the operation of a call has finished, and not all of its [messages](crate::Attempt::outbox) are
    /// marked as sent. Another delivery sends the rest; if there is none, a [`Resender`](crate::outbox::Resender) does.
    pub fn unsent(&self) -> bool {
        self.unsent
    }

    /// Returns whether a call of the delivery failed because the store did not answer, or because the broker of its
    /// [messages](crate::Attempt::outbox) did not. Such a delivery says nothing about the message: if the consumer
    /// counts the deliveries itself, leave this delivery out of the count.
    pub fn store_failed(&self) -> bool {
        self.store_failed
    }

    /// Returns the number of the delivery, as [`Observe::delivery`](crate::future::Observe::delivery) has set it.
    pub fn delivery(&self) -> Option<u32> {
        self.delivery
    }

    /// Returns whether the broker does not deliver the message again, as
    /// [`Observe::delivery_limit`](crate::future::Observe::delivery_limit) has set it.
    pub(crate) fn is_last_delivery(&self) -> bool {
        self.is_last_delivery
    }

    /// Returns whether the deployment, as opposed to the message, is the reason why the body did not run.
    pub fn misconfigured(&self) -> bool {
        self.call.misconfigured()
    }

    /// Returns whether a call ran its body in a transaction of the user, so that its record takes effect only at the
    /// commit. Until [`committed`](Outcome::committed) records the commit, the disposition is a redelivery. `transact`
    /// records the commit itself. A replay is not pending.
    pub fn is_pending_commit(&self) -> bool {
        self.uncommitted.is_some()
    }

    /// Records that the transaction of the delivery is committed. Call this method after the commit has succeeded.
    #[must_use]
    pub fn committed(mut self) -> Self {
        self.call.settle(TransactionEnd::Committed, true);
        Self { uncommitted: None, ..self }
    }

    /// Returns the number of the attempt that ran under a reservation, or of the attempt whose result was replayed.
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

    /// Returns the reason why the body would not have run, if the body ran only because of
    /// [`Mode::Shadow`](crate::Mode::Shadow) or `on_store_error = run`.
    pub fn bypassed(&self) -> Option<Refusal> {
        self.call.bypassed
    }

    /// Returns what to do with the message.
    ///
    /// A delivery that returned `Ok` may get `DeadLetter`: a call was refused permanently, and the handler swallowed
    /// that error.
    pub fn disposition(&self) -> Disposition {
        match (self.disposition, self.uncommitted) {
            (Disposition::Ack, Some(uncommitted)) => {
                tracing::warn!(
                    key = self.key().map(tracing::field::display),
                    "the delivery returned `Ok`, and nothing says that its transaction is committed, so the message is \
                     delivered again: use `transact`, or `Outcome::committed` after the commit"
                );
                uncommitted
            }
            (disposition, _) => disposition,
        }
    }

    /// Computes the outcome of a delivery that made `calls`, left `steps_in_doubt` steps in doubt, and returned
    /// `returned`.
    pub(super) fn of_delivery(
        mut calls: Vec<ObservedCall>,
        steps_in_doubt: u32,
        returned: DeliveryResult,
        budget: Budget,
    ) -> Self {
        // Calls of an earlier try of a transaction are left out unless the last try repeated them. A transaction that
        // could not begin is kept, because it may begin later.
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
        let uncertain = steps_in_doubt > 0 || calls.iter().any(ObservedCall::uncertain);
        let misconfigured = calls.iter().any(ObservedCall::misconfigured);
        let store_failed = calls.iter().any(ObservedCall::store_failed);
        let unsent = calls.iter().any(ObservedCall::unsent);
        let is_mismatch = calls.iter().any(ObservedCall::is_mismatch);
        let again = calls.iter().filter_map(|call| call.again).max();
        let call = calls.pop().unwrap_or(ObservedCall::NEW);
        let disposition = match verdict {
            Verdict::Ack => Disposition::Ack,
            Verdict::DeadLetter => {
                // A fingerprint mismatch is logged only in the last delivery: in earlier deliveries it led to
                // a redelivery.
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
        let uncommitted = pending_commit.then(|| {
            let pause = Backoff::DEFAULT.after(call.attempt.unwrap_or(1), call.key.as_ref().map_or(0, Key::seed));
            budget.retry(None, Some(pause), call.key.as_ref())
        });
        let (is_last_delivery, delivery) = (budget.is_last(), budget.number());
        Self {
            call,
            disposition,
            uncommitted,
            uncertain,
            steps_in_doubt,
            store_failed,
            unsent,
            is_last_delivery,
            delivery,
        }
    }

    /// Returns the outcome of a delivery that did not begin, and may begin after the time `after`.
    pub(crate) fn not_begun(after: Option<Duration>) -> Self {
        let budget = budget();
        let disposition = budget.retry(None, after, None);
        Self {
            call: ObservedCall::NEW,
            disposition,
            uncommitted: None,
            uncertain: false,
            steps_in_doubt: 0,
            store_failed: true,
            unsent: false,
            is_last_delivery: budget.is_last(),
            delivery: budget.number(),
        }
    }

    /// Returns the time until the message is delivered again.
    pub(super) fn retry_after(&self) -> Duration {
        match self.disposition {
            Disposition::Retry { after } => after,
            Disposition::Ack | Disposition::DeadLetter => NOTHING_KNOWN,
        }
    }
}

/// Reason why a message is set aside in its last delivery.
#[derive(Clone, Copy)]
enum SetAside {
    /// The deliveries of the message failed.
    Failure,
    /// The deployment is wrong, as opposed to the message.
    Deployment,
    /// The payload differs from the recorded one, or its type has changed: fingerprints can't distinguish the two
    /// cases.
    Mismatch,
}

/// Logs that a message is set aside, because its broker does not deliver it again.
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
