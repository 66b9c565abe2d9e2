//! Clauses of the store contract about writes: only the owner of an attempt writes, and may repeat its writes.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use super::case::{Case, LONG, PAUSE, SHORT, TOLERANCE, chain, completed, forged, limited, stored};
use crate::combine::all;
use crate::record::{Finish, Lease, Record, Release, Reservation, ReserveRequest, State, StoredResult, Verdict};
use crate::store::{StoreFuture, renew_all};
use crate::sync::lock;

pub(super) async fn renewal_extends(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let before = case.recorded(&key).await.record;
    for _ in 0..2 {
        case.sleep(PAUSE).await;
        let earliest = case.now();
        assert_eq!(case.renew(&lease).await, Verdict::Applied, "a live lease");
        let renewed = case.recorded(&key).await;
        let lapses_in = renewed.lapses_in.expect("a pending record has a lease");
        case.has_left(lapses_in, LONG, earliest, "the lease after a renewal");
        case.has_left(renewed.expires_in, LONG + LONG, earliest, "the retention after a renewal");
        assert_eq!(renewed.record, before, "a renewal changes times only");
    }
}

pub(super) async fn renewal_after_lapse(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let earliest = case.now();
    assert_eq!(case.renew(&lease).await, Verdict::Applied, "the lapsed lease was not taken over");
    let renewed = case.recorded(&key).await;
    case.has_left(renewed.expires_in, SHORT + LONG, earliest, "the retention after a renewal");
    assert_eq!(renewed.record.lease(&limited(case.short(&key), 1)).attempt, 1, "a renewal is no new attempt");
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the owner of a renewed lease can finish");
}

pub(super) async fn renewal_is_the_owners(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let other = forged(&lease, &case.request(&key));
    case.changes_nothing(&key, case.renew(&other), "a renewal by another owner").await;
    assert_eq!(case.renew(&lease).await, Verdict::Applied, "the owner can renew");
}

pub(super) async fn renewal_after_takeover(case: &Case) {
    let key = case.key("");
    let late = case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let lease = case.takes_over(&case.request(&key), 2, "a lapsed lease").await;
    case.changes_nothing(&key, case.renew(&late), "a renewal after a takeover").await;
    assert_eq!(case.renew(&lease).await, Verdict::Applied, "the successor can renew");
}

pub(super) async fn renewal_after_the_end(case: &Case) {
    let key = case.key("finished");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    case.changes_nothing(&key, case.renew(&lease), "a renewal after the finish").await;

    for release in [Release::Returned, Release::NotStarted, Release::Interrupted] {
        let key = case.key(&format!("{release:?}"));
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        assert_eq!(case.release(&lease, release).await, Verdict::Applied);
        case.changes_nothing(&key, case.renew(&lease), "a renewal after the release").await;
    }

    let key = case.key("absent");
    let never = Record::first(&case.request(&key)).lease(&case.request(&key));
    assert_eq!(case.renew(&never).await, Verdict::Refused, "there is no record");
    assert_eq!(case.inspect(&key).await, None, "a refused renewal makes no record");
}

pub(super) async fn renewals_answer_in_order(case: &Case) {
    use Verdict::{Applied, Refused};
    let owned = |name: &'static str| {
        let request = case.request(&case.key(name));
        async move { case.reserved(&request, 1, "a key that was never used").await }
    };
    let [live, finished, released] = [owned("live").await, owned("finished").await, owned("released").await];
    assert_eq!(case.finish(&finished, &completed("1")).await, Applied);
    assert_eq!(case.release(&released, Release::Returned).await, Applied);
    let foreign = forged(&live, &case.request(&live.key));
    let absent = Lease { key: case.key("absent"), ..live.clone() };
    let lapsed = case.reserved(&case.short(&case.key("lapsed")), 1, "a key that was never used").await;
    let lost = case.reserved(&case.short(&case.key("lost")), 1, "a key that was never used").await;
    case.lapse().await;
    let successor = case.takes_over(&case.request(&lost.key), 2, "a lapsed lease").await;

    let batch = [lost, live, finished, absent, lapsed, released, successor, foreign];
    let expected = [Refused, Applied, Refused, Refused, Applied, Refused, Applied, Refused];
    for turn in 0..batch.len() {
        let (mut batch, mut expected) = (batch.clone(), expected);
        batch.rotate_left(turn);
        expected.rotate_left(turn);
        let answers = case.ask(StoreFuture::new(renew_all(case.store(), &batch)), "renew a batch").await;
        assert_eq!(answers, expected, "the answers for {batch:?}");
    }
}

