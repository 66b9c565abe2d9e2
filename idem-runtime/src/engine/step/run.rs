//! The run of a step: the claim of its name, its body, and its journal entries.

use std::cell::Cell;
#[cfg(feature = "testing")]
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::doubt::{Reaction, StepDoubt, UncertainIf};
use super::name::{Step, StepFacts, StepName};
use crate::clock::Sleep;
use crate::codec::Codec;
#[cfg(feature = "within")]
use crate::codec::Json;
use crate::combine::race;
use crate::engine::attempt::Attempt;
use crate::engine::late::{Tries, may_pass};
use crate::engine::poll_notes::{note_journaled, note_refusal};
use crate::engine::reconciliation::{Reconciliation, SHORTEST_PAUSE};
use crate::engine::recorder::{payload, read};
use crate::error::{Error, StepProblem};
use crate::key::{Fingerprint, FingerprintError};
use crate::metrics::{ScopeCells, StepOutcome, StoreOp};
#[cfg(feature = "within")]
use crate::policy::Policy;
use crate::policy::{Backoff, OnUndecodable};
use crate::record::journal::{JournalEntry, StepProgress};
use crate::record::{Lease, OwnerToken, StoredResult, Verdict};
use crate::store::{JournalAccess, StepClaim, StepJournal, StoreErrorKind};

thread_local! {
    /// Attempt whose step is being polled on this thread.
    static STEP_OF: Cell<Option<OwnerToken>> = const { Cell::new(None) };
}

/// Returns whether the body of a step of the attempt of `lease` is being polled on this thread. A step that is not
/// journaled does not count.
pub(in crate::engine) fn is_inside_step_of(lease: &Lease) -> bool {
    STEP_OF.get() == Some(lease.owner) && lease.attempt > 0
}

#[cfg(feature = "testing")]
thread_local! {
    /// Step that is being polled on this thread, for the explorer of handlers.
    static POLLED: RefCell<Option<Step>> = const { RefCell::new(None) };
}

/// Returns the step whose body or reconciler is being polled on this thread.
#[cfg(feature = "testing")]
pub(crate) fn polled_step() -> Option<Step> {
    POLLED.with_borrow(Clone::clone)
}

/// Options of a step that do not depend on the types of its body.
pub(super) struct StepOptions {
    pub(super) step: StepFacts,
    pub(super) inputs: Option<Result<Fingerprint, FingerprintError>>,
    pub(super) timeout: Option<Duration>,
    pub(super) on_undecodable: OnUndecodable,
}

/// Repetitions of a body within one attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retries {
    /// Largest number of runs of the body. Zero counts as one.
    pub(super) tries: u32,
    pub(super) backoff: Backoff,
}

impl Retries {
    pub(super) const NONE: Self = Self { tries: 1, backoff: Backoff::DEFAULT };
}

/// First decision about a step: its body has to run, or its value is known.
pub(super) enum StepStart<T> {
    Runs(RunningStep),
    Value(T),
}

/// A step whose body runs. The fields are dropped in their order: the claim reports to the tally.
pub(super) struct RunningStep {
    claim: Claim,
    tally: Tally,
    step: Step,
    timeout: Option<Duration>,
    retries: Retries,
    reaction: Reaction,
    /// Number of bodies that have ended.
    tried: u32,
    is_doubted: bool,
}

