//! Configurations that the checker explores: calls, policies, and numbers of faults.

use idem_runtime::OnCrash;
use idem_runtime::store::ReserveRequest;

use super::mutants::Mutant;
use super::properties::Scene;
use super::state::{Budget, CALLS, CallId, GUARDED, Token, holder};
use super::store;

/// Call in a configuration, with its policy and its possible results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) key: u8,
    /// Fingerprint of the payload, as a small number; `None` for a call without a fingerprint.
    pub(crate) mark: Option<u8>,
    pub(crate) on_crash: OnCrash,
    pub(crate) max_attempts: Option<u8>,
    /// Number of ticks for which the call waits for a running attempt; `None` for `in_progress = reject`.
    pub(crate) wait: Option<u8>,
    /// True for `on_error = record`.
    pub(crate) record_errors: bool,
    /// True for `on_error = uncertain`.
    pub(crate) doubts: bool,
    /// True for a call with a reconciler (`on_crash = reconcile`).
    pub(crate) asks: bool,
    /// True for `on_store_error = run`.
    pub(crate) open: bool,
    /// True for `mode = shadow`: the call reserves and records, but its body always runs.
    pub(crate) shadow: bool,
    /// True if the result is larger than the store can hold.
    pub(crate) too_large: bool,
    /// Number of ticks for which the body may run; `None` for no time-out.
    pub(crate) timeout: Option<u8>,
    /// True if the body may return `Ok`. A body that may return neither `Ok` nor `Err` (`may_fail`) hangs.
    pub(crate) may_succeed: bool,
    pub(crate) may_fail: bool,
    /// Number of steps of the body.
    pub(crate) steps: u8,
    /// Reaction of the first step to a doubt about its effect. The other steps run again.
    pub(crate) reaction: Reaction,
    /// True if the body runs its steps concurrently: a step may end while the entry of another one is being written.
    pub(crate) joined: bool,
    /// Number of messages that the body pushes.
    pub(crate) messages: u8,
    /// Lead of the call's clock over true time, in steps of true time.
    pub(crate) ahead: u8,
}

/// Reaction of a step whose effect is in doubt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reaction {
    /// The body of the step runs again, and its beginning is not journaled.
    Rerun,
    /// No body of the step runs before an operator has decided.
    Fail,
    /// The reconciler of the step decides.
    Reconcile,
}

/// Call with the default policy, whose body may return either result.
const CALL: Plan = Plan {
    key: 0,
    mark: None,
    on_crash: OnCrash::Retry,
    max_attempts: None,
    wait: None,
    record_errors: false,
    doubts: false,
    asks: false,
    open: false,
    shadow: false,
    too_large: false,
    timeout: None,
    may_succeed: true,
    may_fail: true,
    steps: 0,
    reaction: Reaction::Rerun,
    joined: false,
    messages: 0,
    ahead: 0,
};

impl Default for Plan {
    fn default() -> Self {
        CALL
    }
}

impl Plan {
    /// Returns whether the call asks its reconciler about an effect in doubt. A call in shadow mode asks nothing.
    pub(crate) fn may_ask(&self) -> bool {
        self.asks && !self.shadow
    }

    /// Returns whether the beginning of `step` is journaled before its body runs.
    pub(crate) fn guards(&self, step: u8) -> bool {
        step == GUARDED && self.reaction != Reaction::Rerun
    }

    /// Returns whether the body never returns.
    pub(crate) fn hangs(&self) -> bool {
        !self.may_succeed && !self.may_fail
    }
}

const FAIL: Plan = Plan { on_crash: OnCrash::Fail, ..CALL };
const ASKS: Plan = Plan { asks: true, ..FAIL };
const SUCCEEDS: Plan = Plan { may_fail: false, ..CALL };
const STEPS: Plan = Plan { steps: 2, ..CALL };
const FAIL_STEP: Plan = Plan { steps: 1, reaction: Reaction::Fail, ..CALL };
const ASK_STEP: Plan = Plan { steps: 1, reaction: Reaction::Reconcile, ..CALL };
const SENDS: Plan = Plan { messages: 2, ..SUCCEEDS };
const ERRS: Plan = Plan { may_succeed: false, ..CALL };
const WAITS: Plan = Plan { wait: Some(2), ..CALL };

