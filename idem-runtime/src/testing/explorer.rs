//! Explorer, which runs a handler repeatedly, each time with another fault.

use std::cell::RefCell;
use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use serde::Serialize;

use super::problem::Problem;
use super::report::Report;
use super::run::{PlainFacts, Run};
use super::scenario::{Cut, Duplicate, Point, Scenario};
use super::simulation::{Simulation, Task};
use super::worker::{SLOWER, Worker, World};
use super::{effects, operator};
use crate::clock::Clock;
use crate::engine::{Observe, Outcome, Refusal};
use crate::error::Disposition;
use crate::sync::lock;

/// Time until the broker redelivers an unanswered message. The time doubles with each delivery, up to the length of the
/// longest lease.
const REDELIVERY: Duration = Duration::from_secs(1);
/// Number of deliveries of an unacknowledged message after which the explorer reports [`Problem::Unacknowledged`].
/// Deliveries that are refused as in progress are not counted.
const DELIVERIES: u32 = 30;
/// Default time from the first delivery to the last duplicate.
const LATE: Duration = Duration::from_secs(3600);
/// Default simulated time that a scenario may take.
const PATIENCE: Duration = Duration::from_secs(3600);
/// Largest number of polls that all tasks of a scenario together may make. A scenario that reaches this number is
/// stopped as stuck.
const POLLS: u64 = 1_000_000;
/// Largest number of times that the operator of a scenario decides about steps in doubt.
const DECISIONS: u32 = 3;
/// Simulated time that follows the last delivery, for late writes and for tasks that the handler has spawned.
const SETTLE: Duration = Duration::from_secs(600);
/// Lease that the explorer assumes if no lease of the handler is longer. The explorer derives outages of the store,
/// pauses between deliveries, and time limits from the longest lease.
const LEASE: Duration = Duration::from_secs(30);
/// Largest number of characters of an error's text that a story shows.
const SHOWN: usize = 160;
/// Default limit of the number of scenarios.
const MAX_SCENARIOS: usize = 50_000;

/// Output of a delivery: the `Result` of a handler, from which [`observe`](crate::observe) computes the disposition, or
/// the [`Disposition`] that a consumer of your own has computed.
pub trait DeliveryOutput: sealed::DeliveryOutput {}

impl<D: sealed::DeliveryOutput> DeliveryOutput for D {}

mod sealed {
    use super::{DeliveryAnswer, Outcome};

    pub trait DeliveryOutput {
        #[doc(hidden)]
        fn answer(self, outcome: Outcome) -> DeliveryAnswer;

        #[doc(hidden)]
        fn failed(&self) -> bool;
    }
}

/// Outcome and output of a delivery that ended.
#[derive(Debug)]
pub struct DeliveryAnswer {
    outcome: Outcome,
    disposition: Disposition,
    /// Value that the handler returned, as JSON.
    value: Option<String>,
    error: Option<String>,
}

impl<T: Serialize, E: Debug> sealed::DeliveryOutput for Result<T, E> {
    fn answer(self, outcome: Outcome) -> DeliveryAnswer {
        let disposition = outcome.disposition();
        let value = self.as_ref().ok().and_then(|value| serde_json::to_string(value).ok());
        let error = self.err().map(|error| format!("{error:?}"));
        DeliveryAnswer { outcome, disposition, value, error }
    }

    fn failed(&self) -> bool {
        self.is_err()
    }
}

impl sealed::DeliveryOutput for Disposition {
    fn answer(self, outcome: Outcome) -> DeliveryAnswer {
        DeliveryAnswer { outcome, disposition: self, value: None, error: None }
    }

    /// Returns false: the consumer that computed the `Disposition` has already considered whether the handler failed.
    fn failed(&self) -> bool {
        false
    }
}

