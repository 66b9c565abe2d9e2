//! Store of a simulated process: a line with faults in front of a real store, which never breaks the contract. Calls on
//! the line are slow, fail before or after their effect, hang, and overtake each other. A call may take effect after
//! its caller has given up. Requests and answers are entered in the [`History`].

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::clock::Clock;
use idem_runtime::record::{Record, StoredResult};
use idem_runtime::store::{
    Action, Answers, Decision, DecisionAnswer, Filter, Finish, Inspection, Journal, Lease, Page, Release, Reservation,
    ReserveRequest, StepState, StoreContext, StoreFuture, Verdict, renew_all,
};
use idem_runtime::testing::SimulatedClock;
use idem_runtime::{Key, Store, StoreError, StoreErrorKind, current};
use idem_tests::clock::OddClock;

use crate::dice::Dice;
use crate::history::{End, History, OperationAnswer, OperationArgs, nanos, parted_finish, without_messages};
use crate::mail::Mail;
use crate::outage::{Loss, Outage, frees};

/// Rates of faults on the lines of a world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FaultRates {
    /// Number of store calls in a thousand that have a fault.
    pub(crate) faults: u64,
    /// True if a dropped call may still take effect.
    pub(crate) late: bool,
    /// Longest delay, in each direction, of a call without a fault.
    pub(crate) calm: Duration,
    /// Longest lease of the world. A hanging call hangs for about this time.
    pub(crate) lease: Duration,
}

/// Deliberate break between engine and store, which a check must notice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DeliberateBreak {
    None,
    /// A finish is confirmed but not executed, as if the engine returned before the result is recorded.
    FinishesNothing,
    /// A release is confirmed but not executed, as if the engine forgot to free its key.
    ReleasesNothing,
    /// A renewal is confirmed but not executed, as if the engine had no heartbeats.
    RenewsNothing,
    /// Some reservations get an earlier answer again, which is no longer correct.
    StaleReads,
    /// A write is executed although its answer says that it was not.
    FailsAfterAll,
    /// An operator's result is confirmed but not recorded.
    ResolvesNothing,
    /// Processes rely on lapsed leases, as if their clocks were slow.
    SlowClock,
    /// Two processes draw the same owner tokens.
    OwnersRepeat,
    /// A mark is confirmed but not made, as if the engine started bodies without a mark.
    MarksNothing,
    /// A release of a process that was once cut off is confirmed but not executed, as if the engine gave up requests in
    /// an outage.
    ReleasesNothingAfterOutages,
    /// The refusal of a lost right is reported as an outage.
    RefusalsAreOutages,
    /// The answer `Unknown` of a reconciler becomes `NotDone`, as if the engine confused the two.
    UnknownIsNotDone,
    /// The answer `Unknown` of a reconciler becomes `Done`, with a value of nobody.
    UnknownIsDone,
    /// An uncertain error frees its key, as if the engine treated it like another error.
    DoubtsAreReleased,
    /// An append is confirmed but not executed, as if a step returned its value before its entry is in the record.
    AppendsNothing,
    /// A reservation comes without the journal of earlier attempts, as if the engine ran each step in each attempt.
    JournalsAreDropped,
    /// The beginning of a step is confirmed and not recorded, as if the engine started the body of a step without it.
    BeginningsAreDropped,
    /// The answer `Unknown` of a step's reconciler becomes `NotDone`, as if the engine confused the two.
    StepUnknownIsNotDone,
    /// The answer `Unknown` of a step's reconciler becomes `Done`, with a value of nobody.
    StepUnknownIsDone,
    /// Each error of a step is certain, as if the engine journaled a step as undone after an uncertain error.
    StepErrorsAreCertain,
    /// The record of a result is written without its messages, as if the engine marked messages before it sent them.
    MarksBeforeSending,
    /// A lost message counts as confirmed, as if the engine marked and acknowledged what was not sent.
    LostMessagesAreConfirmed,
    /// Renewals are confirmed but not executed, and the finish of an attempt that was taken over is confirmed, as if
    /// the engine sent the messages of a zombie.
    ZombiesSend,
    /// A replay comes without the messages that are not marked, as if a duplicate ignored them.
    UnsentIsIgnored,
    /// A message has another id each time it is sent.
    MessagesAreRenamed,
    /// The messages of a body leave in the reverse order of its pushes.
    PushesAreReversed,
    /// A reconciler runs under the number of the attempt in doubt, as if the engine reserved no attempt for it.
    ReconcilersRepeatTheNumber,
    /// A process hears that a refused renewal was made, as if the engine went on without its lease.
    RefusedRenewalsAreConfirmed,
    /// A result is left out of its record when it is written for the second time, as if the engine took any failure for
    /// a refusal of the result.
    ResultsAreLeftOut,
    /// A value of a body outlives the call, as if the engine ended the attempt before it dropped the body.
    ValuesOutliveTheirCall,
}

