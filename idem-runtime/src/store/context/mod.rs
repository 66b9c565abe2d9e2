//! State that all clones of a store handle share: clock and identity, leases and late writes, counts, metrics.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

mod counts;
mod deliveries;
#[cfg(all(test, shuttle))]
mod interleavings;
mod late_writes;
mod lease_table;
mod leases;
mod step_journal;
mod tag_counts;

use self::counts::EventCounts;
pub(crate) use self::counts::LastWait;
pub use self::deliveries::Beat;
pub(crate) use self::deliveries::Callback;
use self::late_writes::LateWrites;
pub(crate) use self::late_writes::{FlushGuard, LateEndGuard};
use self::lease_table::RenewalStates;
pub(crate) use self::lease_table::{LeaseStanding, Limits};
pub(crate) use self::leases::{BeatGuard, Timer};
use self::leases::{Leases, RenewalMode};
pub(crate) use self::step_journal::{AfterError, JournalAccess, PushRefusal, StepClaim, StepJournal};
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) use self::tag_counts::TagCounts;
use super::error::StoreError;
use super::flight::Flights;
use super::outage::{Outage, Slowness};
use super::sender::Sender;
use crate::clock::{Clock, Instant};
use crate::key::Key;
use crate::metrics::{Metrics, Snapshot, StoreOp};
use crate::record::provenance::{self, Holder};
use crate::record::{OwnerToken, Owners, Provenance};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, PerProcess, SharedOnce, lock};

/// Value of `down_since` while the store answers reservations.
const UP: u64 = u64::MAX;

/// State that the engine keeps for a store: clock, identity, leases with their heartbeats, late writes, metrics.
///
/// Every store owns one `StoreContext` and returns it from [`Store::context`](super::Store::context); all clones of the
/// store share the same context. The author of a store needs only the constructors, [`clock`](StoreContext::clock) and
/// [`holder`](StoreContext::holder); the engine uses the other methods.
pub struct StoreContext {
    identity: Identity,
    /// Size of the largest journal that a record can hold, in bytes.
    max_journal_bytes: usize,
    clock: Arc<dyn Clock>,
    /// Source of owner tokens. `None`: the clock's entropy is the source of each token.
    owners: Option<Owners>,
    mode: RenewalMode,
    /// Sender of the messages of this handle's records; empty until the program names one.
    sender: OnceLock<Arc<dyn Sender>>,
    /// State of this process. A forked child makes a new state.
    process: PerProcess<ProcessState>,
}

/// Names of a store and of its handle, for errors, logs, spans and records.
struct Identity {
    store: &'static str,
    system: Option<&'static str>,
    handle: Box<str>,
}

/// State of a store handle in one process.
struct ProcessState {
    /// Holder of reserved keys, made at its first use: some handles live only for one call.
    holder: SharedOnce<Holder<'static>>,
    leases: Arc<Leases>,
    late_writes: Arc<LateWrites>,
    counts: EventCounts,
    metrics: Arc<Metrics>,
    /// Waits that duplicates share. A forked child starts without waits.
    flights: PerProcess<Flights>,
    /// Failed operations of the store since the last operation that succeeded, for log lines.
    outage: Outage,
    slowness: Slowness,
    /// Time at which the first of the unanswered reservations failed, in nanoseconds since the clock's origin, or
    /// [`UP`].
    down_since: AtomicU64,
    /// Number of reservations that were not answered.
    unanswered: AtomicU64,
    warned: AtomicBool,
    /// Keys of finished operations whose messages this process is sending.
    sending: Arc<Mutex<HashSet<Key>>>,
}

/// Names a key as one whose messages are being sent, until the guard is dropped.
pub(crate) struct SendingGuard {
    sending: Arc<Mutex<HashSet<Key>>>,
    key: Key,
}

impl Drop for SendingGuard {
    fn drop(&mut self) {
        lock(&self.sending).remove(&self.key);
    }
}

