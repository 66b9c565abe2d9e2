//! Clauses of the store contract about lists of records.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;

use super::case::{Case, LONG, PAUSE, TOLERANCE, completed, marked, stored};
use crate::key::Key;
use crate::policy::OnCrash;
use crate::record::{Finish, Holder, Inspection, Release, ReserveRequest, State, StoredResult, Verdict};
use crate::store::{Cursor, Filter, Page, Standing, StoreErrorKind};

/// Largest number of pages in a list, so that an endless list fails the test.
const PAGES: usize = 20_000;

/// Content of all pages of a list.
pub(super) struct ListPages {
    pub(super) records: HashMap<Key, Inspection>,
    pages: usize,
}

impl Case {
    /// Returns two scopes: a longer scope that starts with the scope of this run, and the scope of this run.
    pub(super) fn scopes(&self) -> [String; 2] {
        let scope = format!("{}:{}", self.clause, self.run);
        [format!("{scope}x"), scope]
    }

    /// Returns all pages of `filter`; `None` if the store can't list records.
    pub(super) async fn listed(&self, filter: &Filter, why: &str) -> Option<ListPages> {
        let mut scans = false;
        let mut filter = filter.clone();
        let mut listed = ListPages { records: HashMap::new(), pages: 0 };
        for _ in 0..PAGES {
            let answer = self.soon(self.store().list(&filter), why).await;
            let Page { records, next, .. } = match answer {
                Ok(page) => page,
                Err(error) if error.kind() == StoreErrorKind::Unsupported && filter.after.is_none() => {
                    if scans {
                        return None;
                    }
                    scans = true;
                    filter = filter.scan();
                    continue;
                }
                Err(error) => panic!("{why}: {}", super::case::chain(&error)),
            };
            listed.pages += 1;
            assert!(scans || records.len() <= filter.limit as usize, "{why}: a page has more records than its limit");
            for (key, inspection) in records {
                let before = listed.records.insert(key.clone(), inspection);
                assert!(scans || before.is_none(), "{why}: {key} is shown twice");
            }
            // The cursor is parsed from its text, because a tool stores a cursor as text.
            let Some(next) = next else { return Some(listed) };
            filter.after = next.to_string().parse::<Cursor>().ok();
        }
        panic!("{why}: the list has no end after {PAGES} pages");
    }

    pub(super) async fn shown(&self, filter: &Filter, why: &str) -> Option<HashSet<Key>> {
        Some(self.listed(filter, why).await?.records.into_keys().collect())
    }
}

pub(super) fn key(scope: &str, name: &str) -> Key {
    Key::new(scope, name).expect("a short key")
}

pub(super) async fn list_shows_each_once(case: &Case) {
    let [other, scope] = case.scopes();
    let mut expected = HashSet::new();
    for n in 0..7 {
        // The names contain capital letters, small letters, and letters beyond ASCII: the store may sort names in any
        // order, but each page must continue the order of the previous page.
        let name = ["a", "B", "b/c", "ü", "%", "~", "1"][n];
        for scope in [&scope, &other] {
            case.reserved(&case.request(&key(scope, name)), 1, "a key that was never used").await;
        }
        expected.insert(key(&scope, name));
    }
    for limit in [1, 2, 3, 7, 100] {
        let filter = Filter::new().scope(&*scope).limit(limit);
        let why = format!("a list by {limit}");
        let Some(shown) = case.shown(&filter, &why).await else { return };
        assert_eq!(shown, expected, "{why}");
    }
    let all = case.shown(&Filter::new().limit(Filter::MAX_LIMIT), "a list of all scopes").await.unwrap_or_default();
    assert!(all.is_superset(&expected), "a list of all scopes");
    assert!(all.contains(&key(&other, "a")), "a list of all scopes");
}

