//! Deliberate mistakes of the protocol, each with the property that must notice it.
//!
//! Mistakes of calls are made in `steps.rs`, at the step that they change. Mistakes of the store's decisions are made
//! here.

use idem_runtime::OnCrash;
use idem_runtime::record::{Record, State};
use idem_runtime::store::{OwnerToken, ReserveRequest};

use super::properties::{ENDS, Rule};
use super::state::Slot;

/// Declares the mistakes: name, property that notices the mistake, configuration in which it does, and description.
macro_rules! mutants {
    ($($(#[doc = $about:literal])+ $mutant:ident => $noticed:expr, $config:literal;)*) => {
        /// Deliberate mistake of the protocol.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Mutant {
            $($(#[doc = $about])+ $mutant,)*
        }

        impl Mutant {
            pub(crate) const ALL: &[Self] = &[$(Self::$mutant,)*];

            /// Returns the name of the property that must notice the mistake.
            pub(crate) fn noticed_by(self) -> &'static str {
                match self {
                    $(Self::$mutant => Noticed::from($noticed).0,)*
                }
            }

            /// Returns the name of the configuration in which the property notices the mistake.
            pub(crate) fn config(self) -> &'static str {
                match self {
                    $(Self::$mutant => $config,)*
                }
            }

            /// Returns the description of the mistake.
            pub(crate) fn about(self) -> &'static str {
                match self {
                    $(Self::$mutant => concat!($($about),+).trim_ascii_start(),)*
                }
            }
        }
    };
}

struct Noticed(&'static str);

impl From<Rule> for Noticed {
    fn from(rule: Rule) -> Self {
        Self(rule.name())
    }
}

impl From<&'static str> for Noticed {
    fn from(name: &'static str) -> Self {
        Self(name)
    }
}

