//! Keeps leases alive: one renewal task for each store handle, for any number of leases.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::pin;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Notify;

use super::flight::Flights;
use super::outage::Outage;
use super::repeats::TagCounts;
use super::{Store, StoreError, StoreErrorKind};
use crate::clock::{Clock, Instant, as_nanos};
use crate::combine::race;
use crate::key::Key;
use crate::metrics::{BeatResult, Metrics, Snapshot, StoreOp};
use crate::policy::OnCrash;
use crate::record::trail::{self, Holder};
use crate::record::{Lease, OwnerToken, Owners, Trail, Verdict};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{InheritedLock, MutexGuard, PerProcess, Process, SharedOnce, SharedWithChild};

mod deliveries;
#[cfg(all(test, shuttle))]
mod interleavings;

pub use self::deliveries::Beat;
pub(crate) use self::deliveries::{BeatGuard, Callback, Timer};
use self::deliveries::{Deliveries, DueBeat};

/// Value of `next_beat` while no renewal task is running.
const NEVER: u64 = u64::MAX;
/// Value of `next_beat` while the renewal task scans the leases: a lease that is registered now must make it scan
/// again.
const LOOKING: u64 = NEVER - 1;
/// Number of shards: a power of two, large enough that the threads of a large machine rarely wait for the same lock.
const SHARDS: usize = 16;
/// Longest sleep of the renewal task, so that the task ends soon after the last handler.
const LONGEST_SLEEP: Duration = Duration::from_secs(10);
/// Number of later changes after which the late end of an attempt may be forgotten.
const LATE_ENDS_KEPT: u32 = 4096;
/// A renewal task that is late by this much may be the parent's, which does not exist in the child of a `fork()`.
const OVERDUE: Duration = Duration::from_secs(1);

/// Leases that one store handle keeps alive, and its pending late writes.
///
/// Every store owns a `Heartbeats` and returns it from [`Store::heartbeats`]. A handler is registered before its first
/// poll, so even a handler that never yields keeps its lease. A single task finds the leases that are due and renews
/// them through [`Store::upkeep`], by [`Clock::spawn`]: with the real clock this is a thread of the library, which no
/// handler blocks. A renewal without an answer is repeated while the first renewal is still under way, and each lease
/// has its own answer. So a key, a node or a connection that hangs costs no other lease.
///
/// The task starts with the first handler, ends some seconds after the last one, and starts again in the child of a
/// `fork()`.
pub struct Heartbeats(PerProcess<Arc<Leases>>, HandleName);

/// Identity of the handle, for its records.
struct HandleName {
    name: Box<str>,
    /// Made at its first use: some handles live only for one call.
    holder: PerProcess<Holder<'static>>,
}

impl HandleName {
    fn new(name: &str) -> Self {
        Self { name: name.into(), holder: PerProcess::empty() }
    }
}

struct Leases {
    clock: Arc<dyn Clock>,
    /// Process that made these leases. The child of a `fork()` makes its own leases, unless its store is in memory.
    made_by: Process,
    /// Source of owner tokens. `None`: each token comes from the system's randomness.
    owners: Option<Owners>,
    tables: Tables,
    /// Replaces `tables` if a thread of the parent held one of their locks at the fork.
    anew: PerProcess<Box<Tables>>,
    deliveries_started: AtomicU64,
    /// Time of the next scan, in nanoseconds since the clock's origin, or [`LOOKING`], or [`NEVER`]. A lease that is
    /// due earlier must wake the renewal task.
    next_beat: AtomicU64,
    running: AtomicBool,
    /// Process whose renewal task is running.
    process: AtomicU32,
    /// False if leases are never renewed.
    beats: bool,
    /// Wakes the renewal task for a lease that is due before `next_beat`.
    earlier: PerProcess<Notify>,
    /// Number of late writes and renewals under way, which no call waits for.
    under_way: AtomicUsize,
    flushed: PerProcess<Notify>,
    /// Time since which no reservation was answered, in nanoseconds since the clock's origin, or [`NEVER`].
    down_since: AtomicU64,
    warned: AtomicBool,
    /// Number of changes of `late_ends`.
    late_ends_changed: AtomicU32,
    counts: EventCounts,
    /// Distinguishes the keys of one place from those of others in [`OF_TRANSACTIONS`].
    place: u64,
    /// Made by the first that counts: the name of the store is known then.
    metrics: SharedOnce<Arc<Metrics>>,
    /// Operations that the store has not answered.
    outage: Outage,
    /// Failures of a broker since its last success.
    broker_outage: Outage,
    /// True if a test treats the process as crashed.
    abandoned: AtomicBool,
    /// Duplicates that wait. A forked child starts with none.
    flights: PerProcess<Flights>,
}

/// The end of an attempt, or a renewal, after its lease.
struct LateEnd {
    /// Writes of it under way.
    writes: usize,
    /// Number of the latest change of this entry, among the changes of all entries.
    changed: u32,
}

/// Counts of events that no record keeps.
struct EventCounts {
    /// Failures of bodies that run without a record, by key.
    failures: TagCounts,
    /// Calls in transactions that the store refused, by key.
    refusals: TagCounts,
    /// Encounters of duplicates with an attempt, by key and attempt.
    meetings: TagCounts,
    /// Duplicates that wait only because their broker delivers them for the last times.
    last_waits: AtomicUsize,
}

/// The counts of all calls in transactions: the handle of such a call ends with it.
static OF_TRANSACTIONS: SharedOnce<EventCounts> = SharedOnce::new();

impl EventCounts {
    fn new() -> Self {
        let [failures, refusals, meetings] = [const { TagCounts::new() }; 3];
        Self { failures, refusals, meetings, last_waits: AtomicUsize::new(0) }
    }
}