impl ProcessState {
    fn new(clock: &Arc<dyn Clock>, mode: RenewalMode, counts: EventCounts, store: &'static str) -> Self {
        let late_writes = Arc::new(LateWrites::default());
        let metrics = match mode {
            // The store handle of a transaction lives for one call. All store handles of transactions share their
            // metrics.
            RenewalMode::Never => Metrics::of_transactions(store, clock),
            _ => Arc::new(Metrics::new(store, Arc::clone(clock))),
        };
        Self {
            holder: SharedOnce::new(),
            leases: Leases::new(Arc::clone(clock), mode, Arc::clone(&late_writes), Arc::clone(&metrics)),
            late_writes,
            counts,
            metrics,
            flights: PerProcess::default(),
            outage: Outage::default(),
            slowness: Slowness::default(),
            down_since: AtomicU64::new(UP),
            unanswered: AtomicU64::new(0),
            warned: AtomicBool::new(false),
            sending: Arc::default(),
        }
    }
}

impl StoreContext {
    /// Makes the context of a new store handle. `store` is the name of the store in errors and logs, for example
    /// `redis`. The clock's entropy is the source of each owner token, so that no token repeats in a forked process or
    /// in the copy of a virtual machine.
    pub fn new(store: &'static str, clock: Arc<dyn Clock>) -> Self {
        Self::of(store, clock, None, RenewalMode::OfProcess, EventCounts::of_handle())
    }

    /// Makes the context of a store whose records no other process sees: a forked process has its own copy of the
    /// records, and a lease of its parent lapses in this copy. Owner tokens are counted from a random start.
    pub fn in_process(store: &'static str, clock: Arc<dyn Clock>) -> Self {
        let owners = Owners::new(clock.entropy());
        Self::of(store, clock, Some(owners), RenewalMode::OfBodies, EventCounts::of_handle())
    }

    /// Makes the context of a store whose leases are never renewed, because they end in another way.
    pub fn without_renewal(store: &'static str, clock: Arc<dyn Clock>) -> Self {
        Self::in_transaction(store, clock, "")
    }

    /// Makes the context of one call in a transaction. `place` names the table or the schema of the records.
    pub(crate) fn in_transaction(store: &'static str, clock: Arc<dyn Clock>, place: &str) -> Self {
        Self::of(store, clock, None, RenewalMode::Never, EventCounts::of_transaction(place))
    }

    fn of(
        store: &'static str,
        clock: Arc<dyn Clock>,
        owners: Option<Owners>,
        mode: RenewalMode,
        counts: EventCounts,
    ) -> Self {
        let process = PerProcess::new(ProcessState::new(&clock, mode, counts, store));
        let identity = Identity { store, system: None, handle: "".into() };
        Self { identity, max_journal_bytes: usize::MAX, clock, owners, mode, sender: OnceLock::new(), process }
    }

    /// Sets the name of the system behind the store in spans, one of OpenTelemetry's values of `db.system.name`
    /// (default: no name).
    #[must_use]
    pub fn system(mut self, system: &'static str) -> Self {
        self.identity.system = Some(system);
        self
    }

    /// Sets the name of the store handle (default: no name). A record contains this name in addition to host and
    /// process.
    #[must_use]
    pub fn held_by(mut self, handle: &str) -> Self {
        self.identity.handle = handle.into();
        self
    }

    /// Sets the size of the largest [journal](crate::store::Journal) that a record can hold, in bytes (default: no
    /// limit). A step whose entries do not fit is refused before its body runs.
    #[must_use]
    pub fn max_journal_bytes(mut self, max_journal_bytes: usize) -> Self {
        self.max_journal_bytes = max_journal_bytes;
        self
    }

    /// Sets the sender of the messages of this handle's records. Returns false if the handle has one already.
    pub(crate) fn set_sender(&self, sender: Arc<dyn Sender>) -> bool {
        self.sender.set(sender).is_ok()
    }

    /// Returns a guard for the sending of the messages of `key`; `None` if this process is sending them already.
    pub(crate) fn sends(&self, key: &Key) -> Option<SendingGuard> {
        let sending = &self.latest().sending;
        lock(sending).insert(key.clone()).then(|| SendingGuard { sending: Arc::clone(sending), key: key.clone() })
    }

    /// Returns the sender of the messages of this handle's records, if the program has named one.
    pub(crate) fn sender(&self) -> Option<&Arc<dyn Sender>> {
        self.sender.get()
    }

    pub(crate) fn journal_limit(&self) -> usize {
        self.max_journal_bytes
    }

    /// Returns the state of this process. This method makes a system call.
    fn here(&self) -> &ProcessState {
        self.process.here_or(|parents| {
            ProcessState::new(&self.clock, self.mode, parents.counts.in_child(), self.identity.store)
        })
    }

