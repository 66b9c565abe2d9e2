//! A value for each tokio runtime that calls a store, in each process.
//!
//! A connection, its timers, and the tasks that send operations in batches run only while the runtime that made them is
//! driven, and end with that runtime. So every runtime that calls the store has its own value, made at first use. The
//! value is dropped as soon as the runtime ends; only the value of the first runtime stays, unused, until the store is
//! dropped. A forked child inherits the parent's memory and sockets, but none of the threads that drive the parent's
//! runtimes. So the child makes its own values, and never touches a value of the parent: the drop of a connection in
//! the child would end the parent's session.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use tokio::runtime::{Handle, Id};
use tokio::task::AbortHandle;

use crate::sync::{PerProcess, Process};

/// A value for each runtime of each process.
pub(crate) struct PerRuntime<T>(PerProcess<Arc<RuntimeTable<T>>>);

impl<T> Default for PerRuntime<T> {
    fn default() -> Self {
        Self(PerProcess::default())
    }
}

/// The values of one process.
struct RuntimeTable<T> {
    /// Value of the first runtime. Separate from `others`, because this value is read without a lock, and most programs
    /// have only one runtime.
    first: OnceLock<Local<T>>,
    /// Values of all other runtimes that have not ended.
    others: RwLock<Vec<Arc<Local<T>>>>,
}

impl<T> Default for RuntimeTable<T> {
    fn default() -> Self {
        Self { first: OnceLock::new(), others: RwLock::default() }
    }
}

struct Local<T> {
    runtime: Id,
    /// True until the runtime has ended.
    lives: AtomicBool,
    /// Task that the runtime drops at its end. The drop of the task removes the value.
    tenant: OnceLock<AbortHandle>,
    value: T,
}

impl<T> Local<T> {
    fn new(runtime: Id, value: T) -> Self {
        Self { runtime, lives: AtomicBool::new(true), tenant: OnceLock::new(), value }
    }

    fn lives(&self) -> bool {
        self.lives.load(Ordering::Relaxed)
    }
}

impl<T> Drop for Local<T> {
    fn drop(&mut self) {
        if let Some(tenant) = self.tenant.get() {
            tenant.abort();
        }
    }
}

/// The value of one runtime.
pub(crate) struct Here<'a, T>(RuntimeSlot<'a, T>);

enum RuntimeSlot<'a, T> {
    First(&'a T),
    Other(Arc<Local<T>>),
}

impl<T> Deref for Here<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.0 {
            RuntimeSlot::First(value) => value,
            RuntimeSlot::Other(local) => &local.value,
        }
    }
}

impl<T: Send + Sync + 'static> PerRuntime<T> {
    /// Returns the value of the current runtime, or `None` outside of a runtime. `make` makes a missing value; the
    /// argument of `make` is true for the first runtime of the process.
    pub(crate) fn here(&self, make: impl FnOnce(bool) -> T) -> Option<Here<'_, T>> {
        let runtime = Handle::try_current().ok()?;
        Some(Here(self.0.here().find_or_make(&runtime, make)))
    }

    /// Returns the value of the current runtime like [`here`](Self::here), but without a system call. A forked child
    /// that continues to use its parent's runtime gets the parent's value, so the value itself must detect a fork.
    #[cfg(feature = "redis")]
    pub(crate) fn here_or_inherited(&self, make: impl FnOnce(bool) -> T) -> Option<Here<'_, T>> {
        let runtime = Handle::try_current().ok()?;
        // A runtime that a forked child creates never has the id of a runtime from before the fork, so a value with
        // this id was made for this runtime.
        let place = match self.0.first().find_first(runtime.id()) {
            Some(first) => RuntimeSlot::First(first),
            None => self.0.here().find_or_make(&runtime, make),
        };
        Some(Here(place))
    }

    /// Returns the value of any runtime that has not ended.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn any(&self) -> Option<Here<'_, T>> {
        let table = self.0.here();
        if let Some(first) = table.first.get().filter(|first| first.lives()) {
            return Some(Here(RuntimeSlot::First(&first.value)));
        }
        table.read().last().map(|local| Here(RuntimeSlot::Other(Arc::clone(local))))
    }
}

impl<T> RuntimeTable<T> {
    fn read(&self) -> RwLockReadGuard<'_, Vec<Arc<Local<T>>>> {
        self.others.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Arc<Local<T>>>> {
        self.others.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn find_first(&self, runtime: Id) -> Option<&T> {
        let first = self.first.get()?;
        (first.runtime == runtime && first.lives()).then_some(&first.value)
    }

    fn find_other(&self, runtime: Id) -> Option<Arc<Local<T>>> {
        self.read().iter().find(|local| local.runtime == runtime).map(Arc::clone)
    }
}

impl<T: Send + Sync + 'static> RuntimeTable<T> {
    fn find_or_make(self: &Arc<Self>, runtime: &Handle, make: impl FnOnce(bool) -> T) -> RuntimeSlot<'_, T> {
        let id = runtime.id();
        if let Some(first) = self.find_first(id) {
            return RuntimeSlot::First(first);
        }
        if let Some(local) = self.find_other(id) {
            return RuntimeSlot::Other(local);
        }
        let mut make = Some(make);
        let mut make = |is_first| Local::new(id, make.take().expect("made once")(is_first));
        let first = self.first.get_or_init(|| make(true));
        if first.runtime == id && first.lives() {
            self.settle(runtime, first);
            return RuntimeSlot::First(&first.value);
        }
        let local = {
            let mut others = self.write();
            if let Some(local) = others.iter().find(|local| local.runtime == id) {
                return RuntimeSlot::Other(Arc::clone(local));
            }
            let local = Arc::new(make(false));
            others.push(Arc::clone(&local));
            local
        };
        self.settle(runtime, &local);
        RuntimeSlot::Other(local)
    }

    /// Makes a value end with its runtime: a runtime that ends drops its tasks, and the drop of this task removes the
    /// value.
    fn settle(self: &Arc<Self>, runtime: &Handle, local: &Local<T>) {
        local.tenant.get_or_init(|| {
            let tenant = Tenant { table: Arc::downgrade(self), runtime: runtime.id(), process: Process::this() };
            let task = runtime.spawn(async move {
                let _tenant = tenant;
                std::future::pending::<()>().await;
            });
            task.abort_handle()
        });
    }
}

