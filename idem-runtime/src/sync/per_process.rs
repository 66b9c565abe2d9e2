//! Values of which each process has its own, and locks that a forked child never waits for in vain.
//!
//! A fork copies every lock in its state of that moment, and no thread but the one that forks. A lock that another thread holds
//! stays locked in the child for ever.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::{Mutex, MutexGuard, Process, lock};

/// Claims of children beside each other. A process needs another one only if its parent was forked while a thread made the
/// value of the first one.
const CLAIMS: usize = 4;
/// The process of a claim that is free.
const FREE: u32 = 0;

/// A value of which each process has its own: a forked child makes a new one, and neither uses nor drops its parent's.
///
/// In the child, a lock in the parent's value may be held for ever, by a thread that does not exist there. And a socket
/// that is dropped there is no longer watched in the parent, as both share the system's list of watched sockets.
pub(crate) struct PerProcess<T> {
    value: Option<(Process, T)>,
    claims: [Claim<T>; CLAIMS],
}

/// The value of a forked child. The child claims it before a thread makes the value, so a grandchild that finds an unfinished
/// value does not wait for that thread.
struct Claim<T> {
    process: AtomicU32,
    value: OnceLock<Box<PerProcess<T>>>,
}

impl<T> PerProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self::made_by(Process::this(), value)
    }

    fn made_by(process: Process, value: T) -> Self {
        let mut this = Self::empty();
        this.value = Some((process, value));
        this
    }

    /// No process has a value yet.
    pub(crate) const fn empty() -> Self {
        let claims = [const { Claim { process: AtomicU32::new(FREE), value: OnceLock::new() } }; CLAIMS];
        Self { value: None, claims }
    }

    /// The value of the process in which this was made.
    pub(crate) fn first(&self) -> &T {
        &self.value.as_ref().expect("made with a value").1
    }

    /// The latest value that this process or one of its parents has made. No system call: in a child, the parent's until
    /// the child has asked for its own.
    pub(crate) fn latest(&self) -> Option<&T> {
        let later = self.claims.iter().take_while(|claim| claim.process.load(Ordering::Relaxed) != FREE);
        match later.filter_map(|claim| claim.value.get()).last() {
            Some(later) => later.latest(),
            None => self.value.as_ref().map(|(_, value)| value),
        }
    }

    /// The value of this process. In a child that has none, `make` builds it from the parent's; no lock of the parent's
    /// is taken.
    pub(crate) fn here_or(&self, make: impl FnOnce(&T) -> T) -> &T {
        self.find_or(|parents| make(parents.expect("made with a value")))
    }

    /// The value of this process. If it has none, `make` makes it.
    pub(crate) fn here_or_else(&self, make: impl FnOnce() -> T) -> &T {
        self.find_or(|_| make())
    }

    /// The value of this process.
    pub(crate) fn here(&self) -> &T
    where
        T: Default,
    {
        self.here_or_else(T::default)
    }

    /// The value of this process, if it has one.
    pub(crate) fn known(&self) -> Option<&T> {
        let this = std::process::id();
        let mut at = self;
        loop {
            match &at.value {
                Some((process, value)) if process.0 == this => return Some(value),
                _ => at = at.claims.iter().filter_map(|claim| claim.value.get()).next_back()?,
            }
        }
    }

    fn find_or(&self, make: impl FnOnce(Option<&T>) -> T) -> &T {
        let this = std::process::id();
        let mut at = self;
        'value: loop {
            if let Some((process, value)) = &at.value
                && process.0 == this
            {
                return value;
            }
            for claim in &at.claims {
                let claimed = claim.process.compare_exchange(FREE, this, Ordering::SeqCst, Ordering::SeqCst);
                if claimed.is_ok() || claimed == Err(this) {
                    let parents = || at.value.as_ref().map(|(_, value)| value);
                    return claim.value.get_or_init(|| Box::new(Self::new(make(parents())))).first();
                }
                if let Some(parents) = claim.value.get() {
                    at = parents;
                    continue 'value;
                }
            }
            panic!("{CLAIMS} processes in a row were forked while they made the same value");
        }
    }
}