pub(super) async fn list_filters(case: &Case) {
    let [_, scope] = case.scopes();
    let mut expected: HashMap<Standing, Key> = HashMap::new();
    // The test makes a record of each standing except `Damaged`, which no operation of a store can make.
    for standing in Standing::ALL.into_iter().filter(|standing| *standing != Standing::Damaged) {
        let key = key(&scope, standing.name());
        let request = match standing {
            Standing::Lapsed => case.short(&key),
            _ => case.request(&key),
        };
        let lease = case.reserved(&request, 1, "a key that was never used").await;
        let ended = match standing {
            Standing::Running | Standing::Lapsed | Standing::Damaged => Verdict::Applied,
            Standing::Released => case.release(&lease, Release::Returned).await,
            Standing::Interrupted => case.release(&lease, Release::Interrupted).await,
            Standing::Completed => case.finish(&lease, &completed("1")).await,
            Standing::Failed => case.finish(&lease, &Finish::Failed(stored("1"))).await,
        };
        assert_eq!(ended, Verdict::Applied);
        expected.insert(standing, key);
    }
    // Two further records: an expired record, and a young one.
    let brief = ReserveRequest { ttl: super::case::SHORT, ..case.request(&key(&scope, "gone")) };
    let lease = case.reserved(&brief, 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &completed("1")).await, Verdict::Applied);
    let old_since = case.now();
    case.lapse().await;
    case.sleep(PAUSE).await;
    let young_since = case.now();
    let young = key(&scope, "young");
    case.reserved(&case.request(&young), 1, "a key that was never used").await;

    // Checks lists by standing.
    for (standing, key) in &expected {
        let filter = Filter::new().scope(&*scope).standing(*standing).limit(1);
        let why = format!("the {standing} records");
        let Some(shown) = case.shown(&filter, &why).await else { return };
        let running = (*standing == Standing::Running).then(|| young.clone());
        assert_eq!(shown, [key.clone()].into_iter().chain(running).collect(), "{why}");
    }
    let uncertain = Filter::new().scope(&*scope).uncertain();
    let both = [Standing::Lapsed, Standing::Interrupted].map(|standing| expected[&standing].clone());
    assert_eq!(case.shown(&uncertain, "uncertain records").await, Some(HashSet::from(both)));
    // Checks lists by a part of the key, and by attempts. Only the released attempt counts: the body of the lapsed
    // attempt may never have begun.
    let released = expected[&Standing::Released].clone();
    for (filter, shown, why) in [
        (Filter::new().contains("/release"), Some(&released), "records whose key contains a text"),
        (Filter::new().contains("/RELEASE"), None, "records whose key contains a text in capital letters"),
        (Filter::new().attempts_exhausted(NonZeroU32::MIN), Some(&released), "records without an attempt left"),
        (Filter::new().attempts_exhausted(NonZeroU32::MAX), None, "records that have used all attempts there are"),
    ] {
        let shown: HashSet<Key> = shown.cloned().into_iter().collect();
        assert_eq!(case.shown(&filter.scope(&*scope), why).await, Some(shown), "{why}");
    }
    // Checks the list of records that wait for a decision: the lapsed record, under `on_crash = retry`, waits for none.
    let undecided = Filter::new().scope(&*scope).undecided();
    let interrupted = HashSet::from([expected[&Standing::Interrupted].clone()]);
    assert_eq!(case.shown(&undecided, "undecided records").await, Some(interrupted), "undecided records");
    let all: HashSet<Key> = expected.into_values().chain([young.clone()]).collect();
    // Checks lists by scope and age.
    let shown = case.shown(&Filter::new().scope(&*scope), "all records of a scope").await;
    assert_eq!(shown.as_ref(), Some(&all), "all records of a scope");
    let age = case.since(old_since);
    let old = Filter::new().scope(&*scope).older_than(age.saturating_sub(TOLERANCE));
    let mut shown = case.shown(&old, "old records of a scope").await.unwrap_or_default();
    // A slow store may list the young record after it has grown old enough.
    let still_young = case.since(young_since) + TOLERANCE * 2 < age;
    assert!(!(shown.remove(&young) && still_young), "old records of a scope: a young record is shown");
    let expected: HashSet<Key> = all.into_iter().filter(|key| *key != young).collect();
    assert_eq!(shown, expected, "old records of a scope");
    let ancient = Filter::new().scope(&*scope).older_than(LONG);
    assert_eq!(case.shown(&ancient, "older than any").await, Some(HashSet::new()), "older than any");
}

pub(super) async fn list_and_inspect_agree(case: &Case) {
    let [_, scope] = case.scopes();
    let running = key(&scope, "running");
    let request = marked(ReserveRequest { on_crash: OnCrash::Fail, ..case.request(&running) }, 1);
    case.reserved(&request.holder(Holder::new("host/1/name")), 1, "a key that was never used").await;
    let completed = key(&scope, "completed");
    let lease = case.reserved(&case.request(&completed), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &Finish::Completed(stored(vec![b'x'; 9000]))).await, Verdict::Applied);
    let missing = key(&scope, "without a result");
    let lease = case.reserved(&case.request(&missing), 1, "a key that was never used").await;
    assert_eq!(case.finish(&lease, &Finish::Failed(StoredResult::TooLarge { size: 7 })).await, Verdict::Applied);

    let filter = Filter::new().scope(&*scope);
    let Some(ListPages { records, pages }) = case.listed(&filter, "a list").await else { return };
    assert!(pages > 0 && records.len() == 3, "{records:?}");
    for (key, mut shown) in records {
        let inspected = case.recorded(&key).await;
        if let State::Completed(result) = &shown.record.state {
            assert!(matches!(result, StoredResult::LeftOut { .. }), "a list shows a result: {result:?}");
            shown.record.state = inspected.record.state.clone();
        }
        assert_eq!(shown.record, inspected.record, "{key} in a list and inspected");
        assert_eq!(shown.lapses_in.is_some(), inspected.lapses_in.is_some(), "{key}");
        for (shown, inspected) in [
            (Some(shown.expires_in), Some(inspected.expires_in)),
            (shown.lapses_in, inspected.lapses_in),
            (inspected.first_seen, shown.first_seen),
            (inspected.began, shown.began),
        ] {
            // Between the two reads the remaining times decrease, and the ages increase.
            let (Some(shown), Some(inspected)) = (shown, inspected) else { continue };
            assert!(shown + TOLERANCE >= inspected, "{key}: {shown:?} in a list, {inspected:?} inspected");
        }
    }
}

pub(super) async fn ping_is_answered(case: &Case) {
    for _ in 0..2 {
        case.ask(case.store().ping(), "ping").await;
    }
    let Some(store) = &case.subject.unreachable else { return };
    let answer = case.soon(store.ping(), "ping").await;
    assert!(answer.is_err(), "an unreachable store answered a ping");
    for filter in [Filter::new(), Filter::new().scan()] {
        let answer = case.soon(store.list(&filter), "list").await;
        assert!(answer.is_err(), "an unreachable store answered a list: {answer:?}");
    }
}
