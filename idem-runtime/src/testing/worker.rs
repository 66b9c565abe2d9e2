//! Surroundings of a handler in a scenario: a worker that can be killed, its store, and effects that are counted.

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use super::effects::{PastEffect, Requester, Rerun};
use super::problem::Problem;
use super::scenario::{Cut, Point, Scenario};
use super::time::SimulatedClock;
use crate::clock::{Clock, Instant};
use crate::engine::{Attempt, Step, current, polled_step, reconciliation};
use crate::key::Key;
use crate::record::journal::{JournalEntry, StepProgress};
use crate::record::messages::OutgoingMessage;
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Release, Reservation, ReserveRequest, StoredResult,
    Verdict,
};
use crate::store::sender::{SendFuture, Sender};
use crate::store::{
    Answers, Filter, JournaledStep, Page, StepState, Store, StoreContext, StoreError, StoreErrorKind, StoreExt as _,
    StoreFuture, renew_all, store_of_shared,
};
use crate::stores::memory::MemoryStore;
use crate::sync::lock;

/// Duration of an outage of the store, in leases: long enough for another worker to take over.
const DOWN_FOR_LEASES: u32 = 2;

/// Duration of an effect in a task that the handler has spawned.
const SPAWNED: Duration = Duration::from_millis(100);
/// Delay by which one of two concurrent steps, for example a renewal and its handler, comes after the other step
/// regardless of the seed.
pub(super) const SLOWER: Duration = Duration::from_millis(1);

/// A simulated worker process, to which the message is delivered.
///
/// Build your handler's surroundings from a worker: its [`store`](Worker::store), and fakes whose effects are counted
/// ([`effect`](Worker::effect)). Once a worker is killed, its store calls and its effects no longer happen. A clone is
/// a handle to the same worker.
#[derive(Clone)]
pub struct Worker(Arc<Process>);

struct Process {
    number: u32,
    world: Arc<World>,
    memory: MemoryStore,
    health: Mutex<Health>,
    /// Wakes the tasks that wait for a change of `health`.
    changed: Notify,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Running,
    Stopped,
    Dead,
}

impl Worker {
    /// Returns the worker's handle to the store of the scenario. All workers share the store. The handle has a
    /// [sender](Self::sender).
    pub fn store(&self) -> SimulatedStore {
        let this = |it: &std::sync::Weak<WorkerInner>| WorkerInner { this: it.clone(), worker: self.clone() };
        SimulatedStore(Arc::new_cyclic(this))
    }

    /// Returns the sender of the worker's store, which sends the messages that handlers push to their
    /// [outbox](crate::Attempt::outbox). Use it for a handler that publishes without the outbox. Its broker counts
    /// messages by their ids, and a message with a known id does not count again.
    pub fn sender(&self) -> SimulatedSender {
        SimulatedSender(WeakWorker(Arc::downgrade(&self.0)))
    }

    /// Returns the clock of the scenario. `tokio::time` shows the same time.
    pub fn clock(&self) -> SimulatedClock {
        self.0.world.clock.clone()
    }

    /// Returns the number of the worker, from 1. Faults hit only worker 1.
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// Creates an effect outside of the process, such as a charge or a mail. The effect happens when the returned value
    /// is awaited. The name identifies the effect (`"charge order 42"`): in every scenario the effect must happen as
    /// often as in the plain run.
    ///
    /// The returned future is pending before and after the effect happens, so the handler can be cut at both points.
    /// The output is true if the effect happened now, and false if its [`key`](Effect::key) was used before.
    pub fn effect(&self, name: impl Into<String>) -> Effect {
        Effect { worker: self.clone(), name: name.into(), key: None, expires_after: None, under_way: None }
    }

