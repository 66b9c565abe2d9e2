//! Leases of a store handle and their beats: one renewal task for any number of leases and deliveries.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Notify;

use super::deliveries::{Callback, CallbackEnd, Delivery, DeliveryTable, DueBeat};
use super::late_writes::{FlushGuard, LateWrites};
use super::lease_table::{LeaseEntry, LeaseStanding, LeaseTable, Limits, RenewalFailure, RenewalStates, no_answer};
use super::step_journal::{JournalAccess, StepJournal};
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::key::Key;
use crate::metrics::{BeatResult, BrokerBeat, Metrics, StoreOp};
use crate::policy::OnCrash;
use crate::record::messages::UnsentMessages;
use crate::record::{Journal, Lease, OwnerToken, Verdict};
use crate::store::outage::Outage;
use crate::store::{Store, StoreError, StoreErrorKind};
use crate::sync::PerProcess;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Value of `next_beat` while no renewal task is running.
pub(super) const NEVER: u64 = u64::MAX;
/// Value of `next_beat` while the renewal task scans the leases: a lease that is registered now must cause another
/// scan.
const LOOKING: u64 = NEVER - 1;
/// Longest sleep of the renewal task, so that the task ends soon after the last handler has ended.
pub(super) const LONGEST_SLEEP: Duration = Duration::from_secs(10);

/// Leases that one store handle keeps alive in one process.
///
/// A handler is registered before its first poll, so even a handler that never yields keeps its lease. A single task
/// finds the leases that are due and renews them through [`Store::upkeep`], by [`Clock::spawn`]: the real clock uses a
/// thread of the library, which no handler blocks. A renewal without an answer is repeated while the first renewal is
/// still under way, and each lease has its own answer. So a key, a node or a connection that hangs does not make other
/// leases lapse.
///
/// The renewal task starts with the first handler, ends some seconds after the last handler, and starts again in the
/// child of a `fork()`.
pub(crate) struct Leases {
    clock: Arc<dyn Clock>,
    mode: RenewalMode,
    table: LeaseTable,
    deliveries: DeliveryTable,
    /// Time of the next scan, in nanoseconds since the clock's origin, or [`LOOKING`], or [`NEVER`]. A lease that is
    /// due before that time must wake the renewal task.
    pub(super) next_beat: AtomicU64,
    pub(super) running: AtomicBool,
    /// Process whose renewal task is running.
    process: AtomicU32,
    /// Wakes the renewal task for a lease that is due before `next_beat`.
    earlier: PerProcess<Notify>,
    late_writes: Arc<LateWrites>,
    metrics: Arc<Metrics>,
    /// Failed callbacks of beats since the last callback that succeeded, for log lines.
    broker_outage: Outage,
    /// True after a test has declared that the process crashed.
    abandoned: AtomicBool,
}

/// Whether a store handle renews its leases, and when a call finds out that its process is a forked child. The child
/// starts with an empty table of leases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RenewalMode {
    /// Leases are renewed. Each call reads the process number when it begins.
    OfProcess,
    /// Leases are renewed. A call reads the process number when its body begins: the records are in memory, so a replay
    /// would take noticeably longer with a system call.
    OfBodies,
    /// Leases are never renewed: they end in another way, for example with a transaction.
    Never,
}

