//! Clauses of the store contract about handles, dropped futures and unreachable servers.

use std::collections::HashSet;

use super::case::{Case, LONG, PAUSE, abandon, completed, stored};
use super::decisions::{actions, corrections};
use super::listing::{self, ListPages};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::standing::Standing;
use crate::record::{
    Action, Decision, DecisionAnswer, Finish, Inspection, Provenance, Record, Release, Reservation, ReserveRequest,
    Revision, State, Verdict,
};
use crate::store::{Filter, Store, StoreError, StoreErrorKind, StoreFuture, renew_all};

/// Numbers of polls after which tests drop a call.
const POLLS: std::ops::Range<usize> = 0..6;

pub(super) async fn handles_share(case: &Case) {
    let store = &case.subject.store;
    let handle = store.handle();
    assert_eq!(handle.context().name(), store.context().name(), "a handle has the name of its store");
    assert!(std::ptr::eq(handle.context(), store.context()), "a handle shares the heartbeats of its store");
    let second = handle.handle();
    drop(handle);
    assert!(std::ptr::eq(second.context(), store.context()), "a handle of a handle shares the heartbeats of the store");

    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let record = case.ask(second.inspect(&key), "inspect").await.expect("a handle sees the records").record;
    assert_eq!(record.owner, lease.owner, "a handle shares the records of its store");
    assert_eq!(
        case.ask(second.finish(&lease, &completed("1")), "finish").await,
        Verdict::Applied,
        "a handle can write"
    );
    assert!(case.recorded(&key).await.record.is_finished(), "the store sees what its handle has written");
}

pub(super) async fn owners_are_unique(case: &Case) {
    const EACH: usize = 10_000;
    let context = [case.subject.store.context(), case.subject.peer.context()];
    let owners: HashSet<_> = (0..2 * EACH).map(|n| context[n % 2].new_owner()).collect();
    assert_eq!(owners.len(), 2 * EACH, "two owner tokens are equal");
}

pub(super) async fn dropped_reserve(case: &Case) {
    for polls in POLLS {
        let key = case.key(&format!("new:{polls}"));
        let dropped = case.request(&key);
        abandon(case, case.store().reserve(&dropped), polls).await;
        // The dropped reservation took effect, did not take effect, or takes effect later. In each case exactly one of
        // the two requests gets the key.
        let other = case.request(&key);
        let answers = [case.reserve(&other).await, case.reserve(&dropped).await];
        let winners = answers.iter().filter(|answer| matches!(answer, Reservation::Granted { .. })).count();
        assert_eq!(winners, 1, "dropped after {polls} polls: {answers:?}");
        let waiting =
            answers.iter().filter(|answer| matches!(answer, Reservation::InProgress { attempt: 1, .. })).count();
        assert_eq!(waiting, 1, "dropped after {polls} polls: {answers:?}");

        let key = case.key(&format!("lapsed:{polls}"));
        case.reserved(&case.short(&key), 1, "a key that was never used").await;
        case.lapse().await;
        let dropped = case.request(&key);
        abandon(case, case.store().reserve(&dropped), polls).await;
        let (lease, _) = case.wins(&dropped, &format!("repeated after a takeover dropped after {polls} polls")).await;
        assert_eq!((lease.attempt, lease.attempts_used), (2, 1), "dropped after {polls} polls: one attempt, not two");
    }
}

