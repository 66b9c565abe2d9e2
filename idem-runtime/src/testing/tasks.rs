//! Tasks of a simulation.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use super::random::Random;
use crate::clock::Task;
use crate::sync::lock;

pub(super) struct Slot {
    /// Future of the task; `None` during a poll.
    pub(super) future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    pub(super) waker: Arc<TaskWaker>,
    pub(super) polls: Rc<Cell<u64>>,
    pub(super) kill_at: Cell<u64>,
    pub(super) killed: Rc<dyn Fn()>,
}

pub(super) struct Tasks {
    pub(super) random: RefCell<Random>,
    pub(super) slots: RefCell<BTreeMap<u64, Slot>>,
    pub(super) next: Cell<u64>,
    /// Number of polls that the run may still make.
    pub(super) left: Cell<u64>,
    pub(super) woken: Arc<Mutex<WakeQueue>>,
}

/// Tasks that can go on. The queue has a lock, because a waker may be called from any thread.
#[derive(Default)]
pub(super) struct WakeQueue {
    pub(super) tasks: BTreeSet<u64>,
    pub(super) scheduler: Option<Waker>,
}

pub(super) struct TaskWaker {
    pub(super) id: u64,
    pub(super) woken: Arc<Mutex<WakeQueue>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let scheduler = {
            let mut woken = lock(&self.woken);
            woken.tasks.insert(self.id);
            woken.scheduler.clone()
        };
        if let Some(scheduler) = scheduler {
            scheduler.wake();
        }
    }
}

impl Tasks {
    pub(super) fn new_waker(&self) -> Arc<TaskWaker> {
        let id = self.next.replace(self.next.get() + 1);
        Arc::new(TaskWaker { id, woken: Arc::clone(&self.woken) })
    }

    /// Returns whether the run has used up its limit of polls.
    pub(super) fn is_exhausted(&self) -> bool {
        self.left.get() == 0
    }

    /// Adds tasks that were spawned by [`Clock::spawn`](crate::clock::Clock::spawn).
    pub(super) fn adopt(&self, spawned: Vec<Task>) {
        for task in spawned {
            let waker = self.new_waker();
            let slot = Slot {
                future: Some(task),
                waker: Arc::clone(&waker),
                polls: Rc::default(),
                kill_at: Cell::new(u64::MAX),
                killed: Rc::new(|| {}),
            };
            self.slots.borrow_mut().insert(waker.id, slot);
            waker.wake_by_ref();
        }
    }

    /// Polls another task that can go on while one task blocks. Returns false if no task can go on.
    pub(super) fn poll_another(&self) -> bool {
        let id = {
            let (mut woken, slots) = (lock(&self.woken), self.slots.borrow());
            let idle = |id: &&u64| slots.get(*id).is_some_and(|slot| slot.future.is_some());
            let idle: Vec<u64> = woken.tasks.iter().filter(idle).copied().collect();
            let count = u64::try_from(idle.len()).unwrap_or(u64::MAX);
            let at = usize::try_from(self.random.borrow_mut().below(count)).unwrap_or_default();
            let Some(id) = idle.get(at).copied().filter(|_| !self.is_exhausted()) else { return false };
            woken.tasks.remove(&id);
            id
        };
        self.left.set(self.left.get() - 1);
        self.poll(id, true);
        true
    }

    pub(super) fn polled_by(&self, scheduler: &Waker) {
        lock(&self.woken).scheduler = Some(scheduler.clone());
    }

    /// Picks a task that can go on, at random. Sometimes returns `None` although a task can go on, so that a task of
    /// the runtime runs first.
    pub(super) fn draw(&self) -> Option<u64> {
        let mut woken = lock(&self.woken);
        if woken.tasks.is_empty() || self.random.borrow_mut().coin() {
            return None;
        }
        let count = u64::try_from(woken.tasks.len()).unwrap_or(u64::MAX);
        let at = usize::try_from(self.random.borrow_mut().below(count)).unwrap_or_default();
        let id = woken.tasks.iter().nth(at).copied()?;
        woken.tasks.remove(&id);
        Some(id)
    }

    /// Wakes the scheduler if a task can go on.
    pub(super) fn go_on(&self, scheduler: &Waker) {
        if !lock(&self.woken).tasks.is_empty() {
            scheduler.wake_by_ref();
        }
    }

    /// Polls a task. If `inside` is true, another task is being polled; then this poll does not use up that task's
    /// cooperative budget of tokio.
    pub(super) fn poll(&self, id: u64, inside: bool) {
        let Some((mut future, waker)) = self.slots.borrow_mut().get_mut(&id).and_then(|slot| {
            let future = slot.future.take()?;
            Some((future, Waker::from(Arc::clone(&slot.waker))))
        }) else {
            return;
        };
        // The slots must not be borrowed during a poll or a drop, because a task may then spawn and kill other tasks.
        let kill_before = self.with(id, |slot| slot.kill_at.get() == 0);
        let mut cx = Context::from_waker(&waker);
        let poll = |future: Pin<&mut dyn Future<Output = ()>>, cx: &mut Context<'_>| match inside {
            true => pin!(tokio::task::unconstrained(future)).poll(cx).is_ready(),
            false => future.poll(cx).is_ready(),
        };
        let ready = !kill_before && poll(future.as_mut(), &mut cx);
        let killed = self.with(id, |slot| {
            if !kill_before {
                slot.polls.set(slot.polls.get() + 1);
            }
            slot.kill_at.get() <= slot.polls.get()
        });
        if ready || killed {
            self.remove(id, future, !ready);
        } else if let Some(slot) = self.slots.borrow_mut().get_mut(&id) {
            slot.future = Some(future);
        }
    }

    pub(super) fn with(&self, id: u64, f: impl FnOnce(&Slot) -> bool) -> bool {
        self.slots.borrow().get(&id).is_some_and(f)
    }

    pub(super) fn kill(&self, id: u64) {
        let future = self.slots.borrow_mut().get_mut(&id).and_then(|slot| {
            // A future that is being polled is not in its slot. `kill_at = 0` ends the future when the poll returns.
            slot.kill_at.set(0);
            slot.future.take()
        });
        if let Some(future) = future {
            self.remove(id, future, true);
        }
    }

    pub(super) fn remove(&self, id: u64, future: Pin<Box<dyn Future<Output = ()>>>, killed: bool) {
        let slot = self.slots.borrow_mut().remove(&id);
        drop(future);
        lock(&self.woken).tasks.remove(&id);
        if let Some(slot) = slot.filter(|_| killed) {
            (slot.killed)();
        }
    }

    /// Drops all tasks. `spawned` returns the tasks that `Clock::spawn` has spawned meanwhile.
    pub(super) fn clear(&self, spawned: impl Fn() -> Vec<Task>) {
        loop {
            // The drop of a task may spawn a late write.
            self.adopt(spawned());
            let Some((_, slot)) = self.slots.borrow_mut().pop_first() else { break };
            drop(slot);
        }
        let mut woken = lock(&self.woken);
        woken.tasks.clear();
        woken.scheduler = None;
    }
}
