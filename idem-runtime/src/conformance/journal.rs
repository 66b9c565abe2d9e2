//! Clauses of the store contract about journals: the steps of an attempt that has not finished.

use std::num::NonZeroU16;

use super::case::{Case, PAUSE, TOLERANCE, abandon, completed, forged, marked};
use crate::policy::OnCrash;
use crate::record::standing::Standing;
use crate::record::{
    Action, DecisionAnswer, Finish, Journal, Lease, Record, Release, Reservation, ReserveRequest, State, StoredResult,
    Verdict,
};

pub(super) fn journal(text: impl Into<Vec<u8>>) -> Journal {
    Journal::new(text.into()).expect("not empty")
}

/// Makes the journal of an attempt after its first `steps` steps.
fn steps(steps: usize) -> Journal {
    journal((0..steps).flat_map(|at| [b'<', b'0' + u8::try_from(at).expect("few steps"), b'>']).collect::<Vec<_>>())
}

impl Case {
    pub(super) async fn append(&self, lease: &Lease, journal: &Journal) -> Verdict {
        self.ask(self.store().append(lease, journal), "append").await
    }

    /// Returns the lease and the journal that `request` gets.
    async fn continues(&self, request: &ReserveRequest, why: &str) -> (Lease, Option<Journal>) {
        match self.reserve(request).await {
            Reservation::Granted { lease, journal, .. } => (lease, journal),
            other => panic!("{why}: should be granted, was answered {other:?}"),
        }
    }
}

pub(super) async fn journal_comes_back(case: &Case) {
    // The fingerprint, the holder and the trace are next to the journal in some records.
    let request = |key| marked(case.request(key), 7).holder(case.store().context().holder());
    let key = case.key("released");
    let (lease, none) = case.continues(&request(&key), "a key that was never used").await;
    assert_eq!(none, None, "a new key has no journal");
    assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Applied);
    assert_eq!(case.recorded(&key).await.record.journal, Some(steps(2)), "an operator sees the journal");
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let expected = Record { journal: Some(steps(2)), ..Record::after(&lease, State::Released) };
    assert_eq!(case.recorded(&key).await.record, expected, "the record after the release");
    let again = request(&key);
    let (second, journal) = case.continues(&again, "released").await;
    assert_eq!((second.attempt, journal), (2, Some(steps(2))), "after a release");
    let (same, journal) = case.continues(&again, "repeated with its owner token").await;
    assert_eq!((same.owner, same.attempt), (second.owner, 2), "repeated with its owner token");
    assert_eq!(journal, Some(steps(2)), "repeated with its owner token");
    // The journal of the next attempt begins with the journal that it got.
    assert_eq!(case.append(&second, &steps(3)).await, Verdict::Applied);
    assert_eq!(case.release(&second, Release::NotStarted).await, Verdict::Applied);
    let (third, journal) = case.continues(&request(&key), "released again").await;
    assert_eq!((third.attempt, journal), (3, Some(steps(3))), "of both attempts");

    let key = case.key("lapsed");
    let (lease, _) = case.continues(&case.short(&key), "a key that was never used").await;
    assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied);
    case.lapse().await;
    let (second, journal) = case.continues(&case.request(&key), "lapsed").await;
    assert_eq!((second.attempt, journal), (2, Some(steps(1))), "after a takeover");

    let key = case.key("interrupted");
    let request = ReserveRequest { on_crash: OnCrash::Fail, ..case.request(&key) };
    let (lease, _) = case.continues(&request, "a key that was never used").await;
    assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied);
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    let request = ReserveRequest { on_crash: OnCrash::Fail, ..case.request(&key) };
    let (second, journal) = case.continues(&request.max_reconciliations(NonZeroU16::new(9)), "in doubt").await;
    assert_eq!((second.attempt, journal), (2, Some(steps(1))), "with a reconciler");
}