pub(super) async fn dropped_reserve_stays_away(case: &Case) {
    const EACH: usize = 40;
    // Cleans up like the engine after a dropped call: reserves again, and releases the lease, until the release
    // succeeds.
    async fn clean_up(case: &Case, upkeep: &dyn Store, dropped: &ReserveRequest) {
        loop {
            let answer = case.ask(upkeep.reserve(dropped), "reserve again to clean up").await;
            let Reservation::Granted { lease, .. } = answer else { return };
            if case.ask(upkeep.release(&lease, Release::NotStarted), "release to clean up").await == Verdict::Applied {
                return;
            }
        }
    }
    let upkeep = case.subject.store.upkeep();
    for polls in POLLS {
        // All rounds run concurrently, because a busy store takes other code paths than an idle one.
        let rounds: Vec<_> = (0..EACH).map(|n| case.key(&format!("{polls}:{n}"))).collect();
        let mut dropping: Vec<_> = rounds
            .iter()
            .enumerate()
            .map(|(n, key)| {
                let upkeep = &upkeep;
                Box::pin(async move {
                    let dropped = case.request(key);
                    // Every second key starts with a released record.
                    if n % 2 == 1 {
                        let lease = case.reserved(&case.request(key), 1, "a key that was never used").await;
                        assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied);
                    }
                    abandon(case, case.subject.store.reserve(&dropped), polls).await;
                    clean_up(case, &**upkeep, &dropped).await;
                    let what = format!("a key whose reservation was dropped after {polls} polls");
                    let (lease, takeover) = case.wins(&case.request(key), &what).await;
                    assert!(!takeover, "{what}: the key was free");
                    assert_eq!(case.release(&lease, Release::Returned).await, Verdict::Applied, "{what}");
                    (lease, what)
                })
            })
            .collect();
        let others = crate::combine::all(&mut dropping).await;
        // The pause gives late requests time to arrive. Afterwards each key must still have the record of the attempt
        // that reserved the key after the clean-up.
        case.sleep(PAUSE).await;
        for (lease, what) in others {
            let expected = Record::after(&lease, State::Released);
            assert_eq!(
                case.recorded(&lease.key).await.record,
                expected,
                "{what}, cleaned up and used by another attempt"
            );
        }
    }
}

pub(super) async fn dropped_begin(case: &Case) {
    for polls in POLLS {
        let key = case.key(&polls.to_string());
        let lease = case
            .reserved(&ReserveRequest { on_crash: OnCrash::Fail, ..case.request(&key) }, 1, "a key that was never used")
            .await;
        abandon(case, case.store().begin(&lease), polls).await;
        let state = case.recorded(&key).await.record.state;
        assert!(matches!(state, State::Pending { .. }), "dropped after {polls} polls: {state:?}");
        assert_eq!(case.begin(&lease).await, Verdict::Applied, "repeated");
        assert_eq!(case.release(&lease, Release::NotStarted).await, Verdict::Applied);
        case.reserved(&ReserveRequest { on_crash: OnCrash::Fail, ..case.request(&key) }, 2, "released").await;
    }
}

pub(super) async fn dropped_renew(case: &Case) {
    for polls in POLLS {
        let key = case.key(&polls.to_string());
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        let before = case.recorded(&key).await.record;
        abandon(case, StoreFuture::new(renew_all(case.store(), std::slice::from_ref(&lease))), polls).await;
        assert_eq!(case.recorded(&key).await.record, before, "dropped after {polls} polls");
        assert_eq!(case.renew(&lease).await, Verdict::Applied, "dropped after {polls} polls, then repeated");
        assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "dropped after {polls} polls");
    }
}

pub(super) async fn dropped_finish(case: &Case) {
    for polls in POLLS {
        let key = case.key(&polls.to_string());
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        let finish = Finish::Completed(stored(vec![b'x'; 1 << 14]));
        let before = case.recorded(&key).await.record;
        let record = Record::after(&lease, finish.state());
        abandon(case, case.store().finish(&lease, &finish), polls).await;
        let between = case.recorded(&key).await.record;
        assert!(between == before || between == record, "dropped after {polls} polls, half written: {between:?}");
        assert_eq!(case.finish(&lease, &finish).await, Verdict::Applied, "dropped after {polls} polls, then repeated");
        assert_eq!(case.recorded(&key).await.record, record, "dropped after {polls} polls, then repeated");
    }
}

pub(super) async fn dropped_release(case: &Case) {
    for polls in POLLS {
        let key = case.key(&polls.to_string());
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        let before = case.recorded(&key).await.record;
        let record = Record { attempts_used: 0, ..Record::after(&lease, State::Released) };
        abandon(case, case.store().release(&lease, Release::NotStarted), polls).await;
        let between = case.recorded(&key).await.record;
        assert!(between == before || between == record, "dropped after {polls} polls, half written: {between:?}");
        let repeated = case.release(&lease, Release::NotStarted).await;
        assert_eq!(repeated, Verdict::Applied, "dropped after {polls} polls, then repeated");
        assert_eq!(case.recorded(&key).await.record, record, "dropped after {polls} polls, then repeated");
        case.reserved(&case.request(&key), 2, "a released key").await;
    }
}

