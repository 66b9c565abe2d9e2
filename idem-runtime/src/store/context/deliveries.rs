//! Beats of deliveries: at intervals, a callback extends the message at its broker while the message is being handled.
//!
//! The renewal task of a store handle finds deliveries that are due, like leases, but does not run their callbacks.
//! Each callback is a task of its own on the runtime of its delivery, where the client of the broker usually runs. So a
//! callback that hangs, blocks or panics costs neither a lease nor another delivery.

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::clock::{Clock, Instant, Sleep, Task};
use crate::key::Key;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, Shards, lock};

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
    /// Key of the first call of the delivery; `None` for a delivery without a key.
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

    /// Reports that the broker no longer extends this message, or has given the message to another consumer. No beat
    /// follows. Depending on [`on_beat_lost`](crate::future::Observe::on_beat_lost), the body goes on or is cancelled.
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

/// Callback of each beat. An `Err` holds the reason why the broker did not extend the message.
pub(crate) type Callback = Box<dyn FnMut(Beat) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send>;

/// A delivery whose message the broker extends at each beat.
pub(super) struct Delivery {
    key: Option<Key>,
    every: Duration,
    began: Instant,
    callback: Mutex<Callback>,
    /// Runtime that polled the delivery when its beats began, and that runs the callbacks; `None` outside of a runtime.
    home: Option<Handle>,
    lost: AtomicBool,
    over: AtomicBool,
    ended: Notify,
    /// Wakes the delivery when a beat reports that the broker no longer extends the message, or has given it to
    /// another consumer.
    waker: Mutex<Option<Waker>>,
}

impl Delivery {
    pub(super) fn new(key: Option<Key>, every: Duration, began: Instant, callback: Callback) -> Arc<Self> {
        Arc::new(Self {
            key,
            every: every.max(SHORTEST),
            began,
            callback: Mutex::new(callback),
            home: Handle::try_current().ok(),
            lost: AtomicBool::new(false),
            over: AtomicBool::new(false),
            ended: Notify::new(),
            waker: Mutex::new(None),
        })
    }

    pub(super) fn every(&self) -> Duration {
        self.every
    }

    /// Returns whether the broker no longer extends the message. `waker` is woken once the broker no longer extends it.
    pub(super) fn is_lost_for(&self, waker: &Waker) -> bool {
        {
            let mut known = lock(&self.waker);
            match &mut *known {
                Some(known) if known.will_wake(waker) => {}
                known => *known = Some(waker.clone()),
            }
        }
        self.is_lost()
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// Ends the delivery, and cancels its running callback.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.ended.notify_one();
    }

    fn wake(&self) {
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Runs a callback on the runtime of its delivery. A test clock runs the task itself, so that the test decides the
    /// order of callbacks and renewals.
    fn spawn(&self, clock: &dyn Clock, task: Task) {
        match (&self.home, Handle::try_current()) {
            (Some(home), Ok(here)) if home.id() != here.id() => drop(home.spawn(task)),
            _ => clock.spawn(task),
        }
    }
}

/// Schedule of the beats of one delivery.
struct BeatSchedule {
    delivery: Arc<Delivery>,
    due: Instant,
    /// Number of beats of the delivery so far.
    beats: u32,
    /// True while a callback of the delivery runs.
    calling: bool,
}

/// Number of shards of a [`DeliveryTable`].
const SHARDS: usize = 16;

/// Deliveries with beats of one store handle, in the order in which the beats began.
#[derive(Default)]
pub(super) struct DeliveryTable {
    shards: Shards<BTreeMap<u64, BeatSchedule>, SHARDS>,
    started: AtomicU64,
}

/// A callback that is due.
pub(super) struct DueBeat {
    /// Number of the delivery in its table.
    pub(super) number: u64,
    pub(super) beat: Beat,
}

/// End of a callback.
pub(super) enum CallbackEnd {
    /// The delivery ended before its callback returned.
    Ended,
    /// The broker no longer extends the message.
    Lost,
    /// The callback succeeded: the broker has extended the message.
    Told,
    /// The callback failed; holds the time of the next beat.
    Failed(Instant),
}

impl DeliveryTable {
    fn shard(&self, number: u64) -> MutexGuard<'_, BTreeMap<u64, BeatSchedule>> {
        self.shards.shard(usize::try_from(number % SHARDS as u64).unwrap_or_default())
    }

    /// Adds a delivery whose first beat is due at `due`. Returns the number of the delivery.
    pub(super) fn insert(&self, delivery: &Arc<Delivery>, due: Instant) -> u64 {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let scheduled = BeatSchedule { delivery: Arc::clone(delivery), due, beats: 0, calling: false };
        self.shard(number).insert(number, scheduled);
        number
    }

    pub(super) fn remove(&self, number: u64) {
        self.shard(number).remove(&number);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.is_empty())
    }

    /// Returns the beats that are due by `now` or soon after. Lowers `next` to the time of the earliest beat that
    /// follows.
    pub(super) fn due(&self, now: Instant, next: &mut Instant) -> Vec<DueBeat> {
        let mut due = Vec::new();
        for mut shard in self.shards.iter() {
            for (number, scheduled) in shard.iter_mut().filter(|(_, it)| !it.delivery.is_lost()) {
                let every = scheduled.delivery.every;
                // A beat may come up to an eighth of its interval early, so that one scan serves many deliveries.
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

    /// Records the end of a callback at `now`. After a failure the next beat is due a quarter of the interval later.
    pub(super) fn called(&self, number: u64, failed: bool, now: impl FnOnce() -> Instant) -> CallbackEnd {
        let mut shard = self.shard(number);
        let Some(scheduled) = shard.get_mut(&number) else { return CallbackEnd::Ended };
        scheduled.calling = false;
        match (failed, scheduled.delivery.is_lost()) {
            (_, true) => CallbackEnd::Lost,
            (false, false) => CallbackEnd::Told,
            (true, false) => {
                scheduled.due = scheduled.due.min(now().saturating_add(scheduled.delivery.every / 4));
                CallbackEnd::Failed(scheduled.due)
            }
        }
    }

    /// Wakes the tasks of all deliveries.
    pub(super) fn wake(&self) {
        for at in 0..SHARDS {
            let deliveries: Vec<_> = self.shards.shard(at).values().map(|it| Arc::clone(&it.delivery)).collect();
            for delivery in deliveries {
                delivery.wake();
            }
        }
    }
}

impl Beat {
    /// Runs the callback of this beat on the runtime of its delivery, until the delivery ends or the time limit is
    /// over. `report` receives the key, the time since the beats of the delivery began, and the result of the callback.
    /// `report` is dropped without a call if the callback panics, if its runtime drops the task, or if the delivery has
    /// ended.
    pub(super) fn call(
        self,
        clock: &dyn Clock,
        report: impl FnOnce(Option<&Key>, Duration, Result<(), String>) + Send + 'static,
    ) {
        let delivery = Arc::clone(&self.delivery);
        // The timer is created here, because the runtime of a delivery may have no timers.
        let limit = clock.sleep(delivery.every.max(CALLBACK_LIMIT));
        delivery.spawn(clock, Box::pin(call(self, limit, report)));
    }
}

/// Runs a callback until its delivery ends, and for at most `limit`.
async fn call(beat: Beat, mut limit: Sleep, report: impl FnOnce(Option<&Key>, Duration, Result<(), String>)) {
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
    report(delivery.key.as_ref(), elapsed, told);
}
