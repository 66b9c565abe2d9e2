//! Records in the memory of this process.

#[cfg(all(test, shuttle))]
pub(crate) mod interleavings;
mod options;
mod slots;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hashbrown::HashTable;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

pub use self::options::MemoryOptions;
use self::slots::{Order, Slot, Slots};
use crate::clock::{Instant, as_nanos};
use crate::combine::race;
use crate::key::{Key, KeyHasher};
use crate::record::{
    Admission, Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Provenance, Record, Release, Reservation,
    ReserveRequest, Ruling, Verdict,
};
use crate::store::{
    Answers, Cursor, Filter, Page, Store, StoreContext, StoreError, StoreErrorKind, StoreFuture, store_of_shared,
};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{InheritedLock, Process, SharedWithChild};

/// Number of shards, a power of two, so large that the threads of a large machine rarely wait for the same lock.
const SHARDS: usize = 64;
/// Largest number of expired records that one reservation removes. The number is more than one, so that expired records
/// can't pile up.
const SWEEP: usize = 2;
/// Largest number of slots that one page of a list reads.
const LOOKED_AT: usize = 10_000;

/// A store in the memory of this process, for tests and for duplicates within one process.
///
/// - *Atomicity*: one lock per shard decides which attempt wins.
/// - *Clock*: the process's monotonic clock, or the clock given to [`clock`](MemoryOptions::clock).
/// - *Durability*: a restart of the process forgets all records, and other processes don't see them.
/// - *Limits*: as many records as [`max_records`](MemoryOptions::max_records) allows. A full store refuses new keys
///   with [`StoreErrorKind::Full`]; the store never forgets a record before its retention ends. Each new record removes
///   some expired records.
/// - *`fork`*: a child has a copy of the records. If a thread of the parent was working on a shard at the fork, the
///   child's calls to that shard fail with [`StoreErrorKind::Misconfigured`]: make a store after the fork.
/// - *Cost*: one look-up for each operation, and no allocation except for the key and the result.
///
/// Clones share the records.
#[derive(Clone, Debug)]
pub struct MemoryStore(Arc<MemoryInner>);

impl MemoryStore {
    /// Makes an empty store with the default settings.
    pub fn new() -> Self {
        Self::options().build()
    }

    /// Returns the default settings, to be changed before building a store.
    pub fn options() -> MemoryOptions {
        MemoryOptions::default()
    }

    fn open(records: Arc<Records>, context: Arc<StoreContext>, namespace: Arc<str>) -> Self {
        Self(Arc::new_cyclic(|this| MemoryInner { this: Weak::clone(this), context, records, namespace }))
    }

    /// Returns another handle to the same records, with separate leases, as another process would have. Use a peer in
    /// tests of processes that die, or as one handle per runtime in a process with several runtimes.
    #[must_use]
    pub fn peer(&self) -> Self {
        let ours = &self.0.context;
        let context = Arc::new(StoreContext::in_process("memory", ours.clock_handle()).held_by(ours.handle_name()));
        Self::open(Arc::clone(&self.0.records), context, Arc::clone(&self.0.namespace))
    }

    /// Number of records, including expired records that are not removed yet.
    pub fn len(&self) -> usize {
        self.0.records.len.load(Ordering::Relaxed)
    }

