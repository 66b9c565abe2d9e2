//! The books of a world are a log of every call, every run of a body and every effect. This file also has the rules
//! that the books must satisfy.

use std::fmt::{self, Write as _};

use std::time::Duration;

use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::Finish;
use idem_runtime::{Attempt, Error, InProgress, Key, OnCrash, OnStoreError, Outcome, Policy, StoreError};

use crate::bank::Guard;
use crate::history::nanos;
use crate::outage::{Loss, Right};
use crate::store::{Cause, Met, Net};
use crate::world::{Failure, STEPS};

/// Rule that a finding breaks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Check {
    /// Some order of the operations explains all answers of the store.
    Linearizable,
    /// The search for an order that explains all answers comes to an end.
    Undecided,
    /// A body starts under a lease. The store grants each lease for at least as long as the process of the body relies
    /// on it, so no two bodies run under live leases.
    Belief,
    /// Fencing tokens grow and never repeat, and each body gets the latest token.
    Fencing,
    /// A body runs again only if a guarantee allows it.
    DoubleEffect,
    /// A lease is lost only after a fault or a crash.
    Lapse,
    /// A heartbeat that finds the lease lost cancels the body.
    Cancelled,
    /// Under `on_crash = fail`, no body follows a body that started and did not return.
    AtMostOnce,
    /// A replay returns the result of the attempt that it names, and every replay returns the same result.
    Replay,
    /// `Ok` is returned only once the result is recorded.
    Recorded,
    /// A result is left out of its record only if the store refuses it for good, or for half a lease and after each of
    /// two renewals.
    LeftOut,
    /// Every message is acknowledged or set aside in the end, and every failed call has a reason.
    MissingEffect,
    /// At the end of the world, no key is held.
    Leak,
    /// The values of a body are dropped before the end of its attempt is requested.
    Values,
    /// A waiting duplicate is woken when the attempt for which it waits ends. A failing store ends no wait.
    Woken,
    /// An operator's decisions hold: while a lease is live, the store applies only `BreakLease`. After an operator has
    /// resolved an operation, no body runs until an operator allows it.
    Decided,
    /// A body that needs a mark begins only after the store has marked its record.
    Marked,
    /// A key is interrupted only if its body began.
    Interrupted,
    /// An attempt counts against `max_attempts` only if its body began.
    Counted,
    /// Under `on_crash = fail`, a body that returns ends its attempt, even after a long outage.
    Freed,
    /// If the store permanently refuses a request, no body and no call goes on for longer than a lease.
    Frozen,
    /// `LeaseLost` has a reason: another attempt took over, or the error says why the lease was not renewed.
    Reason,
    /// No body follows a body whose effect is in doubt before a reconciler has answered `NotDone`. No body runs beside
    /// its reconciler.
    Doubt,
    /// A call returns the answer of its reconciler only if the reconciler gave this answer.
    Reconciled,
    /// A bank charges at most once if the reconciler is right, and has charged for each result.
    Charged,
    /// No later attempt runs a step whose entry is in the record. A step runs again only if a fault has cut it off
    /// before its entry was confirmed.
    StepAgain,
    /// No body of a step under `fail` or with a reconciler begins while the effect of an earlier body is in doubt.
    StepDoubt,
    /// A step under `fail` charges its bank at most once, unless an operator let the step run again. A step whose
    /// reconciler is right charges exactly once if its operation completes.
    StepCharged,
    /// An append removes no entry from the record.
    StepKept,
    /// A step returns the value of the run that it names, and only after its entry is in the record.
    StepReturned,
    /// An operation that has succeeded has run each of its steps.
    StepMissing,
    /// A message leaves only after its body has returned a value and the store holds its finished record.
    MessageLeft,
    /// A message always leaves with the same id and destination, and no other message has its id.
    MessageIdentity,
    /// A message leaves only after the earlier messages of its body for its destination have arrived, or were refused
    /// so often that they are set aside.
    MessageOrder,
    /// A caller gets the end of an attempt only after its messages have arrived or are set aside.
    MessageAcknowledged,
    /// In the end, the messages of every finished record have arrived or are set aside, and no record holds others.
    MessageMissing,
    /// Every call returns.
    Stuck,
}

impl Check {
    /// Every check. The length is that of a list that ends with the last variant, so a new one must be entered here.
    pub(crate) const ALL: [Self; Self::Stuck as usize + 1] = [
        Self::Linearizable,
        Self::Undecided,
        Self::Belief,
        Self::Fencing,
        Self::DoubleEffect,
        Self::Lapse,
        Self::Cancelled,
        Self::AtMostOnce,
        Self::Replay,
        Self::Recorded,
        Self::LeftOut,
        Self::MissingEffect,
        Self::Leak,
        Self::Values,
        Self::Woken,
        Self::Decided,
        Self::Marked,
        Self::Interrupted,
        Self::Counted,
        Self::Freed,
        Self::Frozen,
        Self::Reason,
        Self::Doubt,
        Self::Reconciled,
        Self::Charged,
        Self::StepAgain,
        Self::StepDoubt,
        Self::StepCharged,
        Self::StepKept,
        Self::StepReturned,
        Self::StepMissing,
        Self::MessageLeft,
        Self::MessageIdentity,
        Self::MessageOrder,
        Self::MessageAcknowledged,
        Self::MessageMissing,
        Self::Stuck,
    ];
}

#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) check: Check,
    pub(crate) key: usize,
    pub(crate) text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, key {}: {}", self.check, self.key, self.text)
    }
}

/// End of a body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum BodyEnd {
    Value(String),
    Error {
        text: String,
        lasting: bool,
    },
    /// The body returned an error whose effect is in doubt.
    Doubtful(String),
    Panicked,
    /// The body was dropped with its call, or because its lease was lost.
    Dropped,
}

/// One run of a body.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own about the run")]
pub(crate) struct Run {
    pub(crate) call: usize,
    /// Fencing token of the attempt; 0 without a reservation.
    pub(crate) attempt: u32,
    /// Start of the body, as a number in the order of all events.
    pub(crate) started: u64,
    pub(crate) started_at: u64,
    pub(crate) effect: Option<u64>,
    /// True if the body renews its lease itself.
    pub(crate) confirms: bool,
    pub(crate) ended: Option<(u64, BodyEnd)>,
    pub(crate) ended_at: u64,
    /// True if the body, or a body that it called, blocked the thread.
    pub(crate) blocks: bool,
    /// Event at which the last value of the body was dropped.
    pub(crate) values_dropped: Option<u64>,
    /// True if the body went on after a step that has returned no value.
    pub(crate) skips_steps: bool,
    /// True if the effect of a step under `fail` was in doubt, so that an error of the body interrupts the operation.
    pub(crate) step_doubt: bool,
}

