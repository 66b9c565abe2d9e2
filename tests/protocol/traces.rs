//! Random traces that compare the model with the real code: the model's store with the memory store, and the model's
//! calls with the engine.
//!
//! A failure prints the shortest trace that proptest finds, and a seed. `IDEM_PROTOCOL_SEED=…` runs the traces of that
//! seed again, and `IDEM_PROTOCOL_TIMES=10` runs ten times as many traces.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use idem_runtime::clock::{Clock, ManualClock, SystemClock};
use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
use idem_runtime::record::{Record, State, StoredResult};
use idem_runtime::store::{
    Action as Decided, Answers, Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Release, Reservation,
    ReserveRequest, StoreFuture, UnsentMessages, Verdict, forward, renew_all,
};
use idem_runtime::{
    Error, InProgress, Key, MemoryStore, Mode, OnCrash, OnError, OnStoreError, Operation, Outcome, Policy,
    Reconciliation, Store, StoreError, StoreErrorKind, StoreExt as _, current, observe,
};
use idem_tests::Reopen as _;
use proptest::bool::weighted;
use proptest::prelude::*;
use proptest::test_runner::{Config as Runner, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use serde::{Deserialize, Serialize};
use stateright::Model;
use tokio::sync::oneshot;

use super::config::{Config, Plan, Reaction};
use super::mutants::Mutant;
use super::state::{
    Answer, Append, Beat, CallId, Class, Done, Ending, Entry, GUARDED, Journal as ModelJournal, Line, MESSAGES, Mail,
    ModelResult, ModelState, Phase, Progress, ReleaseKind, Request, RequestKind, Slot, Stage, StepDecision, StepEnd,
    World, holder,
};
use super::steps::{Action, pending_request, store_does, take};
use super::store::{self, End, Reading, TICK, TTL};

/// Plans of four calls for two keys.
fn plans() -> impl Strategy<Value = Vec<Plan>> {
    let plan = (0..2_u8, proptest::option::of(1..3_u8), any::<bool>(), weighted(0.3), proptest::option::of(1..3_u8));
    proptest::collection::vec(plan, 4).prop_map(|plans| {
        let plan = |(key, mark, fail, asks, max_attempts)| Plan {
            key,
            mark,
            on_crash: if fail || asks { OnCrash::Fail } else { OnCrash::Retry },
            asks,
            max_attempts,
            ..Plan::default()
        };
        plans.into_iter().map(plan).collect()
    })
}

/// Step of a trace that compares stores.
#[derive(Clone, Copy, Debug)]
enum Step {
    Reserve(CallId),
    /// The latest request of a call arrives a second time.
    Again(CallId),
    Begin(CallId),
    Renew(CallId),
    /// The attempt of a call appends a journal with this number of entries of its own, and this last one.
    Append(CallId, u8, Progress),
    /// The attempt of a call finishes: whether it succeeds, whether its result is too large, and its messages.
    Finish(CallId, bool, bool, u8),
    Release(CallId, ReleaseKind),
    Reopen(u8, u8),
    /// An operator inspects a record.
    Look(u8),
    /// The operator decides about the steps of the record.
    Decide(u8, StepDecision),
    /// The operator replaces the result of the record, or drops its messages.
    Correct(u8, bool),
    /// A call that has seen the record marks its messages as sent, except for those in these places.
    MarkSent(u8, u8),
    Tick,
}

fn step() -> impl Strategy<Value = Step> {
    let who = || 0..4_u8;
    let how = prop_oneof![
        Just(ReleaseKind::Returned),
        Just(ReleaseKind::NotStarted),
        Just(ReleaseKind::Interrupted),
        Just(ReleaseKind::Unresolved),
    ];
    let progress = prop_oneof![Just(Progress::Begun), Just(Progress::Undone), Just(Progress::Ended)];
    let decision = prop_oneof![
        Just(StepDecision::Done),
        Just(StepDecision::NotDone),
        Just(StepDecision::FromFirst),
        Just(StepDecision::WithoutSteps),
    ];
    prop_oneof![
        5 => who().prop_map(Step::Reserve),
        1 => who().prop_map(Step::Again),
        3 => who().prop_map(Step::Begin),
        2 => who().prop_map(Step::Renew),
        3 => (who(), 1..3_u8, progress).prop_map(|(who, entries, last)| Step::Append(who, entries, last)),
        2 => (who(), any::<bool>(), any::<bool>(), 0..=MESSAGES)
            .prop_map(|(who, ok, large, pushed)| Step::Finish(who, ok, large, pushed)),
        3 => (who(), how).prop_map(|(who, how)| Step::Release(who, how)),
        1 => (0..2_u8, 0..2_u8).prop_map(|(key, off)| Step::Reopen(key, off)),
        2 => (0..2_u8).prop_map(Step::Look),
        2 => (0..2_u8, decision).prop_map(|(key, decision)| Step::Decide(key, decision)),
        1 => (0..2_u8, any::<bool>()).prop_map(|(key, drops)| Step::Correct(key, drops)),
        2 => (0..2_u8, 0..4_u8).prop_map(|(key, left)| Step::MarkSent(key, left)),
        3 => Just(Step::Tick),
    ]
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().unwrap()
}

fn new_seed() -> u64 {
    u64::try_from(SystemClock::default().entropy() >> 64).expect("the upper half")
}

/// Runs `cases` random traces. A failure prints the seed that runs them again.
fn many<S: Strategy>(cases: u32, traces: &S, compare: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let seed: u64 =
        std::env::var("IDEM_PROTOCOL_SEED").map_or_else(|_| new_seed(), |text| text.parse().expect("a whole number"));
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_be_bytes());
    let times: u32 = std::env::var("IDEM_PROTOCOL_TIMES").map_or(1, |text| text.parse().expect("a whole number"));
    let config = Runner { cases: cases.saturating_mul(times), failure_persistence: None, ..Runner::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    if let Err(error) = TestRunner::new_with_rng(config, rng).run(traces, compare) {
        panic!("{error}\nrun again with IDEM_PROTOCOL_SEED={seed}");
    }
}

/// The model's store gives the same answers as the memory store, and holds the same records.
#[test]
fn the_models_store_agrees_with_the_memory_store() {
    let runtime = runtime();
    let traces = (plans(), proptest::collection::vec(step(), 1..60));
    many(1_000, &traces, |(plans, steps)| runtime.block_on(agrees(&Config::of(&plans), &steps)));
}

/// A model's store with a mistake gives different answers, which shows that the comparison can fail.
#[test]
fn a_modelled_store_with_a_mistake_disagrees_with_the_memory_store() {
    use Mutant::{
        AppendAfterFinish, AppendAfterRelease, AppendAnyAttempt, AppendAnybodys, BegunByAnybody, FailOfCallerIgnored,
        FailOfOwnerIgnored, FingerprintSkippedAtReplay, FingerprintSkippedAtTakeover, FinishAnyAttempt, FinishAnybodys,
        FinishOverFinished, InterruptedRunsAgain, LapsedOwnerRefused, LapsedStaysLive, LiveTakenOver, MarkOfAnyAttempt,
        MarkReplacesList, MarkedAfterLapse, MaxAttemptsIgnored, OwnReservationIsForeign, RefundRepeated,
        RefusedAppendExtends, ReleaseAnybodys, ReleaseDropsJournal, ReleaseForgets, ReleaseOverFinished,
        RenewAnyAttempt, RenewAnybodys, ReopenDropsJournal, ReopenForgetsNumber, ReopenLive, RepeatedFinishBringsBack,
        RepeatedFinishRefused, RepeatedReleaseRefused, ReplaceDropsMessages, ReserveOverFinished,
        ShorterJournalReplaces, StepsDecidedWhileRunning, TakeoverDropsJournal, TakeoverKeepsNumber,
        TakeoverKeepsToken,
    };
    let runtime = runtime();
    // These mistakes change an answer of the store, or a record.
    for mutant in [
        AppendAfterFinish,
        AppendAfterRelease,
        AppendAnyAttempt,
        AppendAnybodys,
        BegunByAnybody,
        FailOfCallerIgnored,
        FailOfOwnerIgnored,
        MarkedAfterLapse,
        FingerprintSkippedAtReplay,
        FingerprintSkippedAtTakeover,
        FinishAnyAttempt,
        FinishAnybodys,
        FinishOverFinished,
        InterruptedRunsAgain,
        LapsedOwnerRefused,
        LapsedStaysLive,
        LiveTakenOver,
        MarkOfAnyAttempt,
        MarkReplacesList,
        MaxAttemptsIgnored,
        OwnReservationIsForeign,
        RefundRepeated,
        RefusedAppendExtends,
        ReleaseAnybodys,
        ReleaseDropsJournal,
        ReleaseForgets,
        ReleaseOverFinished,
        RenewAnyAttempt,
        RenewAnybodys,
        ReopenDropsJournal,
        ReopenForgetsNumber,
        ReopenLive,
        RepeatedFinishBringsBack,
        RepeatedFinishRefused,
        RepeatedReleaseRefused,
        ReplaceDropsMessages,
        ReserveOverFinished,
        ShorterJournalReplaces,
        StepsDecidedWhileRunning,
        TakeoverDropsJournal,
        TakeoverKeepsNumber,
        TakeoverKeepsToken,
    ] {
        let config = Runner { cases: 20_000, max_shrink_iters: 0, failure_persistence: None, ..Runner::default() };
        let traces = (plans(), proptest::collection::vec(step(), 1..60));
        let result = TestRunner::new(config)
            .run(&traces, |(plans, steps)| runtime.block_on(agrees(&Config::of(&plans).with(mutant), &steps)));
        assert!(result.is_err(), "{mutant:?} makes no difference");
    }
}

/// Numbers of the attempt and of the starts in a lease.
fn numbers(lease: &Lease) -> (u8, u8) {
    let small = |number: u32| number.try_into().expect("numbers of the model are small");
    (small(lease.attempt), small(lease.attempts_used))
}

/// Reservation that a call of a trace has got: its lease, and the journal of earlier attempts.
struct Grant {
    lease: Lease,
    journal: ModelJournal,
}

impl Grant {
    /// Returns the grant of a call that has got no reservation yet.
    fn none(request: &ReserveRequest) -> Self {
        Self { lease: Record::first(request).lease(request), journal: ModelJournal::EMPTY }
    }

    /// Keeps a reservation that the store has granted.
    fn note(&mut self, found: &Reservation) {
        if let (Reservation::Granted { lease, .. }, Answer::Reserved { journal, .. }) = (found, store::answer(found)) {
            *self = Self { lease: lease.clone(), journal };
        }
    }

    /// Returns the journal of the attempt after its own first `entries` entries, the last of which has this progress.
    fn appended(&self, who: CallId, entries: u8, last: Progress) -> ModelJournal {
        let (mut journal, (attempt, _)) = (self.journal, numbers(&self.lease));
        // The last entry is one of the first step, about which operators decide.
        for step in (0..entries).rev() {
            let progress = if step == 0 { last } else { Progress::Ended };
            journal.add(Entry { step, token: who, attempt, progress });
        }
        journal
    }
}

async fn agrees(config: &Config, steps: &[Step]) -> Result<(), TestCaseError> {
    let clock = ManualClock::new();
    let real = MemoryStore::options().clock(clock.clone()).build();
    let (mut slots, mut now) = ([None; 2], 0);
    let mut sights = [const { None }; 2];
    let mut grants: Vec<_> = config.requests.iter().map(Grant::none).collect();
    for step in steps {
        let key_of = |who: CallId| usize::from(config.plans[usize::from(who)].key);
        let reading = Reading { now, skew: None };
        // Both stores execute the step, and must give the same answer.
        match *step {
            Step::Reserve(who) | Step::Again(who) => {
                let found = real.reserve(&config.requests[usize::from(who)]).await.unwrap();
                if matches!(step, Step::Reserve(_)) {
                    grants[usize::from(who)].note(&found);
                }
                let modelled = store::reserves(config, &mut slots[key_of(who)], who, (None, true), reading);
                prop_assert_eq!(modelled, store::answer(&found), "{:?}", step);
            }
            Step::Begin(who) => {
                let lease = &grants[usize::from(who)].lease;
                let found = real.begin(lease).await.unwrap();
                let modelled = store::begins(config, &mut slots[key_of(who)], who, numbers(lease).0, reading);
                prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
            }
            Step::Renew(who) => {
                let lease = &grants[usize::from(who)].lease;
                let found = renew_all(&real, std::slice::from_ref(lease)).await.unwrap();
                let modelled = store::renews(config, &mut slots[key_of(who)], who, numbers(lease).0, reading);
                prop_assert_eq!(modelled, Done::from(found[0]), "{:?}", step);
            }
            Step::Append(who, entries, last) => {
                let grant = &grants[usize::from(who)];
                let journal = grant.appended(who, entries, last);
                let found = real.append(&grant.lease, &journal.written().expect("an entry")).await.unwrap();
                let appended = (numbers(&grant.lease).0, journal);
                let modelled = store::appends(config, &mut slots[key_of(who)], who, appended, reading);
                prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
            }
            Step::Finish(who, ok, large, pushed) => {
                let kept = if large { ModelResult::TooLarge(who) } else { ModelResult::Stored(who) };
                let lease = &grants[usize::from(who)].lease;
                let found = real.finish(lease, &finish((kept, ok), numbers(lease).0, pushed)).await.unwrap();
                let end = End::finish(kept, ok, numbers(lease), now).with_messages(pushed);
                let modelled = store::ends(config, &mut slots[key_of(who)], who, end);
                prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
            }
            Step::Release(who, how) => {
                let found = real.release(&grants[usize::from(who)].lease, how.release()).await.unwrap();
                let modelled = store::ends(config, &mut slots[key_of(who)], who, End::release(how, now));
                prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
            }
            Step::Reopen(key, off) => {
                let attempt = slots[usize::from(key)].map_or(1, |slot: Slot| slot.attempt) + off;
                let found = real.reopen(&key_named(key), attempt.into()).await.unwrap();
                let slot = &mut slots[usize::from(key)];
                let seen = slot.map(|slot| store::sees(key, 0, Slot { attempt, ..slot }, reading));
                let modelled = seen.map_or(Verdict::Refused, |seen| store::reopens(config, slot, &seen, None, reading));
                prop_assert_eq!(modelled, found, "{:?}", step);
            }
            Step::Look(key) => {
                let found = real.inspect(&key_named(key)).await.unwrap();
                let seen = slots[usize::from(key)].map(|slot| store::sees(key, 0, slot, reading));
                sights[usize::from(key)] = found.zip(seen);
            }
            Step::Decide(key, decision) => {
                let Some((found, seen)) = &sights[usize::from(key)] else { continue };
                let Some(journal) = store::decided_journal(&seen.slot.journal, decision) else { continue };
                let decided = Decision::reopen_with(&key_named(key), found, journal.written());
                let found = Verdict::from(real.decide(&decided).await.unwrap());
                let slot = &mut slots[usize::from(key)];
                let modelled = store::reopens(config, slot, seen, Some(decision), reading);
                prop_assert_eq!(modelled, found, "{:?}", step);
            }
            Step::Correct(key, drops) => {
                let Some((found, seen)) = &sights[usize::from(key)] else { continue };
                if seen.slot.result().is_none() {
                    continue;
                }
                let decided = Decision::new(&key_named(key), found, correction(drops));
                let found = Verdict::from(real.decide(&decided).await.unwrap());
                let modelled = store::corrects(config, &mut slots[usize::from(key)], seen, drops);
                prop_assert_eq!(modelled, found, "{:?}", step);
            }
            Step::MarkSent(key, places) => {
                let Some((found, sight)) = &sights[usize::from(key)] else { continue };
                let Some((seen, mail)) = store::inspects(Some(sight.slot)) else { continue };
                if sight.slot.result().is_none() {
                    continue;
                }
                let left = Mail::of(mail.by, mail.places & places);
                let decided = Decision::mark_sent(&key_named(key), found, store::messages(left));
                let found = Verdict::from(real.decide(&decided).await.unwrap());
                let modelled = store::marks_sent(config, &mut slots[usize::from(key)], seen, left, reading);
                prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
            }
            Step::Tick => {
                clock.advance(TICK);
                now += 1;
            }
        }
        // After each step the model's store and the memory store must hold the same records.
        for (key, slot) in (0..).zip(&slots) {
            let found = real.inspect(&key_named(key)).await.unwrap();
            let modelled = slot.map(|slot| slot.record(config.lease));
            prop_assert_eq!(found.as_ref().map(|it| &it.record), modelled.as_ref());
            // A record must survive the conversion to small numbers and back.
            let back = found.as_ref().map(|it| Slot::of(&it.record, slot.map_or(0, |slot| slot.lapses_at)));
            prop_assert_eq!(back, slot.map(|slot| Slot { revived: 0, ..slot }));
            let left = found.and_then(|it| it.lapses_in);
            let modelled =
                slot.filter(Slot::is_pending).map(|slot| TICK * u32::from(slot.lapses_at.saturating_sub(now)));
            prop_assert_eq!(left, modelled);
        }
    }
    Ok(())
}

/// End of an attempt with its first `pushed` messages.
fn finish((kept, ok): (ModelResult, bool), attempt: u8, pushed: u8) -> Finish {
    let result = store::payload_with(kept, Mail::pushed(attempt, pushed), false);
    if ok { Finish::Completed(result) } else { Finish::Failed(result) }
}

/// Action of an operator who replaces a result, or drops messages.
fn correction(drops: bool) -> Decided {
    match drops {
        true => Decided::DropMessages,
        false => Decided::Replace(Finish::Completed(store::payload(store::REPLACED))),
    }
}

/// Messages that a finish records.
fn recorded(finish: &Finish) -> Mail {
    let owner = Record::first(&store::reserve(0, &Plan::default(), 1)).owner;
    store::mail(&Record::new(owner, 1, State::Completed(finish.result().clone())))
}

fn key_named(key: u8) -> Key {
    Key::new("model", u32::from(key)).unwrap()
}

/// Request of the engine to its store, and the channel through which the trace returns the answer.
#[derive(Debug)]
struct EngineRequest {
    what: Real,
    verdict: oneshot::Sender<Fate>,
}

/// Request that the engine has made.
#[derive(Clone, Debug)]
enum Real {
    Reserve(ReserveRequest),
    Begin(Lease),
    Renew(Vec<Lease>),
    Append(Lease, Journal),
    Finish(Lease, Finish),
    Release(Lease, Release),
    Inspect,
    /// A decision that marks messages as sent.
    Mark(Decision),
}

impl Real {
    /// Reports whether this is the request `ask` of the model.
    fn is(&self, ask: RequestKind) -> bool {
        match (self, ask) {
            (Self::Reserve(request), RequestKind::Reserve { asks, .. }) => {
                request.max_reconciliations.is_some() == asks
            }
            (Self::Begin(lease), RequestKind::Begin { attempt, .. }) => numbers(lease).0 == attempt,
            (Self::Renew(leases), RequestKind::Renew { attempt, .. }) => {
                leases.iter().all(|lease| numbers(lease).0 == attempt)
            }
            (Self::Append(lease, journal), RequestKind::Append { attempt, journal: modelled, .. }) => {
                numbers(lease).0 == attempt && entries(Some(journal)) == usize::from(modelled.len())
            }
            (Self::Finish(lease, finish), RequestKind::Finish { ok, kept, attempt, pushed, .. }) => {
                let is_stored = |kept| matches!(kept, ModelResult::Stored(_));
                numbers(lease).0 == attempt
                    && matches!(finish, Finish::Completed(_)) == ok
                    && is_stored(store::kept(finish.result())) == is_stored(kept)
                    && recorded(finish) == Mail::pushed(attempt, pushed)
            }
            (Self::Inspect, RequestKind::Inspect) => true,
            (Self::Mark(decision), RequestKind::Mark { seen, left }) => {
                let Decided::MarkSent(messages) = &decision.action else { return false };
                let bodies = messages.iter().flat_map(UnsentMessages::messages);
                let sent: Vec<_> = bodies.map(|unsent| unsent.message().body().to_vec()).collect();
                let expected = (0..MESSAGES).filter(|place| left.has(*place)).map(|place| vec![left.by, place]);
                decision.seen.attempt() == u32::from(seen.attempt) && expected.eq(sent)
            }
            (Self::Release(_, release), RequestKind::Release(how)) => *release == how.release(),
            _ => false,
        }
    }

    /// Lets the memory store execute the request. The engine gets no answer.
    async fn arrives(&self, store: &MemoryStore) {
        match self {
            Self::Reserve(request) => drop(store.reserve(request).await.unwrap()),
            Self::Begin(lease) => drop(store.begin(lease).await.unwrap()),
            Self::Renew(leases) => drop(renew_all(store, leases).await.unwrap()),
            Self::Append(lease, journal) => drop(store.append(lease, journal).await.unwrap()),
            Self::Finish(lease, finish) => drop(store.finish(lease, finish).await.unwrap()),
            Self::Release(lease, release) => drop(store.release(lease, *release).await.unwrap()),
            Self::Inspect => {}
            Self::Mark(decision) => drop(store.decide(decision).await.unwrap()),
        }
    }
}

/// Name of the steps of the engine's body, as a journal has it.
const STEP: &str = "part";

/// Journal, in version 1, of an attempt whose first step has begun.
fn begun_journal(attempt: u8) -> Journal {
    const BEGUN: u8 = 4;
    let name = format!("{STEP}[{GUARDED}]");
    let length = u8::try_from(name.len()).expect("a short name");
    let parts = [&[1, 0, length], name.as_bytes(), &[0, 0, 0, attempt], &[0, BEGUN]];
    Journal::new(parts.concat()).expect("an entry")
}

/// Number of entries of a journal that the engine has written.
fn entries(journal: Option<&Journal>) -> usize {
    let name = format!("{STEP}[");
    journal.map_or(0, |journal| journal.bytes().windows(name.len()).filter(|part| *part == name.as_bytes()).count())
}

/// Fate of a request.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Done,
    /// The store executes the request, and the answer is lost.
    DoneUnheard,
    Failed(StoreErrorKind),
}

