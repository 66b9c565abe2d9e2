//! Calls, the ways to drop calls, and the books, which list each body that ran.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use idem_runtime::record::Record;
use idem_runtime::{Error, InProgress, Key, OnCrash, Operation, Outcome, Policy, Store, current, observe};
use idem_tests::chance::Chance;
use idem_tests::yields;
use tokio::task::JoinError;

use crate::rigs::Rig;

const TTL: Duration = Duration::from_secs(3600);
/// Number of tasks that make calls under load.
const TASKS: usize = 64;
/// Number of tasks that make calls in an outage.
const TASKS_IN_AN_OUTAGE: usize = 24;
/// Largest number of an await at which [`Way::AtAwait`] and [`Way::Elsewhere`] drop a call. A call whose answers are
/// not delayed has fewer awaits.
const AWAITS: usize = 6;
/// Number of keys whose results a scene records before it drops any call.
const FINISHED: usize = 40;

/// Other calls that run during the calls of a scene.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// No other call runs.
    Lone,
    /// 64 tasks make calls, most of them for new keys.
    Busy,
    /// 64 tasks make calls, most of them for keys that have a result.
    Replays,
    /// Some tasks make calls while the store does not answer for two leases. Half of the bodies take up to a lease.
    Outage,
}

/// End of a call: by its result, or by a drop.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// The call is not dropped.
    Whole,
    /// The call is dropped when it is pending for the n-th time.
    AtAwait(usize),
    /// The call is dropped when it is pending for the n-th time, on a thread without a runtime.
    Elsewhere(usize),
    /// A time-out drops the call.
    TimedOut(Duration),
    /// A `select!` drops the call after other tasks have run this many times.
    Selected(u32),
    /// The task of the call is aborted.
    Aborted(Duration),
    /// The runtime of the call ends after other tasks have run this many times.
    WithItsRuntime(u32),
}

/// Work that a body does before it returns.
#[derive(Clone, Copy, Debug)]
struct Work {
    turns: u32,
    sleep: Option<Duration>,
    /// Time that the drop of the body's guard takes.
    undo: Option<Duration>,
    succeeds: bool,
}

/// Reason why a call has no result.
#[derive(Debug)]
pub enum Failure {
    Of(Error),
    TheBodys,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Of(error)
    }
}

/// One run of a key's body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub attempt: u32,
    /// True if the body returned `Ok`, false if it returned `Err`, and `None` if it did not return.
    pub returned: Option<bool>,
}

/// Runs of the bodies of one key.
#[derive(Clone, Default, Debug)]
pub struct Book {
    pub runs: Vec<Run>,
    /// Record at the first check; `None` after a further call for the key.
    pub first_look: Option<Option<Record>>,
    /// Number of the attempt whose body has a [`Guard`] now.
    guarded: Option<u32>,
}

impl Book {
    /// Number of the attempt whose result is recorded.
    pub fn result(&self) -> Option<u32> {
        self.runs.iter().find(|run| run.returned == Some(true)).map(|run| run.attempt)
    }

    /// True if the body of this attempt returned `Ok`.
    pub fn succeeded(&self, attempt: u32) -> bool {
        self.runs.contains(&Run { attempt, returned: Some(true) })
    }

    /// True if a body began and did not return.
    pub fn unreturned(&self) -> bool {
        self.runs.iter().any(|run| run.returned.is_none())
    }
}

#[derive(Default, Debug)]
pub struct Books(Mutex<Vec<Book>>);

impl Books {
    fn open(&self) -> usize {
        let mut books = self.0.lock().unwrap();
        books.push(Book::default());
        books.len() - 1
    }

    pub fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub fn of(&self, key: usize) -> Book {
        self.0.lock().unwrap()[key].clone()
    }

    pub fn looked(&self, key: usize, found: Option<Option<Record>>) {
        self.0.lock().unwrap()[key].first_look = found;
    }

    fn began(&self, key: usize, attempt: u32) -> usize {
        let runs = &mut self.0.lock().unwrap()[key].runs;
        runs.push(Run { attempt, returned: None });
        runs.len() - 1
    }

    /// Notes that the body of this attempt has a guard now. Returns the number of another attempt whose guard still
    /// exists.
    fn guard(&self, key: usize, attempt: u32) -> Option<u32> {
        self.0.lock().unwrap()[key].guarded.replace(attempt)
    }

    fn unguard(&self, key: usize, attempt: u32) {
        let guarded = &mut self.0.lock().unwrap()[key].guarded;
        *guarded = guarded.filter(|it| *it != attempt);
    }

    fn returned(&self, key: usize, run: usize, succeeded: bool) {
        self.0.lock().unwrap()[key].runs[run].returned = Some(succeeded);
    }
}