/// Guard that is owned by a task, which the runtime drops at its end. The drop of a `Tenant` removes the runtime's
/// value from the table.
struct Tenant<T> {
    table: Weak<RuntimeTable<T>>,
    runtime: Id,
    process: Process,
}

impl<T> Drop for Tenant<T> {
    fn drop(&mut self) {
        // In a forked child, the lock may be held by a thread that only the parent has.
        if !self.process.is_this() {
            return;
        }
        let Some(table) = self.table.upgrade() else { return };
        if let Some(first) = table.first.get().filter(|first| first.runtime == self.runtime) {
            // The first value stays until the table is dropped, because callers may be using it. The connections of
            // this value have ended with the tasks that read them.
            first.lives.store(false, Ordering::Relaxed);
        }
        let gone = {
            let mut others = table.write();
            others.iter().position(|local| local.runtime == self.runtime).map(|at| others.swap_remove(at))
        };
        // The drop of the value closes connections, so it comes after the lock is released.
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().build().unwrap()
    }

    /// A value that is counted for as long as it exists.
    struct CountedValue(Arc<AtomicUsize>, bool);

    impl Drop for CountedValue {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[derive(Default)]
    struct TestProcess {
        values: PerRuntime<CountedValue>,
        there: Arc<AtomicUsize>,
    }

    impl TestProcess {
        /// Returns whether the current runtime's value is the first runtime's value. Panics unless `is_new` is true
        /// exactly if this call has made the value.
        fn here(&self, is_new: bool) -> bool {
            let called = std::cell::Cell::new(false);
            let make = |is_first| {
                called.set(true);
                self.there.fetch_add(1, Ordering::SeqCst);
                CountedValue(Arc::clone(&self.there), is_first)
            };
            let is_first = self.values.here(make).expect("in a runtime").1;
            assert_eq!(called.get(), is_new);
            is_first
        }

        fn there(&self) -> usize {
            self.there.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn each_runtime_has_its_own_value() {
        let world = TestProcess::default();
        assert!(world.values.here(|_| unreachable!("outside of a runtime")).is_none());
        let (first, second) = (runtime(), runtime());
        for made in [true, false] {
            assert!(first.block_on(async { world.here(made) }));
            assert!(!second.block_on(async { world.here(made) }));
        }
        assert_eq!(world.there(), 2);
    }

    #[test]
    fn the_value_of_a_runtime_other_than_the_first_is_dropped_when_the_runtime_ends() {
        let world = TestProcess::default();
        let (first, second) = (runtime(), runtime());
        first.block_on(async { world.here(true) });
        second.block_on(async { world.here(true) });
        drop(second);
        assert_eq!(world.there(), 1, "that of the second is gone");
        let used = first.block_on(async { world.values.here(|_| unreachable!("there")).is_some() });
        assert!(used);
        drop(first);
        // The first runtime's value stays alive for its users, but no new caller gets it.
        let third = runtime();
        assert!(!third.block_on(async { world.here(true) }));
        assert_eq!(world.there(), 2);
    }

    #[test]
    fn the_task_that_watches_a_runtime_ends_when_the_table_of_values_is_dropped() {
        let (world, runtime) = (TestProcess::default(), runtime());
        runtime.block_on(async { world.here(true) });
        let there = Arc::clone(&world.there);
        drop(world);
        assert_eq!(there.load(Ordering::SeqCst), 0);
        runtime.block_on(tokio::task::yield_now());
        assert_eq!(runtime.metrics().num_alive_tasks(), 0);
    }

    #[test]
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    fn any_returns_a_value_of_a_runtime_that_has_not_ended() {
        let world = TestProcess::default();
        assert!(world.values.any().is_none());
        let (first, second) = (runtime(), runtime());
        first.block_on(async { world.here(true) });
        second.block_on(async { world.here(true) });
        assert!(world.values.any().expect("two live").1);
        drop(first);
        assert!(!world.values.any().expect("one lives").1);
        drop(second);
        assert!(world.values.any().is_none());
    }

    #[test]
    fn threads_of_one_runtime_share_one_value() {
        let world = Arc::new(TestProcess::default());
        let runtime = runtime();
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (world, handle) = (Arc::clone(&world), runtime.handle().clone());
                std::thread::spawn(move || {
                    let _entered = handle.enter();
                    let make = |is_first| {
                        world.there.fetch_add(1, Ordering::SeqCst);
                        CountedValue(Arc::clone(&world.there), is_first)
                    };
                    world.values.here(make).expect("in a runtime").1
                })
            })
            .collect();
        assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
        assert_eq!(world.there(), 1);
        assert_eq!(runtime.metrics().num_alive_tasks(), 1);
    }
}