/// One run of the body of a step.
#[derive(Clone, Debug)]
pub(crate) struct StepRun {
    pub(crate) run: usize,
    pub(crate) step: u8,
    /// Value of the step, which no other run of a step has.
    pub(crate) value: String,
    /// Start of the step, as a number in the order of all events.
    pub(crate) started: u64,
    pub(crate) started_at: u64,
    pub(crate) effect: Option<u64>,
    pub(crate) returned: Option<u64>,
    /// True if the body dropped the step.
    pub(crate) dropped: bool,
    /// Event at which the body of the step returned an error before it had requested its effect.
    pub(crate) failed: Option<u64>,
}

/// One run of the reconciler of a step.
#[derive(Clone, Debug)]
pub(crate) struct StepInquiry {
    pub(crate) run: usize,
    pub(crate) step: u8,
    /// Start of the reconciler, as a number in the order of all events.
    pub(crate) started: u64,
    /// Event of the answer `NotDone`.
    pub(crate) not_done: Option<u64>,
}

/// One run of a reconciler.
#[derive(Clone, Debug)]
pub(crate) struct Inquiry {
    pub(crate) call: usize,
    /// Fencing token of the attempt.
    pub(crate) attempt: u32,
    /// Start of the reconciler, as a number in the order of all events.
    pub(crate) started: u64,
    pub(crate) ended: Option<(u64, InquiryEnd)>,
}

impl Inquiry {
    fn end(&self) -> Option<&InquiryEnd> {
        self.ended.as_ref().map(|(_, end)| end)
    }
}

/// End of a reconciler.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum InquiryEnd {
    Done(String),
    NotDone,
    Unknown,
    Error(String),
    Panicked,
    /// The reconciler was dropped with its call, or because its lease was lost.
    Dropped,
}

/// End of a call, as its caller sees it.
#[derive(Debug)]
pub(crate) enum CallEnd {
    Returned(Result<String, Failure>, Outcome),
    Panicked,
    Cancelled,
    /// The call ended with its process.
    Killed,
}

/// Policy of a handler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Retention of results.
    pub(crate) ttl: Duration,
    pub(crate) lease: Duration,
    pub(crate) on_crash: OnCrash,
    pub(crate) in_progress: InProgress,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) on_store_error: OnStoreError,
    pub(crate) max_result_bytes: usize,
    /// Number of steps of the body.
    pub(crate) steps: u8,
    /// Reactions of the steps to a doubt; `None` for a step that runs again.
    pub(crate) guards: [Option<Guard>; STEPS],
}

/// Longest pause between two requests of a clean-up.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Duration that outlasts every world.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(30 * 86_400);

impl Terms {
    /// Returns whether the store forgets no record while the world lasts. If it forgets records, bodies run again and
    /// fencing tokens start over, so most rules of the books are not checked for the key.
    fn remembers(&self) -> bool {
        self.ttl == FOR_EVER
    }

    pub(crate) fn policy(&self) -> Policy {
        let policy = Policy::new(self.ttl)
            .lease(self.lease)
            .on_crash(self.on_crash)
            .in_progress(self.in_progress)
            .on_store_error(self.on_store_error)
            .max_result_bytes(self.max_result_bytes);
        self.max_attempts.map_or(policy, |limit| policy.max_attempts(limit))
    }
}

/// Call of a handler.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) key: usize,
    pub(crate) process: usize,
    pub(crate) terms: Terms,
    pub(crate) made_at: u64,
    /// Run whose body made the call.
    pub(crate) caller: Option<usize>,
    pub(crate) end: Option<(u64, CallEnd)>,
    pub(crate) ended_at: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) calls: Vec<Call>,
    pub(crate) runs: Vec<Run>,
    pub(crate) steps: Vec<StepRun>,
    pub(crate) step_inquiries: Vec<StepInquiry>,
    pub(crate) inquiries: Vec<Inquiry>,
    /// Killed processes, and the times at which they were killed.
    pub(crate) kills: Vec<(usize, u64)>,
    /// Rights that processes lose for the rest of their lives.
    pub(crate) losses: Vec<(usize, Loss)>,
    pub(crate) findings: Vec<Finding>,
}

impl Ledger {
    pub(crate) fn find(&mut self, check: Check, key: usize, text: String) {
        self.findings.push(Finding { check, key, text });
    }

    /// Enters a call in the books. `caller` is the run whose body makes the call.
    pub(crate) fn call(&mut self, key: usize, process: usize, terms: Terms, now: u64, caller: Option<usize>) -> usize {
        self.calls.push(Call { key, process, terms, made_at: now, caller, end: None, ended_at: u64::MAX });
        self.calls.len() - 1
    }

    /// Notes that the body of `run` blocks its thread, and with it the enclosing bodies.
    pub(crate) fn blocks(&mut self, run: usize) {
        let mut next = Some(run);
        while let Some(run) = next {
            self.runs[run].blocks = true;
            next = self.calls[self.runs[run].call].caller;
        }
    }

    /// Enters the start of a body in the books.
    pub(crate) fn start(&mut self, net: &Net, call: usize, attempt: &Attempt) -> usize {
        let key = self.calls[call].key;
        let event = net.history().event();
        if attempt.is_protected() {
            let number = attempt.number();
            if attempt.lease_remaining().is_zero() {
                self.find(Check::Belief, key, format!("attempt {number} starts although its lease has lapsed"));
            }
            let record = net.truth(attempt.key()).map(|found| found.record);
            let Terms { on_crash, max_attempts, .. } = self.calls[call].terms;
            let is_counted = max_attempts.is_some_and(|limit| number > 1 || limit == 1);
            if let Some(record) = record.as_ref().filter(|record| record.attempt == number)
                && matches!(record.state, State::Pending { begun: false, .. })
                && (on_crash == OnCrash::Fail || is_counted)
            {
                self.find(Check::Marked, key, format!("attempt {number} starts, and the store does not say so"));
            }
            let latest = record.map_or(0, |record| record.attempt);
            if latest < number && self.calls[call].terms.remembers() && !net.history().was_forgotten(key) {
                self.find(Check::Fencing, key, format!("attempt {number} starts, the store knows of {latest}"));
            }
        }
        let number = attempt.number();
        if let Some(inquiry) = self.inquiries.iter().find(|it| it.call == call) {
            net.count("bodies after NotDone");
            if inquiry.end() != Some(&InquiryEnd::NotDone) || inquiry.attempt != number {
                let text = format!("attempt {number} starts its body after {inquiry:?}");
                self.find(Check::Doubt, key, text);
            }
        }
        if attempt.is_protected() && self.calls[call].terms.max_attempts == Some(1) {
            net.count("bodies of a key's only attempt");
        }
        self.runs.push(Run {
            call,
            attempt: attempt.number(),
            started: event,
            started_at: net.now(),
            effect: None,
            confirms: false,
            ended: None,
            ended_at: u64::MAX,
            blocks: false,
            values_dropped: None,
            skips_steps: false,
            step_doubt: false,
        });
        self.believe(net, call, attempt);
        self.runs.len() - 1
    }