/// Kind of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// Fault of one store call, or outage.
    Line,
    /// Loss of a right by a process.
    Right,
}

/// Fault that occurred: its process, its keys, its beginning and its end.
#[derive(Clone, Debug)]
pub(crate) struct Met {
    pub(crate) cause: Cause,
    /// Process with the fault; `None` for all processes.
    pub(crate) process: Option<usize>,
    /// Keys with the fault; `None` for all keys.
    pub(crate) keys: Option<Vec<usize>>,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Met {
    /// Reports whether the fault affected `key`.
    pub(crate) fn is_about(&self, key: usize) -> bool {
        self.keys.as_ref().is_none_or(|keys| keys.contains(&key))
    }

    /// Reports whether the fault affected `process`.
    pub(crate) fn is_of(&self, process: usize) -> bool {
        self.process.is_none_or(|it| it == process)
    }
}

/// Network between the processes of a world and their store.
pub(crate) struct Net {
    pub(crate) clock: SimulatedClock,
    pub(crate) dice: Dice,
    /// Handle that belongs to no process, for reading the real records.
    truth: Arc<dyn Store>,
    weather: FaultRates,
    stormy: AtomicBool,
    pub(crate) prank: DeliberateBreak,
    /// Messages of the world, and its broker; `None` if its bodies push none.
    pub(crate) mail: Option<Mail>,
    /// True if the store forgets no record while the world lasts.
    remembers: bool,
    history: Mutex<History>,
    met: Mutex<Vec<Met>>,
    outage: Mutex<Option<Arc<Outage>>>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
    /// Earlier answers, which [`DeliberateBreak::StaleReads`] gives again.
    stale: Mutex<HashMap<Key, Reservation>>,
    /// Time at which each attempt ended or its record was removed.
    ended: Mutex<HashMap<(Key, u32), u64>>,
    /// Start and length of each jump of the clock.
    jumps: Mutex<Vec<(u64, u64)>>,
    /// Waits that continued after the end of the attempt for which they waited.
    overslept: Mutex<Vec<(Key, String)>>,
    /// Decisions that the store applied while an attempt was running.
    trespasses: Mutex<Vec<(Key, String)>>,
    /// Journals that records had after an append.
    journals: Mutex<Vec<(Key, Bytes)>>,
    /// Appends after which a record had fewer entries than before.
    shortened: Mutex<Vec<(Key, String)>>,
}

impl Net {
    pub(crate) fn new(
        clock: SimulatedClock,
        dice: Dice,
        truth: Arc<dyn Store>,
        weather: FaultRates,
        prank: DeliberateBreak,
        (mail, remembers): (Option<Mail>, bool),
    ) -> Self {
        Self {
            history: Mutex::new(History::new(clock.clone())),
            clock,
            dice,
            truth,
            weather,
            stormy: AtomicBool::new(true),
            prank,
            mail,
            remembers,
            met: Mutex::default(),
            outage: Mutex::default(),
            counts: Mutex::default(),
            stale: Mutex::default(),
            ended: Mutex::default(),
            jumps: Mutex::default(),
            overslept: Mutex::default(),
            trespasses: Mutex::default(),
            journals: Mutex::default(),
            shortened: Mutex::default(),
        }
    }

    /// Reports whether the store forgets no record while the world lasts.
    pub(crate) fn remembers(&self) -> bool {
        self.remembers
    }

    /// Advances the clock by `duration` while all tasks stand still, so that all timers are late.
    pub(crate) fn jump(&self, duration: Duration) {
        let from = self.now();
        self.clock.advance(duration);
        let to = self.now();
        self.history().note(format!("time jumps by {duration:?}"));
        self.jumps.lock().unwrap().push((from, to));
    }

    /// Reports whether the clock jumped between `from` and `to`.
    pub(crate) fn jumped(&self, from: u64, to: u64) -> bool {
        self.jumps.lock().unwrap().iter().any(|(start, end)| *start <= to && *end >= from)
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.counts.lock().unwrap().entry(what).or_default() += 1;
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.lock().unwrap().clone()
    }

    /// Outage that cuts off `process` now.
    fn outage_of(&self, process: usize) -> Option<Arc<Outage>> {
        self.outage.lock().unwrap().clone().filter(|outage| outage.cuts_off(process))
    }

    /// Reports whether `process` has been cut off at any time.
    fn was_cut_off(&self, process: usize) -> bool {
        self.met.lock().unwrap().iter().any(|it| it.cause == Cause::Line && it.keys.is_none() && it.is_of(process))
    }

