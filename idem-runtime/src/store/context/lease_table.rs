//! Table of the leases that a store handle keeps alive, by owner token.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::step_journal::StepJournal;
use crate::clock::{Instant, as_nanos};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::{Lease, OwnerToken};
use crate::store::{Store, StoreError, StoreErrorKind};
use crate::sync::{MutexGuard, Shards};

/// Number of shards: a power of two, large enough that the threads of a large machine rarely wait for the same lock.
const SHARDS: usize = 16;

pub(super) type LeaseShard = HashMap<OwnerToken, LeaseEntry, BuildHasherDefault<TokenHasher>>;

/// Hashes an owner token to its last bytes, which are random. `Hash` writes the length of the array first and the token
/// last.
#[derive(Default)]
pub(super) struct TokenHasher(u64);

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

/// State of a lease, which decides whether the body may be polled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LeaseStanding {
    /// The lease is live.
    Held,
    /// The lease has lapsed by the clock of this process. A renewal is under way, and the body waits for it.
    Lapsed,
    /// The store answered that this attempt no longer holds the lease.
    Lost,
    /// The body has run for longer than its policy allows. The lease is no longer renewed.
    TimedOut,
    /// The lease has lapsed, and the store permanently refuses its renewal, or has not renewed the lease for longer
    /// than a body may be paused. See [`Leases::why_unrenewed`](super::leases::Leases::why_unrenewed).
    Unrenewed,
}

/// Time limits of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Longest run of the body, in nanoseconds.
    timeout: u64,
    pub(super) pause: LongestPause,
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

/// Longest wait of a body for a renewal after its lease has lapsed, in nanoseconds. A `u64` is half as large as a
/// `Duration`, and each call copies this value several times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LongestPause(u64);

impl LongestPause {
    /// The body does not wait for a renewal.
    pub(super) const NONE: Self = Self(u64::MAX);

    fn get(self) -> Option<Duration> {
        (self != Self::NONE).then(|| Duration::from_nanos(self.0))
    }
}

/// Consecutive failures to renew a lease.
pub(super) struct RenewalFailure {
    /// Time when the first failed renewal was sent.
    pub(super) since: Instant,
    /// Last error of the store.
    pub(super) error: StoreError,
    /// True if the failed request was to renew this lease only.
    pub(super) is_its_own: bool,
}

pub(super) struct LeaseEntry {
    /// Store handle of the call. The renewal task uses this handle, because a handle that the task owned would keep the
    /// store open.
    pub(super) store: Arc<dyn Store>,
    pub(super) lease: Lease,
    /// Time when the last confirmed reservation or renewal was sent. The lease is live from this time on, for its
    /// duration.
    pub(super) confirmed_at: Instant,
    pub(super) due: Instant,
    /// Time when the last renewal was sent, answered or not.
    pub(super) asked_at: Instant,
    pub(super) stop_at: Instant,
    pub(super) pause: LongestPause,
    /// Failures since the last confirmed renewal, if there were any. Boxed: failures are rare, and every lease would
    /// carry their size inline.
    pub(super) failing: Option<Box<RenewalFailure>>,
    /// Standing of the lease, but never [`LeaseStanding::Lapsed`], which depends on the current time.
    pub(super) standing: LeaseStanding,
    /// True once the attempt is ending while it holds its lease. A renewal that is refused afterwards may have reached
    /// the store after the end of the attempt was recorded.
    pub(super) is_ending: bool,
    /// True if the steps of the attempt are journaled; false in shadow mode.
    pub(super) is_journaled: bool,
    /// True once the body has returned: a further message would be accepted and never leave.
    pub(super) is_sealed: bool,
    /// Waker of the body's task, which is woken when `standing` changes, and when a lapsed lease is renewed.
    pub(super) waker: Option<Waker>,
    /// Steps of the attempt; `None` while it has none.
    pub(super) journal: Option<Arc<StepJournal>>,
}

impl LeaseEntry {
    pub(super) fn beat(&self) -> Duration {
        self.lease.duration / 3
    }

    pub(super) fn held_until(&self) -> Instant {
        self.confirmed_at.saturating_add(self.lease.duration)
    }

    /// Returns whether another process may have interrupted the attempt by `now`: the lease has lapsed under `on_crash
    /// = fail`.
    pub(super) fn lapsed_under_fail(&self, now: impl FnOnce() -> Instant) -> bool {
        self.lease.on_crash == OnCrash::Fail && self.held_until() <= now()
    }

    /// Returns whether the last renewal failed with an error that lasts until a person acts. The failed request may
    /// have named other leases too.
    pub(super) fn is_refused(&self) -> bool {
        self.failing.as_ref().is_some_and(|failing| failing.error.is_for_good())
    }

    /// Time when the body stops waiting for a renewal, unless a renewal succeeds before. The wait is measured from the
    /// first failed renewal, because a suspended process sends no renewals.
    pub(super) fn give_up_at(&self) -> Instant {
        match (self.failing.as_deref(), self.pause.get()) {
            (Some(RenewalFailure { error, is_its_own: true, .. }), Some(_)) if error.is_for_good() => self.held_until(),
            (Some(RenewalFailure { since, .. }), Some(pause)) => self.held_until().max(*since).saturating_add(pause),
            _ => Instant::new(Duration::MAX),
        }
    }

    /// Time by which the renewal task must check this lease again.
    pub(super) fn next(&self) -> Instant {
        self.due.min(self.stop_at).min(self.give_up_at())
    }