/// Message that the engine sends, and the channel through which the trace confirms the message.
#[derive(Debug)]
struct EngineMessage {
    body: Vec<u8>,
    confirmed: oneshot::Sender<bool>,
}

/// Broker of the engine. The trace confirms each message, or reports an error.
#[derive(Clone, Default, Debug)]
struct ScriptedBroker(Arc<Mutex<Vec<EngineMessage>>>);

impl Sender for ScriptedBroker {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let (confirmed, answer) = oneshot::channel();
            self.0.lock().unwrap().push(EngineMessage { body: message.body().to_vec(), confirmed });
            match answer.await {
                Ok(true) => Ok(()),
                _ => Err("failed by the trace".into()),
            }
        })
    }

    /// The model has no time limit for a message.
    fn timeout(&self) -> Duration {
        TTL
    }
}

/// Store of the engine. The trace answers, delays or loses each request to this store.
#[derive(Clone, Debug)]
struct Scripted {
    inner: MemoryStore,
    desk: Arc<Mutex<Vec<EngineRequest>>>,
}

impl Scripted {
    fn ask<'a, T: Send + 'a>(
        &self,
        what: Real,
        inner: impl Future<Output = Result<T, StoreError>> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let desk = Arc::clone(&self.desk);
        StoreFuture::new(async move {
            // The request is made at the first poll: the engine polls a write once to find out whether the store
            // answers immediately.
            let (verdict, decided) = oneshot::channel();
            desk.lock().unwrap().push(EngineRequest { what, verdict });
            let failed = |kind| StoreError::new(kind, "failed by the trace");
            match decided.await.unwrap_or(Fate::Failed(StoreErrorKind::Unavailable)) {
                Fate::Done => inner.await,
                Fate::DoneUnheard => {
                    inner.await?;
                    Err(failed(StoreErrorKind::Unconfirmed))
                }
                Fate::Failed(kind) => Err(failed(kind)),
            }
        })
    }
}