    /// Returns the same state as `here`, but without a system call. The later steps of a call use this method, after
    /// an earlier step has used `here`. Before that step, a forked child gets the state of its parent.
    fn latest(&self) -> &ProcessState {
        self.process.latest().expect("made with a value")
    }

    /// Returns the state for the first step of a call: the state of this process. A store in memory reads the number
    /// of its process only once, because reading the number is a system call.
    fn at_first(&self) -> &ProcessState {
        match self.mode {
            RenewalMode::OfBodies => self.latest(),
            _ => self.here(),
        }
    }

    /// Name of the store in errors and logs, for example `redis`.
    pub fn name(&self) -> &'static str {
        self.identity.store
    }

    /// Name of the system behind the store in spans; `None` if no name was set.
    pub(super) fn system_name(&self) -> Option<&'static str> {
        self.identity.system
    }

    /// Name of the handle.
    #[cfg(feature = "memory")]
    pub(crate) fn handle_name(&self) -> &str {
        &self.identity.handle
    }

    /// Returns the holder of the keys that this handle reserves. In the child of a `fork()`, a store in memory is a
    /// copy of the parent's store, and its holder still has the process number of the parent.
    pub fn holder(&self) -> Holder<'static> {
        self.holder_of(self.at_first())
    }

    /// Returns the holder of the keys that this handle reserves in a process.
    fn holder_of(&self, process: &ProcessState) -> Holder<'static> {
        // Each shard of a store in memory keeps this text once, for all records of its own handle.
        let process = if self.mode == RenewalMode::OfBodies { self.process.first() } else { process };
        *process.holder.get_or_init(|| provenance::here(&self.identity.handle))
    }

    /// Returns the provenance of a request of this handle, for a call whose first step has used
    /// [`metrics_here`](Self::metrics_here).
    pub(crate) fn provenance(&self) -> Provenance {
        Provenance::held(self.holder_of(self.latest()))
    }

    /// Clock of the store handle.
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    #[cfg(any(feature = "memory", feature = "cached", feature = "http"))]
    pub(crate) fn clock_handle(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock)
    }

    /// Returns an owner token for a new attempt.
    pub fn new_owner(&self) -> OwnerToken {
        match &self.owners {
            Some(owners) => owners.next(),
            None => OwnerToken::from_bytes(self.clock.entropy().to_be_bytes()),
        }
    }

    /// Number of leases that this handle keeps alive.
    pub fn live(&self) -> usize {
        self.here().leases.live()
    }

    /// Waits until every late write and renewal is done: the writes of handlers that were cancelled or panicked, and
    /// the renewals under way. Call `flush` on shutdown, after the handlers have ended and before the process ends. A
    /// write may be repeated beyond its lease, for example under `on_crash = fail` in an outage; `flush` waits for such
    /// a write only until the lease lapses.
    ///
    /// # Cancel safety
    /// Cancel safe: the writes continue.
    pub async fn flush(&self) {
        self.here().late_writes.flush().await;
    }

    /// Stops all renewals, releases and late writes of this handle, as if its process had crashed.
    #[cfg(any(feature = "testing", feature = "conformance"))]
    pub(crate) fn abandon(&self) {
        self.latest().leases.abandon();
    }

    /// Returns whether leases are renewed. A lease that is not renewed ends in another way, for example with
    /// a transaction.
    pub(crate) fn renews(&self) -> bool {
        self.mode != RenewalMode::Never
    }

    /// Returns whether the current runtime can't renew leases, because a test has paused or moved its time. A store in
    /// memory returns false: its records use the moved time too, and a task of this runtime renews the leases.
    pub(crate) fn is_out_of_time(&self) -> bool {
        self.mode == RenewalMode::OfProcess && self.clock.is_moved()
    }

    /// Returns whether a task may write the end of a dropped call of this handle.
    pub(crate) fn writes_late(&self) -> bool {
        self.latest().leases.writes_late()
    }

    /// Leases of this process, to which a new attempt is added.
    pub(crate) fn leases_here(&self) -> &Arc<Leases> {
        match self.mode {
            RenewalMode::OfBodies => &self.here().leases,
            // The first step of the call has used `here`.
            _ => self.leases(),
        }
    }

    /// Leases that this handle keeps alive.
    pub(crate) fn leases(&self) -> &Arc<Leases> {
        &self.latest().leases
    }

    /// Writes of this handle that no call waits for.
    pub(crate) fn late_writes(&self) -> &Arc<LateWrites> {
        &self.latest().late_writes
    }

    /// Counts of events that no record keeps.
    pub(crate) fn counts(&self) -> &EventCounts {
        &self.latest().counts
    }

    /// Registers that this handle ends an attempt of `key` after the lapse of its lease, until the returned value
    /// is dropped.
    pub(crate) fn ends_late(&self, key: &Key) -> LateEndGuard {
        self.here().late_writes.ends_late(key)
    }

    /// Returns whether an attempt of `key` runs in this handle, or was ended after the lapse of its lease and after
    /// [`LateWrites::changes`] had returned `since`. The lapse of its lease does not prove that an attempt of this
    /// handle has crashed: an outage delays renewals and ends alike.
    pub(crate) fn is_at_work(&self, key: &Key, since: u32) -> bool {
        let here = self.here();
        here.late_writes.is_ending(key, since) || here.leases.runs(key)
    }

    /// Returns the timer for callbacks of deliveries.
    pub(crate) fn timer(&self) -> Timer {
        Timer::new(&self.here().leases)
    }

    /// Returns the state of the renewals at `now`.
    pub(super) fn renewal_states(&self, now: Instant) -> RenewalStates {
        self.here().leases.states(now)
    }

    /// Waits that duplicates of handles with this context share.
    pub(super) fn flights(&self) -> &Flights {
        self.latest().flights.here()
    }

    /// Records that the store has answered a reservation.
    pub(crate) fn store_answered(&self) {
        let down_since = &self.latest().down_since;
        if down_since.load(Ordering::Relaxed) != UP {
            down_since.store(UP, Ordering::Relaxed);
        }
    }

    /// Records that the store has not answered a reservation. Returns the time since the outage began.
    pub(crate) fn store_failed(&self) -> Duration {
        self.latest().unanswered.fetch_add(1, Ordering::Relaxed);
        let now = self.clock.now().nanos().min(UP - 1);
        let down_since = self.latest().down_since.fetch_min(now, Ordering::Relaxed).min(now);
        Duration::from_nanos(now - down_since)
    }

    /// Returns the number of reservations that were not answered, if the latest reservation was not answered.
    pub(crate) fn unanswered(&self) -> Option<u64> {
        let here = self.here();
        let is_down = here.down_since.load(Ordering::Relaxed) != UP;
        is_down.then(|| here.unanswered.load(Ordering::Relaxed))
    }

    /// Returns whether an operation of the store has failed lately, so that a ping should precede further work.
    pub(crate) fn is_in_doubt(&self) -> bool {
        let here = self.here();
        here.outage.is_open() || here.down_since.load(Ordering::Relaxed) != UP
    }

    /// Counts an operation that the store answered immediately.
    pub(super) fn answered_at_once(&self, op: StoreOp) {
        self.metrics().store_took(op, Duration::ZERO);
        self.outage().store_answers(self.name(), op, || self.clock.now());
    }

    /// Counts an operation of the store that failed.
    pub(super) fn operation_failed(&self, op: StoreOp, error: &StoreError) {
        self.metrics().store_failed(op, error.kind().label());
        self.outage().store_fails(self.name(), op, error, self.clock.now());
    }

    pub(super) fn outage(&self) -> &Outage {
        &self.latest().outage
    }

    /// Slow operations of the store.
    pub(super) fn slowness(&self) -> &Slowness {
        &self.latest().slowness
    }

    /// Returns true for the first call only, so that a warning is logged once.
    pub(crate) fn warns_now(&self) -> bool {
        !self.latest().warned.swap(true, Ordering::Relaxed)
    }

    /// Metrics of this store.
    #[inline]
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.latest().metrics
    }

    /// Returns the metrics, like `metrics`. The first step of a call uses this method, which selects the state of this
    /// process, except for a store in memory.
    pub(crate) fn metrics_here(&self) -> &Metrics {
        &self.at_first().metrics
    }

    /// Returns the current values of all metrics.
    pub(super) fn snapshot(&self) -> Snapshot {
        self.metrics().snapshot(self.live())
    }
}

impl fmt::Debug for StoreContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreContext").field("store", &self.name()).field("live", &self.live()).finish_non_exhaustive()
    }
}

impl Drop for StoreContext {
    /// Wakes the sleeping renewal task, which then ends if only this task still holds the leases.
    fn drop(&mut self) {
        if let Some(process) = self.process.known() {
            process.leases.wake_task();
        }
    }
}