    /// Enters the start of a step in the books.
    pub(crate) fn start_step(&mut self, net: &Net, run: usize, step: u8, value: String) -> usize {
        net.count("steps");
        let (started, started_at) = (net.history().event(), net.now());
        net.history().note(format!("step {value} starts"));
        let (effect, returned, dropped, failed) = (None, None, false, None);
        self.steps.push(StepRun { run, step, value, started, started_at, effect, returned, dropped, failed });
        self.steps.len() - 1
    }

    pub(crate) fn step_effect(&mut self, net: &Net, step_run: usize) {
        let value = &self.steps[step_run].value;
        net.history().note(format!("effect of step {value}"));
        self.steps[step_run].effect = Some(net.history().event());
    }

    /// Enters that a bank has charged `name`, which is the effect of a step if a step has this value.
    pub(crate) fn step_charged(&mut self, net: &Net, name: &str) {
        let event = net.history().event();
        self.steps.iter_mut().filter(|step| step.value == name).for_each(|step| step.effect = Some(event));
    }

    /// Enters that the body of a step returns an error, and has not requested its effect.
    pub(crate) fn step_failed(&mut self, net: &Net, step_run: usize) {
        self.steps[step_run].failed = Some(net.history().event());
    }

    /// Enters the start of a step's reconciler in the books.
    pub(crate) fn start_step_inquiry(&mut self, net: &Net, run: usize, step: u8) -> usize {
        net.count("reconcilers of steps");
        let started = net.history().event();
        net.history().note(format!("the reconciler of step {step} of run {run} starts"));
        self.step_inquiries.push(StepInquiry { run, step, started, not_done: None });
        self.step_inquiries.len() - 1
    }

    /// Enters the answer `NotDone` of a step's reconciler in the books.
    pub(crate) fn step_not_done(&mut self, net: &Net, inquiry: usize) {
        self.step_inquiries[inquiry].not_done = Some(net.history().event());
    }

    /// Enters that the effect of a step under `fail` is in doubt.
    pub(crate) fn doubts_step(&mut self, run: usize) {
        self.runs[run].step_doubt = true;
    }

    /// Checks that no body of a guarded step begins while the effect of an earlier one is in doubt.
    fn guarded_steps(&self, net: &Net, key: usize, find: &mut impl FnMut(Check, String)) {
        let of_key = |run: &Run| self.calls[run.call].key == key && run.attempt > 0;
        let steps = self.steps.iter().map(|step| (step, &self.runs[step.run])).filter(|(_, run)| of_key(run));
        let steps: Vec<_> = steps.filter(|(step, run)| self.guard(step, run).is_some()).collect();
        for (step, run) in &steps {
            let permits = net.history().permits(key, &step_name(step.step));
            let later = steps.iter().filter(|(later, _)| later.step == step.step && later.started > step.started);
            for (later, its) in later {
                let is_settled = self.step_inquiries.iter().any(|inquiry| {
                    let asker = &self.runs[inquiry.run];
                    let is_between = asker.attempt > run.attempt && asker.attempt <= its.attempt && of_key(asker);
                    let is_heard = inquiry.not_done.is_some_and(|event| event < later.started);
                    inquiry.step == step.step && is_between && is_heard && inquiry.started > step.started
                });
                let is_undone = step.failed.is_some_and(|failed| failed < later.started);
                let is_permitted = permits.iter().any(|event| (step.started..later.started).contains(event));
                // An attempt whose lease an operator broke may learn of the loss after its step has begun.
                let is_broken = net.history().was_broken(key, its.attempt, later.started);
                net.count(match (is_undone, is_settled, is_permitted) {
                    (true, ..) => "steps that ran again after an error that was certain",
                    (_, true, _) => "steps that ran again after NotDone",
                    _ => "steps that ran again after a decision",
                });
                if !is_undone && !is_settled && !is_permitted && !is_broken {
                    find(Check::StepDoubt, format!("{step:?} of {run:?} is in doubt before {later:?} of {its:?}"));
                }
            }
        }
    }

    fn guard(&self, step: &StepRun, run: &Run) -> Option<Guard> {
        self.calls[run.call].terms.guards[usize::from(step.step)]
    }

    /// Returns a call that has returned `Ok` after a run in which no step was left out.
    pub(crate) fn complete(&self, key: usize) -> Option<&Call> {
        self.runs.iter().filter(|run| run.attempt > 0 && !run.skips_steps).map(|run| &self.calls[run.call]).find(
            |call| call.key == key && matches!(&call.end, Some((_, CallEnd::Returned(Ok(_), out))) if out.executed()),
        )
    }

    /// Enters that the body of `run` got `value` from its step `step`, and checks that the record has this value.
    pub(crate) fn step_returns(&mut self, net: &Net, run: usize, step: u8, value: &str) {
        let event = net.history().event();
        net.history().note(format!("step {step} of run {run} returns {value}"));
        let key = self.calls[self.runs[run].call].key;
        let attempt = self.runs[run].attempt;
        let of_key = |it: &StepRun| self.calls[self.runs[it.run].call].key == key;
        let found = self.steps.iter().position(|it| of_key(it) && it.step == step && it.value == value);
        let Some(found) = found else {
            return self.find(Check::StepReturned, key, format!("no step {step} has made the value {value}"));
        };
        let source = &mut self.steps[found];
        if source.run == run {
            source.returned = Some(event);
        } else {
            net.count("steps of earlier attempts");
        }
        let source = self.steps[found].clone();
        // A bank also knows the charges of attempts whose record was forgotten, and whose numbers start over.
        let remembers = self.calls[self.runs[run].call].terms.remembers() && !net.history().was_forgotten(key);
        let is_earlier = source.run == run || self.runs[source.run].attempt < attempt || !remembers;
        let is_journaled = attempt == 0 || net.was_journaled(&net.history().key_of(key), value);
        if source.effect.is_none() || !is_earlier || !is_journaled {
            let text = format!("step {step} of attempt {attempt} returned {source:?}; journaled: {is_journaled}");
            self.find(Check::StepReturned, key, text);
        }
    }

