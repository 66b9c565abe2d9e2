//! Duplicates of one key that wait in one store handle: the store waits once for all of them.
//!
//! The wait is a future that any of them polls, so none depends on another one's call: that one may be dropped, or not be
//! polled any more. What the store tells at the end of the wait is for those only who had come before it was asked. If it tells
//! that the key may be free, one of them takes the turn and reserves, while the others wait for what it learns.

#[cfg(all(test, shuttle))]
mod interleavings;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::runtime::{Handle, Id};

use super::{Inspection, Standing, Store};
use crate::key::Key;
use crate::metrics::StoreOp;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

/// The pause after the store has failed to wait for the running attempt.
const AFTER_A_FAILURE: Duration = Duration::from_millis(100);
/// A wait that ends so soon, although the attempt goes on, is followed by a pause: a store may return early.
const EARLY: Duration = Duration::from_millis(10);
/// How long the others wait for the one that has the turn. Its call may stand still, and must not delay them for long.
const LONGEST_TURN: Duration = Duration::from_millis(100);

/// The waits of the store handles that share their heartbeats.
#[derive(Default)]
pub(crate) struct Flights(Mutex<HashMap<Place, Arc<Flight>>>);

/// Where a wait is shared.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Place {
    /// The address of the handle, which the flight keeps alive: a wrapper may show other records under the same key.
    handle: usize,
    /// Timers and connections stand still with their runtime.
    runtime: Option<Id>,
    key: Key,
}

/// One wait, and those who are aboard.
struct Flight {
    place: Place,
    store: Arc<dyn Store>,
    /// How many have come aboard. A member's number is how many there were before it.
    joined: Arc<AtomicU64>,
    members: Mutex<Members>,
    /// What the members poll; locked before all other locks.
    wait: Mutex<Option<Wait>>,
    /// Whether `wait` has something to do.
    woken: AtomicBool,
}

struct Members {
    aboard: usize,
    wakers: BTreeMap<u64, Waker>,
    stage: Stage,
}

enum Stage {
    /// The store is asked to wait.
    Waiting,
    /// The key may be free: the next member that is polled takes the turn.
    Free,
    /// One member has the turn.
    Taken,
    /// What was told is for the members with a smaller number; `None` says that each has to ask.
    Landed(Option<(Arc<Inspection>, u64)>),
}

type Wait = Pin<Box<dyn Future<Output = Seen> + Send>>;

/// How a [`Wait`] ends.
enum Seen {
    /// What is recorded, for those who had come before it was asked for.
    Told(Arc<Inspection>, u64),
    /// No attempt is known to hold the key.
    Free,
    /// The one that has the turn takes too long.
    Overdue,
}

/// What a waiting duplicate learns.
pub(crate) enum News {
    /// The key is not held, and this is recorded.
    Told(Arc<Inspection>),
    /// The key may be free. Reserve it, and [`settle`](Aboard::settle) for the others.
    Turn,
    /// Nothing: reserve the key.
    Ask,
}

/// A duplicate that waits together with others. Once it has learned [`News::Turn`] and has settled, it may be polled again.
pub(crate) struct Aboard {
    flight: Arc<Flight>,
    number: u64,
    has_turn: bool,
}

impl Aboard {
    /// Waits for attempt `attempt` of `key`, whose lease lapses in `lapses_in`, together with all who do so in this handle and
    /// this runtime.
    pub(crate) fn join(store: &Arc<dyn Store>, key: &Key, attempt: u32, lapses_in: Duration) -> Self {
        let place = Place {
            handle: Arc::as_ptr(store).cast::<()>().addr(),
            runtime: Handle::try_current().ok().map(|runtime| runtime.id()),
            key: key.clone(),
        };
        let mut flights = lock(&store.heartbeats().flights().0);
        let flight = flights.entry(place).or_insert_with_key(|place| {
            let joined = Arc::default();
            let wait = watch(Arc::clone(store), place.key.clone(), Arc::clone(&joined), attempt, lapses_in);
            Arc::new(Flight {
                place: place.clone(),
                store: Arc::clone(store),
                joined,
                members: Mutex::new(Members { aboard: 0, wakers: BTreeMap::new(), stage: Stage::Waiting }),
                wait: Mutex::new(Some(wait)),
                woken: AtomicBool::new(true),
            })
        });
        let flight = Arc::clone(flight);
        lock(&flight.members).aboard += 1;
        let number = flight.joined.fetch_add(1, Ordering::SeqCst);
        drop(flights);
        Self { flight, number, has_turn: false }
    }

    /// Tells the others what the member with the turn was answered: the attempt that holds the key, or has ended, and for how
    /// long its lease holds. `None`: each of them asks for itself.
    pub(crate) fn settle(&mut self, attempt: Option<(u32, Duration)>) {
        if !std::mem::take(&mut self.has_turn) {
            return;
        }
        let flight = &self.flight;
        let mut wait = lock(&flight.wait);
        let over = match attempt {
            Some((attempt, lapses_in)) => {
                let mut members = lock(&flight.members);
                // They may have stopped waiting for this one.
                let Stage::Taken = members.stage else { return };
                members.stage = Stage::Waiting;
                drop(members);
                let (store, key) = (Arc::clone(&flight.store), flight.place.key.clone());
                wait.replace(watch(store, key, Arc::clone(&flight.joined), attempt, lapses_in))
            }
            None => {
                flight.land(None);
                wait.take()
            }
        };
        drop(wait);
        drop(over);
        flight.wake_by_ref();
    }
}

