//! Values that exist once in each process, and locks that never block a forked child forever.
//!
//! A fork copies every lock in its current state, but only one thread: the thread that calls `fork()`. So a lock that
//! another thread holds stays locked in the child forever.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::{Mutex, MutexGuard, Process, lock};

/// Number of claims on one value. A process needs the second claim only if it was forked while a thread of its parent
/// made the value of the first claim.
const CLAIMS: usize = 4;
/// Process id of a claim that no process has taken.
const FREE: u32 = 0;

/// A value that exists once in each process: a forked child makes a new value, and neither uses nor drops the value of
/// its parent.
///
/// In the child, a lock in the parent's value may be held forever by a thread that the child does not have. And if the
/// child dropped a socket of the parent, the parent would no longer get events of that socket, because both processes
/// share the system's list of watched sockets.
pub(crate) struct PerProcess<T> {
    value: Option<(Process, T)>,
    claims: [Claim<T>; CLAIMS],
}

/// Claim of a forked child on a value. The child takes a claim before a thread makes the value. So a grandchild that is
/// forked meanwhile does not wait for that thread, but takes another claim.
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

    /// Makes a container in which no process has a value yet.
    pub(crate) const fn empty() -> Self {
        let claims = [const { Claim { process: AtomicU32::new(FREE), value: OnceLock::new() } }; CLAIMS];
        Self { value: None, claims }
    }

    /// Returns the value of the process that made this container.
    pub(crate) fn first(&self) -> &T {
        &self.value.as_ref().expect("made with a value").1
    }

    /// Returns the newest value of this process or its ancestors. Makes no system call: a child gets its parent's value
    /// until the child has asked for its own value.
    #[inline]
    pub(crate) fn latest(&self) -> Option<&T> {
        // No child has taken a claim. Each call of a handler gets the value several times, so this usual case must cost
        // no more than one load.
        if self.claims[0].process.load(Ordering::Relaxed) == FREE {
            return self.value.as_ref().map(|(_, value)| value);
        }
        self.latest_of_children()
    }

    #[cold]
    fn latest_of_children(&self) -> Option<&T> {
        let later = self.claims.iter().take_while(|claim| claim.process.load(Ordering::Relaxed) != FREE);
        match later.filter_map(|claim| claim.value.get()).last() {
            Some(later) => later.latest(),
            None => self.value.as_ref().map(|(_, value)| value),
        }
    }

    /// Returns the value of this process. In a forked child that has no value yet, `make` builds it from the parent's
    /// value. `make` must not wait for a lock of that value: a thread that the child lacks may hold the lock forever.
    pub(crate) fn here_or(&self, make: impl FnOnce(&T) -> T) -> &T {
        self.find_or(|parents| make(parents.expect("made with a value")))
    }

    /// Returns the value of this process. `make` makes the value at the first call.
    pub(crate) fn here_or_else(&self, make: impl FnOnce() -> T) -> &T {
        self.find_or(|_| make())
    }

    /// Returns the value of this process. `Default` makes the value at the first call.
    pub(crate) fn here(&self) -> &T
    where
        T: Default,
    {
        self.here_or_else(T::default)
    }

    /// Returns the value of this process, if it has been made.
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

#[cfg(any(test, feature = "redis"))]
impl<T: Clone + Default> PerProcess<Mutex<T>> {
    /// Returns the lock of this process. A child starts with a copy of its parent's data, or with empty data if a
    /// thread of the parent held the lock at the fork.
    pub(crate) fn copied(&self) -> &Mutex<T> {
        let copy = |parents: &Mutex<T>| parents.try_lock().ok().map(|data| data.clone());
        self.find_or(|parents| Mutex::new(parents.and_then(copy).unwrap_or_default()))
    }
}

/// A value that is made once, and that forked children share.
///
/// If a child is forked while a thread of its parent makes the value, the child makes its own value. With a `OnceLock`
/// the child would wait for that thread forever.
pub(crate) struct SharedOnce<T> {
    /// Id of the first process that asked for the value, and so makes `first`; [`FREE`] before.
    maker: AtomicU32,
    first: OnceLock<T>,
    /// Values of children that were forked while a thread made `first`.
    later: PerProcess<T>,
}

impl<T> SharedOnce<T> {
    pub(crate) const fn new() -> Self {
        Self { maker: AtomicU32::new(FREE), first: OnceLock::new(), later: PerProcess::empty() }
    }