#[derive(Default)]
struct Tables {
    shards: [SharedWithChild<LeaseShard>; SHARDS],
    /// Deliveries that beat, in the order in which they began.
    deliveries: [SharedWithChild<Deliveries>; SHARDS],
    /// Attempts that are renewed or ended after their lease.
    late_ends: SharedWithChild<HashMap<Key, LateEnd>>,
}

type LeaseShard = HashMap<OwnerToken, LeaseEntry, BuildHasherDefault<TokenHasher>>;

/// Uses the last bytes of an owner token as its hash, because they are random. `Hash` writes the length of the array
/// first; the last write is the token.
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

/// Permission to poll a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LeaseStanding {
    /// The lease is live.
    Held,
    /// The lease has lapsed by the clock of this process. A renewal is under way, and the body waits for it.
    Lapsed,
    /// The store answered that this attempt no longer has the lease.
    Lost,
    /// The body has run for longer than its policy allows. Its lease is no longer renewed.
    TimedOut,
    /// The lease has lapsed, and the store permanently refuses to renew it, or has not renewed it for longer than a
    /// body may be paused. See [`Heartbeats::why_unrenewed`].
    Unrenewed,
}

/// Time limits of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Nanoseconds.
    timeout: u64,
    pause: LongestPause,
}

impl Limits {
    /// Makes the limits of a body that runs for `timeout` at most. `pause`: longest wait for a renewal after the lease
    /// has lapsed; `None` if the body does not wait.
    pub(crate) fn new(timeout: Duration, pause: Option<Duration>) -> Self {
        let pause = pause.map_or(LongestPause::NONE, |pause| LongestPause(as_nanos(pause).min(u64::MAX - 1)));
        Self { timeout: as_nanos(timeout), pause }
    }

    pub(crate) fn timeout(self) -> Duration {
        Duration::from_nanos(self.timeout)
    }
}

/// Longest wait of a body for a renewal after its lease has lapsed, in nanoseconds. Half as large as a duration: each
/// call copies it several times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct LongestPause(u64);

impl LongestPause {
    /// No body waits.
    const NONE: Self = Self(u64::MAX);

    fn get(self) -> Option<Duration> {
        (self != Self::NONE).then(|| Duration::from_nanos(self.0))
    }
}

/// Renewals that failed.
struct RenewalFailure {
    /// Time when the first of them was sent.
    since: Instant,
    /// Last error of the store.
    error: StoreError,
    /// True if the store returned the error for this lease only.
    is_its_own: bool,
}

struct LeaseEntry {
    /// Handle of the call, so that the renewal task does not keep a store open.
    store: Arc<dyn Store>,
    lease: Lease,
    /// Time when the last confirmed reservation or renewal was sent. The lease is live for its duration from then on.
    confirmed_at: Instant,
    due: Instant,
    /// Time when the last renewal was sent, answered or not.
    asked_at: Instant,
    stop_at: Instant,
    pause: LongestPause,
    /// Failures since the last confirmed renewal, if there were any. Boxed: they are rare, and every lease would carry
    /// their size inline.
    failing: Option<Box<RenewalFailure>>,
    /// Never [`LeaseStanding::Lapsed`], which depends only on the time.
    standing: LeaseStanding,
    /// Woken when `standing` changes, and when a lapsed lease is renewed.
    waker: Option<Waker>,
}

impl LeaseEntry {
    fn beat(&self) -> Duration {
        self.lease.duration / 3
    }

    fn held_until(&self) -> Instant {
        self.confirmed_at.saturating_add(self.lease.duration)
    }

    /// Whether a record may have called the attempt interrupted by `now`.
    fn lapsed_under_fail(&self, now: impl FnOnce() -> Instant) -> bool {
        self.lease.on_crash == OnCrash::Fail && self.held_until() <= now()
    }

    /// Returns whether the store has permanently refused to renew this lease, alone or together with others.
    fn is_refused(&self) -> bool {
        self.failing.as_ref().is_some_and(|failing| failing.error.is_for_good())
    }

    /// Time when the body stops waiting for a renewal, unless one succeeds before. A process that was suspended sent no
    /// renewals meanwhile, so the time counts from the first failed renewal.
    fn give_up_at(&self) -> Instant {
        match (self.failing.as_deref(), self.pause.get()) {
            (Some(RenewalFailure { error, is_its_own: true, .. }), Some(_)) if error.is_for_good() => self.held_until(),
            (Some(RenewalFailure { since, .. }), Some(pause)) => self.held_until().max(*since).saturating_add(pause),
            _ => Instant::new(Duration::MAX),
        }
    }

    /// Time by which the renewal task must check this lease again.
    fn next(&self) -> Instant {
        self.due.min(self.stop_at).min(self.give_up_at())
    }

    fn turn(&mut self, standing: LeaseStanding) -> Option<Waker> {
        self.standing = standing;
        self.waker.take()
    }
}