    /// Returns whether the store holds no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

store_of_shared!(MemoryStore);

#[derive(Debug)]
struct MemoryInner {
    this: Weak<MemoryInner>,
    context: Arc<StoreContext>,
    records: Arc<Records>,
    namespace: Arc<str>,
}

#[derive(Debug)]
struct Records {
    shards: Box<[SharedWithChild<Shard>]>,
    capacity: usize,
    len: AtomicUsize,
}

#[derive(Debug)]
struct Shard {
    /// Earliest time at which a record may expire: [`Slot::listed_at`] of the first record in `order`.
    next_due: Nanos,
    /// Index in `slots` of each key's record, by the hash of the key.
    places: HashTable<u32>,
    slots: Slots,
    order: Order,
    waiters: HashMap<Key, Waiters, BuildHasherDefault<KeyHasher>>,
}

/// The waiters of one key, and their number.
#[derive(Debug)]
struct Waiters {
    /// Process in which the duplicates wait. The child of a `fork()` never uses the waiters of its parent.
    process: Process,
    woken: Arc<Notify>,
    count: usize,
}

impl Default for Waiters {
    fn default() -> Self {
        Self { process: Process::this(), woken: Arc::default(), count: 0 }
    }
}

impl From<InheritedLock> for StoreError {
    fn from(_: InheritedLock) -> Self {
        let message = "this process was forked while a call of its parent was at work in the store, so these records can't be \
                       used here: make a `MemoryStore` after the fork";
        Self::new(StoreErrorKind::Misconfigured, message)
    }
}

impl Shard {
    /// Makes an empty shard. `own` is the holder text of the store's own handles, which most records have.
    fn of(own: &'static str) -> Self {
        let (order, waiters) = Default::default();
        Self { next_due: Nanos::MAX, places: HashTable::new(), slots: Slots::of(own), order, waiters }
    }

    /// Returns the record at `place` as an operator sees it.
    fn inspect(&self, place: u32, now: Nanos) -> Inspection {
        let slot = self.slots.get(place);
        let lapses_in = slot.is_pending().then(|| slot.lapses_in(now));
        let [first_seen, began] = slot.since(now);
        let inspection = Inspection::new(self.slots.record(place), slot.expires_in(now), lapses_in);
        inspection.since(Some(first_seen), Some(began))
    }

    /// Returns the place of a record, which may have expired.
    fn place(&self, key: &Key) -> Option<u32> {
        let hash = key.short_hash();
        let is_it = |place: &u32| self.slots.get(*place).is_of(hash, key);
        self.places.find(spread(hash), is_it).copied()
    }

    fn get(&mut self, key: &Key, now: Nanos) -> Option<&mut Slot> {
        let place = self.place(key)?;
        Some(self.slots.get_mut(place)).filter(|slot| slot.expires_at > now)
    }

    fn insert(&mut self, slot: Slot, provenance: Provenance) {
        let hash = slot.hash();
        self.next_due = self.next_due.min(slot.listed_at);
        let place = self.slots.insert(slot);
        self.slots.set_provenance(place, provenance);
        self.places.insert_unique(spread(hash), place, |place| spread(self.slots.get(*place).hash()));
        self.order.push(place, &self.slots);
    }

    /// Restarts the retention of the record at `place` after a change.
    fn date(&mut self, place: u32, ttl: Nanos, now: Nanos) {
        self.slots.get_mut(place).date(ttl, now);
        self.list(place);
    }

    /// Ends the retention of the record at `place` now.
    fn expire(&mut self, place: u32, now: Nanos) {
        self.slots.get_mut(place).expires_at = now;
        self.list(place);
    }

    /// Moves the record at `place` forward in `order` if the record expires before its `listed_at`.
    fn list(&mut self, place: u32) {
        let slot = self.slots.get_mut(place);
        if slot.expires_at < slot.listed_at {
            // Records rarely expire before their `listed_at` (only if the `ttl` has become shorter, or the attempt has
            // run for longer than the `ttl`), so a linear search is cheap enough.
            slot.listed_at = slot.expires_at;
            self.next_due = self.next_due.min(slot.listed_at);
            self.order.sooner(place, &self.slots);
        }
    }

    /// Removes up to `limit` expired records. Returns the number of removed records.
    fn sweep(&mut self, now: Nanos, limit: usize) -> usize {
        let mut removed = 0;
        while self.next_due <= now && removed < limit {
            let Some(place) = self.order.first() else { break };
            let slot = self.slots.get_mut(place);
            if slot.expires_at > now {
                slot.listed_at = slot.expires_at;
                self.order.first_is_later(&self.slots);
            } else {
                self.order.remove_first(&self.slots);
                if let Ok(entry) = self.places.find_entry(spread(self.slots.get(place).hash()), |it| *it == place) {
                    entry.remove();
                }
                self.slots.remove(place);
                removed += 1;
            }
            self.next_due = self.order.first_due(&self.slots);
        }
        removed
    }

