//! The layer for typed services, combined with other layers of tower.
#![allow(clippy::unused_async, reason = "bodies need not wait")]

use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use idem_runtime::record::State;
use idem_runtime::tower::OperationLayer;
use idem_runtime::{Disposition, Error, Key, MemoryStore, Operation, Policy, Postcard, Reconciliation, Store, observe};
use serde::{Deserialize, Serialize};
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt};

const POLICY: Policy = Policy::new(Duration::from_secs(3600));

#[derive(Clone, Serialize)]
struct Order {
    id: u32,
    cents: u32,
}

const ORDER: Order = Order { id: 42, cents: 100 };

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Receipt {
    run: u32,
    cents: u32,
}

/// Service that panics if it is called without its own `poll_ready`. A clone starts without readiness.
#[derive(Debug, Default)]
struct Strict {
    runs: Arc<AtomicU32>,
    is_ready: bool,
    fails_at: u32,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { runs: Arc::clone(&self.runs), is_ready: false, fails_at: self.fails_at }
    }
}

impl Service<Order> for Strict {
    type Response = Receipt;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Receipt, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, order: Order) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without being ready");
        let run = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
        let fails = run == self.fails_at;
        Box::pin(async move {
            tokio::task::yield_now().await;
            if fails { Err("on purpose".into()) } else { Ok(Receipt { run, cents: order.cents }) }
        })
    }
}

fn layer(store: &MemoryStore) -> OperationLayer<impl Fn(&Order) -> Operation + Clone + Send + Sync + 'static> {
    OperationLayer::new(store, POLICY, |order: &Order| Key::new("tower", order.id))
}

fn key() -> Key {
    Key::new("tower", 42).unwrap()
}

