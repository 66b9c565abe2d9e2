//! Lanes: the few tasks that send the operations of many callers, batch by batch.
//!
//! While nothing is in flight, the caller of an operation drives the operation itself. Otherwise operations gather in a
//! queue. A lane takes operations from the queue, and ends when the queue is empty. A lane does not wait for further
//! operations.

use std::ops::Deref;
use std::sync::Arc;

use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Handle, Mutex, lock};

#[cfg(all(test, shuttle))]
pub(crate) mod interleavings;

/// The queue of one owner, and the count of the lanes that empty the queue.
pub(crate) struct Lanes<Q> {
    runtime: Handle,
    /// True while a lone operation is in flight, driven by its caller.
    lone: AtomicBool,
    /// Number of running lanes. Written under `queue`, read without that lock as a hint.
    running: AtomicUsize,
    queue: Mutex<Q>,
}

/// Sends the operations that gather in a queue.
pub(crate) trait LaneOwner: Send + Sync + Sized + 'static {
    type Queue: Default + Send + 'static;

    fn lanes(&self) -> &Lanes<Self::Queue>;

    /// Sends batches until [`Lane::next`] returns `None`.
    fn run(lane: Lane<Self>) -> impl Future<Output = ()> + Send;

    /// Fails the operations of a queue that no lane will send: the runtime has shut down, or a lane has panicked.
    fn refuse(&self, queue: Self::Queue);
}

/// Right of one caller to send its own operation without the queue. The drop of this value returns the right.
pub(crate) struct LoneTurn<'a>(&'a AtomicBool);

impl Drop for LoneTurn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl<Q: Default> Lanes<Q> {
    /// Makes an empty queue whose lanes will run in the current runtime.
    pub(crate) fn new() -> Self {
        let (lone, running) = (AtomicBool::new(false), AtomicUsize::new(0));
        Self { runtime: Handle::current(), lone, running, queue: Mutex::default() }
    }

    /// Returns the runtime of the lanes.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Returns the right to send an operation alone, if nothing else is in flight.
    pub(crate) fn enter(&self) -> Option<LoneTurn<'_>> {
        let alone = self.running.load(Ordering::Relaxed) == 0 && !self.lone.swap(true, Ordering::Relaxed);
        alone.then(|| LoneTurn(&self.lone))
    }

    /// Runs `change` on the queue. Operations are added with [`gather`] only.
    #[cfg(feature = "redis")]
    pub(crate) fn with_queue<T>(&self, change: impl FnOnce(&mut Q) -> T) -> T {
        change(&mut lock(&self.queue))
    }
}

/// Adds an operation to the queue of `owner` by `add`, and makes sure that a lane will take the operation. Up to
/// `limit` lanes run simultaneously.
pub(crate) fn gather<O: LaneOwner, T>(owner: &Arc<O>, limit: usize, add: impl FnOnce(&mut O::Queue) -> T) -> T {
    let lanes = owner.lanes();
    let mut queue = lock(&lanes.queue);
    let added = add(&mut queue);
    let running = lanes.running.load(Ordering::Relaxed);
    if running < limit {
        lanes.running.store(running + 1, Ordering::Relaxed);
        drop(queue);
        lanes.runtime.spawn(O::run(Lane { owner: Arc::clone(owner), is_counted: true }));
    }
    added
}

/// A running lane.
pub(crate) struct Lane<O: LaneOwner> {
    owner: Arc<O>,
    /// True while the lane is counted in [`Lanes::running`].
    is_counted: bool,
}

impl<O: LaneOwner> Lane<O> {
    /// Returns the batch that `take` takes from the queue. Stops counting the lane if the queue is empty. The queue is
    /// read and the count lowered under one lock: otherwise no lane would take an operation that joins the queue in
    /// between.
    pub(crate) fn next<B>(&mut self, take: impl FnOnce(&mut O::Queue) -> Option<B>) -> Option<B> {
        let lanes = self.owner.lanes();
        let mut queue = lock(&lanes.queue);
        let batch = take(&mut queue);
        if batch.is_none() {
            lanes.running.fetch_sub(1, Ordering::Relaxed);
            self.is_counted = false;
        }
        batch
    }

    /// Returns the owner of the lane.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn owner(&self) -> &Arc<O> {
        &self.owner
    }
}

impl<O: LaneOwner> Deref for Lane<O> {
    type Target = O;

    fn deref(&self) -> &O {
        &self.owner
    }
}

impl<O: LaneOwner> Drop for Lane<O> {
    /// Refuses the operations in the queue if the lane is still counted. Such a lane has panicked, or its runtime is
    /// gone, and it may have been the last lane that could send these operations.
    fn drop(&mut self) {
        if self.is_counted {
            let lanes = self.owner.lanes();
            let mut queue = lock(&lanes.queue);
            lanes.running.fetch_sub(1, Ordering::Relaxed);
            let waiting = std::mem::take(&mut *queue);
            drop(queue);
            self.owner.refuse(waiting);
        }
    }
}