    /// Checks that steps run again only if they may.
    fn steps(&self, net: &Net, key: usize, runs: &[&Run], met: &[Met], find: &mut impl FnMut(Check, String)) {
        let name = net.history().key_of(key);
        let steps: Vec<_> = self
            .steps
            .iter()
            .map(|step| (step, &self.runs[step.run]))
            .filter(|(_, run)| self.calls[run.call].key == key && run.attempt > 0)
            .collect();
        for (step, run) in steps.iter().filter(|(step, run)| self.guard(step, run).is_none()) {
            let call = &self.calls[run.call];
            let permits = net.history().permits(key, &step_name(step.step));
            let is_kept = step.returned.is_some() || net.was_journaled(&name, &step.value);
            let again = steps.iter().filter(|(later, its)| later.step == step.step && its.attempt > run.attempt);
            for (later, its) in again {
                if permits.iter().any(|event| (step.started..later.started).contains(event)) {
                    continue;
                }
                net.count("steps that ran again");
                let is_cut_off =
                    !matches!(run.ended, Some((_, BodyEnd::Value(_) | BodyEnd::Error { .. } | BodyEnd::Doubtful(_))));
                let is_excused = is_cut_off
                    || step.dropped
                    || net.history().was_broken(key, run.attempt, later.started)
                    || self.disturbed(net, met, call.process, call.made_at, later.started_at);
                let has_effect = step.effect.is_some_and(|effect| effect < later.started);
                if is_kept || (has_effect && !is_excused) {
                    find(Check::StepAgain, format!("{step:?} of {run:?} is run again: {later:?} of {its:?}"));
                }
            }
        }
        for run in runs.iter().filter(|run| run.attempt > 0 && !run.skips_steps) {
            let call = &self.calls[run.call];
            let Some((_, CallEnd::Returned(Ok(_), outcome))) = &call.end else { continue };
            let ran = |number| {
                steps
                    .iter()
                    .any(|(step, its)| step.step == number && step.effect.is_some() && its.attempt <= run.attempt)
            };
            if outcome.executed() && !(0..call.terms.steps).all(ran) {
                find(Check::StepMissing, format!("{run:?} of {call:?} has succeeded without a step"));
            }
        }
    }

    /// Enters the start of a reconciler in the books.
    pub(crate) fn start_inquiry(&mut self, net: &Net, call: usize, attempt: &Attempt) -> usize {
        let (key, number) = (self.calls[call].key, attempt.number());
        net.count("reconcilers");
        let started = net.history().event();
        if attempt.lease_remaining().is_zero() {
            self.find(Check::Belief, key, format!("attempt {number} asks although its lease has lapsed"));
        }
        let latest = self.runs_of(key).iter().map(|run| run.attempt).max().unwrap_or_default();
        if latest >= number && self.calls[call].terms.remembers() && !net.history().was_forgotten(key) {
            self.find(Check::Fencing, key, format!("attempt {number} asks after a body under token {latest}"));
        }
        self.believe(net, call, attempt);
        self.inquiries.push(Inquiry { call, attempt: number, started, ended: None });
        self.inquiries.len() - 1
    }

    /// Enters the end of a reconciler in the books.
    pub(crate) fn end_inquiry(&mut self, net: &Net, inquiry: usize, end: InquiryEnd) {
        let event = net.history().event();
        if self.inquiries[inquiry].ended.is_none() {
            net.count(match end {
                InquiryEnd::Done(_) => "answers of reconcilers: Done",
                InquiryEnd::NotDone => "answers of reconcilers: NotDone",
                InquiryEnd::Unknown => "answers of reconcilers: Unknown",
                InquiryEnd::Error(_) => "errors of reconcilers",
                InquiryEnd::Panicked => "panics of reconcilers",
                InquiryEnd::Dropped => "reconcilers that were cut off",
            });
            self.inquiries[inquiry].ended = Some((event, end));
        }
    }

    /// Reconcilers that were asked about `key`.
    fn inquiries_of(&self, key: usize) -> impl Iterator<Item = &Inquiry> {
        self.inquiries.iter().filter(move |inquiry| self.calls[inquiry.call].key == key)
    }

    /// Returns whether a reconciler answered `NotDone` about the effect of `run` before the body of `later`.
    fn is_settled(&self, key: usize, run: &Run, later: &Run) -> bool {
        self.inquiries_of(key).any(|inquiry| {
            let is_between = inquiry.attempt > run.attempt && inquiry.attempt <= later.attempt;
            let before = matches!(&inquiry.ended, Some((event, InquiryEnd::NotDone)) if *event < later.started);
            is_between && before && inquiry.started > run.started
        })
    }

    /// Returns the attempt whose effect is in doubt in attempt `attempt`: the latest one that was not reserved to ask a
    /// reconciler, or whose body began.
    fn doubted(&self, net: &Net, key: usize, attempt: u32) -> u32 {
        let began = |number: u32| self.runs_of(key).iter().any(|run| run.attempt == number);
        let asks = |number: &u32| net.history().is_in_doubt(key, *number) && !began(*number);
        (1..=attempt).rev().find(|number| !asks(number)).unwrap_or(attempt)
    }

    /// Returns the first result of a bank's operation for which the bank has no charge among `charges`.
    pub(crate) fn not_charged(&self, net: &Net, key: usize, charges: &[String]) -> Option<String> {
        let resolved = net.history().resolved(key);
        let is_resolved = |value: &String| {
            resolved.iter().any(|(.., finish)| said_by(finish).as_ref() == Some(&BodyEnd::Value(value.clone())))
        };
        self.calls.iter().filter(|call| call.key == key).find_map(|call| match &call.end {
            Some((_, CallEnd::Returned(Ok(value), _))) if !charges.contains(value) && !is_resolved(value) => {
                Some(format!("{call:?} returned {value}, and the bank has charged {charges:?}"))
            }
            _ => None,
        })
    }

    /// Checks that a body holds the lease on which it relies.
    pub(crate) fn believe(&mut self, net: &Net, call: usize, attempt: &Attempt) {
        let believed = attempt.lease_remaining();
        if believed.is_zero() {
            return;
        }
        let number = attempt.number();
        let found = net.truth(attempt.key());
        let (held, state) = match &found {
            Some(found) => (
                found.record.attempt == number
                    && found.record.is_pending()
                    && found.lapses_in.is_some_and(|left| left >= believed),
                format!("attempt {}, {:?}, lapses in {:?}", found.record.attempt, found.record.state, found.lapses_in),
            ),
            None => (false, "nothing".to_owned()),
        };
        // An operator who broke the lease has declared that the body's process is gone.
        if !held && !net.history().was_broken(self.calls[call].key, number, u64::MAX) {
            let text = format!("attempt {number} believes to hold its lease for {believed:?}; the store holds {state}");
            self.find(Check::Belief, self.calls[call].key, text);
        }
    }

    /// Enters the end of a body, in a poll that began at `polled`.
    pub(crate) fn end_run(&mut self, net: &Net, run: usize, polled: u64, end: BodyEnd) {
        let event = net.history().event();
        if self.runs[run].ended.is_none() {
            let Run { call, attempt, started, confirms, .. } = self.runs[run];
            let key = self.calls[call].key;
            // If records are forgotten, several attempts have the same number.
            let remembers = self.calls[call].terms.remembers() && !net.history().was_forgotten(key);
            let known = remembers && !confirms;
            // A poll that had begun before the refusal can't be interrupted.
            if matches!(end, BodyEnd::Value(_)) && known && net.history().was_refused(key, attempt, &(started..polled))
            {
                let text = format!("attempt {attempt} ran to its end although its heartbeat had found the lease lost");
                self.find(Check::Cancelled, key, text);
            }
            (self.runs[run].ended, self.runs[run].ended_at) = (Some((event, end)), net.now());
        }
    }

