//! Values of which each process has its own.

use std::sync::OnceLock;

use super::Process;

/// A value of which each process has its own: a forked child makes a new one, and neither uses nor drops its parent's.
///
/// In the child, a lock in the parent's value may be held for ever, by a thread that does not exist there. And a socket
/// that is dropped there is no longer watched in the parent, as both share the system's list of watched sockets.
pub(crate) struct PerProcess<T> {
    process: Process,
    value: Option<T>,
    /// The value of a forked child: only the child writes it.
    child: OnceLock<Box<Self>>,
}

impl<T> PerProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: Process::this(), value: Some(value), child: OnceLock::new() }
    }

    /// The value of the process in which this was made.
    pub(crate) fn first(&self) -> &T {
        self.value.as_ref().expect("taken by `drop` only")
    }

    /// The value of this process. In a child that has none, `make` builds it from the parent's; no lock of the parent's
    /// is taken.
    pub(crate) fn here_or(&self, make: impl Fn(&T) -> T) -> &T {
        let mut at = self;
        while !at.process.is_this() {
            at = at.child.get_or_init(|| Box::new(Self::new(make(at.first()))));
        }
        at.first()
    }

    /// The value of this process.
    #[cfg(any(feature = "postgres", feature = "redis"))]
    pub(crate) fn here(&self) -> &T
    where
        T: Default,
    {
        self.here_or(|_| T::default())
    }

    /// The value of this process, if it has one.
    #[cfg(feature = "sqlite")]
    pub(crate) fn known(&self) -> Option<&T> {
        let mut at = self;
        while !at.process.is_this() {
            at = at.child.get()?;
        }
        Some(at.first())
    }
}

#[cfg(any(feature = "postgres", feature = "redis"))]
impl<T: Default> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take()
            && !self.process.is_this()
        {
            std::mem::forget(value);
        }
    }
}
