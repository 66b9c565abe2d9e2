//! A cache of finished records in the memory of this process, in front of a store.

#[cfg(all(test, shuttle))]
mod interleavings;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::BuildHasherDefault;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::key::{Key, KeyHasher};
use crate::record::{
    Admission, Decision, DecisionAnswer, Finish, Inspection, Lease, OwnerToken, Record, Reservation, ReserveRequest,
    State, StoredResult, Verdict,
};
use crate::store::{Store, StoreError, StoreFuture, forward, store_of_shared};
use crate::stores::wrapper;
use crate::sync::{Mutex, MutexGuard, PerProcess, SharedOnce, lock};

/// Largest number of shards, a power of two. With more shards, a shard of a cache of the default size could hold no
/// result of several megabytes. With fewer shards, threads would often wait for the same lock.
const MOST_SHARDS: usize = 16;
/// Smallest limit of a shard, in entries, if a cache has several shards. [`LEAST_BYTES`] is the same limit in bytes.
const LEAST_ENTRIES: usize = 64;
const LEAST_BYTES: usize = 1024 * 1024;
/// Approximate size of an entry in bytes, without its key and its result.
const ENTRY_BYTES: usize = 384;
/// Number of owner tokens of recent writes that a shard remembers.
const WRITERS: usize = 256;
/// Longest time that a duplicate waits for the answer to another duplicate of its key. If that other duplicate is no
/// longer polled, it must not delay the waiting duplicates for long.
const LONGEST_JOIN: Duration = Duration::from_millis(100);
/// A time later than any other time.
const NEVER: Instant = Instant::new(Duration::MAX);

/// A bounded cache of finished records in this process, in front of any other store. A replay from the cache costs no
/// call to the store.
///
/// The cache keeps only records that can't change: completed and failed records, but no pending, released or
/// interrupted records. On a hit, [`Record::admit`] decides, so the fingerprint is checked as without the cache. An
/// entry lives no longer than the retention of its record, by the process's monotonic clock. A record that this process
/// finished is cached immediately. A record that another process finished is cached at its second replay, which also
/// reads the remaining time of the retention. The first two replays cost one call each, as they would without the
/// cache.
///
/// While one call for a key asks the store, other duplicates of the key on the same handle wait for the answer. If the
/// answer is a finished record, these duplicates return the record without a call. Any other answer is not shared: each
/// duplicate then asks the store.
///
/// - *Atomicity*, *Clock*, *Durability*: as in the inner store. The cache never answers that a key is free.
/// - *Limits*: [`max_entries`](CachedOptions::max_entries) and [`max_bytes`](CachedOptions::max_bytes). Beyond these
///   limits the cache drops records that were not used recently, and the next replay of such a record costs a call
///   again. Results of more than 1 MiB are cached only if they are smaller than a sixteenth of `max_bytes`.
/// - *Cost*: a hit costs no call. A miss costs as much as in the inner store. The cache takes up to `max_bytes` of
///   memory.
///
/// **Operators.** A [decision](Store::decide) through this cache, or through a [`peer`](Cached::peer), takes effect
/// immediately. A decision in another process takes effect here within [`max_age`](CachedOptions::max_age); until then
/// duplicates get the old result. Records that the server has lost are also replayed, for up to `max_age`.
///
/// Around a store inside of the user's own transaction, the cache keeps no record, because a rollback would make the
/// record wrong.
///
/// Clones share the cache.
///
/// ```
/// use idem_runtime::{Cached, MemoryStore};
///
/// let store = Cached::new(MemoryStore::new());
/// ```
#[derive(Clone, Debug)]
pub struct Cached(Arc<CachedInner>);

impl Cached {
    /// Wraps `store` with the default settings of [`CachedOptions`].
    pub fn new(store: impl Store) -> Self {
        Self::options().wrap(store)
    }

    /// Returns the default settings, to be changed before wrapping a store.
    pub fn options() -> CachedOptions {
        CachedOptions::default()
    }