    /// Enters in the books that the last value of the body of `call` was dropped, if the body began.
    pub(crate) fn drop_values(&mut self, net: &Net, call: usize) {
        let event = net.history().event();
        self.runs.iter_mut().filter(|run| run.call == call).for_each(|run| run.values_dropped = Some(event));
    }

    /// Enters the end of a call in the books, and checks its answer against the present records.
    pub(crate) fn end_call(&mut self, net: &Net, call: usize, key: &Key, end: CallEnd) {
        let event = net.history().event();
        if self.calls[call].end.is_some() {
            return;
        }
        if let CallEnd::Returned(Ok(value), outcome) = &end
            && (outcome.executed() || outcome.reconciled())
            && outcome.attempt().is_some()
            && !net.history().was_reopened(self.calls[call].key, 0..)
            && self.calls[call].terms.remembers()
        {
            let number = outcome.attempt().unwrap_or_default();
            let found = net.truth(key).map(|found| found.record);
            let recorded = found
                .as_ref()
                .is_some_and(|record| record.attempt == number && matches!(record.state, State::Completed(_)));
            if !recorded || !outcome.recorded() {
                let text = format!("attempt {number} returned Ok({value:?}), {outcome:?}; the store holds {found:?}");
                self.find(Check::Recorded, self.calls[call].key, text);
            }
        }
        if let CallEnd::Returned(Err(Failure::Idempotency(error)), outcome) = &end
            && let Error::Store { started: false, source, .. } = &**error
            && let Call { key, made_at, terms: Terms { in_progress: InProgress::Wait(limit), .. }, .. } =
                self.calls[call]
            && source.is_transient()
            && outcome.waited()
            && net.now() < made_at + nanos(limit)
        {
            self.find(Check::Woken, key, format!("call {call} waits for no longer, as the store fails: {source}"));
        }
        (self.calls[call].end, self.calls[call].ended_at) = (Some((event, end)), net.now());
    }

    /// Runs of bodies for `key`.
    fn runs_of(&self, key: usize) -> Vec<&Run> {
        self.runs.iter().filter(|run| self.calls[run.call].key == key).collect()
    }

    /// Checks the rules that concern the whole history.
    pub(crate) fn close(&mut self, net: &Net) {
        let met = net.met();
        let mut findings = Vec::new();
        let keys = net.history().keys();
        for key in 0..keys {
            let mut find = |check, text| findings.push(Finding { check, key, text });
            let runs = self.runs_of(key);
            if runs.iter().any(|run| !self.calls[run.call].terms.remembers()) || net.history().was_forgotten(key) {
                continue;
            }
            Self::decisions(net, key, &runs, &mut find);
            Self::fencing(net, key, &runs, &mut find);
            Self::values(net, key, &runs, &mut find);
            self.effects(net, key, &runs, &met, &mut find);
            self.steps(net, key, &runs, &met, &mut find);
            self.guarded_steps(net, key, &mut find);
            self.answers(net, key, &runs, &met, &mut find);
            self.unbegun(net, key, &runs, &met, &mut find);
            self.returned(net, key, &runs, &mut find);
            self.refused(net, key, &runs, &met, &mut find);
            for op in net.history().left_out_early(key) {
                find(Check::LeftOut, format!("{op:?} leaves out a result that the store may hold"));
            }
        }
        for (key, text) in net.overslept() {
            findings.push(Finding { check: Check::Woken, key: net.history().key(&key), text });
        }
        for (key, text) in net.shortened() {
            findings.push(Finding { check: Check::StepKept, key: net.history().key(&key), text });
        }
        for (key, text) in net.trespasses() {
            findings.push(Finding { check: Check::Decided, key: net.history().key(&key), text });
        }
        for (n, call) in self.calls.iter().enumerate().filter(|(_, call)| call.end.is_none()) {
            findings.push(Finding { check: Check::Stuck, key: call.key, text: format!("call {n} never ended") });
        }
        self.findings.extend(findings);
    }

    fn fencing(net: &Net, key: usize, runs: &[&Run], find: &mut impl FnMut(Check, String)) {
        for (n, run) in runs.iter().enumerate().filter(|(_, run)| run.attempt > 0) {
            for later in runs[n + 1..].iter().filter(|later| later.attempt > 0) {
                let (first, then) = (run.attempt, later.attempt);
                // An attempt whose lease an operator broke may start its body, and learns of the loss at its first
                // renewal.
                if first >= then && !net.history().was_broken(key, then, later.started) {
                    find(Check::Fencing, format!("a body under token {then} starts after a body under token {first}"));
                }
            }
        }
    }

    fn values(net: &Net, key: usize, runs: &[&Run], find: &mut impl FnMut(Check, String)) {
        for run in runs.iter().filter(|run| run.attempt > 0) {
            let dropped = run.values_dropped.unwrap_or(u64::MAX);
            if net.history().was_ended(key, run.attempt, &(run.started..dropped)) {
                find(Check::Values, format!("{run:?} was ended while the body still had its values"));
            }
        }
    }

    fn decisions(net: &Net, key: usize, runs: &[&Run], find: &mut impl FnMut(Check, String)) {
        let resolved = net.history().resolved(key);
        for (event, attempt, finish) in resolved {
            let again = runs.iter().find(|run| {
                run.attempt > attempt && run.started > event && !net.history().was_reopened(key, event..run.started)
            });
            if let Some(run) = again {
                find(
                    Check::Decided,
                    format!("attempt {attempt} was resolved as {finish:?}, and is followed by {run:?}"),
                );
            }
        }
    }

    /// Reports whether a fault disturbed `process` between two times.
    fn disturbed(&self, net: &Net, met: &[Met], process: usize, from: u64, to: u64) -> bool {
        net.jumped(from, to)
            || met.iter().any(|it| it.is_of(process) && it.from <= to && it.to >= from)
            || self.kills.iter().any(|(killed, at)| *killed == process && *at <= to)
    }