impl Store for Scripted {
    forward! { |store| store.inner => namespace, response_timeout, context, wait, purge, list, ping }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        self.ask(Real::Reserve(request.clone()), async move { self.inner.reserve(request).await })
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        self.ask(Real::Begin(lease.clone()), async move { self.inner.begin(lease).await })
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        let renewed = self.ask(Real::Renew(leases.to_vec()), async move { renew_all(&self.inner, leases).await });
        StoreFuture::renewed(answer, renewed)
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        self.ask(Real::Append(lease.clone(), journal.clone()), async move { self.inner.append(lease, journal).await })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        self.ask(Real::Finish(lease.clone(), finish.clone()), async move { self.inner.finish(lease, finish).await })
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        self.ask(Real::Release(lease.clone(), release), async move { self.inner.release(lease, release).await })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        self.ask(Real::Inspect, async move { self.inner.inspect(key).await })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        self.ask(Real::Mark(decision.clone()), async move { self.inner.decide(decision).await })
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum Failure {
    OfTheBody,
    /// Error of a step whose effect is in doubt.
    Doubtful,
    #[serde(skip)]
    Refused(Option<Class>),
}

impl Failure {
    fn is_doubtful(&self) -> bool {
        matches!(self, Self::Doubtful)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Refused(match error {
            Error::InProgress { .. } => Some(Class::InProgress),
            Error::FingerprintMismatch { .. } => Some(Class::Mismatch),
            Error::Interrupted { ask_again: Some(_), .. } => Some(Class::Unresolved),
            Error::Interrupted { .. } => Some(Class::Interrupted),
            Error::AttemptsExhausted { .. } => Some(Class::Exhausted),
            Error::LeaseLost { .. } => Some(Class::LeaseLost),
            Error::Unrecorded { .. } => Some(Class::Unrecorded),
            Error::Store { .. } => Some(Class::StoreFailed),
            Error::Unsent { .. } => Some(Class::Unsent),
            Error::TimedOut { .. } => Some(Class::TimedOut),
            // The store replays another call's result, which the engine can't decode.
            Error::ResultUnavailable { .. } => Some(Class::Replayed),
            _ => None,
        })
    }
}

/// Policy of a plan.
fn policy(config: &Config, plan: &Plan) -> Policy {
    // `max_pause` is long, because in the model no outage cancels a body that waits.
    let policy = Policy::new(TTL).lease(TICK * u32::from(config.lease)).on_crash(plan.on_crash).max_pause(TTL);
    let policy = policy.max_reconciliations(99);
    let policy = match plan.wait {
        Some(limit) => policy.in_progress(InProgress::Wait(TICK * u32::from(limit))),
        None => policy,
    };
    let policy = match plan.timeout {
        Some(timeout) => policy.timeout(TICK * u32::from(timeout)),
        None => policy,
    };
    let policy = if plan.open { policy.on_store_error(OnStoreError::Run) } else { policy };
    let policy = if plan.shadow { policy.mode(Mode::Shadow) } else { policy };
    match plan.max_attempts {
        Some(max) => policy.max_attempts(max.into()),
        None => policy,
    }
}

type Ended = (Result<u32, Failure>, Outcome);

/// Call of the engine, compared with call 0 of the model. The test makes the requests of the other calls itself.
struct Pair<'a> {
    config: &'a Config,
    world: World,
    clock: ManualClock,
    store: Scripted,
    call: Option<Pin<Box<dyn Future<Output = Ended>>>>,
    ended: Option<Ended>,
    body: Option<oneshot::Sender<bool>>,
    /// Result that the body returns at its next poll; `None` if the body stays pending.
    returns: Option<bool>,
    reconciler: Option<oneshot::Sender<Settled>>,
    /// Answer of the reconciler at its next poll; `None` if the reconciler stays pending.
    settles: Option<Settled>,
    /// True if the body has started in the model.
    ran: bool,
    started: Arc<Mutex<bool>>,
    /// Behaviour of the first step of the body, if its beginning is journaled.
    script: Script,
    /// Late requests of the model, each with the corresponding request of the engine.
    late: Vec<(Request, Real)>,
    main: Option<EngineRequest>,
    beat: Option<EngineRequest>,
    append: Option<EngineRequest>,
    broker: ScriptedBroker,
    /// Message that the engine is sending.
    message: Option<EngineMessage>,
    faults: u8,
}

