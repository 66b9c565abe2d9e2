//! What wrappers have in common: they are stores around another one, and hand most calls on.

/// The methods of [`Store`](crate::Store) in which no wrapper differs from the store it is around, for a type with the
/// fields `this` (its own `Weak`) and `inner` (that store).
macro_rules! hand_on {
    () => {
        fn name(&self) -> &'static str {
            self.inner.name()
        }

        fn handle(&self) -> ::std::sync::Arc<dyn $crate::Store> {
            self.this.upgrade().expect("alive while it is borrowed")
        }

        fn heartbeats(&self) -> &$crate::Heartbeats {
            self.inner.heartbeats()
        }

        fn renew<'a>(&'a self, leases: &'a [$crate::Lease]) -> $crate::StoreFuture<'a, Vec<$crate::Write>> {
            self.inner.renew(leases)
        }

        fn release<'a>(
            &'a self,
            lease: &'a $crate::Lease,
            release: $crate::Release,
        ) -> $crate::StoreFuture<'a, $crate::Write> {
            self.inner.release(lease, release)
        }

        fn wait<'a>(
            &'a self,
            key: &'a $crate::Key,
            attempt: u32,
            at_most: ::std::time::Duration,
        ) -> $crate::StoreFuture<'a, ()> {
            self.inner.wait(key, attempt, at_most)
        }
    };
}
pub(crate) use hand_on;
