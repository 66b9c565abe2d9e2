//! The layers around handlers of tasks: keys, dispositions as results for apalis, attempts as deliveries.
#![allow(clippy::unused_async, reason = "handlers need not wait")]

use std::error::Error as StdError;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use apalis_core::backend::TaskSink;
use apalis_core::backend::memory::MemoryStorage;
use apalis_core::error::{AbortError, BoxDynError, RetryAfterError};
use apalis_core::task::Task;
use apalis_core::task::attempt::Attempt;
use apalis_core::task::builder::TaskBuilder;
use apalis_core::task::task_id::TaskId;
use apalis_core::worker::builder::WorkerBuilder;
use apalis_core::worker::context::WorkerContext;
use apalis_core::worker::event::Event;
use apalis_core::worker::ext::event_listener::EventListenerExt as _;
use idem_apalis::{DeliveryLayer, OperationLayer, SilentRefusal};
use idem_runtime::{Error, Key, MemoryStore, Operation, Policy, Postcard, Reconciliation, Store, idempotent};
use tower::{Service, ServiceExt as _};

const POLICY: Policy = Policy::new(Duration::from_secs(3600));

fn task(id: u64, order: u32) -> TaskBuilder<u32> {
    TaskBuilder::new(order).task_id(TaskId::from_int(id))
}

async fn deliver<S, T>(service: &S, task: TaskBuilder<u32>) -> Result<T, BoxDynError>
where
    S: Service<Task<u32>, Response = T, Error = BoxDynError> + Clone,
{
    service.clone().oneshot(task.build()).await
}

/// Returns the pause of a result that asks for another delivery.
fn retries<T: std::fmt::Debug>(result: &Result<T, BoxDynError>) -> Duration {
    let error = result.as_ref().expect_err("a task that is delivered again");
    error.downcast_ref::<RetryAfterError>().unwrap_or_else(|| panic!("no `RetryAfterError`: {error:?}")).get_duration()
}

/// Returns the cause of a result that ends the task for good.
fn aborts<T: std::fmt::Debug>(result: &Result<T, BoxDynError>) -> &(dyn StdError + 'static) {
    let error = result.as_ref().expect_err("a task that is set aside");
    assert!(error.is::<AbortError>(), "no `AbortError`: {error:?}");
    error.source().expect("a cause")
}

#[tokio::test]
async fn a_task_that_is_delivered_again_gets_its_recorded_value() {
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let handler = move |order: u32| {
        let run = counted.fetch_add(1, Ordering::SeqCst) + 1;
        async move { Ok::<_, BoxDynError>(format!("parcel {run} for {order}")) }
    };
    let store = MemoryStore::new();
    let service = OperationLayer::new(&store, "ship", POLICY).key(|task: &Task<u32>| task.args).handler(handler);
    for id in [1, 1, 2] {
        let parcel: String = deliver(&service, task(id, 42)).await.unwrap();
        assert_eq!(parcel, "parcel 1 for 42");
    }
    assert_eq!(deliver(&service, task(3, 43)).await.unwrap(), "parcel 2 for 43");
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn the_default_key_is_the_idempotency_key_of_a_task_and_without_one_its_id() {
    let store = MemoryStore::new();
    let runs = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&runs);
    let handler = move |_: u32| {
        let seen = Arc::clone(&seen);
        async move {
            seen.lock().unwrap().push(idem_runtime::current()?.key().text().to_owned());
            Ok::<_, BoxDynError>(())
        }
    };
    let service = OperationLayer::new(&store, "ship", POLICY).handler(handler);
    for builder in
        [task(1, 0), task(2, 0), task(1, 0), task(3, 0).idempotency_key("a"), task(4, 0).idempotency_key("a")]
    {
        deliver(&service, builder).await.unwrap();
    }
    assert_eq!(*runs.lock().unwrap(), ["1", "2", "a"]);
    // A task without an id has no key: no delivery can succeed.
    let cause = deliver(&service, TaskBuilder::new(0)).await;
    assert!(matches!(aborts(&cause).downcast_ref(), Some(Error::MissingKey { .. })), "{cause:?}");
}

#[tokio::test]
async fn a_task_with_another_payload_for_its_key_is_set_aside() {
    let store = MemoryStore::new();
    let service = OperationLayer::of(move |task: &Task<u32>| {
        Operation::new(&store, Key::new("pay", "order 1"), POLICY).fingerprint(&task.args).codec::<Postcard>()
    })
    .handler(async |cents: u32| Ok::<_, BoxDynError>(cents));
    assert_eq!(deliver(&service, task(1, 500)).await.unwrap(), 500);
    let other = deliver(&service, task(2, 900)).await;
    assert!(matches!(aborts(&other).downcast_ref(), Some(Error::FingerprintMismatch { .. })), "{other:?}");
}

#[tokio::test]
async fn a_task_whose_effect_is_in_doubt_asks_its_reconciler() {
    let store = MemoryStore::new();
    let service = OperationLayer::of(move |task: &Task<u32>| {
        let order = task.args;
        Operation::new(&store, Key::new("pay", order), POLICY)
            .uncertain_errors()
            .reconcile(async move { Ok::<_, BoxDynError>(Reconciliation::Done(format!("receipt {order}"))) })
    })
    .handler(async |_: u32| Err::<String, BoxDynError>("the bank did not answer".into()));
    let cause = deliver(&service, task(1, 42)).await;
    assert!(cause.unwrap_err().is::<RetryAfterError>());
    for _ in 0..2 {
        assert_eq!(deliver(&service, task(1, 42)).await.unwrap(), "receipt 42");
    }
}

