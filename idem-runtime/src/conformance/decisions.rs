//! Clauses of the store contract about decisions of operators on results, leases and records.

use std::sync::Arc;

use super::case::{Case, LONG, PAUSE, TOLERANCE, abandon, completed, limited, marked, stored};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::standing::Standing;
use crate::record::{
    Action, Decision, DecisionAnswer, Finish, Journal, Lease, Record, Release, Reservation, ReserveRequest, Revision,
    State, StoredResult, Verdict,
};

/// Numbers of polls after which tests drop a call.
const POLLS: [usize; 4] = [0, 1, 2, 5];

/// Returns an example of each action on a record without a result.
pub(super) fn actions() -> [Action; 5] {
    let steps = Journal::new("steps");
    [
        Action::Reopen,
        Action::ReopenWith(steps),
        Action::Resolve(completed("decided")),
        Action::BreakLease,
        Action::Forget,
    ]
}

/// Returns an example of each action on a record with a result.
pub(super) fn corrections() -> [Action; 3] {
    [Action::Discard, Action::Replace(Finish::Failed(stored("decided"))), Action::Forget]
}

impl Case {
    async fn first(&self, key: &Key, on_crash: OnCrash) -> Lease {
        let request = marked(ReserveRequest { on_crash, ..self.request(key) }, 1);
        self.reserved(&request, 1, "a key that was never used").await
    }

    async fn resolve(&self, key: &Key, attempt: u32, finish: &Finish) -> DecisionAnswer {
        self.decides(key, attempt, Action::Resolve(finish.clone())).await
    }

    /// Returns a key whose first attempt has completed with the result `1`, and the lease of that attempt.
    async fn completed(&self, name: &str) -> (Key, Lease) {
        let key = self.key(name);
        let lease = self.first(&key, OnCrash::Retry).await;
        assert_eq!(self.finish(&lease, &completed("1")).await, Verdict::Applied);
        (key, lease)
    }

    /// Returns four keys whose first attempt has no result: interrupted, released, lapsed, and lapsed under
    /// `on_crash = fail`.
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

pub(super) async fn refusals_name_their_reason(case: &Case) {
    // A decision about an absent record is refused, and creates no record.
    let absent = case.key("absent");
    for action in actions() {
        for attempt in [0, 1] {
            let decided = case.decides(&absent, attempt, action.clone()).await;
            assert_eq!(decided, DecisionAnswer::NoRecord, "`{}` of a key without a record", action.name());
        }
        assert_eq!(case.inspect(&absent).await, None, "a refused `{}` makes no record", action.name());
    }

    // While attempt 1 runs, a decision about another attempt is refused, and so is every decision except `break_lease`.
    let key = case.key("");
    let lease = case.first(&key, OnCrash::Retry).await;
    for action in actions() {
        for attempt in [0, 2] {
            let decision = case.decision(&key, attempt, action.clone()).await;
            let told = case.decide(&decision).await;
            let why = format!("`{}` of attempt {attempt}, while attempt 1 runs", action.name());
            assert_eq!(told, DecisionAnswer::OtherAttempt { latest: 1 }, "{why}");
            case.changes_nothing(&key, case.decide(&decision), &why).await;
        }
        if action == Action::BreakLease {
            continue;
        }
        let decision = case.decision(&key, 1, action.clone()).await;
        let why = format!("`{}` of a live lease", action.name());
        match case.decide(&decision).await {
            DecisionAnswer::LiveLease { lapses_in } => {
                assert!(!lapses_in.is_zero() && lapses_in <= LONG + TOLERANCE, "{why}: it lapses in {lapses_in:?}");
            }
            other => panic!("{why}: should be refused because of the live lease, was answered {other:?}"),
        }
        case.changes_nothing(&key, case.decide(&decision), &why).await;
    }
    // A finished record also refuses decisions about other attempts, and keeps its result.
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the owner can finish");
    for attempt in [0, 2] {
        for action in actions() {
            let told = case.decides(&key, attempt, action.clone()).await;
            assert_eq!(told, DecisionAnswer::OtherAttempt { latest: 1 }, "`{}` of attempt {attempt}", action.name());
        }
    }
    let finished = Reservation::finished(Record::after(&lease, completed("1").state()));
    case.is_answered(&case.request(&key), finished, "a record that refused every decision").await;
}

pub(super) async fn resolve_ends_it(case: &Case) {
    let nothing = Finish::Completed(StoredResult::Unencodable);
    for finish in [completed("1"), Finish::Failed(stored("1")), nothing] {
        for (key, lease, how) in case.unfinished().await {
            let why = format!("{how}, then resolved");
            let before = case.recorded(&key).await.record;
            let decision = case.decision(&key, 1, Action::Resolve(finish.clone())).await;
            assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "{why}");
            let record = case.recorded(&key).await.record;
            let expected = Record { owner: record.owner, state: finish.state(), ..before };
            assert_eq!(record, expected, "{why}: the record afterwards");
            assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "{why}, and again");
            assert_eq!(case.recorded(&key).await.record, record, "{why}, and again: the record afterwards");
            let fail = ReserveRequest { on_crash: OnCrash::Fail, ..limited(case.request(&key), 1) };
            for request in [&case.request(&key), &fail] {
                case.is_answered(request, Reservation::finished(record.clone()), &why).await;
            }
            let other = marked(case.request(&key), 2);
            case.is_answered(&other, Reservation::FingerprintMismatch { attempt: 1 }, &why).await;
            drop(lease);
            assert_eq!(case.decides(&key, 1, Action::Forget).await, DecisionAnswer::Applied, "for the next round");
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
            let decision = case.decision(&key, 1, Action::Resolve(other)).await;
            assert_eq!(
                case.decide(&decision).await,
                DecisionAnswer::Finished,
                "another result for an operation that has {name}"
            );
            case.changes_nothing(&key, case.decide(&decision), "another result").await;
        }
        assert_eq!(case.resolve(&key, 1, &finish).await, DecisionAnswer::Applied, "the same result");
        let record = case.recorded(&key).await.record;
        assert_eq!(Record { owner: lease.owner, ..record.clone() }, Record::after(&lease, finish.state()), "{name}");
        case.is_answered(&case.request(&key), Reservation::finished(record), name).await;
    }
}