    /// Asks the simulated outside world whether the effect with this name has happened. A request for the effect may be
    /// on its way: then the answer is false, and the effect happens later.
    ///
    /// # Errors
    /// [`NoAnswer`] in scenarios in which this answer gets lost.
    pub async fn happened(&self, name: &str) -> Result<bool, NoAnswer> {
        let world = &self.0.world;
        let question = format!("whether `{name}` happened");
        let cut = world.count(self, Point::Effect, |state| &mut state.effect_calls, &*question);
        self.travel(|| format!("before the question {question}")).await;
        let happened = lock(&world.state).effects.iter().any(|effect| effect.name == name);
        let answer = if happened { "has happened" } else { "has not happened" };
        world.narrate(&format!("worker {} asks about effect `{name}`, which {answer}", self.number()));
        if world.scenario.arrives_after_question() {
            world.arrive(|late| late.message.is_none() && late.name == name);
        }
        self.travel(|| format!("after the question {question}")).await;
        match cut {
            Some(Cut::RequestLost | Cut::AnswerLost) => {
                world.narrate(&format!("the question {question} gets no answer"));
                Err(NoAnswer(()))
            }
            _ => Ok(happened),
        }
    }

    /// Adds an await at which the handler can be cut. This method is for fakes without an effect, such as a query.
    pub async fn checkpoint(&self) {
        self.travel(|| "at a checkpoint".to_owned()).await;
    }

    /// Returns state that the fakes of all workers share in one scenario, such as the books of a payment provider. Each
    /// type has one value, which the first call with this type creates.
    ///
    /// # Panics
    /// Never, because the value is found by its type.
    pub fn shared<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let mut state = lock(&self.0.world.state);
        let shared = state.shared.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(T::default()));
        Arc::clone(shared).downcast().expect("found by its type")
    }

    /// Adds a line to the story of the scenario.
    pub fn note(&self, line: impl AsRef<str>) {
        self.0.world.narrate(line.as_ref());
    }

    /// Kills the worker: its running work stops, and it releases no lease.
    pub(super) fn die(&self) {
        self.becomes(Health::Dead);
    }

    pub(super) fn stop(&self) {
        self.becomes(Health::Stopped);
    }

    pub(super) fn resume(&self) {
        self.becomes(Health::Running);
    }

    pub(super) fn is_dead(&self) -> bool {
        *lock(&self.0.health) == Health::Dead
    }

    fn becomes(&self, health: Health) {
        *lock(&self.0.health) = health;
        self.0.changed.notify_waiters();
    }

    /// Waits until the worker is running.
    pub(super) async fn running(&self) {
        self.is(Health::Running).await;
    }

    /// Waits until the worker is dead.
    pub(super) async fn dead(&self) {
        self.is(Health::Dead).await;
    }

    async fn is(&self, health: Health) {
        loop {
            let changed = self.0.changed.notified();
            if *lock(&self.0.health) == health {
                return;
            }
            changed.await;
        }
    }

    /// Yields once. `place` describes the point of the run at which the worker then waits, for the story.
    async fn travel(&self, place: impl FnOnce() -> String) {
        let mut place = Some(place);
        poll_fn(|cx| match place.take() {
            Some(place) => {
                lock(&self.0.world.state).place = Some(place());
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            None => Poll::Ready(()),
        })
        .await;
        self.running().await;
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Worker").field(&self.0.number).finish()
    }
}

/// Error of an [`effect`](Worker::effect) whose answer got lost: the effect may or may not have happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoAnswer(());

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no answer: the effect may or may not have happened")
    }
}

impl std::error::Error for NoAnswer {}

/// An effect outside of the process; see [`Worker::effect`].
#[must_use = "it happens when it is awaited"]
pub struct Effect {
    worker: Worker,
    name: String,
    key: Option<String>,
    expires_after: Option<Duration>,
    under_way: Option<EffectFuture>,
}

type EffectFuture = Pin<Box<dyn Future<Output = Result<bool, NoAnswer>> + Send>>;