pub(super) async fn each_renewal_has_one_answer(case: &Case) {
    for leases in [1, 2, 5, 150] {
        let mut batch = Vec::new();
        for n in 0..leases {
            let request = case.request(&case.key(&format!("{leases}:{n}")));
            let lease = case.reserved(&request, 1, "a key that was never used").await;
            // Every third lease gets the owner token of another request.
            batch.push(if n % 3 == 2 { forged(&lease, &case.request(&lease.key)) } else { lease });
        }
        let answers: Vec<_> = batch.iter().map(|_| Mutex::new(Vec::new())).collect();
        let answer = |at: usize, write| {
            let of = answers.get(at).unwrap_or_else(|| panic!("lease {at} is answered, in a batch of {leases}"));
            lock(of).push(write);
        };
        case.ask(case.store().renew(&batch, &answer), "renew a batch").await;
        for (n, answers) in answers.iter().enumerate() {
            let expected = if n % 3 == 2 { Verdict::Refused } else { Verdict::Applied };
            assert_eq!(*lock(answers), [expected], "the answers for lease {n} of {leases}");
        }
    }
}

pub(super) async fn blocked_record_holds_up_no_other(case: &Case) {
    let Some(block) = &case.subject.block else { return };
    let mut batch = Vec::new();
    for n in 0..5 {
        let request = case.request(&case.key(&n.to_string()));
        batch.push(case.reserved(&request, 1, "a key that was never used").await);
    }
    for (turn, blocked) in [0, 2, 4].into_iter().enumerate() {
        let holding = block(batch[blocked].key.clone()).await;
        let answers: Mutex<Vec<Option<Verdict>>> = Mutex::new(vec![None; batch.len()]);
        let told = tokio::sync::Notify::new();
        let answer = |at: usize, write| {
            lock(&answers)[at] = Some(write);
            told.notify_one();
        };
        let all_others = || {
            let answers = lock(&answers);
            answers.iter().enumerate().all(|(at, answer)| at == blocked || *answer == Some(Verdict::Applied))
        };
        let store = case.store();
        let renew = store.renew(&batch, &answer);
        // The other leases must be answered without the blocked lease, no matter whether the call itself waits for the
        // blocked record.
        let mut others = pin!(async {
            while !all_others() {
                told.notified().await;
            }
        });
        let mut renew = pin!(renew);
        let either = poll_fn(|cx| match renew.as_mut().poll(cx) {
            Poll::Ready(renewed) => Poll::Ready(Some(renewed)),
            Poll::Pending => others.as_mut().poll(cx).map(|()| None),
        });
        let what = format!("the answers for the other leases while record {blocked} is blocked, turn {turn}");
        match case.soon(either, &what).await {
            Some(renewed) => {
                assert!(all_others(), "the call ended ({renewed:?}) without answers for the other leases: {answers:?}");
            }
            // The renewal call itself must end, too.
            None => drop(case.soon(renew, "a renewal of a blocked record").await),
        }
        assert_eq!(lock(&answers)[blocked], None, "the blocked record has no answer");
        // Once the record is not blocked any more, its lease can be renewed.
        drop(holding);
        let freed = async {
            while renew_all(case.store(), std::slice::from_ref(&batch[blocked])).await.ok()
                != Some(vec![Verdict::Applied])
            {
                case.sleep(SHORT).await;
            }
        };
        case.soon(freed, "a renewal of a record that is no longer blocked").await;
    }
}

pub(super) async fn no_renewals(case: &Case) {
    for _ in 0..2 {
        let answer = |at, write| panic!("an empty batch is answered {write:?} for lease {at}");
        case.ask(case.store().renew(&[], &answer), "renew nothing").await;
    }
}