impl Future for Aboard {
    type Output = News;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<News> {
        let this = &mut *self;
        let flight = &this.flight;
        loop {
            let mut members = lock(&flight.members);
            match &members.stage {
                Stage::Landed(Some((told, entitled))) if this.number < *entitled => {
                    return Poll::Ready(News::Told(Arc::clone(told)));
                }
                Stage::Landed(_) => return Poll::Ready(News::Ask),
                Stage::Free => {
                    members.stage = Stage::Taken;
                    this.has_turn = true;
                    return Poll::Ready(News::Turn);
                }
                Stage::Waiting | Stage::Taken => {
                    members.wakers.entry(this.number).or_insert_with(|| cx.waker().clone()).clone_from(cx.waker());
                }
            }
            drop(members);
            if !flight.woken.swap(false, Ordering::SeqCst) || !flight.advance() {
                return Poll::Pending;
            }
        }
    }
}

impl Drop for Aboard {
    fn drop(&mut self) {
        let flight = &self.flight;
        let (mut is_last, mut is_free) = (false, false);
        {
            let mut flights = lock(&flight.store.heartbeats().flights().0);
            let mut members = lock(&flight.members);
            members.wakers.remove(&self.number);
            members.aboard -= 1;
            if members.aboard == 0 {
                is_last = true;
                flight.leave(&mut flights);
            }
            if self.has_turn && matches!(members.stage, Stage::Taken) {
                is_free = true;
                members.stage = Stage::Free;
            }
        }
        if is_last {
            // The wait knows its flight, by the wakers that it has left: both would stay.
            let over = lock(&flight.wait).take();
            drop(over);
        } else if is_free {
            flight.wake_members();
        }
    }
}

impl Flight {
    /// Polls the wait. Returns whether there is news.
    fn advance(self: &Arc<Self>) -> bool {
        /// A store that panics ends the wait for all.
        struct Lands<'a>(&'a Flight);

        impl Drop for Lands<'_> {
            fn drop(&mut self) {
                self.0.land(None);
                self.0.wake_members();
            }
        }

        let mut wait = lock(&self.wait);
        let Some(mut polled) = wait.take() else { return false };
        let lands = Lands(self);
        let seen = polled.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(self))));
        std::mem::forget(lands);
        match seen {
            Poll::Pending => {
                *wait = Some(polled);
                return false;
            }
            Poll::Ready(Seen::Told(found, entitled)) => self.land(Some((found, entitled))),
            Poll::Ready(Seen::Overdue) => self.land(None),
            Poll::Ready(Seen::Free) => {
                let overdue = self.store.heartbeats().clock().sleep(LONGEST_TURN);
                *wait = Some(Box::pin(async move {
                    overdue.await;
                    Seen::Overdue
                }));
                lock(&self.members).stage = Stage::Free;
                self.woken.store(true, Ordering::SeqCst);
            }
        }
        drop(wait);
        drop(polled);
        self.wake_members();
        true
    }

    /// From here on nobody comes aboard.
    fn land(&self, told: Option<(Arc<Inspection>, u64)>) {
        let mut flights = lock(&self.store.heartbeats().flights().0);
        self.leave(&mut flights);
        lock(&self.members).stage = Stage::Landed(told);
    }

    fn leave(&self, flights: &mut HashMap<Place, Arc<Self>>) {
        if flights.get(&self.place).is_some_and(|flight| std::ptr::eq(&raw const **flight, self)) {
            flights.remove(&self.place);
        }
    }

    fn wake_members(&self) {
        let wakers = std::mem::take(&mut lock(&self.members).wakers);
        wakers.into_values().for_each(Waker::wake);
    }
}

impl Wake for Flight {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        // All of them: the one that polled last may not be polled again.
        self.wake_members();
    }
}

/// Waits once, for `at_most`. Returns what the store has told; after a failure nothing, and a pause that is no longer than
/// `pause`.
pub(crate) async fn wait_once(
    store: &Arc<dyn Store>,
    key: &Key,
    attempt: u32,
    at_most: Duration,
    pause: Duration,
) -> Option<Inspection> {
    match store.wait(key, attempt, at_most).watched(store, StoreOp::Wait).await {
        // Nothing is replayed from a damaged record: a reservation says why.
        Ok(told) => told.filter(|found| found.damage.is_none()),
        Err(error) => {
            tracing::debug!(
                %key, store = store.name(), %error,
                "the wait for the running attempt failed; reserving again"
            );
            store.heartbeats().clock().sleep(pause.min(AFTER_A_FAILURE)).await;
            None
        }
    }
}

/// Waits until no attempt holds `key`.
fn watch(store: Arc<dyn Store>, key: Key, joined: Arc<AtomicU64>, mut attempt: u32, mut lapses_in: Duration) -> Wait {
    Box::pin(async move {
        let clock = store.heartbeats().clock();
        let mut asked_again = false;
        loop {
            let (entitled, began) = (joined.load(Ordering::SeqCst), clock.now());
            let told = wait_once(&store, &key, attempt, lapses_in, AFTER_A_FAILURE).await;
            let Some(found) = told else { return Seen::Free };
            match found.standing() {
                Standing::Running => {
                    let is_early = found.attempt() == attempt && clock.now().saturating_since(began) < EARLY;
                    (attempt, lapses_in) = (found.attempt(), found.lapses_in.unwrap_or_default());
                    if is_early {
                        clock.sleep(EARLY).await;
                    }
                }
                Standing::Lapsed | Standing::Released => return Seen::Free,
                // For those who have come meanwhile. The attempt is over, so this is one more look.
                _ if !asked_again && joined.load(Ordering::SeqCst) > entitled => asked_again = true,
                _ => return Seen::Told(Arc::new(found), entitled),
            }
        }
    })
}
