//! Idempotent subscribers for RustStream 0.7: a layer that settles each message according to the idempotent calls of
//! its handler.
//!
//! A handler calls functions with `#[idempotent]`. [`DeliveryLayer`] observes these calls, and settles the message
//! according to their [`Disposition`]:
//!
//! | disposition | outcome for RustStream |
//! |---|---|
//! | `Ack` | the outcome of the handler |
//! | `Retry { after }` | `retry_after(after)`, also if the handler acknowledged; a longer pause of the handler stays |
//! | `DeadLetter` | `drop()`, also if the handler acknowledged |
//!
//! - *Without the layer* RustStream drops a message whose handler returns `Err`, and so loses the message even if the
//!   failure would pass.
//! - A handler without idempotent calls keeps its outcome. A handler that drops a message although its calls have
//!   finished keeps this outcome, too.
//! - A panic of a handler is a failed delivery: the message is delivered again.
//! - A continuation of the handler (`and_after`) runs only if the handler's own outcome stays.
//!
//! ```
//! use std::convert::Infallible;
//!
//! use idem_ruststream::DeliveryLayer;
//! use idem_runtime::{Error, MemoryStore, idempotent};
//! use ruststream::memory::prelude::*;
//! use ruststream::testing::TestApp;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Deserialize, Serialize, Outgoing)]
//! struct Order {
//!     id: u64,
//! }
//!
//! #[derive(Clone, FromRef)]
//! struct Shop {
//!     store: MemoryStore,
//! }
//!
//! #[idempotent(key = "order:{order}", ttl = "30d", max_attempts = 5, store = store)]
//! async fn ship(store: &MemoryStore, order: u64) -> Result<String, Error> {
//!     Ok(format!("parcel for order {order}"))
//! }
//!
//! #[subscriber("orders")]
//! async fn on_order(order: &Order, State(store): State<MemoryStore>) -> Result<(), Error> {
//!     ship(&store, order.id).await.map(drop)
//! }
//!
//! fn app() -> impl App<State = Shop> {
//!     RustStream::new(AppInfo::new("shipping", "0.1.0"))
//!         .layer(DeliveryLayer::new())
//!         .on_startup(async move |()| Ok::<_, Infallible>(Shop { store: MemoryStore::new() }))
//!         .with_broker(MemoryBroker::new(), |b| {
//!             b.include(on_order);
//!         })
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let app = TestApp::start(app()).await?;
//! for _ in 0..2 {
//!     app.broker::<MemoryBroker>().message(&Order { id: 42 }).to("orders").publish().await?;
//! }
//! app.broker::<MemoryBroker>().subscriber("orders").assert_called(2).settled(HandlerOutcome::ack());
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! # Behaviour of RustStream 0.7
//! - *`retry_after` without the broker's help loses messages.* JetStream delays a message itself. On a broker that
//!   can't, RustStream drops the message and publishes a copy after the pause from the memory of this process: the
//!   message is lost if the process ends during the pause. Use a broker that delays messages, or one that keeps the
//!   copy elsewhere.
//! - *`drop()` goes to no dead-letter destination.* `max_attempts(n).dead_letter(name)` of a registration moves only
//!   messages whose retries are used up. A message that no delivery can finish is rejected: RabbitMQ moves it to the
//!   dead-letter exchange of the queue; JetStream keeps it in the stream, and delivers it to this consumer no more. The
//!   layer logs an error with the key and the subscription.
//! - *The number of a delivery* reaches the layer only on brokers without a count of their own, from the header
//!   `x-ruststream-retry-count`. Without this number, the pauses grow with the attempts of the record.
//! - *A long handler is delivered again* after the broker's time-out, such as `ack_wait` (30 s) of JetStream, because a
//!   layer can't extend a message. The second delivery finds a running attempt and is retried. Set `ack_wait` above the
//!   longest run of the handler.

use std::fmt;
use std::time::Duration;

