//! The protocol with one mistake at a time, and the property that has to notice it.
//!
//! Mistakes of calls are made where the step is made; mistakes of the store's decisions are made here.

use idem_runtime::OnCrash;
use idem_runtime::record::{Record, State};
use idem_runtime::store::{OwnerToken, ReserveRequest};

use super::properties::{ENDS, Rule};
use super::state::Slot;

/// Declares the mistakes: the name, the property that notices it, the configuration in which it does, and a description.
macro_rules! mutants {
    ($($(#[doc = $about:literal])+ $mutant:ident => $noticed:expr, $config:literal;)*) => {
        /// One mistake.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Mutant {
            $($(#[doc = $about])+ $mutant,)*
        }

        impl Mutant {
            pub(crate) const ALL: &[Self] = &[$(Self::$mutant,)*];

            /// The name of the property that has to notice.
            pub(crate) fn noticed_by(self) -> &'static str {
                match self {
                    $(Self::$mutant => Noticed::from($noticed).0,)*
                }
            }

            /// The configuration in which the property notices.
            pub(crate) fn config(self) -> &'static str {
                match self {
                    $(Self::$mutant => $config,)*
                }
            }

            /// The description of the mistake.
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
    // Decisions of the store.
    /// A live lease is taken over.
    LiveTakenOver => Rule::S1, "crashes";
    /// An operator may reopen a record whose lease is live.
    ReopenLive => Rule::S1, "operators";
    /// A renewal looks at no owner token.
    RenewAnybodys => Rule::S2, "beats";
    /// A completion looks at no owner token.
    FinishAnybodys => Rule::S2, "lost";
    /// A release looks at no owner token.
    ReleaseAnybodys => Rule::S2, "drops";
    /// A takeover keeps the owner token of the attempt it takes over from.
    TakeoverKeepsToken => Rule::S2, "crashes";
    /// A finished record is overwritten by a later completion.
    FinishOverFinished => Rule::S3, "lost";
    /// A finished record is overwritten by a later release.
    ReleaseOverFinished => Rule::S3, "drops";
    /// A finished record is reserved anew.
    ReserveOverFinished => Rule::S3, "lost";
    /// A takeover keeps the number of the attempt.
    TakeoverKeepsNumber => Rule::S4, "crashes";
    /// A completion looks at the owner token, and not at the number of the attempt.
    FinishAnyAttempt => Rule::S4, "doubled_reservation";
    /// A renewal looks at the owner token, and not at the number of the attempt.
    RenewAnyAttempt => Rule::S2, "doubled_reservation";
    /// A release deletes the record, so that attempts start at 1 again.
    ReleaseForgets => Rule::S4, "drops";
    /// A pending record is forgotten when its lease lapses.
    RetentionIsTheLease => Rule::S4, "crashes";
    /// An operator's reopening forgets the number of the attempt.
    ReopenForgetsNumber => Rule::S4, "operators";
    /// A decision compares the number of the attempt alone.
    DecidesUnseen => Rule::S15, "two_operators";
    /// A decision leaves the owner token of the record as it was.
    DecisionKeepsOwner => Rule::S15, "two_operators";
    /// At takeover, `on_crash = fail` of the attempt that died is ignored.
    FailOfOwnerIgnored => Rule::S5, "one_side_fails";
    /// At takeover, `on_crash = fail` of the caller is ignored.
    FailOfCallerIgnored => Rule::S5, "one_side_fails";
    /// A mark that arrives after the lease of its attempt is made.
    MarkedAfterLapse => Rule::S14, "late_landings";
    /// An attempt that lapses without a mark is interrupted under `fail`.
    UnmarkedIsInterrupted => Rule::S14, "late_landings";
    /// An attempt that lapses without a mark counts against `max_attempts`.
    UnmarkedCounts => Rule::S14, "late_landings_counted";
    /// A body under `fail` begins without a mark.
    BeginsUnmarked => Rule::S5, "at_most_once";
    /// A body begins although its mark was refused.
    MarkRefusedStartsBody => Rule::S5, "late_landings";
    /// A call whose mark was refused leaves its reservation in the record, and asks as another.
    RefusedMarkKeepsKey => Rule::S12, "marks_between_clocks";
    /// An interrupted record may be reserved.
    InterruptedRunsAgain => Rule::S5, "at_most_once";
    /// A reservation that is repeated with the same owner token is taken for somebody else's.
    OwnReservationIsForeign => Rule::S8, "lost";
    /// A completion that is repeated is refused.
    RepeatedFinishRefused => Rule::S8, "lost";
    /// A release that is repeated is refused.
    RepeatedReleaseRefused => Rule::S8, "drops";
    /// A release that is repeated refunds its attempt once more.
    RefundRepeated => Rule::S8, "attempts_refunded";
    /// An attempt whose lease lapsed may not end, although nobody took over.
    LapsedOwnerRefused => Rule::LateEnd, "lost";
    /// The fingerprint is not looked at while an attempt runs.
    FingerprintSkippedWhileLive => Rule::Fingerprint, "fingerprints";
    /// The fingerprint is not looked at in a takeover.
    FingerprintSkippedAtTakeover => Rule::Fingerprint, "fingerprints";
    /// The fingerprint is not looked at once a record is released.
    FingerprintSkippedWhenReleased => Rule::Fingerprint, "fingerprints";
    /// The fingerprint is not looked at before a replay.
    FingerprintSkippedAtReplay => Rule::Fingerprint, "fingerprints";
    /// `max_attempts` is not looked at.
    MaxAttemptsIgnored => Rule::MaxAttempts, "max_attempts";
    /// A first attempt that was released is never counted.
    ReleasedFirstIsNotCounted => Rule::MaxAttempts, "attempts_refunded";
    /// Two keys share a record.
    KeysShareRecord => Rule::KeysApart, "two_keys";
    /// A lapsed lease is honoured for ever, so that a crash never frees its key.
    LapsedStaysLive => Rule::L1, "crashes";
    /// A completion wakes nobody.
    FinishWakesNobody => Rule::L3, "waiting";
    /// A release wakes nobody.
    ReleaseWakesNobody => Rule::L3, "waiting";
    /// A takeover wakes nobody.
    TakeoverWakesNobody => Rule::L3, "waiting";
    /// A duplicate waits without a look whether the attempt has ended meanwhile.
    WaitsWithoutLooking => Rule::L3, "waiting";
    /// A wait tells that an attempt goes on whose lease has lapsed.
    ToldOfLapsed => Rule::L1, "waits_and_fails";
    /// A call whose own reservation may have landed is told that an attempt goes on.
    ToldOfItsOwn => Rule::S8, "waits_and_fails";
    /// Where clocks differ, times are compared as if they did not.
    SkewIgnored => Rule::S1, "clocks_that_differ";
    /// Where clocks differ, the part of a tick that a reading leaves out is forgotten.
    SkewNotRoundedUp => Rule::S1, "clocks_that_differ";
    /// Where the times are the senders', a late renewal cuts short what a later one has confirmed.
    LateRenewalCutsShort => Rule::S1, "late_renewals_between_clocks";

    // Decisions of a call.
    /// The lease counts from when the answer to the reservation came.
    LeaseCountsFromAnswer => Rule::S1Belief, "crashes";
    /// The lease counts from the latest of several reservations, although an earlier one may be what was granted.
    LeaseCountsFromLastRequest => Rule::S1Belief, "waits_and_fails";
    /// A body starts although its lease has lapsed before the answer came.
    LateAnswerStartsBody => Rule::S1Start, "crashes";
    /// The lease counts from when the answer to the renewal came.
    RenewalCountsFromAnswer => Rule::S1Belief, "beats";
    /// A rejected duplicate releases the record it met.
    RejectedDuplicateReleases => Rule::S2, "crashes";
    /// A body that is dropped under `on_crash = fail` is released.
    DroppedUnderFailIsReleased => Rule::S5, "at_most_once";
    /// A store that fails is read as "no record".
    ErrorReadAsNoRecord => Rule::S6, "refusals";
    /// `Ok` is told while the completion is under way.
    OkBeforeRecorded => Rule::S7, "lost";
    /// A completion that is refused is taken for done.
    RefusalReadAsDone => Rule::S7, "crashes";
    /// A completion whose answer does not come is taken for done.
    NoAnswerReadAsDone => Rule::S7, "lost";
    /// Recording is given up after the first failure.
    GivesUpWithinLease => Rule::S7Retry, "lost";
    /// A late write is given up after the first failure.
    LateWriteGivesUp => Rule::S12, "drops";
    /// A success that could not be recorded is released.
    UnrecordedIsReleased => Rule::SuccessHeld, "refusals";
    /// A body that is dropped counts as not started.
    DroppedCountsAsNotStarted => Rule::MaxAttempts, "max_attempts";
    /// A reservation that replaces a record replaces whichever it meets, although its sender has seen another one.
    ReplacesUnseen => Rule::S12, "drops";
    /// A takeover replaces a record whose lease was renewed since its sender has met it.
    ReplacesRevived => Rule::S12, "late_takeovers";
    /// A reservation that arrives after its own release reserves the key once more.
    LateReservationPasses => Rule::S12, "drops_in_one_step";
    /// What an unanswered reservation may hold is released, and a refusal is the end of it.
    CleanUpOnlyReleases => Rule::S12, "drops";
    /// A call that is dropped frees nothing.
    DropWritesNothing => Rule::S12, "drops";
    /// A reservation whose answer is not awaited is not released.
    UnansweredNotReleased => Rule::S12, "drops";
    /// A key is freed before the values of its body are dropped.
    ReleasedBeforeValues => Rule::S17, "drops";
    /// The lease is not renewed while the values of a body that has run for too long are dropped.
    ValuesWithoutLease => Rule::L6, "hangs";
    /// A body waits for a lease although the store has refused for good to renew it.
    RefusedWaitsOn => ENDS, "refused_renewals";
    /// A body that returns an error keeps its key.
    ErrorKeepsKey => Rule::L2, "drops";
    /// A body is registered for heartbeats when its first poll has ended.
    RegisteredWhenPending => Rule::L6, "polls";
    /// Renewals that are asked for together are heard when all of them are answered.
    RenewedTogether => Rule::L6, "stuck_keys";
    /// A body is polled although the clock of its process says that its lease is over.
    PolledBeyondLease => Rule::S11, "polls";
    /// A body may run for ever.
    TimeoutIgnored => ENDS, "hangs";
    /// The lease of a body that has run for too long is renewed.
    RenewedBeyondTimeout => Rule::L7, "hangs";
    /// An end that can't be written is given up when a heartbeat finds the lease lost.
    BeatRefusalEndsEnding => Rule::S7Retry, "beats";
    /// An end is tried for as long as the lease can be renewed.
    EndsForEver => Rule::EndsInTime, "endings";
    /// That a release in place of an error is refused is taken for the loss of the lease.
    ShortenedRefusalIsFinal => Rule::Told, "endings";
    /// A heartbeat that finds the lease lost lets the body run on.
    LostLeaseRunsOn => Rule::L4, "beats";
    /// A store that fails for the moment ends the wait of a duplicate.
    FailureEndsWait => Rule::L3Outage, "waits_in_outages";
    /// A duplicate waits until it is woken, however long that takes.
    WaitsForEver => ENDS, "waiting";
}

impl Mutant {
    /// Applies the mistake to a reservation and the record that it meets.
    pub(crate) fn before_meeting(
        self,
        met: &Slot,
        record: &mut Record,
        asked: &mut ReserveRequest,
        lapses_in: &mut u8,
    ) {
        let lapsed = met.is_pending() && *lapses_in == 0;
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
            Self::ReleasedFirstIsNotCounted if record.state == State::Released && record.attempt == 1 => {
                record.attempts_used = record.attempts_used.saturating_sub(1);
            }
            _ => {}
        }
    }

    /// Applies the mistake to the record of a new attempt.
    pub(crate) fn before_replacing(self, met: &Slot, with: &mut Record, takeover: bool) {
        match self {
            Self::TakeoverKeepsToken if takeover => with.owner = OwnerToken::from_bytes([met.owner; OwnerToken::BYTES]),
            Self::TakeoverKeepsNumber if takeover => with.attempt = met.attempt.into(),
            _ => {}
        }
    }

    /// Whether an attempt may end although the record belongs to another owner.
    pub(crate) fn ends_anybodys(self, met: &Slot, with_result: bool) -> bool {
        match self {
            Self::FinishAnybodys => with_result && met.is_pending(),
            Self::ReleaseAnybodys => !with_result && met.is_pending(),
            _ => self.ends_what_has_ended(met, with_result),
        }
    }

    /// Whether an attempt may end although the record has another attempt number.
    pub(crate) fn ends_any_attempt(self, met: &Slot, with_result: bool) -> bool {
        self == Self::FinishAnyAttempt || self.ends_anybodys(met, with_result)
    }

    /// Whether an attempt may end although the record has ended.
    pub(crate) fn ends_what_has_ended(self, met: &Slot, with_result: bool) -> bool {
        match self {
            Self::FinishOverFinished => with_result && met.result().is_some(),
            Self::ReleaseOverFinished => !with_result && met.result().is_some(),
            _ => false,
        }
    }
}
