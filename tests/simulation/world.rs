//! World: processes whose workers handle the messages of one broker. One seed decides all events.
//!
//! In the first phase, the *storm*, store calls fail, processes die, callers give up, bodies panic and operators
//! decide. Then the faults stop, and all calls must end.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{Either, select};
use idem_runtime::clock::Clock;
use idem_runtime::codec::CodecName;
use idem_runtime::operator::{OperatorError, StepResolution};
use idem_runtime::outbox::{Resender, Resent};
use idem_runtime::record::{State, StoredResult};
use idem_runtime::step::StepProblem;
use idem_runtime::store::{Action, Decision, DecisionAnswer, Finish, Inspection, StepState, UnsentMessages};
use idem_runtime::testing::{Simulation, Task};
use idem_runtime::{
    Attempt, Disposition, Error, InProgress, Key, MemoryStore, OnCrash, OnError, OnStoreError, Outcome, Policy,
    Reconciliation, Refusal, Store, StoreError, StoreExt as _, current, idempotent, observe,
};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::bank::{Bank, Charges, Guard, NotFound, find};
use crate::dice::Dice;
use crate::history::nanos;
use crate::ledger::{BodyEnd, CallEnd, Check, FOR_EVER, Finding, Ledger, Terms, step_name};
use crate::linearize::{self, Judgement};
use crate::mail::{self, Mail, Postbox};
use crate::outage::{Loss, Outage};
use crate::plain::{Mistake, Plain};
use crate::store::{DeliberateBreak, FaultRates, Line, Net, yield_now};

/// Error of a handler.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Failure {
    /// Error that handlers with `on_error = record` record.
    Lasting(String),
    Passing(String),
    /// Error whose effect is in doubt.
    Doubtful(String),
    #[serde(skip)]
    Idempotency(Rc<Error>),
}

impl Failure {
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Lasting(text) | Self::Passing(text) | Self::Doubtful(text) => text.clone(),
            Self::Idempotency(error) => error.to_string(),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Idempotency(Rc::new(error))
    }
}

/// Deliberate break of a world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Broken {
    Nothing,
    Store(Mistake),
    Between(DeliberateBreak),
}

/// Result of a world's run.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) findings: Vec<Finding>,
    /// Number of occurrences of each event.
    pub(crate) counts: BTreeMap<&'static str, u64>,
    world: World,
}

impl Report {
    /// Text of all events, or of the events of one key.
    pub(crate) fn transcript(&self, key: Option<usize>) -> String {
        let history = self.world.net.history().transcript(key);
        format!("{history}{}", self.world.ledger.borrow().transcript(key))
    }

    /// Judgement of each key's history, with and without the times at which the store executed the operations.
    pub(crate) fn verdicts(&self) -> Vec<[Judgement; 2]> {
        let history = self.world.net.history();
        let both = |key| [linearize::check(&history, key), linearize::check_from_outside(&history, key)];
        (0..self.world.operations.len()).map(both).collect()
    }
}

/// Number that is combined with the seed for the dice of operators. With dice of their own, operators' choices change
/// no other choices of a world, so the worlds of seeds that once found a problem stay the same.
const DECIDERS: u64 = 0x6f70_6572;

/// Like [`DECIDERS`], for the dice of outages.
const OUTAGES: u64 = 0x6865_6c64;
/// Like [`DECIDERS`], for the dice of lost rights.
const LOSSES: u64 = 0x6c6f_7373;
/// Like [`DECIDERS`], for the dice that choose keys with one attempt.
const SINGLES: u64 = 0x6f6e_6365;
/// Like [`DECIDERS`], for the dice of banks and reconcilers.
const BANKS: u64 = 0x7469_6c6c;

/// Like [`DECIDERS`], for the dice of steps.
const PARTS: u64 = 0x7061_7274;
/// Like [`DECIDERS`], for the dice of steps under `fail` and of steps with a reconciler.
const GUARDS: u64 = 0x6775_6172;
/// Like [`DECIDERS`], for the dice of messages, senders and brokers.
const MESSAGES: u64 = 0x706f_7374;
/// Largest number of steps of a body.
pub(crate) const STEPS: usize = 3;

/// Longest pause before another try of a late write that outlasts its lease, plus the time of that try.
const LATE_WRITES: Duration = Duration::from_secs(15);
/// Time after which a lease of a resender has lapsed, if its release was lost.
const LEASE_OF_A_RESENDER: Duration = Duration::from_secs(61);

/// Payload number of a message without a fingerprint.
const UNMARKED: u8 = 2;

/// Operation of one key, with its policy.
#[derive(Debug)]
pub(crate) struct Operation {
    key: Key,
    /// Index of the operation that bodies call; no message has this operation.
    inner: Option<usize>,
    pub(crate) terms: Terms,
    /// True if deliveries differ in `on_crash`, as during a deployment.
    mixed: bool,
    /// True if the handler records lasting errors.
    records: bool,
    /// Bank that bodies of the operation charge.
    pub(crate) bank: Option<Bank>,
}

#[derive(Debug)]
struct Message {
    operation: usize,
    payload: u8,
    visible_at: u64,
    settled: bool,
}

/// Rates of faults outside of the store's calls, in thousandths.
#[derive(Clone, Copy, Debug)]
struct Mishaps {
    /// Rate of deliveries whose caller gives up.
    cancelled: u64,
    /// Rates of steps in a body that panic, and of steps that return an error.
    panics: u64,
    errors: u64,
    /// Rate of bodies that take longer than their lease.
    slow: u64,
    /// Rate of pauses in a body that block the thread.
    blocked: u64,
    kills: u64,
    operators: u64,
    jumps: u64,
}

#[derive(Clone)]
pub(crate) struct World(Rc<Shared>);

impl std::ops::Deref for World {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("World")
    }
}

pub(crate) struct Shared {
    pub(crate) simulation: Simulation,
    pub(crate) net: Arc<Net>,
    dice: Dice,
    /// Dice of operators whose decisions include results and forgetting.
    decider: Option<Dice>,
    /// Dice of outages.
    outages: Option<Dice>,
    losses: Option<Dice>,
    /// Dice of steps.
    steps: Option<Dice>,
    /// Dice of operators who decide about steps.
    guards: Option<Dice>,
    pub(crate) charges: Charges,
    pub(crate) ledger: RefCell<Ledger>,
    pub(crate) operations: Vec<Operation>,
    messages: RefCell<Vec<Message>>,
    changed: Notify,
    mishaps: Mishaps,
    open: Box<dyn Fn() -> Arc<dyn Store>>,
    processes: RefCell<Vec<Process>>,
    counts: RefCell<BTreeMap<&'static str, u64>>,
    bodies: Cell<u64>,
}

struct Process {
    line: Line,
    workers: Vec<Task<()>>,
}

/// Delivery of a message, or a call that a body makes.
pub(crate) struct Delivery {
    pub(crate) world: World,
    line: Line,
    pub(crate) operation: usize,
    payload: u8,
    policy: Policy,
    pub(crate) call: usize,
    /// True if the handler has a reconciler.
    asks: bool,
}