    fn effects(&self, net: &Net, key: usize, runs: &[&Run], met: &[Met], find: &mut impl FnMut(Check, String)) {
        for run in runs {
            let call = &self.calls[run.call];
            if run.attempt == 0 {
                let allowed = call.terms.on_store_error == OnStoreError::Run;
                if !allowed || !self.disturbed(net, met, call.process, call.made_at, run.started_at) {
                    find(Check::DoubleEffect, format!("{run:?} without a reservation and without need"));
                }
                continue;
            }
            for later in runs.iter().filter(|later| later.attempt > run.attempt) {
                if net.history().was_reopened(key, run.started..later.started) {
                    continue;
                }
                // An operator who breaks a lease is responsible for its body, even for a body that begins later, when
                // the answer to its reservation arrives.
                if net.history().was_broken(key, run.attempt, later.started) {
                    continue;
                }
                let pair =
                    || format!("{run:?} of {call:?}\n    is followed by {later:?} of {:?}", self.calls[later.call]);
                // The order of starts counts, not the order of tokens: a body under an old token may start after a body
                // under a newer token.
                let ended = run.ended.as_ref().filter(|(event, _)| *event < later.started).map(|(_, end)| end);
                let disturbed = || self.disturbed(net, met, call.process, call.made_at, later.started_at);
                let is_settled = self.is_settled(key, run, later);
                let is_doubtful = matches!(ended, Some(BodyEnd::Doubtful(_)));
                // Under `retry`, a process that ends before it has recorded the doubt is like a crash.
                if is_doubtful && !is_settled && (call.terms.on_crash == OnCrash::Fail || !disturbed()) {
                    find(Check::Doubt, pair());
                }
                let promised = call.terms.on_crash == OnCrash::Fail
                    && !is_settled
                    && !matches!(ended, Some(BodyEnd::Error { .. } | BodyEnd::Doubtful(_)));
                // A caller under `fail` must not take over from an attempt whose body may have begun.
                let follows = &self.calls[later.call];
                let took_over = later.attempt == run.attempt + 1
                    && matches!(&follows.end, Some((_, CallEnd::Returned(_, outcome))) if outcome.took_over());
                if promised || (took_over && follows.terms.on_crash == OnCrash::Fail && !is_settled) {
                    find(Check::AtMostOnce, pair());
                }
                match (ended, call.end.as_ref().map(|(_, end)| end)) {
                    (_, Some(CallEnd::Returned(Ok(_), _))) => find(Check::DoubleEffect, pair()),
                    (_, Some(CallEnd::Returned(Err(_), outcome))) if outcome.recorded() => {
                        find(Check::DoubleEffect, pair());
                    }
                    (Some(BodyEnd::Value(_)), _) if !disturbed() => find(Check::DoubleEffect, pair()),
                    (None, _) if !disturbed() => find(Check::Lapse, pair()),
                    _ => {}
                }
            }
        }
    }

    fn answers(&self, net: &Net, key: usize, runs: &[&Run], met: &[Met], find: &mut impl FnMut(Check, String)) {
        let by_number = |number: u32| runs.iter().find(|run| run.attempt == number);
        let met_here = met.iter().any(|it| it.is_about(key)) || !self.kills.is_empty() || net.jumped(0, u64::MAX);
        let resolved = net.history().resolved(key);
        let given = |number: u32| resolved.iter().filter(move |(_, attempt, _)| *attempt == number);
        let mut first: Option<(&Result<String, Failure>, &Call)> = None;
        for call in self.calls.iter().filter(|call| call.key == key) {
            let Some((_, CallEnd::Returned(result, outcome))) = &call.end else { continue };
            let told = match result {
                Ok(value) => Some(BodyEnd::Value(value.clone())),
                Err(Failure::Lasting(text)) => Some(BodyEnd::Error { text: text.clone(), lasting: true }),
                Err(Failure::Passing(text)) => Some(BodyEnd::Error { text: text.clone(), lasting: false }),
                Err(Failure::Doubtful(text)) => Some(BodyEnd::Doubtful(text.clone())),
                Err(Failure::Idempotency(_)) => None,
            };
            let answers = |inquiry: &Inquiry| match (inquiry.end(), result) {
                (Some(InquiryEnd::Done(answer)), Ok(value)) => answer == value,
                (Some(InquiryEnd::Error(answer)), Err(Failure::Passing(error))) => answer == error,
                _ => false,
            };
            let own = |inquiry: &&Inquiry| std::ptr::eq(&raw const self.calls[inquiry.call], call);
            if outcome.reconciled() && result.is_ok() && !self.inquiries_of(key).filter(own).any(answers) {
                find(Check::Reconciled, format!("no reconciler gave the answer of {call:?}"));
            }
            if outcome.replayed() {
                let number = outcome.attempt().unwrap_or_default();
                let run = by_number(number);
                let is_the_bodys = run.and_then(|run| run.ended.as_ref()).map(|(_, end)| end) == told.as_ref();
                let is_given = given(number).any(|(.., finish)| told.is_some() && said_by(finish) == told);
                // If no operator reopened the key, the result that an operator recorded is its only result.
                let only_given = given(number).next().is_some() && !net.history().was_reopened(key, 0..);
                let is_answer = self.inquiries_of(key).any(|it| it.attempt == number && answers(it));
                if !is_given && (only_given || !(is_answer || is_the_bodys)) {
                    find(
                        Check::Replay,
                        format!("{call:?} replays something else than {run:?}, resolved as {resolved:?}"),
                    );
                }
            }
            // `Unsent` says that the result is stored, and does not return it.
            let is_unsent =
                matches!(result, Err(Failure::Idempotency(error)) if matches!(**error, Error::Unsent { .. }));
            if outcome.result_stored() && !is_unsent && !net.history().was_reopened(key, 0..) {
                match first {
                    Some((other, _)) if !same(other, result) => {
                        find(Check::Replay, format!("{call:?} does not return {other:?}"));
                    }
                    Some(_) => {}
                    None => first = Some((result, call)),
                }
            }
            if let Some(told) = &told
                && !resolved.iter().any(|(.., finish)| said_by(finish).as_ref() == Some(told))
                && !self.inquiries_of(key).any(answers)
                && !runs.iter().any(|run| {
                    run.ended.as_ref().is_some_and(|(_, end)| end == told)
                        && (run.effect.is_some() || !matches!(told, BodyEnd::Value(_)))
                })
            {
                find(Check::MissingEffect, format!("no body returned the result that {call:?} got"));
            }
            let disturbed = met_here || met.iter().any(|it| it.is_of(call.process));
            let decided = !resolved.is_empty() || net.history().was_reopened(key, 0..);
            let unjustified = match result {
                Err(Failure::Idempotency(refused)) => match &**refused {
                    // Another attempt's body did not return, or its process could not record the end.
                    Error::Interrupted { .. } => {
                        !disturbed
                            && !decided
                            && !runs.iter().any(|run| {
                                let is_cut_off = matches!(
                                    run.ended,
                                    None | Some((_, BodyEnd::Dropped | BodyEnd::Panicked | BodyEnd::Doubtful(_)))
                                );
                                is_cut_off || run.step_doubt
                            })
                    }
                    Error::AttemptsExhausted { attempts, .. } => {
                        let limit = call.terms.max_attempts;
                        limit.is_none_or(|limit| *attempts < limit)
                            || (!disturbed && !net.history().was_reopened(key, 0..) && runs.len() < *attempts as usize)
                    }
                    Error::ResultUnavailable { .. } => {
                        // An operator may have recorded no result, or an error that this handler does not read.
                        !disturbed
                            && resolved.is_empty()
                            && !runs.iter().any(|run| {
                                match &run.ended {
                                    Some((_, BodyEnd::Value(value))) => value.len() + 2 > call.terms.max_result_bytes,
                                    // A handler that does not read recorded errors gets `ResultUnavailable`.
                                    Some((_, BodyEnd::Error { lasting, .. })) => *lasting,
                                    _ => false,
                                }
                            })
                    }
                    // An operator may have broken the lease.
                    Error::LeaseLost { .. } | Error::Unrecorded { .. } => !disturbed && !decided,
                    Error::Store { .. } => !disturbed,
                    _ => false,
                },
                _ => false,
            };
            if unjustified {
                find(Check::MissingEffect, format!("{call:?} for no reason"));
            }
        }
    }

