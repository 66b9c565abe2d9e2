//! Clauses of the store contract about reservations: which request gets the key, and the answers to the other requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::case::{Case, LONG, PAUSE, TOLERANCE, chain, completed, limited};
use crate::record::{Lease, Record, Release, Reservation, ReserveRequest, Verdict};

pub(super) async fn first_reservation(case: &Case) {
    let key = case.key("");
    assert_eq!(case.inspect(&key).await, None, "a key that was never used has no record");
    let request = case.request(&key);
    let lease = case.reserved(&request, 1, "a key that was never used").await;
    assert_eq!(lease, Record::first(&request).lease(&request), "the first lease");
    assert_eq!(case.recorded(&key).await.record, Record::first(&request), "the first record");
}

pub(super) async fn reservation_repeated(case: &Case) {
    let key = case.key("");
    let request = case.request(&key);
    let lease = case.reserved(&request, 1, "a key that was never used").await;
    for _ in 0..4 {
        let again = case.reserved(&request, 1, "repeated with the same owner token").await;
        assert_eq!(again, lease, "a repeated reservation gets the same lease");
    }
    // A repeated reservation of a later attempt, after a release, is recognised too.
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let second = limited(case.request(&key), 2);
    case.reserved(&second, 2, "a released key").await;
    let again = case.reserved(&second, 2, "repeated with the same owner token, at the limit of attempts").await;
    assert_eq!(again.attempts_used, 2, "a repeated reservation starts no attempt");
    assert_eq!(case.recorded(&key).await.record.attempt, 2, "a repeated reservation is no new attempt");
}

pub(super) async fn reservation_repeated_after_lapse(case: &Case) {
    let key = case.key("");
    let request = limited(case.short(&key), 1);
    let lease = case.reserved(&request, 1, "a key that was never used").await;
    case.lapse().await;
    let (again, _) = case.wins(&request, "repeated with the same owner token after its lease lapsed").await;
    assert_eq!(again, lease, "a repeated reservation gets the same lease");
    assert_eq!(case.finish(&again, &completed("1")).await, Verdict::Applied, "and may finish");
}

/// Checks that exactly one racer got the key, for attempt `attempt`, and that the other racers were answered with that
/// attempt.
fn one_winner(answers: &[(ReserveRequest, Reservation)], attempt: u32, takeover: bool) -> Lease {
    let winners: Vec<_> = answers
        .iter()
        .filter_map(|(request, answer)| match answer {
            Reservation::Granted { lease, takeover, .. } => Some((request, lease, *takeover)),
            _ => None,
        })
        .collect();
    let attempts: Vec<_> = winners.iter().map(|(_, lease, _)| (lease.owner, lease.attempt)).collect();
    assert_eq!(attempts.len(), 1, "exactly one reservation may be granted, the granted ones were: {attempts:?}");
    let (request, lease, took_over) = winners[0];
    assert_eq!((lease.owner, lease.attempt, took_over), (request.owner, attempt, takeover), "the winner's lease");
    for (_, answer) in answers {
        match answer {
            Reservation::Granted { .. } => {}
            Reservation::InProgress { attempt: running, lapses_in } => {
                assert_eq!(*running, attempt, "the losers are answered with the winner's attempt");
                assert!(
                    *lapses_in <= LONG + TOLERANCE && !lapses_in.is_zero(),
                    "the winner's lease lapses in {lapses_in:?}, of {LONG:?}"
                );
            }
            other => panic!("the winner should be in progress for a loser, which was answered {other:?}"),
        }
    }
    lease.clone()
}

pub(super) async fn one_winner_of_many(case: &Case) {
    for round in 0..8 {
        let key = case.key(&round.to_string());
        let lease = one_winner(&case.race(&key).await, 1, false);
        assert_eq!(case.recorded(&key).await.record.owner, lease.owner, "the record has the winner's owner token");
        assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the winner can finish");
    }
}

pub(super) async fn one_winner_of_a_released_key(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    for attempt in 2..8 {
        let lease = one_winner(&case.race(&key).await, attempt, false);
        assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    }
}

pub(super) async fn one_winner_of_a_takeover(case: &Case) {
    for round in 0..4 {
        let key = case.key(&round.to_string());
        case.reserved(&case.short(&key), 1, "a key that was never used").await;
        case.lapse().await;
        let lease = one_winner(&case.race(&key).await, 2, true);
        assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the winner can finish");
    }
}