    /// Returns the same cache in front of `store`, which must be another handle to the same records. Use such a peer in
    /// a process with several handles, for example one handle per runtime. With separate caches, each handle would
    /// notice a `reopen` through the other handle only after [`max_age`](CachedOptions::max_age).
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "a wrapper takes its store; handles are cheap to clone")]
    pub fn peer(&self, store: impl Store) -> Self {
        Self::open(store.handle(), Arc::clone(&self.0.cache))
    }

    /// Number of cached records. An expired record is counted until the next call for its key.
    pub fn len(&self) -> usize {
        self.0.cache.shards().iter().map(|shard| lock(shard).ring.len()).sum()
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Approximate number of bytes that the cached records take.
    pub fn bytes(&self) -> usize {
        self.0.cache.shards().iter().map(|shard| lock(shard).bytes).sum()
    }

    fn open(inner: Arc<dyn Store>, cache: Arc<Cache>) -> Self {
        let keeps = inner.context().renews();
        Self(Arc::new_cyclic(|this| CachedInner {
            this: Weak::clone(this),
            inner,
            cache,
            keeps,
            upkeep: SharedOnce::new(),
        }))
    }
}

store_of_shared!(Cached);

/// Settings of a [`Cached`].
#[derive(Clone, Copy, Debug)]
#[must_use]
#[expect(clippy::struct_field_names, reason = "they are called like their setters")]
pub struct CachedOptions {
    max_entries: usize,
    max_bytes: usize,
    max_age: Duration,
}

impl Default for CachedOptions {
    fn default() -> Self {
        Self { max_entries: 100_000, max_bytes: 64 * 1024 * 1024, max_age: Duration::from_secs(60) }
    }
}

impl CachedOptions {
    /// Largest number of cached records (default: 100 000).
    pub fn max_entries(self, max_entries: usize) -> Self {
        Self { max_entries, ..self }
    }

    /// Largest number of bytes of all records, with their keys and the overhead of each entry (default: 64 MiB).
    pub fn max_bytes(self, max_bytes: usize) -> Self {
        Self { max_bytes, ..self }
    }

    /// Time after which a cached record is read from the store again (default: 60 s). A longer time saves calls,
    /// because each record costs one call per `max_age`. A shorter time shows a `reopen` of another process sooner.
    pub fn max_age(self, max_age: Duration) -> Self {
        Self { max_age, ..self }
    }

    /// Wraps `store` with these settings.
    #[expect(clippy::needless_pass_by_value, reason = "a wrapper takes its store; handles are cheap to clone")]
    pub fn wrap(self, store: impl Store) -> Cached {
        let worthwhile = (self.max_entries / LEAST_ENTRIES).min(self.max_bytes / LEAST_BYTES).clamp(1, MOST_SHARDS);
        let shards = 1 << worthwhile.ilog2();
        let inner = store.handle();
        let cache = Arc::new(Cache {
            shards: PerProcess::new((0..shards).map(|_| Mutex::default()).collect()),
            max_entries: self.max_entries / shards,
            max_bytes: self.max_bytes / shards,
            max_age: self.max_age,
            clock: inner.context().clock_handle(),
        });
        Cached::open(inner, cache)
    }
}

struct CachedInner {
    this: Weak<CachedInner>,
    inner: Arc<dyn Store>,
    cache: Arc<Cache>,
    /// True if the store's answers are permanent; false inside of a transaction, which may be rolled back.
    keeps: bool,
    upkeep: SharedOnce<Arc<CachedInner>>,
}

impl fmt::Debug for CachedInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached").field("inner", &self.inner).finish_non_exhaustive()
    }
}

struct Cache {
    /// The child of a `fork()` starts with an empty cache.
    shards: PerProcess<Box<[Mutex<Shard>]>>,
    /// Limits for each shard.
    max_entries: usize,
    max_bytes: usize,
    max_age: Duration,
    /// Clock of the first handle, which all entries use: times of two clocks can't be compared.
    clock: Arc<dyn Clock>,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<Key, Entry, BuildHasherDefault<KeyHasher>>,
    /// Keys of all entries, in a ring. The hand moves along the ring and drops entries that were not used since its
    /// last pass.
    ring: Vec<Key>,
    hand: usize,
    bytes: usize,
    /// Future entries of the cache: calls are reading their records from the store. Each future entry has its own
    /// number.
    making: Vec<EntryDraft>,
    made: u64,
    /// Owners of the latest writes whose result may have taken effect: writes in flight, successful writes, and writes
    /// without an answer.
    writers: VecDeque<OwnerToken>,
    /// Running reservations that other calls for the same key may join.
    flights: HashMap<Key, Arc<Flight>, BuildHasherDefault<KeyHasher>>,
}

