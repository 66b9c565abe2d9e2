//! Clauses of the store contract about waiting: the end of an attempt wakes its waiting duplicates, and no wait hangs.

use std::sync::Arc;
use std::time::Duration;

use super::case::{Case, LONG, SHORT, abandon, chain, completed, marked, stored};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::{Action, DecisionAnswer, Finish, Lease, Release, ReserveRequest, State, Verdict};

/// Time in which a waiter certainly registers with its server.
const SETTLED: Duration = Duration::from_millis(100);

/// Waits for attempt `attempt` on both handles, runs `end`, and checks that all waits return.
async fn wakes(case: &Case, key: &Key, attempt: u32, waiters: usize, end: impl Future<Output = ()>, what: &str) {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..waiters {
        let (store, key) = (Arc::clone(case.store()), key.clone());
        tasks.spawn(async move {
            // A wait may return early, so the caller waits again, as often as necessary.
            loop {
                let waited = store.wait(&key, attempt, LONG).await;
                waited.unwrap_or_else(|error| panic!("wait: {}", chain(&error)));
                let found = store.inspect(&key).await.unwrap_or_else(|error| panic!("inspect: {}", chain(&error)));
                let Some(record) = found.map(|found| found.record) else { return };
                if record.attempt != attempt || !matches!(record.state, State::Pending { .. }) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        });
    }
    case.sleep(SETTLED).await;
    end.await;
    case.soon(tasks.join_all(), what).await;
}

async fn first(case: &Case, request: ReserveRequest) -> Lease {
    case.reserved(&request, 1, "a key that was never used").await
}

pub(super) async fn finish_wakes(case: &Case) {
    let lease = first(case, case.request(&case.key(""))).await;
    let end = async { assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied) };
    wakes(case, &lease.key, 1, 2, end, "waiters after a finish").await;
}

pub(super) async fn release_wakes(case: &Case) {
    for release in [Release::Returned, Release::NotStarted, Release::Interrupted] {
        let lease = first(case, case.request(&case.key(&format!("{release:?}")))).await;
        let end = async { assert_eq!(case.release(&lease, release).await, Verdict::Applied) };
        wakes(case, &lease.key, 1, 2, end, &format!("waiters after a release ({release:?})")).await;
    }
}

pub(super) async fn takeover_wakes(case: &Case) {
    let key = case.key("");
    first(case, case.short(&key)).await;
    case.lapse().await;
    let end = async {
        case.takes_over(&case.request(&key), 2, "a lapsed lease").await;
    };
    wakes(case, &key, 1, 2, end, "waiters after a takeover").await;
}

pub(super) async fn reopen_wakes(case: &Case) {
    let key = case.key("");
    first(case, ReserveRequest { on_crash: OnCrash::Fail, ..case.short(&key) }).await;
    case.lapse().await;
    let end = async { assert_eq!(case.reopen(&key, 1).await, Verdict::Applied) };
    wakes(case, &key, 1, 2, end, "waiters after a `reopen`").await;
}

pub(super) async fn decisions_wake(case: &Case) {
    for action in super::decisions::actions() {
        let key = case.key(action.name());
        let is_live = action == Action::BreakLease;
        first(case, if is_live { case.request(&key) } else { case.short(&key) }).await;
        if !is_live {
            case.lapse().await;
        }
        let why = format!("waiters after a `{}`", action.name());
        let decision = case.decision(&key, 1, action).await;
        let end = async { assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied) };
        wakes(case, &key, 1, 2, end, &why).await;
    }
}

pub(super) async fn all_waiters_wake(case: &Case) {
    let key = case.key("");
    let lease = first(case, case.request(&key)).await;
    let end = async { assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied) };
    wakes(case, &key, 1, 32, end, "32 waiters after a release").await;
    // The next attempt has other waiters, which must be woken too.
    let lease = case.reserved(&case.request(&key), 2, "a released key").await;
    let end = async { assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied) };
    wakes(case, &key, 2, 32, end, "32 waiters after a finish").await;
}