pub(super) async fn resolve_supplies_a_missing_result(case: &Case) {
    for (name, missing) in [("large", StoredResult::TooLarge { size: 7 }), ("unencodable", StoredResult::Unencodable)] {
        let key = case.key(name);
        let lease = case.first(&key, OnCrash::Retry).await;
        assert_eq!(case.finish(&lease, &Finish::Completed(missing)).await, Verdict::Applied);
        let failed = Finish::Failed(stored("1"));
        assert_eq!(
            case.resolve(&key, 1, &failed).await,
            DecisionAnswer::Finished,
            "a failure for an operation that has completed"
        );
        for _ in 0..2 {
            assert_eq!(case.resolve(&key, 1, &completed("1")).await, DecisionAnswer::Applied, "{name}");
        }
        let record = case.recorded(&key).await.record;
        assert_eq!(record.state, completed("1").state(), "{name}");
        case.is_answered(&case.request(&key), Reservation::finished(record), name).await;
        assert_eq!(case.resolve(&key, 1, &completed("2")).await, DecisionAnswer::Finished, "{name}: another one");
    }
}

pub(super) async fn reopen_spares_results(case: &Case) {
    let nothing = Finish::Completed(StoredResult::Unencodable);
    for (at, finish) in [completed("1"), Finish::Failed(stored("1")), nothing].into_iter().enumerate() {
        let key = case.key(&at.to_string());
        let lease = case.first(&key, OnCrash::Retry).await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
        let decision = case.decision(&key, 1, Action::Reopen).await;
        assert_eq!(case.decide(&decision).await, DecisionAnswer::Finished, "{finish:?}");
        case.changes_nothing(&key, case.decide(&decision), "`reopen` of a finished record").await;
    }
}

pub(super) async fn discard_finished(case: &Case) {
    for (name, finish) in [("completed", completed("1")), ("failed", Finish::Failed(stored("1")))] {
        let key = case.key(name);
        let lease = case.first(&key, OnCrash::Fail).await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
        let decision = case.decision(&key, 1, Action::Discard).await;
        let before = case.recorded(&key).await.record;
        for _ in 0..2 {
            assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "{name}");
            let after = case.recorded(&key).await.record;
            let expected = Record { attempts_used: 0, state: State::Released, owner: after.owner, ..before.clone() };
            assert_eq!(after, expected, "{name}: the record afterwards");
        }
        case.changes_nothing(&key, case.finish(&lease, &finish), "the first result, presented again").await;
        let second = case.reserved(&limited(case.request(&key), 1), 2, "a key whose result was discarded").await;
        assert_eq!(second.attempts_used, 1, "{name}: no attempt counts against the limit");
    }
    for (key, _, how) in case.unfinished().await {
        let decision = case.decision(&key, 1, Action::Discard).await;
        assert_eq!(case.decide(&decision).await, DecisionAnswer::Unfinished, "{how}");
        case.changes_nothing(&key, case.decide(&decision), &format!("`discard`: {how}")).await;
    }
}

