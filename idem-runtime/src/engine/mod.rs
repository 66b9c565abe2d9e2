//! The protocol: reserve, run with heartbeats, record, replay. The only folder with this control flow.
//!
//! A call has three phases. [`begin`] reserves the key or finds out why the body is not to run. The body then runs inside
//! the caller's own future, as a [`held`] attempt. [`end`] records what it returned. [`call`] strings the three together.

mod attempt;
mod begin;
mod call;
mod end;
mod held;
mod outcome;
mod recorder;

use std::future::Future;
use std::sync::Arc;

use serde::Serialize;

#[cfg(feature = "testing")]
pub(crate) use self::attempt::Entered;
pub use self::attempt::{Attempt, current};
pub use self::end::Ending;
#[cfg(feature = "testing")]
pub(crate) use self::outcome::Observation;
pub use self::outcome::{CatchPanics, Observe, Outcome, Refusal, observe};
pub use self::recorder::{
    ErrorRule, RecordResults, RecordValues, Recorder, record_results, record_results_if, record_values,
};
use crate::error::Error;
use crate::key::{Fingerprint, FingerprintError, Key, KeyError};
use crate::policy::{Mode, Policy};
use crate::store::Store;

/// One call of an idempotent function: where, under which key, and how it is protected.
#[derive(Debug)]
pub struct Operation {
    store: Arc<dyn Store>,
    /// In a box, as every call would move its room about.
    key: Result<Key, Box<KeyError>>,
    policy: Policy,
    fingerprint: Option<Result<Fingerprint, FingerprintError>>,
}

impl Operation {
    /// An operation named by `key` in `store`. A key that could not be built is reported when the operation is run.
    pub fn new<S: Store + ?Sized>(store: &S, key: Result<Key, KeyError>, policy: Policy) -> Self {
        Self { store: store.handle(), key: key.map_err(Box::new), policy, fingerprint: None }
    }

    /// The operation with the fingerprint of its payload.
    #[must_use]
    pub fn fingerprint<F: Serialize + ?Sized>(mut self, payload: &F) -> Self {
        if self.policy.current_mode() != Mode::Off {
            self.fingerprint = Some(Fingerprint::of(payload));
        }
        self
    }
}

/// Runs `body` once for the key of `operation`, and replays its recorded result to every duplicate.
///
/// This is what `#[idempotent]` calls. `recorder` says how results are kept: [`record_values`](crate::record_values),
/// [`record_results`](crate::record_results) or [`record_results_if`](crate::record_results_if).
///
/// # Errors
/// What `body` returned, or the [`Error`] that says why it has no result.
///
/// # Panics
/// If `body` does; the key is then freed at once, or counts as interrupted under [`OnCrash::Fail`](crate::OnCrash::Fail). If a migration of
/// [`OnUndecodable`](crate::OnUndecodable) does; nothing changes then.
///
/// # Cancel safety
/// Dropping the future cancels the body and frees the key, or counts as an interruption under [`OnCrash::Fail`](crate::OnCrash::Fail). Once
/// the body has returned, its result is recorded even if the future is dropped.
///
/// ```
/// # use std::time::Duration;
/// use idem_runtime::{Error, Json, Key, MemoryStore, Operation, Policy, record_values, run};
///
/// const POLICY: Policy = Policy::new(Duration::from_secs(7 * 86_400));
///
/// async fn ship(store: &MemoryStore, order: u32) -> Result<String, Error> {
///     let operation = Operation::new(store, Key::new("shop::ship", order), POLICY);
///     run(operation, record_values::<Json>(), async move { Ok(format!("parcel {order}")) }).await
/// }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # let store = MemoryStore::new();
/// # assert_eq!(ship(&store, 42).await.unwrap(), ship(&store, 42).await.unwrap());
/// # });
/// ```
pub fn run<T, E, R, B>(operation: Operation, recorder: R, body: B) -> impl Future<Output = Result<T, E>>
where
    R: Recorder<T, E>,
    E: From<Error>,
    B: Future<Output = Result<T, E>>,
{
    call::run(operation, recorder, body)
}