impl DeliveryAnswer {
    fn narrate(&self) -> String {
        let outcome = &self.outcome;
        let attempt = outcome.attempt().map_or_else(String::new, |number| format!(" attempt {number}"));
        let mut told = match (outcome.replayed(), outcome.executed(), outcome.refusal()) {
            (true, ..) => format!("gets the result of{attempt}"),
            (_, _, Some(refusal)) => format!("is refused ({refusal:?})"),
            (_, true, None) if outcome.recorded() => format!("has run{attempt} and recorded it"),
            (_, true, None) => format!("has run{attempt} and recorded nothing"),
            (_, false, None) => "has ended".to_owned(),
        };
        if outcome.refusal().is_none()
            && let Some(error) = &self.error
        {
            let shown: String = error.chars().take(SHOWN).collect();
            let more = if shown.len() < error.len() { "…" } else { "" };
            told = format!("{told}: {shown}{more}");
        }
        match self.disposition {
            Disposition::Ack => format!("{told}; the message is acknowledged"),
            Disposition::Retry { after } => format!("{told}; to be delivered again after {after:.3?}"),
            Disposition::DeadLetter => format!("{told}; the message is set aside"),
        }
    }
}

/// Kills your handler at each of its awaits and store calls, with duplicates in flight, and reports whether the effects
/// that you count happened once. The [module](crate::testing) has an example.
///
/// `explore` calls `deliver` for every delivery of one message. `deliver` builds the handler's surroundings from the
/// [`Worker`], and calls the handler. [`Explorer`] explores a handler with options.
///
/// # Panics
/// If `explore` is called inside of a tokio runtime, because it starts its own runtime. Call `explore` from a
/// plain `#[test]`.
pub fn explore<F, D>(deliver: F) -> Report
where
    F: Fn(Worker) -> D + 'static,
    D: Future<Output: DeliveryOutput> + 'static,
{
    Explorer::new().explore(deliver)
}

/// Explorer of a handler: [`explore`] with options.
///
/// ```
/// # #[cfg(feature = "macros")] {
/// use idem_runtime::testing::{Explorer, Worker};
/// use idem_runtime::{Error, current, idempotent};
///
/// #[idempotent(key = "order:{order}", ttl = "7d", store = worker.store())]
/// async fn charge(worker: &Worker, order: u32) -> Result<u32, Error> {
///     let key = current()?.child_key("charge");
///     // Your test fakes the payment provider with this effect.
///     worker.effect("charge").key(key).await.map_err(|_| Error::NoAttempt)?;
///     Ok(order)
/// }
///
/// let explorer = Explorer::new().orders(2).duplicates(1).max_scenarios(200);
/// let report = explorer.explore(|worker| async move { charge(&worker, 42).await });
/// report.assert_once();
/// // A finding names its scenario, which runs alone like this:
/// let alone = Explorer::new().only("crash@return").explore(|worker| async move { charge(&worker, 42).await });
/// assert!(report.scenarios() > alone.scenarios());
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is explored before `explore` is called"]
pub struct Explorer {
    seed: u64,
    orders: u32,
    duplicates: u32,
    at_most_once: bool,
    twice: bool,
    redelivered_within: Duration,
    patience: Duration,
    max_scenarios: Option<usize>,
    only: Option<String>,
}

impl Default for Explorer {
    fn default() -> Self {
        Self::new()
    }
}

impl Explorer {
    /// Creates an explorer that expects each effect exactly once, and delivers one duplicate at a time.
    pub fn new() -> Self {
        Self {
            seed: 0,
            orders: 2,
            duplicates: 1,
            at_most_once: false,
            twice: false,
            redelivered_within: LATE,
            patience: PATIENCE,
            max_scenarios: None,
            only: None,
        }
    }

    /// Sets the seed of the random order of concurrent tasks (default: 0).
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the number of task orders in which each scenario with concurrent workers runs (default: 2).
    pub fn orders(mut self, orders: u32) -> Self {
        self.orders = orders;
        self
    }

    /// Sets the number of duplicates in scenarios with duplicates (default: 1).
    pub fn duplicates(mut self, duplicates: u32) -> Self {
        self.duplicates = duplicates;
        self
    }