    /// Returns the value if it has been made. A call that finds the value costs one load.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        self.first.get().or_else(|| self.later.latest())
    }

    /// Returns the value; `make` makes it at the first call. The first call costs a system call, and each later call
    /// costs one load.
    #[inline]
    pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        match self.get() {
            Some(value) => value,
            None => self.init(make),
        }
    }

    #[cold]
    fn init(&self, make: impl FnOnce() -> T) -> &T {
        let this = std::process::id();
        match self.maker.compare_exchange(FREE, this, Ordering::SeqCst, Ordering::SeqCst) {
            Err(maker) if maker != this => self.later.here_or_else(make),
            _ => self.first.get_or_init(make),
        }
    }
}

impl<T> Default for SharedOnce<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: fmt::Debug> fmt::Debug for SharedOnce<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedOnce").field(&self.get()).finish()
    }
}

/// A list without a lock, which only grows. A forked child continues with a copy.
pub(crate) struct SharedList<T>(SharedOnce<Box<Entry<T>>>);

struct Entry<T> {
    value: T,
    next: SharedList<T>,
}

impl<T> SharedList<T> {
    pub(crate) const fn new() -> Self {
        Self(SharedOnce::new())
    }

    /// Returns the values, the oldest value first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        let entries = std::iter::successors(self.0.get(), |entry| entry.next.0.get());
        entries.map(|entry| &entry.value)
    }

    /// Returns the first value for which `is_it` returns true. If no value matches, appends the value of `make`.
    pub(crate) fn find_or_add(&self, is_it: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> &T {
        let (mut at, mut make) = (self, Some(make));
        loop {
            let entry = at.0.get_or_init(|| {
                let make = make.take().expect("an added value ends the search");
                Box::new(Entry { value: make(), next: Self::new() })
            });
            // Another thread may have appended another value meanwhile.
            if make.is_none() || is_it(&entry.value) {
                return &entry.value;
            }
            at = &entry.next;
        }
    }
}

impl<T> Default for SharedList<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Error of a lock that a thread of the parent held at the fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InheritedLock;

/// Data that a forked child continues to use, and its lock. The lock reads the process number only while another thread
/// holds the lock.
#[derive(Debug)]
pub(crate) struct SharedWithChild<T> {
    process: Process,
    /// True once a child has found that no thread will ever release the lock.
    is_inherited: AtomicBool,
    data: Mutex<T>,
}

/// Number of times that a child checks whether a lock is free, with a pause of [`PAUSE`] in between. The child's own
/// threads hold a lock only for a moment, so a lock that was never free must have been held by a thread of the parent
/// at the fork.
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

/// Data that a forked child continues to use, and its lock. If a thread of the parent held the lock at the fork, the
/// child starts with new data.
pub(crate) struct SharedOrAnew<T> {
    shared: SharedWithChild<T>,
    anew: PerProcess<Mutex<T>>,
}

impl<T: Default> SharedOrAnew<T> {
    /// Locks the data. Makes a system call only while another thread holds the lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.shared.lock().unwrap_or_else(|InheritedLock| lock(self.anew.here()))
    }
}

impl<T: Default> Default for SharedOrAnew<T> {
    fn default() -> Self {
        Self { shared: SharedWithChild::default(), anew: PerProcess::empty() }
    }
}

/// Data in `N` shards, each with its own lock. A forked child continues with the data. A shard starts empty in the
/// child if a thread of the parent held the lock of this shard at the fork.
pub(crate) struct Shards<T, const N: usize> {
    shards: [SharedWithChild<T>; N],
    /// New shards of a forked child. All shards share one `PerProcess`, because few processes fork, and a `PerProcess`
    /// for each shard would be large.
    anew: PerProcess<Box<[SharedWithChild<T>; N]>>,
}

impl<T: Default, const N: usize> Shards<T, N> {
    /// Locks the shard with the index `at`.
    pub(crate) fn shard(&self, at: usize) -> MutexGuard<'_, T> {
        self.shards[at].lock().unwrap_or_else(|InheritedLock| {
            let anew = self.anew.here_or_else(|| Box::new(std::array::from_fn(|_| SharedWithChild::default())));
            anew[at].lock().expect("a lock of this process")
        })
    }

    /// Locks the shards one after the other.
    pub(crate) fn iter(&self) -> impl Iterator<Item = MutexGuard<'_, T>> {
        (0..N).map(|at| self.shard(at))
    }
}