    /// Records that the body is no longer polled. `stop_at`: time at which the lease is given up unless the attempt has
    /// ended.
    pub(super) fn end_body(&mut self, stop_at: Instant) {
        self.stop_at = stop_at;
        self.pause = LongestPause::NONE;
        self.waker = None;
        self.is_ending = self.standing != LeaseStanding::Lost;
    }

    pub(super) fn turn(&mut self, standing: LeaseStanding) -> Option<Waker> {
        self.standing = standing;
        self.waker.take()
    }
}

/// All leases of a store handle in one process.
#[derive(Default)]
pub(super) struct LeaseTable(Shards<LeaseShard, SHARDS>);

/// Leases that are due for renewal, and bodies whose time is over.
#[derive(Default)]
pub(super) struct DueLeases {
    /// Store handle of one of the calls whose leases are due. All renewals of this scan use this handle.
    pub(super) store: Option<Arc<dyn Store>>,
    pub(super) leases: Vec<Lease>,
    /// Leases that are each renewed by a separate call, because the store refused a renewal permanently.
    pub(super) alone: Vec<Lease>,
    /// Longest time by which a lease in this scan is overdue.
    pub(super) lag: Duration,
    /// Wakers of bodies whose time is over.
    pub(super) over: Vec<Waker>,
}

/// State of the lease renewals of one store handle.
#[derive(Default)]
pub(crate) struct RenewalStates {
    /// Number of leases that are kept alive.
    pub(crate) leases: usize,
    /// True if the renewal task runs in this process.
    pub(crate) is_running: bool,
    /// Longest time by which the renewal of a lease is overdue.
    pub(crate) lag: Duration,
    /// True if a lease is overdue by more than a beat.
    pub(crate) is_late: bool,
}

impl LeaseTable {
    pub(super) fn shard_of(&self, owner: OwnerToken) -> MutexGuard<'_, LeaseShard> {
        self.0.shard(usize::from(owner.as_bytes()[0]) % SHARDS)
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|shard| shard.len()).sum()
    }

    /// Returns whether this process runs an attempt of `key` or writes its end. An attempt that lost its lease while
    /// its body ran is left out.
    pub(super) fn runs(&self, key: &Key) -> bool {
        let runs = |it: &LeaseEntry| it.lease.key == *key && (it.standing != LeaseStanding::Lost || it.is_ending);
        self.0.iter().any(|shard| shard.values().any(runs))
    }

    /// Takes the wakers of all bodies, shard by shard.
    pub(super) fn wakers(&self) -> impl Iterator<Item = Vec<Waker>> {
        self.0.iter().map(|mut shard| shard.values_mut().filter_map(|entry| entry.waker.take()).collect())
    }

    /// Adds the state of each lease at `now` to `states`. `beats` is false if this handle never renews leases.
    pub(super) fn add_states(&self, now: Instant, beats: bool, states: &mut RenewalStates) {
        for shard in self.0.iter() {
            for entry in shard.values() {
                states.leases += 1;
                if beats && entry.standing == LeaseStanding::Held {
                    // The lag is measured from `confirmed_at`, so that a renewal without an answer is late too.
                    let due = entry.confirmed_at.saturating_add(entry.beat());
                    let lag = now.saturating_since(due);
                    states.lag = states.lag.max(lag);
                    states.is_late |= lag > entry.beat();
                }
            }
        }
    }

    /// Collects the leases that are due by `now` or soon after, and ends the bodies whose time is over. Lowers `next`
    /// to the earliest time at which a lease must be checked again.
    pub(super) fn due(&self, now: Instant, next: &mut Instant) -> DueLeases {
        let mut due = DueLeases::default();
        for mut shard in self.0.iter() {
            for entry in shard.values_mut().filter(|entry| entry.standing == LeaseStanding::Held) {
                // The body ends in two cases: it has reached its time limit, or it has waited too long for a renewal.
                if entry.stop_at <= now {
                    due.over.extend(entry.turn(LeaseStanding::TimedOut));
                    continue;
                }
                if entry.give_up_at() <= now {
                    due.over.extend(entry.turn(LeaseStanding::Unrenewed));
                    continue;
                }
                due.add(entry, now);
                *next = (*next).min(entry.next());
            }
        }
        due
    }
}

impl DueLeases {
    /// Adds the lease of `entry` to the leases to renew, if its renewal is due by `now` or soon after.
    fn add(&mut self, entry: &mut LeaseEntry, now: Instant) {
        // Leases are renewed up to an eighth of a beat early, so that several leases share a call. The pause after a
        // renewal was sent, and the pause after a renewal failed, are longer: otherwise the lease would be due again
        // immediately.
        let beat = entry.beat();
        if entry.due > now.saturating_add(beat / 8) {
            return;
        }
        self.lag = self.lag.max(now.saturating_since(entry.due));
        self.store.get_or_insert_with(|| Arc::clone(&entry.store));
        // The error of a call for several leases does not show which lease the store permanently refuses. A body ends
        // only if the store refuses the renewal of that body's lease, so a refused lease that has lapsed is renewed by
        // a separate call.
        let is_alone = entry.is_refused() && entry.held_until() <= now;
        match is_alone {
            true => self.alone.push(entry.lease.clone()),
            false => self.leases.push(entry.lease.clone()),
        }
        // The lease is due again before the answer arrives: another lease may delay the call.
        entry.due = now.saturating_add(beat / 2);
        entry.asked_at = now;
    }
}

/// Returns the error of a renewal without an answer of the store.
pub(super) fn no_answer() -> StoreError {
    StoreError::new(StoreErrorKind::Unconfirmed, "the store did not answer the renewal of a lease")
}