    /// Begins an outage, which lasts until [`end_outage`](Self::end_outage).
    pub(crate) fn begin_outage(&self, outage: Arc<Outage>) {
        let process = outage.process();
        self.history().note(format!("outage of {process:?} for {:?}", outage.length()));
        self.count(if process.is_some() { "outages of a process" } else { "outages of the store" });
        let from = self.now();
        self.met.lock().unwrap().push(Met { cause: Cause::Line, process, keys: None, from, to: u64::MAX });
        *self.outage.lock().unwrap() = Some(outage);
    }

    /// Ends the outage: the delayed requests take effect or are lost.
    pub(crate) async fn end_outage(&self, dice: &Dice) {
        let Some(outage) = self.outage.lock().unwrap().take() else { return };
        self.history().note("the outage is over".to_owned());
        outage.end(self, dice).await;
        let to = self.now();
        let mut met = self.met.lock().unwrap();
        met.iter_mut().filter(|it| it.cause == Cause::Line && it.to == u64::MAX).for_each(|it| it.to = to);
    }

    pub(crate) fn overslept(&self) -> Vec<(Key, String)> {
        self.overslept.lock().unwrap().clone()
    }

    pub(crate) fn shortened(&self) -> Vec<(Key, String)> {
        self.shortened.lock().unwrap().clone()
    }

    pub(crate) fn trespasses(&self) -> Vec<(Key, String)> {
        self.trespasses.lock().unwrap().clone()
    }

    /// Reports whether the journal of `key` has had an entry with `value`, a text that only one step has returned.
    pub(crate) fn was_journaled(&self, key: &Key, value: &str) -> bool {
        let written = format!("\"{value}\"");
        let has = |journal: &Bytes| journal.windows(written.len()).any(|part| part == written.as_bytes());
        self.journals.lock().unwrap().iter().any(|(it, journal)| it == key && has(journal))
    }

    /// Notes the journal that a record has after `request`. `before`: journal before an append.
    fn note_journal(&self, request: &Request, before: Option<&Journal>) {
        let key = match request {
            Request::Append(lease, _) => &lease.key,
            Request::Decide(Decision { key, action: Action::ReopenWith(_), .. }) => key,
            _ => return,
        };
        let Some(journal) = self.truth(key).and_then(|found| found.record.journal) else { return };
        if before.is_some_and(|before| !journal.bytes().starts_with(before.bytes())) {
            let text = format!("{journal:?} replaces a longer or another journal");
            self.shortened.lock().unwrap().push((key.clone(), text));
        }
        self.journals.lock().unwrap().push((key.clone(), journal.bytes().clone()));
    }

    /// Number of the pending attempt of `key`.
    fn pending(&self, key: &Key) -> Option<u32> {
        self.truth(key).map(|found| found.record).filter(Record::is_pending).map(|record| record.attempt)
    }

    /// Longest lease of the world. A call of the store is under way for at most two such leases.
    pub(crate) fn longest_lease(&self) -> Duration {
        self.weather.lease
    }

    pub(crate) fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap()
    }

    pub(crate) fn now(&self) -> u64 {
        nanos(self.clock.now().since_origin())
    }

    /// Ends all faults: no later store call has a fault.
    pub(crate) fn clear_up(&self) {
        self.stormy.store(false, Ordering::SeqCst);
    }

    pub(crate) fn is_stormy(&self) -> bool {
        self.stormy.load(Ordering::SeqCst)
    }

    /// Faults that have occurred so far.
    pub(crate) fn met(&self) -> Vec<Met> {
        self.met.lock().unwrap().clone()
    }

    /// Real record of `key`, read without a fault.
    pub(crate) fn truth(&self, key: &Key) -> Option<Inspection> {
        let mut asked = self.truth.inspect(key);
        match std::pin::Pin::new(&mut asked).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(found) => found.expect("nothing is between"),
            // This deliberately broken store reads a record in several steps, so the record is unknown at this moment.
            Poll::Pending => None,
        }
    }

    /// Lets other tasks run: yields up to three times, and in half of the cases sleeps for up to `longest`.
    pub(crate) async fn delay(&self, longest: Duration) {
        for _ in 0..self.dice.between(0, 3) {
            yield_now().await;
        }
        if !longest.is_zero() && self.dice.chance(500) {
            self.clock.sleep(self.dice.up_to(longest)).await;
        }
    }
}