pub(super) async fn journal_only_grows(case: &Case) {
    let key = case.key("");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    for count in 1..=3 {
        assert_eq!(case.append(&lease, &steps(count)).await, Verdict::Applied, "{count} steps");
        assert_eq!(case.append(&lease, &steps(count)).await, Verdict::Applied, "{count} steps, repeated");
    }
    for count in [1, 2] {
        assert_eq!(case.append(&lease, &steps(count)).await, Verdict::Applied, "a late copy of an earlier request");
        assert_eq!(case.recorded(&key).await.record.journal, Some(steps(3)), "a late copy removes no step");
    }
    let pending = case.recorded(&key).await.record;
    let State::Pending { begun, .. } = pending.state else { panic!("{pending:?}") };
    assert!(!begun, "a journal is no mark that the body has begun");
}

pub(super) async fn append_renews(case: &Case) {
    let request = case.request(&case.key(""));
    let (lease, _) = case.continues(&request, "a key that was never used").await;
    for journal in [steps(1), steps(1), steps(2)] {
        let earliest = case.now();
        case.sleep(PAUSE).await;
        assert_eq!(case.append(&lease, &journal).await, Verdict::Applied);
        let found = case.recorded(&request.key).await;
        let since = case.since(earliest).saturating_sub(PAUSE);
        let left = found.lapses_in.unwrap_or_default();
        assert!(left + since + TOLERANCE >= request.lease, "the lease is renewed, {left:?} are left");
        let kept = found.expires_in;
        assert!(
            kept + since + TOLERANCE >= request.lease + request.ttl,
            "the retention begins again, {kept:?} are left"
        );
    }
    assert_eq!(case.renew(&lease).await, Verdict::Applied);
    assert_eq!(case.recorded(&request.key).await.record.journal, Some(steps(2)), "a renewal keeps the journal");
    let begun = case.begin(&lease).await;
    assert_eq!(begun, Verdict::Applied);
    assert_eq!(case.recorded(&request.key).await.record.journal, Some(steps(2)), "`begin` keeps the journal");

    let key = case.key("lapsed");
    let (lease, _) = case.continues(&case.short(&key), "a key that was never used").await;
    case.lapse().await;
    assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied, "a lapsed lease that was not taken over");
}

pub(super) async fn append_is_the_owners(case: &Case) {
    let key = case.key("");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied);
    let other = forged(&lease, &case.request(&key));
    case.changes_nothing(&key, case.append(&other, &steps(2)), "a journal with another owner token").await;
    let other = Lease { attempt: 2, ..lease.clone() };
    case.changes_nothing(&key, case.append(&other, &steps(2)), "a journal with another attempt number").await;
    let nothing = case.key("nothing");
    let absent = Lease { key: nothing.clone(), ..lease };
    assert_eq!(case.append(&absent, &steps(1)).await, Verdict::Refused, "a journal without a record");
    assert_eq!(case.inspect(&nothing).await, None, "a refused journal makes no record");
}

pub(super) async fn append_after_the_end(case: &Case) {
    for release in [Release::Returned, Release::NotStarted, Release::Interrupted] {
        let key = case.key(&format!("{release:?}"));
        let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
        assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied);
        assert_eq!(case.release(&lease, release).await, Verdict::Applied);
        case.changes_nothing(&key, case.append(&lease, &steps(2)), "a journal that arrives after the release").await;
    }
    let key = case.key("finished");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    case.changes_nothing(&key, case.append(&lease, &steps(1)), "a journal that arrives after the result").await;

    let key = case.key("taken over");
    let (late, _) = case.continues(&case.short(&key), "a key that was never used").await;
    case.lapse().await;
    let (lease, _) = case.continues(&case.request(&key), "lapsed").await;
    case.changes_nothing(&key, case.append(&late, &steps(1)), "a journal that arrives after a takeover").await;
    assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied, "the journal of the successor");
}

