//! The machine's own time and randomness.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use super::{Clock, Instant, Sleep, Task, upkeep};

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
        // A repeated token lets two bodies run under one reservation; without randomness there is no way to go on.
        getrandom::fill(&mut bits).expect("the operating system has randomness");
        u128::from_ne_bytes(bits)
    }

    fn spawn(&self, task: Task) {
        upkeep::spawn(task);
    }
}

/// The time since the start of the machine, suspension included.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
}
