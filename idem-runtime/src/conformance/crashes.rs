//! At most one run under `on_crash = fail`.

use super::{Case, completed};
use crate::policy::OnCrash;
use crate::record::{Record, Release, Reservation, ReserveRequest, State, Verdict};

fn fail(request: ReserveRequest) -> ReserveRequest {
    ReserveRequest { on_crash: OnCrash::Fail, ..request }
}

pub(super) async fn crashed_under_fail(case: &Case) {
    let key = case.key("");
    case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.lapse().await;
    for _ in 0..2 {
        let interrupted = Reservation::Interrupted { attempt: 1 };
        case.is_told(&case.request(&key), interrupted.clone(), "lapsed under `fail`, met under `retry`").await;
        case.is_told(&fail(case.request(&key)), interrupted, "lapsed under `fail`, met under `fail`").await;
    }
}

pub(super) async fn crash_met_under_fail(case: &Case) {
    let key = case.key("");
    case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let interrupted = Reservation::Interrupted { attempt: 1 };
    case.is_told(&fail(case.request(&key)), interrupted, "lapsed under `retry`, met under `fail`").await;
    case.takes_over(&case.request(&key), 2, "lapsed under `retry`, met under `retry`").await;
}

pub(super) async fn marked_interrupted(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.request(&key)), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    assert_eq!(case.recorded(&key).await.record, Record::after(&lease, State::Interrupted), "the record of it");
    for _ in 0..2 {
        let interrupted = Reservation::Interrupted { attempt: 1 };
        case.is_told(&case.request(&key), interrupted.clone(), "interrupted, met under `retry`").await;
        case.is_told(&fail(case.request(&key)), interrupted, "interrupted, met under `fail`").await;
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
    case.waits_for(&case.request(&key), 1, "a live lease under `fail`, met under `retry`").await;
    case.waits_for(&fail(case.request(&key)), 1, "a live lease under `fail`, met under `fail`").await;
    // An `Err` that is released counts as a return: the body may run again.
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    case.reserved(&fail(case.request(&key)), 2, "released under `fail`").await;
}

pub(super) async fn late_finish_under_fail(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&fail(case.short(&key)), 1, "a key that was never used").await;
    case.lapse().await;
    case.is_told(&case.request(&key), Reservation::Interrupted { attempt: 1 }, "lapsed under `fail`").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the lapsed lease was not taken over");
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_told(&case.request(&key), finished, "finished after all").await;
}