impl Delivery {
    /// Returns a delivery of a message, or a call that the body of the run `caller` makes.
    fn new(world: &World, line: &Line, operation: usize, payload: u8, caller: Option<usize>) -> Self {
        let Operation { mut terms, mixed, bank, .. } = world.operations[operation];
        if mixed {
            terms.on_crash = world.dice.pick(&[OnCrash::Retry, OnCrash::Fail]);
        }
        // During a deployment only some processes have the release with a reconciler.
        let bank = bank.filter(|bank| bank.not_found.is_some() && (!mixed || world.charges.dice.chance(500)));
        if bank.is_some() {
            terms.on_crash = OnCrash::Fail;
        }
        let call = world.ledger.borrow_mut().call(operation, line.number(), terms, world.net.now(), caller);
        let limit = bank.map_or(Policy::DEFAULT_MAX_RECONCILIATIONS, |bank| bank.max_reconciliations);
        let (policy, asks) = (terms.policy().max_reconciliations(limit), bank.is_some());
        Self { world: world.clone(), line: line.clone(), operation, payload, policy, call, asks }
    }

    fn operation(&self) -> &Operation {
        &self.world.operations[self.operation]
    }

    fn key(&self) -> &str {
        self.operation().key.text()
    }

    /// Checks that the messages of the attempt whose end the caller has got are with the broker.
    fn check_messages(&self, result: &Result<String, Failure>, outcome: &Outcome) {
        let World(shared) = &self.world;
        let Some(mail) = &shared.net.mail else { return };
        let value = match result {
            Ok(value) => value,
            Err(Failure::Idempotency(error)) if matches!(**error, Error::ResultUnavailable { .. }) => "",
            Err(_) => return,
        };
        let history = shared.net.history();
        // The record of such an attempt may be another one than that of its body, and hold no messages.
        let is_decided = history.was_reopened(self.operation, 0..) || !history.resolved(self.operation).is_empty();
        drop(history);
        if !is_decided && self.operation().terms.ttl == FOR_EVER {
            mail.acknowledges(&self.operation().key, outcome.attempt(), value);
        }
    }

    fn ended(&self, end: CallEnd) {
        let world = &self.world;
        world.ledger.borrow_mut().end_call(&world.net, self.call, &self.operation().key, end);
    }
}

/// A delivery that is dropped before its end was killed with its process.
impl Drop for Delivery {
    fn drop(&mut self) {
        self.ended(CallEnd::Killed);
    }
}

#[idempotent(
    key = "{delivery.key()}", scope = shared("simulation"), store = delivery.line, policy = delivery.policy,
    fingerprint = delivery.payload, on_error = decide
)]
async fn recording(delivery: &Delivery, _values: Rc<Values>) -> Result<String, Failure> {
    body(delivery).await
}

#[idempotent(
    key = "{delivery.key()}", scope = shared("simulation"), store = delivery.line, policy = delivery.policy,
    fingerprint = delivery.payload
)]
async fn releasing(delivery: &Delivery, _values: Rc<Values>) -> Result<String, Failure> {
    body(delivery).await
}

/// Handler of an earlier release, which passes no fingerprint.
#[idempotent(key = "{delivery.key()}", scope = shared("simulation"), store = delivery.line, policy = delivery.policy)]
async fn unmarked(delivery: &Delivery, _values: Rc<Values>) -> Result<String, Failure> {
    body(delivery).await
}

/// Handler with a reconciler.
#[idempotent(
    key = "{delivery.key()}", scope = shared("simulation"), store = delivery.line, policy = delivery.policy,
    fingerprint = delivery.payload, on_error = decide, on_crash = reconcile(find(delivery))
)]
async fn asking(delivery: &Delivery, _values: Rc<Values>) -> Result<String, Failure> {
    body(delivery).await
}

fn decide(failure: &Failure) -> OnError {
    match failure {
        Failure::Lasting(_) => OnError::Record,
        Failure::Doubtful(_) => OnError::Uncertain,
        _ => OnError::Release,
    }
}

/// Argument that the body does not mention, and that is therefore dropped as the last value of the body.
struct Values {
    world: World,
    call: usize,
}

impl Drop for Values {
    fn drop(&mut self) {
        let world = &self.world;
        world.ledger.borrow_mut().drop_values(&world.net, self.call);
    }
}

/// Running body, whose events are entered in the books.
struct Running<'a> {
    delivery: &'a Delivery,
    run: usize,
    attempt: Attempt,
    polled: &'a Cell<u64>,
}

impl Running<'_> {
    fn end(&self, end: BodyEnd) {
        let world = &self.delivery.world;
        world.ledger.borrow_mut().end_run(&world.net, self.run, self.polled.get(), end);
    }

    fn believe(&self) {
        let world = &self.delivery.world;
        world.ledger.borrow_mut().believe(&world.net, self.delivery.call, &self.attempt);
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.end(BodyEnd::Dropped);
    }
}

async fn body(delivery: &Delivery) -> Result<String, Failure> {
    let polled = Cell::new(0);
    let mut steps = pin!(steps(delivery, &polled));
    poll_fn(|cx| {
        polled.set(delivery.world.net.history().event());
        steps.as_mut().poll(cx)
    })
    .await
}

/// Steps of a body. `polled` holds the start of its latest poll.
async fn steps(delivery: &Delivery, polled: &Cell<u64>) -> Result<String, Failure> {
    let Delivery { world, line, payload, call, .. } = delivery;
    let World(shared) = world;
    let Shared { net, dice, mishaps, .. } = &**shared;
    let attempt = current().expect("inside of a handler");
    let run = world.ledger.borrow_mut().start(net, *call, &attempt);
    let running = Running { delivery, run, attempt, polled };
    let number = world.bodies.replace(world.bodies.get() + 1);
    let terms = delivery.operation().terms;
    let stormy = net.is_stormy();
    let name = format!("{}/{}/{number}", delivery.key(), running.attempt.number());
    // A charge that was requested may happen, whatever the error is.
    let requested = Cell::new(false);
    let fail = |lasting: bool| {
        if requested.get() {
            running.end(BodyEnd::Doubtful(name.clone()));
            return Err(Failure::Doubtful(name.clone()));
        }
        running.end(BodyEnd::Error { text: name.clone(), lasting });
        Err(if lasting { Failure::Lasting(name.clone()) } else { Failure::Passing(name.clone()) })
    };
    let longest = match stormy && dice.chance(mishaps.slow) {
        true => terms.lease * 2,
        false => terms.lease / 2,
    };
    let steps = dice.between(1, 5);
    let effect_at = dice.between(0, steps - 1);
    let parts = Parts { running: &running, name: &name, longest };
    let parts_at = world.steps.as_ref().map(|dice| dice.between(0, steps - 1));
    let mut charged = None;
    let pushes_at = net.mail.as_ref().map(|mail| mail.dice.between(0, steps - 1));
    for step in 0..steps {
        if pushes_at == Some(step) {
            net.push_messages(&running.attempt, &name);
        }
        match dice.between(0, 5) {
            0 => {}
            1 => yield_now().await,
            2 => {
                world.ledger.borrow_mut().runs[run].confirms = true;
                if running.attempt.confirm_lease().await.is_err() && dice.chance(500) {
                    world.count("bodies that could not confirm their lease");
                    return fail(false);
                }
            }
            3 if delivery.operation().inner.is_some() => {
                let inner = delivery.operation().inner.expect("just seen");
                let inner = Delivery::new(world, line, inner, *payload, Some(run));
                if let Err(Failure::Idempotency(_)) = Box::pin(call_once(&inner)).await {
                    return fail(false);
                }
            }
            _ if stormy && mishaps.blocked > 0 && dice.chance(mishaps.blocked) => {
                world.count("polls that block");
                world.ledger.borrow_mut().blocks(run);
                net.clock.block(dice.up_to(longest));
            }
            _ => net.clock.sleep(dice.up_to(longest)).await,
        }
        running.believe();
        if stormy && dice.chance(mishaps.panics) {
            running.end(BodyEnd::Panicked);
            // `panic!` would print a message.
            std::panic::resume_unwind(Box::new("a body panics"));
        }
        if parts_at == Some(step)
            && let Err(error) = parts.run_all().await
        {
            // A handler returns the error, or an error of its own. A charge that was requested may happen.
            if requested.get() || world.parts_dice().chance(500) {
                return fail(false);
            }
            running.end(BodyEnd::Error { text: error.text(), lasting: false });
            return Err(error);
        }
        if step == effect_at
            && let Some(bank) = delivery.operation().bank
        {
            requested.set(true);
            let answer = world.charge(delivery.operation, bank, &name).await;
            running.believe();
            if answer.is_none() {
                return fail(false);
            }
            charged = answer;
        }
        if step == effect_at {
            let event = net.history().event();
            net.history().note(format!("process {}: effect of {name}", line.number()));
            world.ledger.borrow_mut().runs[run].effect = Some(event);
        }
        if stormy && dice.chance(mishaps.errors) {
            return fail(dice.chance(500));
        }
    }
    let value = value_of(charged, dice.chance(60), &name);
    running.end(BodyEnd::Value(value.clone()));
    if let Some(mail) = &net.mail {
        mail.returns(&name);
    }
    Ok(value)
}

