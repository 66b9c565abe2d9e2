//! Locks, atomics and tasks whose order a scheduler of the crate `shuttle` decides, and helpers for tests with them.

use std::collections::{HashMap, HashSet};
use std::ops::DerefMut;
use std::pin::{Pin, pin};
use std::sync::{Arc, LazyLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use shuttle::future::AbortHandle;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};
use shuttle::{Config, Runner};
use tokio::sync::Notify;

use crate::clock::{Clock, Instant, ManualClock, Sleep, Task};

/// Locks a mutex of `shuttle` or of `std`. Only data that a test of interleavings shares has a mutex of `shuttle`.
pub(crate) fn lock<M: Lock + ?Sized>(mutex: &M) -> M::Guard<'_> {
    mutex.guard()
}

pub(crate) trait Lock {
    type Guard<'a>: DerefMut
    where
        Self: 'a;

    fn guard(&self) -> Self::Guard<'_>;
}

impl<T: ?Sized> Lock for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn guard(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Lock for std::sync::Mutex<T> {
    type Guard<'a>
        = std::sync::MutexGuard<'a, T>
    where
        T: 'a;

    fn guard(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Lock + ?Sized> Lock for Arc<M> {
    type Guard<'a>
        = M::Guard<'a>
    where
        M: 'a;

    fn guard(&self) -> Self::Guard<'_> {
        (**self).guard()
    }
}

impl<M: Lock> Lock for LazyLock<M> {
    type Guard<'a>
        = M::Guard<'a>
    where
        M: 'a;

    fn guard(&self) -> Self::Guard<'_> {
        (**self).guard()
    }
}

/// Runs `test` in many orders of the steps of its threads and tasks. Half of the orders are random. The other half have
/// few switches between threads; they find faults that occur only if one thread runs for long in the middle of another
/// thread's work.
///
/// `IDEM_INTERLEAVINGS` sets the number of orders (default: 1000). A failure prints its schedule, and
/// [`shuttle::replay`] repeats the run with that schedule.
pub(crate) fn explore(test: impl Fn() + Send + Sync + 'static) {
    let count = std::env::var("IDEM_INTERLEAVINGS").map_or(1000, |count| count.parse().expect("a number"));
    let seed = std::env::var("IDEM_INTERLEAVINGS_SEED").map_or(0x1de4, |seed| seed.parse().expect("a number"));
    let mut config = Config::new();
    // The warnings concern memory orderings: the model is sequentially consistent, regardless of the ordering in the
    // code.
    config.silence_warnings = true;
    config.stack_size = 1 << 18;
    let test = Arc::new(test);
    for depth in [None, Some(2), Some(4)] {
        let test = Arc::clone(&test);
        match depth {
            None => Runner::new(RandomScheduler::new_from_seed(seed, count / 2), config.clone()).run(move || test()),
            Some(depth) => {
                let scheduler = PctScheduler::new_from_seed(seed, depth, count / 4);
                Runner::new(scheduler, config.clone()).run(move || test())
            }
        };
    }
}

/// Joins the threads. Panics if one of them has panicked.
pub(crate) fn join_all(threads: impl IntoIterator<Item = shuttle::thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("no panic");
    }
}

/// Tasks that run until they end or [`end`](Tasks::end) drops them, and the number of tasks that are woken or being
/// polled.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tasks(Arc<TasksInner>);

#[derive(Debug, Default)]
struct TasksInner {
    // A mutex of `std`: the scheduler must not switch threads while this lock is held.
    state: std::sync::Mutex<SchedulerState>,
    idle: Notify,
}

#[derive(Debug, Default)]
struct SchedulerState {
    ended: bool,
    started: usize,
    alive: HashMap<usize, Option<AbortHandle>>,
    /// Numbers of the tasks that were aborted and that the scheduler has not dropped yet.
    doomed: HashSet<usize>,
    /// Number of tasks that are woken or being polled.
    busy: usize,
}

impl Tasks {
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let (number, ended) = {
            let mut state = lock(&self.0.state);
            state.started += 1;
            state.busy += 1;
            let number = state.started;
            state.alive.insert(number, None);
            (number, state.ended)
        };
        let pulse = Pulse { tasks: self.clone(), rhythm: std::sync::Mutex::default() };
        let counted = CountedTask { task: Some(Box::pin(task)), pulse: Arc::new(pulse), number };
        if ended {
            return;
        }
        let handle = shuttle::future::spawn(counted).abort_handle();
        let mut state = lock(&self.0.state);
        if let Some(alive) = state.alive.get_mut(&number) {
            *alive = Some(handle.clone());
            if state.ended {
                drop(state);
                handle.abort();
            }
        }
    }

    /// Returns the number of tasks that have not ended.
    pub(crate) fn alive(&self) -> usize {
        lock(&self.0.state).alive.len()
    }

    /// Drops all tasks, and all tasks that are started later, like a runtime that shuts down.
    pub(crate) fn end(&self) {
        lock(&self.0.state).ended = true;
        self.drop_up_to(usize::MAX);
    }

    /// Drops the oldest task, like a runtime that shuts down and is replaced by another runtime.
    pub(crate) fn drop_first(&self) {
        self.drop_up_to(1);
    }

    fn drop_up_to(&self, last: usize) {
        let doomed: Vec<_> = {
            let mut state = lock(&self.0.state);
            let alive = state.alive.iter().filter(|(number, _)| **number <= last);
            let known = alive.filter_map(|(number, handle)| Some((*number, handle.clone()?)));
            let (numbers, handles): (Vec<_>, Vec<_>) = known.unzip();
            state.doomed.extend(numbers);
            handles
        };
        doomed.iter().for_each(AbortHandle::abort);
    }

    /// Waits until every task has ended or waits for a wake-up.
    pub(crate) async fn idle(&self) {
        loop {
            let mut idle = pin!(self.0.idle.notified());
            idle.as_mut().enable();
            {
                let state = lock(&self.0.state);
                if state.busy == 0 && state.doomed.is_empty() {
                    return;
                }
            }
            idle.await;
        }
    }

    fn rests(&self) {
        lock(&self.0.state).busy -= 1;
        self.0.idle.notify_waiters();
    }
}