#[tokio::test]
async fn a_handler_that_swallows_a_refusal_and_returns_a_value_is_delivered_again() {
    #[idempotent(key = "order:{order}", policy = POLICY, store = store)]
    async fn ship(store: &MemoryStore, order: u32) -> Result<u32, Error> {
        Ok(order)
    }
    let store = MemoryStore::new();
    let blocked = Operation::new(&store, Key::new("layers::ship", "order:42"), POLICY);
    let running = tokio::spawn(blocked.run(std::future::pending::<Result<u32, Error>>()));
    let key = Key::new("layers::ship", "order:42").unwrap();
    while store.inspect(&key).await.unwrap().is_none() {
        tokio::task::yield_now().await;
    }
    let service = DeliveryLayer::new().handler(move |order: u32| {
        let store = store.clone();
        async move {
            let _ = ship(&store, order).await;
            Ok::<_, BoxDynError>("done")
        }
    });
    let result = deliver(&service, task(1, 42)).await;
    assert!(retries(&result) > Duration::ZERO);
    let cause = result.as_ref().unwrap_err().source().unwrap();
    assert_eq!(cause.downcast_ref::<SilentRefusal>().and_then(|hidden| hidden.key.clone()), Some(key));
    running.abort();
}

#[tokio::test]
async fn a_handler_without_an_idempotent_call_is_delivered_again() {
    let service = DeliveryLayer::new().handler(async |_: u32| Ok::<_, BoxDynError>("done"));
    let result = deliver(&service, task(1, 42)).await;
    retries(&result);
    assert!(result.unwrap_err().source().unwrap().to_string().contains("OperationLayer"));
}

#[tokio::test]
async fn a_panic_ends_its_task_and_not_its_worker() {
    let store = MemoryStore::new();
    let handler = async |order: u32| -> Result<u32, BoxDynError> { panic!("order {order} has no address") };
    let service = OperationLayer::new(&store, "ship", POLICY).handler(handler);
    let result = deliver(&service, task(1, 42)).await;
    retries(&result);
    let cause = result.as_ref().unwrap_err().source().unwrap();
    assert!(matches!(cause.downcast_ref(), Some(Error::Panicked { attempt: Some(1), .. })), "{cause:?}");
}

#[tokio::test]
async fn a_panic_in_the_key_of_a_task_ends_its_task_and_not_its_worker() {
    let store = MemoryStore::new();
    let layer = OperationLayer::new(&store, "ship", POLICY).key(|task: &Task<u32>| 1 / task.args);
    let result: Result<u32, _> = deliver(&layer.handler(async |_: u32| Ok::<_, BoxDynError>(1)), task(1, 0)).await;
    retries(&result);
}

#[tokio::test]
async fn the_errors_of_apalis_that_a_handler_returns_stay_as_they_are() {
    let store = MemoryStore::new();
    let handler = async |order: u32| -> Result<(), BoxDynError> {
        Err(match order {
            0 => AbortError::new("the order is void").into(),
            _ => RetryAfterError::new("the carrier is away", Duration::from_secs(7)).into(),
        })
    };
    let service = OperationLayer::new(&store, "ship", POLICY).handler(handler);
    let void = deliver(&service, task(1, 0)).await;
    assert_eq!(aborts(&void).to_string(), "the order is void");
    assert_eq!(retries(&deliver(&service, task(2, 1)).await), Duration::from_secs(7));
    // No delivery follows the last one, so the task is set aside.
    let last = deliver(&service, task(3, 1).attempt(3).max_attempts(3)).await;
    assert!(aborts(&last).is::<RetryAfterError>(), "{last:?}");
}

#[tokio::test]
async fn used_up_attempts_set_a_task_aside() {
    let store = MemoryStore::new();
    let handler = async |_: u32| Err::<(), BoxDynError>("the carrier is away".into());
    let service = OperationLayer::new(&store, "ship", POLICY.max_attempts(2)).handler(handler);
    for delivery in [1, 2] {
        retries(&deliver(&service, task(1, 42).attempt(delivery)).await);
    }
    let third = deliver(&service, task(1, 42).attempt(3)).await;
    assert!(matches!(aborts(&third).downcast_ref(), Some(Error::AttemptsExhausted { .. })), "{third:?}");
}

#[tokio::test]
async fn the_attempt_that_a_worker_counts_is_the_number_of_the_delivery() {
    let store = MemoryStore::new();
    let handler = async |_: u32, attempt: Attempt, worker: WorkerContext| -> Result<(), BoxDynError> {
        worker.stop()?;
        Err(format!("attempt {}", attempt.current()).into())
    };
    let mut queue = MemoryStorage::new();
    // One attempt was made before, so the worker makes the second of two.
    queue.push_task(task(1, 42).attempt(1).max_attempts(2).build()).await.unwrap();
    let ends = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&ends);
    let worker = WorkerBuilder::new("worker")
        .backend(queue)
        .on_event(move |_, event| {
            if let Event::Error(error) = event {
                seen.lock().unwrap().push(error.to_string());
            }
        })
        .build(OperationLayer::new(&store, "ship", POLICY).handler(handler));
    worker.run().await.unwrap();
    assert_eq!(*ends.lock().unwrap(), ["AbortError: attempt 2"]);
}