impl Effect {
    /// Sets the idempotency key of the request to the other service, for example a
    /// [`child_key`](crate::Attempt::child_key). The service does nothing for a key that was used before.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the time after which the other service refuses the request, counted from the moment when the request is
    /// sent (default: the service accepts the request at any time).
    pub fn expires_after(mut self, limit: Duration) -> Self {
        self.expires_after = Some(limit);
        self
    }
}

impl Future for Effect {
    type Output = Result<bool, NoAnswer>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let under_way = this.under_way.get_or_insert_with(|| {
            let (worker, name, key) = (this.worker.clone(), this.name.clone(), this.key.clone());
            let by = worker.0.world.requester();
            let request = EffectRequest { worker, name, key, by, message: None };
            Box::pin(effect(request, this.expires_after))
        });
        under_way.as_mut().poll(cx)
    }
}

impl fmt::Debug for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Effect").field("name", &self.name).field("key", &self.key).finish_non_exhaustive()
    }
}

/// Request for an effect.
#[derive(Clone)]
struct EffectRequest {
    worker: Worker,
    /// Name of the effect, or destination of the message.
    name: String,
    key: Option<String>,
    by: Requester,
    /// Message that is sent to the broker; `None` for an effect of a fake of the handler.
    message: Option<OutgoingMessage>,
}

impl EffectRequest {
    /// Text of the request in the list of all requests.
    fn call(&self) -> String {
        match self.message {
            Some(_) => self.to_string(),
            None => self.name.clone(),
        }
    }
}

impl fmt::Display for EffectRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.message {
            Some(_) => write!(f, "message for `{}`", self.name),
            None => write!(f, "effect `{}`", self.name),
        }
    }
}

/// Sender of a [`Worker`], with a simulated broker that recognises repetitions by the
/// [id](OutgoingMessage::id); see [`Worker::sender`].
#[derive(Clone, Debug)]
pub struct SimulatedSender(WeakWorker);

/// Worker whose store holds this handle.
#[derive(Clone)]
struct WeakWorker(Weak<Process>);

impl fmt::Debug for WeakWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakWorker")
    }
}

impl Sender for SimulatedSender {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let worker = Worker(self.0.0.upgrade().ok_or("the worker of this sender is gone")?);
            let (name, by) = (message.destination().to_owned(), Requester::default());
            let request = EffectRequest { worker, name, key: None, by, message: Some(message.clone()) };
            // Boxed: the request travels, and may stand still.
            Box::pin(effect(request, None)).await?;
            Ok(())
        })
    }
}

async fn effect(request: EffectRequest, expires_after: Option<Duration>) -> Result<bool, NoAnswer> {
    let (worker, subject) = (&request.worker, request.to_string());
    let world = &worker.0.world;
    let cut = world.count(worker, Point::Effect, |state| &mut state.effect_calls, request.call());
    if cut.is_some_and(Cut::stands_still) {
        return stopped_effect(request, expires_after).await;
    }
    worker.travel(|| format!("before {subject}")).await;
    if matches!(cut, Some(Cut::RequestLost)) {
        world.narrate(&format!("the request for {subject} gets lost"));
        return Err(NoAnswer(()));
    }
    if let Some(cut) = cut.filter(|cut| cut.arrives_late()) {
        return late_effect(request, cut, expires_after).await;
    }
    if tokio::task::try_id().is_some() {
        // An effect in a spawned task takes some time. A handler that does not await the task returns before the effect
        // happens, so that the explorer finds this mistake of the handler.
        world.clock.sleep(SPAWNED).await;
        worker.running().await;
    }
    let now = world.happen(&request, false);
    if matches!(cut, Some(Cut::Crash)) {
        world.narrate(&format!("worker {} is killed right after {subject}", worker.number()));
        worker.die();
    }
    worker.travel(|| format!("after {subject}")).await;
    if matches!(cut, Some(Cut::AnswerLost)) {
        world.narrate(&format!("the answer of {subject} gets lost"));
        return Err(NoAnswer(()));
    }
    Ok(now)
}