/// Lets other tasks run. Unlike `tokio::task::yield_now`, this works while a task blocks the runtime.
pub(crate) async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| match std::mem::replace(&mut yielded, true) {
        true => Poll::Ready(()),
        false => {
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

#[derive(Clone, Debug)]
pub(crate) enum Request {
    Reserve(ReserveRequest),
    Begin(Lease),
    Renew(Vec<Lease>),
    Append(Lease, Journal),
    Finish(Lease, Finish),
    Release(Lease, Release),
    Decide(Decision),
    Inspect(Key),
}

/// Answer to a request, the time at which the request took effect, and the answer's form in the history.
pub(crate) type LandedRequest = (Result<Reply, StoreError>, (u64, Option<OperationAnswer>));

#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Reservation(Reservation),
    Writes(Vec<Verdict>),
    Decided(DecisionAnswer),
    Inspection(Option<Inspection>),
}

impl Request {
    async fn ask(&self, store: &dyn Store) -> Result<Reply, StoreError> {
        let write = |write| Reply::Writes(vec![write]);
        match self {
            Self::Reserve(request) => store.reserve(request).await.map(Reply::Reservation),
            Self::Begin(lease) => store.begin(lease).await.map(|verdict| Reply::Writes(vec![verdict])),
            Self::Renew(leases) => renew_all(store, leases).await.map(Reply::Writes),
            Self::Append(lease, journal) => store.append(lease, journal).await.map(write),
            Self::Finish(lease, finish) => store.finish(lease, finish).await.map(write),
            Self::Release(lease, release) => store.release(lease, *release).await.map(write),
            Self::Decide(decision) => store.decide(decision).await.map(Reply::Decided),
            Self::Inspect(key) => store.inspect(key).await.map(Reply::Inspection),
        }
    }

    fn key(&self) -> Option<&Key> {
        match self {
            Self::Reserve(request) => Some(&request.key),
            Self::Finish(lease, _) | Self::Release(lease, _) => Some(&lease.key),
            Self::Decide(decision) => Some(&decision.key),
            Self::Begin(_) | Self::Renew(_) | Self::Append(..) | Self::Inspect(_) => None,
        }
    }

    /// Enters the operations of the request in the history.
    fn enter(&self, history: &mut History, process: usize) -> Vec<usize> {
        let entered: Vec<(&Key, OperationArgs)> = match self {
            Self::Reserve(request) => vec![(&request.key, history.reserve(request))],
            Self::Begin(lease) => vec![(&lease.key, OperationArgs::Begin(history.ask(lease), lease.attempt))],
            Self::Renew(leases) => {
                leases.iter().map(|it| (&it.key, OperationArgs::Renew(history.ask(it), it.attempt))).collect()
            }
            Self::Append(lease, journal) => {
                let size = journal.bytes().len();
                vec![(&lease.key, OperationArgs::Append(history.ask(lease), lease.attempt, size))]
            }
            Self::Finish(lease, finish) => {
                let (finish, messages) = parted_finish(finish);
                vec![(&lease.key, OperationArgs::Finish(history.ask(lease), lease.attempt, finish, messages))]
            }
            Self::Release(lease, release) => vec![(&lease.key, OperationArgs::Release(history.ask(lease), *release))],
            Self::Decide(Decision { key, seen, action, by, .. }) => {
                let sight = history.sight(seen);
                vec![(key, OperationArgs::Decide { sight, action: action.clone(), by: by.to_string() })]
            }
            Self::Inspect(key) => vec![(key, OperationArgs::Inspect)],
        };
        entered.into_iter().map(|(key, asked)| history.invoke(process, key, asked)).collect()
    }
}

/// Fate of a store call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Fine,
    /// The call is executed after about a lease.
    Slow,
    /// The call returns an error, and is not executed.
    Refused(StoreErrorKind),
    /// The call gets no answer, and is not executed.
    Lost,
    /// The call is executed, and its answer gets lost.
    AnswerLost,
    /// The call gets no answer, and is executed some time later.
    Late,
    /// The call gets no answer for about a lease, and may be executed.
    Hangs,
}

/// Store of one simulated process.
#[derive(Clone)]
pub(crate) struct Line(Arc<Process>);

/// Line of a process that does not keep the process. The sender of a process has one, because the process keeps it.
pub(crate) struct WeakLine(Weak<Process>);

impl WeakLine {
    /// Reports whether the process is dead or gone.
    pub(crate) fn is_dead(&self) -> bool {
        self.0.upgrade().is_none_or(|process| process.dead.load(Ordering::SeqCst))
    }
}

struct Process {
    number: usize,
    inner: Arc<dyn Store>,
    context: StoreContext,
    net: Arc<Net>,
    dead: AtomicBool,
    /// Right that the process loses; `None` if the process keeps its rights.
    loss: Option<Loss>,
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Line({})", self.0.number)
    }
}