pub(super) async fn one_attempt_at_a_time(case: &Case) {
    const TASKS: usize = 8;
    const ROUNDS: usize = 20;
    let key = case.key("");
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..TASKS {
        let requests: Vec<_> = (0..ROUNDS).map(|_| case.request(&key)).collect();
        let (store, inside) = (Arc::clone(case.store()), Arc::clone(&inside));
        tasks.spawn(async move {
            let mut numbers = Vec::new();
            for request in requests {
                let answer = store.reserve(&request).await.unwrap_or_else(|error| panic!("reserve: {}", chain(&error)));
                let Reservation::Granted { lease, .. } = answer else {
                    tokio::task::yield_now().await;
                    continue;
                };
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two attempts hold the key at once");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                numbers.push(lease.attempt);
                let released = store.release(&lease, Release::Returned).await;
                assert_eq!(released.unwrap_or_else(|error| panic!("release: {}", chain(&error))), Verdict::Applied);
            }
            numbers
        });
    }
    let mut numbers = case.soon(tasks.join_all(), "tasks that reserve and release").await.concat();
    numbers.sort_unstable();
    let expected: Vec<_> = (1..).take(numbers.len()).collect();
    assert_eq!(numbers, expected, "attempt numbers are neither repeated nor left out");
}

pub(super) async fn live_lease_is_pending(case: &Case) {
    let key = case.key("");
    let earliest = case.now();
    case.reserved(&case.request(&key), 1, "a key that was never used").await;
    case.sleep(PAUSE).await;
    let answer = case.reserve(&case.request(&key)).await;
    let Reservation::InProgress { attempt: 1, lapses_in } = answer else {
        panic!("attempt 1 should be in progress, was answered {answer:?}");
    };
    case.has_left(lapses_in, LONG, earliest, "a live lease");
    assert!(lapses_in < LONG, "the time left does not shrink: {lapses_in:?} of {LONG:?}");
    // Neither the lease nor the limit of attempts in the duplicate's request changes the answer.
    case.waits_for(&case.short(&key), 1, "a duplicate with a short lease").await;
    case.waits_for(&limited(case.request(&key), 1), 1, "a duplicate at the limit of attempts").await;
}

pub(super) async fn takeover_is_a_new_attempt(case: &Case) {
    let key = case.key("");
    case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let second = case.takes_over(&case.short(&key), 2, "a lapsed lease").await;
    case.begins(&second).await;
    case.lapse().await;
    let request = case.request(&key);
    let third = case.takes_over(&request, 3, "a lapsed lease").await;
    assert_eq!(third.attempts_used, 2, "a body that has begun counts");
    case.waits_for(&case.request(&key), 3, "a lease that was taken over").await;
    let record = case.recorded(&key).await.record;
    assert_eq!(record.lease(&request), third, "the record is that of the successor");
}

pub(super) async fn released_key_is_free(case: &Case) {
    let key = case.key("");
    for attempt in 1..=4 {
        let lease = case.reserved(&case.request(&key), attempt, "a free key").await;
        assert_eq!(lease.attempts_used, attempt, "every attempt starts a body");
        case.waits_for(&case.request(&key), attempt, "a live lease").await;
        assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    }
}

