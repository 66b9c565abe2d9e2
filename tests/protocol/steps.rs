//! Steps of the model: the steps of a call (as in `engine/` and `store/context/`), the steps of the store, and events
//! of the network, the processes and time.
//!
//! `traces.rs` compares the calls of this file with the engine's calls.

use idem_runtime::OnCrash;
use idem_runtime::store::Verdict;
use stateright::{Model, Property};

use super::config::{Config, Plan, Reaction};
use super::mutants::Mutant;
use super::properties;
use super::state::{
    Answer, Append, Beat, Body, CALLS, Call, CallId, Class, Done, Ending, Entry, GUARDED, History, Journal, Line,
    MESSAGES, Mail, Met, ModelResult, ModelState, OPERATORS, Phase, Post, Progress, ReleaseKind, Request, RequestKind,
    Reserving, Seen, SeenRecord, Slot, Stage, StepDecision, StepEnd, StepsOfCall, World, token,
};
use super::store::{self, End, Reading};

/// Step of the model. A call is named by its index in the plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Action {
    /// A message is delivered: the call sends its reservation.
    Deliver(CallId),
    /// The store executes the request whose answer the call awaits, and answers.
    StoreDoes(CallId),
    /// The answer reaches the call, which takes its next step.
    Hears(CallId),
    /// The call gets an error instead of an answer; the request may have taken effect, or may still take effect.
    GetsNoAnswer(CallId),
    /// The store answers that it can't execute the request at present. The request had no effect.
    IsTurnedAway(CallId),
    /// The store answers that it will never execute the request. The request had no effect.
    IsRefusedForGood(CallId),
    /// The connection of the call broke: the call gets an error, as in `GetsNoAnswer`.
    IsCutOff(CallId),
    /// A second copy of the call's request is under way.
    Doubles(CallId),
    /// A request reaches the store late. No call awaits its answer.
    ArrivesLate(Request),
    /// A request is lost: it never reaches the store. No call awaits its answer.
    IsLost(Request),
    /// The heartbeat sends a renewal.
    Beats(CallId),
    StoreDoesBeat(CallId),
    HearsBeat(CallId),
    /// The heartbeat gets an error; the renewal may still arrive.
    BeatFails(CallId),
    /// The store permanently refuses to renew the lease.
    BeatIsRefusedForGood(CallId),
    /// A body is cancelled, because its lease has lapsed and will never be renewed.
    GivesUp(CallId),
    /// The next step of the body runs and has its effect. Its entry is sent to the store, if no append is under way.
    /// A step that journals its beginning only begins here: it sends this entry, asks its reconciler, or is in doubt.
    RunsStep(CallId),
    /// The body of a step whose beginning is journaled ends.
    EndsStep(CallId, StepEnd),
    /// The reconciler of a step supplies the value of the effect in doubt.
    StepFinds(CallId),
    /// The reconciler of a step answers that nothing happened, and nothing can.
    StepFindsNothing(CallId),
    /// The reconciler of a step ends without an answer.
    StepDoesNotKnow(CallId),
    StoreDoesAppend(CallId),
    /// The body is polled, and gets the answer to an append.
    HearsAppend(CallId),
    /// The body is polled, and gets an error instead of an answer to an append, which may still arrive.
    AppendFails(CallId),
    /// The body is polled, and gets the answer that the store can't execute an append at present.
    AppendIsTurnedAway(CallId),
    /// The body is polled, and gets the answer that the store will never execute an append.
    AppendIsRefusedForGood(CallId),
    /// A second copy of an append is under way.
    DoublesAppend(CallId),
    /// The body drops a step whose append is under way, or whose body or reconciler runs, and goes on.
    DropsStep(CallId),
    /// The body returns: `Ok` if true, `Err` otherwise.
    Returns(CallId, bool),
    /// The reconciler supplies the result of the effect in doubt.
    Finds(CallId),
    /// The reconciler answers that nothing happened, and nothing can.
    FindsNothing(CallId),
    /// The reconciler ends without an answer.
    DoesNotKnow(CallId),
    /// The call sends a message, which arrives, and the broker confirms it.
    Sends(CallId),
    /// The call sends a message, which arrives, and gets no confirmation.
    SendsUnconfirmed(CallId),
    /// The call sends a message, which never arrives, and gets no confirmation.
    SendsInVain(CallId),
    /// A poll of the body ends, and leaves it pending.
    Yields(CallId),
    /// The body is polled again.
    IsPolled(CallId),
    /// The body has reached its time-out, and is cancelled.
    TimesOut(CallId),
    /// The call is dropped, or its body panics.
    IsDropped(CallId),
    /// The last value of a body that has ended early is dropped.
    LosesValues(CallId),
    /// The process of the call ends abruptly.
    Dies(CallId),
    /// The call stops waiting and reserves again, because it was woken or its time is over.
    StopsWaiting(CallId),
    /// The call's wait ends with a record that already decides about the call, so that the call need not reserve again.
    IsTold(CallId),
    /// True time advances by one step.
    Tick,
    /// The retention of a record ends.
    Ends(u8),
    /// An operator inspects a record.
    Looks(u8),
    /// An operator reopens a record that the same operator has inspected.
    Reopens(u8),
    /// An operator decides about the steps of a record that the same operator has inspected.
    DecidesSteps(u8, StepDecision),
    /// An operator replaces the result of a record that the same operator has inspected.
    Replaces(u8),
    /// An operator drops the messages of a record that the same operator has inspected.
    DropsMessages(u8),
    /// The store restarts: it loses its connections and keeps its records.
    Restarts,
}

/// Number of owner tokens that a call may use.
const TOKENS: u8 = 3;

/// Error that a call gets instead of an answer of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trouble {
    /// The request may have taken effect.
    Unknown,
    /// The request had no effect; a later try may succeed.
    Unavailable,
    /// The request had no effect, and no later try will succeed.
    Fatal,
}

impl Trouble {
    pub(crate) fn is_transient(self) -> bool {
        self != Self::Fatal
    }
}

impl Model for Config {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![self.start()]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        possible(self, world, actions);
    }

    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        let mut world = last.clone();
        take(self, &mut world, action);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all(self)
    }
}

impl Config {
    fn start(&self) -> World {
        World {
            // Time does not start at 0, so that time 0 has passed by every clock.
            now: self.start_at(),
            slots: [None; 2],
            calls: [Call::IDLE; CALLS],
            net: Vec::new(),
            left: self.budget,
            sights: [None; OPERATORS],
            history: [History::NONE; 2],
            broken: properties::Broken::default(),
        }
    }

    fn start_at(&self) -> u8 {
        self.unit() * (self.lease + 2 * self.skew.unwrap_or_default() + 2)
    }

    /// Steps of true time in one tick of a clock.
    pub(crate) fn unit(&self) -> u8 {
        if self.skew.is_some() { 2 } else { 1 }
    }

    /// Length of a lease, in steps of true time.
    pub(crate) fn span(&self) -> u8 {
        self.unit() * self.lease
    }

    /// Reading of the clock that decides about a request that `who` sent at `sent`.
    fn reading(&self, world: &World, who: CallId, sent: u8) -> Reading {
        match self.skew {
            None => Reading { now: world.now, skew: None },
            Some(skew) => {
                let ahead = self.plans[usize::from(who)].ahead;
                Reading { now: (sent + ahead) / self.unit(), skew: Some(skew) }
            }
        }
    }

