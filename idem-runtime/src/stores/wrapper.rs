//! What wrappers share: they are stores around another one, and pass most calls on.

use std::sync::{Arc, OnceLock, Weak};

use crate::store::Store;

/// The upkeep handle of a wrapper around a store: the same wrapper around the store's upkeep handle, made once. If the
/// store has no separate upkeep handle, neither has the wrapper.
pub(crate) fn upkeep<W: Store>(
    this: &Weak<W>,
    inner: &Arc<dyn Store>,
    made: &OnceLock<Arc<W>>,
    around: impl FnOnce(Arc<dyn Store>) -> Arc<W>,
) -> Arc<dyn Store> {
    if let Some(made) = made.get() {
        return Arc::clone(made) as _;
    }
    let its = inner.upkeep();
    match Arc::ptr_eq(&its, inner) {
        // Not kept: it would keep itself alive.
        true => this.upgrade().expect("alive while it is borrowed"),
        false => Arc::clone(made.get_or_init(|| around(its))) as _,
    }
}

/// The methods of [`Store`](crate::Store) that every wrapper passes on unchanged, for a type with the fields `this` (its
/// own `Weak`) and `inner` (the store it is around).
macro_rules! hand_on {
    () => {
        fn name(&self) -> &'static str {
            self.inner.name()
        }

        fn handle(&self) -> ::std::sync::Arc<dyn $crate::store::Store> {
            self.this.upgrade().expect("alive while it is borrowed")
        }

        fn namespace(&self) -> &str {
            self.inner.namespace()
        }

        fn response_timeout(&self) -> ::std::time::Duration {
            self.inner.response_timeout()
        }

        fn heartbeats(&self) -> &$crate::store::Heartbeats {
            self.inner.heartbeats()
        }

        fn renew<'a>(
            &'a self,
            leases: &'a [$crate::record::Lease],
            answer: &'a $crate::store::Answers<'a>,
        ) -> $crate::store::StoreFuture<'a, ()> {
            self.inner.renew(leases, answer)
        }

        fn release<'a>(
            &'a self,
            lease: &'a $crate::record::Lease,
            release: $crate::record::Release,
        ) -> $crate::store::StoreFuture<'a, $crate::record::Verdict> {
            self.inner.release(lease, release)
        }

        fn wait<'a>(
            &'a self,
            key: &'a $crate::key::Key,
            attempt: u32,
            at_most: ::std::time::Duration,
        ) -> $crate::store::StoreFuture<'a, ()> {
            self.inner.wait(key, attempt, at_most)
        }
    };
}
pub(crate) use hand_on;
