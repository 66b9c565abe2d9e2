//! Metrics of handlers, found by scope without a lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::cells::{Counters, Histograms};
use super::snapshot::Series;
use super::table::{
    ATTEMPTS, BODY_LEASE_RATIO, BODY_SECONDS, CALLS, CallOutcome, DISPOSITIONS, DispositionLabel, DoubtLabel, Dropped,
    KEY_QUALITY, KeyQuality, REPLAY_AGE_RATIO, REPLAY_AGE_SECONDS, RESULT_BYTES, RESULTS_DROPPED, STEPS, StepOutcome,
    TAKEOVERS, UNCERTAIN, Unit, WAIT_SECONDS,
};
use crate::clock::{Clock, Instant, as_nanos};
use crate::sync::{SharedList, SharedOnce, SharedOrAnew};

/// Number of scopes with their own counters. Scopes are written in code; more scopes mean that data is used as a scope
/// by mistake.
const LIMIT: usize = 200;
/// Number of lists in [`Scopes`]: large enough that a search reads few scopes.
const LISTS: usize = 32;
/// Scope under which all scopes beyond the limit are counted.
const OTHER: &str = "_other";
/// Number of payloads per handler that shadow mode remembers.
const PAYLOADS: usize = 1024;

/// Scopes of one store handle, in lists. The hash of a scope selects its list.
pub(super) struct Scopes {
    clock: Arc<dyn Clock>,
    lists: Box<[SharedList<Arc<ScopeCells>>]>,
    other: SharedOnce<Arc<ScopeCells>>,
    /// Number of scopes. Threads that add scopes at the same moment may exceed the limit, by one scope each.
    count: AtomicUsize,
}

impl Scopes {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        let lists = (0..LISTS).map(|_| SharedList::new()).collect();
        Self { clock, lists, other: SharedOnce::new(), count: AtomicUsize::new(0) }
    }

    pub(super) fn get(&self, scope: &str) -> Arc<ScopeCells> {
        let list = &self.lists[place(scope)];
        match list.iter().find(|cells| *cells.scope == *scope) {
            Some(found) => Arc::clone(found),
            None => self.make(scope, list),
        }
    }

    #[cold]
    fn make(&self, scope: &str, list: &SharedList<Arc<ScopeCells>>) -> Arc<ScopeCells> {
        let new = |name| Arc::new(ScopeCells::new(name, Arc::clone(&self.clock)));
        let is_it = |cells: &Arc<ScopeCells>| *cells.scope == *scope;
        if self.count.load(Ordering::Acquire) >= LIMIT {
            // Another thread may have added this scope, and so reached the limit. A scope is counted once it is in
            // its list.
            let found = list.iter().find(|cells| is_it(cells));
            return Arc::clone(found.unwrap_or_else(|| self.other.get_or_init(|| new(OTHER))));
        }
        let mut is_new = false;
        let cells = list.find_or_add(is_it, || {
            is_new = true;
            new(scope)
        });
        if is_new {
            self.count.fetch_add(1, Ordering::Release);
        }
        Arc::clone(cells)
    }

    pub(super) fn read(&self, series: &mut Vec<Series>) {
        for cells in self.lists.iter().flat_map(SharedList::iter).chain(self.other.get()) {
            cells.read(series);
        }
    }
}