#[tokio::test]
async fn a_request_through_the_layer_runs_once_and_its_duplicates_replay() {
    let store = MemoryStore::new();
    let inner = Strict::default();
    let mut service = layer(&store).layer(inner.clone());
    for replayed in [false, true, true] {
        let (receipt, outcome) = observe(service.ready().await.unwrap().call(ORDER)).await;
        assert_eq!(receipt.unwrap(), Receipt { run: 1, cents: 100 });
        assert_eq!((outcome.replayed(), outcome.disposition()), (replayed, Disposition::Ack));
    }
    assert_eq!(inner.runs.load(Ordering::SeqCst), 1);
    // This call uses a second service with the same store, as another connection or another worker would.
    let receipt = layer(&store).layer(inner.clone()).oneshot(ORDER).await.unwrap();
    assert_eq!((receipt.run, inner.runs.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test]
async fn the_layer_calls_the_instance_of_the_inner_service_that_was_ready() {
    let store = MemoryStore::new();
    let mut service = layer(&store).layer(Strict::default());
    // Two calls run concurrently: one through a service, and one through its clone.
    let mut clone = service.clone();
    let first = service.ready().await.unwrap().call(ORDER);
    let second = clone.ready().await.unwrap().call(Order { id: 43, ..ORDER });
    let third = service.ready().await.unwrap().call(Order { id: 44, ..ORDER });
    let (first, second, third) = tokio::join!(first, second, third);
    let mut runs = [first.unwrap().run, second.unwrap().run, third.unwrap().run];
    runs.sort_unstable();
    assert_eq!(runs, [1, 2, 3]);
}

/// Service that is never ready, or whose `poll_ready` fails.
#[derive(Clone)]
struct NotReady(Option<&'static str>);

impl Service<Order> for NotReady {
    type Response = Receipt;
    type Error = BoxError;
    type Future = Ready<Result<Receipt, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.map_or(Poll::Pending, |error| Poll::Ready(Err(error.into())))
    }

    fn call(&mut self, _: Order) -> Self::Future {
        ready(Err("called".into()))
    }
}

#[tokio::test]
async fn the_layer_is_ready_if_its_inner_service_is() {
    let store = MemoryStore::new();
    let mut cx = Context::from_waker(Waker::noop());
    let mut service = layer(&store).layer(NotReady(None));
    assert!(Service::<Order>::poll_ready(&mut service, &mut cx).is_pending());
    let error = layer(&store).layer(NotReady(Some("gone"))).oneshot(ORDER).await.unwrap_err();
    assert_eq!(error.to_string(), "gone");
    assert!(store.inspect(&key()).await.unwrap().is_none(), "no key was reserved for the request");
}

#[tokio::test]
async fn a_replay_gives_the_permit_of_an_inner_limit_back() {
    let store = MemoryStore::new();
    let inner = Strict::default();
    let mut limited = ServiceBuilder::new().layer(layer(&store)).concurrency_limit(1).service(inner.clone());
    for _ in 0..10 {
        limited.ready().await.unwrap().call(ORDER).await.unwrap();
    }
    let mut buffered = ServiceBuilder::new().layer(layer(&store)).buffer(2).service(inner.clone());
    for _ in 0..10 {
        buffered.ready().await.unwrap().call(ORDER).await.unwrap();
    }
    // A call that is dropped before it runs gives its permit back, too.
    drop(limited.ready().await.unwrap().call(ORDER));
    limited.ready().await.unwrap().call(Order { id: 43, ..ORDER }).await.unwrap();
    assert_eq!(inner.runs.load(Ordering::SeqCst), 2);
}

const WAITING: Policy = POLICY.in_progress(idem_runtime::InProgress::Wait(Duration::from_secs(60)));

/// Service whose body waits until the test allows it to continue.
#[derive(Clone)]
struct Gated(Arc<tokio::sync::Semaphore>, Strict);

impl Service<Order> for Gated {
    type Response = Receipt;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Receipt, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.1.poll_ready(cx)
    }

    fn call(&mut self, order: Order) -> Self::Future {
        let (gate, body) = (Arc::clone(&self.0), self.1.call(order));
        Box::pin(async move {
            gate.acquire().await?.forget();
            body.await
        })
    }
}

#[tokio::test]
async fn a_waiting_duplicate_holds_no_permit_of_an_inner_limit() {
    let store = MemoryStore::new();
    let layer = OperationLayer::new(&store, WAITING, |order: &Order| Key::new("tower", order.id));
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let inner = Gated(Arc::clone(&gate), Strict { fails_at: 1, ..Strict::default() });
    let mut service = ServiceBuilder::new().layer(layer).concurrency_limit(3).service(inner.clone());
    let mut calls = Vec::new();
    // A running call has more duplicates than there are permits.
    for _ in 0..6 {
        let mut call = service.ready().await.unwrap().call(ORDER);
        assert!(futures::poll!(&mut call).is_pending());
        calls.push(call);
    }
    // At most three bodies run at a time. The waiting duplicates hold no permit, so two more bodies may run.
    for id in [43, 44] {
        let mut ready = Box::pin(service.ready());
        let std::task::Poll::Ready(ready) = futures::poll!(&mut ready) else { panic!("a duplicate holds a permit") };
        let mut call = ready.unwrap().call(Order { id, ..ORDER });
        assert!(futures::poll!(&mut call).is_pending());
        calls.push(call);
    }
    {
        let mut ready = Box::pin(service.ready());
        assert!(futures::poll!(&mut ready).is_pending(), "a fourth body would run");
    }
    // The first call fails, so one of the duplicates runs the body with a permit of its own.
    gate.add_permits(16);
    let ended = futures::future::join_all(calls).await;
    assert_eq!(inner.1.runs.load(Ordering::SeqCst), 4);
    let failed = ended.iter().filter(|ended| ended.is_err()).count();
    assert_eq!(failed, 1, "{ended:?}");
}

#[tokio::test]
async fn concurrent_duplicates_through_a_buffer_run_once() {
    let store = MemoryStore::new();
    let inner = Strict::default();
    let layer = OperationLayer::new(&store, WAITING, |order: &Order| Key::new("tower", order.id));
    let service = ServiceBuilder::new().buffer(8).layer(layer).service(inner.clone());
    let calls: Vec<_> = (0..8).map(|_| tokio::spawn(service.clone().oneshot(ORDER))).collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().run, 1);
    }
    assert_eq!(inner.runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_error_of_a_service_frees_the_key_and_names_a_pause() {
    let store = MemoryStore::new();
    let inner = Strict { fails_at: 1, ..Strict::default() };
    let mut service = layer(&store).layer(inner.clone());
    let (error, outcome) = observe(service.ready().await.unwrap().call(ORDER)).await;
    assert_eq!(error.unwrap_err().to_string(), "on purpose");
    assert!(matches!(outcome.disposition(), Disposition::Retry { after } if !after.is_zero()));
    assert_eq!(store.inspect(&key()).await.unwrap().unwrap().record.state, State::Released);
    assert_eq!(service.ready().await.unwrap().call(ORDER).await.unwrap().run, 2);
}

#[tokio::test]
async fn a_call_that_is_dropped_frees_its_key() {
    let store = MemoryStore::new();
    let mut service = layer(&store).layer(Strict::default());
    let mut call = service.ready().await.unwrap().call(ORDER);
    assert!(Pin::new(&mut call).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(call);
    assert_eq!(service.ready().await.unwrap().call(ORDER).await.unwrap().run, 2);
}

#[tokio::test]
async fn a_layer_can_set_a_reconciler_which_settles_uncertain_errors() {
    let store = MemoryStore::new();
    let questions = Arc::new(AtomicU32::new(0));
    let asked = Arc::clone(&questions);
    let layer = OperationLayer::of(move |order: &Order| {
        let asked = Arc::clone(&asked);
        let cents = order.cents;
        Operation::new(&store, Key::new("tower", order.id), POLICY).uncertain_errors().reconcile(async move {
            Ok(match asked.fetch_add(1, Ordering::SeqCst) {
                0 => Reconciliation::Unknown { ask_again: Duration::from_secs(5) },
                _ => Reconciliation::Done(Receipt { run: 0, cents }),
            })
        })
    });
    let inner = Strict { fails_at: 1, ..Strict::default() };
    let mut service = layer.layer(inner.clone());
    let (failed, outcome) = observe(service.ready().await.unwrap().call(ORDER)).await;
    assert_eq!((failed.unwrap_err().to_string(), outcome.uncertain()), ("on purpose".to_owned(), true));
    let (unknown, outcome) = observe(service.ready().await.unwrap().call(ORDER)).await;
    assert!(matches!(unknown.unwrap_err().downcast_ref(), Some(Error::Interrupted { .. })));
    assert_eq!(outcome.disposition(), Disposition::Retry { after: Duration::from_secs(5) });
    for replayed in [false, true] {
        let (receipt, outcome) = observe(service.ready().await.unwrap().call(ORDER)).await;
        assert_eq!((receipt.unwrap().run, outcome.replayed(), outcome.reconciled()), (0, replayed, !replayed));
    }
    assert_eq!((inner.runs.load(Ordering::SeqCst), questions.load(Ordering::SeqCst)), (1, 2));
}

#[tokio::test]
async fn a_layer_can_set_a_fingerprint_and_a_codec() {
    let store = MemoryStore::new();
    let records = store.clone();
    let layer = OperationLayer::of(move |order: &Order| {
        Operation::new(&store, Key::new("tower", order.id), POLICY).fingerprint(order).codec::<Postcard>()
    });
    let mut service = layer.layer(Strict::default());
    service.ready().await.unwrap().call(ORDER).await.unwrap();
    let error = service.ready().await.unwrap().call(Order { cents: 200, ..ORDER }).await.unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(Error::FingerprintMismatch { .. })), "{error}");
    let State::Completed(result) = records.inspect(&key()).await.unwrap().unwrap().record.state else { panic!() };
    assert!(format!("{result:?}").contains("postcard"), "{result:?}");

    let missing = OperationLayer::new(&records, POLICY, |_: &Order| Key::new("tower", None::<u32>));
    let (error, outcome) = observe(missing.layer(Strict::default()).oneshot(ORDER)).await;
    assert!(matches!(error.unwrap_err().downcast_ref(), Some(Error::MissingKey { .. })));
    assert_eq!(outcome.disposition(), Disposition::DeadLetter);
}