/// Runs an effect whose request leaves the body before the worker stands still. The effect happens when the worker
/// resumes, even if the body was dropped meanwhile.
async fn stopped_effect(request: EffectRequest, expires_after: Option<Duration>) -> Result<bool, NoAnswer> {
    let (answer, answered) = oneshot::channel();
    let (worker, subject) = (request.worker.clone(), request.to_string());
    let world = &worker.0.world;
    let sent_at = world.clock.now();
    world.clock.spawn(Box::pin(async move {
        let (worker, subject) = (&request.worker, request.to_string());
        worker.running().await;
        let world = &worker.0.world;
        if expires_after.is_some_and(|limit| world.clock.now() >= sent_at.saturating_add(limit)) {
            world.narrate(&format!("the request for {subject} arrives, and is refused: it has expired"));
            return;
        }
        let _ = answer.send(world.happen(&request, true));
    }));
    lock(&world.state).place = Some(format!("while the request for {subject} is on its way"));
    let now = answered.await.map_err(|_| NoAnswer(()))?;
    worker.travel(|| format!("after {subject}")).await;
    Ok(now)
}

/// Runs an effect whose caller gives up or dies while the request is on its way. The request arrives as late as
/// possible: after the effect was repeated or asked for ([`Scenario::arrives_after_question`]), or just before the
/// request expires, or after the last delivery.
async fn late_effect(request: EffectRequest, cut: Cut, expires_after: Option<Duration>) -> Result<bool, NoAnswer> {
    let (worker, subject) = (request.worker.clone(), request.to_string());
    let world = Arc::clone(&worker.0.world);
    lock(&world.state).late = Some(request);
    if let Some(limit) = expires_after {
        let (world, clock) = (Arc::clone(&world), world.clock.clone());
        world.clock.clone().spawn(Box::pin(async move {
            clock.sleep(limit.saturating_sub(SLOWER)).await;
            world.arrive(|_| true);
        }));
    }
    if cut == Cut::CrashLate {
        let number = worker.number();
        world.narrate(&format!("worker {number} is killed while the request for {subject} is on its way"));
        worker.die();
    }
    worker.travel(|| format!("while the request for {subject} is on its way")).await;
    world.narrate(&format!("{subject} gets no answer while its request is on its way"));
    Err(NoAnswer(()))
}

/// Store of a [`Worker`]: a [`MemoryStore`] whose calls take time, and fail where the scenario requires it.
#[derive(Clone, Debug)]
pub struct SimulatedStore(Arc<WorkerInner>);

impl SimulatedStore {}

store_of_shared!(SimulatedStore);

#[derive(Debug)]
struct WorkerInner {
    this: std::sync::Weak<WorkerInner>,
    worker: Worker,
}

impl WorkerInner {
    /// Runs one call: the request travels, takes effect, and its answer travels back.
    fn ask<'a, T: Send + 'a>(
        &'a self,
        what: &'static str,
        answer: impl FnOnce(&'a MemoryStore) -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let worker = &self.worker;
        StoreFuture::new(async move {
            let Process { world, memory, .. } = &*worker.0;
            let cut = world.count(worker, Point::Store, |state| &mut state.store_calls, what);
            if matches!(cut, Some(Cut::Down)) {
                let mut state = lock(&world.state);
                state.down_until = Some(world.clock.now().saturating_add(state.lease * DOWN_FOR_LEASES));
            }
            worker.travel(|| format!("before `{what}` reaches the store")).await;
            let down =
                worker.number() == 1 && lock(&world.state).down_until.is_some_and(|until| world.clock.now() < until);
            if down || matches!(cut, Some(Cut::RequestLost)) {
                if cut.is_some() {
                    world.narrate(&format!("the store can't be reached for `{what}`"));
                }
                return Err(StoreError::new(StoreErrorKind::Unavailable, "the store can't be reached"));
            }
            if what == "renew" && worker.number() == 1 && world.scenario.renews_late() {
                world.clock.sleep(SLOWER).await;
            }
            let answer = answer(memory).await;
            if matches!(cut, Some(Cut::Crash)) {
                world.narrate(&format!("worker {} is killed right after `{what}` took effect", worker.number()));
                worker.die();
            }
            worker.travel(|| format!("after `{what}`, before the store's answer arrives")).await;
            if matches!(cut, Some(Cut::AnswerLost)) {
                world.narrate(&format!("`{what}` is done, and the store's answer gets lost"));
                return Err(StoreError::new(StoreErrorKind::Unconfirmed, "the store's answer got lost"));
            }
            answer
        })
    }
}

impl Store for WorkerInner {
    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("alive while it is borrowed")
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn namespace(&self) -> &'static str {
        ""
    }