/// Starts a step, or returns its journaled value, or the value that its reconciler supplies.
///
/// The functions of a step do not depend on its body, so that steps with the same types share their code.
pub(super) async fn start<C, T, E, D>(options: Box<StepOptions>, doubt: D, retries: Retries) -> Result<StepStart<T>, E>
where
    C: Codec,
    T: Serialize + DeserializeOwned,
    E: From<Error>,
    D: StepDoubt<T, E>,
{
    let StepOptions { step, inputs, timeout, on_undecodable } = *options;
    let step = Step(Arc::new(step));
    let mut tally = Tally::new(step.attempt());
    let mut claim = match begin(&step, &mut tally, inputs)? {
        ClaimedStep::Runs(claim) => claim,
        ClaimedStep::Ended { claim, attempt, value } => {
            let value = replay::<C, T>(&step, &mut tally, claim, (attempt, value), on_undecodable).await?;
            return Ok(StepStart::Value(value));
        }
    };
    claim.fails = D::REACTION == Reaction::Fail;
    if let (true, Some(attempt)) = (D::REACTION != Reaction::Rerun, claim.in_doubt_since()) {
        let Some(question) = doubt.ask(step.clone()) else {
            return Err(failed(&step, &mut tally, StepProblem::Interrupted { attempt }).into());
        };
        let mut question = pin!(question);
        match inside(&step, poll_fn(|cx| D::poll_question(question.as_mut(), cx))).await {
            Ok(Reconciliation::Done(value)) => {
                let ended = claim.end::<C, T, E>(&step, &mut tally, value, StepOutcome::Reconciled).await;
                return ended.map(StepStart::Value);
            }
            // The entry fences other attempts, which may have asked as well.
            Ok(Reconciliation::NotDone) => {
                claim.confirm_beginning(&step, &mut tally).await?;
                claim.doubt(false);
            }
            Ok(Reconciliation::Unknown { ask_again }) => {
                let problem = StepProblem::Unresolved { attempt, ask_again: ask_again.max(SHORTEST_PAUSE) };
                return Err(failed(&step, &mut tally, problem).into());
            }
            Err(error) => {
                // The effect is still in doubt, so the error is not recorded as the end of the operation.
                tally.outcome = StepOutcome::InDoubt;
                return Err(error);
            }
        }
    } else if D::REACTION != Reaction::Rerun {
        claim.confirm_beginning(&step, &mut tally).await?;
    }
    let (reaction, is_doubted) = (D::REACTION, claim.is_doubted());
    Ok(StepStart::Runs(RunningStep { claim, tally, step, timeout, retries, reaction, tried: 0, is_doubted }))
}

impl RunningStep {
    /// Notes that a body begins. Returns the handle for the body.
    pub(super) fn begins(&self) -> Step {
        self.claim.doubt(true);
        self.step.clone()
    }

    /// Makes the future of `body` as the body of this step. It returns `None` if the time limit passes before `body`
    /// has returned.
    pub(super) fn limited<F: Future>(&self, body: F) -> LimitedBody<'_, F> {
        LimitedBody::new(&self.step, self.timeout, body)
    }

    /// Ends the step after its body has ended, or has run into its time limit (`None`). Returns `None` if the body runs
    /// again.
    pub(super) async fn ends<C, T, E>(
        &mut self,
        ended: Option<Result<T, E>>,
        is_uncertain: bool,
    ) -> Option<Result<T, E>>
    where
        C: Codec,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
    {
        let error = match ended {
            Some(Ok(value)) => {
                return Some(self.claim.end::<C, T, E>(&self.step, &mut self.tally, value, StepOutcome::Ran).await);
            }
            Some(Err(error)) => Some(error),
            None => None,
        };
        if self.runs_again(is_uncertain).await {
            return None;
        }
        let error = error.unwrap_or_else(|| self.timed_out().into());
        let leaves_doubt = self.leaves_doubt(is_uncertain);
        self.tally.outcome = if leaves_doubt { StepOutcome::InDoubt } else { StepOutcome::Failed };
        Some(Err(error))
    }

    /// Returns whether the body runs again after it has failed, as soon as it may. Otherwise journals what is known of
    /// its effect.
    async fn runs_again(&mut self, is_uncertain: bool) -> bool {
        self.tried += 1;
        self.is_doubted |= is_uncertain;
        // With a reaction, the beginning is journaled, and the step is in doubt until the journal says otherwise.
        if self.reaction == Reaction::Rerun && !self.is_doubted {
            self.claim.doubt(false);
        }
        let leaves_doubt = self.leaves_doubt(is_uncertain);
        if !leaves_doubt && self.tried < self.retries.tries {
            let seed = self.step.attempt().lease.owner.seed() ^ u64::from(self.tried);
            let pause = self.retries.backoff.after(self.tried, seed);
            self.step.attempt().store.context().clock().sleep(pause).await;
            return true;
        }
        if self.reaction != Reaction::Rerun && !leaves_doubt {
            self.claim.undo(&self.step).await;
        }
        false
    }

    fn leaves_doubt(&self, is_uncertain: bool) -> bool {
        self.reaction != Reaction::Rerun && is_uncertain
    }

    fn timed_out(&mut self) -> Error {
        timed_out(&self.step, &mut self.tally, self.timeout)
    }

    /// Returns the error of a step whose body can't run.
    pub(super) fn has_no_body(&mut self) -> Error {
        failed(&self.step, &mut self.tally, StepProblem::AttemptEnded)
    }
}

