//! Description of a step: its options, and what it runs.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::doubt::{Always, FailOnDoubt, Irreversible, Never, ReconcileOnDoubt, RerunOnDoubt, StepDoubt, UncertainIf};
use super::name::{Step, StepFacts, StepName};
#[cfg(feature = "within")]
use super::run::CommittedStep;
use super::run::{Retries, StepOptions, StepStart, is_uncertain, start};
use crate::codec::{Codec, Json};
use crate::engine::attempt::Attempt;
use crate::engine::poll_notes::note_journaled;
use crate::engine::reconciliation::Reconciliation;
use crate::error::Error;
use crate::key::Fingerprint;
use crate::policy::{Backoff, OnUndecodable, StepPolicy};
use crate::store::JournalAccess;

impl Attempt {
    /// Begins the description of a step: a part of the handler whose value is journaled in the record.
    ///
    /// If an attempt crashes, or returns an error, the next attempt gets the values of the steps that have ended, and
    /// does not run them again. Steps are found by their names: the code between steps runs again, steps may change
    /// their order between two versions of the handler, and `join!`, `select!` and loops are allowed. An attempt uses
    /// each name for one step; a step of a loop has a name and a key: `("reserve", line.sku)`.
    ///
    /// The effect of a step that was cut off between its effect and its journal entry is *in doubt*. By default the
    /// step runs again: its body hands [`Step::child_key`] to the other system, which then recognises the repetition.
    /// [`fail`](StepBuilder::fail) and [`reconcile`](StepBuilder::reconcile) are the other reactions.
    ///
    /// Without a reservation ([`is_protected`](Self::is_protected) returns false), and in shadow mode, a step runs its
    /// body and journals nothing.
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, current, idempotent};
    /// # use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    /// static CHARGES: AtomicU32 = AtomicU32::new(0);
    ///
    /// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// async fn fulfil(store: &MemoryStore, id: u32) -> Result<String, Error> {
    ///     let attempt = current()?;
    ///     let charge: u32 = attempt.step("charge").run(async |_| Ok::<_, Error>(CHARGES.fetch_add(1, Relaxed))).await?;
    ///     if attempt.number() == 1 {
    ///         return Err(Error::NoAttempt); // The parcel service is down.
    ///     }
    ///     Ok(format!("charge {charge}, parcel of attempt {}", attempt.number()))
    /// }
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// # let store = MemoryStore::new();
    /// assert!(fulfil(&store, 42).await.is_err());
    /// assert_eq!(fulfil(&store, 42).await.unwrap(), "charge 0, parcel of attempt 2");
    /// assert_eq!(CHARGES.load(Relaxed), 1);
    /// # });
    /// ```
    pub fn step(&self, name: impl Into<StepName>) -> StepBuilder {
        let step = StepFacts { attempt: self.clone(), name: name.into(), was: None };
        let options = StepOptions { step, inputs: None, timeout: None, on_undecodable: OnUndecodable::Error };
        StepBuilder { options: Box::new(options), doubt: RerunOnDoubt, uncertain: Never, codec: PhantomData }
    }

    /// Sets the limits of the journal of this attempt, and what becomes of the journal. Call this method in the body of
    /// the handler, before its first step. Without a reservation and in shadow mode the policy has no effect.
    pub fn set_step_policy(&self, policy: StepPolicy) {
        if self.is_protected()
            && let JournalAccess::On(journal) = self.store.context().leases().journal(self.lease.owner)
        {
            journal.set_policy(policy);
            if policy.keep {
                // Steps may run in other tasks, whose notes do not reach the end of the attempt.
                note_journaled();
            }
        }
    }
}

/// Description of a step, which [`run`](Self::run) runs.
#[must_use = "a step does nothing until it is run"]
pub struct StepBuilder<D = RerunOnDoubt, U = Never, C = Json> {
    /// Boxed: the futures of a handler hold several copies.
    options: Box<StepOptions>,
    doubt: D,
    uncertain: U,
    codec: PhantomData<fn() -> C>,
}

impl<D, U, C> fmt::Debug for StepBuilder<D, U, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StepBuilder").field(&self.options.step).finish()
    }
}

impl<C> StepBuilder<RerunOnDoubt, Never, C> {
    /// Marks the step as one whose effect can't be undone. Such a step must name its reaction to a doubt: without
    /// [`fail`](Self::fail) or [`reconcile`](Self::reconcile), `run` does not compile. Each error of the body leaves
    /// the effect in doubt, unless [`uncertain_errors_if`](Self::uncertain_errors_if) selects the errors that do.
    ///
    /// ```compile_fail
    /// # use idem_runtime::{Error, current};
    /// # async fn body() -> Result<(), Error> {
    /// current()?.step("wire").irreversible().run(async |_| Ok::<(), Error>(())).await // does not compile
    /// # }
    /// ```
    pub fn irreversible(self) -> StepBuilder<Irreversible, Always, C> {
        self.with(|_, _| (Irreversible, Always))
    }
}

