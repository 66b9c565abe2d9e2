//! Number of store operations that waiting duplicates cost, for every store.

use std::sync::Arc;
use std::time::Duration;

use idem_runtime::conformance::Subject;
use idem_runtime::metrics::STORE_SECONDS;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Lease, Reservation, ReserveRequest, Verdict};
use idem_runtime::{Error, InProgress, Key, Operation, Outcome, Policy, Store, StoreExt as _, observe};
use idem_tests::calls::stored;
use idem_tests::server::until;

/// Lease that outlasts any test.
const LEASE: Duration = Duration::from_secs(600);
const POLICY: Policy = Policy::new(LEASE).lease(LEASE).in_progress(InProgress::Wait(LEASE));

/// Numbers of answered operations of this handle: reservations, waits, and all operations.
fn answered(store: &dyn Store) -> [u64; 3] {
    let metrics = store.metrics();
    let of = |name| metrics.count(&STORE_SECONDS, &[("op", name)]);
    [of("reserve"), of("wait"), metrics.count(&STORE_SECONDS, &[])]
}

fn since(store: &dyn Store, before: [u64; 3]) -> [u64; 3] {
    let now = answered(store);
    [0, 1, 2].map(|at| now[at] - before[at])
}

/// Key that the handle `store` holds by `lease`, and the handle `peer` in which duplicates wait for this key.
struct Held {
    store: Arc<dyn Store>,
    peer: Arc<dyn Store>,
    lease: Lease,
}

impl Held {
    async fn by(subject: &Subject) -> Self {
        let [store, peer] = subject.handles();
        let owner = store.context().new_owner();
        let run = owner.as_bytes().iter().fold(String::new(), |run, byte| format!("{run}{byte:02x}"));
        let request = ReserveRequest::new(Key::new("waiting", run).unwrap(), owner, LEASE, LEASE);
        match store.reserve(&request).await.unwrap() {
            Reservation::Granted { lease, .. } => Self { store, peer, lease },
            other => panic!("{other:?}"),
        }
    }

    fn duplicate(&self) -> impl Future<Output = (Result<u32, Error>, Outcome)> + Send + 'static {
        let operation = Operation::new(&self.peer, Ok(self.lease.key.clone()), POLICY);
        async move { observe(operation.run(async { panic!("the body of a duplicate runs") })).await }
    }

    async fn ends(&self) {
        let result: StoredResult = stored("42");
        assert_eq!(self.store.finish(&self.lease, &Finish::Completed(result)).await.unwrap(), Verdict::Applied);
    }
}

fn is_replayed((result, outcome): (Result<u32, Error>, Outcome)) {
    assert_eq!(result.unwrap(), 42);
    assert!(outcome.replayed() && outcome.waited());
}

/// A duplicate in another handle reserves once, waits once, and gets the result.
pub(crate) async fn one_waits(subject: Subject) {
    let held = Held::by(&subject).await;
    let before = answered(&*held.peer);
    let duplicate = tokio::spawn(held.duplicate());
    until("the waiter has asked the store", async || since(&*held.peer, before)[0] > 0).await;
    held.ends().await;
    is_replayed(duplicate.await.unwrap());
    assert_eq!(since(&*held.peer, before), [1, 1, 2], "reservations, waits, operations");
}

/// Each of `many` duplicates reserves once, and one wait of the store serves them all.
pub(crate) async fn many_wait(subject: Subject, many: u64) {
    let held = Held::by(&subject).await;
    let before = answered(&*held.peer);
    let mut duplicates = Vec::new();
    for n in 1..=many {
        duplicates.push(tokio::spawn(held.duplicate()));
        // The duplicates start in groups. If all duplicates started together, a slow machine would repeat reservations
        // after a time-out.
        if n % 100 == 0 {
            until("all duplicates have asked the store", async || since(&*held.peer, before)[0] >= n).await;
        }
    }
    // On a slow server, some duplicates repeat their reservation after a time-out.
    let once = many..=many + many / 100;
    let [reserves, waits, _] = since(&*held.peer, before);
    assert!(
        once.contains(&reserves) && waits == 0,
        "reservations: {reserves}, one for each duplicate; waits that have ended: {waits}, none"
    );
    held.ends().await;
    for duplicate in duplicates {
        is_replayed(duplicate.await.unwrap());
    }
    let [reserves, waits, all] = since(&*held.peer, before);
    assert!(
        once.contains(&reserves) && all == reserves + waits,
        "no waiter reserves again: {reserves} reservations, {all} calls in all"
    );
    assert_eq!(waits, 2, "the store has waited once for the first duplicate, and once for all later ones");
}

/// Defines the tests of one store. Each test runs on one thread, so all duplicates wait once all reservations are
/// answered.
macro_rules! waiting {
    ($name:ident, $subject:expr, $many:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::super::*;

            fn run(test: impl Future<Output = ()>) {
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
            }

            #[test]
            fn a_waiting_duplicate_costs_one_reservation_and_one_wait() {
                run(async { super::one_waits($subject).await });
            }

            #[test]
            fn one_wait_answers_thousands_of_duplicates() {
                run(async { super::many_wait($subject, $many).await });
            }
        }
    };
}

waiting!(memory, memory(), 10_000);
waiting!(redis, Kind::Redis.subject().await, 10_000);
waiting!(valkey, Kind::Valkey.subject().await, 10_000);
#[cfg(feature = "nats")]
waiting!(nats, idem_tests::nats::subject().await, 2_000);
#[cfg(feature = "sqlite")]
waiting!(sqlite, idem_tests::sqlite::subject().await, 10_000);
#[cfg(feature = "postgres")]
waiting!(postgres, idem_tests::postgres::subject().await, 10_000);
#[cfg(feature = "postgres")]
waiting!(pgbouncer, idem_tests::postgres::subject_behind_pgbouncer().await, 10_000);
waiting!(cluster, idem_tests::cluster::cluster_subject(RedisStore::options).await, 10_000);
waiting!(sentinel, idem_tests::cluster::sentinel_subject(RedisStore::options).await, 10_000);
waiting!(sentinel_replicated, idem_tests::cluster::sentinel_subject(replicated).await, 10_000);
// The emulator needs a millisecond for each duplicate, so fewer duplicates wait here.
#[cfg(feature = "dynamodb")]
waiting!(dynamo, idem_tests::dynamo::Kind::Dynoxide.subject().await, 1_000);
#[cfg(feature = "wrappers")]
waiting!(cached, idem_tests::wrapped::cached(), 10_000);
#[cfg(feature = "wrappers")]
waiting!(compressed, idem_tests::wrapped::compressed(), 10_000);
#[cfg(feature = "wrappers")]
waiting!(offloaded, idem_tests::wrapped::offloaded(), 10_000);
#[cfg(feature = "wrappers")]
waiting!(all_wrappers, idem_tests::wrapped::stacked().await, 10_000);