/// Answer of a reconciler.
#[derive(Clone, Copy, Debug)]
enum Settled {
    Done,
    NotDone,
    Unknown,
}

/// Ends of the body and of the reconciler of the first step.
#[derive(Clone, Copy, Debug)]
struct Script {
    end: StepEnd,
    settled: Settled,
}

impl Script {
    fn end(self, step: u8) -> Result<u8, Failure> {
        match self.end {
            StepEnd::Value => Ok(step),
            StepEnd::Error => Err(Failure::OfTheBody),
            StepEnd::Doubtful => Err(Failure::Doubtful),
        }
    }

    fn answer(self, step: u8) -> Reconciliation<u8> {
        match self.settled {
            Settled::Done => Reconciliation::Done(step),
            Settled::NotDone => Reconciliation::NotDone,
            Settled::Unknown => Reconciliation::Unknown { ask_again: TICK },
        }
    }
}

/// Next step of a trace.
#[derive(Clone, Copy, Debug)]
enum Move {
    /// Lets the reconciler answer at its next poll.
    Settle(Settled),
    Answer,
    LoseAnswer,
    LoseRequest,
    TurnAway,
    RefuseForGood,
    AnswerAppend,
    LoseAppendAnswer,
    LoseAppend,
    TurnAppendAway,
    RefuseAppendForGood,
    Drop,
    /// Lets the body return at its next poll.
    Return(bool),
    /// The broker confirms a message.
    Confirm,
    /// A message arrives, and the broker does not confirm it.
    Unconfirm,
    /// A message never arrives.
    LoseMessage,
    AnswerBeat,
    FailBeat,
    Arrive(usize),
    Lose(usize),
    OtherReserves(CallId),
    /// The attempt of another call journals that its first step begins.
    OtherBegins(CallId),
    OtherFinishes(CallId),
    OtherReleases(CallId),
    /// An operator reopens the record, or discards its result.
    Reopen,
    /// An operator replaces the result of the record, or drops its messages.
    Correct(bool),
    Tick,
}

impl<'a> Pair<'a> {
    fn new(config: &'a Config, script: Script) -> Self {
        let clock = ManualClock::seeded(7);
        let broker = ScriptedBroker::default();
        let inner = MemoryStore::options().clock(clock.clone()).build().with_sender(broker.clone());
        let store = Scripted { inner, desk: Arc::default() };
        let apart = config.apart;
        let plan = config.plans[0];
        let operation = Operation::new(&store, Ok(key_named(plan.key)), policy(config, &plan));
        let (body, returned) = oneshot::channel();
        let started = Arc::new(Mutex::new(false));
        let starts = Arc::clone(&started);
        let decide = move |_: &Failure| match plan {
            Plan { doubts: true, .. } => OnError::Uncertain,
            Plan { record_errors: true, .. } => OnError::Record,
            _ => OnError::Release,
        };
        let run = async move {
            *starts.lock().unwrap() = true;
            for step in 0..plan.steps {
                let attempt = current().expect("inside of a handler");
                let described = attempt.step((STEP, step));
                // The body goes on after a step that returns an error.
                let _ = match plan.reaction {
                    Reaction::Fail if plan.guards(step) => {
                        described.fail().uncertain_errors_if(Failure::is_doubtful).run(async |_| script.end(step)).await
                    }
                    Reaction::Reconcile if plan.guards(step) => {
                        let described = described.reconcile(async |_| Ok(script.answer(step)));
                        described.uncertain_errors_if(Failure::is_doubtful).run(async |_| script.end(step)).await
                    }
                    _ => described.run(async |_| Ok::<u8, Failure>(step)).await,
                };
            }
            for place in 0..plan.messages {
                let attempt = current().expect("inside of a handler");
                let number = u8::try_from(attempt.number()).expect("few attempts");
                let message = OutgoingMessage::new(vec![number, place]);
                attempt.outbox().push(&store::destination(place, apart), message).expect("a small message");
            }
            match returned.await {
                Ok(true) => Ok(7),
                _ => Err(Failure::OfTheBody),
            }
        };
        let operation = operation.record_errors_if(decide);
        let (reconciler, settled) = oneshot::channel();
        let call: Pin<Box<dyn Future<Output = Ended>>> = match plan.asks {
            true => {
                let reconciler = async move {
                    Ok(match settled.await {
                        Ok(Settled::Done) => Reconciliation::Done(7),
                        Ok(Settled::NotDone) => Reconciliation::NotDone,
                        Ok(Settled::Unknown) | Err(_) => Reconciliation::Unknown { ask_again: TICK },
                    })
                };
                Box::pin(observe(operation.reconcile(reconciler).run(run)))
            }
            false => Box::pin(observe(operation.run(run))),
        };
        let mut world = config.init_states().remove(0);
        take(config, &mut world, Action::Deliver(0));
        Self {
            config,
            world,
            clock,
            store,
            call: Some(call),
            ended: None,
            body: Some(body),
            returns: None,
            reconciler: Some(reconciler),
            settles: None,
            ran: false,
            started,
            script,
            late: Vec::new(),
            main: None,
            beat: None,
            append: None,
            broker,
            message: None,
            faults: 0,
        }
    }

    fn phase(&self) -> Phase {
        self.world.call(0).phase
    }

    /// Makes one of the possible steps for each of `choices`. After each step the engine and the model must agree.
    async fn follows(&mut self, choices: &[u8], note: impl Fn(&Self)) -> Result<(), TestCaseError> {
        self.meet().await?;
        let mut made = Vec::new();
        for choice in choices {
            let moves = self.moves();
            let it = moves[usize::from(*choice) % moves.len()];
            made.push(it);
            self.make(it).await;
            let met = self.meet().await;
            note(self);
            met.map_err(|error| TestCaseError::fail(format!("after {made:?}: {error}")))?;
        }
        Ok(())
    }

    /// Counts what the step and the messages of the model's call are doing.
    fn note_stages(&self, seen: &mut BTreeMap<&'static str, u32>) {
        let steps = self.world.call(0).steps;
        let last = steps.journal.latest(GUARDED).map(|entry| entry.progress);
        let other = steps.journal.entries().any(|entry| holder(entry.token) > 0);
        let interrupted = Ending::Release(ReleaseKind::Interrupted);
        let ends = matches!(self.phase(), Phase::Ending { ending, .. } if ending == interrupted);
        let facts = [
            (steps.stage == Stage::Begins { again: false }, "begins"),
            (steps.stage == Stage::Begins { again: true }, "begins again"),
            (last == Some(Progress::Undone), "undone"),
            (steps.interrupts || (ends && self.config.plans[0].reaction == Reaction::Fail), "interrupts"),
            (other && last == Some(Progress::Ended), "reconciled"),
        ];
        let slot = self.world.slots[0];
        let messages = match self.phase() {
            Phase::Sending { post } => {
                [(post.ran, "sends"), (!post.ran, "sends for another"), (post.blocked > 0, "goes past a failure")]
            }
            Phase::MarkingSent { post, .. } => [
                (post.left() == Mail::NONE, "marks all"),
                (post.left() != Mail::NONE, "marks a part"),
                (slot.is_some_and(|slot| slot.decisions > post.seen.decisions), "corrected"),
            ],
            _ => [(false, ""); 3],
        };
        for (_, what) in facts.into_iter().chain(messages).filter(|(is, _)| *is) {
            *seen.entry(what).or_default() += 1;
        }
    }

