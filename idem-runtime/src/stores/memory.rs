//! Records in the memory of this process.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::{Clock, Instant, SystemClock, race};
use crate::key::KeyHasher;
use crate::store::forward;
use crate::sync::lock;
use crate::{
    Finish, Heartbeats, Inspection, Key, Lease, Meeting, Record, Release, Reservation, Reserve, State, Store,
    StoreError, StoreErrorKind, StoreFuture, Write,
};

/// A power of two; enough that the threads of a large machine rarely meet at one lock.
const SHARDS: usize = 64;
/// How many expired records a reservation cleans up: more than one, so that they can't pile up.
const SWEEP: usize = 2;

/// A store in the memory of this process, for tests and for duplicates that one process sees.
///
/// - *Atomicity*: one lock per shard decides the winner.
/// - *Clock*: the process's monotonic clock, or the one given to [`with_clock`](MemoryStore::with_clock).
/// - *Durability*: none. A restart forgets everything, and other processes don't see it.
/// - *Limits*: as many records as [`with_capacity`](MemoryStore::with_capacity) allows. A full store refuses new keys
///   with [`StoreErrorKind::Full`]; it never forgets a record before its retention ends. Expired records are cleaned up
///   as new ones arrive.
/// - *Cost*: one look-up a step, no allocation beyond key and result.
///
/// Clones share the records.
#[derive(Clone, Debug)]
pub struct MemoryStore(Arc<Shared>);

impl MemoryStore {
    /// How many records a store holds where nothing else is said.
    pub const DEFAULT_CAPACITY: usize = 1_000_000;

    /// An empty store for [`DEFAULT_CAPACITY`](MemoryStore::DEFAULT_CAPACITY) records.
    pub fn new() -> Self {
        Self::with_capacity(Self::DEFAULT_CAPACITY)
    }

    /// An empty store that holds at most `capacity` records.
    pub fn with_capacity(capacity: usize) -> Self {
        Self::with_capacity_and_clock(capacity, SystemClock::default())
    }

    /// An empty store whose leases and retentions are measured by `clock`.
    pub fn with_clock(clock: impl Clock) -> Self {
        Self::with_capacity_and_clock(Self::DEFAULT_CAPACITY, clock)
    }

    /// An empty store that holds at most `capacity` records and measures time by `clock`.
    pub fn with_capacity_and_clock(capacity: usize, clock: impl Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self::open(Arc::new(Records { shards, capacity, len: AtomicUsize::new(0) }), Arc::new(clock))
    }

    fn open(records: Arc<Records>, clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new_cyclic(|this| Shared { this: Weak::clone(this), heartbeats: Heartbeats::new(clock), records }))
    }

    /// Another handle to the same records, with heartbeats of its own: what another process would have. For tests of
    /// processes that die, and for one handle per runtime where a process has several.
    #[must_use]
    pub fn peer(&self) -> Self {
        Self::open(Arc::clone(&self.0.records), self.0.heartbeats.clock_handle())
    }

    /// Waits until late writes and renewals are through; see [`Heartbeats::flush`].
    pub async fn flush(&self) {
        self.0.heartbeats.flush().await;
    }

    /// How many records are held, expired ones that wait for their clean-up included.
    pub fn len(&self) -> usize {
        self.0.records.len.load(Ordering::Relaxed)
    }

    /// Whether no record is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn shared(&self) -> &Shared {
        &self.0
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

forward! { () MemoryStore => shared; }

#[derive(Debug)]
struct Shared {
    this: Weak<Shared>,
    heartbeats: Heartbeats,
    records: Arc<Records>,
}

#[derive(Debug)]
struct Records {
    shards: Box<[Mutex<Shard>]>,
    capacity: usize,
    len: AtomicUsize,
}

#[derive(Debug, Default)]
struct Shard {
    slots: HashMap<Key, Slot, BuildHasherDefault<KeyHasher>>,
    /// For each slot the entry of its `listed_at`, no later than its expiry; entries of other times are out of date.
    expiries: BinaryHeap<Reverse<(Instant, Key)>>,
    waiters: HashMap<Key, Waiters>,
}

/// Those who wait for one key, and how many they are.
#[derive(Debug, Default)]
struct Waiters {
    woken: Arc<Notify>,
    count: usize,
}

#[derive(Debug)]
struct Slot {
    record: Record,
    expires_at: Instant,
    /// Meaningful while the record is pending.
    lapses_at: Instant,
    listed_at: Instant,
}

impl Slot {
    /// A slot that is listed `ttl` from now: when it expires if it is finished at once, so that this needs no other entry.
    fn new(record: Record, ttl: Duration, now: Instant) -> Self {
        let mut slot = Self { record, expires_at: now, lapses_at: now, listed_at: now.saturating_add(ttl) };
        slot.date(ttl, now);
        slot
    }