/// A running reservation.
struct Flight {
    /// The handle that started the reservation. Calls through another handle do not join: the first handle's runtime
    /// may be blocked.
    of: Weak<CachedInner>,
    landed: Arc<Notify>,
    /// The answer and its age, if the answer is a final record.
    record: OnceLock<(Record, Option<Duration>)>,
}

/// Guard of a reservation that other calls may join. The guard's drop wakes the joined calls, however the reservation
/// ends.
struct LeadGuard<'a> {
    cache: &'a Cache,
    key: &'a Key,
    flight: Arc<Flight>,
}

impl Drop for LeadGuard<'_> {
    fn drop(&mut self) {
        let mut shard = self.cache.shard(self.key);
        // The map may already hold the next flight of the key, because after a `reopen` duplicates don't join an
        // outdated flight.
        if shard.flights.get(self.key).is_some_and(|flight| Arc::ptr_eq(flight, &self.flight)) {
            shard.flights.remove(self.key);
        }
        drop(shard);
        self.flight.landed.notify_waiters();
    }
}

/// The cached knowledge about a finished key: its record, or only that the key is finished.
struct Entry {
    /// The record; `None` until this process has read or written the record.
    record: Option<Record>,
    /// Age that the record will have at the end of its retention; `None` if unknown.
    last_age: Option<Duration>,
    /// Time at which the record must be read again.
    fresh_until: Instant,
    /// Time at which the entry expires: the earliest possible end of the record's retention; [`NEVER`] if this end is
    /// unknown.
    ends_at: Instant,
    bytes: usize,
    touched: bool,
    /// Index of the entry's key in the ring.
    at: usize,
}

enum CacheAnswer {
    Nothing,
    /// The key is finished, but its record must be read from the store.
    Finished,
    Answer(Reservation),
}

/// A future entry of the cache, while the holder of its [`Ticket`] asks the store for the record.
struct EntryDraft {
    number: u64,
    key: Key,
    /// Lowest attempt number whose record may still be cached: 0 until a reservation in the store finds a running
    /// attempt, then at least the number of that attempt.
    from: u32,
}

/// The right of a call to cache the record that the store is about to return. The right ends if another call shows
/// meanwhile that this record is no longer final.
struct Ticket<'a> {
    cache: &'a Cache,
    key: &'a Key,
    number: u64,
    asked_at: Instant,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut shard = self.cache.shard(self.key);
        shard.making.retain(|making| making.number != self.number);
    }
}

impl Shard {
    fn remove(&mut self, key: &Key) {
        let Some(entry) = self.entries.remove(key) else { return };
        self.bytes -= entry.bytes;
        self.ring.swap_remove(entry.at);
        if let Some(moved) = self.ring.get(entry.at)
            && let Some(moved) = self.entries.get_mut(moved)
        {
            moved.at = entry.at;
        }
    }

    /// Answers `request` from the cache, if possible.
    fn look_up(&mut self, request: &ReserveRequest, now: Instant) -> CacheAnswer {
        match self.entries.get_mut(&request.key) {
            None => CacheAnswer::Nothing,
            Some(entry) if entry.ends_at <= now => {
                self.remove(&request.key);
                CacheAnswer::Nothing
            }
            Some(entry) => {
                entry.touched = true;
                match &entry.record {
                    Some(record) if entry.fresh_until > now => match record.admit(request, Duration::ZERO) {
                        Admission::Answer(answer) => {
                            let left = entry.ends_at.saturating_since(now);
                            CacheAnswer::Answer(answer.aged(entry.last_age.map(|age| age.saturating_sub(left))))
                        }
                        Admission::Replace { .. } => CacheAnswer::Finished,
                    },
                    _ => CacheAnswer::Finished,
                }
            }
        }
    }