    /// Checks that effects happen at most once, for `on_crash = fail`: no effect may happen more often than in the
    /// plain run. An effect may be missing if the message was set aside, so that an operator can decide.
    ///
    /// A handler whose only doubts are those of its [steps](crate::Attempt::step) needs no such check: the operator of
    /// a scenario decides about each step in doubt, and the message is delivered again.
    pub fn at_most_once(mut self) -> Self {
        self.at_most_once = true;
        self
    }

    /// Adds scenarios in which a later delivery is also cancelled or killed, at each of its awaits, after the first
    /// delivery was cut. Use `twice` for handlers whose second attempt takes another path. The number of scenarios with
    /// two cuts grows with the square of the awaits.
    pub fn twice(mut self) -> Self {
        self.twice = true;
        self
    }

    /// Sets the time after the first delivery within which your broker may deliver a message again (default: 1 h). A
    /// duplicate arrives just before the end of that time, and reveals a `ttl` that is too short.
    pub fn redelivered_within(mut self, late: Duration) -> Self {
        self.redelivered_within = late;
        self
    }

    /// Sets the simulated time that a scenario may take before the explorer reports its handler as stuck (default: 1
    /// h). The limit is at least 30 leases.
    pub fn patience(mut self, limit: Duration) -> Self {
        self.patience = limit;
        self
    }

    /// Limits the number of scenarios (default: 50 000). The report contains the number of scenarios that were left
    /// out.
    pub fn max_scenarios(mut self, limit: usize) -> Self {
        self.max_scenarios = Some(limit);
        self
    }

    /// Runs only the scenario with this name, for example `"crash@await:3/duplicate:during"`. A finding contains the
    /// name of its scenario. With other options of the explorer, this name may identify another scenario.
    ///
    /// ```
    /// use idem_runtime::testing::{Explorer, SimulatedStore, Worker};
    /// use idem_runtime::{Error, idempotent};
    ///
    /// #[idempotent(key = "order:{order}", ttl = "7d", store = store)]
    /// async fn charge(store: SimulatedStore, worker: Worker, order: u32) -> Result<u32, Error> {
    ///     let _ = worker.effect("charge").await;
    ///     Ok(order)
    /// }
    ///
    /// let explorer = Explorer::new().only("crash@await:4");
    /// let report = explorer.explore(|worker| charge(worker.store(), worker, 42));
    /// for line in report.findings()[0].story() {
    ///     println!("{line}");
    /// }
    /// ```
    pub fn only(mut self, scenario: impl Into<String>) -> Self {
        self.only = Some(scenario.into());
        self
    }

    /// Explores a handler: calls `deliver` for every delivery of a message. `deliver` builds the handler's surroundings
    /// from the [`Worker`], and calls the handler, as if the worker had just started.
    ///
    /// # Panics
    /// If [`only`](Explorer::only) names no existing scenario, or if `explore` is called inside of a tokio runtime.
    pub fn explore<F, D>(&self, deliver: F) -> Report
    where
        F: Fn(Worker) -> D + 'static,
        D: Future<Output: DeliveryOutput> + 'static,
    {
        // The output of the handler and its `Outcome` together make the answer of a delivery.
        let deliver: Deliver = Rc::new(move |worker| {
            let delivery = deliver(worker);
            Box::pin(async move {
                let (delivered, outcome) = Observe::new(delivery, sealed::DeliveryOutput::failed).await;
                sealed::DeliveryOutput::answer(delivered, outcome)
            })
        });
        // The plain run collects the points at which faults can happen, and the effects to expect.
        let unknown = Rc::new(PlainFacts { lease: LEASE, ..PlainFacts::default() });
        let plain = self.run(Scenario::PLAIN, &unknown, &deliver);
        let facts = Rc::new(plain.facts());
        let mut report = Report::new(self.at_most_once, &plain);
        report.judge(&plain, self.at_most_once);
        if plain.effects.is_empty() && plain.messages.is_empty() {
            report.add(&plain, Problem::NothingCounted);
        }
        let awaits = plain.awaits.len();
        let mut scenarios = Scenario::all(awaits, plain.store_calls.len(), plain.effect_calls.len(), self.orders);
        if self.twice {
            scenarios.extend(Scenario::twice(awaits));
        }
        // A delivery that finds an effect in doubt is cut at each of its awaits. Only a run of its scenario shows them.
        let leaves_doubt = |scenario: &Scenario| plain.leaves_doubts && scenario.leaves_doubt();
        let doubting: Vec<Scenario> = scenarios.iter().copied().filter(leaves_doubt).collect();
        for scenario in doubting {
            let run = self.run(scenario, &facts, &deliver);
            scenarios.extend(scenario.cut_again(run.awaits_in_doubt));
        }
        // With `only`, the report contains the run of this scenario alone.
        if let Some(only) = &self.only {
            if *only == Scenario::PLAIN.to_string() {
                return report;
            }
            let Some(scenario) = scenarios.into_iter().find(|it| it.to_string() == *only) else {
                panic!("there is no scenario `{only}` for a handler with {}", report.size());
            };
            report.clear();
            let run = self.run(scenario, &facts, &deliver);
            report.judge(&run, self.at_most_once);
            return report;
        }
        // The caller of `max_scenarios` knows that scenarios are left out. If the default limit leaves scenarios out,
        // the report is incomplete.
        let limit = self.max_scenarios.unwrap_or(MAX_SCENARIOS).saturating_sub(1);
        report.left_out = scenarios.len().saturating_sub(limit);
        report.incomplete = report.left_out > 0 && self.max_scenarios.is_none();
        for scenario in scenarios.into_iter().take(limit) {
            let run = self.run(scenario, &facts, &deliver);
            report.judge(&run, self.at_most_once);
        }
        report
    }