/// Configuration of the model. Each configuration is checked as a separate model.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) name: &'static str,
    /// Description of the events that can happen.
    pub(crate) about: &'static str,
    /// Calls, in the order in which their messages are delivered.
    pub(crate) plans: Vec<Plan>,
    /// Number of calls that run concurrently.
    pub(crate) workers: usize,
    pub(crate) keys: u8,
    /// Length of a lease, in ticks.
    pub(crate) lease: u8,
    /// Number of tries of a reservation.
    pub(crate) tries: u8,
    pub(crate) budget: Budget,
    /// True if the store may answer that it can't execute a request, either now or permanently.
    pub(crate) refusals: bool,
    /// True if the store decides a reservation in one step, by the record that it finds.
    pub(crate) one_step: bool,
    /// True if the write that ends an attempt replaces the whole record, as in stores whose record is one value.
    pub(crate) whole: bool,
    /// True if operators also decide about steps.
    pub(crate) step_decisions: bool,
    /// True if operators also replace results and drop messages.
    pub(crate) replaces: bool,
    /// True if each message of a body has its own destination.
    pub(crate) apart: bool,
    /// Largest difference between the clients' clocks in ticks, for a store without a clock.
    pub(crate) skew: Option<u8>,
    pub(crate) scenes: &'static [Scene],
    pub(crate) mutant: Option<Mutant>,
    /// Reservation of each call, in the runtime's own type.
    pub(crate) requests: Vec<ReserveRequest>,
}

impl Config {
    fn new(name: &'static str, about: &'static str, plans: &[Plan], workers: usize, budget: Budget) -> Self {
        assert!(plans.len() <= CALLS, "at most {CALLS} calls");
        let keys = plans.iter().map(|plan| plan.key + 1).max().unwrap_or(1);
        let base = Self {
            name,
            about,
            plans: plans.to_vec(),
            workers,
            keys,
            lease: 2,
            tries: 2,
            budget,
            refusals: false,
            one_step: false,
            whole: false,
            step_decisions: false,
            replaces: false,
            apart: false,
            skew: None,
            scenes: &[],
            mutant: None,
            requests: Vec::new(),
        };
        base.prepared()
    }

    /// Returns a configuration for a random trace, in which the trace itself chooses the faults. A reservation has as
    /// many tries as the engine makes.
    pub(crate) fn of(plans: &[Plan]) -> Self {
        let plenty = 100;
        let budget = Budget {
            faults: plenty,
            cancels: plenty,
            beats: plenty,
            polls: plenty,
            ticks: plenty,
            reopens: plenty,
            unconfirmed: plenty,
            ..Budget::default()
        };
        Self { refusals: true, tries: 3, one_step: true, ..Self::new("trace", "", plans, plans.len(), budget) }
    }

    fn prepared(mut self) -> Self {
        let lease = self.lease;
        self.requests = (0..).zip(&self.plans).map(|(who, plan)| store::reserve(who, plan, lease)).collect();
        self
    }

    /// Reservation that the owner of `token` sends with this token.
    pub(crate) fn request(&self, token: Token) -> ReserveRequest {
        let who = holder(token);
        match token == who {
            true => self.requests[usize::from(who)].clone(),
            false => store::reserve(token, &self.plans[usize::from(who)], self.lease),
        }
    }

    fn scenes(self, scenes: &'static [Scene]) -> Self {
        Self { scenes, ..self }
    }

    /// Returns this configuration with a mistake.
    pub(crate) fn with(&self, mutant: Mutant) -> Self {
        Self { mutant: Some(mutant), scenes: &[], ..self.clone() }
    }

    /// Returns this configuration with one more of every fault.
    pub(crate) fn larger(mut self) -> Self {
        let budget = &mut self.budget;
        for more in [&mut budget.faults, &mut budget.ticks, &mut budget.beats] {
            *more += u8::from(*more > 0);
        }
        self
    }

    pub(crate) fn count(&self) -> CallId {
        CallId::try_from(self.plans.len()).expect("few calls")
    }

    /// Returns whether bodies push messages.
    pub(crate) fn publishes(&self) -> bool {
        self.plans.iter().any(|plan| plan.messages > 0)
    }

    /// Returns the destination of the message at this place.
    pub(crate) fn destination(&self, place: u8) -> u8 {
        if self.apart { place } else { 0 }
    }

