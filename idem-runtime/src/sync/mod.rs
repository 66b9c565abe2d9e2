//! What threads share: locks, atomics and tasks. A panic elsewhere poisons no lock.
//!
//! Under `--cfg shuttle` they come from the crate `shuttle`, which tries many orders of the steps of threads; see
//! `scripts/interleavings`.

#[cfg(not(shuttle))]
use std::sync::PoisonError;
#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(all(not(shuttle), any(feature = "postgres", feature = "redis")))]
pub(crate) use tokio::runtime::Handle;

mod per_process;
pub(crate) use self::per_process::{InheritedLock, PerProcess, SharedList, SharedOnce, SharedOrAnew, SharedWithChild};

#[cfg(shuttle)]
#[path = "shuttle.rs"]
mod controlled;
#[cfg(shuttle)]
pub(crate) use self::controlled::*;

/// Locks `mutex` even if a thread panicked while it held it.
///
/// Every critical section of this crate leaves its data consistent at each step, so a poisoned lock means nothing here.
#[cfg(not(shuttle))]
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notices that this process was forked after the value was made. A child has none of its parent's threads, and its
/// connections are still the parent's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u32);

impl Process {
    /// This process.
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// Whether the value was made in this process. A system call: some 50 ns.
    pub(crate) fn is_this(self) -> bool {
        self.0 == std::process::id()
    }
}
