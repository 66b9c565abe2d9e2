//! Test suite that every store passes, for authors of stores (feature `conformance`).
//!
//! The suite states the contract of [`Store`](crate::Store) as named [`Clause`]s. Each clause is a separate test, and
//! the message of a failed test describes how the store broke the clause. To run the clauses, depend on this crate with
//! the feature `conformance` under `[dev-dependencies]`, and write in a test binary:
//!
//! ```
//! use idem_runtime::{MemoryStore, store_conformance};
//!
//! // Declares `memory::first_reservation`, `memory::one_winner_of_many`, …
//! store_conformance!(memory, MemoryStore::new());
//! # fn main() {}
//! ```
//!
//! The expression is evaluated again for each test, inside of a separate tokio runtime, and may `.await`. The
//! expression returns a store, or a [`Subject`], which adds facts to the store, above all a second handle that is
//! opened like in another process:
//!
//! ```
//! use idem_runtime::conformance::Subject;
//! # use idem_runtime::{MemoryStore, store_conformance};
//! # static STORE: std::sync::LazyLock<MemoryStore> = std::sync::LazyLock::new(MemoryStore::new);
//! # struct MyStore;
//! # impl MyStore { async fn connect(_: &str) -> Result<MemoryStore, std::fmt::Error> { Ok(STORE.clone()) } }
//!
//! async fn open() -> Subject {
//!     let url = "my://localhost"; // A test without its server fails; it never skips.
//!     let store = MyStore::connect(url).await.expect("scripts/test starts the server");
//!     let peer = MyStore::connect(url).await.expect("scripts/test starts the server");
//!     Subject::new(store).peer(peer)
//! }
//!
//! store_conformance!(my_store, open().await);
//! # fn main() {}
//! ```
//!
//! Clauses can share a server with each other and with later runs: every run makes its own keys from an owner token of
//! [`StoreContext::new_owner`](crate::store::StoreContext::new_owner). The clauses run in real time, so a store on a
//! [`ManualClock`](crate::clock::ManualClock) can't be tested. No clause depends on the speed of the machine: leases
//! that must stay live are long, and a test waits until a lease that must lapse has lapsed.
//!
//! [`CLAUSES`] and [`Clause::check`] serve test harnesses other than `cargo test`.

mod case;
mod crashes;
mod decisions;
mod fingerprints;
mod journal;
mod keys;
mod listing;
mod messages;
mod operators;
mod reserving;
mod results;
mod retention;
mod robustness;
mod showing;
mod waiting;
mod writing;

use std::fmt;

use self::case::{Case, ClauseFuture, LONG};
pub use self::case::{Subject, SubjectFuture};
use crate::clock::{Clock, SystemClock};
use crate::combine::race;

