//! Simulation of many tasks on one thread, in an order that a seed decides, on simulated time.
#![allow(clippy::disallowed_methods, reason = "simulated time is made of tokio's")]

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::runtime::Runtime;

use super::random::Random;
use super::tasks::{Slot, Tasks};
use super::time::SimulatedClock;
use crate::clock::{Clock, Instant, SplitMix};

/// Default simulated time that a run may take.
const TIME_LIMIT: Duration = Duration::from_secs(24 * 3600);
/// Default number of polls that a run may make.
const POLL_LIMIT: u64 = 10_000_000;

/// Many tasks on one thread, in an order that a seed decides, on simulated time.
///
/// The simulation picks the next task at random from the tasks that can go on. While no task can go on, time jumps to
/// the next moment at which a sleep ends, so an hour takes no real time. No choice depends on the machine, so two runs
/// with the same seed are identical.
///
/// The simulation also runs the library's own tasks (heartbeats, late writes), and supports `tokio::spawn` and
/// `tokio::time` in a handler. A handler must not use real input and output, because simulated time does not wait for
/// it.
///
/// ```
/// use std::time::Duration;
///
/// use idem_runtime::testing::Simulation;
/// use idem_runtime::{Error, MemoryStore, idempotent, observe};
/// use idem_runtime::clock::Clock;
///
/// #[idempotent(key = "order:{order_id}", ttl = "7d", store = store, in_progress = wait("1m"))]
/// async fn ship(store: &MemoryStore, order_id: u64) -> Result<String, Error> {
///     tokio::time::sleep(Duration::from_secs(40)).await;
///     Ok(format!("parcel for order {order_id}"))
/// }
///
/// let simulation = Simulation::new(7);
/// let store = MemoryStore::options().clock(simulation.clock()).build();
/// let call = |store: MemoryStore| async move { observe(ship(&store, 42)).await.1 };
/// simulation.run(async {
///     // One worker is dropped at the first await of its handler. Two other workers follow.
///     let killed = simulation.spawn_killed_at(1, call(store.clone()));
///     assert!(killed.await.is_err());
///     let tasks = [simulation.spawn(call(store.clone())), simulation.spawn(call(store.clone()))];
///     let mut executed = 0;
///     for task in tasks {
///         executed += u32::from(task.await.unwrap().executed());
///     }
///     assert_eq!(executed, 1);
///     assert!(simulation.clock().now().since_origin() >= Duration::from_secs(40));
/// });
/// ```
///
/// A simulation has its own tokio runtime, so use it in a plain `#[test]`, not in a `#[tokio::test]`.
pub struct Simulation {
    // Declared before the runtime, so that the remaining tasks are dropped before the runtime.
    tasks: Rc<Tasks>,
    runtime: Option<Runtime>,
    clock: SimulatedClock,
    seed: u64,
    time_limit: Cell<Duration>,
    poll_limit: Cell<u64>,
}