/// Returns whether the effect of a body that has ended, or has run into its time limit (`None`), may have happened
/// although the body returned no value.
pub(super) fn is_uncertain<T, E>(ended: Option<&Result<T, E>>, uncertain: &impl UncertainIf<E>) -> bool {
    match ended {
        Some(Ok(_)) => false,
        Some(Err(error)) => uncertain.is_uncertain(error),
        None => true,
    }
}

pin_project! {
    /// Future of the body of a step; see [`RunningStep::limited`].
    pub(super) struct LimitedBody<'a, F> {
        step: &'a Step,
        sleep: Option<Sleep>,
        #[pin]
        body: F,
    }
}

impl<'a, F> LimitedBody<'a, F> {
    fn new(step: &'a Step, timeout: Option<Duration>, body: F) -> Self {
        let sleep = timeout.map(|timeout| step.attempt().store.context().clock().sleep(timeout));
        Self { step, sleep, body }
    }
}

// The compiler makes a copy of this `impl` for each step: keep it minimal.
impl<F: Future> Future for LimitedBody<'_, F> {
    type Output = Option<F::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        poll_limited(this.step, this.sleep, this.body, cx)
    }
}

fn poll_limited<T>(
    step: &Step,
    sleep: &mut Option<Sleep>,
    body: Pin<&mut dyn Future<Output = T>>,
    cx: &mut Context<'_>,
) -> Poll<Option<T>> {
    let polled = {
        let _inside = InsideStep::enter(Some(step));
        body.poll(cx)
    };
    match (polled, sleep) {
        (Poll::Ready(output), _) => Poll::Ready(Some(output)),
        (Poll::Pending, Some(sleep)) => Pin::new(sleep).poll(cx).map(|()| None),
        (Poll::Pending, None) => Poll::Pending,
    }
}

/// A step that has to run, and whose entry is a record in a transaction of the user.
#[cfg(feature = "within")]
pub(crate) struct CommittedStep {
    step: Step,
    inputs: Option<Result<Fingerprint, FingerprintError>>,
    timeout: Option<Duration>,
    on_undecodable: OnUndecodable,
    claim: Claim,
    tally: Tally,
}

#[cfg(feature = "within")]
impl CommittedStep {
    /// Takes the name of the step. Returns the value of the step instead if an earlier attempt has journaled it.
    pub(super) async fn begin<T: DeserializeOwned>(options: StepOptions) -> Result<Result<T, Self>, Error> {
        let StepOptions { step, inputs, timeout, on_undecodable } = options;
        let step = Step(Arc::new(step));
        let mut tally = Tally::new(step.attempt());
        match begin(&step, &mut tally, inputs.clone())? {
            ClaimedStep::Runs(claim) => match claim.in_doubt_since() {
                // An earlier version of the handler has begun the step outside of a transaction.
                Some(attempt) => Err(failed(&step, &mut tally, StepProblem::Interrupted { attempt })),
                None => Ok(Err(Self { step, inputs, timeout, on_undecodable, claim, tally })),
            },
            ClaimedStep::Ended { claim, attempt, value } => {
                replay::<Json, T>(&step, &mut tally, claim, (attempt, value), on_undecodable).await.map(Ok)
            }
        }
    }

