//! Clauses of the store contract about retention: no record is forgotten early, and an expired record is absent.

use std::time::Duration;

use super::case::{Case, LONG, PAUSE, SHORT, completed, fingerprint, limited, marked, stored};
use crate::key::Key;
use crate::policy::Policy;
use crate::record::{Finish, Release, ReserveRequest, Verdict};

/// Checks that no part of the record of `key` is left.
async fn is_forgotten(case: &Case, key: &Key, why: &str) {
    assert_eq!(case.inspect(key).await, None, "{why}: the record is shown after its retention");
    assert_eq!(case.reopen(key, 1).await, Verdict::Refused, "{why}: `reopen` without a record");
    let lease = case.reserved(&marked(limited(case.request(key), 1), 7), 1, why).await;
    assert_eq!(lease.attempts_used, 1, "{why}: earlier attempts still count");
    assert_eq!(lease.fingerprint, Some(fingerprint(7)), "{why}: the earlier fingerprint is still there");
}

fn brief(request: ReserveRequest) -> ReserveRequest {
    marked(ReserveRequest { ttl: SHORT, ..request }, 1)
}

pub(super) async fn result_is_forgotten(case: &Case) {
    for (name, finish) in [("completed", completed("1")), ("failed", Finish::Failed(stored("1")))] {
        let key = case.key(name);
        let lease = case.reserved(&brief(case.request(&key)), 1, "a key that was never used").await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
        case.lapse().await;
        is_forgotten(case, &key, name).await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Refused, "{name}: repeated, but the record is gone");
    }
}

pub(super) async fn released_record_is_forgotten(case: &Case) {
    for release in [Release::Returned, Release::Interrupted] {
        let key = case.key(&format!("{release:?}"));
        let lease = case.reserved(&brief(case.request(&key)), 1, "a key that was never used").await;
        assert_eq!(case.release(&lease, release).await, Verdict::Applied);
        case.lapse().await;
        is_forgotten(case, &key, &format!("{release:?}")).await;
    }
}

pub(super) async fn pending_record_is_forgotten(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&brief(case.short(&key)), 1, "a key that was never used").await;
    case.lapse().await;
    case.lapse().await;
    assert_eq!(case.renew(&lease).await, Verdict::Refused, "a renewal, but the record is gone");
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Refused, "a finish, but the record is gone");
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Refused, "a release, but the record is gone");
    is_forgotten(case, &key, "pending").await;
    let finish = completed("1");
    case.changes_nothing(&key, case.finish(&lease, &finish), "a finish after another owner reserved the key").await;
}

pub(super) async fn pending_record_outlives_ttl(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&brief(case.request(&key)), 1, "a key that was never used").await;
    case.lapse().await;
    case.waits_for(&case.request(&key), 1, "a live lease longer than its `ttl`").await;
    assert_eq!(case.renew(&lease).await, Verdict::Applied, "a live lease");
    case.lapse().await;
    case.waits_for(&case.request(&key), 1, "a renewed lease longer than its `ttl`").await;
}

pub(super) async fn retention_starts_at_the_end(case: &Case) {
    for name in ["completed", "failed", "released", "interrupted"] {
        let key = case.key(name);
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        case.sleep(PAUSE).await;
        let earliest = case.now();
        let written = match name {
            "completed" => case.finish(&lease, &completed("1")).await,
            "failed" => case.finish(&lease, &Finish::Failed(stored("1"))).await,
            "released" => case.release(&lease, Release::Returned).await,
            _ => case.release(&lease, Release::Interrupted).await,
        };
        assert_eq!(written, Verdict::Applied, "{name}");
        let inspected = case.recorded(&key).await;
        case.has_left(inspected.expires_in, LONG, earliest, &format!("the retention of a {name} record"));
        assert_eq!(inspected.lapses_in, None, "a {name} record has no lease");
    }
}

pub(super) async fn retention_of_a_pending_record(case: &Case) {
    let key = case.key("");
    let earliest = case.now();
    case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let inspected = case.recorded(&key).await;
    case.has_left(inspected.expires_in, LONG + LONG, earliest, "the retention of a pending record");

    let key = case.key("taken over");
    case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let lapsed = case.recorded(&key).await;
    assert_eq!(lapsed.lapses_in, Some(Duration::ZERO), "a lapsed lease, for the operator");
    let earliest = case.now();
    case.takes_over(&case.request(&key), 2, "a lapsed lease").await;
    let inspected = case.recorded(&key).await;
    case.has_left(inspected.expires_in, LONG + LONG, earliest, "the retention of a record that was taken over");
}

pub(super) async fn longest_times(case: &Case) {
    let longest = Policy::MAX_DURATION;
    let key = case.key("");
    let earliest = case.now();
    let request = ReserveRequest { lease: longest, ttl: longest, ..case.request(&key) };
    let lease = case.reserved(&request, 1, "a key that was never used").await;
    let inspected = case.recorded(&key).await;
    case.has_left(inspected.lapses_in.expect("a pending record has a lease"), longest, earliest, "the longest lease");
    case.has_left(inspected.expires_in, longest * 2, earliest, "the longest retention, after the longest lease");
    case.waits_for(&case.request(&key), 1, "the longest lease").await;
    assert_eq!(case.renew(&lease).await, Verdict::Applied, "the longest lease");
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the longest lease");
    case.has_left(case.recorded(&key).await.expires_in, longest, earliest, "the longest retention");
}