    fn run(&self, scenario: Scenario, plain: &Rc<PlainFacts>, deliver: &Deliver) -> Run {
        let simulation = Rc::new(Simulation::new(self.seed.wrapping_add(u64::from(scenario.order))));
        let late = match scenario.duplicate {
            Duplicate::Late => self.redelivered_within,
            _ => Duration::ZERO,
        };
        simulation.limit_polls(POLLS);
        let patience = self.patience.max(plain.lease * DELIVERIES);
        simulation.limit_time(late.saturating_add(patience).saturating_add(SETTLE * (1 + DECISIONS)));
        let scene = Rc::new(Scene {
            world: World::new(simulation.clock(), scenario, plain.lease),
            plain: Rc::clone(plain),
            simulation: Rc::clone(&simulation),
            scenario,
            deliver: Rc::clone(deliver),
            duplicates: self.duplicates,
            copies: RefCell::default(),
            known: RefCell::default(),
        });
        let stuck = simulation.try_run(scene.play(late)).err();
        if let Some(stuck) = stuck {
            let what = if stuck.is_spinning() { "a task is polled endlessly" } else { "a task never ends" };
            scene.world.narrate(what);
            scene.known.borrow_mut().problems.push(Problem::Stuck);
        }
        let mut known = scene.known.take();
        known.problems.append(&mut lock(&scene.world.state).problems);
        let mut state = lock(&scene.world.state);
        Run {
            scenario: scenario.to_string(),
            awaits: known.awaits,
            store_calls: std::mem::take(&mut state.store_calls),
            effect_calls: std::mem::take(&mut state.effect_calls),
            effects: effects::count(&state.effects),
            messages: effects::count_messages(state.messages.values()),
            step_values: std::mem::take(&mut state.step_values),
            leaves_doubts: state.leaves_doubts,
            awaits_in_doubt: known.awaits_in_doubt,
            values: known.values,
            set_aside: known.set_aside,
            problems: known.problems,
            story: std::mem::take(&mut state.story),
            lease: state.lease,
        }
    }
}

type Deliver = Rc<dyn Fn(Worker) -> Pin<Box<dyn Future<Output = DeliveryAnswer>>>>;

/// State of a scenario while it runs.
struct Scene {
    simulation: Rc<Simulation>,
    world: Arc<World>,
    plain: Rc<PlainFacts>,
    scenario: Scenario,
    deliver: Deliver,
    duplicates: u32,
    /// Tasks that deliver the message and its duplicates. Each task ends when its copy of the message is acknowledged
    /// or set aside.
    copies: RefCell<Vec<Task<()>>>,
    known: RefCell<ScenarioFacts>,
}

