//! Duplicates of one key that wait in one store handle: the store waits once for all of them.
//!
//! These duplicates are the members of a *flight*. The wait is a future that all members poll. So no member depends on
//! the call of another member, which may be dropped or no longer polled. Only members who joined before the store was
//! asked use the record that ends the wait. If the record shows that the key may be free, one member takes the turn and
//! reserves the key, while the other members wait for its result.

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

/// Pause after a failed [`Store::wait`].
const AFTER_A_FAILURE: Duration = Duration::from_millis(100);
/// [`Store::wait`] may return before the attempt has ended. If it returns within this time and the attempt still runs,
/// a pause follows.
const EARLY: Duration = Duration::from_millis(10);
/// Longest time for which members wait for the member with the turn, whose call may no longer be polled.
const LONGEST_TURN: Duration = Duration::from_millis(100);

/// Shared waits of the store handles with one `StoreContext`.
#[derive(Default)]
pub(crate) struct Flights(Mutex<HashMap<WaitId, Arc<Flight>>>);

/// Identifies a wait that duplicates can share: handle, runtime and key.
#[derive(Clone, PartialEq, Eq, Hash)]
struct WaitId {
    /// Address of the handle, which the flight keeps alive. Two handles never share a wait, because a wrapper may show
    /// other records under the same key.
    handle: usize,
    /// Runtime that polls the wait: timers and connections stop with their runtime.
    runtime: Option<Id>,
    key: Key,
}

/// A wait that several duplicates share. The members of a flight are its duplicates.
struct Flight {
    place: WaitId,
    store: Arc<dyn Store>,
    /// Number of members so far. Each member is numbered by the count before it joined.
    joined: Arc<AtomicU64>,
    members: Mutex<Members>,
    /// Future that the members poll. The lock of this future is taken before all other locks.
    wait: Mutex<Option<Wait>>,
    /// True if the future in `wait` must be polled: it is new, or it was woken after its last poll.
    woken: AtomicBool,
}

struct Members {
    aboard: usize,
    wakers: BTreeMap<u64, Waker>,
    stage: Stage,
}

enum Stage {
    /// The store waits for the attempt.
    Waiting,
    /// The key may be free: the member that is polled next takes the turn.
    Free,
    /// One member has the turn: it reserves the key for all members.
    Taken,
    /// The wait is over. Members with a number below the `u64` use the record; all other members reserve. `None`: every
    /// member reserves.
    Landed(Option<(Arc<Inspection>, u64)>),
}

type Wait = Pin<Box<dyn Future<Output = WaitEnd> + Send>>;

/// End of a [`Wait`].
enum WaitEnd {
    /// The record, and the number of members who joined before the store was asked: only these members use the record.
    Told(Arc<Inspection>, u64),
    /// The key may be free: no attempt is known to hold it.
    Free,
    /// The member with the turn has not reserved in time.
    Overdue,
}

/// End of the wait, for one duplicate.
pub(crate) enum WaitOutcome {
    /// No attempt holds the key; the wait returned this record.
    Told(Arc<Inspection>),
    /// The key may be free, and this duplicate has the turn. The duplicate with the turn must reserve the key, and then
    /// pass the result to the other duplicates with [`settle`](WaitTicket::settle).
    Turn,
    /// The record is unknown: this duplicate must reserve the key.
    Ask,
}

/// A duplicate that waits together with other duplicates. A ticket may be polled again after [`WaitOutcome::Turn`] and
/// a call of `settle`.
pub(crate) struct WaitTicket {
    flight: Arc<Flight>,
    number: u64,
    has_turn: bool,
}