pub(super) async fn replace_corrects(case: &Case) {
    for (at, finish) in [completed("2"), Finish::Failed(stored("1")), completed("1")].into_iter().enumerate() {
        let (key, lease) = case.completed(&at.to_string()).await;
        let why = format!("a result that was replaced by {finish:?}");
        let decision = case.decision(&key, 1, Action::Replace(finish.clone())).await;
        let before = case.recorded(&key).await.record;
        for _ in 0..2 {
            assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "{why}");
            let after = case.recorded(&key).await.record;
            assert_eq!(after, Record { state: finish.state(), owner: after.owner, ..before.clone() }, "{why}");
            case.is_answered(&case.request(&key), Reservation::finished(after), &why).await;
        }
        case.changes_nothing(&key, case.finish(&lease, &completed("1")), "the first result, presented again").await;
    }
    for (key, _, how) in case.unfinished().await {
        let decision = case.decision(&key, 1, Action::Replace(completed("1"))).await;
        assert_eq!(case.decide(&decision).await, DecisionAnswer::Unfinished, "{how}");
        case.changes_nothing(&key, case.decide(&decision), &format!("`replace`: {how}")).await;
    }
}

pub(super) async fn decisions_about_one_record(case: &Case) {
    // The record is interrupted, because an interrupted record accepts every decision except corrections.
    let interrupted = async |name: &str| {
        let key = case.key(name);
        let lease = case.first(&key, OnCrash::Fail).await;
        assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
        key
    };
    let is_answered = |told: &DecisionAnswer, name: &str, why: &str| match told {
        DecisionAnswer::Changed { decided_by, .. } => assert_eq!(decided_by.as_deref(), Some(name), "{why}"),
        DecisionAnswer::NoRecord => assert_eq!(name, "forgetful", "{why}"),
        other => panic!("{why}: should be refused as changed, was answered {other:?}"),
    };
    // First case: one decision follows the other, and the later decision is refused.
    let mut rounds = 0;
    for first in actions() {
        for second in actions() {
            rounds += 1;
            let by = if first == Action::Forget { "forgetful" } else { "alice" };
            let key = interrupted(&format!("one after the other {rounds}")).await;
            let earlier = case.decision(&key, 1, first.clone()).await.by(by);
            let later = case.decision(&key, 1, second.clone()).await.by("bob");
            let why = format!("`{}`, after `{}` of the same record", second.name(), first.name());
            assert_eq!(case.decide(&earlier).await, DecisionAnswer::Applied, "{why}");
            let between = case.inspect(&key).await.map(|found| found.record);
            is_answered(&case.decide(&later).await, by, &why);
            assert_eq!(
                case.inspect(&key).await.map(|found| found.record),
                between,
                "{why}: the refused decision changed the record"
            );
        }
    }
    // Second case: one decision about a finished record follows the other.
    for first in corrections() {
        let by = if first == Action::Forget { "forgetful" } else { "alice" };
        let (key, _) = case.completed(&format!("corrected by {}", first.name())).await;
        let earlier = case.decision(&key, 1, first.clone()).await.by(by);
        let later = case.decision(&key, 1, Action::Replace(completed("2"))).await.by("bob");
        assert_eq!(case.decide(&earlier).await, DecisionAnswer::Applied);
        is_answered(&case.decide(&later).await, by, first.name());
    }
    // Third case: two concurrent decisions. The store applies either of the two, and refuses the other.
    for round in 0..20 {
        let key = interrupted(&format!("at the same time {round}")).await;
        let resolve = case.decision(&key, 1, Action::Resolve(completed("decided"))).await.by("alice");
        let reopen = case.decision(&key, 1, Action::Reopen).await.by("bob");
        let start = Arc::new(tokio::sync::Barrier::new(2));
        let [one, other] = [resolve, reopen].map(|decision| {
            let (store, start) = (Arc::clone(case.store()), Arc::clone(&start));
            tokio::spawn(async move {
                start.wait().await;
                store.decide(&decision).await
            })
        });
        let mut told = Vec::new();
        for task in [one, other] {
            told.push(case.soon(task, "two decisions").await.expect("no panic").expect("an answer"));
        }
        let record = case.recorded(&key).await.record;
        match &told[..] {
            [DecisionAnswer::Applied, DecisionAnswer::Changed { .. }] => {
                assert_eq!(record.state, completed("decided").state());
            }
            [DecisionAnswer::Changed { .. }, DecisionAnswer::Applied] => assert_eq!(record.state, State::Released),
            _ => panic!("exactly one of two contrary decisions should be applied, the answers were {told:?}"),
        }
    }
}