    pub(crate) fn step(&self) -> &Step {
        &self.step
    }

    /// Returns whether the attempt has a reservation, outside of shadow mode.
    pub(crate) fn is_journaled(&self) -> bool {
        self.claim.place.is_some()
    }

    /// Returns the fingerprint of the inputs.
    pub(crate) fn inputs(&self) -> Option<Result<Fingerprint, FingerprintError>> {
        self.inputs.clone()
    }

    /// Returns the policy of the record of the step.
    pub(crate) fn policy(&self) -> Policy {
        let policy = Policy::new(self.step.attempt().lease.ttl).on_undecodable(self.on_undecodable);
        match &self.claim.place {
            Some(place) => policy.max_result_bytes(place.journal.policy().max_value_bytes),
            None => policy,
        }
    }

    /// Polls `body` as the body of this step. Returns `None` if the time limit passes before `body` has returned.
    pub(crate) async fn limited<F: Future>(&self, body: F) -> Option<F::Output> {
        LimitedBody::new(&self.step, self.timeout, body).await
    }

    /// Ends the step, whose name stays taken. `replayed`: whether its record in the transaction had its value.
    pub(crate) fn ended(mut self, replayed: bool) {
        self.tally.outcome = if replayed { StepOutcome::Replayed } else { StepOutcome::Ran };
        if let Some(place) = self.claim.place.take() {
            place.journal.free_room(&place.entry.name);
        }
    }

    /// Ends the step without a value. The drop gives the name back.
    pub(crate) fn failed(mut self) {
        self.tally.outcome = StepOutcome::Failed;
    }

    /// Ends the step after its body has run into its time limit. The drop gives the name back.
    pub(crate) fn timed_out(mut self) -> Error {
        let error = timed_out(&self.step, &mut self.tally, self.timeout);
        self.tally.outcome = StepOutcome::Failed;
        error
    }

    /// Ends the step with `error`, the error of its call in the transaction. Returns the error of the step. The drop
    /// gives the name back.
    pub(crate) fn refused(mut self, error: Error) -> Error {
        let problem = match (error, &self.inputs) {
            (Error::FingerprintMismatch { attempt, payloads, .. }, Some(Ok(presented))) => {
                let recorded = payloads.recorded.map(Box::new);
                StepProblem::OtherInputs { attempt, recorded, presented: Box::new(*presented) }
            }
            (Error::ResultUnavailable { attempt, problem, .. }, _) => {
                StepProblem::ValueUnavailable { attempt, problem: Box::new(problem) }
            }
            (error, _) => {
                self.tally.outcome = StepOutcome::Failed;
                return error;
            }
        };
        failed(&self.step, &mut self.tally, problem)
    }
}

/// Returns the value that the attempt `attempt` has journaled. If the value can't be read now, the name is given back.
async fn replay<C: Codec, T: DeserializeOwned>(
    step: &Step,
    tally: &mut Tally,
    mut claim: Claim,
    (attempt, value): (u32, StoredResult),
    on_undecodable: OnUndecodable,
) -> Result<T, Error> {
    let value = match step.attempt().store.step_values() {
        Some(values) => values.fetch(&value).await.map_err(|source| {
            tally.outcome = StepOutcome::Refused;
            // A later attempt may get the value, so an error of the body must not end the operation.
            note_refusal();
            if let Some(place) = &claim.place {
                place.journal.keep_open();
            }
            step.attempt().unconfirmed(source)
        })?,
        None => value,
    };
    claim.stage = ClaimStage::Ended;
    tally.outcome = StepOutcome::Replayed;
    read::<C, T>(&value, false, on_undecodable)
        .map_err(|problem| failed(step, tally, StepProblem::ValueUnavailable { attempt, problem: Box::new(problem) }))
}

