//! The test of one clause of the store contract: the store under test, and the operations and checks that the tests of
//! all clauses share.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::{Clock, Instant, SystemClock};
use crate::codec::CodecName;
use crate::combine::race;
use crate::key::{Fingerprint, Key};
use crate::record::standing::Standing;
use crate::record::{
    Action, Decision, DecisionAnswer, Finish, Inspection, Lease, Release, Reservation, ReserveRequest, Revision,
    StoredResult, Verdict,
};
use crate::store::{Store, StoreError, StoreFuture, renew_all};

/// Future that opens a [`Subject`].
pub type SubjectFuture = Pin<Box<dyn Future<Output = Subject> + Send>>;

pub(super) type ClauseFuture = Pin<Box<dyn Future<Output = ()> + Send>>;
type Spoil = Arc<dyn Fn(Key) -> ClauseFuture + Send + Sync>;
/// Guard of a blocked record. The record stays blocked until the guard is dropped.
type BlockGuard = Box<dyn Any + Send>;
type Block = Arc<dyn Fn(Key) -> Pin<Box<dyn Future<Output = BlockGuard> + Send>> + Send + Sync>;

/// Store under test, with the facts about it that the clauses need.
#[derive(Clone)]
pub struct Subject {
    pub(super) store: Arc<dyn Store>,
    pub(super) peer: Arc<dyn Store>,
    pub(super) unreachable: Option<Arc<dyn Store>>,
    pub(super) spoil: Option<Spoil>,
    pub(super) block: Option<Block>,
    pub(super) largest_result: usize,
    patience: Duration,
}

impl Subject {
    /// Makes a subject with a store alone: no second handle, no faults.
    pub fn new(store: impl Store) -> Self {
        let store: Arc<dyn Store> = Arc::new(store);
        Self {
            peer: store.handle(),
            store,
            unreachable: None,
            spoil: None,
            block: None,
            largest_result: 1024 * 1024,
            patience: Duration::from_secs(20),
        }
    }

    /// Sets a second, independent handle to the same records, opened like in another process. The clauses alternate
    /// between the two handles.
    #[must_use]
    pub fn peer(mut self, peer: impl Store) -> Self {
        self.peer = Arc::new(peer);
        self
    }

    /// Sets a store whose server can't be reached. Without such a store, the clause `unreachable_store` checks nothing.
    #[must_use]
    pub fn unreachable(mut self, store: impl Store) -> Self {
        self.unreachable = Some(Arc::new(store));
        self
    }

    /// Sets a function that overwrites the record of a key, if it exists, with a value that is not a record. Each call
    /// must write a different value. Without this function, the clauses `foreign_value`, `damage_is_shown` and
    /// `damage_is_forgotten` check nothing.
    #[must_use]
    pub fn spoil<F: Future<Output = ()> + Send + 'static>(
        mut self,
        spoil: impl Fn(Key) -> F + Send + Sync + 'static,
    ) -> Self {
        self.spoil = Some(Arc::new(move |key| Box::pin(spoil(key))));
        self
    }

    /// Sets a function that blocks requests for the record of a key until its return value is dropped. For example,
    /// another session locks the row, or the node is stopped. Without this function, the clause
    /// `blocked_record_holds_up_no_other` checks nothing.
    #[must_use]
    pub fn block<F: Future<Output: Send + 'static> + Send + 'static>(
        mut self,
        block: impl Fn(Key) -> F + Send + Sync + 'static,
    ) -> Self {
        self.block = Some(Arc::new(move |key| {
            let blocked = block(key);
            Box::pin(async move { Box::new(blocked.await) as BlockGuard })
        }));
        self
    }

    /// Returns the store and its second handle, for your own tests in addition to the suite.
    ///
    /// ```
    /// use idem_runtime::MemoryStore;
    /// use idem_runtime::conformance::Subject;
    ///
    /// let [store, peer] = Subject::from(MemoryStore::new()).handles();
    /// assert_eq!(store.context().name(), peer.context().name());
    /// ```
    pub fn handles(&self) -> [Arc<dyn Store>; 2] {
        [Arc::clone(&self.store), Arc::clone(&self.peer)]
    }

    /// Sets the length of the longest result that the store accepts, in bytes (default: 1 MiB).
    #[must_use]
    pub fn largest_result(mut self, bytes: usize) -> Self {
        self.largest_result = bytes;
        self
    }

    /// Sets the time limit of a call that should return immediately (default: 20 s).
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }
}