    fn response_timeout(&self) -> Duration {
        Duration::ZERO
    }

    fn context(&self) -> &StoreContext {
        self.worker.0.memory.context()
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        self.ask("reserve", move |memory| {
            let world = &self.worker.0.world;
            StoreFuture::new(async move {
                let reservation = memory.reserve(request).await;
                if let Ok(reservation) = &reservation {
                    world.reserved(&self.worker, request, reservation);
                }
                reservation
            })
        })
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        self.ask("begin", move |memory| memory.begin(lease))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::renewed(answer, self.ask("renew", move |memory| StoreFuture::new(renew_all(memory, leases))))
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        self.ask("append", move |memory| {
            StoreFuture::new(async move {
                let verdict = memory.append(lease, journal).await;
                if let Ok(Verdict::Applied) = verdict {
                    self.worker.0.world.journaled(&self.worker, lease, journal);
                }
                verdict
            })
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        self.ask("finish", move |memory| memory.finish(lease, finish))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        self.ask("release", move |memory| memory.release(lease, release))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        self.ask("wait", move |memory| memory.wait(key, attempt, at_most))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        self.ask("inspect", move |memory| memory.inspect(key))
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        self.ask(decision.action.name(), move |memory| memory.decide(decision))
    }

    fn purge(&self, batch: u32) -> StoreFuture<'_, u64> {
        self.ask("purge", move |memory| memory.purge(batch))
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        self.ask("list", move |memory| memory.list(filter))
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        self.ask("ping", move |memory| memory.ping())
    }
}

/// State that all workers of a scenario share.
pub(super) struct World {
    clock: SimulatedClock,
    memory: MemoryStore,
    scenario: Scenario,
    pub(super) state: Mutex<WorldState>,
    taken_over: Notify,
}

#[derive(Default)]
pub(super) struct WorldState {
    pub(super) effects: Vec<PastEffect>,
    pub(super) story: Vec<String>,
    pub(super) problems: Vec<Problem>,
    /// Store calls of the first worker, in order.
    pub(super) store_calls: Vec<String>,
    pub(super) effect_calls: Vec<String>,
    /// Description of the point at which the last poll ended, for the story.
    place: Option<String>,
    /// True if the fault has happened at a call since the last `take_cut`.
    cut: bool,
    pub(super) lease: Duration,
    down_until: Option<Instant>,
    workers: u32,
    deliveries: u32,
    takeovers: u32,
    /// True if a caller with a reconciler has reserved a key, or a step has journaled its beginning.
    pub(super) leaves_doubts: bool,
    /// Attempts that were reserved to ask the reconciler of their handler.
    asking: HashSet<(Key, u32)>,
    /// Number of attempts that have found an effect in doubt: of their operation, or of one of its steps.
    doubts: usize,
    /// Messages that have arrived at the broker, by their ids.
    pub(super) messages: BTreeMap<String, OutgoingMessage>,
    /// Journals in the store. The keys are those of all operations.
    journals: BTreeMap<Key, Vec<JournalEntry>>,
    /// Values of the steps that have ended.
    pub(super) step_values: BTreeMap<String, StoredResult>,
    /// Request for an effect that is on its way, after its caller has given up or died.
    late: Option<EffectRequest>,
    shared: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
}

impl World {
    pub(super) fn new(clock: SimulatedClock, scenario: Scenario, lease: Duration) -> Arc<Self> {
        let memory = MemoryStore::options().clock(clock.clone()).build();
        let state = Mutex::new(WorldState { lease, ..WorldState::default() });
        Arc::new(Self { clock, memory, scenario, state, taken_over: Notify::new() })
    }