    fn plan(&self, who: CallId) -> &Plan {
        &self.plans[usize::from(who)]
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
}

fn possible(config: &Config, world: &World, actions: &mut Vec<Action>) {
    let left = &world.left;
    let everybody = 0..config.count();
    let active = everybody.clone().filter(|who| world.call(*who).is_active()).count();
    // The next message is delivered if a worker is free.
    let next = everybody.clone().find(|who| world.call(*who).phase == Phase::Idle);
    if let Some(who) = next.filter(|_| active < config.workers) {
        actions.push(Action::Deliver(who));
    }
    for who in everybody {
        let call = world.call(who);
        if !call.is_active() {
            continue;
        }
        // Steps of each call, according to its phase.
        match call.phase {
            Phase::Reserving { line, .. }
            | Phase::Confirming { line, .. }
            | Phase::Marking { line, .. }
            | Phase::GivingBack { line }
            | Phase::Inspecting { line, .. }
            | Phase::MarkingSent { line, .. }
            | Phase::Ending { line, .. } => match line {
                Line::Sent => {
                    actions.push(Action::StoreDoes(who));
                    if left.faults > 0 {
                        actions.push(Action::GetsNoAnswer(who));
                        if config.refusals {
                            actions.push(Action::IsTurnedAway(who));
                            actions.push(Action::IsRefusedForGood(who));
                        }
                    }
                    if left.duplicates > 0 && !matches!(call.phase, Phase::Inspecting { .. }) {
                        actions.push(Action::Doubles(who));
                    }
                }
                Line::Answered(_) => {
                    actions.push(Action::Hears(who));
                    if left.faults > 0 {
                        actions.push(Action::GetsNoAnswer(who));
                    }
                }
                Line::Cut => actions.push(Action::IsCutOff(who)),
            },
            Phase::Waiting { until, woken, .. } => {
                if woken || (until <= world.now && !config.is(Mutant::WaitsForEver)) {
                    actions.push(Action::StopsWaiting(who));
                    if told(config, world, who).is_some() {
                        actions.push(Action::IsTold(who));
                    }
                }
            }
            Phase::Asking if is_over(config, world, call) => actions.push(Action::TimesOut(who)),
            Phase::Asking if gives_up(config, world, who) => actions.push(Action::GivesUp(who)),
            Phase::Asking if may_be_polled(config, world, who) => {
                actions.extend([Action::Finds(who), Action::FindsNothing(who), Action::DoesNotKnow(who)]);
            }
            Phase::Asking => {}
            Phase::Body { polled: true } => {
                let plan = config.plan(who);
                let (idle, runs) = (call.steps.append == Append::None, call.steps.next < plan.steps);
                match call.steps.stage {
                    Stage::Runs => {
                        let ends = [StepEnd::Value, StepEnd::Error, StepEnd::Doubtful];
                        actions.extend(ends.map(|end| Action::EndsStep(who, end)));
                    }
                    Stage::Asks => {
                        let answers = [Action::StepFinds(who), Action::StepFindsNothing(who)];
                        actions.extend(answers.into_iter().chain([Action::StepDoesNotKnow(who)]));
                    }
                    Stage::None | Stage::Begins { .. } if runs => actions.push(Action::RunsStep(who)),
                    Stage::None | Stage::Begins { .. } => {}
                }
                let rests = idle && call.steps.stage == Stage::None;
                if plan.may_succeed && rests && !runs {
                    actions.push(Action::Returns(who, true));
                }
                if plan.may_fail && rests {
                    actions.push(Action::Returns(who, false));
                }
                if left.polls > 0 || plan.hangs() {
                    actions.push(Action::Yields(who));
                }
            }
            Phase::Body { polled: false } => {
                let plan = config.plan(who);
                if is_over(config, world, call) && !plan.shadow {
                    actions.push(Action::TimesOut(who));
                } else if gives_up(config, world, who) {
                    actions.push(Action::GivesUp(who));
                } else if !plan.hangs() && may_be_polled(config, world, who) {
                    let append = call.steps.append;
                    if append == Append::None || (plan.joined && call.steps.next < plan.steps) {
                        actions.push(Action::IsPolled(who));
                    }
                    match append {
                        Append::None => {}
                        Append::Sent { .. } if left.faults > 0 => {
                            actions.push(Action::AppendFails(who));
                            if config.refusals {
                                actions.push(Action::AppendIsTurnedAway(who));
                                actions.push(Action::AppendIsRefusedForGood(who));
                            }
                        }
                        Append::Sent { .. } => {}
                        Append::Answered { .. } => {
                            actions.push(Action::HearsAppend(who));
                            if left.faults > 0 {
                                actions.push(Action::AppendFails(who));
                            }
                        }
                        Append::Cut => actions.push(Action::AppendFails(who)),
                    }
                    if (append != Append::None || call.steps.stage != Stage::None) && left.cancels > 0 {
                        actions.push(Action::DropsStep(who));
                    }
                }
            }
            Phase::Dropping { .. } => actions.push(Action::LosesValues(who)),
            Phase::Sending { .. } => {
                actions.push(Action::Sends(who));
                if left.unconfirmed > 0 {
                    actions.extend([Action::SendsUnconfirmed(who), Action::SendsInVain(who)]);
                }
            }
            Phase::Idle | Phase::Over(_) | Phase::Dead => {}
        }
        if matches!(call.steps.append, Append::Sent { .. }) {
            actions.push(Action::StoreDoesAppend(who));
            if left.duplicates > 0 {
                actions.push(Action::DoublesAppend(who));
            }
        }
        // Steps of each call's heartbeat.
        match call.beat {
            // If a body waits for its lease, its heartbeats do not count against the budget.
            Beat::None if beats(config, world, who) && (left.beats > 0 || waits_for_lease(config, world, who)) => {
                actions.push(Action::Beats(who));
            }
            Beat::None => {}
            Beat::Sent { .. } => {
                actions.push(Action::StoreDoesBeat(who));
                if left.faults > 0 {
                    actions.push(Action::BeatFails(who));
                    if config.refusals {
                        actions.push(Action::BeatIsRefusedForGood(who));
                    }
                }
            }
            Beat::Answered { .. } if may_hear(config, world) => actions.push(Action::HearsBeat(who)),
            Beat::Answered { .. } => {}
        }
        // A call may be dropped, or its process may die, in every phase.
        let told = matches!(call.phase, Phase::Ending { late: Some(_), .. } | Phase::Dropping { .. });
        if left.cancels > 0 && !told {
            actions.push(Action::IsDropped(who));
        }
        if left.crashes > 0 {
            actions.push(Action::Dies(who));
        }
    }
    let mut last = None;
    for request in &world.net {
        // Equal requests lead to equal states, so the model takes only one of them.
        if last != Some(request) {
            actions.push(Action::ArrivesLate(*request));
            actions.push(Action::IsLost(*request));
        }
        last = Some(request);
    }
    // Ends of retentions, and inspections and decisions by operators.
    for key in 0..config.keys {
        let slot = &world.slots[usize::from(key)];
        if left.ends > 0 && slot.is_some_and(|slot| !slot.is_pending() || slot.lapses_at <= world.now) {
            actions.push(Action::Ends(key));
        }
        if left.reopens > 0 && slot.is_some() && world.sights.contains(&None) {
            actions.push(Action::Looks(key));
        }
    }
    for (operator, sight) in (0..).zip(&world.sights) {
        if let Some(sight) = sight {
            actions.push(Action::Reopens(operator));
            if config.replaces && sight.slot.result().is_some() {
                actions.extend([Action::Replaces(operator), Action::DropsMessages(operator)]);
            }
            let decisions =
                [StepDecision::Done, StepDecision::NotDone, StepDecision::FromFirst, StepDecision::WithoutSteps];
            let possible = |decision: &StepDecision| {
                config.step_decisions && store::decided_journal(&sight.slot.journal, *decision).is_some()
            };
            let decided = decisions.into_iter().filter(possible);
            actions.extend(decided.map(|decision| Action::DecidesSteps(operator, decision)));
        }
    }
    if left.restarts > 0 && active > 0 {
        actions.push(Action::Restarts);
    }
    // If a call waits for time to pass and no other step is possible, a tick does not count against the budget.
    let waits = || {
        world.calls.iter().any(|call| match call.phase {
            Phase::Waiting { until, .. } => until > world.now,
            Phase::Body { .. } => call.stop_at > world.now,
            _ => false,
        })
    };
    if left.ticks > 0 || (actions.is_empty() && waits()) {
        actions.push(Action::Tick);
    }
}

/// Returns whether heartbeats renew the lease of the call.
fn beats(config: &Config, world: &World, who: CallId) -> bool {
    let call = world.call(who);
    let kept = match call.phase {
        Phase::Body { .. } | Phase::Dropping { .. } if call.refused => false,
        Phase::Body { .. } => !is_over(config, world, call) || config.is(Mutant::RenewedBeyondTimeout),
        Phase::Dropping { .. } | Phase::Asking => true,
        Phase::Ending { late, .. } => late.is_none(),
        _ => false,
    };
    kept && !call.lost && call.registered
}

/// Returns whether the process can receive the answer to a renewal.
pub(crate) fn may_hear(config: &Config, world: &World) -> bool {
    let stuck = |call: &Call| matches!(call.beat, Beat::Sent { .. });
    !config.is(Mutant::RenewedTogether) || !world.calls.iter().any(stuck)
}

/// Returns whether the body has reached its time-out.
fn is_over(config: &Config, world: &World, call: &Call) -> bool {
    call.stop_at > 0 && call.stop_at <= world.now && !config.is(Mutant::TimeoutIgnored)
}

/// Returns whether the process still relies on the lease, so that it may poll the body.
fn may_be_polled(config: &Config, world: &World, who: CallId) -> bool {
    world.believed(config, who) > 0 || config.plan(who).shadow || config.is(Mutant::PolledBeyondLease)
}

/// Returns whether the body would wait forever for a lease that can't be renewed.
fn gives_up(config: &Config, world: &World, who: CallId) -> bool {
    world.call(who).refused && waits_for_lease(config, world, who) && !config.is(Mutant::RefusedWaitsOn)
}

fn waits_for_lease(config: &Config, world: &World, who: CallId) -> bool {
    let waits = matches!(world.call(who).phase, Phase::Body { polled: false } | Phase::Asking);
    waits && !may_be_polled(config, world, who)
}

/// Record at the end of a wait, as the answer to a reservation; `None` if the call must reserve.
fn told(config: &Config, world: &World, who: CallId) -> Option<Answer> {
    let call = world.call(who);
    let mut slot = world.slots[usize::from(config.plan(who).key)];
    let met = slot?;
    let Reserving { over, at } = message(config, world, None);
    let reading = config.reading(world, who, at);
    let alone = call.unanswered.is_some() && !config.is(Mutant::ToldOfItsOwn);
    if met.is_pending() {
        let lapses_in = reading.until(met.lapses_at, config.mutant).max(u8::from(config.is(Mutant::ToldOfLapsed)));
        // The call continues to wait for the attempt that runs now. A call that may find its own reservation must
        // reserve again.
        let goes_on = !alone && lapses_in > 0 && call.give_up_at > world.now;
        return goes_on.then_some(Answer::Pending { attempt: met.attempt, lapses_in });
    }
    let answer = store::reserves(config, &mut slot, token(who, call.generation), (over, true), reading);
    match answer {
        // The call sends messages only after it has reserved again.
        Answer::Finished { unsent: true, .. } if !config.is(Mutant::WaiterReplaysUnsent) => None,
        Answer::Finished { .. } | Answer::Mismatch | Answer::Interrupted => Some(answer),
        Answer::Exhausted => (alone || met.stand != ModelState::Released).then_some(answer),
        _ => None,
    }
}

/// Executes the step, and notes the rules that it breaks.
pub(crate) fn take(config: &Config, world: &mut World, action: Action) {
    match action {
        Action::Deliver(who) | Action::StopsWaiting(who) => reserve_anew(config, world, who),
        // The answer at the end of a wait must satisfy the same rules as the answer to a reservation.
        Action::IsTold(who) => {
            let answer = told(config, world, who).expect("the call has an answer");
            reserve_anew(config, world, who);
            let request = pending_request(config, world, who).expect("the request has been sent");
            properties::audit(config, world, &world.slots.clone(), request, answer);
            hears(config, world, who, answer);
        }
        Action::StoreDoes(who) => {
            let request = pending_request(config, world, who).expect("the call waits for an answer");
            let answer = store_does(config, world, request);
            *line(world.call_mut(who)) = Line::Answered(answer);
        }
        Action::Hears(who) => {
            let Line::Answered(answer) = *line(world.call_mut(who)) else { unreachable!("nothing to hear") };
            hears(config, world, who, answer);
        }
        // After `GetsNoAnswer` the request may still arrive. After `IsTurnedAway` and `IsRefusedForGood` the request
        // has no effect.
        Action::GetsNoAnswer(who) => {
            world.left.faults -= 1;
            orphan(config, world, who);
            fails(config, world, who, Trouble::Unknown);
        }
        Action::IsTurnedAway(who) => {
            world.left.faults -= 1;
            fails(config, world, who, Trouble::Unavailable);
        }
        Action::IsRefusedForGood(who) => {
            world.left.faults -= 1;
            fails(config, world, who, Trouble::Fatal);
        }
        Action::IsCutOff(who) => fails(config, world, who, Trouble::Unknown),
        Action::Doubles(who) => {
            world.left.duplicates -= 1;
            let request = pending_request(config, world, who).expect("the call waits for an answer");
            send(world, request);
        }
        Action::ArrivesLate(request) => {
            take_out(world, request);
            store_does(config, world, request);
        }
        Action::IsLost(request) => take_out(world, request),
        // Steps of heartbeats.
        Action::Beats(who) => {
            world.left.beats = world.left.beats.saturating_sub(1);
            let at = world.now;
            world.call_mut(who).beat = Beat::Sent { at };
        }
        Action::StoreDoesBeat(who) => {
            let Beat::Sent { at } = world.call(who).beat else { unreachable!("no beat is under way") };
            let request = renewal(config, world, who, at);
            let Answer::Write(done) = store_does(config, world, request) else {
                unreachable!("a renewal is done or refused")
            };
            world.call_mut(who).beat = Beat::Answered { at, done };
        }
        Action::HearsBeat(who) => hears_beat(config, world, who),
        Action::BeatFails(who) => {
            world.left.faults -= 1;
            orphan_beat(config, world, who);
        }
        Action::BeatIsRefusedForGood(who) => {
            world.left.faults -= 1;
            let call = world.call_mut(who);
            (call.beat, call.refused) = (Beat::None, true);
        }
        // A body whose lease can't be renewed ends like a body after its time-out.
        Action::GivesUp(who) => {
            let how = dropped(config, world, who);
            body_is_gone(config, world, who);
            drops_values(config, world, who, how, Class::LeaseLost);
        }
        Action::RunsStep(who) => {
            let steps = world.call(who).steps;
            match config.plan(who).guards(steps.next) {
                true => begins_step(config, world, who),
                false => runs_step(config, world, who),
            }
        }
        Action::EndsStep(who, end) => ends_step(config, world, who, end),
        Action::StepFinds(who) => step_has_ended(config, world, who),
        Action::StepFindsNothing(who) => {
            properties::step_settled(config, world, who);
            journals_beginning(config, world, who, true);
        }
        Action::StepDoesNotKnow(who) => match config.mutant {
            Some(Mutant::StepUnknownReadAsNotDone) => journals_beginning(config, world, who, true),
            Some(Mutant::StepUnknownIsEnded) => journals_end(config, world, who),
            _ => leaves_step(config, world, who, true),
        },
        Action::StoreDoesAppend(who) => {
            let Append::Sent { at, journal } = world.call(who).steps.append else { unreachable!("nothing is sent") };
            let request = append_request(config, world, who, at, journal);
            let Answer::Write(done) = store_does(config, world, request) else {
                unreachable!("an append is done or refused")
            };
            world.call_mut(who).steps.append = Append::Answered { at, journal, done };
        }
        Action::HearsAppend(who) => hears_append(config, world, who),
        Action::AppendFails(who) => {
            world.left.faults -= u8::from(world.call(who).steps.append != Append::Cut);
            append_fails(config, world, who, Trouble::Unknown);
        }
        Action::AppendIsTurnedAway(who) | Action::AppendIsRefusedForGood(who) => {
            world.left.faults -= 1;
            let is_final = matches!(action, Action::AppendIsRefusedForGood(_));
            world.call_mut(who).steps.append = Append::None;
            append_fails(config, world, who, if is_final { Trouble::Fatal } else { Trouble::Unavailable });
        }
        Action::DoublesAppend(who) => {
            world.left.duplicates -= 1;
            let Append::Sent { at, journal } = world.call(who).steps.append else { unreachable!("nothing is sent") };
            let request = append_request(config, world, who, at, journal);
            send(world, request);
        }
        Action::DropsStep(who) => {
            world.left.cancels -= 1;
            orphan_append(config, world, who);
            match world.call(who).steps.stage {
                Stage::Runs | Stage::Asks => {
                    let interrupts = config.plan(who).reaction == Reaction::Fail;
                    world.call_mut(who).steps.interrupts |= interrupts;
                    leaves_step(config, world, who, true);
                    world.call_mut(who).phase = Phase::Body { polled: true };
                }
                Stage::None | Stage::Begins { .. } => gives_up_append(config, world, who, false),
            }
        }
        Action::Returns(who, ok) => returns(config, world, who, ok),
        Action::Finds(who) => {
            world.call_mut(who).in_doubt = false;
            let ending = Ending::Finish { kept: ModelResult::Stored(who), ok: true };
            world.call_mut(who).phase = Phase::Ending { ending, late: None, line: Line::Sent };
        }
        Action::FindsNothing(who) => finds_nothing(config, world, who),
        Action::DoesNotKnow(who) if config.is(Mutant::UnknownReadAsNotDone) => starts_body(config, world, who),
        Action::DoesNotKnow(who) => {
            let how =
                if config.is(Mutant::QuestionsCount) { ReleaseKind::Interrupted } else { ReleaseKind::Unresolved };
            world.call_mut(who).phase = Phase::Ending { ending: Ending::Release(how), late: None, line: Line::Sent };
        }
        Action::Sends(who) | Action::SendsUnconfirmed(who) | Action::SendsInVain(who) => {
            let (arrives, is_confirmed) = (!matches!(action, Action::SendsInVain(_)), action == Action::Sends(who));
            world.left.unconfirmed -= u8::from(!is_confirmed);
            sends(config, world, who, arrives, is_confirmed);
        }
        Action::Yields(who) => yields(config, world, who),
        Action::IsPolled(who) => {
            properties::polls(config, world, who);
            world.call_mut(who).phase = Phase::Body { polled: true };
        }
        Action::TimesOut(who) => {
            let how = dropped(config, world, who);
            body_is_gone(config, world, who);
            drops_values(config, world, who, how, Class::TimedOut);
        }
        Action::LosesValues(who) => loses_values(config, world, who),
        // A dropped call still writes the end of its attempt; a dead process leaves only the requests that
        // are under way.
        Action::IsDropped(who) => {
            world.left.cancels -= 1;
            is_dropped(config, world, who);
        }
        Action::Dies(who) => {
            world.left.crashes -= 1;
            orphan(config, world, who);
            orphan_beat(config, world, who);
            body_is_gone(config, world, who);
            world.call_mut(who).deed.values = false;
            rest(world, who, Phase::Dead);
        }
        Action::Tick => {
            properties::passes(config, world);
            world.left.ticks = world.left.ticks.saturating_sub(1);
            world.now += 1;
            if config.is(Mutant::RetentionIsTheLease) {
                let now = world.now;
                for slot in &mut world.slots {
                    *slot = slot.filter(|slot| !slot.is_pending() || slot.lapses_at > now);
                }
            }
        }
        // The end of the retention removes the record, so another first attempt may follow.
        Action::Ends(key) => {
            world.left.ends -= 1;
            world.slots[usize::from(key)] = None;
            wake(config, world, key);
            forgive(config, world, key);
            world.history[usize::from(key)] = History::NONE;
        }
        Action::Looks(key) => looks(world, key),
        Action::Reopens(operator) => reopens(config, world, operator, None),
        Action::DecidesSteps(operator, decision) => reopens(config, world, operator, Some(decision)),
        Action::Replaces(operator) | Action::DropsMessages(operator) => {
            corrects(config, world, operator, matches!(action, Action::DropsMessages(_)));
        }
        // A restart breaks the connections. Requests that have not reached the store arrive later.
        Action::Restarts => {
            world.left.restarts -= 1;
            for who in 0..config.count() {
                let call = world.call_mut(who);
                match &mut call.phase {
                    Phase::Reserving { line, .. }
                    | Phase::Confirming { line, .. }
                    | Phase::Marking { line, .. }
                    | Phase::GivingBack { line }
                    | Phase::Inspecting { line, .. }
                    | Phase::MarkingSent { line, .. }
                    | Phase::Ending { line, .. }
                        if matches!(line, Line::Answered(_)) =>
                    {
                        *line = Line::Cut;
                    }
                    // The wait ends with an error, and the call reserves again.
                    Phase::Waiting { woken, .. } => *woken = true,
                    _ => {}
                }
                if matches!(call.beat, Beat::Answered { .. }) {
                    call.beat = Beat::None;
                }
                if matches!(call.steps.append, Append::Answered { .. }) {
                    call.steps.append = Append::Cut;
                }
            }
        }
    }
    properties::look(config, world);
    tidy(config, world);
}

/// Resets values that no longer make a difference, so that equivalent states are equal.
fn tidy(config: &Config, world: &mut World) {
    let now = world.now;
    if config.skew.is_none() {
        for slot in world.slots.iter_mut().flatten() {
            if slot.lapses_at <= now {
                slot.lapses_at = 0;
            }
        }
    }
    for call in &mut world.calls {
        if call.asked_at + config.span() <= now {
            call.asked_at = 0;
        }
        call.unanswered = call.unanswered.map(|at| if at + config.span() <= now { 0 } else { at });
        if config.skew.is_none() && call.deed.promised_until <= now {
            call.deed.promised_until = 0;
        }
    }
}

impl World {
    pub(crate) fn call(&self, who: CallId) -> &Call {
        &self.calls[usize::from(who)]
    }