#[cfg(feature = "within")]
impl StepBuilder {
    /// Takes the name of a step whose entry is a record in a transaction. Returns the value of the step instead if an
    /// earlier attempt has journaled it.
    pub(crate) async fn begin<T: DeserializeOwned>(self) -> Result<Result<T, CommittedStep>, Error> {
        CommittedStep::begin(*self.options).await
    }
}

impl<D, U, C> StepBuilder<D, U, C> {
    /// Returns this description with other types: `change` gets the reaction to a doubt, and the rule for uncertain
    /// errors.
    fn with<D2, U2, C2>(self, change: impl FnOnce(D, U) -> (D2, U2)) -> StepBuilder<D2, U2, C2> {
        let (doubt, uncertain) = change(self.doubt, self.uncertain);
        StepBuilder { options: self.options, doubt, uncertain, codec: PhantomData }
    }

    /// Sets the codec of the value (default: [`Json`]). A value that another codec of the library has journaled is read
    /// as well, as for [results](Codec).
    ///
    /// ```
    /// # use idem_runtime::{Error, current};
    /// # #[cfg(feature = "postcard")]
    /// # async fn body() -> Result<Vec<u64>, Error> {
    /// use idem_runtime::Postcard;
    ///
    /// current()?.step("rows").codec::<Postcard>().run(async |_| Ok::<_, Error>(vec![1_u64, 2, 3])).await
    /// # }
    /// ```
    pub fn codec<C2: Codec>(self) -> StepBuilder<D, U, C2> {
        self.with(|doubt, uncertain| (doubt, uncertain))
    }

    /// Adds the fingerprint of the inputs. If an earlier attempt has journaled the step with other inputs, or without
    /// inputs, the step fails with [`StepProblem::OtherInputs`](crate::step::StepProblem::OtherInputs).
    pub fn fingerprint<F: Serialize + ?Sized>(mut self, inputs: &F) -> Self {
        self.options.inputs = Some(Fingerprint::of(inputs));
        self
    }

    /// Names the step as it was named before a renaming. The step continues with the journal entry of the old name, and
    /// keeps the [child key](Step::child_key) of the old name, so that other systems recognise a repetition. Without
    /// `was`, a renamed step is a new step.
    pub fn was(mut self, name: impl Into<StepName>) -> Self {
        self.options.step.was = Some(name.into());
        self
    }

