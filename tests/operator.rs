//! Decisions of an operator about a record, through `store.operator()`.

use std::time::Duration;

use futures::FutureExt as _;
use idem_runtime::clock::ManualClock;
use idem_runtime::operator::{OperatorError, Resolution};
use idem_runtime::store::{Cursor, Filter, Standing};
use idem_runtime::testing::{Fault, FaultyStore, StoreCall};
use idem_runtime::{Error, Key, MemoryStore, Store, StoreErrorKind, StoreExt, idempotent};

const LEASE: Duration = Duration::from_secs(30);

#[idempotent(key = "{order}", ttl = "7d", lease = "30s", store = store, scope = "pay", on_crash = fail)]
async fn pay(store: &dyn Store, order: u64, hangs: bool) -> Result<String, Error> {
    if hangs {
        std::future::pending::<()>().await;
    }
    Ok("paid".to_owned())
}

/// Store in which the payment for order 42 is interrupted.
async fn interrupted() -> (ManualClock, MemoryStore, Key) {
    let clock = ManualClock::new();
    let store = MemoryStore::options().clock(clock.clone()).namespace("shop:").build();
    let mut runs = Box::pin(pay(&store, 42, true));
    assert!(futures::poll!(&mut runs).is_pending());
    drop(runs);
    let error = pay(&store, 42, false).await.unwrap_err();
    let key = error.key().expect("the error names its key").clone();
    assert!(matches!(error, Error::Interrupted { .. }));
    (clock, store, key)
}

#[tokio::test]
async fn a_result_that_an_operator_records_is_replayed_by_the_handler() {
    let (_clock, store, key) = interrupted().await;
    let operator = store.operator().by("alice").reason("INC-7");
    let found = operator.inspect(&key).await.unwrap().unwrap();
    let receipt = Resolution::completed(&"receipt".to_owned()).unwrap();
    for _ in 0..2 {
        operator.resolve(&key, &found, receipt.clone()).await.unwrap();
        assert_eq!(pay(&store, 42, true).await.unwrap(), "receipt");
    }
    let other = Resolution::completed(&"other".to_owned()).unwrap();
    let refused = operator.resolve(&key, &found, other.clone()).await.unwrap_err();
    assert!(matches!(refused, OperatorError::Changed { .. }), "{refused}");
    let now = operator.inspect(&key).await.unwrap().unwrap();
    let refused = operator.resolve(&key, &now, other.clone()).await.unwrap_err();
    assert!(matches!(refused, OperatorError::Finished { .. }), "{refused}");
    assert!(refused.to_string().contains("replace the result if it is wrong"), "{refused}");
    assert_eq!(pay(&store, 42, true).await.unwrap(), "receipt");
    operator.replace(&key, &now, other).await.unwrap();
    assert_eq!(pay(&store, 42, true).await.unwrap(), "other");
}

#[tokio::test]
async fn the_later_of_two_operators_is_refused_with_the_reason() {
    let (_clock, store, key) = interrupted().await;
    let [alice, bob] = ["alice", "bob"].map(|name| store.operator().by(name));
    let looked = bob.inspect(&key).await.unwrap().unwrap();
    let receipt = Resolution::completed(&"receipt".to_owned()).unwrap();
    alice.resolve(&key, &looked, receipt.clone()).await.unwrap();
    // Bob inspected the record before Alice decided. Bob's decision would let the handler charge the customer again.
    for _ in 0..2 {
        let refused = bob.reopen(&key, &looked).await.unwrap_err();
        assert!(matches!(refused, OperatorError::Changed { standing: Standing::Completed, .. }), "{refused:?}");
        let said = refused.to_string();
        assert!(said.contains("alice has decided about it, and it is completed; nothing was changed"), "{said}");
    }
    assert_eq!(pay(&store, 42, false).await.unwrap(), "receipt");
    // Alice repeats the decision, as if its answer had got lost.
    alice.resolve(&key, &looked, receipt).await.unwrap();
    // Only `discard` removes a recorded result.
    let now = bob.inspect(&key).await.unwrap().unwrap();
    let refused = bob.reopen(&key, &now).await.unwrap_err().to_string();
    assert!(refused.contains("what it recorded stands; discard the result"), "{refused}");
    bob.discard(&key, &now).await.unwrap();
    let refused = alice.replace(&key, &looked, Resolution::completed_without_result()).await.unwrap_err();
    assert!(matches!(refused, OperatorError::Changed { standing: Standing::Released, .. }), "{refused:?}");
    let now = bob.inspect(&key).await.unwrap().unwrap();
    let refused = alice.discard(&key, &now).await.unwrap_err().to_string();
    assert!(refused.contains("has recorded no result; nothing was changed; reopen it"), "{refused}");
}

