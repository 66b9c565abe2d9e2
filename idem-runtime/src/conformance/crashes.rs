//! Clauses of the store contract about crashes under `on_crash = fail`: the body runs at most once.

use std::num::NonZeroU16;

use super::case::{Case, PAUSE, TOLERANCE, completed, forged, limited};
use crate::policy::OnCrash;
use crate::record::{Lease, Record, Release, Reservation, ReserveRequest, State, Verdict};

fn fail(request: ReserveRequest) -> ReserveRequest {
    ReserveRequest { on_crash: OnCrash::Fail, ..request }
}

pub(super) async fn crashed_under_fail(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.begins(&lease).await;
    case.lapse().await;
    for _ in 0..2 {
        let interrupted = Reservation::Interrupted { attempt: 1 };
        case.is_answered(&case.request(&key), interrupted.clone(), "lapsed under `fail`, request under `retry`").await;
        case.is_answered(&fail(case.request(&key)), interrupted, "lapsed under `fail`, request under `fail`").await;
    }
}

pub(super) async fn crash_found_under_fail(case: &Case) {
    let key = case.key("");
    case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let interrupted = Reservation::Interrupted { attempt: 1 };
    case.is_answered(&fail(case.request(&key)), interrupted, "lapsed under `retry`, request under `fail`").await;
    case.takes_over(&case.request(&key), 2, "lapsed under `retry`, request under `retry`").await;
}

pub(super) async fn marked_interrupted(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    assert_eq!(
        case.recorded(&key).await.record,
        Record::after(&lease, State::Interrupted),
        "the record after the release"
    );
    for _ in 0..2 {
        let interrupted = Reservation::Interrupted { attempt: 1 };
        case.is_answered(&case.request(&key), interrupted.clone(), "interrupted, request under `retry`").await;
        case.is_answered(&fail(case.request(&key)), interrupted, "interrupted, request under `fail`").await;
    }
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied, "a repeated mark is recognised");
    case.changes_nothing(
        &key,
        case.finish(&lease, &completed("1")),
        "a finish after the attempt was marked as interrupted",
    )
    .await;
}

pub(super) async fn live_lease_under_fail(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
    assert_eq!(case.begin(&lease).await, Verdict::Applied);
    case.waits_for(&case.request(&key), 1, "a live lease under `fail`, request under `retry`").await;
    case.waits_for(&fail(case.request(&key)), 1, "a live lease under `fail`, request under `fail`").await;
    // The body returned an `Err`, and the attempt is released. A return is no crash, so the body may run again.
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    case.reserved(&fail(case.request(&key)), 2, "released under `fail`").await;
}

pub(super) async fn late_finish_under_fail(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.begins(&lease).await;
    case.lapse().await;
    case.is_answered(&case.request(&key), Reservation::Interrupted { attempt: 1 }, "lapsed under `fail`").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the lapsed lease was not taken over");
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_answered(&case.request(&key), finished, "finished after all").await;
}

pub(super) async fn unmarked_lapse_under_fail(case: &Case) {
    let key = case.key("");
    case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.lapse().await;
    let lease = case.takes_over(&fail(case.short(&key)), 2, "lapsed before its body, request under `fail`").await;
    assert_eq!(lease.attempts_used, 1, "an attempt whose body has not begun does not count");
    case.lapse().await;
    case.takes_over(&case.request(&key), 3, "lapsed before its body, request under `retry`").await;
}

pub(super) async fn unmarked_lapse_does_not_count(case: &Case) {
    let key = case.key("");
    case.reserved(&limited(case.short(&key), 1), 1, "no body has begun").await;
    for attempt in 2..=4 {
        case.lapse().await;
        let lease = case.takes_over(&limited(case.short(&key), 1), attempt, "no body has begun").await;
        assert_eq!(lease.attempts_used, 1, "only this attempt counts");
    }
    case.lapse().await;
    let lease = case.takes_over(&limited(case.short(&key), 1), 5, "no body has begun").await;
    case.begins(&lease).await;
    case.lapse().await;
    let exhausted = Reservation::AttemptsExhausted { attempts: 1 };
    case.is_answered(&limited(case.request(&key), 1), exhausted, "the only allowed body has begun").await;
}

