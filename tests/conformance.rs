//! Runs every clause of the contract for every store, and shows that each clause can fail.

use std::collections::HashSet;
use std::time::Duration;

use idem_runtime::RedisStore;
use idem_runtime::conformance::{CLAUSES, Clause, Subject};
use idem_runtime::redis::RedisOptions;
use idem_runtime::{MemoryStore, store_conformance};
use idem_tests::server::Kind;

#[path = "conformance/plain.rs"]
mod plain;
#[path = "conformance/waiting.rs"]
mod waiting;

use plain::{Mistake, Plain};

store_conformance!(memory, MemoryStore::new());
store_conformance!(redis, Kind::Redis.subject().await);
store_conformance!(valkey, Kind::Valkey.subject().await);
#[cfg(feature = "sqlite")]
store_conformance!(sqlite, idem_tests::sqlite::subject().await);
#[cfg(feature = "mysql")]
store_conformance!(mysql, idem_tests::mysql::subject().await);
#[cfg(feature = "mysql")]
store_conformance!(mysql_partitioned, idem_tests::mysql::subject_partitioned().await);
#[cfg(feature = "postgres")]
store_conformance!(postgres, idem_tests::postgres::subject().await);
#[cfg(feature = "postgres")]
store_conformance!(postgres_partitioned, idem_tests::postgres::subject_partitioned().await);
#[cfg(feature = "postgres")]
store_conformance!(pgbouncer, idem_tests::postgres::subject_behind_pgbouncer().await);
store_conformance!(cluster, idem_tests::cluster::cluster_subject(RedisStore::options).await);
store_conformance!(cluster_replicated, idem_tests::cluster::cluster_subject(replicated).await);
store_conformance!(sentinel, idem_tests::cluster::sentinel_subject(RedisStore::options).await);
store_conformance!(sentinel_replicated, idem_tests::cluster::sentinel_subject(replicated).await);
#[cfg(feature = "dynamodb")]
store_conformance!(dynamo, idem_tests::dynamo::Kind::Dynoxide.subject().await);
#[cfg(feature = "dynamodb")]
store_conformance!(ministack, idem_tests::dynamo::Kind::Ministack.subject().await);
#[cfg(feature = "nats")]
store_conformance!(nats, idem_tests::nats::subject().await);
#[cfg(feature = "nats")]
store_conformance!(nats_replicated, idem_tests::nats::replicated_subject().await);
#[cfg(feature = "wrappers")]
store_conformance!(cached, idem_tests::wrapped::cached());
#[cfg(feature = "wrappers")]
store_conformance!(compressed, idem_tests::wrapped::compressed());
#[cfg(feature = "wrappers")]
store_conformance!(offloaded, idem_tests::wrapped::offloaded());
#[cfg(feature = "wrappers")]
store_conformance!(all_wrappers, idem_tests::wrapped::stacked().await);
store_conformance!(plain_without_a_mistake, open().await);

/// Store in memory for the suite, with a second handle.
fn memory() -> Subject {
    let store = MemoryStore::new();
    Subject::new(store.clone()).peer(store.peer())
}

/// Options under which a replica confirms every write. The time limit is long, because no server fails here.
fn replicated() -> RedisOptions {
    RedisStore::options().min_replicas(1, Duration::from_secs(5))
}

/// Function with a common name, which must not collide with names in the macro's code.
#[expect(clippy::unused_async)]
async fn open() -> Subject {
    Plain::subject(Mistake::None)
}