    /// Drops one entry that has expired, or that was not used since the hand's last pass.
    fn evict(&mut self, now: Instant) {
        while !self.ring.is_empty() {
            if self.hand >= self.ring.len() {
                self.hand = 0;
            }
            let key = self.ring[self.hand].clone();
            match self.entries.get_mut(&key) {
                Some(entry) if entry.touched && entry.ends_at > now => entry.touched = false,
                _ => {
                    self.remove(&key);
                    // The newest entry, from the end of the ring, has moved to this position, so the hand moves past
                    // it.
                    self.hand += 1;
                    return;
                }
            }
            self.hand += 1;
        }
    }
}

impl Cache {
    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn shards(&self) -> &[Mutex<Shard>] {
        self.shards.here_or(|parents| parents.iter().map(|_| Mutex::default()).collect())
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        let shards = self.shards();
        lock(&shards[key.shard(shards.len())])
    }

    /// Takes a ticket for an entry of `key`. The caller must take the ticket before it asks the store for the record.
    fn ticket<'a>(&'a self, key: &'a Key) -> Ticket<'a> {
        let asked_at = self.now();
        let mut shard = self.shard(key);
        shard.made += 1;
        let number = shard.made;
        shard.making.push(EntryDraft { number, key: key.clone(), from: 0 });
        Ticket { cache: self, key, number, asked_at }
    }

    /// Caches a record that was read when `left` of its retention remained.
    fn enter_read(&self, ticket: &Ticket<'_>, record: &Record, left: Duration, age: Option<Duration>) {
        self.enter(ticket, record, left, age, |_| true);
    }

    /// Caches a record that was just written, with its full retention.
    fn enter_written(&self, ticket: &Ticket<'_>, record: &Record, ttl: Duration) {
        // If the entry already holds a record, this write was a repetition, which neither changes the record nor
        // extends its retention. The begin of the attempt is unknown here, so the age is measured from the end of the
        // attempt.
        self.enter(ticket, record, ttl, Some(Duration::ZERO), |entry| entry.record.is_none());
    }

    /// Caches a final record whose retention ends `left` after the ticket was taken, or later.
    fn enter(
        &self,
        ticket: &Ticket<'_>,
        record: &Record,
        left: Duration,
        age: Option<Duration>,
        replaces: fn(&Entry) -> bool,
    ) {
        let ends_at = ticket.asked_at.saturating_add(left);
        let fresh_until = ends_at.min(ticket.asked_at.saturating_add(self.max_age));
        if !is_final(record) || Self::bytes_of(ticket.key, Some(record)) > self.max_bytes {
            return;
        }
        // The bytes are copied, because a store's bytes may be a slice of a much larger buffer.
        let record = with_own_bytes(record);
        let mut shard = self.shard(ticket.key);
        let mut making = shard.making.iter();
        let current = making.any(|making| making.number == ticket.number && making.from <= record.attempt);
        if current && shard.entries.get(ticket.key).is_none_or(replaces) {
            let last_age = age.map(|age| age.saturating_add(left));
            self.put(&mut shard, ticket.key, Some(record), last_age, [fresh_until, ends_at]);
        }
    }

    /// Notes that `key` is finished, with an unknown end of its retention.
    fn note_finished(&self, key: &Key) {
        let mut shard = self.shard(key);
        if !shard.entries.contains_key(key) {
            self.put(&mut shard, key, None, None, [NEVER; 2]);
        }
    }

    fn bytes_of(key: &Key, record: Option<&Record>) -> usize {
        ENTRY_BYTES
            + key.as_str().len()
            + record.and_then(|record| record.state.result()).map_or(0, StoredResult::stored_bytes)
    }

    /// Inserts an entry. The record may be replayed until `fresh_until`; the cache treats the key as finished until
    /// `ends_at`.
    fn put(
        &self,
        shard: &mut Shard,
        key: &Key,
        record: Option<Record>,
        last_age: Option<Duration>,
        [fresh_until, ends_at]: [Instant; 2],
    ) {
        let bytes = Self::bytes_of(key, record.as_ref());
        if bytes > self.max_bytes || self.max_entries == 0 {
            return;
        }
        shard.remove(key);
        let now = self.now();
        while shard.ring.len() >= self.max_entries || shard.bytes + bytes > self.max_bytes {
            shard.evict(now);
        }
        let at = shard.ring.len();
        shard.ring.push(key.clone());
        shard.bytes += bytes;
        shard.entries.insert(key.clone(), Entry { record, last_age, fresh_until, ends_at, bytes, touched: false, at });
    }

