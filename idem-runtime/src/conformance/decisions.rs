//! What operators decide besides reopening: results, leases and records.

use super::{Case, LONG, PAUSE, TOLERANCE, abandon, completed, limited, marked, stored};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::{
    Action, Decided, Decision, Finish, Lease, Record, Release, Reservation, ReserveRequest, State, StoredResult,
    Verdict,
};

/// How many polls after which a call is dropped.
const POLLS: [usize; 4] = [0, 1, 2, 5];

/// One of each action.
pub(super) fn actions() -> [Action; 4] {
    [Action::Reopen, Action::Resolve(completed("decided")), Action::BreakLease, Action::Forget]
}

impl Case {
    async fn first(&self, key: &Key, on_crash: OnCrash) -> Lease {
        let request = marked(ReserveRequest { on_crash, ..self.request(key) }, 1);
        self.reserved(&request, 1, "a key that was never used").await
    }

    async fn resolve(&self, key: &Key, attempt: u32, finish: &Finish) -> Decided {
        self.decide(&Decision::resolve(key, attempt, finish.clone())).await
    }

    /// A key whose first attempt has ended, or died, in each way without a result.
    async fn unfinished(&self) -> Vec<(Key, Lease, &'static str)> {
        let keys = ["interrupted", "released", "lapsed", "lapsed under `fail`"].map(|how| (self.key(how), how));
        let mut leases = Vec::new();
        for (key, how) in keys {
            let on_crash = if how == "lapsed under `fail`" { OnCrash::Fail } else { OnCrash::Retry };
            let request = if how.starts_with("lapsed") { self.short(&key) } else { self.request(&key) };
            let request = marked(ReserveRequest { on_crash, ..request }, 1);
            let lease = self.reserved(&request, 1, "a key that was never used").await;
            let end = match how {
                "interrupted" => Some(Release::Interrupted),
                "released" => Some(Release::Returned),
                _ => None,
            };
            if let Some(end) = end {
                assert_eq!(self.release(&lease, end).await, Verdict::Applied);
            }
            leases.push((key, lease, how));
        }
        self.lapse().await;
        leases
    }
}

pub(super) async fn refusals_say_why(case: &Case) {
    let absent = case.key("absent");
    for action in actions() {
        for attempt in [0, 1] {
            let decided = case.decide(&Decision::new(&absent, attempt, action.clone())).await;
            assert_eq!(decided, Decided::NoRecord, "`{}` of a key without a record", action.name());
        }
        assert_eq!(case.inspect(&absent).await, None, "a refused `{}` makes no record", action.name());
    }

    let key = case.key("");
    let lease = case.first(&key, OnCrash::Retry).await;
    for action in actions() {
        for attempt in [0, 2] {
            let decision = Decision::new(&key, attempt, action.clone());
            let told = case.decide(&decision).await;
            let why = format!("`{}` of attempt {attempt}, while attempt 1 runs", action.name());
            assert_eq!(told, Decided::OtherAttempt { latest: 1 }, "{why}");
            case.changes_nothing(&key, case.decide(&decision), &why).await;
        }
        if action == Action::BreakLease {
            continue;
        }
        let decision = Decision::new(&key, 1, action.clone());
        let why = format!("`{}` of a live lease", action.name());
        match case.decide(&decision).await {
            Decided::LiveLease { lapses_in } => {
                assert!(!lapses_in.is_zero() && lapses_in <= LONG + TOLERANCE, "{why}: it lapses in {lapses_in:?}");
            }
            other => panic!("{why}: should be refused for that, was answered {other:?}"),
        }
        case.changes_nothing(&key, case.decide(&decision), &why).await;
    }
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the owner can finish");
    for attempt in [0, 2] {
        for action in actions() {
            let told = case.decide(&Decision::new(&key, attempt, action.clone())).await;
            assert_eq!(told, Decided::OtherAttempt { latest: 1 }, "`{}` of attempt {attempt}", action.name());
        }
    }
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_told(&case.request(&key), finished, "a record that refused every decision").await;
}

