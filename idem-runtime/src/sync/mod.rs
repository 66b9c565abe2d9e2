//! Primitives that threads share: locks, atomics and tasks. A panic of a thread poisons no lock.
//!
//! Under `--cfg shuttle` this module exports the primitives of the crate `shuttle`, which tries many orders of the
//! steps of threads; see `scripts/interleavings`.

#[cfg(not(shuttle))]
use std::sync::PoisonError;
#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(all(not(shuttle), any(feature = "mysql", feature = "postgres", feature = "redis")))]
pub(crate) use tokio::runtime::Handle;

mod per_process;
#[cfg(feature = "memory")]
pub(crate) use self::per_process::{InheritedLock, SharedWithChild};
pub(crate) use self::per_process::{PerProcess, Shards, SharedList, SharedOnce, SharedOrAnew};

#[cfg(shuttle)]
#[path = "shuttle.rs"]
mod controlled;
#[cfg(shuttle)]
pub(crate) use self::controlled::*;

/// Locks `mutex` even if a thread panicked while it held the lock.
///
/// Every critical section of this crate keeps its data consistent at each step, so a poisoned lock is harmless.
#[cfg(not(shuttle))]
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Process that made a value. A comparison with the current process detects a fork. A forked child has none of its
/// parent's threads, and must not use the parent's connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u32);

impl Process {
    /// Returns the current process.
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// Returns whether this is the current process. The comparison costs a system call of some 50 ns.
    pub(crate) fn is_this(self) -> bool {
        self.0 == std::process::id()
    }
}