use idem_runtime::{Disposition, Error, Outcome, observe};
use ruststream::runtime::{BlanketLayer, Context, Handler, HandlerOutcome, Layer, RETRY_COUNT_HEADER};

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;

/// Settles each message according to the idempotent calls of its handler; see the [crate's documentation](crate).
///
/// Serves all handlers of an app (`RustStream::layer`), or of a router, or of one registration (`Router::layer`).
#[derive(Clone, Copy, Default, Debug)]
#[must_use = "a layer does nothing until it is mounted"]
pub struct DeliveryLayer(());

impl DeliveryLayer {
    /// Creates the layer.
    pub const fn new() -> Self {
        Self(())
    }
}

impl<H> Layer<H> for DeliveryLayer {
    type Handler = DeliveryHandler<H>;

    fn layer(&self, inner: H) -> Self::Handler {
        DeliveryHandler { inner }
    }
}

impl BlanketLayer for DeliveryLayer {
    fn apply<M, C, S, H>(&self, handler: H) -> impl Handler<M, C, S> + 'static
    where
        M: Send + Sync + 'static,
        C: Send + 'static,
        S: Send + Sync + 'static,
        H: Handler<M, C, S> + 'static,
    {
        self.layer(handler)
    }
}

/// Handler behind a [`DeliveryLayer`].
#[derive(Clone, Debug)]
pub struct DeliveryHandler<H> {
    inner: H,
}

impl<M, C, S, H> Handler<M, C, S> for DeliveryHandler<H>
where
    M: Send + Sync,
    C: Send,
    S: Send + Sync,
    H: Handler<M, C, S>,
{
    async fn handle(&self, message: &M, context: &mut Context<'_, C, S>) -> HandlerOutcome {
        let retries = context.headers().get_str(RETRY_COUNT_HEADER).and_then(|count| count.parse::<u32>().ok());
        let mut observed = observe(async {
            let outcome = self.inner.handle(message, &mut *context).await;
            if outcome.is_ack() { Ok(outcome) } else { Err(DeliveryFailure(Some(outcome))) }
        });
        if let Some(retries) = retries {
            observed = observed.delivery(retries.saturating_add(1));
        }
        let (result, outcome) = observed.catch_panics().await;
        let settled = settle(result, &outcome);
        if settled.is_drop() && outcome.observed() {
            tracing::error!(
                key = outcome.key().map(tracing::field::display),
                subscription = context.name(),
                "no delivery of this message can finish its operation: it is dropped, unless its broker sets rejected \
                 messages aside"
            );
        }
        settled
    }
}

/// Delivery that was not acknowledged: the outcome of the handler, or `None` if it panicked.
struct DeliveryFailure(Option<HandlerOutcome>);

impl From<Error> for DeliveryFailure {
    fn from(_: Error) -> Self {
        Self(None)
    }
}

impl fmt::Debug for DeliveryFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeliveryFailure").field(&self.0).finish()
    }
}

/// Returns the outcome for the broker: the handler's own outcome if it agrees with the disposition of the delivery.
fn settle(result: Result<HandlerOutcome, DeliveryFailure>, outcome: &Outcome) -> HandlerOutcome {
    let own = match result {
        Ok(own) | Err(DeliveryFailure(Some(own))) if !outcome.observed() => return own,
        Ok(own) => Some(own),
        Err(DeliveryFailure(own)) => own,
    };
    match (outcome.disposition(), own) {
        (Disposition::Ack, Some(own)) => own,
        (Disposition::Ack, None) => HandlerOutcome::ack(),
        // The calls have finished, and the handler decides about the rest.
        (Disposition::Retry { .. }, Some(own)) if own.is_drop() && outcome.recorded() && !outcome.unsent() => own,
        (Disposition::Retry { after }, Some(own)) if own.retry_delay().unwrap_or(Duration::ZERO) > after => own,
        (Disposition::Retry { after }, _) => HandlerOutcome::retry_after(after),
        (Disposition::DeadLetter, _) => HandlerOutcome::drop(),
    }
}
