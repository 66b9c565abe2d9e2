//! An operator's decision as tests mostly need it: to let the next delivery run.

use idem_runtime::store::{Decision, StoreFuture, Verdict};
use idem_runtime::{Key, Store};

/// [`Decision::reopen`] in one call; for every store.
pub trait Reopen {
    /// Whether the key was reopened.
    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Verdict>;
}

impl<S: Store + ?Sized> Reopen for S {
    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move { self.decide(&Decision::reopen(key, attempt)).await.map(Verdict::from) })
    }
}