impl Line {
    /// Returns the line of process `number` to `inner`, which is the process's own handle.
    pub(crate) fn new(number: usize, inner: Arc<dyn Store>, net: Arc<Net>, loss: Option<Loss>) -> Self {
        let clock: Arc<dyn Clock> = match net.prank {
            DeliberateBreak::SlowClock => Arc::new(OddClock::new(net.clock.clone()).half_speed()),
            DeliberateBreak::OwnersRepeat => Arc::new(OddClock::new(net.clock.clone()).without_chance()),
            _ => Arc::new(net.clock.clone()),
        };
        if let Some(Loss { right, kind, from }) = loss {
            net.history().note(format!("process {number} loses {right:?} at {from}: {kind:?}"));
            let met = Met { cause: Cause::Right, process: Some(number), keys: None, from, to: u64::MAX };
            net.met.lock().unwrap().push(met);
        }
        let context = StoreContext::new("simulated", clock);
        Self(Arc::new(Process { number, inner, context, net, dead: AtomicBool::new(false), loss }))
    }

    pub(crate) fn loss(&self) -> Option<Loss> {
        self.0.loss
    }

    pub(crate) fn number(&self) -> usize {
        self.0.number
    }

    /// Kills the process: it sends no more requests, even while its parts are being dropped. Requests that are under
    /// way may still take effect.
    pub(crate) fn die(&self) {
        self.0.dead.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.0.dead.load(Ordering::SeqCst)
    }

    pub(crate) fn downgrade(&self) -> WeakLine {
        WeakLine(Arc::downgrade(&self.0))
    }

    async fn exchange(&self, request: Request) -> Result<Reply, StoreError> {
        let net = &self.0.net;
        if self.is_dead() {
            return std::future::pending().await;
        }
        let (ops, fate, longest) = self.send(&request);
        let is_renewal = matches!(request, Request::Renew(_));
        let mut flight = Flight { line: self, request: Some(request), ops: &ops };
        net.delay(longest).await;
        let done = match (fate, net.outage_of(self.number())) {
            _ if self.is_dead() => None,
            (Fate::Refused(_), _) if net.prank == DeliberateBreak::FailsAfterAll => Some(flight.land().await),
            (Fate::Refused(_) | Fate::Lost, _) => {
                flight.request = None;
                None
            }
            (_, Some(outage)) => {
                let request = flight.request.take().expect("not landed");
                outage.hold(net, self.clone(), request, ops.clone()).await
            }
            (Fate::Fine | Fate::Slow | Fate::AnswerLost, None) => Some(flight.land().await),
            (Fate::Hangs, None) if net.dice.chance(500) => Some(flight.land().await),
            (Fate::Late | Fate::Hangs, None) => None,
        };
        net.delay(longest).await;
        // A lost request takes effect late, or never.
        drop(flight);
        let arrives = match net.outage_of(self.number()) {
            Some(outage) => outage.lets_through(net).await,
            None => true,
        };
        if self.is_dead() {
            return std::future::pending().await;
        }
        let mut heard = self.hear(&ops, fate, done.filter(|_| arrives));
        if let (Ok(Reply::Writes(verdicts)), true, DeliberateBreak::RefusedRenewalsAreConfirmed) =
            (&mut heard, is_renewal, net.prank)
        {
            verdicts.fill(Verdict::Applied);
        }
        heard
    }

    /// Enters the operations of `request` in the history, and draws its fate and its longest delay in each direction.
    fn send(&self, request: &Request) -> (Vec<usize>, Fate, Duration) {
        let net = &self.0.net;
        let mut history = net.history();
        let ops = request.enter(&mut history, self.0.number);
        let fate = self.fate(request);
        let longest = if matches!(fate, Fate::Slow | Fate::Hangs) { net.weather.lease * 3 / 2 } else { Duration::ZERO };
        let longest = net.weather.calm + longest;
        if fate != Fate::Fine {
            let from = history.now();
            let keys = Some(ops.iter().map(|op| history.ops[*op].key).collect());
            let to = from + nanos(longest * 2);
            history.note(format!("process {}: {fate:?} for {} operations", self.0.number, ops.len()));
            let met = Met { cause: Cause::Line, process: Some(self.0.number), keys, from, to };
            net.met.lock().unwrap().push(met);
        }
        (ops, fate, longest)
    }

    /// Enters the end of the operations in the history, and returns the answer for the caller.
    fn hear(&self, ops: &[usize], fate: Fate, done: Option<LandedRequest>) -> Result<Reply, StoreError> {
        let mut history = self.0.net.history();
        let unknown = |why| StoreError::new(StoreErrorKind::Unconfirmed, why);
        let error = match (fate, done) {
            (Fate::Fine | Fate::Slow, Some((Ok(reply), at))) => {
                respond(&mut history, ops, &reply, at);
                return Ok(reply);
            }
            (Fate::Fine | Fate::Slow, Some((Err(error), _))) => error,
            (Fate::Refused(kind), _) => StoreError::new(kind, "refused"),
            _ => unknown("no answer"),
        };
        let end = if error.may_have_landed() { End::Unanswered } else { End::NothingDone(error.kind()) };
        for op in ops {
            history.respond(*op, end.clone());
        }
        Err(error)
    }

