//! Locking that outlives a panic elsewhere.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex` even if a thread panicked while it held it.
///
/// Every critical section of this crate leaves its data consistent at each step, so the poison says nothing here.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notices that this process was forked off the one in which the value was made: threads are not there in a child, and its
/// connections are its parent's.
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
