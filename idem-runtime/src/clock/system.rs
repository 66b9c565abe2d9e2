//! Clock with the machine's own time and randomness.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use tokio::runtime::Handle;

use super::{Clock, Instant, Sleep, Task, upkeep};

/// Clock of the machine, with tokio's timers and the randomness of the operating system.
///
/// Steps of the wall clock don't affect this clock. On Linux and Android this clock also counts the time for which the
/// machine was suspended, so that a lease may lapse during a suspension.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: tokio::time::Instant,
    /// Time from the start of the machine until this clock was made.
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
        // Tokio's time stands still while the machine is suspended, and runs ahead in tests that pause it. So the clock
        // uses the larger one of tokio's time and the time since the start of the machine.
        let elapsed = self.origin.elapsed();
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let elapsed = elapsed.max(since_boot().saturating_sub(self.booted));
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
        // Tokio's time equals the machine's time to the nanosecond, unless a test has paused it.
        let before = std::time::Instant::now();
        let tokio = tokio::time::Instant::now().into_std();
        tokio < before || tokio > std::time::Instant::now()
    }
}

/// Returns the time since the start of the machine, including suspensions.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
}
