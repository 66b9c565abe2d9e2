//! A store that fails when a test asks for it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::key::Key;
use crate::record::StoredResult;
use crate::store::{
    Answers, Decision, DecisionAnswer, Filter, Finish, Inspection, Journal, Lease, Page, Release, Reservation,
    ReserveRequest, Store, StoreError, StoreErrorKind, StoreFuture, Verdict, forward, renew_all,
};
use crate::sync::lock;

/// Fault of a call of a [`FaultyStore`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// The call is passed on to the inner store without a fault.
    None,
    /// The call fails and writes nothing.
    Before(StoreErrorKind),
    /// The call fails and writes nothing if it would write a result. Any other call is passed on to the inner store.
    BeforeResult(StoreErrorKind),
    /// The call takes effect, but its answer is lost.
    After,
    /// The call takes effect after this number of polls. The answer to the call arrives after the same number of
    /// further polls.
    Slow(u32),
    /// The call writes nothing and never returns.
    Hang,
}

/// Calls of a [`Store`] that may fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StoreCall {
    /// [`Store::reserve`].
    Reserve,
    /// [`Store::begin`].
    Begin,
    /// [`Store::renew`].
    Renew,
    /// [`Store::append`].
    Append,
    /// [`Store::finish`].
    Finish,
    /// [`Store::release`].
    Release,
    /// [`Store::wait`].
    Wait,
    /// [`Store::inspect`].
    Inspect,
    /// [`Store::decide`].
    Decide,
    /// [`Store::purge`].
    Purge,
    /// [`Store::list`].
    List,
    /// [`Store::ping`].
    Ping,
}

/// A store that passes its calls on to another store, and fails when a test asks for it. Clones share the faults.
///
/// # Examples
/// ```
/// use idem_runtime::testing::{Fault, FaultyStore, StoreCall};
/// use idem_runtime::{Disposition, Error, MemoryStore, StoreErrorKind, idempotent, observe};
///
/// #[idempotent(key = "order:{order}", ttl = "7d", store = store)]
/// async fn ship(store: &FaultyStore, order: u32) -> Result<u32, Error> {
///     Ok(order)
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let store = FaultyStore::new(&MemoryStore::new());
/// store.next(StoreCall::Reserve, Fault::Before(StoreErrorKind::Misconfigured));
/// let (result, outcome) = observe(ship(&store, 42)).await;
/// assert!(matches!(result, Err(Error::Store { .. })));
/// assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
/// # });
/// ```
#[derive(Clone, Debug)]
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    response_timeout: Duration,
    plan: Arc<Mutex<FaultPlan>>,
}

#[derive(Debug, Default)]
struct FaultPlan {
    faults: VecDeque<(StoreCall, Fault)>,
    always: Vec<(StoreCall, Fault)>,
    calls: Vec<StoreCall>,
    reserves: Vec<ReserveRequest>,
}

impl FaultyStore {
    /// Creates a store that passes every call on to `inner` until a test sets a fault.
    pub fn new(inner: &(impl Store + ?Sized)) -> Self {
        Self { inner: inner.handle(), response_timeout: inner.response_timeout(), plan: Arc::default() }
    }

    /// Sets the response time-out that the store reports (default: the time-out of the inner store).
    #[must_use]
    pub fn answers_within(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// Applies `fault` to the next call of the kind `call`.
    pub fn next(&self, call: StoreCall, fault: Fault) {
        lock(&self.plan).faults.push_back((call, fault));
    }

    /// Applies `fault` to every call of the kind `call` from now on.
    pub fn always(&self, call: StoreCall, fault: Fault) {
        let mut plan = lock(&self.plan);
        plan.always.retain(|(other, _)| *other != call);
        plan.always.push((call, fault));
    }

    /// Returns the number of calls of the kind `call`.
    pub fn count(&self, call: StoreCall) -> usize {
        lock(&self.plan).calls.iter().filter(|it| **it == call).count()
    }

    /// Returns the requests of all `reserve` calls, so that a test can send a request again as a late one.
    pub fn reserves(&self) -> Vec<ReserveRequest> {
        lock(&self.plan).reserves.clone()
    }

    fn meet(&self, call: StoreCall) -> Fault {
        let mut plan = lock(&self.plan);
        plan.calls.push(call);
        if let Some(at) = plan.faults.iter().position(|(other, _)| *other == call)
            && let Some((_, fault)) = plan.faults.remove(at)
        {
            return fault;
        }
        plan.always.iter().find(|(other, _)| *other == call).map_or(Fault::None, |(_, fault)| *fault)
    }

    fn through<'a, T: Send + 'a>(
        &self,
        call: StoreCall,
        inner: impl FnOnce() -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        Self::meeting(self.meet(call), inner)
    }

    fn meeting<'a, T: Send + 'a>(
        fault: Fault,
        inner: impl FnOnce() -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        match fault {
            Fault::None => inner(),
            fault => StoreFuture::new(async move {
                match fault {
                    Fault::None => inner().await,
                    Fault::Before(kind) | Fault::BeforeResult(kind) => Err(StoreError::new(kind, "failed on command")),
                    Fault::After => {
                        inner().await?;
                        Err(StoreError::new(StoreErrorKind::Unconfirmed, "the answer got lost on command"))
                    }
                    Fault::Slow(polls) => {
                        pending(polls).await;
                        let answer = inner().await;
                        pending(polls).await;
                        answer
                    }
                    Fault::Hang => std::future::pending().await,
                }
            }),
        }
    }
}

/// Yields to the scheduler `polls` times.
async fn pending(polls: u32) {
    for _ in 0..polls {
        tokio::task::yield_now().await;
    }
}

impl Store for FaultyStore {
    forward! { |store| store.inner => namespace, context, step_values }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        lock(&self.plan).reserves.push(request.clone());
        self.through(StoreCall::Reserve, move || self.inner.reserve(request))
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        self.through(StoreCall::Begin, move || self.inner.begin(lease))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        // The answer is lost for every lease of the call.
        let inner = move || StoreFuture::new(renew_all(&self.inner, leases));
        StoreFuture::renewed(answer, self.through(StoreCall::Renew, inner))
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        self.through(StoreCall::Append, move || self.inner.append(lease, journal))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        let call = move || self.inner.finish(lease, finish);
        let has_result = matches!(finish.result(), StoredResult::Encoded { .. });
        match self.meet(StoreCall::Finish) {
            Fault::BeforeResult(_) if !has_result => call(),
            fault => Self::meeting(fault, call),
        }
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        self.through(StoreCall::Release, move || self.inner.release(lease, release))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        self.through(StoreCall::Wait, move || self.inner.wait(key, attempt, at_most))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        self.through(StoreCall::Inspect, move || self.inner.inspect(key))
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        self.through(StoreCall::Decide, move || self.inner.decide(decision))
    }

    fn purge(&self, batch: u32) -> StoreFuture<'_, u64> {
        self.through(StoreCall::Purge, move || self.inner.purge(batch))
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        self.through(StoreCall::List, move || self.inner.list(filter))
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        self.through(StoreCall::Ping, move || self.inner.ping())
    }
}