    /// Limits the time of the body, for each try of [`retry`](Self::retry). The body is dropped at the limit, and the
    /// step fails with [`StepProblem::TimedOut`](crate::step::StepProblem::TimedOut). The effect is then in doubt.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.options.timeout = Some(timeout);
        self
    }

    /// Sets the reaction to a journaled value that does not decode as the type of the step (default: an error).
    pub fn on_undecodable(mut self, on_undecodable: OnUndecodable) -> Self {
        self.options.on_undecodable = on_undecodable;
        self
    }

    /// Runs no further body while the effect of the step is in doubt: the effect happens at most once.
    ///
    /// The beginning of the body is journaled before the body runs, which is a second write of the step. If a later
    /// attempt finds the beginning without an end, the step fails with
    /// [`StepProblem::Interrupted`](crate::step::StepProblem::Interrupted), and the operation is interrupted if the
    /// handler returns an error. `idem resolve --step` then records whether the effect happened.
    pub fn fail(self) -> StepBuilder<FailOnDoubt, U, C> {
        self.with(|_, uncertain| (FailOnDoubt, uncertain))
    }

    /// Asks `reconciler` whether the effect has happened, before the body may run again. See [`Reconciliation`] for the
    /// answers.
    ///
    /// The beginning of the body is journaled before the body runs, which is a second write of the step. If a later
    /// attempt finds the beginning without an end, it asks the reconciler. [`Reconciliation::Unknown`] ends the step
    /// with [`StepProblem::Unresolved`](crate::step::StepProblem::Unresolved): the message is delivered again, and the
    /// next attempt asks again. An attempt that asks counts against `max_attempts`.
    ///
    /// ```
    /// # use idem_runtime::{Error, MemoryStore, Reconciliation, current, idempotent};
    /// # struct Carrier;
    /// # impl Carrier {
    /// #     async fn book(&self, key: String) -> Result<String, Error> { Ok(key) }
    /// #     async fn find(&self, _: String) -> Result<Option<String>, Error> { Ok(None) }
    /// # }
    /// #[idempotent(key = "order:{id}", ttl = "7d", store = store)]
    /// async fn ship(store: &MemoryStore, carrier: &Carrier, id: u32) -> Result<String, Error> {
    ///     let book = current()?.step("book").reconcile(async |step| {
    ///         Ok(match carrier.find(step.child_key()).await? {
    ///             Some(parcel) => Reconciliation::Done(parcel),
    ///             // The carrier accepts a booking within its connection only, which has ended.
    ///             None => Reconciliation::NotDone,
    ///         })
    ///     });
    ///     book.run(async |step| carrier.book(step.child_key()).await).await
    /// }
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// # assert_eq!(ship(&MemoryStore::new(), &Carrier, 1).await.unwrap().len(), 36);
    /// # });
    /// ```
    pub fn reconcile<F, T, E, Fut>(self, reconciler: F) -> StepBuilder<ReconcileOnDoubt<F>, U, C>
    where
        F: FnOnce(Step) -> Fut,
        Fut: Future<Output = Result<Reconciliation<T>, E>>,
    {
        self.with(|_, uncertain| (ReconcileOnDoubt(reconciler), uncertain))
    }

    /// Leaves the effect in doubt after each error of the body: a request that timed out may have arrived. Has an
    /// effect with [`fail`](Self::fail) and [`reconcile`](Self::reconcile) only.
    pub fn uncertain_errors(self) -> StepBuilder<D, Always, C> {
        self.with(|doubt, _| (doubt, Always))
    }

    /// Leaves the effect in doubt after the errors of the body for which `is_uncertain` returns true (default: after no
    /// error). Has an effect with [`fail`](Self::fail) and [`reconcile`](Self::reconcile) only.
    pub fn uncertain_errors_if<E, F: Fn(&E) -> bool>(self, is_uncertain: F) -> StepBuilder<D, F, C> {
        self.with(|doubt, _| (doubt, is_uncertain))
    }

    /// Runs the body up to `tries` times, with the pauses of `backoff`, in this attempt and under its lease. An error
    /// that leaves the effect in doubt ends the tries.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use idem_runtime::policy::Backoff;
    /// # use idem_runtime::{Error, current};
    /// # async fn quote(_: &str) -> Result<u32, Error> { Ok(7) }
    /// # async fn body(address: &str) -> Result<u32, Error> {
    /// let backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
    /// current()?.step("quote").retry(4, backoff).run(async |_| quote(address).await).await
    /// # }
    /// ```
    pub fn retry(self, tries: u32, backoff: Backoff) -> RetriedStep<D, U, C> {
        RetriedStep { step: self, retries: Retries { tries, backoff } }
    }

    /// Runs `body` and journals its value, or returns the value that an earlier attempt has journaled. An error of
    /// `body` is returned and not journaled: the name may be used again.
    ///
    /// # Errors
    /// The error of `body`. [`Error::Step`] if the step did not run or has no value. [`Error::LeaseLost`] if another
    /// attempt took over, and [`Error::Store`] if the store did not confirm a journal entry: the body of the step may
    /// have run, and the next attempt may run it again.
    ///
    /// # Cancel safety
    /// If the future is dropped before `body` has returned, nothing more is journaled, and the effect is in doubt.
    /// Later the entry may be journaled.
    pub async fn run<T, E, F, Fut>(self, body: F) -> Result<T, E>
    where
        F: FnOnce(Step) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        D: StepDoubt<T, E>,
        U: UncertainIf<E>,
        C: Codec,
    {
        let mut running = match start::<C, T, E, D>(self.options, self.doubt, Retries::NONE).await? {
            StepStart::Runs(running) => running,
            StepStart::Value(value) => return Ok(value),
        };
        // The result of the body is scoped, so that the future of the step holds it once.
        let ending = {
            let ended = running.limited(body(running.begins())).await;
            let is_uncertain = is_uncertain(ended.as_ref(), &self.uncertain);
            running.ends::<C, T, E>(ended, is_uncertain)
        };
        match ending.await {
            Some(ended) => ended,
            None => Err(running.has_no_body().into()),
        }
    }
}

/// Description of a step whose body may run several times in an attempt; see [`StepBuilder::retry`].
#[must_use = "a step does nothing until it is run"]
#[derive(Debug)]
pub struct RetriedStep<D, U, C = Json> {
    step: StepBuilder<D, U, C>,
    retries: Retries,
}

impl<D, U, C> RetriedStep<D, U, C> {
    /// Runs `body` as [`StepBuilder::run`] does, up to the number of tries.
    ///
    /// # Errors
    /// The last error of `body`, and the errors of [`StepBuilder::run`].
    ///
    /// # Cancel safety
    /// As [`StepBuilder::run`].
    pub async fn run<T, E, F, Fut>(self, mut body: F) -> Result<T, E>
    where
        F: FnMut(Step) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        D: StepDoubt<T, E>,
        U: UncertainIf<E>,
        C: Codec,
    {
        let StepBuilder { options, doubt, uncertain, .. } = self.step;
        let mut running = match start::<C, T, E, D>(options, doubt, self.retries).await? {
            StepStart::Runs(running) => running,
            StepStart::Value(value) => return Ok(value),
        };
        loop {
            let ending = {
                let ended = running.limited(body(running.begins())).await;
                let is_uncertain = is_uncertain(ended.as_ref(), &uncertain);
                running.ends::<C, T, E>(ended, is_uncertain)
            };
            if let Some(ended) = ending.await {
                return ended;
            }
        }
    }
}
