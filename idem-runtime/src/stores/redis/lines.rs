//! The connections of each tokio runtime that uses a store.
//!
//! Tasks of the runtime that opened a connection read and write it. If that runtime is idle, blocked or gone, so is the
//! connection. So runtimes share no connections: each runtime that uses the store has connections, queues and subscriptions
//! of its own, opened at first use and closed with it. A forked process has none of its parent's.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockWriteGuard, Weak};

use tokio::runtime::{Handle, Id};

use super::connection::{Background, Failure};
use super::route::Route;
use super::wake::Wakeups;
use crate::sync::PerProcess;

/// One runtime's connections to a store.
pub(super) struct Line {
    pub(super) route: Route,
    pub(super) wakeups: Wakeups,
    /// A task that ends with the runtime.
    tenant: OnceLock<Background>,
}

impl Line {
    pub(super) fn new(route: Route, wakeups: Wakeups) -> Self {
        Self { route, wakeups, tenant: OnceLock::new() }
    }
}

/// The lines of one handle.
#[derive(Default)]
pub(super) struct Lines(PerProcess<Table>);

#[derive(Default)]
struct Table {
    /// The line of the first runtime. It is found without a lock, and most applications have no other.
    first: OnceLock<First>,
    others: RwLock<Vec<(Id, Arc<Line>)>>,
}

struct First {
    runtime: Id,
    line: Line,
    /// Whether its runtime is still running.
    lives: AtomicBool,
}

impl Table {
    fn first(&self, runtime: Id) -> Option<&Line> {
        let first = self.first.get()?;
        (first.runtime == runtime && first.lives.load(Ordering::Relaxed)).then_some(&first.line)
    }

    fn other(&self, runtime: Id) -> Option<Arc<Line>> {
        let others = self.others.read().unwrap_or_else(PoisonError::into_inner);
        others.iter().find(|(id, _)| *id == runtime).map(|(_, line)| Arc::clone(line))
    }

    fn others(&self) -> RwLockWriteGuard<'_, Vec<(Id, Arc<Line>)>> {
        self.others.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A line that was found.
pub(super) enum Found<'a> {
    First(&'a Line),
    Other(Arc<Line>),
}

impl Deref for Found<'_> {
    type Target = Line;

    fn deref(&self) -> &Line {
        match self {
            Self::First(line) => line,
            Self::Other(line) => line,
        }
    }
}

impl Lines {
    /// The line of the current runtime; `open` opens it at first use.
    pub(super) fn here(self: &Arc<Self>, open: impl FnOnce() -> Line) -> Result<Found<'_>, Failure> {
        let Ok(runtime) = Handle::try_current() else {
            let reason = "there is no tokio runtime here, which its connections need: call it from one";
            return Err(Failure::Unusable(reason.into()));
        };
        // Runtime ids never repeat in a forked process, so a line found here is not the parent's.
        match self.0.first().first(runtime.id()) {
            Some(line) => Ok(Found::First(line)),
            None => Ok(self.find_or_open(&runtime, open)),
        }
    }

    /// Adds the line of a runtime that has none.
    pub(super) fn add(self: &Arc<Self>, (runtime, line): (Handle, Line)) {
        self.find_or_open(&runtime, || line);
    }

    fn find_or_open(self: &Arc<Self>, runtime: &Handle, open: impl FnOnce() -> Line) -> Found<'_> {
        let (table, id) = (self.0.here(), runtime.id());
        if let Some(line) = table.first(id) {
            return Found::First(line);
        }
        if let Some(line) = table.other(id) {
            return Found::Other(line);
        }
        let mut open = Some(open);
        let mut open = || open.take().expect("opened once")();
        let first = table.first.get_or_init(|| First { runtime: id, line: open(), lives: AtomicBool::new(true) });
        if let Some(line) = table.first(id) {
            self.settle(runtime, &first.line);
            return Found::First(line);
        }
        let line = {
            let mut others = table.others();
            if let Some((_, line)) = others.iter().find(|(other, _)| *other == id) {
                return Found::Other(Arc::clone(line));
            }
            let line = Arc::new(open());
            others.push((id, Arc::clone(&line)));
            line
        };
        self.settle(runtime, &line);
        Found::Other(line)
    }

    /// Makes `line` end with its runtime: a runtime that ends drops its tasks, and the drop of this one removes the line.
    fn settle(self: &Arc<Self>, runtime: &Handle, line: &Line) {
        let tenant = Tenant { lines: Arc::downgrade(self), runtime: runtime.id() };
        let task = runtime.spawn(async move {
            let _tenant = tenant;
            std::future::pending::<()>().await;
        });
        line.tenant.get_or_init(|| Background(task.abort_handle()));
    }
}

/// Lives as long as its runtime.
struct Tenant {
    lines: Weak<Lines>,
    runtime: Id,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let Some(lines) = self.lines.upgrade() else { return };
        let table = lines.0.here();
        if let Some(first) = table.first.get().filter(|first| first.runtime == self.runtime) {
            // Its connections have ended with the tasks that read them.
            first.lives.store(false, Ordering::Relaxed);
        }
        let gone = {
            let mut others = table.others();
            others.iter().position(|(id, _)| *id == self.runtime).map(|at| others.swap_remove(at))
        };
        // Closes its connections, outside of the lock.
        drop(gone);
    }
}