    /// Counts lease and retention from `now`.
    fn date(&mut self, ttl: Duration, now: Instant) {
        self.lapses_at = match self.record.state {
            State::Pending { lease, .. } => now.saturating_add(lease),
            _ => now,
        };
        self.expires_at = now.saturating_add(self.record.retention(ttl));
    }

    /// The same for a record that was changed. If it now expires sooner than it is listed, the answer is the time to list
    /// it at.
    fn changed(&mut self, ttl: Duration, now: Instant) -> Option<Instant> {
        self.date(ttl, now);
        let relist = self.expires_at < self.listed_at;
        self.listed_at = self.listed_at.min(self.expires_at);
        relist.then_some(self.listed_at)
    }
}

impl Shard {
    fn get(&mut self, key: &Key, now: Instant) -> Option<&mut Slot> {
        self.slots.get_mut(key).filter(|slot| slot.expires_at > now)
    }

    /// Removes up to `limit` expired records and says how many.
    fn sweep(&mut self, now: Instant, limit: usize) -> usize {
        let mut removed = 0;
        while removed < limit {
            match self.expiries.peek() {
                Some(Reverse((due, _))) if *due <= now => {}
                _ => break,
            }
            let Some(Reverse((due, key))) = self.expiries.pop() else { break };
            match self.slots.get_mut(&key) {
                Some(slot) if slot.listed_at != due => {}
                Some(slot) if slot.expires_at > now => {
                    slot.listed_at = slot.expires_at;
                    self.expiries.push(Reverse((slot.listed_at, key)));
                }
                Some(_) => {
                    self.slots.remove(&key);
                    removed += 1;
                }
                None => {}
            }
        }
        removed
    }

    /// Wakes whoever waits for `key`.
    fn wake(&mut self, key: &Key) {
        if !self.waiters.is_empty()
            && let Some(waiters) = self.waiters.remove(key)
        {
            waiters.woken.notify_waiters();
        }
    }
}

impl Shared {
    fn now(&self) -> Instant {
        self.heartbeats.clock().now()
    }

    /// Chosen by bits of the hash that the map of a shard uses neither for the place nor for the tag of an entry.
    fn shard(&self, key: &Key) -> &Mutex<Shard> {
        let mut hasher = KeyHasher::default();
        key.hash(&mut hasher);
        &self.records.shards[usize::from(hasher.finish().to_le_bytes()[5]) % SHARDS]
    }

    fn sweep(&self, shard: &Mutex<Shard>, now: Instant, limit: usize) {
        let removed = lock(shard).sweep(now, limit);
        if removed > 0 {
            self.records.len.fetch_sub(removed, Ordering::Relaxed);
        }
    }

    /// Takes room for one more record.
    fn claim_room(&self) -> bool {
        let grow = |len| (len < self.records.capacity).then_some(len + 1);
        self.records.len.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).is_ok()
    }

    fn try_reserve(&self, request: &Reserve, now: Instant) -> Result<Reservation, StoreError> {
        let mut shard = lock(self.shard(&request.key));
        let removed = shard.sweep(now, SWEEP);
        if removed > 0 {
            self.records.len.fetch_sub(removed, Ordering::Relaxed);
        }
        let shard = &mut *shard;
        let Some(slot) = shard.slots.get_mut(&request.key) else {
            if !self.claim_room() {
                let message =
                    format!("the store holds {} records and is full; none is forgotten early", self.records.capacity);
                return Err(StoreError::new(StoreErrorKind::Full, message));
            }
            let record = Record::first(request);
            let lease = record.lease(request);
            let slot = Slot::new(record, request.ttl, now);
            shard.expiries.push(Reverse((slot.listed_at, request.key.clone())));
            shard.slots.insert(request.key.clone(), slot);
            return Ok(Reservation::Reserved { lease, takeover: false });
        };
        let (with, takeover) = if slot.expires_at > now {
            match slot.record.meet(request, slot.lapses_at.saturating_since(now)) {
                Meeting::Answer(answer) => return Ok(answer),
                Meeting::Replace { with, takeover } => (with, takeover),
            }
        } else {
            (Record::first(request), false)
        };
        let lease = with.lease(request);
        slot.record = with;
        if let Some(at) = slot.changed(request.ttl, now) {
            shard.expiries.push(Reverse((at, request.key.clone())));
        }
        shard.wake(&request.key);
        Ok(Reservation::Reserved { lease, takeover })
    }

    /// Compare-and-set on the owner token: a pending record becomes `state`; one that is there already is recognised.
    fn end(&self, lease: &Lease, state: State, refund: u32) -> Write {
        let now = self.now();
        let mut shard = lock(self.shard(&lease.key));
        let Some(slot) = shard.get(&lease.key, now).filter(|slot| slot.record.owner == lease.owner) else {
            return Write::Refused;
        };
        if !slot.record.is_pending() {
            return slot.record.ended(lease.owner, state.payload().is_some());
        }
        slot.record.starts = slot.record.starts.saturating_sub(refund);
        slot.record.state = state;
        if let Some(at) = slot.changed(lease.ttl, now) {
            shard.expiries.push(Reverse((at, lease.key.clone())));
        }
        shard.wake(&lease.key);
        Write::Done
    }

    fn renew_one(&self, lease: &Lease, now: Instant) -> Write {
        match lock(self.shard(&lease.key)).get(&lease.key, now) {
            Some(slot) if slot.record.owner == lease.owner => match slot.record.state {
                State::Pending { lease, ttl, .. } => {
                    slot.lapses_at = now.saturating_add(lease);
                    slot.expires_at = slot.lapses_at.saturating_add(ttl);
                    Write::Done
                }
                _ => Write::Refused,
            },
            _ => Write::Refused,
        }
    }
}