#[tokio::test]
async fn a_key_that_an_operator_resolves_without_a_result_never_runs_again() {
    for resolution in [Resolution::completed_without_result(), Resolution::failed_without_result()] {
        let (_clock, store, key) = interrupted().await;
        let found = store.operator().inspect(&key).await.unwrap().unwrap();
        store.operator().resolve(&key, &found, resolution).await.unwrap();
        let error = pay(&store, 42, false).await.unwrap_err();
        assert!(matches!(error, Error::ResultUnavailable { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_refused_decision_names_the_reason_and_a_remedy() {
    let (clock, store, key) = interrupted().await;
    let operator = store.operator();
    let look = async || operator.inspect(&key).await.unwrap().unwrap().revision();
    let first = look().await;
    let said = operator.reopen(&key, first.with_attempt(7)).await.unwrap_err().to_string();
    assert!(said.contains("the latest attempt is 1, not 7"), "{said}");
    operator.reopen(&key, first).await.unwrap();
    operator.reopen(&key, first).await.unwrap();
    let mut runs = Box::pin(pay(&store, 42, true));
    assert!(futures::poll!(&mut runs).is_pending());
    let second = look().await;
    let said = operator.resolve(&key, second, Resolution::completed_without_result()).await.unwrap_err().to_string();
    assert!(said.contains("attempt 2 is running") && said.contains("30s"), "{said}");
    operator.break_lease(&key, second).await.unwrap();
    let said = pay(&store, 42, false).await;
    assert!(matches!(said, Err(Error::InProgress { attempt: 2, .. })), "its body is still running here: {said:?}");
    clock.advance(LEASE);
    drop(runs);
    assert!(matches!(pay(&store, 42, false).await, Err(Error::Interrupted { attempt: 2, .. })));
    let broken = look().await;
    assert!(operator.forget(&key, broken).await.unwrap());
    assert!(!operator.forget(&key, broken).await.unwrap());
    let said = operator.reopen(&key, broken).await.unwrap_err().to_string();
    assert!(said.contains("there is no record"), "{said}");
    assert_eq!(pay(&store, 42, false).await.unwrap(), "paid");
}

#[tokio::test]
async fn an_error_of_a_decision_says_whether_to_repeat_the_decision() {
    let (_clock, store, key) = interrupted().await;
    let faulty = FaultyStore::new(&store);
    let found = store.operator().inspect(&key).await.unwrap().unwrap();
    for (fault, words) in [
        (Fault::Before(StoreErrorKind::Unavailable), "nothing was changed"),
        (Fault::After, "the decision may be recorded: repeat it"),
    ] {
        faulty.next(StoreCall::Decide, fault);
        let said = faulty.operator().reopen(&key, &found).await.unwrap_err().to_string();
        assert!(said.contains(words), "{said}");
    }
    faulty.operator().reopen(&key, &found).await.unwrap();
}

#[tokio::test]
async fn an_operator_can_pass_a_key_in_every_form_in_which_keys_are_shown() {
    let (_clock, store, key) = interrupted().await;
    let operator = store.operator();
    for shown in
        ["pay/42", "1/pay/42", "shop:1/pay/42", "\"shop:1/pay/42\"", "`pay/42`", " '1/pay/42'\n", "shop:1/pay/42"]
    {
        assert_eq!(operator.key(shown).unwrap(), key, "{shown}");
    }
    for (shown, words) in
        [("other:1/pay/42", "leave out the namespace"), ("42", "the scope must"), ("", "the scope must")]
    {
        let said = operator.key(shown).unwrap_err().to_string();
        assert!(said.contains(words), "{shown}: {said}");
    }
}

#[tokio::test]
async fn an_inspected_record_shows_its_holder_its_times_and_the_last_decision() {
    let clock = ManualClock::new();
    let store = MemoryStore::options().clock(clock.clone()).holder("worker-7").build();
    let operator = store.operator().by("alice").reason("INC-7");
    let key = operator.key("pay/42").unwrap();
    let mut runs = Box::pin(pay(&store, 42, true));
    assert!(futures::poll!(&mut runs).is_pending());
    clock.advance(Duration::from_secs(5));
    let found = operator.inspect(&key).await.unwrap().unwrap();
    let holder = found.holder().expect("the record of a handler has a holder");
    assert_eq!((holder.process(), holder.name()), (Some(std::process::id()), Some("worker-7")));
    assert!(!holder.host().is_empty());
    assert_eq!((found.standing(), found.decided_by(), found.traceparent()), (Standing::Running, None, None));
    for told in [found.first_seen, found.began] {
        let ago = told.expect("the time of the first sight is known");
        assert!(ago >= Duration::from_millis(4980) && ago <= Duration::from_millis(5020), "{ago:?}");
    }
    assert_eq!(store.peer().context().holder(), holder);
    drop(runs);
    let found = operator.inspect(&key).await.unwrap().unwrap();
    operator.resolve(&key, &found, Resolution::completed_without_result()).await.unwrap();
    let found = operator.inspect(&key).await.unwrap().unwrap();
    assert_eq!((found.decided_by(), found.decided_reason()), (Some("alice"), Some("INC-7")));
    assert_eq!(found.holder().and_then(|holder| holder.name()), Some("worker-7"), "the name of the latest holder");
    assert_eq!(found.standing(), Standing::Completed);
}

#[tokio::test]
async fn stuck_keys_are_listed_and_counted() {
    const EACH: u64 = 1500;
    let clock = ManualClock::new();
    let store = MemoryStore::options().clock(clock.clone()).build();
    let operator = store.operator();
    for order in 0..EACH {
        pay(&store, order, false).await.unwrap();
        assert!(refund(&store, order).now_or_never().is_none());
    }
    let stats = operator.stats(&Filter::new(), u64::MAX).await.unwrap();
    assert_eq!((stats.next, stats.unreadable, stats.scopes.len()), (None, 0, 2));
    assert_eq!(stats.scopes["pay"].of(Standing::Completed), EACH);
    assert_eq!(stats.scopes["refund"].of(Standing::Interrupted), EACH);
    let some = operator.stats(&Filter::new(), 10).await.unwrap();
    assert!(some.total().total() >= 10 && some.next.is_some(), "{some:?}");
    let rest = operator.stats(&Filter::new().after(some.next.clone()), u64::MAX).await.unwrap();
    assert_eq!(rest.total().total() + some.total().total(), 2 * EACH);

    let mut uncertain = Filter::new().uncertain().scope("refund").limit(700);
    let (mut found, mut pages) = (std::collections::HashSet::new(), 0);
    loop {
        let page = operator.list(&uncertain).await.unwrap();
        pages += 1;
        found.extend(page.records.into_iter().map(|(key, _)| key));
        let Some(next) = page.next else { break };
        uncertain = uncertain.after(next);
    }
    assert_eq!(found.len() as u64, EACH);
    assert!(pages >= 3, "{pages} pages");
    let wrong = Filter::new().after(Cursor::new("1/pay/42"));
    assert!(matches!(operator.list(&wrong).await, Err(OperatorError::Unsupported { .. })), "another store's cursor");
}

#[idempotent(key = "{order}", ttl = "7d", store = store, scope = "refund", on_crash = fail)]
async fn refund(store: &dyn Store, order: u64) -> Result<u64, Error> {
    std::future::pending::<()>().await;
    Ok(order)
}

#[tokio::test]
async fn listing_a_store_without_lists_returns_an_error() {
    let store = FaultyStore::new(&MemoryStore::new());
    store.always(StoreCall::List, Fault::Before(StoreErrorKind::Unsupported));
    for refused in [
        store.operator().list(&Filter::new()).await.unwrap_err(),
        store.operator().stats(&Filter::new(), 10).await.unwrap_err(),
    ] {
        assert!(matches!(refused, OperatorError::Unsupported { store: "memory", .. }), "{refused:?}");
    }
    store.always(StoreCall::List, Fault::Before(StoreErrorKind::Unavailable));
    let failed = store.operator().list(&Filter::new()).await.unwrap_err();
    assert!(matches!(failed, OperatorError::Store { key: None, .. }), "{failed:?}");
    assert_eq!(store.count(StoreCall::List), 3);
}