#[derive(Default)]
struct ScenarioFacts {
    duplicated: bool,
    cut_again: bool,
    awaits: Vec<String>,
    awaits_in_doubt: usize,
    values: Vec<String>,
    set_aside: bool,
    problems: Vec<Problem>,
}

impl ScenarioFacts {
    /// Returns the scenario's fault for a later delivery (`Cut::Nothing` if the scenario has only one fault), and
    /// records that this fault has been used.
    fn cut_again(&mut self, scenario: Scenario) -> Cut {
        self.cut_again = true;
        scenario.then.map_or(Cut::Nothing, |(cut, _)| cut)
    }
}

/// Selects which of the scenario's cuts (its faults) hits a delivery.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CutSelection {
    /// The cut of the first delivery.
    First,
    /// The cut for a later delivery.
    Later,
    /// No cut applies to the delivery.
    No,
}

/// End of a delivery.
enum DeliveryEnd {
    Answered(DeliveryAnswer),
    /// The delivery was dropped or panicked, so the broker gets no answer.
    Unanswered,
    /// The worker of the delivery died.
    Died,
}

impl DeliveryEnd {
    fn is_in_progress(&self) -> bool {
        matches!(self, Self::Answered(answer) if answer.outcome.refusal() == Some(Refusal::InProgress))
    }
}

impl Scene {
    async fn play(self: &Rc<Self>, late: Duration) {
        self.start("the message", self.world.worker(), CutSelection::First);
        if self.scenario.duplicate == Duplicate::With {
            self.duplicate();
        }
        self.all_ended().await;
        if self.scenario.duplicate == Duplicate::Late {
            // The broker may redeliver until the time `late` after the first delivery. The duplicate arrives just
            // before that time.
            let passed = self.world.clock().now().since_origin();
            self.world.clock().sleep(late.saturating_sub(passed).saturating_sub(SLOWER)).await;
            self.duplicate();
            self.all_ended().await;
        }
        self.world.arrive_at_last();
        self.world.clock().sleep(SETTLE).await;
        for _ in 0..DECISIONS {
            if !self.known.borrow().set_aside || !operator::decide_steps(&self.world, &self.plain).await {
                return;
            }
            self.known.borrow_mut().set_aside = false;
            self.start("the message, which was set aside,", self.world.worker(), CutSelection::No);
            self.all_ended().await;
            self.world.clock().sleep(SETTLE).await;
        }
    }

    async fn all_ended(&self) {
        loop {
            let Some(copy) = self.copies.borrow_mut().pop() else { return };
            let _ = copy.await;
        }
    }

    fn start(self: &Rc<Self>, what: &'static str, worker: Worker, watched: CutSelection) {
        let scene = Rc::clone(self);
        let copy = self.simulation.spawn(async move { scene.deliver(what, worker, watched).await });
        self.copies.borrow_mut().push(copy);
    }

    /// Starts the delivery of the duplicates, each to its own worker. Does nothing if the duplicates of this scenario
    /// have been started before.
    fn duplicate(self: &Rc<Self>) {
        if !std::mem::replace(&mut self.known.borrow_mut().duplicated, true) {
            for _ in 0..self.duplicates {
                self.start("a duplicate", self.world.worker(), CutSelection::No);
            }
        }
    }

    fn duplicate_after(self: &Rc<Self>) {
        if self.scenario.duplicate == Duplicate::After {
            self.duplicate();
        }
    }