/// Returns the value of the body `name`. A value that `is_large` is larger than the policy allows.
fn value_of(charged: Option<String>, is_large: bool, name: &str) -> String {
    match (charged, is_large) {
        (Some(charged), _) => charged,
        (None, true) => format!("{name:-<99}"),
        (None, false) => name.to_owned(),
    }
}

/// Steps of a body: parts of the handler whose values are journaled.
struct Parts<'a> {
    running: &'a Running<'a>,
    /// Name of the body.
    name: &'a str,
    /// Longest pause of a body.
    longest: Duration,
}

impl Parts<'_> {
    /// Runs the steps one after the other, or joined.
    async fn run_all(&self) -> Result<(), Failure> {
        let delivery = self.running.delivery;
        let (world, count) = (&delivery.world, delivery.operation().terms.steps);
        let dice = world.parts_dice();
        if dice.chance(400) {
            let ended = futures::future::join_all((0..count).map(|step| self.run(step))).await;
            return ended.into_iter().collect();
        }
        for step in 0..count {
            if let Err(error) = self.run(step).await {
                // Some handlers go on without the value.
                if !dice.chance(300) {
                    return Err(error);
                }
                world.ledger.borrow_mut().runs[self.running.run].skips_steps = true;
            }
            if dice.chance(300) {
                world.net.clock.sleep(dice.up_to(self.longest / 2)).await;
                self.running.believe();
            }
        }
        Ok(())
    }

    async fn run(&self, step: u8) -> Result<(), Failure> {
        let Running { delivery, run, attempt, .. } = self.running;
        let World(shared) = &delivery.world;
        let Shared { net, ledger, .. } = &**shared;
        let dice = delivery.world.parts_dice();
        let number = Cell::new(None);
        let guard = delivery.operation().terms.guards[usize::from(step)];
        let fails = guard.is_some_and(|guard| !guard.reconciles);
        let is_uncertain = |error: &Failure| {
            matches!(error, Failure::Doubtful(_)) && net.prank != DeliberateBreak::StepErrorsAreCertain
        };
        let running = async {
            let described = attempt.step(("part", step));
            match guard {
                None => described.run(async |_| self.body(step, &number).await).await,
                Some(guard) if guard.reconciles => {
                    let described = described.reconcile(async |_| self.find_charge(step, guard.bank).await);
                    let described = described.uncertain_errors_if(is_uncertain);
                    described.run(async |_| self.charge(step, guard.bank, &number).await).await
                }
                Some(guard) => {
                    let described = described.fail().uncertain_errors_if(is_uncertain);
                    described.run(async |_| self.charge(step, guard.bank, &number).await).await
                }
            }
        };
        let patience = async {
            match net.is_stormy() && dice.chance(100) {
                true => net.clock.sleep(dice.up_to(self.longest / 2)).await,
                false => std::future::pending().await,
            }
        };
        let ended = match select(pin!(running), pin!(patience)).await {
            Either::Left((ended, _)) => ended,
            Either::Right(_) => {
                net.count("steps that their body dropped");
                if let Some(number) = number.get() {
                    ledger.borrow_mut().steps[number].dropped = true;
                    ledger.borrow_mut().runs[*run].step_doubt |= fails;
                }
                ledger.borrow_mut().runs[*run].skips_steps = true;
                return Ok(());
            }
        };
        self.running.believe();
        match &ended {
            Ok(value) => ledger.borrow_mut().step_returns(net, *run, step, value),
            Err(Failure::Idempotency(error)) => match &**error {
                Error::Step { problem: StepProblem::Interrupted { .. }, .. } if fails => {
                    net.count("steps in doubt that were refused");
                    ledger.borrow_mut().doubts_step(*run);
                }
                Error::Step { problem: StepProblem::Unresolved { .. }, .. } if guard.is_some() && !fails => {
                    net.count("steps that a reconciler did not know");
                }
                Error::Step { .. } => {
                    let text = format!("step {step} of run {run} is refused: {error}");
                    ledger.borrow_mut().find(Check::StepMissing, delivery.operation, text);
                }
                _ => net.count("steps whose entry was not confirmed"),
            },
            Err(Failure::Doubtful(_)) => {
                net.count("uncertain errors of steps");
                if fails {
                    ledger.borrow_mut().doubts_step(*run);
                }
            }
            Err(_) => net.count("errors of steps"),
        }
        ended.map(drop).map_err(|error| match error {
            // The error of the body says nothing about the step.
            Failure::Doubtful(text) => Failure::Passing(text),
            other => other,
        })
    }

    /// Begins the body of a step. Returns its number in the books and its value.
    async fn begin(&self, step: u8, number: &Cell<Option<usize>>) -> (usize, String) {
        let Running { delivery, run, .. } = self.running;
        let (net, dice) = (&delivery.world.net, delivery.world.parts_dice());
        let value = format!("{}#{step}", self.name);
        let started = delivery.world.ledger.borrow_mut().start_step(net, *run, step, value.clone());
        number.set(Some(started));
        match dice.between(0, 3) {
            0 => {}
            1 => yield_now().await,
            _ => net.clock.sleep(dice.up_to(self.longest / 2)).await,
        }
        (started, value)
    }

    /// Reports whether a step fails before its effect.
    fn fails(&self) -> bool {
        let world = &self.running.delivery.world;
        world.net.is_stormy() && world.parts_dice().chance(world.mishaps.errors)
    }

    /// Body of a step without a reaction to doubts.
    async fn body(&self, step: u8, number: &Cell<Option<usize>>) -> Result<String, Failure> {
        let world = &self.running.delivery.world;
        let (net, dice) = (&world.net, world.parts_dice());
        let (started, value) = self.begin(step, number).await;
        if self.fails() {
            return Err(Failure::Passing(value));
        }
        world.ledger.borrow_mut().step_effect(net, started);
        match dice.between(0, 3) {
            0 => yield_now().await,
            1 => net.clock.sleep(dice.up_to(self.longest / 4)).await,
            _ => {}
        }
        Ok(value)
    }

    /// Body of a step under `fail` or with a reconciler: charges the bank of the step. An error is uncertain once the
    /// charge was requested.
    async fn charge(&self, step: u8, bank: Bank, number: &Cell<Option<usize>>) -> Result<String, Failure> {
        let Delivery { world, operation, .. } = self.running.delivery;
        let (started, value) = self.begin(step, number).await;
        if self.fails() {
            world.ledger.borrow_mut().step_failed(&world.net, started);
            return Err(Failure::Passing(value));
        }
        let account = world.charges.account(*operation, step);
        world.charge(account, bank, &value).await.ok_or(Failure::Doubtful(value))
    }

    /// Reconciler of a step: asks the bank of the step, and sometimes fails.
    async fn find_charge(&self, step: u8, bank: Bank) -> Result<Reconciliation<String>, Failure> {
        let Running { delivery, run, .. } = self.running;
        let Delivery { world, operation, .. } = delivery;
        let (net, dice) = (&world.net, world.parts_dice());
        let inquiry = world.ledger.borrow_mut().start_step_inquiry(net, *run, step);
        // A bank that does not refuse a second request is asked after every earlier request has expired, or answers
        // that it does not know yet.
        let knows = match bank.not_found {
            Some(NotFound::NotDoneAfterExpiry) => true,
            Some(NotFound::Unknown) => !net.is_stormy(),
            Some(NotFound::NotDone) | None => false,
        };
        if knows {
            net.clock.sleep(bank.expiry).await;
            self.running.believe();
        }
        if net.is_stormy() && dice.chance(100) {
            return Err(Failure::Passing(format!("question {inquiry}")));
        }
        let found = world.charges.of(world.charges.account(*operation, step)).first().cloned();
        net.clock.sleep(dice.up_to(self.longest / 4)).await;
        self.running.believe();
        Ok(match (found, net.prank) {
            (Some(name), _) => Reconciliation::Done(name),
            (None, _) if knows || bank.not_found == Some(NotFound::NotDone) => {
                world.ledger.borrow_mut().step_not_done(net, inquiry);
                Reconciliation::NotDone
            }
            (None, DeliberateBreak::StepUnknownIsNotDone) => Reconciliation::NotDone,
            (None, DeliberateBreak::StepUnknownIsDone) => Reconciliation::Done("nothing".to_owned()),
            _ => Reconciliation::Unknown { ask_again: delivery.operation().terms.lease / 4 },
        })
    }
}

