//! Stores that hand every call on to another one.

use std::sync::Arc;

use super::Store;

/// Implements [`Store`] by handing every call on; without default bodies, a method that is added can't be forgotten.
macro_rules! forward {
    ($(($($generics:tt)*) $store:ty => $target:ident;)*) => { $(
        impl<$($generics)*> $crate::store::Store for $store {
            fn name(&self) -> &'static str {
                self.$target().name()
            }

            fn handle(&self) -> ::std::sync::Arc<dyn $crate::store::Store> {
                self.$target().handle()
            }

            fn upkeep(&self) -> ::std::sync::Arc<dyn $crate::store::Store> {
                self.$target().upkeep()
            }

            fn namespace(&self) -> &str {
                self.$target().namespace()
            }

            fn response_timeout(&self) -> ::std::time::Duration {
                self.$target().response_timeout()
            }

            fn heartbeats(&self) -> &$crate::store::Heartbeats {
                self.$target().heartbeats()
            }

            fn reserve<'a>(&'a self, request: &'a $crate::record::ReserveRequest) -> $crate::store::StoreFuture<'a, $crate::record::Reservation> {
                self.$target().reserve(request)
            }

            fn renew<'a>(
                &'a self,
                leases: &'a [$crate::record::Lease],
                answer: &'a $crate::store::Answers<'a>,
            ) -> $crate::store::StoreFuture<'a, ()> {
                self.$target().renew(leases, answer)
            }

            fn finish<'a>(
                &'a self,
                lease: &'a $crate::record::Lease,
                finish: &'a $crate::record::Finish,
            ) -> $crate::store::StoreFuture<'a, $crate::record::Verdict> {
                self.$target().finish(lease, finish)
            }

            fn release<'a>(
                &'a self,
                lease: &'a $crate::record::Lease,
                release: $crate::record::Release,
            ) -> $crate::store::StoreFuture<'a, $crate::record::Verdict> {
                self.$target().release(lease, release)
            }

            fn wait<'a>(
                &'a self,
                key: &'a $crate::key::Key,
                attempt: u32,
                at_most: ::std::time::Duration,
            ) -> $crate::store::StoreFuture<'a, ()> {
                self.$target().wait(key, attempt, at_most)
            }

            fn inspect<'a>(&'a self, key: &'a $crate::key::Key) -> $crate::store::StoreFuture<'a, Option<$crate::record::Inspection>> {
                self.$target().inspect(key)
            }

            fn reopen<'a>(&'a self, key: &'a $crate::key::Key, attempt: u32) -> $crate::store::StoreFuture<'a, $crate::record::Verdict> {
                self.$target().reopen(key, attempt)
            }
        }
    )* };
}

#[allow(unused_imports, reason = "without a store of the library nobody else forwards")]
pub(crate) use forward;

forward! {
    (S: Store + ?Sized) Arc<S> => as_ref;
    (S: Store + ?Sized) Box<S> => as_ref;
}