pub(super) async fn many_renewals(case: &Case) {
    const LEASES: usize = 2_000;
    const TASKS: usize = 8;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let store = Arc::clone(case.store());
        let name = |n| case.key(&format!("{task}:{n}"));
        let requests: Vec<_> = (0..LEASES / TASKS).map(|n| case.request(&name(n))).collect();
        tasks.spawn(async move {
            let mut leases = Vec::new();
            for request in requests {
                match store.reserve(&request).await {
                    Ok(Reservation::Granted { lease, .. }) => leases.push(lease),
                    other => panic!("a key that was never used: {other:?}"),
                }
            }
            leases
        });
    }
    let mut leases = tasks.join_all().await.concat();
    // Every hundredth lease names a key that was never reserved.
    let is_lost = |at: usize| at % 100 == 99;
    for (at, lease) in leases.iter_mut().enumerate().filter(|(at, _)| is_lost(*at)) {
        lease.key = case.key(&format!("absent:{at}"));
    }
    case.sleep(PAUSE).await;
    let earliest = case.now();
    let answers = case.ask(StoreFuture::new(renew_all(case.store(), &leases)), "renew 2 000 leases").await;
    let expected = |at| if is_lost(at) { Verdict::Refused } else { Verdict::Applied };
    assert_eq!(answers, (0..LEASES).map(expected).collect::<Vec<_>>(), "an answer for each lease, in order");
    for at in [0, LEASES / 2, LEASES - 2] {
        let lapses_in = case.recorded(&leases[at].key).await.lapses_in.expect("a pending record has a lease");
        case.has_left(lapses_in, LONG, earliest, "a lease after a renewal of many");
    }
}

pub(super) async fn finish_is_the_owners(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let other = forged(&lease, &case.request(&key));
    case.changes_nothing(&key, case.finish(&other, &completed("2")), "a finish by another owner").await;
    let failed = Finish::Failed(stored("2"));
    case.changes_nothing(&key, case.finish(&other, &failed), "a failure by another owner").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the owner can finish");
    case.changes_nothing(&key, case.finish(&other, &completed("2")), "a second finish by another owner").await;
}

pub(super) async fn finish_repeated(case: &Case) {
    for (name, finish) in [("completed", completed("1")), ("failed", Finish::Failed(stored("1")))] {
        let key = case.key(name);
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        for _ in 0..4 {
            assert_eq!(
                case.finish(&lease, &finish).await,
                Verdict::Applied,
                "{name}: repeated with the same owner token"
            );
            assert_eq!(case.recorded(&key).await.record, Record::after(&lease, finish.state()), "{name}");
        }
    }
}

pub(super) async fn finish_is_final(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    let before = case.recorded(&key).await;
    case.sleep(PAUSE).await;
    let record = Record::after(&lease, completed("1").state());
    for other in [completed("2"), Finish::Failed(stored("1")), Finish::Completed(StoredResult::Unencodable)] {
        // The store may answer `Applied` or `Refused`. The operation has finished, and no other result may become
        // visible.
        let _either = case.finish(&lease, &other).await;
        let after = case.recorded(&key).await;
        assert_eq!(after.record, record, "a finished record was changed to {other:?}");
        let put_off = after.expires_in + PAUSE > before.expires_in + TOLERANCE;
        assert!(!put_off, "a repeated finish extended the retention: {before:?}, then {after:?}");
    }
    case.is_answered(&case.request(&key), Reservation::finished(record), "the result that was recorded first").await;
}

pub(super) async fn landed_finish_is_recognised(case: &Case) {
    for (name, finish) in [("completed", completed("1")), ("failed", Finish::Failed(stored("1")))] {
        let key = case.key(name);
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
        let record = Record::after(&lease, finish.state());
        // The test acts like an engine that got no answer to its `finish`: the heartbeat still renews, and the `finish`
        // is repeated, in the end without its result.
        let without = |payload: StoredResult| match &finish {
            Finish::Completed(_) => Finish::Completed(payload),
            Finish::Failed(_) => Finish::Failed(payload),
        };
        let others = [without(StoredResult::TooLarge { size: 1 }), without(StoredResult::Unencodable)];
        for repeated in [&finish, &others[0], &others[1], &finish] {
            assert_eq!(case.renew(&lease).await, Verdict::Refused, "{name}: an attempt that has ended has no lease");
            let answer = case.finish(&lease, repeated).await;
            assert_eq!(answer, Verdict::Applied, "{name}: {repeated:?} by the attempt whose finish has taken effect");
            assert_eq!(case.recorded(&key).await.record, record, "{name}: the first finish stays recorded");
        }
    }
}