/// A task whose wake-ups and polls are counted.
struct CountedTask {
    task: Option<Task>,
    pulse: Arc<Pulse>,
    number: usize,
}

impl Future for CountedTask {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let before = std::mem::replace(&mut *lock(&this.pulse.rhythm), Rhythm::Polled(cx.waker().clone()));
        if let Rhythm::Resting(_) = before {
            // No wake-up preceded this poll: the scheduler can poll a task without a wake-up.
            lock(&this.pulse.tasks.0.state).busy += 1;
        }
        let polled = match &mut this.task {
            Some(task) => task.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(&this.pulse)))),
            None => Poll::Ready(()),
        };
        if polled.is_pending() {
            let mut rhythm = lock(&this.pulse.rhythm);
            if let Rhythm::Polled(waker) = &*rhythm {
                *rhythm = Rhythm::Resting(waker.clone());
                drop(rhythm);
                this.pulse.tasks.rests();
            }
        }
        polled
    }
}

impl Drop for CountedTask {
    fn drop(&mut self) {
        self.task = None;
        let inner = &self.pulse.tasks.0;
        let rested = matches!(std::mem::replace(&mut *lock(&self.pulse.rhythm), Rhythm::Over), Rhythm::Resting(_));
        {
            let mut state = lock(&inner.state);
            state.alive.remove(&self.number);
            state.doomed.remove(&self.number);
            state.busy -= usize::from(!rested);
        }
        inner.idle.notify_waiters();
    }
}

/// Wakes a task, and records its wake-up.
struct Pulse {
    tasks: Tasks,
    rhythm: std::sync::Mutex<Rhythm>,
}

#[derive(Default)]
enum Rhythm {
    /// The task is waiting to be polled.
    #[default]
    Woken,
    Polled(Waker),
    Resting(Waker),
    Over,
}

impl Wake for Pulse {
    fn wake(self: Arc<Self>) {
        let mut rhythm = lock(&self.rhythm);
        let (waker, rested) = match &*rhythm {
            Rhythm::Polled(waker) => (waker.clone(), false),
            Rhythm::Resting(waker) => (waker.clone(), true),
            Rhythm::Woken | Rhythm::Over => return,
        };
        *rhythm = Rhythm::Woken;
        drop(rhythm);
        if rested {
            lock(&self.tasks.0.state).busy += 1;
        }
        waker.wake();
    }
}

/// Stand-in for the runtime that runs the lanes of a store as tasks: each call of `current` makes a new runtime.
#[derive(Clone, Debug, Default)]
#[cfg(any(feature = "mysql", feature = "postgres", feature = "redis"))]
pub(crate) struct Handle(pub(crate) Tasks);

#[cfg(any(feature = "mysql", feature = "postgres", feature = "redis"))]
impl Handle {
    pub(crate) fn current() -> Self {
        Self::default()
    }

    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn try_current() -> Result<Self, std::convert::Infallible> {
        Ok(Self::current())
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(task);
    }
}

/// A clock that stands still until a test moves it. The scheduler interleaves its tasks with all other tasks.
#[derive(Clone, Debug, Default)]
pub(crate) struct TestClock {
    time: ManualClock,
    pub(crate) tasks: Tasks,
}

impl TestClock {
    pub(crate) fn advance(&self, duration: Duration) {
        self.time.advance(duration);
    }

    /// Moves time by `duration`, from one sleeper to the next, and waits after each step until all tasks wait. Calls
    /// `seen` with the length of each step before the step.
    pub(crate) async fn pass(&self, duration: Duration, seen: impl Fn(Duration)) {
        let end = self.now().saturating_add(duration);
        loop {
            self.tasks.idle().await;
            let left = end.saturating_since(self.now());
            if left.is_zero() {
                return;
            }
            let step = self.time.next_wake().unwrap_or(left).clamp(Duration::from_nanos(1), left);
            seen(step);
            self.advance(step);
        }
    }
}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        self.time.now()
    }

    fn wall(&self) -> Duration {
        self.time.wall()
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        self.time.sleep(duration)
    }

    fn entropy(&self) -> u128 {
        self.time.entropy()
    }

    fn spawn(&self, task: Task) {
        self.tasks.spawn(task);
    }
}