/// Calls the handler of `delivery`, counts its outcome, and enters the end of the call in the books.
async fn call_once(delivery: &Delivery) -> Result<String, Failure> {
    let values = Rc::new(Values { world: delivery.world.clone(), call: delivery.call });
    let _longer =
        Some(Rc::clone(&values)).filter(|_| delivery.world.net.prank == DeliberateBreak::ValuesOutliveTheirCall);
    let (result, outcome) = match (delivery.payload, delivery.operation().records) {
        _ if delivery.asks => observe(asking(delivery, values)).await,
        // An uncertain error of the earlier release would free its key.
        (UNMARKED, _) if delivery.operation().bank.is_none() => observe(unmarked(delivery, values)).await,
        (_, true) => observe(recording(delivery, values)).await,
        (_, false) => observe(releasing(delivery, values)).await,
    };
    delivery.world.count_outcome(&result, &outcome);
    delivery.check_messages(&result, &outcome);
    delivery.ended(CallEnd::Returned(result.clone(), outcome));
    result
}

impl World {
    pub(crate) fn count(&self, what: &'static str) {
        *self.counts.borrow_mut().entry(what).or_default() += 1;
    }

    /// Dice of a world whose bodies have steps.
    fn parts_dice(&self) -> &Dice {
        self.steps.as_ref().expect("a world with steps")
    }

    fn count_outcome(&self, result: &Result<String, Failure>, outcome: &idem_runtime::Outcome) {
        self.count("calls");
        let facts = [
            (outcome.executed(), "runs"),
            (outcome.replayed(), "replays"),
            (outcome.waited(), "calls that waited"),
            (outcome.took_over(), "takeovers"),
            (outcome.bypassed() == Some(Refusal::Store), "runs without protection"),
            (outcome.recorded() && result.is_err(), "errors that were recorded or replayed"),
            (outcome.recorded() && !outcome.result_stored(), "completions without their result"),
            (outcome.reconciled() && result.is_ok(), "results that a reconciler supplied"),
            (matches!(result, Err(Failure::Doubtful(_))) && outcome.uncertain(), "uncertain errors"),
        ];
        facts.into_iter().filter(|(is, _)| *is).for_each(|(_, what)| self.count(what));
        if let Err(Failure::Idempotency(error)) = result {
            self.count(match &**error {
                Error::InProgress { .. } => "InProgress",
                Error::FingerprintMismatch { .. } => "FingerprintMismatch",
                Error::Interrupted { .. } => "Interrupted",
                Error::AttemptsExhausted { .. } => "AttemptsExhausted",
                Error::LeaseLost { .. } => "LeaseLost",
                Error::Unrecorded { .. } => "Unrecorded",
                Error::ResultUnavailable { .. } => "ResultUnavailable",
                Error::Store { .. } => "Store",
                Error::Unsent { .. } => "Unsent",
                _ => "other errors",
            });
        }
    }

    /// Takes a message that can be delivered now. If there is none, returns the time of the next delivery.
    fn take(&self) -> Result<(usize, usize, u8), Option<u64>> {
        let mut messages = self.messages.borrow_mut();
        let now = self.net.now();
        let visible: Vec<usize> =
            (0..messages.len()).filter(|n| !messages[*n].settled && messages[*n].visible_at <= now).collect();
        if visible.is_empty() {
            return Err(messages.iter().filter(|it| !it.settled).map(|it| it.visible_at).min());
        }
        let n = self.dice.pick(&visible);
        let lease = self.operations[messages[n].operation].terms.lease;
        // The broker delivers the message again at this time, often while its worker still runs.
        messages[n].visible_at = now + nanos(lease / 4 + self.dice.up_to(lease * 2));
        Ok((n, messages[n].operation, messages[n].payload))
    }

    fn settle(&self, message: usize) {
        self.messages.borrow_mut()[message].settled = true;
        self.changed.notify_waiters();
    }

    fn retry(&self, message: usize, after: Duration) {
        let at = self.net.now() + nanos(after);
        self.messages.borrow_mut()[message].visible_at = at;
        self.changed.notify_waiters();
    }

    fn is_over(&self) -> bool {
        self.messages.borrow().iter().all(|message| message.settled)
    }

    async fn work(self, line: Line) {
        while !self.is_over() {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let (message, operation, payload) = match self.take() {
                Ok(taken) => taken,
                Err(again) => {
                    let wait = again.map_or(0, |at| at - self.net.now());
                    select(changed, self.net.clock.sleep(Duration::from_nanos(wait))).await;
                    continue;
                }
            };
            self.handle(&line, message, operation, payload).await;
        }
    }

