//! Keeps leases alive: one renewal task for each store handle, whatever the number of leases.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::clock::{Clock, Instant, race};
use crate::lease::Owners;
use crate::sync::lock;
use crate::{Lease, Owner, Store, StoreError, StoreErrorKind, Write};

/// No renewal task is running, so no beat is planned.
const NEVER: u64 = u64::MAX;
/// The renewal task is looking through the leases: whoever registers one now must tell it to look again.
const LOOKING: u64 = NEVER - 1;
/// A power of two; enough that the threads of a large machine rarely meet at one lock.
const SHARDS: usize = 16;
/// The renewal task looks up at least this often, so that it ends soon after the last handler.
const LONGEST_SLEEP: Duration = Duration::from_secs(10);

/// The leases that one store handle keeps alive, and the writes it has still to make.
///
/// Every store owns one and hands it out from [`Store::heartbeats`]. A handler is registered when it is first pending;
/// one that ends before that pays nothing here. A single task then renews all leases in one call of [`Store::renew`] per
/// beat; it starts with the first lease, ends when there are none, and starts anew on the runtime of a living handler if
/// its own runtime shuts down.
///
/// It needs its runtime to run: a handler that blocks the only thread of a `current_thread` runtime stops the heartbeats
/// of all leases there. Put such work on `spawn_blocking`, and give each of several runtimes a store handle of its own.
pub struct Heartbeats {
    clock: Arc<dyn Clock>,
    owners: Owners,
    shards: [Mutex<Shard>; SHARDS],
    /// A lease that is due before this must wake the renewal task: nanoseconds since the clock's origin, [`LOOKING`] or
    /// [`NEVER`].
    next_beat: AtomicU64,
    running: AtomicBool,
    /// Whether leases are renewed at all.
    beats: bool,
    /// Wakes the renewal task for a lease that is due before `next_beat`.
    earlier: Notify,
    /// Writes and renewals under way that nobody's call waits for.
    under_way: AtomicUsize,
    flushed: Notify,
}

type Shard = HashMap<Owner, Registered, BuildHasherDefault<TokenHasher>>;