pub(super) async fn nothing_to_wait_for(case: &Case) {
    let returns = async |key: &Key, attempt: u32, why: &str| {
        for _ in 0..2 {
            case.ask(case.store().wait(key, attempt, LONG), &format!("wait: {why}")).await;
        }
    };
    let key = case.key("absent");
    returns(&key, 1, "there is no record").await;
    returns(&key, 0, "there is no record").await;
    assert_eq!(case.inspect(&key).await, None, "a wait makes no record");

    let lease = first(case, case.request(&case.key("pending"))).await;
    returns(&lease.key, 0, "an earlier attempt").await;
    returns(&lease.key, 2, "a later attempt").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    returns(&lease.key, 1, "a finished record").await;

    for release in [Release::Returned, Release::Interrupted] {
        let lease = first(case, case.request(&case.key(&format!("{release:?}")))).await;
        assert_eq!(case.release(&lease, release).await, Verdict::Applied);
        returns(&lease.key, 1, "a released record").await;
    }
}

pub(super) async fn wait_is_bounded(case: &Case) {
    let lease = first(case, case.request(&case.key(""))).await;
    for at_most in [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(1), SHORT] {
        for _ in 0..2 {
            case.ask(case.store().wait(&lease.key, 1, at_most), &format!("wait for at most {at_most:?}")).await;
        }
    }
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
}

pub(super) async fn wait_tells_the_present(case: &Case) {
    // Waits twice: if the first wait returns no record, the second wait uses the other handle, which has no memory of
    // the first handle's writes.
    let shows = async |key: &Key, attempt: u32, why: &str| {
        for _ in 0..2 {
            let told = case.ask(case.store().wait(key, attempt, LONG), &format!("wait: {why}")).await;
            if let Some(told) = told {
                let shown = case.recorded(key).await;
                assert_eq!(told.record, shown.record, "{why}: the wait returned another record than `inspect`");
                assert!(!told.expires_in.is_zero(), "{why}: the wait returned an expired record");
                assert_eq!(
                    told.standing(),
                    shown.standing(),
                    "{why}: the wait returned another standing than `inspect`"
                );
            }
        }
    };
    for finish in [completed("1"), Finish::Failed(stored("2"))] {
        let key = case.key(finish.state().name());
        let lease = first(case, marked(case.request(&key), 1)).await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
        shows(&key, 1, "a finished record").await;
        assert_eq!(case.reopen(&key, 1).await, Verdict::Applied);
        shows(&key, 1, "a reopened record").await;
        case.reserved(&marked(case.request(&key), 1), 2, "a reopened key").await;
        shows(&key, 1, "the attempt after a reopened one").await;
        assert_eq!(case.decides(&key, 2, Action::BreakLease).await, DecisionAnswer::Applied);
        shows(&key, 2, "a lease that was broken").await;
        assert_eq!(case.decides(&key, 2, Action::Forget).await, DecisionAnswer::Applied);
        let told = case.ask(case.store().wait(&key, 2, LONG), "wait").await;
        assert_eq!(told, None, "the record was removed");
    }
    let key = case.key("expired");
    let lease = first(case, ReserveRequest { ttl: SHORT, ..case.request(&key) }).await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    case.ask(case.store().wait(&key, 1, LONG), "wait").await;
    case.lapse().await;
    let told = case.ask(case.store().wait(&key, 1, LONG), "wait").await;
    assert_eq!(told, None, "the record has expired");
}

pub(super) async fn abandoned_wait(case: &Case) {
    let key = case.key("");
    let lease = first(case, case.request(&key)).await;
    let before = case.recorded(&key).await.record;
    // Some waiters time out, some are dropped, and the remaining ones keep waiting.
    let end = async {
        for polls in 0..4 {
            abandon(case, case.store().wait(&key, 1, LONG), polls).await;
            case.ask(case.store().wait(&key, 1, SHORT), "wait").await;
        }
        assert_eq!(case.recorded(&key).await.record, before, "a waiter that gives up changes nothing");
        case.waits_for(&case.request(&key), 1, "the lease of the attempt that was waited for").await;
        assert_eq!(case.renew(&lease).await, Verdict::Applied, "the owner still holds its lease");
        assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the owner can finish");
    };
    wakes(case, &key, 1, 2, end, "waiters next to waiters that gave up").await;
}