/// Returns the error of a step whose body has run into its time limit.
fn timed_out(step: &Step, tally: &mut Tally, timeout: Option<Duration>) -> Error {
    let (timeout, retry_after) = (timeout.unwrap_or_default(), step.attempt().pause());
    failed(step, tally, StepProblem::TimedOut { timeout, retry_after })
}

/// Polls `body` as a part of a step: a step of the same attempt inside of `body` is refused.
async fn inside<F: Future>(step: &Step, body: F) -> F::Output {
    let mut body = pin!(body);
    poll_fn(|cx| {
        let _inside = InsideStep::enter(Some(step));
        body.as_mut().poll(cx)
    })
    .await
}

/// Logs that a step did not run or has no value, and returns its error. A later delivery may get further, so the error
/// of the body must not be recorded as the end of the operation.
fn failed(step: &Step, tally: &mut Tally, problem: StepProblem) -> Error {
    let (key, store) = (step.attempt().key().clone(), step.attempt().store.context().name());
    tracing::warn!(%key, store, attempt = step.attempt().number(), step = step.name(), %problem, "a step has no value");
    tally.outcome = match problem {
        StepProblem::Interrupted { .. } | StepProblem::Unresolved { .. } => StepOutcome::InDoubt,
        _ => StepOutcome::Refused,
    };
    note_refusal();
    if let Some(journal) = step.attempt().store.context().leases().known_journal(step.attempt().lease.owner) {
        journal.keep_open();
        match problem {
            StepProblem::Interrupted { .. } => journal.interrupt(),
            StepProblem::Unresolved { ask_again, .. } => journal.ask_again(ask_again),
            _ => {}
        }
    }
    Error::Step { key, store, step: step.name().into(), problem }
}

/// Counts the outcome of a step when it is dropped.
struct Tally {
    /// `None` for an attempt without a reservation.
    cells: Option<Arc<ScopeCells>>,
    outcome: StepOutcome,
}

impl Tally {
    fn new(attempt: &Attempt) -> Self {
        let cells = || attempt.store.context().metrics_here().scope(attempt.key().scope());
        Self { cells: attempt.is_protected().then(cells), outcome: StepOutcome::Dropped }
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        if let Some(cells) = &self.cells {
            cells.step_ended(self.outcome);
        }
    }
}

/// A step whose name is taken.
enum ClaimedStep {
    /// The body has to run.
    Runs(Claim),
    /// The attempt `attempt` has journaled the step.
    Ended { claim: Claim, attempt: u32, value: StoredResult },
}