    fn does(&mut self, action: Action) {
        take(self.config, &mut self.world, action);
    }

    /// Steps that the model can take now.
    fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        self.config.actions(&self.world, &mut actions);
        actions
    }

    /// Lets the engine run until it waits, and collects the requests that it has made.
    async fn settle(&mut self) {
        for _ in 0..12 {
            if let Some(call) = &mut self.call {
                let polled = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
                if let Poll::Ready(ended) = polled {
                    (self.ended, self.call) = (Some(ended), None);
                }
            }
            tokio::task::yield_now().await;
        }
    }

    /// Runs the engine and the model until both wait for the trace, and compares them.
    async fn meet(&mut self) -> Result<(), TestCaseError> {
        // The engine retries after a pause, which the model doesn't have. All pauses together are shorter than a tick.
        for _ in 0..4 {
            self.settle().await;
            self.follow_body();
            self.collect()?;
            if let Phase::Waiting { until, woken, .. } = self.phase()
                && (woken || until <= self.world.now)
            {
                self.stops_waiting();
                continue;
            }
            let asks = self.main.is_some() || pending_request(self.config, &self.world, 0).is_none();
            let sends = matches!(self.phase(), Phase::Sending { .. }) == self.message.is_some();
            if asks && sends && self.append.is_some() == self.appends() {
                break;
            }
            let pause = self.clock.next_wake().filter(|pause| *pause < TICK / 2);
            self.clock.advance(pause.unwrap_or_default());
        }
        self.compare().await
    }

    /// Reports whether the model's body awaits the answer to an append.
    fn appends(&self) -> bool {
        matches!(self.world.call(0).steps.append, Append::Sent { .. })
    }

    /// Keeps the engine's append, whose body is gone or no longer waits, as a late request.
    fn keep_append(&mut self) {
        if let Some(asked) = self.append.take()
            && let Some(request) = self.world.net.iter().find(|it| asked.what.is(it.ask))
        {
            self.late.push((*request, asked.what));
        }
    }

    /// Ends the wait of the model's call: by `IsTold` if the record already decides about the call, and otherwise by a
    /// new reservation.
    fn stops_waiting(&mut self) {
        let told = Action::IsTold(0);
        self.does(if self.actions().contains(&told) { told } else { Action::StopsWaiting(0) });
    }

    /// Drops the values of the model's body. The engine drops the values and sends the release in one step.
    fn loses_values(&mut self) {
        if matches!(self.phase(), Phase::Dropping { .. }) {
            self.does(Action::LosesValues(0));
        }
    }

    /// Takes the steps of the model's body that need no store.
    fn follow_body(&mut self) {
        if let Some(settled) = self.settles.filter(|_| self.actions().contains(&Action::Finds(0))) {
            self.settles = None;
            self.does(match settled {
                Settled::Done => Action::Finds(0),
                Settled::NotDone => Action::FindsNothing(0),
                Settled::Unknown => Action::DoesNotKnow(0),
            });
        }
        while self.phase() == (Phase::Body { polled: true }) {
            self.ran = true;
            let answer = match self.script.settled {
                Settled::Done => Action::StepFinds(0),
                Settled::NotDone => Action::StepFindsNothing(0),
                Settled::Unknown => Action::StepDoesNotKnow(0),
            };
            let actions = self.actions();
            let mut next = [Action::RunsStep(0), Action::EndsStep(0, self.script.end), answer].into_iter();
            self.does(next.find(|action| actions.contains(action)).unwrap_or(Action::Yields(0)));
        }
        let actions = self.actions();
        if actions.contains(&Action::TimesOut(0)) {
            self.does(Action::TimesOut(0));
            self.loses_values();
        }
        if let Some(ok) = self.returns.filter(|_| actions.contains(&Action::IsPolled(0))) {
            self.returns = None;
            self.does(Action::IsPolled(0));
            self.does(Action::Returns(0, ok));
        }
    }

    /// Checks that the model makes the same requests as the engine.
    fn collect(&mut self) -> Result<(), TestCaseError> {
        let asked: Vec<_> = self.store.desk.lock().unwrap().drain(..).collect();
        for asked in asked {
            if let Real::Renew(leases) = &asked.what
                && !matches!(self.phase(), Phase::Confirming { .. })
            {
                prop_assert_eq!(leases.len(), 1);
                prop_assert!(self.actions().contains(&Action::Beats(0)), "no beat in {:?}", self.phase());
                self.does(Action::Beats(0));
                self.beat = Some(asked);
                continue;
            }
            if let Real::Append(..) = asked.what {
                let call = self.world.call(0);
                let sent = match call.steps.append {
                    Append::Sent { journal, .. } => {
                        Some(RequestKind::Append { sent: 0, attempt: call.attempt, journal })
                    }
                    // The body reached its time-out in the poll that sent the append.
                    _ => self.world.net.iter().map(|it| it.ask).find(|ask| asked.what.is(*ask)),
                };
                let is = sent.is_some_and(|sent| asked.what.is(sent));
                prop_assert!(is, "appends {:?}, the model {:?} in {:?}", asked.what, sent, self.phase());
                self.append = Some(asked);
                continue;
            }
            if let Phase::Waiting { until, woken, .. } = self.phase() {
                prop_assert!(woken || until <= self.world.now, "waits for no longer: {:?}", asked.what);
                self.stops_waiting();
            }
            let expected = pending_request(self.config, &self.world, 0);
            let is = expected.is_some_and(|expected| asked.what.is(expected.ask));
            prop_assert!(is, "asks for {:?}, the model for {:?}", asked.what, expected);
            self.main = Some(asked);
        }
        for message in self.broker.0.lock().unwrap().drain(..) {
            let phase = self.world.call(0).phase;
            let expected = match phase {
                Phase::Sending { post } => vec![post.mail.by, post.next],
                _ => vec![],
            };
            prop_assert_eq!(&message.body, &expected, "sends a message, the model is in {:?}", phase);
            self.message = Some(message);
        }
        Ok(())
    }

    async fn compare(&mut self) -> Result<(), TestCaseError> {
        let phase = self.phase();
        let asks = matches!(
            phase,
            Phase::Reserving { .. }
                | Phase::Confirming { .. }
                | Phase::Marking { .. }
                | Phase::GivingBack { .. }
                | Phase::Inspecting { .. }
                | Phase::MarkingSent { .. }
                | Phase::Ending { .. }
        );
        if !self.appends() {
            self.keep_append();
        }
        // The engine and the model must both have a request under way, or both have none.
        prop_assert_eq!(self.main.is_some(), asks, "in {:?}", phase);
        prop_assert_eq!(self.append.is_some(), self.appends(), "the append in {:?}", phase);
        let sends = matches!(phase, Phase::Sending { .. });
        prop_assert_eq!(self.message.is_some(), sends, "the message in {:?}", phase);
        let told = match phase {
            Phase::Over(told) | Phase::Ending { late: Some(told), .. } => Some(told),
            _ => None,
        };
        // The engine's caller must get the answer that the model's caller got.
        match told {
            Some(Class::Dropped) => prop_assert!(self.call.is_none() && self.ended.is_none()),
            // The body of the engine's call runs now, without a reservation.
            Some(Class::Unprotected) => {
                if let Some(body) = self.body.take() {
                    prop_assert!(*self.started.lock().unwrap());
                    prop_assert!(self.ended.is_none());
                    body.send(true).unwrap();
                    self.settle().await;
                }
                let Some((Ok(7), outcome)) = &self.ended else { return fail(self.ended.as_ref(), phase) };
                prop_assert!(outcome.executed() && !outcome.recorded());
            }
            Some(told) => {
                let Some(ended) = &self.ended else { return fail(self.ended.as_ref(), phase) };
                prop_assert_eq!(class(ended), Some(told));
            }
            None => prop_assert!(self.ended.is_none(), "ended with {:?} in {:?}", self.ended, phase),
        }
        // The engine and the model must both have started the body, or both not.
        self.ran |= matches!(phase, Phase::Body { .. }) || told == Some(Class::Unprotected);
        let ran = self.ran;
        prop_assert_eq!(*self.started.lock().unwrap(), ran, "the body has started, in {:?}", phase);
        let found = self.store.inner.inspect(&key_named(0)).await.unwrap();
        // The records must be equal, except for the owner token of the engine's call, which the engine draws at random.
        let modelled = self.world.slots[0].map(|slot| slot.record(self.config.lease));
        let is_stored = |result: &StoredResult| matches!(store::kept(result), ModelResult::Stored(_));
        let shown = |record: &Record| {
            // A token that the model makes is one repeated byte.
            let bytes = record.owner.as_bytes();
            let modelled = bytes.windows(2).all(|bytes| bytes[0] == bytes[1]);
            let others = modelled && holder(bytes[0]) > 0;
            let state = match &record.state {
                State::Pending { on_crash, begun, .. } => format!("pending {on_crash:?} {begun}"),
                State::Completed(result) => format!("completed {}", is_stored(result)),
                State::Failed(result) => format!("failed {}", is_stored(result)),
                other => format!("{other:?}"),
            };
            let mail = if record.is_finished() { store::mail(record) } else { Mail::NONE };
            (others, record.attempt, record.attempts_used, state, mail)
        };
        let journaled = found.as_ref().map_or(0, |it| entries(it.record.journal.as_ref()));
        prop_assert_eq!(journaled, self.world.slots[0].map_or(0, |slot| slot.journal.len().into()), "entries");
        prop_assert_eq!(found.map(|it| shown(&it.record)), modelled.as_ref().map(shown));
        Ok(())
    }

    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        let faulty = self.faults < 5;
        if self.main.is_some() {
            moves.extend([Move::Answer; 8]);
            if faulty {
                moves.extend([Move::LoseAnswer, Move::LoseRequest, Move::TurnAway, Move::RefuseForGood]);
            }
        }
        if self.message.is_some() {
            moves.extend([Move::Confirm; 6]);
            if faulty {
                moves.extend([Move::Unconfirm, Move::LoseMessage, Move::LoseMessage]);
            }
        }
        // The body gets an answer only while it is polled.
        if self.append.is_some() && self.actions().contains(&Action::AppendFails(0)) {
            moves.extend([Move::AnswerAppend; 8]);
            if faulty {
                let lost = [Move::LoseAppendAnswer, Move::LoseAppend];
                moves.extend(lost.into_iter().chain([Move::TurnAppendAway, Move::RefuseAppendForGood]));
            }
        }
        if matches!(self.phase(), Phase::Body { .. }) && self.returns.is_none() {
            moves.extend([Move::Return(true), Move::Return(false), Move::Return(true)]);
        }
        if self.phase() == Phase::Asking && self.settles.is_none() {
            let answers = [Settled::Done, Settled::NotDone, Settled::Unknown, Settled::Unknown, Settled::Unknown];
            moves.extend([answers; 4].as_flattened().iter().copied().map(Move::Settle));
        }
        if self.call.is_some() {
            moves.push(Move::Drop);
        }
        if self.beat.is_some() {
            moves.extend([Move::AnswerBeat; 4]);
            if faulty {
                moves.push(Move::FailBeat);
            }
        } else if self.world.now < 20 {
            // The engine gives up a beat without an answer after some time, so no time passes while a beat is under
            // way.
            moves.extend([Move::Tick; 8]);
        }
        for at in 0..self.late.len() {
            moves.extend([Move::Arrive(at), Move::Lose(at)]);
        }
        for who in 1..self.config.count() {
            moves.extend([Move::OtherReserves(who); 2]);
            if self.world.slots[0].is_some_and(|slot| slot.is_pending() && slot.lapses_at <= self.world.now) {
                moves.extend([Move::OtherReserves(who); 8]);
            }
            moves.extend([Move::OtherFinishes(who), Move::OtherReleases(who)]);
            let begins = |slot: Slot| slot.is_pending() && slot.owner == who && slot.journal.len() == 0;
            if self.config.plans[0].steps > 0 && self.world.slots[0].is_some_and(begins) {
                moves.extend([Move::OtherBegins(who); 6]);
            }
            if self.world.slots[0].is_some_and(|slot| slot.is_pending() && slot.journal.doubt(GUARDED).is_some()) {
                moves.extend([Move::OtherReleases(who); 6]);
            }
        }
        // The trace makes only reopenings that succeed: a refused reopening may wake waiters, which the
        // model leaves out.
        if self.world.slots[0].is_some_and(|slot| !slot.is_pending() || slot.lapses_at <= self.world.now) {
            moves.push(Move::Reopen);
        }
        if self.world.slots[0].is_some_and(|slot| slot.mail != Mail::NONE) {
            moves.extend([Move::Correct(false), Move::Correct(true), Move::Reopen]);
        }
        moves
    }

    async fn make(&mut self, it: Move) {
        match it {
            // The trace answers the engine's request, or lets it fail if the budget of faults allows.
            Move::Answer => {
                self.does(Action::StoreDoes(0));
                let too_large = matches!(
                    self.phase(),
                    Phase::Reserving { line: Line::Answered(Answer::TooLarge), .. }
                        | Phase::Ending { line: Line::Answered(Answer::TooLarge), .. }
                );
                self.does(Action::Hears(0));
                let verdict = if too_large { Fate::Failed(StoreErrorKind::TooLarge) } else { Fate::Done };
                self.tell_main(verdict);
            }
            Move::LoseAnswer => {
                self.does(Action::StoreDoes(0));
                let too_large = matches!(self.phase(), Phase::Ending { line: Line::Answered(Answer::TooLarge), .. });
                self.does(Action::GetsNoAnswer(0));
                let unknown = Fate::Failed(StoreErrorKind::Unconfirmed);
                self.tell_main(if too_large { unknown } else { Fate::DoneUnheard });
                self.faults += 1;
            }
            Move::LoseRequest => {
                let request = pending_request(self.config, &self.world, 0).unwrap();
                self.keep(request, self.main.as_ref().unwrap().what.clone());
                self.does(Action::GetsNoAnswer(0));
                self.tell_main(Fate::Failed(StoreErrorKind::Unconfirmed));
                self.faults += 1;
            }
            Move::TurnAway => {
                self.does(Action::IsTurnedAway(0));
                self.tell_main(Fate::Failed(StoreErrorKind::Unavailable));
                self.faults += 1;
            }
            Move::RefuseForGood => {
                self.does(Action::IsRefusedForGood(0));
                self.tell_main(Fate::Failed(StoreErrorKind::Corrupt));
                self.faults += 1;
            }
            Move::AnswerAppend => {
                self.does(Action::StoreDoesAppend(0));
                self.does(Action::HearsAppend(0));
                self.tell_append(Fate::Done);
            }
            Move::LoseAppendAnswer => {
                self.does(Action::StoreDoesAppend(0));
                self.does(Action::AppendFails(0));
                self.tell_append(Fate::DoneUnheard);
                self.faults += 1;
            }
            Move::LoseAppend => {
                self.does(Action::AppendFails(0));
                let asked = self.append.take().unwrap();
                let request = self.world.net.iter().find(|it| asked.what.is(it.ask)).expect("under way");
                self.late.push((*request, asked.what));
                asked.verdict.send(Fate::Failed(StoreErrorKind::Unconfirmed)).unwrap();
                self.faults += 1;
            }
            Move::TurnAppendAway => {
                self.does(Action::AppendIsTurnedAway(0));
                self.tell_append(Fate::Failed(StoreErrorKind::Unavailable));
                self.faults += 1;
            }
            Move::RefuseAppendForGood => {
                self.does(Action::AppendIsRefusedForGood(0));
                self.tell_append(Fate::Failed(StoreErrorKind::Corrupt));
                self.faults += 1;
            }
            // A dropped call leaves its requests under way.
            Move::Drop => {
                let request = pending_request(self.config, &self.world, 0);
                if let (Some(request), Some(asked)) = (request, self.main.take()) {
                    self.keep(request, asked.what);
                }
                self.message = None;
                self.does(Action::IsDropped(0));
                self.loses_values();
                self.call = None;
            }
            Move::Return(ok) => {
                self.returns = Some(ok);
                self.body.take().unwrap().send(ok).unwrap();
            }
            Move::Settle(settled) => {
                self.settles = Some(settled);
                self.reconciler.take().unwrap().send(settled).unwrap();
            }
            Move::Confirm => self.tell_message(Action::Sends(0)),
            Move::Unconfirm => self.tell_message(Action::SendsUnconfirmed(0)),
            Move::LoseMessage => self.tell_message(Action::SendsInVain(0)),
            // The trace answers the heartbeat, or lets it fail.
            Move::AnswerBeat => {
                let beat = self.beat.take().unwrap();
                if matches!(self.world.call(0).beat, Beat::Sent { .. }) {
                    self.does(Action::StoreDoesBeat(0));
                    self.does(Action::HearsBeat(0));
                } else {
                    self.does(Action::ArrivesLate(self.late_renewal()));
                }
                beat.verdict.send(Fate::Done).unwrap();
            }
            Move::FailBeat => {
                let beat = self.beat.take().unwrap();
                if matches!(self.world.call(0).beat, Beat::Sent { .. }) {
                    self.does(Action::BeatFails(0));
                }
                self.late.push((self.late_renewal(), beat.what));
                beat.verdict.send(Fate::Failed(StoreErrorKind::Unconfirmed)).unwrap();
                self.faults += 1;
            }
            // A late request arrives.
            Move::Arrive(at) => {
                let (request, real) = self.late.remove(at);
                self.does(Action::ArrivesLate(request));
                if !(self.config.plans[0].too_large && request.is_stored()) {
                    real.arrives(&self.store.inner).await;
                }
            }
            Move::Lose(at) => {
                let (request, _) = self.late.remove(at);
                self.does(Action::IsLost(request));
            }
            // Another call acts on the store, without an engine.
            Move::OtherReserves(who) => {
                let real = Real::Reserve(self.config.requests[usize::from(who)].clone());
                let asks = self.config.plans[usize::from(who)].may_ask();
                let ask = RequestKind::Reserve { sent: 0, over: None, asks };
                self.other(Request { who, token: who, ask }, &real).await;
            }
            Move::OtherBegins(who) => {
                let lease = self.lease(who);
                let (attempt, _) = numbers(&lease);
                let begun = Entry { step: GUARDED, token: who, attempt, progress: Progress::Begun };
                let ask = RequestKind::Append { sent: 0, attempt, journal: ModelJournal::of([begun]) };
                let real = Real::Append(lease, begun_journal(attempt));
                self.other(Request { who, token: who, ask }, &real).await;
            }
            Move::OtherFinishes(who) => {
                let (kept, pushed) = (ModelResult::Stored(who), self.config.plans[usize::from(who)].messages);
                let lease = self.lease(who);
                let (attempt, _) = numbers(&lease);
                let ask = RequestKind::Finish { kept, ok: true, attempt, starts: 0, pushed };
                let result = store::payload_with(kept, Mail::pushed(attempt, pushed), self.config.apart);
                let real = Real::Finish(lease, Finish::Completed(result));
                self.other(Request { who, token: who, ask }, &real).await;
            }
            Move::OtherReleases(who) => {
                let real = Real::Release(self.lease(who), Release::Returned);
                self.other(Request { who, token: who, ask: RequestKind::Release(ReleaseKind::Returned) }, &real).await;
            }
            Move::Reopen => {
                let attempt = self.world.slots[0].expect("the slot has a call").attempt;
                self.does(Action::Looks(0));
                self.does(Action::Reopens(0));
                let _ = self.store.inner.reopen(&key_named(0), attempt.into()).await.unwrap();
            }
            Move::Correct(drops) => {
                self.does(Action::Looks(0));
                self.does(if drops { Action::DropsMessages(0) } else { Action::Replaces(0) });
                let key = key_named(0);
                let found = self.store.inner.inspect(&key).await.unwrap().expect("a finished record");
                let decision = Decision::new(&key, &found, correction(drops));
                let _ = self.store.inner.decide(&decision).await.unwrap();
            }
            Move::Tick => {
                self.does(Action::Tick);
                self.clock.advance(TICK);
            }
        }
    }

    /// Lease that `who` holds, or would hold in its first attempt.
    fn lease(&self, who: CallId) -> Lease {
        let request = &self.config.requests[usize::from(who)];
        let slot = self.world.slots[usize::from(self.config.plans[usize::from(who)].key)];
        let held = slot.filter(|slot| slot.owner == who).map(|slot| slot.record(self.config.lease));
        held.unwrap_or_else(|| Record::first(request)).lease(request)
    }

    /// Renewal that the engine has sent, and whose answer no call awaits any more.
    fn late_renewal(&self) -> Request {
        let is_it = |request: &&Request| request.who == 0 && matches!(request.ask, RequestKind::Renew { .. });
        *self.world.net.iter().find(is_it).expect("the request is under way")
    }

    async fn other(&mut self, request: Request, real: &Real) {
        store_does(self.config, &mut self.world, request);
        real.arrives(&self.store.inner).await;
    }

    /// Keeps a request that arrives late, or never. A late read changes nothing.
    fn keep(&mut self, request: Request, what: Real) {
        if request.ask != RequestKind::Inspect {
            self.late.push((request, what));
        }
    }

    fn tell_message(&mut self, action: Action) {
        self.does(action);
        self.faults += u8::from(action != Action::Sends(0));
        self.message.take().unwrap().confirmed.send(action == Action::Sends(0)).unwrap();
    }

    fn tell_append(&mut self, verdict: Fate) {
        self.append.take().unwrap().verdict.send(verdict).unwrap();
    }

    fn tell_main(&mut self, verdict: Fate) {
        self.main.take().unwrap().verdict.send(verdict).unwrap();
    }
}