    /// Lets the store execute `request` now.
    pub(crate) async fn land(&self, request: &Request, ops: &[usize]) -> LandedRequest {
        let Process { inner, net, loss, number, .. } = &*self.0;
        let Some(refusal) = loss.and_then(|loss| loss.refuses(request, net.now())) else {
            return land(net, &**inner, *number, request, ops).await;
        };
        net.count("permanent refusals");
        let at = net.now();
        match net.prank {
            DeliberateBreak::RefusalsAreOutages => {
                (Err(StoreError::new(StoreErrorKind::Unavailable, "an outage")), (at, None))
            }
            _ => (Err(refusal), (at, None)),
        }
    }

    fn fate(&self, request: &Request) -> Fate {
        let net = &self.0.net;
        if !net.is_stormy() || !net.dice.chance(net.weather.faults) {
            return Fate::Fine;
        }
        let holds_result = matches!(
            request,
            Request::Finish(
                _,
                Finish::Completed(StoredResult::Encoded { .. }) | Finish::Failed(StoredResult::Encoded { .. })
            )
        );
        match net.dice.between(0, 15) {
            0..3 => Fate::Slow,
            3..6 => Fate::Refused(StoreErrorKind::Unavailable),
            6 => Fate::Refused(StoreErrorKind::Misconfigured),
            7 if holds_result => Fate::Refused(StoreErrorKind::TooLarge),
            7..9 => Fate::Lost,
            9..11 if net.weather.late => Fate::Late,
            9..14 => Fate::AnswerLost,
            _ => Fate::Hangs,
        }
    }
}

fn respond(history: &mut History, ops: &[usize], reply: &Reply, (at, said): (u64, Option<OperationAnswer>)) {
    match reply {
        Reply::Writes(writes) => {
            for (op, write) in ops.iter().zip(writes) {
                history.respond(*op, End::Answered { said: OperationAnswer::Write(*write), at });
            }
        }
        Reply::Decided(decided) => {
            history.respond(ops[0], End::Answered { said: OperationAnswer::Write(decided.clone().into()), at });
        }
        Reply::Reservation(_) | Reply::Inspection(_) => {
            let said = said.expect("the answer states the time of its effect");
            history.respond(ops[0], End::Answered { said, at });
        }
    }
}

/// Request under way. A request that is dropped before the store has executed it may take effect later.
struct Flight<'a> {
    line: &'a Line,
    request: Option<Request>,
    ops: &'a [usize],
}

impl Flight<'_> {
    /// Lets the store execute the request now. Returns the answer, and the time of the effect.
    async fn land(&mut self) -> LandedRequest {
        let request = self.request.take().expect("lands once");
        self.line.land(&request, self.ops).await
    }
}

/// Reports whether the last entry of `journal` is the beginning of a step.
fn ends_with_beginning(journal: &Journal) -> bool {
    let steps = journal.steps().expect("a journal of this release");
    steps.last().is_some_and(|step| step.state() == StepState::InDoubt)
}

/// Returns the answer of a deliberate break that confirms the request without executing it.
fn pretended(net: &Net, process: usize, request: &Request) -> Option<Reply> {
    match (net.prank, request) {
        (DeliberateBreak::FinishesNothing, Request::Finish(..))
        | (DeliberateBreak::ReleasesNothing, Request::Release(..))
        | (DeliberateBreak::AppendsNothing, Request::Append(..))
        | (DeliberateBreak::MarksNothing, Request::Begin(_)) => Some(Reply::Writes(vec![Verdict::Applied])),
        (DeliberateBreak::BeginningsAreDropped, Request::Append(_, journal)) if ends_with_beginning(journal) => {
            Some(Reply::Writes(vec![Verdict::Applied]))
        }
        (DeliberateBreak::ReleasesNothingAfterOutages, request) if frees(request) && net.was_cut_off(process) => {
            Some(Reply::Writes(vec![Verdict::Applied]))
        }
        (DeliberateBreak::ResolvesNothing, Request::Decide(Decision { action: Action::Resolve(_), .. })) => {
            Some(Reply::Decided(DecisionAnswer::Applied))
        }
        (DeliberateBreak::RenewsNothing | DeliberateBreak::ZombiesSend, Request::Renew(leases)) => {
            Some(Reply::Writes(vec![Verdict::Applied; leases.len()]))
        }
        (DeliberateBreak::StaleReads, Request::Reserve(request)) if net.dice.chance(300) => {
            net.stale.lock().unwrap().get(&request.key).cloned().map(Reply::Reservation)
        }
        _ => None,
    }
}