    async fn handle(&self, line: &Line, message: usize, operation: usize, payload: u8) {
        let delivery = Delivery::new(self, line, operation, payload, None);
        let lease = self.operations[operation].terms.lease;
        let gives_up = self.net.is_stormy() && self.dice.chance(self.mishaps.cancelled);
        let ended = {
            let called = pin!(AssertUnwindSafe(call_once(&delivery)).catch_unwind());
            let patience = async {
                if !gives_up {
                    std::future::pending::<()>().await;
                }
                match self.dice.chance(500) {
                    true => self.net.clock.sleep(self.dice.up_to(lease)).await,
                    false => idem_tests::yields(u32::try_from(self.dice.between(0, 12)).expect("few")).await,
                }
            };
            match select(called, pin!(patience)).await {
                Either::Left((ended, _)) => Some(ended),
                Either::Right(_) => None,
            }
            // The end of this block drops the call.
        };
        match ended {
            None => {
                self.count("callers that gave up");
                delivery.ended(CallEnd::Cancelled);
                self.retry(message, self.dice.up_to(lease));
            }
            Some(Err(_)) => {
                self.count("panics");
                delivery.ended(CallEnd::Panicked);
                self.retry(message, self.dice.up_to(lease));
            }
            Some(Ok(_)) => {
                let disposition = match &self.ledger.borrow().calls[delivery.call].end {
                    Some((_, CallEnd::Returned(_, outcome))) => outcome.disposition(),
                    other => unreachable!("entered by `call_once`: {other:?}"),
                };
                match disposition {
                    Disposition::Ack | Disposition::DeadLetter => self.settle(message),
                    Disposition::Retry { after } => {
                        // A broker may deliver earlier than requested.
                        self.retry(message, after.min(self.dice.up_to(lease)));
                    }
                }
            }
        }
    }

    fn start_process(&self) {
        let number = self.processes.borrow().len();
        let is_drawn = |dice: &&Dice| self.net.is_stormy() && dice.chance(600);
        let loss = self.losses.as_ref().filter(is_drawn).map(|dice| {
            let from = self.net.now() + nanos(dice.up_to(self.net.longest_lease() * 3));
            Loss::draw(dice, from)
        });
        let line = Line::new(number, (self.open)(), Arc::clone(&self.net), loss);
        let line = match &self.net.mail {
            Some(_) => line.clone().with_sender(Postbox::of(&line, &self.net)),
            None => line,
        };
        if let Some(loss) = loss {
            self.count("rights that a process lost");
            self.ledger.borrow_mut().losses.push((number, loss));
        }
        let workers =
            (0..self.dice.between(1, 3)).map(|_| self.simulation.spawn(self.clone().work(line.clone()))).collect();
        self.net.history().note(format!("process {number} starts"));
        self.processes.borrow_mut().push(Process { line, workers });
    }

    /// Kills processes and starts new ones, until the storm ends.
    async fn kill_now_and_then(self, storm: Duration) {
        while self.net.is_stormy() {
            self.net.clock.sleep(Duration::from_millis(1) + self.dice.up_to(storm / 6)).await;
            let alive = self.alive();
            if !self.net.is_stormy() || !self.dice.chance(self.mishaps.kills) {
                continue;
            }
            let n = self.dice.pick(&alive);
            self.kill(n);
            self.net.clock.sleep(self.dice.up_to(storm / 8)).await;
            self.start_process();
        }
    }

    fn kill(&self, n: usize) {
        self.count("kills");
        self.net.history().note(format!("process {n} is killed"));
        self.ledger.borrow_mut().kills.push((n, self.net.now()));
        let workers = {
            let mut processes = self.processes.borrow_mut();
            processes[n].line.die();
            std::mem::take(&mut processes[n].workers)
        };
        workers.iter().for_each(Task::kill);
    }

    /// Indices of the living processes.
    fn alive(&self) -> Vec<usize> {
        let processes = self.processes.borrow();
        (0..processes.len()).filter(|n| !processes[*n].line.is_dead()).collect()
    }

    /// Cuts off a process, or all processes, for several leases. Some processes die while they are cut off.
    async fn cut_off_now_and_then(self, dice: Dice, storm: Duration) {
        let lease = self.net.longest_lease();
        while self.net.is_stormy() {
            self.net.clock.sleep(Duration::from_millis(1) + dice.up_to(storm / 3)).await;
            let alive = self.alive();
            if !self.net.is_stormy() || alive.is_empty() {
                continue;
            }
            let process = dice.chance(700).then(|| dice.pick(&alive));
            let outage = Arc::new(Outage::draw(&dice, process, lease));
            let length = outage.length();
            self.net.begin_outage(outage);
            let until_death = dice.up_to(length);
            self.net.clock.sleep(until_death).await;
            if let Some(n) = process.filter(|_| dice.chance(300))
                && self.alive().contains(&n)
            {
                self.kill(n);
                self.start_process();
            }
            self.net.clock.sleep(length.saturating_sub(until_death)).await;
            self.net.end_outage(&dice).await;
        }
    }

    /// Replaces processes that have lost a right, as a new deployment does. The replacement happens some leases after
    /// the other faults have ended.
    async fn replace_who_lost_rights(&self) {
        let lost: Vec<usize> = {
            let processes = self.processes.borrow();
            (0..processes.len()).filter(|n| processes[*n].line.loss().is_some()).collect()
        };
        if lost.is_empty() {
            return;
        }
        self.net.clock.sleep(self.net.longest_lease() * 5).await;
        let alive = self.alive();
        for n in lost.into_iter().filter(|n| alive.contains(n)) {
            self.count("processes that were replaced because they had lost a right");
            self.kill(n);
            self.start_process();
        }
    }

    /// Acts as an operator who inspects a key, and then reopens it, breaks its lease, or decides otherwise.
    async fn decide_now_and_then(self, storm: Duration) {
        let line = Line::new(99, (self.open)(), Arc::clone(&self.net), None);
        let (often, pause) = match self.decider {
            Some(_) => (500, storm / 8),
            None => (self.mishaps.operators, storm / 2),
        };
        while self.net.is_stormy() {
            self.net.clock.sleep(Duration::from_millis(1) + self.dice.up_to(pause)).await;
            if !self.dice.chance(often) {
                continue;
            }
            let n = usize::try_from(self.dice.between(0, self.operations.len() as u64 - 1)).expect("few");
            let key = &self.operations[n].key;
            let Ok(Some(found)) = line.inspect(key).await else { continue };
            if matches!(found.record.state, State::Completed(_) | State::Failed(_)) && self.dice.chance(700) {
                continue;
            }
            let decision = match found.record.is_pending() && self.dice.chance(400) {
                true => Decision::break_lease(key, &found),
                false if found.record.is_finished() => Decision::discard(key, &found),
                false => Decision::reopen(key, &found),
            };
            let decision = match &self.decider {
                Some(dice) => self.decision(dice, key, &found).unwrap_or(decision),
                None => decision,
            };
            if let Some(dice) = self.decider.as_ref().filter(|dice| dice.chance(300)) {
                // A person takes some time to decide, and the record may change meanwhile.
                self.net.clock.sleep(dice.up_to(storm / 8)).await;
            }
            self.decide(&line, &decision).await;
            let Some(dice) = &self.decider else { continue };
            if dice.chance(300) {
                // The operator repeats the decision, because its answer got lost.
                self.decide(&line, &decision).await;
            }
            if dice.chance(300) {
                // A second operator, who has inspected the same record, decides too.
                self.net.clock.sleep(dice.up_to(storm / 8)).await;
                let other = self.decision(dice, key, &found).unwrap_or_else(|| Decision::reopen(key, &found));
                self.decide(&line, &other.by("bob")).await;
            }
        }
    }

