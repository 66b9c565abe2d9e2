//! Beats of deliveries: a periodic callback that tells the broker that its message is still being handled.
//!
//! The renewal task of a store handle looks for deliveries that are due, as for leases, but does not run their
//! callbacks. Each callback is a task of its own on the runtime of its delivery, where the client of the broker mostly
//! lives. So a callback that hangs, blocks or panics costs neither a lease nor another delivery.

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::{Leases, SHARDS, nanos};
use crate::clock::{Clock, Instant, Sleep, Task};
use crate::key::Key;
use crate::metrics::BrokerBeat;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};

/// Shortest time between two beats of a delivery.
const SHORTEST: Duration = Duration::from_millis(10);
/// Shortest time limit of a callback, even if the next beat is due earlier.
const CALLBACK_LIMIT: Duration = Duration::from_secs(1);

/// Argument of a callback of [`Observe::on_beat`](crate::future::Observe::on_beat).
#[derive(Clone)]
pub struct Beat {
    delivery: Arc<Delivery>,
    number: u32,
    elapsed: Duration,
}

impl Beat {
    /// Key of the first call of the delivery; `None` if it has no key.
    pub fn key(&self) -> Option<&Key> {
        self.delivery.key.as_ref()
    }

    /// Number of the beat, from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Time since the first call of the delivery first waited.
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// Reports that the broker no longer extends this message, or has given it to another consumer. No beat follows.
    /// Depending on [`on_beat_lost`](crate::future::Observe::on_beat_lost), the body goes on or is cancelled.
    pub fn lost(&self) {
        if self.delivery.lost.swap(true, Ordering::SeqCst) {
            return;
        }
        tracing::warn!(
            key = self.delivery.key.as_ref().map(tracing::field::display), elapsed = ?self.elapsed,
            "the broker extends this message no further; it may be delivered again while its handler runs"
        );
        self.delivery.wake();
    }
}

impl fmt::Debug for Beat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, elapsed, .. } = self;
        f.debug_struct("Beat").field("key", &self.key()).field("number", number).field("elapsed", elapsed).finish()
    }
}

/// Callback of each beat. An `Err` holds the reason why the broker could not be told.
pub(crate) type Callback = Box<dyn FnMut(Beat) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send>;

/// A delivery that beats.
pub(super) struct Delivery {
    key: Option<Key>,
    every: Duration,
    began: Instant,
    callback: Mutex<Callback>,
    /// Runtime that polls the delivery.
    home: Option<Handle>,
    lost: AtomicBool,
    over: AtomicBool,
    ended: Notify,
    /// Wakes the delivery when its message is lost.
    waker: Mutex<Option<Waker>>,
}

impl Delivery {
    pub(super) fn wake(&self) {
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Runs a callback of the delivery on its own runtime. A clock of tests runs the renewal task on the same runtime
    /// as the delivery, and decides the order of both.
    fn spawn(&self, clock: &dyn Clock, task: Task) {
        match (&self.home, Handle::try_current()) {
            (Some(home), Ok(here)) if home.id() != here.id() => drop(home.spawn(task)),
            _ => clock.spawn(task),
        }
    }
}

/// Schedule of a delivery in its store handle.
pub(super) struct BeatSchedule {
    pub(super) delivery: Arc<Delivery>,
    due: Instant,
    /// Number of beats so far.
    beats: u32,
    /// True while a callback runs.
    calling: bool,
}

pub(super) type Deliveries = BTreeMap<u64, BeatSchedule>;

/// Timer of a store handle, for deliveries.
#[derive(Clone)]
pub struct Timer(pub(super) Arc<Leases>);

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Timer")
    }
}

impl Timer {
    /// Calls `callback` every `every` from now on, until the returned value is dropped.
    pub(crate) fn start(&self, key: Option<Key>, every: Duration, callback: Callback) -> BeatGuard {
        let leases = &self.0;
        let (now, every) = (leases.clock.now(), every.max(SHORTEST));
        let delivery = Arc::new(Delivery {
            key,
            every,
            began: now,
            callback: Mutex::new(callback),
            home: Handle::try_current().ok(),
            lost: AtomicBool::new(false),
            over: AtomicBool::new(false),
            ended: Notify::new(),
            waker: Mutex::new(None),
        });
        let number = leases.deliveries_started.fetch_add(1, Ordering::Relaxed);
        let due = now.saturating_add(every);
        let scheduled = BeatSchedule { delivery: Arc::clone(&delivery), due, beats: 0, calling: false };
        leases.deliveries(number).insert(number, scheduled);
        leases.expect_beat_before(due);
        BeatGuard { leases: Arc::clone(leases), number, delivery }
    }
}

/// A delivery that beats until this value is dropped.
pub(crate) struct BeatGuard {
    leases: Arc<Leases>,
    number: u64,
    delivery: Arc<Delivery>,
}

impl BeatGuard {
    /// Returns whether the broker no longer extends the message. Wakes `waker` when that changes.
    pub(crate) fn is_lost(&self, waker: &Waker) -> bool {
        {
            let mut known = lock(&self.delivery.waker);
            match &mut *known {
                Some(known) if known.will_wake(waker) => {}
                known => *known = Some(waker.clone()),
            }
        }
        self.leases.expect_beats_of_deliveries();
        self.delivery.lost.load(Ordering::SeqCst)
    }
}

impl Drop for BeatGuard {
    /// Drops a running callback too: its requests would reach the broker after the message is settled.
    fn drop(&mut self) {
        self.leases.deliveries(self.number).remove(&self.number);
        self.delivery.over.store(true, Ordering::SeqCst);
        self.delivery.ended.notify_one();
        // The task of a transaction serves only this delivery, so it must end now. The task of a store ends at its next
        // scan.
        if !self.leases.beats {
            self.leases.earlier().notify_one();
        }
    }
}

