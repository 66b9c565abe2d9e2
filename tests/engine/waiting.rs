//! Duplicates that wait through one store handle: the store waits once for all of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};

use idem_runtime::store::{
    Action, Decision, DecisionAnswer, Finish, Inspection, Lease, Release, Reservation, ReserveRequest, StoreFuture,
    Verdict, forward,
};
use tokio::sync::oneshot;

use super::super::*;

const WAIT: Policy = POLICY.in_progress(InProgress::Wait(Duration::from_secs(20)));

/// Store whose waits the test ends. All handles share one `Arc`, as in the library.
#[derive(Debug)]
struct ScriptedWaits {
    this: Weak<Self>,
    inner: FaultyStore,
    waits: Mutex<VecDeque<oneshot::Sender<Option<Inspection>>>>,
}

impl Store for ScriptedWaits {
    forward! { |store| store.inner => namespace, response_timeout, context, upkeep, reserve, begin, renew, append, finish, release, inspect, decide, purge, list, ping }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().unwrap()
    }

    fn wait<'a>(&'a self, _: &'a Key, _: u32, _: Duration) -> StoreFuture<'a, Option<Inspection>> {
        let (tells, told) = oneshot::channel();
        self.waits.lock().unwrap().push_back(tells);
        StoreFuture::new(async move { Ok(told.await.expect("the test sends an answer")) })
    }
}

struct Hall {
    clock: ManualClock,
    store: Arc<ScriptedWaits>,
    runs: AtomicU32,
}

type Call_<'a> = std::pin::Pin<Box<dyn Future<Output = (Result<u32, Error>, Outcome)> + 'a>>;

impl Hall {
    fn new() -> Self {
        let clock = ManualClock::new();
        let inner = FaultyStore::new(&MemoryStore::options().clock(clock.clone()).build());
        let store = Arc::new_cyclic(|this| ScriptedWaits { this: Weak::clone(this), inner, waits: Mutex::default() });
        Self { clock, store, runs: AtomicU32::new(0) }
    }

    /// Reserves the key as an attempt of another process.
    async fn held(&self) -> Lease {
        let request = ReserveRequest::new(World::key("k"), self.store.context().new_owner(), LEASE, TTL);
        match self.store.inner.reserve(&request).await.unwrap() {
            Reservation::Granted { lease, .. } => lease,
            other => panic!("{other:?}"),
        }
    }

    async fn finish(&self, lease: &Lease, result: &str) {
        let finish = Finish::Completed(idem_tests::calls::stored(result.to_owned()));
        assert_eq!(self.store.inner.finish(lease, &finish).await.unwrap(), Verdict::Applied);
    }

    async fn found(&self) -> Option<Inspection> {
        self.store.inner.inspect(&World::key("k")).await.unwrap()
    }

    /// Starts a duplicate and polls it until it waits.
    async fn waits(&self) -> Call_<'_> {
        self.waits_with(None).await
    }

    async fn waits_with(&self, payload: Option<u32>) -> Call_<'_> {
        let operation = Operation::new(&*self.store, Ok(World::key("k")), WAIT);
        let operation = match payload {
            Some(payload) => operation.fingerprint(&payload),
            None => operation,
        };
        let mut call: Call_<'_> =
            Box::pin(observe(operation.run(async { Ok(100 + self.runs.fetch_add(1, Ordering::SeqCst)) })));
        assert!(poll_once(call.as_mut()).await.is_pending(), "the duplicate waits");
        call
    }

    /// Returns the number of reservations so far, and the number of waits under way.
    fn asked(&self) -> (usize, usize) {
        (self.store.inner.count(StoreCall::Reserve), self.store.waits.lock().unwrap().len())
    }

    /// Ends the oldest wait with the answer `told`.
    fn tell(&self, told: Option<Inspection>) {
        let wait = self.store.waits.lock().unwrap().pop_front().expect("a wait is under way");
        wait.send(told).expect("a duplicate waits");
    }
}

async fn result_of(call: Call_<'_>) -> u32 {
    let (result, outcome) = call.await;
    assert!(outcome.waited());
    result.unwrap()
}

/// A duplicate that waits alone costs two calls: a reservation and a wait.
#[tokio::test]
async fn a_waiting_duplicate_reserves_once_and_gets_the_result() {
    let hall = Hall::new();
    let lease = hall.held().await;
    let call = hall.waits().await;
    hall.finish(&lease, "1").await;
    hall.tell(hall.found().await);
    assert_eq!(result_of(call).await, 1);
    assert_eq!(hall.asked(), (2, 0), "the holder, and the duplicate once");
    assert_eq!(hall.store.inner.count(StoreCall::Inspect), 1, "only the test has inspected the record");
}