pub(super) async fn dropped_reopen(case: &Case) {
    for polls in POLLS {
        let key = case.key(&polls.to_string());
        let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
        assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
        let decision = case.decision(&key, 1, Action::Discard).await;
        abandon(case, case.store().decide(&decision), polls).await;
        assert_eq!(case.decide(&decision).await, DecisionAnswer::Applied, "dropped after {polls} polls, then repeated");
        case.reserved(&case.request(&key), 2, "a reopened key").await;
    }
}

pub(super) async fn dropped_reads(case: &Case) {
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let before = case.recorded(&key).await.record;
    for polls in POLLS {
        abandon(case, case.store().inspect(&key), polls).await;
        abandon(case, case.store().wait(&key, 1, LONG), polls).await;
        assert_eq!(case.recorded(&key).await.record, before, "dropped after {polls} polls");
    }
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied, "the owner can finish");
}

pub(super) async fn unreachable_store(case: &Case) {
    let Some(store) = &case.subject.unreachable else { return };
    let key = case.key("");
    let request = case.request(&key);
    let lease = Record::first(&request).lease(&request);
    for _ in 0..2 {
        let answer = case.soon(store.reserve(&request), "reserve").await;
        assert!(answer.is_err(), "an unreachable store reserved a key: {answer:?}");
        let answer = case.soon(StoreFuture::new(renew_all(store, std::slice::from_ref(&lease))), "renew").await;
        assert!(answer.is_err(), "an unreachable store answered a renewal: {answer:?}");
        let answer = case.soon(store.finish(&lease, &completed("1")), "finish").await;
        assert!(answer.is_err(), "an unreachable store answered a finish: {answer:?}");
        let answer = case.soon(store.release(&lease, Release::Returned), "release").await;
        assert!(answer.is_err(), "an unreachable store answered a release: {answer:?}");
        let answer = case.soon(store.inspect(&key), "inspect").await;
        assert!(answer.is_err(), "an unreachable store answered an inspection: {answer:?}");
        for action in actions() {
            let decision = Decision::new(&key, super::case::unseen(Standing::Interrupted).with_attempt(1), action);
            let answer = case.soon(store.decide(&decision), decision.action.name()).await;
            assert!(answer.is_err(), "an unreachable store answered `{}`: {answer:?}", decision.action.name());
        }
    }
}

pub(super) async fn foreign_value(case: &Case) {
    let Some(spoil) = &case.subject.spoil else { return };
    let key = case.key("");
    spoil(key.clone()).await;
    let request = case.request(&key);
    let fail = ReserveRequest { on_crash: OnCrash::Fail, ..case.request(&key) };
    let lease = Record::first(&request).lease(&request);
    for _ in 0..2 {
        for request in [&request, &fail] {
            let answer = case.soon(case.store().reserve(request), "reserve").await;
            let kind = answer.as_ref().err().map(StoreError::kind);
            assert_eq!(
                kind,
                Some(StoreErrorKind::Corrupt),
                "a reservation of a foreign value should be `Corrupt`, was answered {answer:?}"
            );
        }
        let answer = case.soon(case.store().wait(&key, 1, LONG), "wait").await;
        let kind = answer.as_ref().err().map(StoreError::kind);
        let says_nothing = matches!(answer, Ok(None)) || kind == Some(StoreErrorKind::Corrupt);
        assert!(says_nothing, "a wait for a foreign value was answered {answer:?}");
        // Each write may fail or be refused, but must not overwrite the foreign value.
        let answer = case.soon(StoreFuture::new(renew_all(case.store(), std::slice::from_ref(&lease))), "renew").await;
        assert!(
            answer.as_ref().map_or(true, |answers| *answers == [Verdict::Refused]),
            "a renewal of a foreign value was answered {answer:?}"
        );
        let answer = case.soon(case.store().finish(&lease, &completed("1")), "finish").await;
        assert!(!matches!(answer, Ok(Verdict::Applied)), "a finish overwrote a foreign value");
        let answer = case.soon(case.store().release(&lease, Release::Returned), "release").await;
        assert!(!matches!(answer, Ok(Verdict::Applied)), "a release overwrote a foreign value");
    }
}

