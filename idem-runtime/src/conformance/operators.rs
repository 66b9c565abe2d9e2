//! Clauses of the store contract about operators: inspection, `reopen` and `purge`.

use std::time::Duration;

use super::case::{Case, LONG, PAUSE, SHORT, TOLERANCE, completed, limited, marked, stored};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::{Action, DecisionAnswer, Finish, Record, Release, Reservation, ReserveRequest, State, Verdict};

pub(super) async fn inspection(case: &Case) {
    assert_eq!(case.inspect(&case.key("absent")).await, None, "a key that was never used has no record");

    // The two times differ, and neither is a whole number of seconds.
    let (lease, ttl) = (LONG + Duration::from_millis(1), LONG * 2 + Duration::from_millis(7));
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        let key = case.key(&format!("{on_crash:?}"));
        let earliest = case.now();
        let request = marked(ReserveRequest { lease, ttl, on_crash, ..case.request(&key) }, 9);
        let held = case.reserved(&request, 1, "a key that was never used").await;
        let pending = case.recorded(&key).await;
        assert_eq!(
            pending.record,
            Record::after(&held, State::Pending { lease, ttl, on_crash, begun: false }),
            "a pending record"
        );
        case.has_left(pending.lapses_in.expect("a pending record has a lease"), lease, earliest, "the lease");
        case.has_left(pending.expires_in, lease + ttl, earliest, "the retention of a pending record");

        let finish = Finish::Failed(stored("1"));
        assert_eq!(case.finish(&held, &finish).await, Verdict::Applied);
        let finished = case.recorded(&key).await;
        assert_eq!(finished.record, Record::after(&held, finish.state()), "a finished record");
        assert_eq!(finished.lapses_in, None, "a finished record has no lease");
        case.has_left(finished.expires_in, ttl, earliest, "the retention of a finished record");
    }

    let key = case.key("lapsed");
    case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    for _ in 0..2 {
        assert_eq!(
            case.recorded(&key).await.lapses_in,
            Some(Duration::ZERO),
            "a lapsed lease; an inspection changes nothing"
        );
    }
    case.takes_over(&case.request(&key), 2, "a lapsed lease").await;
}

pub(super) async fn reopen_refused(case: &Case) {
    let absent = case.key("absent");
    assert_eq!(case.reopen(&absent, 0).await, Verdict::Refused, "there is no record");
    assert_eq!(case.reopen(&absent, 1).await, Verdict::Refused, "there is no record");
    assert_eq!(case.inspect(&absent).await, None, "a refused `reopen` makes no record");

    let key = case.key("");
    let first = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    case.changes_nothing(&key, case.reopen(&key, 1), "`reopen` of a live lease").await;
    assert_eq!(case.release(&first, Release::Returned).await, Verdict::Applied);
    let second = case.reserved(&case.request(&key), 2, "a released key").await;
    assert_eq!(case.finish(&second, &completed("1")).await, Verdict::Applied);
    for attempt in [0, 1, 3] {
        case.changes_nothing(&key, case.reopen(&key, attempt), "`reopen` of another attempt than the latest").await;
    }
    let finished = Reservation::finished(Record::after(&second, completed("1").state()));
    case.is_answered(&case.request(&key), finished, "a result that `reopen` left alone").await;
}

/// Checks that attempt 1 of the key can be reopened, and that the next attempt runs. The record has a fingerprint whose
/// bytes all are 1.
async fn runs_again(case: &Case, key: &Key, why: &str) {
    let before = case.recorded(key).await.record;
    let decision = case.decision(key, 1, Action::Reopen).await;
    assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "{why}");
    let reopened = case.recorded(key).await.record;
    let expected = Record { attempts_used: 0, state: State::Released, owner: reopened.owner, ..before };
    assert_eq!(reopened, expected, "{why}: the record afterwards");
    assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "{why}: repeated");
    let request = limited(marked(case.request(key), 1), 1);
    let lease = case.reserved(&request, 2, why).await;
    assert_eq!(lease.attempts_used, 1, "{why}: no attempt counts against the limit");
    case.changes_nothing(key, case.reopen(key, 1), "`reopen` of an attempt that has a successor").await;
    case.changes_nothing(key, case.reopen(key, 2), "`reopen` of a live lease").await;
    assert_eq!(case.finish(&lease, &completed("2")).await, Verdict::Applied);
    let finished = Reservation::finished(Record::after(&lease, completed("2").state()));
    case.is_answered(&case.request(key), finished, "the successor's result").await;
}

