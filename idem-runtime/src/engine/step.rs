//! Steps: named parts of a handler whose values are journaled under the attempt.

use std::cell::Cell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::attempt::Attempt;
use super::late::{Tries, may_pass};
use super::poll_notes::note_refusal;
use super::recorder::{payload, read};
use crate::codec::Json;
use crate::error::{Disposition, Error, StepProblem};
use crate::key::{Fingerprint, FingerprintError};
use crate::metrics::StoreOp;
use crate::policy::OnUndecodable;
use crate::record::journal::{JournalEntry, MAX_STEP_NAME_BYTES};
use crate::record::{OwnerToken, StoredResult, Verdict};
use crate::store::{JournalAccess, StepClaim, StepJournal, StoreErrorKind};

/// Largest value of a step, in bytes. A larger value is journaled as ended, without its value.
const MAX_VALUE_BYTES: usize = 256 * 1024;

thread_local! {
    /// Attempt whose step is being polled on this thread.
    static STEP_OF: Cell<Option<OwnerToken>> = const { Cell::new(None) };
}

/// Name of a step: a text, or a text and a key.
///
/// `"charge"` is the name of one step; `("reserve", line.sku)` names one step of a loop, and is written
/// `reserve[<sku>]`. The text has no `[`, so two different pairs never have the same name. A name has at most 256
/// bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepName(Box<str>);

impl From<&str> for StepName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl<K: fmt::Display> From<(&str, K)> for StepName {
    fn from((name, key): (&str, K)) -> Self {
        // A bracket in `name` makes the name invalid, as it does in a name without a key.
        match name.contains('[') {
            true => Self(Box::default()),
            false => Self(format!("{name}[{key}]").into()),
        }
    }
}

impl fmt::Display for StepName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StepName {
    fn is_valid(&self) -> bool {
        let (name, key) = self.0.split_once('[').map_or((&*self.0, None), |(name, key)| (name, Some(key)));
        let is_name = !name.trim().is_empty() && !name.starts_with("idem:");
        let is_key = key.is_none_or(|key| key.ends_with(']'));
        is_name && is_key && self.0.len() <= MAX_STEP_NAME_BYTES
    }
}

/// A step that runs: the handle that its body gets.
#[derive(Clone, Debug)]
pub struct Step {
    attempt: Attempt,
    name: StepName,
}

impl Step {
    /// Returns the name of the step.
    pub fn name(&self) -> &str {
        &self.name.0
    }

    /// Returns the attempt that runs the step.
    pub fn attempt(&self) -> &Attempt {
        &self.attempt
    }

    /// Returns a key for a call to another API that accepts idempotency keys: `attempt.child_key(name)` with the name
    /// of this step. The key is the same on every attempt.
    pub fn child_key(&self) -> String {
        self.attempt.child_key(self.name())
    }
}

impl Attempt {
    /// Begins the description of a step: a part of the handler whose value is journaled in the record.
    ///
    /// If an attempt crashes, or returns an error, the next attempt gets the values of the steps that have ended, and
    /// does not run them again. Steps are found by their names: the code between steps runs again, steps may change
    /// their order between two versions of the handler, and `join!`, `select!` and loops are allowed. An attempt uses
    /// each name for one step; a step of a loop has a name and a key: `("reserve", line.sku)`.
    ///
    /// A step that was cut off between its effect and its journal entry runs again. Its body hands
    /// [`Step::child_key`] to the other system, which then recognises the repetition.
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
        StepBuilder { step: Step { attempt: self.clone(), name: name.into() }, inputs: None }
    }
}

/// Description of a step, which [`run`](Self::run) runs.
#[must_use = "a step does nothing until it is run"]
#[derive(Debug)]
pub struct StepBuilder {
    step: Step,
    inputs: Option<Result<Fingerprint, FingerprintError>>,
}

