//! Clauses of the store contract about the information for people in a record: holder, times, and decision of
//! an operator.

use super::case::{Case, LONG, PAUSE, TOLERANCE, completed, stored};
use super::journal::journal;
use crate::clock::Instant;
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::{
    Action, Decision, DecisionAnswer, Finish, Holder, Inspection, Lease, Provenance, Release, Reservation,
    ReserveRequest, Traceparent, Verdict,
};

const FIRST: Holder<'static> = Holder::new("host-1/17/first \u{fc}");
const SECOND: Holder<'static> = Holder::new("host-2/18/second");

fn traceparent(digit: char) -> Traceparent {
    let [trace, span] = [32, 16].map(|len| String::from(digit).repeat(len));
    format!("00-{trace}-{span}-01").parse().expect("a `traceparent`")
}

impl Case {
    async fn shows(&self, key: &Key, provenance: &Provenance, when: &str) {
        assert_eq!(self.recorded(key).await.record.provenance, *provenance, "{when}");
    }

    async fn held_by(&self, key: &Key, holder: Holder<'_>) -> Lease {
        let request = ReserveRequest { lease: LONG, ..self.request(key) }.holder(holder);
        self.reserved(&request, 1, "a key that was never used").await
    }
}

pub(super) async fn holder_survives(case: &Case) {
    for end in ["finished", "failed", "released", "interrupted"] {
        let key = case.key(end);
        let request = case.request(&key).holder(FIRST);
        let lease = case.reserved(&request, 1, "a key that was never used").await;
        assert_eq!(lease.provenance, request.provenance, "the lease has the holder of the request");
        case.shows(&key, &request.provenance, "reserved").await;
        assert_eq!(case.renew(&lease).await, Verdict::Applied);
        case.shows(&key, &request.provenance, "renewed").await;
        let ended = match end {
            "finished" => case.finish(&lease, &completed("1")).await,
            "failed" => case.finish(&lease, &Finish::Failed(stored("1"))).await,
            "released" => case.release(&lease, Release::Returned).await,
            _ => case.release(&lease, Release::Interrupted).await,
        };
        assert_eq!(ended, Verdict::Applied);
        case.shows(&key, &request.provenance, end).await;
    }
    let key = case.key("longest");
    let longest = "é".repeat(Holder::MAX_BYTES / 2);
    let request = case.request(&key).holder(Holder::new(&longest));
    case.reserved(&request, 1, "a key that was never used").await;
    assert_eq!(case.recorded(&key).await.holder(), Some(Holder::new(&longest)), "the longest name");
}

pub(super) async fn holder_is_the_latest(case: &Case) {
    let key = case.key("lapsed");
    case.reserved(&case.short(&key).holder(FIRST), 1, "a key that was never used").await;
    case.lapse().await;
    let second = case.request(&key).holder(SECOND);
    case.takes_over(&second, 2, "a lapsed lease").await;
    case.shows(&key, &second.provenance, "taken over").await;

    let key = case.key("released");
    let lease = case.held_by(&key, FIRST).await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let nobody = case.request(&key);
    case.reserved(&nobody, 2, "a released key").await;
    case.shows(&key, &Provenance::default(), "the next attempt, without a holder").await;
}

pub(super) async fn traceparent_survives(case: &Case) {
    let key = case.key("");
    let traced = case.short(&key).holder(FIRST).traceparent(traceparent('a'));
    case.reserved(&traced, 1, "a key that was never used").await;
    case.shows(&key, &traced.provenance, "reserved").await;
    case.lapse().await;
    let second = case.request(&key).holder(SECOND).traceparent(traceparent('b'));
    let lease = case.takes_over(&second, 2, "a lapsed lease").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    for _ in 0..2 {
        match case.reserve(&case.request(&key).traceparent(traceparent('c'))).await {
            Reservation::Finished { record, .. } => {
                let of_the_run = Some(traceparent('b'));
                assert_eq!(
                    record.provenance.traceparent(),
                    of_the_run,
                    "a replay has the trace of the run that made its result"
                );
            }
            other => panic!("should be replayed, was answered {other:?}"),
        }
    }
    let key = case.key("alone");
    let lease = case.reserved(&case.request(&key).traceparent(traceparent('a')), 1, "a key that was never used").await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    case.reserved(&case.request(&key), 2, "a released key").await;
    case.shows(&key, &Provenance::default(), "the next attempt, without a trace").await;
}