/// Takes the last bytes of an owner token as its hash: they are random already. The token is what is written last.
#[derive(Default)]
struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(tail) = bytes.last_chunk() {
            self.0 = u64::from_le_bytes(*tail);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

struct Registered {
    lease: Lease,
    /// When the last confirmed reservation or renewal was asked for: the lease is held for its length from here.
    confirmed_at: Instant,
    due: Instant,
    lost: bool,
    waker: Waker,
}

impl Registered {
    fn beat(&self) -> Duration {
        self.lease.lease / 3
    }
}

impl Heartbeats {
    /// The heartbeats of a new store handle.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            owners: Owners::new(clock.entropy()),
            clock,
            shards: Default::default(),
            next_beat: AtomicU64::new(NEVER),
            running: AtomicBool::new(false),
            beats: true,
            earlier: Notify::new(),
            under_way: AtomicUsize::new(0),
            flushed: Notify::new(),
        }
    }

    /// No heartbeats: for a store whose reservations need no lease, because they end with something else.
    pub fn none(clock: Arc<dyn Clock>) -> Self {
        Self { beats: false, ..Self::new(clock) }
    }

    /// The clock of the store handle.
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// Whether leases are renewed at all; if not, they end with something else, such as a transaction.
    #[cfg(feature = "cached")]
    pub(crate) fn renews(&self) -> bool {
        self.beats
    }

    #[cfg(any(feature = "memory", feature = "cached"))]
    pub(crate) fn clock_handle(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock)
    }

    /// An owner token for a new attempt.
    pub fn new_owner(&self) -> Owner {
        self.owners.next()
    }

    /// How many leases are being kept alive.
    pub fn live(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Waits until every late write and renewal is through: those of handlers that were cancelled or panicked, and the
    /// beat that is under way. Call it on shutdown, after the handlers have ended and before the runtime does.
    ///
    /// # Cancel safety
    /// Cancel safe; the writes go on.
    pub async fn flush(&self) {
        loop {
            let mut flushed = pin!(self.flushed.notified());
            flushed.as_mut().enable();
            if self.under_way.load(Ordering::SeqCst) == 0 {
                return;
            }
            flushed.await;
        }
    }

    fn shard(&self, owner: Owner) -> &Mutex<Shard> {
        &self.shards[usize::from(owner.as_bytes()[0]) % SHARDS]
    }

    /// Keeps `lease` alive until it is deregistered. `waker` is woken when the lease is found lost.
    pub(crate) fn register(&self, store: &dyn Store, lease: &Lease, confirmed_at: Instant, waker: &Waker) {
        if !self.beats {
            return;
        }
        let due = confirmed_at.saturating_add(lease.lease / 3);
        let registered = Registered { lease: lease.clone(), confirmed_at, due, lost: false, waker: waker.clone() };
        lock(self.shard(lease.owner)).insert(lease.owner, registered);
        self.expect_beat(store, due);
    }

    /// Whether the lease is still held as far as its heartbeat knows. `waker` is woken when that changes.
    pub(crate) fn is_held(&self, store: &dyn Store, owner: Owner, waker: &Waker) -> bool {
        let due = {
            let mut shard = lock(self.shard(owner));
            let Some(registered) = shard.get_mut(&owner) else { return true };
            if registered.lost {
                return false;
            }
            if !registered.waker.will_wake(waker) {
                registered.waker.clone_from(waker);
            }
            registered.due
        };
        // The runtime of the renewal task may have shut down: another handler's runtime has to carry on.
        if self.next_beat.load(Ordering::SeqCst) == NEVER {
            self.expect_beat(store, due);
        }
        true
    }

    /// Stops the heartbeat and says when the lease was last confirmed.
    pub(crate) fn deregister(&self, owner: Owner) -> Option<Instant> {
        lock(self.shard(owner)).remove(&owner).map(|registered| registered.confirmed_at)
    }

    /// Notes a renewal that somebody else made at `asked_at`.
    pub(crate) fn confirmed(&self, owner: Owner, asked_at: Instant) {
        if let Some(registered) = lock(self.shard(owner)).get_mut(&owner) {
            registered.confirmed_at = registered.confirmed_at.max(asked_at);
        }
    }

    /// Until when the lease of `owner` is sure to be held, if this handle keeps it alive.
    #[cfg(feature = "redis")]
    pub(crate) fn held_until(&self, owner: Owner) -> Option<Instant> {
        let shard = lock(self.shard(owner));
        let registered = shard.get(&owner).filter(|registered| !registered.lost)?;
        Some(registered.confirmed_at.saturating_add(registered.lease.lease))
    }

    /// How long `lease` is sure to be held, if it was last confirmed at `confirmed_at` or by a beat since.
    pub(crate) fn lease_remaining(&self, lease: &Lease, confirmed_at: Instant) -> Duration {
        if !self.beats {
            return lease.lease;
        }
        let confirmed_at = match lock(self.shard(lease.owner)).get(&lease.owner) {
            Some(registered) if registered.lost => return Duration::ZERO,
            Some(registered) => registered.confirmed_at.max(confirmed_at),
            None => confirmed_at,
        };
        confirmed_at.saturating_add(lease.lease).saturating_since(self.clock.now())
    }

    /// Makes sure that the renewal task looks up by `due`.
    fn expect_beat(&self, store: &dyn Store, due: Instant) {
        // The lease is in its shard already. A task that has looked there before says how long it sleeps after that, and
        // one that ends wakes whoever is left, so the lease is seen in every order of events.
        if nanos(due) >= self.next_beat.load(Ordering::SeqCst) {
            return;
        }
        if self.running.swap(true, Ordering::SeqCst) {
            self.earlier.notify_one();
            return;
        }
        match Handle::try_current() {
            Ok(runtime) => {
                self.next_beat.store(LOOKING, Ordering::SeqCst);
                runtime.spawn(beat(Running(store.handle())));
            }
            Err(_) => {
                self.running.store(false, Ordering::SeqCst);
                tracing::warn!(store = store.name(), "no tokio runtime here, so leases can't be renewed");
            }
        }
    }

    /// The leases that are due by `now` or soon after, and when to look again.
    fn due(&self, now: Instant) -> (Vec<Lease>, Instant) {
        let mut leases = Vec::new();
        let mut next = now.saturating_add(LONGEST_SLEEP);
        for shard in &self.shards {
            for registered in lock(shard).values().filter(|registered| !registered.lost) {
                // Renewed a little early, many leases share one call and the shards are rarely walked.
                // The pause after a failure must be longer than that, or it would be none.
                if registered.due <= now.saturating_add(registered.beat() / 8) {
                    leases.push(registered.lease.clone());
                } else {
                    next = next.min(registered.due);
                }
            }
        }
        (leases, next)
    }

    /// Enters what the store said of `leases`, which were asked about at `asked_at`.
    fn enter(&self, store: &str, leases: &[Lease], asked_at: Instant, answers: Result<Vec<Write>, StoreError>) {
        let answers = match answers {
            Ok(answers) if answers.len() == leases.len() => Some(answers),
            // A store that answers for another number of leases has said nothing about any.
            Ok(_) => None,
            Err(error) => {
                tracing::warn!(store, leases = leases.len(), %error, "leases could not be renewed; trying again");
                None
            }
        };
        for (i, lease) in leases.iter().enumerate() {
            let mut shard = lock(self.shard(lease.owner));
            let Some(registered) = shard.get_mut(&lease.owner) else { continue };
            match answers.as_ref().map(|answers| answers[i]) {
                Some(Write::Done) => {
                    registered.confirmed_at = registered.confirmed_at.max(asked_at);
                    registered.due = asked_at.saturating_add(registered.beat());
                }
                Some(Write::Refused) => {
                    registered.lost = true;
                    let waker = registered.waker.clone();
                    drop(shard);
                    waker.wake();
                }
                None => registered.due = self.clock.now().saturating_add(registered.beat() / 4),
            }
        }
    }
}