    /// Delivers one copy of the message like a broker: repeatedly, until the copy is acknowledged or set aside.
    async fn deliver(self: Rc<Self>, what: &'static str, mut worker: Worker, mut watched: CutSelection) {
        let world = &self.world;
        let mut redelivery = REDELIVERY;
        let mut left = DELIVERIES;
        while left > 0 {
            let number = world.delivery();
            world.narrate(&format!("delivery {number}: {what} to worker {}", worker.number()));
            let ended = self.deliver_once(number, &worker, watched).await;
            let mut again_after = None;
            left -= u32::from(!ended.is_in_progress());
            match ended {
                // The worker dies between the return of the handler and the acknowledgement, so the broker delivers
                // again.
                DeliveryEnd::Answered(_) if watched == CutSelection::First && self.scenario.point == Point::Return => {
                    self.kill(&worker, "when the handler has returned, before the message is acknowledged");
                    self.duplicate_after();
                }
                DeliveryEnd::Answered(answer) => {
                    world.narrate(&format!("delivery {number} {}", answer.narrate()));
                    if answer.outcome.recorded() {
                        self.known.borrow_mut().values.extend(answer.value);
                    }
                    match answer.disposition {
                        Disposition::Retry { after } => again_after = Some(after),
                        Disposition::Ack => {
                            if watched == CutSelection::First && self.scenario.point == Point::Ack {
                                self.kill(&worker, "when the message has been acknowledged");
                                self.duplicate_after();
                            }
                            return;
                        }
                        Disposition::DeadLetter => {
                            self.known.borrow_mut().set_aside = true;
                            return;
                        }
                    }
                }
                DeliveryEnd::Unanswered | DeliveryEnd::Died => {}
            }
            // The first fault of the scenario hits only the first delivery. Its second fault, if any, hits a later
            // delivery.
            if watched == CutSelection::First {
                watched = CutSelection::Later;
            }
            // The broker waits before the next delivery, and a new worker replaces a dead one.
            world.clock().sleep(again_after.unwrap_or(redelivery)).await;
            redelivery = (redelivery * 2).min(world.lease());
            if worker.is_dead() {
                worker = world.worker();
            }
        }
        self.known.borrow_mut().problems.push(Problem::Unacknowledged);
    }

    fn kill(&self, worker: &Worker, place: &str) {
        self.world.narrate(&format!("worker {} is killed {place}", worker.number()));
        worker.die();
    }

