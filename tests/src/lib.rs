//! Shared by the test binaries: a store that fails on command, and a clock that they drive.

#![allow(clippy::missing_panics_doc, clippy::disallowed_methods)] // Tests panic, and wait for real servers.

pub mod calls;
pub mod chance;
pub mod cluster;
#[cfg(feature = "dynamodb")]
pub mod dynamo;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod proxy;
pub mod race;
pub mod server;
#[cfg(feature = "sqlite")]
pub mod sqlite;
pub mod stores;
#[cfg(feature = "wrappers")]
pub mod wrapped;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_runtime::{
    Answers, Clock, Finish, Heartbeats, Inspection, Instant, Key, Lease, Release, Reservation, ReserveRequest, Sleep,
    Store, StoreError, StoreErrorKind, StoreFuture, StoredResult, SystemClock, Task, Verdict, renew_all,
};

/// The fault of one call of a [`FaultyStore`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// None: the call is passed on.
    None,
    /// Fails; nothing is written.
    Before(StoreErrorKind),
    /// Fails a call that has a result to write, and writes nothing; passes all others on.
    BeforeResult(StoreErrorKind),
    /// Takes effect, and its answer is lost.
    After,
    /// Takes effect after this many polls, and is answered after as many more.
    Slow(u32),
    /// Never answers; nothing is written.
    Hang,
}

/// The machine's clock beside a wall clock that the test sets, in milliseconds since 1970.
#[derive(Clone, Debug, Default)]
pub struct WallClock {
    real: SystemClock,
    /// What the wall clock shows.
    pub millis: Arc<AtomicI64>,
}

impl WallClock {
    /// A wall clock that stands at `millis`.
    pub fn at(millis: i64) -> Self {
        Self { real: SystemClock::default(), millis: Arc::new(AtomicI64::new(millis)) }
    }
}

impl Clock for WallClock {
    fn now(&self) -> Instant {
        self.real.now()
    }

    fn wall(&self) -> Duration {
        Duration::from_millis(self.millis.load(Ordering::SeqCst).unsigned_abs())
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        self.real.sleep(duration)
    }

    fn entropy(&self) -> u128 {
        self.real.entropy()
    }

    fn spawn(&self, task: Task) {
        self.real.spawn(task);
    }
}

/// The calls of the contract.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Call {
    Reserve,
    Renew,
    Finish,
    Release,
    Wait,
    Inspect,
    Reopen,
}

/// A store that passes its calls on to another one, and fails when a test tells it to.
#[derive(Clone, Debug)]
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    response_timeout: Duration,
    plan: Arc<Mutex<Plan>>,
}

#[derive(Debug, Default)]
struct Plan {
    faults: VecDeque<(Call, Fault)>,
    always: Vec<(Call, Fault)>,
    calls: Vec<Call>,
    reserves: Vec<ReserveRequest>,
}

impl FaultyStore {
    /// Passes everything on until told otherwise.
    pub fn new(inner: &(impl Store + ?Sized)) -> Self {
        Self { inner: inner.handle(), response_timeout: inner.response_timeout(), plan: Arc::default() }
    }

    /// Sets the response time-out that the store claims.
    #[must_use]
    pub fn answers_within(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// The next call of this kind meets `fault`.
    pub fn next(&self, call: Call, fault: Fault) {
        self.plan.lock().unwrap().faults.push_back((call, fault));
    }

    /// Every call of this kind meets `fault` from now on.
    pub fn always(&self, call: Call, fault: Fault) {
        let mut plan = self.plan.lock().unwrap();
        plan.always.retain(|(other, _)| *other != call);
        plan.always.push((call, fault));
    }

    /// How many calls of this kind there were.
    pub fn count(&self, call: Call) -> usize {
        self.plan.lock().unwrap().calls.iter().filter(|it| **it == call).count()
    }

    /// The reservations that were requested, so that a test can let one land late.
    pub fn reserves(&self) -> Vec<ReserveRequest> {
        self.plan.lock().unwrap().reserves.clone()
    }

    fn meet(&self, call: Call) -> Fault {
        let mut plan = self.plan.lock().unwrap();
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
        call: Call,
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
                        yields(polls).await;
                        let answer = inner().await;
                        yields(polls).await;
                        answer
                    }
                    Fault::Hang => std::future::pending().await,
                }
            }),
        }
    }
}

/// Is pending this many times.
pub async fn yields(polls: u32) {
    for _ in 0..polls {
        tokio::task::yield_now().await;
    }
}

/// Lets every task that can run do so, on a runtime of one thread.
pub async fn settle() {
    yields(200).await;
}

impl Store for FaultyStore {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn namespace(&self) -> &str {
        self.inner.namespace()
    }

    fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    fn heartbeats(&self) -> &Heartbeats {
        self.inner.heartbeats()
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        self.plan.lock().unwrap().reserves.push(request.clone());
        self.through(Call::Reserve, move || self.inner.reserve(request))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        // A lost answer is lost for every lease.
        let inner = move || StoreFuture::new(renew_all(&self.inner, leases));
        StoreFuture::renewed(answer, self.through(Call::Renew, inner))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        let call = move || self.inner.finish(lease, finish);
        let has_result = matches!(finish.result(), StoredResult::Encoded { .. });
        match self.meet(Call::Finish) {
            Fault::BeforeResult(_) if !has_result => call(),
            fault => Self::meeting(fault, call),
        }
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        self.through(Call::Release, move || self.inner.release(lease, release))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        self.through(Call::Wait, move || self.inner.wait(key, attempt, at_most))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        self.through(Call::Inspect, move || self.inner.inspect(key))
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Verdict> {
        self.through(Call::Reopen, move || self.inner.reopen(key, attempt))
    }
}

/// Compiles and runs the code of the README, in memory.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

/// The same for the guide.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide.md")]
pub struct Guide;