    pub(super) fn clock(&self) -> &SimulatedClock {
        &self.clock
    }

    pub(super) fn worker(self: &Arc<Self>) -> Worker {
        let number = {
            let mut state = lock(&self.state);
            state.workers += 1;
            state.workers
        };
        Worker(Arc::new_cyclic(|this| Process {
            number,
            world: Arc::clone(self),
            memory: self.memory.peer().with_sender(SimulatedSender(WeakWorker(Weak::clone(this)))),
            health: Mutex::new(Health::Running),
            changed: Notify::new(),
        }))
    }

    pub(super) fn delivery(&self) -> u32 {
        let mut state = lock(&self.state);
        state.deliveries += 1;
        state.deliveries
    }

    /// Returns the longest lease that a reservation of this scenario has requested, or the lease that the explorer
    /// assumes if that lease is longer.
    pub(super) fn lease(&self) -> Duration {
        lock(&self.state).lease
    }

    pub(super) fn memory(&self) -> &MemoryStore {
        &self.memory
    }

    /// Returns the number of attempts that have found an effect in doubt.
    pub(super) fn doubts(&self) -> usize {
        lock(&self.state).doubts
    }

    /// Returns the keys of all operations.
    pub(super) fn keys(&self) -> Vec<Key> {
        lock(&self.state).journals.keys().cloned().collect()
    }

    /// Returns how often each effect of a step of `operation` has happened.
    pub(super) fn effects_of_step(&self, operation: &Key, step: &str) -> BTreeMap<String, usize> {
        let is_of_step = |by: &Requester| by.step.as_ref().is_some_and(|(key, name)| key == operation && name == step);
        let mut counts = BTreeMap::new();
        for effect in lock(&self.state).effects.iter().filter(|effect| is_of_step(&effect.by)) {
            *counts.entry(effect.name.clone()).or_default() += 1;
        }
        counts
    }

    pub(super) fn takeovers(&self) -> u32 {
        lock(&self.state).takeovers
    }

    /// Waits until a second worker has taken over.
    pub(super) async fn takeover(&self) {
        loop {
            let taken_over = self.taken_over.notified();
            if self.takeovers() > 0 {
                return;
            }
            taken_over.await;
        }
    }

    /// Adds a line to the story of the scenario.
    pub(super) fn narrate(&self, line: &str) {
        let at = self.clock.now().since_origin();
        lock(&self.state).story.push(format!("{:>9.3}s  {line}", at.as_secs_f64()));
    }

    /// Returns the description of the point at which the last poll ended.
    pub(super) fn take_place(&self) -> String {
        lock(&self.state).place.take().unwrap_or_else(|| "at an await of its own".to_owned())
    }

    /// Returns whether the fault has happened at a call since this function was last called.
    pub(super) fn take_cut(&self) -> bool {
        std::mem::take(&mut lock(&self.state).cut)
    }

    /// Counts a call of the first worker. Returns the fault of the scenario, if it happens at this call.
    fn count(
        &self,
        worker: &Worker,
        point: impl FnOnce(usize) -> Point,
        calls: impl FnOnce(&mut WorldState) -> &mut Vec<String>,
        name: impl Into<String>,
    ) -> Option<Cut> {
        if worker.number() != 1 {
            return None;
        }
        let mut state = lock(&self.state);
        let calls = calls(&mut state);
        calls.push(name.into());
        let cut = (self.scenario.point == point(calls.len())).then_some(self.scenario.cut);
        state.cut |= cut.is_some();
        cut
    }