impl Case {
    /// Checks that the key of the record was first seen, and that its latest attempt began, within the given intervals.
    async fn shown_since(&self, key: &Key, [seen, began]: [(Instant, Instant); 2], when: &str) -> Inspection {
        let asked = self.now();
        let found = self.recorded(key).await;
        for (told, (earliest, latest), what) in
            [(found.first_seen, seen, "the key was first seen"), (found.began, began, "the attempt began")]
        {
            let ago = told.unwrap_or_else(|| panic!("{when}: the record has no time since {what}"));
            let least = asked.saturating_since(latest).saturating_sub(TOLERANCE);
            let most = self.since(earliest) + TOLERANCE;
            assert!(ago >= least && ago <= most, "{when}: {what} {ago:?} ago, not between {least:?} and {most:?}");
        }
        found
    }
}

pub(super) async fn times_are_shown(case: &Case) {
    // First case: renewals and the release of the first attempt change no time.
    let key = case.key("");
    let before = case.now();
    let first = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let first_at = (before, case.now());
    case.sleep(PAUSE).await;
    case.shown_since(&key, [first_at, first_at], "reserved").await;
    for _ in 0..2 {
        assert_eq!(case.renew(&first).await, Verdict::Applied);
        case.sleep(PAUSE).await;
        case.shown_since(&key, [first_at, first_at], "renewed").await;
    }
    assert_eq!(case.release(&first, Release::Returned).await, Verdict::Applied);
    case.sleep(PAUSE).await;
    case.shown_since(&key, [first_at, first_at], "released").await;

    // Second case: a second attempt, by a reservation, changes only the time when the latest attempt began.
    let before = case.now();
    case.reserved(&case.short(&key), 2, "a released key").await;
    let second_at = (before, case.now());
    case.lapse().await;
    case.shown_since(&key, [first_at, second_at], "the second attempt").await;
    case.sleep(PAUSE).await;

    // Third case: a takeover changes only the time when the latest attempt began. The end of the attempt and decisions
    // change no time.
    let before = case.now();
    let third = case.takes_over(&case.request(&key), 3, "a lapsed lease").await;
    let third_at = (before, case.now());
    case.sleep(PAUSE).await;
    case.shown_since(&key, [first_at, third_at], "taken over").await;
    assert_eq!(case.finish(&third, &completed("1")).await, Verdict::Applied);
    case.sleep(PAUSE).await;
    case.shown_since(&key, [first_at, third_at], "finished").await;
    assert_eq!(case.reopen(&key, 3).await, Verdict::Applied);
    case.shown_since(&key, [first_at, third_at], "reopened").await;
    let before = case.now();
    let fourth = case.reserved(&case.request(&key), 4, "a reopened key").await;
    let fourth_at = (before, case.now());
    case.sleep(PAUSE).await;
    assert_eq!(case.decides(&key, 4, Action::BreakLease).await, DecisionAnswer::Applied);
    case.sleep(PAUSE).await;
    case.shown_since(&key, [first_at, fourth_at], "its lease was broken").await;
    drop(fourth);

    // Fourth case: the record is finished by the first write after the reservation.
    let key = case.key("at once");
    let before = case.now();
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let at = (before, case.now());
    case.sleep(PAUSE).await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    case.sleep(PAUSE).await;
    case.shown_since(&key, [at, at], "finished").await;

    // Fifth case: the journals of the first and of the second attempt change no time.
    let key = case.key("journal");
    let before = case.now();
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let first_at = (before, case.now());
    case.sleep(PAUSE).await;
    for steps in ["1", "12"] {
        assert_eq!(case.append(&lease, &journal(steps)).await, Verdict::Applied);
        case.sleep(PAUSE).await;
        case.shown_since(&key, [first_at, first_at], "journaled").await;
    }
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let before = case.now();
    let lease = case.reserved(&case.request(&key), 2, "a released key").await;
    let second_at = (before, case.now());
    case.sleep(PAUSE).await;
    assert_eq!(case.append(&lease, &journal("123")).await, Verdict::Applied);
    case.shown_since(&key, [first_at, second_at], "journaled by the second attempt").await;

    // Sixth case: the record expires, and its times expire with it.
    let key = case.key("forgotten");
    let brief = ReserveRequest { ttl: super::case::SHORT, ..case.request(&key) };
    let lease = case.reserved(&brief, 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    case.lapse().await;
    case.sleep(PAUSE).await;
    let before = case.now();
    case.reserved(&case.request(&key), 1, "a forgotten key").await;
    let at = (before, case.now());
    case.shown_since(&key, [at, at], "forgotten, and seen again").await;
}

pub(super) async fn replays_show_their_age(case: &Case) {
    let replayed = async |key: &Key, [began, ended]: [Instant; 2], when: &str| {
        for _ in 0..3 {
            let asked = case.now();
            let age = match case.reserve(&case.request(key)).await {
                Reservation::Finished { age, .. } => age,
                other => panic!("{when}: should be replayed, was answered {other:?}"),
            };
            let age = age.unwrap_or_else(|| panic!("{when}: the replay has no age"));
            let least = asked.saturating_since(ended).saturating_sub(TOLERANCE);
            let most = case.since(began) + TOLERANCE;
            assert!(age >= least && age <= most, "{when}: {age:?} old, not between {least:?} and {most:?}");
            case.sleep(PAUSE).await;
        }
    };
    for (name, finish) in [("completed", completed("1")), ("failed", Finish::Failed(stored("1")))] {
        let (key, began) = (case.key(name), case.now());
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        case.sleep(PAUSE).await;
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied);
        replayed(&key, [began, case.now()], name).await;
    }

    // The age of a replayed record is the time since the start of the attempt that made the result, not since the first
    // use of the key.
    let key = case.key("taken over");
    case.reserved(&case.short(&key), 1, "a key that was never used").await;
    case.lapse().await;
    case.sleep(PAUSE).await;
    let began = case.now();
    let lease = case.takes_over(&case.request(&key), 2, "a lapsed lease").await;
    assert_eq!(case.renew(&lease).await, Verdict::Applied);
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    let ended = case.now();
    replayed(&key, [began, ended], "taken over").await;
    // A repeated `finish` does not reset the age.
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    replayed(&key, [began, ended], "finished again").await;
}