/// Reads a value that is not a record, and checks that the store reports it as damaged.
async fn damaged(case: &Case, key: &Key) -> Inspection {
    let found = case.inspect(key).await.expect("a value that is not a record is no absent record");
    assert_eq!(found.standing(), Standing::Damaged, "a value that is not a record is damaged");
    assert!(found.damage.as_ref().is_some_and(|why| !why.is_empty()), "a damaged record has a reason");
    assert_eq!(
        (found.attempt(), found.record.state.result()),
        (0, None),
        "a damaged record has no attempt and no result"
    );
    assert_eq!(found.record.provenance, Provenance::NONE, "a damaged record has no provenance");
    let revision = found.revision();
    assert_eq!(revision.to_string().parse(), Ok(revision), "the revision of a damaged record is read back");
    assert!(revision.to_string().starts_with("0-damaged-"), "the revision of a damaged record is {revision}");
    found
}

pub(super) async fn damage_is_shown(case: &Case) {
    let Some(spoil) = &case.subject.spoil else { return };
    let [_, scope] = case.scopes();
    let [before, bad, after] = ["a", "b", "c"].map(|name| listing::key(&scope, name));
    for key in [&before, &bad, &after] {
        case.reserved(&case.request(key), 1, "a key that was never used").await;
    }
    spoil(bad.clone()).await;
    let seen = damaged(case, &bad).await.revision();
    assert_eq!(damaged(case, &bad).await.revision(), seen, "two reads of the same value");

    let all = Filter::new().scope(&*scope);
    let (every, healthy) = ([&before, &bad, &after], [&before, &after]);
    for (filter, expected, why) in [
        (all.clone(), &every[..], "all records of a scope"),
        (all.clone().limit(1), &every[..], "one by one"),
        (all.clone().standing(Standing::Running), &healthy[..], "running ones"),
        (all.clone().standing(Standing::Damaged), &[&bad][..], "damaged ones"),
        (all.clone().uncertain(), &[&bad][..], "uncertain ones"),
        (all.clone().uncertain().older_than(LONG), &[&bad][..], "records whose age is unknown"),
        (all.standing(Standing::Completed), &[][..], "completed ones"),
    ] {
        let Some(ListPages { records, .. }) = case.listed(&filter, why).await else { return };
        let shown: HashSet<&Key> = records.keys().collect();
        assert_eq!(shown, expected.iter().copied().collect(), "{why}, next to a damaged record");
        if let Some(found) = records.get(&bad) {
            assert_eq!((found.standing(), found.revision()), (Standing::Damaged, seen), "{why}");
        }
    }
}

pub(super) async fn damage_is_forgotten(case: &Case) {
    let Some(spoil) = &case.subject.spoil else { return };
    let key = case.key("");
    let lease = case.reserved(&case.request(&key), 1, "a key that was never used").await;
    let readable = case.recorded(&key).await.revision();
    let decide = async |seen: Revision, action| case.decide(&Decision::new(&key, seen, action)).await;
    let all = || actions().into_iter().chain(corrections());
    let changed = DecisionAnswer::changed(Standing::Damaged);

    spoil(key.clone()).await;
    let seen = damaged(case, &key).await.revision();
    for action in all() {
        let name = action.name();
        assert_eq!(
            decide(readable, action.clone()).await,
            changed,
            "`{name}` of a record that has been damaged since the decision"
        );
        if action != Action::Forget {
            assert_eq!(decide(seen, action).await, DecisionAnswer::Damaged, "`{name}` of a damaged record");
        }
        assert_eq!(damaged(case, &key).await.revision(), seen, "a refused `{name}` changes nothing");
    }
    spoil(key.clone()).await;
    let now = damaged(case, &key).await.revision();
    assert_ne!(now, seen, "a damaged record that was written has another revision");
    assert_eq!(decide(seen, Action::Forget).await, changed, "`forget` of a damaged record that was written since");
    assert_eq!(damaged(case, &key).await.revision(), now, "a refused `forget` changes nothing");

    assert_eq!(decide(now, Action::Forget).await, DecisionAnswer::Applied, "`forget` of a damaged record");
    assert!(case.inspect(&key).await.is_none(), "a forgotten record is gone");
    assert_eq!(decide(now, Action::Forget).await, DecisionAnswer::NoRecord, "`forget` repeated");
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Refused, "the owner of a forgotten record");
    let next = case.reserved(&case.request(&key), 1, "a forgotten key").await;
    for action in all() {
        let name = action.name();
        let answer = decide(now, action).await;
        assert_eq!(answer, DecisionAnswer::changed(Standing::Running), "`{name}` of a record that was damaged before");
    }
    assert_eq!(case.finish(&next, &completed("2")).await, Verdict::Applied, "the next attempt");
}
