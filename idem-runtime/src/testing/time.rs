//! Simulated time: a clock that the simulation moves, even while a task blocks.
#![allow(clippy::disallowed_methods, reason = "simulated time is made of tokio's")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::tasks::Tasks;
use crate::clock::{Clock, Instant, Sleep, SplitMix, Task};
use crate::engine::{CurrentGuard, InsideStep, Observation};
use crate::sync::lock;

thread_local! {
    /// Tasks of the simulation that runs on this thread.
    static RUNNING: RefCell<Option<Rc<Tasks>>> = const { RefCell::new(None) };
}

/// Clock of a [`Simulation`](crate::testing::Simulation). The time of the clock advances only while no task can go on.
///
/// The clock shows the time of the simulation's tokio runtime, so `tokio::time` in a handler shows the same time.
#[derive(Clone)]
pub struct SimulatedClock(Arc<Time>);

struct Time {
    runtime: tokio::runtime::Handle,
    origin: tokio::time::Instant,
    state: Mutex<TimeState>,
}

struct TimeState {
    random: SplitMix,
    /// Sleeping tasks, by wake-up time and by the order in which they fell asleep.
    sleepers: BTreeMap<(Instant, u64), Waker>,
    fell_asleep: u64,
    /// Tasks that were spawned since the simulation last took them.
    spawned: Vec<Task>,
    /// Waker of the simulation, for a task that falls asleep or is spawned.
    simulation: Option<Waker>,
}

impl SimulatedClock {
    /// Creates the clock of a runtime with paused time.
    pub(super) fn new(runtime: &tokio::runtime::Handle, seed: u64) -> Self {
        let _entered = runtime.enter();
        let state = TimeState {
            random: SplitMix(seed),
            sleepers: BTreeMap::new(),
            fell_asleep: 0,
            spawned: Vec::new(),
            simulation: None,
        };
        Self(Arc::new(Time { runtime: runtime.clone(), origin: tokio::time::Instant::now(), state: Mutex::new(state) }))
    }

    /// Moves time by `duration` in one jump, as if the process had been suspended: every timer that is due in between
    /// fires late.
    ///
    /// To let time pass normally, await [`sleep`](Clock::sleep).
    pub fn advance(&self, duration: Duration) {
        let _entered = self.0.runtime.enter();
        // The first poll moves the time. A second poll would only yield to other tasks, so this function polls once.
        let jump = pin!(tokio::time::advance(duration));
        let _ = jump.poll(&mut Context::from_waker(Waker::noop()));
    }

    /// Blocks the thread of the calling task for `duration`, like `std::thread::sleep`. Meanwhile the other tasks of
    /// the simulation and the library's own tasks go on, as if they ran on other threads.
    ///
    /// Tasks of `tokio::spawn`, sleeps of `tokio::time` and yields of `tokio::task::yield_now` wait, because the
    /// blocked thread runs their runtime. Outside of [`Simulation::run`](crate::testing::Simulation::run), time jumps
    /// as in [`advance`](SimulatedClock::advance).
    pub fn block(&self, duration: Duration) {
        let Some(tasks) = RUNNING.with_borrow(Clone::clone) else { return self.advance(duration) };
        // Tasks that are polled during the block must not see the attempt, the step or the delivery of the blocking
        // task as their own.
        let (mut nowhere, mut nobody) = (None, None);
        let _entered = CurrentGuard::enter(&mut nowhere);
        let _step = InsideStep::enter(None);
        let _observation = Observation::enter(&mut nobody);
        let until = self.now().saturating_add(duration);
        loop {
            self.wake_sleepers();
            tasks.adopt(self.take_spawned());
            if tasks.poll_another() {
                continue;
            }
            let now = self.now();
            if now >= until || tasks.is_exhausted() {
                return;
            }
            let next = self.next_wake().map_or(until, |next| next.min(until));
            self.advance(next.saturating_since(now));
        }
    }

    /// Sets the tasks of the simulation that runs on this thread, until the returned guard is dropped.
    pub(super) fn running(tasks: &Rc<Tasks>) -> RunningTasks {
        RunningTasks(RUNNING.replace(Some(Rc::clone(tasks))))
    }

    /// Wakes the sleeping tasks that are due.
    pub(super) fn wake_sleepers(&self) {
        let now = self.now();
        loop {
            let due = {
                let mut state = lock(&self.0.state);
                match state.sleepers.first_entry() {
                    Some(first) if first.key().0 <= now => first.remove(),
                    _ => return,
                }
            };
            due.wake();
        }
    }

    /// Returns the time at which the next sleeper wakes.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        lock(&self.0.state).sleepers.first_key_value().map(|((at, _), _)| *at)
    }

    /// Returns the tasks that were spawned since the last call.
    pub(super) fn take_spawned(&self) -> Vec<Task> {
        std::mem::take(&mut lock(&self.0.state).spawned)
    }

    /// Sets the waker of the simulation, for tasks that fall asleep or are spawned.
    pub(super) fn wakes(&self, simulation: Option<&Waker>) {
        let earlier = std::mem::replace(&mut lock(&self.0.state).simulation, simulation.cloned());
        drop(earlier);
    }

    /// Converts an instant of this clock to an instant of the runtime.
    pub(super) fn of_the_runtime(&self, at: Instant) -> tokio::time::Instant {
        self.0.origin + at.since_origin()
    }

    fn wake_simulation(&self) {
        let simulation = lock(&self.0.state).simulation.clone();
        if let Some(simulation) = simulation {
            simulation.wake();
        }
    }
}

impl fmt::Debug for SimulatedClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimulatedClock").field(&self.now()).finish()
    }
}

impl Clock for SimulatedClock {
    fn now(&self) -> Instant {
        let _entered = self.0.runtime.enter();
        Instant::new(self.0.origin.elapsed())
    }

    fn wall(&self) -> Duration {
        self.now().since_origin()
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        Box::pin(Sleeper { clock: self.clone(), until: self.now().saturating_add(duration), asleep: None })
    }

    fn entropy(&self) -> u128 {
        let random = &mut lock(&self.0.state).random;
        (u128::from(random.next()) << 64) | u128::from(random.next())
    }

    fn spawn(&self, task: Task) {
        lock(&self.0.state).spawned.push(task);
        self.wake_simulation();
    }
}

struct Sleeper {
    clock: SimulatedClock,
    until: Instant,
    asleep: Option<u64>,
}

impl Future for Sleeper {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.clock.now() >= self.until {
            return Poll::Ready(());
        }
        let this = &mut *self;
        let waker = cx.waker().clone();
        let earlier = {
            let mut state = lock(&this.clock.0.state);
            let number = *this.asleep.get_or_insert_with(|| {
                state.fell_asleep += 1;
                state.fell_asleep
            });
            state.sleepers.insert((this.until, number), waker)
        };
        // Dropped outside of the lock, because dropping the last waker of a task drops the task.
        if earlier.is_none() {
            this.clock.wake_simulation();
        }
        Poll::Pending
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let Some(number) = self.asleep else { return };
        let waker = lock(&self.clock.0.state).sleepers.remove(&(self.until, number));
        drop(waker);
    }
}

/// Guard that restores the tasks that [`SimulatedClock::running`] replaced.
pub(super) struct RunningTasks(Option<Rc<Tasks>>);

impl Drop for RunningTasks {
    fn drop(&mut self) {
        RUNNING.set(self.0.take());
    }
}