impl StepBuilder {
    /// Adds the fingerprint of the inputs. If an earlier attempt has journaled the step with other inputs, or without
    /// inputs, the step fails with [`StepProblem::OtherInputs`].
    pub fn fingerprint<F: Serialize + ?Sized>(mut self, inputs: &F) -> Self {
        self.inputs = Some(Fingerprint::of(inputs));
        self
    }

    /// Runs `body` and journals its value, or returns the value that an earlier attempt has journaled. An error of
    /// `body` is returned and not journaled: the name may be used again.
    ///
    /// # Errors
    /// The error of `body`. [`Error::Step`] if the step did not run or has no value. [`Error::LeaseLost`] if another
    /// attempt took over, and [`Error::Store`] if the store did not confirm the journal entry: the body of the step
    /// ran, and the next attempt may run it again.
    ///
    /// # Cancel safety
    /// If the future is dropped before `body` has returned, nothing is journaled. Later the entry may be journaled.
    pub async fn run<T, E, F, Fut>(self, body: F) -> Result<T, E>
    where
        F: FnOnce(Step) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
    {
        let Self { step, inputs } = self;
        if !step.attempt.is_protected() {
            return body(step).await;
        }
        let (journal, inputs) = match begin(&step, inputs)? {
            StepStart::Unjournaled => return body(step).await,
            StepStart::Runs(journal, inputs) => (journal, inputs),
            StepStart::Ended(entry) => {
                return read::<Json, T>(&entry.value, false, OnUndecodable::Error).map_err(|problem| {
                    let problem = StepProblem::ValueUnavailable { attempt: entry.attempt, problem: Box::new(problem) };
                    failed(&step, problem).into()
                });
            }
        };
        let mut claim = ClaimGuard { journal: &journal, name: step.name(), ended: false };
        let owner = step.attempt.lease.owner;
        let mut running = pin!(body(step.clone()));
        let value = poll_fn(|cx| {
            let _inside = InsideStep::enter(owner);
            running.as_mut().poll(cx)
        })
        .await?;
        // The body has returned: from here on the entry leaves with the next write of the journal, if there is one,
        // even if this future is dropped.
        claim.ended = true;
        let stored = payload::<Json, T>(&value, MAX_VALUE_BYTES);
        append(&step, &journal, inputs, stored).await?;
        Ok(value)
    }
}

/// First decision about a step.
enum StepStart {
    /// The body has to run, and journals nothing: shadow mode changes no outcome.
    Unjournaled,
    /// The body has to run, with this fingerprint of its inputs.
    Runs(Arc<StepJournal>, Option<Fingerprint>),
    /// An earlier attempt has journaled the step.
    Ended(JournalEntry),
}

fn failed(step: &Step, problem: StepProblem) -> Error {
    let (key, store) = (step.attempt.key().clone(), step.attempt.store.context().name());
    tracing::warn!(%key, store, attempt = step.attempt.number(), step = step.name(), %problem, "a step has no value");
    let error = Error::Step { key, store, step: step.name().into(), problem };
    // A later delivery may succeed, so the error of the body must not be recorded as the end of the operation.
    if matches!(error.disposition(), Disposition::Retry { .. }) {
        note_refusal();
    }
    error
}

