//! Idempotent tasks for apalis 1: a handler runs once for each key, and every further delivery of the task gets the
//! recorded result.
//!
//! - [`OperationLayer`] makes the whole handler one operation.
//! - [`DeliveryLayer`] is for a handler that calls functions with `#[idempotent]` itself.
//!
//! Both layers end a task as apalis expects, according to the [`Disposition`] of its delivery:
//!
//! | disposition | result for apalis | state of the task |
//! |---|---|---|
//! | `Ack` | the value | `Done` |
//! | `Retry { after }` | [`RetryAfterError`] with `after`, also if the handler returned a value | `Pending` |
//! | `DeadLetter` | [`AbortError`], also if the handler returned a value | `Killed` |
//!
//! [`AbortError`], [`RetryAfterError`] and [`DeferredError`] that the handler returns stay as they are, except in the
//! last delivery, which ends with an [`AbortError`] that contains the handler's error. A panic of the handler ends its
//! task with a [`RetryAfterError`], and the worker goes on. The number of the delivery is the `Attempt` of the task,
//! and the number of the last delivery is its `max_attempts`: apalis-redis 1.0 stores `max_attempts`, but does not read
//! it.
//!
//! ```
//! use std::time::Duration;
//!
//! use apalis_core::backend::TaskSink;
//! use apalis_core::backend::memory::MemoryStorage;
//! use apalis_core::error::BoxDynError;
//! use apalis_core::task::Task;
//! use apalis_core::worker::builder::WorkerBuilder;
//! use apalis_core::worker::context::WorkerContext;
//! use idem_apalis::OperationLayer;
//! use idem_runtime::{MemoryStore, Policy, current};
//!
//! const SHIPPING: Policy = Policy::new(Duration::from_secs(30 * 86_400)).max_attempts(5);
//!
//! async fn ship(order: u64, worker: WorkerContext) -> Result<String, BoxDynError> {
//!     // The carrier recognises a repeated request by this key, which is the same in every attempt.
//!     let parcel = current()?.child_key("parcel");
//! #   worker.stop()?;
//!     Ok(format!("parcel {parcel} for order {order}"))
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
//! let store = MemoryStore::new();
//! let operations = OperationLayer::new(&store, "shop::ship", SHIPPING).key(|task: &Task<u64>| task.args);
//! let mut queue = MemoryStorage::new();
//! queue.push(42).await.unwrap();
//! let worker = WorkerBuilder::new("shipping-1").backend(queue).build(operations.handler(ship));
//! worker.run().await.unwrap();
//! # });
//! ```
//!
//! # Place
//! The layers belong around the handler: `build(operations.handler(ship))`. apalis counts an attempt and sets the state
//! of a task inside of the layers of a worker. If a layer of the worker returned a recorded value without a call of the
//! handler, the task would stay pending, and apalis would deliver it again immediately, forever. So these types are no
//! layers for the worker, and the compiler refuses them there:
//!
//! ```compile_fail
//! # use apalis_core::backend::memory::MemoryStorage;
//! # use apalis_core::worker::builder::WorkerBuilder;
//! # use idem_apalis::DeliveryLayer;
//! # async fn ship(_: u64) {}
//! # async {
//! let worker = WorkerBuilder::new("w").backend(MemoryStorage::<u64>::new()).layer(DeliveryLayer::new()).build(ship);
//! worker.run().await.unwrap();
//! # };
//! ```
//!
//! Other layers belong on the worker (`WorkerBuilder::layer`), or inside: [`OperationLayer::service`] takes any
//! service.
//!
//! # Behaviour of apalis 1.0
//! - *No backend reads the time in [`RetryAfterError`].* apalis-redis waits for as many seconds as the task has
//!   attempts, and moves the task to its dead tasks after 25 attempts. So a duplicate of a long attempt uses up
//!   attempts of its task: set `max_attempts` of the task, and not only of the [`Policy`], above the number of tries
//!   that such a duplicate needs.
//! - *The attempts of a task count results, not crashes.* A task that kills its worker never reaches a limit of apalis.
//!   [`Policy::max_attempts`] counts crashes, too.
//! - *An idle worker can sleep through its own heartbeat.* If the heartbeat is due while apalis-core fetches tasks,
//!   nothing wakes the worker again until one of its tasks ends: it sends no heartbeats and fetches nothing. Poll the
//!   future of the worker regularly, such as in a `select!` with an interval, as `examples/apalis` does.
//! - *A worker that loses a task goes on with it.* A worker without heartbeats, such as a stopped virtual machine,
//!   loses its tasks to other workers. The other worker finds a running attempt, or takes over after the lease.
//! - *The next result of such a worker ends the worker.* apalis-redis refuses the result of a lost task, and the worker
//!   ends with an error, together with every task that it runs. Results of other tasks in the same batch are lost;
//!   those tasks are delivered again, and get their recorded values. Start the worker again, as `apalis::Monitor` does.
//! - *The idempotency key of a task prevents a second push, not a second run.* This key is the default key of an
//!   operation.
//! - *Arguments that do not decode end the worker.* Take the arguments as text or as bytes, and decode them in the
//!   handler.
//! - *A stopped worker may hang.* End it after a time limit, then call [`StoreExt::flush`].
//!
//! [`AbortError`]: apalis_core::error::AbortError
//! [`DeferredError`]: apalis_core::error::DeferredError
//! [`Disposition`]: idem_runtime::Disposition
//! [`Policy`]: idem_runtime::Policy
//! [`Policy::max_attempts`]: idem_runtime::Policy::max_attempts
//! [`RetryAfterError`]: apalis_core::error::RetryAfterError
//! [`StoreExt::flush`]: idem_runtime::StoreExt::flush

mod delivery;
mod operation;

pub use self::delivery::{DeliveryFuture, DeliveryLayer, DeliveryService, SilentRefusal};
pub use self::operation::{OperationLayer, OperationService, TaskScope};

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;