mutants! {
    // Mistakes in the store's decisions. Each description says what the store does wrongly.
    /// A live lease is taken over.
    LiveTakenOver => Rule::S1, "crashes";
    /// The store lets an operator reopen a record whose lease is live.
    ReopenLive => Rule::S1, "operators";
    /// A renewal does not compare the owner token.
    RenewAnybodys => Rule::S2, "beats";
    /// A completion does not compare the owner token.
    FinishAnybodys => Rule::S2, "lost";
    /// A release does not compare the owner token.
    ReleaseAnybodys => Rule::S2, "drops";
    /// A takeover keeps the owner token of the lapsed attempt.
    TakeoverKeepsToken => Rule::S2, "crashes";
    /// A later completion overwrites a finished record.
    FinishOverFinished => Rule::S3, "lost";
    /// A later release overwrites a finished record.
    ReleaseOverFinished => Rule::S3, "drops";
    /// A reservation replaces a finished record.
    ReserveOverFinished => Rule::S3, "lost";
    /// A takeover keeps the number of the attempt.
    TakeoverKeepsNumber => Rule::S4, "crashes";
    /// A completion compares the owner token, but not the number of the attempt.
    FinishAnyAttempt => Rule::S4, "doubled_reservation";
    /// A renewal compares the owner token, but not the number of the attempt.
    RenewAnyAttempt => Rule::S2, "doubled_reservation";
    /// A release deletes the record, so that attempts start at 1 again.
    ReleaseForgets => Rule::S4, "drops";
    /// The store forgets a pending record when its lease lapses.
    RetentionIsTheLease => Rule::S4, "crashes";
    /// An operator's reopening forgets the number of the attempt.
    ReopenForgetsNumber => Rule::S4, "operators";
    /// An operator's decision compares only the number of the attempt.
    DecidesUnseen => Rule::S15, "two_operators";
    /// An operator's decision does not change the owner token of the record.
    DecisionKeepsOwner => Rule::S15, "two_operators";
    /// A takeover ignores `on_crash = fail` of the attempt that died.
    FailOfOwnerIgnored => Rule::S5, "one_side_fails";
    /// A takeover ignores `on_crash = fail` of the caller.
    FailOfCallerIgnored => Rule::S5, "one_side_fails";
    /// The store marks an attempt as begun although its lease has lapsed.
    MarkedAfterLapse => Rule::S14, "late_landings";
    /// Under `fail`, an attempt that lapses without a mark is interrupted.
    UnmarkedIsInterrupted => Rule::S14, "late_landings";
    /// The store counts an attempt that lapsed without a mark against `max_attempts`.
    UnmarkedCounts => Rule::S14, "late_landings_counted";
    /// Under `fail`, a body begins without a mark.
    BeginsUnmarked => Rule::S5, "at_most_once";
    /// A body begins although its mark was refused.
    MarkRefusedStartsBody => Rule::S5, "late_landings";
    /// A call whose mark was refused does not release its reservation, and reserves again with another owner token.
    RefusedMarkKeepsKey => Rule::S12, "marks_between_clocks";
    /// The store lets a reservation replace an interrupted record.
    InterruptedRunsAgain => Rule::S5, "at_most_once";
    /// A repeated reservation with the same owner token is treated as another attempt's.
    OwnReservationIsForeign => Rule::S8, "lost";
    /// The store refuses a repeated completion.
    RepeatedFinishRefused => Rule::S8, "lost";
    /// The store refuses a repeated release.
    RepeatedReleaseRefused => Rule::S8, "drops";
    /// A repeated release refunds its attempt again.
    RefundRepeated => Rule::S8, "attempts_refunded";
    /// The store refuses the end of an attempt whose lease lapsed, although no other attempt took over.
    LapsedOwnerRefused => Rule::LateEnd, "lost";
    /// The fingerprint is not compared while an attempt runs.
    FingerprintSkippedWhileLive => Rule::Fingerprint, "fingerprints";
    /// The fingerprint is not compared in a takeover.
    FingerprintSkippedAtTakeover => Rule::Fingerprint, "fingerprints";
    /// The fingerprint is not compared once a record is released.
    FingerprintSkippedWhenReleased => Rule::Fingerprint, "fingerprints";
    /// The fingerprint is not compared before a replay.
    FingerprintSkippedAtReplay => Rule::Fingerprint, "fingerprints";
    /// `max_attempts` is ignored.
    MaxAttemptsIgnored => Rule::MaxAttempts, "max_attempts";
    /// A first attempt that was released is never counted.
    ReleasedFirstIsNotCounted => Rule::MaxAttempts, "attempts_refunded";
    /// Two keys share a record.
    KeysShareRecord => Rule::KeysApart, "two_keys";
    /// The store treats a lapsed lease as live, so that a crash never frees its key.
    LapsedStaysLive => Rule::L1, "crashes";
    /// A completion wakes no waiter.
    FinishWakesNobody => Rule::L3, "waiting";
    /// A release wakes no waiter.
    ReleaseWakesNobody => Rule::L3, "waiting";
    /// A takeover wakes no waiter.
    TakeoverWakesNobody => Rule::L3, "waiting";
    /// A duplicate starts to wait without checking whether the attempt has ended meanwhile.
    WaitsWithoutLooking => Rule::L3, "waiting";
    /// A waiting call gets "in progress" for an attempt whose lease has lapsed.
    ToldOfLapsed => Rule::L1, "waits_and_fails";
    /// A waiting call gets "in progress" although its own reservation may have taken effect.
    ToldOfItsOwn => Rule::S8, "waits_and_fails";
    /// The clocks differ, and the store compares times without adding the allowed skew.
    SkewIgnored => Rule::S1, "clocks_that_differ";
    /// The clocks differ, and a comparison ignores the fraction of a tick that a clock reading drops.
    SkewNotRoundedUp => Rule::S1, "clocks_that_differ";
    /// The store has no clock, so each request carries the time of its sender. A renewal that arrives after a newer one
    /// shortens the lease.
    LateRenewalCutsShort => Rule::S1, "late_renewals_between_clocks";

    /// An append does not compare the owner token.
    AppendAnybodys => Rule::StepOwn, "steps";
    /// An append compares the owner token, but not the number of the attempt.
    AppendAnyAttempt => Rule::StepOwn, "steps_doubled";
    /// A refused append renews the lease of the attempt that has taken over.
    RefusedAppendExtends => Rule::S2, "steps";
    /// A finished record takes an append.
    AppendAfterFinish => Rule::StepOwn, "steps_doubled";
    /// A released record takes an append.
    AppendAfterRelease => Rule::StepOwn, "steps";
    /// The journal of a late append replaces a longer journal.
    ShorterJournalReplaces => Rule::StepKept, "steps_doubled";
    /// A takeover drops the journal.
    TakeoverDropsJournal => Rule::StepKept, "steps";
    /// A release drops the journal.
    ReleaseDropsJournal => Rule::StepKept, "steps";
    /// An operator's reopening drops the journal.
    ReopenDropsJournal => Rule::StepTwice, "steps_reopened";
    /// A takeover replaces the journal by the journal that its sender saw, although an append has come in between. The
    /// store has no clock, and the append did not change the lease.
    ReplacesUnseenJournal => Rule::StepKept, "steps_between_clocks";
    /// An append does not compare the owner token if its journal ends with the beginning of a step.
    BegunByAnybody => Rule::StepOwn, "steps_under_fail";
    /// An operator's decision about a step does not compare the size of the journal.
    StepsDecidedUnseen => Rule::StepDecision, "steps_decided_late";
    /// The store lets an operator decide about a step while its attempt runs.
    StepsDecidedWhileRunning => Rule::StepDecision, "steps_decided";

    /// A mark compares neither the owner token nor the number of the attempt.
    MarkOfAnyAttempt => Rule::MessageMarked, "outbox_operators";
    /// A mark replaces the messages of the record by its own list, although a later mark may have come before.
    MarkReplacesList => Rule::MarkKept, "outbox_marks";
    /// A repeated completion puts messages into the record again that are marked as sent.
    RepeatedFinishBringsBack => Rule::S3, "outbox_beside";
    /// An operator who replaces a result removes the messages of the record.
    ReplaceDropsMessages => Rule::MessageSent, "outbox_operators";

    /// The record of a reservation in doubt is not marked as begun.
    DoubtUnmarked => Rule::S18, "reconcilers";
    /// The store grants an operation in doubt to a call without a reconciler.
    DoubtForAnybody => Rule::S18, "some_reconcile";

    // Mistakes in a call's steps. Each description says what the call does wrongly.
    /// A call counts its lease from the answer to its reservation, not from the request.
    LeaseCountsFromAnswer => Rule::S1Belief, "crashes";
    /// A call counts its lease from the latest of several reservations, although the store may have granted an
    /// earlier one.
    LeaseCountsFromLastRequest => Rule::S1Belief, "waits_and_fails";
    /// A body starts although its lease had lapsed before the answer came.
    LateAnswerStartsBody => Rule::S1Start, "crashes";
    /// A call counts its lease from the answer to the renewal, not from the request.
    RenewalCountsFromAnswer => Rule::S1Belief, "beats";
    /// A rejected duplicate releases the record that it found.
    RejectedDuplicateReleases => Rule::S2, "crashes";
    /// A body that is dropped under `on_crash = fail` is released, not interrupted.
    DroppedUnderFailIsReleased => Rule::S5, "at_most_once";
    /// A failure of the store is read as "no record".
    ErrorReadAsNoRecord => Rule::S6, "refusals";
    /// The caller gets `Ok` while the completion is under way.
    OkBeforeRecorded => Rule::S7, "lost";
    /// A call treats a refused completion as recorded.
    RefusalReadAsDone => Rule::S7, "crashes";
    /// A call treats a completion without an answer as recorded.
    NoAnswerReadAsDone => Rule::S7, "lost";
    /// The call stops recording after the first failure.
    GivesUpWithinLease => Rule::S7Retry, "lost";
    /// A call gives up a late write after the first failure.
    LateWriteGivesUp => Rule::S12, "drops";
    /// A call whose result could not be recorded releases its key.
    UnrecordedIsReleased => Rule::SuccessHeld, "refusals";
    /// The release of a body that is dropped after its start says that the body did not start.
    DroppedCountsAsNotStarted => Rule::MaxAttempts, "max_attempts";
    /// A reservation replaces a record that its sender has not seen.
    ReplacesUnseen => Rule::S12, "drops";
    /// A takeover replaces a record whose lease was renewed after the sender saw it.
    ReplacesRevived => Rule::S12, "late_takeovers";
    /// A reservation that arrives after its own release reserves the key again.
    LateReservationPasses => Rule::S12, "drops_in_one_step";
    /// The clean-up of an unanswered reservation only releases the key, and ends when that release is refused.
    CleanUpOnlyReleases => Rule::S12, "drops";
    /// A dropped call writes nothing, and so frees no key.
    DropWritesNothing => Rule::S12, "drops";
    /// A reservation is not released if its call does not await the answer.
    UnansweredNotReleased => Rule::S12, "drops";
    /// A key is freed before the values of its body are dropped.
    ReleasedBeforeValues => Rule::S17, "drops";
    /// The lease is not renewed while the values of a body that exceeded its time-out are dropped.
    ValuesWithoutLease => Rule::L6, "hangs";
    /// A body waits for a lease that the store has permanently refused to renew.
    RefusedWaitsOn => ENDS, "refused_renewals";
    /// A body that returns an error keeps its key.
    ErrorKeepsKey => Rule::L2, "drops";
    /// A body is registered for heartbeats only after its first poll.
    RegisteredWhenPending => Rule::L6, "polls";
    /// The answers to concurrent renewals are processed only when all of them have come.
    RenewedTogether => Rule::L6, "stuck_keys";
    /// A body is polled although its lease is over by the clock of its process.
    PolledBeyondLease => Rule::S11, "polls";
    /// The time-out of a body is ignored, so that the body may run forever.
    TimeoutIgnored => ENDS, "hangs";
    /// The lease of a body that exceeded its time-out is renewed.
    RenewedBeyondTimeout => Rule::L7, "hangs";
    /// A heartbeat that finds the lease lost ends the tries to write the end of the attempt.
    BeatRefusalEndsEnding => Rule::S7Retry, "beats";
    /// The library tries to write the end of an attempt for as long as the lease can be renewed.
    EndsForEver => Rule::EndsInTime, "endings";
    /// A call that could not record its error tries to release the key. The store refuses the release, and the call
    /// reports a lost lease, although its error may already be recorded.
    ShortenedRefusalIsFinal => Rule::Told, "endings";
    /// A body goes on after a heartbeat has found its lease lost.
    LostLeaseRunsOn => Rule::L4, "beats";
    /// A body begins although the effect of an earlier attempt is in doubt.
    DoubtIgnored => Rule::S18, "reconcilers";
    /// A body begins after its reconciler has ended without an answer.
    UnknownReadAsNotDone => Rule::S18, "reconcilers";
    /// A reconciler that is dropped releases its key.
    DroppedReconcilerReleases => Rule::S18, "reconcilers_unanswered";
    /// The clean-up of a reservation in doubt releases the key.
    CleanUpForgetsDoubt => Rule::S18, "reconcilers_unanswered";
    /// The clean-up of a call that has marked its record is granted an operation that a later attempt left in doubt.
    CleanUpAsks => Rule::S18, "reconcilers_cleaned_up";
    /// The clean-up of a reservation without an answer releases a key that may be in doubt.
    CleanUpReleasesUnseen => Rule::S18, "reconcilers_unanswered";
    /// An attempt whose reconciler has ended without an answer counts against `max_attempts`.
    QuestionsCount => Rule::S14, "reconcilers_counted";
    /// An uncertain error frees the key.
    UncertainErrorReleased => Rule::S18, "uncertain_errors";
    /// An attempt runs each step, although an earlier attempt has journaled it.
    JournaledStepRuns => Rule::StepOnce, "steps";
    /// A step returns its value although the store has not confirmed its entry.
    UnconfirmedStepReturns => Rule::StepReturned, "steps";
    /// A journal leaves out the entries of steps whose append got no answer.
    UnconfirmedEntryLeftOut => Rule::StepReturned, "steps_unconfirmed";
    /// An attempt counts its lease from the answer to an append, not from the request.
    AppendCountsFromAnswer => Rule::S1Belief, "steps_doubled";
    /// The body of a step under `fail` runs before the store has confirmed the beginning of the step.
    StepBeginsUnconfirmed => Rule::StepFail, "steps_under_fail";
    /// The body of a step runs although the append of its beginning got no answer.
    StepBeginsUnanswered => Rule::StepBegun, "steps_under_fail_late";
    /// A step under `fail` runs although its effect is in doubt.
    StepDoubtIgnored => Rule::StepFail, "steps_under_fail";
    /// The body of a step runs after the reconciler of the step has ended without an answer.
    StepUnknownReadAsNotDone => Rule::StepReconcile, "steps_reconciled";
    /// After `NotDone` of its reconciler, the body of a step runs although the store has not confirmed its beginning.
    StepBegunAgainUnconfirmed => Rule::StepBegun, "steps_reconciled";
    /// A step whose body returned an uncertain error is journaled as undone.
    StepUncertainIsUndone => Rule::StepUndone, "steps_under_fail";
    /// A step whose reconciler has ended without an answer is journaled as ended.
    StepUnknownIsEnded => Rule::StepVouched, "steps_reconciled";
    /// An error is recorded as the end of an operation that has a step in doubt.
    StepDoubtRecorded => Rule::StepOpen, "steps_under_fail_dropped";
    /// Messages are sent before the result is recorded.
    SentBeforeRecorded => Rule::MessageRecorded, "outbox";
    /// A call whose completion was refused, because another attempt has taken over, sends its messages.
    SendsAfterLoss => Rule::MessageOnce, "outbox_beside";
    /// Messages are marked as sent before they are sent.
    MarkedBeforeSent => Rule::MessageMarked, "outbox";
    /// A message is sent although the broker has not confirmed an earlier message for the same destination.
    SendsPastFailure => Rule::MessageOrder, "outbox";
    /// A call returns `Ok` although the broker has not confirmed its messages.
    UnsentIsOk => Rule::MessageSent, "outbox";
    /// A duplicate replays the result of a record whose messages are not all sent.
    UnsentReplayed => Rule::MessageSent, "outbox";
    /// A duplicate that has waited replays the result of a record whose messages are not all sent.
    WaiterReplaysUnsent => Rule::MessageSent, "outbox_waited_for";
    /// The completion without its result, which is tried if the store does not take the result, has no messages.
    ShortenedDropsMessages => Rule::MessageSent, "outbox_shortened";
    /// A temporary failure of the store ends the wait of a duplicate.
    FailureEndsWait => Rule::L3Outage, "waits_in_outages";
    /// A duplicate waits until it is woken, without a limit.
    WaitsForEver => ENDS, "waiting";
}