    async fn decide(&self, line: &Line, decision: &Decision) {
        let decided = line.decide(decision).await;
        self.count("decisions of operators");
        self.count(match (decided, &decision.action) {
            (Ok(DecisionAnswer::Applied), Action::Resolve(_)) => "results that an operator supplied",
            (Ok(DecisionAnswer::Applied), Action::Forget) => "records that an operator had forgotten",
            (Ok(DecisionAnswer::LiveLease { .. }), _) => "decisions that a live lease refused",
            (Ok(DecisionAnswer::Changed { .. }), _) => "decisions about records that had changed",
            _ => "other decisions of operators",
        });
    }

    /// Acts as an operator who decides about steps. The operator asks the bank, and is not always right: a request may
    /// be under way.
    async fn decide_steps_now_and_then(self, dice: Dice, storm: Duration) {
        let line = Line::new(98, (self.open)(), Arc::clone(&self.net), None);
        while self.net.is_stormy() {
            self.net.clock.sleep(Duration::from_millis(1) + dice.up_to(storm / 10)).await;
            let n = usize::try_from(dice.between(0, self.operations.len() as u64 - 1)).expect("few");
            let key = &self.operations[n].key;
            let Ok(Some(found)) = line.inspect(key).await else { continue };
            let Ok(steps) = found.steps() else { continue };
            if steps.is_empty() {
                continue;
            }
            if dice.chance(300) {
                // A person takes some time to decide, and the attempt may journal another entry meanwhile.
                self.net.clock.sleep(dice.up_to(storm / 8)).await;
            }
            let operator = line.operator().by("carol");
            let in_doubt = steps.iter().find(|step| step.state() == StepState::InDoubt);
            let (what, decided) = match (dice.between(0, 9), in_doubt) {
                (0, _) => ("operations reopened without steps", operator.reopen_without_steps(key, &found).await),
                (1, _) => {
                    let from = &steps[usize::try_from(dice.between(0, steps.len() as u64 - 1)).expect("few")];
                    ("operations reopened from a step", operator.reopen_from(key, &found, from.name()).await)
                }
                (_, Some(step)) => {
                    let number = (0..3).find(|number| step_name(*number) == step.name()).expect("a step of the world");
                    let charge = self.charges.of(self.charges.account(n, number)).first().cloned();
                    let (what, resolution) = match charge {
                        Some(name) => ("steps that an operator declared done", StepResolution::done(&name)),
                        None => ("steps that an operator declared not done", Ok(StepResolution::not_done())),
                    };
                    let resolution = resolution.expect("a text is written");
                    (what, operator.resolve_step(key, &found, step.name(), resolution).await)
                }
                _ => continue,
            };
            self.count(match decided {
                Ok(()) => what,
                Err(OperatorError::LiveLease { .. }) => "decisions about steps that a live lease refused",
                Err(OperatorError::Changed { .. }) => "decisions about steps of records that had changed",
                Err(_) => "other decisions about steps",
            });
        }
    }

    /// Returns a decision with a result, or a decision to forget the record; `None` if the operator only reopens keys.
    fn decision(&self, dice: &Dice, key: &Key, found: &Inspection) -> Option<Decision> {
        let (number, attempt) = (self.bodies.get(), found.attempt());
        let text = format!("{}/{attempt}/resolved after {number}", key.text());
        let encoded = |bytes: Result<Vec<u8>, _>| {
            let bytes = bytes.expect("texts are written").into();
            StoredResult::Encoded { codec: CodecName::new(b"json").expect("a name"), bytes }
        };
        let finish = match dice.between(0, 9) {
            0..3 => return None,
            3 => return Some(Decision::forget(key, found)),
            4..7 => Finish::Completed(encoded(serde_json::to_vec(&text))),
            7 => Finish::Completed(StoredResult::Unencodable),
            8 => Finish::Failed(encoded(serde_json::to_vec(&Failure::Lasting(text)))),
            _ => Finish::Failed(StoredResult::Unencodable),
        };
        Some(Decision::resolve(key, found, finish))
    }

    /// Advances the clock while all tasks stand still, as if processes were stopped and continued.
    async fn jump_now_and_then(self, storm: Duration) {
        while self.net.is_stormy() {
            self.net.clock.sleep(Duration::from_millis(1) + self.dice.up_to(storm / 3)).await;
            if self.net.is_stormy() && self.dice.chance(self.mishaps.jumps) {
                self.count("jumps of time");
                self.net.jump(self.dice.up_to(storm / 2));
            }
        }
    }

    /// Runs the world from the first message to the last.
    async fn live(self, storm: Duration) {
        for _ in 0..self.dice.between(1, 3) {
            self.start_process();
        }
        self.simulation.spawn(self.clone().kill_now_and_then(storm));
        self.simulation.spawn(self.clone().decide_now_and_then(storm));
        self.simulation.spawn(self.clone().jump_now_and_then(storm));
        if self.net.mail.is_some() {
            self.simulation.spawn(self.clone().send_now_and_then(storm));
        }
        if let Some(dice) = self.guards.clone() {
            self.simulation.spawn(self.clone().decide_steps_now_and_then(dice, storm));
        }
        let outages =
            self.outages.clone().map(|dice| self.simulation.spawn(self.clone().cut_off_now_and_then(dice, storm)));
        self.net.clock.sleep(storm).await;
        self.net.clear_up();
        self.net.history().note("the faults stop".to_owned());
        if let Some(outages) = outages {
            let _ = outages.await;
        }
        self.replace_who_lost_rights().await;
        loop {
            // Killed processes are replaced while this loop waits for workers.
            let worker = self.processes.borrow_mut().iter_mut().find_map(|process| process.workers.pop());
            let Some(worker) = worker else { break };
            let _ = worker.await;
        }
        // A process may have started after the loop above.
        while !self.is_over() {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            changed.await;
        }
        let lines: Vec<Line> = self.processes.borrow().iter().map(|process| process.line.clone()).collect();
        for line in lines.iter().filter(|line| !line.is_dead()) {
            line.context().flush().await;
        }
        // After this time every lease has lapsed, and every request has taken effect or is lost.
        self.net.clock.sleep(self.net.longest_lease() * 4 + LATE_WRITES).await;
        for line in lines.iter().filter(|line| !line.is_dead()) {
            if line.context().live() > 0 {
                let text = format!("process {} still keeps a lease alive", line.number());
                self.ledger.borrow_mut().find(Check::Leak, 0, text);
            }
            line.context().flush().await;
        }
        self.send_the_rest().await;
        // Inspect every key once more, for the history.
        let witness = Line::new(100, (self.open)(), Arc::clone(&self.net), None);
        for operation in &self.operations {
            let _ = witness.inspect(&operation.key).await;
        }
    }