pub(super) async fn released_owner_never_reserves_again(case: &Case) {
    for release in [Release::Returned, Release::NotStarted] {
        let key = case.key(&format!("{release:?}"));
        let request = limited(case.request(&key), 1);
        let lease = case.reserved(&request, 1, "a key that was never used").await;
        assert_eq!(case.release(&lease, release).await, Verdict::Applied);
        let before = case.recorded(&key).await;
        case.sleep(PAUSE).await;
        for _ in 0..2 {
            let released = Reservation::Released { attempt: 1 };
            case.is_answered(&request, released, "a reservation that arrives after its own release").await;
        }
        let after = case.recorded(&key).await;
        assert_eq!(after.record, before.record, "a late reservation changes nothing");
        let put_off = after.expires_in + PAUSE > before.expires_in + TOLERANCE;
        assert!(!put_off, "a late reservation extended the retention: {before:?}, then {after:?}");
        assert_eq!(case.release(&lease, release).await, Verdict::Applied, "the release is still recognised");
        case.reserved(&case.request(&key), 2, "the key is free for another owner").await;
    }
    // After a `reopen`, a late reservation of the crashed attempt gets no lease, and another owner can reserve the key.
    let key = case.key("reopened");
    let request = case.request(&key);
    let lease = case.reserved(&request, 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    let interrupted = Reservation::Interrupted { attempt: 1 };
    case.is_answered(&request, interrupted, "a reservation that arrives after its attempt was marked").await;
    assert_eq!(case.reopen(&key, 1).await, Verdict::Applied);
    case.is_answered(&request, Reservation::Released { attempt: 1 }, "a reservation that arrives after a `reopen`")
        .await;
    case.reserved(&case.request(&key), 2, "the key is free for another owner").await;
}

pub(super) async fn attempts_never_repeat(case: &Case) {
    let key = case.key("");
    let first = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.release(&first, Release::Returned).await, Verdict::Applied);
    let second = case.reserved(&case.request(&key), 2, "after a release").await;
    assert_eq!(case.release(&second, Release::NotStarted).await, Verdict::Applied);
    case.reserved(&case.short(&key), 3, "after a release that never started").await;
    case.lapse().await;
    let fourth = case.takes_over(&case.request(&key), 4, "after a lapse").await;
    assert_eq!(case.release(&fourth, Release::Interrupted).await, Verdict::Applied);
    assert_eq!(case.reopen(&key, 4).await, Verdict::Applied);
    let fifth = case.reserved(&case.request(&key), 5, "after a `reopen` of an interrupted attempt").await;
    assert_eq!(case.finish(&fifth, &completed("1")).await, Verdict::Applied);
    assert_eq!(case.reopen(&key, 5).await, Verdict::Applied);
    case.reserved(&case.request(&key), 6, "after a `reopen` of a finished record").await;
}

pub(super) async fn max_attempts_counts_releases(case: &Case) {
    let key = case.key("");
    for attempt in 1..=3 {
        let lease = case.reserved(&limited(case.request(&key), 3), attempt, "within the limit").await;
        assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    }
    for _ in 0..2 {
        let exhausted = Reservation::AttemptsExhausted { attempts: 3 };
        case.is_answered(&limited(case.request(&key), 3), exhausted, "three of three attempts were released").await;
    }
    assert_eq!(case.recorded(&key).await.record.attempt, 3, "a refused attempt gets no number");
}

pub(super) async fn max_attempts_counts_lapses(case: &Case) {
    let key = case.key("");
    let first = case.reserved(&limited(case.short(&key), 2), 1, "within the limit").await;
    case.begins(&first).await;
    case.lapse().await;
    let second = case.takes_over(&limited(case.short(&key), 2), 2, "within the limit").await;
    case.begins(&second).await;
    case.lapse().await;
    for _ in 0..2 {
        let exhausted = Reservation::AttemptsExhausted { attempts: 2 };
        case.is_answered(&limited(case.request(&key), 2), exhausted, "two of two attempts lapsed").await;
    }
    assert_eq!(case.finish(&second, &completed("1")).await, Verdict::Applied, "the last attempt was not taken over");
}

pub(super) async fn not_started_does_not_count(case: &Case) {
    let key = case.key("");
    for attempt in 1..=4 {
        let lease = case.reserved(&limited(case.request(&key), 1), attempt, "no body has started").await;
        assert_eq!(lease.attempts_used, 1, "only this attempt counts");
        assert_eq!(case.release(&lease, Release::NotStarted).await, Verdict::Applied);
        assert_eq!(case.recorded(&key).await.record.attempts_used, 0, "no body has started");
    }
    let lease = case.reserved(&limited(case.request(&key), 1), 5, "no body has started").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let exhausted = Reservation::AttemptsExhausted { attempts: 1 };
    case.is_answered(&limited(case.request(&key), 1), exhausted, "the only allowed attempt has started").await;
}

pub(super) async fn exhaustion_is_not_final(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&limited(case.request(&key), 1), 1, "within the limit").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let exhausted = Reservation::AttemptsExhausted { attempts: 1 };
    case.is_answered(&limited(case.request(&key), 1), exhausted.clone(), "the only allowed attempt has started").await;
    let lease = case.reserved(&limited(case.request(&key), 2), 2, "another attempt is allowed now").await;
    case.waits_for(&limited(case.request(&key), 1), 2, "a live lease, regardless of the limit").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_answered(&limited(case.request(&key), 1), finished, "a result is replayed regardless of the limit").await;
}