/// Local value of a body. Guards of two bodies of the same key must not exist together. The drop of a guard takes some
/// time, like the drop of a transaction or of a temporary directory.
struct Guard {
    calls: Arc<Calls>,
    key: usize,
    undo: Option<Duration>,
    /// Number of the attempt whose body has this guard.
    attempt: Cell<Option<u32>>,
}

impl Guard {
    fn begins(&self, attempt: u32) {
        let Self { calls, key, .. } = self;
        self.attempt.set(Some(attempt));
        // A body that is paused in an outage keeps its guard. Under `retry` another body of its key may begin
        // meanwhile.
        if let Some(other) = calls.books.guard(*key, attempt)
            && calls.keeps_others_out()
        {
            let problem =
                format!("{}: attempt {attempt} began while attempt {other} still had its guard", calls.key(*key));
            calls.told.lock().unwrap().push(problem);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(attempt) = self.attempt.get() else { return };
        if let Some(undo) = self.undo {
            std::thread::sleep(undo);
        }
        self.calls.books.unguard(self.key, attempt);
    }
}

/// Calls under one load, on one kind of line, under one policy.
#[derive(Debug)]
pub struct Calls {
    /// Number of the scene.
    number: usize,
    load: Load,
    on_crash: OnCrash,
    lease: Duration,
    made: AtomicUsize,
    dropped: AtomicUsize,
    refused: AtomicUsize,
    /// Moving average of the durations of completed calls, in microseconds.
    usual: AtomicU64,
    books: Arc<Books>,
    /// Problems so far: wrong answers to callers, and panics in drops.
    told: Mutex<Vec<String>>,
}

/// Calls of one scene (one load, one kind of line, one policy), and the problems that the checks have found.
pub struct Scene {
    store: &'static str,
    /// Behaviour of the lines, in words.
    how: &'static str,
    calls: Arc<Calls>,
    took: Duration,
    /// Keys that are held although no call is under way.
    pub held: BTreeSet<usize>,
    /// Keys that are interrupted although every body returned.
    pub interrupted: BTreeSet<usize>,
    /// Number of keys with other problems.
    pub others: usize,
    /// Descriptions of all problems.
    pub problems: Vec<String>,
}

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, how, calls, took, others, .. } = self;
        let (load, on_crash) = (format!("{:?}", calls.load), format!("{:?}", calls.on_crash));
        let counts = [&calls.made, &calls.dropped, &calls.refused];
        let [made, dropped, refused] = counts.map(|count| count.load(Ordering::Relaxed));
        let (keys, held, interrupted) = (calls.books.len(), self.held.len(), self.interrupted.len());
        write!(f, "{store:10} {load:8} {how:7} {on_crash:6} {dropped:4} of {made:4} calls dropped in {took:.1?}; ")?;
        write!(f, "of {keys:4} keys {held:3} held ({:2} %), ", 100 * held / keys)?;
        write!(f, "{interrupted:3} interrupted without a body, {others:3} otherwise wrong; ")?;
        write!(f, "{refused:3} calls refused by the store")
    }
}

impl Scene {
    pub fn new(
        store: &'static str,
        number: usize,
        how: &'static str,
        load: Load,
        (on_crash, lease): (OnCrash, Duration),
    ) -> Self {
        let calls = Calls {
            number,
            load,
            on_crash,
            lease,
            made: AtomicUsize::new(0),
            dropped: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
            usual: AtomicU64::new(1000),
            books: Arc::default(),
            told: Mutex::default(),
        };
        Self {
            store,
            how,
            calls: Arc::new(calls),
            took: Duration::ZERO,
            held: BTreeSet::new(),
            interrupted: BTreeSet::new(),
            others: 0,
            problems: Vec::new(),
        }
    }

    pub fn calls(&self) -> &Arc<Calls> {
        &self.calls
    }

    /// Drops calls, and waits until all other calls have ended.
    pub async fn drop_calls(&mut self, rig: &Rig, seed: u64, how_many: usize) {
        let started = Instant::now();
        let chance = Chance::seeded(seed).of(self.calls.number);
        for _ in 0..FINISHED {
            let key = self.calls.books.open();
            let (result, _) = self.calls.fresh(&rig.store, key).await;
            assert!(result.is_ok(), "{result:?}");
        }
        let tasks = if self.calls.load == Load::Lone { 1 } else { TASKS };
        let at_work: Vec<_> = (0..tasks)
            .map(|task| {
                let (calls, store, mut chance) = (Arc::clone(&self.calls), Arc::clone(&rig.store), chance.of(task));
                tokio::spawn(async move {
                    for _ in 0..how_many / tasks {
                        calls.drop_one(&store, &mut chance).await;
                    }
                })
            })
            .collect();
        for task in at_work {
            task.await.expect("no panic");
        }
        self.took = started.elapsed();
        self.note_told();
    }