pub(super) async fn decisions_name_the_seen_record(case: &Case) {
    let changed = async |seen: Decision, standing: Standing, why: &str| {
        assert_eq!(case.decide(&seen).await, DecisionAnswer::changed(standing), "{why}");
        case.changes_nothing(&seen.key, case.decide(&seen), why).await;
    };
    // First case: the attempt has ended since the operator read its record.
    let key = case.key("ended");
    let lease = case.first(&key, OnCrash::Fail).await;
    let seen = case.decision(&key, 1, Action::BreakLease).await;
    assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
    changed(seen, Standing::Interrupted, "a running attempt that was interrupted since").await;
    // Second case: the attempt has finished after the lapse of its lease.
    let key = case.key("late");
    let lease = case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    let decisions = [Action::Reopen, Action::Forget, Action::Resolve(completed("decided")), Action::BreakLease];
    let mut seen = Vec::new();
    for action in decisions {
        seen.push(case.decision(&key, 1, action).await);
    }
    assert_eq!(case.finish(&lease, &completed("late")).await, Verdict::Applied);
    for seen in seen {
        changed(seen, Standing::Completed, "a lapsed attempt that has finished since").await;
    }
    // Third case: a renewal has revived the lease that the operator saw lapsed.
    let key = case.key("renewed");
    let lease = case.first(&key, OnCrash::Retry).await;
    let seen = case.decision(&key, 1, Action::BreakLease).await;
    let seen = Decision { seen: Revision { standing: Standing::Lapsed, ..seen.seen }, ..seen };
    changed(seen, Standing::Running, "a lapsed lease that was renewed since").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the owner can finish");
    // Fourth case: another operator has decided twice, so that the record looks the same as before.
    let (key, _) = case.completed("corrected twice").await;
    let seen = case.decision(&key, 1, Action::Discard).await.by("alice");
    for finish in [completed("2"), completed("1")] {
        assert_eq!(case.decides(&key, 1, Action::Replace(finish)).await, DecisionAnswer::Applied);
    }
    changed(seen, Standing::Completed, "a result that was replaced twice since").await;
    // Fifth case: the key was forgotten, and a new attempt 1 has completed with an equal result.
    let (key, _) = case.completed("forgotten").await;
    let seen = case.decision(&key, 1, Action::Discard).await;
    assert_eq!(case.decides(&key, 1, Action::Forget).await, DecisionAnswer::Applied);
    let lease = case.first(&key, OnCrash::Retry).await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    changed(seen, Standing::Completed, "a key that was forgotten since").await;
    // A decision to break a lease is applied even if the lease has lapsed since: the lease has ended, as the operator
    // intended.
    let key = case.key("lapsed");
    case.reserved(&case.short(&key), 1, "a key that was never used").await;
    let seen = case.decision(&key, 1, Action::BreakLease).await;
    case.lapse().await;
    assert_eq!(case.decide(&seen).await, DecisionAnswer::Applied, "a lease that lapses before it is broken");
}

pub(super) async fn resolve_fences(case: &Case) {
    for (key, late, how) in case.unfinished().await {
        assert_eq!(case.resolve(&key, 1, &completed("decided")).await, DecisionAnswer::Applied, "{how}");
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
        assert_eq!(case.decides(&key, 1, action).await, DecisionAnswer::Applied);
        let after = case.recorded(&key).await.expires_in;
        case.has_left(after, before, earliest, &format!("the retention after `{name}`"));
        assert!(after + PAUSE <= before + TOLERANCE, "`{name}` extended the retention: {before:?}, then {after:?}");
    }
}