/// Duplicates that join while the store already waits for another duplicate share the store's next wait.
#[tokio::test]
async fn many_duplicates_share_one_wait() {
    let hall = Hall::new();
    let lease = hall.held().await;
    let mut calls = Vec::new();
    for _ in 0..50 {
        calls.push(hall.waits().await);
    }
    assert_eq!(hall.asked(), (51, 1), "each duplicate has reserved, and the store waits once");
    hall.finish(&lease, "1").await;
    hall.tell(hall.found().await);
    for call in &mut calls {
        assert!(poll_once(call.as_mut()).await.is_pending());
    }
    assert_eq!(hall.asked(), (51, 1), "one more store call for all duplicates that joined after the first");
    hall.tell(hall.found().await);
    for call in calls {
        assert_eq!(result_of(call).await, 1);
    }
    assert_eq!(hall.asked(), (51, 0));
}

/// A duplicate must not use a record that was read before its own reservation, because the key may have been forgotten
/// and reserved again since.
#[tokio::test]
async fn no_duplicate_gets_a_record_read_before_its_request() {
    let hall = Hall::new();
    let key = World::key("k");
    let lease = hall.held().await;
    let mut first = hall.waits().await;
    hall.finish(&lease, "1").await;
    let early = hall.found().await;
    // An answer of the store's wait is under way. Meanwhile an operator forgets the record, and another process
    // reserves the key as attempt 1.
    let found = hall.store.inner.inspect(&key).await.unwrap().expect("a record");
    let forgotten = Decision::new(&key, &found, Action::Forget);
    assert_eq!(hall.store.inner.decide(&forgotten).await.unwrap(), DecisionAnswer::Applied);
    let again = hall.held().await;
    assert_eq!(again.attempt, 1);
    let mut second = hall.waits().await;
    hall.tell(early);
    assert!(poll_once(second.as_mut()).await.is_pending(), "the second duplicate does not get the earlier result");
    assert!(poll_once(first.as_mut()).await.is_pending());
    // The next read finds the attempt running, so the wait goes on.
    hall.tell(hall.found().await);
    assert!(poll_once(second.as_mut()).await.is_pending());
    hall.clock.advance(Duration::from_millis(10));
    assert!(poll_once(second.as_mut()).await.is_pending());
    hall.finish(&again, "2").await;
    hall.tell(hall.found().await);
    assert_eq!((result_of(second).await, result_of(first).await), (2, 2));
}

/// A duplicate that comes while an answer to earlier duplicates is under way makes its own reservation.
#[tokio::test]
async fn a_duplicate_that_comes_too_late_for_an_answer_reserves_again() {
    let hall = Hall::new();
    let lease = hall.held().await;
    let mut calls = vec![hall.waits().await, hall.waits().await];
    hall.finish(&lease, "1").await;
    let found = hall.found().await;
    hall.tell(found.clone());
    assert!(poll_once(calls[0].as_mut()).await.is_pending(), "the store is read once more, for the second duplicate");
    // Another process reserves the key again, and its attempt runs.
    assert_eq!(hall.store.inner.reopen(&World::key("k"), 1).await.unwrap(), Verdict::Applied);
    let again = hall.held().await;
    calls.push(hall.waits().await);
    hall.tell(found);
    assert!(poll_once(calls[2].as_mut()).await.is_pending(), "the third duplicate reserves, and waits for attempt 2");
    assert_eq!(hall.asked(), (6, 1));
    hall.finish(&again, "2").await;
    hall.tell(hall.found().await);
    let third = calls.pop().expect("three");
    assert_eq!(result_of(third).await, 2);
    for call in calls {
        assert_eq!(result_of(call).await, 1);
    }
}