    /// Checks that a bank charged at most once for an operation whose reconciler is right, and that it charged for each
    /// result. Not checked is an operation about which a person decided, or whose handlers differ.
    fn check_charges(&self) {
        for (n, operation) in self.operations.iter().enumerate() {
            let Some(bank) = operation.bank else { continue };
            let charges = self.charges.of(n);
            let mut ledger = self.ledger.borrow_mut();
            if let Some(text) = ledger.not_charged(&self.net, n, &charges) {
                ledger.find(Check::Charged, n, text);
            }
            let is_right = bank.not_found.is_some() && !operation.mixed;
            let is_decided = self.net.history().was_reopened(n, 0..) || !self.net.history().resolved(n).is_empty();
            if is_right && !is_decided && operation.terms.ttl == FOR_EVER && charges.len() > 1 {
                ledger.find(Check::Charged, n, format!("{bank:?} has charged {charges:?}"));
            }
        }
    }

    /// Checks the charges of steps under `fail` and of steps with a reconciler; see [`Check::StepCharged`].
    fn check_step_charges(&self) {
        for (n, operation) in self.operations.iter().enumerate() {
            let guards = (0..operation.terms.steps).zip(operation.terms.guards);
            for (step, guard) in guards.filter_map(|(step, guard)| Some((step, guard?))) {
                let history = self.net.history();
                if operation.terms.ttl != FOR_EVER || history.was_forgotten(n) {
                    continue;
                }
                let (permits, charges) =
                    (history.permits(n, &step_name(step)).len(), self.charges.of(self.charges.account(n, step)));
                // A reconciler can't know the bodies whose lease an operator broke.
                let is_right = !guard.reconciles || !history.was_broken_ever(n);
                let is_decided = permits > 0 || !history.resolved(n).is_empty();
                drop(history);
                let mut ledger = self.ledger.borrow_mut();
                if is_right && charges.len() > 1 + permits {
                    let text = format!("step {step} with {guard:?} has charged {charges:?} after {permits} permits");
                    ledger.find(Check::StepCharged, n, text);
                }
                let complete = ledger.complete(n).filter(|_| !is_decided && charges.is_empty());
                if let Some(text) =
                    complete.map(|call| format!("{call:?} has succeeded, and step {step} has not charged"))
                {
                    ledger.find(Check::StepCharged, n, text);
                }
            }
        }
    }

    /// Returns a line of a process that sends messages where nothing delivers again.
    fn resending_line(&self) -> Line {
        let line = Line::new(97, (self.open)(), Arc::clone(&self.net), None);
        line.clone().with_sender(Postbox::of(&line, &self.net))
    }

    /// Lets the broker be away at times, and sends messages by resenders beside the deliveries, until the storm ends.
    async fn send_now_and_then(self, storm: Duration) {
        let Some(mail) = &self.net.mail else { return };
        let line = self.resending_line();
        let resender = Resender::new(&line).older_than(Duration::ZERO).scan();
        while self.net.is_stormy() {
            self.net.clock.sleep(Duration::from_millis(1) + mail.dice.up_to(storm / 4)).await;
            match mail.dice.between(0, 2) {
                0 => mail.goes_away(mail::outage(&self.net, &mail.dice)),
                1 => self.count_resent(&resender.pass().await),
                _ => {}
            }
        }
    }

    fn count_resent(&self, resent: &Result<Resent, StoreError>) {
        if let Ok(Resent { done, failed, .. }) = resent {
            *self.counts.borrow_mut().entry("records that a resender has finished").or_default() += done;
            *self.counts.borrow_mut().entry("records that a resender could not finish").or_default() += failed;
        }
    }

    /// Sends the messages that no delivery has sent: those of calls that a body makes, and of inputs that were set
    /// aside.
    async fn send_the_rest(&self) {
        let Some(mail) = &self.net.mail else { return };
        mail.goes_away(0);
        let line = self.resending_line();
        let resender = Resender::new(&line).older_than(Duration::ZERO).scan();
        // The broker refuses a message nine times at most, and a pass counts one refusal.
        for _ in 0..10 {
            let resent = resender.pass().await;
            self.count_resent(&resent);
            match resent {
                Ok(Resent { failed: 0, skipped: 0, .. }) => break,
                // An earlier pass may have lost the release of a lease, under which no other pass sends.
                Ok(Resent { skipped: 1.., .. }) => self.net.clock.sleep(LEASE_OF_A_RESENDER).await,
                _ => {}
            }
        }
    }

    /// Checks that the messages of all finished records have been sent; see [`Check::MessageMissing`].
    fn check_mail(&self) {
        let Some(mail) = &self.net.mail else { return };
        for (n, operation) in self.operations.iter().enumerate() {
            let Some(found) = self.net.truth(&operation.key) else { continue };
            let is_held = |unsent: UnsentMessages| unsent.messages().iter().any(|it| !it.is_set_aside());
            if found.unsent_messages().is_some_and(is_held) {
                self.ledger.borrow_mut().find(Check::MessageMissing, n, format!("the store still holds {found:?}"));
            }
            let history = self.net.history();
            let is_decided = history.was_reopened(n, 0..) || !history.resolved(n).is_empty();
            drop(history);
            if !is_decided && operation.terms.ttl == FOR_EVER && found.record.is_finished() {
                mail.close(&operation.key, found.record.attempt);
            }
        }
        let findings = mail.take_findings(&self.net);
        self.ledger.borrow_mut().findings.extend(findings);
    }

    /// Checks that no record is still held at the end.
    fn check_leftovers(&self) {
        let met = self.net.met();
        for (n, operation) in self.operations.iter().enumerate() {
            let Some(found) = self.net.truth(&operation.key) else { continue };
            let Some(lapses_in) = found.lapses_in else { continue };
            let mut ledger = self.ledger.borrow_mut();
            let excused =
                met.iter().any(|it| it.is_about(n)) || !ledger.kills.is_empty() || self.net.jumped(0, u64::MAX);
            if !lapses_in.is_zero() || !excused {
                ledger.find(Check::Leak, n, format!("all processes have ended, and the store still holds {found:?}"));
            }
        }
    }
}