/// A callback that is due.
pub(super) struct DueBeat {
    number: u64,
    beat: Beat,
}

impl Leases {
    fn deliveries(&self, number: u64) -> MutexGuard<'_, Deliveries> {
        self.delivery_shard(usize::try_from(number % SHARDS as u64).unwrap_or_default())
    }

    /// Number of deliveries that beat.
    pub(super) fn beating(&self) -> usize {
        (0..SHARDS).map(|at| self.delivery_shard(at).len()).sum()
    }

    /// Returns the deliveries that are due by `now` or soon after. Lowers `next` to the earliest time at which one is
    /// due again.
    pub(super) fn due_deliveries(&self, now: Instant, next: &mut Instant) -> Vec<DueBeat> {
        let mut due = Vec::new();
        for at in 0..SHARDS {
            let mut shard = self.delivery_shard(at);
            let deliveries = shard.iter_mut().filter(|(_, it)| !it.delivery.lost.load(Ordering::SeqCst));
            for (number, scheduled) in deliveries {
                let every = scheduled.delivery.every;
                // Up to an eighth early, as for leases, so that one scan serves many deliveries.
                if scheduled.due <= now.saturating_add(every / 8) {
                    scheduled.due = now.saturating_add(every);
                    if !scheduled.calling {
                        scheduled.calling = true;
                        scheduled.beats = scheduled.beats.saturating_add(1);
                        let elapsed = now.saturating_since(scheduled.delivery.began);
                        let delivery = Arc::clone(&scheduled.delivery);
                        let beat = Beat { delivery, number: scheduled.beats, elapsed };
                        due.push(DueBeat { number: *number, beat });
                    }
                }
                *next = (*next).min(scheduled.due);
            }
        }
        due
    }

    /// Starts the callback of a delivery.
    pub(super) fn call(self: &Arc<Self>, DueBeat { number, beat }: DueBeat) {
        let delivery = Arc::clone(&beat.delivery);
        // The timer is created here, because the runtime of a delivery may have no timers.
        let limit = self.clock.sleep(delivery.every.max(CALLBACK_LIMIT));
        let calling = CallbackGuard { leases: Arc::clone(self), number, failed: true };
        delivery.spawn(&*self.clock, Box::pin(call(calling, beat, limit)));
    }

    /// Wakes the deliveries, so that the first of them starts another renewal task.
    pub(super) fn wake_deliveries(&self) {
        for at in 0..SHARDS {
            let deliveries: Vec<_> = self.delivery_shard(at).values().map(|it| Arc::clone(&it.delivery)).collect();
            for delivery in deliveries {
                delivery.wake();
            }
        }
    }

    /// Ends the callback of a delivery. A callback that failed is repeated soon.
    fn called(self: &Arc<Self>, number: u64, failed: bool) {
        let mut shard = self.deliveries(number);
        let Some(scheduled) = shard.get_mut(&number) else { return };
        scheduled.calling = false;
        let lost = scheduled.delivery.lost.load(Ordering::SeqCst);
        if let Some(metrics) = self.metrics.get() {
            metrics.broker_beat(match (failed, lost) {
                (_, true) => BrokerBeat::Lost,
                (true, false) => BrokerBeat::Failed,
                (false, false) => BrokerBeat::Told,
            });
        }
        if failed && !lost {
            let soon = self.clock.now().saturating_add(scheduled.delivery.every / 4);
            scheduled.due = scheduled.due.min(soon);
            let due = scheduled.due;
            drop(shard);
            self.expect_beat_before(due);
        }
    }

    /// Ensures that the renewal task scans again by `due`.
    fn expect_beat_before(self: &Arc<Self>, due: Instant) {
        if nanos(due) < self.next_beat.load(Ordering::SeqCst) {
            self.expect_beat();
        }
    }

    /// Starts a renewal task if none is running: its runtime may have shut down.
    fn expect_beats_of_deliveries(self: &Arc<Self>) {
        if self.next_beat.load(Ordering::SeqCst) == super::NEVER {
            self.expect_beat();
        }
    }
}

/// Ends a callback, even if it panics or its runtime drops it.
struct CallbackGuard {
    leases: Arc<Leases>,
    number: u64,
    failed: bool,
}

impl Drop for CallbackGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the callback of `on_beat` panicked; it is called again");
        }
        self.leases.called(self.number, self.failed);
    }
}

/// Runs the callback of a delivery until the delivery is over, and for at most `limit`.
async fn call(mut calling: CallbackGuard, beat: Beat, mut limit: Sleep) {
    let (delivery, elapsed) = (Arc::clone(&beat.delivery), beat.elapsed);
    let mut ended = pin!(delivery.ended.notified());
    ended.as_mut().enable();
    if delivery.over.load(Ordering::SeqCst) {
        return;
    }
    // A delivery runs only one callback at a time, so no other task waits for this lock.
    let mut told = {
        let mut callback = lock(&delivery.callback);
        callback(beat)
    };
    let told = poll_fn(|cx| {
        if ended.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        if let Poll::Ready(told) = told.as_mut().poll(cx) {
            return Poll::Ready(told);
        }
        limit.as_mut().poll(cx).map(|()| Err("no answer in time".to_owned()))
    })
    .await;
    calling.failed = told.is_err();
    let leases = &calling.leases;
    match told {
        Ok(()) => leases.broker_outage.broker_answers(|| leases.clock.now()),
        Err(error) => leases.broker_outage.broker_fails(delivery.key.as_ref(), elapsed, &error, leases.clock.now()),
    }
}
