//! The beats of deliveries: a callback that tells the broker, from time to time, that its message is still being handled.
//!
//! The renewal task of a store handle finds the deliveries that are due, as it finds leases, and runs none of their callbacks
//! itself. Each callback is a task of its own on the runtime of its delivery, where the client of the broker mostly lives. So
//! one that hangs, blocks or panics costs neither a lease nor another delivery.

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

/// The shortest time between two beats of a delivery.
const SHORTEST: Duration = Duration::from_millis(10);
/// A callback may take this long, even if the next beat is due earlier.
const CALLBACK_LIMIT: Duration = Duration::from_secs(1);

/// What a callback of [`Observe::on_beat`](crate::future::Observe::on_beat) is told.
#[derive(Clone)]
pub struct Beat {
    delivery: Arc<Delivery>,
    number: u32,
    elapsed: Duration,
}

impl Beat {
    /// The key of the first call of the delivery; `None` if it has none.
    pub fn key(&self) -> Option<&Key> {
        self.delivery.key.as_ref()
    }

    /// The number of the beat, from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// For how long the delivery has been under way, since its first call first waited for something.
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// Says that the broker extends this message no further, or has given it to somebody else: there are no more beats. The
    /// body goes on or is cancelled, as [`on_beat_lost`](crate::future::Observe::on_beat_lost) says.
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

/// What is called at each beat; an `Err` says why the broker could not be told.
pub(crate) type Callback = Box<dyn FnMut(Beat) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send>;

/// A delivery that beats.
pub(super) struct Delivery {
    key: Option<Key>,
    every: Duration,
    began: Instant,
    callback: Mutex<Callback>,
    /// The runtime that polls the delivery.
    home: Option<Handle>,
    lost: AtomicBool,
    over: AtomicBool,
    ended: Notify,
    /// Wakes the delivery when it is lost.
    waker: Mutex<Option<Waker>>,
}

impl Delivery {
    pub(super) fn wake(&self) {
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Where its callbacks run. A clock of tests runs the renewal task beside the delivery, and decides the order of both.
    fn spawn(&self, clock: &dyn Clock, task: Task) {
        match (&self.home, Handle::try_current()) {
            (Some(home), Ok(here)) if home.id() != here.id() => drop(home.spawn(task)),
            _ => clock.spawn(task),
        }
    }
}

/// The place of a delivery among those of its store handle.
pub(super) struct Scheduled {
    pub(super) delivery: Arc<Delivery>,
    due: Instant,
    /// How many beats there were.
    beats: u32,
    /// Whether a callback is under way.
    calling: bool,
}

pub(super) type Deliveries = BTreeMap<u64, Scheduled>;

/// The timer of a store handle, for deliveries.
#[derive(Clone)]
pub struct Timer(pub(super) Arc<Leases>);

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Timer")
    }
}

impl Timer {
    /// Calls `callback` every `every` from now on, until the returned value is dropped.
    pub(crate) fn start(&self, key: Option<Key>, every: Duration, callback: Callback) -> Beating {
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
        let scheduled = Scheduled { delivery: Arc::clone(&delivery), due, beats: 0, calling: false };
        leases.deliveries(number).insert(number, scheduled);
        leases.expect_beat_before(due);
        Beating { leases: Arc::clone(leases), number, delivery }
    }
}

/// A delivery that beats, until this is dropped.
pub(crate) struct Beating {
    leases: Arc<Leases>,
    number: u64,
    delivery: Arc<Delivery>,
}

impl Beating {
    /// Whether the broker extends the message no further. `waker` is woken when that changes.
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

impl Drop for Beating {
    /// A callback that is under way is dropped, too: what it has yet to ask for would come after the message is settled.
    fn drop(&mut self) {
        self.leases.deliveries(self.number).remove(&self.number);
        self.delivery.over.store(true, Ordering::SeqCst);
        self.delivery.ended.notify_one();
        // The task of a transaction has nothing else to do; one of a store ends with its next look.
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

    /// How many deliveries beat.
    pub(super) fn beating(&self) -> usize {
        (0..SHARDS).map(|at| self.delivery_shard(at).len()).sum()
    }

    /// The deliveries that are due by `now` or soon after. `next` becomes the time of the next one, if that is earlier.
    pub(super) fn due_deliveries(&self, now: Instant, next: &mut Instant) -> Vec<DueBeat> {
        let mut due = Vec::new();
        for at in 0..SHARDS {
            let mut shard = self.delivery_shard(at);
            let deliveries = shard.iter_mut().filter(|(_, it)| !it.delivery.lost.load(Ordering::SeqCst));
            for (number, scheduled) in deliveries {
                let every = scheduled.delivery.every;
                // Up to an eighth early, as with leases, so that one look serves many.
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
        // Made here: the runtime of a delivery may have no timers.
        let limit = self.clock.sleep(delivery.every.max(CALLBACK_LIMIT));
        let calling = Calling { leases: Arc::clone(self), number, failed: true };
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

    /// The callback of a delivery has ended. One that failed is called again soon.
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

    /// Makes sure that the renewal task looks again by `due`.
    fn expect_beat_before(self: &Arc<Self>, due: Instant) {
        if nanos(due) < self.next_beat.load(Ordering::SeqCst) {
            self.expect_beat();
        }
    }

    /// The runtime of the renewal task may have shut down.
    fn expect_beats_of_deliveries(self: &Arc<Self>) {
        if self.next_beat.load(Ordering::SeqCst) == super::NEVER {
            self.expect_beat();
        }
    }
}

/// Ends a callback, also one that panics or whose runtime drops it.
struct Calling {
    leases: Arc<Leases>,
    number: u64,
    failed: bool,
}

impl Drop for Calling {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the callback of `on_beat` panicked; it is called again");
        }
        self.leases.called(self.number, self.failed);
    }
}

/// Calls the callback of a delivery, unless and until the delivery is over, and for at most `limit`.
async fn call(mut calling: Calling, beat: Beat, mut limit: Sleep) {
    let (delivery, elapsed) = (Arc::clone(&beat.delivery), beat.elapsed);
    let mut ended = pin!(delivery.ended.notified());
    ended.as_mut().enable();
    if delivery.over.load(Ordering::SeqCst) {
        return;
    }
    // Only one callback of a delivery is under way, so nobody waits for this lock.
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