async fn land(net: &Net, store: &dyn Store, process: usize, request: &Request, ops: &[usize]) -> LandedRequest {
    let at = net.history().land(ops);
    let pretended = pretended(net, process, request);
    // A live lease refuses every decision except `BreakLease`, so the state before the request is noted for the check
    // below.
    let running = request.key().and_then(|key| Some((key, net.pending(key)?)));
    let is_live = |key: &Key| {
        let lapses_in = net.truth(key).and_then(|found| found.lapses_in);
        lapses_in.is_some_and(|left| !left.is_zero())
    };
    let spares = match request {
        Request::Decide(decision) if decision.action != Action::BreakLease && is_live(&decision.key) => Some(decision),
        _ => None,
    };
    let journal = |lease: &Lease| net.truth(&lease.key).and_then(|found| found.record.journal);
    let before = match request {
        Request::Append(lease, _) => journal(lease),
        _ => None,
    };
    let mut answer = match (pretended, net.prank, request) {
        (Some(reply), ..) => Ok(reply),
        (None, DeliberateBreak::DoubtsAreReleased, Request::Release(lease, Release::Interrupted)) => {
            Request::Release(lease.clone(), Release::Returned).ask(store).await
        }
        _ => request.ask(store).await,
    };
    match (net.prank, request, &mut answer) {
        (DeliberateBreak::MarksBeforeSending, Request::Finish(lease, _), Ok(_)) => {
            if let Some(found) = net.truth(&lease.key).filter(|found| found.unsent_messages().is_some()) {
                let _ = store.decide(&Decision::mark_sent(&lease.key, &found, None)).await;
            }
        }
        (DeliberateBreak::ZombiesSend, Request::Finish(..), Ok(Reply::Writes(verdicts))) => {
            *verdicts = vec![Verdict::Applied];
        }
        (
            DeliberateBreak::UnsentIsIgnored,
            _,
            Ok(
                Reply::Reservation(Reservation::Finished { record, .. })
                | Reply::Inspection(Some(Inspection { record, .. })),
            ),
        ) => *record = without_messages(Inspection::new(record.clone(), Duration::ZERO, None)),
        _ => {}
    }
    net.note_journal(request, before.as_ref());
    if let (Request::Begin(_), Ok(Reply::Writes(verdicts))) = (request, &answer) {
        net.history().ops[ops[0]].applied = verdicts[0] == Verdict::Applied;
    }
    if let Ok(Reply::Decided(DecisionAnswer::Applied)) = &answer {
        for op in ops {
            net.history().ops[*op].applied = true;
        }
        if let Some(decision) = spares.filter(|_| net.prank != DeliberateBreak::ResolvesNothing) {
            let text = format!("{decision:?} was applied while an attempt was running");
            net.trespasses.lock().unwrap().push((decision.key.clone(), text));
        }
    }
    // The request has ended an attempt, so waits for this attempt must end.
    if let Some((key, attempt)) = running
        && net.pending(key) != Some(attempt)
    {
        net.ended.lock().unwrap().insert((key.clone(), attempt), at);
    }
    // A new attempt has the number of an earlier attempt if the record was forgotten in between.
    if let Some((key, attempt)) = request.key().and_then(|key| Some((key, net.pending(key)?))) {
        net.ended.lock().unwrap().remove(&(key.clone(), attempt));
    }
    // The answer is converted to the form of the history.
    let said = match (&answer, request) {
        (Ok(Reply::Reservation(reservation)), Request::Reserve(request)) => {
            match reservation {
                Reservation::Granted { lease, in_doubt, .. } => {
                    let mut history = net.history();
                    let op = &mut history.ops[ops[0]];
                    (op.granted, op.in_doubt) = (Some(lease.attempt), *in_doubt);
                }
                _ => drop(net.stale.lock().unwrap().insert(request.key.clone(), reservation.clone())),
            }
            Some(net.history().reservation(reservation))
        }
        (Ok(Reply::Inspection(found)), _) => Some(net.history().inspection(found.as_ref())),
        _ => None,
    };
    if let (
        DeliberateBreak::ReconcilersRepeatTheNumber,
        Ok(Reply::Reservation(Reservation::Granted { lease, in_doubt: true, .. })),
    ) = (net.prank, &mut answer)
    {
        lease.attempt -= 1;
    }
    if let (DeliberateBreak::JournalsAreDropped, Ok(Reply::Reservation(Reservation::Granted { journal, .. }))) =
        (net.prank, &mut answer)
    {
        *journal = None;
    }
    (answer, (at, said))
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let Some(request) = self.request.take() else { return };
        let net = Arc::clone(&self.line.0.net);
        if let Some(outage) = net.outage_of(self.line.number()) {
            outage.keep(self.line.clone(), request, self.ops.to_vec());
            return;
        }
        if !net.weather.late || !net.is_stormy() || !net.dice.chance(500) {
            return;
        }
        let (from, longest) = (net.now(), net.weather.lease * 2);
        let keys = Some(self.ops.iter().map(|op| net.history().ops[*op].key).collect());
        let process = Some(self.line.number());
        let met = Met { cause: Cause::Line, process, keys, from, to: from + nanos(longest) };
        net.met.lock().unwrap().push(met);
        let (line, ops) = (self.line.clone(), self.ops.to_vec());
        let clock = net.clock.clone();
        clock.spawn(Box::pin(async move {
            net.delay(longest).await;
            // The caller is gone, so the answer is dropped.
            let _ = line.land(&request, &ops).await;
        }));
    }
}