/// Declares a module `$name` with one `#[test]` for each clause of the contract of [`Store`](crate::Store).
///
/// `$open` is an expression that returns a store or a [`Subject`](crate::conformance::Subject), and may `.await`; see
/// [`conformance`](crate::conformance).
#[macro_export]
macro_rules! store_conformance {
    ($name:ident, $open:expr $(,)?) => {
        mod $name {
            /// The expression is in a separate module, because the names of the tests must not hide names that the
            /// expression uses.
            #[allow(dead_code)]
            mod __subject {
                #[allow(unused_imports)]
                use super::super::*;

                pub(super) fn __open() -> $crate::conformance::SubjectFuture {
                    ::std::boxed::Box::pin(async { $crate::conformance::Subject::from($open) })
                }
            }

            $crate::__conformance_clauses! { $crate::__conformance_tests }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_tests {
    ($($name:ident: $claim:literal,)*) => { $(
        #[doc = $claim]
        #[test]
        fn $name() {
            $crate::conformance::run(stringify!($name), __subject::__open);
        }
    )* };
}

/// The only list of clauses, with their names and claims.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_clauses {
    ($($callback:tt)*) => { $($callback)* ! {
        // Clauses about reservations.
        first_reservation: "The first reservation of a key is attempt 1 and gets the lease that it asked for.",
        reservation_repeated: "A reservation that is repeated with its owner token gets the same lease and starts no attempt.",
        reservation_repeated_after_lapse: "A repeated reservation gets the same lease even if the lease has lapsed meanwhile.",
        one_winner_of_many: "Exactly one of 64 concurrent reservations of a new key wins.",
        one_winner_of_a_released_key: "Exactly one of 64 concurrent reservations of a released key wins.",
        one_winner_of_a_takeover: "Exactly one of 64 concurrent takeovers of a lapsed lease wins.",
        one_attempt_at_a_time: "Tasks that reserve, work and release never hold the key at the same time, and no attempt number repeats.",
        live_lease_is_pending: "The answer to a reservation under a live lease has the number of the running attempt and the time until its lease lapses, which is above zero.",
        takeover_is_a_new_attempt: "A takeover gets the next attempt number and is reported as a takeover.",
        released_key_is_free: "A released key is free immediately; the next attempt has the next number.",
        released_owner_never_reserves_again: "A reservation that arrives after its own release is answered `Released` and changes nothing.",
        attempts_never_repeat: "Attempt numbers strictly increase while the record is retained: over releases, lapses and `reopen`.",
        max_attempts_counts_releases: "Released attempts count against `max_attempts`.",
        max_attempts_counts_lapses: "Attempts that lapse after their bodies have begun count against `max_attempts`.",
        not_started_does_not_count: "`release(NotStarted)` lowers the count of attempts by one, and the next attempt still has the next number.",
        exhaustion_is_not_final: "A request with a higher `max_attempts` runs after a request that was refused; a result is replayed regardless of the limit.",
        // Clauses about crashes.
        reconciler_gets_an_interrupted_key: "A caller with a reconciler reserves an interrupted key, in doubt; every other caller is refused before, meanwhile and after a release without an answer.",
        reconciler_gets_a_lapsed_body: "A caller with a reconciler takes over a lapsed attempt under `on_crash = fail` in doubt if its body has begun, and without a doubt if not.",
        reconciler_that_crashed: "A lease in doubt that lapses is still in doubt.",
        reconciler_repeats_its_request: "A repeated reservation of an owner is still in doubt, and is answered `Released` after the attempt has ended.",
        reconciliations_are_limited: "After as many reservations in doubt as the request allows, the key is interrupted for callers with a reconciler too, until a decision.",
        crashed_under_fail: "An attempt under `on_crash = fail` that lapses after its body has begun is interrupted for every request: no further body starts.",
        unmarked_lapse_under_fail: "An attempt under `on_crash = fail` that lapses before its body has begun is taken over, and not counted.",
        unmarked_lapse_does_not_count: "An attempt that lapses before its body has begun does not count against `max_attempts`.",
        begin_is_recorded: "`begin` is recorded, renews the lease, and stays recorded while the attempt runs.",
        begin_repeated: "A repeated `begin` is recognised, even after the lapse of the lease; the attempt may still be released as not started.",
        begin_is_the_owners: "Only the attempt itself can mark its record, by owner token and number.",
        begin_after_a_lapse: "A `begin` that arrives after the lapse of the lease, or after a takeover, is refused; after a renewal the record can be marked.",
        begin_after_the_end: "A `begin` that arrives after the end of the attempt is refused.",
        crash_found_under_fail: "A lapsed attempt under `on_crash = retry` is interrupted for requests under `fail`, and taken over by other requests.",
        marked_interrupted: "After `release(Interrupted)` every request is refused, regardless of its `on_crash`.",
        live_lease_under_fail: "A live lease under `on_crash = fail` is pending, not interrupted.",
        late_finish_under_fail: "An attempt under `on_crash = fail` may complete after its lease has lapsed.",
        // Clauses about fingerprints.
        mismatch_while_pending: "Another fingerprint is a mismatch while an attempt runs.",
        mismatch_once_released: "Another fingerprint is a mismatch on a released key.",
        mismatch_at_takeover: "Another fingerprint is a mismatch at a lapsed lease, and the request takes over no attempt.",
        mismatch_on_replay: "Another fingerprint is a mismatch once the operation is completed or failed.",
        mismatch_once_interrupted: "Another fingerprint is a mismatch on an interrupted key.",
        mismatch_once_exhausted: "Another fingerprint is a mismatch even when the attempts are exhausted.",
        missing_fingerprint_matches: "A missing fingerprint, in the request or in the record, matches any other.",
        fingerprint_survives: "The record keeps its fingerprint over takeover, renewal, release, finish and `reopen`.",
        // Clauses about the writes of an attempt.
        renewal_extends: "A renewal restarts the lease and the retention, and changes nothing else.",
        renewal_after_lapse: "A lapsed lease can be renewed until another attempt takes over.",
        renewal_is_the_owners: "A renewal with another owner token is refused and changes nothing.",
        renewal_after_takeover: "A renewal of a lease that was taken over is refused and changes nothing.",
        renewal_after_the_end: "A renewal is refused after its attempt has finished or was released.",
        renewals_answer_in_order: "A batch of renewals is answered lease by lease, in the order of the batch.",
        each_renewal_has_one_answer: "Each lease of a batch of renewals gets one answer, regardless of the other leases.",
        blocked_record_holds_up_no_other: "A renewal of a blocked record gets no answer, and the other leases of the batch are answered (needs `Subject::block`).",
        no_renewals: "An empty batch of renewals gets an empty answer.",
        many_renewals: "One call renews 2 000 leases.",
        finish_is_the_owners: "A finish with another owner token is refused and changes nothing.",
        finish_repeated: "A finish that is repeated with its owner token is applied again, with the same record.",
        finish_is_final: "A finished record does not change within its retention, not even by another finish of its owner.",
        landed_finish_is_recognised: "Once a finish has taken effect, renewals of that attempt are refused and its finishes are answered `Applied`.",
        finish_after_lapse: "A finish after the lease has lapsed is applied unless another attempt took over.",
        finish_after_takeover: "A finish after a takeover is refused and leaves the successor's record alone.",
        finish_after_release: "A finish after the release of its attempt is refused.",
        finish_names_its_attempt: "A finish or renewal that names another attempt number of the same owner is refused.",
        finish_of_nothing: "A finish of a key without a record is refused and creates none.",
        release_is_the_owners: "A release with another owner token is refused and changes nothing.",
        release_repeated: "A release that is repeated with its owner token is applied once: it lowers the count of attempts by at most one.",
        release_after_takeover: "A release after a takeover is refused and leaves the successor's record alone.",
        release_after_finish: "A release after a finish is refused and leaves the result alone.",
        release_of_nothing: "A release of a key without a record is refused and creates none.",
        release_ignores_the_number: "A release compares only the owner token, because its caller may not know the attempt number.",
        release_among_refused_ones: "A release that takes effect is answered `Applied`, even beside refused releases, and even if its key is reserved again immediately.",
        // Clauses about journals.
        journal_comes_back: "The next attempt gets the journal of an attempt that was released, was interrupted or has lapsed.",
        journal_only_grows: "A longer journal replaces a shorter one, and a late copy of an earlier `append` removes no step.",
        append_renews: "An `append` restarts the lease and the retention, even after the lapse of the lease, and other renewals keep the journal.",
        append_is_the_owners: "Only the attempt itself can write its journal, by owner token and number.",
        append_after_the_end: "An `append` that arrives after the end of the attempt or after a takeover is refused and changes nothing.",
        journal_ends_with_the_operation: "A finished, forgotten or expired operation has no journal.",
        reopen_with_a_journal: "`reopen_with` reopens an operation with another journal, or without a journal, and the attempt that it ends can't write any more.",
        reopen_with_names_the_seen_journal: "`reopen_with` is refused if the attempt runs, has journaled a step since the operator read the record, or has finished.",
        decisions_keep_the_journal: "A decision after which the operation is not finished keeps the journal, with the steps that were written since the operator saw the record.",
        large_journal_survives: "A large journal is read back as written.",
        dropped_append: "An `append` whose future is dropped takes effect completely or not at all, and never removes a step.",
        // Clauses about results.
        completed_is_replayed: "Every reservation of a completed key is answered with the same record.",
        failed_is_replayed: "Every reservation of a failed key is answered with the same record.",
        every_payload_survives: "Results are read back as written: empty, binary, zero and false results, and the marks of results that are too large or unencodable.",
        large_result_survives: "A large result is read back as written.",
        codec_name_survives: "The name of the codec is read back as written, up to the longest name.",
        // Clauses about keys.
        similar_keys_are_distinct: "Keys that differ in a single character have different records.",
        long_keys_are_distinct: "The longest keys are compared in full.",
        // Clauses about retention.
        result_is_forgotten: "A finished record is absent after its retention.",
        released_record_is_forgotten: "A released or interrupted record is absent after its retention.",
        pending_record_is_forgotten: "A pending record is absent after its lease plus its `ttl`; writes of its attempt are then refused.",
        pending_record_outlives_ttl: "A live lease that is longer than `ttl` is honoured until it lapses.",
        retention_starts_at_the_end: "A finished or released record is retained for `ttl` from that write.",
        retention_of_a_pending_record: "A pending record is retained for its lease plus its `ttl`.",
        longest_times: "The longest lease and the longest retention that a policy allows are honoured.",
        // Clauses about waiting duplicates.
        finish_wakes: "A finish wakes its waiters.",
        release_wakes: "A release wakes its waiters.",
        takeover_wakes: "A takeover wakes the waiters for the earlier attempt.",
        reopen_wakes: "A `reopen` wakes the waiters for that attempt.",
        decisions_wake: "`reopen_with`, `resolve`, `break_lease` and `forget` wake the waiters for that attempt.",
        all_waiters_wake: "The end of an attempt wakes all of its 32 waiters.",
        nothing_to_wait_for: "A wait returns immediately unless its attempt is pending.",
        wait_is_bounded: "A wait returns when its time limit is over.",
        wait_tells_the_present: "A wait returns the record that `inspect` shows, and never a record that has expired or was removed.",
        abandoned_wait: "A waiter that gives up changes nothing, and the other waiters are still woken.",
        // Clauses about operators.
        inspection: "`inspect` shows the record, the time until its lease lapses and the time until it expires.",
        reopen_refused: "`reopen` refuses a live lease, another attempt and an absent record.",
        reopen_interrupted: "`reopen` lets an interrupted key run again.",
        reopen_spares_results: "`reopen` of a finished record is refused.",
        discard_finished: "`discard` removes the result of a finished record and lets the key run again; for any other record it is refused.",
        replace_corrects: "`replace` gives a finished record another end in one step; for any other record it is refused.",
        reopen_lapsed: "`reopen` of a lapsed attempt ends it: its later writes are refused.",
        reopen_released: "`reopen` of a released record sets its count of attempts to zero.",
        reopen_keeps_retention: "`reopen` leaves the retention as it was.",
        decisions_about_one_record: "Of two contrary decisions about the same record one is applied, and the other is refused as `Changed`, no matter whether they are concurrent.",
        decisions_name_the_seen_record: "A decision is refused if an attempt or a decision has changed the record since the operator read it, even back to the same state.",
        refusals_name_their_reason: "A refused decision is answered with the reason: no record, another attempt and its number, or a live lease and the time until it lapses.",
        resolve_ends_it: "`resolve` gives an interrupted, released or lapsed attempt the end in the decision; a repetition changes nothing.",
        resolve_spares_results: "`resolve` replaces no result that was recorded.",
        resolve_supplies_a_missing_result: "`resolve` supplies a missing result of a completed operation, once.",
        resolve_fences: "After a `resolve` no write of the attempt is applied, nor answered `Applied`.",
        decisions_keep_retention: "`resolve` and `break_lease` leave the retention as it was.",
        break_lease_frees: "`break_lease` ends a live lease under `on_crash = retry`: its owner's writes are refused, and the next attempt runs.",
        break_lease_under_fail: "`break_lease` of a lease under `on_crash = fail` leaves the key interrupted.",
        forget_erases: "`forget` removes the record: the next reservation is attempt 1, and no earlier write is applied.",
        holder_survives: "A record keeps its holder after every end of the attempt, up to the longest name.",
        holder_is_the_latest: "A record has the holder of its latest attempt, and none if that attempt had no holder.",
        traceparent_survives: "A record has the trace of its latest attempt, and a replay has the trace of the run that made its result.",
        times_are_shown: "A record keeps the time when its key was first seen and the time when its latest attempt began, regardless of other writes.",
        replays_show_their_age: "A replay has the age of its record: at least the time since its attempt ended, and at most the time since that attempt began.",
        decision_is_named: "A record has the operator and the reason of the latest decision, until the next decision.",
        list_shows_each_once: "`list` shows each record of a scope once, regardless of the page length, and no record of another scope.",
        list_filters: "`list` shows the records with the selected standing and age, and no record that has expired.",
        // Clauses about messages.
        messages_are_marked: "A finished record keeps messages beside its result, and the decision `mark_sent` removes the sent ones, and nothing else.",
        messages_never_return: "Neither a repeated `finish` nor a late `mark_sent` brings back a message that was marked as sent.",
        marks_name_their_record: "`mark_sent` is refused after a decision, and for another attempt; `replace` keeps the messages.",
        operators_decide_about_messages: "`resend_messages` and `drop_messages` change the messages, and nothing else.",
        list_selects_unsent: "`list` selects the records with messages that are not marked as sent.",
        list_and_inspect_agree: "`list` shows the same records as `inspect`, without results.",
        ping_is_answered: "`ping` is answered if the store can be reached; otherwise `ping` and `list` fail (needs `Subject::unreachable`).",
        purge_spares_the_kept: "`purge` removes no record before the end of its retention, and returns the number of removed records.",
        // Clauses about handles, dropped futures and unreachable servers.
        handles_share: "A handle shares the records, the heartbeats and the name of its store.",
        owners_are_unique: "Two handles never make the same owner token.",
        dropped_reserve: "A reservation whose future is dropped takes effect completely or not at all.",
        dropped_reserve_stays_away: "A reservation whose caller was dropped and has cleaned up takes no effect afterwards.",
        dropped_begin: "A `begin` whose future is dropped takes effect completely or not at all, and may be repeated.",
        dropped_renew: "A renewal whose future is dropped takes effect completely or not at all.",
        dropped_finish: "A finish whose future is dropped takes effect completely or not at all.",
        dropped_release: "A release whose future is dropped takes effect completely or not at all.",
        dropped_reopen: "A `reopen` whose future is dropped takes effect completely or not at all.",
        dropped_decisions: "A decision whose future is dropped takes effect completely or not at all, and may be repeated.",
        dropped_reads: "A dropped `inspect` or `wait` changes nothing.",
        unreachable_store: "Every call of a store that can't be reached fails in time, and no call reports \"no record\" (needs `Subject::unreachable`).",
        foreign_value: "A value that is not a record of this library is an error to every attempt, never \"no record\", and is not overwritten (needs `Subject::spoil`).",
        damage_is_shown: "`inspect` and `list` show a value that is not a record as damaged, with the reason and next to other records (needs `Subject::spoil`).",
        damage_is_forgotten: "Only the decision `forget` removes a value that is not a record, and only the value that the operator saw; the next reservation is attempt 1 (needs `Subject::spoil`).",
    } };
}

macro_rules! list {
    ($($name:ident: $claim:literal,)*) => {
        /// Contract of a store, clause by clause.
        pub const CLAUSES: &[Clause] = &[$(Clause {
            name: stringify!($name),
            claim: $claim,
            body: |case| Box::pin(async move { $name(&case).await }),
        },)*];
    };
}

use crashes::{
    begin_after_a_lapse, begin_after_the_end, begin_is_recorded, begin_is_the_owners, begin_repeated,
    crash_found_under_fail, crashed_under_fail, late_finish_under_fail, live_lease_under_fail, marked_interrupted,
    reconciler_gets_a_lapsed_body, reconciler_gets_an_interrupted_key, reconciler_repeats_its_request,
    reconciler_that_crashed, reconciliations_are_limited, unmarked_lapse_does_not_count, unmarked_lapse_under_fail,
};
use decisions::{
    break_lease_frees, break_lease_under_fail, decisions_about_one_record, decisions_keep_retention,
    decisions_name_the_seen_record, discard_finished, dropped_decisions, forget_erases, refusals_name_their_reason,
    reopen_spares_results, replace_corrects, resolve_ends_it, resolve_fences, resolve_spares_results,
    resolve_supplies_a_missing_result,
};
use fingerprints::{
    fingerprint_survives, mismatch_at_takeover, mismatch_on_replay, mismatch_once_exhausted, mismatch_once_interrupted,
    mismatch_once_released, mismatch_while_pending, missing_fingerprint_matches,
};
use journal::{
    append_after_the_end, append_is_the_owners, append_renews, decisions_keep_the_journal, dropped_append,
    journal_comes_back, journal_ends_with_the_operation, journal_only_grows, large_journal_survives,
    reopen_with_a_journal, reopen_with_names_the_seen_journal,
};
use keys::{long_keys_are_distinct, similar_keys_are_distinct};
use listing::{list_and_inspect_agree, list_filters, list_shows_each_once, ping_is_answered};
use messages::{
    list_selects_unsent, marks_name_their_record, messages_are_marked, messages_never_return,
    operators_decide_about_messages,
};
use operators::{
    inspection, purge_spares_the_kept, reopen_interrupted, reopen_keeps_retention, reopen_lapsed, reopen_refused,
    reopen_released,
};
use reserving::{
    attempts_never_repeat, exhaustion_is_not_final, first_reservation, live_lease_is_pending,
    max_attempts_counts_lapses, max_attempts_counts_releases, not_started_does_not_count, one_attempt_at_a_time,
    one_winner_of_a_released_key, one_winner_of_a_takeover, one_winner_of_many, released_key_is_free,
    released_owner_never_reserves_again, reservation_repeated, reservation_repeated_after_lapse,
    takeover_is_a_new_attempt,
};
use results::{
    codec_name_survives, completed_is_replayed, every_payload_survives, failed_is_replayed, large_result_survives,
};
use retention::{
    longest_times, pending_record_is_forgotten, pending_record_outlives_ttl, released_record_is_forgotten,
    result_is_forgotten, retention_of_a_pending_record, retention_starts_at_the_end,
};
use robustness::{
    damage_is_forgotten, damage_is_shown, dropped_begin, dropped_finish, dropped_reads, dropped_release, dropped_renew,
    dropped_reopen, dropped_reserve, dropped_reserve_stays_away, foreign_value, handles_share, owners_are_unique,
    unreachable_store,
};
use showing::{
    decision_is_named, holder_is_the_latest, holder_survives, replays_show_their_age, times_are_shown,
    traceparent_survives,
};
use waiting::{
    abandoned_wait, all_waiters_wake, decisions_wake, finish_wakes, nothing_to_wait_for, release_wakes, reopen_wakes,
    takeover_wakes, wait_is_bounded, wait_tells_the_present,
};
use writing::{
    blocked_record_holds_up_no_other, each_renewal_has_one_answer, finish_after_lapse, finish_after_release,
    finish_after_takeover, finish_is_final, finish_is_the_owners, finish_names_its_attempt, finish_of_nothing,
    finish_repeated, landed_finish_is_recognised, many_renewals, no_renewals, release_after_finish,
    release_after_takeover, release_among_refused_ones, release_ignores_the_number, release_is_the_owners,
    release_of_nothing, release_repeated, renewal_after_lapse, renewal_after_takeover, renewal_after_the_end,
    renewal_extends, renewal_is_the_owners, renewals_answer_in_order,
};

__conformance_clauses! { list }

/// A promise of the contract, with its check.
pub struct Clause {
    name: &'static str,
    claim: &'static str,
    body: fn(Case) -> ClauseFuture,
}

impl Clause {
    /// Name of the clause, which is also the name of its test.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Claim of the clause, in a sentence.
    pub fn claim(&self) -> &'static str {
        self.claim
    }

    /// Returns the clause called `name`.
    pub fn named(name: &str) -> Option<&'static Self> {
        CLAUSES.iter().find(|clause| clause.name == name)
    }

    /// Checks a store. Requires a tokio runtime with timers and several threads: on one thread the races can't happen.
    ///
    /// # Panics
    /// If the store breaks the claim.
    pub async fn check(&self, subject: Subject) {
        (self.body)(Case::new(subject, self.name)).await;
    }
}

impl fmt::Debug for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.claim)
    }
}

/// Checks the clause called `name` on a new runtime. [`store_conformance!`](crate::store_conformance) calls this
/// function.
///
/// # Panics
/// If the store breaks the claim.
pub fn run(name: &str, open: fn() -> SubjectFuture) {
    let clause = Clause::named(name).expect("a clause of this suite");
    // The test harness shows this line only if the test fails.
    eprintln!("{clause:?}");
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(4).enable_all().build().expect("a runtime for the test");
    runtime.block_on(async {
        let checked = race(async { clause.check(open().await).await }, SystemClock::default().sleep(LONG / 2)).await;
        assert!(checked.is_some(), "`{name}` hangs: a store call does not return");
    });
}