impl<S: Store> From<S> for Subject {
    fn from(store: S) -> Self {
        Self::new(store)
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject").field("store", &self.store).field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Duration of a lease or retention that must not end during a test, even on the slowest machine.
pub(super) const LONG: Duration = Duration::from_secs(600);
/// Duration of a lease or retention whose end a test waits for.
pub(super) const SHORT: Duration = Duration::from_millis(50);
/// Pause between two writes of a test, long enough that the times that the store records for them differ.
pub(super) const PAUSE: Duration = Duration::from_millis(120);
/// Resolution of a store's clock, plus the drift between two clocks during a test.
pub(super) const TOLERANCE: Duration = Duration::from_millis(40);
/// Number of tasks that race for a key.
const RACERS: usize = 64;

/// One run of the test of one clause of the store contract, on one store.
pub(super) struct Case {
    pub(super) subject: Subject,
    pub(super) clause: &'static str,
    pub(super) run: String,
    turn: AtomicUsize,
}

impl Case {
    pub(super) fn new(subject: Subject, clause: &'static str) -> Self {
        let token = subject.store.context().new_owner();
        let run = token.as_bytes().iter().fold(String::new(), |run, byte| format!("{run}{byte:02x}"));
        Self { subject, clause, run, turn: AtomicUsize::new(0) }
    }

    /// Returns the store and its second handle alternately, so that no handle can answer from its memory of its own
    /// writes.
    pub(super) fn store(&self) -> &Arc<dyn Store> {
        match self.turn.fetch_add(1, Ordering::Relaxed) % 2 {
            0 => &self.subject.store,
            _ => &self.subject.peer,
        }
    }

    /// Makes a key that no other run uses.
    pub(super) fn key(&self, name: &str) -> Key {
        Key::new("conformance", format!("{}:{}:{name}", self.clause, self.run)).expect("a short key")
    }

    /// Makes a request for `key` whose lease and retention do not end during the test.
    pub(super) fn request(&self, key: &Key) -> ReserveRequest {
        ReserveRequest::new(key.clone(), self.subject.store.context().new_owner(), LONG, LONG)
    }

    /// Makes a request whose lease is so short that it has lapsed when the next [`Case::lapse`] returns.
    pub(super) fn short(&self, key: &Key) -> ReserveRequest {
        ReserveRequest { lease: SHORT, ..self.request(key) }
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        self.subject.store.context().clock()
    }

    pub(super) fn now(&self) -> Instant {
        self.clock().now()
    }

    /// Returns the time since `earlier`.
    pub(super) fn since(&self, earlier: Instant) -> Duration {
        self.now().saturating_since(earlier)
    }

    pub(super) async fn sleep(&self, duration: Duration) {
        self.clock().sleep(duration).await;
    }

    /// Waits until a lease or retention of the length [`SHORT`] has ended.
    pub(super) async fn lapse(&self) {
        self.sleep(SHORT + TOLERANCE).await;
    }

    /// Returns the output of `future`, which must be ready within the patience of the subject.
    pub(super) async fn soon<T>(&self, future: impl Future<Output = T>, what: &str) -> T {
        let in_time = race(future, SystemClock::default().sleep(self.subject.patience)).await;
        in_time.unwrap_or_else(|| panic!("{what}: no answer within {:?}", self.subject.patience))
    }

    /// Returns the answer of the store. Panics if the answer is late or an error.
    pub(super) async fn ask<T>(&self, call: StoreFuture<'_, T>, what: &str) -> T {
        self.soon(call, what).await.unwrap_or_else(|error| panic!("{what}: {}", chain(&error)))
    }

    pub(super) async fn reserve(&self, request: &ReserveRequest) -> Reservation {
        self.ask(self.store().reserve(request), "reserve").await
    }

    /// Returns the lease that `request` gets, and whether `request` has taken over another attempt. Panics if `request`
    /// gets no lease.
    pub(super) async fn wins(&self, request: &ReserveRequest, why: &str) -> (Lease, bool) {
        match self.reserve(request).await {
            Reservation::Granted { lease, takeover, in_doubt: false, .. } => {
                let asked = (&request.key, request.owner, request.lease, request.ttl, request.on_crash);
                let got = (&lease.key, lease.owner, lease.duration, lease.ttl, lease.on_crash);
                assert_eq!(got, asked, "{why}: the lease differs from the request");
                (lease, takeover)
            }
            other => panic!("{why}: should be granted, was answered {other:?}"),
        }
    }

    /// Returns the lease that `request` gets. Panics unless the number of the lease's attempt is `attempt`, and the
    /// store reports no takeover.
    pub(super) async fn reserved(&self, request: &ReserveRequest, attempt: u32, why: &str) -> Lease {
        let (lease, takeover) = self.wins(request, why).await;
        assert_eq!(
            (lease.attempt, takeover),
            (attempt, false),
            "{why}: wrong attempt number, or reported as a takeover"
        );
        lease
    }

    /// Returns the lease that `request` gets. Panics unless the number of the lease's attempt is `attempt`, and the
    /// store reports a takeover.
    pub(super) async fn takes_over(&self, request: &ReserveRequest, attempt: u32, why: &str) -> Lease {
        let (lease, takeover) = self.wins(request, why).await;
        assert_eq!(
            (lease.attempt, takeover),
            (attempt, true),
            "{why}: wrong attempt number, or not reported as a takeover"
        );
        lease
    }

    /// Returns the lease that `request` gets, under which a reconciler must settle a doubt. Panics unless the number of
    /// the lease's attempt is `attempt`.
    pub(super) async fn reconciles(&self, request: &ReserveRequest, attempt: u32, why: &str) -> Lease {
        match self.reserve(request).await {
            Reservation::Granted { lease, in_doubt: true, .. } => {
                assert_eq!((lease.owner, lease.attempt), (request.owner, attempt), "{why}: the lease");
                lease
            }
            other => panic!("{why}: should be granted in doubt, was answered {other:?}"),
        }
    }

    /// Checks that the answer to `request` names the running attempt `attempt`.
    pub(super) async fn waits_for(&self, request: &ReserveRequest, attempt: u32, why: &str) {
        match self.reserve(request).await {
            Reservation::InProgress { attempt: running, lapses_in } => {
                assert_eq!(running, attempt, "{why}: another attempt is in progress");
                assert!(!lapses_in.is_zero(), "{why}: the answer says that the live lease lapses in 0 s");
            }
            other => panic!("{why}: should be in progress, was answered {other:?}"),
        }
    }

    /// Checks that the answer to `request` is `expected`.
    pub(super) async fn is_answered(&self, request: &ReserveRequest, expected: Reservation, why: &str) {
        assert_eq!(self.reserve(request).await.aged(None), expected, "{why}");
    }

    pub(super) async fn begin(&self, lease: &Lease) -> Verdict {
        self.ask(self.store().begin(lease), "begin").await
    }

    /// Marks that the body of `lease` begins. On a slow machine a short lease may lapse before the mark, so the mark is
    /// repeated after a renewal.
    pub(super) async fn begins(&self, lease: &Lease) {
        while self.begin(lease).await == Verdict::Refused {
            assert_eq!(self.renew(lease).await, Verdict::Applied, "no other attempt has taken over");
        }
    }

    pub(super) async fn renew(&self, lease: &Lease) -> Verdict {
        let answers = self.ask(StoreFuture::new(renew_all(self.store(), std::slice::from_ref(lease))), "renew").await;
        assert_eq!(answers.len(), 1, "one lease gets one answer");
        answers[0]
    }

    pub(super) async fn finish(&self, lease: &Lease, finish: &Finish) -> Verdict {
        self.ask(self.store().finish(lease, finish), "finish").await
    }

    pub(super) async fn release(&self, lease: &Lease, release: Release) -> Verdict {
        self.ask(self.store().release(lease, release), "release").await
    }

    pub(super) async fn decide(&self, decision: &Decision) -> DecisionAnswer {
        self.ask(self.store().decide(decision), decision.action.name()).await
    }

    /// Reads the record of `key`, and returns an operator's decision about its attempt `attempt`.
    pub(super) async fn decision(&self, key: &Key, attempt: u32, action: Action) -> Decision {
        let seen = match self.inspect(key).await {
            Some(found) => found.revision(),
            None => unseen(Standing::Interrupted),
        };
        Decision::new(key, seen.with_attempt(attempt), action)
    }

    /// Reads the record of `key`, and applies a decision about attempt `attempt`.
    pub(super) async fn decides(&self, key: &Key, attempt: u32, action: Action) -> DecisionAnswer {
        let decision = self.decision(key, attempt, action).await;
        self.decide(&decision).await
    }

    /// Reads the record of `key`, and decides that the next delivery runs after attempt `attempt`, whether that attempt
    /// has finished or not.
    pub(super) async fn reopen(&self, key: &Key, attempt: u32) -> Verdict {
        let is_finished = self.inspect(key).await.is_some_and(|found| found.record.is_finished());
        self.decides(key, attempt, if is_finished { Action::Discard } else { Action::Reopen }).await.into()
    }

    pub(super) async fn purge(&self, batch: u32) -> u64 {
        self.ask(self.store().purge(batch), "purge").await
    }

    pub(super) async fn inspect(&self, key: &Key) -> Option<Inspection> {
        self.ask(self.store().inspect(key), "inspect").await
    }

    /// Returns the record of `key`. Panics if there is no record.
    pub(super) async fn recorded(&self, key: &Key) -> Inspection {
        self.inspect(key).await.unwrap_or_else(|| panic!("the record of {key} is gone"))
    }

    /// Awaits the write `refused`. Checks that the store refuses the write, and that neither the record nor its
    /// times change.
    pub(super) async fn changes_nothing<V: Into<Verdict>>(
        &self,
        key: &Key,
        refused: impl Future<Output = V>,
        why: &str,
    ) {
        let earliest = self.now();
        let before = self.recorded(key).await;
        self.sleep(PAUSE).await;
        assert_eq!(refused.await.into(), Verdict::Refused, "{why}: should be refused");
        let after = self.recorded(key).await;
        assert_eq!(after.record, before.record, "{why}: refused, but it changed the record");
        let left = |before: Option<Duration>, after: Option<Duration>, time: &str| {
            let (Some(before), Some(after)) = (before, after) else { return };
            let latest = (before + TOLERANCE).saturating_sub(PAUSE);
            assert!(after <= latest, "{why}: refused, but it extended the {time}: {before:?}, then {after:?}");
            let soonest = before.saturating_sub(self.since(earliest) + TOLERANCE);
            assert!(after >= soonest, "{why}: refused, but it shortened the {time}: {before:?}, then {after:?}");
        };
        left(Some(before.expires_in), Some(after.expires_in), "retention");
        left(before.lapses_in, after.lapses_in, "lease");
    }

    /// Checks that `left` is a possible remaining time of a lease or retention of the length `length` that began
    /// between `earliest` and now.
    pub(super) fn has_left(&self, left: Duration, length: Duration, earliest: Instant, why: &str) {
        // This check does not depend on the machine's speed: the time between the write and this check is at most the
        // time since `earliest`.
        let least = length.saturating_sub(self.since(earliest) + TOLERANCE);
        assert!(left >= least, "{why}: {left:?} of {length:?} are left, at least {least:?} should be");
        assert!(left <= length + TOLERANCE, "{why}: {left:?} are left, of {length:?} at most");
    }

    /// Lets 64 tasks reserve `key` concurrently, through both handles of the store. Returns the requests with
    /// their answers.
    pub(super) async fn race(&self, key: &Key) -> Vec<(ReserveRequest, Reservation)> {
        let start = Arc::new(tokio::sync::Barrier::new(RACERS));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..RACERS {
            let (store, request, start) = (Arc::clone(self.store()), self.request(key), Arc::clone(&start));
            tasks.spawn(async move {
                start.wait().await;
                let answer = store.reserve(&request).await;
                (request, answer.unwrap_or_else(|error| panic!("reserve: {}", chain(&error))))
            });
        }
        self.soon(tasks.join_all(), "64 concurrent reservations").await
    }
}

/// Returns the error and all its causes as text.
pub(super) fn chain(error: &StoreError) -> String {
    let mut text = format!("{:?}: {error}", error.kind());
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

pub(super) fn fingerprint(byte: u8) -> Fingerprint {
    let mut bytes = [byte; Fingerprint::BYTES];
    bytes[0] = Fingerprint::VERSION;
    Fingerprint::from_bytes(bytes)
}

/// Makes a result that the codec `json` has encoded.
pub(super) fn stored(bytes: impl Into<Vec<u8>>) -> StoredResult {
    StoredResult::Encoded { codec: CodecName::new(b"json").expect("a valid name"), bytes: Bytes::from(bytes.into()) }
}

/// Makes the revision of a record that no test has written.
pub(super) fn unseen(standing: Standing) -> Revision {
    Revision { owner: [0; 8], attempt: 0, standing, journal: 0 }
}

pub(super) fn completed(text: &str) -> Finish {
    Finish::Completed(stored(text))
}

/// Returns `request` with a limit of attempts.
pub(super) fn limited(request: ReserveRequest, max_attempts: u32) -> ReserveRequest {
    ReserveRequest { max_attempts: NonZeroU32::new(max_attempts), ..request }
}

/// Returns `request` with a fingerprint whose bytes all are `byte`.
pub(super) fn marked(request: ReserveRequest, byte: u8) -> ReserveRequest {
    ReserveRequest { fingerprint: Some(fingerprint(byte)), ..request }
}

/// Returns `lease` with the owner token of another request.
pub(super) fn forged(lease: &Lease, by: &ReserveRequest) -> Lease {
    Lease { owner: by.owner, ..lease.clone() }
}

/// Polls `call` at most `polls` times, then drops it.
pub(super) async fn abandon<T>(case: &Case, mut call: StoreFuture<'_, T>, polls: usize) {
    for _ in 0..polls {
        if poll_fn(|cx| Poll::Ready(Pin::new(&mut call).poll(cx).is_ready())).await {
            return;
        }
        case.sleep(Duration::from_millis(1)).await;
    }
}