    /// Wakes all waiters of `key`.
    fn wake(&mut self, key: &Key) {
        if !self.waiters.is_empty()
            && let Some(waiters) = self.waiters.remove(key)
            && waiters.process.is_this()
        {
            waiters.woken.notify_waiters();
        }
    }
}

/// Spreads the hash over 64 bits, because a hash table uses the highest and the lowest bits.
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Nanoseconds since the origin of the store's clock, or a span of time. This type is half as large as an [`Instant`].
type Nanos = u64;

/// Longest span, 146 years. The present time plus two such spans still fits into [`Nanos`].
const LONGEST: Nanos = Nanos::MAX / 4;

fn span(duration: Duration) -> Nanos {
    as_nanos(duration).min(LONGEST)
}

fn point(instant: Instant) -> Nanos {
    instant.nanos().min(2 * LONGEST)
}

impl MemoryInner {
    fn now(&self) -> Nanos {
        point(self.context.clock().now())
    }

    fn shard(&self, key: &Key) -> &SharedWithChild<Shard> {
        &self.records.shards[key.shard(SHARDS)]
    }

    fn sweep(&self, shard: &mut Shard, now: Nanos, limit: usize) -> usize {
        let removed = shard.sweep(now, limit);
        if removed > 0 {
            self.records.len.fetch_sub(removed, Ordering::Relaxed);
        }
        removed
    }

    /// Counts one more record, if the store is not full. Returns whether the record was counted.
    fn claim_room(&self) -> bool {
        let grow = |len| (len < self.records.capacity).then_some(len + 1);
        self.records.len.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).is_ok()
    }

    fn try_reserve(&self, request: &ReserveRequest, now: Nanos) -> Result<Reservation, StoreError> {
        let mut shard = self.shard(&request.key).lock()?;
        let shard = &mut *shard;
        self.sweep(shard, now, SWEEP);
        let ttl = span(request.ttl);
        let Some(place) = shard.place(&request.key) else {
            if !self.claim_room() {
                let message = format!(
                    "the store is full: it holds {} records, and none of them has expired",
                    self.records.capacity
                );
                return Err(StoreError::new(StoreErrorKind::Full, message));
            }
            let record = Record::first(request);
            let granted = record.grant(request, false);
            let provenance = record.provenance.clone();
            shard.insert(Slot::new(record, &request.key, request.key.short_hash(), ttl, now), provenance);
            return Ok(granted);
        };
        let slot = shard.slots.get(place);
        let is_first = slot.expires_at <= now;
        let (with, takeover) = if is_first {
            (Record::first(request), false)
        } else {
            match shard.slots.record(place).admit_owned(request, slot.lapses_in(now)) {
                Admission::Answer(answer) => return Ok(answer.aged(slot.age(now))),
                Admission::Replace { with, takeover } => (with, takeover),
            }
        };
        let granted = with.grant(request, takeover);
        let (provenance, journal) = (with.provenance.clone(), with.journal.clone());
        let slot = shard.slots.get_mut(place);
        slot.set(with, &request.key);
        slot.begin(is_first, now);
        shard.slots.set_provenance(place, provenance);
        shard.slots.set_journal(place, journal);
        shard.date(place, ttl, now);
        shard.wake(&request.key);
        Ok(granted)
    }

    /// Applies `end` to a pending record by compare-and-set on owner token and attempt number; for a release, on the
    /// owner token only. If an earlier copy of the same write has already ended the attempt, the answer is `Applied`.
    fn end(&self, lease: &Lease, with_result: bool, end: impl FnOnce(&mut Slot)) -> Result<Verdict, StoreError> {
        let now = self.now();
        let mut shard = self.shard(&lease.key).lock()?;
        let Some(place) = shard.place(&lease.key) else { return Ok(Verdict::Refused) };
        let slot = shard.slots.get_mut(place);
        if slot.expires_at <= now || slot.owner() != lease.owner {
            return Ok(Verdict::Refused);
        }
        if !slot.is_pending() {
            return Ok(slot.record().ended(lease, with_result));
        }
        if with_result && slot.attempt() != lease.attempt {
            return Ok(Verdict::Refused);
        }
        end(slot);
        if with_result {
            shard.slots.set_journal(place, None);
        }
        shard.date(place, span(lease.ttl), now);
        shard.wake(&lease.key);
        Ok(Verdict::Applied)
    }