pub(super) async fn journal_ends_with_the_operation(case: &Case) {
    let results =
        [completed("1"), Finish::Completed(StoredResult::Unencodable), Finish::Failed(completed("2").result().clone())];
    for (at, finish) in results.iter().enumerate() {
        let key = case.key(&at.to_string());
        let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
        assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Applied);
        assert_eq!(case.finish(&lease, finish).await, Verdict::Applied, "an attempt with a journal finishes");
        assert_eq!(case.recorded(&key).await.record, Record::after(&lease, finish.state()), "the finished record");
        case.is_answered(&case.request(&key), Reservation::finished(Record::after(&lease, finish.state())), "a replay")
            .await;
        assert_eq!(case.decides(&key, 1, Action::Discard).await, DecisionAnswer::Applied);
        let (second, journal) = case.continues(&case.request(&key), "discarded").await;
        assert_eq!((second.attempt, journal), (2, None), "the journal has gone with its operation");
    }
    let key = case.key("forgotten");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Applied);
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    assert_eq!(case.decides(&key, 1, Action::Forget).await, DecisionAnswer::Applied);
    let (second, journal) = case.continues(&case.request(&key), "forgotten").await;
    assert_eq!((second.attempt, journal), (1, None), "a forgotten key has no journal");

    let key = case.key("expired");
    // Only the retention is short: a slow store must not lose the lease before the journal is written.
    let request = ReserveRequest { ttl: case.short(&key).lease, ..case.request(&key) };
    let (lease, _) = case.continues(&request, "a key that was never used").await;
    assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Applied);
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    case.lapse().await;
    let (second, journal) = case.continues(&case.request(&key), "expired").await;
    assert_eq!((second.attempt, journal), (1, None), "an expired key has no journal");
}

pub(super) async fn decisions_keep_the_journal(case: &Case) {
    let key = case.key("reopened");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Applied);
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    assert_eq!(case.decides(&key, 1, Action::Reopen).await, DecisionAnswer::Applied);
    assert_eq!(case.recorded(&key).await.record.journal, Some(steps(2)), "after `reopen`");
    let (_, journal) = case.continues(&case.request(&key), "reopened").await;
    assert_eq!(journal, Some(steps(2)), "the attempt after `reopen`");

    let key = case.key("broken");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    let decision = case.decision(&key, 1, Action::BreakLease).await;
    assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied, "after the operator has seen the record");
    assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied);
    assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Refused, "after `break_lease`");
    let (_, journal) = case.continues(&case.request(&key), "its lease was broken").await;
    assert_eq!(journal, Some(steps(1)), "the attempt after `break_lease`");

    let key = case.key("resolved");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Applied);
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    assert_eq!(case.decides(&key, 1, Action::Resolve(completed("1"))).await, DecisionAnswer::Applied);
    let record = case.recorded(&key).await.record;
    assert_eq!((record.journal, record.state), (None, completed("1").state()), "after `resolve`");
}

pub(super) async fn reopen_with_a_journal(case: &Case) {
    let hows = ["released", "interrupted", "lapsed", "lapsed under `fail`"];
    let with = [Some(steps(3)), Some(steps(1)), None, Some(journal("others"))];
    let mut held = Vec::new();
    for how in hows {
        for (at, journal) in with.iter().enumerate() {
            let key = case.key(&format!("{how} {at}"));
            let is_lapsed = how.starts_with("lapsed");
            let request = if is_lapsed { case.short(&key) } else { case.request(&key) };
            let on_crash = if how.ends_with('`') { OnCrash::Fail } else { OnCrash::Retry };
            let request = marked(ReserveRequest { on_crash, ..request }, 7).holder(case.store().context().holder());
            let (lease, _) = case.continues(&request, "a key that was never used").await;
            if on_crash == OnCrash::Fail {
                case.begins(&lease).await;
            }
            assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Applied);
            let end = if how == "released" { Release::Returned } else { Release::Interrupted };
            if !is_lapsed {
                assert_eq!(case.release(&lease, end).await, Verdict::Applied);
            }
            held.push((key, lease, journal.clone(), how));
        }
    }
    case.lapse().await;
    for (key, lease, journal, how) in held {
        let why = format!("{how}, then reopened with {journal:?}");
        let before = case.recorded(&key).await.record;
        let decision = case.decision(&key, 1, Action::ReopenWith(journal.clone())).await.by("alice").reason("INC-7");
        for _ in 0..2 {
            assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "{why}");
            let after = case.recorded(&key).await.record;
            let provenance = before.provenance.with_decision("alice", "INC-7");
            let expected = Record {
                attempts_used: 0,
                state: State::Released,
                owner: after.owner,
                journal: journal.clone(),
                provenance,
                ..before.clone()
            };
            assert_eq!(after, expected, "{why}: the record afterwards");
        }
        case.changes_nothing(&key, case.append(&lease, &steps(4)), &format!("{why}: a step of the earlier attempt"))
            .await;
        case.changes_nothing(&key, case.finish(&lease, &completed("late")), &format!("{why}: its end")).await;
        let (second, continued) = case.continues(&case.request(&key), &why).await;
        assert_eq!((second.attempt, second.attempts_used, &continued), (2, 1, &journal), "{why}: the next attempt");
        let longer =
            continued.map_or_else(|| steps(1), |journal| self::journal([&journal.bytes()[..], b"<+>"].concat()));
        assert_eq!(case.append(&second, &longer).await, Verdict::Applied, "{why}");
        assert_eq!(case.recorded(&key).await.record.journal, Some(longer), "{why}: a step of the next attempt");
    }
}

