//! Racer: one of several processes that work on the same keys. `idem_tests::race` starts and kills racers; the
//! arguments are `idem_tests::race::Orders`.
#![allow(clippy::disallowed_methods)] // A consumer loop sleeps, and some bodies block.

use std::fs::File;
use std::future::poll_fn;
use std::io::Write as _;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use fork::Fork;
use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender, UnsentReason};
use idem_runtime::{
    Attempt, Disposition, Error, InProgress, Operation, Policy, Store, StoreExt as _, current, observe,
};
use idem_tests::race::messages::{self, DESTINATIONS, TcpSender};
use idem_tests::race::{self, Event, Keys, Orders, Place, STEPS, Table, Work};
use idem_tests::stores;
use tokio::runtime::{Builder, Runtime};

const WORK: Duration = Duration::from_millis(10);
const PAUSE: Duration = Duration::from_millis(20);
/// Number of other tasks that a runtime polls before its timers, when its stopped process continues.
const OTHER_THINGS: u32 = 200;

struct Racer {
    orders: Orders,
    store: Arc<dyn Store>,
    table: Table,
    /// True if a body of this racer has begun.
    begun: AtomicBool,
    /// True once the broker has confirmed the last message of a body.
    has_sent: Arc<AtomicBool>,
    calls: AtomicU32,
}

fn main() {
    let orders = Orders::read();
    let failed = File::options().append(true).open(race::beside(&orders.path, "failed")).ok();
    std::panic::set_hook(Box::new(move |panic| {
        eprintln!("{panic}");
        if let Some(mut failed) = failed.as_ref() {
            failed.write_all(panic.to_string().as_bytes()).ok();
        }
        std::process::exit(1);
    }));
    match orders.place {
        Place::One => {
            let runtime = match orders.work {
                Work::BlocksInPlace => several_threads(),
                _ => one_thread(),
            };
            let racer = runtime.block_on(Racer::open(orders));
            runtime.block_on(racer.race());
        }
        Place::OpenedElsewhere => {
            let stands_still = one_thread();
            let racer = stands_still.block_on(Racer::open(orders));
            one_thread().block_on(racer.race());
        }
        Place::BegunElsewhere => {
            let (opened_on, stands_still) = (several_threads(), one_thread());
            let racer = opened_on.block_on(Racer::open(orders));
            stands_still.block_on(racer.begin());
            one_thread().block_on(racer.race());
        }
        Place::Forked => forked(orders),
    }
}

fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn several_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Opens the store, runs a body, and forks two children. The three processes then serve the same keys, and after them
/// each process serves as many keys of its own.
fn forked(orders: Orders) {
    let Keys::Together(keys) = orders.keys else { panic!("{:?}", orders.keys) };
    let before = one_thread();
    let racer = before.block_on(Racer::open(orders));
    before.block_on(racer.begin());
    // Waits for the last renewals, because a child has none of the threads that could finish them.
    before.block_on(racer.store.context().flush());
    let (parent, mut children) = (std::process::id(), Vec::new());
    while children.len() < 2 {
        match fork::fork().expect("forks") {
            Fork::Parent(child) => children.push(child),
            Fork::Child => {
                // The child ends when its parent ends, as the parent ends when the test process ends.
                std::thread::spawn(move || {
                    while std::os::unix::process::parent_id() == parent {
                        std::thread::sleep(PAUSE);
                    }
                    std::process::exit(1);
                });
                // The child must not use the runtime of its parent, and a drop of the runtime would use it.
                std::mem::forget(before);
                one_thread().block_on(async {
                    racer.race().await;
                    racer.race_for(racer.first() + keys * (1 + children.len()), keys).await;
                });
                std::process::exit(0);
            }
        }
    }
    before.block_on(async {
        racer.race().await;
        racer.race_for(racer.first() + keys * (1 + children.len()), keys).await;
    });
    for child in children {
        let status = fork::waitpid(child).expect("a child");
        assert_eq!(status, 0, "a child failed");
    }
}