impl Leases {
    pub(super) fn new(
        clock: Arc<dyn Clock>,
        mode: RenewalMode,
        late_writes: Arc<LateWrites>,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            clock,
            mode,
            table: LeaseTable::default(),
            deliveries: DeliveryTable::default(),
            next_beat: AtomicU64::new(NEVER),
            running: AtomicBool::new(false),
            process: AtomicU32::new(0),
            earlier: PerProcess::new(Notify::new()),
            late_writes,
            metrics,
            broker_outage: Outage::default(),
            abandoned: AtomicBool::new(false),
        })
    }

    /// Returns whether leases are renewed.
    fn beats(&self) -> bool {
        self.mode != RenewalMode::Never
    }

    /// Number of leases that are kept alive.
    pub(super) fn live(&self) -> usize {
        self.table.len()
    }

    /// Returns whether this process runs an attempt of `key` or writes its end. An attempt that lost its lease while
    /// its body ran is left out.
    pub(super) fn runs(&self, key: &Key) -> bool {
        self.table.runs(key)
    }

    /// Stops all renewals and late writes, as if the process had crashed.
    #[cfg(any(feature = "testing", feature = "conformance"))]
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    /// Returns whether a task may write the end of a dropped call: not in a transaction, and not after a call of
    /// `abandon`.
    pub(super) fn writes_late(&self) -> bool {
        self.beats() && !self.abandoned.load(Ordering::SeqCst)
    }

    /// Returns the state of the renewals at `now`.
    pub(super) fn states(&self, now: Instant) -> RenewalStates {
        let is_running = !self.beats() || self.is_running();
        let mut states = RenewalStates { is_running, ..RenewalStates::default() };
        self.table.add_states(now, self.beats(), &mut states);
        states
    }

    /// Keeps `lease` alive until it is deregistered, within `limits`. `journal`: steps of earlier attempts.
    /// `is_journaled`: whether the steps of this attempt are journaled.
    pub(crate) fn register(
        self: &Arc<Self>,
        store: &Arc<dyn Store>,
        lease: &Lease,
        confirmed_at: Instant,
        limits: Limits,
        journal: Option<&Journal>,
        is_journaled: bool,
    ) {
        let entry = LeaseEntry {
            store: Arc::clone(store),
            lease: lease.clone(),
            confirmed_at,
            due: confirmed_at.saturating_add(lease.duration / 3),
            asked_at: confirmed_at,
            stop_at: confirmed_at.saturating_add(limits.timeout()),
            pause: limits.pause,
            failing: None,
            standing: LeaseStanding::Held,
            is_ending: false,
            waker: None,
            is_journaled,
            is_sealed: false,
            journal: journal.map(|journal| Arc::new(StepJournal::of(journal))),
        };
        let next = nanos(entry.next());
        self.table.shard_of(lease.owner).insert(lease.owner, entry);
        self.metrics.lease_begins();
        if self.beats() && next < self.next_beat.load(Ordering::SeqCst) {
            self.expect_beat();
        }
    }

    /// Returns the steps of the attempt of `owner`.
    pub(crate) fn journal(&self, owner: OwnerToken) -> JournalAccess {
        match self.table.shard_of(owner).get_mut(&owner) {
            Some(LeaseEntry { is_journaled: false, .. }) => JournalAccess::Off,
            Some(LeaseEntry { journal, .. }) => JournalAccess::On(Arc::clone(journal.get_or_insert_default())),
            None => JournalAccess::Ended,
        }
    }

    /// Returns the place of the messages of the attempt of `owner`, and whether its record will hold them; `None` once
    /// the messages are sealed.
    pub(crate) fn outbox(&self, owner: OwnerToken) -> Option<(Arc<StepJournal>, bool)> {
        let mut shard = self.table.shard_of(owner);
        let entry = shard.get_mut(&owner).filter(|entry| !entry.is_sealed)?;
        Some((Arc::clone(entry.journal.get_or_insert_default()), entry.is_journaled))
    }

    /// Seals the messages of the attempt of `owner`, and returns them; `None` if there are none.
    pub(crate) fn seal_messages(&self, owner: OwnerToken) -> Option<UnsentMessages> {
        let mut shard = self.table.shard_of(owner);
        let entry = shard.get_mut(&owner)?;
        entry.is_sealed = true;
        entry.journal.as_ref()?.seal()
    }

    /// Records that the store has published the messages of `owner` together with its finished record.
    #[cfg(feature = "nats")]
    pub(crate) fn messages_left(&self, owner: OwnerToken) {
        if let Some(journal) = self.known_journal(owner) {
            journal.messages_left();
        }
    }

    /// Returns whether the store has published the messages of `owner` together with its finished record.
    pub(crate) fn have_messages_left(&self, owner: OwnerToken) -> bool {
        self.known_journal(owner).is_some_and(|journal| journal.have_messages_left())
    }

    /// Returns the steps of the attempt of `owner`, if a step of the attempt or of an earlier one is known.
    pub(crate) fn known_journal(&self, owner: OwnerToken) -> Option<Arc<StepJournal>> {
        self.table.shard_of(owner).get_mut(&owner)?.journal.clone()
    }

    /// Returns whether the body of `owner` may be polled. Wakes `waker` when the standing of the lease changes.
    pub(crate) fn standing(self: &Arc<Self>, owner: OwnerToken, waker: &Waker) -> LeaseStanding {
        if !self.beats() {
            return LeaseStanding::Held;
        }
        let now = self.clock.now();
        let mut renewal = None;
        let (standing, unasked) = {
            let mut shard = self.table.shard_of(owner);
            let Some(entry) = shard.get_mut(&owner) else { return LeaseStanding::Held };
            match &mut entry.waker {
                Some(known) if known.will_wake(waker) => {}
                known => *known = Some(waker.clone()),
            }
            if entry.standing != LeaseStanding::Held {
                return entry.standing;
            }
            if now < entry.held_until() {
                (LeaseStanding::Held, false)
            } else {
                // The lease becomes due immediately, but only once: a body may be polled often while the store is slow.
                let unasked = entry.asked_at < entry.held_until();
                if unasked {
                    entry.due = entry.due.min(now);
                    renewal = Some((Arc::clone(&entry.store), entry.lease.clone()));
                }
                (LeaseStanding::Lapsed, unasked)
            }
        };
        // The renewal task may be gone because its runtime has shut down or because the process has forked.
        if unasked || self.next_beat.load(Ordering::SeqCst) == NEVER {
            self.expect_beat();
        }
        if let Some((store, lease)) = renewal
            && self.clock.is_moved()
        {
            // A test has paused or moved this clock after the renewal task had started. The renewal task may sleep on
            // another runtime, in real time, so the renewal starts here.
            self.spawn_renewal(store, vec![lease], now);
        }
        standing
    }

    /// Removes the limits that can end the attempt of `owner`. The body has returned: from here on only the store
    /// accepts or refuses its result.
    pub(crate) fn body_returned(&self, owner: OwnerToken) {
        if let Some(entry) = self.table.shard_of(owner).get_mut(&owner) {
            entry.end_body(Instant::new(Duration::MAX));
        }
    }

    /// Records that the body of `owner` is not polled again, and that its values are being dropped. The drop may take
    /// as long as the body: the lease is kept alive for `timeout` from now, even if the body has timed out.
    pub(crate) fn drops_values(self: &Arc<Self>, owner: OwnerToken, timeout: Duration) {
        let stop_at = self.clock.now().saturating_add(timeout);
        let resumes = {
            let mut shard = self.table.shard_of(owner);
            let Some(entry) = shard.get_mut(&owner) else { return };
            entry.end_body(stop_at);
            let resumes = matches!(entry.standing, LeaseStanding::TimedOut | LeaseStanding::Unrenewed);
            if resumes {
                entry.standing = LeaseStanding::Held;
            }
            resumes
        };
        // The renewal task had given up this lease, and may sleep beyond the next beat of the lease.
        if resumes && self.beats() {
            self.expect_beat();
        }
    }

    /// Returns the error of the last renewal of `owner`.
    pub(crate) fn why_unrenewed(&self, owner: OwnerToken) -> StoreError {
        let shard = self.table.shard_of(owner);
        let failing = shard.get(&owner).and_then(|entry| entry.failing.as_ref());
        failing.map_or_else(no_answer, |failing| failing.error.clone())
    }

    /// Stops the renewal of the lease. Returns the time when the last confirmed reservation or renewal was sent, and
    /// the number of steps in doubt that the attempt has reached.
    pub(crate) fn deregister(&self, owner: OwnerToken) -> Option<(Instant, u32)> {
        let entry = self.table.shard_of(owner).remove(&owner)?;
        if entry.lapsed_under_fail(|| self.clock.now()) {
            self.late_writes.ended_late(&entry.lease.key);
        }
        self.metrics.lease_ends();
        Some((entry.confirmed_at, entry.journal.map_or(0, |journal| journal.doubts())))
    }

    /// Records that the store has confirmed a renewal of the lease of `owner`. Another part of the engine sent this
    /// renewal at `asked_at`.
    pub(crate) fn confirmed(&self, owner: OwnerToken, asked_at: Instant) {
        let (mut late, mut waker) = (None, None);
        if let Some(entry) = self.table.shard_of(owner).get_mut(&owner) {
            if entry.held_until() <= self.clock.now() {
                late = (entry.lease.on_crash == OnCrash::Fail).then(|| entry.lease.key.clone());
                // The body waits for this renewal: the heartbeat finds no lapsed lease any more.
                waker = entry.waker.take();
            }
            entry.confirmed_at = entry.confirmed_at.max(asked_at);
        }
        if let Some(key) = late {
            self.late_writes.ended_late(&key);
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Time when the last confirmed reservation or renewal of `owner` was sent.
    pub(crate) fn confirmed_at(&self, owner: OwnerToken) -> Option<Instant> {
        self.table.shard_of(owner).get(&owner).map(|entry| entry.confirmed_at)
    }

    /// Time until which the lease of `owner` is certainly live; `None` if this handle does not keep the lease alive.
    #[cfg(feature = "redis")]
    pub(crate) fn held_until(&self, owner: OwnerToken) -> Option<Instant> {
        let shard = self.table.shard_of(owner);
        shard.get(&owner).filter(|entry| entry.standing == LeaseStanding::Held).map(LeaseEntry::held_until)
    }

    /// Time for which the lease of `owner` is certainly live; zero after the end of the call.
    pub(crate) fn lease_remaining(&self, owner: OwnerToken) -> Duration {
        let shard = self.table.shard_of(owner);
        match shard.get(&owner) {
            Some(entry) if !self.beats() => entry.lease.duration,
            Some(entry) if entry.standing != LeaseStanding::Lost => {
                entry.held_until().saturating_since(self.clock.now())
            }
            _ => Duration::ZERO,
        }
    }

    /// Longest time for which `lease` may still be live, if its last confirmed request was sent at `confirmed_at` or
    /// later. A refused renewal does not shorten the time: the renewal may have found the record that this attempt
    /// finished.
    pub(crate) fn may_be_held_for(&self, lease: &Lease, confirmed_at: Instant) -> Duration {
        if !self.beats() {
            return lease.duration;
        }
        let known = self.table.shard_of(lease.owner).get(&lease.owner).map(|entry| entry.confirmed_at);
        let confirmed_at = known.unwrap_or(confirmed_at).max(confirmed_at);
        confirmed_at.saturating_add(lease.duration).saturating_since(self.clock.now())
    }

    fn earlier(&self) -> &Notify {
        self.earlier.latest().expect("made with a value")
    }

    /// Wakes the sleeping renewal task, which then ends if only this task still holds the leases.
    pub(super) fn wake_task(&self) {
        self.earlier().notify_one();
    }

    /// Ensures that the renewal task scans again.
    fn expect_beat(self: &Arc<Self>) {
        // The lease is already in its shard. The task publishes `next_beat` only after a scan of all shards, and a task
        // that ends looks for work again after it has cleared `running`. So the task sees the lease, or this call wakes
        // the task, or this call starts another task.
        if self.running.swap(true, Ordering::SeqCst) && !self.is_forked() {
            self.earlier().notify_one();
            return;
        }
        self.earlier.here();
        self.late_writes.expect();
        let process = std::process::id();
        self.next_beat.store(LOOKING, Ordering::SeqCst);
        self.process.store(process, Ordering::SeqCst);
        self.clock.spawn(Box::pin(beat(TaskGuard { leases: Arc::clone(self), process, has_ended: false })));
    }

    /// Returns whether a parent process started the renewal task, so that the task does not run in this process.
    fn is_forked(&self) -> bool {
        let process = self.process.load(Ordering::SeqCst);
        process != 0 && process != std::process::id()
    }

    fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst) && !self.is_forked()
    }

    /// Ensures that the renewal task scans again by `due`.
    fn expect_beat_before(self: &Arc<Self>, due: Instant) {
        if nanos(due) < self.next_beat.load(Ordering::SeqCst) {
            self.expect_beat();
        }
    }

    /// Returns whether the renewal task has no work. Leases of a handle that never renews are no work for the task.
    fn is_idle(&self) -> bool {
        (!self.beats() || self.live() == 0) && self.deliveries.is_empty()
    }

    /// Starts the renewals and callbacks that are due by `now` or soon after, and wakes the bodies whose time is over.
    /// Returns the time of the next scan.
    fn scan(self: &Arc<Self>, now: Instant) -> Instant {
        let mut next = now.saturating_add(LONGEST_SLEEP);
        if self.abandoned.load(Ordering::SeqCst) {
            return next;
        }
        let callbacks = self.deliveries.due(now, &mut next);
        // A handle that renews no leases still runs the callbacks of its deliveries.
        if self.beats() {
            let due = self.table.due(now, &mut next);
            due.over.into_iter().for_each(Waker::wake);
            if let Some(store) = due.store {
                self.metrics.beat_was_late(due.lag);
                let alone = due.alone.into_iter().map(|lease| vec![lease]);
                for together in [due.leases].into_iter().filter(|leases| !leases.is_empty()).chain(alone) {
                    self.spawn_renewal(Arc::clone(&store), together, now);
                }
            }
        }
        for callback in callbacks {
            self.call(callback);
        }
        next
    }

    fn spawn_renewal(self: &Arc<Self>, store: Arc<dyn Store>, due: Vec<Lease>, now: Instant) {
        self.clock.spawn(Box::pin(renew(self.late_writes.under_way(), Arc::clone(self), store, due, now)));
    }

    /// Starts the callback of a delivery.
    fn call(self: &Arc<Self>, DueBeat { number, beat }: DueBeat) {
        let guard = CallbackGuard { leases: Arc::clone(self), number, failed: true };
        beat.call(&*self.clock, move |key, elapsed, told| guard.report(key, elapsed, told));
    }

    /// Applies the store's answer to the renewal of `lease` that was sent at `asked_at`.
    fn enter(&self, lease: &Lease, asked_at: Instant, write: Verdict) {
        let mut shard = self.table.shard_of(lease.owner);
        // A late copy of a reservation may create a newer attempt with the same owner token. If the entry holds that
        // newer attempt, the answer to the renewal of the older lease is ignored.
        let Some(entry) = shard.get_mut(&lease.owner).filter(|it| it.lease.attempt == lease.attempt) else {
            return;
        };
        self.metrics.beat(if write == Verdict::Applied { BeatResult::Renewed } else { BeatResult::Refused });
        let mut lapsed = false;
        let waker = match write {
            Verdict::Applied => {
                lapsed = entry.held_until() <= self.clock.now();
                entry.confirmed_at = entry.confirmed_at.max(asked_at);
                entry.due = entry.confirmed_at.saturating_add(entry.beat());
                entry.failing = None;
                if lapsed { entry.waker.take() } else { None }
            }
            Verdict::Refused => entry.turn(LeaseStanding::Lost),
        };
        drop(shard);
        if lapsed && lease.on_crash == OnCrash::Fail {
            self.late_writes.ended_late(&lease.key);
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Makes leases without an answer due again soon. `error` is the store's error for the whole call.
    fn unanswered(&self, leases: &[Lease], asked_at: Instant, error: Option<&StoreError>) {
        let now = self.clock.now();
        let mut sooner = false;
        for lease in leases {
            if let Some(entry) = self.table.shard_of(lease.owner).get_mut(&lease.owner)
                && entry.confirmed_at < asked_at
            {
                entry.due = entry.due.min(now.saturating_add(entry.beat() / 4));
                let since = entry.failing.as_ref().map_or(asked_at, |failing| failing.since);
                let error = error.cloned().unwrap_or_else(no_answer);
                let failing = RenewalFailure { since, error, is_its_own: leases.len() == 1 };
                entry.failing = Some(Box::new(failing));
                self.metrics.beat(BeatResult::Failed);
                sooner = true;
            }
        }
        if sooner {
            self.earlier().notify_one();
        }
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases").field("live", &self.live()).finish_non_exhaustive()
    }
}

fn nanos(instant: Instant) -> u64 {
    instant.nanos().min(LOOKING - 1)
}

/// Marks the renewal task as running. If a runtime that shuts down drops the task, this guard wakes the remaining
/// handlers, on any runtime, and the first woken handler starts a new task.
struct TaskGuard {
    leases: Arc<Leases>,
    process: u32,
    /// True once another renewal task may be running.
    has_ended: bool,
}

impl TaskGuard {
    /// Ends the task if no lease and no delivery is left. Returns whether the task has ended.
    ///
    /// A call that registers a lease while the task is about to end sees the task as running, and the body of that call
    /// may never yield. So the task looks for work again after it has declared its end.
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
        leases.table.wakers().flatten().for_each(Waker::wake);
        // The first woken delivery starts another renewal task.
        leases.deliveries.wake();
    }
}