/// Decides whether the body of a step has to run.
fn begin(
    step: &Step,
    tally: &mut Tally,
    inputs: Option<Result<Fingerprint, FingerprintError>>,
) -> Result<ClaimedStep, Error> {
    let mut problem = |problem| Err(failed(step, tally, problem));
    if !step.attempt().is_protected() {
        return Ok(ClaimedStep::Runs(Claim::UNJOURNALED));
    }
    let context = step.attempt().store.context();
    let owner = step.attempt().lease.owner;
    let journal = match context.leases().journal(owner) {
        JournalAccess::On(journal) => journal,
        // Shadow mode changes no outcome.
        JournalAccess::Off => return Ok(ClaimedStep::Runs(Claim::UNJOURNALED)),
        JournalAccess::Ended => return problem(StepProblem::AttemptEnded),
    };
    let inputs = match inputs.transpose() {
        Ok(inputs) => inputs,
        Err(error) => return problem(StepProblem::InvalidInputs(error)),
    };
    if !step.0.name.is_valid() || step.0.was.as_ref().is_some_and(|was| !was.is_valid()) {
        return problem(StepProblem::InvalidName);
    }
    if !context.renews() {
        return problem(StepProblem::InTransaction);
    }
    if STEP_OF.get() == Some(owner) {
        return problem(StepProblem::Nested);
    }
    let other_inputs = |attempt, recorded: Option<Fingerprint>| match inputs {
        Some(presented) if !is_same(recorded.as_ref(), &presented) => {
            let (recorded, presented) = (recorded.map(Box::new), Box::new(presented));
            Some(StepProblem::OtherInputs { attempt, recorded, presented })
        }
        _ => None,
    };
    let entry = JournalEntry {
        name: Arc::clone(step.0.name.shared()),
        attempt: step.attempt().number(),
        inputs,
        progress: StepProgress::Begun,
    };
    let was = step.0.was.as_ref().map(StepName::shared);
    let store_limit = context.journal_limit();
    let claimed = journal.claim(step.0.name.shared(), was, store_limit);
    let claim = |stage| Claim {
        place: Some(Box::new(JournalPlace { journal, entry, was: step.0.was.clone(), store_limit })),
        stage,
        value: None,
        fails: false,
    };
    match claimed {
        StepClaim::Runs => Ok(ClaimedStep::Runs(claim(ClaimStage::Taken))),
        StepClaim::InDoubt(earlier) => {
            let (attempt, inputs) = (earlier.attempt, earlier.inputs);
            // If the inputs differ, the drop of the claim leaves the step in doubt.
            let claim = claim(ClaimStage::InDoubt(Box::new(earlier)));
            other_inputs(attempt, inputs).map_or(Ok(ClaimedStep::Runs(claim)), problem)
        }
        StepClaim::Ended { attempt, inputs, value } => {
            let ended = ClaimedStep::Ended { claim: claim(ClaimStage::Taken), attempt, value };
            other_inputs(attempt, inputs).map_or(Ok(ended), problem)
        }
        StepClaim::UsedTwice => problem(StepProblem::UsedTwice),
        StepClaim::TooMany { max } => problem(StepProblem::TooMany { max }),
        StepClaim::NoRoom { max } => problem(StepProblem::JournalFull { max }),
        StepClaim::Damaged(error) => problem(StepProblem::UnreadableJournal(error)),
    }
}

/// Returns whether the inputs are the same, as far as the two fingerprints can be compared.
fn is_same(recorded: Option<&Fingerprint>, presented: &Fingerprint) -> bool {
    recorded.is_some_and(|recorded| !recorded.is_comparable(presented) || recorded == presented)
}

/// The name of a step whose body has not ended. The drop gives the name back.
struct Claim {
    /// `None` if the step is not journaled.
    place: Option<Box<JournalPlace>>,
    stage: ClaimStage,
    /// Value of the body, while the store keeps it outside of the record.
    value: Option<StoredResult>,
    /// True if a doubt that the body leaves is one for an operator.
    fails: bool,
}

/// Place of a step in the journal of its attempt.
struct JournalPlace {
    journal: Arc<StepJournal>,
    /// Entry that says that the body has begun.
    entry: JournalEntry,
    was: Option<StepName>,
    /// Size of the largest journal that the store can hold.
    store_limit: usize,
}

enum ClaimStage {
    /// The name is taken, and nothing is journaled.
    Taken,
    /// The beginning of the body is being journaled. The body has not begun.
    Begins,
    /// The effect is in doubt since this entry.
    InDoubt(Box<JournalEntry>),
    /// The entry of the end leaves with the next write of the journal.
    Ended,
}

impl Claim {
    const UNJOURNALED: Self = Self { place: None, stage: ClaimStage::Ended, value: None, fails: false };

    /// Returns the attempt whose effect is in doubt.
    fn in_doubt_since(&self) -> Option<u32> {
        match &self.stage {
            ClaimStage::InDoubt(entry) => Some(entry.attempt),
            _ => None,
        }
    }

    /// Returns whether the effect was in doubt before this body, for the outcome of the delivery.
    fn is_doubted(&self) -> bool {
        self.place.as_ref().is_some_and(|place| place.journal.is_in_doubt(&place.entry.name))
    }

    /// Records whether the effect is in doubt, for the outcome of the delivery.
    fn doubt(&self, in_doubt: bool) {
        if let Some(place) = &self.place {
            place.journal.doubt(&place.entry.name, in_doubt);
        }
    }