    async fn deliver_once(self: &Rc<Self>, number: u32, worker: &Worker, watched: CutSelection) -> DeliveryEnd {
        // The closure may panic before it returns a future.
        let mut call = match catch_unwind(AssertUnwindSafe(|| (self.deliver)(worker.clone()))) {
            Ok(call) => call,
            Err(panic) => return self.panicked(number, &*panic),
        };
        let mut awaits = 0;
        let doubts = self.world.doubts();
        loop {
            let mut dead = pin!(worker.dead());
            // Polls the delivery until it ends, its worker dies, or the delivery reaches the point of its cut.
            let step = poll_fn(|cx| {
                if dead.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Step::Ended(DeliveryEnd::Died));
                }
                let polled = catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)));
                let place = self.world.take_place();
                let is_cut = self.world.take_cut();
                if is_cut {
                    self.duplicate_after();
                }
                match polled {
                    Ok(Poll::Ready(answer)) => return Poll::Ready(Step::Ended(DeliveryEnd::Answered(answer))),
                    Err(panic) => return Poll::Ready(Step::Ended(self.panicked(number, &*panic))),
                    Ok(Poll::Pending) => awaits += 1,
                }
                if self.world.doubts() > doubts {
                    let mut known = self.known.borrow_mut();
                    known.awaits_in_doubt = known.awaits_in_doubt.max(awaits);
                }
                // The worker may have died during this poll.
                if worker.is_dead() {
                    return Poll::Ready(Step::Ended(DeliveryEnd::Died));
                }
                // The plain run collects the points at which other scenarios cut the delivery.
                if watched == CutSelection::First && self.scenario == Scenario::PLAIN {
                    self.known.borrow_mut().awaits.push(place.clone());
                }
                let stops_now = is_cut && self.scenario.cut.stands_still();
                if stops_now || self.is_reached(watched, awaits) {
                    return Poll::Ready(Step::Reached(format!("at await {awaits}, {place}")));
                }
                Poll::Pending
            });
            match step.await {
                Step::Ended(ended) => return ended,
                Step::Reached(place) => {
                    let cut = match watched {
                        CutSelection::Later => self.known.borrow_mut().cut_again(self.scenario),
                        _ => self.scenario.cut,
                    };
                    if let Some(ended) = self.cut(cut, number, worker, &place).await {
                        return ended;
                    }
                }
            }
        }
    }

    /// Returns whether the delivery is at the point of its cut: at its `awaits`-th await.
    fn is_reached(&self, watched: CutSelection, awaits: usize) -> bool {
        match watched {
            CutSelection::First => self.scenario.point == Point::Await(awaits),
            CutSelection::Later => {
                !self.known.borrow().cut_again && self.scenario.then.is_some_and(|(_, at)| at == awaits)
            }
            CutSelection::No => false,
        }
    }

    /// Applies `cut` to the delivery. `place` describes the point of the cut, for the story. Returns the end of the
    /// delivery if the cut ended it.
    async fn cut(self: &Rc<Self>, cut: Cut, number: u32, worker: &Worker, place: &str) -> Option<DeliveryEnd> {
        let clock = self.world.clock();
        if self.scenario.duplicate == Duplicate::During {
            self.world.narrate(&format!("delivery {number} is {place}"));
            self.duplicate();
            // Time passes only while no task can go on, so the duplicates run before this sleep ends.
            clock.sleep(SLOWER).await;
        }
        match cut {
            Cut::Cancel => {
                self.world.narrate(&format!("delivery {number} is cancelled {place}"));
                self.duplicate_after();
                Some(DeliveryEnd::Unanswered)
            }
            Cut::Crash => {
                self.kill(worker, place);
                self.duplicate_after();
                Some(DeliveryEnd::Died)
            }
            Cut::Stop | Cut::Pause | Cut::Overtake => {
                self.world.narrate(&format!("worker {} stands still {place}", worker.number()));
                worker.stop();
                self.stand_in(worker.clone());
                worker.running().await;
                if self.scenario.goes_on_late() {
                    clock.sleep(SLOWER).await;
                }
                None
            }
            Cut::Nothing | Cut::RequestLost | Cut::AnswerLost | Cut::Down | Cut::Late | Cut::CrashLate => None,
        }
    }

    /// Delivers the message to another worker, like a broker that has waited too long for an answer. Resumes the
    /// `stopped` worker when the other worker has taken over or ended, as the scenario's fault requires.
    fn stand_in(self: &Rc<Self>, stopped: Worker) {
        let other = self.world.worker();
        let copy = {
            let (scene, other) = (Rc::clone(self), other.clone());
            self.simulation.spawn(async move {
                scene.world.clock().sleep(REDELIVERY).await;
                scene.deliver("the message, which is not acknowledged yet,", other, CutSelection::No).await;
            })
        };
        let scene = Rc::clone(self);
        let until = self.simulation.spawn(async move {
            let world = &scene.world;
            let mut copy = pin!(copy);
            let ended = poll_fn(|cx| copy.as_mut().poll(cx).map(drop));
            if scene.scenario.cut == Cut::Stop {
                ended.await;
            } else {
                either(ended, world.takeover()).await;
            }
            if other.is_dead() {
                copy.kill();
            }
            world.narrate(&format!("worker {} goes on", stopped.number()));
            stopped.resume();
            if !copy.is_finished() {
                let _ = copy.await;
            }
        });
        self.copies.borrow_mut().push(until);
    }

    fn panicked(&self, number: u32, panic: &(dyn std::any::Any + Send)) -> DeliveryEnd {
        let message = panic
            .downcast_ref::<&str>()
            .map(|message| (*message).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        self.world.narrate(&format!("delivery {number} panics: {message}"));
        self.known.borrow_mut().problems.push(Problem::Panicked { message });
        DeliveryEnd::Unanswered
    }
}

/// Waits until `one` or `other` is ready.
async fn either(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|cx| if one.as_mut().poll(cx).is_ready() { Poll::Ready(()) } else { other.as_mut().poll(cx) }).await;
}

/// Result of polling a delivery until it ends or reaches its cut.
enum Step {
    Ended(DeliveryEnd),
    /// The delivery is at the point of its cut. The text describes that point.
    Reached(String),
}