/// Runs the renewal task.
async fn beat(mut running: TaskGuard) {
    let mut slept = false;
    loop {
        let leases = &running.leases;
        let now = leases.clock.now();
        let next = leases.scan(now);
        if Arc::strong_count(leases) == 1 {
            return;
        }
        // The task ends only after a sleep, so that a sequence of short handlers does not start a task for each
        // handler. A handle that renews no leases serves one transaction, and its task ends immediately.
        if (slept || !leases.beats()) && leases.is_idle() {
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

/// Renews `due` in one call. A lease without an answer is renewed by a later call.
async fn renew(_under_way: FlushGuard, leases: Arc<Leases>, store: Arc<dyn Store>, due: Vec<Lease>, asked_at: Instant) {
    let answer = |at: usize, write| {
        if let Some(lease) = due.get(at) {
            leases.enter(lease, asked_at, write);
        }
    };
    // A call that takes longer than the longest of its leases can't keep them alive, and later calls have replaced it.
    let longest = due.iter().map(|lease| lease.duration).max().unwrap_or_default();
    let upkeep = store.upkeep();
    let renewing = upkeep.renew(&due, &answer).watched(&*upkeep, StoreOp::Renew);
    let error = match race(renewing, leases.clock.sleep(longest)).await {
        Some(renewed) => renewed.err(),
        None => {
            let late = StoreError::new(StoreErrorKind::Unconfirmed, "no answer within a lease");
            store.context().operation_failed(StoreOp::Renew, &late);
            Some(late)
        }
    };
    leases.unanswered(&due, asked_at, error.as_ref());
}

/// Timer of a store handle, which runs the callbacks of deliveries.
#[derive(Clone, Debug)]
pub struct Timer(Arc<Leases>);

impl Timer {
    pub(super) fn new(leases: &Arc<Leases>) -> Self {
        Self(Arc::clone(leases))
    }

    /// Calls `callback` every `every` from now on, until the returned value is dropped.
    pub(crate) fn start(&self, key: Option<Key>, every: Duration, callback: Callback) -> BeatGuard {
        let leases = &self.0;
        let now = leases.clock.now();
        let delivery = Delivery::new(key, every, now, callback);
        let due = now.saturating_add(delivery.every());
        let number = leases.deliveries.insert(&delivery, due);
        leases.expect_beat_before(due);
        BeatGuard { leases: Arc::clone(leases), number, delivery }
    }
}

/// Repeats the beats of a delivery until this value is dropped.
pub(crate) struct BeatGuard {
    leases: Arc<Leases>,
    number: u64,
    delivery: Arc<Delivery>,
}

impl BeatGuard {
    /// Returns whether the broker no longer extends the message. `waker` is woken once the broker no longer extends it.
    pub(crate) fn is_lost(&self, waker: &Waker) -> bool {
        let is_lost = self.delivery.is_lost_for(waker);
        // The renewal task may be gone because its runtime has shut down.
        if self.leases.next_beat.load(Ordering::SeqCst) == NEVER {
            self.leases.expect_beat();
        }
        is_lost
    }
}

impl Drop for BeatGuard {
    /// Ends the beats, and cancels a running callback: otherwise its requests would reach the broker after the message
    /// is settled.
    fn drop(&mut self) {
        self.leases.deliveries.remove(self.number);
        self.delivery.end();
        // In a transaction, the renewal task serves only this delivery, and must end now. For any other handle, the
        // task ends at a later scan, once it has no work.
        if !self.leases.beats() {
            self.leases.earlier().notify_one();
        }
    }
}

/// Records the end of a callback, even if the callback panics or its runtime drops the task of the callback.
struct CallbackGuard {
    leases: Arc<Leases>,
    number: u64,
    failed: bool,
}

impl CallbackGuard {
    /// Records the result of the callback.
    fn report(mut self, key: Option<&Key>, elapsed: Duration, told: Result<(), String>) {
        self.failed = told.is_err();
        let leases = &self.leases;
        match told {
            Ok(()) => leases.broker_outage.broker_answers(|| leases.clock.now()),
            Err(error) => leases.broker_outage.broker_fails(key, elapsed, &error, leases.clock.now()),
        }
    }
}

impl Drop for CallbackGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the callback of `on_beat` panicked; it is called again");
        }
        let leases = &self.leases;
        match leases.deliveries.called(self.number, self.failed, || leases.clock.now()) {
            CallbackEnd::Ended => {}
            CallbackEnd::Lost => leases.metrics.broker_beat(BrokerBeat::Lost),
            CallbackEnd::Told => leases.metrics.broker_beat(BrokerBeat::Told),
            CallbackEnd::Failed(due) => {
                leases.metrics.broker_beat(BrokerBeat::Failed);
                leases.expect_beat_before(due);
            }
        }
    }
}