/// Breaks the live lease of attempt 1. Checks the state of the record, and that the owner can't write any more.
async fn breaks(case: &Case, key: &Key, lease: &Lease, state: State) {
    let mut before = case.recorded(key).await.record;
    if matches!(before.state, State::Pending { on_crash: OnCrash::Fail, begun: false, .. }) {
        before.attempts_used -= 1;
    }
    for _ in 0..2 {
        assert_eq!(case.decides(key, 1, Action::BreakLease).await, DecisionAnswer::Applied, "a live lease");
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
    case.is_answered(&limited(case.request(&key), 1), exhausted, "an attempt whose lease was broken counts").await;
    let second = case.reserved(&case.request(&key), 2, "a key whose lease was broken").await;
    let told = case.decides(&key, 1, Action::BreakLease).await;
    assert_eq!(told, DecisionAnswer::OtherAttempt { latest: 2 }, "repeated, once the next attempt runs");
    assert_eq!(case.finish(&second, &completed("2")).await, Verdict::Applied);
    let told = case.decides(&key, 2, Action::BreakLease).await;
    assert_eq!(told, DecisionAnswer::Finished, "an attempt that has finished holds no lease");
    let finished = Reservation::finished(Record::after(&second, completed("2").state()));
    case.is_answered(&case.request(&key), finished, "the successor's result").await;
}

pub(super) async fn break_lease_under_fail(case: &Case) {
    let key = case.key("");
    let lease = case.first(&key, OnCrash::Fail).await;
    assert_eq!(case.begin(&lease).await, Verdict::Applied);
    breaks(case, &key, &lease, State::Interrupted).await;
    for on_crash in [OnCrash::Retry, OnCrash::Fail] {
        let request = ReserveRequest { on_crash, ..case.request(&key) };
        case.is_answered(&request, Reservation::Interrupted { attempt: 1 }, "a lease under `fail` that was broken")
            .await;
    }
    assert_eq!(
        case.resolve(&key, 1, &completed("1")).await,
        DecisionAnswer::Applied,
        "an interrupted key can be resolved"
    );

    let key = case.key("before its body");
    let lease = case.first(&key, OnCrash::Fail).await;
    breaks(case, &key, &lease, State::Released).await;
    case.changes_nothing(&key, case.begin(&lease), "a mark that arrives after the lease was broken").await;
    case.reserved(&limited(case.request(&key), 1), 2, "an attempt that never began does not count").await;
}

pub(super) async fn forget_erases(case: &Case) {
    for (key, late, how) in case.unfinished().await {
        assert_eq!(case.decides(&key, 1, Action::Forget).await, DecisionAnswer::Applied, "{how}");
        assert_eq!(case.inspect(&key).await, None, "{how}, then forgotten: the record is still there");
        assert_eq!(case.decides(&key, 1, Action::Forget).await, DecisionAnswer::NoRecord, "{how}, forgotten twice");
        assert_eq!(case.finish(&late, &completed("late")).await, Verdict::Refused, "{how}, then forgotten");
        assert_eq!(case.renew(&late).await, Verdict::Refused, "{how}, then forgotten");
        let request = marked(limited(case.request(&key), 1), 2);
        let lease = case.reserved(&request, 1, "a key that was forgotten").await;
        assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
        assert_eq!(case.decides(&key, 1, Action::Forget).await, DecisionAnswer::Applied, "a finished record");
        assert_eq!(case.inspect(&key).await, None, "a finished record that was forgotten");
    }
}

pub(super) async fn dropped_decisions(case: &Case) {
    for polls in POLLS {
        for action in actions() {
            let key = case.key(&format!("{polls} {}", action.name()));
            case.first(&key, OnCrash::Fail).await;
            if action != Action::BreakLease {
                assert_eq!(case.decides(&key, 1, Action::BreakLease).await, DecisionAnswer::Applied);
            }
            let before = case.recorded(&key).await.record;
            let decision = case.decision(&key, 1, action.clone()).await;
            abandon(case, case.store().decide(&decision), polls).await;
            let why = format!("`{}`, dropped after {polls} polls", action.name());
            let between = case.inspect(&key).await.map(|found| found.record);
            let repeated = case.decide(&decision).await;
            if action == Action::Forget {
                assert!(between.is_none() || between == Some(before), "{why}, half done: {between:?}");
                assert!(
                    matches!(repeated, DecisionAnswer::Applied | DecisionAnswer::NoRecord),
                    "{why}, repeated: {repeated:?}"
                );
                assert_eq!(case.inspect(&key).await, None, "{why}, then repeated");
                continue;
            }
            assert_eq!(repeated, DecisionAnswer::Applied, "{why}, then repeated");
            let after = case.recorded(&key).await.record;
            let is_either = between.as_ref() == Some(&before) || between.as_ref() == Some(&after);
            assert!(is_either, "{why}, half done: {between:?}");
        }
    }
}