    /// Moves the problems that the calls have noted to the problems of the scene.
    fn note_told(&mut self) {
        let told = std::mem::take(&mut *self.calls.told.lock().unwrap());
        self.others += told.len();
        self.problems.extend(told);
    }
}

impl Scene {
    /// Drops calls while `cut_off` begins an outage of two leases and `go_on` ends it. Waits until all other calls have
    /// ended.
    pub async fn drop_calls_in_an_outage(
        &mut self,
        rig: &Rig,
        seed: u64,
        how_many: usize,
        (cut_off, go_on): (impl FnOnce(), impl FnOnce()),
    ) {
        let started = Instant::now();
        let chance = Chance::seeded(seed).of(self.calls.number);
        for _ in 0..FINISHED {
            let key = self.calls.books.open();
            // On a busy machine, a store may not answer in time.
            for _ in 0..100 {
                if self.calls.fresh(&rig.store, key).await.0.is_ok() {
                    break;
                }
            }
        }
        let lasts = 2 * self.calls.lease;
        let of_each = how_many / TASKS_IN_AN_OUTAGE;
        let pause = lasts / u32::try_from(of_each).expect("few");
        let at_work: Vec<_> = (0..TASKS_IN_AN_OUTAGE)
            .map(|task| {
                let (calls, store, mut chance) = (Arc::clone(&self.calls), Arc::clone(&rig.store), chance.of(task));
                tokio::spawn(async move {
                    for _ in 0..of_each {
                        calls.drop_one(&store, &mut chance).await;
                        tokio::time::sleep(chance.up_to(pause)).await;
                    }
                })
            })
            .collect();
        // After this pause some bodies have begun.
        tokio::time::sleep(pause).await;
        cut_off();
        tokio::time::sleep(lasts).await;
        go_on();
        for task in at_work {
            task.await.expect("no panic");
        }
        self.took = started.elapsed();
        self.note_told();
    }
}

impl Calls {
    /// True if no body may begin while an earlier body of its key may still run.
    fn keeps_others_out(&self) -> bool {
        self.load != Load::Outage || self.on_crash == OnCrash::Fail
    }

    pub fn key(&self, key: usize) -> Key {
        Key::new("drops", format!("{}-{key}", self.number)).expect("a valid key")
    }

    pub fn on_crash(&self) -> OnCrash {
        self.on_crash
    }

    pub fn books(&self) -> &Books {
        &self.books
    }

    async fn drop_one(self: &Arc<Self>, store: &Arc<dyn Store>, chance: &mut Chance) {
        let n = self.made.fetch_add(1, Ordering::Relaxed);
        let again = if self.load == Load::Replays { 85 } else { 15 };
        let key = match chance.percent(again) {
            // The key is finished, free, interrupted, or in use by another call.
            true if self.load == Load::Replays => chance.below(FINISHED),
            true => chance.below(self.books.len()),
            false => self.books.open(),
        };
        // Most bodies are short; some sleep, drop their guard slowly, or fail.
        let work = Work {
            turns: if chance.percent(50) { 0 } else { 1 + u32::try_from(chance.below(3)).expect("small") },
            sleep: match self.load {
                Load::Outage => chance.percent(50).then(|| chance.up_to(self.lease)),
                _ => chance.percent(20).then(|| chance.up_to(Duration::from_millis(3))),
            },
            undo: chance.percent(20).then(|| chance.up_to(Duration::from_millis(3))),
            succeeds: chance.percent(85),
        };
        // Longest time after which a call is dropped: twice the usual duration of a call, so that some drops come in a
        // call's last steps.
        let longest = Duration::from_micros(2 * self.usual.load(Ordering::Relaxed));
        let turns = u32::try_from(chance.below(60)).expect("small");
        let way = match chance.below(100) {
            0..45 => Way::AtAwait(1 + n % AWAITS),
            45..50 => Way::Elsewhere(1 + n % AWAITS),
            50..62 => Way::TimedOut(chance.up_to(longest)),
            62..77 => Way::Selected(turns),
            77..90 => Way::Aborted(chance.up_to(longest)),
            90..94 => Way::WithItsRuntime(turns),
            _ => Way::Whole,
        };
        let in_progress = match chance.percent(50) {
            true => InProgress::Reject,
            false => InProgress::Wait(Duration::from_millis(20)),
        };
        let asked = Instant::now();
        let call = Box::pin(self.call(store, key, work, in_progress));
        // A dropped call is judged later, by its record and its book. A call with an answer is judged here.
        match way.lead(call).await {
            Ok(None) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
            Err(Panicked) => self.told.lock().unwrap().push(format!("{}: a drop panicked: {way:?}", self.key(key))),
            Ok(Some((result, outcome))) => {
                if outcome.executed() {
                    let took = u64::try_from(asked.elapsed().as_micros()).expect("short");
                    let usual = self.usual.load(Ordering::Relaxed);
                    self.usual.store((3 * usual + took) / 4, Ordering::Relaxed);
                }
                self.judge(key, &result);
            }
        }
    }