/// Runs the world of `seed`.
pub(crate) fn run(seed: u64, broken: Broken) -> Report {
    let simulation = Simulation::new(seed);
    simulation.limit_time(Duration::from_secs(6 * 3600));
    simulation.limit_polls(300_000);
    let dice = Dice::new(seed);
    let clock = simulation.clock();
    let open: Box<dyn Fn() -> Arc<dyn Store>> = match broken {
        Broken::Store(mistake) => {
            let store = Plain::with_clock(mistake, Arc::new(clock.clone()));
            Box::new(move || Arc::new(store.clone()))
        }
        _ => {
            let store = MemoryStore::options().clock(clock.clone()).build();
            Box::new(move || Arc::new(store.peer()))
        }
    };
    let lease = Duration::from_millis(dice.pick(&[240, 1_200, 30_000]));
    let weather = FaultRates {
        faults: dice.pick(&[0, 50, 150, 300]),
        late: dice.chance(500),
        // Three such delays are less than a third of the shortest lease, so that a beat is late only after a fault.
        calm: lease / 20,
        lease,
    };
    let often = dice.pick(&[0, 1, 2, 4]);
    let outages = Some(Dice::new(seed ^ OUTAGES)).filter(|dice| dice.chance(250));
    let losses = Some(Dice::new(seed ^ LOSSES)).filter(|dice| dice.chance(200));
    let mishaps = Mishaps {
        cancelled: often * dice.pick(&[0, 100]),
        panics: often * dice.pick(&[0, 20]),
        // In a world with outages enough bodies must return errors, so that some of these bodies free their keys only
        // after a long outage.
        errors: (often * dice.pick(&[0, 30])).max(if outages.is_some() { 60 } else { 0 }),
        // Lost rights matter only for bodies that need renewals.
        slow: dice.pick(&[0, 200, 500]).max(if losses.is_some() { 500 } else { 0 }),
        // Blocked bodies have separate dice, so that a seed without blocked bodies still produces the same world as
        // before they were added.
        blocked: Dice::new(!seed).pick(&[0, 0, 0, 300]),
        kills: often * dice.pick(&[0, 150, 300]),
        operators: often * dice.pick(&[0, 0, 150]),
        jumps: often * dice.pick(&[0, 0, 150]),
    };
    let prank = match broken {
        Broken::Between(prank) => prank,
        _ => DeliberateBreak::None,
    };
    let mut operations = operations(&dice, lease);
    let mail = Some(Dice::new(seed ^ MESSAGES)).filter(|dice| dice.chance(300)).map(Mail::new);
    let remembers = operations.iter().all(|operation| operation.terms.ttl == FOR_EVER);
    let net = Arc::new(Net::new(clock, dice.clone(), open(), weather, prank, (mail, remembers)));
    let singles = Dice::new(seed ^ SINGLES);
    for operation in operations.iter_mut().filter(|_| singles.chance(100)) {
        operation.terms.max_attempts = Some(1);
    }
    let steps = Some(Dice::new(seed ^ PARTS)).filter(|dice| dice.chance(300));
    if let Some(dice) = &steps {
        for operation in operations.iter_mut().filter(|_| dice.chance(800)) {
            operation.terms.steps = dice.pick(&[1, 2, 3]);
        }
    }
    let banks = Dice::new(seed ^ BANKS);
    if banks.chance(300) {
        for operation in operations.iter_mut().filter(|_| banks.chance(800)) {
            operation.bank = Some(Bank::draw(&banks, operation.terms.lease, mishaps.blocked > 0));
            // A body without a reservation would charge again, and a handler without `on_error` would free its key.
            (operation.terms.on_store_error, operation.records) = (OnStoreError::Fail, true);
        }
    }
    let guards = Some(Dice::new(seed ^ GUARDS)).filter(|dice| steps.is_some() && dice.chance(900));
    let mishaps = guards.as_ref().map_or(mishaps, |dice| guard_steps(dice, &mut operations, mishaps));
    for operation in &operations {
        net.history().key(&operation.key);
    }
    let storm = lease * u32::try_from(dice.between(2, 12)).expect("few");
    let with_payloads = dice.chance(500);
    let mut messages: Vec<Message> = (0..dice.between(2, 16))
        .map(|_| Message {
            operation: usize::try_from(dice.between(0, operations.len() as u64 - 1)).expect("few"),
            payload: dice.pick(if with_payloads { &[0, 0, 0, 0, 0, 0, 1, UNMARKED, UNMARKED] } else { &[0] }),
            visible_at: nanos(dice.up_to(storm)) * dice.between(0, 1),
            settled: false,
        })
        .collect();
    for message in messages.iter_mut().filter(|it| operations[it.operation].bank.is_some() && it.payload == UNMARKED) {
        message.payload = 0;
    }
    let world = World(Rc::new(Shared {
        simulation,
        net,
        dice,
        // Operators who record results or forget records have separate dice, so that a seed without such operators
        // still produces the same world as before they were added.
        decider: Some(Dice::new(seed ^ DECIDERS)).filter(|dice| dice.chance(300)),
        outages,
        losses,
        steps,
        guards,
        charges: Charges::new(banks, operations.len()),
        ledger: RefCell::default(),
        operations,
        messages: RefCell::new(messages),
        changed: Notify::new(),
        mishaps,
        open,
        processes: RefCell::default(),
        counts: RefCell::default(),
        bodies: Cell::new(0),
    }));
    let ended = world.simulation.try_run(world.clone().live(storm));
    finish(world, seed, ended.err().map(|stuck| stuck.to_string()))
}

/// Draws reactions of the steps of `operations` to doubts. Returns the mishaps of such a world, in which enough bodies
/// are cut off inside of their steps.
fn guard_steps(dice: &Dice, operations: &mut [Operation], mishaps: Mishaps) -> Mishaps {
    for operation in operations.iter_mut().filter(|it| it.bank.is_none() && it.terms.steps > 0) {
        let lease = operation.terms.lease;
        operation.terms.guards = std::array::from_fn(|_| {
            let guard = Guard::draw(dice, lease, mishaps.blocked > 0);
            dice.chance(800).then_some(guard)
        });
        // A body without a reservation would charge again.
        operation.terms.on_store_error = OnStoreError::Fail;
    }
    Mishaps { kills: mishaps.kills.max(300), cancelled: mishaps.cancelled.max(100), ..mishaps }
}

fn operations(dice: &Dice, lease: Duration) -> Vec<Operation> {
    let count = usize::try_from(dice.between(1, 3)).expect("few");
    let nested = dice.chance(300);
    let mut operations: Vec<Operation> = Vec::new();
    for n in 0..count + usize::from(nested) {
        let terms = Terms {
            ttl: if dice.chance(80) { lease * 3 } else { FOR_EVER },
            lease: lease / dice.pick(&[1, 1, 2]),
            on_crash: dice.pick(&[OnCrash::Retry, OnCrash::Retry, OnCrash::Fail]),
            in_progress: match dice.chance(500) {
                true => InProgress::Wait(Duration::from_millis(1) + dice.up_to(lease * 3)),
                false => InProgress::Reject,
            },
            max_attempts: dice.pick(&[None, None, Some(2), Some(4)]),
            on_store_error: dice.pick(&[OnStoreError::Fail, OnStoreError::Fail, OnStoreError::Fail, OnStoreError::Run]),
            max_result_bytes: 60,
            steps: 0,
            guards: [None; STEPS],
        };
        let key = Key::new("simulation", format!("k{n}")).expect("valid");
        let inner = (nested && n < count).then_some(count);
        operations.push(Operation {
            key,
            inner,
            terms,
            mixed: dice.chance(200),
            records: dice.chance(500),
            bank: None,
        });
    }
    operations
}

fn finish(world: World, seed: u64, stuck: Option<String>) -> Report {
    // A world that does not end may have an endless history, so its history is not checked.
    let ends = stuck.is_none();
    if let Some(stuck) = stuck {
        world.ledger.borrow_mut().find(Check::Stuck, 0, stuck);
    } else {
        world.check_leftovers();
        let net = Arc::clone(&world.net);
        world.ledger.borrow_mut().close(&net);
        world.check_mail();
        world.check_charges();
        world.check_step_charges();
    }
    for key in (0..world.operations.len()).filter(|_| ends) {
        let verdict = linearize::check(&world.net.history(), key);
        let check = match verdict {
            Judgement::Linearizable => continue,
            Judgement::NotLinearizable { .. } => Check::Linearizable,
            Judgement::Undecided => Check::Undecided,
        };
        world.ledger.borrow_mut().find(check, key, format!("{verdict:?}"));
    }
    let mut counts = world.counts.take();
    counts.extend(world.net.counts());
    counts.insert("operations of the store", world.net.history().ops.len() as u64);
    counts.insert("faults", world.net.met().len() as u64);
    counts.insert("processes", world.processes.borrow().len() as u64);
    let findings = std::mem::take(&mut world.ledger.borrow_mut().findings);
    Report { seed, findings, counts, world }
}
