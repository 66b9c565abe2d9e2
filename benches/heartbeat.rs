//! Measures the cost of heartbeats for a handler that returns long before the first renewal of its lease. Each line
//! compares two sides: the library, and a raw side that lacks the measured part.
//!
//! - *Ready at once*: the lease is registered before the only poll, and deregistered after it. No variant of the
//!   library omits the registration, so the raw side is the protocol by hand over the same store: the same key, an
//!   owner, reserve, run, encode, finish. The difference is the whole engine: an upper bound for the registration.
//! - *Pends once*: the handler is polled once more, and its lease is checked before that poll. The raw side awaits a
//!   future that is pending once, just before the same call: the number of polls and the work of the library are equal,
//!   but no lease is checked.
//! - *A task for each call*: the same raw side, compared with a variant of it that spawns and aborts a renewal task for
//!   each call.

use std::future::poll_fn;
use std::hint::black_box;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use idem_benches::{Goal, Table, alternate, is_wanted, nanos_each, sized, timed_on_cpu};
use idem_runtime::codec::CodecName;
use idem_runtime::record::StoredResult;
use idem_runtime::store::{Finish, Reservation, ReserveRequest, Verdict};
use idem_runtime::{Codec, Error, Json, Key, MemoryStore, Operation, Policy, Store};

const TTL: Duration = Duration::from_secs(7 * 86_400);
const POLICY: Policy = Policy::new(TTL);

fn key(id: u64) -> Key {
    Key::new("bench", id).expect("a valid key")
}

async fn pending_once() {
    let mut polled = false;
    poll_fn(|_| if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

async fn by_hand(store: &MemoryStore, id: u64) -> u64 {
    let store = store.handle();
    let request = ReserveRequest::new(key(id), store.context().new_owner(), Policy::DEFAULT_LEASE, TTL);
    let Ok(Reservation::Granted { lease, .. }) = store.reserve(&request).await else { panic!("not reserved") };
    let value = black_box(id);
    let bytes = Json::encode(&value).expect("a number can be encoded").into();
    let finish = Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes });
    assert_eq!(store.finish(&lease, &finish).await.expect("finishes"), Verdict::Applied);
    value
}

async fn ready(store: &MemoryStore, id: u64) -> u64 {
    let body = async { Ok::<_, Error>(black_box(id)) };
    Operation::new(store, Ok(key(id)), POLICY).run(body).await.expect("runs")
}

async fn pends_within(store: &MemoryStore, id: u64) -> u64 {
    let body = async {
        pending_once().await;
        Ok::<_, Error>(black_box(id))
    };
    Operation::new(store, Ok(key(id)), POLICY).run(body).await.expect("runs")
}

async fn pends_before(store: &MemoryStore, id: u64) -> u64 {
    pending_once().await;
    ready(store, id).await
}

async fn task_for_each_call(store: &MemoryStore, id: u64) -> u64 {
    let beat = tokio::spawn(std::future::pending::<()>());
    let value = pends_before(store, id).await;
    beat.abort();
    value
}

/// Calls `handler` many times and polls each call until it is ready. Each round has its own runtime and store.
fn measure(handler: &impl AsyncFn(&MemoryStore, u64) -> u64) -> f64 {
    let count = sized(4_000, 100);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime can be built");
    let store = MemoryStore::new();
    let calls = async {
        for id in 0..count {
            let mut call = pin!(handler(&store, id));
            poll_fn(|cx| {
                loop {
                    if let Poll::Ready(value) = call.as_mut().poll(cx) {
                        return Poll::Ready(black_box(value));
                    }
                }
            })
            .await;
        }
    };
    let took = timed_on_cpu(|| runtime.block_on(calls));
    nanos_each(took, usize::try_from(count).expect("a small number"))
}

fn main() {
    let rounds = sized(201, 2);
    let table = Table::new("Heartbeat, memory store, one thread", "ns", "ns more");
    let more = |idem, raw| idem - raw;
    if is_wanted("ready at once") {
        let [raw, idem] = alternate(rounds, [&mut || measure(&by_hand), &mut || measure(&ready)]);
        table.line("ready at once: engine against protocol by hand", &raw, &idem, more, Goal::None);
    }
    if is_wanted("pends once") {
        let [raw, idem, task] = alternate(
            rounds,
            [&mut || measure(&pends_before), &mut || measure(&pends_within), &mut || measure(&task_for_each_call)],
        );
        table.line("pends once: within the handler against before the call", &raw, &idem, more, Goal::AtMost(200.0));
        table.line("for comparison: a task for each call", &raw, &task, more, Goal::None);
    }
}