impl Mutant {
    /// Applies the mistake to a reservation and to the record that the store finds.
    pub(crate) fn before_meeting(
        self,
        met: &Slot,
        record: &mut Record,
        asked: &mut ReserveRequest,
        lapses_in: &mut u8,
    ) {
        let lapsed = met.is_pending() && *lapses_in == 0;
        // Some mistakes skip the fingerprint check: the store compares nothing if the request has no fingerprint.
        let skips_fingerprint = match self {
            Self::FingerprintSkippedWhileLive => met.is_pending() && !lapsed,
            Self::FingerprintSkippedAtTakeover => lapsed,
            Self::FingerprintSkippedWhenReleased => record.state == State::Released,
            Self::FingerprintSkippedAtReplay => record.is_finished(),
            _ => false,
        };
        if skips_fingerprint {
            asked.fingerprint = None;
        }
        // Other mistakes change the record, the request or the lease before `Record::admit` decides.
        match self {
            Self::LiveTakenOver => *lapses_in = 0,
            Self::LapsedStaysLive => *lapses_in = (*lapses_in).max(1),
            Self::ReserveOverFinished if record.is_finished() => record.state = State::Released,
            Self::InterruptedRunsAgain if record.state == State::Interrupted => record.state = State::Released,
            Self::FailOfOwnerIgnored => {
                if let State::Pending { on_crash, .. } = &mut record.state {
                    *on_crash = OnCrash::Retry;
                }
            }
            Self::UnmarkedIsInterrupted | Self::UnmarkedCounts if lapsed => {
                if let State::Pending { begun, .. } = &mut record.state {
                    *begun = true;
                }
            }
            Self::FailOfCallerIgnored if lapsed => asked.on_crash = OnCrash::Retry,
            Self::OwnReservationIsForeign => record.owner = OwnerToken::from_bytes([u8::MAX; OwnerToken::BYTES]),
            Self::LateReservationPasses if record.state == State::Released => {
                record.owner = OwnerToken::from_bytes([u8::MAX; OwnerToken::BYTES]);
            }
            Self::MaxAttemptsIgnored => asked.max_attempts = None,
            Self::DoubtForAnybody if record.state == State::Interrupted => record.state = State::Released,
            Self::ReleasedFirstIsNotCounted if record.state == State::Released && record.attempt == 1 => {
                record.attempts_used = record.attempts_used.saturating_sub(1);
            }
            _ => {}
        }
    }