    pub(crate) fn call_mut(&mut self, who: CallId) -> &mut Call {
        &mut self.calls[usize::from(who)]
    }

    /// Returns the time for which the call relies on its lease.
    pub(crate) fn believed(&self, config: &Config, who: CallId) -> u8 {
        if self.call(who).lost { 0 } else { self.may_be_held(config, who) }
    }

    /// Time for which the lease may be held although a heartbeat was refused: the store also refuses a heartbeat after
    /// the end of the same attempt has taken effect.
    pub(crate) fn may_be_held(&self, config: &Config, who: CallId) -> u8 {
        (self.call(who).asked_at + config.span()).saturating_sub(self.now)
    }

    pub(crate) fn holds_in_body_or_end(&self, who: CallId) -> bool {
        let call = self.call(who);
        let is_at_it = matches!(
            call.phase,
            Phase::Asking | Phase::Body { .. } | Phase::Dropping { .. } | Phase::Ending { late: None, .. }
        );
        call.deed.granted && is_at_it
    }
}

fn line(call: &mut Call) -> &mut Line {
    match &mut call.phase {
        Phase::Reserving { line, .. }
        | Phase::Confirming { line, .. }
        | Phase::Marking { line, .. }
        | Phase::GivingBack { line }
        | Phase::Inspecting { line, .. }
        | Phase::MarkingSent { line, .. }
        | Phase::Ending { line, .. } => line,
        other => unreachable!("{other:?} waits for no answer"),
    }
}

/// Request whose answer the call awaits.
pub(crate) fn pending_request(config: &Config, world: &World, who: CallId) -> Option<Request> {
    let call = world.call(who);
    let ask = match call.phase {
        Phase::Reserving { what, .. } => {
            RequestKind::Reserve { sent: what.at, over: what.over, asks: config.plan(who).may_ask() }
        }
        Phase::Confirming { at, .. } => return Some(renewal(config, world, who, at)),
        Phase::Marking { at, .. } => {
            RequestKind::Begin { sent: if config.skew.is_some() { at } else { 0 }, attempt: call.attempt }
        }
        Phase::GivingBack { .. } => RequestKind::Release(ReleaseKind::NotStarted),
        Phase::Ending { ending, .. } => match ending {
            Ending::Finish { kept, ok } => RequestKind::Finish {
                kept,
                ok,
                attempt: call.attempt,
                // The field is zero unless the store writes `starts`, so that requests with the same effect are equal.
                starts: if config.whole { call.starts } else { 0 },
                pushed: call.pushed,
            },
            Ending::Release(how) => RequestKind::Release(how),
            Ending::Instead => RequestKind::Release(ReleaseKind::Returned),
            Ending::Shortened { ok: true } | Ending::LeftOut { ok: true } => {
                let starts = if config.whole { call.starts } else { 0 };
                // The messages stay: they are as much a part of the operation as its result.
                let pushed = if config.is(Mutant::ShortenedDropsMessages) { 0 } else { call.pushed };
                let kept = ModelResult::TooLarge(who);
                RequestKind::Finish { kept, ok: true, attempt: call.attempt, starts, pushed }
            }
            Ending::Shortened { ok: false } | Ending::LeftOut { ok: false } => {
                RequestKind::Release(ReleaseKind::Returned)
            }
            Ending::CleanUp(what) => {
                // The record of a marked call may hold a doubt of a later attempt, which the clean-up leaves alone.
                let asks = config.plan(who).may_ask() && (!call.marked || config.is(Mutant::CleanUpAsks));
                RequestKind::Reserve { sent: what.at, over: what.over, asks }
            }
            Ending::GiveBack if !config.is(Mutant::CleanUpForgetsDoubt) => {
                RequestKind::Release(ReleaseKind::unused(call.in_doubt && !call.marked))
            }
            Ending::GiveBack | Ending::TryRelease => RequestKind::Release(ReleaseKind::NotStarted),
        },
        Phase::Inspecting { .. } => RequestKind::Inspect,
        Phase::MarkingSent { post, .. } => RequestKind::Mark { seen: post.seen, left: post.left() },
        _ => return None,
    };
    Some(Request { who, token: token(who, call.generation), ask })
}

/// Renewal that was sent at `at`.
fn renewal(config: &Config, world: &World, who: CallId, at: u8) -> Request {
    let sent = if config.skew.is_some() { at } else { 0 };
    let call = world.call(who);
    Request { who, token: token(who, call.generation), ask: RequestKind::Renew { sent, attempt: call.attempt } }
}

/// Append of `journal` that was sent at `at`.
fn append_request(config: &Config, world: &World, who: CallId, at: u8, journal: Journal) -> Request {
    let sent = if config.skew.is_some() { at } else { 0 };
    let call = world.call(who);
    let ask = RequestKind::Append { sent, attempt: call.attempt, journal };
    Request { who, token: token(who, call.generation), ask }
}

fn send(world: &mut World, request: Request) {
    let at = world.net.partition_point(|other| *other < request);
    world.net.insert(at, request);
}

fn take_out(world: &mut World, request: Request) {
    let at = world.net.iter().position(|other| *other == request).expect("the request is under way");
    world.net.remove(at);
}

/// Turns the call's request into a request whose answer no call awaits. A request that the store has not executed may
/// still take effect.
fn orphan(config: &Config, world: &mut World, who: CallId) {
    let sent = match world.call(who).phase {
        Phase::Reserving { line, .. }
        | Phase::Confirming { line, .. }
        | Phase::Marking { line, .. }
        | Phase::GivingBack { line }
        | Phase::MarkingSent { line, .. }
        | Phase::Ending { line, .. } => line == Line::Sent,
        // A read that arrives late changes nothing.
        _ => false,
    };
    if sent {
        let request = pending_request(config, world, who).expect("the request was sent");
        send(world, request);
    }
}

fn orphan_beat(config: &Config, world: &mut World, who: CallId) {
    if let Beat::Sent { at } = world.call(who).beat {
        let request = renewal(config, world, who, at);
        send(world, request);
    }
    world.call_mut(who).beat = Beat::None;
}

fn orphan_append(config: &Config, world: &mut World, who: CallId) {
    if let Append::Sent { at, journal } = world.call(who).steps.append {
        let request = append_request(config, world, who, at, journal);
        send(world, request);
    }
    world.call_mut(who).steps.append = Append::None;
}

/// Lets the store execute a request, and checks the answer against the properties.
pub(crate) fn store_does(config: &Config, world: &mut World, request: Request) -> Answer {
    let Request { who, token, ask } = request;
    let key = if config.is(Mutant::KeysShareRecord) { 0 } else { config.plan(who).key };
    let before = world.slots;
    // The answer depends on the kind of request.
    let answer = {
        let reading = |world: &World, sent| config.reading(world, who, sent);
        match ask {
            RequestKind::Reserve { sent, over, asks } => {
                let reading = reading(world, sent);
                store::reserves(config, &mut world.slots[usize::from(key)], token, (over, asks), reading)
            }
            RequestKind::Renew { sent, attempt } => {
                let reading = reading(world, sent);
                Answer::Write(store::renews(config, &mut world.slots[usize::from(key)], token, attempt, reading))
            }
            RequestKind::Begin { sent, attempt } => {
                let reading = reading(world, sent);
                Answer::Write(store::begins(config, &mut world.slots[usize::from(key)], token, attempt, reading))
            }
            RequestKind::Append { sent, attempt, journal } => {
                let (reading, journal) = (reading(world, sent), (attempt, journal));
                Answer::Write(store::appends(config, &mut world.slots[usize::from(key)], token, journal, reading))
            }
            RequestKind::Finish { kept: ModelResult::Stored(_), .. } if config.plan(who).too_large => Answer::TooLarge,
            RequestKind::Finish { kept, ok, attempt, starts, pushed } => {
                let end = End::finish(kept, ok, (attempt, starts), world.now).with_messages(pushed);
                Answer::Write(store::ends(config, &mut world.slots[usize::from(key)], token, end))
            }
            RequestKind::Release(how) => {
                let end = End::release(how, world.now);
                Answer::Write(store::ends(config, &mut world.slots[usize::from(key)], token, end))
            }
            RequestKind::Inspect => Answer::Found(store::inspects(world.slots[usize::from(key)])),
            RequestKind::Mark { seen, left } => {
                let reading = reading(world, 0);
                Answer::Write(store::marks_sent(config, &mut world.slots[usize::from(key)], seen, left, reading))
            }
        }
    };
    properties::audit(config, world, &before, request, answer);
    let (old, new) = (before[usize::from(key)], world.slots[usize::from(key)]);
    // A waiting call is woken when the attempt for which it waits is no longer pending.
    let attempt = |slot: Option<Slot>| slot.filter(Slot::is_pending).map(|slot| (slot.owner, slot.attempt));
    if attempt(old).is_some() && attempt(old) != attempt(new) {
        let asleep = match ask {
            RequestKind::Reserve { .. } => config.is(Mutant::TakeoverWakesNobody),
            RequestKind::Release(_) => config.is(Mutant::ReleaseWakesNobody),
            _ => config.is(Mutant::FinishWakesNobody),
        };
        if !asleep {
            wake(config, world, key);
        }
    }
    answer
}

fn wake(config: &Config, world: &mut World, key: u8) {
    for (plan, call) in config.plans.iter().zip(&mut world.calls) {
        if let (true, Phase::Waiting { woken, .. }) = (plan.key == key, &mut call.phase) {
            *woken = true;
        }
    }
}

fn looks(world: &mut World, key: u8) {
    world.left.reopens -= 1;
    let at = usize::from(key);
    let reading = Reading { now: world.now, skew: None };
    let decided = world.history[at].decided;
    let free = (0..).zip(&mut world.sights).find(|(_, sight)| sight.is_none());
    let (operator, free) = free.expect("an operator who has decided");
    *free = world.slots[at].map(|slot| SeenRecord { decided, ..store::sees(key, operator, slot, reading) });
}

fn reopens(config: &Config, world: &mut World, operator: u8, steps: Option<StepDecision>) {
    let Some(sight) = world.sights[usize::from(operator)].take() else { return };
    let key = sight.key;
    let Some(met) = world.slots[usize::from(key)] else { return };
    let reading = Reading { now: world.now, skew: None };
    let done = store::reopens(config, &mut world.slots[usize::from(key)], &sight, steps, reading);
    if done == Verdict::Applied {
        properties::audit_reopen(config, world, &met, &sight);
        if let Some(decision) = steps {
            properties::audit_step_decision(world, &met, &sight, decision);
        }
        wake(config, world, key);
        forgive(config, world, key);
    }
}

/// Lets an operator replace the result of a finished record, or drop its messages (`drops`).
fn corrects(config: &Config, world: &mut World, operator: u8, drops: bool) {
    let Some(sight) = world.sights[usize::from(operator)].take() else { return };
    let Some(met) = world.slots[usize::from(sight.key)] else { return };
    if store::corrects(config, &mut world.slots[usize::from(sight.key)], &sight, drops) == Verdict::Applied {
        properties::audit_correction(world, &met, &sight, drops);
    }
}

/// Marks the attempts of a key as closed, for the rules: an operator, or the end of the retention, lets another attempt
/// follow.
fn forgive(config: &Config, world: &mut World, key: u8) {
    for (plan, call) in config.plans.iter().zip(&mut world.calls) {
        let granted = call.deed.body == Body::NotStarted && call.deed.granted;
        if plan.key == key && (granted || matches!(call.deed.body, Body::Running | Body::Gone)) {
            call.deed.body = Body::Forgiven;
        }
    }
}

// Steps of a call.

/// Reserves for a call that begins, that has waited, or that lost its granted attempt.
fn reserve_anew(config: &Config, world: &mut World, who: CallId) {
    let now = world.now;
    let call = world.call_mut(who);
    // The store may have granted a repeated reservation at its first request, so the lease counts from the
    // first request.
    let since = call.unanswered.filter(|_| !config.is(Mutant::LeaseCountsFromLastRequest));
    call.asked_at = since.unwrap_or(now);
    let landed = call.unanswered.is_some();
    let what = message(config, world, None);
    world.call_mut(who).phase = Phase::Reserving { tries: 1, landed, what, line: Line::Sent };
}

/// Reservation that is sent now and replaces `over`.
fn message(config: &Config, world: &World, over: Option<Met>) -> Reserving {
    Reserving { over, at: if config.skew.is_some() { world.now } else { 0 } }
}

/// Processes the store's answer.
pub(crate) fn hears(config: &Config, world: &mut World, who: CallId, answer: Answer) {
    let now = world.now;
    let plan = config.plan(who);
    match (world.call(who).phase, answer) {
        // A call renews a granted lease that is over, then marks the record if its body needs a mark, and then starts
        // the body.
        (Phase::Reserving { .. }, Answer::Reserved { attempt, starts, in_doubt, journal, .. }) => {
            if config.is(Mutant::LeaseCountsFromAnswer) {
                world.call_mut(who).asked_at = now;
            }
            let call = world.call_mut(who);
            (call.attempt, call.starts, call.in_doubt) = (attempt, starts, in_doubt);
            call.steps = StepsOfCall { journal, confirmed: journal.len(), ..StepsOfCall::NONE };
            if world.believed(config, who) == 0 && !config.is(Mutant::LateAnswerStartsBody) {
                world.call_mut(who).phase = Phase::Confirming { tries: 1, at: now, line: Line::Sent };
            } else {
                marks_or_starts(config, world, who);
            }
        }
        (Phase::Confirming { tries, at, .. }, Answer::Write(Done::Done)) => {
            world.call_mut(who).asked_at = at;
            if world.believed(config, who) > 0 {
                marks_or_starts(config, world, who);
            } else if tries_again(config, world, who, tries, Trouble::Unknown) {
                let tries = config.tries.min(tries + 1);
                world.call_mut(who).phase = Phase::Confirming { tries, at: now, line: Line::Sent };
            } else {
                fails(config, world, who, Trouble::Unknown);
            }
        }
        (Phase::Marking { at, .. }, Answer::Write(Done::Done)) => {
            world.call_mut(who).asked_at = at;
            if world.believed(config, who) > 0 {
                starts_body(config, world, who);
            } else {
                // A mark that is answered after the lease counts as a failed try.
                fails(config, world, who, Trouble::Unknown);
            }
        }
        (Phase::Marking { .. }, Answer::Write(Done::Refused)) if config.is(Mutant::MarkRefusedStartsBody) => {
            starts_body(config, world, who);
        }
        (Phase::Marking { .. }, Answer::Write(Done::Refused)) if config.is(Mutant::RefusedMarkKeepsKey) => {
            reserve_as_another(config, world, who, Trouble::Unavailable);
        }
        // The lease has lapsed by the store's clock, or another attempt has taken over.
        (Phase::Marking { .. }, Answer::Write(Done::Refused)) => {
            world.call_mut(who).phase = Phase::GivingBack { line: Line::Sent };
        }
        // The reservation is released, or the record belongs to another attempt.
        (Phase::GivingBack { .. }, Answer::Write(_)) => {
            reserve_as_another(config, world, who, Trouble::Unavailable);
        }
        (Phase::Confirming { .. }, Answer::Write(Done::Refused)) => {
            // Another attempt has taken over, and may have finished.
            reserve_anew(config, world, who);
        }
        (Phase::Reserving { .. }, Answer::Pending { attempt, lapses_in }) => {
            // A call in shadow mode must not delay its caller.
            let limit = plan.wait.filter(|_| !plan.shadow).unwrap_or_default();
            let call = world.call_mut(who);
            if call.give_up_at == 0 {
                call.give_up_at = now + limit;
            }
            let left = call.give_up_at.saturating_sub(now);
            // The wait is over, or the policy has no wait: the duplicate is rejected.
            if left == 0 {
                if config.is(Mutant::RejectedDuplicateReleases) {
                    let holder = world.slots[usize::from(plan.key)].map_or(who, |slot| slot.owner);
                    let token = token(who, world.call(who).generation);
                    let before = world.slots;
                    let end = End::release(ReleaseKind::Returned, now);
                    let done = store::ends(config, &mut world.slots[usize::from(plan.key)], holder, end);
                    let request = Request { who, token, ask: RequestKind::Release(ReleaseKind::Returned) };
                    properties::audit(config, world, &before, request, Answer::Write(done));
                }
                return refused(config, world, who, Class::InProgress);
            }
            // The store compares the attempt before it lets a call wait, so that the call misses no end.
            let slot = world.slots[usize::from(plan.key)];
            let woken = !slot.is_some_and(|slot| slot.is_pending() && slot.attempt == attempt)
                && !config.is(Mutant::WaitsWithoutLooking);
            let until = now + left.min(lapses_in * config.unit());
            world.call_mut(who).phase = Phase::Waiting { attempt, until, woken };
        }
        // The messages of the finished operation have to be sent before its result is replayed.
        (Phase::Reserving { .. }, Answer::Finished { attempt, unsent: true, .. })
            if !plan.shadow && !config.is(Mutant::UnsentReplayed) && !config.is(Mutant::WaiterReplaysUnsent) =>
        {
            world.call_mut(who).phase = Phase::Inspecting { attempt, line: Line::Sent };
        }
        (Phase::Inspecting { attempt, .. }, Answer::Found(found)) => match found {
            Some((seen, mail)) if seen.attempt == attempt && mail != Mail::NONE => {
                begins_sending(config, world, who, Post::new(seen, mail, false));
            }
            // Another call has marked the messages, or an operator has discarded the result.
            _ => reserve_anew(config, world, who),
        },
        (Phase::MarkingSent { post, .. }, Answer::Write(done)) => {
            let is_sent = done == Done::Done && post.left() == Mail::NONE;
            match post.ran {
                _ if !is_sent && !config.is(Mutant::UnsentIsOk) => over(config, world, who, Class::Unsent),
                true => over(config, world, who, Class::Ok),
                // The call then gets the recorded result.
                false => reserve_anew(config, world, who),
            }
        }
        // The call ends with this answer, and its body does not run.
        (Phase::Reserving { .. }, Answer::Finished { attempt, .. }) => {
            world.call_mut(who).attempt = attempt;
            refused(config, world, who, Class::Replayed);
        }
        (Phase::Reserving { .. }, Answer::Mismatch) => refused(config, world, who, Class::Mismatch),
        (Phase::Reserving { .. }, Answer::Interrupted) => refused(config, world, who, Class::Interrupted),
        (Phase::Reserving { .. }, Answer::Exhausted) => refused(config, world, who, Class::Exhausted),
        (Phase::Reserving { .. }, Answer::Released) => {
            // Requests with the old token, which are still under way, find a released record and change nothing.
            reserve_as_another(config, world, who, Trouble::Fatal);
        }
        // The next request replaces the record that this request found.
        (Phase::Reserving { tries, landed, .. }, Answer::Free(over)) => {
            let what = message(config, world, over);
            world.call_mut(who).phase = Phase::Reserving { tries, landed, what, line: Line::Sent };
        }
        // The clean-up repeats its reservation until that reservation can't take effect any more.
        (Phase::Ending { ending: Ending::CleanUp(_), late, .. }, answer) => {
            let ending = match answer {
                Answer::Reserved { in_doubt, .. } => {
                    world.call_mut(who).in_doubt = in_doubt;
                    Ending::GiveBack
                }
                Answer::Free(over) => Ending::CleanUp(message(config, world, over)),
                // The key is released or another owner holds it, and no request under way can change this.
                _ => return over(config, world, who, late.unwrap_or(Class::Dropped)),
            };
            world.call_mut(who).phase = Phase::Ending { ending, late, line: Line::Sent };
        }
        // Another attempt has taken over since the clean-up reserved the key.
        (
            Phase::Ending { ending: ending @ (Ending::GiveBack | Ending::TryRelease), late, .. },
            Answer::Write(Done::Refused),
        ) if !config.is(Mutant::CleanUpOnlyReleases) => {
            ending_fails(config, world, who, Trouble::Unavailable, (ending, late));
        }
        // The result is too large for the store, so the end is tried without the result.
        (Phase::Ending { ending, late: None, .. }, Answer::TooLarge) if plan.shadow => {
            ending_fails(config, world, who, Trouble::Fatal, (ending, None));
        }
        (Phase::Ending { ending: Ending::Finish { ok, .. }, late, .. }, Answer::TooLarge) => {
            let call = world.call_mut(who);
            call.fails_since.get_or_insert(now);
            call.phase = Phase::Ending { ending: Ending::LeftOut { ok }, late, line: Line::Sent };
        }
        // The complete end may have taken effect, which explains the refusal.
        (Phase::Ending { ending: Ending::Shortened { ok: false }, late, .. }, Answer::Write(Done::Refused))
            if !config.is(Mutant::ShortenedRefusalIsFinal) =>
        {
            ending_fails(config, world, who, Trouble::Unknown, (Ending::Shortened { ok: false }, late));
        }
        // The end has been written, or the lease is lost.
        (Phase::Ending { ending, late, .. }, Answer::Write(done)) => {
            let refused = done == Done::Refused && !config.is(Mutant::RefusalReadAsDone);
            let publishes = late.is_none() && !plan.shadow && is_ok(ending) && world.call(who).pushed > 0;
            if publishes && (!refused || config.is(Mutant::SendsAfterLoss)) {
                let call = world.call(who);
                let seen = Seen { owner: token(who, call.generation), decisions: 0, attempt: call.attempt, ok: true };
                let mail = Mail::pushed(call.attempt, call.pushed);
                return begins_sending(config, world, who, Post::new(seen, mail, true));
            }
            if refused {
                return unrecorded(config, world, who, late, Class::LeaseLost);
            }
            over(config, world, who, late.unwrap_or(told_after(ending)));
        }
        (phase, answer) => unreachable!("{answer:?} is no answer to {phase:?}"),
    }
}

/// Starts to send the messages of a finished record. The lease has ended with the record.
fn begins_sending(config: &Config, world: &mut World, who: CallId, post: Post) {
    orphan_beat(config, world, who);
    let Call { phase, generation, attempt, unanswered, give_up_at, deed, .. } = *world.call(who);
    let call = world.call_mut(who);
    *call = Call { phase, generation, unanswered, give_up_at, attempt, deed, ..Call::IDLE };
    if config.is(Mutant::MarkedBeforeSent) {
        let ask = RequestKind::Mark { seen: post.seen, left: Mail::NONE };
        send(world, Request { who, token: token(who, generation), ask });
    }
    sends_next(config, world, who, post);
}

/// Sends the next message, or marks what has been sent. After a message that the broker has not confirmed, no further
/// message of the same destination is sent.
fn sends_next(config: &Config, world: &mut World, who: CallId, post: Post) {
    let open = |place: &u8| post.mail.has(*place) && post.blocked & 1 << config.destination(*place) == 0;
    let phase = match (post.next..MESSAGES).find(open) {
        Some(next) => Phase::Sending { post: Post { next, ..post } },
        None if post.sent == 0 => return over(config, world, who, unsent(config, post.ran)),
        None => Phase::MarkingSent { post: Post { blocked: 0, next: 0, ..post }, line: Line::Sent },
    };
    world.call_mut(who).phase = phase;
}

/// Answer to the caller after no message was sent.
fn unsent(config: &Config, ran: bool) -> Class {
    if ran && config.is(Mutant::UnsentIsOk) { Class::Ok } else { Class::Unsent }
}

/// Sends one message. `is_confirmed`: the broker has confirmed that it keeps the message.
fn sends(config: &Config, world: &mut World, who: CallId, arrives: bool, is_confirmed: bool) {
    let Phase::Sending { post } = world.call(who).phase else { unreachable!("nothing is sent") };
    if arrives {
        properties::message_arrives(config, world, who, (post.mail.by, post.next));
    }
    let (bit, goes_on) = (1 << post.next, is_confirmed || config.is(Mutant::SendsPastFailure));
    let blocks = u8::from(!goes_on) << config.destination(post.next);
    let sent = post.sent | if is_confirmed { bit } else { 0 };
    sends_next(config, world, who, Post { sent, blocked: post.blocked | blocks, next: post.next + 1, ..post });
}

/// Ends a call without a body, except in shadow mode, where the body runs without a reservation.
fn refused(config: &Config, world: &mut World, who: CallId, told: Class) {
    over(config, world, who, if config.plan(who).shadow { Class::Unprotected } else { told });
}

/// Ends a call whose result is not recorded. A call in shadow mode does not report this to its caller.
fn unrecorded(config: &Config, world: &mut World, who: CallId, late: Option<Class>, told: Class) {
    let own = match world.call(who).phase {
        Phase::Ending { ending, .. } if is_ok(ending) => Class::Ok,
        _ => Class::Err,
    };
    over(config, world, who, late.unwrap_or(if config.plan(who).shadow { own } else { told }));
}

/// Returns whether this is the end of a body that has succeeded.
fn is_ok(ending: Ending) -> bool {
    matches!(ending, Ending::Finish { ok: true, .. } | Ending::Shortened { ok: true } | Ending::LeftOut { ok: true })
}

/// Answer to the caller once the end of its attempt is written.
fn told_after(ending: Ending) -> Class {
    match ending {
        Ending::Release(ReleaseKind::Unresolved) => Class::Unresolved,
        // The reconciler found nothing, and `max_attempts` allows no body.
        Ending::Release(ReleaseKind::NotStarted) => Class::Exhausted,
        _ if is_ok(ending) => Class::Ok,
        _ => Class::Err,
    }
}

/// Reserves for a new attempt with another owner token. A call without further tokens fails with `trouble`.
fn reserve_as_another(config: &Config, world: &mut World, who: CallId, trouble: Trouble) {
    if world.call(who).generation + 1 == TOKENS {
        return over(config, world, who, unanswered(config.plan(who), trouble));
    }
    let call = world.call_mut(who);
    (call.generation, call.unanswered, call.marked) = (call.generation + 1, None, false);
    reserve_anew(config, world, who);
}

/// Returns whether the body of this attempt may begin only after its record is marked.
fn marks(config: &Config, plan: &Plan, attempt: u8) -> bool {
    let counts = plan.max_attempts.is_some_and(|max| attempt > 1 || max == 1);
    (is_fail(plan) || counts) && !config.is(Mutant::BeginsUnmarked)
}

fn marks_or_starts(config: &Config, world: &mut World, who: CallId) {
    let (now, attempt) = (world.now, world.call(who).attempt);
    if world.call(who).in_doubt && !config.is(Mutant::DoubtIgnored) {
        let stop_at = stops_at(config, world, who);
        let call = world.call_mut(who);
        (call.give_up_at, call.unanswered, call.registered) = (0, None, true);
        (call.stop_at, call.phase) = (stop_at, Phase::Asking);
        return;
    }
    if !marks(config, config.plan(who), attempt) {
        return starts_body(config, world, who);
    }
    let call = world.call_mut(who);
    call.marked = true;
    call.phase = Phase::Marking { tries: 1, at: now, line: Line::Sent };
}

/// Processes the answer of a reconciler that nothing happened: the body runs, unless `max_attempts` forbids it.
fn finds_nothing(config: &Config, world: &mut World, who: CallId) {
    let plan = config.plan(who);
    properties::settles(config, world, who);
    world.call_mut(who).in_doubt = false;
    match plan.max_attempts.is_some_and(|max| world.call(who).starts > max) {
        true => {
            properties::exhausts(config, world, who);
            let ending = Ending::Release(ReleaseKind::NotStarted);
            world.call_mut(who).phase = Phase::Ending { ending, late: None, line: Line::Sent };
        }
        false => starts_body(config, world, who),
    }
}

fn starts_body(config: &Config, world: &mut World, who: CallId) {
    properties::body_starts(config, world, who);
    let stop_at = stops_at(config, world, who);
    let call = world.call_mut(who);
    (call.give_up_at, call.unanswered, call.in_doubt) = (0, None, false);
    if call.deed.body == Body::NotStarted {
        call.deed.body = Body::Running;
    }
    call.deed.values = true;
    // The body is registered for heartbeats before its first poll, which may block.
    call.registered = !config.is(Mutant::RegisteredWhenPending);
    // The time limit of a reconciler includes its body.
    call.stop_at = if call.stop_at > 0 { call.stop_at } else { stop_at };
    call.phase = Phase::Body { polled: true };
    skips_steps(config, world, who);
}

/// Returns the values of the steps that earlier attempts have journaled, up to the next step that has to run.
fn skips_steps(config: &Config, world: &mut World, who: CallId) {
    let ended = |world: &World| {
        let steps = world.call(who).steps;
        let open = steps.next < config.plan(who).steps && !config.is(Mutant::JournaledStepRuns);
        steps.journal.ended(steps.next).filter(|_| open)
    };
    while let Some(entry) = ended(world) {
        properties::step_returns(config, world, who, entry);
        world.call_mut(who).steps.next += 1;
    }
}

fn runs_step(config: &Config, world: &mut World, who: CallId) {
    let step = world.call(who).steps.next;
    properties::step_runs(config, world, who, step);
    let call = world.call_mut(who);
    call.journals(who, step, Progress::Ended);
    call.steps.next += 1;
    skips_steps(config, world, who);
    awaits_append(config, world, who);
}

/// Sends the entries of the body, unless an append is under way. The body goes on if its steps are joined, and
/// otherwise waits.
fn awaits_append(config: &Config, world: &mut World, who: CallId) {
    if world.call(who).steps.append == Append::None {
        appends(world, who);
    }
    let plan = config.plan(who);
    let goes_on = plan.joined && world.call(who).steps.next < plan.steps;
    let call = world.call_mut(who);
    call.phase = Phase::Body { polled: goes_on };
    if call.lost && !goes_on {
        loses(config, world, who);
    }
}

impl Call {
    /// Adds an entry of this attempt, which the next append brings to the store.
    fn journals(&mut self, who: CallId, step: u8, progress: Progress) {
        let entry = Entry { step, token: token(who, self.generation), attempt: self.attempt, progress };
        self.steps.journal.add(entry);
    }
}

/// Begins a step whose beginning is journaled. If its effect is in doubt, the step asks its reconciler or fails.
fn begins_step(config: &Config, world: &mut World, who: CallId) {
    let reaction = config.plan(who).reaction;
    let doubt = world.call(who).steps.journal.doubt(GUARDED);
    match doubt.filter(|_| !config.is(Mutant::StepDoubtIgnored)) {
        None => journals_beginning(config, world, who, false),
        Some(_) if reaction == Reaction::Reconcile => world.call_mut(who).steps.stage = Stage::Asks,
        Some(_) => {
            world.call_mut(who).steps.interrupts = true;
            leaves_step(config, world, who, true);
        }
    }
}

/// Journals that the body of the step begins. `again`: a reconciler has found no effect of an earlier body.
fn journals_beginning(config: &Config, world: &mut World, who: CallId, again: bool) {
    let call = world.call_mut(who);
    call.journals(who, GUARDED, Progress::Begun);
    call.steps.stage = Stage::Begins { again };
    let too_early = match config.mutant {
        Some(Mutant::StepBeginsUnconfirmed) => !again,
        Some(Mutant::StepBegunAgainUnconfirmed) => again,
        _ => false,
    };
    awaits_append(config, world, who);
    if too_early && world.call(who).is_active() {
        orphan_append(config, world, who);
        starts_step(config, world, who);
    }
}

/// Starts the body of a step whose beginning is in the record.
fn starts_step(config: &Config, world: &mut World, who: CallId) {
    properties::step_runs(config, world, who, GUARDED);
    let call = world.call_mut(who);
    (call.steps.stage, call.phase) = (Stage::Runs, Phase::Body { polled: true });
}

/// Ends the body of a step whose beginning is in the record.
fn ends_step(config: &Config, world: &mut World, who: CallId, end: StepEnd) {
    let fails = config.plan(who).reaction == Reaction::Fail;
    match end {
        StepEnd::Value => step_has_ended(config, world, who),
        StepEnd::Doubtful if !config.is(Mutant::StepUncertainIsUndone) => {
            world.call_mut(who).steps.interrupts |= fails;
            leaves_step(config, world, who, true);
        }
        StepEnd::Error | StepEnd::Doubtful => {
            if end == StepEnd::Error {
                properties::step_undone(config, world, who);
            }
            world.call_mut(who).journals(who, GUARDED, Progress::Undone);
            leaves_step(config, world, who, false);
            awaits_append(config, world, who);
        }
    }
}

/// Journals the value of a step that has ended, or whose reconciler has found the effect.
fn step_has_ended(config: &Config, world: &mut World, who: CallId) {
    properties::step_vouched(config, world, who);
    journals_end(config, world, who);
}

fn journals_end(config: &Config, world: &mut World, who: CallId) {
    world.call_mut(who).journals(who, GUARDED, Progress::Ended);
    leaves_step(config, world, who, false);
    awaits_append(config, world, who);
}

/// Lets the body go on after its guarded step. `failed`: the step has no value, and the operation stays open.
fn leaves_step(config: &Config, world: &mut World, who: CallId, failed: bool) {
    let steps = &mut world.call_mut(who).steps;
    steps.stage = Stage::None;
    steps.failed |= failed;
    steps.next += 1;
    skips_steps(config, world, who);
}

/// Sends the entries that the store has not confirmed.
fn appends(world: &mut World, who: CallId) {
    let at = world.now;
    let steps = &mut world.call_mut(who).steps;
    steps.since.get_or_insert(at);
    steps.append = Append::Sent { at, journal: steps.journal };
}

/// Processes the answer to an append, which is also a renewal.
fn hears_append(config: &Config, world: &mut World, who: CallId) {
    let Append::Answered { at, journal, done } = world.call(who).steps.append else { unreachable!("nothing to hear") };
    let now = world.now;
    let call = world.call_mut(who);
    call.steps.append = Append::None;
    if done == Done::Refused {
        return gives_up_append(config, world, who, true);
    }
    let from = if config.is(Mutant::AppendCountsFromAnswer) { now } else { at };
    call.asked_at = call.asked_at.max(from);
    steps_return(config, world, who, journal);
}

/// Lets the steps return whose entries `journal` has and the store has not confirmed before. If other steps have ended
/// meanwhile, their entries are sent together.
fn steps_return(config: &Config, world: &mut World, who: CallId, journal: Journal) {
    let confirmed = world.call(who).steps.confirmed;
    for entry in journal.entries().skip(confirmed.into()).filter(|entry| entry.progress == Progress::Ended) {
        properties::step_returns(config, world, who, entry);
    }
    let call = world.call_mut(who);
    (call.steps.confirmed, call.steps.since) = (journal.len(), None);
    call.phase = Phase::Body { polled: true };
    if call.steps.journal.len() > journal.len() {
        appends(world, who);
        let plan = config.plan(who);
        let goes_on = plan.joined && world.call(who).steps.next < plan.steps;
        world.call_mut(who).phase = Phase::Body { polled: goes_on };
    }
    if let Stage::Begins { .. } = world.call(who).steps.stage {
        starts_step(config, world, who);
    }
}

/// Repeats an append that failed, for one lease and while the lease may be held.
fn append_fails(config: &Config, world: &mut World, who: CallId, trouble: Trouble) {
    if let (Append::Sent { journal, .. } | Append::Answered { journal, .. }, true) =
        (world.call(who).steps.append, config.is(Mutant::UnconfirmedStepReturns))
    {
        orphan_append(config, world, who);
        return steps_return(config, world, who, journal);
    }
    orphan_append(config, world, who);
    let since = world.call(who).steps.since.unwrap_or(world.now);
    let in_time = world.now < since + config.span() && world.may_be_held(config, who) > 0;
    match trouble.is_transient() && in_time {
        true => appends(world, who),
        false => gives_up_append(config, world, who, true),
    }
}

/// Ends the wait for an append. The step does not return its value, and the body goes on: it returns an error, or runs
/// the next step, whose append has the entry of this step, too. `failed`: the step returns an error.
fn gives_up_append(config: &Config, world: &mut World, who: CallId, failed: bool) {
    let left_out = config.is(Mutant::UnconfirmedEntryLeftOut);
    let call = world.call_mut(who);
    if left_out {
        call.steps.journal = Journal::of(call.steps.journal.entries().take(call.steps.confirmed.into()));
    }
    if let Stage::Begins { again } = call.steps.stage {
        if config.is(Mutant::StepBeginsUnanswered) {
            (call.steps.append, call.steps.since) = (Append::None, None);
            return starts_step(config, world, who);
        }
        // The body will not run. The next append cancels its beginning, unless an earlier effect is in doubt.
        if !again {
            call.journals(who, GUARDED, Progress::Undone);
        }
        leaves_step(config, world, who, failed);
    }
    let call = world.call_mut(who);
    (call.steps.append, call.steps.since) = (Append::None, None);
    call.steps.failed |= failed;
    call.phase = Phase::Body { polled: true };
}

/// Time at which a body, or the reconciler before it, has run for too long; 0 for never.
fn stops_at(config: &Config, world: &World, who: CallId) -> u8 {
    config.plan(who).timeout.map_or(0, |timeout| world.call(who).asked_at + timeout * config.unit())
}

/// Ends a poll of the body, which stays pending.
fn yields(config: &Config, world: &mut World, who: CallId) {
    let plan = config.plan(who);
    if !plan.hangs() {
        world.left.polls -= 1;
    }
    let call = world.call_mut(who);
    call.registered = true;
    call.phase = Phase::Body { polled: false };
    if call.lost {
        loses(config, world, who);
    }
}

/// Drops the body because the heartbeat has found the lease lost. No write follows, because the key has another owner.
fn loses(config: &Config, world: &mut World, who: CallId) {
    if !config.plan(who).shadow && !config.is(Mutant::LostLeaseRunsOn) {
        body_is_gone(config, world, who);
        world.call_mut(who).deed.values = false;
        over(config, world, who, Class::LeaseLost);
    }
}

/// Processes an error that the call gets instead of an answer.
pub(crate) fn fails(config: &Config, world: &mut World, who: CallId, trouble: Trouble) {
    match world.call(who).phase {
        Phase::Reserving { tries, landed, .. } => {
            // An unanswered reservation may have taken effect: the lease may have begun with its request, and the key
            // may be held.
            let landed = landed || trouble == Trouble::Unknown;
            if trouble == Trouble::Unknown {
                let call = world.call_mut(who);
                call.unanswered = call.unanswered.or(Some(call.asked_at));
            }
            if config.is(Mutant::ErrorReadAsNoRecord) {
                world.call_mut(who).attempt = 1;
                return starts_body(config, world, who);
            }
            if tries_again(config, world, who, tries, trouble) {
                // The owner token stays the same, so that the store recognises a reservation that has taken effect.
                let what = message(config, world, None);
                let tries = config.tries.min(tries + 1);
                world.call_mut(who).phase = Phase::Reserving { tries, landed, what, line: Line::Sent };
                return;
            }
            // The call makes no more tries and returns the error. The clean-up frees the key, which an unanswered
            // request may hold.
            properties::ends_wait(world, who, trouble);
            let plan = config.plan(who);
            let told = unanswered(plan, trouble);
            if landed && !config.is(Mutant::UnansweredNotReleased) {
                clean_up(config, world, who, told);
            } else {
                over(config, world, who, told);
            }
        }
        Phase::Marking { tries, .. } if tries_again(config, world, who, tries, trouble) => {
            let (at, tries) = (world.now, config.tries.min(tries + 1));
            world.call_mut(who).phase = Phase::Marking { tries, at, line: Line::Sent };
        }
        // Unless the call was waiting, the renewal before the body is tried only once.
        Phase::Confirming { tries, .. } if tries_again(config, world, who, config.tries, trouble) => {
            let (at, tries) = (world.now, config.tries.min(tries + 1));
            world.call_mut(who).phase = Phase::Confirming { tries, at, line: Line::Sent };
        }
        Phase::GivingBack { .. } if tries_again(config, world, who, config.tries, trouble) => {
            world.call_mut(who).phase = Phase::GivingBack { line: Line::Sent };
        }
        // A step before the body has failed, so the reservation is cleaned up.
        Phase::Confirming { .. } | Phase::Marking { .. } | Phase::GivingBack { .. } => {
            properties::ends_wait(world, who, trouble);
            let plan = config.plan(who);
            let told = unanswered(plan, trouble);
            clean_up(config, world, who, told);
        }
        Phase::Ending { ending: Ending::Release(how), late: None, .. } => {
            // The caller gets the body's error without waiting until the key is free.
            late(config, world, who, Ending::Release(how), told_after(Ending::Release(how)));
        }
        Phase::Ending { ending, late, .. } => ending_fails(config, world, who, trouble, (ending, late)),
        // The next delivery sends the messages.
        Phase::Inspecting { .. } | Phase::MarkingSent { .. } => over(config, world, who, Class::Unsent),
        phase => unreachable!("{phase:?} waits for no answer"),
    }
}

/// Returns whether a request that failed `tries` times is repeated. A waiting call repeats its requests until its
/// wait is over.
fn tries_again(config: &Config, world: &World, who: CallId, tries: u8, trouble: Trouble) -> bool {
    let waits = world.call(who).give_up_at > world.now && !config.is(Mutant::FailureEndsWait);
    trouble.is_transient() && (tries < config.tries || waits)
}

/// Answer to the caller after a failure of the store. Under `on_store_error = run`, the body runs only after a
/// temporary failure, and not if the record is unreadable.
fn unanswered(plan: &Plan, trouble: Trouble) -> Class {
    match (plan.open && trouble.is_transient()) || plan.shadow {
        true => Class::Unprotected,
        false => Class::StoreFailed,
    }
}

/// Repeats the failed write of an attempt's end for one lease, while the lease may be held.
fn ending_fails(
    config: &Config,
    world: &mut World,
    who: CallId,
    trouble: Trouble,
    (ending, late): (Ending, Option<Class>),
) {
    let now = world.now;
    let unanswered = trouble == Trouble::Unknown && late.is_none();
    if unanswered && config.is(Mutant::NoAnswerReadAsDone) {
        return over(config, world, who, Class::Ok);
    }
    // A call in shadow mode never delays its caller.
    if late.is_none() && config.plan(who).shadow {
        world.call_mut(who).deed.abandoned = true;
        return unrecorded(config, world, who, late, Class::Unrecorded);
    }
    let since = *world.call_mut(who).fails_since.get_or_insert(now);
    let next = |world: &mut World, ending| {
        world.call_mut(who).phase = Phase::Ending { ending, late, line: Line::Sent };
    };
    // Complete end that the next try writes.
    let whole = match ending {
        // From now on every try leaves the result out. A call whose error can't be recorded releases its key, and does
        // not finish the record.
        Ending::LeftOut { ok: true } => Ending::Finish { kept: ModelResult::TooLarge(who), ok: true },
        Ending::LeftOut { ok: false } => Ending::Instead,
        // The next try writes the complete end again, even if the shortened one has taken effect.
        Ending::Shortened { ok } => Ending::Finish { kept: ModelResult::Stored(who), ok },
        Ending::CleanUp(_) | Ending::GiveBack | Ending::TryRelease => Ending::CleanUp(message(config, world, None)),
        other => other,
    };
    // If this write fails for half a lease, and after each of two renewals, the result may be the cause, and the next
    // try leaves the result out. If renewals fail as well, the store is unreachable, and may accept the result later.
    let call = world.call_mut(who);
    if call.renewed_at > call.counted.max(since) {
        (call.refusals, call.counted) = (2.min(call.refusals + 1), call.renewed_at);
    }
    call.renewed_at = call.asked_at;
    let too_long = call.refusals == 2 && trouble.is_transient() && 2 * (now - since) >= config.span();
    if let (Ending::Finish { kept: ModelResult::Stored(_), ok }, true) = (ending, too_long) {
        return next(world, Ending::Shortened { ok });
    }
    // The clean-up's reservation may have taken effect. A call with a reconciler may have got the key of an operation
    // in doubt, and releases only a key whose record it has seen.
    let seen = world.call(who).marked || !config.plan(who).may_ask() || config.is(Mutant::CleanUpReleasesUnseen);
    if matches!(ending, Ending::CleanUp(_)) && trouble == Trouble::Unknown && seen {
        return next(world, Ending::TryRelease);
    }
    // The write is repeated for one lease while the lease may be held. Some late writes are repeated for longer.
    let held = match config.mutant {
        Some(Mutant::BeatRefusalEndsEnding) => world.believed(config, who),
        _ => world.may_be_held(config, who),
    };
    let in_time = now < since + config.span() || config.is(Mutant::EndsForEver);
    let outlasts = late.is_some() && outlasts_lease(config, world, who, ending);
    let may_pass = trouble.is_transient() || matches!(ending, Ending::Shortened { .. } | Ending::TryRelease);
    let too_early = match late {
        None => config.is(Mutant::GivesUpWithinLease),
        Some(_) => config.is(Mutant::LateWriteGivesUp),
    };
    if may_pass && ((held > 0 && in_time && !too_early) || (outlasts && !too_early)) {
        if !outlasts {
            properties::tries_again(config, world, since);
        }
        return next(world, whole);
    }
    // The call makes no more tries while its caller waits. After an error, a late write releases the key; after a
    // success, the key stays held until its lease lapses.
    if whole == Ending::Instead && late.is_none() {
        return self::late(config, world, who, whole, Class::Err);
    }
    properties::gives_up(config, world, who, trouble, late.is_some());
    if late.is_none() {
        if config.is(Mutant::UnrecordedIsReleased) {
            return self::late(config, world, who, Ending::Release(ReleaseKind::Returned), Class::Unrecorded);
        }
        // This late write continues beyond the lease, because no other attempt may follow and supply a result.
        if may_pass && outlasts_lease(config, world, who, whole) {
            return self::late(config, world, who, whole, Class::Unrecorded);
        }
    }
    world.call_mut(who).deed.abandoned = true;
    world.call_mut(who).phase = Phase::Ending { ending: whole, late, line: Line::Sent };
    unrecorded(config, world, who, late, Class::Unrecorded);
}

/// Returns whether a late write is repeated beyond the lease. Two kinds of late writes are repeated: the end of a body
/// after which no other body may run, and the clean-up of a reservation that may be marked.
fn outlasts_lease(config: &Config, world: &World, who: CallId, ending: Ending) -> bool {
    let plan = config.plan(who);
    match ending {
        Ending::CleanUp(_) | Ending::GiveBack | Ending::TryRelease => world.call(who).marked,
        _ => is_fail(plan),
    }
}

fn hears_beat(config: &Config, world: &mut World, who: CallId) {
    let Beat::Answered { at, done } = world.call(who).beat else { unreachable!("no answer is under way") };
    let now = world.now;
    let call = world.call_mut(who);
    call.beat = Beat::None;
    match done {
        Done::Done => {
            let from = if config.is(Mutant::RenewalCountsFromAnswer) { now } else { at };
            call.asked_at = call.asked_at.max(from);
        }
        Done::Refused => {
            call.lost = true;
            if matches!(call.phase, Phase::Body { polled: false } | Phase::Asking) {
                loses(config, world, who);
            }
        }
    }
}

/// Lets the body return, and starts the last write of the call: it records the output, or releases the key after an
/// error that is not recorded.
pub(crate) fn returns(config: &Config, world: &mut World, who: CallId, ok: bool) {
    let plan = config.plan(who);
    let steps = world.call(who).steps;
    let ending = match (ok, plan.record_errors) {
        (false, _) if plan.doubts && !config.is(Mutant::UncertainErrorReleased) => {
            Ending::Release(ReleaseKind::Interrupted)
        }
        (false, true) if config.is(Mutant::StepDoubtRecorded) => Ending::Finish { kept: ModelResult::Stored(who), ok },
        (false, _) if steps.interrupts => Ending::Release(ReleaseKind::Interrupted),
        (false, false) => Ending::Release(ReleaseKind::Returned),
        // A step without a value may have caused the error, and the next delivery may succeed. An operation with a step
        // in doubt stays open, also if the body has not reached this step.
        (false, true) if steps.failed || steps.journal.doubt(GUARDED).is_some() => {
            Ending::Release(ReleaseKind::Returned)
        }
        _ => Ending::Finish { kept: ModelResult::Stored(who), ok },
    };
    let call = world.call_mut(who);
    if call.deed.body == Body::Running {
        call.deed.body = Body::Returned { ok };
    }
    call.steps = StepsOfCall::NONE;
    call.pushed = if ok && !plan.shadow { plan.messages } else { 0 };
    if ok && config.is(Mutant::SentBeforeRecorded) {
        for place in 0..plan.messages {
            let attempt = world.call(who).attempt;
            properties::message_arrives(config, world, who, (attempt, place));
        }
    }
    let call = world.call_mut(who);
    // The values are dropped in the same step, because the body's end waits for this drop.
    call.deed.values = false;
    call.phase = Phase::Ending { ending, late: None, line: Line::Sent };
    if !ok && config.is(Mutant::ErrorKeepsKey) {
        return over(config, world, who, Class::Err);
    }
    if ok && config.is(Mutant::OkBeforeRecorded) {
        late(config, world, who, ending, Class::Ok);
    }
}

/// Handles a dropped call or a panic of its body: a late write ends the attempt.
pub(crate) fn is_dropped(config: &Config, world: &mut World, who: CallId) {
    let call = *world.call(who);
    orphan(config, world, who);
    body_is_gone(config, world, who);
    if config.is(Mutant::DropWritesNothing) {
        return over(config, world, who, Class::Dropped);
    }
    match call.phase {
        // The clean-up follows in any case, because the reservation may have taken effect.
        Phase::Reserving { .. } | Phase::Confirming { .. } | Phase::Marking { .. } | Phase::GivingBack { .. }
            if !config.is(Mutant::UnansweredNotReleased) =>
        {
            clean_up(config, world, who, Class::Dropped);
        }
        Phase::Waiting { .. } if call.unanswered.is_some() => clean_up(config, world, who, Class::Dropped),
        Phase::Asking => {
            let how = match config.mutant {
                Some(Mutant::DroppedReconcilerReleases) => ReleaseKind::NotStarted,
                _ => ReleaseKind::Unresolved,
            };
            late(config, world, who, Ending::Release(how), Class::Dropped);
        }
        Phase::Body { .. } => {
            let how = match config.mutant {
                Some(Mutant::DroppedUnderFailIsReleased) => ReleaseKind::Returned,
                Some(Mutant::DroppedCountsAsNotStarted) => ReleaseKind::NotStarted,
                _ => ReleaseKind::dropped(config.plan(who).on_crash),
            };
            drops_values(config, world, who, how, Class::Dropped);
        }
        Phase::Ending { ending, .. } => {
            let ending = match ending {
                Ending::Shortened { ok } | Ending::LeftOut { ok } => {
                    Ending::Finish { kept: ModelResult::Stored(who), ok }
                }
                other => other,
            };
            late(config, world, who, ending, Class::Dropped);
        }
        _ => over(config, world, who, Class::Dropped),
    }
}

/// Release of an attempt whose body or reconciler is cancelled.
fn dropped(config: &Config, world: &World, who: CallId) -> ReleaseKind {
    match world.call(who).phase {
        Phase::Asking => ReleaseKind::Unresolved,
        _ => ReleaseKind::dropped(config.plan(who).on_crash),
    }
}

/// Drops the values of a body that has ended early, before its key is freed. Meanwhile the lease is renewed, also
/// beyond the time-out of the body.
fn drops_values(config: &Config, world: &mut World, who: CallId, how: ReleaseKind, told: Class) {
    let ending = Ending::Release(how);
    if config.is(Mutant::ReleasedBeforeValues) {
        return late(config, world, who, ending, told);
    }
    let call = world.call_mut(who);
    call.registered = !config.is(Mutant::ValuesWithoutLease);
    call.stop_at = 0;
    call.phase = Phase::Dropping { ending, told };
}

fn loses_values(config: &Config, world: &mut World, who: CallId) {
    let call = world.call_mut(who);
    call.deed.values = false;
    let Phase::Dropping { ending, told } = call.phase else { unreachable!("no values are being dropped") };
    late(config, world, who, ending, told);
}

/// Frees the key of a reservation that may have taken effect, or may still. The caller got `told`.
fn clean_up(config: &Config, world: &mut World, who: CallId, told: Class) {
    let ending = match config.mutant {
        Some(Mutant::CleanUpOnlyReleases) => Ending::Release(ReleaseKind::NotStarted),
        _ => Ending::CleanUp(message(config, world, None)),
    };
    late(config, world, who, ending, told);
    // The clean-up is repeated for one lease from now on.
    let now = world.now;
    let call = world.call_mut(who);
    (call.asked_at, call.fails_since) = (now, Some(now));
}

/// Continues with `ending` although no caller waits for it. The caller got `told`.
fn late(config: &Config, world: &mut World, who: CallId, ending: Ending, told: Class) {
    orphan_beat(config, world, who);
    let call = world.call_mut(who);
    (call.give_up_at, call.unanswered, call.fails_since) = (0, None, None);
    (call.refusals, call.counted, call.renewed_at) = (0, 0, 0);
    call.registered = false;
    call.stop_at = 0;
    // A late write needs only one fact of the attempt: the time at which its lease was last confirmed.
    (call.lost, call.refused) = (false, false);
    call.phase = Phase::Ending { ending, late: Some(told), line: Line::Sent };
    properties::caller_hears(config, world, who, told);
}

fn over(config: &Config, world: &mut World, who: CallId, told: Class) {
    if !matches!(world.call(who).phase, Phase::Ending { late: Some(_), .. }) {
        properties::caller_hears(config, world, who, told);
    }
    orphan_beat(config, world, who);
    rest(world, who, Phase::Over(told));
}

/// Ends the steps of the call, and clears values that no longer make a difference.
fn rest(world: &mut World, who: CallId, phase: Phase) {
    let call = world.call_mut(who);
    *call = Call { phase, deed: call.deed, ..Call::IDLE };
}

fn body_is_gone(config: &Config, world: &mut World, who: CallId) {
    orphan_append(config, world, who);
    world.call_mut(who).steps = StepsOfCall::NONE;
    let deed = &mut world.call_mut(who).deed;
    if deed.body == Body::Running {
        deed.body = Body::Gone;
    }
}

/// Returns whether this call must not take over from a body that has begun.
pub(crate) fn is_fail(plan: &Plan) -> bool {
    plan.on_crash == OnCrash::Fail
}