pub(super) async fn finish_after_lapse(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the lapsed lease was not taken over");
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_answered(&case.request(&key), finished, "completed after the lapse").await;
}

pub(super) async fn finish_after_takeover(case: &Case) {
    let key = case.key("");
    let late = case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let lease = case.takes_over(&case.request(&key), 2, "a lapsed lease").await;
    case.changes_nothing(&key, case.finish(&late, &completed("late")), "a late completion").await;
    let failed = Finish::Failed(stored("late"));
    case.changes_nothing(&key, case.finish(&late, &failed), "a late failure").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the successor can finish");
    case.changes_nothing(&key, case.finish(&late, &completed("late")), "a completion after the successor's").await;
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_answered(&case.request(&key), finished, "the successor's result").await;
}

pub(super) async fn finish_after_release(case: &Case) {
    for release in [Release::Returned, Release::NotStarted] {
        let key = case.key(&format!("{release:?}"));
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        assert_eq!(case.release(&lease, release).await, Verdict::Applied);
        case.changes_nothing(&key, case.finish(&lease, &completed("1")), "a finish after the release").await;
        let next = case.reserved(&case.request(&key), 2, "a released key").await;
        case.changes_nothing(&key, case.finish(&lease, &completed("1")), "a finish after the next reservation").await;
        assert_eq!(case.finish(&next, &completed("2")).await, Verdict::Applied, "the successor can finish");
    }
}

pub(super) async fn finish_names_its_attempt(case: &Case) {
    let key = case.key("");
    let request = case.short(&key);
    let old = case.reserved(&request, 1, "a key that was never used").await;
    case.lapse().await;
    let between = case.takes_over(&case.request(&key), 2, "a lapsed lease").await;
    assert_eq!(case.release(&between, Release::Returned).await, Verdict::Applied);
    // The first request arrives again, long after its answer. The repeated request gets an attempt that no caller runs.
    let again = ReserveRequest { lease: LONG, ..request };
    let lease = case.reserved(&again, 3, "the first request once more, on a released key").await;
    for finish in [completed("1"), Finish::Failed(stored("1"))] {
        case.changes_nothing(&key, case.finish(&old, &finish), "a finish of the owner's first attempt").await;
    }
    // Eight concurrent finishes: a store that batches concurrent requests handles them in another code path than a
    // single request.
    let (store, late) = (case.store(), completed("1"));
    let mut together: Vec<_> = (0..8).map(|_| store.finish(&old, &late)).collect();
    for answer in case.soon(all(&mut together), "eight concurrent finishes").await {
        assert_eq!(answer.expect("an answer"), Verdict::Refused, "one of eight finishes of the owner's first attempt");
    }
    case.changes_nothing(&key, case.renew(&old), "a renewal of the owner's first attempt").await;
    let both = [old.clone(), lease.clone()];
    let answers = case.ask(StoreFuture::new(renew_all(case.store(), &both)), "renew two attempts of one owner").await;
    assert_eq!(answers, [Verdict::Refused, Verdict::Applied], "the answers for {both:?}");
    case.waits_for(&case.request(&key), 3, "the owner's latest attempt").await;
    assert_eq!(case.finish(&lease, &completed("3")).await, Verdict::Applied, "the latest attempt can finish");
    case.changes_nothing(&key, case.finish(&old, &completed("1")), "a finish after the finish of the latest attempt")
        .await;
    let finished = Reservation::finished(Record::after(&lease, completed("3").state()));
    case.is_answered(&case.request(&key), finished, "the result of the latest attempt").await;
}

pub(super) async fn finish_of_nothing(case: &Case) {
    let request = case.request(&case.key(""));
    let never = Record::first(&request).lease(&request);
    assert_eq!(case.finish(&never, &completed("1")).await, Verdict::Refused, "there is no record");
    assert_eq!(case.inspect(&request.key).await, None, "a refused finish makes no record");
}

pub(super) async fn release_is_the_owners(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let other = forged(&lease, &case.request(&key));
    for release in [Release::Returned, Release::NotStarted, Release::Interrupted] {
        case.changes_nothing(&key, case.release(&other, release), "a release by another owner").await;
    }
    case.waits_for(&case.request(&key), 1, "the owner's lease").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the owner can finish");
    case.changes_nothing(&key, case.release(&other, Release::Returned), "a release of another owner's result").await;
}