    fn was_killed(&self, process: usize) -> bool {
        self.kills.iter().any(|(killed, _)| *killed == process)
    }

    /// Reports whether `call` may have got an answer that counts the body of attempt `attempt` as begun although it did
    /// not begin. There are three possible reasons: the record was marked, and its process had died by then; the record
    /// was marked, and its process was cut off before it learnt of the mark; or an operator broke the lease. After a
    /// takeover no request removes the mark, so the time of the takeover decides.
    fn is_in_doubt(&self, net: &Net, met: &[Met], key: usize, attempt: u32, call: &Call) -> bool {
        let heard = (call.end.as_ref().map_or(u64::MAX, |(event, _)| *event), call.ended_at);
        let answer = net.history().refused_at(call.process, key, call.made_at, heard.0).unwrap_or(heard);
        let taken_over = net.history().taken_over_at(key, attempt);
        self.is_in_doubt_at(net, met, key, attempt, taken_over.map_or(answer, |taken_over| taken_over.min(answer)))
    }

    /// Reports whether one of the reasons of [`is_in_doubt`](Self::is_in_doubt) applied at this event and time.
    fn is_in_doubt_at(&self, net: &Net, met: &[Met], key: usize, attempt: u32, (when, at): (u64, u64)) -> bool {
        let history = net.history();
        let is_dead = |process| self.kills.iter().any(|(killed, since)| *killed == process && *since <= at);
        let died = history.is_marked(key, attempt, when)
            && history.holder(key, attempt).is_some_and(|(process, _)| is_dead(process));
        let doubts = history.doubts_its_mark(key, attempt, when);
        // Longest time until the answer to the next request of the process: the pause before this request, and the
        // leases for which the request may be under way.
        let reach = nanos(LONGEST_PAUSE) + 4 * nanos(net.longest_lease());
        let is_cut_off = doubts.is_some_and(|(process, [marked_at, asked_at])| {
            at <= asked_at + reach && self.disturbed(net, met, process, marked_at, at)
        });
        died || is_cut_off || history.was_broken(key, attempt, when)
    }

    /// Checks that no key is interrupted, and no attempt is counted, for a body that did not begin.
    fn unbegun(&self, net: &Net, key: usize, runs: &[&Run], met: &[Met], find: &mut impl FnMut(Check, String)) {
        let began = |number: u32, before: u64| runs.iter().any(|run| run.attempt == number && run.started < before);
        for call in self.calls.iter().filter(|call| call.key == key) {
            let Some((when, CallEnd::Returned(Err(Failure::Idempotency(error)), _))) = &call.end else { continue };
            match **error {
                Error::Interrupted { attempt, .. } => {
                    let attempt = self.doubted(net, key, attempt);
                    let lapsed_under = net.history().holder(key, attempt).map(|(_, on_crash)| on_crash);
                    // An attempt under `retry` has no mark, so a caller under `fail` can't know whether its body began.
                    // A caller with a reconciler is under `fail`, and leaves the doubt to all later callers.
                    let is_asked = net.history().is_in_doubt(key, attempt + 1);
                    let is_unmarked =
                        lapsed_under == Some(OnCrash::Retry) && (call.terms.on_crash == OnCrash::Fail || is_asked);
                    // Under `fail`, the process of a body that runs or has returned ends the attempt itself, however
                    // late, unless a caller with a reconciler has taken over.
                    let is_at_work = !is_asked && runs.iter().any(|run| {
                        let its = &self.calls[run.call];
                        let is_cut_off = matches!(
                            &run.ended,
                            Some((event, BodyEnd::Dropped | BodyEnd::Panicked | BodyEnd::Doubtful(_))) if event < when
                        );
                        let is_here = its.process == call.process && its.terms.on_crash == OnCrash::Fail;
                        run.attempt == attempt && run.started < *when && is_here && !is_cut_off && !run.step_doubt
                    });
                    let has_lost_right = self.losses.iter().any(|(process, _)| *process == call.process);
                    if is_at_work && !has_lost_right && !net.history().was_broken(key, attempt, *when) {
                        find(Check::Interrupted, format!("{call:?}: its process is at work on attempt {attempt}"));
                    }
                    if began(attempt, u64::MAX) || is_unmarked {
                        continue;
                    }
                    if self.is_in_doubt(net, met, key, attempt, call) {
                        net.count("duplicates of a mark in doubt");
                    } else {
                        find(Check::Interrupted, format!("{call:?}: no body of attempt {attempt} began"));
                    }
                }
                Error::AttemptsExhausted { attempts, .. } => {
                    // A reconciler that was cut off is counted, unless its process has written that it is not.
                    let is_cut_off = |number: u32| {
                        let holder = net.history().holder(key, number).map(|(process, _)| process);
                        let disturbed = |process| self.disturbed(net, met, process, 0, u64::MAX);
                        net.history().is_in_doubt(key, number) && holder.is_some_and(disturbed)
                    };
                    let counts = |number: &u32| {
                        began(*number, *when) || self.is_in_doubt(net, met, key, *number, call) || is_cut_off(*number)
                    };
                    let latest = net.history().latest(key);
                    let limit = call.terms.max_attempts.unwrap_or(u32::MAX);
                    if attempts < limit || (1..=latest).filter(counts).count() < limit as usize {
                        find(Check::Counted, format!("{call:?}: fewer bodies began"));
                    }
                }
                _ => {}
            }
        }
        let Some(found) = net.truth(&net.history().key_of(key)) else { return };
        let number = self.doubted(net, key, found.record.attempt);
        // A caller with a reconciler has taken over an attempt whose mark was in doubt. The process of that attempt
        // can't remove the mark any more.
        let taken_over = net.history().taken_over_at(key, number);
        let is_unmarked = number < found.record.attempt
            && net.history().holder(key, number).is_some_and(|(_, on_crash)| on_crash == OnCrash::Retry);
        if is_unmarked || taken_over.is_some_and(|taken_over| self.is_in_doubt_at(net, met, key, number, taken_over)) {
            return;
        }
        let is_interrupted = match found.record.state {
            State::Interrupted => true,
            State::Pending { on_crash, begun, .. } => begun && on_crash == OnCrash::Fail,
            _ => false,
        };
        let holder = net.history().holder(key, number);
        let is_dead = holder.is_some_and(|(process, _)| self.was_killed(process))
            && net.history().is_marked(key, number, u64::MAX);
        if is_interrupted && !began(number, u64::MAX) && !is_dead && !net.history().was_broken(key, number, u64::MAX) {
            find(Check::Interrupted, format!("no body of attempt {number} began, and the store holds {found:?}"));
        }
    }