pub(super) async fn resolve_ends_it(case: &Case) {
    let nothing = Finish::Completed(StoredResult::Unencodable);
    for finish in [completed("1"), Finish::Failed(stored("1")), nothing] {
        for (key, lease, how) in case.unfinished().await {
            let why = format!("{how}, then resolved");
            let before = case.recorded(&key).await.record;
            assert_eq!(case.resolve(&key, 1, &finish).await, Decided::Applied, "{why}");
            let record = case.recorded(&key).await.record;
            let expected = Record { owner: record.owner, state: finish.state(), ..before };
            assert_eq!(record, expected, "{why}: the record afterwards");
            assert_eq!(case.resolve(&key, 1, &finish).await, Decided::Applied, "{why}, and again");
            assert_eq!(case.recorded(&key).await.record, record, "{why}, and again: the record afterwards");
            let fail = ReserveRequest { on_crash: OnCrash::Fail, ..limited(case.request(&key), 1) };
            for request in [&case.request(&key), &fail] {
                case.is_told(request, Reservation::finished(record.clone()), &why).await;
            }
            let other = marked(case.request(&key), 2);
            case.is_told(&other, Reservation::FingerprintMismatch { attempt: 1 }, &why).await;
            drop(lease);
            assert_eq!(case.decide(&Decision::forget(&key, 1)).await, Decided::Applied, "for the next round");
        }
    }
}

pub(super) async fn resolve_spares_results(case: &Case) {
    for (name, finish) in [("completed", completed("1")), ("failed", Finish::Failed(stored("1")))] {
        let key = case.key(name);
        let lease = case.first(&key, OnCrash::Retry).await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
        let other = if name == "failed" { completed("1") } else { Finish::Failed(stored("1")) };
        for other in [completed("2"), other, Finish::Completed(StoredResult::Unencodable)] {
            let decision = Decision::resolve(&key, 1, other);
            assert_eq!(case.decide(&decision).await, Decided::Finished, "another result for what has {name}");
            case.changes_nothing(&key, case.decide(&decision), "another result").await;
        }
        assert_eq!(case.resolve(&key, 1, &finish).await, Decided::Applied, "the same result");
        case.is_told(&case.request(&key), Reservation::finished(Record::after(&lease, finish.state())), name).await;
    }
}

pub(super) async fn resolve_supplies_a_missing_result(case: &Case) {
    for (name, missing) in [("large", StoredResult::TooLarge { size: 7 }), ("unencodable", StoredResult::Unencodable)] {
        let key = case.key(name);
        let lease = case.first(&key, OnCrash::Retry).await;
        assert_eq!(case.finish(&lease, &Finish::Completed(missing)).await, Verdict::Applied);
        let failed = Decision::resolve(&key, 1, Finish::Failed(stored("1")));
        assert_eq!(case.decide(&failed).await, Decided::Finished, "a failure for what has completed");
        for _ in 0..2 {
            assert_eq!(case.resolve(&key, 1, &completed("1")).await, Decided::Applied, "{name}");
        }
        let record = case.recorded(&key).await.record;
        assert_eq!(record.state, completed("1").state(), "{name}");
        case.is_told(&case.request(&key), Reservation::finished(record), name).await;
        assert_eq!(case.resolve(&key, 1, &completed("2")).await, Decided::Finished, "{name}: another one");
    }
}

pub(super) async fn resolve_fences(case: &Case) {
    for (key, late, how) in case.unfinished().await {
        assert_eq!(case.resolve(&key, 1, &completed("decided")).await, Decided::Applied, "{how}");
        let why = format!("{how}, then resolved");
        case.changes_nothing(&key, case.renew(&late), &format!("{why}: a renewal by the attempt")).await;
        for finish in [completed("late"), completed("decided"), Finish::Failed(stored("late"))] {
            case.changes_nothing(&key, case.finish(&late, &finish), &format!("{why}: a finish by the attempt")).await;
        }
        case.changes_nothing(&key, case.release(&late, Release::Returned), &format!("{why}: a release")).await;
    }
}

pub(super) async fn decisions_keep_retention(case: &Case) {
    let earliest = case.now();
    for name in ["resolve", "break_lease"] {
        let key = case.key(name);
        let lease = case.first(&key, OnCrash::Retry).await;
        let action = match name {
            "resolve" => {
                assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
                Action::Resolve(completed("1"))
            }
            _ => Action::BreakLease,
        };
        let before = case.recorded(&key).await.expires_in;
        case.sleep(PAUSE).await;
        assert_eq!(case.decide(&Decision::new(&key, 1, action)).await, Decided::Applied);
        let after = case.recorded(&key).await.expires_in;
        case.has_left(after, before, earliest, &format!("the retention after `{name}`"));
        assert!(after + PAUSE <= before + TOLERANCE, "`{name}` extended the retention: {before:?}, then {after:?}");
    }
}

