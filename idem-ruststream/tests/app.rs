//! Messages of RustStream's in-memory broker, settled according to the idempotent calls of their handlers.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_runtime::policy::Backoff;
use idem_runtime::{Error, MemoryStore, Policy, idempotent};
use idem_ruststream::DeliveryLayer;
use ruststream::memory::prelude::*;
use ruststream::testing::{Outcome, TestApp};
use serde::{Deserialize, Serialize};

const PAUSE: Duration = Duration::from_mins(1);
const POLICY: Policy = Policy::new(Duration::from_hours(24)).max_attempts(3).backoff(Backoff::new(PAUSE, PAUSE));

type Test = Result<(), Box<dyn StdError>>;

#[derive(Debug, PartialEq, Deserialize, Serialize, Outgoing)]
struct Order {
    id: u64,
    cents: u64,
}

#[derive(Clone, FromRef)]
struct Shop {
    store: MemoryStore,
    /// Number of bodies that have run, and number of bodies that will still fail.
    counts: Arc<[AtomicU32; 2]>,
}

impl Shop {
    fn failing(times: u32) -> Self {
        Self { store: MemoryStore::new(), counts: Arc::new([AtomicU32::new(0), AtomicU32::new(times)]) }
    }

    fn bodies(&self) -> u32 {
        self.counts[0].load(Ordering::SeqCst)
    }
}

#[derive(Debug)]
struct Failure;

impl From<Error> for Failure {
    fn from(_: Error) -> Self {
        Self
    }
}

#[idempotent(key = "{order.id}", policy = POLICY, store = store, fingerprint = order)]
async fn charge(store: &MemoryStore, counts: &[AtomicU32; 2], order: &Order) -> Result<u64, Failure> {
    counts[0].fetch_add(1, Ordering::SeqCst);
    let fails = counts[1].fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
    assert!(order.id != 13, "order 13");
    if fails { Err(Failure) } else { Ok(order.cents) }
}

#[subscriber("orders")]
async fn on_order(
    order: &Order,
    State(store): State<MemoryStore>,
    State(counts): State<Arc<[AtomicU32; 2]>>,
) -> Result<(), Failure> {
    charge(&store, &counts, order).await.map(drop)
}

/// Acknowledges its message although its call may have failed.
#[subscriber("careless")]
async fn careless(
    order: &Order,
    State(store): State<MemoryStore>,
    State(counts): State<Arc<[AtomicU32; 2]>>,
) -> HandlerOutcome {
    let _ = charge(&store, &counts, order).await;
    HandlerOutcome::ack()
}

/// Makes no idempotent call.
#[subscriber("plain")]
async fn plain(order: &Order) -> HandlerOutcome {
    match order.id {
        0 => HandlerOutcome::drop(),
        1 => HandlerOutcome::retry_after(PAUSE),
        _ => HandlerOutcome::ack(),
    }
}

fn app() -> impl App<State = Shop> {
    RustStream::new(AppInfo::new("shop", "0.1.0"))
        .layer(DeliveryLayer::new())
        .on_startup(async move |()| Ok::<_, Infallible>(Shop::failing(0)))
        .with_broker(MemoryBroker::new(), |b| {
            b.include(on_order);
            b.include(careless);
            b.include(plain);
        })
}

/// Publishes the orders, and returns the outcomes of all deliveries after `pauses` long pauses.
async fn outcomes(
    shop: &Shop,
    channel: &'static str,
    orders: &[Order],
    pauses: u32,
) -> Result<Vec<Outcome>, Box<dyn StdError>> {
    let app = TestApp::with_state(app(), |_| shop.clone()).await?;
    for order in orders {
        app.broker::<MemoryBroker>().message(order).to(channel).publish().await?;
    }
    for _ in 0..pauses {
        app.advance(PAUSE * 10).await?;
    }
    let outcomes = app.broker::<MemoryBroker>().subscriber(channel).outcomes();
    app.shutdown().await?;
    Ok(outcomes)
}

#[tokio::test(start_paused = true)]
async fn a_message_that_is_published_again_is_acknowledged_without_the_body() -> Test {
    let shop = Shop::failing(0);
    let orders = [Order { id: 1, cents: 5 }, Order { id: 1, cents: 5 }];
    assert_eq!(outcomes(&shop, "orders", &orders, 0).await?, [Outcome::Ack, Outcome::Ack]);
    assert_eq!(shop.bodies(), 1);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_call_fails_is_delivered_again_and_not_dropped() -> Test {
    let shop = Shop::failing(1);
    let outcomes = outcomes(&shop, "orders", &[Order { id: 1, cents: 5 }], 1).await?;
    assert_eq!(outcomes, [Outcome::Nack, Outcome::Ack]);
    assert_eq!(shop.bodies(), 2);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_acknowledgement_that_hides_a_failed_call_is_a_retry() -> Test {
    let shop = Shop::failing(1);
    let outcomes = outcomes(&shop, "careless", &[Order { id: 1, cents: 5 }], 1).await?;
    assert_eq!(outcomes, [Outcome::Nack, Outcome::Ack]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_message_that_never_succeeds_is_dropped_after_its_attempts() -> Test {
    let shop = Shop::failing(u32::MAX);
    let outcomes = outcomes(&shop, "careless", &[Order { id: 1, cents: 5 }], 5).await?;
    assert_eq!(outcomes, [Outcome::Nack, Outcome::Nack, Outcome::Nack, Outcome::Drop]);
    assert_eq!(shop.bodies(), 3);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_message_with_another_payload_for_its_key_is_dropped() -> Test {
    let shop = Shop::failing(0);
    let orders = [Order { id: 1, cents: 5 }, Order { id: 1, cents: 9 }];
    assert_eq!(outcomes(&shop, "careless", &orders, 0).await?, [Outcome::Ack, Outcome::Drop]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_handler_panics_is_delivered_again() -> Test {
    let shop = Shop::failing(0);
    let outcomes = outcomes(&shop, "orders", &[Order { id: 13, cents: 5 }], 0).await?;
    assert_eq!(outcomes, [Outcome::Nack]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_handler_without_idempotent_calls_keeps_its_outcome() -> Test {
    let shop = Shop::failing(0);
    let orders = [0, 1, 2].map(|id| Order { id, cents: 5 });
    let outcomes = outcomes(&shop, "plain", &orders, 0).await?;
    assert_eq!(outcomes, [Outcome::Drop, Outcome::Nack, Outcome::Ack]);
    Ok(())
}
