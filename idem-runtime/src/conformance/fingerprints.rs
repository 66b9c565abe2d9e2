//! Clauses of the store contract about fingerprints: in every state of the record, a request with another payload
//! is refused.

use super::case::{Case, completed, fingerprint, limited, marked, stored};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::{Finish, Lease, Record, Release, Reservation, ReserveRequest, Verdict};

/// Checks that a request with another fingerprint gets a mismatch with attempt `attempt`, and changes nothing.
async fn mismatches(case: &Case, key: &Key, attempt: u32, why: &str) {
    let before = case.recorded(key).await.record;
    let mismatch = Reservation::FingerprintMismatch { attempt };
    case.is_answered(&marked(case.request(key), 2), mismatch.clone(), why).await;
    let fail = ReserveRequest { on_crash: OnCrash::Fail, ..case.request(key) };
    case.is_answered(&marked(limited(fail, 1), 3), mismatch, why).await;
    assert_eq!(case.recorded(key).await.record, before, "{why}: a mismatch changes nothing");
}

async fn first(case: &Case, request: ReserveRequest) -> (ReserveRequest, Lease) {
    let request = marked(request, 1);
    let lease = case.reserved(&request, 1, "a key that was never used").await;
    assert_eq!(lease.fingerprint, Some(fingerprint(1)), "the lease has the fingerprint");
    (request, lease)
}

pub(super) async fn mismatch_while_pending(case: &Case) {
    let key = case.key("");
    first(case, case.request(&key)).await;
    mismatches(case, &key, 1, "another payload while an attempt runs").await;
    case.waits_for(&marked(case.request(&key), 1), 1, "the same payload").await;
}

pub(super) async fn mismatch_once_released(case: &Case) {
    let key = case.key("");
    let (_, lease) = first(case, case.request(&key)).await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    mismatches(case, &key, 1, "another payload on a released key").await;
    case.reserved(&marked(case.request(&key), 1), 2, "the same payload").await;
}

pub(super) async fn mismatch_at_takeover(case: &Case) {
    let key = case.key("");
    first(case, case.short(&key)).await;
    case.lapse().await;
    mismatches(case, &key, 1, "another payload at takeover").await;
    case.takes_over(&marked(case.request(&key), 1), 2, "the same payload").await;
}

pub(super) async fn mismatch_on_replay(case: &Case) {
    for (name, finish) in [("completed", completed("1")), ("failed", Finish::Failed(stored("1")))] {
        let key = case.key(name);
        let (_, lease) = first(case, case.request(&key)).await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
        for _ in 0..2 {
            mismatches(case, &key, 1, &format!("another payload once the operation has {name}")).await;
            let finished = Reservation::finished(Record::after(&lease, finish.state()));
            case.is_answered(&marked(case.request(&key), 1), finished, "the same payload").await;
        }
    }
}

pub(super) async fn mismatch_once_interrupted(case: &Case) {
    let key = case.key("");
    let (_, lease) = first(case, ReserveRequest { on_crash: OnCrash::Fail, ..case.request(&key) }).await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    mismatches(case, &key, 1, "another payload on an interrupted key").await;
    let interrupted = Reservation::Interrupted { attempt: 1 };
    case.is_answered(&marked(case.request(&key), 1), interrupted, "the same payload").await;

    let key = case.key("lapsed");
    first(case, ReserveRequest { on_crash: OnCrash::Fail, ..case.short(&key) }).await;
    case.lapse().await;
    mismatches(case, &key, 1, "another payload after a lapse under `fail`").await;
}

pub(super) async fn mismatch_once_exhausted(case: &Case) {
    let key = case.key("");
    let (_, lease) = first(case, limited(case.request(&key), 1)).await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    mismatches(case, &key, 1, "another payload on an exhausted key").await;
    let exhausted = Reservation::AttemptsExhausted { attempts: 1 };
    case.is_answered(&marked(limited(case.request(&key), 1), 1), exhausted, "the same payload").await;
}

pub(super) async fn missing_fingerprint_matches(case: &Case) {
    // First case: the record has a fingerprint, and the request has none.
    let key = case.key("recorded");
    let (_, lease) = first(case, case.request(&key)).await;
    case.waits_for(&case.request(&key), 1, "no fingerprint is presented").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_answered(&case.request(&key), finished, "no fingerprint is presented").await;

    // Second case: the request has a fingerprint, and the record has none. The next attempt writes its fingerprint into
    // the record.
    let key = case.key("presented");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(lease.fingerprint, None);
    case.waits_for(&marked(case.request(&key), 1), 1, "no fingerprint is recorded").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let lease = case.reserved(&marked(case.request(&key), 1), 2, "no fingerprint is recorded").await;
    assert_eq!(lease.fingerprint, Some(fingerprint(1)), "the new attempt has recorded its fingerprint");
    mismatches(case, &key, 2, "another payload than the attempt that recorded a fingerprint").await;
}

pub(super) async fn fingerprint_survives(case: &Case) {
    let key = case.key("");
    first(case, case.short(&key)).await;
    case.lapse().await;
    let lease = case.takes_over(&case.request(&key), 2, "no fingerprint is presented").await;
    assert_eq!(lease.fingerprint, Some(fingerprint(1)), "a takeover keeps the fingerprint");
    mismatches(case, &key, 2, "another payload after a takeover").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    mismatches(case, &key, 2, "another payload after a takeover and a release").await;
    let lease = case.reserved(&case.request(&key), 3, "no fingerprint is presented").await;
    assert_eq!(lease.fingerprint, Some(fingerprint(1)), "a release keeps the fingerprint");
    assert_eq!(case.renew(&lease).await, Verdict::Applied);
    mismatches(case, &key, 3, "another payload after a renewal").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    mismatches(case, &key, 3, "another payload after a finish").await;
    assert_eq!(case.reopen(&key, 3).await, Verdict::Applied);
    mismatches(case, &key, 3, "another payload after a `reopen`").await;
}