pub(super) async fn release_repeated(case: &Case) {
    for (release, starts) in [(Release::Returned, 2), (Release::NotStarted, 1), (Release::Interrupted, 2)] {
        let key = case.key(&format!("{release:?}"));
        let first = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        assert_eq!(case.release(&first, Release::Returned).await, Verdict::Applied);
        let lease = case.reserved(&case.request(&key), 2, "a released key").await;
        let expected = Record { attempts_used: starts, ..Record::after(&lease, release.state()) };
        for _ in 0..4 {
            assert_eq!(
                case.release(&lease, release).await,
                Verdict::Applied,
                "{release:?}: repeated with the same owner token"
            );
            assert_eq!(case.recorded(&key).await.record, expected, "{release:?}: the record after the release");
        }
    }
}

pub(super) async fn release_after_takeover(case: &Case) {
    let key = case.key("");
    let late = case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let lease = case.takes_over(&case.request(&key), 2, "a lapsed lease").await;
    for release in [Release::Returned, Release::NotStarted, Release::Interrupted] {
        case.changes_nothing(&key, case.release(&late, release), "a late release").await;
    }
    case.waits_for(&case.request(&key), 2, "the successor's lease").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the successor can finish");
    case.changes_nothing(&key, case.release(&late, Release::Returned), "a release after the successor's finish").await;
}

pub(super) async fn release_after_finish(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    for release in [Release::Returned, Release::NotStarted, Release::Interrupted] {
        case.changes_nothing(&key, case.release(&lease, release), "a release after the finish").await;
    }
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_answered(&case.request(&key), finished, "a result after a refused release").await;
}

pub(super) async fn release_of_nothing(case: &Case) {
    let request = case.request(&case.key(""));
    let never = Record::first(&request).lease(&request);
    for release in [Release::Returned, Release::NotStarted, Release::Interrupted] {
        assert_eq!(case.release(&never, release).await, Verdict::Refused, "there is no record");
        assert_eq!(case.inspect(&request.key).await, None, "a refused release makes no record");
    }
}

pub(super) async fn release_among_refused_ones(case: &Case) {
    const TASKS: usize = 8;
    const ROUNDS: usize = 40;
    // Two tasks share a key, so that one reserves the key as soon as the other has released it.
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (key, absent) = (case.key(&(task / 2).to_string()), case.key(&format!("absent:{task}")));
        let requests: Vec<_> = (0..ROUNDS).map(|_| case.request(&key)).collect();
        let lost = Lease::new(&case.request(&absent), 1);
        let store = Arc::clone(case.store());
        tasks.spawn(async move {
            for request in requests {
                let answer = store.reserve(&request).await.unwrap_or_else(|error| panic!("reserve: {}", chain(&error)));
                let Reservation::Granted { lease, .. } = answer else {
                    tokio::task::yield_now().await;
                    continue;
                };
                let mut releases = [&lost, &lease].map(|lease| store.release(lease, Release::Returned));
                for (released, expected) in
                    all(&mut releases).await.into_iter().zip([Verdict::Refused, Verdict::Applied])
                {
                    assert_eq!(released.unwrap_or_else(|error| panic!("release: {}", chain(&error))), expected);
                }
            }
        });
    }
    case.soon(tasks.join_all(), "tasks that reserve and release").await;
}

pub(super) async fn release_ignores_the_number(case: &Case) {
    let key = case.key("");
    let first = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    assert_eq!(case.release(&first, Release::Returned).await, Verdict::Applied);
    // The answer to this reservation was lost, so its caller does not know that its attempt is the second one, and
    // assumes 1.
    let request = case.request(&key);
    let second = case.reserved(&request, 2, "a released key").await;
    let unanswered = Record::first(&request).lease(&request);
    assert_eq!(case.release(&unanswered, Release::NotStarted).await, Verdict::Applied, "the owner token matches");
    let expected = Record { attempts_used: 1, ..Record::after(&second, State::Released) };
    assert_eq!(case.recorded(&key).await.record, expected, "the record keeps its own attempt number");
    case.reserved(&case.request(&key), 3, "a released key").await;
}