pub(super) async fn reopen_interrupted(case: &Case) {
    let fail = |request| marked(ReserveRequest { on_crash: OnCrash::Fail, ..request }, 1);
    let key = case.key("marked");
    let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    runs_again(case, &key, "an attempt that was marked as interrupted").await;

    let key = case.key("lapsed");
    let lease = case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.begins(&lease).await;
    case.lapse().await;
    case.is_answered(&case.request(&key), Reservation::Interrupted { attempt: 1 }, "lapsed under `fail`").await;
    runs_again(case, &key, "an attempt that lapsed under `fail`").await;
}

pub(super) async fn reopen_lapsed(case: &Case) {
    let key = case.key("");
    let late = case.reserved(&marked(case.short(&key), 1), 1, "a key that was never used").await;
    case.lapse().await;
    assert_eq!(case.reopen(&key, 1).await, Verdict::Applied, "a lapsed attempt");
    case.changes_nothing(&key, case.renew(&late), "a renewal after the `reopen`").await;
    case.changes_nothing(&key, case.finish(&late, &completed("late")), "a finish after the `reopen`").await;
    runs_again(case, &key, "a lapsed attempt").await;
}

pub(super) async fn reopen_released(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&limited(marked(case.request(&key), 1), 1), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    case.is_answered(
        &limited(case.request(&key), 1),
        Reservation::AttemptsExhausted { attempts: 1 },
        "the only allowed attempt was used",
    )
    .await;
    runs_again(case, &key, "an exhausted key").await;
}

pub(super) async fn reopen_keeps_retention(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    let earliest = case.now();
    let before = case.recorded(&key).await.expires_in;
    case.sleep(PAUSE).await;
    assert_eq!(case.reopen(&key, 1).await, Verdict::Applied, "a finished record");
    let after = case.recorded(&key).await.expires_in;
    case.has_left(after, before, earliest, "the retention of a reopened record");
    assert!(after + PAUSE <= before + TOLERANCE, "the retention was extended: {before:?}, then {after:?}");
}

pub(super) async fn purge_spares_the_kept(case: &Case) {
    let [held, lapsed, finished, released] = ["held", "lapsed", "finished", "released"].map(|name| case.key(name));
    case.reserved(&case.request(&held), 1, "a key that was never used").await;
    case.reserved(&case.short(&lapsed), 1, "a key that was never used").await;
    let lease = case.reserved(&case.request(&finished), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    let lease = case.reserved(&case.request(&released), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let gone = case.key("gone");
    let brief = ReserveRequest { ttl: SHORT, ..case.request(&gone) };
    let lease = case.reserved(&brief, 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    case.lapse().await;
    let before = [&held, &lapsed, &finished, &released];
    let records = [case.recorded(&held).await.record, case.recorded(&lapsed).await.record];
    // Other clauses purge the same store concurrently, and their records expire, so the number of records left to
    // remove is unknown.
    assert!(case.purge(3).await <= 3, "more than the batch was removed");
    while case.purge(1_000).await > 0 {}
    assert_eq!(case.inspect(&gone).await, None, "past its retention");
    for key in before {
        assert!(case.inspect(key).await.is_some(), "{key} was purged before the end of its retention");
    }
    let after = [case.recorded(&held).await.record, case.recorded(&lapsed).await.record];
    assert_eq!(after, records, "purging changes no record");
    case.takes_over(&case.request(&lapsed), 2, "a lapsed lease").await;
}
