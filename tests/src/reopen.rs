//! Operator's decision that another attempt may run. Many tests need this decision.

use idem_runtime::store::{Action, Decision, DecisionAnswer, OwnerToken, Standing, StoreFuture, Verdict};
use idem_runtime::{Key, Store};

/// Owner token of a record after `decisions` decisions about the attempt that has `owner`.
pub fn decided(owner: OwnerToken, decisions: u32) -> OwnerToken {
    const DECISION: u128 = 0x517c_c1b7_2722_0a94_fe13_abe8_fa9a_6ee1;
    let moved = DECISION.wrapping_mul(decisions.into());
    OwnerToken::from_bytes(u128::from_be_bytes(*owner.as_bytes()).wrapping_add(moved).to_be_bytes())
}

/// Inspects a key, and then applies [`Decision::reopen`], or [`Decision::discard`] if the record is finished.
pub trait Reopen {
    /// Lets another attempt run if attempt `attempt` is the latest one. Returns `Applied` if the key was reopened.
    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Verdict>;
}

impl<S: Store + ?Sized> Reopen for S {
    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let Some(found) = self.inspect(key).await? else { return Ok(Verdict::Refused) };
            let action = if found.record.is_finished() { Action::Discard } else { Action::Reopen };
            let decision = Decision::new(key, found.revision().with_attempt(attempt), action);
            self.decide(&decision).await.map(Verdict::from)
        })
    }
}

/// Inspects a damaged record, whose reason contains `words`, and forgets the record. Checks that the store refuses
/// every other decision.
pub async fn forget_damaged(store: &dyn Store, key: &Key, words: &str) {
    let found = store.inspect(key).await.unwrap().expect("a damaged record is a record");
    assert_eq!(found.standing(), Standing::Damaged, "{key}");
    assert!(found.damage.as_ref().is_some_and(|why| why.contains(words)), "{key}: {found:?}");
    let reopened = store.decide(&Decision::reopen(key, &found)).await.unwrap();
    assert_eq!(reopened, DecisionAnswer::Damaged, "{key}");
    let again = store.inspect(key).await.unwrap().expect("a refused decision removes nothing");
    assert_eq!(again.revision(), found.revision(), "{key}");
    assert_eq!(store.decide(&Decision::forget(key, &found)).await.unwrap(), DecisionAnswer::Applied, "{key}");
    assert!(store.inspect(key).await.unwrap().is_none(), "{key}");
}