impl Racer {
    async fn open(orders: Orders) -> Arc<Self> {
        let has_sent = Arc::new(AtomicBool::new(false));
        let mut store = stores::open(&orders.spec, orders.lease).await;
        if let Some(port) = orders.broker {
            let gate = race::gate(&orders.path, std::process::id());
            let (inner, table, work) = (TcpSender(port), Table::open(&orders.path), orders.work);
            store = store.with_sender(RacerSender { inner, table, gate, work, has_sent: Arc::clone(&has_sent) });
        }
        let table = Table::open(&orders.path);
        Arc::new(Self { orders, store, table, begun: AtomicBool::new(false), has_sent, calls: AtomicU32::new(0) })
    }

    /// First key that [`race`](Self::race) serves.
    fn first(&self) -> usize {
        match self.orders.place {
            Place::BegunElsewhere | Place::Forked => self.orders.begin + 1,
            Place::One | Place::OpenedElsewhere => self.orders.begin,
        }
    }

    /// Serves the racer's own key, the first of its keys, with a long body.
    async fn begin(self: &Arc<Self>) {
        self.serve(self.orders.begin, Work::Long).await;
    }

    async fn race(self: &Arc<Self>) {
        let first = self.first();
        match self.orders.keys {
            Keys::Open | Keys::Fixed(_) => self.go_through(first).await,
            Keys::Together(keys) => self.race_for(first, keys).await,
            Keys::Gated(keys) => {
                self.serve(first, Work::Some).await;
                while !self.gate().exists() {
                    tokio::time::sleep(PAUSE).await;
                }
                self.race_for(first + 1, keys).await;
            }
            Keys::Beside(keys, beside) => {
                let beside: Vec<_> = (first + keys..first + keys + beside)
                    .map(|n| {
                        let racer = Arc::clone(self);
                        tokio::spawn(async move {
                            while !racer.gate().exists() {
                                racer.serve(n, Work::Some).await;
                                tokio::time::sleep(PAUSE).await;
                            }
                        })
                    })
                    .collect();
                self.race_for(first, keys).await;
                for task in beside {
                    task.await.expect("no panic");
                }
            }
        }
    }