/// Each waiting duplicate compares its fingerprint with the record's fingerprint, as a reservation does.
#[tokio::test]
async fn each_waiting_duplicate_compares_its_fingerprint() {
    let hall = Hall::new();
    let request = ReserveRequest::new(World::key("k"), hall.store.context().new_owner(), LEASE, TTL);
    let lease = match hall.store.inner.reserve(&request).await.unwrap() {
        Reservation::Granted { lease, .. } => lease,
        other => panic!("{other:?}"),
    };
    // The duplicates have payloads; the pending record has no fingerprint.
    let same = hall.waits_with(Some(1)).await;
    let other = hall.waits_with(Some(2)).await;
    hall.finish(&lease, "1").await;
    let mut found = hall.found().await.unwrap();
    found.record.fingerprint = Some(idem_runtime::key::Fingerprint::of(&1).unwrap());
    hall.tell(Some(found.clone()));
    let mut same = same;
    assert!(poll_once(same.as_mut()).await.is_pending());
    hall.tell(Some(found));
    assert_eq!(result_of(same).await, 1);
    let (refused, outcome) = other.await;
    assert!(matches!(refused, Err(Error::FingerprintMismatch { .. })), "{refused:?}");
    assert!(!outcome.replayed());
}

/// No duplicate depends on the first duplicate, which may be dropped or stand still.
#[tokio::test]
async fn no_waiting_duplicate_depends_on_the_first_one() {
    for dropped in [true, false] {
        let hall = Hall::new();
        let lease = hall.held().await;
        let first = hall.waits().await;
        let mut second = hall.waits().await;
        let standing = match dropped {
            true => {
                drop(first);
                None
            }
            false => Some(first),
        };
        hall.finish(&lease, "1").await;
        hall.tell(hall.found().await);
        assert!(poll_once(second.as_mut()).await.is_pending());
        hall.tell(hall.found().await);
        assert_eq!(result_of(second).await, 1, "dropped: {dropped}");
        drop(standing);
    }
}

/// The store's wait is dropped when its last duplicate is dropped.
#[tokio::test]
async fn a_wait_ends_with_its_last_duplicate() {
    let hall = Hall::new();
    let _lease = hall.held().await;
    let calls = [hall.waits().await, hall.waits().await];
    drop(calls);
    let wait = hall.store.waits.lock().unwrap().pop_front().unwrap();
    assert!(wait.is_closed(), "the store waits although no duplicate waits");
    // The next duplicate starts a new wait.
    drop(hall.waits().await);
    assert_eq!(hall.asked(), (4, 1));
}