    /// Lists records in the order of their slots, because a record keeps its slot. A cursor holds the next shard and
    /// slot.
    fn look_through(&self, filter: &Filter) -> Result<Page, StoreError> {
        let from = match &filter.after {
            None => Some((0, 0)),
            Some(cursor) => cursor
                .as_str()
                .split_once('.')
                .and_then(|(shard, place)| Some((shard.parse().ok()?, place.parse().ok()?))),
        };
        let foreign = || filter.after.as_ref().map_or_else(|| unreachable!("no cursor"), Cursor::is_foreign);
        let (first, mut from): (usize, u32) = from.ok_or_else(foreign)?;
        let (now, mut page, mut looked) = (self.now(), Page::default(), 0);
        for (at, shard) in self.records.shards.iter().enumerate().skip(first) {
            let shard = shard.lock()?;
            for (place, slot) in shard.slots.from(from) {
                if looked == LOOKED_AT || page.records.len() == filter.most() {
                    page.next = Some(Cursor::new(format!("{at}.{place}")));
                    return Ok(page);
                }
                looked += 1;
                if slot.expires_at > now {
                    let mut inspection = shard.inspect(place, now);
                    inspection.record = inspection.record.without_result();
                    page.add::<StoreError>(filter, slot.key(), Ok(Some(inspection)));
                }
            }
            from = 0;
        }
        Ok(page)
    }

    fn begin_one(&self, lease: &Lease, now: Nanos) -> Result<Verdict, StoreError> {
        let mut shard = self.shard(&lease.key).lock()?;
        let slot = shard.get(&lease.key, now).filter(|it| it.owner() == lease.owner && it.attempt() == lease.attempt);
        Ok(match slot.is_some_and(|slot| slot.mark_begun(now)) {
            true => Verdict::Applied,
            false => Verdict::Refused,
        })
    }

    fn renew_one(&self, lease: &Lease, now: Nanos) -> Result<Verdict, StoreError> {
        match self.shard(&lease.key).lock()?.get(&lease.key, now) {
            Some(slot) if slot.owner() == lease.owner && slot.attempt() == lease.attempt && slot.is_pending() => {
                slot.renew(now);
                Ok(Verdict::Applied)
            }
            _ => Ok(Verdict::Refused),
        }
    }

    fn append_one(&self, lease: &Lease, journal: &Journal, now: Nanos) -> Result<Verdict, StoreError> {
        let mut shard = self.shard(&lease.key).lock()?;
        let Some(place) = shard.place(&lease.key) else { return Ok(Verdict::Refused) };
        let slot = shard.slots.get_mut(place);
        if slot.expires_at <= now
            || slot.owner() != lease.owner
            || slot.attempt() != lease.attempt
            || !slot.is_pending()
        {
            return Ok(Verdict::Refused);
        }
        slot.renew(now);
        shard.slots.append(place, journal);
        Ok(Verdict::Applied)
    }