impl Simulation {
    /// Creates a simulation. `seed` decides the order of its tasks and the entropy of its clock.
    ///
    /// # Panics
    /// If no runtime can be built.
    pub fn new(seed: u64) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            // The runtime runs one spawned task at a time, so that tasks of the simulation can run in between.
            .event_interval(1)
            .build()
            .expect("a runtime can be built");
        let mut seeds = SplitMix(seed);
        let clock = SimulatedClock::new(runtime.handle(), seeds.next());
        let random = RefCell::new(Random(SplitMix(seeds.next())));
        let tasks = Tasks {
            random,
            slots: RefCell::default(),
            next: Cell::new(0),
            left: Cell::new(POLL_LIMIT),
            woken: Arc::default(),
        };
        Self {
            tasks: Rc::new(tasks),
            runtime: Some(runtime),
            clock,
            seed,
            time_limit: Cell::new(TIME_LIMIT),
            poll_limit: Cell::new(POLL_LIMIT),
        }
    }

    /// Sets the simulated time after which a run is stopped as stuck (default: 1 d). This limit detects a task that
    /// waits for an event that never comes.
    pub fn limit_time(&self, limit: Duration) {
        self.time_limit.set(limit);
    }

    /// Sets the number of polls after which a run is stopped as stuck (default: 10 000 000).
    pub fn limit_polls(&self, limit: u64) {
        self.poll_limit.set(limit);
    }

    /// Returns the clock of the simulation, for stores.
    pub fn clock(&self) -> SimulatedClock {
        self.clock.clone()
    }

    /// Returns the seed of the simulation.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns a random number below `limit`. The seed of the simulation decides this number, as it decides the order
    /// of tasks.
    pub fn random(&self, limit: u64) -> u64 {
        self.tasks.random.borrow_mut().below(limit)
    }

    /// Runs `future` and all spawned tasks until `future` is ready. Tasks that still run at that time are dropped.
    ///
    /// # Panics
    /// If the run is [`SimulationStuck`], if a task panics, or if `run` is called inside of another runtime.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        self.try_run(future).unwrap_or_else(|stuck| panic!("{stuck}"))
    }

    /// Runs like [`run`](Simulation::run), but returns an error if the run is stuck.
    ///
    /// # Errors
    /// [`SimulationStuck`] if `future` does not become ready.
    ///
    /// # Panics
    /// If a task panics, or if `try_run` is called inside of another runtime.
    pub fn try_run<F: Future>(&self, future: F) -> Result<F::Output, SimulationStuck> {
        let runtime = self.runtime.as_ref().expect("present until it is dropped");
        let Self { tasks, clock, .. } = self;
        tasks.left.set(self.poll_limit.get());
        let _running = SimulatedClock::running(tasks);
        let ran = runtime.block_on(async {
            let mut future = pin!(future);
            let limit = clock.now().saturating_add(self.time_limit.get());
            // Simulated time of the next jump, and the timer that makes the runtime jump to that time.
            let mut due: Option<(Instant, Pin<Box<tokio::time::Sleep>>)> = None;
            let main = tasks.new_waker();
            main.wake_by_ref();
            poll_fn(|cx| {
                // Wakers and clock must hold the waker of the scheduler before any task is polled.
                tasks.polled_by(cx.waker());
                clock.wakes(Some(cx.waker()));
                clock.wake_sleepers();
                tasks.adopt(clock.take_spawned());
                if clock.now() >= limit || tasks.is_exhausted() {
                    return Poll::Ready(Err(self.stuck(tasks.is_exhausted())));
                }
                // No task of the simulation was picked: the runtime runs its own tasks, or time jumps.
                let Some(id) = tasks.draw() else {
                    let next = clock.next_wake().map_or(limit, |next| next.min(limit));
                    if due.as_ref().is_none_or(|(at, _)| *at != next) {
                        due = Some((next, Box::pin(tokio::time::sleep_until(clock.of_the_runtime(next)))));
                    }
                    if due.as_mut().is_some_and(|(_, due)| due.as_mut().poll(cx).is_ready()) {
                        due = None;
                        cx.waker().wake_by_ref();
                    }
                    tasks.go_on(cx.waker());
                    return Poll::Pending;
                };
                tasks.left.set(tasks.left.get() - 1);
                if id == main.id {
                    let waker = Waker::from(Arc::clone(&main));
                    if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                        return Poll::Ready(Ok(output));
                    }
                } else {
                    tasks.poll(id, false);
                }
                // The scheduler runs again, because time advances only while no task can go on.
                cx.waker().wake_by_ref();
                Poll::Pending
            })
            .await
        });
        let _entered = runtime.enter();
        clock.wakes(None);
        tasks.clear(|| clock.take_spawned());
        ran
    }

    /// Runs `future` concurrently with all other tasks.
    pub fn spawn<F: Future + 'static>(&self, future: F) -> Task<F::Output> {
        self.spawn_killed_at(u64::MAX, future)
    }

    /// Runs like [`spawn`](Simulation::spawn), but drops `future` at its `awaits`-th await: after that number of polls,
    /// if it is still pending. If `awaits` is 0, the future is never polled.
    pub fn spawn_killed_at<F: Future + 'static>(&self, awaits: u64, future: F) -> Task<F::Output> {
        let state = Rc::new(TaskState { output: Cell::new(None), waiter: Cell::new(None) });
        let waker = self.tasks.new_waker();
        let finished = Rc::clone(&state);
        let future = Box::pin(async move {
            let output = future.await;
            finished.end(Ok(output));
        });
        let ended = Rc::clone(&state);
        let slot = Slot {
            future: Some(future),
            waker: Arc::clone(&waker),
            polls: Rc::new(Cell::new(0)),
            kill_at: Cell::new(awaits),
            killed: Rc::new(move || ended.end(Err(KilledTask(())))),
        };
        let polls = Rc::clone(&slot.polls);
        self.tasks.slots.borrow_mut().insert(waker.id, slot);
        waker.wake_by_ref();
        Task { id: waker.id, tasks: Rc::clone(&self.tasks), state, polls }
    }

    fn stuck(&self, spinning: bool) -> SimulationStuck {
        let after = self.clock.now().since_origin();
        SimulationStuck { seed: self.seed, after, spinning, tasks: self.tasks.slots.borrow().len() }
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        let runtime = self.runtime.take();
        let _entered = runtime.as_ref().map(Runtime::enter);
        self.clock.wakes(None);
        self.tasks.clear(|| self.clock.take_spawned());
    }
}