impl Request {
    fn is_stored(self) -> bool {
        matches!(self.ask, RequestKind::Finish { kept: ModelResult::Stored(_), .. })
    }
}

fn fail(ended: Option<&Ended>, phase: Phase) -> Result<(), TestCaseError> {
    Err(TestCaseError::fail(format!("the engine has {ended:?}, the model {phase:?}")))
}

/// Answer to the engine's caller.
fn class((result, outcome): &Ended) -> Option<Class> {
    match result {
        _ if outcome.replayed() => Some(Class::Replayed),
        Ok(_) => Some(Class::Ok),
        Err(Failure::OfTheBody | Failure::Doubtful) => Some(Class::Err),
        Err(Failure::Refused(class)) => *class,
    }
}

/// The engine makes the same requests as the model's call, in the same order, and gives its caller the same answer.
/// The traces vary the answers of the store, the times, and the steps of other calls.
#[test]
fn the_models_calls_agree_with_the_engine() {
    let runtime = runtime();
    let (told, stages) = (Mutex::new(BTreeMap::new()), Mutex::new(BTreeMap::new()));
    // A trace has a policy of any kind, and numbers. Each number chooses one of the possible steps.
    let plan = (
        (any::<[bool; 3]>(), weighted(0.2), weighted(0.2), weighted(0.3), weighted(0.2)),
        proptest::option::of(1..3_u8),
        proptest::option::of(1..4_u8),
        proptest::option::weighted(0.3, 1..6_u8),
        prop_oneof![2 => Just(0_u8), 2 => 1..3_u8],
    );
    let reaction = prop_oneof![Just(Reaction::Rerun), Just(Reaction::Fail), Just(Reaction::Reconcile)];
    let end = prop_oneof![2 => Just(StepEnd::Value), 1 => Just(StepEnd::Error), 1 => Just(StepEnd::Doubtful)];
    let settled = prop_oneof![Just(Settled::Done), Just(Settled::NotDone), Just(Settled::Unknown)];
    let guarded = (reaction, end, settled);
    let messages = (0..=MESSAGES, 0..=MESSAGES, any::<bool>());
    let traces = (plan, guarded, any::<bool>(), messages, proptest::collection::vec(any::<u8>(), 1..50));
    many(6_000, &traces, |(plan, guarded, other_fails, (own, others, apart), choices)| {
        let (switches, max_attempts, wait, timeout, steps) = plan;
        let (reaction, end, settled) = guarded;
        let ([fail, record_errors, too_large], open, shadow, asks, doubts) = switches;
        let on_crash = |fail| if fail { OnCrash::Fail } else { OnCrash::Retry };
        let plan = Plan {
            on_crash: on_crash(fail || asks),
            asks,
            doubts,
            record_errors,
            open,
            shadow,
            too_large,
            max_attempts,
            wait,
            timeout,
            // A call in shadow mode journals nothing.
            steps: if shadow { 0 } else { steps },
            reaction,
            // The model leaves out messages that no record holds.
            messages: if shadow || open { 0 } else { own },
            ..Plan::default()
        };
        let other = Plan { on_crash: on_crash(other_fails), doubts, messages: others, ..Plan::default() };
        let config = Config { apart, ..Config::of(&[plan, other, Plan::default()]) };
        let mut pair = Pair::new(&config, Script { end, settled });
        let note = |pair: &Pair<'_>| pair.note_stages(&mut stages.lock().unwrap());
        runtime.block_on(pair.follows(&choices, note))?;
        if let Phase::Over(class) = pair.phase() {
            *told.lock().unwrap().entry(class).or_insert(0_u32) += 1;
        }
        Ok(())
    });
    let stages = stages.into_inner().unwrap();
    println!("stages of steps and messages, and endings of steps in doubt: {stages:?}");
    let of_steps = ["begins", "begins again", "undone", "interrupts", "reconciled"];
    let of_messages = ["sends", "sends for another", "goes past a failure", "marks all", "marks a part", "corrected"];
    for seen in of_steps.into_iter().chain(of_messages) {
        assert!(stages.contains_key(seen), "no trace has this stage: {seen}");
    }
    let told = told.into_inner().unwrap();
    println!("answers to the callers: {told:?}");
    // The traces together must reach every kind of answer.
    for class in [
        Class::Ok,
        Class::Err,
        Class::Replayed,
        Class::InProgress,
        Class::LeaseLost,
        Class::Unrecorded,
        Class::TimedOut,
        Class::Unresolved,
        Class::Unsent,
    ] {
        assert!(told.contains_key(&class), "no trace ends with {class:?}");
    }
}