/// Breaks the live lease of attempt 1, and checks the record and that its owner can't write any more.
async fn breaks(case: &Case, key: &Key, lease: &Lease, state: State) {
    let before = case.recorded(key).await.record;
    for _ in 0..2 {
        assert_eq!(case.decide(&Decision::break_lease(key, 1)).await, Decided::Applied, "a live lease");
        let after = case.recorded(key).await;
        let expected = Record { state: state.clone(), owner: after.record.owner, ..before.clone() };
        assert_eq!((after.record, after.lapses_in), (expected, None), "a record whose lease was broken");
    }
    case.changes_nothing(key, case.renew(lease), "a renewal of a lease that was broken").await;
    case.changes_nothing(key, case.finish(lease, &completed("late")), "a finish under a lease that was broken").await;
}

pub(super) async fn break_lease_frees(case: &Case) {
    let key = case.key("");
    let lease = case.first(&key, OnCrash::Retry).await;
    breaks(case, &key, &lease, State::Released).await;
    let exhausted = Reservation::AttemptsExhausted { attempts: 1 };
    case.is_told(&limited(case.request(&key), 1), exhausted, "an attempt whose lease was broken counts").await;
    let second = case.reserved(&case.request(&key), 2, "a key whose lease was broken").await;
    let told = case.decide(&Decision::break_lease(&key, 1)).await;
    assert_eq!(told, Decided::OtherAttempt { latest: 2 }, "repeated, once the next attempt runs");
    assert_eq!(case.finish(&second, &completed("2")).await, Verdict::Applied);
    let told = case.decide(&Decision::break_lease(&key, 2)).await;
    assert_eq!(told, Decided::Finished, "an attempt that has finished holds no lease");
    let finished = Reservation::finished(Record::after(&second, completed("2").state()));
    case.is_told(&case.request(&key), finished, "the successor's result").await;
}

pub(super) async fn break_lease_under_fail(case: &Case) {
    let key = case.key("");
    let lease = case.first(&key, OnCrash::Fail).await;
    breaks(case, &key, &lease, State::Interrupted).await;
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        let request = ReserveRequest { on_crash, ..case.request(&key) };
        case.is_told(&request, Reservation::Interrupted { attempt: 1 }, "a lease under `fail` that was broken").await;
    }
    assert_eq!(case.resolve(&key, 1, &completed("1")).await, Decided::Applied, "what was broken can be resolved");
}

pub(super) async fn forget_erases(case: &Case) {
    for (key, late, how) in case.unfinished().await {
        assert_eq!(case.decide(&Decision::forget(&key, 1)).await, Decided::Applied, "{how}");
        assert_eq!(case.inspect(&key).await, None, "{how}, then forgotten: the record is still there");
        assert_eq!(case.decide(&Decision::forget(&key, 1)).await, Decided::NoRecord, "{how}, forgotten twice");
        assert_eq!(case.finish(&late, &completed("late")).await, Verdict::Refused, "{how}, then forgotten");
        assert_eq!(case.renew(&late).await, Verdict::Refused, "{how}, then forgotten");
        let request = marked(limited(case.request(&key), 1), 2);
        let lease = case.reserved(&request, 1, "a key that was forgotten").await;
        assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
        assert_eq!(case.decide(&Decision::forget(&key, 1)).await, Decided::Applied, "a finished record");
        assert_eq!(case.inspect(&key).await, None, "a finished record that was forgotten");
    }
}

pub(super) async fn dropped_decisions(case: &Case) {
    for polls in POLLS {
        for action in actions() {
            let key = case.key(&format!("{polls} {}", action.name()));
            case.first(&key, OnCrash::Fail).await;
            if action != Action::BreakLease {
                assert_eq!(case.decide(&Decision::break_lease(&key, 1)).await, Decided::Applied);
            }
            let before = case.recorded(&key).await.record;
            let decision = Decision::new(&key, 1, action.clone());
            abandon(case, case.store().decide(&decision), polls).await;
            let why = format!("`{}`, dropped after {polls} polls", action.name());
            let between = case.inspect(&key).await.map(|found| found.record);
            let repeated = case.decide(&decision).await;
            if action == Action::Forget {
                assert!(between.is_none() || between == Some(before), "{why}, half done: {between:?}");
                assert!(matches!(repeated, Decided::Applied | Decided::NoRecord), "{why}, repeated: {repeated:?}");
                assert_eq!(case.inspect(&key).await, None, "{why}, then repeated");
                continue;
            }
            assert_eq!(repeated, Decided::Applied, "{why}, then repeated");
            let after = case.recorded(&key).await.record;
            let is_either = between.as_ref() == Some(&before) || between.as_ref() == Some(&after);
            assert!(is_either, "{why}, half done: {between:?}");
        }
    }
}