impl Heartbeats {
    /// Makes the heartbeats of a new store handle. Each owner token comes from the clock's entropy, so that no token
    /// repeats in a forked process or in the copy of a virtual machine.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self::of(clock, None, true, 0)
    }

    /// Makes the heartbeats of a store whose records no other process sees: a forked process has a copy of its own.
    /// Owner tokens are counted from a random start.
    pub fn in_process(clock: Arc<dyn Clock>) -> Self {
        let owners = Owners::new(clock.entropy());
        Self::of(clock, Some(owners), true, 0)
    }

    /// Makes heartbeats that renew no lease, for a store whose reservations end in another way.
    pub fn none(clock: Arc<dyn Clock>) -> Self {
        Self::of(clock, None, false, 0)
    }

    /// No heartbeats, for one call in a transaction. `place` names the table or the schema of the records.
    #[cfg(any(feature = "with-rusqlite-0_40", feature = "with-sqlx-0_8", feature = "with-tokio-postgres-0_7"))]
    pub(crate) fn in_transaction(clock: Arc<dyn Clock>, place: &str) -> Self {
        let mut hasher = std::hash::DefaultHasher::new();
        hasher.write(place.as_bytes());
        Self::of(clock, None, false, hasher.finish())
    }

    fn of(clock: Arc<dyn Clock>, owners: Option<Owners>, beats: bool, place: u64) -> Self {
        Self(PerProcess::new(Leases::new(clock, owners, beats, place)), HandleName::new(""))
    }

    /// Returns the leases of this process. Costs a system call, except for a store in memory: the child of a `fork()`
    /// goes on with its copy of the parent's.
    fn here(&self) -> &Arc<Leases> {
        match self.0.first() {
            copied if copied.owners.is_some() => copied,
            _ => self.0.here_or(|parents| Leases::new(Arc::clone(&parents.clock), None, parents.beats, parents.place)),
        }
    }

    /// Like `here`, but without a system call, for the later steps of a call that has used `here`.
    fn leases(&self) -> &Arc<Leases> {
        self.0.latest().expect("made with a value")
    }

    /// Names the store handle, so that a record identifies its handle in addition to host and process (default: no
    /// name).
    #[must_use]
    pub fn held_by(mut self, name: &str) -> Self {
        self.1 = HandleName::new(name);
        self
    }

    /// Name of the handle.
    #[cfg(feature = "memory")]
    pub(crate) fn name(&self) -> &str {
        &self.1.name
    }

    /// Returns the holder of the keys that this handle reserves. In the child of a `fork()`, a store in memory is a
    /// copy of the parent's store, and its holder still has the process number of the parent.
    pub fn holder(&self) -> Holder<'static> {
        let here = || *self.1.holder.here_or_else(|| trail::here(&self.1.name));
        match self.0.first().owners {
            // Reading the process number is a system call.
            Some(_) => self.1.holder.latest().copied().unwrap_or_else(here),
            None => here(),
        }
    }

    /// Returns whether the current runtime can't renew leases, because a test has paused or moved its time. The records
    /// of a store in memory use that time too, and a task of that runtime renews them.
    pub(crate) fn is_out_of_time(&self) -> bool {
        let leases = self.0.first();
        leases.owners.is_none() && leases.beats && leases.clock.is_moved()
    }

    /// Returns the trail of a request of this handle.
    pub(crate) fn trail(&self) -> Trail {
        Trail::held(self.holder())
    }

    /// Clock of the store handle.
    pub fn clock(&self) -> &dyn Clock {
        &*self.0.first().clock
    }

    /// Returns whether leases are renewed. If not, they end in another way, for example with a transaction.
    pub(crate) fn renews(&self) -> bool {
        self.0.first().beats
    }

    #[cfg(any(feature = "memory", feature = "cached"))]
    pub(crate) fn clock_handle(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.0.first().clock)
    }

    /// Returns an owner token for a new attempt.
    pub fn new_owner(&self) -> OwnerToken {
        match &self.0.first().owners {
            Some(owners) => owners.next(),
            None => OwnerToken::from_bytes(self.0.first().clock.entropy().to_be_bytes()),
        }
    }

    /// Number of leases that are being kept alive.
    pub fn live(&self) -> usize {
        self.here().live()
    }

    /// Waits until every late write and renewal is done: the writes of handlers that were cancelled or panicked, and
    /// the current beat. Call it on shutdown, after the handlers have ended and before the process ends. A write that
    /// outlasts its lease, as under `on_crash = fail` in an outage, is waited for during the lease only.
    ///
    /// # Cancel safety
    /// Cancel safe: the writes go on.
    pub async fn flush(&self) {
        let leases = self.here();
        loop {
            let mut flushed = pin!(leases.flushed.here().notified());
            flushed.as_mut().enable();
            if leases.under_way.load(Ordering::SeqCst) == 0 {
                return;
            }
            flushed.await;
        }
    }

    /// Stops all renewals, releases and late writes of this handle, as if its process had crashed. For tests and
    /// demonstrations with several handles in one process (`MemoryStore::peer`).
    pub fn abandon(&self) {
        self.leases().abandoned.store(true, Ordering::SeqCst);
    }

    /// Returns whether calls of this handle may write after they are dropped.
    pub(crate) fn writes_late(&self) -> bool {
        self.leases().beats && !self.leases().abandoned.load(Ordering::SeqCst)
    }

    /// Duplicates that wait in handles with these heartbeats.
    pub(super) fn flights(&self) -> &Flights {
        self.leases().flights.here()
    }

    /// Records that the store has answered.
    pub(crate) fn store_answered(&self) {
        if self.leases().down_since.load(Ordering::Relaxed) != NEVER {
            self.leases().down_since.store(NEVER, Ordering::Relaxed);
        }
    }

    /// Records that the store has not answered. Returns the time since it last answered.
    pub(crate) fn store_failed(&self) -> Duration {
        let now = nanos(self.clock().now());
        let down_since = self.leases().down_since.fetch_min(now, Ordering::Relaxed).min(now);
        Duration::from_nanos(now - down_since)
    }

    /// Records the end of a body of `key` that ran without a record. Returns the number of its failures in a row, as
    /// far as they are still counted.
    pub(crate) fn unrecorded_failures(&self, key: &Key, is_ok: bool) -> u32 {
        let (failures, tag) = (&self.leases().counts().failures, self.leases().tag(key));
        match is_ok {
            true => {
                failures.forget(tag);
                0
            }
            false => failures.again(tag),
        }
    }

    /// Notes whether the store refused a call of `key` in a transaction. Returns the number of refusals in a row, as
    /// far as that is remembered.
    pub(crate) fn refusals_in_transactions(&self, key: &Key, is_refused: bool) -> u32 {
        let (refusals, tag) = (&self.leases().counts().refusals, self.leases().tag(key));
        match is_refused {
            true => refusals.again(tag),
            false => {
                refusals.forget(tag);
                0
            }
        }
    }

    /// Records that a duplicate has met attempt number `attempt` of `key`. Returns the number of such duplicates in
    /// this handle, as far as they are still counted.
    pub(crate) fn meets(&self, key: &Key, attempt: u32) -> u32 {
        // An odd multiplier spreads the numbers over all bits of the tag.
        self.leases()
            .counts()
            .meetings
            .again(self.leases().tag(key) ^ u64::from(attempt).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Returns the permission for a duplicate to wait on its last deliveries; `None` if too many of them wait already.
    pub(crate) fn last_wait(&self) -> Option<LastWait> {
        let more = |waiting| (waiting < LastWait::MOST).then_some(waiting + 1);
        let waits = self.leases().counts().last_waits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        waits.then(|| LastWait(Arc::clone(self.leases())))
    }

    /// Returns whether this is the first call, so that a warning is logged only once.
    pub(crate) fn warns_now(&self) -> bool {
        !self.leases().warned.swap(true, Ordering::Relaxed)
    }

    /// Returns the metrics of this store, which is called `store`.
    #[inline]
    pub(crate) fn metrics(&self, store: &'static str) -> &Metrics {
        match self.leases().metrics.get() {
            Some(metrics) => metrics,
            None => self.leases().make_metrics(store),
        }
    }

    /// Like `metrics`, at the beginning of a call: selects the leases of this process for the rest of the call.
    pub(crate) fn metrics_here(&self, store: &'static str) -> &Metrics {
        self.here();
        self.metrics(store)
    }

    /// Returns the metrics of this store, if any were counted.
    pub(super) fn known_metrics(&self) -> Option<&Metrics> {
        self.leases().metrics.get().map(|metrics| &**metrics)
    }

    /// Returns all metrics at this moment.
    pub(super) fn snapshot(&self, store: &'static str) -> Snapshot {
        self.metrics(store).snapshot(self.live())
    }

    pub(super) fn outage(&self) -> &Outage {
        &self.leases().outage
    }

    /// Returns the state of the renewal of leases at `now`.
    pub(super) fn beating(&self, now: Instant) -> RenewalStates {
        let leases = self.here();
        let mut standings =
            RenewalStates { is_running: !leases.beats || leases.is_running(), ..RenewalStates::default() };
        for at in 0..SHARDS {
            for registered in leases.shard(at).values() {
                standings.leases += 1;
                if leases.beats && registered.standing == LeaseStanding::Held {
                    // Counted from `confirmed_at`, so that a renewal that was sent and not answered is late too.
                    let due = registered.confirmed_at.saturating_add(registered.beat());
                    let lag = now.saturating_since(due);
                    standings.lag = standings.lag.max(lag);
                    standings.is_late |= lag > registered.beat();
                }
            }
        }
        standings
    }

    /// Returns the timer for callbacks while a delivery is being handled.
    pub(crate) fn timer(&self) -> Timer {
        Timer(Arc::clone(self.here()))
    }

    /// Starts work that [`flush`](Heartbeats::flush) waits for, until the returned value is dropped.
    pub(crate) fn under_way(&self) -> FlushGuard {
        FlushGuard::new(self.leases())
    }

    /// Marks `key` as one whose attempt this handle is still ending, until the returned value is dropped.
    pub(crate) fn ends_late(&self, key: &Key) -> LateEndGuard {
        let leases = self.here();
        leases.late_end(key, |end| end.writes += 1);
        LateEndGuard { leases: Arc::clone(leases), key: key.clone() }
    }

    /// Number of changes of late ends so far, for [`is_at_work`](Heartbeats::is_at_work).
    pub(crate) fn late_ends_changed(&self) -> u32 {
        self.leases().late_ends_changed.load(Ordering::Relaxed)
    }

    /// Whether an attempt of `key` runs in this handle, or was ended by it late since
    /// [`late_ends_changed`](Heartbeats::late_ends_changed) returned `since`. A lapsed lease says nothing about such an
    /// attempt: the outage that kept its renewals away kept its end away, too.
    pub(crate) fn is_at_work(&self, key: &Key, since: u32) -> bool {
        let leases = self.here();
        let is_later = |end: &LateEnd| end.changed != since && end.changed.wrapping_sub(since) < u32::MAX / 2;
        if leases.late_ends().get(key).is_some_and(|end| end.writes > 0 || is_later(end)) {
            return true;
        }
        let runs = |it: &LeaseEntry| it.lease.key == *key && it.standing != LeaseStanding::Lost;
        (0..SHARDS).any(|at| leases.shard(at).values().any(runs))
    }

    /// Keeps `lease` alive until it is deregistered, within `limits`.
    pub(crate) fn register(&self, store: &Arc<dyn Store>, lease: &Lease, confirmed_at: Instant, limits: Limits) {
        let leases = self.leases();
        // In the child of a `fork()`, a store in memory is a copy, and so are its parent's records. Only a late beat
        // shows that a fork happened.
        let planned = leases.next_beat.load(Ordering::SeqCst);
        if planned < nanos(confirmed_at).saturating_sub(span(OVERDUE)) && leases.is_forked() {
            leases.start_anew();
        }
        let registered = LeaseEntry {
            store: Arc::clone(store),
            lease: lease.clone(),
            confirmed_at,
            due: confirmed_at.saturating_add(lease.duration / 3),
            asked_at: confirmed_at,
            stop_at: confirmed_at.saturating_add(limits.timeout()),
            pause: limits.pause,
            failing: None,
            standing: LeaseStanding::Held,
            waker: None,
        };
        let next = nanos(registered.next());
        self.leases().shard_of(lease.owner).insert(lease.owner, registered);
        self.metrics(store.name()).lease_begins();
        if self.leases().beats && next < self.leases().next_beat.load(Ordering::SeqCst) {
            self.leases().expect_beat();
        }
    }

    /// Returns whether the body of `owner` may be polled. Wakes `waker` when that changes.
    pub(crate) fn standing(&self, owner: OwnerToken, waker: &Waker) -> LeaseStanding {
        if !self.leases().beats {
            return LeaseStanding::Held;
        }
        let now = self.leases().clock.now();
        let mut renewal = None;
        let (standing, unasked) = {
            let mut shard = self.leases().shard_of(owner);
            let Some(registered) = shard.get_mut(&owner) else { return LeaseStanding::Held };
            match &mut registered.waker {
                Some(known) if known.will_wake(waker) => {}
                known => *known = Some(waker.clone()),
            }
            if registered.standing != LeaseStanding::Held {
                return registered.standing;
            }
            if now < registered.held_until() {
                (LeaseStanding::Held, false)
            } else {
                // Makes the lease due immediately, but only once: a call may be polled often while the store is slow.
                let unasked = registered.asked_at < registered.held_until();
                if unasked {
                    registered.due = registered.due.min(now);
                    renewal = Some((Arc::clone(&registered.store), registered.lease.clone()));
                }
                (LeaseStanding::Lapsed, unasked)
            }
        };
        // The runtime of the renewal task may have shut down, or the task belongs to another process.
        if unasked || self.leases().next_beat.load(Ordering::SeqCst) == NEVER {
            self.leases().expect_beat();
        }
        if let Some((store, lease)) = renewal
            && self.0.first().clock.is_moved()
        {
            // The renewal task may run on another runtime, in real time: a test paused this time after the task had
            // started.
            let under_way = FlushGuard::new(self.leases());
            self.0.first().clock.spawn(Box::pin(renew(under_way, store, vec![lease], now)));
        }
        standing
    }

    /// Removes the time limit and the beats that can end the attempt of `owner`: its body has returned, and from here
    /// on only the store accepts or refuses its result.
    pub(crate) fn body_returned(&self, owner: OwnerToken) {
        if let Some(registered) = self.leases().shard_of(owner).get_mut(&owner) {
            registered.stop_at = Instant::new(Duration::MAX);
            registered.pause = LongestPause::NONE;
            registered.waker = None;
        }
    }

    /// Records that the body of `owner` is not polled again, and that its values are being dropped. Their drop may take
    /// as long as the body: the lease is kept alive for `timeout` from now, even if the body has timed out.
    pub(crate) fn drops_values(&self, owner: OwnerToken, timeout: Duration) {
        let stop_at = self.leases().clock.now().saturating_add(timeout);
        let resumes = {
            let mut shard = self.leases().shard_of(owner);
            let Some(registered) = shard.get_mut(&owner) else { return };
            registered.stop_at = stop_at;
            registered.pause = LongestPause::NONE;
            registered.waker = None;
            let resumes = matches!(registered.standing, LeaseStanding::TimedOut | LeaseStanding::Unrenewed);
            if resumes {
                registered.standing = LeaseStanding::Held;
            }
            resumes
        };
        // The renewal task may sleep beyond the next beat of this lease, because it had given the lease up.
        if resumes && self.leases().beats {
            self.leases().expect_beat();
        }
    }

    /// Returns the reason why the lease of `owner` was not renewed the last time.
    pub(crate) fn why_unrenewed(&self, owner: OwnerToken) -> StoreError {
        let shard = self.leases().shard_of(owner);
        let failing = shard.get(&owner).and_then(|registered| registered.failing.as_ref());
        failing.map_or_else(no_answer, |failing| failing.error.clone())
    }

    /// Stops the heartbeat. Returns the time when the lease was last confirmed.
    pub(crate) fn deregister(&self, owner: OwnerToken) -> Option<Instant> {
        let registered = self.leases().shard_of(owner).remove(&owner)?;
        if registered.lapsed_under_fail(|| self.leases().clock.now()) {
            self.leases().late_end(&registered.lease.key, |_| ());
        }
        if let Some(metrics) = self.leases().metrics.get() {
            metrics.lease_ends();
        }
        Some(registered.confirmed_at)
    }

    /// Records a renewal that another part of the engine sent at `asked_at`.
    pub(crate) fn confirmed(&self, owner: OwnerToken, asked_at: Instant) {
        let mut late = None;
        if let Some(registered) = self.leases().shard_of(owner).get_mut(&owner) {
            if registered.lapsed_under_fail(|| self.leases().clock.now()) {
                late = Some(registered.lease.key.clone());
            }
            registered.confirmed_at = registered.confirmed_at.max(asked_at);
        }
        if let Some(key) = late {
            self.leases().late_end(&key, |_| ());
        }
    }

    /// Time when the last confirmed reservation or renewal of `owner` was sent.
    pub(crate) fn confirmed_at(&self, owner: OwnerToken) -> Option<Instant> {
        self.leases().shard_of(owner).get(&owner).map(|registered| registered.confirmed_at)
    }

    /// Time until which the lease of `owner` is certainly live, if this handle keeps it alive.
    #[cfg(feature = "redis")]
    pub(crate) fn held_until(&self, owner: OwnerToken) -> Option<Instant> {
        let shard = self.leases().shard_of(owner);
        shard.get(&owner).filter(|registered| registered.standing == LeaseStanding::Held).map(LeaseEntry::held_until)
    }

    /// Time for which the lease of `owner` is certainly live; zero once its call has ended.
    pub(crate) fn lease_remaining(&self, owner: OwnerToken) -> Duration {
        let shard = self.leases().shard_of(owner);
        match shard.get(&owner) {
            Some(registered) if !self.leases().beats => registered.lease.duration,
            Some(registered) if registered.standing != LeaseStanding::Lost => {
                registered.held_until().saturating_since(self.leases().clock.now())
            }
            _ => Duration::ZERO,
        }
    }

    /// Longest time for which `lease` may still be live, if it was last confirmed at `confirmed_at` or by a later beat.
    /// A refused beat does not count: the record may be the finished one of this attempt.
    pub(crate) fn may_be_held_for(&self, lease: &Lease, confirmed_at: Instant) -> Duration {
        if !self.leases().beats {
            return lease.duration;
        }
        let known = self.leases().shard_of(lease.owner).get(&lease.owner).map(|registered| registered.confirmed_at);
        let confirmed_at = known.unwrap_or(confirmed_at).max(confirmed_at);
        confirmed_at.saturating_add(lease.duration).saturating_since(self.leases().clock.now())
    }
}

/// State of the renewal of leases.
#[derive(Default)]
pub(super) struct RenewalStates {
    /// Number of leases that are kept alive.
    pub(super) leases: usize,
    /// True if the renewal task runs in this process.
    pub(super) is_running: bool,
    /// Longest time by which the renewal of a lease is overdue.
    pub(super) lag: Duration,
    /// True if a lease is overdue by more than a beat.
    pub(super) is_late: bool,
}

impl Drop for Heartbeats {
    /// Wakes a sleeping renewal task, which has no lease left.
    fn drop(&mut self) {
        if let Some(leases) = self.0.known() {
            leases.earlier().notify_one();
        }
    }
}

impl Leases {
    fn new(clock: Arc<dyn Clock>, owners: Option<Owners>, beats: bool, place: u64) -> Arc<Self> {
        Arc::new(Self {
            clock,
            made_by: Process::this(),
            owners,
            tables: Tables::default(),
            anew: PerProcess::empty(),
            deliveries_started: AtomicU64::new(0),
            next_beat: AtomicU64::new(NEVER),
            running: AtomicBool::new(false),
            process: AtomicU32::new(0),
            beats,
            earlier: PerProcess::new(Notify::new()),
            under_way: AtomicUsize::new(0),
            flushed: PerProcess::new(Notify::new()),
            down_since: AtomicU64::new(NEVER),
            warned: AtomicBool::new(false),
            late_ends_changed: AtomicU32::new(0),
            counts: EventCounts::new(),
            place,
            metrics: SharedOnce::new(),
            outage: Outage::default(),
            broker_outage: Outage::default(),
            abandoned: AtomicBool::new(false),
            flights: PerProcess::default(),
        })
    }

    /// Returns the leases of the shard at `at`. If the parent held the lock at the fork, the child starts with none.
    fn shard(&self, at: usize) -> MutexGuard<'_, LeaseShard> {
        let anew = |InheritedLock| self.anew.here().shards[at].lock().expect("a lock of this process");
        self.tables.shards[at].lock().unwrap_or_else(anew)
    }

    /// Names `key` in the counts.
    fn tag(&self, key: &Key) -> u64 {
        key.seed() ^ self.place
    }

    fn counts(&self) -> &EventCounts {
        if self.beats { &self.counts } else { OF_TRANSACTIONS.get_or_init(EventCounts::new) }
    }

    fn late_ends(&self) -> MutexGuard<'_, HashMap<Key, LateEnd>> {
        let anew = |InheritedLock| self.anew.here().late_ends.lock().expect("a lock of this process");
        self.tables.late_ends.lock().unwrap_or_else(anew)
    }

    /// Changes the entry of an attempt that ends after its lease.
    fn late_end(&self, key: &Key, change: impl FnOnce(&mut LateEnd)) {
        let mut ends = self.late_ends();
        let changed = self.late_ends_changed.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        // Now and then: an outage makes many entries.
        if ends.len() >= 64 && ends.len().is_power_of_two() {
            ends.retain(|_, end| end.writes > 0 || changed.wrapping_sub(end.changed) < LATE_ENDS_KEPT);
        }
        let end = ends.entry(key.clone()).or_insert(LateEnd { writes: 0, changed });
        end.changed = changed;
        change(end);
    }

    /// The same for deliveries.
    fn delivery_shard(&self, at: usize) -> MutexGuard<'_, Deliveries> {
        let anew = |InheritedLock| self.anew.here().deliveries[at].lock().expect("a lock of this process");
        self.tables.deliveries[at].lock().unwrap_or_else(anew)
    }

    fn shard_of(&self, owner: OwnerToken) -> MutexGuard<'_, LeaseShard> {
        self.shard(usize::from(owner.as_bytes()[0]) % SHARDS)
    }

    fn earlier(&self) -> &Notify {
        self.earlier.latest().expect("made with a value")
    }

    fn flushed(&self) -> &Notify {
        self.flushed.latest().expect("made with a value")
    }

    /// Wakes tasks. In the child of a `fork()`, the tasks of a store in memory may include a task of the parent, and a
    /// lock of its runtime may stay held forever. So a separate thread takes that risk.
    fn wake(&self, wakers: Vec<Waker>) {
        let wake = move || wakers.into_iter().for_each(Waker::wake);
        if self.owners.is_none() || self.made_by.is_this() {
            wake();
        } else if let Err(error) = std::thread::Builder::new().name("idem-wake".to_owned()).spawn(wake) {
            tracing::warn!(%error, "no thread can be started to wake calls that may be those of the parent process");
        }
    }

    /// Starts again in the child of a `fork()`, for a store in memory: the renewal task and the deliveries belong to
    /// the parent.
    fn start_anew(self: &Arc<Self>) {
        (0..SHARDS).for_each(|at| std::mem::forget(std::mem::take(&mut *self.delivery_shard(at))));
        self.under_way.store(0, Ordering::SeqCst);
        self.expect_beat();
    }

    /// Ensures that the renewal task scans again.
    fn expect_beat(self: &Arc<Self>) {
        // The lease is already in its shard. The task publishes `next_beat` only after its scan of the shards, and a
        // task that ends scans again after it has cleared `running`. So either the task sees the lease, or we wake the
        // task, or we start another one.
        if self.running.swap(true, Ordering::SeqCst) && !self.is_forked() {
            self.earlier().notify_one();
            return;
        }
        self.earlier.here();
        self.flushed.here();
        let process = std::process::id();
        self.next_beat.store(LOOKING, Ordering::SeqCst);
        self.process.store(process, Ordering::SeqCst);
        self.clock.spawn(Box::pin(beat(TaskGuard { leases: Arc::clone(self), process, has_ended: false })));
    }

    /// Returns whether the renewal task belongs to the parent process of this one.
    fn is_forked(&self) -> bool {
        let process = self.process.load(Ordering::SeqCst);
        process != 0 && process != std::process::id()
    }

    fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst) && !self.is_forked()
    }

    #[cold]
    fn make_metrics(&self, store: &'static str) -> &Metrics {
        self.metrics.get_or_init(|| match self.beats {
            true => Arc::new(Metrics::new(store, Arc::clone(&self.clock))),
            // A store of one call in a transaction; the next call has another one.
            false => Metrics::of_transactions(store, &self.clock),
        })
    }

    /// Counts the result of the renewal of a lease.
    fn count_beat(&self, result: BeatResult) {
        if let Some(metrics) = self.metrics.get() {
            metrics.beat(result);
        }
    }

    fn live(&self) -> usize {
        (0..SHARDS).map(|at| self.shard(at).len()).sum()
    }

    /// Returns whether the renewal task has no work. Leases without heartbeats are no work.
    fn is_idle(&self) -> bool {
        (!self.beats || self.live() == 0) && self.beating() == 0
    }

    /// Returns the leases that are due by `now` or soon after, and the time of the next scan. Wakes the bodies whose
    /// time is over.
    fn due(&self, now: Instant) -> (ScanWork, Instant) {
        let mut due = ScanWork::default();
        if self.abandoned.load(Ordering::SeqCst) {
            return (due, now.saturating_add(LONGEST_SLEEP));
        }
        let mut next = now.saturating_add(LONGEST_SLEEP);
        due.deliveries = self.due_deliveries(now, &mut next);
        // Without heartbeats only the deliveries beat.
        for at in (0..SHARDS).filter(|_| self.beats) {
            let mut over = Vec::new();
            for registered in
                self.shard(at).values_mut().filter(|registered| registered.standing == LeaseStanding::Held)
            {
                // The body has reached its time limit, or has waited too long for a renewal.
                if registered.stop_at <= now {
                    over.extend(registered.turn(LeaseStanding::TimedOut));
                    continue;
                }
                if registered.give_up_at() <= now {
                    over.extend(registered.turn(LeaseStanding::Unrenewed));
                    continue;
                }
                // Renew up to an eighth of a beat early, to share calls. The pauses below are longer, or a lease whose
                // renewal failed would be due immediately.
                let beat = registered.beat();
                if registered.due <= now.saturating_add(beat / 8) {
                    due.lag = due.lag.max(now.saturating_since(registered.due));
                    due.store.get_or_insert_with(|| Arc::clone(&registered.store));
                    // A call for several leases does not say which of them the store permanently refuses, and only a
                    // refusal of its own lease may end a body.
                    let is_alone = registered.is_refused() && registered.held_until() <= now;
                    match is_alone {
                        true => due.alone.push(registered.lease.clone()),
                        false => due.leases.push(registered.lease.clone()),
                    }
                    // Due again before the answer arrives: this call may be stuck at another lease.
                    registered.due = now.saturating_add(beat / 2);
                    registered.asked_at = now;
                }
                next = next.min(registered.next());
            }
            if !over.is_empty() {
                self.wake(over);
            }
        }
        (due, next)
    }

    /// Applies the store's answer about `lease`, requested at `asked_at`.
    fn enter(&self, lease: &Lease, asked_at: Instant, write: Verdict) {
        let mut shard = self.shard_of(lease.owner);
        // The owner may have another attempt now, if the store answered its request again.
        let Some(registered) = shard.get_mut(&lease.owner).filter(|it| it.lease.attempt == lease.attempt) else {
            return;
        };
        self.count_beat(if write == Verdict::Applied { BeatResult::Renewed } else { BeatResult::Refused });
        let mut lapsed = false;
        let waker = match write {
            Verdict::Applied => {
                lapsed = registered.held_until() <= self.clock.now();
                registered.confirmed_at = registered.confirmed_at.max(asked_at);
                registered.due = registered.confirmed_at.saturating_add(registered.beat());
                registered.failing = None;
                if lapsed { registered.waker.take() } else { None }
            }
            Verdict::Refused => registered.turn(LeaseStanding::Lost),
        };
        drop(shard);
        if lapsed && lease.on_crash == OnCrash::Fail {
            self.late_end(&lease.key, |_| ());
        }
        if let Some(waker) = waker {
            self.wake(vec![waker]);
        }
    }

    /// Handles the leases that got no answer: makes them due again, sooner than while their call was under way.
    /// `error`: the store's error for the call.
    fn unanswered(&self, leases: &[Lease], asked_at: Instant, error: Option<&StoreError>) {
        let now = self.clock.now();
        let mut sooner = false;
        for lease in leases {
            if let Some(registered) = self.shard_of(lease.owner).get_mut(&lease.owner)
                && registered.confirmed_at < asked_at
            {
                registered.due = registered.due.min(now.saturating_add(registered.beat() / 4));
                let since = registered.failing.as_ref().map_or(asked_at, |failing| failing.since);
                let error = error.cloned().unwrap_or_else(no_answer);
                let failing = RenewalFailure { since, error, is_its_own: leases.len() == 1 };
                registered.failing = Some(Box::new(failing));
                self.count_beat(BeatResult::Failed);
                sooner = true;
            }
        }
        if sooner {
            self.earlier().notify_one();
        }
    }
}