/// Mistakes of the `Plain` store, each with the clauses of the store contract (tests of the suite) that detect it.
#[rustfmt::skip]
const CAUGHT: &[(Mistake, &[&str])] = &[
    (Mistake::LeaseCutShort, &["first_reservation"]),
    (Mistake::RepeatIsADuplicate, &["reservation_repeated"]),
    (Mistake::RepeatIsATakeover, &["reservation_repeated_after_lapse"]),
    (Mistake::ReadThenWrite, &["one_winner_of_many", "one_winner_of_a_released_key", "one_winner_of_a_takeover"]),
    (Mistake::NobodyWaits, &["one_attempt_at_a_time", "live_lease_is_pending"]),
    (Mistake::TakeoverKeepsNumber, &["takeover_is_a_new_attempt", "finish_after_takeover"]),
    (Mistake::TakeoverUnannounced, &["takeover_is_a_new_attempt"]),
    (Mistake::ReleaseDeletes, &["released_key_is_free", "attempts_never_repeat"]),
    (Mistake::ReleaseRefunds, &["max_attempts_counts_releases"]),
    (Mistake::LapseDoesNotCount, &["max_attempts_counts_lapses"]),
    (Mistake::NotStartedCounts, &["not_started_does_not_count"]),
    (Mistake::NotStartedTakesNumberBack, &["not_started_does_not_count", "attempts_never_repeat"]),
    (Mistake::LimitBeforeResult, &["exhaustion_is_not_final"]),
    (Mistake::LimitBeforeLease, &["live_lease_is_pending", "exhaustion_is_not_final"]),
    (Mistake::LiveLeaseHasNoTimeLeft, &["live_lease_is_pending"]),
    (Mistake::LateReservationPasses, &["released_owner_never_reserves_again"]),
    (Mistake::OneTimeForLeaseAndRetention, &["takeover_is_a_new_attempt", "finish_after_lapse"]),

    (Mistake::HolderFailIgnored, &["crashed_under_fail"]),
    (Mistake::NewcomerFailIgnored, &["crash_found_under_fail"]),
    (Mistake::ReservationBegins, &["unmarked_lapse_under_fail", "unmarked_lapse_does_not_count"]),
    (Mistake::UnmarkedIsInterrupted, &["unmarked_lapse_under_fail"]),
    (Mistake::UnmarkedCounts, &["unmarked_lapse_under_fail", "unmarked_lapse_does_not_count"]),
    (Mistake::BeginByKey, &["begin_is_the_owners", "begin_after_a_lapse"]),
    (Mistake::BeginIgnoresNumber, &["begin_is_the_owners"]),
    (Mistake::BeginAfterALapse, &["begin_after_a_lapse"]),
    (Mistake::BeginAfterTheEnd, &["begin_after_the_end"]),
    (Mistake::BeginNotRepeatable, &["begin_repeated", "dropped_begin"]),
    (Mistake::BeginMarksNothing, &["begin_is_recorded", "crashed_under_fail", "max_attempts_counts_lapses"]),
    (Mistake::BeginRenewsNothing, &["begin_is_recorded"]),
    (Mistake::InterruptedIsReleased, &["marked_interrupted"]),
    (Mistake::FailIsInterruptedAtOnce, &["live_lease_under_fail"]),
    (Mistake::NoLateFinish, &["finish_after_lapse", "late_finish_under_fail"]),
    (Mistake::ReconcilersRefused, &["reconciler_gets_an_interrupted_key", "reconciler_gets_a_lapsed_body"]),
    (Mistake::DoubtUnannounced, &["reconciler_gets_an_interrupted_key", "reconciler_gets_a_lapsed_body"]),
    (Mistake::DoubtUnmarked, &["reconciler_gets_an_interrupted_key", "reconciler_that_crashed"]),
    (Mistake::QuestionsLimited, &["reconciler_gets_an_interrupted_key"]),
    (Mistake::UnresolvedCounts, &["reconciler_gets_an_interrupted_key"]),
    (Mistake::UnresolvedReleases, &["reconciler_gets_an_interrupted_key"]),
    (Mistake::LateReconcilerPasses, &["reconciler_repeats_its_request"]),
    (Mistake::QuestionsUncounted, &["reconciliations_are_limited"]),
    (Mistake::QuestionsUnlimited, &["reconciliations_are_limited"]),

    (Mistake::FingerprintOnlyOnceFinished, &[
        "mismatch_while_pending", "mismatch_once_released", "mismatch_at_takeover", "mismatch_once_interrupted",
        "mismatch_once_exhausted",
    ]),
    (Mistake::FingerprintNotAtTakeover, &["mismatch_at_takeover"]),
    (Mistake::FingerprintNotOnReplay, &["mismatch_on_replay"]),
    (Mistake::FingerprintNotOnceReleased, &["mismatch_once_released"]),
    (Mistake::AbsentFingerprintDiffers, &["missing_fingerprint_matches"]),
    (Mistake::FingerprintLostAtFinish, &["fingerprint_survives", "mismatch_on_replay"]),
    (Mistake::FingerprintLostAtTakeover, &["fingerprint_survives"]),
    (Mistake::FingerprintLostAtRelease, &["fingerprint_survives", "mismatch_once_released"]),

    (Mistake::JournalForgotten, &["journal_comes_back", "journal_only_grows", "large_journal_survives", "dropped_append"]),
    (Mistake::JournalLostAtRelease, &["journal_comes_back", "large_journal_survives"]),
    (Mistake::JournalLostAtTakeover, &["journal_comes_back", "decisions_keep_the_journal"]),
    (Mistake::JournalShrinks, &["journal_only_grows"]),
    (Mistake::JournalOutlivesResult, &["journal_ends_with_the_operation"]),
    (Mistake::JournalCut, &["large_journal_survives"]),
    (Mistake::DecisionsLoseJournal, &["decisions_keep_the_journal", "reopen_with_a_journal"]),
    (Mistake::ReopenKeepsJournal, &["reopen_with_a_journal"]),
    (Mistake::ReopenNeverShrinksJournal, &["reopen_with_a_journal"]),
    (Mistake::ReopenKeepsTheLastJournal, &["reopen_with_a_journal"]),
    (Mistake::ReopensUnseenSteps, &["reopen_with_names_the_seen_journal"]),
    (Mistake::AppendByKey, &["append_is_the_owners"]),
    (Mistake::AppendIgnoresNumber, &["append_is_the_owners"]),
    (Mistake::AppendAfterTheEnd, &["append_after_the_end"]),
    (Mistake::AppendRenewsNothing, &["append_renews"]),
    (Mistake::NoLateAppend, &["append_renews"]),

    (Mistake::MarksNothing, &["messages_are_marked", "messages_never_return", "list_selects_unsent"]),
    (Mistake::MarkChangesOwner, &["messages_are_marked", "messages_never_return"]),
    (Mistake::MarkRenewsRetention, &["messages_are_marked"]),
    (Mistake::MarksUnseen, &["marks_name_their_record"]),
    (Mistake::ReplaceDropsMessages, &["marks_name_their_record"]),
    (Mistake::MessagesAreNeverGivenUp, &["operators_decide_about_messages"]),
    (Mistake::ListIgnoresUnsent, &["list_selects_unsent"]),

    (Mistake::RenewByKey, &["renewal_is_the_owners", "renewal_after_takeover", "renewals_answer_in_order"]),
    (Mistake::RenewDoesNothing, &["renewal_extends"]),
    (Mistake::NoLateRenew, &["renewal_after_lapse"]),
    (Mistake::RenewAfterTheEnd, &["renewal_after_the_end", "landed_finish_is_recognised"]),
    (Mistake::RefusedRenewExtends, &["renewal_is_the_owners", "renewal_after_takeover"]),
    (Mistake::RenewGroupsAnswers, &["renewals_answer_in_order"]),
    (Mistake::RenewAllOrNothing, &["renewals_answer_in_order"]),
    (Mistake::RenewAnswersTwice, &["each_renewal_has_one_answer"]),
    (Mistake::RenewWaitsForEach, &["blocked_record_holds_up_no_other"]),
    (Mistake::RenewAnswersTogether, &["blocked_record_holds_up_no_other"]),
    (Mistake::BlockedIsRefused, &["blocked_record_holds_up_no_other"]),
    (Mistake::EmptyBatchFails, &["no_renewals"]),
    (Mistake::BatchOfAThousand, &["many_renewals"]),
    (Mistake::FinishByKey, &["finish_is_the_owners", "finish_after_takeover"]),
    (Mistake::FinishNotRepeatable, &["finish_repeated", "landed_finish_is_recognised"]),
    (Mistake::FinishOnlyRepeatable, &["landed_finish_is_recognised"]),
    (Mistake::FinishOverwrites, &["finish_is_final", "messages_never_return"]),
    (Mistake::FinishRepeatedExtends, &["finish_is_final"]),
    (Mistake::FinishAfterRelease, &["finish_after_release", "marked_interrupted"]),
    (Mistake::FinishUpserts, &["finish_of_nothing", "pending_record_is_forgotten"]),
    (Mistake::FinishIgnoresNumber, &["finish_names_its_attempt"]),
    (Mistake::RenewIgnoresNumber, &["finish_names_its_attempt"]),
    (Mistake::ReleaseByKey, &["release_is_the_owners", "release_after_takeover"]),
    (Mistake::ReleaseNotRepeatable, &["release_repeated"]),
    (Mistake::RefundTwice, &["release_repeated"]),
    (Mistake::ReleaseDeletesResult, &["release_after_finish"]),
    (Mistake::ReleaseUpserts, &["release_of_nothing"]),
    (Mistake::ReleaseChecksNumber, &["release_ignores_the_number"]),
    (Mistake::ReleaseAnsweredByALaterLook, &["release_among_refused_ones"]),

    (Mistake::ResultRunsAgain, &["completed_is_replayed", "failed_is_replayed"]),
    (Mistake::FailedIsCompleted, &["failed_is_replayed"]),
    (Mistake::FalsyIsNothing, &["every_payload_survives"]),
    (Mistake::TextOnly, &["every_payload_survives"]),
    (Mistake::SizeIsForgotten, &["every_payload_survives"]),
    (Mistake::LargeIsCut, &["large_result_survives"]),
    (Mistake::CodecIsForgotten, &["codec_name_survives"]),

    (Mistake::LetterCaseIgnored, &["similar_keys_are_distinct"]),
    (Mistake::SpaceTrimmed, &["similar_keys_are_distinct"]),
    (Mistake::ScopeIgnored, &["similar_keys_are_distinct"]),
    (Mistake::KeysCutShort, &["long_keys_are_distinct"]),

    (Mistake::NeverForgets, &["result_is_forgotten", "released_record_is_forgotten", "pending_record_is_forgotten"]),
    (Mistake::PendingNeverExpires, &["pending_record_is_forgotten", "retention_of_a_pending_record"]),
    (Mistake::TtlFromReservation, &["retention_starts_at_the_end"]),
    (Mistake::PendingExpiresAtTtl, &["pending_record_outlives_ttl", "retention_of_a_pending_record"]),
    (Mistake::LongTimesAreCut, &["longest_times"]),
    (Mistake::TtlSurvivesTakeover, &["retention_of_a_pending_record"]),

    (Mistake::NeverWakes, &["finish_wakes", "release_wakes", "takeover_wakes", "reopen_wakes", "all_waiters_wake"]),
    (Mistake::OnlyFinishWakes, &["release_wakes", "takeover_wakes", "reopen_wakes"]),
    (Mistake::WakesOne, &["all_waiters_wake"]),
    (Mistake::WaitsForAnyAttempt, &["nothing_to_wait_for"]),
    (Mistake::WaitsForFinished, &["nothing_to_wait_for"]),
    (Mistake::WaitsUnbounded, &["wait_is_bounded"]),
    (Mistake::WaiterReleases, &["abandoned_wait"]),
    (Mistake::WaitTellsThePast, &["wait_tells_the_present"]),
    (Mistake::WaitTellsNoFingerprint, &["wait_tells_the_present"]),
    (Mistake::WaitTellsTheGone, &["wait_tells_the_present"]),

    (Mistake::LapseHidden, &["inspection"]),
    (Mistake::CrashPolicyForgotten, &["inspection", "crashed_under_fail"]),
    (Mistake::ReopensLiveLease, &["reopen_refused"]),
    (Mistake::ReopensAnyAttempt, &["reopen_refused"]),
    (Mistake::ReopenDeletes, &["reopen_interrupted", "reopen_lapsed", "reopen_released"]),
    (Mistake::ReopenGivesUpResults, &["reopen_spares_results"]),
    (Mistake::DiscardSparesResults, &["discard_finished"]),
    (Mistake::DiscardsNothing, &["discard_finished"]),
    (Mistake::ReplaceSparesResults, &["replace_corrects"]),
    (Mistake::ReplaceReleases, &["replace_corrects"]),
    (Mistake::ReplacesNothing, &["replace_corrects"]),
    (Mistake::DecidesUnseen, &["decisions_about_one_record", "decisions_name_the_seen_record"]),
    (Mistake::DecidesWhateverMovedOn, &["decisions_name_the_seen_record"]),
    (Mistake::DecisionKeepsOwner, &["decisions_about_one_record"]),
    (Mistake::ReopenKeepsStarts, &["reopen_released"]),
    (Mistake::ReopenRenewsRetention, &["reopen_keeps_retention"]),
    (Mistake::ReopenUpserts, &["reopen_refused"]),
    (Mistake::RefusesWithoutReason, &["refusals_name_their_reason"]),
    (Mistake::ResolvesLiveLease, &["refusals_name_their_reason"]),
    (Mistake::ResolvesAnyAttempt, &["refusals_name_their_reason"]),
    (Mistake::ResolveOverwrites, &["resolve_spares_results"]),
    (Mistake::ResolveNeverSupplies, &["resolve_supplies_a_missing_result"]),
    (Mistake::ResolveKeepsOwner, &["resolve_fences"]),
    (Mistake::ResolveFailsNothing, &["resolve_ends_it"]),
    (Mistake::ResolveNotRepeatable, &["resolve_ends_it"]),
    (Mistake::ResolveRenewsRetention, &["decisions_keep_retention"]),
    (Mistake::BreakOnlyLapses, &["break_lease_frees"]),
    (Mistake::BreakIgnoresFail, &["break_lease_under_fail"]),
    (Mistake::BreakRefunds, &["break_lease_frees"]),
    (Mistake::BreakCountsUnbegun, &["break_lease_under_fail"]),
    (Mistake::BreakEndsResults, &["break_lease_frees"]),
    (Mistake::BreakRenewsRetention, &["decisions_keep_retention"]),
    (Mistake::ForgetsLiveLease, &["refusals_name_their_reason"]),
    (Mistake::ForgetsAnyAttempt, &["refusals_name_their_reason"]),
    (Mistake::ForgetOnlyReleases, &["forget_erases"]),
    (Mistake::DecisionsWakeNobody, &["decisions_wake", "reopen_wakes"]),
    (Mistake::PurgesTheFinished, &["purge_spares_the_kept"]),
    (Mistake::PurgesTheLapsed, &["purge_spares_the_kept"]),

    (Mistake::HolderForgotten, &["holder_survives", "holder_is_the_latest"]),
    (Mistake::HolderLostAtFinish, &["holder_survives", "traceparent_survives"]),
    (Mistake::HolderLostAtRelease, &["holder_survives"]),
    (Mistake::HolderCutShort, &["holder_survives"]),
    (Mistake::HolderStays, &["holder_is_the_latest"]),
    (Mistake::TraceparentForgotten, &["traceparent_survives"]),
    (Mistake::TraceparentStays, &["traceparent_survives"]),
    (Mistake::TakeoverIsFirstSeen, &["times_are_shown"]),
    (Mistake::BeganIsFirstSeen, &["times_are_shown", "replays_show_their_age"]),
    (Mistake::RenewalRestartsBegan, &["times_are_shown"]),
    (Mistake::FinishRestartsFirstSeen, &["times_are_shown"]),
    (Mistake::AgeUntold, &["replays_show_their_age"]),
    (Mistake::AgeOfTheKey, &["replays_show_their_age"]),
    (Mistake::AgeStandsStill, &["replays_show_their_age"]),
    (Mistake::DecisionUnnamed, &["decision_is_named"]),
    (Mistake::DecisionNamesPileUp, &["decision_is_named"]),
    (Mistake::DecisionForgottenByTheNext, &["decision_is_named"]),

    (Mistake::ListRepeatsTheLast, &["list_shows_each_once"]),
    (Mistake::ListSkipsAfterAPage, &["list_shows_each_once"]),
    (Mistake::ListTakesScopesThatBeginSo, &["list_shows_each_once"]),
    (Mistake::ListIgnoresLimit, &["list_shows_each_once"]),
    (Mistake::ListIgnoresStanding, &["list_filters"]),
    (Mistake::ListIgnoresUndecided, &["list_filters"]),
    (Mistake::ListIgnoresLapse, &["list_filters"]),
    (Mistake::ListIgnoresAge, &["list_filters"]),
    (Mistake::ListIgnoresText, &["list_filters"]),
    (Mistake::ListIgnoresAttempts, &["list_filters"]),
    (Mistake::ListShowsExpired, &["list_filters"]),
    (Mistake::ListShowsResults, &["list_and_inspect_agree"]),
    (Mistake::ListTellsNoHolder, &["list_and_inspect_agree"]),
    (Mistake::PingKnowsNothing, &["ping_is_answered"]),

    (Mistake::HandleIsACopy, &["handles_share"]),
    (Mistake::OwnersRepeat, &["owners_are_unique"]),
    (Mistake::DroppedReservationLands, &["dropped_reserve_stays_away"]),
    (Mistake::TornWrites, &["dropped_reserve", "dropped_renew", "dropped_finish", "dropped_release", "dropped_reopen", "dropped_decisions"]),
    (Mistake::TornReads, &["dropped_reads"]),
    (Mistake::ErrorsAreAbsent, &["unreachable_store"]),
    (Mistake::ForeignIsAbsent, &["foreign_value", "damage_is_shown", "damage_is_forgotten"]),
    (Mistake::DamageFailsTheLook, &["damage_is_shown", "damage_is_forgotten"]),
    (Mistake::DamageFailsTheList, &["damage_is_shown"]),
    (Mistake::DamageIsUnlisted, &["damage_is_shown"]),
    (Mistake::DamageIsCertain, &["damage_is_shown"]),
    (Mistake::DamageIsNeverForgotten, &["damage_is_forgotten"]),
    (Mistake::DamageIsForgottenUnseen, &["damage_is_forgotten"]),
    (Mistake::DamageLooksTheSame, &["damage_is_forgotten"]),
    (Mistake::DamageIsForgottenByAll, &["damage_is_forgotten"]),
    (Mistake::DamageWasNoChange, &["damage_is_forgotten"]),
];