    /// Forgets the cached record of `key` if its attempt is earlier than `from`, the earliest attempt that may be
    /// current.
    fn outdate(&self, key: &Key, from: u32) {
        let mut shard = self.shard(key);
        let outdated = |entry: &Entry| entry.record.as_ref().is_none_or(|record| record.attempt < from);
        if shard.entries.get(key).is_some_and(outdated) {
            shard.remove(key);
        }
        for making in shard.making.iter_mut().filter(|making| making.key == *key) {
            making.from = making.from.max(from);
        }
        shard.flights.remove(key);
    }

    /// Removes the entry of `key` from the cache.
    fn forget(&self, key: &Key) {
        let mut shard = self.shard(key);
        shard.remove(key);
        shard.making.retain(|making| making.key != *key);
        shard.flights.remove(key);
    }

    /// Notes a write of `owner`. Returns whether this write is the owner's only write that may take effect.
    fn note_writer(&self, key: &Key, owner: OwnerToken) -> bool {
        let mut shard = self.shard(key);
        if shard.writers.contains(&owner) {
            return false;
        }
        if shard.writers.len() == WRITERS {
            shard.writers.pop_front();
        }
        shard.writers.push_back(owner);
        true
    }

    fn forget_writer(&self, key: &Key, owner: OwnerToken) {
        self.shard(key).writers.retain(|other| *other != owner);
    }
}

/// Returns whether the record, and the result that is read from it, stay the same within the retention.
fn is_final(record: &Record) -> bool {
    // An unreadable result may be readable later, and messages are marked as sent, so such a record is not final.
    let is_whole = |payload: &StoredResult| {
        !matches!(payload, StoredResult::Unreadable { .. } | StoredResult::LeftOut { .. }) && !payload.has_messages()
    };
    record.state.result().is_some_and(is_whole)
}

fn with_own_bytes(record: &Record) -> Record {
    let mut record = record.clone();
    if let State::Completed(StoredResult::Encoded { bytes, .. }) | State::Failed(StoredResult::Encoded { bytes, .. }) =
        &mut record.state
    {
        *bytes = Bytes::copy_from_slice(bytes);
    }
    record
}

/// Guard that forgets a key when it is dropped, however the call that holds the guard ends.
struct ForgetGuard<'a>(&'a Cache, &'a Key);

impl Drop for ForgetGuard<'_> {
    fn drop(&mut self) {
        self.0.forget(self.1);
    }
}

impl CachedInner {
    async fn reserve_in_store(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let answer = self.inner.reserve(request).await?;
        match &answer {
            Reservation::Finished { record, .. } if is_final(record) => self.cache.note_finished(&request.key),
            Reservation::InProgress { attempt, .. } => self.cache.outdate(&request.key, *attempt),
            // These answers leave the cached entry: an unreadable result may be readable later, and a fingerprint
            // mismatch does not show the state of the record.
            Reservation::Finished { .. } | Reservation::FingerprintMismatch { .. } => {}
            _ => self.cache.forget(&request.key),
        }
        Ok(answer)
    }

    async fn ask(&self, request: &ReserveRequest, is_finished: bool) -> Result<Reservation, StoreError> {
        if is_finished { self.read(request).await } else { self.reserve_in_store(request).await }
    }

    /// Asks the store on behalf of all duplicates that join before the store answers.
    async fn lead(
        &self,
        request: &ReserveRequest,
        is_finished: bool,
        leading: LeadGuard<'_>,
    ) -> Result<Reservation, StoreError> {
        let answer = self.ask(request, is_finished).await;
        if let Ok(Reservation::Finished { record, age }) = &answer
            && is_final(record)
        {
            // Only this call, which asks the store, sets the record of the flight, so the record is not set yet.
            let _ = leading.flight.record.set((record.clone(), *age));
        }
        answer
    }