    /// Journals that the body begins.
    async fn confirm_beginning(&mut self, step: &Step, tally: &mut Tally) -> Result<(), Error> {
        let Some(place) = &self.place else { return Ok(()) };
        let JournalPlace { journal, entry, .. } = &**place;
        let begun = match &self.stage {
            // A doubt keeps its name, so that one entry can end it.
            ClaimStage::InDoubt(since) => JournalEntry { name: since.name.clone(), ..entry.clone() },
            _ => entry.clone(),
        };
        if let ClaimStage::Taken = self.stage {
            self.stage = ClaimStage::Begins;
        }
        journal.add(begun.clone());
        confirm(step, journal, &begun.name).await.inspect_err(|_| tally.outcome = StepOutcome::Unconfirmed)?;
        journal.began(begun.clone());
        self.stage = ClaimStage::InDoubt(Box::new(begun));
        Ok(())
    }

    /// Journals the value of the step. From here on the entry leaves with the next write of the journal, if there is
    /// one, even if this future is dropped.
    async fn end<C, T, E>(&mut self, step: &Step, tally: &mut Tally, value: T, outcome: StepOutcome) -> Result<T, E>
    where
        C: Codec,
        T: Serialize + DeserializeOwned,
        E: From<Error>,
    {
        if let Some(place) = &self.place {
            // If the encoding panics, the claim is dropped as if the body had panicked.
            let stored = payload::<C, T>(&value, place.journal.policy().max_value_bytes);
            tally.outcome = StepOutcome::Unconfirmed;
            self.journal_value(step, stored).await?;
        }
        tally.outcome = outcome;
        Ok(value)
    }

    /// Journals `stored`, the value of the step.
    ///
    /// Boxed: the future does not depend on the types of the step, and is larger than the rest of a step.
    fn journal_value<'a>(
        &'a mut self,
        step: &'a Step,
        stored: StoredResult,
    ) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send + 'a>> {
        Box::pin(async move {
            if let StoredResult::TooLarge { .. } | StoredResult::Unencodable = stored {
                left_out(step, step.name(), &stored);
            }
            let Attempt { store, lease, .. } = step.attempt();
            // If this future is dropped meanwhile, the drop of the claim journals the value itself.
            let stored = self.value.insert(stored);
            if let Some(values) = store.step_values()
                && let Ok(kept) = values.keep(lease, stored).await
            {
                *stored = kept;
            }
            let Some((journal, is_left_out)) = self.add_end() else { return Ok(()) };
            if let Some(size) = is_left_out {
                left_out(step, step.name(), &StoredResult::TooLarge { size });
            }
            write_entries(step, &journal, step.name()).await
        })
    }

    /// Adds the entry of the end to the journal. Returns the journal, and the size of the value if the journal had no
    /// room for it.
    fn add_end(&mut self) -> Option<(Arc<StepJournal>, Option<u64>)> {
        let value = self.value.take()?;
        let JournalPlace { journal, entry, store_limit, .. } = *self.place.take()?;
        let since = match &self.stage {
            ClaimStage::InDoubt(since) => Some(&*since.name),
            _ => None,
        };
        let left_out = journal.end(JournalEntry { progress: StepProgress::Ended(value), ..entry }, since, store_limit);
        Some((journal, left_out))
    }

    /// Journals that the body has had no effect.
    async fn undo(&mut self, step: &Step) {
        let (Some(place), ClaimStage::InDoubt(since)) = (&self.place, &self.stage) else { return };
        let JournalPlace { journal, entry, .. } = &**place;
        let name = since.name.clone();
        journal.undo(JournalEntry { name: name.clone(), progress: StepProgress::Undone, ..entry.clone() });
        self.stage = ClaimStage::Taken;
        match confirm(step, journal, &name).await {
            Ok(()) => self.doubt(false),
            Err(error) => tracing::warn!(
                key = %step.attempt().key(), store = step.attempt().store.context().name(), step = step.name(), %error,
                "the body of the step returned an error, and its entry that the effect did not happen is not confirmed; the \
                 next attempt may find the step in doubt"
            ),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(place) = self.place.as_ref().filter(|_| self.value.is_some()) {
            let step = place.entry.name.clone();
            if let Some((_, Some(size))) = self.add_end() {
                tracing::warn!(%step, size, "a step was dropped, and its value does not fit into the journal");
            }
            return;
        }
        let Some(place) = &self.place else { return };
        let JournalPlace { journal, entry, was, .. } = &**place;
        match &self.stage {
            ClaimStage::Taken => {}
            ClaimStage::Begins => journal.withdraw(entry),
            ClaimStage::InDoubt(since) => {
                if self.fails {
                    journal.interrupt();
                }
                tracing::warn!(step = &*since.name, since = since.attempt, "the effect of a step is in doubt");
            }
            ClaimStage::Ended => return,
        }
        journal.give_back(&entry.name, was.as_ref().map(StepName::as_str));
    }
}