impl fmt::Debug for Heartbeats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heartbeats").field("live", &self.live()).finish_non_exhaustive()
    }
}

/// Returns the error of a renewal without an answer of the store.
fn no_answer() -> StoreError {
    StoreError::new(StoreErrorKind::Unconfirmed, "the store did not answer the renewal of a lease")
}

fn span(duration: Duration) -> u64 {
    as_nanos(duration).min(LOOKING - 1)
}

fn nanos(instant: Instant) -> u64 {
    instant.nanos().min(LOOKING - 1)
}

/// Marks a renewal task as running. If a runtime that shuts down drops the task, this guard wakes the remaining
/// handlers, on any runtime, and the first of them starts a new task.
struct TaskGuard {
    leases: Arc<Leases>,
    process: u32,
    /// True once another task may be running.
    has_ended: bool,
}

impl TaskGuard {
    /// Ends the task if no lease is left. Returns whether the task has ended.
    ///
    /// A call that registers a lease while the task is about to end sees it as running, and the body of that call may
    /// never yield. So the task scans again after it has declared its end.
    fn end(&mut self) -> bool {
        let leases = &self.leases;
        leases.next_beat.store(NEVER, Ordering::SeqCst);
        leases.running.store(false, Ordering::SeqCst);
        self.has_ended = leases.is_idle() || leases.running.swap(true, Ordering::SeqCst);
        if !self.has_ended {
            leases.next_beat.store(LOOKING, Ordering::SeqCst);
        }
        self.has_ended
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        let leases = &self.leases;
        if self.has_ended || leases.process.load(Ordering::SeqCst) != self.process {
            return;
        }
        leases.next_beat.store(NEVER, Ordering::SeqCst);
        leases.running.store(false, Ordering::SeqCst);
        for at in 0..SHARDS {
            let wakers: Vec<_> =
                leases.shard(at).values_mut().filter_map(|registered| registered.waker.take()).collect();
            if !wakers.is_empty() {
                leases.wake(wakers);
            }
        }
        leases.wake_deliveries();
    }
}