/// Decides whether the body of a step has to run.
fn begin(step: &Step, inputs: Option<Result<Fingerprint, FingerprintError>>) -> Result<StepStart, Error> {
    let problem = |problem| Err(failed(step, problem));
    let context = step.attempt.store.context();
    let owner = step.attempt.lease.owner;
    let journal = match context.leases().journal(owner) {
        JournalAccess::On(journal) => journal,
        JournalAccess::Off => return Ok(StepStart::Unjournaled),
        JournalAccess::Ended => return problem(StepProblem::AttemptEnded),
    };
    let inputs = match inputs.transpose() {
        Ok(inputs) => inputs,
        Err(error) => return problem(StepProblem::InvalidInputs(error)),
    };
    if !step.name.is_valid() {
        return problem(StepProblem::InvalidName);
    }
    if !context.renews() {
        return problem(StepProblem::InTransaction);
    }
    if STEP_OF.get() == Some(owner) {
        return problem(StepProblem::Nested);
    }
    match journal.claim(step.name()) {
        StepClaim::Runs => Ok(StepStart::Runs(journal, inputs)),
        StepClaim::Ended(entry) => match inputs {
            Some(presented) if !is_same(entry.inputs.as_ref(), &presented) => problem(StepProblem::OtherInputs {
                attempt: entry.attempt,
                recorded: entry.inputs.map(Box::new),
                presented: Box::new(presented),
            }),
            _ => Ok(StepStart::Ended(entry)),
        },
        StepClaim::UsedTwice => problem(StepProblem::UsedTwice),
        StepClaim::Full => problem(StepProblem::TooMany { max: StepJournal::MAX_ENTRIES }),
        StepClaim::Damaged(error) => problem(StepProblem::UnreadableJournal(error)),
    }
}

/// Returns whether the inputs are the same, as far as the two fingerprints can be compared.
fn is_same(recorded: Option<&Fingerprint>, presented: &Fingerprint) -> bool {
    recorded.is_some_and(|recorded| !recorded.is_comparable(presented) || recorded == presented)
}

/// Writes the entry of a step that has ended. Steps that end together share a write.
async fn append(
    step: &Step,
    journal: &StepJournal,
    inputs: Option<Fingerprint>,
    value: StoredResult,
) -> Result<(), Error> {
    let Attempt { store, lease, reserved_at, .. } = &step.attempt;
    if let StoredResult::TooLarge { .. } | StoredResult::Unencodable = value {
        left_out(step, step.name(), &value);
    }
    journal.add(JournalEntry { name: step.name().into(), attempt: lease.attempt, inputs, value });
    let _turn = journal.turn.lock().await;
    let mut tries = Tries::new(&**store, lease, *reserved_at);
    while let Some(write) = journal.write(step.name()) {
        let asked_at = store.context().clock().now();
        match store.append(lease, &write.journal).watched(store, StoreOp::Append).await {
            Ok(Verdict::Applied) => {
                store.context().leases().confirmed(lease.owner, asked_at);
                journal.confirm(&write);
            }
            Ok(Verdict::Refused) => return Err(step.attempt.refused()),
            Err(error) if error.kind() == StoreErrorKind::TooLarge && !error.may_have_landed() => {
                // Without its largest value, the journal may fit. No step must run again only because a value is large.
                match journal.drop_largest(&write) {
                    Some((name, size)) => left_out(step, &name, &StoredResult::TooLarge { size }),
                    None => return Err(step.attempt.unconfirmed(error)),
                }
            }
            Err(source) => {
                if !may_pass(&source) || !tries.again().await {
                    return Err(step.attempt.unconfirmed(source));
                }
            }
        }
    }
    Ok(())
}

/// Logs that a step is journaled without its value.
fn left_out(step: &Step, name: &str, why: &StoredResult) {
    tracing::warn!(
        key = %step.attempt.key(), store = step.attempt.store.context().name(), attempt = step.attempt.number(),
        step = name, ?why,
        "the step is journaled without its value; a later attempt can't continue after it"
    );
}

/// Gives the name of a step back if its body returns an error, panics or is dropped.
struct ClaimGuard<'a> {
    journal: &'a StepJournal,
    name: &'a str,
    ended: bool,
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.journal.give_back(self.name);
        }
    }
}

/// Marks that a step of an attempt is being polled on this thread, until the guard is dropped.
struct InsideStep(Option<OwnerToken>);

impl InsideStep {
    fn enter(owner: OwnerToken) -> Self {
        Self(STEP_OF.replace(Some(owner)))
    }
}

impl Drop for InsideStep {
    fn drop(&mut self) {
        STEP_OF.set(self.0);
    }
}