/// Waits until the store has confirmed all entries of the step `name`. Steps that end together share a write.
///
/// Boxed: the writes of a journal are few, and their future is larger than the rest of a step.
fn confirm<'a>(
    step: &'a Step,
    journal: &'a StepJournal,
    name: &'a str,
) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send + 'a>> {
    Box::pin(write_entries(step, journal, name))
}

async fn write_entries(step: &Step, journal: &StepJournal, name: &str) -> Result<(), Error> {
    let Attempt { store, lease, reserved_at, .. } = step.attempt();
    note_journaled();
    let _turn = match journal.turn.try_lock() {
        Ok(turn) => Some(turn),
        Err(_) => race(journal.turn.lock(), store.context().clock().sleep(lease.duration / 4)).await,
    };
    let unconfirmed = |error| {
        journal.keep_open();
        Err(error)
    };
    let began = store.context().clock().now();
    let (mut first, mut tries) = (Some(began), Tries::since(began, &**store, lease, *reserved_at));
    while let Some(write) = journal.write(name) {
        let asked_at = first.take().unwrap_or_else(|| store.context().clock().now());
        match store.append(lease, &write.journal).watched_since(store, StoreOp::Append, Some(asked_at)).await {
            Ok(Verdict::Applied) => {
                store.context().leases().confirmed(lease.owner, asked_at);
                journal.confirm(&write);
            }
            Ok(Verdict::Refused) => return unconfirmed(step.attempt().refused()),
            Err(error) if error.kind() == StoreErrorKind::TooLarge && !error.may_have_landed() => {
                // Without its largest value, the journal may fit. No step must run again only because a value is large.
                match journal.drop_largest(&write) {
                    Some((name, size)) => left_out(step, &name, &StoredResult::TooLarge { size }),
                    None => return unconfirmed(step.attempt().unconfirmed(error)),
                }
            }
            Err(source) => {
                if !may_pass(&source) || !tries.again().await {
                    return unconfirmed(step.attempt().unconfirmed(source));
                }
            }
        }
    }
    Ok(())
}

/// Logs that a step is journaled without its value.
fn left_out(step: &Step, name: &str, why: &StoredResult) {
    tracing::warn!(
        key = %step.attempt().key(), store = step.attempt().store.context().name(), attempt = step.attempt().number(),
        step = name, ?why,
        "the step is journaled without its value; a later attempt can't continue after it"
    );
}

/// Marks that a step, or no step, is being polled on this thread, until the guard is dropped.
pub(crate) struct InsideStep {
    outer: Option<OwnerToken>,
    #[cfg(feature = "testing")]
    outer_step: Option<Step>,
}

impl InsideStep {
    pub(crate) fn enter(step: Option<&Step>) -> Self {
        Self {
            outer: STEP_OF.replace(step.map(|step| step.attempt().lease.owner)),
            #[cfg(feature = "testing")]
            outer_step: POLLED.replace(step.cloned()),
        }
    }
}

impl Drop for InsideStep {
    fn drop(&mut self) {
        STEP_OF.set(self.outer);
        #[cfg(feature = "testing")]
        POLLED.set(self.outer_step.take());
    }
}