impl fmt::Debug for Heartbeats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heartbeats").field("live", &self.live()).finish_non_exhaustive()
    }
}

fn nanos(instant: Instant) -> u64 {
    u64::try_from(instant.since_origin().as_nanos()).unwrap_or(LOOKING).min(LOOKING - 1)
}

/// The renewal task's hold on its store. Dropped by a runtime that shuts down, it wakes the handlers that are left, on
/// whatever runtime they are, and the first of them starts a new task.
struct Running(Arc<dyn Store>);

impl Drop for Running {
    fn drop(&mut self) {
        let heartbeats = self.0.heartbeats();
        heartbeats.next_beat.store(NEVER, Ordering::SeqCst);
        heartbeats.running.store(false, Ordering::SeqCst);
        for shard in &heartbeats.shards {
            let wakers: Vec<_> = lock(shard).values().map(|registered| registered.waker.clone()).collect();
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

/// The renewal task.
async fn beat(running: Running) {
    let store = &*running.0;
    let heartbeats = store.heartbeats();
    let mut slept = false;
    loop {
        let now = heartbeats.clock.now();
        let (leases, next) = heartbeats.due(now);
        if !leases.is_empty() {
            let _under_way = UnderWay::new(heartbeats);
            // A store that doesn't answer within a lease can't keep it; the other leases must not wait longer for it.
            let longest = leases.iter().map(|lease| lease.lease).max().unwrap_or_default();
            let late = || Err(StoreError::new(StoreErrorKind::Unknown, "no answer within a lease"));
            let answers = race(store.renew(&leases), heartbeats.clock.sleep(longest)).await.unwrap_or_else(late);
            heartbeats.enter(store.name(), &leases, now, answers);
            continue;
        }
        // Ends only after a sleep: a stream of short handlers must not start a task each.
        if slept && heartbeats.live() == 0 {
            return;
        }
        heartbeats.next_beat.store(nanos(next), Ordering::SeqCst);
        slept = race(heartbeats.earlier.notified(), heartbeats.clock.sleep(next.saturating_since(now))).await.is_none();
        heartbeats.next_beat.store(LOOKING, Ordering::SeqCst);
    }
}

/// Counts work that [`Heartbeats::flush`] waits for.
pub(crate) struct UnderWay<'a>(&'a Heartbeats);

impl<'a> UnderWay<'a> {
    pub(crate) fn new(heartbeats: &'a Heartbeats) -> Self {
        heartbeats.under_way.fetch_add(1, Ordering::SeqCst);
        Self(heartbeats)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.0.under_way.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.flushed.notify_waiters();
        }
    }
}