impl Store for Line {
    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn namespace(&self) -> &'static str {
        ""
    }

    fn response_timeout(&self) -> Duration {
        Duration::ZERO
    }

    fn context(&self) -> &StoreContext {
        &self.0.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(async move {
            match self.exchange(Request::Reserve(request.clone())).await? {
                Reply::Reservation(reservation) => Ok(reservation),
                other => unreachable!("{other:?}"),
            }
        })
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move { self.exchange(Request::Begin(lease.clone())).await.map(one) })
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::renewed(answer, async move { self.exchange(Request::Renew(leases.to_vec())).await.map(writes) })
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move { self.exchange(Request::Append(lease.clone(), journal.clone())).await.map(one) })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let finish = match finish {
                Finish::Completed(StoredResult::Encoded { bytes, .. })
                    if self.0.net.prank == DeliberateBreak::ResultsAreLeftOut
                        && self.0.net.history().has_been_finished(lease) =>
                {
                    Finish::Completed(StoredResult::TooLarge { size: bytes.len() as u64 })
                }
                whole => whole.clone(),
            };
            self.exchange(Request::Finish(lease.clone(), finish)).await.map(one)
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move { self.exchange(Request::Release(lease.clone(), release)).await.map(one) })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let net = &self.0.net;
            net.delay(Duration::ZERO).await;
            if net.is_stormy() && net.dice.chance(net.weather.faults) {
                net.delay(net.weather.lease * 2).await;
                // The wait returns early, or fails.
                return match net.dice.chance(500) {
                    true => Ok(None),
                    false => Err(StoreError::new(StoreErrorKind::Unavailable, "can't wait")),
                };
            }
            if let Some(outage) = net.outage_of(self.number())
                && !outage.lets_through(net).await
            {
                return Err(StoreError::new(StoreErrorKind::Unavailable, "can't wait"));
            }
            let began = net.now();
            // A wait inside of a body is not polled after the body's lease has lapsed, so a late end of this wait is
            // not a mistake.
            let nested = current().is_ok();
            let waited = self.0.inner.wait(key, attempt, at_most).await;
            let now = net.now();
            let ended = net.ended.lock().unwrap().get(&(key.clone(), attempt)).copied();
            if let Some(ended) = ended
                && !nested
                && now > ended.max(began)
                && !net.jumped(ended.max(began), now)
            {
                let text = format!("attempt {attempt} ended at {ended}, process {} waited until {now}", self.number());
                net.overslept.lock().unwrap().push((key.clone(), text));
            }
            match net.outage_of(self.number()) {
                Some(outage) if !outage.lets_through(net).await => {
                    Err(StoreError::new(StoreErrorKind::Unavailable, "the wait broke off"))
                }
                _ => waited,
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            match self.exchange(Request::Inspect(key.clone())).await? {
                Reply::Inspection(found) => Ok(found),
                other => unreachable!("{other:?}"),
            }
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(async move {
            match self.exchange(Request::Decide(decision.clone())).await? {
                Reply::Decided(decided) => Ok(decided),
                other => unreachable!("{other:?}"),
            }
        })
    }

    fn purge(&self, batch: u32) -> StoreFuture<'_, u64> {
        self.0.inner.purge(batch)
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        StoreFuture::new(async move {
            let mut page = self.0.inner.list(filter).await?;
            // A store in memory lists in the order of a hash that each process chooses.
            page.records.sort_unstable_by(|(one, _), (other, _)| one.as_str().cmp(other.as_str()));
            Ok(page)
        })
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        self.0.inner.ping()
    }
}

fn writes(reply: Reply) -> Vec<Verdict> {
    match reply {
        Reply::Writes(writes) => writes,
        other => unreachable!("{other:?}"),
    }
}

fn one(reply: Reply) -> Verdict {
    writes(reply)[0]
}