    /// Returns whether a policy limits the attempts. Otherwise the number of bodies that began is not part
    /// of the state.
    pub(crate) fn counts_bodies(&self) -> bool {
        self.plans.iter().any(|plan| plan.max_attempts.is_some())
    }
}

/// All configurations.
pub(crate) fn all() -> Vec<Config> {
    use Scene::{
        BelievesAfterRenewal, BodyAfterDoubt, ErrorRecorded, Exhausted, InProgress, Interrupted, LateCompletion,
        LeaseLost, Mismatch, PolledAgain, Reconciled, ReplacedUnsent, Replay, SendsForAnother, Shortened, StepAgain,
        StepContinued, StepDecided, StepInterrupts, StepReconciled, StoreFailed, Takeover, TimedOut, TooLarge,
        Unprotected, Unrecorded, Unresolved, Unsent, Waits,
    };
    let nothing = Budget::default();
    let config = Config::new;
    // Each configuration has a name, a description, calls, a number of workers, a budget, and events that must occur.
    vec![
        config(
            "lost",
            "requests and answers that are lost, late, out of order and doubled; a reservation that is given up",
            &[SUCCEEDS, SUCCEEDS],
            2,
            Budget { faults: 2, duplicates: 1, ticks: 3, ..nothing },
        )
        .scenes(&[Replay, InProgress, LeaseLost, StoreFailed, LateCompletion]),
        config(
            "crashes",
            "processes that die at every step, takeovers, and requests that dead processes have under way",
            &[CALL, SUCCEEDS, SUCCEEDS],
            2,
            Budget { crashes: 2, ticks: 3, ..nothing },
        )
        .scenes(&[Replay, Takeover, LeaseLost, InProgress]),
        config(
            "beats",
            "heartbeats that are late, lost and refused, and bodies that are cancelled for a lost lease",
            &[SUCCEEDS, SUCCEEDS],
            2,
            Budget { faults: 1, beats: 2, polls: 1, ticks: 3, ..nothing },
        )
        .scenes(&[LeaseLost, BelievesAfterRenewal, Unrecorded]),
        config(
            "polls",
            "bodies that are polled repeatedly or block in a poll, and whose lease lapses between polls",
            &[SUCCEEDS, SUCCEEDS],
            2,
            Budget { polls: 2, beats: 1, ticks: 4, ..nothing },
        )
        .scenes(&[LeaseLost, PolledAgain]),
        config(
            "stuck_keys",
            "renewals of two keys, one of which gets no answer",
            &[SUCCEEDS, Plan { key: 1, ..SUCCEEDS }],
            2,
            Budget { beats: 2, ticks: 3, ..nothing },
        )
        .scenes(&[BelievesAfterRenewal]),
        config(
            "hangs",
            "a body that does not return, with and without polls that block, and the next attempt",
            &[Plan { timeout: Some(1), may_succeed: false, may_fail: false, ..CALL }, SUCCEEDS],
            2,
            Budget { faults: 1, beats: 1, ticks: 4, ..nothing },
        )
        .scenes(&[TimedOut, Replay]),
        config(
            "endings",
            "a store that takes no results for half a lease, a lease and longer",
            &[Plan { record_errors: true, ..CALL }, SUCCEEDS],
            1,
            Budget { faults: 4, beats: 2, ticks: 3, ..nothing },
        )
        .lasting(3)
        .scenes(&[Shortened, Unrecorded, ErrorRecorded, Replay]),
        config(
            "drops",
            "calls that are dropped at every step, and their late writes",
            &[CALL, CALL],
            2,
            Budget { cancels: 2, faults: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Replay, InProgress]),
        config(
            "drops_in_one_step",
            "one call, dropped at every step, and a store that decides each reservation in one step",
            &[CALL],
            1,
            Budget { cancels: 1, faults: 2, ticks: 2, ..nothing },
        )
        .in_one_step(),
        config(
            "late_takeovers",
            "takeovers that arrive late, after the lapsed attempt has renewed its lease and then died",
            &[CALL, CALL],
            2,
            Budget { cancels: 1, crashes: 1, beats: 1, ticks: 2, ..nothing },
        )
        .lasting(1),
        config(
            "at_most_once",
            "`on_crash = fail` on both sides: crashes, drops, lost leases",
            &[FAIL, FAIL],
            2,
            Budget { crashes: 1, cancels: 1, faults: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Interrupted, InProgress]),
        config(
            "late_landings",
            "`on_crash = fail`, and requests of calls that are gone or dead, which land after a lease or two",
            &[FAIL, FAIL],
            1,
            Budget { crashes: 1, faults: 2, ticks: 3, ..nothing },
        )
        .lasting(1)
        .scenes(&[Interrupted]),
        config(
            "late_landings_counted",
            "`max_attempts = 1`, and requests of calls that are gone or dead, which land after a lease or two",
            &[Plan { max_attempts: Some(1), ..CALL }, Plan { max_attempts: Some(1), ..CALL }],
            1,
            Budget { crashes: 1, faults: 1, ticks: 3, ..nothing },
        )
        .lasting(1)
        .scenes(&[Exhausted]),
        config(
            "one_side_fails",
            "`on_crash = fail` for the earlier or for the later call only",
            &[FAIL, CALL, FAIL],
            2,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Interrupted]),
        config(
            "reconcilers",
            "`on_crash = reconcile`: crashes in bodies and in reconcilers, next to other calls",
            &[ASKS, ASKS, ASKS],
            2,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .lasting(1)
        .scenes(&[Reconciled, BodyAfterDoubt, Unresolved, InProgress]),
        config(
            "reconcilers_unanswered",
            "an uncertain error, then calls with reconcilers: drops, and reservations in doubt whose answers are lost",
            &[Plan { doubts: true, may_succeed: false, ..ASKS }, ASKS, ASKS],
            1,
            Budget { cancels: 1, faults: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[Reconciled, Unresolved]),
        config(
            "reconcilers_cleaned_up",
            "a call that is dropped while its body is marked, next to an uncertain error of a later attempt",
            &[ASKS, Plan { doubts: true, may_succeed: false, ..ASKS }, ASKS],
            2,
            Budget { cancels: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[Reconciled, Unresolved]),
        config(
            "some_reconcile",
            "an uncertain error, then a call with a reconciler, and one without",
            &[Plan { doubts: true, ..FAIL }, ASKS, CALL],
            2,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .lasting(1)
        .scenes(&[Reconciled, Interrupted]),
        config(
            "reconcilers_counted",
            "`on_crash = reconcile` with `max_attempts = 2`: bodies are limited, and questions are not",
            &[Plan { max_attempts: Some(2), doubts: true, may_succeed: false, ..ASKS }; 3],
            1,
            Budget { cancels: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[Exhausted, Reconciled]),
        config(
            "uncertain_errors",
            "`on_error = uncertain` under `on_crash = retry`: an error whose effect may have happened",
            &[Plan { doubts: true, ..CALL }; 3],
            2,
            Budget { cancels: 1, faults: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Interrupted]),
        config(
            "errors_recorded",
            "`on_error = record`, and results that the store can't hold",
            &[Plan { record_errors: true, too_large: true, ..CALL }, Plan { record_errors: true, ..CALL }],
            2,
            Budget { faults: 1, cancels: 1, ticks: 2, ..nothing },
        )
        .scenes(&[TooLarge, ErrorRecorded, Replay]),
        config(
            "waiting",
            "duplicates that wait: for a completion, an error, a takeover, a restart, or until their time is over",
            &[CALL, WAITS, WAITS],
            3,
            Budget { crashes: 1, restarts: 1, ticks: 1, ..nothing },
        )
        .scenes(&[Waits, Replay, InProgress]),
        config(
            "waits_and_fails",
            "a duplicate that waits although a request of its own got no answer, and a store that reserves in one step",
            &[ERRS, WAITS],
            2,
            Budget { faults: 1, ticks: 3, ..nothing },
        )
        .in_one_step()
        .scenes(&[Waits]),
        config(
            "waits_in_outages",
            "a duplicate that waits while the store answers nothing for longer than a reservation is tried",
            &[SUCCEEDS, WAITS],
            2,
            Budget { faults: 2, ticks: 2, ..nothing },
        )
        .lasting(1)
        .scenes(&[Waits, InProgress, StoreFailed]),
        config(
            "max_attempts",
            "`max_attempts = 1`: errors, crashes, drops, and reservations that never ran a body",
            &[Plan { max_attempts: Some(1), ..ERRS }; 3],
            2,
            Budget { crashes: 1, cancels: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Exhausted]),
        config(
            "attempts_refunded",
            "`max_attempts = 2`: drops and doubled requests",
            &[Plan { max_attempts: Some(2), ..ERRS }; 3],
            2,
            Budget { cancels: 1, duplicates: 1, ticks: 1, ..nothing },
        ),
        config(
            "first_attempt_lapses",
            "`max_attempts = 2`: crashes, in the first attempt and later",
            &[Plan { max_attempts: Some(2), ..ERRS }; 3],
            1,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .lasting(1)
        .scenes(&[Takeover]),
        config(
            "fingerprints",
            "one key for two payloads, and a caller without a fingerprint",
            &[Plan { mark: Some(1), ..CALL }, Plan { mark: Some(2), ..CALL }, CALL],
            2,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Mismatch, Replay]),
        config(
            "refusals",
            "a store that refuses requests, for a while or permanently, and bodies that run unprotected (`on_store_error = run`)",
            &[Plan { open: true, ..CALL }, SUCCEEDS],
            2,
            Budget { faults: 2, ticks: 3, ..nothing },
        )
        .refusing()
        .scenes(&[Unprotected, Unrecorded, StoreFailed, Replay]),
        config(
            "refused_renewals",
            "a store that permanently refuses renewals, and bodies that end when their lease lapses",
            &[SUCCEEDS, SUCCEEDS],
            2,
            Budget { faults: 1, beats: 1, polls: 1, ticks: 3, ..nothing },
        )
        .refusing()
        .scenes(&[LeaseLost, Replay]),
        config(
            "shadow",
            "a call with `mode = shadow` next to enforced calls: its body always runs, and the other calls behave as without it",
            &[Plan { shadow: true, ..CALL }, SUCCEEDS],
            2,
            Budget { faults: 1, crashes: 1, beats: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Unprotected, Replay, Takeover]),
        config(
            "two_keys",
            "two operations side by side",
            &[CALL, Plan { key: 1, ..CALL }, SUCCEEDS],
            2,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Replay, Takeover]),
        config(
            "three_workers",
            "three calls for one key at a time",
            &[CALL, CALL, SUCCEEDS],
            3,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Replay, InProgress, Takeover]),
        config(
            "restarts",
            "a store that restarts and loses nothing but its connections",
            &[CALL, SUCCEEDS, SUCCEEDS],
            2,
            Budget { restarts: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Replay]),
        config(
            "operators",
            "records whose retention ends, or that an operator reopens, under a running attempt and after it",
            &[FAIL, CALL, SUCCEEDS],
            2,
            Budget { reopens: 1, ends: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Interrupted, LeaseLost, Replay]),
        config(
            "two_operators",
            "a record that two operators inspect, and reopen one after the other",
            &[FAIL, CALL],
            2,
            Budget { reopens: 2, crashes: 1, ticks: 2, ..nothing },
        )
        .scenes(&[Interrupted]),
        config(
            "clocks_that_differ",
            "a store without a clock: three clients whose clocks differ by up to the skew",
            &[SUCCEEDS, Plan { ahead: 2, ..SUCCEEDS }, Plan { ahead: 1, ..SUCCEEDS }],
            2,
            Budget { crashes: 1, ticks: 8, ..nothing },
        )
        .skewed(1)
        .scenes(&[Takeover, InProgress, LeaseLost]),
        config(
            "late_renewals_between_clocks",
            "renewals that overtake each other, in a store without a clock, where senders set the times",
            &[SUCCEEDS, Plan { ahead: 2, ..SUCCEEDS }],
            2,
            Budget { faults: 1, beats: 2, ticks: 5, ..nothing },
        )
        .skewed(1)
        .scenes(&[BelievesAfterRenewal]),
        config(
            "marks_between_clocks",
            "bodies that need a mark while clocks differ, so that a mark may come after the lapse",
            &[FAIL, Plan { ahead: 2, ..FAIL }],
            2,
            Budget { crashes: 1, ticks: 5, ..nothing },
        )
        .skewed(1)
        .scenes(&[Interrupted]),
        config(
            "one_value",
            "a store that replaces the whole record at the end of an attempt",
            &[CALL, CALL, SUCCEEDS],
            2,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .whole()
        .scenes(&[Replay, Takeover, LeaseLost]),
        config(
            "doubled_reservation",
            "a store that replaces the whole record, and a reservation that arrives again after another attempt has ended",
            &[CALL, CALL],
            2,
            Budget { duplicates: 1, beats: 1, ticks: 2, ..nothing },
        )
        .whole()
        .in_one_step()
        .scenes(&[Replay, LeaseLost]),
        config(
            "steps",
            "bodies with two steps: crashes, and journals whose append is late, is lost or gets no answer",
            &[STEPS, Plan { may_fail: false, ..STEPS }],
            2,
            Budget { crashes: 1, faults: 1, ticks: 2, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepContinued, Replay, LeaseLost]),
        config(
            "steps_unconfirmed",
            "bodies that stop waiting for the entry of a step, and go on with the next step",
            &[STEPS, STEPS],
            1,
            Budget { cancels: 2, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepContinued]),
        config(
            "steps_joined",
            "steps that run concurrently and share an append, next to another call",
            &[Plan { joined: true, ..STEPS }, Plan { joined: true, may_fail: false, ..STEPS }],
            2,
            Budget { crashes: 1, polls: 1, ticks: 2, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepContinued]),
        config(
            "steps_doubled",
            "requests of bodies with steps that arrive a second time, also after another attempt has ended",
            &[STEPS, STEPS],
            2,
            Budget { duplicates: 1, ticks: 2, ..nothing },
        )
        .whole()
        .in_one_step()
        .scenes(&[StepContinued]),
        config(
            "steps_reopened",
            "bodies with steps, and an operator who reopens their record",
            &[STEPS, Plan { on_crash: OnCrash::Fail, ..STEPS }, STEPS],
            1,
            Budget { crashes: 1, reopens: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepContinued]),
        config(
            "steps_between_clocks",
            "appends and renewals that overtake each other, in a store without a clock, where senders set the times",
            &[Plan { steps: 1, ..SUCCEEDS }, Plan { steps: 1, ahead: 2, ..SUCCEEDS }],
            2,
            Budget { crashes: 1, beats: 1, ticks: 5, ..nothing },
        )
        .skewed(1)
        .scenes(&[StepContinued]),
        config(
            "steps_under_fail",
            "steps under `fail`: crashes inside of them, and attempts that are taken over inside of them",
            &[FAIL_STEP, Plan { may_fail: false, ..FAIL_STEP }],
            2,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepInterrupts, StepContinued, LeaseLost]),
        config(
            "steps_under_fail_late",
            "a step under `fail` and a plain step after it: appends that are late, are lost or get no answer",
            &[Plan { steps: 2, ..FAIL_STEP }, FAIL_STEP],
            1,
            Budget { faults: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepInterrupts, StepContinued]),
        config(
            "steps_under_fail_dropped",
            "a step under `fail` and a plain step after it, which the body or the caller drops, and errors that are recorded",
            &[Plan { steps: 2, record_errors: true, ..FAIL_STEP }; 2],
            1,
            Budget { cancels: 2, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepInterrupts, StepContinued, ErrorRecorded]),
        config(
            "steps_reconciled",
            "steps with a reconciler: crashes in bodies and in reconcilers, next to other calls",
            &[ASK_STEP, Plan { may_fail: false, ..ASK_STEP }],
            2,
            Budget { crashes: 1, ticks: 2, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepReconciled, StepAgain, StepContinued]),
        config(
            "steps_reconciled_late",
            "steps with a reconciler, and journals whose append is late, is lost or gets no answer",
            &[ASK_STEP, Plan { may_fail: false, ..ASK_STEP }],
            1,
            Budget { faults: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[StepReconciled, StepAgain]),
        config(
            "steps_begun_doubled",
            "beginnings and ends of steps that arrive a second time, also after another attempt has ended",
            &[FAIL_STEP, ASK_STEP],
            2,
            Budget { duplicates: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .whole()
        .in_one_step()
        .scenes(&[StepInterrupts, StepReconciled]),
        config(
            "steps_decided",
            "steps under `fail`, and operators who decide about a step, or reopen the operation with other steps",
            &[FAIL_STEP, Plan { may_fail: false, ..FAIL_STEP }],
            1,
            Budget { crashes: 1, reopens: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .deciding_steps()
        .scenes(&[StepInterrupts, StepDecided, StepAgain]),
        config(
            "steps_decided_late",
            "an operator who decides about a step after its attempt has journaled another entry",
            &[FAIL_STEP, Plan { may_fail: false, ..FAIL_STEP }],
            1,
            Budget { reopens: 1, ticks: 2, ..nothing },
        )
        .lasting(1)
        .deciding_steps()
        .scenes(&[StepInterrupts, StepDecided]),
        config(
            "outbox",
            "bodies that push two messages for one destination: messages that are not confirmed, and crashes",
            &[SENDS, SENDS, SENDS],
            1,
            Budget { crashes: 1, unconfirmed: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[Unsent, SendsForAnother, Replay]),
        config(
            "outbox_beside",
            "a message that two calls send side by side, and marks that are late, lost and doubled",
            &[Plan { messages: 1, ..SENDS }; 2],
            2,
            Budget { faults: 1, duplicates: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[Unsent, SendsForAnother, LeaseLost, Replay]),
        config(
            "outbox_marks",
            "two messages of which one is not confirmed, and marks of two calls that overtake each other",
            &[SENDS, SENDS],
            2,
            Budget { faults: 1, unconfirmed: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[Unsent, SendsForAnother, Replay]),
        config(
            "outbox_apart",
            "messages for two destinations, which do not wait for each other, and errors of bodies",
            &[Plan { may_fail: true, ..SENDS }, Plan { may_fail: true, ..SENDS }, SENDS],
            1,
            Budget { unconfirmed: 2, ..nothing },
        )
        .lasting(1)
        .apart()
        .scenes(&[Unsent, SendsForAnother, Replay]),
        config(
            "outbox_dropped",
            "calls that are dropped before and while they send, next to other calls",
            &[SENDS, SENDS],
            2,
            Budget { cancels: 2, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[SendsForAnother, Replay]),
        config(
            "outbox_waited_for",
            "duplicates that wait for a call with a message",
            &[Plan { messages: 1, ..SENDS }, Plan { messages: 1, ..WAITS }],
            2,
            Budget { crashes: 1, unconfirmed: 1, ticks: 1, ..nothing },
        )
        .lasting(1)
        .scenes(&[Unsent, SendsForAnother, Waits, Replay]),
        config(
            "outbox_shortened",
            "messages whose result is too large for the store, or that the store does not take for half a lease",
            &[Plan { messages: 1, ..SENDS }, Plan { messages: 1, too_large: true, ..SENDS }],
            1,
            Budget { faults: 4, beats: 2, ticks: 2, unconfirmed: 1, ..nothing },
        )
        .lasting(3)
        .scenes(&[SendsForAnother, TooLarge, Shortened, Replay]),
        config(
            "outbox_operators",
            "messages that an operator drops, or whose result an operator discards or replaces, before they are sent or marked",
            &[SENDS, Plan { messages: 1, ..SENDS }, SENDS],
            2,
            Budget { crashes: 1, reopens: 1, ..nothing },
        )
        .lasting(1)
        .replacing()
        .scenes(&[Unsent, SendsForAnother, ReplacedUnsent, Replay]),
    ]
}

impl Config {
    fn refusing(self) -> Self {
        Self { refusals: true, tries: 3, ..self }
    }

    fn skewed(self, skew: u8) -> Self {
        Self { skew: Some(skew), lease: 1, ..self }.prepared()
    }

    pub(crate) fn lasting(self, lease: u8) -> Self {
        Self { lease, ..self }.prepared()
    }

    fn in_one_step(self) -> Self {
        Self { one_step: true, ..self }
    }

    fn whole(self) -> Self {
        Self { whole: true, ..self }
    }

    fn deciding_steps(self) -> Self {
        Self { step_decisions: true, ..self }
    }

    fn replacing(self) -> Self {
        Self { replaces: true, ..self }
    }

    fn apart(self) -> Self {
        Self { apart: true, ..self }
    }
}

/// Returns the configuration of this name.
pub(crate) fn named(name: &str) -> Config {
    let found = all().into_iter().find(|config| config.name == name);
    found.unwrap_or_else(|| panic!("no configuration is called {name:?}"))
}