pub(super) async fn begin_is_recorded(case: &Case) {
    for (name, request) in
        [("retry", case.request(&case.key("retry"))), ("fail", fail(case.request(&case.key("fail"))))]
    {
        let lease = case.reserved(&request, 1, "a key that was never used").await;
        let earliest = case.now();
        case.sleep(PAUSE).await;
        assert_eq!(case.begin(&lease).await, Verdict::Applied, "{name}: a live lease");
        let found = case.recorded(&request.key).await;
        let (lease_time, ttl, on_crash) = (request.lease, request.ttl, request.on_crash);
        let state = State::Pending { lease: lease_time, ttl, on_crash, begun: true };
        assert_eq!(found.record, Record::after(&lease, state), "{name}: the record is marked as begun");
        let left = found.lapses_in.unwrap_or_default();
        let since = case.since(earliest).saturating_sub(PAUSE);
        assert!(left + since + TOLERANCE >= request.lease, "{name}: the mark renews the lease, {left:?} are left");
        assert_eq!(case.renew(&lease).await, Verdict::Applied);
        assert_eq!(case.recorded(&request.key).await.record, found.record, "{name}: a renewal keeps the mark");
        assert_eq!(case.reserved(&request, 1, "repeated with its owner token").await, lease, "{name}");
        assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "{name}: a marked attempt finishes");
    }
}

pub(super) async fn begin_repeated(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.begins(&lease).await;
    assert_eq!(case.begin(&lease).await, Verdict::Applied, "repeated");
    case.lapse().await;
    assert_eq!(case.begin(&lease).await, Verdict::Applied, "repeated after the lease: the body may run by now");
    assert_eq!(case.release(&lease, Release::NotStarted).await, Verdict::Applied, "the body has not begun after all");
    let record = case.recorded(&key).await.record;
    assert_eq!(
        record,
        Record { attempts_used: 0, ..Record::after(&lease, State::Released) },
        "the record after the release"
    );
}

pub(super) async fn begin_is_the_owners(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
    let other = forged(&lease, &case.request(&key));
    case.changes_nothing(&key, case.begin(&other), "a mark with another owner token").await;
    let other = Lease { attempt: 2, ..lease.clone() };
    case.changes_nothing(&key, case.begin(&other), "a mark with another number").await;
    assert_eq!(case.begin(&lease).await, Verdict::Applied, "the mark of its owner");
    let nothing = case.key("nothing");
    let absent = Lease { key: nothing.clone(), ..lease };
    assert_eq!(case.begin(&absent).await, Verdict::Refused, "a mark without a record");
    assert_eq!(case.inspect(&nothing).await, None, "a refused mark makes no record");
}

pub(super) async fn begin_after_a_lapse(case: &Case) {
    let key = case.key("");
    let late = case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.lapse().await;
    case.changes_nothing(&key, case.begin(&late), "a mark that arrives after the lease").await;
    let lease = case.takes_over(&fail(case.request(&key)), 2, "lapsed before its body").await;
    case.changes_nothing(&key, case.begin(&late), "a mark that arrives after a takeover").await;
    assert_eq!(case.begin(&lease).await, Verdict::Applied, "the mark of the successor");

    let key = case.key("renewed");
    let lease = case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.lapse().await;
    case.begins(&lease).await;
}

pub(super) async fn begin_after_the_end(case: &Case) {
    for release in [Release::Returned, Release::NotStarted, Release::Interrupted] {
        let key = case.key(&format!("{release:?}"));
        let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
        assert_eq!(case.release(&lease, release).await, Verdict::Applied);
        case.changes_nothing(&key, case.begin(&lease), "a mark that arrives after the release").await;
    }
    let key = case.key("finished");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    case.changes_nothing(&key, case.begin(&lease), "a mark that arrives after the result").await;
}

fn reconciling(request: ReserveRequest, max: u16) -> ReserveRequest {
    fail(request).max_reconciliations(NonZeroU16::new(max))
}