/// Returns the list that holds `scope`. A program has few scopes, and no attacker chooses them, so any fast hash
/// suffices.
fn place(scope: &str) -> usize {
    let (words, rest) = scope.as_bytes().as_chunks();
    let add = |hash: u64, word: u64| (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    let hash = words.iter().fold(0, |hash, word| add(hash, u64::from_le_bytes(*word)));
    let hash = rest.iter().fold(hash, |hash, byte| add(hash, u64::from(*byte)));
    usize::try_from(hash >> 56).unwrap_or_default() % LISTS
}

/// Latest payloads of a handler: each entry holds the hash of a payload and the hash of its key. The hash of the
/// payload selects the entry.
struct Payloads(Box<[(u64, u64)]>);

impl Default for Payloads {
    fn default() -> Self {
        Self(vec![(0, 0); PAYLOADS].into())
    }
}

/// Metrics of one handler in one store handle.
pub(crate) struct ScopeCells {
    scope: Box<str>,
    clock: Arc<dyn Clock>,
    calls: Counters,
    dispositions: Counters,
    uncertain: Counters,
    takeovers: Counters,
    body_seconds: Histograms,
    body_lease_ratio: Histograms,
    wait_seconds: Histograms,
    replay_age_seconds: Histograms,
    replay_age_ratio: Histograms,
    attempts: Histograms,
    result_bytes: Histograms,
    results_dropped: Counters,
    key_quality: Counters,
    /// Only for a handler that has run a step.
    steps: SharedOnce<Counters>,
    /// Latest payloads and their keys, in shadow mode only.
    payloads: SharedOnce<SharedOrAnew<Payloads>>,
}

impl ScopeCells {
    fn new(scope: &str, clock: Arc<dyn Clock>) -> Self {
        Self {
            scope: scope.into(),
            clock,
            calls: Counters::new(&CALLS, scope),
            dispositions: Counters::new(&DISPOSITIONS, scope),
            uncertain: Counters::new(&UNCERTAIN, scope),
            takeovers: Counters::new(&TAKEOVERS, scope),
            body_seconds: Histograms::new(&BODY_SECONDS, scope),
            body_lease_ratio: Histograms::new(&BODY_LEASE_RATIO, scope),
            wait_seconds: Histograms::new(&WAIT_SECONDS, scope),
            replay_age_seconds: Histograms::new(&REPLAY_AGE_SECONDS, scope),
            replay_age_ratio: Histograms::new(&REPLAY_AGE_RATIO, scope),
            attempts: Histograms::new(&ATTEMPTS, scope),
            result_bytes: Histograms::new(&RESULT_BYTES, scope),
            results_dropped: Counters::new(&RESULTS_DROPPED, scope),
            key_quality: Counters::new(&KEY_QUALITY, scope),
            steps: SharedOnce::new(),
            payloads: SharedOnce::new(),
        }
    }

    /// Returns the current time by the clock of the store handle.
    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(crate) fn ended(&self, outcome: CallOutcome) {
        self.calls.add(outcome as usize, 1);
    }

    pub(crate) fn disposed(&self, disposition: DispositionLabel) {
        self.dispositions.add(disposition as usize, 1);
    }

    pub(crate) fn is_uncertain(&self, doubt: DoubtLabel) {
        self.uncertain.add(doubt as usize, 1);
    }

    pub(crate) fn took_over(&self) {
        self.takeovers.add(0, 1);
    }

    pub(crate) fn waited(&self, waited: Duration) {
        self.wait_seconds.add(0, as_nanos(waited));
    }

    /// Records the replay of a record with the age `age`, for a handler that keeps results for `ttl`.
    pub(crate) fn replayed(&self, age: Duration, ttl: Duration) {
        self.replay_age_seconds.add(0, as_nanos(age));
        if !ttl.is_zero() {
            self.replay_age_ratio.add(0, Unit::Ratio.of(share(age, ttl)));
        }
    }

    /// Records that a body ran for `ran`. `lease` is the duration of the body's lease; `None` without a reservation.
    pub(crate) fn ran(&self, ran: Duration, lease: Option<Duration>) {
        self.body_seconds.add(0, as_nanos(ran));
        if let Some(lease) = lease.filter(|lease| !lease.is_zero()) {
            self.body_lease_ratio.add(0, Unit::Ratio.of(share(ran, lease)));
        }
    }

    /// Records that an attempt has succeeded, and that its result of `bytes` bytes is recorded.
    pub(crate) fn recorded(&self, attempt: u32, bytes: usize) {
        self.attempts.add(0, u64::from(attempt));
        self.result_bytes.add(0, bytes as u64);
    }

    /// Records that an attempt has succeeded, and that only its completion is recorded.
    pub(crate) fn recorded_without_result(&self, attempt: u32, why: Dropped) {
        self.attempts.add(0, u64::from(attempt));
        self.results_dropped.add(why as usize, 1);
    }

    /// Records the outcome of a step.
    pub(crate) fn step_ended(&self, outcome: StepOutcome) {
        self.steps.get_or_init(|| Counters::new(&STEPS, &self.scope)).add(outcome as usize, 1);
    }

    /// Records, in shadow mode, that a key came with another payload than before.
    pub(crate) fn key_is_too_coarse(&self) {
        self.key_quality.add(KeyQuality::TooCoarse as usize, 1);
    }

    /// Records, in shadow mode, that a payload came under this key. Counts a problem if the payload is remembered under
    /// another key.
    pub(crate) fn payload_under_key(&self, payload: u64, key: u64) {
        let mut payloads = self.payloads.get_or_init(SharedOrAnew::default).lock();
        let at = usize::try_from(payload % PAYLOADS as u64).unwrap_or_default();
        let (known, under) = std::mem::replace(&mut payloads.0[at], (payload, key));
        if known == payload && under != key {
            self.key_quality.add(KeyQuality::TooFine as usize, 1);
        }
    }

    fn read(&self, series: &mut Vec<Series>) {
        let scope = &*self.scope;
        for counters in [
            &self.calls,
            &self.dispositions,
            &self.uncertain,
            &self.takeovers,
            &self.results_dropped,
            &self.key_quality,
        ]
        .into_iter()
        .chain(self.steps.get())
        {
            counters.read(scope, series);
        }
        for histogram in [
            &self.body_seconds,
            &self.body_lease_ratio,
            &self.wait_seconds,
            &self.replay_age_seconds,
            &self.replay_age_ratio,
            &self.attempts,
            &self.result_bytes,
        ] {
            histogram.read(scope, series);
        }
    }
}

/// Returns the ratio of `part` to `whole`.
#[expect(clippy::cast_precision_loss, reason = "the ratio is rounded anyway")]
fn share(part: Duration, whole: Duration) -> f64 {
    as_nanos(part) as f64 / as_nanos(whole) as f64
}

impl fmt::Debug for ScopeCells {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScopeCells").field("scope", &self.scope).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn scopes_beyond_the_limit_are_counted_together() {
        let scopes = Scopes::new(Arc::new(ManualClock::new()));
        for number in 0..LIMIT + 50 {
            for _ in 0..2 {
                scopes.get(&format!("handler{number}")).ended(CallOutcome::Executed);
            }
        }
        assert_eq!(&*scopes.get("handler7").scope, "handler7");
        assert_eq!(&*scopes.get(&format!("handler{LIMIT}")).scope, OTHER);
        assert_eq!(scopes.lists.iter().flat_map(SharedList::iter).count(), LIMIT);
        assert!(Arc::ptr_eq(&scopes.get("handler199"), &scopes.get("handler199")));
    }

    #[test]
    fn threads_that_add_a_scope_together_share_its_metrics() {
        let scopes = Scopes::new(Arc::new(ManualClock::new()));
        std::thread::scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| {
                    for number in 0..LIMIT {
                        scopes.get(&format!("handler{number}")).ended(CallOutcome::Executed);
                    }
                });
            }
        });
        let mut series = Vec::new();
        scopes.read(&mut series);
        let snapshot = super::super::Snapshot { series };
        for number in 0..LIMIT {
            let labels = [("scope", format!("handler{number}")), ("outcome", "executed".to_owned())];
            let labels = labels.each_ref().map(|(name, value)| (*name, value.as_str()));
            assert_eq!(snapshot.count(&CALLS, &labels), 8, "{labels:?}");
        }
    }
}
