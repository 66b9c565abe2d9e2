//! The state of a store for each runtime that calls it, and for each process.
//!
//! A connection, its timers and the tasks that batch operations belong to the runtime that made them: they stand still
//! while it is not driven, and end with it. So every runtime that calls has its own. A forked process inherits only its
//! parent's memory: it makes everything anew, and never touches what was the parent's. Dropping a connection would end the
//! parent's session.

use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use tokio::runtime::{Handle, Id};
use tokio::task::AbortHandle;

use crate::sync::lock;

/// A value for each runtime.
pub(super) struct PerRuntime<T> {
    /// The value of the first runtime, for which nothing is locked. Most programs have no other.
    first: OnceLock<Local<T>>,
    others: Mutex<Vec<Arc<Local<T>>>>,
}

impl<T> Default for PerRuntime<T> {
    fn default() -> Self {
        Self { first: OnceLock::new(), others: Mutex::default() }
    }
}

struct Local<T> {
    runtime: Id,
    /// A task that ends with the runtime.
    alive: AbortHandle,
    value: T,
}

impl<T> Local<T> {
    fn new(runtime: &Handle, make: impl FnOnce() -> T) -> Self {
        let alive = runtime.spawn(std::future::pending::<()>()).abort_handle();
        Self { runtime: runtime.id(), alive, value: make() }
    }
}

impl<T> Drop for Local<T> {
    fn drop(&mut self) {
        self.alive.abort();
    }
}

/// The value of one runtime.
pub(super) struct Here<'a, T>(Place<'a, T>);

enum Place<'a, T> {
    First(&'a Local<T>),
    Other(Arc<Local<T>>),
}

impl<T> Deref for Here<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.0 {
            Place::First(local) => &local.value,
            Place::Other(local) => &local.value,
        }
    }
}

impl<T> PerRuntime<T> {
    /// The value of the current runtime. If there is none, `make` makes it, and is told whether this is the first runtime.
    /// `None` outside of a runtime.
    pub(super) fn here(&self, make: impl Fn(bool) -> T) -> Option<Here<'_, T>> {
        let runtime = Handle::try_current().ok()?;
        let first = self.first.get_or_init(|| Local::new(&runtime, || make(true)));
        if first.runtime == runtime.id() {
            return Some(Here(Place::First(first)));
        }
        let mut others = lock(&self.others);
        if let Some(local) = others.iter().find(|local| local.runtime == runtime.id()) {
            return Some(Here(Place::Other(Arc::clone(local))));
        }
        // Values of runtimes that have ended are of no use any more.
        others.retain(|local| !local.alive.is_finished());
        let local = Arc::new(Local::new(&runtime, || make(false)));
        others.push(Arc::clone(&local));
        Some(Here(Place::Other(local)))
    }

    /// The value of any runtime that has not ended.
    pub(super) fn any(&self) -> Option<Here<'_, T>> {
        if let Some(first) = self.first.get().filter(|local| !local.alive.is_finished()) {
            return Some(Here(Place::First(first)));
        }
        let others = lock(&self.others);
        let local = others.iter().rev().find(|local| !local.alive.is_finished())?;
        Some(Here(Place::Other(Arc::clone(local))))
    }
}