impl fmt::Debug for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation").field("seed", &self.seed).finish_non_exhaustive()
    }
}

/// Error of a run that did not end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SimulationStuck {
    seed: u64,
    after: Duration,
    spinning: bool,
    tasks: usize,
}

impl SimulationStuck {
    /// Returns true if tasks were polled endlessly, and false if all tasks waited for an event that never came.
    pub fn is_spinning(&self) -> bool {
        self.spinning
    }

    /// Returns the simulated time at which the run was stopped.
    pub fn after(&self) -> Duration {
        self.after
    }
}

impl fmt::Display for SimulationStuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, after, spinning, tasks } = self;
        let what = if *spinning { "polled endlessly" } else { "waiting endlessly" };
        write!(
            f,
            "the simulation with seed {seed} gave up after {after:?} of simulated time: {what} (tasks left: {tasks})"
        )
    }
}

impl std::error::Error for SimulationStuck {}

/// Error of a task that was killed before it was ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KilledTask(());

impl fmt::Display for KilledTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the task was killed")
    }
}

impl std::error::Error for KilledTask {}

/// Handle of a task in a [`Simulation`]. Awaiting the handle returns the output of the task's future. Dropping the
/// handle does not end the task.
pub struct Task<T> {
    id: u64,
    tasks: Rc<Tasks>,
    state: Rc<TaskState<T>>,
    polls: Rc<Cell<u64>>,
}

impl<T> Task<T> {
    /// Drops the task's future immediately. A task that kills itself is dropped when it is next pending. A task that
    /// has ended is not affected.
    pub fn kill(&self) {
        self.tasks.kill(self.id);
    }

    /// Returns the number of polls of the task. Each poll left the task pending at an await, except the last poll of a
    /// task that has ended.
    pub fn polls(&self) -> u64 {
        self.polls.get()
    }

    /// Returns whether the task has ended or was killed.
    pub fn is_finished(&self) -> bool {
        !self.tasks.slots.borrow().contains_key(&self.id)
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T, KilledTask>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(output) = self.state.output.take() {
            return Poll::Ready(output);
        }
        self.state.waiter.set(Some(cx.waker().clone()));
        Poll::Pending
    }
}

impl<T> fmt::Debug for Task<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("id", &self.id).field("polls", &self.polls()).finish_non_exhaustive()
    }
}

struct TaskState<T> {
    output: Cell<Option<Result<T, KilledTask>>>,
    waiter: Cell<Option<Waker>>,
}

impl<T> TaskState<T> {
    fn end(&self, output: Result<T, KilledTask>) {
        self.output.set(Some(output));
        if let Some(waiter) = self.waiter.take() {
            waiter.wake();
        }
    }
}