    /// Lets the request that is on its way arrive, if `is_due` is true for it.
    fn arrive(&self, is_due: impl FnOnce(&EffectRequest) -> bool) {
        let late = lock(&self.state).late.take_if(|late| is_due(late));
        if let Some(late) = late {
            self.narrate(&format!("the request for {late}, which was on its way, arrives"));
            self.happen(&late, true);
        }
    }

    /// Lets the request that is on its way arrive after the last delivery.
    pub(super) fn arrive_at_last(&self) {
        self.arrive(|_| true);
    }

    fn happen(&self, request: &EffectRequest, arrived_late: bool) -> bool {
        let EffectRequest { worker, name, key, by: requester, message } = request;
        if let Some(message) = message {
            self.receive(worker, message);
            self.arrive(|late| late.message.as_ref().is_some_and(|late| late.id() == message.id()));
            return true;
        }
        let known = {
            let state = lock(&self.state);
            key.as_ref()
                .and_then(|key| state.effects.iter().find(|effect| effect.key.as_ref() == Some(key)))
                .map(|effect| effect.name.clone())
        };
        let by = match &requester.attempt {
            Some((_, attempt)) => format!("worker {}, attempt {attempt}", worker.number()),
            None => format!("worker {}, outside of a handler", worker.number()),
        };
        let by = requester.step.as_ref().map_or(by.clone(), |(_, step)| format!("{by}, step `{step}`"));
        match known {
            None => self.narrate(&format!("effect `{name}` happens ({by})")),
            Some(first) if first == *name => {
                self.narrate(&format!("effect `{name}` is asked for again; its key is known ({by})"));
                return false;
            }
            Some(other) => {
                self.narrate(&format!("effect `{name}` does not happen: its key was used for `{other}` ({by})"));
                lock(&self.state).problems.push(Problem::KeyShared { effect: name.clone(), other });
                return false;
            }
        }
        let effect = PastEffect { name: name.clone(), key: key.clone(), by: requester.clone(), arrived_late };
        lock(&self.state).effects.push(effect);
        if !self.scenario.arrives_after_question() {
            self.arrive(|late| late.message.is_none() && late.name == request.name);
        }
        true
    }

    /// Lets a message arrive at the broker, which counts messages by their ids.
    fn receive(&self, worker: &Worker, message: &OutgoingMessage) {
        let (id, destination) = (message.id(), message.destination());
        let known = lock(&self.state).messages.insert(id.to_owned(), message.clone());
        let again = if known.is_some() { "arrives again, with its id" } else { "arrives" };
        self.narrate(&format!("message {id} for `{destination}` {again} (worker {})", worker.number()));
        if known.is_some_and(|known| known != *message) {
            lock(&self.state).problems.push(Problem::MessageIdShared { destination: destination.to_owned() });
        }
    }

    /// Returns the part of the handler that is being polled.
    fn requester(&self) -> Requester {
        let (step, attempt) = (polled_step(), current().ok());
        let of_attempt = |attempt: &Attempt| (attempt.key().clone(), attempt.number());
        // A task that the handler has spawned has a step, and no attempt of its own.
        let attempt = attempt.as_ref().or_else(|| step.as_ref().map(Step::attempt)).map(of_attempt);
        let state = lock(&self.state);
        let of_step = step.as_ref().and_then(|step| {
            let journal = state.journals.get(step.attempt().key())?;
            Rerun::of_step(journal, step.name(), step.attempt().number())
        });
        let asked = attempt.as_ref().is_some_and(|it| state.asking.contains(it)) && !reconciliation::is_asked();
        let rerun = of_step.or(asked.then_some(Rerun::NotDone));
        Requester { attempt, step: step.map(|step| (step.attempt().key().clone(), step.name().to_owned())), rerun }
    }