/// The comparison must fail if the model's call sends messages differently.
#[test]
fn a_model_that_sends_messages_differently_disagrees_with_the_engine() {
    let runtime = runtime();
    for mutant in [
        Mutant::SendsAfterLoss,
        Mutant::SendsPastFailure,
        Mutant::ShortenedDropsMessages,
        Mutant::UnsentIsOk,
        Mutant::UnsentReplayed,
        Mutant::WaiterReplaysUnsent,
    ] {
        let runner = Runner { cases: 100_000, max_shrink_iters: 0, failure_persistence: None, ..Runner::default() };
        let choices = proptest::collection::vec(any::<u8>(), 1..50);
        // The same traces each time: some of these differences are rare.
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let result = TestRunner::new_with_rng(runner, rng).run(&choices, |choices| {
            // A result that is too large is left out at once, and another one only after two renewals.
            let too_large = mutant == Mutant::ShortenedDropsMessages;
            let plan = Plan { messages: MESSAGES, wait: Some(3), too_large, ..Plan::default() };
            let config = Config::of(&[plan, plan]).with(mutant);
            let mut pair = Pair::new(&config, Script { end: StepEnd::Value, settled: Settled::Unknown });
            runtime.block_on(pair.follows(&choices, |_| ()))
        });
        assert!(result.is_err(), "{mutant:?} makes no difference");
    }
}