    /// Registers a waiting duplicate. Returns `None` if attempt number `attempt` of the key is not running.
    fn join<'a>(&'a self, key: &'a Key, attempt: u32) -> Result<Option<(Waiter<'a>, OwnedNotified)>, StoreError> {
        let now = self.now();
        let mut shard = self.shard(key).lock()?;
        if !shard.get(key, now).is_some_and(|slot| slot.attempt() == attempt && slot.is_pending()) {
            return Ok(None);
        }
        let waiters = shard.waiters.entry(key.clone()).or_default();
        if !waiters.process.is_this() {
            *waiters = Waiters::default();
        }
        waiters.count += 1;
        let woken = Arc::clone(&waiters.woken);
        // The notification is created while the lock is held, so that the next write to the record wakes this waiter.
        Ok(Some((Waiter { shard: self.shard(key), key, woken: Arc::clone(&woken) }, woken.notified_owned())))
    }

    fn look(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        let now = self.now();
        let shard = self.shard(key).lock()?;
        let place = shard.place(key).filter(|place| shard.slots.get(*place).expires_at > now);
        Ok(place.map(|place| shard.inspect(place, now)))
    }

    fn apply(&self, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
        let (now, key) = (self.now(), &decision.key);
        let mut shard = self.shard(key).lock()?;
        let shard = &mut *shard;
        let Some(place) = shard.place(key) else { return Ok(DecisionAnswer::NoRecord) };
        let slot = shard.slots.get(place);
        if slot.expires_at <= now {
            return Ok(DecisionAnswer::NoRecord);
        }
        match shard.slots.record(place).decide(decision, slot.lapses_in(now)) {
            Ruling::Answer(refused) => return Ok(refused),
            Ruling::Replace(record) => {
                let (provenance, journal) = (record.provenance.clone(), record.journal.clone());
                shard.slots.get_mut(place).set(record, key);
                shard.slots.set_provenance(place, provenance);
                shard.slots.set_journal(place, journal);
            }
            Ruling::Remove => {
                shard.expire(place, now);
                self.sweep(shard, now, usize::MAX);
            }
        }
        shard.wake(key);
        Ok(DecisionAnswer::Applied)
    }
}

impl Store for MemoryInner {
    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn response_timeout(&self) -> Duration {
        Duration::ZERO
    }

    fn context(&self) -> &StoreContext {
        &self.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        let now = self.now();
        let mut answer = self.try_reserve(request, now);
        if matches!(&answer, Err(error) if error.kind() == StoreErrorKind::Full) {
            for mut shard in self.records.shards.iter().flat_map(SharedWithChild::lock) {
                self.sweep(&mut shard, now, usize::MAX);
            }
            answer = self.try_reserve(request, now);
        }
        StoreFuture::ready(answer)
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::ready(self.begin_one(lease, self.now()))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        let now = self.now();
        let mut outcome = Ok(());
        for (at, lease) in leases.iter().enumerate() {
            match self.renew_one(lease, now) {
                Ok(verdict) => answer(at, verdict),
                Err(error) => outcome = Err(error),
            }
        }
        StoreFuture::ready(outcome)
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        StoreFuture::ready(self.append_one(lease, journal, self.now()))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::ready(self.end(lease, true, |slot| slot.finish(finish)))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::ready(self.end(lease, false, |slot| slot.release(release)))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        let (waiter, woken) = match self.join(key, attempt) {
            Ok(Some(joined)) => joined,
            Ok(None) => return self.inspect(key),
            Err(error) => return StoreFuture::ready(Err(error)),
        };
        let sleep = self.context.clock().sleep(at_most);
        StoreFuture::new(async move {
            let _waiter = waiter;
            race(woken, sleep).await;
            self.inspect(key).await
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::ready(self.look(key))
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::ready(self.apply(decision))
    }

    fn purge(&self, batch: u32) -> StoreFuture<'_, u64> {
        let now = self.now();
        let mut left = batch as usize;
        for shard in &self.records.shards {
            match shard.lock() {
                Ok(mut shard) => left -= self.sweep(&mut shard, now, left),
                Err(inherited) => return StoreFuture::ready(Err(inherited.into())),
            }
        }
        StoreFuture::ready(Ok(u64::from(batch) - left as u64))
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        StoreFuture::ready(self.look_through(filter))
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::ready(Ok(()))
    }
}

/// Guard of a waiting duplicate. The last guard of a key removes the entry of the key's waiters.
struct Waiter<'a> {
    shard: &'a SharedWithChild<Shard>,
    key: &'a Key,
    woken: Arc<Notify>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let Ok(mut shard) = self.shard.lock() else { return };
        // A wake-up removes the entry of the woken waiters, so the present entry may be the entry of later waiters.
        if let Some(waiters) = shard.waiters.get_mut(self.key).filter(|entry| Arc::ptr_eq(&entry.woken, &self.woken)) {
            waiters.count -= 1;
            if waiters.count == 0 {
                shard.waiters.remove(self.key);
            }
        }
    }
}