pub(super) async fn reconciler_gets_an_interrupted_key(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&limited(fail(case.request(&key)), 1), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    let interrupted = |attempt| Reservation::Interrupted { attempt };
    case.is_answered(&fail(case.request(&key)), interrupted(1), "interrupted, no reconciler").await;
    // The limit of attempts applies to bodies, not to reconcilers.
    let request = limited(reconciling(case.request(&key), 9), 1);
    let lease = case.reconciles(&request, 2, "interrupted, with a reconciler").await;
    assert_eq!(lease.attempts_used, 2, "the attempt counts while its body may run");
    let found = case.recorded(&key).await.record;
    assert!(matches!(found.state, State::Pending { on_crash: OnCrash::Fail, begun: true, .. }), "{found:?}");
    for other in [case.request(&key), reconciling(case.request(&key), 9)] {
        case.waits_for(&other, 2, "while the reconciler runs").await;
    }
    assert_eq!(case.begin(&lease).await, Verdict::Applied, "the mark is there already");
    assert_eq!(case.release(&lease, Release::Unresolved).await, Verdict::Applied);
    assert_eq!(case.release(&lease, Release::Unresolved).await, Verdict::Applied, "repeated");
    let found = case.recorded(&key).await.record;
    assert_eq!((found.state, found.attempt, found.attempts_used), (State::Interrupted, 2, 1), "without an answer");
    case.is_answered(&case.request(&key), interrupted(2), "interrupted again, no reconciler").await;
    let lease = case.reconciles(&reconciling(case.request(&key), 9), 3, "interrupted again").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the reconciler has found the result");
    let (answer, record) =
        (case.reserve(&reconciling(case.request(&key), 9)).await, Record::after(&lease, completed("1").state()));
    let Reservation::Finished { record: found, .. } = answer else { panic!("finished, was answered {answer:?}") };
    assert_eq!((found.state, found.attempt), (record.state, 3));
}

pub(super) async fn reconciler_gets_a_lapsed_body(case: &Case) {
    for begun in [false, true] {
        let key = case.key(if begun { "begun" } else { "not begun" });
        let lease = case.reserved(&reconciling(case.short(&key), 9), 1, "a key that was never used").await;
        if begun {
            case.begins(&lease).await;
        }
        case.lapse().await;
        match begun {
            true => _ = case.reconciles(&reconciling(case.request(&key), 9), 2, "the body has begun").await,
            false => _ = case.takes_over(&reconciling(case.request(&key), 9), 2, "the body has not begun").await,
        }
    }
    // The record of an attempt under `retry` does not show whether the body has begun.
    let key = case.key("under retry");
    case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    case.reconciles(&reconciling(case.request(&key), 9), 2, "lapsed under `retry`").await;
}

pub(super) async fn reconciler_that_crashed(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    case.reconciles(&reconciling(case.short(&key), 9), 2, "interrupted").await;
    case.lapse().await;
    for other in [case.request(&key), fail(case.request(&key))] {
        case.is_answered(&other, Reservation::Interrupted { attempt: 2 }, "the reconciler crashed").await;
    }
    case.reconciles(&reconciling(case.request(&key), 9), 3, "the reconciler crashed").await;
}

pub(super) async fn reconciler_repeats_its_request(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    let request = reconciling(case.request(&key), 9);
    let lease = case.reconciles(&request, 2, "interrupted").await;
    assert_eq!(case.reconciles(&request, 2, "repeated").await, lease);
    assert_eq!(case.release(&lease, Release::Unresolved).await, Verdict::Applied);
    case.is_answered(&request, Reservation::Released { attempt: 2 }, "late, after its attempt has ended").await;
}

pub(super) async fn reconciliations_are_limited(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    for attempt in 2..=3 {
        let lease = case.reconciles(&reconciling(case.request(&key), 2), attempt, "below the limit").await;
        assert_eq!(case.release(&lease, Release::Unresolved).await, Verdict::Applied);
    }
    let interrupted = Reservation::Interrupted { attempt: 3 };
    case.is_answered(&reconciling(case.request(&key), 2), interrupted, "as often as the request allows").await;
    case.reconciles(&reconciling(case.request(&key), 3), 4, "below a higher limit").await;
}