pub(super) async fn decision_is_named(case: &Case) {
    let fail = |key: &Key| ReserveRequest { on_crash: OnCrash::Fail, ..case.request(key) }.holder(FIRST);
    let reason = "é".repeat(Provenance::MAX_REASON_BYTES / 2);
    let by = "a".repeat(Provenance::MAX_BY_BYTES);
    // Each decision replaces the name and the reason of the previous decision.
    for action in [Action::Reopen, Action::Resolve(completed("1")), Action::BreakLease] {
        let name = action.name();
        let key = case.key(name);
        let request = fail(&key);
        let lease = case.reserved(&request, 1, "a key that was never used").await;
        if name != "break_lease" {
            assert_eq!(case.release(&lease, Release::Interrupted).await, Verdict::Applied);
        }
        case.shows(&key, &request.provenance, "nobody has decided").await;
        let decision = case.decision(&key, 1, action.clone()).await.by(&*by).reason(&*reason);
        for _ in 0..2 {
            assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied);
            case.shows(&key, &request.provenance.with_decision(&by, &reason), name).await;
        }
        let again = case.decision(&key, 1, action.clone()).await.by("bob");
        assert_eq!(case.decide(&again).await, DecisionAnswer::Applied);
        case.shows(&key, &request.provenance.with_decision("bob", ""), "the last decision").await;
        assert_eq!(case.decides(&key, 1, action).await, DecisionAnswer::Applied);
        case.shows(&key, &request.provenance, "a decision without a name").await;
    }

    // A refused decision records no name. The name in an applied decision stays in the records of later attempts.
    let key = case.key("kept");
    let lease = case.held_by(&key, FIRST).await;
    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
    let refused = case.decision(&key, 2, Action::Reopen).await.by("alice").reason("INC-7");
    assert_eq!(case.decide(&refused).await, DecisionAnswer::OtherAttempt { latest: 1 });
    assert_eq!(case.recorded(&key).await.decided_by(), None, "a decision that was refused");
    assert_eq!(case.decide(&Decision { seen: refused.seen.with_attempt(1), ..refused }).await, DecisionAnswer::Applied);
    let request = case.request(&key).holder(SECOND);
    let lease = case.reserved(&request, 2, "a reopened key").await;
    let provenance = request.provenance.with_decision("alice", "INC-7");
    assert_eq!(lease.provenance, provenance, "the next attempt keeps the name and the reason of the operator");
    case.shows(&key, &provenance, "the next attempt keeps the name and the reason of the operator").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    case.shows(&key, &provenance, "the result of the next attempt").await;
}
