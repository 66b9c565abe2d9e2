//! Minimal second store for the conformance suite, which makes one mistake on request.
//!
//! The store uses none of the library's code that decides about records, not even `Record::admit`. Without a mistake,
//! the suite must accept this independent implementation of the contract. Most of the mistakes occurred in real stores.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use futures::future::{Either, join_all, select};
use idem_runtime::clock::{Clock, Instant, SystemClock};
use idem_runtime::codec::CodecName;
use idem_runtime::conformance::Subject;
use idem_runtime::record::{Provenance, Record, Ruling, State, StoredResult};
use idem_runtime::store::{
    Action, Answers, Cursor, Decision, DecisionAnswer, Filter, Finish, Holder, Inspection, Journal, Lease, OwnerToken,
    Page, Release, Reservation, ReserveRequest, Revision, Standing, StoreContext, StoreFuture, Verdict,
};
use idem_runtime::{Key, OnCrash, Store, StoreError, StoreErrorKind};
use idem_tests::clock::OddClock;
use tokio::sync::Notify;

macro_rules! mistakes {
    ($($name:ident,)*) => {
        /// Mistake of a broken store.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Mistake { None, $($name,)* }

        impl Mistake {
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

mistakes! {
    // Mistakes with reservations.
    LeaseCutShort, RepeatIsADuplicate, RepeatIsATakeover, ReadThenWrite, NobodyWaits, TakeoverKeepsNumber,
    TakeoverUnannounced, ReleaseDeletes, ReleaseRefunds, LapseDoesNotCount, NotStartedCounts, NotStartedTakesNumberBack,
    LimitBeforeResult, LimitBeforeLease, LiveLeaseHasNoTimeLeft, OneTimeForLeaseAndRetention, LateReservationPasses,
    // Mistakes with crashes.
    HolderFailIgnored, NewcomerFailIgnored, InterruptedIsReleased, FailIsInterruptedAtOnce, NoLateFinish,
    // Mistakes with fingerprints.
    FingerprintOnlyOnceFinished, FingerprintNotAtTakeover, FingerprintNotOnReplay, FingerprintNotOnceReleased,
    AbsentFingerprintDiffers, FingerprintLostAtFinish, FingerprintLostAtTakeover, FingerprintLostAtRelease,
    // Mistakes with an owner's writes.
    DoubtUnannounced, DoubtUnmarked, QuestionsUncounted, QuestionsUnlimited, QuestionsLimited, ReconcilersRefused,
    LateReconcilerPasses, UnresolvedCounts, UnresolvedReleases, ReservationBegins, UnmarkedIsInterrupted, UnmarkedCounts, BeginByKey, BeginIgnoresNumber, BeginAfterALapse, BeginAfterTheEnd,
    BeginNotRepeatable, BeginMarksNothing, BeginRenewsNothing,
    JournalForgotten, JournalLostAtRelease, JournalLostAtTakeover, JournalShrinks, JournalOutlivesResult, JournalCut, DecisionsLoseJournal,
    ReopenKeepsJournal, ReopenNeverShrinksJournal, ReopenKeepsTheLastJournal, ReopensUnseenSteps,
    MarksNothing, MarkChangesOwner, MarkRenewsRetention, MarksUnseen, ReplaceDropsMessages, MessagesAreNeverGivenUp, ListIgnoresUnsent,
    AppendByKey, AppendIgnoresNumber, AppendAfterTheEnd, AppendRenewsNothing, NoLateAppend,
    RenewByKey, RenewDoesNothing, NoLateRenew, RenewAfterTheEnd, RefusedRenewExtends, RenewGroupsAnswers,
    RenewAllOrNothing, RenewAnswersTwice, RenewWaitsForEach, RenewAnswersTogether, BlockedIsRefused, EmptyBatchFails, BatchOfAThousand, FinishByKey, FinishNotRepeatable, FinishOnlyRepeatable, FinishOverwrites,
    FinishRepeatedExtends, FinishAfterRelease, FinishUpserts, FinishIgnoresNumber, RenewIgnoresNumber, ReleaseByKey, ReleaseNotRepeatable, RefundTwice,
    ReleaseDeletesResult, ReleaseUpserts, ReleaseChecksNumber, ReleaseAnsweredByALaterLook,
    // Mistakes with results.
    ResultRunsAgain, FailedIsCompleted, FalsyIsNothing, TextOnly, SizeIsForgotten, LargeIsCut, CodecIsForgotten,
    // Mistakes with keys.
    LetterCaseIgnored, SpaceTrimmed, ScopeIgnored, KeysCutShort,
    // Mistakes with retention.
    NeverForgets, PendingNeverExpires, TtlFromReservation, PendingExpiresAtTtl, TtlSurvivesTakeover, LongTimesAreCut,
    // Mistakes with waiting.
    NeverWakes, OnlyFinishWakes, WakesOne, WaitsForAnyAttempt, WaitsForFinished, WaitsUnbounded, WaiterReleases,
    WaitTellsThePast, WaitTellsNoFingerprint, WaitTellsTheGone,
    // Mistakes with operators.
    LapseHidden, CrashPolicyForgotten, ReopensLiveLease, ReopensAnyAttempt, ReopenDeletes, ReopenGivesUpResults,
    DiscardSparesResults, DiscardsNothing, ReplaceSparesResults, ReplaceReleases, ReplacesNothing, DecidesUnseen, DecidesWhateverMovedOn, DecisionKeepsOwner,
    ReopenKeepsStarts, ReopenRenewsRetention, ReopenUpserts, PurgesTheFinished, PurgesTheLapsed,
    RefusesWithoutReason, ResolvesLiveLease, ResolvesAnyAttempt, ResolveOverwrites, ResolveNeverSupplies,
    ResolveKeepsOwner, ResolveFailsNothing, ResolveNotRepeatable, ResolveRenewsRetention, BreakOnlyLapses,
    BreakIgnoresFail, BreakRefunds, BreakCountsUnbegun, BreakEndsResults, BreakRenewsRetention, ForgetsLiveLease,
    ForgetsAnyAttempt,
    ForgetOnlyReleases, DecisionsWakeNobody,
    // Mistakes with information about attempts and decisions.
    HolderForgotten, HolderLostAtFinish, HolderLostAtRelease, HolderCutShort, HolderStays, TraceparentForgotten, TraceparentStays,
    TakeoverIsFirstSeen, BeganIsFirstSeen, RenewalRestartsBegan, FinishRestartsFirstSeen, AgeUntold, AgeOfTheKey, AgeStandsStill, DecisionUnnamed,
    DecisionNamesPileUp, DecisionForgottenByTheNext,
    // Mistakes with lists.
    ListRepeatsTheLast, ListSkipsAfterAPage, ListTakesScopesThatBeginSo, ListIgnoresLimit, ListIgnoresStanding, ListIgnoresLapse,
    ListIgnoresAge, ListIgnoresText, ListIgnoresAttempts, ListIgnoresUndecided, ListShowsExpired, ListShowsResults,
    ListTellsNoHolder, PingKnowsNothing,
    // Mistakes with handles, drops and errors.
    HandleIsACopy, OwnersRepeat, DroppedReservationLands, TornWrites, TornReads, ErrorsAreAbsent, ForeignIsAbsent,
    // Mistakes with damaged values.
    DamageFailsTheLook, DamageFailsTheList, DamageIsUnlisted, DamageIsCertain, DamageIsNeverForgotten, DamageIsForgottenUnseen,
    DamageLooksTheSame, DamageIsForgottenByAll, DamageWasNoChange,
}

use Mistake as M;

#[derive(Clone, Debug)]
struct Slot {
    record: Record,
    lapses_at: Instant,
    expires_at: Instant,
    first_seen: Instant,
    began: Instant,
    /// Owner token of the latest attempt before any decision, and the last decision about that attempt.
    decided: Option<(OwnerToken, Decision)>,
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are slots")]
enum Value {
    Slot(Slot),
    Foreign(String),
}

type Values = BTreeMap<String, Value>;

#[derive(Debug, Default)]
struct Shared {
    values: Mutex<Values>,
    written: Notify,
    /// For each key, the record that the first wait for this key returned.
    told: Mutex<HashMap<Key, Inspection>>,
    /// Keys that another session has locked.
    locked: Mutex<HashSet<String>>,
    unlocked: Notify,
}

/// Guard that unlocks a key when it is dropped.
struct Lock(Arc<Shared>, String);

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.locked.lock().unwrap().remove(&self.1);
        self.0.unlocked.notify_waiters();
    }
}

/// Minimal store in memory that makes the mistake `mistake`.
#[derive(Clone, Debug)]
pub(crate) struct Plain {
    mistake: Mistake,
    reachable: bool,
    shared: Arc<Shared>,
    context: Arc<StoreContext>,
}

impl Plain {
    pub(crate) fn new(mistake: Mistake) -> Self {
        Self { mistake, reachable: true, shared: Arc::default(), context: context(mistake) }
    }

    /// Returns a store that uses `clock`.
    #[allow(dead_code, reason = "the suite runs on real time")]
    pub(crate) fn with_clock(mistake: Mistake, clock: Arc<dyn Clock>) -> Self {
        Self { mistake, reachable: true, shared: Arc::default(), context: Arc::new(StoreContext::new("plain", clock)) }
    }

    /// Returns a subject for the conformance suite, with every optional part.
    pub(crate) fn subject(mistake: Mistake) -> Subject {
        let store = Self::new(mistake);
        let peer = Self { context: context(mistake), ..store.clone() };
        let unreachable = Self { reachable: false, ..store.clone() };
        let spoiled = store.clone();
        let spoil = move |key: Key| {
            let name = spoiled.key(&key);
            spoiled.shared.values.lock().unwrap().insert(name, Value::Foreign(idem_tests::nonsense()));
            async {}
        };
        let locked = store.clone();
        let block = move |key: Key| {
            let name = locked.key(&key);
            let shared = Arc::clone(&locked.shared);
            async move {
                shared.locked.lock().unwrap().insert(name.clone());
                Lock(shared, name)
            }
        };
        Subject::new(store).peer(peer).unreachable(unreachable).spoil(spoil).block(block)
    }

    /// Waits until no other session locks the record, for at most 200 ms unless a mistake waits forever.
    async fn unlocked(&self, name: &str) -> Result<(), StoreError> {
        let for_ever = self.is(M::RenewWaitsForEach) || self.is(M::RenewAnswersTogether);
        let unlocked = async {
            loop {
                let mut unlocked = std::pin::pin!(self.shared.unlocked.notified());
                unlocked.as_mut().enable();
                if !self.shared.locked.lock().unwrap().contains(name) {
                    return;
                }
                unlocked.await;
            }
        };
        let limit = async {
            if for_ever {
                std::future::pending::<()>().await;
            }
            self.context.clock().sleep(Duration::from_millis(200)).await;
        };
        match select(std::pin::pin!(unlocked), std::pin::pin!(limit)).await {
            Either::Left(_) => Ok(()),
            Either::Right(_) => {
                Err(StoreError::new(StoreErrorKind::Unconfirmed, "another session has locked the record"))
            }
        }
    }

    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    fn now(&self) -> Instant {
        self.context.clock().now()
    }

    fn key(&self, key: &Key) -> String {
        match self.mistake {
            M::LetterCaseIgnored => key.as_str().to_lowercase(),
            M::SpaceTrimmed => key.as_str().trim().to_owned(),
            M::ScopeIgnored => key.text().to_owned(),
            M::KeysCutShort => key.as_str().chars().take(255).collect(),
            _ => key.as_str().to_owned(),
        }
    }

    /// Applies `step` to the record of `key`: atomically, unless the mistake is a torn read or write.
    fn one<'a, T: Send + 'a>(
        &'a self,
        key: &'a Key,
        writes: bool,
        mut step: impl FnMut(&mut Option<Slot>) -> T + Send + 'a,
    ) -> StoreFuture<'a, T> {
        StoreFuture::new(async move {
            // An unreachable store returns an error. With the mistake `ErrorsAreAbsent` the store answers that there is
            // no record.
            if !self.reachable {
                if !self.is(M::ErrorsAreAbsent) {
                    return Err(StoreError::new(StoreErrorKind::Unavailable, "no server"));
                }
                return Ok(step(&mut None));
            }
            let name = self.key(key);
            self.unlocked(&name).await?;
            // An expired record is removed, and the step finds no record. A value that is not a record stays, and the
            // step fails.
            let take = |values: &mut Values| match values.remove(&name) {
                Some(Value::Slot(slot)) => {
                    Ok(Some(slot).filter(|slot| self.is(M::NeverForgets) || slot.expires_at > self.now()))
                }
                Some(Value::Foreign(text)) if !self.is(M::ForeignIsAbsent) => {
                    values.insert(name.clone(), Value::Foreign(text));
                    Err(StoreError::new(StoreErrorKind::Corrupt, "not a record"))
                }
                _ => Ok(None),
            };
            let put = |values: &mut Values, slot: Option<Slot>| {
                if let Some(slot) = slot {
                    values.insert(name.clone(), Value::Slot(slot));
                }
            };
            // The mistake: the step is not atomic, because other tasks run between the read and the write.
            let torn = self.is(if writes { M::TornWrites } else { M::TornReads });
            if torn || self.is(M::ReadThenWrite) {
                let mut slot = {
                    let mut values = self.shared.values.lock().unwrap();
                    let slot = take(&mut values)?;
                    if !torn {
                        put(&mut values, slot.clone());
                    }
                    slot
                };
                pause(3).await;
                let answer = step(&mut slot);
                put(&mut self.shared.values.lock().unwrap(), slot);
                return Ok(answer);
            }
            let mut values = self.shared.values.lock().unwrap();
            let mut slot = take(&mut values)?;
            let answer = step(&mut slot);
            put(&mut values, slot);
            Ok(answer)
        })
    }

    fn wake(&self, by_finish: bool) {
        match self.mistake {
            M::NeverWakes => {}
            M::OnlyFinishWakes if !by_finish => {}
            M::WakesOne => self.shared.written.notify_one(),
            _ => self.shared.written.notify_waiters(),
        }
    }

    fn pending(&self, request: &ReserveRequest, attempt: u32, starts: u32, record: Option<&Slot>) -> Slot {
        let now = self.now();
        let before = record.map(|slot| &slot.record.provenance);
        let journal = record.and_then(|slot| slot.record.journal.clone());
        let recorded =
            record.and_then(|slot| slot.record.fingerprint).filter(|_| !self.is(M::FingerprintLostAtTakeover));
        let state = State::Pending {
            lease: if self.is(M::LeaseCutShort) { request.lease / 2 } else { request.lease },
            ttl: request.ttl,
            on_crash: if self.is(M::CrashPolicyForgotten) { OnCrash::Retry } else { request.on_crash },
            begun: self.is(M::ReservationBegins),
        };
        let fingerprint = request.fingerprint.or(recorded);
        // The retention begins at the end of the lease. The mistake: the retention begins or ends at another time.
        let retention = match self.mistake {
            M::PendingExpiresAtTtl => request.ttl,
            M::PendingNeverExpires => Duration::from_secs(100_000),
            M::OneTimeForLeaseAndRetention => request.lease,
            M::LongTimesAreCut => (request.lease + request.ttl).min(Duration::from_millis(i32::MAX as u64)),
            _ => request.lease + request.ttl,
        };
        // A takeover begins a new retention, and keeps `first_seen`.
        let expires_at = match record {
            Some(slot) if self.is(M::TtlSurvivesTakeover) => slot.expires_at,
            _ => now.saturating_add(retention),
        };
        let first_seen = match record {
            Some(slot) if !self.is(M::TakeoverIsFirstSeen) => slot.first_seen,
            _ => now,
        };
        // The attempt begins now, and no decision about it has been made.
        Slot {
            first_seen,
            began: if self.is(M::BeganIsFirstSeen) { first_seen } else { now },
            decided: None,
            record: {
                let mut record = Record::new(request.owner, attempt, state);
                record.attempts_used = starts;
                record.fingerprint = fingerprint;
                record.provenance = self.provenance(request, before);
                record.journal = journal.filter(|_| !self.is(M::JournalLostAtTakeover));
                record
            },
            lapses_at: now.saturating_add(request.lease),
            expires_at,
        }
    }

    /// Returns the provenance of a record for `request`. `before`: provenance of the replaced record.
    fn provenance(&self, request: &ReserveRequest, before: Option<&Provenance>) -> Provenance {
        let before = before.cloned().unwrap_or_default();
        let asked = &request.provenance;
        let holder = match asked.holder() {
            Some(_) if self.is(M::HolderForgotten) => None,
            Some(holder) if self.is(M::HolderCutShort) => {
                let text = holder.as_str();
                let end = text.char_indices().map(|(at, _)| at).find(|at| *at >= 32).unwrap_or(text.len());
                Some(Holder::new(&text[..end]))
            }
            None if self.is(M::HolderStays) => before.holder(),
            holder => holder,
        };
        let traceparent = match asked.traceparent() {
            _ if self.is(M::TraceparentForgotten) => None,
            None if self.is(M::TraceparentStays) => before.traceparent(),
            traceparent => traceparent,
        };
        let provenance = holder.map_or_else(Provenance::default, |holder| Provenance::default().with_holder(holder));
        let provenance = provenance.with_traceparent(traceparent);
        match self.is(M::DecisionForgottenByTheNext) {
            true => provenance,
            false => {
                let (by, reason) = (before.decided_by(), before.decided_reason());
                provenance.with_decision(by.unwrap_or_default(), reason.unwrap_or_default())
            }
        }
    }

    fn mismatches(&self, record: &Record, lapsed: bool, request: &ReserveRequest) -> bool {
        let checked = match self.mistake {
            M::FingerprintOnlyOnceFinished => record.is_finished(),
            M::FingerprintNotOnReplay => !record.is_finished(),
            M::FingerprintNotOnceReleased => record.state != State::Released,
            M::FingerprintNotAtTakeover => !(lapsed && matches!(record.state, State::Pending { .. })),
            _ => true,
        };
        checked
            && match (record.fingerprint, request.fingerprint) {
                (Some(recorded), Some(presented)) => recorded != presented,
                (None, None) => false,
                _ => self.is(M::AbsentFingerprintDiffers),
            }
    }

    fn admit(&self, slot: &mut Option<Slot>, request: &ReserveRequest) -> Reservation {
        let now = self.now();
        let reserved = |record: &Record, took_over: bool| {
            let mut granted = record.grant(request, took_over && !self.is(M::TakeoverUnannounced));
            if let Reservation::Granted { lease, in_doubt, .. } = &mut granted {
                (lease.duration, lease.on_crash) = (request.lease, request.on_crash);
                *in_doubt &= !self.is(M::DoubtUnannounced);
            }
            granted
        };
        // If there is no record, the request begins the first attempt.
        let Some(found) = slot.as_ref() else {
            let first = slot.insert(self.pending(request, 1, 1, None));
            return reserved(&first.record, false);
        };
        let record = &found.record;
        // A decision changes the record's owner token, so the token from before all decisions is compared.
        let owner = found.decided.as_ref().map_or(record.owner, |(owner, _)| *owner);
        let lapses_in = found.lapses_at.saturating_since(now);
        let lapsed = lapses_in.is_zero();
        let attempt = record.attempt;
        // The fingerprint is compared first, in every state of the record.
        if self.mismatches(record, lapsed, request) {
            return Reservation::FingerprintMismatch { attempt };
        }
        // The mistake: `max_attempts` is compared before the result or the lease.
        let used_up = request.max_attempts.is_some_and(|max| record.attempts_used >= max.get());
        let mut unmarked = false;
        if used_up && (self.is(M::LimitBeforeResult) && record.is_finished() || self.is(M::LimitBeforeLease) && !lapsed)
        {
            return Reservation::AttemptsExhausted { attempts: record.attempts_used };
        }
        let (mut takeover, mut in_doubt) = (false, false);
        let asked = record.provenance.reconciliations();
        let may_ask =
            request.max_reconciliations.is_some_and(|max| asked < max.get() || self.is(M::QuestionsUnlimited))
                && !self.is(M::ReconcilersRefused);
        // The state of the record leads to an answer, or to the next attempt below.
        match &record.state {
            State::Completed(_) | State::Failed(_) if self.is(M::ResultRunsAgain) => {}
            State::Completed(_) | State::Failed(_) => {
                let age = match self.mistake {
                    M::AgeUntold => None,
                    M::AgeOfTheKey => Some(now.saturating_since(found.first_seen)),
                    M::AgeStandsStill => Some(Duration::ZERO),
                    _ => Some(now.saturating_since(found.began)),
                };
                return Reservation::finished(record.clone()).aged(age);
            }
            State::Interrupted if !may_ask => return Reservation::Interrupted { attempt },
            State::Interrupted if owner == request.owner && !self.is(M::LateReconcilerPasses) => {
                return Reservation::Released { attempt };
            }
            State::Interrupted => in_doubt = true,
            State::Released if owner == request.owner && !self.is(M::LateReservationPasses) => {
                return Reservation::Released { attempt };
            }
            State::Released => {}
            State::Pending { on_crash, begun, .. } => {
                let own = record.owner == request.owner && !self.is(M::RepeatIsADuplicate);
                if own && !(lapsed && self.is(M::RepeatIsATakeover)) {
                    return reserved(record, false);
                }
                let marked = *begun || self.is(M::UnmarkedIsInterrupted);
                let holder = *on_crash == OnCrash::Fail && marked && !self.is(M::HolderFailIgnored);
                let newcomer = request.on_crash == OnCrash::Fail
                    && (*on_crash != OnCrash::Fail || marked)
                    && !self.is(M::NewcomerFailIgnored);
                unmarked = !begun && lapsed && !self.is(M::UnmarkedCounts);
                if !lapsed && !self.is(M::NobodyWaits) {
                    if holder && self.is(M::FailIsInterruptedAtOnce) {
                        return Reservation::Interrupted { attempt };
                    }
                    let lapses_in = if self.is(M::LiveLeaseHasNoTimeLeft) { Duration::ZERO } else { lapses_in };
                    return Reservation::in_progress(attempt, lapses_in);
                }
                in_doubt = holder || newcomer;
                if in_doubt && !may_ask {
                    return Reservation::Interrupted { attempt };
                }
                takeover = true;
            }
            other => unreachable!("{other:?}"),
        }
        // When another attempt takes over, the previous attempt is not counted if its body was not marked as begun.
        let counted = record.attempts_used - u32::from(unmarked && record.attempts_used > 0);
        let limited = !in_doubt || self.is(M::QuestionsLimited);
        if limited && request.max_attempts.is_some_and(|max| counted >= max.get()) {
            return Reservation::AttemptsExhausted { attempts: counted };
        }
        // The next attempt has a larger number. All waits for the previous attempt must end.
        let attempt = attempt + u32::from(!(takeover && self.is(M::TakeoverKeepsNumber)));
        let starts = counted + u32::from(!(takeover && self.is(M::LapseDoesNotCount)));
        let mut next = self.pending(request, attempt, starts, Some(found));
        self.wake(false);
        // A reconciler settles the doubt first. The mark remains, so that a crash of the reconciler leaves the doubt.
        if in_doubt {
            if let State::Pending { begun, .. } = &mut next.record.state {
                *begun = !self.is(M::DoubtUnmarked);
            }
            next.record.provenance =
                next.record.provenance.reconciling(asked + u16::from(!self.is(M::QuestionsUncounted)));
        }
        reserved(&slot.insert(next).record, takeover)
    }

    fn begin(&self, slot: &mut Option<Slot>, lease: &Lease) -> Verdict {
        let now = self.now();
        let Some(found) = slot else { return Verdict::Refused };
        let same_number = found.record.attempt == lease.attempt || self.is(M::BeginIgnoresNumber);
        let own = (found.record.owner == lease.owner && same_number) || self.is(M::BeginByKey);
        let (live, after_the_end) = (found.lapses_at > now, self.is(M::BeginAfterTheEnd));
        match &mut found.record.state {
            State::Pending { begun, .. } if own && (*begun || live || self.is(M::BeginAfterALapse)) => {
                if *begun && self.is(M::BeginNotRepeatable) {
                    return Verdict::Refused;
                }
                *begun = !self.is(M::BeginMarksNothing);
                match self.is(M::BeginRenewsNothing) {
                    true => Verdict::Applied,
                    false => self.keep_alive(slot, lease),
                }
            }
            State::Pending { .. } => Verdict::Refused,
            _ if own && after_the_end => {
                let (lease, ttl, on_crash) = (lease.duration, lease.ttl, lease.on_crash);
                found.record.state = State::Pending { lease, ttl, on_crash, begun: true };
                Verdict::Applied
            }
            _ => Verdict::Refused,
        }
    }

    fn keep_alive(&self, slot: &mut Option<Slot>, lease: &Lease) -> Verdict {
        let now = self.now();
        let Some(slot) = slot else { return Verdict::Refused };
        let same_number = slot.record.attempt == lease.attempt || self.is(M::RenewIgnoresNumber);
        let own = (slot.record.owner == lease.owner && same_number) || self.is(M::RenewByKey);
        let pending = match slot.record.state {
            State::Pending { .. } if self.is(M::NoLateRenew) => slot.lapses_at > now,
            State::Pending { .. } => true,
            _ => self.is(M::RenewAfterTheEnd),
        };
        let granted = own && pending;
        if (granted && !self.is(M::RenewDoesNothing)) || (pending && self.is(M::RefusedRenewExtends)) {
            slot.lapses_at = now.saturating_add(lease.duration);
            slot.expires_at = slot.lapses_at.saturating_add(lease.ttl);
            if self.is(M::RenewalRestartsBegan) {
                slot.began = now;
            }
        }
        if granted { Verdict::Applied } else { Verdict::Refused }
    }

    fn append(&self, slot: &mut Option<Slot>, lease: &Lease, journal: &Journal) -> Verdict {
        let now = self.now();
        let Some(found) = slot else { return Verdict::Refused };
        let same_number = found.record.attempt == lease.attempt || self.is(M::AppendIgnoresNumber);
        let own = (found.record.owner == lease.owner && same_number) || self.is(M::AppendByKey);
        let pending = matches!(found.record.state, State::Pending { .. }) || self.is(M::AppendAfterTheEnd);
        if !own || !pending || (self.is(M::NoLateAppend) && found.lapses_at <= now) {
            return Verdict::Refused;
        }
        let bytes = journal.bytes();
        let kept = if self.is(M::JournalCut) { bytes.slice(..bytes.len().min(65_535)) } else { bytes.clone() };
        let is_longer = found.record.journal.as_ref().is_none_or(|known| known.bytes().len() < bytes.len());
        if (is_longer || self.is(M::JournalShrinks)) && !self.is(M::JournalForgotten) {
            found.record.journal = Journal::new(kept);
        }
        if !self.is(M::AppendRenewsNothing) {
            found.lapses_at = now.saturating_add(lease.duration);
            found.expires_at = found.lapses_at.saturating_add(lease.ttl);
        }
        Verdict::Applied
    }

    /// Reports whether the record keeps its journal at the end of an attempt: a finished record needs none, and a
    /// released record keeps it for the next attempt.
    fn keeps_journal(&self, is_released: bool) -> bool {
        match is_released {
            true => !self.is(M::JournalLostAtRelease),
            false => self.is(M::JournalOutlivesResult),
        }
    }

    fn end(&self, slot: &mut Option<Slot>, lease: &Lease, state: State, release: Option<Release>) -> Verdict {
        let now = self.now();
        let upserts = if release.is_some() { M::ReleaseUpserts } else { M::FinishUpserts };
        // Without a record the store refuses the write. The mistake: the write inserts a record.
        let Some(found) = slot else {
            if self.is(upserts) {
                let expires_at = now.saturating_add(lease.ttl);
                let record = Record::after(lease, state);
                *slot = Some(Slot { record, lapses_at: now, expires_at, first_seen: now, began: now, decided: None });
                return Verdict::Applied;
            }
            return Verdict::Refused;
        };
        // Only the owner may write, and a finish must name the record's attempt number.
        let by_key = if release.is_some() { M::ReleaseByKey } else { M::FinishByKey };
        if found.record.owner != lease.owner && !self.is(by_key) {
            return Verdict::Refused;
        }
        let named = if release.is_some() {
            self.is(M::ReleaseChecksNumber)
        } else {
            !self.is(M::FinishIgnoresNumber) && !self.is(M::FinishByKey)
        };
        if named && found.record.attempt != lease.attempt {
            return Verdict::Refused;
        }
        // An attempt whose body never began is no longer counted.
        let refund = u32::from(match release {
            Some(Release::NotStarted) => !self.is(M::NotStartedCounts),
            Some(Release::Returned) => self.is(M::ReleaseRefunds),
            Some(Release::Unresolved) => !self.is(M::UnresolvedCounts),
            _ => false,
        });
        let ended = found.record.is_finished();
        // A pending record accepts every end of its attempt, even after the lapse of its lease. The record of an ended
        // attempt accepts only the same end again.
        match found.record.state {
            State::Pending { .. } if self.is(M::NoLateFinish) && release.is_none() && found.lapses_at <= now => {
                return Verdict::Refused;
            }
            State::Pending { .. } => {}
            _ if ended && release.is_none() => {
                if self.is(M::FinishNotRepeatable) || (self.is(M::FinishOnlyRepeatable) && found.record.state != state)
                {
                    return Verdict::Refused;
                }
                if self.is(M::FinishRepeatedExtends) {
                    found.expires_at = now.saturating_add(lease.ttl);
                }
                if !self.is(M::FinishOverwrites) {
                    return Verdict::Applied;
                }
            }
            _ if ended => {
                if self.is(M::ReleaseDeletesResult) {
                    *slot = None;
                    return Verdict::Applied;
                }
                return Verdict::Refused;
            }
            _ if release.is_some() => {
                if self.is(M::RefundTwice) {
                    found.record.attempts_used = found.record.attempts_used.saturating_sub(refund);
                }
                return if self.is(M::ReleaseNotRepeatable) { Verdict::Refused } else { Verdict::Applied };
            }
            _ if self.is(M::FinishAfterRelease) => {}
            _ => return Verdict::Refused,
        }
        if release.is_some() && self.is(M::ReleaseDeletes) {
            *slot = None;
            self.wake(false);
            return Verdict::Applied;
        }
        // The end is applied. The record keeps its fingerprint and provenance, unless a mistake loses them.
        let record = &mut found.record;
        record.attempts_used = record.attempts_used.saturating_sub(refund);
        if release == Some(Release::NotStarted) && self.is(M::NotStartedTakesNumberBack) {
            record.attempt -= 1;
        }
        if self.is(if release.is_some() { M::FingerprintLostAtRelease } else { M::FingerprintLostAtFinish }) {
            record.fingerprint = None;
        }
        if self.is(if release.is_some() { M::HolderLostAtRelease } else { M::HolderLostAtFinish }) {
            record.provenance = Provenance::default();
        }
        if release.is_none() && self.is(M::FinishRestartsFirstSeen) {
            found.first_seen = now;
        }
        let record = &mut found.record;
        record.journal = record.journal.take().filter(|_| self.keeps_journal(release.is_some()));
        record.state = match state {
            State::Interrupted if self.is(M::InterruptedIsReleased) => State::Released,
            State::Interrupted if release == Some(Release::Unresolved) && self.is(M::UnresolvedReleases) => {
                State::Released
            }
            State::Completed(payload) => State::Completed(self.written(payload)),
            State::Failed(payload) if self.is(M::FailedIsCompleted) => State::Completed(payload),
            State::Failed(payload) => State::Failed(self.written(payload)),
            state => state,
        };
        found.lapses_at = now;
        // The retention begins at the end of the attempt.
        if !self.is(M::TtlFromReservation) {
            found.expires_at = now.saturating_add(lease.ttl);
        }
        self.wake(release.is_none());
        Verdict::Applied
    }

    fn written(&self, payload: StoredResult) -> StoredResult {
        let StoredResult::Encoded { codec, bytes } = payload else {
            return match payload {
                StoredResult::TooLarge { .. } if self.is(M::SizeIsForgotten) => StoredResult::TooLarge { size: 0 },
                payload => payload,
            };
        };
        let codec = if self.is(M::CodecIsForgotten) { CodecName::new(b"json").unwrap() } else { codec };
        match self.mistake {
            M::FalsyIsNothing if bytes.is_empty() => StoredResult::Unencodable,
            M::TextOnly => StoredResult::Encoded { codec, bytes: String::from_utf8_lossy(&bytes).into_owned().into() },
            M::LargeIsCut => StoredResult::Encoded { codec, bytes: bytes.slice(..bytes.len().min(65_536)) },
            _ => StoredResult::Encoded { codec, bytes },
        }
    }

    /// Applies an operator's result. Returns false if the record does not accept a result.
    fn resolve(&self, found: &mut Slot, finish: &Finish) -> bool {
        let same = found.record.state == finish.state();
        let has = |result: &StoredResult| matches!(result, StoredResult::Encoded { .. });
        let supplies = match (&found.record.state, finish) {
            (State::Completed(missing), Finish::Completed(given)) | (State::Failed(missing), Finish::Failed(given)) => {
                !has(missing) && has(given)
            }
            _ => false,
        };
        let takes = same || (supplies && !self.is(M::ResolveNeverSupplies));
        if found.record.is_finished() && !takes && !self.is(M::ResolveOverwrites) {
            return false;
        }
        found.record.state = match finish.state() {
            State::Failed(result) if self.is(M::ResolveFailsNothing) => State::Completed(result),
            state => state,
        };
        if self.is(M::ResolveRenewsRetention) {
            found.expires_at = self.now().saturating_add(Duration::from_secs(600));
        }
        true
    }

    /// Returns the inspection of the record, as an operator gets it.
    fn inspection(&self, slot: &Slot) -> Inspection {
        let is_pending = matches!(slot.record.state, State::Pending { .. });
        let lapses_in = is_pending.then(|| slot.lapses_at.saturating_since(self.now()));
        Inspection::new(slot.record.clone(), Duration::ZERO, lapses_in)
    }

    /// Reports whether the operator's decision names the present revision of the record.
    fn is_seen(&self, slot: &Slot, decision: &Decision) -> bool {
        let (is, seen) = (self.inspection(slot).revision(), decision.seen.with_attempt(slot.record.attempt));
        let broken = decision.action == Action::BreakLease
            && (seen.standing(), is.standing()) == (Standing::Running, Standing::Lapsed);
        let same_standing = seen.standing() == is.standing() || broken || self.is(M::DecidesWhateverMovedOn);
        // Revisions with the same attempt and standing differ in their owner token. The length of the journal counts
        // only if the decision changes the journal.
        let mark = |revision: &Revision| revision.to_string().split('-').nth(2).map(str::to_owned);
        let same_steps = is.journal_bytes() == seen.journal_bytes()
            || !matches!(decision.action, Action::ReopenWith(_))
            || self.is(M::ReopensUnseenSteps);
        self.is(M::DecidesUnseen) || (same_standing && same_steps && mark(&is) == mark(&seen))
    }

    /// Applies a decision about messages. The library changes their form, and the store keeps the rest of the record.
    fn decide_about_messages(&self, found: &mut Slot, decision: &Decision) -> DecisionAnswer {
        let is = self.inspection(found);
        let mut named = decision.clone();
        if self.is(M::MarksUnseen) {
            named.seen = is.revision();
        }
        match is.decide(&named) {
            Ruling::Answer(refused) => return refused,
            Ruling::Replace(_) if self.is(M::MarksNothing) => {}
            Ruling::Replace(_)
                if self.is(M::MessagesAreNeverGivenUp) && !matches!(decision.action, Action::MarkSent(_)) => {}
            Ruling::Replace(record) => found.record = record,
            Ruling::Remove => unreachable!("only `forget` removes"),
        }
        if self.is(M::MarkChangesOwner) {
            found.record.owner = idem_tests::decided(found.record.owner, 1);
        }
        if self.is(M::MarkRenewsRetention) {
            found.expires_at = self.now().saturating_add(Duration::from_secs(6000));
        }
        DecisionAnswer::Applied
    }

    #[expect(clippy::too_many_lines, reason = "the function is a single decision")]
    fn decide(&self, slot: &mut Option<Slot>, decision: &Decision) -> DecisionAnswer {
        let now = self.now();
        // The mistake: the store applies a decision to any attempt, or at any time.
        let any = match decision.action {
            Action::Reopen | Action::ReopenWith(_) | Action::Discard => M::ReopensAnyAttempt,
            Action::Resolve(_) => M::ResolvesAnyAttempt,
            Action::Forget => M::ForgetsAnyAttempt,
            _ => M::None,
        };
        let at_any_time = match decision.action {
            Action::Reopen | Action::ReopenWith(_) | Action::Discard => M::ReopensLiveLease,
            Action::Resolve(_) => M::ResolvesLiveLease,
            Action::Forget => M::ForgetsLiveLease,
            _ => M::None,
        };
        let no_reason = self.is(M::RefusesWithoutReason);
        // Without a record the store refuses the decision. The mistake: the decision inserts a record.
        let Some(found) = slot else {
            if self.is(M::ReopenUpserts) {
                let nobody = OwnerToken::from_bytes([0; OwnerToken::BYTES]);
                let record = Record::new(nobody, decision.seen.attempt(), State::Released);
                let expires_at = now.saturating_add(Duration::from_secs(600));
                *slot = Some(Slot { record, lapses_at: now, expires_at, first_seen: now, began: now, decided: None });
                return DecisionAnswer::Applied;
            }
            return DecisionAnswer::NoRecord;
        };
        if matches!(decision.action, Action::MarkSent(_) | Action::ResendMessages | Action::DropMessages) {
            return self.decide_about_messages(found, decision);
        }
        // A decision is refused if the operator saw another record than this one: a damaged value, or another attempt.
        if decision.seen.standing() == Standing::Damaged && !self.is(M::DamageWasNoChange) {
            return DecisionAnswer::changed(self.inspection(found).standing());
        }
        if found.record.attempt != decision.seen.attempt() && !(any != M::None && self.is(any)) {
            return if no_reason {
                DecisionAnswer::NoRecord
            } else {
                DecisionAnswer::other_attempt(found.record.attempt)
            };
        }
        // The same operator repeats a decision that the store has already applied.
        if let Some((_, last)) = &found.decided
            && (&last.seen, &last.action, &last.by) == (&decision.seen, &decision.action, &decision.by)
            && !(matches!(decision.action, Action::Resolve(_)) && self.is(M::ResolveNotRepeatable))
        {
            return DecisionAnswer::Applied;
        }
        // A live lease refuses every decision except `BreakLease`.
        let pending = matches!(found.record.state, State::Pending { .. });
        let live = pending && found.lapses_at > now && decision.action != Action::BreakLease;
        if live && !(at_any_time != M::None && self.is(at_any_time)) {
            let lapses_in = found.lapses_at.saturating_since(now);
            return if no_reason { DecisionAnswer::NoRecord } else { DecisionAnswer::live_lease(lapses_in) };
        }
        // A decision is refused if the record has changed since the operator saw it. The answer names the operator who
        // changed the record.
        let excused = (any != M::None && self.is(any)) || (at_any_time != M::None && self.is(at_any_time));
        if !excused && !self.is_seen(found, decision) {
            let mut changed = DecisionAnswer::changed(self.inspection(found).standing());
            if let (DecisionAnswer::Changed { decided_by, .. }, Some(_)) = (&mut changed, &found.decided) {
                *decided_by = found.record.provenance.decided_by().map(Box::from);
            }
            return changed;
        }
        let finished = found.record.is_finished();
        let owner = found.decided.as_ref().map_or(found.record.owner, |(owner, _)| *owner);
        // The decision is applied to the record, or refused.
        match &decision.action {
            Action::Discard if !finished && !self.is(M::DiscardsNothing) => return DecisionAnswer::Unfinished,
            Action::Discard if self.is(M::DiscardSparesResults) => return DecisionAnswer::Finished,
            Action::Replace(_) if !finished && !self.is(M::ReplacesNothing) => return DecisionAnswer::Unfinished,
            Action::Replace(_) if self.is(M::ReplaceSparesResults) => return DecisionAnswer::Finished,
            Action::Replace(_) if self.is(M::ReplaceReleases) => found.record.state = State::Released,
            Action::Replace(finish) => {
                // The messages stay with the record; only the library writes their form.
                found.record.state = match self.inspection(found).decide(decision) {
                    Ruling::Replace(record) if !self.is(M::ReplaceDropsMessages) => record.state,
                    _ => finish.state(),
                };
            }
            Action::Reopen | Action::ReopenWith(_) if finished && !self.is(M::ReopenGivesUpResults) => {
                return DecisionAnswer::Finished;
            }
            Action::Reopen | Action::ReopenWith(_) | Action::Discard => {
                if self.is(M::ReopenDeletes) {
                    *slot = None;
                    self.wake(false);
                    return DecisionAnswer::Applied;
                }
                if !self.is(M::ReopenKeepsStarts) {
                    found.record.attempts_used = 0;
                }
                found.record.state = State::Released;
                if let Action::ReopenWith(journal) = &decision.action {
                    let bytes = |journal: &Option<Journal>| journal.as_ref().map_or(0, |journal| journal.bytes().len());
                    let keeps = match self.mistake {
                        M::ReopenKeepsJournal => true,
                        M::ReopenNeverShrinksJournal => bytes(journal) < bytes(&found.record.journal),
                        M::ReopenKeepsTheLastJournal => journal.is_none(),
                        _ => false,
                    };
                    if !keeps {
                        found.record.journal.clone_from(journal);
                    }
                }
                if self.is(M::ReopenRenewsRetention) {
                    found.expires_at = now.saturating_add(Duration::from_secs(600));
                }
            }
            Action::Resolve(_) if has_messages(&found.record.state) => {
                // A missing result may be supplied beside messages; only the library reads their form.
                match self.inspection(found).decide(decision) {
                    Ruling::Answer(refused) => return refused,
                    Ruling::Replace(record) => found.record.state = record.state,
                    Ruling::Remove => unreachable!("only `forget` removes"),
                }
            }
            Action::Resolve(finish) => {
                if !self.resolve(found, finish) {
                    return DecisionAnswer::Finished;
                }
            }
            Action::BreakLease => match found.record.state {
                State::Pending { on_crash, begun, .. } => {
                    let fails = on_crash == OnCrash::Fail && begun && !self.is(M::BreakIgnoresFail);
                    if !self.is(M::BreakOnlyLapses) {
                        found.record.state = if fails { State::Interrupted } else { State::Released };
                    }
                    let unbegun = on_crash == OnCrash::Fail && !begun && !self.is(M::BreakCountsUnbegun);
                    if unbegun || self.is(M::BreakRefunds) {
                        found.record.attempts_used = found.record.attempts_used.saturating_sub(1);
                    }
                    if self.is(M::BreakRenewsRetention) {
                        found.expires_at = now.saturating_add(Duration::from_secs(600));
                    }
                }
                _ if finished && self.is(M::BreakEndsResults) => found.record.state = State::Released,
                _ if finished => return DecisionAnswer::Finished,
                _ => {}
            },
            Action::Forget if self.is(M::ForgetOnlyReleases) => found.record.state = State::Released,
            Action::Forget => *slot = None,
            _ => unreachable!("the suite knows no other action"),
        }
        // Each decision changes the owner token, so that no later write of the attempt and no other decision matches
        // the record.
        if let Some(found) = slot.as_mut() {
            found.lapses_at = now;
            if found.record.is_finished() || self.is(M::DecisionsLoseJournal) {
                found.record.journal = None;
            }
            found.decided = Some((owner, decision.clone()));
            let keeps = self.is(M::DecisionKeepsOwner)
                || (self.is(M::ResolveKeepsOwner) && matches!(decision.action, Action::Resolve(_)));
            if !keeps {
                found.record.owner = idem_tests::decided(found.record.owner, 1);
            }
        }
        // The record names the operator.
        if let Some(found) = slot.as_mut().filter(|_| !self.is(M::DecisionUnnamed)) {
            let says_something = !decision.by.is_empty() || !decision.reason.is_empty();
            if says_something || !self.is(M::DecisionNamesPileUp) {
                found.record.provenance = found.record.provenance.with_decision(&decision.by, &decision.reason);
            }
        }
        // A decision ends all waits for the attempt.
        if !self.is(M::DecisionsWakeNobody) {
            self.wake(false);
        }
        DecisionAnswer::Applied
    }
}

fn context(mistake: Mistake) -> Arc<StoreContext> {
    // Two handles compare the times in their records, so they share one clock.
    static CLOCK: std::sync::LazyLock<SystemClock> = std::sync::LazyLock::new(SystemClock::default);
    let clock = OddClock::new(*CLOCK);
    Arc::new(StoreContext::new(
        "plain",
        Arc::new(if mistake == M::OwnersRepeat { clock.without_chance() } else { clock }),
    ))
}

/// Lets other tasks run `times` times.
async fn pause(mut times: u32) {
    poll_fn(|cx| {
        if times == 0 {
            return Poll::Ready(());
        }
        times -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Reservation under way. The mistake: the reservation takes effect even if its caller is dropped.
struct Flight<'a>(&'a Plain, Option<ReserveRequest>);

impl Flight<'_> {
    async fn lands(mut self) -> Result<Reservation, StoreError> {
        let request = self.1.take().expect("lands once");
        self.0.one(&request.key, true, |slot| self.0.admit(slot, &request)).await
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let Some(request) = self.1.take() else { return };
        let store = self.0.clone();
        tokio::spawn(async move {
            store.context.clock().sleep(Duration::from_millis(30)).await;
            store.one(&request.key, true, |slot| store.admit(slot, &request)).await
        });
    }
}

impl Plain {
    /// Returns the record at the end of a wait for `key`.
    async fn told(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        let mut found = self.inspect(key).await?;
        if self.is(M::WaitTellsNoFingerprint)
            && let Some(found) = &mut found
        {
            found.record.fingerprint = None;
        }
        let mut told = self.shared.told.lock().unwrap();
        let first = told.get(key).cloned();
        if let Some(found) = &found {
            told.entry(key.clone()).or_insert_with(|| found.clone());
        }
        Ok(match &found {
            Some(_) if self.is(M::WaitTellsThePast) => first.or(found),
            None if self.is(M::WaitTellsTheGone) => first,
            _ => found,
        })
    }

    /// Value of `key` that is not a record, if there is one and the store is reachable.
    fn foreign(&self, key: &Key) -> Option<String> {
        match self.shared.values.lock().unwrap().get(&self.key(key)) {
            Some(Value::Foreign(text)) if self.reachable => Some(text.clone()),
            _ => None,
        }
    }

    fn damaged(&self, text: &str) -> Inspection {
        let stored = if self.is(M::DamageLooksTheSame) { "" } else { text };
        Inspection::damaged("not a record", [stored])
    }

    /// Answer to a decision about a value that is not a record.
    fn decide_about_damage(&self, decision: &Decision) -> Option<DecisionAnswer> {
        let text = self.foreign(&decision.key).filter(|_| !self.is(M::ForeignIsAbsent))?;
        let is_seen = decision.seen == self.damaged(&text).revision() || self.is(M::DamageIsForgottenUnseen);
        Some(match decision.action {
            _ if !is_seen => DecisionAnswer::changed(Standing::Damaged),
            Action::Forget if self.is(M::DamageIsNeverForgotten) => DecisionAnswer::Damaged,
            _ if decision.action == Action::Forget || self.is(M::DamageIsForgottenByAll) => {
                self.shared.values.lock().unwrap().remove(&self.key(&decision.key));
                DecisionAnswer::Applied
            }
            _ => DecisionAnswer::Damaged,
        })
    }

    fn seen(&self, slot: &Slot) -> Inspection {
        let now = self.now();
        let lapses_in = slot.lapses_at.saturating_since(now);
        let lapses_in = if self.is(M::LapseHidden) { lapses_in.max(Duration::from_millis(1)) } else { lapses_in };
        let inspection = Inspection::new(
            slot.record.clone(),
            slot.expires_at.saturating_since(now),
            matches!(slot.record.state, State::Pending { .. }).then_some(lapses_in),
        );
        let [first_seen, began] = [slot.first_seen, slot.began].map(|at| Some(now.saturating_since(at)));
        inspection.since(first_seen, began)
    }

    /// Reports whether `filter` selects this record.
    fn asks_for(&self, filter: &Filter, key: &Key, seen: &Inspection) -> bool {
        let standing = match (&seen.record.state, seen.lapses_in) {
            _ if seen.damage.is_some() && !self.is(M::DamageIsCertain) => Standing::Damaged,
            (State::Pending { .. }, Some(left)) if left.is_zero() && !self.is(M::ListIgnoresLapse) => Standing::Lapsed,
            (State::Pending { .. }, _) => Standing::Running,
            (State::Released, _) => Standing::Released,
            (State::Interrupted, _) => Standing::Interrupted,
            (State::Completed(_), _) => Standing::Completed,
            _ => Standing::Failed,
        };
        let scope = filter.scope.as_deref();
        (filter.standings.is_empty() || filter.standings.contains(&standing) || self.is(M::ListIgnoresStanding))
            && scope.is_none_or(|scope| match self.is(M::ListTakesScopesThatBeginSo) {
                true => key.scope().starts_with(scope),
                false => key.scope() == scope,
            })
            && (self.is(M::ListIgnoresAge)
                || seen.damage.is_some()
                || filter.older_than.is_none_or(|age| seen.began >= Some(age)))
            && (self.is(M::ListIgnoresText)
                || filter.contains.as_deref().is_none_or(|text| key.to_string().contains(text)))
            && (self.is(M::ListIgnoresAttempts)
                || filter
                    .attempts_exhausted
                    .is_none_or(|most| seen.record.is_exhausted(most, seen.lapses_in.unwrap_or_default())))
            && (!filter.undecided || seen.waits_for_decision() || self.is(M::ListIgnoresUndecided))
            && (!filter.unsent || seen.unsent_messages().is_some() || self.is(M::ListIgnoresUnsent))
    }

    fn page(&self, filter: &Filter) -> Page {
        let now = self.now();
        let values = self.shared.values.lock().unwrap();
        let after = filter.after.as_ref().map_or("", Cursor::as_str);
        let mut records: Vec<(Key, Inspection)> = Vec::new();
        let mut skips = self.is(M::ListSkipsAfterAPage) && !after.is_empty();
        for (name, value) in values.iter() {
            let mut seen = match value {
                Value::Slot(slot) if slot.expires_at <= now && !self.is(M::ListShowsExpired) => continue,
                Value::Slot(slot) => self.seen(slot),
                Value::Foreign(_) if self.is(M::ForeignIsAbsent) || self.is(M::DamageIsUnlisted) => continue,
                Value::Foreign(text) => self.damaged(text),
            };
            let is_seen = if self.is(M::ListRepeatsTheLast) { **name < *after } else { **name <= *after };
            if is_seen || std::mem::take(&mut skips) {
                continue;
            }
            let key: Key = name.parse().expect("a stored key");
            if !self.asks_for(filter, &key, &seen) {
                continue;
            }
            if records.len() == filter.limit as usize && !self.is(M::ListIgnoresLimit) {
                let last = records.last().map(|(key, _)| Cursor::new(key.as_str()));
                return Page::new(records, last);
            }
            if let State::Completed(result) | State::Failed(result) = &mut seen.record.state
                && let StoredResult::Encoded { codec, bytes } = result
                && !self.is(M::ListShowsResults)
            {
                *result = StoredResult::LeftOut { codec: *codec, size: Some(bytes.len() as u64) };
            }
            if self.is(M::ListTellsNoHolder) {
                seen.record.provenance = Provenance::default();
            }
            records.push((key, seen));
        }
        Page::new(records, None)
    }

    fn reached(&self) -> Result<(), StoreError> {
        match self.reachable {
            true => Ok(()),
            false => Err(StoreError::new(StoreErrorKind::Unavailable, "no server")),
        }
    }
}

impl Store for Plain {
    fn handle(&self) -> Arc<dyn Store> {
        let shared = if self.is(M::HandleIsACopy) {
            let values = self.shared.values.lock().unwrap().clone();
            Arc::new(Shared { values: Mutex::new(values), ..Shared::default() })
        } else {
            Arc::clone(&self.shared)
        };
        Arc::new(Self { shared, ..self.clone() })
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
        &self.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        if !self.is(M::DroppedReservationLands) {
            return self.one(&request.key, true, |slot| self.admit(slot, request));
        }
        StoreFuture::new(async move {
            let flight = Flight(self, Some(request.clone()));
            pause(2).await;
            flight.lands().await
        })
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        self.one(&lease.key, true, move |slot| self.begin(slot, lease))
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        self.one(&lease.key, true, move |slot| self.append(slot, lease, journal))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            // Mistakes with the size of a batch.
            if leases.is_empty() && self.is(M::EmptyBatchFails) {
                return Err(StoreError::new(StoreErrorKind::Unconfirmed, "syntax error near IN ()"));
            }
            let limit = if self.is(M::BatchOfAThousand) { 1_000 } else { leases.len() };
            let together = [M::RenewGroupsAnswers, M::RenewAllOrNothing, M::RenewWaitsForEach, M::RenewAnswersTogether];
            // The store answers for a lease when the lease is renewed. The mistake: the store answers for all leases
            // together.
            let one = |at: usize, lease: &'a Lease| async move {
                let renewed = match at {
                    at if at >= limit => Ok(Verdict::Refused),
                    _ => self.one(&lease.key, true, |slot| self.keep_alive(slot, lease)).await,
                };
                let blocked = renewed.is_err() && self.is(M::BlockedIsRefused);
                let renewed = if blocked { Ok(Verdict::Refused) } else { renewed };
                if let Ok(write) = renewed
                    && !together.contains(&self.mistake)
                {
                    answer(at, write);
                    if at > 0 && self.is(M::RenewAnswersTwice) {
                        answer(at - 1, write);
                    }
                }
                renewed
            };
            let renewals = leases.iter().enumerate().map(|(at, lease)| one(at, lease));
            // All leases are renewed concurrently, so that a locked record delays no other renewal. The mistake: the
            // leases are renewed one by one.
            let renewed = if self.is(M::RenewWaitsForEach) {
                let mut renewed = Vec::new();
                for (at, renewal) in renewals.enumerate() {
                    let write = renewal.await?;
                    answer(at, write);
                    renewed.push(Ok(write));
                }
                renewed
            } else {
                join_all(renewals).await
            };
            // The mistake: the store gives the answers in another order, or the same answer for all leases.
            let mut answers = renewed.into_iter().collect::<Result<Vec<_>, _>>()?;
            if self.is(M::RenewGroupsAnswers) {
                answers.sort_by_key(|answer| *answer == Verdict::Refused);
            }
            if self.is(M::RenewAllOrNothing) && answers.contains(&Verdict::Refused) {
                answers.fill(Verdict::Refused);
            }
            if together.contains(&self.mistake) && !self.is(M::RenewWaitsForEach) {
                answers.into_iter().enumerate().for_each(|(at, write)| answer(at, write));
            }
            Ok(())
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        self.one(&lease.key, true, |slot| self.end(slot, lease, finish.state(), None))
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        let write = self.one(&lease.key, true, move |slot| self.end(slot, lease, release.state(), Some(release)));
        if !self.is(M::ReleaseAnsweredByALaterLook) {
            return write;
        }
        StoreFuture::new(async move {
            if write.await? == Verdict::Refused {
                return Ok(Verdict::Refused);
            }
            // Other tasks reserve the key meanwhile.
            self.context.clock().sleep(Duration::from_millis(1)).await;
            let found = self.one(&lease.key, false, |slot| slot.as_ref().map(|slot| slot.record.owner)).await?;
            Ok(if found == Some(lease.owner) { Verdict::Applied } else { Verdict::Refused })
        })
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let mut limit = self.context.clock().sleep(at_most);
            loop {
                let mut written = std::pin::pin!(self.shared.written.notified());
                written.as_mut().enable();
                let found = self.one(key, false, |slot| slot.as_ref().map(|slot| slot.record.clone())).await?;
                let pending = found.is_some_and(|record| match record.state {
                    State::Pending { .. } => record.attempt == attempt || self.is(M::WaitsForAnyAttempt),
                    State::Completed(_) => self.is(M::WaitsForFinished),
                    _ => false,
                });
                if !pending {
                    return self.told(key).await;
                }
                let over = poll_fn(|cx| {
                    if written.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(false);
                    }
                    if self.is(M::WaitsUnbounded) { Poll::Pending } else { limit.as_mut().poll(cx).map(|()| true) }
                })
                .await;
                if over {
                    if self.is(M::WaiterReleases) {
                        let release = |slot: &mut Option<Slot>| {
                            slot.as_mut().unwrap().record.state = State::Released;
                        };
                        self.one(key, true, release).await?;
                    }
                    return self.told(key).await;
                }
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let found = self.one(key, false, |slot| slot.as_ref().map(|slot| self.seen(slot))).await;
            match (&found, self.foreign(key)) {
                (Err(error), Some(text))
                    if error.kind() == StoreErrorKind::Corrupt && !self.is(M::DamageFailsTheLook) =>
                {
                    Ok(Some(self.damaged(&text)))
                }
                _ => found,
            }
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(async move {
            match self.decide_about_damage(decision) {
                Some(decided) => Ok(decided),
                None => self.one(&decision.key, true, move |slot| Self::decide(self, slot, decision)).await,
            }
        })
    }

    fn purge(&self, batch: u32) -> StoreFuture<'_, u64> {
        let now = self.now();
        let over = |slot: &Slot| {
            let lapsed = matches!(slot.record.state, State::Pending { .. }) && slot.lapses_at <= now;
            slot.expires_at <= now
                || (self.is(M::PurgesTheFinished) && slot.record.is_finished())
                || (self.is(M::PurgesTheLapsed) && lapsed)
        };
        let mut values = self.shared.values.lock().unwrap();
        let expired = values.iter().filter(|(_, value)| matches!(value, Value::Slot(slot) if over(slot)));
        let names: Vec<_> = expired.take(batch as usize).map(|(name, _)| name.clone()).collect();
        for name in &names {
            values.remove(name);
        }
        StoreFuture::ready(Ok(names.len() as u64))
    }

    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        let is_damaged = |value: &Value| matches!(value, Value::Foreign(_));
        if self.is(M::DamageFailsTheList) && self.shared.values.lock().unwrap().values().any(is_damaged) {
            return StoreFuture::ready(Err(StoreError::new(StoreErrorKind::Corrupt, "not a record")));
        }
        StoreFuture::ready(self.reached().map(|()| self.page(filter)))
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::ready(if self.is(M::PingKnowsNothing) { Ok(()) } else { self.reached() })
    }
}

/// Returns whether the result of the record is stored with messages.
fn has_messages(state: &State) -> bool {
    matches!(state, State::Completed(StoredResult::Encoded { codec, .. }) if codec.as_str() == "idem:outbox")
}