impl<T: Default> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        if let Some((process, value)) = self.value.take()
            && !process.is_this()
        {
            std::mem::forget(value);
        }
    }
}

/// A thread of the parent held the lock at the fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InheritedLock;

/// A lock of data that a forked child goes on with. It asks for the process only while somebody else holds it.
#[derive(Debug)]
pub(crate) struct SharedWithChild<T> {
    process: Process,
    /// Whether a child has found that nobody will unlock it.
    is_inherited: AtomicBool,
    data: Mutex<T>,
}

/// How often a child looks whether a lock is free, and the pause in between. The child's own threads hold a lock for a moment.
const LOOKS: u32 = 500;
const PAUSE: Duration = Duration::from_millis(1);

impl<T> SharedWithChild<T> {
    pub(crate) fn new(data: T) -> Self {
        Self { process: Process::this(), is_inherited: AtomicBool::new(false), data: Mutex::new(data) }
    }

    /// Locks the data.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, T>, InheritedLock> {
        match self.try_lock() {
            Some(data) => Ok(data),
            None => self.wait(),
        }
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        use std::sync::TryLockError;
        match self.data.try_lock() {
            Ok(data) => Some(data),
            Err(TryLockError::Poisoned(data)) => Some(data.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[cold]
    fn wait(&self) -> Result<MutexGuard<'_, T>, InheritedLock> {
        if self.process.is_this() {
            return Ok(lock(&self.data));
        }
        for _ in 0..LOOKS {
            if self.is_inherited.load(Ordering::Relaxed) {
                break;
            }
            if let Some(data) = self.try_lock() {
                return Ok(data);
            }
            std::thread::park_timeout(PAUSE);
        }
        self.is_inherited.store(true, Ordering::Relaxed);
        Err(InheritedLock)
    }
}

impl<T: Default> Default for SharedWithChild<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// As in the child of a process with another id.
    const PARENT: Process = Process(u32::MAX);

    #[test]
    fn a_child_makes_its_own_value_once() {
        let values = PerProcess::made_by(PARENT, 1);
        assert_eq!((values.latest(), values.known()), (Some(&1), None));
        assert_eq!(*values.here_or(|parents| parents + 1), 2);
        assert_eq!((values.first(), values.latest(), values.known()), (&1, Some(&2), Some(&2)));
        assert_eq!(*values.here_or(|_| unreachable!("made")), 2);
    }

    #[test]
    fn a_value_that_the_parent_was_making_at_the_fork_is_not_waited_for() {
        let values = PerProcess::empty();
        values.claims[0].process.store(PARENT.0, Ordering::SeqCst);
        assert_eq!(values.latest(), None);
        assert_eq!(*values.here_or_else(|| 7), 7);
        assert_eq!((values.latest(), values.known()), (Some(&7), Some(&7)));
    }

    #[test]
    fn a_grandchild_goes_on_from_the_value_of_its_parent() {
        let values = PerProcess::made_by(PARENT, 1);
        let parents = PerProcess::made_by(Process(u32::MAX - 1), 2);
        values.claims[0].process.store(u32::MAX - 1, Ordering::SeqCst);
        assert!(values.claims[0].value.set(Box::new(parents)).is_ok());
        assert_eq!((values.latest(), values.known()), (Some(&2), None));
        assert_eq!(*values.here_or(|parents| parents * 10), 20);
        assert_eq!(values.known(), Some(&20));
    }

    #[test]
    fn a_child_does_not_wait_for_a_lock_that_was_held_at_the_fork() {
        let lock = SharedWithChild { process: PARENT, ..SharedWithChild::new(1) };
        let held = lock.lock().unwrap();
        assert!(matches!(lock.lock(), Err(InheritedLock)));
        assert!(lock.is_inherited.load(Ordering::Relaxed), "the next caller does not look as often");
        drop(held);
        assert_eq!(lock.lock().map(|data| *data), Ok(1));
    }
}