    /// Judges the answer to a call while other calls are being dropped.
    fn judge(&self, key: usize, result: &Result<u32, Failure>) {
        match result {
            Err(Failure::TheBodys | Failure::Of(Error::InProgress { .. })) => {}
            Err(Failure::Of(Error::Interrupted { .. })) if self.on_crash == OnCrash::Fail => {}
            Err(Failure::Of(Error::Store { source, .. })) if source.is_transient() => {
                self.refused.fetch_add(1, Ordering::Relaxed);
            }
            Err(Failure::Of(Error::Unrecorded { .. } | Error::LeaseLost { .. })) if self.load == Load::Outage => {}
            Ok(attempt) if self.books.of(key).succeeded(*attempt) => {}
            told => {
                let problem = format!("{}: a caller got {told:?}: {:?}", self.key(key), self.books.of(key));
                self.told.lock().unwrap().push(problem);
            }
        }
    }

    /// Makes one call of a handler that enters its run in the books and returns the number of its attempt.
    fn call(
        self: &Arc<Self>,
        store: &Arc<dyn Store>,
        key: usize,
        work: Work,
        in_progress: InProgress,
    ) -> impl Future<Output = (Result<u32, Failure>, Outcome)> + Send + 'static {
        let policy = Policy::new(TTL).lease(self.lease).on_crash(self.on_crash).in_progress(in_progress);
        let operation = Operation::new(&**store, Ok(self.key(key)), policy);
        let books = Arc::clone(&self.books);
        let guard = Guard { calls: Arc::clone(self), key, undo: work.undo, attempt: Cell::new(None) };
        let body = async move {
            let attempt = current().expect("inside").number();
            guard.begins(attempt);
            let run = books.began(key, attempt);
            yields(work.turns).await;
            if let Some(sleep) = work.sleep {
                tokio::time::sleep(sleep).await;
            }
            books.returned(key, run, work.succeeds);
            if work.succeeds { Ok(attempt) } else { Err(Failure::TheBodys) }
        };
        observe(operation.run(body))
    }

    /// Makes a call with an empty body, to find out its outcome.
    pub async fn fresh(self: &Arc<Self>, store: &Arc<dyn Store>, key: usize) -> (Result<u32, Failure>, Outcome) {
        self.call(store, key, Work { turns: 0, sleep: None, undo: None, succeeds: true }, InProgress::Reject).await
    }
}

type Call<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Call that is dropped when it is pending for the n-th time.
struct UpTo<T> {
    call: Call<T>,
    left: usize,
}

impl<T> Future for UpTo<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(told) = self.call.as_mut().poll(cx) {
            return Poll::Ready(Some(told));
        }
        self.left -= 1;
        if self.left == 0 { Poll::Ready(None) } else { Poll::Pending }
    }
}

impl Way {
    /// Runs a call until it ends in this way. Returns the call's output; `None` if the call was dropped.
    async fn lead<T: Send + 'static>(self, mut call: Call<T>) -> Result<Option<T>, Panicked> {
        Ok(match self {
            Self::Whole => Some(call.await),
            Self::AtAwait(n) => UpTo { call, left: n }.await,
            Self::Elsewhere(n) => {
                let mut call = UpTo { call, left: n };
                let told = (&mut call).await;
                std::thread::spawn(move || drop(call)).join().map_err(|_| Panicked)?;
                told
            }
            Self::TimedOut(limit) => tokio::time::timeout(limit, call).await.ok(),
            Self::Selected(turns) => tokio::select! {
                biased;
                told = &mut call => Some(told),
                () = yields(turns) => None,
            },
            Self::Aborted(after) => {
                let task = tokio::spawn(call);
                tokio::time::sleep(after).await;
                task.abort();
                ended(task.await)?
            }
            Self::WithItsRuntime(turns) => {
                let end = move || {
                    let runtime =
                        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
                    let task = runtime.spawn(call);
                    runtime.block_on(yields(turns));
                    drop(runtime);
                    task
                };
                let (sender, task) = tokio::sync::oneshot::channel();
                std::thread::spawn(move || sender.send(end()).ok());
                ended(task.await.map_err(|_| Panicked)?.await)?
            }
        })
    }
}

/// The drop of a call panicked.
struct Panicked;

fn ended<T>(task: Result<T, JoinError>) -> Result<Option<T>, Panicked> {
    match task {
        Ok(told) => Ok(Some(told)),
        Err(error) if error.is_cancelled() => Ok(None),
        Err(_) => Err(Panicked),
    }
}