/// The model and the engine leave a result out after the same refusals. A random trace hardly ever has that many.
#[test]
fn a_result_that_is_refused_after_two_renewals_is_left_out_in_the_model_and_in_the_engine() {
    let config = Config::of(&[Plan::default()]).lasting(3);
    let mut pair = Pair::new(&config, Script { end: StepEnd::Value, settled: Settled::Unknown });
    runtime().block_on(async {
        let (mut refused_at, mut refusals) = (None, 0);
        while !matches!(pair.phase(), Phase::Over(_)) {
            pair.meet().await.unwrap();
            let next = match pair.phase() {
                Phase::Body { .. } => Move::Return(true),
                _ if pair.beat.is_some() => Move::AnswerBeat,
                Phase::Ending { ending: Ending::Finish { .. }, .. } if refused_at == Some(pair.world.now) => Move::Tick,
                Phase::Ending { ending: Ending::Finish { .. }, .. } => Move::TurnAway,
                _ => Move::Answer,
            };
            if matches!(next, Move::TurnAway) {
                (refused_at, refusals) = (Some(pair.world.now), refusals + 1);
            }
            pair.make(next).await;
        }
        pair.meet().await.unwrap();
        let stand = pair.world.slots[0].expect("a record").stand;
        assert_eq!((stand, refusals), (ModelState::Completed(ModelResult::TooLarge(0)), 4));
    });
}

/// The comparison must fail if the model ends its call differently.
#[test]
fn a_model_with_another_ending_disagrees_with_the_engine() {
    let config = Config::of(&[Plan::default()]);
    let mut pair = Pair::new(&config, Script { end: StepEnd::Value, settled: Settled::Unknown });
    let disagrees = runtime().block_on(async {
        pair.meet().await.unwrap();
        pair.make(Move::Answer).await;
        pair.meet().await.unwrap();
        pair.make(Move::Return(true)).await;
        let release = Ending::Release(ReleaseKind::Returned);
        pair.world.call_mut(0).phase = Phase::Ending { ending: release, late: None, line: Line::Sent };
        pair.meet().await
    });
    assert!(disagrees.is_err());
}

/// The model's store without a clock, whose clients have different clocks, gives the same answers as the DynamoDB
/// store.
#[cfg(feature = "dynamodb")]
#[test]
fn the_models_store_agrees_with_dynamodb_if_clocks_differ() {
    use std::sync::atomic::{AtomicU32, Ordering};

    use idem_runtime::DynamoStore;
    use idem_tests::clock::OddClock;
    use idem_tests::dynamo::{Kind, TABLE, Wire, client};

    const LEASE: u8 = 5;
    const SKEW: u8 = 2;
    let endpoint = Kind::Dynoxide.shared();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let clocks: [_; 4] = std::array::from_fn(|_| OddClock::at(0));
    // Each client has its own `DynamoStore`, with a clock that the trace sets.
    let stores = clocks.each_ref().map(|clock| {
        DynamoStore::options()
            .namespace("protocol:")
            .response_timeout(Duration::from_secs(60))
            .max_clock_skew(Duration::from_millis(SKEW.into()))
            .clock(clock.clone())
            .build(client(&Wire::to(&endpoint)), TABLE)
    });
    let histories = AtomicU32::new(0);
    let traces = (plans(), any::<[bool; 4]>(), proptest::collection::vec(step(), 1..40));
    many(100, &traces, |(plans, ahead, steps)| {
        let mut config = Config::of(&plans);
        config.lease = LEASE;
        let history = histories.fetch_add(1, Ordering::SeqCst);
        // Each trace uses separate keys, because all traces share one table.
        let of = |request: &ReserveRequest| {
            request
                .clone()
                .key(Key::new("model", format!("{history}:{}", request.key.text())).unwrap())
                .lease(Duration::from_millis(LEASE.into()))
        };
        let requests: Vec<_> = config.requests.iter().map(of).collect();
        let mut grants: Vec<_> = requests.iter().map(Grant::none).collect();
        runtime.block_on(async {
            // One tick of the model is a millisecond, the unit of these clocks.
            let (mut slots, mut now) = ([None; 2], 20);
            for step in steps {
                let read = |who: CallId| now + if ahead[usize::from(who)] { SKEW } else { 0 };
                for (who, clock) in (0..).zip(&clocks) {
                    clock.set_wall(read(who).into());
                }
                let slot = |who: CallId| usize::from(config.plans[usize::from(who)].key);
                let reading = |who: CallId| Reading { now: read(who), skew: Some(SKEW) };
                // Both stores execute the step, and must give the same answer.
                match step {
                    Step::Reserve(who) | Step::Again(who) => {
                        let at = usize::from(who);
                        let found = stores[at].reserve(&requests[at]).await.unwrap();
                        if matches!(step, Step::Reserve(_)) {
                            grants[at].note(&found);
                        }
                        let found = match found {
                            Reservation::InProgress { attempt, lapses_in, .. } => Answer::Pending {
                                attempt: attempt.try_into().unwrap(),
                                lapses_in: lapses_in.as_millis().try_into().unwrap(),
                            },
                            found => store::answer(&found),
                        };
                        let modelled = store::reserves(&config, &mut slots[slot(who)], who, (None, true), reading(who));
                        prop_assert_eq!(modelled, found, "{:?}", step);
                    }
                    Step::Begin(who) => {
                        let at = usize::from(who);
                        let found = stores[at].begin(&grants[at].lease).await.unwrap();
                        let attempt = numbers(&grants[at].lease).0;
                        let modelled = store::begins(&config, &mut slots[slot(who)], who, attempt, reading(who));
                        prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
                    }
                    Step::Renew(who) => {
                        let at = usize::from(who);
                        let lease = &grants[at].lease;
                        let found = renew_all(&stores[at], std::slice::from_ref(lease)).await.unwrap();
                        let attempt = numbers(lease).0;
                        let modelled = store::renews(&config, &mut slots[slot(who)], who, attempt, reading(who));
                        prop_assert_eq!(modelled, Done::from(found[0]), "{:?}", step);
                    }
                    Step::Append(who, entries, last) => {
                        let at = usize::from(who);
                        let journal = grants[at].appended(who, entries, last);
                        let written = journal.written().expect("an entry");
                        let found = stores[at].append(&grants[at].lease, &written).await.unwrap();
                        let appended = (numbers(&grants[at].lease).0, journal);
                        let modelled = store::appends(&config, &mut slots[slot(who)], who, appended, reading(who));
                        prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
                    }
                    Step::Finish(who, ok, large, pushed) => {
                        let at = usize::from(who);
                        let kept = if large { ModelResult::TooLarge(who) } else { ModelResult::Stored(who) };
                        let numbers = numbers(&grants[at].lease);
                        let finish = finish((kept, ok), numbers.0, pushed);
                        let found = stores[at].finish(&grants[at].lease, &finish).await.unwrap();
                        let end = End::finish(kept, ok, numbers, now).with_messages(pushed);
                        let modelled = store::ends(&config, &mut slots[slot(who)], who, end);
                        prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
                    }
                    Step::Release(who, how) => {
                        let at = usize::from(who);
                        let found = stores[at].release(&grants[at].lease, how.release()).await.unwrap();
                        let modelled = store::ends(&config, &mut slots[slot(who)], who, End::release(how, now));
                        prop_assert_eq!(modelled, Done::from(found), "{:?}", step);
                    }
                    Step::Reopen(..) | Step::Look(_) | Step::Decide(..) | Step::Correct(..) | Step::MarkSent(..) => {}
                    Step::Tick => now += 1,
                }
            }
            Ok(())
        })
    });
}