#[test]
fn every_mistake_of_the_plain_store_is_caught() {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(4).enable_time().build().unwrap();
    let checks: Vec<_> = CAUGHT
        .iter()
        .flat_map(|(mistake, clauses)| clauses.iter().map(move |clause| (*mistake, *clause)))
        .map(|(mistake, clause)| {
            let subject = Plain::subject(mistake).patience(Duration::from_secs(3));
            let check =
                Clause::named(clause).unwrap_or_else(|| panic!("no clause is called `{clause}`")).check(subject);
            (mistake, clause, runtime.spawn(check))
        })
        .collect();
    let mut missed = Vec::new();
    for (mistake, clause, check) in checks {
        match runtime.block_on(check) {
            Ok(()) => missed.push(format!("{clause} does not catch {mistake:?}")),
            Err(error) => {
                let panic = error.into_panic();
                let text = panic.downcast_ref::<String>().map_or("without words", String::as_str);
                println!("{mistake:?} is caught by {clause}: {}", text.replace('\n', ";"));
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_clause_of_the_contract_catches_a_mistake() {
    let catching: HashSet<_> = CAUGHT.iter().flat_map(|(_, clauses)| *clauses).copied().collect();
    let idle: Vec<_> = CLAUSES.iter().map(Clause::name).filter(|name| !catching.contains(name)).collect();
    assert_eq!(idle, [""; 0], "these clauses detect no mistake");
    let made: HashSet<_> = CAUGHT.iter().map(|(mistake, _)| format!("{mistake:?}")).collect();
    let unused: Vec<_> = Mistake::ALL.iter().filter(|mistake| !made.contains(&format!("{mistake:?}"))).collect();
    assert!(unused.is_empty(), "the table names no clause that detects these mistakes: {unused:?}");
}
