//! The only reader of time and the only source of randomness.
#![allow(clippy::disallowed_methods)]

use std::cell::Cell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

/// A point on a [`Clock`]: the time since an origin that only this clock knows.
///
/// Instants of two clocks, and so of two machines, can't be compared; only durations travel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Instant(Duration);

impl Instant {
    /// The point `since_origin` after the clock's origin.
    pub const fn new(since_origin: Duration) -> Self {
        Self(since_origin)
    }

    /// The time since the clock's origin.
    pub const fn since_origin(self) -> Duration {
        self.0
    }

    /// The time from `earlier` to `self`, zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The point `duration` later; the end of time if that overflows.
    #[must_use]
    pub const fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

/// A future that is ready when a [`Clock`] has moved on far enough.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The source of the library's time and randomness.
///
/// [`SystemClock`] is the real one. Tests pass [`ManualClock`] to a store and drive leases and retentions by hand.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The present. Never goes back.
    fn now(&self) -> Instant;

    /// A future that is ready once `duration` has passed.
    fn sleep(&self, duration: Duration) -> Sleep;

    /// 128 random bits: the owner token of an attempt, or where the tokens of a store in this process start.
    fn entropy(&self) -> u128;

    /// Runs `task`, which no caller waits for: a renewal, or the late write of a call that is gone.
    ///
    /// The real clock runs it on a thread of the library's own. A clock for tests runs it where the test runs, so that the
    /// test decides the order of events.
    fn spawn(&self, task: Task);
}

/// What [`Clock::spawn`] runs.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

thread_local! {
    /// The latest reading of a clock on this thread: the engine dates a reservation by it, and so does the store it asks.
    static READING: Cell<Option<(usize, Instant)>> = const { Cell::new(None) };
}

/// Identifies a clock.
fn address(clock: &dyn Clock) -> usize {
    std::ptr::from_ref(clock).addr()
}

/// Asks a store right after `clock` was read. The store may date an immediate answer by that reading.
pub(crate) fn asked<R>(clock: &dyn Clock, now: Instant, ask: impl FnOnce() -> R) -> R {
    /// However the call ends, its reading is out of date then.
    struct Old;
    impl Drop for Old {
        fn drop(&mut self) {
            READING.set(None);
        }
    }
    READING.set(Some((address(clock), now)));
    let _old = Old;
    ask()
}

/// The present by `clock`, for a store that is being asked.
#[cfg(any(feature = "memory", feature = "cached"))]
pub(crate) fn now(clock: &dyn Clock) -> Instant {
    match READING.get() {
        Some((read, now)) if read == address(clock) => now,
        _ => clock.now(),
    }
}

/// Milliseconds since 1970 by the wall clock of this host, which all its processes share. It may be set, and two hosts
/// disagree.
#[cfg(any(feature = "dynamodb", feature = "sqlite"))]
pub(crate) fn wall_millis() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// The output of `future`, or `None` if `limit` is over first.
pub(crate) async fn race<F: Future>(future: F, mut limit: Sleep) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => limit.as_mut().poll(cx).map(|()| None),
    })
    .await
}

/// The outputs of all `futures`, in their order; the futures run concurrently.
#[cfg(any(feature = "conformance", feature = "postgres", feature = "redis"))]
pub(crate) async fn all<F: Future + Unpin>(futures: &mut [F]) -> Vec<F::Output> {
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, output) in futures.iter_mut().zip(&mut outputs).filter(|(_, output)| output.is_none()) {
            if let Poll::Ready(ready) = Pin::new(future).poll(cx) {
                *output = Some(ready);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

/// The machine's clock, tokio's timers, and the randomness of the operating system.
///
/// Steps of the wall clock don't affect it. On Linux and Android it counts the time for which the machine was suspended, so
/// that a lease that lapsed meanwhile is known to have lapsed.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: tokio::time::Instant,
    /// The time since the start of the machine.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    booted: Duration,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self {
            origin: tokio::time::Instant::now(),
            #[cfg(any(target_os = "linux", target_os = "android"))]
            booted: since_boot(),
        }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        // Tokio's time stands still while the machine is suspended, and runs ahead in tests that pause it.
        let elapsed = self.origin.elapsed();
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let elapsed = elapsed.max(since_boot().saturating_sub(self.booted));
        Instant(elapsed)
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        Box::pin(tokio::time::sleep(duration))
    }

    fn entropy(&self) -> u128 {
        let mut bits = [0; 16];
        // A repeated token lets two bodies run under one reservation; without randomness there is no way to go on.
        getrandom::fill(&mut bits).expect("the operating system has randomness");
        u128::from_ne_bytes(bits)
    }

    fn spawn(&self, task: Task) {
        crate::upkeep::spawn(task);
    }
}

/// The time since the start of the machine, suspension included.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
}

/// A clock that moves only when told to, for tests.
///
/// ```
/// # use std::time::Duration;
/// # use idem_runtime::{Clock, ManualClock, MemoryStore};
/// let clock = ManualClock::new();
/// let store = MemoryStore::with_clock(clock.clone());
/// let before = clock.now();
/// clock.advance(Duration::from_secs(31)); // Every lease of 30 s has lapsed.
/// assert_eq!(clock.now().saturating_since(before).as_secs(), 31);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    state: std::sync::Arc<std::sync::Mutex<Manual>>,
}

#[derive(Debug, Default)]
struct Manual {
    now: Duration,
    random: SplitMix,
    sleepers: Vec<(Duration, std::task::Waker)>,
}

impl ManualClock {
    /// A clock that stands at its origin.
    pub fn new() -> Self {
        Self::default()
    }

    /// A clock whose entropy is derived from `seed`, for runs that must repeat exactly.
    pub fn seeded(seed: u64) -> Self {
        let clock = Self::default();
        clock.lock().random = SplitMix(seed);
        clock
    }

    /// Moves time forward and wakes every sleeper whose time has come.
    pub fn advance(&self, duration: Duration) {
        let due = {
            let mut state = self.lock();
            state.now = state.now.saturating_add(duration);
            let now = state.now;
            let (due, rest) = state.sleepers.drain(..).partition::<Vec<_>, _>(|(at, _)| *at <= now);
            state.sleepers = rest;
            due
        };
        for (_, waker) in due {
            waker.wake();
        }
    }

    /// The time until the next sleeper is due, `None` while nobody sleeps.
    pub fn next_wake(&self) -> Option<Duration> {
        let state = self.lock();
        state.sleepers.iter().map(|(at, _)| at.saturating_sub(state.now)).min()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Manual> {
        crate::sync::lock(&self.state)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        Instant(self.lock().now)
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        let until = self.lock().now.saturating_add(duration);
        let clock = self.clone();
        Box::pin(poll_fn(move |cx| {
            let mut state = clock.lock();
            if state.now >= until {
                return Poll::Ready(());
            }
            if !state.sleepers.iter().any(|(at, waker)| *at == until && waker.will_wake(cx.waker())) {
                state.sleepers.push((until, cx.waker().clone()));
            }
            Poll::Pending
        }))
    }

    fn entropy(&self) -> u128 {
        self.lock().random.bits()
    }

    fn spawn(&self, task: Task) {
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(task)),
            Err(_) => crate::upkeep::spawn(task),
        }
    }
}

/// `SplitMix64` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Clone, Debug, Default)]
pub(crate) struct SplitMix(pub(crate) u64);

impl SplitMix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn bits(&mut self) -> u128 {
        (u128::from(self.next()) << 64) | u128::from(self.next())
    }
}