/// Work of one scan: leases of one store handle, or of wrappers around it, and deliveries.
#[derive(Default)]
struct ScanWork {
    store: Option<Arc<dyn Store>>,
    leases: Vec<Lease>,
    /// Leases that are each renewed in a call of their own.
    alone: Vec<Lease>,
    /// Longest time by which one of the leases is overdue.
    lag: Duration,
    deliveries: Vec<DueBeat>,
}

/// The renewal task.
async fn beat(mut running: TaskGuard) {
    let mut slept = false;
    loop {
        let leases = &running.leases;
        let now = leases.clock.now();
        let (due, next) = leases.due(now);
        if let Some(store) = due.store {
            if let Some(metrics) = leases.metrics.get() {
                metrics.beat_was_late(due.lag);
            }
            let alone = due.alone.into_iter().map(|lease| vec![lease]);
            for together in [due.leases].into_iter().filter(|leases| !leases.is_empty()).chain(alone) {
                let under_way = FlushGuard::new(leases);
                leases.clock.spawn(Box::pin(renew(under_way, Arc::clone(&store), together, now)));
            }
        }
        due.deliveries.into_iter().for_each(|delivery| leases.call(delivery));
        if Arc::strong_count(leases) == 1 {
            return;
        }
        // The task ends only after a sleep: a sequence of short handlers must not start a task each. A handle without
        // heartbeats belongs to one transaction, and its task ends immediately.
        if (slept || !leases.beats) && leases.is_idle() {
            if running.end() {
                return;
            }
            slept = false;
            continue;
        }
        leases.next_beat.store(nanos(next), Ordering::SeqCst);
        slept = race(leases.earlier().notified(), leases.clock.sleep(next.saturating_since(now))).await.is_none();
        leases.next_beat.store(LOOKING, Ordering::SeqCst);
    }
}

