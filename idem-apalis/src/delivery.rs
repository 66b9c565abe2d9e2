//! Deliveries: a task's handler under `observe`, and the result of the delivery as apalis expects it.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

use apalis_core::error::{AbortError, BoxDynError, DeferredError, RetryAfterError};
use apalis_core::task::Task;
use apalis_core::task::task_fn::{TaskFn, task_fn};
use idem_runtime::{Disposition, Error, Key, Outcome, observe};
use tower_service::Service;

/// Ends each task according to the disposition of its delivery, for handlers that call functions with `#[idempotent]`
/// themselves.
///
/// A task whose handler calls no such function is delivered again: wrap this handler in an
/// [`OperationLayer`](crate::OperationLayer).
///
/// ```
/// use apalis_core::backend::memory::MemoryStorage;
/// use apalis_core::worker::builder::WorkerBuilder;
/// use idem_apalis::DeliveryLayer;
/// use idem_runtime::{Error, MemoryStore, idempotent};
///
/// #[idempotent(key = "order:{order}", ttl = "30d", store = store)]
/// async fn ship(store: &MemoryStore, order: u64) -> Result<String, Error> {
///     Ok(format!("parcel for order {order}"))
/// }
///
/// let store = MemoryStore::new();
/// let handler = move |order: u64| {
///     let store = store.clone();
///     async move { ship(&store, order).await }
/// };
/// let worker =
///     WorkerBuilder::new("shipping-1").backend(MemoryStorage::new()).build(DeliveryLayer::new().handler(handler));
/// # drop(worker);
/// ```
#[derive(Clone, Copy, Default, Debug)]
#[must_use = "a layer does nothing without a handler"]
pub struct DeliveryLayer(());

impl DeliveryLayer {
    /// Creates the layer.
    pub const fn new() -> Self {
        Self(())
    }

    /// Wraps a task's function, with any arguments that apalis can extract.
    pub fn handler<F, Args, Extracted>(&self, function: F) -> DeliveryService<TaskFn<F, Args, Extracted>>
    where
        TaskFn<F, Args, Extracted>: Service<Task<Args>>,
    {
        self.service(task_fn(function))
    }

    /// Wraps a service of tasks, for example the function of a task with further layers around it.
    pub fn service<S>(&self, inner: S) -> DeliveryService<S> {
        DeliveryService { inner }
    }
}

/// Service behind a [`DeliveryLayer`].
#[derive(Clone, Debug)]
pub struct DeliveryService<S> {
    inner: S,
}

impl<S, Args> Service<Task<Args>> for DeliveryService<S>
where
    S: Service<Task<Args>> + Clone + Send + 'static,
    S::Response: Send + 'static,
    S::Error: From<Error> + Into<BoxDynError> + Send + 'static,
    S::Future: Send + 'static,
    Args: Send + 'static,
{
    type Response = S::Response;
    type Error = BoxDynError;
    type Future = DeliveryFuture<S::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, task: Task<Args>) -> Self::Future {
        // The instance that `poll_ready` has polled is ready; a clone may not be ready.
        let clone = self.inner.clone();
        let mut ready = mem::replace(&mut self.inner, clone);
        let attempt = task.raw_attempt().clone();
        let limit = task.max_attempts().and_then(|limit| u32::try_from(limit).ok()).filter(|limit| *limit > 0);
        DeliveryFuture(Box::pin(async move {
            // apalis counts the attempt before the first poll of this future, and after the call of this service.
            let delivery = u32::try_from(attempt.current()).unwrap_or(u32::MAX).max(1);
            let mut observed = observe(async move { ready.call(task).await }).delivery(delivery);
            if let Some(limit) = limit {
                observed = observed.delivery_limit(limit);
            }
            let (result, outcome) = observed.catch_panics().await;
            acknowledge(result.map_err(Into::into), &outcome)
        }))
    }
}

/// Future of a task's delivery.
#[must_use = "futures do nothing unless polled"]
pub struct DeliveryFuture<T>(Pin<Box<dyn Future<Output = Result<T, BoxDynError>> + Send>>);

impl<T> fmt::Debug for DeliveryFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeliveryFuture")
    }
}

impl<T> Future for DeliveryFuture<T> {
    type Output = Result<T, BoxDynError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

/// Turns the result of a delivery into the result that apalis expects for the delivery's disposition.
fn acknowledge<T>(result: Result<T, BoxDynError>, outcome: &Outcome) -> Result<T, BoxDynError> {
    let disposition = outcome.disposition();
    let error = match result {
        Ok(value) if disposition == Disposition::Ack => return Ok(value),
        Ok(_) => SilentRefusal { key: outcome.key().cloned() }.into(),
        Err(error) => error,
    };
    let says = |own: fn(&BoxDynError) -> bool| own(&error);
    match disposition {
        _ if says(|error| error.is::<AbortError>()) => Err(error),
        Disposition::Retry { .. } if says(|error| error.is::<RetryAfterError>() || error.is::<DeferredError>()) => {
            Err(error)
        }
        Disposition::Retry { after } => Err(RetryAfterError::new(error, after).into()),
        // An operation that has finished with an error gets no other result.
        Disposition::DeadLetter | Disposition::Ack => Err(AbortError::new(error).into()),
    }
}

/// Error of a task whose handler returned a value although a call in it was refused or failed: the handler swallowed
/// the error of that call, so the value is not recorded as the result of the task.
#[derive(Debug)]
#[non_exhaustive]
pub struct SilentRefusal {
    /// Key of the last call of the handler; `None` if the handler made no call.
    pub key: Option<Key>,
}

impl fmt::Display for SilentRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.key {
            Some(key) => write!(
                f,
                "the handler returned a value although a call of it has no result (the last call was for {key}): return the \
                 error of that call"
            ),
            None => f.write_str(
                "the handler returned a value and called no idempotent function: wrap it in an `OperationLayer`, or await \
                 the call in the handler",
            ),
        }
    }
}

impl StdError for SilentRefusal {}