impl<T: Default, const N: usize> Default for Shards<T, N> {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| SharedWithChild::default()), anew: PerProcess::empty() }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Process with another id, in the role of a parent.
    const PARENT: Process = Process(u32::MAX);

    #[test]
    fn a_forked_child_makes_its_own_value_once() {
        let values = PerProcess::made_by(PARENT, 1);
        assert_eq!((values.latest(), values.known()), (Some(&1), None));
        assert_eq!(*values.here_or(|parents| parents + 1), 2);
        assert_eq!((values.first(), values.latest(), values.known()), (&1, Some(&2), Some(&2)));
        assert_eq!(*values.here_or(|_| unreachable!("made")), 2);
    }

    #[test]
    fn a_forked_child_does_not_wait_for_a_value_that_its_parent_was_making() {
        let values = PerProcess::empty();
        values.claims[0].process.store(PARENT.0, Ordering::SeqCst);
        assert_eq!(values.latest(), None);
        assert_eq!(*values.here_or_else(|| 7), 7);
        assert_eq!((values.latest(), values.known()), (Some(&7), Some(&7)));
    }

    #[test]
    fn a_grandchild_derives_its_value_from_the_value_of_its_parent() {
        let values = PerProcess::made_by(PARENT, 1);
        let parents = PerProcess::made_by(Process(u32::MAX - 1), 2);
        values.claims[0].process.store(u32::MAX - 1, Ordering::SeqCst);
        assert!(values.claims[0].value.set(Box::new(parents)).is_ok());
        assert_eq!((values.latest(), values.known()), (Some(&2), None));
        assert_eq!(*values.here_or(|parents| parents * 10), 20);
        assert_eq!(values.known(), Some(&20));
    }

    #[test]
    fn a_forked_child_does_not_wait_for_a_lock_that_was_held_at_the_fork() {
        let lock = SharedWithChild { process: PARENT, ..SharedWithChild::new(1) };
        let held = lock.lock().unwrap();
        assert!(matches!(lock.lock(), Err(InheritedLock)));
        assert!(lock.is_inherited.load(Ordering::Relaxed), "the next caller does not wait again");
        drop(held);
        assert_eq!(lock.lock().map(|data| *data), Ok(1));
    }

    #[test]
    fn a_forked_child_copies_data_unless_its_lock_was_held_at_the_fork() {
        let values = PerProcess::made_by(PARENT, Mutex::new(1));
        assert_eq!(*lock(values.copied()), 1);
        let values = PerProcess::made_by(PARENT, Mutex::new(1));
        let held = lock(values.first());
        assert_eq!(*lock(values.copied()), 0);
        drop(held);
        assert_eq!(*lock(values.copied()), 0);
    }

    #[test]
    fn a_shared_value_is_made_once_and_kept_by_a_forked_child() {
        let once = SharedOnce::new();
        assert_eq!(once.get(), None);
        assert_eq!(*once.get_or_init(|| 1), 1);
        once.maker.store(PARENT.0, Ordering::SeqCst);
        assert_eq!((*once.get_or_init(|| unreachable!("made")), once.get()), (1, Some(&1)));
    }

    #[test]
    fn a_forked_child_makes_a_shared_value_that_its_parent_was_making() {
        let once = SharedOnce::new();
        std::thread::scope(|threads| {
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let (entered, work) = std::sync::mpsc::channel();
            let once = &once;
            threads.spawn(move || {
                let make = || {
                    entered.send(()).unwrap();
                    ended.recv().unwrap();
                    1
                };
                assert_eq!(*once.get_or_init(make), 1);
            });
            work.recv().unwrap();
            once.maker.store(PARENT.0, Ordering::SeqCst);
            assert_eq!((once.get(), *once.get_or_init(|| 2), once.get()), (None, 2, Some(&2)));
            end.send(()).unwrap();
        });
    }

    #[test]
    fn a_list_has_each_value_once_even_if_several_threads_add_the_value() {
        let list = SharedList::new();
        let added = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for number in 0..100 {
                        let add = || {
                            added.fetch_add(1, Ordering::Relaxed);
                            number
                        };
                        assert_eq!(*list.find_or_add(|it| *it == number, add), number);
                    }
                });
            }
        });
        let mut values: Vec<_> = list.iter().copied().collect();
        values.sort_unstable();
        assert_eq!((values, added.into_inner()), ((0..100).collect(), 100));
    }

    #[test]
    fn a_forked_child_can_extend_a_list_that_its_parent_was_extending() {
        let list = SharedList::new();
        list.find_or_add(|it| *it == 1, || 1);
        let first = list.0.get().unwrap();
        first.next.0.maker.store(PARENT.0, Ordering::SeqCst);
        assert_eq!(*list.find_or_add(|it| *it == 2, || 2), 2);
        assert_eq!(list.iter().copied().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn a_forked_child_starts_with_new_data_if_their_lock_was_held_at_the_fork() {
        let shared = SharedWithChild { process: PARENT, ..SharedWithChild::new(1) };
        let data = SharedOrAnew { shared, anew: PerProcess::empty() };
        let held = data.lock();
        *data.lock() += 7;
        assert_eq!(*data.lock(), 7);
        drop(held);
    }
}