    async fn race_for(self: &Arc<Self>, first: usize, keys: usize) {
        let tasks: Vec<_> = (first..first + keys)
            .map(|n| {
                let racer = Arc::clone(self);
                tokio::spawn(async move { racer.serve(n, racer.orders.work).await })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
    }

    async fn go_through(self: &Arc<Self>, begin: usize) {
        let mut keys = match self.orders.keys {
            Keys::Fixed(keys) => Some(keys),
            _ => None,
        };
        let rest = match self.orders.work {
            Work::Nothing => Work::Nothing,
            _ => Work::Some,
        };
        let mut n = begin;
        loop {
            keys = keys.or_else(|| self.told_how_many());
            if keys.is_some_and(|keys| n >= keys) {
                break;
            }
            let first = !self.begun.load(Ordering::Relaxed);
            self.serve(n, if first { self.orders.work } else { rest }).await;
            n += 1;
        }
        for n in 0..begin {
            self.serve(n, rest).await;
        }
    }

    fn told_how_many(&self) -> Option<usize> {
        std::fs::read_to_string(race::beside(&self.orders.path, "keys")).ok()?.parse().ok()
    }

    fn gate(&self) -> PathBuf {
        race::gate(&self.orders.path, std::process::id())
    }

    /// Delivers the message until the call acknowledges or dead-letters it.
    async fn serve(self: &Arc<Self>, n: usize, work: Work) {
        loop {
            let call = 1 + self.calls.fetch_add(1, Ordering::Relaxed);
            self.table.write(call, n, Event::Asked);
            let (told, disposition) = self.call(call, n, work).await;
            let is_final = told.is_final();
            self.table.write(call, n, told);
            match disposition {
                Disposition::Ack | Disposition::DeadLetter if is_final => break,
                Disposition::Retry { .. } if !is_final => tokio::time::sleep(PAUSE).await,
                other => panic!("key {n}: {other:?}"),
            }
        }
    }

    async fn call(self: &Arc<Self>, call: u32, n: usize, work: Work) -> (Event, Disposition) {
        // The retention is longer than any step by which a test sets a clock.
        let policy = Policy::new(Duration::from_secs(48 * 3600))
            .lease(self.orders.lease)
            .max_result_bytes(2 * self.orders.bytes + 1024)
            .in_progress(InProgress::Wait(Duration::from_secs(2)))
            .on_crash(self.orders.policies.on_crash(n));
        let policy = if self.orders.policies.has_one_attempt(n) { policy.max_attempts(1) } else { policy };
        let operation = Operation::new(&*self.store, Ok(race::key(n)), policy);
        let body = async {
            let attempt = current().unwrap();
            self.table.write(call, n, Event::Began(attempt.number()));
            self.begun.store(true, Ordering::Relaxed);
            if self.orders.broker.is_some() {
                let result = race::result(attempt.number(), std::process::id(), call);
                for (place, destination) in DESTINATIONS.into_iter().enumerate() {
                    attempt.outbox().push(destination, messages::message(n, &result, place))?;
                }
                if self.orders.fails_first(n) && attempt.number() == 1 {
                    return Err(BodyError::Failed);
                }
            }
            let [first, last] = STEPS;
            let has_steps = self.orders.has_steps(n);
            if has_steps {
                Arc::clone(self).step(call, n, first, Work::Nothing, attempt.clone()).await?;
            }
            self.work(call, n, work, &attempt).await;
            if has_steps {
                let step = Arc::clone(self).step(call, n, last, work, attempt.clone());
                if work == Work::InStep { tokio::spawn(step).await.expect("no panic")? } else { step.await? }
            }
            self.table.write(call, n, Event::Ended);
            let result = race::result(attempt.number(), std::process::id(), call);
            Ok::<_, BodyError>(race::padded(&result, self.orders.bytes))
        };
        let is_sent = || work == Work::InMark && self.has_sent.load(Ordering::Relaxed);
        let run = observe(operation.run(body));
        let (result, outcome) = unless_sent(run, is_sent, || self.table.write(call, n, Event::Marking)).await;
        let told = match result {
            Ok(result) => {
                assert!(result.len() >= self.orders.bytes, "key {n}: its result has only {} bytes", result.len());
                let result = race::told(&result).to_owned();
                if outcome.replayed() { Event::Replayed(result) } else { Event::Ran(result) }
            }
            Err(BodyError::Failed) => return (Event::Failed, outcome.disposition()),
            Err(BodyError::Call(error)) => failed(n, error),
        };
        (told, outcome.disposition())
    }

    /// Runs a step whose effect is a line of the table.
    async fn step(
        self: Arc<Self>,
        call: u32,
        n: usize,
        name: &'static str,
        work: Work,
        attempt: Attempt,
    ) -> Result<(), Error> {
        let has_returned = AtomicBool::new(false);
        let run = attempt.step(name).run(async |step| {
            self.table.write(call, n, Event::StepMade(name.to_owned(), step.child_key()));
            while work == Work::InStep && !self.gate().exists() {
                tokio::time::sleep(PAUSE).await;
            }
            has_returned.store(true, Ordering::Relaxed);
            Ok::<_, Error>(race::result(attempt.number(), std::process::id(), call))
        });
        let is_sent = || work == Work::InEntry && has_returned.load(Ordering::Relaxed);
        let sent = || self.table.write(call, n, Event::StepSent(name.to_owned()));
        let kept = unless_sent(run, is_sent, sent).await;
        match &kept {
            Ok(value) => self.table.write(call, n, Event::StepKept(name.to_owned(), value.clone())),
            Err(Error::LeaseLost { .. }) => self.table.write(call, n, Event::StepRefused(name.to_owned())),
            Err(Error::Store { .. }) => self.table.write(call, n, Event::StepUnconfirmed(name.to_owned())),
            Err(_) => {}
        }
        kept.map(drop)
    }

    async fn work(&self, call: u32, n: usize, work: Work, attempt: &Attempt) {
        let gate = self.gate();
        match work {
            Work::Nothing | Work::InStep | Work::InEntry | Work::BeforeSending | Work::AfterSending | Work::InMark => {}
            Work::Some => tokio::time::sleep(WORK).await,
            Work::Long => tokio::time::sleep(2 * self.orders.lease).await,
            Work::Held => {
                tokio::time::sleep(WORK).await;
                while !gate.exists() {
                    let asked = race::now();
                    if attempt.confirm_lease().await.is_ok() {
                        self.table.write_as_of(asked, call, n, Event::Held);
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
            Work::Quiet => {
                while !gate.exists() {
                    tokio::time::sleep(PAUSE).await;
                }
            }
            Work::Polled => {
                let (mut before, mut other_things) = (Instant::now(), 0);
                while !gate.exists() {
                    self.table.write(call, n, Event::Polled);
                    if before.elapsed() > self.orders.lease {
                        other_things = OTHER_THINGS;
                    }
                    before = Instant::now();
                    match other_things {
                        0 => tokio::time::sleep(PAUSE).await,
                        _ => tokio::task::yield_now().await,
                    }
                    other_things = other_things.saturating_sub(1);
                }
            }
            Work::Blocks => block_until(|| gate.exists()),
            Work::BlocksInPlace => tokio::task::block_in_place(|| block_until(|| gate.exists())),
        }
    }
}

/// Keeps the thread busy: alternately computes and sleeps.
fn block_until(over: impl Fn() -> bool) {
    while !over() {
        let since = Instant::now();
        while since.elapsed() < Duration::from_millis(1) {
            std::hint::spin_loop();
        }
        std::thread::sleep(PAUSE);
    }
}

/// Runs `run`. Once the request that `is_sent` tells of is under way, calls `sent` and stands still: nobody reads the
/// answer to the request, even if it has arrived.
async fn unless_sent<T>(run: impl Future<Output = T>, is_sent: impl Fn() -> bool, sent: impl FnOnce()) -> T {
    let mut run = pin!(run);
    let ended = poll_fn(|cx| match run.as_mut().poll(cx) {
        _ if is_sent() => Poll::Ready(None),
        polled => polled.map(Some),
    });
    if let Some(ended) = ended.await {
        return ended;
    }
    sent();
    std::future::pending().await
}

/// Returns the event of a call for key `n` that has ended with `error`.
fn failed(n: usize, error: Error) -> Event {
    match error {
        Error::LeaseLost { source: Some(source), .. } => Event::Unrenewed(format!("{:?}", source.kind())),
        Error::LeaseLost { .. } => Event::LeaseLost,
        Error::Unrecorded { .. } => Event::Unrecorded,
        Error::InProgress { .. } => Event::InProgress,
        Error::Interrupted { .. } => Event::Interrupted,
        Error::AttemptsExhausted { .. } => Event::Exhausted,
        Error::Store { source, .. } => Event::Store(format!("{:?}", source.kind())),
        Error::Unsent { reason, .. } => Event::Unsent(named(&reason).to_owned()),
        error => panic!("key {n}: {error}"),
    }
}

/// Returns a word for `reason`.
fn named(reason: &UnsentReason) -> &'static str {
    match reason {
        UnsentReason::NotConfirmed { refused: true, .. } => "refused",
        UnsentReason::NotConfirmed { .. } => "not-confirmed",
        UnsentReason::NotMarked(_) => "not-marked",
        UnsentReason::NotRead(_) => "not-read",
        UnsentReason::Sending => "sending",
        UnsentReason::RecordChanged => "record-changed",
        other => panic!("{other}"),
    }
}

/// Error of a racer's body.
#[derive(Debug)]
enum BodyError {
    /// The body has pushed its messages, and fails.
    Failed,
    Call(Error),
}

impl From<Error> for BodyError {
    fn from(error: Error) -> Self {
        Self::Call(error)
    }
}

/// Sender that waits as the racer's [`Work`] says.
struct RacerSender {
    inner: TcpSender,
    table: Table,
    gate: PathBuf,
    work: Work,
    /// True once the broker has confirmed the last message.
    has_sent: Arc<AtomicBool>,
}

impl RacerSender {
    async fn wait(&self) {
        while !self.gate.exists() {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl Sender for RacerSender {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let n: usize = message.partition_key().unwrap_or_default().parse()?;
            let place = messages::place_of(std::str::from_utf8(message.body())?);
            self.table.write(0, n, Event::Sending(place));
            if self.work == Work::BeforeSending {
                self.wait().await;
            }
            self.inner.send(message).await?;
            self.table.write(0, n, Event::Sent(place));
            if place + 1 == DESTINATIONS.len() {
                if self.work == Work::AfterSending {
                    self.wait().await;
                }
                self.has_sent.store(true, Ordering::Relaxed);
            }
            Ok(())
        })
    }

    /// Longer than any test keeps a gate closed.
    fn timeout(&self) -> Duration {
        Duration::from_secs(600)
    }
}