    fn reserved(&self, worker: &Worker, request: &ReserveRequest, reservation: &Reservation) {
        {
            let mut state = lock(&self.state);
            state.lease = state.lease.max(request.lease);
            state.leaves_doubts |= request.max_reconciliations.is_some();
        }
        if let Reservation::Granted { lease, takeover, in_doubt, journal } = reservation {
            let steps = journal.as_ref().and_then(|journal| journal.steps().ok()).unwrap_or_default();
            let with = |wanted| {
                let names: Vec<_> = steps.iter().filter(|it| it.state() == wanted).map(JournaledStep::name).collect();
                (!names.is_empty()).then(|| named(&names))
            };
            let (ended, doubted) = (with(StepState::Ended), with(StepState::InDoubt));
            let how = if *takeover { "takes over" } else { "reserves" };
            let after = ended.map_or_else(String::new, |steps| format!(", after {steps}"));
            let doubts = doubted.as_ref().map_or_else(String::new, |steps| format!(", with {steps} in doubt"));
            let asks = if *in_doubt { ", and asks its reconciler" } else { "" };
            let Lease { key, attempt, .. } = lease;
            self.narrate(&format!("worker {} {how} {key} as attempt {attempt}{after}{doubts}{asks}", worker.number()));
            {
                let mut state = lock(&self.state);
                let entries = journal.as_ref().and_then(|journal| journal.entries().ok()).unwrap_or_default();
                state.journals.insert(key.clone(), entries);
                state.doubts += usize::from(*in_doubt || doubted.is_some());
                if *in_doubt {
                    state.asking.insert((key.clone(), *attempt));
                }
            }
            if *takeover {
                lock(&self.state).takeovers += 1;
                if self.scenario.cut == Cut::Overtake && worker.number() == 2 {
                    self.narrate("worker 2 is killed as soon as it has taken over");
                    worker.die();
                }
                self.taken_over.notify_waiters();
            }
        }
    }

    /// Records that the store has the journal of `lease`.
    fn journaled(&self, worker: &Worker, lease: &Lease, journal: &Journal) {
        let entries = journal.entries().unwrap_or_default();
        let new = {
            let mut state = lock(&self.state);
            let known = state.journals.entry(lease.key.clone()).or_default();
            // A write that was repeated brings nothing new.
            let new = entries.get(known.len()..).unwrap_or_default().to_vec();
            known.extend(new.iter().cloned());
            for JournalEntry { name, progress, .. } in &new {
                match progress {
                    StepProgress::Ended(value) => drop(state.step_values.insert(name.to_string(), value.clone())),
                    StepProgress::Begun => state.leaves_doubts = true,
                    StepProgress::Undone => {}
                }
            }
            new
        };
        let by = format!("(worker {}, attempt {})", worker.number(), lease.attempt);
        let with = |is: fn(&StepProgress) -> bool| {
            let names: Vec<_> = new.iter().filter(|entry| is(&entry.progress)).map(|entry| &*entry.name).collect();
            (!names.is_empty()).then(|| named(&names))
        };
        if let Some(steps) = with(|it| matches!(it, StepProgress::Ended(_))) {
            self.narrate(&format!("{steps} is journaled {by}"));
        }
        if let Some(steps) = with(|it| matches!(it, StepProgress::Begun)) {
            self.narrate(&format!("the beginning of {steps} is journaled {by}"));
        }
        if let Some(steps) = with(|it| matches!(it, StepProgress::Undone)) {
            self.narrate(&format!("{steps} is journaled as undone {by}"));
        }
    }
}

/// Returns the names of steps, for the story.
fn named(steps: &[&str]) -> String {
    let names: Vec<_> = steps.iter().map(|step| format!("`{step}`")).collect();
    format!("step {}", names.join(", "))
}