impl Store for Shared {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("alive while it is borrowed")
    }

    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }

    fn reserve<'a>(&'a self, request: &'a Reserve) -> StoreFuture<'a, Reservation> {
        let now = self.now();
        let mut answer = self.try_reserve(request, now);
        if matches!(&answer, Err(error) if error.kind() == StoreErrorKind::Full) {
            self.records.shards.iter().for_each(|shard| self.sweep(shard, now, usize::MAX));
            answer = self.try_reserve(request, now);
        }
        StoreFuture::ready(answer)
    }

    fn renew<'a>(&'a self, leases: &'a [Lease]) -> StoreFuture<'a, Vec<Write>> {
        let now = self.now();
        StoreFuture::ready(Ok(leases.iter().map(|lease| self.renew_one(lease, now)).collect()))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Write> {
        StoreFuture::ready(Ok(self.end(lease, finish.state(), 0)))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Write> {
        let refund = u32::from(release == Release::NotStarted);
        StoreFuture::ready(Ok(self.end(lease, release.state(), refund)))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        let now = self.now();
        let shard = self.shard(key);
        let (waiter, woken) = {
            let mut shard = lock(shard);
            let pending = shard.get(key, now).is_some_and(|slot| {
                slot.record.attempt == attempt && matches!(slot.record.state, State::Pending { .. })
            });
            if !pending {
                return StoreFuture::ready(Ok(()));
            }
            let waiters = shard.waiters.entry(key.clone()).or_default();
            waiters.count += 1;
            let woken = Arc::clone(&waiters.woken);
            // Made while the lock is held, so that the next write to the record finds it.
            (Waiter { shard: self.shard(key), key, woken: Arc::clone(&woken) }, woken.notified_owned())
        };
        let sleep = self.heartbeats.clock().sleep(at_most);
        StoreFuture::new(async move {
            let _waiter = waiter;
            race(woken, sleep).await;
            Ok(())
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        let now = self.now();
        StoreFuture::ready(Ok(lock(self.shard(key)).get(key, now).map(|slot| Inspection {
            record: slot.record.clone(),
            expires_in: slot.expires_at.saturating_since(now),
            lapses_in: matches!(slot.record.state, State::Pending { .. }).then(|| slot.lapses_at.saturating_since(now)),
        })))
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Write> {
        let now = self.now();
        let mut shard = lock(self.shard(key));
        let reopened = shard.get(key, now).filter(|slot| slot.record.attempt == attempt).is_some_and(|slot| {
            let live = matches!(slot.record.state, State::Pending { .. }) && slot.lapses_at > now;
            if !live {
                slot.record = Record { starts: 0, state: State::Released, ..slot.record.clone() };
            }
            !live
        });
        shard.wake(key);
        StoreFuture::ready(Ok(if reopened { Write::Done } else { Write::Refused }))
    }
}

/// A waiting duplicate; the last one to give up takes its entry away.
struct Waiter<'a> {
    shard: &'a Mutex<Shard>,
    key: &'a Key,
    woken: Arc<Notify>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut shard = lock(self.shard);
        // Those who were woken have lost their entry, and the one that is there may be of others.
        if let Some(waiters) = shard.waiters.get_mut(self.key).filter(|entry| Arc::ptr_eq(&entry.woken, &self.woken)) {
            waiters.count -= 1;
            if waiters.count == 0 {
                shard.waiters.remove(self.key);
            }
        }
    }
}