    /// Checks that a body that returns ends its attempt if its process lives, however long an outage lasts.
    fn returned(&self, net: &Net, key: usize, runs: &[&Run], find: &mut impl FnMut(Check, String)) {
        for run in runs.iter().filter(|run| matches!(run.ended, Some((_, BodyEnd::Error { .. })))) {
            let after_a_lease = run.ended_at + nanos(self.calls[run.call].terms.lease);
            if net.history().released_at(key, run.attempt).is_some_and(|at| at > after_a_lease) {
                net.count("keys that were freed more than a lease after the body returned");
            }
        }
        let Some(found) = net.truth(&net.history().key_of(key)) else { return };
        let number = found.record.attempt;
        for run in runs.iter().filter(|run| run.attempt == number) {
            let call = &self.calls[run.call];
            let is_passing = matches!(run.ended, Some((_, BodyEnd::Error { lasting: false, .. })));
            let is_returned = matches!(run.ended, Some((_, BodyEnd::Error { .. } | BodyEnd::Value(_))));
            let has_lost = |right| self.losses.iter().any(|(it, loss)| *it == call.process && loss.right == right);
            let can_end = is_passing || (is_returned && !has_lost(Right::Finish));
            if call.terms.on_crash != OnCrash::Fail || !can_end || self.was_killed(call.process) || run.step_doubt {
                continue;
            }
            if matches!(found.record.state, State::Interrupted | State::Pending { .. })
                && !net.history().was_reopened(key, 0..)
            {
                find(Check::Freed, format!("{run:?} of {call:?} has returned, and the store holds {found:?}"));
            }
        }
    }

    /// Checks that a permanent refusal ends bodies and calls in time, and that `LeaseLost` names its reason.
    fn refused(&self, net: &Net, key: usize, runs: &[&Run], met: &[Met], find: &mut impl FnMut(Check, String)) {
        for run in runs.iter().filter(|run| run.attempt > 0) {
            let call = &self.calls[run.call];
            let reason = match &call.end {
                Some((_, CallEnd::Returned(Err(Failure::Idempotency(error)), _))) => match &**error {
                    Error::LeaseLost { source, .. } => Some(source.as_ref().map(StoreError::kind)),
                    _ => None,
                },
                _ => None,
            };
            let ended = run.ended.as_ref().map_or(u64::MAX, |(event, _)| *event);
            // The heartbeats of an attempt begin with its reconciler.
            let asked = self.inquiries.iter().find(|inquiry| inquiry.call == run.call);
            let began = asked.map_or(run.started, |inquiry| inquiry.started);
            let is_dropped = matches!(run.ended, Some((_, BodyEnd::Dropped)));
            if is_dropped && reason == Some(None) && !net.history().was_refused(key, run.attempt, &(began..ended)) {
                find(Check::Reason, format!("{run:?} of {call:?} was dropped without a reason"));
            }
            let Some((_, loss)) = self.losses.iter().find(|(process, _)| *process == call.process) else { continue };
            let held_until =
                net.history().confirmed_at(key, run.attempt).unwrap_or(run.started_at) + nanos(call.terms.lease);
            let slack = nanos(net.longest_lease());
            let (from, due) = match loss.right {
                Right::Renew => (run.started_at, held_until.max(loss.from) + slack),
                Right::Finish => (run.ended_at, run.ended_at.saturating_add(nanos(call.terms.lease) + slack)),
                Right::Begin => continue,
            };
            let is_alone = |it: &&Met| it.cause == Cause::Line && it.is_of(call.process);
            let disturbed = net.jumped(from, due)
                || met.iter().filter(is_alone).any(|it| it.from <= due && it.to >= from)
                || self.kills.iter().any(|(killed, at)| *killed == call.process && *at <= due)
                || run.blocks;
            if disturbed || loss.from > due {
                continue;
            }
            let ended_at = if loss.right == Right::Renew { run.ended_at } else { call.ended_at };
            if ended_at > due {
                find(Check::Frozen, format!("{run:?} of {call:?} goes on beyond {due} without {loss:?}"));
            }
            if loss.right == Right::Renew && is_dropped && reason.flatten().is_some_and(|kind| kind != loss.kind) {
                find(Check::Reason, format!("{run:?} of {call:?} was dropped for another reason than {loss:?}"));
            }
            if loss.right == Right::Renew && is_dropped && reason.is_some() {
                net.count("bodies that a permanent refusal ended");
            }
        }
    }

    /// Text of the books, with one line for each call and run.
    pub(crate) fn transcript(&self, key: Option<usize>) -> String {
        let mut text = String::new();
        for (n, call) in self.calls.iter().enumerate().filter(|(_, call)| key.is_none_or(|key| call.key == key)) {
            writeln!(text, "  call {n}: {call:?}").unwrap();
            for run in self.runs.iter().filter(|run| run.call == n) {
                writeln!(text, "    {run:?}").unwrap();
            }
            for step in self.steps.iter().filter(|step| self.runs[step.run].call == n) {
                writeln!(text, "    {step:?}").unwrap();
            }
            for inquiry in self.inquiries.iter().filter(|inquiry| inquiry.call == n) {
                writeln!(text, "    {inquiry:?}").unwrap();
            }
        }
        text
    }
}

/// Name of a step in a journal.
pub(crate) fn step_name(step: u8) -> String {
    format!("part[{step}]")
}

/// Converts a result that an operator recorded to the end of a body.
fn said_by(finish: &Finish) -> Option<BodyEnd> {
    match finish {
        Finish::Completed(StoredResult::Encoded { bytes, .. }) => {
            serde_json::from_slice(bytes).ok().map(BodyEnd::Value)
        }
        Finish::Failed(StoredResult::Encoded { bytes, .. }) => match serde_json::from_slice(bytes).ok()? {
            Failure::Lasting(text) => Some(BodyEnd::Error { text, lasting: true }),
            _ => None,
        },
        _ => None,
    }
}

fn same(one: &Result<String, Failure>, other: &Result<String, Failure>) -> bool {
    match (one, other) {
        (Ok(one), Ok(other)) => one == other,
        (Err(one), Err(other)) => one.text() == other.text(),
        _ => false,
    }
}