    /// Waits for the answer to another duplicate. Unless that answer is a finished record, asks the store itself,
    /// because the attempt may have ended since, or the store may have recovered.
    async fn join(
        &self,
        request: &ReserveRequest,
        flight: Arc<Flight>,
        landed: OwnedNotified,
    ) -> Result<Reservation, StoreError> {
        race(landed, self.cache.clock.sleep(LONGEST_JOIN)).await;
        if let Some((record, age)) = flight.record.get()
            && let Admission::Answer(answer) = record.admit(request, Duration::ZERO)
        {
            return Ok(answer.aged(*age));
        }
        let known = self.cache.shard(&request.key).look_up(request, self.cache.now());
        match known {
            CacheAnswer::Answer(answer) => Ok(answer),
            known => self.ask(request, matches!(known, CacheAnswer::Finished)).await,
        }
    }

    /// Answers a reservation for a finished key by reading the record together with the remaining time
    /// of its retention.
    async fn read(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let ticket = self.cache.ticket(&request.key);
        // An error of the inspection is ignored, because a login without the right to inspect may still reserve.
        if let Ok(Some(Inspection { record, expires_in, began, .. })) = self.inner.inspect(&request.key).await
            && record.is_finished()
            && !expires_in.is_zero()
            && let Admission::Answer(answer) = record.admit(request, Duration::ZERO)
        {
            self.cache.enter_read(&ticket, &record, expires_in, began);
            return Ok(answer.aged(began));
        }
        drop(ticket);
        self.reserve_in_store(request).await
    }
}

impl Store for CachedInner {
    fn upkeep(&self) -> Arc<dyn Store> {
        wrapper::upkeep(&self.this, &self.inner, &self.upkeep, |inner| Cached::open(inner, Arc::clone(&self.cache)).0)
    }

    forward! { |store| store.inner => namespace, response_timeout, context, begin, renew, append, step_values, release, inspect, purge, list, ping }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        if !self.keeps {
            return self.inner.reserve(request);
        }
        let mut shard = self.cache.shard(&request.key);
        let is_finished = match shard.look_up(request, self.cache.clock.now()) {
            CacheAnswer::Answer(answer) => return StoreFuture::ready(Ok(answer)),
            known => matches!(known, CacheAnswer::Finished),
        };
        let Some(flight) = shard.flights.get(&request.key) else {
            let (landed, record) = Default::default();
            let flight = Arc::new(Flight { of: Weak::clone(&self.this), landed, record });
            shard.flights.insert(request.key.clone(), Arc::clone(&flight));
            drop(shard);
            let leading = LeadGuard { cache: &self.cache, key: &request.key, flight };
            return StoreFuture::new(self.lead(request, is_finished, leading));
        };
        if !Weak::ptr_eq(&flight.of, &self.this) {
            drop(shard);
            return StoreFuture::new(self.ask(request, is_finished));
        }
        let flight = Arc::clone(flight);
        // The notification is created while the lock is held, so that the end of the flight wakes this call.
        let landed = Arc::clone(&flight.landed).notified_owned();
        drop(shard);
        StoreFuture::new(self.join(request, flight, landed))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        if !self.keeps {
            return self.inner.finish(lease, finish);
        }
        StoreFuture::new(async move {
            let (key, owner) = (&lease.key, lease.owner);
            let ticket = self.cache.ticket(key);
            // If several writes of this owner may have taken effect, it is unknown which result was recorded, and when.
            let only = self.cache.note_writer(key, owner);
            let written = self.inner.finish(lease, finish).await;
            match &written {
                Ok(Verdict::Applied) if only => {
                    self.cache.enter_written(&ticket, &Record::after(lease, finish.state()), lease.ttl);
                }
                Err(error) if only && !error.may_have_landed() => self.cache.forget_writer(key, owner),
                _ => {}
            }
            written
        })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        if !self.keeps {
            return self.inner.wait(key, attempt, at_most);
        }
        StoreFuture::new(async move {
            let told = self.inner.wait(key, attempt, at_most).await?;
            // This answer is the first replay of the record, so the next replay caches the record.
            if told.as_ref().is_some_and(|found| is_final(&found.record)) {
                self.cache.note_finished(key);
            }
            Ok(told)
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(async move {
            // The key is forgotten after the decision, because a record that another call caches meanwhile may be older
            // than the decision.
            let _forgotten = ForgetGuard(&self.cache, &decision.key);
            self.inner.decide(decision).await
        })
    }
}
