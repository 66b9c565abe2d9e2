//! Clock with the machine's own time and randomness.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use tokio::runtime::{Builder, Handle};

use super::{Clock, Instant, Sleep, Task, upkeep};

/// Clock of the machine, with tokio's timers and the randomness of the operating system.
///
/// Steps of the wall clock don't affect this clock. On Linux and Android this clock also counts the time for which the
/// machine was suspended, so that a lease may lapse during a suspension.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: tokio::time::Instant,
    /// True if a test may pause or move tokio's time.
    is_movable: bool,
    /// Time from the start of the machine until this clock was made.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    booted: Duration,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self {
            origin: tokio::time::Instant::now(),
            is_movable: has_test_util(),
            #[cfg(any(target_os = "linux", target_os = "android"))]
            booted: since_boot(),
        }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        // Tokio's time stands still while the machine is suspended, and runs ahead in tests that pause it. So the clock
        // uses the larger one of tokio's time and the time since the start of the machine. Where no test can pause
        // tokio's time, that time is never the larger one, and is not read.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let elapsed = {
            let elapsed = since_boot().saturating_sub(self.booted);
            if self.is_movable { elapsed.max(self.origin.elapsed()) } else { elapsed }
        };
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let elapsed = self.origin.elapsed();
        Instant::new(elapsed)
    }

    fn wall(&self) -> Duration {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        Box::pin(tokio::time::sleep(duration))
    }

    fn entropy(&self) -> u128 {
        let mut bits = [0; 16];
        // If an owner token repeated, two bodies could run under one reservation. So the library must not continue
        // without randomness.
        getrandom::fill(&mut bits).expect("the operating system has randomness");
        u128::from_ne_bytes(bits)
    }

    fn spawn(&self, task: Task) {
        // The thread of the library uses real time. Where a test has paused time, the tasks of that thread would run
        // too late.
        match Handle::try_current() {
            Ok(runtime) if self.is_moved() => drop(runtime.spawn(task)),
            _ => upkeep::spawn(task),
        }
    }

    fn is_moved(&self) -> bool {
        if !self.is_movable {
            return false;
        }
        // Tokio's time equals the machine's time to the nanosecond, unless a test has paused it.
        let before = std::time::Instant::now();
        let tokio = tokio::time::Instant::now().into_std();
        tokio < before || tokio > std::time::Instant::now()
    }
}

/// Returns whether tokio was compiled with its feature `test-util`, without which no test can pause or move its time.
///
/// A crate can't ask for the features of another crate. [`Builder`] has a method `start_paused` only with that feature,
/// and a method of the type itself takes precedence over the method of a trait that is called here otherwise.
fn has_test_util() -> bool {
    struct Absent;
    #[allow(dead_code, reason = "not called with the feature")]
    trait WithoutTestUtil {
        fn start_paused(&mut self, _: bool) -> Absent {
            Absent
        }
    }
    trait Presence {
        fn is_present(&self) -> bool;
    }
    impl WithoutTestUtil for Builder {}
    impl Presence for Builder {
        fn is_present(&self) -> bool {
            true
        }
    }
    impl Presence for Absent {
        fn is_present(&self) -> bool {
            false
        }
    }
    Builder::new_current_thread().start_paused(false).is_present()
}

/// Returns the time since the start of the machine, including suspensions.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
}