    /// Applies the mistake to the record that a new attempt writes.
    pub(crate) fn before_replacing(self, met: &Slot, with: &mut Record, takeover: bool) {
        match self {
            Self::TakeoverKeepsToken if takeover => with.owner = OwnerToken::from_bytes([met.owner; OwnerToken::BYTES]),
            Self::TakeoverKeepsNumber if takeover => with.attempt = met.attempt.into(),
            Self::TakeoverDropsJournal if takeover => with.journal = None,
            Self::DoubtUnmarked => {
                if let State::Pending { begun, .. } = &mut with.state {
                    *begun = false;
                }
            }
            _ => {}
        }
    }

    /// Returns whether the mistake lets an attempt end although another owner holds the record.
    pub(crate) fn ends_anybodys(self, met: &Slot, with_result: bool) -> bool {
        match self {
            Self::FinishAnybodys => with_result && met.is_pending(),
            Self::ReleaseAnybodys => !with_result && met.is_pending(),
            _ => self.ends_an_ended_attempt(met, with_result),
        }
    }

    /// Returns whether the mistake lets an attempt end although the record has another attempt number.
    pub(crate) fn ends_any_attempt(self, met: &Slot, with_result: bool) -> bool {
        self == Self::FinishAnyAttempt || self.ends_anybodys(met, with_result)
    }

    /// Returns whether the mistake lets an attempt end although the record is finished.
    pub(crate) fn ends_an_ended_attempt(self, met: &Slot, with_result: bool) -> bool {
        match self {
            Self::FinishOverFinished => with_result && met.result().is_some(),
            Self::ReleaseOverFinished => !with_result && met.result().is_some(),
            _ => false,
        }
    }
}