/// One duplicate takes a released key. The other duplicates wait for this attempt, and make no reservations.
#[tokio::test]
async fn one_waiting_duplicate_takes_a_released_key_and_the_others_go_on_waiting() {
    let hall = Hall::new();
    let lease = hall.held().await;
    let mut calls = Vec::new();
    for _ in 0..20 {
        calls.push(hall.waits().await);
    }
    assert_eq!(hall.store.inner.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
    hall.tell(hall.found().await);
    let mut took = Vec::new();
    for (at, call) in calls.iter_mut().enumerate() {
        if let Poll::Ready((result, outcome)) = poll_once(call.as_mut()).await {
            assert!(outcome.executed() && outcome.waited());
            took.push((at, result.unwrap()));
        }
    }
    assert_eq!(took, [(0, 100)], "one duplicate has run the body");
    assert_eq!(hall.asked(), (22, 1), "only one duplicate has reserved again, and the store waits for its attempt");
    hall.tell(hall.found().await);
    for call in calls.into_iter().skip(1) {
        assert_eq!(result_of(call).await, 100);
    }
    assert_eq!((hall.asked(), hall.runs.load(Ordering::SeqCst)), ((22, 0), 1));
}

/// One duplicate at a time may reserve. If this duplicate is dropped, the next one reserves immediately. If it stands
/// still, the next one reserves after 100 ms.
#[tokio::test]
async fn a_stalled_duplicate_lets_the_next_one_reserve() {
    for dropped in [true, false] {
        let hall = Hall::new();
        let lease = hall.held().await;
        let mut first = hall.waits().await;
        let mut second = hall.waits().await;
        assert_eq!(hall.store.inner.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
        hall.store.inner.next(StoreCall::Reserve, Fault::Hang);
        hall.tell(hall.found().await);
        assert!(poll_once(first.as_mut()).await.is_pending(), "the reservation of the first duplicate hangs");
        assert!(poll_once(second.as_mut()).await.is_pending(), "the second call waits for the first call");
        if dropped {
            drop(first);
            assert_eq!(result_of(second).await, 100);
        } else {
            hall.clock.advance(Duration::from_millis(100));
            assert_eq!(result_of(second).await, 100);
            drop(first);
        }
        hall.store.context().flush().await;
    }
}

/// If the store's wait returns no record, one duplicate reserves for all.
#[tokio::test]
async fn if_a_wait_returns_nothing_one_duplicate_reserves() {
    let hall = Hall::new();
    let lease = hall.held().await;
    let mut calls = Vec::new();
    for _ in 0..5 {
        calls.push(hall.waits().await);
    }
    hall.finish(&lease, "1").await;
    hall.tell(None);
    for call in &mut calls {
        let _ = poll_once(call.as_mut()).await.map(|(result, _)| assert_eq!(result.unwrap(), 1));
    }
    assert_eq!(hall.asked(), (7, 1), "one duplicate has reserved; the store waits again, for the others");
    hall.tell(hall.found().await);
    for call in calls.into_iter().skip(1) {
        assert_eq!(result_of(call).await, 1);
    }
}

/// A wait survives a failover of the store, because the running attempt may survive it too.
#[tokio::test]
async fn an_outage_of_the_store_ends_no_wait_of_a_duplicate() {
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Unconfirmed] {
        let world = World::new();
        let policy = WAIT.on_store_error(OnStoreError::Run);
        for policy in [WAIT, policy] {
            let running = world.hang(POLICY).await;
            let mut waiting = Box::pin(observe(world.operation(policy).run(world.body())));
            assert!(poll_once(waiting.as_mut()).await.is_pending());
            world.store.always(StoreCall::Wait, Fault::Before(kind));
            world.store.always(StoreCall::Reserve, Fault::Before(kind));
            drop(running);
            for _ in 0..15 {
                settle().await;
                assert!(poll_once(waiting.as_mut()).await.is_pending(), "{kind:?}: 15 of 20 s");
                world.clock.advance(Duration::from_secs(1));
            }
            world.store.always(StoreCall::Wait, Fault::None);
            world.store.always(StoreCall::Reserve, Fault::None);
            let (result, outcome) = driving(&world.clock, waiting).await;
            assert!(result.is_ok() && outcome.executed() && outcome.waited() && outcome.recorded(), "{outcome:?}");
            world.store.context().flush().await;
            let attempt = outcome.attempt().unwrap();
            assert_eq!(world.store.reopen(&World::key("k"), attempt).await.unwrap(), Verdict::Applied);
        }
    }
}

/// After an outage of the store, duplicates send their requests at different times.
#[tokio::test]
async fn duplicates_do_not_reserve_together_after_an_outage() {
    const WAITERS: usize = 40;
    let world = World::new();
    let running = world.hang(POLICY).await;
    let calls = (0..WAITERS).map(|_| Box::pin(world.operation(WAIT).run(world.body())));
    let mut waiting = Box::pin(futures::future::join_all(calls));
    assert!(poll_once(waiting.as_mut()).await.is_pending());
    world.store.always(StoreCall::Wait, Fault::Before(StoreErrorKind::Unavailable));
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    drop(running);
    // In the last steps, the pauses between requests have reached their largest length.
    let step = Duration::from_millis(10);
    let mut together = Vec::new();
    for _ in 0..600 {
        let before = world.store.count(StoreCall::Reserve);
        settle().await;
        assert!(poll_once(waiting.as_mut()).await.is_pending());
        together.push(world.store.count(StoreCall::Reserve) - before);
        world.clock.advance(step);
    }
    let late = &together[400..];
    assert!(late.iter().sum::<usize>() >= WAITERS, "{late:?}");
    assert!(late.iter().all(|asked| *asked <= WAITERS / 3), "{late:?}");
}

/// In an outage a duplicate waits for as long as its policy allows. A permanent error of the store ends the wait
/// immediately.
#[tokio::test]
async fn a_wait_in_an_outage_is_as_long_as_the_policy_says() {
    for (kind, lasts) in [(StoreErrorKind::Unavailable, true), (StoreErrorKind::Misconfigured, false)] {
        let world = World::new();
        let running = world.hang(POLICY).await;
        let mut waiting = Box::pin(world.operation(WAIT).run(world.body()));
        assert!(poll_once(waiting.as_mut()).await.is_pending());
        let began = world.clock.now();
        world.store.always(StoreCall::Wait, Fault::Before(kind));
        world.store.always(StoreCall::Reserve, Fault::Before(kind));
        drop(running);
        let result = driving(&world.clock, waiting).await;
        assert!(matches!(&result, Err(Error::Store { source, .. }) if source.kind() == kind), "{result:?}");
        let waited = world.clock.now().saturating_since(began);
        assert_eq!(waited >= Duration::from_secs(20), lasts, "{kind:?}: {waited:?}");
        assert!(waited < Duration::from_secs(22), "{waited:?}");
        assert_eq!(world.runs(), 1, "the holder's");
    }
}