pub(super) async fn reopen_with_names_the_seen_journal(case: &Case) {
    let changes = [Some(steps(2)), Some(steps(1)), None];
    // First case: the attempt has journaled a step after its lease had lapsed, and the lease has lapsed again.
    for (at, journal) in changes.iter().enumerate() {
        let key = case.key(&format!("lapsed {at}"));
        let (lease, _) = case.continues(&case.short(&key), "a key that was never used").await;
        if at > 0 {
            assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied);
        }
        case.lapse().await;
        let decision = case.decision(&key, 1, Action::ReopenWith(journal.clone())).await;
        assert_eq!(case.append(&lease, &steps(2)).await, Verdict::Applied, "to a lapsed lease");
        case.lapse().await;
        let told = case.decide(&decision).await;
        assert_eq!(told, DecisionAnswer::changed(Standing::Lapsed), "a step that the operator has not seen");
        case.changes_nothing(&key, case.decide(&decision), "a step that the operator has not seen").await;
        assert_eq!(
            case.decides(&key, 1, Action::ReopenWith(journal.clone())).await,
            DecisionAnswer::Applied,
            "seen now"
        );
    }
    // Second case: the attempt runs, or has finished.
    let key = case.key("running");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied);
    for journal in &changes {
        let decision = case.decision(&key, 1, Action::ReopenWith(journal.clone())).await;
        let told = case.decide(&decision).await;
        assert!(matches!(told, DecisionAnswer::LiveLease { .. }), "a live lease: {told:?}");
        case.changes_nothing(&key, case.decide(&decision), "a live lease").await;
    }
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    for journal in &changes {
        let decision = case.decision(&key, 1, Action::ReopenWith(journal.clone())).await;
        assert_eq!(case.decide(&decision).await, DecisionAnswer::Finished, "a finished operation");
        case.changes_nothing(&key, case.decide(&decision), "a finished operation").await;
    }
}

pub(super) async fn large_journal_survives(case: &Case) {
    let size = case.subject.largest_result.min(200 * 1024);
    let large = journal(vec![b'x'; size]);
    let key = case.key("");
    let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
    assert_eq!(case.append(&lease, &large).await, Verdict::Applied);
    case.waits_for(&case.request(&key), 1, "a live lease with a large journal").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let (_, journal) = case.continues(&case.request(&key), "released").await;
    assert_eq!(journal.as_ref().map(|journal| journal.bytes().len()), Some(size));
    assert_eq!(journal, Some(large));
}

pub(super) async fn dropped_append(case: &Case) {
    for polls in 0..4 {
        let key = case.key(&polls.to_string());
        let (lease, _) = case.continues(&case.request(&key), "a key that was never used").await;
        assert_eq!(case.append(&lease, &steps(1)).await, Verdict::Applied);
        abandon(case, case.store().append(&lease, &steps(2)), polls).await;
        assert_eq!(case.append(&lease, &steps(3)).await, Verdict::Applied, "after {polls} polls");
        case.sleep(PAUSE).await;
        assert_eq!(case.recorded(&key).await.record.journal, Some(steps(3)), "after {polls} polls: no step is lost");
        assert_eq!(case.renew(&lease).await, Verdict::Applied);
    }
}
