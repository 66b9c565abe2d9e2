//! Operations: a whole handler as one idempotent operation, with its store, key and policy.

use std::fmt;
use std::sync::Arc;

use apalis_core::task::Task;
use apalis_core::task::task_fn::{TaskFn, task_fn};
use idem_runtime::tower::{self, OperationSource};
use idem_runtime::{Key, KeyPart, Operation, Policy, Store};
use tower_layer::Layer as _;
use tower_service::Service;

use crate::delivery::{DeliveryLayer, DeliveryService};

/// Makes the handler of a task one operation: the handler runs once for each key, its value is recorded by the codec,
/// and every further delivery gets the recorded value. An error frees the key.
///
/// The handler returns a `Result` whose value implements `Serialize` and `DeserializeOwned`. `current()` in the handler
/// returns the attempt.
///
/// - *Key*: the idempotency key of the task; without one, its id. A task that is pushed again has another id, so name
///   the operation by its arguments: [`key`](Self::key).
/// - *Readiness* is the readiness of the inner service; see
///   [`OperationLayer`](idem_runtime::tower::OperationLayer) of `idem-runtime`.
///
/// # Cancel safety
/// If the worker is dropped, the handlers are cancelled, and their keys are freed; under `on_crash = fail`, their
/// operations become interrupted.
///
/// ```
/// use std::time::Duration;
///
/// use apalis_core::backend::memory::MemoryStorage;
/// use apalis_core::error::BoxDynError;
/// use apalis_core::worker::builder::WorkerBuilder;
/// use idem_apalis::OperationLayer;
/// use idem_runtime::{MemoryStore, Policy};
///
/// async fn ship(order: u64) -> Result<String, BoxDynError> {
///     Ok(format!("parcel for order {order}"))
/// }
///
/// let store = MemoryStore::new();
/// let policy = Policy::new(Duration::from_secs(30 * 86_400)).max_attempts(5);
/// let operations = OperationLayer::new(&store, "shop::ship", policy);
/// let worker = WorkerBuilder::new("shipping-1").backend(MemoryStorage::new()).build(operations.handler(ship));
/// # drop(worker);
/// ```
#[derive(Clone)]
#[must_use = "a layer does nothing without a handler"]
pub struct OperationLayer<O = TaskScope> {
    operation: O,
}

impl OperationLayer {
    /// Creates a layer that records under `scope` in `store`. `scope` is the name of the handler in keys; keep it when
    /// the handler is renamed.
    pub fn new<S: Store + ?Sized>(store: &S, scope: impl Into<Arc<str>>, policy: Policy) -> Self {
        Self { operation: TaskScope { store: store.handle(), scope: scope.into(), policy } }
    }
}

impl<O> OperationLayer<O> {
    /// Creates a layer that runs the operation that `operation` returns for a task. So each task can have a store, a
    /// policy, a fingerprint, a codec, recorded errors or a reconciler of its own.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use apalis_core::task::Task;
    /// # use idem_apalis::OperationLayer;
    /// # use idem_runtime::{Key, MemoryStore, Operation, Policy};
    /// # const PAYMENTS: Policy = Policy::new(Duration::from_secs(30 * 86_400));
    /// # #[derive(serde::Serialize)]
    /// # struct Payment { order: u64, cents: u64 }
    /// # let store = MemoryStore::new();
    /// let operations = OperationLayer::of(move |task: &Task<Payment>| {
    ///     let payment = &task.args;
    ///     Operation::new(&store, Key::new("shop::pay", payment.order), PAYMENTS).fingerprint(payment)
    /// });
    /// # drop(operations);
    /// ```
    pub fn of<Args>(operation: O) -> Self
    where
        O: OperationSource<Task<Args>>,
    {
        Self { operation }
    }
}

impl OperationLayer<TaskScope> {
    /// Sets the part of a task that names its operation, usually one of its arguments (default: the idempotency key of
    /// the task; without one, its id).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use apalis_core::task::Task;
    /// # use idem_apalis::OperationLayer;
    /// # use idem_runtime::{MemoryStore, Policy};
    /// # struct Order { id: u64 }
    /// # let (store, policy) = (MemoryStore::new(), Policy::new(Duration::from_secs(86_400)));
    /// let operations = OperationLayer::new(&store, "shop::ship", policy).key(|task: &Task<Order>| task.args.id);
    /// # drop(operations);
    /// ```
    pub fn key<Args, P, K>(
        self,
        key: K,
    ) -> OperationLayer<impl Fn(&Task<Args>) -> Operation + Clone + Send + Sync + 'static + use<Args, P, K>>
    where
        P: KeyPart,
        K: Fn(&Task<Args>) -> P + Clone + Send + Sync + 'static,
    {
        let TaskScope { store, scope, policy } = self.operation;
        let operation = move |task: &Task<Args>| Operation::new(&*store, Key::new(&scope, key(task)), policy);
        OperationLayer { operation }
    }
}

impl<O> OperationLayer<O> {
    /// Wraps a task's function, with any arguments that apalis can extract.
    pub fn handler<F, Args, Extracted>(&self, function: F) -> OperationService<TaskFn<F, Args, Extracted>, O>
    where
        TaskFn<F, Args, Extracted>: Service<Task<Args>>,
        O: OperationSource<Task<Args>>,
    {
        self.service(task_fn(function))
    }

    /// Wraps a service of tasks, for example the function of a task with further layers around it.
    pub fn service<S, Args>(&self, inner: S) -> OperationService<S, O>
    where
        S: Service<Task<Args>>,
        O: OperationSource<Task<Args>>,
    {
        DeliveryLayer::new().service(tower::OperationLayer::of(self.operation.clone()).layer(inner))
    }
}

impl<O> fmt::Debug for OperationLayer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperationLayer")
    }
}

/// Store, scope and policy of a handler whose tasks have the default key.
#[derive(Clone, Debug)]
pub struct TaskScope {
    store: Arc<dyn Store>,
    scope: Arc<str>,
    policy: Policy,
}

impl<Args> OperationSource<Task<Args>> for TaskScope {
    type Operation = Operation;

    fn operation(&self, task: &Task<Args>) -> Operation {
        let id = || task.task_id().map(ToString::to_string);
        let part = task.idempotency_key().map(str::to_owned).or_else(id);
        Operation::new(&*self.store, Key::new(&self.scope, part), self.policy)
    }
}

/// Service behind an [`OperationLayer`].
pub type OperationService<S, O = TaskScope> = DeliveryService<tower::OperationService<S, O>>;