/// Renews all leases that are due together in one call. A lease without an answer is renewed by another call.
async fn renew(under_way: FlushGuard, store: Arc<dyn Store>, due: Vec<Lease>, asked_at: Instant) {
    let leases = &under_way.0;
    let answer = |at: usize, write| {
        if let Some(lease) = due.get(at) {
            leases.enter(lease, asked_at, write);
        }
    };
    // A call that takes longer than a lease keeps no lease alive, and other calls have been made since.
    let longest = due.iter().map(|lease| lease.duration).max().unwrap_or_default();
    let upkeep = store.upkeep();
    let renewing = upkeep.renew(&due, &answer).watched(&*upkeep, StoreOp::Renew);
    let error = match race(renewing, leases.clock.sleep(longest)).await {
        Some(renewed) => renewed.err(),
        None => {
            let late = StoreError::new(StoreErrorKind::Unconfirmed, "no answer within a lease");
            store.heartbeats().operation_failed(store.name(), StoreOp::Renew, &late);
            Some(late)
        }
    };
    leases.unanswered(&due, asked_at, error.as_ref());
}

/// Counts work that [`Heartbeats::flush`] waits for.
pub(crate) struct FlushGuard(Arc<Leases>);

/// A duplicate that waits only because few deliveries of its message are left. Each such duplicate occupies a slot of
/// its consumer for as long as an attempt may run, so their number is limited.
pub(crate) struct LastWait(Arc<Leases>);

impl LastWait {
    /// Largest number of such duplicates in one store handle at a time.
    pub(crate) const MOST: usize = 4;
}

impl Drop for LastWait {
    fn drop(&mut self) {
        self.0.counts().last_waits.fetch_sub(1, Ordering::Relaxed);
    }
}

impl FlushGuard {
    fn new(leases: &Arc<Leases>) -> Self {
        leases.under_way.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(leases))
    }
}

/// An attempt that is ended after its lease; see [`Heartbeats::ends_late`].
pub(crate) struct LateEndGuard {
    leases: Arc<Leases>,
    key: Key,
}

impl Drop for LateEndGuard {
    fn drop(&mut self) {
        self.leases.late_end(&self.key, |end| end.writes = end.writes.saturating_sub(1));
    }
}

impl Drop for FlushGuard {
    fn drop(&mut self) {
        if self.0.under_way.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.flushed().notify_waiters();
        }
    }
}