impl WaitTicket {
    /// Waits for attempt `attempt` of `key`, whose lease lapses in `lapses_in`, together with all other duplicates of
    /// the key in this handle and this runtime.
    pub(crate) fn join(store: &Arc<dyn Store>, key: &Key, attempt: u32, lapses_in: Duration) -> Self {
        let place = WaitId {
            handle: Arc::as_ptr(store).cast::<()>().addr(),
            runtime: Handle::try_current().ok().map(|runtime| runtime.id()),
            key: key.clone(),
        };
        let mut flights = lock(&store.context().flights().0);
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

    /// Passes the result of the member with the turn to the other members. `attempt`: number of the attempt that holds
    /// the key or has ended, and the remaining time of its lease. `None`: every other member reserves.
    pub(crate) fn settle(&mut self, attempt: Option<(u32, Duration)>) {
        if !std::mem::take(&mut self.has_turn) {
            return;
        }
        let flight = &self.flight;
        let mut wait = lock(&flight.wait);
        let over = match attempt {
            Some((attempt, lapses_in)) => {
                let mut members = lock(&flight.members);
                // The turn may be over: then the other members no longer wait for this member.
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

impl Future for WaitTicket {
    type Output = WaitOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<WaitOutcome> {
        let this = &mut *self;
        let flight = &this.flight;
        loop {
            let mut members = lock(&flight.members);
            match &members.stage {
                Stage::Landed(Some((told, entitled))) if this.number < *entitled => {
                    return Poll::Ready(WaitOutcome::Told(Arc::clone(told)));
                }
                Stage::Landed(_) => return Poll::Ready(WaitOutcome::Ask),
                Stage::Free => {
                    members.stage = Stage::Taken;
                    this.has_turn = true;
                    return Poll::Ready(WaitOutcome::Turn);
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

impl Drop for WaitTicket {
    fn drop(&mut self) {
        let flight = &self.flight;
        let (mut is_last, mut is_free) = (false, false);
        {
            let mut flights = lock(&flight.store.context().flights().0);
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
            // The wait and its flight refer to each other through the wakers that the wait stored. Without this `take`,
            // the pair would never be dropped.
            let over = lock(&flight.wait).take();
            drop(over);
        } else if is_free {
            flight.wake_members();
        }
    }
}

impl Flight {
    /// Polls the wait. Returns whether the stage has changed.
    fn advance(self: &Arc<Self>) -> bool {
        /// Ends the wait for all members if the store panics in a poll.
        struct FlightGuard<'a>(&'a Flight);

        impl Drop for FlightGuard<'_> {
            fn drop(&mut self) {
                self.0.land(None);
                self.0.wake_members();
            }
        }

        let mut wait = lock(&self.wait);
        let Some(mut polled) = wait.take() else { return false };
        let lands = FlightGuard(self);
        let seen = polled.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(self))));
        std::mem::forget(lands);
        match seen {
            Poll::Pending => {
                *wait = Some(polled);
                return false;
            }
            Poll::Ready(WaitEnd::Told(found, entitled)) => self.land(Some((found, entitled))),
            Poll::Ready(WaitEnd::Overdue) => self.land(None),
            Poll::Ready(WaitEnd::Free) => {
                let overdue = self.store.context().clock().sleep(LONGEST_TURN);
                *wait = Some(Box::pin(async move {
                    overdue.await;
                    WaitEnd::Overdue
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

    /// Ends the flight with this record. From here on no duplicate can join the flight.
    fn land(&self, told: Option<(Arc<Inspection>, u64)>) {
        let mut flights = lock(&self.store.context().flights().0);
        self.leave(&mut flights);
        lock(&self.members).stage = Stage::Landed(told);
    }

    fn leave(&self, flights: &mut HashMap<WaitId, Arc<Self>>) {
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
        // All members are woken, because the member that polled last may not be polled again.
        self.wake_members();
    }
}

/// Waits once, for at most `at_most`. Returns the record that the store returned. After a failure the function sleeps
/// for at most `pause` and returns `None`.
pub(crate) async fn wait_once(
    store: &Arc<dyn Store>,
    key: &Key,
    attempt: u32,
    at_most: Duration,
    pause: Duration,
) -> Option<Inspection> {
    match store.wait(key, attempt, at_most).watched(store, StoreOp::Wait).await {
        // A damaged record has no result to replay. The reservation that follows reports the damage.
        Ok(told) => told.filter(|found| found.damage.is_none()),
        Err(error) => {
            tracing::debug!(
                %key, store = store.context().name(), %error,
                "the wait for the running attempt failed; reserving again"
            );
            store.context().clock().sleep(pause.min(AFTER_A_FAILURE)).await;
            None
        }
    }
}

/// Waits until no attempt holds `key`. Returns the record, or that the key may be free.
fn watch(store: Arc<dyn Store>, key: Key, joined: Arc<AtomicU64>, mut attempt: u32, mut lapses_in: Duration) -> Wait {
    Box::pin(async move {
        let clock = store.context().clock();
        let mut asked_again = false;
        loop {
            let (entitled, began) = (joined.load(Ordering::SeqCst), clock.now());
            let told = wait_once(&store, &key, attempt, lapses_in, AFTER_A_FAILURE).await;
            let Some(found) = told else { return WaitEnd::Free };
            match found.standing() {
                Standing::Running => {
                    let is_early = found.attempt() == attempt && clock.now().saturating_since(began) < EARLY;
                    (attempt, lapses_in) = (found.attempt(), found.lapses_in.unwrap_or_default());
                    if is_early {
                        clock.sleep(EARLY).await;
                    }
                }
                Standing::Lapsed | Standing::Released => return WaitEnd::Free,
                // Duplicates joined while the store was asked. The attempt is over, so one more read serves all
                // duplicates.
                _ if !asked_again && joined.load(Ordering::SeqCst) > entitled => asked_again = true,
                _ => return WaitEnd::Told(Arc::new(found), entitled),
            }
        }
    })
}
